/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does a consumer take in, and what does an answer cost? Deltas of 16 and 4 096 images and
 * snapshot chunks, as decoded messages and as the bytes of a stream with gRPC's prefixes, into a
 * filter of 524 288 buckets (snapshots: 1 048 576), beside what the same bytes take to copy and to
 * sum; queries of 512 blocks over
 * 1, 16 and 256 live pools of 128 KiB each, and the refusal of an unknown name; installing a
 * catalog of 256 pools.
 */

#include "bench.h"
#include "kvrelay_pb.h"

enum { POOLS = 256, BLOCK = 16, TOKENS = 512 * BLOCK, QUERIES = 100, CATALOGS = 10, DELTAS = 64 };

static kvrelay_consumer consumer;
static kvrelay_descriptor pools[POOLS];
static uint32_t calls[POOLS], watch;
static void *replicas[POOLS];
static uint8_t frames[DELTAS][65536];
static uint8_t framed[10 << 20];
static uint8_t chunk_bytes[CKF_CBI1_MAX_FRAME_BYTES];
static uint64_t words[1 << 20];
static uint32_t tokens[TOKENS];
static uint64_t scratch[TOKENS];
static kvrelay_answer answers[POOLS];

static const kvrelay_envelope envelope = {1, true, {17, 23}, KVRELAY_CONTRACT_MARKER};

/* Pools with `buckets` each; `served` of them list the model, the others have their own. */
static void describe(uint32_t count, uint32_t served, uint64_t buckets) {
  static const int32_t role = KVRELAY_ROLE_AGGREGATED;
  static kvrelay_registration registrations[POOLS];
  static char names[POOLS][16];
  const kvrelay_text x = {(const uint8_t *)"x", 1}, llama = {(const uint8_t *)"llama", 5};
  for (uint32_t i = 0; i < count; i++) {
    kvrelay_descriptor *const d = &pools[i];
    kvrelay_registration *const r = &registrations[i];
    kvrelay_digest digest = {true, {0}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
    memset(d, 0, sizeof *d);
    memset(r, 0, sizeof *r);
    digest.digest[0] = (uint8_t)i;
    snprintf(names[i], sizeof names[i], "model-%u", i);
    r->canonical_model_id.ptr = (const uint8_t *)names[i];
    r->canonical_model_id.len = strlen(names[i]);
    if (i < served)
      r->canonical_model_id = llama;
    r->target.present = true;
    r->target.kind = KVRELAY_TARGET_BASE;
    r->target.base_model = r->canonical_model_id;
    d->producer.present = d->producer.pool_id.present = d->producer.ckf_format.present = true;
    d->producer.pool_id.identity_version = 1;
    d->producer.pool_id.domain.present = true;
    d->producer.pool_id.domain.cache_semantics = d->producer.pool_id.domain.routing_scope = digest;
    d->producer.layout_generation = 1;
    d->producer.ckf_format.format_version = 1;
    d->producer.ckf_format.bucket_count = buckets;
    d->producer.ckf_format.fingerprint_bits = 16;
    d->producer.ckf_format.slots_per_bucket = 4;
    d->serving_endpoint.present = true;
    d->serving_endpoint.namespace_ = d->serving_endpoint.component = x;
    d->serving_endpoint.endpoint = x;
    d->registrations = r;
    d->registrations_len = 1;
    d->query_semantics.present = true;
    d->query_semantics.kv_block_size = BLOCK;
    d->query_semantics.hash_format = HASHFMT_FORMAT_STANDARD;
    d->pool_roles.ptr = &role;
    d->pool_roles.len = 1;
  }
}

static void run_actions(void) {
  kvrelay_action a;
  while (kvrelay_consumer_action_next(&consumer, 1, &a))
    if (a.kind == KVRELAY_ACTION_REPLICA_NEED) {
      free(replicas[a.pool]);
      replicas[a.pool] = a.bytes > 1 << 20 ? bench_memory(a.bytes) : malloc(a.bytes);
      bench_need(kvrelay_consumer_replica_give(&consumer, a.pool, replicas[a.pool], a.bytes, 1) ==
                 KVRELAY_OK);
    } else if (a.kind == KVRELAY_ACTION_CALL) {
      if (a.request.method == KVRELAY_METHOD_WATCH_CATALOG)
        watch = a.call;
      else if (a.request.method == KVRELAY_METHOD_SUBSCRIBE_POOL)
        calls[a.pool] = a.call;
    }
}

static void catalog(uint64_t revision, uint32_t count) {
  const kvrelay_catalog_update u = {envelope, revision, true, pools, count};
  bench_need(kvrelay_consumer_feed_catalog(&consumer, watch, &u, 1) == KVRELAY_OK);
}

/* A new connection with these pools, all subscribed. */
static void connect(uint32_t count, uint32_t served, uint64_t buckets) {
  kvrelay_consumer_connected(&consumer, 1);
  run_actions();
  describe(count, served, buckets);
  catalog(1, count);
  run_actions();
}

static kvrelay_filter_update frame(uint32_t pool, int32_t kind, uint64_t base, uint64_t sequence,
                                   const uint8_t *bytes, ptrdiff_t len) {
  kvrelay_filter_update u;
  bench_need(len >= 0);
  memset(&u, 0, sizeof u);
  u.envelope = envelope;
  u.producer = pools[pool].producer;
  u.base_sequence = base;
  u.sequence = sequence;
  u.kind = kind;
  u.payload = bytes;
  u.payload_len = (size_t)len;
  return u;
}

/* A whole snapshot of pool i; returns the nanoseconds spent in the consumer. */
static double snapshot(uint32_t i, uint32_t chunk) {
  const ckf_format format = {0, pools[i].producer.ckf_format.bucket_count};
  double spent = 0;
  for (uint32_t n = 0; n < ckf_cbi1_chunk_count(&format, chunk); n++) {
    const kvrelay_filter_update u =
        frame(i, KVRELAY_UPDATE_SNAPSHOT_CHUNK, 0, 0, chunk_bytes,
              ckf_cbi1_snapshot_encode(&format, 0, 0, words, (size_t)format.bucket_count, chunk, n,
                                       chunk_bytes, sizeof chunk_bytes));
    const double start = bench_cpu_ns();
    bench_need(kvrelay_consumer_feed_filter(&consumer, calls[i], &u, 1) == KVRELAY_OK);
    spent += bench_cpu_ns() - start;
  }
  kvrelay_pool_view view;
  bench_need(kvrelay_consumer_pool_get(&consumer, i, 1, &view) == KVRELAY_OK && view.words != NULL);
  return spent;
}

static void bench_snapshots(void) {
  bench_sample rate = {0};
  for (int run = 0; run < BENCH_RUNS; run++) {
    connect(1, 1, 1 << 20);
    bench_add(&rate, 8.0 * (1 << 20) / snapshot(0, 262144));
  }
  bench_print(&rate, "GB/s", "consumer_snapshot");
}

/* The 64 frames are prepared for one run of sequences, so that only the consumer is measured. */
static void bench_deltas(uint32_t images_len) {
  static ckf_image images[4096];
  const ckf_format format = {0, 1 << 19};
  bench_sample rate = {0}, images_rate = {0};
  for (int run = 0; run < BENCH_RUNS; run++) {
    kvrelay_filter_update u[DELTAS];
    connect(1, 1, format.bucket_count);
    (void)snapshot(0, 524288);
    for (uint64_t s = 0; s < DELTAS; s++) {
      for (uint32_t i = 0; i < images_len; i++) {
        images[i].bucket = (uint32_t)((s * 4096 + i) * 2654435761u) & ((1 << 19) - 1);
        images[i].word = s;
      }
      u[s] = frame(0, KVRELAY_UPDATE_DELTA, s, s + 1, frames[s],
                   ckf_cbi1_delta_encode(&format, 0, s, s + 1, images, images_len, frames[s],
                                         sizeof frames[s]));
    }
    const double start = bench_cpu_ns();
    for (uint32_t s = 0; s < DELTAS; s++)
      bench_need(kvrelay_consumer_feed_filter(&consumer, calls[0], &u[s], 1) == KVRELAY_OK);
    const double spent = bench_cpu_ns() - start;
    bench_add(&rate, DELTAS * 1e9 / spent);
    bench_add(&images_rate, DELTAS * 1e3 * images_len / spent);
    kvrelay_pool_view view;
    bench_need(kvrelay_consumer_pool_get(&consumer, 0, 1, &view) == KVRELAY_OK &&
               view.deltas == DELTAS);
  }
  bench_print(&rate, "1/s", "consumer_deltas_of_%u", images_len);
  bench_print(&images_rate, "M/s", "consumer_images_of_%u", images_len);
}

/* ---- from bytes ---- */

/* Puts a message behind `len` bytes of a stream; returns what there is then. */
static size_t put_framed(size_t len, const kvrelay_filter_update *u) {
  uint8_t *const at = framed + len;
  const ptrdiff_t got = kvrelay_pb_encode_filter(u, at + KVRELAY_GRPC_PREFIX_LEN,
                                                 sizeof framed - len - KVRELAY_GRPC_PREFIX_LEN);
  bench_need(got > 0);
  kvrelay_grpc_prefix_put(at, (uint32_t)got);
  return len + KVRELAY_GRPC_PREFIX_LEN + (size_t)got;
}

/* Bytes to replica, as a client does it; returns the nanoseconds. */
static double take_framed(size_t len) {
  kvrelay_framer framer;
  kvrelay_frame frame;
  kvrelay_pb_filter_stream stream;
  const double start = bench_cpu_ns();
  kvrelay_framer_init_grpc(&framer, KVRELAY_PB_MESSAGE_MAX);
  memset(&stream, 0, sizeof stream);
  for (size_t at = 0; at < len;) {
    kvrelay_filter_update u;
    const ptrdiff_t got = kvrelay_framer_feed(&framer, framed + at, len - at, &frame);
    bench_need(got > 0 && kvrelay_frame_done(&frame));
    bench_need(kvrelay_pb_filter_read(&stream, frame.piece, frame.piece_len, &u) == KVRELAY_OK);
    bench_need(kvrelay_consumer_feed_filter(&consumer, calls[0], &u, 1) == KVRELAY_OK);
    at += (size_t)got;
  }
  return bench_cpu_ns() - start;
}

static void bench_framed_snapshots(void) {
  enum { CHUNK = 262144 };
  bench_sample rate = {0}, copied = {0}, summed = {0};
  const ckf_format format = {0, 1 << 20};
  uint8_t *const copy = bench_memory(sizeof framed);
  for (int run = 0; run < BENCH_RUNS; run++) {
    connect(1, 1, format.bucket_count);
    size_t len = 0;
    for (uint32_t n = 0; n < ckf_cbi1_chunk_count(&format, CHUNK); n++) {
      const kvrelay_filter_update u =
          frame(0, KVRELAY_UPDATE_SNAPSHOT_CHUNK, 0, 0, chunk_bytes,
                ckf_cbi1_snapshot_encode(&format, 0, 0, words, (size_t)format.bucket_count, CHUNK,
                                         n, chunk_bytes, sizeof chunk_bytes));
      len = put_framed(len, &u);
    }
    bench_add(&rate, (double)len / take_framed(len));
    kvrelay_pool_view view;
    bench_need(kvrelay_consumer_pool_get(&consumer, 0, 1, &view) == KVRELAY_OK &&
               view.words != NULL);
    double start = bench_cpu_ns();
    memcpy(copy, framed, len);
    BENCH_KEEP(copy);
    bench_add(&copied, (double)len / (bench_cpu_ns() - start));
    start = bench_cpu_ns();
    BENCH_KEEP(hashfmt_hash64(framed, len, 0));
    bench_add(&summed, (double)len / (bench_cpu_ns() - start));
  }
  bench_print(&rate, "GB/s", "consumer_framed_snapshot");
  bench_print(&copied, "GB/s", "consumer_reference_copy");
  bench_print(&summed, "GB/s", "consumer_reference_sum");
  free(copy);
}

static void bench_framed_deltas(uint32_t images_len, uint64_t count) {
  static ckf_image images[16];
  const ckf_format format = {0, 1 << 19};
  bench_sample rate = {0};
  for (int run = 0; run < BENCH_RUNS; run++) {
    size_t len = 0;
    connect(1, 1, format.bucket_count);
    (void)snapshot(0, 524288);
    for (uint64_t s = 0; s < count; s++) {
      for (uint32_t i = 0; i < images_len; i++) {
        images[i].bucket = (uint32_t)((s * 4096 + i) * 2654435761u) & ((1 << 19) - 1);
        images[i].word = s;
      }
      const kvrelay_filter_update u =
          frame(0, KVRELAY_UPDATE_DELTA, s, s + 1, frames[0],
                ckf_cbi1_delta_encode(&format, 0, s, s + 1, images, images_len, frames[0],
                                      sizeof frames[0]));
      len = put_framed(len, &u);
    }
    bench_add(&rate, (double)count * 1e9 / take_framed(len));
    kvrelay_pool_view view;
    bench_need(kvrelay_consumer_pool_get(&consumer, 0, 1, &view) == KVRELAY_OK &&
               view.deltas == count);
  }
  bench_print(&rate, "1/s", "consumer_framed_deltas_of_%u", images_len);
}

/* ---- answers ---- */

static void query(bench_sample *us, const char *model, ptrdiff_t want) {
  kvrelay_query q;
  memset(&q, 0, sizeof q);
  q.model.ptr = (const uint8_t *)model;
  q.model.len = strlen(model);
  q.tokens = tokens;
  q.tokens_len = TOKENS;
  for (int run = 0; run < BENCH_RUNS; run++) {
    const double start = bench_cpu_ns();
    for (int i = 0; i < QUERIES; i++)
      bench_need(kvrelay_consumer_query(&consumer, &q, answers, POOLS, scratch, TOKENS, 1) == want);
    bench_add(us, (bench_cpu_ns() - start) / 1e3 / QUERIES);
  }
}

/* All pools hold a different depth of the prompt. */
static void bench_queries(uint32_t served) {
  const ckf_format format = {0, 1 << 14};
  static ckf_image log[CKF_MAX_KICKS + 1];
  bench_sample us = {0};
  size_t n;
  connect(POOLS, served, format.bucket_count);
  bench_need(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, BLOCK, HASHFMT_CHAIN_SEED, tokens, TOKENS,
                            NULL, scratch, TOKENS, &n) == HASHFMT_OK);
  for (uint32_t i = 0; i < served; i++) {
    ckf_filter filter;
    memset(words, 0, (size_t)format.bucket_count * 8);
    bench_need(ckf_filter_init(&filter, &format, 500, words, log, NULL) == CKF_OK);
    for (uint64_t key = 0; key < 50000; key++)
      bench_need(ckf_filter_insert(&filter, key) == CKF_OK);
    for (size_t k = 0; k < n * (i + 1) / served; k++)
      bench_need(ckf_filter_insert(&filter, scratch[k]) == CKF_OK);
    (void)snapshot(i, 16384);
  }
  query(&us, "llama", served);
  bench_need(answers[0].state == KVRELAY_ANSWER_KNOWN && answers[0].depth_blocks >= 512);
  bench_print(&us, "us", "consumer_query_512_blocks_%u_pools", served);
  if (served == 1) {
    query(&us, "gemma", KVRELAY_ERR_NOT_FOUND);
    bench_print(&us, "us", "consumer_query_unknown_name");
  }
}

static void bench_catalogs(void) {
  bench_sample us = {0};
  uint64_t revision = 1;
  connect(POOLS, 16, 1 << 10);
  for (int run = 0; run < BENCH_RUNS; run++) {
    double spent = 0;
    for (int i = 0; i < CATALOGS; i++) {
      const double start = bench_cpu_ns();
      catalog(++revision, POOLS);
      spent += bench_cpu_ns() - start;
      run_actions();
    }
    bench_add(&us, spent / 1e3 / CATALOGS);
  }
  bench_print(&us, "us", "consumer_catalog_of_256_pools");
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  const kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  void *const mem = malloc(len);
  bench_need(kvrelay_consumer_init(&consumer, &cfg, mem, len, 1) == KVRELAY_OK);
  for (uint32_t i = 0; i < TOKENS; i++)
    tokens[i] = i * 7919;
  for (uint32_t i = 0; i < 1 << 20; i++)
    words[i] = i * UINT64_C(0x9E3779B97F4A7C15);
  bench_snapshots();
  bench_deltas(16);
  bench_deltas(4096);
  bench_framed_snapshots();
  bench_framed_deltas(16, 20000);
  bench_queries(1);
  bench_queries(16);
  bench_queries(256);
  bench_catalogs();
  kvrelay_consumer_disconnected(&consumer, 1);
  for (uint32_t i = 0; i < POOLS; i++)
    free(replicas[i]);
  free(mem);
  return 0;
}
