/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_cbi1_decode: any bytes against the decoder's table, written out once more; then every read of
 * the view, and what was accepted encodes to the same bytes.
 *
 * SECURITY.md: 1, 2, 4, 5.
 *
 * Input: one control byte (bit 0: repair the checksum; bits 1, 2: which format is expected), then
 * the frame.
 */

#include "frames.h"

/* The first failing row of the table, CKF_OK when none does. */
static int expect_delta(const ckf_format *expected, const uint8_t *frame, size_t len) {
  const size_t body = len - 48;
  if (body < 12)
    return CKF_ERR_MALFORMED;
  const uint64_t count = frame_get(frame, 56, 4);
  if (count > 349525)
    return CKF_ERR_DELTA_IMAGE_COUNT;
  if (body != 12 + 12 * count)
    return CKF_ERR_MALFORMED;
  for (size_t i = 0; i < count; i++)
    if (frame_get(frame, 60 + 12 * i, 4) >= expected->bucket_count)
      return CKF_ERR_MALFORMED;
  return CKF_OK;
}

static int expect_chunk(const ckf_format *expected, const uint8_t *frame, size_t len) {
  const size_t body = len - 48;
  if (body < 16)
    return CKF_ERR_MALFORMED;
  const uint64_t index = frame_get(frame, 48, 4), count = frame_get(frame, 52, 4);
  const uint64_t offset = frame_get(frame, 56, 8), words = (body - 16) / 8;
  if (count == 0 || index >= count || (body - 16) % 8 != 0)
    return CKF_ERR_MALFORMED;
  const bool wraps = offset + words < offset;
  return wraps || offset + words > expected->bucket_count ? CKF_ERR_MALFORMED : CKF_OK;
}

static int expect_verdict(const ckf_format *expected, const uint8_t *frame, size_t len) {
  if (len < 48)
    return CKF_ERR_TRUNCATED;
  if (len > 4194368)
    return CKF_ERR_FRAME_TOO_LARGE;
  if (memcmp(frame, "CBI1", 4) != 0)
    return CKF_ERR_MAGIC;
  if (frame_get(frame, 4, 2) != 1)
    return CKF_ERR_WIRE_VERSION;
  if (frame_get(frame, 44, 4) != (XXH3_64bits(frame + 48, len - 48) & UINT32_MAX))
    return CKF_ERR_CHECKSUM;
  if (frame_get(frame, 20, 8) > SIZE_MAX)
    return CKF_ERR_MALFORMED;
  if (frame_get(frame, 10, 2) != 1)
    return CKF_ERR_FORMAT_VERSION;
  if (frame_get(frame, 8, 1) != 16)
    return CKF_ERR_FORMAT_FINGERPRINT_BITS;
  if (frame_get(frame, 9, 1) != 4)
    return CKF_ERR_FORMAT_SLOTS;
  if (frame_get(frame, 12, 8) != expected->seed ||
      frame_get(frame, 20, 8) != expected->bucket_count)
    return CKF_ERR_FORMAT_MISMATCH;
  switch (frame_get(frame, 6, 2)) {
  case 1:
    return expect_chunk(expected, frame, len);
  case 2:
    return expect_delta(expected, frame, len);
  default:
    return CKF_ERR_FLAGS;
  }
}

/* Bytes in front of the checksum's field do not matter to it, so all of them must come back. */
static void check_delta(const ckf_format *format, const ckf_cbi1_frame *view, const uint8_t *frame,
                        size_t len) {
  FUZZ_CHECK(view->kind == CKF_CBI1_DELTA);
  FUZZ_CHECK(view->base_epoch == frame_get(frame, 48, 8));
  FUZZ_CHECK(view->image_count == frame_get(frame, 56, 4));
  ckf_image *images = fuzz_alloc(view->image_count * sizeof *images);
  for (size_t i = 0; i < view->image_count; i++) {
    images[i] = ckf_cbi1_image(view, i);
    FUZZ_CHECK(images[i].bucket == frame_get(frame, 60 + 12 * i, 4));
    FUZZ_CHECK(images[i].word == frame_get(frame, 64 + 12 * i, 8));
  }
  FUZZ_CHECK(ckf_cbi1_delta_size(view->image_count) == len);
  uint8_t *again = fuzz_alloc(len);
  FUZZ_CHECK(ckf_cbi1_delta_encode(format, view->dc_id, view->base_epoch, view->epoch, images,
                                   view->image_count, again, len) == (ptrdiff_t)len);
  FUZZ_CHECK(memcmp(again, frame, len) == 0);
  free(again);
  free(images);
}

/* Encodes again where the chunk lies as the encoder would cut: all chunks but the last equally
 * long. */
static void check_chunk_again(const ckf_format *format, const ckf_cbi1_frame *view,
                              const uint8_t *frame, size_t len) {
  const uint64_t buckets = format->bucket_count;
  const uint32_t last = view->chunk_count - 1;
  const uint64_t each = view->chunk_index < last ? view->word_count
                        : last                   ? view->bucket_offset / last
                                                 : buckets;
  if (buckets > 4096 || each == 0 || each > buckets || view->chunk_index * each >= buckets ||
      view->bucket_offset != view->chunk_index * each ||
      ckf_cbi1_chunk_count(format, (uint32_t)each) != view->chunk_count ||
      ckf_cbi1_snapshot_size(format, (uint32_t)each, view->chunk_index) != len)
    return;
  uint64_t *words = fuzz_alloc((size_t)buckets * 8);
  for (size_t i = 0; i < view->word_count; i++)
    words[view->bucket_offset + i] = ckf_cbi1_word(view, i);
  uint8_t *again = fuzz_alloc(len);
  FUZZ_CHECK(ckf_cbi1_snapshot_encode(format, view->dc_id, view->epoch, words, (size_t)buckets,
                                      (uint32_t)each, view->chunk_index, again,
                                      len) == (ptrdiff_t)len);
  FUZZ_CHECK(memcmp(again, frame, len) == 0);
  free(again);
  free(words);
}

static void check_chunk(const ckf_format *format, const ckf_cbi1_frame *view, const uint8_t *frame,
                        size_t len) {
  FUZZ_CHECK(view->kind == CKF_CBI1_SNAPSHOT);
  FUZZ_CHECK(view->chunk_index == frame_get(frame, 48, 4));
  FUZZ_CHECK(view->chunk_count == frame_get(frame, 52, 4));
  FUZZ_CHECK(view->bucket_offset == frame_get(frame, 56, 8));
  FUZZ_CHECK(view->word_count == (len - 64) / 8);
  for (size_t i = 0; i < view->word_count; i++)
    FUZZ_CHECK(ckf_cbi1_word(view, i) == frame_get(frame, 64 + 8 * i, 8));
  check_chunk_again(format, view, frame, len);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t data_len) {
  fuzz_input in = {data, data_len};
  const uint8_t control = fuzz_byte(&in);
  size_t len;
  uint8_t *frame = fuzz_take(&in, in.left, &len);
  ckf_format expected = {0x5EED, 64};
  if ((control & 6) == 2)
    expected = (ckf_format){CKF_DEFAULT_SEED, 2};
  if ((control & 6) == 4)
    expected = (ckf_format){CKF_DEFAULT_SEED, CKF_MAX_BUCKETS};
  if ((control & 6) == 6 && len >= 28)
    expected = (ckf_format){frame_get(frame, 12, 8), frame_get(frame, 20, 8)};
  if (ckf_format_check(&expected) != CKF_OK)
    expected.bucket_count = 1024;
  if (control & 1)
    frame_seal(frame, len);

  ckf_cbi1_frame view;
  const int rc = ckf_cbi1_decode(&expected, frame, len, &view);
  FUZZ_CHECK(rc == expect_verdict(&expected, frame, len));
  if (rc == CKF_OK) {
    FUZZ_CHECK(view.dc_id == frame_get(frame, 28, 8) && view.epoch == frame_get(frame, 36, 8));
    FUZZ_CHECK(view.format.seed == expected.seed &&
               view.format.bucket_count == expected.bucket_count);
    if (frame_get(frame, 6, 2) == 2)
      check_delta(&expected, &view, frame, len);
    else
      check_chunk(&expected, &view, frame, len);
  }
  free(frame);
  return 0;
}
