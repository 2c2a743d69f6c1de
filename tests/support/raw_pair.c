/* SPDX-License-Identifier: Apache-2.0 */
#include "raw_pair.h"

#include <stdio.h>
#include <string.h>

static const char *const methods[] = {"Echo", "Count", "Refuse", "End", "Silent"};
enum { METHODS = sizeof methods / sizeof methods[0] };

static toy_service *toy_of(kvrelay_service *self) { return &((raw_toy *)(void *)self)->toy; }

static int raw_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                    uint64_t now_ns, void **handle, kvrelay_status *status) {
  char name[64] = "";
  const int32_t method = kvrelay_method_from_path(path, path_len);
  if (method >= 1 && method <= METHODS)
    snprintf(name, sizeof name, "/kvrelay.test.Toy/%s", methods[method - 1]);
  toy_service *toy = toy_of(self);
  return toy->base.open(&toy->base, call, (const uint8_t *)name, strlen(name), now_ns, handle,
                        status);
}

static int raw_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                       uint64_t now_ns, kvrelay_status *status) {
  toy_service *toy = toy_of(self);
  return toy->base.message(&toy->base, handle, bytes, len, now_ns, status);
}

static int raw_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                          kvrelay_status *status) {
  toy_service *toy = toy_of(self);
  return toy->base.half_close(&toy->base, handle, now_ns, status);
}

static bool raw_admitted(kvrelay_service *self, void *handle) {
  toy_service *toy = toy_of(self);
  return toy->base.admitted(&toy->base, handle);
}

static int raw_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                    kvrelay_status *status) {
  toy_service *toy = toy_of(self);
  return toy->base.pull(&toy->base, handle, now_ns, parts, status);
}

static void raw_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  toy_service *toy = toy_of(self);
  toy->base.close(&toy->base, handle, now_ns);
}

void raw_toy_init(raw_toy *raw) {
  toy_service_init(&raw->toy);
  raw->base =
      (kvrelay_service){raw_open, raw_message, raw_half_close, raw_admitted, raw_pull, raw_close};
}

const char *raw_toy_path(const char *method) {
  for (int i = 0; i < METHODS; i++)
    if (strcmp(methods[i], method) == 0)
      return kvrelay_method_path(i + 1);
  return "/unknown";
}
