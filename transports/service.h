/* SPDX-License-Identifier: Apache-2.0 */
/* service.h - a kvrelay_relay as the service behind any server transport. */
#ifndef KVRELAY_SERVICE_H
#define KVRELAY_SERVICE_H

#include "transport.h"

/*
 *   kvrelay_relay_service_config cfg = kvrelay_relay_service_config_default(&relay);
 *   kvrelay_relay_service *service;
 *   if (kvrelay_relay_service_open(&cfg, &service) < 0) return;
 *   kvrelay_grpc_server_open(&server_cfg, kvrelay_relay_service_base(service), &transport);
 *   for (;;) {
 *     transport->run_once(transport, until(kvrelay_relay_deadline_ns(&relay)));
 *     feed_events(&relay);
 *     kvrelay_relay_service_poll(service, transport->now_ns(transport)); // wakes calls
 *   }
 */
typedef struct kvrelay_relay_service kvrelay_relay_service;

typedef struct kvrelay_relay_service_config {
  kvrelay_relay *relay; /* must outlive the service */
  /* Wall clock, microseconds since 1970, read at each poll; what goes into a filter frame is moved
   * on from there by the transports' clock. */
  uint64_t (*wall_us)(void *context);
  void *wall_context;
  size_t max_message_bytes; /* a message beyond it ends its call with RESOURCE_LIMIT */
} kvrelay_relay_service_config;

typedef struct kvrelay_relay_service_stats {
  uint64_t requests; /* calls of a known method */
  uint64_t unknown_methods;
  uint64_t undecodable;     /* requests that did not decode */
  uint64_t cardinality;     /* calls with no request message, or several */
  uint64_t messages, bytes; /* sent, or at least handed to a transport */
  uint64_t oversized;       /* calls that ended because of max_message_bytes */
  /* Size of the newest message of these planes that was encoded, or was too large for it. */
  size_t catalog_bytes, readiness_bytes;
} kvrelay_relay_service_stats;

/* The system's clock and 8 MiB. */
kvrelay_relay_service_config kvrelay_relay_service_config_default(kvrelay_relay *relay);
/* KVRELAY_TRANSPORT_OK, or _ERR_ARG, _ERR_MEMORY. */
int kvrelay_relay_service_open(const kvrelay_relay_service_config *cfg,
                               kvrelay_relay_service **out);
/* What a server transport wants.  Several transports may share one service, in one thread. */
kvrelay_service *kvrelay_relay_service_base(kvrelay_relay_service *service);
/* Ticks the relay, reads the wall clock and wakes every call that has become worth pulling.  To be
 * called after each turn of the loop and whenever the relay was given something. */
void kvrelay_relay_service_poll(kvrelay_relay_service *service, uint64_t now_ns);
kvrelay_relay_service_stats kvrelay_relay_service_stats_get(const kvrelay_relay_service *service);
/* After the transports are closed. */
void kvrelay_relay_service_close(kvrelay_relay_service *service);

#endif
