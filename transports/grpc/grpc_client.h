/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_client.h - a caller of transport.h as a gRPC client with one connection. */
#ifndef KVRELAY_GRPC_CLIENT_H
#define KVRELAY_GRPC_CLIENT_H

#include "../secure.h"
#include "grpc_metadata.h"

struct event_base;

typedef struct kvrelay_grpc_client_config {
  /*
   * "host:port", "[::1]:port", "dns:///host:port", "ipv4:a:port,b:port", "ipv6:[a]:port,[b]:port",
   * "unix:path", "unix-abstract:name"; only read during open. Names are resolved again for each
   * connection.
   */
  const char *target;
  struct event_base *base;    /* NULL: one of its own; must outlive the client */
  kvrelay_security *security; /* a client's; NULL: plaintext; must outlive the client */
  /* With `security`: whom the server's certificate has to name, and what requests are addressed to,
   * when it is not the target's host; only read during open.  NULL: the host, which "unix:" and a
   * list of several addresses do not have: these need it. */
  const char *server_name;
  const char *proxy;            /* an HTTP proxy on the way, as proxy.h has it; NULL: none */
  const char *no_proxy;         /* what is reached without it, the same */
  size_t max_message_bytes;     /* one message, either way; a longer answer ends its call with
                                   RESOURCE_EXHAUSTED */
  uint32_t stream_window_bytes; /* what the server may send unread, per call; 65 535 .. 2^31 - 1 */
  uint32_t connection_window_bytes; /* the same for all calls together */
  uint32_t max_calls;               /* open at once, ≥ 1 */
  uint64_t connect_timeout_ns;      /* from the first attempt to the server's SETTINGS */
  uint64_t
      backoff_first_ns; /* between the starts of two attempts, × 1.6 up to backoff_max_ns, ± 20 % */
  uint64_t backoff_max_ns;
  uint64_t keepalive_interval_ns; /* between PINGs while calls are open; KVRELAY_TIME_NONE: none */
  uint64_t keepalive_timeout_ns;  /* without an answer the connection is broken */
  uint64_t goaway_grace_ns;       /* how long calls of a connection that takes no more may go on */
  uint64_t jitter_seed;           /* differs from client to client */
  bool accept_compressed;         /* offers the encodings of grpc_codec.h; what becomes longer than
                                     max_message_bytes ends its call with RESOURCE_EXHAUSTED */
} kvrelay_grpc_client_config;

/* Everything but `target`; the seed is taken from the clock, the proxy from HTTPS_PROXY and
 * NO_PROXY of the environment, or the same in small letters. */
kvrelay_grpc_client_config kvrelay_grpc_client_config_default(void);
/*
 * Connects in the background, from the first run_once on, and again whenever the connection is
 * lost.  `caller` must outlive the transport and is only called from inside run_once; it may use
 * the transport from there, except `close`.  `close` tells it nothing.  KVRELAY_TRANSPORT_OK, or
 * _ERR_ARG, _ERR_ADDRESS (the target or the proxy does not parse), _ERR_MEMORY, _ERR_SYSTEM
 * (errno); then nothing is left open.
 */
int kvrelay_grpc_client_open(const kvrelay_grpc_client_config *cfg, kvrelay_caller *caller,
                             kvrelay_client_transport **out);

/*
 * ---- calls of any shape ----
 *
 * Beside the `call` of transport.h, which sends one message and half-closes: any number of request
 * messages, metadata either way, a time limit.  `client` below is a transport opened by
 * kvrelay_grpc_client_open; messages and end are reported to its caller as for every other call,
 * and its `cancel` ends them.
 */

/* What such a call reports besides; `self` is the client's caller. */
typedef struct kvrelay_grpc_call_events {
  /* Metadata of the answer, valid during the call: with `trailing` false before `admitted`, with
   * true before `end`; not when it is empty.  A list that is too long or does not decode ends the
   * call with RESOURCE_EXHAUSTED or INTERNAL.  NULL: it is of no interest. */
  void (*metadata)(kvrelay_caller *self, uint32_t call, bool trailing,
                   const kvrelay_grpc_metadata *list, uint64_t now_ns);
  /* There is room again after a send that was refused with KVRELAY_TRANSPORT_ERR_LIMIT.  May be
   * NULL. */
  void (*room)(kvrelay_caller *self, uint32_t call, uint64_t now_ns);
} kvrelay_grpc_call_events;

typedef struct kvrelay_grpc_call_options {
  const char *path;                       /* "/package.Service/Method" */
  const kvrelay_grpc_metadata *metadata;  /* of the request; NULL: none; only read during start */
  const kvrelay_grpc_call_events *events; /* NULL: none; must outlive the call */
  uint64_t timeout_ns; /* told to the server, and after it the call ends with DEADLINE_EXCEEDED
                          whatever the server does; KVRELAY_TIME_NONE: no limit */
} kvrelay_grpc_call_options;

/*
 * Opens a call without a message.  `call` is its number, not 0.  KVRELAY_TRANSPORT_OK, or, with
 * nothing sent, _ERR_ARG (number in use, no path), _ERR_CONNECT (not ready: wait for the
 * connection), _ERR_LIMIT (the server's or our own bound of open calls: wait for an end),
 * _ERR_MEMORY.
 */
int kvrelay_grpc_client_start(kvrelay_client_transport *client, uint32_t call,
                              const kvrelay_grpc_call_options *options);
/*
 * Sends one more message, which is copied.  KVRELAY_TRANSPORT_OK, or, with nothing sent, _ERR_ARG
 * (no such call, or half-closed; longer than max_message_bytes), _ERR_LIMIT (the messages before it
 * wait: try again when `room` is reported), _ERR_MEMORY.
 */
int kvrelay_grpc_client_send(kvrelay_client_transport *client, uint32_t call, const uint8_t *bytes,
                             size_t len);
/* The last message was sent.  KVRELAY_TRANSPORT_OK, or _ERR_ARG (no such call, or done already). */
int kvrelay_grpc_client_half_close(kvrelay_client_transport *client, uint32_t call);

#endif
