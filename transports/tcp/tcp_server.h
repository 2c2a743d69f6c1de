/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_server.h - a service of transport.h behind raw frames on TCP, with nothing but POSIX sockets.
 */
#ifndef KVRELAY_TCP_SERVER_H
#define KVRELAY_TCP_SERVER_H

#include "../transport_log.h"

typedef struct kvrelay_tcp_server_config {
  /* "127.0.0.1:5562", "[::1]:0", "unix:/run/relay.sock"; only read during open.  NULL: no listener,
   * connections come by kvrelay_tcp_server_adopt. */
  const char *bind;
  /* A server's; NULL: plaintext; must outlive the server.  A client that names protocols (ALPN) has
   * to name "kvrelay-raw/1". */
  kvrelay_security *security;
  uint32_t max_request_bytes;        /* 1 024 .. 2^31 - 1 */
  uint16_t max_streams;              /* of one connection, ≥ 1 */
  uint32_t max_connections;          /* ≥ 1 */
  uint32_t max_connections_per_peer; /* from one IP address, ≥ 1 */
  uint64_t preface_timeout_ns;       /* from accept, the handshake of TLS included */
  uint64_t keepalive_interval_ns;    /* of silence, then a PING; KVRELAY_TIME_NONE: never */
  uint64_t keepalive_timeout_ns;     /* without an answer the connection is dropped */
  uint64_t peer_ping_interval_ns;    /* PINGs of a peer that come faster, twice: GOAWAY */
  uint64_t idle_timeout_ns;          /* without streams: GOAWAY */
  /* What operators should know; `level` is one of transport_log.h, texts are terminated and
   * printable, valid during the call.  May be NULL. */
  void (*log)(void *context, int level, const char *event, const char *text);
  void *log_context;
} kvrelay_tcp_server_config;

/* Everything but `bind` and `log`. */
kvrelay_tcp_server_config kvrelay_tcp_server_config_default(void);
/*
 * Binds and listens, which may ask the name service if `bind` holds a name.  `service` must outlive
 * the transport.  Paths of calls are those of the contract's methods; a method number without one
 * is opened with an empty path, for the service to refuse.  KVRELAY_TRANSPORT_OK, or _ERR_ARG,
 * _ERR_ADDRESS, _ERR_BIND (errno), _ERR_MEMORY, _ERR_SYSTEM (errno); then nothing is left open.
 */
int kvrelay_tcp_server_open(const kvrelay_tcp_server_config *cfg, kvrelay_service *service,
                            kvrelay_transport **out);
/* Serves a connected socket whose first bytes are still unread: of somebody else's listener, which
 * tells protocols apart by peeking at the first byte, or by what a session on this socket has
 * agreed on (ALPN).  `secure` is that session, NULL: the server's `security` makes one, if there is
 * one.  Takes both, also when a limit refuses them. */
void kvrelay_tcp_server_adopt(kvrelay_transport *t, int fd, const kvrelay_address *peer,
                              kvrelay_secure_session *secure);
/* The address it listens on, as text that a client takes; cut to `cap`. */
void kvrelay_tcp_server_address(const kvrelay_transport *t, char *out, size_t cap);
/* Open connections. */
uint32_t kvrelay_tcp_server_connections(const kvrelay_transport *t);
/*
 * For a program with a loop of its own: run_once with time-out 0 is due when this descriptor is
 * readable (-1: the system has none such, then only run_once itself waits), ...
 */
int kvrelay_tcp_server_fd(const kvrelay_transport *t);
/* ... and at this time, which changes with every run_once and every wake of a call; 0: now. */
uint64_t kvrelay_tcp_server_deadline_ns(const kvrelay_transport *t);

#endif
