/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_assembly_absorb: sequences of decoded frames against the state machine in plain lists. Words
 * count only when a snapshot is complete; nothing is ever written outside them.
 *
 * SECURITY.md: 1, 2, 5, 6.
 */

#include "frames.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static const ckf_format format = {0x5EED, FRAME_BUCKETS};
  fuzz_input in = {data, len};
  uint64_t *words = fuzz_alloc(FRAME_BUCKETS * 8);
  frame_chunks model = {.buckets = FRAME_BUCKETS};
  ckf_assembly assembly;
  FUZZ_CHECK(ckf_assembly_init(&assembly, &format, words, FRAME_BUCKETS) == CKF_OK);
  while (in.left > 0) {
    uint8_t frame[FRAME_CAP];
    const size_t frame_len = frame_read(&in, &format, frame);
    const ckf_format own = {format.seed, frame_get(frame, 20, 8)};
    ckf_cbi1_frame view;
    if (ckf_cbi1_decode(&own, frame, frame_len, &view) != CKF_OK)
      continue;
    uint64_t epoch = 0xE;
    const int rc = ckf_assembly_absorb(&assembly, &view, &epoch);
    FUZZ_CHECK(rc == frame_chunks_take(&model, frame, frame_len));
    FUZZ_CHECK(epoch == (rc == 1 ? model.epoch : 0xE));
    if (rc == 1)
      FUZZ_CHECK(memcmp(words, model.words, FRAME_BUCKETS * 8) == 0);
  }
  free(words);
  return 0;
}
