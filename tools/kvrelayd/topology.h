/* SPDX-License-Identifier: Apache-2.0 */
/* topology.h - what the workers of the configuration say of themselves, and who of them is alive.
 */
#ifndef KVRELAYD_TOPOLOGY_H
#define KVRELAYD_TOPOLOGY_H

#include "plan.h"

struct serve;

typedef struct topology {
  const plan *plan;
  kvrelay_card *cards; /* the plan's within the scope, with liveness */
  size_t cards_len;
  int32_t *liveness; /* enum kvrelay_liveness of each worker of the plan */
  int32_t *said;     /* scratch: what their event connections say */
  /* The relay looks at one derivation while the next is made. */
  kvrelay_topology derived[2];
  void *mem[2];
  int current;
  bool told;
} topology;

/* `p` must outlive it.  0, or an exit code after a log line; topology_close is due either way. */
int topology_open(topology *t, const plan *p);
void topology_close(topology *t);
/* Looks who is alive now; what came of it goes to the relay.  The first call always tells. */
void topology_poll(topology *t, struct serve *s, uint64_t now_ns);

#endif
