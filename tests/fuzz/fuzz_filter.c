/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_filter: operations on few keys, so that homes overflow, against the rules of insertion and
 * removal slot by slot, and against a multiset of keys: what was inserted and not removed is found.
 *
 * SECURITY.md: 4, 11, 12, 15.
 */

#include "frames.h"

enum { BUCKETS_CAP = 32, KEYS = 256, KICKS_CAP = 8 };

/* Slots one by one. */
typedef struct model {
  uint64_t seed, rng;
  uint32_t buckets, max_kicks;
  uint16_t slots[BUCKETS_CAP][4];
  uint32_t copies[KEYS];
  ckf_image log[KICKS_CAP + 1];
  size_t log_len;
} model;

static uint64_t model_word(const model *m, uint32_t bucket) {
  uint64_t word = 0;
  for (int i = 0; i < 4; i++)
    word |= (uint64_t)m->slots[bucket][i] << 16 * i;
  return word;
}

static uint64_t model_draw(model *m) {
  m->rng += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = m->rng;
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

static uint32_t model_other(const model *m, uint32_t bucket, uint16_t fp) {
  const uint8_t bytes[2] = {(uint8_t)fp, (uint8_t)(fp >> 8)};
  const uint64_t hash = XXH3_64bits_withSeed(bytes, 2, m->seed ^ UINT64_C(0x9E3779B97F4A7C15));
  const uint32_t delta = (uint32_t)hash & (m->buckets - 1);
  return bucket ^ (delta ? delta : 1);
}

static void model_homes(const model *m, uint64_t key, uint16_t *fp, uint32_t homes[2]) {
  uint8_t bytes[8];
  frame_put(bytes, 0, key, 8);
  const uint64_t mixed = XXH3_64bits_withSeed(bytes, 8, m->seed);
  *fp = (uint16_t)mixed ? (uint16_t)mixed : 1;
  homes[0] = (uint32_t)(mixed >> 16) & (m->buckets - 1);
  homes[1] = model_other(m, homes[0], *fp);
}

static int model_slot(const model *m, uint32_t bucket, uint16_t value) {
  for (int i = 0; i < 4; i++)
    if (m->slots[bucket][i] == value)
      return i;
  return -1;
}

static void model_write(model *m, uint32_t bucket, int slot, uint16_t value) {
  m->log[m->log_len++] = (ckf_image){bucket, model_word(m, bucket)};
  m->slots[bucket][slot] = value;
}

static int model_insert(model *m, uint64_t key, uint32_t max_kicks) {
  uint16_t fp, before[BUCKETS_CAP][4];
  uint32_t homes[2];
  m->log_len = 0;
  memcpy(before, m->slots, sizeof before);
  model_homes(m, key, &fp, homes);
  for (int i = 0; i < 2; i++)
    if (model_slot(m, homes[i], 0) >= 0) {
      model_write(m, homes[i], model_slot(m, homes[i], 0), fp);
      return CKF_OK;
    }
  uint32_t at = homes[model_draw(m) & 1];
  for (uint32_t round = 0; round < max_kicks; round++) {
    const int slot = (int)(model_draw(m) & 3);
    const uint16_t evicted = m->slots[at][slot];
    model_write(m, at, slot, fp);
    fp = evicted;
    at = model_other(m, at, fp);
    if (model_slot(m, at, 0) >= 0) {
      model_write(m, at, model_slot(m, at, 0), fp);
      return CKF_OK;
    }
  }
  memcpy(m->slots, before, sizeof before);
  m->log_len = 0;
  return CKF_ERR_CAPACITY_EXHAUSTED;
}

static bool model_contains(const model *m, uint64_t key) {
  uint16_t fp;
  uint32_t homes[2];
  model_homes(m, key, &fp, homes);
  return model_slot(m, homes[0], fp) >= 0 || model_slot(m, homes[1], fp) >= 0;
}

static int model_remove(model *m, uint64_t key) {
  uint16_t fp;
  uint32_t homes[2];
  m->log_len = 0;
  model_homes(m, key, &fp, homes);
  for (int i = 0; i < 2; i++)
    if (model_slot(m, homes[i], fp) >= 0) {
      model_write(m, homes[i], model_slot(m, homes[i], fp), 0);
      return CKF_OK;
    }
  return CKF_ERR_INVARIANT;
}

static void check(const model *m, const ckf_filter *filter, const uint64_t *words,
                  bool log_counts) {
  size_t log_len;
  const ckf_image *log = ckf_filter_log(filter, &log_len);
  for (uint32_t i = 0; i < m->buckets; i++)
    FUZZ_CHECK(words[i] == model_word(m, i));
  FUZZ_CHECK(ckf_filter_rng(filter) == m->rng);
  if (!log_counts)
    return;
  FUZZ_CHECK(log_len == m->log_len);
  for (size_t i = 0; i < log_len; i++)
    FUZZ_CHECK(log[i].bucket == m->log[i].bucket && log[i].word == m->log[i].word);
}

/* A batch is its keys one after the other. */
static void step_batch(model *m, ckf_filter *filter, fuzz_input *in, unsigned op) {
  uint64_t keys[KEYS];
  bool ok[KEYS];
  const size_t n = fuzz_below(in, KEYS);
  size_t good = 0;
  const uint8_t first = fuzz_byte(in), step = fuzz_byte(in);
  for (size_t i = 0; i < n; i++)
    keys[i] = (first + i * step) % KEYS;
  const size_t got = op == 0   ? ckf_filter_insert_n(filter, keys, n, ok)
                     : op == 1 ? ckf_filter_remove_n(filter, keys, n, ok)
                               : ckf_filter_contains_n(filter, keys, n, ok);
  for (size_t i = 0; i < n; i++) {
    const bool expected = op == 0   ? model_insert(m, keys[i], m->max_kicks) == CKF_OK
                          : op == 1 ? model_remove(m, keys[i]) == CKF_OK
                                    : model_contains(m, keys[i]);
    FUZZ_CHECK(ok[i] == expected);
    good += expected;
    if (op == 0 && expected)
      m->copies[keys[i]]++;
    if (op == 1 && expected && m->copies[keys[i]] == 0) /* took the copy of a twin */
      memset(m->copies, 0, sizeof m->copies);
    else if (op == 1 && expected)
      m->copies[keys[i]]--;
  }
  FUZZ_CHECK(got == good);
}

static void step(model *m, ckf_filter *filter, fuzz_input *in, bool *log_counts) {
  const uint8_t op = fuzz_byte(in) % 12;
  const uint64_t key = fuzz_below(in, KEYS);
  *log_counts = op < 9;
  if (op < 5) {
    const int rc = model_insert(m, key, m->max_kicks);
    FUZZ_CHECK(ckf_filter_insert(filter, key) == rc);
    m->copies[key] += rc == CKF_OK;
  } else if (op == 5) {
    const int rc = model_insert(m, key, 0);
    FUZZ_CHECK(ckf_filter_insert_home(filter, key) == rc);
    m->copies[key] += rc == CKF_OK;
  } else if (op < 9) { /* only what is there: a twin's copy would be taken for the key's */
    if (m->copies[key] > 0) {
      m->copies[key]--;
      FUZZ_CHECK(model_remove(m, key) == CKF_OK);
      FUZZ_CHECK(ckf_filter_remove(filter, key) == CKF_OK);
    } else if (!model_contains(m, key)) {
      FUZZ_CHECK(model_remove(m, key) == CKF_ERR_INVARIANT);
      FUZZ_CHECK(ckf_filter_remove(filter, key) == CKF_ERR_INVARIANT);
    } else {
      *log_counts = false;
    }
  } else {
    step_batch(m, filter, in, op - 9u);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static uint32_t tables[2][CKF_DELTA_TABLE_LEN]; /* one per seed, the same for every input */
  static bool filled[2];
  fuzz_input in = {data, len};
  const uint8_t shape = fuzz_byte(&in);
  model m = {.seed = shape & 1 ? CKF_DEFAULT_SEED : 0x5EED, .buckets = 2u << (shape >> 1) % 5};
  const ckf_format format = {m.seed, m.buckets};
  uint64_t *words = fuzz_alloc(m.buckets * 8);
  ckf_filter filter;
  m.max_kicks = 1 + shape / 32u % KICKS_CAP;
  ckf_image *log = fuzz_alloc((m.max_kicks + 1) * sizeof *log);
  if (!filled[shape & 1])
    ckf_delta_table(m.seed, tables[shape & 1]);
  filled[shape & 1] = true;
  FUZZ_CHECK(ckf_filter_init(&filter, &format, m.max_kicks, words, log,
                             shape & 16 ? tables[shape & 1] : NULL) == CKF_OK);
  m.rng = ckf_filter_rng(&filter);
  while (in.left > 0) {
    bool log_counts;
    step(&m, &filter, &in, &log_counts);
    check(&m, &filter, words, log_counts);
    for (uint64_t key = 0; key < KEYS; key++)
      FUZZ_CHECK(m.copies[key] == 0 || ckf_filter_contains(&filter, key));
  }
  free(log);
  free(words);
  return 0;
}
