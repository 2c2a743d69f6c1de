/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_CKF_INGEST_H_
#define TEST_CKF_INGEST_H_

/* A small table and its workers; consumer 17, one pool per lane. */

#include "ckf_ingest.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 128, MS = 1000000 };

typedef struct fixture {
  ckf_table table;
  ckf_ingest in;
  ckf_identity identities[CKF_LANES];
  ckf_lease leases[CKF_LANES];
  uint64_t words[BUCKETS]; /* of the next snapshot */
  uint64_t now;
  void *table_mem, *mem;
} fixture;

static inline ckf_manifest a_manifest(uint32_t lanes, uint64_t buckets) {
  ckf_manifest m;
  memset(&m, 0, sizeof m);
  m.consumer_instance = 17;
  m.format = (ckf_format){CKF_DEFAULT_SEED, buckets};
  m.configured = lanes;
  for (uint32_t i = 0; i < CKF_LANES; i++)
    m.pools[i].dc_id = 100 + i;
  return m;
}

static inline void name_lanes(fixture *f, const ckf_manifest *m) {
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    memset(&f->identities[i], 0, sizeof f->identities[i]);
    f->identities[i].pool = m->pools[i];
    f->identities[i].producer_incarnation = 1;
    f->identities[i].format = m->format;
    f->leases[i] = (ckf_lease){m->consumer_instance, (uint8_t)i, 0};
  }
}

static inline void setup(fixture *f, uint32_t lanes, uint64_t buckets,
                         const ckf_ingest_config *cfg) {
  const ckf_manifest m = a_manifest(lanes, buckets);
  memset(f, 0, sizeof *f);
  f->now = 1000;
  name_lanes(f, &m);
  const size_t table_len = ckf_table_mem_size(&m);
  f->table_mem = malloc(table_len);
  cr_assert_eq(ckf_table_init(&f->table, &m, 2, f->table_mem, table_len), CKF_OK);
  const size_t len = ckf_ingest_mem_size(cfg, &f->table);
  cr_assert_gt(len, 0);
  f->mem = malloc(len);
  cr_assert_eq(ckf_ingest_init(&f->in, cfg, &f->table, f->mem, len), CKF_OK);
}

static inline void teardown(fixture *f) {
  ckf_ingest_close(&f->in);
  cr_assert_eq(ckf_table_ready(&f->table), 0);
  ckf_ingest_release(&f->in);
  free(f->mem);
  free(f->table_mem);
}

static inline ckf_ingest_lane_view view_of(fixture *f, uint32_t lane) {
  ckf_ingest_lane_view v;
  cr_assert_eq(ckf_ingest_lane_get(&f->in, lane, &v), CKF_OK);
  return v;
}

static inline bool is_ready(const fixture *f, uint32_t lane) {
  return ckf_table_ready(&f->table) >> lane & 1;
}

/* Everything that is queued for the worker of a lane. */
static inline void work(fixture *f, uint32_t lane) {
  while (ckf_ingest_work(&f->in, ckf_ingest_lane_worker(&f->in, lane), f->now, 3) > 0) {
  }
}

static inline int assign_next(fixture *f, uint32_t lane) {
  f->leases[lane].assignment_epoch++;
  return ckf_ingest_assign(&f->in, &f->identities[lane], &f->leases[lane]);
}

static inline int submit_words(fixture *f, uint32_t lane, uint64_t sequence, size_t words,
                               ckf_ingest_ticket *t) {
  return ckf_ingest_submit_snapshot(&f->in, &f->identities[lane], &f->leases[lane], sequence,
                                    f->words, words, t, f->now);
}

/* A new lease, and all words of the snapshot are `fill`. */
static inline void activate(fixture *f, uint32_t lane, uint64_t sequence, uint64_t fill) {
  ckf_ingest_ticket t;
  for (size_t i = 0; i < BUCKETS; i++)
    f->words[i] = fill;
  cr_assert_eq(assign_next(f, lane), CKF_OK);
  cr_assert_eq(submit_words(f, lane, sequence, BUCKETS, &t), CKF_OK);
  cr_assert_eq(ckf_ingest_poll(&f->in, &t, f->now), 0);
  work(f, lane);
  cr_assert_eq(ckf_ingest_poll(&f->in, &t, f->now), 1);
  cr_assert_eq(t.error, CKF_OK);
  cr_assert_eq(t.outcome.result, CKF_LANE_SNAPSHOT_INSTALLED);
  cr_assert(is_ready(f, lane));
}

static inline int submit_images(fixture *f, uint32_t lane, uint64_t base, uint64_t sequence,
                                const ckf_image *images, size_t n) {
  uint8_t *const bytes = malloc((n + 1) * CKF_CBI1_IMAGE_BYTES);
  const ckf_delta_out d = {&f->identities[lane], &f->leases[lane], base, sequence, {bytes, n}};
  for (size_t i = 0; i < n; i++)
    ckf_batch_put(bytes, i, images[i]);
  const int rc = ckf_ingest_submit_delta(&f->in, &d, f->now);
  free(bytes);
  return rc;
}

/* A delta of one image. */
static inline int submit(fixture *f, uint32_t lane, uint64_t base, uint32_t bucket, uint64_t word) {
  const ckf_image image = {bucket, word};
  return submit_images(f, lane, base, base + 1, &image, 1);
}

static inline int submit_drain(fixture *f, uint32_t lane, uint64_t expected, ckf_ingest_ticket *t) {
  return ckf_ingest_submit_drain(&f->in, &f->leases[lane], expected, t, f->now);
}

/* The only report there is. */
static inline ckf_ingest_report the_report(fixture *f) {
  ckf_ingest_report r, more;
  cr_assert_eq(ckf_ingest_report_next(&f->in, &r), 1, "no report");
  cr_assert_eq(ckf_ingest_report_next(&f->in, &more), 0, "more than one report");
  return r;
}

static inline void no_report(fixture *f) {
  ckf_ingest_report r;
  cr_assert_eq(ckf_ingest_report_next(&f->in, &r), 0, "%s", ckf_ingest_errname(r.error));
}

#endif
