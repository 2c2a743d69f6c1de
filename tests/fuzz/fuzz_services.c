/* SPDX-License-Identifier: Apache-2.0 */

/*
 * grpc_health.h, grpc_reflection.h and mux.h: calls of any order with requests of any bytes. What
 * health tells is what was set last, each question of reflection has one answer that carries it,
 * and a call ends only for a reason.
 *
 * SECURITY.md: 1, 2, 3, 8, 11.
 *
 * Input: operations: which, which call, its arguments.
 */

#include "fuzz.h"
#include "grpc/grpc_health.h"
#include "grpc/grpc_reflection.h"
#include "mux.h"

enum { CALLS = 4, NAMES = 3, CHECK = 0, WATCH, LIST, REFLECT };

static const char *const paths[] = {
    "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
static const char *const names[NAMES] = {"", "a", "a.B"};

typedef struct fuzz_call {
  kvrelay_call base; /* first */
  void *handle;
  int kind, name; /* name: -1 = one of any bytes */
  unsigned requests, answers;
  int told; /* the last status of Watch; -1: none */
  bool open, half_closed;
} fuzz_call;

typedef struct world {
  kvrelay_mux mux;
  kvrelay_grpc_health *health;
  kvrelay_grpc_reflection *reflection;
  fuzz_call calls[CALLS];
  int status[NAMES]; /* 3: never set */
  bool stopping;
} world;

static void on_wake(kvrelay_call *call) { FUZZ_CHECK(((fuzz_call *)call)->open); }

static void call_close(world *w, fuzz_call *c) {
  if (c->open)
    w->mux.base.close(&w->mux.base, c->handle, 1);
  c->open = false;
}

static void call_open(world *w, fuzz_call *c, uint32_t path) {
  kvrelay_status status;
  call_close(w, c);
  *c = (fuzz_call){
      .base = {.wake = on_wake}, .kind = path < REFLECT ? (int)path : REFLECT, .told = -1};
  c->open = w->mux.base.open(&w->mux.base, &c->base, (const uint8_t *)paths[path],
                             strlen(paths[path]), 1, &c->handle, &status) == KVRELAY_OK;
  FUZZ_CHECK(c->open);
}

/* A name of ours, or any bytes; what is refused is closed, as a transport does it. */
static void call_send(world *w, fuzz_call *c, fuzz_input *in) {
  kvrelay_status status = {0};
  const uint32_t pick = fuzz_below(in, NAMES + 1);
  const bool any = pick == NAMES;
  size_t len = any ? 0 : strlen(names[pick]) + 2;
  uint8_t *bytes = any ? fuzz_take(in, fuzz_byte(in), &len) : fuzz_alloc(len);
  if (!any) {
    bytes[0] = 0x0a;
    bytes[1] = (uint8_t)(len - 2);
    memcpy(bytes + 2, names[pick], len - 2);
  }
  const int err = w->mux.base.message(&w->mux.base, c->handle, bytes, len, 1, &status);
  free(bytes);
  c->name = any ? -1 : (int)pick;
  FUZZ_CHECK(err == KVRELAY_OK || err == KVRELAY_ERR_REFUSED);
  if (err == KVRELAY_OK) {
    c->requests++;
    FUZZ_CHECK(c->kind == REFLECT || c->requests == 1);
    return;
  }
  FUZZ_CHECK(any || c->requests > 0);
  FUZZ_CHECK(status.grpc == KVRELAY_GRPC_INTERNAL);
  call_close(w, c);
}

static void call_half_close(world *w, fuzz_call *c) {
  kvrelay_status status = {0};
  c->half_closed = true;
  if (w->mux.base.half_close(&w->mux.base, c->handle, 1, &status) == KVRELAY_OK)
    return;
  FUZZ_CHECK(c->kind != REFLECT);
  FUZZ_CHECK(c->requests == 0 ? status.grpc == KVRELAY_GRPC_INTERNAL
                              : c->kind == CHECK && status.grpc == KVRELAY_GRPC_NOT_FOUND &&
                                    (c->name < 0 || w->status[c->name] == 3));
  call_close(w, c);
}

static void check_answer(const world *w, fuzz_call *c, const kvrelay_parts *parts) {
  const uint8_t *bytes = parts->part[0].base;
  FUZZ_CHECK(parts->part_len == 1 && parts->part[0].len == parts->bytes);
  FUZZ_CHECK(++c->answers <= c->requests || c->kind == WATCH);
  if (c->kind > WATCH)
    return;
  const int told = parts->bytes == 0 ? 0 : bytes[1];
  FUZZ_CHECK(parts->bytes == 0 || (parts->bytes == 2 && bytes[0] == 0x08 && told != 0));
  FUZZ_CHECK(c->name < 0 || told == w->status[c->name]);
  FUZZ_CHECK(c->kind == CHECK || told != c->told);
  c->told = told;
}

static void call_pull(world *w, fuzz_call *c) {
  kvrelay_parts parts;
  kvrelay_status status = {0};
  switch (w->mux.base.pull(&w->mux.base, c->handle, 1, &parts, &status)) {
  case KVRELAY_PULL_MESSAGE:
    check_answer(w, c, &parts);
    break;
  case KVRELAY_PULL_END:
    FUZZ_CHECK(status.grpc == KVRELAY_GRPC_OK && (c->half_closed || w->stopping));
    FUZZ_CHECK(c->answers >= c->requests && (c->kind != WATCH || w->stopping));
    call_close(w, c);
    break;
  default:
    FUZZ_CHECK(!c->half_closed || c->kind == WATCH);
    FUZZ_CHECK(c->kind != REFLECT || c->answers == c->requests);
    break;
  }
}

static void set(world *w, uint32_t name, int status) {
  FUZZ_CHECK(kvrelay_grpc_health_set(w->health, names[name], status) == KVRELAY_TRANSPORT_OK);
  w->status[name] = w->stopping ? KVRELAY_GRPC_HEALTH_NOT_SERVING : status;
}

static void shut_down(world *w) {
  w->stopping = true;
  kvrelay_grpc_health_shutdown(w->health);
  kvrelay_grpc_reflection_shutdown(w->reflection);
  for (size_t i = 0; i < NAMES; i++)
    if (w->status[i] != 3)
      w->status[i] = KVRELAY_GRPC_HEALTH_NOT_SERVING;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static const char *const served[] = {"a.B", "a"};
  world w = {.status = {KVRELAY_GRPC_HEALTH_NOT_SERVING, 3, 3}};
  FUZZ_CHECK(kvrelay_grpc_health_open(&w.health) == KVRELAY_TRANSPORT_OK);
  FUZZ_CHECK(kvrelay_grpc_reflection_open(served, 2, &w.reflection) == KVRELAY_TRANSPORT_OK);
  kvrelay_mux_init(&w.mux, kvrelay_grpc_reflection_base(w.reflection));
  FUZZ_CHECK(kvrelay_mux_add(&w.mux, KVRELAY_GRPC_HEALTH_NAME,
                             kvrelay_grpc_health_base(w.health)) == KVRELAY_TRANSPORT_OK);
  for (fuzz_input in = {data, len}; in.left > 0;) {
    const uint32_t op = fuzz_below(&in, 16);
    fuzz_call *c = &w.calls[fuzz_below(&in, CALLS)];
    if (op < 3)
      call_open(&w, c, fuzz_below(&in, 5));
    else if (op < 5)
      set(&w, fuzz_below(&in, NAMES), (int)fuzz_below(&in, 3));
    else if (op == 5)
      shut_down(&w);
    else if (!c->open)
      continue;
    else if (op == 6)
      call_close(&w, c);
    else if (op < 10 && !c->half_closed)
      call_send(&w, c, &in);
    else if (op < 12 && !c->half_closed)
      call_half_close(&w, c);
    else
      call_pull(&w, c);
  }
  for (size_t i = 0; i < CALLS; i++)
    call_close(&w, &w.calls[i]);
  kvrelay_grpc_health_close(w.health);
  kvrelay_grpc_reflection_close(w.reflection);
  return 0;
}
