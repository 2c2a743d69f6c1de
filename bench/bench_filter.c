/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast are filter, prefix search and CBI1? Random keys at 1 M blocks in the default table; with
 * BENCH_LARGE set in the environment also at 8 M. Each figure is the best of several runs.
 */

#define CKF_STATIC
#include "ckf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RUNS = 5, QUERY_LEN = 512, QUERIES = 4096 };

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void report(const char *bench, const char *size, double value, const char *unit) {
  printf("{\"bench\":\"%s%s\",\"value\":%.4g,\"unit\":\"%s\"}\n", bench, size, value, unit);
  fflush(stdout);
}

static void *take(size_t bytes) {
  void *memory = calloc(1, bytes);
  if (!memory)
    exit(2);
  return memory;
}

static volatile uint64_t sink;

static double best(double old, double start, size_t operations) {
  const double each = (now_ns() - start) / (double)operations;
  return old == 0 || each < old ? each : old;
}

/* Insert, find present and absent, remove: one at a time and in batches with prefetch. */
static void bench_operations(ckf_filter *f, const uint64_t *keys, const uint64_t *absent, size_t n,
                             const char *size) {
  double one[4] = {0}, all[4] = {0}, start;
  uint64_t found = 0;
  for (int run = 0; run < RUNS; run++) {
    start = now_ns();
    for (size_t i = 0; i < n; i++)
      found += ckf_filter_insert(f, keys[i]) == CKF_OK;
    one[0] = best(one[0], start, n);
    start = now_ns();
    for (size_t i = 0; i < n; i++)
      found += ckf_filter_contains(f, keys[i]);
    one[1] = best(one[1], start, n);
    start = now_ns();
    for (size_t i = 0; i < n; i++)
      found += ckf_filter_contains(f, absent[i]);
    one[2] = best(one[2], start, n);
    start = now_ns();
    for (size_t i = 0; i < n; i++)
      found += ckf_filter_remove(f, keys[i]) == CKF_OK;
    one[3] = best(one[3], start, n);
    start = now_ns();
    found += ckf_filter_insert_n(f, keys, n, NULL);
    all[0] = best(all[0], start, n);
    start = now_ns();
    found += ckf_filter_contains_n(f, keys, n, NULL);
    all[1] = best(all[1], start, n);
    start = now_ns();
    found += ckf_filter_contains_n(f, absent, n, NULL);
    all[2] = best(all[2], start, n);
    start = now_ns();
    found += ckf_filter_remove_n(f, keys, n, NULL);
    all[3] = best(all[3], start, n);
  }
  sink = found;
  static const char *const names[] = {"insert", "find_present", "find_absent", "remove"};
  for (int i = 0; i < 4; i++) {
    char name[64];
    snprintf(name, sizeof name, "filter_%s_one_", names[i]);
    report(name, size, 1e3 / one[i], "M/s");
    snprintf(name, sizeof name, "filter_%s_batch_", names[i]);
    report(name, size, 1e3 / all[i], "M/s");
  }
}

/* Queries of 512 blocks whose depths are uniform in 0 … 512, in a table with half its slots used.
 */
static void bench_search(ckf_filter *f, const uint64_t *words, const char *size) {
  uint64_t *keys = take((size_t)QUERIES * QUERY_LEN * 8), state = 5, sum = 0;
  double linear = 0, fast = 0, start;
  for (size_t q = 0; q < QUERIES; q++) {
    const size_t depth = ckf_rng_draw(&state) % (QUERY_LEN + 1);
    for (size_t i = 0; i < QUERY_LEN; i++) {
      keys[q * QUERY_LEN + i] = ckf_rng_draw(&state);
      if (i < depth)
        sum += ckf_filter_insert(f, keys[q * QUERY_LEN + i]) == CKF_OK;
    }
  }
  for (int run = 0; run < RUNS; run++) {
    start = now_ns();
    for (size_t q = 0; q < QUERIES; q++)
      sum += ckf_search(&f->format_, words, keys + q * QUERY_LEN, QUERY_LEN);
    fast = best(fast, start, QUERIES);
    start = now_ns();
    for (size_t q = 0; q < QUERIES; q++) {
      size_t depth = 0;
      while (depth < QUERY_LEN && ckf_filter_contains(f, keys[q * QUERY_LEN + depth]))
        depth++;
      sum += depth;
    }
    linear = best(linear, start, QUERIES);
  }
  sink = sum;
  report("search_512_", size, fast, "ns");
  report("search_512_linear_", size, linear, "ns");
  free(keys);
}

static void bench_cbi1(const ckf_format *format, const uint64_t *words, const char *size) {
  const size_t cap = CKF_CBI1_MAX_FRAME_BYTES, count = (size_t)format->bucket_count;
  const uint32_t chunk = CKF_CBI1_MAX_CHUNK_BUCKETS;
  uint8_t *frame = take(cap), prefix[CKF_CBI1_SNAPSHOT_PREFIX_BYTES];
  ckf_image images[256];
  const uint64_t *body;
  ckf_cbi1_frame view;
  double encode = 0, head = 0, decode = 0, delta = 0, delta_decode = 0, start;
  ptrdiff_t len = 0, delta_len = 0;
  size_t n;
  for (uint32_t i = 0; i < 256; i++) {
    images[i].bucket = i * 1001;
    images[i].word = i;
  }
  for (int run = 0; run < RUNS * 3; run++) {
    start = now_ns();
    len = ckf_cbi1_snapshot_encode(format, 1, 1, words, count, chunk, 0, frame, cap);
    encode = best(encode, start, 1);
    start = now_ns();
    sink =
        (uint64_t)ckf_cbi1_snapshot_prefix(format, 1, 1, words, count, chunk, 0, prefix, &body, &n);
    head = best(head, start, 1);
    start = now_ns();
    sink = (uint64_t)ckf_cbi1_decode(format, frame, (size_t)len, &view);
    decode = best(decode, start, 1);
  }
  for (int run = 0; run < RUNS; run++) {
    start = now_ns();
    for (int i = 0; i < 1000; i++)
      delta_len = ckf_cbi1_delta_encode(format, 1, 1, 2, images, 256, frame, cap);
    delta = best(delta, start, 1000);
    start = now_ns();
    for (int i = 0; i < 1000; i++)
      sink = (uint64_t)ckf_cbi1_decode(format, frame, (size_t)delta_len, &view);
    delta_decode = best(delta_decode, start, 1000);
  }
  report("cbi1_snapshot_encode_", size, (double)len / encode, "GB/s");
  report("cbi1_snapshot_prefix_", size, (double)len / head, "GB/s");
  report("cbi1_snapshot_decode_", size, (double)len / decode, "GB/s");
  report("cbi1_delta_256_encode_", size, delta, "ns");
  report("cbi1_delta_256_decode_", size, delta_decode, "ns");
  free(frame);
}

static void bench(size_t n, const char *size) {
  ckf_config cfg = ckf_config_default();
  ckf_format format = {cfg.seed, 0};
  ckf_image log[501];
  uint64_t state = 1;
  ckf_filter f;
  cfg.expected_blocks = n;
  if (ckf_config_check(&cfg, &format.bucket_count) != CKF_OK)
    exit(2);
  uint64_t *words = take((size_t)format.bucket_count * 8), *keys = take(n * 8),
           *absent = take(n * 8);
  uint32_t *deltas = take(CKF_DELTA_TABLE_LEN * 4);
  ckf_delta_table(format.seed, deltas);
  for (size_t i = 0; i < n; i++) {
    keys[i] = ckf_rng_draw(&state);
    absent[i] = ckf_rng_draw(&state);
  }
  if (ckf_filter_init(&f, &format, 500, words, log, deltas) != CKF_OK)
    exit(2);
  bench_operations(&f, keys, absent, n, size);
  sink = ckf_filter_insert_n(&f, keys, n / 2, NULL);
  bench_search(&f, words, size);
  bench_cbi1(&format, words, size);
  free(words);
  free(keys);
  free(absent);
  free(deltas);
}

int main(void) {
  bench(1048576, "1M");
  if (getenv("BENCH_LARGE"))
    bench(8388608, "8M");
  return 0;
}
