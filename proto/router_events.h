/* SPDX-License-Identifier: Apache-2.0 */
/* router_events.h - KV events that workers of Dynamo publish for routers, and their answers to a
 * request for recovery: msgpack to kvrelay_router_event. */

/*
 *   kvrelay_router_decoder d;
 *   size_t len = kvrelay_router_decoder_mem_size(65536);
 *   if (kvrelay_router_decoder_init(&d, 65536, malloc(len), len) != KVRELAY_OK) return;
 *   kvrelay_router_event ev;
 *   int more;
 *   if (kvrelay_router_batch_begin(&d, payload, payload_len) != KVRELAY_OK) drop_the_message();
 *   while ((more = kvrelay_router_batch_next(&d, &ev)) != 0)
 *     if (more == 1) kvrelay_router_live(&router, &ev, now_ns);
 *     else count_a_malformed_event();
 */
#ifndef KVRELAY_ROUTER_EVENTS_H
#define KVRELAY_ROUTER_EVENTS_H

#include "engine_events.h"

/* Decoder with room for one event; private fields, size may change. */
typedef struct kvrelay_router_decoder {
  ckf_block *blocks_;
  uint64_t *externals_;
  size_t cap_;
  kvrelay_engine_cursor_ next_; /* at the next event */
  size_t left_;
} kvrelay_router_decoder;

enum kvrelay_router_answer_kind {
  KVRELAY_ROUTER_ANSWER_DUMP = 0,
  KVRELAY_ROUTER_ANSWER_EVENTS,
  KVRELAY_ROUTER_ANSWER_REFUSED, /* TooNew, InvalidRange, Error */
  KVRELAY_ROUTER_ANSWER_NO_DUMP, /* TreeDumpFailed, or a dump of another scope than all */
  KVRELAY_ROUTER_ANSWER_OTHER    /* of a kind that nobody asked for */
};

typedef struct kvrelay_router_answer {
  int32_t kind;           /* enum kvrelay_router_answer_kind */
  uint64_t last_event_id; /* of a dump and of events: the live cursor */
  kvrelay_text name;      /* of the kind, as the worker says it; lent from the bytes */
} kvrelay_router_answer;

/* Bytes for events of at most `max_blocks` blocks, 1 .. 2^24; 0 when out of range. */
size_t kvrelay_router_decoder_mem_size(size_t max_blocks);
/* KVRELAY_OK; KVRELAY_ERR_ARG; KVRELAY_ERR_NOSPACE.  `mem` is used as long as the decoder. */
KVRELAY_MUST_USE int kvrelay_router_decoder_init(kvrelay_router_decoder *d, size_t max_blocks,
                                                 void *mem, size_t len);
/*
 * Checks the payload of a message, a list of events, and finds them.  `payload` must stay until the
 * last one was handled.  KVRELAY_OK; KVRELAY_ERR_TRUNCATED, KVRELAY_ERR_MALFORMED,
 * KVRELAY_ERR_LIMIT (nested too deep): no event comes out.
 */
KVRELAY_MUST_USE int kvrelay_router_batch_begin(kvrelay_router_decoder *d, const uint8_t *payload,
                                                size_t len);
/* The same for the body of an answer; the events of a dump or list come out after it. */
KVRELAY_MUST_USE int kvrelay_router_answer_begin(kvrelay_router_decoder *d, const uint8_t *body,
                                                 size_t len, kvrelay_router_answer *out);
/* 1 and the next event, 0 at the end; KVRELAY_ERR_MALFORMED, KVRELAY_ERR_LIMIT (too many blocks):
 * this one is none, go on with the next.  The event is lent until the next call. */
int kvrelay_router_batch_next(kvrelay_router_decoder *d, kvrelay_router_event *ev);

#endif
