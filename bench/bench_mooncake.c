/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast does a producer take a recorded load? Requests of a Mooncake trace (JSON lines with
 * "hash_ids", which name blocks together with their prefix), each as one root store of its whole
 * chain, request i from worker 1 + i % 16, ten copies of the trace with blocks of their own.
 * expected_blocks = 2^21, limits by default. The file is the first argument or BENCH_MOONCAKE;
 * without one nothing is measured, and a line says so.
 */

#define CKF_STATIC
#include "bench.h"
#include "ckf.h"

#include <jansson.h>

enum { WORKERS = 16, COPIES = 10, DRAIN_EVERY = 16 };

typedef struct trace {
  uint64_t *ids; /* of all requests, one behind the other */
  size_t *ends;  /* of each request in ids */
  size_t requests, blocks, requests_cap, blocks_cap;
} trace;

static void *grow(void *old, size_t *cap, size_t need, size_t size) {
  if (need <= *cap)
    return old;
  *cap = 2 * need;
  old = realloc(old, *cap * size);
  bench_need(old != NULL);
  return old;
}

static void add_request(trace *t, const json_t *ids) {
  bench_need(json_is_array(ids));
  t->ends = grow(t->ends, &t->requests_cap, t->requests + 1, sizeof *t->ends);
  t->ids = grow(t->ids, &t->blocks_cap, t->blocks + json_array_size(ids), sizeof *t->ids);
  for (size_t i = 0; i < json_array_size(ids); i++)
    t->ids[t->blocks++] = (uint64_t)json_integer_value(json_array_get(ids, i));
  t->ends[t->requests++] = t->blocks;
}

static bool read_trace(trace *t, const char *path) {
  FILE *file = fopen(path, "r");
  json_t *request;
  if (file == NULL)
    return false;
  while ((request = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL)) != NULL) {
    add_request(t, json_object_get(request, "hash_ids"));
    json_decref(request);
  }
  fclose(file);
  return t->requests > 0;
}

/* Blocks of all copies in the order of the events. */
static void make_blocks(const trace *t, ckf_block *blocks, uint64_t run) {
  for (uint64_t copy = 0; copy < COPIES; copy++)
    for (size_t i = 0; i < t->blocks; i++) {
      uint64_t state = t->ids[i] ^ (copy + run * 100) << 40;
      blocks->local = ckf_rng_draw(&state);
      blocks->external = blocks->local ^ UINT64_C(0xA5A55A5AD3C4B2E1);
      blocks++;
    }
}

/* Millions of blocks per second. */
static double ingest(const trace *t, ckf_producer *p, const ckf_block *blocks, size_t workers) {
  const double start = bench_cpu_ns();
  for (size_t copy = 0, event = 0; copy < COPIES; copy++)
    for (size_t i = 0; i < t->requests; i++, event++) {
      const size_t first = i == 0 ? 0 : t->ends[i - 1], n = t->ends[i] - first;
      const ckf_member member = {1 + i % workers, 0};
      ckf_outcome out;
      ckf_batch batch;
      bench_need(ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0,
                                     false, 0, blocks, n, &out) == CKF_OK);
      if (event % DRAIN_EVERY == DRAIN_EVERY - 1)
        bench_need(ckf_producer_drain(p, &batch) >= 0);
      blocks += n;
    }
  return (double)(COPIES * t->blocks) * 1e3 / (bench_cpu_ns() - start);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 1, "[TRACE]");
  const char *const path = argc > 1 ? argv[1] : getenv("BENCH_MOONCAKE");
  trace t = {NULL, NULL, 0, 0, 0, 0};
  ckf_producer_config cfg = ckf_producer_config_default();
  ckf_producer_stats st = {0};
  bench_sample rate = {{0}, 0};
  ckf_producer p;
  bench_start();
  if (path == NULL || !read_trace(&t, path)) {
    fprintf(stderr, "bench_mooncake: skipped, %s\n",
            path ? "the trace cannot be read" : "BENCH_MOONCAKE names no trace");
    return path != NULL;
  }
  cfg.filter.expected_blocks = 1u << 21;
  cfg.filter.publish_every_n_events = DRAIN_EVERY;
  const size_t len = ckf_producer_mem_size(&cfg);
  void *memory = bench_memory(len);
  ckf_block *blocks = bench_memory(COPIES * t.blocks * sizeof *blocks);
  for (size_t workers = 1; workers <= WORKERS; workers *= WORKERS) {
    for (uint64_t run = 0; run < BENCH_RUNS; run++) {
      make_blocks(&t, blocks, run);
      bench_need(ckf_producer_init(&p, &cfg, memory, len) == CKF_OK);
      bench_add(&rate, ingest(&t, &p, blocks, workers));
      ckf_producer_stats_get(&p, &st);
    }
    bench_print(&rate, "M blocks/s", "mooncake_%zu_workers", workers);
    bench_add(&rate, (double)st.unique_blocks);
    bench_print(&rate, "blocks", "mooncake_%zu_workers_unique", workers);
  }
  free(memory);
  free(blocks);
  free(t.ids);
  free(t.ends);
  return 0;
}
