/* SPDX-License-Identifier: Apache-2.0 */
/* serve.h - the pools this daemon publishes: exact state, relay pool and event feeds of each. */
#ifndef KVRELAYD_SERVE_H
#define KVRELAYD_SERVE_H

#include <event2/event.h>

#include "feed.h"
#include "plan.h"
#include "scope.h"
#include "topology.h"

typedef struct served_pool {
  const plan_pool *plan;
  char name[512]; /* namespace/component/endpoint */
  struct serve *serve;
  ckf_producer producer;
  void *producer_mem;
  kvrelay_pool *pool; /* NULL while it is not published; its state goes on all the same */
  void *pool_mem;
  void *ranks_mem;
  size_t ranks_len;
  feed *feeds;
  unsigned feeds_count;
} served_pool;

typedef struct serve {
  const plan *plan;
  const scope *scope;
  void *zmq_context;
  kvrelay_relay relay;
  void *relay_mem;
  size_t relay_len;
  uint64_t fenced_seen;           /* producers_fenced of the relay as of the last serve_poll */
  kvrelay_engine_decoder decoder; /* one for all feeds: they run one after the other */
  void *decoder_mem;
  served_pool *pools;
  unsigned pools_count;
  topology topology;
  feed *stirred;           /* feeds to look at after this turn */
  uint64_t look_ns;        /* when all feeds are to be looked at; 0 = after this turn */
  size_t catalog_bytes;    /* of the published pools, at most `catalog_limit` */
  size_t catalog_limit;    /* what fits one message, the envelope left out */
  uint64_t catalog_full;   /* pools that were not published because of it */
  size_t worst_case_bytes; /* of all memory reserved; what is not touched costs nothing */
} serve;

/*
 * Reserves the memory of everything the plan wants, `worst_case_bytes` in all, and touches next to
 * nothing of it.  0, or an exit code after a log line; serve_close is due either way.  `p` and its
 * configuration must outlive the daemon.
 */
int serve_reserve(serve *s, const plan *p);
/* Builds every pool, publishes those of the scope, which is lent, and reads the recorded streams;
 * engines are not connected yet.  As serve_reserve. */
int serve_open(serve *s, const scope *within);
/* Connects the engine feeds; after the listener is up.  As serve_open. */
int serve_connect(serve *s, struct event_base *base);
/* After the transports are closed. */
void serve_close(serve *s);
/* The scope is another: what left it is withdrawn, with its blocks kept for when it comes back;
 * what is in it and could not be published before, or found the catalog full, is tried again. */
void serve_scope_changed(serve *s, uint64_t now_ns);
/* After each turn of the loop: producers that a timer or an admission found broken start again,
 * and feeds to which something happened, or whose time has come, are looked at.  The relay's calls
 * are woken behind it. */
void serve_poll(serve *s, uint64_t now_ns);
/* When serve_poll is due at the latest, KVRELAY_TIME_NONE: not by itself. */
uint64_t serve_deadline_ns(const serve *s);
/* Feeds changed the pool's state: publish what is due.  A fenced producer starts again, empty. */
void serve_pool_changed(served_pool *pool, uint64_t now_ns);
/* The state is broken: withdraw the producer and start again, empty. */
void serve_pool_fence(served_pool *pool, uint64_t now_ns);

/* Zeroed memory from the system, reserved but not touched; NULL when there is none. */
void *serve_pages(serve *s, size_t bytes);
void serve_pages_free(void *mem, size_t bytes);

#endif
