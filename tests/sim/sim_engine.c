/* SPDX-License-Identifier: Apache-2.0 */
/* Engines, the way of their batches, and the sources that follow them. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STORED = 1, REMOVED, CLEARED, OTHER_TIER };

enum { SILENT_AFTER_S = 20 };

static uint64_t external(const sim_pool *p, uint32_t number, uint32_t rank) {
  return p->number_keys[number] ^ (rank + 1);
}

/* Sources number the ranks of a worker from anywhere. */
static uint32_t rank_number(const sim_engine *e, uint32_t rank) {
  return (uint32_t)e->worker + 7 + rank;
}

static bool holds(const sim_engine *e, uint32_t rank, uint32_t number) {
  return e->copies[rank][number] != 0;
}

/* ---- queues ---- */

static void queue_push(sim_queue *q, uint64_t due, size_t at) {
  if (q->first == q->end)
    q->first = q->end = 0;
  q->items = sim_grow(q->items, q->end, &q->cap, sizeof *q->items);
  if (q->first != q->end && q->items[q->end - 1].due > due)
    due = q->items[q->end - 1].due; /* nothing overtakes by itself */
  q->items[q->end++] = (sim_flight){due, at};
}

static void queue_clear(sim_queue *q) { q->first = q->end = 0; }

/* ---- the engine's side ---- */

static void process_begin(sim *s, sim_engine *e) {
  memset(e->copies, 0, sizeof e->copies);
  e->process_at = e->batches_len;
  e->first_sequence = sim_once(s, 10) ? UINT64_C(1) << (40 + sim_below(s, 20)) : 0;
}

void sim_engine_open(sim *s, sim_engine *e, uint64_t worker) {
  memset(e, 0, sizeof *e);
  e->worker = worker;
  e->replay = !sim_once(s, 3);
  e->deduplicated = sim_once(s, 3);
  e->keeps_lost = sim_once(s, 4);
  e->buffer = sim_once(s, 3) ? 1 + sim_below(s, 20) : 2000;
  e->listens_on = sim_once(s, 6);
  e->connected = true;
  process_begin(s, e);
}

void sim_engine_close(sim_engine *e) {
  free(e->batches);
  free(e->live.items);
  free(e->replies.items);
  memset(e, 0, sizeof *e);
}

/* A stretch of a prompt behind what is held of it already; never a block twice unless the engine
 * keeps copies. */
static bool event_store(sim *s, const sim_pool *p, sim_engine *e, uint32_t rank, sim_event *event) {
  const uint32_t t = sim_below(s, SIM_PROMPTS), most = 1 + sim_below(s, SIM_DEPTH);
  uint32_t from = 0, end;
  while (from < most && holds(e, rank, p->number[t][from]))
    from++;
  for (end = from; end < most; end++) {
    uint8_t *const copies = &e->copies[rank][p->number[t][end]];
    if (*copies == UINT8_MAX || (e->deduplicated && *copies != 0))
      break;
    ++*copies;
  }
  *event = (sim_event){STORED, (uint8_t)t, (uint8_t)from, (uint8_t)end, 0};
  return from != end;
}

/* Any blocks, also from the middle. */
static bool event_remove(sim *s, const sim_pool *p, sim_engine *e, uint32_t rank,
                         sim_event *event) {
  const uint32_t t = sim_below(s, SIM_PROMPTS);
  *event = (sim_event){REMOVED, 0, 0, 0, 0};
  for (uint32_t i = sim_below(s, SIM_DEPTH); i < SIM_DEPTH; i++) {
    const uint32_t number = p->number[t][i];
    if (!holds(e, rank, number) || sim_once(s, 4))
      continue;
    e->copies[rank][number]--;
    event->blocks |= UINT64_C(1) << number;
  }
  return event->blocks != 0;
}

static bool event_any(sim *s, const sim_pool *p, sim_engine *e, uint32_t rank, sim_event *event) {
  if (sim_once(s, 60)) {
    *event = (sim_event){CLEARED, 0, 0, 0, 0};
    memset(e->copies[rank], 0, sizeof e->copies[rank]);
    return true;
  }
  if (sim_once(s, 20)) {
    *event = (sim_event){OTHER_TIER, 0, 0, SIM_DEPTH, 0};
    return true;
  }
  return sim_below(s, 5) < 3 ? event_store(s, p, e, rank, event)
                             : event_remove(s, p, e, rank, event);
}

/* The live message on its way, with what can happen to it. */
static void broadcast(sim *s, sim_engine *e, size_t at) {
  const uint64_t due = s->now + (s->calm ? 1 : 1 + sim_below(s, 50)) * SIM_MS;
  if (!e->source_mem || !e->connected)
    return;
  if (!s->calm && sim_once(s, 25)) {
    sim_count(s, SIM_BATCH_LOST);
    return;
  }
  queue_push(&e->live, due, at);
  if (s->calm || !sim_once(s, 60))
    return;
  e->excused = true; /* taken for another process, whose answer may stay away */
  sim_flight *const last = &e->live.items[e->live.end - 1];
  if (sim_once(s, 2)) {
    sim_count(s, SIM_BATCH_TWICE);
    queue_push(&e->live, due, at);
  } else if (e->live.end - e->live.first > 1) {
    sim_count(s, SIM_BATCH_SWAPPED);
    last->at = last[-1].at;
    last[-1].at = at;
  }
}

static void publish(sim *s, sim_pool *p, sim_engine *e, bool empty) {
  e->batches = sim_grow(e->batches, e->batches_len, &e->batches_cap, sizeof *e->batches);
  sim_batch *const b = &e->batches[e->batches_len];
  memset(b, 0, sizeof *b);
  b->sequence = e->first_sequence + (e->batches_len - e->process_at);
  b->payload.at = e->batches_len;
  b->payload.rank = sim_below(s, SIM_RANKS);
  for (uint32_t i = empty ? 0 : 1 + sim_below(s, SIM_EVENTS); i > 0; i--)
    b->payload.events_len +=
        event_any(s, p, e, b->payload.rank, &b->payload.events[b->payload.events_len]);
  for (uint32_t k = 0; k < SIM_RANKS; k++)
    for (uint32_t i = 0; i < SIM_BLOCKS; i++)
      b->holds[k] |= (uint64_t)holds(e, k, i) << i;
  b->len = sizeof b->payload - (!s->calm && sim_once(s, 200) ? 1 + sim_below(s, 40) : 0);
  b->large = !s->calm && sim_once(s, 400);
  broadcast(s, e, e->batches_len++);
}

/* What it sends when it is asked for batches again, with what can happen on the way. */
static void answer(sim *s, sim_engine *e, uint64_t from) {
  const size_t oldest =
      e->batches_len - e->process_at > e->buffer ? e->batches_len - e->buffer : e->process_at;
  const uint64_t gap = s->calm || !sim_once(s, 6) ? 0 : sim_below(s, 4000) * SIM_MS;
  const uint32_t hole = s->calm || !sim_once(s, 5) ? UINT32_MAX : sim_below(s, 20);
  const uint32_t holes = 1 + sim_below(s, 5);
  uint32_t sent = 0;
  uint64_t due = s->now + (1 + sim_below(s, 100)) * SIM_MS;
  if (oldest != e->process_at || hole == 0)
    e->excused = true;
  sim_count(s, SIM_REPLAY);
  if (gap)
    sim_count(s, SIM_REPLAY_SLOW);
  if (oldest != e->process_at && from < e->batches[oldest].sequence)
    sim_count(s, SIM_REPLAY_PAST);
  for (size_t at = oldest; at < e->batches_len; at++) {
    if (e->batches[at].sequence < from)
      continue;
    due += gap;
    if (sent == hole)
      sim_count(s, SIM_REPLAY_HOLE);
    if (sent < hole || sent >= hole + holes)
      queue_push(&e->replies, due, at);
    if (++sent > hole && holes == 5) {
      sim_count(s, SIM_REPLAY_ENDLESS);
      return; /* and no marker */
    }
  }
  queue_push(&e->replies, due, SIZE_MAX);
}

/* ---- the source's side ---- */

void sim_engine_follow(sim *s, sim_pool *p, sim_engine *e) {
  kvrelay_source_config cfg = kvrelay_source_config_default();
  cfg.worker_id = e->worker;
  cfg.rank_start = rank_number(e, 0);
  cfg.ranks = SIM_RANKS;
  cfg.block_size = SIM_BLOCK;
  cfg.hash_format = HASHFMT_FORMAT_STANDARD;
  cfg.on_loss = e->keeps_lost ? KVRELAY_ON_LOSS_KEEP : KVRELAY_ON_LOSS_CLEAR;
  cfg.deduplicated = e->deduplicated;
  cfg.partial_memory = 16;
  cfg.max_event_blocks = SIM_BLOCKS;
  cfg.max_namespaces = 4;
  cfg.replay = e->replay;
  cfg.hold_batches = sim_once(s, 4) ? 1 + sim_below(s, 8) : 600;
  cfg.hold_bytes = cfg.hold_batches * (uint32_t)sizeof(sim_payload);
  cfg.recovery_interval_ns = (1 + sim_below(s, 20)) * SIM_SECOND;
  cfg.silent_after_ns = SILENT_AFTER_S * SIM_SECOND;
  const size_t len = kvrelay_source_mem_size(&cfg);
  e->source_mem = sim_alloc(s, len);
  if (kvrelay_source_init(&e->source, &cfg, &p->state, e->source_mem, len - 1, s->now) !=
          KVRELAY_ERR_NOSPACE ||
      kvrelay_source_init(&e->source, &cfg, &p->state, e->source_mem, len, s->now) != KVRELAY_OK)
    sim_fail(s, "a source cannot be made, or has too little memory");
  sim_count(s, SIM_SHORT_MEMORY);
  memset(e->seen, 0, sizeof e->seen);
  e->restarts = e->again = 0;
  e->applied = SIZE_MAX;
  e->excused = !e->replay || e->listens_on || cfg.hold_batches < 600;
  e->heard = s->now;
  kvrelay_source_load(&e->source, e->loaded, s->now);
  if (e->connected && kvrelay_source_connection(&e->source, true, s->now) != KVRELAY_OK)
    sim_fail(s, "a source cannot begin");
}

void sim_engine_leave(sim *s, sim_engine *e) {
  sim_free(s, e->source_mem);
  e->source_mem = NULL;
  queue_clear(&e->live);
  queue_clear(&e->replies);
}

static kvrelay_text text(const char *z) { return (kvrelay_text){(const uint8_t *)z, strlen(z)}; }

/* The decoder: from the engine's words to the core's. */
static void feed_event(sim *s, sim_pool *p, sim_engine *e, uint32_t rank, const sim_event *event) {
  uint64_t externals[SIM_BLOCKS];
  kvrelay_engine_event ev;
  memset(&ev, 0, sizeof ev);
  ev.externals = externals;
  if (event->kind == REMOVED) {
    ev.type = KVRELAY_ENGINE_REMOVED;
    for (uint32_t i = 0; i < SIM_BLOCKS; i++)
      if (event->blocks >> i & 1)
        externals[ev.externals_len++] = external(p, i, rank);
  } else if (event->kind == CLEARED) {
    ev.type = KVRELAY_ENGINE_CLEARED;
  } else {
    ev.type = KVRELAY_ENGINE_STORED;
    for (uint32_t i = event->from; i < event->end; i++)
      externals[ev.externals_len++] = external(p, p->number[event->prompt][i], rank);
    ev.tokens = p->tokens[event->prompt] + event->from * SIM_BLOCK;
    ev.tokens_len = ev.externals_len * SIM_BLOCK;
    ev.block_size = SIM_BLOCK;
    ev.has_parent = event->from > 0;
    if (ev.has_parent)
      ev.parent = external(p, p->number[event->prompt][event->from - 1], rank);
    ev.has_medium = event->kind == OTHER_TIER;
    ev.medium = text(ev.has_medium ? "CPU" : "");
  }
  if (kvrelay_source_event(&e->source, true, rank_number(e, rank), &ev, s->now) != KVRELAY_OK)
    sim_fail(s, "a source does not take an event");
}

/* A batch whose turn it is. Within one process each comes once and in order. */
static void feed_batch(sim *s, sim_pool *p, sim_engine *e, const kvrelay_source_batch *b) {
  const kvrelay_source_stats *const stats = kvrelay_source_stats_get(&e->source);
  const uint64_t restarts = stats->counts[KVRELAY_COUNT_RESTART];
  const uint64_t again = restarts + stats->counts[KVRELAY_COUNT_RECOVERY];
  sim_payload payload;
  size_t at = e->batches_len;
  memset(&payload, 0, sizeof payload);
  if (b->payload) {
    memcpy(&payload, b->payload, b->len);
    at = payload.at;
  } else { /* only its number is left of it */
    while (at-- > 0 && !(e->batches[at].large && e->batches[at].sequence == b->sequence)) {
    }
  }
  if (at >= e->batches_len || e->batches[at].sequence != b->sequence) {
    sim_fail(s, "a source makes up a batch");
    return;
  }
  if (again == e->again && e->applied != SIZE_MAX && at <= e->applied)
    sim_fail(s, "batch %zu of worker %llu is taken after %zu", at, (unsigned long long)e->worker,
             e->applied);
  if (restarts != e->restarts)
    memset(e->seen, 0, sizeof e->seen);
  e->restarts = restarts;
  e->again = again;
  e->applied = at;
  for (uint32_t k = 0; k < SIM_RANKS; k++)
    e->seen[k] |= e->batches[at].holds[k];
  if (!b->payload || b->len != sizeof payload) {
    e->excused = true;
    sim_count(s, b->payload ? SIM_BATCH_UNREADABLE : SIM_BATCH_LARGE);
    if (kvrelay_source_lost(&e->source,
                            b->payload ? KVRELAY_COUNT_PAYLOAD_MALFORMED
                                       : KVRELAY_COUNT_PAYLOAD_TOO_LARGE,
                            s->now) != KVRELAY_OK)
      sim_fail(s, "a source does not lose a batch");
    return;
  }
  for (uint32_t i = 0; i < payload.events_len; i++)
    feed_event(s, p, e, payload.rank, &payload.events[i]);
}

/* What the source has said of a rank, against what the engine held then. */
static uint64_t check_rank(sim *s, sim_pool *p, const sim_engine *e, uint32_t rank) {
  const ckf_member member = {e->worker, rank_number(e, rank)};
  const kvrelay_source_stats *const stats = kvrelay_source_stats_get(&e->source);
  const uint64_t held = stats->has_sequence ? e->batches[e->applied].holds[rank] : 0;
  const bool whole = kvrelay_source_complete(&e->source, member.dp_rank);
  uint64_t known = 0, canonical;
  for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
    if (ckf_producer_find(&p->state, &member, external(p, i, rank), &canonical, NULL) != 1)
      continue;
    known |= UINT64_C(1) << i;
    if (canonical != p->number_keys[i])
      sim_fail(s, "a block has another hash than its tokens");
  }
  const uint64_t gone = known & ~held, may_be = e->keeps_lost && !whole ? e->seen[rank] : 0;
  if (whole && known != held)
    sim_fail(s, "worker %llu rank %u is whole, %llx is missing, %llx is too much",
             (unsigned long long)e->worker, rank, (unsigned long long)(held & ~known),
             (unsigned long long)gone);
  if (gone & ~may_be)
    sim_fail(s, "worker %llu rank %u: %llx is gone", (unsigned long long)e->worker, rank,
             (unsigned long long)(gone & ~may_be));
  sim_count(s, whole ? SIM_WHOLE : SIM_PARTIAL);
  return known;
}

static void check_silence(sim *s, const sim_engine *e) {
  const bool quiet = e->loaded && e->connected && s->now - e->heard >= SILENT_AFTER_S * SIM_SECOND;
  const int state = kvrelay_source_state(&e->source);
  const int right = quiet          ? KVRELAY_SOURCE_SILENT
                    : e->connected ? KVRELAY_SOURCE_LIVE
                                   : KVRELAY_SOURCE_CONNECTING;
  if (quiet)
    sim_count(s, SIM_ENGINE_SILENT);
  if (state != right && state != KVRELAY_SOURCE_REPLAY)
    sim_fail(s, "worker %llu: state %d, not %d", (unsigned long long)e->worker, state, right);
}

/* Takes what is due, compares, and asks on. */
static void take(sim *s, sim_pool *p, sim_engine *e) {
  kvrelay_source_batch b;
  uint64_t from, known = 0;
  int more;
  while ((more = kvrelay_source_next(&e->source, &b, s->now)) == 1 && !s->failure[0])
    feed_batch(s, p, e, &b);
  if (more < 0)
    sim_fail(s, "a source failed: %s", kvrelay_strerror(more));
  const kvrelay_source_stats *const stats = kvrelay_source_stats_get(&e->source);
  if (stats->has_sequence &&
      (e->applied == SIZE_MAX || e->batches[e->applied].sequence != stats->last_sequence))
    sim_fail(s, "a source says another sequence than it gave");
  for (uint32_t k = 0; k < SIM_RANKS && !s->failure[0]; k++)
    known |= check_rank(s, p, e, k);
  e->known = known;
  if (kvrelay_source_request(&e->source, &from) != 1)
    return;
  if (!e->listens_on || s->calm)
    queue_clear(&e->replies);
  const bool dumb = !e->connected || (!s->calm && sim_once(s, 8));
  e->excused |= dumb;
  if (dumb)
    sim_count(s, SIM_REPLAY_NONE);
  else
    answer(s, e, from);
}

/* Nobody can tell the batch of a new process that happens to have the number which is due. */
static bool deceives(const sim_engine *e, size_t at) {
  const kvrelay_source_stats *const stats = kvrelay_source_stats_get(&e->source);
  return !e->replay && stats->has_sequence && e->applied < e->process_at && at >= e->process_at &&
         e->batches[at].sequence == stats->last_sequence + 1;
}

static int deliver(sim *s, sim_engine *e, sim_queue *q, bool reply) {
  const sim_flight f = q->items[q->first++];
  if (f.at == SIZE_MAX)
    return kvrelay_source_reply(&e->source, UINT64_MAX, NULL, 0, s->now);
  const sim_batch *const b = &e->batches[f.at];
  const uint8_t *const bytes = b->large ? NULL : (const uint8_t *)&b->payload;
  if (reply)
    return kvrelay_source_reply(&e->source, b->sequence, bytes, b->len, s->now);
  if (deceives(e, f.at))
    return KVRELAY_OK;
  e->heard = s->now;
  return kvrelay_source_live(&e->source, b->sequence, bytes, b->len, s->now);
}

static void connect(sim *s, sim_engine *e, bool connected) {
  e->connected = connected;
  e->excused |= e->replies.first != e->replies.end; /* may count as no answer */
  queue_clear(&e->live);
  queue_clear(&e->replies);
  e->heard = s->now;
  if (e->source_mem && kvrelay_source_connection(&e->source, connected, s->now) != KVRELAY_OK)
    sim_fail(s, "a source does not hear of its connection");
}

bool sim_engine_turn(sim *s, sim_pool *p, sim_engine *e) {
  int err = KVRELAY_OK;
  if (!e->connected && s->now >= e->back_at) {
    connect(s, e, true);
  } else if (e->live.first != e->live.end && e->live.items[e->live.first].due <= s->now) {
    err = deliver(s, e, &e->live, false);
  } else if (e->replies.first != e->replies.end &&
             e->replies.items[e->replies.first].due <= s->now) {
    err = deliver(s, e, &e->replies, true);
  } else if (e->source_mem && kvrelay_source_deadline_ns(&e->source) <= s->now) {
    err = kvrelay_source_tick(&e->source, s->now);
    take(s, p, e);
    if (kvrelay_source_deadline_ns(&e->source) <= s->now)
      sim_fail(s, "worker %llu: a tick without end", (unsigned long long)e->worker);
  } else {
    return false;
  }
  if (err != KVRELAY_OK)
    sim_fail(s, "a source does not take a message: %s", kvrelay_strerror(err));
  if (!e->source_mem)
    return true;
  take(s, p, e);
  if (kvrelay_source_deadline_ns(&e->source) > s->now) /* else it is still to be told the time */
    check_silence(s, e);
  return true;
}

void sim_engine_step(sim *s, sim_pool *p, sim_engine *e) {
  if (s->calm) {
    e->back_at = s->now;
    for (size_t i = e->replies.first; i < e->replies.end; i++)
      e->replies.items[i].due = s->now;
    return;
  }
  switch (sim_below(s, 150)) {
  case 0: /* another process */
    sim_count(s, SIM_ENGINE_PROCESS);
    connect(s, e, false);
    process_begin(s, e);
    e->back_at = s->now + (1 + sim_below(s, 5000)) * SIM_MS;
    break;
  case 1:
  case 2:
    sim_count(s, SIM_ENGINE_LEFT);
    connect(s, e, false);
    e->back_at = s->now + (1 + sim_below(s, 20000)) * SIM_MS;
    break;
  case 3: /* gone for so long that its blocks are */
    sim_count(s, SIM_ENGINE_CLEARED);
    if (e->source_mem && kvrelay_source_clear(&e->source, s->now) != KVRELAY_OK)
      sim_fail(s, "a source cannot be cleared");
    e->applied = SIZE_MAX;
    break;
  default:
    publish(s, p, e, false);
  }
  const bool loaded = e->loaded;
  e->loaded = false;
  for (uint32_t k = 0; k < SIM_RANKS; k++)
    for (uint32_t i = 0; i < SIM_BLOCKS; i++)
      e->loaded |= holds(e, k, i);
  if (e->loaded && !loaded)
    e->heard = s->now;
  if (!e->source_mem)
    return;
  kvrelay_source_load(&e->source, e->loaded, s->now);
  take(s, p, e);
}

bool sim_engine_settled(const sim_engine *e) {
  bool whole = true;
  for (uint32_t k = 0; k < SIM_RANKS && e->source_mem; k++)
    whole &= kvrelay_source_complete(&e->source, rank_number(e, k));
  return !e->source_mem ||
         (e->connected && e->batches_len > e->process_at && e->applied == e->batches_len - 1 &&
          kvrelay_source_state(&e->source) != KVRELAY_SOURCE_REPLAY &&
          (whole || e->excused || e->first_sequence != 0));
}

void sim_engine_nudge(sim *s, sim_pool *p, sim_engine *e) { publish(s, p, e, true); }
