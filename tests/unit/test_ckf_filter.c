/* SPDX-License-Identifier: Apache-2.0 */

/* Filter, addressing, configuration: against a model that knows nothing of packed words. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { MODEL_BUCKETS = 64, MODEL_LOG = 4097 };

typedef struct model {
  ckf_format format;
  uint16_t slots[MODEL_BUCKETS][4];
  uint64_t rng;
  uint32_t max_kicks;
  uint32_t bucket[MODEL_LOG], slot[MODEL_LOG]; /* writes of the current insertion */
  uint16_t before[MODEL_LOG];
  size_t writes;
} model;

static uint64_t model_draw(model *m) {
  uint64_t z = m->rng += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static void model_write(model *m, uint32_t bucket, uint32_t slot, uint16_t fp) {
  m->bucket[m->writes] = bucket;
  m->slot[m->writes] = slot;
  m->before[m->writes++] = m->slots[bucket][slot];
  m->slots[bucket][slot] = fp;
}

static bool model_place(model *m, uint32_t bucket, uint16_t fp) {
  for (uint32_t slot = 0; slot < 4; slot++)
    if (m->slots[bucket][slot] == 0) {
      model_write(m, bucket, slot, fp);
      return true;
    }
  return false;
}

static bool model_insert(model *m, uint64_t key, uint32_t kicks) {
  const ckf_probe probe = ckf_probe_make(&m->format, key);
  uint16_t carried = probe.fp;
  m->writes = 0;
  if (model_place(m, probe.a, carried) || model_place(m, probe.b, carried))
    return true;
  uint32_t bucket = model_draw(m) % 2 ? probe.b : probe.a;
  for (uint32_t round = 0; round < kicks; round++) {
    const uint32_t slot = (uint32_t)(model_draw(m) % 4);
    const uint16_t evicted = m->slots[bucket][slot];
    model_write(m, bucket, slot, carried);
    carried = evicted;
    bucket ^= ckf_delta(&m->format, carried);
    if (model_place(m, bucket, carried))
      return true;
  }
  while (m->writes > 0) {
    m->writes--;
    m->slots[m->bucket[m->writes]][m->slot[m->writes]] = m->before[m->writes];
  }
  return false;
}

static bool model_remove(model *m, uint64_t key) {
  const ckf_probe probe = ckf_probe_make(&m->format, key);
  const uint32_t homes[2] = {probe.a, probe.b};
  m->writes = 0;
  for (size_t home = 0; home < 2; home++)
    for (uint32_t slot = 0; slot < 4; slot++)
      if (m->slots[homes[home]][slot] == probe.fp) {
        model_write(m, homes[home], slot, 0);
        return true;
      }
  return false;
}

static bool model_contains(const model *m, uint64_t key) {
  const ckf_probe probe = ckf_probe_make(&m->format, key);
  for (uint32_t slot = 0; slot < 4; slot++)
    if (m->slots[probe.a][slot] == probe.fp || m->slots[probe.b][slot] == probe.fp)
      return true;
  return false;
}

static uint64_t model_word(const model *m, uint32_t bucket) {
  uint64_t word = 0;
  for (int slot = 3; slot >= 0; slot--)
    word = word << 16 | m->slots[bucket][slot];
  return word;
}

/* Undoing the log from its end gives the words before the call. */
static void expect_log(const ckf_filter *f, const uint64_t *before, const uint64_t *after,
                       uint64_t buckets, size_t writes) {
  uint64_t undone[MODEL_BUCKETS];
  size_t len;
  const ckf_image *log = ckf_filter_log(f, &len);
  cr_assert_eq(len, writes);
  memcpy(undone, after, buckets * 8);
  while (len > 0) {
    len--;
    undone[log[len].bucket] = log[len].word;
  }
  cr_assert_arr_eq(undone, before, buckets * 8);
}

static void run_against_model(uint64_t buckets, uint32_t max_kicks, bool table, uint64_t seed) {
  static uint32_t deltas[CKF_DELTA_TABLE_LEN];
  static model m;
  static ckf_image log[MODEL_LOG];
  uint64_t words[MODEL_BUCKETS] = {0}, before[MODEL_BUCKETS];
  uint64_t keys[MODEL_BUCKETS * 4], state = seed;
  size_t held = 0, failures = 0;
  ckf_filter f;
  memset(&m, 0, sizeof m);
  m.format.seed = seed;
  m.format.bucket_count = buckets;
  m.max_kicks = max_kicks;
  m.rng = ckf_rng_start(seed, 0);
  ckf_delta_table(seed, deltas);
  cr_assert_eq(ckf_filter_init(&f, &m.format, max_kicks, words, log, table ? deltas : NULL), 0);
  for (int step = 0; step < 4000; step++) {
    const uint64_t r = ckf_rng_draw(&state), key = r >> 32;
    const bool grow = (step / 500) % 2 == 0;
    memcpy(before, words, sizeof before);
    if (r % 8 == 0) {
      const bool present = ckf_filter_contains(&f, key);
      cr_assert_eq(present, model_contains(&m, key));
      if (!present) {
        cr_assert_eq(ckf_filter_remove(&f, key), CKF_ERR_INVARIANT);
        cr_assert_arr_eq(words, before, sizeof before);
      }
      continue;
    }
    if (held > 0 && r % 8 < (grow ? 3u : 6u)) {
      const size_t at = (size_t)(key % held);
      cr_assert(ckf_filter_contains(&f, keys[at]));
      cr_assert(model_remove(&m, keys[at]));
      cr_assert_eq(ckf_filter_remove(&f, keys[at]), CKF_OK);
      keys[at] = keys[--held];
    } else {
      const bool home_only = r % 8 == 7;
      const bool want = model_insert(&m, key, home_only ? 0 : max_kicks);
      const int rc = home_only ? ckf_filter_insert_home(&f, key) : ckf_filter_insert(&f, key);
      cr_assert_eq(rc, want ? CKF_OK : CKF_ERR_CAPACITY_EXHAUSTED);
      failures += !want;
      if (want)
        keys[held++] = key;
    }
    for (uint32_t bucket = 0; bucket < buckets; bucket++)
      cr_assert_eq(words[bucket], model_word(&m, bucket));
    cr_assert_eq(ckf_filter_rng(&f), m.rng);
    expect_log(&f, before, words, buckets, m.writes);
  }
  cr_assert_gt(failures, 0, "the table was never full");
}

Test(ckf_filter, equals_the_model) {
  run_against_model(2, 3, false, 1);
  run_against_model(4, 500, true, 2);
  run_against_model(16, 1, true, 3);
  run_against_model(64, 20, false, 4);
  run_against_model(64, 4096, true, 5);
}

Test(ckf_filter, batches_equal_single_calls) {
  enum { BUCKETS = 256, KEYS = 1100 };
  const ckf_format format = {77, BUCKETS};
  uint64_t one_words[BUCKETS] = {0}, all_words[BUCKETS] = {0}, keys[KEYS], state = 9;
  static ckf_image one_log[501], all_log[501];
  bool one_ok[KEYS], all_ok[KEYS];
  ckf_filter one, all;
  size_t done = 0;
  cr_assert_eq(ckf_filter_init(&one, &format, 500, one_words, one_log, NULL), CKF_OK);
  cr_assert_eq(ckf_filter_init(&all, &format, 500, all_words, all_log, NULL), CKF_OK);
  for (size_t i = 0; i < KEYS; i++)
    keys[i] = ckf_rng_draw(&state);
  for (size_t i = 0; i < KEYS; i++)
    done += one_ok[i] = ckf_filter_insert(&one, keys[i]) == CKF_OK;
  cr_assert_lt(done, KEYS);
  cr_assert_eq(ckf_filter_insert_n(&all, keys, KEYS, all_ok), done);
  cr_assert_arr_eq(one_ok, all_ok, sizeof one_ok);
  cr_assert_arr_eq(one_words, all_words, sizeof one_words);
  cr_assert_eq(ckf_filter_rng(&one), ckf_filter_rng(&all));

  for (size_t n = 0; n < 40; n++) {
    size_t want = 0;
    for (size_t i = 0; i < n; i++)
      want += one_ok[i] = ckf_filter_contains(&one, keys[i] + n);
    cr_assert_eq(ckf_filter_contains_n(&all, keys, 0, all_ok), 0);
    for (size_t i = 0; i < n; i++)
      keys[i] += n;
    cr_assert_eq(ckf_filter_contains_n(&all, keys, n, all_ok), want);
    cr_assert_arr_eq(one_ok, all_ok, n);
    for (size_t i = 0; i < n; i++)
      keys[i] -= n;
  }
  for (size_t i = 0; i < KEYS; i++)
    one_ok[i] = ckf_filter_remove(&one, keys[i]) == CKF_OK;
  ckf_filter_remove_n(&all, keys, KEYS, all_ok);
  cr_assert_arr_eq(one_ok, all_ok, sizeof one_ok);
  cr_assert_arr_eq(one_words, all_words, sizeof one_words);
}

/* Batches of every length around the library's own, of keys that are held, that are not, and both;
 * in a table where many keys sit in their second homes. */
Test(ckf_filter, finds_in_batches_equal_single_finds) {
  enum { BUCKETS = 512, KEYS = 1800, LEN = 300 };
  const ckf_format format = {5, BUCKETS};
  static uint64_t words[BUCKETS], held[KEYS];
  static uint32_t deltas[CKF_DELTA_TABLE_LEN];
  static ckf_image log[501];
  uint64_t state = 11;
  size_t second = 0;
  ckf_delta_table(format.seed, deltas);
  for (int with_table = 0; with_table < 2; with_table++) {
    ckf_filter f;
    memset(words, 0, sizeof words);
    cr_assert_eq(ckf_filter_init(&f, &format, 500, words, log, with_table ? deltas : NULL), CKF_OK);
    for (size_t i = 0; i < KEYS; i++) {
      held[i] = ckf_rng_draw(&state);
      cr_assert_eq(ckf_filter_insert(&f, held[i]), CKF_OK);
    }
    for (size_t n = 0; n <= LEN; n++)
      for (int kind = 0; kind < 3; kind++) {
        uint64_t keys[LEN];
        bool want[LEN + 1], got[LEN + 1];
        size_t sum = 0;
        for (size_t i = 0; i < n; i++) {
          const uint64_t draw = ckf_rng_draw(&state);
          const ckf_probe probe = ckf_probe_make(&format, held[draw % KEYS]);
          const bool present = kind == 0 || (kind == 1 && draw >> 32 & 1);
          keys[i] = present ? held[draw % KEYS] : ckf_rng_draw(&state);
          second += present && !ckf_word_contains(words[probe.a], probe.fp);
          sum += want[i] = ckf_filter_contains(&f, keys[i]);
        }
        got[n] = true; /* must not be written */
        cr_assert_eq(ckf_filter_contains_n(&f, keys, n, got), sum, "%zu keys", n);
        cr_assert_arr_eq(got, want, n);
        cr_assert(got[n]);
        cr_assert_eq(ckf_filter_contains_n(&f, keys, n, NULL), sum);
      }
  }
  cr_assert_gt(second, 1000);
}

Test(ckf_filter, homes_differ_and_lead_to_each_other) {
  for (uint64_t buckets = 2; buckets <= 4096; buckets *= 8) {
    const ckf_format format = {CKF_DEFAULT_SEED, buckets};
    for (uint64_t key = 0; key < 10000; key++) {
      const ckf_probe probe = ckf_probe_make(&format, key);
      cr_assert_neq(probe.fp, 0);
      cr_assert_neq(probe.a, probe.b);
      cr_assert_lt(probe.a, buckets);
      cr_assert_lt(probe.b, buckets);
      cr_assert_eq(probe.b ^ ckf_delta(&format, probe.fp), probe.a);
    }
  }
}

Test(ckf_filter, words_are_read_slot_by_slot) {
  uint64_t state = 3;
  for (int i = 0; i < 200000; i++) {
    uint64_t word = ckf_rng_draw(&state);
    const uint64_t shape = ckf_rng_draw(&state);
    uint16_t fp = (uint16_t)(shape >> 16);
    unsigned empty = 4, first = 4;
    for (unsigned slot = 4; slot-- > 0;) { /* small values collide often and borrow across slots */
      if (shape >> slot & 1)
        word &= ~(UINT64_C(0xFFFE) << slot * 16);
      if (shape >> (4 + slot) & 1)
        word &= ~(UINT64_C(0xFFFF) << slot * 16);
    }
    fp = (uint16_t)(shape >> 8 & 1 ? 1 + (fp & 1) : fp ? fp : 1);
    for (unsigned slot = 4; slot-- > 0;) {
      const uint16_t held = (uint16_t)(word >> slot * 16);
      empty = held == 0 ? slot : empty;
      first = held == fp ? slot : first;
    }
    cr_assert_eq(ckf_word_first_empty(word), empty);
    cr_assert_eq(ckf_word_first(word, fp), first);
    cr_assert_eq(ckf_word_contains(word, fp), first < 4);
  }
}

Test(ckf_filter, refuses_impossible_set_ups) {
  ckf_format format = {1, 4};
  uint64_t words[4] = {0};
  ckf_image log[2];
  ckf_filter f;
  cr_assert_eq(ckf_filter_init_abi(&f, sizeof f - 1, &format, 1, words, log, NULL), CKF_ERR_ABI);
  cr_assert_eq(ckf_filter_init(&f, &format, 1, NULL, log, NULL), CKF_ERR_ARG);
  cr_assert_eq(ckf_filter_init(&f, &format, 0, words, log, NULL), CKF_ERR_MAX_KICKS);
  cr_assert_eq(ckf_filter_init(&f, &format, 4097, words, log, NULL), CKF_ERR_MAX_KICKS);
  format.bucket_count = 3;
  cr_assert_eq(ckf_filter_init(&f, &format, 1, words, log, NULL), CKF_ERR_FORMAT_BUCKET_COUNT);
}

Test(ckf_filter, every_error_has_a_name_and_a_text) {
  size_t named = 0;
  cr_assert_str_eq(ckf_errname(CKF_OK), "");
  for (int err = -1; err > -300; err--) {
    const bool known = strcmp(ckf_errname(err), "Unknown") != 0;
    cr_assert_eq(known, strcmp(ckf_strerror(err), "unknown error") != 0);
    named += known;
  }
  cr_assert_eq(named, 54);
}
