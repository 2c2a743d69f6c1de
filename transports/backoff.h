/* SPDX-License-Identifier: Apache-2.0 */
/* backoff.h - when a client may try again (grpc.md, C4): both transports pause alike. */
#ifndef KVRELAY_BACKOFF_H
#define KVRELAY_BACKOFF_H

#include "kvrelay.h"

typedef struct kvrelay_backoff {
  uint64_t first_ns, max_ns;
  uint64_t next_ns; /* the pause after the next failure, before jitter; set back to `first_ns` by
                       whoever hears that the server is there */
  uint64_t random;  /* any seed, different from client to client */
} kvrelay_backoff;

/*
 * After an attempt that began at `attempt_ns` has failed, or the connection it made is lost: when
 * the next one begins.  The pause, ± 20 %, counts from that beginning, so that a connection that
 * lived for a while is replaced at once; the next pause is 1.6 times as long, up to `max_ns`.
 */
static inline uint64_t kvrelay_backoff_failed(kvrelay_backoff *b, uint64_t attempt_ns,
                                              uint64_t now_ns) {
  const uint64_t spread = b->next_ns / 5 * 2;
  b->random = b->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  const uint64_t pause = b->next_ns / 5 * 4 + (spread == 0 ? 0 : (b->random >> 11) % spread);
  b->next_ns = b->next_ns > b->max_ns / 8 * 5 ? b->max_ns : b->next_ns / 5 * 8;
  if (pause > KVRELAY_TIME_NONE - attempt_ns)
    return KVRELAY_TIME_NONE;
  return attempt_ns + pause > now_ns ? attempt_ns + pause : now_ns;
}

#endif
