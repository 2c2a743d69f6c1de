/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_dial.h - a dial of dial.h in a libevent loop. */
#ifndef KVRELAY_GRPC_DIAL_H
#define KVRELAY_GRPC_DIAL_H

#include <event2/event.h>

#include "../dial.h"

/* Fields are private; all zero is one that is not active. */
typedef struct kvrelay_grpc_dial {
  struct event *answer; /* NULL: not active */
  int fd;
  void (*done)(void *owner, int fd, int err, const char *text);
  void *owner;
} kvrelay_grpc_dial;

/*
 * Starts; `done` comes once, later, from the loop: a connected socket (then the caller's), or -1
 * with an error and its text.  The dial must stay until then or until cancel.
 * KVRELAY_TRANSPORT_OK, or what kvrelay_dial_start says, or _ERR_MEMORY: it is not active.
 */
int kvrelay_grpc_dial_start(kvrelay_grpc_dial *dial, struct event_base *base,
                            const kvrelay_dial_target *target,
                            void (*done)(void *owner, int fd, int err, const char *text),
                            void *owner);
/* Ends without `done`; harmless when it is not active. */
void kvrelay_grpc_dial_cancel(kvrelay_grpc_dial *dial);

#endif
