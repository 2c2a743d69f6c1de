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

/* ---- marks that stay ---- */

Test(ckf_tables, more_keys_are_away_than_a_row_can_count) {
  enum { N = 60 };
  uint64_t externals[N], unused;
  open_producer(400, 400, 400, 2);
  cr_assert_eq(store_root(&one, 1, 1), CKF_OK); /* takes slot 0 */
  for (uint64_t i = 0; i < N; i++) {
    (void)external_at(3, 0, i * 1234567 + 1, &externals[i]);
    cr_assert_eq(store_root(&one, externals[i], 50 + i), CKF_OK, "%d", (int)i);
  }
  cr_assert_eq(ckf_away_(&p, 3), CKF_AWAY_MAX_);
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  for (uint64_t i = 0; i < N; i += 2)
    remove_one(&one, externals[i]);
  cr_assert_eq(ckf_away_(&p, 3), CKF_AWAY_MAX_, "how many are left is not known");
  for (uint64_t i = 0; i < N; i++)
    cr_assert_eq(ckf_producer_find(&p, &one, externals[i], &unused, NULL), (int)(i % 2));
  close_producer();
}

/* ---- sizes ---- */

/* Every field fits beside the others, whatever the limits are. */
Test(ckf_tables, layouts_hold_what_they_promise) {
  static const uint32_t members[] = {1, 2, 3, 64, 1000, 1024, 1025, 5000, 16384, 65536, 1u << 20};
  size_t refused = 0;
  for (uint64_t n = 1; n <= 53687091; n += n / 3 + 1) {
    for (size_t i = 0; i < sizeof members / sizeof members[0]; i++) {
      for (uint32_t times = 1; times <= 4; times += 3) {
        ckf_producer_config cfg = ckf_producer_config_default();
        ckf_layout_ l;
        cfg.filter.expected_blocks = n;
        cfg.max_blocks = (uint32_t)n;
        cfg.max_mappings = (uint32_t)n * times;
        cfg.max_members = members[i];
        const int rc = ckf_layout_make_(&cfg, &l);
        if (members[i] > 65536 && n > (1u << 25) / 5 * 4) { /* more than 2^25 places of blocks */
          cr_assert_eq(rc, CKF_ERR_CAPACITY_OVERFLOW);
          refused++;
          continue;
        }
        cr_assert_eq(rc, CKF_OK);
        cr_assert_lt(l.mapping_rows, UINT32_MAX / CKF_ROW_WORDS_ + 1);
        const uint32_t rest = 64 - ckf_log2_(l.block_rows), implied = ckf_log2_(l.mapping_rows);
        const uint32_t match = 66 + l.slot_bits - implied;
        const uint64_t places = (uint64_t)l.block_rows * CKF_ROW_WORDS_;
        cr_assert_leq(l.owner_bits + CKF_WAY_BITS_ + rest, CKF_STATE_SHIFT_);
        cr_assert_geq(l.owner_bits, 3);
        cr_assert_leq(match, 64);
        cr_assert_leq(l.slot_bits + 2, 32);
        cr_assert_leq(places, UINT64_C(1) << (64 - match + CKF_EXTRA_BITS_ - 1));
        cr_assert_leq(cfg.max_blocks, places * 4 / 5 + 1);
        cr_assert_leq((uint64_t)cfg.max_mappings * 16,
                      (uint64_t)l.mapping_rows * CKF_ROW_ENTRIES_ * 15);
        cr_assert_gt(l.spill_places / 2, cfg.max_mappings / ((1u << l.owner_bits) - 1));
      }
    }
  }
  cr_assert_eq(refused, 6);
}

Test(ckf_tables, a_block_costs_32_bytes_and_a_further_owner_12) {
  static const uint64_t sizes[] = {1048576, 8388608, 10000000};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    ckf_producer_config cfg = ckf_producer_config_default();
    cfg.filter.expected_blocks = sizes[i];
    cfg.max_blocks = cfg.max_mappings = (uint32_t)sizes[i];
    const size_t single = ckf_producer_mem_size(&cfg);
    cfg.max_mappings *= 2;
    cr_assert_leq(single, 32 * sizes[i]);
    cr_assert_leq(ckf_producer_mem_size(&cfg) - single, 12 * sizes[i]);
  }
}

Test(ckf_tables, more_bytes_than_the_machine_addresses_are_an_overflow) {
  static uint64_t room[16];
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.max_mappings = cfg.max_blocks = UINT32_C(1) << 29;
  const size_t len = ckf_producer_mem_size(&cfg);
  const int err = ckf_producer_init(&p, &cfg, room, sizeof room);
  if (sizeof(size_t) > 4) {
    cr_assert(len > (size_t)UINT32_MAX);
    cr_assert_eq(err, CKF_ERR_NOSPACE);
  } else {
    cr_assert_eq(len, 0);
    cr_assert_eq(err, CKF_ERR_CAPACITY_OVERFLOW);
  }
  cfg.max_mappings = cfg.max_blocks = (UINT32_C(1) << 29) + 1;
  cr_assert_eq(ckf_producer_init(&p, &cfg, room, sizeof room), CKF_ERR_CAPACITY_OVERFLOW);
  cfg.max_mappings = cfg.max_blocks = 10;
  cr_assert_eq(ckf_producer_init(&p, &cfg, NULL, SIZE_MAX), CKF_ERR_NOSPACE);
}

/* ---- moving ---- */

Test(ckf_tables, moving_needs_the_same_filter_and_room) {
  ckf_producer next;
  open_producer(100, 200, 150, 3);
  const ckf_producer_config good = p.cfg_;
  const size_t len = ckf_producer_mem_size(&good);
  void *const room = malloc(len);
  cr_assert_eq(store_root(&one, 1, 1), CKF_OK);
  cr_assert_eq(store_root(&two, 1, 2), CKF_OK);
  cr_assert_eq(store_root(&two, 2, 3), CKF_OK);
#define REFUSED(CHANGE, ERROR)                                                                     \
  do {                                                                                             \
    ckf_producer_config cfg = good;                                                                \
    CHANGE;                                                                                        \
    cr_assert_eq(ckf_producer_move(&p, &cfg, room, len), ERROR, #CHANGE);                          \
    cr_assert_eq(p.mapping_count_, 3);                                                             \
    cr_assert_eq(ckf_producer_check_(&p), CKF_OK);                                                 \
  } while (0)
  REFUSED(cfg.filter.expected_blocks++, CKF_ERR_ARG);
  REFUSED(cfg.filter.max_kicks--, CKF_ERR_ARG);
  REFUSED(cfg.filter.verification_window++, CKF_ERR_ARG);
  REFUSED(cfg.filter.publish_every_n_events++, CKF_ERR_ARG);
  REFUSED(cfg.filter.seed++, CKF_ERR_ARG);
  REFUSED(cfg.max_members = 1, CKF_ERR_NOSPACE);
  REFUSED(cfg.max_mappings = 2, CKF_ERR_NOSPACE);
  REFUSED(cfg.max_blocks = 2, CKF_ERR_NOSPACE);
  REFUSED(cfg.max_mappings = 1 << 20, CKF_ERR_NOSPACE); /* memory */
  cr_assert_eq(ckf_rebuild_begin(&next, &p, NULL, 0, room, len), CKF_OK);
  REFUSED(cfg = next.cfg_; p.rebuilding_ = true, CKF_ERR_ARG);
  p.rebuilding_ = false;
  cr_assert_eq(ckf_rebuild_begin(&next, &p, NULL, 1, room, len), CKF_ERR_ARG);
  free(room);
  close_producer();
}

/* ---- batches as bytes ---- */

Test(ckf_tables, a_batch_encodes_as_its_images_do) {
  static uint8_t a[4096], b[4096];
  ckf_block blocks[20];
  ckf_image images[20];
  ckf_batch batch;
  open_producer(30, 60, 60, 2);
  make_chain(blocks, 20, 12);
  cr_assert_eq(store(&one, blocks, 20), CKF_OK);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
  for (size_t i = 0; i < batch.image_count; i++)
    images[i] = ckf_batch_image(&batch, i);
  ckf_format format = *ckf_producer_format(&p);
  const ptrdiff_t len =
      ckf_cbi1_delta_encode(&format, 7, 4, 5, images, batch.image_count, a, sizeof a);
  cr_assert_gt(len, 0);
  cr_assert_eq(ckf_cbi1_batch_encode(&format, 7, 4, 5, &batch, b, (size_t)len), len);
  cr_assert_arr_eq(a, b, (size_t)len);
  cr_assert_eq(ckf_cbi1_batch_encode(&format, 7, 4, 5, &batch, b, (size_t)len - 1),
               CKF_ERR_NOSPACE);
  batch.image_count = CKF_CBI1_MAX_IMAGES + 1;
  cr_assert_eq(ckf_cbi1_batch_encode(&format, 7, 4, 5, &batch, b, sizeof b),
               CKF_ERR_DELTA_IMAGE_COUNT);
  format.bucket_count = 3;
  cr_assert_eq(ckf_cbi1_batch_encode(&format, 7, 4, 5, &batch, b, sizeof b),
               CKF_ERR_FORMAT_BUCKET_COUNT);
  close_producer();
}

/* ---- damage ---- */

/* Each thing that the check compares is noticed when it is wrong. */
Test(ckf_tables, the_check_notices_any_damage) {
  ckf_block blocks[60];
  uint32_t place = 0;
  open_producer(200, 400, 400, 4);
  make_chain(blocks, 60, 13);
  cr_assert_eq(store(&one, blocks, 60), CKF_OK);
  cr_assert_eq(store(&two, blocks, 20), CKF_OK);
  for (uint64_t i = 0; i < 12; i++)
    cr_assert_eq(store_root(&two, 5000 + i, 4), CKF_OK); /* a count in the spill */
  while (*ckf_entry_(&p, place) == 0)
    place++;
  const uint32_t block = ckf_mapping_block_(&p, place), slot = ckf_member_find_(&p, &one);
  const uint32_t region = place / CKF_ROW_WORDS_ >> p.region_shift_;
  ckf_spill_ *const spill =
      ckf_spill_find_(&p, ckf_block_of_(&p, ckf_mix(ckf_producer_format(&p), 4)));
  cr_assert_eq(spill->owners, 12);
#define NOTICED(PLACE, CHANGE)                                                                     \
  do {                                                                                             \
    const uint64_t before_ = (uint64_t)(PLACE);                                                    \
    CHANGE;                                                                                        \
    cr_assert_eq(ckf_producer_check_(&p), CKF_ERR_INVARIANT, #CHANGE);                             \
    (PLACE) = (__typeof__(PLACE))before_;                                                          \
    cr_assert_eq(ckf_producer_check_(&p), CKF_OK);                                                 \
  } while (0)
  NOTICED(*ckf_entry_(&p, place), *ckf_entry_(&p, place) = 0);
  NOTICED(*ckf_entry_(&p, place), *ckf_entry_(&p, place) ^= CKF_SECOND_);
  NOTICED(*ckf_entry_(&p, place), *ckf_entry_(&p, place) ^= UINT64_C(3) << 2);
  NOTICED(ckf_row_(&p.mappings_, 0)[CKF_ROW_ENTRIES_], ckf_away_add_(&p, 0, 1));
  NOTICED(*ckf_region_word_(&p, ckf_entry_slot_(&p, *ckf_entry_(&p, place)), region),
          *ckf_region_word_(&p, ckf_entry_slot_(&p, *ckf_entry_(&p, place)), region) = 0);
  NOTICED(*ckf_cell_(&p, block), *ckf_cell_(&p, block) = 0);
  NOTICED(*ckf_cell_(&p, block), ++*ckf_cell_(&p, block));
  NOTICED(*ckf_cell_(&p, block), ckf_cell_set_state_(ckf_cell_(&p, block), CKF_OMITTED_));
  NOTICED(*ckf_cell_(&p, block), ckf_cell_set_state_(ckf_cell_(&p, block), CKF_FRESH_));
  NOTICED(*ckf_cell_(&p, block), *ckf_cell_(&p, block) ^= CKF_AWAY_);
  NOTICED(spill->owners, spill->owners++);
  NOTICED(spill->block, spill->block = 0);
  NOTICED(p.slots_[slot].count, p.slots_[slot].count++);
  NOTICED(p.member_index_[0], p.member_index_[0] ^= 7);
  NOTICED(p.mapping_count_, p.mapping_count_++);
  NOTICED(p.block_count_, p.block_count_++);
  NOTICED(p.resident_count_, p.resident_count_++);
  NOTICED(p.member_count_, p.member_count_++);
  NOTICED(p.dirty_bits_[0], p.dirty_bits_[0] = 0);
  NOTICED(p.dirty_len_, p.dirty_len_--);

  /* A count that no longer fits ends a clear with an error, not with a loop. */
  p.slots_[slot].count++;
  cr_assert_eq(ckf_producer_remove_rank(&p, &one), CKF_ERR_INVARIANT);
  cr_assert_eq(ckf_producer_remove_worker(&p, one.worker_id), CKF_ERR_INVARIANT);
  p.slots_[slot].count--;
  ckf_member_drop_if_empty_(&p, slot);
  close_producer();
}
