/* SPDX-License-Identifier: Apache-2.0 */

/* CBI1: what the decoder refuses and in which order, and that encoder and decoder agree. */

#include "ckf.h"
#include "test_guard.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static const ckf_format format = {0x5EED, 64};

static uint64_t random_state = 1;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

static void put(uint8_t *frame, size_t at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    frame[at + i] = (uint8_t)(value >> 8 * i);
}

/* After the body was changed on purpose. */
static void seal(uint8_t *frame, size_t len) {
  put(frame, 44, XXH3_64bits(frame + 48, len - 48) & 0xFFFFFFFF, 4);
}

static size_t make_delta(uint8_t *frame, size_t cap, size_t n) {
  ckf_image images[64];
  for (size_t i = 0; i < n; i++)
    images[i] = (ckf_image){(uint32_t)draw(64), draw(UINT64_MAX)};
  const ptrdiff_t len = ckf_cbi1_delta_encode(&format, 7, 4, 5, images, n, frame, cap);
  cr_assert_eq(len, (ptrdiff_t)ckf_cbi1_delta_size(n));
  return (size_t)len;
}

static size_t make_chunk(uint8_t *frame, size_t cap) {
  uint64_t words[64];
  for (size_t i = 0; i < 64; i++)
    words[i] = draw(UINT64_MAX);
  const ptrdiff_t len = ckf_cbi1_snapshot_encode(&format, 7, 5, words, 64, 24, 1, frame, cap);
  cr_assert_eq(len, (ptrdiff_t)ckf_cbi1_snapshot_size(&format, 24, 1));
  return (size_t)len;
}

static int decode(const uint8_t *frame, size_t len) {
  ckf_cbi1_frame view;
  return ckf_cbi1_decode(&format, frame, len, &view);
}

/* The frame ends where readable memory ends. */
static int decode_guarded(const uint8_t *frame, size_t len) {
  uint8_t *const at = guard_copy(frame, len);
  const int rc = decode(at, len);
  guard_free(at, len);
  return rc;
}

Test(ckf_cbi1, every_prefix_and_every_flipped_body_bit_is_refused) {
  uint8_t frame[1024];
  for (int kind = 0; kind < 2; kind++) {
    const size_t len = kind ? make_chunk(frame, sizeof frame) : make_delta(frame, sizeof frame, 9);
    cr_assert_eq(decode_guarded(frame, len), CKF_OK);
    for (size_t cut = 0; cut < len; cut++)
      cr_assert_eq(decode_guarded(frame, cut), cut < 48 ? CKF_ERR_TRUNCATED : CKF_ERR_CHECKSUM);
    for (size_t bit = 44 * 8; bit < len * 8; bit++) {
      frame[bit / 8] ^= (uint8_t)(1u << bit % 8);
      cr_assert_eq(decode(frame, len), CKF_ERR_CHECKSUM);
      frame[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
  }
}

Test(ckf_cbi1, short_bodies_end_in_readable_memory) {
  uint8_t frame[128];
  for (int kind = 1; kind <= 2; kind++)
    for (size_t len = 48; len < 80; len++) {
      memset(frame, 0, sizeof frame);
      make_delta(frame, sizeof frame, 0);
      put(frame, 6, (uint64_t)kind, 2);
      memset(frame + 48, 0, 32);
      put(frame, 52, 1, 4); /* chunk_count of a chunk */
      seal(frame, len);
      const int rc = decode_guarded(frame, len);
      const bool good = kind == 1 ? len >= 64 && (len - 64) % 8 == 0 : len == 60;
      cr_assert_eq(rc, good ? CKF_OK : CKF_ERR_MALFORMED, "kind %d, %zu bytes: %d", kind, len, rc);
    }
}

/* One way to break a frame per row of the decoder's table, in its order. */
typedef struct fault {
  int err;
  void (*apply)(uint8_t *frame, size_t *len);
} fault;

static void break_truncated(uint8_t *frame, size_t *len) {
  (void)frame;
  *len = 47;
}
static void break_size(uint8_t *frame, size_t *len) {
  (void)frame;
  *len = CKF_CBI1_MAX_FRAME_BYTES + 1;
}
static void break_magic(uint8_t *frame, size_t *len) {
  (void)len;
  frame[3] = '2';
}
static void break_wire(uint8_t *frame, size_t *len) {
  (void)len;
  put(frame, 4, 2, 2);
}
static void break_checksum(uint8_t *frame, size_t *len) {
  (void)len;
  frame[44] ^= 1;
}
static void break_version(uint8_t *frame, size_t *len) {
  (void)len;
  put(frame, 10, 2, 2);
}
static void break_bits(uint8_t *frame, size_t *len) {
  (void)len;
  frame[8] = 12;
}
static void break_slots(uint8_t *frame, size_t *len) {
  (void)len;
  frame[9] = 8;
}
static void break_seed(uint8_t *frame, size_t *len) {
  (void)len;
  put(frame, 12, 1, 8);
}
static void break_flags(uint8_t *frame, size_t *len) {
  (void)len;
  put(frame, 6, 3, 2);
}

Test(ckf_cbi1, B2_B3_of_two_faults_the_earlier_row_is_reported) {
  static const fault faults[] = {
      {CKF_ERR_TRUNCATED, break_truncated},
      {CKF_ERR_FRAME_TOO_LARGE, break_size},
      {CKF_ERR_MAGIC, break_magic},
      {CKF_ERR_WIRE_VERSION, break_wire},
      {CKF_ERR_CHECKSUM, break_checksum},
      {CKF_ERR_FORMAT_VERSION, break_version},
      {CKF_ERR_FORMAT_FINGERPRINT_BITS, break_bits},
      {CKF_ERR_FORMAT_SLOTS, break_slots},
      {CKF_ERR_FORMAT_MISMATCH, break_seed},
      {CKF_ERR_FLAGS, break_flags},
  };
  const size_t n = sizeof faults / sizeof faults[0];
  uint8_t *frame = calloc(1, CKF_CBI1_MAX_FRAME_BYTES + 1);
  for (size_t i = 0; i < n; i++)
    for (size_t j = i; j < n; j++) {
      size_t len = make_delta(frame, 1024, 3), other;
      if (i == 0 && j == 1) /* too short and too long at once cannot be */
        continue;
      other = len;
      faults[j].apply(frame, j == 0 || j == 1 ? &len : &other);
      if (i != j)
        faults[i].apply(frame, i == 0 || i == 1 ? &len : &other);
      cr_assert_eq(decode(frame, len), faults[i].err, "faults %zu and %zu", i, j);
    }
  free(frame);
}

Test(ckf_cbi1, B2_bodies_are_checked_in_order) {
  static uint8_t frame[1024];
  ckf_cbi1_frame view;
  size_t len = make_delta(frame, sizeof frame, 3);
  put(frame, 60, 64, 4); /* a bucket that is none */
  put(frame, 56, CKF_CBI1_MAX_IMAGES + 1, 4);
  seal(frame, len);
  cr_assert_eq(ckf_cbi1_decode(&format, frame, len, &view), CKF_ERR_DELTA_IMAGE_COUNT);
  cr_assert_eq(view.detail, CKF_CBI1_MAX_IMAGES + 1);
  put(frame, 56, 3, 4);
  seal(frame, len);
  cr_assert_eq(decode(frame, len), CKF_ERR_MALFORMED);
  put(frame, 60, 63, 4);
  seal(frame, len);
  cr_assert_eq(decode(frame, len), CKF_OK);

  len = make_chunk(frame, sizeof frame);
  for (uint64_t offset = 40; offset < 44; offset++) {
    put(frame, 56, offset, 8);
    seal(frame, len);
    cr_assert_eq(decode(frame, len), offset + 24 <= 64 ? CKF_OK : CKF_ERR_MALFORMED);
  }
  put(frame, 56, UINT64_MAX - 3, 8);
  seal(frame, len);
  cr_assert_eq(decode(frame, len), CKF_ERR_MALFORMED);
}

Test(ckf_cbi1, B2_encoders_check_and_fit_exactly) {
  const ckf_format odd = {1, 6};
  const ckf_image bad[2] = {{1, 1}, {64, 1}};
  uint64_t words[64] = {0};
  uint8_t out[1024];
  cr_assert_eq(ckf_cbi1_delta_encode(&odd, 1, 0, 1, NULL, 0, out, sizeof out),
               CKF_ERR_FORMAT_BUCKET_COUNT);
  cr_assert_eq(ckf_cbi1_delta_encode(&format, 1, 0, 1, bad, 2, out, sizeof out),
               CKF_ERR_BUCKET_INDEX);
  for (size_t cap = 0; cap < 84; cap++)
    cr_assert_eq(ckf_cbi1_delta_encode(&format, 1, 0, 1, bad, 1, out, cap),
                 cap < 72 ? CKF_ERR_NOSPACE : 72);
  cr_assert_eq(ckf_cbi1_snapshot_encode(&format, 1, 1, words, 63, 64, 0, out, sizeof out),
               CKF_ERR_SNAPSHOT_BUCKET_COUNT);
  cr_assert_eq(ckf_cbi1_snapshot_encode(&format, 1, 1, words, 64, 64, 1, out, sizeof out),
               CKF_ERR_ARG);
  cr_assert_eq(ckf_cbi1_snapshot_encode(&format, 1, 1, words, 64, 0, 0, out, sizeof out),
               CKF_ERR_ARG);
  cr_assert_eq(ckf_cbi1_snapshot_encode(&format, 1, 1, words, 64, 64, 0, out, 64 + 511),
               CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_cbi1_snapshot_encode(&format, 1, 1, words, 64, 64, 0, out, 64 + 512), 64 + 512);
  cr_assert_eq(ckf_cbi1_delta_size(CKF_CBI1_MAX_IMAGES + 1), 0);
  cr_assert_eq(ckf_cbi1_chunk_count(&format, CKF_CBI1_MAX_CHUNK_BUCKETS + 1), 0);
}

static bool words_lie_as_sent(void) {
  const uint64_t one = 1;
  uint8_t lowest;
  memcpy(&lowest, &one, 1);
  return lowest == 1;
}

/* Every chunk size, at an odd address; header and words from memory give the same frame. */
Test(ckf_cbi1, B4_any_split_assembles_to_the_same_words) {
  const ckf_format big = {3, 256};
  static uint64_t words[256], collected[256];
  static uint8_t buffer[4096];
  uint8_t *const frame = buffer + 1;
  for (size_t i = 0; i < 256; i++)
    words[i] = draw(UINT64_MAX);
  for (uint32_t chunk_buckets = 1; chunk_buckets <= 260; chunk_buckets++) {
    const uint32_t chunks = ckf_cbi1_chunk_count(&big, chunk_buckets);
    uint64_t epoch = 0;
    ckf_assembly assembly;
    memset(collected, 0, sizeof collected);
    cr_assert_eq(ckf_assembly_init(&assembly, &big, collected, 256), CKF_OK);
    for (uint32_t i = 0; i < chunks; i++) {
      const ptrdiff_t len = ckf_cbi1_snapshot_encode(&big, 9, 77, words, 256, chunk_buckets, i,
                                                     frame, sizeof buffer - 1);
      uint8_t prefix[CKF_CBI1_SNAPSHOT_PREFIX_BYTES];
      const uint64_t *body;
      size_t n;
      ckf_cbi1_frame view;
      cr_assert_gt(len, 0);
      const int err =
          ckf_cbi1_snapshot_prefix(&big, 9, 77, words, 256, chunk_buckets, i, prefix, &body, &n);
      if (words_lie_as_sent()) {
        cr_assert_eq(err, CKF_OK);
        cr_assert_arr_eq(prefix, frame, sizeof prefix);
        cr_assert_eq(sizeof prefix + n * 8, (size_t)len);
        cr_assert_arr_eq(body, frame + sizeof prefix, n * 8);
      } else {
        cr_assert_eq(err, CKF_ERR_ARG);
      }
      cr_assert_eq(ckf_cbi1_decode(&big, frame, (size_t)len, &view), CKF_OK);
      cr_assert_eq(ckf_assembly_absorb(&assembly, &view, &epoch), i + 1 == chunks);
    }
    cr_assert_eq(epoch, 77);
    cr_assert_arr_eq(collected, words, sizeof words);
  }
}

Test(ckf_cbi1, B4_a_filter_of_two_full_chunks_assembles_in_order_only) {
  const ckf_format big = {3, 1u << 20};
  const size_t n = (size_t)big.bucket_count, cap = CKF_CBI1_MAX_FRAME_BYTES;
  uint64_t *const words = calloc(n, 8), *const collected = calloc(n, 8);
  uint8_t *const frame = malloc(cap);
  ckf_assembly assembly;
  uint64_t epoch = 0;
  words[0] = 1;
  words[524289] = 2;
  words[n - 1] = UINT64_MAX;
  cr_assert_eq(ckf_cbi1_chunk_count(&big, CKF_CBI1_MAX_CHUNK_BUCKETS), 2);
  cr_assert_eq(ckf_assembly_init(&assembly, &big, collected, n), CKF_OK);
  static const uint32_t order[] = {1, 0, 1};
  static const int want[] = {CKF_ERR_CHUNK_SEQUENCE, 0, 1};
  for (int i = 0; i < 3; i++) {
    ckf_cbi1_frame view;
    const ptrdiff_t len = ckf_cbi1_snapshot_encode(
        &big, 9, 77, words, n, CKF_CBI1_MAX_CHUNK_BUCKETS, order[i], frame, cap);
    cr_assert_eq(len, (ptrdiff_t)cap, "as large as a frame may be");
    cr_assert_eq(ckf_cbi1_decode(&big, frame, (size_t)len, &view), CKF_OK);
    cr_assert_eq(ckf_assembly_absorb(&assembly, &view, &epoch), want[i]);
  }
  cr_assert_eq(epoch, 77);
  cr_assert_eq(memcmp(collected, words, n * 8), 0);
  free(words);
  free(collected);
  free(frame);
}
