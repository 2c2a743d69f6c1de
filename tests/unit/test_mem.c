/* SPDX-License-Identifier: Apache-2.0 */

/* transports/mem against the rules of transport.h, with a service and a caller that only keep
 * records. */

#include "mem/mem.h"

#include <criterion/criterion.h>
#include <string.h>

#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)

/* ---- a service that sends `planned` numbered messages, then ends ---- */

typedef struct toy_call {
  kvrelay_call *call;
  size_t requests, sent;
  bool half_closed, closed;
} toy_call;

typedef struct toy {
  kvrelay_service base;
  toy_call calls[64];
  size_t opens, closes, pulls;
  size_t planned; /* messages per call */
  size_t allowed; /* messages that are there already; then NONE */
  size_t len;     /* of each message */
  uint8_t bytes[256];
} toy;

static int toy_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                    uint64_t now_ns, void **handle, kvrelay_status *status) {
  toy *t = (toy *)self;
  (void)now_ns;
  if (path_len == 7 && memcmp(path, "/refuse", 7) == 0) {
    status->grpc = KVRELAY_GRPC_UNIMPLEMENTED;
    strcpy(status->text, "no such thing");
    return KVRELAY_ERR_REFUSED;
  }
  cr_assert_lt(t->opens, 64);
  toy_call *c = &t->calls[t->opens++];
  *c = (toy_call){.call = call};
  *handle = c;
  return KVRELAY_OK;
}

static int toy_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                       uint64_t now_ns, kvrelay_status *status) {
  toy_call *c = handle;
  (void)self;
  (void)now_ns;
  cr_assert_not(c->closed);
  c->requests++;
  if (len == 3 && memcmp(bytes, "bad", 3) == 0) {
    status->grpc = KVRELAY_GRPC_INTERNAL;
    return KVRELAY_ERR_REFUSED;
  }
  return KVRELAY_OK;
}

static int toy_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                          kvrelay_status *status) {
  toy_call *c = handle;
  (void)self;
  (void)now_ns;
  (void)status;
  cr_assert(!c->closed && !c->half_closed);
  c->half_closed = true;
  return KVRELAY_OK;
}

static bool toy_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  cr_assert_not(((toy_call *)handle)->closed);
  return ((toy_call *)handle)->half_closed;
}

static int toy_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                    kvrelay_status *status) {
  toy *t = (toy *)self;
  toy_call *c = handle;
  (void)now_ns;
  cr_assert_not(c->closed);
  if (!c->half_closed)
    return KVRELAY_PULL_NONE;
  t->pulls++;
  if (c->sent == t->planned) {
    status->grpc = KVRELAY_GRPC_OUT_OF_RANGE;
    status->reason = KVRELAY_REASON_SUBSCRIBER_LAGGED;
    return KVRELAY_PULL_END;
  }
  if (c->sent >= t->allowed)
    return KVRELAY_PULL_NONE;
  memset(t->bytes, 0, sizeof t->bytes);
  t->bytes[0] = (uint8_t)c->sent++;
  memset(parts, 0, sizeof *parts);
  parts->part[0] = (kvrelay_iov){t->bytes, 1};
  parts->part[1] = (kvrelay_iov){t->bytes + 1, t->len - 1};
  parts->part_len = 2;
  parts->bytes = t->len;
  return KVRELAY_PULL_MESSAGE;
}

static void toy_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  toy_call *c = handle;
  (void)now_ns;
  cr_assert_not(c->closed, "closed twice");
  c->closed = true;
  ((toy *)self)->closes++;
}

/* ---- a caller that writes down what it is told ---- */

typedef struct told {
  size_t admitted, messages, ends;
  bool cancelled;
  kvrelay_status status;
  uint64_t last_ns;
} told;

typedef struct listener {
  kvrelay_caller base;
  told calls[64];
  int state, err;
  size_t ready, failed, closed;
  uint64_t retry_ns, ready_ns;
} listener;

static void hear_connection(kvrelay_caller *self, int state, int err, const char *text,
                            uint64_t retry_ns, uint64_t now_ns) {
  listener *l = (listener *)self;
  (void)text;
  l->state = state;
  l->err = err;
  l->retry_ns = retry_ns;
  if (state == KVRELAY_CONNECTION_READY) {
    l->ready++;
    l->ready_ns = now_ns;
  }
  l->failed += state == KVRELAY_CONNECTION_FAILED;
  l->closed += state == KVRELAY_CONNECTION_CLOSED;
}

static void hear_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  told *c = &((listener *)self)->calls[call];
  c->last_ns = now_ns;
  c->admitted++;
  cr_assert(c->messages == 0 && c->ends == 0);
}

static void hear_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                         uint64_t now_ns) {
  told *c = &((listener *)self)->calls[call];
  cr_assert(len > 0 && c->ends == 0 && !c->cancelled);
  cr_assert_eq(bytes[0], c->messages, "in order, none lost");
  c->messages++;
  c->last_ns = now_ns;
}

static void hear_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                     uint64_t now_ns) {
  told *c = &((listener *)self)->calls[call];
  cr_assert_not(c->cancelled, "an end after a cancel");
  c->ends++;
  c->status = *status;
  c->last_ns = now_ns;
}

/* ---- fixture ---- */

typedef struct rig {
  toy service;
  listener caller;
  kvrelay_mem *mem;
  kvrelay_client_transport *client;
  kvrelay_transport *server;
} rig;

static void rig_up(rig *r, const kvrelay_mem_config *cfg) {
  memset(r, 0, sizeof *r);
  r->service.base =
      (kvrelay_service){toy_open, toy_message, toy_half_close, toy_admitted, toy_pull, toy_close};
  r->service.planned = 3;
  r->service.allowed = SIZE_MAX;
  r->service.len = 10;
  r->caller.base = (kvrelay_caller){hear_connection, hear_admitted, hear_message, hear_end};
  cr_assert_eq(kvrelay_mem_open(cfg, &r->service.base, &r->caller.base, &r->mem),
               KVRELAY_TRANSPORT_OK);
  r->client = kvrelay_mem_client(r->mem);
  r->server = kvrelay_mem_server(r->mem);
}

static void settle(rig *r) {
  while (r->server->run_once(r->server, SECOND / 100) > 0)
    continue;
}

static void rig_ready(rig *r) {
  const kvrelay_mem_config cfg = kvrelay_mem_config_default();
  rig_up(r, &cfg);
  settle(r);
  cr_assert_eq(r->caller.state, KVRELAY_CONNECTION_READY);
}

static void rig_down(rig *r) {
  kvrelay_mem_close(r->mem);
  cr_assert_eq(r->service.opens, r->service.closes);
}

static int call(rig *r, uint32_t number, const char *path) {
  return r->client->call(r->client, number, path, (const uint8_t *)"x", 1);
}

/* ---- tests ---- */

Test(mem, one_call_from_request_to_end) {
  rig r;
  rig_ready(&r);
  cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_OK);
  settle(&r);
  cr_assert_eq(r.service.calls[0].requests, 1);
  cr_assert_eq(r.caller.calls[1].messages, 3);
  cr_assert_eq(r.caller.calls[1].ends, 1);
  cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_OUT_OF_RANGE);
  cr_assert_eq(r.caller.calls[1].status.reason, KVRELAY_REASON_SUBSCRIBER_LAGGED);
  cr_assert_eq(r.service.closes, 1);
  rig_down(&r);
}

Test(mem, virtual_time) {
  kvrelay_mem_config cfg = kvrelay_mem_config_default();
  uint64_t clock_ns = 5 * SECOND;
  cfg.clock_ns = &clock_ns;
  cfg.delay_ns = 40 * MS;
  rig r;
  rig_up(&r, &cfg);
  while (r.caller.ready == 0)
    cr_assert_geq(r.server->run_once(r.server, SECOND), 0);
  cr_assert_eq(r.caller.ready_ns, 5 * SECOND + 80 * MS);
  r.service.planned = 1;
  call(&r, 1, "/x");
  while (r.caller.calls[1].ends == 0)
    cr_assert_geq(r.server->run_once(r.server, SECOND), 0);
  cr_assert_eq(clock_ns, 5 * SECOND + 80 * MS + 120 * MS, "request, message, end");
  cr_assert_eq(r.server->run_once(r.server, SECOND), 0);
  cr_assert_eq(r.server->now_ns(r.server), 6 * SECOND + 200 * MS, "silence takes its time");
  cr_assert_eq(r.client->base.now_ns(&r.client->base), clock_ns);
  rig_down(&r);
}

Test(mem, nothing_overtakes_when_the_delay_shrinks) {
  kvrelay_mem_config cfg = kvrelay_mem_config_default();
  cfg.delay_ns = 100 * MS;
  cfg.queue_messages = 8;
  rig r;
  rig_up(&r, &cfg);
  while (r.caller.ready == 0)
    r.server->run_once(r.server, SECOND);
  r.service.allowed = 1;
  call(&r, 1, "/x");
  while (kvrelay_mem_unread(r.mem) == 0)
    r.server->run_once(r.server, MS);
  kvrelay_mem_delay(r.mem, 0);
  r.service.allowed = 3;
  r.service.calls[0].call->wake(r.service.calls[0].call);
  settle(&r); /* hear_message checks the order */
  while (r.caller.calls[1].ends == 0)
    r.server->run_once(r.server, SECOND);
  cr_assert_eq(r.caller.calls[1].messages, 3);
  rig_down(&r);
}

Test(mem, back_pressure_is_not_pulling) {
  kvrelay_mem_config cfg = kvrelay_mem_config_default();
  cfg.queue_messages = 2;
  rig r;
  rig_up(&r, &cfg);
  settle(&r);
  r.service.planned = 10;
  call(&r, 1, "/slow");
  call(&r, 2, "/fast");
  kvrelay_mem_hold(r.mem, 1, true);
  settle(&r);
  cr_assert_eq(r.service.calls[0].sent, 2);
  cr_assert_eq(kvrelay_mem_unread(r.mem), 2);
  cr_assert_eq(r.caller.calls[1].messages, 0);
  cr_assert_eq(r.caller.calls[2].messages, 10, "one slow stream stalls only itself");
  kvrelay_mem_hold(r.mem, 1, false);
  settle(&r);
  cr_assert_eq(r.caller.calls[1].messages, 10);
  call(&r, 3, "/x");
  kvrelay_mem_hold(r.mem, 0, true);
  settle(&r);
  cr_assert_eq(r.caller.calls[3].messages, 0);
  kvrelay_mem_hold(r.mem, 0, false);
  settle(&r);
  cr_assert_eq(r.caller.calls[3].ends, 1);
  rig_down(&r);
}

Test(mem, none_waits_for_wake) {
  rig r;
  rig_ready(&r);
  r.service.allowed = 0;
  call(&r, 1, "/x");
  settle(&r);
  cr_assert_eq(r.caller.calls[1].admitted, 1, "silent, but admitted");
  const size_t pulls = r.service.pulls;
  settle(&r);
  cr_assert_eq(r.service.pulls, pulls, "not polled");
  r.service.allowed = 2;
  settle(&r);
  cr_assert_eq(r.service.pulls, pulls);
  r.service.calls[0].call->wake(r.service.calls[0].call);
  settle(&r);
  cr_assert_eq(r.caller.calls[1].messages, 2);
  rig_down(&r);
}

/* Two calls of three messages, one refused, one cancelled: what either side is told does not depend
 * on how much of it comes in one turn. */
Test(mem, turns_of_every_size_tell_the_same) {
  size_t turns_before = SIZE_MAX;
  for (size_t steps = 1; steps < 40; steps++) {
    rig r;
    rig_ready(&r);
    kvrelay_mem_turn(r.mem, steps);
    cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_OK);
    cr_assert_eq(call(&r, 2, "/refuse"), KVRELAY_TRANSPORT_OK);
    cr_assert_eq(call(&r, 3, "/x"), KVRELAY_TRANSPORT_OK);
    cr_assert_eq(call(&r, 4, "/x"), KVRELAY_TRANSPORT_OK);
    r.caller.calls[4].cancelled = true;
    r.client->cancel(r.client, 4);
    size_t turns = 0;
    while (r.server->run_once(r.server, 0) > 0)
      turns++;
    /* 14 on the way up, a pull for each message and end, all of these down again. */
    cr_assert_leq(turns, turns_before);
    cr_assert_geq(turns * steps, 22, "%zu steps in %zu turns", steps, turns);
    turns_before = turns;
    for (uint32_t number = 1; number <= 3; number += 2) {
      cr_assert_eq(r.caller.calls[number].messages, 3);
      cr_assert_eq(r.caller.calls[number].ends, 1);
      cr_assert_eq(r.caller.calls[number].status.grpc, KVRELAY_GRPC_OUT_OF_RANGE);
    }
    cr_assert_eq(r.caller.calls[2].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
    cr_assert_eq(r.caller.calls[4].messages + r.caller.calls[4].ends, 0);
    cr_assert(r.service.opens == 3 && r.service.closes == 3);
    rig_down(&r);
  }
  cr_assert_eq(turns_before, 1);
}

Test(mem, a_turn_is_no_longer_than_asked_for) {
  rig r;
  rig_ready(&r);
  kvrelay_mem_turn(r.mem, 1);
  call(&r, 1, "/x");
  cr_assert_eq(r.server->run_once(r.server, 0), 1);
  cr_assert(r.service.opens == 1 && r.service.calls[0].requests == 0);
  cr_assert_eq(r.server->run_once(r.server, 0), 1);
  cr_assert(r.service.calls[0].requests == 1 && !r.service.calls[0].half_closed);
  cr_assert_eq(r.server->run_once(r.server, 0), 1);
  cr_assert(r.service.calls[0].half_closed && r.service.calls[0].sent == 0);
  cr_assert_eq(r.server->run_once(r.server, 0), 1);
  cr_assert(r.service.calls[0].sent == 1 && r.caller.calls[1].messages == 0);
  kvrelay_mem_turn(r.mem, 0);
  cr_assert_eq(r.server->run_once(r.server, 0), 1);
  cr_assert_eq(r.caller.calls[1].ends, 1);
  rig_down(&r);
}

Test(mem, a_call_step_by_step) {
  rig r;
  const kvrelay_mem_config cfg = kvrelay_mem_config_default();
  rig_up(&r, &cfg);
  cr_assert_eq(kvrelay_mem_call_open(r.mem, 1, "/x"), KVRELAY_TRANSPORT_ERR_CONNECT);
  settle(&r);
  cr_assert_eq(kvrelay_mem_call_open(r.mem, 1, "/x"), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_mem_call_open(r.mem, 1, "/x"), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(kvrelay_mem_call_open(r.mem, 0, "/x"), KVRELAY_TRANSPORT_ERR_ARG);
  settle(&r);
  cr_assert(r.service.opens == 1 && r.service.calls[0].requests == 0);
  for (size_t i = 1; i <= 3; i++) {
    cr_assert_eq(kvrelay_mem_call_send(r.mem, 1, "x", i - 1), KVRELAY_TRANSPORT_OK);
    settle(&r);
    cr_assert_eq(r.service.calls[0].requests, i);
  }
  cr_assert_eq(r.caller.calls[1].messages, 0);
  cr_assert_eq(kvrelay_mem_call_half_close(r.mem, 1), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_mem_call_half_close(r.mem, 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(kvrelay_mem_call_send(r.mem, 1, "x", 1), KVRELAY_TRANSPORT_ERR_ARG);
  settle(&r);
  cr_assert_eq(r.caller.calls[1].messages, 3);
  cr_assert_eq(r.caller.calls[1].ends, 1);
  cr_assert_eq(kvrelay_mem_call_send(r.mem, 1, "x", 1), KVRELAY_TRANSPORT_ERR_ARG, "it is over");
  cr_assert_eq(kvrelay_mem_call_half_close(r.mem, 0), KVRELAY_TRANSPORT_ERR_ARG);
  rig_down(&r);
}

Test(mem, a_connection_that_fell_silent) {
  rig r;
  rig_ready(&r);
  r.service.allowed = 1;
  call(&r, 1, "/x");
  settle(&r);
  cr_assert_eq(r.caller.calls[1].messages, 1);
  kvrelay_mem_stall(r.mem, true);
  r.service.allowed = 3;
  r.service.calls[0].call->wake(r.service.calls[0].call);
  cr_assert_eq(call(&r, 2, "/x"), KVRELAY_TRANSPORT_OK);
  uint64_t before = r.server->now_ns(r.server);
  settle(&r);
  cr_assert_eq(r.server->run_once(r.server, SECOND), 0);
  cr_assert_geq(r.server->now_ns(r.server), before + SECOND, "time goes on");
  cr_assert(r.service.opens == 1 && r.caller.calls[1].messages == 1);
  cr_assert_eq(r.service.calls[0].sent, 2, "one may be on its way");
  cr_assert_eq(r.caller.failed, 0, "nobody is told");
  /* A new connection does not come about either, and the old one's calls are over. */
  r.client->reconnect(r.client);
  cr_assert_eq(r.caller.calls[1].ends, 1);
  cr_assert_eq(r.caller.calls[2].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  for (int i = 0; i < 5; i++)
    cr_assert_geq(r.server->run_once(r.server, SECOND), 0);
  cr_assert_eq(r.caller.state, KVRELAY_CONNECTION_CONNECTING);
  before = r.server->now_ns(r.server);
  cr_assert_eq(r.server->run_once(r.server, SECOND), 0);
  cr_assert_eq(r.server->now_ns(r.server), before + SECOND);
  kvrelay_mem_stall(r.mem, false);
  settle(&r);
  cr_assert_eq(r.caller.state, KVRELAY_CONNECTION_READY);
  cr_assert_eq(call(&r, 3, "/x"), KVRELAY_TRANSPORT_OK);
  settle(&r);
  cr_assert_eq(r.caller.calls[3].ends, 1);
  rig_down(&r);
}

Test(mem, refusals) {
  rig r;
  rig_ready(&r);
  call(&r, 1, "/refuse");
  settle(&r);
  cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  cr_assert_str_eq(r.caller.calls[1].status.text, "no such thing");
  cr_assert_eq(r.service.opens, 0);
  const kvrelay_iov bad[] = {{(const uint8_t *)"good", 4}, {(const uint8_t *)"bad", 3}};
  cr_assert_eq(kvrelay_mem_call_raw(r.mem, 2, "/x", bad, 2), KVRELAY_TRANSPORT_OK);
  settle(&r);
  cr_assert_eq(r.caller.calls[2].status.grpc, KVRELAY_GRPC_INTERNAL);
  cr_assert_eq(r.service.calls[0].requests, 2);
  cr_assert_not(r.service.calls[0].half_closed);
  cr_assert_eq(kvrelay_mem_call_raw(r.mem, 3, "/x", NULL, 0), KVRELAY_TRANSPORT_OK);
  settle(&r);
  cr_assert_eq(r.service.calls[1].requests, 0);
  cr_assert_eq(r.caller.calls[3].ends, 1);
  rig_down(&r);
}

Test(mem, call_numbers) {
  rig r;
  const kvrelay_mem_config cfg = kvrelay_mem_config_default();
  rig_up(&r, &cfg);
  cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_ERR_CONNECT);
  settle(&r);
  r.service.allowed = 0;
  cr_assert_eq(call(&r, 0, "/x"), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_ERR_ARG);
  r.client->cancel(r.client, 7);
  r.client->cancel(r.client, 0);
  settle(&r);
  cr_assert_eq(kvrelay_mem_calls(r.mem), 1);
  rig_down(&r);
}

Test(mem, cancel_at_every_moment) {
  for (int steps = 0; steps < 14; steps++) {
    kvrelay_mem_config cfg = kvrelay_mem_config_default();
    cfg.delay_ns = 10 * MS;
    rig r;
    rig_up(&r, &cfg);
    while (r.caller.ready == 0)
      r.server->run_once(r.server, SECOND);
    r.service.planned = 5;
    call(&r, 1, "/x");
    for (int i = 0; i < steps; i++)
      r.server->run_once(r.server, 7 * MS);
    if (r.caller.calls[1].ends == 0)
      r.caller.calls[1].cancelled = true;
    r.client->cancel(r.client, 1);
    cr_assert_eq(call(&r, 1, "/refuse"), KVRELAY_TRANSPORT_OK, "the number is free at once");
    r.caller.calls[1].cancelled = false;
    const size_t messages = r.caller.calls[1].messages, ends = r.caller.calls[1].ends;
    for (int i = 0; i < 40; i++)
      r.server->run_once(r.server, 10 * MS);
    cr_assert_eq(r.caller.calls[1].messages, messages);
    cr_assert_eq(r.caller.calls[1].ends, ends + 1);
    cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
    cr_assert_eq(kvrelay_mem_calls(r.mem), 0);
    cr_assert(r.service.opens == 1 && r.service.closes == 1);
    rig_down(&r);
  }
}

Test(mem, cut_at_every_moment) {
  for (int steps = 0; steps < 30; steps++) {
    kvrelay_mem_config cfg = kvrelay_mem_config_default();
    cfg.delay_ns = 10 * MS;
    rig r;
    rig_up(&r, &cfg);
    r.service.planned = 5;
    bool called = false;
    for (int i = 0; i < steps; i++) {
      r.server->run_once(r.server, 7 * MS);
      if (r.caller.ready && !called)
        called =
            call(&r, 1, "/x") == KVRELAY_TRANSPORT_OK && call(&r, 2, "/x") == KVRELAY_TRANSPORT_OK;
    }
    const size_t ended = r.caller.calls[1].ends;
    const bool was_up = r.caller.state != 0;
    kvrelay_mem_cut(r.mem);
    cr_assert_eq(kvrelay_mem_calls(r.mem), 0);
    cr_assert_eq(r.service.opens, r.service.closes);
    cr_assert_eq(r.caller.failed, was_up);
    cr_assert_eq(r.caller.calls[1].ends, called);
    cr_assert_eq(r.caller.calls[2].ends, called);
    if (called && !ended)
      cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
    const size_t ready = r.caller.ready;
    for (int i = 0; i < 200 && r.caller.ready == ready; i++)
      r.server->run_once(r.server, 10 * MS);
    cr_assert_eq(r.caller.ready, ready + 1, "it comes back");
    cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_OK);
    rig_down(&r);
  }
}

Test(mem, attempts_that_fail) {
  const kvrelay_mem_config cfg = kvrelay_mem_config_default();
  rig r;
  rig_up(&r, &cfg);
  kvrelay_mem_refuse(r.mem, true);
  settle(&r);
  cr_assert_eq(r.caller.state, KVRELAY_CONNECTION_FAILED);
  cr_assert_eq(r.caller.err, KVRELAY_TRANSPORT_ERR_CONNECT);
  cr_assert_eq(r.caller.retry_ns, 2 * SECOND);
  cr_assert_eq(call(&r, 1, "/x"), KVRELAY_TRANSPORT_ERR_CONNECT);
  kvrelay_mem_refuse(r.mem, false);
  while (r.caller.ready == 0)
    r.server->run_once(r.server, 10 * SECOND);
  cr_assert_eq(r.caller.ready_ns, 2 * SECOND);
  r.client->reconnect(r.client);
  cr_assert_eq(r.caller.state, KVRELAY_CONNECTION_FAILED);
  rig_down(&r);
}

Test(mem, no_memory_for_one_message) {
  rig r;
  rig_ready(&r);
  kvrelay_mem_fail_copy(r.mem, 2);
  call(&r, 1, "/x");
  settle(&r);
  cr_assert_eq(r.caller.calls[1].messages, 2);
  cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_assert_eq(r.service.closes, 1);
  call(&r, 2, "/x");
  settle(&r);
  cr_assert_eq(r.caller.calls[2].messages, 3, "once");
  rig_down(&r);
}

Test(mem, message_above_the_bound) {
  kvrelay_mem_config cfg = kvrelay_mem_config_default();
  cfg.max_message_bytes = 9;
  rig r;
  rig_up(&r, &cfg);
  settle(&r);
  call(&r, 1, "/x");
  settle(&r);
  cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  rig_down(&r);
}

Test(mem, stop_lets_calls_finish) {
  rig r;
  rig_ready(&r);
  r.service.allowed = 1;
  call(&r, 1, "/x");
  settle(&r);
  r.server->stop(r.server, SECOND);
  cr_assert_eq(call(&r, 2, "/x"), KVRELAY_TRANSPORT_ERR_CONNECT);
  cr_assert_geq(r.server->run_once(r.server, MS), 0);
  r.service.allowed = 3;
  r.service.calls[0].call->wake(r.service.calls[0].call);
  int rc = 1;
  while (rc > 0)
    rc = r.server->run_once(r.server, MS);
  cr_assert_eq(rc, KVRELAY_TRANSPORT_CLOSED);
  cr_assert_eq(r.caller.calls[1].messages, 3);
  cr_assert_eq(r.caller.state, KVRELAY_CONNECTION_CLOSED);
  rig_down(&r);
}

Test(mem, stop_has_a_grace_time) {
  rig r;
  rig_ready(&r);
  r.service.allowed = 0;
  call(&r, 1, "/x");
  settle(&r);
  r.client->base.stop(&r.client->base, 100 * MS);
  const uint64_t since = r.server->now_ns(r.server);
  int rc;
  while ((rc = r.server->run_once(r.server, SECOND)) >= 0)
    continue;
  cr_assert_eq(rc, KVRELAY_TRANSPORT_CLOSED);
  cr_assert_eq(r.server->now_ns(r.server) - since, 100 * MS);
  cr_assert_eq(r.caller.calls[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  cr_assert_eq(r.caller.closed, 1);
  rig_down(&r);
}

Test(mem, ends_are_closed_one_after_the_other) {
  for (int first = 0; first < 2; first++) {
    rig r;
    rig_ready(&r);
    r.service.allowed = 0;
    call(&r, 1, "/x");
    settle(&r);
    kvrelay_transport *ends[] = {r.server, &r.client->base};
    ends[first]->close(ends[first]);
    cr_assert_eq(r.service.closes, 1);
    cr_assert_eq(r.caller.calls[1].ends, first == 0, "a closed client is told nothing");
    cr_assert_eq(ends[!first]->run_once(ends[!first], 0), KVRELAY_TRANSPORT_CLOSED);
    ends[!first]->close(ends[!first]);
  }
}
