/* SPDX-License-Identifier: Apache-2.0 */
/* The conformance scenarios that a socket is enough for, in the contract's order. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kvrelay_pb.h"
#include "show.h"
#include "trial.h"

static const int32_t streams[] = {KVRELAY_METHOD_WATCH_CATALOG, KVRELAY_METHOD_SUBSCRIBE_READINESS,
                                  KVRELAY_METHOD_SUBSCRIBE_LOAD, KVRELAY_METHOD_SUBSCRIBE_POOL};
#define STREAMS (sizeof streams / sizeof streams[0])

/* Whether the relay offers this plane at all: the planes beside catalog and pools may be missing.
 */
static int offered(trial *t, int32_t method) {
  const kvrelay_request q = trial_request(t, method);
  const uint32_t call = trial_call(t, &q);
  probe_answer a;
  const int event = probe_next(&t->p, call, t->until_ns, &a);
  const bool missing = event == PROBE_END && a.status.grpc == KVRELAY_GRPC_UNIMPLEMENTED;
  probe_cancel(&t->p, call);
  return missing ? trial_skip(t, "the relay does not offer it") : TRIAL_PASSED;
}

/* ---- calls and refusals ---- */

static int info_is_one_message(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_GET_RELAY_INFO);
  const uint32_t call = trial_call(t, &q);
  probe_answer a;
  TRY(trial_message(t, call, q.method, NULL)); /* looks at version, marker and relay */
  const int event = probe_next(&t->p, call, t->until_ns, &a);
  if (event == PROBE_MESSAGE)
    return trial_fail(t, "a second message came, must be one");
  if (event == PROBE_SILENT || a.status.grpc != KVRELAY_GRPC_OK)
    return trial_fail(t, "behind the message came %s, must be OK",
                      event == PROBE_SILENT ? "nothing" : kvrelay_grpc_status_name(a.status.grpc));
  return TRIAL_PASSED;
}

static int snapshot_chunks(trial *t) {
  follower f;
  TRY(trial_pool(t));
  int verdict = trial_follow(t, &f);
  if (verdict == TRIAL_PASSED)
    verdict = trial_snapshot(t, &f);
  trial_unfollow(t, &f);
  return verdict;
}

/* One thing wrong with the key of a pool, and what has to come of it. */
static void break_version(kvrelay_producer *p) { p->pool_id.identity_version++; }
static void break_layout(kvrelay_producer *p) { p->layout_generation = 0; }
static void break_dc(kvrelay_producer *p) { p->pool_id.dc_id++; }
static void break_generation(kvrelay_producer *p) { p->layout_generation++; }
static void break_seed(kvrelay_producer *p) { p->ckf_format.seed ^= 1; }
static void break_presence(kvrelay_producer *p) { p->present = false; }
static const struct {
  const char *what;
  void (*apply)(kvrelay_producer *p);
  int32_t grpc, reason;
} wrong_keys[] = {
    {"no expected producer", break_presence, KVRELAY_GRPC_INVALID_ARGUMENT,
     KVRELAY_REASON_INVALID_REQUEST},
    {"layout generation 0", break_layout, KVRELAY_GRPC_INVALID_ARGUMENT,
     KVRELAY_REASON_INVALID_REQUEST},
    {"the next identity version", break_version, KVRELAY_GRPC_FAILED_PRECONDITION,
     KVRELAY_REASON_UNSUPPORTED_FEATURE},
    {"the next data centre", break_dc, KVRELAY_GRPC_NOT_FOUND, KVRELAY_REASON_POOL_NOT_FOUND},
    {"another layout generation", break_generation, KVRELAY_GRPC_FAILED_PRECONDITION,
     KVRELAY_REASON_PRODUCER_CHANGED},
    {"another seed", break_seed, KVRELAY_GRPC_FAILED_PRECONDITION, KVRELAY_REASON_PRODUCER_CHANGED},
};

static int refusals_of_pools(trial *t) {
  TRY(trial_pool(t));
  for (size_t i = 0; i < sizeof wrong_keys / sizeof wrong_keys[0]; i++) {
    kvrelay_request q = trial_request(t, KVRELAY_METHOD_SUBSCRIBE_POOL);
    wrong_keys[i].apply(&q.expected_producer);
    TRY(trial_refused(t, trial_call(t, &q), wrong_keys[i].grpc, wrong_keys[i].reason,
                      wrong_keys[i].what));
  }
  const kvrelay_request good = trial_request(t, KVRELAY_METHOD_SUBSCRIBE_POOL);
  return trial_accepted(t, &good, "the right key after the wrong ones");
}

static int wrong_markers(trial *t) {
  kvrelay_request q = trial_request(t, KVRELAY_METHOD_GET_RELAY_INFO);
  q.contract_marker = 0;
  TRY(trial_refused(t, trial_call(t, &q), KVRELAY_GRPC_FAILED_PRECONDITION,
                    KVRELAY_REASON_CONTRACT_MISMATCH, "GetRelayInfo with marker 0"));
  const int pool = trial_pool(t);
  if (pool == TRIAL_FAILED)
    return pool;
  for (size_t i = 0; i < STREAMS; i++) {
    q = trial_request(t, streams[i]);
    q.contract_marker = KVRELAY_CONTRACT_MARKER + 1;
    q.subscriber_id.len = 0; /* wrong as well, but looked at later */
    if (streams[i] == KVRELAY_METHOD_SUBSCRIBE_POOL ? pool != TRIAL_PASSED
                                                    : offered(t, streams[i]) != TRIAL_PASSED)
      continue;
    TRY(trial_refused(t, trial_call(t, &q), KVRELAY_GRPC_FAILED_PRECONDITION,
                      KVRELAY_REASON_CONTRACT_MISMATCH, kvrelay_method_path(streams[i])));
  }
  return TRIAL_PASSED;
}

static int subscriber_ids(trial *t) {
  uint8_t x[129];
  const kvrelay_text good[] = {{(const uint8_t *)"consumer-a", 10}, {x, 128}};
  const kvrelay_text bad[] = {{x, 0}, {x, 129}, {(const uint8_t *)"consumer\nspoof", 14}};
  static const char *const bad_names[] = {"an empty id", "an id of 129 bytes",
                                          "an id with a line feed"};
  memset(x, 'x', sizeof x);
  for (size_t i = 0; i < 3; i++) { /* catalog, readiness, load: the same rule without a key */
    if (offered(t, streams[i]) != TRIAL_PASSED)
      continue;
    kvrelay_request q = trial_request(t, streams[i]);
    for (size_t k = 0; k < 3; k++) {
      q.subscriber_id = bad[k];
      TRY(trial_refused(t, trial_call(t, &q), KVRELAY_GRPC_INVALID_ARGUMENT,
                        KVRELAY_REASON_INVALID_REQUEST, bad_names[k]));
    }
    for (size_t k = 0; k < 2; k++) {
      q.subscriber_id = good[k];
      TRY(trial_accepted(t, &q, k == 0 ? "a plain id" : "an id of 128 bytes"));
    }
  }
  return TRIAL_PASSED;
}

/* fixed32 field 127, the contract marker; then varint field 100. */
static const uint8_t marked[] = {0xFD, 0x07, 0x31, 0x52, 0x56, 0x4B, 0xA0, 0x06, 0x01};

static int unknown_fields(trial *t) {
  const int32_t method = KVRELAY_METHOD_GET_RELAY_INFO;
  return trial_message(t, probe_call(&t->p, kvrelay_method_path(method), marked, sizeof marked),
                       method, NULL);
}

static int unknown_methods(trial *t) {
  static const char *const paths[] = {"/dynamo.kvrelay.v1.KvEventRelay/NoSuchMethod",
                                      "/dynamo.kvrelay.v1.NoSuchService/GetRelayInfo"};
  for (size_t i = 0; i < 2; i++)
    TRY(trial_refused(t, probe_call(&t->p, paths[i], marked, 6), KVRELAY_GRPC_UNIMPLEMENTED,
                      KVRELAY_REASON_NONE, paths[i]));
  const int32_t load = KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD;
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_WATCH_CATALOG); /* the same fields */
  uint8_t bytes[256];
  const ptrdiff_t len = kvrelay_pb_encode_request(&q, bytes, sizeof bytes);
  const uint32_t call = probe_call(&t->p, kvrelay_method_path(load), bytes, (size_t)len);
  probe_answer a;
  const int event = probe_next(&t->p, call, t->until_ns, &a);
  probe_cancel(&t->p, call);
  if (event == PROBE_MESSAGE)
    return trial_skip(t, "the relay offers serving load, which is a later version's");
  if (event == PROBE_SILENT || a.status.grpc != KVRELAY_GRPC_UNIMPLEMENTED ||
      a.status.reason != KVRELAY_REASON_NONE)
    return trial_fail(t, "serving load: came %s, must be UNIMPLEMENTED without reason",
                      event == PROBE_SILENT ? "nothing" : kvrelay_grpc_status_name(a.status.grpc));
  return TRIAL_PASSED;
}

static int undecodable(trial *t) {
  static const struct {
    const char *what;
    uint8_t bytes[10];
    size_t len;
  } requests[] = {
      {"an id that is not UTF-8", {0x0A, 2, 0x61, 0xFF, 0xFD, 0x07, 0x31, 0x52, 0x56, 0x4B}, 10},
      {"the same with a wrong marker", {0x0A, 2, 0x61, 0xFF, 0xFD, 0x07, 1, 2, 3, 4}, 10},
      {"a field that ends too early", {0x0A, 9, 0x61}, 3},
      {"a varint without an end", {0x08, 0xFF, 0xFF, 0xFF}, 4}};
  for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++)
    TRY(trial_refused(t,
                      probe_call(&t->p, kvrelay_method_path(KVRELAY_METHOD_WATCH_CATALOG),
                                 requests[i].bytes, requests[i].len),
                      KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_NONE, requests[i].what));
  return TRIAL_PASSED;
}

/* ---- filter streams ---- */

#define FRAMES_BEHIND 3u
#define HEARTBEAT_S 10 /* the contract's longest silence of a filter stream */
#define LATE_S 1       /* what timers and the network may add to it */

/* Nothing came for so long, up to the end of the trial. */
static int judge_silence(trial *t, const follower *f, double silence_s) {
  const char *const last = f->deltas != 0 ? "a delta" : "the snapshot";
  if (silence_s > HEARTBEAT_S + LATE_S)
    return trial_fail(t, "behind %s came nothing for %.1f s, must be a heartbeat after %d s", last,
                      silence_s, HEARTBEAT_S);
  return f->deltas != 0
             ? TRIAL_PASSED
             : trial_skip(t, "behind %s came nothing for %.1f s, a heartbeat is due after %d s",
                          last, silence_s, HEARTBEAT_S);
}

static int frames_behind_a_snapshot(trial *t) {
  follower f;
  TRY(trial_pool(t));
  int verdict = trial_follow(t, &f);
  if (verdict == TRIAL_PASSED)
    verdict = trial_snapshot(t, &f);
  uint64_t last_ns = probe_now(&t->p);
  while (verdict == TRIAL_PASSED && f.deltas < FRAMES_BEHIND && f.heartbeats == 0) {
    last_ns = probe_now(&t->p);
    verdict = trial_frame(t, &f, t->until_ns);
  }
  if (verdict == TRIAL_SILENT)
    verdict = judge_silence(t, &f, (double)(probe_now(&t->p) - last_ns) / 1e9);
  trial_unfollow(t, &f);
  return verdict;
}

/* Brings the two to one sequence and compares. */
static int compare(trial *t, follower *a, follower *b) {
  while (a->sequence != b->sequence) {
    follower *behind = a->sequence < b->sequence ? a : b;
    const int verdict = trial_frame(t, behind, t->until_ns);
    if (verdict == TRIAL_SILENT)
      return trial_fail(t, "one stands at %" PRIu64 ", the other at %" PRIu64 ", and nothing comes",
                        a->sequence, b->sequence);
    TRY(verdict);
  }
  if (memcmp(ckf_replica_words(&a->replica), ckf_replica_words(&b->replica),
             8 * (size_t)a->format.bucket_count) != 0)
    return trial_fail(t, "at sequence %" PRIu64 " the filters differ", a->sequence);
  return TRIAL_PASSED;
}

static int two_subscribers(trial *t) {
  follower a, b = {0};
  TRY(trial_pool(t));
  int verdict = trial_follow(t, &a);
  if (verdict == TRIAL_PASSED)
    verdict = trial_follow(t, &b);
  if (verdict == TRIAL_PASSED)
    verdict = trial_snapshot(t, &a);
  if (verdict == TRIAL_PASSED)
    verdict = trial_snapshot(t, &b);
  if (verdict == TRIAL_PASSED)
    verdict = compare(t, &a, &b);
  trial_unfollow(t, &a);
  trial_unfollow(t, &b);
  return verdict;
}

#define CANCELS 4

static int cancelled_streams(trial *t) {
  TRY(trial_pool(t));
  for (int i = 0; i < CANCELS; i++)
    for (size_t k = 0; k < STREAMS; k++) {
      const kvrelay_request q = trial_request(t, streams[k]);
      const uint32_t call = trial_call(t, &q);
      probe_answer a;
      if (i % 2 == 0) /* with its first message, and without waiting for it */
        (void)probe_next(&t->p, call, t->until_ns, &a);
      probe_cancel(&t->p, call);
    }
  follower f;
  int verdict = trial_follow(t, &f);
  if (verdict == TRIAL_PASSED)
    verdict = trial_snapshot(t, &f);
  trial_unfollow(t, &f);
  return verdict;
}

/* ---- catalog, readiness, load ---- */

/* Looks for two of one key: 0 none, 1 `again` is one of them, -1 no memory to look. */
static int find_twice(const void *list, size_t len, size_t size,
                      int (*order)(const void *, const void *), void *again) {
  char *const sorted = malloc(len * size + 1);
  int found = sorted != NULL ? 0 : -1;
  if (sorted != NULL && len != 0) {
    memcpy(sorted, list, len * size);
    qsort(sorted, len, size, order);
    for (size_t i = 1; i < len && found == 0; i++)
      if (order(sorted + (i - 1) * size, sorted + i * size) == 0) {
        memcpy(again, sorted + i * size, size);
        found = 1;
      }
  }
  free(sorted);
  return found;
}

static int by_u64(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static int by_model(const void *x, const void *y) {
  const kvrelay_topology_entry *const a = x, *const b = y;
  const int order = kvrelay_text_compare(a->canonical_model_id, b->canonical_model_id);
  return order != 0 ? order : kvrelay_text_compare(a->namespace_, b->namespace_);
}

/* The producers are valid, so no other field can differ. */
static int by_producer(const void *x, const void *y) {
  const kvrelay_producer *const a = &((const kvrelay_load_entry *)x)->producer;
  const kvrelay_producer *const b = &((const kvrelay_load_entry *)y)->producer;
  int order = kvrelay_pool_id_compare(&a->pool_id, &b->pool_id);
  if (order == 0)
    order = by_u64(a->producer_incarnation, b->producer_incarnation);
  if (order == 0)
    order = by_u64(a->layout_generation, b->layout_generation);
  if (order == 0)
    order = by_u64(a->ckf_format.seed, b->ckf_format.seed);
  return order != 0 ? order : by_u64(a->ckf_format.bucket_count, b->ckf_format.bucket_count);
}

static int catalog_rules(trial *t, const kvrelay_catalog_update *m) {
  char text[128], name[KVRELAY_POOL_NAME_CAP];
  if (!m->snapshot_present)
    return trial_fail(t, "the catalog has no snapshot");
  for (size_t i = 0; i < m->pools_len; i++) {
    const kvrelay_verdict v = kvrelay_check_descriptor(&m->pools[i]);
    if (v.class_ != KVRELAY_CLASS_OK)
      return trial_fail(t, "pool %zu of the catalog: %s", i, verdict_text(&v, text));
    if (i != 0 && kvrelay_pool_id_compare(&m->pools[i - 1].producer.pool_id,
                                          &m->pools[i].producer.pool_id) >= 0) {
      kvrelay_pool_id_format(&m->pools[i].producer.pool_id, name);
      return trial_fail(t, "pool %zu, %s, is not behind the one before it", i, name);
    }
  }
  return TRIAL_PASSED;
}

/* A list of what the pools are called, to keep while another message is decoded. */
static kvrelay_producer *keys_of(const kvrelay_catalog_update *m) {
  kvrelay_producer *keys = calloc(m->pools_len + 1, sizeof *keys);
  for (size_t i = 0; keys != NULL && i < m->pools_len; i++)
    keys[i] = m->pools[i].producer;
  return keys;
}

static int second_catalog(trial *t, uint64_t revision, const kvrelay_producer *keys, size_t len) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_WATCH_CATALOG);
  kvrelay_catalog_update m;
  TRY(trial_first(t, &q, &m));
  if (m.revision < revision)
    return trial_fail(t, "a later catalog has revision %" PRIu64 ", an earlier one %" PRIu64,
                      m.revision, revision);
  if (m.revision != revision)
    return TRIAL_PASSED; /* it changed between */
  bool same = m.pools_len == len;
  for (size_t i = 0; same && i < len; i++)
    same = kvrelay_producer_equal(&m.pools[i].producer, &keys[i]);
  return same ? TRIAL_PASSED
              : trial_fail(t, "two catalogs of revision %" PRIu64 " differ", revision);
}

static int catalogs(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_WATCH_CATALOG);
  kvrelay_catalog_update m;
  TRY(trial_first(t, &q, &m));
  TRY(catalog_rules(t, &m));
  kvrelay_producer *keys = keys_of(&m);
  const int verdict = keys == NULL
                          ? trial_skip(t, "no memory here for the keys of %zu pools", m.pools_len)
                          : second_catalog(t, m.revision, keys, m.pools_len);
  free(keys);
  return verdict;
}

static int readiness_rules(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_SUBSCRIBE_READINESS);
  kvrelay_readiness_update m;
  char text[128], name[512];
  TRY(offered(t, q.method));
  TRY(trial_first(t, &q, &m));
  for (size_t i = 0; i < m.entries_len; i++) {
    const kvrelay_topology_entry *e = &m.entries[i];
    const kvrelay_verdict v = kvrelay_check_topology_entry(e);
    if (v.class_ != KVRELAY_CLASS_OK)
      return trial_fail(t, "the entry of %s: %s", printable(e->canonical_model_id, name),
                        verdict_text(&v, text));
  }
  kvrelay_topology_entry again;
  const int twice = find_twice(m.entries, m.entries_len, sizeof again, by_model, &again);
  if (twice < 0)
    return trial_skip(t, "no memory here to compare %zu entries", m.entries_len);
  return twice == 0 ? TRIAL_PASSED
                    : trial_fail(t, "two entries of %s", printable(again.canonical_model_id, name));
}

static int by_pool_id(const void *id, const void *key) {
  return kvrelay_pool_id_compare(id, &((const kvrelay_producer *)key)->pool_id);
}

static int links_lead_to(trial *t, const kvrelay_producer *keys, size_t len) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_SUBSCRIBE_READINESS);
  kvrelay_readiness_update m;
  char name[KVRELAY_POOL_NAME_CAP], endpoint[512];
  size_t links = 0;
  TRY(trial_first(t, &q, &m));
  for (size_t i = 0; i < m.entries_len; i++)
    for (size_t k = 0; k < m.entries[i].members_len; k++) {
      const kvrelay_topology_member *member = &m.entries[i].members[k];
      if (!member->pool_id.present)
        continue;
      links++;
      if (bsearch(&member->pool_id, keys, len, sizeof *keys, by_pool_id) == NULL) {
        kvrelay_pool_id_format(&member->pool_id, name);
        (void)trial_fail(t, "%s is linked to pool %s, which the catalog does not have",
                         endpoint_name(&member->endpoint, endpoint), name);
        return TRIAL_AGAIN; /* it may have come between the two messages */
      }
    }
  return links != 0 ? TRIAL_PASSED : trial_skip(t, "no member is linked to a pool");
}

static int links(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_WATCH_CATALOG);
  kvrelay_catalog_update m;
  TRY(offered(t, KVRELAY_METHOD_SUBSCRIBE_READINESS));
  TRY(trial_first(t, &q, &m));
  TRY(catalog_rules(t, &m)); /* sorted, and all fields there */
  kvrelay_producer *keys = keys_of(&m);
  const int verdict = keys == NULL
                          ? trial_skip(t, "no memory here for the keys of %zu pools", m.pools_len)
                          : links_lead_to(t, keys, m.pools_len);
  free(keys);
  return verdict;
}

static int window_rules(trial *t, const kvrelay_load_update *m) {
  char text[128], name[KVRELAY_POOL_NAME_CAP];
  if (m->window_ms == 0)
    return trial_fail(t, "window %" PRIu64 " has no length", m->window_sequence);
  for (size_t i = 0; i < m->pools_len; i++) {
    const kvrelay_load_entry *e = &m->pools[i];
    const kvrelay_verdict v = kvrelay_check_producer(&e->producer);
    if (v.class_ != KVRELAY_CLASS_OK)
      return trial_fail(t, "pool %zu of window %" PRIu64 ": %s", i, m->window_sequence,
                        verdict_text(&v, text));
    if (e->kv_observed_ranks > e->kv_expected_ranks)
      return trial_fail(t, "pool %zu of window %" PRIu64 ": %" PRIu32 " of %" PRIu32 " ranks", i,
                        m->window_sequence, e->kv_observed_ranks, e->kv_expected_ranks);
  }
  kvrelay_load_entry again;
  const int twice = find_twice(m->pools, m->pools_len, sizeof again, by_producer, &again);
  if (twice < 0)
    return trial_skip(t, "no memory here to compare %zu pools", m->pools_len);
  if (twice == 0)
    return TRIAL_PASSED;
  kvrelay_pool_id_format(&again.producer.pool_id, name);
  return trial_fail(t, "pool %s is twice in window %" PRIu64, name, m->window_sequence);
}

static int load_windows(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  kvrelay_load_update m;
  TRY(offered(t, q.method));
  const uint32_t call = trial_call(t, &q);
  TRY(trial_message(t, call, q.method, &m));
  TRY(window_rules(t, &m));
  for (int i = 0; i < 2; i++) {
    const uint64_t before = m.window_sequence;
    if (m.window_ms > probe_left_ns(&t->p, t->until_ns) / 2000000u)
      return trial_skip(t, "windows of %" PRIu64 " ms are too long for %g s", m.window_ms,
                        t->o->timeout_s);
    TRY(trial_message(t, call, q.method, &m));
    TRY(window_rules(t, &m));
    if (m.window_sequence <= before)
      return trial_fail(t, "window %" PRIu64 " came behind window %" PRIu64, m.window_sequence,
                        before);
  }
  return TRIAL_PASSED;
}

static int all_at_once(trial *t) {
  uint32_t calls[STREAMS] = {0};
  const int pool = trial_pool(t);
  if (pool == TRIAL_FAILED)
    return pool;
  for (size_t i = 0; i < STREAMS; i++) {
    const kvrelay_request q = trial_request(t, streams[i]);
    if (streams[i] == KVRELAY_METHOD_SUBSCRIBE_POOL ? pool == TRIAL_PASSED
                                                    : offered(t, streams[i]) == TRIAL_PASSED)
      calls[i] = trial_call(t, &q);
  }
  for (size_t i = 0; i < STREAMS; i++)
    if (calls[i] != 0)
      TRY(trial_message(t, calls[i], streams[i], NULL));
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_GET_RELAY_INFO);
  return trial_first(t, &q, NULL);
}

const scenario scenarios[] = {
    {"T1", "GetRelayInfo: one message with version, marker and relay, then OK",
     info_is_one_message},
    {"T2", "a snapshot comes whole, chunk behind chunk, all of one cut", snapshot_chunks},
    {"T5", "wrong pool keys have their own status and reason; the right one works after",
     refusals_of_pools},
    {"T7", "a subscriber id has 1 to 128 bytes and no control character", subscriber_ids},
    {"W2", "a wrong marker is refused by every call, before all else", wrong_markers},
    {"W8", "readiness: every entry is valid, no model twice", readiness_rules},
    {"W10", "an unknown field in a request is ignored", unknown_fields},
    {"W12", "load: windows count up, every pool in them is valid, none twice", load_windows},
    {"W13", "methods that do not exist, serving load among them, are UNIMPLEMENTED",
     unknown_methods},
    {"H1", "behind the snapshot deltas and heartbeats continue its sequence",
     frames_behind_a_snapshot},
    {"H8", "two subscribers of one pool hold the same filter", two_subscribers},
    {"H14", "streams may be cancelled at any moment, and subscribed again", cancelled_streams},
    {"I3", "the catalog is valid, in order, and the same for everybody", catalogs},
    {"I8", "members are linked to pools that the catalog has", links},
    {"X7", "calls of all kinds share one connection", all_at_once},
    {"X9", "a request that does not decode is INTERNAL, without reason, also with a wrong marker",
     undecodable},
    {NULL, NULL, NULL}};
