/* SPDX-License-Identifier: Apache-2.0 */

/* Prefix search: against a linear scan, on tables and on hits that no table would give. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static uint64_t random_state = 1;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

typedef struct evidence {
  const uint8_t *hit;
  size_t len, prefix; /* without `hit`: positions below `prefix` hit */
  uint64_t probes;
  bool outside;
} evidence;

static uint32_t row(void *user, size_t position) {
  evidence *e = user;
  e->probes++;
  e->outside |= position >= e->len;
  return position < e->len && (e->hit ? e->hit[position] : position < e->prefix) ? 1u : 0;
}

static uint32_t search(evidence *e) {
  uint32_t depths[CKF_LANES] = {0};
  ckf_search_rows(row, e, e->len, 1, depths);
  return depths[0];
}

Test(ckf_search, contiguous_prefixes_are_exact) {
  for (size_t len = 0; len < 700; len += 1 + len / 40)
    for (size_t prefix = 0; prefix <= len; prefix++) {
      evidence e = {NULL, len, prefix, 0, false};
      cr_assert_eq(search(&e), prefix);
      cr_assert_leq(e.probes, 2 * len + 16);
      cr_assert_not(e.outside);
    }
}

Test(ckf_search, no_evidence_leads_below_a_linear_scan_or_to_endless_work) {
  static uint8_t hit[3000];
  for (int round = 0; round < 60000; round++) {
    const size_t len = 1 + (size_t)draw(round % 10 ? 300 : 3000);
    const uint64_t density = 1 + draw(100); /* from holes everywhere to nearly full */
    const size_t prefix = (size_t)draw(len + 1);
    size_t linear = 0;
    for (size_t i = 0; i < len; i++)
      hit[i] = i < prefix ? draw(1000) >= density / 10 : draw(100) >= density;
    while (linear < len && hit[linear])
      linear++;
    evidence e = {hit, len, 0, 0, false};
    const uint32_t depth = search(&e);
    cr_assert_geq(depth, linear);
    cr_assert_leq(depth, len);
    cr_assert(depth == len || !hit[depth], "an answer is a position that missed");
    cr_assert_leq(e.probes, 2 * len + 16);
    cr_assert_not(e.outside);
  }
}

/* A collision behind the true depth, wherever it falls, must not be believed. */
Test(ckf_search, one_false_hit_changes_nothing) {
  enum { LEN = 200 };
  static uint8_t hit[LEN];
  for (size_t prefix = 0; prefix < LEN; prefix++)
    for (size_t extra = prefix + 1; extra < LEN; extra++) {
      memset(hit, 0, sizeof hit);
      memset(hit, 1, prefix);
      hit[extra] = 1;
      evidence e = {hit, LEN, 0, 0, false};
      cr_assert_eq(search(&e), prefix, "prefix %zu, false hit at %zu", prefix, extra);
      cr_assert_leq(e.probes, 2 * LEN + 16);
    }
}

Test(ckf_search, depth_is_capped_at_32_bits) {
  const size_t len = SIZE_MAX > UINT32_MAX ? (size_t)UINT32_MAX + 100 : SIZE_MAX;
  evidence e = {NULL, len, len, 0, false};
  cr_assert_eq(search(&e), UINT32_MAX);
  e.prefix = 3000000000u;
  cr_assert_eq(search(&e), 3000000000u);
}

Test(ckf_search, tables_give_what_a_linear_scan_gives) {
  enum { BUCKETS = 2048, CHAIN = 600 };
  const ckf_format format = {3, BUCKETS};
  static uint64_t words[BUCKETS], keys[CHAIN];
  static ckf_image log[501];
  ckf_filter f;
  cr_assert_eq(ckf_filter_init(&f, &format, 500, words, log, NULL), CKF_OK);
  for (int i = 0; i < 6000; i++)
    cr_assert_eq(ckf_filter_insert(&f, draw(UINT64_MAX)), CKF_OK);
  for (int round = 0; round < 1000; round++) {
    const size_t len = (size_t)draw(CHAIN), held = (size_t)draw(len + 1);
    size_t linear = 0;
    for (size_t i = 0; i < len; i++)
      keys[i] = draw(UINT64_MAX);
    for (size_t i = 0; i < held; i++)
      cr_assert_eq(ckf_filter_insert(&f, keys[i]), CKF_OK);
    while (linear < len && ckf_filter_contains(&f, keys[linear]))
      linear++;
    cr_assert_geq(linear, held);
    cr_assert_eq(ckf_search(&format, words, keys, len), linear);
    for (size_t i = 0; i < held; i++)
      cr_assert_eq(ckf_filter_remove(&f, keys[i]), CKF_OK);
  }
  cr_assert_eq(ckf_search(&format, words, NULL, 0), 0);
}
