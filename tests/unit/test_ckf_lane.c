/* SPDX-License-Identifier: Apache-2.0 */

/* Replica and lane: what is refused, and that a refusal leaves the words alone. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 128 };

static const ckf_format format = {5, BUCKETS};
static uint64_t memory[BUCKETS + 64];
static uint8_t frame[4096];

static ckf_cbi1_frame delta(uint64_t base, uint64_t sequence, const ckf_image *images, size_t n) {
  ckf_cbi1_frame view;
  const ptrdiff_t len =
      ckf_cbi1_delta_encode(&format, 1, base, sequence, images, n, frame, sizeof frame);
  cr_assert_gt(len, 0);
  cr_assert_eq(ckf_cbi1_decode(&format, frame, (size_t)len, &view), CKF_OK);
  return view;
}

static ckf_cbi1_frame chunk(uint64_t sequence, uint64_t fill, uint32_t index) {
  uint64_t words[BUCKETS];
  ckf_cbi1_frame view;
  for (size_t i = 0; i < BUCKETS; i++)
    words[i] = fill;
  const ptrdiff_t len = ckf_cbi1_snapshot_encode(&format, 1, sequence, words, BUCKETS, BUCKETS / 2,
                                                 index, frame, sizeof frame);
  cr_assert_gt(len, 0);
  cr_assert_eq(ckf_cbi1_decode(&format, frame, (size_t)len, &view), CKF_OK);
  return view;
}

static ckf_replica live_replica(void) {
  ckf_replica r;
  ckf_cbi1_frame view;
  cr_assert_eq(ckf_replica_init(&r, &format, memory, sizeof memory), CKF_OK);
  view = chunk(9, 3, 0);
  cr_assert_eq(ckf_replica_apply(&r, &view), 0);
  cr_assert_null(ckf_replica_words(&r));
  view = chunk(9, 3, 1);
  cr_assert_eq(ckf_replica_apply(&r, &view), 1);
  cr_assert(ckf_replica_live(&r));
  cr_assert_eq(ckf_replica_sequence(&r), 9);
  return r;
}

Test(ckf_replica, follows_deltas_and_refuses_everything_else) {
  ckf_replica r = live_replica();
  const ckf_image good[2] = {{5, 50}, {69, 60}}, twice[3] = {{1, 1}, {2, 2}, {1, 3}};
  const struct {
    ckf_image images[3];
    size_t n;
    uint64_t base, sequence;
    int err;
  } bad[] = {
      {{{1, 1}}, 1, 8, 9, CKF_ERR_SEQUENCE},     {{{1, 1}}, 1, 10, 11, CKF_ERR_SEQUENCE},
      {{{1, 1}}, 1, 9, 11, CKF_ERR_SEQUENCE},    {{{1, 1}}, 1, 9, 9, CKF_ERR_SEQUENCE},
      {{{0, 0}}, 0, 9, 10, CKF_ERR_EMPTY_DELTA},
  };
  ckf_cbi1_frame view;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    view = delta(bad[i].base, bad[i].sequence, bad[i].images, bad[i].n);
    cr_assert_eq(ckf_replica_apply(&r, &view), bad[i].err, "case %zu", i);
  }
  for (int repeat = 0; repeat < 2; repeat++) { /* the duplicate check leaves nothing behind */
    view = delta(9, 10, twice, 3);
    cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_DUPLICATE_IMAGE);
  }
  view = chunk(10, 4, 0);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_SNAPSHOT_LIVE);
  for (size_t i = 0; i < BUCKETS; i++)
    cr_assert_eq(ckf_replica_words(&r)[i], 3);
  cr_assert_eq(ckf_replica_sequence(&r), 9);
  view = delta(9, 10, good, 2);
  cr_assert_eq(ckf_replica_apply(&r, &view), 1);
  cr_assert_eq(ckf_replica_sequence(&r), 10);
  cr_assert_eq(ckf_replica_words(&r)[5], 50);
  cr_assert_eq(ckf_replica_words(&r)[69], 60);
  view.format.seed++;
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_FORMAT_MISMATCH);
}

Test(ckf_replica, starts_over_after_a_reset) {
  ckf_replica r = live_replica();
  const ckf_image image = {5, 50};
  ckf_cbi1_frame view = delta(9, 10, &image, 1);
  ckf_replica_reset(&r);
  cr_assert_not(ckf_replica_live(&r));
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_NOT_LIVE);
  view = chunk(20, 7, 1);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_CHUNK_SEQUENCE);
  view = chunk(20, 7, 0);
  cr_assert_eq(ckf_replica_apply(&r, &view), 0);
  view = chunk(21, 7, 1);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_CHUNK_SEQUENCE, "chunk of another snapshot");
  cr_assert_null(ckf_replica_words(&r));
}

Test(ckf_replica, the_largest_sequence_has_no_next) {
  const ckf_image image = {1, 7};
  ckf_replica r;
  ckf_cbi1_frame view;
  cr_assert_eq(ckf_replica_init(&r, &format, memory, sizeof memory), CKF_OK);
  for (uint32_t i = 0; i < 2; i++) {
    view = chunk(UINT64_MAX, 9, i);
    cr_assert_eq(ckf_replica_apply(&r, &view), (int)i);
  }
  view = delta(UINT64_MAX, 0, &image, 1);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_SEQUENCE);
  cr_assert_eq(ckf_replica_words(&r)[1], 9);
  cr_assert_eq(ckf_replica_sequence(&r), UINT64_MAX);
}

Test(ckf_replica, memory_limits_are_exact) {
  ckf_replica r;
  const ckf_format odd = {5, 96};
  cr_assert_eq(ckf_replica_mem_size(&odd), 0);
  cr_assert_eq(ckf_replica_init(&r, &odd, memory, sizeof memory), CKF_ERR_FORMAT_BUCKET_COUNT);
  const size_t len = ckf_replica_mem_size(&format);
  cr_assert_eq(ckf_replica_init(&r, &format, memory, len - 1), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_replica_init(&r, &format, memory, len), CKF_OK);
  cr_assert_eq(ckf_replica_init_abi(&r, 1, &format, memory, len), CKF_ERR_ABI);
}

/* ---- lane ---- */

/* Lane 3 of a table in `memory`. */
static ckf_table table;

static ckf_lane a_lane(ckf_identity *identity, ckf_lease *lease) {
  static uint64_t room[BUCKETS * 8];
  ckf_manifest manifest;
  ckf_lane lane;
  memset(&manifest, 0, sizeof manifest);
  memset(identity, 0, sizeof *identity);
  identity->pool.dc_id = 1;
  identity->format = format;
  manifest.consumer_instance = 17;
  manifest.format = format;
  manifest.configured = 1u << 3;
  manifest.pools[3] = identity->pool;
  *lease = (ckf_lease){17, 3, 1};
  cr_assert_eq(ckf_table_init(&table, &manifest, 2, room, sizeof room), CKF_OK);
  cr_assert_eq(ckf_lane_claim(&lane, &table, 3), CKF_OK);
  return lane;
}

Test(ckf_lane, assignment_is_checked_in_order_and_leaves_a_ready_lane_alone) {
  ckf_identity identity, other;
  ckf_lease lease, bad;
  uint64_t words[BUCKETS] = {1};
  ckf_lane lane = a_lane(&identity, &lease);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 1, words, BUCKETS).result,
               CKF_LANE_IGNORED_FOREIGN_LEASE);
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 1, words, BUCKETS).result,
               CKF_LANE_SNAPSHOT_INSTALLED);
  other = identity;
  other.format.seed++;
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_ERR_STALE_EPOCH);
  cr_assert_eq(ckf_lane_assign(&lane, &other, &lease), CKF_ERR_WRONG_FORMAT);
  other.pool.dc_id = 2;
  cr_assert_eq(ckf_lane_assign(&lane, &other, &lease), CKF_ERR_WRONG_OWNER);
  bad = lease;
  bad.physical_lane = 4;
  cr_assert_eq(ckf_lane_assign(&lane, &other, &bad), CKF_ERR_WRONG_LANE);
  bad.consumer_instance = 18;
  cr_assert_eq(ckf_lane_assign(&lane, &other, &bad), CKF_ERR_WRONG_CONSUMER);
  cr_assert(ckf_lane_ready(&lane));
  lease.assignment_epoch = 2;
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  cr_assert_not(ckf_lane_ready(&lane));
  ckf_lane_retire(&lane);
  lease.assignment_epoch = 2;
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_ERR_STALE_EPOCH,
               "the last epoch outlives the assignment");
}

Test(ckf_lane, a_missed_last_delta_shows_at_the_drain) {
  ckf_identity identity;
  ckf_lease lease;
  uint64_t words[BUCKETS] = {0};
  ckf_lane lane = a_lane(&identity, &lease);
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  ckf_lane_outcome out = ckf_lane_drain(&lane, &lease, 4);
  cr_assert_eq(out.fault, CKF_FAULT_TERMINAL_MISMATCH);
  cr_assert_eq(out.b, UINT64_MAX);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 4, words, BUCKETS).result,
               CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert_eq(ckf_lane_drain(&lane, &lease, 4).result, CKF_LANE_DRAIN_ACKNOWLEDGED);
  out = ckf_lane_drain(&lane, &lease, 5);
  cr_assert_eq(out.fault, CKF_FAULT_TERMINAL_MISMATCH);
  cr_assert_eq(out.a, 5);
  cr_assert_eq(out.b, 4);
  cr_assert_not(ckf_lane_ready(&lane));
}

Test(ckf_lane, the_largest_sequence_ends_a_lane) {
  ckf_identity identity;
  ckf_lease lease;
  uint64_t words[BUCKETS] = {0};
  const ckf_image image = {0, 1};
  ckf_lane lane = a_lane(&identity, &lease);
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, UINT64_MAX - 1, words, BUCKETS).result,
               CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert_eq(
      ckf_lane_apply_delta(&lane, &identity, &lease, UINT64_MAX - 1, UINT64_MAX, &image, 1).result,
      CKF_LANE_DELTA_APPLIED);
  cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &lease, UINT64_MAX, 0, &image, 1).result,
               CKF_LANE_IGNORED_STALE);
}

/* ---- what the owner of a lane does next, as the comments of ckf.h say it ---- */

static ckf_lane_outcome install(ckf_lane *lane, const ckf_identity *identity,
                                const ckf_lease *lease, uint64_t sequence) {
  static uint64_t words[BUCKETS];
  words[0] = sequence;
  return ckf_lane_install(lane, identity, lease, sequence, words, BUCKETS);
}

/* The same with a snapshot of sequence 7. */
static ckf_lane a_ready_lane(ckf_identity *identity, ckf_lease *lease) {
  ckf_lane lane = a_lane(identity, lease);
  cr_assert_eq(ckf_lane_assign(&lane, identity, lease), CKF_OK);
  cr_assert_eq(install(&lane, identity, lease, 7).result, CKF_LANE_SNAPSHOT_INSTALLED);
  return lane;
}

Test(ckf_lane, a_ready_lane_is_refreshed_by_a_new_assignment) {
  ckf_identity identity;
  ckf_lease lease, old;
  const ckf_image image = {0, 1};
  ckf_lane lane = a_ready_lane(&identity, &lease);
  old = lease;
  lease.assignment_epoch++;
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  cr_assert_eq(ckf_table_ready(&table), 0);
  cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &old, 7, 8, &image, 1).result,
               CKF_LANE_IGNORED_FOREIGN_LEASE, "what the old stream still brings");
  cr_assert_eq(install(&lane, &identity, &lease, 7).result, CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert_eq(ckf_table_ready(&table), 1u << 3);
}

Test(ckf_lane, a_snapshot_for_a_ready_lane_is_taken_at_the_second_time) {
  ckf_identity identity;
  ckf_lease lease;
  ckf_lane lane = a_ready_lane(&identity, &lease);
  cr_assert_eq(install(&lane, &identity, &lease, 7).result, CKF_LANE_IGNORED_STALE);
  const ckf_lane_outcome out = install(&lane, &identity, &lease, 9);
  cr_assert_eq(out.fault, CKF_FAULT_SNAPSHOT_WHILE_READY);
  cr_assert_eq(out.action, CKF_ACTION_DEACTIVATE_AND_SNAPSHOT);
  cr_assert_eq(ckf_table_ready(&table), 0);
  cr_assert_eq(ckf_table_word(&table, 3, 0), 7, "nothing was written");
  cr_assert_eq(install(&lane, &identity, &lease, 9).result, CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert_eq(ckf_table_word(&table, 3, 0), 9);
}

Test(ckf_lane, after_a_lost_delta_any_snapshot_under_the_same_lease_goes_on) {
  ckf_identity identity;
  ckf_lease lease;
  const ckf_image image = {0, 1};
  ckf_lane lane = a_ready_lane(&identity, &lease);
  ckf_lane_outcome out = ckf_lane_apply_delta(&lane, &identity, &lease, 8, 9, &image, 1);
  cr_assert_eq(out.fault, CKF_FAULT_BASE_MISMATCH);
  cr_assert_eq(out.action, CKF_ACTION_DEACTIVATE_AND_SNAPSHOT);
  cr_assert_eq(ckf_lane_installed(&lane), 7);
  out = ckf_lane_apply_delta(&lane, &identity, &lease, 9, 10, &image, 1);
  cr_assert_eq(out.result, CKF_LANE_AWAITING_SNAPSHOT);
  cr_assert_eq(install(&lane, &identity, &lease, 6).result, CKF_LANE_SNAPSHOT_INSTALLED, "older");
  cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &lease, 6, 7, &image, 1).result,
               CKF_LANE_DELTA_APPLIED);
  out = ckf_lane_apply_delta(&lane, &identity, &lease, 10, 11, &image, 1);
  cr_assert_eq(out.fault, CKF_FAULT_BASE_MISMATCH, "8 .. 10 were dropped");
}

Test(ckf_lane, another_identity_needs_another_assignment) {
  ckf_identity identity, next;
  ckf_lease lease;
  const ckf_image image = {0, 1};
  ckf_lane lane = a_lane(&identity, &lease);
  next = identity;
  next.producer_incarnation++;
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  ckf_lane_outcome out = install(&lane, &next, &lease, 1);
  cr_assert_eq(out.fault, CKF_FAULT_WRONG_IDENTITY);
  cr_assert_eq(out.action, CKF_ACTION_RETRY_SNAPSHOT, "there was nothing to lose");
  cr_assert_eq(ckf_lane_apply_delta(&lane, &next, &lease, 1, 2, &image, 1).fault,
               CKF_FAULT_WRONG_IDENTITY, "before it is ready as well");
  cr_assert_eq(install(&lane, &identity, &lease, 1).result, CKF_LANE_SNAPSHOT_INSTALLED);
  out = install(&lane, &next, &lease, 1);
  cr_assert_eq(out.action, CKF_ACTION_DEACTIVATE_AND_SNAPSHOT);
  cr_assert_eq(install(&lane, &next, &lease, 1).fault, CKF_FAULT_WRONG_IDENTITY);
  lease.assignment_epoch++;
  cr_assert_eq(ckf_lane_assign(&lane, &next, &lease), CKF_OK);
  cr_assert_eq(install(&lane, &next, &lease, 1).result, CKF_LANE_SNAPSHOT_INSTALLED);
}

Test(ckf_lane, the_writer_of_a_withdrawn_lane_learns_of_it_by_a_fault_or_an_assignment) {
  ckf_identity identity;
  ckf_lease lease;
  const ckf_image image = {0, 1};
  ckf_lane lane = a_ready_lane(&identity, &lease);
  for (uint64_t turn = 0; turn < 3; turn++) {
    const uint64_t at = turn ? 9 : 7;
    ckf_table_withdraw(&table, 1u << 3);
    cr_assert(ckf_lane_ready(&lane));
    cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &lease, at, at + 1, &image, 1).result,
                 CKF_LANE_DELTA_APPLIED);
    cr_assert_eq(ckf_table_word(&table, 3, 0), 1);
    cr_assert_eq(install(&lane, &identity, &lease, at + 1).result, CKF_LANE_IGNORED_STALE);
    cr_assert_eq(ckf_table_ready(&table), 0, "neither brings the readers back");
    if (turn == 0) {
      cr_assert_eq(install(&lane, &identity, &lease, 9).fault, CKF_FAULT_SNAPSHOT_WHILE_READY);
    } else if (turn == 1) {
      cr_assert_eq(ckf_lane_drain(&lane, &lease, 99).fault, CKF_FAULT_TERMINAL_MISMATCH);
    } else {
      lease.assignment_epoch++;
      cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
    }
    cr_assert_not(ckf_lane_ready(&lane));
    cr_assert_eq(ckf_table_ready(&table), 0);
    cr_assert_eq(install(&lane, &identity, &lease, 9).result, CKF_LANE_SNAPSHOT_INSTALLED,
                 "after a fault under the same lease");
    cr_assert(ckf_lane_ready(&lane));
    cr_assert_eq(ckf_table_ready(&table), 1u << 3);
  }
}

Test(ckf_cbi1, a_frame_of_another_data_centre_is_decoded) {
  const ckf_image image = {3, 4};
  ckf_cbi1_frame view;
  const ptrdiff_t len = ckf_cbi1_delta_encode(&format, 77, 1, 2, &image, 1, frame, sizeof frame);
  cr_assert_gt(len, 0);
  cr_assert_eq(ckf_cbi1_decode(&format, frame, (size_t)len, &view), CKF_OK);
  cr_assert_eq(view.dc_id, 77, "for the caller to compare");
}

/* ---- names ---- */

Test(ckf_lane, results_faults_and_actions_have_the_protocols_names) {
  static const char *const results[] = {
      "IgnoredForeignLease", "IgnoredStaleOrDuplicate", "AwaitingSnapshot", "SnapshotInstalled",
      "DeltaApplied",        "DrainAcknowledged",       "LaneDeactivated",  "Unknown"};
  static const char *const faults[] = {"",
                                       "WrongIdentity",
                                       "InvalidSnapshotBucketCount",
                                       "SnapshotWhileReady",
                                       "BaseSequenceMismatch",
                                       "SequenceExhausted",
                                       "NonContiguousSequence",
                                       "EmptyDelta",
                                       "InvalidImageIndex",
                                       "DuplicateImageIndex",
                                       "TerminalSequenceMismatch",
                                       "Unknown"};
  static const char *const actions[] = {"",
                                        "ContinueCapacityOmission",
                                        "ReportResourceFailure",
                                        "RejectSource",
                                        "FenceAndRebuildProducer",
                                        "DeactivateAndSnapshot",
                                        "RetrySnapshot",
                                        "Unknown"};
  static const char *const fences[] = {"", "SequenceExhausted", "DeliveryUncertain", "LeaseStalled",
                                       "Unknown"};
  for (int i = 0; i < 8; i++) {
    cr_assert_str_eq(ckf_lane_result_name((enum ckf_lane_result)i), results[i]);
    cr_assert_str_eq(ckf_lane_action_name((enum ckf_lane_action)i), actions[i]);
  }
  for (int i = 0; i < 12; i++)
    cr_assert_str_eq(ckf_lane_fault_name((enum ckf_lane_fault)i), faults[i]);
  for (int i = 0; i < 5; i++)
    cr_assert_str_eq(ckf_fence_name((enum ckf_fence)i), fences[i]);
}
