/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <string.h>

#include "grpc/grpc_client.h"
#include "tcp/tcp_client.h"

int wire_open(const char *target, kvrelay_caller *caller, kvrelay_client_transport **out) {
  static const char raw[] = "raw://";
  if (strncmp(target, raw, sizeof raw - 1) == 0) {
    kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
    cfg.target = target + sizeof raw - 1;
    return kvrelay_tcp_client_open(&cfg, caller, out);
  }
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  return kvrelay_grpc_client_open(&cfg, caller, out);
}
