/* SPDX-License-Identifier: Apache-2.0 */
/* One seed: a time of events and faults, then a calm in which everything has to come right. */
#include "sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In a calm: the longest backoff, what is due after it, and the way. */
#define CALM (120 * SIM_SECOND)

uint64_t sim_draw(sim *s) { return ckf_rng_draw(&s->rng); }
uint32_t sim_below(sim *s, uint32_t n) { return (uint32_t)(sim_draw(s) % n); }
bool sim_once(sim *s, uint32_t n) { return sim_below(s, n) == 0; }

void sim_fail(sim *s, const char *format, ...) {
  va_list list;
  if (s->failure[0] != '\0')
    return;
  const int n = snprintf(s->failure, sizeof s->failure,
                         "at %llu ms: ", (unsigned long long)(s->now / SIM_MS));
  va_start(list, format);
  vsnprintf(s->failure + n, sizeof s->failure - (size_t)n, format, list);
  va_end(list);
}

void sim_count(sim *s, int32_t what) { s->counts[what]++; }

/* Before the memory its length, and up to its beginning, as behind it, bytes to be kept. */
enum { HEAD = sizeof(size_t), EDGE = 16, KEPT = 0xC3 };

void *sim_alloc(sim *s, size_t len) {
  const size_t shift = EDGE + sim_below(s, EDGE);
  uint8_t *const base = malloc(HEAD + shift + len + EDGE);
  if (!base)
    abort();
  memcpy(base, &len, HEAD);
  memset(base + HEAD, KEPT, shift + len + EDGE);
  uint8_t *const mem = base + HEAD + shift;
  mem[-1] = (uint8_t)shift;
  memset(mem, 0x5A, len);
  return mem;
}

void sim_free(sim *s, void *mem) {
  const uint8_t *const at = mem;
  size_t len, wrong = 0;
  if (!mem)
    return;
  const size_t shift = at[-1] < 2 * EDGE ? at[-1] : EDGE;
  uint8_t *const base = (uint8_t *)mem - shift - HEAD;
  memcpy(&len, base, HEAD);
  for (int i = 0; i < EDGE; i++)
    wrong += (at + len)[i] != KEPT || (i > 1 && at[-i] != KEPT);
  if (wrong || at[-1] != shift)
    sim_fail(s, "written outside of %zu bytes of memory", len);
  free(base);
}

void *sim_grow(void *items, size_t len, size_t *cap, size_t size) {
  if (len < *cap)
    return items;
  *cap = *cap ? 2 * *cap : 16;
  void *const more = realloc(items, *cap * size);
  if (!more)
    abort();
  return more;
}

/* Everything that is due at this moment. */
static void settle_moment(sim *s) {
  for (uint32_t r = 0; r < s->plan.relays; r++) {
    bool more = true;
    for (int turns = 0; more && turns < 10000; turns++) {
      more = sim_relay_turn(s, r);
      for (uint32_t c = 0; c < s->plan.consumers; c++)
        more |= sim_link_turn(s, r, c);
      if (turns == 9999)
        sim_fail(s, "relay %u does not come to rest", r);
    }
  }
}

/* When something is due again. */
static uint64_t next_deadline(const sim *s, uint64_t until) {
  for (uint32_t r = 0; r < s->plan.relays; r++) {
    if (s->relays[r].front.to) {
      const uint64_t at = kvrelay_relay_deadline_ns(&s->relays[r].relay);
      until = at < until ? at : until;
    }
    for (uint32_t c = 0; c < s->plan.consumers; c++) {
      const uint64_t at = kvrelay_client_deadline_ns(s->links[r][c].client);
      until = at < until ? at : until;
    }
  }
  return until;
}

static void run_to(sim *s, uint64_t until) {
  const uint64_t most = s->plan.step_ns > 200 * SIM_MS ? s->plan.step_ns / 4 : 20 * SIM_MS;
  settle_moment(s);
  while (s->now < until && !s->failure[0]) {
    /* Messages on their way are in nobody's deadlines: short steps see them. */
    const uint64_t next = next_deadline(s, until), soon = s->now + most;
    const uint64_t at = next < soon ? next : soon;
    s->now = at > s->now ? at : s->now + 1;
    settle_moment(s);
  }
}

static void check_all(sim *s) {
  for (uint32_t r = 0; r < s->plan.relays; r++) {
    if (s->relays[r].front.to) {
      const int line = kvrelay_relay_check_(&s->relays[r].relay);
      if (line != 0)
        sim_fail(s, "relay %u: broken invariant at line %d", r, line);
    }
    for (uint32_t c = 0; c < s->plan.consumers; c++)
      sim_check_link(s, r, c);
  }
  for (uint32_t c = 0; c < s->plan.consumers; c++)
    sim_check_answers(s, c);
}

static void step(sim *s) {
  const uint64_t pause =
      sim_once(s, 200) ? sim_below(s, 40000) * SIM_MS : sim_draw(s) % (2 * s->plan.step_ns);
  const uint32_t r = sim_below(s, s->plan.relays);
  sim_relay_step(s, r);
  if (s->plan.consumers)
    sim_link_step(s, sim_below(s, s->plan.relays), sim_below(s, s->plan.consumers));
  run_to(s, s->now + pause);
  sim_count(s, SIM_STEP);
  if (s->counts[SIM_STEP] % 8 == 0)
    check_all(s);
}

static void lift_faults(sim *s) {
  for (uint32_t r = 0; r < s->plan.relays; r++) {
    sim_relay_calm(s, r);
    for (uint32_t c = 0; c < s->plan.consumers; c++)
      sim_link_step(s, r, c);
  }
}

const char *sim_run(const sim_plan *plan, sim *s) {
  uint64_t counts[SIM_COUNTS_LEN];
  memcpy(counts, s->counts, sizeof counts);
  memset(s, 0, sizeof *s);
  s->plan = *plan;
  s->rng = plan->seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
  s->now = SIM_SECOND;
  sim_plan *const p = &s->plan;
  p->relays = p->relays ? p->relays : 1 + sim_below(s, 3);
  p->pools = p->pools ? p->pools : 1 + sim_below(s, 4);
  p->consumers = p->consumers ? p->consumers : 1 + sim_below(s, 3);
  p->step_ns = p->step_ns ? p->step_ns : (1 + sim_below(s, 200)) * SIM_MS;
  p->active_ns = p->active_ns ? p->active_ns : p->step_ns * (100 + sim_below(s, 400));
  for (uint32_t r = 0; r < p->relays; r++)
    sim_relay_open(s, r);
  for (uint32_t r = 0; r < p->relays; r++)
    for (uint32_t c = 0; c < p->consumers; c++)
      sim_link_open(s, r, c);
  for (const uint64_t until = s->now + p->active_ns; s->now < until && !s->failure[0];)
    step(s);
  s->calm = true;
  for (const uint64_t until = s->now + CALM; s->now < until && !s->failure[0] && !sim_settled(s);) {
    lift_faults(s);
    run_to(s, s->now + SIM_SECOND);
    check_all(s);
  }
  if (!sim_settled(s))
    sim_fail(s, "somebody waits for ever");
  check_all(s);
  for (uint32_t r = 0; r < p->relays; r++)
    for (uint32_t c = 0; c < p->consumers; c++)
      sim_link_close(s, r, c);
  for (uint32_t r = 0; r < p->relays; r++)
    sim_relay_close(s, r);
  for (size_t i = 0; i < s->lines_len; i++) {
    free(s->lines[i].published);
    free(s->lines[i].loads);
  }
  free(s->lines);
  s->lines = NULL;
  for (int i = 0; i < SIM_COUNTS_LEN; i++)
    s->counts[i] += counts[i];
  return s->failure[0] ? s->failure : NULL;
}
