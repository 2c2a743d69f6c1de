/* SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

/* ---- identities ---- */

static bool digest(const config_map_entry *map, unsigned count, const config_endpoint *e,
                   bool scope, kvrelay_digest *out) {
  kvrelay_map_entry entries[32];
  for (unsigned i = 0; i < count && i < 32; i++) {
    entries[i].key = text_of(map[i].key);
    entries[i].value = text_of(map[i].value);
  }
  kvrelay_endpoint triple = {true, text_of(e->namespace_), text_of(e->component),
                             text_of(e->endpoint)};
  return (scope ? kvrelay_scope_digest(&triple, entries, count, out)
                : kvrelay_cache_digest(text_of(e->model_source), entries, count, e->block_size,
                                       e->hash_format, out)) == KVRELAY_OK;
}

static void fill_pool(plan_pool *p, const config_endpoint *e, uint64_t dc_id, bool *ok) {
  kvrelay_descriptor *d = &p->descriptor;
  kvrelay_pool_id *id = &d->producer.pool_id;
  p->endpoint = e;
  d->producer.present = id->present = id->domain.present = true;
  id->identity_version = 1;
  id->dc_id = dc_id;
  d->serving_endpoint.present = true;
  d->serving_endpoint.namespace_ = text_of(e->namespace_);
  d->serving_endpoint.component = text_of(e->component);
  d->serving_endpoint.endpoint = text_of(e->endpoint);
  d->query_semantics.present = true;
  d->query_semantics.kv_block_size = e->block_size;
  d->query_semantics.hash_format = e->hash_format;
  *ok = digest(e->semantics, e->semantics_count, e, false, &id->domain.cache_semantics) &&
        digest(e->routing_scope, e->routing_scope_count, e, true, &id->domain.routing_scope) && *ok;
}

/* ---- cards ---- */

/* How many there are of everything; what is handed out while they are made. */
typedef struct counts {
  size_t cards, workers, texts, needs;
} counts;

static const kvrelay_text *list_texts(const plan *p, counts *n, char *const *texts,
                                      unsigned count) {
  kvrelay_text *at = p->texts == NULL ? NULL : p->texts + n->texts;
  for (unsigned i = 0; at != NULL && i < count; i++)
    at[i] = text_of(texts[i]);
  n->texts += count;
  return at;
}

static const kvrelay_roles *list_needs(const plan *p, counts *n, const config_worker *w) {
  kvrelay_roles *at = p->needs == NULL ? NULL : p->needs + n->needs;
  for (unsigned i = 0; at != NULL && i < w->needs_count; i++)
    at[i] = (kvrelay_roles){w->needs[i].roles, w->needs[i].len};
  n->needs += w->needs_count;
  return at;
}

static void add_card(const plan *p, counts *n, const kvrelay_card *card) {
  if (p->cards != NULL)
    p->cards[n->cards] = *card;
  n->cards++;
}

static const config_adapter *adapter_named(const config_endpoint *e, const char *id) {
  const config_adapter *a = e->adapters;
  while (strcmp(a->id, id) != 0) /* the configuration's rules: it is there */
    a++;
  return a;
}

static void add_worker(const plan *p, counts *n, const plan_pool *pool, const config_worker *w) {
  const config_endpoint *e = pool->endpoint;
  const size_t first = n->cards;
  kvrelay_card card = {0};
  card.endpoint = pool->descriptor.serving_endpoint;
  card.domain = pool->descriptor.producer.pool_id.domain;
  card.semantics = pool->descriptor.query_semantics;
  card.model_id = text_of(e->model);
  card.aliases = list_texts(p, n, e->aliases, e->aliases_count);
  card.aliases_len = e->aliases_count;
  card.worker_id = w->id;
  card.role = w->role;
  card.needs = list_needs(p, n, w);
  card.needs_len = w->needs_count;
  add_card(p, n, &card);
  card.has_suffix = card.has_lora = true;
  for (unsigned i = 0; i < w->adapters_count; i++) {
    const config_adapter *a = adapter_named(e, w->adapters[i]);
    card.model_id = text_of(a->id);
    card.adapter = text_of(a->runtime_name);
    card.aliases = list_texts(p, n, a->aliases, a->aliases_count);
    card.aliases_len = a->aliases_count;
    add_card(p, n, &card);
  }
  if (p->workers != NULL)
    p->workers[n->workers] = (plan_worker){w, first, n->cards - first};
  n->workers++;
}

/* The cards of all workers; while there is no room for them they are counted. */
static counts add_all(plan *p) {
  counts n = {0};
  for (unsigned i = 0; i < p->pools_count; i++) {
    p->pools[i].first_worker = n.workers;
    for (unsigned k = 0; k < p->pools[i].endpoint->workers_count; k++)
      add_worker(p, &n, &p->pools[i], &p->pools[i].endpoint->workers[k]);
  }
  return n;
}

static bool make_cards(plan *p) {
  const counts n = add_all(p);
  p->cards = calloc(n.cards + 1, sizeof *p->cards);
  p->workers = calloc(n.workers + 1, sizeof *p->workers);
  p->texts = calloc(n.texts + 1, sizeof *p->texts);
  p->needs = calloc(n.needs + 1, sizeof *p->needs);
  if (p->cards == NULL || p->workers == NULL || p->texts == NULL || p->needs == NULL)
    return false;
  (void)add_all(p);
  p->cards_len = n.cards;
  p->workers_len = n.workers;
  p->derived_len = kvrelay_topology_mem_size(p->cards, p->cards_len);
  p->derived = malloc(p->derived_len);
  return p->derived != NULL && kvrelay_topology_derive(p->cards, p->cards_len, p->derived,
                                                       p->derived_len, &p->topology) == KVRELAY_OK;
}

/* ---- what came of them ---- */

static bool has_source(const config_endpoint *e) {
  for (unsigned i = 0; i < e->workers_count; i++)
    if (e->workers[i].events.type != CONFIG_EVENTS_NONE && e->workers[i].ranks != 0)
      return true;
  return false;
}

static const char *endpoint_name(const config_endpoint *e, char out[512]) {
  snprintf(out, 512, "%s/%s/%s", e->namespace_, e->component, e->endpoint);
  return out;
}

static const kvrelay_registration *registered(const kvrelay_endpoint_state *s, const char *id) {
  for (size_t i = 0; i < s->registrations_len; i++)
    if (kvrelay_text_equal(s->registrations[i].canonical_model_id, text_of(id)))
      return &s->registrations[i];
  return NULL;
}

/* Says which of the names of one model are left out. */
static void report_names(const kvrelay_endpoint_state *s, const config_endpoint *e, const char *id,
                         char *const *aliases, unsigned count, FILE *report) {
  const kvrelay_registration *r = registered(s, id);
  char name[512];
  if (r == NULL)
    fprintf(report,
            "warning: %s: the name '%s' has two meanings in this file, so its registration is left "
            "out\n",
            endpoint_name(e, name), id);
  for (unsigned i = 0; r != NULL && i < count; i++) {
    bool kept = strcmp(aliases[i], id) == 0;
    for (size_t k = 0; k < r->aliases_len && !kept; k++)
      kept = kvrelay_text_equal(r->aliases[k], text_of(aliases[i]));
    if (!kept)
      fprintf(report, "warning: %s: the alias '%s' has two meanings in this file and is left out\n",
              endpoint_name(e, name), aliases[i]);
  }
}

static bool carried(const config_endpoint *e, const config_adapter *a) {
  for (unsigned i = 0; i < e->workers_count; i++)
    for (unsigned j = 0; j < e->workers[i].adapters_count; j++)
      if (strcmp(e->workers[i].adapters[j], a->id) == 0)
        return true;
  return false;
}

/* The derivation is ordered by path, the file is not. */
static const kvrelay_endpoint_state *state_of(const plan *p, const kvrelay_endpoint *e) {
  for (size_t i = 0; i < p->topology.endpoints_len; i++) {
    const kvrelay_endpoint *o = &p->topology.endpoints[i].endpoint;
    if (kvrelay_text_equal(o->namespace_, e->namespace_) &&
        kvrelay_text_equal(o->component, e->component) &&
        kvrelay_text_equal(o->endpoint, e->endpoint))
      return &p->topology.endpoints[i];
  }
  return NULL; /* without workers */
}

static void settle(const plan *p, plan_pool *pool, FILE *report) {
  const config_endpoint *e = pool->endpoint;
  const kvrelay_endpoint_state *s = state_of(p, &pool->descriptor.serving_endpoint);
  char name[512];
  if (s == NULL) {
    pool->no_pool = "no workers";
    return;
  }
  pool->descriptor.registrations = s->registrations;
  pool->descriptor.registrations_len = s->registrations_len;
  pool->descriptor.pool_roles = s->roles;
  report_names(s, e, e->model, e->aliases, e->aliases_count, report);
  for (unsigned i = 0; i < e->adapters_count; i++)
    if (carried(e, &e->adapters[i]))
      report_names(s, e, e->adapters[i].id, e->adapters[i].aliases, e->adapters[i].aliases_count,
                   report);
  if (e->block_size == 0)
    pool->no_pool = "no block_size"; /* was told when the file was read */
  else if (s->registrations_len == 0)
    pool->no_pool = "no registration left";
  else if (!has_source(e))
    pool->no_pool = "no worker with valid ranks has an event source";
  else if (!s->fit) {
    pool->no_pool = s->why;
    fprintf(report, "warning: %s gets no pool: %s\n", endpoint_name(e, name), s->why);
  }
}

/* ---- the whole file ---- */

plan *plan_make(const config *c, FILE *report) {
  plan *p = calloc(1, sizeof *p);
  if (p == NULL)
    return NULL;
  p->pools = calloc(c->endpoints_count + 1u, sizeof *p->pools);
  p->pools_count = p->pools == NULL ? 0 : c->endpoints_count;
  bool ok = p->pools != NULL && kvrelay_dc_id(text_of(c->relay.dc), &p->dc_id) == KVRELAY_OK;
  for (unsigned i = 0; i < p->pools_count; i++)
    fill_pool(&p->pools[i], &c->endpoints[i], p->dc_id, &ok);
  if (!ok || !make_cards(p)) {
    plan_free(p);
    return NULL;
  }
  for (unsigned i = 0; i < p->pools_count; i++)
    settle(p, &p->pools[i], report);
  return p;
}

void plan_free(plan *p) {
  if (p == NULL)
    return;
  free(p->pools);
  free(p->cards);
  free(p->workers);
  free(p->texts);
  free(p->needs);
  free(p->derived);
  free(p);
}

void plan_print(const plan *p, FILE *out) {
  char name[512], pool[KVRELAY_POOL_NAME_CAP];
  fprintf(out, "dc_id 0x%016" PRIx64 "\n", p->dc_id);
  for (unsigned i = 0; i < p->pools_count; i++) {
    const plan_pool *q = &p->pools[i];
    const kvrelay_descriptor *d = &q->descriptor;
    fprintf(out, "%s\n", endpoint_name(q->endpoint, name));
    kvrelay_pool_id_format(&d->producer.pool_id, pool);
    fprintf(out, "  identity      %s\n", pool);
    fprintf(out, "  pool          %s\n", q->no_pool == NULL ? "yes" : q->no_pool);
    fprintf(out, "  semantics     %u tokens per block, %s\n", d->query_semantics.kv_block_size,
            d->query_semantics.hash_format == HASHFMT_FORMAT_EAGLE ? "eagle" : "standard");
    for (size_t j = 0; j < d->registrations_len; j++) {
      const kvrelay_registration *r = &d->registrations[j];
      fprintf(out, "  model         %.*s", (int)r->canonical_model_id.len,
              (const char *)r->canonical_model_id.ptr);
      if (r->target.kind == KVRELAY_TARGET_LORA)
        fprintf(out, " (adapter %.*s)", (int)r->target.adapter.len,
                (const char *)r->target.adapter.ptr);
      for (size_t k = 0; k < r->aliases_len; k++)
        fprintf(out, "%s %.*s", k == 0 ? ", also" : ",", (int)r->aliases[k].len,
                (const char *)r->aliases[k].ptr);
      fputc('\n', out);
    }
  }
}
