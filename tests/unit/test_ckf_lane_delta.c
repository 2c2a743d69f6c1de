/* SPDX-License-Identifier: Apache-2.0 */

/* Snapshots of every size and deltas of few and of many images in a lane of a table, against a
 * plain copy of the lane's words: what is applied, what is refused and for which image, and that
 * nothing else is written. */

#include "test_ckf_table.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1 << 13, LANE = 3, MAX_IMAGES = 300, ROUNDS = 30000 };

static uint64_t random_state = 11;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

typedef struct rig {
  ckf_table table;
  ckf_lane lane;
  ckf_identity identity;
  ckf_lease lease;
  uint64_t sequence;
  uint64_t words[BUCKETS]; /* what the lane must hold */
  void *memory;
} rig;

static void install(rig *r) {
  r->lease.assignment_epoch++;
  r->sequence = draw(1000);
  cr_assert_eq(ckf_lane_assign(&r->lane, &r->identity, &r->lease), CKF_OK);
  cr_assert_eq(
      ckf_lane_install(&r->lane, &r->identity, &r->lease, r->sequence, r->words, BUCKETS).result,
      CKF_LANE_SNAPSHOT_INSTALLED);
}

static rig *open_rig(uint32_t configured) {
  rig *const r = calloc(1, sizeof *r);
  const ckf_manifest m = a_manifest(configured, BUCKETS);
  const size_t len = ckf_table_mem_size(&m);
  r->memory = malloc(len);
  cr_assert_eq(ckf_table_init(&r->table, &m, 2, r->memory, len), CKF_OK);
  cr_assert_eq(ckf_lane_claim(&r->lane, &r->table, LANE), CKF_OK);
  r->identity.pool = m.pools[LANE];
  r->identity.format = m.format;
  r->lease = (ckf_lease){5, LANE, 0};
  for (size_t b = 0; b < BUCKETS; b++)
    r->words[b] = draw(UINT64_MAX);
  install(r);
  return r;
}

static void close_rig(rig *r) {
  free(r->memory);
  free(r);
}

static void check_words(const rig *r) {
  for (uint32_t lane = 0; lane < 1u << r->table.column_shift_; lane++)
    for (uint32_t b = 0; b < BUCKETS; b++)
      cr_assert_eq(ckf_table_word(&r->table, lane, b), lane == LANE ? r->words[b] : 0);
}

/* The first image that may not be, by looking at all before it; n when there is none. */
static size_t first_bad(const ckf_image *images, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (images[i].bucket >= BUCKETS)
      return i;
    for (size_t k = 0; k < i; k++)
      if (images[k].bucket == images[i].bucket)
        return i;
  }
  return n;
}

static void apply(rig *r, const ckf_image *images, size_t n) {
  const size_t bad = first_bad(images, n);
  const ckf_lane_outcome out = ckf_lane_apply_delta(&r->lane, &r->identity, &r->lease, r->sequence,
                                                    r->sequence + 1, images, n);
  if (bad == n) {
    cr_assert_eq(out.result, CKF_LANE_DELTA_APPLIED);
    cr_assert(out.a == r->sequence + 1 && out.b == n);
    r->sequence++;
    for (size_t i = 0; i < n; i++)
      r->words[images[i].bucket] = images[i].word;
  } else {
    cr_assert_eq(out.result, CKF_LANE_DEACTIVATED);
    cr_assert_eq(out.fault,
                 images[bad].bucket < BUCKETS ? CKF_FAULT_DUPLICATE_IMAGE : CKF_FAULT_IMAGE_INDEX);
    cr_assert_eq(out.a, images[bad].bucket);
    cr_assert_eq(ckf_table_ready(&r->table), 0);
    install(r);
  }
}

/* Buckets from a narrow range often repeat, and those a power of two apart share parts of their
 * numbers. */
static void fill(ckf_image *images, size_t n) {
  const uint64_t range = UINT64_C(1) << (1 + draw(13)), step = UINT64_C(1) << draw(8);
  for (size_t i = 0; i < n; i++) {
    images[i].bucket = (uint32_t)(draw(range) * step % BUCKETS);
    images[i].word = draw(UINT64_MAX);
  }
  if (draw(10) == 0)
    images[draw(n)].bucket = BUCKETS + (uint32_t)draw(3) * 0x7FFF0000u;
}

static void run(uint32_t configured) {
  static ckf_image images[MAX_IMAGES];
  rig *const r = open_rig(configured);
  size_t applied = 0, refused = 0;
  for (size_t round = 0; round < ROUNDS; round++) {
    const size_t n = 1 + draw(draw(4) == 0 ? MAX_IMAGES : 34);
    const uint64_t before = r->sequence, epoch = r->lease.assignment_epoch;
    fill(images, n);
    apply(r, images, n);
    applied += epoch == r->lease.assignment_epoch && r->sequence == before + 1;
    refused += epoch != r->lease.assignment_epoch;
    if (round % 1000 == 0)
      check_words(r);
  }
  check_words(r);
  cr_assert_gt(applied, ROUNDS / 20);
  cr_assert_gt(refused, ROUNDS / 20);
  close_rig(r);
}

Test(ckf_lane_delta, random_deltas_in_a_table_of_four_columns) { run(1u << LANE); }

Test(ckf_lane_delta, random_deltas_in_a_table_of_sixteen_columns) { run(0xFFFF); }

/* Every pair of places in deltas around the size where the way of telling apart changes. */
Test(ckf_lane_delta, a_repeated_bucket_is_found_wherever_it_stands) {
  ckf_image images[40];
  rig *const r = open_rig(0xFF);
  for (size_t n = 1; n <= 40; n++)
    for (size_t i = 0; i < n; i++)
      for (size_t k = 0; k < i; k++) {
        for (size_t at = 0; at < n; at++)
          images[at] = (ckf_image){(uint32_t)(at * 193 % BUCKETS), draw(UINT64_MAX)};
        images[i].bucket = images[k].bucket;
        apply(r, images, n);
      }
  check_words(r);
  close_rig(r);
}

Test(ckf_lane_delta, a_snapshot_of_every_size_arrives_whole) {
  for (uint64_t buckets = CKF_MIN_BUCKETS; buckets <= 1024; buckets *= 2)
    for (uint32_t number = 0; number < CKF_LANES; number += 5) {
      ckf_manifest m;
      ckf_table table;
      ckf_lane lane;
      uint64_t words[1024];
      memset(&m, 0, sizeof m);
      m.format = (ckf_format){CKF_DEFAULT_SEED, buckets};
      m.configured = 1u << number;
      const size_t len = ckf_table_mem_size(&m);
      void *const memory = malloc(len);
      const ckf_identity identity = {m.pools[number], 0, 0, m.format};
      const ckf_lease lease = {0, (uint8_t)number, 1};
      for (size_t b = 0; b < buckets; b++)
        words[b] = draw(UINT64_MAX);
      cr_assert_eq(ckf_table_init(&table, &m, 2, memory, len), CKF_OK);
      cr_assert_eq(ckf_lane_claim(&lane, &table, number), CKF_OK);
      cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
      cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 1, words, (size_t)buckets).result,
                   CKF_LANE_SNAPSHOT_INSTALLED);
      for (uint32_t column = 0; column < 1u << table.column_shift_; column++)
        for (uint32_t b = 0; b < buckets; b++)
          cr_assert_eq(ckf_table_word(&table, column, b), column == number ? words[b] : 0);
      free(memory);
    }
}
