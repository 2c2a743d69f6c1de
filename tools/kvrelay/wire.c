/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <string.h>

#include "grpc/grpc_client.h"
#include "tcp/tcp_client.h"

/* Of the whole program, until it ends. */
static kvrelay_tls *tls;
static const char *tls_name;

bool wire_secure(const char *ca_file, const char *cert_file, const char *key_file,
                 const char *server_name, char why[KVRELAY_TLS_WHY_CAP]) {
  const kvrelay_tls_config cfg = {.cert_file = cert_file, .key_file = key_file, .ca_file = ca_file};
  tls_name = server_name;
  return kvrelay_tls_open(&cfg, &tls, why) == KVRELAY_TRANSPORT_OK;
}

int wire_open(const char *target, kvrelay_caller *caller, kvrelay_client_transport **out) {
  static const char raw[] = "raw://";
  kvrelay_security *security = tls != NULL ? kvrelay_tls_security(tls) : NULL;
  if (strncmp(target, raw, sizeof raw - 1) == 0) {
    kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
    cfg.target = target + sizeof raw - 1;
    cfg.security = security;
    cfg.server_name = tls_name;
    return kvrelay_tcp_client_open(&cfg, caller, out);
  }
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  cfg.security = security;
  cfg.server_name = tls_name;
  return kvrelay_grpc_client_open(&cfg, caller, out);
}
