/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does publishing cost a relay? Deltas of 16 stored blocks to 1, 16 and 64 subscribers that
 * take each one: deltas per second, and frames handed out per second. How long does a snapshot cut
 * hold the thread, for filters of 2^16, 2^19 and 2^22 buckets? One JSON line per figure, the best
 * of several rounds.
 */

#include "kvrelay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 5, DELTAS = 4000, EVENTS = 16, STREAMS = 64 };

static kvrelay_relay relay;
static kvrelay_pool *pool;
static ckf_producer state;
static void *relay_mem, *pool_mem, *state_mem;
static uint64_t next_key;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void print(const char *bench, double value, const char *unit) {
  printf("{\"bench\":\"relay_%s\",\"value\":%.4g,\"unit\":\"%s\"}\n", bench, value, unit);
}

static void need(bool ok) {
  if (!ok)
    abort();
}

static void start(uint64_t expected_blocks) {
  static const int32_t role = KVRELAY_ROLE_AGGREGATED;
  const kvrelay_text x = {(const uint8_t *)"x", 1};
  const kvrelay_digest digest = {true, {1}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  const kvrelay_registration registration = {x, {true, KVRELAY_TARGET_BASE, x, {NULL, 0}}, NULL, 0};
  kvrelay_descriptor d;
  memset(&d, 0, sizeof d);
  d.producer.pool_id.identity_version = 1;
  d.producer.pool_id.domain.present = true;
  d.producer.pool_id.domain.cache_semantics = d.producer.pool_id.domain.routing_scope = digest;
  d.serving_endpoint = (kvrelay_endpoint){true, x, x, x};
  d.query_semantics = (kvrelay_semantics){true, 16, HASHFMT_FORMAT_STANDARD};
  d.registrations = &registration;
  d.registrations_len = 1;
  d.pool_roles = (kvrelay_roles){&role, 1};

  ckf_producer_config producer = ckf_producer_config_default();
  producer.filter.expected_blocks = expected_blocks;
  producer.delta_table = true;
  size_t len = ckf_producer_mem_size(&producer);
  state_mem = malloc(len);
  need(state_mem != NULL && ckf_producer_init(&state, &producer, state_mem, len) == CKF_OK);

  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity.relay_incarnation = 1;
  cfg.max_bucket_count = ckf_producer_format(&state)->bucket_count;
  cfg.encoding_concurrency = 1;
  len = kvrelay_relay_mem_size(&cfg);
  relay_mem = malloc(len);
  need(relay_mem != NULL && kvrelay_relay_init(&relay, &cfg, relay_mem, len, 0) == KVRELAY_OK);
  len = kvrelay_relay_pool_mem_size(&relay, &d);
  pool_mem = malloc(len);
  need(pool_mem != NULL &&
       kvrelay_relay_pool_add(&relay, &d, &state, pool_mem, len, 0, &pool) == KVRELAY_OK);
}

static void stop(void) {
  free(relay_mem);
  free(pool_mem);
  free(state_mem);
}

static void store(unsigned n) {
  static const ckf_member member = {7, 0};
  for (unsigned i = 0; i < n; i++) {
    ckf_outcome outcome;
    const ckf_block block = {next_key, next_key * UINT64_C(0x9E3779B97F4A7C15)};
    next_key++;
    need(ckf_producer_stored(&state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false,
                             0, &block, 1, &outcome) == CKF_OK);
  }
}

static uint64_t subscribe(void) {
  kvrelay_request q;
  kvrelay_status status;
  uint64_t call;
  memset(&q, 0, sizeof q);
  q.method = KVRELAY_METHOD_SUBSCRIBE_POOL;
  q.contract_marker = KVRELAY_CONTRACT_MARKER;
  q.subscriber_id = (kvrelay_text){(const uint8_t *)"bench", 5};
  q.expected_producer = kvrelay_pool_descriptor(pool)->producer;
  need(kvrelay_relay_call_open(&relay, &q, 0, &call, &status) == KVRELAY_OK);
  return call;
}

/* Takes what there is; the number of messages. */
static unsigned take(uint64_t call) {
  kvrelay_outgoing out;
  unsigned n = 0;
  int got;
  while ((got = kvrelay_relay_call_pull(&relay, call, 0, 0, &out)) == KVRELAY_PULL_MESSAGE)
    n++;
  need(got == KVRELAY_PULL_NONE);
  return n;
}

/* Storing the blocks is part of the work, but not of the measure. */
static void publishing(unsigned streams) {
  char name[32];
  uint64_t calls[STREAMS], best = UINT64_MAX;
  start(1000000);
  next_key = 0;
  for (unsigned i = 0; i < streams; i++) {
    calls[i] = subscribe();
    take(calls[i]);
  }
  for (int round = 0; round < ROUNDS; round++) {
    uint64_t spent = 0, call;
    for (unsigned i = 0; i < DELTAS; i++) {
      store(EVENTS);
      uint64_t from = now_ns();
      need(kvrelay_relay_pool_changed(&relay, pool, 0) == KVRELAY_OK);
      unsigned frames = 0;
      while (kvrelay_relay_ready_next(&relay, &call) == 1)
        frames += take(call);
      spent += now_ns() - from;
      need(frames == streams);
    }
    best = spent < best ? spent : best;
  }
  snprintf(name, sizeof name, "deltas_to_%u", streams);
  print(name, DELTAS * 1e9 / (double)best, "deltas/s");
  snprintf(name, sizeof name, "frames_to_%u", streams);
  print(name, DELTAS * 1e9 * streams / (double)best, "frames/s");
  stop();
}

static void cuts(unsigned shift) {
  char name[32];
  uint64_t best = UINT64_MAX;
  start((uint64_t)1 << (shift + 1));
  need(ckf_producer_format(&state)->bucket_count == (uint64_t)1 << shift);
  next_key = 0;
  store(100000);
  for (int round = 0; round < ROUNDS; round++) {
    uint64_t from = now_ns(), call = subscribe(), spent = now_ns() - from;
    kvrelay_relay_call_close(&relay, call, 0);
    best = spent < best ? spent : best;
  }
  snprintf(name, sizeof name, "cut_2_%u_buckets", shift);
  print(name, (double)best * 1e-6, "ms");
  stop();
}

int main(void) {
  publishing(1);
  publishing(16);
  publishing(64);
  cuts(16);
  cuts(19);
  cuts(22);
  return 0;
}
