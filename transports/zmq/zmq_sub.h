/* SPDX-License-Identifier: Apache-2.0 */
/* zmq_sub.h - the live event stream of an engine: a ZeroMQ SUB socket in a libevent loop. */
#ifndef KVRELAY_ZMQ_SUB_H
#define KVRELAY_ZMQ_SUB_H

#include "../transport.h"

struct event_base;

/* Why an attempt at a connection came to nothing. */
enum kvrelay_zmq_failure {
  KVRELAY_ZMQ_UNREACHABLE = 1, /* nobody listens there, or the name does not resolve */
  KVRELAY_ZMQ_NO_HANDSHAKE,    /* the peer was silent, broke off, or does not speak ZeroMQ */
  KVRELAY_ZMQ_PROTOCOL,        /* it breaks the protocol, or asks for PLAIN or CURVE */
  KVRELAY_ZMQ_REFUSED,         /* its authentication refuses us */
  KVRELAY_ZMQ_NOT_ACCEPTED,    /* bound: the system refused to accept a connection */
  KVRELAY_ZMQ_FAILURES         /* one more than the last */
};
/* A word of a log line for each, "unreachable"; "unknown" for another number. */
const char *kvrelay_zmq_failure_name(int failure);

/* What a stream reports; `self` is its first argument everywhere, bytes are valid during the call.
 */
typedef struct kvrelay_zmq_listener kvrelay_zmq_listener;
struct kvrelay_zmq_listener {
  /* One message of two or three frames; topic is empty when there were two, which `odd` then tells.
   */
  void (*batch)(kvrelay_zmq_listener *self, kvrelay_text topic, uint64_t sequence,
                const uint8_t *payload, size_t len, bool odd, uint64_t now_ns);
  /* A payload above max_payload_bytes was dropped: a lost batch. */
  void (*too_large)(kvrelay_zmq_listener *self, uint64_t sequence, uint64_t now_ns);
  /* A message of another number of frames, or with a sequence that is not 8 bytes: no effect on the
   * order. */
  void (*bad_frames)(kvrelay_zmq_listener *self, uint64_t now_ns);
  /* Everything that waited was delivered, or the turn's share of it. */
  void (*turn)(kvrelay_zmq_listener *self, uint64_t now_ns);
  /*
   * The number of publishers behind the socket went from 0 to 1 or back; before the first batch of
   * the new connection, perhaps before the last ones of the former.  Never for inproc.  May be
   * NULL.
   */
  void (*connection)(kvrelay_zmq_listener *self, bool connected, uint64_t now_ns);
  /*
   * An attempt came to nothing: enum kvrelay_zmq_failure, and what is known of it in words.  The
   * next one comes by itself, so this is told again and again.  Never for inproc.  May be NULL.
   */
  void (*failed)(kvrelay_zmq_listener *self, int failure, const char *text, uint64_t now_ns);
};

typedef struct kvrelay_zmq_sub_config {
  void *context;            /* of zmq_ctx_new; must outlive the socket */
  struct event_base *base;  /* must outlive the socket */
  const char *endpoint;     /* tcp://host:port, tcp://[::1]:port, ipc://path, ipc://@abstract,
                               inproc://name; only read during open */
  bool bind;                /* listen there instead of connecting */
  const char *topic;        /* prefix, NULL = everything */
  size_t max_payload_bytes; /* larger ones are dropped; a message far beyond ends the connection */
  unsigned
      max_batches; /* of one turn of the loop, ≥ 1, so that one stream does not starve the others */
  /* Messages that may wait in front of the loop, 0 = any number.  At the bound nothing more is read
   * from the network, the publisher's own queue fills, and what that drops is a gap in the
   * sequence; without one nothing is lost here, and memory grows while the loop is busy. */
  unsigned high_water;
  unsigned attempt_ms;                         /* for a connection and its handshake each, ≥ 1 */
  unsigned reconnect_min_ms, reconnect_max_ms; /* ≥ 1; doubling between them */
} kvrelay_zmq_sub_config;

typedef struct kvrelay_zmq_sub kvrelay_zmq_sub;

kvrelay_zmq_sub_config kvrelay_zmq_sub_config_default(void);
/*
 * Opens the stream; connecting and connecting again happen in the background. KVRELAY_TRANSPORT_OK,
 * or _ERR_ARG, _ERR_ADDRESS (not a ZeroMQ endpoint), _ERR_BIND, _ERR_MEMORY, _ERR_SYSTEM, with
 * errno set by libzmq (zmq_strerror).
 */
int kvrelay_zmq_sub_open(const kvrelay_zmq_sub_config *cfg, kvrelay_zmq_listener *listener,
                         kvrelay_zmq_sub **out);
/* The address it is bound or connected to, with the real port; lent until close. */
const char *kvrelay_zmq_sub_endpoint(const kvrelay_zmq_sub *sub);
/* No callback comes any more.  NULL is harmless. */
void kvrelay_zmq_sub_close(kvrelay_zmq_sub *sub);

#endif
