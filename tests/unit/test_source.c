/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engine events end in the right keys: the behaviours that users rely on, by number, then the rules
 * one by one.  Payloads go the whole way from msgpack to the exact state of the producer.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>

#include "test_source.h"

/* Canonical hashes of the prompts 0..3, 0..7, 0..11. */
#define CANON_4 UINT64_C(9143094415614847814)
#define CANON_8 UINT64_C(9510318385840434533)
#define CANON_12 UINT64_C(16998148715716822651)
#define MASK UINT64_C(0xA5A55A5AD3C4B2E1)

static feeder *standard(void) {
  kvrelay_source_config cfg = test_source_config();
  return feeder_new(&cfg, 256, NULL);
}

static feeder *with(void (*change)(kvrelay_source_config *)) {
  kvrelay_source_config cfg = test_source_config();
  change(&cfg);
  return feeder_new(&cfg, 256, NULL);
}

#define OK(CALL) cr_assert_eq((CALL), KVRELAY_OK)
#define COUNTED(F, NAME, N)                                                                        \
  cr_assert_eq(counted((F), KVRELAY_COUNT_##NAME), (N), #NAME " is %" PRIu64 ", wanted %d",        \
               counted((F), KVRELAY_COUNT_##NAME), (int)(N))
/* Nothing at all was dropped or odd. */
#define CLEAN(F) cr_assert_eq(counted_all(F), 0)

static stored plain(hashes h, uint32_t first, uint32_t count) {
  return (stored){.hashes = h, .first = first, .count = count};
}

static void close_checked(feeder *f) {
  cr_assert_eq(ckf_producer_check_(f->producer), CKF_OK);
  feeder_free(f);
}

/* ---- hash identity ---- */

Test(behaviours, B1_two_processes_with_different_hashes_share_an_entry) {
  kvrelay_source_config cfg = test_source_config();
  feeder *w1 = feeder_new(&cfg, 256, NULL);
  cfg.worker_id = 2;
  feeder *w2 = feeder_new(&cfg, 256, w1);
  OK(feed_stored(w1, 0, plain(HASHES(0xAAAA), 0, 4)));
  OK(feed_stored(w2, 0, plain(HASHES(0xBBBB), 0, 4)));
  cr_assert_eq(owners_of(w1, CANON_4), 2);
  OK(feed_removed(w1, 0, HASHES(0xAAAA)));
  cr_assert_eq(owners_of(w1, CANON_4), 1);
  cr_assert(ckf_producer_contains(w1->producer, CANON_4));
  OK(feed_removed(w2, 0, HASHES(0xBBBB)));
  cr_assert_eq(owners_of(w1, CANON_4), 0);
  cr_assert_not(ckf_producer_contains(w1->producer, CANON_4));
  feeder_free(w2);
  close_checked(w1);
}

Test(behaviours, B2_only_the_first_engine_hash_agrees) {
  kvrelay_source_config cfg = test_source_config();
  feeder *w1 = feeder_new(&cfg, 256, NULL);
  cfg.worker_id = 2;
  feeder *w2 = feeder_new(&cfg, 256, w1);
  OK(feed_stored(w1, 0, plain(HASHES(1, 2, 3), 0, 12)));
  OK(feed_stored(w2, 0, plain(HASHES(1, 12, 13), 0, 12)));
  cr_assert_eq(owners_of(w1, CANON_4), 2);
  cr_assert_eq(owners_of(w1, CANON_8), 2);
  cr_assert_eq(owners_of(w1, CANON_12), 2);
  OK(feed_cleared(w1, 0));
  cr_assert_eq(depth(w1, 0, 12), 3);
  feeder_free(w2);
  close_checked(w1);
}

Test(behaviours, B3_keys_are_canonical_not_the_engines) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(UINT64_C(15800758033175288231)), 0, 4)));
  cr_assert_eq(UINT64_C(15800758033175288231) ^ MASK, CANON_4);
  cr_assert_eq(depth(f, 0, 4), 1);
  cr_assert_eq(owners_of(f, UINT64_C(15800758033175288231)), 0);
  close_checked(f);
}

Test(behaviours, B5_signed_and_unsigned_hashes_are_the_same) {
  feeder *f = standard();
  put_batch(&f->batch, 1);
  put_array(&f->batch, 5);
  put_text(&f->batch, "BlockStored");
  put_array(&f->batch, 1);
  put_int(&f->batch, -1);
  put_nil(&f->batch);
  put_array(&f->batch, 4);
  for (int i = 0; i < 4; i++)
    put_uint(&f->batch, (uint64_t)i);
  put_uint(&f->batch, 4);
  OK(feed(f, 0));
  cr_assert_eq(depth(f, 0, 4), 1);
  OK(feed_removed(f, 0, HASHES(UINT64_MAX)));
  cr_assert_eq(blocks_of(f, 0), 0);
  CLEAN(f);
  close_checked(f);
}

Test(behaviours, B6_the_adapters_name_counts_not_its_number) {
  kvrelay_source_config cfg = test_source_config();
  feeder *w1 = feeder_new(&cfg, 256, NULL);
  cfg.worker_id = 2;
  feeder *w2 = feeder_new(&cfg, 256, w1);
  uint64_t one = 1, two = 2, zero = 0;
  uint32_t tokens[] = {0, 1, 2, 3};
  uint64_t seed = hashfmt_seed((const uint8_t *)"a", 1, NULL, 0);
  OK(feed_stored(w1, 0,
                 (stored){.hashes = HASHES(1), .count = 4, .lora_id = &one, .lora_name = "a"}));
  OK(feed_stored(w2, 0,
                 (stored){.hashes = HASHES(2), .count = 4, .lora_id = &two, .lora_name = "a"}));
  cr_assert_eq(owners_of(w1, hashfmt_local(tokens, 4, seed)), 2);
  CLEAN(w1);
  OK(feed_stored(w1, 0, (stored){.hashes = HASHES(3), .count = 4, .lora_id = &one}));
  OK(feed_stored(w1, 0,
                 (stored){.hashes = HASHES(3), .count = 4, .lora_id = &one, .lora_name = ""}));
  COUNTED(w1, LORA_ID_WITHOUT_NAME, 2);
  cr_assert_eq(depth(w1, 0, 4), 0);
  OK(feed_stored(w1, 0, (stored){.hashes = HASHES(3), .count = 4, .lora_id = &zero}));
  cr_assert_eq(depth(w1, 0, 4), 1);
  COUNTED(w1, LORA_ID_WITHOUT_NAME, 2);
  feeder_free(w2);
  close_checked(w1);
}

Test(behaviours, B7_base_and_adapters_are_apart) {
  feeder *f = standard();
  uint32_t tokens[] = {0, 1, 2, 3};
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 4, .lora_name = ""}));
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(2), .count = 4, .lora_name = "adapter-a"}));
  cr_assert_eq(owners_of(f, CANON_4), 1);
  cr_assert_eq(owners_of(f, UINT64_C(6665157333201000639)), 1);
  cr_assert_eq(depth_of(f, tokens, 4, NULL, NULL), 1);
  cr_assert_eq(depth_of(f, tokens, 4, "adapter-a", NULL), 1);
  cr_assert_eq(depth_of(f, tokens, 4, "adapter-b", NULL), 0);
  CLEAN(f);
  close_checked(f);
}

#define IMAGE_A "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define IMAGE_B "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210"

/* [[[id, 0], …]] */
static const packer *objects(packer *p, size_t count, const char *const *ids) {
  p->len = 0;
  put_array(p, 1);
  put_array(p, count);
  for (size_t i = 0; i < count; i++) {
    put_array(p, 2);
    put_text(p, ids[i]);
    put_int(p, i == 0 ? 0 : -3);
  }
  return p;
}

static void image_token(kvrelay_source_config *c) {
  c->has_image_token_id = true;
  c->image_token_id = 151655;
}

Test(behaviours, B8_two_images_behind_the_same_tokens) {
  static const uint32_t tokens[] = {151655, 151655, 151655, 151655};
  static packer keys;
  const char *a[] = {IMAGE_A}, *b[] = {IMAGE_B}, *ab[] = {IMAGE_A, IMAGE_B},
             *ba[] = {IMAGE_B, IMAGE_A};
  feeder *f = standard();
  OK(feed_stored(
      f, 0,
      (stored){
          .hashes = HASHES(1), .tokens = tokens, .count = 4, .extra_keys = objects(&keys, 1, a)}));
  OK(feed_stored(
      f, 0,
      (stored){
          .hashes = HASHES(2), .tokens = tokens, .count = 4, .extra_keys = objects(&keys, 1, b)}));
  cr_assert_eq(owners_of(f, UINT64_C(17301219308700869532)), 1);
  cr_assert_eq(owners_of(f, UINT64_C(10043087803035270926)), 1);
  cr_assert_eq(depth_of(f, tokens, 4, NULL, NULL), 0);
  /* In the native form the order of the objects of a block does not matter. */
  OK(feed_stored(
      f, 0,
      (stored){
          .hashes = HASHES(3), .tokens = tokens, .count = 4, .extra_keys = objects(&keys, 2, ab)}));
  OK(feed_stored(
      f, 0,
      (stored){
          .hashes = HASHES(4), .tokens = tokens, .count = 4, .extra_keys = objects(&keys, 2, ba)}));
  ckf_member m = {1, 0};
  uint64_t x = 1, y = 2;
  cr_assert_eq(ckf_producer_find(f->producer, &m, 3, &x, NULL), 1);
  cr_assert_eq(ckf_producer_find(f->producer, &m, 4, &y, NULL), 1);
  cr_assert_eq(x, y);
  CLEAN(f);
  close_checked(f);

  f = with(image_token);
  OK(feed_stored(
      f, 0,
      (stored){
          .hashes = HASHES(1), .tokens = tokens, .count = 4, .extra_keys = objects(&keys, 1, a)}));
  OK(feed_stored(
      f, 0,
      (stored){
          .hashes = HASHES(2), .tokens = tokens, .count = 4, .extra_keys = objects(&keys, 1, b)}));
  cr_assert_eq(owners_of(f, UINT64_C(9649191635784361572)), 1);
  cr_assert_eq(owners_of(f, UINT64_C(14179982787209378246)), 1);
  close_checked(f);
}

Test(behaviours, B9_objects_for_only_some_blocks_are_malformed) {
  static packer keys;
  const char *a[] = {IMAGE_A};
  feeder *f = standard();
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(1, 2), .count = 8, .extra_keys = objects(&keys, 1, a)}));
  COUNTED(f, MALFORMED_EVENT, 1);
  cr_assert_eq(blocks_of(f, 0), 0);
  /* A longer list is fine; an empty one is absent. */
  OK(feed_stored(
      f, 0,
      (stored){.hashes = HASHES(3), .count = 4, .extra_keys = &(packer){{0x92, 0xc0, 0xc0}, 3}}));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(4), .count = 4, .extra_keys = &(packer){{0x90}, 1}}));
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(5, 6), .count = 8, .mm_infos = &(packer){{0x91, 0xc0}, 2}}));
  COUNTED(f, MALFORMED_EVENT, 2);
  cr_assert_eq(counted_all(f), 2);
  cr_assert_eq(blocks_of(f, 0), 2);
  close_checked(f);
}

static void eagle(kvrelay_source_config *c) { c->hash_format = HASHFMT_FORMAT_EAGLE; }

Test(behaviours, B10_pairs_are_hashed_as_eagle_or_not_at_all) {
  feeder *f = with(eagle);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 5, .pairs = true}));
  cr_assert_eq(owners_of(f, UINT64_C(14562210786876287112)), 1);
  CLEAN(f);
  OK(feed_stored(f, 0, plain(HASHES(2), 0, 5)));
  COUNTED(f, FORMAT_MISMATCH, 1);
  cr_assert_eq(blocks_of(f, 0), 1);
  close_checked(f);
  f = standard();
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 5, .pairs = true}));
  COUNTED(f, FORMAT_MISMATCH, 1);
  cr_assert_eq(blocks_of(f, 0), 0);
  close_checked(f);
}

Test(behaviours, B11_blocks_on_cpu_are_no_device_blocks) {
  feeder *f = standard();
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1, 2, 3, 4), .count = 16, .medium = "CPU"}));
  COUNTED(f, OTHER_TIER, 1);
  cr_assert_eq(blocks_of(f, 0), 0);
  cr_assert_not(ckf_producer_has_pending(f->producer));
  close_checked(f);
}

/* ---- wire shape ---- */

Test(behaviours, B12_arrays_and_shuffled_maps_in_one_batch) {
  feeder *f = standard();
  packer *p = &f->batch;
  put_batch(p, 2);
  put_array(p, 5);
  put_text(p, "BlockStored");
  put_array(p, 1);
  put_uint(p, 1);
  put_nil(p);
  put_array(p, 4);
  for (uint32_t i = 0; i < 4; i++)
    put_uint(p, i);
  put_uint(p, 4);
  put_map(p, 5);
  put_text(p, "block_size");
  put_uint(p, 4);
  put_text(p, "token_ids");
  put_array(p, 4);
  for (uint32_t i = 4; i < 8; i++)
    put_uint(p, i);
  put_text(p, "parent_block_hash");
  put_uint(p, 1);
  put_text(p, "type");
  put_text(p, "BlockStored");
  put_text(p, "block_hashes");
  put_array(p, 1);
  put_uint(p, 2);
  OK(feed(f, 0));
  cr_assert_eq(depth(f, 0, 8), 2);
  CLEAN(f);
  close_checked(f);
}

Test(behaviours, B13_a_batch_may_be_a_map) {
  static const char *const rank_names[] = {"data_parallel_rank", "dp_rank", "attn_dp_rank"};
  for (size_t i = 0; i < 3; i++) {
    feeder *f = standard();
    packer *p = &f->batch;
    p->len = 0;
    put_map(p, 4);
    put_text(p, rank_names[i]);
    put_uint(p, 1);
    put_text(p, "surprise");
    put_nil(p);
    put_text(p, "events");
    put_array(p, 1);
    put_stored(p, plain(HASHES(1), 0, 4));
    put_text(p, "ts");
    put_float(p);
    OK(kvrelay_engine_feed(&f->decoder, &f->source, 0, p->bytes, p->len, 0));
    cr_assert_eq(blocks_of(f, 1), 1, "%s", rank_names[i]);
    CLEAN(f);
    close_checked(f);
  }
}

Test(behaviours, B14_unknown_tags_cost_only_themselves) {
  feeder *f = standard();
  packer *p = &f->batch;
  put_batch(p, 4);
  put_stored(p, plain(HASHES(1), 0, 4));
  put_array(p, 2);
  put_text(p, "FutureEvent");
  put_uint(p, 1);
  put_map(p, 2);
  put_text(p, "type");
  put_text(p, "FutureEvent");
  put_text(p, "block_hashes");
  put_text(p, "whatever");
  put_removed(p, HASHES(1), NULL, NULL);
  OK(feed(f, 0));
  COUNTED(f, UNKNOWN_EVENT, 2);
  cr_assert_eq(counted_all(f), 2);
  cr_assert_eq(blocks_of(f, 0), 0);
  const kvrelay_source_stats *st = kvrelay_source_stats_get(&f->source);
  cr_assert_eq(st->stored, 1);
  cr_assert_eq(st->removed, 1);
  OK(feed_stored(f, 0, plain(HASHES(2), 0, 4)));
  COUNTED(f, GAP, 0);
  close_checked(f);
}

Test(behaviours, B15_one_unknown_hash_never_ends_a_removal) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_stored(f, 0, plain(HASHES(3), 8, 4)));
  OK(feed_removed(f, 0, HASHES(1, 2, 3)));
  COUNTED(f, UNKNOWN_REMOVAL, 1);
  cr_assert_eq(blocks_of(f, 0), 0);
  close_checked(f);
}

Test(behaviours, B16_a_filtered_group_leaves_no_trace) {
  for (int main_first = 0; main_first < 2; main_first++) {
    feeder *f = standard();
    stored attention = {
        .hashes = HASHES(1), .count = 4, .kind = "full_attention", .group = GROUP(0)};
    stored mamba = {
        .hashes = HASHES(1), .first = 50, .count = 4, .kind = "mamba", .group = GROUP(1)};
    put_batch(&f->batch, 3);
    put_stored(&f->batch, main_first ? attention : mamba);
    put_stored(&f->batch, main_first ? mamba : attention);
    put_removed(&f->batch, HASHES(1), NULL, GROUP(1));
    OK(feed(f, 0));
    cr_assert_eq(depth(f, 0, 4), 1);
    cr_assert_eq(depth(f, 50, 4), 0);
    COUNTED(f, NON_MAIN_ATTENTION_KIND, 1);
    COUNTED(f, NON_MAIN_ATTENTION_GROUP, 1);
    cr_assert_eq(counted_all(f), 2);
    OK(feed_removed(f, 0, HASHES(1)));
    cr_assert_eq(blocks_of(f, 0), 0, "the filtered store was no second copy");
    close_checked(f);
  }
}

Test(behaviours, B17_offload_placeholders) {
  feeder *f = standard();
  packer *p = &f->batch;
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 4, .medium = "GPU"}));
  static const char *const media[] = {"CPU", "GPU"};
  for (size_t i = 0; i < 2; i++) {
    put_batch(p, 1);
    put_array(p, 7);
    put_text(p, "BlockStored");
    put_array(p, 1);
    put_uint(p, 7);
    put_nil(p);
    put_array(p, 0);
    put_uint(p, 0);
    put_nil(p);
    put_text(p, media[i]);
    OK(feed(f, 0));
  }
  COUNTED(f, OTHER_TIER, 1);
  COUNTED(f, PLACEHOLDER, 1);
  put_batch(p, 1);
  put_removed(p, HASHES(1), "GPU", NULL);
  OK(feed(f, 0));
  cr_assert_eq(blocks_of(f, 0), 0);
  COUNTED(f, UNKNOWN_REMOVAL, 0);
  close_checked(f);
}

Test(behaviours, B18_an_unfinished_last_block_goes_silently) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1, 2, 3), 0, 10)));
  cr_assert_eq(depth(f, 0, 12), 2);
  cr_assert_eq(blocks_of(f, 0), 2);
  COUNTED(f, PARTIAL_BLOCK, 1);
  OK(feed_removed(f, 0, HASHES(3)));
  COUNTED(f, UNKNOWN_REMOVAL, 0);
  OK(feed_removed(f, 0, HASHES(3)));
  COUNTED(f, UNKNOWN_REMOVAL, 1);
  close_checked(f);
}

static void huge_blocks(kvrelay_source_config *c) { c->block_size = 2662439576u; }
static void blocks_of_64(kvrelay_source_config *c) { c->block_size = 64; }

Test(behaviours, B19_another_block_size_is_rejected) {
  stored s = {.hashes = HASHES(1), .count = 32, .block_size = 32};
  feeder *f = with(huge_blocks);
  OK(feed_stored(f, 0, s));
  COUNTED(f, BLOCK_SIZE_MISMATCH, 1);
  cr_assert_eq(counted_all(f), 1);
  feeder_free(f);
  f = with(blocks_of_64);
  OK(feed_stored(f, 0, s)); /* 32 divides 64 */
  COUNTED(f, SUB_BLOCK, 1);
  s.block_size = 128;
  s.count = 128;
  OK(feed_stored(f, 0, s));
  s.block_size = 48;
  OK(feed_stored(f, 0, s));
  COUNTED(f, BLOCK_SIZE_MISMATCH, 2);
  cr_assert_eq(blocks_of(f, 0), 0);
  close_checked(f);
}

/* ---- order, loss, restart ---- */

Test(behaviours, B25_B26_orphans_are_no_roots) {
  feeder *f = standard();
  OK(feed_cleared(f, 0));
  cr_assert(kvrelay_source_complete(&f->source, 0));
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(2), .parent = PARENT(1), .first = 4, .count = 4}));
  COUNTED(f, ORPHAN, 1);
  COUNTED(f, RECOVERY, 1);
  cr_assert_not(kvrelay_source_complete(&f->source, 0));
  cr_assert_eq(depth(f, 4, 4), 0);
  cr_assert_eq(owners_of(f, UINT64_C(12124091508212882195)), 0);
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(3, 4), .parent = PARENT(2), .first = 8, .count = 8}));
  COUNTED(f, ORPHAN, 3);
  COUNTED(f, RECOVERY, 1);
  close_checked(f);
}

Test(behaviours, B27_a_continuation_without_parent_is_a_root) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_stored(f, 0, plain(HASHES(2), 4, 4)));
  cr_assert_eq(depth(f, 0, 8), 1);
  cr_assert_eq(depth(f, 4, 4), 1);
  CLEAN(f);
  close_checked(f);
}

Test(behaviours, B28_a_late_subscriber_is_partial) {
  feeder *f = standard();
  f->sequence = 500;
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  cr_assert_not(kvrelay_source_complete(&f->source, 0));
  cr_assert_not(kvrelay_source_stats_get(&f->source)->complete);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(3), .parent = PARENT(2), .first = 8, .count = 4}));
  COUNTED(f, ORPHAN, 1);
  COUNTED(f, RECOVERY, 0);
  cr_assert_eq(depth(f, 0, 4), 1, "a partial rank is used normally");
  OK(feed_cleared(f, 0));
  cr_assert(kvrelay_source_complete(&f->source, 0));
  cr_assert(kvrelay_source_stats_get(&f->source)->complete);
  close_checked(f);
}

Test(behaviours, B29_a_clear_in_the_middle_of_a_batch) {
  feeder *f = standard();
  put_batch(&f->batch, 3);
  put_stored(&f->batch, plain(HASHES(1), 0, 4));
  put_cleared(&f->batch, "AllBlocksCleared", NULL);
  put_stored(&f->batch, plain(HASHES(2), 8, 4));
  OK(feed(f, 0));
  cr_assert_eq(depth(f, 0, 4), 0);
  cr_assert_eq(depth(f, 8, 4), 1);
  close_checked(f);
}

/* ---- clears and ranks ---- */

Test(behaviours, B30_a_clear_empties_exactly_its_rank) {
  kvrelay_source_config cfg = test_source_config();
  feeder *w1 = feeder_new(&cfg, 256, NULL);
  cfg.worker_id = 2;
  feeder *w2 = feeder_new(&cfg, 256, w1);
  for (uint64_t i = 1; i <= 3; i++)
    OK(feed_stored(w1, 0, plain(HASHES(i), (uint32_t)i * 10, 4)));
  OK(feed_stored(w1, 1, plain(HASHES(1), 10, 4)));
  OK(feed_stored(w2, 0, plain(HASHES(1), 10, 4)));
  OK(feed_cleared(w1, 0));
  cr_assert_eq(blocks_of(w1, 0), 0);
  cr_assert_eq(blocks_of(w1, 1), 1);
  cr_assert_eq(blocks_of(w2, 0), 1);
  OK(feed_cleared(w1, 0));
  CLEAN(w1);
  feeder_free(w2);
  close_checked(w1);
}

static void default_rank_1(kvrelay_source_config *c) { c->default_rank = 1; }

Test(behaviours, B31_ranks_are_apart_and_the_batch_names_them) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_stored(f, 1, plain(HASHES(1), 0, 4)));
  OK(feed_cleared(f, 0));
  cr_assert_eq(depth(f, 0, 4), 1);
  cr_assert_eq(owners_of(f, CANON_4), 1);
  close_checked(f);
  f = with(default_rank_1);
  OK(feed_stored(f, -1, plain(HASHES(1), 0, 4)));
  cr_assert_eq(blocks_of(f, 1), 1);
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  cr_assert_eq(blocks_of(f, 0), 1);
  OK(feed_stored(f, 2, plain(HASHES(1), 0, 4)));
  COUNTED(f, FOREIGN_RANK, 1);
  cr_assert_eq(blocks_of(f, 2), 0);
  close_checked(f);
}

/* ---- capacity ---- */

Test(behaviours, B32_memory_stays_what_it_was) {
  enum { LIVE = 1000, PAIRS = 300000 };
  kvrelay_source_config cfg = test_source_config();
  feeder *f = feeder_new(&cfg, LIVE, NULL);
  uint64_t random = 7;
  OK(feed_cleared(f, 0));
  for (uint64_t i = 0; i < PAIRS; i++) {
    uint64_t external = i + 1;
    uint32_t tokens[4] = {(uint32_t)ckf_rng_draw(&random), (uint32_t)i, 0, 0};
    kvrelay_engine_event ev;
    memset(&ev, 0, sizeof ev);
    ev.type = KVRELAY_ENGINE_STORED;
    ev.externals = &external;
    ev.externals_len = 1;
    ev.tokens = tokens;
    ev.tokens_len = 4;
    ev.block_size = 4;
    OK(kvrelay_source_event(&f->source, true, 0, &ev, 0));
    if (i >= LIVE) {
      external = i - LIVE + 1;
      ev.type = KVRELAY_ENGINE_REMOVED;
      OK(kvrelay_source_event(&f->source, true, 0, &ev, 0));
    }
  }
  cr_assert_eq(blocks_of(f, 0), LIVE);
  COUNTED(f, UNKNOWN_REMOVAL, 0);
  COUNTED(f, STATE_LIMIT, 0);
  OK(feed_cleared(f, 0));
  ckf_producer_stats stats;
  ckf_producer_stats_get(f->producer, &stats);
  cr_assert_eq(stats.contributions, 0);
  cr_assert_eq(stats.occupied_slots, 0);
  close_checked(f);
}

Test(behaviours, B33_a_full_filter_omits_and_counts) {
  kvrelay_source_config cfg = test_source_config();
  feeder *f = calloc(1, sizeof *f);
  ckf_producer_config pc = ckf_producer_config_default();
  pc.filter.expected_blocks = 1;
  pc.max_mappings = pc.max_blocks = 128;
  pc.tags = true;
  f->cfg = cfg;
  f->producer = &f->own_producer;
  f->producer_mem = malloc(ckf_producer_mem_size(&pc));
  f->source_mem = malloc(kvrelay_source_mem_size(&cfg));
  cr_assert_eq(
      ckf_producer_init(&f->own_producer, &pc, f->producer_mem, ckf_producer_mem_size(&pc)),
      CKF_OK);
  OK(kvrelay_source_init(&f->source, &cfg, f->producer, f->source_mem,
                         kvrelay_source_mem_size(&cfg), 0));
  f->decoder_mem = malloc(kvrelay_engine_decoder_mem_size(1024));
  OK(kvrelay_engine_decoder_init(&f->decoder, 1024, f->decoder_mem,
                                 kvrelay_engine_decoder_mem_size(1024)));
  for (uint32_t i = 0; i < 64; i++)
    OK(feed_stored(f, 0, plain(HASHES(i + 1), i * 4, 4)));
  ckf_producer_stats stats;
  ckf_producer_stats_get(f->producer, &stats);
  cr_assert_eq(stats.contributions, 64, "the exact state is complete");
  cr_assert_lt(stats.occupied_slots, 64);
  COUNTED(f, OMITTED_CAPACITY, 64 - stats.occupied_slots);
  for (uint32_t i = 0; i < 64; i++) {
    bool resident = false;
    uint32_t tokens[4] = {i * 4, i * 4 + 1, i * 4 + 2, i * 4 + 3};
    ckf_producer_stats before, after;
    cr_assert_eq(ckf_producer_owners(f->producer, hashfmt_local(tokens, 4, HASHFMT_CHAIN_SEED),
                                     NULL, &resident),
                 1);
    ckf_producer_stats_get(f->producer, &before);
    OK(feed_removed(f, 0, HASHES(i + 1)));
    ckf_producer_stats_get(f->producer, &after);
    cr_assert_eq(before.occupied_slots - after.occupied_slots, resident ? 1 : 0);
  }
  COUNTED(f, UNKNOWN_REMOVAL, 0);
  close_checked(f);
}

/* ---- seen with real engines ---- */

static void blocks_of_32(kvrelay_source_config *c) { c->block_size = 32; }

Test(behaviours, B37_tokens_of_whole_blocks_without_hashes) {
  feeder *f = with(blocks_of_32);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 96, .block_size = 32}));
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(2, 3), .count = 96, .block_size = 32}));
  COUNTED(f, TOKEN_SURPLUS, 2);
  cr_assert_eq(depth(f, 0, 32), 0);
  OK(feed_removed(f, 0, HASHES(1, 2, 3)));
  cr_assert_eq(counted_all(f), 2);
  /* Less than a block too many is ignored. */
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(4), .count = 63, .block_size = 32}));
  cr_assert_eq(depth(f, 0, 32), 1);
  cr_assert_eq(counted_all(f), 2);
  close_checked(f);
}

Test(behaviours, B38_prompt_embeddings_are_not_indexed) {
  static const uint32_t zeros[128];
  feeder *f = with(blocks_of_32);
  packer keys = {{0x92, 0x91, 0xc4, 2, 9, 9, 0x91, 0xc4, 2, 8, 8}, 11};
  OK(feed_cleared(f, 0));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(1, 2),
                          .tokens = zeros,
                          .count = 64,
                          .block_size = 32,
                          .extra_keys = &keys}));
  COUNTED(f, EMBEDDED_PROMPT, 1);
  cr_assert_eq(depth_of(f, zeros, 64, NULL, NULL), 0);
  /* What follows it, at any depth, is an orphan that nothing can recover. */
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(3),
                          .parent = PARENT(2),
                          .tokens = zeros,
                          .count = 32,
                          .block_size = 32}));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(4),
                          .parent = PARENT(3),
                          .tokens = zeros,
                          .count = 32,
                          .block_size = 32}));
  COUNTED(f, ORPHAN, 2);
  COUNTED(f, RECOVERY, 0);
  cr_assert(kvrelay_source_complete(&f->source, 0));
  OK(feed_removed(f, 0, HASHES(1, 2, 3, 4)));
  COUNTED(f, UNKNOWN_REMOVAL, 0);
  /* Blocks in front of the embedding stay. */
  packer later = {{0x92, 0xc0, 0x91, 0xc4, 2, 8, 8}, 7};
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(5, 6), .count = 64, .block_size = 32, .extra_keys = &later}));
  cr_assert_eq(depth(f, 0, 64), 1);
  COUNTED(f, EMBEDDED_PROMPT, 2);
  close_checked(f);
}

/* A positional store of one block of tokens 0..3 whose extra keys are one string, with `elements`
 * elements. */
static void put_positional_with_key(packer *p, size_t elements, const char *key) {
  put_array(p, elements);
  put_text(p, "BlockStored");
  put_array(p, 1);
  put_uint(p, 1);
  put_nil(p);
  put_array(p, 4);
  for (uint32_t i = 0; i < 4; i++)
    put_uint(p, i);
  put_uint(p, 4);
  put_nil(p);
  put_text(p, "GPU");
  put_nil(p);
  put_array(p, 1);
  put_array(p, 1);
  put_text(p, key);
  if (elements > 9)
    put_uint(p, 0);
}

Test(behaviours, B39_a_digest_as_salt_or_as_image) {
  feeder *f = standard();
  packer keys = {{0}, 0};
  put_array(&keys, 1);
  put_array(&keys, 1);
  put_text(&keys, IMAGE_A);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 4, .extra_keys = &keys}));
  cr_assert_eq(owners_of(f, CANON_4), 1);
  COUNTED(f, SALT_UNTAGGED, 1);
  cr_assert_eq(counted_all(f), 1);
  close_checked(f);
  for (size_t elements = 9; elements <= 10; elements++) {
    f = standard();
    put_batch(&f->batch, 1);
    put_positional_with_key(&f->batch, elements, IMAGE_A);
    OK(feed(f, 0));
    cr_assert_eq(blocks_of(f, 0), 1);
    cr_assert_eq(depth(f, 0, 4), elements == 10 ? 1 : 0);
    COUNTED(f, SALT_UNTAGGED, elements == 10 ? 1 : 0);
    cr_assert_eq(counted_all(f), elements == 10 ? 1 : 0);
    close_checked(f);
  }
}

static void main_group_1(kvrelay_source_config *c) {
  c->has_main_group = true;
  c->main_group = 1;
}

Test(behaviours, B40_main_group) {
  for (uint32_t wanted = 0; wanted < 2; wanted++) {
    feeder *f = wanted == 1 ? with(main_group_1) : standard();
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 4, .group = GROUP(0)}));
    OK(feed_stored(f, 0,
                   (stored){.hashes = HASHES(2), .first = 20, .count = 4, .group = GROUP(1)}));
    OK(feed_stored(f, 0, plain(HASHES(3), 40, 4)));
    cr_assert_eq(depth(f, 0, 4), wanted == 0 ? 1 : 0);
    cr_assert_eq(depth(f, 20, 4), wanted == 1 ? 1 : 0);
    cr_assert_eq(depth(f, 40, 4), 1, "no group at all");
    COUNTED(f, UNLEARNED_GROUP_IDX, 1);
    /* A learned kind still wins. */
    OK(feed_stored(
        f, 0,
        (stored){.hashes = HASHES(9), .count = 4, .group = &wanted, .kind = "sliding_window"}));
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(4), .first = 60, .count = 4, .group = &wanted}));
    cr_assert_eq(depth(f, 60, 4), 0);
    COUNTED(f, NON_MAIN_ATTENTION_GROUP, 1);
    close_checked(f);
  }
}

Test(behaviours, B41_parts_of_blocks) {
  feeder *f = with(blocks_of_64);
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(1), .parent = PARENT(77), .count = 16, .block_size = 16}));
  OK(feed_removed(f, 0, HASHES(1)));
  COUNTED(f, SUB_BLOCK, 1);
  cr_assert_eq(counted_all(f), 1);
  close_checked(f);
}

static void deduplicated(kvrelay_source_config *c) { c->deduplicated = true; }

Test(behaviours, B42_copies) {
  for (int copies = 2; copies <= 3; copies++) {
    feeder *f = standard();
    for (int i = 0; i < copies; i++)
      OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
    cr_assert_eq(owners_of(f, CANON_4), 1, "copies are no owners");
    OK(feed_stored(f, 1, plain(HASHES(2), 40, 4)));
    cr_assert_eq(kvrelay_source_copied(&f->source), 1);
    OK(feed_removed(f, 0, HASHES(1, 1)));
    cr_assert_eq(blocks_of(f, 0), copies == 3 ? 1 : 0);
    cr_assert_eq(kvrelay_source_copied(&f->source), 0);
    CLEAN(f);
    OK(feed_removed(f, 0, HASHES(1)));
    COUNTED(f, UNKNOWN_REMOVAL, copies == 3 ? 0 : 1);
    cr_assert_eq(blocks_of(f, 0), 0);
    close_checked(f);
  }
  feeder *f = with(deduplicated);
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_removed(f, 0, HASHES(1)));
  cr_assert_eq(blocks_of(f, 0), 0);
  close_checked(f);
}

/* ---- sequences ---- */

static void keep_on_loss(kvrelay_source_config *c) { c->on_loss = KVRELAY_ON_LOSS_KEEP; }

/* Rank 1 of the worker is somebody else's stream in these tests. */
static void fill_rank_1_from_elsewhere(feeder *f) {
  ckf_member m = {1, 1};
  ckf_block b = {99, 99};
  ckf_outcome out;
  cr_assert_eq(ckf_producer_stored(f->producer, &m, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0,
                                   false, 0, &b, 1, &out),
               CKF_OK);
}

Test(sequences, a_gap_is_a_loss_that_clears_or_keeps) {
  for (int keep = 0; keep < 2; keep++) {
    feeder *f = keep ? with(keep_on_loss) : standard();
    OK(feed_stored(f, 0, plain(HASHES(1, 2, 3), 0, 10)));
    fill_rank_1_from_elsewhere(f);
    f->sequence = 4;
    OK(feed_stored(f, 0, plain(HASHES(4), 40, 4)));
    COUNTED(f, GAP, 3);
    COUNTED(f, LOSS, 3);
    COUNTED(f, RESTART, 0);
    cr_assert_not(kvrelay_source_complete(&f->source, 0));
    cr_assert_eq(depth(f, 0, 8), keep ? 2 : 0);
    cr_assert_eq(depth(f, 40, 4), 1, "the batch behind the gap is applied");
    cr_assert_eq(blocks_of(f, 1), 1, "a rank that this stream never named");
    OK(feed_removed(f, 0, HASHES(3)));
    COUNTED(f, UNKNOWN_REMOVAL, keep ? 0 : 1);
    cr_assert_eq(kvrelay_source_stats_get(&f->source)->last_sequence, 5);
    close_checked(f);
  }
}

Test(sequences, a_smaller_number_is_a_restart) {
  feeder *f = standard();
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1, 2), .count = 7}));
  OK(feed_stored(
      f, 1,
      (stored){.hashes = HASHES(5), .count = 4, .group = GROUP(3), .kind = "full_attention"}));
  f->sequence = 0;
  OK(feed_stored(f, 0, plain(HASHES(4), 40, 4)));
  COUNTED(f, RESTART, 1);
  COUNTED(f, LOSS, 0);
  cr_assert_eq(blocks_of(f, 0), 1);
  cr_assert_eq(blocks_of(f, 1), 0);
  cr_assert(kvrelay_source_complete(&f->source, 0));
  OK(feed_removed(f, 0, HASHES(2)));
  COUNTED(f, UNKNOWN_REMOVAL, 1);
  OK(feed_stored(f, 1, (stored){.hashes = HASHES(6), .count = 4, .group = GROUP(3)}));
  COUNTED(f, UNLEARNED_GROUP_IDX, 1);
  /* In the middle of the new process it is partial; the same number twice is a restart as well. */
  f->sequence = 2;
  OK(feed_stored(f, 0, plain(HASHES(7), 40, 4)));
  COUNTED(f, RESTART, 2);
  cr_assert_not(kvrelay_source_complete(&f->source, 0));
  close_checked(f);
}

Test(sequences, a_leap_beyond_2_to_the_32_is_a_restart) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  f->sequence += (uint64_t)1 << 32;
  OK(feed_stored(f, 0, plain(HASHES(2), 0, 4)));
  COUNTED(f, GAP, (uint64_t)1 << 32);
  COUNTED(f, RESTART, 0);
  f->sequence += ((uint64_t)1 << 32) + 1;
  OK(feed_stored(f, 0, plain(HASHES(3), 0, 4)));
  COUNTED(f, RESTART, 1);
  COUNTED(f, GAP, (uint64_t)1 << 32);
  close_checked(f);
}

Test(sequences, after_a_reconnect_only_the_next_number_goes_on) {
  feeder *f = with(keep_on_loss);
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(kvrelay_source_connection(&f->source, true, 0));
  OK(feed_stored(f, 0, plain(HASHES(2), 8, 4)));
  cr_assert_eq(blocks_of(f, 0), 2);
  CLEAN(f);
  OK(kvrelay_source_connection(&f->source, true, 0));
  f->sequence = 7;
  OK(feed_stored(f, 0, plain(HASHES(3), 16, 4)));
  COUNTED(f, RESTART, 1);
  COUNTED(f, GAP, 0);
  cr_assert_eq(blocks_of(f, 0), 1);
  cr_assert_not(kvrelay_source_complete(&f->source, 0));
  f->sequence = 9;
  OK(feed_stored(f, 0, plain(HASHES(4), 24, 4)));
  COUNTED(f, GAP, 1);
  COUNTED(f, RESTART, 1);
  close_checked(f);
}

Test(sequences, heartbeats_advance_and_do_nothing_else) {
  feeder *f = standard();
  put_batch(&f->batch, 0);
  OK(feed(f, 0));
  put_batch(&f->batch, 0);
  OK(feed(f, -1));
  CLEAN(f);
  cr_assert_eq(kvrelay_source_stats_get(&f->source)->batches, 2);
  cr_assert(kvrelay_source_stats_get(&f->source)->complete);
  cr_assert_not(ckf_producer_has_pending(f->producer));
  close_checked(f);
}

Test(sequences, an_undecodable_payload_is_one_lost_batch) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  put_batch(&f->batch, 2);
  put_stored(&f->batch, plain(HASHES(2), 8, 4));
  put_byte(&f->batch, 0xc1);
  OK(feed(f, 0));
  COUNTED(f, PAYLOAD_MALFORMED, 1);
  COUNTED(f, LOSS, 1);
  COUNTED(f, GAP, 0);
  cr_assert_eq(blocks_of(f, 0), 0, "nothing of it is applied, and what it may have held is lost");
  OK(feed_stored(f, 0, plain(HASHES(3), 0, 4)));
  cr_assert_eq(counted_all(f), 2);
  cr_assert_eq(depth(f, 0, 4), 1);
  close_checked(f);
}

Test(sequences, clears_complete_only_their_rank) {
  feeder *f = standard();
  f->sequence = 9;
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_stored(f, 1, plain(HASHES(1), 0, 4)));
  OK(feed_cleared(f, 0));
  cr_assert(kvrelay_source_complete(&f->source, 0));
  cr_assert_not(kvrelay_source_complete(&f->source, 1));
  cr_assert_not(kvrelay_source_stats_get(&f->source)->complete);
  OK(feed_cleared(f, 1));
  cr_assert(kvrelay_source_stats_get(&f->source)->complete);
  cr_assert_not(kvrelay_source_complete(&f->source, 2));
  close_checked(f);
}

Test(sequences, a_cleared_source_starts_over) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  fill_rank_1_from_elsewhere(f);
  OK(kvrelay_source_clear(&f->source, 0));
  cr_assert_eq(blocks_of(f, 0), 0);
  cr_assert_eq(blocks_of(f, 1), 1);
  f->sequence = 100;
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  CLEAN(f);
  cr_assert_not(kvrelay_source_complete(&f->source, 0));
  close_checked(f);
}

/* ---- filters ---- */

Test(filters, the_first_reason_in_order_counts) {
  static const struct {
    const char *ownership, *locality, *medium, *kind;
    int count;
  } cases[] = {
      {"kvcr", "REMOTE", "FS", "mamba", KVRELAY_COUNT_UNSUPPORTED_OWNERSHIP},
      {"other", "REMOTE", "FS", "mamba", KVRELAY_COUNT_UNKNOWN_OWNERSHIP},
      {"", NULL, NULL, NULL, KVRELAY_COUNT_UNKNOWN_OWNERSHIP},
      {NULL, "REMOTE", "FS", "mamba", KVRELAY_COUNT_NON_LOCAL_LOCALITY},
      {NULL, "local", NULL, NULL, KVRELAY_COUNT_NON_LOCAL_LOCALITY},
      {NULL, "", NULL, NULL, KVRELAY_COUNT_NON_LOCAL_LOCALITY},
      {NULL, "LOCAL", "FS", "mamba", KVRELAY_COUNT_UNKNOWN_MEDIUM},
      {NULL, NULL, "GPU ", NULL, KVRELAY_COUNT_UNKNOWN_MEDIUM},
      {NULL, NULL, "DISK", "mamba", KVRELAY_COUNT_OTHER_TIER},
      {NULL, NULL, "GPU", "mamba", KVRELAY_COUNT_NON_MAIN_ATTENTION_KIND},
      {NULL, NULL, "GPU", "new_attention", KVRELAY_COUNT_UNKNOWN_KIND},
      {NULL, NULL, "GPU", "", KVRELAY_COUNT_UNKNOWN_KIND},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    feeder *f = standard();
    OK(feed_stored(f, 0,
                   (stored){.hashes = HASHES(1),
                            .count = 4,
                            .ownership = cases[i].ownership,
                            .locality = cases[i].locality,
                            .medium = cases[i].medium,
                            .kind = cases[i].kind}));
    cr_assert_eq(counted(f, cases[i].count), 1, "case %zu: %s", i,
                 kvrelay_count_name(cases[i].count));
    cr_assert_eq(counted_all(f), 1, "case %zu", i);
    cr_assert_eq(blocks_of(f, 0), 0, "case %zu", i);
    close_checked(f);
  }
}

Test(filters, media) {
  static const char *const device[] = {NULL, "", "GPU", "gpu", "Device"};
  static const char *const other[] = {"CPU",     "cpu_pinned", "CPU_TIER1", "CPU_TIER2",
                                      "disk",    "NVME",       "STORAGE",   "EXTERNAL",
                                      "network", "REMOTE",     "SHARED"};
  static const char *const unknown[] = {"FS", "OBJ", "CPU_", "GP", "GPUS", "CPU_TIER3"};
  feeder *f = standard();
  uint64_t h = 1;
  for (size_t i = 0; i < sizeof device / sizeof device[0]; i++, h++)
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(h), .count = 4, .medium = device[i]}));
  cr_assert_eq(blocks_of(f, 0), 5);
  for (size_t i = 0; i < sizeof other / sizeof other[0]; i++, h++)
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(h), .count = 4, .medium = other[i]}));
  COUNTED(f, OTHER_TIER, 11);
  for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++, h++)
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(h), .count = 4, .medium = unknown[i]}));
  COUNTED(f, UNKNOWN_MEDIUM, 6);
  cr_assert_eq(blocks_of(f, 0), 5);
  put_batch(&f->batch, 1);
  put_removed(&f->batch, HASHES(1), "CPU", NULL);
  OK(feed(f, 0));
  cr_assert_eq(blocks_of(f, 0), 5, "a removal from another tier");
  close_checked(f);
}

Test(filters, kinds_are_learned_per_rank_from_stores_of_device_and_host) {
  feeder *f = standard();
  stored teach = {.hashes = HASHES(1),
                  .count = 4,
                  .medium = "CPU",
                  .kind = "full_attention",
                  .group = GROUP(2)};
  stored use = {.hashes = HASHES(2), .count = 4, .group = GROUP(2)};
  OK(feed_stored(f, 0, use));
  COUNTED(f, UNLEARNED_GROUP_IDX, 1);
  teach.medium = "DISK"; /* too far away to teach */
  OK(feed_stored(f, 0, teach));
  OK(feed_stored(f, 0, use));
  COUNTED(f, UNLEARNED_GROUP_IDX, 2);
  teach.medium = "CPU";
  OK(feed_stored(f, 0, teach));
  OK(feed_stored(f, 0, use));
  cr_assert_eq(blocks_of(f, 0), 1);
  OK(feed_stored(f, 1, use));
  COUNTED(f, UNLEARNED_GROUP_IDX, 3);
  teach.kind = "something_new";
  OK(feed_stored(f, 1, teach));
  OK(feed_stored(f, 1, use));
  COUNTED(f, UNKNOWN_KIND, 1);
  OK(feed_cleared(f, 0));
  OK(feed_stored(f, 0, use));
  cr_assert_eq(blocks_of(f, 0), 1, "a clear does not make forget");
  close_checked(f);
}

Test(filters, clears_of_tiers) {
  static const struct {
    const char *tag, *medium;
    uint32_t left;
    int count;
    bool complete;
  } cases[] = {
      {"AllBlocksCleared", NULL, 0, -1, true},
      {"AllBlocksCleared", "", 0, -1, true},
      {"AllBlocksCleared", "GPU", 0, -1, false},
      {"AllBlocksCleared", "CPU", 1, KVRELAY_COUNT_OTHER_TIER, false},
      {"AllBlocksCleared", "FS", 1, KVRELAY_COUNT_UNKNOWN_MEDIUM, false},
      {"TierBlocksCleared", NULL, 0, -1, false},
      {"TierBlocksCleared", "gpu", 0, -1, false},
      {"TierBlocksCleared", "DISK", 1, KVRELAY_COUNT_OTHER_TIER, false},
      {"TierBlocksCleared", "OBJ", 1, KVRELAY_COUNT_UNKNOWN_MEDIUM, false},
      {"Ignored", NULL, 1, KVRELAY_COUNT_IGNORED_EVENT, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    feeder *f = standard();
    f->sequence = 5;
    OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
    put_batch(&f->batch, 1);
    put_cleared(&f->batch, cases[i].tag, cases[i].medium);
    OK(feed(f, 0));
    cr_assert_eq(blocks_of(f, 0), cases[i].left, "case %zu", i);
    cr_assert_eq(kvrelay_source_complete(&f->source, 0), cases[i].complete, "case %zu", i);
    cr_assert_eq(counted_all(f), cases[i].count < 0 ? 0 : 1, "case %zu", i);
    if (cases[i].count >= 0)
      cr_assert_eq(counted(f, cases[i].count), 1, "case %zu", i);
    close_checked(f);
  }
}

/* ---- namespaces ---- */

static const packer *tagged(packer *p, const char *const *strings, size_t count) {
  p->len = 0;
  put_array(p, 1);
  put_array(p, count);
  for (size_t i = 0; i < count; i++)
    put_text(p, strings[i]);
  return p;
}

Test(namespaces, come_from_the_salt_the_tag_or_the_parent) {
  static packer keys;
  uint32_t t[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  feeder *f = standard();
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .count = 4, .cache_salt = "tenant-a"}));
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(2), .parent = PARENT(1), .first = 4, .count = 4}));
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(3), .parent = PARENT(2), .first = 8, .count = 4}));
  cr_assert_eq(depth_of(f, t, 12, NULL, "tenant-a"), 3);
  cr_assert_eq(depth_of(f, t, 12, NULL, NULL), 0);
  cr_assert_eq(depth_of(f, t, 12, NULL, "tenant-b"), 0);
  const char *both[] = {"adapter-a", "adapter-a", "dynamo-cache-salt:tenant-b",
                        "dynamo-cache-salt:late"};
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(4),
                          .count = 4,
                          .lora_name = "adapter-a",
                          .extra_keys = tagged(&keys, both, 4)}));
  cr_assert_eq(depth_of(f, t, 4, "adapter-a", "tenant-b"), 1);
  /* The salt of the event wins over the tag; a tag with nothing behind it is no tag. */
  const char *tag[] = {"dynamo-cache-salt:x"}, *empty[] = {"dynamo-cache-salt:"};
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(5),
                          .count = 4,
                          .cache_salt = "y",
                          .extra_keys = tagged(&keys, tag, 1)}));
  cr_assert_eq(depth_of(f, t, 4, NULL, "y"), 1);
  cr_assert_eq(depth_of(f, t, 4, NULL, "x"), 0);
  COUNTED(f, SALT_UNTAGGED, 0);
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(6), .count = 4, .extra_keys = tagged(&keys, empty, 1)}));
  COUNTED(f, SALT_UNTAGGED, 1);
  cr_assert_eq(depth_of(f, t, 4, NULL, NULL), 1);
  close_checked(f);
}

static void untagged_counts(kvrelay_source_config *c) { c->untagged_salt = KVRELAY_SALT_NAMESPACE; }

Test(namespaces, an_untagged_salt_counts_when_asked_for) {
  static packer keys;
  uint32_t t[4] = {0, 1, 2, 3};
  feeder *f = with(untagged_counts);
  const char *strings[] = {"first", "adapter-a", "second"};
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(1),
                          .count = 4,
                          .lora_name = "adapter-a",
                          .extra_keys = tagged(&keys, strings, 3)}));
  cr_assert_eq(depth_of(f, t, 4, "adapter-a", "second"), 1);
  CLEAN(f);
  close_checked(f);
}

Test(namespaces, a_block_stored_under_two_is_ambiguous) {
  feeder *f = standard();
  uint32_t t[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  stored a = {.hashes = HASHES(1), .count = 4, .cache_salt = "a"},
         b = {.hashes = HASHES(1), .count = 4, .cache_salt = "b"};
  stored none = {.hashes = HASHES(1), .count = 4};
  stored child = {.hashes = HASHES(2), .parent = PARENT(1), .first = 4, .count = 4};
  OK(feed_stored(f, 0, a));
  OK(feed_stored(f, 0, b));
  COUNTED(f, NAMESPACE_CONFLICT, 1);
  OK(feed_stored(f, 0, none));
  COUNTED(f, NAMESPACE_CONFLICT, 2);
  OK(feed_stored(f, 0, child));
  COUNTED(f, AMBIGUOUS_CACHE_NAMESPACE, 1);
  cr_assert_eq(blocks_of(f, 0), 1);
  child.cache_salt = "a";
  OK(feed_stored(f, 0, child));
  cr_assert_eq(depth_of(f, t, 8, NULL, "a"), 2, "a child with a namespace of its own");
  /* The block keeps its own namespace: the same store again is a copy. */
  OK(feed_stored(f, 0, a));
  OK(feed_removed(f, 0, HASHES(1)));
  cr_assert_eq(blocks_of(f, 0), 2);
  OK(feed_removed(f, 0, HASHES(1)));
  cr_assert_eq(blocks_of(f, 0), 1);
  /* With the mapping goes what was ambiguous about it. */
  OK(feed_stored(f, 0, b));
  child.cache_salt = NULL;
  child.hashes = HASHES(3);
  OK(feed_stored(f, 0, child));
  cr_assert_eq(depth_of(f, t, 8, NULL, "b"), 2);
  COUNTED(f, AMBIGUOUS_CACHE_NAMESPACE, 1);
  close_checked(f);
}

Test(namespaces, numbers_of_dead_ones_are_used_again) {
  kvrelay_source_config cfg = test_source_config();
  feeder *f = feeder_new(&cfg, 1024, NULL);
  char name[16];
  uint32_t t[4] = {0, 1, 2, 3};
  for (uint64_t i = 0; i < 16; i++) {
    snprintf(name, sizeof name, "ns-%" PRIu64, i);
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(i + 1), .count = 4, .cache_salt = name}));
  }
  CLEAN(f);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(100), .count = 4, .cache_salt = "one too many"}));
  COUNTED(f, NAMESPACE_LIMIT, 1);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(101), .count = 4, .cache_salt = "ns-3"}));
  cr_assert_eq(blocks_of(f, 0), 17);
  for (uint64_t i = 0; i < 200; i++) {
    OK(feed_removed(f, 0, HASHES(i < 16 ? i + 1 : 1000 + i - 16)));
    snprintf(name, sizeof name, "next-%" PRIu64, i);
    OK(feed_stored(f, 0, (stored){.hashes = HASHES(1000 + i), .count = 4, .cache_salt = name}));
    /* The one whose removal left ns-3 alive finds no number, and so does its successor every 16
     * rounds. */
    cr_assert_eq(depth_of(f, t, 4, NULL, name), i % 16 == 3 ? 0 : 1, "%s", name);
  }
  COUNTED(f, NAMESPACE_LIMIT, 1 + 13);
  cr_assert_eq(depth_of(f, t, 4, NULL, "ns-3"), 1);
  close_checked(f);
}

Test(namespaces, names_that_brought_no_block_cost_nothing) {
  kvrelay_source_config cfg = test_source_config();
  feeder *f = feeder_new(&cfg, 1024, NULL);
  char name[16];
  for (uint64_t i = 0; i < 100; i++) {
    snprintf(name, sizeof name, "lost-%" PRIu64, i);
    OK(feed_stored(
        f, 0,
        (stored){.hashes = HASHES(i + 1), .count = 4, .parent = PARENT(5000), .cache_salt = name}));
  }
  COUNTED(f, NAMESPACE_LIMIT, 0);
  COUNTED(f, ORPHAN, 100);
  close_checked(f);
}

/* ---- multimodal content ---- */

static void markers(kvrelay_source_config *c) { c->mm_identifiers = KVRELAY_MM_MARKER; }

Test(multimodal, identifiers) {
  static packer keys;
  static const uint32_t t[] = {0, 1, 2, 3};
  const char *digest[] = {IMAGE_A},
             *marker[] = {"0123456789abcdef000000000000000000000000000000000000000000000000"};
  const char *name[] = {"opaque-renderer-image-0"};
  uint64_t number = UINT64_C(0x0123456789abcdef), named = UINT64_C(14437604544409538977), want = 0,
           want_named = 0;
  cr_assert_eq(hashfmt_local_mm(t, 4, &number, 1, HASHFMT_CHAIN_SEED, &want), HASHFMT_OK);
  cr_assert_eq(hashfmt_local_mm(t, 4, &named, 1, HASHFMT_CHAIN_SEED, &want_named), HASHFMT_OK);
  feeder *f = standard();
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(1), .count = 4, .extra_keys = objects(&keys, 1, digest)}));
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(2), .count = 4, .extra_keys = objects(&keys, 1, marker)}));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(3), .count = 4, .extra_keys = objects(&keys, 1, name)}));
  cr_assert_eq(owners_of(f, want), 2);
  cr_assert_eq(owners_of(f, want_named), 1);
  close_checked(f);
  f = with(markers);
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(1), .count = 4, .extra_keys = objects(&keys, 1, digest)}));
  OK(feed_stored(
      f, 0, (stored){.hashes = HASHES(2), .count = 4, .extra_keys = objects(&keys, 1, marker)}));
  cr_assert_eq(owners_of(f, want), 1);
  cr_assert_eq(owners_of(f, CANON_4), 1, "a digest that the engine made is ignored");
  close_checked(f);
}

Test(multimodal, infos_replace_the_objects_of_extra_keys) {
  static packer keys, infos;
  static const uint32_t t[] = {0, 1, 2, 3};
  const char *digest[] = {IMAGE_B};
  uint64_t number = UINT64_C(0xffffffffffffffff), want = 0;
  cr_assert_eq(hashfmt_local_mm(t, 4, &number, 1, HASHFMT_CHAIN_SEED, &want), HASHFMT_OK);
  infos.len = 0;
  put_array(&infos, 1);
  put_map(&infos, 1);
  put_text(&infos, "mm_objects");
  put_array(&infos, 1);
  put_map(&infos, 2);
  put_text(&infos, "offsets");
  put_array(&infos, 0);
  put_text(&infos, "mm_hash");
  put_int(&infos, -1);
  feeder *f = standard();
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(1),
                          .count = 4,
                          .extra_keys = objects(&keys, 1, digest),
                          .mm_infos = &infos}));
  cr_assert_eq(owners_of(f, want), 1);
  /* nil or empty: absent */
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(2), .count = 4, .mm_infos = &(packer){{0xc0}, 1}}));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(3), .count = 4, .mm_infos = &(packer){{0x90}, 1}}));
  cr_assert_eq(owners_of(f, CANON_4), 2);
  CLEAN(f);
  close_checked(f);
}

Test(multimodal, odd_items_are_ignored_and_counted) {
  feeder *f = standard();
  /* [[7, true, nil, {}, ["id"], ["id", "x"], 1.5], ["stray"]] */
  packer keys = {{0}, 0};
  put_array(&keys, 2);
  put_array(&keys, 7);
  put_uint(&keys, 7);
  put_bool(&keys, true);
  put_nil(&keys);
  put_map(&keys, 0);
  put_array(&keys, 1);
  put_text(&keys, "id");
  put_array(&keys, 2);
  put_text(&keys, "id");
  put_text(&keys, "x");
  put_float(&keys);
  put_array(&keys, 1);
  put_text(&keys, "stray");
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1, 2), .count = 8, .extra_keys = &keys}));
  COUNTED(f, EXTRA_KEY_IGNORED, 8);
  cr_assert_eq(counted_all(f), 8);
  cr_assert_eq(depth(f, 0, 8), 2);
  close_checked(f);
}

/* ---- one event ---- */

Test(stores, hashes_that_repeat_drop_the_event) {
  uint64_t many[80]; /* short lists are compared, longer ones sorted */
  for (uint64_t i = 0; i < 80; i++)
    many[i] = i * 31 % 97 + 1;
  for (size_t n = 2; n <= 80; n++) {
    stored s = {.count = (uint32_t)(4 * n)};
    feeder *f = standard();
    s.hashes.len = n;
    memcpy(s.hashes.at, many, n * sizeof *many);
    OK(feed_stored(f, 0, s));
    cr_assert_eq(blocks_of(f, 0), n);
    CLEAN(f);
    OK(feed_cleared(f, 0));
    s.hashes.at[n - 1] = s.hashes.at[n / 3];
    OK(feed_stored(f, 0, s));
    COUNTED(f, DUPLICATE_HASH, 1);
    cr_assert_eq(blocks_of(f, 0), 0);
    close_checked(f);
  }
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(2, 1), .parent = PARENT(1), .first = 4, .count = 8}));
  COUNTED(f, DUPLICATE_HASH, 1);
  cr_assert_eq(blocks_of(f, 0), 1);
  close_checked(f);
}

Test(stores, a_conflict_rejects_the_whole_event_and_adds_no_copies) {
  feeder *f = standard();
  OK(feed_stored(f, 0, plain(HASHES(1, 2), 0, 8)));
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(1, 3),
                          .first = 0,
                          .count = 8,
                          .tokens = (const uint32_t[]){0, 1, 2, 3, 9, 9, 9, 9}}));
  COUNTED(f, REMAP_CONFLICT, 0);
  cr_assert_eq(blocks_of(f, 0), 3);
  OK(feed_stored(f, 0,
                 (stored){.hashes = HASHES(1, 4, 2),
                          .count = 12,
                          .tokens = (const uint32_t[]){0, 1, 2, 3, 8, 8, 8, 8, 7, 7, 7, 7}}));
  COUNTED(f, REMAP_CONFLICT, 1);
  cr_assert_eq(blocks_of(f, 0), 3);
  OK(feed_removed(f, 0, HASHES(1, 1)));
  cr_assert_eq(blocks_of(f, 0), 2, "two copies of the first block, not three");
  close_checked(f);
}

Test(stores, merged_or_not_is_the_same) {
  feeder *one = standard(), *many = standard();
  OK(feed_stored(one, 0, plain(HASHES(1, 2, 3), 0, 12)));
  put_batch(&many->batch, 3);
  put_stored(&many->batch, plain(HASHES(1), 0, 4));
  put_stored(&many->batch,
             (stored){.hashes = HASHES(2), .parent = PARENT(1), .first = 4, .count = 4});
  put_stored(&many->batch,
             (stored){.hashes = HASHES(3), .parent = PARENT(2), .first = 8, .count = 4});
  OK(feed(many, 0));
  cr_assert_eq(owners_of(one, CANON_12), 1);
  cr_assert_eq(owners_of(many, CANON_12), 1);
  cr_assert_eq(depth(many, 0, 12), 3);
  close_checked(one);
  close_checked(many);
}

Test(stores, surplus_and_shortage_of_pairs) {
  feeder *f = with(eagle);
  /* W = 5: three hashes, 12 tokens make 2 whole windows and a part. */
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1, 2, 3), .count = 12, .pairs = true}));
  cr_assert_eq(blocks_of(f, 0), 2);
  COUNTED(f, PARTIAL_BLOCK, 1);
  /* surplus = tokens - (hashes * 4 + 1): 3 is ignored, 4 is not */
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(4), .first = 20, .count = 8, .pairs = true}));
  cr_assert_eq(blocks_of(f, 0), 3);
  COUNTED(f, TOKEN_SURPLUS, 0);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(5), .first = 20, .count = 9, .pairs = true}));
  COUNTED(f, TOKEN_SURPLUS, 1);
  close_checked(f);
}

Test(stores, no_blocks_is_no_orphan) {
  feeder *f = standard();
  OK(feed_stored(f, 0, (stored){.hashes = {0}, .parent = PARENT(77), .count = 3}));
  CLEAN(f);
  OK(feed_stored(f, 0, (stored){.hashes = HASHES(1), .parent = PARENT(77), .count = 3}));
  COUNTED(f, PARTIAL_BLOCK, 1);
  COUNTED(f, ORPHAN, 0);
  close_checked(f);
}

Test(stores, the_memory_of_partial_blocks_is_bounded_and_per_rank) {
  feeder *f = standard(); /* room for 64 */
  for (uint64_t i = 1; i <= 70; i++)
    OK(feed_stored(f, 0, plain(HASHES(i), 0, 3)));
  COUNTED(f, PARTIAL_BLOCK, 70);
  OK(feed_removed(f, 1, HASHES(70)));
  COUNTED(f, UNKNOWN_REMOVAL, 1);
  for (uint64_t i = 1; i <= 70; i++)
    OK(feed_removed(f, 0, HASHES(i)));
  COUNTED(f, UNKNOWN_REMOVAL, 1 + 6);
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 3)));
  OK(feed_cleared(f, 0));
  OK(feed_removed(f, 0, HASHES(1)));
  COUNTED(f, UNKNOWN_REMOVAL, 1 + 6 + 1);
  close_checked(f);
}

Test(stores, exact_state_at_its_limit_is_counted) {
  kvrelay_source_config cfg = test_source_config();
  feeder *f = feeder_new(&cfg, 8, NULL);
  OK(feed_cleared(f, 0));
  uint64_t stored_blocks = 0;
  for (uint64_t i = 0; i < 4000 && counted(f, KVRELAY_COUNT_STATE_LIMIT) == 0;
       i++, stored_blocks = i)
    OK(feed_stored(f, 0, plain(HASHES(i + 1), (uint32_t)i * 4, 4)));
  COUNTED(f, STATE_LIMIT, 1);
  cr_assert_not(kvrelay_source_complete(&f->source, 0));
  cr_assert_eq(blocks_of(f, 0), stored_blocks - 1);
  cr_assert_eq(ckf_producer_check_(f->producer), CKF_OK);
  OK(feed_cleared(f, 0));
  OK(feed_stored(f, 0, plain(HASHES(1), 0, 4)));
  COUNTED(f, STATE_LIMIT, 1);
  close_checked(f);
}

static void small_events(kvrelay_source_config *c) { c->max_event_blocks = 4; }

Test(stores, long_lists) {
  feeder *f = with(small_events);
  OK(feed_stored(f, 0, plain(HASHES(1, 2, 3, 4), 0, 16)));
  OK(feed_stored(f, 0, plain(HASHES(5, 6, 7, 8, 9), 100, 20)));
  COUNTED(f, EVENT_TOO_LARGE, 1);
  cr_assert_eq(blocks_of(f, 0), 4);
  OK(feed_removed(f, 0, HASHES(4, 90, 91, 92, 93, 94, 3, 95, 96, 2, 1)));
  COUNTED(f, UNKNOWN_REMOVAL, 7);
  cr_assert_eq(blocks_of(f, 0), 0, "a removal of any length is carried out");
  close_checked(f);
}

/* ---- the object ---- */

Test(source, refuses_what_cannot_work) {
  kvrelay_source_config good = test_source_config(), cfg;
  size_t need = kvrelay_source_mem_size(&good);
  void *mem = malloc(need);
  kvrelay_source s;
  feeder *f = standard();
  cr_assert_gt(need, 0);
  cr_assert_eq(kvrelay_source_init(&s, &good, f->producer, mem, need - 1, 0), KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_source_init(&s, &good, f->producer, NULL, need, 0), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_source_init(&s, &good, NULL, mem, need, 0), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_source_init_abi(&s, sizeof s - 1, &good, f->producer, mem, need, 0),
               KVRELAY_ERR_ABI);
#define REFUSED(FIELD, VALUE)                                                                      \
  cfg = good;                                                                                      \
  cfg.FIELD = (VALUE);                                                                             \
  cr_assert_eq(kvrelay_source_mem_size(&cfg), 0, #FIELD);                                          \
  cr_assert_eq(kvrelay_source_init(&s, &cfg, f->producer, mem, need, 0), KVRELAY_ERR_ARG, #FIELD)
  REFUSED(block_size, 0);
  REFUSED(hash_format, HASHFMT_FORMAT_UNSPECIFIED);
  REFUSED(hash_format, 3);
  REFUSED(ranks, 0);
  REFUSED(ranks, 65537);
  REFUSED(rank_start, UINT32_MAX);
  REFUSED(max_event_blocks, 0);
  REFUSED(max_namespaces, 0);
  REFUSED(max_namespaces, 65001);
  free(mem);
  close_checked(f);
}

Test(source, names_every_count_once) {
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    for (int j = 0; j <= i; j++)
      cr_assert_eq(strcmp(kvrelay_count_name(i), kvrelay_count_name(j)) == 0, i == j);
  cr_assert_null(kvrelay_count_name(-1));
  cr_assert_null(kvrelay_count_name(KVRELAY_COUNT_LEN));
  feeder *f = standard();
  kvrelay_source_count(&f->source, KVRELAY_COUNT_FRAMES, 3);
  kvrelay_source_count(&f->source, -1, 3);
  kvrelay_source_count(&f->source, KVRELAY_COUNT_LEN, 3);
  COUNTED(f, FRAMES, 3);
  cr_assert_eq(counted_all(f), 3);
  close_checked(f);
}
