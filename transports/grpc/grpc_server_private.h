/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_server_private.h - what the three files of the server share: grpc_server.c (socket,
 * transport), grpc_connection.c (one connection), grpc_call.c (one call). */
#ifndef KVRELAY_GRPC_SERVER_PRIVATE_H
#define KVRELAY_GRPC_SERVER_PRIVATE_H

#include "grpc_link.h"
#include "grpc_message.h"
#include "grpc_metadata.h"
#include "grpc_pool.h"
#include "grpc_server.h"

#define MAX_HEADER_LIST_BYTES ((size_t)16384)
/* Of the output threshold: frames beyond that wait in their calls, not for the socket. */
#define SOCKET_SHARE 4

typedef struct server server;
typedef struct connection connection;
typedef struct server_call server_call;
TAILQ_HEAD(call_list, server_call);
TAILQ_HEAD(connection_list, connection);

enum request_method { METHOD_OTHER = 0, METHOD_POST, METHOD_HEAD };

struct server_call {
  kvrelay_call base;
  connection *conn;
  void *handle;
  TAILQ_ENTRY(server_call) link;
  TAILQ_ENTRY(server_call) woken;
  kvrelay_grpc_inbox inbox;
  kvrelay_grpc_outbox outbox;
  kvrelay_grpc_metadata request, initial, trailing;
  nghttp2_rcbuf *path;
  kvrelay_timer deadline;
  uint64_t timeout_ns; /* as asked for */
  size_t header_bytes;
  int metadata_err;        /* why the request's metadata is not whole */
  kvrelay_status status;   /* valid once ended */
  const char *http_status; /* not NULL: to be answered so when the request has ended */
  const char *explanation; /* what is left to say with it; NULL: no body */
  size_t held;             /* of the connection's */
  int32_t stream;
  uint8_t content;  /* enum kvrelay_grpc_content */
  uint8_t encoding; /* of messages to send, enum kvrelay_grpc_encoding */
  uint8_t method;   /* enum request_method */
  bool bad_timeout;
  bool bad_encoding; /* of the request */
  bool plain;        /* the service wants no compression now */
  bool accepted;     /* the service knows it and has not been told of its end */
  bool headers_sent; /* the data provider is in charge */
  bool deferred;     /* nghttp2 waits for a resume */
  bool starved;      /* has not pulled because the connection holds too much */
  bool ended;        /* the status is known */
  bool is_woken;
};

enum drain_state { DRAIN_NONE = 0, DRAIN_NOTICE, DRAIN_FINAL };

struct connection {
  kvrelay_grpc_link link; /* first */
  server *server;
  TAILQ_ENTRY(connection) entry;
  struct call_list calls;
  uint32_t calls_count;
  size_t held; /* bytes of messages that wait in the calls, copies of its own */
  uint32_t idle_frames;
  uint32_t resets;      /* of streams by the peer, less what it earned back until resets_at_ns */
  uint32_t frame_left;  /* of the payload that is coming in */
  int32_t reset_stream; /* the highest that we reset; 0: none */
  uint64_t opened_ns, idle_since_ns, resets_at_ns;
  uint64_t ping_at_ns;   /* next keepalive PING, or when its answer is overdue */
  uint64_t peer_ping_ns; /* last PING of the peer since we sent something; 0: none */
  uint64_t drain_ping_ns, drain_until_ns, expires_ns;
  kvrelay_address peer;
  uint8_t head[9]; /* of the frame that is coming in */
  uint8_t head_len;
  uint8_t preface_len; /* bytes of the preface that came */
  uint8_t ping_strikes;
  uint8_t drain; /* enum drain_state */
  bool ping_open;
  bool saw_call;
  bool abused;    /* by the peer, which is told so and not listened to */
  bool peer_left; /* it said GOAWAY, in order */
};

struct server {
  kvrelay_transport base; /* first */
  kvrelay_grpc_server_config cfg;
  kvrelay_service *service;
  kvrelay_grpc_loop loop;
  struct connection_list connections;
  struct call_list woken;
  uint32_t connections_count;
  uint64_t jitter; /* state of a small generator */
  uint64_t refused_connections;
  struct event *acceptable;
  kvrelay_timer accept_again;
  kvrelay_grpc_pool pool; /* of all sessions and calls */
  nghttp2_session_callbacks *callbacks;
  nghttp2_option *option;
  kvrelay_address address;
  int fd;
  bool stopping;
};

/* ---- grpc_server.c ---- */

void kvrelay_grpc_server_say(const server *s, int level, const char *event, const connection *conn,
                             const char *text);

/* ---- grpc_connection.c ---- */

/* The callbacks and options of all sessions.  KVRELAY_TRANSPORT_ERR_MEMORY: what is there is freed
 * with the server. */
int kvrelay_grpc_connection_callbacks(server *s);
/* Takes `fd`, also on failure, which is logged. */
void kvrelay_grpc_connection_open(server *s, int fd, const kvrelay_address *peer);
void kvrelay_grpc_connection_free(connection *conn);
void kvrelay_grpc_connection_drain(connection *conn, uint64_t grace_ns);

/* ---- grpc_call.c ---- */

/* What the calls of a session do when nghttp2 tells of headers and data, and when data may be sent.
 */
void kvrelay_grpc_call_callbacks(nghttp2_session_callbacks *callbacks);
void kvrelay_grpc_call_free(server_call *c);
/* All headers of a request are there. */
void kvrelay_grpc_call_begin(server_call *c);
/* The last message of a request is there. */
void kvrelay_grpc_call_half_close(server_call *c);
/* Something changed for this call: headers may be due, or there is something to pull. */
void kvrelay_grpc_call_advance(server_call *c);
/* Goes on with the calls that the service woke; for the loop. */
void kvrelay_grpc_calls_woken(void *server);
/* NULL: that stream has none, or no longer. */
static inline server_call *kvrelay_grpc_call_of(nghttp2_session *session, int32_t stream) {
  return nghttp2_session_get_stream_user_data(session, stream);
}

#endif
