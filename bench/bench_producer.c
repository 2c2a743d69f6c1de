/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does a block cost the producer, exact owners, filter and dirty set together? Chains of 64 in
 * events of 16 blocks, a drain after each 16th event, at 1 M and 8 M blocks: all new from one
 * worker, then a second owner of each, then repeats, then removals while another owner is left and
 * of the last one, at last a clear. expected_blocks = max_blocks = n and max_mappings = 2.5 n; the
 * second owner also with max_mappings = 2 n, where the last mappings fill a table to its limit. The
 * bytes are those of the whole memory block.
 */

#define CKF_STATIC
#include "bench.h"
#include "ckf.h"

enum { EVENT = 16, CHAIN = 64 };

enum { NEW, SECOND, REPEAT, REMOVE_SHARED, REMOVE_LAST, CLEAR, FIGURES };

typedef struct work {
  ckf_producer p;
  ckf_block *blocks;
  uint64_t *externals;
  void *memory;
  size_t n;
} work;

static void drain(ckf_producer *p, size_t event) {
  ckf_batch batch;
  if (event % 16 == 15)
    bench_need(ckf_producer_drain(p, &batch) >= 0);
}

/* Each returns millions of blocks per second. */
static double store_all(work *w, uint64_t worker) {
  const ckf_member member = {worker, 0};
  const double start = bench_cpu_ns();
  for (size_t at = 0; at < w->n; at += EVENT) {
    const bool has_parent = at % CHAIN != 0;
    ckf_outcome out;
    bench_need(ckf_producer_stored(&w->p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, has_parent,
                                   has_parent ? w->blocks[at - 1].external : 0, false, 0,
                                   w->blocks + at, EVENT, &out) == CKF_OK);
    drain(&w->p, at / EVENT);
  }
  return (double)w->n * 1e3 / (bench_cpu_ns() - start);
}

static double remove_all(work *w, uint64_t worker) {
  const ckf_member member = {worker, 0};
  const double start = bench_cpu_ns();
  for (size_t at = 0; at < w->n; at += EVENT) {
    ckf_outcome out;
    bench_need(ckf_producer_removed(&w->p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING,
                                    w->externals + at, EVENT, &out) == CKF_OK &&
               out.unknown == 0);
    drain(&w->p, at / EVENT);
  }
  return (double)w->n * 1e3 / (bench_cpu_ns() - start);
}

static double clear_all(work *w, uint64_t worker) {
  const ckf_member member = {worker, 0};
  const double start = bench_cpu_ns();
  ckf_outcome out;
  ckf_batch batch;
  bench_need(ckf_producer_cleared(&w->p, &member, CKF_DOMAIN_MISSING, &out) == CKF_OK &&
             ckf_producer_drain(&w->p, &batch) >= 0 && out.unmapped == w->n);
  return (double)w->n * 1e3 / (bench_cpu_ns() - start);
}

static ckf_producer_config config(size_t n, size_t mappings) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = n;
  cfg.filter.publish_every_n_events = 16;
  cfg.max_blocks = (uint32_t)n;
  cfg.max_mappings = (uint32_t)mappings;
  return cfg;
}

static void restart(work *w, size_t mappings) {
  const ckf_producer_config cfg = config(w->n, mappings);
  bench_need(ckf_producer_init(&w->p, &cfg, w->memory, ckf_producer_mem_size(&cfg)) == CKF_OK);
}

/* Chains whose blocks an engine names by canonical hashes under a mask. */
static void make_blocks(work *w, uint64_t seed) {
  uint64_t canonical = 0;
  for (size_t i = 0; i < w->n; i++) {
    const uint64_t local = w->blocks[i].local = ckf_rng_draw(&seed);
    canonical = i % CHAIN == 0 ? local : ckf_child(canonical, local);
    w->blocks[i].external = w->externals[i] = canonical ^ UINT64_C(0xA5A55A5AD3C4B2E1);
  }
}

static void bench(size_t n, const char *size) {
  static const char *const names[FIGURES] = {"new",           "second_owner", "repeat",
                                             "remove_shared", "remove_last",  "clear"};
  const ckf_producer_config cfg = config(n, 5 * n / 2);
  bench_sample rates[FIGURES] = {{{0}, 0}}, tight = {{0}, 0};
  static work w;
  w.n = n;
  w.memory = bench_memory(ckf_producer_mem_size(&cfg));
  w.blocks = bench_memory(n * sizeof *w.blocks);
  w.externals = bench_memory(n * sizeof *w.externals);
  for (unsigned run = 0; run < BENCH_RUNS; run++) {
    ckf_producer_stats st;
    make_blocks(&w, 77 + run);
    restart(&w, 5 * n / 2);
    bench_add(&rates[NEW], store_all(&w, 1));
    bench_add(&rates[SECOND], store_all(&w, 2));
    bench_add(&rates[REPEAT], store_all(&w, 2));
    bench_add(&rates[REMOVE_SHARED], remove_all(&w, 2));
    bench_add(&rates[REMOVE_LAST], remove_all(&w, 1));
    ckf_producer_stats_get(&w.p, &st);
    bench_need(st.contributions == 0 && st.unique_blocks == 0 && st.capacity_failures == 0);
    store_all(&w, 1);
    bench_add(&rates[CLEAR], clear_all(&w, 1));
    restart(&w, 2 * n);
    store_all(&w, 1);
    bench_add(&tight, store_all(&w, 2));
  }
  for (unsigned i = 0; i < FIGURES; i++)
    bench_print(&rates[i], "M blocks/s", "producer_%s_%s", names[i], size);
  bench_print(&tight, "M blocks/s", "producer_second_owner_up_to_the_limit_%s", size);
  free(w.memory);
  free(w.blocks);
  free(w.externals);
}

static void bench_bytes(size_t n, const char *size) {
  const ckf_producer_config one = config(n, n), two = config(n, 2 * n);
  const double single = (double)ckf_producer_mem_size(&one);
  bench_sample bytes = {{0}, 0};
  bench_add(&bytes, single / (double)n);
  bench_print(&bytes, "bytes", "producer_bytes_per_block_%s", size);
  bench_add(&bytes, ((double)ckf_producer_mem_size(&two) - single) / (double)n);
  bench_print(&bytes, "bytes", "producer_bytes_per_further_owner_%s", size);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  bench_bytes(1048576, "1M");
  bench_bytes(10000000, "10M");
  bench(1048576, "1M");
  bench(8388608, "8M");
  return 0;
}
