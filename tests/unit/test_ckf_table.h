/* SPDX-License-Identifier: Apache-2.0 */

/* For tests of tables and their lanes. */

#ifndef TEST_CKF_TABLE_H
#define TEST_CKF_TABLE_H

#include "ckf.h"

#include <criterion/criterion.h>
#include <string.h>

/* The lanes of a mask, each with a pool of its own. */
static inline ckf_manifest a_manifest(uint32_t configured, uint64_t buckets) {
  ckf_manifest m;
  memset(&m, 0, sizeof m);
  m.consumer_instance = 5;
  memset(m.domain.semantics_digest, 0xA1, 16);
  memset(m.domain.routing_digest, 0xB2, 16);
  m.domain.semantics_source = 1;
  m.domain.routing_source = 2;
  m.format.seed = CKF_DEFAULT_SEED;
  m.format.bucket_count = buckets;
  m.configured = configured;
  for (uint32_t i = 0; i < CKF_LANES; i++) {
    m.pools[i].domain = m.domain;
    m.pools[i].dc_id = 100 + i;
  }
  return m;
}

/* Makes `lane` the writer of lane `number`, with an identity and a lease that fit. */
static inline void lease_lane(ckf_table *table, ckf_lane *lane, uint32_t number,
                              ckf_identity *identity, ckf_lease *lease) {
  const ckf_manifest *const m = ckf_table_manifest(table);
  memset(identity, 0, sizeof *identity);
  identity->pool = m->pools[number];
  identity->format = m->format;
  *lease = (ckf_lease){m->consumer_instance, (uint8_t)number, 1};
  cr_assert_eq(ckf_lane_claim(lane, table, number), CKF_OK);
  cr_assert_eq(ckf_lane_assign(lane, identity, lease), CKF_OK);
}

#endif
