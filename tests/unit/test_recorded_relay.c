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
