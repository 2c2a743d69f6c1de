/* SPDX-License-Identifier: Apache-2.0 */
/* source_schedule.h - any bytes as a life of an event source, beside a naive model of it. */
#ifndef KVRELAY_SOURCE_SCHEDULE_H
#define KVRELAY_SOURCE_SCHEDULE_H

#include "kvrelay.h"

/*
 * An engine publishes, live batches get lost, answers to requests lose, repeat and mix their
 * replies, the engine restarts, its buffer rolls over, time passes.  After each step the source and
 * the model, which keeps whatever waits in arrays by sequence, hold the same blocks, have counted
 * the same, ask for the same and are in the same state; and each number was applied at most once
 * per process, in order.
 *
 * NULL when all that held, else what did not.  `counts` gets the source's counters added.
 */
const char *source_schedule_run(const uint8_t *bytes, size_t len,
                                uint64_t counts[KVRELAY_COUNT_LEN]);

#endif
