/* SPDX-License-Identifier: Apache-2.0 */
/* polled_events.h - KV events that TensorRT-LLM hands out on request: JSON to kvrelay_engine_event.
 */

/*
 *   kvrelay_polled_config cfg = {.block_size = 32, .ranks = 1, .max_tokens = 1 << 20};
 *   size_t len = kvrelay_polled_mem_size(&cfg);
 *   if (kvrelay_polled_init(&polled, &cfg, malloc(len), len) != KVRELAY_OK) return;
 *   for (;;) { // every few hundred milliseconds
 *     body = get("http://engine:8000/kv_cache_events");
 *     if (kvrelay_polled_feed(&polled, &source, body, body_len, now_ns) != KVRELAY_OK) fence();
 *   }
 *
 * An engine keeps its latest events until somebody asks, and gives each once.  One answer is one
 * batch of a kvrelay_source without replay; the numbers of the batches are made here, so that the
 * source sees what it would see of a stream: the first, the next, a lost one, another process.
 *
 * Read by yajl, which hands over numbers as they stand (a block hash is any unsigned 64-bit number)
 * and builds no tree: beside the answer's own bytes and the memory given to init it takes a parser
 * of constant size and room for one text that has escapes.
 */
#ifndef KVRELAY_POLLED_EVENTS_H
#define KVRELAY_POLLED_EVENTS_H

#include "kvrelay.h"

#define KVRELAY_POLLED_DEPTH_MAX 16 /* nesting levels of an answer */

typedef struct kvrelay_polled_config {
  uint32_t block_size;        /* tokens, of the pool */
  uint32_t rank_start, ranks; /* as in kvrelay_source_config; 1 to 65 536 */
  size_t max_tokens;          /* of one event, 64 .. 2^28 */
} kvrelay_polled_config;

#define KVRELAY_POLLED_TEXT_MAX 1024 /* bytes of an adapter name or salt */

/* What one engine has said so far; private fields, size may change. */
typedef struct kvrelay_polled {
  kvrelay_polled_config cfg_;
  uint64_t *last_ids_; /* by rank; UINT64_MAX = none yet */
  bool *spoke_;        /* by rank: in the answer that is read */
  uint64_t *externals_;
  uint32_t *tokens_;
  kvrelay_mm_object *mm_objects_;
  char *texts_; /* two */
  size_t blocks_cap_;
  uint64_t sequence_; /* of the next answer */
  uint64_t window_;   /* largest seen, 0 = none: only its events count */
  bool stored_;       /* blocks of that window */
} kvrelay_polled;

/* Bytes; 0 when the configuration is out of range. */
size_t kvrelay_polled_mem_size(const kvrelay_polled_config *cfg);
/* KVRELAY_OK; KVRELAY_ERR_ARG; KVRELAY_ERR_NOSPACE.  `mem` is used as long as the reader. */
KVRELAY_MUST_USE int kvrelay_polled_init(kvrelay_polled *p, const kvrelay_polled_config *cfg,
                                         void *mem, size_t len);
/*
 * One answer of the engine: a list of events, or one event.  What cannot be read is counted in the
 * source: an answer that is not JSON, cut off, or too deep is one lost batch, an odd event costs
 * only itself.  Event ids that start over mean another process; a jump of them counts as gap and
 * means no more, since ranks and windows share the numbers.  A request that got no answer is not
 * fed: the engine still has its events.
 *
 * KVRELAY_OK, or KVRELAY_ERR_INVARIANT: fence the producer.
 */
KVRELAY_MUST_USE int kvrelay_polled_feed(kvrelay_polled *p, kvrelay_source *s, const uint8_t *json,
                                         size_t len, uint64_t now_ns);

#endif
