/* SPDX-License-Identifier: Apache-2.0 */
/* Relays, their pools, and the engines whose blocks these hold. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the front ---- */

static int front_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path,
                      size_t path_len, uint64_t now_ns, void **handle, kvrelay_status *status) {
  kvrelay_service *const to = ((sim_front *)self)->to;
  if (to)
    return to->open(to, call, path, path_len, now_ns, handle, status);
  memset(status, 0, sizeof *status);
  status->grpc = KVRELAY_GRPC_UNAVAILABLE;
  return KVRELAY_ERR_REFUSED;
}

static int front_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                         uint64_t now_ns, kvrelay_status *status) {
  kvrelay_service *const to = ((sim_front *)self)->to;
  return to->message(to, handle, bytes, len, now_ns, status);
}

static int front_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                            kvrelay_status *status) {
  kvrelay_service *const to = ((sim_front *)self)->to;
  return to->half_close(to, handle, now_ns, status);
}

static bool front_admitted(kvrelay_service *self, void *handle) {
  kvrelay_service *const to = ((sim_front *)self)->to;
  return to->admitted(to, handle);
}

static int front_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                      kvrelay_status *status) {
  kvrelay_service *const to = ((sim_front *)self)->to;
  return to->pull(to, handle, now_ns, parts, status);
}

static void front_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  kvrelay_service *const to = ((sim_front *)self)->to;
  to->close(to, handle, now_ns);
}

/* ---- pools ---- */

void sim_depths(const sim_pool *p, uint8_t depths[SIM_PROMPTS]) {
  uint64_t known = 0;
  for (uint32_t i = 0; i < SIM_ENGINES; i++)
    known |= p->engines[i].known;
  for (uint32_t t = 0; t < SIM_PROMPTS; t++)
    for (depths[t] = 0; depths[t] < SIM_DEPTH && (known >> p->number[t][depths[t]] & 1);)
      depths[t]++;
}

/* Prompts branch off each other at random depths. */
static void pool_prompts(sim *s, sim_pool *p) {
  uint32_t numbers = 0;
  for (uint32_t t = 0; t < SIM_PROMPTS; t++) {
    const uint32_t of = t ? sim_below(s, t) : 0, shared = t ? sim_below(s, SIM_DEPTH) : 0;
    size_t n;
    for (uint32_t i = 0; i < SIM_DEPTH * SIM_BLOCK; i++)
      p->tokens[t][i] = i < shared * SIM_BLOCK ? p->tokens[of][i] : (uint32_t)sim_draw(s);
    if (hashfmt_blocks(HASHFMT_FORMAT_STANDARD, SIM_BLOCK, hashfmt_seed(NULL, 0, NULL, 0),
                       p->tokens[t], SIM_DEPTH * SIM_BLOCK, p->locals[t], p->keys[t], SIM_DEPTH,
                       &n) != HASHFMT_OK ||
        n != SIM_DEPTH)
      sim_fail(s, "a prompt cannot be hashed");
    for (uint32_t i = 0; i < SIM_DEPTH; i++) {
      p->number[t][i] = i < shared ? p->number[of][i] : numbers++;
      p->number_keys[p->number[t][i]] = p->keys[t][i];
    }
  }
}

/* The same model in another place. */
static void pool_prompts_like(sim_pool *p, const sim_pool *other) {
  memcpy(p->tokens, other->tokens, sizeof p->tokens);
  memcpy(p->locals, other->locals, sizeof p->locals);
  memcpy(p->keys, other->keys, sizeof p->keys);
  memcpy(p->number, other->number, sizeof p->number);
  memcpy(p->number_keys, other->number_keys, sizeof p->number_keys);
}

static void pool_describe(uint32_t r, uint32_t i, sim_pool *p) {
  static const int32_t role[] = {KVRELAY_ROLE_AGGREGATED};
  kvrelay_descriptor *const d = &p->descriptor;
  kvrelay_pool_id *const id = &d->producer.pool_id;
  memset(d, 0, sizeof *d);
  memset(&p->registration, 0, sizeof p->registration);
  for (uint32_t k = 0; k < SIM_SITES; k++)
    snprintf(p->endpoints[k], sizeof p->endpoints[k], "e%u-%u", i, k);
  snprintf(p->model, sizeof p->model, "m%u", i);
  d->producer.present = id->present = id->domain.present = true;
  id->identity_version = 1;
  id->dc_id = r + 1;
  id->domain.cache_semantics =
      (kvrelay_digest){true, {(uint8_t)i, 1}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  id->domain.routing_scope =
      (kvrelay_digest){true, {(uint8_t)i, 2}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  d->serving_endpoint = sim_planes_endpoint(p, 0);
  p->registration.canonical_model_id = (kvrelay_text){(const uint8_t *)p->model, strlen(p->model)};
  p->registration.target =
      (kvrelay_target){true, KVRELAY_TARGET_BASE, p->registration.canonical_model_id, {NULL, 0}};
  d->registrations = &p->registration;
  d->registrations_len = 1;
  d->query_semantics = (kvrelay_semantics){true, SIM_BLOCK, HASHFMT_FORMAT_STANDARD};
  d->pool_roles = (kvrelay_roles){role, 1};
}

static uint64_t words_hash(const sim_pool *p) {
  return hashfmt_hash64((const uint8_t *)ckf_producer_words(&p->state),
                        8 * (size_t)ckf_producer_format(&p->state)->bucket_count, 0);
}

/* Writes down what the pool's last sequence stands for.  Where pools share hubs, one may lose its
 * hub and get another within a turn: words change behind a hub that was there before and after. */
static void pool_note(sim *s, const sim_relay *relay, sim_pool *p) {
  sim_line *const line = &s->lines[p->line];
  const sim_published *const last = line->len == 0 ? NULL : &line->published[line->len - 1];
  sim_published now = {.sequence = kvrelay_pool_sequence(p->pool)};
  const bool same = last && now.sequence == last->sequence;
  if (same && p->pool->hub_ && (!relay->few_hubs || ckf_producer_has_pending(&p->state)))
    return;
  if (!same && now.sequence != (last ? last->sequence + 1 : 0)) {
    sim_fail(s, "sequence %llu follows %llu", (unsigned long long)now.sequence,
             last ? (unsigned long long)last->sequence : 0);
    return;
  }
  now.words = words_hash(p);
  if (same && now.words == last->words)
    return;
  sim_depths(p, now.depths);
  line->published = sim_grow(line->published, line->len, &line->cap, sizeof now);
  line->published[line->len++] = now;
}

static void pool_publish(sim *s, uint32_t r, uint32_t i) {
  sim_relay *const relay = &s->relays[r];
  sim_pool *const p = &relay->pools[i];
  pool_describe(r, i, p);
  const size_t len = kvrelay_relay_pool_mem_size(&relay->relay, &p->descriptor);
  p->pool_mem = sim_alloc(s, len);
  if (kvrelay_relay_pool_add(&relay->relay, &p->descriptor, &p->state, p->pool_mem, len - 1, s->now,
                             &p->pool) != KVRELAY_ERR_NOSPACE)
    sim_fail(s, "a pool is published in too little memory");
  sim_count(s, SIM_SHORT_MEMORY);
  const int err = kvrelay_relay_pool_add(&relay->relay, &p->descriptor, &p->state, p->pool_mem, len,
                                         s->now, &p->pool);
  if (err != KVRELAY_OK) {
    sim_fail(s, "a pool cannot be published: %s", kvrelay_strerror(err));
    return;
  }
  s->lines = sim_grow(s->lines, s->lines_len, &s->lines_cap, sizeof *s->lines);
  p->line = s->lines_len++;
  memset(&s->lines[p->line], 0, sizeof s->lines[p->line]);
  s->lines[p->line].producer = kvrelay_pool_descriptor(p->pool)->producer;
  pool_note(s, relay, p);
  sim_planes_publish(s, p);
  for (uint32_t k = 0; k < SIM_ENGINES; k++)
    sim_engine_follow(s, p, &p->engines[k]);
}

static void pool_withdraw(sim *s, uint32_t r, uint32_t i) {
  sim_pool *const p = &s->relays[r].pools[i];
  if (!p->pool)
    return;
  for (uint32_t k = 0; k < SIM_ENGINES; k++)
    sim_engine_leave(s, &p->engines[k]);
  kvrelay_relay_pool_remove(&s->relays[r].relay, p->pool, s->now);
  s->lines[p->line].withdrawn = true;
  memset(p->pool_mem, 0xA5, 64); /* nobody may look at it any more */
  sim_free(s, p->pool_mem);
  sim_free(s, p->ranks_mem);
  p->pool_mem = p->ranks_mem = NULL;
  p->pool = NULL;
}

static void pool_state(sim *s, sim_pool *p) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = 64u << sim_below(s, 6);
  cfg.tags = true;
  const size_t len = ckf_producer_mem_size(&cfg);
  p->state_mem = sim_alloc(s, len);
  if (ckf_producer_init(&p->state, &cfg, p->state_mem, len - 1) != CKF_ERR_NOSPACE ||
      ckf_producer_init(&p->state, &cfg, p->state_mem, len) != CKF_OK)
    sim_fail(s, "a producer cannot be made, or in too little memory");
  sim_count(s, SIM_SHORT_MEMORY);
  for (uint32_t i = 0; i < SIM_ENGINES; i++)
    p->engines[i].known = 0;
}

/* ---- a relay's life ---- */

static void relay_up(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  kvrelay_relay_service_config service = kvrelay_relay_service_config_default(&relay->relay);
  relay->cfg.identity.relay_incarnation = ++s->incarnation;
  const size_t len = kvrelay_relay_mem_size(&relay->cfg);
  relay->mem = sim_alloc(s, len);
  sim_count(s, SIM_SHORT_MEMORY);
  if (kvrelay_relay_init(&relay->relay, &relay->cfg, relay->mem, len - 1, s->now) !=
          KVRELAY_ERR_NOSPACE ||
      kvrelay_relay_init(&relay->relay, &relay->cfg, relay->mem, len, s->now) != KVRELAY_OK ||
      kvrelay_relay_service_open(&service, &relay->service) != KVRELAY_TRANSPORT_OK) {
    sim_fail(s, "a relay cannot be made, or in too little memory");
    return;
  }
  relay->front.to = kvrelay_relay_service_base(relay->service);
  relay->down_until = 0;
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    pool_state(s, &relay->pools[i]);
    pool_publish(s, r, i);
  }
  sim_planes_up(s, r);
}

/* Its connections are gone by now. */
static void relay_down(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    pool_withdraw(s, r, i);
    sim_free(s, relay->pools[i].state_mem);
    relay->pools[i].state_mem = NULL;
  }
  const kvrelay_relay_stats stats = kvrelay_relay_stats_get(&relay->relay);
  if (stats.catalog_streams + stats.pool_streams + stats.readiness_streams + stats.load_streams !=
      0)
    sim_fail(s, "relay %u: a permit was not returned", r);
  s->counts[SIM_END_NOT_FOUND] += stats.refused[KVRELAY_REASON_POOL_NOT_FOUND];
  s->counts[SIM_END_LIMIT] += stats.refused[KVRELAY_REASON_RESOURCE_LIMIT];
  s->counts[SIM_END_LAGGED] += stats.lagged;
  s->counts[SIM_END_PROGRESS] += stats.progress_timeouts;
  kvrelay_relay_service_close(relay->service);
  relay->front.to = NULL;
  sim_planes_down(s, r);
  sim_free(s, relay->mem);
  relay->mem = NULL;
}

void sim_relay_open(sim *s, uint32_t r) {
  static const sim_front front = {
      {front_open, front_message, front_half_close, front_admitted, front_pull, front_close}, NULL};
  sim_relay *const relay = &s->relays[r];
  kvrelay_relay_config *const cfg = &relay->cfg;
  relay->front = front;
  *cfg = kvrelay_relay_config_default();
  cfg->identity.drt_instance_id = r + 100;
  cfg->max_pools = SIM_POOLS_CAP;
  cfg->max_members = SIM_POOLS_CAP * SIM_SITES;
  cfg->max_bucket_count = 1024;
  cfg->max_catalog_subscribers = cfg->max_subscribers_per_pool = SIM_CONSUMERS_CAP;
  cfg->max_pool_streams = SIM_CONSUMERS_CAP * SIM_POOLS_CAP;
  cfg->chunk_buckets = 64u << sim_below(s, 4);
  cfg->queue_frames = 2u << sim_below(s, 6);
  cfg->encoding_concurrency = 1 + sim_below(s, 4);
  cfg->max_hubs = sim_once(s, 4) ? 1 + sim_below(s, s->plan.pools) : 64;
  relay->few_hubs = cfg->max_hubs < s->plan.pools;
  if (relay->few_hubs)
    sim_count(s, SIM_FEW_HUBS);
  cfg->snapshot_progress_ns = (500 + sim_below(s, 4000)) * SIM_MS;
  cfg->load_windows = 2u << sim_below(s, 4);
  cfg->publication_threshold = 1 + sim_below(s, 20);
  cfg->publication_delay_ns = (1 + sim_below(s, 100)) * SIM_MS;
  for (uint32_t i = 0; i < s->plan.pools; i++) {
    if (r == 0)
      pool_prompts(s, &relay->pools[i]);
    else
      pool_prompts_like(&relay->pools[i], &s->relays[0].pools[i]);
    for (uint32_t k = 0; k < SIM_ENGINES; k++)
      sim_engine_open(s, &relay->pools[i].engines[k], 40 + k);
  }
  sim_planes_open(s, r);
  relay_up(s, r);
}

void sim_relay_close(sim *s, uint32_t r) {
  if (s->relays[r].front.to)
    relay_down(s, r);
  for (uint32_t i = 0; i < s->plan.pools; i++)
    for (uint32_t k = 0; k < SIM_ENGINES; k++)
      sim_engine_close(&s->relays[r].pools[i].engines[k]);
}

/* ---- events ---- */

/* Tells the relay that a source may have changed the pool. */
static void pool_changed(sim *s, uint32_t r, sim_pool *p) {
  sim_relay *const relay = &s->relays[r];
  const int err = sim_once(s, 8) ? kvrelay_relay_pool_publish(&relay->relay, p->pool, s->now)
                                 : kvrelay_relay_pool_changed(&relay->relay, p->pool, s->now);
  if (err != KVRELAY_OK)
    sim_fail(s, "publication: %s", kvrelay_strerror(err));
  pool_note(s, relay, p);
}

static void pool_step(sim *s, uint32_t r, uint32_t i) {
  sim_pool *const p = &s->relays[r].pools[i];
  sim_engine_step(s, p, &p->engines[sim_below(s, SIM_ENGINES)]);
  if (!s->relays[r].front.to)
    return;
  sim_planes_step(s, r, i);
  if (p->pool) {
    pool_changed(s, r, p);
    if (!s->calm && sim_once(s, 400)) {
      sim_count(s, SIM_WITHDRAWN);
      pool_withdraw(s, r, i);
    }
  } else if (sim_once(s, 4)) {
    sim_count(s, SIM_PUBLISHED);
    sim_free(s, p->state_mem);
    pool_state(s, p);
    pool_publish(s, r, i);
  }
}

void sim_relay_step(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  if (!relay->front.to && s->now >= relay->down_until) {
    relay_up(s, r);
    return;
  }
  if (relay->front.to && !s->calm && sim_once(s, 1500)) {
    const bool orderly = sim_once(s, 2);
    sim_count(s, orderly ? SIM_STOPPED : SIM_CRASHED);
    if (orderly) { /* an orderly stop: streams end with OK before connections do */
      kvrelay_relay_shutdown(&relay->relay, s->now);
      (void)sim_relay_turn(s, r);
      for (uint32_t c = 0; c < s->plan.consumers; c++)
        (void)sim_link_turn(s, r, c);
    }
    for (uint32_t c = 0; c < s->plan.consumers; c++)
      kvrelay_mem_cut(s->links[r][c].mem);
    relay_down(s, r);
    relay->down_until = s->now + sim_below(s, 40000) * SIM_MS;
    return;
  }
  pool_step(s, r, sim_below(s, s->plan.pools));
}

bool sim_relay_turn(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  if (relay->front.to) {
    kvrelay_relay_service_poll(relay->service, s->now);
    sim_planes_note(s, r);
  }
  for (uint32_t i = 0; i < s->plan.pools; i++)
    if (relay->pools[i].pool) {
      if (kvrelay_pool_fenced(relay->pools[i].pool) != KVRELAY_OK)
        sim_fail(s, "a producer was fenced");
      pool_note(s, relay, &relay->pools[i]);
    }
  for (uint32_t i = 0; i < s->plan.pools * SIM_ENGINES; i++) {
    sim_pool *const p = &relay->pools[i / SIM_ENGINES];
    if (!sim_engine_turn(s, p, &p->engines[i % SIM_ENGINES]))
      continue;
    if (p->pool)
      pool_changed(s, r, p);
    return true;
  }
  return false;
}

void sim_relay_calm(sim *s, uint32_t r) {
  sim_relay *const relay = &s->relays[r];
  relay->down_until = 0;
  if (!relay->front.to)
    sim_relay_step(s, r);
  sim_planes_calm(s, r);
  for (uint32_t i = 0; i < s->plan.pools; i++)
    for (uint32_t k = 0; k < SIM_ENGINES; k++) {
      sim_engine *const e = &relay->pools[i].engines[k];
      sim_engine_step(s, &relay->pools[i], e);
      if (!sim_engine_settled(e))
        sim_engine_nudge(s, &relay->pools[i], e);
    }
}

bool sim_relay_settled(const sim *s, uint32_t r) {
  bool settled = true;
  for (uint32_t i = 0; i < s->plan.pools; i++)
    for (uint32_t k = 0; k < SIM_ENGINES; k++)
      settled &= sim_engine_settled(&s->relays[r].pools[i].engines[k]);
  return settled;
}
