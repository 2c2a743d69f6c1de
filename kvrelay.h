/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay.h - the contract dynamo.kvrelay.v1, both sides, without I/O.  Needs ckf.h and hashfmt.h. */

/* ==== purpose ==== */
/*
 * A relay publishes the cuckoo filter of the KV blocks its engines hold; a consumer keeps replicas of such filters and
 * answers how many leading blocks of a prompt each pool holds.  This header is everything between decoded messages and
 * answers: message structs and their validation, identity digests, the relay side (admission, publication hub, cuts and
 * deltas), the consumer side (planes, replicas, query) and the way of engine events into a ckf_producer.
 * It does no I/O, reads no clock and allocates nothing after init; bytes on the wire are the business of proto/.
 *
 *   #define KVRELAY_IMPLEMENTATION
 *   #include "kvrelay.h"
 *
 *   kvrelay_consumer c;                                          // asks
 *   kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
 *   void *mem = malloc(kvrelay_consumer_mem_size(&cfg));
 *   if (kvrelay_consumer_init(&c, &cfg, mem, kvrelay_consumer_mem_size(&cfg), now_ns) < 0) return;
 *   kvrelay_action a;                                            // drive it from any event loop:
 *   while (kvrelay_consumer_action_next(&c, now_ns, &a)) carry_out(&a);
 *   kvrelay_consumer_feed_filter(&c, call, &update, now_ns);     // what arrives goes in,
 *   n = kvrelay_consumer_query(&c, &query, answers, cap, scratch, scratch_len, now_ns);  // questions come out
 */

/* ==== contents ==== */
/*
 *   purpose, contents, conventions and trust, version, configuration, compiler shims
 *   types: numbers of the contract, texts, messages
 *   errors
 *   API: names and errors, identity, validation, relay, consumer, source
 *   implementation in the same order
 */

/* ==== conventions and trust ==== */
/*
 * - Texts are (pointer, length), any byte allowed, never terminated; `ptr` may be NULL when `len` is 0.
 * - Structs marked "lent" point into memory of somebody else; the comment says how long it stays.
 * - Times are monotonic nanoseconds given by the caller; wall clock values are arguments of their own.
 * - Messages of peers are not trusted: validators and feeds accept any content.  Configuration, memory blocks and call
 *   order are the caller's promise; a broken promise gives KVRELAY_ERR_ARG where it can be seen.
 * - An error that is not fatal leaves the object unchanged unless the function says so.
 * - Objects are single-threaded.  Struct sizes may change; fields that end in `_` are private.
 */

#if defined(KVRELAY_STATIC) && defined(KVRELAY_IMPLEMENTATION)
#error "kvrelay.h: define KVRELAY_STATIC or KVRELAY_IMPLEMENTATION, not both"
#endif

#ifndef KVRELAY_H
#define KVRELAY_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ckf.h"
#include "hashfmt.h"

/* ==== version ==== */
#define KVRELAY_VERSION_MAJOR 0
#define KVRELAY_VERSION_MINOR 1
#define KVRELAY_VERSION_PATCH 0
#define KVRELAY_WIRE_VERSION 1 /* protocol_version of the contract */

/* ==== configuration ==== */
#ifdef KVRELAY_CONFIG_H
#include KVRELAY_CONFIG_H
#endif
/* Longest human-readable text in a kvrelay_status, bytes with the terminator, 64 .. 1024; longer ones are cut. */
#ifndef KVRELAY_STATUS_TEXT_CAP
#define KVRELAY_STATUS_TEXT_CAP 192
#endif
#if KVRELAY_STATUS_TEXT_CAP < 64 || KVRELAY_STATUS_TEXT_CAP > 1024
#error "KVRELAY_STATUS_TEXT_CAP must be 64 .. 1024"
#endif
#ifndef KVRELAY_MEMCPY
#include <string.h>
#define KVRELAY_MEMCPY memcpy
#define KVRELAY_MEMMOVE memmove
#define KVRELAY_MEMSET memset
#define KVRELAY_MEMCMP memcmp
#endif

/* ==== compiler shims ==== */
#if defined(KVRELAY_STATIC)
#if defined(__GNUC__)
#define KVRELAY_API static __attribute__((unused))
#else
#define KVRELAY_API static
#endif
#else
#define KVRELAY_API extern
#endif
#if defined(__GNUC__)
#define KVRELAY_MUST_USE __attribute__((warn_unused_result))
#else
#define KVRELAY_MUST_USE
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== types ==== */

/* ---- numbers of the contract ---- */

#define KVRELAY_CONTRACT_MARKER 0x4B565231u
#define KVRELAY_TIME_NONE UINT64_MAX
#define KVRELAY_DIGEST_LEN 16
#define KVRELAY_SUBSCRIBER_ID_MAX 128 /* bytes */

/* RPCs; the numbers are those of the raw transport's REQUEST frame. */
enum kvrelay_method {
  KVRELAY_METHOD_NONE = 0,
  KVRELAY_METHOD_GET_RELAY_INFO = 1,
  KVRELAY_METHOD_WATCH_CATALOG = 2,
  KVRELAY_METHOD_SUBSCRIBE_POOL = 3,
  KVRELAY_METHOD_SUBSCRIBE_READINESS = 4,
  KVRELAY_METHOD_SUBSCRIBE_LOAD = 5,
  KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD = 6
};

/* RelayErrorReason; travels as text, see kvrelay_reason_name. */
enum kvrelay_reason {
  KVRELAY_REASON_NONE = 0,
  KVRELAY_REASON_CONTRACT_MISMATCH = 1,
  KVRELAY_REASON_INVALID_REQUEST = 2,
  KVRELAY_REASON_UNSUPPORTED_FEATURE = 3,
  KVRELAY_REASON_POOL_NOT_FOUND = 4,
  KVRELAY_REASON_PRODUCER_CHANGED = 5,
  KVRELAY_REASON_RESOURCE_LIMIT = 6,
  KVRELAY_REASON_SUBSCRIBER_LAGGED = 7,
  KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT = 8,
  KVRELAY_REASON_PUBLICATION_UNAVAILABLE = 9,
  KVRELAY_REASON_INVALID_PUBLICATION = 10,
  KVRELAY_REASON_INTERNAL = 11
};

/* gRPC status codes that the contract or a transport uses. */
enum kvrelay_grpc_status {
  KVRELAY_GRPC_OK = 0,
  KVRELAY_GRPC_CANCELLED = 1,
  KVRELAY_GRPC_UNKNOWN = 2,
  KVRELAY_GRPC_INVALID_ARGUMENT = 3,
  KVRELAY_GRPC_DEADLINE_EXCEEDED = 4,
  KVRELAY_GRPC_NOT_FOUND = 5,
  KVRELAY_GRPC_PERMISSION_DENIED = 7,
  KVRELAY_GRPC_RESOURCE_EXHAUSTED = 8,
  KVRELAY_GRPC_FAILED_PRECONDITION = 9,
  KVRELAY_GRPC_OUT_OF_RANGE = 11,
  KVRELAY_GRPC_UNIMPLEMENTED = 12,
  KVRELAY_GRPC_INTERNAL = 13,
  KVRELAY_GRPC_UNAVAILABLE = 14,
  KVRELAY_GRPC_UNAUTHENTICATED = 16
};

enum kvrelay_source_kind { KVRELAY_SOURCE_DEFAULT_DERIVED = 1, KVRELAY_SOURCE_EXPLICIT = 2 };
enum kvrelay_update_kind { KVRELAY_UPDATE_SNAPSHOT_CHUNK = 1, KVRELAY_UPDATE_DELTA = 2, KVRELAY_UPDATE_HEARTBEAT = 3 };
enum kvrelay_ready_state { KVRELAY_READY_UNKNOWN = 0, KVRELAY_READY_UNAVAILABLE = 1, KVRELAY_READY_READY = 2 };
enum kvrelay_role {
  KVRELAY_ROLE_PREFILL = 1,
  KVRELAY_ROLE_DECODE = 2,
  KVRELAY_ROLE_ENCODE = 3,
  KVRELAY_ROLE_AGGREGATED = 4,
  KVRELAY_ROLE_LEGACY = 5
};

/* ---- texts and lists ---- */

typedef struct kvrelay_text {
  const uint8_t *ptr; /* lent */
  size_t len;
} kvrelay_text;

typedef struct kvrelay_iov {
  const uint8_t *base; /* lent */
  size_t len;
} kvrelay_iov;

typedef struct kvrelay_roles {
  const int32_t *ptr; /* as on the wire: any 32-bit number may occur; lent */
  size_t len;
} kvrelay_roles;

/* ---- identity messages; `present` tells whether the message field was there ---- */

typedef struct kvrelay_relay_identity {
  uint64_t drt_instance_id;
  uint64_t relay_incarnation;
} kvrelay_relay_identity;

typedef struct kvrelay_digest {
  bool present;
  uint8_t digest[KVRELAY_DIGEST_LEN]; /* the first 16 bytes that were sent, zero behind a shorter one */
  size_t digest_len;                  /* as sent; valid only when 16 */
  int32_t source;                     /* enum kvrelay_source_kind, or any other number a peer sent */
} kvrelay_digest;

typedef struct kvrelay_domain {
  bool present;
  kvrelay_digest cache_semantics;
  kvrelay_digest routing_scope;
} kvrelay_domain;

typedef struct kvrelay_pool_id {
  bool present;
  uint32_t identity_version;
  kvrelay_domain domain;
  uint64_t dc_id;
} kvrelay_pool_id;

typedef struct kvrelay_ckf_format {
  bool present;
  uint32_t format_version;
  uint64_t seed;
  uint64_t bucket_count;
  uint32_t fingerprint_bits;
  uint32_t slots_per_bucket;
} kvrelay_ckf_format;

typedef struct kvrelay_producer {
  bool present;
  kvrelay_pool_id pool_id;
  uint64_t producer_incarnation;
  uint64_t layout_generation;
  kvrelay_ckf_format ckf_format;
} kvrelay_producer;

typedef struct kvrelay_endpoint {
  bool present;
  kvrelay_text namespace_; /* `namespace` is a word of C++ */
  kvrelay_text component;
  kvrelay_text endpoint;
} kvrelay_endpoint;

/* ---- catalog messages ---- */

enum kvrelay_target_kind { KVRELAY_TARGET_NONE = 0, KVRELAY_TARGET_BASE = 1, KVRELAY_TARGET_LORA = 2 };

typedef struct kvrelay_target {
  bool present;
  int32_t kind; /* enum kvrelay_target_kind; NONE with present: no member of the oneof was set */
  kvrelay_text base_model;
  kvrelay_text adapter; /* LORA only: the LoRA salt of hashfmt.h */
} kvrelay_target;

typedef struct kvrelay_registration {
  kvrelay_text canonical_model_id;
  kvrelay_target target;
  const kvrelay_text *aliases; /* lent */
  size_t aliases_len;
} kvrelay_registration;

typedef struct kvrelay_semantics {
  bool present;
  uint32_t kv_block_size; /* tokens */
  int32_t hash_format;    /* HASHFMT_FORMAT_*, or any other number a peer sent */
} kvrelay_semantics;

typedef struct kvrelay_descriptor {
  kvrelay_producer producer;
  kvrelay_endpoint serving_endpoint;
  const kvrelay_registration *registrations; /* lent */
  size_t registrations_len;
  kvrelay_semantics query_semantics;
  kvrelay_roles pool_roles;
} kvrelay_descriptor;

/* ---- readiness and load messages ---- */

typedef struct kvrelay_topology_member {
  kvrelay_endpoint endpoint;
  kvrelay_roles roles;
  kvrelay_pool_id pool_id; /* optional: `present` */
} kvrelay_topology_member;

typedef struct kvrelay_adapter_readiness {
  kvrelay_text canonical_model_id;
  int32_t state;
  kvrelay_roles missing_roles;
} kvrelay_adapter_readiness;

typedef struct kvrelay_topology_entry {
  kvrelay_text namespace_;
  kvrelay_text canonical_model_id;
  int32_t state; /* enum kvrelay_ready_state, or any other number a peer sent */
  kvrelay_roles present_roles;
  kvrelay_roles missing_roles;
  const kvrelay_topology_member *members; /* lent */
  size_t members_len;
  kvrelay_roles duplicate_role_endpoints;
  bool legacy_fallback_active;
  const kvrelay_adapter_readiness *adapters; /* lent */
  size_t adapters_len;
} kvrelay_topology_entry;

typedef struct kvrelay_load_entry {
  kvrelay_producer producer;
  uint64_t kv_used_blocks;
  uint64_t total_kv_blocks;
  uint32_t kv_observed_ranks;
  uint32_t kv_expected_ranks;
} kvrelay_load_entry;

/* ---- top-level messages ---- */

typedef struct kvrelay_envelope {
  uint32_t protocol_version;
  bool relay_present;
  kvrelay_relay_identity relay;
  uint32_t contract_marker;
} kvrelay_envelope;

typedef struct kvrelay_relay_info {
  kvrelay_envelope envelope;
} kvrelay_relay_info;

/* One request of any RPC; fields that the RPC does not have are zero. */
typedef struct kvrelay_request {
  int32_t method; /* enum kvrelay_method */
  uint32_t contract_marker;
  kvrelay_text subscriber_id;
  kvrelay_producer expected_producer; /* SUBSCRIBE_POOL only */
} kvrelay_request;

typedef struct kvrelay_catalog_update {
  kvrelay_envelope envelope;
  uint64_t revision;
  bool snapshot_present;
  const kvrelay_descriptor *pools; /* lent */
  size_t pools_len;
} kvrelay_catalog_update;

typedef struct kvrelay_filter_update {
  kvrelay_envelope envelope;
  kvrelay_producer producer;
  uint64_t base_sequence;
  uint64_t sequence;
  uint64_t send_ts_us; /* wall clock since 1970 */
  int32_t kind;        /* enum kvrelay_update_kind, or any other number a peer sent */
  const uint8_t *payload; /* CBI1 frame, lent */
  size_t payload_len;
} kvrelay_filter_update;

typedef struct kvrelay_readiness_update {
  kvrelay_envelope envelope;
  uint64_t revision;
  const kvrelay_topology_entry *entries; /* lent */
  size_t entries_len;
} kvrelay_readiness_update;

typedef struct kvrelay_load_update {
  kvrelay_envelope envelope;
  uint64_t window_sequence;
  uint64_t observed_ms; /* wall clock since 1970 */
  uint64_t window_ms;
  const kvrelay_load_entry *pools; /* lent */
  size_t pools_len;
} kvrelay_load_update;

/* ==== errors ==== */

enum kvrelay_err {
  KVRELAY_OK = 0,
  KVRELAY_ERR_ARG = -101,         /* the caller broke a promise; nothing changed */
  KVRELAY_ERR_NOSPACE = -102,     /* the memory given is too small; nothing changed */
  KVRELAY_ERR_TRUNCATED = -103,   /* input ends too early */
  KVRELAY_ERR_MALFORMED = -104,   /* input breaks its format */
  KVRELAY_ERR_UNSUPPORTED = -105, /* well-formed, but of a kind this code does not know */
  KVRELAY_ERR_LIMIT = -106,       /* a configured bound was reached */
  KVRELAY_ERR_STATE = -107,       /* the call does not fit the object's state, for example a finished call */
  KVRELAY_ERR_NOT_FOUND = -108,   /* no such pool, call or name */
  KVRELAY_ERR_REFUSED = -109,     /* the contract refuses it; a kvrelay_status says why */
  KVRELAY_ERR_EXHAUSTED = -110,   /* a 64-bit counter of the contract ran out */
  KVRELAY_ERR_INVARIANT = -111,   /* broken internal state was found; the producer is fenced */
  KVRELAY_ERR_ABI = -151          /* header and implementation were compiled with different configurations */
};

/* How a call ended or was refused; what travels in trailers. */
typedef struct kvrelay_status {
  int32_t grpc;   /* enum kvrelay_grpc_status */
  int32_t reason; /* enum kvrelay_reason; NONE = no reason given */
  char text[KVRELAY_STATUS_TEXT_CAP]; /* for people, terminated, UTF-8 */
} kvrelay_status;

/* What a validator found (contract section 7). */
enum kvrelay_class { KVRELAY_CLASS_OK = 0, KVRELAY_CLASS_INVALID, KVRELAY_CLASS_UNSUPPORTED, KVRELAY_CLASS_ENVELOPE };

enum kvrelay_condition {
  KVRELAY_COND_OK = 0,
  KVRELAY_COND_CONTRACT_MARKER,
  KVRELAY_COND_PROTOCOL_VERSION,
  KVRELAY_COND_MISSING_FIELD,
  KVRELAY_COND_UNSUPPORTED_MODEL_TARGET,
  KVRELAY_COND_POOL_IDENTITY_VERSION,
  KVRELAY_COND_DIGEST_LENGTH,
  KVRELAY_COND_IDENTITY_SOURCE,
  KVRELAY_COND_ZERO_FORMAT_FIELD,
  KVRELAY_COND_UNSUPPORTED_CKF_FORMAT,
  KVRELAY_COND_BUCKET_COUNT_OVERFLOW,
  KVRELAY_COND_BUCKET_COUNT_TOO_LARGE,
  KVRELAY_COND_UNSUPPORTED_BUCKET_COUNT,
  KVRELAY_COND_ZERO_LAYOUT_GENERATION,
  KVRELAY_COND_ZERO_QUERY_BLOCK_SIZE,
  KVRELAY_COND_QUERY_HASH_FORMAT,
  KVRELAY_COND_INVALID_TEXT,
  KVRELAY_COND_DUPLICATE_ALIAS,
  KVRELAY_COND_MISSING_WORKER_ROLES,
  KVRELAY_COND_WORKER_ROLE,
  KVRELAY_COND_DUPLICATE_WORKER_ROLE,
  KVRELAY_COND_UNSUPPORTED_DUPLICATE_ENDPOINT_ROLE,
  KVRELAY_COND_READINESS_STATE,
  KVRELAY_COND_MISSING_TOPOLOGY_MEMBERS,
  KVRELAY_COND_DUPLICATE_TOPOLOGY_MEMBER,
  KVRELAY_COND_TOPOLOGY_NAMESPACE_MISMATCH,
  KVRELAY_COND_DUPLICATE_ADAPTER
};

typedef struct kvrelay_verdict {
  uint8_t class_;     /* enum kvrelay_class */
  uint8_t condition;  /* enum kvrelay_condition */
  const char *field;  /* name of the field that failed, static text; "" when class_ is OK */
  uint64_t value;     /* the offending number where there is one, else 0 */
} kvrelay_verdict;

/* ==== API: names and errors ==== */

/* Text of a kvrelay_err, static. */
KVRELAY_API const char *kvrelay_strerror(int err);
/* "RELAY_ERROR_REASON_POOL_NOT_FOUND" …; NULL for a number outside the enum and for NONE. */
KVRELAY_API const char *kvrelay_reason_name(int32_t reason);
/* Number of a reason name; KVRELAY_REASON_NONE for an unknown name and for …_UNSPECIFIED. */
KVRELAY_API int32_t kvrelay_reason_from_name(const uint8_t *name, size_t len);
/* The gRPC status that goes with a reason (contract section 9). */
KVRELAY_API int32_t kvrelay_reason_status(int32_t reason);
/* "NOT_FOUND" …; "UNKNOWN" for a number outside the enum. */
KVRELAY_API const char *kvrelay_grpc_status_name(int32_t status);
/* The condition's name in the contract, "MissingField" …; "" for OK. */
KVRELAY_API const char *kvrelay_condition_name(uint8_t condition);
/* "PREFILL" …; NULL when unknown. */
KVRELAY_API const char *kvrelay_role_name(int32_t role);
/* Path of a gRPC method, "/dynamo.kvrelay.v1.KvEventRelay/GetRelayInfo" …; NULL when unknown. */
KVRELAY_API const char *kvrelay_method_path(int32_t method);
/* Method of a path; KVRELAY_METHOD_NONE when it is none of ours. */
KVRELAY_API int32_t kvrelay_method_from_path(const uint8_t *path, size_t len);

static inline bool kvrelay_text_equal(kvrelay_text a, kvrelay_text b) {
  return a.len == b.len && (a.len == 0 || KVRELAY_MEMCMP(a.ptr, b.ptr, a.len) == 0);
}

/* ==== API: identity (contract section 6) ==== */

typedef struct kvrelay_map_entry {
  kvrelay_text key;   /* 1 .. 128 bytes of UTF-8 */
  kvrelay_text value; /* 1 .. 1024 bytes */
} kvrelay_map_entry;

/*
 * Digest of what the blocks contain.  With map_len > 0 the map replaces `model_source` (source EXPLICIT).  The map may come
 * in any order.  Returns KVRELAY_OK; KVRELAY_ERR_ARG for an empty model source without map, an unknown hash format, more than 32
 * entries, an empty or too long key or value, a repeated key.  `out` is unchanged on error.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_cache_digest(kvrelay_text model_source, const kvrelay_map_entry *map, size_t map_len,
                                                      uint32_t kv_block_size, int32_t hash_format, kvrelay_digest *out);
/* Digest of who may share the blocks; like kvrelay_cache_digest. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_scope_digest(const kvrelay_endpoint *endpoint, const kvrelay_map_entry *map,
                                                      size_t map_len, kvrelay_digest *out);
/* Data centre id of a name; KVRELAY_ERR_ARG when the name is empty or has outer white space. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_dc_id(kvrelay_text name, uint64_t *out);

/* ==== API: validation (contract sections 5, 7, 8) ==== */

/* Text rule of 7.2: not empty, UTF-8, no White_Space at either end. */
KVRELAY_API bool kvrelay_text_valid(kvrelay_text text);
KVRELAY_API bool kvrelay_utf8_valid(const uint8_t *ptr, size_t len);
/* 1 .. 128 bytes, UTF-8, no control character. */
KVRELAY_API bool kvrelay_subscriber_id_valid(kvrelay_text id);

/* Each validator is one straight list in the order of 7.3; the first failure wins. */
KVRELAY_API kvrelay_verdict kvrelay_check_envelope(const kvrelay_envelope *m);
KVRELAY_API kvrelay_verdict kvrelay_check_pool_id(const kvrelay_pool_id *m);
KVRELAY_API kvrelay_verdict kvrelay_check_ckf_format(const kvrelay_ckf_format *m);
KVRELAY_API kvrelay_verdict kvrelay_check_producer(const kvrelay_producer *m);
KVRELAY_API kvrelay_verdict kvrelay_check_endpoint(const kvrelay_endpoint *m);
KVRELAY_API kvrelay_verdict kvrelay_check_registration(const kvrelay_registration *m);
KVRELAY_API kvrelay_verdict kvrelay_check_semantics(const kvrelay_semantics *m);
KVRELAY_API kvrelay_verdict kvrelay_check_descriptor(const kvrelay_descriptor *m);
KVRELAY_API kvrelay_verdict kvrelay_check_topology_entry(const kvrelay_topology_entry *m);

/* The 13 values of section 8.  Both must have passed kvrelay_check_producer. */
KVRELAY_API bool kvrelay_producer_equal(const kvrelay_producer *a, const kvrelay_producer *b);
KVRELAY_API bool kvrelay_pool_id_equal(const kvrelay_pool_id *a, const kvrelay_pool_id *b);
/* Order of a catalog; negative, 0, positive. */
KVRELAY_API int kvrelay_pool_id_compare(const kvrelay_pool_id *a, const kvrelay_pool_id *b);
/* "<cache hex>:<routing hex>/<dc_id, 16 hex digits>", 82 characters and a terminator. */
#define KVRELAY_POOL_NAME_CAP 83
KVRELAY_API void kvrelay_pool_id_format(const kvrelay_pool_id *id, char out[KVRELAY_POOL_NAME_CAP]);

/* ==== API: relay (contract sections 10, 11) ==== */

typedef struct kvrelay_relay_config {
  kvrelay_relay_identity identity;
  uint32_t max_pools;                 /* pools at once, 1 .. 65 536 */
  uint32_t max_info_calls;            /* GetRelayInfo calls at once, ≥ 1; no limit of the contract, only of memory */
  uint32_t max_catalog_subscribers;   /* open catalog streams, ≥ 1 */
  uint32_t max_pool_streams;          /* open filter streams of all pools, ≥ 1 */
  uint32_t max_subscribers_per_pool;  /* ≥ 1 */
  uint32_t max_hubs;                  /* initialised hubs, ≥ 1 */
  uint32_t queue_frames;              /* deltas that may wait for one subscriber, ≥ 1 */
  size_t queue_bytes;                 /* their bytes, payload + 256 each; ≥ 4 194 624; reserved once per pool, less for small filters */
  uint32_t encoding_concurrency;      /* snapshots being sent at once, ≥ 1; each reserves 8 bytes per bucket */
  uint64_t max_bucket_count;          /* largest filter a pool may have, power of two, 2 .. 2^24 */
  uint32_t chunk_buckets;             /* buckets per snapshot frame, 64 .. 524 288 */
  uint32_t publication_threshold;     /* counted events after which a delta is cut, ≥ 1 */
  uint64_t publication_delay_ns;      /* or this long after the first pending one, ≥ 1 */
  uint64_t heartbeat_ns;              /* silence on a filter stream, ≥ 1 */
  uint64_t snapshot_progress_ns;      /* one chunk waiting to be taken, ≥ 1 */
} kvrelay_relay_config;

typedef struct kvrelay_pool kvrelay_pool;   /* one active pool, in memory given to kvrelay_relay_pool_add */
typedef struct kvrelay_relay kvrelay_relay; /* one relay */

/* Numbers for metrics and status. */
typedef struct kvrelay_relay_stats {
  uint64_t catalog_revision;
  uint32_t pools;
  uint32_t catalog_streams, pool_streams;
  uint32_t hubs, idle_hubs;
  uint64_t deltas_published, snapshots_cut, heartbeats;
  uint64_t lagged, progress_timeouts, producers_fenced, recuts;
  uint64_t refused[12]; /* by enum kvrelay_reason */
} kvrelay_relay_stats;

/* What kvrelay_relay_call_pull hands out. */
enum kvrelay_pull { KVRELAY_PULL_NONE = 0, KVRELAY_PULL_MESSAGE = 1, KVRELAY_PULL_END = 2 };

typedef struct kvrelay_outgoing {
  int32_t method; /* selects the member */
  union {
    kvrelay_relay_info info;
    kvrelay_catalog_update catalog;
    kvrelay_filter_update filter;
  } u;
  kvrelay_status end; /* with KVRELAY_PULL_END */
} kvrelay_outgoing;

/* The contract's defaults (10.1); identity is zero and must be set. */
KVRELAY_API kvrelay_relay_config kvrelay_relay_config_default(void);
/* Bytes that init needs; 0 = the configuration is impossible. */
KVRELAY_API size_t kvrelay_relay_mem_size(const kvrelay_relay_config *cfg);
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_init_abi(kvrelay_relay *relay, size_t relay_size, const kvrelay_relay_config *cfg,
                                                        void *mem, size_t mem_len, uint64_t now_ns);
#define kvrelay_relay_init(RELAY, CFG, MEM, MEM_LEN, NOW_NS) \
  kvrelay_relay_init_abi((RELAY), sizeof(kvrelay_relay), (CFG), (MEM), (MEM_LEN), (NOW_NS))

/*
 * Bytes kvrelay_relay_pool_add needs for this descriptor: its copy with all texts and the queue of encoded deltas.
 * 0 = the descriptor is not fit for publication (contract 12.4, 7.3).
 */
KVRELAY_API size_t kvrelay_relay_pool_mem_size(const kvrelay_relay *relay, const kvrelay_descriptor *descriptor);
/*
 * Publishes a pool; the catalog gains it with revision + 1.  `descriptor` is copied; its producer_incarnation and layout_generation are set by
 * the relay (the incarnation of the relay, the next number of its counter), its ckf_format from `state`.  `state` and `mem` stay the caller's and must
 * outlive the pool.  KVRELAY_OK; KVRELAY_ERR_ARG (descriptor not fit), KVRELAY_ERR_LIMIT (max_pools, max_bucket_count),
 * KVRELAY_ERR_STATE (pool id or endpoint already published: contract 12.3; shutting down), KVRELAY_ERR_NOSPACE, KVRELAY_ERR_EXHAUSTED.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_add(kvrelay_relay *relay, const kvrelay_descriptor *descriptor, ckf_producer *state,
                                                        void *mem, size_t mem_len, uint64_t now_ns, kvrelay_pool **pool);
/* Withdraws a pool: catalog first, then its streams end with PUBLICATION_UNAVAILABLE.  `mem` is the caller's again. */
KVRELAY_API void kvrelay_relay_pool_remove(kvrelay_relay *relay, kvrelay_pool *pool, uint64_t now_ns);
/*
 * To be called after events were applied to the pool's state, between whole engine batches: cuts a delta when the threshold is
 * reached, else arms the delay.  KVRELAY_OK, or KVRELAY_ERR_INVARIANT / KVRELAY_ERR_EXHAUSTED: the producer is fenced, its catalog
 * entry gone and its streams ended; the caller removes the pool and publishes a new one.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_changed(kvrelay_relay *relay, kvrelay_pool *pool, uint64_t now_ns);
/* Cuts at once whatever is pending (emptied or replaced rank).  Errors as above, again at every later call. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_publish(kvrelay_relay *relay, kvrelay_pool *pool, uint64_t now_ns);
/* The published descriptor, lent until the pool is removed; sequence of its last delta. */
KVRELAY_API const kvrelay_descriptor *kvrelay_pool_descriptor(const kvrelay_pool *pool);
KVRELAY_API uint64_t kvrelay_pool_sequence(const kvrelay_pool *pool);
/* KVRELAY_OK, or why the producer was fenced; a tick or an admission may find that out too. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_pool_fenced(const kvrelay_pool *pool);
KVRELAY_API uint32_t kvrelay_pool_subscribers(const kvrelay_pool *pool);

/*
 * Admission of one request (contract 10.2 to 10.7).  KVRELAY_OK: `*call` is open, pull from it; for SUBSCRIBE_POOL it may first wait
 * for a snapshot permit.  KVRELAY_ERR_REFUSED: `status` says why, nothing is open.  Readiness, load and serving load are answered UNIMPLEMENTED.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_call_open(kvrelay_relay *relay, const kvrelay_request *request, uint64_t now_ns,
                                                         uint64_t *call, kvrelay_status *status);
/*
 * The next thing of a call: enum kvrelay_pull, or KVRELAY_ERR_NOT_FOUND.  NONE: nothing now, kvrelay_relay_ready_next will name the call.  MESSAGE: in `out`,
 * lent until the next call of any function on this relay; encode or copy it at once.  END: out->end; then close the call.
 * A transport pulls only when it can take a message: what is not pulled is what makes a subscriber lag.
 * `wall_us` = wall clock in microseconds since 1970, for send_ts_us.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_call_pull(kvrelay_relay *relay, uint64_t call, uint64_t wall_us, uint64_t now_ns,
                                                         kvrelay_outgoing *out);
/* True once the call passed admission for good (contract 10.5 step 14): response headers may go out. */
KVRELAY_API bool kvrelay_relay_call_admitted(const kvrelay_relay *relay, uint64_t call);
/* The stream went away, for whatever reason; its permits return.  Unknown calls are ignored. */
KVRELAY_API void kvrelay_relay_call_close(kvrelay_relay *relay, uint64_t call, uint64_t now_ns);
/* Next call that has become worth pulling since it last said NONE: 1, or 0 when there is none.  Each is named once. */
KVRELAY_API int kvrelay_relay_ready_next(kvrelay_relay *relay, uint64_t *call);
/* When tick wants to run, KVRELAY_TIME_NONE = never.  Early and repeated ticks are harmless. */
KVRELAY_API uint64_t kvrelay_relay_deadline_ns(const kvrelay_relay *relay);
KVRELAY_API void kvrelay_relay_tick(kvrelay_relay *relay, uint64_t now_ns);
/* Orderly stop: catalog and filter streams end with OK, later requests get PUBLICATION_UNAVAILABLE. */
KVRELAY_API void kvrelay_relay_shutdown(kvrelay_relay *relay, uint64_t now_ns);
KVRELAY_API kvrelay_relay_stats kvrelay_relay_stats_get(const kvrelay_relay *relay);
/* Verifies all invariants; 0, or the line that failed.  For tests. */
KVRELAY_API int kvrelay_relay_check_(const kvrelay_relay *relay);

/* ==== API: consumer (contract section 15) ==== */

typedef struct kvrelay_consumer_config {
  kvrelay_text subscriber_id;   /* 1 .. 128 bytes, copied at init ("kvrelay") */
  uint32_t max_pools;           /* pools of one catalog, 1 .. 65 536; more = limit error of that plane (1 024) */
  size_t catalog_bytes;         /* room for one catalog with all texts and its name index; two are reserved (4 MiB) */
  uint64_t filter_stale_ns;     /* no frame for this long: replica is stale (30 s) */
  uint64_t backoff_first_ns;    /* stream retry (500 ms), doubling to */
  uint64_t backoff_max_ns;      /* 30 s */
  uint64_t backoff_reset_ns;    /* a stream that lived this long starts over (30 s) */
  uint64_t jitter_seed;         /* any; equal seeds give equal delays */
  bool subscribe_all;           /* follow every usable pool; else only those asked for by kvrelay_consumer_follow (true) */
} kvrelay_consumer_config;

typedef struct kvrelay_consumer kvrelay_consumer;

/* What the consumer wants done; carry out each one, then ask again. */
enum kvrelay_action_kind {
  KVRELAY_ACTION_CALL = 1,     /* open a call: `request` with `call` as its number */
  KVRELAY_ACTION_CANCEL,       /* cancel call `call`; nothing of it is wanted any more */
  KVRELAY_ACTION_REPLICA_NEED, /* give `bytes` of memory for pool `pool`: kvrelay_consumer_replica_give */
  KVRELAY_ACTION_REPLICA_FREE, /* `mem` is yours again */
  KVRELAY_ACTION_RECONNECT,    /* close the connection and open it again */
  KVRELAY_ACTION_STOP          /* envelope error: this relay speaks another contract; stop until someone upgrades */
};

typedef struct kvrelay_action {
  int32_t kind; /* enum kvrelay_action_kind */
  uint32_t call;
  uint32_t pool; /* index for kvrelay_consumer_pool_get */
  kvrelay_request request; /* lent until the next call on this consumer */
  size_t bytes;
  void *mem;
} kvrelay_action;

/* State of one pool's replica. */
enum kvrelay_replica_state {
  KVRELAY_REPLICA_IDLE = 0,   /* not followed */
  KVRELAY_REPLICA_WAITING,    /* followed, waiting for memory or for its retry time */
  KVRELAY_REPLICA_SUBSCRIBING,
  KVRELAY_REPLICA_ASSEMBLING, /* snapshot incomplete: answers are unknown */
  KVRELAY_REPLICA_LIVE,
  KVRELAY_REPLICA_QUARANTINED /* cannot be used; `verdict` or `last_end` says why */
};

/* One pool of the current catalog; lent until the next non-const call. */
typedef struct kvrelay_pool_view {
  const kvrelay_descriptor *descriptor;
  kvrelay_verdict verdict;    /* of the descriptor; class_ other than OK = quarantined */
  int32_t state;              /* enum kvrelay_replica_state */
  uint64_t sequence;          /* installed, when LIVE */
  uint64_t last_frame_ns;     /* local receive time, KVRELAY_TIME_NONE before the first frame */
  bool stale;                 /* LIVE, but silent for filter_stale_ns */
  uint64_t frames, snapshots, deltas, heartbeats;
  int32_t fault;              /* last reason a replica was dropped: enum kvrelay_fault */
  int fault_code;             /* the CKF_ERR_* of a refused frame, the KVRELAY_ERR_* with FAULT_DECODE, else 0 */
  kvrelay_status last_end;    /* how its last stream ended */
  uint64_t retry_ns;          /* when the next attempt is due, KVRELAY_TIME_NONE = none */
  const uint64_t *words;      /* bucket_count words when LIVE, else NULL */
} kvrelay_pool_view;

enum kvrelay_fault {
  KVRELAY_FAULT_NONE = 0,
  KVRELAY_FAULT_RELAY,    /* relay identity absent, or not the one of this connection */
  KVRELAY_FAULT_PRODUCER, /* frame of another producer */
  KVRELAY_FAULT_KIND,     /* unknown frame kind */
  KVRELAY_FAULT_FRAME,    /* CBI1 refused */
  KVRELAY_FAULT_HEADER,   /* kind, dc_id or epoch of the frame header differ from the envelope */
  KVRELAY_FAULT_ORDER,    /* chunk, delta or heartbeat where it cannot be */
  KVRELAY_FAULT_SEQUENCE, /* gap, repetition, or chunks of two snapshots */
  KVRELAY_FAULT_DECODE,   /* message bytes did not decode */
  KVRELAY_FAULT_ENVELOPE
};

/* Things worth telling; pulled with kvrelay_consumer_event_next. */
enum kvrelay_event_kind {
  KVRELAY_EVENT_INFO = 1,       /* relay identity known */
  KVRELAY_EVENT_CATALOG,        /* a new catalog is in force */
  KVRELAY_EVENT_CATALOG_VOID,   /* the catalog plane was closed: `status`, `verdict` */
  KVRELAY_EVENT_POOL_LIVE,      /* `pool` has a whole snapshot */
  KVRELAY_EVENT_POOL_VOID,      /* the filter stream of `pool` is over, its replica void: `fault`, or `status` when the peer ended it */
  KVRELAY_EVENT_STOPPED         /* another contract, see `verdict`, or `status` when the relay said so */
};
typedef struct kvrelay_event_out {
  int32_t kind;
  uint32_t pool;
  int32_t fault;
  kvrelay_verdict verdict;
  kvrelay_status status;
} kvrelay_event_out;

/* A question. */
typedef struct kvrelay_query {
  kvrelay_text model;           /* canonical id or alias */
  kvrelay_text adapter;         /* empty, or: the runtime adapter of that base model */
  kvrelay_text cache_namespace; /* empty = none */
  const uint32_t *tokens;
  size_t tokens_len;
} kvrelay_query;

enum kvrelay_answer_state {
  KVRELAY_ANSWER_KNOWN = 0, /* complete_blocks and depth_blocks hold */
  KVRELAY_ANSWER_UNKNOWN,   /* no usable replica now: nothing may be concluded, in particular not 0 */
  KVRELAY_ANSWER_UNSUPPORTED /* the relay refuses to serve us this pool; pools with an unusable descriptor do not answer at all */
};

typedef struct kvrelay_answer {
  uint32_t pool;            /* index for kvrelay_consumer_pool_get */
  int32_t state;            /* enum kvrelay_answer_state */
  uint32_t block_size;      /* tokens */
  uint64_t complete_blocks; /* of the prompt; 0 = shorter than one window, which is not "no match" */
  uint64_t depth_blocks;    /* leading blocks found; valid when KNOWN */
  uint64_t age_ns;          /* since the last frame, KVRELAY_TIME_NONE when unknown */
  bool stale;
} kvrelay_answer;

KVRELAY_API kvrelay_consumer_config kvrelay_consumer_config_default(void);
KVRELAY_API size_t kvrelay_consumer_mem_size(const kvrelay_consumer_config *cfg);
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_init_abi(kvrelay_consumer *c, size_t c_size, const kvrelay_consumer_config *cfg,
                                                           void *mem, size_t mem_len, uint64_t now_ns);
#define kvrelay_consumer_init(C, CFG, MEM, MEM_LEN, NOW_NS) \
  kvrelay_consumer_init_abi((C), sizeof(kvrelay_consumer), (CFG), (MEM), (MEM_LEN), (NOW_NS))

/*
 * The connection stands / is gone, and with it everything known from it: catalog, replicas, what was followed.  Calls of
 * former connections are not ours any more.  After STOP both change nothing.
 */
KVRELAY_API void kvrelay_consumer_connected(kvrelay_consumer *c, uint64_t now_ns);
KVRELAY_API void kvrelay_consumer_disconnected(kvrelay_consumer *c, uint64_t now_ns);
/* 1 and one action, or 0. */
KVRELAY_API int kvrelay_consumer_action_next(kvrelay_consumer *c, uint64_t now_ns, kvrelay_action *action);
/* 1 and one event, or 0.  At most 64 are kept; then the oldest go. */
KVRELAY_API int kvrelay_consumer_event_next(kvrelay_consumer *c, kvrelay_event_out *event);
/*
 * One decoded message of a call.  KVRELAY_OK also when the content made the consumer drop something: that is its business and shows
 * as actions and events.  KVRELAY_ERR_NOT_FOUND: the call is not (or no longer) one of ours, ignore it.
 */
KVRELAY_API int kvrelay_consumer_feed_info(kvrelay_consumer *c, uint32_t call, const kvrelay_relay_info *m, uint64_t now_ns);
KVRELAY_API int kvrelay_consumer_feed_catalog(kvrelay_consumer *c, uint32_t call, const kvrelay_catalog_update *m, uint64_t now_ns);
KVRELAY_API int kvrelay_consumer_feed_filter(kvrelay_consumer *c, uint32_t call, const kvrelay_filter_update *m, uint64_t now_ns);
/* A message that does not decode, or is above a bound (`err` = KVRELAY_ERR_*). */
KVRELAY_API int kvrelay_consumer_feed_broken(kvrelay_consumer *c, uint32_t call, int err, uint64_t now_ns);
/* The call ended; OK is an end like any other. */
KVRELAY_API int kvrelay_consumer_feed_end(kvrelay_consumer *c, uint32_t call, const kvrelay_status *status, uint64_t now_ns);
/*
 * Memory for a replica, as wanted by REPLICA_NEED; stays the consumer's until REPLICA_FREE names it.  mem = NULL: there is none, retry
 * with backoff.  On an error the memory stays yours: KVRELAY_ERR_NOT_FOUND (no such pool), KVRELAY_ERR_STATE (not wanted, or not any more:
 * a new catalog asks anew), KVRELAY_ERR_NOSPACE (too small, still wanted).
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_replica_give(kvrelay_consumer *c, uint32_t pool, void *mem, size_t len, uint64_t now_ns);
/*
 * Follow one pool, or stop following it and give its replica back.  Holds while catalogs list the pool id, also across producers.
 * KVRELAY_ERR_NOT_FOUND: no such pool in the catalog in force.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_follow(kvrelay_consumer *c, uint32_t pool, bool follow, uint64_t now_ns);
/* When there is something to ask action_next for: 0 = now, KVRELAY_TIME_NONE = only after the next input. */
KVRELAY_API uint64_t kvrelay_consumer_deadline_ns(const kvrelay_consumer *c);
KVRELAY_API void kvrelay_consumer_tick(kvrelay_consumer *c, uint64_t now_ns);

/* Relay identity of this connection; false before it is known. */
KVRELAY_API bool kvrelay_consumer_relay(const kvrelay_consumer *c, kvrelay_relay_identity *out);
/* Revision of the catalog in force; false before the first one. */
KVRELAY_API bool kvrelay_consumer_catalog(const kvrelay_consumer *c, uint64_t *revision, uint32_t *pools);
/* Pool i of the catalog in force, 0 .. pools - 1. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_pool_get(const kvrelay_consumer *c, uint32_t i, uint64_t now_ns, kvrelay_pool_view *out);

/*
 * Asks all usable pools that list the name; answers sorted best first: known before unknown, deeper (in tokens) first, then catalog order.  Returns the
 * number of answers (also beyond cap), or KVRELAY_ERR_NOT_FOUND (no pool has that name), KVRELAY_ERR_STATE (no catalog yet: unknown),
 * KVRELAY_ERR_MALFORMED (the name is ambiguous: two bindings), KVRELAY_ERR_NOSPACE (scratch_len below the number of complete blocks; nothing written).
 * `scratch` holds sequence hashes; tokens_len entries always suffice.
 */
KVRELAY_API ptrdiff_t kvrelay_consumer_query(const kvrelay_consumer *c, const kvrelay_query *q, kvrelay_answer *answers, size_t cap,
                                             uint64_t *scratch, size_t scratch_len, uint64_t now_ns);

/* ==== API: source (events sections 3, 7, 8, 9) ==== */

/* One decoded engine event, as read: nothing filtered, nothing hashed.  Everything is lent until the next event is decoded. */
enum kvrelay_engine_event_type {
  KVRELAY_ENGINE_MALFORMED = 0, /* skip and count */
  KVRELAY_ENGINE_STORED,
  KVRELAY_ENGINE_REMOVED,
  KVRELAY_ENGINE_CLEARED,
  KVRELAY_ENGINE_TIER_CLEARED,
  KVRELAY_ENGINE_IGNORED,
  KVRELAY_ENGINE_UNKNOWN,  /* unknown tag: skip and count */
  KVRELAY_ENGINE_TOO_LARGE /* more tokens or hashes than the decoder has room for: skip and count */
};

enum kvrelay_extra_kind {
  KVRELAY_EXTRA_TEXT = 0, /* bare string */
  KVRELAY_EXTRA_OBJECT,   /* [identifier, integer] */
  KVRELAY_EXTRA_BIN,      /* hash of a prompt embedding */
  KVRELAY_EXTRA_OTHER     /* anything else: ignored, counted */
};
typedef struct kvrelay_extra_key {
  uint32_t block; /* index of the list it stands in */
  int32_t kind;   /* enum kvrelay_extra_kind */
  kvrelay_text text;
} kvrelay_extra_key;

typedef struct kvrelay_mm_object {
  uint32_t block;
  uint64_t mm_hash;
} kvrelay_mm_object;

typedef struct kvrelay_engine_event {
  int32_t type; /* enum kvrelay_engine_event_type */
  bool positional;
  size_t elements_len; /* of a positional event, tag included */
  const uint64_t *externals;
  size_t externals_len;
  bool has_parent;
  uint64_t parent;
  const uint32_t *tokens; /* flat; pairs are already flattened */
  size_t tokens_len;
  bool pairs;    /* tokens came as pairs: EAGLE */
  bool pair_gap; /* some pair did not continue the one before */
  uint32_t block_size;
  bool lora_id_set; /* present, not nil and not 0 */
  kvrelay_text lora_name, cache_salt; /* empty = absent */
  kvrelay_text medium, locality, ownership, kind;
  bool has_medium, has_locality, has_ownership, has_kind; /* nil equals absent */
  bool has_group;
  uint32_t group;
  const kvrelay_extra_key *extra_keys; /* flat, ordered by block */
  size_t extra_keys_len;
  size_t extra_keys_blocks; /* length of the array on the wire, 0 = absent or empty */
  bool has_mm_infos;
  const kvrelay_mm_object *mm_objects; /* flat, ordered by block */
  size_t mm_objects_len;
  size_t mm_infos_blocks;
} kvrelay_engine_event;

/* Every thing that was dropped, repaired or odd has one of these reasons (events section 12). */
#define KVRELAY_COUNT_LIST(X)                                                                                            \
  X(FRAMES, "frames") X(PAYLOAD_TOO_LARGE, "payload_too_large") X(PAYLOAD_MALFORMED, "payload_malformed")                \
  X(TRAILING_BYTES, "trailing_bytes") X(RANK_TYPE, "rank_type") X(GAP, "gap") X(REPLAY, "replay") X(LOSS, "loss")        \
  X(RESTART, "restart") X(RECOVERY, "recovery") X(SILENT, "silent") X(UNKNOWN_EVENT, "unknown_event")                    \
  X(MALFORMED_EVENT, "malformed_event") X(PAIR_GAP, "pair_gap") X(EXTRA_KEY_IGNORED, "extra_key_ignored")                \
  X(SALT_UNTAGGED, "salt_untagged") X(UNSUPPORTED_OWNERSHIP, "unsupported_ownership")                                    \
  X(UNKNOWN_OWNERSHIP, "unknown_ownership") X(IGNORED_EVENT, "ignored_event") X(NON_LOCAL_LOCALITY, "non_local_locality") \
  X(UNKNOWN_MEDIUM, "unknown_medium") X(OTHER_TIER, "other_tier") X(NON_MAIN_ATTENTION_KIND, "non_main_attention_kind")  \
  X(NON_MAIN_ATTENTION_GROUP, "non_main_attention_group") X(UNKNOWN_KIND, "unknown_kind")                                \
  X(UNLEARNED_GROUP_IDX, "unlearned_group_idx") X(LORA_ID_WITHOUT_NAME, "lora_id_without_name")                          \
  X(NAMESPACE_CONFLICT, "namespace_conflict") X(AMBIGUOUS_CACHE_NAMESPACE, "ambiguous_cache_namespace")                  \
  X(FORMAT_MISMATCH, "format_mismatch") X(BLOCK_SIZE_MISMATCH, "block_size_mismatch") X(SUB_BLOCK, "sub_block")          \
  X(PLACEHOLDER, "placeholder") X(TOKEN_SURPLUS, "token_surplus") X(EMBEDDED_PROMPT, "embedded_prompt")                  \
  X(PARTIAL_BLOCK, "partial_block") X(DUPLICATE_HASH, "duplicate_hash") X(ORPHAN, "orphan")                              \
  X(REMAP_CONFLICT, "remap_conflict") X(UNKNOWN_REMOVAL, "unknown_removal") X(FOREIGN_RANK, "foreign_rank")              \
  X(EVENT_TOO_LARGE, "event_too_large") X(NAMESPACE_LIMIT, "namespace_limit") X(STATE_LIMIT, "state_limit")              \
  X(OMITTED_CAPACITY, "omitted_capacity")

enum kvrelay_count {
#define KVRELAY_COUNT_ENUM_(NAME, TEXT) KVRELAY_COUNT_##NAME,
  KVRELAY_COUNT_LIST(KVRELAY_COUNT_ENUM_)
#undef KVRELAY_COUNT_ENUM_
  KVRELAY_COUNT_LEN
};

enum kvrelay_on_loss { KVRELAY_ON_LOSS_CLEAR = 0, KVRELAY_ON_LOSS_KEEP };
enum kvrelay_mm_identifiers { KVRELAY_MM_HEX64 = 0, KVRELAY_MM_MARKER };
enum kvrelay_untagged_salt { KVRELAY_SALT_IGNORE = 0, KVRELAY_SALT_NAMESPACE };

typedef struct kvrelay_source_config {
  uint64_t worker_id;
  uint32_t default_rank;       /* when the batch names none */
  uint32_t rank_start, ranks;  /* ranks of the worker: rank_start .. rank_start + ranks - 1; others are foreign */
  uint32_t block_size;         /* tokens, of the pool */
  int32_t hash_format;         /* HASHFMT_FORMAT_*, of the pool */
  int32_t on_loss, mm_identifiers, untagged_salt;
  bool has_image_token_id, has_video_token_id, has_main_group;
  uint32_t image_token_id, video_token_id, main_group;
  bool deduplicated;           /* set semantics instead of copy counts */
  uint32_t partial_memory;     /* remembered hashes per rank (65 536) */
  uint32_t max_event_blocks;   /* blocks of one event (65 536); more: event_too_large */
  uint32_t max_namespaces;     /* cache namespaces alive at once (4 096, at most 65 000) */
} kvrelay_source_config;

typedef struct kvrelay_source_stats {
  uint64_t counts[KVRELAY_COUNT_LEN]; /* by enum kvrelay_count; blocks for orphan and omitted_capacity, batches for gap, loss, replay, else events */
  uint64_t batches, stored, removed, cleared, tier_cleared; /* batches applied; events by tag, dropped ones too */
  uint64_t blocks_stored, blocks_removed;
  uint64_t last_sequence;
  bool has_sequence;
  uint64_t last_batch_ns; /* KVRELAY_TIME_NONE before the first */
  bool complete;          /* false = partial: in some rank blocks may exist that the relay does not know */
} kvrelay_source_stats;

typedef struct kvrelay_source kvrelay_source;

/* What to do with a live batch after kvrelay_source_sequence. */
enum kvrelay_sequence_verdict { KVRELAY_SEQUENCE_DROP = 0, KVRELAY_SEQUENCE_APPLY = 1 };

KVRELAY_API kvrelay_source_config kvrelay_source_config_default(void);
KVRELAY_API size_t kvrelay_source_mem_size(const kvrelay_source_config *cfg);
/* `state` must outlive the source; several sources may share one. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_init_abi(kvrelay_source *s, size_t s_size, const kvrelay_source_config *cfg,
                                                         ckf_producer *state, void *mem, size_t mem_len, uint64_t now_ns);
#define kvrelay_source_init(S, CFG, STATE, MEM, MEM_LEN, NOW_NS) \
  kvrelay_source_init_abi((S), sizeof(kvrelay_source), (CFG), (STATE), (MEM), (MEM_LEN), (NOW_NS))
/*
 * Order of live batches without a replay endpoint (events 3.2): decides whether the batch with this sequence is applied (enum
 * kvrelay_sequence_verdict).  A gap is a loss (3.3), a smaller number a restart (3.4); both are carried out here.  A negative
 * result is KVRELAY_ERR_INVARIANT: fence the producer.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_sequence(kvrelay_source *s, uint64_t sequence, uint64_t now_ns);
/* The batch just sequenced cannot be decoded, for `reason` (enum kvrelay_count): one lost batch.  Errors as above. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_lost(kvrelay_source *s, int reason, uint64_t now_ns);
/* One event of the current batch; `has_rank` / `rank` as the batch says.  Counts whatever it drops; KVRELAY_OK, or KVRELAY_ERR_INVARIANT (fence the producer). */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_event(kvrelay_source *s, bool has_rank, uint32_t rank, const kvrelay_engine_event *ev, uint64_t now_ns);
/* Adds to a counter that only the layer outside sees (frames, trailing_bytes, rank_type …). */
KVRELAY_API void kvrelay_source_count(kvrelay_source *s, int count, uint64_t n);
/*
 * The connection broke and stands again: unless the next batch continues exactly, another process is behind it and its state starts empty
 * (events 3.4).
 */
KVRELAY_API void kvrelay_source_reconnected(kvrelay_source *s);
/* False = partial: blocks of this rank may exist that the relay does not know; also for a foreign rank. */
KVRELAY_API bool kvrelay_source_complete(const kvrelay_source *s, uint32_t rank);
/* Forgets everything this source brought, all ranks that it named (source removed, disconnected too long). */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_clear(kvrelay_source *s, uint64_t now_ns);
KVRELAY_API const kvrelay_source_stats *kvrelay_source_stats_get(const kvrelay_source *s);
/* "orphan" …; NULL when out of range. */
KVRELAY_API const char *kvrelay_count_name(int count);

/* ==== private struct layouts ==== */
/* Complete types so that the caller allocates; sizes may change. */
#include "src/kvrelay_relay_structs.inc"
#include "src/kvrelay_consumer_structs.inc"
#include "src/kvrelay_source_structs.inc"

#ifdef __cplusplus
}
#endif
#endif /* KVRELAY_H */

#if (defined(KVRELAY_IMPLEMENTATION) || defined(KVRELAY_STATIC)) && !defined(KVRELAY_IMPLEMENTATION_DONE_)
#define KVRELAY_IMPLEMENTATION_DONE_
#ifdef __cplusplus
extern "C" {
#endif
#include "src/kvrelay_contract.inc"
#include "src/kvrelay_relay.inc"
#include "src/kvrelay_consumer.inc"
#include "src/kvrelay_source.inc"
#ifdef __cplusplus
}
#endif
#endif /* KVRELAY_IMPLEMENTATION */
