/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast is the filter alone? Random keys at 1 M blocks in the table made for as many; with
 * BENCH_LARGE set in the environment also at 8 M. Inserts, finds and removals of all keys in one
 * batch ("batch"). Finds also of the same 64 K keys again and again ("resident"), so that the keys
 * do not push the filter out of the cache, and of these in batches of 1, 16 and 512. Then one
 * prefix search against asking block by block.
 */

#define CKF_STATIC
#include "ckf.h"

#include "bench.h"

enum { QUERY_LEN = 512, QUERIES = 4096, RESIDENT = 65536 };

typedef struct table {
  ckf_filter filter;
  uint64_t *words, *keys, *absent; /* n keys that are inserted, n that are not */
  uint32_t *deltas;
  size_t n;
  const char *size;
} table;

/* M/s of finds in batches of `batch`, all n keys, but only `window` different ones. */
static double finds(const table *t, const uint64_t *keys, size_t window, size_t batch) {
  size_t found = 0;
  const double start = bench_cpu_ns();
  for (size_t round = 0; round < t->n / window; round++)
    for (size_t at = 0; at < window; at += batch)
      found += ckf_filter_contains_n(&t->filter, keys + at, batch, NULL);
  const double spent = bench_cpu_ns() - start;
  bench_need(keys == t->keys ? found == t->n : found < t->n / 100);
  return (double)t->n * 1e3 / spent;
}

static void bench_finds(const table *t, const char *name, const uint64_t *keys) {
  static const size_t batches[] = {1, 16, 512};
  bench_sample all = {0}, resident = {0}, some[3] = {{{0}, 0}};
  for (int run = 0; run < BENCH_RUNS; run++) {
    bench_add(&all, finds(t, keys, t->n, t->n));
    bench_add(&resident, finds(t, keys, RESIDENT, RESIDENT));
    for (size_t i = 0; i < 3; i++)
      bench_add(&some[i], finds(t, keys, RESIDENT, batches[i]));
  }
  bench_print(&all, "M/s", "filter_%s_batch_%s", name, t->size);
  bench_print(&resident, "M/s", "filter_%s_batch_resident_%s", name, t->size);
  for (size_t i = 0; i < 3; i++)
    bench_print(&some[i], "M/s", "filter_%s_batch_of_%zu_%s", name, batches[i], t->size);
}

/* Every run fills the empty filter and empties it again; it is left full. */
static void bench_changes(table *t) {
  bench_sample insert = {0}, removal = {0};
  for (int run = 0; run < BENCH_RUNS; run++) {
    double start;
    if (run > 0) {
      start = bench_cpu_ns();
      bench_need(ckf_filter_remove_n(&t->filter, t->keys, t->n, NULL) == t->n);
      bench_add(&removal, (double)t->n * 1e3 / (bench_cpu_ns() - start));
    }
    start = bench_cpu_ns();
    bench_need(ckf_filter_insert_n(&t->filter, t->keys, t->n, NULL) == t->n);
    bench_add(&insert, (double)t->n * 1e3 / (bench_cpu_ns() - start));
  }
  bench_print(&insert, "M/s", "filter_insert_batch_%s", t->size);
  bench_print(&removal, "M/s", "filter_remove_batch_%s", t->size);
}

/* Queries of 512 blocks whose depths are uniform in 0 … 512, in a table with half its slots used.
 */
static void bench_search(table *t) {
  uint64_t *const keys = bench_memory((size_t)QUERIES * QUERY_LEN * sizeof *keys), state = 5;
  bench_sample fast = {0}, linear = {0};
  const size_t half = t->n / 2;
  bench_need(ckf_filter_remove_n(&t->filter, t->keys, half, NULL) == half);
  for (size_t q = 0; q < QUERIES; q++) {
    const size_t depth = ckf_rng_draw(&state) % (QUERY_LEN + 1);
    for (size_t i = 0; i < QUERY_LEN; i++) {
      keys[q * QUERY_LEN + i] = ckf_rng_draw(&state);
      if (i < depth)
        bench_need(ckf_filter_insert(&t->filter, keys[q * QUERY_LEN + i]) == CKF_OK);
    }
  }
  for (int run = 0; run < BENCH_RUNS; run++) {
    size_t sum = 0, linear_sum = 0;
    double start = bench_cpu_ns();
    for (size_t q = 0; q < QUERIES; q++)
      sum += ckf_search(&t->filter.format_, t->words, keys + q * QUERY_LEN, QUERY_LEN);
    bench_add(&fast, (bench_cpu_ns() - start) / QUERIES);
    start = bench_cpu_ns();
    for (size_t q = 0; q < QUERIES; q++) {
      size_t depth = 0;
      while (depth < QUERY_LEN && ckf_filter_contains(&t->filter, keys[q * QUERY_LEN + depth]))
        depth++;
      linear_sum += depth;
    }
    bench_add(&linear, (bench_cpu_ns() - start) / QUERIES);
    BENCH_KEEP(sum + linear_sum);
  }
  bench_print(&fast, "ns", "search_512_%s", t->size);
  bench_print(&linear, "ns", "search_512_linear_%s", t->size);
  free(keys);
}

static void bench(size_t n, const char *size) {
  static ckf_image log[501];
  ckf_config cfg = ckf_config_default();
  ckf_format format = {cfg.seed, 0};
  table t = {.n = n, .size = size};
  uint64_t state = 1;
  cfg.expected_blocks = n;
  bench_need(ckf_config_check(&cfg, &format.bucket_count) == CKF_OK);
  t.words = bench_memory((size_t)format.bucket_count * sizeof *t.words);
  t.keys = bench_memory(n * sizeof *t.keys);
  t.absent = bench_memory(n * sizeof *t.absent);
  t.deltas = bench_memory(CKF_DELTA_TABLE_LEN * sizeof *t.deltas);
  ckf_delta_table(format.seed, t.deltas);
  for (size_t i = 0; i < n; i++) {
    t.keys[i] = ckf_rng_draw(&state);
    t.absent[i] = ckf_rng_draw(&state);
  }
  bench_need(ckf_filter_init(&t.filter, &format, 500, t.words, log, t.deltas) == CKF_OK);
  bench_changes(&t);
  bench_finds(&t, "find_present", t.keys);
  bench_finds(&t, "find_absent", t.absent);
  bench_search(&t);
  free(t.words);
  free(t.keys);
  free(t.absent);
  free(t.deltas);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  bench(1u << 20, "1M");
  if (getenv("BENCH_LARGE") != NULL)
    bench(1u << 23, "8M");
  return 0;
}
