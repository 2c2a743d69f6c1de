/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FUZZ_FRAMES_H_
#define FUZZ_FRAMES_H_

/* CBI1 bytes for targets: read and written here from the tables of the format, byte by byte. */

#include "ckf.h"
#include "fuzz.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static inline uint64_t frame_get(const uint8_t *frame, size_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; i++)
    value |= (uint64_t)frame[at + i] << 8 * i;
  return value;
}

static inline void frame_put(uint8_t *frame, size_t at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    frame[at + i] = (uint8_t)(value >> 8 * i);
}

/* Makes the checksum fit whatever the body is. */
static inline void frame_seal(uint8_t *frame, size_t len) {
  if (len >= 48)
    frame_put(frame, 44, XXH3_64bits(frame + 48, len - 48) & UINT32_MAX, 4);
}

/* A header without its checksum; flags 1 = snapshot chunk, 2 = delta. */
static inline void frame_header(uint8_t *frame, uint64_t flags, const ckf_format *format,
                                uint64_t epoch) {
  memcpy(frame, "CBI1", 4);
  frame_put(frame, 4, 1, 2);
  frame_put(frame, 6, flags, 2);
  frame_put(frame, 8, 16, 1);
  frame_put(frame, 9, 4, 1);
  frame_put(frame, 10, 1, 2);
  frame_put(frame, 12, format->seed, 8);
  frame_put(frame, 20, format->bucket_count, 8);
  frame_put(frame, 28, 7, 8);
  frame_put(frame, 36, epoch, 8);
}

/*
 * One frame out of the input: mostly well-formed, its numbers mostly small. `frame` has room for
 * FRAME_CAP bytes; returns how many it takes. A bucket count that differs from `format` can come.
 */
#define FRAME_BUCKETS 16
#define FRAME_CAP (64 + 12 * 2 * FRAME_BUCKETS)

static inline size_t frame_read(fuzz_input *in, const ckf_format *format, uint8_t *frame) {
  const uint8_t shape = fuzz_byte(in);
  ckf_format header = *format;
  const bool snapshot = shape & 1;
  size_t len;
  if ((shape & 0x70) == 0x70)
    header.bucket_count = FRAME_BUCKETS * 2;
  frame_header(frame, snapshot ? 1 : 2, &header, fuzz_edge(in));
  if (snapshot) {
    const size_t words = fuzz_below(in, FRAME_BUCKETS + 1);
    frame_put(frame, 48, fuzz_below(in, 6), 4);
    frame_put(frame, 52, fuzz_below(in, 6), 4);
    frame_put(frame, 56, fuzz_below(in, FRAME_BUCKETS + 2), 8);
    for (size_t i = 0; i < words; i++)
      frame_put(frame, 64 + i * 8, fuzz_number(in, 1) * UINT64_C(0x0001000100010001), 8);
    len = 64 + words * 8;
  } else {
    const size_t images = fuzz_below(in, FRAME_BUCKETS + 2);
    frame_put(frame, 48, fuzz_edge(in), 8);
    frame_put(frame, 56, images, 4);
    for (size_t i = 0; i < images; i++) {
      frame_put(frame, 60 + i * 12, fuzz_below(in, FRAME_BUCKETS + 1), 4);
      frame_put(frame, 64 + i * 12, fuzz_number(in, 2), 8);
    }
    len = 60 + images * 12;
  }
  frame_seal(frame, len);
  return len;
}

/* The state machine that joins chunks, in plain lists. */
typedef struct frame_chunks {
  uint64_t epoch, count, next, bucket, buckets;
  uint64_t words[2 * FRAME_BUCKETS];
} frame_chunks;

static inline void frame_chunks_reset(frame_chunks *c) {
  c->epoch = c->count = c->next = c->bucket = 0;
}

/* 1 complete, 0 more, or the error. */
static inline int frame_chunks_take(frame_chunks *c, const uint8_t *frame, size_t len) {
  if (frame_get(frame, 6, 2) != 1)
    return CKF_ERR_CHUNK_SEQUENCE;
  const uint64_t epoch = frame_get(frame, 36, 8), index = frame_get(frame, 48, 4);
  const uint64_t count = frame_get(frame, 52, 4), offset = frame_get(frame, 56, 8);
  if (count == 0 || index >= count) {
    frame_chunks_reset(c);
    return CKF_ERR_CHUNK_SEQUENCE;
  }
  if (index == 0) {
    frame_chunks_reset(c);
    c->epoch = epoch;
    c->count = count;
  }
  const uint64_t words = (len - 64) / 8;
  if (index != c->next || count != c->count || epoch != c->epoch ||
      frame_get(frame, 20, 8) != c->buckets || offset != c->bucket || offset + words > c->buckets) {
    frame_chunks_reset(c);
    return CKF_ERR_CHUNK_SEQUENCE;
  }
  for (uint64_t i = 0; i < words; i++)
    c->words[c->bucket++] = frame_get(frame, (size_t)(64 + i * 8), 8);
  if (++c->next < c->count)
    return 0;
  const int rc = c->bucket == c->buckets ? 1 : CKF_ERR_INCOMPLETE_COVERAGE;
  const uint64_t done = c->epoch;
  frame_chunks_reset(c);
  c->epoch = rc == 1 ? done : 0;
  return rc;
}

#endif
