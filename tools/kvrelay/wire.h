/* SPDX-License-Identifier: Apache-2.0 */
/* wire.h - the transport that a target names. */
#ifndef KVRELAY_WIRE_H
#define KVRELAY_WIRE_H

#include "transport.h"

/* Behind "raw://" the raw transport, else gRPC; what follows is as dial.h has it.  `target` is only
 * read during the call, `caller` must outlive the transport.  KVRELAY_TRANSPORT_OK, or what
 * kvrelay_grpc_client_open and kvrelay_tcp_client_open say; then nothing is open. */
int wire_open(const char *target, kvrelay_caller *caller, kvrelay_client_transport **out);

#endif
