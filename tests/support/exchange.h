/* SPDX-License-Identifier: Apache-2.0 */
/* exchange.h - calls of every shape between a client and the service of raw_pair.h, made again
 * until each has ended as it should: for tests of what goes wrong in between. */
#ifndef KVRELAY_TEST_EXCHANGE_H
#define KVRELAY_TEST_EXCHANGE_H

#include <event2/event.h>

#include "transports/transport.h"

/* How a transport on sockets is opened; `bind` and `target` as its own configuration has them.  One
 * that has a loop of its own leaves `base` alone. */
typedef struct carrier {
  const char *name;
  int (*open_server)(struct event_base *base, const char *bind, kvrelay_service *service,
                     kvrelay_transport **out);
  void (*address)(const kvrelay_transport *server, char *out, size_t cap);
  /* Tries again within a few milliseconds when a connection is lost. */
  int (*open_client)(struct event_base *base, const char *target, kvrelay_caller *caller,
                     kvrelay_client_transport **out);
} carrier;
extern const carrier carriers[];
extern const size_t carriers_len;
/* Makes what they need besides, certificates; before anything may fail. */
void carriers_prepare(void);

#define EXCHANGE_CALLS 5

typedef struct exchange {
  kvrelay_caller base; /* first; what the client is opened with */
  kvrelay_client_transport *client;
  bool ready;        /* connected */
  unsigned failures; /* connections lost, or not made */
  struct exchange_call {
    uint32_t number; /* 0: not open */
    bool done;
    unsigned messages;
    size_t bytes;
  } calls[EXCHANGE_CALLS];
  uint32_t last_number;
  char wrong[160]; /* the first broken promise; empty: none */
} exchange;

/* Opens the client; as carrier.open_client. */
int exchange_open(exchange *e, const carrier *how, struct event_base *base, const char *target);
/* Starts what is neither done nor under way; true when all is done. */
bool exchange_advance(exchange *e);
/* Everything once more. */
void exchange_again(exchange *e);
/* Runs the client's loop, and the server's unless it is NULL, until all is done: true.  False:
 * something was wrong, or nothing went on for `patience_ns`, which is then what is wrong. */
bool exchange_run(exchange *e, kvrelay_transport *server, uint64_t patience_ns);
void exchange_close(exchange *e);

/* Descriptors that this process has open. */
unsigned open_descriptors(void);

#endif
