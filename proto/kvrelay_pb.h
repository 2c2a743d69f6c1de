/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay_pb.h - messages of dynamo.kvrelay.v1: bytes to and from the structs of kvrelay.h. */

/*
 *   uint8_t mem[65536];
 *   kvrelay_pb_arena arena = {mem, sizeof mem, 0};
 *   kvrelay_catalog_update update;
 *   if (kvrelay_pb_decode_catalog(bytes, len, &arena, &update) == KVRELAY_OK)
 *     kvrelay_consumer_feed_catalog(&consumer, call, &update, now_ns);
 *   arena.used = 0;                                    // update is gone with it
 *
 *   ptrdiff_t need = kvrelay_pb_encode_catalog(&update, NULL, 0);
 *
 * nanopb reads every message, and its tables say how each is written.  One is also written without
 * them: FilterUpdate, whose identity part is the same for a whole stream, see
 * kvrelay_pb_filter_prefix.
 *
 * What is decoded is lent: texts, digests' sources and payloads point into the input bytes, lists
 * into the arena. No peer byte reaches a loop or an allocation beyond the bounds below; nothing
 * here calls malloc.
 */
#ifndef KVRELAY_PB_H
#define KVRELAY_PB_H

#include "kvrelay.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bounds of a reader, besides those of kvrelay.h (KVRELAY_TEXT_MAX, _ALIASES_MAX, _PARTS_MAX,
 * _ROLES_MAX).  Beyond them decoding ends with KVRELAY_ERR_LIMIT; nothing is cut silently. */
#define KVRELAY_PB_MESSAGE_MAX 8388608u /* bytes; kept by whoever receives, not here */
/* pools of a catalog, pools or models of a load window, entries of a readiness message */
#define KVRELAY_PB_ENTRIES_MAX 65536u

/* Memory for the lists of a decoded message.  The caller sets all three; `used` = 0 takes
 * everything back. */
typedef struct kvrelay_pb_arena {
  void *mem;
  size_t len;  /* bytes */
  size_t used; /* bytes */
} kvrelay_pb_arena;

/* ---- the load of serving ---- */
/* For readers of relays that send it: later ones of the contract.  Those of kvrelay.h do not; they
 * would need what the frontends count. */

/* A number that may be absent, which is not 0. */
typedef struct kvrelay_pb_optional {
  bool present;
  uint64_t value;
} kvrelay_pb_optional;

typedef struct kvrelay_pb_request_stats {
  bool present;
  uint64_t requests_started_total, requests_completed_total, requests_failed_total,
      requests_cancelled_total;
  kvrelay_pb_optional requests_awaiting_first_token, requests_generating;
} kvrelay_pb_request_stats;

typedef struct kvrelay_pb_token_stats {
  bool present;
  kvrelay_pb_optional active_prefill_tokens, active_decode_blocks;
  kvrelay_pb_optional awaiting_first_token_input_tokens, inflight_input_tokens;
  kvrelay_pb_optional input_tokens_total, output_tokens_total;
} kvrelay_pb_token_stats;

typedef struct kvrelay_pb_load_view {
  bool present;
  kvrelay_pb_request_stats requests;
  kvrelay_pb_token_stats tokens;
  int32_t status; /* 1 complete, 2 degraded, 3 unavailable */
  uint64_t source_observed_ms;
} kvrelay_pb_load_view;

typedef struct kvrelay_pb_pool_serving {
  kvrelay_producer producer;
  kvrelay_pb_load_view load;
  bool deployment_present;
  kvrelay_pb_optional live_workers, max_concurrency;
} kvrelay_pb_pool_serving;

typedef struct kvrelay_pb_model_serving {
  kvrelay_text namespace_, canonical_model_id;
  kvrelay_pb_load_view load;
  bool deployment_present;
  uint64_t expected_frontends, observed_frontends, ready_frontends;
  const kvrelay_pool_id *serving_pools;
  size_t serving_pools_len;
} kvrelay_pb_model_serving;

typedef struct kvrelay_pb_serving_load {
  kvrelay_envelope envelope;
  uint64_t window_sequence, observed_ms, window_ms;
  const kvrelay_pb_pool_serving *pools;
  size_t pools_len;
  const kvrelay_pb_model_serving *models;
  size_t models_len;
} kvrelay_pb_serving_load;

/*
 * Declares for each message
 *
 *   int kvrelay_pb_decode_<name>(const uint8_t *bytes, size_t len, kvrelay_pb_arena *arena,
 * kvrelay_<type> *out);
 *
 * which reads one whole message: any field order, unknown fields skipped, later scalars win,
 * repeated message fields merge. `arena` may be NULL for a message without lists.  Strings are not
 * checked to be UTF-8; the validators of kvrelay.h do that. Returns KVRELAY_OK;
 * KVRELAY_ERR_TRUNCATED (the last field is cut off), KVRELAY_ERR_MALFORMED (not such a message),
 * KVRELAY_ERR_LIMIT (a bound above: give the plane up), KVRELAY_ERR_NOSPACE (try again with a
 * larger arena).  After an error `out` and arena->used are as before.
 *
 *   ptrdiff_t kvrelay_pb_encode_<name>(const kvrelay_<type> *m, uint8_t *out, size_t cap);
 *
 * which writes the canonical form: fields in number order, zero scalars left out, role lists
 * packed.  Returns the length; with `out` = NULL only that, `cap` does not count then.
 * KVRELAY_ERR_NOSPACE: cap is too small, `out` has no defined content; KVRELAY_ERR_ARG: a digest
 * longer than its struct or more than KVRELAY_ROLES_MAX roles, which can come only from the
 * caller.
 */
#define KVRELAY_PB_MESSAGES(X)                                                                     \
  X(info, kvrelay_relay_info)                                                                      \
  X(catalog, kvrelay_catalog_update)                                                               \
  X(filter, kvrelay_filter_update)                                                                 \
  X(readiness, kvrelay_readiness_update)                                                           \
  X(load, kvrelay_load_update)                                                                     \
  X(serving_load, kvrelay_pb_serving_load)                                                         \
  X(producer, kvrelay_producer)                                                                    \
  X(descriptor, kvrelay_descriptor)                                                                \
  X(pool_id, kvrelay_pool_id)                                                                      \
  X(ckf_format, kvrelay_ckf_format)                                                                \
  X(endpoint, kvrelay_endpoint)                                                                    \
  X(registration, kvrelay_registration)                                                            \
  X(semantics, kvrelay_semantics)                                                                  \
  X(topology_entry, kvrelay_topology_entry)

#define KVRELAY_PB_DECLARE_(NAME, TYPE)                                                            \
  KVRELAY_MUST_USE int kvrelay_pb_decode_##NAME(const uint8_t *bytes, size_t len,                  \
                                                kvrelay_pb_arena *arena, TYPE *out);               \
  KVRELAY_MUST_USE ptrdiff_t kvrelay_pb_encode_##NAME(const TYPE *m, uint8_t *out, size_t cap);
KVRELAY_PB_MESSAGES(KVRELAY_PB_DECLARE_)
#undef KVRELAY_PB_DECLARE_

/*
 * The request of `method` (enum kvrelay_method).  As the functions above, but a subscriber id may
 * have any length and must be UTF-8, else KVRELAY_ERR_MALFORMED: for a request that is part of
 * decoding (WIRE.md, Reading).  KVRELAY_ERR_UNSUPPORTED: there is no such method.
 */
KVRELAY_MUST_USE int kvrelay_pb_decode_request(int32_t method, const uint8_t *bytes, size_t len,
                                               kvrelay_request *out);
/* By m->method; errors as above and KVRELAY_ERR_UNSUPPORTED. */
KVRELAY_MUST_USE ptrdiff_t kvrelay_pb_encode_request(const kvrelay_request *m, uint8_t *out,
                                                     size_t cap);

/* ---- FilterUpdate by splice: prefix + head, payload, tail; and back ---- */

#define KVRELAY_PB_FILTER_PREFIX_CAP                                                               \
  176 /* version, relay and producer with all numbers at their largest */
#define KVRELAY_PB_FILTER_HEAD_CAP (KVRELAY_PB_FILTER_PREFIX_CAP + 56)
#define KVRELAY_PB_FILTER_TAIL_LEN 6

/* The part that all messages of one stream share. */
typedef struct kvrelay_pb_filter_prefix {
  uint8_t bytes[KVRELAY_PB_FILTER_PREFIX_CAP];
  size_t len;
} kvrelay_pb_filter_prefix;

/* Takes envelope and producer of `m`.  KVRELAY_OK, or KVRELAY_ERR_ARG (marker not the contract's,
 * digest too long); then nothing is written. */
KVRELAY_MUST_USE int kvrelay_pb_filter_prefix_init(kvrelay_pb_filter_prefix *prefix,
                                                   const kvrelay_filter_update *m);
/* Everything before the payload's bytes, from the prefix and the numbers of `m`; returns its
 * length. */
size_t kvrelay_pb_filter_head(const kvrelay_pb_filter_prefix *prefix,
                              const kvrelay_filter_update *m,
                              uint8_t out[KVRELAY_PB_FILTER_HEAD_CAP]);
/* Everything behind the payload: the marker. */
extern const uint8_t kvrelay_pb_filter_tail[KVRELAY_PB_FILTER_TAIL_LEN];

/* What a reader knows of one stream: the identity part of its first message, as bytes and as read.
 * Zeroed before the first; fields are private. */
typedef struct kvrelay_pb_filter_stream {
  bool begun_;
  kvrelay_pb_filter_prefix prefix_; /* empty: the stream is not written as the splice does it */
  kvrelay_envelope envelope_;
  kvrelay_producer producer_;
} kvrelay_pb_filter_stream;

/* As kvrelay_pb_decode_filter, but a message that begins as the first one of its stream is read
 * without its identity part. */
KVRELAY_MUST_USE int kvrelay_pb_filter_read(kvrelay_pb_filter_stream *stream, const uint8_t *bytes,
                                            size_t len, kvrelay_filter_update *out);

#ifdef __cplusplus
}
#endif
#endif /* KVRELAY_PB_H */
