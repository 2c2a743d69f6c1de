/* SPDX-License-Identifier: Apache-2.0 */
/* wire.h - the transport that a target names. */
#ifndef KVRELAY_WIRE_H
#define KVRELAY_WIRE_H

#include "tls/tls.h"

/* From now on all goes over TLS, as kvrelay_tls_config and kvrelay_grpc_client_config have these;
 * each may be NULL.  `server_name` must outlive all that is opened.  False: `why` is the reason. */
bool wire_secure(const char *ca_file, const char *cert_file, const char *key_file,
                 const char *server_name, char why[KVRELAY_TLS_WHY_CAP]);
/* Behind "raw://" the raw transport, else gRPC; what follows is as dial.h has it.  `target` is only
 * read during the call, `caller` must outlive the transport.  KVRELAY_TRANSPORT_OK, or what
 * kvrelay_grpc_client_open and kvrelay_tcp_client_open say; then nothing is open. */
int wire_open(const char *target, kvrelay_caller *caller, kvrelay_client_transport **out);

#endif
