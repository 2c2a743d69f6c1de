/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_health.h - grpc.health.v1.Health: what probes and clients ask before they call. */
#ifndef KVRELAY_GRPC_HEALTH_H
#define KVRELAY_GRPC_HEALTH_H

#include "../transport.h"

#define KVRELAY_GRPC_HEALTH_NAME "grpc.health.v1.Health"
#define KVRELAY_GRPC_HEALTH_SERVICES 16  /* names with a status, "" among them */
#define KVRELAY_GRPC_HEALTH_NAME_MAX 128 /* bytes of such a name */
#define KVRELAY_GRPC_HEALTH_WATCHERS 64  /* open Watch calls; the next is RESOURCE_EXHAUSTED */

/* Numbers of the protocol. */
enum kvrelay_grpc_health_status {
  KVRELAY_GRPC_HEALTH_UNKNOWN = 0,
  KVRELAY_GRPC_HEALTH_SERVING = 1,
  KVRELAY_GRPC_HEALTH_NOT_SERVING = 2
};

/*
 * A service of transport.h for a kvrelay_mux, or alone behind a listener for probes.  Watchers hear
 * every status that lasts until they are read from; whoever reads slowly gets the newest.
 */
typedef struct kvrelay_grpc_health kvrelay_grpc_health;

/* Knows one name, "" (the server as a whole), which is NOT_SERVING.  KVRELAY_TRANSPORT_OK, or
 * _ERR_MEMORY. */
int kvrelay_grpc_health_open(kvrelay_grpc_health **out);
kvrelay_service *kvrelay_grpc_health_base(kvrelay_grpc_health *health);
/* Tells how a service is from now on.  KVRELAY_TRANSPORT_OK, or with nothing changed _ERR_ARG
 * (status out of range, name too long or no UTF-8), _ERR_LIMIT (a name too many). */
int kvrelay_grpc_health_set(kvrelay_grpc_health *health, const char *service, int status);
/* Everything is NOT_SERVING for good; Watch calls end with OK once they have been told. */
void kvrelay_grpc_health_shutdown(kvrelay_grpc_health *health);
/* After the transports are closed.  NULL is harmless. */
void kvrelay_grpc_health_close(kvrelay_grpc_health *health);

#endif
