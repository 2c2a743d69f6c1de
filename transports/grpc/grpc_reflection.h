/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_reflection.h - grpc.reflection: tools ask for the descriptors of what a server serves. */
#ifndef KVRELAY_GRPC_REFLECTION_H
#define KVRELAY_GRPC_REFLECTION_H

#include "../transport.h"

/* The same service under both names it goes by. */
#define KVRELAY_GRPC_REFLECTION_NAME "grpc.reflection.v1.ServerReflection"
#define KVRELAY_GRPC_REFLECTION_OLD_NAME "grpc.reflection.v1alpha.ServerReflection"
#define KVRELAY_GRPC_REFLECTION_CALLS 64 /* open calls; the next is RESOURCE_EXHAUSTED */
/* Bytes of questions of one call that may wait for their answers to be read; one question more may
 * come on top.  Then the call ends with RESOURCE_EXHAUSTED. */
#define KVRELAY_GRPC_REFLECTION_WAITING ((size_t)65536)

/*
 * A service of transport.h for a kvrelay_mux, under both names.  It answers from the descriptors
 * that were embedded when the library was built: those of proto/.
 */
typedef struct kvrelay_grpc_reflection kvrelay_grpc_reflection;

/* `services` are the full names that a server lists; lent until close.  KVRELAY_TRANSPORT_OK, or
 * _ERR_MEMORY. */
int kvrelay_grpc_reflection_open(const char *const *services, size_t services_len,
                                 kvrelay_grpc_reflection **out);
kvrelay_service *kvrelay_grpc_reflection_base(kvrelay_grpc_reflection *reflection);
/* Calls end with OK as soon as what was asked is answered. */
void kvrelay_grpc_reflection_shutdown(kvrelay_grpc_reflection *reflection);
/* After the transports are closed.  NULL is harmless. */
void kvrelay_grpc_reflection_close(kvrelay_grpc_reflection *reflection);

#endif
