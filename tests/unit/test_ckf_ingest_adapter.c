/* SPDX-License-Identifier: Apache-2.0 */

/* A producer and a lane in one process: what is published arrives, and every way of losing the lane
 * ends in a recovery that brings it back whole. */

#include "test_ckf_ingest.h"

enum { LANE = 3, POOLS = 2 };

static const ckf_member engine = {7, 0};

/* A producer per lane, all of one format. */
typedef struct side {
  ckf_producer producer;
  ckf_ingest_adapter adapter;
  uint32_t lane;
  void *mem;
} side;

static ckf_producer_config a_producer(uint64_t expected, uint64_t cadence) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected;
  cfg.filter.publish_every_n_events = cadence;
  return cfg;
}

static void producer_setup(side *s, const ckf_producer_config *cfg, uint32_t lane) {
  const size_t len = ckf_producer_mem_size(cfg);
  memset(s, 0, sizeof *s);
  s->lane = lane;
  s->mem = malloc(len);
  cr_assert_eq(ckf_producer_init(&s->producer, cfg, s->mem, len), CKF_OK);
}

static int start(fixture *f, side *s, uint64_t epoch) {
  f->leases[s->lane].assignment_epoch = epoch;
  return ckf_ingest_adapter_start(&s->adapter, &f->in, &s->producer, &f->identities[s->lane],
                                  &f->leases[s->lane], f->now);
}

static int poll(fixture *f, side *s) { return ckf_ingest_adapter_poll(&s->adapter, f->now); }

/* What was started is not done before the worker was there. */
static int settle(fixture *f, side *s) {
  cr_assert_eq(poll(f, s), 0);
  work(f, s->lane);
  return poll(f, s);
}

static int store(fixture *f, side *s, uint64_t external, uint64_t local, ckf_outcome *out) {
  const ckf_block block = {external, local};
  ckf_ingest_event e;
  memset(&e, 0, sizeof e);
  e.member = engine;
  e.blocks = &block;
  e.n = 1;
  return ckf_ingest_adapter_apply(&s->adapter, &e, out, f->now);
}

static int removal(fixture *f, side *s, uint64_t external, ckf_outcome *out) {
  ckf_ingest_event e;
  memset(&e, 0, sizeof e);
  e.kind = CKF_INGEST_REMOVED;
  e.member = engine;
  e.externals = &external;
  e.n = 1;
  return ckf_ingest_adapter_apply(&s->adapter, &e, out, f->now);
}

static int drain(fixture *f, side *s) {
  const int rc = ckf_ingest_adapter_drain(&s->adapter, f->now);
  ckf_outcome out;
  if (rc != CKF_OK)
    return rc;
  cr_assert_eq(store(f, s, 999, 999, &out), CKF_INGEST_ERR_ADMISSION_CLOSED, "while it drains");
  return settle(f, s);
}

/* Depth of a prompt of one block, -1 when the lane is not ready. */
static int depth(fixture *f, uint32_t lane, uint64_t local) {
  ckf_query q;
  ckf_matches m;
  uint64_t key;
  ckf_query_init(&q, &local, 1, &key, 0);
  if (ckf_table_find(&f->table, &q, &m) != CKF_OK || !(m.lanes >> lane & 1))
    return -1;
  return (int)m.depths[lane];
}

static void same_words(fixture *f, side *s) {
  const uint64_t n = ckf_producer_format(&s->producer)->bucket_count;
  for (uint32_t b = 0; b < n; b++)
    cr_assert_eq(ckf_table_word(&f->table, s->lane, b), ckf_producer_words(&s->producer)[b]);
}

/* One lane and its producer, open at epoch 1. */
static void open_side(fixture *f, side *s, uint64_t expected, uint64_t cadence, uint64_t epoch) {
  const ckf_ingest_config in = ckf_ingest_config_default();
  const ckf_producer_config cfg = a_producer(expected, cadence);
  producer_setup(s, &cfg, LANE);
  setup(f, 1u << LANE, ckf_producer_format(&s->producer)->bucket_count, &in);
  cr_assert_eq(start(f, s, epoch), CKF_OK);
  cr_assert_eq(settle(f, s), 1);
  cr_assert_eq(ckf_table_ready(&f->table), 1u << LANE);
}

static void close_side(fixture *f, side *s) {
  cr_assert_eq(ckf_producer_check_(&s->producer), CKF_OK);
  teardown(f);
  free(s->mem);
}

/* ---- A1 ---- */

Test(ckf_ingest_adapter, what_is_published_is_there_and_the_drain_proves_it) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 1, 1);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), 0);
  cr_assert_eq(depth(&f, LANE, 1), 0);
  cr_assert_eq(store(&f, &s, 1, 1, &out), 1);
  cr_assert_eq(out.mapped, 1);
  cr_assert_eq(store(&f, &s, 1, 1, &out), 0, "a repeat changes no word");
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), 1);
  cr_assert_eq(drain(&f, &s), 1);
  cr_assert_eq(ckf_ingest_adapter_outcome(&s.adapter)->a, 1);
  cr_assert_eq(depth(&f, LANE, 1), 1);
  same_words(&f, &s);
  cr_assert_eq(removal(&f, &s, 1, &out), 1);
  cr_assert_eq(drain(&f, &s), 1);
  cr_assert_eq(depth(&f, LANE, 1), 0);
  ckf_ingest_event clear;
  memset(&clear, 0, sizeof clear);
  clear.kind = CKF_INGEST_CLEARED;
  clear.member = engine;
  cr_assert_eq(store(&f, &s, 2, 2, &out), 1);
  cr_assert_eq(ckf_ingest_adapter_apply(&s.adapter, &clear, &out, f.now), 1);
  cr_assert_eq(out.unmapped, 1);
  cr_assert_eq(drain(&f, &s), 1);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), 4);
  same_words(&f, &s);
  no_report(&f);
  close_side(&f, &s);
}

Test(ckf_ingest_adapter, a_refused_delivery_fences_until_a_recovery) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 1, 1);
  ckf_ingest_retire(&f.in, LANE);
  cr_assert_eq(store(&f, &s, 1, 1, &out), CKF_ERR_ENQUEUE);
  cr_assert_eq(out.error, CKF_OK, "the event itself counts");
  cr_assert_eq(ckf_ingest_adapter_refusal(&s.adapter), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(ckf_ingest_adapter_fence(&s.adapter), CKF_FENCE_DELIVERY_UNCERTAIN);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), 0);
  cr_assert_eq(store(&f, &s, 2, 2, &out), CKF_ERR_FENCED);
  cr_assert_eq(ckf_ingest_adapter_drain(&s.adapter, f.now), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(store(&f, &s, 3, 3, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_flush(&s.adapter, f.now), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_drain(&s.adapter, f.now), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(poll(&f, &s), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_OK);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_INGEST_ERR_UNDER_WAY);
  cr_assert_eq(store(&f, &s, 3, 3, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(settle(&f, &s), 1);
  cr_assert_eq(view_of(&f, LANE).assignment_epoch, 2);
  cr_assert_eq(ckf_ingest_adapter_outcome(&s.adapter)->a, 0, "sequence of the snapshot");
  cr_assert_eq(ckf_ingest_adapter_fence(&s.adapter), CKF_FENCE_NONE);
  cr_assert_eq(depth(&f, LANE, 1), 1);
  cr_assert_eq(depth(&f, LANE, 2), 1);
  cr_assert_eq(store(&f, &s, 3, 3, &out), 1);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), 1);
  cr_assert_eq(drain(&f, &s), 1);
  same_words(&f, &s);
  close_side(&f, &s);
}

/* ---- A2 ---- */

Test(ckf_ingest_adapter, after_the_largest_epoch_there_is_no_recovery) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 1, UINT64_MAX);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_INGEST_ERR_ASSIGNMENT_EPOCH);
  cr_assert_str_eq(ckf_ingest_errname(CKF_INGEST_ERR_ASSIGNMENT_EPOCH), "AssignmentEpochExhausted");
  cr_assert_eq(store(&f, &s, 1, 1, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_str_eq(ckf_ingest_errname(CKF_INGEST_ERR_ADMISSION_CLOSED), "AdmissionClosed");
  cr_assert_eq(ckf_producer_pending(&s.producer), 0, "the event was not applied");
  cr_assert_eq(ckf_ingest_adapter_flush(&s.adapter, f.now), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_INGEST_ERR_ASSIGNMENT_EPOCH);
  close_side(&f, &s);
}

static bool lose(void *user, const ckf_delta_out *delta) {
  (void)user;
  (void)delta;
  return true;
}

Test(ckf_ingest_adapter, the_drain_catches_a_last_delta_that_was_lost) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 1, 1);
  const ckf_sink_fn sink = s.adapter.publisher_.sink_;
  s.adapter.publisher_.sink_ = lose;
  cr_assert_eq(store(&f, &s, 1, 1, &out), 1);
  s.adapter.publisher_.sink_ = sink;
  cr_assert_eq(drain(&f, &s), CKF_INGEST_ERR_LANE_FAULT);
  const ckf_lane_outcome *o = ckf_ingest_adapter_outcome(&s.adapter);
  cr_assert_eq(o->fault, CKF_FAULT_TERMINAL_MISMATCH);
  cr_assert(o->a == 1 && o->b == 0);
  cr_assert_eq(depth(&f, LANE, 1), -1);
  cr_assert_eq(the_report(&f).outcome.fault, CKF_FAULT_TERMINAL_MISMATCH);
  cr_assert_eq(store(&f, &s, 2, 2, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_OK);
  cr_assert_eq(settle(&f, &s), 1);
  cr_assert_eq(ckf_ingest_adapter_outcome(&s.adapter)->a, 1);
  cr_assert_eq(depth(&f, LANE, 1), 1);
  close_side(&f, &s);
}

Test(ckf_ingest_adapter, a_failed_recovery_leaves_admission_closed_and_can_be_tried_again) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 16, 1);
  cr_assert_eq(store(&f, &s, 1, 1, &out), 0);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_OK);
  ckf_ingest_retire(&f.in, LANE); /* somebody else gives up on it meanwhile */
  cr_assert_eq(poll(&f, &s), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(store(&f, &s, 2, 2, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_OK);
  f.now += UINT64_C(10000) * MS;
  cr_assert_eq(poll(&f, &s), CKF_INGEST_ERR_CONTROL_TIMEOUT);
  cr_assert_eq(store(&f, &s, 2, 2, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_OK);
  cr_assert_eq(settle(&f, &s), 1);
  cr_assert_eq(view_of(&f, LANE).assignment_epoch, 4);
  cr_assert_eq(depth(&f, LANE, 1), 1, "the pending tail is in the snapshot");
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), 0, "and was sent to nobody");
  close_side(&f, &s);
}

/* ---- A3 ---- */

Test(ckf_ingest_adapter, an_omission_is_no_fault) {
  const ckf_ingest_config in = ckf_ingest_config_default();
  ckf_producer_config cfg = a_producer(1, 1);
  uint64_t omitted = 0;
  ckf_outcome out;
  fixture f;
  side s;
  cfg.filter.max_kicks = 1;
  producer_setup(&s, &cfg, LANE);
  setup(&f, 1u << LANE, ckf_producer_format(&s.producer)->bucket_count, &in);
  cr_assert_eq(start(&f, &s, 1), CKF_OK);
  cr_assert_eq(settle(&f, &s), 1);
  for (uint64_t i = 1; i <= 32; i++) {
    cr_assert_geq(store(&f, &s, i, i, &out), 0);
    if (out.error == CKF_ERR_CAPACITY_EXHAUSTED) {
      cr_assert_eq(out.omitted, 1);
      omitted = omitted ? omitted : i;
    } else
      cr_assert_eq(out.error, CKF_OK);
    work(&f, LANE); /* two buckets: no more images may wait */
  }
  cr_assert_gt(omitted, 0);
  cr_assert_eq(drain(&f, &s), 1);
  cr_assert_eq(ckf_table_ready(&f.table), 1u << LANE);
  same_words(&f, &s);
  cr_assert_eq(removal(&f, &s, omitted, &out), 0);
  cr_assert(out.error == CKF_OK && out.unknown == 0 && out.unmapped == 1);
  for (uint64_t i = 1; i <= 32; i++)
    if (i != omitted) {
      cr_assert_geq(removal(&f, &s, i, &out), 0);
      work(&f, LANE);
    }
  cr_assert_eq(store(&f, &s, omitted, omitted, &out), 1);
  cr_assert_eq(out.error, CKF_OK);
  cr_assert_eq(drain(&f, &s), 1);
  cr_assert_eq(depth(&f, LANE, omitted), 1);
  same_words(&f, &s);
  no_report(&f);
  close_side(&f, &s);
}

Test(ckf_ingest_adapter, a_damaged_producer_publishes_nothing_more) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 1, 1);
  cr_assert_eq(store(&f, &s, 1, 1, &out), 1);
  work(&f, LANE);
  const uint64_t published = ckf_ingest_adapter_sequence(&s.adapter);
  uint64_t *const words = (uint64_t *)(uintptr_t)ckf_producer_words(&s.producer);
  const size_t len = (size_t)ckf_producer_format(&s.producer)->bucket_count * 8;
  uint64_t *const intact = malloc(len);
  memcpy(intact, words, len);
  memset(words, 0, len);
  cr_assert_eq(removal(&f, &s, 1, &out), CKF_ERR_INVARIANT);
  cr_assert_eq(ckf_failure_of(out.error), CKF_FAILURE_PREWRITE_INVARIANT);
  cr_assert_eq(store(&f, &s, 2, 2, &out), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s.adapter), published);
  cr_assert_eq(depth(&f, LANE, 1), 1, "the lane has not changed");
  memcpy(words, intact, len);
  free(intact);
  close_side(&f, &s);
}

/* ---- A4 ---- */

Test(ckf_ingest_adapter, a_failed_worker_leaves_the_producer_whole) {
  ckf_outcome out;
  fixture f;
  side s;
  open_side(&f, &s, 100, 1, 1);
  cr_assert_eq(store(&f, &s, 1, 1, &out), 1);
  ckf_ingest_worker_failed(&f.in, view_of(&f, LANE).worker);
  cr_assert_eq(store(&f, &s, 2, 2, &out), CKF_ERR_ENQUEUE);
  cr_assert_eq(out.error, CKF_OK);
  cr_assert_eq(ckf_ingest_adapter_refusal(&s.adapter), CKF_INGEST_ERR_WORKER_FAILED);
  cr_assert_eq(ckf_ingest_adapter_recover(&s.adapter, f.now), CKF_INGEST_ERR_WORKER_FAILED);
  cr_assert(ckf_producer_contains(&s.producer, 1) && ckf_producer_contains(&s.producer, 2));

  /* another consumer goes on from the same producer */
  const ckf_ingest_config in = ckf_ingest_config_default();
  fixture other;
  setup(&other, 1u << LANE, ckf_producer_format(&s.producer)->bucket_count, &in);
  cr_assert_eq(start(&other, &s, 1), CKF_OK);
  cr_assert_eq(settle(&other, &s), 1);
  cr_assert_eq(depth(&other, LANE, 2), 1);
  teardown(&other);
  close_side(&f, &s);
}

/* ---- H7 and the rest ---- */

Test(ckf_ingest_adapter, two_producers_fill_two_lanes_of_one_table) {
  const ckf_ingest_config in = ckf_ingest_config_default();
  const ckf_producer_config cfg = a_producer(100, 16);
  ckf_outcome out;
  side s[POOLS];
  fixture f;
  for (uint32_t i = 0; i < POOLS; i++)
    producer_setup(&s[i], &cfg, i);
  setup(&f, 3, ckf_producer_format(&s[0].producer)->bucket_count, &in);
  for (uint32_t i = 0; i < POOLS; i++) {
    cr_assert_eq(start(&f, &s[i], 1), CKF_OK);
    cr_assert_eq(settle(&f, &s[i]), 1);
    cr_assert_eq(store(&f, &s[i], 1, 10 + i, &out), 0, "the cadence is not reached");
  }
  for (uint32_t i = 0; i < POOLS; i++) {
    cr_assert_eq(drain(&f, &s[i]), 1);
    cr_assert_eq(ckf_ingest_adapter_outcome(&s[i].adapter)->a, 1);
  }
  for (uint32_t i = 0; i < POOLS; i++) {
    cr_assert_eq(depth(&f, i, 10 + i), 1);
    cr_assert_eq(depth(&f, i, 11 - i), 0);
  }
  cr_assert_eq(removal(&f, &s[0], 1, &out), 0);
  cr_assert_eq(drain(&f, &s[0]), 1);
  cr_assert_eq(drain(&f, &s[1]), 1);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s[0].adapter), 2);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s[1].adapter), 1);
  cr_assert_eq(depth(&f, 0, 10), 0);
  cr_assert_eq(depth(&f, 1, 11), 1);
  for (uint64_t i = 0; i < 16; i++) /* the 16th publishes */
    cr_assert_eq(store(&f, &s[1], 50 + i, 50 + i, &out), i == 15);
  cr_assert_eq(ckf_ingest_adapter_sequence(&s[1].adapter), 2);
  teardown(&f);
  free(s[0].mem);
  free(s[1].mem);
}

Test(ckf_ingest_adapter, a_start_is_refused_before_anything_is_touched) {
  const ckf_ingest_config in = ckf_ingest_config_default();
  const ckf_producer_config cfg = a_producer(100, 1);
  fixture f;
  side s;
  producer_setup(&s, &cfg, LANE);
  const uint64_t buckets = ckf_producer_format(&s.producer)->bucket_count;
  setup(&f, 1u << LANE, buckets * 2, &in);
  cr_assert_eq(start(&f, &s, 1), CKF_INGEST_ERR_PRODUCER_FORMAT);
  cr_assert_str_eq(ckf_ingest_errname(CKF_INGEST_ERR_PRODUCER_FORMAT), "ProducerFormatMismatch");
  f.identities[LANE].format.bucket_count = buckets;
  f.identities[LANE].format.seed++;
  cr_assert_eq(start(&f, &s, 1), CKF_INGEST_ERR_PRODUCER_FORMAT);
  f.identities[LANE].format.seed--;
  cr_assert_eq(start(&f, &s, 1), CKF_ERR_WRONG_FORMAT, "the consumer has another one");
  cr_assert_eq(poll(&f, &s), CKF_INGEST_ERR_ADMISSION_CLOSED);
  cr_assert_eq(view_of(&f, LANE).state, CKF_INGEST_UNASSIGNED);
  cr_assert_eq(ckf_ingest_adapter_start_abi(&s.adapter, 1, &f.in, &s.producer, &f.identities[LANE],
                                            &f.leases[LANE], f.now),
               CKF_ERR_ABI);
  close_side(&f, &s);
}
