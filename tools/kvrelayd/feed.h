/* SPDX-License-Identifier: Apache-2.0 */
/* feed.h - one stream of engine events into one pool: a ZeroMQ socket or a recorded file. */
#ifndef KVRELAYD_FEED_H
#define KVRELAYD_FEED_H

#include "config.h"
#include "proto/engine_events.h"
#include "transports/zmq/zmq_replay.h"

struct served_pool;

enum feed_link { FEED_NEVER = 0, FEED_UP, FEED_LOST };

typedef struct feed {
  kvrelay_zmq_listener listener; /* first: the socket's view of this feed */
  kvrelay_zmq_listener replies;  /* the replay socket's */
  struct served_pool *pool;
  const config_worker *worker;
  uint32_t rank;  /* of this socket; the batch may name another */
  char name[600]; /* namespace/component/endpoint/worker.rank */
  kvrelay_source source;
  void *source_mem;
  size_t source_len;
  kvrelay_zmq_sub *socket;    /* engine only */
  kvrelay_zmq_replay *replay; /* NULL: the engine cannot be asked again */
  int link;                   /* of the engine: FEED_ */
  uint64_t link_ns;           /* since when; 0 = not connected to yet */
  uint64_t down_ns; /* since when the engine cannot be reached; 0 = it can, or nothing is known */
  bool unreachable; /* that was logged, and still holds */
  bool dirty;       /* batches were applied since the pool was told */
  bool stirred;     /* in the list of its daemon, and the next one there */
  struct feed *stirred_next;
  uint64_t logged[KVRELAY_COUNT_LEN];      /* counts as of the last line about each */
  uint64_t attempts[KVRELAY_ZMQ_FAILURES]; /* that failed since the engine was connected, by why */
} feed;

/* Names the feed and reserves its memory.  0, or an exit code after a log line. */
int feed_reserve(feed *f, struct served_pool *pool, const config_worker *worker, uint32_t rank);
void feed_close(feed *f);
/* The producer behind the feed is built, and empty: starts, or starts over, with it.  As
 * kvrelay_source_init. */
int feed_start(feed *f, uint64_t now_ns);

/* One batch as it came: order, decode, apply.  KVRELAY_OK, or KVRELAY_ERR_INVARIANT: the producer
 * has to be fenced. */
int feed_batch(feed *f, uint64_t sequence, const uint8_t *payload, size_t len, uint64_t now_ns);
/* Applies what became due by an input of the source that gave `err`.  As feed_batch. */
int feed_drain(feed *f, int err, uint64_t now_ns);
/* After the batches of a turn: tells the pool, reports. */
void feed_turn(feed *f, uint64_t now_ns);
/* Something happened to the feed: a feed_tick is due after this turn of the loop. */
void feed_stir(feed *f);
/* Asks for what is missing; an answer that stays away ends, and a source that cannot be reached for
 * too long loses its blocks. */
void feed_tick(feed *f, uint64_t now_ns);
/* When the next feed_tick is due though nothing happens, KVRELAY_TIME_NONE = never. */
uint64_t feed_deadline_ns(const feed *f, uint64_t now_ns);
/* Whether the worker is alive, as far as its event connection tells: enum kvrelay_liveness. */
int32_t feed_liveness(const feed *f, uint64_t now_ns);
/* One log line for every reason that reached a new power of two. */
void feed_report(feed *f);

/* feed_engine.c: connects the socket.  0, or an exit code after a log line. */
int feed_engine_connect(feed *f, struct event_base *base, void *zmq_context);
/* Logs when an engine counts as dead: never reached, or lost for too long. */
void feed_engine_watch(feed *f, uint64_t now_ns);
/* Asks the engine for all batches from `first` on; what cannot be asked is a line in the log. */
void feed_engine_ask(feed *f, uint64_t first);
/* feed_trace.c: applies the whole recording.  0, or an exit code after a log line. */
int feed_trace_read(feed *f);

#endif
