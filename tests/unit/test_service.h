/* SPDX-License-Identifier: Apache-2.0 */
/* test_service.h - a real relay behind an in-memory connection, asked by hand. */
#ifndef TEST_SERVICE_H
#define TEST_SERVICE_H

#include "client.h"
#include "kvrelay_pb.h"
#include "mem/mem.h"
#include "service.h"
#include "test_relay_fixture.h"

static inline uint64_t fixture_wall_us(void *context) { return ((const fx *)context)->wall_us; }

static inline kvrelay_relay_service *open_service(fx *f, size_t max_message_bytes) {
  kvrelay_relay_service_config cfg = kvrelay_relay_service_config_default(&f->relay);
  cr_assert_gt(cfg.wall_us(NULL), UINT64_C(1600000000000000));
  cfg.wall_us = fixture_wall_us;
  cfg.wall_context = f;
  if (max_message_bytes)
    cfg.max_message_bytes = max_message_bytes;
  kvrelay_relay_service *service;
  cr_assert_eq(kvrelay_relay_service_open(&cfg, &service), KVRELAY_TRANSPORT_OK);
  return service;
}

/* ---- a caller that keeps what it gets ---- */

#define TAKER_CALLS 160

typedef struct taken {
  uint8_t *bytes; /* of the last message */
  size_t len, messages, ends, admitted;
  kvrelay_status status;
} taken;

typedef struct taker {
  kvrelay_caller base;
  taken calls[TAKER_CALLS];
  bool ready;
} taker;

static inline void take_connection(kvrelay_caller *self, int state, int err, const char *text,
                                   uint64_t retry_ns, uint64_t now_ns) {
  (void)err;
  (void)text;
  (void)retry_ns;
  (void)now_ns;
  ((taker *)self)->ready = state == KVRELAY_CONNECTION_READY;
}

static inline void take_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)now_ns;
  ((taker *)self)->calls[call].admitted++;
}

static inline void take_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes,
                                size_t len, uint64_t now_ns) {
  taken *c = &((taker *)self)->calls[call];
  (void)now_ns;
  free(c->bytes);
  c->bytes = malloc(len + 1);
  memcpy(c->bytes, bytes, len);
  c->len = len;
  c->messages++;
}

static inline void take_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                            uint64_t now_ns) {
  (void)now_ns;
  ((taker *)self)->calls[call].ends++;
  ((taker *)self)->calls[call].status = *status;
}

/* A relay behind a connection, asked by hand. */
typedef struct bare {
  fx *f;
  kvrelay_relay_service *service;
  kvrelay_mem *mem;
  kvrelay_transport *t;
  taker caller;
} bare;

static inline void bare_turn(bare *b) {
  do
    kvrelay_relay_service_poll(b->service, b->f->now);
  while (b->t->run_once(b->t, 0) > 0);
}

static inline void bare_open(bare *b, const kvrelay_relay_config *cfg, size_t max_message_bytes) {
  memset(b, 0, sizeof *b);
  b->f = fx_open(cfg);
  b->service = open_service(b->f, max_message_bytes);
  b->caller.base = (kvrelay_caller){take_connection, take_admitted, take_message, take_end};
  kvrelay_mem_config mem_cfg = kvrelay_mem_config_default();
  mem_cfg.clock_ns = &b->f->now;
  cr_assert_eq(
      kvrelay_mem_open(&mem_cfg, kvrelay_relay_service_base(b->service), &b->caller.base, &b->mem),
      KVRELAY_TRANSPORT_OK);
  b->t = kvrelay_mem_server(b->mem);
  bare_turn(b);
  cr_assert(b->caller.ready);
}

static inline void bare_close(bare *b) {
  kvrelay_mem_close(b->mem);
  const kvrelay_relay_stats stats = kvrelay_relay_stats_get(&b->f->relay);
  cr_assert(stats.catalog_streams == 0 && stats.pool_streams == 0, "a permit was not returned");
  fx_check(b->f);
  kvrelay_relay_service_close(b->service);
  for (size_t i = 0; i < TAKER_CALLS; i++)
    free(b->caller.calls[i].bytes);
  fx_close(b->f);
}

static inline taken *ask(bare *b, uint32_t number, const char *path, const kvrelay_iov *messages,
                         size_t len) {
  cr_assert_eq(kvrelay_mem_call_raw(b->mem, number, path, messages, len), KVRELAY_TRANSPORT_OK);
  bare_turn(b);
  return &b->caller.calls[number];
}

static inline taken *ask_request(bare *b, uint32_t number, const kvrelay_request *q) {
  uint8_t bytes[8192];
  const ptrdiff_t len = kvrelay_pb_encode_request(q, bytes, sizeof bytes);
  cr_assert_geq(len, 0);
  const kvrelay_iov message = {bytes, (size_t)len};
  return ask(b, number, kvrelay_method_path(q->method), &message, 1);
}

/* ---- both sides ---- */

typedef struct world {
  fx *f;
  kvrelay_relay_service *service;
  kvrelay_mem *mem;
  kvrelay_client_transport *t;
  kvrelay_consumer consumer;
  void *consumer_mem;
  kvrelay_client *client;
} world;

static inline void world_open(world *w, const kvrelay_relay_config *cfg, uint64_t delay_ns,
                              size_t max_replica_bytes) {
  memset(w, 0, sizeof *w);
  w->f = fx_open(cfg);
  w->service = open_service(w->f, 0);
  kvrelay_consumer_config consumer_cfg = kvrelay_consumer_config_default();
  consumer_cfg.catalog_bytes = 1 << 16;
  consumer_cfg.max_pools = 64;
  const size_t len = kvrelay_consumer_mem_size(&consumer_cfg);
  w->consumer_mem = malloc(len);
  cr_assert_eq(kvrelay_consumer_init(&w->consumer, &consumer_cfg, w->consumer_mem, len, w->f->now),
               KVRELAY_OK);
  kvrelay_client_config client_cfg = kvrelay_client_config_default(&w->consumer);
  if (max_replica_bytes)
    client_cfg.max_replica_bytes = max_replica_bytes;
  cr_assert_eq(kvrelay_client_open(&client_cfg, &w->client), KVRELAY_TRANSPORT_OK);
  kvrelay_mem_config mem_cfg = kvrelay_mem_config_default();
  mem_cfg.clock_ns = &w->f->now;
  mem_cfg.delay_ns = delay_ns;
  mem_cfg.queue_messages = 4;
  cr_assert_eq(kvrelay_mem_open(&mem_cfg, kvrelay_relay_service_base(w->service),
                                kvrelay_client_caller(w->client), &w->mem),
               KVRELAY_TRANSPORT_OK);
  w->t = kvrelay_mem_client(w->mem);
  kvrelay_client_attach(w->client, w->t);
}

static inline void world_close(world *w) {
  kvrelay_mem_close(w->mem);
  kvrelay_client_close(w->client);
  free(w->consumer_mem);
  const kvrelay_relay_stats stats = kvrelay_relay_stats_get(&w->f->relay);
  cr_assert(stats.catalog_streams == 0 && stats.pool_streams == 0, "a permit was not returned");
  kvrelay_relay_service_close(w->service);
  fx_close(w->f);
}

/* The loop of a program with both sides in it, for this long. */
static inline void world_run(world *w, uint64_t ns) {
  const uint64_t until = w->f->now + ns;
  bool more = true;
  while (more) {
    cr_assert_eq(kvrelay_client_run(w->client, w->f->now), KVRELAY_TRANSPORT_OK);
    kvrelay_relay_service_poll(w->service, w->f->now);
    uint64_t next = kvrelay_client_deadline_ns(w->client);
    const uint64_t relay_next = kvrelay_relay_deadline_ns(&w->f->relay);
    next = next < relay_next ? next : relay_next;
    next = next < until ? next : until;
    const int happened = w->t->base.run_once(&w->t->base, next > w->f->now ? next - w->f->now : 0);
    cr_assert_geq(happened, 0);
    more = happened > 0 || w->f->now < until;
  }
  fx_check(w->f);
}

static inline bool is_live_and_equal(const world *w, const fx_pool *p) {
  uint64_t revision;
  uint32_t pools;
  if (!kvrelay_consumer_catalog(&w->consumer, &revision, &pools))
    return false;
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view view;
    cr_assert_eq(kvrelay_consumer_pool_get(&w->consumer, i, w->f->now, &view), KVRELAY_OK);
    if (kvrelay_producer_equal(&view.descriptor->producer,
                               &kvrelay_pool_descriptor(p->pool)->producer))
      return view.state == KVRELAY_REPLICA_LIVE &&
             view.sequence == kvrelay_pool_sequence(p->pool) && fx_same_words(p, view.words);
  }
  return false;
}

static inline uint32_t live_pools(const world *w) {
  uint64_t revision;
  uint32_t pools = 0, live = 0;
  (void)kvrelay_consumer_catalog(&w->consumer, &revision, &pools);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view view;
    cr_assert_eq(kvrelay_consumer_pool_get(&w->consumer, i, w->f->now, &view), KVRELAY_OK);
    live += view.state == KVRELAY_REPLICA_LIVE;
  }
  return live;
}

#endif
