/* SPDX-License-Identifier: Apache-2.0 */

/* What holds for any commands: refusals leave no trace, portions and order of the work do not
 * matter, and what readers see at the end is what was sent. */

#include "ckf_ingest.h"
#include "test_ckf_ingest.h"
#include "test_guard.h"

static uint64_t random_state = 6;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

/* ---- refusals ---- */

typedef struct shot {
  ckf_ingest in;
  ckf_table table;
  uint8_t *mem, *table_mem;
  size_t len, table_len;
} shot;

static void take(shot *s, const fixture *f, const ckf_ingest_config *cfg) {
  const ckf_manifest *const m = ckf_table_manifest(&f->table);
  s->len = ckf_ingest_mem_size(cfg, &f->table);
  s->table_len = ckf_table_mem_size(m);
  s->mem = malloc(s->len);
  s->table_mem = malloc(s->table_len);
  memcpy(&s->in, &f->in, sizeof s->in);
  memcpy(&s->table, &f->table, sizeof s->table);
  memcpy(s->mem, f->mem, s->len);
  memcpy(s->table_mem, f->table_mem, s->table_len);
}

static bool same(const shot *s, const fixture *f) {
  return memcmp(&s->in, &f->in, sizeof s->in) == 0 &&
         memcmp(&s->table, &f->table, sizeof s->table) == 0 &&
         memcmp(s->mem, f->mem, s->len) == 0 &&
         memcmp(s->table_mem, f->table_mem, s->table_len) == 0;
}

static void drop(shot *s) {
  free(s->mem);
  free(s->table_mem);
}

/* Lane 0 has no lease, lane 1 no snapshot yet, lane 2 is active, lane 3 retired, 4 is none. */
static void all_states(fixture *f, ckf_ingest_config *cfg) {
  *cfg = ckf_ingest_config_default();
  cfg->queue_cap = 2;
  setup(f, 0xF, BUCKETS, cfg);
  cr_assert_eq(assign_next(f, 1), CKF_OK);
  activate(f, 2, 5, 1);
  activate(f, 3, 5, 1);
  ckf_ingest_retire(&f->in, 3);
}

Test(ckf_ingest_props, a_refused_admission_changes_no_byte) {
  ckf_ingest_config cfg;
  ckf_ingest_ticket ticket, as_given;
  ckf_ingest_lane_view view, view_given;
  ckf_identity wrong;
  ckf_lease old;
  fixture f;
  shot s;
  all_states(&f, &cfg);
  wrong = f.identities[2];
  wrong.format.seed++;
  memset(&ticket, 0x5A, sizeof ticket);
  memset(&view, 0x5A, sizeof view);
  memcpy(&as_given, &ticket, sizeof ticket);
  memcpy(&view_given, &view, sizeof view);
  take(&s, &f, &cfg);
  cr_assert_eq(submit(&f, 0, 5, 1, 1), CKF_INGEST_ERR_LANE_UNASSIGNED);
  cr_assert_eq(submit(&f, 1, 5, 1, 1), CKF_INGEST_ERR_AWAITING_SNAPSHOT);
  cr_assert_eq(submit(&f, 3, 5, 1, 1), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(submit(&f, 4, 5, 1, 1), CKF_ERR_UNCONFIGURED_LANE);
  cr_assert_eq(submit_words(&f, 0, 5, BUCKETS, &ticket), CKF_INGEST_ERR_LANE_UNASSIGNED);
  cr_assert_eq(submit_words(&f, 3, 5, BUCKETS, &ticket), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(submit_words(&f, 4, 5, BUCKETS, &ticket), CKF_ERR_UNCONFIGURED_LANE);
  cr_assert_eq(submit_drain(&f, 0, 5, &ticket), CKF_INGEST_ERR_LANE_UNASSIGNED);
  cr_assert_eq(submit_drain(&f, 1, 5, &ticket), CKF_INGEST_ERR_AWAITING_SNAPSHOT);
  cr_assert_eq(submit_drain(&f, 3, 5, &ticket), CKF_INGEST_ERR_LANE_RETIRED);
  cr_assert_eq(submit_drain(&f, 4, 5, &ticket), CKF_ERR_UNCONFIGURED_LANE);
  cr_assert_eq(ckf_ingest_assign(&f.in, &f.identities[2], &f.leases[2]), CKF_ERR_STALE_EPOCH);
  old = f.leases[2];
  old.assignment_epoch++;
  cr_assert_eq(ckf_ingest_assign(&f.in, &wrong, &old), CKF_ERR_WRONG_FORMAT);
  wrong.pool.dc_id++;
  cr_assert_eq(ckf_ingest_assign(&f.in, &wrong, &old), CKF_ERR_WRONG_OWNER);
  old.physical_lane = 4;
  cr_assert_eq(ckf_ingest_assign(&f.in, &f.identities[2], &old), CKF_ERR_UNCONFIGURED_LANE);
  old.physical_lane = 16;
  cr_assert_eq(ckf_ingest_assign(&f.in, &f.identities[2], &old), CKF_ERR_INVALID_LANE);
  cr_assert_eq(ckf_ingest_lane_get(&f.in, 4, &view), CKF_ERR_UNCONFIGURED_LANE);
  cr_assert_eq(ckf_ingest_lane_get(&f.in, 16, &view), CKF_ERR_INVALID_LANE);
  cr_assert_eq(ckf_ingest_work(&f.in, cfg.workers, f.now, 1), CKF_ERR_ARG);
  ckf_ingest_retire(&f.in, 0);
  ckf_ingest_retire(&f.in, 4);
  ckf_ingest_retire(&f.in, 16);
  cr_assert(same(&s, &f));
  cr_assert_eq(memcmp(&ticket, &as_given, sizeof ticket), 0);
  cr_assert_eq(memcmp(&view, &view_given, sizeof view), 0);
  drop(&s);
  no_report(&f);
  teardown(&f);
}

Test(ckf_ingest_props, a_snapshot_without_room_and_a_closed_pool_change_no_byte) {
  ckf_ingest_config cfg;
  ckf_ingest_ticket tickets[2], ticket, as_given;
  fixture f;
  shot s;
  all_states(&f, &cfg);
  memset(&ticket, 0x5A, sizeof ticket);
  memcpy(&as_given, &ticket, sizeof ticket);
  cr_assert_eq(submit_words(&f, 1, 5, BUCKETS, &tickets[0]), CKF_OK);
  cr_assert_eq(submit_words(&f, 1, 6, BUCKETS, &tickets[1]), CKF_OK);
  take(&s, &f, &cfg);
  cr_assert_eq(submit_words(&f, 1, 7, BUCKETS, &ticket), CKF_ERR_NOSPACE);
  cr_assert(same(&s, &f));
  drop(&s);
  ckf_ingest_close(&f.in);
  take(&s, &f, &cfg);
  for (uint32_t lane = 0; lane < 4; lane++) {
    cr_assert_lt(submit(&f, lane, 5, 1, 1), 0);
    cr_assert_lt(submit_words(&f, lane, 5, BUCKETS, &ticket), 0);
    cr_assert_lt(submit_drain(&f, lane, 5, &ticket), 0);
    ckf_lease lease = f.leases[lane];
    lease.assignment_epoch++;
    cr_assert_eq(ckf_ingest_assign(&f.in, &f.identities[lane], &lease), CKF_INGEST_ERR_CLOSED);
  }
  ckf_ingest_close(&f.in);
  cr_assert(same(&s, &f));
  cr_assert_eq(memcmp(&ticket, &as_given, sizeof ticket), 0);
  drop(&s);
  teardown(&f);
}

/* ---- portions and order ---- */

enum { LANES = 6, DELTAS = 40 };

typedef struct plan {
  ckf_image images[LANES][DELTAS][8];
  size_t n[LANES][DELTAS];
  uint64_t wanted[LANES][BUCKETS];
} plan;

static void make_plan(plan *p) {
  for (size_t lane = 0; lane < LANES; lane++) {
    for (size_t b = 0; b < BUCKETS; b++)
      p->wanted[lane][b] = lane + 1;
    for (size_t d = 0; d < DELTAS; d++) {
      const size_t n = 1 + (size_t)draw(8);
      const uint32_t first = (uint32_t)draw(BUCKETS);
      p->n[lane][d] = n;
      for (uint32_t i = 0; i < n; i++) {
        const ckf_image image = {(first + 5 * i) % BUCKETS, draw(UINT64_MAX)};
        p->images[lane][d][i] = image;
        p->wanted[lane][image.bucket] = image.word;
      }
    }
  }
}

/* Lanes submit in any order, workers take portions of any size whenever they like. */
Test(ckf_ingest_props, portions_of_work_and_the_order_of_workers_do_not_matter) {
  static plan p;
  make_plan(&p);
  for (uint32_t workers = 1; workers <= 4; workers++)
    for (size_t portion = 1; portion <= 9; portion++) {
      ckf_ingest_config cfg = ckf_ingest_config_default();
      size_t next[LANES] = {0}, left = (size_t)LANES * DELTAS;
      ckf_ingest_ticket t;
      fixture f;
      cfg.workers = workers;
      cfg.max_images = 8 * DELTAS;
      setup(&f, (1u << LANES) - 1, BUCKETS, &cfg);
      for (uint32_t lane = 0; lane < LANES; lane++)
        activate(&f, lane, 10, lane + 1);
      while (left > 0) {
        const uint32_t lane = (uint32_t)draw(LANES);
        const size_t d = next[lane];
        if (d < DELTAS) {
          cr_assert_eq(submit_images(&f, lane, 10 + d, 11 + d, p.images[lane][d], p.n[lane][d]),
                       CKF_OK);
          next[lane]++;
          left--;
        }
        if (draw(3) == 0)
          cr_assert_leq(ckf_ingest_work(&f.in, (uint32_t)draw(workers), f.now, portion),
                        (ptrdiff_t)portion);
      }
      for (uint32_t lane = LANES; lane-- > 0;) {
        cr_assert_eq(submit_drain(&f, lane, 10 + DELTAS, &t), CKF_OK);
        work(&f, lane);
        cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
        cr_assert_eq(t.error, CKF_OK);
        const ckf_ingest_lane_view v = view_of(&f, lane);
        cr_assert_eq(v.applied_deltas, DELTAS);
        cr_assert_eq(v.outstanding_images, 0);
        for (uint32_t b = 0; b < BUCKETS; b++)
          cr_assert_eq(ckf_table_word(&f.table, lane, b), p.wanted[lane][b]);
      }
      no_report(&f);
      teardown(&f);
    }
}

/* The queues, rings and reports, the table and the words end where memory ends. */
Test(ckf_ingest_props, everything_stays_within_its_memory) {
  const ckf_manifest m = a_manifest(0x7, BUCKETS);
  uint64_t *const words = guard_alloc(BUCKETS * sizeof *words);
  for (uint32_t queue = 1; queue <= 5; queue++) {
    ckf_ingest_config cfg = ckf_ingest_config_default();
    const size_t table_len = ckf_table_mem_size(&m);
    fixture f;
    cfg.queue_cap = queue;
    cfg.workers = 2;
    cfg.max_images = 7;
    memset(&f, 0, sizeof f);
    name_lanes(&f, &m);
    f.table_mem = guard_alloc(table_len);
    cr_assert_eq(ckf_table_init(&f.table, &m, 2, f.table_mem, table_len), CKF_OK);
    const size_t len = ckf_ingest_mem_size(&cfg, &f.table);
    f.mem = guard_alloc(len);
    cr_assert_eq(ckf_ingest_init(&f.in, &cfg, &f.table, f.mem, len), CKF_OK);
    for (int life = 0; life < 60; life++) {
      const uint32_t lane = (uint32_t)draw(3);
      ckf_ingest_ticket t;
      cr_assert_eq(assign_next(&f, lane), CKF_OK);
      cr_assert_eq(ckf_ingest_submit_snapshot(&f.in, &f.identities[lane], &f.leases[lane], 1, words,
                                              BUCKETS, &t, f.now),
                   CKF_OK);
      work(&f, lane);
      cr_assert_eq(ckf_ingest_poll(&f.in, &t, f.now), 1);
      cr_assert_eq(t.error, CKF_OK);
      for (uint64_t base = 1; is_ready(&f, lane); base++) { /* until it is full, or asks for much */
        const size_t n = 1 + (size_t)draw(8);
        ckf_image *const images = guard_alloc(n * sizeof *images);
        for (uint32_t i = 0; i < n; i++)
          images[i] = (ckf_image){BUCKETS - 1 - i, draw(UINT64_MAX)};
        const int rc = submit_images(&f, lane, base, base + 1, images, n);
        cr_assert(rc == CKF_OK || rc == CKF_INGEST_ERR_IMAGE_LIMIT ||
                  rc == CKF_INGEST_ERR_SATURATED);
        guard_free(images, n * sizeof *images);
        if (draw(2) == 0)
          work(&f, lane);
      }
      work(&f, lane);
    }
    cr_assert_gt(ckf_ingest_reports_lost(&f.in), 0, "more than there is room for");
    ckf_ingest_close(&f.in);
    ckf_ingest_release(&f.in);
    guard_free(f.mem, len);
    guard_free(f.table_mem, table_len);
  }
  guard_free(words, BUCKETS * sizeof *words);
}

Test(ckf_ingest_props, states_have_the_protocols_names) {
  static const char *const names[] = {"Unassigned", "AwaitingSnapshot", "Active", "Retired",
                                      "Unknown"};
  for (int i = 0; i < 5; i++)
    cr_assert_str_eq(ckf_ingest_state_name((enum ckf_ingest_state)i), names[i]);
}
