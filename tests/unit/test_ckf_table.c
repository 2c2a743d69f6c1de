/* SPDX-License-Identifier: Apache-2.0 */

/* A table of lanes: manifests, claims, memory, and queries over all lanes against one linear scan
 * per lane. */

#include "test_ckf_table.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static uint64_t random_state = 7;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

/* A table in memory of exactly the size that was asked for, at an odd address. */
static void *build(ckf_table *table, const ckf_manifest *m) {
  const size_t len = ckf_table_mem_size(m);
  char *const memory = malloc(len + 1);
  cr_assert_gt(len, 0);
  cr_assert_eq(ckf_table_init(table, m, 2, memory + 1, len - 1), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_table_init(table, m, 2, memory + 1, len), CKF_OK);
  return memory;
}

Test(ckf_manifest, lanes_are_checked_in_order_and_the_first_bad_one_is_named) {
  ckf_manifest m = a_manifest(0xFFFF, 64), bad;
  uint32_t lane = 99;
  cr_assert_eq(ckf_manifest_check(&m, &lane), CKF_OK);
  cr_assert_eq(lane, 99);
  for (int part = 0; part < 4; part++) { /* each part of a domain counts */
    bad = m;
    bad.pools[1].domain.semantics_digest[15] ^= part == 0;
    bad.pools[1].domain.routing_digest[0] ^= part == 1;
    bad.pools[1].domain.semantics_source ^= part == 2;
    bad.pools[1].domain.routing_source ^= part == 3;
    bad.pools[4] = bad.pools[3]; /* later, so not reported */
    cr_assert_eq(ckf_manifest_check(&bad, &lane), CKF_ERR_MIXED_DOMAIN);
    cr_assert_eq(lane, 1);
    bad.configured &= ~2u; /* a lane out of use is not looked at */
    cr_assert_eq(ckf_manifest_check(&bad, &lane), CKF_ERR_DUPLICATE_POOL);
    cr_assert_eq(lane, 4);
  }
  bad = m;
  bad.format.bucket_count = 96;
  cr_assert_eq(ckf_manifest_check(&bad, NULL), CKF_ERR_FORMAT_BUCKET_COUNT);
  cr_assert_eq(ckf_table_mem_size(&bad), 0);
  bad.configured = 0;
  cr_assert_eq(ckf_manifest_check(&bad, NULL), CKF_ERR_NO_LANES);
  bad.configured = 1u << 16;
  cr_assert_eq(ckf_manifest_check(&bad, NULL), CKF_ERR_INVALID_LANE);
}

Test(ckf_table, takes_one_column_per_lane_up_to_the_highest) {
  static const struct {
    uint32_t configured;
    size_t columns;
  } cases[] = {{1, 1}, {2, 2}, {3, 2}, {4, 4}, {0x10, 8}, {0x80, 8}, {0x100, 16}, {0xFFFF, 16}};
  ckf_table table;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const ckf_manifest m = a_manifest(cases[i].configured, 128);
    cr_assert_eq(ckf_table_mem_size(&m), cases[i].columns * 8 * (128 + 2) + 127);
    free(build(&table, &m));
  }
}

Test(ckf_table, refuses_a_bad_window_and_other_structs) {
  const ckf_manifest m = a_manifest(1, 64);
  static uint64_t memory[256];
  ckf_table table;
  cr_assert_eq(ckf_table_init(&table, &m, 0, memory, sizeof memory), CKF_ERR_WINDOW);
  cr_assert_eq(ckf_table_init(&table, &m, 9, memory, sizeof memory), CKF_ERR_WINDOW);
  cr_assert_eq(ckf_table_init_abi(&table, 1, &m, 2, memory, sizeof memory), CKF_ERR_ABI);
  cr_assert_eq(ckf_table_init(&table, &m, 8, NULL, 0), CKF_ERR_NOSPACE);
  const ckf_manifest none = a_manifest(0, 64);
  cr_assert_eq(ckf_table_init(&table, &none, 2, memory, sizeof memory), CKF_ERR_NO_LANES);
  ckf_manifest wide = a_manifest(1, 64);
  for (uint32_t bit = 16; bit < 32; bit++) {
    wide.configured = UINT32_C(1) << bit;
    cr_assert_eq(ckf_table_mem_size(&wide), 0);
    cr_assert_eq(ckf_table_init(&table, &wide, 2, memory, sizeof memory), CKF_ERR_INVALID_LANE);
  }
}

Test(ckf_table, a_lane_has_one_writer_at_a_time) {
  const ckf_manifest m = a_manifest(0x5, 64);
  ckf_identity identity;
  ckf_lease lease;
  ckf_lane lane, other;
  ckf_table table;
  uint64_t words[64] = {0};
  void *memory = build(&table, &m);
  cr_assert_eq(ckf_lane_claim(&other, &table, 16), CKF_ERR_INVALID_LANE);
  cr_assert_eq(ckf_lane_claim(&other, &table, 1), CKF_ERR_UNCONFIGURED_LANE);
  cr_assert_eq(ckf_lane_claim_abi(&other, 1, &table, 0), CKF_ERR_ABI);
  lease_lane(&table, &lane, 2, &identity, &lease);
  cr_assert_eq(ckf_lane_claim(&other, &table, 2), CKF_ERR_LANE_CLAIMED);
  cr_assert_eq(ckf_lane_claim(&other, &table, 0), CKF_OK);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 1, words, 64).result,
               CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert_eq(ckf_table_ready(&table), 4);
  ckf_lane_release(&lane);
  cr_assert_eq(ckf_table_ready(&table), 0);
  cr_assert_eq(ckf_lane_claim(&lane, &table, 2), CKF_OK);
  free(memory);
}

Test(ckf_table, a_withdrawn_lane_is_unavailable_and_a_captured_one_still_answers) {
  const ckf_manifest m = a_manifest(0x8, 16);
  const uint64_t locals[2] = {11, 22};
  ckf_image log[501];
  uint64_t words[16] = {0}, keys[2];
  ckf_identity identity;
  ckf_lease lease;
  ckf_matches matches;
  ckf_query query;
  ckf_filter f;
  ckf_table table;
  ckf_lane lane;
  void *memory = build(&table, &m);
  lease_lane(&table, &lane, 3, &identity, &lease);
  ckf_query_init(&query, locals, 0, keys, 0);
  cr_assert_eq(ckf_table_find(&table, &query, &matches), CKF_ERR_UNAVAILABLE, "even when empty");
  cr_assert_eq(matches.lanes, 0);
  cr_assert_eq(ckf_filter_init(&f, &m.format, 500, words, log, NULL), CKF_OK);
  cr_assert_eq(ckf_filter_insert(&f, 11), CKF_OK);
  ckf_lane_outcome out = ckf_lane_stage(&lane, &identity, &lease, 9, words, 16);
  cr_assert_eq(out.result, CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert_eq(ckf_table_ready(&table), 0, "staged is not ready");
  ckf_lane_activate(&lane);
  cr_assert_eq(ckf_table_find(&table, &query, &matches), CKF_OK);
  cr_assert_eq(matches.lanes, 8);
  cr_assert_eq(matches.depths[3], 0);
  ckf_query_init(&query, locals, 2, keys, 0);
  cr_assert_eq(ckf_table_find(&table, &query, &matches), CKF_OK);
  cr_assert_eq(matches.depths[3], 1);
  ckf_table_withdraw(&table, 8);
  cr_assert_eq(ckf_table_find(&table, &query, &matches), CKF_ERR_UNAVAILABLE);
  cr_assert_eq(matches.depths[3], 0);
  ckf_table_find_captured(&table, 0xFFFF, &query, &matches);
  cr_assert_eq(matches.lanes, 8, "lanes out of use do not answer");
  cr_assert_eq(matches.depths[3], 1);
  free(memory);
}

/* ---- queries ---- */

enum { BUCKETS = 4096, LEN = 700 };

typedef struct fleet {
  ckf_table table;
  void *memory;
  ckf_lane lanes[CKF_LANES];
  ckf_identity identity[CKF_LANES];
  ckf_lease lease[CKF_LANES];
  ckf_filter filter[CKF_LANES];
  uint64_t words[CKF_LANES][BUCKETS];
  uint64_t sequence[CKF_LANES];
} fleet;

static fleet fleet_of_lanes;
static ckf_image shared_log[501];

static fleet *a_fleet(uint32_t configured, int noise) {
  fleet *const f = &fleet_of_lanes;
  const ckf_manifest m = a_manifest(configured, BUCKETS);
  memset(f, 0, sizeof *f);
  f->memory = build(&f->table, &m);
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    if (!(configured >> i & 1))
      continue;
    cr_assert_eq(ckf_filter_init(&f->filter[i], &m.format, 500, f->words[i], shared_log, NULL),
                 CKF_OK);
    for (int k = 0; k < noise; k++)
      cr_assert_eq(ckf_filter_insert(&f->filter[i], draw(UINT64_MAX)), CKF_OK);
    lease_lane(&f->table, &f->lanes[i], i, &f->identity[i], &f->lease[i]);
    cr_assert_eq(
        ckf_lane_install(&f->lanes[i], &f->identity[i], &f->lease[i], 0, f->words[i], BUCKETS)
            .result,
        CKF_LANE_SNAPSHOT_INSTALLED);
  }
  return f;
}

/* Changes a lane's filter by one key and sends the delta. */
static void change(fleet *f, uint32_t lane, uint64_t key, bool add) {
  size_t n;
  ckf_image images[501];
  cr_assert_eq(add ? ckf_filter_insert(&f->filter[lane], key)
                   : ckf_filter_remove(&f->filter[lane], key),
               CKF_OK);
  const ckf_image *log = ckf_filter_log(&f->filter[lane], &n);
  size_t count = 0;
  for (size_t i = 0; i < n; i++) {
    size_t k = 0;
    while (k < count && images[k].bucket != log[i].bucket)
      k++;
    images[k] = (ckf_image){log[i].bucket, f->words[lane][log[i].bucket]};
    count += k == count;
  }
  cr_assert_eq(ckf_lane_apply_delta(&f->lanes[lane], &f->identity[lane], &f->lease[lane],
                                    f->sequence[lane], f->sequence[lane] + 1, images, count)
                   .result,
               CKF_LANE_DELTA_APPLIED);
  f->sequence[lane]++;
}

static void check_depths(const fleet *f, uint32_t configured, const uint64_t *locals,
                         const uint64_t *keys, size_t len) {
  static uint64_t made[LEN];
  ckf_matches matches;
  ckf_query query;
  uint32_t deepest = 0;
  memset(made, 0, sizeof made);
  ckf_query_init(&query, locals, len, made, 0);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK);
  cr_assert_eq(matches.lanes, configured);
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    uint32_t linear = 0;
    if (configured >> i & 1)
      while (linear < len && ckf_filter_contains(&f->filter[i], keys[linear]))
        linear++;
    cr_assert_eq(matches.depths[i], linear, "lane %u of %x: %u, linear %u, len %zu", i, configured,
                 matches.depths[i], linear, len);
    deepest = linear > deepest ? linear : deepest;
  }
  /* nothing was hashed that no probe wanted: twice the deepest prefix and four strides at most */
  const size_t stride = len / 32 > 16 ? 64 : 32;
  cr_assert_leq(ckf_query_known(&query), len);
  cr_assert_leq(ckf_query_known(&query), 1 + (deepest ? 2 * (size_t)deepest + 4 * stride : 0),
                "%zu hashed, deepest %u, len %zu", ckf_query_known(&query), deepest, len);
  cr_assert_arr_eq(made, keys, ckf_query_known(&query) * sizeof *made);
  /* all keys given, or some: the same answer, and no local is looked at */
  memcpy(made, keys, len * sizeof *made);
  ckf_query_init(&query, NULL, len, made, len);
  ckf_matches again;
  cr_assert_eq(ckf_table_find(&f->table, &query, &again), CKF_OK);
  cr_assert_arr_eq(&again, &matches, sizeof again);
  /* from any guess: the same answer */
  for (int round = 0; round < 6; round++) {
    const uint32_t turn = (uint32_t)draw(deepest + 1); /* the length of the last prompt */
    again.lanes = round == 3 ? (uint32_t)draw(UINT32_MAX) : 0xFFFF;
    for (uint32_t i = 0; i < CKF_LANES; i++)
      again.depths[i] = round == 0   ? matches.depths[i]
                        : round == 1 ? matches.depths[i] - (uint32_t)draw(3)
                        : round >= 4 ? (matches.depths[i] < turn ? matches.depths[i] : turn)
                                     : (uint32_t)draw(len + 3);
    ckf_query_init(&query, locals, len, made, (size_t)draw(len + 1));
    cr_assert_eq(ckf_table_find_again(&f->table, &query, &again), CKF_OK);
    cr_assert_arr_eq(&again, &matches, sizeof again, "round %d", round);
  }
}

/* Gives out local hashes and checks that each is asked for once, in order, and not too many. */
typedef struct giver {
  const uint64_t *from;
  size_t next;
} giver;

static void give(void *user, uint64_t *locals, size_t from, size_t to) {
  giver *const g = user;
  cr_assert_eq(from, g->next);
  cr_assert_gt(to, from);
  memcpy(locals + from, g->from + from, (to - from) * sizeof *locals);
  g->next = to;
}

Test(ckf_table, local_hashes_are_made_when_they_are_wanted) {
  static uint64_t locals[LEN], keys[LEN], room[LEN], made[LEN];
  fleet *const f = a_fleet(0x3, 2000);
  uint32_t held = 0;
  for (size_t i = 0; i < LEN; i++) {
    locals[i] = draw(UINT64_MAX);
    keys[i] = i ? ckf_child(keys[i - 1], locals[i]) : locals[0];
  }
  for (uint32_t depth = 0; depth <= LEN; depth += 1 + depth / 2) {
    for (; held < depth; held++)
      change(f, 1, keys[held], true);
    for (size_t known = 0; known <= LEN; known += 1 + known * 2) {
      giver g = {locals, known};
      ckf_matches matches, again = {0};
      ckf_query query;
      memset(room, 0xEE, sizeof room);
      memcpy(made, keys, known * sizeof *made);
      ckf_query_init_lazy(&query, room, LEN, made, known, give, &g);
      cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK);
      cr_assert_eq(matches.depths[1], depth);
      cr_assert_eq(g.next, ckf_query_known(&query), "one local for each sequence hash");
      cr_assert_arr_eq(made, keys, ckf_query_known(&query) * sizeof *made);
      if (depth == 0 && known == 0)
        cr_assert_eq(g.next, 1, "a prompt that nobody has costs one block");
      cr_assert_eq(ckf_table_find_again(&f->table, &query, &again), CKF_OK);
      cr_assert_arr_eq(&again, &matches, sizeof again);
    }
  }
  free(f->memory);
}

Test(ckf_table, all_lanes_answer_what_a_scan_of_each_answers) {
  static const uint32_t sets[] = {0xFFFF, 0x1, 0x2, 0x6, 0x90, 0x8001, 0x5555};
  static uint64_t locals[LEN], keys[LEN];
  for (size_t set = 0; set < sizeof sets / sizeof sets[0]; set++) {
    fleet *const f = a_fleet(sets[set], 8000);
    for (int round = 0; round < 60; round++) {
      const size_t len = round < 8 ? (size_t)round : (size_t)draw(LEN + 1);
      uint32_t held[CKF_LANES] = {0};
      for (size_t i = 0; i < len; i++) {
        locals[i] = draw(UINT64_MAX);
        keys[i] = i ? ckf_child(keys[i - 1], locals[i]) : locals[0];
      }
      for (uint32_t lane = 0; lane < CKF_LANES; lane++) {
        if (!(sets[set] >> lane & 1))
          continue;
        held[lane] = round % 3 == 0 ? (uint32_t)len : (uint32_t)draw(round % 3 == 1 ? len + 1 : 4);
        held[lane] = held[lane] < len ? held[lane] : (uint32_t)len;
        for (uint32_t i = 0; i < held[lane]; i++)
          change(f, lane, keys[i], true);
      }
      check_depths(f, sets[set], locals, keys, len);
      for (uint32_t lane = 0; lane < CKF_LANES; lane++)
        for (uint32_t i = 0; i < held[lane]; i++)
          change(f, lane, keys[i], false);
    }
    for (uint32_t lane = 0; lane < CKF_LANES; lane++)
      for (uint32_t b = 0; b < BUCKETS && (sets[set] >> lane & 1); b++)
        cr_assert_eq(ckf_table_word(&f->table, lane, b), f->words[lane][b]);
    free(f->memory);
  }
}

Test(ckf_table, a_conversation_keeps_its_hashes) {
  static uint64_t locals[LEN], keys[LEN], want[LEN];
  fleet *const f = a_fleet(0x3, 100);
  ckf_matches matches;
  ckf_query query;
  for (size_t i = 0; i < LEN; i++) {
    locals[i] = draw(UINT64_MAX);
    want[i] = i ? ckf_child(want[i - 1], locals[i]) : locals[0];
    change(f, 1, want[i], true);
  }
  size_t known = 0;
  for (size_t len = 1; len <= LEN; len += 1 + len / 3) {
    ckf_query_init(&query, locals, len, keys, known);
    cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK);
    cr_assert_eq(matches.depths[0], 0);
    cr_assert_eq(matches.depths[1], len);
    known = ckf_query_known(&query);
    cr_assert_eq(known, len);
    cr_assert_arr_eq(keys, want, known * sizeof *keys);
  }
  free(f->memory);
}

Test(ckf_table, a_query_without_its_hashes_is_refused) {
  static uint64_t locals[LEN], keys[LEN];
  fleet *const f = a_fleet(0x1, 100);
  const ckf_matches before = {0x8, {1, 2, 3}};
  ckf_matches matches = before;
  ckf_query query;
  ckf_query_init(&query, NULL, LEN, keys, LEN - 1);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_ERR_ARG);
  cr_assert_eq(ckf_table_find_again(&f->table, &query, &matches), CKF_ERR_ARG);
  cr_assert_arr_eq(&matches, &before, sizeof matches);
  ckf_query_init_lazy(&query, locals, LEN, NULL, 0, NULL, NULL);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_ERR_ARG);
  ckf_table_find_captured(&f->table, 1, &query, &matches);
  cr_assert_eq(matches.lanes, 0, "not answered");
  ckf_query_init(&query, NULL, LEN, keys, LEN);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK, "all keys are there");
  ckf_query_init_lazy(&query, locals, LEN, keys, 0, NULL, NULL);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK, "all locals are there");
  ckf_query_init(&query, NULL, 0, NULL, 0);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK, "an empty prompt");
  free(f->memory);
}

/* Hashes that were kept are believed; what an edit leaves true are those before it. */
Test(ckf_table, an_edited_prompt_keeps_only_the_hashes_before_the_edit) {
  static uint64_t locals[LEN], keys[LEN];
  fleet *const f = a_fleet(0x1, 100);
  const size_t edited = LEN / 2;
  ckf_matches matches;
  ckf_query query;
  for (size_t i = 0; i < LEN; i++) {
    locals[i] = draw(UINT64_MAX);
    keys[i] = i ? ckf_child(keys[i - 1], locals[i]) : locals[0];
    change(f, 0, keys[i], true);
  }
  locals[edited]++;
  ckf_query_init(&query, locals, LEN, keys, LEN);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK);
  cr_assert_eq(matches.depths[0], LEN, "of the prompt before");
  ckf_query_init(&query, locals, LEN, keys, edited);
  cr_assert_eq(ckf_table_find(&f->table, &query, &matches), CKF_OK);
  cr_assert_eq(matches.depths[0], edited);
  free(f->memory);
}

/* Right below a guess that no longer holds one position hits by chance: it is not taken for the
 * prefix. */
Test(ckf_table, a_stale_depth_is_not_saved_by_a_collision) {
  static uint64_t keys[LEN];
  fleet *const f = a_fleet(1, 0);
  ckf_query query;
  for (size_t i = 0; i < LEN; i++)
    keys[i] = draw(UINT64_MAX);
  ckf_query_init(&query, NULL, LEN, keys, LEN);
  for (uint32_t depth = 0; depth < 40; depth++) {
    for (uint32_t guess = depth + 2; guess < 60; guess++) {
      ckf_matches matches = {1, {guess}};
      change(f, 0, keys[guess - 1], true);
      cr_assert_eq(ckf_table_find_again(&f->table, &query, &matches), CKF_OK);
      cr_assert_eq(matches.depths[0], depth, "guess %u: %u, not %u", guess, matches.depths[0],
                   depth);
      change(f, 0, keys[guess - 1], false);
    }
    change(f, 0, keys[depth], true);
  }
  free(f->memory);
}
