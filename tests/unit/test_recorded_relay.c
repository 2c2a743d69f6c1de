/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The relay of Dynamo, recorded: our producer, fed with the recorded operations, ends with the
 * recorded words, and our consumer takes the recorded catalog and filter streams and ends with them
 * too.
 */
/* make: -lcrypto */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../vectors/vectors.h"
#include "kvrelay.h"
#include "proto/kvrelay_pb.h"
#include "test_capture.h"

#define S1 "tests/data/relay/s1/"
#define S2 "tests/data/relay/s2/"
#define SECOND ((uint64_t)1000000000)

static uint64_t digest(const uint64_t *words, uint64_t count) {
  uint8_t *bytes = malloc(8 * count);
  for (uint64_t i = 0; i < count; i++)
    for (int b = 0; b < 8; b++)
      bytes[8 * i + (uint64_t)b] = (uint8_t)(words[i] >> (8 * b));
  uint64_t sum = hashfmt_hash64(bytes, 8 * count, 0);
  free(bytes);
  return sum;
}

/* ---- producer ---- */

static void apply(ckf_producer *p, uint32_t rank, const json_t *op) {
  size_t n, n_local;
  ckf_member member = {77, rank};
  ckf_outcome outcome;
  uint64_t *external = vec_u64s(vec_get(op, "external"), &n);
  if (strcmp(vec_str(vec_get(op, "op")), "remove") == 0) {
    (void)ckf_producer_removed(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, external, n,
                               &outcome);
  } else {
    uint64_t *local = vec_u64s(vec_get(op, "local"), &n_local);
    cr_assert_eq(n, n_local);
    ckf_block *blocks = malloc((n + 1) * sizeof *blocks);
    for (size_t i = 0; i < n; i++)
      blocks[i] = (ckf_block){external[i], local[i]};
    const json_t *parent = vec_get(op, "parent");
    bool has_parent = !json_is_null(parent);
    (void)ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, has_parent,
                              has_parent ? vec_u64(parent) : 0, false, 0, blocks, n, &outcome);
    /* A fault of the source empties the rank and silences it. */
    if (outcome.error != CKF_OK && outcome.error != CKF_ERR_CAPACITY_EXHAUSTED)
      cr_assert_eq(ckf_producer_remove_rank(p, &member), CKF_OK);
    free(blocks);
    free(local);
  }
  free(external);
  ckf_batch batch;
  cr_assert_geq(ckf_producer_drain(p, &batch), 0);
  cr_assert_eq(ckf_producer_check_(p), CKF_OK);
}

static void producer_ends_like(const json_t *all, const char *stream, uint64_t expected_blocks) {
  const json_t *final = vec_get(vec_get(all, "final"), stream);
  const char *pool = strchr(stream, '_') + 1;
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected_blocks;
  cfg.filter.seed = vec_u64(vec_get(final, "seed"));
  cfg.max_blocks = cfg.max_mappings = 4096; /* the exact state is not bounded by the filter */
  size_t len = ckf_producer_mem_size(&cfg);
  void *mem = malloc(len);
  ckf_producer p;
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, len), CKF_OK);
  cr_assert_eq(ckf_producer_format(&p)->bucket_count, vec_u64(vec_get(final, "buckets")));
  bool conflict = false;
  size_t i;
  json_t *op;
  const json_t *operations = vec_get(all, "operations");
  json_array_foreach (operations, i, op) {
    const char *kind = vec_str(vec_get(op, "op"));
    if (strcmp(kind, "note") == 0) {
      conflict = strcmp(vec_str(vec_get(op, "text")), "after conflicting store") == 0 || conflict;
      continue;
    }
    uint32_t rank = (uint32_t)vec_u64(vec_get(op, "rank"));
    if (strcmp(vec_str(vec_get(op, "pool")), pool) != 0 || (conflict && rank == 0))
      continue;
    apply(&p, rank, op);
  }
  cr_assert(conflict);
  cr_assert_eq(digest(ckf_producer_words(&p), ckf_producer_format(&p)->bucket_count),
               vec_u64(vec_get(final, "words_xxh3")), "%s", stream);
  free(mem);
}

static json_t *load(const char *path) {
  json_error_t error;
  json_t *all = json_load_file(path, JSON_ALLOW_NUL, &error);
  cr_assert_not_null(all, "%s: %s", path, error.text);
  return all;
}

Test(recorded_relay, producer_ends_with_the_same_words) {
  json_t *all = load(S2 "expected.json");
  static const char *const pools[] = {"prod", "eagle", "big"};
  for (size_t i = 0; i < 3; i++) {
    char stream[32];
    snprintf(stream, sizeof stream, "b512_%s", pools[i]);
    producer_ends_like(all, stream, 1000);
    snprintf(stream, sizeof stream, "b64_%s", pools[i]);
    producer_ends_like(all, stream, 200);
  }
  json_decref(all);
}

/* ---- consumer ---- */

typedef struct follower {
  kvrelay_consumer consumer;
  void *mem;
  uint64_t now_ns;
  uint32_t info_call, catalog_call, readiness_call, load_call, filter_call;
  kvrelay_producer wanted; /* producer of the filter call */
  kvrelay_pb_arena arena;
} follower;

static void follower_open(follower *f) {
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  memset(f, 0, sizeof *f);
  cfg.subscriber_id = (kvrelay_text){(const uint8_t *)"test", 4};
  cfg.subscribe_all = true;
  size_t len = kvrelay_consumer_mem_size(&cfg);
  f->now_ns = SECOND;
  f->mem = malloc(len);
  f->arena.len = 1 << 20;
  f->arena.mem = malloc(f->arena.len);
  cr_assert_eq(kvrelay_consumer_init(&f->consumer, &cfg, f->mem, len, f->now_ns), KVRELAY_OK);
  kvrelay_consumer_connected(&f->consumer, f->now_ns);
}

static void follower_close(follower *f, void **replicas, size_t count) {
  for (size_t i = 0; i < count; i++)
    free(replicas[i]);
  free(f->mem);
  free(f->arena.mem);
}

/* Carries out what the consumer wants; replica memory is collected for follower_close. */
static void follower_run(follower *f, void **replicas, size_t *count) {
  kvrelay_action a;
  while (kvrelay_consumer_action_next(&f->consumer, f->now_ns, &a)) {
    if (a.kind == KVRELAY_ACTION_CALL && a.request.method == KVRELAY_METHOD_GET_RELAY_INFO)
      f->info_call = a.call;
    else if (a.kind == KVRELAY_ACTION_CALL && a.request.method == KVRELAY_METHOD_WATCH_CATALOG)
      f->catalog_call = a.call;
    else if (a.kind == KVRELAY_ACTION_CALL &&
             a.request.method == KVRELAY_METHOD_SUBSCRIBE_READINESS)
      f->readiness_call = a.call;
    else if (a.kind == KVRELAY_ACTION_CALL && a.request.method == KVRELAY_METHOD_SUBSCRIBE_LOAD)
      f->load_call = a.call;
    else if (a.kind == KVRELAY_ACTION_CALL) {
      f->filter_call = a.call;
      f->wanted = a.request.expected_producer;
    } else if (a.kind == KVRELAY_ACTION_REPLICA_NEED) {
      cr_assert_lt(*count, 8);
      replicas[*count] = malloc(a.bytes);
      cr_assert_eq(
          kvrelay_consumer_replica_give(&f->consumer, a.pool, replicas[*count], a.bytes, f->now_ns),
          KVRELAY_OK);
      (*count)++;
    } else {
      cr_assert_neq(a.kind, KVRELAY_ACTION_STOP);
      cr_assert_neq(a.kind, KVRELAY_ACTION_RECONNECT);
    }
  }
}

/* A catalog with nothing but the producer that the recorded request names. */
static void follower_catalog(follower *f, const kvrelay_producer *producer,
                             kvrelay_relay_identity relay) {
  static const int32_t role = KVRELAY_ROLE_AGGREGATED;
  kvrelay_descriptor d;
  memset(&d, 0, sizeof d);
  d.producer = *producer;
  d.serving_endpoint.present = true;
  d.serving_endpoint.namespace_ = d.serving_endpoint.component = d.serving_endpoint.endpoint =
      (kvrelay_text){(const uint8_t *)"x", 1};
  d.query_semantics.present = true;
  d.query_semantics.kv_block_size = 4;
  d.query_semantics.hash_format = HASHFMT_FORMAT_STANDARD;
  d.pool_roles = (kvrelay_roles){&role, 1};
  kvrelay_catalog_update u;
  memset(&u, 0, sizeof u);
  u.envelope.protocol_version = 1;
  u.envelope.contract_marker = KVRELAY_CONTRACT_MARKER;
  u.envelope.relay_present = true;
  u.envelope.relay = relay;
  u.revision = 1;
  u.snapshot_present = true;
  u.pools = &d;
  u.pools_len = 1;
  cr_assert_eq(kvrelay_consumer_feed_catalog(&f->consumer, f->catalog_call, &u, f->now_ns),
               KVRELAY_OK);
}

/* Feeds a recorded filter stream; returns the number of deltas and the final state. */
static size_t follow(const char *path, uint64_t *sequence, uint64_t *words_digest,
                     kvrelay_status *end, bool *live_at_end) {
  capture c;
  follower f;
  void *replicas[8];
  size_t replica_count = 0, deltas = 0;
  kvrelay_request request;
  kvrelay_pool_view view;
  capture_open(&c, path);
  follower_open(&f);
  cr_assert_eq(capture_next(&c, end), 'r');
  cr_assert_eq(kvrelay_pb_decode_request(KVRELAY_METHOD_SUBSCRIBE_POOL, c.bytes, c.len, &request),
               KVRELAY_OK);
  kvrelay_producer producer = request.expected_producer;
  follower_run(&f, replicas, &replica_count);
  for (char type; (type = capture_next(&c, end)) != 0;) {
    if (type != 'm')
      continue;
    kvrelay_filter_update u;
    cr_assert_eq(kvrelay_pb_decode_filter(c.bytes, c.len, NULL, &u), KVRELAY_OK);
    if (f.filter_call == 0) {
      follower_catalog(&f, &producer, u.envelope.relay);
      follower_run(&f, replicas, &replica_count);
      cr_assert_neq(f.filter_call, 0, "the consumer did not subscribe to the recorded producer");
      cr_assert(kvrelay_producer_equal(&f.wanted, &producer));
    }
    deltas += u.kind == KVRELAY_UPDATE_DELTA;
    f.now_ns += SECOND / 10;
    cr_assert_eq(kvrelay_consumer_feed_filter(&f.consumer, f.filter_call, &u, f.now_ns),
                 KVRELAY_OK);
    follower_run(&f, replicas, &replica_count);
    cr_assert_eq(kvrelay_consumer_pool_get(&f.consumer, 0, f.now_ns, &view), KVRELAY_OK);
    cr_assert_eq(view.fault, KVRELAY_FAULT_NONE,
                 "%s: the consumer complained about a recorded frame: %d", path, view.fault);
  }
  *live_at_end = view.state == KVRELAY_REPLICA_LIVE;
  *sequence = view.sequence;
  *words_digest = view.words == NULL ? 0 : digest(view.words, producer.ckf_format.bucket_count);
  if (end->grpc != KVRELAY_GRPC_OK) {
    cr_assert_eq(kvrelay_consumer_feed_end(&f.consumer, f.filter_call, end, f.now_ns), KVRELAY_OK);
    cr_assert_eq(kvrelay_consumer_pool_get(&f.consumer, 0, f.now_ns, &view), KVRELAY_OK);
    cr_assert_null(view.words, "an ended stream's replica is void");
  }
  follower_close(&f, replicas, replica_count);
  capture_close(&c);
  return deltas;
}

Test(recorded_relay, consumer_ends_with_the_recorded_words) {
  json_t *all = load(S2 "expected.json");
  const char *stream;
  json_t *final;
  size_t streams = 0;
  json_object_foreach (json_object_get(all, "final"), stream, final) {
    char path[128];
    uint64_t sequence, words;
    bool live;
    kvrelay_status end;
    snprintf(path, sizeof path, S2 "%s.jsonl", stream);
    size_t deltas = follow(path, &sequence, &words, &end, &live);
    cr_assert(live);
    cr_assert_eq(deltas, vec_u64(vec_get(final, "deltas")), "%s", stream);
    cr_assert_eq(sequence, vec_u64(vec_get(final, "sequence")), "%s", stream);
    cr_assert_eq(words, vec_u64(vec_get(final, "words_xxh3")), "%s", stream);
    streams++;
  }
  cr_assert_eq(streams, 6);
  json_decref(all);
}

/* A subscriber that came late ends where the first one ended. */
Test(recorded_relay, a_late_subscriber_ends_with_the_same_words) {
  static const char *const pairs[][2] = {{"b512_prod", "b512_prod_late"},
                                         {"b64_prod", "b64_prod_late"}};
  for (size_t i = 0; i < 2; i++) {
    uint64_t sequence[2], words[2];
    for (size_t j = 0; j < 2; j++) {
      char path[128];
      bool live;
      kvrelay_status end;
      snprintf(path, sizeof path, S2 "%s.jsonl", pairs[i][j]);
      (void)follow(path, &sequence[j], &words[j], &end, &live);
      cr_assert(live);
    }
    cr_assert_eq(sequence[0], sequence[1]);
    cr_assert_eq(words[0], words[1]);
  }
}

Test(recorded_relay, every_filter_stream_of_s1_is_taken_without_complaint) {
  static const struct {
    const char *name;
    int32_t reason;
  } streams[] = {{"filter_A", KVRELAY_REASON_PUBLICATION_UNAVAILABLE},
                 {"filter_A_late", KVRELAY_REASON_PUBLICATION_UNAVAILABLE},
                 {"filter_A_gen2", KVRELAY_REASON_NONE},
                 {"filter_D", KVRELAY_REASON_PUBLICATION_UNAVAILABLE},
                 {"filter_P", KVRELAY_REASON_NONE}};
  for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
    char path[128];
    uint64_t sequence, words;
    bool live;
    kvrelay_status end;
    snprintf(path, sizeof path, S1 "%s.jsonl", streams[i].name);
    (void)follow(path, &sequence, &words, &end, &live);
    cr_assert(live, "%s", streams[i].name);
    cr_assert_eq(end.reason, streams[i].reason, "%s", streams[i].name);
  }
}

Test(recorded_relay, its_catalog_is_taken_message_by_message) {
  capture c;
  follower f;
  void *replicas[8];
  size_t replica_count = 0, messages = 0, most_pools = 0;
  kvrelay_status end;
  capture_open(&c, S1 "catalog.jsonl");
  follower_open(&f);
  follower_run(&f, replicas, &replica_count);
  uint64_t last = 0;
  for (char type; (type = capture_next(&c, &end)) != 0;) {
    if (type != 'm')
      continue;
    kvrelay_catalog_update u;
    f.arena.used = 0;
    cr_assert_eq(kvrelay_pb_decode_catalog(c.bytes, c.len, &f.arena, &u), KVRELAY_OK);
    cr_assert_eq(kvrelay_consumer_feed_catalog(&f.consumer, f.catalog_call, &u, f.now_ns),
                 KVRELAY_OK);
    uint64_t revision;
    uint32_t pools;
    cr_assert(kvrelay_consumer_catalog(&f.consumer, &revision, &pools));
    cr_assert_eq(revision, u.revision);
    cr_assert_eq(pools, u.pools_len);
    cr_assert_geq(revision, last);
    last = revision;
    most_pools = pools > most_pools ? pools : most_pools;
    for (uint32_t i = 0; i < pools; i++) {
      kvrelay_pool_view view;
      cr_assert_eq(kvrelay_consumer_pool_get(&f.consumer, i, f.now_ns, &view), KVRELAY_OK);
      cr_assert_eq(view.verdict.class_, KVRELAY_CLASS_OK);
    }
    messages++;
  }
  cr_assert_geq(messages, 3);
  cr_assert_geq(most_pools, 3);
  follower_close(&f, NULL, 0);
  capture_close(&c);
}

/* ---- readiness and load ---- */

/* Feeds a readiness stream; every entry must be usable, but for those that name ENCODE twice. */
static void takes_readiness(const char *path, size_t least, size_t odd_wanted) {
  capture c;
  follower f;
  kvrelay_status end;
  size_t count = 0, messages = 0, odd = 0;
  capture_open(&c, path);
  follower_open(&f);
  follower_run(&f, NULL, &count);
  for (char type; (type = capture_next(&c, &end)) != 0;) {
    kvrelay_readiness_update u;
    kvrelay_plane_view view;
    if (type != 'm')
      continue;
    f.arena.used = 0;
    cr_assert_eq(kvrelay_pb_decode_readiness(c.bytes, c.len, &f.arena, &u), KVRELAY_OK);
    cr_assert_eq(kvrelay_consumer_feed_readiness(&f.consumer, f.readiness_call, &u, f.now_ns),
                 KVRELAY_OK);
    cr_assert(kvrelay_consumer_readiness(&f.consumer, f.now_ns, &view), "%s: message %zu", path,
              messages);
    cr_assert(view.revision == u.revision && view.len == u.entries_len);
    for (uint32_t i = 0; i < view.len; i++) {
      kvrelay_entry_view e;
      cr_assert_eq(kvrelay_consumer_readiness_get(&f.consumer, i, &e), KVRELAY_OK);
      if (e.verdict.class_ == KVRELAY_CLASS_OK)
        continue;
      cr_assert_eq(e.verdict.condition, KVRELAY_COND_UNSUPPORTED_DUPLICATE_ENDPOINT_ROLE);
      cr_assert_neq(e.entry->state, KVRELAY_READY_READY);
      odd++;
    }
    messages++;
  }
  cr_expect_geq(messages, least, "%s: %zu messages", path, messages);
  cr_expect(odd_wanted ? odd != 0 : odd == 0, "%s: %zu entries set aside", path, odd);
  follower_close(&f, NULL, 0);
  capture_close(&c);
}

Test(recorded_relay, its_readiness_is_taken_message_by_message) {
  takes_readiness(S1 "readiness.jsonl", 10, 0);
  takes_readiness("tests/data/relay/topology/g1/readiness.jsonl", 10, 0);
  takes_readiness("tests/data/relay/topology/g2/readiness.jsonl", 10, 1);
  takes_readiness("tests/data/relay/topology/g3/readiness.jsonl", 10, 0);
  takes_readiness("tests/data/relay/topology/g4/readiness.jsonl", 8, 0);
}

Test(recorded_relay, its_load_is_taken_window_by_window) {
  capture c;
  follower f;
  kvrelay_status end;
  size_t count = 0, messages = 0, usable = 0, silent = 0;
  capture_open(&c, S1 "load.jsonl");
  follower_open(&f);
  follower_run(&f, NULL, &count);
  for (char type; (type = capture_next(&c, &end)) != 0;) {
    kvrelay_load_update u;
    kvrelay_plane_view view;
    if (type != 'm')
      continue;
    f.arena.used = 0;
    cr_assert_eq(kvrelay_pb_decode_load(c.bytes, c.len, &f.arena, &u), KVRELAY_OK);
    cr_assert_eq(kvrelay_consumer_feed_load(&f.consumer, f.load_call, &u, f.now_ns), KVRELAY_OK);
    cr_assert(kvrelay_consumer_load(&f.consumer, f.now_ns, &view));
    cr_assert(view.revision == messages && view.len == u.pools_len && view.window_ms == 1000);
    for (uint32_t i = 0; i < view.len; i++) {
      kvrelay_load_view l;
      cr_assert_eq(kvrelay_consumer_load_get(&f.consumer, i, &l), KVRELAY_OK);
      cr_assert_eq(l.verdict.class_, KVRELAY_CLASS_OK);
      usable += l.usable;
      silent += !l.usable;
      cr_assert(!l.usable || l.entry->kv_used_blocks == 77 || l.entry->kv_used_blocks == 0);
    }
    messages++;
  }
  cr_assert(messages == 53 && usable > 20 && silent > 20, "%zu: %zu, %zu", messages, usable,
            silent);
  follower_close(&f, NULL, 0);
  capture_close(&c);
}

/* ---- our relay under the recorded commands ---- */

#define PLAYED_POOLS 3
#define PLAYED_WORKERS 3

typedef struct played_pool {
  const char *component;
  kvrelay_descriptor descriptor; /* as recorded */
  ckf_producer state;
  void *state_mem, *mem, *ranks_mem;
  kvrelay_pool *pool; /* NULL = withdrawn */
  const char *names[PLAYED_WORKERS];
  kvrelay_rank_range ranges[PLAYED_WORKERS];
  size_t len;
} played_pool;

typedef struct played {
  kvrelay_relay relay;
  void *mem;
  uint64_t now_ns, call;
  played_pool pools[PLAYED_POOLS];
} played;

static played_pool *played_by(played *p, const char *endpoint) {
  static const char *const paths[] = {"prod.backend.generate", "pd.prefill.generate",
                                      "pd.backend.generate"};
  for (size_t i = 0; i < PLAYED_POOLS; i++)
    if (strcmp(paths[i], endpoint) == 0)
      return &p->pools[i];
  cr_assert_fail("endpoint %s", endpoint);
  return NULL;
}

static void played_withdraw(played *p, played_pool *q) {
  kvrelay_relay_pool_remove(&p->relay, q->pool, p->now_ns);
  q->pool = NULL;
  free(q->mem);
  free(q->ranks_mem);
  q->mem = q->ranks_mem = NULL;
}

/* The pool is there with these ranks; what was reported of a pool that stays, stays. */
static void played_declare(played *p, played_pool *q) {
  if (q->pool == NULL) {
    const size_t need = kvrelay_relay_pool_mem_size(&p->relay, &q->descriptor);
    q->mem = malloc(need);
    cr_assert_eq(kvrelay_relay_pool_add(&p->relay, &q->descriptor, &q->state, q->mem, need,
                                        p->now_ns, &q->pool),
                 KVRELAY_OK);
  }
  const size_t need = kvrelay_pool_ranks_mem_size(q->ranges, q->len);
  void *mem = malloc(need);
  cr_assert_eq(kvrelay_pool_set_ranks(q->pool, q->ranges, q->len, mem, need), KVRELAY_OK);
  free(q->ranks_mem);
  q->ranks_mem = mem;
}

static void played_add(played *p, const json_t *command, const char *worker) {
  played_pool *q = played_by(p, vec_str(vec_get(command, "endpoint")));
  const json_t *start = json_object_get(command, "dp_start");
  if (vec_u64(vec_get(command, "block")) != 4) { /* another domain on the same endpoint */
    played_withdraw(p, q);
    return;
  }
  cr_assert_lt(q->len, PLAYED_WORKERS);
  q->names[q->len] = vec_str(vec_get(command, "name"));
  q->ranges[q->len++] = (kvrelay_rank_range){
      strtoull(worker, NULL, 10), start ? (uint32_t)vec_u64(start) : 0,
      (uint32_t)vec_u64(vec_get(command, "dp")), vec_u64(vec_get(command, "total"))};
  played_declare(p, q);
}

static void played_stop(played *p, const char *name) {
  played_pool *q = &p->pools[0]; /* of the worker with the other domain: the pool comes back */
  for (size_t i = 0; i < PLAYED_POOLS; i++)
    for (size_t k = 0; k < p->pools[i].len; k++)
      if (strcmp(p->pools[i].names[k], name) == 0) {
        q = &p->pools[i];
        q->len--;
        q->names[k] = q->names[q->len];
        q->ranges[k] = q->ranges[q->len];
      }
  if (q->len != 0)
    played_declare(p, q);
  else
    played_withdraw(p, q);
}

static void played_report(played *p, const json_t *command) {
  for (size_t i = 0; i < PLAYED_POOLS; i++)
    for (size_t k = 0; k < p->pools[i].len; k++)
      if (strcmp(p->pools[i].names[k], vec_str(vec_get(command, "name"))) == 0)
        (void)kvrelay_pool_report(p->pools[i].pool, p->pools[i].ranges[k].worker,
                                  (uint32_t)vec_u64(vec_get(command, "rank")),
                                  vec_u64(vec_get(command, "used")));
}

/* One window as a text, without what differs between two runs. */
static void window_text(char out[512], const kvrelay_load_update *m) {
  size_t n = 0;
  out[0] = 0;
  for (size_t i = 0; i < m->pools_len; i++) {
    char name[KVRELAY_POOL_NAME_CAP];
    const kvrelay_load_entry *e = &m->pools[i];
    kvrelay_pool_id_format(&e->producer.pool_id, name);
    n += (size_t)snprintf(out + n, 512 - n, "%.8s %.4s: %llu of %llu, %u of %u\n", name, name + 33,
                          (unsigned long long)e->kv_used_blocks,
                          (unsigned long long)e->total_kv_blocks, e->kv_observed_ranks,
                          e->kv_expected_ranks);
  }
}

/* The next recorded window that differs from the last one. */
static bool next_window(capture *c, kvrelay_pb_arena *arena, char last[512]) {
  kvrelay_status end;
  char text[512];
  for (char type; (type = capture_next(c, &end)) != 0;) {
    kvrelay_load_update u;
    if (type != 'm')
      continue;
    arena->used = 0;
    cr_assert_eq(kvrelay_pb_decode_load(c->bytes, c->len, arena, &u), KVRELAY_OK);
    window_text(text, &u);
    if (strcmp(text, last) != 0) {
      strcpy(last, text);
      return true;
    }
  }
  return false;
}

/* Descriptors from the recorded catalog, whichever message has them first. */
static void played_open(played *p, kvrelay_pb_arena *arena) {
  static const char *const components[] = {"prod/backend", "pd/prefill", "pd/backend"};
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  ckf_producer_config state = ckf_producer_config_default();
  capture c;
  kvrelay_status end;
  memset(p, 0, sizeof *p);
  cfg.max_pools = cfg.max_members = 8;
  cfg.max_bucket_count = 64;
  p->mem = malloc(kvrelay_relay_mem_size(&cfg));
  cr_assert_eq(kvrelay_relay_init(&p->relay, &cfg, p->mem, kvrelay_relay_mem_size(&cfg), 0),
               KVRELAY_OK);
  state.filter.expected_blocks = 32;
  capture_open(&c, S1 "catalog.jsonl");
  for (char type; (type = capture_next(&c, &end)) != 0;) {
    static uint8_t kept[64][4096]; /* descriptors point into the bytes */
    static size_t kept_len;
    kvrelay_catalog_update u;
    if (type != 'm')
      continue;
    cr_assert(kept_len < 64 && c.len <= sizeof kept[0]);
    memcpy(kept[kept_len], c.bytes, c.len);
    cr_assert_eq(kvrelay_pb_decode_catalog(kept[kept_len++], c.len, arena, &u), KVRELAY_OK);
    for (size_t i = 0; i < u.pools_len; i++)
      for (size_t k = 0; k < PLAYED_POOLS; k++) {
        char path[64];
        const kvrelay_endpoint *e = &u.pools[i].serving_endpoint;
        snprintf(path, sizeof path, "%.*s/%.*s", (int)e->namespace_.len,
                 (const char *)e->namespace_.ptr, (int)e->component.len,
                 (const char *)e->component.ptr);
        if (strcmp(path, components[k]) == 0 && p->pools[k].component == NULL) {
          p->pools[k].component = components[k];
          p->pools[k].descriptor = u.pools[i];
        }
      }
  }
  capture_close(&c);
  for (size_t k = 0; k < PLAYED_POOLS; k++) {
    const size_t need = ckf_producer_mem_size(&state);
    cr_assert_not_null(p->pools[k].component);
    p->pools[k].state_mem = malloc(need);
    cr_assert_eq(ckf_producer_init(&p->pools[k].state, &state, p->pools[k].state_mem, need),
                 CKF_OK);
  }
}

static void played_close(played *p) {
  for (size_t k = 0; k < PLAYED_POOLS; k++) {
    free(p->pools[k].state_mem);
    free(p->pools[k].mem);
    free(p->pools[k].ranks_mem);
  }
  free(p->mem);
}

/* Every window that was recorded is one that ours closes, in the same order; ours closes one after
 * each command, so it may close more. */
Test(recorded_relay, our_load_windows_are_the_recorded_ones) {
  static uint8_t rooms[2][1 << 20];
  kvrelay_pb_arena keep = {rooms[0], sizeof rooms[0], 0}, arena = {rooms[1], sizeof rooms[1], 0};
  played p;
  capture commands, load;
  char recorded[512] = "-", ours[512];
  size_t matched = 0;
  played_open(&p, &keep);
  const kvrelay_request q = {
      KVRELAY_METHOD_SUBSCRIBE_LOAD, KVRELAY_CONTRACT_MARKER, {(const uint8_t *)"test", 4}, {0}, 0};
  kvrelay_status status;
  cr_assert_eq(kvrelay_relay_call_open(&p.relay, &q, 0, &p.call, &status), KVRELAY_OK);
  capture_open(&load, S1 "load.jsonl");
  cr_assert(next_window(&load, &arena, recorded));
  capture_open(&commands, S1 "commands.jsonl");
  json_t *lines[32];
  size_t lines_len = 0;
  bool more = true;
  do {
    kvrelay_outgoing out;
    cr_assert_eq(kvrelay_relay_call_pull(&p.relay, p.call, 0, p.now_ns, &out),
                 KVRELAY_PULL_MESSAGE);
    window_text(ours, &out.u.load);
    if (more && strcmp(ours, recorded) == 0) {
      matched++;
      more = next_window(&load, &arena, recorded);
    }
    if (getline(&commands.line, &commands.cap, commands.file) <= 0)
      break;
    json_t *record = lines[lines_len++] = json_loads(commands.line, 0, NULL);
    cr_assert(record != NULL && lines_len < 32);
    const json_t *command = vec_get(record, "command");
    const char *op = vec_str(vec_get(command, "op"));
    if (strcmp(op, "add") == 0)
      played_add(&p, command, vec_str(vec_get(record, "worker")));
    else if (strcmp(op, "stop") == 0)
      played_stop(&p, vec_str(vec_get(command, "name")));
    else if (strcmp(op, "metrics") == 0)
      played_report(&p, command);
    p.now_ns += SECOND;
    kvrelay_relay_tick(&p.relay, p.now_ns);
  } while (true);
  cr_expect(!more, "never sent by ours:\n%s\nlast sent:\n%s", recorded, ours);
  cr_expect_geq(matched, 11, "%zu windows", matched);
  for (size_t i = 0; i < lines_len; i++)
    json_decref(lines[i]);
  capture_close(&commands);
  capture_close(&load);
  played_close(&p);
}
