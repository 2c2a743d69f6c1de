/* SPDX-License-Identifier: Apache-2.0 */

/* What holds for any input: where arrays end, how a stream is cut, in which order things come, what
 * a snapshot and the deltas behind it rebuild. */

#include "ckf.h"
#include "test_guard.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 64, MEMBERS = 3 };

static const ckf_format format = {0x5EED, BUCKETS};
static uint64_t random_state = 4;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

/* ---- short inputs, ends of arrays ---- */

Test(ckf_props, every_input_of_up_to_three_bytes_is_truncated) {
  uint8_t *const three = guard_alloc(3);
  ckf_cbi1_frame view;
  uint32_t other = 0;
  for (size_t len = 0; len <= 3; len++)
    for (uint32_t value = 0; value < 1u << 8 * len; value++) {
      uint8_t *const bytes = three + 3 - len;
      for (size_t i = 0; i < len; i++)
        bytes[i] = (uint8_t)(value >> 8 * i);
      other += ckf_cbi1_decode(&format, bytes, len, &view) != CKF_ERR_TRUNCATED;
    }
  cr_assert_eq(other, 0);
}

/* Encoders and decoder, with every array as long as they say and not a byte longer. */
Test(ckf_props, frames_are_written_and_read_within_their_arrays) {
  for (size_t n = 0; n <= BUCKETS; n++) {
    ckf_image *const images = guard_alloc(n * sizeof *images);
    uint8_t *const batch_bytes = guard_alloc(n * CKF_CBI1_IMAGE_BYTES);
    const size_t len = ckf_cbi1_delta_size(n);
    uint8_t *const frame = guard_alloc(len), *const same = guard_alloc(len);
    const ckf_batch batch = {batch_bytes, n};
    ckf_cbi1_frame view;
    for (size_t i = 0; i < n; i++) {
      images[i] = (ckf_image){(uint32_t)draw(BUCKETS), draw(UINT64_MAX)};
      ckf_batch_put(batch_bytes, i, images[i]);
    }
    cr_assert_eq(ckf_cbi1_delta_encode(&format, 1, 4, 5, images, n, frame, len), (ptrdiff_t)len);
    cr_assert_eq(ckf_cbi1_batch_encode(&format, 1, 4, 5, &batch, same, len), (ptrdiff_t)len);
    cr_assert_arr_eq(frame, same, len);
    cr_assert_eq(ckf_cbi1_decode(&format, frame, len, &view), CKF_OK);
    for (size_t i = 0; i < n; i++) {
      const ckf_image got = ckf_cbi1_image(&view, i), sent = ckf_batch_image(&batch, i);
      cr_assert(got.bucket == images[i].bucket && got.word == images[i].word);
      cr_assert(sent.bucket == images[i].bucket && sent.word == images[i].word);
    }
    guard_free(images, n * sizeof *images);
    guard_free(batch_bytes, n * CKF_CBI1_IMAGE_BYTES);
    guard_free(frame, len);
    guard_free(same, len);
  }
}

Test(ckf_props, snapshots_are_written_and_read_within_their_arrays) {
  uint64_t *const words = guard_alloc(BUCKETS * sizeof *words);
  uint64_t *const joined = guard_alloc(BUCKETS * sizeof *joined);
  for (size_t i = 0; i < BUCKETS; i++)
    words[i] = draw(UINT64_MAX);
  for (uint32_t size = 1; size <= BUCKETS; size++) {
    const uint32_t chunks = ckf_cbi1_chunk_count(&format, size);
    ckf_assembly assembly;
    uint64_t epoch = 0;
    memset(joined, 0, BUCKETS * sizeof *joined);
    cr_assert_eq(ckf_assembly_init(&assembly, &format, joined, BUCKETS), CKF_OK);
    for (uint32_t i = 0; i < chunks; i++) {
      const size_t len = ckf_cbi1_snapshot_size(&format, size, i);
      uint8_t *const frame = guard_alloc(len);
      ckf_cbi1_frame view;
      cr_assert_eq(ckf_cbi1_snapshot_encode(&format, 1, size, words, BUCKETS, size, i, frame, len),
                   (ptrdiff_t)len);
      cr_assert_eq(ckf_cbi1_decode(&format, frame, len, &view), CKF_OK);
      for (uint32_t at = 0; at < view.word_count; at++)
        cr_assert_eq(ckf_cbi1_word(&view, at), words[view.bucket_offset + at]);
      cr_assert_eq(ckf_assembly_absorb(&assembly, &view, &epoch), i + 1 == chunks);
      guard_free(frame, len);
    }
    cr_assert_eq(epoch, size);
    cr_assert_arr_eq(joined, words, BUCKETS * sizeof *words);
  }
}

/* Keys, words, log and answers end at the guard; the batch forms, whatever their length. */
Test(ckf_props, filters_and_searches_stay_within_their_arrays) {
  enum { KICKS = 7 };
  uint64_t *const words = guard_alloc(BUCKETS * sizeof *words);
  ckf_image *const log = guard_alloc((KICKS + 1) * sizeof *log);
  uint32_t *const deltas = guard_alloc(CKF_DELTA_TABLE_LEN * sizeof *deltas);
  ckf_filter f;
  ckf_delta_table(format.seed, deltas);
  for (size_t n = 0; n <= 70; n++) {
    uint64_t *const keys = guard_alloc(n * sizeof *keys);
    bool *const ok = guard_alloc(n);
    for (size_t i = 0; i < n; i++)
      keys[i] = draw(UINT64_MAX);
    memset(words, 0, BUCKETS * sizeof *words);
    cr_assert_eq(ckf_filter_init(&f, &format, KICKS, words, log, n % 2 ? deltas : NULL), CKF_OK);
    cr_assert_eq(ckf_filter_insert_n(&f, keys, n, ok), n);
    cr_assert_eq(ckf_filter_contains_n(&f, keys, n, ok), n);
    cr_assert_eq(ckf_search(&format, words, keys, n), n);
    cr_assert_eq(ckf_filter_remove_n(&f, keys, n, NULL), n);
    for (size_t i = 0; i < n; i++)
      cr_assert(ok[i]);
    for (size_t i = 0; i < BUCKETS; i++)
      cr_assert_eq(words[i], 0);
    guard_free(keys, n * sizeof *keys);
    guard_free(ok, n);
  }
}

/* ---- a producer and those who follow it ---- */

typedef struct side {
  ckf_producer p;
  void *mem;
  size_t len;
} side;

static void open_side(side *s, uint64_t expected) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected;
  cfg.filter.seed = format.seed;
  s->len = ckf_producer_mem_size(&cfg);
  s->mem = guard_alloc(s->len);
  cr_assert_eq(ckf_producer_init(&s->p, &cfg, s->mem, s->len), CKF_OK);
}

static void close_side(side *s) {
  cr_assert_eq(ckf_producer_check_(&s->p), CKF_OK);
  guard_free(s->mem, s->len);
}

/* Some event; the same for every producer in the same state of the generator. */
static void random_event(ckf_producer *p, uint64_t *state) {
  const ckf_member member = {1 + ckf_rng_draw(state) % MEMBERS, 0};
  const uint64_t what = ckf_rng_draw(state) % 40, first = ckf_rng_draw(state) % 100;
  const size_t n = 1 + ckf_rng_draw(state) % 6;
  ckf_block blocks[6];
  uint64_t externals[6];
  ckf_outcome out;
  for (size_t i = 0; i < n; i++) {
    externals[i] = (first + i) % 100;
    blocks[i] = (ckf_block){externals[i], externals[i] * UINT64_C(0xD1B54A32D192ED03)};
  }
  /* Roots only: a block means the same whatever came before, and most events are accepted. */
  if (what < 24)
    for (size_t i = 0; i < n; i++)
      (void)ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
                                &blocks[i], 1, &out);
  else if (what < 38)
    (void)ckf_producer_removed(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals, n, &out);
  else if (what < 39)
    (void)ckf_producer_cleared(p, &member, CKF_DOMAIN_MISSING, &out);
  else
    cr_assert_eq(ckf_producer_remove_rank(p, &member), CKF_OK);
}

/* A pool as a reader sees it: a replica, and a lane of a table with four columns, both of which
 * get the same frames. */
typedef struct reader {
  ckf_replica replica;
  ckf_table table;
  ckf_lane lane;
  ckf_identity identity;
  ckf_lease lease;
  ckf_format format;
  void *replica_mem, *table_mem;
  size_t replica_len, table_len;
} reader;

static void open_reader(reader *r, const ckf_format *of) {
  ckf_manifest m;
  memset(&m, 0, sizeof m);
  memset(&r->identity, 0, sizeof r->identity);
  m.consumer_instance = 17;
  m.format = r->identity.format = r->format = *of;
  m.configured = 1u << 2;
  r->lease = (ckf_lease){17, 2, 1};
  r->replica_len = ckf_replica_mem_size(of);
  r->replica_mem = guard_alloc(r->replica_len);
  cr_assert_eq(ckf_replica_init(&r->replica, of, r->replica_mem, r->replica_len), CKF_OK);
  r->table_len = ckf_table_mem_size(&m);
  r->table_mem = guard_alloc(r->table_len);
  cr_assert_eq(ckf_table_init(&r->table, &m, 2, r->table_mem, r->table_len), CKF_OK);
  cr_assert_eq(ckf_lane_claim(&r->lane, &r->table, 2), CKF_OK);
  cr_assert_eq(ckf_lane_assign(&r->lane, &r->identity, &r->lease), CKF_OK);
}

static void close_reader(reader *r) {
  ckf_lane_release(&r->lane);
  guard_free(r->replica_mem, r->replica_len);
  guard_free(r->table_mem, r->table_len);
}

/* Saves a producer as a snapshot of `sequence`, in chunks of any size, and loads it. */
static void read_snapshot(reader *r, const ckf_producer *p, uint32_t chunk_buckets,
                          uint64_t sequence) {
  const size_t count = (size_t)r->format.bucket_count;
  const uint64_t *const words = ckf_producer_words(p);
  const uint32_t chunks = ckf_cbi1_chunk_count(&r->format, chunk_buckets);
  for (uint32_t i = 0; i < chunks; i++) {
    const size_t len = ckf_cbi1_snapshot_size(&r->format, chunk_buckets, i);
    uint8_t *const frame = guard_alloc(len);
    ckf_cbi1_frame view;
    cr_assert_eq(ckf_cbi1_snapshot_encode(&r->format, 1, sequence, words, count, chunk_buckets, i,
                                          frame, len),
                 (ptrdiff_t)len);
    cr_assert_eq(ckf_cbi1_decode(&r->format, frame, len, &view), CKF_OK);
    cr_assert_eq(ckf_replica_apply(&r->replica, &view), i + 1 == chunks);
    guard_free(frame, len);
  }
  cr_assert_eq(ckf_lane_install(&r->lane, &r->identity, &r->lease, sequence,
                                ckf_replica_words(&r->replica), count)
                   .result,
               CKF_LANE_SNAPSHOT_INSTALLED);
}

static void read_images(reader *r, const ckf_image *images, size_t n, uint64_t base) {
  const size_t len = ckf_cbi1_delta_size(n);
  uint8_t *const frame = guard_alloc(len);
  ckf_cbi1_frame view;
  cr_assert_eq(ckf_cbi1_delta_encode(&r->format, 1, base, base + 1, images, n, frame, len),
               (ptrdiff_t)len);
  cr_assert_eq(ckf_cbi1_decode(&r->format, frame, len, &view), CKF_OK);
  cr_assert_eq(ckf_replica_apply(&r->replica, &view), 1);
  cr_assert_eq(
      ckf_lane_apply_delta(&r->lane, &r->identity, &r->lease, base, base + 1, images, n).result,
      CKF_LANE_DELTA_APPLIED);
  guard_free(frame, len);
}

/* Drains and sends; returns the number of images. */
static size_t read_window(reader *r, ckf_producer *p, uint64_t *sequence) {
  ckf_batch batch;
  const int rc = ckf_producer_drain(p, &batch);
  cr_assert_geq(rc, 0);
  if (rc == 0)
    return 0;
  ckf_image *const images = guard_alloc(batch.image_count * sizeof *images);
  for (size_t i = 0; i < batch.image_count; i++)
    images[i] = ckf_batch_image(&batch, i);
  read_images(r, images, batch.image_count, (*sequence)++);
  guard_free(images, batch.image_count * sizeof *images);
  return batch.image_count;
}

static void reads_the_same(const reader *r, const uint64_t *words) {
  cr_assert_arr_eq(ckf_replica_words(&r->replica), words, (size_t)r->format.bucket_count * 8);
  for (uint32_t b = 0; b < r->format.bucket_count; b++)
    cr_assert_eq(ckf_table_word(&r->table, 2, b), words[b]);
}

/* Saved at any moment, in chunks of any size, and followed from there. */
Test(ckf_props, B1_a_snapshot_and_the_deltas_behind_it_rebuild_every_word) {
  for (uint64_t expected = 20; expected <= 320; expected *= 2) {
    uint64_t events = expected, sequence = 100;
    size_t images = 0;
    side s;
    open_side(&s, expected);
    const ckf_format *const of = ckf_producer_format(&s.p);
    for (int life = 0; life < 20; life++) {
      reader r;
      ckf_batch tail;
      open_reader(&r, of);
      for (uint64_t n = draw(10); n > 0; n--)
        random_event(&s.p, &events);
      cr_assert_geq(ckf_producer_drain(&s.p, &tail), 0); /* of those who read before */
      read_snapshot(&r, &s.p, 1 + (uint32_t)draw(of->bucket_count + 4), sequence);
      reads_the_same(&r, ckf_producer_words(&s.p));
      for (int window = 0; window < 20; window++) {
        for (uint64_t n = 1 + draw(8); n > 0; n--)
          random_event(&s.p, &events);
        images += read_window(&r, &s.p, &sequence);
        reads_the_same(&r, ckf_producer_words(&s.p));
      }
      close_reader(&r);
    }
    cr_assert_gt(images, 400);
    close_side(&s);
  }
}

static int by_bucket(const void *x, const void *y) {
  const uint32_t a = ((const ckf_image *)x)->bucket, b = ((const ckf_image *)y)->bucket;
  return (a > b) - (a < b);
}

/* The same events, drained after each of them and after every `every` of them: the same words, and
 * a window is the buckets that differ between its ends, each once, whatever happened in between. */
Test(ckf_props, it_does_not_matter_where_windows_are_cut) {
  for (uint64_t every = 1; every <= 12; every++) {
    uint64_t fine_events = every, coarse_events = every, sequence = 1;
    reader r;
    side fine, coarse;
    open_side(&fine, 100);
    open_side(&coarse, 100);
    const ckf_format *const of = ckf_producer_format(&fine.p);
    const size_t count = (size_t)of->bucket_count;
    uint64_t *const before = calloc(count, sizeof *before);
    ckf_image *const images = malloc(count * sizeof *images);
    open_reader(&r, of);
    read_snapshot(&r, &fine.p, CKF_CBI1_MAX_CHUNK_BUCKETS, sequence);
    for (int window = 0; window < 40; window++) {
      ckf_batch batch;
      size_t n = 0;
      for (uint64_t i = 0; i < every; i++) {
        random_event(&fine.p, &fine_events);
        random_event(&coarse.p, &coarse_events);
        read_window(&r, &fine.p, &sequence);
      }
      const uint64_t *const after = ckf_producer_words(&coarse.p);
      reads_the_same(&r, after);
      const int rc = ckf_producer_drain(&coarse.p, &batch);
      for (size_t i = 0; rc == 1 && i < batch.image_count; i++)
        images[i] = ckf_batch_image(&batch, i);
      if (rc == 1)
        qsort(images, batch.image_count, sizeof *images, by_bucket);
      for (uint32_t b = 0; b < count; b++)
        if (before[b] != after[b]) {
          cr_assert(rc == 1 && n < batch.image_count);
          cr_assert(images[n].bucket == b && images[n].word == after[b]);
          n++;
        }
      cr_assert_eq(rc == 1 ? batch.image_count : 0, n);
      memcpy(before, after, count * sizeof *before);
    }
    free(before);
    free(images);
    close_reader(&r);
    close_side(&fine);
    close_side(&coarse);
  }
}

/* The images of a delta in any order, and the same images as deltas of one each. */
Test(ckf_props, images_come_in_any_order_and_in_any_number_of_deltas) {
  const ckf_format big = {9, 1024};
  static uint64_t wanted[1024];
  static ckf_image images[1024], shuffled[1024];
  side s;
  reader one, other, single;
  uint64_t at = 1, single_at = 1;
  open_side(&s, 3000);
  cr_assert_eq(ckf_producer_format(&s.p)->bucket_count, 1024);
  open_reader(&one, &big);
  open_reader(&other, &big);
  open_reader(&single, &big);
  read_snapshot(&one, &s.p, 100, at); /* of an empty producer: zeros */
  read_snapshot(&other, &s.p, 1024, at);
  read_snapshot(&single, &s.p, 1, at);
  memset(wanted, 0, sizeof wanted);
  for (int round = 0; round < 60; round++) {
    const size_t n = 1 + draw(round < 50 ? 70 : 1024);
    for (size_t i = 0; i < n;) {
      images[i] = (ckf_image){(uint32_t)draw(1024), draw(UINT64_MAX)};
      size_t j = 0;
      while (images[j].bucket != images[i].bucket)
        j++;
      i += j == i; /* a bucket that is not there yet */
    }
    memcpy(shuffled, images, n * sizeof *images);
    for (size_t i = n; i > 1; i--) {
      const size_t j = (size_t)draw(i);
      const ckf_image image = shuffled[i - 1];
      shuffled[i - 1] = shuffled[j];
      shuffled[j] = image;
    }
    for (size_t i = 0; i < n; i++) {
      wanted[images[i].bucket] = images[i].word;
      read_images(&single, &shuffled[i], 1, single_at++);
    }
    read_images(&one, images, n, at);
    read_images(&other, shuffled, n, at);
    at++;
    reads_the_same(&one, wanted);
    reads_the_same(&other, wanted);
    reads_the_same(&single, wanted);
  }
  close_reader(&one);
  close_reader(&other);
  close_reader(&single);
  close_side(&s);
}

/* ---- order of members ---- */

typedef struct owned {
  uint64_t worker, external, canonical;
} owned;

static int by_owner(const void *x, const void *y) {
  const owned *const a = x, *const b = y;
  if (a->worker != b->worker)
    return a->worker < b->worker ? -1 : 1;
  return (a->external > b->external) - (a->external < b->external);
}

/* All mappings, sorted. */
static size_t list(ckf_producer *p, owned *out, size_t cap) {
  size_t members, n = 0;
  const ckf_member *const sorted = ckf_producer_members(p, &members);
  for (size_t i = 0; i < members; i++) {
    uint32_t cursor = 0;
    ckf_mapping mapping;
    while (ckf_producer_mapping_next(p, &sorted[i], &cursor, &mapping)) {
      cr_assert_lt(n, cap);
      out[n++] = (owned){sorted[i].worker_id, mapping.external, mapping.canonical};
    }
  }
  qsort(out, n, sizeof *out, by_owner);
  return n;
}

enum { EVENTS = 400, CHAIN = 24 };

/* One event of a member: CHAIN blocks of one of its prompts from some depth on, or their end. */
typedef struct event {
  ckf_member member;
  ckf_block blocks[CHAIN];
  uint64_t gone[CHAIN];
  size_t from, n;
  bool removal;
} event;

static void apply(ckf_producer *p, const event *e) {
  ckf_outcome out;
  if (e->removal)
    (void)ckf_producer_removed(p, &e->member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, e->gone, e->n,
                               &out);
  else
    (void)ckf_producer_stored(p, &e->member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, e->from > 0,
                              e->from > 0 ? e->blocks[e->from - 1].external : 0, false, 0,
                              e->blocks + e->from, e->n, &out);
  cr_assert(out.error == CKF_OK || out.error == CKF_ERR_PARENT_NOT_FOUND);
}

/* Each member's events in their order, the members in any: the same mappings, owners and blocks in
 * the filter, and what no longer has an owner has left it. */
Test(ckf_props, members_do_not_wait_for_each_other) {
  static event events[MEMBERS][EVENTS];
  static owned wanted[4096], got[4096];
  size_t wanted_len = 0;
  for (size_t m = 0; m < MEMBERS; m++)
    for (size_t i = 0; i < EVENTS; i++) {
      event *const e = &events[m][i];
      const uint64_t prompt = draw(8);
      e->member = (ckf_member){m, 0};
      for (size_t k = 0; k < CHAIN; k++) {
        e->blocks[k].external = e->gone[CHAIN - 1 - k] = prompt * CHAIN + k;
        e->blocks[k].local = (k < 4 ? 0 : prompt) * 1000 + k; /* common starts */
      }
      e->removal = draw(5) == 0;
      e->from = e->removal ? 0 : (size_t)draw(CHAIN);
      e->n = 1 + (size_t)draw(CHAIN - e->from);
    }
  for (int order = 0; order < 12; order++) {
    size_t next[MEMBERS] = {0};
    side s;
    open_side(&s, 1000);
    for (size_t left = (size_t)MEMBERS * EVENTS; left > 0;) {
      size_t m = (size_t)draw(MEMBERS);
      m = order < MEMBERS && next[order] < EVENTS ? (size_t)order : m; /* one of them first */
      if (next[m] < EVENTS) {
        apply(&s.p, &events[m][next[m]++]);
        left--;
      }
    }
    const size_t n = list(&s.p, got, 4096);
    wanted_len = order == 0 ? n : wanted_len;
    if (order == 0)
      memcpy(wanted, got, n * sizeof *got);
    cr_assert_eq(n, wanted_len);
    for (size_t i = 0; i < n; i++) {
      uint32_t owners, count = 0;
      bool resident;
      cr_assert_eq(by_owner(&got[i], &wanted[i]), 0);
      cr_assert_eq(got[i].canonical, wanted[i].canonical);
      for (size_t j = 0; j < n; j++)
        count += got[j].canonical == got[i].canonical;
      cr_assert_eq(ckf_producer_owners(&s.p, got[i].canonical, &owners, &resident), 1);
      cr_assert_eq(owners, count);
      cr_assert(resident && ckf_producer_contains(&s.p, got[i].canonical));
    }
    for (uint64_t m = 0; m < MEMBERS; m++) {
      const ckf_member member = {m, 0};
      cr_assert_eq(ckf_producer_remove_rank(&s.p, &member), CKF_OK);
    }
    cr_assert_eq(ckf_producer_occupied_buckets(&s.p), 0);
    close_side(&s);
  }
  cr_assert_gt(wanted_len, 100);
}
