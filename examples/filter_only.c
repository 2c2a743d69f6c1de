/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The filter alone: ckf.h and nothing else of kvrelay. Keys go in, questions are answered, the
 * words travel as CBI1 frames, as the relay sends them, and answer elsewhere.
 *
 *   cc -I.. filter_only.c && ./a.out
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define CKF_IMPLEMENTATION
#include "ckf.h"

enum { KEYS = 20000, CHUNK_BUCKETS = 1024 };

/* Any 64-bit number is a key; a relay uses the sequence hash of a block. */
static uint64_t key_of(uint64_t i) { return ckf_rng_draw(&i); }

static void need(bool right, const char *what) {
  if (!right) {
    fprintf(stderr, "filter_only: %s\n", what);
    exit(1);
  }
}

/* Sends a snapshot in chunks; here it arrives in `replica` at once. */
static size_t transfer(const ckf_format *format, const uint64_t *words, uint64_t epoch,
                       ckf_replica *replica) {
  const uint32_t chunks = ckf_cbi1_chunk_count(format, CHUNK_BUCKETS);
  size_t bytes = 0;
  for (uint32_t i = 0; i < chunks; i++) {
    const size_t len = ckf_cbi1_snapshot_size(format, CHUNK_BUCKETS, i);
    uint8_t *const frame = malloc(len);
    ckf_cbi1_frame view;
    need(frame != NULL, "no memory");
    need(ckf_cbi1_snapshot_encode(format, 1, epoch, words, (size_t)format->bucket_count,
                                  CHUNK_BUCKETS, i, frame, len) == (ptrdiff_t)len,
         "encode");
    /* The receiver checks every byte before it believes any. */
    need(ckf_cbi1_decode(format, frame, len, &view) == CKF_OK, "decode");
    need(ckf_replica_apply(replica, &view) == (i + 1 == chunks), "apply");
    frame[len - 1] ^= 1;
    need(ckf_cbi1_decode(format, frame, len, &view) == CKF_ERR_CHECKSUM, "a bad frame passed");
    free(frame);
    bytes += len;
  }
  return bytes;
}

int main(void) {
  /* How many buckets hold so many keys at the load the protocol wants? */
  ckf_config cfg = ckf_config_default();
  ckf_format format;
  cfg.expected_blocks = KEYS;
  format.seed = cfg.seed;
  need(ckf_config_check(&cfg, &format.bucket_count) == CKF_OK, "configuration");

  /* All memory is ours: words, the log of one insertion's moves, and the replica's block. */
  const size_t words_bytes = (size_t)format.bucket_count * sizeof(uint64_t);
  const size_t replica_bytes = ckf_replica_mem_size(&format);
  uint64_t *const words = calloc(1, words_bytes);
  ckf_image *const log = malloc((cfg.max_kicks + 1) * sizeof *log);
  void *const mem = malloc(replica_bytes);
  need(words && log && mem, "no memory");

  ckf_filter filter;
  need(ckf_filter_init(&filter, &format, cfg.max_kicks, words, log, NULL) == CKF_OK, "init");
  for (uint64_t i = 0; i < KEYS; i++)
    need(ckf_filter_insert(&filter, key_of(i)) == CKF_OK, "the filter is full");
  for (uint64_t i = 0; i < KEYS; i += 2)
    need(ckf_filter_remove(&filter, key_of(i)) == CKF_OK, "a key is missing");
  printf("%d keys, every other one removed: %" PRIu64 " buckets, %zu bytes\n", KEYS,
         format.bucket_count, words_bytes);

  ckf_replica replica;
  need(ckf_replica_init(&replica, &format, mem, replica_bytes) == CKF_OK, "replica");
  const size_t sent = transfer(&format, words, 1, &replica);
  printf("snapshot: %u frames, %zu bytes\n", ckf_cbi1_chunk_count(&format, CHUNK_BUCKETS), sent);

  /* A filter has no false negatives and few false positives, here as there. */
  const uint64_t *const theirs = ckf_replica_words(&replica);
  size_t found[2] = {0, 0};
  for (uint64_t i = 0; i < KEYS; i++) {
    const uint64_t key = key_of(i);
    found[i % 2] += ckf_search(&format, theirs, &key, 1);
  }
  printf("the copy finds %zu of %d keys that stayed, and %zu of %d that went\n", found[1], KEYS / 2,
         found[0], KEYS / 2);
  need(found[1] == KEYS / 2 && found[0] < KEYS / 1000, "the copy is wrong");

  free(words);
  free(log);
  free(mem);
  return 0;
}
