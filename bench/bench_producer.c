/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does a block cost the producer? Events of 16 blocks at 1 M blocks (with BENCH_LARGE set also
 * 8 M): new blocks, a second owner of each, repeats, removals of one owner and of the last one, a
 * clear of everything; a drain after each 16th event. Each figure is the best of several runs.
 */

#define CKF_STATIC
#include "ckf.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { RUNS = 3, EVENT = 16, WORKERS = 8 };

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
  void *memory = malloc(bytes);
  if (!memory)
    exit(2);
  return memory;
}

static void need(bool holds) {
  if (!holds) {
    fprintf(stderr, "bench_producer: unexpected result\n");
    exit(2);
  }
}

static void drain(ckf_producer *p, size_t event) {
  ckf_batch batch;
  if (event % 16 == 15)
    need(ckf_producer_drain(p, &batch) >= 0);
}

/* Each event goes to another worker, as from a pool of engines; `shift` chooses who. */
static ckf_member member_of(size_t event, uint64_t shift) {
  ckf_member member = {(event + shift) % WORKERS, 0};
  return member;
}

static double store_all(ckf_producer *p, const ckf_block *blocks, size_t n, uint64_t shift) {
  const double start = now_ns();
  for (size_t at = 0, event = 0; at + EVENT <= n; at += EVENT, event++) {
    const ckf_member member = member_of(event, shift);
    ckf_outcome out;
    need(ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
                             blocks + at, EVENT, &out) == CKF_OK);
    drain(p, event);
  }
  return (now_ns() - start) / (double)n;
}

/* Removes in an order that has nothing to do with the order of storing, 16 blocks at a time. */
static double remove_all(ckf_producer *p, const uint64_t *externals, size_t n, uint64_t shift) {
  const size_t events = n / EVENT;
  size_t event = 0;
  const double start = now_ns();
  for (size_t i = 0; i < events; i++) {
    const ckf_member member = member_of(event, shift);
    ckf_outcome out;
    need(ckf_producer_removed(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING,
                              externals + event * EVENT, EVENT, &out) == CKF_OK &&
         out.unknown == 0);
    drain(p, i);
    event = (event + 40503) % events; /* odd, and events is a power of two: visits each once */
  }
  return (now_ns() - start) / (double)n;
}

static double clear_all(ckf_producer *p, size_t n) {
  const double start = now_ns();
  for (size_t worker = 0; worker < WORKERS; worker++) {
    const ckf_member member = member_of(worker, 0);
    ckf_outcome out;
    ckf_batch batch;
    need(ckf_producer_cleared(p, &member, CKF_DOMAIN_MISSING, &out) == CKF_OK &&
         ckf_producer_drain(p, &batch) >= 0);
  }
  return (now_ns() - start) / (double)n;
}

static void keep_best(double *best, double value) {
  if (*best == 0 || value < *best)
    *best = value;
}

static void bench(size_t n, const char *size) {
  ckf_producer_config cfg = ckf_producer_config_default();
  ckf_block *blocks = take(n * sizeof *blocks);
  uint64_t *externals = take(n * sizeof *externals), state = 1;
  double fresh = 0, second = 0, repeat = 0, one = 0, last = 0, clear = 0;
  ckf_producer_stats st;
  ckf_producer p;
  cfg.filter.expected_blocks = n;
  cfg.filter.publish_every_n_events = 16;
  cfg.max_blocks = (uint32_t)n;
  cfg.max_mappings = (uint32_t)(2 * n);
  const size_t len = ckf_producer_mem_size(&cfg);
  void *memory = take(len);
  for (size_t i = 0; i < n; i++) {
    blocks[i].local = ckf_rng_draw(&state);
    blocks[i].external = externals[i] = ckf_rng_draw(&state);
  }
  for (int run = 0; run < RUNS; run++) {
    need(ckf_producer_init(&p, &cfg, memory, len) == CKF_OK);
    keep_best(&fresh, store_all(&p, blocks, n, 0));
    keep_best(&second, store_all(&p, blocks, n, 1));
    keep_best(&repeat, store_all(&p, blocks, n, 0));
    keep_best(&one, remove_all(&p, externals, n, 1));
    keep_best(&last, remove_all(&p, externals, n, 0));
    ckf_producer_stats_get(&p, &st);
    need(st.contributions == 0);
    store_all(&p, blocks, n, 0);
    keep_best(&clear, clear_all(&p, n));
  }
  report("producer_new_", size, 1e3 / fresh, "M blocks/s");
  report("producer_second_owner_", size, 1e3 / second, "M blocks/s");
  report("producer_repeat_", size, 1e3 / repeat, "M blocks/s");
  report("producer_remove_shared_", size, 1e3 / one, "M blocks/s");
  report("producer_remove_last_", size, 1e3 / last, "M blocks/s");
  report("producer_clear_", size, 1e3 / clear, "M blocks/s");

  /* Memory: the same limits with and without a second owner per block. */
  ckf_producer_stats_get(&p, &st);
  const double both = (double)st.exact_bytes;
  cfg.max_mappings = (uint32_t)n;
  const size_t single_len = ckf_producer_mem_size(&cfg);
  void *single = take(single_len);
  need(ckf_producer_init(&p, &cfg, single, single_len) == CKF_OK);
  ckf_producer_stats_get(&p, &st);
  report("producer_exact_bytes_per_block_", size, (double)st.exact_bytes / (double)n, "bytes");
  report("producer_exact_bytes_per_further_owner_", size,
         (both - (double)st.exact_bytes) / (double)n, "bytes");
  report("producer_filter_bytes_per_block_", size, (double)st.filter_bytes / (double)n, "bytes");
  free(single);
  free(memory);
  free(blocks);
  free(externals);
}

int main(void) {
  bench(1048576, "1M");
  if (getenv("BENCH_LARGE"))
    bench(8388608, "8M");
  return 0;
}
