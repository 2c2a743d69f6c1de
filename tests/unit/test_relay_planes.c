/* SPDX-License-Identifier: Apache-2.0 */
/* Readiness and load of a relay: facts go in, messages come out. Ids are the contract's. */
#include <stdio.h>

#include "test_relay_fixture.h"

/* ---- cards ---- */

#define CARDS_CAP 128

/* Everything the relay watches; what was derived last stays until the next derivation. */
typedef struct world {
  fx *f;
  kvrelay_card cards[CARDS_CAP];
  size_t len;
  kvrelay_topology topology[2];
  void *mem[2];
  int current;
} world;

static const int32_t decode[] = {KVRELAY_ROLE_DECODE}, prefill[] = {KVRELAY_ROLE_PREFILL},
                     aggregated[] = {KVRELAY_ROLE_AGGREGATED},
                     pair[] = {KVRELAY_ROLE_PREFILL, KVRELAY_ROLE_DECODE};
static const kvrelay_roles needs_decode[] = {{decode, 1}}, needs_prefill[] = {{prefill, 1}},
                           needs_pd_or_a[] = {{pair, 2}, {aggregated, 1}};

static int try_derive(world *w) {
  const int next = w->current ^ 1;
  const size_t len = kvrelay_topology_mem_size(w->cards, w->len);
  void *mem = malloc(len + 1);
  cr_assert_eq(kvrelay_topology_derive(w->cards, w->len, mem, len, &w->topology[next]), KVRELAY_OK);
  int err = kvrelay_relay_set_topology(&w->f->relay, &w->topology[next]);
  if (err != KVRELAY_OK) {
    free(mem);
    return err;
  }
  if (w->mem[w->current]) /* nobody may look at it any more */
    memset(w->mem[w->current], 0xA5, 64);
  free(w->mem[w->current]);
  memset(&w->topology[w->current], 0xA5, sizeof w->topology[0]);
  w->mem[w->current] = NULL;
  w->current = next;
  w->mem[next] = mem;
  fx_check(w->f);
  return err;
}

static void derive(world *w) { cr_assert_eq(try_derive(w), KVRELAY_OK); }

/* A base card at n/<component>/generate of model "llama"; its number. */
static size_t card(world *w, const char *component, int32_t role, const kvrelay_roles *needs,
                   size_t needs_len) {
  kvrelay_card *c = &w->cards[w->len];
  memset(c, 0, sizeof *c);
  c->endpoint = (kvrelay_endpoint){true, text_of("n"), text_of(component), text_of("generate")};
  c->worker_id = w->len + 1;
  c->model_id = text_of("llama");
  c->role = role;
  c->needs = needs;
  c->needs_len = needs_len;
  c->semantics = (kvrelay_semantics){true, 64, HASHFMT_FORMAT_STANDARD};
  return w->len++;
}

/* The same worker carries an adapter. */
static void carry(world *w, size_t base, const char *id) {
  kvrelay_card *c = &w->cards[w->len++];
  *c = w->cards[base];
  c->model_id = c->adapter = text_of(id);
  c->has_suffix = c->has_lora = true;
}

/* All cards of the worker say so. */
static void live(world *w, size_t card, int32_t liveness) {
  for (size_t i = 0; i < w->len; i++)
    if (w->cards[i].worker_id == w->cards[card].worker_id)
      w->cards[i].liveness = liveness;
  derive(w);
}

static world *world_open(fx *f) {
  world *w = calloc(1, sizeof *w);
  w->f = f;
  return w;
}

static void world_close(world *w) {
  fx_close(w->f);
  free(w->mem[0]);
  free(w->mem[1]);
  free(w);
}

#define DEAD KVRELAY_LIVENESS_DEAD
#define ALIVE KVRELAY_LIVENESS_LIVE
#define UNKNOWN KVRELAY_LIVENESS_UNKNOWN

/* ---- streams ---- */

static uint64_t open_plane(fx *f, int32_t method) {
  kvrelay_request q = fx_request(method);
  uint64_t call = 0;
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK, "%s", f->status.text);
  cr_assert(kvrelay_relay_call_admitted(&f->relay, call));
  return call;
}

static uint32_t set_of(kvrelay_roles roles) {
  uint32_t set = 0;
  for (size_t i = 0; i < roles.len; i++) {
    cr_assert(i == 0 || roles.ptr[i - 1] < roles.ptr[i], "not in the order of numbers");
    set |= UINT32_C(1) << roles.ptr[i];
  }
  return set;
}

/* Checked as a reader would. */
static const kvrelay_readiness_update *pull_readiness(fx *f, uint64_t call) {
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_MESSAGE);
  cr_assert_eq(f->out.method, KVRELAY_METHOD_SUBSCRIBE_READINESS);
  const kvrelay_readiness_update *m = &f->out.u.readiness;
  cr_assert_eq(kvrelay_check_envelope(&m->envelope).class_, KVRELAY_CLASS_OK);
  cr_assert(m->envelope.relay_present && m->envelope.relay.relay_incarnation == 23);
  for (size_t i = 0; i < m->entries_len; i++)
    cr_assert_eq(kvrelay_check_topology_entry(&m->entries[i]).class_, KVRELAY_CLASS_OK);
  return m;
}

/* What a reader that comes now is told about the only model. */
static const kvrelay_topology_entry *entry_now(fx *f) {
  uint64_t call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_READINESS);
  const kvrelay_readiness_update *m = pull_readiness(f, call);
  cr_assert_eq(m->entries_len, 1);
  fx_hang_up(f, call);
  return m->entries;
}

#define P (1u << KVRELAY_ROLE_PREFILL)
#define D (1u << KVRELAY_ROLE_DECODE)
#define E (1u << KVRELAY_ROLE_ENCODE)
#define A (1u << KVRELAY_ROLE_AGGREGATED)

#define ASSERT_ENTRY(ENTRY, STATE, PRESENT, MISSING, DUPLICATES)                                   \
  do {                                                                                             \
    const kvrelay_topology_entry *e_ = (ENTRY);                                                    \
    cr_assert_eq(e_->state, KVRELAY_READY_##STATE, "state %d", (int)e_->state);                    \
    cr_assert_eq(set_of(e_->present_roles), (PRESENT));                                            \
    cr_assert_eq(set_of(e_->missing_roles), (MISSING));                                            \
    cr_assert_eq(set_of(e_->duplicate_role_endpoints), (DUPLICATES));                              \
  } while (0)

Test(relay_planes, readiness_first_message_changes_and_heartbeat) {
  kvrelay_relay_config cfg = fx_config();
  world *w = world_open(fx_open(&cfg));
  fx *f = w->f;
  uint64_t call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_READINESS);
  const kvrelay_readiness_update *m = pull_readiness(f, call);
  cr_assert(m->revision == 1 && m->entries_len == 0, "the empty image is revision 1");
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + cfg.readiness_heartbeat_ns);
  f->now += 6 * SECOND;
  size_t a = card(w, "a", KVRELAY_ROLE_AGGREGATED, NULL, 0);
  derive(w);
  cr_assert(fx_ready(f, call));
  m = pull_readiness(f, call);
  cr_assert_eq(m->revision, 2);
  ASSERT_ENTRY(&m->entries[0], UNKNOWN, 0, 0, 0);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  /* Two changes before the reader comes: it sees the newest only. */
  live(w, a, DEAD);
  live(w, a, ALIVE);
  cr_assert(fx_ready(f, call));
  m = pull_readiness(f, call);
  cr_assert_eq(m->revision, 3);
  ASSERT_ENTRY(&m->entries[0], READY, A, 0, 0);
  /* What comes to the same keeps the revision and sends nothing. */
  live(w, a, ALIVE);
  live(w, a, DEAD);
  live(w, a, ALIVE);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  /* The heartbeat counts from the opening, not from the last message. */
  fx_tick(f, 4 * SECOND - 1);
  cr_assert(!fx_ready(f, call));
  fx_tick(f, 1);
  cr_assert(fx_ready(f, call));
  m = pull_readiness(f, call);
  cr_assert(m->revision == 3 && m->entries_len == 1);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  fx_tick(f, 25 * SECOND); /* missed ones are not made up */
  (void)pull_readiness(f, call);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  kvrelay_relay_shutdown(&f->relay, f->now);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_END);
  cr_assert(f->status.reason == KVRELAY_REASON_NONE && f->status.grpc == KVRELAY_GRPC_OK);
  kvrelay_request q = fx_request(KVRELAY_METHOD_SUBSCRIBE_READINESS);
  ASSERT_REFUSED(f, &q, PUBLICATION_UNAVAILABLE);
  world_close(w);
}

/* Each check of admission has its own error, in the contract's order. */
Test(relay_planes, admission_and_permits_of_their_own) {
  static const int32_t methods[] = {KVRELAY_METHOD_SUBSCRIBE_READINESS,
                                    KVRELAY_METHOD_SUBSCRIBE_LOAD};
  kvrelay_relay_config cfg = fx_config();
  cfg.max_readiness_subscribers = 2;
  cfg.max_load_subscribers = 2;
  fx *f = fx_open(&cfg);
  for (int i = 0; i < 2; i++) {
    uint64_t calls[2] = {open_plane(f, methods[i]), open_plane(f, methods[i])};
    kvrelay_request q = fx_request(methods[i]);
    ASSERT_REFUSED(f, &q, RESOURCE_LIMIT);
    q.subscriber_id.len = 0;
    ASSERT_REFUSED(f, &q, INVALID_REQUEST);
    q.contract_marker = 0;
    ASSERT_REFUSED(f, &q, CONTRACT_MISMATCH);
    fx_hang_up(f, calls[0]);
    (void)open_plane(f, methods[i]);
  }
  kvrelay_relay_stats st = kvrelay_relay_stats_get(&f->relay);
  cr_assert(st.readiness_streams == 2 && st.load_streams == 2 && st.catalog_streams == 0);
  fx_close(f);
}

/* Every detail of an entry makes a revision of its own, also when the number of entries stays. */
Test(relay_planes, I7_each_difference_that_a_reader_sees_is_a_revision) {
  kvrelay_relay_config cfg = fx_config();
  world *w = world_open(fx_open(&cfg));
  fx *f = w->f;
  uint64_t call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_READINESS), revision = 1;
  (void)pull_readiness(f, call);
  size_t p = card(w, "p", KVRELAY_ROLE_PREFILL, needs_decode, 1);
  size_t d = card(w, "d", KVRELAY_ROLE_DECODE, needs_prefill, 1);
  for (int step = 0; step < 12; step++) {
    kvrelay_card *c = &w->cards[step & 1 ? p : d];
    switch (step) {
    case 0:
    case 1:
      c->liveness = DEAD;
      break;
    case 2:
    case 3:
      c->liveness = ALIVE;
      break;
    case 4:
      c->endpoint.component = text_of("e");
      break;
    case 5:
      c->endpoint.endpoint = text_of("other");
      break;
    case 6:
      c->endpoint.namespace_ = text_of("m");
      break;
    case 7:
      c->model_id = text_of("lama");
      break;
    case 8:
      c->role = KVRELAY_ROLE_AGGREGATED;
      c->needs_len = 0;
      break;
    case 9:
      carry(w, p, "sql");
      break;
    case 10:
      carry(w, d, "art");
      break;
    default:
      w->cards[w->len - 1].model_id = text_of("arts");
      break;
    }
    derive(w);
    cr_assert_eq(pull_readiness(f, call)->revision, ++revision, "step %d", step);
    cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  }
  world_close(w);
}

Test(relay_planes, more_members_than_the_limit_leave_the_former_topology) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_members = 2;
  world *w = world_open(fx_open(&cfg));
  fx *f = w->f;
  (void)card(w, "a", KVRELAY_ROLE_AGGREGATED, NULL, 0);
  (void)card(w, "b", KVRELAY_ROLE_AGGREGATED, NULL, 0);
  derive(w);
  cr_assert_eq(entry_now(f)->members_len, 2);
  (void)card(w, "c", KVRELAY_ROLE_AGGREGATED, NULL, 0);
  cr_assert_eq(try_derive(w), KVRELAY_ERR_LIMIT);
  cr_assert_eq(entry_now(f)->members_len, 2);
  w->cards[2].endpoint = w->cards[1].endpoint;
  derive(w);
  cr_assert_eq(entry_now(f)->members_len, 2);
  world_close(w);
}

/* The state counts both encoders, the wire does not show them. */
Test(relay_planes, X5_two_encoders_are_not_told) {
  kvrelay_relay_config cfg = fx_config();
  world *w = world_open(fx_open(&cfg));
  (void)card(w, "p", KVRELAY_ROLE_PREFILL, needs_decode, 1);
  (void)card(w, "d", KVRELAY_ROLE_DECODE, needs_prefill, 1);
  (void)card(w, "e", KVRELAY_ROLE_ENCODE, needs_pd_or_a, 2);
  size_t e2 = card(w, "e2", KVRELAY_ROLE_ENCODE, needs_pd_or_a, 2);
  for (size_t i = 0; i < w->len; i++)
    w->cards[i].liveness = ALIVE;
  derive(w);
  ASSERT_ENTRY(entry_now(w->f), UNAVAILABLE, P | D | E, 0, 0);
  live(w, e2, DEAD);
  ASSERT_ENTRY(entry_now(w->f), READY, P | D | E, 0, 0);
  world_close(w);
}

/* ---- links (I8) ---- */

/* The card that pool i of the fixture is made of. */
static size_t card_of_pool(world *w, const fx_pool *p) {
  kvrelay_card *c = &w->cards[w->len];
  memset(c, 0, sizeof *c);
  c->endpoint = p->descriptor.serving_endpoint;
  c->worker_id = 1;
  c->liveness = ALIVE;
  c->model_id = p->registration.canonical_model_id;
  c->aliases = p->registration.aliases;
  c->aliases_len = p->registration.aliases_len;
  c->role = KVRELAY_ROLE_LEGACY;
  c->domain = p->descriptor.producer.pool_id.domain;
  c->semantics = p->descriptor.query_semantics;
  return w->len++;
}

static bool linked(fx *f) { return entry_now(f)->members[0].pool_id.present; }

Test(relay_planes, I8_links_follow_the_catalog) {
  static const kvrelay_text other[] = {{(const uint8_t *)"tchat", 5}};
  kvrelay_relay_config cfg = fx_config();
  world *w = world_open(fx_open(&cfg));
  fx *f = w->f;
  fx_pool *p = &f->pools[1];
  fx_publish(f, 0, 64); /* neighbours in the order of ids */
  fx_publish(f, 2, 64);
  fx_state(p, 64);
  fx_describe(p, 1);
  card_of_pool(w, p);
  derive(w);
  cr_assert(!linked(f));
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_OK);
  cr_assert(linked(f));
  cr_assert(kvrelay_pool_id_equal(&entry_now(f)->members[0].pool_id,
                                  &kvrelay_pool_descriptor(p->pool)->producer.pool_id));
  uint64_t revision = kvrelay_relay_stats_get(&f->relay).topology_revision;
  fx_withdraw(f, 1); /* another producer of the same pool: nobody looked between */
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_OK);
  cr_assert(linked(f));
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).topology_revision, revision);
  const kvrelay_card good = w->cards[0];
  for (int drift = 0; drift < 9; drift++) {
    kvrelay_card *c = &w->cards[0];
    size_t len = w->len;
    if (drift == 0)
      c->domain.cache_semantics.digest[15] ^= 1;
    if (drift == 1)
      c->semantics.kv_block_size++;
    if (drift == 2)
      c->role = KVRELAY_ROLE_AGGREGATED;
    if (drift == 3)
      c->aliases = other;
    if (drift == 4)
      c->aliases_len = 0;
    if (drift == 5)
      c->semantics.hash_format = HASHFMT_FORMAT_EAGLE;
    if (drift == 6)
      c->domain.routing_scope.source = KVRELAY_SOURCE_DEFAULT_DERIVED;
    if (drift == 7)
      c->endpoint.component = text_of("frontend");
    if (drift == 8)
      carry(w, 0, "sql");
    derive(w);
    cr_assert(!linked(f), "drift %d", drift);
    cr_assert_eq(entry_now(f)->state, KVRELAY_READY_READY);
    w->cards[0] = good;
    w->len = len;
    derive(w);
    cr_assert(linked(f));
  }
  fx_withdraw(f, 1);
  cr_assert(!linked(f));
  world_close(w);
}

/* Registrations are a set: a pool may list them in another order. */
Test(relay_planes, links_do_not_depend_on_the_order_of_registrations) {
  kvrelay_relay_config cfg = fx_config();
  world *w = world_open(fx_open(&cfg));
  fx *f = w->f;
  fx_pool *p = &f->pools[1];
  fx_state(p, 64);
  fx_describe(p, 1);
  kvrelay_registration list[3] = {p->registration, p->registration, p->registration};
  const char *const names[] = {"zeta", "art", NULL};
  card_of_pool(w, p);
  for (int i = 0; i < 2; i++) {
    carry(w, 0, names[i]);
    w->cards[w->len - 1].aliases_len = 0;
    list[i] =
        (kvrelay_registration){text_of(names[i]),
                               {true, KVRELAY_TARGET_LORA, text_of("llama"), text_of(names[i])},
                               NULL,
                               0};
  }
  p->descriptor.registrations = list;
  p->descriptor.registrations_len = 3;
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_OK);
  derive(w);
  cr_assert(linked(f));
  live(w, 0, DEAD);
  cr_assert(linked(f));
  world_close(w);
}

/* ---- against the rules, written out ---- */

static uint64_t rng = 1;
static uint32_t below(uint32_t n) {
  rng = rng * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(rng >> 33) % n;
}

typedef struct shape {
  int32_t role;
  const kvrelay_roles *needs;
  size_t needs_len;
} shape;

static const shape shapes[] = {
    {KVRELAY_ROLE_PREFILL, needs_decode, 1}, {KVRELAY_ROLE_PREFILL, NULL, 0},
    {KVRELAY_ROLE_DECODE, needs_prefill, 1}, {KVRELAY_ROLE_ENCODE, needs_pd_or_a, 2},
    {KVRELAY_ROLE_AGGREGATED, NULL, 0},      {KVRELAY_ROLE_LEGACY, NULL, 0}};
#define SHAPES (sizeof shapes / sizeof *shapes)

#define SITES 5
#define WORKERS_CAP 4
typedef struct crowd {
  size_t len[SITES], shape[SITES][WORKERS_CAP];
  int32_t live[SITES][WORKERS_CAP];
  bool carries[SITES][WORKERS_CAP];
} crowd;

/* One letter per role that lives, by looking at every worker again. */
static bool role_lives(const crowd *c, int32_t role, bool carriers) {
  for (size_t s = 0; s < SITES; s++) {
    bool known = true;
    for (size_t w = 0; w < c->len[s]; w++)
      known = known && c->live[s][w] != UNKNOWN;
    for (size_t w = 0; known && w < c->len[s]; w++)
      if ((!carriers || c->carries[s][w]) && shapes[c->shape[s][w]].role == role &&
          c->live[s][w] == ALIVE)
        return true;
  }
  return false;
}

static size_t units_that_live(const crowd *c, int32_t role, bool carriers) {
  size_t count = 0;
  for (size_t s = 0; s < SITES; s++)
    for (size_t shape = 0; shape < SHAPES; shape++) {
      bool known = true, lives = false;
      for (size_t w = 0; w < c->len[s]; w++) {
        known = known && c->live[s][w] != UNKNOWN;
        lives = lives || (c->shape[s][w] == shape && (!carriers || c->carries[s][w]) &&
                          c->live[s][w] == ALIVE);
      }
      count += known && lives && shapes[shape].role == role;
    }
  return count;
}

typedef struct verdict {
  int32_t state;
  uint32_t present, missing, duplicates;
  bool legacy;
} verdict;

/* What is absent of all alternatives, when none of them is whole. */
static uint32_t unserved(const crowd *c, const shape *h, bool carriers) {
  uint32_t wanted = 0;
  for (size_t n = 0; n < h->needs_len; n++) {
    bool whole = true;
    for (size_t k = 0; k < h->needs[n].len; k++)
      if (!role_lives(c, h->needs[n].ptr[k], carriers)) {
        whole = false;
        wanted |= 1u << h->needs[n].ptr[k];
      }
    if (whole)
      return 0;
  }
  return wanted;
}

static verdict by_the_rules(const crowd *c, bool carriers) {
  verdict v = {KVRELAY_READY_UNAVAILABLE, 0, 0, 0, false};
  bool known = true, alive = false;
  for (int32_t role = 1; role <= KVRELAY_ROLE_LEGACY; role++) {
    alive = alive || role_lives(c, role, carriers);
    if (role != KVRELAY_ROLE_LEGACY && role_lives(c, role, carriers))
      v.present |= 1u << role;
    if (role < KVRELAY_ROLE_AGGREGATED && units_that_live(c, role, carriers) > 1)
      v.duplicates |= 1u << role;
  }
  for (size_t s = 0; s < SITES; s++) {
    bool takes_part = false, here = true;
    for (size_t w = 0; w < c->len[s]; w++) {
      here = here && c->live[s][w] != UNKNOWN;
      takes_part = takes_part || !carriers || c->carries[s][w];
    }
    known = known && (!takes_part || here);
    for (size_t w = 0; w < c->len[s]; w++) {
      const shape *h = &shapes[c->shape[s][w]];
      if (carriers && !c->carries[s][w])
        continue;
      if (h->role == KVRELAY_ROLE_LEGACY)
        v.legacy = true;
      else if (!role_lives(c, h->role, carriers))
        v.missing |= 1u << h->role;
      if (!here || c->live[s][w] != ALIVE)
        continue;
      v.missing |= unserved(c, h, carriers);
    }
  }
  if (v.legacy)
    v.missing = v.duplicates = 0;
  if (alive && v.missing == 0 && v.duplicates == 0)
    v.state = KVRELAY_READY_READY;
  if (!known) {
    v.state = KVRELAY_READY_UNKNOWN;
    v.present = v.missing = 0;
  }
  v.duplicates &= P | D;
  return v;
}

static void assert_by_the_rules(fx *f, const crowd *c) {
  const kvrelay_topology_entry *e = entry_now(f);
  verdict v = by_the_rules(c, false), a = by_the_rules(c, true);
  cr_assert_eq(e->members_len, SITES);
  cr_assert_eq(e->state, v.state);
  cr_assert_eq(set_of(e->present_roles), v.present);
  cr_assert_eq(set_of(e->missing_roles), v.missing);
  cr_assert_eq(set_of(e->duplicate_role_endpoints), v.duplicates);
  cr_assert_eq(e->legacy_fallback_active, v.legacy);
  cr_assert_eq(e->adapters_len, 1);
  cr_assert_eq(e->adapters[0].state, a.state);
  cr_assert_eq(set_of(e->adapters[0].missing_roles), a.missing);
}

Test(relay_planes, I6_I7_readiness_by_the_rules_written_out) {
  static const char *const names[SITES] = {"s0", "s1", "s2", "s3", "s4"};
  kvrelay_relay_config cfg = fx_config();
  world *world = world_open(fx_open(&cfg));
  unsigned seen[3] = {0, 0, 0};
  for (int round = 0; round < 200; round++) {
    crowd c = {0};
    size_t base[SITES][WORKERS_CAP];
    bool rich = below(2) != 0; /* else few units, so that READY happens */
    world->len = 0;
    for (size_t s = 0; s < SITES; s++) {
      c.len[s] = 1 + below(rich ? 4 : 2);
      for (size_t w = 0; w < c.len[s]; w++) {
        c.shape[s][w] = rich ? below(SHAPES) : below(4) == 0 ? s : 4;
        c.carries[s][w] = below(2) != 0 || (s == 0 && w == 0);
        const shape *h = &shapes[c.shape[s][w]];
        base[s][w] = card(world, names[s], h->role, h->needs, h->needs_len);
        if (c.carries[s][w])
          carry(world, base[s][w], "sql");
      }
    }
    for (int step = 0; step < 40; step++) {
      size_t s = below(SITES), w = below((uint32_t)c.len[s]);
      uint32_t dice = below(10);
      c.live[s][w] = step < 12 || dice > 3 ? ALIVE : dice > 0 ? DEAD : UNKNOWN;
      live(world, base[s][w], c.live[s][w]);
      assert_by_the_rules(world->f, &c);
      seen[entry_now(world->f)->state]++;
    }
  }
  cr_assert(seen[0] > 100 && seen[1] > 100 && seen[2] > 100, "%u %u %u", seen[0], seen[1], seen[2]);
  world_close(world);
}

/* ---- load ---- */

static const kvrelay_load_update *pull_load(fx *f, uint64_t call) {
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_MESSAGE);
  cr_assert_eq(f->out.method, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  const kvrelay_load_update *m = &f->out.u.load;
  cr_assert_eq(kvrelay_check_envelope(&m->envelope).class_, KVRELAY_CLASS_OK);
  cr_assert(m->envelope.relay_present && m->envelope.relay.drt_instance_id == 17);
  for (size_t i = 0; i < m->pools_len; i++) {
    cr_assert_eq(kvrelay_check_producer(&m->pools[i].producer).class_, KVRELAY_CLASS_OK);
    cr_assert(i == 0 || kvrelay_pool_id_compare(&m->pools[i - 1].producer.pool_id,
                                                &m->pools[i].producer.pool_id) < 0);
  }
  return m;
}

static void window(fx *f) { fx_tick(f, f->cfg.load_window_ns); }

#define ASSERT_LOAD(ENTRY, USED, TOTAL, OBSERVED, EXPECTED)                                        \
  do {                                                                                             \
    const kvrelay_load_entry *l_ = (ENTRY);                                                        \
    cr_assert_eq(l_->kv_used_blocks, (USED));                                                      \
    cr_assert_eq(l_->total_kv_blocks, (TOTAL));                                                    \
    cr_assert_eq(l_->kv_observed_ranks, (OBSERVED));                                               \
    cr_assert_eq(l_->kv_expected_ranks, (EXPECTED));                                               \
  } while (0)

Test(relay_planes, load_windows_close_and_go_out) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  uint64_t opened_us = f->wall_us;
  uint64_t call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  const kvrelay_load_update *m = pull_load(f, call);
  cr_assert(m->window_sequence == 0 && m->pools_len == 0 && m->window_ms == 1000);
  cr_assert_eq(m->observed_ms, opened_us / 1000);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  fx_pool *p = fx_publish(f, 1, 64);
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + SECOND);
  fx_tick(f, SECOND - 1);
  cr_assert(!fx_ready(f, call));
  fx_tick(f, 1);
  cr_assert(fx_ready(f, call));
  f->now += 300 * MS; /* it comes a little late; the window was built before */
  f->wall_us += 1300000;
  m = pull_load(f, call);
  cr_assert(m->window_sequence == 1 && m->pools_len == 1);
  cr_assert_eq(m->observed_ms, opened_us / 1000 + 1000);
  ASSERT_LOAD(&m->pools[0], 0, 0, 0, 0); /* nothing was declared */
  cr_assert(
      kvrelay_producer_equal(&m->pools[0].producer, &kvrelay_pool_descriptor(p->pool)->producer));
  /* A late tick delays the next one; none is made up. */
  fx_tick(f, 5 * SECOND);
  cr_assert_eq(pull_load(f, call)->window_sequence, 2);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + SECOND);
  fx_withdraw(f, 1);
  window(f); /* also when nothing changed */
  m = pull_load(f, call);
  cr_assert(m->window_sequence == 3 && m->pools_len == 0);
  fx_hang_up(f, call);
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), KVRELAY_TIME_NONE, "nobody reads");
  f->now += 10 * SECOND;
  call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  cr_assert_eq(pull_load(f, call)->window_sequence, 4, "nothing older than a window");
  kvrelay_relay_shutdown(&f->relay, f->now);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_END);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_OK);
  fx_close(f);
}

Test(relay_planes, a_pool_that_was_withdrawn_is_in_no_window) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_publish(f, 1, 64);
  const uint64_t quick = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  const uint64_t slow = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  window(f);
  cr_assert_eq(pull_load(f, quick)->pools_len, 1);
  fx_withdraw(f, 1);
  cr_assert_eq(pull_load(f, slow)->pools_len, 0, "of the same window, but later");
  fx_close(f);
}

Test(relay_planes, a_load_reader_that_falls_behind) {
  kvrelay_relay_config cfg = fx_config();
  cfg.load_windows = 5; /* becomes 8 */
  fx *f = fx_open(&cfg);
  uint64_t slow = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD),
           fine = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  (void)pull_load(f, slow);
  (void)pull_load(f, fine);
  fx_publish(f, 1, 64);
  for (uint64_t n = 1; n <= 8; n++) {
    window(f);
    cr_assert_eq(pull_load(f, fine)->window_sequence, n);
    if (n == 4)
      fx_publish(f, 2, 64);
  }
  /* Each window as it was, none left out. */
  for (uint64_t n = 1; n <= 4; n++) {
    const kvrelay_load_update *m = pull_load(f, slow);
    cr_assert_eq(m->window_sequence, n);
    cr_assert_eq(m->pools_len, 1);
  }
  cr_assert_eq(pull_load(f, slow)->pools_len, 2);
  for (uint64_t n = 9; n <= 13; n++)
    window(f);
  cr_assert_eq(pull_load(f, slow)->window_sequence, 6, "exactly as many as are kept");
  window(f);
  window(f);
  cr_assert_eq(fx_pull(f, slow), KVRELAY_PULL_END);
  cr_assert_eq(f->status.reason, KVRELAY_REASON_SUBSCRIBER_LAGGED);
  cr_assert(strstr(f->status.text, ": 1") != NULL, "%s", f->status.text);
  cr_assert_eq(fx_pull(f, slow), KVRELAY_PULL_END);
  cr_assert_eq(pull_load(f, fine)->window_sequence, 9);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).lagged, 1);
  fx_close(f);
}

/* The load of the only pool in the window that closes now. */
static const kvrelay_load_entry *load_now(fx *f) {
  window(f);
  uint64_t call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  const kvrelay_load_update *m = pull_load(f, call);
  cr_assert_eq(m->pools_len, 1);
  fx_hang_up(f, call);
  return m->pools;
}

/* The ranks of a pool, in memory that is changed at every declaration. */
typedef struct ranks {
  kvrelay_rank_range ranges[3];
  size_t len;
  void *mem;
} ranks;

static int declare(const fx_pool *p, ranks *r) {
  size_t len = kvrelay_pool_ranks_mem_size(r->ranges, r->len);
  void *mem = malloc(len + 1);
  cr_assert_eq(kvrelay_pool_set_ranks(p->pool, r->ranges, r->len, mem, len - 1),
               KVRELAY_ERR_NOSPACE);
  int err = kvrelay_pool_set_ranks(p->pool, r->ranges, r->len, mem, len);
  if (err != KVRELAY_OK) {
    free(mem);
    return err;
  }
  free(r->mem);
  r->mem = mem;
  return err;
}

static void report(const fx_pool *p, uint64_t worker, uint32_t rank, uint64_t used) {
  cr_assert_eq(kvrelay_pool_report(p->pool, worker, rank, used), KVRELAY_OK);
}

/* As long as there are rules for load. */
Test(relay_planes, T12_load_of_a_pool) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 64);
  ranks r = {{{20, 3, 2, 500}, {10, 0, 1, 0}}, 2, NULL};
  ASSERT_LOAD(load_now(f), 0, 0, 0, 0);
  cr_assert_eq(declare(p, &r), KVRELAY_OK);
  ASSERT_LOAD(load_now(f), 0, 0, 0, 3);
  report(p, 20, 3, 33);
  report(p, 20, 3, 44); /* replaces */
  report(p, 20, 4, 0);  /* zero is a report */
  ASSERT_LOAD(load_now(f), 0, 0, 2, 3);
  report(p, 10, 0, 5);
  ASSERT_LOAD(load_now(f), 49, 0, 3, 3); /* one capacity is unknown */
  cr_assert_eq(kvrelay_pool_set_capacity(p->pool, 10, 0, 7), KVRELAY_OK);
  ASSERT_LOAD(load_now(f), 0, 1007, 2, 3); /* and its observation forgotten */
  cr_assert_eq(kvrelay_pool_set_capacity(p->pool, 20, 3, 500), KVRELAY_OK);
  report(p, 10, 0, UINT64_MAX);
  ASSERT_LOAD(load_now(f), UINT64_MAX, 1007, 3, 3); /* saturates, sent as it is */
  cr_assert_eq(kvrelay_pool_reports_lost(p->pool, 20), KVRELAY_OK);
  ASSERT_LOAD(load_now(f), 0, 1007, 1, 3);
  /* Reports for what nobody declared. */
  static const struct {
    uint64_t worker;
    uint32_t rank;
  } strangers[] = {{20, 2}, {20, 5}, {10, 1}, {30, 0}, {0, 0}};
  for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
    cr_assert_eq(kvrelay_pool_report(p->pool, strangers[i].worker, strangers[i].rank, 9),
                 KVRELAY_ERR_NOT_FOUND);
    cr_assert_eq(kvrelay_pool_set_capacity(p->pool, strangers[i].worker, strangers[i].rank, 9),
                 KVRELAY_ERR_NOT_FOUND);
  }
  cr_assert_eq(kvrelay_pool_reports_lost(p->pool, 15), KVRELAY_ERR_NOT_FOUND);
  ASSERT_LOAD(load_now(f), 0, 1007, 1, 3);
  /* A new declaration keeps what was reported of ranks with the same capacity. */
  report(p, 20, 3, 1);
  report(p, 20, 4, 2);
  r.ranges[0].ranks = 3;
  r.ranges[1].total_kv_blocks = 8;
  cr_assert_eq(declare(p, &r), KVRELAY_OK);
  ASSERT_LOAD(load_now(f), 0, 1508, 2, 4);
  r.ranges[2] = (kvrelay_rank_range){20, 5, 1, 1};
  r.len = 3;
  cr_assert_eq(declare(p, &r), KVRELAY_ERR_ARG, "a rank twice");
  r.len = 2;
  ASSERT_LOAD(load_now(f), 0, 1508, 2, 4);
  /* Impossible ranks of one worker: none of the pool, and the pool is there all the same. */
  static const struct {
    uint32_t start, ranks;
  } impossible[] = {{0, 0}, {0, 4097}, {UINT32_MAX - 1, 3}};
  for (size_t i = 0; i < 3; i++) {
    r.ranges[0].rank_start = impossible[i].start;
    r.ranges[0].ranks = impossible[i].ranks;
    cr_assert_eq(declare(p, &r), KVRELAY_OK);
    ASSERT_LOAD(load_now(f), 0, 0, 0, 0);
    cr_assert_eq(kvrelay_pool_report(p->pool, 10, 0, 9), KVRELAY_ERR_NOT_FOUND);
  }
  r.ranges[0].rank_start = UINT32_MAX - 1;
  r.ranges[0].ranks = 2; /* the last ranks there are */
  cr_assert_eq(declare(p, &r), KVRELAY_OK);
  report(p, 20, UINT32_MAX, 9);
  ASSERT_LOAD(load_now(f), 0, 1008, 1, 3);
  fx_close(f);
  free(r.mem);
}

/* Random reports, losses, capacities and readers, one case each; every window is what a plain table
 * says. */
Test(relay_planes, load_windows_by_a_table) {
  enum { POOLS = 3, RANKS = 3 };
  kvrelay_relay_config cfg = fx_config();
  cfg.load_windows = 16;
  fx *f = fx_open(&cfg);
  ranks r[POOLS] = {{.mem = NULL}};
  uint64_t used[POOLS][RANKS], capacity[POOLS][RANKS];
  bool observed[POOLS][RANKS] = {{false}};
  static kvrelay_load_entry past[4096][POOLS]; /* by window */
  uint64_t newest = 0, next = 1;
  for (unsigned i = 0; i < POOLS; i++) {
    fx_publish(f, i, 64);
    r[i].ranges[0] = (kvrelay_rank_range){101, 0, RANKS, 10};
    r[i].len = 1;
    cr_assert_eq(declare(&f->pools[i], &r[i]), KVRELAY_OK);
    for (unsigned k = 0; k < RANKS; k++)
      capacity[i][k] = 10;
  }
  uint64_t call = open_plane(f, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  cr_assert_eq(pull_load(f, call)->window_sequence, 0);
  for (int step = 0; step < 20000; step++) {
    unsigned i = below(POOLS), k = below(RANKS);
    kvrelay_pool *pool = f->pools[i].pool;
    switch (below(8)) {
    case 0:
    case 1:
    case 2:
      used[i][k] = below(20);
      observed[i][k] = true;
      report(&f->pools[i], 101, k, used[i][k]);
      break;
    case 3: {
      uint64_t now = (uint64_t)below(3) * 10;
      observed[i][k] = observed[i][k] && now == capacity[i][k];
      capacity[i][k] = now;
      cr_assert_eq(kvrelay_pool_set_capacity(pool, 101, k, now), KVRELAY_OK);
      break;
    }
    case 4:
      if (below(4) != 0)
        break;
      memset(observed[i], 0, sizeof observed[i]);
      cr_assert_eq(kvrelay_pool_reports_lost(pool, 101), KVRELAY_OK);
      break;
    case 5:
    case 6:
      if (newest - (next - 1) == 16)
        break; /* it would lag */
      window(f);
      newest++;
      for (unsigned at = 0; at < POOLS; at++) {
        kvrelay_load_entry *e = &past[newest][at];
        bool all = true, sizes = true;
        for (unsigned n = 0; n < RANKS; n++) {
          e->kv_expected_ranks++;
          e->kv_observed_ranks += observed[at][n];
          all = all && observed[at][n];
          sizes = sizes && capacity[at][n] != 0;
        }
        for (unsigned n = 0; n < RANKS; n++) {
          e->kv_used_blocks += all ? used[at][n] : 0;
          e->total_kv_blocks += sizes ? capacity[at][n] : 0;
        }
      }
      break;
    default:
      if (next > newest) {
        cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
        break;
      }
      const kvrelay_load_update *m = pull_load(f, call);
      cr_assert_eq(m->window_sequence, next);
      cr_assert_eq(m->pools_len, POOLS);
      for (unsigned at = 0; at < POOLS; at++)
        ASSERT_LOAD(&m->pools[at], past[next][at].kv_used_blocks, past[next][at].total_kv_blocks,
                    past[next][at].kv_observed_ranks, past[next][at].kv_expected_ranks);
      next++;
      break;
    }
    if (newest == 4095)
      break;
  }
  cr_assert(next > 1000, "%d", (int)next);
  fx_close(f);
  for (unsigned i = 0; i < POOLS; i++)
    free(r[i].mem);
}
