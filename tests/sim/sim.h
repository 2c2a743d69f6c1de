/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SIM_H
#define SIM_H

/*
 * A world of relays, their engines and consumers that follow all of them, over connections that
 * delay, break, refuse and stand still. One seed decides everything; the clock is a number.
 *
 *   sim_engine (who holds what, exactly) -> batches lost, late, again -> kvrelay_source
 *           -> ckf_producer -> kvrelay_relay -> sim_link (mem/) -> kvrelay_consumer
 *
 * sim_engine.c and sim_check.c say what may never be seen on the way, and what has to be in the
 * end.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvrelay.h"
#include "transports/client.h"
#include "transports/mem/mem.h"
#include "transports/service.h"

#define SIM_MS UINT64_C(1000000)
#define SIM_SECOND (1000 * SIM_MS)

enum {
  SIM_BLOCK = 4,   /* tokens */
  SIM_PROMPTS = 5, /* of a pool; they share beginnings */
  SIM_DEPTH = 12,  /* blocks of a prompt */
  SIM_BLOCKS = SIM_PROMPTS * SIM_DEPTH,
  SIM_ENGINES = 2, /* of a pool */
  SIM_RANKS = 2,   /* of an engine */
  SIM_EVENTS = 2,  /* of a batch */
  SIM_RELAYS_CAP = 8,
  SIM_POOLS_CAP = 16,
  SIM_CONSUMERS_CAP = 64
};

/* What a seed is asked to be. */
typedef struct sim_plan {
  uint64_t seed;
  uint32_t relays, pools, consumers; /* of each relay; 0 = the seed decides */
  uint64_t active_ns;                /* faults and events for this long, 0 = the seed decides */
  uint64_t step_ns;                  /* mean time between events, 0 = the seed decides */
} sim_plan;

/* What a producer had published at one sequence.  Of one sequence there are several while no hub
 * moves it (contract 11.1): one that a consumer knows by a stream that is over, before it has heard
 * of the end, and one in the first snapshot of the next hub. */
typedef struct sim_published {
  uint64_t sequence;
  uint64_t words;              /* hash of the filter */
  uint8_t depths[SIM_PROMPTS]; /* exact */
} sim_published;

/* Every producer there was, by its identity, and all its sequences in order. */
typedef struct sim_line {
  kvrelay_producer producer;
  sim_published *published;
  uint64_t len, cap;
  bool withdrawn;
} sim_line;

/* An event in the engines' language: a stretch of a prompt, or a set of blocks. */
typedef struct sim_event {
  uint8_t kind, prompt, from, end;
  uint64_t blocks; /* bit 1 << number */
} sim_event;

/* The bytes of a batch; no two are equal. */
typedef struct sim_payload {
  uint64_t at; /* in sim_engine.batches */
  uint32_t rank, events_len;
  sim_event events[SIM_EVENTS];
} sim_payload;

typedef struct sim_batch {
  uint64_t sequence;
  uint64_t holds[SIM_RANKS]; /* after it */
  sim_payload payload;
  size_t len; /* less: nobody can read it */
  bool large; /* nobody takes it */
} sim_batch;

/* Something on its way to a source. */
typedef struct sim_flight {
  uint64_t due;
  size_t at; /* in batches; SIZE_MAX = the marker */
} sim_flight;

typedef struct sim_queue {
  sim_flight *items;
  size_t first, end, cap;
} sim_queue;

/* One engine with its publisher, and the source that follows it. It outlives its relay. */
typedef struct sim_engine {
  uint64_t worker;
  bool replay, deduplicated, keeps_lost; /* what its source is configured to */
  bool listens_on;                       /* to answers that it does not want any more */
  size_t buffer;                         /* batches it can send again */
  sim_batch *batches;                    /* of all its processes */
  size_t batches_len, batches_cap, process_at;
  uint64_t first_sequence; /* of a process */
  uint8_t copies[SIM_RANKS][SIM_BLOCKS];

  bool connected;
  uint64_t back_at; /* when it is again */
  sim_queue live, replies;

  kvrelay_source source;
  void *source_mem;         /* NULL = nobody follows it */
  size_t applied;           /* the last batch, SIZE_MAX = none */
  uint64_t restarts, again; /* the latter with recoveries: these take batches again */
  uint64_t seen[SIM_RANKS]; /* since the last restart */
  uint64_t known;           /* blocks it knows of in some rank; checked */
  uint64_t heard;
  bool loaded;  /* with blocks, says the engine */
  bool excused; /* something of its past was out of reach */
} sim_engine;

typedef struct sim_pool {
  ckf_producer state;
  void *state_mem, *pool_mem;
  kvrelay_pool *pool; /* NULL = withdrawn */
  kvrelay_descriptor descriptor;
  kvrelay_registration registration;
  char endpoint[8], model[8];
  uint32_t tokens[SIM_PROMPTS][SIM_DEPTH * SIM_BLOCK];
  uint64_t locals[SIM_PROMPTS][SIM_DEPTH], keys[SIM_PROMPTS][SIM_DEPTH];
  uint32_t number[SIM_PROMPTS][SIM_DEPTH]; /* equal for equal blocks */
  uint64_t number_keys[SIM_BLOCKS];
  sim_engine engines[SIM_ENGINES];
  size_t line; /* in sim.lines */
} sim_pool;

/* Stands before a relay, so that connections outlive its restarts. */
typedef struct sim_front {
  kvrelay_service base;
  kvrelay_service *to; /* NULL = down */
} sim_front;

typedef struct sim_relay {
  sim_front front;
  kvrelay_relay relay;
  kvrelay_relay_config cfg;
  void *mem;
  kvrelay_relay_service *service;
  sim_pool pools[SIM_POOLS_CAP];
  uint64_t down_until; /* 0 = up */
  bool few_hubs;       /* fewer than pools: not all of them can be followed at once */
} sim_relay;

/* One consumer's connection to one relay. */
typedef struct sim_link {
  kvrelay_mem *mem;
  kvrelay_client_transport *transport;
  kvrelay_consumer consumer;
  void *consumer_mem;
  kvrelay_client *client;
  uint64_t hold_until, refuse_until; /* 0 = not */
  bool slow;                         /* may lag, from now on */
  bool starved;                      /* its replicas do not all fit */
} sim_link;

typedef struct sim {
  sim_plan plan;
  uint64_t rng, now, incarnation;
  sim_relay relays[SIM_RELAYS_CAP];
  sim_link links[SIM_RELAYS_CAP][SIM_CONSUMERS_CAP];
  sim_line *lines;
  size_t lines_len, lines_cap;
  uint64_t steps, checked, answers, whole, partial;
  bool calm; /* no faults any more */
  char failure[512];
} sim;

/* Runs one seed: NULL, or what went wrong, valid until the next run. */
const char *sim_run(const sim_plan *plan, sim *counters);

/* ---- shared by the parts ---- */

uint64_t sim_draw(sim *s);
/* 0 .. n - 1. */
uint32_t sim_below(sim *s, uint32_t n);
/* True once in `n`. */
bool sim_once(sim *s, uint32_t n);
/* Keeps the first failure. */
void sim_fail(sim *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
void *sim_alloc(size_t len);

/* sim_relay.c */
void sim_relay_open(sim *s, uint32_t r);
void sim_relay_close(sim *s, uint32_t r);
/* An event, or a fault of a relay. */
void sim_relay_step(sim *s, uint32_t r);
/* Ticks it, wakes its calls, notes what has been published, and takes one message of its engines;
 * true when there may be more. */
bool sim_relay_turn(sim *s, uint32_t r);
/* Ends its faults and those of its engines, which say once more where they are. */
void sim_relay_calm(sim *s, uint32_t r);
bool sim_relay_settled(const sim *s, uint32_t r);
void sim_depths(const sim_pool *p, uint8_t depths[SIM_PROMPTS]);

/* sim_engine.c */
void sim_engine_open(sim *s, sim_engine *e, uint64_t worker);
void sim_engine_close(sim_engine *e);
/* A source for it, as a relay begins; and the end of that. */
void sim_engine_follow(sim *s, sim_pool *p, sim_engine *e);
void sim_engine_leave(sim_engine *e);
/* An event, or a fault; in a calm the end of faults. */
void sim_engine_step(sim *s, sim_pool *p, sim_engine *e);
/* Delivers the next thing that is due; true when the pool may have changed. */
bool sim_engine_turn(sim *s, sim_pool *p, sim_engine *e);
/* In a calm: has its source come to the last batch, and is it whole if it can be? */
bool sim_engine_settled(const sim_engine *e);
/* Sends a batch without events. */
void sim_engine_nudge(sim *s, sim_pool *p, sim_engine *e);

/* sim_link.c */
void sim_link_open(sim *s, uint32_t r, uint32_t c);
void sim_link_close(sim *s, uint32_t r, uint32_t c);
void sim_link_step(sim *s, uint32_t r, uint32_t c);
/* Delivers what is due and lets the consumer do what it wants; true when something happened. */
bool sim_link_turn(sim *s, uint32_t r, uint32_t c);

/* sim_check.c: what holds at any time, and what comes to hold when faults have ended. */
void sim_check_link(sim *s, uint32_t r, uint32_t c);
bool sim_settled(sim *s);

#endif
