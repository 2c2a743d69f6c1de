/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_consumer: any bytes as messages of catalog, readiness and load, in any order, with ends
 * and losses between them. What is in force is exactly what came last, each entry with the verdict
 * of its own check, no key twice, revisions and windows in order; what stands beside a pool is in
 * the planes.
 *
 * SECURITY.md: 1, 2, 3, 5, 7, 9.
 *
 * Input: operations of one byte; a message has its length in two bytes more, and its bytes.
 */

#include "fuzz.h"
#include "kvrelay_pb.h"

enum { ARENA_LEN = 1 << 16, POOLS = 16, MS = 1000000 };

static uint64_t arena_mem[ARENA_LEN / 8];

typedef struct asker {
  kvrelay_consumer c;
  uint64_t now;
  uint32_t watch, readiness, load; /* calls, 0 = not open */
  bool ready_told, load_told;      /* since the call was opened */
  uint64_t revision, window;
} asker;

static void run(asker *a) {
  kvrelay_action action;
  while (kvrelay_consumer_action_next(&a->c, a->now, &action) == 1) {
    if (action.kind == KVRELAY_ACTION_REPLICA_NEED)
      FUZZ_CHECK(kvrelay_consumer_replica_give(&a->c, action.pool, NULL, 0, a->now) == KVRELAY_OK);
    if (action.kind != KVRELAY_ACTION_CALL)
      continue;
    if (action.request.method == KVRELAY_METHOD_WATCH_CATALOG)
      a->watch = action.call;
    if (action.request.method == KVRELAY_METHOD_SUBSCRIBE_READINESS) {
      a->readiness = action.call;
      a->ready_told = false;
    }
    if (action.request.method == KVRELAY_METHOD_SUBSCRIBE_LOAD) {
      a->load = action.call;
      a->load_told = false;
    }
  }
  kvrelay_event_out event;
  while (kvrelay_consumer_event_next(&a->c, &event) == 1)
    FUZZ_CHECK(event.kind >= KVRELAY_EVENT_INFO && event.kind <= KVRELAY_EVENT_LOAD_VOID);
}

static bool same_key(const kvrelay_topology_entry *a, const kvrelay_topology_entry *b) {
  return kvrelay_text_equal(a->namespace_, b->namespace_) &&
         kvrelay_text_equal(a->canonical_model_id, b->canonical_model_id);
}

static bool same_entry(const kvrelay_topology_entry *a, const kvrelay_topology_entry *b) {
  const ptrdiff_t x = kvrelay_pb_encode_topology_entry(a, NULL, 0),
                  y = kvrelay_pb_encode_topology_entry(b, NULL, 0);
  FUZZ_CHECK(x == y);
  if (x < 0)
    return x == KVRELAY_ERR_ARG; /* a digest longer than its struct holds */
  uint8_t *one = fuzz_alloc((size_t)x), *two = fuzz_alloc((size_t)x);
  FUZZ_CHECK(kvrelay_pb_encode_topology_entry(a, one, (size_t)x) == x);
  FUZZ_CHECK(kvrelay_pb_encode_topology_entry(b, two, (size_t)x) == x);
  const bool same = x == 0 || memcmp(one, two, (size_t)x) == 0;
  free(one);
  free(two);
  return same;
}

static void feed_readiness(asker *a, const uint8_t *bytes, size_t len) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_readiness_update m;
  kvrelay_plane_view view;
  if (kvrelay_pb_decode_readiness(bytes, len, &arena, &m) != KVRELAY_OK)
    return;
  const int rc = kvrelay_consumer_feed_readiness(&a->c, a->readiness, &m, a->now);
  FUZZ_CHECK(rc == KVRELAY_OK || rc == KVRELAY_ERR_NOT_FOUND);
  if (rc != KVRELAY_OK || !kvrelay_consumer_readiness(&a->c, a->now, &view))
    return;
  FUZZ_CHECK(view.revision == m.revision && view.len == m.entries_len && view.age_ns == 0);
  FUZZ_CHECK(!a->ready_told || m.revision >= a->revision);
  a->ready_told = true;
  a->revision = m.revision;
  for (uint32_t i = 0; i < view.len; i++) {
    kvrelay_entry_view e, other;
    FUZZ_CHECK(kvrelay_consumer_readiness_get(&a->c, i, &e) == KVRELAY_OK);
    FUZZ_CHECK(kvrelay_text_valid(e.entry->namespace_) &&
               kvrelay_text_valid(e.entry->canonical_model_id));
    FUZZ_CHECK(e.verdict.class_ == kvrelay_check_topology_entry(&m.entries[i]).class_);
    FUZZ_CHECK(same_entry(e.entry, &m.entries[i]));
    for (uint32_t k = 0; k < i; k++) {
      FUZZ_CHECK(kvrelay_consumer_readiness_get(&a->c, k, &other) == KVRELAY_OK);
      FUZZ_CHECK(!same_key(e.entry, other.entry));
    }
  }
}

/* How often the window has this entry. */
static size_t times(const kvrelay_load_update *m, const kvrelay_load_entry *e) {
  size_t count = 0;
  for (size_t i = 0; i < m->pools_len; i++) {
    const kvrelay_load_entry *o = &m->pools[i];
    count += kvrelay_producer_equal(&o->producer, &e->producer) &&
             o->kv_used_blocks == e->kv_used_blocks && o->total_kv_blocks == e->total_kv_blocks &&
             o->kv_observed_ranks == e->kv_observed_ranks &&
             o->kv_expected_ranks == e->kv_expected_ranks;
  }
  return count;
}

static void feed_load(asker *a, const uint8_t *bytes, size_t len) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_load_update m;
  kvrelay_plane_view view;
  if (kvrelay_pb_decode_load(bytes, len, &arena, &m) != KVRELAY_OK)
    return;
  const int rc = kvrelay_consumer_feed_load(&a->c, a->load, &m, a->now);
  FUZZ_CHECK(rc == KVRELAY_OK || rc == KVRELAY_ERR_NOT_FOUND);
  if (rc != KVRELAY_OK || !kvrelay_consumer_load(&a->c, a->now, &view))
    return;
  FUZZ_CHECK(view.revision == m.window_sequence && view.len == m.pools_len && view.len <= POOLS);
  FUZZ_CHECK(!a->load_told || m.window_sequence > a->window);
  a->load_told = true;
  a->window = m.window_sequence;
  for (uint32_t i = 0; i < view.len; i++) {
    kvrelay_load_view l;
    FUZZ_CHECK(kvrelay_consumer_load_get(&a->c, i, &l) == KVRELAY_OK);
    FUZZ_CHECK(l.verdict.class_ != KVRELAY_CLASS_INVALID);
    FUZZ_CHECK(times(&m, l.entry) >= 1);
    FUZZ_CHECK(l.verdict.class_ != KVRELAY_CLASS_OK || times(&m, l.entry) == 1);
    FUZZ_CHECK(!l.usable || (l.entry->total_kv_blocks != 0 && l.entry->kv_expected_ranks != 0));
  }
}

static void feed_catalog(asker *a, const uint8_t *bytes, size_t len) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_catalog_update m;
  if (kvrelay_pb_decode_catalog(bytes, len, &arena, &m) == KVRELAY_OK)
    (void)kvrelay_consumer_feed_catalog(&a->c, a->watch, &m, a->now);
}

/* What is said beside a pool stands in a plane. */
static void check_pools(const asker *a) {
  uint64_t revision;
  uint32_t pools = 0;
  kvrelay_plane_view plane;
  (void)kvrelay_consumer_catalog(&a->c, &revision, &pools);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    FUZZ_CHECK(kvrelay_consumer_pool_get(&a->c, i, a->now, &v) == KVRELAY_OK);
    const kvrelay_serving_view *s = &v.serving;
    FUZZ_CHECK((s->entry != NULL) || s->readiness == KVRELAY_READY_UNKNOWN);
    FUZZ_CHECK(s->entry == NULL ||
               (kvrelay_check_topology_entry(s->entry).class_ == KVRELAY_CLASS_OK &&
                s->entry->state == s->readiness));
    FUZZ_CHECK(s->entry == NULL ||
               (kvrelay_consumer_readiness(&a->c, a->now, &plane) && !plane.stale));
    FUZZ_CHECK(!s->load_known || (kvrelay_consumer_load(&a->c, a->now, &plane) && !plane.stale &&
                                  s->total_kv_blocks != 0));
  }
}

static void operate(asker *a, fuzz_input *in) {
  static const kvrelay_status over = {.grpc = KVRELAY_GRPC_UNAVAILABLE};
  const uint8_t op = fuzz_byte(in) % 8;
  uint32_t *const calls[] = {&a->readiness, &a->load, &a->watch};
  size_t len;
  uint8_t *bytes;
  switch (op) {
  case 3:
    a->now += (uint64_t)MS * (fuzz_byte(in) + 1) * 200;
    break;
  case 4:
    (void)kvrelay_consumer_feed_end(&a->c, *calls[fuzz_byte(in) % 3], &over, a->now);
    break;
  case 5:
    (void)kvrelay_consumer_feed_broken(&a->c, *calls[fuzz_byte(in) % 3], KVRELAY_ERR_MALFORMED,
                                       a->now);
    break;
  case 6:
    kvrelay_consumer_disconnected(&a->c, a->now);
    kvrelay_consumer_connected(&a->c, a->now);
    break;
  default:
    len = (size_t)fuzz_number(in, 2);
    bytes = fuzz_take(in, len, &len);
    if (op == 1)
      feed_load(a, bytes, len);
    else if (op == 2)
      feed_catalog(a, bytes, len);
    else
      feed_readiness(a, bytes, len);
    free(bytes); /* nothing may point there any more */
    break;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  fuzz_input in = {data, len};
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.max_pools = POOLS;
  cfg.catalog_bytes = 16384;
  cfg.readiness_bytes = 4096;
  const size_t need = kvrelay_consumer_mem_size(&cfg);
  uint8_t *mem = fuzz_alloc(need);
  asker *a = fuzz_alloc(sizeof *a);
  a->now = 1000;
  FUZZ_CHECK(kvrelay_consumer_init(&a->c, &cfg, mem, need, a->now) == KVRELAY_OK);
  kvrelay_consumer_connected(&a->c, a->now);
  run(a);
  while (in.left > 0) {
    operate(a, &in);
    run(a);
    check_pools(a);
  }
  free(mem);
  free(a);
  return 0;
}
