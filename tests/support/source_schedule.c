/* SPDX-License-Identifier: Apache-2.0 */
#include "source_schedule.h"

#include <stdlib.h>
#include <string.h>

#include "ckf.h"

enum { NUMBERS = 200, HOLD = 6, REQUESTS_MAX = 64, PAYLOAD_MAX = 24 };
#define TIMEOUT_NS UINT64_C(5000)
#define INTERVAL_NS UINT64_C(30000)

/* ---- the engine ---- */

/* What batch `n` of process `p` says. */
enum { SAYS_STORE, SAYS_REMOVE, SAYS_CLEAR, SAYS_ORPHAN, SAYS_NOTHING_READABLE };

static uint32_t mix(uint32_t p, uint32_t n) {
  uint32_t h = (p * 2654435761u) ^ (n * 2246822519u);
  h = (h ^ h >> 15) * 2654435761u;
  return h ^ h >> 13;
}

static int says(uint32_t p, uint32_t n) {
  static const int kinds[32] = {SAYS_CLEAR,  SAYS_ORPHAN, SAYS_NOTHING_READABLE, SAYS_REMOVE,
                                SAYS_REMOVE, SAYS_REMOVE, SAYS_REMOVE,           SAYS_REMOVE};
  return n == 0 ? SAYS_STORE : kinds[mix(p, n) % 32];
}

static uint64_t external_of(uint32_t p, uint32_t n) { return (uint64_t)p << 32 | (n + 1); }
/* The block that a removal names. */
static uint32_t removed_by(uint32_t p, uint32_t n) { return n - 1 - mix(n, p) % (n < 3 ? n : 3); }

static size_t payload_of(uint32_t p, uint32_t n, uint8_t out[PAYLOAD_MAX]) {
  size_t len = 5 + mix(n, p) % (PAYLOAD_MAX - 5);
  memset(out, 0, PAYLOAD_MAX);
  out[0] = (uint8_t)p;
  out[1] = (uint8_t)(p >> 8);
  out[2] = (uint8_t)n;
  return len;
}

/* ---- the model ---- */

typedef struct model {
  bool known, complete, replaying, asking, answered, advanced, hole, overlap, wanted, has_live;
  bool collecting, asked_twice, connected, has[NUMBERS]; /* has: blocks of process `holds` */
  uint32_t holds_process[NUMBERS];
  uint64_t next, newest, resume, repeated_at, deadline_ns, recovery_from_ns;
  uint32_t last_process, requests;
  int confirm;
  bool keep; /* on_loss */
  /* Batches that wait, by number: 0 = none, else process + 1, in arrival order of nothing. */
  uint32_t held[NUMBERS];
  bool held_reply[NUMBERS];
  uint64_t counts[KVRELAY_COUNT_LEN], batches;
  bool quiet; /* what happens now was counted before */
} model;

static void count(model *m, int what, uint64_t n) { m->counts[what] += m->quiet ? 0 : n; }

static uint32_t held_count(const model *m) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < NUMBERS; i++)
    n += m->held[i] != 0;
  return n;
}

static void drop_blocks(model *m) { memset(m->has, 0, sizeof m->has); }
static void drop_held(model *m) { memset(m->held, 0, sizeof m->held); }

static void lose(model *m, uint64_t n) {
  count(m, KVRELAY_COUNT_LOSS, n);
  m->complete = false;
  if (!m->keep)
    drop_blocks(m);
}

static void says_to_model(model *m, uint32_t p, uint32_t n) {
  switch (says(p, n)) {
  case SAYS_STORE:
    m->has[n] = true;
    m->holds_process[n] = p;
    break;
  case SAYS_REMOVE: {
    uint32_t gone = removed_by(p, n);
    if (m->has[gone] && m->holds_process[gone] == p)
      m->has[gone] = false;
    else
      count(m, KVRELAY_COUNT_UNKNOWN_REMOVAL, 1);
    break;
  }
  case SAYS_CLEAR:
    drop_blocks(m);
    m->complete = true;
    break;
  case SAYS_ORPHAN:
    count(m, KVRELAY_COUNT_ORPHAN, 1);
    m->wanted = m->wanted || (m->complete && !m->quiet);
    m->complete = false;
    break;
  default:
    count(m, KVRELAY_COUNT_PAYLOAD_MALFORMED, 1);
    lose(m, 1);
  }
}

static void apply_one(model *m, uint32_t p, uint64_t n, bool reply) {
  if (!m->known)
    m->complete = n == 0;
  m->known = true;
  m->next = n + 1;
  m->last_process = p;
  m->batches++;
  count(m, KVRELAY_COUNT_REPLAY, reply);
  says_to_model(m, p, (uint32_t)n);
}

static void ask(model *m, uint64_t now_ns) {
  m->replaying = m->asking = true;
  m->answered = m->advanced = m->hole = false;
  m->requests++;
  m->deadline_ns = now_ns + TIMEOUT_NS;
}

static void idle(model *m) {
  m->replaying = m->asking = m->asked_twice = false;
  m->requests = 0;
  m->confirm = 0;
}

static void restart(model *m) {
  count(m, KVRELAY_COUNT_RESTART, 1);
  drop_blocks(m);
  m->complete = m->known = m->has_live = m->overlap = m->wanted = m->collecting = false;
  m->next = 0;
  idle(m);
}

/* All that waits goes out, until something has to be asked. */
static void go_on(model *m, uint64_t now_ns) {
  if (m->replaying)
    return;
  for (uint32_t n = 0; n < NUMBERS; n++) {
    if (m->held[n] == 0)
      continue;
    if (n > m->next) {
      bool repeat = m->requests != 0;
      if (!(repeat && m->asked_twice && m->repeated_at == m->next) && m->requests < REQUESTS_MAX &&
          held_count(m) <= HOLD) {
        m->asked_twice = repeat;
        m->repeated_at = m->next;
        ask(m, now_ns);
        return;
      }
      if (m->known)
        lose(m, n - m->next);
      m->next = n;
    }
    uint32_t p = m->held[n] - 1;
    m->held[n] = 0;
    if (n == m->next)
      apply_one(m, p, n, m->held_reply[n]);
  }
  idle(m);
  if (m->wanted && now_ns >= m->recovery_from_ns) {
    m->wanted = false;
    if (m->complete)
      return;
    count(m, KVRELAY_COUNT_RECOVERY, 1);
    m->collecting = true;
    m->recovery_from_ns = now_ns + INTERVAL_NS;
    m->resume = m->next;
    m->next = 0;
    ask(m, now_ns);
  }
}

static void recovery_fails(model *m) {
  m->next = m->resume;
  m->replaying = m->asking = m->collecting = false;
}

/* The collected batches start the rank anew, when they begin at 0 or have a clear. */
static void recovery_ends(model *m) {
  uint32_t first = 0;
  bool good;
  while (first < NUMBERS && m->held[first] == 0)
    first++;
  good = m->next >= m->resume && first == 0;
  for (uint32_t n = first; n < m->resume && m->next >= m->resume; n++)
    good = good || (m->held[n] != 0 && says(m->held[n] - 1, n) == SAYS_CLEAR);
  uint64_t resume = m->resume;
  recovery_fails(m);
  if (!good)
    return;
  drop_blocks(m);
  m->complete = first == 0 || m->complete;
  m->quiet = true;
  for (uint32_t n = first; n < resume; n++) {
    says_to_model(m, m->held[n] - 1, n);
    m->last_process = m->held[n] - 1;
    m->held[n] = 0;
  }
  m->quiet = false;
}

static void answer_ends(model *m, bool marker, uint64_t now_ns) {
  if (m->overlap) {
    restart(m);
    drop_held(m);
    ask(m, now_ns);
    return;
  }
  if (((m->advanced && (m->hole || !marker)) || m->confirm == 1) && m->requests < REQUESTS_MAX) {
    m->confirm = m->confirm == 1 ? 2 : m->confirm;
    ask(m, now_ns);
    return;
  }
  m->replaying = m->asking = false;
  if (m->collecting)
    recovery_ends(m);
  go_on(m, now_ns);
}

static void hold(model *m, uint32_t p, uint64_t n, bool reply) {
  if (m->held[n] != 0)
    return;
  m->held[n] = p + 1;
  m->held_reply[n] = reply;
}

static void model_live(model *m, uint32_t p, uint64_t n, uint64_t now_ns) {
  m->connected = m->connected || false;
  if (m->has_live && n <= m->newest && (!m->replaying || n < m->newest)) {
    restart(m);
    drop_held(m);
  }
  if (m->replaying && m->has_live && n == m->newest)
    return;
  uint64_t due = m->has_live && m->newest + 1 > m->next ? m->newest + 1 : m->next;
  if ((m->has_live || (m->known && !m->replaying)) && n > due)
    count(m, KVRELAY_COUNT_GAP, n - due);
  m->has_live = true;
  m->newest = n;
  if (!m->replaying) {
    if (n >= m->next) {
      hold(m, p, n, false);
      go_on(m, now_ns);
    }
    return;
  }
  if (n < (m->collecting ? m->resume : m->next))
    return;
  if (m->held[n] != 0 || held_count(m) < HOLD) {
    hold(m, p, n, false);
    return;
  }
  /* No room. */
  if (m->collecting) {
    recovery_fails(m);
  } else {
    m->replaying = m->asking = false;
    if (m->known)
      lose(m, n - m->next);
    drop_held(m);
    m->known = m->overlap = false;
    m->next = n;
  }
  hold(m, p, n, false); /* one more than fits, for a moment */
  go_on(m, now_ns);
}

static void model_reply(model *m, uint32_t p, uint64_t n, uint64_t now_ns) {
  if (!m->replaying || m->asking)
    return;
  bool first = !m->answered;
  m->deadline_ns = now_ns + TIMEOUT_NS;
  m->answered = true;
  if (m->overlap) {
    if (n == m->next - 1 && p == m->last_process)
      m->overlap = false;
    else
      answer_ends(m, false, now_ns);
    return;
  }
  if (m->hole || n < m->next)
    return;
  if (n > m->next) {
    if (!first || (m->requests > 1 && m->confirm != 2)) {
      m->hole = true;
      m->confirm = first ? 1 : m->confirm;
      if (held_count(m) < HOLD)
        hold(m, p, n, true);
      return;
    }
    if (m->collecting && m->next != 0) {
      recovery_fails(m);
      go_on(m, now_ns);
      return;
    }
    if (m->known && !m->collecting)
      lose(m, n - m->next);
    m->next = n;
  }
  m->advanced = true;
  m->confirm = 0;
  if (!m->collecting) {
    apply_one(m, p, n, true);
  } else if (m->held[n] != 0 || held_count(m) < HOLD) {
    hold(m, p, n, true);
    m->next++;
  } else {
    recovery_fails(m);
    go_on(m, now_ns);
  }
}

static void model_connection(model *m, bool up, uint64_t now_ns) {
  m->connected = up;
  if (up && !m->known) {
    memset(m->held, 0, sizeof m->held);
    m->has_live = false;
  }
  if (!up || (m->replaying && !m->answered && !m->known))
    return;
  if (m->collecting)
    recovery_fails(m);
  idle(m);
  m->overlap = m->known;
  ask(m, now_ns);
}

/* ---- both ---- */

typedef struct life {
  const uint8_t *at;
  size_t left;
  model m;
  ckf_producer producer;
  kvrelay_source source;
  void *producer_mem, *source_mem;
  uint64_t now_ns;
  /* The engine. */
  uint32_t process, published, kept_from;
  uint64_t from; /* of the request it got last */
  bool asked;
  uint32_t answered_to; /* number of the next reply */
  /* What came out. */
  uint64_t applied, lives; /* the newest one, in which of the lives */
  bool any_applied;
  const char *wrong;
} life;

static uint8_t next_byte(life *l) {
  if (l->left == 0)
    return 0;
  l->left--;
  return *l->at++;
}

static void need(life *l, bool good, const char *what) {
  if (!good && l->wrong == NULL)
    l->wrong = what;
}

static void says_to_source(life *l, uint32_t p, uint32_t n) {
  kvrelay_engine_event ev;
  uint64_t external = external_of(p, n), gone = 0;
  uint32_t tokens[4] = {p, n, n, n};
  memset(&ev, 0, sizeof ev);
  ev.externals = &external;
  ev.externals_len = 1;
  ev.tokens = tokens;
  ev.tokens_len = 4;
  ev.block_size = 4;
  ev.type = KVRELAY_ENGINE_STORED;
  switch (says(p, n)) {
  case SAYS_STORE:
    break;
  case SAYS_REMOVE:
    gone = external_of(p, removed_by(p, n));
    ev.type = KVRELAY_ENGINE_REMOVED;
    ev.externals = &gone;
    break;
  case SAYS_CLEAR:
    ev.type = KVRELAY_ENGINE_CLEARED;
    break;
  case SAYS_ORPHAN:
    ev.has_parent = true;
    ev.parent = UINT64_MAX;
    break;
  default:
    need(l,
         kvrelay_source_lost(&l->source, KVRELAY_COUNT_PAYLOAD_MALFORMED, l->now_ns) == KVRELAY_OK,
         "lost");
    return;
  }
  need(l, kvrelay_source_event(&l->source, false, 0, &ev, l->now_ns) == KVRELAY_OK, "event");
}

/* The payload alone says what is applied, so that one that was mixed up shows. */
static void drain(life *l) {
  kvrelay_source_batch b;
  int more = 0;
  for (int i = 0; i < 2 * NUMBERS && l->wrong == NULL; i++) {
    if ((more = kvrelay_source_next(&l->source, &b, l->now_ns)) != 1)
      break;
    uint32_t p = b.payload[0] | (uint32_t)b.payload[1] << 8, n = b.payload[2];
    uint8_t bytes[PAYLOAD_MAX];
    need(l, n == b.sequence, "the payload is that of its sequence");
    need(l, payload_of(p, n, bytes) == b.len && memcmp(bytes, b.payload, b.len) == 0, "payload");
    /* Another process, and a recovery, begin anew. */
    const uint64_t *c = kvrelay_source_stats_get(&l->source)->counts;
    uint64_t lives = c[KVRELAY_COUNT_RESTART] + c[KVRELAY_COUNT_RECOVERY];
    need(l, !l->any_applied || lives != l->lives || n > l->applied || l->m.collecting,
         "each number once, and in order");
    l->any_applied = true;
    l->lives = lives;
    l->applied = n;
    says_to_source(l, p, n);
  }
  need(l, more == 0, "the drain ends");
}

static void to_both(life *l, bool live, uint32_t p, uint32_t n) {
  uint8_t *bytes = malloc(PAYLOAD_MAX); /* gone after the drain */
  size_t len = payload_of(p, n, bytes);
  int err = live ? kvrelay_source_live(&l->source, n, bytes, len, l->now_ns)
                 : kvrelay_source_reply(&l->source, n, bytes, len, l->now_ns);
  need(l, err == KVRELAY_OK, live ? "live" : "reply");
  drain(l);
  free(bytes);
  if (live)
    model_live(&l->m, p, n, l->now_ns);
  else
    model_reply(&l->m, p, n, l->now_ns);
}

static void marker(life *l) {
  need(l, kvrelay_source_reply(&l->source, UINT64_MAX, NULL, 0, l->now_ns) == KVRELAY_OK, "marker");
  drain(l);
  if (l->m.replaying && !l->m.asking)
    answer_ends(&l->m, true, l->now_ns);
}

static void tick(life *l) {
  need(l, kvrelay_source_tick(&l->source, l->now_ns) == KVRELAY_OK, "tick");
  drain(l);
  if (l->m.replaying && l->now_ns >= l->m.deadline_ns)
    answer_ends(&l->m, false, l->now_ns);
  else
    go_on(&l->m, l->now_ns);
}

static void connection(life *l, bool up) {
  need(l, kvrelay_source_connection(&l->source, up, l->now_ns) == KVRELAY_OK, "connection");
  drain(l);
  model_connection(&l->m, up, l->now_ns);
  go_on(&l->m, l->now_ns);
}

/* The caller takes the request, the engine gets it. */
static void take_request(life *l) {
  uint64_t from = 0;
  int asked = kvrelay_source_request(&l->source, &from);
  need(l, asked == (int)l->m.asking, "a request is due");
  need(l, !asked || from == (l->m.overlap ? l->m.next - 1 : l->m.next), "asked from there");
  l->m.asking = false;
  if (asked) {
    l->asked = true;
    l->from = from;
    l->answered_to = (uint32_t)(from > l->kept_from ? from : l->kept_from);
  }
}

static void publish(life *l, bool arrives) {
  if (l->published == NUMBERS)
    return;
  uint32_t n = l->published++;
  if (arrives)
    to_both(l, true, l->process, n);
}

/* Some of the replies that are left of the answer; `gap`: the first ones got lost. */
static void answer(life *l, uint32_t some, uint32_t gap) {
  if (!l->asked)
    return;
  l->answered_to += gap;
  for (; some != 0 && l->answered_to < l->published; some--)
    to_both(l, false, l->process, l->answered_to++);
}

static void new_process(life *l, uint32_t published) {
  l->process++;
  l->published = published;
  l->kept_from = 0;
  l->asked = false;
}

static void step(life *l) {
  uint8_t b = next_byte(l);
  uint32_t small = b >> 4;
  switch (b & 15) {
  case 0:
  case 1:
  case 2:
    publish(l, true);
    break;
  case 3:
    publish(l, false);
    break;
  case 4:
  case 5:
    take_request(l);
    break;
  case 6:
    answer(l, small + 1, 0);
    break;
  case 7:
    answer(l, 1 + small % 4, 1 + small / 4);
    break;
  case 8: /* the whole of it */
    take_request(l);
    answer(l, NUMBERS, 0);
    marker(l);
    break;
  case 9:
    marker(l);
    l->asked = false;
    break;
  case 10: {
    uint64_t at_ns = kvrelay_source_deadline_ns(&l->source);
    l->now_ns = at_ns != KVRELAY_TIME_NONE && at_ns > l->now_ns ? at_ns : l->now_ns;
    tick(l);
    break;
  }
  case 11:
    l->now_ns += small * 400;
    tick(l);
    break;
  case 12:
    connection(l, small % 2 == 0);
    break;
  case 13: /* an old number, live or as a reply */
    if (l->published != 0)
      to_both(l, small % 4 == 0, l->process, (l->published * small) / 16);
    break;
  case 14:
    l->kept_from += small;
    l->kept_from = l->kept_from > l->published ? l->published : l->kept_from;
    break;
  default:
    new_process(l, small % 4 * 5);
    if (small >= 4)
      connection(l, true);
  }
}

static void compare(life *l) {
  const kvrelay_source_stats *st = kvrelay_source_stats_get(&l->source);
  const model *m = &l->m;
  ckf_member member = {1, 0};
  uint32_t blocks = 0;
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    need(l, st->counts[i] == m->counts[i], kvrelay_count_name(i));
  need(l, st->batches == m->batches, "batches");
  need(l, st->has_sequence == m->known, "known");
  need(l, kvrelay_source_complete(&l->source, 0) == m->complete, "complete");
  need(l,
       kvrelay_source_state(&l->source) == (m->replaying   ? KVRELAY_SOURCE_REPLAY
                                            : m->connected ? KVRELAY_SOURCE_LIVE
                                                           : KVRELAY_SOURCE_CONNECTING),
       "state");
  need(l,
       kvrelay_source_deadline_ns(&l->source) == (m->replaying ? m->deadline_ns
                                                  : m->wanted  ? m->recovery_from_ns
                                                               : KVRELAY_TIME_NONE),
       "deadline");
  for (uint32_t n = 0; n < NUMBERS; n++)
    if (m->has[n]) {
      blocks++;
      need(l,
           ckf_producer_find(&l->producer, &member, external_of(m->holds_process[n], n), NULL,
                             NULL) == 1,
           "a block is missing");
    }
  need(l, ckf_producer_member_blocks(&l->producer, &member) == blocks, "a block too many");
}

const char *source_schedule_run(const uint8_t *bytes, size_t len,
                                uint64_t counts[KVRELAY_COUNT_LEN]) {
  life *l = calloc(1, sizeof *l);
  ckf_producer_config pc = ckf_producer_config_default();
  kvrelay_source_config cfg = kvrelay_source_config_default();
  pc.tags = true;
  pc.filter.expected_blocks = NUMBERS;
  l->at = bytes;
  l->left = len;
  cfg.worker_id = 1;
  cfg.block_size = 4;
  cfg.partial_memory = 8;
  cfg.max_event_blocks = 8;
  cfg.max_namespaces = 8;
  cfg.replay = true;
  cfg.hold_batches = HOLD;
  cfg.hold_bytes = 1 << 16; /* never full */
  cfg.replay_timeout_ns = TIMEOUT_NS;
  cfg.recovery_interval_ns = INTERVAL_NS;
  l->m.keep = next_byte(l) % 4 == 0;
  cfg.on_loss = l->m.keep ? KVRELAY_ON_LOSS_KEEP : KVRELAY_ON_LOSS_CLEAR;
  l->producer_mem = malloc(ckf_producer_mem_size(&pc));
  l->source_mem = malloc(kvrelay_source_mem_size(&cfg));
  need(l,
       ckf_producer_init(&l->producer, &pc, l->producer_mem, ckf_producer_mem_size(&pc)) == CKF_OK,
       "producer");
  need(l,
       kvrelay_source_init(&l->source, &cfg, &l->producer, l->source_mem,
                           kvrelay_source_mem_size(&cfg), 0) == KVRELAY_OK,
       "source");
  ask(&l->m, 0);
  while (l->left != 0 && l->wrong == NULL) {
    step(l);
    compare(l);
  }
  need(l, ckf_producer_check_(&l->producer) == CKF_OK, "producer damaged");
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    counts[i] += kvrelay_source_stats_get(&l->source)->counts[i];
  const char *wrong = l->wrong;
  free(l->producer_mem);
  free(l->source_mem);
  free(l);
  return wrong;
}
