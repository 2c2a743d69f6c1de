/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker whose messages and answers suffer every fault, beside what it really holds: a router
 * that says it is live and complete holds exactly what the worker held at that event id, and each
 * life ends well once the faults do.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kvrelay.h"

enum { EVENTS_MAX = 400, BLOCKS_MAX = 400, LIVES = 3000, STEPS = 120 };
#define SECOND UINT64_C(1000000000)

/* Event `id` of the worker: block `id` comes, or block `gone` goes, or all. */
typedef struct said {
  int type;
  uint64_t parent, gone; /* 0 = none */
} said;

typedef struct life {
  said said[EVENTS_MAX + 1];
  uint64_t ids;                              /* 1 .. ids were published */
  bool held[EVENTS_MAX + 1][BLOCKS_MAX + 1]; /* after each event */
  kvrelay_router router;
  ckf_producer producer, next;
  ckf_producer_config pc;
  void *mem, *producer_mem, *next_mem;
  uint64_t now_ns, random;
  bool asked, whole;
  uint64_t first;
} life;

static uint32_t draw(life *l, uint32_t n) { return (uint32_t)(ckf_rng_draw(&l->random) % n); }

/* ---- the worker ---- */

static uint64_t some_held(life *l, bool leaf) {
  uint64_t start = l->ids == 0 ? 0 : 1 + draw(l, (uint32_t)l->ids);
  for (uint64_t k = 0; k < l->ids; k++) {
    uint64_t n = (start + k) % l->ids + 1;
    bool parent = false;
    for (uint64_t c = n + 1; leaf && c <= l->ids; c++)
      parent = parent || (l->held[l->ids][c] && l->said[c].parent == n);
    if (l->held[l->ids][n] && !parent)
      return n;
  }
  return 0;
}

static void publish(life *l) {
  if (l->ids == EVENTS_MAX)
    return;
  said s = {KVRELAY_ROUTER_STORED, 0, 0};
  uint32_t what = draw(l, 60);
  if (what == 0)
    s.type = KVRELAY_ROUTER_CLEARED;
  else if (what < 20 && (s.gone = some_held(l, true)) != 0)
    s.type = KVRELAY_ROUTER_REMOVED;
  else if (what < 50)
    s.parent = some_held(l, false);
  uint64_t id = ++l->ids;
  l->said[id] = s;
  if (s.type != KVRELAY_ROUTER_CLEARED)
    memcpy(l->held[id], l->held[id - 1], sizeof l->held[id]);
  if (s.type == KVRELAY_ROUTER_STORED)
    l->held[id][id] = true;
  else if (s.type == KVRELAY_ROUTER_REMOVED)
    l->held[id][s.gone] = false;
}

static kvrelay_router_event event_of(const life *l, uint64_t id, ckf_block *block) {
  kvrelay_router_event ev;
  const said *s = &l->said[id];
  memset(&ev, 0, sizeof ev);
  ev.worker_id = 7;
  ev.event_id = id;
  ev.type = s->type;
  *block = (ckf_block){s->type == KVRELAY_ROUTER_STORED ? id : s->gone, 9000 + id};
  ev.has_parent = s->parent != 0;
  ev.parent = s->parent;
  if (s->type == KVRELAY_ROUTER_STORED) {
    ev.blocks = block;
    ev.blocks_len = 1;
  } else if (s->type == KVRELAY_ROUTER_REMOVED) {
    ev.externals = &block->external;
    ev.externals_len = 1;
  }
  return ev;
}

static void deliver(life *l, uint64_t id) {
  ckf_block block;
  kvrelay_router_event ev = event_of(l, id, &block);
  cr_assert_eq(kvrelay_router_live(&l->router, &ev, l->now_ns), KVRELAY_OK);
}

/* ---- answers ---- */

static void take_request(life *l) {
  if (kvrelay_router_request(&l->router, &l->whole, &l->first))
    l->asked = true;
}

static void dump(life *l, bool invalid) {
  size_t len = ckf_producer_mem_size(&l->pc);
  ckf_block block;
  uint64_t number = 0;
  if (kvrelay_router_dump_begin(&l->router, &l->next, l->next_mem, len, l->now_ns) != KVRELAY_OK)
    return; /* the answer to a request that was given up */
  for (uint64_t n = 1; n <= l->ids; n++)
    if (l->held[l->ids][n]) {
      kvrelay_router_event ev = event_of(l, n, &block);
      ev.event_id = number++;
      kvrelay_router_dump_event(&l->router, &ev);
    }
  if (invalid) {
    block = (ckf_block){1, 1};
    kvrelay_router_event ev = event_of(l, 1, &block);
    ev.has_parent = true;
    ev.parent = 999999;
    kvrelay_router_dump_event(&l->router, &ev);
  }
  int swapped = kvrelay_router_dump_end(&l->router, l->ids, l->now_ns);
  cr_assert_eq(swapped, !invalid);
  if (swapped) {
    void *former = l->producer_mem;
    l->producer_mem = l->next_mem;
    l->next_mem = former;
  }
}

static void list(life *l) {
  ckf_block block;
  for (uint64_t id = l->whole ? 1 : l->first; id <= l->ids; id++) {
    kvrelay_router_event ev = event_of(l, id, &block);
    cr_assert_eq(kvrelay_router_again(&l->router, &ev, l->now_ns), KVRELAY_OK);
  }
  cr_assert_eq(kvrelay_router_again_end(&l->router, l->ids, l->now_ns), KVRELAY_OK);
}

static void answer(life *l, uint32_t how) {
  if (!l->asked)
    return;
  l->asked = false;
  if (how < 4)
    dump(l, l->ids != 0 && how == 0);
  else if (how < 7)
    list(l);
  else
    cr_assert_eq(kvrelay_router_failed(&l->router, (int)how - 7, l->now_ns), KVRELAY_OK);
}

static void tick(life *l, bool deadline) {
  uint64_t at_ns = kvrelay_router_deadline_ns(&l->router);
  l->now_ns += SECOND / 10;
  if (deadline && at_ns != KVRELAY_TIME_NONE && at_ns > l->now_ns)
    l->now_ns = at_ns;
  cr_assert_eq(kvrelay_router_tick(&l->router, l->now_ns), KVRELAY_OK);
}

/* ---- what must hold ---- */

static bool same(life *l, uint64_t id) {
  ckf_member member = {7, 0};
  uint32_t blocks = 0;
  for (uint64_t n = 1; n <= l->ids; n++)
    if (l->held[id][n]) {
      blocks++;
      if (ckf_producer_find(&l->producer, &member, n, NULL, NULL) != 1)
        return false;
    }
  return ckf_producer_member_blocks(&l->producer, &member) == blocks;
}

static void check(life *l) {
  const kvrelay_router_stats *st = kvrelay_router_stats_get(&l->router);
  if (kvrelay_router_state(&l->router) != KVRELAY_ROUTER_FAILED && st->complete) {
    cr_assert(st->has_event_id);
    cr_assert(same(l, st->last_event_id), "complete, but not what event %" PRIu64 " left",
              st->last_event_id);
  }
}

static void step(life *l) {
  switch (draw(l, 12)) {
  case 0:
  case 1:
  case 2:
  case 3:
    publish(l);
    if (draw(l, 6) != 0)
      deliver(l, l->ids);
    break;
  case 4:
    if (l->ids != 0)
      deliver(l, 1 + draw(l, (uint32_t)l->ids)); /* late, or once more */
    break;
  case 5:
  case 6:
    take_request(l);
    break;
  case 7:
  case 8:
  case 9:
    answer(l, draw(l, 10));
    break;
  default:
    tick(l, draw(l, 2) != 0);
  }
}

static void run(uint64_t seed, bool recoverable, uint64_t counts[KVRELAY_COUNT_LEN]) {
  life *l = calloc(1, sizeof *l);
  kvrelay_router_config cfg = kvrelay_router_config_default();
  cfg.worker_id = 7;
  cfg.recoverable = recoverable;
  cfg.hold_events = 4 + seed % 8;
  cfg.attempts = 1 + seed % 3;
  l->random = seed;
  l->pc = ckf_producer_config_default();
  l->pc.filter.expected_blocks = BLOCKS_MAX;
  size_t len = ckf_producer_mem_size(&l->pc);
  l->producer_mem = malloc(len);
  l->next_mem = malloc(len);
  l->mem = malloc(kvrelay_router_mem_size(&cfg));
  cr_assert_eq(ckf_producer_init(&l->producer, &l->pc, l->producer_mem, len), CKF_OK);
  cr_assert_eq(
      kvrelay_router_init(&l->router, &cfg, &l->producer, l->mem, kvrelay_router_mem_size(&cfg), 0),
      KVRELAY_OK);
  for (int i = 0; i < STEPS; i++) {
    step(l);
    check(l);
  }
  /* From here on all is well. */
  l->asked = false;
  for (int i = 0; recoverable && i < 40; i++) {
    publish(l);
    deliver(l, l->ids);
    take_request(l);
    if (l->asked && (l->whole || draw(l, 2) == 0))
      answer(l, 1);
    else
      answer(l, 4);
    tick(l, true);
    check(l);
  }
  if (recoverable) {
    cr_assert_eq(kvrelay_router_state(&l->router), KVRELAY_ROUTER_LIVE, "seed %" PRIu64, seed);
    cr_assert(kvrelay_router_stats_get(&l->router)->complete, "seed %" PRIu64, seed);
    cr_assert(same(l, l->ids), "seed %" PRIu64, seed);
  }
  cr_assert_eq(ckf_producer_check_(&l->producer), CKF_OK);
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    counts[i] += kvrelay_router_stats_get(&l->router)->counts[i];
  free(l->mem);
  free(l->producer_mem);
  free(l->next_mem);
  free(l);
}

Test(router_model, what_is_complete_is_what_the_worker_holds) {
  uint64_t counts[KVRELAY_COUNT_LEN] = {0};
  for (uint64_t seed = 1; seed <= LIVES; seed++)
    run(seed, seed % 8 != 0, counts);
  static const int happened[] = {KVRELAY_COUNT_GAP,
                                 KVRELAY_COUNT_LOSS,
                                 KVRELAY_COUNT_REPLAY,
                                 KVRELAY_COUNT_RECOVERY,
                                 KVRELAY_COUNT_ORPHAN,
                                 KVRELAY_COUNT_FENCED_SOURCE,
                                 KVRELAY_COUNT_MALFORMED_EVENT,
                                 KVRELAY_COUNT_EVENT_ID_ORDER};
  for (size_t i = 0; i < sizeof happened / sizeof happened[0]; i++)
    cr_assert_gt(counts[happened[i]], 100, "%s: %" PRIu64, kvrelay_count_name(happened[i]),
                 counts[happened[i]]);
}
