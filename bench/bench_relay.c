/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does publishing cost a relay? Deltas of 16 stored blocks to 1, 16 and 64 subscribers of one
 * pool, from changed buckets to the bytes a transport hands out, gRPC's prefix included: messages a
 * second, and nanoseconds for the first subscriber's message and for each further one, to which
 * nothing but 26 bytes of numbers may be new. How long does a snapshot cut hold the thread, for
 * filters of 2^16, 2^19 and 2^22 buckets?
 */

#include "bench.h"
#include "kvrelay_pb.h"
#include "transports/service.h"

enum { DELTAS = 4000, EVENTS = 16, STREAMS = 64 };

/* A subscriber as a transport has it: its call, and the bytes that wait for the socket. */
typedef struct stream {
  kvrelay_call call;
  void *handle;
  bool awake;
  uint8_t bytes[4096];
  size_t len;
} stream;

static stream streams[STREAMS];
static kvrelay_relay_service *service;
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
  const kvrelay_relay_service_config carried = kvrelay_relay_service_config_default(&relay);
  bench_need(kvrelay_relay_service_open(&carried, &service) == KVRELAY_TRANSPORT_OK);
}

static void stop(void) {
  kvrelay_relay_service_close(service);
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

static void wake(kvrelay_call *call) { ((stream *)call)->awake = true; }

static void subscribe(stream *s) {
  kvrelay_service *const base = kvrelay_relay_service_base(service);
  const char *const path = kvrelay_method_path(KVRELAY_METHOD_SUBSCRIBE_POOL);
  kvrelay_request q;
  kvrelay_status status;
  memset(&q, 0, sizeof q);
  q.method = KVRELAY_METHOD_SUBSCRIBE_POOL;
  q.contract_marker = KVRELAY_CONTRACT_MARKER;
  q.subscriber_id = (kvrelay_text){(const uint8_t *)"bench", 5};
  q.expected_producer = kvrelay_pool_descriptor(pool)->producer;
  const ptrdiff_t len = kvrelay_pb_encode_request(&q, s->bytes, sizeof s->bytes);
  s->call.wake = wake;
  s->awake = false;
  bench_need(len > 0 &&
             base->open(base, &s->call, (const uint8_t *)path, strlen(path), 0, &s->handle,
                        &status) == KVRELAY_OK &&
             base->message(base, s->handle, s->bytes, (size_t)len, 0, &status) == KVRELAY_OK &&
             base->half_close(base, s->handle, 0, &status) == KVRELAY_OK);
}

static void hang_up(stream *s) {
  kvrelay_service *const base = kvrelay_relay_service_base(service);
  base->close(base, s->handle, 0);
}

/* Takes what there is, as far as it has room; the number of messages. */
static unsigned take(stream *s) {
  kvrelay_service *const base = kvrelay_relay_service_base(service);
  kvrelay_parts parts;
  kvrelay_status status;
  unsigned n = 0;
  int got;
  s->awake = false;
  while ((got = base->pull(base, s->handle, 0, &parts, &status)) == KVRELAY_PULL_MESSAGE) {
    n++;
    if (KVRELAY_GRPC_PREFIX_LEN + parts.bytes > sizeof s->bytes)
      continue; /* a snapshot */
    kvrelay_grpc_prefix_put(s->bytes, (uint32_t)parts.bytes);
    s->len = KVRELAY_GRPC_PREFIX_LEN;
    for (size_t i = 0; i < parts.part_len; i++) {
      memcpy(s->bytes + s->len, parts.part[i].base, parts.part[i].len);
      s->len += parts.part[i].len;
    }
  }
  bench_need(got == KVRELAY_PULL_NONE);
  return n;
}

/* What the last message says must be the pool's newest delta. */
static void check(const stream *s) {
  kvrelay_filter_update m;
  bench_need(kvrelay_pb_decode_filter(s->bytes + KVRELAY_GRPC_PREFIX_LEN,
                                      s->len - KVRELAY_GRPC_PREFIX_LEN, NULL, &m) == KVRELAY_OK &&
             m.kind == KVRELAY_UPDATE_DELTA && m.sequence == DELTAS * BENCH_RUNS);
}

/* What asking the time takes itself: more than a message. */
static double clock_ns(void) {
  double asked[999];
  for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
    const double from = bench_cpu_ns();
    asked[i] = bench_cpu_ns() - from;
  }
  bench_sort(asked, sizeof asked / sizeof asked[0]);
  return asked[sizeof asked / sizeof asked[0] / 2];
}

/* Nanoseconds that a delta takes, by run. Storing the blocks is part of the work, but not of the
 * measure. */
static bench_sample publishing(unsigned count) {
  bench_sample delta = {0}, messages = {0};
  start(1000000);
  next_key = 0;
  for (unsigned i = 0; i < count; i++) {
    subscribe(&streams[i]);
    take(&streams[i]);
  }
  for (int run = 0; run < BENCH_RUNS; run++) {
    double spent = -DELTAS * clock_ns();
    for (unsigned i = 0; i < DELTAS; i++) {
      unsigned taken = 0;
      store(EVENTS);
      const double from = bench_cpu_ns();
      bench_need(kvrelay_relay_pool_changed(&relay, pool, 0) == KVRELAY_OK);
      kvrelay_relay_service_poll(service, 0);
      for (unsigned n = 0; n < count; n++)
        if (streams[n].awake)
          taken += take(&streams[n]);
      spent += bench_cpu_ns() - from;
      bench_need(taken == count);
    }
    bench_add(&delta, spent / DELTAS);
    bench_add(&messages, DELTAS * 1e9 * count / spent);
  }
  for (unsigned i = 0; i < count; i++) {
    check(&streams[i]);
    hang_up(&streams[i]);
  }
  stop();
  bench_print(&messages, "messages/s", "relay_messages_to_%u", count);
  return delta;
}

static void publishings(void) {
  bench_sample first = publishing(1), further = {0};
  (void)publishing(16);
  const bench_sample all = publishing(STREAMS);
  for (size_t run = 0; run < all.runs; run++)
    bench_add(&further, (all.value[run] - first.value[run]) / (STREAMS - 1));
  bench_print(&first, "ns", "relay_first_message");
  bench_print(&further, "ns", "relay_further_message");
}

static void cuts(unsigned shift) {
  bench_sample ms = {0};
  start((uint64_t)1 << (shift + 1));
  bench_need(ckf_producer_format(&state)->bucket_count == (uint64_t)1 << shift);
  next_key = 0;
  store(100000);
  for (int run = 0; run < BENCH_RUNS; run++) {
    const double from = bench_cpu_ns();
    subscribe(&streams[0]);
    bench_add(&ms, (bench_cpu_ns() - from) * 1e-6);
    hang_up(&streams[0]);
  }
  bench_print(&ms, "ms", "relay_cut_2_%u_buckets", shift);
  stop();
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  publishings();
  cuts(16);
  cuts(19);
  cuts(22);
  return 0;
}
