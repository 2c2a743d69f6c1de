/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - what a configuration means: identities, registrations and roles of every
 * endpoint. */
#ifndef KVRELAYD_PLAN_H
#define KVRELAYD_PLAN_H

#include "config.h"

typedef struct plan_pool {
  const config_endpoint *endpoint;
  kvrelay_descriptor descriptor; /* lent from the plan and its configuration; producer numbers are
                                    the relay's business */
  const char *no_pool;           /* why the endpoint has no pool, or NULL */
  size_t first_worker;           /* of the plan's */
} plan_pool;

/* One worker; its cards lie side by side, the base card first. */
typedef struct plan_worker {
  const config_worker *config;
  size_t first_card, cards;
} plan_worker;

typedef struct plan {
  uint64_t dc_id;
  plan_pool *pools; /* one per endpoint, in the file's order */
  unsigned pools_count;
  plan_worker *workers; /* in the file's order */
  kvrelay_card *cards;  /* of them, nothing known of their liveness */
  size_t workers_len, cards_len;
  kvrelay_topology topology; /* what the cards come to */
  kvrelay_text *texts;       /* aliases of the cards */
  kvrelay_roles *needs;
  void *derived;
  size_t derived_len;
} plan;

/*
 * Derives everything; `c` must outlive the plan.  Names with two meanings lose their registration
 * or alias, equal pool identities lose both pools; each such decision is one warning line per
 * endpoint on `report`.  NULL when memory is gone.
 */
plan *plan_make(const config *c, FILE *report);
void plan_free(plan *p);
/* dc_id, digests and pool names, for people. */
void plan_print(const plan *p, FILE *out);

#endif
