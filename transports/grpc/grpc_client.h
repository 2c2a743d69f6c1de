/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_client.h - a caller of transport.h as a plaintext gRPC client with one connection. */
#ifndef KVRELAY_GRPC_CLIENT_H
#define KVRELAY_GRPC_CLIENT_H

#include "../transport.h"

struct event_base;

typedef struct kvrelay_grpc_client_config {
  /*
   * "host:port", "[::1]:port", "dns:///host:port", "ipv4:a:port,b:port", "ipv6:[a]:port,[b]:port",
   * "unix:path"; only read during open. Names are resolved again for each connection.
   */
  const char *target;
  struct event_base *base;      /* NULL: one of its own; must outlive the client */
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
  uint64_t jitter_seed;           /* differs from client to client */
} kvrelay_grpc_client_config;

/* Everything but `target`; the seed is taken from the clock. */
kvrelay_grpc_client_config kvrelay_grpc_client_config_default(void);
/*
 * Connects in the background, from the first run_once on, and again whenever the connection is
 * lost.  `caller` must outlive the transport and is only called from inside run_once; it may use
 * the transport from there, except `close`.  `close` tells it nothing.  KVRELAY_TRANSPORT_OK, or
 * _ERR_ARG, _ERR_ADDRESS (the target does not parse), _ERR_MEMORY, _ERR_SYSTEM (errno); then
 * nothing is left open.
 */
int kvrelay_grpc_client_open(const kvrelay_grpc_client_config *cfg, kvrelay_caller *caller,
                             kvrelay_client_transport **out);

#endif
