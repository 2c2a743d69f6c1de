/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast do snapshots and deltas become a consumer's words? CBI1 frames of a whole filter of
 * 524,288 buckets (4 MiB) and of 16 images, in both directions; the snapshot assembled, and
 * installed into one lane of a table of 16 (64 MiB); deltas of 16 to 100,000 images applied to that
 * lane. Copying the same 4 MiB tells what the memory gives.
 */

#include "bench.h"
#include "ckf.h"

enum { BUCKETS = 1 << 19, BYTES = 8 * BUCKETS, REPEAT = 8, LANE = 5, SMALL = 16 };

static const ckf_format format = {CKF_DEFAULT_SEED, BUCKETS};
static bench_sample sample;

static void print_rate(const char *name) { bench_print(&sample, "GB/s", "%s", name); }

/* ---- frames ---- */

static void bench_snapshot(const uint64_t *words) {
  const size_t len = ckf_cbi1_snapshot_size(&format, BUCKETS, 0);
  uint8_t *const frame = bench_memory(len), prefix[CKF_CBI1_SNAPSHOT_PREFIX_BYTES];
  uint64_t *const target = bench_memory(BYTES), epoch;
  const double total = (double)len * REPEAT;
  ckf_cbi1_frame view;
  ckf_assembly assembly;
  bench_sample head = {0}, decode = {0}, assemble = {0}, copy = {0};
  for (int run = 0; run < BENCH_RUNS; run++) {
    double start = bench_cpu_ns();
    for (int i = 0; i < REPEAT; i++)
      bench_need(ckf_cbi1_snapshot_encode(&format, 1, 1, words, BUCKETS, BUCKETS, 0, frame, len) ==
                 (ptrdiff_t)len);
    bench_add(&sample, total / (bench_cpu_ns() - start));
    start = bench_cpu_ns();
    for (int i = 0; i < REPEAT; i++) {
      const uint64_t *body;
      size_t body_len;
      bench_need(ckf_cbi1_snapshot_prefix(&format, 1, 1, words, BUCKETS, BUCKETS, 0, prefix, &body,
                                          &body_len) == CKF_OK);
    }
    bench_add(&head, total / (bench_cpu_ns() - start));
    bench_need(memcmp(prefix, frame, sizeof prefix) == 0);
    start = bench_cpu_ns();
    for (int i = 0; i < REPEAT; i++)
      bench_need(ckf_cbi1_decode(&format, frame, len, &view) == CKF_OK);
    bench_add(&decode, total / (bench_cpu_ns() - start));
    bench_need(ckf_assembly_init(&assembly, &format, target, BUCKETS) == CKF_OK);
    start = bench_cpu_ns();
    for (int i = 0; i < REPEAT; i++)
      bench_need(ckf_cbi1_decode(&format, frame, len, &view) == CKF_OK &&
                 ckf_assembly_absorb(&assembly, &view, &epoch) == 1);
    bench_add(&assemble, total / (bench_cpu_ns() - start));
    bench_need(memcmp(target, words, BYTES) == 0);
    start = bench_cpu_ns();
    for (int i = 0; i < REPEAT; i++) {
      memcpy(target, words, BYTES);
      BENCH_KEEP(target);
    }
    bench_add(&copy, (double)BYTES * REPEAT / (bench_cpu_ns() - start));
  }
  print_rate("cbi1_encode");
  bench_print(&head, "GB/s", "cbi1_prefix");
  bench_print(&decode, "GB/s", "cbi1_decode");
  bench_print(&assemble, "GB/s", "cbi1_assemble"); /* decoded and copied into the filter's words */
  bench_print(&copy, "GB/s", "memory_copy");
  free(frame);
  free(target);
}

static void bench_frame(void) {
  enum { TIMES = 100000 };
  uint8_t frame[CKF_CBI1_DELTA_PREFIX_BYTES + SMALL * CKF_CBI1_IMAGE_BYTES];
  ckf_image images[SMALL];
  ckf_cbi1_frame view;
  bench_sample decode = {0};
  for (uint32_t i = 0; i < SMALL; i++)
    images[i] = (ckf_image){i * 1001, UINT64_C(0x0102030405060708) * i};
  for (int run = 0; run < BENCH_RUNS; run++) {
    double start = bench_cpu_ns();
    for (uint64_t i = 0; i < TIMES; i++) {
      bench_need(ckf_cbi1_delta_encode(&format, 1, i, i + 1, images, SMALL, frame, sizeof frame) ==
                 (ptrdiff_t)sizeof frame);
      BENCH_KEEP(frame);
    }
    bench_add(&sample, (bench_cpu_ns() - start) / TIMES);
    start = bench_cpu_ns();
    for (int i = 0; i < TIMES; i++) {
      BENCH_KEEP(frame);
      bench_need(ckf_cbi1_decode(&format, frame, sizeof frame, &view) == CKF_OK);
    }
    bench_add(&decode, (bench_cpu_ns() - start) / TIMES);
    bench_need(view.epoch == TIMES && ckf_cbi1_image(&view, 3).word == images[3].word);
  }
  bench_print(&sample, "ns", "cbi1_encode_%d_images", SMALL);
  bench_print(&decode, "ns", "cbi1_decode_%d_images", SMALL);
}

/* ---- a lane of a full table ---- */

static ckf_table table;
static ckf_lane lanes[CKF_LANES];
static ckf_manifest manifest;

static ckf_identity identity_of(uint32_t lane) {
  return (ckf_identity){manifest.pools[lane], 1, 1, format};
}

static void install(uint32_t lane, uint64_t epoch, const uint64_t *words) {
  const ckf_identity identity = identity_of(lane);
  const ckf_lease lease = {1, (uint8_t)lane, epoch};
  bench_need(ckf_lane_assign(&lanes[lane], &identity, &lease) == CKF_OK);
  bench_need(ckf_lane_install(&lanes[lane], &identity, &lease, 1, words, BUCKETS).result ==
             CKF_LANE_SNAPSHOT_INSTALLED);
}

static void *open_table(const uint64_t *words) {
  manifest.consumer_instance = 1;
  manifest.format = format;
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    manifest.configured |= 1u << i;
    manifest.pools[i] = (ckf_pool){manifest.domain, 1000 + i};
  }
  const size_t len = ckf_table_mem_size(&manifest);
  void *const mem = bench_memory(len);
  bench_need(ckf_table_init(&table, &manifest, 2, mem, len) == CKF_OK);
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    bench_need(ckf_lane_claim(&lanes[i], &table, i) == CKF_OK);
    install(i, 1, words);
  }
  return mem;
}

static void bench_install(const uint64_t *words) {
  for (uint64_t run = 0; run < 3 * BENCH_RUNS; run++) {
    const double start = bench_cpu_ns();
    install(LANE, 2 + run, words);
    bench_add(&sample, BYTES / (bench_cpu_ns() - start));
  }
  for (uint32_t b = 0; b < BUCKETS; b++)
    bench_need(ckf_table_word(&table, LANE, b) == words[b]);
  print_rate("lane_install");
}

/* One image in each of len equal parts of the buckets, as from a delta that is sorted. */
static void draw(ckf_image *images, size_t len, uint64_t *state) {
  size_t part = BUCKETS;
  while (part * len > BUCKETS)
    part /= 2;
  for (size_t i = 0; i < len; i++) {
    images[i].word = ckf_rng_draw(state);
    images[i].bucket = (uint32_t)(i * part + ckf_rng_draw(state) % part);
  }
}

static void bench_deltas(size_t len, size_t count, uint64_t *sequence) {
  ckf_image *const images = bench_memory(len * count * sizeof *images);
  const ckf_identity identity = identity_of(LANE);
  const ckf_lease lease = lanes[LANE].lease_;
  uint64_t state = 99;
  for (int run = 0; run < BENCH_RUNS; run++) {
    for (size_t i = 0; i < count; i++)
      draw(images + i * len, len, &state);
    const double start = bench_cpu_ns();
    for (size_t i = 0; i < count; i++, ++*sequence)
      bench_need(ckf_lane_apply_delta(&lanes[LANE], &identity, &lease, *sequence, *sequence + 1,
                                      images + i * len, len)
                     .result == CKF_LANE_DELTA_APPLIED);
    bench_add(&sample, (double)(len * count) * 1e3 / (bench_cpu_ns() - start));
    for (size_t i = (count - 1) * len; i < count * len; i++)
      bench_need(ckf_table_word(&table, LANE, images[i].bucket) == images[i].word);
  }
  bench_print(&sample, "M/s", "lane_delta_%zu_images", len);
  free(images);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  uint64_t state = 1, sequence = 1;
  bench_start();
  uint64_t *const words = bench_memory(BYTES);
  for (uint32_t i = 0; i < BUCKETS; i++)
    words[i] = ckf_rng_draw(&state);
  bench_snapshot(words);
  bench_frame();
  void *const mem = open_table(words);
  bench_install(words);
  bench_deltas(16, 20000, &sequence);
  bench_deltas(1000, 2000, &sequence);
  bench_deltas(100000, 20, &sequence);
  free(mem);
  free(words);
  return 0;
}
