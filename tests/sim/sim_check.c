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

/* The prompt's leading blocks that these words seem to hold. */
static uint32_t scan(const kvrelay_pool_view *view, const uint64_t *keys) {
  const kvrelay_ckf_format *const f = &view->descriptor->producer.ckf_format;
  const ckf_format format = {f->seed, f->bucket_count};
  uint32_t depth = 0;
  while (depth < SIM_DEPTH && ckf_search(&format, view->words, &keys[depth], 1) == 1)
    depth++;
  return depth;
}

/* Asks for one prompt of one pool, and compares with what was published at that sequence. */
static void check_answer(sim *s, uint32_t r, uint32_t c, const kvrelay_pool_view *view,
                         const sim_published *published) {
  const sim_link *const l = &s->links[r][c];
  const kvrelay_text model = view->descriptor->registrations[0].canonical_model_id;
  const uint32_t t = sim_below(s, SIM_PROMPTS);
  const sim_pool *p = NULL;
  uint64_t scratch[SIM_DEPTH];
  kvrelay_answer answer;
  for (uint32_t i = 0; i < s->plan.pools; i++)
    if (strlen(s->relays[r].pools[i].model) == model.len &&
        memcmp(s->relays[r].pools[i].model, model.ptr, model.len) == 0)
      p = &s->relays[r].pools[i];
  const kvrelay_query q = {model, {NULL, 0}, {NULL, 0}, p->tokens[t], SIM_DEPTH * SIM_BLOCK};
  const ptrdiff_t n =
      kvrelay_consumer_query(&l->consumer, &q, &answer, 1, scratch, SIM_DEPTH, s->now);
  if (n != 1 || answer.complete_blocks != SIM_DEPTH) {
    sim_fail(s, "relay %u, consumer %u: query: %td", r, c, n);
    return;
  }
  s->answers++;
  if (answer.state != KVRELAY_ANSWER_KNOWN || answer.depth_blocks < published->depths[t] ||
      answer.depth_blocks < scan(view, p->keys[t]))
    sim_fail(s, "relay %u, consumer %u, %.*s: %u blocks of a prompt are %llu (state %d)", r, c,
             (int)model.len, (const char *)model.ptr, published->depths[t],
             (unsigned long long)answer.depth_blocks, answer.state);
}

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
  if (view->state != KVRELAY_REPLICA_LIVE)
    return;
  const sim_published *const published = published_of(line, view);
  if (!published) {
    sim_fail(s, "relay %u, consumer %u: other words than were published at %llu", r, c,
             (unsigned long long)view->sequence);
    return;
  }
  s->checked++;
  check_answer(s, r, c, view, published);
}

void sim_check_link(sim *s, uint32_t r, uint32_t c) {
  const sim_link *const l = &s->links[r][c];
  uint64_t revision;
  uint32_t pools = 0;
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

/* Is every pool that there is live in every replica, at its last sequence, and no other? */
static bool link_settled(const sim *s, uint32_t r, uint32_t c) {
  const sim_relay *const relay = &s->relays[r];
  const sim_link *const l = &s->links[r][c];
  uint64_t revision;
  uint32_t pools = 0, published = 0, live = 0;
  for (uint32_t i = 0; i < s->plan.pools; i++)
    published += relay->pools[i].pool != NULL;
  if (!relay->front.to || !kvrelay_consumer_catalog(&l->consumer, &revision, &pools) ||
      pools != published)
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
