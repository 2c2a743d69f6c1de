/* SPDX-License-Identifier: Apache-2.0 */
/* topology.h - what the workers of the configuration say of themselves, and who of them is alive.
 */
#ifndef KVRELAYD_TOPOLOGY_H
#define KVRELAYD_TOPOLOGY_H

#include "plan.h"

struct serve;

/* One worker; its cards lie side by side. */
typedef struct topology_worker {
  const config_worker *config;
  size_t first_card, cards;
  int32_t liveness; /* enum kvrelay_liveness */
} topology_worker;

typedef struct topology {
  kvrelay_card *cards;
  size_t cards_len;
  topology_worker *workers; /* in the order of the file */
  size_t workers_len;
  size_t *first_worker; /* of each endpoint */
  kvrelay_text *texts;  /* aliases of the cards */
  kvrelay_roles *needs;
  /* The relay looks at one derivation while the next is made. */
  kvrelay_topology derived[2];
  void *mem[2];
  size_t mem_len;
  int current;
  bool told;
} topology;

/* Cards of all workers; `c` and its plan must outlive them.  0, or an exit code after a log line;
 * topology_close is due either way. */
int topology_open(topology *t, const config *c, const plan *p);
void topology_close(topology *t);
/* Looks who is alive now; what came of it goes to the relay.  The first call always tells. */
void topology_poll(topology *t, struct serve *s, uint64_t now_ns);

#endif
