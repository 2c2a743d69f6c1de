/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does a block cost the producer, exact owners, filter and dirty set together? Chains of 64 in
 * events of 16 blocks, a drain after each 16th event, at 1 M and 8 M blocks: all new from one
 * worker, then a second owner of each, then repeats, then removals while another owner is left and
 * of the last one, at last a clear. expected_blocks = max_blocks = n, max_mappings = 2 n. Each
 * figure is the median of five runs, in thread CPU time. The bytes are those of the whole memory
 * block.
 */

#define CKF_STATIC
#include "ckf.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { RUNS = 5, EVENT = 16, CHAIN = 64 };

enum { NEW, SECOND, REPEAT, REMOVE_SHARED, REMOVE_LAST, CLEAR, FIGURES };

static double cpu_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void report(const char *bench, const char *size, double value, const char *unit) {
  printf("{\"bench\":\"%s_%s\",\"value\":%.4g,\"unit\":\"%s\"}\n", bench, size, value, unit);
  fflush(stdout);
}

static void need(bool holds) {
  if (!holds) {
    fprintf(stderr, "bench_producer: unexpected result\n");
    exit(2);
  }
}

/* Huge pages where the system gives them: a table of many megabytes is read at random. */
static void *take(size_t bytes) {
  void *memory =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  need(memory != MAP_FAILED);
  (void)madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

static void drain(ckf_producer *p, size_t event) {
  ckf_batch batch;
  if (event % 16 == 15)
    need(ckf_producer_drain(p, &batch) >= 0);
}

/* Millions of blocks per second. */
static double store_all(ckf_producer *p, uint64_t worker, const ckf_block *blocks, size_t n) {
  const ckf_member member = {worker, 0};
  const double start = cpu_s();
  for (size_t at = 0; at < n; at += EVENT) {
    const bool has_parent = at % CHAIN != 0;
    ckf_outcome out;
    need(ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, has_parent,
                             has_parent ? blocks[at - 1].external : 0, false, 0, blocks + at, EVENT,
                             &out) == CKF_OK);
    drain(p, at / EVENT);
  }
  return (double)n / (cpu_s() - start) / 1e6;
}

static double remove_all(ckf_producer *p, uint64_t worker, const uint64_t *externals, size_t n) {
  const ckf_member member = {worker, 0};
  const double start = cpu_s();
  for (size_t at = 0; at < n; at += EVENT) {
    ckf_outcome out;
    need(ckf_producer_removed(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals + at,
                              EVENT, &out) == CKF_OK &&
         out.unknown == 0);
    drain(p, at / EVENT);
  }
  return (double)n / (cpu_s() - start) / 1e6;
}

static double clear_all(ckf_producer *p, uint64_t worker, size_t n) {
  const ckf_member member = {worker, 0};
  const double start = cpu_s();
  ckf_outcome out;
  ckf_batch batch;
  need(ckf_producer_cleared(p, &member, CKF_DOMAIN_MISSING, &out) == CKF_OK &&
       ckf_producer_drain(p, &batch) >= 0 && out.unmapped == n);
  return (double)n / (cpu_s() - start) / 1e6;
}

static int ascending(const void *x, const void *y) {
  const double a = *(const double *)x, b = *(const double *)y;
  return (a > b) - (a < b);
}

static ckf_producer_config config(size_t n, size_t mappings) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = n;
  cfg.filter.publish_every_n_events = 16;
  cfg.max_blocks = (uint32_t)n;
  cfg.max_mappings = (uint32_t)mappings;
  return cfg;
}

/* Chains whose blocks an engine names by canonical hashes under a mask. */
static void make_blocks(ckf_block *blocks, uint64_t *externals, size_t n, uint64_t seed) {
  uint64_t canonical = 0;
  for (size_t i = 0; i < n; i++) {
    blocks[i].local = ckf_rng_draw(&seed);
    canonical = i % CHAIN == 0 ? blocks[i].local : ckf_child(canonical, blocks[i].local);
    blocks[i].external = externals[i] = canonical ^ UINT64_C(0xA5A55A5AD3C4B2E1);
  }
}

static void bench(size_t n, const char *size) {
  static const char *const names[FIGURES] = {"producer_new",         "producer_second_owner",
                                             "producer_repeat",      "producer_remove_shared",
                                             "producer_remove_last", "producer_clear"};
  const ckf_producer_config cfg = config(n, 2 * n);
  const size_t len = ckf_producer_mem_size(&cfg);
  void *memory = take(len);
  ckf_block *blocks = take(n * sizeof *blocks);
  uint64_t *externals = take(n * sizeof *externals);
  double rates[FIGURES][RUNS];
  ckf_producer p;
  for (unsigned run = 0; run < RUNS; run++) {
    ckf_producer_stats st;
    make_blocks(blocks, externals, n, 77 + run);
    need(ckf_producer_init(&p, &cfg, memory, len) == CKF_OK);
    rates[NEW][run] = store_all(&p, 1, blocks, n);
    rates[SECOND][run] = store_all(&p, 2, blocks, n);
    rates[REPEAT][run] = store_all(&p, 2, blocks, n);
    rates[REMOVE_SHARED][run] = remove_all(&p, 2, externals, n);
    rates[REMOVE_LAST][run] = remove_all(&p, 1, externals, n);
    ckf_producer_stats_get(&p, &st);
    need(st.contributions == 0 && st.unique_blocks == 0 && st.capacity_failures == 0);
    store_all(&p, 1, blocks, n);
    rates[CLEAR][run] = clear_all(&p, 1, n);
  }
  for (unsigned i = 0; i < FIGURES; i++) {
    qsort(rates[i], RUNS, sizeof rates[i][0], ascending);
    report(names[i], size, rates[i][RUNS / 2], "M blocks/s");
  }
  munmap(memory, len);
  munmap(blocks, n * sizeof *blocks);
  munmap(externals, n * sizeof *externals);
}

static void bench_memory(size_t n, const char *size) {
  const ckf_producer_config one = config(n, n), two = config(n, 2 * n);
  const double single = (double)ckf_producer_mem_size(&one);
  report("producer_bytes_per_block", size, single / (double)n, "bytes");
  report("producer_bytes_per_further_owner", size,
         ((double)ckf_producer_mem_size(&two) - single) / (double)n, "bytes");
}

int main(void) {
  bench_memory(1048576, "1M");
  bench_memory(10000000, "10M");
  bench(1048576, "1M");
  bench(8388608, "8M");
  return 0;
}
