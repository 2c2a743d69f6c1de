/* SPDX-License-Identifier: Apache-2.0 */

/* What the tests of the consumer share: descriptors, frames, and somebody who carries out actions.
 */

#ifndef TEST_CONSUMER_H
#define TEST_CONSUMER_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kvrelay.h"

#define KIT_POOLS 16
#define KIT_CALLS 4096
#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)
#define UNUSED __attribute__((unused))

static inline kvrelay_text text(const char *s) {
  return (kvrelay_text){(const uint8_t *)s, strlen(s)};
}

/* ---- messages ---- */

static const int32_t kit_roles[] = {KVRELAY_ROLE_LEGACY};
static const kvrelay_text kit_aliases[] = {{(const uint8_t *)"chat", 4}};
static const kvrelay_registration kit_llama = {
    {(const uint8_t *)"llama", 5},
    {true, KVRELAY_TARGET_BASE, {(const uint8_t *)"llama", 5}, {NULL, 0}},
    kit_aliases,
    1};

static UNUSED kvrelay_digest kit_digest(uint8_t fill) {
  kvrelay_digest d = {true, {0}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  memset(d.digest, fill, sizeof d.digest);
  return d;
}

/* Pool s: digests 16 x s and 16 x (s + 1), 64 buckets, model llama alias chat, block size 4. */
static UNUSED kvrelay_descriptor kit_pool(uint8_t s) {
  kvrelay_descriptor d;
  memset(&d, 0, sizeof d);
  d.producer = (kvrelay_producer){true,
                                  {true, 1, {true, kit_digest(s), kit_digest((uint8_t)(s + 1))}, 3},
                                  23,
                                  5,
                                  {true, 1, 42, 64, 16, 4}};
  d.serving_endpoint = (kvrelay_endpoint){true, text("prod"), text("backend"), text("generate")};
  d.registrations = &kit_llama;
  d.registrations_len = 1;
  d.query_semantics = (kvrelay_semantics){true, 4, HASHFMT_FORMAT_STANDARD};
  d.pool_roles = (kvrelay_roles){kit_roles, 1};
  return d;
}

static UNUSED kvrelay_envelope kit_envelope(void) {
  return (kvrelay_envelope){1, true, {17, 23}, KVRELAY_CONTRACT_MARKER};
}

static UNUSED kvrelay_catalog_update kit_catalog(uint64_t revision, const kvrelay_descriptor *pools,
                                                 size_t len) {
  return (kvrelay_catalog_update){kit_envelope(), revision, true, pools, len};
}

static UNUSED kvrelay_status kit_status(int32_t grpc, int32_t reason) {
  kvrelay_status s;
  memset(&s, 0, sizeof s);
  s.grpc = grpc;
  s.reason = reason;
  strcpy(s.text, "because");
  return s;
}

/* ---- frames; the payload is static ---- */

static uint8_t kit_bytes[CKF_CBI1_MAX_FRAME_BYTES];

static UNUSED ckf_format kit_format(const kvrelay_descriptor *d) {
  return (ckf_format){d->producer.ckf_format.seed, d->producer.ckf_format.bucket_count};
}

static UNUSED kvrelay_filter_update kit_frame(const kvrelay_descriptor *d, int32_t kind,
                                              uint64_t base, uint64_t sequence, ptrdiff_t bytes) {
  cr_assert_geq(bytes, 0);
  return (kvrelay_filter_update){kit_envelope(), d->producer, base,         sequence, 0,
                                 kind,           kit_bytes,   (size_t)bytes};
}

static UNUSED kvrelay_filter_update kit_chunk(const kvrelay_descriptor *d, const uint64_t *words,
                                              uint64_t sequence, uint32_t chunk_buckets,
                                              uint32_t chunk) {
  const ckf_format format = kit_format(d);
  return kit_frame(d, KVRELAY_UPDATE_SNAPSHOT_CHUNK, sequence, sequence,
                   ckf_cbi1_snapshot_encode(&format, d->producer.pool_id.dc_id, sequence, words,
                                            (size_t)format.bucket_count, chunk_buckets, chunk,
                                            kit_bytes, sizeof kit_bytes));
}

static UNUSED kvrelay_filter_update kit_delta(const kvrelay_descriptor *d, const ckf_image *images,
                                              size_t len, uint64_t base) {
  const ckf_format format = kit_format(d);
  return kit_frame(d, KVRELAY_UPDATE_DELTA, base, base + 1,
                   ckf_cbi1_delta_encode(&format, d->producer.pool_id.dc_id, base, base + 1, images,
                                         len, kit_bytes, sizeof kit_bytes));
}

static UNUSED kvrelay_filter_update kit_heartbeat(const kvrelay_descriptor *d, uint64_t sequence) {
  return kit_frame(d, KVRELAY_UPDATE_HEARTBEAT, sequence, sequence, 0);
}

/* ---- somebody who carries out actions ---- */

typedef struct kit {
  kvrelay_consumer c;
  void *mem;
  uint64_t now;
  bool deny; /* no replica memory */
  uint32_t info, watch, readiness, load;
  uint32_t calls[KIT_POOLS]; /* filter call opened last, by index in the catalog of that moment */
  kvrelay_producer wanted[KIT_POOLS];
  uint32_t open[KIT_CALLS]; /* calls that are neither cancelled nor ended */
  size_t open_len;
  void *given[KIT_CALLS]; /* memory that was not given back */
  size_t given_len;
  size_t opened, infos, watches, readinesses, loads, cancels, needs, frees, reconnects, stops;
} kit;

static UNUSED void kit_drop(uint32_t *list, size_t *len, uint32_t value) {
  for (size_t i = 0; i < *len; i++)
    if (list[i] == value) {
      list[i] = list[--*len];
      return;
    }
  cr_assert_fail("call %u is not open", value);
}

static UNUSED kvrelay_consumer_config kit_config(void) {
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.subscriber_id = text("consumer-a");
  cfg.max_pools = KIT_POOLS;
  cfg.catalog_bytes = 1 << 20;
  cfg.follow_readiness = cfg.follow_load = false; /* test_consumer_planes.c follows them */
  return cfg;
}

static UNUSED void kit_init(kit *k, const kvrelay_consumer_config *cfg) {
  const size_t len = kvrelay_consumer_mem_size(cfg);
  memset(k, 0, sizeof *k);
  k->now = 1000 * SECOND;
  k->mem = malloc(len);
  cr_assert_eq(kvrelay_consumer_init(&k->c, cfg, k->mem, len, k->now), KVRELAY_OK);
}

/* Checks what holds for every action, and carries it out: one case for each kind. */
static UNUSED void kit_act(kit *k, const kvrelay_action *a) {
  switch (a->kind) {
  case KVRELAY_ACTION_CALL:
    cr_assert_neq(a->call, 0);
    for (size_t i = 0; i < k->open_len; i++)
      cr_assert_neq(k->open[i], a->call);
    cr_assert_lt(k->open_len, KIT_CALLS);
    k->open[k->open_len++] = a->call;
    k->opened++;
    cr_assert_eq(a->request.contract_marker, KVRELAY_CONTRACT_MARKER);
    if (a->request.method == KVRELAY_METHOD_GET_RELAY_INFO) {
      k->info = a->call;
      k->infos++;
      cr_assert_eq(a->request.subscriber_id.len, 0);
      break;
    }
    cr_assert(kvrelay_text_equal(a->request.subscriber_id, text("consumer-a")));
    if (a->request.method == KVRELAY_METHOD_WATCH_CATALOG) {
      k->watch = a->call;
      k->watches++;
    } else if (a->request.method == KVRELAY_METHOD_SUBSCRIBE_READINESS) {
      k->readiness = a->call;
      k->readinesses++;
    } else if (a->request.method == KVRELAY_METHOD_SUBSCRIBE_LOAD) {
      k->load = a->call;
      k->loads++;
    } else {
      cr_assert_eq(a->request.method, KVRELAY_METHOD_SUBSCRIBE_POOL);
      cr_assert_eq(kvrelay_check_producer(&a->request.expected_producer).class_, KVRELAY_CLASS_OK);
      cr_assert_lt(a->pool, KIT_POOLS);
      k->calls[a->pool] = a->call;
      k->wanted[a->pool] = a->request.expected_producer;
    }
    break;
  case KVRELAY_ACTION_CANCEL:
    kit_drop(k->open, &k->open_len, a->call);
    k->cancels++;
    break;
  case KVRELAY_ACTION_REPLICA_NEED: {
    void *const mem = k->deny ? NULL : malloc(a->bytes);
    k->needs++;
    cr_assert_lt(k->given_len, KIT_CALLS);
    if (mem != NULL)
      k->given[k->given_len++] = mem;
    cr_assert_eq(
        kvrelay_consumer_replica_give(&k->c, a->pool, mem, mem == NULL ? 0 : a->bytes, k->now),
        KVRELAY_OK);
    break;
  }
  case KVRELAY_ACTION_REPLICA_FREE: {
    size_t i = 0;
    while (i < k->given_len && k->given[i] != a->mem)
      i++;
    cr_assert_lt(i, k->given_len, "memory that was never given");
    k->given[i] = k->given[--k->given_len];
    free(a->mem);
    k->frees++;
    break;
  }
  case KVRELAY_ACTION_RECONNECT:
    k->reconnects++;
    break;
  case KVRELAY_ACTION_STOP:
    k->stops++;
    break;
  default:
    cr_assert_fail("action %d", a->kind);
  }
}

/* Everything that is due; returns the number of actions. */
static UNUSED size_t kit_run(kit *k) {
  kvrelay_action a;
  size_t count = 0;
  for (; kvrelay_consumer_action_next(&k->c, k->now, &a); count++)
    kit_act(k, &a);
  cr_assert_gt(kvrelay_consumer_deadline_ns(&k->c), k->now);
  return count;
}

/* Sleeps until the consumer wants something, and does it. */
static UNUSED uint64_t kit_sleep(kit *k) {
  const uint64_t before = k->now;
  const uint64_t when = kvrelay_consumer_deadline_ns(&k->c);
  cr_assert_neq(when, KVRELAY_TIME_NONE, "nothing will ever happen");
  k->now = when - 1;
  cr_assert_eq(kit_run(k), 0, "too early");
  k->now = when;
  cr_assert_gt(kit_run(k), 0, "a deadline for nothing");
  return k->now - before;
}

static UNUSED void kit_connect(kit *k) {
  k->open_len = 0;
  kvrelay_consumer_connected(&k->c, k->now);
  kit_run(k);
}

/* Consumer connected, everything followed. */
static UNUSED void kit_open(kit *k) {
  const kvrelay_consumer_config cfg = kit_config();
  kit_init(k, &cfg);
  kit_connect(k);
}

/* Memory must have come back when the connection is gone. */
static UNUSED void kit_close(kit *k) {
  kvrelay_consumer_disconnected(&k->c, k->now);
  k->open_len = 0;
  kit_run(k);
  cr_assert_eq(k->given_len, 0, "replica memory was lost");
  cr_assert_eq(kvrelay_consumer_deadline_ns(&k->c), KVRELAY_TIME_NONE);
  free(k->mem);
}

static UNUSED void kit_feed_pools(kit *k, uint64_t revision, const kvrelay_descriptor *pools,
                                  size_t len) {
  const kvrelay_catalog_update u = kit_catalog(revision, pools, len);
  cr_assert_eq(kvrelay_consumer_feed_catalog(&k->c, k->watch, &u, k->now), KVRELAY_OK);
  kit_run(k);
}

static UNUSED void kit_feed(kit *k, uint32_t pool, const kvrelay_filter_update *u) {
  cr_assert_eq(kvrelay_consumer_feed_filter(&k->c, k->calls[pool], u, k->now), KVRELAY_OK);
}

static UNUSED void kit_end(kit *k, uint32_t call, int32_t grpc, int32_t reason) {
  const kvrelay_status s = kit_status(grpc, reason);
  kit_drop(k->open, &k->open_len, call);
  cr_assert_eq(kvrelay_consumer_feed_end(&k->c, call, &s, k->now), KVRELAY_OK);
}

static UNUSED kvrelay_pool_view kit_view(const kit *k, uint32_t pool) {
  kvrelay_pool_view v;
  cr_assert_eq(kvrelay_consumer_pool_get(&k->c, pool, k->now, &v), KVRELAY_OK);
  return v;
}

/* A whole snapshot, for pool `index` of the catalog in force. */
static UNUSED void kit_snapshot(kit *k, uint32_t index, const kvrelay_descriptor *d,
                                const uint64_t *words, uint64_t sequence) {
  const ckf_format format = kit_format(d);
  const uint32_t chunk = format.bucket_count < CKF_CBI1_MAX_CHUNK_BUCKETS
                             ? (uint32_t)format.bucket_count
                             : CKF_CBI1_MAX_CHUNK_BUCKETS;
  for (uint32_t i = 0; i < ckf_cbi1_chunk_count(&format, chunk); i++) {
    const kvrelay_filter_update u = kit_chunk(d, words, sequence, chunk, i);
    kit_feed(k, index, &u);
  }
}

static const uint64_t kit_zeros[CKF_CBI1_MAX_CHUNK_BUCKETS];

/* Skips to the next event of a kind. */
static UNUSED kvrelay_event_out kit_event(kit *k, int32_t kind) {
  kvrelay_event_out e;
  while (kvrelay_consumer_event_next(&k->c, &e))
    if (e.kind == kind)
      return e;
  cr_assert_fail("no event of kind %d", kind);
  return e;
}

static UNUSED size_t kit_events(kit *k, int32_t kind) {
  kvrelay_event_out e;
  size_t count = 0;
  while (kvrelay_consumer_event_next(&k->c, &e))
    count += e.kind == kind;
  return count;
}

static UNUSED uint64_t kit_random(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

#endif /* TEST_CONSUMER_H */
