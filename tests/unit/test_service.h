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

#endif
