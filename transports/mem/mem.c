/* SPDX-License-Identifier: Apache-2.0 */

#include "mem.h"

#include "../call_map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- objects ---- */

enum parcel_kind {
  PARCEL_OPEN, /* to the server: path */
  PARCEL_REQUEST,
  PARCEL_HALF_CLOSE,
  PARCEL_CANCEL,
  PARCEL_ADMITTED, /* to the client */
  PARCEL_MESSAGE,
  PARCEL_END
};

/* Something on its way. */
typedef struct parcel parcel;
struct parcel {
  parcel *next;
  uint64_t due_ns;
  uint64_t serial; /* of the call: the client's numbers may come again */
  int kind;
  kvrelay_status status;
  size_t len;
  uint8_t bytes[];
};

typedef struct lane {
  parcel *first, **last;
} lane;

/* One call, until its end or its cancellation has arrived. */
typedef struct mem_call {
  kvrelay_call_node node; /* in `calls`, by a serial number */
  kvrelay_call base;      /* what the service sees */
  kvrelay_mem *mem;
  void *handle;
  uint32_t number; /* the client's, 0 once it has cancelled the call */
  size_t unread;
  bool serving;  /* accepted by the service and not closed */
  bool ready;    /* worth pulling */
  bool admitted; /* the client was told */
  bool held;
  bool half_closed; /* by the client */
} mem_call;

/* Both ends; the transports point back to the one object. */
typedef struct mem_server {
  kvrelay_transport base;
  kvrelay_mem *mem;
} mem_server;

typedef struct mem_client {
  kvrelay_client_transport base;
  kvrelay_mem *mem;
} mem_client;

struct kvrelay_mem {
  mem_server server;
  mem_client client;
  kvrelay_mem_config cfg;
  kvrelay_service *service;
  kvrelay_caller *caller;
  uint64_t own_clock_ns;
  kvrelay_call_map calls;
  lane up, down; /* to the server, to the client */
  uint64_t retry_ns, stop_ns;
  uint64_t serials;
  size_t copies_left; /* before one fails */
  size_t turn_steps;  /* of one turn, SIZE_MAX: all */
  bool out_of_memory; /* something could not be sent: the connection is broken */
  bool woken;         /* a call may be ready; without it a round looks at none */
  bool connected, connecting, refuse, hold_all, stalled, stopping, server_closed, client_closed;
};

static uint64_t now(const kvrelay_mem *m) { return *m->cfg.clock_ns; }

static mem_call *find_call(const kvrelay_mem *m, uint32_t number) {
  for (size_t i = 0; i < KVRELAY_CALL_BUCKETS; i++)
    for (kvrelay_call_node *n = m->calls.buckets[i]; n; n = n->next)
      if (((mem_call *)n)->number == number)
        return (mem_call *)n;
  return NULL;
}

static void free_call(kvrelay_mem *m, mem_call *c) {
  kvrelay_call_map_remove(&m->calls, &c->node);
  free(c);
}

/* ---- lanes ---- */

static parcel *send(kvrelay_mem *m, lane *l, const mem_call *c, int kind, size_t len) {
  parcel *p = malloc(sizeof *p + len);
  if (!p) {
    m->out_of_memory = true;
    return NULL;
  }
  memset(p, 0, sizeof *p);
  p->serial = c->node.number;
  p->kind = kind;
  p->len = len;
  p->due_ns = now(m) + m->cfg.delay_ns; /* lanes keep their order, whatever the delay was before */
  *l->last = p;
  l->last = &p->next;
  return p;
}

static void send_bytes(kvrelay_mem *m, lane *l, const mem_call *c, int kind, const void *bytes,
                       size_t len) {
  parcel *p = send(m, l, c, kind, len);
  if (p && len)
    memcpy(p->bytes, bytes, len);
}

static void empty_lane(lane *l) {
  for (parcel *p = l->first, *next; p; p = next) {
    next = p->next;
    free(p);
  }
  l->first = NULL;
  l->last = &l->first;
}

static bool is_held(kvrelay_mem *m, const parcel *p) {
  const mem_call *c = kvrelay_call_map_find(&m->calls, p->serial);
  return c && (m->hold_all || c->held);
}

/* The place of the first parcel that may be delivered, now or later; of nothing when there is none.
 */
static parcel **next_parcel(kvrelay_mem *m, lane *l) {
  parcel **place = &l->first;
  while (*place && (m->stalled || (l == &m->down && is_held(m, *place))))
    place = &(*place)->next;
  return place;
}

static parcel *take_due(kvrelay_mem *m, lane *l) {
  parcel **place = next_parcel(m, l), *p = *place;
  if (!p || p->due_ns > now(m))
    return NULL;
  *place = p->next;
  if (!p->next)
    l->last = place;
  return p;
}

/* ---- server end ---- */

static void stop_serving(kvrelay_mem *m, mem_call *c) {
  if (!c->serving)
    return;
  c->serving = c->ready = false;
  m->service->close(m->service, c->handle, now(m));
}

static void call_wake(kvrelay_call *call) {
  mem_call *c = (mem_call *)(void *)((uint8_t *)call - offsetof(mem_call, base));
  c->ready = c->mem->woken = true;
}

static void end_call(kvrelay_mem *m, mem_call *c, const kvrelay_status *status) {
  stop_serving(m, c);
  parcel *p = send(m, &m->down, c, PARCEL_END, 0);
  if (p)
    p->status = *status;
}

static void serve_parcel(kvrelay_mem *m, const parcel *p) {
  mem_call *c = kvrelay_call_map_find(&m->calls, p->serial);
  if (!c)
    return;
  kvrelay_status status = {0};
  int err = KVRELAY_OK;
  if (p->kind == PARCEL_OPEN && m->stopping) {
    status.grpc = KVRELAY_GRPC_UNAVAILABLE;
    err = KVRELAY_ERR_REFUSED;
  } else if (p->kind == PARCEL_OPEN) {
    err = m->service->open(m->service, &c->base, p->bytes, p->len, now(m), &c->handle, &status);
    c->serving = err == KVRELAY_OK;
  } else if (c->serving && p->kind == PARCEL_REQUEST) {
    err = m->service->message(m->service, c->handle, p->bytes, p->len, now(m), &status);
  } else if (c->serving && p->kind == PARCEL_HALF_CLOSE) {
    err = m->service->half_close(m->service, c->handle, now(m), &status);
  } else if (p->kind == PARCEL_CANCEL) {
    stop_serving(m, c);
    free_call(m, c);
    return;
  }
  if (err)
    end_call(m, c, &status);
  else if (c->serving)
    call_wake(&c->base);
}

/* Copies one message at once, as rule 2 asks; false = there was no memory. */
static bool take_message(kvrelay_mem *m, mem_call *c, const kvrelay_parts *parts) {
  if (m->copies_left-- == 0)
    return false;
  parcel *p = send(m, &m->down, c, PARCEL_MESSAGE, parts->bytes);
  if (!p)
    return false;
  size_t at = 0;
  for (size_t i = 0; i < parts->part_len; i++) {
    memcpy(p->bytes + at, parts->part[i].base, parts->part[i].len);
    at += parts->part[i].len;
  }
  c->unread++;
  return true;
}

static void tell_admitted(kvrelay_mem *m, mem_call *c) {
  if (c->admitted || !c->serving || !m->service->admitted(m->service, c->handle))
    return;
  c->admitted = true;
  send_bytes(m, &m->down, c, PARCEL_ADMITTED, NULL, 0);
}

/* True when something was pulled. */
static bool pull_call(kvrelay_mem *m, mem_call *c) {
  if (!c->serving || !c->ready || c->unread >= m->cfg.queue_messages)
    return false;
  kvrelay_parts parts;
  kvrelay_status status = {0};
  const int what = m->service->pull(m->service, c->handle, now(m), &parts, &status);
  if (what == KVRELAY_PULL_NONE) {
    c->ready = false;
    tell_admitted(m, c);
    return false;
  }
  if (what == KVRELAY_PULL_MESSAGE) {
    c->admitted = true; /* a message brings the headers along */
    if (parts.bytes <= m->cfg.max_message_bytes && take_message(m, c, &parts))
      return true;
    status.grpc = KVRELAY_GRPC_RESOURCE_EXHAUSTED;
    snprintf(status.text, sizeof status.text, "message of %zu bytes", parts.bytes);
  }
  end_call(m, c, &status);
  return true;
}

/* One round over all calls, up to `steps` of them; the service may wake others meanwhile.  Returns
 * how many something was pulled from. */
static size_t pull_round(kvrelay_mem *m, size_t steps) {
  size_t pulled = 0;
  if (!m->woken)
    return 0;
  m->woken = false;
  for (size_t i = 0; i < KVRELAY_CALL_BUCKETS; i++)
    for (kvrelay_call_node *n = m->calls.buckets[i]; n; n = n->next) {
      if (pulled < steps)
        pulled += pull_call(m, (mem_call *)n);
      m->woken |= ((mem_call *)n)->ready;
    }
  return pulled;
}

/* ---- client end ---- */

static void deliver_parcel(kvrelay_mem *m, const parcel *p) {
  mem_call *c = kvrelay_call_map_find(&m->calls, p->serial);
  if (!c)
    return;
  const uint32_t number = c->number;
  if (p->kind == PARCEL_MESSAGE)
    c->unread--;
  if (p->kind == PARCEL_END)
    free_call(m, c);
  if (number == 0)
    return;
  if (p->kind == PARCEL_ADMITTED)
    m->caller->admitted(m->caller, number, now(m));
  else if (p->kind == PARCEL_MESSAGE)
    m->caller->message(m->caller, number, p->bytes, p->len, now(m));
  else
    m->caller->end(m->caller, number, &p->status, now(m));
}

/* Everything of this connection is gone.  `told` = the caller hears of the calls' ends. */
static void drop_connection(kvrelay_mem *m, bool told) {
  m->connected = m->connecting = false;
  empty_lane(&m->up);
  empty_lane(&m->down);
  for (mem_call *c; (c = kvrelay_call_map_any(&m->calls));) {
    const uint32_t number = c->number;
    stop_serving(m, c);
    free_call(m, c);
    const kvrelay_status status = {.grpc = KVRELAY_GRPC_UNAVAILABLE, .text = "connection lost"};
    if (told && number)
      m->caller->end(m->caller, number, &status, now(m));
  }
}

static void fail_connection(kvrelay_mem *m, int err, const char *text) {
  drop_connection(m, true);
  m->retry_ns = now(m) + m->cfg.retry_ns;
  m->caller->connection(m->caller, KVRELAY_CONNECTION_FAILED, err, text, m->retry_ns, now(m));
}

static bool connect_step(kvrelay_mem *m) {
  if (m->connected || m->stopping || m->client_closed || m->server_closed || m->retry_ns > now(m))
    return false;
  if (!m->connecting) {
    m->connecting = true;
    m->retry_ns = now(m) + 2 * m->cfg.delay_ns;
    m->caller->connection(m->caller, KVRELAY_CONNECTION_CONNECTING, 0, "", KVRELAY_TIME_NONE,
                          now(m));
  } else if (m->stalled) {
    return false;
  } else if (m->refuse) {
    fail_connection(m, KVRELAY_TRANSPORT_ERR_CONNECT, "nobody there");
  } else {
    m->connecting = false;
    m->connected = true;
    m->caller->connection(m->caller, KVRELAY_CONNECTION_READY, 0, "", KVRELAY_TIME_NONE, now(m));
  }
  return true;
}

static mem_call *add_call(kvrelay_mem *m, uint32_t number) {
  mem_call *c = calloc(1, sizeof *c);
  if (!c)
    return NULL;
  c->base.wake = call_wake;
  c->mem = m;
  c->number = number;
  kvrelay_call_map_add(&m->calls, &c->node, ++m->serials);
  return c;
}

int kvrelay_mem_call_open(kvrelay_mem *m, uint32_t number, const char *path) {
  if (number == 0 || find_call(m, number))
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (!m->connected || m->stopping)
    return KVRELAY_TRANSPORT_ERR_CONNECT;
  mem_call *c = add_call(m, number);
  if (!c)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  send_bytes(m, &m->up, c, PARCEL_OPEN, path, strlen(path));
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_mem_call_send(kvrelay_mem *m, uint32_t number, const void *message, size_t len) {
  mem_call *c = number ? find_call(m, number) : NULL;
  if (!c || c->half_closed)
    return KVRELAY_TRANSPORT_ERR_ARG;
  send_bytes(m, &m->up, c, PARCEL_REQUEST, message, len);
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_mem_call_half_close(kvrelay_mem *m, uint32_t number) {
  mem_call *c = number ? find_call(m, number) : NULL;
  if (!c || c->half_closed)
    return KVRELAY_TRANSPORT_ERR_ARG;
  c->half_closed = true;
  send_bytes(m, &m->up, c, PARCEL_HALF_CLOSE, NULL, 0);
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_mem_call_raw(kvrelay_mem *m, uint32_t number, const char *path,
                         const kvrelay_iov *messages, size_t messages_len) {
  int err = kvrelay_mem_call_open(m, number, path);
  for (size_t i = 0; i < messages_len && !err; i++)
    err = kvrelay_mem_call_send(m, number, messages[i].base, messages[i].len);
  return err ? err : kvrelay_mem_call_half_close(m, number);
}

static int client_call(kvrelay_client_transport *t, uint32_t call, const char *path,
                       const uint8_t *request, size_t len) {
  const kvrelay_iov message = {request, len};
  return kvrelay_mem_call_raw(((mem_client *)t)->mem, call, path, &message, 1);
}

/* From here on the number is free again; the server hears of it when the parcel arrives. */
static void client_cancel(kvrelay_client_transport *t, uint32_t call) {
  kvrelay_mem *m = ((mem_client *)t)->mem;
  mem_call *c = call ? find_call(m, call) : NULL;
  if (!c)
    return;
  c->number = 0;
  c->held = false;
  send_bytes(m, &m->up, c, PARCEL_CANCEL, NULL, 0);
}

static void client_reconnect(kvrelay_client_transport *t) {
  kvrelay_mem *m = ((mem_client *)t)->mem;
  if (m->connected || m->connecting)
    fail_connection(m, KVRELAY_TRANSPORT_OK, "reconnect");
}

/* ---- both ends ---- */

static bool closed(const kvrelay_mem *m) {
  return m->client_closed || m->server_closed ||
         (m->stopping && (m->calls.len == 0 || now(m) >= m->stop_ns));
}

/* The next moment at which something happens by itself. */
static uint64_t next_event_ns(kvrelay_mem *m) {
  const bool waits = m->connected || m->stopping || (m->connecting && m->stalled);
  uint64_t next = waits ? KVRELAY_TIME_NONE : m->retry_ns;
  lane *const lanes[] = {&m->up, &m->down};
  for (size_t i = 0; i < 2; i++) {
    const parcel *p = *next_parcel(m, lanes[i]);
    if (p && p->due_ns < next)
      next = p->due_ns;
  }
  return m->stopping && m->stop_ns < next ? m->stop_ns : next;
}

/* Delivers all that is due, or the turn's share of it. */
static int work(kvrelay_mem *m) {
  size_t left = m->turn_steps;
  for (size_t before = 0; left != before && left > 0 && !closed(m);) {
    before = left;
    left -= connect_step(m);
    if (m->out_of_memory) {
      m->out_of_memory = false;
      fail_connection(m, KVRELAY_TRANSPORT_ERR_MEMORY, "out of memory");
    }
    for (parcel *p; left > 0 && (p = take_due(m, &m->up)); free(p), left--)
      serve_parcel(m, p);
    left -= pull_round(m, left);
    for (parcel *p; left > 0 && (p = take_due(m, &m->down)); free(p), left--)
      deliver_parcel(m, p);
  }
  return left != m->turn_steps;
}

static int run(kvrelay_mem *m, uint64_t timeout_ns) {
  int happened = work(m);
  if (!happened && !closed(m)) {
    const uint64_t next = next_event_ns(m), wait = next > now(m) ? next - now(m) : 0;
    *m->cfg.clock_ns += wait < timeout_ns ? wait : timeout_ns;
    happened = work(m);
  }
  if (!closed(m))
    return happened;
  if (m->connected || m->connecting) {
    drop_connection(m, true);
    m->caller->connection(m->caller, KVRELAY_CONNECTION_CLOSED, 0, "", KVRELAY_TIME_NONE, now(m));
  }
  return KVRELAY_TRANSPORT_CLOSED;
}

static void stop(kvrelay_mem *m, uint64_t grace_ns) {
  m->stopping = true;
  m->stop_ns = kvrelay_later_ns(now(m), grace_ns);
}

static void destroy(kvrelay_mem *m) {
  drop_connection(m, false);
  free(m);
}

static int server_run(kvrelay_transport *t, uint64_t timeout_ns) {
  return run(((mem_server *)t)->mem, timeout_ns);
}
static void server_wake(kvrelay_transport *t) { (void)t; /* run_once never waits */ }
static void server_stop(kvrelay_transport *t, uint64_t grace_ns) {
  stop(((mem_server *)t)->mem, grace_ns);
}
static uint64_t server_now(const kvrelay_transport *t) { return now(((const mem_server *)t)->mem); }
static void server_close(kvrelay_transport *t) {
  kvrelay_mem *m = ((mem_server *)t)->mem;
  if (m->client_closed) {
    destroy(m);
    return;
  }
  if (m->connected || m->connecting)
    fail_connection(m, KVRELAY_TRANSPORT_ERR_CONNECT, "server gone");
  m->server_closed = true;
}

static int client_run(kvrelay_transport *t, uint64_t timeout_ns) {
  return run(((mem_client *)t)->mem, timeout_ns);
}
static void client_stop(kvrelay_transport *t, uint64_t grace_ns) {
  stop(((mem_client *)t)->mem, grace_ns);
}
static uint64_t client_now(const kvrelay_transport *t) { return now(((const mem_client *)t)->mem); }
static void client_close(kvrelay_transport *t) {
  kvrelay_mem *m = ((mem_client *)t)->mem;
  if (m->server_closed) {
    destroy(m);
    return;
  }
  drop_connection(m, false);
  m->client_closed = true;
}

/* ---- life and script ---- */

kvrelay_mem_config kvrelay_mem_config_default(void) {
  const kvrelay_mem_config cfg = {
      .retry_ns = UINT64_C(1000000000), .queue_messages = 1, .max_message_bytes = 8388608};
  return cfg;
}

int kvrelay_mem_open(const kvrelay_mem_config *cfg, kvrelay_service *service,
                     kvrelay_caller *caller, kvrelay_mem **out) {
  if (!cfg || !service || !caller || !out || cfg->queue_messages == 0)
    return KVRELAY_TRANSPORT_ERR_ARG;
  kvrelay_mem *m = calloc(1, sizeof *m);
  if (!m)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  m->cfg = *cfg;
  m->own_clock_ns = UINT64_C(1000000000);
  if (!m->cfg.clock_ns)
    m->cfg.clock_ns = &m->own_clock_ns;
  m->service = service;
  m->caller = caller;
  m->server = (mem_server){{server_run, server_wake, server_stop, server_close, server_now}, m};
  m->client = (mem_client){{{client_run, server_wake, client_stop, client_close, client_now},
                            client_call,
                            client_cancel,
                            client_reconnect,
                            0},
                           m};
  m->copies_left = m->turn_steps = SIZE_MAX;
  empty_lane(&m->up);
  empty_lane(&m->down);
  *out = m;
  return KVRELAY_TRANSPORT_OK;
}

kvrelay_transport *kvrelay_mem_server(kvrelay_mem *mem) { return &mem->server.base; }
kvrelay_client_transport *kvrelay_mem_client(kvrelay_mem *mem) { return &mem->client.base; }

void kvrelay_mem_delay(kvrelay_mem *mem, uint64_t delay_ns) { mem->cfg.delay_ns = delay_ns; }

void kvrelay_mem_hold(kvrelay_mem *mem, uint32_t call, bool hold) {
  mem_call *c = call ? find_call(mem, call) : NULL;
  if (call == 0)
    mem->hold_all = hold;
  else if (c)
    c->held = hold;
}

void kvrelay_mem_cut(kvrelay_mem *mem) {
  if (mem->connected || mem->connecting)
    fail_connection(mem, KVRELAY_TRANSPORT_ERR_CONNECT, "connection cut");
}

void kvrelay_mem_turn(kvrelay_mem *mem, size_t steps) {
  mem->turn_steps = steps ? steps : SIZE_MAX;
}

void kvrelay_mem_stall(kvrelay_mem *mem, bool stall) { mem->stalled = stall; }
void kvrelay_mem_refuse(kvrelay_mem *mem, bool refuse) { mem->refuse = refuse; }
void kvrelay_mem_fail_copy(kvrelay_mem *mem, size_t after) { mem->copies_left = after; }

size_t kvrelay_mem_unread(const kvrelay_mem *mem) {
  size_t unread = 0;
  for (const parcel *p = mem->down.first; p; p = p->next)
    unread += p->kind == PARCEL_MESSAGE;
  return unread;
}

size_t kvrelay_mem_calls(const kvrelay_mem *mem) {
  size_t serving = 0;
  for (size_t i = 0; i < KVRELAY_CALL_BUCKETS; i++)
    for (const kvrelay_call_node *n = mem->calls.buckets[i]; n; n = n->next)
      serving += ((const mem_call *)n)->serving;
  return serving;
}

void kvrelay_mem_close(kvrelay_mem *mem) {
  if (mem)
    destroy(mem);
}
