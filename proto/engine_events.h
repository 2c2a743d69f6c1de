/* SPDX-License-Identifier: Apache-2.0 */
/* engine_events.h - KV events of engines: msgpack payloads to kvrelay_engine_event. */

/*
 *   kvrelay_engine_decoder d;
 *   size_t len = kvrelay_engine_decoder_mem_size(1 << 20);
 *   if (kvrelay_engine_decoder_init(&d, 1 << 20, malloc(len), len) != KVRELAY_OK) return;
 *   kvrelay_engine_batch batch;
 *   kvrelay_engine_event ev;
 *   if (kvrelay_engine_batch_begin(&d, payload, payload_len, &batch) != KVRELAY_OK)
 *     count_a_lost_batch();
 *   while (kvrelay_engine_batch_next(&d, &ev)) apply(&batch, &ev);
 *
 * Both encodings of a batch and of an event, of every engine version since 2025.  A payload is
 * checked to be well-formed msgpack as a whole before the first event comes out.  Tokens are read
 * by libmpack, and the unsigned integers, most of every payload, here: 390 000 stores of 16 blocks
 * a second, where msgpack-c managed 300 000 and allocated 24 bytes for every byte a peer chose to
 * send; nothing here calls malloc.
 */
#ifndef KVRELAY_ENGINE_EVENTS_H
#define KVRELAY_ENGINE_EVENTS_H

#include "kvrelay.h"

#define KVRELAY_ENGINE_DEPTH_MAX 32 /* nesting levels of a payload */

/* One batch. */
typedef struct kvrelay_engine_batch {
  bool has_ts;
  double ts; /* seconds, wall clock of the engine; only informative */
  bool has_rank;
  uint32_t rank;         /* negative numbers in two's complement */
  bool rank_type;        /* the rank had an impossible type and counts as absent */
  size_t events;         /* how many will come out */
  size_t trailing_bytes; /* behind the value, ignored */
} kvrelay_engine_batch;

/* Where the next token is. */
typedef struct kvrelay_engine_cursor_ {
  const char *at;
  size_t left;
} kvrelay_engine_cursor_;

/* Decoder with room for one event; private fields, size may change. */
typedef struct kvrelay_engine_decoder {
  uint32_t *tokens_;
  uint64_t *externals_;
  kvrelay_extra_key *extra_keys_;
  kvrelay_mm_object *mm_objects_;
  size_t tokens_cap_, externals_cap_, extra_keys_cap_, mm_objects_cap_;
  kvrelay_engine_cursor_ next_; /* at the next event */
  size_t events_left_;
} kvrelay_engine_decoder;

/* Bytes for events of at most `max_tokens` tokens, 64 .. 2^28; 0 when out of range. */
size_t kvrelay_engine_decoder_mem_size(size_t max_tokens);
/* KVRELAY_OK; KVRELAY_ERR_ARG; KVRELAY_ERR_NOSPACE.  `mem` is used as long as the decoder. */
KVRELAY_MUST_USE int kvrelay_engine_decoder_init(kvrelay_engine_decoder *d, size_t max_tokens,
                                                 void *mem, size_t len);

/*
 * Checks a payload and finds its events.  `payload` must stay until the last event was handled.
 * KVRELAY_OK; KVRELAY_ERR_TRUNCATED (cut off), KVRELAY_ERR_MALFORMED (not msgpack, or no batch),
 * KVRELAY_ERR_LIMIT (nested too deep): nothing of it may be applied.
 */
KVRELAY_MUST_USE int kvrelay_engine_batch_begin(kvrelay_engine_decoder *d, const uint8_t *payload,
                                                size_t len, kvrelay_engine_batch *batch);
/* 1 and the next event (of any enum kvrelay_engine_event_type), 0 at the end.  The event is lent
 * until the next call. */
int kvrelay_engine_batch_next(kvrelay_engine_decoder *d, kvrelay_engine_event *ev);
/*
 * Decodes the batches whose turn it is and puts their events into the source, which counts what it
 * drops: after each input of the source.  KVRELAY_OK, or KVRELAY_ERR_INVARIANT: fence the producer.
 */
KVRELAY_MUST_USE int kvrelay_engine_drain(kvrelay_engine_decoder *d, kvrelay_source *s,
                                          uint64_t now_ns);
/* One live message of an engine on its whole way: kvrelay_source_live and the above. */
KVRELAY_MUST_USE int kvrelay_engine_feed(kvrelay_engine_decoder *d, kvrelay_source *s,
                                         uint64_t sequence, const uint8_t *payload, size_t len,
                                         uint64_t now_ns);

#endif
