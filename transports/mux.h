/* SPDX-License-Identifier: Apache-2.0 */
/* mux.h - several services behind one server: each call goes to the one that its path names. */
#ifndef KVRELAY_MUX_H
#define KVRELAY_MUX_H

#include "transport.h"

#define KVRELAY_MUX_CAP 8

/*
 *   kvrelay_mux mux;
 *   kvrelay_mux_init(&mux, kvrelay_relay_service_base(relay));
 *   kvrelay_mux_add(&mux, "grpc.health.v1.Health", kvrelay_health_base(health));
 *   kvrelay_grpc_server_open(&cfg, &mux.base, &transport);
 *
 * Must outlive the transports; fields are private but for `base`.
 */
typedef struct kvrelay_mux {
  kvrelay_service base;
  kvrelay_service *rest;
  struct {
    const char *name;
    kvrelay_service *service;
  } routes_[KVRELAY_MUX_CAP];
  size_t len_;
} kvrelay_mux;

/* `rest` gets the calls of all services that are not added; NULL: they are UNIMPLEMENTED. */
void kvrelay_mux_init(kvrelay_mux *mux, kvrelay_service *rest);
/* Calls of "/name/…" go to `service`; both must outlive the mux.  KVRELAY_TRANSPORT_OK, or
 * _ERR_LIMIT. */
int kvrelay_mux_add(kvrelay_mux *mux, const char *name, kvrelay_service *service);

#endif
