/* SPDX-License-Identifier: Apache-2.0 */
#include "mux.h"

#include <stdlib.h>
#include <string.h>

/* What the transport knows the call by. */
typedef struct mux_call {
  kvrelay_service *service;
  void *handle;
} mux_call;

static kvrelay_service *route(const kvrelay_mux *mux, const uint8_t *path, size_t path_len) {
  for (size_t i = 0; i < mux->len_; i++) {
    const size_t len = strlen(mux->routes_[i].name);
    if (path_len >= len + 2 && path[0] == '/' && path[len + 1] == '/' &&
        memcmp(path + 1, mux->routes_[i].name, len) == 0)
      return mux->routes_[i].service;
  }
  return mux->rest;
}

static int mux_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                    uint64_t now_ns, void **handle, kvrelay_status *status) {
  kvrelay_service *service = route((kvrelay_mux *)self, path, path_len);
  if (service == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "unknown service");
  mux_call *c = malloc(sizeof *c);
  if (c == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
  c->service = service;
  const int err = service->open(service, call, path, path_len, now_ns, &c->handle, status);
  if (err != KVRELAY_OK)
    free(c);
  else
    *handle = c;
  return err;
}

static int mux_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                       uint64_t now_ns, kvrelay_status *status) {
  const mux_call *c = handle;
  (void)self;
  return c->service->message(c->service, c->handle, bytes, len, now_ns, status);
}

static int mux_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                          kvrelay_status *status) {
  const mux_call *c = handle;
  (void)self;
  return c->service->half_close(c->service, c->handle, now_ns, status);
}

static bool mux_admitted(kvrelay_service *self, void *handle) {
  const mux_call *c = handle;
  (void)self;
  return c->service->admitted(c->service, c->handle);
}

static int mux_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                    kvrelay_status *status) {
  const mux_call *c = handle;
  (void)self;
  return c->service->pull(c->service, c->handle, now_ns, parts, status);
}

static void mux_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  mux_call *c = handle;
  (void)self;
  c->service->close(c->service, c->handle, now_ns);
  free(c);
}

void kvrelay_mux_init(kvrelay_mux *mux, kvrelay_service *rest) {
  memset(mux, 0, sizeof *mux);
  mux->base =
      (kvrelay_service){mux_open, mux_message, mux_half_close, mux_admitted, mux_pull, mux_close};
  mux->rest = rest;
}

int kvrelay_mux_add(kvrelay_mux *mux, const char *name, kvrelay_service *service) {
  if (mux->len_ == KVRELAY_MUX_CAP)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  mux->routes_[mux->len_].name = name;
  mux->routes_[mux->len_++].service = service;
  return KVRELAY_TRANSPORT_OK;
}
