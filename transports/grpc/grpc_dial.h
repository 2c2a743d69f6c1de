/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_dial.h - from a target's text to a connected socket: resolves, then races the addresses. */
#ifndef KVRELAY_GRPC_DIAL_H
#define KVRELAY_GRPC_DIAL_H

#include <event2/event.h>

#include "../address.h"
#include "../timer.h"

#define KVRELAY_GRPC_DIAL_MAX 8 /* addresses tried */

enum kvrelay_grpc_target_kind { KVRELAY_GRPC_TARGET_FIXED = 1, KVRELAY_GRPC_TARGET_NAME };

/* A target of a client; fixed addresses are known, a name is resolved by each dial. */
typedef struct kvrelay_grpc_target {
  int kind;
  kvrelay_address address[KVRELAY_GRPC_DIAL_MAX];
  int address_count;
  char host[256], port[8];
  char authority[272]; /* for the header of that name */
} kvrelay_grpc_target;

/* Forms as in grpc_client.h.  KVRELAY_TRANSPORT_ERR_ADDRESS: none of them. */
int kvrelay_grpc_target_parse(const char *text, kvrelay_grpc_target *out);

typedef struct kvrelay_grpc_dial kvrelay_grpc_dial;
typedef struct kvrelay_grpc_attempt {
  kvrelay_grpc_dial *dial;
  struct event *event;
  int fd;
} kvrelay_grpc_attempt;

/* Fields are private. */
struct kvrelay_grpc_dial {
  struct event_base *base;
  const kvrelay_grpc_target *target;
  void (*done)(void *owner, int fd, int err, const char *text);
  void *owner;
  struct event *answer; /* of the resolver */
  kvrelay_timer next;   /* when to start one more attempt */
  kvrelay_address address[KVRELAY_GRPC_DIAL_MAX];
  kvrelay_grpc_attempt attempt[KVRELAY_GRPC_DIAL_MAX];
  int address_count, started, open;
  int answer_fd;
  int last_errno;
  bool active;
};

/*
 * Starts; `done` comes once, later, from the loop: a connected socket (then the caller's), or -1
 * with an error and its text.  The target and the dial must stay until then or until cancel.
 */
int kvrelay_grpc_dial_start(kvrelay_grpc_dial *dial, struct event_base *base,
                            const kvrelay_grpc_target *target,
                            void (*done)(void *owner, int fd, int err, const char *text),
                            void *owner);
/* Ends without `done`; harmless when it is not active. */
void kvrelay_grpc_dial_cancel(kvrelay_grpc_dial *dial);

#endif
