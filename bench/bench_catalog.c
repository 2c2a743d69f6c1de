/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does a catalog of 10 000 pools cost? Each pool is an endpoint of its own with a base model
 * of two aliases and an adapter. Adding the pools to a relay, in no order; its first message
 * as a struct, the message's bytes, encoding, decoding; in a consumer the first one, which also
 * checks it and makes its index of names, and the next one, in which one pool has gone.
 */

#include "bench.h"
#include "kvrelay_pb.h"

enum { POOLS = 10000, MESSAGE_CAP = 8 << 20, ARENA_BYTES = 32 << 20 };

static char endpoints[POOLS][32];
static kvrelay_text aliases[2];
static kvrelay_registration registrations[2];
static ckf_producer state;
static uint64_t arena_mem[ARENA_BYTES / 8];
static uint8_t message[MESSAGE_CAP];
static size_t message_len;
static kvrelay_consumer consumer;
static bench_sample build, view, encoded, decoded, installed, replaced;

static kvrelay_text text(const char *word) {
  return (kvrelay_text){(const uint8_t *)word, strlen(word)};
}

static void *memory(size_t len) {
  void *const p = malloc(len);
  bench_need(p != NULL);
  return p;
}

static kvrelay_descriptor describe(size_t i) {
  static const int32_t roles[] = {KVRELAY_ROLE_PREFILL, KVRELAY_ROLE_DECODE};
  const kvrelay_digest digest = {true, {1, 2, 3}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  kvrelay_descriptor d;
  memset(&d, 0, sizeof d);
  d.producer.pool_id = (kvrelay_pool_id){true, 1, {true, digest, digest}, i};
  snprintf(endpoints[i], sizeof endpoints[i], "generate-%zu", i);
  d.serving_endpoint = (kvrelay_endpoint){true, text("prod"), text("backend"), text(endpoints[i])};
  d.registrations = registrations;
  d.registrations_len = 2;
  d.query_semantics = (kvrelay_semantics){true, 64, HASHFMT_FORMAT_STANDARD};
  d.pool_roles = (kvrelay_roles){roles, 2};
  return d;
}

static void add(bench_sample *s, double from_ns) { bench_add(s, (bench_cpu_ns() - from_ns) / 1e6); }

/* Adds the pools and asks for the catalog, of which the message is left behind. */
static void relay_side(void) {
  kvrelay_relay relay;
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity.relay_incarnation = 1;
  cfg.max_pools = POOLS;
  cfg.max_bucket_count = 2;
  cfg.queue_frames = 1;
  cfg.load_windows = 1;
  const size_t len = kvrelay_relay_mem_size(&cfg);
  void *const mem = memory(len);
  bench_need(kvrelay_relay_init(&relay, &cfg, mem, len, 0) == KVRELAY_OK);
  const kvrelay_descriptor first = describe(0);
  const size_t pool_len = kvrelay_relay_pool_mem_size(&relay, &first) + 64; /* longer names */
  uint8_t *const pool_mem = bench_memory(POOLS * pool_len);
  double from = bench_cpu_ns();
  for (size_t i = 0; i < POOLS; i++) {
    kvrelay_pool *pool;
    const size_t k = i * 7919 % POOLS; /* in no order */
    const kvrelay_descriptor d = describe(k);
    bench_need(kvrelay_relay_pool_add(&relay, &d, &state, pool_mem + k * pool_len, pool_len, 0,
                                      &pool) == KVRELAY_OK);
  }
  bench_add(&build, POOLS * 1e9 / (bench_cpu_ns() - from));

  kvrelay_request q;
  kvrelay_outgoing out;
  kvrelay_status status;
  uint64_t call;
  memset(&q, 0, sizeof q);
  q.method = KVRELAY_METHOD_WATCH_CATALOG;
  q.contract_marker = KVRELAY_CONTRACT_MARKER;
  q.subscriber_id = text("bench");
  bench_need(kvrelay_relay_call_open(&relay, &q, 0, &call, &status) == KVRELAY_OK);
  from = bench_cpu_ns();
  bench_need(kvrelay_relay_call_pull(&relay, call, 0, 0, &out) == KVRELAY_PULL_MESSAGE);
  add(&view, from);

  from = bench_cpu_ns();
  const ptrdiff_t got = kvrelay_pb_encode_catalog(&out.u.catalog, message, sizeof message);
  add(&encoded, from);
  bench_need(got > 0);
  message_len = (size_t)got;
  free(pool_mem);
  free(mem);
}

static uint32_t watch_call(void) {
  kvrelay_action a;
  uint32_t call = 0;
  while (kvrelay_consumer_action_next(&consumer, 1, &a))
    if (a.kind == KVRELAY_ACTION_CALL && a.request.method == KVRELAY_METHOD_WATCH_CATALOG)
      call = a.call;
  return call;
}

static void consumer_side(void) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_catalog_update update;
  double from = bench_cpu_ns();
  bench_need(kvrelay_pb_decode_catalog(message, message_len, &arena, &update) == KVRELAY_OK);
  add(&decoded, from);
  bench_need(update.pools_len == POOLS);

  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.max_pools = POOLS;
  cfg.catalog_bytes = ARENA_BYTES;
  cfg.subscribe_all = false;
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  void *const mem = bench_memory(len);
  bench_need(kvrelay_consumer_init(&consumer, &cfg, mem, len, 1) == KVRELAY_OK);
  kvrelay_consumer_connected(&consumer, 1);
  const uint32_t call = watch_call();
  from = bench_cpu_ns();
  bench_need(kvrelay_consumer_feed_catalog(&consumer, call, &update, 1) == KVRELAY_OK);
  add(&installed, from);
  while (watch_call() != 0)
    ;
  update.revision++;
  update.pools_len--;
  from = bench_cpu_ns();
  bench_need(kvrelay_consumer_feed_catalog(&consumer, call, &update, 1) == KVRELAY_OK);
  add(&replaced, from);
  kvrelay_pool_view seen;
  bench_need(kvrelay_consumer_pool_get(&consumer, POOLS - 2, 1, &seen) == KVRELAY_OK);
  free(mem);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  aliases[0] = text("chat");
  aliases[1] = text("assistant-large");
  const kvrelay_target base = {
      true, KVRELAY_TARGET_BASE, text("meta-llama/Llama-3.1-70B-Instruct"), {0}};
  const kvrelay_target lora = {true, KVRELAY_TARGET_LORA, base.base_model, text("sql-v1")};
  registrations[0] = (kvrelay_registration){base.base_model, base, aliases, 2};
  registrations[1] = (kvrelay_registration){text("sql"), lora, NULL, 0};
  ckf_producer_config producer = ckf_producer_config_default();
  producer.filter.expected_blocks = 1;
  const size_t len = ckf_producer_mem_size(&producer);
  void *const mem = memory(len);
  bench_need(ckf_producer_init(&state, &producer, mem, len) == CKF_OK);
  for (int run = 0; run < BENCH_RUNS; run++) {
    relay_side();
    consumer_side();
  }
  bench_sample bytes = {{(double)message_len}, 1};
  bench_print(&bytes, "bytes", "catalog_message_10k");
  bench_print(&build, "pools/s", "relay_pool_add");
  bench_print(&view, "ms", "catalog_view_10k");
  bench_print(&encoded, "ms", "catalog_encode_10k");
  bench_print(&decoded, "ms", "catalog_decode_10k");
  bench_print(&installed, "ms", "catalog_install_10k");
  bench_print(&replaced, "ms", "catalog_replace_10k");
  free(mem);
  return 0;
}
