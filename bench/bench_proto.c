/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What do messages cost? Nanoseconds around one FilterUpdate: the splice, the same through nanopb,
 * and decoding; microseconds to encode and decode a catalog of 64 and of 1 024 pools. The payload
 * is small so that copying it does not hide the rest. One JSON line per figure, the best of several
 * rounds.
 */

#include "kvrelay_pb.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 15, PAYLOAD = 72, MAX_POOLS = 1024 };

static kvrelay_filter_update update;
static kvrelay_pb_filter_prefix prefix;
static kvrelay_catalog_update catalog;
static kvrelay_descriptor pools[MAX_POOLS];
static uint8_t payload[PAYLOAD], message[512], big[1 << 20];
static uint64_t arena_mem[1 << 18];
static size_t message_len, big_len;
static volatile uint64_t sink; /* keeps results alive */

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void must(bool good) {
  if (!good)
    abort();
}

/* ---- work ---- */

static void splice(void) {
  size_t len = kvrelay_pb_filter_head(&prefix, &update, message);
  memcpy(message + len, update.payload, update.payload_len);
  len += update.payload_len;
  memcpy(message + len, kvrelay_pb_filter_tail, KVRELAY_PB_FILTER_TAIL_LEN);
  message_len = len + KVRELAY_PB_FILTER_TAIL_LEN;
  update.sequence++;
}

static void through_nanopb(void) {
  const ptrdiff_t len = kvrelay_pb_encode_filter(&update, message, sizeof message);
  must(len > 0);
  message_len = (size_t)len;
  update.sequence++;
}

static void decode_filter(void) {
  kvrelay_filter_update m;
  must(kvrelay_pb_decode_filter(message, message_len, NULL, &m) == KVRELAY_OK);
  sink += m.sequence;
}

static void encode_catalog(void) {
  const ptrdiff_t len = kvrelay_pb_encode_catalog(&catalog, big, sizeof big);
  must(len > 0);
  big_len = (size_t)len;
}

static void decode_catalog(void) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_catalog_update m;
  must(kvrelay_pb_decode_catalog(big, big_len, &arena, &m) == KVRELAY_OK);
  sink += m.pools_len;
}

static double best_ns(void (*run)(void), int repeat) {
  uint64_t best = UINT64_MAX;
  for (int round = 0; round < ROUNDS; round++) {
    const uint64_t start = now_ns();
    for (int i = 0; i < repeat; i++)
      run();
    const uint64_t spent = now_ns() - start;
    best = spent < best ? spent : best;
  }
  return (double)best / repeat;
}

static void report(const char *bench, double value, const char *unit) {
  printf("{\"bench\":\"%s\",\"value\":%.1f,\"unit\":\"%s\"}\n", bench, value, unit);
}

/* ---- material ---- */

static kvrelay_text text(const char *word) {
  const kvrelay_text t = {(const uint8_t *)word, strlen(word)};
  return t;
}

static void fill(void) {
  static const int32_t roles[] = {KVRELAY_ROLE_PREFILL, KVRELAY_ROLE_DECODE};
  static kvrelay_text aliases[2];
  static kvrelay_registration registrations[2];
  const kvrelay_envelope envelope = {KVRELAY_WIRE_VERSION,
                                     true,
                                     {0x1234567890abcdefu, 0x0fedcba987654321u},
                                     KVRELAY_CONTRACT_MARKER};
  const kvrelay_digest digest = {
      true, {1, 2, 3}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_DEFAULT_DERIVED};
  kvrelay_producer producer = {true,
                               {true, 1, {true, digest, digest}, 0x04f110c98b1bfc48u},
                               0x0fedcba987654321u,
                               17,
                               {true, 1, 42, 1 << 20, 16, 4}};
  update = (kvrelay_filter_update){.envelope = envelope,
                                   .producer = producer,
                                   .base_sequence = 100000,
                                   .sequence = 100001,
                                   .send_ts_us = 1700000000000000u,
                                   .kind = KVRELAY_UPDATE_DELTA,
                                   .payload = payload,
                                   .payload_len = PAYLOAD};
  must(kvrelay_pb_filter_prefix_init(&prefix, &update) == KVRELAY_OK);
  aliases[0] = text("chat");
  aliases[1] = text("assistant-large");
  const kvrelay_target base = {
      true, KVRELAY_TARGET_BASE, text("meta-llama/Llama-3.1-70B-Instruct"), {0}};
  const kvrelay_target lora = {true, KVRELAY_TARGET_LORA, base.base_model, text("sql-v1")};
  registrations[0] = (kvrelay_registration){base.base_model, base, aliases, 2};
  registrations[1] = (kvrelay_registration){text("sql"), lora, NULL, 0};
  for (size_t i = 0; i < MAX_POOLS; i++) {
    producer.pool_id.dc_id = i;
    pools[i] = (kvrelay_descriptor){producer,
                                    {true, text("prod"), text("backend"), text("generate")},
                                    registrations,
                                    2,
                                    {true, 64, HASHFMT_FORMAT_STANDARD},
                                    {roles, 2}};
  }
  catalog = (kvrelay_catalog_update){envelope, 1, true, pools, 0};
}

int main(void) {
  fill();
  report("filter_update_splice", best_ns(splice, 200000), "ns");
  report("filter_update_nanopb", best_ns(through_nanopb, 20000), "ns");
  report("filter_update_decode", best_ns(decode_filter, 20000), "ns");
  static const size_t sizes[] = {64, MAX_POOLS};
  for (size_t i = 0; i < 2; i++) {
    char name[64];
    catalog.pools_len = sizes[i];
    snprintf(name, sizeof name, "catalog_encode_%zu_pools", sizes[i]);
    report(name, best_ns(encode_catalog, 10) / 1000, "us");
    snprintf(name, sizeof name, "catalog_decode_%zu_pools", sizes[i]);
    report(name, best_ns(decode_catalog, 10) / 1000, "us");
  }
  return 0;
}
