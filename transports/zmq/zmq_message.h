/* SPDX-License-Identifier: Apache-2.0 */
/* zmq_message.h - what the two sockets of a source share: messages of engines and the loop's view
 * of a socket. */
#ifndef KVRELAY_ZMQ_MESSAGE_H
#define KVRELAY_ZMQ_MESSAGE_H

#include <event2/event.h>
#include <zmq.h>

#include "../timer.h"
#include "zmq_sub.h"

#define KVRELAY_ZMQ_FRAMES_MAX 4

typedef struct kvrelay_zmq_message {
  zmq_msg_t frames[KVRELAY_ZMQ_FRAMES_MAX];
  size_t count; /* frames that came; those beyond the last are only counted */
} kvrelay_zmq_message;

bool kvrelay_zmq_set_int(void *socket, int option, int value);
/* Options of every socket that takes payloads of up to `max_payload_bytes`; the others as in
 * kvrelay_zmq_sub_config. */
bool kvrelay_zmq_set_options(void *socket, size_t max_payload_bytes, unsigned high_water,
                             unsigned attempt_ms);
/* The event that fires when the socket may have changed, already added; NULL: no memory. */
struct event *kvrelay_zmq_watch(struct event_base *base, void *socket, event_callback_fn on_event,
                                void *argument);
/* One whole message; false: none is waiting. */
bool kvrelay_zmq_receive(void *socket, kvrelay_zmq_message *message);
/* Parses it from the end (payload, sequence, topic), tells the listener and frees it.  One with
 * fewer than two frames or more than `frames_max` is a bad one. */
void kvrelay_zmq_deliver(kvrelay_zmq_listener *listener, kvrelay_zmq_message *message,
                         size_t frames_max, size_t max_payload_bytes, uint64_t now_ns);

#endif
