/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does publishing cost a relay? Deltas of 16 stored blocks to 1, 16 and 64 subscribers that
 * take each one: deltas per second, and frames handed out per second. How long does a snapshot cut
 * hold the thread, for filters of 2^16, 2^19 and 2^22 buckets?
 */

#include "bench.h"
#include "kvrelay.h"

enum { DELTAS = 4000, EVENTS = 16, STREAMS = 64 };

static kvrelay_relay relay;
static kvrelay_pool *pool;
static ckf_producer state;
static void *relay_mem, *pool_mem, *state_mem;
static uint64_t next_key;

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
  bench_need(state_mem != NULL && ckf_producer_init(&state, &producer, state_mem, len) == CKF_OK);

  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity.relay_incarnation = 1;
  cfg.max_bucket_count = ckf_producer_format(&state)->bucket_count;
  cfg.encoding_concurrency = 1;
  len = kvrelay_relay_mem_size(&cfg);
  relay_mem = malloc(len);
  bench_need(relay_mem != NULL &&
             kvrelay_relay_init(&relay, &cfg, relay_mem, len, 0) == KVRELAY_OK);
  len = kvrelay_relay_pool_mem_size(&relay, &d);
  pool_mem = malloc(len);
  bench_need(pool_mem != NULL &&
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
    bench_need(ckf_producer_stored(&state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0,
                                   false, 0, &block, 1, &outcome) == CKF_OK);
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
  bench_need(kvrelay_relay_call_open(&relay, &q, 0, &call, &status) == KVRELAY_OK);
  return call;
}

/* Takes what there is; the number of messages. */
static unsigned take(uint64_t call) {
  kvrelay_outgoing out;
  unsigned n = 0;
  int got;
  while ((got = kvrelay_relay_call_pull(&relay, call, 0, 0, &out)) == KVRELAY_PULL_MESSAGE)
    n++;
  bench_need(got == KVRELAY_PULL_NONE);
  return n;
}

/* Storing the blocks is part of the work, but not of the measure. */
static void publishing(unsigned streams) {
  uint64_t calls[STREAMS];
  bench_sample deltas = {0}, frames = {0};
  start(1000000);
  next_key = 0;
  for (unsigned i = 0; i < streams; i++) {
    calls[i] = subscribe();
    take(calls[i]);
  }
  for (int run = 0; run < BENCH_RUNS; run++) {
    double spent = 0;
    uint64_t call;
    for (unsigned i = 0; i < DELTAS; i++) {
      unsigned taken = 0;
      store(EVENTS);
      const double from = bench_cpu_ns();
      bench_need(kvrelay_relay_pool_changed(&relay, pool, 0) == KVRELAY_OK);
      while (kvrelay_relay_ready_next(&relay, &call) == 1)
        taken += take(call);
      spent += bench_cpu_ns() - from;
      bench_need(taken == streams);
    }
    bench_add(&deltas, DELTAS * 1e9 / spent);
    bench_add(&frames, DELTAS * 1e9 * streams / spent);
  }
  bench_print(&deltas, "deltas/s", "relay_deltas_to_%u", streams);
  bench_print(&frames, "frames/s", "relay_frames_to_%u", streams);
  stop();
}

static void cuts(unsigned shift) {
  bench_sample ms = {0};
  start((uint64_t)1 << (shift + 1));
  bench_need(ckf_producer_format(&state)->bucket_count == (uint64_t)1 << shift);
  next_key = 0;
  store(100000);
  for (int run = 0; run < BENCH_RUNS; run++) {
    const double from = bench_cpu_ns();
    const uint64_t call = subscribe();
    bench_add(&ms, (bench_cpu_ns() - from) * 1e-6);
    kvrelay_relay_call_close(&relay, call, 0);
  }
  bench_print(&ms, "ms", "relay_cut_2_%u_buckets", shift);
  stop();
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  publishing(1);
  publishing(16);
  publishing(64);
  cuts(16);
  cuts(19);
  cuts(22);
  return 0;
}
