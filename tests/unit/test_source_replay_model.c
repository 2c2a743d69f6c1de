/* SPDX-License-Identifier: Apache-2.0 */
/* Random lives of a source with a replay endpoint beside a naive model (support/source_schedule.h).
 */
#include <criterion/criterion.h>
#include <inttypes.h>

#include "support/source_schedule.h"

enum { LIVES = 6000, STEPS_MAX = 300 };

static void run(uint64_t seed) {
  uint64_t counts[KVRELAY_COUNT_LEN] = {0}, random = seed;
  for (int life = 0; life < LIVES; life++) {
    uint8_t bytes[STEPS_MAX];
    size_t len = 20 + ckf_rng_draw(&random) % (STEPS_MAX - 20);
    /* Some lives are calm: without the last few kinds of step, replies get through. */
    uint64_t kinds = ckf_rng_draw(&random) % 3 == 0 ? 16 : 9 + ckf_rng_draw(&random) % 7;
    for (size_t i = 0; i < len; i++)
      bytes[i] = (uint8_t)(ckf_rng_draw(&random) % kinds | ckf_rng_draw(&random) % 16 << 4);
    const char *wrong = source_schedule_run(bytes, len, counts);
    cr_assert_null(wrong, "seed %" PRIu64 ", life %d: %s", seed, life, wrong);
  }
  static const int happened[] = {KVRELAY_COUNT_GAP,
                                 KVRELAY_COUNT_REPLAY,
                                 KVRELAY_COUNT_LOSS,
                                 KVRELAY_COUNT_RESTART,
                                 KVRELAY_COUNT_ORPHAN,
                                 KVRELAY_COUNT_RECOVERY,
                                 KVRELAY_COUNT_PAYLOAD_MALFORMED};
  for (size_t i = 0; i < sizeof happened / sizeof happened[0]; i++)
    cr_assert_gt(counts[happened[i]], 1000, "%s: %" PRIu64, kvrelay_count_name(happened[i]),
                 counts[happened[i]]);
}

Test(source_replay_model, random_lives_1) { run(1); }
Test(source_replay_model, random_lives_2) { run(2); }
