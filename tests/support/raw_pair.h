/* SPDX-License-Identifier: Apache-2.0 */
/* raw_pair.h - the toy service as one of the contract's: what the raw transport can call. */
#ifndef KVRELAY_TEST_RAW_PAIR_H
#define KVRELAY_TEST_RAW_PAIR_H

#include "toy_service.h"

/* The toy service, whose methods go by the paths of the contract: Echo is GetRelayInfo, then Count,
 * Refuse, End and Silent in the order of their numbers. */
typedef struct raw_toy {
  kvrelay_service base; /* first */
  toy_service toy;
} raw_toy;

void raw_toy_init(raw_toy *raw);
/* The contract's path of a method of the toy service. */
const char *raw_toy_path(const char *method);

#endif
