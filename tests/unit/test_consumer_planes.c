/* SPDX-License-Identifier: Apache-2.0 */
/* Readiness and load at a consumer: checks and their order, quarantine, freshness, retry, and what
 * stands beside a pool. */
#include <stdio.h>

#include "test_consumer.h"

static kvrelay_consumer_config planes_config(void) {
  kvrelay_consumer_config cfg = kit_config();
  cfg.follow_readiness = cfg.follow_load = true;
  return cfg;
}

static void planes_open(kit *k) {
  const kvrelay_consumer_config cfg = planes_config();
  kit_init(k, &cfg);
  kit_connect(k);
  cr_assert(k->readiness != 0 && k->load != 0 && k->opened == 4);
}

static const int32_t role_prefill[] = {KVRELAY_ROLE_PREFILL}, role_zero[] = {0},
                     role_encode[] = {KVRELAY_ROLE_ENCODE}, role_odd[] = {99};

/* One entry of the model "model" as kit_pool names it, or another. */
typedef struct entry_of {
  kvrelay_topology_entry e;
  kvrelay_topology_member member;
  kvrelay_adapter_readiness adapters[2];
} entry_of;

static void make_entry(entry_of *o, const char *namespace_, const char *id, int32_t state) {
  memset(o, 0, sizeof *o);
  o->member.endpoint = (kvrelay_endpoint){true, text(namespace_), text("c"), text("e")};
  o->member.roles = (kvrelay_roles){role_prefill, 1};
  o->e.namespace_ = text(namespace_);
  o->e.canonical_model_id = text(id);
  o->e.state = state;
  o->e.members = &o->member;
  o->e.members_len = 1;
}

static kvrelay_readiness_update image(uint64_t revision, const kvrelay_topology_entry *entries,
                                      size_t len) {
  const kvrelay_readiness_update m = {kit_envelope(), revision, entries, len};
  return m;
}

static void feed_image(kit *k, uint64_t revision, const kvrelay_topology_entry *entries,
                       size_t len) {
  const kvrelay_readiness_update m = image(revision, entries, len);
  cr_assert_eq(kvrelay_consumer_feed_readiness(&k->c, k->readiness, &m, k->now), KVRELAY_OK);
}

static bool readiness_in_force(const kit *k) {
  kvrelay_plane_view v;
  return kvrelay_consumer_readiness(&k->c, k->now, &v);
}

static bool load_in_force(const kit *k) {
  kvrelay_plane_view v;
  return kvrelay_consumer_load(&k->c, k->now, &v);
}

static kvrelay_load_update window_of(uint64_t window, const kvrelay_load_entry *pools, size_t len) {
  const kvrelay_load_update m = {kit_envelope(), window, 1000, 1000, pools, len};
  return m;
}

static void feed_window(kit *k, uint64_t window, const kvrelay_load_entry *pools, size_t len) {
  const kvrelay_load_update m = window_of(window, pools, len);
  cr_assert_eq(kvrelay_consumer_feed_load(&k->c, k->load, &m, k->now), KVRELAY_OK);
}

/* The plane is closed by us, and asked for again after the first backoff. */
static void assert_reopens(kit *k, uint32_t *call, int32_t event) {
  const uint32_t former = *call;
  const size_t cancels = k->cancels;
  (void)kit_event(k, event);
  kit_run(k);
  cr_assert_eq(k->cancels, cancels + 1);
  const uint64_t slept = kit_sleep(k);
  cr_assert(slept >= 250 * MS && slept <= 500 * MS);
  cr_assert_neq(*call, former);
}

/* ---- readiness ---- */

Test(consumer_planes, readiness_comes_and_is_replaced) {
  entry_of a, b;
  kit k;
  planes_open(&k);
  cr_assert(!readiness_in_force(&k));
  make_entry(&a, "n", "one", KVRELAY_READY_READY);
  make_entry(&b, "n", "two", KVRELAY_READY_UNKNOWN);
  const kvrelay_topology_entry both[] = {b.e, a.e};
  feed_image(&k, 5, both, 2);
  (void)kit_event(&k, KVRELAY_EVENT_READINESS);
  memset(&a, 0xA5, sizeof a); /* nothing of the message is needed any more */
  memset(&b, 0xA5, sizeof b);
  kvrelay_plane_view v;
  kvrelay_entry_view e;
  cr_assert(kvrelay_consumer_readiness(&k.c, k.now + 7, &v));
  cr_assert(v.revision == 5 && v.len == 2 && v.age_ns == 7 && !v.stale);
  cr_assert_eq(kvrelay_consumer_readiness_get(&k.c, 0, &e), KVRELAY_OK);
  cr_assert(kvrelay_text_equal(e.entry->canonical_model_id, text("two")));
  cr_assert(kvrelay_text_equal(e.entry->members[0].endpoint.component, text("c")));
  cr_assert_eq(e.entry->members[0].roles.ptr[0], KVRELAY_ROLE_PREFILL);
  cr_assert_eq(kvrelay_consumer_readiness_get(&k.c, 2, &e), KVRELAY_ERR_NOT_FOUND);
  make_entry(&a, "n", "three", KVRELAY_READY_UNAVAILABLE);
  feed_image(&k, 9, &a.e, 1); /* revisions may jump, what is missing is gone */
  cr_assert(kvrelay_consumer_readiness(&k.c, k.now, &v));
  cr_assert(v.revision == 9 && v.len == 1);
  kit_events(&k, 0);
  k.now += SECOND;
  feed_image(&k, 9, &a.e, 1); /* a heartbeat: fresh, but no news */
  cr_assert_eq(kit_events(&k, KVRELAY_EVENT_READINESS), 0);
  cr_assert(kvrelay_consumer_readiness(&k.c, k.now, &v) && v.age_ns == 0);
  feed_image(&k, 10, NULL, 0);
  cr_assert(kvrelay_consumer_readiness(&k.c, k.now, &v) && v.len == 0);
  kvrelay_consumer_disconnected(&k.c, k.now);
  cr_assert(!readiness_in_force(&k));
  kit_close(&k);
}

/* Each input breaks two rules; the earlier one must be told. */
Test(consumer_planes, order_of_readiness_checks) {
  static const struct {
    const char *text, *field;
  } told[] = {{"without relay", "relay"},
              {"went back", ""},
              {"same revision", ""},
              {"readable key", "canonical_model_id"}};
  for (int i = 0; i < 6; i++) {
    entry_of a, twice[2];
    kit k;
    planes_open(&k);
    make_entry(&a, "n", "one", KVRELAY_READY_READY);
    feed_image(&k, 5, &a.e, 1);
    kit_events(&k, 0);
    make_entry(&twice[0], "n", "one", KVRELAY_READY_READY);
    make_entry(&twice[1], "n", i < 4 ? "" : "one", KVRELAY_READY_READY);
    const kvrelay_topology_entry both[] = {twice[0].e, twice[0].e, twice[1].e};
    kvrelay_readiness_update m = image(i == 2 ? 5 : 6, both, 3);
    if (i == 0) {
      m.envelope.relay_present = false;
      m.revision = 4;
    }
    if (i == 1)
      m.revision = 4;
    if (i == 4)
      m.envelope.relay.relay_incarnation++;
    if (i == 5)
      m.envelope.protocol_version = 2;
    cr_assert_eq(kvrelay_consumer_feed_readiness(&k.c, k.readiness, &m, k.now), KVRELAY_OK);
    cr_assert(!readiness_in_force(&k));
    if (i < 4) {
      kvrelay_event_out e = kit_event(&k, KVRELAY_EVENT_READINESS_VOID);
      cr_assert(strstr(e.status.text, told[i].text) != NULL, "%d: %s", i, e.status.text);
      cr_assert_str_eq(e.verdict.field, told[i].field);
      kit_run(&k);
      cr_assert_eq(k.cancels, 1);
    } else {
      k.open_len = 0;
      kit_run(&k);
      cr_assert_eq(i == 4 ? k.reconnects : k.stops, 1);
    }
    kit_close(&k);
  }
}

Test(consumer_planes, a_repeated_entry_closes_the_plane_and_it_is_opened_again) {
  entry_of a, b;
  kit k;
  planes_open(&k);
  make_entry(&a, "n", "one", KVRELAY_READY_READY);
  make_entry(&b, "n", "one", KVRELAY_READY_UNAVAILABLE);
  const kvrelay_topology_entry both[] = {a.e, b.e};
  feed_image(&k, 1, both, 2);
  cr_assert(!readiness_in_force(&k));
  assert_reopens(&k, &k.readiness, KVRELAY_EVENT_READINESS_VOID);
  feed_image(&k, 0, &a.e, 1); /* another stream counts anew */
  cr_assert(readiness_in_force(&k));
  cr_assert_eq(k.stops + k.reconnects, 0);
  kit_close(&k);
}

/* One case for each difference that voids the plane. */
Test(consumer_planes, equal_revision_needs_equal_content) {
  for (int i = 0; i < 17; i++) {
    entry_of a;
    kit k;
    planes_open(&k);
    make_entry(&a, "n", "one", KVRELAY_READY_READY);
    a.adapters[0].canonical_model_id = text("sql");
    a.e.adapters = a.adapters;
    a.e.adapters_len = 1;
    a.member.pool_id = kit_pool(1).producer.pool_id;
    feed_image(&k, 5, &a.e, 1);
    cr_assert(readiness_in_force(&k));
    switch (i) {
    case 1:
      a.e.state = KVRELAY_READY_UNAVAILABLE;
      break;
    case 2:
      a.e.present_roles = a.member.roles;
      break;
    case 3:
      a.e.missing_roles = a.member.roles;
      break;
    case 4:
      a.e.duplicate_role_endpoints = a.member.roles;
      break;
    case 5:
      a.e.legacy_fallback_active = true;
      break;
    case 6:
      a.member.endpoint.component = text("d");
      break;
    case 7:
      a.member.endpoint.endpoint = text("f");
      break;
    case 8:
      a.member.roles.ptr = role_encode;
      break;
    case 9:
      a.member.pool_id.dc_id ^= UINT64_C(1) << 63;
      break;
    case 10:
      a.member.pool_id.present = false;
      break;
    case 11:
      a.member.pool_id.domain.routing_scope.source ^= 3;
      break;
    case 12:
      a.member.pool_id.domain.cache_semantics.digest[15]++;
      break;
    case 13:
      a.adapters[0].state = KVRELAY_READY_READY;
      break;
    case 14:
      a.adapters[0].missing_roles = a.member.roles;
      break;
    case 15:
      a.adapters[0].canonical_model_id = text("sqm");
      break;
    case 16:
      a.e.adapters_len = 0;
      break;
    default:
      break;
    }
    feed_image(&k, 5, &a.e, 1);
    cr_assert_eq(readiness_in_force(&k), i == 0, "difference %d", i);
    kit_close(&k);
  }
}

Test(consumer_planes, X5_odd_entries_are_set_aside_alone) {
  entry_of good, odd;
  kit k;
  planes_open(&k);
  make_entry(&good, "n", "good", KVRELAY_READY_READY);
  for (int i = 0; i < 6; i++) {
    uint8_t want = i < 3 ? KVRELAY_CLASS_UNSUPPORTED : KVRELAY_CLASS_INVALID;
    make_entry(&odd, "n", "odd", KVRELAY_READY_READY);
    if (i == 0)
      odd.e.state = 99;
    if (i == 1)
      odd.member.roles.ptr = role_odd;
    if (i == 2) {
      odd.adapters[0].canonical_model_id = text("sql");
      odd.adapters[0].state = -1;
      odd.e.adapters = odd.adapters;
      odd.e.adapters_len = 1;
    }
    if (i == 3)
      odd.e.duplicate_role_endpoints = (kvrelay_roles){role_encode, 1};
    if (i == 4)
      odd.e.members_len = 0;
    if (i == 5)
      odd.member.roles.ptr = role_zero;
    const kvrelay_topology_entry both[] = {odd.e, good.e};
    feed_image(&k, (uint64_t)i + 1, both, 2);
    kvrelay_entry_view e;
    cr_assert_eq(kvrelay_consumer_readiness_get(&k.c, 0, &e), KVRELAY_OK);
    cr_assert_eq(e.verdict.class_, want, "%d", i);
    cr_assert_eq(kvrelay_consumer_readiness_get(&k.c, 1, &e), KVRELAY_OK);
    cr_assert_eq(e.verdict.class_, KVRELAY_CLASS_OK);
  }
  kit_close(&k);
}

/* ---- load ---- */

static kvrelay_load_entry load_of(const kvrelay_descriptor *d, uint64_t used, uint64_t total,
                                  uint32_t observed, uint32_t expected) {
  const kvrelay_load_entry e = {d->producer, used, total, observed, expected};
  return e;
}

Test(consumer_planes, load_windows_only_go_forward) {
  const kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_load_entry e = load_of(&pool, 5, 10, 1, 1);
  kit k;
  planes_open(&k);
  feed_window(&k, 0, NULL, 0);
  cr_assert_eq(kit_events(&k, KVRELAY_EVENT_LOAD), 1);
  feed_window(&k, 1, &e, 1);
  feed_window(&k, 7, &e, 1);
  cr_assert_eq(kit_events(&k, KVRELAY_EVENT_LOAD), 0);
  kvrelay_plane_view v;
  cr_assert(kvrelay_consumer_load(&k.c, k.now, &v));
  cr_assert(v.revision == 7 && v.len == 1 && v.observed_ms == 1000 && v.window_ms == 1000);
  feed_window(&k, 7, &e, 1); /* unlike readiness: strictly larger */
  cr_assert(!load_in_force(&k));
  assert_reopens(&k, &k.load, KVRELAY_EVENT_LOAD_VOID);
  feed_window(&k, 3, &e, 1);
  cr_assert(load_in_force(&k));
  kit_close(&k);
}

Test(consumer_planes, order_of_load_checks) {
  for (int i = 0; i < 5; i++) {
    static const char *const told[] = {"without relay", "later one", "malformed producer",
                                       "listed twice", "bound"};
    const kvrelay_descriptor pool = kit_pool(1);
    static kvrelay_load_entry list[KIT_POOLS + 1];
    kit k;
    planes_open(&k);
    feed_window(&k, 5, NULL, 0);
    kit_events(&k, 0);
    for (size_t n = 0; n <= KIT_POOLS; n++)
      list[n] = load_of(&pool, 1, 2, 1, 1);
    if (i < 3)
      list[1].producer.layout_generation = 0;
    kvrelay_load_update m = window_of(i < 2 ? 5 : 6, list, i == 4 ? KIT_POOLS + 1 : 2);
    m.envelope.relay_present = i != 0;
    cr_assert_eq(kvrelay_consumer_feed_load(&k.c, k.load, &m, k.now), KVRELAY_OK);
    cr_assert(!load_in_force(&k));
    kvrelay_event_out e = kit_event(&k, KVRELAY_EVENT_LOAD_VOID);
    cr_assert(strstr(e.status.text, told[i]) != NULL, "%d: %s", i, e.status.text);
    kit_close(&k);
  }
}

/* ---- beside a pool ---- */

static kvrelay_serving_view beside(const kit *k) { return kit_view(k, 0).serving; }

/* As long as there are reasons to know and not to know. */
Test(consumer_planes, what_stands_beside_a_pool) {
  kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_text base = pool.registrations[0].target.base_model;
  char model[64];
  entry_of a;
  kit k;
  memcpy(model, base.ptr, base.len);
  model[base.len] = 0;
  cr_assert_eq(pool.registrations[0].target.kind, KVRELAY_TARGET_BASE);
  planes_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  kvrelay_serving_view v = beside(&k);
  cr_assert(v.readiness == KVRELAY_READY_UNKNOWN && v.entry == NULL && !v.load_known);
  cr_assert(v.readiness_age_ns == KVRELAY_TIME_NONE && v.load_age_ns == KVRELAY_TIME_NONE);
  char ns[64];
  memcpy(ns, pool.serving_endpoint.namespace_.ptr, pool.serving_endpoint.namespace_.len);
  ns[pool.serving_endpoint.namespace_.len] = 0;
  make_entry(&a, ns, model, KVRELAY_READY_READY);
  feed_image(&k, 1, &a.e, 1);
  v = beside(&k);
  cr_assert(v.readiness == KVRELAY_READY_READY && v.entry != NULL && v.readiness_age_ns == 0);
  /* Fresh up to the bound, then unknown; its age is told all the same. */
  k.now += 30 * SECOND;
  cr_assert_eq(beside(&k).readiness, KVRELAY_READY_READY);
  k.now += 1;
  v = beside(&k);
  cr_assert(v.readiness == KVRELAY_READY_UNKNOWN && v.entry == NULL);
  cr_assert_eq(v.readiness_age_ns, 30 * SECOND + 1);
  a.e.state = KVRELAY_READY_UNAVAILABLE;
  feed_image(&k, 2, &a.e, 1);
  cr_assert_eq(beside(&k).readiness, KVRELAY_READY_UNAVAILABLE);
  a.e.state = 77; /* set aside, and the older state is not kept */
  feed_image(&k, 3, &a.e, 1);
  cr_assert_eq(beside(&k).readiness, KVRELAY_READY_UNKNOWN);
  /* Load: zero used is a value; silent ranks, unknown capacity or no ranks are not. */
  static const struct {
    uint64_t used, total;
    uint32_t observed, expected;
    bool known;
  } loads[] = {{0, 10, 2, 2, true}, {5, 10, 2, 2, true},  {5, 10, 1, 2, false},
               {5, 0, 2, 2, false}, {0, 10, 0, 0, false}, {12, 10, 1, 1, true}};
  for (size_t i = 0; i < sizeof loads / sizeof *loads; i++) {
    const kvrelay_load_entry e =
        load_of(&pool, loads[i].used, loads[i].total, loads[i].observed, loads[i].expected);
    feed_window(&k, i, &e, 1);
    v = beside(&k);
    cr_assert_eq(v.load_known, loads[i].known, "%zu", i);
    cr_assert(!v.load_known ||
              (v.kv_used_blocks == loads[i].used && v.total_kv_blocks == loads[i].total));
    cr_assert_eq(v.load_age_ns, 0);
  }
  k.now += 3 * SECOND;
  cr_assert(beside(&k).load_known);
  k.now += 1;
  cr_assert(!beside(&k).load_known, "three windows of one second, at least three seconds");
  /* Of another producer of the pool nothing is said. */
  kvrelay_load_entry e = load_of(&pool, 1, 2, 1, 1);
  e.producer.layout_generation++;
  feed_window(&k, 100, &e, 1);
  cr_assert(!beside(&k).load_known);
  const kvrelay_load_entry two[] = {e, load_of(&pool, 3, 4, 1, 1)};
  feed_window(&k, 101, two, 2);
  v = beside(&k);
  cr_assert(v.load_known && v.kv_used_blocks == 3);
  kit_close(&k);
}

/* An adapter has a state of its own, and of two equal answers the one that is ready comes first. */
Test(consumer_planes, answers_tell_what_was_asked_for) {
  static const kvrelay_registration both[] = {
      {{(const uint8_t *)"llama", 5},
       {true, KVRELAY_TARGET_BASE, {(const uint8_t *)"llama", 5}, {NULL, 0}},
       NULL,
       0},
      {{(const uint8_t *)"art", 3},
       {true, KVRELAY_TARGET_LORA, {(const uint8_t *)"llama", 5}, {(const uint8_t *)"a", 1}},
       NULL,
       0}};
  kvrelay_descriptor pools[3] = {kit_pool(1), kit_pool(3), kit_pool(5)};
  static const char *const namespaces[] = {"l", "m", "n"};
  entry_of entries[3];
  kvrelay_topology_entry list[3];
  kit k;
  planes_open(&k);
  for (int i = 0; i < 3; i++) {
    pools[i].registrations = both;
    pools[i].registrations_len = 2;
    pools[i].serving_endpoint.namespace_ = text(namespaces[i]);
    make_entry(&entries[i], namespaces[i], "llama", i);
    entries[i].adapters[0].canonical_model_id = text("art");
    entries[i].adapters[0].state = 2 - i;
    entries[i].e.adapters = entries[i].adapters;
    entries[i].e.adapters_len = 1;
    list[i] = entries[i].e;
  }
  kit_feed_pools(&k, 1, pools, 3);
  feed_image(&k, 1, list, 3);
  uint64_t scratch[4];
  kvrelay_answer answers[3];
  const uint32_t tokens[4] = {1, 2, 3, 4};
  for (int adapter = 0; adapter < 2; adapter++) {
    const kvrelay_query q = {text(adapter ? "art" : "llama"), {NULL, 0}, {NULL, 0}, tokens, 4};
    for (size_t cap = 1; cap <= 3; cap++) {
      cr_assert_eq(kvrelay_consumer_query(&k.c, &q, answers, cap, scratch, 4, k.now), 3);
      cr_assert_eq(answers[0].pool, adapter ? 0 : 2);
      cr_assert_eq(answers[0].serving.readiness, KVRELAY_READY_READY);
    }
    cr_assert(answers[1].pool == (adapter ? 1 : 0) && answers[2].pool == (adapter ? 2 : 1));
    cr_assert_eq(answers[1].serving.readiness, adapter ? 1 : 0);
    cr_assert_eq(answers[1].serving.entry->state, adapter ? 1 : 0);
  }
  kit_close(&k);
}

Test(consumer_planes, stale_after_three_windows_of_their_length) {
  const kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_load_entry e = load_of(&pool, 1, 2, 1, 1);
  static const struct {
    uint64_t window_ms, fresh_ns;
  } cases[] = {
      {1, 3 * SECOND}, {1000, 3 * SECOND}, {2000, 6 * SECOND}, {UINT64_MAX, UINT64_MAX / 4}};
  for (size_t i = 0; i < 4; i++) {
    kit k;
    kvrelay_plane_view v;
    planes_open(&k);
    kvrelay_load_update m = window_of(1, &e, 1);
    m.window_ms = cases[i].window_ms;
    cr_assert_eq(kvrelay_consumer_feed_load(&k.c, k.load, &m, k.now), KVRELAY_OK);
    cr_assert(kvrelay_consumer_load(&k.c, k.now + cases[i].fresh_ns, &v) && !v.stale);
    cr_assert(kvrelay_consumer_load(&k.c, k.now - 1, &v) && v.stale, "from the future");
    if (cases[i].window_ms != UINT64_MAX)
      cr_assert(kvrelay_consumer_load(&k.c, k.now + cases[i].fresh_ns + 1, &v) && v.stale);
    kit_close(&k);
  }
}

/* ---- conditions ---- */

static kvrelay_plane_condition condition(const kit *k, int32_t method) {
  kvrelay_plane_condition out;
  cr_assert_eq(kvrelay_consumer_plane(&k->c, method, 0, k->now, &out), KVRELAY_OK);
  return out;
}

#define EXPECT_PLANE(METHOD, STATE, AGE)                                                           \
  do {                                                                                             \
    const kvrelay_plane_condition is_ = condition(&k, KVRELAY_METHOD_##METHOD);                    \
    cr_assert_eq(is_.state, KVRELAY_PLANE_##STATE, "state %d", is_.state);                         \
    cr_assert_eq(is_.age_ns, (AGE), "age %lu", (unsigned long)is_.age_ns);                         \
  } while (0)

Test(consumer_planes, C18_every_plane_tells_its_condition) {
  const uint64_t none = KVRELAY_TIME_NONE;
  kvrelay_plane_condition got;
  entry_of a;
  kit k;
  planes_open(&k);
  EXPECT_PLANE(WATCH_CATALOG, UNKNOWN, none);
  EXPECT_PLANE(SUBSCRIBE_READINESS, UNKNOWN, none);
  EXPECT_PLANE(SUBSCRIBE_LOAD, UNKNOWN, none);
  cr_assert_eq(kvrelay_consumer_plane(&k.c, KVRELAY_METHOD_SUBSCRIBE_POOL, 0, k.now, &got),
               KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_plane(&k.c, KVRELAY_METHOD_GET_RELAY_INFO, 0, k.now, &got),
               KVRELAY_ERR_NOT_FOUND);
  make_entry(&a, "n", "one", KVRELAY_READY_READY);
  feed_image(&k, 1, &a.e, 1);
  feed_window(&k, 1, NULL, 0);
  kit_feed_pools(&k, 1, NULL, 0);
  k.now += 2 * SECOND;
  EXPECT_PLANE(WATCH_CATALOG, LIVE, 2 * SECOND);
  EXPECT_PLANE(SUBSCRIBE_READINESS, LIVE, 2 * SECOND);
  EXPECT_PLANE(SUBSCRIBE_LOAD, LIVE, 2 * SECOND);
  k.now += 10 * SECOND;
  EXPECT_PLANE(WATCH_CATALOG, LIVE, 12 * SECOND); /* silence is its nature */
  EXPECT_PLANE(SUBSCRIBE_READINESS, LIVE, 12 * SECOND);
  EXPECT_PLANE(SUBSCRIBE_LOAD, STALE, 12 * SECOND);
  k.now += 30 * SECOND;
  EXPECT_PLANE(SUBSCRIBE_READINESS, STALE, 42 * SECOND);
  kit_end(&k, k.readiness, KVRELAY_GRPC_UNIMPLEMENTED, KVRELAY_REASON_NONE);
  kit_end(&k, k.load, KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
  EXPECT_PLANE(SUBSCRIBE_READINESS, QUARANTINED, none);
  EXPECT_PLANE(SUBSCRIBE_LOAD, UNKNOWN, none);
  const uint64_t retry_ns = condition(&k, KVRELAY_METHOD_SUBSCRIBE_LOAD).retry_ns;
  cr_assert(retry_ns >= k.now + 250 * MS && retry_ns <= k.now + 500 * MS);
  kvrelay_consumer_disconnected(&k.c, k.now);
  EXPECT_PLANE(WATCH_CATALOG, UNKNOWN, none);
  EXPECT_PLANE(SUBSCRIBE_READINESS, UNKNOWN, none);
  kit_close(&k);
}

/* ---- ends ---- */

Test(consumer_planes, X6_ends_void_one_plane_and_it_comes_back) {
  static const struct {
    int32_t grpc, reason;
    bool again;
  } ends[] = {{KVRELAY_GRPC_OK, KVRELAY_REASON_NONE, true},
              {KVRELAY_GRPC_RESOURCE_EXHAUSTED, KVRELAY_REASON_SUBSCRIBER_LAGGED, true},
              {KVRELAY_GRPC_RESOURCE_EXHAUSTED, KVRELAY_REASON_RESOURCE_LIMIT, true},
              {KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_PUBLICATION_UNAVAILABLE, true},
              {KVRELAY_GRPC_UNIMPLEMENTED, KVRELAY_REASON_NONE, false},
              {KVRELAY_GRPC_INVALID_ARGUMENT, KVRELAY_REASON_INVALID_REQUEST, false}};
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
    for (int plane = 0; plane < 2; plane++) {
      entry_of a;
      kit k;
      planes_open(&k);
      make_entry(&a, "n", "one", KVRELAY_READY_READY);
      feed_image(&k, 1, &a.e, 1);
      feed_window(&k, 1, NULL, 0);
      kit_feed_pools(&k, 1, NULL, 0);
      kit_end(&k, plane ? k.load : k.readiness, ends[i].grpc, ends[i].reason);
      cr_assert(readiness_in_force(&k) == (plane == 1) && load_in_force(&k) == (plane == 0));
      uint64_t revision;
      uint32_t pools;
      cr_assert(kvrelay_consumer_catalog(&k.c, &revision, &pools), "the others are not concerned");
      (void)kit_event(&k, plane ? KVRELAY_EVENT_LOAD_VOID : KVRELAY_EVENT_READINESS_VOID);
      kit_run(&k);
      const size_t before = plane ? k.loads : k.readinesses;
      if (ends[i].again)
        (void)kit_sleep(&k);
      else {
        cr_assert_eq(kvrelay_consumer_deadline_ns(&k.c), KVRELAY_TIME_NONE);
        kvrelay_consumer_disconnected(&k.c, k.now);
        kit_connect(&k); /* the next connection asks anew */
      }
      cr_assert_eq(plane ? k.loads : k.readinesses, before + 1);
      kit_close(&k);
    }
}

Test(consumer_planes, broken_and_foreign_messages) {
  kit k;
  entry_of a;
  planes_open(&k);
  make_entry(&a, "n", "one", KVRELAY_READY_READY);
  feed_image(&k, 1, &a.e, 1);
  feed_window(&k, 1, NULL, 0);
  const kvrelay_readiness_update r = image(2, &a.e, 1);
  const kvrelay_load_update l = window_of(2, NULL, 0);
  cr_assert_eq(kvrelay_consumer_feed_readiness(&k.c, k.load, &r, k.now), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_feed_load(&k.c, k.readiness, &l, k.now), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_feed_load(&k.c, k.load + 1000, &l, k.now), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.readiness, KVRELAY_ERR_MALFORMED, k.now),
               KVRELAY_OK);
  cr_assert(!readiness_in_force(&k) && load_in_force(&k));
  assert_reopens(&k, &k.readiness, KVRELAY_EVENT_READINESS_VOID);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.load, KVRELAY_ERR_LIMIT, k.now), KVRELAY_OK);
  cr_assert(!load_in_force(&k));
  assert_reopens(&k, &k.load, KVRELAY_EVENT_LOAD_VOID);
  kit_close(&k);
}

/* An image may fill its bound and not a byte more. */
Test(consumer_planes, bound_of_the_readiness_image) {
  entry_of entries[8];
  kvrelay_topology_entry list[8];
  char names[8][8];
  for (int i = 0; i < 8; i++) {
    snprintf(names[i], sizeof names[i], "m%d", i);
    make_entry(&entries[i], "n", names[i], KVRELAY_READY_READY);
    list[i] = entries[i].e;
  }
  bool fitted = true; /* with more room */
  for (size_t bytes = 6000; bytes > 100; bytes -= 16) {
    kvrelay_consumer_config cfg = planes_config();
    kit k;
    cfg.readiness_bytes = bytes;
    kit_init(&k, &cfg);
    kit_connect(&k);
    feed_image(&k, 1, list, 8);
    const bool fits = readiness_in_force(&k);
    cr_assert(bytes == 6000 ? fits : fitted || !fits);
    fitted = fits;
    if (!fits) {
      kvrelay_event_out e = kit_event(&k, KVRELAY_EVENT_READINESS_VOID);
      cr_assert(strstr(e.status.text, "bound") != NULL);
    }
    kit_close(&k);
  }
  cr_assert(!fitted);
}
