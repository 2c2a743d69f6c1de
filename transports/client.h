/* SPDX-License-Identifier: Apache-2.0 */
/* client.h - a kvrelay_consumer as the caller behind any client transport. */
#ifndef KVRELAY_CLIENT_H
#define KVRELAY_CLIENT_H

#include "transport.h"

/*
 *   kvrelay_client_config cfg = kvrelay_client_config_default(&consumer);
 *   kvrelay_client *client;
 *   if (kvrelay_client_open(&cfg, &client) < 0) return;
 *   kvrelay_grpc_client_open(&grpc_cfg, kvrelay_client_caller(client), &transport);
 *   kvrelay_client_attach(client, transport);
 *   kvrelay_transport *t = &transport->base;
 *   while (kvrelay_client_run(client, t->now_ns(t)) == KVRELAY_TRANSPORT_OK)
 *     t->run_once(t, until(kvrelay_client_deadline_ns(client)));
 */
typedef struct kvrelay_client kvrelay_client;

typedef struct kvrelay_client_config {
  kvrelay_consumer *consumer; /* must outlive the client */
  size_t max_message_bytes;   /* a longer message counts as broken */
  size_t max_arena_bytes;     /* for the lists of one decoded message; beyond: broken */
  size_t max_replica_bytes;   /* of all replicas together; beyond: the pool has to wait */
  uint64_t info_timeout_ns;   /* GetRelayInfo without its end by then is cancelled and counts as
                                 DEADLINE_EXCEEDED; streams have no such limit */
  /* Tells what the transport said of the connection; `text` is valid during the call.  May be NULL.
   */
  void (*connection)(void *context, int state, int err, const char *text, uint64_t retry_ns);
  void *context;
} kvrelay_client_config;

typedef struct kvrelay_client_stats {
  int connection;            /* enum kvrelay_connection_state, 0 before the first report */
  uint64_t connects, losses; /* connections that stood, and that went away */
  uint64_t calls, messages, bytes;
  size_t open_calls;                   /* now */
  uint64_t broken;                     /* messages that did not decode or were above a bound */
  uint64_t replicas, replicas_refused; /* given, and not given for want of memory */
  size_t replica_bytes;                /* now */
} kvrelay_client_stats;

/* 8 MiB, 64 MiB, 1 GiB: a relay may announce 65 536 pools of 128 MiB each; 5 s. */
kvrelay_client_config kvrelay_client_config_default(kvrelay_consumer *consumer);
/* KVRELAY_TRANSPORT_OK, or _ERR_ARG, _ERR_MEMORY. */
int kvrelay_client_open(const kvrelay_client_config *cfg, kvrelay_client **out);
/* What a client transport wants. */
kvrelay_caller *kvrelay_client_caller(kvrelay_client *client);
/* The transport that was opened with this caller; before the first run. */
void kvrelay_client_attach(kvrelay_client *client, kvrelay_client_transport *transport);
/*
 * Carries out what the consumer wants; to be called after each turn of the loop.
 * KVRELAY_TRANSPORT_OK, or KVRELAY_TRANSPORT_ERR_PROTOCOL for good once the relay turned out to
 * speak another contract; the transport is then stopped.
 */
int kvrelay_client_run(kvrelay_client *client, uint64_t now_ns);
/* When run wants to be called next, KVRELAY_TIME_NONE = after the next event of the transport. */
uint64_t kvrelay_client_deadline_ns(const kvrelay_client *client);
kvrelay_client_stats kvrelay_client_stats_get(const kvrelay_client *client);
/* Frees everything, replicas too: the consumer may only be initialised anew.  After the transport
 * is closed. */
void kvrelay_client_close(kvrelay_client *client);

#endif
