/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The other end of the router examples: a data centre whose engine caches prompts, and whose frames
 * a router receives. What `kvrelayd` does with engines and gRPC is one function call each here.
 */

#ifndef DATA_CENTRE_H
#define DATA_CENTRE_H

#include <stdio.h>
#include <stdlib.h>

#include "ckf.h"
#include "hashfmt.h"

enum { BLOCK_SIZE = 16, MAX_BLOCKS = 512, CHUNK_BUCKETS = 256, BLOCKS_PER_CENTRE = 4000 };

/* The filter parameters that a router and its data centres have agreed on. */
static inline ckf_config agreed_config(void) {
  ckf_config cfg = ckf_config_default();
  cfg.expected_blocks = BLOCKS_PER_CENTRE;
  return cfg;
}

typedef struct data_centre {
  uint64_t id;
  int32_t hash_format; /* of its engines */
  uint64_t sequence;   /* of the last frame */
  ckf_producer producer;
  void *memory;
} data_centre;

static inline void need(bool right, const char *what) {
  if (!right) {
    fprintf(stderr, "%s\n", what);
    exit(1);
  }
}

static inline void data_centre_open(data_centre *dc, uint64_t id, int32_t hash_format) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter = agreed_config();
  const size_t len = ckf_producer_mem_size(&cfg);
  dc->id = id;
  dc->hash_format = hash_format;
  dc->sequence = 0;
  dc->memory = malloc(len);
  need(dc->memory != NULL, "no memory");
  need(ckf_producer_init(&dc->producer, &cfg, dc->memory, len) == CKF_OK, "producer");
}

/* An engine cached the blocks [from, to) of a prompt, `to` being 1 at least. Engines number blocks
 * as they like; this one takes the sequence hashes. */
static inline void data_centre_caches(data_centre *dc, const uint32_t *tokens, size_t from,
                                      size_t to) {
  static uint64_t locals[MAX_BLOCKS], keys[MAX_BLOCKS];
  static ckf_block blocks[MAX_BLOCKS];
  const ckf_member engine = {7, 0};
  const size_t window = (size_t)hashfmt_window_len(dc->hash_format, BLOCK_SIZE);
  size_t count = 0;
  ckf_outcome out;
  need(hashfmt_blocks(dc->hash_format, BLOCK_SIZE, hashfmt_seed(NULL, 0, NULL, 0), tokens,
                      (to - 1) * BLOCK_SIZE + window, locals, keys, MAX_BLOCKS,
                      &count) == HASHFMT_OK &&
           count == to,
       "hashes");
  for (size_t i = from; i < to; i++) {
    blocks[i].external = keys[i];
    blocks[i].local = locals[i];
  }
  need(ckf_producer_stored(&dc->producer, &engine, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, from > 0,
                           from > 0 ? keys[from - 1] : 0, false, 0, blocks + from, to - from,
                           &out) == CKF_OK,
       "store");
}

typedef void (*receive_fn)(void *router, unsigned lane, const uint8_t *frame, size_t len);

/* Sends everything, in chunks. */
static inline void data_centre_sends_snapshot(data_centre *dc, receive_fn receive, void *router,
                                              unsigned lane) {
  const ckf_format *const format = ckf_producer_format(&dc->producer);
  const uint32_t chunks = ckf_cbi1_chunk_count(format, CHUNK_BUCKETS);
  ckf_batch rest;
  need(ckf_producer_drain(&dc->producer, &rest) >= 0, "drain"); /* is in the words already */
  dc->sequence++;
  for (uint32_t i = 0; i < chunks; i++) {
    const size_t len = ckf_cbi1_snapshot_size(format, CHUNK_BUCKETS, i);
    uint8_t *const frame = (uint8_t *)malloc(len);
    need(frame != NULL, "no memory");
    need(ckf_cbi1_snapshot_encode(format, dc->id, dc->sequence, ckf_producer_words(&dc->producer),
                                  (size_t)format->bucket_count, CHUNK_BUCKETS, i, frame,
                                  len) == (ptrdiff_t)len,
         "encode");
    receive(router, lane, frame, len);
    free(frame);
  }
}

/* Sends what has changed since. */
static inline void data_centre_sends_delta(data_centre *dc, receive_fn receive, void *router,
                                           unsigned lane) {
  ckf_batch batch;
  const int changed = ckf_producer_drain(&dc->producer, &batch);
  need(changed >= 0, "drain");
  if (changed) {
    const size_t len = ckf_cbi1_delta_size(batch.image_count);
    uint8_t *const frame = (uint8_t *)malloc(len);
    need(frame != NULL, "no memory");
    need(ckf_cbi1_batch_encode(ckf_producer_format(&dc->producer), dc->id, dc->sequence,
                               dc->sequence + 1, &batch, frame, len) == (ptrdiff_t)len,
         "encode");
    dc->sequence++;
    receive(router, lane, frame, len);
    free(frame);
  }
}

#endif
