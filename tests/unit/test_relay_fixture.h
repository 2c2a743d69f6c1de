/* SPDX-License-Identifier: Apache-2.0 */
/* A relay with pools whose blocks come from a counter, and readers that keep a replica by what they
 * pull. */
#ifndef TEST_RELAY_FIXTURE_H
#define TEST_RELAY_FIXTURE_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kvrelay.h"

#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)
#define FX_POOLS 64

typedef struct fx_pool {
  ckf_producer state;
  void *state_mem, *pool_mem;
  kvrelay_pool *pool; /* NULL = not published */
  kvrelay_descriptor descriptor;
  kvrelay_registration registration;
  uint8_t name[8];
  uint64_t next_key, first_key; /* stored are first_key .. next_key - 1 */
} fx_pool;

typedef struct fx {
  kvrelay_relay relay;
  kvrelay_relay_config cfg;
  void *mem;
  uint64_t now, wall_us;
  kvrelay_status status; /* of the last refusal or end */
  kvrelay_outgoing out;  /* of the last pull */
  fx_pool pools[FX_POOLS];
  void **kept; /* memory of all readers there were */
  size_t kept_len;
} fx;

static inline kvrelay_text text_of(const char *s) {
  return (kvrelay_text){(const uint8_t *)s, strlen(s)};
}

static inline void fx_check(const fx *f) {
  int line = kvrelay_relay_check_(&f->relay);
  cr_assert_eq(line, 0, "invariant at line %d", line);
}

static inline kvrelay_relay_config fx_config(void) {
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity = (kvrelay_relay_identity){17, 23};
  cfg.max_pools = cfg.max_members = FX_POOLS;
  cfg.max_info_calls = 4;
  cfg.max_bucket_count = 1024;
  cfg.chunk_buckets = 64;
  cfg.publication_threshold = 1;
  return cfg;
}

static inline fx *fx_open(const kvrelay_relay_config *cfg) {
  fx *f = calloc(1, sizeof *f);
  f->cfg = *cfg;
  f->now = 5 * SECOND;
  f->wall_us = 1700000000000000u;
  size_t len = kvrelay_relay_mem_size(cfg);
  cr_assert_neq(len, 0);
  f->mem = malloc(len);
  cr_assert_eq(kvrelay_relay_init(&f->relay, cfg, f->mem, len, f->now), KVRELAY_OK);
  fx_check(f);
  return f;
}

static inline void fx_state(fx_pool *p, uint64_t expected_blocks) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected_blocks;
  size_t len = ckf_producer_mem_size(&cfg);
  p->state_mem = malloc(len);
  cr_assert_eq(ckf_producer_init(&p->state, &cfg, p->state_mem, len), CKF_OK);
}

/* The descriptor of the contract's common fixture; `i` makes digests and names differ. */
static inline void fx_describe(fx_pool *p, unsigned i) {
  static const int32_t legacy[] = {KVRELAY_ROLE_LEGACY};
  static const kvrelay_text alias = {(const uint8_t *)"chat", 4};
  kvrelay_descriptor *d = &p->descriptor;
  kvrelay_pool_id *id = &d->producer.pool_id;
  memset(d, 0, sizeof *d);
  memset(&p->registration, 0, sizeof p->registration);
  id->identity_version = 1;
  id->dc_id = 3;
  id->present = id->domain.present = d->producer.present = true;
  id->domain.cache_semantics =
      (kvrelay_digest){true, {0}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  id->domain.routing_scope = id->domain.cache_semantics;
  memset(id->domain.cache_semantics.digest, (int)i, KVRELAY_DIGEST_LEN);
  memset(id->domain.routing_scope.digest, (int)i + 1, KVRELAY_DIGEST_LEN);
  p->name[0] = 'e';
  p->name[1] = (uint8_t)('0' + i / 10);
  p->name[2] = (uint8_t)('0' + i % 10);
  d->serving_endpoint = (kvrelay_endpoint){true, text_of("prod"), text_of("backend"), {p->name, 3}};
  p->registration.canonical_model_id = text_of("llama");
  p->registration.target = (kvrelay_target){true, KVRELAY_TARGET_BASE, text_of("llama"), {NULL, 0}};
  p->registration.aliases = &alias;
  p->registration.aliases_len = 1;
  d->registrations = &p->registration;
  d->registrations_len = 1;
  d->query_semantics = (kvrelay_semantics){true, 64, HASHFMT_FORMAT_STANDARD};
  d->pool_roles = (kvrelay_roles){legacy, 1};
}

static inline int fx_try_publish(fx *f, unsigned i) {
  fx_pool *p = &f->pools[i];
  size_t len = kvrelay_relay_pool_mem_size(&f->relay, &p->descriptor);
  void *mem = malloc(len + 1);
  int err =
      kvrelay_relay_pool_add(&f->relay, &p->descriptor, &p->state, mem, len, f->now, &p->pool);
  if (err == KVRELAY_OK)
    p->pool_mem = mem;
  else
    free(mem);
  fx_check(f);
  return err;
}

static inline fx_pool *fx_publish(fx *f, unsigned i, uint64_t expected_blocks) {
  fx_pool *p = &f->pools[i];
  fx_state(p, expected_blocks);
  fx_describe(p, i);
  cr_assert_eq(fx_try_publish(f, i), KVRELAY_OK);
  return p;
}

static inline void fx_withdraw(fx *f, unsigned i) {
  fx_pool *p = &f->pools[i];
  kvrelay_relay_pool_remove(&f->relay, p->pool, f->now);
  memset(p->pool_mem, 0xA5, 64); /* nobody may look at it any more */
  free(p->pool_mem);
  p->pool_mem = NULL;
  p->pool = NULL;
  fx_check(f);
}

static inline void fx_close(fx *f) {
  for (unsigned i = 0; i < FX_POOLS; i++) {
    free(f->pools[i].state_mem);
    free(f->pools[i].pool_mem);
  }
  for (size_t i = 0; i < f->kept_len; i++)
    free(f->kept[i]);
  free(f->kept);
  free(f->mem);
  free(f);
}

/* ---- blocks ---- */

/* One event: `n` new blocks, each a chain of its own. */
static inline void fx_store(fx_pool *p, unsigned n) {
  static const ckf_member member = {7, 0};
  for (unsigned i = 0; i < n; i++) {
    ckf_block block = {p->next_key, p->next_key * UINT64_C(0x9E3779B97F4A7C15)};
    ckf_outcome outcome;
    p->next_key++;
    int err = ckf_producer_stored(&p->state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0,
                                  false, 0, &block, 1, &outcome);
    cr_assert(err == CKF_OK || err == CKF_ERR_CAPACITY_EXHAUSTED);
  }
}

static inline void fx_drop(fx_pool *p, unsigned n) {
  static const ckf_member member = {7, 0};
  for (unsigned i = 0; i < n && p->first_key < p->next_key; i++) {
    ckf_outcome outcome;
    cr_assert_eq(ckf_producer_removed(&p->state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING,
                                      &p->first_key, 1, &outcome),
                 CKF_OK);
    p->first_key++;
  }
}

static inline void fx_changed(fx *f, fx_pool *p) {
  cr_assert_eq(kvrelay_relay_pool_changed(&f->relay, p->pool, f->now), KVRELAY_OK);
  fx_check(f);
}

/* One delta. */
static inline void fx_delta(fx *f, fx_pool *p) {
  fx_store(p, 1);
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_OK);
  fx_check(f);
}

static inline bool fx_same_words(const fx_pool *p, const uint64_t *words) {
  return memcmp(words, ckf_producer_words(&p->state),
                8 * ckf_producer_format(&p->state)->bucket_count) == 0;
}

/* ---- calls ---- */

static inline kvrelay_request fx_request(int32_t method) {
  kvrelay_request q = {0};
  q.method = method;
  q.contract_marker = KVRELAY_CONTRACT_MARKER;
  q.subscriber_id = text_of("consumer-a");
  return q;
}

static inline kvrelay_request fx_pool_request(const fx_pool *p) {
  kvrelay_request q = fx_request(KVRELAY_METHOD_SUBSCRIBE_POOL);
  q.expected_producer = kvrelay_pool_descriptor(p->pool)->producer;
  return q;
}

static inline int fx_call(fx *f, const kvrelay_request *q, uint64_t *call) {
  int err = kvrelay_relay_call_open(&f->relay, q, f->now, call, &f->status);
  cr_assert(err == KVRELAY_OK || err == KVRELAY_ERR_REFUSED);
  if (err != KVRELAY_OK) {
    cr_assert_neq(f->status.text[0], 0, "a refusal without a text");
    cr_assert(f->status.reason == KVRELAY_REASON_NONE ||
              f->status.grpc == kvrelay_reason_status(f->status.reason));
  }
  fx_check(f);
  return err;
}

static inline void fx_hang_up(fx *f, uint64_t call) {
  kvrelay_relay_call_close(&f->relay, call, f->now);
  fx_check(f);
}

static inline int fx_pull(fx *f, uint64_t call) {
  int got = kvrelay_relay_call_pull(&f->relay, call, f->wall_us, f->now, &f->out);
  if (got == KVRELAY_PULL_END)
    f->status = f->out.end;
  fx_check(f);
  return got;
}

static inline void fx_tick(fx *f, uint64_t ahead_ns) {
  f->now += ahead_ns;
  kvrelay_relay_tick(&f->relay, f->now);
  fx_check(f);
}

static inline bool fx_ready(fx *f, uint64_t call) {
  uint64_t named;
  bool found = false;
  while (kvrelay_relay_ready_next(&f->relay, &named) == 1)
    found = found || named == call;
  fx_check(f);
  return found;
}

#define ASSERT_REFUSED(F, REQUEST, REASON)                                                         \
  do {                                                                                             \
    uint64_t call_;                                                                                \
    cr_assert_eq(fx_call((F), (REQUEST), &call_), KVRELAY_ERR_REFUSED);                            \
    cr_assert_eq((F)->status.reason, KVRELAY_REASON_##REASON, "%s", (F)->status.text);             \
  } while (0)

/* ---- a subscriber of one pool ---- */

typedef struct reader {
  uint64_t call;
  fx_pool *pool;
  ckf_replica replica;
  ckf_format format;
  kvrelay_producer producer;
  uint32_t chunks; /* snapshot chunks so far */
  uint64_t sequence;
  int last_kind;
  bool ended;
} reader;

static inline int reader_open(fx *f, reader *r, fx_pool *p) {
  memset(r, 0, sizeof *r);
  kvrelay_request q = fx_pool_request(p);
  int err = fx_call(f, &q, &r->call);
  if (err != KVRELAY_OK)
    return err;
  r->pool = p;
  r->producer = q.expected_producer;
  r->format = *ckf_producer_format(&p->state);
  size_t len = ckf_replica_mem_size(&r->format);
  void *mem = malloc(len);
  f->kept = realloc(f->kept, (f->kept_len + 1) * sizeof *f->kept);
  f->kept[f->kept_len++] = mem;
  cr_assert_eq(ckf_replica_init(&r->replica, &r->format, mem, len), CKF_OK);
  return KVRELAY_OK;
}

static inline void reader_close(fx *f, reader *r) {
  fx_hang_up(f, r->call);
  memset(r, 0, sizeof *r);
}

/* One pull; a message must be right in every field and fit the replica. */
static inline int reader_pull(fx *f, reader *r) {
  int got = fx_pull(f, r->call);
  r->ended = r->ended || got == KVRELAY_PULL_END;
  cr_assert(!r->ended || got == KVRELAY_PULL_END, "something after the end");
  if (got != KVRELAY_PULL_MESSAGE)
    return got;
  const kvrelay_filter_update *m = &f->out.u.filter;
  ckf_cbi1_frame frame;
  cr_assert_eq(f->out.method, KVRELAY_METHOD_SUBSCRIBE_POOL);
  cr_assert_eq(kvrelay_check_envelope(&m->envelope).class_, KVRELAY_CLASS_OK);
  cr_assert(m->envelope.relay_present && m->envelope.relay.drt_instance_id == 17 &&
            m->envelope.relay.relay_incarnation == 23);
  cr_assert_eq(kvrelay_check_producer(&m->producer).class_, KVRELAY_CLASS_OK);
  cr_assert(kvrelay_producer_equal(&m->producer, &r->producer));
  cr_assert_eq(m->send_ts_us, f->wall_us);
  r->last_kind = m->kind;
  if (m->kind == KVRELAY_UPDATE_HEARTBEAT) {
    cr_assert(ckf_replica_live(&r->replica), "a heartbeat before the snapshot is complete");
    cr_assert(m->payload_len == 0 && m->base_sequence == r->sequence && m->sequence == r->sequence);
    return got;
  }
  cr_assert_eq(ckf_cbi1_decode(&r->format, m->payload, m->payload_len, &frame), CKF_OK);
  cr_assert_eq(frame.dc_id, 3);
  cr_assert_eq(frame.epoch, m->sequence);
  int applied = ckf_replica_apply(&r->replica, &frame);
  if (m->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK) {
    cr_assert_eq(frame.kind, CKF_CBI1_SNAPSHOT);
    cr_assert(m->base_sequence == m->sequence && (r->chunks == 0 || m->sequence == r->sequence));
    cr_assert_eq(frame.chunk_index, r->chunks);
    r->chunks++;
    cr_assert_eq(applied, r->chunks == frame.chunk_count);
  } else {
    cr_assert_eq(m->kind, KVRELAY_UPDATE_DELTA);
    cr_assert_eq(frame.kind, CKF_CBI1_DELTA);
    cr_assert(m->base_sequence == r->sequence && m->sequence == r->sequence + 1,
              "hole in the sequence");
    cr_assert_eq(frame.base_epoch, m->base_sequence);
    cr_assert_eq(applied, 1);
  }
  r->sequence = m->sequence;
  return got;
}

/* Takes everything there is; returns the answer that was no message. */
static inline int reader_drain(fx *f, reader *r) {
  int got;
  while ((got = reader_pull(f, r)) == KVRELAY_PULL_MESSAGE)
    ;
  return got;
}

static inline bool reader_current(const reader *r) {
  return ckf_replica_live(&r->replica) && fx_same_words(r->pool, ckf_replica_words(&r->replica));
}

#define ASSERT_ENDED(F, READER, REASON)                                                            \
  do {                                                                                             \
    cr_assert_eq(reader_pull((F), (READER)), KVRELAY_PULL_END);                                    \
    cr_assert_eq((F)->status.reason, KVRELAY_REASON_##REASON, "%s", (F)->status.text);             \
    cr_assert_eq((F)->status.grpc, kvrelay_reason_status(KVRELAY_REASON_##REASON));                \
    cr_assert_neq((F)->status.text[0], 0);                                                         \
  } while (0)

#endif /* TEST_RELAY_FIXTURE_H */
