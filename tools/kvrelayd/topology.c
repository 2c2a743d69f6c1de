/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"

#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "serve.h"

int topology_open(topology *t, const plan *p) {
  memset(t, 0, sizeof *t);
  t->plan = p;
  t->cards = calloc(p->cards_len + 1, sizeof *t->cards);
  t->liveness = calloc(p->workers_len + 1, sizeof *t->liveness);
  t->said = calloc(p->workers_len + 1, sizeof *t->said);
  t->mem[0] = malloc(p->derived_len);
  t->mem[1] = malloc(p->derived_len);
  if (t->cards == NULL || t->liveness == NULL || t->said == NULL || t->mem[0] == NULL ||
      t->mem[1] == NULL) {
    log_event(LOG_ERROR, "no_memory", "what=topology bytes=%zu", 2 * p->derived_len);
    return 71;
  }
  return 0;
}

void topology_close(topology *t) {
  free(t->cards);
  free(t->liveness);
  free(t->said);
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

/* What the event connections say of the workers; unknown where there is none. */
static void ask_feeds(topology *t, const serve *s, uint64_t now_ns) {
  memset(t->said, 0, t->plan->workers_len * sizeof *t->said);
  for (unsigned i = 0; i < s->pools_count; i++) {
    const served_pool *pool = &s->pools[i];
    const config_worker *last = NULL;
    for (unsigned k = 0; k < pool->feeds_count; k++) {
      const feed *f = &pool->feeds[k];
      int32_t *said =
          &t->said[pool->plan->first_worker + (size_t)(f->worker - pool->plan->endpoint->workers)];
      const int32_t now = feed_liveness(f, now_ns);
      *said = f->worker == last ? both(*said, now) : now;
      last = f->worker;
    }
  }
}

static int32_t liveness_of(const config_worker *w, int32_t said) {
  switch (w->live) {
  case CONFIG_LIVE_YES:
    return KVRELAY_LIVENESS_LIVE;
  case CONFIG_LIVE_NO:
    return KVRELAY_LIVENESS_DEAD;
  case CONFIG_LIVE_AUTO:
    return said;
  default:
    return KVRELAY_LIVENESS_UNKNOWN;
  }
}

static bool look(topology *t, const serve *s, uint64_t now_ns) {
  bool changed = false;
  ask_feeds(t, s, now_ns);
  for (size_t i = 0; i < t->plan->workers_len; i++) {
    const plan_worker *w = &t->plan->workers[i];
    const int32_t now = liveness_of(w->config, t->said[i]);
    changed = changed || now != t->liveness[i];
    t->liveness[i] = now;
  }
  return changed;
}

static void list_cards(topology *t, const scope *within) {
  t->cards_len = 0;
  for (size_t i = 0; i < t->plan->workers_len; i++) {
    const plan_worker *w = &t->plan->workers[i];
    const kvrelay_card *cards = &t->plan->cards[w->first_card];
    for (size_t k = 0; k < w->cards && scope_has(within, cards->endpoint.namespace_); k++) {
      kvrelay_card *card = &t->cards[t->cards_len++];
      *card = cards[k];
      card->liveness = t->liveness[i];
    }
  }
}

void topology_poll(topology *t, serve *s, uint64_t now_ns) {
  const int next = t->current ^ 1;
  if (!look(t, s, now_ns) && t->told)
    return;
  list_cards(t, s->scope);
  int err = kvrelay_topology_derive(t->cards, t->cards_len, t->mem[next], t->plan->derived_len,
                                    &t->derived[next]);
  if (err == KVRELAY_OK)
    err = kvrelay_relay_set_topology(&s->relay, &t->derived[next]);
  if (err == KVRELAY_OK)
    t->current = next;
  else
    log_event(LOG_ERROR, "topology", "error=\"%s\"", kvrelay_strerror(err));
  t->told = true;
}
