/* SPDX-License-Identifier: Apache-2.0 */

/* One writer per lane that does everything a lane allows, readers that ask in every way: while a
 * lane's words stand still, its answer is exact. Also built with the thread sanitizer. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 64, LEN = 24, READERS = 3, WRITERS = 2, STEPS = 2000, WAYS = 4 };

static const uint32_t numbers[WRITERS] = {2, 9};

static ckf_table table;
static uint64_t locals[LEN], keys[LEN];
static uint64_t contents[LEN + 1][BUCKETS]; /* [d]: a filter of the first d keys */
static uint32_t finished;
/* Per lane, only growing: 2 * life while its words are contents[life % (LEN + 1)], odd while they
 * change. */
static uint64_t lives[CKF_LANES];

static uint64_t draw(uint64_t *state, uint64_t n) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state % n;
}

/* ---- writers ---- */

typedef struct writer {
  pthread_t thread;
  uint32_t number;
  ckf_lane lane;
  ckf_identity identity;
  ckf_lease lease;
  uint64_t random, life, sequence;
  bool assigned, ready; /* what the lane must believe */
  bool asked;           /* what readers must see */
  const char *wrong;
} writer;

static const uint64_t *words_of(uint64_t life) { return contents[life % (LEN + 1)]; }

static void expect(writer *w, bool fine, const char *what) {
  w->wrong = fine || w->wrong ? w->wrong : what;
}

static void words_change(const writer *w) {
  CKF_STORE_RELEASE(&lives[w->number], 2 * w->life + 1);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void words_stand(const writer *w) { CKF_STORE_RELEASE(&lives[w->number], 2 * w->life); }

static void install(writer *w) {
  if (!w->assigned || draw(&w->random, 2) == 0) {
    w->lease.assignment_epoch++;
    w->identity.producer_incarnation++;
    expect(w, ckf_lane_assign(&w->lane, &w->identity, &w->lease) == CKF_OK, "assign");
    w->assigned = true;
  }
  words_change(w);
  w->life++;
  w->sequence = draw(&w->random, 4) ? draw(&w->random, 1000) : UINT64_MAX - draw(&w->random, 3);
  expect(w,
         ckf_lane_stage(&w->lane, &w->identity, &w->lease, w->sequence, words_of(w->life), BUCKETS)
                 .result == CKF_LANE_SNAPSHOT_INSTALLED,
         "stage");
  words_stand(w);
  ckf_lane_activate(&w->lane);
  w->ready = w->asked = true;
}

static void refused(writer *w, ckf_lane_outcome out, enum ckf_lane_fault fault) {
  expect(w, out.result == CKF_LANE_DEACTIVATED && out.fault == fault, ckf_lane_fault_name(fault));
  w->ready = w->asked = false;
}

static void apply(writer *w, bool damaged) {
  const uint64_t *const from = words_of(w->life), *const to = words_of(w->life + 1);
  ckf_image images[BUCKETS + 1];
  size_t n = 0;
  for (uint32_t b = 0; b < BUCKETS; b++) {
    if (from[b] != to[b])
      images[n++] = (ckf_image){b, to[b]};
  }
  if (damaged) {
    images[n] = images[0];
    n++;
  } else if (w->sequence != UINT64_MAX) {
    words_change(w);
  }
  const ckf_lane_outcome out = ckf_lane_apply_delta(&w->lane, &w->identity, &w->lease, w->sequence,
                                                    w->sequence + 1, images, n);
  if (w->sequence == UINT64_MAX) { /* + 1 is 0 */
    expect(w, out.result == CKF_LANE_IGNORED_STALE, "a delta behind the last sequence");
  } else if (damaged) {
    refused(w, out, CKF_FAULT_DUPLICATE_IMAGE);
  } else {
    expect(w, out.result == CKF_LANE_DELTA_APPLIED, "delta");
    w->sequence++;
    w->life++;
    words_stand(w);
  }
}

static void step(writer *w) {
  const uint64_t kind = draw(&w->random, 16);
  if (!w->ready) {
    install(w);
  } else if (kind < 8) {
    apply(w, false);
  } else if (kind == 8) {
    apply(w, true);
  } else if (kind == 9) {
    ckf_table_withdraw(&table, 1u << w->number);
    w->asked = false;
  } else if (kind == 10) {
    expect(w,
           ckf_lane_drain(&w->lane, &w->lease, w->sequence).result == CKF_LANE_DRAIN_ACKNOWLEDGED,
           "drain");
  } else if (kind == 11) {
    ckf_lane_release(&w->lane);
    expect(w, ckf_lane_claim(&w->lane, &table, w->number) == CKF_OK, "claim");
    w->assigned = w->ready = w->asked = false;
  } else if (kind == 12) {
    ckf_lane_retire(&w->lane);
    w->assigned = w->ready = w->asked = false;
  } else if (kind == 13 && w->sequence != UINT64_MAX) {
    refused(w,
            ckf_lane_install(&w->lane, &w->identity, &w->lease, w->sequence + 1, words_of(w->life),
                             BUCKETS),
            CKF_FAULT_SNAPSHOT_WHILE_READY);
  } else {
    expect(w,
           ckf_lane_install(&w->lane, &w->identity, &w->lease, w->sequence, words_of(w->life + 1),
                            BUCKETS)
                   .result == CKF_LANE_IGNORED_STALE,
           "the same snapshot again");
  }
}

static void *write_lane(void *arg) {
  writer *const w = arg;
  expect(w, ckf_lane_claim(&w->lane, &table, w->number) == CKF_OK, "first claim");
  for (size_t i = 0; i < STEPS && !w->wrong; i++) {
    step(w);
    expect(w, ckf_lane_ready(&w->lane) == w->ready, "what the writer believes");
    expect(w, (ckf_table_ready(&table) >> w->number & 1) == w->asked, "what readers see");
    for (uint32_t b = 0; b < BUCKETS && w->life > 0; b++)
      expect(w, ckf_table_word(&table, w->number, b) == words_of(w->life)[b], "words");
    if (i % 8 == 0)
      sched_yield();
  }
  ckf_lane_release(&w->lane);
  return NULL;
}

/* ---- readers ---- */

typedef struct reader {
  pthread_t thread;
  uint64_t random;
  uint64_t exact[WAYS]; /* answers that could be compared */
  const char *wrong;
} reader;

static void make_locals(void *unused, uint64_t *out, size_t from, size_t to) {
  (void)unused;
  memcpy(out + from, locals + from, (to - from) * sizeof *out);
}

static int ask(uint64_t *random, uint64_t way, ckf_matches *out) {
  uint64_t some_locals[LEN], some_keys[LEN];
  ckf_query query;
  memcpy(some_keys, keys, sizeof keys);
  if (draw(random, 2))
    ckf_query_init(&query, NULL, LEN, some_keys, LEN);
  else
    ckf_query_init_lazy(&query, some_locals, LEN, some_keys, draw(random, LEN), make_locals, NULL);
  if (way == 0)
    return ckf_table_find(&table, &query, out);
  if (way == 1) { /* ready or not */
    ckf_table_find_captured(&table, 1u << numbers[0] | 1u << numbers[1] | 1, &query, out);
    return CKF_OK;
  }
  memset(out, 0, sizeof *out);
  for (size_t i = 0; i < WRITERS && way == 2; i++) {
    out->lanes |= (uint32_t)draw(random, 2) << numbers[i];
    out->depths[numbers[i]] = (uint32_t)draw(random, LEN + 5);
  }
  return ckf_table_find_again(&table, &query, out); /* way 3: without guesses */
}

static void look(reader *r, uint64_t way) {
  uint64_t before[WRITERS];
  ckf_matches matches;
  for (size_t i = 0; i < WRITERS; i++)
    before[i] = CKF_LOAD_ACQUIRE(&lives[numbers[i]]);
  const int rc = ask(&r->random, way, &matches);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  if ((rc == CKF_OK) != (matches.lanes != 0) || (rc != CKF_OK && rc != CKF_ERR_UNAVAILABLE))
    r->wrong = "an answer of nobody, or nobody's answer";
  if (matches.lanes & ~(1u << numbers[0] | 1u << numbers[1]))
    r->wrong = "a lane that is not configured";
  for (size_t i = 0; i < WRITERS; i++) {
    const uint64_t life = before[i] / 2;
    const uint32_t depth = matches.depths[numbers[i]];
    if (!(matches.lanes >> numbers[i] & 1) || before[i] % 2 != 0 || life == 0 ||
        CKF_LOAD_RELAXED(&lives[numbers[i]]) != before[i])
      continue;
    r->exact[way]++;
    if (depth != life % (LEN + 1))
      r->wrong = "a depth that the words do not have";
  }
}

static void *read_lanes(void *arg) {
  reader *const r = arg;
  while (!CKF_LOAD_ACQUIRE(&finished) && !r->wrong)
    look(r, draw(&r->random, WAYS));
  return NULL;
}

/* Hits of the first d keys and no others, so that every search is exact. */
static void fill_contents(const ckf_format *format) {
  ckf_filter filter;
  ckf_image log[501];
  for (size_t i = 0; i < LEN; i++) {
    locals[i] = i * 77 + 13;
    keys[i] = i ? ckf_child(keys[i - 1], locals[i]) : locals[i];
  }
  for (size_t d = 0; d <= LEN; d++) {
    cr_assert_eq(ckf_filter_init(&filter, format, 500, contents[d], log, NULL), CKF_OK);
    for (size_t i = 0; i < d; i++)
      cr_assert_eq(ckf_filter_insert(&filter, keys[i]), CKF_OK);
    for (size_t i = 0; i < LEN; i++)
      cr_assert_eq(ckf_filter_contains(&filter, keys[i]), i < d);
  }
}

Test(ckf_lane_threads, answers_are_exact_while_the_words_stand_still, .timeout = 240) {
  writer writers[WRITERS];
  reader readers[READERS];
  uint64_t exact[WAYS] = {0};
  ckf_manifest m;
  if (!__atomic_always_lock_free(sizeof *keys, 0))
    cr_skip_test("no atomic words of 64 bits: there, ckf.h is for one thread");
  memset(&m, 0, sizeof m);
  memset(writers, 0, sizeof writers);
  memset(readers, 0, sizeof readers);
  m.consumer_instance = 3;
  m.format = (ckf_format){CKF_DEFAULT_SEED, BUCKETS};
  fill_contents(&m.format);
  for (size_t i = 0; i < WRITERS; i++) {
    m.configured |= 1u << numbers[i];
    m.pools[numbers[i]].dc_id = i;
  }
  const size_t len = ckf_table_mem_size(&m);
  void *memory = malloc(len);
  cr_assert_eq(ckf_table_init(&table, &m, 2, memory, len), CKF_OK);
  for (size_t i = 0; i < READERS; i++) {
    readers[i].random = 1000 + i;
    cr_assert_eq(pthread_create(&readers[i].thread, NULL, read_lanes, &readers[i]), 0);
  }
  for (size_t i = 0; i < WRITERS; i++) {
    writers[i].number = numbers[i];
    writers[i].random = 17 + i;
    writers[i].lease = (ckf_lease){3, (uint8_t)numbers[i], 0};
    writers[i].identity.pool = m.pools[numbers[i]];
    writers[i].identity.format = m.format;
    cr_assert_eq(pthread_create(&writers[i].thread, NULL, write_lane, &writers[i]), 0);
  }
  for (size_t i = 0; i < WRITERS; i++)
    pthread_join(writers[i].thread, NULL);
  CKF_STORE_RELEASE(&finished, 1);
  for (size_t i = 0; i < READERS; i++) {
    pthread_join(readers[i].thread, NULL);
    for (size_t way = 0; way < WAYS; way++)
      exact[way] += readers[i].exact[way];
  }
  for (size_t i = 0; i < WRITERS; i++)
    cr_assert_null(writers[i].wrong, "writer %zu: %s", i, writers[i].wrong);
  for (size_t i = 0; i < READERS; i++)
    cr_assert_null(readers[i].wrong, "reader %zu: %s", i, readers[i].wrong);
  for (size_t way = 0; way < WAYS; way++)
    cr_assert_gt(exact[way], 0, "nothing was compared in way %zu", way);
  cr_assert_eq(ckf_table_ready(&table), 0);
  free(memory);
}
