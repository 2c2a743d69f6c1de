/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_replica_apply: a stream of frames, good and bad, with resets in between, against a replica of
 * plain lists: visible only when complete, and after every error word for word as before.
 *
 * SECURITY.md: 1, 2, 5, 6.
 */

#include "frames.h"

typedef struct model {
  frame_chunks chunks;
  uint64_t words[FRAME_BUCKETS], sequence;
  bool live;
} model;

static int model_delta(model *m, const uint8_t *frame) {
  const uint64_t epoch = frame_get(frame, 36, 8), base = frame_get(frame, 48, 8);
  const uint64_t count = frame_get(frame, 56, 4);
  bool seen[FRAME_BUCKETS] = {false};
  if (!m->live)
    return CKF_ERR_NOT_LIVE;
  if (base != m->sequence || base == UINT64_MAX || epoch != base + 1)
    return CKF_ERR_SEQUENCE;
  if (count == 0)
    return CKF_ERR_EMPTY_DELTA;
  for (size_t i = 0; i < count; i++) {
    const uint64_t bucket = frame_get(frame, 60 + 12 * i, 4);
    if (seen[bucket])
      return CKF_ERR_DUPLICATE_IMAGE;
    seen[bucket] = true;
  }
  for (size_t i = 0; i < count; i++)
    m->words[frame_get(frame, 60 + 12 * i, 4)] = frame_get(frame, 64 + 12 * i, 8);
  m->sequence = epoch;
  return 1;
}

static int model_apply(model *m, const uint8_t *frame, size_t len) {
  if (frame_get(frame, 20, 8) != FRAME_BUCKETS)
    return CKF_ERR_FORMAT_MISMATCH;
  if (frame_get(frame, 6, 2) == 2)
    return model_delta(m, frame);
  if (m->live)
    return CKF_ERR_SNAPSHOT_LIVE;
  const int rc = frame_chunks_take(&m->chunks, frame, len);
  if (rc == 1) {
    memcpy(m->words, m->chunks.words, sizeof m->words);
    m->sequence = m->chunks.epoch;
    m->live = true;
  }
  return rc;
}

static void check(const ckf_replica *replica, const model *m) {
  const uint64_t *words = ckf_replica_words(replica);
  FUZZ_CHECK(ckf_replica_live(replica) == m->live);
  FUZZ_CHECK((words != NULL) == m->live);
  if (m->live) {
    FUZZ_CHECK(ckf_replica_sequence(replica) == m->sequence);
    FUZZ_CHECK(memcmp(words, m->words, sizeof m->words) == 0);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static const ckf_format format = {0x5EED, FRAME_BUCKETS};
  fuzz_input in = {data, len};
  const size_t mem_len = ckf_replica_mem_size(&format);
  void *mem = fuzz_alloc(mem_len);
  model m = {.chunks.buckets = FRAME_BUCKETS};
  ckf_replica replica;
  FUZZ_CHECK(ckf_replica_init(&replica, &format, mem, mem_len) == CKF_OK);
  while (in.left > 0) {
    uint8_t frame[FRAME_CAP];
    const size_t frame_len = frame_read(&in, &format, frame);
    const ckf_format own = {format.seed, frame_get(frame, 20, 8)};
    ckf_cbi1_frame view;
    if (ckf_cbi1_decode(&own, frame, frame_len, &view) == CKF_OK) {
      const int expected = model_apply(&m, frame, frame_len);
      FUZZ_CHECK(ckf_replica_apply(&replica, &view) == expected);
      check(&replica, &m);
    } else { /* what cannot be decoded ends a stream, and the next one starts over */
      ckf_replica_reset(&replica);
      frame_chunks_reset(&m.chunks);
      m.live = false;
      check(&replica, &m);
    }
  }
  free(mem);
  return 0;
}
