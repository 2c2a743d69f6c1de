/* SPDX-License-Identifier: Apache-2.0 */

/* What a listener of a producer hears, in which order, and what it does not hear; what follows from
 * each kind of failure. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { HEARD = 64 };

typedef struct ear {
  struct {
    uint64_t canonical;
    bool created;
  } said[HEARD];
  size_t len;
} ear;

static ear e;
static ckf_producer p, next_p;
static uint8_t memory[2][1000000];
static const ckf_member one = {1, 0}, two = {2, 0}, three = {3, 0};

static void listen(void *user, uint64_t canonical, bool created) {
  ear *const to = user;
  cr_assert_lt(to->len, HEARD);
  to->said[to->len].canonical = canonical;
  to->said[to->len++].created = created;
}

static void open_producer(uint64_t expected, uint32_t kicks) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected;
  cfg.filter.max_kicks = kicks;
  cfg.max_mappings = 100;
  cfg.max_blocks = 100;
  cfg.max_members = 8;
  cr_assert_leq(ckf_producer_mem_size(&cfg), sizeof memory[0]);
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], sizeof memory[0]), CKF_OK);
  e.len = 0;
  ckf_producer_listen(&p, listen, &e);
}

static int store_to(ckf_producer *to, const ckf_member *member, const ckf_block *blocks, size_t n) {
  ckf_outcome out;
  return ckf_producer_stored(to, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
                             blocks, n, &out);
}

static int store_root(ckf_producer *to, const ckf_member *member, uint64_t external,
                      uint64_t canonical) {
  const ckf_block block = {external, canonical};
  return store_to(to, member, &block, 1);
}

static void remove_one(const ckf_member *member, uint64_t external) {
  ckf_outcome out;
  cr_assert_eq(
      ckf_producer_removed(&p, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, &external, 1, &out),
      CKF_OK);
}

/* The next announcements in order, and no more. */
#define HEARS(...)                                                                                 \
  do {                                                                                             \
    const int64_t want_[] = {__VA_ARGS__};                                                         \
    cr_assert_eq(e.len, sizeof want_ / sizeof want_[0]);                                           \
    for (size_t i_ = 0; i_ < e.len; i_++) {                                                        \
      cr_assert_eq(e.said[i_].created, want_[i_] > 0);                                             \
      cr_assert_eq(e.said[i_].canonical, (uint64_t)(want_[i_] > 0 ? want_[i_] : -want_[i_]));      \
    }                                                                                              \
    e.len = 0;                                                                                     \
  } while (0)
#define HEARS_NOTHING() cr_assert_eq(e.len, 0)

Test(ckf_listener, first_owner_and_last_owner) {
  open_producer(32, 500);
  cr_assert_eq(store_root(&p, &one, 100, 7), CKF_OK);
  HEARS(7);
  cr_assert_eq(store_root(&p, &one, 100, 7), CKF_OK);
  cr_assert_eq(store_root(&p, &one, 101, 7), CKF_OK);
  cr_assert_eq(store_root(&p, &two, 100, 7), CKF_OK);
  HEARS_NOTHING();
  remove_one(&one, 100);
  remove_one(&one, 100);
  remove_one(&two, 100);
  HEARS_NOTHING();
  remove_one(&one, 101);
  HEARS(-7);
  ckf_producer_listen(&p, NULL, NULL);
  cr_assert_eq(store_root(&p, &one, 100, 7), CKF_OK);
  HEARS_NOTHING();
}

Test(ckf_listener, an_event_speaks_in_the_order_of_its_blocks) {
  ckf_block blocks[40];
  ckf_outcome out;
  uint64_t externals[40], canonical = 0;
  open_producer(100, 500);
  for (size_t i = 0; i < 40; i++)
    blocks[i] = (ckf_block){externals[i] = 500 + i, 9 + i};
  cr_assert_eq(store_to(&p, &one, blocks, 40), CKF_OK);
  cr_assert_eq(e.len, 40);
  for (size_t i = 0; i < 40; i++) {
    canonical = i == 0 ? blocks[0].local : ckf_child(canonical, blocks[i].local);
    cr_assert_eq(e.said[i].canonical, canonical);
    cr_assert(e.said[i].created);
  }
  e.len = 0;
  cr_assert_eq(
      ckf_producer_removed(&p, &one, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals, 2, &out),
      CKF_OK);
  cr_assert_eq(e.len, 2);
  cr_assert_eq(e.said[0].canonical, 9);
  cr_assert_not(e.said[0].created);
  e.len = 0;
  cr_assert_eq(ckf_producer_cleared(&p, &one, CKF_DOMAIN_MISSING, &out), CKF_OK);
  cr_assert_eq(e.len, 38);
}

Test(ckf_listener, a_refused_event_says_nothing) {
  ckf_block blocks[90];
  open_producer(100, 500);
  for (size_t i = 0; i < 90; i++)
    blocks[i] = (ckf_block){500 + i, 9 + i};
  blocks[80].external = blocks[2].external;
  cr_assert_eq(store_to(&p, &one, blocks, 90), CKF_ERR_INVALID_BLOCK_SEQUENCE);
  cr_assert_eq(store_to(&p, &one, blocks + 70, 20), CKF_OK);
  e.len = 0;
  blocks[80].external = 1;
  cr_assert_eq(store_to(&p, &two, blocks, 90), CKF_ERR_NOSPACE, "100 mappings at most");
  HEARS_NOTHING();
}

Test(ckf_listener, what_finds_no_place_is_announced_all_the_same) {
  open_producer(1, 1);
  for (uint64_t i = 1; i <= 20; i++) {
    const int rc = store_root(&p, &one, 100 + i, i);
    cr_assert(rc == CKF_OK || rc == CKF_ERR_CAPACITY_EXHAUSTED);
    HEARS((int64_t)i);
  }
  for (uint64_t i = 1; i <= 20; i++) {
    remove_one(&one, 100 + i);
    HEARS(-(int64_t)i);
  }
}

static int begin(const ckf_member *named, size_t n) {
  return ckf_rebuild_begin(&next_p, &p, named, n, memory[1], sizeof memory[1]);
}

Test(ckf_listener, a_replacement_announces_the_difference_and_removals_first) {
  const ckf_member both[2] = {one, two};
  ckf_batch batch;
  open_producer(32, 500);
  cr_assert_eq(store_root(&p, &one, 100, 7), CKF_OK);
  cr_assert_eq(store_root(&p, &two, 100, 8), CKF_OK);
  cr_assert_eq(store_root(&p, &three, 100, 9), CKF_OK);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
  HEARS(7, 8, 9);

  /* The second member's dump is wrong: whoever replaces gives up, and nothing was touched. */
  uint64_t words[16];
  cr_assert_eq(ckf_producer_format(&p)->bucket_count, 16);
  memcpy(words, ckf_producer_words(&p), sizeof words);
  cr_assert_eq(store_root(&p, &three, 101, 10), CKF_OK);
  HEARS(10);
  cr_assert_eq(begin(both, 2), CKF_OK);
  cr_assert_eq(store_root(&next_p, &one, 100, 11), CKF_OK);
  const ckf_block orphan = {5, 6};
  ckf_outcome out;
  cr_assert_eq(ckf_producer_stored(&next_p, &two, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, true, 77,
                                   false, 0, &orphan, 1, &out),
               CKF_ERR_PARENT_NOT_FOUND);
  HEARS_NOTHING();
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  cr_assert_eq(ckf_producer_pending(&p), 1);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1, "the window is as it was");
  remove_one(&three, 101);
  HEARS(-10);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
  cr_assert_arr_eq(ckf_producer_words(&p), words, sizeof words);

  /* The next one works: 7 goes, 11 comes, 8 and 9 stay. */
  cr_assert_eq(begin(both, 2), CKF_OK);
  cr_assert_eq(store_root(&next_p, &one, 100, 11), CKF_OK);
  cr_assert_eq(store_root(&next_p, &two, 200, 8), CKF_OK);
  HEARS_NOTHING();
  cr_assert_eq(ckf_rebuild_commit(&p, &next_p), CKF_OK);
  HEARS(-7, 11);
  remove_one(&one, 100);
  HEARS(-11);
}

/* ---- dispositions ---- */

Test(ckf_failure, each_kind_has_its_row) {
  static const struct {
    enum ckf_failure failure;
    const char *name, *part, *commit, *recover, *action;
  } rows[] = {
      {CKF_FAILURE_BOUNDED_RELOCATION, "BoundedRelocationFailure", "ProducerCore",
       "ExactCommittedPhysicalOmitted", "", "ContinueCapacityOmission"},
      {CKF_FAILURE_PRECOMMIT_ALLOCATION, "PrecommitAllocationFailure", "ProducerCore",
       "KnownUnchanged", "", "ReportResourceFailure"},
      {CKF_FAILURE_SOURCE_PROTOCOL, "SourceProtocolFailure", "ProducerCore", "KnownUnchanged", "",
       "RejectSource"},
      {CKF_FAILURE_PREWRITE_INVARIANT, "PrewriteInvariantMismatch", "ProducerCore",
       "KnownUnchanged", "ProducerCore", "FenceAndRebuildProducer"},
      {CKF_FAILURE_CONSUMER_BEFORE_WRITE, "ConsumerGapOrMalformedBeforeWrite", "ConsumerLane",
       "KnownUnchanged", "ConsumerLane", "DeactivateAndSnapshot"},
      {CKF_FAILURE_CONSUMER_WORKER_MID_APPLY, "ConsumerWorkerFailureMidApply", "ConsumerLane",
       "Uncertain", "ConsumerLane", "DeactivateAndSnapshot"},
      {CKF_FAILURE_INACTIVE_SNAPSHOT_INSTALL, "InactiveSnapshotInstallFailure", "ConsumerLane",
       "KnownUnchanged", "ConsumerLane", "RetrySnapshot"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const ckf_disposition d = ckf_failure_disposition(rows[i].failure);
    cr_assert_str_eq(ckf_failure_name(rows[i].failure), rows[i].name);
    cr_assert_str_eq(ckf_part_name(d.part), rows[i].part);
    cr_assert_str_eq(ckf_commit_name(d.commit), rows[i].commit);
    cr_assert_str_eq(ckf_part_name(d.recover), rows[i].recover);
    cr_assert_str_eq(ckf_lane_action_name(d.action), rows[i].action);
  }
  cr_assert_eq(ckf_failure_disposition(CKF_FAILURE_NONE).part, CKF_PART_NONE);
  cr_assert_eq(ckf_failure_disposition((enum ckf_failure)99).action, CKF_ACTION_NONE);
  cr_assert_str_eq(ckf_failure_name((enum ckf_failure) - 1), "");
}

Test(ckf_failure, each_error_has_its_kind) {
  static const struct {
    int err;
    enum ckf_failure failure;
  } kinds[] = {
      {CKF_OK, CKF_FAILURE_NONE},
      {CKF_ERR_CAPACITY_EXHAUSTED, CKF_FAILURE_BOUNDED_RELOCATION},
      {CKF_ERR_NOSPACE, CKF_FAILURE_PRECOMMIT_ALLOCATION},
      {CKF_ERR_OWNERSHIP_OVERFLOW, CKF_FAILURE_SOURCE_PROTOCOL},
      {CKF_ERR_PARENT_NOT_FOUND, CKF_FAILURE_SOURCE_PROTOCOL},
      {CKF_ERR_BLOCK_NOT_FOUND, CKF_FAILURE_SOURCE_PROTOCOL},
      {CKF_ERR_INVALID_BLOCK_SEQUENCE, CKF_FAILURE_SOURCE_PROTOCOL},
      {CKF_ERR_UNSUPPORTED_DOMAIN, CKF_FAILURE_SOURCE_PROTOCOL},
      {CKF_ERR_INVARIANT, CKF_FAILURE_PREWRITE_INVARIANT},
      {CKF_ERR_TRUNCATED, CKF_FAILURE_CONSUMER_BEFORE_WRITE},
      {CKF_ERR_INCOMPLETE_COVERAGE, CKF_FAILURE_CONSUMER_BEFORE_WRITE},
      {CKF_ERR_DUPLICATE_IMAGE, CKF_FAILURE_CONSUMER_BEFORE_WRITE},
      {CKF_ERR_STALE_EPOCH, CKF_FAILURE_NONE}, /* refusals that change nothing */
      {CKF_ERR_WRONG_CONSUMER, CKF_FAILURE_NONE},
      {CKF_ERR_EXPECTED_ZERO, CKF_FAILURE_NONE},
      {CKF_ERR_ARG, CKF_FAILURE_NONE},
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
    cr_assert_eq(ckf_failure_of(kinds[i].err), kinds[i].failure, "%s", ckf_errname(kinds[i].err));
}
