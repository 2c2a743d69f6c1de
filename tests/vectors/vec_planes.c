/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Groups of contract.json about readiness and load.  Each table of units or ranks is judged twice:
 * by the rule alone, and by what a relay that was given such workers sends.
 */

#include "vectors.h"

#include "kvrelay.h"
#include "kvrelay_pb.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENSURE(CONDITION, ...)                                                                     \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return vec_fail(why, why_cap, __VA_ARGS__);                                                  \
  } while (0)

#define MS UINT64_C(1000000)
#define UNITS_CAP 8
#define NEEDS_CAP 4

static kvrelay_text text_of(const char *word) {
  kvrelay_text text = {(const uint8_t *)word, strlen(word)};
  return text;
}

static int32_t role_of(const json_t *name) {
  static const char *const names[] = {"?", "prefill", "decode", "encode", "aggregated", "legacy"};
  for (int32_t role = 1; role < (int32_t)(sizeof names / sizeof *names); role++)
    if (strcmp(vec_str(name), names[role]) == 0)
      return role;
  return 0;
}

static uint32_t set_of(const json_t *names) {
  uint32_t set = 0;
  for (size_t i = 0; i < json_array_size(names); i++)
    set |= UINT32_C(1) << role_of(json_array_get(names, i));
  return set;
}

static uint32_t set_of_list(kvrelay_roles roles) {
  uint32_t set = 0;
  for (size_t i = 0; i < roles.len; i++)
    set |= UINT32_C(1) << roles.ptr[i];
  return set;
}

static int32_t state_of(const json_t *name) {
  return strcmp(vec_str(name), "READY") == 0         ? KVRELAY_READY_READY
         : strcmp(vec_str(name), "UNAVAILABLE") == 0 ? KVRELAY_READY_UNAVAILABLE
                                                     : -1;
}

/* ---- units ---- */

typedef struct unit_table {
  kvrelay_unit units[UNITS_CAP];
  kvrelay_roles needs[UNITS_CAP][NEEDS_CAP];
  int32_t roles[UNITS_CAP][NEEDS_CAP][NEEDS_CAP];
  size_t len;
} unit_table;

static bool read_units(const json_t *rows, unit_table *t) {
  memset(t, 0, sizeof *t);
  t->len = json_array_size(rows);
  if (!json_is_array(rows) || t->len > UNITS_CAP)
    return false;
  for (size_t i = 0; i < t->len; i++) {
    const json_t *row = json_array_get(rows, i), *needs = json_object_get(row, "needs");
    kvrelay_unit *u = &t->units[i];
    u->role = role_of(vec_get(row, "role"));
    u->known = true;
    u->live = (uint32_t)vec_u64(vec_get(row, "live"));
    u->needs = t->needs[i];
    u->needs_len = json_array_size(needs);
    if (u->role == 0 || u->needs_len > NEEDS_CAP)
      return false;
    for (size_t k = 0; k < u->needs_len; k++) {
      const json_t *roles = json_array_get(needs, k);
      t->needs[i][k] = (kvrelay_roles){t->roles[i][k], json_array_size(roles)};
      if (t->needs[i][k].len > NEEDS_CAP)
        return false;
      for (size_t n = 0; n < t->needs[i][k].len; n++)
        t->roles[i][k][n] = role_of(json_array_get(roles, n));
    }
  }
  return true;
}

/* ---- a relay that is given units as cards, or one pool ---- */

#define CARDS_CAP 64

typedef struct relay_case {
  kvrelay_relay relay;
  kvrelay_topology topology;
  kvrelay_outgoing out;
  kvrelay_card cards[CARDS_CAP];
  size_t cards_len, endpoints_len;
  void *mem[6];
  size_t mem_len;
} relay_case;

static void *case_memory(relay_case *c, size_t bytes) {
  return c->mem[c->mem_len++] = malloc(bytes + 1);
}

static bool case_open(relay_case *c) {
  memset(c, 0, sizeof *c);
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity = (kvrelay_relay_identity){17, 23};
  cfg.max_pools = cfg.max_members = 2 * UNITS_CAP;
  cfg.max_bucket_count = 1024;
  const size_t len = kvrelay_relay_mem_size(&cfg);
  return kvrelay_relay_init(&c->relay, &cfg, case_memory(c, len), len, 0) == KVRELAY_OK;
}

static void case_close(relay_case *c) {
  for (size_t i = 0; i < c->mem_len; i++)
    free(c->mem[i]);
}

/* The first message of a plane into c->out. */
static bool case_ask(relay_case *c, int32_t method, uint64_t now_ns) {
  const kvrelay_request q = {method, KVRELAY_CONTRACT_MARKER, text_of("v"), {0}, 0};
  kvrelay_status status;
  uint64_t call;
  return kvrelay_relay_call_open(&c->relay, &q, now_ns, &call, &status) == KVRELAY_OK &&
         kvrelay_relay_call_pull(&c->relay, call, 1, now_ns, &c->out) == KVRELAY_PULL_MESSAGE;
}

/* The unit as an endpoint of its own: as many workers as live, one that is dead when none is. */
static bool case_serve(relay_case *c, const kvrelay_unit *u, bool adapter) {
  static char names[2 * UNITS_CAP][8];
  char *name = names[c->endpoints_len];
  snprintf(name, sizeof names[0], "e%zu", c->endpoints_len++);
  for (uint64_t w = 0; w == 0 || w < u->live; w++) {
    kvrelay_card card = {0};
    card.endpoint = (kvrelay_endpoint){true, text_of("n"), text_of("c"), text_of(name)};
    card.worker_id = w;
    card.liveness = u->live == 0 ? KVRELAY_LIVENESS_DEAD : KVRELAY_LIVENESS_LIVE;
    card.model_id = text_of("llama");
    card.role = u->role;
    card.needs = u->needs;
    card.needs_len = u->needs_len;
    card.semantics = (kvrelay_semantics){true, 4, HASHFMT_FORMAT_STANDARD};
    if (c->cards_len + 2 > CARDS_CAP)
      return false;
    c->cards[c->cards_len++] = card;
    if (!adapter)
      continue;
    card.model_id = card.adapter = text_of("sql");
    card.has_suffix = card.has_lora = true;
    c->cards[c->cards_len++] = card;
  }
  return true;
}

static bool case_topology(relay_case *c) {
  const size_t len = kvrelay_topology_mem_size(c->cards, c->cards_len);
  return kvrelay_topology_derive(c->cards, c->cards_len, case_memory(c, len), len, &c->topology) ==
             KVRELAY_OK &&
         kvrelay_relay_set_topology(&c->relay, &c->topology) == KVRELAY_OK &&
         case_ask(c, KVRELAY_METHOD_SUBSCRIBE_READINESS, 0);
}

static int judge_readiness(const kvrelay_readiness_update *m, const json_t *expect, char *why,
                           size_t why_cap) {
  ENSURE(m->entries_len == 1, "%zu entries", m->entries_len);
  const kvrelay_topology_entry *e = &m->entries[0];
  ENSURE(kvrelay_check_topology_entry(e).class_ == KVRELAY_CLASS_OK, "the entry is not valid");
  ENSURE(e->state == state_of(vec_get(expect, "state")), "sent state %d", (int)e->state);
  ENSURE(set_of_list(e->present_roles) == set_of(vec_get(expect, "present")), "sent present");
  ENSURE(set_of_list(e->missing_roles) == set_of(vec_get(expect, "missing")), "sent missing");
  ENSURE(set_of_list(e->duplicate_role_endpoints) == set_of(vec_get(expect, "duplicates_on_wire")),
         "sent duplicates");
  ENSURE(e->legacy_fallback_active == json_is_true(vec_get(expect, "legacy")), "sent legacy");
  return VEC_PASSED;
}

static int run_readiness(const json_t *v, char *why, size_t why_cap) {
  unit_table t;
  const json_t *expect = vec_get(v, "expect");
  ENSURE(read_units(vec_get(v, "units"), &t), "units");
  const kvrelay_readiness e = kvrelay_readiness_judge(t.units, t.len);
  ENSURE(e.state == state_of(vec_get(expect, "state")), "state %d", (int)e.state);
  ENSURE(e.present == set_of(vec_get(expect, "present")), "present %#" PRIx32, e.present);
  ENSURE(e.missing == set_of(vec_get(expect, "missing")), "missing %#" PRIx32, e.missing);
  ENSURE(e.duplicates == set_of(vec_get(expect, "duplicates")), "duplicates %#" PRIx32,
         e.duplicates);
  ENSURE(e.legacy_fallback_active == json_is_true(vec_get(expect, "legacy")), "legacy");
  relay_case c;
  int result = VEC_FAILED;
  bool ok = case_open(&c);
  for (size_t i = 0; i < t.len && ok; i++)
    ok = case_serve(&c, &t.units[i], false);
  if (!ok || !case_topology(&c))
    result = vec_fail(why, why_cap, "the relay sends nothing");
  else if (t.len == 0) /* an entry has members */
    result = c.out.u.readiness.entries_len == 0 ? VEC_PASSED : vec_fail(why, why_cap, "an entry");
  else
    result = judge_readiness(&c.out.u.readiness, expect, why, why_cap);
  case_close(&c);
  return result;
}

static int judge_adapter(const kvrelay_readiness_update *m, const json_t *expect, char *why,
                         size_t why_cap) {
  ENSURE(m->entries_len == 1 && m->entries[0].adapters_len == 1, "no adapter");
  const kvrelay_adapter_readiness *a = &m->entries[0].adapters[0];
  ENSURE(kvrelay_text_equal(a->canonical_model_id, text_of("sql")), "another adapter");
  ENSURE(a->state == state_of(vec_get(expect, "state")), "state %d", (int)a->state);
  ENSURE(set_of_list(a->missing_roles) == set_of(vec_get(expect, "missing")), "missing");
  return VEC_PASSED;
}

/* Beside endpoints that do not carry the adapter and would turn every answer around. */
static int run_adapter_readiness(const json_t *v, char *why, size_t why_cap) {
  static const kvrelay_unit others[] = {{KVRELAY_ROLE_PREFILL, true, 1, NULL, 0},
                                        {KVRELAY_ROLE_ENCODE, true, 0, NULL, 0}};
  unit_table t;
  ENSURE(read_units(vec_get(v, "adapter_units"), &t), "units");
  relay_case c;
  bool ok = case_open(&c);
  for (size_t i = 0; i < t.len && ok; i++)
    ok = case_serve(&c, &t.units[i], true);
  for (size_t i = 0; i < 2 && ok; i++)
    ok = case_serve(&c, &others[i], false);
  const int result = ok && case_topology(&c)
                         ? judge_adapter(&c.out.u.readiness, vec_get(v, "expect"), why, why_cap)
                         : vec_fail(why, why_cap, "the relay sends nothing");
  case_close(&c);
  return result;
}

/* ---- load ---- */

static bool case_pool(relay_case *c, ckf_producer *state, kvrelay_pool **pool) {
  static const int32_t role = KVRELAY_ROLE_AGGREGATED;
  const kvrelay_registration registration = {
      text_of("llama"), {true, KVRELAY_TARGET_BASE, text_of("llama"), {NULL, 0}}, NULL, 0};
  const kvrelay_digest digest = {true, {1}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  kvrelay_descriptor d = {0};
  d.producer.pool_id = (kvrelay_pool_id){true, 1, {true, digest, digest}, 7};
  d.serving_endpoint = (kvrelay_endpoint){true, text_of("n"), text_of("c"), text_of("e")};
  d.registrations = &registration;
  d.registrations_len = 1;
  d.query_semantics = (kvrelay_semantics){true, 4, HASHFMT_FORMAT_STANDARD};
  d.pool_roles = (kvrelay_roles){&role, 1};
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = 64;
  const size_t state_len = ckf_producer_mem_size(&cfg);
  if (ckf_producer_init(state, &cfg, case_memory(c, state_len), state_len) != CKF_OK)
    return false;
  const size_t len = kvrelay_relay_pool_mem_size(&c->relay, &d);
  return kvrelay_relay_pool_add(&c->relay, &d, state, case_memory(c, len), len, 0, pool) ==
         KVRELAY_OK;
}

/* One worker per rank. */
static bool case_ranks(relay_case *c, kvrelay_pool *pool, const json_t *rows) {
  kvrelay_rank_range ranges[UNITS_CAP];
  const size_t count = json_array_size(rows);
  if (count > UNITS_CAP)
    return false;
  for (size_t i = 0; i < count; i++)
    ranges[i] = (kvrelay_rank_range){i + 1, (uint32_t)i, 1,
                                     vec_u64(vec_get(json_array_get(rows, i), "capacity"))};
  const size_t len = kvrelay_pool_ranks_mem_size(ranges, count);
  if (kvrelay_pool_set_ranks(pool, ranges, count, case_memory(c, len), len) != KVRELAY_OK)
    return false;
  for (size_t i = 0; i < count; i++) {
    const json_t *used = json_object_get(json_array_get(rows, i), "used");
    if (used && kvrelay_pool_report(pool, i + 1, (uint32_t)i, vec_u64(used)) != KVRELAY_OK)
      return false;
  }
  return true;
}

static int judge_load(const kvrelay_load_update *m, const json_t *expect, char *why,
                      size_t why_cap) {
  ENSURE(m->window_sequence == 1 && m->window_ms == 1000, "window");
  ENSURE(m->pools_len == 1, "%zu pools", m->pools_len);
  const kvrelay_load_entry *e = &m->pools[0];
  ENSURE(e->kv_used_blocks == vec_u64(vec_get(expect, "kv_used_blocks")), "used %" PRIu64,
         e->kv_used_blocks);
  ENSURE(e->total_kv_blocks == vec_u64(vec_get(expect, "total_kv_blocks")), "total %" PRIu64,
         e->total_kv_blocks);
  ENSURE(e->kv_observed_ranks == vec_u64(vec_get(expect, "kv_observed_ranks")), "observed");
  ENSURE(e->kv_expected_ranks == vec_u64(vec_get(expect, "kv_expected_ranks")), "expected");
  ENSURE((e->kv_expected_ranks == 0 || e->kv_observed_ranks < e->kv_expected_ranks) ==
             json_is_true(vec_get(expect, "degraded")),
         "degraded");
  return VEC_PASSED;
}

static int run_load(const json_t *v, char *why, size_t why_cap) {
  relay_case c;
  ckf_producer state;
  kvrelay_pool *pool;
  const bool ok = case_open(&c) && case_pool(&c, &state, &pool) &&
                  case_ranks(&c, pool, vec_get(v, "ranks")) &&
                  case_ask(&c, KVRELAY_METHOD_SUBSCRIBE_LOAD, 1000 * MS);
  const int result = ok ? judge_load(&c.out.u.load, vec_get(v, "expect"), why, why_cap)
                        : vec_fail(why, why_cap, "the relay sends nothing");
  case_close(&c);
  return result;
}

/* ---- a consumer that is given one message of a plane ---- */

typedef struct asker {
  kvrelay_consumer consumer;
  void *mem;
  uint32_t readiness, load; /* calls */
  bool in_force, closed, stopped;
} asker;

static bool asker_open(asker *a) {
  memset(a, 0, sizeof *a);
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  a->mem = malloc(len);
  if (!a->mem || kvrelay_consumer_init(&a->consumer, &cfg, a->mem, len, 0) != KVRELAY_OK)
    return false;
  kvrelay_consumer_connected(&a->consumer, 1);
  kvrelay_action action;
  while (kvrelay_consumer_action_next(&a->consumer, 1, &action) == 1) {
    if (action.request.method == KVRELAY_METHOD_SUBSCRIBE_READINESS)
      a->readiness = action.call;
    if (action.request.method == KVRELAY_METHOD_SUBSCRIBE_LOAD)
      a->load = action.call;
  }
  return a->readiness != 0 && a->load != 0;
}

static const char *asker_plane(asker *a) {
  kvrelay_event_out event;
  while (kvrelay_consumer_event_next(&a->consumer, &event) == 1) {
    a->in_force |= event.kind == KVRELAY_EVENT_READINESS || event.kind == KVRELAY_EVENT_LOAD;
    a->closed |=
        event.kind == KVRELAY_EVENT_READINESS_VOID || event.kind == KVRELAY_EVENT_LOAD_VOID;
    a->stopped |= event.kind == KVRELAY_EVENT_STOPPED;
  }
  return a->stopped ? "stop" : a->closed ? "plane_invalid" : a->in_force ? "ok" : "?";
}

static const char *class_name(uint8_t class_) {
  static const char *const names[] = {"ok", "invalid", "unsupported", "envelope"};
  return names[class_];
}

static int judge_readiness_plane(asker *a, const json_t *v, char *why, size_t why_cap) {
  const char *plane = asker_plane(a);
  kvrelay_plane_view view;
  const bool in_force = kvrelay_consumer_readiness(&a->consumer, 1, &view);
  const json_t *entries = json_object_get(v, "entries");
  ENSURE(strcmp(plane, vec_str(vec_get(v, "plane"))) == 0, "plane %s", plane);
  ENSURE(in_force == (entries != NULL), "in force");
  ENSURE(!in_force || view.len == json_array_size(entries), "%" PRIu32 " entries", view.len);
  for (uint32_t i = 0; in_force && i < view.len; i++) {
    kvrelay_entry_view entry;
    ENSURE(kvrelay_consumer_readiness_get(&a->consumer, i, &entry) == KVRELAY_OK, "get");
    ENSURE(strcmp(class_name(entry.verdict.class_),
                  vec_str(vec_get(json_array_get(entries, i), "class"))) == 0,
           "entry %" PRIu32 " is %s", i, class_name(entry.verdict.class_));
  }
  return VEC_PASSED;
}

static int run_readiness_verdict(const json_t *v, char *why, size_t why_cap) {
  static uint8_t arena_mem[1 << 16];
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_readiness_update m;
  size_t len;
  uint8_t *bytes = vec_hex(vec_get(v, "hex"), &len);
  asker a;
  const bool ok = kvrelay_pb_decode_readiness(bytes, len, &arena, &m) == KVRELAY_OK &&
                  asker_open(&a) &&
                  kvrelay_consumer_feed_readiness(&a.consumer, a.readiness, &m, 1) == KVRELAY_OK;
  const int result =
      ok ? judge_readiness_plane(&a, v, why, why_cap) : vec_fail(why, why_cap, "no way to feed it");
  if (ok)
    free(a.mem);
  free(bytes);
  return result;
}

/* Load entries come out by producer, those that are set aside last. */
static int judge_load_plane(asker *a, const json_t *v, char *why, size_t why_cap) {
  const char *plane = asker_plane(a);
  kvrelay_plane_view view;
  const bool in_force = kvrelay_consumer_load(&a->consumer, 1, &view);
  const json_t *pools = json_object_get(v, "pools");
  ENSURE(strcmp(plane, vec_str(vec_get(v, "plane"))) == 0, "plane %s", plane);
  ENSURE(in_force == (pools != NULL), "in force");
  ENSURE(!in_force || view.len == json_array_size(pools), "%" PRIu32 " pools", view.len);
  for (uint32_t i = 0; in_force && i < view.len; i++) {
    const json_t *want = json_array_get(pools, i);
    kvrelay_load_view load;
    ENSURE(kvrelay_consumer_load_get(&a->consumer, i, &load) == KVRELAY_OK, "get");
    ENSURE(strcmp(class_name(load.verdict.class_), vec_str(vec_get(want, "class"))) == 0,
           "pool %" PRIu32 " is %s", i, class_name(load.verdict.class_));
    ENSURE(load.usable == json_is_true(json_object_get(want, "usable")), "usable");
  }
  return VEC_PASSED;
}

static int run_load_verdict(const json_t *v, char *why, size_t why_cap) {
  static uint8_t arena_mem[1 << 16];
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_load_update m;
  size_t len;
  uint8_t *bytes = vec_hex(vec_get(v, "hex"), &len);
  asker a;
  const bool ok = kvrelay_pb_decode_load(bytes, len, &arena, &m) == KVRELAY_OK && asker_open(&a) &&
                  kvrelay_consumer_feed_load(&a.consumer, a.load, &m, 1) == KVRELAY_OK;
  const int result =
      ok ? judge_load_plane(&a, v, why, why_cap) : vec_fail(why, why_cap, "no way to feed it");
  if (ok)
    free(a.mem);
  free(bytes);
  return result;
}

const vec_kind vec_planes_groups[] = {
    {"readiness_verdicts", run_readiness_verdict},
    {"load_verdicts", run_load_verdict},
    {"readiness", run_readiness},
    {"adapter_readiness", run_adapter_readiness},
    {"load", run_load},
    {NULL, NULL},
};
