/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recorded streams of real engines end in the state that an independent program computed: canonical
 * keys, engine hashes with their copies, depth of every prompt, and what was counted; and in the
 * same state when batches are lost and come by replay, as the engine answered and with every fault.
 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>

#include "../vectors/vectors.h"
#include "test_source.h"
#include "tools/common/trace.h"

#define FOLDER "tests/data/engines/"
#define RECORDINGS_MAX 64

typedef struct recording {
  char name[64];
} recording;

static json_t *load(const char *name, const char *end) {
  char path[160];
  json_error_t error;
  snprintf(path, sizeof path, FOLDER "%s%s", name, end);
  json_t *root = json_load_file(path, 0, &error);
  cr_assert_not_null(root, "%s: %s", path, error.text);
  return root;
}

typedef struct message {
  uint64_t sequence;
  const uint8_t *payload;
  size_t len;
} message;

enum { MESSAGES_MAX = 64, MEMORY = 1 << 20 };
#define MARKER UINT64_MAX

/* A stream in memory: what came live, and all answers to requests, each with its marker. */
typedef struct stream {
  message live[MESSAGES_MAX], answer[MESSAGES_MAX];
  size_t live_len, answer_len, used;
  uint8_t bytes[MEMORY];
} stream;

static uint64_t big_endian(const uint8_t *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++)
    value = value << 8 | bytes[i];
  return value;
}

static stream *stream_of(const char *name) {
  char path[160], why[128] = "";
  trace t;
  trace_record r;
  int more;
  stream *all = calloc(1, sizeof *all);
  snprintf(path, sizeof path, FOLDER "%s.trace", name);
  cr_assert_eq(trace_open(&t, path), 0, "%s", path);
  while ((more = trace_next(&t, &r, why)) == 1) {
    bool live = r.kind == TRACE_LIVE;
    cr_assert(live ? r.frames_len == 3 : r.frames_len >= 2 && r.frames_len <= 4);
    cr_assert_eq(r.frame_len[r.frames_len - 2], 8);
    cr_assert(all->live_len < MESSAGES_MAX && all->answer_len < MESSAGES_MAX);
    message *m = live ? &all->live[all->live_len++] : &all->answer[all->answer_len++];
    m->sequence = big_endian(r.frame[r.frames_len - 2]);
    m->payload = all->bytes + all->used;
    m->len = r.frame_len[r.frames_len - 1];
    cr_assert_leq(m->len, MEMORY - all->used);
    memcpy(all->bytes + all->used, r.frame[r.frames_len - 1], m->len);
    all->used += m->len;
  }
  cr_assert_eq(more, 0, "%s: %s", path, why);
  trace_close(&t);
  return all;
}

/* ---- running ---- */

static void feed_live(feeder *f, const message *m) {
  cr_assert_eq(
      kvrelay_engine_feed(&f->decoder, &f->source, m->sequence, m->payload, m->len, m->sequence),
      KVRELAY_OK);
  cr_assert_eq(ckf_producer_check_(f->producer), CKF_OK);
}

static void feed_reply(feeder *f, const message *m) {
  cr_assert_eq(kvrelay_source_reply(&f->source, m->sequence, m->payload, m->len, 0), KVRELAY_OK);
  cr_assert_eq(kvrelay_engine_drain(&f->decoder, &f->source, 0), KVRELAY_OK);
}

/* Answers from the live messages until nothing more is asked; the first answer lacks those of
 * [lost_first, lost_last]. */
static void serve(feeder *f, const stream *all, uint64_t lost_first, uint64_t lost_last) {
  static const message marker = {MARKER, NULL, 0};
  uint64_t from;
  for (int requests = 0; kvrelay_source_request(&f->source, &from) == 1; requests++) {
    cr_assert_lt(requests, 10);
    for (size_t i = 0; i < all->live_len; i++)
      if (all->live[i].sequence >= from && (requests != 0 || all->live[i].sequence < lost_first ||
                                            all->live[i].sequence > lost_last))
        feed_reply(f, &all->live[i]);
    feed_reply(f, &marker);
  }
}

/* ---- what must come out ---- */

static int by_value(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

/* Canonical keys of a rank, each once, ascending. */
static size_t live_keys(const feeder *f, uint32_t rank, uint64_t *out, size_t cap) {
  ckf_member member = {f->cfg.worker_id, rank};
  ckf_mapping m;
  size_t n = 0, kept = 0;
  for (uint32_t at = 0; ckf_producer_mapping_next(f->producer, &member, &at, &m) == 1;) {
    cr_assert_lt(n, cap);
    out[n++] = m.canonical;
  }
  qsort(out, n, sizeof *out, by_value);
  for (size_t i = 0; i < n; i++)
    if (i == 0 || out[i] != out[i - 1])
      out[kept++] = out[i];
  return kept;
}

static void check_live(const feeder *f, const char *name, uint32_t rank, const json_t *expected) {
  uint64_t got[1024];
  size_t want_len, got_len = live_keys(f, rank, got, 1024);
  uint64_t *want = vec_u64s(vec_get(expected, "live"), &want_len);
  qsort(want, want_len, sizeof *want, by_value);
  cr_assert_eq(got_len, want_len, "%s: %zu keys, wanted %zu", name, got_len, want_len);
  for (size_t i = 0; i < want_len; i++)
    cr_assert_eq(got[i], want[i], "%s: key %zu is %" PRIu64 ", wanted %" PRIu64, name, i, got[i],
                 want[i]);
  free(want);
}

/* Copies cannot be read out, but taken away: the last removal, and no earlier one, ends a mapping.
 */
static void check_externals(feeder *f, const char *name, uint32_t rank, const json_t *expected) {
  const char *key;
  json_t *value;
  ckf_member member = {f->cfg.worker_id, rank};
  json_t *externals = vec_get(expected, "externals");
  cr_assert_eq(blocks_of(f, rank), json_object_size(externals), "%s", name);
  uint64_t before = counted(f, KVRELAY_COUNT_UNKNOWN_REMOVAL);
  json_object_foreach (externals, key, value) {
    uint64_t external = strtoull(key, NULL, 10), canonical,
             copies = vec_u64(vec_get(value, "copies"));
    for (uint64_t copy = 0; copy < copies; copy++) {
      cr_assert_eq(ckf_producer_find(f->producer, &member, external, &canonical, NULL), 1,
                   "%s: %s, copy %" PRIu64, name, key, copy);
      cr_assert_eq(canonical, vec_u64(vec_get(value, "canonical")), "%s: %s", name, key);
      kvrelay_engine_event ev;
      memset(&ev, 0, sizeof ev);
      ev.type = KVRELAY_ENGINE_REMOVED;
      ev.externals = &external;
      ev.externals_len = 1;
      cr_assert_eq(kvrelay_source_event(&f->source, true, rank, &ev, 0), KVRELAY_OK);
    }
  }
  cr_assert_eq(blocks_of(f, rank), 0, "%s: as many copies as expected", name);
  cr_assert_eq(counted(f, KVRELAY_COUNT_UNKNOWN_REMOVAL), before);
}

/* Prompt of an operation: numbers and runs. */
static size_t prompt_of(const json_t *operation, uint32_t *out, size_t cap) {
  size_t i, n = 0;
  json_t *item;
  json_array_foreach (vec_get(operation, "tokens"), i, item) {
    const json_t *range = json_object_get(item, "range");
    uint64_t first = vec_u64(range ? json_array_get(range, 0) : item),
             last = vec_u64(range ? json_array_get(range, 1) : item);
    for (uint64_t token = first; token <= last; token++) {
      cr_assert_lt(n, cap);
      out[n++] = (uint32_t)token;
    }
  }
  return n;
}

static void check_queries(const feeder *f, const char *name, uint32_t rank, const json_t *root) {
  size_t i;
  json_t *query;
  char rank_text[16];
  snprintf(rank_text, sizeof rank_text, "%" PRIu32, rank);
  json_array_foreach (vec_get(vec_get(root, "expected"), "queries"), i, query) {
    uint32_t tokens[4096];
    size_t len = prompt_of(
        json_array_get(vec_get(root, "operations"), vec_u64(vec_get(query, "op"))), tokens, 4096);
    const json_t *want = json_object_get(vec_get(query, "depth"), rank_text);
    cr_assert_eq(hashfmt_block_count(f->cfg.hash_format, f->cfg.block_size, len),
                 vec_u64(vec_get(query, "complete_blocks")), "%s: %zu", name, i);
    if (want == NULL)
      continue;
    size_t got = depth_of(f, tokens, len, json_string_value(vec_get(query, "lora")),
                          json_string_value(vec_get(query, "namespace")));
    cr_assert_eq(got, vec_u64(want), "%s: depth of query %zu is %zu, wanted %" PRIu64, name, i, got,
                 vec_u64(want));
  }
}

/* Our number for a name of the program that made the file; -1: it has no counterpart here. */
static int64_t counter(const feeder *f, const char *key) {
  const kvrelay_source_stats *st = kvrelay_source_stats_get(&f->source);
  const uint64_t *c = st->counts;
  if (strcmp(key, "BlockStored") == 0)
    return (int64_t)st->stored;
  if (strcmp(key, "BlockRemoved") == 0)
    return (int64_t)st->removed;
  if (strcmp(key, "AllBlocksCleared") == 0)
    return (int64_t)st->cleared;
  if (strcmp(key, "map_events") == 0 || strcmp(key, "positional_events") == 0)
    return (int64_t)(st->stored + st->removed + st->cleared + st->tier_cleared);
  if (strcmp(key, "unlearned_group") == 0)
    return (int64_t)c[KVRELAY_COUNT_UNLEARNED_GROUP_IDX];
  if (strcmp(key, "untagged_extra_string") == 0)
    return (int64_t)c[KVRELAY_COUNT_SALT_UNTAGGED];
  /* That program has no counters for owners, and takes the digest of an embedding for one more key
   * to ignore. */
  if (strcmp(key, "other_tier") == 0)
    return (int64_t)(c[KVRELAY_COUNT_OTHER_TIER] + c[KVRELAY_COUNT_UNSUPPORTED_OWNERSHIP] +
                     c[KVRELAY_COUNT_UNKNOWN_OWNERSHIP]);
  if (strcmp(key, "extra_key_ignored") == 0)
    return (int64_t)(c[KVRELAY_COUNT_EXTRA_KEY_IGNORED] + c[KVRELAY_COUNT_EMBEDDED_PROMPT]);
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    if (strcmp(key, kvrelay_count_name(i)) == 0)
      return (int64_t)c[i];
  return -1;
}

static void check_counted(const feeder *f, const char *name, const json_t *expected) {
  const char *key;
  json_t *value, *all = vec_get(expected, "counted");
  uint64_t non_main = 0;
  json_object_foreach (all, key, value) {
    int64_t got = counter(f, key);
    if (strncmp(key, "non_main_", 9) == 0)
      non_main += vec_u64(value);
    else if (got >= 0)
      cr_assert_eq((uint64_t)got, vec_u64(value), "%s: %s is %" PRIi64 ", wanted %" PRIu64, name,
                   key, got, vec_u64(value));
    else /* copies, pairs, objects and maps are seen in the state instead */
      cr_assert(strcmp(key, "extra_copies") == 0 || strcmp(key, "pairs") == 0 ||
                    strcmp(key, "mm_objects") == 0 || strcmp(key, "metadata_map") == 0,
                "%s: nobody looks at %s", name, key);
  }
  cr_assert_eq(counted(f, KVRELAY_COUNT_NON_MAIN_ATTENTION_KIND) +
                   counted(f, KVRELAY_COUNT_NON_MAIN_ATTENTION_GROUP),
               non_main, "%s", name);
  /* And nothing else was dropped. */
  static const struct {
    int count;
    const char *key;
  } others[] = {{KVRELAY_COUNT_NON_MAIN_ATTENTION_KIND, NULL},
                {KVRELAY_COUNT_NON_MAIN_ATTENTION_GROUP, NULL},
                {KVRELAY_COUNT_UNLEARNED_GROUP_IDX, "unlearned_group"},
                {KVRELAY_COUNT_SALT_UNTAGGED, "untagged_extra_string"},
                {KVRELAY_COUNT_UNSUPPORTED_OWNERSHIP, "other_tier"},
                {KVRELAY_COUNT_UNKNOWN_OWNERSHIP, "other_tier"}};
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++) {
    bool checked = json_object_get(all, kvrelay_count_name(i)) != NULL;
    for (size_t j = 0; j < sizeof others / sizeof others[0]; j++)
      checked = checked || (others[j].count == i &&
                            (others[j].key == NULL || json_object_get(all, others[j].key) != NULL));
    cr_assert(checked || counted(f, i) == 0, "%s: %s counted %" PRIu64 " times", name,
              kvrelay_count_name(i), counted(f, i));
  }
}

static struct criterion_test_params all_recordings(void) {
  static recording all[RECORDINGS_MAX];
  size_t n = 0;
  DIR *folder = opendir(FOLDER);
  for (struct dirent *entry;
       folder != NULL && (entry = readdir(folder)) != NULL && n < RECORDINGS_MAX;) {
    size_t len = strlen(entry->d_name);
    if (len > 6 && len < sizeof all[0].name && strcmp(entry->d_name + len - 6, ".trace") == 0)
      snprintf(all[n++].name, sizeof all[0].name, "%.*s", (int)len - 6, entry->d_name);
  }
  if (folder != NULL)
    closedir(folder);
  return cr_make_param_array(recording, all, n);
}

static feeder *feeder_of(const json_t *root, bool replay) {
  kvrelay_source_config cfg = kvrelay_source_config_default();
  cfg.worker_id = 1;
  cfg.ranks = 2;
  cfg.block_size = (uint32_t)vec_u64(vec_get(root, "block_size"));
  cfg.hash_format = strcmp(vec_str(vec_get(root, "hash_format")), "DYNAMO_EAGLE_V1") == 0
                        ? HASHFMT_FORMAT_EAGLE
                        : HASHFMT_FORMAT_STANDARD;
  cfg.replay = replay;
  cfg.hold_batches = MESSAGES_MAX;
  cfg.hold_bytes = MEMORY;
  cfg.partial_memory = 1024;
  cfg.max_event_blocks = 4096;
  return feeder_new(&cfg, 1024, NULL);
}

ParameterizedTestParameters(recordings, end_state) { return all_recordings(); }

ParameterizedTest(recording *r, recordings, end_state) {
  json_t *root = load(r->name, ".json"), *value;
  const char *key;
  json_t *ranks = vec_get(vec_get(root, "expected"), "ranks");
  feeder *f = feeder_of(root, false);
  stream *all = stream_of(r->name);
  for (size_t i = 0; i < all->live_len; i++)
    feed_live(f, &all->live[i]);
  cr_assert_eq(all->live_len, vec_u64(vec_get(root, "live_messages")));
  cr_assert_eq(all->answer_len, vec_u64(vec_get(root, "replay_messages")));
  for (size_t i = 0; i < all->answer_len; i++) { /* what comes again is what came */
    const message *a = &all->answer[i];
    if (a->sequence == MARKER)
      continue;
    cr_assert_lt(a->sequence, all->live_len);
    const message *m = &all->live[a->sequence];
    cr_assert(m->sequence == a->sequence && m->len == a->len &&
              memcmp(m->payload, a->payload, a->len) == 0);
  }
  cr_assert_eq(json_object_size(ranks), 1);
  json_object_foreach (ranks, key, value) {
    uint32_t rank = (uint32_t)strtoul(key, NULL, 10);
    check_live(f, r->name, rank, value);
    check_queries(f, r->name, rank, root);
    check_counted(f, r->name, value);
    cr_assert(kvrelay_source_complete(&f->source, rank), "%s was recorded from its beginning",
              r->name);
    cr_assert_eq(blocks_of(f, 1 - rank), 0);
    check_externals(f, r->name, rank, value);
  }
  feeder_free(f);
  free(all);
  json_decref(root);
}

/* The same state as without any fault; each batch was applied once, and nothing was lost. */
static void check_same(feeder *f, const char *name, const json_t *root, size_t batches) {
  json_t *value, *ranks = vec_get(vec_get(root, "expected"), "ranks");
  const char *key;
  cr_assert_eq(kvrelay_source_stats_get(&f->source)->batches, batches, "%s", name);
  cr_assert_eq(counted(f, KVRELAY_COUNT_LOSS), 0, "%s", name);
  cr_assert_eq(counted(f, KVRELAY_COUNT_RESTART), 0, "%s", name);
  json_object_foreach (ranks, key, value) {
    uint32_t rank = (uint32_t)strtoul(key, NULL, 10);
    check_live(f, name, rank, value);
    check_queries(f, name, rank, root);
    cr_assert(kvrelay_source_complete(&f->source, rank), "%s", name);
    check_externals(f, name, rank, value);
  }
  feeder_free(f);
}

/* A source whose engine has published nothing yet. */
static feeder *attached(const json_t *root) {
  static const message marker = {MARKER, NULL, 0};
  uint64_t from;
  feeder *f = feeder_of(root, true);
  cr_assert_eq(kvrelay_source_request(&f->source, &from), 1);
  cr_assert_eq(from, 0);
  feed_reply(f, &marker);
  return f;
}

ParameterizedTestParameters(recordings, every_batch_lost_in_turn) { return all_recordings(); }

ParameterizedTest(recording *r, recordings, every_batch_lost_in_turn) {
  json_t *root = load(r->name, ".json");
  stream *all = stream_of(r->name);
  for (size_t lost = 0; lost < all->live_len; lost++) {
    feeder *f = attached(root);
    for (size_t i = 0; i < all->live_len; i++)
      if (i != lost) {
        feed_live(f, &all->live[i]);
        serve(f, all, 1, 0);
      }
    /* Nothing follows the last one: a reconnect brings it, as would the next batch. */
    if (lost + 1 == all->live_len) {
      cr_assert_eq(kvrelay_source_connection(&f->source, true, 0), KVRELAY_OK);
      serve(f, all, 1, 0);
    } else {
      cr_assert_eq(counted(f, KVRELAY_COUNT_GAP), lost == 0 ? 0 : 1);
    }
    check_same(f, r->name, root, all->live_len);
  }
  free(all);
  json_decref(root);
}

ParameterizedTestParameters(recordings, replies_lost_in_the_middle) { return all_recordings(); }

ParameterizedTest(recording *r, recordings, replies_lost_in_the_middle) {
  json_t *root = load(r->name, ".json");
  stream *all = stream_of(r->name);
  for (uint64_t first = 1; first < all->live_len; first++)
    for (uint64_t last = first; last < all->live_len; last++) {
      feeder *f = feeder_of(root, true);
      serve(f, all, first, last);
      feed_live(f, &all->live[all->live_len - 1]);
      serve(f, all, 1, 0);
      check_same(f, r->name, root, all->live_len);
    }
  free(all);
  json_decref(root);
}

ParameterizedTestParameters(recordings, answers_of_the_engine) { return all_recordings(); }

/* Each recorded answer in the place where it helps: all live batches that it repeats are lost. */
ParameterizedTest(recording *r, recordings, answers_of_the_engine) {
  json_t *root = load(r->name, ".json");
  stream *all = stream_of(r->name);
  const message *newest = &all->live[all->live_len - 1];
  for (size_t at = 0, end; at < all->answer_len; at = end + 1) {
    for (end = at; all->answer[end].sequence != MARKER; end++)
      cr_assert_lt(end + 1, all->answer_len, "%s: an answer without an end", r->name);
    if (all->answer[at].sequence == newest->sequence)
      continue; /* with nothing behind it nobody asks for it */
    uint64_t from, first = all->answer[at].sequence;
    bool late = newest->sequence > all->answer[end == at ? at : end - 1].sequence;
    feeder *f = first == 0 ? feeder_of(root, true) : attached(root);
    for (size_t i = 0; i < all->live_len && all->live[i].sequence < first; i++)
      feed_live(f, &all->live[i]);
    if (first != 0 && first != MARKER)
      feed_live(f, newest);
    if (first == MARKER) { /* nothing is missing, nothing is asked */
      cr_assert_eq(kvrelay_source_request(&f->source, &from), 0);
    } else {
      cr_assert_eq(kvrelay_source_request(&f->source, &from), 1, "%s", r->name);
      cr_assert_eq(from, first, "%s", r->name);
    }
    for (size_t i = at; i <= end; i++)
      feed_reply(f, &all->answer[i]);
    if (late && first == 0)
      feed_live(f, newest);
    cr_assert_eq(kvrelay_source_request(&f->source, &from), 0, "%s", r->name);
    check_same(f, r->name, root, all->live_len);
  }
  free(all);
  json_decref(root);
}

/* A parameterised test over an empty folder would pass. */
Test(recordings, are_all_there) {
  static const char *const families[] = {
      "vllm0.19.1_plain",     "vllm0.21.0_hybrid", "vllm0.23.0_evict",  "vllm0.32.0_copies",
      "vllm0.32.0_dp2_rank1", "vllm0.32.0_salt",   "sglang0.5.9_plain", "sglang0.5.23_eagle"};
  for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
    json_decref(load(families[i], ".json"));
  DIR *folder = opendir(FOLDER);
  size_t n = 0;
  cr_assert_not_null(folder);
  for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
    n += strstr(entry->d_name, ".trace") != NULL;
  closedir(folder);
  cr_assert_eq(n, 28);
}
