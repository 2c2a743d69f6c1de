/* SPDX-License-Identifier: Apache-2.0 */

/* Consumer: filter streams. What is taken, what ends a stream and in which order it is found. */

#include "test_consumer.h"

/* One followed pool with 64 buckets. */
static kvrelay_descriptor open_one(kit *k) {
  const kvrelay_descriptor pool = kit_pool(1);
  kit_open(k);
  kit_feed_pools(k, 1, &pool, 1);
  return pool;
}

static uint64_t word(uint64_t i) { return i * UINT64_C(0x9E3779B97F4A7C15) | 1; }

/* Feeds a frame that must end the stream: the replica is gone, the call cancelled, another follows.
 */
static int faulted(kit *k, const kvrelay_filter_update *u, int32_t fault) {
  const size_t cancels = k->cancels, opened = k->opened, needs = k->needs;
  const uint32_t call = k->calls[0];
  const uint64_t frames = kit_view(k, 0).frames;
  kit_events(k, 0);
  kit_feed(k, 0, u);
  const kvrelay_pool_view v = kit_view(k, 0);
  cr_assert_eq(v.fault, fault, "%d instead of %d", v.fault, fault);
  cr_assert_eq(v.state, KVRELAY_REPLICA_WAITING);
  cr_assert_eq(v.frames, frames);
  cr_assert_null(v.words);
  const kvrelay_event_out e = kit_event(k, KVRELAY_EVENT_POOL_VOID);
  cr_assert_eq(e.fault, fault);
  cr_assert_eq(e.pool, 0);
  cr_assert_eq(kvrelay_consumer_feed_filter(&k->c, call, u, k->now), KVRELAY_ERR_NOT_FOUND);
  kit_run(k);
  cr_assert_eq(k->cancels, cancels + 1);
  kit_sleep(k);
  cr_assert_eq(k->opened, opened + 1);
  cr_assert_eq(k->needs, needs, "its memory serves again");
  cr_assert_eq(kit_view(k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
  return v.fault_code;
}

/* ---- what is taken ---- */

/* Any contiguous split gives the same words. */
Test(consumer_filter, X3_chunk_sizes_do_not_matter) {
  static const uint32_t sizes[] = {64, 1000, 7168, 262144, 524288};
  static uint64_t words[1 << 19];
  kvrelay_descriptor pool = kit_pool(1);
  const uint64_t buckets = 1 << 19;
  kit k;
  pool.producer.ckf_format.bucket_count = buckets;
  for (uint64_t i = 0; i < buckets; i++)
    words[i] = word(i);
  kit_open(&k);
  for (size_t i = 0; i < 5; i++) {
    const ckf_format format = kit_format(&pool);
    pool.producer.layout_generation++;
    kit_feed_pools(&k, i, &pool, 1);
    const uint32_t chunks = ckf_cbi1_chunk_count(&format, sizes[i]);
    for (uint32_t n = 0; n < chunks; n++) {
      cr_assert_null(kit_view(&k, 0).words, "not visible before it is whole");
      const kvrelay_filter_update u = kit_chunk(&pool, words, 6, sizes[i], n);
      kit_feed(&k, 0, &u);
    }
    const kvrelay_pool_view v = kit_view(&k, 0);
    cr_assert_eq(v.state, KVRELAY_REPLICA_LIVE);
    cr_assert_eq(v.sequence, 6);
    cr_assert_eq(v.frames, chunks);
    cr_assert_eq(memcmp(v.words, words, sizeof words), 0);
  }
  kit_close(&k);
}

Test(consumer_filter, C18_a_pool_tells_its_condition) {
  kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(2)};
  kvrelay_plane_condition is;
  kit k;
#define EXPECT_POOL(POOL, STATE, AGE)                                                              \
  do {                                                                                             \
    cr_assert_eq(kvrelay_consumer_plane(&k.c, KVRELAY_METHOD_SUBSCRIBE_POOL, POOL, k.now, &is),    \
                 KVRELAY_OK);                                                                      \
    cr_assert_eq(is.state, KVRELAY_PLANE_##STATE, "state %d", is.state);                           \
    cr_assert_eq(is.age_ns, (AGE), "age %lu", (unsigned long)is.age_ns);                           \
  } while (0)
  kit_open(&k);
  pools[1].query_semantics.kv_block_size = 0;
  kit_feed_pools(&k, 1, pools, 2);
  EXPECT_POOL(0, UNKNOWN, KVRELAY_TIME_NONE);
  EXPECT_POOL(1, QUARANTINED, KVRELAY_TIME_NONE);
  const kvrelay_filter_update first = kit_chunk(
      &pools[0], kit_zeros, 0, (uint32_t)pools[0].producer.ckf_format.bucket_count / 2, 0);
  kit_feed(&k, 0, &first);
  EXPECT_POOL(0, ASSEMBLING, 0);
  k.now += SECOND;
  kit_snapshot(&k, 0, &pools[0], kit_zeros, 0);
  k.now += 3 * SECOND;
  EXPECT_POOL(0, LIVE, 3 * SECOND);
  k.now += 30 * SECOND;
  EXPECT_POOL(0, STALE, 33 * SECOND);
  kit_end(&k, k.calls[0], KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
  EXPECT_POOL(0, UNKNOWN, 33 * SECOND);
  cr_assert(is.retry_ns > k.now && is.retry_ns <= k.now + 500 * MS);
  cr_assert_eq(kvrelay_consumer_plane(&k.c, KVRELAY_METHOD_SUBSCRIBE_POOL, 2, k.now, &is),
               KVRELAY_ERR_NOT_FOUND);
  kit_close(&k);
#undef EXPECT_POOL
}

Test(consumer_filter, deltas_move_the_replica_and_nothing_else) {
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  uint64_t words[64], random = 7;
  for (uint64_t i = 0; i < 64; i++)
    words[i] = word(i);
  kit_snapshot(&k, 0, &pool, words, 40);
  for (uint64_t s = 40; s < 140; s++) {
    ckf_image images[64];
    const size_t n = 1 + kit_random(&random) % 64;
    const uint32_t start = (uint32_t)kit_random(&random) % 64;
    for (uint32_t i = 0; i < n; i++) {
      images[i] = (ckf_image){(start + i * 7) % 64, kit_random(&random)};
      words[images[i].bucket] = images[i].word;
    }
    const kvrelay_filter_update u = kit_delta(&pool, images, n, s);
    kit_feed(&k, 0, &u);
    cr_assert_eq(kit_view(&k, 0).sequence, s + 1);
    cr_assert_eq(memcmp(kit_view(&k, 0).words, words, sizeof words), 0);
  }
  cr_assert_eq(kit_view(&k, 0).deltas, 100);
  kit_close(&k);
}

Test(consumer_filter, heartbeats_keep_a_replica_fresh) {
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kit_snapshot(&k, 0, &pool, kit_zeros, 3);
  k.now += 30 * SECOND;
  cr_assert_not(kit_view(&k, 0).stale);
  k.now++;
  cr_assert(kit_view(&k, 0).stale);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_LIVE);
  const kvrelay_filter_update beat = kit_heartbeat(&pool, 3);
  kit_feed(&k, 0, &beat);
  cr_assert_not(kit_view(&k, 0).stale);
  cr_assert_eq(kit_view(&k, 0).heartbeats, 1);
  k.now--; /* a frame of the future says nothing */
  cr_assert(kit_view(&k, 0).stale);
  kit_close(&k);
}

/* 10.6: chunk 0 starts over; within one stream the cut stays the same. */
Test(consumer_filter, a_snapshot_may_start_over_at_the_same_cut) {
  uint64_t words[64];
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  for (uint64_t i = 0; i < 64; i++)
    words[i] = word(i);
  kvrelay_filter_update u = kit_chunk(&pool, kit_zeros, 8, 32, 0);
  kit_feed(&k, 0, &u);
  u = kit_chunk(&pool, words, 8, 16, 0);
  kit_feed(&k, 0, &u);
  for (uint32_t i = 1; i < 4; i++) {
    u = kit_chunk(&pool, words, 8, 16, i);
    kit_feed(&k, 0, &u);
  }
  cr_assert_eq(memcmp(kit_view(&k, 0).words, words, sizeof words), 0);
  kit_close(&k);
}

Test(consumer_filter, the_largest_sequence) {
  const ckf_image image = {1, 1};
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kit_snapshot(&k, 0, &pool, kit_zeros, UINT64_MAX - 1);
  kvrelay_filter_update u = kit_delta(&pool, &image, 1, UINT64_MAX - 1);
  kit_feed(&k, 0, &u);
  cr_assert_eq(kit_view(&k, 0).sequence, UINT64_MAX);
  u = kit_delta(&pool, &image, 1, UINT64_MAX); /* wraps to 0 */
  faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  kit_close(&k);
}

/* ---- what ends a stream ---- */

/* R3 and every other number of the key. */
Test(consumer_filter, R3_frames_of_another_producer) {
  for (int i = 0; i < 15; i++) {
    kit k;
    const kvrelay_descriptor pool = open_one(&k);
    kit_snapshot(&k, 0, &pool, kit_zeros, 3);
    kvrelay_filter_update u = kit_heartbeat(&pool, 3);
    kvrelay_producer *const p = &u.producer;
    switch (i) {
    case 0:
      p->producer_incarnation++;
      break;
    case 1:
      p->layout_generation++;
      break;
    case 2:
      p->layout_generation = 0;
      break;
    case 3:
      p->ckf_format.seed++;
      break;
    case 4:
      p->ckf_format.bucket_count *= 2;
      break;
    case 5:
      p->ckf_format.format_version++;
      break;
    case 6:
      p->ckf_format.present = false;
      break;
    case 7:
      p->pool_id.dc_id++;
      break;
    case 8:
      p->pool_id.domain.cache_semantics.digest[3] ^= 1;
      break;
    case 9:
      p->pool_id.domain.routing_scope.source = KVRELAY_SOURCE_DEFAULT_DERIVED;
      break;
    case 10:
      p->pool_id.domain.routing_scope.digest_len = 17;
      break;
    case 11:
      p->pool_id.identity_version = 2;
      break;
    case 12:
      p->pool_id.present = false;
      break;
    case 13:
      p->present = false;
      break;
    default:
      p->ckf_format.slots_per_bucket = 5;
    }
    faulted(&k, &u, KVRELAY_FAULT_PRODUCER);
    kit_close(&k);
  }
}

/* The payload of u with one byte changed, checksum made good if wanted. */
static void damage(kvrelay_filter_update *u, size_t at, uint8_t value, bool sum) {
  kit_bytes[at] = value;
  if (sum) {
    const uint64_t hash = hashfmt_hash64(kit_bytes + 48, u->payload_len - 48, 0);
    for (size_t i = 0; i < 4; i++)
      kit_bytes[44 + i] = (uint8_t)(hash >> 8 * i);
  }
}

Test(consumer_filter, refused_frames_tell_the_code) {
  static const struct {
    size_t at;
    uint8_t value;
    int code;
  } cases[] = {{0, 0, CKF_ERR_MAGIC},
               {4, 2, CKF_ERR_WIRE_VERSION},
               {44, 1, CKF_ERR_CHECKSUM},
               {10, 2, CKF_ERR_FORMAT_VERSION},
               {8, 17, CKF_ERR_FORMAT_FINGERPRINT_BITS},
               {9, 5, CKF_ERR_FORMAT_SLOTS},
               {12, 43, CKF_ERR_FORMAT_MISMATCH},
               {7, 0x80, CKF_ERR_FLAGS}};
  const ckf_image image = {1, 1};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    kit k;
    const kvrelay_descriptor pool = open_one(&k);
    kit_snapshot(&k, 0, &pool, kit_zeros, 3);
    kvrelay_filter_update u = kit_delta(&pool, &image, 1, 3);
    damage(&u, cases[i].at, cases[i].value, false);
    cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), cases[i].code, "%zu", i);
    kit_close(&k);
  }
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kit_snapshot(&k, 0, &pool, kit_zeros, 3);
  kvrelay_filter_update u = kit_delta(&pool, &image, 1, 3);
  u.payload_len = 47;
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_TRUNCATED);
  kit_snapshot(&k, 0, &pool, kit_zeros, 3);
  u = kit_delta(&pool, &image, 1, 3);
  damage(&u, 60, 64, true); /* bucket behind the end */
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_MALFORMED);
  kit_close(&k);
}

/* 10.7: what the codec takes and a stream consumer does not. */
Test(consumer_filter, strictness_of_deltas) {
  const ckf_image twice[] = {{1, 1}, {2, 2}, {1, 3}};
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kit_snapshot(&k, 0, &pool, kit_zeros, 3);
  kvrelay_filter_update u = kit_delta(&pool, twice, 0, 3);
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_EMPTY_DELTA);
  kit_snapshot(&k, 0, &pool, kit_zeros, 3);
  u = kit_delta(&pool, twice, 3, 3);
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_DUPLICATE_IMAGE);
  /* The check leaves no trace: the same buckets are fine in the next life. */
  kit_snapshot(&k, 0, &pool, kit_zeros, 3);
  u = kit_delta(&pool, twice, 2, 3);
  kit_feed(&k, 0, &u);
  cr_assert_eq(kit_view(&k, 0).words[1], 1);
  u = kit_delta(&pool, twice + 1, 2, 4);
  kit_feed(&k, 0, &u);
  cr_assert_eq(kit_view(&k, 0).words[1], 3);
  kit_close(&k);
}

enum { DC, EPOCH, KIND };

Test(consumer_filter, header_must_agree_with_the_envelope) {
  const ckf_image image = {1, 1};
  for (int live = 0; live < 2; live++)
    for (int i = DC; i <= KIND; i++) {
      kit k;
      const kvrelay_descriptor pool = open_one(&k);
      if (live)
        kit_snapshot(&k, 0, &pool, kit_zeros, 3);
      kvrelay_filter_update u =
          live ? kit_delta(&pool, &image, 1, 3) : kit_chunk(&pool, kit_zeros, 3, 64, 0);
      if (i == DC)
        damage(&u, 28, 4, false);
      else if (i == EPOCH)
        damage(&u, 36, 9, false);
      else
        u.kind ^= KVRELAY_UPDATE_SNAPSHOT_CHUNK ^ KVRELAY_UPDATE_DELTA;
      cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_HEADER), 0);
      kit_close(&k);
    }
}

Test(consumer_filter, frames_where_they_cannot_be) {
  const ckf_image image = {1, 1};
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kvrelay_filter_update u = kit_delta(&pool, &image, 1, 0); /* before the snapshot */
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  u = kit_heartbeat(&pool, 0);
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  u = kit_chunk(&pool, kit_zeros, 5, 16, 1); /* not from its start */
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_ORDER), CKF_ERR_CHUNK_SEQUENCE);
  u = kit_chunk(&pool, kit_zeros, 5, 16, 0);
  kit_feed(&k, 0, &u);
  u = kit_chunk(&pool, kit_zeros, 5, 16, 2); /* a hole */
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  u = kit_chunk(&pool, kit_zeros, 5, 16, 0);
  kit_feed(&k, 0, &u);
  u = kit_delta(&pool, &image, 1, 5); /* in between */
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  u = kit_chunk(&pool, kit_zeros, 5, 16, 0);
  kit_feed(&k, 0, &u);
  u = kit_heartbeat(&pool, 5);
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  kit_snapshot(&k, 0, &pool, kit_zeros, 5);
  u = kit_chunk(&pool, kit_zeros, 5, 64, 0); /* a second snapshot */
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  kit_close(&k);
}

/* A chunk count that promises less than the filter. */
Test(consumer_filter, incomplete_coverage) {
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kvrelay_filter_update u = kit_chunk(&pool, kit_zeros, 5, 16, 0);
  damage(&u, 52, 1, true); /* chunk_count 4 -> 1 */
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_INCOMPLETE_COVERAGE);
  kit_close(&k);
}

Test(consumer_filter, H1_gaps_and_repetitions) {
  const ckf_image image = {1, 1};
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  for (int i = 0; i < 8; i++) {
    kvrelay_filter_update u;
    if (i < 2) { /* the chunk's base; a second cut */
      u = kit_chunk(&pool, kit_zeros, 5, 32, 0);
      if (i == 1) {
        kit_feed(&k, 0, &u);
        u = kit_chunk(&pool, kit_zeros, 6, 32, 0);
      } else
        u.base_sequence = 4;
    } else {
      kit_snapshot(&k, 0, &pool, kit_zeros, 5);
      u = i == 2   ? kit_delta(&pool, &image, 1, 6)
          : i == 3 ? kit_delta(&pool, &image, 1, 4)
          : i == 4 ? kit_heartbeat(&pool, 6)
          : i == 5 ? kit_heartbeat(&pool, 4)
          : i == 6 ? kit_heartbeat(&pool, 5)
                   : kit_delta(&pool, &image, 1, 5);
      if (i == 6)
        u.base_sequence = 4;
      if (i == 7)
        u.base_sequence = 4; /* the header's base is right */
    }
    faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  }
  /* Sequence 7 on base 5, header and envelope agreeing. */
  kit_snapshot(&k, 0, &pool, kit_zeros, 5);
  kvrelay_filter_update u = kit_delta(&pool, &image, 1, 5);
  damage(&u, 36, 7, false);
  u.sequence = 7;
  faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  /* H1: 4 -> 5 applies, repeated it is a gap. */
  kit_snapshot(&k, 0, &pool, kit_zeros, 4);
  u = kit_delta(&pool, &image, 1, 4);
  kit_feed(&k, 0, &u);
  cr_assert_eq(kit_view(&k, 0).sequence, 5);
  faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  kit_close(&k);
}

Test(consumer_filter, kinds_and_heartbeats) {
  static const int32_t kinds[] = {0, 4, -1, INT32_MAX};
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  for (size_t i = 0; i < 4; i++) {
    kit_snapshot(&k, 0, &pool, kit_zeros, 5);
    kvrelay_filter_update u = kit_heartbeat(&pool, 5);
    u.kind = kinds[i];
    faulted(&k, &u, KVRELAY_FAULT_KIND);
  }
  kit_snapshot(&k, 0, &pool, kit_zeros, 5);
  kvrelay_filter_update u = kit_heartbeat(&pool, 5);
  u.payload_len = 1;
  faulted(&k, &u, KVRELAY_FAULT_FRAME);
  kit_close(&k);
}

/* All that can be wrong at once, repaired from the front: each time the next one is found. */
Test(consumer_filter, order_of_checks) {
  const ckf_image twice[] = {{1, 1}, {1, 2}};
  kit k;
  const kvrelay_descriptor pool = open_one(&k);
  kvrelay_filter_update u = kit_delta(&pool, twice, 2, 8); /* no snapshot, wrong base, duplicate */
  u.envelope.relay_present = false;
  u.producer.producer_incarnation++;
  u.kind = 9;
  u.base_sequence = 2;
  damage(&u, 28, 9, false); /* dc_id */
  const uint8_t sum = kit_bytes[44];
  kit_bytes[44] ^= 1;
  faulted(&k, &u, KVRELAY_FAULT_RELAY);
  u.envelope.relay_present = true;
  faulted(&k, &u, KVRELAY_FAULT_PRODUCER);
  u.producer = pool.producer;
  faulted(&k, &u, KVRELAY_FAULT_KIND);
  u.kind = KVRELAY_UPDATE_DELTA;
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_CHECKSUM);
  kit_bytes[44] = sum;
  faulted(&k, &u, KVRELAY_FAULT_HEADER);
  kit_bytes[28] = 3;
  faulted(&k, &u, KVRELAY_FAULT_ORDER);
  uint8_t saved[84];
  memcpy(saved, kit_bytes, u.payload_len);
  kit_snapshot(&k, 0, &pool, kit_zeros, 5);
  memcpy(kit_bytes, saved, u.payload_len);
  faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  u.base_sequence = 8;
  kit_snapshot(&k, 0, &pool, kit_zeros, 5);
  memcpy(kit_bytes, saved, u.payload_len);
  faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  kit_snapshot(&k, 0, &pool, kit_zeros, 8);
  memcpy(kit_bytes, saved, u.payload_len);
  cr_assert_eq(faulted(&k, &u, KVRELAY_FAULT_FRAME), CKF_ERR_DUPLICATE_IMAGE);
  kit_close(&k);
}

/* A replica dies with its stream and leaves the others alone. */
Test(consumer_filter, a_fault_concerns_one_replica) {
  const kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(3)};
  uint64_t words[64];
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, pools, 2);
  for (uint64_t i = 0; i < 64; i++)
    words[i] = word(i);
  kit_snapshot(&k, 0, &pools[0], kit_zeros, 1);
  kit_snapshot(&k, 1, &pools[1], words, 2);
  kvrelay_filter_update u = kit_heartbeat(&pools[0], 9);
  faulted(&k, &u, KVRELAY_FAULT_SEQUENCE);
  cr_assert_eq(kit_view(&k, 1).fault, KVRELAY_FAULT_NONE);
  cr_assert_eq(kit_view(&k, 1).sequence, 2);
  cr_assert_eq(memcmp(kit_view(&k, 1).words, words, sizeof words), 0);
  kit_close(&k);
}

/* Damaged frames of any kind: no crash, and a live replica shows either old or new words. */
Test(consumer_filter, random_damage) {
  uint64_t random = 99;
  const ckf_image images[] = {{1, 11}, {7, 22}};
  kit k;
  kvrelay_descriptor pool = open_one(&k);
  for (int i = 0; i < 4000; i++) {
    const uint64_t r = kit_random(&random);
    if (kit_view(&k, 0).state != KVRELAY_REPLICA_LIVE)
      kit_snapshot(&k, 0, &pool, kit_zeros, 1);
    kvrelay_filter_update u =
        r & 1 ? kit_delta(&pool, images, 2, 1) : kit_chunk(&pool, kit_zeros, 1, 64, 0);
    const size_t at = r / 2 % u.payload_len;
    damage(&u, at, (uint8_t)(r >> 40), at >= 48 && r >> 60 & 1);
    if (r >> 61 & 1)
      u.payload_len = r / 3 % u.payload_len;
    kit_feed(&k, 0, &u);
    const kvrelay_pool_view v = kit_view(&k, 0);
    if (v.words != NULL)
      for (size_t b = 0; b < 64 && at < 48; b++)
        cr_assert(v.words[b] == 0 || (b == 1 && v.words[b] == 11) || (b == 7 && v.words[b] == 22));
    kit_run(&k);
    if (v.words != NULL) { /* start over */
      pool.producer.layout_generation++;
      kit_feed_pools(&k, (uint64_t)i + 2, &pool, 1);
    } else
      kit_sleep(&k);
  }
  kit_close(&k);
}
