/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"

#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "serve.h"
#include "text.h"

/* ---- cards ---- */

/* Hands out the lists of all cards; counts while `base` is NULL. */
typedef struct lists {
  kvrelay_text *texts;
  kvrelay_roles *needs;
  size_t texts_len, needs_len;
  bool counting;
} lists;

static const kvrelay_text *list_texts(lists *l, char *const *texts, unsigned count) {
  kvrelay_text *at = l->counting ? NULL : l->texts + l->texts_len;
  for (unsigned i = 0; at != NULL && i < count; i++)
    at[i] = text_of(texts[i]);
  l->texts_len += count;
  return at;
}

static const kvrelay_roles *list_needs(lists *l, const config_worker *w) {
  kvrelay_roles *at = l->counting ? NULL : l->needs + l->needs_len;
  for (unsigned i = 0; at != NULL && i < w->needs_count; i++)
    at[i] = (kvrelay_roles){w->needs[i].roles, w->needs[i].len};
  l->needs_len += w->needs_count;
  return at;
}

static void add_card(topology *t, const lists *l, const kvrelay_card *card) {
  if (!l->counting)
    t->cards[t->cards_len] = *card;
  t->cards_len++;
}

static const config_adapter *adapter_named(const config_endpoint *e, const char *id) {
  const config_adapter *a = e->adapters;
  while (strcmp(a->id, id) != 0) /* the configuration's rules: it is there */
    a++;
  return a;
}

static void add_worker(topology *t, lists *l, const config_endpoint *e, const kvrelay_card *common,
                       const config_worker *w) {
  kvrelay_card card = *common;
  const size_t first = t->cards_len;
  card.worker_id = w->id;
  card.role = w->role;
  card.needs = list_needs(l, w);
  card.needs_len = w->needs_count;
  add_card(t, l, &card);
  card.has_suffix = card.has_lora = true;
  for (unsigned i = 0; i < w->adapters_count; i++) {
    const config_adapter *a = adapter_named(e, w->adapters[i]);
    card.model_id = text_of(a->id);
    card.adapter = text_of(a->runtime_name);
    card.aliases = list_texts(l, a->aliases, a->aliases_count);
    card.aliases_len = a->aliases_count;
    add_card(t, l, &card);
  }
  if (!l->counting)
    t->workers[t->workers_len] = (topology_worker){w, first, t->cards_len - first, 0};
  t->workers_len++;
}

/* Everything once; counting first. */
static void add_all(topology *t, lists *l, const config *c, const plan *p) {
  t->cards_len = t->workers_len = l->texts_len = l->needs_len = 0;
  for (unsigned i = 0; i < c->endpoints_count; i++) {
    const config_endpoint *e = &c->endpoints[i];
    const kvrelay_descriptor *d = &p->pools[i].descriptor;
    kvrelay_card card = {0};
    card.endpoint = d->serving_endpoint;
    card.model_id = text_of(e->model);
    card.aliases = list_texts(l, e->aliases, e->aliases_count);
    card.aliases_len = e->aliases_count;
    card.domain = d->producer.pool_id.domain;
    card.semantics = d->query_semantics;
    if (!l->counting)
      t->first_worker[i] = t->workers_len;
    for (unsigned k = 0; k < e->workers_count; k++)
      add_worker(t, l, e, &card, &e->workers[k]);
  }
}

int topology_open(topology *t, const config *c, const plan *p) {
  lists l = {.counting = true};
  memset(t, 0, sizeof *t);
  add_all(t, &l, c, p);
  t->cards = calloc(t->cards_len + 1, sizeof *t->cards);
  t->workers = calloc(t->workers_len + 1, sizeof *t->workers);
  t->first_worker = calloc(c->endpoints_count + 1u, sizeof *t->first_worker);
  t->texts = l.texts = calloc(l.texts_len + 1, sizeof *l.texts);
  t->needs = l.needs = calloc(l.needs_len + 1, sizeof *l.needs);
  l.counting = false;
  if (t->cards != NULL && t->workers != NULL && t->first_worker != NULL && l.texts != NULL &&
      l.needs != NULL) {
    add_all(t, &l, c, p);
    t->mem_len = kvrelay_topology_mem_size(t->cards, t->cards_len);
    t->mem[0] = malloc(t->mem_len);
    t->mem[1] = malloc(t->mem_len);
  }
  if (t->mem[0] != NULL && t->mem[1] != NULL)
    return 0;
  log_event(LOG_ERROR, "no_memory", "what=topology bytes=%zu", 2 * t->mem_len);
  return 71;
}

void topology_close(topology *t) {
  free(t->cards);
  free(t->workers);
  free(t->first_worker);
  free(t->texts);
  free(t->needs);
  free(t->mem[0]);
  free(t->mem[1]);
}

/* ---- who is alive ---- */

/* Of several sockets: one that is gone is a dead worker, all that stand are a live one. */
static int32_t both(int32_t a, int32_t b) {
  if (a == KVRELAY_LIVENESS_DEAD || b == KVRELAY_LIVENESS_DEAD)
    return KVRELAY_LIVENESS_DEAD;
  return a == KVRELAY_LIVENESS_UNKNOWN ? a : b;
}

/* What the event connections of a pool say of its workers, into `said`. */
static void ask_feeds(const topology *t, const serve *s, int32_t *said, uint64_t now_ns) {
  for (unsigned i = 0; i < s->pools_count; i++) {
    const served_pool *pool = &s->pools[i];
    const config_worker *workers = pool->plan->endpoint->workers;
    const size_t first = t->first_worker[pool->plan - s->plan->pools];
    const config_worker *last = NULL;
    for (unsigned k = 0; k < pool->feeds_count; k++) {
      const feed *f = &pool->feeds[k];
      int32_t *of = &said[first + (size_t)(f->worker - workers)];
      const int32_t now = feed_liveness(f, now_ns);
      *of = f->worker == last ? both(*of, now) : now;
      last = f->worker;
    }
  }
}

static bool look(topology *t, const serve *s, uint64_t now_ns) {
  bool changed = false;
  int32_t *said = calloc(t->workers_len + 1, sizeof *said);
  if (said == NULL)
    return false; /* the next turn looks again */
  ask_feeds(t, s, said, now_ns);
  for (size_t i = 0; i < t->workers_len; i++) {
    topology_worker *w = &t->workers[i];
    const int32_t now = w->config->live == CONFIG_LIVE_YES    ? KVRELAY_LIVENESS_LIVE
                        : w->config->live == CONFIG_LIVE_NO   ? KVRELAY_LIVENESS_DEAD
                        : w->config->live == CONFIG_LIVE_AUTO ? said[i]
                                                              : KVRELAY_LIVENESS_UNKNOWN;
    changed = changed || now != w->liveness;
    w->liveness = now;
    for (size_t k = 0; k < w->cards; k++)
      t->cards[w->first_card + k].liveness = now;
  }
  free(said);
  return changed;
}

void topology_poll(topology *t, serve *s, uint64_t now_ns) {
  const int next = t->current ^ 1;
  if (!look(t, s, now_ns) && t->told)
    return;
  int err =
      kvrelay_topology_derive(t->cards, t->cards_len, t->mem[next], t->mem_len, &t->derived[next]);
  if (err == KVRELAY_OK)
    err = kvrelay_relay_set_topology(&s->relay, &t->derived[next]);
  if (err == KVRELAY_OK)
    t->current = next;
  else
    log_event(LOG_ERROR, "topology", "error=\"%s\"", kvrelay_strerror(err));
  t->told = true;
}
