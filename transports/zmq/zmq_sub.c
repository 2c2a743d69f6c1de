/* SPDX-License-Identifier: Apache-2.0 */
#include "zmq_sub.h"

#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

#define FRAMES_MAX 3

struct kvrelay_zmq_sub {
  kvrelay_zmq_listener *listener;
  void *socket;
  struct event *readable;
  size_t max_payload_bytes;
  unsigned max_batches;
};

kvrelay_zmq_sub_config kvrelay_zmq_sub_config_default(void) {
  kvrelay_zmq_sub_config cfg = {.max_payload_bytes = (size_t)64 << 20, .max_batches = 256};
  return cfg;
}

static uint64_t clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t big_endian(const uint8_t *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++)
    value = value << 8 | bytes[i];
  return value;
}

/* All frames of one message; those beyond the third are only counted.  false: nothing is waiting. */
static bool receive(void *socket, zmq_msg_t frames[FRAMES_MAX], size_t *count) {
  int more = 1;
  *count = 0;
  while (more) {
    zmq_msg_t extra, *frame = *count < FRAMES_MAX ? &frames[*count] : &extra;
    zmq_msg_init(frame);
    if (zmq_msg_recv(frame, socket, ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(frame);
      if (errno == EINTR)
        continue;
      return false; /* libzmq hands out whole messages, so this happens before the first frame */
    }
    more = zmq_msg_more(frame);
    if (*count >= FRAMES_MAX)
      zmq_msg_close(&extra);
    ++*count;
  }
  return true;
}

/* Parsed from the end: payload, sequence, topic. */
static void deliver(kvrelay_zmq_sub *sub, zmq_msg_t *frames, size_t count, uint64_t now_ns) {
  kvrelay_zmq_listener *l = sub->listener;
  if (count < 2 || count > FRAMES_MAX || zmq_msg_size(&frames[count - 2]) != 8) {
    l->bad_frames(l, now_ns);
    return;
  }
  uint64_t sequence = big_endian(zmq_msg_data(&frames[count - 2]));
  size_t len = zmq_msg_size(&frames[count - 1]);
  kvrelay_text topic = {NULL, 0};
  if (count == 3) {
    topic.ptr = zmq_msg_data(&frames[0]);
    topic.len = zmq_msg_size(&frames[0]);
  }
  if (len > sub->max_payload_bytes)
    l->too_large(l, sequence, now_ns);
  else
    l->batch(l, topic, sequence, zmq_msg_data(&frames[count - 1]), len, count == 2, now_ns);
}

/* The descriptor only says that something may have changed: everything that waits is taken, or the loop is asked to come again. */
static void on_readable(evutil_socket_t fd, short what, void *argument) {
  kvrelay_zmq_sub *sub = argument;
  uint64_t now_ns = clock_ns();
  unsigned batches = 0;
  (void)fd;
  (void)what;
  for (; batches < sub->max_batches; batches++) {
    zmq_msg_t frames[FRAMES_MAX];
    size_t count;
    if (!receive(sub->socket, frames, &count))
      break;
    deliver(sub, frames, count, now_ns);
    for (size_t i = 0; i < count && i < FRAMES_MAX; i++)
      zmq_msg_close(&frames[i]);
  }
  if (batches == sub->max_batches)
    event_active(sub->readable, EV_READ, 0);
  sub->listener->turn(sub->listener, now_ns);
}

static bool set_int(void *socket, int option, int value) { return zmq_setsockopt(socket, option, &value, sizeof value) == 0; }

static bool set_options(void *socket, const kvrelay_zmq_sub_config *cfg) {
  /* A little more than the bound may arrive, so that a payload above it is a counted loss and not a lost connection. */
  int64_t largest = (int64_t)cfg->max_payload_bytes + ((int64_t)16 << 20);
  const char *topic = cfg->topic == NULL ? "" : cfg->topic;
  return set_int(socket, ZMQ_RCVHWM, 0) && set_int(socket, ZMQ_LINGER, 0) && set_int(socket, ZMQ_IPV6, 1) &&
         set_int(socket, ZMQ_RECONNECT_IVL, 100) && set_int(socket, ZMQ_RECONNECT_IVL_MAX, 5000) &&
         set_int(socket, ZMQ_TCP_KEEPALIVE, 1) && set_int(socket, ZMQ_HEARTBEAT_IVL, 10000) &&
         set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, 30000) && zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &largest, sizeof largest) == 0 &&
         zmq_setsockopt(socket, ZMQ_SUBSCRIBE, topic, strlen(topic)) == 0;
}

int kvrelay_zmq_sub_open(const kvrelay_zmq_sub_config *cfg, kvrelay_zmq_listener *listener, kvrelay_zmq_sub **out) {
  if (cfg->context == NULL || cfg->base == NULL || cfg->endpoint == NULL || cfg->max_batches == 0)
    return KVRELAY_TRANSPORT_ERR_ARG;
  kvrelay_zmq_sub *sub = calloc(1, sizeof *sub);
  if (sub == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  sub->listener = listener;
  sub->max_payload_bytes = cfg->max_payload_bytes;
  sub->max_batches = cfg->max_batches;
  sub->socket = zmq_socket(cfg->context, ZMQ_SUB);
  int err = sub->socket == NULL || !set_options(sub->socket, cfg) ? KVRELAY_TRANSPORT_ERR_SYSTEM : KVRELAY_TRANSPORT_OK;
  if (err == KVRELAY_TRANSPORT_OK && cfg->bind && zmq_bind(sub->socket, cfg->endpoint) != 0)
    err = errno == EINVAL || errno == EPROTONOSUPPORT ? KVRELAY_TRANSPORT_ERR_ADDRESS : KVRELAY_TRANSPORT_ERR_BIND;
  if (err == KVRELAY_TRANSPORT_OK && !cfg->bind && zmq_connect(sub->socket, cfg->endpoint) != 0)
    err = KVRELAY_TRANSPORT_ERR_ADDRESS;
  evutil_socket_t fd = -1;
  size_t fd_len = sizeof fd;
  if (err == KVRELAY_TRANSPORT_OK && zmq_getsockopt(sub->socket, ZMQ_FD, &fd, &fd_len) != 0)
    err = KVRELAY_TRANSPORT_ERR_SYSTEM;
  if (err == KVRELAY_TRANSPORT_OK) {
    sub->readable = event_new(cfg->base, fd, EV_READ | EV_PERSIST, on_readable, sub);
    if (sub->readable == NULL || event_add(sub->readable, NULL) != 0)
      err = KVRELAY_TRANSPORT_ERR_MEMORY;
    else
      event_active(sub->readable, EV_READ, 0); /* what arrived before the loop runs */
  }
  if (err != KVRELAY_TRANSPORT_OK) {
    int saved = errno;
    kvrelay_zmq_sub_close(sub);
    errno = saved;
    return err;
  }
  *out = sub;
  return KVRELAY_TRANSPORT_OK;
}

void kvrelay_zmq_sub_close(kvrelay_zmq_sub *sub) {
  if (sub == NULL)
    return;
  if (sub->readable != NULL)
    event_free(sub->readable);
  if (sub->socket != NULL)
    zmq_close(sub->socket);
  free(sub);
}
