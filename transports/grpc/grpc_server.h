/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_server.h - a service of transport.h as a gRPC server. */
#ifndef KVRELAY_GRPC_SERVER_H
#define KVRELAY_GRPC_SERVER_H

#include "../transport_log.h"
#include "grpc_codec.h"

struct event_base;

typedef struct kvrelay_grpc_server_config {
  const char *bind; /* "127.0.0.1:5561", "[::1]:0", "unix:/run/relay.sock"; only read during open */
  struct event_base *base;    /* NULL: one of its own; must outlive the server */
  kvrelay_security *security; /* a server's; NULL: plaintext; must outlive the server */
  size_t max_request_bytes;   /* one request message */
  size_t max_message_bytes;   /* one response message; a longer one ends its call with
                                 RESOURCE_EXHAUSTED */
  size_t output_threshold;    /* bytes of messages that wait in a connection's calls from which on
                                 nothing is produced for it, ≥ 4: one message more at most.  A quarter
                                 of it and one frame wait for the socket besides: more at once falls
                                 out of the cache before it is sent.  Parts that stay with the service
                                 do not count. */
  uint32_t max_connections;   /* ≥ 1 */
  uint32_t max_connections_per_peer; /* from one IP address, ≥ 1 */
  uint32_t max_concurrent_streams;   /* of one connection, ≥ 1 */
  uint64_t
      keepalive_interval_ns;     /* between PINGs, also while data flows; KVRELAY_TIME_NONE: none */
  uint64_t keepalive_timeout_ns; /* without an answer the connection is dropped */
  uint64_t peer_ping_interval_ns;       /* PINGs of a peer that come faster, three times: GOAWAY
                                           too_many_pings */
  uint64_t handshake_timeout_ns;        /* from accept to the first call, TLS included */
  uint64_t idle_timeout_ns;             /* without calls: GOAWAY */
  uint64_t max_connection_age_ns;       /* ± 10 %, then GOAWAY; KVRELAY_TIME_NONE: no limit */
  uint64_t max_connection_age_grace_ns; /* for the streams of such a connection */
  /* Answers may be compressed: bits 1 << enum kvrelay_grpc_encoding.  Of those that the client
   * lists, the highest is taken.  0, the default: none is compressed.  Requests may use whatever is
   * built in. */
  unsigned response_encodings;
  bool request_metadata; /* keep it for kvrelay_grpc_server_metadata; false, the default: ignore it
                          */
  /* Takes connections of the raw transport, so that one listener serves both:
   * kvrelay_tcp_server_adopt.  In plaintext these are the ones that begin like it, and nothing is
   * read yet: the first word is then the client's, up to `handshake_timeout_ns`.  With `security`
   * they are those that have agreed on it (ALPN), and `secure` is the session.  NULL: they are
   * refused. */
  void (*raw)(void *context, int fd, const kvrelay_address *peer, kvrelay_secure_session *secure);
  void *raw_context;
  /* What operators should know; `level` is one of transport_log.h, texts are terminated and
   * printable, valid during the call.  May be NULL. */
  void (*log)(void *context, int level, const char *event, const char *text);
  void *log_context;
} kvrelay_grpc_server_config;

/* Everything but `bind` and `log`. */
kvrelay_grpc_server_config kvrelay_grpc_server_config_default(void);
/*
 * Binds and listens, which may ask the name service if `bind` holds a name; calls are taken from
 * the first run_once on.  `service` must outlive the transport.  KVRELAY_TRANSPORT_OK, or _ERR_ARG,
 * _ERR_ADDRESS, _ERR_BIND (errno), _ERR_MEMORY, _ERR_SYSTEM (errno); then nothing is left open.
 */
int kvrelay_grpc_server_open(const kvrelay_grpc_server_config *cfg, kvrelay_service *service,
                             kvrelay_transport **out);
/* The port it listens on; 0 for a unix socket. */
uint16_t kvrelay_grpc_server_port(const kvrelay_transport *t);
/* The address it listens on, as text that a client takes; cut to `cap`. */
void kvrelay_grpc_server_address(const kvrelay_transport *t, char *out, size_t cap);
/* Open connections. */
uint32_t kvrelay_grpc_server_connections(const kvrelay_transport *t);

/*
 * Metadata of a call, for services that know they run behind this transport.  `call` is the one
 * that `open` was given, from there until `close`.
 */

/*
 * The next value of the request's metadata of this name; begin with `*cursor` 0.  False when there
 * is none left, always without `request_metadata`.  Values of "-bin" names are decoded.  Valid
 * until `close`.
 */
bool kvrelay_grpc_server_metadata(const kvrelay_call *call, const char *name, size_t *cursor,
                                  kvrelay_iov *value);
/*
 * Adds to the headers before the first message, or to the trailers with the status: names, values
 * and bounds as kvrelay_grpc_metadata_add.  KVRELAY_TRANSPORT_OK, or, with nothing changed,
 * _ERR_ARG (also a call of another transport), _ERR_LIMIT, _ERR_MEMORY, _CLOSED (these headers are
 * sent).
 */
int kvrelay_grpc_server_add_initial(kvrelay_call *call, const char *name, const void *value,
                                    size_t len);
int kvrelay_grpc_server_add_trailing(kvrelay_call *call, const char *name, const void *value,
                                     size_t len);
/*
 * Whether messages that are pulled from now on, the one being pulled included, are compressed:
 * as long as nothing else is said, all are for which `response_encodings` and the client allow it.
 */
void kvrelay_grpc_server_compress(kvrelay_call *call, bool on);
/* Inside `message`: this message came compressed. */
bool kvrelay_grpc_server_compressed(const kvrelay_call *call);

#endif
