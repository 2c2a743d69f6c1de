/* SPDX-License-Identifier: Apache-2.0 */
/* test_zmq.h - a ZeroMQ socket of a source, a publisher of libzmq and a loop. */
#ifndef TEST_ZMQ_H
#define TEST_ZMQ_H

#include <criterion/criterion.h>
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#include "zmq/zmq_replay.h"

#define PATIENCE_S 20 /* only a failing test waits that long */
#define LOG_CAP 20000

/* ---- what a socket reported ---- */

typedef struct seen {
  kvrelay_zmq_listener listener; /* first */
  uint64_t sequence[LOG_CAP];
  size_t messages, too_large, bad_frames, odd, turns;
  uint64_t lost_sequence;
  size_t payload_len, worst_turn, this_turn;
  uint8_t payload_sum;
  char topic[64];
  int up, down;
  int failed[KVRELAY_ZMQ_FAILURES], failures;
  char failure[128]; /* the last one's text */
  bool ticked;
} seen;

static seen *seen_of(kvrelay_zmq_listener *self);

static inline void on_batch(kvrelay_zmq_listener *self, kvrelay_text topic, uint64_t sequence,
                            const uint8_t *payload, size_t len, bool odd, uint64_t now_ns) {
  seen *s = seen_of(self);
  cr_assert_gt(now_ns, 0);
  cr_assert_lt(s->messages, LOG_CAP);
  s->sequence[s->messages++] = sequence;
  s->odd += odd;
  s->payload_len = len;
  s->payload_sum = 0;
  for (size_t i = 0; i < len; i++)
    s->payload_sum = (uint8_t)(s->payload_sum + payload[i]);
  snprintf(s->topic, sizeof s->topic, "%.*s", (int)topic.len, (const char *)topic.ptr);
  if (++s->this_turn > s->worst_turn)
    s->worst_turn = s->this_turn;
}

static inline void on_too_large(kvrelay_zmq_listener *self, uint64_t sequence, uint64_t now_ns) {
  (void)now_ns;
  seen_of(self)->too_large++;
  seen_of(self)->lost_sequence = sequence;
}

static inline void on_bad_frames(kvrelay_zmq_listener *self, uint64_t now_ns) {
  (void)now_ns;
  seen_of(self)->bad_frames++;
}

static inline void on_turn(kvrelay_zmq_listener *self, uint64_t now_ns) {
  (void)now_ns;
  seen_of(self)->turns++;
}

static inline void on_connection(kvrelay_zmq_listener *self, bool connected, uint64_t now_ns) {
  (void)now_ns;
  seen_of(self)->up += connected;
  seen_of(self)->down += !connected;
}

static inline void on_failed(kvrelay_zmq_listener *self, int failure, const char *text,
                             uint64_t now_ns) {
  seen *s = seen_of(self);
  (void)now_ns;
  cr_assert(failure > 0 && failure < KVRELAY_ZMQ_FAILURES && text[0] != 0);
  s->failed[failure]++;
  s->failures++;
  snprintf(s->failure, sizeof s->failure, "%s", text);
}

/* ---- a socket, a publisher and a loop ---- */

typedef struct bench {
  struct event_base *base;
  void *context, *pub;
  kvrelay_zmq_sub *sub;
  kvrelay_zmq_sub_config cfg;
  char endpoint[256];
  seen seen;
} bench;

static bench b;

static inline seen *seen_of(kvrelay_zmq_listener *self) { return (seen *)(void *)self; }

static inline void setup(void) {
  memset(&b, 0, sizeof b);
  b.base = event_base_new();
  b.context = zmq_ctx_new();
  b.cfg = kvrelay_zmq_sub_config_default();
  b.cfg.base = b.base;
  b.cfg.context = b.context;
  b.seen.listener = (kvrelay_zmq_listener){on_batch, on_too_large,  on_bad_frames,
                                           on_turn,  on_connection, on_failed};
  b.cfg.reconnect_min_ms = 10;
  b.cfg.reconnect_max_ms = 50;
}

static inline void teardown(void) {
  kvrelay_zmq_sub_close(b.sub);
  if (b.pub != NULL)
    zmq_close(b.pub);
  zmq_ctx_term(b.context);
  event_base_free(b.base);
}

static inline void publisher(const char *where) {
  int zero = 0, one = 1;
  size_t len = sizeof b.endpoint;
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_not_null(b.pub);
  zmq_setsockopt(b.pub, ZMQ_LINGER, &zero, sizeof zero);
  zmq_setsockopt(b.pub, ZMQ_SNDHWM, &zero, sizeof zero);
  zmq_setsockopt(b.pub, ZMQ_IPV6, &one, sizeof one);
  for (int i = 0; zmq_bind(b.pub, where) != 0; i++) {
    cr_assert_lt(i, 200, "bind %s: %s", where, strerror(errno));
    usleep(10000);
  }
  cr_assert_eq(zmq_getsockopt(b.pub, ZMQ_LAST_ENDPOINT, b.endpoint, &len), 0);
}

static inline void subscribe(void) {
  if (b.cfg.endpoint == NULL)
    b.cfg.endpoint = b.endpoint;
  cr_assert_eq(kvrelay_zmq_sub_open(&b.cfg, &b.seen.listener, &b.sub), KVRELAY_TRANSPORT_OK);
}

/* One turn of the loop, at most this long. */
static inline void turn_us(long us) {
  struct timeval short_time = {0, us};
  b.seen.this_turn = 0;
  event_base_loopexit(b.base, &short_time);
  event_base_loop(b.base, EVLOOP_ONCE);
}

static inline void turn(void) { turn_us(20000); }

#define WAIT_FOR(CONDITION)                                                                        \
  do {                                                                                             \
    for (time_t start_ = time(NULL); !(CONDITION);) {                                              \
      cr_assert_leq(time(NULL) - start_, PATIENCE_S, "never: " #CONDITION);                        \
      turn();                                                                                      \
    }                                                                                              \
  } while (0)

static inline void send_frames(size_t count, const void *const *frames, const size_t *lens) {
  for (size_t i = 0; i < count; i++)
    cr_assert_geq(zmq_send(b.pub, frames[i], lens[i], i + 1 < count ? ZMQ_SNDMORE : 0), 0);
}

static inline void publish_bytes(const char *topic, uint64_t sequence, const void *payload,
                                 size_t len) {
  uint8_t number[8];
  for (int i = 0; i < 8; i++)
    number[i] = (uint8_t)(sequence >> (56 - 8 * i));
  send_frames(3, (const void *const[]){topic, number, payload},
              (const size_t[]){strlen(topic), 8, len});
}

static inline void publish(uint64_t sequence) { publish_bytes("kv", sequence, "payload", 7); }

/* Subscriptions arrive late: publishes a number that no test uses until the first one comes
 * through. */
static inline void meet(void) {
  for (int i = 0; b.seen.messages == 0; i++) {
    cr_assert_lt(i, PATIENCE_S * 50, "the subscription never arrived");
    publish(999999);
    turn();
  }
  publish(888888);
  WAIT_FOR(b.seen.sequence[b.seen.messages - 1] == 888888);
  b.seen.messages = b.seen.odd = 0;
}

#endif
