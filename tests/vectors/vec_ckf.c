/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kinds of ckf.json. Digests come from libxxhash, not from the code under test. What a vector says
 * of the reference search is held against tests/support/reference_search.c, and the contract of all
 * searches against ours.
 */

#include "../support/reference_search.h"
#include "vectors.h"

#define CKF_STATIC /* the vectors of XXH3 need the private part */
#include "ckf.h"
#define CKF_INGEST_STATIC
#include "ckf_ingest.h"
#include "hashfmt.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define ENSURE(CONDITION, ...)                                                                     \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return vec_fail(why, why_cap, __VA_ARGS__);                                                  \
  } while (0)

/* Wrapped by a function per type of expectation, so that a failure names its step. */
#define ENSURE_U64(WHAT, GOT, WANT)                                                                \
  do {                                                                                             \
    const uint64_t got_ = (GOT), want_ = vec_u64(WANT);                                            \
    ENSURE(got_ == want_, "%s is 0x%" PRIx64 ", wanted 0x%" PRIx64, (WHAT), got_, want_);          \
  } while (0)

#define ENSURE_ERROR(RC, WANT)                                                                     \
  do {                                                                                             \
    const json_t *const error_ = (WANT);                                                           \
    const char *const want_ = json_is_null(error_) ? "" : vec_str(error_);                         \
    ENSURE(strcmp(ckf_errname((RC) < 0 ? (RC) : 0), want_) == 0, "error \"%s\", wanted \"%s\"",    \
           ckf_errname((RC) < 0 ? (RC) : 0), want_);                                               \
  } while (0)

/* ---- memory of the running vector, released when the next one starts ---- */

static void **owned;
static size_t owned_len, owned_cap;

static void release(void) {
  while (owned_len > 0)
    free(owned[--owned_len]);
  free(owned);
  owned = NULL;
  owned_cap = 0;
}

static void *own(void *memory) {
  if (!memory)
    abort();
  if (owned_len == owned_cap) {
    owned_cap = owned_cap ? owned_cap * 2 : 16;
    owned = realloc(owned, owned_cap * sizeof *owned);
    if (!owned)
      abort();
  }
  owned[owned_len++] = memory;
  return memory;
}

static void *take(size_t count, size_t size) { return own(calloc(count ? count : 1, size)); }

static uint64_t *numbers(const json_t *array, size_t *len) { return own(vec_u64s(array, len)); }

static uint8_t *bytes(const json_t *hex, size_t *len) { return own(vec_hex(hex, len)); }

/* ---- small readers ---- */

static uint64_t member_u64(const json_t *object, const char *name) {
  return vec_u64(vec_get(object, name));
}

static ckf_format read_format(const json_t *object) {
  ckf_format format = {member_u64(object, "seed"), member_u64(object, "buckets")};
  return format;
}

static ckf_image *read_images(const json_t *array, size_t *len) {
  *len = json_array_size(array);
  ckf_image *images = take(*len, sizeof *images);
  for (size_t i = 0; i < *len; i++) {
    const json_t *pair = json_array_get(array, i);
    images[i].bucket = (uint32_t)vec_u64(json_array_get(pair, 0));
    images[i].word = vec_u64(json_array_get(pair, 1));
  }
  return images;
}

/* ---- numbers as they are sent and hashed, lowest byte first on every machine ---- */

static uint8_t *put_le(uint8_t *to, uint64_t value, size_t len) {
  for (size_t i = 0; i < len; i++)
    *to++ = (uint8_t)(value >> 8 * i);
  return to;
}

static uint64_t get_le(const uint8_t *from, size_t len) {
  uint64_t value = 0;
  while (len > 0)
    value = value << 8 | from[--len];
  return value;
}

static bool words_lie_as_sent(void) {
  const uint64_t one = 1;
  uint8_t lowest;
  memcpy(&lowest, &one, 1);
  return lowest == 1;
}

static uint64_t digest(const uint64_t *words, uint64_t count) {
  XXH3_state_t *hash = XXH3_createState();
  uint8_t bytes_of[8192];
  XXH3_64bits_reset(hash);
  for (uint64_t i = 0; i < count;) {
    uint8_t *end = bytes_of;
    for (; i < count && end < bytes_of + sizeof bytes_of; i++)
      end = put_le(end, words[i], 8);
    XXH3_64bits_update(hash, bytes_of, (size_t)(end - bytes_of));
  }
  const uint64_t result = XXH3_64bits_digest(hash);
  XXH3_freeState(hash);
  return result;
}

static int by_bucket(const void *x, const void *y) {
  const uint32_t a = ((const ckf_image *)x)->bucket, b = ((const ckf_image *)y)->bucket;
  return (a > b) - (a < b);
}

/* Compares images, which may be sorted for it, with [[bucket, word], …] or null. */
static int expect_images(ckf_image *got, size_t got_len, const json_t *want, bool any_order,
                         char *why, size_t why_cap) {
  size_t want_len = 0;
  if (json_is_null(want)) {
    ENSURE(got_len == 0, "a batch of %zu, wanted none", got_len);
    return VEC_PASSED;
  }
  ckf_image *expected = read_images(want, &want_len);
  ENSURE(got_len == want_len, "%zu images, wanted %zu", got_len, want_len);
  if (any_order) {
    qsort(got, got_len, sizeof *got, by_bucket);
    qsort(expected, want_len, sizeof *expected, by_bucket);
  }
  for (size_t i = 0; i < got_len; i++)
    ENSURE(got[i].bucket == expected[i].bucket && got[i].word == expected[i].word,
           "image %zu is [%u, 0x%016" PRIx64 "], wanted [%u, 0x%016" PRIx64 "]", i, got[i].bucket,
           got[i].word, expected[i].bucket, expected[i].word);
  return VEC_PASSED;
}

static ckf_image *batch_images(const ckf_batch *batch) {
  ckf_image *images = take(batch->image_count, sizeof *images);
  for (size_t i = 0; i < batch->image_count; i++)
    images[i] = ckf_batch_image(batch, i);
  return images;
}

static int expect_words(const uint64_t *words, const json_t *want, char *why, size_t why_cap) {
  size_t len;
  const uint64_t *expected = numbers(want, &len);
  for (size_t i = 0; i < len; i++)
    ENSURE(words[i] == expected[i], "word %zu is 0x%016" PRIx64 ", wanted 0x%016" PRIx64, i,
           words[i], expected[i]);
  return VEC_PASSED;
}

/* Draws between two generator states: each adds the same odd number. */
static uint64_t draws_between(uint64_t from, uint64_t to) {
  const uint64_t gamma = UINT64_C(0x9E3779B97F4A7C15);
  uint64_t inverse = gamma;
  for (int i = 0; i < 6; i++)
    inverse *= 2 - gamma * inverse;
  return (to - from) * inverse;
}

/* ---- configuration, hashes, addressing ---- */

static ckf_config read_config(const json_t *object) {
  ckf_config cfg = ckf_config_default();
  const json_t *value;
  if ((value = json_object_get(object, "expected_blocks")))
    cfg.expected_blocks = vec_u64(value);
  if ((value = json_object_get(object, "max_kicks")))
    cfg.max_kicks = (uint32_t)vec_u64(value);
  if ((value = json_object_get(object, "window")))
    cfg.verification_window = (uint32_t)vec_u64(value);
  if ((value = json_object_get(object, "publish_every")))
    cfg.publish_every_n_events = vec_u64(value);
  if ((value = json_object_get(object, "seed")))
    cfg.seed = vec_u64(value);
  return cfg;
}

static int run_bucket_count(const json_t *vector, char *why, size_t why_cap) {
  const ckf_config cfg = read_config(vec_get(vector, "input"));
  const json_t *expected = vec_get(vector, "expected");
  const json_t *error = json_object_get(expected, "error");
  uint64_t buckets = 0;
  const int rc = ckf_config_check(&cfg, &buckets);
  if (error && !json_is_null(error)) {
    ENSURE_ERROR(rc, error);
    return VEC_PASSED;
  }
  ENSURE(rc == CKF_OK, "error %s", ckf_errname(rc));
  ENSURE_U64("bucket count", buckets, vec_get(expected, "buckets"));
  return VEC_PASSED;
}

static int run_config(const json_t *vector, char *why, size_t why_cap) {
  const ckf_config cfg = read_config(vec_get(vec_get(vector, "input"), "config"));
  const json_t *expected = vec_get(vector, "expected");
  const json_t *error = json_object_get(expected, "error");
  uint64_t buckets = 0;
  const int rc = ckf_config_check(&cfg, &buckets);
  if (error) {
    ENSURE_ERROR(rc, error);
    return VEC_PASSED;
  }
  ENSURE(rc == CKF_OK, "error %s", ckf_errname(rc));
  ENSURE_U64("bucket count", buckets, vec_get(expected, "buckets"));
  return VEC_PASSED;
}

static int run_filter_format(const json_t *vector, char *why, size_t why_cap) {
  const ckf_format format = {1, member_u64(vec_get(vector, "input"), "buckets")};
  ENSURE_ERROR(ckf_format_check(&format), vec_get(vec_get(vector, "expected"), "error"));
  return VEC_PASSED;
}

static int run_xxh3_64(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  const uint64_t seed = member_u64(input, "seed");
  const json_t *want = vec_get(vec_get(vector, "expected"), "hash");
  size_t len;
  const uint8_t *data = bytes(vec_get(input, "bytes"), &len);
  const uint64_t lo = get_le(data, len < 8 ? len : 8);
  ENSURE_U64("hash", ckf_xxh3_64(data, len, seed), want);
  if (len == 2)
    ENSURE_U64("hash of 2", ckf_xxh3_64_len2((uint16_t)lo, seed), want);
  if (len == 8)
    ENSURE_U64("hash of 8", ckf_xxh3_64_len8(lo, seed), want);
  if (len == 16)
    ENSURE_U64("hash of 16", ckf_xxh3_64_len16(lo, get_le(data + 8, 8), seed), want);
  return VEC_PASSED;
}

static int run_chain(const json_t *vector, char *why, size_t why_cap) {
  size_t len, want_len;
  const uint64_t *local = numbers(vec_get(vec_get(vector, "input"), "local"), &len);
  const uint64_t *want = numbers(vec_get(vec_get(vector, "expected"), "sequence"), &want_len);
  uint64_t canonical = 0;
  ENSURE(len == want_len, "%zu hashes, wanted %zu", len, want_len);
  for (size_t i = 0; i < len; i++) {
    canonical = i == 0 ? local[0] : ckf_child(canonical, local[i]);
    ENSURE(canonical == want[i], "hash %zu is 0x%" PRIx64, i, canonical);
  }
  return VEC_PASSED;
}

static uint64_t salt_of(const json_t *lora, const json_t *name_space) {
  return hashfmt_seed((const uint8_t *)json_string_value(lora), json_string_length(lora),
                      (const uint8_t *)json_string_value(name_space),
                      json_string_length(name_space));
}

static int run_blocks(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  const bool eagle = strcmp(vec_str(vec_get(input, "format")), "DYNAMO_EAGLE_V1") == 0;
  const uint64_t seed = salt_of(vec_get(input, "lora_name"), vec_get(input, "cache_namespace"));
  size_t token_len, want_len, count = 0;
  const uint32_t *tokens = own(vec_u32s(vec_get(input, "tokens"), &token_len));
  const uint64_t *want = numbers(vec_get(expected, "local"), &want_len);
  uint64_t *local = take(want_len, sizeof *local);
  ENSURE_U64("seed", seed, vec_get(expected, "seed"));
  ENSURE(hashfmt_blocks(eagle ? HASHFMT_FORMAT_EAGLE : HASHFMT_FORMAT_STANDARD,
                        (uint32_t)member_u64(input, "block_size"), seed, tokens, token_len, local,
                        NULL, want_len, &count) == HASHFMT_OK,
         "not hashed");
  ENSURE(count == want_len, "%zu blocks, wanted %zu", count, want_len);
  for (size_t i = 0; i < count; i++)
    ENSURE(local[i] == want[i], "local hash %zu is 0x%" PRIx64, i, local[i]);
  return VEC_PASSED;
}

static int run_addressing(const json_t *vector, char *why, size_t why_cap) {
  const ckf_format format = read_format(vec_get(vector, "input"));
  const json_t *entries = vec_get(vec_get(vector, "expected"), "entries");
  size_t len;
  const uint64_t *keys = numbers(vec_get(vec_get(vector, "input"), "keys"), &len);
  ENSURE(len == json_array_size(entries), "%zu entries", json_array_size(entries));
  for (size_t i = 0; i < len; i++) {
    const json_t *entry = json_array_get(entries, i);
    const ckf_probe probe = ckf_probe_make(&format, keys[i]);
    ENSURE_U64("mixed", ckf_mix(&format, keys[i]), vec_get(entry, "mixed"));
    ENSURE_U64("fp", probe.fp, vec_get(entry, "fp"));
    ENSURE_U64("a", probe.a, vec_get(entry, "a"));
    ENSURE_U64("b", probe.b, vec_get(entry, "b"));
  }
  return VEC_PASSED;
}

static int run_delta(const json_t *vector, char *why, size_t why_cap) {
  const ckf_format format = read_format(vec_get(vector, "input"));
  const json_t *entries = vec_get(vec_get(vector, "expected"), "entries");
  size_t len;
  const uint64_t *fps = numbers(vec_get(vec_get(vector, "input"), "fps"), &len);
  ENSURE(len == json_array_size(entries), "%zu entries", json_array_size(entries));
  for (size_t i = 0; i < len; i++) {
    const json_t *entry = json_array_get(entries, i);
    ENSURE_U64("hash",
               ckf_xxh3_64_len2((uint16_t)fps[i], format.seed ^ UINT64_C(0x9E3779B97F4A7C15)),
               vec_get(entry, "hash"));
    ENSURE_U64("delta", ckf_delta(&format, (uint16_t)fps[i]), vec_get(entry, "delta"));
  }
  return VEC_PASSED;
}

static int run_delta_table(const json_t *vector, char *why, size_t why_cap) {
  const ckf_format format = read_format(vec_get(vector, "input"));
  uint8_t *deltas = take(CKF_DELTA_TABLE_LEN, 4);
  uint32_t *bits = take(CKF_DELTA_TABLE_LEN, sizeof *bits);
  ckf_delta_table(format.seed, bits);
  for (uint32_t fp = 1; fp < CKF_DELTA_TABLE_LEN; fp++) {
    const uint32_t delta = ckf_delta(&format, (uint16_t)fp);
    const uint32_t masked = bits[fp] & (uint32_t)(format.bucket_count - 1);
    ENSURE(delta == (masked ? masked : 1), "table entry of %u", fp);
    put_le(deltas + (size_t)fp * 4, delta, 4);
  }
  ENSURE_U64("digest", XXH3_64bits(deltas, CKF_DELTA_TABLE_LEN * 4),
             vec_get(vec_get(vector, "expected"), "digest"));
  return VEC_PASSED;
}

static int run_rng(const json_t *vector, char *why, size_t why_cap) {
  const uint64_t seed = member_u64(vec_get(vector, "input"), "seed");
  const json_t *expected = vec_get(vector, "expected");
  const json_t *states = vec_get(expected, "lane_states"),
               *draws = vec_get(expected, "lane0_draws");
  uint64_t state = ckf_rng_start(seed, 0);
  for (uint32_t lane = 0; lane < 16; lane++)
    ENSURE_U64("lane state", ckf_rng_start(seed, lane), json_array_get(states, lane));
  for (size_t i = 0; i < 1000; i++) {
    const uint64_t draw = ckf_rng_draw(&state);
    if (i < json_array_size(draws))
      ENSURE_U64("draw", draw, json_array_get(draws, i));
  }
  ENSURE_U64("state", state, vec_get(expected, "lane0_state_after_1000_draws"));
  return VEC_PASSED;
}

static int run_pool_worker(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  size_t len;
  const uint64_t *workers = numbers(vec_get(vec_get(vector, "expected"), "lanes"), &len);
  ENSURE(len == CKF_LANES, "%zu lanes", len);
  for (uint32_t lane = 0; lane < CKF_LANES; lane++) {
    const uint32_t got = ckf_ingest_worker_of(member_u64(input, "consumer"), lane,
                                              (uint32_t)member_u64(input, "workers"));
    ENSURE(got == workers[lane], "lane %u has worker %u", lane, got);
  }
  return VEC_PASSED;
}

static int run_packed(const json_t *vector, char *why, size_t why_cap) {
  const json_t *expected = vec_get(vector, "expected");
  size_t len, i;
  const uint64_t *slots = numbers(vec_get(vec_get(vector, "input"), "slots"), &len);
  const uint64_t word = slots[0] | slots[1] << 16 | slots[2] << 32 | slots[3] << 48;
  const json_t *value = vec_get(expected, "first_empty"), *item;
  const char *key;
  const uint8_t *encoded = bytes(vec_get(expected, "bytes"), &len);
  ENSURE_U64("word", word, vec_get(expected, "word"));
  ENSURE(len == 8 && get_le(encoded, 8) == word, "bytes of the word");
  ENSURE(ckf_word_first_empty(word) == (json_is_null(value) ? 4 : vec_u64(value)), "first empty");
  json_array_foreach (json_object_get(expected, "contains"), i, item)
    ENSURE(ckf_word_contains(word, (uint16_t)vec_u64(item)), "misses %" PRIu64, vec_u64(item));
  json_array_foreach (json_object_get(expected, "absent"), i, item)
    ENSURE(!ckf_word_contains(word, (uint16_t)vec_u64(item)), "contains %" PRIu64, vec_u64(item));
  json_object_foreach (json_object_get(expected, "first"), key, item)
    ENSURE_U64("first", ckf_word_first(word, (uint16_t)strtoul(key, NULL, 10)), item);
  return VEC_PASSED;
}

/* ---- filter layouts ---- */

static uint64_t *read_keys(const json_t *rule, size_t *len) {
  const json_t *part = json_object_get(rule, "keys");
  const json_t *slice = json_object_get(rule, "slice");
  uint64_t *keys = NULL;
  if (part) {
    keys = numbers(part, len);
  } else if ((part = json_object_get(rule, "range"))) {
    const uint64_t first = vec_u64(json_array_get(part, 0)),
                   last = vec_u64(json_array_get(part, 1));
    const json_t *step = json_object_get(rule, "step");
    const uint64_t by = step ? vec_u64(step) : 1;
    keys = take((size_t)((last - first) / by + 1), sizeof *keys);
    *len = 0;
    for (uint64_t key = first; key <= last; key += by)
      keys[(*len)++] = key;
  } else if ((part = json_object_get(rule, "chain"))) {
    *len = (size_t)member_u64(part, "count");
    keys = take(*len, sizeof *keys);
    for (size_t i = 0; i < *len; i++)
      keys[i] = i == 0 ? member_u64(part, "root")
                       : ckf_child(keys[i - 1], member_u64(part, "next_local") + i - 1);
  } else {
    part = vec_get(rule, "splitmix");
    uint64_t state = member_u64(part, "state");
    *len = (size_t)member_u64(part, "count");
    keys = take(*len, sizeof *keys);
    for (size_t i = 0; i < *len; i++)
      keys[i] = ckf_rng_draw(&state);
  }
  if (slice) {
    const size_t from = (size_t)vec_u64(json_array_get(slice, 0)),
                 to = (size_t)vec_u64(json_array_get(slice, 1)),
                 by = (size_t)vec_u64(json_array_get(slice, 2));
    *len = 0;
    for (size_t i = from; i < to; i += by)
      keys[(*len)++] = keys[i];
  }
  if (json_is_true(json_object_get(rule, "reverse")))
    for (size_t i = 0; i < *len / 2; i++) {
      const uint64_t key = keys[i];
      keys[i] = keys[*len - 1 - i];
      keys[*len - 1 - i] = key;
    }
  return keys;
}

typedef struct layout {
  ckf_filter filter;
  uint64_t *words;
  uint64_t start, touches, occupied, omitted;
  uint64_t *present; /* keys with a copy in the filter; a removal of any other key is skipped */
  size_t present_len;
} layout;

static bool layout_take(layout *l, uint64_t key) {
  for (size_t i = 0; i < l->present_len; i++)
    if (l->present[i] == key) {
      l->present[i] = l->present[--l->present_len];
      return true;
    }
  return false;
}

static int layout_step(layout *l, const json_t *step, char *why, size_t why_cap) {
  const json_t *expected = vec_get(step, "expected"), *want;
  const bool insert = strcmp(vec_str(vec_get(step, "op")), "insert") == 0;
  size_t len, log_len, omitted_len = 0, want_len;
  const uint64_t *keys = read_keys(vec_get(step, "keys"), &len);
  uint64_t *omitted = take(len, sizeof *omitted);
  for (size_t i = 0; i < len; i++) {
    if (insert && ckf_filter_insert(&l->filter, keys[i]) == CKF_OK) {
      ENSURE(l->present_len < l->filter.format_.bucket_count * 4, "more copies than slots");
      l->present[l->present_len++] = keys[i];
      l->occupied++;
    } else if (insert) {
      omitted[omitted_len++] = keys[i];
      l->omitted++;
    } else if (layout_take(l, keys[i])) {
      ENSURE(ckf_filter_remove(&l->filter, keys[i]) == CKF_OK, "key %zu not removed", i);
      l->occupied--;
    } else {
      continue;
    }
    ckf_filter_log(&l->filter, &log_len);
    l->touches += log_len;
  }
  ENSURE_U64("occupied slots", l->occupied, vec_get(expected, "occupied_slots"));
  ENSURE_U64("omitted", l->omitted, vec_get(expected, "omitted"));
  ENSURE_U64("draws", draws_between(l->start, ckf_filter_rng(&l->filter)),
             vec_get(expected, "draws"));
  ENSURE_U64("generator", ckf_filter_rng(&l->filter), vec_get(expected, "generator"));
  ENSURE_U64("touches", l->touches, vec_get(expected, "physical_touches"));
  ENSURE_U64("digest", digest(l->words, l->filter.format_.bucket_count),
             vec_get(expected, "digest"));
  if ((want = json_object_get(expected, "words")) &&
      expect_words(l->words, want, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  if ((want = json_object_get(expected, "omitted_keys"))) {
    const uint64_t *list = numbers(want, &want_len);
    ENSURE(want_len == omitted_len, "%zu keys omitted in this step", omitted_len);
    ENSURE(memcmp(list, omitted, omitted_len * 8) == 0, "omitted keys");
  }
  return VEC_PASSED;
}

static int run_layout(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *value, *step;
  const ckf_format format = read_format(input);
  const uint32_t max_kicks = (uint32_t)member_u64(input, "max_kicks");
  layout l;
  size_t i, len;
  memset(&l, 0, sizeof l);
  l.words = take((size_t)format.bucket_count, sizeof *l.words);
  l.present = take((size_t)format.bucket_count * 4, sizeof *l.present);
  ENSURE(ckf_filter_init(&l.filter, &format, max_kicks, l.words,
                         take(max_kicks + 1u, sizeof(ckf_image)), NULL) == CKF_OK,
         "not set up");
  if ((value = json_object_get(input, "initial_words"))) {
    const uint64_t *words = numbers(value, &len);
    memcpy(l.words, words, len * 8);
    for (i = 0; i < len * 4; i++)
      l.occupied += (words[i / 4] >> i % 4 * 16 & 0xFFFF) != 0;
  }
  if ((value = json_object_get(input, "initial_generator")))
    ckf_filter_set_rng(&l.filter, vec_u64(value));
  l.start = ckf_filter_rng(&l.filter);
  json_array_foreach (vec_get(vector, "steps"), i, step) {
    char reason[200];
    if (layout_step(&l, step, reason, sizeof reason) != VEC_PASSED)
      return vec_fail(why, why_cap, "step %zu: %s", i, reason);
  }
  return VEC_PASSED;
}

/* ---- CBI1 ---- */

static int run_cbi1_frame(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  const json_t *decoded = vec_get(expected, "decoded");
  const ckf_format format = read_format(vec_get(input, "format"));
  const bool encoder = json_is_true(vec_get(expected, "encoder"));
  size_t len, n;
  const uint8_t *frame = bytes(vec_get(input, "frame"), &len);
  uint8_t *again = take(len, 1);
  ckf_cbi1_frame view;
  ENSURE_U64("length", len, vec_get(input, "bytes"));
  const int rc = ckf_cbi1_decode(&format, frame, len, &view);
  ENSURE(rc == CKF_OK, "error %s", ckf_errname(rc));
  ENSURE_U64("dc_id", view.dc_id, vec_get(decoded, "dc_id"));
  ENSURE_U64("epoch", view.epoch, vec_get(decoded, "epoch"));
  if (strcmp(vec_str(vec_get(decoded, "type")), "delta") == 0) {
    const ckf_image *images = read_images(vec_get(decoded, "images"), &n);
    ENSURE(view.kind == CKF_CBI1_DELTA && view.image_count == n, "%u images", view.image_count);
    ENSURE_U64("base epoch", view.base_epoch, vec_get(decoded, "base_epoch"));
    for (size_t i = 0; i < n; i++)
      ENSURE(ckf_cbi1_image(&view, i).bucket == images[i].bucket &&
                 ckf_cbi1_image(&view, i).word == images[i].word,
             "image %zu", i);
    ENSURE(ckf_cbi1_delta_size(n) == len, "size");
    ENSURE(ckf_cbi1_delta_encode(&format, view.dc_id, view.base_epoch, view.epoch, images, n, again,
                                 len) == (ptrdiff_t)len,
           "not encoded");
    ENSURE((memcmp(frame, again, len) == 0) == encoder, "encoded again it differs");
    return VEC_PASSED;
  }
  const uint64_t *words = numbers(vec_get(decoded, "words"), &n);
  ENSURE(view.kind == CKF_CBI1_SNAPSHOT && view.word_count == n, "%u words", view.word_count);
  ENSURE_U64("chunk index", view.chunk_index, vec_get(decoded, "chunk_index"));
  ENSURE_U64("chunk count", view.chunk_count, vec_get(decoded, "chunk_count"));
  ENSURE_U64("bucket offset", view.bucket_offset, vec_get(decoded, "bucket_offset"));
  for (size_t i = 0; i < n; i++)
    ENSURE(ckf_cbi1_word(&view, i) == words[i], "word %zu", i);
  if (encoder) {
    ENSURE(ckf_cbi1_snapshot_encode(&format, view.dc_id, view.epoch, words, n,
                                    CKF_CBI1_MAX_CHUNK_BUCKETS, view.chunk_index, again,
                                    len) == (ptrdiff_t)len,
           "not encoded");
    ENSURE(memcmp(frame, again, len) == 0, "encoded again it differs");
  }
  return VEC_PASSED;
}

static int run_cbi1_error(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  const json_t *rule = json_object_get(input, "frame_rule");
  const ckf_format format = read_format(vec_get(input, "format"));
  const uint8_t *frame;
  size_t len;
  if (rule) {
    const uint8_t *repeat = bytes(vec_get(rule, "repeat"), &len);
    uint8_t *filled;
    const int value = repeat[0];
    len = (size_t)member_u64(rule, "count");
    filled = take(len, 1);
    memset(filled, value, len);
    frame = filled;
  } else {
    frame = bytes(vec_get(input, "frame"), &len);
  }
  ckf_cbi1_frame view;
  const int err = ckf_cbi1_decode(&format, frame, len, &view);
  /* The vectors were made where sizes have 64 bits; a count that a host cannot have is malformed
   * before it is another than expected. */
  if (strcmp(vec_str(vec_get(expected, "error")), "FormatMismatch") == 0 &&
      get_le(frame + 20, 8) > SIZE_MAX) {
    ENSURE(err == CKF_ERR_MALFORMED, "error \"%s\"", ckf_errname(err));
    return VEC_PASSED;
  }
  ENSURE_ERROR(err, vec_get(expected, "error"));
  if (json_object_get(expected, "value"))
    ENSURE_U64("value", view.detail, vec_get(expected, "value"));
  return VEC_PASSED;
}

static int run_cbi1_encode_error(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected"), *rule;
  const ckf_format format = read_format(vec_get(input, "format"));
  const size_t cap = CKF_CBI1_MAX_FRAME_BYTES + 1024;
  uint8_t *out = take(cap, 1);
  ptrdiff_t rc;
  size_t n;
  if (strcmp(vec_str(vec_get(input, "call")), "delta") == 0) {
    ckf_image *images;
    if ((rule = json_object_get(input, "images_rule"))) {
      n = (size_t)member_u64(rule, "count");
      images = take(n, sizeof *images);
      for (size_t i = 0; i < n; i++) {
        images[i].bucket = (uint32_t)member_u64(rule, "bucket");
        images[i].word = member_u64(rule, "value");
      }
    } else {
      images = read_images(vec_get(input, "images"), &n);
    }
    rc = ckf_cbi1_delta_encode(&format, 1, 1, 2, images, n, out, cap);
  } else {
    const uint64_t *words = numbers(vec_get(input, "words"), &n);
    rc = ckf_cbi1_snapshot_encode(&format, 1, 1, words, n, CKF_CBI1_MAX_CHUNK_BUCKETS, 0, out, cap);
  }
  ENSURE_ERROR((int)rc, vec_get(expected, "error"));
  return VEC_PASSED;
}

static int run_cbi1_large(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *rule = vec_get(input, "words_rule"), *want;
  const ckf_format format = read_format(vec_get(input, "format"));
  const uint32_t chunk_buckets = (uint32_t)member_u64(input, "chunk_words");
  const uint64_t dc_id = member_u64(input, "dc_id"), epoch = member_u64(input, "epoch");
  const json_t *frames = vec_get(vec_get(vector, "expected"), "frames");
  uint64_t *words = take((size_t)format.bucket_count, sizeof *words);
  uint8_t *frame = take(CKF_CBI1_MAX_FRAME_BYTES, 1);
  uint64_t *collected = take((size_t)format.bucket_count, sizeof *collected);
  ckf_assembly assembly;
  size_t i, n;
  if (json_object_get(rule, "nonzero")) {
    const ckf_image *images = read_images(vec_get(rule, "nonzero"), &n);
    for (i = 0; i < n; i++)
      words[images[i].bucket] = images[i].word;
  } else {
    uint64_t state = member_u64(rule, "splitmix");
    for (i = 0; i < format.bucket_count; i++)
      words[i] = ckf_rng_draw(&state);
  }
  ENSURE(ckf_cbi1_chunk_count(&format, chunk_buckets) == json_array_size(frames), "chunk count");
  ENSURE(ckf_assembly_init(&assembly, &format, collected, (size_t)format.bucket_count) == CKF_OK,
         "assembly");
  json_array_foreach (frames, i, want) {
    const ptrdiff_t len =
        ckf_cbi1_snapshot_encode(&format, dc_id, epoch, words, (size_t)format.bucket_count,
                                 chunk_buckets, (uint32_t)i, frame, CKF_CBI1_MAX_FRAME_BYTES);
    uint8_t prefix[CKF_CBI1_SNAPSHOT_PREFIX_BYTES];
    const uint64_t *body;
    ckf_cbi1_frame view;
    uint64_t done;
    ENSURE_U64("length", (uint64_t)len, vec_get(want, "bytes"));
    ENSURE_U64("checksum", get_le(frame + 44, 4), vec_get(want, "checksum"));
    ENSURE_U64("hash of the frame", XXH3_64bits(frame, (size_t)len), vec_get(want, "frame_xxh3"));
    const int err =
        ckf_cbi1_snapshot_prefix(&format, dc_id, epoch, words, (size_t)format.bucket_count,
                                 chunk_buckets, (uint32_t)i, prefix, &body, &n);
    if (words_lie_as_sent())
      ENSURE(err == CKF_OK && memcmp(prefix, frame, sizeof prefix) == 0 &&
                 n * 8 + sizeof prefix == (size_t)len &&
                 memcmp(body, frame + sizeof prefix, n * 8) == 0,
             "prefix and body differ from the frame");
    else
      ENSURE(err == CKF_ERR_ARG, "a prefix where words do not lie as they are sent");
    ENSURE(ckf_cbi1_decode(&format, frame, (size_t)len, &view) == CKF_OK, "not decoded");
    ENSURE_U64("words", view.word_count, vec_get(want, "words"));
    ENSURE_U64("bucket offset", view.bucket_offset, vec_get(want, "bucket_offset"));
    ENSURE(ckf_assembly_absorb(&assembly, &view, &done) == (i + 1 == json_array_size(frames)),
           "assembly at %zu", i);
  }
  ENSURE(memcmp(collected, words, (size_t)format.bucket_count * 8) == 0, "assembled words");
  return VEC_PASSED;
}

static int run_cbi1_large_delta(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *rule = vec_get(input, "images_rule");
  const json_t *expected = vec_get(vector, "expected");
  const ckf_format format = read_format(vec_get(input, "format"));
  const size_t n = (size_t)member_u64(rule, "count");
  uint64_t state = member_u64(rule, "value_splitmix");
  ckf_image *images = take(n, sizeof *images);
  uint8_t *frame = take(CKF_CBI1_MAX_FRAME_BYTES, 1);
  for (size_t i = 0; i < n; i++) {
    images[i].bucket = (uint32_t)i;
    images[i].word = ckf_rng_draw(&state);
  }
  const ptrdiff_t len =
      ckf_cbi1_delta_encode(&format, member_u64(input, "dc_id"), member_u64(input, "base_epoch"),
                            member_u64(input, "epoch"), images, n, frame, CKF_CBI1_MAX_FRAME_BYTES);
  ENSURE_U64("length", (uint64_t)len, vec_get(expected, "bytes"));
  ENSURE_U64("checksum", get_le(frame + 44, 4), vec_get(expected, "checksum"));
  ENSURE_U64("hash of the frame", XXH3_64bits(frame, (size_t)len), vec_get(expected, "frame_xxh3"));
  return VEC_PASSED;
}

/* Compares words with the list of those that are not zero. */
static int expect_nonzero(const uint64_t *words, uint64_t count, const json_t *want, char *why,
                          size_t why_cap) {
  ckf_image *got = take((size_t)count, sizeof *got);
  size_t n = 0;
  for (uint32_t i = 0; i < count; i++)
    if (words[i]) {
      got[n].bucket = i;
      got[n++].word = words[i];
    }
  return expect_images(got, n, want, false, why, why_cap);
}

static int run_assembly(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *hex;
  const json_t *results = vec_get(vec_get(vector, "expected"), "results");
  const ckf_format format = read_format(vec_get(input, "format"));
  uint64_t *words = take((size_t)format.bucket_count, sizeof *words);
  ckf_assembly assembly;
  size_t i;
  ENSURE(ckf_assembly_init(&assembly, &format, words, (size_t)format.bucket_count) == CKF_OK,
         "not set up");
  json_array_foreach (vec_get(input, "frames"), i, hex) {
    const json_t *want = json_array_get(results, i);
    size_t len;
    const uint8_t *frame = bytes(hex, &len);
    ckf_cbi1_frame view;
    uint64_t epoch = 0;
    ENSURE(ckf_cbi1_decode(&format, frame, len, &view) == CKF_OK, "frame %zu not decoded", i);
    const int rc = ckf_assembly_absorb(&assembly, &view, &epoch);
    if (json_is_object(want)) {
      ENSURE(rc == 1, "frame %zu did not complete the snapshot", i);
      ENSURE_U64("epoch", epoch, vec_get(want, "epoch"));
      if (expect_nonzero(words, format.bucket_count, vec_get(want, "images"), why, why_cap) !=
          VEC_PASSED)
        return VEC_FAILED;
    } else {
      ENSURE(strcmp(rc == 0 ? "more" : ckf_errname(rc), vec_str(want)) == 0, "frame %zu: %s", i,
             rc == 0 ? "more" : ckf_errname(rc));
    }
  }
  return VEC_PASSED;
}

/* ---- producer ---- */

typedef struct producer {
  ckf_producer p;
  uint64_t start;     /* generator */
  uint64_t *mirror;   /* words rebuilt from the batches alone */
  const json_t *step; /* for messages */
} producer;

static void producer_open(producer *s, const json_t *config, bool delta_table) {
  ckf_producer_config cfg = ckf_producer_config_default();
  memset(s, 0, sizeof *s);
  cfg.filter = read_config(config);
  cfg.max_members = 64;
  cfg.delta_table = delta_table;
  const size_t len = ckf_producer_mem_size(&cfg);
  if (ckf_producer_init(&s->p, &cfg, take(len, 1), len) != CKF_OK)
    abort();
  s->start = ckf_rng_start(cfg.filter.seed, 0);
  s->mirror = take((size_t)ckf_producer_format(&s->p)->bucket_count, sizeof *s->mirror);
}

static int producer_drain(producer *s, ckf_batch *batch, char *why, size_t why_cap) {
  const int rc = ckf_producer_drain(&s->p, batch);
  ENSURE(rc >= 0 && rc == (batch->image_count > 0), "drain returned %d", rc);
  for (size_t i = 0; i < batch->image_count; i++) {
    const ckf_image image = ckf_batch_image(batch, i);
    s->mirror[image.bucket] = image.word;
  }
  ENSURE(memcmp(s->mirror, ckf_producer_words(&s->p),
                (size_t)ckf_producer_format(&s->p)->bucket_count * 8) == 0,
         "batches do not rebuild the words");
  return VEC_PASSED;
}

static enum ckf_tier read_tier(const json_t *value) {
  const char *name = vec_str(value);
  return strcmp(name, "device") == 0        ? CKF_TIER_DEVICE
         : strcmp(name, "host_pinned") == 0 ? CKF_TIER_HOST_PINNED
         : strcmp(name, "disk") == 0        ? CKF_TIER_DISK
                                            : CKF_TIER_EXTERNAL;
}

static enum ckf_domain read_domain(const json_t *value) {
  if (json_is_null(value))
    return CKF_DOMAIN_MISSING;
  const char *name = vec_str(value);
  return strcmp(name, "worker") == 0        ? CKF_DOMAIN_WORKER
         : strcmp(name, "cache_owner") == 0 ? CKF_DOMAIN_CACHE_OWNER
         : strcmp(name, "unknown") == 0     ? CKF_DOMAIN_UNKNOWN
                                            : CKF_DOMAIN_MALFORMED;
}

static ckf_member read_member(const json_t *object) {
  ckf_member member = {member_u64(object, "worker"), (uint32_t)member_u64(object, "rank")};
  return member;
}

/* A stored, removed or cleared step; false for another one. */
static bool apply_event(ckf_producer *p, const json_t *step, ckf_outcome *out) {
  const char *op = vec_str(vec_get(step, "op"));
  const ckf_member member = json_object_get(step, "rank") ? read_member(step) : (ckf_member){0, 0};
  if (strcmp(op, "stored") == 0) {
    const json_t *blocks = vec_get(step, "blocks"), *parent = vec_get(step, "parent"),
                 *start = vec_get(step, "start");
    const size_t n = json_array_size(blocks);
    ckf_block *list = take(n, sizeof *list);
    for (size_t i = 0; i < n; i++) {
      list[i].external = vec_u64(json_array_get(json_array_get(blocks, i), 0));
      list[i].local = vec_u64(json_array_get(json_array_get(blocks, i), 1));
    }
    ckf_producer_stored(p, &member, read_tier(vec_get(step, "tier")),
                        read_domain(vec_get(step, "domain")), !json_is_null(parent),
                        json_is_null(parent) ? 0 : vec_u64(parent), !json_is_null(start),
                        json_is_null(start) ? 0 : vec_u64(start), list, n, out);
    return true;
  }
  if (strcmp(op, "removed") == 0) {
    size_t n;
    const uint64_t *list = numbers(vec_get(step, "blocks"), &n);
    ckf_producer_removed(p, &member, read_tier(vec_get(step, "tier")),
                         read_domain(vec_get(step, "domain")), list, n, out);
    return true;
  }
  if (strcmp(op, "cleared") == 0) {
    ckf_producer_cleared(p, &member, read_domain(vec_get(step, "domain")), out);
    return true;
  }
  return false;
}

static int by_member(const void *x, const void *y) {
  const ckf_member a = read_member(*(json_t *const *)x), b = read_member(*(json_t *const *)y);
  return a.worker_id != b.worker_id ? (a.worker_id > b.worker_id) - (a.worker_id < b.worker_id)
                                    : (a.dp_rank > b.dp_rank) - (a.dp_rank < b.dp_rank);
}

static int producer_replace(producer *s, const json_t *step, char *why, size_t why_cap) {
  const json_t *ranks = vec_get(step, "ranks");
  const size_t n = json_array_size(ranks), len = (size_t)s->p.mem_bytes_;
  json_t **sorted = take(n, sizeof *sorted);
  ckf_member *named = take(n, sizeof *named);
  ckf_producer next;
  for (size_t i = 0; i < n; i++)
    sorted[i] = json_array_get(ranks, i);
  qsort(sorted, n, sizeof *sorted, by_member);
  for (size_t i = 0; i < n; i++)
    named[i] = read_member(sorted[i]);
  int rc = ckf_rebuild_begin(&next, &s->p, named, n, take(len, 1), len);
  ENSURE(rc == CKF_OK, "rebuild: %s", ckf_errname(rc));
  for (size_t i = 0; i < n; i++) {
    const json_t *push;
    size_t at;
    json_array_foreach (vec_get(sorted[i], "pushes"), at, push) {
      ckf_outcome out;
      ENSURE(apply_event(&next, push, &out), "push %zu is no event", at);
      ENSURE_ERROR(out.error, vec_get(vec_get(push, "expected"), "error"));
    }
  }
  rc = ckf_rebuild_commit(&s->p, &next);
  ENSURE(rc == CKF_OK, "commit: %s", ckf_errname(rc));
  return VEC_PASSED;
}

static uint64_t stat_of(const ckf_producer *p, const char *name, bool *known) {
  ckf_producer_stats st;
  ckf_producer_stats_get(p, &st);
  const struct {
    const char *name;
    uint64_t value;
  } table[] = {
      {"members", st.members},
      {"contributions", st.contributions},
      {"unique_blocks", st.unique_blocks},
      {"occupied_slots", st.occupied_slots},
      {"occupied_buckets", ckf_producer_occupied_buckets(p)},
      {"pending_events", st.pending_events},
      {"unknown_removals", st.unknown_removals},
      {"parent_not_found", st.parent_not_found},
      {"capacity_failures", st.capacity_failures},
      {"physical_touches", st.physical_touches},
      {"distinct_touched", st.distinct_touched},
      {"emitted", st.emitted},
      {"net_reverted", st.net_reverted},
  };
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
    if (strcmp(table[i].name, name) == 0) {
      *known = true;
      return table[i].value;
    }
  *known = false;
  return 0;
}

static int expect_stats(const ckf_producer *p, const json_t *stats, char *why, size_t why_cap) {
  const char *name;
  const json_t *want;
  json_object_foreach ((json_t *)(uintptr_t)stats, name, want) {
    bool known;
    const uint64_t got = stat_of(p, name, &known);
    ENSURE(known, "unknown counter %s", name);
    ENSURE_U64(name, got, want);
  }
  return VEC_PASSED;
}

static int expect_members(producer *s, const json_t *members, char *why, size_t why_cap) {
  size_t n, i;
  const json_t *want;
  const ckf_member *list = ckf_producer_members(&s->p, &n);
  ENSURE(n == json_array_size(members), "%zu members", n);
  json_array_foreach (members, i, want) {
    const ckf_member member = read_member(want);
    ENSURE(list[i].worker_id == member.worker_id && list[i].dp_rank == member.dp_rank, "member %zu",
           i);
    ENSURE_U64("blocks of a member", ckf_producer_member_blocks(&s->p, &member),
               vec_get(want, "blocks"));
  }
  return VEC_PASSED;
}

static int producer_check(producer *s, const json_t *expected, char *why, size_t why_cap) {
  const uint64_t *words = ckf_producer_words(&s->p);
  const json_t *want, *item;
  ckf_producer_stats st;
  size_t i;
  json_array_foreach (json_object_get(expected, "contains"), i, item)
    ENSURE(ckf_producer_contains(&s->p, vec_u64(item)), "misses %s", vec_str(item));
  json_array_foreach (json_object_get(expected, "absent"), i, item)
    ENSURE(!ckf_producer_contains(&s->p, vec_u64(item)), "contains %s", vec_str(item));
  json_array_foreach (json_object_get(expected, "not_owned"), i, item)
    ENSURE(!ckf_producer_owners(&s->p, vec_u64(item), NULL, NULL), "owns %s", vec_str(item));
  json_array_foreach (json_object_get(expected, "owners"), i, item) {
    uint32_t owners;
    bool resident;
    ENSURE(ckf_producer_owners(&s->p, member_u64(item, "canonical"), &owners, &resident),
           "owners %zu: none", i);
    ENSURE_U64("owners", owners, vec_get(item, "owners"));
    ENSURE(resident == json_is_true(vec_get(item, "resident")), "owners %zu: residency", i);
  }
  if ((want = json_object_get(expected, "stats")) &&
      expect_stats(&s->p, want, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  if ((want = json_object_get(expected, "members")) &&
      expect_members(s, want, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  if ((want = json_object_get(expected, "words")) &&
      expect_words(words, want, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  ckf_producer_stats_get(&s->p, &st);
  if ((want = json_object_get(expected, "digest")))
    ENSURE_U64("digest", digest(words, ckf_producer_format(&s->p)->bucket_count), want);
  if ((want = json_object_get(expected, "generator")))
    ENSURE_U64("generator", st.generator, want);
  if ((want = json_object_get(expected, "draws")))
    ENSURE_U64("draws", draws_between(s->start, st.generator), want);
  return VEC_PASSED;
}

static int producer_step(producer *s, const json_t *step, char *why, size_t why_cap) {
  const char *op = vec_str(vec_get(step, "op"));
  const json_t *expected = vec_get(step, "expected");
  const json_t *order = json_object_get(expected, "images_order");
  const bool any_order = order && strcmp(vec_str(order), "any") == 0;
  ckf_batch batch = {NULL, 0};
  ckf_outcome out;
  bool drain = true;
  if (strcmp(op, "check") == 0)
    return producer_check(s, expected, why, why_cap);
  if (apply_event(&s->p, step, &out)) {
    ENSURE_ERROR(out.error, vec_get(expected, "error"));
    ENSURE(out.boundary == json_is_true(vec_get(expected, "boundary")), "boundary is %d",
           out.boundary);
    ENSURE_U64("unknown", out.unknown, vec_get(expected, "unknown"));
    drain = out.boundary;
  } else if (strcmp(op, "remove_rank") == 0) {
    const ckf_member member = read_member(step);
    ENSURE(ckf_producer_remove_rank(&s->p, &member) == CKF_OK, "remove_rank");
  } else if (strcmp(op, "remove_worker") == 0) {
    ENSURE(ckf_producer_remove_worker(&s->p, member_u64(step, "worker")) == CKF_OK,
           "remove_worker");
  } else if (strcmp(op, "replace") == 0) {
    if (producer_replace(s, step, why, why_cap) != VEC_PASSED)
      return VEC_FAILED;
  } else {
    ENSURE(strcmp(op, "flush") == 0 || strcmp(op, "snapshot") == 0, "unknown step %s", op);
    if (json_object_get(expected, "words_digest"))
      ENSURE_U64("digest of the snapshot",
                 digest(ckf_producer_words(&s->p), ckf_producer_format(&s->p)->bucket_count),
                 vec_get(expected, "words_digest"));
  }
  if (drain && producer_drain(s, &batch, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  return expect_images(batch_images(&batch), batch.image_count, vec_get(expected, "images"),
                       any_order, why, why_cap);
}

static int run_producer(const json_t *vector, char *why, size_t why_cap) {
  for (int delta_table = 0; delta_table < 2; delta_table++) {
    producer s;
    const json_t *step;
    size_t i;
    producer_open(&s, vec_get(vec_get(vector, "input"), "config"), delta_table != 0);
    json_array_foreach (vec_get(vector, "steps"), i, step) {
      char reason[200];
      if (producer_step(&s, step, reason, sizeof reason) != VEC_PASSED)
        return vec_fail(why, why_cap, "step %zu: %s", i, reason);
      ENSURE(ckf_producer_check_(&s.p) == CKF_OK, "step %zu: invariant broken", i);
    }
  }
  return VEC_PASSED;
}

static void soak_event(ckf_producer *p, uint64_t *state, const json_t *input, ckf_outcome *out) {
  const uint64_t r1 = ckf_rng_draw(state), r2 = ckf_rng_draw(state), r3 = ckf_rng_draw(state);
  const ckf_member member = {r1 % 4, (uint32_t)((r1 >> 8) % 2)};
  const uint64_t k = (r1 >> 16) % 10, mask = member_u64(input, "external_mask");
  const uint64_t t = r2 % member_u64(input, "roots") + 1;
  const size_t m = (size_t)(1 + r3 % 8);
  ckf_block blocks[8];
  uint64_t externals[8], canonical = 0;
  for (size_t i = 0; i < m; i++) {
    blocks[i].local = t + 1000 * i;
    canonical = i == 0 ? blocks[i].local : ckf_child(canonical, blocks[i].local);
    blocks[i].external = canonical ^ mask;
    externals[m - 1 - i] = canonical ^ mask;
  }
  if (k == 9 && (r1 >> 32) % 8 == 0)
    ckf_producer_cleared(p, &member, CKF_DOMAIN_MISSING, out);
  else if (k == 7 || k == 8)
    ckf_producer_removed(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals, m, out);
  else
    ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0, blocks,
                        m, out);
}

static int run_producer_soak(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  uint64_t state = member_u64(input, "state"), batches = 0, images = 0;
  const uint64_t events = member_u64(input, "events");
  XXH3_state_t *hash = XXH3_createState();
  ckf_producer_stats st;
  producer s;
  ENSURE(json_object_size(vec_get(expected, "errors")) == 0, "errors are not counted here");
  producer_open(&s, vec_get(input, "config"), true);
  XXH3_64bits_reset(hash);
  for (uint64_t i = 0; i < events; i++) {
    ckf_outcome out;
    ckf_batch batch;
    soak_event(&s.p, &state, input, &out);
    ENSURE(out.error == CKF_OK, "event %" PRIu64 ": %s", i, ckf_errname(out.error));
    if (!out.boundary)
      continue;
    if (producer_drain(&s, &batch, why, why_cap) != VEC_PASSED)
      return VEC_FAILED;
    ckf_image *sorted = malloc((batch.image_count + 1) * sizeof *sorted);
    for (size_t n = 0; n < batch.image_count; n++)
      sorted[n] = ckf_batch_image(&batch, n);
    qsort(sorted, batch.image_count, sizeof *sorted, by_bucket);
    for (size_t n = 0; n < batch.image_count; n++) {
      uint8_t image[12];
      put_le(put_le(image, sorted[n].bucket, 4), sorted[n].word, 8);
      XXH3_64bits_update(hash, image, sizeof image);
    }
    free(sorted);
    batches += batch.image_count > 0;
    images += batch.image_count;
    if (i % 64 == 0)
      ENSURE(ckf_producer_check_(&s.p) == CKF_OK, "event %" PRIu64 ": invariant broken", i);
  }
  ENSURE_U64("batches", batches, vec_get(expected, "batches"));
  ENSURE_U64("images", images, vec_get(expected, "images"));
  ENSURE_U64("hash of the images", XXH3_64bits_digest(hash), vec_get(expected, "images_xxh3"));
  XXH3_freeState(hash);
  ENSURE_U64("digest", digest(ckf_producer_words(&s.p), ckf_producer_format(&s.p)->bucket_count),
             vec_get(expected, "digest"));
  ckf_producer_stats_get(&s.p, &st);
  ENSURE_U64("generator", st.generator, vec_get(expected, "generator"));
  ENSURE_U64("draws", draws_between(s.start, st.generator), vec_get(expected, "draws"));
  return expect_stats(&s.p, vec_get(expected, "stats"), why, why_cap);
}

static int expect_frame(const uint8_t *frame, ptrdiff_t len, const json_t *hex, char *why,
                        size_t why_cap) {
  size_t want_len;
  const uint8_t *want = bytes(hex, &want_len);
  ENSURE(len == (ptrdiff_t)want_len && memcmp(frame, want, want_len) == 0, "frame differs");
  return VEC_PASSED;
}

/* As long as the way of two stores: tokens, hashes, producer, frames, replica, answer. */
static int run_end_to_end(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  const int32_t hash_format =
      json_is_true(vec_get(input, "eagle")) ? HASHFMT_FORMAT_EAGLE : HASHFMT_FORMAT_STANDARD;
  const uint32_t block_size = (uint32_t)member_u64(input, "block_size");
  const uint64_t mask = member_u64(input, "external_mask"), dc_id = member_u64(input, "dc_id");
  const uint64_t salt = salt_of(vec_get(input, "lora"), vec_get(input, "namespace"));
  const size_t all = (size_t)member_u64(input, "all_tokens");
  const size_t first =
      (size_t)hashfmt_block_count(hash_format, block_size, member_u64(input, "first_tokens"));
  uint32_t *tokens = take(all, sizeof *tokens);
  uint64_t local[64], canonical[64];
  ckf_block blocks[64];
  uint8_t frame[4096];
  const ckf_member member = {1, 0};
  ckf_outcome out;
  ckf_batch batch;
  ckf_replica replica;
  ckf_cbi1_frame view;
  producer s;
  size_t count, i;
  for (i = 0; i < all; i++)
    tokens[i] = (uint32_t)i;
  ENSURE_U64("salt", salt, vec_get(expected, "salt"));
  ENSURE_U64("first blocks", first, vec_get(expected, "first_blocks"));
  ENSURE(hashfmt_blocks(hash_format, block_size, salt, tokens, all, local, canonical, 64, &count) ==
             HASHFMT_OK,
         "not hashed");
  if (expect_words(local, vec_get(expected, "local"), why, why_cap) != VEC_PASSED ||
      expect_words(canonical, vec_get(expected, "canonical"), why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  for (i = 0; i < count; i++) {
    blocks[i].local = local[i];
    blocks[i].external = canonical[i] ^ mask;
  }
  producer_open(&s, input, true);
  const ckf_format *format = ckf_producer_format(&s.p);
  const size_t words = (size_t)format->bucket_count;
  ENSURE_U64("buckets", words, vec_get(expected, "buckets"));
  const size_t replica_len = ckf_replica_mem_size(format);
  ENSURE(ckf_replica_init(&replica, format, take(replica_len, 1), replica_len) == CKF_OK,
         "replica");

  ckf_producer_stored(&s.p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
                      blocks, first, &out);
  ENSURE(out.error == CKF_OK && ckf_producer_drain(&s.p, &batch) == 1, "first store");
  ptrdiff_t len = ckf_cbi1_snapshot_encode(format, dc_id, member_u64(input, "snapshot_epoch"),
                                           ckf_producer_words(&s.p), words,
                                           CKF_CBI1_MAX_CHUNK_BUCKETS, 0, frame, sizeof frame);
  if (expect_frame(frame, len, vec_get(expected, "snapshot_frame"), why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  ENSURE(ckf_cbi1_decode(format, frame, (size_t)len, &view) == CKF_OK &&
             ckf_replica_apply(&replica, &view) == 1,
         "snapshot not applied");
  ENSURE_U64("depth", ckf_search(format, ckf_replica_words(&replica), canonical, count),
             vec_get(expected, "depth_after_snapshot"));

  ckf_producer_stored(&s.p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, true,
                      blocks[first - 1].external, false, 0, blocks + first, count - first, &out);
  ENSURE(out.error == CKF_OK && ckf_producer_drain(&s.p, &batch) == 1, "second store");
  len = ckf_cbi1_batch_encode(format, dc_id, member_u64(input, "delta_base"),
                              member_u64(input, "delta_epoch"), &batch, frame, sizeof frame);
  if (expect_frame(frame, len, vec_get(expected, "delta_frame"), why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  ENSURE(ckf_cbi1_decode(format, frame, (size_t)len, &view) == CKF_OK &&
             ckf_replica_apply(&replica, &view) == 1,
         "delta not applied");
  ENSURE_U64("depth", ckf_search(format, ckf_replica_words(&replica), canonical, count),
             vec_get(expected, "depth_after_delta"));
  ENSURE(memcmp(ckf_replica_words(&replica), ckf_producer_words(&s.p), words * 8) == 0,
         "replica differs");
  return VEC_PASSED;
}

/* ---- publisher ---- */

typedef struct sink_log {
  bool fails;
  size_t len;
  uint64_t epoch[4], base[4], sequence[4];
  size_t images[4];
} sink_log;

static bool sink_take(void *user, const ckf_delta_out *delta) {
  sink_log *log = user;
  if (log->fails || log->len == 4)
    return false;
  log->epoch[log->len] = delta->lease->assignment_epoch;
  log->base[log->len] = delta->base;
  log->sequence[log->len] = delta->sequence;
  log->images[log->len++] = delta->batch.image_count;
  return true;
}

static ckf_batch some_images(uint64_t count) {
  static const uint8_t images[16 * CKF_CBI1_IMAGE_BYTES];
  const ckf_batch batch = {images, (size_t)count};
  return batch;
}

static int publisher_publish(ckf_publisher *pub, sink_log *log, const json_t *step, char *why,
                             size_t why_cap) {
  const json_t *expected = vec_get(step, "expected");
  const ckf_batch batch = some_images(member_u64(step, "images"));
  const int rc = ckf_publisher_publish(pub, &batch);
  ENSURE_ERROR(rc, vec_get(expected, "error"));
  if (rc == CKF_ERR_FENCED)
    ENSURE(strcmp(ckf_fence_name(ckf_publisher_fence(pub)), vec_str(vec_get(expected, "reason"))) ==
               0,
           "fenced by %s", ckf_fence_name(ckf_publisher_fence(pub)));
  ENSURE(log->len == (size_t)(rc == 1), "%zu deltas sent", log->len);
  if (rc < 0)
    return VEC_PASSED;
  ENSURE(strcmp(rc == 1 ? "Published" : "NoSubscriber", vec_str(vec_get(expected, "outcome"))) == 0,
         "publish returned %d", rc);
  ENSURE_U64("sequence", ckf_publisher_last_sequence(pub), vec_get(expected, "sequence"));
  if (rc == 1) {
    ENSURE_U64("sent sequence", log->sequence[0], vec_get(expected, "sequence"));
    ENSURE_U64("sent base", log->base[0], vec_get(expected, "base"));
    ENSURE_U64("sent images", log->images[0], vec_get(expected, "images"));
    ENSURE_U64("lease", log->epoch[0], vec_get(expected, "lease"));
  }
  return VEC_PASSED;
}

static int publisher_snapshot(ckf_publisher *pub, sink_log *log, const json_t *step, char *why,
                              size_t why_cap) {
  const json_t *expected = vec_get(step, "expected"), *want;
  const json_t *pending = json_object_get(step, "pending_images");
  const ckf_lease lease = {17, 3, member_u64(step, "lease")};
  const ckf_batch tail = some_images(pending ? vec_u64(pending) : 0);
  ckf_lease holder;
  uint64_t sequence = 0;
  size_t i;
  const int rc = ckf_publisher_snapshot(pub, &lease, pending ? &tail : NULL, &sequence);
  ENSURE_ERROR(rc, vec_get(expected, "error"));
  if (rc < 0)
    return VEC_PASSED;
  ENSURE_U64("sequence", sequence, vec_get(expected, "sequence"));
  ENSURE(ckf_publisher_drain_marker(pub, &holder, &sequence) == 1, "nobody holds the lease");
  ENSURE_U64("lease", holder.assignment_epoch, vec_get(expected, "lease"));
  ENSURE(log->len == json_array_size(vec_get(expected, "tail_deltas")), "%zu deltas", log->len);
  json_array_foreach (vec_get(expected, "tail_deltas"), i, want) {
    ENSURE_U64("lease of the tail", log->epoch[i], vec_get(want, "lease"));
    ENSURE_U64("base of the tail", log->base[i], vec_get(want, "base"));
    ENSURE_U64("sequence of the tail", log->sequence[i], vec_get(want, "sequence"));
  }
  return VEC_PASSED;
}

static int publisher_marker(const ckf_publisher *pub, const json_t *marker, char *why,
                            size_t why_cap) {
  ckf_lease lease;
  uint64_t expected_sequence;
  const int rc = ckf_publisher_drain_marker(pub, &lease, &expected_sequence);
  ENSURE(rc == !json_is_null(marker), "marker is %d", rc);
  if (rc == 1) {
    ENSURE_U64("lease", lease.assignment_epoch, vec_get(marker, "lease"));
    ENSURE_U64("expected sequence", expected_sequence, vec_get(marker, "expected_sequence"));
  }
  return VEC_PASSED;
}

static int publisher_step(ckf_publisher *pub, sink_log *log, const json_t *step, char *why,
                          size_t why_cap) {
  const char *op = vec_str(vec_get(step, "op"));
  const json_t *expected = vec_get(step, "expected"), *fence = vec_get(expected, "fence");
  int result = VEC_PASSED;
  memset(log, 0, sizeof *log);
  log->fails = json_is_true(json_object_get(step, "sink_fails"));
  if (strcmp(op, "publish") == 0) {
    result = publisher_publish(pub, log, step, why, why_cap);
  } else if (strcmp(op, "snapshot") == 0) {
    result = publisher_snapshot(pub, log, step, why, why_cap);
  } else if (strcmp(op, "drain_marker") == 0) {
    result = publisher_marker(pub, vec_get(expected, "marker"), why, why_cap);
  } else if (strcmp(op, "retire") == 0) {
    ckf_publisher_retire(pub);
  } else {
    ENSURE(strcmp(op, "retire_stalled") == 0, "unknown step %s", op);
    ckf_publisher_retire_stalled(pub);
  }
  if (result != VEC_PASSED)
    return result;
  ENSURE(strcmp(ckf_fence_name(ckf_publisher_fence(pub)),
                json_is_null(fence) ? "" : vec_str(fence)) == 0,
         "fence %s", ckf_fence_name(ckf_publisher_fence(pub)));
  ENSURE_U64("last sequence", ckf_publisher_last_sequence(pub), vec_get(expected, "last_sequence"));
  return VEC_PASSED;
}

static int run_publisher(const json_t *vector, char *why, size_t why_cap) {
  const ckf_identity identity = {{{{0}, {0}, 0, 0}, 1}, 1, 1, {CKF_DEFAULT_SEED, 16}};
  const json_t *step;
  ckf_publisher pub;
  sink_log log;
  size_t i;
  ENSURE(ckf_publisher_init(&pub, &identity,
                            member_u64(vec_get(vector, "input"), "initial_sequence"), sink_take,
                            &log) == CKF_OK,
         "not set up");
  json_array_foreach (vec_get(vector, "steps"), i, step) {
    char reason[200];
    if (publisher_step(&pub, &log, step, reason, sizeof reason) != VEC_PASSED)
      return vec_fail(why, why_cap, "step %zu: %s", i, reason);
  }
  return VEC_PASSED;
}

/* ---- lane ---- */

enum { VECTOR_LANE = 3 };

typedef struct lane {
  ckf_table table;
  ckf_lane lane;
  ckf_format format;
  ckf_pool pools[2]; /* the right one and another one */
} lane;

static ckf_identity lane_identity(const lane *l, const json_t *step) {
  const json_t *pool = json_object_get(step, "pool");
  ckf_identity identity;
  memset(&identity, 0, sizeof identity);
  identity.pool = l->pools[pool ? vec_u64(pool) != 0 : 0];
  identity.producer_incarnation = member_u64(step, "incarnation");
  identity.layout_generation = member_u64(step, "generation");
  identity.format = l->format;
  if (json_is_true(json_object_get(step, "other_format")))
    identity.format.seed ^= 1;
  return identity;
}

static ckf_lease lane_lease(const json_t *step) {
  const json_t *consumer = json_object_get(step, "consumer"),
               *number = json_object_get(step, "lane");
  ckf_lease lease = {consumer ? vec_u64(consumer) : 17,
                     (uint8_t)(number ? vec_u64(number) : VECTOR_LANE), member_u64(step, "epoch")};
  return lease;
}

static int expect_fault(ckf_lane_outcome out, const json_t *want, char *why, size_t why_cap) {
  static const char *const names[] = {"expected", "actual",   "installed", "snapshot",
                                      "base",     "sequence", "bucket"};
  const uint64_t values[] = {out.a, out.b, out.a, out.b, out.a, out.b, out.a};
  ENSURE(strcmp(ckf_lane_fault_name(out.fault), vec_str(vec_get(want, "name"))) == 0, "fault %s",
         ckf_lane_fault_name(out.fault));
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const json_t *value = json_object_get(want, names[i]);
    if (value && !json_is_null(value))
      ENSURE_U64(names[i], values[i], value);
  }
  return VEC_PASSED;
}

static int expect_outcome(ckf_lane_outcome out, const json_t *expected, char *why, size_t why_cap) {
  const json_t *want = vec_get(expected, "outcome");
  ENSURE(strcmp(ckf_lane_result_name(out.result), vec_str(want)) == 0, "outcome %s, wanted %s",
         ckf_lane_result_name(out.result), vec_str(want));
  if (out.result == CKF_LANE_DEACTIVATED) {
    want = vec_get(expected, "action");
    ENSURE(strcmp(ckf_lane_action_name(out.action), vec_str(want)) == 0, "action %s",
           ckf_lane_action_name(out.action));
    return expect_fault(out, vec_get(expected, "fault"), why, why_cap);
  }
  if ((want = json_object_get(expected, "sequence")))
    ENSURE_U64("sequence", out.a, want);
  if ((want = json_object_get(expected, "images")))
    ENSURE_U64("images", out.b, want);
  return VEC_PASSED;
}

static int lane_step(lane *l, const json_t *step, char *why, size_t why_cap) {
  const char *op = vec_str(vec_get(step, "op"));
  const json_t *expected = vec_get(step, "expected"), *value;
  size_t n, i;
  if (strcmp(op, "assign") == 0) {
    const ckf_identity identity = lane_identity(l, step);
    const ckf_lease lease = lane_lease(step);
    const int rc = ckf_lane_assign(&l->lane, &identity, &lease);
    const char *got = rc == CKF_OK ? "ok" : ckf_errname(rc);
    ENSURE(strcmp(got, vec_str(vec_get(expected, "result"))) == 0, "assign: %s", got);
  } else if (strcmp(op, "retire") == 0) {
    ckf_lane_retire(&l->lane);
  } else if (strcmp(op, "word") == 0) {
    ENSURE_U64("word", ckf_table_word(&l->table, VECTOR_LANE, (uint32_t)member_u64(step, "bucket")),
               vec_get(expected, "word"));
  } else {
    const ckf_identity identity = lane_identity(l, step);
    const ckf_lease lease = lane_lease(step);
    ckf_lane_outcome out;
    if (strcmp(op, "snapshot") == 0) {
      n = (value = json_object_get(step, "words")) ? (size_t)vec_u64(value)
                                                   : (size_t)l->format.bucket_count;
      uint64_t *words = take(n, sizeof *words);
      value = json_object_get(step, "fill");
      for (i = 0; i < n; i++)
        words[i] = value ? vec_u64(value) : 0;
      out = ckf_lane_install(&l->lane, &identity, &lease, member_u64(step, "sequence"), words, n);
    } else if (strcmp(op, "delta") == 0) {
      const ckf_image *images = read_images(vec_get(step, "images"), &n);
      out = ckf_lane_apply_delta(&l->lane, &identity, &lease, member_u64(step, "base"),
                                 member_u64(step, "sequence"), images, n);
    } else {
      ENSURE(strcmp(op, "drain") == 0, "unknown step %s", op);
      out = ckf_lane_drain(&l->lane, &lease, member_u64(step, "expected_sequence"));
    }
    if (expect_outcome(out, expected, why, why_cap) != VEC_PASSED)
      return VEC_FAILED;
  }
  const bool ready = json_is_true(vec_get(expected, "ready"));
  ENSURE(ckf_lane_ready(&l->lane) == ready, "ready");
  ENSURE(ckf_table_ready(&l->table) == (ready ? 1u << VECTOR_LANE : 0), "ready mask");
  value = vec_get(expected, "installed");
  if (!json_is_null(value))
    ENSURE_U64("installed", ckf_lane_installed(&l->lane), value);
  return VEC_PASSED;
}

static int run_lane(const json_t *vector, char *why, size_t why_cap) {
  const json_t *step;
  size_t i;
  lane l;
  ckf_manifest manifest;
  memset(&l, 0, sizeof l);
  memset(&manifest, 0, sizeof manifest);
  l.format.seed = CKF_DEFAULT_SEED;
  l.format.bucket_count = member_u64(vec_get(vector, "input"), "buckets");
  l.pools[0].dc_id = 1;
  l.pools[1].dc_id = 2;
  manifest.consumer_instance = 17;
  manifest.format = l.format;
  manifest.configured = 1u << VECTOR_LANE;
  manifest.pools[VECTOR_LANE] = l.pools[0];
  const size_t len = ckf_table_mem_size(&manifest);
  ENSURE(ckf_table_init(&l.table, &manifest, 2, take(len, 1), len) == CKF_OK &&
             ckf_lane_claim(&l.lane, &l.table, VECTOR_LANE) == CKF_OK,
         "not set up");
  json_array_foreach (vec_get(vector, "steps"), i, step) {
    char reason[200];
    if (lane_step(&l, step, reason, sizeof reason) != VEC_PASSED)
      return vec_fail(why, why_cap, "step %zu: %s", i, reason);
  }
  return VEC_PASSED;
}

/* ---- search ---- */

typedef struct hit_table {
  const json_t *hits, *trace; /* trace: NULL, or what the reference asks for, in order */
  size_t trace_at;
  uint64_t probes;
  bool off_trace;
} hit_table;

static uint32_t table_row(void *user, size_t position) {
  hit_table *table = user;
  const json_t *ranges, *range;
  uint32_t row = 0;
  size_t lane_number, i;
  table->probes++;
  json_array_foreach (table->hits, lane_number, ranges) {
    json_array_foreach (ranges, i, range) {
      if (position >= vec_u64(json_array_get(range, 0)) &&
          position < vec_u64(json_array_get(range, 1)))
        row |= 1u << lane_number;
    }
  }
  return row;
}

static uint32_t traced_row(void *user, bool prefetch, size_t position, uint32_t lanes) {
  hit_table *table = user;
  if (table->trace) {
    const json_t *entry = json_array_get(table->trace, table->trace_at++);
    table->off_trace |=
        !entry || strcmp(vec_str(json_array_get(entry, 0)), prefetch ? "prefetch" : "probe") != 0 ||
        vec_u64(json_array_get(entry, 1)) != position || vec_u64(json_array_get(entry, 2)) != lanes;
  }
  return prefetch ? 0 : table_row(table, position);
}

/* The reference reproduces its own results, work and order of work. */
static int run_reference(const json_t *input, const json_t *expected, char *why, size_t why_cap) {
  const json_t *want = vec_get(expected, "reference"),
               *stats = vec_get(expected, "reference_stats");
  hit_table table = {.hits = vec_get(input, "hits"),
                     .trace = json_object_get(expected, "reference_trace")};
  uint32_t depths[REFERENCE_LANES];
  reference_stats got = {0};
  reference_search(traced_row, &table, (size_t)member_u64(input, "len"),
                   (uint32_t)member_u64(input, "ready_mask"), (uint32_t)member_u64(input, "window"),
                   json_is_true(vec_get(input, "fallback")), depths, &got);
  for (size_t i = 0; i < json_array_size(want); i++)
    ENSURE_U64("depth of the reference", depths[i], json_array_get(want, i));
  ENSURE_U64("row_probes", got.row_probes, vec_get(stats, "row_probes"));
  ENSURE_U64("left_edge_lanes", got.left_edge_lanes, vec_get(stats, "left_edge_lanes"));
  ENSURE_U64("activated_lanes", got.activated_lanes, vec_get(stats, "activated_lanes"));
  ENSURE_U64("fallback_rows", got.fallback_rows, vec_get(stats, "fallback_rows"));
  ENSURE_U64("fallback_lane_probes", got.fallback_lane_probes,
             vec_get(stats, "fallback_lane_probes"));
  ENSURE_U64("provenance_skips", got.provenance_skips, vec_get(stats, "provenance_skips"));
  ENSURE(!table.off_trace && (!table.trace || table.trace_at == json_array_size(table.trace)),
         "the reference looks at other rows, or in another order");
  return VEC_PASSED;
}

/* Our search, under the contract that holds for any search: the lanes of `mask` together. */
static int run_ours(const json_t *input, const json_t *expected, uint32_t mask, char *why,
                    size_t why_cap) {
  const json_t *linear = vec_get(expected, "linear"), *contiguous = vec_get(expected, "contiguous");
  const size_t len = (size_t)member_u64(input, "len");
  const uint32_t untouched = UINT32_C(0xDEADBEEF);
  hit_table table = {.hits = vec_get(input, "hits")};
  uint32_t depths[CKF_LANES];
  uint64_t lanes = 0;
  for (size_t i = 0; i < CKF_LANES; i++)
    depths[i] = untouched;
  ckf_search_rows(table_row, &table, len, mask, depths);
  for (uint32_t number = 0; number < CKF_LANES; number++) {
    if (!(mask >> number & 1)) {
      ENSURE(depths[number] == untouched, "lane %u was searched", number);
      continue;
    }
    const uint64_t floor = vec_u64(json_array_get(linear, number));
    lanes++;
    ENSURE(depths[number] <= len && depths[number] >= floor, "lane %u: depth %u, linear %" PRIu64,
           number, depths[number], floor);
    if (json_is_true(json_array_get(contiguous, number)))
      ENSURE(depths[number] == floor, "lane %u: depth %u, contiguous %" PRIu64, number,
             depths[number], floor);
  }
  ENSURE(table.probes <= lanes * (2 * len + 16), "%" PRIu64 " probes", table.probes);
  return VEC_PASSED;
}

static int run_search(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  const uint32_t mask = (uint32_t)member_u64(input, "ready_mask");
  if (run_reference(input, expected, why, why_cap) != VEC_PASSED ||
      run_ours(input, expected, mask, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  for (uint32_t number = 0; number < CKF_LANES; number++)
    if (run_ours(input, expected, mask & 1u << number, why, why_cap) != VEC_PASSED)
      return VEC_FAILED;
  return VEC_PASSED;
}

/* ---- what the reference looks at for one lane with a contiguous prefix ---- */

static uint32_t prefix_row(void *user, bool prefetch, size_t position, uint32_t lanes) {
  const uint32_t *held = user;
  return !prefetch && position < *held ? lanes : 0;
}

static uint32_t own_prefix_row(void *user, size_t position) {
  uint64_t *const prefix = user; /* blocks held, rows looked at */
  prefix[1]++;
  return position < prefix[0];
}

static int run_probe_cost(const json_t *vector, char *why, size_t why_cap) {
  const json_t *rows = vec_get(vec_get(vector, "expected"), "rows"), *row;
  size_t i;
  json_array_foreach (rows, i, row) {
    const uint32_t len = (uint32_t)member_u64(row, "len");
    const uint32_t window = (uint32_t)member_u64(row, "window");
    uint64_t total = 0, most = 0;
    for (uint32_t held = 0; held <= len; held++) {
      uint32_t depths[REFERENCE_LANES];
      uint64_t prefix[2] = {held, 0};
      reference_stats stats = {0};
      reference_search(prefix_row, &held, len, 1, window, true, depths, &stats);
      ENSURE(depths[0] == held, "the reference finds %u of %u", depths[0], held);
      total += stats.row_probes;
      most = stats.row_probes > most ? stats.row_probes : most;
      ckf_search_rows(own_prefix_row, prefix, len, 1, depths);
      ENSURE(depths[0] == held && prefix[1] <= 2 * (uint64_t)len + 16,
             "ours finds %u of %u with %" PRIu64 " rows", depths[0], held, prefix[1]);
    }
    ENSURE_U64("total_row_probes", total, vec_get(row, "total_row_probes"));
    ENSURE_U64("maximum", most, vec_get(row, "maximum"));
    ENSURE(fabs((double)total / (len + 1) - json_number_value(vec_get(row, "average"))) < 0.0051,
           "average of row %zu", i);
  }
  return VEC_PASSED;
}

/* ---- accuracy study: a table of 16 lanes; our search, the reference and a linear scan ---- */

enum { STUDY_LANES = 16, STUDY_REFERENCES = 7 };

/* How a search differs from a linear scan. */
typedef struct study_search {
  uint64_t lane_mismatches, over, under, wrong_best;
  reference_stats work;
} study_search;

typedef struct study {
  ckf_table table;
  ckf_lane lanes[STUDY_LANES];
  ckf_identity identities[STUDY_LANES];
  uint32_t buckets, max_kicks, chains, chain_length;
  uint64_t seed, epoch;
  uint64_t *keys, *words, *rows; /* rows: 0 unknown, else 1 << 16 | lanes that hit */
  uint32_t *deltas;
  ckf_image *log;
  uint64_t draws, failures, queries, answers;
  study_search truth_of_linear, ours, references[STUDY_REFERENCES];
} study;

static uint32_t study_truth(uint32_t chain, uint32_t number, uint32_t index) {
  return (131 * chain + 37 * number + 17 * index) % 33;
}

/* One row of the table, straight from its words. */
static uint32_t study_lanes_at(const study *s, uint64_t key) {
  const ckf_probe probe = ckf_probe_make(&s->table.manifest_.format, key);
  uint32_t row = 0;
  for (uint32_t number = 0; number < STUDY_LANES; number++)
    if (ckf_word_contains(ckf_table_word(&s->table, number, probe.a), probe.fp) ||
        ckf_word_contains(ckf_table_word(&s->table, number, probe.b), probe.fp))
      row |= 1u << number;
  return row;
}

typedef struct study_query {
  const study *s;
  const uint64_t *keys;
} study_query;

static uint32_t study_row(void *user, bool prefetch, size_t position, uint32_t lanes) {
  const study_query *q = user;
  uint64_t *const row = &q->s->rows[position];
  if (prefetch)
    return 0;
  if (*row == 0)
    *row = 1u << 16 | study_lanes_at(q->s, q->keys[position]);
  return (uint32_t)*row & lanes;
}

static uint32_t best_lane(const uint32_t depths[STUDY_LANES]) {
  uint32_t best = STUDY_LANES;
  for (uint32_t number = 0; number < STUDY_LANES; number++)
    if (depths[number] > 0 && (best == STUDY_LANES || depths[number] > depths[best]))
      best = number;
  return best;
}

static void study_compare(study_search *sum, const uint32_t depths[STUDY_LANES],
                          const uint32_t wanted[STUDY_LANES]) {
  for (uint32_t number = 0; number < STUDY_LANES; number++) {
    sum->lane_mismatches += depths[number] != wanted[number];
    sum->over += depths[number] > wanted[number] ? depths[number] - wanted[number] : 0;
    sum->under += depths[number] < wanted[number];
  }
  sum->wrong_best += best_lane(depths) != best_lane(wanted);
}

/* Fills one lane; the noise stream runs on from lane to lane. */
static void study_fill(study *s, ckf_filter *filter, uint32_t index, uint32_t number,
                       uint32_t residents, uint64_t *noise) {
  const uint64_t start = s->seed ^ number;
  const ckf_lease lease = {1, (uint8_t)number, s->epoch};
  uint32_t placed = 0;
  memset(s->words, 0, s->buckets * sizeof *s->words);
  if (ckf_filter_init(filter, &s->table.manifest_.format, s->max_kicks, s->words, s->log,
                      s->deltas) != CKF_OK)
    abort();
  ckf_filter_set_rng(filter, start);
  for (uint32_t chain = 0; chain < s->chains; chain++)
    for (uint32_t i = 0; i < study_truth(chain, number, index); i++, placed++)
      s->failures += ckf_filter_insert(filter, s->keys[chain * s->chain_length + i]) != CKF_OK;
  for (; placed < residents; placed++)
    s->failures += ckf_filter_insert(filter, ckf_rng_draw(noise)) != CKF_OK;
  s->draws += draws_between(start, ckf_filter_rng(filter));
  if (ckf_lane_assign(&s->lanes[number], &s->identities[number], &lease) != CKF_OK ||
      ckf_lane_install(&s->lanes[number], &s->identities[number], &lease, 1, s->words, s->buckets)
              .result != CKF_LANE_SNAPSHOT_INSTALLED)
    abort();
}

static void study_ask(study *s, const uint64_t *keys, uint32_t len, uint32_t chain, uint32_t index,
                      const json_t *references) {
  uint32_t linear[STUDY_LANES] = {0}, truth[STUDY_LANES], going = 0xFFFF;
  uint64_t room[512];
  study_query q = {s, keys};
  ckf_matches matches;
  ckf_query query;
  const json_t *row;
  size_t i;
  for (uint32_t at = 0; at < len && going; at++) {
    going &= study_row(&q, false, at, 0xFFFF);
    for (uint32_t number = 0; number < STUDY_LANES; number++)
      linear[number] += going >> number & 1;
  }
  for (uint32_t number = 0; number < STUDY_LANES; number++) {
    truth[number] = study_truth(chain, number, index);
    truth[number] = truth[number] < len ? truth[number] : len;
  }
  memcpy(room, keys, len * sizeof *room);
  ckf_query_init(&query, NULL, len, room, len);
  if (ckf_table_find(&s->table, &query, &matches) != CKF_OK || matches.lanes != 0xFFFF)
    abort();
  s->queries++;
  s->answers += STUDY_LANES;
  study_compare(&s->truth_of_linear, linear, truth);
  study_compare(&s->ours, matches.depths, linear);
  json_array_foreach (references, i, row) {
    uint32_t depths[REFERENCE_LANES];
    reference_search(study_row, &q, len, 0xFFFF, (uint32_t)member_u64(row, "window"),
                     json_is_true(vec_get(row, "fallback")), depths, &s->references[i].work);
    study_compare(&s->references[i], depths, linear);
  }
}

static int study_expect_fill(const study *s, const ckf_filter *filter, const json_t *fill,
                             uint32_t index, uint64_t occupancy, uint32_t number, char *why,
                             size_t why_cap) {
  const json_t *entry;
  size_t i;
  json_array_foreach (fill, i, entry) {
    if (member_u64(entry, "seed_index") == index && member_u64(entry, "occupancy") == occupancy &&
        member_u64(entry, "lane") == number) {
      ENSURE_U64("digest", digest(s->words, s->buckets), vec_get(entry, "digest"));
      ENSURE_U64("generator", ckf_filter_rng(filter), vec_get(entry, "generator"));
    }
  }
  return VEC_PASSED;
}

/* A table of 16 lanes for one study seed; the chains of the seed. */
static void study_open(study *s) {
  ckf_manifest m;
  uint64_t state = s->seed;
  memset(&m, 0, sizeof m);
  m.consumer_instance = 1;
  m.format = (ckf_format){s->seed, s->buckets};
  m.configured = 0xFFFF;
  for (uint32_t number = 0; number < STUDY_LANES; number++)
    m.pools[number].dc_id = number;
  const size_t len = ckf_table_mem_size(&m);
  if (ckf_table_init(&s->table, &m, 2, take(len, 1), len) != CKF_OK)
    abort();
  for (uint32_t number = 0; number < STUDY_LANES; number++) {
    memset(&s->identities[number], 0, sizeof s->identities[number]);
    s->identities[number].pool = m.pools[number];
    s->identities[number].format = m.format;
    if (ckf_lane_claim(&s->lanes[number], &s->table, number) != CKF_OK)
      abort();
  }
  ckf_delta_table(s->seed, s->deltas);
  for (uint32_t i = 0; i < s->chains * s->chain_length; i++) {
    const uint64_t local = ckf_rng_draw(&state);
    s->keys[i] = i % s->chain_length ? ckf_child(s->keys[i - 1], local) : local;
  }
}

static int study_expect_rows(const study *s, const json_t *rows, char *why, size_t why_cap) {
  const json_t *row;
  size_t i;
  json_array_foreach (rows, i, row) {
    const study_search *got = &s->references[i];
    ENSURE_U64("lane_mismatches", got->lane_mismatches, vec_get(row, "lane_mismatches"));
    ENSURE_U64("over_report", got->over, vec_get(row, "over_report"));
    ENSURE_U64("under_reports", got->under, vec_get(row, "under_reports"));
    ENSURE_U64("wrong_best", got->wrong_best, vec_get(row, "wrong_best"));
    ENSURE_U64("row_probes", got->work.row_probes, vec_get(row, "row_probes"));
    ENSURE_U64("fallback_rows", got->work.fallback_rows, vec_get(row, "fallback_rows"));
  }
  return VEC_PASSED;
}

static int study_expect(const study *s, const json_t *expected, char *why, size_t why_cap) {
  const json_t *linear = vec_get(expected, "linear");
  ENSURE_U64("queries", s->queries, vec_get(expected, "queries"));
  ENSURE_U64("lane answers", s->answers, vec_get(expected, "lane_observations"));
  ENSURE_U64("failed insertions", s->failures, vec_get(expected, "insertion_failures"));
  ENSURE_U64("draws", s->draws, vec_get(expected, "total_draws"));
  ENSURE_U64("over-reports", s->truth_of_linear.over, vec_get(linear, "over_reports_vs_truth"));
  ENSURE_U64("lanes too deep", s->truth_of_linear.lane_mismatches, vec_get(linear, "lanes_over"));
  ENSURE_U64("under-reports", s->truth_of_linear.under, vec_get(linear, "under_reports"));
  ENSURE(s->ours.lane_mismatches == 0 && s->ours.over == 0 && s->ours.under == 0 &&
             s->ours.wrong_best == 0,
         "%" PRIu64 " answers differ from a linear scan, %" PRIu64 " too deep, %" PRIu64
         " too shallow, %" PRIu64 " wrong best lanes",
         s->ours.lane_mismatches, s->ours.over, s->ours.under, s->ours.wrong_best);
  return study_expect_rows(s, vec_get(expected, "rows"), why, why_cap);
}

static void study_say(const char *who, const study_search *got, char *why, size_t why_cap) {
  const size_t len = strlen(why);
  snprintf(why + len, why_cap - len,
           "\n  %-26s %3" PRIu64 " lane mismatches %4" PRIu64 " over-reports in sum %2" PRIu64
           " under-reports %3" PRIu64 " wrong best",
           who, got->lane_mismatches, got->over, got->under, got->wrong_best);
}

/* What passed, in figures. */
static void study_report(const study *s, const json_t *rows, char *why, size_t why_cap) {
  const json_t *row;
  size_t i;
  snprintf(why, why_cap, "  %" PRIu64 " queries, %" PRIu64 " lane answers", s->queries, s->answers);
  study_say("linear scan, to the truth", &s->truth_of_linear, why, why_cap);
  study_say("ours, to a linear scan", &s->ours, why, why_cap);
  json_array_foreach (rows, i, row) {
    char who[40];
    snprintf(who, sizeof who, "reference, w %" PRIu64 "%s", member_u64(row, "window"),
             json_is_true(vec_get(row, "fallback")) ? " + fallback" : "");
    study_say(who, &s->references[i], why, why_cap);
  }
}

static int run_study(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected");
  const json_t *occupancies = vec_get(input, "occupancies"), *value;
  const json_t *rows = vec_get(expected, "rows");
  size_t lengths_len;
  const uint64_t *lengths = numbers(vec_get(input, "query_lengths"), &lengths_len);
  const uint32_t seeds = (uint32_t)member_u64(input, "seeds");
  ckf_filter filter;
  study *const s = take(1, sizeof *s);
  s->buckets = (uint32_t)member_u64(input, "buckets");
  s->max_kicks = (uint32_t)member_u64(input, "max_kicks");
  s->chains = (uint32_t)member_u64(input, "chains");
  s->chain_length = (uint32_t)member_u64(input, "chain_length");
  s->keys = take(s->chains * s->chain_length, sizeof *s->keys);
  s->words = take(s->buckets, sizeof *s->words);
  s->rows = take(s->chain_length, sizeof *s->rows);
  s->deltas = take(CKF_DELTA_TABLE_LEN, sizeof *s->deltas);
  s->log = take(s->max_kicks + 1, sizeof *s->log);
  ENSURE(json_array_size(rows) <= STUDY_REFERENCES && s->chain_length <= 512, "larger than known");
  for (uint32_t index = 0; index < seeds; index++) {
    uint64_t state = CKF_DEFAULT_SEED ^ index;
    size_t at;
    s->seed = ckf_rng_draw(&state);
    ENSURE_U64("study seed", s->seed, json_array_get(vec_get(expected, "study_seeds"), index));
    study_open(s);
    json_array_foreach (occupancies, at, value) {
      const uint64_t occupancy = vec_u64(value);
      uint64_t noise = s->seed ^ occupancy * UINT64_C(0xD1B54A32D192ED03);
      s->epoch++;
      for (uint32_t number = 0; number < STUDY_LANES; number++) {
        study_fill(s, &filter, index, number, (uint32_t)(s->buckets * 4 * occupancy / 100), &noise);
        if (study_expect_fill(s, &filter, vec_get(expected, "fill"), index, occupancy, number, why,
                              why_cap) != VEC_PASSED)
          return VEC_FAILED;
      }
      for (uint32_t chain = 0; chain < s->chains; chain++) {
        memset(s->rows, 0, s->chain_length * sizeof *s->rows);
        for (size_t q = 0; q < lengths_len; q++)
          study_ask(s, s->keys + chain * s->chain_length, (uint32_t)lengths[q], chain, index, rows);
      }
    }
  }
  if (study_expect(s, expected, why, why_cap) != VEC_PASSED)
    return VEC_FAILED;
  study_report(s, rows, why, why_cap);
  return VEC_PASSED;
}

/* ---- table: every kind starts with a clean list of memory ---- */

#define KIND(NAME)                                                                                 \
  static int start_##NAME(const json_t *vector, char *why, size_t why_cap) {                       \
    release();                                                                                     \
    const int result = run_##NAME(vector, why, why_cap);                                           \
    release();                                                                                     \
    return result;                                                                                 \
  }

KIND(bucket_count)
KIND(config)
KIND(filter_format)
KIND(xxh3_64)
KIND(chain)
KIND(blocks)
KIND(addressing)
KIND(delta)
KIND(delta_table)
KIND(rng)
KIND(pool_worker)
KIND(packed)
KIND(layout)
KIND(cbi1_frame)
KIND(cbi1_error)
KIND(cbi1_encode_error)
KIND(cbi1_large)
KIND(cbi1_large_delta)
KIND(assembly)
KIND(producer)
KIND(producer_soak)
KIND(end_to_end)
KIND(publisher)
KIND(lane)
KIND(search)
KIND(probe_cost)
KIND(study)

const vec_kind vec_ckf_kinds[] = {
    {"bucket_count", start_bucket_count},
    {"config", start_config},
    {"filter_format", start_filter_format},
    {"xxh3_64", start_xxh3_64},
    {"chain", start_chain},
    {"blocks", start_blocks},
    {"addressing", start_addressing},
    {"delta", start_delta},
    {"delta_table", start_delta_table},
    {"rng", start_rng},
    {"pool_worker", start_pool_worker},
    {"packed", start_packed},
    {"layout", start_layout},
    {"cbi1_frame", start_cbi1_frame},
    {"cbi1_error", start_cbi1_error},
    {"cbi1_encode_error", start_cbi1_encode_error},
    {"cbi1_large", start_cbi1_large},
    {"cbi1_large_delta", start_cbi1_large_delta},
    {"assembly", start_assembly},
    {"producer", start_producer},
    {"producer_soak", start_producer_soak},
    {"end_to_end", start_end_to_end},
    {"publisher", start_publisher},
    {"lane", start_lane},
    {"search", start_search},
    {"probe_cost", start_probe_cost},
    {"study", start_study},
    {NULL, NULL},
};
