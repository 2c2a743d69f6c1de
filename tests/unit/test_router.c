/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router events: order by event id, holes, recovery by dump and by list, faults of the source, all
 * by a time that the test gives; then what workers of Dynamo really sent.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../vectors/vectors.h"
#include "kvrelay.h"
#include "proto/router_events.h"

#define OK(CALL) cr_assert_eq((CALL), KVRELAY_OK)
#define SECOND UINT64_C(1000000000)
#define COUNTED(F, NAME, N)                                                                        \
  cr_assert_eq(stats(F)->counts[KVRELAY_COUNT_##NAME], (uint64_t)(N), #NAME " is %" PRIu64,        \
               stats(F)->counts[KVRELAY_COUNT_##NAME])

typedef struct fixture {
  kvrelay_router router;
  ckf_producer producer, next;
  ckf_producer_config pc;
  void *mem, *producer_mem, *next_mem;
  uint64_t now_ns;
} fixture;

static fixture *fixture_of(const kvrelay_router_config *cfg) {
  fixture *f = calloc(1, sizeof *f);
  f->pc = ckf_producer_config_default();
  f->pc.filter.expected_blocks = 256;
  f->producer_mem = malloc(ckf_producer_mem_size(&f->pc));
  f->next_mem = malloc(ckf_producer_mem_size(&f->pc));
  f->mem = malloc(kvrelay_router_mem_size(cfg));
  cr_assert_eq(
      ckf_producer_init(&f->producer, &f->pc, f->producer_mem, ckf_producer_mem_size(&f->pc)),
      CKF_OK);
  OK(kvrelay_router_init(&f->router, cfg, &f->producer, f->mem, kvrelay_router_mem_size(cfg), 0));
  return f;
}

static kvrelay_router_config config(bool recoverable) {
  kvrelay_router_config cfg = kvrelay_router_config_default();
  cfg.worker_id = 7;
  cfg.recoverable = recoverable;
  cfg.hold_events = 8;
  cfg.hold_bytes = 1024;
  cfg.attempts = 3;
  return cfg;
}

static fixture *fresh(bool recoverable) {
  kvrelay_router_config cfg = config(recoverable);
  return fixture_of(&cfg);
}

static void fixture_free(fixture *f) {
  cr_assert_eq(ckf_producer_check_(&f->producer), CKF_OK);
  free(f->mem);
  free(f->producer_mem);
  free(f->next_mem);
  free(f);
}

static const kvrelay_router_stats *stats(const fixture *f) {
  return kvrelay_router_stats_get(&f->router);
}
static int state(const fixture *f) { return kvrelay_router_state(&f->router); }

static uint32_t blocks_of(const fixture *f, uint32_t rank) {
  ckf_member member = {7, rank};
  return ckf_producer_member_blocks(&f->producer, &member);
}

static kvrelay_router_event event(uint64_t id, int type) {
  kvrelay_router_event ev;
  memset(&ev, 0, sizeof ev);
  ev.worker_id = 7;
  ev.event_id = id;
  ev.type = type;
  ev.domain = CKF_DOMAIN_WORKER;
  return ev;
}

/* Block n, a root, or the child of `parent`. */
static ckf_block scratch_block;
static kvrelay_router_event store(uint64_t id, uint64_t n, uint64_t parent) {
  kvrelay_router_event ev = event(id, KVRELAY_ROUTER_STORED);
  scratch_block = (ckf_block){n, 1000 + n};
  ev.blocks = &scratch_block;
  ev.blocks_len = 1;
  ev.has_parent = parent != 0;
  ev.parent = parent;
  return ev;
}

static uint64_t scratch_external;
static kvrelay_router_event removal(uint64_t id, uint64_t n) {
  kvrelay_router_event ev = event(id, KVRELAY_ROUTER_REMOVED);
  scratch_external = n;
  ev.externals = &scratch_external;
  ev.externals_len = 1;
  return ev;
}

static kvrelay_router_event clear_all(uint64_t id) {
  kvrelay_router_event ev = event(id, KVRELAY_ROUTER_CLEARED);
  ev.domain = CKF_DOMAIN_MISSING;
  return ev;
}

static void live(fixture *f, kvrelay_router_event ev) {
  OK(kvrelay_router_live(&f->router, &ev, f->now_ns));
  memset(&scratch_block, 0xEE, sizeof scratch_block); /* what is held was copied */
  scratch_external = 0;
}

static void again(fixture *f, kvrelay_router_event ev) {
  OK(kvrelay_router_again(&f->router, &ev, f->now_ns));
}

static void dump_begin(fixture *f) {
  OK(kvrelay_router_dump_begin(&f->router, &f->next, f->next_mem, ckf_producer_mem_size(&f->pc),
                               f->now_ns));
}

static void dump_event(fixture *f, kvrelay_router_event ev) {
  kvrelay_router_dump_event(&f->router, &ev);
}

static bool dump_end(fixture *f, uint64_t last) {
  int swapped = kvrelay_router_dump_end(&f->router, last, f->now_ns);
  cr_assert(swapped == 0 || swapped == 1);
  if (swapped) {
    void *former = f->producer_mem;
    f->producer_mem = f->next_mem;
    f->next_mem = former;
    memset(former, 0xDD, ckf_producer_mem_size(&f->pc));
  }
  return swapped == 1;
}

static void wait_for_deadline(fixture *f) {
  uint64_t at_ns = kvrelay_router_deadline_ns(&f->router);
  cr_assert_neq(at_ns, KVRELAY_TIME_NONE);
  if (at_ns > f->now_ns) {
    OK(kvrelay_router_tick(&f->router, at_ns - 1));
    f->now_ns = at_ns;
  }
  OK(kvrelay_router_tick(&f->router, f->now_ns));
}

#define ASKED(F, WHOLE, FIRST)                                                                     \
  do {                                                                                             \
    bool whole_ = false;                                                                           \
    uint64_t first_ = 0;                                                                           \
    cr_assert_eq(kvrelay_router_request(&(F)->router, &whole_, &first_), 1);                       \
    cr_assert_eq(whole_, (WHOLE));                                                                 \
    cr_assert_eq(first_, (uint64_t)(FIRST));                                                       \
  } while (0)
#define NOT_ASKED(F)                                                                               \
  do {                                                                                             \
    bool whole_;                                                                                   \
    uint64_t first_;                                                                               \
    cr_assert_eq(kvrelay_router_request(&(F)->router, &whole_, &first_), 0);                       \
  } while (0)

/* ---- live only ---- */

Test(router, without_recovery_it_starts_at_the_first_event_and_holes_clear_the_rank) {
  fixture *f = fresh(false);
  NOT_ASKED(f);
  live(f, store(5, 1, 0));
  live(f, store(6, 2, 1));
  cr_assert_eq(blocks_of(f, 0), 2);
  cr_assert_not(stats(f)->complete);
  live(f, store(6, 3, 2));
  live(f, removal(4, 1));
  COUNTED(f, EVENT_ID_ORDER, 2);
  cr_assert_eq(blocks_of(f, 0), 2);
  live(f, store(9, 9, 0));
  COUNTED(f, GAP, 2);
  COUNTED(f, LOSS, 2);
  cr_assert_eq(blocks_of(f, 0), 1);
  live(f, clear_all(10));
  cr_assert_eq(blocks_of(f, 0), 0);
  cr_assert(stats(f)->complete);
  live(f, removal(11, 9));
  COUNTED(f, UNKNOWN_REMOVAL, 1);
  cr_assert_eq(stats(f)->last_event_id, 11);
  fixture_free(f);
}

Test(router, blocks_are_a_set_and_other_tiers_do_not_count) {
  fixture *f = fresh(false);
  live(f, store(1, 1, 0));
  live(f, store(2, 1, 0));
  kvrelay_router_event ev = store(3, 2, 0);
  ev.tier = CKF_TIER_HOST_PINNED;
  live(f, ev);
  COUNTED(f, OTHER_TIER, 1);
  live(f, removal(4, 1));
  cr_assert_eq(blocks_of(f, 0), 0, "the first removal ends it");
  ev = store(5, 1, 0);
  ev.dp_rank = 1;
  live(f, ev);
  ev.dp_rank = 0;
  ev.worker_id = 8;
  live(f, ev);
  COUNTED(f, FOREIGN_RANK, 2);
  fixture_free(f);
}

/* ---- faults ---- */

Test(router, B43_a_source_that_contradicts_itself_is_emptied_and_ignored_until_a_dump) {
  kvrelay_router_config cfg = config(true);
  fixture *f = fixture_of(&cfg);
  ckf_member other = {7, 1};
  ckf_outcome out;
  for (uint64_t n = 0; n < 7; n++) {
    ckf_block b = {500 + n, 9000 + n};
    cr_assert_eq(ckf_producer_stored(&f->producer, &other, CKF_TIER_DEVICE, CKF_DOMAIN_WORKER,
                                     false, 0, false, 0, &b, 1, &out),
                 CKF_OK);
  }
  ASKED(f, true, 0);
  dump_begin(f);
  for (uint64_t n = 1; n <= 12; n++)
    dump_event(f, store(n - 1, n, n == 1 ? 0 : n - 1));
  cr_assert(dump_end(f, 40));
  cr_assert_eq(blocks_of(f, 0), 12);
  cr_assert(stats(f)->complete);
  live(f, store(41, 99, 4040404));
  COUNTED(f, ORPHAN, 1);
  cr_assert_eq(blocks_of(f, 0), 0);
  cr_assert_eq(blocks_of(f, 1), 7, "rank 1 is untouched");
  cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED);
  live(f, store(42, 1, 0));
  COUNTED(f, FENCED_SOURCE, 1);
  cr_assert_eq(blocks_of(f, 0), 0);
  NOT_ASKED(f);
  wait_for_deadline(f);
  cr_assert_eq(f->now_ns, 30 * SECOND, "one dump in an interval");
  ASKED(f, true, 0);
  live(f, store(44, 3, 2));
  live(f, store(43, 2, 1));
  dump_begin(f);
  dump_event(f, store(0, 1, 0));
  cr_assert(dump_end(f, 42));
  cr_assert_eq(state(f), KVRELAY_ROUTER_LIVE);
  cr_assert_eq(blocks_of(f, 0), 3, "the dump, and what waited for it in order");
  cr_assert_eq(stats(f)->last_event_id, 44);
  cr_assert_eq(blocks_of(f, 1), 7);
  fixture_free(f);
}

Test(router, every_kind_of_contradiction_is_a_fault) {
  for (int kind = 0; kind < 4; kind++) {
    fixture *f = fresh(false);
    live(f, store(1, 1, 0));
    kvrelay_router_event ev = store(2, 1, 0);
    if (kind == 0)
      ev.domain = CKF_DOMAIN_UNKNOWN;
    else if (kind == 1)
      ev.domain = CKF_DOMAIN_MALFORMED;
    else if (kind == 2)
      scratch_block.local++; /* another key for the same hash */
    else
      ev.has_start = true; /* no root, and no parent */
    ev.start = 4;
    live(f, ev);
    cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED, "%d", kind);
    cr_assert_eq(blocks_of(f, 0), 0);
    COUNTED(f, UNSUPPORTED_DOMAIN, kind < 2);
    COUNTED(f, REMAP_CONFLICT, kind >= 2);
    live(f, clear_all(3));
    cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED, "nothing but a dump heals it");
    cr_assert_eq(kvrelay_router_deadline_ns(&f->router), KVRELAY_TIME_NONE);
    fixture_free(f);
  }
}

/* ---- recovery ---- */

Test(router, B24_the_cursor_is_the_workers_not_the_dumps) {
  fixture *f = fresh(true);
  cr_assert_eq(state(f), KVRELAY_ROUTER_RECOVERING);
  ASKED(f, true, 0);
  dump_begin(f);
  for (uint64_t n = 0; n < 10; n++)
    dump_event(f, store(n, n + 1, n));
  cr_assert(dump_end(f, 4711));
  live(f, store(4712, 11, 10));
  NOT_ASKED(f);
  cr_assert_eq(blocks_of(f, 0), 11);
  COUNTED(f, RECOVERY, 1);
  fixture_free(f);
}

Test(router, a_hole_is_asked_for_and_closed) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  dump_begin(f);
  cr_assert(dump_end(f, 0));
  live(f, store(1, 1, 0));
  live(f, store(4, 4, 3));
  ASKED(f, false, 2);
  live(f, store(6, 6, 5));
  live(f, store(5, 5, 4));
  live(f, store(5, 5, 4));
  cr_assert_eq(blocks_of(f, 0), 1);
  again(f, store(1, 1, 0));
  again(f, store(2, 2, 1));
  again(f, store(3, 3, 2));
  again(f, store(4, 4, 3));
  OK(kvrelay_router_again_end(&f->router, 4, 0));
  cr_assert_eq(blocks_of(f, 0), 6);
  cr_assert(stats(f)->complete);
  COUNTED(f, REPLAY, 3);
  COUNTED(f, GAP, 0);
  live(f, store(7, 7, 6));
  cr_assert_eq(blocks_of(f, 0), 7);
  NOT_ASKED(f);
  fixture_free(f);
}

Test(router, a_dump_replaces_in_one_step_and_holes_behind_it_are_accepted) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  live(f, store(21, 3, 1));
  live(f, store(23, 4, 3));
  live(f, store(10, 77, 0)); /* in the dump already */
  dump_begin(f);
  dump_event(f, store(0, 1, 0));
  cr_assert_eq(blocks_of(f, 0), 0);
  cr_assert(dump_end(f, 20));
  cr_assert_eq(blocks_of(f, 0), 3);
  COUNTED(f, GAP, 1);
  cr_assert_eq(stats(f)->last_event_id, 23);
  fixture_free(f);
}

/* One block by a dump, then a live event behind events that are missing, which are asked for. */
static fixture *behind_a_hole(void) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  dump_begin(f);
  dump_event(f, store(0, 1, 0));
  cr_assert(dump_end(f, 1));
  live(f, store(5, 2, 1));
  ASKED(f, false, 2);
  return f;
}

Test(router, an_invalid_dump_changes_nothing_until_the_next_one) {
  for (int kind = 0; kind < 3; kind++) {
    fixture *f = behind_a_hole();
    dump_begin(f);
    dump_event(f, store(0, 9, 0));
    if (kind == 0)
      dump_event(f, removal(1, 9));
    else if (kind == 1)
      dump_event(f, clear_all(1));
    else
      dump_event(f, store(1, 10, 8));
    dump_event(f, store(2, 11, 0));
    cr_assert_not(dump_end(f, 5));
    cr_assert_eq(blocks_of(f, 0), 1, "old blocks stay");
    cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED);
    cr_assert_not(stats(f)->complete);
    live(f, store(6, 3, 1));
    cr_assert_eq(blocks_of(f, 0), 1, "live events are ignored");
    wait_for_deadline(f);
    cr_assert_eq(blocks_of(f, 0), 0, "reset, and asked again");
    ASKED(f, true, 0);
    dump_begin(f);
    dump_event(f, store(0, 9, 0));
    cr_assert(dump_end(f, 6));
    cr_assert_eq(blocks_of(f, 0), 1);
    cr_assert_eq(state(f), KVRELAY_ROUTER_LIVE);
    fixture_free(f);
  }
}

Test(router, events_of_another_rank_in_an_answer_end_the_source) {
  for (int kind = 0; kind < 2; kind++) {
    fixture *f = behind_a_hole();
    kvrelay_router_event ev = store(2, 2, 1);
    ev.dp_rank = 1;
    if (kind == 0) {
      dump_begin(f);
      dump_event(f, ev);
      cr_assert_not(dump_end(f, 5));
    } else {
      again(f, ev);
      OK(kvrelay_router_again_end(&f->router, 5, 0));
    }
    cr_assert_eq(blocks_of(f, 0), 0);
    cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED);
    cr_assert_eq(kvrelay_router_deadline_ns(&f->router), KVRELAY_TIME_NONE, "for good");
    COUNTED(f, FOREIGN_RANK, 1);
    live(f, store(6, 1, 0));
    cr_assert_eq(blocks_of(f, 0), 0);
    fixture_free(f);
  }
}

Test(router, attempts_are_repeated_with_growing_waits) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  wait_for_deadline(f); /* no answer */
  cr_assert_eq(f->now_ns, 30 * SECOND);
  NOT_ASKED(f);
  wait_for_deadline(f);
  cr_assert_eq(f->now_ns, 30 * SECOND + 200000000);
  ASKED(f, true, 0);
  OK(kvrelay_router_failed(&f->router, KVRELAY_ROUTER_BROKEN, f->now_ns));
  OK(kvrelay_router_failed(&f->router, KVRELAY_ROUTER_BROKEN, f->now_ns)); /* said twice */
  wait_for_deadline(f);
  cr_assert_eq(f->now_ns, 30 * SECOND + 600000000);
  ASKED(f, true, 0);
  live(f, store(8, 1, 0));
  live(f, store(9, 2, 1));
  OK(kvrelay_router_failed(&f->router, KVRELAY_ROUTER_BROKEN, f->now_ns));
  cr_assert_eq(state(f), KVRELAY_ROUTER_LIVE, "degraded: what waited is applied");
  cr_assert_eq(blocks_of(f, 0), 2);
  cr_assert_not(stats(f)->complete);
  live(f, store(12, 3, 0));
  COUNTED(f, LOSS, 2);
  cr_assert_eq(blocks_of(f, 0), 1, "a hole clears the rank");
  wait_for_deadline(f);
  ASKED(f, true, 0);
  live(f, store(13, 4, 3));
  dump_begin(f);
  dump_event(f, store(0, 3, 0));
  cr_assert(dump_end(f, 12));
  cr_assert_eq(blocks_of(f, 0), 2);
  cr_assert(stats(f)->complete);
  fixture_free(f);
}

Test(router, refusals_go_on_and_a_failed_dump_leaves_everything) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  dump_begin(f);
  dump_event(f, store(0, 1, 0));
  cr_assert(dump_end(f, 1));
  live(f, store(4, 2, 1));
  for (int attempt = 0; attempt < 3; attempt++) {
    ASKED(f, false, 2);
    OK(kvrelay_router_failed(&f->router, KVRELAY_ROUTER_NO_DUMP, f->now_ns));
    if (attempt < 2)
      wait_for_deadline(f);
  }
  cr_assert_eq(state(f), KVRELAY_ROUTER_LIVE);
  cr_assert_eq(blocks_of(f, 0), 1);
  cr_assert_eq(stats(f)->last_event_id, 1);
  cr_assert(stats(f)->complete);
  live(f, store(5, 3, 1)); /* a hole again */
  ASKED(f, false, 2);
  OK(kvrelay_router_failed(&f->router, KVRELAY_ROUTER_REFUSED, f->now_ns));
  cr_assert_eq(blocks_of(f, 0), 0, "its parent went with the rank");
  cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED);
  fixture_free(f);
}

Test(router, a_clear_ends_a_recovery) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  live(f, store(4, 2, 1));
  live(f, clear_all(5));
  live(f, store(6, 3, 0));
  cr_assert_eq(blocks_of(f, 0), 1);
  cr_assert(stats(f)->complete);
  cr_assert_eq(kvrelay_router_dump_begin(&f->router, &f->next, f->next_mem,
                                         ckf_producer_mem_size(&f->pc), 0),
               KVRELAY_ERR_STATE, "the answer comes too late");
  fixture_free(f);
}

Test(router, what_waits_is_bounded_and_the_oldest_go) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  for (uint64_t n = 1; n <= 20; n++)
    live(f, n % 3 == 0 ? removal(n, n - 1) : store(n, n, 0));
  COUNTED(f, LOSS, 12);
  ckf_block many[65];
  for (uint64_t i = 0; i < 65; i++)
    many[i] = (ckf_block){1000 + i, 5000 + i};
  kvrelay_router_event ev = event(21, KVRELAY_ROUTER_STORED);
  ev.blocks = many;
  ev.blocks_len = 65; /* one more than 1 024 bytes hold */
  live(f, ev);
  COUNTED(f, EVENT_TOO_LARGE, 1);
  ev.blocks_len = 60; /* leaves four cells */
  live(f, ev);
  COUNTED(f, LOSS, 12 + 4);
  dump_begin(f);
  cr_assert(dump_end(f, 0));
  /* 17, 18 removes 17, 19, 20, then the large one. */
  cr_assert_eq(blocks_of(f, 0), 62);
  cr_assert_eq(stats(f)->last_event_id, 21);
  COUNTED(f, GAP, 16);
  fixture_free(f);
}

Test(router, a_reset_source_is_gone) {
  fixture *f = fresh(true);
  ASKED(f, true, 0);
  dump_begin(f);
  dump_event(f, store(0, 1, 0));
  cr_assert(dump_end(f, 1));
  OK(kvrelay_router_reset(&f->router));
  live(f, store(2, 2, 1));
  cr_assert_eq(blocks_of(f, 0), 0);
  cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED);
  cr_assert_eq(kvrelay_router_deadline_ns(&f->router), KVRELAY_TIME_NONE);
  fixture_free(f);
}

Test(router, refuses_bad_configurations) {
  kvrelay_router_config cfg = config(true);
  fixture *f = fixture_of(&cfg);
  size_t need = kvrelay_router_mem_size(&cfg);
  kvrelay_router r;
  cr_assert_eq(kvrelay_router_init(&r, &cfg, &f->producer, f->mem, need - 1, 0),
               KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_router_init(&r, &cfg, NULL, f->mem, need, 0), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_router_init_abi(&r, 1, &cfg, &f->producer, f->mem, need, 0),
               KVRELAY_ERR_ABI);
  cfg.attempts = 33;
  cr_assert_eq(kvrelay_router_mem_size(&cfg), 0);
  cfg.attempts = 1;
  cfg.hold_events = 0;
  cr_assert_eq(kvrelay_router_mem_size(&cfg), 0);
  ASKED(f, true, 0);
  cr_assert_eq(kvrelay_router_dump_begin(&f->router, &f->next, f->next_mem, 10, 0),
               KVRELAY_ERR_NOSPACE);
  wait_for_deadline(f);
  ASKED(f, true, 0);
  fixture_free(f);
}

/* ---- recorded: workers of Dynamo ---- */

typedef struct deployment {
  json_t *root;
  kvrelay_router_decoder decoder;
  void *decoder_mem;
} deployment;

static deployment opened(void) {
  deployment d;
  json_error_t error;
  size_t len = kvrelay_router_decoder_mem_size(256);
  d.root = json_load_file("tests/data/dynamo/router.json", 0, &error);
  cr_assert_not_null(d.root, "%s", error.text);
  d.decoder_mem = malloc(len);
  OK(kvrelay_router_decoder_init(&d.decoder, 256, d.decoder_mem, len));
  return d;
}

static void closed(deployment *d) {
  json_decref(d->root);
  free(d->decoder_mem);
}

static fixture *of_worker(uint64_t worker, uint32_t rank, bool recoverable) {
  kvrelay_router_config cfg = kvrelay_router_config_default();
  cfg.worker_id = worker;
  cfg.rank = rank;
  cfg.recoverable = recoverable;
  return fixture_of(&cfg);
}

/* Feeds messages first .. last - 1 of this worker's rank; returns how many there were. */
static size_t feed_messages(deployment *d, fixture *f, uint64_t first, uint64_t last) {
  size_t i, n = 0;
  json_t *message;
  json_array_foreach (vec_get(d->root, "messages"), i, message) {
    size_t len;
    uint64_t id = vec_u64(vec_get(message, "event_id"));
    if (vec_u64(vec_get(message, "worker")) != f->router.cfg_.worker_id ||
        vec_u64(vec_get(message, "rank")) != f->router.cfg_.rank || id < first || id >= last)
      continue;
    uint8_t *payload = vec_hex(vec_get(message, "payload"), &len);
    kvrelay_router_event ev;
    OK(kvrelay_router_batch_begin(&d->decoder, payload, len));
    cr_assert_eq(kvrelay_router_batch_next(&d->decoder, &ev), 1);
    cr_assert_eq(ev.event_id, id);
    OK(kvrelay_router_live(&f->router, &ev, 0));
    cr_assert_eq(kvrelay_router_batch_next(&d->decoder, &ev), 0);
    free(payload);
    n++;
  }
  return n;
}

/* Feeds a recorded answer to the router. */
static kvrelay_router_answer feed_answer(deployment *d, fixture *f, const char *name) {
  size_t len;
  kvrelay_router_answer answer;
  kvrelay_router_event ev;
  uint8_t *body = vec_hex(vec_get(vec_get(vec_get(d->root, "answers"), name), "body"), &len);
  OK(kvrelay_router_answer_begin(&d->decoder, body, len, &answer));
  if (answer.kind == KVRELAY_ROUTER_ANSWER_DUMP) {
    dump_begin(f);
    while (kvrelay_router_batch_next(&d->decoder, &ev) == 1)
      dump_event(f, ev);
    cr_assert(dump_end(f, answer.last_event_id));
  } else if (answer.kind == KVRELAY_ROUTER_ANSWER_EVENTS) {
    while (kvrelay_router_batch_next(&d->decoder, &ev) == 1)
      again(f, ev);
    OK(kvrelay_router_again_end(&f->router, answer.last_event_id, 0));
  } else {
    cr_assert_eq(kvrelay_router_batch_next(&d->decoder, &ev), 0);
  }
  free(body);
  return answer;
}

/* The blocks that the worker was told to hold, under the keys of its tokens. */
static void check_operations(deployment *d, fixture *f) {
  uint64_t external[64], canonical[64];
  size_t i, held = 0;
  json_t *op;
  ckf_member member = {f->router.cfg_.worker_id, f->router.cfg_.rank};
  json_array_foreach (vec_get(d->root, "operations"), i, op) {
    size_t hashes, tokens_len;
    uint64_t parent = 0;
    if (vec_u64(vec_get(op, "worker")) != member.worker_id ||
        vec_u64(vec_get(op, "rank")) != member.dp_rank)
      continue;
    uint64_t *named = vec_u64s(vec_get(op, "hashes"), &hashes);
    if (strcmp(vec_str(vec_get(op, "op")), "remove") == 0) {
      for (size_t h = 0; h < hashes; h++)
        for (size_t at = held; at-- > 0;)
          if (external[at] == named[h]) {
            external[at] = external[--held];
            canonical[at] = canonical[held];
          }
      free(named);
      continue;
    }
    const json_t *lora = json_object_get(op, "lora"), *salt = json_object_get(op, "salt");
    const char *lora_text = lora ? json_string_value(lora) : "",
               *salt_text = salt ? json_string_value(salt) : "";
    uint64_t seed = hashfmt_seed((const uint8_t *)lora_text, strlen(lora_text),
                                 (const uint8_t *)salt_text, strlen(salt_text));
    uint32_t block = (uint32_t)vec_u64(vec_get(op, "block"));
    uint32_t *tokens = vec_u32s(vec_get(op, "tokens"), &tokens_len);
    bool has_parent = json_object_get(op, "parent") != NULL;
    for (size_t at = 0; has_parent && at < held; at++)
      if (external[at] == vec_u64(vec_get(op, "parent")))
        parent = canonical[at];
    for (size_t b = 0; b < hashes; b++) {
      uint64_t local = hashfmt_local(tokens + b * block, block, seed);
      if (json_object_get(op, "mm") != NULL) {
        uint64_t object = 777;
        hashfmt_mm_tokens none;
        memset(&none, 0, sizeof none);
        cr_assert_eq(hashfmt_block_mm(tokens + b * block, block, &object, 1, &none, seed, &local),
                     HASHFMT_OK);
      }
      parent = b == 0 && !has_parent ? local : hashfmt_child(parent, local);
      external[held] = named[b];
      canonical[held++] = parent;
    }
    free(named);
    free(tokens);
  }
  cr_assert_eq(ckf_producer_member_blocks(&f->producer, &member), held);
  cr_assert_gt(held, 0);
  for (size_t at = 0; at < held; at++) {
    uint64_t got = 0;
    cr_assert_eq(ckf_producer_find(&f->producer, &member, external[at], &got, NULL), 1, "%" PRIu64,
                 external[at]);
    cr_assert_eq(got, canonical[at], "%" PRIu64, external[at]);
  }
}

#define W1 UINT64_C(14376672764556661439)
#define W2 UINT64_C(8918810959832018312)
#define P UINT64_C(5101995072676402644)

Test(recorded_workers, live_events_end_in_what_the_workers_hold) {
  deployment d = opened();
  static const struct {
    uint64_t worker;
    uint32_t rank;
    size_t events;
  } all[] = {{W1, 0, 7}, {W1, 1, 1}, {P, 0, 7}};
  size_t seen = 0;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    fixture *f = of_worker(all[i].worker, all[i].rank, false);
    cr_assert_eq(feed_messages(&d, f, 0, UINT64_MAX), all[i].events);
    seen += all[i].events;
    check_operations(&d, f);
    fixture_free(f);
  }
  fixture *f = of_worker(W2, 0, false);
  cr_assert_eq(feed_messages(&d, f, 0, 4), 3);
  cr_assert_eq(state(f), KVRELAY_ROUTER_LIVE);
  cr_assert_eq(feed_messages(&d, f, 4, 5), 1);
  cr_assert_eq(state(f), KVRELAY_ROUTER_FAILED, "its parent is unknown on purpose");
  ckf_member member = {W2, 0};
  cr_assert_eq(ckf_producer_member_blocks(&f->producer, &member), 0);
  fixture_free(f);
  cr_assert_eq(seen + 4, json_array_size(vec_get(d.root, "messages")));
  closed(&d);
}

Test(recorded_workers, a_dump_and_the_events_behind_it_end_in_the_same) {
  deployment d = opened();
  fixture *f = of_worker(W1, 0, true);
  ASKED(f, true, 0);
  cr_assert_eq(feed_messages(&d, f, 7, 8), 1); /* waits */
  kvrelay_router_answer answer = feed_answer(&d, f, "full");
  cr_assert_eq(answer.last_event_id, 6);
  check_operations(&d, f);
  cr_assert(stats(f)->complete);
  fixture_free(f);
  closed(&d);
}

Test(recorded_workers, a_list_closes_a_hole) {
  deployment d = opened();
  fixture *f = of_worker(W1, 0, true);
  ASKED(f, true, 0);
  dump_begin(f); /* a worker that had nothing yet */
  cr_assert(dump_end(f, 0));
  cr_assert_eq(feed_messages(&d, f, 1, 3), 2);
  cr_assert_eq(feed_messages(&d, f, 7, 8), 1);
  ASKED(f, false, 3);
  kvrelay_router_answer answer = feed_answer(&d, f, "from3");
  cr_assert_eq(answer.kind, KVRELAY_ROUTER_ANSWER_EVENTS);
  cr_assert_eq(stats(f)->counts[KVRELAY_COUNT_REPLAY], 4);
  check_operations(&d, f);
  fixture_free(f);
  closed(&d);
}

Test(recorded_workers, refusals_are_told_apart) {
  deployment d = opened();
  fixture *f = of_worker(W1, 0, true);
  static const struct {
    const char *asked, *name;
  } all[] = {{"next", "TooNew"},
             {"toonew", "TooNew"},
             {"badrange", "InvalidRange"},
             {"wrongrank", "Error"}};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    kvrelay_router_answer answer = feed_answer(&d, f, all[i].asked);
    cr_assert_eq(answer.kind, KVRELAY_ROUTER_ANSWER_REFUSED);
    cr_assert_eq(answer.name.len, strlen(all[i].name));
  }
  fixture_free(f);
  closed(&d);
}

/* ---- decoder ---- */

/* Every cut and every changed byte of real payloads: an error, or events within their bounds. */
Test(router_decoder, survives_every_cut_and_every_changed_byte) {
  deployment d = opened();
  kvrelay_router_event ev;
  kvrelay_router_answer answer;
  const char *name;
  json_t *value;
  size_t good = 0;
  json_object_foreach (vec_get(d.root, "answers"), name, value) {
    size_t len;
    uint8_t *body = vec_hex(vec_get(value, "body"), &len);
    for (size_t cut = 0; cut < len; cut++) {
      uint8_t *part = malloc(cut + 1);
      memcpy(part, body, cut);
      cr_assert_eq(kvrelay_router_answer_begin(&d.decoder, part, cut, &answer),
                   KVRELAY_ERR_TRUNCATED);
      cr_assert_eq(kvrelay_router_batch_next(&d.decoder, &ev), 0);
      free(part);
    }
    for (size_t at = 0; at < len; at++)
      for (int change = 1; change < 256; change += 7) {
        body[at] ^= (uint8_t)change;
        if (kvrelay_router_answer_begin(&d.decoder, body, len, &answer) == KVRELAY_OK)
          for (int more; (more = kvrelay_router_batch_next(&d.decoder, &ev)) != 0;) {
            cr_assert(more == 1 || more == KVRELAY_ERR_MALFORMED || more == KVRELAY_ERR_LIMIT);
            cr_assert(ev.blocks_len <= 256 && ev.externals_len <= 256);
            good += more == 1;
          }
        body[at] ^= (uint8_t)change;
      }
    free(body);
  }
  cr_assert_gt(good, 1000);
  closed(&d);
}

/* {"worker_id":7,"event":{"event_id":1,"data":…}} as the only event of a message. */
static int decoded(deployment *d, const char *data_hex, kvrelay_router_event *ev) {
  char hex[2048];
  size_t len;
  snprintf(hex, sizeof hex,
           "9182a9776f726b65725f696407a56576656e7482a86576656e745f696401a464617461%s", data_hex);
  json_t *text = json_string(hex);
  static uint8_t payload[1024];
  uint8_t *bytes = vec_hex(text, &len);
  memcpy(payload, bytes, len);
  free(bytes);
  json_decref(text);
  OK(kvrelay_router_batch_begin(&d->decoder, payload, len));
  return kvrelay_router_batch_next(&d->decoder, ev);
}

Test(router_decoder, defaults_and_what_is_no_event) {
  deployment d = opened();
  kvrelay_router_event ev;
  cr_assert_eq(decoded(&d, "a7636c6561726564", &ev), 1);
  cr_assert_eq(ev.type, KVRELAY_ROUTER_CLEARED);
  cr_assert_eq(ev.tier, CKF_TIER_DEVICE);
  cr_assert_eq(ev.domain, CKF_DOMAIN_MISSING);
  cr_assert_eq(ev.dp_rank, 0);
  /* {"removed":{"block_hashes":[-1, 5]}} */
  cr_assert_eq(decoded(&d, "81a772656d6f76656481ac626c6f636b5f68617368657392ff05", &ev), 1);
  cr_assert_eq(ev.externals_len, 2);
  cr_assert_eq(ev.externals[0], UINT64_MAX);
  cr_assert_eq(ev.externals[1], 5);
  static const char *const bad[] = {
      "a7636c656172656e",                                 /* another word */
      "c0",                                               /* nil */
      "80",                                               /* nothing */
      "81a772656d6f76656480",                             /* removed, but what? */
      "81a772656d6f76656481ac626c6f636b5f686173686573a0", /* a text for a list */
      "81a673746f72656480",                               /* stored, but what? */
      "81a673746f72656481a6626c6f636b739180",             /* a block without hashes */
      "81a36e657780"};                                    /* unknown */
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    cr_assert_eq(decoded(&d, bad[i], &ev), KVRELAY_ERR_MALFORMED, "%zu", i);
  cr_assert_eq(kvrelay_router_batch_begin(&d.decoder, (const uint8_t *)"\x80", 1),
               KVRELAY_ERR_MALFORMED);
  uint8_t deep[64];
  memset(deep, 0x91, sizeof deep);
  deep[63] = 0xc0;
  cr_assert_eq(kvrelay_router_batch_begin(&d.decoder, deep, sizeof deep), KVRELAY_ERR_LIMIT);
  cr_assert_eq(kvrelay_router_decoder_mem_size(0), 0);
  closed(&d);
}
