/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What do messages cost? Nanoseconds around one FilterUpdate: the splice, the same by the
 * tables, decoding by the tables and as one of a stream; microseconds to encode and decode a
 * catalog of 64 and of 1 024 pools. The payload is small so that copying it does not hide the rest.
 */

#include "bench.h"
#include "kvrelay_pb.h"

enum { PAYLOAD = 72, MAX_POOLS = 1024 };

static kvrelay_filter_update update;
static kvrelay_pb_filter_prefix prefix;
static kvrelay_pb_filter_stream stream;
static kvrelay_catalog_update catalog;
static kvrelay_descriptor pools[MAX_POOLS];
static uint8_t payload[PAYLOAD], message[512], big[1 << 20];
static uint64_t arena_mem[1 << 18];
static size_t message_len, big_len;

/* ---- work ---- */

static void splice(void) {
  size_t len = kvrelay_pb_filter_head(&prefix, &update, message);
  memcpy(message + len, update.payload, update.payload_len);
  len += update.payload_len;
  memcpy(message + len, kvrelay_pb_filter_tail, KVRELAY_PB_FILTER_TAIL_LEN);
  message_len = len + KVRELAY_PB_FILTER_TAIL_LEN;
  update.sequence++;
}

static void by_tables(void) {
  const ptrdiff_t len = kvrelay_pb_encode_filter(&update, message, sizeof message);
  bench_need(len > 0);
  message_len = (size_t)len;
  update.sequence++;
}

static void decode_filter(void) {
  kvrelay_filter_update m;
  bench_need(kvrelay_pb_decode_filter(message, message_len, NULL, &m) == KVRELAY_OK);
  BENCH_KEEP(m.sequence);
}

static void read_filter(void) {
  kvrelay_filter_update m;
  bench_need(kvrelay_pb_filter_read(&stream, message, message_len, &m) == KVRELAY_OK);
  BENCH_KEEP(m.sequence);
}

static void encode_catalog(void) {
  const ptrdiff_t len = kvrelay_pb_encode_catalog(&catalog, big, sizeof big);
  bench_need(len > 0);
  big_len = (size_t)len;
}

static void decode_catalog(void) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_catalog_update m;
  bench_need(kvrelay_pb_decode_catalog(big, big_len, &arena, &m) == KVRELAY_OK);
  BENCH_KEEP(m.pools_len);
}

/* Nanoseconds that one call of it takes. */
static bench_sample measure(void (*work)(void), int repeat) {
  bench_sample ns = {0};
  for (int run = 0; run < BENCH_RUNS; run++) {
    const double start = bench_cpu_ns();
    for (int i = 0; i < repeat; i++)
      work();
    bench_add(&ns, (bench_cpu_ns() - start) / repeat);
  }
  return ns;
}

static void print(const char *name, void (*work)(void), int repeat) {
  bench_sample ns = measure(work, repeat);
  bench_print(&ns, "ns", "%s", name);
}

/* The same in microseconds, of a catalog. */
static void print_catalog(const char *name, void (*work)(void)) {
  bench_sample us = measure(work, 10);
  for (size_t i = 0; i < us.runs; i++)
    us.value[i] /= 1000;
  bench_print(&us, "us", "%s_%zu_pools", name, catalog.pools_len);
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
  bench_need(kvrelay_pb_filter_prefix_init(&prefix, &update) == KVRELAY_OK);
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

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  fill();
  print("filter_update_splice", splice, 200000);
  print("filter_update_encode", by_tables, 20000);
  print("filter_update_decode", decode_filter, 20000);
  print("filter_update_read", read_filter, 200000);
  static const size_t sizes[] = {64, MAX_POOLS};
  for (size_t i = 0; i < 2; i++) {
    catalog.pools_len = sizes[i];
    print_catalog("catalog_encode", encode_catalog);
    print_catalog("catalog_decode", decode_catalog);
  }
  return 0;
}
