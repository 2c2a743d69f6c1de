/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_client_private.h - what the three files of the client share: grpc_client.c (attempts to
 * connect, transport), grpc_client_connection.c (one connection), grpc_client_call.c (one call). */
#ifndef KVRELAY_GRPC_CLIENT_PRIVATE_H
#define KVRELAY_GRPC_CLIENT_PRIVATE_H

#include "../backoff.h"
#include "../call_map.h"
#include "grpc_client.h"
#include "grpc_dial.h"
#include "grpc_link.h"
#include "grpc_message.h"

#define MAX_HEADER_LIST_BYTES 16384

typedef struct client client;
typedef struct client_call client_call;
TAILQ_HEAD(client_calls, client_call);

struct client_call {
  kvrelay_call_node node; /* first; in client.open until it is over */
  TAILQ_ENTRY(client_call) link;
  TAILQ_ENTRY(client_call) due; /* with a time limit, until it is over */
  client *client;
  const kvrelay_grpc_call_events *events;
  kvrelay_grpc_inbox inbox;
  kvrelay_grpc_outbox outbox;
  kvrelay_grpc_metadata metadata; /* of the answer's headers that are arriving */
  kvrelay_status status;          /* from trailers */
  uint64_t deadline_ns;
  uint32_t number;
  int32_t stream;
  int http_status;
  int metadata_err;
  bool grpc_content, has_status;
  bool got_headers; /* final ones */
  bool half_closed;
  bool deferred;   /* nghttp2 waits for a resume */
  bool wants_room; /* a send was refused */
  bool over;       /* ended or cancelled: its number is free, nothing is told any more */
};

enum client_state {
  CLIENT_WAITING = 1,
  CLIENT_DIALLING,
  CLIENT_HANDSHAKE,
  CLIENT_READY,
  CLIENT_CLOSED
};

struct client {
  kvrelay_client_transport base; /* first */
  kvrelay_grpc_client_config cfg;
  kvrelay_caller *caller;
  kvrelay_dial_target target;
  char peer_name[KVRELAY_DIAL_NAME_CAP]; /* whom the server's certificate has to name */
  kvrelay_grpc_loop loop;
  kvrelay_grpc_link link;    /* open while state is HANDSHAKE or READY */
  kvrelay_grpc_dial dial;    /* active while state is DIALLING */
  kvrelay_timer timer;       /* WAITING: next attempt; DIALLING: time limit */
  kvrelay_call_map open;     /* calls that are not over */
  struct client_calls calls; /* all, until their streams are closed */
  struct client_calls due;   /* those with a time limit, the next first */
  int state;                 /* enum client_state */
  uint64_t attempt_ns;       /* start of the last attempt */
  kvrelay_backoff backoff;
  uint64_t keepalive_ns, ping_at_ns;
  uint64_t stop_at_ns;      /* KVRELAY_TIME_NONE: not stopping */
  uint64_t goaway_until_ns; /* KVRELAY_TIME_NONE: the server did not say that it goes away */
  nghttp2_session_callbacks *callbacks;
  nghttp2_option *option;
  size_t first_len; /* of the server's first frame header, to tell what it speaks */
  bool ping_open;
};

static inline client *client_of(const kvrelay_transport *t) { return (client *)(uintptr_t)t; }
static inline bool client_stopping(const client *k) { return k->stop_at_ns != KVRELAY_TIME_NONE; }
static inline bool client_goaway(const client *k) {
  return k->goaway_until_ns != KVRELAY_TIME_NONE;
}
static inline bool client_has_link(const client *k) {
  return k->state == CLIENT_HANDSHAKE || k->state == CLIENT_READY;
}

/* ---- grpc_client.c ---- */

/* There is no connection (any more): tells it, and when the next attempt comes. */
void kvrelay_grpc_client_failed(client *k, int err, const char *text);

/* ---- grpc_client_connection.c ---- */

/* The callbacks and options of all sessions.  KVRELAY_TRANSPORT_ERR_MEMORY: what is there is freed
 * with the client. */
int kvrelay_grpc_client_callbacks(client *k);
/* Takes `fd`; false: no memory, and it is closed. */
bool kvrelay_grpc_client_link_open(client *k, int fd);

/* ---- grpc_client_call.c ---- */

/* What the calls of a session do when nghttp2 tells of headers and data, and when data may be sent.
 */
void kvrelay_grpc_client_call_callbacks(nghttp2_session_callbacks *callbacks);
/* As kvrelay_grpc_client_start; `message` not NULL: sends it and half-closes. */
int kvrelay_grpc_client_call_start(client *k, uint32_t number,
                                   const kvrelay_grpc_call_options *options,
                                   const kvrelay_iov *message);
void kvrelay_grpc_client_call_cancel(client *k, uint32_t number);
/* All headers of one block of the answer are there; `last`: the server ended its side with them. */
void kvrelay_grpc_client_call_headers(client_call *c, bool last);
/* The server ended its side of the stream. */
void kvrelay_grpc_client_call_finish(client_call *c);
/* Ends the calls whose time is over. */
void kvrelay_grpc_client_calls_expire(client *k, uint64_t now_ns);
/* Ends every call with UNAVAILABLE; then the streams may go, and with them, by `free`, the calls.
 */
void kvrelay_grpc_client_calls_fail(client *k, const char *text);
void kvrelay_grpc_client_calls_free(client *k);
/* NULL: that stream has none, or no longer. */
static inline client_call *kvrelay_grpc_client_call_of(nghttp2_session *session, int32_t stream) {
  return nghttp2_session_get_stream_user_data(session, stream);
}

#endif
