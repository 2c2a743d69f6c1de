/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations on a relay, beside a model that knows of each subscriber only what the contract
 * says: the sequence it stands at, how many deltas may wait for it, how long a chunk may, and why
 * it has to end.  Every replica has to equal the producer's words.
 */
#include "test_relay_fixture.h"

#define READERS 12
#define POOLS 3
#define RUNNING (-1)
#define LAGGED_OR_LATE (-2) /* a tick may find the one before it brings the other about */

typedef struct model_reader {
  reader r;
  unsigned pool;
  bool open, admitted, armed;
  int32_t end;       /* enum kvrelay_reason it has to end with, or RUNNING */
  uint64_t sequence; /* of the last frame taken, of the cut before */
  uint64_t since_ns; /* cut or last chunk taken */
  bool holds;
  const uint8_t *held; /* what has to stay, NULL: nothing */
  uint8_t *copy;       /* of it */
  size_t held_len;
} model_reader;

typedef struct model {
  fx *f;
  model_reader readers[READERS];
  uint64_t random;
  unsigned ends[12], deltas, snapshots, heartbeats, refused, given_up;
} model;

static const uint64_t expected_blocks[POOLS] = {32, 1000, 400};

static unsigned draw(model *m, unsigned below) {
  return (unsigned)(ckf_rng_draw(&m->random) % below);
}

static uint32_t chunks_of(const model *m, const model_reader *r) {
  return ckf_cbi1_chunk_count(&r->r.format, m->f->cfg.chunk_buckets);
}

/* A chunk that this reader may read until it pulls, closes, or is told that it ended. */
static void hold(model *m, model_reader *r) {
  const kvrelay_filter_update *frame = &m->f->out.u.filter;
  r->held = frame->payload;
  r->held_len = frame->payload_len;
  r->copy = malloc(frame->payload_len);
  memcpy(r->copy, frame->payload, frame->payload_len);
}

static void let_go(model_reader *r) {
  free(r->copy);
  r->copy = NULL;
  r->held = NULL;
}

/* What the operation just done means for everybody. */
static void settle(model *m) {
  for (int i = 0; i < READERS; i++) {
    model_reader *r = &m->readers[i];
    if (r->held != NULL)
      cr_assert_arr_eq(r->held, r->copy, r->held_len, "a chunk changed while it was held");
    if (!r->open || r->end != RUNNING)
      continue;
    uint64_t now_at = kvrelay_pool_sequence(m->f->pools[r->pool].pool);
    bool admitted = kvrelay_relay_call_admitted(&m->f->relay, r->r.call);
    cr_assert(admitted || !r->admitted, "an admission was taken back");
    if (admitted && !r->admitted) {
      r->admitted = true;
      r->sequence = now_at;
      r->since_ns = m->f->now;
    }
    const bool lagged = r->admitted && now_at - r->sequence > m->f->cfg.queue_frames;
    const bool late = r->admitted && (r->r.chunks < chunks_of(m, r) || r->held != NULL) &&
                      m->f->now - r->since_ns >= m->f->cfg.snapshot_progress_ns;
    if (lagged || late)
      r->end = lagged && late ? LAGGED_OR_LATE
               : lagged       ? KVRELAY_REASON_SUBSCRIBER_LAGGED
                              : KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT;
  }
}

static void op_open(model *m) {
  model_reader *r = &m->readers[draw(m, READERS)];
  unsigned pool = draw(m, POOLS);
  unsigned open = 0;
  if (r->open || m->f->pools[pool].pool == NULL)
    return;
  for (int i = 0; i < READERS; i++)
    open += m->readers[i].open;
  memset(r, 0, sizeof *r);
  r->pool = pool;
  r->end = RUNNING;
  r->open = reader_open(m->f, &r->r, &m->f->pools[pool]) == KVRELAY_OK;
  r->holds = r->open && draw(m, 2) == 0;
  if (r->holds)
    kvrelay_relay_call_hold(&m->f->relay, r->r.call, true);
  cr_assert(!r->open || open < m->f->cfg.max_pool_streams);
  if (!r->open) {
    m->refused++;
    cr_assert_eq(m->f->status.reason, KVRELAY_REASON_RESOURCE_LIMIT, "%s", m->f->status.text);
  }
}

static int op_pull(model *m, model_reader *r) {
  if (!r->open)
    return KVRELAY_PULL_NONE;
  let_go(r);
  int got = reader_pull(m->f, &r->r);
  if (r->holds && got == KVRELAY_PULL_MESSAGE && r->r.last_kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK)
    hold(m, r);
  settle(m);
  if (got == KVRELAY_PULL_END) {
    /* Who waited for a permit may have found the pool or the hubs full; that is the one end the
     * model does not foresee. */
    if (r->end == LAGGED_OR_LATE && m->f->status.reason == KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT)
      r->end = KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT;
    else if (r->end == LAGGED_OR_LATE)
      r->end = KVRELAY_REASON_SUBSCRIBER_LAGGED;
    if (r->admitted || m->f->status.reason != KVRELAY_REASON_RESOURCE_LIMIT)
      cr_assert_eq(m->f->status.reason, r->end, "ended with \"%s\", expected reason %d",
                   m->f->status.text, r->end);
    m->ends[m->f->status.reason]++;
    reader_close(m->f, &r->r);
    r->open = false;
    settle(m);
    return got;
  }
  cr_assert_eq(r->end, RUNNING, "goes on, but had to end with %d", r->end);
  r->armed = got == KVRELAY_PULL_NONE;
  fx_pool *p = &m->f->pools[r->pool];
  if (got == KVRELAY_PULL_NONE) {
    cr_assert(!r->admitted ||
                  (r->r.chunks == chunks_of(m, r) && r->sequence == kvrelay_pool_sequence(p->pool)),
              "nothing, but data waits");
    if (r->admitted && !ckf_producer_has_pending(&p->state))
      cr_assert(reader_current(&r->r), "the replica differs from the producer");
    return got;
  }
  cr_assert(r->admitted);
  m->deltas += r->r.last_kind == KVRELAY_UPDATE_DELTA;
  m->snapshots += r->r.last_kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK;
  m->heartbeats += r->r.last_kind == KVRELAY_UPDATE_HEARTBEAT;
  r->sequence += r->r.last_kind == KVRELAY_UPDATE_DELTA;
  r->since_ns = m->f->now;
  cr_assert_eq(r->r.sequence, r->sequence);
  return got;
}

static void op_ready(model *m) {
  uint64_t call;
  while (kvrelay_relay_ready_next(&m->f->relay, &call) == 1) {
    model_reader *found = NULL;
    for (int i = 0; i < READERS; i++)
      if (m->readers[i].open && m->readers[i].r.call == call)
        found = &m->readers[i];
    cr_assert_not_null(found, "a closed call was named");
    bool gave_up = found->held != NULL && found->end != RUNNING;
    cr_assert(found->armed || gave_up, "named although it did not say that it waits");
    found->armed = false;
    m->given_up += gave_up;
    if (gave_up)
      cr_assert_arr_eq(found->held, found->copy, found->held_len, "changed before it was told");
    let_go(found);
  }
  for (int i = 0; i < READERS; i++) {
    const model_reader *r = &m->readers[i];
    cr_assert(r->held == NULL || r->end == RUNNING, "a snapshot is over, and nobody was told");
    if (r->open && r->armed)
      cr_assert(
          r->end == RUNNING &&
              (!r->admitted || (r->r.chunks == chunks_of(m, r) &&
                                r->sequence == kvrelay_pool_sequence(m->f->pools[r->pool].pool))),
          "there is something to pull, and nobody was told");
  }
}

static void op_withdraw(model *m) {
  unsigned pool = draw(m, POOLS);
  if (m->f->pools[pool].pool == NULL) {
    cr_assert_eq(fx_try_publish(m->f, pool), KVRELAY_OK);
    return;
  }
  for (int i = 0; i < READERS; i++)
    if (m->readers[i].open && m->readers[i].pool == pool && m->readers[i].end == RUNNING)
      m->readers[i].end = KVRELAY_REASON_PUBLICATION_UNAVAILABLE;
  fx_withdraw(m->f, pool);
}

static void op_events(model *m) {
  unsigned i = draw(m, POOLS);
  fx_pool *p = &m->f->pools[i];
  unsigned n = 1 + draw(m, 1 + (unsigned)expected_blocks[i] / 8);
  if (p->next_key - p->first_key + n > expected_blocks[i])
    fx_drop(p, n + draw(m, n));
  else
    fx_store(p, n);
  if (p->pool == NULL)
    return;
  switch (draw(m, 4)) {
  case 0: /* applied, not yet told */
    break;
  case 1:
    cr_assert_eq(kvrelay_relay_pool_publish(&m->f->relay, p->pool, m->f->now), KVRELAY_OK);
    break;
  default:
    cr_assert_eq(kvrelay_relay_pool_changed(&m->f->relay, p->pool, m->f->now), KVRELAY_OK);
  }
  fx_check(m->f);
}

static void step(model *m) {
  model_reader *r = &m->readers[draw(m, READERS)];
  unsigned what = draw(m, 100);
  if (what < 30)
    op_events(m);
  else if (what < 42)
    op_open(m);
  else if (what < 62)
    op_pull(m, r);
  else if (what < 76)
    while (op_pull(m, r) == KVRELAY_PULL_MESSAGE)
      ;
  else if (what < 80 && r->open) {
    let_go(r);
    reader_close(m->f, &r->r);
    r->open = false;
  } else if (what < 90)
    fx_tick(m->f, draw(m, 3) * MS);
  else if (what < 91)
    fx_tick(m->f, draw(m, 12) * MS);
  else if (what < 92)
    op_withdraw(m);
  else {
    /* everybody's deadline is respected: nothing hangs on an operation that happens to come */
    if (kvrelay_relay_deadline_ns(&m->f->relay) <= m->f->now)
      fx_tick(m->f, 0);
    settle(m);
    op_ready(m);
    return;
  }
  settle(m);
}

static void run(model *m, uint64_t seed) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_hubs = 2;
  cfg.max_pool_streams = 9;
  cfg.max_subscribers_per_pool = 4;
  cfg.encoding_concurrency = 2;
  cfg.queue_frames = 4;
  cfg.publication_threshold = 20;
  cfg.heartbeat_ns = 6 * MS;
  cfg.snapshot_progress_ns = 12 * MS;
  memset(m->readers, 0, sizeof m->readers);
  m->random = seed;
  m->f = fx_open(&cfg);
  for (unsigned i = 0; i < POOLS; i++)
    fx_publish(m->f, i, expected_blocks[i]);
  for (int i = 0; i < 6000; i++)
    step(m);
  for (int i = 0; i < READERS; i++)
    if (m->readers[i].open) {
      let_go(&m->readers[i]);
      reader_close(m->f, &m->readers[i].r);
    }
  kvrelay_relay_stats st = kvrelay_relay_stats_get(&m->f->relay);
  cr_assert(st.pool_streams == 0 && st.hubs == st.idle_hubs);
  fx_close(m->f);
}

Test(relay_model, every_subscriber_gets_one_cut_and_every_delta_after_it, .timeout = 120) {
  model *m = calloc(1, sizeof *m);
  for (uint64_t seed = 1; seed <= 20; seed++)
    run(m, seed);
  /* the runs went where they were meant to go */
  cr_assert_gt(m->deltas, 1000);
  cr_assert_gt(m->snapshots, 1000);
  cr_assert_gt(m->heartbeats, 20);
  cr_assert_gt(m->refused, 100);
  cr_assert_gt(m->given_up, 20);
  cr_assert_gt(m->ends[KVRELAY_REASON_SUBSCRIBER_LAGGED], 100);
  cr_assert_gt(m->ends[KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT], 20);
  cr_assert_gt(m->ends[KVRELAY_REASON_PUBLICATION_UNAVAILABLE], 20);
  cr_assert_gt(m->ends[KVRELAY_REASON_RESOURCE_LIMIT], 5);
  free(m);
}
