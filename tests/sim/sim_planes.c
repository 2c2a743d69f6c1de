/* SPDX-License-Identifier: Apache-2.0 */
/* Who serves a model, who of them is alive, and how loaded they are: told, and worked out naively.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum { P = KVRELAY_ROLE_PREFILL, D = KVRELAY_ROLE_DECODE, A = KVRELAY_ROLE_AGGREGATED };

static const int32_t needs_decode[] = {D}, needs_prefill[] = {P};
static const struct {
  int32_t role;
  kvrelay_roles needs; /* the one alternative, or none */
} kinds[SIM_SITES] = {
    {A, {NULL, 0}}, {P, {needs_decode, 1}}, {D, {needs_prefill, 1}}, {P, {NULL, 0}}};

static kvrelay_text text(const char *z) { return (kvrelay_text){(const uint8_t *)z, strlen(z)}; }

kvrelay_endpoint sim_planes_endpoint(const sim_pool *p, uint32_t site) {
  return (kvrelay_endpoint){true, text("sim"), text("sim"), text(p->endpoints[site])};
}

/* ---- readiness ---- */

static kvrelay_card card(const sim_pool *p, uint32_t site, uint32_t worker) {
  const sim_site *const t = &p->told[site];
  kvrelay_card c;
  memset(&c, 0, sizeof c);
  c.endpoint = sim_planes_endpoint(p, site);
  c.worker_id = 1 + worker;
  c.liveness = !t->known         ? KVRELAY_LIVENESS_UNKNOWN
               : t->live[worker] ? KVRELAY_LIVENESS_LIVE
                                 : KVRELAY_LIVENESS_DEAD;
  c.model_id = text(p->model);
  c.role = kinds[site].role;
  c.needs = &kinds[site].needs;
  c.needs_len = kinds[site].needs.len;
  c.domain = p->descriptor.producer.pool_id.domain;
  c.domain.routing_scope.digest[2] = (uint8_t)site;
  c.semantics = p->descriptor.query_semantics;
  return c;
}

/* All cards in some order; those of an endpoint may be old. */
static size_t tell_cards(sim *s, sim_relay *relay, kvrelay_card *cards) {
  size_t n = 0;
  for (uint32_t i = 0; i < s->plan.pools * SIM_SITES; i++) {
    sim_pool *const p = &relay->pools[i / SIM_SITES];
    const uint32_t k = i % SIM_SITES;
    if (!s->calm && sim_once(s, 50))
      sim_count(s, SIM_CARDS_LOST);
    else
      p->told[k] = p->sites[k];
    for (uint32_t w = 0; w < SIM_WORKERS && p->told[k].there; w++, n++) {
      const size_t at = sim_below(s, (uint32_t)n + 1);
      cards[n] = cards[at];
      cards[at] = card(p, k, w);
    }
  }
  return n;
}

static void tell(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  void *const former = relay->topology_mem;
  kvrelay_card cards[SIM_POOLS_CAP * SIM_SITES * SIM_WORKERS];
  kvrelay_topology topology;
  const size_t n = tell_cards(s, relay, cards), len = kvrelay_topology_mem_size(cards, n);
  relay->topology_mem = sim_alloc(s, len);
  if ((len != 0 && kvrelay_topology_derive(cards, n, relay->topology_mem, len - 1, &topology) !=
                       KVRELAY_ERR_NOSPACE) ||
      kvrelay_topology_derive(cards, n, relay->topology_mem, len, &topology) != KVRELAY_OK) {
    sim_fail(s, "a topology cannot be derived, or in too little memory");
    return;
  }
  sim_count(s, SIM_SHORT_MEMORY);
  relay->topology = topology;
  if (kvrelay_relay_set_topology(&relay->relay, &relay->topology) != KVRELAY_OK)
    sim_fail(s, "a topology is not taken");
  sim_free(s, former);
}

static uint32_t bit(int32_t role) { return UINT32_C(1) << role; }

sim_ready sim_planes_judge(const sim_pool *p) {
  sim_ready out = {.state = KVRELAY_READY_UNAVAILABLE};
  uint32_t declared = 0, twice = 0;
  bool unknown = false;
  for (uint32_t k = 0; k < SIM_SITES; k++) {
    const sim_site *const t = &p->told[k];
    if (!t->there)
      continue;
    out.members |= 1u << k;
    unknown |= !t->known;
    declared |= bit(kinds[k].role);
    if (!t->known || !(t->live[0] || t->live[1]))
      continue;
    if (kinds[k].needs.len)
      declared |= bit(kinds[k].needs.ptr[0]);
    twice |= out.present & bit(kinds[k].role);
    out.present |= bit(kinds[k].role);
  }
  out.there = out.members != 0;
  out.linked = p->pool && p->told[0].there;
  out.missing = declared & ~out.present;
  out.duplicates = twice & ~bit(A);
  if (out.present && !out.missing && !out.duplicates)
    out.state = KVRELAY_READY_READY;
  if (unknown) {
    out.state = KVRELAY_READY_UNKNOWN;
    out.present = out.missing = 0;
  }
  if (!out.there)
    memset(&out, 0, sizeof out);
  return out;
}

bool sim_planes_same(const sim_ready *a, const sim_ready *b) {
  return a->there == b->there && a->state == b->state && a->present == b->present &&
         a->missing == b->missing && a->duplicates == b->duplicates && a->members == b->members &&
         a->linked == b->linked;
}

/* What the relay's newest revision stands for. One is not spent on nothing. */
static void note_image(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  const uint64_t revision = kvrelay_relay_stats_get(&relay->relay).topology_revision;
  sim_image image;
  bool same = true;
  if (revision < relay->images_len)
    return;
  memset(&image, 0, sizeof image);
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    image.pools[i] = sim_planes_judge(&relay->pools[i]);
    same = same && relay->images_len != 0 &&
           sim_planes_same(&image.pools[i], &relay->images[relay->images_len - 1].pools[i]);
  }
  if (revision != relay->images_len || same)
    sim_fail(s, "relay %u: revision %llu of readiness stands for nothing", r,
             (unsigned long long)revision);
  relay->images =
      sim_grow(relay->images, relay->images_len, &relay->images_cap, sizeof *relay->images);
  relay->images[relay->images_len++] = image;
}

/* ---- load ---- */

static void declare(sim *s, sim_pool *p) {
  void *const former = p->ranks_mem;
  kvrelay_rank_range ranges[SIM_WORKERS];
  p->load_workers = sim_below(s, SIM_WORKERS + 1); /* also as many as before */
  for (uint32_t w = 0; w < p->load_workers; w++)
    ranges[w] = (kvrelay_rank_range){1 + w, 5 * w, SIM_RANKS, p->capacity[w]};
  const size_t len = kvrelay_pool_ranks_mem_size(ranges, p->load_workers);
  p->ranks_mem = sim_alloc(s, len);
  if (kvrelay_pool_set_ranks(p->pool, ranges, p->load_workers, p->ranks_mem, len - 1) !=
          KVRELAY_ERR_NOSPACE ||
      kvrelay_pool_set_ranks(p->pool, ranges, p->load_workers, p->ranks_mem, len) != KVRELAY_OK)
    sim_fail(s, "the ranks of a pool are not taken, or in too little memory");
  sim_count(s, SIM_SHORT_MEMORY);
  sim_free(s, former);
  for (uint32_t w = p->load_workers; w < SIM_WORKERS; w++)
    memset(p->reported[w], 0, sizeof p->reported[w]);
}

static void expect(sim *s, const sim_pool *p, uint32_t w, int err) {
  if (err != (w < p->load_workers ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND))
    sim_fail(s, "a report of load: %d", err);
}

static void deliver(sim *s, sim_pool *p, const sim_report *m) {
  expect(s, p, m->worker,
         kvrelay_pool_report(p->pool, 1 + m->worker, 5 * m->worker + m->rank, m->used));
  p->used[m->worker][m->rank] = m->used;
  p->reported[m->worker][m->rank] = m->worker < p->load_workers;
  if (m->worker >= p->load_workers)
    sim_count(s, SIM_REPORT_STRAY);
}

/* The way of a report: lost, twice, or overtaken by those behind it. The last to arrive counts. */
static void send(sim *s, sim_pool *p, const sim_report *m) {
  if (sim_once(s, 12)) {
    sim_count(s, SIM_REPORT_LOST);
    return;
  }
  if (!p->late.there && sim_once(s, 12)) {
    p->late = *m;
    return;
  }
  deliver(s, p, m);
  if (sim_once(s, 12)) {
    sim_count(s, SIM_REPORT_TWICE);
    deliver(s, p, m);
  }
  if (p->late.there && sim_once(s, 4)) {
    sim_count(s, SIM_REPORT_LATE);
    p->late.there = false;
    deliver(s, p, &p->late);
  }
}

static void load_step(sim *s, sim_pool *p) {
  const uint32_t w = sim_below(s, SIM_WORKERS);
  const uint64_t value = sim_once(s, 50) ? UINT64_MAX - sim_below(s, 3) : sim_below(s, 1000);
  const uint64_t total = sim_once(s, 4) ? 0 : value;
  const sim_report report = {true, w, sim_below(s, SIM_RANKS), value};
  switch (sim_below(s, 24)) {
  case 0:
    sim_count(s, SIM_DECLARED);
    declare(s, p);
    break;
  case 1:
    sim_count(s, SIM_REPORTS_GONE);
    expect(s, p, w, kvrelay_pool_reports_lost(p->pool, 1 + w));
    memset(p->reported[w], 0, sizeof p->reported[w]);
    break;
  case 2: /* of all ranks of the worker */
    sim_count(s, SIM_CAPACITY);
    for (uint32_t k = 0; k < SIM_RANKS; k++)
      expect(s, p, w, kvrelay_pool_set_capacity(p->pool, 1 + w, 5 * w + k, total));
    if (w >= p->load_workers || total == p->capacity[w])
      break;
    memset(p->reported[w], 0, sizeof p->reported[w]);
    p->capacity[w] = total;
    break;
  default:
    send(s, p, &report);
  }
}

static uint64_t add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

static sim_load load_now(const sim_pool *p, uint64_t window) {
  sim_load load = {window, 0, 0, 0, p->load_workers * SIM_RANKS};
  bool sized = true;
  for (uint32_t w = 0; w < p->load_workers; w++)
    for (uint32_t k = 0; k < SIM_RANKS; k++) {
      load.observed += p->reported[w][k];
      load.used = add(load.used, p->used[w][k]);
      load.total = add(load.total, p->capacity[w]);
      sized &= p->capacity[w] != 0;
    }
  load.used = load.observed == load.expected ? load.used : 0;
  load.total = sized ? load.total : 0;
  return load;
}

static void note_load(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  const uint64_t window = kvrelay_relay_stats_get(&relay->relay).load_windows;
  if (window == relay->windows)
    return;
  if (window != relay->windows + 1)
    sim_fail(s, "relay %u: load windows are made up", r);
  relay->windows = window;
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    if (!relay->pools[i].pool)
      continue;
    sim_line *const line = &s->lines[relay->pools[i].line];
    const sim_load now = load_now(&relay->pools[i], window);
    const sim_load *const last = line->loads_len ? &line->loads[line->loads_len - 1] : NULL;
    if (last && last->used == now.used && last->total == now.total &&
        last->observed == now.observed && last->expected == now.expected)
      continue;
    line->loads = sim_grow(line->loads, line->loads_len, &line->loads_cap, sizeof now);
    line->loads[line->loads_len++] = now;
  }
}

void sim_planes_note(sim *s, uint32_t r) {
  note_load(s, r);
  note_image(s, r);
}

/* ---- events ---- */

static void site_step(sim *s, sim_site *t) {
  t->there = !sim_once(s, 6);
  t->known = !sim_once(s, 8);
  for (uint32_t w = 0; w < SIM_WORKERS; w++)
    t->live[w] = t->known && !sim_once(s, 3);
}

void sim_planes_open(sim *s, uint32_t r) {
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    sim_pool *const p = &s->relays[r].pools[i];
    for (uint32_t k = 0; k < SIM_SITES; k++)
      site_step(s, &p->sites[k]);
    for (uint32_t w = 0; w < SIM_WORKERS; w++)
      p->capacity[w] = 1000 * sim_below(s, 3);
  }
}

void sim_planes_up(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  memset(&relay->topology, 0, sizeof relay->topology);
  relay->windows = 0;
  for (uint32_t i = 0; i < s->plan.pools; i++)
    memset(relay->pools[i].told, 0, sizeof relay->pools[i].told);
  relay->images = sim_grow(NULL, 0, &relay->images_cap, sizeof *relay->images);
  memset(relay->images, 0, 2 * sizeof *relay->images); /* revision 1 stands for no model */
  relay->images_len = 2;
  tell(s, r);
}

void sim_planes_down(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  sim_free(s, relay->topology_mem);
  free(relay->images);
  relay->topology_mem = relay->images = NULL;
  relay->images_len = relay->images_cap = 0;
}

void sim_planes_publish(sim *s, sim_pool *p) {
  memset(p->reported, 0, sizeof p->reported);
  p->late.there = false;
  declare(s, p);
}

void sim_planes_step(sim *s, uint32_t r, uint32_t i) {
  sim_pool *const p = &s->relays[r].pools[i];
  if (!s->calm && p->pool && sim_once(s, 2))
    load_step(s, p);
  if (s->calm || !sim_once(s, 16))
    return;
  site_step(s, &p->sites[sim_below(s, SIM_SITES)]);
  tell(s, r);
}

void sim_planes_calm(sim *s, uint32_t r) {
  bool heard = true;
  for (uint32_t i = 0; i < s->plan.pools; i++)
    heard &= memcmp(s->relays[r].pools[i].told, s->relays[r].pools[i].sites,
                    sizeof s->relays[r].pools[i].told) == 0;
  if (!heard)
    tell(s, r);
}
