/* SPDX-License-Identifier: Apache-2.0 */

/* Queues in front of lanes, on one thread: what is admitted, what takes effect, who is retired. */

#include "test_ckf_ingest.h"

/* ---- building ---- */

Test(ckf_ingest, every_failure_has_its_kind) {
  static const struct {
    int err;
    enum ckf_failure failure;
  } kinds[] = {
      {CKF_INGEST_ERR_SATURATED, CKF_FAILURE_CONSUMER_BEFORE_WRITE},
      {CKF_INGEST_ERR_IMAGE_LIMIT, CKF_FAILURE_CONSUMER_BEFORE_WRITE},
      {CKF_INGEST_ERR_LANE_FAULT, CKF_FAILURE_CONSUMER_BEFORE_WRITE},
      {CKF_INGEST_ERR_WORKER_FAILED, CKF_FAILURE_CONSUMER_WORKER_MID_APPLY},
      {CKF_INGEST_ERR_AGE_EXCEEDED, CKF_FAILURE_CONSUMER_WORKER_MID_APPLY},
      {CKF_INGEST_ERR_CONTROL_TIMEOUT, CKF_FAILURE_CONSUMER_WORKER_MID_APPLY},
      {CKF_INGEST_ERR_LANE_RETIRED, CKF_FAILURE_NONE},
      {CKF_INGEST_ERR_LANE_UNASSIGNED, CKF_FAILURE_NONE},
      {CKF_ERR_PARENT_NOT_FOUND, CKF_FAILURE_SOURCE_PROTOCOL},
      {CKF_OK, CKF_FAILURE_NONE},
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
    cr_assert_eq(ckf_ingest_failure_of(kinds[i].err), kinds[i].failure, "%s",
                 ckf_ingest_errname(kinds[i].err));
}

Test(ckf_ingest, configuration_is_checked_in_order) {
  const ckf_manifest m = a_manifest(1, BUCKETS);
  ckf_ingest_config cfg = ckf_ingest_config_default(), bad;
  static uint64_t room[BUCKETS * 4], mem[20000];
  ckf_table table;
  ckf_ingest in;
  cr_assert_eq(cfg.workers, 4);
  cr_assert_eq(cfg.queue_cap, 256);
  cr_assert_eq(cfg.control_timeout_ns, UINT64_C(10) * 1000 * MS);
  cr_assert_eq(cfg.max_age_ns, 10 * MS);
  cr_assert_eq(ckf_table_init(&table, &m, 2, room, sizeof room), CKF_OK);
  cfg.max_images = 1;
  cfg.queue_cap = 8;
  bad = cfg;
  bad.hooks.lock = (void (*)(void *, uint32_t))abort;
  static const int order[] = {CKF_ERR_ARG,
                              CKF_INGEST_ERR_AGE_ZERO,
                              CKF_INGEST_ERR_IMAGE_BOUND,
                              CKF_INGEST_ERR_CONTROL_TIMEOUT_ZERO,
                              CKF_INGEST_ERR_QUEUE_CAPACITY,
                              CKF_INGEST_ERR_WORKER_COUNT};
  for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
    if (i == 1)
      bad.max_age_ns = 0;
    if (i == 2)
      bad.max_images = 0;
    if (i == 3)
      bad.control_timeout_ns = 0;
    if (i == 4)
      bad.queue_cap = 0;
    if (i == 5)
      bad.workers = 0;
    cr_assert_eq(ckf_ingest_init(&in, &bad, &table, mem, sizeof mem), order[i], "case %zu", i);
    cr_assert_eq(ckf_ingest_mem_size(&bad, &table), 0);
  }
  bad = cfg;
  bad.workers = CKF_INGEST_MAX_WORKERS + 1;
  cr_assert_eq(ckf_ingest_init(&in, &bad, &table, mem, sizeof mem), CKF_INGEST_ERR_WORKER_COUNT);
  bad = cfg;
  bad.queue_cap = CKF_INGEST_MAX_QUEUE + 1;
  cr_assert_eq(ckf_ingest_init(&in, &bad, &table, mem, sizeof mem), CKF_INGEST_ERR_QUEUE_CAPACITY);
  bad = cfg;
  bad.max_images = CKF_INGEST_MAX_IMAGES + 1;
  cr_assert_eq(ckf_ingest_init(&in, &bad, &table, mem, sizeof mem), CKF_INGEST_ERR_IMAGE_BOUND);
  cr_assert_eq(ckf_ingest_init_abi(&in, 1, &cfg, &table, mem, sizeof mem), CKF_ERR_ABI);
  cr_assert_str_eq(ckf_ingest_errname(CKF_INGEST_ERR_IMAGE_BOUND), "InvalidOutstandingImageBound");
  cr_assert_str_eq(ckf_ingest_errname(CKF_ERR_STALE_EPOCH), "StaleAssignmentEpoch");
  cr_assert_str_eq(ckf_ingest_strerror(CKF_ERR_ARG), ckf_strerror(CKF_ERR_ARG));
}

Test(ckf_ingest, memory_is_exact_and_a_failed_start_claims_nothing) {
  const ckf_manifest m = a_manifest(0x15, BUCKETS);
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_table table;
  ckf_ingest in;
  ckf_lane lane;
  void *const room = malloc(ckf_table_mem_size(&m));
  cr_assert_eq(ckf_table_init(&table, &m, 2, room, ckf_table_mem_size(&m)), CKF_OK);
  cfg.queue_cap = 3;
  const size_t len = ckf_ingest_mem_size(&cfg, &table);
  cfg.max_images = BUCKETS; /* the default, spelled out */
  cr_assert_eq(ckf_ingest_mem_size(&cfg, &table), len);
  cfg.max_images = BUCKETS + 1;
  cr_assert_eq(ckf_ingest_mem_size(&cfg, &table), len + 3 * 2 * sizeof(ckf_image));
  cfg.max_images = CKF_INGEST_MAX_IMAGES;
  cr_assert_eq(ckf_ingest_init(&in, &cfg, &table, room, len),
               sizeof(size_t) > 4 ? CKF_ERR_NOSPACE : CKF_ERR_CAPACITY_OVERFLOW);
  cfg.max_images = CKF_INGEST_IMAGES_OF_FORMAT;
  for (size_t odd = 0; odd < 9; odd++) { /* the sanitizer watches the end */
    uint8_t *const mem = malloc(len + odd);
    cr_assert_eq(ckf_ingest_init(&in, &cfg, &table, mem + odd, len - 1), CKF_ERR_NOSPACE);
    cr_assert_eq(ckf_ingest_init(&in, &cfg, &table, NULL, len), CKF_ERR_NOSPACE);
    cr_assert_eq(ckf_ingest_init(&in, &cfg, &table, mem + odd, len), CKF_OK);
    cr_assert_eq(ckf_lane_claim(&lane, &table, 2), CKF_ERR_LANE_CLAIMED);
    ckf_ingest_release(&in);
    cr_assert_eq(ckf_lane_claim(&lane, &table, 4), CKF_OK);
    cr_assert_eq(ckf_ingest_init(&in, &cfg, &table, mem + odd, len), CKF_ERR_LANE_CLAIMED);
    ckf_lane_release(&lane);
    free(mem);
  }
  cr_assert_eq(ckf_lane_claim(&lane, &table, 0), CKF_OK, "claims of a failed start are given back");
  free(room);
}

Test(ckf_ingest, a_lane_keeps_its_worker) {
  static const uint32_t of_17[CKF_LANES] = {2, 3, 1, 2, 1, 2, 1, 1, 1, 0, 1, 2, 2, 3, 2, 1};
  ckf_ingest_config cfg = ckf_ingest_config_default();
  fixture f;
  setup(&f, 0xFFFF, BUCKETS, &cfg);
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    cr_assert_eq(ckf_ingest_worker_of(17, i, 4), of_17[i], "lane %u", i);
    cr_assert_eq(ckf_ingest_lane_worker(&f.in, i), of_17[i]);
    activate(&f, i, 1, i);
    cr_assert_eq(view_of(&f, i).worker, of_17[i]);
  }
  cr_assert_eq(ckf_table_ready(&f.table), 0xFFFF);
  teardown(&f);
}

/* ---- I1, I2: order, faults, refusals ---- */

Test(ckf_ingest, a_drain_sees_the_deltas_before_it) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket t;
  fixture f;
  setup(&f, 1, BUCKETS, &cfg);
  activate(&f, 0, 7, 3);
  cr_assert_eq(submit(&f, 0, 7, 5, 50), CKF_OK);
  cr_assert_eq(submit_drain(&f, 0, 8, &t), CKF_OK);
  cr_assert_eq(submit(&f, 0, 8, 6, 60), CKF_OK);
  cr_assert_eq(view_of(&f, 0).outstanding_deltas, 2);
  cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 2), 2);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.outcome.result, CKF_LANE_DRAIN_ACKNOWLEDGED);
  cr_assert_eq(t.outcome.a, 8);
  cr_assert_eq(ckf_table_word(&f.table, 0, 5), 50);
  cr_assert_eq(ckf_table_word(&f.table, 0, 6), 3, "behind the drain");
  work(&f, 0);
  cr_assert_eq(ckf_table_word(&f.table, 0, 6), 60);
  const ckf_ingest_lane_view v = view_of(&f, 0);
  cr_assert(v.outstanding_deltas == 0 && v.outstanding_images == 0);
  cr_assert(v.deltas == 2 && v.applied_deltas == 2 && v.applied_images == 2);
  no_report(&f);
  teardown(&f);
}

Test(ckf_ingest, a_gap_hits_its_lane_only) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket t;
  fixture f;
  cfg.workers = 1; /* the lanes share a queue */
  setup(&f, 3, BUCKETS, &cfg);
  activate(&f, 0, 4, 1);
  activate(&f, 1, 4, 2);
  cr_assert_eq(submit(&f, 0, 5, 0, 9), CKF_OK, "the queue does not look into it");
  cr_assert_eq(submit(&f, 1, 4, 0, 8), CKF_OK);
  cr_assert_eq(submit_drain(&f, 0, 6, &t), CKF_OK);
  work(&f, 0);
  cr_assert_eq(ckf_table_ready(&f.table), 2);
  cr_assert_eq(ckf_table_word(&f.table, 0, 0), 1);
  cr_assert_eq(ckf_table_word(&f.table, 1, 0), 8);
  const ckf_ingest_report r = the_report(&f);
  cr_assert_eq(r.error, CKF_INGEST_ERR_LANE_FAULT);
  cr_assert_eq(r.lanes, 1);
  cr_assert_eq(r.assignment_epoch, 1);
  cr_assert_eq(r.outcome.fault, CKF_FAULT_BASE_MISMATCH);
  cr_assert_eq(r.outcome.action, CKF_ACTION_DEACTIVATE_AND_SNAPSHOT);
  cr_assert(r.outcome.a == 4 && r.outcome.b == 5);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.error, CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(submit(&f, 0, 4, 0, 9), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(submit_words(&f, 0, 9, BUCKETS, &t), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(ckf_ingest_assign(&f.in, &f.identities[0], &f.leases[0]), CKF_ERR_STALE_EPOCH);
  activate(&f, 0, 6, 5);
  cr_assert_eq(ckf_table_ready(&f.table), 3);
  teardown(&f);
}

Test(ckf_ingest, refused_assignments_leave_a_ready_lane_alone) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  fixture f;
  setup(&f, 0x5, BUCKETS, &cfg);
  activate(&f, 0, 1, 1);
  ckf_identity identity = f.identities[0];
  ckf_lease lease = f.leases[0];
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_STALE_EPOCH);
  lease.assignment_epoch = 0;
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_STALE_EPOCH);
  lease.assignment_epoch = 9;
  identity.format.seed++;
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_WRONG_FORMAT);
  identity.pool.dc_id++;
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_WRONG_OWNER);
  lease.consumer_instance++;
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_WRONG_CONSUMER);
  lease.physical_lane = 1;
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_UNCONFIGURED_LANE);
  lease.physical_lane = 16;
  cr_assert_eq(ckf_ingest_assign(&f.in, &identity, &lease), CKF_ERR_INVALID_LANE);
  cr_assert(is_ready(&f, 0));
  cr_assert_eq(view_of(&f, 0).state, CKF_INGEST_ACTIVE);
  cr_assert_eq(submit(&f, 0, 1, 0, 7), CKF_OK);
  work(&f, 0);
  cr_assert_eq(ckf_table_word(&f.table, 0, 0), 7);
  no_report(&f);
  /* a good one is felt at once, before the worker hears of it */
  cr_assert_eq(assign_next(&f, 0), CKF_OK);
  cr_assert_not(is_ready(&f, 0));
  cr_assert_eq(submit(&f, 0, 2, 0, 7), CKF_INGEST_ERR_AWAITING_SNAPSHOT);
  teardown(&f);
}

Test(ckf_ingest, a_late_snapshot_is_ignored_and_a_malformed_one_can_be_retried) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket t, good;
  fixture f;
  setup(&f, 1, BUCKETS, &cfg);
  cr_assert_eq(submit_words(&f, 0, 1, BUCKETS, &t), CKF_INGEST_ERR_LANE_UNASSIGNED);
  cr_assert_eq(submit(&f, 0, 1, 0, 1), CKF_INGEST_ERR_LANE_UNASSIGNED);
  cr_assert_eq(submit_drain(&f, 0, 1, &t), CKF_INGEST_ERR_LANE_UNASSIGNED);
  ckf_ingest_retire(&f.in, 0);
  cr_assert_eq(view_of(&f, 0).state, CKF_INGEST_UNASSIGNED);
  cr_assert_eq(assign_next(&f, 0), CKF_OK);
  cr_assert_eq(submit_words(&f, 0, 7, BUCKETS - 1, &t), CKF_OK);
  work(&f, 0);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.error, CKF_INGEST_ERR_LANE_FAULT);
  cr_assert_eq(t.outcome.fault, CKF_FAULT_SNAPSHOT_BUCKET_COUNT);
  cr_assert_eq(t.outcome.action, CKF_ACTION_RETRY_SNAPSHOT);
  cr_assert_eq(the_report(&f).outcome.action, CKF_ACTION_RETRY_SNAPSHOT);
  cr_assert_eq(view_of(&f, 0).state, CKF_INGEST_AWAITING_SNAPSHOT);
  cr_assert_eq(submit_drain(&f, 0, 7, &t), CKF_INGEST_ERR_AWAITING_SNAPSHOT);
  f.identities[0].producer_incarnation = 2; /* another life's snapshot, on the same lease */
  cr_assert_eq(submit_words(&f, 0, 7, BUCKETS, &t), CKF_OK);
  f.identities[0].producer_incarnation = 1;
  cr_assert_eq(submit_words(&f, 0, 7, BUCKETS, &good), CKF_OK);
  work(&f, 0);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.outcome.fault, CKF_FAULT_WRONG_IDENTITY);
  cr_assert_eq(ckf_ingest_poll(&f.in, &good, f.now), 1);
  cr_assert_eq(good.error, CKF_OK);
  (void)the_report(&f);
  cr_assert_eq(submit(&f, 0, 7, 0, 70), CKF_OK);
  cr_assert_eq(submit_words(&f, 0, 7, BUCKETS - 1, &t), CKF_OK);
  work(&f, 0);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.error, CKF_OK);
  cr_assert_eq(t.outcome.result, CKF_LANE_IGNORED_STALE);
  cr_assert(is_ready(&f, 0));
  no_report(&f);
  cr_assert_eq(submit_words(&f, 0, 9, BUCKETS, &t), CKF_OK); /* in the middle of a life */
  work(&f, 0);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.outcome.fault, CKF_FAULT_SNAPSHOT_WHILE_READY);
  cr_assert_eq(view_of(&f, 0).state, CKF_INGEST_RETIRED);
  cr_assert_eq(ckf_table_word(&f.table, 0, 0), 70);
  teardown(&f);
}

Test(ckf_ingest, a_foreign_lease_is_refused_and_disturbs_nobody) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket t;
  fixture f;
  setup(&f, 1, BUCKETS, &cfg);
  activate(&f, 0, 1, 1);
  const ckf_lease own = f.leases[0];
  for (int part = 0; part < 2; part++) {
    f.leases[0].assignment_epoch += part == 0;
    f.leases[0].consumer_instance += part == 1;
    cr_assert_eq(submit(&f, 0, 1, 0, 7), CKF_INGEST_ERR_LANE_RETIRED);
    cr_assert_eq(submit_words(&f, 0, 1, BUCKETS, &t), CKF_INGEST_ERR_LANE_RETIRED);
    cr_assert_eq(submit_drain(&f, 0, 1, &t), CKF_INGEST_ERR_LANE_RETIRED);
    f.leases[0] = own;
  }
  cr_assert(is_ready(&f, 0));
  cr_assert_eq(submit(&f, 0, 1, 0, 7), CKF_OK);
  work(&f, 0);
  cr_assert_eq(view_of(&f, 0).applied_deltas, 1);
  no_report(&f);
  teardown(&f);
}

/* ---- I3: something happens while the worker is at a command ---- */

/* Locks that check their own use, and do something at the n-th entry. */
typedef struct locks {
  fixture *f;
  uint32_t held[8], wakes[8], entries;
  uint32_t at; /* which entry, 0 = none */
  void (*what)(fixture *f);
} locks;

static void lock_one(void *user, uint32_t number) {
  locks *const l = user;
  if (++l->entries == l->at)
    l->what(l->f);
  cr_assert_eq(l->held[number], 0, "lock %u twice", number);
  for (uint32_t i = 0; i < 8; i++) /* the lock of the reports may come second, no other */
    cr_assert(l->held[i] == 0 || (number == l->f->in.cfg_.workers && i != number));
  l->held[number] = 1;
}

static void unlock_one(void *user, uint32_t number) {
  locks *const l = user;
  cr_assert_eq(l->held[number], 1);
  l->held[number] = 0;
}

static void wake_one(void *user, uint32_t number) {
  locks *const l = user;
  for (uint32_t i = 0; i < 8; i++)
    cr_assert_eq(l->held[i], 0);
  l->wakes[number]++;
}

static ckf_ingest_config with_locks(locks *l, fixture *f) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  memset(l, 0, sizeof *l);
  l->f = f;
  cfg.hooks.lock = lock_one;
  cfg.hooks.unlock = unlock_one;
  cfg.hooks.wake = wake_one;
  cfg.hooks.user = l;
  return cfg;
}

/* The next command of the worker is carried out, and `what` comes between its work and its effect:
 * at the second entry. */
static void interrupt(locks *l, fixture *f, void (*what)(fixture *f)) {
  l->entries = 0;
  l->at = 2;
  l->what = what;
  cr_assert_eq(ckf_ingest_work(&f->in, 2, f->now, 1), 1);
  cr_assert_geq(l->entries, 2);
  l->at = 0;
}

static ckf_ingest_ticket racing;

static void retire_lane(fixture *f) { ckf_ingest_retire(&f->in, 0); }

static void assign_lane(fixture *f) { cr_assert_eq(assign_next(f, 0), CKF_OK); }

static void time_out(fixture *f) {
  f->now += UINT64_C(10000) * MS - 1;
  cr_assert_eq(ckf_ingest_poll(&f->in, &racing, f->now), 0);
  cr_assert_eq(view_of(f, 0).state, CKF_INGEST_AWAITING_SNAPSHOT);
  f->now++;
  cr_assert_eq(ckf_ingest_poll(&f->in, &racing, f->now), 0, "its words are being read");
  cr_assert_eq(view_of(f, 0).state, CKF_INGEST_RETIRED);
}

static void shut(fixture *f) { ckf_ingest_close(&f->in); }

static void age(fixture *f) {
  f->now += 10 * MS;
  ckf_ingest_tick(&f->in, f->now);
}

Test(ckf_ingest, a_snapshot_that_races_with_a_retirement_is_not_activated) {
  static const struct {
    void (*what)(fixture *f);
    enum ckf_ingest_state state;
    int error;
  } cases[] = {{retire_lane, CKF_INGEST_RETIRED, CKF_INGEST_ERR_LANE_RETIRED},
               {assign_lane, CKF_INGEST_AWAITING_SNAPSHOT, CKF_INGEST_ERR_LANE_RETIRED},
               {time_out, CKF_INGEST_RETIRED, CKF_INGEST_ERR_CONTROL_TIMEOUT},
               {shut, CKF_INGEST_RETIRED, CKF_INGEST_ERR_LANE_RETIRED}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    fixture f;
    locks l;
    const ckf_ingest_config cfg = with_locks(&l, &f);
    setup(&f, 1, BUCKETS, &cfg);
    cr_assert_eq(assign_next(&f, 0), CKF_OK);
    cr_assert_eq(submit_words(&f, 0, 3, BUCKETS, &racing), CKF_OK);
    const uint32_t woken = l.wakes[4];
    interrupt(&l, &f, cases[i].what);
    cr_assert_eq(ckf_table_ready(&f.table), 0, "case %zu", i);
    cr_assert_eq(view_of(&f, 0).state, cases[i].state);
    cr_assert_eq(ckf_ingest_poll(&f.in, &racing, f.now), 1);
    cr_assert_eq(racing.error, cases[i].error, "case %zu", i);
    cr_assert_eq(racing.outcome.result, 0);
    cr_assert_gt(l.wakes[4], woken);
    if (cases[i].what != shut) {
      activate(&f, 0, 5, 5);
      cr_assert_gt(l.wakes[2], 0);
    } else
      cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 1), CKF_INGEST_ERR_CLOSED);
    teardown(&f);
  }
}

Test(ckf_ingest, a_delta_that_races_with_a_retirement_faults_nobody) {
  static void (*const cases[])(fixture * f) = {retire_lane, assign_lane, age};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    fixture f;
    locks l;
    const ckf_ingest_config cfg = with_locks(&l, &f);
    setup(&f, 1, BUCKETS, &cfg);
    activate(&f, 0, 3, 3);
    cr_assert_eq(submit(&f, 0, 9, 0, 9), CKF_OK); /* a gap, found while the lane is retired */
    cr_assert_eq(submit(&f, 0, 3, 0, 9), CKF_OK);
    interrupt(&l, &f, cases[i]);
    if (cases[i] == age)
      cr_assert_eq(the_report(&f).error, CKF_INGEST_ERR_AGE_EXCEEDED);
    no_report(&f);
    cr_assert_eq(view_of(&f, 0).outstanding_deltas, 1);
    work(&f, 0);
    no_report(&f);
    cr_assert_eq(ckf_table_word(&f.table, 0, 0), 3, "the second is of an older epoch");
    cr_assert_eq(view_of(&f, 0).outstanding_deltas, 0);
    cr_assert_eq(ckf_ingest_deadline_ns(&f.in), CKF_INGEST_TIME_NONE);
    activate(&f, 0, 5, 5);
    teardown(&f);
  }
}

/* ---- I4: limits ---- */

Test(ckf_ingest, one_image_too_many_retires_the_lane) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  const ckf_image images[3] = {{1, 11}, {2, 12}, {3, 13}};
  fixture f;
  cfg.max_images = 1;
  setup(&f, 1, BUCKETS, &cfg);
  activate(&f, 0, 1, 0);
  cr_assert_eq(submit_images(&f, 0, 1, 2, images, 2), CKF_INGEST_ERR_IMAGE_LIMIT);
  ckf_ingest_report r = the_report(&f);
  cr_assert_eq(r.error, CKF_INGEST_ERR_IMAGE_LIMIT);
  cr_assert(r.outcome.a == 2 && r.outcome.b == 1);
  cr_assert_not(is_ready(&f, 0));
  teardown(&f);
  cfg.max_images = 3;
  setup(&f, 1, BUCKETS, &cfg);
  activate(&f, 0, 1, 0);
  cr_assert_eq(submit_images(&f, 0, 1, 2, images, 1), CKF_OK);
  cr_assert_eq(submit_images(&f, 0, 2, 3, images, 2), CKF_OK); /* full, and goes on */
  work(&f, 0);
  cr_assert_eq(submit_images(&f, 0, 3, 4, images, 3), CKF_OK);
  cr_assert_eq(submit_images(&f, 0, 4, 5, images, 1), CKF_INGEST_ERR_IMAGE_LIMIT);
  r = the_report(&f);
  cr_assert(r.outcome.a == 4 && r.outcome.b == 3);
  cr_assert_eq(submit_images(&f, 0, 4, 5, images, 1), CKF_INGEST_ERR_LANE_RETIRED);
  work(&f, 0);
  cr_assert_eq(ckf_table_word(&f.table, 0, 3), 0, "queued before the retirement, without effect");
  cr_assert_eq(view_of(&f, 0).outstanding_images, 0);
  teardown(&f);
}

Test(ckf_ingest, a_full_queue_retires_the_lane_that_overflows_it) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket t, s;
  fixture f;
  cfg.workers = 1;
  cfg.queue_cap = 1;
  setup(&f, 3, BUCKETS, &cfg);
  activate(&f, 0, 1, 0);
  activate(&f, 1, 1, 0);
  cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_OK);
  cr_assert_eq(submit_drain(&f, 1, 1, &t), CKF_ERR_NOSPACE, "what waits anyway may come again");
  cr_assert_eq(submit_words(&f, 1, 1, BUCKETS, &s), CKF_ERR_NOSPACE);
  cr_assert(is_ready(&f, 1));
  cr_assert_eq(submit(&f, 1, 1, 0, 9), CKF_INGEST_ERR_SATURATED);
  cr_assert_eq(the_report(&f).lanes, 2);
  cr_assert_eq(ckf_table_ready(&f.table), 1);
  cr_assert_eq(submit_drain(&f, 1, 1, &t), CKF_INGEST_ERR_LANE_RETIRED);
  work(&f, 0);
  cr_assert_eq(ckf_table_word(&f.table, 0, 0), 9);
  cr_assert_eq(submit(&f, 0, 2, 1, 8), CKF_OK);
  cr_assert_eq(submit(&f, 0, 3, 1, 8), CKF_INGEST_ERR_SATURATED);
  cr_assert_eq(submit_drain(&f, 0, 4, &t), CKF_INGEST_ERR_LANE_RETIRED);
  teardown(&f);
}

Test(ckf_ingest, an_old_delta_retires_its_lane_whoever_finds_it) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  cfg.max_age_ns = 20 * MS;
  for (int who = 0; who < 3; who++) {
    fixture f;
    setup(&f, 1, BUCKETS, &cfg);
    activate(&f, 0, 1, 0);
    cr_assert_eq(ckf_ingest_deadline_ns(&f.in), CKF_INGEST_TIME_NONE);
    const uint64_t born = f.now;
    cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_OK);
    f.now += 5 * MS;
    cr_assert_eq(submit(&f, 0, 2, 1, 9), CKF_OK);
    cr_assert_eq(ckf_ingest_deadline_ns(&f.in), born + 20 * MS);
    f.now = born + 20 * MS - 1;
    ckf_ingest_tick(&f.in, f.now);
    cr_assert(is_ready(&f, 0));
    cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 1), 1); /* the younger one is the oldest now */
    cr_assert_eq(ckf_ingest_deadline_ns(&f.in), born + 25 * MS);
    f.now = born + 25 * MS - 1;
    ckf_ingest_tick(&f.in, f.now);
    ckf_ingest_tick(&f.in, 0); /* a clock that lags behind harms nothing */
    cr_assert(is_ready(&f, 0));
    f.now++;
    if (who == 0)
      ckf_ingest_tick(&f.in, f.now);
    else if (who == 1)
      cr_assert_eq(submit(&f, 0, 3, 1, 9), CKF_INGEST_ERR_AGE_EXCEEDED);
    else
      cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 1), 1);
    cr_assert_not(is_ready(&f, 0), "case %d", who);
    cr_assert_eq(the_report(&f).error, CKF_INGEST_ERR_AGE_EXCEEDED);
    cr_assert_eq(submit(&f, 0, 3, 1, 9), CKF_INGEST_ERR_LANE_RETIRED);
    work(&f, 0);
    cr_assert_eq(ckf_table_word(&f.table, 0, 1), 0);
    activate(&f, 0, 5, 5);
    teardown(&f);
  }
}

Test(ckf_ingest, a_snapshot_or_drain_that_takes_too_long_retires_the_lane) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  cfg.control_timeout_ns = 7 * MS;
  for (int who = 0; who < 6; who++) {
    ckf_ingest_ticket t;
    fixture f;
    setup(&f, 1, BUCKETS, &cfg);
    if (who < 3) {
      cr_assert_eq(assign_next(&f, 0), CKF_OK);
      cr_assert_eq(submit_words(&f, 0, 1, BUCKETS, &t), CKF_OK);
    } else {
      activate(&f, 0, 1, 1);
      cr_assert_eq(submit_drain(&f, 0, 1, &t), CKF_OK);
    }
    cr_assert_eq(ckf_ingest_deadline_ns(&f.in), f.now + 7 * MS);
    f.now += 7 * MS - 1;
    ckf_ingest_tick(&f.in, f.now);
    cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 0);
    f.now++;
    if (who % 3 == 0)
      ckf_ingest_tick(&f.in, f.now);
    else if (who % 3 == 1)
      work(&f, 0);
    cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
    cr_assert_eq(t.error, CKF_INGEST_ERR_CONTROL_TIMEOUT, "case %d", who);
    cr_assert_eq(the_report(&f).error, CKF_INGEST_ERR_CONTROL_TIMEOUT);
    cr_assert_eq(view_of(&f, 0).state, CKF_INGEST_RETIRED);
    memset(&t, 0xFF, sizeof t); /* nobody looks at it any more */
    memset(f.words, 0xFF, sizeof f.words);
    work(&f, 0);
    cr_assert_eq(ckf_table_ready(&f.table), 0);
    no_report(&f);
    activate(&f, 0, 5, 5);
    teardown(&f);
  }
}

Test(ckf_ingest, a_watchdog_looks_four_times_per_age) {
  static const uint64_t cases[][2] = {{1, 100000},        {400003, 100000},
                                      {400004, 100001},   {10 * MS, 2500000},
                                      {40 * MS, 10 * MS}, {UINT64_MAX, 10 * MS}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    ckf_ingest_config cfg = ckf_ingest_config_default();
    fixture f;
    cfg.max_age_ns = cases[i][0];
    setup(&f, 1, BUCKETS, &cfg);
    cr_assert_eq(ckf_ingest_interval_ns(&f.in), cases[i][1]);
    teardown(&f);
  }
}

/* Makes lane 0 ready and has it retired by one image too many. */
static void overflow(fixture *f) {
  const ckf_image images[2] = {{0, 1}, {1, 1}};
  activate(f, 0, 1, 0);
  cr_assert_eq(submit_images(f, 0, 1, 2, images, 2), CKF_INGEST_ERR_IMAGE_LIMIT);
}

Test(ckf_ingest, reports_are_bounded_and_the_lost_ones_counted) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_report r;
  fixture f;
  cfg.max_images = 1;
  setup(&f, 1, BUCKETS, &cfg);
  for (uint64_t i = 1; i <= 40; i++) {
    overflow(&f);
    cr_assert_eq(ckf_ingest_reports_lost(&f.in), i > 32 ? i - 32 : 0);
  }
  for (uint64_t i = 1; i <= 32; i++) {
    cr_assert_eq(ckf_ingest_report_next(&f.in, &r), 1);
    cr_assert_eq(r.assignment_epoch, i);
    if (i == 10) /* room again, behind the others */
      overflow(&f);
  }
  cr_assert_eq(the_report(&f).assignment_epoch, 41);
  cr_assert_eq(ckf_ingest_reports_lost(&f.in), 8);
  teardown(&f);
}

Test(ckf_ingest, workers_that_fail_do_not_drown_among_lanes_that_are_retired) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_report r;
  fixture f;
  cfg.max_images = 1;
  setup(&f, 1, BUCKETS, &cfg);
  for (uint64_t i = 1; i <= 40; i++)
    overflow(&f);
  for (uint32_t worker = 0; worker < cfg.workers; worker++)
    ckf_ingest_worker_failed(&f.in, worker);
  cr_assert_eq(ckf_ingest_reports_lost(&f.in), 8);
  for (uint64_t i = 1; i <= 32; i++)
    cr_assert(ckf_ingest_report_next(&f.in, &r) == 1 && r.error == CKF_INGEST_ERR_IMAGE_LIMIT);
  for (uint32_t worker = 0; worker < cfg.workers; worker++) {
    cr_assert_eq(ckf_ingest_report_next(&f.in, &r), 1);
    cr_assert(r.error == CKF_INGEST_ERR_WORKER_FAILED && r.worker == worker);
  }
  no_report(&f);
  teardown(&f);
}

/* ---- I5: for good ---- */

Test(ckf_ingest, a_worker_that_fails_takes_its_lanes_along_and_no_others) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket drain;
  fixture f;
  setup(&f, 0x1F, BUCKETS, &cfg); /* workers 2 3 1 2 1 */
  for (uint32_t i = 0; i < 4; i++)
    activate(&f, i, 1, i);
  cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_OK);
  cr_assert_eq(submit_drain(&f, 3, 1, &drain), CKF_OK);
  ckf_ingest_worker_failed(&f.in, 2);
  ckf_ingest_worker_failed(&f.in, 2); /* once is enough */
  ckf_ingest_worker_failed(&f.in, 4);
  cr_assert_eq(ckf_table_ready(&f.table), 0x6);
  const ckf_ingest_report r = the_report(&f);
  cr_assert_eq(r.error, CKF_INGEST_ERR_WORKER_FAILED);
  cr_assert(r.worker == 2 && r.lanes == 0x9);
  cr_assert_eq(ckf_ingest_poll(&f.in, &drain, f.now), 1);
  cr_assert_eq(drain.error, CKF_INGEST_ERR_WORKER_FAILED);
  cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 9), CKF_INGEST_ERR_WORKER_FAILED);
  cr_assert_eq(ckf_ingest_work(&f.in, 4, f.now, 9), CKF_ERR_ARG);
  f.now += UINT64_C(100000) * MS; /* what it left behind does not age */
  ckf_ingest_tick(&f.in, f.now);
  cr_assert_eq(ckf_ingest_deadline_ns(&f.in), CKF_INGEST_TIME_NONE);
  cr_assert_eq(view_of(&f, 0).outstanding_deltas, 0);
  for (int again = 0; again < 2; again++) {
    cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_INGEST_ERR_WORKER_FAILED);
    cr_assert_eq(submit_drain(&f, 0, 1, &drain), CKF_INGEST_ERR_WORKER_FAILED);
    cr_assert_eq(submit_words(&f, 3, 1, BUCKETS, &drain), CKF_INGEST_ERR_WORKER_FAILED);
  }
  cr_assert_eq(assign_next(&f, 0), CKF_INGEST_ERR_WORKER_FAILED);
  cr_assert_eq(submit(&f, 1, 1, 0, 9), CKF_OK);
  work(&f, 1);
  cr_assert_eq(ckf_table_word(&f.table, 1, 0), 9);
  activate(&f, 4, 1, 4);
  no_report(&f);
  teardown(&f);
}

static void fail_worker(fixture *f) {
  ckf_ingest_worker_failed(&f->in, 2);
  cr_assert_eq(ckf_ingest_poll(&f->in, &racing, f->now), 1);
  cr_assert_eq(racing.error, CKF_INGEST_ERR_WORKER_FAILED);
}

Test(ckf_ingest, a_worker_that_fails_in_the_middle_settles_what_it_was_at) {
  fixture f;
  locks l;
  const ckf_ingest_config cfg = with_locks(&l, &f);
  setup(&f, 1, BUCKETS, &cfg);
  cr_assert_eq(assign_next(&f, 0), CKF_OK);
  cr_assert_eq(submit_words(&f, 0, 3, BUCKETS, &racing), CKF_OK);
  interrupt(&l, &f, fail_worker);
  cr_assert_eq(ckf_table_ready(&f.table), 0);
  cr_assert_eq(the_report(&f).error, CKF_INGEST_ERR_WORKER_FAILED);
  teardown(&f);
}

Test(ckf_ingest, an_exhausted_number_fences_the_lane_for_good) {
  for (int which = 0; which < 2; which++) {
    ckf_ingest_config cfg = ckf_ingest_config_default();
    fixture f;
    setup(&f, 3, BUCKETS, &cfg);
    activate(&f, 0, 1, 0);
    activate(&f, 1, 1, 0);
    if (which == 0) {
      f.in.lanes_[0].epoch = UINT64_MAX - 1;
      activate(&f, 0, 1, 0); /* the last one */
      f.leases[0].assignment_epoch--;
      cr_assert_eq(assign_next(&f, 0), CKF_ERR_STALE_EPOCH);
      cr_assert(is_ready(&f, 0), "a refused lease does not fence");
      cr_assert_eq(assign_next(&f, 0), CKF_INGEST_ERR_EPOCH_EXHAUSTED);
    } else {
      f.in.lanes_[0].deltas = UINT64_MAX - 1;
      cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_OK);
      cr_assert_eq(submit(&f, 0, 2, 0, 9), CKF_INGEST_ERR_EPOCH_EXHAUSTED);
    }
    cr_assert_eq(the_report(&f).error, CKF_INGEST_ERR_EPOCH_EXHAUSTED);
    cr_assert_str_eq(ckf_ingest_errname(CKF_INGEST_ERR_EPOCH_EXHAUSTED), "AdmissionEpochExhausted");
    cr_assert_eq(ckf_table_ready(&f.table), 2);
    for (int again = 0; again < 3; again++)
      cr_assert_eq(assign_next(&f, 0), CKF_INGEST_ERR_EPOCH_EXHAUSTED);
    cr_assert(view_of(&f, 0).exhausted);
    cr_assert_not(view_of(&f, 1).exhausted);
    no_report(&f);
    teardown(&f);
  }
}

Test(ckf_ingest, the_end_retires_every_lane_before_anybody_is_joined) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_ingest_ticket t;
  fixture f;
  setup(&f, 0xFF, BUCKETS, &cfg);
  for (uint32_t i = 0; i < 8; i++)
    activate(&f, i, 1, i);
  cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_OK);
  cr_assert_eq(submit_drain(&f, 0, 1, &t), CKF_OK);
  ckf_ingest_close(&f.in);
  cr_assert_eq(ckf_table_ready(&f.table), 0);
  cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
  cr_assert_eq(t.error, CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(submit(&f, 0, 1, 0, 9), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(assign_next(&f, 0), CKF_INGEST_ERR_CLOSED);
  for (uint32_t w = 0; w < 4; w++)
    cr_assert_eq(ckf_ingest_work(&f.in, w, f.now, 1), CKF_INGEST_ERR_CLOSED);
  no_report(&f);
  teardown(&f);
}

/* ---- order of the checks ---- */

Test(ckf_ingest, a_delta_is_checked_in_order) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  const ckf_image images[3] = {{1, 1}, {2, 1}, {3, 1}};
  cfg.queue_cap = 1;
  cfg.max_images = 2;
  for (int fixed = 0; fixed < 6; fixed++) { /* everything is wrong but the first `fixed` */
    static const int want[6] = {CKF_INGEST_ERR_LANE_RETIRED, CKF_INGEST_ERR_LANE_RETIRED,
                                CKF_INGEST_ERR_AGE_EXCEEDED, CKF_INGEST_ERR_IMAGE_LIMIT,
                                CKF_INGEST_ERR_SATURATED,    CKF_OK};
    fixture f;
    setup(&f, 1, BUCKETS, &cfg);
    activate(&f, 0, 1, 0);
    if (fixed < 5)
      cr_assert_eq(submit_images(&f, 0, 1, 2, images, 1), CKF_OK);
    if (fixed < 3)
      f.now += 10 * MS;
    if (fixed < 2)
      f.leases[0].assignment_epoch++;
    if (fixed < 1)
      ckf_ingest_retire(&f.in, 0);
    cr_assert_eq(submit_images(&f, 0, 2, 3, images, fixed < 4 ? 3 : 1), want[fixed], "case %d",
                 fixed);
    cr_assert_eq(is_ready(&f, 0), fixed == 1 || fixed == 5, "only the lane's own fault retires it");
    teardown(&f);
  }
}

Test(ckf_ingest, an_empty_delta_is_the_lanes_to_refuse) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  const ckf_image images[2] = {{1, 1}, {2, 2}};
  fixture f;
  cfg.max_images = 2;
  setup(&f, 1, BUCKETS, &cfg);
  activate(&f, 0, 1, 0);
  cr_assert_eq(submit_images(&f, 0, 1, 2, images, 2), CKF_OK);
  cr_assert_eq(submit_images(&f, 0, 1, 2, NULL, 0), CKF_OK); /* stale, so ignored */
  cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 1), 1);
  cr_assert_eq(submit_images(&f, 0, 2, 3, images, 2), CKF_OK);
  cr_assert_eq(ckf_ingest_work(&f.in, 2, f.now, 1), 1);
  cr_assert_eq(submit_images(&f, 0, 3, 4, NULL, 0), CKF_OK);
  work(&f, 0);
  cr_assert_eq(the_report(&f).outcome.fault, CKF_FAULT_EMPTY_DELTA);
  cr_assert_eq(view_of(&f, 0).applied_images, 4);
  teardown(&f);
}
