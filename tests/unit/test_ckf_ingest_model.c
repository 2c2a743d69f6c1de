/* SPDX-License-Identifier: Apache-2.0 */

/* Random commands on two lanes of one worker, next to a model that keeps whole lists and looks
 * everything up by scanning them. */

#include "test_ckf_ingest.h"

enum { LANES = 2, QUEUE = 6, IMAGES = 20, TICKETS = 8, MAX_N = IMAGES + 2, STEPS = 40000 };
enum { AGE = 50, TIMEOUT = 120 };

enum kind { DELTA, SNAPSHOT, DRAIN };

typedef struct command {
  enum kind kind;
  uint32_t lane, life, ticket;
  uint64_t base, sequence, submitted;
  size_t n;
  ckf_image images[MAX_N];
  uint64_t fill;
  bool short_of_words;
} command;

typedef struct model_lane {
  enum ckf_ingest_state state;
  uint32_t life; /* counts assignments */
  bool ready, writer_ready;
  uint64_t installed;
  uint64_t epoch;
  uint64_t words[BUCKETS];
} model_lane;

typedef struct model_ticket {
  bool used, done;
  int error;
  uint32_t lane, life;
  uint64_t deadline;
} model_ticket;

static struct model {
  command queue[QUEUE];
  size_t len;
  model_lane lanes[LANES];
  model_ticket tickets[TICKETS];
  uint64_t reports;
} m;

static fixture f;
static ckf_ingest_ticket tickets[TICKETS];
static uint64_t lent[TICKETS][BUCKETS]; /* words of a snapshot until its ticket is done */
static uint64_t random_state;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

static bool chance(uint64_t percent) { return draw(100) < percent; }

static bool counts(uint32_t lane, uint32_t life) {
  const model_lane *l = &m.lanes[lane];
  return l->life == life &&
         (l->state == CKF_INGEST_AWAITING_SNAPSHOT || l->state == CKF_INGEST_ACTIVE);
}

static void model_retire(uint32_t lane, bool reported) {
  m.lanes[lane].state = CKF_INGEST_RETIRED;
  m.lanes[lane].ready = false;
  m.reports += reported;
}

static size_t outstanding(uint32_t lane, bool images) {
  size_t sum = 0;
  for (size_t i = 0; i < m.len; i++)
    if (m.queue[i].kind == DELTA && m.queue[i].lane == lane)
      sum += images ? m.queue[i].n : 1;
  return sum;
}

static const command *oldest(uint32_t lane) {
  for (size_t i = 0; i < m.len; i++)
    if (m.queue[i].kind == DELTA && m.queue[i].lane == lane)
      return &m.queue[i];
  return NULL;
}

/* A free ticket, or TICKETS. */
static uint32_t a_ticket(void) {
  uint32_t i = 0;
  while (i < TICKETS && m.tickets[i].used)
    i++;
  return i;
}

/* ---- one operation each: the pool and the model, with the same outcome ---- */

static void do_assign(uint32_t lane) {
  const bool stale = chance(20);
  const int want = stale ? CKF_ERR_STALE_EPOCH : CKF_OK;
  ckf_lease lease = f.leases[lane];
  lease.assignment_epoch = m.lanes[lane].epoch + (stale ? 0 : 1 + draw(2));
  if (stale && m.lanes[lane].life == 0)
    return;
  cr_assert_eq(ckf_ingest_assign(&f.in, &f.identities[lane], &lease), want);
  if (want == CKF_OK) {
    model_retire(lane, false);
    f.leases[lane] = lease;
    m.lanes[lane].epoch = lease.assignment_epoch;
    m.lanes[lane].life++;
    m.lanes[lane].state = CKF_INGEST_AWAITING_SNAPSHOT;
  }
}

/* What the lane will have installed when everything that waits is done. */
static uint64_t expected_sequence(uint32_t lane) {
  uint64_t sequence = m.lanes[lane].installed;
  for (size_t i = 0; i < m.len; i++)
    if (m.queue[i].lane == lane && m.queue[i].kind != DRAIN && counts(lane, m.queue[i].life))
      sequence = m.queue[i].sequence;
  return sequence;
}

static int model_delta(uint32_t lane, size_t n) {
  const command *const first = oldest(lane);
  model_lane *const l = &m.lanes[lane];
  if (l->state == CKF_INGEST_UNASSIGNED)
    return CKF_INGEST_ERR_LANE_UNASSIGNED;
  if (l->state == CKF_INGEST_RETIRED)
    return CKF_INGEST_ERR_LANE_RETIRED;
  if (l->state == CKF_INGEST_AWAITING_SNAPSHOT)
    return CKF_INGEST_ERR_AWAITING_SNAPSHOT;
  if (first && f.now - first->submitted >= AGE)
    return CKF_INGEST_ERR_AGE_EXCEEDED;
  if (outstanding(lane, true) + n > IMAGES)
    return CKF_INGEST_ERR_IMAGE_LIMIT;
  return m.len == QUEUE ? (int)CKF_INGEST_ERR_SATURATED : (int)CKF_OK;
}

static void do_delta(uint32_t lane) {
  command c;
  memset(&c, 0, sizeof c);
  c.kind = DELTA;
  c.lane = lane;
  c.life = m.lanes[lane].life;
  c.ticket = TICKETS;
  c.base = expected_sequence(lane) + (chance(2) ? 1 : 0) - (chance(3) ? 1 : 0);
  c.sequence = c.base + (chance(1) ? 2 : 1);
  c.submitted = f.now;
  c.n = chance(1) ? 0 : chance(3) ? draw(MAX_N + 1) : 1 + draw(8);
  for (size_t i = 0; i < c.n; i++)
    c.images[i] = (ckf_image){(uint32_t)((c.sequence * 5 + i) % BUCKETS), draw(UINT64_MAX)};
  if (c.n > 1 && chance(2))
    c.images[c.n - 1].bucket = chance(50) ? BUCKETS : c.images[0].bucket;
  const int want = model_delta(lane, c.n);
  cr_assert_eq(submit_images(&f, lane, c.base, c.sequence, c.images, c.n), want);
  if (want == CKF_OK)
    m.queue[m.len++] = c;
  else if (want <= CKF_INGEST_ERR_AGE_EXCEEDED)
    model_retire(lane, true);
}

static void do_control(uint32_t lane, enum kind kind) {
  const uint32_t t = a_ticket();
  const model_lane *const l = &m.lanes[lane];
  command c;
  int got, want = CKF_OK;
  if (t == TICKETS)
    return;
  memset(&c, 0, sizeof c);
  c.kind = kind;
  c.lane = lane;
  c.life = l->life;
  c.ticket = t;
  c.submitted = f.now;
  c.fill = draw(UINT64_MAX);
  c.short_of_words = chance(10);
  c.sequence = kind == DRAIN ? expected_sequence(lane) + chance(10) : draw(10);
  if (l->state == CKF_INGEST_UNASSIGNED)
    want = CKF_INGEST_ERR_LANE_UNASSIGNED;
  else if (l->state == CKF_INGEST_RETIRED)
    want = CKF_INGEST_ERR_LANE_RETIRED;
  else if (l->state == CKF_INGEST_AWAITING_SNAPSHOT && kind == DRAIN)
    want = CKF_INGEST_ERR_AWAITING_SNAPSHOT;
  else if (m.len == QUEUE)
    want = CKF_ERR_NOSPACE;
  if (kind == SNAPSHOT) {
    for (size_t i = 0; i < BUCKETS; i++)
      lent[t][i] = c.fill + i;
    got = ckf_ingest_submit_snapshot(&f.in, &f.identities[lane], &f.leases[lane], c.sequence,
                                     lent[t], BUCKETS - c.short_of_words, &tickets[t], f.now);
  } else
    got = submit_drain(&f, lane, c.sequence, &tickets[t]);
  cr_assert_eq(got, want);
  if (want == CKF_OK) {
    m.queue[m.len++] = c;
    m.tickets[t] = (model_ticket){true, false, CKF_OK, lane, l->life, f.now + TIMEOUT};
  }
}

static void finish_ticket(uint32_t t, int error) {
  if (t < TICKETS && !m.tickets[t].done) {
    m.tickets[t].done = true;
    m.tickets[t].error = m.tickets[t].error ? m.tickets[t].error : error;
  }
}

/* What looking at a ticket does: overdue retires, and of a lane that is retired it is done. */
static void look_at(uint32_t t) {
  model_ticket *const k = &m.tickets[t];
  if (!k->used || k->done)
    return;
  if (counts(k->lane, k->life) && f.now >= k->deadline) {
    k->error = CKF_INGEST_ERR_CONTROL_TIMEOUT;
    model_retire(k->lane, true);
  }
  if (!counts(k->lane, k->life))
    finish_ticket(t, CKF_INGEST_ERR_LANE_RETIRED);
}

static bool bad_images(const command *c) {
  for (size_t i = 0; i < c->n; i++) {
    if (c->images[i].bucket >= BUCKETS)
      return true;
    for (size_t j = 0; j < i; j++)
      if (c->images[i].bucket == c->images[j].bucket)
        return true;
  }
  return c->n == 0;
}

/* The rules of a lane, for the commands that come here. */
static int run_lane(model_lane *l, const command *c) {
  if (c->kind == SNAPSHOT) {
    if (l->writer_ready && c->sequence <= l->installed)
      return CKF_OK;
    if (c->short_of_words) {
      m.reports++;
      if (l->writer_ready)
        model_retire(c->lane, false);
      return CKF_INGEST_ERR_LANE_FAULT;
    }
    if (l->writer_ready) {
      model_retire(c->lane, true);
      return CKF_INGEST_ERR_LANE_FAULT;
    }
    for (size_t i = 0; i < BUCKETS; i++)
      l->words[i] = c->fill + i;
    l->installed = c->sequence;
    l->ready = l->writer_ready = true;
    l->state = CKF_INGEST_ACTIVE;
    return CKF_OK;
  }
  if (c->kind == DRAIN
          ? l->installed != c->sequence
          : c->sequence > l->installed &&
                (c->base != l->installed || c->sequence != c->base + 1 || bad_images(c))) {
    model_retire(c->lane, true);
    return CKF_INGEST_ERR_LANE_FAULT;
  }
  if (c->kind == DELTA && c->sequence > l->installed) {
    for (size_t i = 0; i < c->n; i++)
      l->words[c->images[i].bucket] = c->images[i].word;
    l->installed = c->sequence;
  }
  return CKF_OK;
}

static void model_work(size_t max) {
  static uint32_t heard[LANES]; /* the life that the writer knows */
  for (; max > 0 && m.len > 0; max--) {
    const command c = m.queue[0];
    model_lane *const l = &m.lanes[c.lane];
    memmove(m.queue, m.queue + 1, --m.len * sizeof c);
    if (c.kind == DELTA && counts(c.lane, c.life) && f.now - c.submitted >= AGE)
      model_retire(c.lane, true);
    if (c.ticket < TICKETS)
      look_at(c.ticket);
    if (!counts(c.lane, c.life)) {
      finish_ticket(c.ticket, CKF_INGEST_ERR_LANE_RETIRED);
      continue;
    }
    if (heard[c.lane] != c.life)
      l->writer_ready = false;
    heard[c.lane] = c.life;
    finish_ticket(c.ticket, run_lane(l, &c));
  }
}

static void do_work(void) {
  const size_t max = 1 + draw(4), want = m.len < max ? m.len : max;
  cr_assert_eq(ckf_ingest_work(&f.in, 0, f.now, max), (ptrdiff_t)want);
  model_work(max);
}

static void do_tick(void) {
  ckf_ingest_tick(&f.in, f.now);
  for (uint32_t i = 0; i < LANES; i++) {
    const command *const c = oldest(i);
    if (m.lanes[i].state == CKF_INGEST_ACTIVE && c && f.now - c->submitted >= AGE)
      model_retire(i, true);
  }
  for (size_t i = 0; i < m.len; i++)
    if (m.queue[i].ticket < TICKETS)
      look_at(m.queue[i].ticket);
}

static void do_polls(void) {
  for (uint32_t t = 0; t < TICKETS; t++) {
    if (!m.tickets[t].used)
      continue;
    look_at(t);
    cr_assert_eq(ckf_ingest_poll(&f.in, &tickets[t], f.now), m.tickets[t].done);
    if (m.tickets[t].done) {
      cr_assert_eq(tickets[t].error, m.tickets[t].error, "%s, wanted %s",
                   ckf_ingest_errname(tickets[t].error), ckf_ingest_errname(m.tickets[t].error));
      m.tickets[t].used = false;
      for (size_t i = 0; i < m.len; i++) /* nobody may know the ticket any more */
        if (m.queue[i].ticket == t)
          m.queue[i].ticket = TICKETS;
      memset(&tickets[t], 0xFF, sizeof tickets[t]);
      memset(lent[t], 0xFF, sizeof lent[t]);
    }
  }
}

static uint64_t model_deadline(void) {
  uint64_t first = CKF_INGEST_TIME_NONE;
  for (uint32_t i = 0; i < LANES; i++)
    if (m.lanes[i].state == CKF_INGEST_ACTIVE && oldest(i) && oldest(i)->submitted + AGE < first)
      first = oldest(i)->submitted + AGE;
  for (size_t i = 0; i < m.len; i++) {
    const uint32_t t = m.queue[i].ticket;
    if (t < TICKETS && !m.tickets[t].done && counts(m.queue[i].lane, m.queue[i].life) &&
        m.tickets[t].deadline < first)
      first = m.tickets[t].deadline;
  }
  return first;
}

static void compare(uint64_t step) {
  ckf_ingest_report r;
  for (uint32_t i = 0; i < LANES; i++) {
    const model_lane *const l = &m.lanes[i];
    const ckf_ingest_lane_view v = view_of(&f, i);
    cr_assert_eq(v.state, l->state, "step %zu: %s, wanted %s", (size_t)step,
                 ckf_ingest_state_name(v.state), ckf_ingest_state_name(l->state));
    cr_assert_eq(v.ready, l->ready, "step %zu", (size_t)step);
    cr_assert_eq(v.outstanding_deltas, outstanding(i, false));
    cr_assert_eq(v.outstanding_images, outstanding(i, true));
    cr_assert_eq(v.assignment_epoch, l->epoch);
    for (uint32_t b = 0; b < BUCKETS; b++)
      cr_assert_eq(ckf_table_word(&f.table, i, b), l->words[b], "step %zu", (size_t)step);
  }
  for (; m.reports > 0; m.reports--)
    cr_assert_eq(ckf_ingest_report_next(&f.in, &r), 1, "step %zu", (size_t)step);
  cr_assert_eq(ckf_ingest_report_next(&f.in, &r), 0, "step %zu", (size_t)step);
  cr_assert_eq(ckf_ingest_deadline_ns(&f.in), model_deadline(), "step %zu", (size_t)step);
}

Test(ckf_ingest_model, random_commands_do_what_the_model_does) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  uint64_t applied = 0;
  cfg.workers = 1;
  cfg.queue_cap = QUEUE;
  cfg.max_images = IMAGES;
  cfg.max_age_ns = AGE;
  cfg.control_timeout_ns = TIMEOUT;
  setup(&f, (1u << LANES) - 1, BUCKETS, &cfg);
  random_state = 11;
  for (uint64_t step = 0; step < STEPS; step++) {
    const uint32_t lane = (uint32_t)draw(LANES);
    const uint64_t what = draw(100);
    const enum ckf_ingest_state state = m.lanes[lane].state;
    if (what < 2 ||
        (what < 20 && state != CKF_INGEST_ACTIVE && state != CKF_INGEST_AWAITING_SNAPSHOT))
      do_assign(lane);
    else if (what < 4 || (what < 30 && state == CKF_INGEST_AWAITING_SNAPSHOT))
      do_control(lane, SNAPSHOT);
    else if (what < 7)
      do_control(lane, DRAIN);
    else if (what < 60)
      do_delta(lane);
    else if (what < 85)
      do_work();
    else if (what < 88)
      do_tick();
    else if (what < 94)
      do_polls();
    else if (what < 95) {
      ckf_ingest_retire(&f.in, lane);
      if (state != CKF_INGEST_UNASSIGNED)
        model_retire(lane, false);
    } else
      f.now += chance(5) ? draw(2 * TIMEOUT) : draw(8);
    compare(step);
  }
  for (uint32_t i = 0; i < LANES; i++)
    applied += view_of(&f, i).applied_images;
  cr_assert_gt(applied, STEPS / 4, "most of it was idle");
  teardown(&f);
}

/* Deltas of every size that the limit admits, in every rhythm, find their place in one piece. */
Test(ckf_ingest_model, whatever_the_limit_admits_fits) {
  enum { LIMIT = 7 };
  ckf_ingest_config cfg = ckf_ingest_config_default();
  ckf_image images[LIMIT];
  uint64_t base = 0, word = 0, done = 0;
  uint64_t expected[BUCKETS] = {0}, waiting[64][LIMIT];
  size_t sizes[64], first = 0, len = 0, used = 0;
  cfg.workers = 1;
  cfg.max_images = LIMIT;
  setup(&f, 1, BUCKETS, &cfg);
  random_state = 5;
  activate(&f, 0, 0, 0);
  for (int step = 0; step < 200000; step++) {
    const size_t n = 1 + draw(LIMIT);
    if (used + n <= LIMIT && chance(60)) {
      for (size_t i = 0; i < n; i++) {
        images[i] = (ckf_image){(uint32_t)i, ++word};
        waiting[(first + len) % 64][i] = word;
      }
      cr_assert_eq(submit_images(&f, 0, base, base + 1, images, n), CKF_OK);
      sizes[(first + len++) % 64] = n;
      used += n;
      base++;
    } else if (len > 0) {
      cr_assert_eq(ckf_ingest_work(&f.in, 0, f.now, 1), 1);
      for (size_t i = 0; i < sizes[first]; i++)
        expected[i] = waiting[first][i];
      used -= sizes[first];
      first = (first + 1) % 64;
      len--;
      done++;
    }
    for (uint32_t b = 0; b < LIMIT; b++)
      cr_assert_eq(ckf_table_word(&f.table, 0, b), expected[b]);
  }
  cr_assert_gt(done, 50000);
  teardown(&f);
}
