/* SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

static int text_order(const void *a, const void *b) {
  const kvrelay_text *x = a, *y = b;
  size_t n = x->len < y->len ? x->len : y->len;
  int order = n == 0 ? 0 : memcmp(x->ptr, y->ptr, n);
  return order != 0 ? order : (x->len > y->len) - (x->len < y->len);
}

/* ---- names: who claims what over the whole file ---- */

typedef struct claim {
  kvrelay_text name, id;
  kvrelay_target target;
} claim;

typedef struct claims {
  claim *list;
  size_t len, cap;
  bool failed;
} claims;

static void claims_add(claims *c, kvrelay_text name, const kvrelay_registration *r) {
  if (c->len == c->cap) {
    size_t cap = c->cap == 0 ? 64 : 2 * c->cap;
    claim *list = realloc(c->list, cap * sizeof *list);
    if (list == NULL) {
      c->failed = true;
      return;
    }
    c->list = list;
    c->cap = cap;
  }
  claim *n = &c->list[c->len++];
  n->name = name;
  n->id = r->canonical_model_id;
  n->target = r->target;
}

static int claim_order(const void *a, const void *b) {
  const claim *x = a, *y = b;
  int order = text_order(&x->name, &y->name);
  if (order == 0)
    order = text_order(&x->id, &y->id);
  if (order == 0)
    order = x->target.kind - y->target.kind;
  if (order == 0)
    order = text_order(&x->target.base_model, &y->target.base_model);
  if (order == 0)
    order = text_order(&x->target.adapter, &y->target.adapter);
  return order;
}

static int name_only_order(const void *a, const void *b) {
  return text_order(&((const claim *)a)->name, &((const claim *)b)->name);
}

/* After sorting: a name is ambiguous when its first and last claim are not the same meaning. */
static bool ambiguous(const claims *c, kvrelay_text name) {
  claim key = {.name = name};
  const claim *hit = bsearch(&key, c->list, c->len, sizeof *c->list, name_only_order);
  if (hit == NULL)
    return false;
  const claim *first = hit, *last = hit, *end = c->list + c->len;
  while (first > c->list && name_only_order(first - 1, hit) == 0)
    first--;
  while (last + 1 < end && name_only_order(last + 1, hit) == 0)
    last++;
  return claim_order(first, last) != 0;
}

/* ---- one endpoint ---- */

static bool carried(const config_endpoint *e, const config_adapter *a) {
  for (unsigned i = 0; i < e->workers_count; i++)
    for (unsigned j = 0; j < e->workers[i].adapters_count; j++)
      if (strcmp(e->workers[i].adapters[j], a->id) == 0)
        return true;
  return false;
}

/* Aliases sorted, without repeats and without the id itself. */
static bool fill_aliases(kvrelay_registration *r, char *const *aliases, unsigned count) {
  kvrelay_text *list = calloc(count + 1, sizeof *list);
  size_t len = 0;
  if (list == NULL)
    return false;
  for (unsigned i = 0; i < count; i++)
    if (!kvrelay_text_equal(text_of(aliases[i]), r->canonical_model_id))
      list[len++] = text_of(aliases[i]);
  qsort(list, len, sizeof *list, text_order);
  size_t kept = 0;
  for (size_t i = 0; i < len; i++)
    if (kept == 0 || !kvrelay_text_equal(list[kept - 1], list[i]))
      list[kept++] = list[i];
  r->aliases = list;
  r->aliases_len = kept;
  return true;
}

static int registration_order(const void *a, const void *b) {
  const kvrelay_registration *x = a, *y = b;
  int order = text_order(&x->canonical_model_id, &y->canonical_model_id);
  return order != 0 ? order : x->target.kind - y->target.kind;
}

static bool fill_registrations(plan_pool *p, const config_endpoint *e) {
  kvrelay_registration *list = calloc(e->adapters_count + 1u, sizeof *list);
  size_t len = 0;
  p->descriptor.registrations = list;
  if (list == NULL)
    return false;
  list[len].canonical_model_id = text_of(e->model);
  list[len].target.present = true;
  list[len].target.kind = KVRELAY_TARGET_BASE;
  list[len].target.base_model = text_of(e->model);
  bool ok = fill_aliases(&list[len++], e->aliases, e->aliases_count);
  for (unsigned i = 0; i < e->adapters_count; i++) {
    const config_adapter *a = &e->adapters[i];
    if (!carried(e, a))
      continue;
    list[len].canonical_model_id = text_of(a->id);
    list[len].target.present = true;
    list[len].target.kind = KVRELAY_TARGET_LORA;
    list[len].target.base_model = text_of(e->model);
    list[len].target.adapter = text_of(a->runtime_name);
    ok = fill_aliases(&list[len++], a->aliases, a->aliases_count) && ok;
  }
  qsort(list, len, sizeof *list, registration_order);
  p->descriptor.registrations_len = len;
  return ok;
}

static bool fill_roles(plan_pool *p, const config_endpoint *e) {
  int32_t *list = calloc(KVRELAY_ROLE_LEGACY, sizeof *list);
  size_t len = 0;
  if (list == NULL)
    return false;
  for (int32_t role = KVRELAY_ROLE_PREFILL; role <= KVRELAY_ROLE_LEGACY; role++)
    for (unsigned i = 0; i < e->workers_count; i++)
      if (e->workers[i].role == role) {
        list[len++] = role;
        break;
      }
  p->descriptor.pool_roles.ptr = list;
  p->descriptor.pool_roles.len = len;
  return true;
}

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

static bool has_source(const config_endpoint *e) {
  for (unsigned i = 0; i < e->workers_count; i++)
    if (e->workers[i].events.type != CONFIG_EVENTS_NONE && e->workers[i].ranks != 0)
      return true;
  return false;
}

static bool fill_pool(plan_pool *p, const config_endpoint *e, uint64_t dc_id) {
  kvrelay_descriptor *d = &p->descriptor;
  p->endpoint = e;
  kvrelay_pool_id *id = &d->producer.pool_id;
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
  if (e->block_size == 0)
    p->no_pool = "no block_size";
  else if (!has_source(e))
    p->no_pool = "no worker has an event source";
  return digest(e->semantics, e->semantics_count, e, false, &id->domain.cache_semantics) &&
         digest(e->routing_scope, e->routing_scope_count, e, true, &id->domain.routing_scope) &&
         fill_registrations(p, e) && fill_roles(p, e);
}

/* ---- the whole file ---- */

static const char *endpoint_name(const config_endpoint *e, char out[512]) {
  snprintf(out, 512, "%s/%s/%s", e->namespace_, e->component, e->endpoint);
  return out;
}

/* Registrations whose id, and aliases that, have two meanings go everywhere. */
static void drop_ambiguous(plan *p, const claims *names, FILE *report) {
  char name[512];
  for (unsigned i = 0; i < p->pools_count; i++) {
    plan_pool *pool = &p->pools[i];
    kvrelay_registration *list = (kvrelay_registration *)(uintptr_t)pool->descriptor.registrations;
    size_t kept = 0;
    for (size_t j = 0; j < pool->descriptor.registrations_len; j++) {
      kvrelay_registration r = list[j];
      if (ambiguous(names, r.canonical_model_id)) {
        fprintf(report,
                "warning: %s: the name '%.*s' has two meanings in this file, so its registration "
                "is left out\n",
                endpoint_name(pool->endpoint, name), (int)r.canonical_model_id.len,
                (const char *)r.canonical_model_id.ptr);
        free((void *)(uintptr_t)r.aliases);
        continue;
      }
      kvrelay_text *aliases = (kvrelay_text *)(uintptr_t)r.aliases;
      size_t aliases_kept = 0;
      for (size_t k = 0; k < r.aliases_len; k++) {
        if (ambiguous(names, aliases[k]))
          fprintf(report,
                  "warning: %s: the alias '%.*s' has two meanings in this file and is left out\n",
                  endpoint_name(pool->endpoint, name), (int)aliases[k].len,
                  (const char *)aliases[k].ptr);
        else
          aliases[aliases_kept++] = aliases[k];
      }
      r.aliases_len = aliases_kept;
      list[kept++] = r;
    }
    pool->descriptor.registrations_len = kept;
    if (kept == 0 && pool->no_pool == NULL)
      pool->no_pool = "no registration left";
  }
}

static void drop_equal_identities(plan *p, FILE *report) {
  char a[512], b[512];
  for (unsigned i = 0; i < p->pools_count; i++)
    for (unsigned j = i + 1; j < p->pools_count; j++) {
      plan_pool *x = &p->pools[i], *y = &p->pools[j];
      bool fit = x->endpoint->block_size != 0 && y->endpoint->block_size != 0;
      if (fit &&
          kvrelay_pool_id_equal(&x->descriptor.producer.pool_id, &y->descriptor.producer.pool_id)) {
        fprintf(report, "warning: %s and %s have the same pool identity; neither gets a pool\n",
                endpoint_name(x->endpoint, a), endpoint_name(y->endpoint, b));
        x->no_pool = y->no_pool = "same pool identity as another endpoint";
      }
    }
}

plan *plan_make(const config *c, FILE *report) {
  plan *p = calloc(1, sizeof *p);
  claims names = {0};
  if (p == NULL)
    return NULL;
  p->pools = calloc(c->endpoints_count + 1u, sizeof *p->pools);
  p->pools_count = p->pools == NULL ? 0 : c->endpoints_count;
  bool ok = p->pools != NULL && kvrelay_dc_id(text_of(c->relay.dc), &p->dc_id) == KVRELAY_OK;
  for (unsigned i = 0; i < p->pools_count && ok; i++) {
    ok = fill_pool(&p->pools[i], &c->endpoints[i], p->dc_id);
    for (size_t j = 0; ok && j < p->pools[i].descriptor.registrations_len; j++) {
      const kvrelay_registration *r = &p->pools[i].descriptor.registrations[j];
      claims_add(&names, r->canonical_model_id, r);
      for (size_t k = 0; k < r->aliases_len; k++)
        claims_add(&names, r->aliases[k], r);
    }
  }
  if (ok && !names.failed) {
    if (names.len != 0)
      qsort(names.list, names.len, sizeof *names.list, claim_order);
    drop_ambiguous(p, &names, report);
    drop_equal_identities(p, report);
  }
  free(names.list);
  if (!ok || names.failed) {
    plan_free(p);
    return NULL;
  }
  return p;
}

void plan_free(plan *p) {
  if (p == NULL)
    return;
  for (unsigned i = 0; i < p->pools_count; i++) {
    kvrelay_descriptor *d = &p->pools[i].descriptor;
    for (size_t j = 0; j < d->registrations_len; j++)
      free((void *)(uintptr_t)d->registrations[j].aliases);
    free((void *)(uintptr_t)d->registrations);
    free((void *)(uintptr_t)d->pool_roles.ptr);
  }
  free(p->pools);
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
