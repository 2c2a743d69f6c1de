/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - what a configuration means: identities, registrations and roles of every endpoint
 * (contract sections 6 and 12). */
#ifndef KVRELAYD_PLAN_H
#define KVRELAYD_PLAN_H

#include "config.h"

typedef struct plan_pool {
  const config_endpoint *endpoint;
  kvrelay_descriptor descriptor; /* lent from the plan and its configuration; producer numbers are
                                    the relay's business */
  const char *no_pool;           /* why the endpoint has no pool, or NULL */
} plan_pool;

typedef struct plan {
  uint64_t dc_id;
  plan_pool *pools; /* one per endpoint, in the file's order */
  unsigned pools_count;
} plan;

/*
 * Derives everything; `c` must outlive the plan.  Names with two meanings lose their registration
 * or alias, equal pool identities lose both pools; each such decision is one warning line on
 * `report`.  NULL when memory is gone.
 */
plan *plan_make(const config *c, FILE *report);
void plan_free(plan *p);
/* dc_id, digests and pool names, for people. */
void plan_print(const plan *p, FILE *out);

#endif
