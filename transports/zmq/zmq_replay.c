/* SPDX-License-Identifier: Apache-2.0 */
#include "zmq_replay.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zmq_message.h"

/* An empty frame, perhaps a topic, sequence, payload. */
#define FRAMES_MAX 4

/* A bound would push back on the engine, whose own queue drops what does not fit. */
#define NO_HIGH_WATER 0

struct kvrelay_zmq_replay {
  kvrelay_zmq_listener *listener;
  void *context, *socket; /* socket: of the request under way */
  struct event_base *base;
  struct event *readable;
  kvrelay_timer again;
  size_t max_payload_bytes;
  unsigned max_batches, attempt_ms;
  char endpoint[512];
};

kvrelay_zmq_replay_config kvrelay_zmq_replay_config_default(void) {
  kvrelay_zmq_sub_config live = kvrelay_zmq_sub_config_default();
  kvrelay_zmq_replay_config cfg = {.max_payload_bytes = live.max_payload_bytes,
                                   .max_batches = live.max_batches,
                                   .attempt_ms = live.attempt_ms};
  return cfg;
}

/* As in zmq_sub.c: all that waits is taken, or the loop is asked to come again. */
static void take(void *argument) {
  kvrelay_zmq_replay *r = argument;
  uint64_t now_ns = kvrelay_now_ns();
  unsigned batches = 0;
  for (; batches < r->max_batches; batches++) {
    kvrelay_zmq_message message;
    if (!kvrelay_zmq_receive(r->socket, &message))
      break;
    kvrelay_zmq_deliver(r->listener, &message, FRAMES_MAX, r->max_payload_bytes, now_ns);
  }
  if (batches == r->max_batches)
    kvrelay_timer_set(&r->again, 0);
  r->listener->turn(r->listener, now_ns); /* may end this socket */
}

static void on_readable(evutil_socket_t fd, short what, void *replay) {
  (void)fd;
  (void)what;
  take(replay);
}

int kvrelay_zmq_replay_open(const kvrelay_zmq_replay_config *cfg, kvrelay_zmq_listener *listener,
                            kvrelay_zmq_replay **out) {
  if (cfg->context == NULL || cfg->base == NULL || cfg->endpoint == NULL || cfg->max_batches == 0 ||
      strlen(cfg->endpoint) >= sizeof((*out)->endpoint) || cfg->max_payload_bytes == 0 ||
      cfg->max_payload_bytes > INT64_MAX / 2 || cfg->attempt_ms == 0 || cfg->attempt_ms > INT_MAX)
    return KVRELAY_TRANSPORT_ERR_ARG;
  kvrelay_zmq_replay *r = calloc(1, sizeof *r);
  if (r == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  r->listener = listener;
  r->context = cfg->context;
  r->base = cfg->base;
  r->max_payload_bytes = cfg->max_payload_bytes;
  r->max_batches = cfg->max_batches;
  r->attempt_ms = cfg->attempt_ms;
  snprintf(r->endpoint, sizeof r->endpoint, "%s", cfg->endpoint);
  *out = r;
  return KVRELAY_TRANSPORT_OK;
}

static bool send_request(void *socket, uint64_t first) {
  uint8_t bytes[8];
  for (int i = 0; i < 8; i++)
    bytes[i] = (uint8_t)(first >> (56 - 8 * i));
  return zmq_send(socket, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT) == 0 &&
         zmq_send(socket, bytes, sizeof bytes, ZMQ_DONTWAIT) == sizeof bytes;
}

int kvrelay_zmq_replay_ask(kvrelay_zmq_replay *r, uint64_t first) {
  int err = KVRELAY_TRANSPORT_ERR_SYSTEM;
  kvrelay_zmq_replay_stop(r);
  r->socket = zmq_socket(r->context, ZMQ_DEALER);
  if (r->socket != NULL &&
      kvrelay_zmq_set_options(r->socket, r->max_payload_bytes, NO_HIGH_WATER, r->attempt_ms)) {
    if (zmq_connect(r->socket, r->endpoint) != 0)
      err = KVRELAY_TRANSPORT_ERR_ADDRESS;
    else if (send_request(r->socket, first))
      err = KVRELAY_TRANSPORT_OK;
  }
  if (err == KVRELAY_TRANSPORT_OK) {
    r->readable = kvrelay_zmq_watch(r->base, r->socket, on_readable, r);
    err = r->readable == NULL ? KVRELAY_TRANSPORT_ERR_MEMORY
                              : kvrelay_timer_open(&r->again, r->base, take, r);
    if (err == KVRELAY_TRANSPORT_OK)
      kvrelay_timer_set(&r->again, 0); /* unasked: for what arrived before the loop runs */
  }
  if (err != KVRELAY_TRANSPORT_OK) {
    int saved = errno;
    kvrelay_zmq_replay_stop(r);
    errno = saved;
  }
  return err;
}

void kvrelay_zmq_replay_stop(kvrelay_zmq_replay *r) {
  if (r->readable != NULL)
    event_free(r->readable);
  kvrelay_timer_close(&r->again);
  if (r->socket != NULL)
    zmq_close(r->socket);
  r->readable = NULL;
  r->socket = NULL;
}

void kvrelay_zmq_replay_close(kvrelay_zmq_replay *r) {
  if (r == NULL)
    return;
  kvrelay_zmq_replay_stop(r);
  free(r);
}
