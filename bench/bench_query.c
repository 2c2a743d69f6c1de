/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How long does a router wait for the depths of all data centres? Prompts of 512 blocks against
 * lanes that hold all of each prompt (full), a prefix of uniform length of its own (uniform), or
 * nothing of it (none); each lane is filled up to its block count with other keys. Asked from local
 * hashes, as for a new prompt; from sequence hashes that were kept (kept); and as the next turn of
 * a conversation whose last prompt was a sixteenth shorter, with its hashes and its depths (turn).
 *
 *   bench_query [LANES BLOCKS [LEN [PROMPTS]]]     default: 16 x 1 M, 4 x 1 M, 64 x 1 M;
 *                                                  with BENCH_LARGE set also 16 x 10 M
 *
 * Beyond 16 lanes a query goes through several tables. Medians of runs; latency by the wall clock,
 * its reading (some 20 ns) included.
 */

#define CKF_STATIC
#include "ckf.h"

#include "bench.h"

enum { TABLES = 4 };

typedef struct fleet {
  ckf_table tables[TABLES];
  void *memory[TABLES];
  size_t table_count, lanes, blocks, len, prompts;
  uint64_t *locals[3]; /* full, uniform, none: prompts x len */
  uint64_t *keys[3];
} fleet;

static const char *const patterns[3] = {"full", "uniform", "none"};

static uint64_t depth_of(size_t prompt, size_t lane, size_t len) {
  uint64_t state = (uint64_t)prompt << 20 | lane;
  return ckf_rng_draw(&state) % (len + 1);
}

static void make_prompts(fleet *f) {
  const size_t n = f->prompts * f->len;
  uint64_t state = 0xABCDEF;
  for (int k = 0; k < 3; k++) {
    f->locals[k] = bench_memory(n * 8);
    f->keys[k] = bench_memory(n * 8);
    for (size_t i = 0; i < n; i++) {
      f->locals[k][i] = ckf_rng_draw(&state);
      f->keys[k][i] = i % f->len ? ckf_child(f->keys[k][i - 1], f->locals[k][i]) : f->locals[k][i];
    }
  }
}

/* One lane's words: its part of the prompts, then noise. */
static void fill_lane(const fleet *f, size_t lane, ckf_filter *filter) {
  uint64_t noise = UINT64_C(0x12345678) + lane * UINT64_C(0x100000001);
  size_t count = 0;
  for (size_t p = 0; p < f->prompts; p++) {
    const size_t depth = depth_of(p, lane, f->len);
    bench_need(ckf_filter_insert_n(filter, f->keys[0] + p * f->len, f->len, NULL) == f->len);
    bench_need(ckf_filter_insert_n(filter, f->keys[1] + p * f->len, depth, NULL) == depth);
    count += f->len + depth;
  }
  for (; count < f->blocks; count++)
    bench_need(ckf_filter_insert(filter, ckf_rng_draw(&noise)) == CKF_OK);
}

static void install_lane(const fleet *f, ckf_table *table, size_t lane, ckf_filter *filter,
                         uint64_t *words, uint32_t number) {
  const ckf_manifest *const m = ckf_table_manifest(table);
  const ckf_lease lease = {1, (uint8_t)number, 1};
  static ckf_image log[501];
  ckf_identity identity;
  ckf_lane writer;
  memset(words, 0, (size_t)m->format.bucket_count * 8);
  bench_need(ckf_filter_init(filter, &m->format, 500, words, log, NULL) == CKF_OK);
  fill_lane(f, lane, filter);
  memset(&identity, 0, sizeof identity);
  identity.pool = m->pools[number];
  identity.format = m->format;
  bench_need(ckf_lane_claim(&writer, table, number) == CKF_OK &&
             ckf_lane_assign(&writer, &identity, &lease) == CKF_OK);
  bench_need(ckf_lane_install(&writer, &identity, &lease, 1, words, (size_t)m->format.bucket_count)
                 .result == CKF_LANE_SNAPSHOT_INSTALLED);
}

static void make_tables(fleet *f) {
  ckf_config cfg = ckf_config_default();
  ckf_manifest m;
  ckf_filter filter;
  cfg.expected_blocks = f->blocks;
  memset(&m, 0, sizeof m);
  m.consumer_instance = 1;
  m.format.seed = cfg.seed;
  bench_need(ckf_config_check(&cfg, &m.format.bucket_count) == CKF_OK);
  uint64_t *words = bench_memory((size_t)m.format.bucket_count * 8);
  f->table_count = (f->lanes + CKF_LANES - 1) / CKF_LANES;
  bench_need(f->table_count <= TABLES);
  for (size_t lane = 0; lane < f->lanes; lane++) {
    ckf_table *const table = &f->tables[lane / CKF_LANES];
    const uint32_t number = (uint32_t)(lane % CKF_LANES);
    if (number == 0) {
      const size_t left = f->lanes - lane;
      m.configured = left < CKF_LANES ? (1u << left) - 1 : 0xFFFF;
      for (uint32_t i = 0; i < CKF_LANES; i++)
        m.pools[i].dc_id = lane + i;
      const size_t len = ckf_table_mem_size(&m);
      f->memory[lane / CKF_LANES] = bench_memory(len);
      bench_need(ckf_table_init(table, &m, 2, f->memory[lane / CKF_LANES], len) == CKF_OK);
    }
    install_lane(f, table, lane, &filter, words, number);
  }
  free(words);
}

enum { FRESH, KEPT, TURN };

/* The sum of all depths of one prompt; `matches` are those of its last turn. */
static uint64_t ask(const fleet *f, int pattern, size_t prompt, uint64_t *keys, int how,
                    ckf_matches *matches) {
  ckf_query query;
  uint64_t sum = 0;
  ckf_query_init(&query, f->locals[pattern] + prompt * f->len, f->len, keys,
                 how == FRESH ? 0 : f->len);
  for (size_t t = 0; t < f->table_count; t++) {
    bench_need((how == TURN ? ckf_table_find_again(&f->tables[t], &query, &matches[t])
                            : ckf_table_find(&f->tables[t], &query, &matches[t])) == CKF_OK);
    for (size_t i = 0; i < CKF_LANES; i++)
      sum += matches[t].depths[i];
  }
  return sum;
}

static void ask_last_turn(const fleet *f, int pattern, size_t prompt, ckf_matches *matches) {
  uint64_t *const keys = f->keys[pattern] + prompt * f->len;
  const size_t len = f->len - f->len / 16;
  ckf_query query;
  ckf_query_init(&query, NULL, len, keys, len);
  for (size_t t = 0; t < f->table_count; t++)
    bench_need(ckf_table_find(&f->tables[t], &query, &matches[t]) == CKF_OK);
}

static uint64_t sum_wanted(const fleet *f, int pattern, size_t prompt) {
  uint64_t sum = 0;
  for (size_t lane = 0; lane < f->lanes; lane++)
    sum += pattern == 0 ? f->len : pattern == 1 ? depth_of(prompt, lane, f->len) : 0;
  return sum;
}

static void measure(const fleet *f, int pattern, int how) {
  static const char *const hows[] = {"", "_kept", "_turn"};
  ckf_matches(*const turns)[TABLES] = bench_memory(f->prompts * sizeof *turns);
  double *const times = bench_memory(f->prompts * sizeof *times);
  uint64_t *const scratch = bench_memory(f->len * 8);
  const bool millions = f->blocks % 1000000 == 0;
  const size_t size = millions ? f->blocks / 1000000 : f->blocks;
  bench_sample p50 = {0}, p99 = {0};
  size_t off = 0;
  for (int run = 0; run < BENCH_RUNS; run++) {
    for (size_t p = 0; p < f->prompts; p++)
      ask_last_turn(f, pattern, p, turns[p]);
    for (size_t p = 0; p < f->prompts; p++) {
      uint64_t *const keys = how == FRESH ? scratch : f->keys[pattern] + p * f->len;
      const double start = bench_wall_ns();
      const uint64_t sum = ask(f, pattern, p, keys, how, turns[p]);
      times[p] = (bench_wall_ns() - start) / 1e3;
      off += run == 0 && sum != sum_wanted(f, pattern, p); /* a collision behind the depth */
    }
    bench_sort(times, f->prompts);
    bench_add(&p50, times[f->prompts / 2]);
    bench_add(&p99, times[f->prompts * 99 / 100]);
  }
  bench_need(off * 50 <= f->prompts);
  for (int tail = 0; tail < 2; tail++)
    bench_print(tail ? &p99 : &p50, "us", "query_%zu_%zux%zu%s_%s%s%s", f->len, f->lanes, size,
                millions ? "M" : "", patterns[pattern], hows[how], tail ? "_p99" : "");
  free(times);
  free(turns);
  free(scratch);
}

static void run(size_t lanes, size_t blocks, size_t len, size_t prompts) {
  fleet f;
  memset(&f, 0, sizeof f);
  f.lanes = lanes;
  f.blocks = blocks;
  f.len = len;
  f.prompts = prompts;
  make_prompts(&f);
  make_tables(&f);
  for (int how = FRESH; how <= TURN; how++)
    for (int pattern = 0; pattern < 3; pattern++)
      measure(&f, pattern, how);
  for (size_t t = 0; t < f.table_count; t++)
    free(f.memory[t]);
  for (int k = 0; k < 3; k++) {
    free(f.locals[k]);
    free(f.keys[k]);
  }
}

int main(int argc, char **argv) {
  static const char usage[] = "[LANES BLOCKS [LEN [PROMPTS]]]";
  const size_t lanes_most = TABLES * CKF_LANES, most = UINT32_MAX;
  bench_arguments(argc, argv, 4, usage);
  if (argc == 2)
    bench_usage(false, usage);
  if (argc > 2) {
    const size_t lanes = bench_number(argv[1], lanes_most, usage);
    const size_t blocks = bench_number(argv[2], most, usage);
    const size_t len = argc > 3 ? bench_number(argv[3], most, usage) : 512;
    const size_t prompts = argc > 4 ? bench_number(argv[4], most, usage) : 512;
    if (blocks / 2 / len < prompts) {
      fprintf(stderr, "%s: a lane holds all prompts, some twice: BLOCKS must be at least %zu\n",
              argv[0], 2 * len * prompts);
      return 64;
    }
    bench_start();
    run(lanes, blocks, len, prompts);
    return 0;
  }
  bench_start();
  run(16, 1000000, 512, 512);
  run(4, 1000000, 512, 512);
  run(64, 1000000, 512, 512);
  if (getenv("BENCH_LARGE"))
    run(16, 10000000, 512, 512);
  return 0;
}
