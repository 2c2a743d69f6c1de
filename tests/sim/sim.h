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

/* What a run compares, and what it provokes. Each has to happen in a long run. */
#define SIM_COUNTS(X)                                                                              \
  X(STEP, "events")                                                                                \
  X(REPLICA, "replicas compared")                                                                  \
  X(WHOLE, "ranks compared that are whole")                                                        \
  X(PARTIAL, "ranks compared that are not")                                                        \
  X(IMAGE, "readiness images compared")                                                            \
  X(WINDOW, "load windows compared")                                                               \
  X(QUESTION, "questions to all relays")                                                           \
  X(KNOWN, "answers that are known")                                                               \
  X(HOLED, "prompts asked for with a hole")                                                        \
  X(UNKNOWN, "answers that are not")                                                               \
  X(NO_POOL, "relays asked without that pool")                                                     \
  X(NO_CATALOG, "relays asked without a catalog")                                                  \
  X(SHORT_SCRATCH, "questions with one hash too little room")                                      \
  X(SHORT_MEMORY, "objects refused one byte less than they need")                                  \
  X(CUT, "connections cut")                                                                        \
  X(REFUSED, "connections refused")                                                                \
  X(HELD, "readers standing still")                                                                \
  X(STALLED, "connections that fell silent")                                                       \
  X(SHORT_TURNS, "turns cut short")                                                                \
  X(DELAYED, "delays changed")                                                                     \
  X(NO_COPY, "messages without memory")                                                            \
  X(STARVED, "consumers without memory for replicas")                                              \
  X(FEW_HUBS, "relays with fewer hubs than pools")                                                 \
  X(STOPPED, "relays stopped")                                                                     \
  X(CRASHED, "relays crashed")                                                                     \
  X(WITHDRAWN, "pools withdrawn")                                                                  \
  X(PUBLISHED, "pools published again")                                                            \
  X(END_NOT_FOUND, "requests for a pool that is gone")                                             \
  X(END_LIMIT, "requests beyond a limit")                                                          \
  X(END_LAGGED, "streams ended for readers that lag")                                              \
  X(END_PROGRESS, "streams ended for readers that take no snapshot")                               \
  X(BATCH_LOST, "batches lost")                                                                    \
  X(BATCH_TWICE, "batches twice")                                                                  \
  X(BATCH_SWAPPED, "batches out of order")                                                         \
  X(BATCH_UNREADABLE, "batches unreadable")                                                        \
  X(BATCH_LARGE, "batches too large")                                                              \
  X(ENGINE_PROCESS, "engines restarted")                                                           \
  X(ENGINE_LEFT, "engines disconnected")                                                           \
  X(ENGINE_CLEARED, "engines given up")                                                            \
  X(ENGINE_SILENT, "engines silent")                                                               \
  X(REPLAY, "replays answered")                                                                    \
  X(REPLAY_NONE, "replays not answered")                                                           \
  X(REPLAY_SLOW, "replays answered slowly")                                                        \
  X(REPLAY_HOLE, "replays with holes")                                                             \
  X(REPLAY_ENDLESS, "replays without end")                                                         \
  X(REPLAY_PAST, "replays beyond what is kept")                                                    \
  X(CARDS_LOST, "cards of an endpoint not heard")                                                  \
  X(READY, "models seen ready")                                                                    \
  X(READY_MISSING, "models seen without a role")                                                   \
  X(READY_TWICE, "models seen with a role twice")                                                  \
  X(READY_UNKNOWN, "models seen in an unknown state")                                              \
  X(READY_UNLINKED, "models seen without link to a pool")                                          \
  X(READY_STALE, "readiness images seen stale")                                                    \
  X(DECLARED, "ranks declared again")                                                              \
  X(CAPACITY, "capacities changed")                                                                \
  X(REPORT_LOST, "load reports lost")                                                              \
  X(REPORT_TWICE, "load reports twice")                                                            \
  X(REPORT_LATE, "load reports overtaken")                                                         \
  X(REPORT_STRAY, "load reports of ranks nobody declared")                                         \
  X(REPORTS_GONE, "load report streams lost")                                                      \
  X(LOAD_KNOWN, "loads seen")                                                                      \
  X(LOAD_UNKNOWN, "loads seen to be unknown")                                                      \
  X(LOAD_SATURATED, "loads seen at the end of numbers")                                            \
  X(LOAD_STALE, "load windows seen stale")

enum sim_what {
#define SIM_COUNT_NAME(NAME, TEXT) SIM_##NAME,
  SIM_COUNTS(SIM_COUNT_NAME)
#undef SIM_COUNT_NAME
      SIM_COUNTS_LEN
};

enum {
  SIM_BLOCK = 4,   /* tokens */
  SIM_PROMPTS = 5, /* of a pool; they share beginnings */
  SIM_DEPTH = 12,  /* blocks of a prompt */
  SIM_BLOCKS = SIM_PROMPTS * SIM_DEPTH,
  SIM_ENGINES = 2, /* of a pool */
  SIM_RANKS = 2,   /* of an engine */
  SIM_EVENTS = 2,  /* of a batch */
  SIM_SITES = 4,   /* endpoints that may serve a pool's model; one is the pool's */
  SIM_WORKERS = 2, /* of a site */
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

/* An endpoint, as its workers' cards have it. */
typedef struct sim_site {
  bool there, known;
  bool live[SIM_WORKERS];
} sim_site;

/* What is said of a model on the readiness plane; sets of roles are bits 1 << role. */
typedef struct sim_ready {
  bool there;
  int32_t state;
  uint32_t present, missing, duplicates, members; /* the last: bits 1 << site */
  bool linked;
} sim_ready;

/* A readiness image: what is said at one revision. */
typedef struct sim_image {
  sim_ready pools[SIM_POOLS_CAP];
} sim_image;

/* The load of a pool from one window on. */
typedef struct sim_load {
  uint64_t window, used, total;
  uint32_t observed, expected;
} sim_load;

/* What a producer had published at one sequence.  Of one sequence there are several while no hub
 * moves it: one that a consumer knows by a stream that is over, before it has heard
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
  size_t len, cap;
  sim_load *loads; /* those that differ from the one before */
  size_t loads_len, loads_cap;
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

typedef struct sim_report {
  bool there;
  uint32_t worker, rank;
  uint64_t used;
} sim_report;

typedef struct sim_pool {
  ckf_producer state;
  void *state_mem, *pool_mem;
  kvrelay_pool *pool; /* NULL = withdrawn */
  kvrelay_descriptor descriptor;
  kvrelay_registration registration;
  char model[8];
  char endpoints[SIM_SITES][8]; /* the first one's is the pool's */
  uint32_t tokens[SIM_PROMPTS][SIM_DEPTH * SIM_BLOCK];
  uint64_t locals[SIM_PROMPTS][SIM_DEPTH], keys[SIM_PROMPTS][SIM_DEPTH];
  uint32_t number[SIM_PROMPTS][SIM_DEPTH]; /* equal for equal blocks */
  uint64_t number_keys[SIM_BLOCKS];
  sim_engine engines[SIM_ENGINES];
  sim_site sites[SIM_SITES], told[SIM_SITES]; /* the latter: what the relay has heard */
  uint32_t load_workers; /* whose load is the pool's, each with SIM_RANKS ranks */
  uint64_t capacity[SIM_WORKERS], used[SIM_WORKERS][SIM_RANKS];
  bool reported[SIM_WORKERS][SIM_RANKS];
  sim_report late; /* on its way, overtaken by others */
  void *ranks_mem;
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
  void *topology_mem;
  kvrelay_topology topology;
  sim_image *images; /* by their revision */
  size_t images_len, images_cap;
  uint64_t windows;    /* of its load that were written down */
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
  uint64_t hold_until, held_from, refuse_until; /* 0 = not */
  uint64_t incarnation, window, revision;       /* of its relay, seen last */
  bool slow;                                    /* may lag, from now on */
  bool starved;                                 /* its replicas do not all fit */
} sim_link;

typedef struct sim {
  sim_plan plan;
  uint64_t rng, now, incarnation;
  sim_relay relays[SIM_RELAYS_CAP];
  sim_link links[SIM_RELAYS_CAP][SIM_CONSUMERS_CAP];
  sim_line *lines;
  size_t lines_len, lines_cap;
  uint64_t counts[SIM_COUNTS_LEN];
  bool calm; /* no faults any more */
  char failure[512];
} sim;

/* Runs one seed, and adds to the counts: NULL, or what went wrong, valid until the next run. */
const char *sim_run(const sim_plan *plan, sim *s);

/* ---- shared by the parts ---- */

uint64_t sim_draw(sim *s);
/* 0 .. n - 1. */
uint32_t sim_below(sim *s, uint32_t n);
/* True once in `n`. */
bool sim_once(sim *s, uint32_t n);
/* Keeps the first failure. */
void sim_fail(sim *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
void sim_count(sim *s, int32_t what);
/* Memory that begins anywhere, and whose surroundings nobody may write to: freeing looks. */
void *sim_alloc(sim *s, size_t len);
void sim_free(sim *s, void *mem);
/* Room for one more of `len` elements. */
void *sim_grow(void *items, size_t len, size_t *cap, size_t size);

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
void sim_engine_leave(sim *s, sim_engine *e);
/* An event, or a fault; in a calm the end of faults. */
void sim_engine_step(sim *s, sim_pool *p, sim_engine *e);
/* Delivers the next thing that is due; true when the pool may have changed. */
bool sim_engine_turn(sim *s, sim_pool *p, sim_engine *e);
/* In a calm: has its source come to the last batch, and is it whole if it can be? */
bool sim_engine_settled(const sim_engine *e);
/* Sends a batch without events. */
void sim_engine_nudge(sim *s, sim_pool *p, sim_engine *e);

/* sim_planes.c */
void sim_planes_open(sim *s, uint32_t r);
/* Of a relay that is coming up, and the end of it. */
void sim_planes_up(sim *s, uint32_t r);
void sim_planes_down(sim *s, uint32_t r);
/* Of a pool that was just published. */
void sim_planes_publish(sim *s, sim_pool *p);
/* In a calm: the relay hears of everything. */
void sim_planes_calm(sim *s, uint32_t r);
void sim_planes_step(sim *s, uint32_t r, uint32_t i);
/* Writes down the load of a window that has closed, and what a revision stands for. */
void sim_planes_note(sim *s, uint32_t r);
/* What a relay has to say of a pool's model. */
sim_ready sim_planes_judge(const sim_pool *p);
bool sim_planes_same(const sim_ready *a, const sim_ready *b);
/* The endpoint that a site is. */
kvrelay_endpoint sim_planes_endpoint(const sim_pool *p, uint32_t site);

/* sim_link.c */
void sim_link_open(sim *s, uint32_t r, uint32_t c);
void sim_link_close(sim *s, uint32_t r, uint32_t c);
void sim_link_step(sim *s, uint32_t r, uint32_t c);
/* Delivers what is due and lets the consumer do what it wants; true when something happened. */
bool sim_link_turn(sim *s, uint32_t r, uint32_t c);

/* sim_check.c: what holds at any time, and what comes to hold when faults have ended. */
void sim_check_link(sim *s, uint32_t r, uint32_t c);
/* Asks all relays for a prompt, of four pools at most. */
void sim_check_answers(sim *s, uint32_t c);
bool sim_settled(sim *s);

#endif
