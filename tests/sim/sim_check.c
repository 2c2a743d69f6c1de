/* SPDX-License-Identifier: Apache-2.0 */
/* What a consumer may see at any time, and what it has to see in the end. */
#include "sim.h"

#include <string.h>

static const sim_line *line_of(const sim *s, const kvrelay_producer *producer) {
  for (size_t i = s->lines_len; i-- > 0;)
    if (kvrelay_producer_equal(&s->lines[i].producer, producer))
      return &s->lines[i];
  return NULL;
}

static uint64_t view_hash(const kvrelay_pool_view *view) {
  return hashfmt_hash64((const uint8_t *)view->words,
                        8 * (size_t)view->descriptor->producer.ckf_format.bucket_count, 0);
}

/* What was published when the pool had these words; NULL: it never had them. */
static const sim_published *published_of(const sim_line *line, const kvrelay_pool_view *view) {
  const uint64_t words = view_hash(view);
  for (uint64_t i = line->len; i-- > 0 && line->published[i].sequence >= view->sequence;)
    if (line->published[i].sequence == view->sequence && line->published[i].words == words)
      return &line->published[i];
  return NULL;
}

/* How streams may end when both sides are honest. */
static bool end_is_right(const sim_relay *relay, const sim_link *l, const kvrelay_status *end) {
  switch (end->reason) {
  case KVRELAY_REASON_NONE:
  case KVRELAY_REASON_POOL_NOT_FOUND:
  case KVRELAY_REASON_PRODUCER_CHANGED:
  case KVRELAY_REASON_PUBLICATION_UNAVAILABLE:
    return true;
  case KVRELAY_REASON_SUBSCRIBER_LAGGED:
  case KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT:
    return l->slow;
  case KVRELAY_REASON_RESOURCE_LIMIT:
    return relay->few_hubs;
  default:
    return false;
  }
}

/* The prompt's leading blocks in these words: what the naive walk finds where nothing is held
 * behind its end.  Where something is, the search may jump over the hole (ckf.h, ckf_search). */
static uint32_t scan(sim *s, const kvrelay_pool_view *view, const uint64_t *keys) {
  const kvrelay_ckf_format *const f = &view->descriptor->producer.ckf_format;
  const ckf_format format = {f->seed, f->bucket_count};
  uint32_t held = 0, walk = 0;
  for (uint32_t i = 0; i < SIM_DEPTH; i++)
    held |= ckf_search(&format, view->words, &keys[i], 1) << i;
  while (held >> walk & 1)
    walk++;
  if (held >> walk == 0)
    return walk;
  const uint32_t depth = ckf_search(&format, view->words, keys, SIM_DEPTH);
  if (depth < walk || (depth > walk && !(held >> (depth - 1) & 1)))
    sim_fail(s, "%u leading blocks of a prompt are %u", walk, depth);
  sim_count(s, SIM_HOLED);
  return depth;
}

/* ---- readiness and load ---- */

static uint32_t role_set(kvrelay_roles roles) {
  uint32_t set = 0;
  for (size_t i = 0; i < roles.len; i++)
    set |= UINT32_C(1) << roles.ptr[i];
  return set;
}

static bool text_is(kvrelay_text text, const char *z) {
  return text.len == strlen(z) && memcmp(text.ptr, z, text.len) == 0;
}

/* Only a pool's endpoint is linked to it, and to no other. */
static sim_ready entry_read(const sim_pool *p, const kvrelay_topology_entry *e) {
  sim_ready out = {.there = true, .state = e->state};
  out.present = role_set(e->present_roles);
  out.missing = role_set(e->missing_roles);
  out.duplicates = role_set(e->duplicate_role_endpoints);
  for (size_t i = 0; i < e->members_len; i++)
    for (uint32_t k = 0; k < SIM_SITES; k++)
      if (text_is(e->members[i].endpoint.endpoint, p->endpoints[k]))
        out.members |= (e->members[i].pool_id.present && k != 0) ? 1u << 31 : 1u << k;
  for (size_t i = 0; i < e->members_len; i++)
    out.linked |= kvrelay_pool_id_equal(&e->members[i].pool_id, &p->descriptor.producer.pool_id);
  return out;
}

static sim_ready image_read(const kvrelay_consumer *c, uint32_t len, const sim_pool *p) {
  sim_ready out;
  kvrelay_entry_view view;
  memset(&out, 0, sizeof out);
  for (uint32_t i = 0; i < len; i++)
    if (kvrelay_consumer_readiness_get(c, i, &view) == KVRELAY_OK &&
        text_is(view.entry->canonical_model_id, p->model) &&
        view.verdict.class_ == KVRELAY_CLASS_OK)
      out = entry_read(p, view.entry);
  return out;
}

static void count_ready(sim *s, const sim_ready *ready) {
  if (ready->state == KVRELAY_READY_READY)
    sim_count(s, SIM_READY);
  if (ready->missing)
    sim_count(s, SIM_READY_MISSING);
  if (ready->duplicates)
    sim_count(s, SIM_READY_TWICE);
  if (ready->there && ready->state == KVRELAY_READY_UNKNOWN)
    sim_count(s, SIM_READY_UNKNOWN);
  if (ready->there && !ready->linked)
    sim_count(s, SIM_READY_UNLINKED);
}

/* An image is what its revision stands for, older than nothing that was seen before, and no younger
 * than the reader's last look. */
static void check_image(sim *s, uint32_t r, uint32_t c) {
  const sim_relay *const relay = &s->relays[r];
  sim_link *const l = &s->links[r][c];
  kvrelay_plane_view plane;
  uint32_t there = 0;
  if (!kvrelay_consumer_readiness(&l->consumer, s->now, &plane))
    return;
  if (plane.revision >= relay->images_len || plane.revision < l->revision) {
    sim_fail(s, "relay %u, consumer %u: readiness %llu after %llu", r, c,
             (unsigned long long)plane.revision, (unsigned long long)l->revision);
    return;
  }
  l->revision = plane.revision;
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    const sim_ready *const right = &relay->images[plane.revision].pools[i];
    const sim_ready ready = image_read(&l->consumer, plane.len, &relay->pools[i]);
    there += right->there;
    count_ready(s, &ready);
    if (!sim_planes_same(&ready, right))
      sim_fail(s, "relay %u, consumer %u: %s at %llu: state %d, not %d, roles %x-%x-%x, members %x",
               r, c, relay->pools[i].model, (unsigned long long)plane.revision, ready.state,
               right->state, ready.present, ready.missing, ready.duplicates, ready.members);
  }
  if (plane.len != there)
    sim_fail(s, "relay %u, consumer %u: a model nobody has", r, c);
  if (plane.stale != (plane.age_ns > 30 * SIM_SECOND) ||
      (l->hold_until && plane.age_ns < s->now - l->held_from))
    sim_fail(s, "relay %u, consumer %u: readiness is %llu ms old", r, c,
             (unsigned long long)(plane.age_ns / SIM_MS));
  if (plane.stale)
    sim_count(s, SIM_READY_STALE);
  sim_count(s, SIM_IMAGE);
}

/* The load of a producer in a window; NULL: it was not there yet. */
static const sim_load *load_of(const sim_line *line, uint64_t window) {
  for (size_t i = line->loads_len; i-- > 0;)
    if (line->loads[i].window <= window)
      return &line->loads[i];
  return NULL;
}

static bool load_useful(const sim_load *load) {
  return load->expected != 0 && load->observed == load->expected && load->total != 0;
}

static void check_load_entry(sim *s, uint32_t r, uint32_t c, uint32_t i, uint64_t window) {
  kvrelay_load_view view;
  if (kvrelay_consumer_load_get(&s->links[r][c].consumer, i, &view) != KVRELAY_OK) {
    sim_fail(s, "load entry %u is not there", i);
    return;
  }
  const sim_line *const line = line_of(s, &view.entry->producer);
  const sim_load *const load = line ? load_of(line, window) : NULL;
  if (!load || view.verdict.class_ != KVRELAY_CLASS_OK ||
      view.entry->kv_used_blocks != load->used || view.entry->total_kv_blocks != load->total ||
      view.entry->kv_observed_ranks != load->observed ||
      view.entry->kv_expected_ranks != load->expected || view.usable != load_useful(load))
    sim_fail(s, "relay %u, consumer %u: another load than in window %llu", r, c,
             (unsigned long long)window);
  else if (load_useful(load) && load->used == UINT64_MAX)
    sim_count(s, SIM_LOAD_SATURATED);
}

static void check_window(sim *s, uint32_t r, uint32_t c) {
  const sim_relay *const relay = &s->relays[r];
  sim_link *const l = &s->links[r][c];
  kvrelay_plane_view plane;
  uint32_t there = 0;
  if (!kvrelay_consumer_load(&l->consumer, s->now, &plane))
    return;
  if (plane.revision > relay->windows || plane.revision < l->window)
    sim_fail(s, "relay %u, consumer %u: load window %llu after %llu", r, c,
             (unsigned long long)plane.revision, (unsigned long long)l->window);
  l->window = plane.revision;
  for (uint32_t i = 0; i < plane.len; i++)
    check_load_entry(s, r, c, i, plane.revision);
  for (uint32_t i = 0; i < s->plan.pools; i++)
    there += relay->pools[i].pool && load_of(&s->lines[relay->pools[i].line], plane.revision);
  if (plane.len < there)
    sim_fail(s, "relay %u, consumer %u: no load of a pool", r, c);
  if (plane.stale != (plane.age_ns > 3 * SIM_SECOND) ||
      (l->hold_until && plane.age_ns < s->now - l->held_from))
    sim_fail(s, "relay %u, consumer %u: load is %llu ms old", r, c,
             (unsigned long long)(plane.age_ns / SIM_MS));
  if (plane.stale)
    sim_count(s, SIM_LOAD_STALE);
  sim_count(s, SIM_WINDOW);
}

/* What a pool is told of the two: what is void, stale or incomplete is unknown. */
static void check_serving(sim *s, uint32_t r, uint32_t c, const sim_line *line,
                          const kvrelay_pool_view *view) {
  const sim_relay *const relay = &s->relays[r];
  const kvrelay_consumer *const consumer = &s->links[r][c].consumer;
  const kvrelay_serving_view *const v = &view->serving;
  kvrelay_plane_view plane;
  int32_t state = KVRELAY_READY_UNKNOWN;
  const sim_load *load = NULL;
  if (kvrelay_consumer_readiness(consumer, s->now, &plane) && plane.age_ns <= 30 * SIM_SECOND &&
      plane.revision < relay->images_len)
    for (uint32_t i = 0; i < s->plan.pools; i++)
      if (text_is(view->descriptor->registrations[0].canonical_model_id, relay->pools[i].model))
        state = relay->images[plane.revision].pools[i].state;
  if (kvrelay_consumer_load(consumer, s->now, &plane) && plane.age_ns <= 3 * SIM_SECOND)
    load = load_of(line, plane.revision);
  /* Of a pool that was withdrawn since the load may be left out. */
  const bool known = load && load_useful(load), may_lack = line->withdrawn;
  if (v->readiness != state || (v->load_known != known && !(may_lack && !v->load_known)) ||
      (v->load_known && known &&
       (v->kv_used_blocks != load->used || v->total_kv_blocks != load->total)) ||
      (!v->load_known && (v->kv_used_blocks != 0 || v->total_kv_blocks != 0)))
    sim_fail(s, "relay %u, consumer %u: a pool is served in state %d, not %d, its load %sknown", r,
             c, v->readiness, state, v->load_known ? "" : "un");
  sim_count(s, v->load_known ? SIM_LOAD_KNOWN : SIM_LOAD_UNKNOWN);
}

/* ---- pools ---- */

static void check_pool(sim *s, uint32_t r, uint32_t c, const kvrelay_pool_view *view) {
  const sim_line *const line = line_of(s, &view->descriptor->producer);
  const sim_link *const l = &s->links[r][c];
  if (!line) {
    sim_fail(s, "relay %u, consumer %u: a producer nobody had", r, c);
    return;
  }
  if (view->fault != KVRELAY_FAULT_NONE || view->verdict.class_ != KVRELAY_CLASS_OK ||
      view->state == KVRELAY_REPLICA_QUARANTINED)
    sim_fail(s, "relay %u, consumer %u: an honest pool in state %d, fault %d", r, c, view->state,
             view->fault);
  if (!end_is_right(&s->relays[r], l, &view->last_end))
    sim_fail(s, "relay %u, consumer %u: a stream ended with %s: %s", r, c,
             kvrelay_reason_name(view->last_end.reason), view->last_end.text);
  check_serving(s, r, c, line, view);
  if (view->state != KVRELAY_REPLICA_LIVE)
    return;
  const sim_published *const published = published_of(line, view);
  if (!published) {
    sim_fail(s, "relay %u, consumer %u: other words than were published at %llu", r, c,
             (unsigned long long)view->sequence);
    return;
  }
  sim_count(s, SIM_REPLICA);
}

void sim_check_link(sim *s, uint32_t r, uint32_t c) {
  sim_link *const l = &s->links[r][c];
  const uint64_t incarnation = s->relays[r].cfg.identity.relay_incarnation;
  uint64_t revision;
  uint32_t pools = 0;
  if (l->incarnation != incarnation)
    l->revision = l->window = 0;
  l->incarnation = incarnation;
  check_image(s, r, c);
  check_window(s, r, c);
  if (!kvrelay_consumer_catalog(&l->consumer, &revision, &pools))
    return;
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view view;
    if (kvrelay_consumer_pool_get(&l->consumer, i, s->now, &view) != KVRELAY_OK)
      sim_fail(s, "pool %u of %u is not there", i, pools);
    else
      check_pool(s, r, c, &view);
  }
}

/* ---- questions ---- */

/* What one relay's consumer has to say of a model: the naive walk over words that were published.
 */
typedef struct sim_right {
  int outcome;
  kvrelay_answer answer;
} sim_right;

static sim_right right_of(sim *s, uint32_t r, uint32_t c, const sim_pool *p, uint32_t t) {
  const kvrelay_consumer *const consumer = &s->links[r][c].consumer;
  sim_right out = {KVRELAY_ERR_STATE, {.consumer = r, .state = KVRELAY_ANSWER_UNKNOWN}};
  kvrelay_pool_view view;
  uint64_t revision;
  uint32_t pools = 0;
  if (!kvrelay_consumer_catalog(consumer, &revision, &pools))
    return out;
  out.outcome = KVRELAY_ERR_NOT_FOUND;
  for (uint32_t i = 0; i < pools; i++) {
    if (kvrelay_consumer_pool_get(consumer, i, s->now, &view) != KVRELAY_OK ||
        !text_is(view.descriptor->registrations[0].canonical_model_id, p->model))
      continue;
    out.outcome = KVRELAY_OK;
    out.answer.pool = i;
    out.answer.serving = view.serving;
    if (view.state != KVRELAY_REPLICA_LIVE)
      continue;
    out.answer.state = KVRELAY_ANSWER_KNOWN;
    out.answer.depth_blocks = scan(s, &view, p->keys[t]);
    const sim_line *const line = line_of(s, &view.descriptor->producer);
    const sim_published *const published = line ? published_of(line, &view) : NULL;
    if (published && out.answer.depth_blocks < published->depths[t])
      sim_fail(s, "relay %u, consumer %u, %s: %u blocks of a prompt are %llu", r, c, p->model,
               published->depths[t], (unsigned long long)out.answer.depth_blocks);
  }
  return out;
}

/* Known, deep and ready ones first, then those of earlier relays. */
static bool goes_before(const kvrelay_answer *a, const kvrelay_answer *b) {
  const bool known = a->state == KVRELAY_ANSWER_KNOWN;
  if (a->state != b->state)
    return known;
  if (known && a->depth_blocks != b->depth_blocks)
    return a->depth_blocks > b->depth_blocks;
  const bool ready = a->serving.readiness == KVRELAY_READY_READY;
  return ready != (b->serving.readiness == KVRELAY_READY_READY) ? ready : a->consumer < b->consumer;
}

static void compare_answer(sim *s, uint32_t c, const sim_pool *p, const kvrelay_answer *is,
                           const kvrelay_answer *right) {
  const bool known = right->state == KVRELAY_ANSWER_KNOWN;
  sim_count(s, known ? SIM_KNOWN : SIM_UNKNOWN);
  if (is->consumer != right->consumer || is->pool != right->pool || is->state != right->state ||
      is->block_size != SIM_BLOCK || is->complete_blocks != SIM_DEPTH ||
      (known && is->depth_blocks != right->depth_blocks) ||
      is->serving.readiness != right->serving.readiness ||
      is->serving.load_known != right->serving.load_known)
    sim_fail(s, "consumer %u, %s: relay %u says %llu (state %d), not relay %u %llu (state %d)", c,
             p->model, is->consumer, (unsigned long long)is->depth_blocks, is->state,
             right->consumer, (unsigned long long)right->depth_blocks, right->state);
}

static void ask(sim *s, uint32_t c, const sim_pool *p, uint32_t t) {
  const kvrelay_consumer *consumers[SIM_RELAYS_CAP];
  kvrelay_answer is[SIM_RELAYS_CAP], right[SIM_RELAYS_CAP];
  int outcomes[SIM_RELAYS_CAP];
  uint64_t scratch[SIM_DEPTH];
  ptrdiff_t n = 0, none = KVRELAY_ERR_NOT_FOUND;
  const kvrelay_text model = {(const uint8_t *)p->model, strlen(p->model)};
  const kvrelay_query q = {model, {NULL, 0}, {NULL, 0}, p->tokens[t], SIM_DEPTH * SIM_BLOCK};
  for (uint32_t r = 0; r < s->plan.relays; r++)
    consumers[r] = &s->links[r][c].consumer;
  const ptrdiff_t len = kvrelay_consumers_query(consumers, s->plan.relays, &q, is, SIM_RELAYS_CAP,
                                                outcomes, scratch, SIM_DEPTH, s->now);
  for (uint32_t r = 0; r < s->plan.relays; r++) {
    const sim_right one = right_of(s, r, c, p, t);
    ptrdiff_t at = n;
    if (outcomes[r] != one.outcome)
      sim_fail(s, "consumer %u, %s: relay %u contributes %d, not %d", c, p->model, r, outcomes[r],
               one.outcome);
    if (one.outcome != KVRELAY_OK) {
      none = one.outcome == KVRELAY_ERR_STATE ? KVRELAY_ERR_STATE : none;
      sim_count(s, one.outcome == KVRELAY_ERR_STATE ? SIM_NO_CATALOG : SIM_NO_POOL);
      continue;
    }
    for (n++; at > 0 && goes_before(&one.answer, &right[at - 1]); at--)
      right[at] = right[at - 1];
    right[at] = one.answer;
  }
  sim_count(s, SIM_QUESTION);
  if (len != (n ? n : none))
    sim_fail(s, "consumer %u, %s: %td answers, not %td", c, p->model, len, n ? n : none);
  for (ptrdiff_t i = 0; i < n && len == n; i++)
    compare_answer(s, c, p, &is[i], &right[i]);
  if (n == 0)
    return;
  sim_count(s, SIM_SHORT_SCRATCH);
  if (kvrelay_consumers_query(consumers, s->plan.relays, &q, is, SIM_RELAYS_CAP, NULL, scratch,
                              SIM_DEPTH - 1, s->now) != KVRELAY_ERR_NOSPACE)
    sim_fail(s, "consumer %u: hashes in too little room", c);
}

void sim_check_answers(sim *s, uint32_t c) {
  const uint32_t pools = s->plan.pools, first = sim_below(s, pools);
  for (uint32_t i = 0; i < pools && i < 4; i++)
    ask(s, c, &s->relays[0].pools[(first + i) % pools], sim_below(s, SIM_PROMPTS));
}

/* ---- the end ---- */

/* Are both planes the relay's last word? */
static bool planes_settled(const sim *s, uint32_t r, const kvrelay_consumer *c) {
  const sim_relay *const relay = &s->relays[r];
  kvrelay_plane_view plane;
  if (!kvrelay_consumer_load(c, s->now, &plane) || plane.stale ||
      plane.revision + 1 < relay->windows)
    return false;
  if (!kvrelay_consumer_readiness(c, s->now, &plane) || plane.stale)
    return false;
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    const sim_ready is = image_read(c, plane.len, &relay->pools[i]);
    const sim_ready right = sim_planes_judge(&relay->pools[i]);
    if (!sim_planes_same(&is, &right))
      return false;
  }
  return true;
}

/* Is every pool that there is live in every replica, at its last sequence, and no other? */
static bool link_settled(const sim *s, uint32_t r, uint32_t c) {
  const sim_relay *const relay = &s->relays[r];
  const sim_link *const l = &s->links[r][c];
  uint64_t revision;
  uint32_t pools = 0, published = 0, live = 0;
  for (uint32_t i = 0; i < s->plan.pools; i++)
    published += relay->pools[i].pool != NULL;
  if (!relay->front.to || !kvrelay_consumer_catalog(&l->consumer, &revision, &pools) ||
      pools != published || !planes_settled(s, r, &l->consumer))
    return false;
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view view;
    if (kvrelay_consumer_pool_get(&l->consumer, i, s->now, &view) != KVRELAY_OK)
      return false;
    const sim_line *const line = line_of(s, &view.descriptor->producer);
    if (line && !line->withdrawn && view.state == KVRELAY_REPLICA_LIVE &&
        published_of(line, &view) == &line->published[line->len - 1])
      live++;
  }
  return live == published || l->starved || relay->few_hubs;
}

bool sim_settled(sim *s) {
  for (uint32_t r = 0; r < s->plan.relays; r++) {
    if (!sim_relay_settled(s, r))
      return false;
    for (uint32_t c = 0; c < s->plan.consumers; c++)
      if (!link_settled(s, r, c))
        return false;
  }
  return true;
}
