/* SPDX-License-Identifier: Apache-2.0 */

#include "client.h"

#include "call_map.h"
#include "kvrelay_pb.h"

#include <stdlib.h>

#define REPLICA_ALIGN 64 /* a cache line, and the size of what stands in front of a replica */
#define ARENA_FIRST 65536

typedef struct client_call {
  kvrelay_call_node node;
  int32_t method;
  kvrelay_pb_filter_stream stream; /* of a filter */
} client_call;

/* In front of each replica, so that all can be freed. */
typedef struct replica_block {
  struct replica_block *prev, *next;
  size_t bytes;
} replica_block;

_Static_assert(sizeof(replica_block) <= REPLICA_ALIGN, "fits in front");

struct kvrelay_client {
  kvrelay_caller base;
  kvrelay_client_config cfg;
  kvrelay_client_transport *transport;
  kvrelay_client_stats stats;
  kvrelay_call_map calls;
  replica_block *replicas;
  uint8_t *arena;
  size_t arena_len;
  uint64_t info_until_ns; /* KVRELAY_TIME_NONE: it is not open */
  uint32_t info_call;
  bool connected, stopped;
};

/* ---- calls ---- */

static void forget_call(kvrelay_client *cl, client_call *c) {
  if (c->method == KVRELAY_METHOD_GET_RELAY_INFO)
    cl->info_until_ns = KVRELAY_TIME_NONE; /* the consumer has one of them at a time */
  kvrelay_call_map_remove(&cl->calls, &c->node);
  free(c);
}

static void forget_calls(kvrelay_client *cl) {
  for (client_call *c; (c = kvrelay_call_map_any(&cl->calls));)
    forget_call(cl, c);
}

static int start_call(kvrelay_client *cl, const kvrelay_action *a) {
  const ptrdiff_t len = kvrelay_pb_encode_request(&a->request, NULL, 0);
  const char *path = kvrelay_method_path(a->request.method);
  if (len < 0 || !path || !cl->transport)
    return KVRELAY_TRANSPORT_ERR_ARG;
  client_call *c = calloc(1, sizeof *c);
  uint8_t *request = malloc((size_t)len + 1);
  int err = c && request ? KVRELAY_TRANSPORT_OK : KVRELAY_TRANSPORT_ERR_MEMORY;
  if (!err && kvrelay_pb_encode_request(&a->request, request, (size_t)len) != len)
    err = KVRELAY_TRANSPORT_ERR_ARG;
  if (!err)
    err = cl->transport->call(cl->transport, a->call, path, request, (size_t)len);
  free(request);
  if (err) {
    free(c);
    return err;
  }
  c->method = a->request.method;
  kvrelay_call_map_add(&cl->calls, &c->node, a->call);
  cl->stats.calls++;
  return KVRELAY_TRANSPORT_OK;
}

/* A call that could not even be started has ended at once. */
static void do_call(kvrelay_client *cl, const kvrelay_action *a, uint64_t now_ns) {
  const int err = start_call(cl, a);
  if (!err && a->request.method == KVRELAY_METHOD_GET_RELAY_INFO) {
    cl->info_call = a->call;
    cl->info_until_ns = kvrelay_later_ns(now_ns, cl->cfg.info_timeout_ns);
  }
  if (!err)
    return;
  kvrelay_status status;
  (void)kvrelay_refuse(&status, KVRELAY_GRPC_UNAVAILABLE, kvrelay_transport_strerror(err));
  (void)kvrelay_consumer_feed_end(cl->cfg.consumer, a->call, &status, now_ns);
}

static void do_cancel(kvrelay_client *cl, const kvrelay_action *a) {
  client_call *c = kvrelay_call_map_find(&cl->calls, a->call);
  if (!c)
    return;
  forget_call(cl, c);
  cl->transport->cancel(cl->transport, a->call);
}

/* ---- replica memory ---- */

static void free_replica(kvrelay_client *cl, void *mem) {
  replica_block *b = (replica_block *)(void *)((uint8_t *)mem - REPLICA_ALIGN);
  if (b->next)
    b->next->prev = b->prev;
  *(b->prev ? &b->prev->next : &cl->replicas) = b->next;
  cl->stats.replica_bytes -= b->bytes;
  free(b);
}

static void *alloc_replica(kvrelay_client *cl, size_t bytes) {
  if (bytes > SIZE_MAX - 2 * REPLICA_ALIGN ||
      bytes > cl->cfg.max_replica_bytes - cl->stats.replica_bytes)
    return NULL;
  const size_t whole = (bytes + 2 * REPLICA_ALIGN - 1) / REPLICA_ALIGN * REPLICA_ALIGN;
  replica_block *b = aligned_alloc(REPLICA_ALIGN, whole);
  if (!b)
    return NULL;
  b->bytes = bytes;
  b->prev = NULL;
  b->next = cl->replicas;
  if (b->next)
    b->next->prev = b;
  cl->replicas = b;
  cl->stats.replica_bytes += bytes;
  return (uint8_t *)b + REPLICA_ALIGN;
}

static void do_replica_need(kvrelay_client *cl, const kvrelay_action *a, uint64_t now_ns) {
  void *mem = alloc_replica(cl, a->bytes);
  *(mem ? &cl->stats.replicas : &cl->stats.replicas_refused) += 1;
  if (kvrelay_consumer_replica_give(cl->cfg.consumer, a->pool, mem, mem ? a->bytes : 0, now_ns) !=
          KVRELAY_OK &&
      mem)
    free_replica(cl, mem);
}

/* ---- the caller's side of transport.h ---- */

static void lose_connection(kvrelay_client *cl, uint64_t now_ns) {
  if (!cl->connected)
    return;
  cl->connected = false;
  cl->stats.losses++;
  forget_calls(cl);
  kvrelay_consumer_disconnected(cl->cfg.consumer, now_ns);
}

static void client_connection(kvrelay_caller *self, int state, int err, const char *text,
                              uint64_t retry_ns, uint64_t now_ns) {
  kvrelay_client *cl = (kvrelay_client *)self;
  cl->stats.connection = state;
  lose_connection(cl, now_ns);
  if (state == KVRELAY_CONNECTION_READY) {
    cl->connected = true;
    cl->stats.connects++;
    kvrelay_consumer_connected(cl->cfg.consumer, now_ns);
  }
  if (cl->cfg.connection)
    cl->cfg.connection(cl->cfg.context, state, err, text ? text : "", retry_ns);
}

static void client_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)call;
  (void)now_ns; /* the consumer waits for messages, not for headers */
}

/* Decodes and feeds; KVRELAY_ERR_NOSPACE asks for a larger arena. */
static int take_message(kvrelay_client *cl, uint32_t call, client_call *c, const uint8_t *bytes,
                        size_t len, uint64_t now_ns) {
  kvrelay_pb_arena arena = {cl->arena, cl->arena_len, 0};
  union {
    kvrelay_relay_info info;
    kvrelay_catalog_update catalog;
    kvrelay_filter_update filter;
    kvrelay_readiness_update readiness;
    kvrelay_load_update load;
  } m;
  int err = KVRELAY_ERR_UNSUPPORTED;
  switch (c->method) {
  case KVRELAY_METHOD_GET_RELAY_INFO:
    err = kvrelay_pb_decode_info(bytes, len, &arena, &m.info);
    if (!err)
      (void)kvrelay_consumer_feed_info(cl->cfg.consumer, call, &m.info, now_ns);
    break;
  case KVRELAY_METHOD_WATCH_CATALOG:
    err = kvrelay_pb_decode_catalog(bytes, len, &arena, &m.catalog);
    if (!err)
      (void)kvrelay_consumer_feed_catalog(cl->cfg.consumer, call, &m.catalog, now_ns);
    break;
  case KVRELAY_METHOD_SUBSCRIBE_POOL:
    err = kvrelay_pb_filter_read(&c->stream, bytes, len, &m.filter);
    if (!err)
      (void)kvrelay_consumer_feed_filter(cl->cfg.consumer, call, &m.filter, now_ns);
    break;
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    err = kvrelay_pb_decode_readiness(bytes, len, &arena, &m.readiness);
    if (!err)
      (void)kvrelay_consumer_feed_readiness(cl->cfg.consumer, call, &m.readiness, now_ns);
    break;
  case KVRELAY_METHOD_SUBSCRIBE_LOAD:
    err = kvrelay_pb_decode_load(bytes, len, &arena, &m.load);
    if (!err)
      (void)kvrelay_consumer_feed_load(cl->cfg.consumer, call, &m.load, now_ns);
    break;
  default:
    break;
  }
  return err;
}

static bool grow_arena(kvrelay_client *cl) {
  if (cl->arena_len >= cl->cfg.max_arena_bytes)
    return false;
  size_t len = cl->arena_len ? cl->arena_len : ARENA_FIRST / 2;
  len = len > cl->cfg.max_arena_bytes / 2 ? cl->cfg.max_arena_bytes : len * 2;
  uint8_t *grown = malloc(len);
  if (!grown)
    return false;
  free(cl->arena);
  cl->arena = grown;
  cl->arena_len = len;
  return true;
}

static void client_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                           uint64_t now_ns) {
  kvrelay_client *cl = (kvrelay_client *)self;
  client_call *c = kvrelay_call_map_find(&cl->calls, call);
  if (!c)
    return; /* cancelled, or of a former connection */
  cl->stats.messages++;
  cl->stats.bytes += len;
  int err = KVRELAY_ERR_LIMIT;
  if (len <= cl->cfg.max_message_bytes)
    do
      err = take_message(cl, call, c, bytes, len, now_ns);
    while (err == KVRELAY_ERR_NOSPACE && grow_arena(cl));
  if (err == KVRELAY_OK)
    return;
  cl->stats.broken++;
  (void)kvrelay_consumer_feed_broken(cl->cfg.consumer, call,
                                     err == KVRELAY_ERR_NOSPACE ? KVRELAY_ERR_LIMIT : err, now_ns);
}

static void client_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                       uint64_t now_ns) {
  kvrelay_client *cl = (kvrelay_client *)self;
  client_call *c = kvrelay_call_map_find(&cl->calls, call);
  if (!c)
    return;
  forget_call(cl, c);
  (void)kvrelay_consumer_feed_end(cl->cfg.consumer, call, status, now_ns);
}

/* ---- life ---- */

static void carry_out(kvrelay_client *cl, const kvrelay_action *a, uint64_t now_ns) {
  switch (a->kind) {
  case KVRELAY_ACTION_CALL:
    do_call(cl, a, now_ns);
    break;
  case KVRELAY_ACTION_CANCEL:
    do_cancel(cl, a);
    break;
  case KVRELAY_ACTION_REPLICA_NEED:
    do_replica_need(cl, a, now_ns);
    break;
  case KVRELAY_ACTION_REPLICA_FREE:
    free_replica(cl, a->mem);
    break;
  case KVRELAY_ACTION_RECONNECT:
    lose_connection(cl, now_ns);
    cl->transport->reconnect(cl->transport);
    break;
  default: /* STOP */
    cl->stopped = true;
    cl->transport->base.stop(&cl->transport->base, 0);
    break;
  }
}

/* A relay that took the call and forgot it: it is asked again, as the consumer does after an end.
 */
static void expire_info(kvrelay_client *cl, uint64_t now_ns) {
  if (now_ns < cl->info_until_ns || cl->info_until_ns == KVRELAY_TIME_NONE)
    return;
  const kvrelay_status status = {.grpc = KVRELAY_GRPC_DEADLINE_EXCEEDED,
                                 .text = "no answer in time"};
  cl->transport->cancel(cl->transport, cl->info_call);
  client_end(&cl->base, cl->info_call, &status, now_ns);
}

int kvrelay_client_run(kvrelay_client *client, uint64_t now_ns) {
  expire_info(client, now_ns);
  kvrelay_consumer_tick(client->cfg.consumer, now_ns);
  kvrelay_action action;
  while (kvrelay_consumer_action_next(client->cfg.consumer, now_ns, &action) == 1)
    carry_out(client, &action, now_ns);
  return client->stopped ? KVRELAY_TRANSPORT_ERR_PROTOCOL : KVRELAY_TRANSPORT_OK;
}

uint64_t kvrelay_client_deadline_ns(const kvrelay_client *client) {
  return kvrelay_earlier_ns(kvrelay_consumer_deadline_ns(client->cfg.consumer),
                            client->info_until_ns);
}

kvrelay_client_config kvrelay_client_config_default(kvrelay_consumer *consumer) {
  const kvrelay_client_config cfg = {.consumer = consumer,
                                     .max_message_bytes = KVRELAY_PB_MESSAGE_MAX,
                                     .max_arena_bytes = 8u * KVRELAY_PB_MESSAGE_MAX,
                                     .max_replica_bytes = (size_t)1 << 30,
                                     .info_timeout_ns = UINT64_C(5000000000)};
  return cfg;
}

int kvrelay_client_open(const kvrelay_client_config *cfg, kvrelay_client **out) {
  if (!cfg || !cfg->consumer || !out)
    return KVRELAY_TRANSPORT_ERR_ARG;
  kvrelay_client *cl = calloc(1, sizeof *cl);
  if (!cl)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  cl->base = (kvrelay_caller){client_connection, client_admitted, client_message, client_end};
  cl->cfg = *cfg;
  cl->info_until_ns = KVRELAY_TIME_NONE;
  *out = cl;
  return KVRELAY_TRANSPORT_OK;
}

kvrelay_caller *kvrelay_client_caller(kvrelay_client *client) { return &client->base; }

void kvrelay_client_attach(kvrelay_client *client, kvrelay_client_transport *transport) {
  client->transport = transport;
}

kvrelay_client_stats kvrelay_client_stats_get(const kvrelay_client *client) {
  kvrelay_client_stats stats = client->stats;
  stats.open_calls = client->calls.len;
  return stats;
}

void kvrelay_client_close(kvrelay_client *client) {
  if (!client)
    return;
  forget_calls(client);
  for (replica_block *b = client->replicas, *next; b; b = next) {
    next = b->next;
    free(b);
  }
  free(client->arena);
  free(client);
}
