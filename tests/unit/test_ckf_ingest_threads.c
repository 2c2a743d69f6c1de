/* SPDX-License-Identifier: Apache-2.0 */

/* Workers, submitters, readers, a watchdog and somebody who retires lanes at random, all at once;
 * one worker dies on the way. Also built with the thread sanitizer. */

#include "test_ckf_ingest.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

enum { WORKERS = 4, READERS = 2, LANES = 6, LIVES = 60, DELTAS = 40, DYING = 3 };

/* Workers 2 3 1 2 0 3 of consumer 17; those of worker DYING end early. */
static const uint32_t lanes[LANES] = {0, 1, 2, 3, 9, 13};

static fixture f;
static struct meeting {
  pthread_mutex_t lock, sleep;
  pthread_cond_t cond;
  uint64_t rung; /* guarded by `sleep` */
} meetings[WORKERS + 1];
static uint32_t finished;
static uint64_t lives[CKF_LANES]; /* 2 * life: all words are of it; odd: they may change */

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- hooks ---- */

static void lock(void *user, uint32_t number) {
  (void)user;
  pthread_mutex_lock(&meetings[number].lock);
}

static void unlock(void *user, uint32_t number) {
  (void)user;
  pthread_mutex_unlock(&meetings[number].lock);
}

static void wake(void *user, uint32_t number) {
  (void)user;
  pthread_mutex_lock(&meetings[number].sleep);
  meetings[number].rung++;
  pthread_cond_broadcast(&meetings[number].cond);
  pthread_mutex_unlock(&meetings[number].sleep);
}

static uint64_t rung(uint32_t number) {
  pthread_mutex_lock(&meetings[number].sleep);
  const uint64_t n = meetings[number].rung;
  pthread_mutex_unlock(&meetings[number].sleep);
  return n;
}

/* Sleeps until somebody has rung since `before`: a lost wake hangs the test. */
static void sleep_since(uint32_t number, uint64_t before) {
  pthread_mutex_lock(&meetings[number].sleep);
  while (meetings[number].rung == before)
    pthread_cond_wait(&meetings[number].cond, &meetings[number].sleep);
  pthread_mutex_unlock(&meetings[number].sleep);
}

/* ---- threads ---- */

static void *run_worker(void *arg) {
  const uint32_t worker = (uint32_t)(uintptr_t)arg;
  ptrdiff_t n = 0, sum = 0;
  while (n >= 0) {
    const uint64_t before = rung(worker);
    n = ckf_ingest_work(&f.in, worker, now_ns(), 8);
    sum += n;
    if (worker == DYING && sum > 300) {
      ckf_ingest_worker_failed(&f.in, worker);
      return NULL;
    }
    if (n == 0)
      sleep_since(worker, before);
  }
  return n == CKF_INGEST_ERR_CLOSED ? NULL : (void *)(uintptr_t) "a worker ended";
}

typedef struct submitter {
  uint32_t lane;
  uint64_t wait_for; /* lives that have to be complete: every delta applied, and drained */
  uint64_t life, complete, sequence;
  uint64_t words[BUCKETS];
  const char *wrong;
} submitter;

static uint64_t word_of(uint64_t life) { return life << 32 | life; }

static int await(ckf_ingest_ticket *t) {
  for (;;) {
    const uint64_t before = rung(WORKERS);
    if (ckf_ingest_poll(&f.in, t, now_ns()))
      return t->error;
    sleep_since(WORKERS, before);
  }
}

/* Every other life waits for its worker; the rest run into the limits whenever the machine is busy.
 */
static void pace(const submitter *s) {
  ckf_ingest_lane_view view = {0};
  while (s->life % 2 && ckf_ingest_lane_get(&f.in, s->lane, &view) == CKF_OK &&
         view.state == CKF_INGEST_ACTIVE && view.outstanding_images > BUCKETS / 2)
    sched_yield();
}

/* One life of a lane: 1 = complete, 0 = it was retired on the way, negative = its worker is gone.
 */
static int live(submitter *s) {
  ckf_ingest_ticket t;
  uint64_t sequence = s->life * 1000;
  const ckf_identity *const identity = &f.identities[s->lane];
  const ckf_lease lease = {17, (uint8_t)s->lane, ++s->life};
  int rc;
  CKF_STORE_RELEASE(&lives[s->lane], 2 * s->life + 1);
  if ((rc = ckf_ingest_assign(&f.in, identity, &lease)) != CKF_OK)
    return rc;
  for (size_t i = 0; i < BUCKETS; i++)
    s->words[i] = word_of(s->life);
  rc = ckf_ingest_submit_snapshot(&f.in, identity, &lease, sequence, s->words, BUCKETS, &t,
                                  now_ns());
  if (rc == CKF_OK)
    rc = await(&t);
  if (rc != CKF_OK)
    return rc == CKF_INGEST_ERR_WORKER_FAILED ? rc : 0;
  CKF_STORE_RELEASE(&lives[s->lane], 2 * s->life);
  for (uint32_t d = 0; d < DELTAS; d++, sequence++) {
    uint8_t images[4 * CKF_CBI1_IMAGE_BYTES];
    for (uint32_t i = 0; i < 4; i++)
      ckf_batch_put(images, i, (ckf_image){(d * 4 + i) % BUCKETS, word_of(s->life)});
    const ckf_delta_out delta = {identity, &lease, sequence, sequence + 1, {images, 4}};
    pace(s);
    rc = ckf_ingest_submit_delta(&f.in, &delta, now_ns());
    memset(images, 0xFF, sizeof images); /* they were copied */
    if (rc != CKF_OK)
      return rc == CKF_INGEST_ERR_WORKER_FAILED ? rc : 0;
  }
  rc = ckf_ingest_submit_drain(&f.in, &lease, sequence, &t, now_ns());
  if (rc == CKF_OK)
    rc = await(&t);
  if (rc == CKF_INGEST_ERR_LANE_FAULT)
    s->wrong = "a lane that was not retired missed a delta";
  return rc == CKF_OK ? 1 : rc == CKF_INGEST_ERR_WORKER_FAILED ? rc : 0;
}

static void *run_submitter(void *arg) {
  submitter *const s = arg;
  while (s->complete < s->wait_for && !s->wrong) {
    const int rc = live(s);
    if (rc < 0) {
      if (rc != CKF_INGEST_ERR_WORKER_FAILED || ckf_ingest_lane_worker(&f.in, s->lane) != DYING)
        s->wrong = ckf_ingest_errname(rc);
      return NULL;
    }
    s->complete += (uint64_t)rc;
  }
  return NULL;
}

/* All words of a lane that is ready, and was before, belong to the life that it is in. */
static const char *look(uint32_t lane) {
  const uint64_t before = CKF_LOAD_ACQUIRE(&lives[lane]);
  bool mixed = false;
  if (before % 2 || !(ckf_table_ready(&f.table) >> lane & 1))
    return NULL;
  for (uint32_t b = 0; b < BUCKETS; b++)
    mixed |= ckf_table_word(&f.table, lane, b) != word_of(before / 2);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return mixed && CKF_LOAD_RELAXED(&lives[lane]) == before ? "words of another life" : NULL;
}

static void *run_reader(void *arg) {
  const char *wrong = NULL;
  (void)arg;
  while (!CKF_LOAD_ACQUIRE(&finished) && !wrong)
    for (uint32_t i = 0; i < LANES && !wrong; i++)
      wrong = look(lanes[i]);
  return (void *)(uintptr_t)wrong;
}

static void *run_watchdog(void *arg) {
  const struct timespec pause = {0, (long)ckf_ingest_interval_ns(&f.in)};
  ckf_ingest_report r;
  uint64_t state = 1;
  const char *wrong = NULL;
  bool died = false;
  (void)arg;
  while (!CKF_LOAD_ACQUIRE(&finished)) {
    nanosleep(&pause, NULL);
    ckf_ingest_tick(&f.in, now_ns());
    if (ckf_ingest_deadline_ns(&f.in) < 1000)
      wrong = "a deadline out of nowhere";
    if (ckf_rng_draw(&state) % 4 == 0)
      ckf_ingest_retire(&f.in, lanes[ckf_rng_draw(&state) % LANES]);
    while (ckf_ingest_report_next(&f.in, &r)) {
      if (r.error == CKF_INGEST_ERR_LANE_FAULT)
        wrong = ckf_lane_fault_name(r.outcome.fault);
      if (r.error == CKF_INGEST_ERR_WORKER_FAILED) {
        died = true;
        if (ckf_table_ready(&f.table) & r.lanes)
          wrong = "a lane was ready after its worker was gone";
      }
    }
  }
  return (void *)(uintptr_t)(died ? wrong : "nobody reported the worker");
}

Test(ckf_ingest_threads, everybody_at_once, .timeout = 240) {
  ckf_ingest_config cfg = ckf_ingest_config_default();
  pthread_t workers[WORKERS], readers[READERS], submitters[LANES], watchdog;
  static submitter s[LANES];
  uint32_t mask = 0;
  void *wrong;
  for (uint32_t i = 0; i <= WORKERS; i++) {
    pthread_mutex_init(&meetings[i].lock, NULL);
    pthread_mutex_init(&meetings[i].sleep, NULL);
    pthread_cond_init(&meetings[i].cond, NULL);
  }
  for (uint32_t i = 0; i < LANES; i++)
    mask |= 1u << lanes[i];
  cfg.max_age_ns = UINT64_C(20) * MS; /* a busy machine reaches it now and then */
  cfg.queue_cap = 2 * DELTAS;
  cfg.hooks = (ckf_ingest_hooks){lock, unlock, wake, NULL};
  setup(&f, mask, BUCKETS, &cfg);
  for (uintptr_t i = 0; i < WORKERS; i++)
    cr_assert_eq(pthread_create(&workers[i], NULL, run_worker, (void *)i), 0);
  for (uint32_t i = 0; i < READERS; i++)
    cr_assert_eq(pthread_create(&readers[i], NULL, run_reader, NULL), 0);
  cr_assert_eq(pthread_create(&watchdog, NULL, run_watchdog, NULL), 0);
  for (uint32_t i = 0; i < LANES; i++) {
    s[i].lane = lanes[i];
    s[i].wait_for = ckf_ingest_lane_worker(&f.in, lanes[i]) == DYING ? UINT64_MAX : LIVES;
    cr_assert_eq(pthread_create(&submitters[i], NULL, run_submitter, &s[i]), 0);
  }
  for (uint32_t i = 0; i < LANES; i++) {
    pthread_join(submitters[i], NULL);
    cr_assert_null(s[i].wrong, "lane %u: %s", lanes[i], s[i].wrong);
  }
  CKF_STORE_RELEASE(&finished, 1);
  for (uint32_t i = 0; i < READERS; i++) {
    pthread_join(readers[i], &wrong);
    cr_assert_null(wrong, "%s", (const char *)wrong);
  }
  pthread_join(watchdog, &wrong);
  cr_assert_null(wrong, "%s", (const char *)wrong);
  ckf_ingest_close(&f.in);
  for (uint32_t i = 0; i < WORKERS; i++) {
    pthread_join(workers[i], &wrong);
    cr_assert_null(wrong, "%s", (const char *)wrong);
  }
  teardown(&f);
}
