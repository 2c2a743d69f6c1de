/* SPDX-License-Identifier: Apache-2.0 */
#include "zmq_message.h"

#include <errno.h>

bool kvrelay_zmq_set_int(void *socket, int option, int value) {
  return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

bool kvrelay_zmq_set_options(void *socket, size_t max_payload_bytes, unsigned high_water,
                             unsigned attempt_ms) {
  /* A little more than the bound may arrive, so that a payload above it is a counted loss and not a
   * lost connection. */
  int64_t largest = (int64_t)max_payload_bytes + ((int64_t)16 << 20);
  return kvrelay_zmq_set_int(socket, ZMQ_RCVHWM, (int)high_water) &&
         kvrelay_zmq_set_int(socket, ZMQ_LINGER, 0) && kvrelay_zmq_set_int(socket, ZMQ_IPV6, 1) &&
         kvrelay_zmq_set_int(socket, ZMQ_CONNECT_TIMEOUT, (int)attempt_ms) &&
         kvrelay_zmq_set_int(socket, ZMQ_HANDSHAKE_IVL, (int)attempt_ms) &&
         zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &largest, sizeof largest) == 0;
}

struct event *kvrelay_zmq_watch(struct event_base *base, void *socket, event_callback_fn on_event,
                                void *argument) {
  evutil_socket_t fd = -1;
  size_t fd_len = sizeof fd;
  if (zmq_getsockopt(socket, ZMQ_FD, &fd, &fd_len) != 0)
    return NULL;
  struct event *event = event_new(base, fd, EV_READ | EV_PERSIST, on_event, argument);
  if (event == NULL || event_add(event, NULL) == 0)
    return event;
  event_free(event);
  return NULL;
}

bool kvrelay_zmq_receive(void *socket, kvrelay_zmq_message *message) {
  int more = 1;
  message->count = 0;
  while (more) {
    bool kept = message->count < KVRELAY_ZMQ_FRAMES_MAX;
    zmq_msg_t extra, *frame = kept ? &message->frames[message->count] : &extra;
    zmq_msg_init(frame);
    if (zmq_msg_recv(frame, socket, ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(frame);
      if (errno == EINTR)
        continue;
      return false; /* libzmq hands out whole messages, so this happens before the first frame */
    }
    more = zmq_msg_more(frame);
    if (!kept)
      zmq_msg_close(&extra);
    message->count++;
  }
  return true;
}

static uint64_t big_endian(const uint8_t *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++)
    value = value << 8 | bytes[i];
  return value;
}

void kvrelay_zmq_deliver(kvrelay_zmq_listener *listener, kvrelay_zmq_message *message,
                         size_t frames_max, size_t max_payload_bytes, uint64_t now_ns) {
  size_t count = message->count;
  zmq_msg_t *frames = message->frames;
  if (count < 2 || count > frames_max || zmq_msg_size(&frames[count - 2]) != 8) {
    listener->bad_frames(listener, now_ns);
  } else {
    uint64_t sequence = big_endian(zmq_msg_data(&frames[count - 2]));
    size_t len = zmq_msg_size(&frames[count - 1]);
    kvrelay_text topic = {NULL, 0};
    if (count > 2) {
      topic.ptr = zmq_msg_data(&frames[count - 3]);
      topic.len = zmq_msg_size(&frames[count - 3]);
    }
    if (len > max_payload_bytes)
      listener->too_large(listener, sequence, now_ns);
    else
      listener->batch(listener, topic, sequence, zmq_msg_data(&frames[count - 1]), len, count == 2,
                      now_ns);
  }
  for (size_t i = 0; i < count && i < KVRELAY_ZMQ_FRAMES_MAX; i++)
    zmq_msg_close(&frames[i]);
}
