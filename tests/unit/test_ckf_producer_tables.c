/* SPDX-License-Identifier: Apache-2.0 */

/* The producer's tables at their ends: rows that overflow, entries that move, keys made to collide,
 * owner counts beyond a cell, events of any length, refusals at any block. */

#define CKF_STATIC
#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const ckf_member one = {1, 0}, two = {2, 0};
static uint64_t random_state = 1;
static ckf_producer p;
static void *memory;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

static void open_producer(uint64_t expected, uint32_t mappings, uint32_t blocks, uint32_t members) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected;
  cfg.max_mappings = mappings;
  cfg.max_blocks = blocks;
  cfg.max_members = members;
  cfg.tags = true;
  const size_t len = ckf_producer_mem_size(&cfg);
  memory = malloc(len);
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory, len), CKF_OK);
}

static void close_producer(void) {
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  free(memory);
}

static int store(const ckf_member *member, const ckf_block *blocks, size_t n) {
  ckf_outcome out;
  return ckf_producer_stored(&p, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
                             blocks, n, &out);
}

static int store_root(const ckf_member *member, uint64_t external, uint64_t canonical) {
  const ckf_block block = {external, canonical};
  return store(member, &block, 1);
}

static void remove_one(const ckf_member *member, uint64_t external) {
  ckf_outcome out;
  cr_assert_eq(
      ckf_producer_removed(&p, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, &external, 1, &out),
      CKF_OK);
  cr_assert_eq(out.unmapped, 1);
}

static uint32_t owners_of(uint64_t canonical) {
  uint32_t owners = 0;
  return ckf_producer_owners(&p, canonical, &owners, NULL) ? owners : 0;
}

/* ---- reversible hashes ---- */

Test(ckf_tables, hashes_are_undone) {
  open_producer(1000, 3001, 1777, 3);
  for (int i = 0; i < 20000; i++) {
    const uint64_t key = i < 64 ? UINT64_C(1) << i : i < 70 ? (uint64_t)(67 - i) : draw(UINT64_MAX);
    uint64_t rest;
    const uint64_t hash = ckf_scramble_(&p.blocks_, key);
    const uint32_t row = ckf_split_(&p.blocks_, hash, &rest);
    cr_assert_lt(row, p.blocks_.row_count);
    cr_assert_lt(rest, UINT64_C(1) << (64 - p.blocks_.implied));
    cr_assert_eq(ckf_join_(&p.blocks_, row, rest), hash);
    cr_assert_eq(ckf_unscramble_(&p.blocks_, hash), key);
    cr_assert_eq(ckf_unmix_(&p, ckf_mix(ckf_producer_format(&p), key)), key);
    const uint32_t other = ckf_other_row_(&p.blocks_, row, rest);
    cr_assert_lt(other, p.blocks_.row_count);
    cr_assert_eq(ckf_other_row_(&p.blocks_, other, rest), row);
  }
  close_producer();
}

/* ---- blocks ---- */

/* The canonical of a block with this home row and this rest. */
static uint64_t canonical_at(uint32_t row, uint64_t rest) {
  return ckf_unmix_(&p, ckf_unscramble_(&p.blocks_, ckf_join_(&p.blocks_, row, rest)));
}

Test(ckf_tables, blocks_of_one_home_fill_every_way) {
  enum { ALL = CKF_WAYS_ * CKF_ROW_WORDS_ };
  static uint64_t keys[ALL + 1];
  static bool in[ALL + 1];
  size_t stored = 0;
  open_producer(1000, 4000, 2000, 1);
  for (size_t i = 0; i <= ALL; i++) {
    const uint64_t rest = i; /* two rows may be the same one, so perhaps not all fit */
    keys[i] = canonical_at(7, rest * 12345);
    in[i] = store_root(&one, 1000 + i, keys[i]) != CKF_ERR_NOSPACE;
    stored += in[i];
  }
  cr_assert_geq(stored, ALL - 4 * CKF_ROW_WORDS_);
  cr_assert_leq(stored, ALL);
  ckf_producer_stats st;
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.unique_blocks, stored);
  cr_assert_eq(st.nospace_blocks, ALL + 1 - stored, "far below the limits, but out of reach");
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  for (int step = 0; step < 4000; step++) {
    const size_t i = (size_t)draw(ALL + 1);
    if (in[i])
      remove_one(&one, 1000 + i);
    in[i] = !in[i] && store_root(&one, 1000 + i, keys[i]) != CKF_ERR_NOSPACE;
    if (step % 50 == 0) {
      cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
      for (size_t j = 0; j <= ALL; j++)
        cr_assert_eq(owners_of(keys[j]), in[j]);
    }
  }
  for (size_t i = 0; i <= ALL; i++)
    if (in[i])
      remove_one(&one, 1000 + i);
  for (size_t i = 0; i < (size_t)p.blocks_.row_count * CKF_ROW_WORDS_; i++)
    cr_assert_eq(p.blocks_.rows[i], 0, "a mark stayed behind");
  close_producer();
}

Test(ckf_tables, owners_beyond_a_cell) {
  enum { KEYS = 60, EACH = 50 };
  static uint32_t owners[KEYS];
  open_producer(1000, 4000, 2000, 2);
  cr_assert_lt(ckf_cell_full_(&p), EACH / 2);
  for (int step = 0; step < 6000; step++) {
    const uint64_t key = draw(KEYS), alias = owners[key];
    const bool grow = alias == 0 || (alias < 2 * EACH && draw(100) < 55);
    const ckf_member *const member = alias % 2 ? &one : &two;
    const ckf_member *const last = (alias - 1) % 2 ? &one : &two;
    if (grow) {
      cr_assert_eq(store_root(member, key * 1000 + alias, 77 + key), CKF_OK);
      owners[key]++;
    } else {
      remove_one(last, key * 1000 + alias - 1);
      owners[key]--;
    }
    cr_assert_eq(owners_of(77 + key), owners[key]);
    if (step % 50 == 0) {
      cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
      for (uint64_t i = 0; i < KEYS; i++)
        cr_assert_eq(owners_of(77 + i), owners[i]);
    }
  }
  cr_assert_eq(ckf_producer_remove_rank(&p, &one), CKF_OK);
  cr_assert_eq(ckf_producer_remove_rank(&p, &two), CKF_OK);
  for (uint32_t i = 0; i <= p.spill_mask_; i++)
    cr_assert_eq(p.spill_[i].block, 0);
  close_producer();
}

Test(ckf_tables, the_last_owner_that_can_be_counted) {
  const ckf_block blocks[3] = {{900, 5}, {901, 6}, {902, 7}};
  open_producer(1000, 4000, 2000, 2);
  for (uint64_t i = 0; i < 20; i++)
    cr_assert_eq(store_root(&one, 100 + i, ckf_child(5, 6)), CKF_OK);
  ckf_spill_ *const place =
      ckf_spill_find_(&p, ckf_block_of_(&p, ckf_mix(ckf_producer_format(&p), ckf_child(5, 6))));
  cr_assert_eq(place->owners, 20);
  place->owners = CKF_MAX_OWNERS_;
  cr_assert_eq(store(&two, blocks, 3), CKF_ERR_OWNERSHIP_OVERFLOW);
  cr_assert_eq(ckf_producer_member_blocks(&p, &two), 0);
  cr_assert_eq(owners_of(5), 0, "the block before it is taken back");
  place->owners = CKF_MAX_OWNERS_ - 1;
  cr_assert_eq(store(&two, blocks, 3), CKF_OK);
  cr_assert_eq(owners_of(ckf_child(5, 6)), CKF_MAX_OWNERS_);
  place->owners = 21;
  close_producer();
}

/* ---- mappings ---- */

/* An external of slot 0 whose rows are these two, if the rest has them. */
static bool external_at(uint32_t row, uint32_t second, uint64_t rest, uint64_t *external) {
  const uint64_t first = ckf_unscramble_(&p.mappings_, ckf_join_(&p.mappings_, row, rest));
  *external = (first ^ first >> 32) * CKF_GOLDEN_INVERSE_ ^ p.slots_[0].salt;
  return ckf_other_row_(&p.mappings_, row, rest) == second;
}

Test(ckf_tables, keys_of_the_same_two_rows_fill_both_and_no_more) {
  enum { BOTH = 2 * CKF_ROW_ENTRIES_ };
  uint64_t externals[BOTH + 1], rest = 0, before;
  ckf_producer_stats st;
  open_producer(100, 90, 90, 2);
  cr_assert_eq(store_root(&one, 1, 1), CKF_OK); /* takes slot 0 */
  remove_one(&one, 1);
  for (size_t n = 0; n <= BOTH; rest++)
    if (external_at(3, 5, rest * 977, &externals[n]))
      n++;
  for (uint64_t i = 0; i < BOTH; i++)
    cr_assert_eq(store_root(&one, externals[i], 50 + i), CKF_OK);
  before = p.filter_.rng_;
  cr_assert_eq(store_root(&one, externals[BOTH], 50 + BOTH), CKF_ERR_NOSPACE);
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.contributions, BOTH);
  cr_assert_eq(st.unique_blocks, BOTH);
  cr_assert_eq(st.nospace_blocks, 1);
  cr_assert_eq(p.filter_.rng_, before);
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  for (uint64_t i = 0; i < BOTH; i++) {
    remove_one(&one, externals[i]);
    cr_assert_eq(store_root(&one, externals[BOTH], 50 + BOTH), CKF_OK, "any place will do");
    remove_one(&one, externals[BOTH]);
    cr_assert_eq(store_root(&one, externals[i], 50 + i), CKF_OK);
  }
  close_producer();
}

/* So few rows that both of a key are often the same one and moves go round in circles. */
Test(ckf_tables, tiny_tables_are_filled_to_the_limit_again_and_again) {
  enum { LIMIT = 24 };
  uint64_t externals[LIMIT];
  uint32_t tags[LIMIT], *tag, refused = 0;
  open_producer(100, LIMIT, LIMIT, 1);
  cr_assert_leq(p.mappings_.row_count, 5);
  for (int round = 0; round < 400; round++) {
    size_t n = 0;
    for (int tries = 0; n < LIMIT && tries < 100; tries++) {
      externals[n] = draw(UINT64_MAX);
      if (store_root(&one, externals[n], draw(1000) + 1) != CKF_OK) {
        refused++;
        continue;
      }
      cr_assert_eq(ckf_producer_find(&p, &one, externals[n], NULL, &tag), 1);
      *tag = tags[n] = (uint32_t)draw(UINT32_MAX);
      n++;
    }
    cr_assert_eq(n, LIMIT);
    cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
    for (size_t i = 0; i < n; i++) {
      cr_assert_eq(ckf_producer_find(&p, &one, externals[i], NULL, &tag), 1);
      cr_assert_eq(*tag, tags[i], "an entry moved without its tag");
    }
    cr_assert_eq(store_root(&one, 1, 1), CKF_ERR_NOSPACE);
    if (round % 2) {
      ckf_outcome out;
      cr_assert_eq(ckf_producer_cleared(&p, &one, CKF_DOMAIN_MISSING, &out), CKF_OK);
      cr_assert_eq(out.unmapped, LIMIT);
    } else {
      for (size_t i = 0; i < n; i++)
        remove_one(&one, externals[(i * 7 + 3) % LIMIT]);
    }
    for (uint32_t row = 0; row < p.mappings_.row_count; row++)
      for (uint32_t i = 0; i < CKF_ROW_ENTRIES_; i++)
        cr_assert_eq(ckf_row_(&p.mappings_, row)[i], 0);
  }
  cr_assert_lt(refused, 400, "a free place is nearly always found");
  close_producer();
}

Test(ckf_tables, a_large_table_takes_all_it_promises) {
  enum { N = 60000 };
  ckf_producer_stats st;
  open_producer(N, N, N, 2100);
  for (uint64_t i = 0; i < N; i++) {
    const ckf_member member = {i % 700, (uint32_t)(i % 3)};
    const int rc = store_root(&member, draw(UINT64_MAX), draw(UINT64_MAX));
    cr_assert(rc == CKF_OK || rc == CKF_ERR_CAPACITY_EXHAUSTED);
  }
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.contributions, N);
  cr_assert_eq(st.nospace_blocks, 0);
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  for (uint64_t worker = 0; worker < 700; worker++)
    cr_assert_eq(ckf_producer_remove_worker(&p, worker), CKF_OK);
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.members + st.contributions + st.unique_blocks + st.occupied_slots, 0);
  close_producer();
}

/* ---- events of any length ---- */

static void make_chain(ckf_block *blocks, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; i++)
    blocks[i] = (ckf_block){ckf_rng_draw(&seed), ckf_rng_draw(&seed)};
}

/* Whatever its length, an event does what the same blocks do one by one. */
Test(ckf_tables, an_event_equals_its_blocks_one_by_one) {
  enum { N = 700 };
  static ckf_block blocks[N];
  make_chain(blocks, N, 9);
  for (size_t n = 1; n <= N; n += n < 70 ? 1 : 63) {
    open_producer(200, 2000, 1000, 2); /* more than the filter holds: some are omitted */
    (void)store(&two, blocks, n / 3);
    (void)store(&one, blocks, n / 2); /* half of the next event are repeats */
    (void)store(&one, blocks, n);
    const ckf_producer whole = p;
    void *const whole_memory = memory;
    open_producer(200, 2000, 1000, 2);
    for (size_t pass = 0; pass < 2; pass++) {
      const ckf_member *const member = pass ? &one : &two;
      for (size_t i = 0; i < (pass ? n : n / 3); i++) {
        ckf_outcome out;
        (void)ckf_producer_stored(&p, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, i > 0,
                                  i > 0 ? blocks[i - 1].external : 0, false, 0, &blocks[i], 1,
                                  &out);
      }
    }
    cr_assert_eq(p.mapping_count_, whole.mapping_count_);
    cr_assert_eq(p.block_count_, whole.block_count_);
    if (whole.capacity_failures_ == 0) /* repeats of omitted blocks draw from the generator */
      cr_assert_arr_eq(ckf_producer_words(&p), ckf_producer_words(&whole),
                       (size_t)ckf_producer_format(&p)->bucket_count * 8);
    cr_assert_eq(ckf_producer_check_(&whole), CKF_OK);
    free(whole_memory);
    close_producer();
  }
}

/* Refused at any block, by a conflict or a limit, an event leaves nothing. */
Test(ckf_tables, an_event_is_taken_back_from_any_block) {
  enum { N = 150 };
  static ckf_block blocks[N], bad[N];
  static uint64_t words[64];
  make_chain(blocks, N, 10);
  for (size_t n = 20; n <= N; n += 65) {
    for (size_t at = 1; at < n; at++) {
      ckf_producer_stats st;
      ckf_batch batch;
      open_producer(200, (uint32_t)(at % 2 ? 400 : at + 5), 400, 2);
      cr_assert_eq(store(&two, blocks + 3, 5), CKF_OK); /* other canonicals */
      cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
      memcpy(words, ckf_producer_words(&p), sizeof words);
      memcpy(bad, blocks, sizeof bad);
      bad[at].external = at % 3 ? blocks[at - 1].external : blocks[0].external;
      const int rc = store(&one, at % 2 ? bad : blocks, n);
      cr_assert_eq(rc, at % 2 ? CKF_ERR_INVALID_BLOCK_SEQUENCE : CKF_ERR_NOSPACE);
      ckf_producer_stats_get(&p, &st);
      cr_assert_eq(st.members, 1);
      cr_assert_eq(st.contributions, 5);
      cr_assert_eq(st.unique_blocks, 5);
      cr_assert_eq(st.nospace_blocks, at % 2 ? 0 : n);
      cr_assert_eq(ckf_producer_drain(&p, &batch), 0, "nothing to drain");
      cr_assert_arr_eq(words, ckf_producer_words(&p), sizeof words);
      close_producer();
    }
  }
}

Test(ckf_tables, an_event_of_repeats_and_new_blocks) {
  enum { N = 130 };
  static ckf_block blocks[N];
  ckf_outcome out;
  open_producer(400, 1000, 1000, 2);
  make_chain(blocks, N, 11);
  cr_assert_eq(store(&one, blocks, N), CKF_OK);
  cr_assert_eq(ckf_producer_stored(&p, &one, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, true,
                                   blocks[9].external, false, 0, blocks + 10, N - 10, &out),
               CKF_OK);
  cr_assert_eq(out.repeated, N - 10);
  cr_assert_eq(out.mapped, 0);
  for (size_t i = 0; i < N; i += 2)
    remove_one(&one, blocks[i].external);
  cr_assert_eq(store(&one, blocks, N), CKF_OK, "every other block is new");
  cr_assert_eq(p.mapping_count_, N);
  close_producer();
}

/* ---- clears ---- */

/* A member's bitmap names every region that holds one of its mappings, also after moves. */
Test(ckf_tables, clears_find_everything_among_many_members) {
  enum { MEMBERS = 40, STEPS = 30000 };
  static uint32_t count[MEMBERS];
  open_producer(8000, 9000, 9000, MEMBERS);
  for (int step = 0; step < STEPS; step++) {
    const size_t at = (size_t)draw(MEMBERS);
    const ckf_member member = {at, 0};
    ckf_outcome out;
    if (draw(400) == 0) {
      cr_assert_eq(ckf_producer_cleared(&p, &member, CKF_DOMAIN_MISSING, &out), CKF_OK);
      cr_assert_eq(out.unmapped, count[at]);
      count[at] = 0;
    } else if (store_root(&member, draw(UINT64_MAX), draw(5000)) != CKF_ERR_NOSPACE) {
      count[at]++;
    }
    if (step % 3000 == 0)
      cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  }
  close_producer();
}
