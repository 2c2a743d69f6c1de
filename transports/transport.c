/* SPDX-License-Identifier: Apache-2.0 */

#include "transport.h"

#include <stdio.h>
#include <time.h>

uint64_t kvrelay_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

const char *kvrelay_transport_strerror(int err) {
  switch (err) {
  case KVRELAY_TRANSPORT_OK:
    return "fine";
  case KVRELAY_TRANSPORT_ERR_ARG:
    return "an argument breaks the caller's promise";
  case KVRELAY_TRANSPORT_ERR_MEMORY:
    return "out of memory";
  case KVRELAY_TRANSPORT_ERR_ADDRESS:
    return "not an address (host:port, with its port; [::1]:port; unix:path), or it does not "
           "resolve";
  case KVRELAY_TRANSPORT_ERR_BIND:
    return "the address cannot be bound";
  case KVRELAY_TRANSPORT_ERR_CONNECT:
    return "not connected";
  case KVRELAY_TRANSPORT_ERR_PROTOCOL:
    return "the peer speaks something else";
  case KVRELAY_TRANSPORT_ERR_LIMIT:
    return "a configured bound was reached";
  case KVRELAY_TRANSPORT_ERR_SYSTEM:
    return "the system refused it";
  case KVRELAY_TRANSPORT_CLOSED:
    return "stopped, nothing left to run";
  case KVRELAY_TRANSPORT_ERR_SECURITY:
    return "one side does not trust the other";
  default:
    return "unknown error";
  }
}

int kvrelay_refuse(kvrelay_status *status, int32_t grpc, const char *text) {
  status->grpc = grpc;
  status->reason = KVRELAY_REASON_NONE;
  status->retry_ns = 0;
  snprintf(status->text, sizeof status->text, "%s", text);
  return KVRELAY_ERR_REFUSED;
}
