/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Order with a replay endpoint: gaps, answers with every fault, restarts, recovery, silence, all by
 * a time that the test gives.  First the rules one by one, then an engine that random faults stand
 * between: each of its batches is applied once and in order, or is counted as lost.
 */
#include <criterion/criterion.h>
#include <inttypes.h>

#include "test_source.h"

enum { BATCHES_MAX = 512 };
#define SECOND UINT64_C(1000000000)
#define OK(CALL) cr_assert_eq((CALL), KVRELAY_OK)
#define COUNTED(F, NAME, N)                                                                        \
  cr_assert_eq(counted((F)->f, KVRELAY_COUNT_##NAME), (uint64_t)(N),                               \
               #NAME " is %" PRIu64 ", wanted %" PRIu64, counted((F)->f, KVRELAY_COUNT_##NAME),    \
               (uint64_t)(N))

/* ---- an engine that keeps what it published ---- */

typedef struct published {
  uint8_t *bytes;
  size_t len;
} published;

typedef struct stream {
  feeder *f;
  published batch[BATCHES_MAX];
  uint64_t len;                      /* batches published */
  uint64_t now_ns;                   /* of the source */
  uint64_t applied[4 * BATCHES_MAX]; /* sequences in the order in which they came out */
  size_t applied_len;
} stream;

static kvrelay_source_config replay_config(void) {
  kvrelay_source_config c = test_source_config();
  c.replay = true;
  c.hold_batches = 64;
  c.hold_bytes = 1 << 16;
  return c;
}

static stream *stream_new(const kvrelay_source_config *cfg) {
  stream *e = calloc(1, sizeof *e);
  e->f = feeder_new(cfg, 1024, NULL);
  return e;
}

static void forget_batches(stream *e) {
  for (uint64_t i = 0; i < e->len; i++)
    free(e->batch[i].bytes);
  e->len = 0;
}

static void stream_free(stream *e) {
  cr_assert_eq(ckf_producer_check_(e->f->producer), CKF_OK);
  forget_batches(e);
  feeder_free(e->f);
  free(e);
}

/* Ends the batch in f->batch and publishes it with the next number. */
static uint64_t publish(stream *e, int rank) {
  packer *p = &e->f->batch;
  cr_assert_lt(e->len, BATCHES_MAX);
  put_uint(p, (uint64_t)rank);
  e->batch[e->len] = (published){malloc(p->len), p->len};
  memcpy(e->batch[e->len].bytes, p->bytes, p->len);
  return e->len++;
}

/* Block number n of one long prompt: hash n + 1, tokens 4n .. 4n + 3. */
static uint64_t publish_block(stream *e, uint32_t n) {
  uint64_t parent = n;
  put_batch(&e->f->batch, 1);
  put_stored(&e->f->batch, (stored){.hashes = HASHES(n + 1),
                                    .parent = n == 0 ? NULL : &parent,
                                    .first = 4 * n,
                                    .count = 4});
  return publish(e, 0);
}

static void publish_blocks(stream *e, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    (void)publish_block(e, (uint32_t)e->len);
}

static void publish_clear(stream *e) {
  put_batch(&e->f->batch, 1);
  put_cleared(&e->f->batch, "AllBlocksCleared", NULL);
  (void)publish(e, 0);
}

/* Applies what is due and notes its order. */
static void drain(stream *e) {
  kvrelay_source_batch b;
  kvrelay_engine_batch batch;
  kvrelay_engine_event ev;
  kvrelay_source *s = &e->f->source;
  int more;
  while ((more = kvrelay_source_next(s, &b, e->now_ns)) == 1) {
    cr_assert_lt(e->applied_len, 4 * BATCHES_MAX);
    e->applied[e->applied_len++] = b.sequence;
    if (b.payload == NULL || kvrelay_engine_batch_begin(&e->f->decoder, b.payload, b.len, &batch)) {
      OK(kvrelay_source_lost(s, KVRELAY_COUNT_PAYLOAD_TOO_LARGE, e->now_ns));
      continue;
    }
    while (kvrelay_engine_batch_next(&e->f->decoder, &ev) == 1)
      OK(kvrelay_source_event(s, batch.has_rank, batch.rank, &ev, e->now_ns));
  }
  OK(more);
}

static void live(stream *e, uint64_t n) {
  OK(kvrelay_source_live(&e->f->source, n, e->batch[n].bytes, e->batch[n].len, e->now_ns));
  drain(e);
}

static void reply(stream *e, uint64_t n) {
  OK(kvrelay_source_reply(&e->f->source, n, e->batch[n].bytes, e->batch[n].len, e->now_ns));
  drain(e);
}

static void replies(stream *e, uint64_t first, uint64_t last) {
  for (uint64_t n = first; n <= last; n++)
    reply(e, n);
}

static void marker(stream *e) {
  OK(kvrelay_source_reply(&e->f->source, UINT64_MAX, NULL, 0, e->now_ns));
  drain(e);
}

static void connection(stream *e, bool up) {
  OK(kvrelay_source_connection(&e->f->source, up, e->now_ns));
  drain(e);
}

/* Lets the time pass to the next deadline and one ns less before. */
static void wait_for_deadline(stream *e) {
  uint64_t at_ns = kvrelay_source_deadline_ns(&e->f->source);
  cr_assert_neq(at_ns, KVRELAY_TIME_NONE);
  if (at_ns > e->now_ns)
    e->now_ns = at_ns - 1;
  OK(kvrelay_source_tick(&e->f->source, e->now_ns));
  drain(e);
  e->now_ns = at_ns;
  OK(kvrelay_source_tick(&e->f->source, e->now_ns));
  drain(e);
}

static int state(const stream *e) { return kvrelay_source_state(&e->f->source); }
static bool complete(const stream *e) { return kvrelay_source_complete(&e->f->source, 0); }

#define ASKED(E, FROM)                                                                             \
  do {                                                                                             \
    uint64_t from_ = 12345;                                                                        \
    cr_assert_eq(kvrelay_source_request(&(E)->f->source, &from_), 1, "nothing is asked");          \
    cr_assert_eq(from_, (uint64_t)(FROM), "asked from %" PRIu64, from_);                           \
  } while (0)
#define NOT_ASKED(E)                                                                               \
  do {                                                                                             \
    uint64_t from_ = 0;                                                                            \
    cr_assert_eq(kvrelay_source_request(&(E)->f->source, &from_), 0, "asked from %" PRIu64,        \
                 from_);                                                                           \
  } while (0)

static void check_applied(const stream *e, const uint64_t *want, size_t len) {
  cr_assert_eq(e->applied_len, len, "%zu applied, wanted %zu", e->applied_len, len);
  for (size_t i = 0; i < len; i++)
    cr_assert_eq(e->applied[i], want[i], "batch %zu is %" PRIu64, i, e->applied[i]);
}
#define APPLIED(E, ...)                                                                            \
  check_applied((E), (const uint64_t[]){__VA_ARGS__},                                              \
                sizeof(const uint64_t[]){__VA_ARGS__} / sizeof(uint64_t))

/* A stream of `n` blocks that was seen from its beginning. */
static stream *settled_with(const kvrelay_source_config *cfg, uint32_t n) {
  stream *e = stream_new(cfg);
  publish_blocks(e, n);
  ASKED(e, 0);
  connection(e, true);
  for (uint32_t i = 0; i < n; i++)
    reply(e, i);
  marker(e);
  cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
  cr_assert(complete(e) || n == 0);
  return e;
}

static stream *settled(uint32_t n) {
  kvrelay_source_config cfg = replay_config();
  return settled_with(&cfg, n);
}

/* ---- attach ---- */

Test(replay, a_source_asks_from_the_beginning_first) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  publish_blocks(e, 4);
  cr_assert_eq(state(e), KVRELAY_SOURCE_REPLAY);
  ASKED(e, 0);
  NOT_ASKED(e);
  connection(e, true);
  NOT_ASKED(e);
  live(e, 3);
  cr_assert_eq(e->applied_len, 0, "live batches are held");
  replies(e, 0, 3);
  marker(e);
  APPLIED(e, 0, 1, 2, 3);
  cr_assert_eq(blocks_of(e->f, 0), 4);
  cr_assert(complete(e));
  COUNTED(e, REPLAY, 4);
  cr_assert_eq(counted_all(e->f), 4, "nothing else");
  cr_assert_eq(kvrelay_source_deadline_ns(&e->f->source), KVRELAY_TIME_NONE);
  stream_free(e);
}

Test(replay, B28_an_attach_to_a_rolled_over_buffer_is_partial_and_counts_nothing) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  publish_blocks(e, 8);
  ASKED(e, 0);
  replies(e, 5, 7);
  marker(e);
  APPLIED(e, 5, 6, 7);
  cr_assert_not(complete(e));
  COUNTED(e, LOSS, 0);
  COUNTED(e, GAP, 0);
  COUNTED(e, ORPHAN, 3);
  COUNTED(e, RECOVERY, 0);
  publish_clear(e);
  live(e, 8);
  cr_assert(complete(e), "it is known to be empty");
  stream_free(e);
}

Test(replay, an_engine_that_is_not_there_yet_is_asked_when_it_comes) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  ASKED(e, 0);
  wait_for_deadline(e);
  cr_assert_eq(e->now_ns, 5 * SECOND);
  cr_assert_eq(state(e), KVRELAY_SOURCE_CONNECTING);
  connection(e, true);
  ASKED(e, 0);
  marker(e);
  publish_blocks(e, 2);
  live(e, 0);
  live(e, 1);
  cr_assert(complete(e));
  cr_assert_eq(counted_all(e->f), 0);
  stream_free(e);
}

Test(replay, a_fresh_engine_that_counts_from_a_clock_is_no_restart) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  publish_blocks(e, 1);
  ASKED(e, 0);
  marker(e);
  OK(kvrelay_source_live(&e->f->source, UINT64_C(1700000000000000000), e->batch[0].bytes,
                         e->batch[0].len, 0));
  drain(e);
  ASKED(e, 0);
  marker(e);
  ASKED(e, 0); /* once again */
  marker(e);
  NOT_ASKED(e);
  cr_assert_eq(e->applied_len, 1);
  cr_assert_not(complete(e));
  cr_assert_eq(counted_all(e->f), 0);
  stream_free(e);
}

/* ---- gaps ---- */

Test(replay, B21_a_gap_is_noticed_asked_for_and_closed_in_order) {
  stream *e = settled(7);
  e->applied_len = 0;
  publish_blocks(e, 3);
  live(e, 9);
  COUNTED(e, GAP, 2);
  ASKED(e, 7);
  cr_assert_eq(e->applied_len, 0, "9 is not applied before 7 and 8");
  reply(e, 7);
  reply(e, 8);
  APPLIED(e, 7, 8);
  marker(e);
  APPLIED(e, 7, 8, 9);
  cr_assert_eq(blocks_of(e->f, 0), 10);
  COUNTED(e, LOSS, 0);
  COUNTED(e, ORPHAN, 0);
  cr_assert(complete(e));
  stream_free(e);
}

Test(replay, replies_that_come_twice_or_late_or_unasked_do_nothing) {
  stream *e = settled(4);
  e->applied_len = 0;
  publish_blocks(e, 4);
  uint64_t dropped = kvrelay_source_stats_get(&e->f->source)->batches_dropped;
  reply(e, 4); /* nobody asked */
  live(e, 7);
  reply(e, 4); /* the request is not on its way yet */
  cr_assert_eq(e->applied_len, 0);
  ASKED(e, 4);
  reply(e, 2);
  replies(e, 4, 5);
  reply(e, 5);
  reply(e, 4);
  replies(e, 6, 7);
  live(e, 7);
  marker(e);
  APPLIED(e, 4, 5, 6, 7);
  /* Two before the request, 2, 5, 4, 7 live again, and the held 7 that a reply had overtaken. */
  cr_assert_eq(kvrelay_source_stats_get(&e->f->source)->batches_dropped - dropped, 7);
  cr_assert_eq(counted(e->f, KVRELAY_COUNT_RESTART), 0);
  stream_free(e);
}

Test(replay, live_batches_that_replies_overtook_are_no_restart) {
  stream *e = settled(3);
  publish_blocks(e, 5);
  live(e, 4);
  ASKED(e, 3);
  replies(e, 3, 7);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 8);
  live(e, 5);
  live(e, 6);
  live(e, 7);
  COUNTED(e, RESTART, 0);
  cr_assert_eq(blocks_of(e->f, 0), 8);
  live(e, 6); /* but now live has caught up */
  COUNTED(e, RESTART, 1);
  stream_free(e);
}

Test(replay, B23_a_rolled_over_buffer_is_a_loss_of_what_is_between) {
  stream *e = settled(7);
  publish_blocks(e, 7);
  e->applied_len = 0;
  live(e, 13);
  ASKED(e, 7);
  reply(e, 12);
  APPLIED(e, 12);
  COUNTED(e, LOSS, 5);
  cr_assert_not(complete(e));
  cr_assert_eq(blocks_of(e->f, 0), 0);
  reply(e, 13);
  marker(e);
  APPLIED(e, 12, 13);
  stream_free(e);
}

Test(replay, B36_holes_and_a_missing_marker_are_asked_again) {
  stream *e = settled(1);
  publish_blocks(e, 20);
  e->applied_len = 0;
  live(e, 20);
  ASKED(e, 1);
  replies(e, 1, 5);
  reply(e, 9); /* 6, 7, 8 did not fit the engine's socket */
  replies(e, 10, 12);
  NOT_ASKED(e);
  marker(e);
  ASKED(e, 6);
  replies(e, 6, 8);
  replies(e, 9, 15);
  wait_for_deadline(e); /* no marker */
  ASKED(e, 16);
  replies(e, 16, 18); /* 19 and the marker are missing */
  wait_for_deadline(e);
  ASKED(e, 19);
  replies(e, 19, 20);
  marker(e);
  NOT_ASKED(e);
  cr_assert_eq(blocks_of(e->f, 0), 21);
  cr_assert_eq(e->applied_len, 20);
  COUNTED(e, LOSS, 0);
  COUNTED(e, REPLAY, 21);
  cr_assert(complete(e));
  stream_free(e);
}

Test(replay, a_hole_at_the_head_of_a_repeat_is_confirmed_before_it_is_a_loss) {
  stream *e = settled(1);
  publish_blocks(e, 9);
  e->applied_len = 0;
  live(e, 9);
  ASKED(e, 1);
  replies(e, 1, 3);
  reply(e, 5);
  marker(e);
  ASKED(e, 4);
  reply(e, 6); /* late, of the former request? */
  marker(e);
  ASKED(e, 4);
  COUNTED(e, LOSS, 0);
  reply(e, 4);
  replies(e, 5, 9);
  marker(e);
  COUNTED(e, LOSS, 0);
  cr_assert_eq(e->applied_len, 9);

  publish_blocks(e, 9);
  e->applied_len = 0;
  live(e, 18);
  ASKED(e, 10);
  reply(e, 10);
  reply(e, 12);
  marker(e);
  ASKED(e, 11);
  reply(e, 14);
  marker(e);
  ASKED(e, 11);
  reply(e, 14);
  COUNTED(e, LOSS, 3);
  replies(e, 15, 18);
  marker(e);
  NOT_ASKED(e);
  APPLIED(e, 10, 14, 15, 16, 17, 18);
  stream_free(e);
}

Test(replay, what_no_answer_reaches_is_asked_once_more_and_lost) {
  stream *e = settled(2);
  publish_blocks(e, 4);
  e->applied_len = 0;
  live(e, 5);
  ASKED(e, 2);
  wait_for_deadline(e);
  ASKED(e, 2);
  COUNTED(e, LOSS, 0);
  wait_for_deadline(e);
  NOT_ASKED(e);
  COUNTED(e, LOSS, 3);
  COUNTED(e, GAP, 3);
  APPLIED(e, 5);
  cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
  stream_free(e);
}

Test(replay, a_gap_among_the_held_is_asked_for_too) {
  stream *e = settled(2);
  publish_blocks(e, 8);
  e->applied_len = 0;
  live(e, 3);
  ASKED(e, 2);
  reply(e, 2);
  live(e, 4);
  live(e, 8);
  live(e, 9);
  COUNTED(e, GAP, 4);
  marker(e);
  APPLIED(e, 2, 3, 4);
  ASKED(e, 5);
  replies(e, 5, 7);
  marker(e);
  APPLIED(e, 2, 3, 4, 5, 6, 7, 8, 9);
  COUNTED(e, LOSS, 0);
  COUNTED(e, GAP, 4);
  stream_free(e);
}

Test(replay, the_64th_request_in_a_row_is_the_last) {
  stream *e = settled(1);
  publish_blocks(e, 100);
  live(e, 100);
  for (uint64_t i = 1; i <= 64; i++) {
    ASKED(e, i);
    reply(e, i);
    wait_for_deadline(e);
  }
  NOT_ASKED(e);
  COUNTED(e, LOSS, 35);
  cr_assert_eq(e->applied[e->applied_len - 1], 100);
  publish_blocks(e, 2);
  live(e, 102);
  ASKED(e, 101);
  stream_free(e);
}

Test(replay, more_than_can_be_held_is_a_loss) {
  kvrelay_source_config cfg = replay_config();
  cfg.hold_batches = 4;
  stream *e = settled_with(&cfg, 3);
  publish_blocks(e, 10);
  e->applied_len = 0;
  for (uint64_t n = 5; n < 9; n++)
    live(e, n);
  COUNTED(e, LOSS, 0);
  live(e, 9);
  COUNTED(e, LOSS, 6);
  APPLIED(e, 9);
  cr_assert_not(complete(e));
  cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
  live(e, 10);
  live(e, 11);
  APPLIED(e, 9, 10, 11);
  stream_free(e);

  cfg.hold_batches = 64;
  cfg.hold_bytes = 600;
  e = settled_with(&cfg, 3);
  publish_blocks(e, 20);
  uint64_t n = 5, bytes = 0;
  for (; bytes + e->batch[n].len <= 600; n++) {
    live(e, n);
    bytes += e->batch[n].len;
  }
  COUNTED(e, LOSS, 0);
  live(e, n);
  COUNTED(e, LOSS, n - 3);
  stream_free(e);
}

Test(replay, the_hold_is_as_good_as_new_after_each_gap) {
  kvrelay_source_config cfg = replay_config();
  cfg.hold_batches = 3;
  cfg.hold_bytes = 600; /* some batches' payloads */
  stream *e = settled_with(&cfg, 1);
  for (uint64_t n = 1; n + 4 < 200; n += 4) { /* n and n + 2 get lost */
    publish_blocks(e, 4);
    live(e, n + 1);
    live(e, n + 3);
    ASKED(e, n);
    reply(e, n);
    marker(e);
    ASKED(e, n + 2);
    reply(e, n + 2);
    marker(e);
    NOT_ASKED(e);
    COUNTED(e, LOSS, 0);
  }
  cr_assert_eq(blocks_of(e->f, 0), e->len);
  stream_free(e);
}

Test(replay, places_of_batches_that_went_out_serve_again) {
  kvrelay_source_config cfg = replay_config();
  cfg.hold_batches = 3;
  stream *e = settled_with(&cfg, 1);
  publish_blocks(e, 12);
  live(e, 2);
  ASKED(e, 1);
  live(e, 4);
  live(e, 6);
  reply(e, 1);
  marker(e); /* 2 goes out; 4 and 6 stay at the end of the places */
  ASKED(e, 3);
  live(e, 8);
  reply(e, 3);
  marker(e); /* 4 goes out */
  ASKED(e, 5);
  live(e, 10);
  reply(e, 5);
  reply(e, 7); /* 6 did not come */
  COUNTED(e, LOSS, 0);
  cr_assert_eq(blocks_of(e->f, 0), 6);
  marker(e);
  ASKED(e, 6);
  replies(e, 6, 9);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 11);
  COUNTED(e, LOSS, 0);
  stream_free(e);
}

Test(replay, a_payload_too_large_is_lost_in_its_turn) {
  stream *e = settled(2);
  publish_blocks(e, 4);
  e->applied_len = 0;
  live(e, 3);
  OK(kvrelay_source_live(&e->f->source, 4, NULL, 99, e->now_ns));
  drain(e);
  ASKED(e, 2);
  COUNTED(e, PAYLOAD_TOO_LARGE, 0);
  reply(e, 2);
  marker(e);
  APPLIED(e, 2, 3, 4);
  COUNTED(e, PAYLOAD_TOO_LARGE, 1);
  COUNTED(e, LOSS, 1);
  NOT_ASKED(e);
  cr_assert_eq(blocks_of(e->f, 0), 0);
  stream_free(e);
}

/* ---- another process ---- */

Test(replay, a_lower_live_number_is_another_process) {
  stream *e = settled(4);
  (void)publish_block(e, 4);
  live(e, 4);
  forget_batches(e);
  publish_blocks(e, 3);
  live(e, 0);
  COUNTED(e, RESTART, 1);
  NOT_ASKED(e);
  cr_assert_eq(blocks_of(e->f, 0), 1);
  cr_assert(complete(e));
  live(e, 1);
  live(e, 2);
  live(e, 1);
  COUNTED(e, RESTART, 2);
  cr_assert_eq(blocks_of(e->f, 0), 0);
  ASKED(e, 0);
  replies(e, 0, 2);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 3);
  cr_assert(complete(e));
  stream_free(e);
}

Test(replay, a_lower_live_number_during_a_replay_too) {
  stream *e = settled(5);
  publish_blocks(e, 5);
  live(e, 8);
  ASKED(e, 5);
  reply(e, 5);
  live(e, 7);
  COUNTED(e, RESTART, 1);
  ASKED(e, 0);
  e->applied_len = 0;
  replies(e, 0, 9);
  marker(e);
  cr_assert_eq(e->applied_len, 10);
  cr_assert_eq(blocks_of(e->f, 0), 10);
  stream_free(e);
}

Test(replay, a_jump_beyond_a_gap_is_another_process) {
  stream *e = settled(4);
  const uint64_t far = ((uint64_t)1 << 32) + 5;
  OK(kvrelay_source_live(&e->f->source, far, e->batch[0].bytes, e->batch[0].len, 0));
  drain(e);
  COUNTED(e, RESTART, 1);
  COUNTED(e, LOSS, 0);
  cr_assert_eq(blocks_of(e->f, 0), 0);
  ASKED(e, 0);
  marker(e);
  ASKED(e, 0);
  marker(e);
  cr_assert_eq(e->applied[e->applied_len - 1], far);
  cr_assert_not(complete(e));
  stream_free(e);

  e = settled(2); /* and so when it is noticed only among the held */
  publish_blocks(e, 2);
  live(e, 3);
  ASKED(e, 2);
  OK(kvrelay_source_live(&e->f->source, far, e->batch[0].bytes, e->batch[0].len, 0));
  drain(e);
  reply(e, 2);
  marker(e);
  COUNTED(e, RESTART, 1);
  ASKED(e, 0);
  marker(e);
  ASKED(e, 0);
  marker(e);
  NOT_ASKED(e);
  cr_assert_eq(e->applied[e->applied_len - 1], far);
  COUNTED(e, LOSS, 0);
  stream_free(e);
}

Test(replay, what_waits_at_attach_may_be_of_a_process_that_is_gone_after_a_reconnect) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  publish_blocks(e, 4);
  connection(e, true);
  ASKED(e, 0); /* and nobody answers */
  for (uint32_t i = 0; i < 4; i++)
    live(e, i);
  connection(e, false);
  forget_batches(e);
  for (uint32_t i = 0; i < 6; i++) {
    put_batch(&e->f->batch, 1);
    put_stored(&e->f->batch,
               (stored){.hashes = HASHES(100 + i), .first = 1000 + 4 * i, .count = 4});
    (void)publish(e, 0);
  }
  connection(e, true);
  wait_for_deadline(e);
  cr_assert_eq(blocks_of(e->f, 0), 0, "batches of the process before");
  live(e, 5);
  ASKED(e, 0);
  replies(e, 0, 5);
  marker(e);
  APPLIED(e, 0, 1, 2, 3, 4, 5);
  cr_assert_eq(blocks_of(e->f, 0), 6);
  cr_assert(complete(e));
  stream_free(e);
}

Test(replay, after_a_reconnect_the_last_batch_shows_who_is_there) {
  stream *e = settled(5);
  e->applied_len = 0;
  publish_blocks(e, 3);
  connection(e, false);
  cr_assert_eq(state(e), KVRELAY_SOURCE_CONNECTING);
  connection(e, true);
  ASKED(e, 4);
  live(e, 7);
  replies(e, 4, 7);
  marker(e);
  APPLIED(e, 5, 6, 7);
  COUNTED(e, RESTART, 0);
  cr_assert_eq(blocks_of(e->f, 0), 8);

  connection(e, true); /* another process: its batches differ */
  forget_batches(e);
  for (uint32_t i = 0; i < 12; i++) {
    put_batch(&e->f->batch, 1);
    put_stored(&e->f->batch,
               (stored){.hashes = HASHES(100 + i), .first = 1000 + 4 * i, .count = 4});
    (void)publish(e, 0);
  }
  ASKED(e, 7);
  live(e, 11);
  reply(e, 7);
  COUNTED(e, RESTART, 1);
  cr_assert_eq(blocks_of(e->f, 0), 0);
  ASKED(e, 0);
  replies(e, 0, 11);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 12);
  cr_assert(complete(e));
  stream_free(e);
}

Test(replay, after_a_reconnect_no_answer_is_another_process) {
  for (int how = 0; how < 3; how++) {
    stream *e = settled(5);
    publish_blocks(e, 3);
    connection(e, true);
    ASKED(e, 4);
    if (how == 0)
      marker(e);
    else if (how == 1)
      wait_for_deadline(e);
    else
      reply(e, 6);
    COUNTED(e, RESTART, 1);
    cr_assert_eq(blocks_of(e->f, 0), 0);
    ASKED(e, 0);
    replies(e, 0, 7);
    marker(e);
    cr_assert_eq(blocks_of(e->f, 0), 8);
    stream_free(e);
  }
}

Test(replay, a_reconnect_before_anything_was_applied_asks_anew) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  publish_blocks(e, 6);
  ASKED(e, 0);
  connection(e, true);
  live(e, 5);
  reply(e, 0);
  connection(e, true);
  ASKED(e, 0); /* what was applied has to be there still */
  replies(e, 0, 5);
  marker(e);
  COUNTED(e, RESTART, 0);
  APPLIED(e, 0, 1, 2, 3, 4, 5);
  stream_free(e);
}

/* ---- recovery ---- */

/* A child of a block that was never announced. */
static void publish_orphan(stream *e) {
  uint64_t parent = 9999;
  put_batch(&e->f->batch, 1);
  put_stored(&e->f->batch,
             (stored){.hashes = HASHES(7777), .parent = &parent, .first = 5000, .count = 4});
  (void)publish(e, 0);
}

/* The state lost block 2 of those it holds, as no rule of order can notice. */
static void damage(stream *e) {
  uint64_t lost[] = {3, 4, 5};
  kvrelay_engine_event ev;
  memset(&ev, 0, sizeof ev);
  ev.type = KVRELAY_ENGINE_REMOVED;
  ev.externals = lost;
  ev.externals_len = 3;
  OK(kvrelay_source_event(&e->f->source, true, 0, &ev, 0));
}

Test(recovery, B25_an_orphan_of_a_complete_rank_brings_a_replay_from_0) {
  stream *e = settled(5);
  damage(e);
  uint64_t removed = kvrelay_source_stats_get(&e->f->source)->blocks_removed;
  (void)publish_block(e, 5);
  live(e, 5);
  COUNTED(e, ORPHAN, 1);
  COUNTED(e, RECOVERY, 1);
  cr_assert_not(complete(e));
  ASKED(e, 0);
  (void)publish_block(e, 6);
  live(e, 6);
  for (uint64_t n = 0; n < 5; n++) {
    reply(e, n);
    cr_assert_eq(blocks_of(e->f, 0), 2, "the old state stays until the answer is whole");
  }
  replies(e, 5, 6);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 7);
  cr_assert_eq(depth(e->f, 0, 28), 7);
  cr_assert(complete(e));
  const kvrelay_source_stats *st = kvrelay_source_stats_get(&e->f->source);
  cr_assert_eq(st->batches, 7, "each batch counts once");
  cr_assert_eq(st->blocks_removed, removed);
  cr_assert_eq(st->last_sequence, 6);
  COUNTED(e, ORPHAN, 1);
  COUNTED(e, RESTART, 0);
  COUNTED(e, LOSS, 0);
  NOT_ASKED(e);
  cr_assert_eq(kvrelay_source_deadline_ns(&e->f->source), KVRELAY_TIME_NONE);
  (void)publish_block(e, 7);
  live(e, 7);
  cr_assert_eq(blocks_of(e->f, 0), 8);
  stream_free(e);
}

Test(recovery, holes_and_a_missing_marker_are_asked_again) {
  stream *e = settled(5);
  damage(e);
  (void)publish_block(e, 5);
  live(e, 5);
  ASKED(e, 0);
  replies(e, 0, 1);
  reply(e, 3);
  marker(e);
  ASKED(e, 2);
  replies(e, 2, 4);
  wait_for_deadline(e);
  ASKED(e, 5);
  reply(e, 5);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 6);
  cr_assert(complete(e));
  stream_free(e);
}

Test(recovery, a_clear_is_as_good_as_the_beginning_and_for_its_rank_only) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  connection(e, true);
  ASKED(e, 0);
  put_batch(&e->f->batch, 1);
  put_stored(&e->f->batch, (stored){.hashes = HASHES(50), .first = 0, .count = 4});
  (void)publish(e, 1); /* 0: rank 1 */
  publish_clear(e);    /* 1: rank 0 */
  put_batch(&e->f->batch, 1);
  put_stored(&e->f->batch, (stored){.hashes = HASHES(1), .first = 0, .count = 4});
  (void)publish(e, 0); /* 2 */
  put_batch(&e->f->batch, 1);
  put_removed(&e->f->batch, HASHES(51), NULL, NULL);
  (void)publish(e, 1); /* 3: unknown on rank 1 */
  replies(e, 0, 3);
  marker(e);
  COUNTED(e, UNKNOWN_REMOVAL, 1);
  publish_orphan(e);
  live(e, 4);
  ASKED(e, 0);
  replies(e, 1, 4); /* 0 has left the buffer */
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 1);
  cr_assert_eq(blocks_of(e->f, 1), 1, "of rank 1 the answer does not say everything");
  cr_assert_not(complete(e), "the orphan is one again");
  cr_assert(kvrelay_source_complete(&e->f->source, 1));
  COUNTED(e, RECOVERY, 1);
  COUNTED(e, ORPHAN, 1);
  COUNTED(e, UNKNOWN_REMOVAL, 1);
  NOT_ASKED(e);
  stream_free(e);
}

Test(recovery, an_answer_without_a_beginning_changes_nothing) {
  for (int how = 0; how < 4; how++) {
    stream *e = settled(5);
    damage(e);
    (void)publish_block(e, 5);
    live(e, 5);
    ASKED(e, 0);
    (void)publish_block(e, 6);
    live(e, 6);
    if (how == 0) {
      replies(e, 2, 6); /* rolled over */
      marker(e);
    } else if (how == 1) {
      marker(e); /* nothing */
    } else if (how == 2) {
      wait_for_deadline(e); /* nobody */
    } else {
      replies(e, 0, 1);
      reply(e, 4);
      marker(e);
      ASKED(e, 2);
      reply(e, 4);
      marker(e);
      ASKED(e, 2);
      reply(e, 4);
    }
    cr_assert_eq(blocks_of(e->f, 0), 2, "case %d", how);
    cr_assert_not(complete(e));
    COUNTED(e, LOSS, 0);
    COUNTED(e, ORPHAN, 2);
    cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
    NOT_ASKED(e);
    (void)publish_block(e, 7);
    live(e, 7);
    cr_assert_eq(kvrelay_source_stats_get(&e->f->source)->batches, 8);
    cr_assert_eq(e->applied[e->applied_len - 1], 7);
    stream_free(e);
  }
}

Test(recovery, one_that_cannot_be_held_ends_without_a_loss) {
  kvrelay_source_config cfg = replay_config();
  cfg.hold_batches = 5;
  for (int how = 0; how < 2; how++) {
    stream *e = settled_with(&cfg, 8);
    e->applied_len = 0;
    publish_orphan(e);
    publish_blocks(e, 3);
    live(e, 8);
    ASKED(e, 0);
    if (how == 0) {
      live(e, 9);
      live(e, 10);
      replies(e, 0, 2);
      reply(e, 3); /* the hold is full */
    } else {
      replies(e, 0, 3);
      live(e, 9);
      live(e, 10);
    }
    APPLIED(e, 8, 9, 10);
    COUNTED(e, LOSS, 0);
    cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
    live(e, 11);
    APPLIED(e, 8, 9, 10, 11);
    stream_free(e);
  }
}

Test(recovery, one_in_an_interval) {
  stream *e = settled(3);
  publish_orphan(e);
  live(e, 3);
  COUNTED(e, RECOVERY, 1);
  ASKED(e, 0);
  replies(e, 0, 3);
  marker(e);
  cr_assert_not(complete(e), "the engine itself sends an orphan");
  NOT_ASKED(e);
  publish_clear(e);
  live(e, 4);
  cr_assert(complete(e));
  publish_orphan(e);
  live(e, 5);
  COUNTED(e, RECOVERY, 1);
  NOT_ASKED(e);
  cr_assert_eq(kvrelay_source_deadline_ns(&e->f->source), 30 * SECOND);
  wait_for_deadline(e);
  COUNTED(e, RECOVERY, 2);
  ASKED(e, 0);
  stream_free(e);
}

Test(recovery, ends_with_the_connection_or_the_process) {
  stream *e = settled(3);
  publish_orphan(e);
  live(e, 3);
  ASKED(e, 0);
  replies(e, 0, 1);
  connection(e, true);
  ASKED(e, 3); /* the batch applied last */
  reply(e, 3);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 3);
  COUNTED(e, RESTART, 0);
  stream_free(e);

  e = settled(3);
  publish_orphan(e);
  live(e, 3);
  ASKED(e, 0);
  replies(e, 0, 1);
  live(e, 0);
  COUNTED(e, RESTART, 1);
  cr_assert_eq(blocks_of(e->f, 0), 1);
  cr_assert(complete(e));
  stream_free(e);
}

Test(recovery, under_a_hash_left_out_on_purpose_nothing_is_missing) {
  stream *e = settled(1);
  uint64_t partial = 40;
  put_batch(&e->f->batch, 2);
  put_stored(&e->f->batch, (stored){.hashes = HASHES(40), .first = 100, .count = 3});
  put_stored(&e->f->batch,
             (stored){.hashes = HASHES(41), .parent = &partial, .first = 104, .count = 4});
  live(e, publish(e, 0));
  COUNTED(e, PARTIAL_BLOCK, 1);
  COUNTED(e, ORPHAN, 1);
  COUNTED(e, RECOVERY, 0);
  NOT_ASKED(e);
  cr_assert(complete(e));
  stream_free(e);
}

/* ---- silence, clearing, misuse ---- */

Test(replay, B4_silence_of_a_loaded_engine_shows_and_ends_with_a_batch) {
  stream *e = settled(2);
  kvrelay_source *s = &e->f->source;
  e->now_ns = 1000 * SECOND;
  cr_assert_eq(kvrelay_source_deadline_ns(s), KVRELAY_TIME_NONE, "an idle engine may be silent");
  kvrelay_source_load(s, true, e->now_ns);
  cr_assert_eq(kvrelay_source_deadline_ns(s), 1060 * SECOND);
  kvrelay_source_load(s, true, e->now_ns + SECOND);
  wait_for_deadline(e);
  cr_assert_eq(e->now_ns, 1060 * SECOND);
  cr_assert_eq(state(e), KVRELAY_SOURCE_SILENT);
  COUNTED(e, SILENT, 1);
  OK(kvrelay_source_tick(s, e->now_ns + 100 * SECOND));
  COUNTED(e, SILENT, 1);
  (void)publish_block(e, 2);
  live(e, 2);
  cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
  wait_for_deadline(e);
  cr_assert_eq(e->now_ns, 1120 * SECOND);
  COUNTED(e, SILENT, 2);
  kvrelay_source_load(s, false, e->now_ns);
  cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE);
  kvrelay_source_load(s, true, e->now_ns);
  connection(e, false);
  cr_assert_eq(kvrelay_source_deadline_ns(s), KVRELAY_TIME_NONE);
  stream_free(e);
}

Test(replay, a_cleared_source_forgets_what_it_held_and_asked) {
  stream *e = settled(3);
  publish_blocks(e, 3);
  live(e, 5);
  OK(kvrelay_source_clear(&e->f->source, e->now_ns));
  drain(e);
  NOT_ASKED(e);
  cr_assert_eq(blocks_of(e->f, 0), 0);
  cr_assert_eq(e->applied_len, 3);
  reply(e, 3);
  cr_assert_eq(e->applied_len, 3);
  connection(e, true);
  ASKED(e, 0);
  replies(e, 0, 5);
  marker(e);
  cr_assert_eq(blocks_of(e->f, 0), 6);
  COUNTED(e, RESTART, 0);
  stream_free(e);
}

Test(replay, due_batches_go_before_new_input) {
  stream *e = settled(1);
  publish_blocks(e, 2);
  kvrelay_source *s = &e->f->source;
  kvrelay_source_batch b;
  OK(kvrelay_source_live(s, 1, e->batch[1].bytes, e->batch[1].len, 0));
  cr_assert_eq(kvrelay_source_live(s, 2, e->batch[2].bytes, e->batch[2].len, 0), KVRELAY_ERR_STATE);
  cr_assert_eq(kvrelay_source_reply(s, 2, NULL, 0, 0), KVRELAY_ERR_STATE);
  cr_assert_eq(kvrelay_source_connection(s, true, 0), KVRELAY_ERR_STATE);
  cr_assert_eq(kvrelay_source_tick(s, 0), KVRELAY_ERR_STATE);
  cr_assert_eq(kvrelay_source_next(s, &b, 0), 1);
  cr_assert_eq(b.sequence, 1);
  cr_assert_eq(b.payload, e->batch[1].bytes, "not copied");
  cr_assert_eq(kvrelay_source_next(s, &b, 0), 0);
  stream_free(e);
}

Test(replay, memory_covers_the_hold) {
  kvrelay_source_config cfg = replay_config();
  size_t with = kvrelay_source_mem_size(&cfg);
  cfg.hold_bytes += 4096;
  cr_assert_eq(kvrelay_source_mem_size(&cfg), with + 4096);
  cfg.replay = false;
  cr_assert_lt(kvrelay_source_mem_size(&cfg), with - 60000);
  cfg.replay = true;
  cfg.hold_batches = 0;
  cr_assert_eq(kvrelay_source_mem_size(&cfg), 0);
  cfg.hold_batches = (1u << 20) + 1;
  cr_assert_eq(kvrelay_source_mem_size(&cfg), 0);
}

/* ---- every fault at every step ---- */

enum { FAULTS = 9, LIFE = 24 };

/* `next`: the reply that the engine would send now. */
static void fault(stream *e, int kind, uint64_t next) {
  switch (kind) {
  case 0:
    marker(e);
    break;
  case 1:
    e->now_ns += 6 * SECOND;
    OK(kvrelay_source_tick(&e->f->source, e->now_ns));
    drain(e);
    break;
  case 2:
    connection(e, true);
    break;
  case 3:
    connection(e, false);
    connection(e, true);
    break;
  case 4: /* twice, or unasked */
    if (next != 0)
      reply(e, next - 1);
    break;
  case 5:
    if (e->len != 0)
      reply(e, 0);
    break;
  case 6: /* as of another process */
    if (e->len != 0)
      live(e, 0);
    break;
  case 7:
    publish_orphan(e);
    live(e, e->len - 1);
    break;
  default:
    OK(kvrelay_source_clear(&e->f->source, e->now_ns));
    drain(e);
    connection(e, true);
  }
}

/* Answers whatever is asked until nothing is, with the whole buffer. */
static void serve_all(stream *e) {
  uint64_t from;
  for (int rounds = 0; kvrelay_source_request(&e->f->source, &from) == 1; rounds++) {
    cr_assert_lt(rounds, 100);
    for (; from < e->len; from++)
      reply(e, from);
    marker(e);
  }
}

static void publish_root(stream *e, uint32_t *blocks) {
  put_batch(&e->f->batch, 1);
  put_stored(&e->f->batch,
             (stored){.hashes = HASHES(*blocks + 1), .first = 4 * *blocks, .count = 4});
  ++*blocks;
  (void)publish(e, 0);
}

/* Every other batch arrives live; answers come in pieces.  `from`: the next reply. */
static void calm_step(stream *e, int step, uint32_t *blocks, uint64_t *from) {
  uint64_t asked;
  if (step % 6 == 0 || step % 6 == 4) {
    publish_root(e, blocks);
    if (step % 4 == 0)
      live(e, e->len - 1);
  } else if (step % 6 == 2) {
    if (kvrelay_source_request(&e->f->source, &asked) == 1)
      *from = asked;
  } else if (step % 6 == 5) {
    if (step % 4 == 1)
      marker(e);
  } else if (*from < e->len) {
    reply(e, (*from)++);
  }
}

/* What is asked is answered, and more batches come. */
static void all_is_well(stream *e, uint32_t *blocks) {
  for (int i = 0; i < 3; i++) {
    e->now_ns += 40 * SECOND;
    OK(kvrelay_source_tick(&e->f->source, e->now_ns));
    drain(e);
    serve_all(e);
    publish_root(e, blocks);
    live(e, e->len - 1);
    serve_all(e);
  }
}

static void faulty_life(int kind, int second, int at) {
  kvrelay_source_config cfg = replay_config();
  stream *e = stream_new(&cfg);
  uint64_t from = 0;
  uint32_t blocks = 0;
  connection(e, true);
  for (int step = 0; step < LIFE; step++) {
    if (step == at)
      fault(e, kind, from);
    if (step == at + 2)
      fault(e, second, from);
    calm_step(e, step, &blocks, &from);
  }
  all_is_well(e, &blocks);
  cr_assert_eq(state(e), KVRELAY_SOURCE_LIVE, "%d, %d at %d", kind, second, at);
  /* Answers with nothing in them, and only they, may be a loss, which is not hidden. */
  bool lost = counted(e->f, KVRELAY_COUNT_LOSS) != 0, orphans = kind == 7 || second == 7;
  cr_assert(!lost || kind < 2 || second < 2, "%d, %d at %d", kind, second, at);
  cr_assert(blocks_of(e->f, 0) == blocks || (lost && !complete(e)),
            "%d, %d at %d: %" PRIu32 " blocks of %" PRIu32, kind, second, at, blocks_of(e->f, 0),
            blocks);
  cr_assert(complete(e) || lost || orphans, "%d, %d at %d", kind, second, at);
  stream_free(e);
}

Test(replay, every_fault_at_every_step_heals) {
  for (int kind = 0; kind < FAULTS; kind++)
    for (int second = 0; second < FAULTS; second++)
      for (int at = 0; at < LIFE; at++)
        faulty_life(kind, second, at);
}
