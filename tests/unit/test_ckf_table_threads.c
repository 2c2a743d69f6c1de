/* SPDX-License-Identifier: Apache-2.0 */

/* Many readers, one writer per lane: what a reader sees of a lane that it sees as ready. Also built
 * with the thread sanitizer. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 256, READERS = 4, WRITERS = 3, LIVES = 1500, DELTAS = 6, LEN = 40 };

static const uint32_t numbers[WRITERS] = {0, 5, 15};

static ckf_table table;
static uint64_t keys[LEN];
static uint32_t finished;
/* What readers may find in a lane, counted by its writer before and after it tears a snapshot down:
 * while both are the same and even, the lane is between assignment and retirement of one life. */
static uint64_t lives[CKF_LANES];

/* Every word of one life carries the life's number twice, so a torn word shows too. */
static uint64_t word_of(uint64_t life) { return life << 32 | life; }

typedef struct writer {
  pthread_t thread;
  uint32_t number;
  const char *wrong;
} writer;

static void *write_lives(void *arg) {
  writer *const w = arg;
  const ckf_manifest *const m = ckf_table_manifest(&table);
  ckf_identity identity;
  ckf_lane lane;
  uint64_t words[BUCKETS];
  memset(&identity, 0, sizeof identity);
  identity.pool = m->pools[w->number];
  identity.format = m->format;
  if (ckf_lane_claim(&lane, &table, w->number) != CKF_OK)
    w->wrong = "claim";
  for (uint64_t life = 1; life <= LIVES && !w->wrong; life++) {
    const ckf_lease lease = {m->consumer_instance, (uint8_t)w->number, life};
    identity.producer_incarnation = life;
    if (ckf_lane_assign(&lane, &identity, &lease) != CKF_OK)
      w->wrong = "assign";
    CKF_STORE_RELEASE(&lives[w->number], 2 * life + 1); /* from here on words change */
    for (size_t i = 0; i < BUCKETS; i++)
      words[i] = word_of(life);
    if (ckf_lane_stage(&lane, &identity, &lease, 10, words, BUCKETS).result !=
        CKF_LANE_SNAPSHOT_INSTALLED)
      w->wrong = "stage";
    CKF_STORE_RELEASE(&lives[w->number], 2 * life);
    ckf_lane_activate(&lane);
    for (uint64_t d = 0; d < DELTAS; d++) {
      ckf_image images[8];
      for (uint32_t i = 0; i < 8; i++)
        images[i] = (ckf_image){(uint32_t)(life + d * 8 + i) % BUCKETS, word_of(life)};
      if (ckf_lane_apply_delta(&lane, &identity, &lease, 10 + d, 11 + d, images, 8).result !=
          CKF_LANE_DELTA_APPLIED)
        w->wrong = "delta";
    }
    if (life % 3 == 0)
      ckf_lane_retire(&lane);
  }
  ckf_lane_release(&lane);
  return NULL;
}

static const char *look(uint32_t number) {
  const uint64_t before = CKF_LOAD_ACQUIRE(&lives[number]);
  if (!(ckf_table_ready(&table) >> number & 1))
    return NULL;
  uint64_t first = 0;
  bool mixed = false;
  for (uint32_t b = 0; b < BUCKETS; b++) {
    const uint64_t word = ckf_table_word(&table, number, b);
    if (word >> 32 != (word & UINT32_MAX))
      return "a torn word";
    first = b ? first : word;
    mixed |= word != first;
  }
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  if (before % 2 == 0 && before != 0 && CKF_LOAD_RELAXED(&lives[number]) == before &&
      (mixed || first != word_of(before / 2)))
    return "words of another incarnation behind a ready lane";
  return NULL;
}

static void *read_lanes(void *unused) {
  const char *wrong = NULL;
  ckf_matches matches;
  ckf_query query;
  (void)unused;
  while (!CKF_LOAD_ACQUIRE(&finished) && !wrong) {
    for (size_t i = 0; i < WRITERS && !wrong; i++)
      wrong = look(numbers[i]);
    ckf_query_init(&query, NULL, LEN, keys, LEN);
    if (ckf_table_find(&table, &query, &matches) == CKF_OK && matches.lanes & ~0x8021u)
      wrong = "a lane that has no writer";
  }
  return (void *)(uintptr_t)wrong;
}

Test(ckf_table_threads, readers_see_whole_words_of_one_incarnation, .timeout = 120) {
  pthread_t readers[READERS];
  writer writers[WRITERS];
  ckf_manifest m;
  if (!__atomic_always_lock_free(sizeof *keys, 0))
    cr_skip_test("no atomic words of 64 bits: there, ckf.h is for one thread");
  memset(&m, 0, sizeof m);
  m.consumer_instance = 3;
  m.format = (ckf_format){CKF_DEFAULT_SEED, BUCKETS};
  for (size_t i = 0; i < WRITERS; i++) {
    m.configured |= 1u << numbers[i];
    m.pools[numbers[i]].dc_id = i;
  }
  const size_t len = ckf_table_mem_size(&m);
  void *memory = malloc(len);
  cr_assert_eq(ckf_table_init(&table, &m, 2, memory, len), CKF_OK);
  for (size_t i = 0; i < LEN; i++)
    keys[i] = i * UINT64_C(0x9E3779B97F4A7C15);
  for (size_t i = 0; i < READERS; i++)
    cr_assert_eq(pthread_create(&readers[i], NULL, read_lanes, NULL), 0);
  for (size_t i = 0; i < WRITERS; i++) {
    writers[i] = (writer){0, numbers[i], NULL};
    cr_assert_eq(pthread_create(&writers[i].thread, NULL, write_lives, &writers[i]), 0);
  }
  for (size_t i = 0; i < WRITERS; i++) {
    pthread_join(writers[i].thread, NULL);
    cr_assert_null(writers[i].wrong, "%s", writers[i].wrong);
  }
  CKF_STORE_RELEASE(&finished, 1);
  for (size_t i = 0; i < READERS; i++) {
    void *wrong;
    pthread_join(readers[i], &wrong);
    cr_assert_null(wrong, "%s", (const char *)wrong);
  }
  cr_assert_eq(ckf_table_ready(&table), 0);
  free(memory);
}
