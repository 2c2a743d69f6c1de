/* SPDX-License-Identifier: Apache-2.0 */
/* session.h - a consumer on a connection, run until a question is answered. */
#ifndef KVRELAY_SESSION_H
#define KVRELAY_SESSION_H

#include "cli.h"
#include "client.h"
#include "show.h"

typedef struct session {
  const options *o;
  kvrelay_consumer consumer;
  void *consumer_mem;
  kvrelay_client *client;
  kvrelay_caller *tap; /* what the transport talks to: the client, or somebody in front of it */
  kvrelay_client_transport *wire;
  uint64_t give_up_ns; /* end of --timeout, KVRELAY_TIME_NONE once it was answered */
  bool connected;      /* at least once */
  char failure[256];   /* why the last attempt to connect failed */
  bool failed;
  bool lost; /* it was told, and no catalog has come since */
} session;

/* A consumer without a connection yet; EXIT_FINE, or an exit code after a message. */
int session_open(session *s, const options *o, bool subscribe_all);
/* Connects; `tap` NULL = the client itself.  As session_open. */
int session_connect(session *s, kvrelay_caller *tap);
/* One turn of the loop.  EXIT_FINE: go on; else an exit code after a message: unreachable, another
 * contract, time is up. */
int session_turn(session *s);
/* The first answer is there: no more time limit. */
void session_answered(session *s);
/* For what goes on for long: says on standard error when the relay is lost and when it is back. */
void session_tell(session *s, const kvrelay_event_out *event);
void session_close(session *s);
uint64_t session_now(const session *s);

#endif
