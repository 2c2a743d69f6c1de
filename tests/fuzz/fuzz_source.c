/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_source as a whole: live batches, replies, markers, connections and times in any order,
 * beside the naive model of support/source_schedule.h.
 *
 * SECURITY.md: 3, 12, 14.
 *
 * Input: one byte for the options, then one for each step.
 */

#include "../support/source_schedule.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  uint64_t counts[KVRELAY_COUNT_LEN] = {0};
  const char *wrong = source_schedule_run(data, len < 2000 ? len : 2000, counts);
  if (wrong)
    fprintf(stderr, "%s\n", wrong);
  FUZZ_CHECK(wrong == NULL);
  return 0;
}
