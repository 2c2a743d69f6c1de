/* SPDX-License-Identifier: Apache-2.0 */
/* trial.h - one conformance scenario against a relay: its connection, its time, what came of it. */
#ifndef KVRELAY_TRIAL_H
#define KVRELAY_TRIAL_H

#include "ckf.h"
#include "cli.h"
#include "probe.h"

enum trial_verdict {
  TRIAL_PASSED = 0,
  TRIAL_FAILED,
  TRIAL_NOT_APPLICABLE, /* the relay has nothing to try it with, or no place for us */
  TRIAL_AGAIN,          /* the relay moved on in the middle: a pool or a producer went */
  TRIAL_SILENT,         /* of trial_frame: nothing came */
  TRIAL_NO_POOL         /* of trial_names: the catalog has none that --pool could mean */
};

/* A step of a scenario: what did not pass is its verdict. */
#define TRY(STEP)                                                                                  \
  do {                                                                                             \
    const int verdict_ = (STEP);                                                                   \
    if (verdict_ != TRIAL_PASSED)                                                                  \
      return verdict_;                                                                             \
  } while (0)

#define TRIAL_WHY_CAP 1024 /* bytes; room for two statuses and what was done */

typedef struct trial {
  const options *o;
  probe p;
  uint64_t until_ns;
  kvrelay_relay_identity relay; /* from GetRelayInfo */
  kvrelay_producer producer;    /* of the pool that trial_pool chose */
  void *arena;                  /* for the lists of the last decoded message */
  size_t arena_len;
  char why[TRIAL_WHY_CAP];
} trial;

/* A scenario that needs nothing but a socket. */
typedef struct scenario {
  const char *id, *what;
  int (*run)(trial *t); /* enum trial_verdict */
} scenario;
extern const scenario scenarios[]; /* scenarios.c; the last one's id is NULL */

/* One try of a scenario, on a connection of its own, at most o->timeout_s. */
int trial_run(const scenario *s, const options *o, char why[TRIAL_WHY_CAP]);

/* ---- for scenarios ---- */

/* Says why and returns the verdict. */
int trial_fail(trial *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
int trial_skip(trial *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A request of this method as a consumer would send it, for the chosen pool. */
kvrelay_request trial_request(const trial *t, int32_t method);
uint32_t trial_call(trial *t, const kvrelay_request *q);

/* The next message of this call, or the first of a new one, decoded by its method into `out` (the
 * struct of kvrelay.h, NULL = none), its envelope checked.  PASSED, or why not. */
int trial_message(trial *t, uint32_t call, int32_t method, void *out);
int trial_first(trial *t, const kvrelay_request *q, void *out);
/* The request is accepted: its first message comes; the call is then cancelled. */
int trial_accepted(trial *t, const kvrelay_request *q, const char *what);
/* The call ends with this status and reason before any message. */
int trial_refused(trial *t, uint32_t call, int32_t grpc, int32_t reason, const char *what);

/* PASSED, NO_POOL after a message, or why there is no catalog. */
int trial_names(trial *t);
/* Chooses the smallest usable pool, or --pool. */
int trial_pool(trial *t);

/* A subscriber of the chosen pool that holds every frame against the contract. */
typedef struct follower {
  uint32_t call;
  ckf_format format;
  ckf_replica replica;
  void *mem;
  uint32_t chunks, deltas, heartbeats;
  uint64_t sequence;
} follower;

int trial_follow(trial *t, follower *f);
/* The next frame, PASSED when it obeys; SILENT when none came until `until_ns`. */
int trial_frame(trial *t, follower *f, uint64_t until_ns);
/* Until the snapshot is whole. */
int trial_snapshot(trial *t, follower *f);
void trial_unfollow(trial *t, follower *f);

#endif
