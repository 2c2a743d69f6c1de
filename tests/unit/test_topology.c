/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From cards to pools and topology: every step of the recorded relay's scenarios, the conflicts of
 * an endpoint one by one, and nothing that depends on the order of the cards.
 */
/* make: -lcrypto */
#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "../vectors/vectors.h"
#include "kvrelay.h"
#include "proto/kvrelay_pb.h"
#include "test_capture.h"

enum { CARDS = 64, TEXT = 16384 };

static kvrelay_text text(const char *word) {
  kvrelay_text t = {(const uint8_t *)word, strlen(word)};
  return t;
}

/* ---- one derivation as a text ---- */

static void add(char *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(char *out, const char *format, ...) {
  const size_t n = strlen(out);
  va_list list;
  va_start(list, format);
  const int len = vsnprintf(out + n, TEXT - n, format, list);
  va_end(list);
  cr_assert(len >= 0 && (size_t)len < TEXT - n, "the text is too long");
}

#define T(X) (int)(X).len, (const char *)(X).ptr

static void add_roles(char *out, const char *name, kvrelay_roles roles) {
  add(out, " %s=", name);
  for (size_t i = 0; i < roles.len; i++)
    add(out, "%c", "?PDEAL"[roles.ptr[i]]);
}

/* Without what the relay adds later, the links; and of duplicates only what ours sends. */
static void add_entry(char *out, const kvrelay_topology_entry *e) {
  static const char *const states[] = {"unknown", "unavailable", "ready"};
  int32_t sent[5];
  kvrelay_roles duplicates = {sent, 0};
  for (size_t i = 0; i < e->duplicate_role_endpoints.len; i++)
    if (e->duplicate_role_endpoints.ptr[i] <= KVRELAY_ROLE_DECODE)
      sent[duplicates.len++] = e->duplicate_role_endpoints.ptr[i];
  add(out, "%.*s/%.*s %s", T(e->namespace_), T(e->canonical_model_id), states[e->state]);
  add_roles(out, "present", e->present_roles);
  add_roles(out, "missing", e->missing_roles);
  add_roles(out, "twice", duplicates);
  add(out, "%s", e->legacy_fallback_active ? " legacy" : "");
  for (size_t i = 0; i < e->members_len; i++) {
    add(out, " %.*s", T(e->members[i].endpoint.component));
    add_roles(out, "is", e->members[i].roles);
  }
  for (size_t i = 0; i < e->adapters_len; i++) {
    add(out, " +%.*s %s", T(e->adapters[i].canonical_model_id), states[e->adapters[i].state]);
    add_roles(out, "missing", e->adapters[i].missing_roles);
  }
  add(out, "\n");
}

static void add_pool(char *out, const kvrelay_endpoint *endpoint,
                     const kvrelay_registration *registrations, size_t n, kvrelay_roles roles) {
  add(out, "%.*s/%.*s", T(endpoint->namespace_), T(endpoint->component));
  add_roles(out, "is", roles);
  for (size_t i = 0; i < n; i++) {
    add(out, " %.*s", T(registrations[i].canonical_model_id));
    for (size_t k = 0; k < registrations[i].aliases_len; k++)
      add(out, ",%.*s", T(registrations[i].aliases[k]));
  }
  add(out, "\n");
}

static void *derive(const kvrelay_card *cards, size_t n, kvrelay_topology *out) {
  const size_t len = kvrelay_topology_mem_size(cards, n);
  void *const mem = malloc(len);
  cr_assert_neq(len, SIZE_MAX);
  cr_assert_eq(kvrelay_topology_derive(cards, n, mem, len, out), KVRELAY_OK);
  return mem;
}

static const char *entries_of(const kvrelay_card *cards, size_t n) {
  static char out[TEXT];
  kvrelay_topology topology;
  void *const mem = derive(cards, n, &topology);
  out[0] = '\0';
  for (size_t i = 0; i < topology.entries_len; i++)
    add_entry(out, &topology.entries[i]);
  free(mem);
  return out;
}

/* ---- the recorded scenarios ---- */

static int32_t role_named(const char *name) {
  for (int32_t role = KVRELAY_ROLE_PREFILL; role <= KVRELAY_ROLE_LEGACY; role++)
    if (strcasecmp(name, kvrelay_role_name(role)) == 0)
      return role;
  return 0;
}

/* Card of an "add"; what it points to is never freed, the test's process ends. */
static kvrelay_card card_added(const json_t *command, const char *worker) {
  kvrelay_card c;
  const json_t *needs = json_object_get(command, "needs"),
               *other = json_object_get(command, "aliases");
  char *path = strdup(vec_str(vec_get(command, "endpoint")));
  memset(&c, 0, sizeof c);
  c.endpoint.present = true;
  c.endpoint.namespace_ = text(strtok(path, "."));
  c.endpoint.component = text(strtok(NULL, "."));
  c.endpoint.endpoint = text(strtok(NULL, "."));
  c.worker_id = strtoull(worker, NULL, 10);
  c.model_id = text(strdup(vec_str(vec_get(command, "model"))));
  c.role = role_named(vec_str(vec_get(command, "role")));
  cr_assert_neq(c.role, 0);
  c.needs_len = json_array_size(needs);
  kvrelay_roles *lists = calloc(c.needs_len + 1, sizeof *lists);
  for (size_t i = 0; i < c.needs_len; i++) {
    const json_t *list = json_array_get(needs, i);
    int32_t *roles = calloc(json_array_size(list) + 1, sizeof *roles);
    lists[i] = (kvrelay_roles){roles, json_array_size(list)};
    for (size_t k = 0; k < lists[i].len; k++)
      roles[k] = role_named(vec_str(json_array_get(list, k)));
  }
  c.needs = lists;
  c.aliases_len = json_array_size(other);
  kvrelay_text *aliases = calloc(c.aliases_len + 1, sizeof *aliases);
  for (size_t i = 0; i < c.aliases_len; i++)
    aliases[i] = text(strdup(vec_str(json_array_get(other, i))));
  c.aliases = aliases;
  c.semantics = (kvrelay_semantics){true, (uint32_t)vec_u64(vec_get(command, "block")),
                                    json_is_true(json_object_get(command, "eagle"))
                                        ? HASHFMT_FORMAT_EAGLE
                                        : HASHFMT_FORMAT_STANDARD};
  c.domain.present = c.domain.cache_semantics.present = c.domain.routing_scope.present = true;
  cr_assert_eq(kvrelay_cache_digest(c.model_id, NULL, 0, c.semantics.kv_block_size,
                                    c.semantics.hash_format, &c.domain.cache_semantics),
               KVRELAY_OK);
  cr_assert_eq(kvrelay_scope_digest(&c.endpoint, NULL, 0, &c.domain.routing_scope), KVRELAY_OK);
  return c;
}

static bool same_endpoint(const kvrelay_card *a, const kvrelay_card *b) {
  return kvrelay_text_equal(a->endpoint.namespace_, b->endpoint.namespace_) &&
         kvrelay_text_equal(a->endpoint.component, b->endpoint.component);
}

/* The next recorded readiness that differs from the last one but for links; false at the end. */
static bool recorded_next(capture *c, char *state) {
  static uint8_t room[1 << 16];
  kvrelay_status end;
  char next[TEXT];
  for (char type; (type = capture_next(c, &end)) != 0;) {
    kvrelay_pb_arena arena = {room, sizeof room, 0};
    kvrelay_readiness_update update;
    if (type != 'm')
      continue;
    cr_assert_eq(kvrelay_pb_decode_readiness(c->bytes, c->len, &arena, &update), KVRELAY_OK);
    next[0] = '\0';
    for (size_t i = 0; i < update.entries_len; i++)
      add_entry(next, &update.entries[i]);
    if (strcmp(next, state) != 0) {
      strcpy(state, next);
      return true;
    }
  }
  return false;
}

/* The last recorded catalog against the pools that may exist, but for those without KV events. */
static void ends_in_catalog(const char *path, const kvrelay_card *cards, const bool *sources,
                            size_t n) {
  static uint8_t room[1 << 16];
  static char want[TEXT], got[TEXT];
  kvrelay_topology topology;
  kvrelay_status end;
  capture c;
  capture_open(&c, path);
  for (char type; (type = capture_next(&c, &end)) != 0;) {
    kvrelay_pb_arena arena = {room, sizeof room, 0};
    kvrelay_catalog_update update;
    if (type != 'm')
      continue;
    cr_assert_eq(kvrelay_pb_decode_catalog(c.bytes, c.len, &arena, &update), KVRELAY_OK);
    want[0] = '\0';
    /* The recorded catalog is ordered by identity. */
    void *const mem = derive(cards, n, &topology);
    for (size_t e = 0; e < topology.endpoints_len; e++)
      for (size_t i = 0; i < update.pools_len; i++) {
        const kvrelay_descriptor *const d = &update.pools[i];
        if (kvrelay_text_equal(d->serving_endpoint.namespace_,
                               topology.endpoints[e].endpoint.namespace_) &&
            kvrelay_text_equal(d->serving_endpoint.component,
                               topology.endpoints[e].endpoint.component))
          add_pool(want, &d->serving_endpoint, d->registrations, d->registrations_len,
                   d->pool_roles);
      }
    free(mem);
  }
  capture_close(&c);
  got[0] = '\0';
  void *const mem = derive(cards, n, &topology);
  for (size_t e = 0; e < topology.endpoints_len; e++) {
    const kvrelay_endpoint_state *const s = &topology.endpoints[e];
    bool source = false;
    for (size_t i = 0; i < n; i++)
      source |= sources[i] &&
                kvrelay_text_equal(cards[i].endpoint.namespace_, s->endpoint.namespace_) &&
                kvrelay_text_equal(cards[i].endpoint.component, s->endpoint.component);
    if (s->fit && source)
      add_pool(got, &s->endpoint, s->registrations, s->registrations_len, s->roles);
  }
  free(mem);
  cr_expect_str_eq(got, want, "%s\nours:\n%srecorded:\n%s", path, got, want);
}

/* ---- what the relay sends of it ---- */

static void *room(void **list, size_t *len, size_t bytes) {
  return list[(*len)++] = malloc(bytes + 1);
}

/* The last message of a recorded stream; the capture stays open, it holds the bytes. */
static void last_message(capture *c, const char *path, uint8_t **bytes, size_t *len) {
  kvrelay_status end;
  *bytes = NULL;
  capture_open(c, path);
  for (char type; (type = capture_next(c, &end)) != 0;)
    if (type == 'm') {
      free(*bytes);
      *bytes = malloc(c->len);
      *len = c->len;
      memcpy(*bytes, c->bytes, c->len);
    }
  cr_assert_not_null(*bytes);
  capture_close(c);
}

/* Ours leaves ENCODE out of the list of duplicates; nothing else may differ. */
static void without_encode(kvrelay_readiness_update *m) {
  for (size_t i = 0; i < m->entries_len; i++) {
    kvrelay_roles *roles =
        &((kvrelay_topology_entry *)(uintptr_t)&m->entries[i])->duplicate_role_endpoints;
    while (roles->len != 0 && roles->ptr[roles->len - 1] == KVRELAY_ROLE_ENCODE)
      roles->len--;
  }
}

/* A relay with the pools of the last recorded catalog sends the last recorded readiness, byte for
 * byte but for the revision. As long as there are things that a relay has to be given. */
static void ends_in_readiness(const char *group, const kvrelay_card *cards, size_t n) {
  static uint8_t arenas[2][1 << 16], ours[1 << 16], theirs[1 << 16];
  char path[128];
  capture c;
  uint8_t *bytes[2];
  size_t len[2], lists_len = 0;
  void *lists[64];
  kvrelay_catalog_update catalog;
  kvrelay_readiness_update readiness;
  kvrelay_pb_arena arena[2] = {{arenas[0], sizeof arenas[0], 0}, {arenas[1], sizeof arenas[1], 0}};
  snprintf(path, sizeof path, "tests/data/relay/topology/%s/catalog.jsonl", group);
  last_message(&c, path, &bytes[0], &len[0]);
  snprintf(path, sizeof path, "tests/data/relay/topology/%s/readiness.jsonl", group);
  last_message(&c, path, &bytes[1], &len[1]);
  cr_assert_eq(kvrelay_pb_decode_catalog(bytes[0], len[0], &arena[0], &catalog), KVRELAY_OK);
  cr_assert_eq(kvrelay_pb_decode_readiness(bytes[1], len[1], &arena[1], &readiness), KVRELAY_OK);
  cr_assert_gt(catalog.pools_len, 0);
  kvrelay_relay relay;
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity = readiness.envelope.relay;
  cfg.max_pools = cfg.max_members = 64;
  cfg.max_bucket_count = 64;
  cr_assert_eq(kvrelay_relay_init(&relay, &cfg,
                                  room(lists, &lists_len, kvrelay_relay_mem_size(&cfg)),
                                  kvrelay_relay_mem_size(&cfg), 0),
               KVRELAY_OK);
  ckf_producer_config state = ckf_producer_config_default();
  state.filter.expected_blocks = 32;
  state.max_blocks = state.max_mappings = 64;
  for (size_t i = 0; i < catalog.pools_len; i++) {
    const kvrelay_descriptor *d = &catalog.pools[i];
    ckf_producer *p = room(lists, &lists_len, sizeof *p);
    kvrelay_pool *pool;
    const size_t need = ckf_producer_mem_size(&state),
                 pool_need = kvrelay_relay_pool_mem_size(&relay, d);
    cr_assert_eq(ckf_producer_init(p, &state, room(lists, &lists_len, need), need), CKF_OK);
    cr_assert_eq(kvrelay_relay_pool_add(&relay, d, p, room(lists, &lists_len, pool_need), pool_need,
                                        0, &pool),
                 KVRELAY_OK);
  }
  /* What the digests were made of was not recorded. */
  kvrelay_card *ready = room(lists, &lists_len, n * sizeof *ready);
  memcpy(ready, cards, n * sizeof *ready);
  for (size_t i = 0; i < n; i++)
    for (size_t k = 0; k < catalog.pools_len; k++)
      if (kvrelay_text_equal(ready[i].endpoint.namespace_,
                             catalog.pools[k].serving_endpoint.namespace_) &&
          kvrelay_text_equal(ready[i].endpoint.component,
                             catalog.pools[k].serving_endpoint.component))
        ready[i].domain = catalog.pools[k].producer.pool_id.domain;
  kvrelay_topology topology;
  lists[lists_len++] = derive(ready, n, &topology);
  cr_assert_eq(kvrelay_relay_set_topology(&relay, &topology), KVRELAY_OK);
  const kvrelay_request q = {
      KVRELAY_METHOD_SUBSCRIBE_READINESS, KVRELAY_CONTRACT_MARKER, text("test"), {0}, 0};
  kvrelay_status status;
  kvrelay_outgoing out;
  uint64_t call;
  cr_assert_eq(kvrelay_relay_call_open(&relay, &q, 0, &call, &status), KVRELAY_OK);
  cr_assert_eq(kvrelay_relay_call_pull(&relay, call, 0, 0, &out), KVRELAY_PULL_MESSAGE);
  size_t links = 0;
  for (size_t i = 0; i < out.u.readiness.entries_len; i++)
    for (size_t k = 0; k < out.u.readiness.entries[i].members_len; k++)
      links += out.u.readiness.entries[i].members[k].pool_id.present;
  cr_expect_eq(links, catalog.pools_len, "%s: %zu links", group, links);
  out.u.readiness.revision = readiness.revision;
  without_encode(&readiness);
  const ptrdiff_t a = kvrelay_pb_encode_readiness(&out.u.readiness, ours, sizeof ours),
                  b = kvrelay_pb_encode_readiness(&readiness, theirs, sizeof theirs);
  cr_expect(a > 0 && a == b && memcmp(ours, theirs, (size_t)a) == 0, "%s: %td and %td bytes", group,
            a, b);
  for (size_t i = 0; i < lists_len; i++)
    free(lists[i]);
  free(bytes[0]);
  free(bytes[1]);
}

/* Derives anew: what has changed has to be what was recorded next. */
static bool becomes(const kvrelay_card *cards, size_t n, char *ours, capture *readiness,
                    char *recorded) {
  const char *const now = entries_of(cards, n);
  if (strcmp(now, ours) == 0)
    return false;
  strcpy(ours, now);
  cr_assert(recorded_next(readiness, recorded), "recorded nothing for\n%s", ours);
  cr_expect_str_eq(ours, recorded, "ours:\n%srecorded:\n%s", ours, recorded);
  return true;
}

static void follows(const char *group) {
  static kvrelay_card cards[CARDS];
  static bool sources[CARDS];
  static char recorded[TEXT], ours[TEXT];
  char path[128];
  capture commands, readiness;
  size_t n = 0, states = 0;
  snprintf(path, sizeof path, "tests/data/relay/topology/%s/readiness.jsonl", group);
  capture_open(&readiness, path);
  recorded[0] = ours[0] = '\0';
  snprintf(path, sizeof path, "tests/data/relay/topology/%s/commands.jsonl", group);
  capture_open(&commands, path);
  while (getline(&commands.line, &commands.cap, commands.file) > 0) {
    json_t *const record = json_loads(commands.line, 0, NULL);
    const json_t *const command = json_object_get(record, "command");
    const char *const worker = json_string_value(json_object_get(record, "worker"));
    cr_assert_not_null(record);
    if (strcmp(vec_str(vec_get(command, "op")), "lora") == 0) {
      cr_assert(json_is_true(json_object_get(record, "refused")));
    } else {
      bool fresh = true;
      /* The encoder of this scenario was killed by hand, which has no line of its own. */
      if (strcmp(vec_str(vec_get(command, "name")), "r12") == 0) {
        cards[n - 2].liveness = KVRELAY_LIVENESS_DEAD;
        becomes(cards, n, ours, &readiness, recorded);
      }
      cr_assert(strcmp(vec_str(vec_get(command, "op")), "add") == 0 && worker && n < CARDS);
      cards[n] = card_added(command, worker);
      sources[n] = json_is_true(json_object_get(command, "kv"));
      for (size_t i = 0; i < n; i++)
        fresh &= !same_endpoint(&cards[i], &cards[n]);
      n++;
      /* Who lives at a new endpoint is not known at first. */
      for (int live = fresh ? 0 : 1; live < 2; live++) {
        cards[n - 1].liveness = live ? KVRELAY_LIVENESS_LIVE : KVRELAY_LIVENESS_UNKNOWN;
        states += becomes(cards, n, ours, &readiness, recorded);
      }
    }
    json_decref(record);
  }
  cr_expect_not(recorded_next(&readiness, recorded), "%s: also recorded\n%s", group, recorded);
  cr_expect_gt(states, 3);
  capture_close(&commands);
  capture_close(&readiness);
  snprintf(path, sizeof path, "tests/data/relay/topology/%s/catalog.jsonl", group);
  ends_in_catalog(path, cards, sources, n);
  ends_in_readiness(group, cards, n);
}

Test(topology, I6_recorded_two_prefill_endpoints_and_others) { follows("g1"); }
Test(topology, I5_recorded_encoders_twice) { follows("g2"); }
Test(topology, recorded_adapters_refused) { follows("g3"); }
Test(topology, I4_recorded_conflicts) { follows("g4"); }

/* ---- conflicts, one by one ---- */

/* A live aggregated base worker at "n/<component>/e". */
static kvrelay_card base(const char *component, uint64_t worker, const char *model) {
  kvrelay_card c;
  memset(&c, 0, sizeof c);
  c.endpoint = (kvrelay_endpoint){true, text("n"), text(component), text("e")};
  c.worker_id = worker;
  c.liveness = KVRELAY_LIVENESS_LIVE;
  c.model_id = text(model);
  c.role = KVRELAY_ROLE_AGGREGATED;
  c.semantics = (kvrelay_semantics){true, 16, HASHFMT_FORMAT_STANDARD};
  c.domain.present = c.domain.cache_semantics.present = c.domain.routing_scope.present = true;
  c.domain.cache_semantics.digest_len = c.domain.routing_scope.digest_len = KVRELAY_DIGEST_LEN;
  c.domain.cache_semantics.source = c.domain.routing_scope.source = KVRELAY_SOURCE_DEFAULT_DERIVED;
  memcpy(c.domain.routing_scope.digest, component, strlen(component));
  return c;
}

static kvrelay_card adapter(const char *component, uint64_t worker, const char *id,
                            const char *name) {
  kvrelay_card c = base(component, worker, id);
  c.has_suffix = c.has_lora = true;
  c.adapter = text(name);
  return c;
}

/* "conflict letters, fit, registrations" of each endpoint, then the entries. */
static const char *told(const kvrelay_card *cards, size_t n) {
  static char out[TEXT];
  kvrelay_topology topology;
  void *const mem = derive(cards, n, &topology);
  out[0] = '\0';
  for (size_t i = 0; i < topology.endpoints_len; i++) {
    const kvrelay_endpoint_state *const s = &topology.endpoints[i];
    cr_expect_eq(s->conflicts == 0, s->why[0] == '\0');
    add(out, "%s%s%s%s%s ", s->conflicts & KVRELAY_CONFLICT_POOL ? "P" : "",
        s->conflicts & KVRELAY_CONFLICT_BINDING ? "B" : "",
        s->conflicts & KVRELAY_CONFLICT_TOPOLOGY ? "T" : "", s->conflicts ? " " : "",
        s->fit ? "fit" : "no");
    for (size_t k = 0; k < s->registrations_len; k++) {
      const kvrelay_verdict v = kvrelay_check_registration(&s->registrations[k]);
      cr_expect_eq(v.class_, KVRELAY_CLASS_OK, "%s", v.field);
    }
    add_pool(out, &s->endpoint, s->registrations, s->registrations_len, s->roles);
  }
  for (size_t i = 0; i < topology.entries_len; i++) {
    const kvrelay_verdict v = kvrelay_check_topology_entry(&topology.entries[i]);
    cr_expect_eq(v.class_, KVRELAY_CLASS_OK, "%s", v.field);
    add_entry(out, &topology.entries[i]);
  }
  free(mem);
  return out;
}

/* What told() leaves out of it: why, and what a pool would be made of. */
static const char *told_wholly(const kvrelay_card *cards, size_t n) {
  static char out[TEXT];
  kvrelay_topology topology;
  strcpy(out, told(cards, n));
  void *const mem = derive(cards, n, &topology);
  for (size_t i = 0; i < topology.endpoints_len; i++) {
    const kvrelay_endpoint_state *const s = &topology.endpoints[i];
    const kvrelay_digest *const digests[] = {&s->domain.cache_semantics, &s->domain.routing_scope};
    add(out, "%.*s: %s; %d block %u of %d; %d", T(s->endpoint.component), s->why,
        s->semantics.present, s->semantics.kv_block_size, s->semantics.hash_format,
        s->domain.present);
    for (size_t d = 0; d < 2; d++) {
      add(out, " %d/%d/%zu/", digests[d]->present, digests[d]->source, digests[d]->digest_len);
      for (size_t k = 0; k < KVRELAY_DIGEST_LEN; k++)
        add(out, "%02x", digests[d]->digest[k]);
    }
    add(out, "\n");
  }
  free(mem);
  return out;
}

#define TELLS(CARDS, ...)                                                                          \
  do {                                                                                             \
    const char *const got = told((CARDS), sizeof(CARDS) / sizeof *(CARDS));                        \
    cr_expect_str_eq(got, __VA_ARGS__, "%s", got);                                                 \
  } while (0)

#define READY "ready present=A missing= twice= "

Test(topology, I5_one_worker) {
  const kvrelay_card cards[] = {base("w", 1, "m")};
  TELLS(cards, "fit n/w is=A m\nn/m " READY "w is=A\n");
}

Test(topology, I4_block_size_zero_is_a_pool_conflict_only) {
  kvrelay_card cards[] = {base("w", 1, "m")};
  cards[0].semantics.kv_block_size = 0;
  TELLS(cards, "P no n/w is=A m\nn/m " READY "w is=A\n");
}

Test(topology, a_domain_that_no_pool_may_have_is_a_pool_conflict_only) {
  for (int what = 0; what < 5; what++) {
    kvrelay_card cards[] = {base("w", 1, "m")};
    kvrelay_digest *const digests[] = {&cards[0].domain.cache_semantics,
                                       &cards[0].domain.routing_scope};
    if (what == 4)
      cards[0].semantics.hash_format = 3;
    else if (what >= 2)
      digests[what - 2]->source = 0;
    else
      digests[what]->digest_len = 15;
    TELLS(cards, "P no n/w is=A m\nn/m " READY "w is=A\n");
  }
}

/* ---- names and numbers that readers would refuse ---- */

static kvrelay_text long_text(size_t len) {
  static char letters[KVRELAY_TEXT_MAX + 2];
  memset(letters, 'l', sizeof letters);
  return (kvrelay_text){(const uint8_t *)letters, len};
}

/* What endpoint "n/w/e" came to, by its path or a broken one. */
static kvrelay_endpoint_state came_to(const kvrelay_card *cards, size_t n, size_t *entries) {
  kvrelay_topology topology;
  void *const mem = derive(cards, n, &topology);
  kvrelay_endpoint_state s = {.why = "nothing"};
  for (size_t i = 0; i < topology.endpoints_len; i++)
    if (memcmp(&topology.endpoints[i].endpoint, &cards[0].endpoint, sizeof s.endpoint) == 0)
      s = topology.endpoints[i];
  *entries = topology.entries_len;
  free(mem);
  return s;
}

Test(topology, an_endpoint_without_a_valid_name_leaves_the_topology) {
  const kvrelay_text names[] = {
      text(""),     text(" w"),   text("w\xC2\xA0"),  text("a\nb"),
      text("\x7F"), text("\xFF"), text("a\xC2\x85z"), long_text(KVRELAY_TEXT_MAX + 1)};
  for (size_t i = 0; i < 3 * sizeof names / sizeof *names; i++) {
    kvrelay_card cards[] = {base("w", 1, "m"), base("v", 2, "m"), base("w", 1, "m")};
    kvrelay_endpoint *const e = &cards[0].endpoint;
    kvrelay_text *const parts[] = {&e->namespace_, &e->component, &e->endpoint};
    size_t entries;
    *parts[i % 3] = names[i / 3];
    const kvrelay_endpoint_state s = came_to(cards, 2, &entries);
    cr_expect(s.conflicts == KVRELAY_CONFLICT_TOPOLOGY && !s.fit && entries == 1 &&
                  strcmp(s.why, "the endpoint's name is not valid") == 0,
              "part %zu, name %zu: %u, %s", i % 3, i / 3, s.conflicts, s.why);
    *parts[i % 3] = long_text(KVRELAY_TEXT_MAX);
    cr_expect(came_to(cards, 1, &entries).fit && entries == 1);
  }
  kvrelay_card cards[] = {base("w\tx", 1, "m"), base("v", 2, "m")};
  TELLS(cards, "fit n/v is=A m\nT no n/w\tx is=A m\nn/m " READY "v is=A\n");
}

/* Of every text of a card; nothing of it comes further than its own endpoint. */
Test(topology, texts_and_lists_of_a_card_are_bounded) {
  static kvrelay_roles needs[KVRELAY_ROLES_MAX + 1];
  static int32_t roles[KVRELAY_ROLES_MAX + 1];
  const kvrelay_text tabbed = text("a\tb");
  size_t entries;
  for (int more = 0; more < 2; more++)
    for (int what = 0; what < 6; what++) {
      kvrelay_card cards[] = {base("w", 1, "m"), adapter("w", 1, "ad", "x"), base("w", 2, "m"),
                              base("v", 3, "m")};
      const kvrelay_text edge = long_text(KVRELAY_TEXT_MAX + (size_t)more);
      needs[0] = (kvrelay_roles){roles, KVRELAY_ROLES_MAX + (size_t)(what == 3 && more)};
      if (what == 0)
        cards[1].model_id = edge;
      if (what == 1)
        cards[1].adapter = edge;
      if (what == 2)
        cards[2].model_type = edge;
      if (what == 3 || what == 4) {
        cards[2].needs = needs;
        cards[2].needs_len = what == 3 ? 1 : KVRELAY_ROLES_MAX + (size_t)more;
      }
      if (what == 5) {
        cards[0].model_id = cards[2].model_id = edge;
        cards[3].model_id = edge;
      }
      const kvrelay_endpoint_state s = came_to(cards, 4, &entries);
      cr_expect_eq(s.conflicts, more ? KVRELAY_CONFLICT_BINDING : 0, "%d of %d: %s", more, what,
                   s.why);
      cr_expect_eq(entries, what == 5 && more ? 0 : 1);
    }
  kvrelay_card cards[] = {base("w", 1, "m"), base("w", 2, "m"), base("w", 3, "m")};
  const kvrelay_text aliases[] = {long_text(KVRELAY_TEXT_MAX), long_text(KVRELAY_TEXT_MAX + 1)};
  cards[0].aliases = aliases;
  cards[0].aliases_len = 2;
  cards[1].aliases = &tabbed;
  cards[1].aliases_len = 1;
  kvrelay_topology topology;
  void *const mem = derive(cards, 3, &topology);
  cr_expect(topology.endpoints[0].fit && topology.endpoints[0].registrations[0].aliases_len == 1);
  free(mem);
}

/* `n` names, "0" and up. */
static kvrelay_text *numbers(size_t n) {
  kvrelay_text *const list = malloc(n * sizeof *list);
  char *const bytes = malloc(n * 8);
  for (size_t i = 0; i < n; i++) {
    snprintf(bytes + 8 * i, 8, "%zu", i);
    list[i] = text(bytes + 8 * i);
  }
  return list;
}

Test(topology, more_than_readers_take) {
  enum { N = KVRELAY_PARTS_MAX + 1 };
  kvrelay_text *const names = numbers(N);
  kvrelay_card *const cards = malloc((N + 1) * sizeof *cards);
  size_t entries;
  kvrelay_endpoint_state s;
  for (size_t more = 0; more < 2; more++) { /* aliases */
    cards[0] = base("w", 1, "m");
    cards[1] = base("w", 2, "m");
    cards[0].aliases = names;
    cards[0].aliases_len = KVRELAY_ALIASES_MAX - 1;
    cards[1].aliases = names + KVRELAY_ALIASES_MAX - 2;
    cards[1].aliases_len = 2 + more;
    s = came_to(cards, 2, &entries);
    cr_expect(s.conflicts == (more ? KVRELAY_CONFLICT_BINDING : 0) && s.fit != (more == 1) &&
                  entries == 1 - more,
              "%zu: %s", more, s.why);
  }
  for (size_t more = 0; more < 2; more++) { /* endpoints of a model */
    for (size_t i = 0; i < N; i++) {
      cards[i] = base("w", i, "m");
      cards[i].endpoint.component = names[i];
      memcpy(cards[i].domain.routing_scope.digest, &i, sizeof i);
    }
    s = came_to(cards, KVRELAY_PARTS_MAX + more, &entries);
    cr_expect(s.conflicts == (more ? KVRELAY_CONFLICT_TOPOLOGY : 0) && s.fit != (more == 1) &&
                  entries == 1 - more,
              "%zu: %s", more, s.why);
  }
  for (size_t more = 0; more < 3; more++) { /* adapters, and with them registrations */
    cards[0] = base("w", 1, "m");
    for (size_t i = 0; i < N; i++) {
      cards[i + 1] = adapter("w", 1, "ad", "x");
      cards[i + 1].model_id = names[i];
    }
    s = came_to(cards, KVRELAY_PARTS_MAX + more, &entries);
    cr_expect(s.conflicts == (more == 0   ? 0
                              : more == 1 ? KVRELAY_CONFLICT_POOL
                                          : KVRELAY_CONFLICT_TOPOLOGY + KVRELAY_CONFLICT_POOL) &&
                  s.fit != (more > 0) && entries == 1 - more / 2,
              "%zu: %s", more, s.why);
  }
  free((void *)names[0].ptr);
  free(names);
  free(cards);
}

Test(topology, I4_base_cards_of_an_endpoint_have_to_agree) {
  for (int what = 0; what < 4; what++) {
    kvrelay_card cards[] = {base("w", 1, "m"), base("w", 2, "m")};
    if (what == 0)
      cards[1].domain.cache_semantics.digest[3] = 1;
    else if (what == 1)
      cards[1].domain.routing_scope.source = 2;
    else if (what == 2)
      cards[1].semantics.kv_block_size = 32;
    else
      cards[1].semantics.hash_format = HASHFMT_FORMAT_EAGLE;
    TELLS(cards, "P no n/w is=A m\nn/m " READY "w is=A\n");
  }
}

Test(topology, I4_two_models_or_two_base_cards_leave_the_topology) {
  const kvrelay_card models[] = {base("w", 1, "m"), base("w", 2, "x"), base("v", 3, "m")};
  const kvrelay_card twice[] = {base("w", 1, "m"), base("w", 1, "m")};
  kvrelay_card other[] = {base("w", 1, "m"), base("w", 1, "m")};
  other[1].domain.routing_scope.digest[0] = 'v';
  other[1].semantics.kv_block_size = 8;
  TELLS(other, "PT no n/w is=A m\n");
  TELLS(models, "fit n/v is=A m\nT no n/w is=A m x\nn/m " READY "v is=A\n");
  TELLS(twice, "T no n/w is=A m\n");
}

Test(topology, I2_a_name_that_is_not_valid_takes_its_worker_out_but_not_its_domain) {
  kvrelay_card cards[] = {base("w", 1, "m"), base("w", 2, " m")};
  cards[1].role = KVRELAY_ROLE_DECODE;
  TELLS(cards, "B fit n/w is=A m\nn/m " READY "w is=A\n");
  cards[1].semantics.kv_block_size = 8;
  TELLS(cards, "PB no n/w is=A m\nn/m " READY "w is=A\n");
}

Test(topology, half_an_adapter_card_is_ignored) {
  for (int half = 0; half < 2; half++) {
    kvrelay_card cards[] = {base("w", 1, "m"), adapter("w", 1, "ad", "x")};
    cards[1].has_suffix = half;
    cards[1].has_lora = !half;
    TELLS(cards, "B fit n/w is=A m\nn/m " READY "w is=A\n");
  }
}

Test(topology, I4_adapters_need_a_base_card_of_their_worker) {
  const kvrelay_card cards[] = {base("w", 1, "m"), adapter("w", 1, "ad", "x"),
                                adapter("w", 2, "other", "x")};
  const kvrelay_card alone[] = {adapter("w", 1, "ad", "x")};
  TELLS(cards, "fit n/w is=A ad m\nn/m " READY "w is=A +ad ready missing=\n");
  TELLS(alone, "P no n/w is=\n");
}

Test(topology, adapter_limits_of_one_worker) {
  kvrelay_card cards[] = {base("w", 1, "m"), adapter("w", 1, "a", "x"), adapter("w", 1, "b", "y"),
                          base("w", 2, "m"), adapter("w", 2, "a", "x")};
  cards[1].adapter_limit = cards[2].adapter_limit = 4;
  cards[4].adapter_limit = 8; /* another worker may differ */
  TELLS(cards, "fit n/w is=A a b m\nn/m " READY "w is=A +a ready missing= +b ready missing=\n");
  cards[2].adapter_limit = 5;
  TELLS(cards, "P no n/w is=A a b m\nn/m " READY "w is=A +a ready missing= +b ready missing=\n");
}

Test(topology, one_adapter_name_with_two_targets) {
  const kvrelay_card cards[] = {base("w", 1, "m"), adapter("w", 1, "ad", "x"), base("w", 2, "m"),
                                adapter("w", 2, "ad", "y")};
  TELLS(cards, "B fit n/w is=A m\nn/m " READY "w is=A\n");
}

Test(topology, I4_an_id_that_another_model_takes_as_alias) {
  const kvrelay_text taken[] = {text("x"), text("y2"), text("y2"), text(""), text("y")};
  kvrelay_card cards[] = {base("w", 1, "x"), base("v", 2, "y"), base("u", 3, "x"),
                          adapter("u", 3, "ad", "r")};
  TELLS(cards, "fit n/u is=A ad x\nfit n/v is=A y\nfit n/w is=A x\n"
               "n/x " READY "u is=A w is=A +ad ready missing=\nn/y " READY "v is=A\n");
  cards[1].aliases = taken;
  cards[1].aliases_len = 5;
  /* x goes everywhere, and its entry with it; what else has a name of its own stays in its pool. */
  TELLS(cards, "B fit n/u is=A ad\nfit n/v is=A y,y2\nB no n/w is=A\n"
               "n/y " READY "v is=A\n");
}

Test(topology, an_alias_of_two_models_goes_from_both) {
  const kvrelay_text one[] = {text("same"), text("one")}, two[] = {text("two"), text("same")};
  kvrelay_card cards[] = {base("v", 1, "x"), base("w", 2, "y"), base("u", 3, "x")};
  cards[0].aliases = one;
  cards[1].aliases = two;
  cards[0].aliases_len = cards[1].aliases_len = 2;
  TELLS(cards, "fit n/u is=A x\nfit n/v is=A x,one\nfit n/w is=A y,two\n"
               "n/x " READY "u is=A v is=A\nn/y " READY "w is=A\n");
}

Test(topology, I2_aliases_of_workers_are_united_and_sorted) {
  const kvrelay_text one[] = {text("b"), text("m")}, two[] = {text("c"), text("a"), text("b")};
  kvrelay_card cards[] = {base("w", 1, "m"), base("w", 2, "m")};
  cards[0].aliases = one;
  cards[0].aliases_len = 2;
  cards[1].aliases = two;
  cards[1].aliases_len = 3;
  TELLS(cards, "fit n/w is=A m,a,b,c\nn/m " READY "w is=A\n");
}

Test(topology, pools_of_one_identity_are_never_merged) {
  kvrelay_card cards[] = {base("v", 1, "m"), base("w", 2, "m"), base("u", 3, "m")};
  cards[1].domain = cards[0].domain;
  TELLS(cards, "fit n/u is=A m\nP no n/v is=A m\nP no n/w is=A m\n"
               "n/m " READY "u is=A v is=A w is=A\n");
}

Test(topology, a_prefill_model_without_role_needs_decode) {
  kvrelay_card cards[] = {base("p", 1, "m"), base("q", 2, "z")};
  cards[0].role = cards[1].role = 0;
  cards[0].prefill_capable = true;
  TELLS(cards, "fit n/p is=P m\nfit n/q is=L z\n"
               "n/m unavailable present=P missing=D twice= p is=P\n"
               "n/z ready present= missing= twice= legacy q is=L\n");
}

Test(topology, members_stand_in_the_order_of_written_paths) {
  const kvrelay_card cards[] = {base("a", 1, "m"), base("a-b", 2, "m")};
  TELLS(cards, "fit n/a-b is=A m\nfit n/a is=A m\nn/m " READY "a-b is=A a is=A\n");
}

Test(topology, arguments) {
  kvrelay_card cards[] = {base("w", 1, "m")};
  kvrelay_topology out;
  uint8_t mem[4096];
  const size_t len = kvrelay_topology_mem_size(cards, 1);
  cr_assert_leq(len, sizeof mem);
  cr_expect_eq(kvrelay_topology_derive(cards, 1, mem, len - 1, &out), KVRELAY_ERR_NOSPACE);
  cr_expect_eq(kvrelay_topology_derive(cards, 1, mem + 1, len, &out), KVRELAY_OK);
  cards[0].endpoint.present = false;
  cr_expect_eq(kvrelay_topology_derive(cards, 1, mem, len, &out), KVRELAY_ERR_ARG);
  cr_expect_eq(kvrelay_topology_derive(NULL, 0, mem, sizeof mem, &out), KVRELAY_OK);
  cr_expect_eq(out.endpoints_len + out.entries_len, 0);
}

/* ---- the order of cards ---- */

/* Any card; the numbers of its endpoint, worker and names come out of a few. */
static kvrelay_card any_card(uint64_t *rng) {
  static const char *const names[] = {"m", "x", "y", " bad", "m2", "ad"};
  static const char *const components[] = {"a", "b", "\tc", "a-b"};
  static const int32_t decode[] = {KVRELAY_ROLE_DECODE}, odd[] = {KVRELAY_ROLE_PREFILL, 77};
  static const kvrelay_roles needs[2 + KVRELAY_ROLES_MAX + 1] = {{decode, 1}, {odd, 2}};
  static kvrelay_text aliases[6];
  const uint64_t r = ckf_rng_draw(rng), r2 = ckf_rng_draw(rng);
  const char *const component = components[r % 4], *const name = names[(r >> 2) % 6];
  kvrelay_card c = (r >> 8) % 3 ? base(component, (r >> 12) % 4, name)
                                : adapter(component, (r >> 12) % 4, name, names[(r >> 16) % 6]);
  for (size_t i = 0; i < 6; i++)
    aliases[i] = text(names[i]);
  c.role = (int32_t)((r >> 20) % 7);
  c.prefill_capable = r >> 24 & 1;
  c.liveness = (int32_t)((r >> 25) % 3);
  c.needs = &needs[(r >> 28) % 3];
  c.needs_len = r2 % 8 ? (r >> 30) % (4 - (r >> 28) % 3) : KVRELAY_ROLES_MAX + (r2 >> 3) % 2;
  c.aliases = aliases + (r >> 34) % 5;
  c.aliases_len = (r >> 38) % 3 ? 0 : 1;
  c.semantics.kv_block_size = (r >> 42) % 8 ? 16 : (r >> 42) % 16;
  c.semantics.hash_format = 1 + (r2 >> 20) % 16 / 14;
  c.domain.routing_scope.digest[0] = (uint8_t)((r >> 46) % 8 ? component[0] : 'z');
  c.domain.cache_semantics.source = (r2 >> 4) % 16 ? KVRELAY_SOURCE_EXPLICIT : 0;
  c.domain.cache_semantics.digest_len = (r2 >> 8) % 16 ? KVRELAY_DIGEST_LEN : 15;
  c.domain.routing_scope.source = (r2 >> 28) % 16 ? KVRELAY_SOURCE_EXPLICIT : 0;
  c.domain.cache_semantics.present = (r2 >> 32) % 32 != 0;
  c.domain.routing_scope.present = (r2 >> 37) % 32 != 0;
  c.domain.present = (r2 >> 42) % 32 != 0;
  c.semantics.present = (r2 >> 47) % 32 != 0;
  c.model_type = text((r2 >> 12) % 4 ? "chat" : "text");
  c.adapter_limit = (r >> 50) % 8 ? 4 : (r >> 54) % 8;
  return c;
}

/* Takes one thing from another card. */
static void differ(kvrelay_card *c, const kvrelay_card *other, uint64_t what) {
  switch (what % 15) {
  case 0:
    c->domain.routing_scope.digest[0] ^= 4;
    break;
  case 1:
    c->domain.cache_semantics = other->domain.cache_semantics;
    break;
  case 2:
    c->semantics = other->semantics;
    break;
  case 3:
    c->needs = other->needs;
    c->needs_len = other->needs_len;
    break;
  case 4:
    c->role = other->role;
    break;
  case 5:
    c->liveness = other->liveness;
    break;
  case 6:
    c->aliases = other->aliases;
    c->aliases_len = other->aliases_len;
    break;
  case 7:
    c->prefill_capable = !c->prefill_capable;
    break;
  case 8:
    c->adapter_limit = other->adapter_limit;
    break;
  case 9:
    c->has_suffix = !c->has_suffix;
    break;
  case 10:
    c->model_id = other->model_id;
    break;
  case 11:
    c->has_lora = !c->has_lora;
    break;
  case 12:
    c->domain.present = !c->domain.present;
    break;
  case 13:
    c->domain.routing_scope = other->domain.routing_scope;
    break;
  default:
    c->worker_id = other->worker_id;
    break;
  }
}

/* Any cards, in any order: the same text, which told() checks for validity on the way. In every
 * other round they differ by hardly anything. */
Test(topology, the_order_of_cards_is_nothing) {
  uint64_t rng = 7;
  for (int round = 0; round < 6000; round++) {
    kvrelay_card cards[12];
    char want[TEXT];
    const size_t n = 1 + ckf_rng_draw(&rng) % (round % 4 == 1 ? 4 : 12);
    for (size_t i = 0; i < n; i++) {
      const kvrelay_card any = any_card(&rng);
      cards[i] = round % 2 && i != 0 ? cards[i - 1] : any;
      if (round % 2)
        differ(&cards[i], &any, ckf_rng_draw(&rng));
    }
    strcpy(want, told_wholly(cards, n));
    for (int turn = 0; turn < 4; turn++) {
      for (size_t i = n; i > 1; i--) {
        const size_t k = ckf_rng_draw(&rng) % i;
        const kvrelay_card other = cards[i - 1];
        cards[i - 1] = cards[k];
        cards[k] = other;
      }
      const char *const got = told_wholly(cards, n);
      cr_assert_str_eq(got, want, "%s\nother order\n%s", want, got);
    }
  }
}
