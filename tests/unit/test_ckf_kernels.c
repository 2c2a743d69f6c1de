/* SPDX-License-Identifier: Apache-2.0 */

/* The vector kernels of the search answer what the portable one answers, bit for bit: in full
 * filters, with hits in any slot of either home. */

#include "support/kernels.h"
#include "test_ckf_table.h"

#include <stdlib.h>

enum { BUCKETS = 256, LEN = 300, ROUNDS = 400, KEYS = 40 };

static uint64_t random_state = 7;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

/* All lanes of a mask ready: noise, and most of the keys somewhere in a home. */
static void *fill(ckf_table *table, uint32_t lanes, const uint64_t *keys) {
  static uint64_t words[BUCKETS];
  const ckf_manifest m = a_manifest(lanes, BUCKETS);
  const size_t len = ckf_table_mem_size(&m);
  void *const mem = malloc(len);
  cr_assert_eq(ckf_table_init(table, &m, 2, mem, len), CKF_OK);
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    ckf_identity identity;
    ckf_lease lease;
    ckf_lane lane;
    if (!(lanes >> i & 1))
      continue;
    for (size_t b = 0; b < BUCKETS; b++)
      words[b] = draw(UINT64_MAX);
    for (size_t k = 0; k < KEYS; k++) {
      const ckf_probe probe = ckf_probe_make(&m.format, keys[k]);
      uint64_t *const word = &words[draw(2) ? probe.a : probe.b];
      const unsigned shift = 16 * (unsigned)draw(4);
      if (draw(20))
        *word = (*word & ~(UINT64_C(0xFFFF) << shift)) | (uint64_t)probe.fp << shift;
    }
    lease_lane(table, &lane, i, &identity, &lease);
    cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 1, words, BUCKETS).result,
                 CKF_LANE_SNAPSHOT_INSTALLED);
  }
  return mem;
}

static void compare(int (*find)(const ckf_table *, ckf_query *, ckf_matches *)) {
  static const uint32_t sets[] = {0xFFFF, 0x0001, 0x0003, 0x000B, 0x00A5, 0x8421};
  static uint64_t pool[KEYS], keys[LEN];
  size_t deep = 0;
  for (size_t k = 0; k < KEYS; k++)
    pool[k] = draw(UINT64_MAX);
  for (size_t set = 0; set < sizeof sets / sizeof sets[0]; set++) {
    ckf_table table;
    void *const mem = fill(&table, sets[set], pool);
    for (int round = 0; round < ROUNDS; round++) {
      const size_t len = (size_t)draw(LEN + 1);
      ckf_matches want, got;
      ckf_query query;
      for (size_t i = 0; i < len; i++)
        keys[i] = pool[draw(KEYS)];
      ckf_query_init(&query, NULL, len, keys, len);
      cr_assert_eq(portable_find(&table, &query, &want), CKF_OK);
      cr_assert_eq(find(&table, &query, &got), CKF_OK);
      cr_assert_arr_eq(&got, &want, sizeof got);
      for (uint32_t i = 0; i < CKF_LANES; i++)
        deep += want.depths[i] > 3;
    }
    free(mem);
  }
  cr_assert_gt(deep, 1000, "too few hits to tell kernels apart: %zu", deep);
}

Test(ckf_kernels, of_this_build_is_the_portable_one) { compare(ckf_table_find); }

#ifdef __x86_64__
Test(ckf_kernels, avx2_is_the_portable_one) {
  if (!__builtin_cpu_supports("avx2"))
    cr_skip_test("this processor has no AVX2");
  compare(avx2_find);
}
#endif
