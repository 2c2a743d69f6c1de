/* SPDX-License-Identifier: Apache-2.0 */
/* zmq_replay.h - batches of an engine once more: a ZeroMQ DEALER in a libevent loop. */
#ifndef KVRELAY_ZMQ_REPLAY_H
#define KVRELAY_ZMQ_REPLAY_H

#include "zmq_sub.h"

typedef struct kvrelay_zmq_replay_config {
  void *context;            /* of zmq_ctx_new; must outlive the object */
  struct event_base *base;  /* must outlive the object */
  const char *endpoint;     /* as in kvrelay_zmq_sub_config; only read during open */
  size_t max_payload_bytes; /* larger ones are dropped and told */
  unsigned max_batches;     /* of one turn of the loop, ≥ 1 */
  unsigned attempt_ms;      /* as in kvrelay_zmq_sub_config */
} kvrelay_zmq_replay_config;

typedef struct kvrelay_zmq_replay kvrelay_zmq_replay;

kvrelay_zmq_replay_config kvrelay_zmq_replay_config_default(void);
/*
 * Nothing is connected before the first request.  Replies come as `batch` of the listener, the end
 * of the answer as one with the sequence UINT64_MAX; `connection` and `failed` are never called,
 * and may be NULL. KVRELAY_TRANSPORT_OK, or _ERR_ARG, _ERR_MEMORY.
 */
int kvrelay_zmq_replay_open(const kvrelay_zmq_replay_config *cfg, kvrelay_zmq_listener *listener,
                            kvrelay_zmq_replay **out);
/*
 * Asks for all batches from `first` on, on a socket of its own: replies to a former request do not
 * come any more.  Not from within `batch`, `too_large` and `bad_frames`.  KVRELAY_TRANSPORT_OK, or
 * _ERR_ADDRESS (not a ZeroMQ endpoint), _ERR_MEMORY, _ERR_SYSTEM, with errno set by libzmq.
 */
int kvrelay_zmq_replay_ask(kvrelay_zmq_replay *replay, uint64_t first);
/* Gives the request up and its socket back; harmless when there is none.  As for the above, not
 * from within the delivery of a message. */
void kvrelay_zmq_replay_stop(kvrelay_zmq_replay *replay);
/* No callback comes any more.  NULL is harmless. */
void kvrelay_zmq_replay_close(kvrelay_zmq_replay *replay);

#endif
