/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay.h - the contract dynamo.kvrelay.v1, both sides, without I/O.  Needs ckf.h and hashfmt.h.
 */

/* ==== purpose ==== */
/*
 * A relay publishes the cuckoo filter of the KV blocks its engines hold; a consumer keeps replicas
 * of such filters and answers how many leading blocks of a prompt each pool holds.  This header is
 * everything between decoded messages and answers: message structs and their validation, identity
 * digests, the relay side (admission, publication hub, cuts and deltas), the consumer side (planes,
 * replicas, query) and the way of engine events into a ckf_producer. It does no I/O, reads no clock
 * and allocates nothing after init; bytes on the wire are the business of proto/.
 *
 *   #include <stdlib.h>
 *   #define CKF_IMPLEMENTATION
 *   #define HASHFMT_IMPLEMENTATION
 *   #define KVRELAY_IMPLEMENTATION
 *   #include "kvrelay.h"
 *
 *   int start(kvrelay_consumer *c, uint64_t now_ns) {
 *     const kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
 *     const size_t len = kvrelay_consumer_mem_size(&cfg);
 *     return kvrelay_consumer_init(c, &cfg, malloc(len), len, now_ns);
 *   }
 *
 *   void carry_out(const kvrelay_action *action); // connect, call, cancel: of your event loop
 *
 *   int received(kvrelay_consumer *c, uint32_t call, const kvrelay_filter_update *update,
 *                uint64_t now_ns) {
 *     kvrelay_action action;
 *     const int err = kvrelay_consumer_feed_filter(c, call, update, now_ns);
 *     while (kvrelay_consumer_action_next(c, now_ns, &action))
 *       carry_out(&action);
 *     return err; // and kvrelay_consumer_query answers
 *   }
 *
 * examples/relay_and_consumer.c has both sides in one program.
 */

/* ==== contents ==== */
/*
 * conventions and trust
 * version
 * configuration
 * compiler shims
 * types
 * errors
 * names and errors
 * identity
 * validation
 * framing
 * relay
 * consumer
 * topology
 * source
 * router events
 * private struct layouts
 *
 * What both sides of dynamo.kvrelay.v1 have to keep is said at the functions that keep it;
 * "WIRE.md, NAME" is a section of proto/WIRE.md, which has what goes over the wire.
 */

/* ==== conventions and trust ==== */
/*
 * - Texts are (pointer, length), any byte allowed, never terminated; `ptr` may be NULL when `len`
 *   is 0.
 * - Structs marked "lent" point into memory of somebody else; the comment says how long it stays.
 * - Times are monotonic nanoseconds given by the caller; wall clock values are arguments of their
 *   own.
 * - Messages of peers are not trusted: validators and feeds accept any content.  Configuration,
 *   memory blocks and call order are the caller's promise; a broken promise gives KVRELAY_ERR_ARG
 *   where it can be seen.
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
/* Longest human-readable text in a kvrelay_status, bytes with the terminator, 64 .. 1024; longer
 * ones are cut. */
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
/* What readers take; more is not supported (WIRE.md, Reading). */
#define KVRELAY_TEXT_MAX 4096u    /* bytes of a text */
#define KVRELAY_ALIASES_MAX 1024u /* of one registration */
#define KVRELAY_PARTS_MAX 4096u   /* registrations of a pool, members or adapters of an entry */
#define KVRELAY_ROLES_MAX 64u     /* in one list, repeats included */

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
enum kvrelay_update_kind {
  KVRELAY_UPDATE_SNAPSHOT_CHUNK = 1,
  KVRELAY_UPDATE_DELTA = 2,
  KVRELAY_UPDATE_HEARTBEAT = 3
};
enum kvrelay_ready_state {
  KVRELAY_READY_UNKNOWN = 0,
  KVRELAY_READY_UNAVAILABLE = 1,
  KVRELAY_READY_READY = 2
};
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
  uint8_t
      digest[KVRELAY_DIGEST_LEN]; /* the first 16 bytes that were sent, zero behind a shorter one */
  size_t digest_len;              /* as sent; valid only when 16 */
  int32_t source;                 /* enum kvrelay_source_kind, or any other number a peer sent */
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

enum kvrelay_target_kind {
  KVRELAY_TARGET_NONE = 0,
  KVRELAY_TARGET_BASE = 1,
  KVRELAY_TARGET_LORA = 2
};

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
  /* Not part of the message: what the transport can carry to this subscriber in one.  Its snapshot
   * then comes in smaller chunks, of 4 096 buckets at the least.  0: as configured. */
  size_t max_message_bytes;
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
  uint64_t send_ts_us;    /* wall clock since 1970 */
  int32_t kind;           /* enum kvrelay_update_kind, or any other number a peer sent */
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
  KVRELAY_ERR_STATE = -107,     /* not in this state: what is asked for is not there yet (a consumer
                                   without catalog), or is over (a finished call) */
  KVRELAY_ERR_NOT_FOUND = -108, /* no such pool, call or name */
  KVRELAY_ERR_REFUSED = -109,   /* the contract refuses it; a kvrelay_status says why */
  KVRELAY_ERR_EXHAUSTED = -110, /* a 64-bit counter of the contract ran out */
  KVRELAY_ERR_INVARIANT = -111, /* broken internal state was found; the producer is fenced */
  KVRELAY_ERR_ABI = -151 /* header and implementation were compiled with different configurations */
};

/* How a call ended or was refused; what travels in trailers. */
typedef struct kvrelay_status {
  int32_t grpc;                       /* enum kvrelay_grpc_status */
  int32_t reason;                     /* enum kvrelay_reason; NONE = no reason given */
  char text[KVRELAY_STATUS_TEXT_CAP]; /* for people, terminated, UTF-8 */
  uint64_t retry_ns; /* of an end that came from a peer: how long after it the peer wants to be
                        called again, KVRELAY_TIME_NONE = not on this connection; 0 = it did not say
                      */
} kvrelay_status;

/* What a validator found. */
enum kvrelay_class {
  KVRELAY_CLASS_OK = 0,
  KVRELAY_CLASS_INVALID,
  KVRELAY_CLASS_UNSUPPORTED,
  KVRELAY_CLASS_ENVELOPE
};

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
  KVRELAY_COND_DUPLICATE_ADAPTER,
  KVRELAY_COND_LIST_TOO_LONG /* beyond KVRELAY_ALIASES_MAX or KVRELAY_PARTS_MAX: `value` elements */
};

typedef struct kvrelay_verdict {
  uint8_t class_;    /* enum kvrelay_class */
  uint8_t condition; /* enum kvrelay_condition */
  const char *field; /* name of the field that failed, static text; "" when class_ is OK */
  uint64_t value;    /* the offending number where there is one, else 0 */
} kvrelay_verdict;

/* ==== API: names and errors ==== */

/* Text of a kvrelay_err, static. */
KVRELAY_API const char *kvrelay_strerror(int err);
/* "RELAY_ERROR_REASON_POOL_NOT_FOUND" …; NULL for a number outside the enum and for NONE. */
KVRELAY_API const char *kvrelay_reason_name(int32_t reason);
/* Number of a reason name; KVRELAY_REASON_NONE for an unknown name and for …_UNSPECIFIED. */
KVRELAY_API int32_t kvrelay_reason_from_name(const uint8_t *name, size_t len);
/* The gRPC status that goes with a reason. */
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
/* False for a method that a relay answers with UNIMPLEMENTED, whatever its request says. */
KVRELAY_API bool kvrelay_method_offered(int32_t method);

static inline bool kvrelay_text_equal(kvrelay_text a, kvrelay_text b) {
  return a.len == b.len && (a.len == 0 || KVRELAY_MEMCMP(a.ptr, b.ptr, a.len) == 0);
}
/* Order of the bytes, a beginning before what goes on: below 0, 0 or above 0. */
KVRELAY_API int kvrelay_text_compare(kvrelay_text a, kvrelay_text b);

/* ==== API: identity ==== */

typedef struct kvrelay_map_entry {
  kvrelay_text key;   /* 1 .. 128 bytes of UTF-8 */
  kvrelay_text value; /* 1 .. 1024 bytes */
} kvrelay_map_entry;

/*
 * Digest of what the blocks contain.  With map_len > 0 the map replaces `model_source` (source
 * EXPLICIT).  The map may come in any order.  Returns KVRELAY_OK; KVRELAY_ERR_ARG for an empty
 * model source without map, an unknown hash format, more than 32 entries, an empty or too long key
 * or value, a repeated key.  `out` is unchanged on error.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_cache_digest(kvrelay_text model_source,
                                                      const kvrelay_map_entry *map, size_t map_len,
                                                      uint32_t kv_block_size, int32_t hash_format,
                                                      kvrelay_digest *out);
/* Digest of who may share the blocks; like kvrelay_cache_digest. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_scope_digest(const kvrelay_endpoint *endpoint,
                                                      const kvrelay_map_entry *map, size_t map_len,
                                                      kvrelay_digest *out);
/* Data centre id of a name; KVRELAY_ERR_ARG when the name is empty or has outer white space. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_dc_id(kvrelay_text name, uint64_t *out);

/* ==== API: validation ==== */

/* Every name is like this: not empty, UTF-8, no White_Space at either end. */
KVRELAY_API bool kvrelay_text_valid(kvrelay_text text);
KVRELAY_API bool kvrelay_utf8_valid(const uint8_t *ptr, size_t len);
/* The character at ptr[0 .. len), len > 0; its bytes, or 0 when these are not UTF-8: then `code` is
 * unchanged, and one byte may be taken for an unreadable character. */
KVRELAY_API size_t kvrelay_utf8_next(const uint8_t *ptr, size_t len, uint32_t *code);
/* 1 .. 128 bytes, UTF-8, no control character. */
KVRELAY_API bool kvrelay_subscriber_id_valid(kvrelay_text id);

/* Each validator is one straight list in the order of WIRE.md, Checks; the first failure wins. */
KVRELAY_API kvrelay_verdict kvrelay_check_envelope(const kvrelay_envelope *m);
KVRELAY_API kvrelay_verdict kvrelay_check_pool_id(const kvrelay_pool_id *m);
KVRELAY_API kvrelay_verdict kvrelay_check_ckf_format(const kvrelay_ckf_format *m);
KVRELAY_API kvrelay_verdict kvrelay_check_producer(const kvrelay_producer *m);
KVRELAY_API kvrelay_verdict kvrelay_check_endpoint(const kvrelay_endpoint *m);
KVRELAY_API kvrelay_verdict kvrelay_check_registration(const kvrelay_registration *m);
KVRELAY_API kvrelay_verdict kvrelay_check_semantics(const kvrelay_semantics *m);
KVRELAY_API kvrelay_verdict kvrelay_check_descriptor(const kvrelay_descriptor *m);
KVRELAY_API kvrelay_verdict kvrelay_check_topology_entry(const kvrelay_topology_entry *m);

/* All 13 values that name one producer, compared.  Both must have passed kvrelay_check_producer. */
KVRELAY_API bool kvrelay_producer_equal(const kvrelay_producer *a, const kvrelay_producer *b);
KVRELAY_API bool kvrelay_pool_id_equal(const kvrelay_pool_id *a, const kvrelay_pool_id *b);
/* Order of a catalog; negative, 0, positive. */
KVRELAY_API int kvrelay_pool_id_compare(const kvrelay_pool_id *a, const kvrelay_pool_id *b);
/* "<cache hex>:<routing hex>/<dc_id, 16 hex digits>", 82 characters and a terminator. */
#define KVRELAY_POOL_NAME_CAP 83
KVRELAY_API void kvrelay_pool_id_format(const kvrelay_pool_id *id, char out[KVRELAY_POOL_NAME_CAP]);

/* ==== API: framing ==== */
/*
 * Where messages begin and end in a stream of bytes: behind the prefix of gRPC, or in the frames of
 * the raw transport.  A framer takes bytes cut anywhere and lends back what is in them; it holds at
 * most one small frame.  All bytes of one read go through
 *
 *   ptrdiff_t n;
 *   kvrelay_frame f;
 *   while ((n = kvrelay_framer_feed(&framer, bytes, len, &f)) >= 0) {
 *     bytes += n;
 *     len -= (size_t)n;
 *     if (f.type == KVRELAY_FRAME_NONE)
 *       break; // all taken, go on with the next read
 *     if (f.type == KVRELAY_FRAME_MESSAGE)
 *       collect(&f); // its piece, at f.offset of f.body_len; whole when kvrelay_frame_done
 *   } // below 0: the connection is lost
 */

/* Frames of the raw transport; the numbers are those on the wire. */
enum kvrelay_frame_type {
  KVRELAY_FRAME_NONE = 0,
  KVRELAY_FRAME_REQUEST = 1,  /* client; aux: enum kvrelay_method */
  KVRELAY_FRAME_RESPONSE = 2, /* server: the request was admitted */
  KVRELAY_FRAME_MESSAGE = 3,  /* server; the only type of a gRPC framer */
  KVRELAY_FRAME_END = 4,      /* server; aux: enum kvrelay_grpc_status; kvrelay_frame_status */
  KVRELAY_FRAME_CANCEL = 5,   /* client */
  KVRELAY_FRAME_CREDIT = 6,   /* client; kvrelay_frame_u32: bytes added */
  KVRELAY_FRAME_PING = 7,
  KVRELAY_FRAME_PONG = 8,  /* the same 8 bytes */
  KVRELAY_FRAME_GOAWAY = 9 /* aux: enum kvrelay_goaway; kvrelay_frame_u32: last stream accepted */
};

enum kvrelay_goaway {
  KVRELAY_GOAWAY_SHUTDOWN = 1,
  KVRELAY_GOAWAY_PROTOCOL_ERROR = 2,
  KVRELAY_GOAWAY_TOO_MANY_PINGS = 3,
  KVRELAY_GOAWAY_LIMIT = 4
};

#define KVRELAY_GRPC_PREFIX_LEN 5     /* bytes before each gRPC message */
#define KVRELAY_RAW_VERSION 1         /* of the frames */
#define KVRELAY_RAW_PREFACE_LEN 16    /* bytes that either side sends first */
#define KVRELAY_RAW_HEADER_LEN 12     /* bytes before each body */
#define KVRELAY_RAW_TEXT_MAX 1024     /* longest text in END and GOAWAY, bytes */
#define KVRELAY_RAW_FRAME_MIN 1024    /* least max_frame of a server, ... */
#define KVRELAY_RAW_MESSAGE_MIN 65536 /* ... of a client */

/* A body, or a piece of one; everything is lent until the next feed, and as long as the bytes fed.
 */
typedef struct kvrelay_frame {
  int32_t type;         /* enum kvrelay_frame_type; NONE: the bytes fed complete nothing, and the
                           other fields mean nothing */
  uint16_t aux;         /* raw: by type, else 0 */
  uint32_t stream;      /* raw: 0 = the connection */
  uint32_t body_len;    /* of the whole body */
  uint32_t offset;      /* of the piece in it; 0 = a body begins */
  const uint8_t *piece; /* not NULL, also when it is empty */
  uint32_t piece_len;   /* 0 only for an empty body */
} kvrelay_frame;
static inline bool kvrelay_frame_done(const kvrelay_frame *f) {
  return f->type != KVRELAY_FRAME_NONE && f->offset + f->piece_len == f->body_len;
}

/* Fields are private. */
typedef struct kvrelay_framer {
  uint32_t max_bytes_, left_; /* of the body being read */
  int32_t kind_, error_;
  kvrelay_frame frame_;
  uint32_t have_; /* bytes of `head_`, then of a small body in `small_` */
  uint8_t head_[KVRELAY_RAW_HEADER_LEN];
  uint8_t small_[4 + KVRELAY_RAW_TEXT_MAX];
} kvrelay_framer;

/* For one direction of one gRPC call.  Messages above `max_bytes` will be refused. */
KVRELAY_API void kvrelay_framer_init_grpc(kvrelay_framer *f, uint32_t max_bytes);
/* For what a raw client (`from_client`) or server sends behind its preface.  `max_bytes` is the
 * max_frame told in the own preface. */
KVRELAY_API void kvrelay_framer_init_raw(kvrelay_framer *f, bool from_client, uint32_t max_bytes);
/*
 * Takes bytes up to the end of the first frame or of `len`.  Returns how many; call again with the
 * rest until `frame->type` is NONE, when all were taken.  Bodies of REQUEST and MESSAGE come in the
 * pieces in which they arrive, all others whole; frames that a later version may add are skipped.
 * Errors, after which every call returns the same and the connection (gRPC: the call) is lost:
 * KVRELAY_ERR_LIMIT for a body above the limit, known from its header; KVRELAY_ERR_UNSUPPORTED for
 * a compressed gRPC message; KVRELAY_ERR_MALFORMED for anything else, a frame of the wrong side
 * included.
 */
KVRELAY_API KVRELAY_MUST_USE ptrdiff_t kvrelay_framer_feed(kvrelay_framer *f, const uint8_t *bytes,
                                                           size_t len, kvrelay_frame *frame);
/* False inside a frame: an end of the connection here has cut it. */
KVRELAY_API bool kvrelay_framer_empty(const kvrelay_framer *f);

/* The first four bytes of a CREDIT or GOAWAY; to be called for these types only, which come whole
 * and long enough. */
KVRELAY_API uint32_t kvrelay_frame_u32(const kvrelay_frame *f);
/* What an END says, to be called for that type only; a text that is not UTF-8 is left out, one that
 * is too long is cut between characters. */
KVRELAY_API void kvrelay_frame_status(const kvrelay_frame *f, kvrelay_status *status);

/* What goes before a message of `len` bytes. */
KVRELAY_API void kvrelay_grpc_prefix_put(uint8_t out[KVRELAY_GRPC_PREFIX_LEN], uint32_t len);
/* What goes before a body of `body_len` bytes; the body itself is sent from where it is. */
KVRELAY_API void kvrelay_raw_header_put(uint8_t out[KVRELAY_RAW_HEADER_LEN], int32_t type,
                                        uint32_t stream, uint16_t aux, uint32_t body_len);
/* Largest frame that the next three functions write, header included. */
#define KVRELAY_RAW_SMALL_CAP (KVRELAY_RAW_HEADER_LEN + 4 + KVRELAY_STATUS_TEXT_CAP)
/* Whole frames; the bytes written are returned. */
KVRELAY_API size_t kvrelay_raw_end_put(uint8_t out[KVRELAY_RAW_SMALL_CAP], uint32_t stream,
                                       const kvrelay_status *status);
/* `text` is terminated, and cut behind KVRELAY_STATUS_TEXT_CAP - 1 bytes. */
KVRELAY_API size_t kvrelay_raw_goaway_put(uint8_t out[KVRELAY_RAW_SMALL_CAP], int32_t code,
                                          uint32_t last_stream, const char *text);
KVRELAY_API size_t kvrelay_raw_credit_put(uint8_t out[KVRELAY_RAW_SMALL_CAP], uint32_t stream,
                                          uint32_t bytes);

/* What the two sides of a raw connection tell each other first. */
typedef struct kvrelay_raw_preface {
  uint8_t version;         /* client: highest it speaks; server: the chosen one, 0 = none */
  uint8_t lowest;          /* lowest it speaks */
  uint16_t max_streams;    /* server: streams open at once; client: 0 */
  uint32_t max_frame;      /* largest body it accepts, bytes, up to 2^31 - 1 */
  uint32_t initial_credit; /* client: bytes of every new stream, 1 .. 2^31 - 1; server: 0 */
} kvrelay_raw_preface;

KVRELAY_API void kvrelay_raw_preface_put(uint8_t out[KVRELAY_RAW_PREFACE_LEN],
                                         const kvrelay_raw_preface *preface);
/*
 * Reads the other side's preface from the first `len` bytes of a connection.  KVRELAY_OK;
 * KVRELAY_ERR_TRUNCATED: so far it may be one, call again with more bytes; KVRELAY_ERR_MALFORMED:
 * another protocol (a server closes without a word); KVRELAY_ERR_UNSUPPORTED: no version in common
 * (a server answers with version 0 and closes; `out` has the versions); KVRELAY_ERR_LIMIT: a value
 * out of its range (a protocol error).
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_raw_preface_get(const uint8_t *bytes, size_t len,
                                                         bool from_client,
                                                         kvrelay_raw_preface *out);

/* ==== API: relay ==== */

/* In brackets what kvrelay_relay_config_default sets. */
typedef struct kvrelay_relay_config {
  kvrelay_relay_identity identity;  /* random, anew at each start */
  uint32_t max_pools;               /* pools at once, 1 .. 65 536 (65 536) */
  uint32_t max_info_calls;          /* GetRelayInfo calls at once, ≥ 1 (1 024); no limit of the
                                       contract, only of memory */
  uint32_t max_catalog_subscribers; /* open catalog streams, ≥ 1 (64) */
  uint32_t max_readiness_subscribers, max_load_subscribers; /* the same, ≥ 1 each (64) */
  uint32_t max_members; /* endpoints in the topology, with or without pool, 0 .. 65 536 (65 536) */
  uint32_t max_pool_streams;         /* open filter streams of all pools, ≥ 1 (64) */
  uint32_t max_subscribers_per_pool; /* ≥ 1 (64) */
  uint32_t max_hubs;                 /* initialised hubs, ≥ 1 (64) */
  uint32_t queue_frames;             /* deltas that may wait for one subscriber, ≥ 1 (16) */
  size_t queue_bytes; /* their bytes, payload + 256 each; ≥ 4 194 624 (16 MiB); reserved once per
                         pool, less for small filters */
  uint32_t encoding_concurrency;   /* snapshots being sent at once, ≥ 1 (2); each reserves 8 bytes
                                      per bucket */
  uint64_t max_bucket_count;       /* largest filter a pool may have, power of two, 2 .. 2^24
                                      (2^19) */
  uint32_t chunk_buckets;          /* buckets per snapshot frame, 64 .. 524 288 (262 144) */
  uint32_t publication_threshold;  /* counted events after which a delta is cut, ≥ 1 (16); more
                                      than 330 000 changed buckets cut one as well */
  uint64_t publication_delay_ns;   /* or this long after the first pending one, ≥ 1 (1 ms) */
  uint64_t heartbeat_ns;           /* silence on a filter stream, ≥ 1 (10 s) */
  uint64_t snapshot_progress_ns;   /* one chunk waiting to be taken, ≥ 1 (60 s) */
  uint64_t readiness_heartbeat_ns; /* repetition of the readiness image, ≥ 1 (10 s) */
  uint64_t load_window_ns;         /* load window, whole milliseconds, ≥ 1 ms (1 s) */
  uint32_t load_windows; /* kept for slow load readers, 1 .. 65 536 (16), rounded up to a power of
                            two; 24 bytes each in every pool's memory */
} kvrelay_relay_config;

typedef struct kvrelay_pool
    kvrelay_pool; /* one active pool, in memory given to kvrelay_relay_pool_add */
typedef struct kvrelay_relay kvrelay_relay; /* one relay */

/* Numbers for metrics and status. */
typedef struct kvrelay_relay_stats {
  uint64_t catalog_revision;
  uint32_t pools;
  uint64_t topology_revision; /* of what was evaluated last */
  uint64_t load_windows;      /* closed so far */
  uint32_t catalog_streams, pool_streams, readiness_streams, load_streams;
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
    kvrelay_readiness_update readiness;
    kvrelay_load_update load;
  } u;
  kvrelay_status end; /* with KVRELAY_PULL_END */
} kvrelay_outgoing;

/* The numbers in brackets above; `identity` is zero and must be set. */
KVRELAY_API kvrelay_relay_config kvrelay_relay_config_default(void);
/*
 * Bytes that init needs, 59 MB with the defaults: 51 MB for as many pools and endpoints as the
 * contract allows, 8 bytes per bucket of the largest filter for each snapshot being sent.  Pools
 * take memory of their own.  0 = a value is outside its range, or more than the machine addresses:
 * mend the configuration.
 */
KVRELAY_API size_t kvrelay_relay_mem_size(const kvrelay_relay_config *cfg);
/*
 * An empty relay: no pool, revision 0.  `mem` may start anywhere and need not be zeroed; it stays
 * the caller's, must outlive the relay, and is all there is to be freed.  `cfg` is copied. `now_ns`
 * begins the first load window.  On an error nothing was touched:
 * KVRELAY_ERR_ARG (mem_size is 0, or `mem` NULL), KVRELAY_ERR_NOSPACE (`mem_len` below mem_size),
 * KVRELAY_ERR_ABI (this unit and the implementation were compiled with different configurations:
 * compile both alike).
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_init_abi(kvrelay_relay *relay, size_t relay_size,
                                                        const kvrelay_relay_config *cfg, void *mem,
                                                        size_t mem_len, uint64_t now_ns);
#define kvrelay_relay_init(RELAY, CFG, MEM, MEM_LEN, NOW_NS)                                       \
  kvrelay_relay_init_abi((RELAY), sizeof(kvrelay_relay), (CFG), (MEM), (MEM_LEN), (NOW_NS))

/*
 * Bytes kvrelay_relay_pool_add needs for this descriptor: its copy with all texts and the queue of
 * encoded deltas. 0 = the descriptor is not fit for publication (see pool_add), whatever its
 * names are to each other.
 */
KVRELAY_API size_t kvrelay_relay_pool_mem_size(const kvrelay_relay *relay,
                                               const kvrelay_descriptor *descriptor);
/*
 * Publishes a pool; the catalog gains it with revision + 1.  `descriptor` is copied; its
 * producer_incarnation and layout_generation are set by the relay (the incarnation of the relay,
 * the next number of its counter), its ckf_format from `state`.  `state` and `mem` stay the
 * caller's and must outlive the pool.  KVRELAY_OK; KVRELAY_ERR_ARG (descriptor not fit, an id or
 * alias repeated), KVRELAY_ERR_LIMIT (max_pools, max_bucket_count), KVRELAY_ERR_STATE (pool id or
 * endpoint already published, or shutting down), KVRELAY_ERR_NOSPACE,
 * KVRELAY_ERR_EXHAUSTED.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_add(kvrelay_relay *relay,
                                                        const kvrelay_descriptor *descriptor,
                                                        ckf_producer *state, void *mem,
                                                        size_t mem_len, uint64_t now_ns,
                                                        kvrelay_pool **pool);
/* Bytes kvrelay_relay_pool_describe needs; 0 as in kvrelay_relay_pool_mem_size. */
KVRELAY_API size_t kvrelay_relay_pool_describe_mem_size(const kvrelay_descriptor *descriptor);
/*
 * Gives a pool other registrations, other roles or both, in place: the producer stays and its
 * streams go on.  The catalog's revision moves by one for each of the two that differs, and not at
 * all when neither does; what topology says of the endpoint is told apart, by
 * kvrelay_relay_set_topology.  The copy lies in `mem`, which stays the caller's and must outlive
 * the pool or the next call, which gives it back.  KVRELAY_OK; KVRELAY_ERR_ARG (descriptor not fit,
 * an id or alias repeated, or another identity, endpoint or block format, which take a new pool),
 * KVRELAY_ERR_STATE (the producer is fenced), KVRELAY_ERR_NOSPACE; after an error the pool is as
 * before.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_describe(kvrelay_relay *relay,
                                                             kvrelay_pool *pool,
                                                             const kvrelay_descriptor *descriptor,
                                                             void *mem, size_t mem_len);
/* Withdraws a pool: catalog first, then its streams end with PUBLICATION_UNAVAILABLE.  `mem` is the
 * caller's again, and so is that of kvrelay_relay_pool_describe. */
KVRELAY_API void kvrelay_relay_pool_remove(kvrelay_relay *relay, kvrelay_pool *pool,
                                           uint64_t now_ns);
/*
 * To be called after events were applied to the pool's state, between whole engine batches: cuts a
 * delta when the threshold is reached, else arms the delay.  KVRELAY_OK, or KVRELAY_ERR_INVARIANT /
 * KVRELAY_ERR_EXHAUSTED: the producer is fenced, its catalog entry gone and its streams ended; the
 * caller removes the pool and publishes a new one.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_changed(kvrelay_relay *relay,
                                                            kvrelay_pool *pool, uint64_t now_ns);
/* Cuts at once whatever is pending (emptied or replaced rank).  Errors as above, again at every
 * later call. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_pool_publish(kvrelay_relay *relay,
                                                            kvrelay_pool *pool, uint64_t now_ns);
/* The published descriptor, lent until the pool is described anew or removed; sequence of its last
 * delta. */
KVRELAY_API const kvrelay_descriptor *kvrelay_pool_descriptor(const kvrelay_pool *pool);
KVRELAY_API uint64_t kvrelay_pool_sequence(const kvrelay_pool *pool);
/* KVRELAY_OK, or why the producer was fenced; a tick or an admission may find that out too. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_pool_fenced(const kvrelay_pool *pool);
KVRELAY_API uint32_t kvrelay_pool_subscribers(const kvrelay_pool *pool);

/* ---- readiness and load ---- */

struct kvrelay_topology;
/*
 * What readiness streams tell from now on: everything that kvrelay_topology_derive found, lent,
 * with its memory and cards, until the next call.  The relay adds the links to its pools.  The
 * revision moves only when readers see a difference.  KVRELAY_OK, or KVRELAY_ERR_LIMIT
 * (max_members): the former one stays in force, and lent.
 */
KVRELAY_API KVRELAY_MUST_USE int
kvrelay_relay_set_topology(kvrelay_relay *relay, const struct kvrelay_topology *topology);

/* Data-parallel ranks rank_start .. rank_start + ranks - 1 of one worker. */
typedef struct kvrelay_rank_range {
  uint64_t worker;
  uint32_t rank_start;
  uint32_t ranks;           /* 0, above 4 096 or beyond 2^32: the pool has no ranks at all */
  uint64_t total_kv_blocks; /* of each rank, 0 = unknown */
} kvrelay_rank_range;

/* Bytes kvrelay_pool_set_ranks needs; 0 = more than the machine addresses. */
KVRELAY_API size_t kvrelay_pool_ranks_mem_size(const kvrelay_rank_range *ranges, size_t len);
/*
 * Declares whose load the pool's is; a new pool has no ranks.  Ranks that were declared before with
 * the same capacity keep what was reported of them.  `mem` stays the caller's and must outlive the
 * pool or the next call, which gives it back.  KVRELAY_OK; KVRELAY_ERR_ARG (a rank twice),
 * KVRELAY_ERR_NOSPACE.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_pool_set_ranks(kvrelay_pool *pool,
                                                        const kvrelay_rank_range *ranges,
                                                        size_t len, void *mem, size_t mem_len);
/* The capacity of one rank, 0 = unknown; a change forgets what was reported of it.  KVRELAY_OK, or
 * KVRELAY_ERR_NOT_FOUND: nobody declared the rank, to be ignored. */
KVRELAY_API int kvrelay_pool_set_capacity(kvrelay_pool *pool, uint64_t worker, uint32_t rank,
                                          uint64_t total_kv_blocks);
/* A rank reports the blocks it uses; 0 is a report.  As above. */
KVRELAY_API int kvrelay_pool_report(kvrelay_pool *pool, uint64_t worker, uint32_t rank,
                                    uint64_t kv_used_blocks);
/* The reports of a worker are lost: nothing is known of its ranks.  As above. */
KVRELAY_API int kvrelay_pool_reports_lost(kvrelay_pool *pool, uint64_t worker);

/* ---- calls ---- */

/*
 * Admission of one request (WIRE.md, Admission).  KVRELAY_OK: `*call` is open; pull from it at
 * once and until it says NONE, since kvrelay_relay_ready_next names only calls that have said so.
 * For SUBSCRIBE_POOL it may first wait for a snapshot permit.  KVRELAY_ERR_REFUSED: `status` says
 * why, nothing is open.  Serving load is answered UNIMPLEMENTED.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_call_open(kvrelay_relay *relay,
                                                         const kvrelay_request *request,
                                                         uint64_t now_ns, uint64_t *call,
                                                         kvrelay_status *status);
/*
 * The next thing of a call: enum kvrelay_pull, or KVRELAY_ERR_NOT_FOUND.  NONE: nothing now,
 * kvrelay_relay_ready_next will name the call.  MESSAGE: in `out`, lent until the next call of any
 * function on this relay; encode or copy it at once.  END: out->end; then close the call. A
 * transport pulls only when it can take a message: what is not pulled is what makes a subscriber
 * lag. `wall_us` = wall clock in microseconds since 1970, for send_ts_us.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_relay_call_pull(kvrelay_relay *relay, uint64_t call,
                                                         uint64_t wall_us, uint64_t now_ns,
                                                         kvrelay_outgoing *out);
/*
 * For a transport that sends snapshots from where they are.  With `hold`, the payload of a snapshot
 * chunk that is pulled from now on stays as it is until the call is pulled again, closed, or named
 * by kvrelay_relay_ready_next, which says that the snapshot has been given up: what is not sent by
 * then has to be copied before any other function is called on this relay.  The permit of the
 * snapshot is held, and its progress watched, as long.  Unknown calls are ignored.
 */
KVRELAY_API void kvrelay_relay_call_hold(kvrelay_relay *relay, uint64_t call, bool hold);
/* True once the call passed admission for good, its first snapshot cut: response headers may go
 * out. */
KVRELAY_API bool kvrelay_relay_call_admitted(const kvrelay_relay *relay, uint64_t call);
/* The stream went away, for whatever reason; its permits return.  Unknown calls are ignored. */
KVRELAY_API void kvrelay_relay_call_close(kvrelay_relay *relay, uint64_t call, uint64_t now_ns);
/* Next call that has become worth pulling since it last said NONE: 1, or 0 when there is none. Each
 * is named once. */
KVRELAY_API int kvrelay_relay_ready_next(kvrelay_relay *relay, uint64_t *call);
/* When tick wants to run, KVRELAY_TIME_NONE = never.  Early and repeated ticks are harmless. */
KVRELAY_API uint64_t kvrelay_relay_deadline_ns(const kvrelay_relay *relay);
KVRELAY_API void kvrelay_relay_tick(kvrelay_relay *relay, uint64_t now_ns);
/* Orderly stop: streams end with OK, later requests get PUBLICATION_UNAVAILABLE.
 */
KVRELAY_API void kvrelay_relay_shutdown(kvrelay_relay *relay, uint64_t now_ns);
KVRELAY_API kvrelay_relay_stats kvrelay_relay_stats_get(const kvrelay_relay *relay);
/* Verifies all invariants; 0, or the line that failed.  For tests. */
KVRELAY_API int kvrelay_relay_check_(const kvrelay_relay *relay);

/* ==== API: consumer ==== */

typedef struct kvrelay_consumer_config {
  kvrelay_text subscriber_id; /* 1 .. 128 bytes, copied at init ("kvrelay") */
  uint32_t
      max_pools; /* pools of one catalog, 1 .. 65 536; more = limit error of that plane (1 024) */
  size_t catalog_bytes; /* room for one catalog with all texts and its name index; two are reserved
                           (4 MiB) */
  size_t readiness_bytes;      /* room for one readiness image with all texts (1 MiB) */
  uint64_t filter_stale_ns;    /* no frame for this long: replica is stale (30 s) */
  uint64_t readiness_stale_ns; /* no image for this long: readiness is unknown (30 s) */
  uint64_t load_stale_ns; /* no window for this long and for three windows: load is unknown (3 s) */
  uint64_t backoff_first_ns;          /* stream retry (500 ms), doubling to */
  uint64_t backoff_max_ns;            /* 30 s */
  uint64_t backoff_reset_ns;          /* a stream that lived this long starts over (30 s) */
  uint64_t jitter_seed;               /* any; equal seeds give equal delays */
  bool subscribe_all;                 /* follow every usable pool; else only those asked for by
                                         kvrelay_consumer_follow (true) */
  bool follow_readiness, follow_load; /* keep these planes open (true); no memory for one that is
                                         not followed */
} kvrelay_consumer_config;

typedef struct kvrelay_consumer kvrelay_consumer;

/* What the consumer wants done; carry out each one, then ask again. */
enum kvrelay_action_kind {
  KVRELAY_ACTION_CALL = 1,     /* open a call: `request` with `call` as its number */
  KVRELAY_ACTION_CANCEL,       /* cancel call `call`; nothing of it is wanted any more */
  KVRELAY_ACTION_REPLICA_NEED, /* give `bytes` of memory for pool `pool`:
                                  kvrelay_consumer_replica_give */
  KVRELAY_ACTION_REPLICA_FREE, /* `mem` is yours again */
  KVRELAY_ACTION_RECONNECT,    /* close the connection and open it again */
  KVRELAY_ACTION_STOP /* envelope error: this relay speaks another contract; stop until someone
                         upgrades */
};

typedef struct kvrelay_action {
  int32_t kind; /* enum kvrelay_action_kind */
  uint32_t call;
  uint32_t pool;           /* index for kvrelay_consumer_pool_get */
  kvrelay_request request; /* lent until the next call on this consumer */
  size_t bytes;
  void *mem;
} kvrelay_action;

/* State of one pool's replica. */
enum kvrelay_replica_state {
  KVRELAY_REPLICA_IDLE = 0, /* not followed */
  KVRELAY_REPLICA_WAITING,  /* followed, waiting for memory or for its retry time */
  KVRELAY_REPLICA_SUBSCRIBING,
  KVRELAY_REPLICA_ASSEMBLING, /* snapshot incomplete: answers are unknown */
  KVRELAY_REPLICA_LIVE,
  KVRELAY_REPLICA_QUARANTINED /* cannot be used; `verdict` or `last_end` says why */
};

/* What the other planes say beside a pool. Unknown is neither of the other states, nor no load. */
typedef struct kvrelay_serving_view {
  int32_t readiness; /* enum kvrelay_ready_state of the model, or adapter; UNKNOWN also while the
                        plane is void or stale, and when it has no usable entry */
  const kvrelay_topology_entry *entry; /* usable one of the base model, or NULL; lent */
  uint64_t readiness_age_ns;           /* since the last image, KVRELAY_TIME_NONE without one */
  bool load_known; /* the two below hold: every rank reported, every capacity is known */
  uint64_t kv_used_blocks, total_kv_blocks;
  uint64_t load_age_ns; /* since the last window, KVRELAY_TIME_NONE without one */
} kvrelay_serving_view;

/* One pool of the current catalog; lent until the next non-const call. */
typedef struct kvrelay_pool_view {
  const kvrelay_descriptor *descriptor;
  kvrelay_verdict verdict; /* of the descriptor; class_ other than OK = quarantined */
  int32_t state;           /* enum kvrelay_replica_state */
  uint64_t sequence;       /* installed, when LIVE */
  uint64_t last_frame_ns;  /* local receive time, KVRELAY_TIME_NONE before the first frame */
  bool stale;              /* LIVE, but silent for filter_stale_ns */
  uint64_t frames, snapshots, deltas, heartbeats;
  int32_t fault;  /* last reason a replica was dropped: enum kvrelay_fault */
  int fault_code; /* the CKF_ERR_* of a refused frame, the KVRELAY_ERR_* with FAULT_DECODE, else 0
                   */
  kvrelay_status last_end;      /* how its last stream ended */
  uint64_t retry_ns;            /* when the next attempt is due, KVRELAY_TIME_NONE = none */
  const uint64_t *words;        /* bucket_count words when LIVE, else NULL */
  kvrelay_serving_view serving; /* of its base model */
} kvrelay_pool_view;

/* A plane that is one image. */
typedef struct kvrelay_plane_view {
  uint64_t revision; /* of the load plane the window */
  uint32_t len;      /* entries */
  uint64_t age_ns;   /* since the last message */
  bool stale;
  uint64_t observed_ms, window_ms; /* as the relay said; load only */
} kvrelay_plane_view;

/* What may be concluded from a plane, the filters of one pool being a plane of their own. */
enum kvrelay_plane_state {
  KVRELAY_PLANE_UNKNOWN = 0, /* nothing: not asked for, or no answer yet, or its stream is over */
  KVRELAY_PLANE_ASSEMBLING,  /* of a snapshot only a part is there: nothing, either */
  KVRELAY_PLANE_LIVE,
  KVRELAY_PLANE_STALE,      /* what it said last; it is silent for too long, and a catalog's stream,
                               which may be silent, is over */
  KVRELAY_PLANE_QUARANTINED /* nothing, and it is not asked for again: not on this connection, or,
                               of a pool, not before it changes */
};
typedef struct kvrelay_plane_condition {
  int32_t state;     /* enum kvrelay_plane_state */
  uint64_t age_ns;   /* since its last message, KVRELAY_TIME_NONE before the first */
  uint64_t retry_ns; /* when it is asked for again, KVRELAY_TIME_NONE = that is not due */
} kvrelay_plane_condition;

/* One entry of readiness, or of load; lent until the next non-const call. */
typedef struct kvrelay_entry_view {
  const kvrelay_topology_entry *entry;
  kvrelay_verdict verdict; /* class_ other than OK = quarantined: nothing may be concluded */
} kvrelay_entry_view;
typedef struct kvrelay_load_view {
  const kvrelay_load_entry *entry;
  kvrelay_verdict verdict;
  bool usable; /* every rank reported and every capacity is known; else no value, not 0 */
} kvrelay_load_view;

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
  KVRELAY_EVENT_INFO = 1,     /* relay identity known */
  KVRELAY_EVENT_CATALOG,      /* a new catalog is in force */
  KVRELAY_EVENT_CATALOG_VOID, /* the catalog plane was closed: `status`, `verdict` */
  KVRELAY_EVENT_POOL_LIVE,    /* `pool` has a whole snapshot */
  KVRELAY_EVENT_POOL_VOID,    /* the filter stream of `pool` is over, its replica void: `fault`, or
                                 `status` when the peer ended it */
  KVRELAY_EVENT_STOPPED,   /* another contract, see `verdict`, or `status` when the relay said so */
  KVRELAY_EVENT_READINESS, /* another readiness image */
  KVRELAY_EVENT_READINESS_VOID, /* as CATALOG_VOID */
  KVRELAY_EVENT_LOAD,           /* the first window of a stream */
  KVRELAY_EVENT_LOAD_VOID
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
  KVRELAY_ANSWER_UNKNOWN, /* no usable replica now: nothing may be concluded, in particular not 0 */
  KVRELAY_ANSWER_UNSUPPORTED /* the relay refuses to serve us this pool; pools with an unusable
                                descriptor do not answer at all */
};

typedef struct kvrelay_answer {
  uint32_t consumer;   /* place in the list of kvrelay_consumers_query, else 0 */
  uint32_t pool;       /* index for kvrelay_consumer_pool_get */
  int32_t state;       /* enum kvrelay_answer_state */
  uint32_t block_size; /* tokens */
  uint64_t
      complete_blocks;   /* of the prompt; 0 = shorter than one window, which is not "no match" */
  uint64_t depth_blocks; /* leading blocks found; valid when KNOWN */
  uint64_t age_ns;       /* since the last frame, KVRELAY_TIME_NONE when unknown */
  bool stale;
  kvrelay_serving_view serving; /* of what was asked for */
} kvrelay_answer;

/* The values in brackets above. */
KVRELAY_API kvrelay_consumer_config kvrelay_consumer_config_default(void);
/*
 * Bytes that init needs, 10 MB with the defaults: two catalogs, one readiness image, and half a
 * kilobyte per pool.  Replicas take memory of their own, when KVRELAY_ACTION_REPLICA_NEED asks for
 * it. 0 = the configuration is impossible: `max_pools` or a subscriber id out of range, no room for
 * texts, backoff_first_ns 0 or above backoff_max_ns, or more than the machine addresses.
 */
KVRELAY_API size_t kvrelay_consumer_mem_size(const kvrelay_consumer_config *cfg);
/*
 * A consumer without connection, that wants nothing until kvrelay_consumer_connected.  `mem` may
 * start anywhere and need not be zeroed; it stays the caller's, must outlive the consumer, and is
 * all there is to be freed, beside the replicas given.  `cfg` is copied with its subscriber id.  On
 * an error nothing was touched: KVRELAY_ERR_ARG (mem_size is 0), KVRELAY_ERR_NOSPACE (`mem` NULL,
 * or `mem_len` below mem_size), KVRELAY_ERR_ABI (this unit and the implementation were compiled
 * with different configurations: compile both alike).
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_init_abi(kvrelay_consumer *c, size_t c_size,
                                                           const kvrelay_consumer_config *cfg,
                                                           void *mem, size_t mem_len,
                                                           uint64_t now_ns);
#define kvrelay_consumer_init(C, CFG, MEM, MEM_LEN, NOW_NS)                                        \
  kvrelay_consumer_init_abi((C), sizeof(kvrelay_consumer), (CFG), (MEM), (MEM_LEN), (NOW_NS))

/*
 * The connection stands / is gone, and with it everything known from it: catalog, replicas, what
 * was followed.  Calls of former connections are not ours any more.  After STOP both change
 * nothing.
 */
KVRELAY_API void kvrelay_consumer_connected(kvrelay_consumer *c, uint64_t now_ns);
KVRELAY_API void kvrelay_consumer_disconnected(kvrelay_consumer *c, uint64_t now_ns);
/* 1 and one action, or 0. */
KVRELAY_API int kvrelay_consumer_action_next(kvrelay_consumer *c, uint64_t now_ns,
                                             kvrelay_action *action);
/* 1 and one event, or 0.  At most 64 are kept; then the oldest go. */
KVRELAY_API int kvrelay_consumer_event_next(kvrelay_consumer *c, kvrelay_event_out *event);
/*
 * One decoded message of a call.  KVRELAY_OK also when the content made the consumer drop
 * something: that is its business and shows as actions and events.  KVRELAY_ERR_NOT_FOUND: the call
 * is not (or no longer) one of ours, ignore it.
 */
KVRELAY_API int kvrelay_consumer_feed_info(kvrelay_consumer *c, uint32_t call,
                                           const kvrelay_relay_info *m, uint64_t now_ns);
KVRELAY_API int kvrelay_consumer_feed_catalog(kvrelay_consumer *c, uint32_t call,
                                              const kvrelay_catalog_update *m, uint64_t now_ns);
KVRELAY_API int kvrelay_consumer_feed_filter(kvrelay_consumer *c, uint32_t call,
                                             const kvrelay_filter_update *m, uint64_t now_ns);
KVRELAY_API int kvrelay_consumer_feed_readiness(kvrelay_consumer *c, uint32_t call,
                                                const kvrelay_readiness_update *m, uint64_t now_ns);
KVRELAY_API int kvrelay_consumer_feed_load(kvrelay_consumer *c, uint32_t call,
                                           const kvrelay_load_update *m, uint64_t now_ns);
/* A message that does not decode, or is above a bound (`err` = KVRELAY_ERR_*). */
KVRELAY_API int kvrelay_consumer_feed_broken(kvrelay_consumer *c, uint32_t call, int err,
                                             uint64_t now_ns);
/* The call ended; OK is an end like any other. */
KVRELAY_API int kvrelay_consumer_feed_end(kvrelay_consumer *c, uint32_t call,
                                          const kvrelay_status *status, uint64_t now_ns);
/*
 * Memory for a replica, as wanted by REPLICA_NEED; stays the consumer's until REPLICA_FREE names
 * it.  mem = NULL: there is none, retry with backoff.  On an error the memory stays yours:
 * KVRELAY_ERR_NOT_FOUND (no such pool), KVRELAY_ERR_STATE (not wanted, or not any more: a new
 * catalog asks anew), KVRELAY_ERR_NOSPACE (too small, still wanted).
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_replica_give(kvrelay_consumer *c, uint32_t pool,
                                                               void *mem, size_t len,
                                                               uint64_t now_ns);
/*
 * Follow one pool, or stop following it and give its replica back.  Holds while catalogs list the
 * pool id, also across producers. KVRELAY_ERR_NOT_FOUND: no such pool in the catalog in force.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_follow(kvrelay_consumer *c, uint32_t pool,
                                                         bool follow, uint64_t now_ns);
/* When there is something to ask action_next for: 0 = now, KVRELAY_TIME_NONE = only after the next
 * input. */
KVRELAY_API uint64_t kvrelay_consumer_deadline_ns(const kvrelay_consumer *c);
KVRELAY_API void kvrelay_consumer_tick(kvrelay_consumer *c, uint64_t now_ns);

/* Relay identity of this connection; false before it is known. */
KVRELAY_API bool kvrelay_consumer_relay(const kvrelay_consumer *c, kvrelay_relay_identity *out);
/* Revision of the catalog in force; false before the first one. */
KVRELAY_API bool kvrelay_consumer_catalog(const kvrelay_consumer *c, uint64_t *revision,
                                          uint32_t *pools);
/* Pool i of the catalog in force, 0 .. pools - 1. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_pool_get(const kvrelay_consumer *c, uint32_t i,
                                                           uint64_t now_ns, kvrelay_pool_view *out);

/*
 * The condition of a plane: of KVRELAY_METHOD_WATCH_CATALOG, _SUBSCRIBE_READINESS, _SUBSCRIBE_LOAD,
 * or of _SUBSCRIBE_POOL for pool i of the catalog in force.  KVRELAY_OK, or KVRELAY_ERR_NOT_FOUND
 * (no such plane, no such pool).
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_plane(const kvrelay_consumer *c, int32_t method,
                                                        uint32_t i, uint64_t now_ns,
                                                        kvrelay_plane_condition *out);

/* The readiness image in force, and the last load window; false while the plane is void. */
KVRELAY_API bool kvrelay_consumer_readiness(const kvrelay_consumer *c, uint64_t now_ns,
                                            kvrelay_plane_view *out);
KVRELAY_API bool kvrelay_consumer_load(const kvrelay_consumer *c, uint64_t now_ns,
                                       kvrelay_plane_view *out);
/* Entry i of it, 0 .. len - 1: readiness as it was sent, load by producer.  KVRELAY_OK, or
 * KVRELAY_ERR_NOT_FOUND. */
KVRELAY_API KVRELAY_MUST_USE int
kvrelay_consumer_readiness_get(const kvrelay_consumer *c, uint32_t i, kvrelay_entry_view *out);
KVRELAY_API KVRELAY_MUST_USE int kvrelay_consumer_load_get(const kvrelay_consumer *c, uint32_t i,
                                                           kvrelay_load_view *out);

/*
 * Asks all usable pools that list the name; answers sorted best first: known before unknown, deeper
 * (in tokens) first, then those that are READY, then catalog order.  Returns the number of answers
 * (also beyond cap), or KVRELAY_ERR_NOT_FOUND (no pool has that name), KVRELAY_ERR_STATE (no
 * catalog yet: unknown), KVRELAY_ERR_MALFORMED (the name is ambiguous: two bindings),
 * KVRELAY_ERR_NOSPACE (scratch_len below the number of complete blocks; nothing written). `scratch`
 * holds sequence hashes; tokens_len entries always suffice.
 */
KVRELAY_API ptrdiff_t kvrelay_consumer_query(const kvrelay_consumer *c, const kvrelay_query *q,
                                             kvrelay_answer *answers, size_t cap, uint64_t *scratch,
                                             size_t scratch_len, uint64_t now_ns);

/*
 * The same over the pools of many relays, each with a consumer of its own: one list, best first, of
 * equal ones those of earlier consumers first.  The prompt is hashed once for pools alike, whatever
 * relay they are of.  `outcomes` (NULL, or consumers_len of them) says what each consumer
 * contributes, or would when the whole fails: KVRELAY_OK, or the first three errors below;
 * KVRELAY_ERR_STATE there means that its relay may hold the prompt, too.  Returns the number of
 * answers (also beyond cap), or, when there is none, KVRELAY_ERR_STATE (a relay without catalog
 * might know the name), KVRELAY_ERR_NOT_FOUND (no relay knows it), KVRELAY_ERR_MALFORMED (the name
 * is ambiguous within one relay or between two: no relay's meaning goes before another's),
 * KVRELAY_ERR_NOSPACE and KVRELAY_ERR_ARG as above.
 */
KVRELAY_API ptrdiff_t kvrelay_consumers_query(const kvrelay_consumer *const *consumers,
                                              size_t consumers_len, const kvrelay_query *q,
                                              kvrelay_answer *answers, size_t cap, int *outcomes,
                                              uint64_t *scratch, size_t scratch_len,
                                              uint64_t now_ns);

/* ==== API: topology ==== */
/*
 * From what workers say of themselves (their cards) to what a relay publishes of it: which pools
 * may exist, under which names, and which models are ready.  Pure functions over everything the
 * relay watches, to be called again when something has changed.  The result lives in the caller's
 * memory (kvrelay_topology_mem_size) and is lent to the relay, so two blocks take turns:
 *
 *   kvrelay_card card = {0}; // one for each model of each worker
 *   card.endpoint = endpoint; // of three texts, `present`
 *   card.worker_id = 7;
 *   card.liveness = KVRELAY_LIVENESS_LIVE;
 *   card.model_id = model;
 *   card.role = KVRELAY_ROLE_AGGREGATED;
 *   card.semantics = semantics; // block size and hash format
 *   card.domain.present = true;
 *   err = kvrelay_cache_digest(model, NULL, 0, 16, HASHFMT_FORMAT_STANDARD,
 *                              &card.domain.cache_semantics);
 *   err = kvrelay_scope_digest(&endpoint, NULL, 0, &card.domain.routing_scope);
 *   ...
 *   err = kvrelay_topology_derive(cards, cards_len, mem[next], mem_len, &topology[next]);
 *   if (err == KVRELAY_OK)
 *     err = kvrelay_relay_set_topology(&relay, &topology[next]); // lent until the next one is set
 *   if (err == KVRELAY_OK)
 *     next ^= 1;
 *
 * Cards need not be trusted.  A name that a relay may not publish (empty, longer than
 * KVRELAY_TEXT_MAX, with outer white space or control characters), and lists beyond
 * KVRELAY_ALIASES_MAX, KVRELAY_PARTS_MAX or KVRELAY_ROLES_MAX, are a conflict of the endpoint; such
 * an alias is only left out.
 */

/* Of a worker.  An unknown one makes UNKNOWN whatever its endpoint serves; a dead one keeps its
 * names and its role, but serves nothing. */
enum kvrelay_liveness {
  KVRELAY_LIVENESS_UNKNOWN = 0, /* nobody with authority has said yet */
  KVRELAY_LIVENESS_DEAD,
  KVRELAY_LIVENESS_LIVE /* routable and discovered */
};

/* One model that one worker serves.  Everything is lent. */
typedef struct kvrelay_card {
  kvrelay_endpoint endpoint;
  uint64_t worker_id;
  int32_t liveness;       /* enum kvrelay_liveness */
  kvrelay_text model_id;  /* canonical; of an adapter card the adapter's */
  bool has_suffix;        /* an adapter card has both ... */
  bool has_lora;          /* ... of these, a base card none */
  kvrelay_text adapter;   /* adapter card: the name the engine knows it by */
  uint32_t adapter_limit; /* adapter card: how many its worker holds, 0 = not told */
  const kvrelay_text *aliases;
  size_t aliases_len;
  int32_t role;         /* enum kvrelay_role, 0 = not told */
  bool prefill_capable; /* what its model type says */
  kvrelay_text model_type;
  const kvrelay_roles *needs; /* alternatives, each a list of roles */
  size_t needs_len;
  kvrelay_domain domain;
  kvrelay_semantics semantics;
} kvrelay_card;

/* Bits: conflicts of an endpoint. */
enum kvrelay_conflict {
  KVRELAY_CONFLICT_POOL = 1,    /* no pool; still in the topology, without link */
  KVRELAY_CONFLICT_BINDING = 2, /* some registration is left out */
  KVRELAY_CONFLICT_TOPOLOGY = 4 /* no pool, and not in the topology */
};

/* What the cards of one endpoint come to. */
typedef struct kvrelay_endpoint_state {
  kvrelay_endpoint endpoint;
  uint32_t conflicts; /* bits of enum kvrelay_conflict */
  const char *why;    /* one of them, static text for people; "" without any */
  bool fit; /* a pool may exist: a registration is left, no conflict forbids it, and no other
               endpoint has this identity */
  kvrelay_domain domain; /* of its first base card */
  kvrelay_semantics semantics;
  const kvrelay_registration *registrations; /* merged, in the catalog's order */
  size_t registrations_len;
  kvrelay_roles roles; /* of its base cards, in enum order */
} kvrelay_endpoint_state;

typedef struct kvrelay_topology {
  const kvrelay_endpoint_state *endpoints; /* in the order of "namespace/component/endpoint" */
  size_t endpoints_len;
  const kvrelay_topology_entry *entries; /* ready to send but for the links of their members */
  size_t entries_len;
} kvrelay_topology;

/* Bytes kvrelay_topology_derive needs for these cards, wherever they begin; SIZE_MAX = more than
 * the machine addresses or the derivation counts. */
KVRELAY_API size_t kvrelay_topology_mem_size(const kvrelay_card *cards, size_t cards_len);
/*
 * Derives all of it.  `out` points into `mem` and to the texts and lists of the cards, and is valid
 * as long as both.  Nothing in it depends on the order of the cards.  `mem` may begin anywhere.
 * KVRELAY_OK; KVRELAY_ERR_NOSPACE: `mem_len` is below kvrelay_topology_mem_size, or that is
 * SIZE_MAX; KVRELAY_ERR_ARG: a card without endpoint, leave it out.  `out` is unchanged on error.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_topology_derive(const kvrelay_card *cards,
                                                         size_t cards_len, void *mem,
                                                         size_t mem_len, kvrelay_topology *out);

/* Base workers of one endpoint with the same role, model type and needs. */
typedef struct kvrelay_unit {
  int32_t role;  /* enum kvrelay_role; LEGACY = without */
  bool known;    /* false: nobody knows who of its endpoint is alive, and none counts as live */
  uint32_t live; /* workers */
  const kvrelay_roles *needs; /* lent */
  size_t needs_len;
} kvrelay_unit;

typedef struct kvrelay_readiness {
  int32_t state;             /* enum kvrelay_ready_state */
  uint32_t present, missing; /* roles, bits 1u << role */
  uint32_t duplicates;       /* the same; all of them, on the wire only PREFILL and DECODE */
  bool legacy_fallback_active;
} kvrelay_readiness;
/* Evaluates the units of one model, or of one adapter. */
KVRELAY_API kvrelay_readiness kvrelay_readiness_judge(const kvrelay_unit *units, size_t units_len);
/* The roles of a mask (bits 1u << role) in enum order, static; bits outside the enum are left out.
 */
KVRELAY_API kvrelay_roles kvrelay_roles_of(uint32_t mask);

/* ==== API: source ==== */

/* One decoded engine event, as read: nothing filtered, nothing hashed.  Everything is lent until
 * the next event is decoded. */
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
  bool lora_id_set;                   /* present, not nil and not 0 */
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

/* Every thing that was dropped, repaired or odd has one of these reasons. */
/* clang-format off */
#define KVRELAY_COUNT_LIST(X)                                                 \
  X(FRAMES, "frames")                                                         \
  X(PAYLOAD_TOO_LARGE, "payload_too_large")                                   \
  X(PAYLOAD_MALFORMED, "payload_malformed")                                   \
  X(TRAILING_BYTES, "trailing_bytes")                                         \
  X(RANK_TYPE, "rank_type")                                                   \
  X(GAP, "gap")                                                               \
  X(REPLAY, "replay")                                                         \
  X(LOSS, "loss")                                                             \
  X(RESTART, "restart")                                                       \
  X(RECOVERY, "recovery")                                                     \
  X(SILENT, "silent")                                                         \
  X(UNKNOWN_EVENT, "unknown_event")                                           \
  X(MALFORMED_EVENT, "malformed_event")                                       \
  X(PAIR_GAP, "pair_gap")                                                     \
  X(EXTRA_KEY_IGNORED, "extra_key_ignored")                                   \
  X(SALT_UNTAGGED, "salt_untagged")                                           \
  X(UNSUPPORTED_OWNERSHIP, "unsupported_ownership")                           \
  X(UNKNOWN_OWNERSHIP, "unknown_ownership")                                   \
  X(IGNORED_EVENT, "ignored_event")                                           \
  X(NON_LOCAL_LOCALITY, "non_local_locality")                                 \
  X(UNKNOWN_MEDIUM, "unknown_medium")                                         \
  X(OTHER_TIER, "other_tier")                                                 \
  X(NON_MAIN_ATTENTION_KIND, "non_main_attention_kind")                       \
  X(NON_MAIN_ATTENTION_GROUP, "non_main_attention_group")                     \
  X(UNKNOWN_KIND, "unknown_kind")                                             \
  X(UNLEARNED_GROUP_IDX, "unlearned_group_idx")                               \
  X(LORA_ID_WITHOUT_NAME, "lora_id_without_name")                             \
  X(NAMESPACE_CONFLICT, "namespace_conflict")                                 \
  X(AMBIGUOUS_CACHE_NAMESPACE, "ambiguous_cache_namespace")                   \
  X(FORMAT_MISMATCH, "format_mismatch")                                       \
  X(BLOCK_SIZE_MISMATCH, "block_size_mismatch")                               \
  X(SUB_BLOCK, "sub_block")                                                   \
  X(PLACEHOLDER, "placeholder")                                               \
  X(TOKEN_SURPLUS, "token_surplus")                                           \
  X(EMBEDDED_PROMPT, "embedded_prompt")                                       \
  X(PARTIAL_BLOCK, "partial_block")                                           \
  X(DUPLICATE_HASH, "duplicate_hash")                                         \
  X(ORPHAN, "orphan")                                                         \
  X(REMAP_CONFLICT, "remap_conflict")                                         \
  X(UNKNOWN_REMOVAL, "unknown_removal")                                       \
  X(FOREIGN_RANK, "foreign_rank")                                             \
  X(FENCED_SOURCE, "fenced_source")                                           \
  X(EVENT_ID_ORDER, "event_id_order")                                         \
  X(UNSUPPORTED_DOMAIN, "unsupported_domain")                                 \
  X(EVENT_TOO_LARGE, "event_too_large")                                       \
  X(NAMESPACE_LIMIT, "namespace_limit")                                       \
  X(STATE_LIMIT, "state_limit")                                               \
  X(OMITTED_CAPACITY, "omitted_capacity")
/* clang-format on */

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
  uint32_t default_rank; /* when the batch names none */
  uint32_t rank_start,
      ranks; /* ranks of the worker: rank_start .. rank_start + ranks - 1; others are foreign */
  uint32_t block_size; /* tokens, of the pool */
  int32_t hash_format; /* HASHFMT_FORMAT_*, of the pool */
  int32_t on_loss, mm_identifiers, untagged_salt;
  bool has_image_token_id, has_video_token_id, has_main_group;
  uint32_t image_token_id, video_token_id, main_group;
  bool deduplicated;          /* set semantics instead of copy counts */
  uint32_t partial_memory;    /* remembered hashes per rank (65 536) */
  uint32_t max_event_blocks;  /* blocks of one event (65 536); more: event_too_large */
  uint32_t max_namespaces;    /* cache namespaces alive at once (4 096, at most 65 000) */
  bool replay;                /* the engine can be asked for batches again */
  uint32_t hold_batches;      /* that wait behind a gap (10 000, at most 2^20); with replay only */
  uint32_t hold_bytes;        /* of their payloads (64 MiB) */
  uint64_t replay_timeout_ns; /* without a reply a request has ended (5 s) */
  uint64_t recovery_interval_ns; /* from one recovery to the next (30 s) */
  uint64_t silent_after_ns;      /* no batch for so long from a loaded engine: silent (60 s) */
} kvrelay_source_config;

typedef struct kvrelay_source_stats {
  uint64_t
      counts[KVRELAY_COUNT_LEN]; /* by enum kvrelay_count; blocks for orphan and omitted_capacity,
                                    batches for gap, loss, replay, else events */
  uint64_t batches, stored, removed, cleared,
      tier_cleared; /* batches applied; events by tag, dropped ones too */
  uint64_t batches_held,
      batches_dropped; /* waited behind a gap; came twice or where nobody asked */
  uint64_t blocks_stored, blocks_removed;
  uint64_t last_sequence;
  bool has_sequence;
  uint64_t last_batch_ns;    /* KVRELAY_TIME_NONE before the first */
  uint32_t other_block_size; /* of the last event counted as block_size_mismatch */
  bool complete; /* false = partial: in some rank blocks may exist that the relay does not know */
} kvrelay_source_stats;

typedef struct kvrelay_source kvrelay_source;

/* A batch whose turn it is. */
typedef struct kvrelay_source_batch {
  uint64_t sequence;
  const uint8_t *payload; /* NULL: it was too large to be taken */
  size_t len;
} kvrelay_source_batch;

enum kvrelay_source_state {
  KVRELAY_SOURCE_CONNECTING = 0,
  KVRELAY_SOURCE_LIVE,
  KVRELAY_SOURCE_REPLAY, /* batches wait for the answer to a request */
  KVRELAY_SOURCE_SILENT  /* nothing comes from an engine that holds blocks */
};

/*
 * Payloads go in as they arrive, batches come out when it is their turn:
 *
 *   kvrelay_source_live(&s, sequence, payload, len, now_ns);  // or _reply, _connection, _tick
 *   while (kvrelay_source_next(&s, &batch, now_ns) == 1)
 *     decode(&batch), kvrelay_source_event(&s, …) for each event, or kvrelay_source_lost(&s, …);
 *   if (kvrelay_source_request(&s, &from) == 1) ask_on_a_fresh_socket(from);
 *   call_tick_at(kvrelay_source_deadline_ns(&s));
 *
 * Functions that may drop state give KVRELAY_ERR_INVARIANT when it is broken: fence the producer.
 */
KVRELAY_API kvrelay_source_config kvrelay_source_config_default(void);
KVRELAY_API size_t kvrelay_source_mem_size(const kvrelay_source_config *cfg);
/* `state` must outlive the source and have tags, else KVRELAY_ERR_ARG; several sources may share
 * one. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_init_abi(kvrelay_source *s, size_t s_size,
                                                         const kvrelay_source_config *cfg,
                                                         ckf_producer *state, void *mem,
                                                         size_t mem_len, uint64_t now_ns);
#define kvrelay_source_init(S, CFG, STATE, MEM, MEM_LEN, NOW_NS)                                   \
  kvrelay_source_init_abi((S), sizeof(kvrelay_source), (CFG), (STATE), (MEM), (MEM_LEN), (NOW_NS))
/*
 * A live batch arrived; `payload` NULL: it was too large to be taken.  The payload stays until
 * kvrelay_source_next is done; what waits longer is copied.  KVRELAY_ERR_STATE: batches that are
 * due have not been taken yet; nothing changed.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_live(kvrelay_source *s, uint64_t sequence,
                                                     const uint8_t *payload, size_t len,
                                                     uint64_t now_ns);
/* A reply to the latest request; the sequence UINT64_MAX is the marker that ends the answer.  As
 * kvrelay_source_live. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_reply(kvrelay_source *s, uint64_t sequence,
                                                      const uint8_t *payload, size_t len,
                                                      uint64_t now_ns);
/* The live connection stands or broke.  When it stands again, another process may be behind it, and
 * the source finds that out by the sequence.  As kvrelay_source_live. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_connection(kvrelay_source *s, bool connected,
                                                           uint64_t now_ns);
/* Time has passed: ends an answer that stays away, begins a recovery, notices silence.  As
 * kvrelay_source_live. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_tick(kvrelay_source *s, uint64_t now_ns);
/* 1 and the batch to apply now, lent until the next call; 0 when none is due.  After each input,
 * and before anything of it is published, until it says 0. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_next(kvrelay_source *s, kvrelay_source_batch *out,
                                                     uint64_t now_ns);
/* 1: ask for all batches from `from` on, on a fresh socket, and listen to no former one; 0: there
 * is nothing new to ask. */
KVRELAY_API int kvrelay_source_request(kvrelay_source *s, uint64_t *from);
/* When kvrelay_source_tick is due; KVRELAY_TIME_NONE: not by itself. */
KVRELAY_API uint64_t kvrelay_source_deadline_ns(const kvrelay_source *s);
/* The latest load report of the engine: whether it holds blocks. */
KVRELAY_API void kvrelay_source_load(kvrelay_source *s, bool holds_blocks, uint64_t now_ns);
KVRELAY_API int kvrelay_source_state(const kvrelay_source *s); /* enum kvrelay_source_state */
/* The batch that came last from kvrelay_source_next cannot be decoded, for `reason` (enum
 * kvrelay_count): one lost batch. Errors as above. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_lost(kvrelay_source *s, int reason,
                                                     uint64_t now_ns);
/* One event of the current batch; `has_rank` / `rank` as the batch says.  Counts whatever it drops;
 * KVRELAY_OK, or KVRELAY_ERR_INVARIANT (fence the producer). */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_event(kvrelay_source *s, bool has_rank,
                                                      uint32_t rank, const kvrelay_engine_event *ev,
                                                      uint64_t now_ns);
/* Adds to a counter that only the layer outside sees (frames, trailing_bytes, rank_type …). */
KVRELAY_API void kvrelay_source_count(kvrelay_source *s, int count, uint64_t n);
/* False = partial: blocks of this rank may exist that the relay does not know; also for a foreign
 * rank. */
KVRELAY_API bool kvrelay_source_complete(const kvrelay_source *s, uint32_t rank);
/* Engine hashes with more than one physical copy; a scan of all mappings.  Many of them on an
 * engine that announces reused blocks again call for `deduplicated`. */
KVRELAY_API uint64_t kvrelay_source_copied(const kvrelay_source *s);
/* Forgets everything this source brought, all ranks that it named (source removed, disconnected too
 * long). */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_source_clear(kvrelay_source *s, uint64_t now_ns);
KVRELAY_API const kvrelay_source_stats *kvrelay_source_stats_get(const kvrelay_source *s);
/* "orphan" …; NULL when out of range. */
KVRELAY_API const char *kvrelay_count_name(int count);

/* ==== API: router events ==== */

/* What the worker of a Dynamo deployment publishes for routers: local hashes are there already,
 * each block is reported once. */
enum kvrelay_router_event_type {
  KVRELAY_ROUTER_STORED = 0,
  KVRELAY_ROUTER_REMOVED,
  KVRELAY_ROUTER_CLEARED
};

typedef struct kvrelay_router_event { /* lent until the next one is decoded */
  uint64_t worker_id, event_id;
  uint32_t dp_rank;
  int32_t type, tier, domain; /* enum kvrelay_router_event_type, ckf_tier, ckf_domain */
  bool has_parent, has_start;
  uint64_t parent, start;
  const ckf_block *blocks; /* stored */
  size_t blocks_len;
  const uint64_t *externals; /* removed */
  size_t externals_len;
} kvrelay_router_event;

typedef struct kvrelay_router_config {
  uint64_t worker_id;
  uint32_t rank;
  bool recoverable;            /* the worker can be asked for a dump */
  uint32_t hold_events;        /* that wait for an answer (1 024, at most 2^16); more: oldest go */
  uint32_t hold_bytes;         /* of their blocks (4 MiB, at most 2^30) */
  uint32_t attempts;           /* at one recovery (8, 1 to 32) */
  uint64_t attempt_timeout_ns; /* (30 s) */
  uint64_t retry_ns;           /* before the second attempt (200 ms), doubling */
  uint64_t recovery_interval_ns; /* from one recovery to the next, where one heals (30 s) */
} kvrelay_router_config;

typedef struct kvrelay_router_stats {
  uint64_t counts[KVRELAY_COUNT_LEN]; /* as in kvrelay_source_stats, events instead of batches */
  uint64_t events, blocks_stored, blocks_removed;
  uint64_t last_event_id;
  bool has_event_id;
  bool complete; /* false = partial: blocks may exist that the relay does not know */
} kvrelay_router_stats;

enum kvrelay_router_state {
  KVRELAY_ROUTER_LIVE = 0,
  KVRELAY_ROUTER_RECOVERING,
  KVRELAY_ROUTER_FAILED /* its events are ignored, and its rank is not merely idle */
};

/* How a request for recovery ended without events. */
enum kvrelay_router_failure {
  KVRELAY_ROUTER_BROKEN = 0, /* connection, time-out, an answer that cannot be read */
  KVRELAY_ROUTER_REFUSED,    /* TooNew, InvalidRange, Error */
  KVRELAY_ROUTER_NO_DUMP     /* TreeDumpFailed, or a dump of another scope */
};

typedef struct kvrelay_router kvrelay_router;

KVRELAY_API kvrelay_router_config kvrelay_router_config_default(void);
/* 0 when the configuration is out of range. */
KVRELAY_API size_t kvrelay_router_mem_size(const kvrelay_router_config *cfg);
/* One publisher of one (worker, rank); another publisher, or the same with another descriptor, is
 * another source: kvrelay_router_reset and init.  `state` must outlive it.  KVRELAY_ERR_ARG,
 * KVRELAY_ERR_NOSPACE, KVRELAY_ERR_ABI: not made. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_init_abi(kvrelay_router *r, size_t r_size,
                                                         const kvrelay_router_config *cfg,
                                                         ckf_producer *state, void *mem,
                                                         size_t mem_len, uint64_t now_ns);
#define kvrelay_router_init(R, CFG, STATE, MEM, MEM_LEN, NOW_NS)                                   \
  kvrelay_router_init_abi((R), sizeof(kvrelay_router), (CFG), (STATE), (MEM), (MEM_LEN), (NOW_NS))
/*
 * One live event.  Counts whatever it drops; a source that contradicts itself loses all blocks of
 * its rank, and is ignored from then on.  KVRELAY_OK, or KVRELAY_ERR_INVARIANT, as in all functions
 * here: fence the producer.  Publish after the events of one message, not between them.
 */
KVRELAY_API KVRELAY_MUST_USE int
kvrelay_router_live(kvrelay_router *r, const kvrelay_router_event *ev, uint64_t now_ns);
/* 1: ask the worker for its events from `*first` on, or, when `*whole` is set, for its dump; 0:
 * nothing to ask. */
KVRELAY_API int kvrelay_router_request(kvrelay_router *r, bool *whole, uint64_t *first);
/* The request came to nothing. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_failed(kvrelay_router *r, int how, uint64_t now_ns);
/*
 * The answer is a dump: its events, in order, go into `next`, built in `mem` beside the running
 * state as ckf_rebuild_begin says; nothing else may change that until kvrelay_router_dump_end.  The
 * events' own ids mean nothing.  KVRELAY_OK; KVRELAY_ERR_STATE: nothing was asked;
 * KVRELAY_ERR_NOSPACE: `mem` is too small for this dump, which counts as a broken attempt.
 */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_dump_begin(kvrelay_router *r, ckf_producer *next,
                                                           void *mem, size_t mem_len,
                                                           uint64_t now_ns);
KVRELAY_API void kvrelay_router_dump_event(kvrelay_router *r, const kvrelay_router_event *ev);
/* 1: the rank was replaced in one step, and the state lives in `mem` now, its former memory is the
 * caller's; 0: the dump was invalid, and the memory is free. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_dump_end(kvrelay_router *r, uint64_t last_event_id,
                                                         uint64_t now_ns);
/* The answer is a list of events with their own ids: one of them; then its end. */
KVRELAY_API KVRELAY_MUST_USE int
kvrelay_router_again(kvrelay_router *r, const kvrelay_router_event *ev, uint64_t now_ns);
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_again_end(kvrelay_router *r, uint64_t last_event_id,
                                                          uint64_t now_ns);
/* Time has passed. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_tick(kvrelay_router *r, uint64_t now_ns);
/* When kvrelay_router_tick is due; KVRELAY_TIME_NONE: not by itself. */
KVRELAY_API uint64_t kvrelay_router_deadline_ns(const kvrelay_router *r);
/* The source is gone: all blocks of its rank go, and nothing of it is heard any more. */
KVRELAY_API KVRELAY_MUST_USE int kvrelay_router_reset(kvrelay_router *r);
KVRELAY_API int kvrelay_router_state(const kvrelay_router *r); /* enum kvrelay_router_state */
KVRELAY_API const kvrelay_router_stats *kvrelay_router_stats_get(const kvrelay_router *r);

/* ==== private struct layouts ==== */
/* Complete types so that the caller allocates; sizes may change. */
/* ---- relay ---- */

/* One call.  A slot of a fixed table; `generation_` tells a late number of a former call from the
 * current one. */
typedef struct kvrelay_call_ {
  uint32_t generation_;
  uint8_t method_; /* enum kvrelay_method; NONE = free */
  uint8_t phase_;
  uint8_t list_;                   /* the list of the relay it is in */
  bool waiting_;                   /* pull said NONE; nobody was told since */
  bool queued_;                    /* in the ready list */
  bool admitted_;                  /* admission is over, with success */
  bool holds_;                     /* chunks stay until the next pull */
  bool lent_;                      /* ended, but the chunk in its slot may still be read */
  uint32_t prev_, next_;           /* in list_ */
  uint32_t pool_prev_, pool_next_; /* among the subscribers of pool_ */
  uint32_t ready_prev_, ready_next_;
  kvrelay_pool *pool_;
  uint32_t slot_, chunk_, chunk_count_; /* snapshot being sent */
  uint32_t chunk_buckets_;
  uint64_t cursor_;   /* sequence of the last frame, or load window, taken; of the cut before the
                         first delta */
  uint64_t since_ns_; /* heartbeat and progress are counted from here */
  uint64_t revision_; /* catalog, readiness: last one sent */
  bool sent_;         /* not filter: at least one message was sent */
  bool beat_;         /* readiness: the image is to be repeated */
  int32_t end_reason_;
  const char *end_text_;
  uint64_t end_number_;
  char end_pool_[KVRELAY_POOL_NAME_CAP]; /* the pool may be gone when the end is pulled */
} kvrelay_call_;

typedef struct kvrelay_list_ {
  uint32_t head_, tail_, len_;
} kvrelay_list_;

enum {
  KVRELAY_LIST_NONE_,
  KVRELAY_LIST_CATALOG_,
  KVRELAY_LIST_READINESS_,
  KVRELAY_LIST_LOAD_,
  KVRELAY_LIST_WAIT_,
  KVRELAY_LIST_PROGRESS_,
  KVRELAY_LIST_BEAT_,
  KVRELAY_LISTS_
};

/* One snapshot: all chunks as encoded frames, one behind the other. */
typedef struct kvrelay_cut_ {
  uint8_t *bytes_;
  bool used_;
} kvrelay_cut_;

/* A closed load window; what the pools used is in their rings. */
typedef struct kvrelay_window_ {
  uint64_t closed_ns_;
  uint64_t
      observed_ms_; /* wall clock at that time, found when it is first asked for; 0 = not yet */
} kvrelay_window_;

/* The load of one pool when a window closed. */
typedef struct kvrelay_pool_load_ {
  uint64_t used_, total_;
  uint32_t observed_, expected_;
} kvrelay_pool_load_;

#define KVRELAY_RANKS_MAX_ 4096u /* of one worker */
#define KVRELAY_METHODS_ 6       /* methods that have calls, and NONE */

struct kvrelay_relay {
  kvrelay_relay_config cfg_;
  kvrelay_pool **pools_;     /* sorted as the catalog is */
  kvrelay_pool **endpoints_; /* the same in chains, by hash of the endpoint */
  kvrelay_descriptor *view_; /* descriptors in that order, of revision view_revision_ */
  kvrelay_call_ *streams_;
  kvrelay_cut_ *slots_;
  size_t ring_bytes_, frame_bytes_; /* of each pool's queue: its turn, and the largest frame, which
                                       may reach beyond it */
  kvrelay_list_ lists_[KVRELAY_LISTS_];
  kvrelay_pool *due_head_, *due_tail_; /* pools whose publication delay runs, earliest first */
  uint32_t pools_len_, streams_len_;
  uint32_t free_head_, ready_head_, ready_tail_;
  uint32_t open_[KVRELAY_METHODS_];        /* calls of each method, ended ones too */
  uint32_t hubs_, busy_hubs_, slots_used_; /* busy: with subscribers */
  uint64_t revision_, view_revision_, generation_;
  /* Readiness: what was derived, lent, and the image of it with links. */
  const struct kvrelay_topology *topology_;
  kvrelay_topology_entry *entries_;
  kvrelay_topology_member *members_;
  uint32_t entries_len_;
  bool topology_dirty_;
  uint64_t topology_revision_;
  uint8_t topology_digest_[32]; /* equal digests: nothing changed */
  /* Load: the pools keep the numbers, here is the window that was asked for last. */
  kvrelay_load_entry *load_view_;
  uint32_t load_view_len_;
  uint64_t load_view_window_, window_, window_due_ns_;
  kvrelay_window_ *windows_; /* ring of cfg_.load_windows */
  bool stopping_;
  kvrelay_relay_stats stats_;
};

/* One encoded delta in the ring of its pool. */
typedef struct kvrelay_frame_ {
  size_t offset_, len_;
} kvrelay_frame_;

/* One data-parallel rank. */
typedef struct kvrelay_rank_load_ {
  uint64_t worker_, capacity_, used_;
  uint32_t rank_;
  bool observed_;
} kvrelay_rank_load_;

struct kvrelay_pool {
  kvrelay_relay *relay_;
  kvrelay_pool *endpoint_next_; /* in the chain of its endpoint's hash */
  ckf_producer *state_;
  kvrelay_descriptor descriptor_;
  uint64_t sequence_; /* of the last delta */
  bool hub_;          /* initialised: the sequence moves */
  int fenced_;        /* KVRELAY_OK, or why */
  bool due_;          /* in the due list */
  kvrelay_pool *due_prev_, *due_next_;
  uint64_t due_ns_;
  uint32_t subscribers_, waiting_; /* streams with a cut; streams before it */
  uint32_t first_stream_;
  kvrelay_frame_
      *frames_;    /* ring of queue_frames; the frame of sequence s is at (s - 1) % queue_frames */
  uint8_t *bytes_; /* ring_bytes_ + frame_bytes_ */
  uint32_t
      frames_len_; /* deltas kept: those that end at sequence_ - frames_len_ + 1 .. sequence_ */
  size_t frames_bytes_;       /* their payloads + KVRELAY_FRAME_COST_ each */
  size_t write_;              /* where the next frame goes */
  kvrelay_rank_load_ *ranks_; /* by (worker, rank) */
  uint32_t ranks_len_;
  kvrelay_pool_load_ *loads_; /* ring of load_windows */
  uint64_t load_from_;        /* first window that closed while it was in the catalog */
};

/* ---- consumer ---- */

/* A call that is to stay open, and when to try again. */
typedef struct kvrelay_consumer_stream_ {
  uint64_t opened_ns;
  uint64_t retry_ns; /* 0 = at once, KVRELAY_TIME_NONE = not again on this connection */
  uint32_t call;     /* open now, 0 = none */
  uint32_t cancel;   /* still to be cancelled, 0 = none */
  uint32_t serial;   /* makes the call numbers of one stream differ */
  uint32_t failures; /* in a row */
  bool heard;        /* a message arrived on `call` */
} kvrelay_consumer_stream_;

/* What is kept for one pool while catalogs list its id. No call is open, or left to be cancelled,
 * without replica memory. */
typedef struct kvrelay_consumer_pool_ {
  kvrelay_consumer_stream_ stream;
  ckf_replica replica;
  void *mem;      /* of the replica, NULL = none */
  uint32_t index; /* in the catalog in force; of a free slot: the next free one */
  int32_t fault;
  int fault_code;
  uint8_t bar;  /* why it is not to be subscribed to */
  uint8_t wait; /* for a newer catalog */
  bool followed;
  bool asked;     /* for memory */
  bool cut_known; /* of this stream */
  uint64_t cut;   /* sequence of the snapshot that is being assembled */
  uint64_t last_frame_ns;
  uint64_t frames, snapshots, deltas, heartbeats;
  kvrelay_status last_end;
} kvrelay_consumer_pool_;

/* A name, or a runtime adapter, of a usable pool. */
typedef struct kvrelay_consumer_name_ {
  kvrelay_text text;
  const kvrelay_registration *registration;
  uint32_t pool;
  bool adapter;
} kvrelay_consumer_name_;

/* A copy of one catalog; all of it lies in its arena. */
typedef struct kvrelay_catalog_copy_ {
  uint8_t *arena;
  size_t arena_len, used;
  uint64_t revision;
  kvrelay_descriptor *pools;
  kvrelay_verdict *verdicts;
  uint32_t *slots; /* of each pool */
  uint32_t *order; /* pools with a readable id, ascending */
  kvrelay_consumer_name_ *names;
  size_t names_len;
  uint32_t pools_len, order_len;
} kvrelay_catalog_copy_;

/* The planes that have one stream each; their order is that of their places. */
enum {
  KVRELAY_PLANE_INFO_,
  KVRELAY_PLANE_WATCH_,
  KVRELAY_PLANE_READINESS_,
  KVRELAY_PLANE_LOAD_,
  KVRELAY_PLANES_
};

/* A copy of one readiness image. */
typedef struct kvrelay_readiness_copy_ {
  uint8_t *arena;
  size_t arena_len;
  uint64_t revision, received_ns;
  kvrelay_topology_entry *entries;
  kvrelay_verdict *verdicts;
  uint32_t *order;    /* by (namespace, id) */
  uint8_t digest[32]; /* of all that was sent */
  uint32_t len;
  bool in_force; /* the open stream has brought it */
} kvrelay_readiness_copy_;

/* A copy of one load window; entries that can be used come first, by producer. */
typedef struct kvrelay_load_held_ {
  kvrelay_load_entry entry;
  kvrelay_verdict verdict;
} kvrelay_load_held_;
typedef struct kvrelay_load_copy_ {
  uint64_t window, observed_ms, window_ms, received_ns;
  kvrelay_load_held_ *held;
  uint32_t len;
  bool in_force;
} kvrelay_load_copy_;

struct kvrelay_consumer {
  kvrelay_consumer_config cfg_; /* its subscriber_id points into the memory block */
  kvrelay_consumer_stream_ planes_[KVRELAY_PLANES_];
  kvrelay_readiness_copy_ readiness_;
  kvrelay_load_copy_ load_;
  kvrelay_relay_identity relay_;
  kvrelay_catalog_copy_ catalogs_[2];
  kvrelay_consumer_pool_ *slots_;
  kvrelay_event_out *events_;
  void *spent_; /* replica memory to be given back, linked through its first bytes */
  uint64_t deadline_ns_;
  uint64_t jitter_;
  uint64_t catalog_ns_; /* when the last one came */
  uint32_t slots_used_, slot_free_;
  uint32_t cursor_; /* slots before it have nothing to do before deadline_ns_ */
  uint32_t events_first_, events_len_;
  uint8_t current_; /* of catalogs_ */
  bool work_;       /* there may be something to do before deadline_ns_ */
  bool connected_, stopped_, stop_due_, reconnect_due_;
  bool relay_known_, informed_;
  bool in_force_;      /* the current catalog may be asked */
  bool revision_seen_; /* the open catalog stream has brought one */
};

/* ---- source ---- */

/* A hash whose removal must stay silent: a partial block, a sub-block, a block that was not
 * indexed. */
typedef struct kvrelay_remembered_ {
  uint64_t external_;
  uint32_t rank_;
  bool live_; /* false: forgotten, waits for its turn to leave the ring */
} kvrelay_remembered_;

/* A batch that waits for its turn. */
typedef struct kvrelay_held_ {
  uint64_t sequence_;
  uint32_t at_, len_; /* of its payload */
  bool reply_, lost_; /* lost_: it was too large to be taken */
} kvrelay_held_;

/* The kind of attention that a group of a rank has shown. */
typedef struct kvrelay_learned_ {
  uint32_t rank_, group_;
  int kind_; /* count of the reason to drop it, or KVRELAY_COUNT_LEN to keep it */
} kvrelay_learned_;

#define KVRELAY_LEARNED_MAX_ 256

struct kvrelay_source {
  kvrelay_source_config cfg_;
  ckf_producer *state_;
  kvrelay_source_stats stats_;
  uint8_t *ranks_; /* KVRELAY_RANK_ bits of each */
  /* Order.  While nothing of this process was applied stats_.has_sequence is false, and next_ 0. */
  uint64_t next_;        /* sequence of the batch that is due */
  uint64_t newest_live_; /* with has_live_ */
  uint64_t last_hash_;   /* of the payload applied last */
  uint64_t heard_ns_;    /* last live batch, connection or first load report */
  bool has_live_, connected_, loaded_, silent_;
  bool reconnected_; /* the next batch tells whether the same process is behind the socket */
  bool given_;       /* lent_ waits for its turn */
  kvrelay_source_batch lent_;
  bool lent_reply_;
  /* The request under way, while replaying_. */
  bool replaying_, asking_;  /* asking_: the caller has not taken it yet */
  bool answered_, advanced_; /* something came; something was of use */
  bool hole_;         /* replies are missing in the middle: the rest waits for another request */
  bool overlap_;      /* the first reply shows whether it is the same process */
  uint8_t confirm_;   /* 1: what seems to be gone is asked for again; 2: was asked again */
  bool repeated_;     /* asked a second time for next_ == repeated_at_ */
  uint32_t requests_; /* in a row */
  uint64_t repeated_at_, replay_deadline_ns_;
  /* Recovery: the answer is collected in the hold and applied at once to an empty rank. */
  int recovery_;              /* KVRELAY_RECOVERY_ */
  bool wanted_;               /* some rank needs one */
  uint64_t resume_;           /* next_ of the stream meanwhile */
  uint64_t recovery_from_ns_; /* not before */
  uint32_t scan_at_;
  kvrelay_source_stats counted_; /* what was counted when these batches were applied first */
  /* Batches that wait, ascending; their bytes one after the other until none waits. */
  kvrelay_held_ *held_;
  uint8_t *held_bytes_;
  uint32_t held_first_, held_end_, held_used_;
  /* Scratch for one event. */
  ckf_block *blocks_;
  uint64_t *removals_; /* also the objects of one block */
  /* Cache namespaces: number n has the seed term terms_[n - 1]; equal terms give equal keys, so the
   * text is not kept. */
  uint64_t *terms_;
  uint32_t *term_index_; /* open addressing, number or 0 */
  bool *term_used_;
  uint32_t term_index_mask_;
  uint64_t swept_at_; /* progress_ at the last sweep that found nothing */
  uint64_t progress_; /* counts removals and clears */
  /* Remembered hashes: a ring in order of arrival, and an index over it with linear probing. */
  kvrelay_remembered_ *ring_;
  uint32_t *index_; /* place in the ring + 1; 0 = never used, NIL = used once */
  uint32_t index_mask_, ring_head_, ring_len_, graves_;
  kvrelay_learned_ learned_[KVRELAY_LEARNED_MAX_];
  uint32_t learned_len_;
};

/* ---- router events ---- */

typedef struct kvrelay_router_held_ {
  kvrelay_router_event event_; /* its lists begin at cells_[at_] */
  uint32_t at_;
} kvrelay_router_held_;

struct kvrelay_router {
  kvrelay_router_config cfg_;
  ckf_producer *state_, *next_; /* next_: of the dump being read */
  kvrelay_router_stats stats_;
  bool recovering_, asking_, whole_; /* a request: being answered, not taken yet, for a dump */
  bool waiting_;                     /* for the time of the next attempt */
  bool failed_;                      /* events are ignored until a dump heals it */
  bool banned_;                      /* nothing heals it */
  bool degraded_;                    /* recovery failed: as a source without one */
  bool reset_due_;                   /* before the next recovery */
  bool foreign_, invalid_;           /* of the dump or the events being read */
  bool wanted_;                      /* another recovery, at from_ns_ */
  uint32_t attempts_;
  uint64_t deadline_ns_, from_ns_;
  kvrelay_router_held_ *held_;
  ckf_block *cells_; /* blocks, or two externals each */
  uint32_t held_first_, held_end_, cells_used_, cells_cap_;
};

#ifdef __cplusplus
}
#endif
#endif /* KVRELAY_H */

#if (defined(KVRELAY_IMPLEMENTATION) || defined(KVRELAY_STATIC)) &&                                \
    !defined(KVRELAY_IMPLEMENTATION_DONE_)
#define KVRELAY_IMPLEMENTATION_DONE_
#ifdef __cplusplus
#ifdef __GNUC__ /* casts are those of C */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif
extern "C" {
#endif
/* ==== names and errors (impl) ==== */

/* ---- names and errors ---- */

KVRELAY_API const char *kvrelay_strerror(int err) {
  switch (err) {
  case KVRELAY_OK:
    return "fine";
  case KVRELAY_ERR_ARG:
    return "an argument breaks the caller's promise";
  case KVRELAY_ERR_NOSPACE:
    return "the memory given is too small";
  case KVRELAY_ERR_TRUNCATED:
    return "the input ends too early";
  case KVRELAY_ERR_MALFORMED:
    return "the input breaks its format";
  case KVRELAY_ERR_UNSUPPORTED:
    return "well-formed, but of an unknown kind";
  case KVRELAY_ERR_LIMIT:
    return "a configured bound was reached";
  case KVRELAY_ERR_STATE:
    return "not in this state: what is asked for is not there yet, or is over";
  case KVRELAY_ERR_NOT_FOUND:
    return "no such pool, call or name";
  case KVRELAY_ERR_REFUSED:
    return "refused, see the status";
  case KVRELAY_ERR_EXHAUSTED:
    return "a counter of the contract ran out";
  case KVRELAY_ERR_INVARIANT:
    return "broken internal state";
  case KVRELAY_ERR_ABI:
    return "header and implementation differ in configuration";
  default:
    return "unknown error";
  }
}

/* Row i = reason i: its name behind the common prefix, and the gRPC status it travels with. */
static const struct {
  const char *name;
  int32_t status;
} kvrelay_reasons_[] = {
    {"RELAY_ERROR_REASON_UNSPECIFIED", KVRELAY_GRPC_INTERNAL},
    {"RELAY_ERROR_REASON_CONTRACT_MISMATCH", KVRELAY_GRPC_FAILED_PRECONDITION},
    {"RELAY_ERROR_REASON_INVALID_REQUEST", KVRELAY_GRPC_INVALID_ARGUMENT},
    {"RELAY_ERROR_REASON_UNSUPPORTED_FEATURE", KVRELAY_GRPC_FAILED_PRECONDITION},
    {"RELAY_ERROR_REASON_POOL_NOT_FOUND", KVRELAY_GRPC_NOT_FOUND},
    {"RELAY_ERROR_REASON_PRODUCER_CHANGED", KVRELAY_GRPC_FAILED_PRECONDITION},
    {"RELAY_ERROR_REASON_RESOURCE_LIMIT", KVRELAY_GRPC_RESOURCE_EXHAUSTED},
    {"RELAY_ERROR_REASON_SUBSCRIBER_LAGGED", KVRELAY_GRPC_RESOURCE_EXHAUSTED},
    {"RELAY_ERROR_REASON_SNAPSHOT_PROGRESS_TIMEOUT", KVRELAY_GRPC_RESOURCE_EXHAUSTED},
    {"RELAY_ERROR_REASON_PUBLICATION_UNAVAILABLE", KVRELAY_GRPC_UNAVAILABLE},
    {"RELAY_ERROR_REASON_INVALID_PUBLICATION", KVRELAY_GRPC_FAILED_PRECONDITION},
    {"RELAY_ERROR_REASON_INTERNAL", KVRELAY_GRPC_INTERNAL},
};

#define KVRELAY_REASONS_LEN_ ((int32_t)(sizeof kvrelay_reasons_ / sizeof kvrelay_reasons_[0]))

static bool kvrelay_bytes_are_(const uint8_t *ptr, size_t len, const char *word) {
  size_t i = 0;
  while (i < len && word[i] != 0 && ptr[i] == (uint8_t)word[i])
    i++;
  return i == len && word[i] == 0;
}

KVRELAY_API const char *kvrelay_reason_name(int32_t reason) {
  return reason > 0 && reason < KVRELAY_REASONS_LEN_ ? kvrelay_reasons_[reason].name : NULL;
}

KVRELAY_API int32_t kvrelay_reason_from_name(const uint8_t *name, size_t len) {
  for (int32_t i = 1; i < KVRELAY_REASONS_LEN_; i++)
    if (kvrelay_bytes_are_(name, len, kvrelay_reasons_[i].name))
      return i;
  return KVRELAY_REASON_NONE;
}

KVRELAY_API int32_t kvrelay_reason_status(int32_t reason) {
  return reason >= 0 && reason < KVRELAY_REASONS_LEN_ ? kvrelay_reasons_[reason].status
                                                      : KVRELAY_GRPC_INTERNAL;
}

KVRELAY_API const char *kvrelay_grpc_status_name(int32_t status) {
  static const char *const names[] = {"OK",
                                      "CANCELLED",
                                      "UNKNOWN",
                                      "INVALID_ARGUMENT",
                                      "DEADLINE_EXCEEDED",
                                      "NOT_FOUND",
                                      "ALREADY_EXISTS",
                                      "PERMISSION_DENIED",
                                      "RESOURCE_EXHAUSTED",
                                      "FAILED_PRECONDITION",
                                      "ABORTED",
                                      "OUT_OF_RANGE",
                                      "UNIMPLEMENTED",
                                      "INTERNAL",
                                      "UNAVAILABLE",
                                      "DATA_LOSS",
                                      "UNAUTHENTICATED"};
  return status >= 0 && status <= 16 ? names[status] : "UNKNOWN";
}

KVRELAY_API const char *kvrelay_condition_name(uint8_t condition) {
  static const char *const names[] = {"",
                                      "ContractMarker",
                                      "ProtocolVersion",
                                      "MissingField",
                                      "UnsupportedModelTarget",
                                      "PoolIdentityVersion",
                                      "DigestLength",
                                      "IdentitySource",
                                      "ZeroFormatField",
                                      "UnsupportedCkfFormat",
                                      "BucketCountOverflow",
                                      "BucketCountTooLarge",
                                      "UnsupportedBucketCount",
                                      "ZeroLayoutGeneration",
                                      "ZeroQueryBlockSize",
                                      "QueryHashFormat",
                                      "InvalidText",
                                      "DuplicateAlias",
                                      "MissingWorkerRoles",
                                      "WorkerRole",
                                      "DuplicateWorkerRole",
                                      "UnsupportedDuplicateEndpointRole",
                                      "ReadinessState",
                                      "MissingTopologyMembers",
                                      "DuplicateTopologyMember",
                                      "TopologyNamespaceMismatch",
                                      "DuplicateAdapter",
                                      "ListTooLong"};
  return condition < sizeof names / sizeof names[0] ? names[condition] : "";
}

KVRELAY_API const char *kvrelay_role_name(int32_t role) {
  static const char *const names[] = {"PREFILL", "DECODE", "ENCODE", "AGGREGATED", "LEGACY"};
  return role >= KVRELAY_ROLE_PREFILL && role <= KVRELAY_ROLE_LEGACY ? names[role - 1] : NULL;
}

static const char *const kvrelay_paths_[] = {
    "/dynamo.kvrelay.v1.KvEventRelay/GetRelayInfo",
    "/dynamo.kvrelay.v1.KvEventRelay/WatchKvPoolCatalog",
    "/dynamo.kvrelay.v1.KvEventRelay/SubscribeKvPool",
    "/dynamo.kvrelay.v1.KvEventRelay/SubscribeServingReadiness",
    "/dynamo.kvrelay.v1.KvEventRelay/SubscribeKvPoolLoad",
    "/dynamo.kvrelay.v1.KvEventRelay/SubscribeServingLoad"};

KVRELAY_API const char *kvrelay_method_path(int32_t method) {
  return method >= KVRELAY_METHOD_GET_RELAY_INFO && method <= KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD
             ? kvrelay_paths_[method - 1]
             : NULL;
}

KVRELAY_API bool kvrelay_method_offered(int32_t method) {
  return method > KVRELAY_METHOD_NONE && method < KVRELAY_METHODS_;
}

KVRELAY_API int32_t kvrelay_method_from_path(const uint8_t *path, size_t len) {
  for (int32_t method = KVRELAY_METHOD_GET_RELAY_INFO;
       method <= KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD; method++)
    if (kvrelay_bytes_are_(path, len, kvrelay_paths_[method - 1]))
      return method;
  return KVRELAY_METHOD_NONE;
}

/* ---- texts: strict UTF-8, the White_Space property, control characters ---- */

KVRELAY_API size_t kvrelay_utf8_next(const uint8_t *ptr, size_t len, uint32_t *code) {
  uint8_t c = ptr[0];
  size_t n = c < 0x80                ? 1
             : c >= 0xC2 && c < 0xE0 ? 2
             : c >= 0xE0 && c < 0xF0 ? 3
             : c >= 0xF0 && c < 0xF5 ? 4
                                     : 0;
  if (n == 0 || n > len)
    return 0;
  uint32_t value = n == 1 ? c : c & (0x7Fu >> n);
  for (size_t i = 1; i < n; i++) {
    if ((ptr[i] & 0xC0) != 0x80)
      return 0;
    value = value << 6 | (ptr[i] & 0x3Fu);
  }
  /* over-long forms of three and four bytes, surrogates, beyond Unicode */
  if ((n == 3 && value < 0x800) || (n == 4 && value < 0x10000) ||
      (value >= 0xD800 && value <= 0xDFFF) || value > 0x10FFFF)
    return 0;
  *code = value;
  return n;
}

KVRELAY_API bool kvrelay_utf8_valid(const uint8_t *ptr, size_t len) {
  uint32_t code;
  for (size_t i = 0, n; i < len; i += n) {
    n = kvrelay_utf8_next(ptr + i, len - i, &code);
    if (n == 0)
      return false;
  }
  return true;
}

static bool kvrelay_white_space_(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

KVRELAY_API bool kvrelay_text_valid(kvrelay_text text) {
  uint32_t code = 0;
  bool first = true;
  if (text.len == 0)
    return false;
  for (size_t i = 0, n; i < text.len; i += n) {
    n = kvrelay_utf8_next(text.ptr + i, text.len - i, &code);
    if (n == 0 || (first && kvrelay_white_space_(code)))
      return false;
    first = false;
  }
  return !kvrelay_white_space_(code);
}

KVRELAY_API bool kvrelay_subscriber_id_valid(kvrelay_text id) {
  uint32_t code;
  if (id.len == 0 || id.len > KVRELAY_SUBSCRIBER_ID_MAX)
    return false;
  for (size_t i = 0, n; i < id.len; i += n) {
    n = kvrelay_utf8_next(id.ptr + i, id.len - i, &code);
    if (n == 0 || code < 0x20 || (code >= 0x7F && code <= 0x9F))
      return false;
  }
  return true;
}

/* ==== identity (impl) ==== */
/* BLAKE3 over length-framed parts, the first 16 bytes. */

static void kvrelay_put_u32_(hashfmt_blake3_state *h, uint32_t v) {
  uint8_t b[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
  hashfmt_blake3_update(h, b, 4);
}

static void kvrelay_put_framed_(hashfmt_blake3_state *h, kvrelay_text t) {
  kvrelay_put_u32_(h, (uint32_t)t.len);
  hashfmt_blake3_update(h, t.ptr, t.len);
}

static kvrelay_text kvrelay_word_(const char *word) {
  kvrelay_text t = {(const uint8_t *)word, 0};
  while (word[t.len] != 0)
    t.len++;
  return t;
}

KVRELAY_API int kvrelay_text_compare(kvrelay_text a, kvrelay_text b) {
  size_t n = a.len < b.len ? a.len : b.len;
  int order = n == 0 ? 0 : KVRELAY_MEMCMP(a.ptr, b.ptr, n);
  return order != 0 ? order : (a.len > b.len) - (a.len < b.len);
}

#define KVRELAY_MAP_MAX_ 32

/* Hashes the entries in ascending order of their keys; any order is given.  At most 32 entries, so
 * a selection is enough. */
static int kvrelay_put_map_(hashfmt_blake3_state *h, const kvrelay_map_entry *map, size_t map_len) {
  const kvrelay_map_entry *last = NULL;
  if (map_len > KVRELAY_MAP_MAX_)
    return KVRELAY_ERR_ARG;
  for (size_t i = 0; i < map_len; i++)
    if (map[i].key.len < 1 || map[i].key.len > 128 || map[i].value.len < 1 ||
        map[i].value.len > 1024 || !kvrelay_utf8_valid(map[i].key.ptr, map[i].key.len))
      return KVRELAY_ERR_ARG;
  kvrelay_put_u32_(h, (uint32_t)map_len);
  for (size_t done = 0; done < map_len; done++) {
    const kvrelay_map_entry *next = NULL;
    for (size_t i = 0; i < map_len; i++)
      if ((last == NULL || kvrelay_text_compare(map[i].key, last->key) > 0) &&
          (next == NULL || kvrelay_text_compare(map[i].key, next->key) < 0))
        next = &map[i];
    if (next == NULL)
      return KVRELAY_ERR_ARG; /* a key was repeated */
    kvrelay_put_framed_(h, next->key);
    kvrelay_put_framed_(h, next->value);
    last = next;
  }
  return KVRELAY_OK;
}

static void kvrelay_digest_finish_(const hashfmt_blake3_state *h, bool is_explicit,
                                   kvrelay_digest *out) {
  uint8_t full[32];
  hashfmt_blake3_final(h, full);
  KVRELAY_MEMSET(out, 0, sizeof *out);
  KVRELAY_MEMCPY(out->digest, full, KVRELAY_DIGEST_LEN);
  out->digest_len = KVRELAY_DIGEST_LEN;
  out->source = is_explicit ? KVRELAY_SOURCE_EXPLICIT : KVRELAY_SOURCE_DEFAULT_DERIVED;
  out->present = true;
}

KVRELAY_API int kvrelay_cache_digest(kvrelay_text model_source, const kvrelay_map_entry *map,
                                     size_t map_len, uint32_t kv_block_size, int32_t hash_format,
                                     kvrelay_digest *out) {
  hashfmt_blake3_state h;
  uint8_t version[2] = {(uint8_t)hash_format, 0};
  if ((hash_format != HASHFMT_FORMAT_STANDARD && hash_format != HASHFMT_FORMAT_EAGLE) ||
      (map_len == 0 && model_source.len == 0))
    return KVRELAY_ERR_ARG;
  hashfmt_blake3_init(&h);
  if (map_len != 0) {
    kvrelay_put_framed_(&h, kvrelay_word_("dynamo/indexer-cache-semantics/explicit/v1"));
    int err = kvrelay_put_map_(&h, map, map_len);
    if (err != KVRELAY_OK)
      return err;
  } else {
    kvrelay_put_framed_(&h, kvrelay_word_("dynamo/indexer-cache-semantics/default/v1"));
    kvrelay_put_u32_(&h, 1);
    kvrelay_put_framed_(&h, model_source);
  }
  kvrelay_put_u32_(&h, kv_block_size);
  hashfmt_blake3_update(&h, version, 2);
  kvrelay_digest_finish_(&h, map_len != 0, out);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_scope_digest(const kvrelay_endpoint *endpoint, const kvrelay_map_entry *map,
                                     size_t map_len, kvrelay_digest *out) {
  hashfmt_blake3_state h;
  hashfmt_blake3_init(&h);
  if (map_len != 0) {
    kvrelay_put_framed_(&h, kvrelay_word_("dynamo/indexer-routing-scope/explicit/v1"));
    int err = kvrelay_put_map_(&h, map, map_len);
    if (err != KVRELAY_OK)
      return err;
  } else {
    kvrelay_put_framed_(&h, kvrelay_word_("dynamo/indexer-routing-scope/default/v1"));
    kvrelay_put_u32_(&h, 3);
    kvrelay_put_framed_(&h, endpoint->namespace_);
    kvrelay_put_framed_(&h, endpoint->component);
    kvrelay_put_framed_(&h, endpoint->endpoint);
  }
  kvrelay_digest_finish_(&h, map_len != 0, out);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_dc_id(kvrelay_text name, uint64_t *out) {
  hashfmt_blake3_state h;
  uint8_t full[32];
  kvrelay_text prefix = kvrelay_word_("dynamo/indexer-dc/v1");
  if (!kvrelay_text_valid(name))
    return KVRELAY_ERR_ARG;
  hashfmt_blake3_init(&h);
  hashfmt_blake3_update(&h, prefix.ptr, prefix.len); /* not framed, unlike every other part */
  kvrelay_put_framed_(&h, name);
  hashfmt_blake3_final(&h, full);
  *out = 0;
  for (int i = 7; i >= 0; i--)
    *out = *out << 8 | full[i];
  return KVRELAY_OK;
}

/* ==== validation (impl) ==== */
/* Straight lists in the contract's order, the first failure wins. */

static kvrelay_verdict kvrelay_verdict_(uint8_t class_, uint8_t condition, const char *field,
                                        uint64_t value) {
  kvrelay_verdict v;
  v.class_ = class_;
  v.condition = condition;
  v.field = field;
  v.value = value;
  return v;
}

#define KVRELAY_FINE_ kvrelay_verdict_(KVRELAY_CLASS_OK, KVRELAY_COND_OK, "", 0)
#define KVRELAY_INVALID_(COND, FIELD, VALUE)                                                       \
  kvrelay_verdict_(KVRELAY_CLASS_INVALID, KVRELAY_COND_##COND, (FIELD), (VALUE))
#define KVRELAY_UNSUPPORTED_(COND, FIELD, VALUE)                                                   \
  kvrelay_verdict_(KVRELAY_CLASS_UNSUPPORTED, KVRELAY_COND_##COND, (FIELD), (VALUE))
/* Returns from the validator when a part of it failed. */
#define KVRELAY_REQUIRE_(CALL)                                                                     \
  do {                                                                                             \
    const kvrelay_verdict part_ = (CALL);                                                          \
    if (part_.class_ != KVRELAY_CLASS_OK)                                                          \
      return part_;                                                                                \
  } while (0)

/* ---- sorting: peers choose the input, so neither recursion nor a quadratic case ---- */

typedef bool (*kvrelay_before_fn_)(const void *context, const void *a, const void *b);

static void kvrelay_swap_(uint8_t *a, uint8_t *b, size_t size) {
  uint8_t part[64];
  while (size > 0) {
    const size_t n = size < sizeof part ? size : sizeof part;
    KVRELAY_MEMCPY(part, a, n);
    KVRELAY_MEMCPY(a, b, n);
    KVRELAY_MEMCPY(b, part, n);
    a += n;
    b += n;
    size -= n;
  }
}

/* Moves element i of a heap down; the last in order is on top. */
static void kvrelay_sift_(uint8_t *base, size_t len, size_t size, size_t i,
                          kvrelay_before_fn_ before, const void *context) {
  for (;;) {
    size_t child = 2 * i + 1;
    if (child >= len)
      return;
    if (child + 1 < len && before(context, base + child * size, base + (child + 1) * size))
      child++;
    if (!before(context, base + i * size, base + child * size))
      return;
    kvrelay_swap_(base + i * size, base + child * size, size);
    i = child;
  }
}

static void kvrelay_heap_(uint8_t *base, size_t len, size_t size, kvrelay_before_fn_ before,
                          const void *context) {
  size_t i;
  for (i = len / 2; i > 0; i--)
    kvrelay_sift_(base, len, size, i - 1, before, context);
}

static void kvrelay_sort_(void *elements, size_t len, size_t size, kvrelay_before_fn_ before,
                          const void *context) {
  uint8_t *const base = (uint8_t *)elements;
  size_t i;
  for (i = 1; i < len && !before(context, base + i * size, base + (i - 1) * size); i++) {
  }
  if (i >= len)
    return; /* most lists arrive sorted */
  kvrelay_heap_(base, len, size, before, context);
  for (i = len - 1; i > 0; i--) {
    kvrelay_swap_(base, base + i * size, size);
    kvrelay_sift_(base, i, size, 0, before, context);
  }
}

/* Below 0, 0 or above 0; `a` and `b` count elements of the list. */
typedef int (*kvrelay_compare_fn_)(const void *list, size_t a, size_t b);

#define KVRELAY_SPAN_LEN_ 512

typedef struct kvrelay_span_ {
  const void *list;
  kvrelay_compare_fn_ compare;
  size_t from, len;
  uint16_t order[KVRELAY_SPAN_LEN_]; /* of its elements, counted from `from` */
} kvrelay_span_;

static bool kvrelay_span_before_(const void *context, const void *a, const void *b) {
  const kvrelay_span_ *const span = (const kvrelay_span_ *)context;
  const size_t x = span->from + *(const uint16_t *)a, y = span->from + *(const uint16_t *)b;
  const int c = span->compare(span->list, x, y);
  return c != 0 ? c < 0 : x < y;
}

/* Whether an element behind a sorted span equals one in it. */
static bool kvrelay_span_has_(const kvrelay_span_ *span, size_t element) {
  size_t low = 0, high = span->len;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    const int c = span->compare(span->list, span->from + span->order[middle], element);
    if (c == 0)
      return true;
    if (c < 0)
      low = middle + 1;
    else
      high = middle;
  }
  return false;
}

/*
 * Number of the first element that equals one before it, `len` when there is none.  Nothing may be
 * moved and there is no memory to sort all in, so spans of it are sorted one by one, and what
 * stands behind each is looked up in it; with KVRELAY_PARTS_MAX elements fewer than 100 comparisons
 * for each.
 */
static size_t kvrelay_first_repeat_(const void *list, size_t len, kvrelay_compare_fn_ compare) {
  kvrelay_span_ span;
  size_t first = len, i;
  span.list = list;
  span.compare = compare;
  for (span.from = 0; span.from < first; span.from += span.len) {
    span.len = first - span.from < KVRELAY_SPAN_LEN_ ? first - span.from : KVRELAY_SPAN_LEN_;
    for (i = 0; i < span.len; i++)
      span.order[i] = (uint16_t)i;
    kvrelay_sort_(span.order, span.len, sizeof *span.order, kvrelay_span_before_, &span);
    for (i = 1; i < span.len; i++)
      if (span.from + span.order[i] < first &&
          compare(list, span.from + span.order[i - 1], span.from + span.order[i]) == 0)
        first = span.from + span.order[i];
    for (i = span.from + span.len; i < first; i++)
      if (kvrelay_span_has_(&span, i))
        first = i;
  }
  return first;
}

/* ---- validators ---- */

KVRELAY_API kvrelay_verdict kvrelay_check_envelope(const kvrelay_envelope *m) {
  if (m->contract_marker != KVRELAY_CONTRACT_MARKER)
    return kvrelay_verdict_(KVRELAY_CLASS_ENVELOPE, KVRELAY_COND_CONTRACT_MARKER, "contract_marker",
                            m->contract_marker);
  if (m->protocol_version != KVRELAY_WIRE_VERSION)
    return kvrelay_verdict_(KVRELAY_CLASS_ENVELOPE, KVRELAY_COND_PROTOCOL_VERSION,
                            "protocol_version", m->protocol_version);
  return KVRELAY_FINE_;
}

static kvrelay_verdict kvrelay_check_digest_(const kvrelay_digest *m, const char *field) {
  if (!m->present)
    return KVRELAY_INVALID_(MISSING_FIELD, field, 0);
  if (m->digest_len != KVRELAY_DIGEST_LEN)
    return KVRELAY_INVALID_(DIGEST_LENGTH, field, m->digest_len);
  if (m->source == 0)
    return KVRELAY_INVALID_(IDENTITY_SOURCE, field, 0);
  if (m->source != KVRELAY_SOURCE_DEFAULT_DERIVED && m->source != KVRELAY_SOURCE_EXPLICIT)
    return KVRELAY_UNSUPPORTED_(IDENTITY_SOURCE, field, (uint64_t)(int64_t)m->source);
  return KVRELAY_FINE_;
}

KVRELAY_API kvrelay_verdict kvrelay_check_pool_id(const kvrelay_pool_id *m) {
  if (m->identity_version == 0)
    return KVRELAY_INVALID_(POOL_IDENTITY_VERSION, "pool_id", 0);
  if (m->identity_version != 1)
    return KVRELAY_UNSUPPORTED_(POOL_IDENTITY_VERSION, "pool_id", m->identity_version);
  if (!m->domain.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "pool_id.indexer_domain", 0);
  KVRELAY_REQUIRE_(kvrelay_check_digest_(&m->domain.cache_semantics, "cache_semantics"));
  return kvrelay_check_digest_(&m->domain.routing_scope, "routing_scope");
}

KVRELAY_API kvrelay_verdict kvrelay_check_ckf_format(const kvrelay_ckf_format *m) {
  if (m->format_version == 0)
    return KVRELAY_INVALID_(ZERO_FORMAT_FIELD, "format_version", 0);
  if (m->bucket_count == 0)
    return KVRELAY_INVALID_(ZERO_FORMAT_FIELD, "bucket_count", 0);
  if (m->fingerprint_bits == 0)
    return KVRELAY_INVALID_(ZERO_FORMAT_FIELD, "fingerprint_bits", 0);
  if (m->slots_per_bucket == 0)
    return KVRELAY_INVALID_(ZERO_FORMAT_FIELD, "slots_per_bucket", 0);
  if (m->format_version != CKF_FORMAT_VERSION)
    return KVRELAY_UNSUPPORTED_(UNSUPPORTED_CKF_FORMAT, "format_version", m->format_version);
  if (m->fingerprint_bits != CKF_FINGERPRINT_BITS)
    return KVRELAY_UNSUPPORTED_(UNSUPPORTED_CKF_FORMAT, "fingerprint_bits", m->fingerprint_bits);
  if (m->slots_per_bucket != CKF_SLOTS_PER_BUCKET)
    return KVRELAY_UNSUPPORTED_(UNSUPPORTED_CKF_FORMAT, "slots_per_bucket", m->slots_per_bucket);
  if (m->bucket_count > SIZE_MAX)
    return KVRELAY_UNSUPPORTED_(BUCKET_COUNT_OVERFLOW, "bucket_count", m->bucket_count);
  if (m->bucket_count > CKF_MAX_BUCKETS)
    return KVRELAY_UNSUPPORTED_(BUCKET_COUNT_TOO_LARGE, "bucket_count", m->bucket_count);
  if (m->bucket_count < 2 || (m->bucket_count & (m->bucket_count - 1)) != 0)
    return KVRELAY_INVALID_(UNSUPPORTED_BUCKET_COUNT, "bucket_count", m->bucket_count);
  return KVRELAY_FINE_;
}

KVRELAY_API kvrelay_verdict kvrelay_check_producer(const kvrelay_producer *m) {
  if (!m->pool_id.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "pool_id", 0);
  KVRELAY_REQUIRE_(kvrelay_check_pool_id(&m->pool_id));
  if (m->layout_generation == 0)
    return KVRELAY_INVALID_(ZERO_LAYOUT_GENERATION, "layout_generation", 0);
  if (!m->ckf_format.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "ckf_format", 0);
  return kvrelay_check_ckf_format(&m->ckf_format);
}

KVRELAY_API kvrelay_verdict kvrelay_check_endpoint(const kvrelay_endpoint *m) {
  if (!kvrelay_text_valid(m->namespace_))
    return KVRELAY_INVALID_(INVALID_TEXT, "namespace", 0);
  if (!kvrelay_text_valid(m->component))
    return KVRELAY_INVALID_(INVALID_TEXT, "component", 0);
  if (!kvrelay_text_valid(m->endpoint))
    return KVRELAY_INVALID_(INVALID_TEXT, "endpoint", 0);
  return KVRELAY_FINE_;
}

static kvrelay_verdict kvrelay_check_target_(const kvrelay_target *m) {
  if (!m->present)
    return KVRELAY_INVALID_(MISSING_FIELD, "target", 0);
  if (m->kind != KVRELAY_TARGET_BASE && m->kind != KVRELAY_TARGET_LORA)
    return KVRELAY_UNSUPPORTED_(UNSUPPORTED_MODEL_TARGET, "target", 0);
  if (!kvrelay_text_valid(m->base_model))
    return KVRELAY_INVALID_(INVALID_TEXT, "base_model", 0);
  if (m->kind == KVRELAY_TARGET_LORA && !kvrelay_text_valid(m->adapter))
    return KVRELAY_INVALID_(INVALID_TEXT, "adapter", 0);
  return KVRELAY_FINE_;
}

static int kvrelay_aliases_compare_(const void *list, size_t a, size_t b) {
  const kvrelay_text *const aliases = (const kvrelay_text *)list;
  return kvrelay_text_compare(aliases[a], aliases[b]);
}

KVRELAY_API kvrelay_verdict kvrelay_check_registration(const kvrelay_registration *m) {
  size_t valid = 0, repeat;
  if (!kvrelay_text_valid(m->canonical_model_id))
    return KVRELAY_INVALID_(INVALID_TEXT, "canonical_model_id", 0);
  KVRELAY_REQUIRE_(kvrelay_check_target_(&m->target));
  if (m->aliases_len > KVRELAY_ALIASES_MAX)
    return KVRELAY_UNSUPPORTED_(LIST_TOO_LONG, "aliases", m->aliases_len);
  while (valid < m->aliases_len && kvrelay_text_valid(m->aliases[valid]))
    valid++;
  repeat = kvrelay_first_repeat_(m->aliases, valid, kvrelay_aliases_compare_);
  if (repeat < valid)
    return KVRELAY_INVALID_(DUPLICATE_ALIAS, "aliases", repeat);
  if (valid < m->aliases_len)
    return KVRELAY_INVALID_(INVALID_TEXT, "aliases", valid);
  return KVRELAY_FINE_;
}

KVRELAY_API kvrelay_verdict kvrelay_check_semantics(const kvrelay_semantics *m) {
  if (m->kv_block_size == 0)
    return KVRELAY_INVALID_(ZERO_QUERY_BLOCK_SIZE, "kv_block_size", 0);
  if (m->hash_format == HASHFMT_FORMAT_UNSPECIFIED)
    return KVRELAY_INVALID_(QUERY_HASH_FORMAT, "hash_format", 0);
  if (m->hash_format != HASHFMT_FORMAT_STANDARD && m->hash_format != HASHFMT_FORMAT_EAGLE)
    return KVRELAY_UNSUPPORTED_(QUERY_HASH_FORMAT, "hash_format",
                                (uint64_t)(int64_t)m->hash_format);
  return KVRELAY_FINE_;
}

static kvrelay_verdict kvrelay_check_roles_(kvrelay_roles roles, const char *field) {
  uint32_t seen = 0;
  for (size_t i = 0; i < roles.len; i++) {
    int32_t role = roles.ptr[i];
    if (role == 0)
      return KVRELAY_INVALID_(WORKER_ROLE, field, 0);
    if (role < KVRELAY_ROLE_PREFILL || role > KVRELAY_ROLE_LEGACY)
      return KVRELAY_UNSUPPORTED_(WORKER_ROLE, field, (uint64_t)(int64_t)role);
    if ((seen >> role & 1) != 0)
      return KVRELAY_INVALID_(DUPLICATE_WORKER_ROLE, field, (uint64_t)role);
    seen |= (uint32_t)1 << role;
  }
  return KVRELAY_FINE_;
}

static kvrelay_verdict kvrelay_check_some_roles_(kvrelay_roles roles, const char *field) {
  if (roles.len == 0)
    return KVRELAY_INVALID_(MISSING_WORKER_ROLES, field, 0);
  return kvrelay_check_roles_(roles, field);
}

KVRELAY_API kvrelay_verdict kvrelay_check_descriptor(const kvrelay_descriptor *m) {
  if (!m->producer.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "producer", 0);
  KVRELAY_REQUIRE_(kvrelay_check_producer(&m->producer));
  if (!m->serving_endpoint.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "serving_endpoint", 0);
  KVRELAY_REQUIRE_(kvrelay_check_endpoint(&m->serving_endpoint));
  if (!m->query_semantics.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "query_semantics", 0);
  KVRELAY_REQUIRE_(kvrelay_check_semantics(&m->query_semantics));
  if (m->registrations_len > KVRELAY_PARTS_MAX)
    return KVRELAY_UNSUPPORTED_(LIST_TOO_LONG, "registrations", m->registrations_len);
  for (size_t i = 0; i < m->registrations_len; i++)
    KVRELAY_REQUIRE_(kvrelay_check_registration(&m->registrations[i]));
  return kvrelay_check_some_roles_(m->pool_roles, "pool_roles");
}

static kvrelay_verdict kvrelay_check_state_(int32_t state, const char *field) {
  if (state < KVRELAY_READY_UNKNOWN || state > KVRELAY_READY_READY)
    return KVRELAY_UNSUPPORTED_(READINESS_STATE, field, (uint64_t)(int64_t)state);
  return KVRELAY_FINE_;
}

static bool kvrelay_endpoint_equal_(const kvrelay_endpoint *a, const kvrelay_endpoint *b) {
  return kvrelay_text_equal(a->namespace_, b->namespace_) &&
         kvrelay_text_equal(a->component, b->component) &&
         kvrelay_text_equal(a->endpoint, b->endpoint);
}

static kvrelay_verdict kvrelay_check_member_(const kvrelay_topology_entry *m, size_t i) {
  const kvrelay_topology_member *const member = &m->members[i];
  if (!member->endpoint.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "members.endpoint", i);
  KVRELAY_REQUIRE_(kvrelay_check_endpoint(&member->endpoint));
  if (!kvrelay_text_equal(member->endpoint.namespace_, m->namespace_))
    return KVRELAY_INVALID_(TOPOLOGY_NAMESPACE_MISMATCH, "members.endpoint", i);
  KVRELAY_REQUIRE_(kvrelay_check_some_roles_(member->roles, "members.roles"));
  if (member->pool_id.present) {
    kvrelay_verdict link = kvrelay_check_pool_id(&member->pool_id);
    if (link.class_ != KVRELAY_CLASS_OK) {
      link.field = "members.pool_id";
      return link;
    }
  }
  return KVRELAY_FINE_;
}

/* Their namespace is the entry's. */
static int kvrelay_members_compare_(const void *list, size_t a, size_t b) {
  const kvrelay_topology_member *const members = (const kvrelay_topology_member *)list;
  const kvrelay_endpoint *const x = &members[a].endpoint, *const y = &members[b].endpoint;
  const int c = kvrelay_text_compare(x->component, y->component);
  return c != 0 ? c : kvrelay_text_compare(x->endpoint, y->endpoint);
}

static kvrelay_verdict kvrelay_check_members_(const kvrelay_topology_entry *m) {
  kvrelay_verdict v = KVRELAY_FINE_;
  size_t valid, repeat;
  if (m->members_len == 0)
    return KVRELAY_INVALID_(MISSING_TOPOLOGY_MEMBERS, "members", 0);
  if (m->members_len > KVRELAY_PARTS_MAX)
    return KVRELAY_UNSUPPORTED_(LIST_TOO_LONG, "members", m->members_len);
  for (valid = 0; valid < m->members_len; valid++) {
    v = kvrelay_check_member_(m, valid);
    if (v.class_ != KVRELAY_CLASS_OK)
      break;
  }
  repeat = kvrelay_first_repeat_(m->members, valid, kvrelay_members_compare_);
  return repeat < valid ? KVRELAY_INVALID_(DUPLICATE_TOPOLOGY_MEMBER, "members", repeat) : v;
}

static kvrelay_verdict kvrelay_check_adapter_(const kvrelay_adapter_readiness *a, size_t i) {
  if (!kvrelay_text_valid(a->canonical_model_id))
    return KVRELAY_INVALID_(INVALID_TEXT, "adapters.canonical_model_id", i);
  KVRELAY_REQUIRE_(kvrelay_check_state_(a->state, "adapters.state"));
  return kvrelay_check_roles_(a->missing_roles, "adapters.missing_roles");
}

static int kvrelay_adapters_compare_(const void *list, size_t a, size_t b) {
  const kvrelay_adapter_readiness *const adapters = (const kvrelay_adapter_readiness *)list;
  return kvrelay_text_compare(adapters[a].canonical_model_id, adapters[b].canonical_model_id);
}

static kvrelay_verdict kvrelay_check_adapters_(const kvrelay_topology_entry *m) {
  kvrelay_verdict v = KVRELAY_FINE_;
  size_t valid, repeat;
  if (m->adapters_len > KVRELAY_PARTS_MAX)
    return KVRELAY_UNSUPPORTED_(LIST_TOO_LONG, "adapters", m->adapters_len);
  for (valid = 0; valid < m->adapters_len; valid++) {
    v = kvrelay_check_adapter_(&m->adapters[valid], valid);
    if (v.class_ != KVRELAY_CLASS_OK)
      break;
  }
  repeat = kvrelay_first_repeat_(m->adapters, valid, kvrelay_adapters_compare_);
  return repeat < valid ? KVRELAY_INVALID_(DUPLICATE_ADAPTER, "adapters", repeat) : v;
}

KVRELAY_API kvrelay_verdict kvrelay_check_topology_entry(const kvrelay_topology_entry *m) {
  if (!kvrelay_text_valid(m->namespace_))
    return KVRELAY_INVALID_(INVALID_TEXT, "namespace", 0);
  if (!kvrelay_text_valid(m->canonical_model_id))
    return KVRELAY_INVALID_(INVALID_TEXT, "canonical_model_id", 0);
  KVRELAY_REQUIRE_(kvrelay_check_state_(m->state, "state"));
  KVRELAY_REQUIRE_(kvrelay_check_roles_(m->present_roles, "present_roles"));
  KVRELAY_REQUIRE_(kvrelay_check_roles_(m->missing_roles, "missing_roles"));
  KVRELAY_REQUIRE_(kvrelay_check_roles_(m->duplicate_role_endpoints, "duplicate_role_endpoints"));
  for (size_t i = 0; i < m->duplicate_role_endpoints.len; i++)
    if (m->duplicate_role_endpoints.ptr[i] > KVRELAY_ROLE_DECODE)
      return KVRELAY_INVALID_(UNSUPPORTED_DUPLICATE_ENDPOINT_ROLE, "duplicate_role_endpoints",
                              (uint64_t)m->duplicate_role_endpoints.ptr[i]);
  KVRELAY_REQUIRE_(kvrelay_check_members_(m));
  return kvrelay_check_adapters_(m);
}

/* ---- keys ---- */

static int kvrelay_u64_compare_(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static int kvrelay_digest_compare_(const kvrelay_digest *a, const kvrelay_digest *b) {
  int order = KVRELAY_MEMCMP(a->digest, b->digest, KVRELAY_DIGEST_LEN);
  return order != 0 ? order : (a->source > b->source) - (a->source < b->source);
}

KVRELAY_API int kvrelay_pool_id_compare(const kvrelay_pool_id *a, const kvrelay_pool_id *b) {
  int order = kvrelay_digest_compare_(&a->domain.cache_semantics, &b->domain.cache_semantics);
  if (order == 0)
    order = kvrelay_digest_compare_(&a->domain.routing_scope, &b->domain.routing_scope);
  if (order == 0)
    order = kvrelay_u64_compare_(a->dc_id, b->dc_id);
  return order;
}

KVRELAY_API bool kvrelay_pool_id_equal(const kvrelay_pool_id *a, const kvrelay_pool_id *b) {
  return a->identity_version == b->identity_version && kvrelay_pool_id_compare(a, b) == 0;
}

KVRELAY_API bool kvrelay_producer_equal(const kvrelay_producer *a, const kvrelay_producer *b) {
  return kvrelay_pool_id_equal(&a->pool_id, &b->pool_id) &&
         a->producer_incarnation == b->producer_incarnation &&
         a->layout_generation == b->layout_generation &&
         a->ckf_format.format_version == b->ckf_format.format_version &&
         a->ckf_format.seed == b->ckf_format.seed &&
         a->ckf_format.bucket_count == b->ckf_format.bucket_count &&
         a->ckf_format.fingerprint_bits == b->ckf_format.fingerprint_bits &&
         a->ckf_format.slots_per_bucket == b->ckf_format.slots_per_bucket;
}

static char *kvrelay_hex_(char *out, const uint8_t *bytes, size_t len) {
  static const char digits[] = "0123456789abcdef";
  for (size_t i = 0; i < len; i++) {
    *out++ = digits[bytes[i] >> 4];
    *out++ = digits[bytes[i] & 15];
  }
  return out;
}

KVRELAY_API void kvrelay_pool_id_format(const kvrelay_pool_id *id,
                                        char out[KVRELAY_POOL_NAME_CAP]) {
  uint8_t dc[8];
  char *end = kvrelay_hex_(out, id->domain.cache_semantics.digest, KVRELAY_DIGEST_LEN);
  *end++ = ':';
  end = kvrelay_hex_(end, id->domain.routing_scope.digest, KVRELAY_DIGEST_LEN);
  *end++ = '/';
  for (int i = 0; i < 8; i++)
    dc[i] = (uint8_t)(id->dc_id >> (56 - 8 * i));
  end = kvrelay_hex_(end, dc, 8);
  *end = 0;
}

/* ---- status texts: put together without stdio ---- */

/* Appends as much of `text` as fits. */
static void kvrelay_status_add_(kvrelay_status *s, const char *text) {
  size_t n = 0;
  while (s->text[n] != 0)
    n++;
  while (*text != 0 && n + 1 < sizeof s->text)
    s->text[n++] = *text++;
  s->text[n] = 0;
}

static void kvrelay_status_add_u64_(kvrelay_status *s, uint64_t value) {
  char digits[21];
  size_t at = sizeof digits;
  digits[--at] = 0;
  do
    digits[--at] = (char)('0' + value % 10);
  while ((value /= 10) != 0);
  kvrelay_status_add_(s, digits + at);
}

/* A status with the gRPC code of its reason. */
static void kvrelay_status_set_(kvrelay_status *s, int32_t reason, const char *text) {
  KVRELAY_MEMSET(s, 0, sizeof *s);
  s->reason = reason;
  s->grpc = reason == KVRELAY_REASON_NONE ? KVRELAY_GRPC_OK : kvrelay_reason_status(reason);
  kvrelay_status_add_(s, text);
}

/* ==== framing (impl) ==== */

enum { KVRELAY_FRAMER_GRPC_, KVRELAY_FRAMER_CLIENT_, KVRELAY_FRAMER_SERVER_ };

/* Where a frame may stand and what its body may be, by type. */
typedef struct kvrelay_frame_rule_ {
  bool client, server, stream, aux, pieces;
  uint16_t body_min, body_max; /* without `pieces` */
} kvrelay_frame_rule_;

static const kvrelay_frame_rule_ kvrelay_frame_rules_[] = {
    {false, false, false, false, false, 0, 0},
    {true, false, true, true, true, 0, 0},                          /* REQUEST */
    {false, true, true, false, false, 0, 0},                        /* RESPONSE */
    {false, true, true, false, true, 0, 0},                         /* MESSAGE */
    {false, true, true, true, false, 2, 2 + KVRELAY_RAW_TEXT_MAX},  /* END */
    {true, false, true, false, false, 0, 0},                        /* CANCEL */
    {true, false, true, false, false, 4, 4},                        /* CREDIT */
    {true, true, false, false, false, 8, 8},                        /* PING */
    {true, true, false, false, false, 8, 8},                        /* PONG */
    {true, true, false, true, false, 4, 4 + KVRELAY_RAW_TEXT_MAX}}; /* GOAWAY */

#define KVRELAY_FRAME_LATER_ 128 /* types from here on are skipped */

static uint32_t kvrelay_get_u32_(const uint8_t *p) {
  return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Straight, so that compilers make one store of it. */
static void kvrelay_put_word_(uint8_t *out, uint32_t v) {
  out[0] = (uint8_t)v;
  out[1] = (uint8_t)(v >> 8);
  out[2] = (uint8_t)(v >> 16);
  out[3] = (uint8_t)(v >> 24);
}

static uint8_t *kvrelay_put_le_(uint8_t *out, uint32_t v, size_t n) {
  for (; n > 0; n--, v >>= 8)
    *out++ = (uint8_t)v;
  return out;
}

static void kvrelay_framer_init_(kvrelay_framer *f, int32_t kind, uint32_t max_bytes) {
  KVRELAY_MEMSET(f, 0, sizeof *f);
  f->kind_ = kind;
  f->max_bytes_ = max_bytes;
}

void kvrelay_framer_init_grpc(kvrelay_framer *f, uint32_t max_bytes) {
  kvrelay_framer_init_(f, KVRELAY_FRAMER_GRPC_, max_bytes);
}

void kvrelay_framer_init_raw(kvrelay_framer *f, bool from_client, uint32_t max_bytes) {
  kvrelay_framer_init_(f, from_client ? KVRELAY_FRAMER_CLIENT_ : KVRELAY_FRAMER_SERVER_, max_bytes);
}

bool kvrelay_framer_empty(const kvrelay_framer *f) {
  return f->have_ == 0 && f->frame_.type == KVRELAY_FRAME_NONE;
}

static uint32_t kvrelay_framer_head_len_(const kvrelay_framer *f) {
  return f->kind_ == KVRELAY_FRAMER_GRPC_ ? KVRELAY_GRPC_PREFIX_LEN : KVRELAY_RAW_HEADER_LEN;
}

static bool kvrelay_frame_pieces_(int32_t type) {
  return type >= KVRELAY_FRAME_LATER_ || kvrelay_frame_rules_[type].pieces;
}

/* What a header says, against the rules for its type. */
static int kvrelay_framer_check_(const kvrelay_framer *f, const kvrelay_frame *h, uint8_t flags) {
  const kvrelay_frame_rule_ *rule;
  if (h->type < KVRELAY_FRAME_LATER_) {
    if (flags != 0 || h->type > KVRELAY_FRAME_GOAWAY)
      return KVRELAY_ERR_MALFORMED;
    rule = &kvrelay_frame_rules_[h->type];
    if (!(f->kind_ == KVRELAY_FRAMER_CLIENT_ ? rule->client : rule->server) ||
        rule->stream != (h->stream != 0) || (!rule->aux && h->aux != 0) ||
        (h->type == KVRELAY_FRAME_END && h->aux > KVRELAY_GRPC_UNAUTHENTICATED))
      return KVRELAY_ERR_MALFORMED;
    if (!rule->pieces)
      return h->body_len < rule->body_min || h->body_len > rule->body_max ? KVRELAY_ERR_MALFORMED
                                                                          : KVRELAY_OK;
  }
  return h->body_len > f->max_bytes_ ? KVRELAY_ERR_LIMIT : KVRELAY_OK;
}

/* Takes a whole header. */
static int kvrelay_framer_head_(const kvrelay_framer *f, const uint8_t *p, kvrelay_frame *h) {
  h->offset = h->piece_len = 0;
  h->piece = NULL;
  if (f->kind_ == KVRELAY_FRAMER_GRPC_) {
    h->type = KVRELAY_FRAME_MESSAGE;
    h->aux = 0;
    h->stream = 0;
    h->body_len = (uint32_t)p[1] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 8 | p[4];
    if (p[0] != 0)
      return p[0] == 1 ? KVRELAY_ERR_UNSUPPORTED : KVRELAY_ERR_MALFORMED;
    return h->body_len > f->max_bytes_ ? KVRELAY_ERR_LIMIT : KVRELAY_OK;
  }
  h->body_len = kvrelay_get_u32_(p);
  h->stream = kvrelay_get_u32_(p + 4);
  h->type = p[8];
  h->aux = (uint16_t)(p[10] | p[11] << 8);
  return kvrelay_framer_check_(f, h, p[9]);
}

/* Between frames: takes a header.  Returns the bytes used of these; `h->type` tells whether it is
 * whole now. */
static size_t kvrelay_framer_begin_(kvrelay_framer *f, const uint8_t *bytes, size_t len) {
  const uint32_t head_len = kvrelay_framer_head_len_(f);
  size_t used = 0;
  while (f->have_ < head_len && used < len)
    f->head_[f->have_++] = bytes[used++];
  if (f->have_ == head_len) {
    f->error_ = kvrelay_framer_head_(f, f->head_, &f->frame_);
    f->left_ = f->frame_.body_len;
    f->have_ = 0;
  }
  return used;
}

/* The usual case: a whole frame lies there, and the framer is between frames.  0 = it is not so. */
static size_t kvrelay_framer_whole_(const kvrelay_framer *f, const uint8_t *bytes, size_t len,
                                    kvrelay_frame *frame) {
  const uint32_t head_len = kvrelay_framer_head_len_(f);
  if (!kvrelay_framer_empty(f) || len < head_len ||
      kvrelay_framer_head_(f, bytes, frame) != KVRELAY_OK || frame->body_len > len - head_len ||
      frame->type >= KVRELAY_FRAME_LATER_)
    return 0;
  frame->piece = bytes + head_len;
  frame->piece_len = frame->body_len;
  return head_len + (size_t)frame->body_len;
}

ptrdiff_t kvrelay_framer_feed(kvrelay_framer *f, const uint8_t *bytes, size_t len,
                              kvrelay_frame *frame) {
  size_t used = f->error_ == KVRELAY_OK ? kvrelay_framer_whole_(f, bytes, len, frame) : 0;
  if (used > 0)
    return (ptrdiff_t)used;
  frame->type = KVRELAY_FRAME_NONE;
  while (f->error_ == KVRELAY_OK) {
    kvrelay_frame *const h = &f->frame_;
    bool pieces;
    uint32_t n;
    if (h->type == KVRELAY_FRAME_NONE) {
      used += kvrelay_framer_begin_(f, bytes + used, len - used);
      if (h->type == KVRELAY_FRAME_NONE && f->error_ == KVRELAY_OK)
        return (ptrdiff_t)used;
      continue;
    }
    n = len - used < f->left_ ? (uint32_t)(len - used) : f->left_;
    if (n == 0 && f->left_ > 0)
      return (ptrdiff_t)used;
    pieces = kvrelay_frame_pieces_(h->type);
    h->piece = n > 0 ? bytes + used : f->small_;
    h->piece_len = n;
    used += n;
    f->left_ -= n;
    if (!pieces && n < h->body_len) {
      KVRELAY_MEMCPY(f->small_ + f->have_, h->piece, n);
      f->have_ += n;
      h->piece = f->small_;
      h->piece_len = h->body_len;
    }
    if (h->type < KVRELAY_FRAME_LATER_ && (f->left_ == 0 || pieces))
      *frame = *h;
    h->offset += pieces ? n : 0;
    if (f->left_ == 0) {
      h->type = KVRELAY_FRAME_NONE;
      f->have_ = 0;
    }
    if (frame->type != KVRELAY_FRAME_NONE)
      return (ptrdiff_t)used;
  }
  return f->error_;
}

uint32_t kvrelay_frame_u32(const kvrelay_frame *f) { return kvrelay_get_u32_(f->piece); }

void kvrelay_frame_status(const kvrelay_frame *f, kvrelay_status *status) {
  size_t n = f->piece_len - 2;
  KVRELAY_MEMSET(status, 0, sizeof *status);
  status->grpc = f->aux;
  status->reason = f->piece[0] | f->piece[1] << 8;
  if (!kvrelay_utf8_valid(f->piece + 2, n))
    return;
  if (n > sizeof status->text - 1)
    for (n = sizeof status->text - 1; (f->piece[2 + n] & 0xC0) == 0x80;) /* a whole character */
      n--;
  KVRELAY_MEMCPY(status->text, f->piece + 2, n);
}

void kvrelay_grpc_prefix_put(uint8_t out[KVRELAY_GRPC_PREFIX_LEN], uint32_t len) {
  out[0] = 0;
  out[1] = (uint8_t)(len >> 24);
  out[2] = (uint8_t)(len >> 16);
  out[3] = (uint8_t)(len >> 8);
  out[4] = (uint8_t)len;
}

void kvrelay_raw_header_put(uint8_t out[KVRELAY_RAW_HEADER_LEN], int32_t type, uint32_t stream,
                            uint16_t aux, uint32_t body_len) {
  kvrelay_put_word_(out, body_len);
  kvrelay_put_word_(out + 4, stream);
  kvrelay_put_word_(out + 8, (uint32_t)type | (uint32_t)aux << 16); /* and no flags */
}

/* A body of `fixed_len` bytes of a number and a text. */
static size_t kvrelay_raw_small_put_(uint8_t *out, int32_t type, uint32_t stream, uint16_t aux,
                                     uint32_t number, uint32_t fixed_len, const char *text) {
  uint32_t n = 0;
  while (n < KVRELAY_STATUS_TEXT_CAP - 1 && text[n] != 0)
    n++;
  kvrelay_raw_header_put(out, type, stream, aux, fixed_len + n);
  out = kvrelay_put_le_(out + KVRELAY_RAW_HEADER_LEN, number, fixed_len);
  KVRELAY_MEMCPY(out, text, n);
  return KVRELAY_RAW_HEADER_LEN + fixed_len + n;
}

size_t kvrelay_raw_end_put(uint8_t out[KVRELAY_RAW_SMALL_CAP], uint32_t stream,
                           const kvrelay_status *status) {
  return kvrelay_raw_small_put_(out, KVRELAY_FRAME_END, stream, (uint16_t)status->grpc,
                                (uint32_t)status->reason, 2, status->text);
}

size_t kvrelay_raw_goaway_put(uint8_t out[KVRELAY_RAW_SMALL_CAP], int32_t code,
                              uint32_t last_stream, const char *text) {
  return kvrelay_raw_small_put_(out, KVRELAY_FRAME_GOAWAY, 0, (uint16_t)code, last_stream, 4, text);
}

size_t kvrelay_raw_credit_put(uint8_t out[KVRELAY_RAW_SMALL_CAP], uint32_t stream, uint32_t bytes) {
  return kvrelay_raw_small_put_(out, KVRELAY_FRAME_CREDIT, stream, 0, bytes, 4, "");
}

static const uint8_t kvrelay_raw_magic_[4] = {0x4B, 0x56, 0x52, 0x46}; /* "KVRF" */

void kvrelay_raw_preface_put(uint8_t out[KVRELAY_RAW_PREFACE_LEN],
                             const kvrelay_raw_preface *preface) {
  KVRELAY_MEMCPY(out, kvrelay_raw_magic_, 4);
  out[4] = preface->version;
  out[5] = preface->lowest;
  kvrelay_put_le_(out + 6, preface->max_streams, 2);
  kvrelay_put_le_(out + 8, preface->max_frame, 4);
  kvrelay_put_le_(out + 12, preface->initial_credit, 4);
}

int kvrelay_raw_preface_get(const uint8_t *bytes, size_t len, bool from_client,
                            kvrelay_raw_preface *out) {
  const uint32_t most = INT32_MAX;
  if (len > 0 && KVRELAY_MEMCMP(bytes, kvrelay_raw_magic_, len < 4 ? len : 4) != 0)
    return KVRELAY_ERR_MALFORMED;
  if (len < KVRELAY_RAW_PREFACE_LEN)
    return KVRELAY_ERR_TRUNCATED;
  out->version = bytes[4];
  out->lowest = bytes[5];
  out->max_streams = (uint16_t)(bytes[6] | bytes[7] << 8);
  out->max_frame = kvrelay_get_u32_(bytes + 8);
  out->initial_credit = kvrelay_get_u32_(bytes + 12);
  if (out->version == 0 || out->lowest > KVRELAY_RAW_VERSION ||
      (!from_client && out->version != KVRELAY_RAW_VERSION))
    return KVRELAY_ERR_UNSUPPORTED;
  if (out->lowest > out->version || out->lowest == 0 || out->max_frame > most ||
      out->max_frame < (from_client ? KVRELAY_RAW_MESSAGE_MIN : KVRELAY_RAW_FRAME_MIN))
    return KVRELAY_ERR_LIMIT;
  if (from_client && (out->initial_credit == 0 || out->initial_credit > most))
    return KVRELAY_ERR_LIMIT;
  return KVRELAY_OK;
}

/* ==== relay (impl) ==== */
/*
 * One thread, so the producer's own words are the mirror: a cut copies them into a snapshot slot,
 * already encoded.  Deltas are encoded once into a ring of the pool; a subscriber is nothing but a
 * cursor into it, so publishing costs the same for one and for a thousand.  The ring keeps what one
 * subscriber may have waiting; a cursor that it has overtaken is a subscriber that lags.
 */

#define KVRELAY_NIL_ UINT32_MAX
#define KVRELAY_MS_ 1000000u /* in nanoseconds */
/* what a queued frame counts beside its payload */
#define KVRELAY_FRAME_COST_ 256

enum {
  KVRELAY_PHASE_FREE_ = 0,
  KVRELAY_PHASE_ANSWER_, /* info */
  KVRELAY_PHASE_CATALOG_,
  KVRELAY_PHASE_READINESS_,
  KVRELAY_PHASE_LOAD_,
  KVRELAY_PHASE_WAIT_, /* for a snapshot permit */
  KVRELAY_PHASE_SNAPSHOT_,
  KVRELAY_PHASE_LIVE_,
  KVRELAY_PHASE_ENDED_ /* pull says END until the call is closed */
};

KVRELAY_API kvrelay_relay_config kvrelay_relay_config_default(void) {
  kvrelay_relay_config c;
  KVRELAY_MEMSET(&c, 0, sizeof c);
  c.max_pools = 65536;
  c.max_info_calls = 1024;
  c.max_catalog_subscribers = 64;
  c.max_readiness_subscribers = 64;
  c.max_load_subscribers = 64;
  c.max_members = 65536;
  c.max_pool_streams = 64;
  c.max_subscribers_per_pool = 64;
  c.max_hubs = 64;
  c.queue_frames = 16;
  c.queue_bytes = 16777216;
  c.encoding_concurrency = 2;
  c.max_bucket_count = 524288;
  c.chunk_buckets = 262144;
  c.publication_threshold = 16;
  c.publication_delay_ns = 1000000;
  c.heartbeat_ns = 10000000000u;
  c.snapshot_progress_ns = 60000000000u;
  c.readiness_heartbeat_ns = 10000000000u;
  c.load_window_ns = 1000000000u;
  c.load_windows = 16;
  return c;
}

/* Hands out aligned pieces of a block; with base NULL it only counts. */
typedef struct kvrelay_bump_ {
  uint8_t *base;
  size_t used;
  bool overflow;
} kvrelay_bump_;

static void *kvrelay_bump_take_(kvrelay_bump_ *b, size_t count, size_t size) {
  size_t at = (b->used + 15) & ~(size_t)15;
  if (count != 0 && size > (SIZE_MAX / 2 - at) / count) {
    b->overflow = true;
    return NULL;
  }
  b->used = at + count * size;
  return b->base == NULL ? NULL : b->base + at;
}

/* The block may start anywhere; sizes include the room to align it. */
static uint8_t *kvrelay_align_(void *mem) {
  return (uint8_t *)mem + ((16 - ((uintptr_t)mem & 15)) & 15);
}

static uint64_t kvrelay_relay_streams_(const kvrelay_relay_config *c) {
  return (uint64_t)c->max_info_calls + c->max_catalog_subscribers + c->max_pool_streams +
         c->max_readiness_subscribers + c->max_load_subscribers;
}

static bool kvrelay_relay_config_valid_(const kvrelay_relay_config *c) {
  return c->max_pools >= 1 && c->max_pools <= 65536 && c->max_info_calls >= 1 &&
         c->max_catalog_subscribers >= 1 && c->max_readiness_subscribers >= 1 &&
         c->max_load_subscribers >= 1 && c->max_members <= 65536 &&
         c->readiness_heartbeat_ns >= 1 && c->load_window_ns >= KVRELAY_MS_ &&
         c->load_window_ns % KVRELAY_MS_ == 0 && c->load_windows >= 1 && c->load_windows <= 65536 &&
         c->max_pool_streams >= 1 && c->max_subscribers_per_pool >= 1 && c->max_hubs >= 1 &&
         c->queue_frames >= 1 && c->queue_bytes >= 4194624 && c->encoding_concurrency >= 1 &&
         c->max_bucket_count >= 2 && c->max_bucket_count <= CKF_MAX_BUCKETS &&
         (c->max_bucket_count & (c->max_bucket_count - 1)) == 0 && c->chunk_buckets >= 64 &&
         c->chunk_buckets <= 524288 && c->publication_threshold >= 1 &&
         c->publication_delay_ns >= 1 && c->heartbeat_ns >= 1 && c->snapshot_progress_ns >= 1 &&
         kvrelay_relay_streams_(c) < KVRELAY_NIL_;
}

/* The first power of two that is not below a number of at most 2^31. */
static uint32_t kvrelay_power_(uint32_t least) {
  uint32_t n = 1;
  while (n < least)
    n *= 2;
  return n;
}

/* Buckets of a chunk for somebody who takes so many bytes in a message, 0 for any number: a chunk
 * is 8 for each bucket and at most 234 besides. */
static uint32_t kvrelay_chunk_for_(const kvrelay_relay_config *c, size_t max_message_bytes) {
  uint32_t n = 4096;
  if (max_message_bytes == 0 || c->chunk_buckets <= n)
    return c->chunk_buckets;
  while (n < c->chunk_buckets && 8 * (size_t)n * 2 + 234 <= max_message_bytes)
    n *= 2;
  return n < c->chunk_buckets ? n : c->chunk_buckets;
}

/* Places everything in `mem`, or only counts it; 0 = impossible. */
static size_t kvrelay_relay_place_(kvrelay_relay *r, const kvrelay_relay_config *c, uint8_t *mem) {
  kvrelay_bump_ b = {mem, 0, false};
  size_t images =
      c->max_bucket_count < CKF_CBI1_MAX_IMAGES ? (size_t)c->max_bucket_count : CKF_CBI1_MAX_IMAGES;
  uint32_t streams = (uint32_t)kvrelay_relay_streams_(c);
  ckf_format largest = {0, c->max_bucket_count};
  size_t slot_bytes = 8 * (size_t)c->max_bucket_count +
                      CKF_CBI1_SNAPSHOT_PREFIX_BYTES *
                          (size_t)ckf_cbi1_chunk_count(&largest, kvrelay_chunk_for_(c, 1));
  r->pools_ = (kvrelay_pool **)kvrelay_bump_take_(&b, c->max_pools, sizeof *r->pools_);
  r->endpoints_ =
      (kvrelay_pool **)kvrelay_bump_take_(&b, kvrelay_power_(c->max_pools), sizeof *r->endpoints_);
  r->view_ = (kvrelay_descriptor *)kvrelay_bump_take_(&b, c->max_pools, sizeof *r->view_);
  r->streams_ = (kvrelay_call_ *)kvrelay_bump_take_(&b, streams, sizeof *r->streams_);
  r->entries_ =
      (kvrelay_topology_entry *)kvrelay_bump_take_(&b, c->max_members, sizeof *r->entries_);
  r->members_ =
      (kvrelay_topology_member *)kvrelay_bump_take_(&b, c->max_members, sizeof *r->members_);
  r->load_view_ = (kvrelay_load_entry *)kvrelay_bump_take_(&b, c->max_pools, sizeof *r->load_view_);
  r->windows_ = (kvrelay_window_ *)kvrelay_bump_take_(&b, kvrelay_power_(c->load_windows),
                                                      sizeof *r->windows_);
  r->slots_ = (kvrelay_cut_ *)kvrelay_bump_take_(&b, c->encoding_concurrency, sizeof *r->slots_);
  for (uint32_t i = 0; i < c->encoding_concurrency && !b.overflow; i++) {
    uint8_t *bytes = (uint8_t *)kvrelay_bump_take_(&b, slot_bytes, 1);
    if (mem != NULL) {
      r->slots_[i].bytes_ = bytes;
      r->slots_[i].used_ = false;
    }
  }
  r->frame_bytes_ = ckf_cbi1_delta_size(images);
  r->ring_bytes_ = c->queue_frames < c->queue_bytes / r->frame_bytes_
                       ? c->queue_frames * r->frame_bytes_
                       : c->queue_bytes;
  r->streams_len_ = streams;
  return b.overflow ? 0 : b.used + 16;
}

KVRELAY_API size_t kvrelay_relay_mem_size(const kvrelay_relay_config *cfg) {
  kvrelay_relay scratch;
  return kvrelay_relay_config_valid_(cfg) ? kvrelay_relay_place_(&scratch, cfg, NULL) : 0;
}

static uint64_t kvrelay_after_(uint64_t since_ns, uint64_t wait_ns) {
  return since_ns > UINT64_MAX - wait_ns ? UINT64_MAX : since_ns + wait_ns;
}

static void kvrelay_topology_build_(kvrelay_relay *r, uint8_t digest[32]);
static int kvrelay_path_compare_(const kvrelay_endpoint *a, const kvrelay_endpoint *b);

KVRELAY_API int kvrelay_relay_init_abi(kvrelay_relay *relay, size_t relay_size,
                                       const kvrelay_relay_config *cfg, void *mem, size_t mem_len,
                                       uint64_t now_ns) {
  if (relay_size != sizeof *relay)
    return KVRELAY_ERR_ABI;
  size_t need = kvrelay_relay_mem_size(cfg);
  if (need == 0 || mem == NULL)
    return KVRELAY_ERR_ARG;
  if (mem_len < need)
    return KVRELAY_ERR_NOSPACE;
  KVRELAY_MEMSET(relay, 0, sizeof *relay);
  relay->cfg_ = *cfg;
  (void)kvrelay_relay_place_(relay, cfg, kvrelay_align_(mem));
  for (uint32_t i = 0; i < kvrelay_power_(cfg->max_pools); i++)
    relay->endpoints_[i] = NULL;
  KVRELAY_MEMSET(relay->streams_, 0, relay->streams_len_ * sizeof *relay->streams_);
  for (uint32_t i = 0; i < relay->streams_len_; i++)
    relay->streams_[i].next_ = i + 1 < relay->streams_len_ ? i + 1 : KVRELAY_NIL_;
  for (int i = 0; i < KVRELAY_LISTS_; i++)
    relay->lists_[i].head_ = relay->lists_[i].tail_ = KVRELAY_NIL_;
  relay->ready_head_ = relay->ready_tail_ = KVRELAY_NIL_;
  relay->generation_ = 1;
  relay->topology_revision_ = 1;
  kvrelay_topology_build_(relay, relay->topology_digest_);
  relay->cfg_.load_windows = kvrelay_power_(cfg->load_windows);
  relay->windows_[0].closed_ns_ = now_ns;
  relay->windows_[0].observed_ms_ = 0;
  relay->window_due_ns_ = kvrelay_after_(now_ns, cfg->load_window_ns);
  return KVRELAY_OK;
}

/* ---- lists of streams ---- */

static uint32_t kvrelay_call_index_(const kvrelay_relay *r, const kvrelay_call_ *s) {
  return (uint32_t)(s - r->streams_);
}

static void kvrelay_list_leave_(kvrelay_relay *r, kvrelay_call_ *s) {
  kvrelay_list_ *list = &r->lists_[s->list_];
  if (s->list_ == KVRELAY_LIST_NONE_)
    return;
  if (s->prev_ != KVRELAY_NIL_)
    r->streams_[s->prev_].next_ = s->next_;
  else
    list->head_ = s->next_;
  if (s->next_ != KVRELAY_NIL_)
    r->streams_[s->next_].prev_ = s->prev_;
  else
    list->tail_ = s->prev_;
  list->len_--;
  s->list_ = KVRELAY_LIST_NONE_;
}

/* Moves a stream to the end of a list; lists with one time limit are therefore ordered by their
 * deadline. */
static void kvrelay_list_join_(kvrelay_relay *r, kvrelay_call_ *s, uint8_t which) {
  kvrelay_list_ *list = &r->lists_[which];
  uint32_t i = kvrelay_call_index_(r, s);
  kvrelay_list_leave_(r, s);
  s->list_ = which;
  s->prev_ = list->tail_;
  s->next_ = KVRELAY_NIL_;
  if (list->tail_ != KVRELAY_NIL_)
    r->streams_[list->tail_].next_ = i;
  else
    list->head_ = i;
  list->tail_ = i;
  list->len_++;
}

static void kvrelay_ready_leave_(kvrelay_relay *r, kvrelay_call_ *s) {
  if (!s->queued_)
    return;
  if (s->ready_prev_ != KVRELAY_NIL_)
    r->streams_[s->ready_prev_].ready_next_ = s->ready_next_;
  else
    r->ready_head_ = s->ready_next_;
  if (s->ready_next_ != KVRELAY_NIL_)
    r->streams_[s->ready_next_].ready_prev_ = s->ready_prev_;
  else
    r->ready_tail_ = s->ready_prev_;
  s->queued_ = false;
}

/* The call has become worth pulling: named once after each NONE. */
static void kvrelay_wake_(kvrelay_relay *r, kvrelay_call_ *s) {
  uint32_t i = kvrelay_call_index_(r, s);
  if (!s->waiting_)
    return;
  s->waiting_ = false;
  if (s->queued_)
    return;
  s->queued_ = true;
  s->ready_prev_ = r->ready_tail_;
  s->ready_next_ = KVRELAY_NIL_;
  if (r->ready_tail_ != KVRELAY_NIL_)
    r->streams_[r->ready_tail_].ready_next_ = i;
  else
    r->ready_head_ = i;
  r->ready_tail_ = i;
}

/* ---- subscribers of a pool ---- */

static void kvrelay_pool_attach_(kvrelay_relay *r, kvrelay_pool *p, kvrelay_call_ *s) {
  s->pool_prev_ = KVRELAY_NIL_;
  s->pool_next_ = p->first_stream_;
  if (p->first_stream_ != KVRELAY_NIL_)
    r->streams_[p->first_stream_].pool_prev_ = kvrelay_call_index_(r, s);
  p->first_stream_ = kvrelay_call_index_(r, s);
  s->pool_ = p;
}

static void kvrelay_pool_detach_(kvrelay_relay *r, kvrelay_call_ *s) {
  kvrelay_pool *p = s->pool_;
  if (p == NULL)
    return;
  if (s->pool_prev_ != KVRELAY_NIL_)
    r->streams_[s->pool_prev_].pool_next_ = s->pool_next_;
  else
    p->first_stream_ = s->pool_next_;
  if (s->pool_next_ != KVRELAY_NIL_)
    r->streams_[s->pool_next_].pool_prev_ = s->pool_prev_;
  s->pool_ = NULL;
}

/* Gives the slot of a snapshot back, if there is one. */
static void kvrelay_cut_release_(kvrelay_relay *r, kvrelay_call_ *s) {
  if (s->phase_ != KVRELAY_PHASE_SNAPSHOT_ && !s->lent_)
    return;
  s->lent_ = false;
  r->slots_[s->slot_].used_ = false;
  r->slots_used_--;
}

/* Takes the stream out of everything but its own slot in the table, its permit, and its snapshot.
 */
static void kvrelay_call_leave_(kvrelay_relay *r, kvrelay_call_ *s) {
  kvrelay_list_leave_(r, s);
  if (s->pool_ != NULL) {
    if (s->phase_ == KVRELAY_PHASE_WAIT_)
      s->pool_->waiting_--;
    else if (--s->pool_->subscribers_ == 0)
      r->busy_hubs_--;
  }
  kvrelay_pool_detach_(r, s);
}

/* Ends a call from our side; its permit stays until the transport closes it.  reason NONE = OK. */
static void kvrelay_call_end_(kvrelay_relay *r, kvrelay_call_ *s, int32_t reason, const char *text,
                              uint64_t number) {
  if (s->phase_ == KVRELAY_PHASE_WAIT_)
    r->stats_.refused[reason]++;
  if (s->pool_ != NULL && reason != KVRELAY_REASON_NONE)
    kvrelay_pool_id_format(&s->pool_->descriptor_.producer.pool_id, s->end_pool_);
  kvrelay_call_leave_(r, s);
  if (s->phase_ == KVRELAY_PHASE_SNAPSHOT_ && s->holds_ && s->chunk_ > 0) {
    s->lent_ = true;
    s->waiting_ =
        true; /* has to be told, or the slot would stay as long as its reader stands still */
  } else {
    kvrelay_cut_release_(r, s);
  }
  s->phase_ = KVRELAY_PHASE_ENDED_;
  s->end_reason_ = reason;
  s->end_text_ = text;
  s->end_number_ = number;
  kvrelay_wake_(r, s);
}

static void kvrelay_pool_end_streams_(kvrelay_relay *r, kvrelay_pool *p, int32_t reason,
                                      const char *text) {
  while (p->first_stream_ != KVRELAY_NIL_)
    kvrelay_call_end_(r, &r->streams_[p->first_stream_], reason, text, 0);
}

/* ---- catalog ---- */

static void kvrelay_list_wake_(kvrelay_relay *r, int list) {
  for (uint32_t i = r->lists_[list].head_; i != KVRELAY_NIL_; i = r->streams_[i].next_)
    kvrelay_wake_(r, &r->streams_[i]);
}

static void kvrelay_topology_changed_(kvrelay_relay *r) {
  r->topology_dirty_ = true;
  kvrelay_list_wake_(r, KVRELAY_LIST_READINESS_);
}

static void kvrelay_catalog_changed_(kvrelay_relay *r) {
  r->revision_++;
  kvrelay_list_wake_(r, KVRELAY_LIST_CATALOG_);
  kvrelay_topology_changed_(r); /* links follow the catalog */
}

/* Index of the pool with this id, or where it would stand. */
static uint32_t kvrelay_pool_search_(const kvrelay_relay *r, const kvrelay_pool_id *id,
                                     bool *found) {
  uint32_t low = 0, high = r->pools_len_;
  *found = false;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    int order = kvrelay_pool_id_compare(&r->pools_[middle]->descriptor_.producer.pool_id, id);
    if (order == 0) {
      *found = true;
      return middle;
    }
    if (order < 0)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* The link to the pool with this endpoint; there is none when it is NULL, and one may go there. The
 * hash differs from relay to relay, and no chain is longer than max_pools. */
static kvrelay_pool **kvrelay_endpoint_link_(const kvrelay_relay *r, const kvrelay_endpoint *e) {
  uint64_t hash = r->cfg_.identity.relay_incarnation;
  hash = hashfmt_hash64(e->namespace_.ptr, e->namespace_.len, hash);
  hash = hashfmt_hash64(e->component.ptr, e->component.len, hash);
  hash = hashfmt_hash64(e->endpoint.ptr, e->endpoint.len, hash);
  kvrelay_pool **link = &r->endpoints_[hash & (kvrelay_power_(r->cfg_.max_pools) - 1)];
  while (*link != NULL && !kvrelay_endpoint_equal_(&(*link)->descriptor_.serving_endpoint, e))
    link = &(*link)->endpoint_next_;
  return link;
}

static bool kvrelay_target_same_(const kvrelay_target *a, const kvrelay_target *b) {
  return a->present == b->present && a->kind == b->kind &&
         kvrelay_text_equal(a->base_model, b->base_model) &&
         kvrelay_text_equal(a->adapter, b->adapter);
}

static bool kvrelay_registration_same_(const kvrelay_registration *a,
                                       const kvrelay_registration *b) {
  size_t i;
  if (!kvrelay_text_equal(a->canonical_model_id, b->canonical_model_id) ||
      !kvrelay_target_same_(&a->target, &b->target) || a->aliases_len != b->aliases_len)
    return false;
  for (i = 0; i < a->aliases_len; i++)
    if (!kvrelay_text_equal(a->aliases[i], b->aliases[i]))
      return false;
  return true;
}

static bool kvrelay_roles_same_(kvrelay_roles a, kvrelay_roles b) {
  if (a.len != b.len)
    return false;
  for (size_t i = 0; i < a.len; i++)
    if (a.ptr[i] != b.ptr[i])
      return false;
  return true;
}

/* In order as well. */
static bool kvrelay_names_same_(const kvrelay_descriptor *a, const kvrelay_descriptor *b) {
  if (a->registrations_len != b->registrations_len)
    return false;
  for (size_t i = 0; i < a->registrations_len; i++)
    if (!kvrelay_registration_same_(&a->registrations[i], &b->registrations[i]))
      return false;
  return true;
}

/* Whether both speak of the same blocks at the same place. */
static bool kvrelay_place_same_(const kvrelay_descriptor *a, const kvrelay_descriptor *b) {
  return a->serving_endpoint.present == b->serving_endpoint.present &&
         kvrelay_endpoint_equal_(&a->serving_endpoint, &b->serving_endpoint) &&
         a->query_semantics.present == b->query_semantics.present &&
         a->query_semantics.kv_block_size == b->query_semantics.kv_block_size &&
         a->query_semantics.hash_format == b->query_semantics.hash_format;
}

/* Control characters are legal on the wire, but a relay publishes no such names, and
 * none that readers refuse for its length. */
static bool kvrelay_name_valid_(kvrelay_text t) {
  uint32_t code;
  if (t.len > KVRELAY_TEXT_MAX || !kvrelay_text_valid(t))
    return false;
  for (size_t i = 0, n; i < t.len; i += n) {
    n = kvrelay_utf8_next(t.ptr + i, t.len - i, &code);
    if (n == 0 || code < 0x20 || (code >= 0x7F && code <= 0x9F))
      return false;
  }
  return true;
}

static bool kvrelay_endpoint_fit_(const kvrelay_endpoint *e) {
  return kvrelay_name_valid_(e->namespace_) && kvrelay_name_valid_(e->component) &&
         kvrelay_name_valid_(e->endpoint);
}

/* What a producer may put into a descriptor, but for repeated names; its producer
 * numbers are set later. */
static bool kvrelay_descriptor_fit_(const kvrelay_descriptor *d) {
  if (kvrelay_check_pool_id(&d->producer.pool_id).class_ != KVRELAY_CLASS_OK ||
      kvrelay_check_semantics(&d->query_semantics).class_ != KVRELAY_CLASS_OK ||
      kvrelay_check_some_roles_(d->pool_roles, "").class_ != KVRELAY_CLASS_OK ||
      d->registrations_len == 0 || d->registrations_len > KVRELAY_PARTS_MAX ||
      !kvrelay_endpoint_fit_(&d->serving_endpoint))
    return false;
  for (size_t i = 0; i < d->registrations_len; i++) {
    const kvrelay_registration *r = &d->registrations[i];
    if (kvrelay_check_registration(r).class_ != KVRELAY_CLASS_OK ||
        !kvrelay_name_valid_(r->canonical_model_id) || !kvrelay_name_valid_(r->target.base_model) ||
        (r->target.kind == KVRELAY_TARGET_LORA && !kvrelay_name_valid_(r->target.adapter)))
      return false;
    for (size_t k = 0; k < r->aliases_len; k++)
      if (!kvrelay_name_valid_(r->aliases[k]))
        return false;
  }
  return true;
}

static bool kvrelay_text_before_(const void *context, const void *a, const void *b) {
  (void)context;
  return kvrelay_text_compare(*(const kvrelay_text *)a, *(const kvrelay_text *)b) < 0;
}

/* Whether an id or alias stands twice in a descriptor; `names` has room for all of them. */
static bool kvrelay_descriptor_repeats_(const kvrelay_descriptor *d, kvrelay_text *names) {
  size_t len = 0;
  for (size_t i = 0; i < d->registrations_len; i++) {
    names[len++] = d->registrations[i].canonical_model_id;
    for (size_t k = 0; k < d->registrations[i].aliases_len; k++)
      names[len++] = d->registrations[i].aliases[k];
  }
  kvrelay_sort_(names, len, sizeof *names, kvrelay_text_before_, NULL);
  for (size_t i = 1; i < len; i++)
    if (kvrelay_text_equal(names[i - 1], names[i]))
      return true;
  return false;
}

static kvrelay_text kvrelay_copy_text_(kvrelay_bump_ *b, kvrelay_text t) {
  uint8_t *to = (uint8_t *)kvrelay_bump_take_(b, t.len, 1);
  if (to != NULL && t.len != 0)
    KVRELAY_MEMCPY(to, t.ptr, t.len);
  t.ptr = to;
  return t;
}

static kvrelay_roles kvrelay_copy_roles_(kvrelay_bump_ *b, kvrelay_roles roles) {
  int32_t *to = (int32_t *)kvrelay_bump_take_(b, roles.len, sizeof *to);
  if (to != NULL && roles.len != 0)
    KVRELAY_MEMCPY(to, roles.ptr, roles.len * sizeof *to);
  roles.ptr = to;
  return roles;
}

/* Copies a descriptor with all it points to; with a counting bump only the size counts and `to` is
 * not usable. */
static void kvrelay_copy_descriptor_(kvrelay_bump_ *b, const kvrelay_descriptor *from,
                                     kvrelay_descriptor *to) {
  *to = *from;
  to->serving_endpoint.namespace_ = kvrelay_copy_text_(b, from->serving_endpoint.namespace_);
  to->serving_endpoint.component = kvrelay_copy_text_(b, from->serving_endpoint.component);
  to->serving_endpoint.endpoint = kvrelay_copy_text_(b, from->serving_endpoint.endpoint);
  to->pool_roles = kvrelay_copy_roles_(b, from->pool_roles);
  kvrelay_registration *list =
      (kvrelay_registration *)kvrelay_bump_take_(b, from->registrations_len, sizeof *list);
  to->registrations = list;
  for (size_t i = 0; i < from->registrations_len; i++) {
    const kvrelay_registration *r = &from->registrations[i];
    kvrelay_registration copy = *r;
    copy.canonical_model_id = kvrelay_copy_text_(b, r->canonical_model_id);
    copy.target.base_model = kvrelay_copy_text_(b, r->target.base_model);
    copy.target.adapter = kvrelay_copy_text_(b, r->target.adapter);
    kvrelay_text *aliases = (kvrelay_text *)kvrelay_bump_take_(b, r->aliases_len, sizeof *aliases);
    for (size_t k = 0; k < r->aliases_len; k++) {
      kvrelay_text alias = kvrelay_copy_text_(b, r->aliases[k]);
      if (aliases != NULL)
        aliases[k] = alias;
    }
    copy.aliases = aliases;
    if (list != NULL)
      list[i] = copy;
  }
}

static kvrelay_pool *kvrelay_pool_place_(const kvrelay_relay *r, const kvrelay_descriptor *d,
                                         uint8_t *mem, size_t *need) {
  kvrelay_bump_ b = {mem, 0, false};
  kvrelay_pool *p = (kvrelay_pool *)kvrelay_bump_take_(&b, 1, sizeof *p);
  kvrelay_frame_ *frames =
      (kvrelay_frame_ *)kvrelay_bump_take_(&b, r->cfg_.queue_frames, sizeof *frames);
  kvrelay_pool_load_ *loads =
      (kvrelay_pool_load_ *)kvrelay_bump_take_(&b, r->cfg_.load_windows, sizeof *loads);
  kvrelay_descriptor copy;
  kvrelay_copy_descriptor_(&b, d, &copy);
  uint8_t *bytes = (uint8_t *)kvrelay_bump_take_(&b, r->ring_bytes_ + r->frame_bytes_, 1);
  *need = b.overflow ? 0 : b.used + 16;
  if (p != NULL) {
    KVRELAY_MEMSET(p, 0, sizeof *p);
    p->descriptor_ = copy;
    p->frames_ = frames;
    p->loads_ = loads;
    p->bytes_ = bytes;
    p->first_stream_ = KVRELAY_NIL_;
  }
  return p;
}

KVRELAY_API size_t kvrelay_relay_pool_mem_size(const kvrelay_relay *relay,
                                               const kvrelay_descriptor *descriptor) {
  size_t need = 0;
  if (kvrelay_descriptor_fit_(descriptor))
    (void)kvrelay_pool_place_(relay, descriptor, NULL, &need);
  return need;
}

KVRELAY_API size_t kvrelay_relay_pool_describe_mem_size(const kvrelay_descriptor *descriptor) {
  kvrelay_bump_ b = {NULL, 0, false};
  kvrelay_descriptor copy;
  if (!kvrelay_descriptor_fit_(descriptor))
    return 0;
  kvrelay_copy_descriptor_(&b, descriptor, &copy);
  return b.overflow ? 0 : b.used + 16;
}

/* ---- readiness ---- */

#define KVRELAY_ROLE_BIT_(ROLE) (UINT32_C(1) << (ROLE))

/* Bit 0 stands for all numbers that are no role, which nobody has. */
static uint32_t kvrelay_role_set_(kvrelay_roles roles) {
  uint32_t set = 0;
  for (size_t i = 0; i < roles.len; i++)
    set |= KVRELAY_ROLE_BIT_(kvrelay_role_name(roles.ptr[i]) != NULL ? roles.ptr[i] : 0);
  return set;
}

/* Ids are unique on both sides; those of the endpoint are in order. */
static bool kvrelay_registrations_same_(const kvrelay_endpoint_state *s,
                                        const kvrelay_descriptor *d) {
  if (s->registrations_len != d->registrations_len)
    return false;
  for (size_t i = 0; i < d->registrations_len; i++) {
    size_t low = 0, high = s->registrations_len;
    while (low < high) {
      const size_t middle = low + (high - low) / 2;
      if (kvrelay_text_compare(s->registrations[middle].canonical_model_id,
                               d->registrations[i].canonical_model_id) < 0)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == s->registrations_len ||
        !kvrelay_registration_same_(&s->registrations[low], &d->registrations[i]))
      return false;
  }
  return true;
}

/* What an endpoint came to, by its path; NULL when the derivation does not know it. */
static const kvrelay_endpoint_state *kvrelay_topology_find_(const struct kvrelay_topology *t,
                                                            const kvrelay_endpoint *endpoint) {
  size_t low = 0, high = t->endpoints_len;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    int order = kvrelay_path_compare_(&t->endpoints[middle].endpoint, endpoint);
    if (order == 0)
      return &t->endpoints[middle];
    if (order < 0)
      low = middle + 1;
    else
      high = middle;
  }
  return NULL;
}

/* The pool that is what the endpoint came to, NULL = none now. */
static const kvrelay_pool *kvrelay_topology_pool_(const kvrelay_relay *r,
                                                  const kvrelay_endpoint_state *s) {
  kvrelay_pool_id id;
  bool found;
  KVRELAY_MEMSET(&id, 0, sizeof id);
  id.identity_version = 1;
  id.domain = s->domain;
  for (uint32_t i = kvrelay_pool_search_(r, &id, &found); i < r->pools_len_; i++) {
    const kvrelay_descriptor *d = &r->pools_[i]->descriptor_;
    id.dc_id = d->producer.pool_id.dc_id;
    if (!kvrelay_pool_id_equal(&d->producer.pool_id, &id))
      break;
    if (kvrelay_endpoint_equal_(&d->serving_endpoint, &s->endpoint) &&
        d->query_semantics.kv_block_size == s->semantics.kv_block_size &&
        d->query_semantics.hash_format == s->semantics.hash_format &&
        kvrelay_role_set_(d->pool_roles) == kvrelay_role_set_(s->roles) &&
        kvrelay_registrations_same_(s, d))
      return r->pools_[i];
  }
  return NULL;
}

static void kvrelay_put_roles_(hashfmt_blake3_state *h, kvrelay_roles roles) {
  kvrelay_put_u32_(h, (uint32_t)roles.len);
  for (size_t i = 0; i < roles.len; i++)
    kvrelay_put_u32_(h, (uint32_t)roles.ptr[i]);
}

static void kvrelay_put_digest_(hashfmt_blake3_state *h, const kvrelay_digest *d) {
  kvrelay_put_u32_(h, d->present);
  kvrelay_put_u32_(h, (uint32_t)d->digest_len);
  hashfmt_blake3_update(h, d->digest, sizeof d->digest);
  kvrelay_put_u32_(h, (uint32_t)d->source);
}

static void kvrelay_put_pool_id_(hashfmt_blake3_state *h, const kvrelay_pool_id *id) {
  kvrelay_put_u32_(h, id->present);
  if (!id->present)
    return;
  kvrelay_put_u32_(h, id->identity_version);
  kvrelay_put_u32_(h, id->domain.present);
  kvrelay_put_digest_(h, &id->domain.cache_semantics);
  kvrelay_put_digest_(h, &id->domain.routing_scope);
  kvrelay_put_u32_(h, (uint32_t)id->dc_id);
  kvrelay_put_u32_(h, (uint32_t)(id->dc_id >> 32));
}

/* Everything that a reader of the entry sees, or was sent. */
static void kvrelay_put_entry_(hashfmt_blake3_state *h, const kvrelay_topology_entry *e) {
  kvrelay_put_framed_(h, e->namespace_);
  kvrelay_put_framed_(h, e->canonical_model_id);
  kvrelay_put_u32_(h, (uint32_t)e->state);
  kvrelay_put_roles_(h, e->present_roles);
  kvrelay_put_roles_(h, e->missing_roles);
  kvrelay_put_roles_(h, e->duplicate_role_endpoints);
  kvrelay_put_u32_(h, e->legacy_fallback_active);
  kvrelay_put_u32_(h, (uint32_t)e->members_len);
  for (size_t i = 0; i < e->members_len; i++) {
    const kvrelay_topology_member *m = &e->members[i];
    kvrelay_put_u32_(h, m->endpoint.present);
    kvrelay_put_framed_(h, m->endpoint.namespace_);
    kvrelay_put_framed_(h, m->endpoint.component);
    kvrelay_put_framed_(h, m->endpoint.endpoint);
    kvrelay_put_roles_(h, m->roles);
    kvrelay_put_pool_id_(h, &m->pool_id);
  }
  kvrelay_put_u32_(h, (uint32_t)e->adapters_len);
  for (size_t i = 0; i < e->adapters_len; i++) {
    kvrelay_put_framed_(h, e->adapters[i].canonical_model_id);
    kvrelay_put_u32_(h, (uint32_t)e->adapters[i].state);
    kvrelay_put_roles_(h, e->adapters[i].missing_roles);
  }
}

static void kvrelay_entries_digest_(const kvrelay_topology_entry *entries, size_t len,
                                    uint8_t digest[32]) {
  hashfmt_blake3_state h;
  hashfmt_blake3_init(&h);
  for (size_t i = 0; i < len; i++)
    kvrelay_put_entry_(&h, &entries[i]);
  hashfmt_blake3_final(&h, digest);
}

/* Copies the entries and adds the links. */
static void kvrelay_topology_build_(kvrelay_relay *r, uint8_t digest[32]) {
  const struct kvrelay_topology *t = r->topology_;
  kvrelay_topology_member *member = r->members_;
  r->entries_len_ = t == NULL ? 0 : (uint32_t)t->entries_len;
  for (uint32_t i = 0; i < r->entries_len_; i++) {
    kvrelay_topology_entry *e = &r->entries_[i];
    *e = t->entries[i];
    e->members = member;
    for (size_t k = 0; k < e->members_len; k++, member++) {
      *member = t->entries[i].members[k];
      const kvrelay_endpoint_state *s = kvrelay_topology_find_(t, &member->endpoint);
      const kvrelay_pool *p = s == NULL ? NULL : kvrelay_topology_pool_(r, s);
      if (p != NULL)
        member->pool_id = p->descriptor_.producer.pool_id;
      else
        KVRELAY_MEMSET(&member->pool_id, 0, sizeof member->pool_id);
    }
  }
  kvrelay_entries_digest_(r->entries_, r->entries_len_, digest);
}

static void kvrelay_topology_update_(kvrelay_relay *r) {
  uint8_t digest[32];
  if (!r->topology_dirty_)
    return;
  r->topology_dirty_ = false;
  kvrelay_topology_build_(r, digest);
  if (KVRELAY_MEMCMP(digest, r->topology_digest_, sizeof digest) != 0)
    r->topology_revision_++;
  KVRELAY_MEMCPY(r->topology_digest_, digest, sizeof digest);
}

KVRELAY_API int kvrelay_relay_set_topology(kvrelay_relay *relay,
                                           const struct kvrelay_topology *topology) {
  size_t members = 0;
  for (size_t i = 0; i < topology->entries_len; i++)
    members += topology->entries[i].members_len; /* at least one each */
  if (members > relay->cfg_.max_members)
    return KVRELAY_ERR_LIMIT;
  relay->topology_ = topology;
  kvrelay_topology_changed_(relay);
  return KVRELAY_OK;
}

/* ---- load ---- */

static bool kvrelay_rank_before_(const void *context, const void *a, const void *b) {
  const kvrelay_rank_load_ *const x = (const kvrelay_rank_load_ *)a;
  const kvrelay_rank_load_ *const y = (const kvrelay_rank_load_ *)b;
  (void)context;
  return x->worker_ != y->worker_ ? x->worker_ < y->worker_ : x->rank_ < y->rank_;
}

/* Ranks of all workers; one that says something impossible leaves none. */
static uint32_t kvrelay_ranks_declared_(const kvrelay_rank_range *ranges, size_t len) {
  uint32_t ranks = 0;
  for (size_t i = 0; i < len; i++) {
    if (ranges[i].ranks == 0 || ranges[i].ranks > KVRELAY_RANKS_MAX_ ||
        ranges[i].rank_start > UINT32_MAX - ranges[i].ranks + 1 ||
        ranks > UINT32_MAX - ranges[i].ranks)
      return 0;
    ranks += ranges[i].ranks;
  }
  return ranks;
}

/* Where this rank, or the one behind it, stands. */
static uint32_t kvrelay_rank_search_(const kvrelay_pool *p, uint64_t worker, uint32_t rank) {
  uint32_t low = 0, high = p->ranks_len_;
  kvrelay_rank_load_ key;
  key.worker_ = worker;
  key.rank_ = rank;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (kvrelay_rank_before_(NULL, &p->ranks_[middle], &key))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static kvrelay_rank_load_ *kvrelay_rank_find_(const kvrelay_pool *p, uint64_t worker,
                                              uint32_t rank) {
  uint32_t at = kvrelay_rank_search_(p, worker, rank);
  return at < p->ranks_len_ && p->ranks_[at].worker_ == worker && p->ranks_[at].rank_ == rank
             ? &p->ranks_[at]
             : NULL;
}

KVRELAY_API size_t kvrelay_pool_ranks_mem_size(const kvrelay_rank_range *ranges, size_t len) {
  kvrelay_bump_ b = {NULL, 0, false};
  (void)kvrelay_bump_take_(&b, kvrelay_ranks_declared_(ranges, len), sizeof(kvrelay_rank_load_));
  return b.overflow ? 0 : b.used + 16;
}

KVRELAY_API int kvrelay_pool_set_ranks(kvrelay_pool *pool, const kvrelay_rank_range *ranges,
                                       size_t len, void *mem, size_t mem_len) {
  const uint32_t count = kvrelay_ranks_declared_(ranges, len);
  const size_t need = kvrelay_pool_ranks_mem_size(ranges, len);
  if (need == 0 || mem == NULL || mem_len < need)
    return KVRELAY_ERR_NOSPACE;
  kvrelay_rank_load_ *ranks = (kvrelay_rank_load_ *)(void *)kvrelay_align_(mem), *next = ranks;
  for (size_t i = 0; count != 0 && i < len; i++)
    for (uint32_t k = 0; k < ranges[i].ranks; k++, next++) {
      const kvrelay_rank_load_ *former =
          kvrelay_rank_find_(pool, ranges[i].worker, ranges[i].rank_start + k);
      KVRELAY_MEMSET(next, 0, sizeof *next);
      next->worker_ = ranges[i].worker;
      next->rank_ = ranges[i].rank_start + k;
      next->capacity_ = ranges[i].total_kv_blocks;
      if (former != NULL && former->capacity_ == next->capacity_)
        *next = *former;
    }
  kvrelay_sort_(ranks, count, sizeof *ranks, kvrelay_rank_before_, NULL);
  for (uint32_t i = 1; i < count; i++)
    if (!kvrelay_rank_before_(NULL, &ranks[i - 1], &ranks[i]))
      return KVRELAY_ERR_ARG;
  pool->ranks_ = ranks;
  pool->ranks_len_ = count;
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_pool_set_capacity(kvrelay_pool *pool, uint64_t worker, uint32_t rank,
                                          uint64_t total_kv_blocks) {
  kvrelay_rank_load_ *load = kvrelay_rank_find_(pool, worker, rank);
  if (load == NULL)
    return KVRELAY_ERR_NOT_FOUND;
  if (load->capacity_ != total_kv_blocks)
    load->observed_ = false;
  load->capacity_ = total_kv_blocks;
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_pool_report(kvrelay_pool *pool, uint64_t worker, uint32_t rank,
                                    uint64_t kv_used_blocks) {
  kvrelay_rank_load_ *load = kvrelay_rank_find_(pool, worker, rank);
  if (load == NULL)
    return KVRELAY_ERR_NOT_FOUND;
  load->used_ = kv_used_blocks;
  load->observed_ = true;
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_pool_reports_lost(kvrelay_pool *pool, uint64_t worker) {
  const uint32_t first = kvrelay_rank_search_(pool, worker, 0);
  uint32_t i;
  for (i = first; i < pool->ranks_len_ && pool->ranks_[i].worker_ == worker; i++)
    pool->ranks_[i].observed_ = false;
  return i == first ? KVRELAY_ERR_NOT_FOUND : KVRELAY_OK;
}

static kvrelay_pool_load_ kvrelay_pool_load_now_(const kvrelay_pool *p) {
  kvrelay_pool_load_ load;
  bool all_known = true;
  KVRELAY_MEMSET(&load, 0, sizeof load);
  for (uint32_t i = 0; i < p->ranks_len_; i++) {
    const kvrelay_rank_load_ *rank = &p->ranks_[i];
    uint64_t used = rank->observed_ ? rank->used_ : 0;
    load.expected_++;
    load.observed_ += rank->observed_;
    load.used_ = used > UINT64_MAX - load.used_ ? UINT64_MAX : load.used_ + used;
    load.total_ =
        rank->capacity_ > UINT64_MAX - load.total_ ? UINT64_MAX : load.total_ + rank->capacity_;
    all_known = all_known && rank->capacity_ != 0;
  }
  if (load.observed_ != load.expected_)
    load.used_ = 0;
  if (!all_known)
    load.total_ = 0;
  return load;
}

/* Closes the window when its time has come; a late one delays those behind it. */
static void kvrelay_window_close_(kvrelay_relay *r, uint64_t now_ns) {
  const uint32_t mask = r->cfg_.load_windows - 1;
  if (now_ns < r->window_due_ns_)
    return;
  r->window_due_ns_ = kvrelay_after_(now_ns, r->cfg_.load_window_ns);
  r->window_++;
  r->windows_[r->window_ & mask].closed_ns_ = now_ns;
  r->windows_[r->window_ & mask].observed_ms_ = 0;
  for (uint32_t i = 0; i < r->pools_len_; i++) {
    kvrelay_pool *p = r->pools_[i];
    if (p->load_from_ == 0)
      p->load_from_ = r->window_;
    p->loads_[r->window_ & mask] = kvrelay_pool_load_now_(p);
  }
  kvrelay_list_wake_(r, KVRELAY_LIST_LOAD_);
}

/* Puts the entries of a window that is kept into the view.  Pools that were withdrawn since are
 * left out: their load is void. */
static void kvrelay_window_view_(kvrelay_relay *r, uint64_t window) {
  if (r->load_view_window_ == window)
    return;
  r->load_view_window_ = window;
  r->load_view_len_ = 0;
  for (uint32_t i = 0; i < r->pools_len_; i++) {
    const kvrelay_pool *p = r->pools_[i];
    const kvrelay_pool_load_ *load = &p->loads_[window & (r->cfg_.load_windows - 1)];
    kvrelay_load_entry *e = &r->load_view_[r->load_view_len_];
    if (p->load_from_ == 0 || p->load_from_ > window)
      continue;
    r->load_view_len_++;
    e->producer = p->descriptor_.producer;
    e->kv_used_blocks = load->used_;
    e->total_kv_blocks = load->total_;
    e->kv_observed_ranks = load->observed_;
    e->kv_expected_ranks = load->expected_;
  }
}

/* ---- pools ---- */

KVRELAY_API int kvrelay_relay_pool_add(kvrelay_relay *relay, const kvrelay_descriptor *descriptor,
                                       ckf_producer *state, void *mem, size_t mem_len,
                                       uint64_t now_ns, kvrelay_pool **pool) {
  (void)now_ns;
  bool found;
  const ckf_format *format = ckf_producer_format(state);
  size_t need = kvrelay_relay_pool_mem_size(relay, descriptor);
  if (need == 0 || mem == NULL)
    return KVRELAY_ERR_ARG;
  if (relay->stopping_)
    return KVRELAY_ERR_STATE;
  if (relay->pools_len_ == relay->cfg_.max_pools ||
      format->bucket_count > relay->cfg_.max_bucket_count)
    return KVRELAY_ERR_LIMIT;
  if (mem_len < need)
    return KVRELAY_ERR_NOSPACE;
  uint32_t at = kvrelay_pool_search_(relay, &descriptor->producer.pool_id, &found);
  if (found)
    return KVRELAY_ERR_STATE;
  kvrelay_pool **const link = kvrelay_endpoint_link_(relay, &descriptor->serving_endpoint);
  if (*link != NULL)
    return KVRELAY_ERR_STATE;
  if (relay->generation_ == UINT64_MAX)
    return KVRELAY_ERR_EXHAUSTED;
  /* The copy is larger than a list of its names. */
  if (kvrelay_descriptor_repeats_(descriptor, (kvrelay_text *)(void *)kvrelay_align_(mem)))
    return KVRELAY_ERR_ARG;
  kvrelay_pool *p = kvrelay_pool_place_(relay, descriptor, kvrelay_align_(mem), &need);
  p->relay_ = relay;
  p->state_ = state;
  kvrelay_producer *producer = &p->descriptor_.producer;
  producer->present = producer->pool_id.present = true;
  p->descriptor_.serving_endpoint.present = p->descriptor_.query_semantics.present = true;
  producer->producer_incarnation = relay->cfg_.identity.relay_incarnation;
  producer->layout_generation = relay->generation_++;
  producer->ckf_format.present = true;
  producer->ckf_format.format_version = CKF_FORMAT_VERSION;
  producer->ckf_format.seed = format->seed;
  producer->ckf_format.bucket_count = format->bucket_count;
  producer->ckf_format.fingerprint_bits = CKF_FINGERPRINT_BITS;
  producer->ckf_format.slots_per_bucket = CKF_SLOTS_PER_BUCKET;
  KVRELAY_MEMMOVE(&relay->pools_[at + 1], &relay->pools_[at],
                  (relay->pools_len_ - at) * sizeof *relay->pools_);
  relay->pools_[at] = *link = p;
  relay->pools_len_++;
  kvrelay_catalog_changed_(relay);
  *pool = p;
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_relay_pool_describe(kvrelay_relay *relay, kvrelay_pool *pool,
                                            const kvrelay_descriptor *descriptor, void *mem,
                                            size_t mem_len) {
  const kvrelay_descriptor former = pool->descriptor_;
  const size_t need = kvrelay_relay_pool_describe_mem_size(descriptor);
  kvrelay_descriptor whole = *descriptor; /* with what pool_add fills in */
  whole.serving_endpoint.present = whole.query_semantics.present = true;
  if (need == 0 || mem == NULL || !kvrelay_place_same_(&former, &whole) ||
      kvrelay_pool_id_compare(&former.producer.pool_id, &whole.producer.pool_id) != 0)
    return KVRELAY_ERR_ARG;
  if (pool->fenced_ != KVRELAY_OK)
    return KVRELAY_ERR_STATE;
  if (mem_len < need)
    return KVRELAY_ERR_NOSPACE;
  kvrelay_bump_ b = {kvrelay_align_(mem), 0, false};
  /* The copy is larger than a list of its names. */
  if (kvrelay_descriptor_repeats_(descriptor, (kvrelay_text *)(void *)b.base))
    return KVRELAY_ERR_ARG;
  whole.producer = former.producer;
  kvrelay_copy_descriptor_(&b, &whole, &pool->descriptor_);
  relay->view_revision_ = UINT64_MAX; /* the view has pointers into the memory given back */
  if (!kvrelay_names_same_(&former, &pool->descriptor_))
    kvrelay_catalog_changed_(relay);
  if (!kvrelay_roles_same_(former.pool_roles, pool->descriptor_.pool_roles))
    kvrelay_catalog_changed_(relay);
  return KVRELAY_OK;
}

static void kvrelay_due_leave_(kvrelay_relay *r, kvrelay_pool *p) {
  if (!p->due_)
    return;
  if (p->due_prev_ != NULL)
    p->due_prev_->due_next_ = p->due_next_;
  else
    r->due_head_ = p->due_next_;
  if (p->due_next_ != NULL)
    p->due_next_->due_prev_ = p->due_prev_;
  else
    r->due_tail_ = p->due_prev_;
  p->due_ = false;
}

/* The delay is one number for all pools, so the list stays ordered by joining at its end. */
static void kvrelay_due_join_(kvrelay_relay *r, kvrelay_pool *p, uint64_t at_ns) {
  if (p->due_)
    return;
  p->due_ = true;
  p->due_ns_ = at_ns;
  p->due_next_ = NULL;
  p->due_prev_ = r->due_tail_;
  if (r->due_tail_ != NULL)
    r->due_tail_->due_next_ = p;
  else
    r->due_head_ = p;
  r->due_tail_ = p;
}

/* Catalog first, then hub and streams. */
static void kvrelay_pool_withdraw_(kvrelay_relay *r, kvrelay_pool *p, const char *text) {
  bool found;
  uint32_t at = kvrelay_pool_search_(r, &p->descriptor_.producer.pool_id, &found);
  if (found && r->pools_[at] == p) {
    *kvrelay_endpoint_link_(r, &p->descriptor_.serving_endpoint) = p->endpoint_next_;
    r->pools_len_--;
    KVRELAY_MEMMOVE(&r->pools_[at], &r->pools_[at + 1], (r->pools_len_ - at) * sizeof *r->pools_);
    r->load_view_window_ = UINT64_MAX; /* made anew without it, for who reads that window later */
    kvrelay_catalog_changed_(r);
  }
  kvrelay_pool_end_streams_(r, p, KVRELAY_REASON_PUBLICATION_UNAVAILABLE, text);
  kvrelay_due_leave_(r, p);
  if (p->hub_)
    r->hubs_--;
  p->hub_ = false;
}

static void kvrelay_admit_waiting_(kvrelay_relay *r, uint64_t now_ns);

static int kvrelay_pool_fence_(kvrelay_relay *r, kvrelay_pool *p, int err) {
  p->fenced_ = err;
  r->stats_.producers_fenced++;
  kvrelay_pool_withdraw_(r, p, "the producer was fenced");
  return err;
}

KVRELAY_API void kvrelay_relay_pool_remove(kvrelay_relay *relay, kvrelay_pool *pool,
                                           uint64_t now_ns) {
  kvrelay_pool_withdraw_(relay, pool, "the pool was withdrawn");
  kvrelay_admit_waiting_(relay, now_ns);
}

KVRELAY_API const kvrelay_descriptor *kvrelay_pool_descriptor(const kvrelay_pool *pool) {
  return &pool->descriptor_;
}
KVRELAY_API int kvrelay_pool_fenced(const kvrelay_pool *pool) { return pool->fenced_; }
KVRELAY_API uint64_t kvrelay_pool_sequence(const kvrelay_pool *pool) { return pool->sequence_; }
KVRELAY_API uint32_t kvrelay_pool_subscribers(const kvrelay_pool *pool) {
  return pool->subscribers_;
}

/* ---- publishing ---- */

/* First sequence a subscriber may stand at and still get everything. */
static uint64_t kvrelay_ring_base_(const kvrelay_pool *p) { return p->sequence_ - p->frames_len_; }

static kvrelay_frame_ *kvrelay_ring_frame_(const kvrelay_pool *p, uint64_t sequence) {
  return &p->frames_[(sequence - 1) % p->relay_->cfg_.queue_frames];
}

static void kvrelay_ring_drop_oldest_(kvrelay_pool *p) {
  p->frames_bytes_ -= kvrelay_ring_frame_(p, kvrelay_ring_base_(p) + 1)->len_ + KVRELAY_FRAME_COST_;
  p->frames_len_--;
}

/*
 * Lets go of the oldest frames until one more of `len` bytes is within the queue's limits.  Frames
 * lie one behind the other in a ring of ring_bytes_, in which the limits hold them all; one that
 * crosses the end of the ring runs on behind it and stays in one piece.
 */
static void kvrelay_ring_reserve_(kvrelay_pool *p, size_t len) {
  const kvrelay_relay_config *c = &p->relay_->cfg_;
  while (p->frames_len_ == c->queue_frames ||
         (p->frames_len_ != 0 && len + KVRELAY_FRAME_COST_ > c->queue_bytes - p->frames_bytes_))
    kvrelay_ring_drop_oldest_(p);
}

static void kvrelay_ring_clear_(kvrelay_pool *p) {
  p->frames_len_ = 0;
  p->frames_bytes_ = p->write_ = 0;
}

static void kvrelay_pool_end_lagging_(kvrelay_relay *r, kvrelay_pool *p) {
  uint64_t base = kvrelay_ring_base_(p);
  for (uint32_t i = p->first_stream_, next; i != KVRELAY_NIL_; i = next) {
    kvrelay_call_ *s = &r->streams_[i];
    next = s->pool_next_;
    if (s->phase_ == KVRELAY_PHASE_WAIT_ || s->cursor_ >= base) {
      if (s->phase_ == KVRELAY_PHASE_LIVE_)
        kvrelay_wake_(r, s);
      continue;
    }
    r->stats_.lagged++;
    kvrelay_call_end_(r, s, KVRELAY_REASON_SUBSCRIBER_LAGGED,
                      "too many deltas wait for this subscriber, pool sequence ", p->sequence_);
  }
}

/* Streams with a cut only; those that wait for a permit get a later one. */
static void kvrelay_pool_recut_(kvrelay_relay *r, kvrelay_pool *p) {
  r->stats_.recuts++;
  for (uint32_t i = p->first_stream_, next; i != KVRELAY_NIL_; i = next) {
    next = r->streams_[i].pool_next_;
    if (r->streams_[i].phase_ != KVRELAY_PHASE_WAIT_)
      kvrelay_call_end_(r, &r->streams_[i], KVRELAY_REASON_PUBLICATION_UNAVAILABLE,
                        "too many changes for one delta, a fresh snapshot is needed", 0);
  }
}

/* The state still is what the descriptor says. */
static bool kvrelay_pool_intact_(const kvrelay_pool *p) {
  const ckf_format *now = ckf_producer_format(p->state_);
  const kvrelay_ckf_format *published = &p->descriptor_.producer.ckf_format;
  return now->seed == published->seed && now->bucket_count == published->bucket_count;
}

/* Drains the state; with a hub the sequence moves, with subscribers the delta is encoded. */
static int kvrelay_pool_cut_delta_(kvrelay_relay *r, kvrelay_pool *p) {
  ckf_batch batch;
  if (p->fenced_ != KVRELAY_OK)
    return p->fenced_;
  kvrelay_due_leave_(r, p);
  int drained = ckf_producer_drain(p->state_, &batch);
  if (drained < 0 || !kvrelay_pool_intact_(p))
    return kvrelay_pool_fence_(r, p, KVRELAY_ERR_INVARIANT);
  if (drained == 0 || !p->hub_)
    return KVRELAY_OK;
  if (p->sequence_ == UINT64_MAX)
    return kvrelay_pool_fence_(r, p, KVRELAY_ERR_EXHAUSTED);
  size_t len = ckf_cbi1_delta_size(batch.image_count);
  if (p->subscribers_ == 0 || len == 0) {
    if (p->subscribers_ != 0)
      kvrelay_pool_recut_(r, p);
    kvrelay_ring_clear_(p);
    p->sequence_++;
    return KVRELAY_OK;
  }
  kvrelay_ring_reserve_(p, len);
  ptrdiff_t got =
      ckf_cbi1_batch_encode(ckf_producer_format(p->state_), p->descriptor_.producer.pool_id.dc_id,
                            p->sequence_, p->sequence_ + 1, &batch, p->bytes_ + p->write_, len);
  if (got < 0)
    return kvrelay_pool_fence_(r, p, KVRELAY_ERR_INVARIANT);
  p->sequence_++;
  kvrelay_frame_ *frame = kvrelay_ring_frame_(p, p->sequence_);
  frame->offset_ = p->write_;
  frame->len_ = len;
  p->write_ = (p->write_ + len) % r->ring_bytes_;
  p->frames_len_++;
  p->frames_bytes_ += len + KVRELAY_FRAME_COST_;
  r->stats_.deltas_published++;
  kvrelay_pool_end_lagging_(r, p);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_relay_pool_publish(kvrelay_relay *relay, kvrelay_pool *pool,
                                           uint64_t now_ns) {
  int err = kvrelay_pool_cut_delta_(relay, pool);
  kvrelay_admit_waiting_(relay, now_ns); /* ended streams have given slots back */
  return err;
}

/* Changed buckets that wait for a delta at most, so that it stays below 4 000 000 bytes: the format
 * ends soon after, and so does what stock clients receive. */
#define KVRELAY_DIRTY_MAX_ 330000u

KVRELAY_API int kvrelay_relay_pool_changed(kvrelay_relay *relay, kvrelay_pool *pool,
                                           uint64_t now_ns) {
  if (pool->fenced_ != KVRELAY_OK)
    return pool->fenced_;
  if (ckf_producer_pending(pool->state_) >= relay->cfg_.publication_threshold ||
      ckf_producer_dirty(pool->state_) > KVRELAY_DIRTY_MAX_)
    return kvrelay_relay_pool_publish(relay, pool, now_ns);
  if (ckf_producer_has_pending(pool->state_))
    kvrelay_due_join_(relay, pool, kvrelay_after_(now_ns, relay->cfg_.publication_delay_ns));
  return KVRELAY_OK;
}

/* ---- admission ---- */

static int kvrelay_refuse_(kvrelay_relay *r, kvrelay_status *status, int32_t reason,
                           const char *text) {
  kvrelay_status_set_(status, reason, text);
  r->stats_.refused[reason]++;
  return KVRELAY_ERR_REFUSED;
}

static int kvrelay_refuse_limit_(kvrelay_relay *r, kvrelay_status *status, const char *what,
                                 uint64_t limit) {
  int err = kvrelay_refuse_(r, status, KVRELAY_REASON_RESOURCE_LIMIT, what);
  kvrelay_status_add_u64_(status, limit);
  return err;
}

static int kvrelay_refuse_pool_(kvrelay_relay *r, kvrelay_status *status, int32_t reason,
                                const char *text, const kvrelay_pool_id *id) {
  char name[KVRELAY_POOL_NAME_CAP];
  int err = kvrelay_refuse_(r, status, reason, text);
  kvrelay_pool_id_format(id, name);
  kvrelay_status_add_(status, name);
  return err;
}

static int kvrelay_refuse_verdict_(kvrelay_relay *r, kvrelay_status *status,
                                   const kvrelay_verdict *v) {
  int32_t reason = v->class_ == KVRELAY_CLASS_UNSUPPORTED ? KVRELAY_REASON_UNSUPPORTED_FEATURE
                                                          : KVRELAY_REASON_INVALID_REQUEST;
  int err = kvrelay_refuse_(r, status, reason, "expected_producer: ");
  kvrelay_status_add_(status, kvrelay_condition_name(v->condition));
  kvrelay_status_add_(status, " at ");
  kvrelay_status_add_(status, v->field);
  if (v->value != 0) {
    kvrelay_status_add_(status, ", value ");
    kvrelay_status_add_u64_(status, v->value);
  }
  return err;
}

/* The table has a place for everybody who got a permit. */
static kvrelay_call_ *kvrelay_call_new_(kvrelay_relay *r, int32_t method, uint8_t phase,
                                        uint64_t *call) {
  uint32_t i = r->free_head_;
  kvrelay_call_ *s = &r->streams_[i];
  uint32_t generation = s->generation_ + 1;
  r->free_head_ = s->next_;
  KVRELAY_MEMSET(s, 0, sizeof *s);
  s->generation_ = generation;
  s->method_ = (uint8_t)method;
  s->phase_ = phase;
  s->prev_ = s->next_ = s->pool_prev_ = s->pool_next_ = KVRELAY_NIL_;
  r->open_[method]++;
  *call = (uint64_t)generation << 32 | i;
  return s;
}

static kvrelay_call_ *kvrelay_call_find_(const kvrelay_relay *r, uint64_t call) {
  uint32_t i = (uint32_t)call;
  if (i >= r->streams_len_ || r->streams_[i].phase_ == KVRELAY_PHASE_FREE_ ||
      r->streams_[i].generation_ != (uint32_t)(call >> 32))
    return NULL;
  return &r->streams_[i];
}

/* An initialised hub without subscribers and without anybody waiting gives its place to another
 * producer. */
static bool kvrelay_hub_make_room_(kvrelay_relay *r) {
  if (r->hubs_ < r->cfg_.max_hubs)
    return true;
  for (uint32_t i = 0; i < r->pools_len_; i++) {
    kvrelay_pool *idle = r->pools_[i];
    if (idle->hub_ && idle->subscribers_ == 0 && idle->waiting_ == 0) {
      idle->hub_ = false;
      kvrelay_ring_clear_(idle);
      r->hubs_--;
      return true;
    }
  }
  return false;
}

/* Writes all chunks of a cut one behind the other; false = not encodable. */
static bool kvrelay_cut_encode_(const kvrelay_pool *p, uint32_t chunk_buckets, uint32_t chunks,
                                uint8_t *out) {
  const ckf_format *format = ckf_producer_format(p->state_);
  for (uint32_t i = 0; i < chunks; i++) {
    size_t cap = ckf_cbi1_snapshot_size(format, chunk_buckets, i);
    ptrdiff_t got = ckf_cbi1_snapshot_encode(
        format, p->descriptor_.producer.pool_id.dc_id, p->sequence_, ckf_producer_words(p->state_),
        (size_t)format->bucket_count, chunk_buckets, i, out, cap);
    if (got < 0)
      return false;
    out += got;
  }
  return chunks != 0;
}

/* A snapshot permit is free for this stream (WIRE.md, Admission, from hub on): hub, limit of the
 * pool, cut. */
static void kvrelay_call_cut_(kvrelay_relay *r, kvrelay_call_ *s, uint64_t now_ns) {
  kvrelay_pool *p = s->pool_;
  /*
   * What is pending goes to the subscribers that are there before the words are copied: a change
   * that is undone before the next delta would otherwise be in this snapshot for ever.
   */
  if (kvrelay_pool_intact_(p) && kvrelay_pool_cut_delta_(r, p) != KVRELAY_OK)
    return; /* fenced: this stream has ended with it */
  if (!p->hub_ && !kvrelay_hub_make_room_(r)) {
    kvrelay_call_end_(r, s, KVRELAY_REASON_RESOURCE_LIMIT, "initialised hubs, limit ",
                      r->cfg_.max_hubs);
    return;
  }
  if (!p->hub_) {
    p->hub_ = true;
    r->hubs_++;
  }
  if (p->subscribers_ >= r->cfg_.max_subscribers_per_pool) {
    kvrelay_call_end_(r, s, KVRELAY_REASON_RESOURCE_LIMIT, "subscribers of the pool, limit ",
                      r->cfg_.max_subscribers_per_pool);
    return;
  }
  uint32_t slot = 0,
           chunks = ckf_cbi1_chunk_count(ckf_producer_format(p->state_), s->chunk_buckets_);
  while (r->slots_[slot].used_)
    slot++;
  if (!kvrelay_pool_intact_(p) ||
      !kvrelay_cut_encode_(p, s->chunk_buckets_, chunks, r->slots_[slot].bytes_)) {
    kvrelay_call_end_(r, s, KVRELAY_REASON_INVALID_PUBLICATION, "the snapshot cannot be encoded",
                      0);
    (void)kvrelay_pool_fence_(r, p, KVRELAY_ERR_INVARIANT);
    return;
  }
  r->slots_[slot].used_ = true;
  r->slots_used_++;
  r->stats_.snapshots_cut++;
  p->waiting_--;
  if (p->subscribers_++ == 0)
    r->busy_hubs_++;
  s->phase_ = KVRELAY_PHASE_SNAPSHOT_;
  s->admitted_ = true;
  s->slot_ = slot;
  s->chunk_count_ = chunks;
  s->cursor_ = p->sequence_;
  s->since_ns_ = now_ns;
  kvrelay_list_join_(r, s, KVRELAY_LIST_PROGRESS_);
  kvrelay_wake_(r, s);
}

static void kvrelay_admit_waiting_(kvrelay_relay *r, uint64_t now_ns) {
  while (r->slots_used_ < r->cfg_.encoding_concurrency &&
         r->lists_[KVRELAY_LIST_WAIT_].head_ != KVRELAY_NIL_) {
    kvrelay_call_ *s = &r->streams_[r->lists_[KVRELAY_LIST_WAIT_].head_];
    kvrelay_list_leave_(r, s);
    kvrelay_call_cut_(r, s, now_ns);
  }
}

/* Catalog, readiness and load: a permit of the plane is all they need. */
static int kvrelay_open_plane_(kvrelay_relay *r, int32_t method, uint64_t now_ns, uint64_t *call,
                               kvrelay_status *status) {
  uint32_t limit = r->cfg_.max_catalog_subscribers;
  uint8_t phase = KVRELAY_PHASE_CATALOG_, list = KVRELAY_LIST_CATALOG_;
  const char *what = "open catalog streams, limit ";
  if (method == KVRELAY_METHOD_SUBSCRIBE_READINESS) {
    limit = r->cfg_.max_readiness_subscribers;
    phase = KVRELAY_PHASE_READINESS_;
    list = KVRELAY_LIST_READINESS_;
    what = "open readiness streams, limit ";
  } else if (method == KVRELAY_METHOD_SUBSCRIBE_LOAD) {
    limit = r->cfg_.max_load_subscribers;
    phase = KVRELAY_PHASE_LOAD_;
    list = KVRELAY_LIST_LOAD_;
    what = "open load streams, limit ";
  }
  if (r->open_[method] >= limit)
    return kvrelay_refuse_limit_(r, status, what, limit);
  if (r->stopping_)
    return kvrelay_refuse_(r, status, KVRELAY_REASON_PUBLICATION_UNAVAILABLE,
                           "the relay is shutting down");
  kvrelay_window_close_(r, now_ns); /* without readers nobody asked for a tick */
  kvrelay_call_ *s = kvrelay_call_new_(r, method, phase, call);
  s->admitted_ = true;
  s->since_ns_ = now_ns;
  kvrelay_list_join_(r, s, list);
  return KVRELAY_OK;
}

static int kvrelay_open_pool_(kvrelay_relay *r, const kvrelay_request *q, uint64_t now_ns,
                              uint64_t *call, kvrelay_status *status) {
  const kvrelay_producer *wanted = &q->expected_producer;
  bool found;
  if (!wanted->present)
    return kvrelay_refuse_(r, status, KVRELAY_REASON_INVALID_REQUEST,
                           "expected_producer is missing");
  kvrelay_verdict v = kvrelay_check_producer(wanted);
  if (v.class_ != KVRELAY_CLASS_OK)
    return kvrelay_refuse_verdict_(r, status, &v);
  if (r->open_[KVRELAY_METHOD_SUBSCRIBE_POOL] >= r->cfg_.max_pool_streams)
    return kvrelay_refuse_limit_(r, status, "open filter streams of all pools, limit ",
                                 r->cfg_.max_pool_streams);
  uint32_t at = kvrelay_pool_search_(r, &wanted->pool_id, &found);
  if (!found)
    return kvrelay_refuse_pool_(r, status, KVRELAY_REASON_POOL_NOT_FOUND,
                                "not in the catalog: pool ", &wanted->pool_id);
  if (!kvrelay_producer_equal(&r->pools_[at]->descriptor_.producer, wanted))
    return kvrelay_refuse_pool_(r, status, KVRELAY_REASON_PRODUCER_CHANGED,
                                "another producer serves pool ", &wanted->pool_id);
  if (r->stopping_)
    return kvrelay_refuse_(r, status, KVRELAY_REASON_PUBLICATION_UNAVAILABLE,
                           "the relay is shutting down");
  kvrelay_call_ *s = kvrelay_call_new_(r, KVRELAY_METHOD_SUBSCRIBE_POOL, KVRELAY_PHASE_WAIT_, call);
  s->chunk_buckets_ = kvrelay_chunk_for_(&r->cfg_, q->max_message_bytes);
  kvrelay_pool_attach_(r, r->pools_[at], s);
  s->pool_->waiting_++;
  kvrelay_list_join_(r, s, KVRELAY_LIST_WAIT_);
  kvrelay_admit_waiting_(r, now_ns);
  return KVRELAY_OK;
}

static void kvrelay_call_free_(kvrelay_relay *r, kvrelay_call_ *s);
static void kvrelay_end_status_(const kvrelay_call_ *s, kvrelay_status *status);

KVRELAY_API int kvrelay_relay_call_open(kvrelay_relay *relay, const kvrelay_request *request,
                                        uint64_t now_ns, uint64_t *call, kvrelay_status *status) {
  int err;
  if (!kvrelay_method_offered(request->method)) {
    kvrelay_status_set_(status, KVRELAY_REASON_NONE, "this relay does not offer the method");
    status->grpc = KVRELAY_GRPC_UNIMPLEMENTED;
    return KVRELAY_ERR_REFUSED;
  }
  if (request->contract_marker != KVRELAY_CONTRACT_MARKER) {
    err = kvrelay_refuse_(relay, status, KVRELAY_REASON_CONTRACT_MISMATCH,
                          "contract_marker is not the one of dynamo.kvrelay.v1: ");
    kvrelay_status_add_u64_(status, request->contract_marker);
    return err;
  }
  if (request->method == KVRELAY_METHOD_GET_RELAY_INFO) {
    if (relay->open_[request->method] >= relay->cfg_.max_info_calls)
      return kvrelay_refuse_limit_(relay, status, "GetRelayInfo calls, limit ",
                                   relay->cfg_.max_info_calls);
    kvrelay_call_new_(relay, request->method, KVRELAY_PHASE_ANSWER_, call)->admitted_ = true;
    return KVRELAY_OK;
  }
  if (!kvrelay_subscriber_id_valid(request->subscriber_id))
    return kvrelay_refuse_(relay, status, KVRELAY_REASON_INVALID_REQUEST,
                           "subscriber_id must be 1 to 128 bytes without control characters");
  if (request->method != KVRELAY_METHOD_SUBSCRIBE_POOL)
    return kvrelay_open_plane_(relay, request->method, now_ns, call, status);
  err = kvrelay_open_pool_(relay, request, now_ns, call, status);
  if (err != KVRELAY_OK)
    return err;
  /* What ended during admission never sent headers: it is a refusal. */
  kvrelay_call_ *s = kvrelay_call_find_(relay, *call);
  if (s == NULL || s->phase_ != KVRELAY_PHASE_ENDED_)
    return KVRELAY_OK;
  kvrelay_end_status_(s, status);
  kvrelay_call_free_(relay, s);
  return KVRELAY_ERR_REFUSED;
}

KVRELAY_API bool kvrelay_relay_call_admitted(const kvrelay_relay *relay, uint64_t call) {
  const kvrelay_call_ *s = kvrelay_call_find_(relay, call);
  return s != NULL && s->admitted_;
}

/* ---- pulling ---- */

static kvrelay_envelope kvrelay_envelope_(const kvrelay_relay *r) {
  kvrelay_envelope e;
  e.protocol_version = KVRELAY_WIRE_VERSION;
  e.relay_present = true;
  e.relay = r->cfg_.identity;
  e.contract_marker = KVRELAY_CONTRACT_MARKER;
  return e;
}

static void kvrelay_end_status_(const kvrelay_call_ *s, kvrelay_status *status) {
  kvrelay_status_set_(status, s->end_reason_, s->end_text_ == NULL ? "" : s->end_text_);
  if (s->end_number_ != 0)
    kvrelay_status_add_u64_(status, s->end_number_);
  if (s->end_pool_[0] != 0) {
    kvrelay_status_add_(status, ": ");
    kvrelay_status_add_(status, s->end_pool_);
  }
}

static int kvrelay_pull_none_(kvrelay_call_ *s) {
  s->waiting_ = true;
  return KVRELAY_PULL_NONE;
}

static int kvrelay_pull_catalog_(kvrelay_relay *r, kvrelay_call_ *s, kvrelay_outgoing *out) {
  if (s->sent_ && s->revision_ == r->revision_)
    return kvrelay_pull_none_(s);
  for (uint32_t i = 0; i < r->pools_len_ && r->view_revision_ != r->revision_; i++)
    r->view_[i] = r->pools_[i]->descriptor_;
  r->view_revision_ = r->revision_;
  s->sent_ = true;
  s->revision_ = r->revision_;
  kvrelay_catalog_update *m = &out->u.catalog;
  KVRELAY_MEMSET(m, 0, sizeof *m);
  m->envelope = kvrelay_envelope_(r);
  m->revision = r->revision_;
  m->snapshot_present = true;
  m->pools = r->view_;
  m->pools_len = r->pools_len_;
  return KVRELAY_PULL_MESSAGE;
}

static int kvrelay_pull_readiness_(kvrelay_relay *r, kvrelay_call_ *s, kvrelay_outgoing *out) {
  kvrelay_topology_update_(r);
  if (s->sent_ && s->revision_ == r->topology_revision_ && !s->beat_)
    return kvrelay_pull_none_(s);
  s->sent_ = true;
  s->beat_ = false;
  s->revision_ = r->topology_revision_;
  kvrelay_readiness_update *m = &out->u.readiness;
  m->envelope = kvrelay_envelope_(r);
  m->revision = r->topology_revision_;
  m->entries = r->entries_;
  m->entries_len = r->entries_len_;
  return KVRELAY_PULL_MESSAGE;
}

static int kvrelay_pull_load_(kvrelay_relay *r, kvrelay_call_ *s, uint64_t wall_us, uint64_t now_ns,
                              kvrelay_outgoing *out) {
  uint64_t kept = r->cfg_.load_windows;
  if (s->sent_ && s->cursor_ == r->window_)
    return kvrelay_pull_none_(s);
  if (s->sent_ && r->window_ - s->cursor_ > kept) {
    r->stats_.lagged++;
    kvrelay_call_end_(r, s, KVRELAY_REASON_SUBSCRIBER_LAGGED,
                      "load windows lost: ", r->window_ - s->cursor_ - kept);
    kvrelay_end_status_(s, &out->end);
    return KVRELAY_PULL_END;
  }
  s->cursor_ = s->sent_ ? s->cursor_ + 1 : r->window_;
  s->sent_ = true;
  kvrelay_window_ *w = &r->windows_[s->cursor_ & (kept - 1)];
  uint64_t age_us = (now_ns - w->closed_ns_) / 1000;
  if (w->observed_ms_ == 0 && age_us < wall_us)
    w->observed_ms_ = (wall_us - age_us) / 1000;
  kvrelay_window_view_(r, s->cursor_);
  kvrelay_load_update *m = &out->u.load;
  m->envelope = kvrelay_envelope_(r);
  m->window_sequence = s->cursor_;
  m->observed_ms = w->observed_ms_;
  m->window_ms = r->cfg_.load_window_ns / KVRELAY_MS_;
  m->pools = r->load_view_;
  m->pools_len = r->load_view_len_;
  return KVRELAY_PULL_MESSAGE;
}

/* Fills a frame of the filter stream; `payload` NULL is a heartbeat. */
static int kvrelay_pull_frame_(kvrelay_relay *r, kvrelay_call_ *s, int32_t kind, uint64_t base,
                               const uint8_t *payload, size_t len, uint64_t wall_us,
                               uint64_t now_ns, kvrelay_outgoing *out) {
  kvrelay_filter_update *m = &out->u.filter;
  m->envelope = kvrelay_envelope_(r);
  m->producer = s->pool_->descriptor_.producer;
  m->base_sequence = base;
  m->sequence = s->cursor_;
  m->send_ts_us = wall_us;
  m->kind = kind;
  m->payload = payload;
  m->payload_len = len;
  s->since_ns_ = now_ns;
  if (s->phase_ == KVRELAY_PHASE_LIVE_)
    kvrelay_list_join_(r, s, KVRELAY_LIST_BEAT_);
  else
    kvrelay_list_join_(r, s, KVRELAY_LIST_PROGRESS_);
  return KVRELAY_PULL_MESSAGE;
}

static int kvrelay_pull_snapshot_(kvrelay_relay *r, kvrelay_call_ *s, uint64_t wall_us,
                                  uint64_t now_ns, kvrelay_outgoing *out) {
  /* Of the cut, which is what was published: the state may have been damaged since. */
  const kvrelay_ckf_format *published = &s->pool_->descriptor_.producer.ckf_format;
  const ckf_format format = {published->seed, published->bucket_count};
  const uint8_t *bytes = r->slots_[s->slot_].bytes_;
  /* All chunks but the last have one size. */
  bytes += (size_t)s->chunk_ * ckf_cbi1_snapshot_size(&format, s->chunk_buckets_, 0);
  size_t len = ckf_cbi1_snapshot_size(&format, s->chunk_buckets_, s->chunk_);
  if (++s->chunk_ == s->chunk_count_ && !s->holds_) {
    kvrelay_cut_release_(
        r, s); /* its bytes stay until the next call, which is when the next cut may come */
    s->phase_ = KVRELAY_PHASE_LIVE_;
  }
  return kvrelay_pull_frame_(r, s, KVRELAY_UPDATE_SNAPSHOT_CHUNK, s->cursor_, bytes, len, wall_us,
                             now_ns, out);
}

static int kvrelay_pull_live_(kvrelay_relay *r, kvrelay_call_ *s, uint64_t wall_us, uint64_t now_ns,
                              kvrelay_outgoing *out) {
  kvrelay_pool *p = s->pool_;
  if (s->cursor_ < p->sequence_) {
    const kvrelay_frame_ *frame = kvrelay_ring_frame_(p, ++s->cursor_);
    return kvrelay_pull_frame_(r, s, KVRELAY_UPDATE_DELTA, s->cursor_ - 1,
                               p->bytes_ + frame->offset_, frame->len_, wall_us, now_ns, out);
  }
  if (s->list_ == KVRELAY_LIST_BEAT_)
    return kvrelay_pull_none_(s); /* its heartbeat is not due yet */
  r->stats_.heartbeats++;
  return kvrelay_pull_frame_(r, s, KVRELAY_UPDATE_HEARTBEAT, s->cursor_, NULL, 0, wall_us, now_ns,
                             out);
}

KVRELAY_API int kvrelay_relay_call_pull(kvrelay_relay *relay, uint64_t call, uint64_t wall_us,
                                        uint64_t now_ns, kvrelay_outgoing *out) {
  kvrelay_call_ *s = kvrelay_call_find_(relay, call);
  if (s == NULL)
    return KVRELAY_ERR_NOT_FOUND;
  /* A slot whose last chunk the pull before lent out is free now. */
  if (s->lent_)
    kvrelay_cut_release_(relay, s);
  if (s->phase_ == KVRELAY_PHASE_SNAPSHOT_ && s->chunk_ == s->chunk_count_) {
    kvrelay_cut_release_(relay, s);
    s->phase_ = KVRELAY_PHASE_LIVE_;
    s->since_ns_ = now_ns;
    kvrelay_list_join_(relay, s, KVRELAY_LIST_BEAT_);
  }
  kvrelay_admit_waiting_(relay, now_ns);
  kvrelay_ready_leave_(relay, s); /* who pulls need not be told */
  s->waiting_ = false;
  out->method = s->method_;
  switch (s->phase_) {
  case KVRELAY_PHASE_ANSWER_:
    if (s->sent_) {
      kvrelay_status_set_(&out->end, KVRELAY_REASON_NONE, "");
      return KVRELAY_PULL_END;
    }
    s->sent_ = true;
    out->u.info.envelope = kvrelay_envelope_(relay);
    return KVRELAY_PULL_MESSAGE;
  case KVRELAY_PHASE_CATALOG_:
    return kvrelay_pull_catalog_(relay, s, out);
  case KVRELAY_PHASE_READINESS_:
    return kvrelay_pull_readiness_(relay, s, out);
  case KVRELAY_PHASE_LOAD_:
    return kvrelay_pull_load_(relay, s, wall_us, now_ns, out);
  case KVRELAY_PHASE_SNAPSHOT_:
    return kvrelay_pull_snapshot_(relay, s, wall_us, now_ns, out);
  case KVRELAY_PHASE_LIVE_:
    return kvrelay_pull_live_(relay, s, wall_us, now_ns, out);
  case KVRELAY_PHASE_ENDED_:
    kvrelay_end_status_(s, &out->end);
    return KVRELAY_PULL_END;
  default:
    return kvrelay_pull_none_(s);
  }
}

KVRELAY_API void kvrelay_relay_call_hold(kvrelay_relay *relay, uint64_t call, bool hold) {
  kvrelay_call_ *s = kvrelay_call_find_(relay, call);
  if (s != NULL)
    s->holds_ = hold;
}

static void kvrelay_call_free_(kvrelay_relay *r, kvrelay_call_ *s) {
  kvrelay_call_leave_(r, s);
  kvrelay_cut_release_(r, s);
  kvrelay_ready_leave_(r, s);
  r->open_[s->method_]--;
  s->phase_ = KVRELAY_PHASE_FREE_;
  s->method_ = KVRELAY_METHOD_NONE;
  s->next_ = r->free_head_;
  r->free_head_ = kvrelay_call_index_(r, s);
}

KVRELAY_API void kvrelay_relay_call_close(kvrelay_relay *relay, uint64_t call, uint64_t now_ns) {
  kvrelay_call_ *s = kvrelay_call_find_(relay, call);
  if (s == NULL)
    return;
  kvrelay_call_free_(relay, s);
  kvrelay_admit_waiting_(relay, now_ns);
}

KVRELAY_API int kvrelay_relay_ready_next(kvrelay_relay *relay, uint64_t *call) {
  uint32_t i = relay->ready_head_;
  if (i == KVRELAY_NIL_)
    return 0;
  kvrelay_ready_leave_(relay, &relay->streams_[i]);
  if (relay->streams_[i].lent_)
    kvrelay_cut_release_(relay, &relay->streams_[i]); /* nothing is cut before the next call */
  *call = (uint64_t)relay->streams_[i].generation_ << 32 | i;
  return 1;
}

/* ---- time ---- */

static uint64_t kvrelay_min_(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* When the first stream of an ordered list runs out. */
static uint64_t kvrelay_list_deadline_(const kvrelay_relay *r, int list, uint64_t wait_ns) {
  uint32_t head = r->lists_[list].head_;
  return head == KVRELAY_NIL_ ? KVRELAY_TIME_NONE
                              : kvrelay_after_(r->streams_[head].since_ns_, wait_ns);
}

/* That stream, when it has run out. */
static kvrelay_call_ *kvrelay_list_due_(const kvrelay_relay *r, int list, uint64_t wait_ns,
                                        uint64_t now_ns) {
  uint32_t head = r->lists_[list].head_;
  return head != KVRELAY_NIL_ && kvrelay_list_deadline_(r, list, wait_ns) <= now_ns
             ? &r->streams_[head]
             : NULL;
}

KVRELAY_API uint64_t kvrelay_relay_deadline_ns(const kvrelay_relay *relay) {
  if (relay->slots_used_ < relay->cfg_.encoding_concurrency &&
      relay->lists_[KVRELAY_LIST_WAIT_].len_ != 0)
    return 0; /* a permit came back since the last call */
  uint64_t at = relay->due_head_ == NULL ? KVRELAY_TIME_NONE : relay->due_head_->due_ns_;
  if (relay->lists_[KVRELAY_LIST_LOAD_].len_ != 0)
    at = kvrelay_min_(at, relay->window_due_ns_);
  at = kvrelay_min_(at, kvrelay_list_deadline_(relay, KVRELAY_LIST_READINESS_,
                                               relay->cfg_.readiness_heartbeat_ns));
  at =
      kvrelay_min_(at, kvrelay_list_deadline_(relay, KVRELAY_LIST_BEAT_, relay->cfg_.heartbeat_ns));
  return kvrelay_min_(
      at, kvrelay_list_deadline_(relay, KVRELAY_LIST_PROGRESS_, relay->cfg_.snapshot_progress_ns));
}

KVRELAY_API void kvrelay_relay_tick(kvrelay_relay *relay, uint64_t now_ns) {
  kvrelay_call_ *s;
  while (relay->due_head_ != NULL && relay->due_head_->due_ns_ <= now_ns)
    (void)kvrelay_pool_cut_delta_(
        relay,
        relay->due_head_); /* takes it out of the list; a fenced pool tells its owner later */
  while ((s = kvrelay_list_due_(relay, KVRELAY_LIST_PROGRESS_, relay->cfg_.snapshot_progress_ns,
                                now_ns)) != NULL) {
    relay->stats_.progress_timeouts++;
    kvrelay_call_end_(relay, s, KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT,
                      "the snapshot was not taken, time limit in ms ",
                      relay->cfg_.snapshot_progress_ns / 1000000);
  }
  while ((s = kvrelay_list_due_(relay, KVRELAY_LIST_BEAT_, relay->cfg_.heartbeat_ns, now_ns)) !=
         NULL) {
    kvrelay_list_leave_(relay, s); /* until something is sent; missed heartbeats are not made up */
    kvrelay_wake_(relay, s);
  }
  while ((s = kvrelay_list_due_(relay, KVRELAY_LIST_READINESS_, relay->cfg_.readiness_heartbeat_ns,
                                now_ns)) != NULL) {
    s->since_ns_ = now_ns;
    s->beat_ = true;
    kvrelay_list_join_(relay, s, KVRELAY_LIST_READINESS_);
    kvrelay_wake_(relay, s);
  }
  kvrelay_window_close_(relay, now_ns);
  kvrelay_admit_waiting_(relay, now_ns);
}

KVRELAY_API void kvrelay_relay_shutdown(kvrelay_relay *relay, uint64_t now_ns) {
  (void)now_ns;
  relay->stopping_ = true;
  for (uint32_t i = 0; i < relay->streams_len_; i++) {
    kvrelay_call_ *s = &relay->streams_[i];
    if (s->phase_ == KVRELAY_PHASE_WAIT_)
      kvrelay_call_end_(relay, s, KVRELAY_REASON_PUBLICATION_UNAVAILABLE,
                        "the relay is shutting down", 0);
    else if (s->phase_ != KVRELAY_PHASE_FREE_ && s->phase_ != KVRELAY_PHASE_ENDED_ &&
             s->phase_ != KVRELAY_PHASE_ANSWER_)
      kvrelay_call_end_(relay, s, KVRELAY_REASON_NONE, "", 0);
  }
}

KVRELAY_API kvrelay_relay_stats kvrelay_relay_stats_get(const kvrelay_relay *relay) {
  kvrelay_relay_stats st = relay->stats_;
  st.catalog_revision = relay->revision_;
  st.pools = relay->pools_len_;
  st.topology_revision = relay->topology_revision_;
  st.load_windows = relay->window_;
  st.catalog_streams = relay->open_[KVRELAY_METHOD_WATCH_CATALOG];
  st.pool_streams = relay->open_[KVRELAY_METHOD_SUBSCRIBE_POOL];
  st.readiness_streams = relay->open_[KVRELAY_METHOD_SUBSCRIBE_READINESS];
  st.load_streams = relay->open_[KVRELAY_METHOD_SUBSCRIBE_LOAD];
  st.hubs = relay->hubs_;
  st.idle_hubs = relay->hubs_ - relay->busy_hubs_;
  return st;
}

static uint32_t kvrelay_count_list_(const kvrelay_relay *r, int list, uint8_t phase) {
  uint32_t n = 0;
  for (uint32_t i = r->lists_[list].head_; i != KVRELAY_NIL_ && n <= r->streams_len_;
       i = r->streams_[i].next_)
    n += r->streams_[i].list_ == list && r->streams_[i].phase_ == phase;
  return n;
}

static int kvrelay_pool_check_(const kvrelay_relay *r, const kvrelay_pool *p) {
  uint32_t subscribers = 0, waiting = 0;
  for (uint32_t i = p->first_stream_; i != KVRELAY_NIL_; i = r->streams_[i].pool_next_) {
    const kvrelay_call_ *s = &r->streams_[i];
    if (s->pool_ != p)
      return __LINE__;
    waiting += s->phase_ == KVRELAY_PHASE_WAIT_;
    subscribers += s->phase_ != KVRELAY_PHASE_WAIT_;
    if (s->phase_ != KVRELAY_PHASE_WAIT_ &&
        (s->cursor_ > p->sequence_ || s->cursor_ < kvrelay_ring_base_(p)))
      return __LINE__;
  }
  if (subscribers != p->subscribers_ || waiting != p->waiting_ || (subscribers != 0 && !p->hub_))
    return __LINE__;
  size_t payload = 0, at = p->write_;
  for (uint64_t i = 0; i < p->frames_len_;
       i++) { /* newest first, each ends where the next begins */
    const kvrelay_frame_ *frame = kvrelay_ring_frame_(p, p->sequence_ - i);
    if (frame->offset_ >= r->ring_bytes_ || frame->len_ > r->frame_bytes_ ||
        (frame->offset_ + frame->len_) % r->ring_bytes_ != at)
      return __LINE__;
    at = frame->offset_;
    payload += frame->len_;
  }
  if (payload > r->ring_bytes_ ||
      payload + KVRELAY_FRAME_COST_ * p->frames_len_ != p->frames_bytes_)
    return __LINE__;
  return p->frames_bytes_ > r->cfg_.queue_bytes || p->frames_len_ > r->cfg_.queue_frames ? __LINE__
                                                                                         : 0;
}

/* The chains hold exactly the pools of the catalog, which are in order. */
static int kvrelay_pools_check_(const kvrelay_relay *r) {
  uint32_t chained = 0, hubs = 0, busy = 0;
  for (uint32_t i = 0; i < kvrelay_power_(r->cfg_.max_pools); i++)
    for (const kvrelay_pool *p = r->endpoints_[i]; p != NULL; p = p->endpoint_next_)
      chained++;
  for (uint32_t i = 0; i < r->pools_len_; i++) {
    const kvrelay_pool *const p = r->pools_[i];
    const int line = kvrelay_pool_check_(r, p);
    if (line != 0)
      return line;
    if ((i != 0 && kvrelay_pool_id_compare(&r->pools_[i - 1]->descriptor_.producer.pool_id,
                                           &p->descriptor_.producer.pool_id) >= 0) ||
        *kvrelay_endpoint_link_(r, &p->descriptor_.serving_endpoint) != p)
      return __LINE__;
    hubs += p->hub_;
    busy += p->subscribers_ != 0;
  }
  return chained != r->pools_len_ || hubs != r->hubs_ || hubs > r->cfg_.max_hubs ||
                 busy != r->busy_hubs_
             ? __LINE__
             : 0;
}

KVRELAY_API int kvrelay_relay_check_(const kvrelay_relay *relay) {
  static const struct {
    uint8_t list, phase;
  } ruled[] = {{KVRELAY_LIST_PROGRESS_, KVRELAY_PHASE_SNAPSHOT_},
               {KVRELAY_LIST_BEAT_, KVRELAY_PHASE_LIVE_},
               {KVRELAY_LIST_WAIT_, KVRELAY_PHASE_WAIT_},
               {KVRELAY_LIST_CATALOG_, KVRELAY_PHASE_CATALOG_},
               {KVRELAY_LIST_READINESS_, KVRELAY_PHASE_READINESS_},
               {KVRELAY_LIST_LOAD_, KVRELAY_PHASE_LOAD_}};
  uint32_t open[KVRELAY_METHODS_] = {0}, used = 0, snapshots = 0, queued = 0;
  for (uint32_t i = 0; i < relay->streams_len_; i++) {
    open[relay->streams_[i].method_]++;
    queued += relay->streams_[i].queued_;
    snapshots += relay->streams_[i].phase_ == KVRELAY_PHASE_SNAPSHOT_ || relay->streams_[i].lent_;
  }
  for (uint32_t i = 0; i < relay->cfg_.encoding_concurrency; i++)
    used += relay->slots_[i].used_;
  for (uint32_t i = relay->ready_head_; i != KVRELAY_NIL_ && queued != 0;
       i = relay->streams_[i].ready_next_)
    queued--;
  for (int32_t method = 1; method < KVRELAY_METHODS_; method++)
    if (open[method] != relay->open_[method])
      return __LINE__;
  if (queued != 0 || used != relay->slots_used_ || snapshots != used)
    return __LINE__;
  for (size_t i = 0; i < sizeof ruled / sizeof ruled[0]; i++)
    if (kvrelay_count_list_(relay, ruled[i].list, ruled[i].phase) !=
        relay->lists_[ruled[i].list].len_)
      return __LINE__;
  return kvrelay_pools_check_(relay);
}

/* ==== consumer (impl) ==== */
/*
 * One kvrelay_consumer_stream_ per call that should be open: relay info, catalog, readiness, load,
 * one filter stream per pool. Whatever happens only changes state and marks `work_`; action_next
 * walks over the streams and says what has to be done. Call numbers hold the place of their stream,
 * so that a message finds it without a search.
 *
 * A catalog is copied into the arena that is not in force, checked there, and then put in force at
 * once. Slots follow pool ids from one catalog to the next. They also outlive a closed catalog
 * stream: planes fail on their own, so replicas stay, unasked, until the next catalog confirms
 * them.
 */

#define KVRELAY_CONSUMER_EVENTS_ 64u
#define KVRELAY_NO_SLOT_ UINT32_MAX

enum {
  KVRELAY_BAR_NONE_ = 0,
  KVRELAY_BAR_CATALOG_, /* until the next catalog */
  KVRELAY_BAR_PRODUCER_ /* until the producer changes */
};

enum {
  KVRELAY_WAIT_NONE_ = 0,
  KVRELAY_WAIT_CATALOG_, /* for a newer catalog, which is asked for when the retry is due */
  KVRELAY_WAIT_ASKED_    /* it was asked for */
};

/* ---- events ---- */

/* The next event to be filled; the oldest goes when there is no room. */
static kvrelay_event_out *kvrelay_consumer_tell_(kvrelay_consumer *c, int32_t kind, uint32_t pool) {
  kvrelay_event_out *event;
  if (c->events_len_ == KVRELAY_CONSUMER_EVENTS_) {
    c->events_first_ = (c->events_first_ + 1) % KVRELAY_CONSUMER_EVENTS_;
    c->events_len_--;
  }
  event = &c->events_[(c->events_first_ + c->events_len_++) % KVRELAY_CONSUMER_EVENTS_];
  KVRELAY_MEMSET(event, 0, sizeof *event);
  event->kind = kind;
  event->pool = pool;
  event->verdict = KVRELAY_FINE_;
  return event;
}

KVRELAY_API int kvrelay_consumer_event_next(kvrelay_consumer *c, kvrelay_event_out *event) {
  if (c->events_len_ == 0)
    return 0;
  *event = c->events_[c->events_first_];
  c->events_first_ = (c->events_first_ + 1) % KVRELAY_CONSUMER_EVENTS_;
  c->events_len_--;
  return 1;
}

/* ---- streams ---- */

/* Slot `slot` may have something to do; KVRELAY_NO_SLOT_ = only what is not a slot. */
static void kvrelay_consumer_touch_(kvrelay_consumer *c, uint32_t slot) {
  if (!c->work_)
    c->cursor_ = c->slots_used_;
  c->work_ = true;
  if (slot < c->cursor_)
    c->cursor_ = slot;
}

/* Calls of one stream count up from its place, by the number of places. */
static uint32_t kvrelay_consumer_places_(const kvrelay_consumer *c) {
  return c->cfg_.max_pools + KVRELAY_PLANES_;
}

/* The stream of an open call, NULL when it is none; slot = KVRELAY_NO_SLOT_ when it is a plane's.
 */
static kvrelay_consumer_stream_ *kvrelay_consumer_find_(kvrelay_consumer *c, uint32_t call,
                                                        uint32_t *slot) {
  const uint32_t place = call % kvrelay_consumer_places_(c);
  kvrelay_consumer_stream_ *s;
  *slot = place < c->slots_used_ ? place : KVRELAY_NO_SLOT_;
  if (place < c->slots_used_)
    s = &c->slots_[place].stream;
  else if (place >= c->cfg_.max_pools)
    s = &c->planes_[place - c->cfg_.max_pools];
  else
    return NULL;
  return call != 0 && s->call == call ? s : NULL;
}

static uint64_t kvrelay_consumer_random_(kvrelay_consumer *c) {
  uint64_t z = c->jitter_ += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

static void kvrelay_consumer_retry_in_(kvrelay_consumer_stream_ *s, uint64_t delay,
                                       uint64_t now_ns) {
  s->retry_ns = delay < KVRELAY_TIME_NONE - 1 - now_ns ? now_ns + delay : KVRELAY_TIME_NONE - 1;
}

/* Sets the next attempt of a stream whose call is over: half of the doubled delay for sure, the
 * other half by chance. */
static void kvrelay_consumer_backoff_(kvrelay_consumer *c, kvrelay_consumer_stream_ *s,
                                      uint64_t now_ns) {
  const uint64_t most = c->cfg_.backoff_max_ns;
  uint64_t delay = c->cfg_.backoff_first_ns;
  uint32_t i;
  for (i = 0; i < s->failures && delay < most; i++)
    delay = delay > most / 2 ? most : delay * 2;
  if (delay < most)
    s->failures++;
  delay = delay / 2 + kvrelay_consumer_random_(c) % (delay - delay / 2 + 1);
  kvrelay_consumer_retry_in_(s, delay, now_ns);
}

/* The call of a stream is over; one that lived long enough starts over with the short delay. */
static void kvrelay_consumer_over_(kvrelay_consumer *c, kvrelay_consumer_stream_ *s,
                                   uint64_t now_ns) {
  if (s->call != 0 && now_ns - s->opened_ns >= c->cfg_.backoff_reset_ns)
    s->failures = 0;
  s->call = 0;
  s->heard = false;
}

/* We end the call and try again later. */
static void kvrelay_consumer_hang_up_(kvrelay_consumer *c, kvrelay_consumer_stream_ *s,
                                      uint64_t now_ns) {
  if (s->call != 0)
    s->cancel = s->call;
  kvrelay_consumer_over_(c, s, now_ns);
  kvrelay_consumer_backoff_(c, s, now_ns);
}

/* ---- slots ---- */

/* What lies in the first bytes of replica memory on its way back. */
typedef struct kvrelay_spent_ {
  void *next;
  uint32_t cancel; /* a call that wrote there, 0 = none */
} kvrelay_spent_;

/* Gives the replica and its call up; the slot keeps its place. */
static void kvrelay_slot_release_(kvrelay_consumer *c, kvrelay_consumer_pool_ *p) {
  kvrelay_spent_ spent;
  if (p->mem != NULL) {
    spent.next = c->spent_;
    spent.cancel = p->stream.call != 0 ? p->stream.call : p->stream.cancel;
    KVRELAY_MEMCPY(p->mem, &spent, sizeof spent);
    c->spent_ = p->mem;
    p->mem = NULL;
    kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
  }
  p->stream.call = 0;
  p->stream.cancel = 0;
  p->asked = false;
}

/* A slot that knows nothing of its pool yet; numbers of its former calls stay used. */
static void kvrelay_slot_reset_(kvrelay_consumer_pool_ *p, uint32_t index, bool followed) {
  const uint32_t serial = p->stream.serial;
  KVRELAY_MEMSET(p, 0, sizeof *p);
  p->stream.serial = serial;
  p->index = index;
  p->followed = followed;
  p->last_frame_ns = KVRELAY_TIME_NONE;
}

static uint32_t kvrelay_slot_take_(kvrelay_consumer *c) {
  uint32_t slot = c->slot_free_;
  if (slot == KVRELAY_NO_SLOT_) {
    slot = c->slots_used_++;
    KVRELAY_MEMSET(&c->slots_[slot], 0, sizeof c->slots_[slot]);
  } else
    c->slot_free_ = c->slots_[slot].index;
  return slot;
}

static void kvrelay_slot_free_(kvrelay_consumer *c, uint32_t slot) {
  kvrelay_slot_release_(c, &c->slots_[slot]);
  kvrelay_slot_reset_(&c->slots_[slot], c->slot_free_, false);
  c->slot_free_ = slot;
}

static const kvrelay_catalog_copy_ *kvrelay_consumer_now_(const kvrelay_consumer *c) {
  return &c->catalogs_[c->current_];
}

/* The replica of a slot is void; its memory stays for the next attempt. */
static void kvrelay_slot_void_(kvrelay_consumer *c, kvrelay_consumer_pool_ *p, int32_t fault,
                               int code, const kvrelay_status *status) {
  kvrelay_event_out *const event = kvrelay_consumer_tell_(c, KVRELAY_EVENT_POOL_VOID, p->index);
  event->fault = fault;
  if (status != NULL) {
    event->status = *status;
    p->last_end = *status;
  }
  ckf_replica_reset(&p->replica);
  p->fault = fault;
  p->fault_code = code;
  p->cut_known = false;
}

/* ---- planes ---- */

/* Nothing of this connection holds any longer; calls need no cancelling, the connection is gone. */
static void kvrelay_consumer_drop_all_(kvrelay_consumer *c) {
  kvrelay_catalog_copy_ *const now = &c->catalogs_[c->current_];
  kvrelay_spent_ spent;
  void *mem;
  uint32_t i;
  for (i = 0; i < now->pools_len; i++)
    kvrelay_slot_free_(c, now->slots[i]);
  for (mem = c->spent_; mem != NULL; mem = spent.next) {
    KVRELAY_MEMCPY(&spent, mem, sizeof spent);
    spent.cancel = 0;
    KVRELAY_MEMCPY(mem, &spent, sizeof spent);
  }
  now->pools_len = 0;
  now->order_len = 0;
  now->names_len = 0;
  for (i = 0; i < KVRELAY_PLANES_; i++)
    c->planes_[i].call = c->planes_[i].cancel = 0;
  c->readiness_.in_force = c->load_.in_force = false;
  c->connected_ = c->relay_known_ = c->informed_ = c->in_force_ = c->revision_seen_ = false;
  c->reconnect_due_ = false;
  c->deadline_ns_ = KVRELAY_TIME_NONE;
  kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
}

/* This is not our contract: nothing more is wanted from this relay. */
static void kvrelay_consumer_stop_(kvrelay_consumer *c, const kvrelay_verdict *verdict,
                                   const kvrelay_status *status) {
  kvrelay_event_out *event;
  kvrelay_consumer_drop_all_(c);
  c->stopped_ = c->stop_due_ = true;
  event = kvrelay_consumer_tell_(c, KVRELAY_EVENT_STOPPED, 0);
  if (verdict != NULL)
    event->verdict = *verdict;
  if (status != NULL)
    event->status = *status;
}

/* The stream of a plane is closed, with it all that it brought; `status` says why. */
static void kvrelay_plane_void_(kvrelay_consumer *c, int plane, const kvrelay_verdict *verdict,
                                const kvrelay_status *status) {
  static const int32_t kinds[KVRELAY_PLANES_] = {
      0, KVRELAY_EVENT_CATALOG_VOID, KVRELAY_EVENT_READINESS_VOID, KVRELAY_EVENT_LOAD_VOID};
  kvrelay_event_out *const event = kvrelay_consumer_tell_(c, kinds[plane], 0);
  if (verdict != NULL)
    event->verdict = *verdict;
  event->status = *status;
  if (plane == KVRELAY_PLANE_WATCH_)
    c->in_force_ = c->revision_seen_ = false;
  else if (plane == KVRELAY_PLANE_READINESS_)
    c->readiness_.in_force = false;
  else
    c->load_.in_force = false;
  kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
}

/* We close the stream of a plane because of what it brought. */
static void kvrelay_plane_refuse_(kvrelay_consumer *c, int plane, const kvrelay_verdict *verdict,
                                  const char *text, uint64_t now_ns) {
  kvrelay_status status;
  kvrelay_status_set_(&status, KVRELAY_REASON_NONE, text);
  status.grpc = KVRELAY_GRPC_CANCELLED;
  kvrelay_consumer_hang_up_(c, &c->planes_[plane], now_ns);
  kvrelay_plane_void_(c, plane, verdict, &status);
}

/* A fresh catalog is wanted, the old one stays in force until it comes. */
static void kvrelay_watch_reopen_(kvrelay_consumer *c, uint64_t now_ns) {
  if (c->planes_[KVRELAY_PLANE_WATCH_].call != 0) {
    kvrelay_consumer_hang_up_(c, &c->planes_[KVRELAY_PLANE_WATCH_], now_ns);
    c->revision_seen_ = false;
    kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
  }
}

/* Checks that are common to all responses. `KVRELAY_OK`: go on. KVRELAY_ERR_MALFORMED: no relay,
 * the caller gives the plane up. KVRELAY_ERR_STATE: everything was given up already. */
static int kvrelay_consumer_greet_(kvrelay_consumer *c, const kvrelay_envelope *m) {
  const kvrelay_verdict verdict = kvrelay_check_envelope(m);
  kvrelay_status status;
  if (verdict.class_ != KVRELAY_CLASS_OK) {
    kvrelay_consumer_stop_(c, &verdict, NULL);
    return KVRELAY_ERR_STATE;
  }
  if (!m->relay_present)
    return KVRELAY_ERR_MALFORMED;
  if (!c->relay_known_) {
    c->relay_ = m->relay;
    c->relay_known_ = true;
    kvrelay_consumer_tell_(c, KVRELAY_EVENT_INFO, 0);
    return KVRELAY_OK;
  }
  if (m->relay.drt_instance_id == c->relay_.drt_instance_id &&
      m->relay.relay_incarnation == c->relay_.relay_incarnation)
    return KVRELAY_OK;
  kvrelay_status_set_(&status, KVRELAY_REASON_NONE, "two relays answer on one connection");
  status.grpc = KVRELAY_GRPC_CANCELLED;
  kvrelay_plane_void_(c, KVRELAY_PLANE_WATCH_, NULL, &status);
  kvrelay_consumer_drop_all_(c);
  c->reconnect_due_ = true;
  return KVRELAY_ERR_STATE;
}

/* ---- life ---- */

KVRELAY_API kvrelay_consumer_config kvrelay_consumer_config_default(void) {
  const uint64_t ms = 1000000;
  kvrelay_consumer_config cfg;
  KVRELAY_MEMSET(&cfg, 0, sizeof cfg);
  cfg.subscriber_id = kvrelay_word_("kvrelay");
  cfg.max_pools = 1024;
  cfg.catalog_bytes = (size_t)4 << 20;
  cfg.readiness_bytes = (size_t)1 << 20;
  cfg.filter_stale_ns = cfg.readiness_stale_ns = 30000 * ms;
  cfg.load_stale_ns = 3000 * ms;
  cfg.backoff_first_ns = 500 * ms;
  cfg.backoff_max_ns = 30000 * ms;
  cfg.backoff_reset_ns = 30000 * ms;
  cfg.subscribe_all = cfg.follow_readiness = cfg.follow_load = true;
  return cfg;
}

/* Where the parts of the memory block lie, behind kvrelay_align_. */
typedef struct kvrelay_consumer_plan_ {
  uint64_t slots, events, arenas[2], readiness, load, id, end;
} kvrelay_consumer_plan_;

static bool kvrelay_consumer_plan_make_(const kvrelay_consumer_config *cfg,
                                        kvrelay_consumer_plan_ *plan) {
  const uint64_t arena = ((uint64_t)cfg->catalog_bytes + 15) / 16 * 16;
  const uint64_t readiness = ((uint64_t)cfg->readiness_bytes + 15) / 16 * 16;
  if (cfg->max_pools == 0 || cfg->max_pools > 65536 || cfg->catalog_bytes == 0 ||
      cfg->catalog_bytes > SIZE_MAX / 8 || cfg->readiness_bytes == 0 ||
      cfg->readiness_bytes > SIZE_MAX / 8 || cfg->backoff_first_ns == 0 ||
      cfg->backoff_max_ns < cfg->backoff_first_ns || cfg->backoff_max_ns == KVRELAY_TIME_NONE ||
      !kvrelay_subscriber_id_valid(cfg->subscriber_id))
    return false;
  plan->arenas[0] = 0;
  plan->arenas[1] = arena;
  plan->slots = 2 * arena;
  plan->events = plan->slots + (uint64_t)cfg->max_pools * sizeof(kvrelay_consumer_pool_);
  plan->readiness = plan->events + KVRELAY_CONSUMER_EVENTS_ * sizeof(kvrelay_event_out);
  plan->load = plan->readiness + (cfg->follow_readiness ? readiness : 0);
  plan->id = plan->load + (cfg->follow_load ? cfg->max_pools * sizeof(kvrelay_load_held_) : 0);
  plan->end = plan->id + cfg->subscriber_id.len + 15; /* wherever the block starts */
  return plan->end <= SIZE_MAX;
}

KVRELAY_API size_t kvrelay_consumer_mem_size(const kvrelay_consumer_config *cfg) {
  kvrelay_consumer_plan_ plan;
  return kvrelay_consumer_plan_make_(cfg, &plan) ? (size_t)plan.end : 0;
}

KVRELAY_API int kvrelay_consumer_init_abi(kvrelay_consumer *c, size_t c_size,
                                          const kvrelay_consumer_config *cfg, void *mem,
                                          size_t mem_len, uint64_t now_ns) {
  kvrelay_consumer_plan_ plan;
  uint8_t *base;
  uint32_t i;
  (void)now_ns;
  if (c_size != sizeof *c)
    return KVRELAY_ERR_ABI;
  if (!kvrelay_consumer_plan_make_(cfg, &plan))
    return KVRELAY_ERR_ARG;
  if (mem == NULL || mem_len < (size_t)plan.end)
    return KVRELAY_ERR_NOSPACE;
  base = kvrelay_align_(mem);
  KVRELAY_MEMSET(c, 0, sizeof *c);
  c->cfg_ = *cfg;
  KVRELAY_MEMCPY(base + plan.id, cfg->subscriber_id.ptr, cfg->subscriber_id.len);
  c->cfg_.subscriber_id.ptr = base + plan.id;
  c->slots_ = (kvrelay_consumer_pool_ *)(void *)(base + plan.slots);
  c->events_ = (kvrelay_event_out *)(void *)(base + plan.events);
  for (i = 0; i < 2; i++) {
    c->catalogs_[i].arena = base + plan.arenas[i];
    c->catalogs_[i].arena_len = cfg->catalog_bytes;
  }
  c->readiness_.arena = base + plan.readiness;
  c->readiness_.arena_len = cfg->readiness_bytes;
  c->load_.held = (kvrelay_load_held_ *)(void *)(base + plan.load);
  c->jitter_ = cfg->jitter_seed;
  c->slot_free_ = KVRELAY_NO_SLOT_;
  c->deadline_ns_ = KVRELAY_TIME_NONE;
  return KVRELAY_OK;
}

KVRELAY_API void kvrelay_consumer_connected(kvrelay_consumer *c, uint64_t now_ns) {
  int i;
  (void)now_ns;
  if (c->stopped_)
    return;
  kvrelay_consumer_drop_all_(c);
  for (i = 0; i < KVRELAY_PLANES_; i++) {
    c->planes_[i].retry_ns = 0;
    c->planes_[i].failures = 0;
    c->planes_[i].heard = false;
  }
  c->connected_ = true;
}

KVRELAY_API void kvrelay_consumer_disconnected(kvrelay_consumer *c, uint64_t now_ns) {
  (void)now_ns;
  kvrelay_consumer_drop_all_(c);
}

KVRELAY_API uint64_t kvrelay_consumer_deadline_ns(const kvrelay_consumer *c) {
  return c->work_ ? 0 : c->deadline_ns_;
}

KVRELAY_API void kvrelay_consumer_tick(kvrelay_consumer *c, uint64_t now_ns) {
  if (now_ns >= c->deadline_ns_)
    kvrelay_consumer_touch_(c, 0);
}

/* ---- actions ---- */

static void kvrelay_consumer_due_(kvrelay_consumer *c, uint64_t when_ns) {
  if (when_ns < c->deadline_ns_)
    c->deadline_ns_ = when_ns;
}

/* Opens a call on the stream at `place`. */
static void kvrelay_consumer_call_(kvrelay_consumer *c, kvrelay_consumer_stream_ *s, uint32_t place,
                                   int32_t method, uint64_t now_ns, kvrelay_action *a) {
  const uint32_t places = kvrelay_consumer_places_(c);
  s->serial = s->serial >= UINT32_MAX / places - 1 ? 1 : s->serial + 1;
  s->call = s->serial * places + place;
  s->opened_ns = now_ns;
  s->heard = false;
  a->kind = KVRELAY_ACTION_CALL;
  a->call = s->call;
  a->request.method = method;
  a->request.contract_marker = KVRELAY_CONTRACT_MARKER;
  if (method != KVRELAY_METHOD_GET_RELAY_INFO)
    a->request.subscriber_id = c->cfg_.subscriber_id;
}

static int kvrelay_consumer_cancel_(kvrelay_consumer_stream_ *s, kvrelay_action *a) {
  if (s->cancel == 0)
    return 0;
  a->kind = KVRELAY_ACTION_CANCEL;
  a->call = s->cancel;
  s->cancel = 0;
  return 1;
}

static int kvrelay_consumer_plane_(kvrelay_consumer *c, kvrelay_consumer_stream_ *s, uint32_t place,
                                   int32_t method, uint64_t now_ns, kvrelay_action *a) {
  if (s->call != 0)
    return 0;
  if (now_ns < s->retry_ns) {
    kvrelay_consumer_due_(c, s->retry_ns);
    return 0;
  }
  kvrelay_consumer_call_(c, s, place, method, now_ns, a);
  return 1;
}

static bool kvrelay_slot_usable_(const kvrelay_consumer *c, const kvrelay_consumer_pool_ *p) {
  return kvrelay_consumer_now_(c)->verdicts[p->index].class_ == KVRELAY_CLASS_OK &&
         p->bar == KVRELAY_BAR_NONE_;
}

static ckf_format kvrelay_slot_format_(const kvrelay_consumer *c, const kvrelay_consumer_pool_ *p) {
  const kvrelay_ckf_format *const wire =
      &kvrelay_consumer_now_(c)->pools[p->index].producer.ckf_format;
  ckf_format format;
  format.seed = wire->seed;
  format.bucket_count = wire->bucket_count;
  return format;
}

static int kvrelay_slot_action_(kvrelay_consumer *c, uint32_t slot, uint64_t now_ns,
                                kvrelay_action *a) {
  kvrelay_consumer_pool_ *const p = &c->slots_[slot];
  ckf_format format;
  if (!p->followed)
    return 0; /* so it is for free slots */
  if (kvrelay_consumer_cancel_(&p->stream, a))
    return 1;
  if (!c->in_force_ || !kvrelay_slot_usable_(c, p) || p->stream.call != 0 || p->asked ||
      p->wait == KVRELAY_WAIT_ASKED_)
    return 0;
  if (now_ns < p->stream.retry_ns) {
    kvrelay_consumer_due_(c, p->stream.retry_ns);
    return 0;
  }
  if (p->wait == KVRELAY_WAIT_CATALOG_) {
    p->wait = KVRELAY_WAIT_ASKED_;
    kvrelay_watch_reopen_(c, now_ns);
    return 0;
  }
  a->pool = p->index;
  if (p->mem == NULL) {
    format = kvrelay_slot_format_(c, p);
    p->asked = true;
    a->kind = KVRELAY_ACTION_REPLICA_NEED;
    a->bytes = ckf_replica_mem_size(&format);
    return 1;
  }
  kvrelay_consumer_call_(c, &p->stream, slot, KVRELAY_METHOD_SUBSCRIBE_POOL, now_ns, a);
  a->request.expected_producer = kvrelay_consumer_now_(c)->pools[p->index].producer;
  return 1;
}

/* What does not depend on the connection. */
static int kvrelay_consumer_return_(kvrelay_consumer *c, kvrelay_action *a) {
  kvrelay_spent_ spent;
  if (c->stop_due_ || c->reconnect_due_) {
    a->kind = c->stop_due_ ? KVRELAY_ACTION_STOP : KVRELAY_ACTION_RECONNECT;
    c->stop_due_ = c->reconnect_due_ = false;
    return 1;
  }
  if (c->spent_ == NULL)
    return 0;
  KVRELAY_MEMCPY(&spent, c->spent_, sizeof spent);
  if (spent.cancel != 0) {
    a->kind = KVRELAY_ACTION_CANCEL;
    a->call = spent.cancel;
    spent.cancel = 0;
    KVRELAY_MEMCPY(c->spent_, &spent, sizeof spent);
    return 1;
  }
  a->kind = KVRELAY_ACTION_REPLICA_FREE;
  a->mem = c->spent_;
  c->spent_ = spent.next;
  return 1;
}

KVRELAY_API int kvrelay_consumer_action_next(kvrelay_consumer *c, uint64_t now_ns,
                                             kvrelay_action *action) {
  kvrelay_consumer_tick(c, now_ns);
  if (!c->work_)
    return 0;
  KVRELAY_MEMSET(action, 0, sizeof *action);
  if (kvrelay_consumer_return_(c, action))
    return 1;
  if (c->connected_) {
    static const int32_t methods[KVRELAY_PLANES_] = {
        KVRELAY_METHOD_GET_RELAY_INFO, KVRELAY_METHOD_WATCH_CATALOG,
        KVRELAY_METHOD_SUBSCRIBE_READINESS, KVRELAY_METHOD_SUBSCRIBE_LOAD};
    const bool wanted[KVRELAY_PLANES_] = {!c->informed_, true, c->cfg_.follow_readiness,
                                          c->cfg_.follow_load};
    uint32_t i;
    if (c->deadline_ns_ <= now_ns)
      c->deadline_ns_ = KVRELAY_TIME_NONE; /* found anew below: the cursor is at 0 */
    for (; c->cursor_ < c->slots_used_; c->cursor_++)
      if (kvrelay_slot_action_(c, c->cursor_, now_ns, action))
        return 1;
    /* Behind the slots, which may want a new catalog.  A plane may have to hang up although it is
     * not wanted any more. */
    for (i = 0; i < KVRELAY_PLANES_; i++)
      if (kvrelay_consumer_cancel_(&c->planes_[i], action) ||
          (wanted[i] && kvrelay_consumer_plane_(c, &c->planes_[i], c->cfg_.max_pools + i,
                                                methods[i], now_ns, action)))
        return 1;
  }
  c->work_ = false;
  return 0;
}

/* ---- catalog: copy ---- */

/* Room for n elements, NULL when the arena is full. */
static void *kvrelay_copy_take_(kvrelay_catalog_copy_ *copy, size_t n, size_t size) {
  kvrelay_bump_ b = {copy->arena, copy->used, false};
  void *const room = kvrelay_bump_take_(&b, n, size);
  if (b.overflow || b.used > copy->arena_len)
    return NULL;
  copy->used = b.used;
  return room;
}

static bool kvrelay_copy_pool_(kvrelay_catalog_copy_ *copy, const kvrelay_descriptor *from,
                               kvrelay_descriptor *to) {
  kvrelay_bump_ b = {NULL, copy->used, false}; /* counts only */
  kvrelay_copy_descriptor_(&b, from, to);
  if (b.overflow || b.used > copy->arena_len)
    return false;
  b.base = copy->arena;
  b.used = copy->used;
  kvrelay_copy_descriptor_(&b, from, to);
  copy->used = b.used;
  return true;
}

static bool kvrelay_order_before_(const void *context, const void *a, const void *b) {
  const kvrelay_descriptor *const pools = (const kvrelay_descriptor *)context;
  const kvrelay_pool_id *const x = &pools[*(const uint32_t *)a].producer.pool_id;
  return kvrelay_pool_id_compare(x, &pools[*(const uint32_t *)b].producer.pool_id) < 0;
}

/* Names, then adapters; entries of one text by what their hashing depends on, so that a query
 * hashes once per kind. */
static bool kvrelay_name_before_(const void *context, const void *a, const void *b) {
  const kvrelay_descriptor *const pools = (const kvrelay_descriptor *)context;
  const kvrelay_consumer_name_ *const x = (const kvrelay_consumer_name_ *)a;
  const kvrelay_consumer_name_ *const y = (const kvrelay_consumer_name_ *)b;
  const kvrelay_semantics *const s = &pools[x->pool].query_semantics;
  const kvrelay_semantics *const t = &pools[y->pool].query_semantics;
  const int order = kvrelay_text_compare(x->text, y->text);
  if (x->adapter != y->adapter)
    return y->adapter;
  if (order != 0)
    return order < 0;
  if (s->kv_block_size != t->kv_block_size)
    return s->kv_block_size < t->kv_block_size;
  if (s->hash_format != t->hash_format)
    return s->hash_format < t->hash_format;
  return x->pool < y->pool;
}

static void kvrelay_name_add_(kvrelay_catalog_copy_ *copy, uint32_t pool, kvrelay_text text,
                              bool adapter, const kvrelay_registration *r) {
  kvrelay_consumer_name_ *const name = &copy->names[copy->names_len++];
  name->text = text;
  name->registration = r;
  name->pool = pool;
  name->adapter = adapter;
}

static bool kvrelay_copy_names_(kvrelay_catalog_copy_ *copy) {
  size_t count = 0, k, n;
  uint32_t i;
  for (i = 0; i < copy->pools_len; i++)
    for (k = 0; k < copy->pools[i].registrations_len; k++)
      count += copy->pools[i].registrations[k].aliases_len + 2; /* no more than what was copied */
  copy->names = (kvrelay_consumer_name_ *)kvrelay_copy_take_(copy, count, sizeof *copy->names);
  copy->names_len = 0;
  if (copy->names == NULL)
    return false;
  for (i = 0; i < copy->pools_len; i++) {
    const kvrelay_descriptor *const d = &copy->pools[i];
    if (copy->verdicts[i].class_ != KVRELAY_CLASS_OK)
      continue;
    for (k = 0; k < d->registrations_len; k++) {
      const kvrelay_registration *const r = &d->registrations[k];
      kvrelay_name_add_(copy, i, r->canonical_model_id, false, r);
      for (n = 0; n < r->aliases_len; n++)
        kvrelay_name_add_(copy, i, r->aliases[n], false, r);
      if (r->target.kind == KVRELAY_TARGET_LORA)
        kvrelay_name_add_(copy, i, r->target.adapter, true, r);
    }
  }
  kvrelay_sort_(copy->names, copy->names_len, sizeof *copy->names, kvrelay_name_before_,
                copy->pools);
  return true;
}

static kvrelay_verdict kvrelay_check_key_(const kvrelay_producer *m) {
  if (!m->present)
    return KVRELAY_INVALID_(MISSING_FIELD, "producer", 0);
  if (!m->pool_id.present)
    return KVRELAY_INVALID_(MISSING_FIELD, "pool_id", 0);
  return kvrelay_check_pool_id(&m->pool_id);
}

static const char *const kvrelay_catalog_full_ = "the catalog is larger than its bound";

/* Copies and checks a snapshot. NULL, or why the plane has to be closed. */
static const char *kvrelay_copy_make_(const kvrelay_consumer *c, kvrelay_catalog_copy_ *copy,
                                      const kvrelay_catalog_update *m, kvrelay_verdict *verdict) {
  uint32_t i;
  copy->used = 0;
  copy->pools_len = copy->order_len = 0;
  copy->revision = m->revision;
  if (m->pools_len > c->cfg_.max_pools)
    return kvrelay_catalog_full_;
  copy->pools = (kvrelay_descriptor *)kvrelay_copy_take_(copy, m->pools_len, sizeof *copy->pools);
  copy->verdicts =
      (kvrelay_verdict *)kvrelay_copy_take_(copy, m->pools_len, sizeof *copy->verdicts);
  copy->slots = (uint32_t *)kvrelay_copy_take_(copy, m->pools_len, sizeof *copy->slots);
  copy->order = (uint32_t *)kvrelay_copy_take_(copy, m->pools_len, sizeof *copy->order);
  if (copy->pools == NULL || copy->verdicts == NULL || copy->slots == NULL || copy->order == NULL)
    return kvrelay_catalog_full_;
  copy->pools_len = (uint32_t)m->pools_len;
  for (i = 0; i < copy->pools_len; i++) {
    *verdict = kvrelay_check_key_(&m->pools[i].producer);
    if (verdict->class_ == KVRELAY_CLASS_INVALID)
      return "a pool without a readable id";
    if (verdict->class_ == KVRELAY_CLASS_OK)
      copy->order[copy->order_len++] = i;
    copy->verdicts[i] = kvrelay_check_descriptor(&m->pools[i]);
    copy->slots[i] = KVRELAY_NO_SLOT_;
    if (!kvrelay_copy_pool_(copy, &m->pools[i], &copy->pools[i]))
      return kvrelay_catalog_full_;
  }
  *verdict = KVRELAY_FINE_;
  kvrelay_sort_(copy->order, copy->order_len, sizeof *copy->order, kvrelay_order_before_,
                copy->pools);
  for (i = 1; i < copy->order_len; i++)
    if (!kvrelay_order_before_(copy->pools, &copy->order[i - 1], &copy->order[i]))
      return "a pool is listed twice";
  return kvrelay_copy_names_(copy) ? NULL : kvrelay_catalog_full_;
}

/* ---- catalog: equal content ---- */

static bool kvrelay_digest_same_(const kvrelay_digest *a, const kvrelay_digest *b) {
  return a->present == b->present && a->digest_len == b->digest_len && a->source == b->source &&
         KVRELAY_MEMCMP(a->digest, b->digest, sizeof a->digest) == 0;
}

/* kvrelay_producer_equal is for valid ones. */
static bool kvrelay_producer_same_(const kvrelay_producer *a, const kvrelay_producer *b) {
  const kvrelay_domain *const x = &a->pool_id.domain, *const y = &b->pool_id.domain;
  return a->present == b->present && a->pool_id.present == b->pool_id.present &&
         x->present == y->present && a->ckf_format.present == b->ckf_format.present &&
         kvrelay_digest_same_(&x->cache_semantics, &y->cache_semantics) &&
         kvrelay_digest_same_(&x->routing_scope, &y->routing_scope) && kvrelay_producer_equal(a, b);
}

static bool kvrelay_descriptor_same_(const kvrelay_descriptor *a, const kvrelay_descriptor *b) {
  return kvrelay_producer_same_(&a->producer, &b->producer) && kvrelay_place_same_(a, b) &&
         kvrelay_roles_same_(a->pool_roles, b->pool_roles) && kvrelay_names_same_(a, b);
}

static bool kvrelay_catalog_same_(const kvrelay_catalog_copy_ *a, const kvrelay_catalog_update *b) {
  uint32_t i;
  if (!b->snapshot_present || a->pools_len != b->pools_len)
    return false;
  for (i = 0; i < a->pools_len; i++)
    if (!kvrelay_descriptor_same_(&a->pools[i], &b->pools[i]))
      return false;
  return true;
}

/* ---- catalog: change ---- */

/* The pool of a slot stands at `index` of the next catalog. */
static void kvrelay_slot_carry_(kvrelay_consumer *c, uint32_t slot, uint32_t index,
                                const kvrelay_catalog_copy_ *next) {
  const kvrelay_catalog_copy_ *const old = kvrelay_consumer_now_(c);
  kvrelay_consumer_pool_ *const p = &c->slots_[slot];
  if (old->verdicts[p->index].class_ != KVRELAY_CLASS_OK ||
      next->verdicts[index].class_ != KVRELAY_CLASS_OK ||
      !kvrelay_producer_equal(&old->pools[p->index].producer, &next->pools[index].producer)) {
    kvrelay_slot_release_(c, p);
    kvrelay_slot_reset_(p, index, p->followed);
    return;
  }
  p->index = index;
  p->asked = false; /* was asked under its former index */
  p->wait = KVRELAY_WAIT_NONE_;
  if (p->bar == KVRELAY_BAR_CATALOG_)
    p->bar = KVRELAY_BAR_NONE_;
}

static void kvrelay_catalog_install_(kvrelay_consumer *c, kvrelay_catalog_copy_ *next) {
  kvrelay_catalog_copy_ *const old = &c->catalogs_[c->current_];
  uint32_t i = 0, k = 0;
  while (i < next->order_len && k < old->order_len) {
    const uint32_t to = next->order[i], from = old->order[k];
    const int order = kvrelay_pool_id_compare(&next->pools[to].producer.pool_id,
                                              &old->pools[from].producer.pool_id);
    if (order == 0) {
      next->slots[to] = old->slots[from];
      old->slots[from] = KVRELAY_NO_SLOT_;
      kvrelay_slot_carry_(c, next->slots[to], to, next);
    }
    i += order <= 0;
    k += order >= 0;
  }
  for (k = 0; k < old->pools_len; k++)
    if (old->slots[k] != KVRELAY_NO_SLOT_)
      kvrelay_slot_free_(c, old->slots[k]);
  old->pools_len = old->order_len = 0;
  for (i = 0; i < next->pools_len; i++)
    if (next->slots[i] == KVRELAY_NO_SLOT_) {
      next->slots[i] = kvrelay_slot_take_(c);
      kvrelay_slot_reset_(&c->slots_[next->slots[i]], i, c->cfg_.subscribe_all);
    }
  c->current_ ^= 1;
  c->in_force_ = c->revision_seen_ = true;
  kvrelay_consumer_tell_(c, KVRELAY_EVENT_CATALOG, 0);
  kvrelay_consumer_touch_(c, 0);
}

/* How every message of a plane begins: KVRELAY_ERR_NOT_FOUND when the call is not the plane's, else
 * as kvrelay_consumer_greet_. */
static int kvrelay_plane_hear_(kvrelay_consumer *c, int plane, uint32_t call,
                               const kvrelay_envelope *m) {
  uint32_t slot;
  kvrelay_consumer_stream_ *const s = kvrelay_consumer_find_(c, call, &slot);
  if (s != &c->planes_[plane])
    return KVRELAY_ERR_NOT_FOUND;
  s->heard = true;
  return kvrelay_consumer_greet_(c, m);
}

KVRELAY_API int kvrelay_consumer_feed_info(kvrelay_consumer *c, uint32_t call,
                                           const kvrelay_relay_info *m, uint64_t now_ns) {
  switch (kvrelay_plane_hear_(c, KVRELAY_PLANE_INFO_, call, &m->envelope)) {
  case KVRELAY_ERR_NOT_FOUND:
    return KVRELAY_ERR_NOT_FOUND;
  case KVRELAY_OK:
    c->informed_ = true;
    break;
  case KVRELAY_ERR_MALFORMED:
    kvrelay_consumer_hang_up_(c, &c->planes_[KVRELAY_PLANE_INFO_], now_ns);
    kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
    break;
  default:
    break;
  }
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_consumer_feed_catalog(kvrelay_consumer *c, uint32_t call,
                                              const kvrelay_catalog_update *m, uint64_t now_ns) {
  kvrelay_catalog_copy_ *const next = &c->catalogs_[c->current_ ^ 1];
  const kvrelay_catalog_copy_ *const now = kvrelay_consumer_now_(c);
  kvrelay_verdict verdict = KVRELAY_FINE_;
  const char *trouble;
  const int rc = kvrelay_plane_hear_(c, KVRELAY_PLANE_WATCH_, call, &m->envelope);
  if (rc == KVRELAY_ERR_NOT_FOUND)
    return rc;
  if (rc == KVRELAY_ERR_STATE)
    return KVRELAY_OK;
  if (rc != KVRELAY_OK) {
    verdict = KVRELAY_INVALID_(MISSING_FIELD, "relay", 0);
    trouble = "a catalog without relay";
  } else if (c->revision_seen_ && m->revision < now->revision)
    trouble = "the revision went back";
  else if (c->revision_seen_ && m->revision == now->revision && !kvrelay_catalog_same_(now, m))
    trouble = "another catalog under the same revision";
  else if (!m->snapshot_present) {
    verdict = KVRELAY_INVALID_(MISSING_FIELD, "snapshot", 0);
    trouble = "a catalog without snapshot";
  } else
    trouble = kvrelay_copy_make_(c, next, m, &verdict);
  if (trouble != NULL)
    kvrelay_plane_refuse_(c, KVRELAY_PLANE_WATCH_, &verdict, trouble, now_ns);
  else {
    kvrelay_catalog_install_(c, next);
    c->catalog_ns_ = now_ns;
  }
  return KVRELAY_OK;
}

/* ---- readiness ---- */

/* Copies an entry with all it points to; with a counting bump only the size counts. */
static void kvrelay_copy_entry_(kvrelay_bump_ *b, const kvrelay_topology_entry *from,
                                kvrelay_topology_entry *to) {
  kvrelay_topology_member *members;
  kvrelay_adapter_readiness *adapters;
  size_t i;
  *to = *from;
  to->namespace_ = kvrelay_copy_text_(b, from->namespace_);
  to->canonical_model_id = kvrelay_copy_text_(b, from->canonical_model_id);
  to->present_roles = kvrelay_copy_roles_(b, from->present_roles);
  to->missing_roles = kvrelay_copy_roles_(b, from->missing_roles);
  to->duplicate_role_endpoints = kvrelay_copy_roles_(b, from->duplicate_role_endpoints);
  members = (kvrelay_topology_member *)kvrelay_bump_take_(b, from->members_len, sizeof *members);
  to->members = members;
  for (i = 0; i < from->members_len; i++) {
    kvrelay_topology_member m = from->members[i];
    m.endpoint.namespace_ = kvrelay_copy_text_(b, m.endpoint.namespace_);
    m.endpoint.component = kvrelay_copy_text_(b, m.endpoint.component);
    m.endpoint.endpoint = kvrelay_copy_text_(b, m.endpoint.endpoint);
    m.roles = kvrelay_copy_roles_(b, m.roles);
    if (members != NULL)
      members[i] = m;
  }
  adapters =
      (kvrelay_adapter_readiness *)kvrelay_bump_take_(b, from->adapters_len, sizeof *adapters);
  to->adapters = adapters;
  for (i = 0; i < from->adapters_len; i++) {
    kvrelay_adapter_readiness a = from->adapters[i];
    a.canonical_model_id = kvrelay_copy_text_(b, a.canonical_model_id);
    a.missing_roles = kvrelay_copy_roles_(b, a.missing_roles);
    if (adapters != NULL)
      adapters[i] = a;
  }
}

static int kvrelay_entry_compare_(const kvrelay_topology_entry *e, kvrelay_text namespace_,
                                  kvrelay_text id) {
  const int order = kvrelay_text_compare(e->namespace_, namespace_);
  return order != 0 ? order : kvrelay_text_compare(e->canonical_model_id, id);
}

static bool kvrelay_entry_before_(const void *context, const void *a, const void *b) {
  const kvrelay_topology_entry *const entries = (const kvrelay_topology_entry *)context;
  const kvrelay_topology_entry *const y = &entries[*(const uint32_t *)b];
  return kvrelay_entry_compare_(&entries[*(const uint32_t *)a], y->namespace_,
                                y->canonical_model_id) < 0;
}

static void kvrelay_readiness_lists_(kvrelay_bump_ *b, kvrelay_readiness_copy_ *copy, size_t len) {
  copy->entries = (kvrelay_topology_entry *)kvrelay_bump_take_(b, len, sizeof *copy->entries);
  copy->verdicts = (kvrelay_verdict *)kvrelay_bump_take_(b, len, sizeof *copy->verdicts);
  copy->order = (uint32_t *)kvrelay_bump_take_(b, len, sizeof *copy->order);
}

/* Checks an image and copies it over the former one. NULL, or why the plane has to be closed; then
 * nothing is in force any more. */
static const char *kvrelay_readiness_make_(kvrelay_readiness_copy_ *copy,
                                           const kvrelay_readiness_update *m,
                                           kvrelay_verdict *verdict) {
  kvrelay_bump_ b = {NULL, 0, false}; /* counts only */
  kvrelay_topology_entry counted;
  uint32_t i;
  for (i = 0; i < m->entries_len; i++)
    if (!kvrelay_text_valid(m->entries[i].namespace_) ||
        !kvrelay_text_valid(m->entries[i].canonical_model_id)) {
      *verdict = kvrelay_check_topology_entry(&m->entries[i]);
      return "an entry without a readable key";
    }
  kvrelay_readiness_lists_(&b, copy, m->entries_len);
  for (i = 0; i < m->entries_len && b.used <= copy->arena_len && !b.overflow; i++)
    kvrelay_copy_entry_(&b, &m->entries[i], &counted);
  if (b.overflow || b.used > copy->arena_len)
    return "the readiness image is larger than its bound";
  b.base = copy->arena;
  b.used = 0;
  kvrelay_readiness_lists_(&b, copy, m->entries_len);
  copy->len = (uint32_t)m->entries_len;
  for (i = 0; i < copy->len; i++) {
    kvrelay_copy_entry_(&b, &m->entries[i], &copy->entries[i]);
    copy->verdicts[i] = kvrelay_check_topology_entry(&m->entries[i]);
    copy->order[i] = i;
  }
  kvrelay_sort_(copy->order, copy->len, sizeof *copy->order, kvrelay_entry_before_, copy->entries);
  for (i = 1; i < copy->len; i++)
    if (!kvrelay_entry_before_(copy->entries, &copy->order[i - 1], &copy->order[i]))
      return "an entry is listed twice";
  return NULL;
}

KVRELAY_API int kvrelay_consumer_feed_readiness(kvrelay_consumer *c, uint32_t call,
                                                const kvrelay_readiness_update *m,
                                                uint64_t now_ns) {
  kvrelay_readiness_copy_ *const copy = &c->readiness_;
  kvrelay_verdict verdict = KVRELAY_FINE_;
  const char *trouble = NULL;
  uint8_t digest[32];
  bool repeated;
  const int rc = kvrelay_plane_hear_(c, KVRELAY_PLANE_READINESS_, call, &m->envelope);
  if (rc == KVRELAY_ERR_NOT_FOUND)
    return rc;
  if (rc == KVRELAY_ERR_STATE)
    return KVRELAY_OK;
  kvrelay_entries_digest_(m->entries, m->entries_len, digest);
  repeated = copy->in_force && m->revision == copy->revision;
  if (rc != KVRELAY_OK) {
    verdict = KVRELAY_INVALID_(MISSING_FIELD, "relay", 0);
    trouble = "readiness without relay";
  } else if (copy->in_force && m->revision < copy->revision)
    trouble = "the revision went back";
  else if (repeated && KVRELAY_MEMCMP(digest, copy->digest, sizeof digest) != 0)
    trouble = "other readiness under the same revision";
  else if (!repeated)
    trouble = kvrelay_readiness_make_(copy, m, &verdict);
  if (trouble != NULL) {
    kvrelay_plane_refuse_(c, KVRELAY_PLANE_READINESS_, &verdict, trouble, now_ns);
    return KVRELAY_OK;
  }
  copy->received_ns = now_ns;
  if (repeated)
    return KVRELAY_OK;
  copy->in_force = true;
  copy->revision = m->revision;
  KVRELAY_MEMCPY(copy->digest, digest, sizeof digest);
  kvrelay_consumer_tell_(c, KVRELAY_EVENT_READINESS, 0);
  return KVRELAY_OK;
}

/* ---- load ---- */

static int kvrelay_producer_compare_(const kvrelay_producer *a, const kvrelay_producer *b) {
  int order = kvrelay_pool_id_compare(&a->pool_id, &b->pool_id);
  if (order == 0)
    order = kvrelay_u64_compare_(a->producer_incarnation, b->producer_incarnation);
  if (order == 0)
    order = kvrelay_u64_compare_(a->layout_generation, b->layout_generation);
  if (order == 0)
    order = kvrelay_u64_compare_(a->ckf_format.seed, b->ckf_format.seed);
  return order != 0 ? order
                    : kvrelay_u64_compare_(a->ckf_format.bucket_count, b->ckf_format.bucket_count);
}

static bool kvrelay_held_before_(const void *context, const void *a, const void *b) {
  const kvrelay_load_held_ *const x = (const kvrelay_load_held_ *)a;
  const kvrelay_load_held_ *const y = (const kvrelay_load_held_ *)b;
  const bool x_odd = x->verdict.class_ != KVRELAY_CLASS_OK,
             y_odd = y->verdict.class_ != KVRELAY_CLASS_OK;
  (void)context;
  if (x_odd || y_odd)
    return y_odd && !x_odd;
  return kvrelay_producer_compare_(&x->entry.producer, &y->entry.producer) < 0;
}

/* As kvrelay_readiness_make_. */
static const char *kvrelay_load_make_(const kvrelay_consumer *c, kvrelay_load_copy_ *copy,
                                      const kvrelay_load_update *m, kvrelay_verdict *verdict) {
  uint32_t i;
  if (m->pools_len > c->cfg_.max_pools)
    return "the load window is larger than its bound";
  for (i = 0; i < m->pools_len; i++) {
    kvrelay_load_held_ *const held = &copy->held[i];
    held->entry = m->pools[i];
    held->verdict = m->pools[i].producer.present ? kvrelay_check_producer(&m->pools[i].producer)
                                                 : KVRELAY_INVALID_(MISSING_FIELD, "producer", i);
    if (held->verdict.class_ == KVRELAY_CLASS_INVALID) {
      *verdict = held->verdict;
      return "load of a malformed producer";
    }
  }
  copy->len = (uint32_t)m->pools_len;
  kvrelay_sort_(copy->held, copy->len, sizeof *copy->held, kvrelay_held_before_, NULL);
  for (i = 1; i < copy->len && copy->held[i].verdict.class_ == KVRELAY_CLASS_OK; i++)
    if (!kvrelay_held_before_(NULL, &copy->held[i - 1], &copy->held[i]))
      return "the load of a producer is listed twice";
  return NULL;
}

KVRELAY_API int kvrelay_consumer_feed_load(kvrelay_consumer *c, uint32_t call,
                                           const kvrelay_load_update *m, uint64_t now_ns) {
  kvrelay_load_copy_ *const copy = &c->load_;
  kvrelay_verdict verdict = KVRELAY_FINE_;
  const char *trouble;
  const int rc = kvrelay_plane_hear_(c, KVRELAY_PLANE_LOAD_, call, &m->envelope);
  if (rc == KVRELAY_ERR_NOT_FOUND)
    return rc;
  if (rc == KVRELAY_ERR_STATE)
    return KVRELAY_OK;
  if (rc != KVRELAY_OK) {
    verdict = KVRELAY_INVALID_(MISSING_FIELD, "relay", 0);
    trouble = "load without relay";
  } else if (copy->in_force && m->window_sequence <= copy->window)
    trouble = "the load window is not a later one";
  else
    trouble = kvrelay_load_make_(c, copy, m, &verdict);
  if (trouble != NULL) {
    kvrelay_plane_refuse_(c, KVRELAY_PLANE_LOAD_, &verdict, trouble, now_ns);
    return KVRELAY_OK;
  }
  if (!copy->in_force)
    kvrelay_consumer_tell_(c, KVRELAY_EVENT_LOAD, 0);
  copy->in_force = true;
  copy->window = m->window_sequence;
  copy->observed_ms = m->observed_ms;
  copy->window_ms = m->window_ms;
  copy->received_ns = now_ns;
  return KVRELAY_OK;
}

/* ---- filter streams ---- */

/* A snapshot chunk or delta behind the envelope's own checks. */
static int32_t kvrelay_filter_frame_(const kvrelay_consumer *c, kvrelay_consumer_pool_ *p,
                                     const kvrelay_filter_update *m, int *code) {
  const bool chunk = m->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK;
  const bool live = ckf_replica_live(&p->replica);
  const ckf_format format = kvrelay_slot_format_(c, p);
  ckf_cbi1_frame frame;
  *code = ckf_cbi1_decode(&format, m->payload, m->payload_len, &frame);
  if (*code != CKF_OK)
    return KVRELAY_FAULT_FRAME;
  if ((frame.kind == CKF_CBI1_SNAPSHOT) != chunk || frame.dc_id != m->producer.pool_id.dc_id ||
      frame.epoch != m->sequence)
    return KVRELAY_FAULT_HEADER;
  if (chunk == live)
    return KVRELAY_FAULT_ORDER;
  if (chunk ? m->base_sequence != m->sequence || (p->cut_known && p->cut != m->sequence)
            : m->base_sequence != frame.base_epoch)
    return KVRELAY_FAULT_SEQUENCE;
  *code = ckf_replica_apply(&p->replica, &frame);
  if (*code < 0)
    return *code == CKF_ERR_SEQUENCE         ? KVRELAY_FAULT_SEQUENCE
           : *code == CKF_ERR_CHUNK_SEQUENCE ? KVRELAY_FAULT_ORDER
                                             : KVRELAY_FAULT_FRAME;
  *code = 0;
  p->cut = m->sequence;
  p->cut_known = true;
  p->deltas += !chunk;
  p->snapshots += chunk && ckf_replica_live(&p->replica);
  return KVRELAY_FAULT_NONE;
}

static int32_t kvrelay_filter_check_(const kvrelay_consumer *c, kvrelay_consumer_pool_ *p,
                                     const kvrelay_filter_update *m, int *code) {
  const kvrelay_descriptor *const d = &kvrelay_consumer_now_(c)->pools[p->index];
  if (!m->producer.present || kvrelay_check_producer(&m->producer).class_ != KVRELAY_CLASS_OK ||
      !kvrelay_producer_equal(&m->producer, &d->producer))
    return KVRELAY_FAULT_PRODUCER;
  switch (m->kind) {
  case KVRELAY_UPDATE_SNAPSHOT_CHUNK:
  case KVRELAY_UPDATE_DELTA:
    return kvrelay_filter_frame_(c, p, m, code);
  case KVRELAY_UPDATE_HEARTBEAT:
    if (m->payload_len != 0)
      return KVRELAY_FAULT_FRAME;
    if (!ckf_replica_live(&p->replica))
      return KVRELAY_FAULT_ORDER;
    if (m->base_sequence != m->sequence || m->sequence != ckf_replica_sequence(&p->replica))
      return KVRELAY_FAULT_SEQUENCE;
    p->heartbeats++;
    return KVRELAY_FAULT_NONE;
  default:
    return KVRELAY_FAULT_KIND;
  }
}

/* We close a filter stream because of what it brought. */
static void kvrelay_slot_refuse_(kvrelay_consumer *c, uint32_t slot, int32_t fault, int code,
                                 uint64_t now_ns) {
  kvrelay_consumer_pool_ *const p = &c->slots_[slot];
  kvrelay_slot_void_(c, p, fault, code, NULL);
  kvrelay_consumer_hang_up_(c, &p->stream, now_ns);
  kvrelay_consumer_touch_(c, slot);
}

KVRELAY_API int kvrelay_consumer_feed_filter(kvrelay_consumer *c, uint32_t call,
                                             const kvrelay_filter_update *m, uint64_t now_ns) {
  uint32_t slot, index;
  kvrelay_consumer_stream_ *const s = kvrelay_consumer_find_(c, call, &slot);
  kvrelay_consumer_pool_ *p;
  int32_t fault;
  int code = 0, rc;
  bool live;
  if (s == NULL || slot == KVRELAY_NO_SLOT_)
    return KVRELAY_ERR_NOT_FOUND;
  p = &c->slots_[slot];
  index = p->index;
  s->heard = true;
  rc = kvrelay_consumer_greet_(c, &m->envelope);
  if (rc == KVRELAY_ERR_STATE) { /* the slot is gone */
    kvrelay_consumer_tell_(c, KVRELAY_EVENT_POOL_VOID, index)->fault =
        c->stopped_ ? KVRELAY_FAULT_ENVELOPE : KVRELAY_FAULT_RELAY;
    return KVRELAY_OK;
  }
  live = ckf_replica_live(&p->replica);
  fault = rc == KVRELAY_OK ? kvrelay_filter_check_(c, p, m, &code) : (int32_t)KVRELAY_FAULT_RELAY;
  if (fault != KVRELAY_FAULT_NONE) {
    kvrelay_slot_refuse_(c, slot, fault, code, now_ns);
    return KVRELAY_OK;
  }
  p->frames++;
  p->last_frame_ns = now_ns;
  if (!live && ckf_replica_live(&p->replica))
    kvrelay_consumer_tell_(c, KVRELAY_EVENT_POOL_LIVE, index);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_consumer_replica_give(kvrelay_consumer *c, uint32_t pool, void *mem,
                                              size_t len, uint64_t now_ns) {
  const kvrelay_catalog_copy_ *const now = kvrelay_consumer_now_(c);
  kvrelay_consumer_pool_ *p;
  ckf_format format;
  if (!c->in_force_ || pool >= now->pools_len)
    return KVRELAY_ERR_NOT_FOUND;
  p = &c->slots_[now->slots[pool]];
  if (!p->asked)
    return KVRELAY_ERR_STATE;
  if (mem != NULL) {
    format = kvrelay_slot_format_(c, p);
    if (ckf_replica_init(&p->replica, &format, mem, len) != CKF_OK)
      return KVRELAY_ERR_NOSPACE;
    p->mem = mem;
  } else
    kvrelay_consumer_backoff_(c, &p->stream, now_ns);
  p->asked = false;
  kvrelay_consumer_touch_(c, now->slots[pool]);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_consumer_follow(kvrelay_consumer *c, uint32_t pool, bool follow,
                                        uint64_t now_ns) {
  const kvrelay_catalog_copy_ *const now = kvrelay_consumer_now_(c);
  kvrelay_consumer_pool_ *p;
  (void)now_ns;
  if (!c->in_force_ || pool >= now->pools_len)
    return KVRELAY_ERR_NOT_FOUND;
  p = &c->slots_[now->slots[pool]];
  if (!follow && p->followed) {
    kvrelay_slot_release_(c, p);
    kvrelay_slot_reset_(p, pool, false);
  }
  p->followed = follow;
  kvrelay_consumer_touch_(c, now->slots[pool]);
  return KVRELAY_OK;
}

/* ---- ends ---- */

KVRELAY_API int kvrelay_consumer_feed_broken(kvrelay_consumer *c, uint32_t call, int err,
                                             uint64_t now_ns) {
  uint32_t slot;
  kvrelay_consumer_stream_ *const s = kvrelay_consumer_find_(c, call, &slot);
  if (s == NULL)
    return KVRELAY_ERR_NOT_FOUND;
  if (slot != KVRELAY_NO_SLOT_)
    kvrelay_slot_refuse_(c, slot, KVRELAY_FAULT_DECODE, err, now_ns);
  else if (s != &c->planes_[KVRELAY_PLANE_INFO_])
    kvrelay_plane_refuse_(c, (int)(s - c->planes_), NULL, kvrelay_strerror(err), now_ns);
  else {
    kvrelay_consumer_hang_up_(c, s, now_ns);
    kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
  }
  return KVRELAY_OK;
}

enum {
  KVRELAY_THEN_RETRY_ = 0,
  KVRELAY_THEN_RETRY_LATE_,  /* at the longest backoff */
  KVRELAY_THEN_CATALOG_,     /* after a newer catalog */
  KVRELAY_THEN_IDENTITY_,    /* after fresh info and catalog */
  KVRELAY_THEN_BAR_CATALOG_, /* not before the catalog changes */
  KVRELAY_THEN_BAR_,         /* not the same request again */
  KVRELAY_THEN_STOP_
};

/* Contract 15.5. */
static int kvrelay_end_policy_(const kvrelay_status *status, bool heard) {
  switch (status->reason) {
  case KVRELAY_REASON_CONTRACT_MISMATCH:
    return KVRELAY_THEN_STOP_;
  case KVRELAY_REASON_INVALID_REQUEST:
    return KVRELAY_THEN_BAR_;
  case KVRELAY_REASON_UNSUPPORTED_FEATURE:
    return KVRELAY_THEN_BAR_CATALOG_;
  case KVRELAY_REASON_POOL_NOT_FOUND:
  case KVRELAY_REASON_PRODUCER_CHANGED:
  case KVRELAY_REASON_INVALID_PUBLICATION:
    return KVRELAY_THEN_CATALOG_;
  case KVRELAY_REASON_NONE:
    break;
  default:
    return KVRELAY_THEN_RETRY_;
  }
  if (status->grpc == KVRELAY_GRPC_FAILED_PRECONDITION)
    return KVRELAY_THEN_IDENTITY_;
  if (!heard &&
      (status->grpc == KVRELAY_GRPC_INTERNAL || status->grpc == KVRELAY_GRPC_OUT_OF_RANGE ||
       status->grpc == KVRELAY_GRPC_UNIMPLEMENTED))
    return KVRELAY_THEN_RETRY_LATE_; /* the fault is probably in our request */
  return KVRELAY_THEN_RETRY_;
}

static void kvrelay_slot_end_(kvrelay_consumer *c, uint32_t slot, int policy,
                              const kvrelay_status *status, uint64_t now_ns) {
  kvrelay_consumer_pool_ *const p = &c->slots_[slot];
  kvrelay_slot_void_(c, p, KVRELAY_FAULT_NONE, 0, status);
  switch (policy) {
  case KVRELAY_THEN_CATALOG_:
    p->wait = KVRELAY_WAIT_CATALOG_;
    break;
  case KVRELAY_THEN_IDENTITY_:
    p->wait = KVRELAY_WAIT_ASKED_;
    c->informed_ = false;
    kvrelay_watch_reopen_(c, now_ns);
    break;
  case KVRELAY_THEN_BAR_CATALOG_:
  case KVRELAY_THEN_BAR_:
    p->bar = policy == KVRELAY_THEN_BAR_ ? KVRELAY_BAR_PRODUCER_ : KVRELAY_BAR_CATALOG_;
    kvrelay_slot_release_(c, p);
    break;
  default:
    break;
  }
  kvrelay_consumer_touch_(c, slot);
}

KVRELAY_API int kvrelay_consumer_feed_end(kvrelay_consumer *c, uint32_t call,
                                          const kvrelay_status *status, uint64_t now_ns) {
  uint32_t slot;
  kvrelay_consumer_stream_ *const s = kvrelay_consumer_find_(c, call, &slot);
  int policy;
  if (s == NULL)
    return KVRELAY_ERR_NOT_FOUND;
  policy = kvrelay_end_policy_(status, s->heard);
  kvrelay_consumer_over_(c, s, now_ns);
  if (s == &c->planes_[KVRELAY_PLANE_INFO_] && c->informed_)
    return KVRELAY_OK; /* as it should be */
  if (policy == KVRELAY_THEN_STOP_) {
    kvrelay_consumer_stop_(c, NULL, status);
    return KVRELAY_OK;
  }
  if (policy == KVRELAY_THEN_RETRY_LATE_)
    s->failures = 64; /* more doublings than a number of nanoseconds takes */
  kvrelay_consumer_backoff_(c, s, now_ns);
  if (status->retry_ns == KVRELAY_TIME_NONE)
    policy = KVRELAY_THEN_BAR_;
  else if (status->retry_ns != 0)
    kvrelay_consumer_retry_in_(s, status->retry_ns, now_ns);
  if (slot != KVRELAY_NO_SLOT_) {
    kvrelay_slot_end_(c, slot, policy, status, now_ns);
    return KVRELAY_OK;
  }
  if (policy == KVRELAY_THEN_BAR_ ||
      (s >= &c->planes_[KVRELAY_PLANE_READINESS_] && status->grpc == KVRELAY_GRPC_UNIMPLEMENTED))
    s->retry_ns = KVRELAY_TIME_NONE; /* an older relay does not offer every plane */
  if (s != &c->planes_[KVRELAY_PLANE_INFO_]) {
    kvrelay_plane_void_(c, (int)(s - c->planes_), NULL, status);
    if (policy == KVRELAY_THEN_IDENTITY_)
      c->informed_ = false;
    if (policy == KVRELAY_THEN_IDENTITY_ && s != &c->planes_[KVRELAY_PLANE_WATCH_])
      kvrelay_watch_reopen_(c, now_ns);
  }
  kvrelay_consumer_touch_(c, KVRELAY_NO_SLOT_);
  return KVRELAY_OK;
}

/* ---- views ---- */

KVRELAY_API bool kvrelay_consumer_relay(const kvrelay_consumer *c, kvrelay_relay_identity *out) {
  if (c->relay_known_)
    *out = c->relay_;
  return c->relay_known_;
}

KVRELAY_API bool kvrelay_consumer_catalog(const kvrelay_consumer *c, uint64_t *revision,
                                          uint32_t *pools) {
  if (!c->in_force_)
    return false;
  *revision = kvrelay_consumer_now_(c)->revision;
  *pools = kvrelay_consumer_now_(c)->pools_len;
  return true;
}

/* A time of the future is as bad as none. */
static uint64_t kvrelay_age_(uint64_t since_ns, uint64_t now_ns) {
  return since_ns > now_ns ? KVRELAY_TIME_NONE : now_ns - since_ns;
}

static bool kvrelay_slot_stale_(const kvrelay_consumer *c, const kvrelay_consumer_pool_ *p,
                                uint64_t now_ns) {
  return ckf_replica_live(&p->replica) &&
         kvrelay_age_(p->last_frame_ns, now_ns) > c->cfg_.filter_stale_ns;
}

static int32_t kvrelay_slot_state_(const kvrelay_consumer *c, const kvrelay_consumer_pool_ *p) {
  if (!kvrelay_slot_usable_(c, p))
    return KVRELAY_REPLICA_QUARANTINED;
  if (!p->followed)
    return KVRELAY_REPLICA_IDLE;
  if (ckf_replica_live(&p->replica))
    return KVRELAY_REPLICA_LIVE;
  if (p->stream.call == 0)
    return KVRELAY_REPLICA_WAITING;
  return p->cut_known ? KVRELAY_REPLICA_ASSEMBLING : KVRELAY_REPLICA_SUBSCRIBING;
}

KVRELAY_API bool kvrelay_consumer_readiness(const kvrelay_consumer *c, uint64_t now_ns,
                                            kvrelay_plane_view *out) {
  const kvrelay_readiness_copy_ *const copy = &c->readiness_;
  KVRELAY_MEMSET(out, 0, sizeof *out);
  out->age_ns = KVRELAY_TIME_NONE;
  if (!copy->in_force)
    return false;
  out->revision = copy->revision;
  out->len = copy->len;
  out->age_ns = kvrelay_age_(copy->received_ns, now_ns);
  out->stale = out->age_ns > c->cfg_.readiness_stale_ns;
  return true;
}

KVRELAY_API bool kvrelay_consumer_load(const kvrelay_consumer *c, uint64_t now_ns,
                                       kvrelay_plane_view *out) {
  const kvrelay_load_copy_ *const copy = &c->load_;
  const uint64_t three_ms = 3 * (uint64_t)KVRELAY_MS_;
  const uint64_t windows_ns = copy->window_ms < KVRELAY_TIME_NONE / three_ms
                                  ? three_ms * copy->window_ms
                                  : KVRELAY_TIME_NONE - 1;
  KVRELAY_MEMSET(out, 0, sizeof *out);
  out->age_ns = KVRELAY_TIME_NONE;
  if (!copy->in_force)
    return false;
  out->revision = copy->window;
  out->len = copy->len;
  out->age_ns = kvrelay_age_(copy->received_ns, now_ns);
  out->observed_ms = copy->observed_ms;
  out->window_ms = copy->window_ms;
  out->stale = out->age_ns > c->cfg_.load_stale_ns && out->age_ns > windows_ns;
  return true;
}

KVRELAY_API int kvrelay_consumer_readiness_get(const kvrelay_consumer *c, uint32_t i,
                                               kvrelay_entry_view *out) {
  if (!c->readiness_.in_force || i >= c->readiness_.len)
    return KVRELAY_ERR_NOT_FOUND;
  out->entry = &c->readiness_.entries[i];
  out->verdict = c->readiness_.verdicts[i];
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_consumer_load_get(const kvrelay_consumer *c, uint32_t i,
                                          kvrelay_load_view *out) {
  const kvrelay_load_held_ *const held = &c->load_.held[i];
  if (!c->load_.in_force || i >= c->load_.len)
    return KVRELAY_ERR_NOT_FOUND;
  out->entry = &held->entry;
  out->verdict = held->verdict;
  out->usable = held->verdict.class_ == KVRELAY_CLASS_OK && held->entry.total_kv_blocks != 0 &&
                held->entry.kv_observed_ranks >= held->entry.kv_expected_ranks &&
                held->entry.kv_expected_ranks != 0;
  return KVRELAY_OK;
}

/* The usable entry of a model, NULL when there is none. */
static const kvrelay_topology_entry *kvrelay_readiness_find_(const kvrelay_readiness_copy_ *copy,
                                                             kvrelay_text namespace_,
                                                             kvrelay_text id) {
  uint32_t low = 0, high = copy->len;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2, at = copy->order[middle];
    const int order = kvrelay_entry_compare_(&copy->entries[at], namespace_, id);
    if (order == 0)
      return copy->verdicts[at].class_ == KVRELAY_CLASS_OK ? &copy->entries[at] : NULL;
    if (order < 0)
      low = middle + 1;
    else
      high = middle;
  }
  return NULL;
}

/* Readiness of what a registration names, from the entry of its base model. */
static int32_t kvrelay_readiness_of_(const kvrelay_topology_entry *entry,
                                     const kvrelay_registration *r) {
  size_t i;
  if (r->target.kind == KVRELAY_TARGET_BASE)
    return entry->state;
  for (i = 0; i < entry->adapters_len; i++)
    if (kvrelay_text_equal(entry->adapters[i].canonical_model_id, r->canonical_model_id))
      return entry->adapters[i].state;
  return KVRELAY_READY_UNKNOWN;
}

static void kvrelay_load_of_(const kvrelay_consumer *c, const kvrelay_producer *producer,
                             kvrelay_serving_view *out) {
  uint32_t low = 0, high = c->load_.len;
  kvrelay_load_held_ key;
  kvrelay_load_view view;
  key.entry.producer = *producer;
  key.verdict = KVRELAY_FINE_;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (kvrelay_held_before_(NULL, &c->load_.held[middle], &key))
      low = middle + 1;
    else
      high = middle;
  }
  if (kvrelay_consumer_load_get(c, low, &view) != KVRELAY_OK || !view.usable ||
      !kvrelay_producer_equal(&view.entry->producer, producer))
    return;
  out->load_known = true;
  out->kv_used_blocks = view.entry->kv_used_blocks;
  out->total_kv_blocks = view.entry->total_kv_blocks;
}

/* What the other planes say of a pool, for one of its registrations; NULL = its base model. */
static kvrelay_serving_view kvrelay_serving_view_(const kvrelay_consumer *c, uint32_t pool,
                                                  const kvrelay_registration *r, uint64_t now_ns) {
  const kvrelay_descriptor *const d = &kvrelay_consumer_now_(c)->pools[pool];
  kvrelay_serving_view out;
  kvrelay_plane_view plane;
  size_t i;
  KVRELAY_MEMSET(&out, 0, sizeof out);
  for (i = 0; r == NULL && i < d->registrations_len; i++)
    if (d->registrations[i].target.kind == KVRELAY_TARGET_BASE)
      r = &d->registrations[i];
  if (kvrelay_consumer_readiness(c, now_ns, &plane) && !plane.stale && r != NULL)
    out.entry = kvrelay_readiness_find_(&c->readiness_, d->serving_endpoint.namespace_,
                                        r->target.base_model);
  out.readiness_age_ns = plane.age_ns;
  if (out.entry != NULL)
    out.readiness = kvrelay_readiness_of_(out.entry, r);
  if (kvrelay_consumer_load(c, now_ns, &plane) && !plane.stale &&
      kvrelay_consumer_now_(c)->verdicts[pool].class_ == KVRELAY_CLASS_OK)
    kvrelay_load_of_(c, &d->producer, &out);
  out.load_age_ns = plane.age_ns;
  return out;
}

KVRELAY_API int kvrelay_consumer_pool_get(const kvrelay_consumer *c, uint32_t i, uint64_t now_ns,
                                          kvrelay_pool_view *out) {
  const kvrelay_catalog_copy_ *const now = kvrelay_consumer_now_(c);
  const kvrelay_consumer_pool_ *p;
  if (!c->in_force_ || i >= now->pools_len)
    return KVRELAY_ERR_NOT_FOUND;
  p = &c->slots_[now->slots[i]];
  out->descriptor = &now->pools[i];
  out->verdict = now->verdicts[i];
  out->state = kvrelay_slot_state_(c, p);
  out->sequence = ckf_replica_live(&p->replica) ? ckf_replica_sequence(&p->replica) : 0;
  out->last_frame_ns = p->last_frame_ns;
  out->stale = kvrelay_slot_stale_(c, p, now_ns);
  out->frames = p->frames;
  out->snapshots = p->snapshots;
  out->deltas = p->deltas;
  out->heartbeats = p->heartbeats;
  out->fault = p->fault;
  out->fault_code = p->fault_code;
  out->last_end = p->last_end;
  out->retry_ns =
      out->state == KVRELAY_REPLICA_WAITING && !p->asked && p->wait != KVRELAY_WAIT_ASKED_
          ? p->stream.retry_ns
          : KVRELAY_TIME_NONE;
  out->words = ckf_replica_words(&p->replica);
  out->serving = kvrelay_serving_view_(c, i, NULL, now_ns);
  return KVRELAY_OK;
}

static void kvrelay_pool_condition_(const kvrelay_pool_view *v, uint64_t now_ns,
                                    kvrelay_plane_condition *out) {
  static const int32_t states[] = {KVRELAY_PLANE_UNKNOWN, KVRELAY_PLANE_UNKNOWN,
                                   KVRELAY_PLANE_UNKNOWN, KVRELAY_PLANE_ASSEMBLING,
                                   KVRELAY_PLANE_LIVE,    KVRELAY_PLANE_QUARANTINED};
  out->state = v->stale ? KVRELAY_PLANE_STALE : states[v->state];
  out->age_ns = kvrelay_age_(v->last_frame_ns, now_ns);
  out->retry_ns = v->retry_ns;
}

KVRELAY_API int kvrelay_consumer_plane(const kvrelay_consumer *c, int32_t method, uint32_t i,
                                       uint64_t now_ns, kvrelay_plane_condition *out) {
  const kvrelay_consumer_stream_ *s;
  kvrelay_plane_view image;
  kvrelay_pool_view pool;
  bool known;
  if (method == KVRELAY_METHOD_SUBSCRIBE_POOL) {
    const int rc = kvrelay_consumer_pool_get(c, i, now_ns, &pool);
    if (rc == KVRELAY_OK)
      kvrelay_pool_condition_(&pool, now_ns, out);
    return rc;
  }
  switch (method) {
  case KVRELAY_METHOD_WATCH_CATALOG:
    s = &c->planes_[KVRELAY_PLANE_WATCH_];
    known = c->in_force_;
    image.age_ns = known ? kvrelay_age_(c->catalog_ns_, now_ns) : KVRELAY_TIME_NONE;
    image.stale = !c->revision_seen_;
    break;
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    s = &c->planes_[KVRELAY_PLANE_READINESS_];
    known = kvrelay_consumer_readiness(c, now_ns, &image);
    break;
  case KVRELAY_METHOD_SUBSCRIBE_LOAD:
    s = &c->planes_[KVRELAY_PLANE_LOAD_];
    known = kvrelay_consumer_load(c, now_ns, &image);
    break;
  default:
    return KVRELAY_ERR_NOT_FOUND;
  }
  out->age_ns = image.age_ns;
  out->retry_ns = c->connected_ && s->call == 0 ? s->retry_ns : KVRELAY_TIME_NONE;
  if (known)
    out->state = image.stale ? KVRELAY_PLANE_STALE : KVRELAY_PLANE_LIVE;
  else
    out->state = c->connected_ && s->call == 0 && s->retry_ns == KVRELAY_TIME_NONE
                     ? KVRELAY_PLANE_QUARANTINED
                     : KVRELAY_PLANE_UNKNOWN;
  return KVRELAY_OK;
}

/* ---- query ---- */

/* Entries of the name index that answer a query. */
typedef struct kvrelay_run_ {
  const kvrelay_consumer_name_ *next, *end;
  const kvrelay_target *target; /* of all of them */
  const kvrelay_text *id; /* canonical, of all of them; NULL: an adapter by its runtime name */
  uint64_t last;          /* pool given last, UINT64_MAX = none */
} kvrelay_run_;

/* All entries of one text; false when there are none. */
static bool kvrelay_run_find_(const kvrelay_catalog_copy_ *copy, kvrelay_text text, bool adapter,
                              kvrelay_run_ *run) {
  size_t from = 0, to = copy->names_len;
  const kvrelay_consumer_name_ *const end = copy->names + to;
  while (from < to) {
    const size_t middle = from + (to - from) / 2;
    const kvrelay_consumer_name_ *const name = &copy->names[middle];
    if (name->adapter != adapter ? adapter : kvrelay_text_compare(name->text, text) < 0)
      from = middle + 1;
    else
      to = middle;
  }
  run->next = run->end = copy->names + from;
  while (run->end < end && run->end->adapter == adapter && kvrelay_text_equal(run->end->text, text))
    run->end++;
  run->last = UINT64_MAX;
  run->id = NULL;
  return run->next < run->end;
}

/* All entries of a name, which must stand for one binding. */
static int kvrelay_run_name_(const kvrelay_catalog_copy_ *copy, kvrelay_text text,
                             kvrelay_run_ *run) {
  const kvrelay_consumer_name_ *name;
  if (!kvrelay_run_find_(copy, text, false, run))
    return KVRELAY_ERR_NOT_FOUND;
  run->target = &run->next->registration->target;
  run->id = &run->next->registration->canonical_model_id;
  for (name = run->next + 1; name < run->end; name++)
    if (!kvrelay_text_equal(name->registration->canonical_model_id, *run->id) ||
        !kvrelay_target_same_(&name->registration->target, run->target))
      return KVRELAY_ERR_MALFORMED;
  return KVRELAY_OK;
}

/* Whether a name means the same in two catalogs. */
static bool kvrelay_run_same_(const kvrelay_run_ *a, const kvrelay_run_ *b) {
  return kvrelay_target_same_(a->target, b->target) &&
         (a->id == NULL || b->id == NULL || kvrelay_text_equal(*a->id, *b->id));
}

/* The next entry with the run's target that is another pool; NULL at the end. */
static const kvrelay_consumer_name_ *kvrelay_run_next_(kvrelay_run_ *run) {
  while (run->next < run->end) {
    const kvrelay_consumer_name_ *const name = run->next++;
    if (name->pool != run->last && kvrelay_target_same_(&name->registration->target, run->target)) {
      run->last = name->pool;
      return name;
    }
  }
  return NULL;
}

/* What a query asks: a name, or an adapter of a base model under its runtime name or its id. */
static int kvrelay_run_start_(const kvrelay_catalog_copy_ *copy, const kvrelay_query *q,
                              kvrelay_run_ *run) {
  int rc = kvrelay_run_name_(copy, q->model, run);
  kvrelay_text base = q->model;
  if (q->adapter.len == 0 || rc == KVRELAY_ERR_MALFORMED)
    return rc;
  if (rc == KVRELAY_OK) {
    if (run->target->kind != KVRELAY_TARGET_BASE)
      return KVRELAY_ERR_NOT_FOUND;
    base = run->target->base_model;
  }
  if (kvrelay_run_find_(copy, q->adapter, true, run)) {
    const kvrelay_consumer_name_ *name;
    for (name = run->next; name < run->end; name++) {
      run->target = &name->registration->target;
      if (kvrelay_text_equal(run->target->base_model, base))
        return KVRELAY_OK;
    }
  }
  rc = kvrelay_run_name_(copy, q->adapter, run);
  if (rc == KVRELAY_OK && (run->target->kind != KVRELAY_TARGET_LORA ||
                           !kvrelay_text_equal(run->target->base_model, base)))
    rc = KVRELAY_ERR_NOT_FOUND;
  return rc;
}

/* Better answers first. */
static bool kvrelay_answer_before_(const void *context, const void *a, const void *b) {
  const kvrelay_answer *const x = (const kvrelay_answer *)a, *const y = (const kvrelay_answer *)b;
  const uint64_t x_tokens = x->depth_blocks * x->block_size;
  const uint64_t y_tokens = y->depth_blocks * y->block_size;
  const bool x_ready = x->serving.readiness == KVRELAY_READY_READY;
  const bool y_ready = y->serving.readiness == KVRELAY_READY_READY;
  (void)context;
  if (x->state != y->state)
    return x->state < y->state;
  if (x_tokens != y_tokens)
    return x_tokens > y_tokens;
  if (x_ready != y_ready)
    return x_ready;
  return x->consumer != y->consumer ? x->consumer < y->consumer : x->pool < y->pool;
}

/* Keeps the best `cap` of the answers so far: once full they are a heap with the worst on top. */
static void kvrelay_answer_keep_(kvrelay_answer *answers, size_t cap, size_t count,
                                 const kvrelay_answer *answer) {
  if (count < cap)
    answers[count] = *answer;
  else if (cap != 0) {
    if (count == cap)
      kvrelay_heap_((uint8_t *)answers, cap, sizeof *answers, kvrelay_answer_before_, NULL);
    if (kvrelay_answer_before_(NULL, answer, answers)) {
      answers[0] = *answer;
      kvrelay_sift_((uint8_t *)answers, cap, sizeof *answers, 0, kvrelay_answer_before_, NULL);
    }
  }
}

/* What is known of one pool without looking into its filter. */
static kvrelay_answer kvrelay_answer_start_(const kvrelay_consumer *c,
                                            const kvrelay_consumer_name_ *name, size_t tokens_len,
                                            uint64_t now_ns) {
  const uint32_t pool = name->pool;
  const kvrelay_catalog_copy_ *const now = kvrelay_consumer_now_(c);
  const kvrelay_semantics *const s = &now->pools[pool].query_semantics;
  const kvrelay_consumer_pool_ *const p = &c->slots_[now->slots[pool]];
  const bool live = ckf_replica_live(&p->replica);
  kvrelay_answer a;
  KVRELAY_MEMSET(&a, 0, sizeof a);
  a.pool = pool;
  a.state = live                          ? KVRELAY_ANSWER_KNOWN
            : p->bar == KVRELAY_BAR_NONE_ ? KVRELAY_ANSWER_UNKNOWN
                                          : KVRELAY_ANSWER_UNSUPPORTED;
  a.block_size = s->kv_block_size;
  a.complete_blocks = hashfmt_block_count(s->hash_format, s->kv_block_size, tokens_len);
  a.age_ns = live ? kvrelay_age_(p->last_frame_ns, now_ns) : KVRELAY_TIME_NONE;
  a.stale = kvrelay_slot_stale_(c, p, now_ns);
  return a;
}

/* A question on its way through the consumers. */
typedef struct kvrelay_asking_ {
  const kvrelay_query *q;
  kvrelay_answer *answers;
  size_t cap, count;
  uint64_t *scratch;
  size_t scratch_len, len;         /* hashes there */
  const kvrelay_semantics *hashed; /* what they were made for */
  uint64_t seed;                   /* of the adapter and namespace */
  uint64_t now_ns;
} kvrelay_asking_;

/* Fills scratch with the prompt's hashes for pools of semantics `s`. */
static int kvrelay_asking_hash_(kvrelay_asking_ *a, const kvrelay_semantics *s) {
  if (a->hashed != NULL && a->hashed->kv_block_size == s->kv_block_size &&
      a->hashed->hash_format == s->hash_format)
    return KVRELAY_OK;
  a->hashed = s;
  return hashfmt_blocks(s->hash_format, s->kv_block_size, a->seed, a->q->tokens, a->q->tokens_len,
                        NULL, a->scratch, a->scratch_len, &a->len) == HASHFMT_OK
             ? KVRELAY_OK
             : KVRELAY_ERR_ARG; /* tokens or scratch is NULL */
}

/* The answers of one consumer's pools. */
static int kvrelay_asking_collect_(kvrelay_asking_ *a, const kvrelay_consumer *c, uint32_t place,
                                   kvrelay_run_ *run) {
  const kvrelay_catalog_copy_ *const now = kvrelay_consumer_now_(c);
  const kvrelay_consumer_name_ *name;
  for (; (name = kvrelay_run_next_(run)) != NULL; a->count++) {
    kvrelay_answer answer = kvrelay_answer_start_(c, name, a->q->tokens_len, a->now_ns);
    answer.consumer = place;
    answer.serving = kvrelay_serving_view_(c, name->pool, name->registration, a->now_ns);
    if (answer.state == KVRELAY_ANSWER_KNOWN && answer.complete_blocks != 0) {
      const ckf_replica *const replica = &c->slots_[now->slots[name->pool]].replica;
      const int rc = kvrelay_asking_hash_(a, &now->pools[name->pool].query_semantics);
      if (rc != KVRELAY_OK)
        return rc;
      answer.depth_blocks =
          ckf_search(ckf_replica_format(replica), ckf_replica_words(replica), a->scratch, a->len);
    }
    kvrelay_answer_keep_(a->answers, a->cap, a->count, &answer);
  }
  return KVRELAY_OK;
}

static int kvrelay_run_of_(const kvrelay_consumer *c, const kvrelay_query *q, kvrelay_run_ *run) {
  return c->in_force_ ? kvrelay_run_start_(kvrelay_consumer_now_(c), q, run) : KVRELAY_ERR_STATE;
}

/* What each consumer will contribute, and whether all of it fits and means one thing: `meaning`. */
static int kvrelay_asking_check_(const kvrelay_asking_ *a, const kvrelay_consumer *const *consumers,
                                 size_t len, int *outcomes, kvrelay_run_ *meaning) {
  int all = KVRELAY_ERR_NOT_FOUND;
  bool space = true;
  size_t i;
  for (i = 0; i < len; i++) {
    const kvrelay_consumer_name_ *name;
    kvrelay_run_ run;
    int rc = kvrelay_run_of_(consumers[i], a->q, &run);
    if (rc == KVRELAY_OK && all == KVRELAY_OK && !kvrelay_run_same_(meaning, &run))
      rc = KVRELAY_ERR_MALFORMED;
    if (outcomes != NULL)
      outcomes[i] = rc;
    if (all != KVRELAY_ERR_MALFORMED && rc != KVRELAY_ERR_NOT_FOUND &&
        (all != KVRELAY_OK || rc != KVRELAY_ERR_STATE)) {
      if (rc == KVRELAY_OK && all != KVRELAY_OK)
        *meaning = run;
      all = rc;
    }
    while (rc == KVRELAY_OK && (name = kvrelay_run_next_(&run)) != NULL)
      if (kvrelay_answer_start_(consumers[i], name, a->q->tokens_len, a->now_ns).complete_blocks >
          a->scratch_len)
        space = false;
  }
  return all == KVRELAY_OK && !space ? KVRELAY_ERR_NOSPACE : all;
}

KVRELAY_API ptrdiff_t kvrelay_consumers_query(const kvrelay_consumer *const *consumers,
                                              size_t consumers_len, const kvrelay_query *q,
                                              kvrelay_answer *answers, size_t cap, int *outcomes,
                                              uint64_t *scratch, size_t scratch_len,
                                              uint64_t now_ns) {
  kvrelay_asking_ a = {q, answers, cap, 0, scratch, scratch_len, 0, NULL, 0, now_ns};
  kvrelay_text lora = {NULL, 0};
  kvrelay_run_ run;
  size_t i;
  int rc = kvrelay_asking_check_(&a, consumers, consumers_len, outcomes, &run);
  if (rc != KVRELAY_OK)
    return rc;
  if (run.target->kind == KVRELAY_TARGET_LORA)
    lora = run.target->adapter;
  a.seed = hashfmt_seed(lora.ptr, lora.len, q->cache_namespace.ptr, q->cache_namespace.len);
  for (i = 0; i < consumers_len; i++)
    if (kvrelay_run_of_(consumers[i], q, &run) == KVRELAY_OK) {
      rc = kvrelay_asking_collect_(&a, consumers[i], (uint32_t)i, &run);
      if (rc != KVRELAY_OK)
        return rc;
    }
  kvrelay_sort_(answers, a.count < cap ? a.count : cap, sizeof *answers, kvrelay_answer_before_,
                NULL);
  return (ptrdiff_t)a.count;
}

KVRELAY_API ptrdiff_t kvrelay_consumer_query(const kvrelay_consumer *c, const kvrelay_query *q,
                                             kvrelay_answer *answers, size_t cap, uint64_t *scratch,
                                             size_t scratch_len, uint64_t now_ns) {
  return kvrelay_consumers_query(&c, 1, q, answers, cap, NULL, scratch, scratch_len, now_ns);
}

/* ==== topology (impl) ==== */

#define KVRELAY_ROLES_TYPED_                                                                       \
  (KVRELAY_ROLE_BIT_(KVRELAY_ROLE_PREFILL) | KVRELAY_ROLE_BIT_(KVRELAY_ROLE_DECODE) |              \
   KVRELAY_ROLE_BIT_(KVRELAY_ROLE_ENCODE) | KVRELAY_ROLE_BIT_(KVRELAY_ROLE_AGGREGATED))

kvrelay_roles kvrelay_roles_of(uint32_t mask) {
  static const int32_t lists[32][5] = {
      {0},       {1},          {2},          {1, 2},         {3},       {1, 3},    {2, 3},
      {1, 2, 3}, {4},          {1, 4},       {2, 4},         {1, 2, 4}, {3, 4},    {1, 3, 4},
      {2, 3, 4}, {1, 2, 3, 4}, {5},          {1, 5},         {2, 5},    {1, 2, 5}, {3, 5},
      {1, 3, 5}, {2, 3, 5},    {1, 2, 3, 5}, {4, 5},         {1, 4, 5}, {2, 4, 5}, {1, 2, 4, 5},
      {3, 4, 5}, {1, 3, 4, 5}, {2, 3, 4, 5}, {1, 2, 3, 4, 5}};
  kvrelay_roles roles;
  uint32_t bits;
  mask = mask >> 1 & 31;
  roles.ptr = lists[mask];
  roles.len = 0;
  for (bits = mask; bits != 0; bits &= bits - 1)
    roles.len++;
  return roles;
}

/* What a live unit's needs leave wanting, 0 when an alternative is there in full. */
static uint32_t kvrelay_needs_missing_(const kvrelay_unit *u, uint32_t present) {
  uint32_t missing = 0;
  size_t i;
  for (i = 0; i < u->needs_len; i++) {
    const uint32_t wanted = kvrelay_role_set_(u->needs[i]) & ~present;
    if (wanted == 0)
      return 0;
    missing |= wanted;
  }
  return missing & ~KVRELAY_ROLE_BIT_(0);
}

kvrelay_readiness kvrelay_readiness_judge(const kvrelay_unit *units, size_t units_len) {
  kvrelay_readiness r = {KVRELAY_READY_UNAVAILABLE, 0, 0, 0, false};
  uint32_t declared = 0;
  bool unknown = false, has_live = false;
  size_t i;
  for (i = 0; i < units_len; i++) {
    const kvrelay_unit *const u = &units[i];
    const uint32_t typed = KVRELAY_ROLE_BIT_(u->role) & KVRELAY_ROLES_TYPED_;
    unknown |= !u->known;
    declared |= typed;
    r.legacy_fallback_active |= typed == 0;
    if (!u->known || u->live == 0)
      continue;
    has_live = true;
    r.duplicates |= r.present & typed & ~KVRELAY_ROLE_BIT_(KVRELAY_ROLE_AGGREGATED);
    r.present |= typed;
  }
  if (r.legacy_fallback_active) {
    r.duplicates = 0;
  } else {
    r.missing = declared & ~r.present;
    for (i = 0; i < units_len; i++)
      if (units[i].known && units[i].live > 0)
        r.missing |= kvrelay_needs_missing_(&units[i], r.present);
  }
  if (has_live && (r.missing | r.duplicates) == 0)
    r.state = KVRELAY_READY_READY;
  if (unknown) {
    r.state = KVRELAY_READY_UNKNOWN;
    r.present = r.missing = 0;
  }
  return r;
}

/* ---- cards in order ---- */

enum {
  KVRELAY_CARD_LEFT_OUT_, /* takes no part */
  KVRELAY_CARD_BASE_,
  KVRELAY_CARD_ADAPTER_ /* its worker has a base card that takes part */
};

/* A card, and what was found out about it. */
typedef struct kvrelay_placed_ {
  const kvrelay_card *card;
  const struct kvrelay_placed_ *base; /* of its worker; itself for a base card */
  uint32_t endpoint;                  /* number in the order of paths */
  uint32_t registration;
  uint8_t kind;
} kvrelay_placed_;

/* A registration while it is judged; the merged ones are numbered. */
typedef struct kvrelay_claimed_ {
  kvrelay_registration registration;
  uint32_t endpoint;
  bool left_out;
} kvrelay_claimed_;

/* A name, by which of the registrations it is claimed, and how. */
typedef struct kvrelay_claim_ {
  kvrelay_text name;
  uint32_t registration;
  bool alias, ambiguous;
} kvrelay_claim_;

/* An endpoint's cards, and where its registrations stand. */
typedef struct kvrelay_site_ {
  kvrelay_endpoint_state *state;
  size_t from, to; /* in placed */
  kvrelay_text base_model;
  bool known, takes_part;
} kvrelay_site_;

/* All of one derivation; pieces of `mem`. */
typedef struct kvrelay_deriving_ {
  kvrelay_placed_ *placed;  /* by path, worker, kind */
  kvrelay_placed_ **shaped; /* for units */
  kvrelay_site_ *sites;
  kvrelay_endpoint_state *states;
  uint32_t *order; /* of endpoints */
  kvrelay_claimed_ *claimed;
  kvrelay_claim_ *claims;
  kvrelay_registration *registrations;
  kvrelay_text *aliases;
  kvrelay_unit *units;
  kvrelay_topology_entry *entries;
  kvrelay_topology_member *members;
  kvrelay_adapter_readiness *adapters;
  size_t cards_len, sites_len, claimed_len, claims_len, entries_len, members_len, adapters_len;
} kvrelay_deriving_;

/* Hands out `base`, or only counts; the bytes needed at any alignment, SIZE_MAX = too many. */
static size_t kvrelay_deriving_plan_(kvrelay_deriving_ *d, const kvrelay_card *cards, size_t n,
                                     uint8_t *base) {
  kvrelay_bump_ b = {base, 0, false};
  size_t aliases = 0, i;
  for (i = 0; i < n; i++) {
    if (cards[i].aliases_len > SIZE_MAX / 2 - aliases)
      return SIZE_MAX;
    aliases += cards[i].aliases_len;
  }
  if (n > UINT32_MAX || aliases > UINT32_MAX)
    return SIZE_MAX;
  KVRELAY_MEMSET(d, 0, sizeof *d);
  d->placed = (kvrelay_placed_ *)kvrelay_bump_take_(&b, n, sizeof *d->placed);
  d->shaped = (kvrelay_placed_ **)kvrelay_bump_take_(&b, n, sizeof *d->shaped);
  d->sites = (kvrelay_site_ *)kvrelay_bump_take_(&b, n, sizeof *d->sites);
  d->states = (kvrelay_endpoint_state *)kvrelay_bump_take_(&b, n, sizeof *d->states);
  d->order = (uint32_t *)kvrelay_bump_take_(&b, n, sizeof *d->order);
  d->claimed = (kvrelay_claimed_ *)kvrelay_bump_take_(&b, n, sizeof *d->claimed);
  d->claims = (kvrelay_claim_ *)kvrelay_bump_take_(&b, n + aliases, sizeof *d->claims);
  d->registrations = (kvrelay_registration *)kvrelay_bump_take_(&b, n, sizeof *d->registrations);
  d->aliases = (kvrelay_text *)kvrelay_bump_take_(&b, aliases, sizeof *d->aliases);
  d->units = (kvrelay_unit *)kvrelay_bump_take_(&b, n, sizeof *d->units);
  d->entries = (kvrelay_topology_entry *)kvrelay_bump_take_(&b, n, sizeof *d->entries);
  d->members = (kvrelay_topology_member *)kvrelay_bump_take_(&b, n, sizeof *d->members);
  d->adapters = (kvrelay_adapter_readiness *)kvrelay_bump_take_(&b, n, sizeof *d->adapters);
  d->cards_len = n;
  return b.overflow ? SIZE_MAX : b.used + 15;
}

size_t kvrelay_topology_mem_size(const kvrelay_card *cards, size_t cards_len) {
  kvrelay_deriving_ d;
  return kvrelay_deriving_plan_(&d, cards, cards_len, NULL);
}

/* Order of "namespace/component/endpoint". */
static int kvrelay_path_compare_(const kvrelay_endpoint *a, const kvrelay_endpoint *b) {
  const kvrelay_text as[3] = {a->namespace_, a->component, a->endpoint};
  const kvrelay_text bs[3] = {b->namespace_, b->component, b->endpoint};
  size_t ai = 0, bi = 0, ap = 0, bp = 0;
  int order;
  for (;;) { /* -1: the end */
    const int ac = ap < as[ai].len ? as[ai].ptr[ap] : ai < 2 ? '/' : -1;
    const int bc = bp < bs[bi].len ? bs[bi].ptr[bp] : bi < 2 ? '/' : -1;
    if (ac != bc)
      return ac < bc ? -1 : 1;
    if (ac < 0) /* the same path; its parts may differ when they contain slashes */
      break;
    if (ap++ >= as[ai].len) {
      ai++;
      ap = 0;
    }
    if (bp++ >= bs[bi].len) {
      bi++;
      bp = 0;
    }
  }
  order = kvrelay_u64_compare_(as[0].len, bs[0].len);
  return order != 0 ? order : kvrelay_u64_compare_(as[1].len, bs[1].len);
}

static int kvrelay_domain_compare_(const kvrelay_domain *a, const kvrelay_domain *b) {
  kvrelay_pool_id x, y;
  KVRELAY_MEMSET(&x, 0, sizeof x);
  KVRELAY_MEMSET(&y, 0, sizeof y);
  x.domain = *a;
  y.domain = *b;
  return kvrelay_pool_id_compare(&x, &y);
}

static int32_t kvrelay_card_role_(const kvrelay_card *c) {
  return c->role != 0 ? c->role : c->prefill_capable ? KVRELAY_ROLE_PREFILL : KVRELAY_ROLE_LEGACY;
}

static const int32_t kvrelay_decode_[1] = {KVRELAY_ROLE_DECODE};
static const kvrelay_roles kvrelay_prefill_needs_[1] = {{kvrelay_decode_, 1}};

static const kvrelay_roles *kvrelay_card_needs_(const kvrelay_card *c, size_t *len) {
  const bool told = c->role != 0 || c->needs_len != 0 || !c->prefill_capable;
  *len = told ? c->needs_len : 1;
  return told ? c->needs : kvrelay_prefill_needs_;
}

/* What a unit has in common; the needs as they are written. */
static int kvrelay_shape_compare_(const kvrelay_card *a, const kvrelay_card *b) {
  size_t an, bn, i, k;
  const kvrelay_roles *const as = kvrelay_card_needs_(a, &an), *const bs =
                                                                   kvrelay_card_needs_(b, &bn);
  int c = kvrelay_u64_compare_((uint64_t)kvrelay_card_role_(a), (uint64_t)kvrelay_card_role_(b));
  c = c != 0 ? c : kvrelay_text_compare(a->model_type, b->model_type);
  c = c != 0 ? c : kvrelay_u64_compare_(an, bn);
  for (i = 0; c == 0 && i < an; i++) {
    c = kvrelay_u64_compare_(as[i].len, bs[i].len);
    for (k = 0; c == 0 && k < as[i].len; k++)
      c = kvrelay_u64_compare_((uint64_t)as[i].ptr[k], (uint64_t)bs[i].ptr[k]);
  }
  return c;
}

#define KVRELAY_CARD_NUMBERS_ 16
/* What else of a card is a number: all of it, even what no pool is made of. */
static void kvrelay_card_numbers_(const kvrelay_card *c, uint64_t out[KVRELAY_CARD_NUMBERS_]) {
  const kvrelay_digest *const cache = &c->domain.cache_semantics, *const scope =
                                                                      &c->domain.routing_scope;
  out[0] = c->has_suffix;
  out[1] = c->has_lora;
  out[2] = c->domain.present;
  out[3] = cache->present;
  out[4] = cache->digest_len;
  out[5] = (uint64_t)cache->source;
  out[6] = scope->present;
  out[7] = scope->digest_len;
  out[8] = (uint64_t)scope->source;
  out[9] = c->semantics.present;
  out[10] = c->semantics.kv_block_size;
  out[11] = (uint64_t)c->semantics.hash_format;
  out[12] = (uint64_t)c->liveness;
  out[13] = c->adapter_limit;
  out[14] = (uint64_t)c->role;
  out[15] = c->prefill_capable;
}

/* 0 only for cards that say the same in everything but aliases, which are united: so nothing
 * depends on who comes first. */
static int kvrelay_card_compare_(const kvrelay_card *a, const kvrelay_card *b) {
  uint64_t as[KVRELAY_CARD_NUMBERS_], bs[KVRELAY_CARD_NUMBERS_];
  size_t i;
  int c = kvrelay_text_compare(a->model_id, b->model_id);
  c = c != 0 ? c : kvrelay_text_compare(a->adapter, b->adapter);
  c = c != 0 ? c : kvrelay_domain_compare_(&a->domain, &b->domain);
  kvrelay_card_numbers_(a, as);
  kvrelay_card_numbers_(b, bs);
  for (i = 0; c == 0 && i < KVRELAY_CARD_NUMBERS_; i++)
    c = kvrelay_u64_compare_(as[i], bs[i]);
  return c != 0 ? c : kvrelay_shape_compare_(a, b);
}

/* By path and worker, base cards first. */
static bool kvrelay_placed_before_(const void *context, const void *a, const void *b) {
  const kvrelay_card *const x = ((const kvrelay_placed_ *)a)->card;
  const kvrelay_card *const y = ((const kvrelay_placed_ *)b)->card;
  int c = kvrelay_path_compare_(&x->endpoint, &y->endpoint);
  (void)context;
  c = c != 0 ? c : kvrelay_u64_compare_(x->worker_id, y->worker_id);
  c = c != 0 ? c : (int)(x->has_suffix | x->has_lora) - (int)(y->has_suffix | y->has_lora);
  return (c != 0 ? c : kvrelay_card_compare_(x, y)) < 0;
}

static void kvrelay_conflict_(kvrelay_endpoint_state *s, uint32_t conflict, const char *why) {
  if (s->conflicts == 0)
    s->why = why;
  s->conflicts |= conflict;
}

/* ---- one endpoint ---- */

static bool kvrelay_shape_fit_(const kvrelay_card *c) {
  size_t i;
  if (c->model_type.len > KVRELAY_TEXT_MAX || c->needs_len > KVRELAY_ROLES_MAX)
    return false;
  for (i = 0; i < c->needs_len; i++)
    if (c->needs[i].len > KVRELAY_ROLES_MAX)
      return false;
  return true;
}

/* Judges the base cards of an endpoint among each other; returns the mask of their roles. */
static uint32_t kvrelay_site_bases_(kvrelay_deriving_ *d, kvrelay_site_ *site) {
  kvrelay_endpoint_state *const s = site->state;
  const kvrelay_card *first = NULL;
  uint32_t roles = 0;
  size_t i;
  for (i = site->from; i < site->to; i++) {
    kvrelay_placed_ *const p = &d->placed[i];
    const kvrelay_card *const c = p->card;
    site->known &= c->liveness != KVRELAY_LIVENESS_UNKNOWN;
    if (c->has_suffix != c->has_lora)
      kvrelay_conflict_(s, KVRELAY_CONFLICT_BINDING, "a card has half of what an adapter has");
    if (c->has_suffix || c->has_lora)
      continue;
    if (first == NULL) {
      first = c;
      s->domain = c->domain;
      s->semantics = c->semantics;
    } else if (kvrelay_domain_compare_(&s->domain, &c->domain) != 0 ||
               s->semantics.kv_block_size != c->semantics.kv_block_size ||
               s->semantics.hash_format != c->semantics.hash_format) {
      kvrelay_conflict_(s, KVRELAY_CONFLICT_POOL,
                        "base cards differ in domain, block size or hash format");
    }
    if (kvrelay_check_semantics(&c->semantics).class_ != KVRELAY_CLASS_OK ||
        kvrelay_check_digest_(&c->domain.cache_semantics, "").class_ != KVRELAY_CLASS_OK ||
        kvrelay_check_digest_(&c->domain.routing_scope, "").class_ != KVRELAY_CLASS_OK)
      kvrelay_conflict_(s, KVRELAY_CONFLICT_POOL,
                        "a base card's domain, block size or hash format is not valid");
    if (i > site->from && d->placed[i - 1].base == &d->placed[i - 1] &&
        d->placed[i - 1].card->worker_id == c->worker_id)
      kvrelay_conflict_(s, KVRELAY_CONFLICT_TOPOLOGY, "a worker has two base cards");
    p->base = p;
    if (!kvrelay_name_valid_(c->model_id) || kvrelay_role_name(kvrelay_card_role_(c)) == NULL ||
        !kvrelay_shape_fit_(c)) {
      kvrelay_conflict_(s, KVRELAY_CONFLICT_BINDING,
                        "a base model's name, role, type or needs are not valid");
      continue;
    }
    p->kind = KVRELAY_CARD_BASE_;
    roles |= KVRELAY_ROLE_BIT_(kvrelay_card_role_(c));
    if (site->base_model.len == 0)
      site->base_model = c->model_id;
    else if (kvrelay_text_compare(site->base_model, c->model_id) != 0)
      kvrelay_conflict_(s, KVRELAY_CONFLICT_TOPOLOGY, "more than one base model");
  }
  if (first == NULL)
    kvrelay_conflict_(s, KVRELAY_CONFLICT_POOL, "no base card");
  return roles;
}

/* Gives adapter cards their base; cards of a worker stand together, its base cards first. */
static void kvrelay_site_adapters_(kvrelay_deriving_ *d, kvrelay_site_ *site) {
  const kvrelay_placed_ *base = NULL;
  uint64_t worker = 0;
  uint32_t limit = 0;
  size_t i;
  for (i = site->from; i < site->to; i++) {
    kvrelay_placed_ *const p = &d->placed[i];
    const kvrelay_card *const c = p->card;
    if (i == site->from || c->worker_id != worker) {
      base = NULL;
      worker = c->worker_id;
      limit = 0;
    }
    if (p->kind == KVRELAY_CARD_BASE_ && base == NULL)
      base = p;
    if (!c->has_suffix || !c->has_lora || base == NULL)
      continue;
    if (limit != 0 && c->adapter_limit != 0 && c->adapter_limit != limit)
      kvrelay_conflict_(site->state, KVRELAY_CONFLICT_POOL, "adapter limits of a worker differ");
    limit = limit != 0 ? limit : c->adapter_limit;
    p->base = base;
    if (kvrelay_name_valid_(c->model_id) && kvrelay_name_valid_(c->adapter))
      p->kind = KVRELAY_CARD_ADAPTER_;
    else
      kvrelay_conflict_(site->state, KVRELAY_CONFLICT_BINDING, "an adapter's name is not valid");
  }
}

static void kvrelay_deriving_sites_(kvrelay_deriving_ *d) {
  size_t i, from;
  for (from = 0; from < d->cards_len; from = i) {
    kvrelay_site_ *const site = &d->sites[d->sites_len];
    KVRELAY_MEMSET(site, 0, sizeof *site);
    site->state = &d->states[d->sites_len];
    KVRELAY_MEMSET(site->state, 0, sizeof *site->state);
    site->state->endpoint = d->placed[from].card->endpoint;
    site->state->why = "";
    site->known = true;
    if (!kvrelay_endpoint_fit_(&site->state->endpoint))
      kvrelay_conflict_(site->state, KVRELAY_CONFLICT_TOPOLOGY, "the endpoint's name is not valid");
    for (i = from; i < d->cards_len && kvrelay_path_compare_(&d->placed[from].card->endpoint,
                                                             &d->placed[i].card->endpoint) == 0;
         i++)
      d->placed[i].endpoint = (uint32_t)d->sites_len;
    site->from = from;
    site->to = i;
    site->state->roles = kvrelay_roles_of(kvrelay_site_bases_(d, site));
    kvrelay_site_adapters_(d, site);
    d->sites_len++;
  }
}

/* ---- names ---- */

static int kvrelay_target_compare_(const kvrelay_target *a, const kvrelay_target *b) {
  int c = (int)a->kind - (int)b->kind;
  c = c != 0 ? c : kvrelay_text_compare(a->base_model, b->base_model);
  return c != 0 ? c : kvrelay_text_compare(a->adapter, b->adapter);
}

static int kvrelay_registration_compare_(const kvrelay_registration *a,
                                         const kvrelay_registration *b) {
  const int c = kvrelay_text_compare(a->canonical_model_id, b->canonical_model_id);
  return c != 0 ? c : kvrelay_target_compare_(&a->target, &b->target);
}

static kvrelay_registration kvrelay_card_registration_(const kvrelay_placed_ *p) {
  kvrelay_registration r;
  KVRELAY_MEMSET(&r, 0, sizeof r);
  r.canonical_model_id = p->card->model_id;
  r.target.present = true;
  r.target.kind = p->kind == KVRELAY_CARD_BASE_ ? KVRELAY_TARGET_BASE : KVRELAY_TARGET_LORA;
  r.target.base_model = p->base->card->model_id;
  if (p->kind == KVRELAY_CARD_ADAPTER_)
    r.target.adapter = p->card->adapter;
  return r;
}

/* By endpoint and registration. */
static bool kvrelay_binding_before_(const void *context, const void *a, const void *b) {
  const kvrelay_placed_ *const x = *(kvrelay_placed_ *const *)a;
  const kvrelay_placed_ *const y = *(kvrelay_placed_ *const *)b;
  const kvrelay_registration rx = kvrelay_card_registration_(x), ry = kvrelay_card_registration_(y);
  (void)context;
  return x->endpoint != y->endpoint ? x->endpoint < y->endpoint
                                    : kvrelay_registration_compare_(&rx, &ry) < 0;
}

/* By name, and claimants of one name by what they are. */
static bool kvrelay_claim_before_(const void *context, const void *a, const void *b) {
  const kvrelay_claimed_ *const claimed = (const kvrelay_claimed_ *)context;
  const kvrelay_claim_ *const x = (const kvrelay_claim_ *)a, *const y = (const kvrelay_claim_ *)b;
  const int c = kvrelay_text_compare(x->name, y->name);
  if (c != 0 || x->registration == y->registration)
    return c < 0;
  return kvrelay_registration_compare_(&claimed[x->registration].registration,
                                       &claimed[y->registration].registration) < 0;
}

/* By registration, ids before aliases, and those by bytes. */
static bool kvrelay_claim_home_before_(const void *context, const void *a, const void *b) {
  const kvrelay_claim_ *const x = (const kvrelay_claim_ *)a, *const y = (const kvrelay_claim_ *)b;
  (void)context;
  if (x->registration != y->registration)
    return x->registration < y->registration;
  return x->alias != y->alias ? y->alias : kvrelay_text_compare(x->name, y->name) < 0;
}

static void kvrelay_claim_add_(kvrelay_deriving_ *d, kvrelay_text name, uint32_t registration,
                               bool alias) {
  const kvrelay_claim_ claim = {name, registration, alias, false};
  d->claims[d->claims_len++] = claim;
}

/* Merges what cards of an endpoint say of the same target, and collects every name. */
static void kvrelay_deriving_claims_(kvrelay_deriving_ *d) {
  size_t n = 0, i, k;
  for (i = 0; i < d->cards_len; i++)
    if (d->placed[i].kind != KVRELAY_CARD_LEFT_OUT_)
      d->shaped[n++] = &d->placed[i];
  kvrelay_sort_(d->shaped, n, sizeof *d->shaped, kvrelay_binding_before_, NULL);
  for (i = 0; i < n; i++) {
    kvrelay_placed_ *const p = d->shaped[i];
    if (i == 0 || kvrelay_binding_before_(NULL, &d->shaped[i - 1], &d->shaped[i])) {
      kvrelay_claimed_ *const c = &d->claimed[d->claimed_len++];
      c->registration = kvrelay_card_registration_(p);
      c->endpoint = p->endpoint;
      c->left_out = false;
      kvrelay_claim_add_(d, p->card->model_id, (uint32_t)d->claimed_len - 1, false);
    }
    p->registration = (uint32_t)d->claimed_len - 1;
    for (k = 0; k < p->card->aliases_len; k++)
      if (kvrelay_name_valid_(p->card->aliases[k]) &&
          kvrelay_text_compare(p->card->aliases[k], p->card->model_id) != 0)
        kvrelay_claim_add_(d, p->card->aliases[k], p->registration, true);
  }
}

/* Marks names that more than one target claims; an id takes its registration along. */
static void kvrelay_deriving_ambiguous_(kvrelay_deriving_ *d) {
  size_t from, to;
  kvrelay_sort_(d->claims, d->claims_len, sizeof *d->claims, kvrelay_claim_before_, d->claimed);
  for (from = 0; from < d->claims_len; from = to) {
    const kvrelay_claim_ *const first = &d->claims[from];
    bool ambiguous;
    for (to = from + 1;
         to < d->claims_len && kvrelay_text_compare(first->name, d->claims[to].name) == 0; to++) {
    }
    ambiguous = kvrelay_claim_before_(d->claimed, first, &d->claims[to - 1]);
    for (size_t i = from; ambiguous && i < to; i++) {
      kvrelay_claimed_ *const c = &d->claimed[d->claims[i].registration];
      d->claims[i].ambiguous = true;
      if (d->claims[i].alias)
        continue;
      c->left_out = true;
      kvrelay_conflict_(&d->states[c->endpoint], KVRELAY_CONFLICT_BINDING,
                        "a model's name means something else elsewhere");
    }
  }
  kvrelay_sort_(d->claims, d->claims_len, sizeof *d->claims, kvrelay_claim_home_before_, NULL);
}

/* Lists what is left, per endpoint, with the aliases that are left. */
static void kvrelay_deriving_registrations_(kvrelay_deriving_ *d) {
  size_t claim = 0, aliases = 0, len = 0, i;
  for (i = 0; i < d->claimed_len; i++) {
    kvrelay_claimed_ *const c = &d->claimed[i];
    kvrelay_endpoint_state *const s = &d->states[c->endpoint];
    kvrelay_registration *const r = &c->registration;
    r->aliases = &d->aliases[aliases];
    for (; claim < d->claims_len && d->claims[claim].registration == i; claim++) {
      const kvrelay_claim_ *const name = &d->claims[claim];
      if (name->alias && !name->ambiguous &&
          (r->aliases_len == 0 ||
           kvrelay_text_compare(r->aliases[r->aliases_len - 1], name->name) != 0)) {
        d->aliases[aliases++] = name->name;
        r->aliases_len++;
      }
    }
    if (r->aliases_len > KVRELAY_ALIASES_MAX) {
      c->left_out = true;
      kvrelay_conflict_(s, KVRELAY_CONFLICT_BINDING, "a model has more aliases than readers take");
    }
    if (c->left_out)
      continue;
    if (s->registrations_len++ == 0)
      s->registrations = &d->registrations[len];
    d->registrations[len++] = *r;
    if (r->target.kind == KVRELAY_TARGET_BASE)
      d->sites[c->endpoint].takes_part = true;
  }
}

/* ---- pools ---- */

static bool kvrelay_site_domain_before_(const void *context, const void *a, const void *b) {
  const kvrelay_endpoint_state *const states = (const kvrelay_endpoint_state *)context;
  return kvrelay_domain_compare_(&states[*(const uint32_t *)a].domain,
                                 &states[*(const uint32_t *)b].domain) < 0;
}

/* Which endpoints may have a pool; those with the same identity may not. */
static void kvrelay_deriving_pools_(kvrelay_deriving_ *d) {
  size_t n = 0, from, to;
  for (size_t i = 0; i < d->sites_len; i++) {
    kvrelay_endpoint_state *const s = &d->states[i];
    if (s->registrations_len > KVRELAY_PARTS_MAX)
      kvrelay_conflict_(s, KVRELAY_CONFLICT_POOL, "more registrations than readers take");
    s->fit = s->registrations_len > 0 &&
             (s->conflicts & (KVRELAY_CONFLICT_POOL | KVRELAY_CONFLICT_TOPOLOGY)) == 0;
    if (s->fit)
      d->order[n++] = (uint32_t)i;
  }
  kvrelay_sort_(d->order, n, sizeof *d->order, kvrelay_site_domain_before_, d->states);
  for (from = 0; from < n; from = to) {
    for (to = from + 1; to < n && kvrelay_domain_compare_(&d->states[d->order[from]].domain,
                                                          &d->states[d->order[to]].domain) == 0;
         to++) {
    }
    for (size_t i = from; to - from > 1 && i < to; i++) {
      kvrelay_conflict_(&d->states[d->order[i]], KVRELAY_CONFLICT_POOL,
                        "another endpoint has the same pool identity");
      d->states[d->order[i]].fit = false;
    }
  }
}

/* ---- readiness ---- */

/* By name of the base model, then by path. */
static bool kvrelay_site_model_before_(const void *context, const void *a, const void *b) {
  const kvrelay_site_ *const sites = (const kvrelay_site_ *)context;
  const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  int c = kvrelay_text_compare(sites[x].state->endpoint.namespace_,
                               sites[y].state->endpoint.namespace_);
  c = c != 0 ? c : kvrelay_text_compare(sites[x].base_model, sites[y].base_model);
  return c != 0 ? c < 0 : x < y;
}

/* By registered name (the same for all base cards of an entry), endpoint and shape. */
static bool kvrelay_unit_before_(const void *context, const void *a, const void *b) {
  const kvrelay_placed_ *const x = *(kvrelay_placed_ *const *)a;
  const kvrelay_placed_ *const y = *(kvrelay_placed_ *const *)b;
  const int c = kvrelay_text_compare(x->card->model_id, y->card->model_id);
  (void)context;
  if (c != 0 || x->endpoint != y->endpoint)
    return c != 0 ? c < 0 : x->endpoint < y->endpoint;
  return kvrelay_shape_compare_(x->base->card, y->base->card) < 0;
}

/* Judges the units of `n` cards of one name, in their order. */
static kvrelay_readiness kvrelay_units_judge_(const kvrelay_deriving_ *d,
                                              kvrelay_placed_ *const *cards, size_t n) {
  size_t units = 0, i;
  for (i = 0; i < n; i++) {
    const kvrelay_card *const c = cards[i]->base->card;
    kvrelay_unit *u = &d->units[units];
    if (i == 0 || kvrelay_unit_before_(NULL, &cards[i - 1], &cards[i])) {
      u->role = kvrelay_card_role_(c);
      u->known = d->sites[cards[i]->endpoint].known;
      u->live = 0;
      u->needs = kvrelay_card_needs_(c, &u->needs_len);
      units++;
    }
    u = &d->units[units - 1];
    u->live += c->liveness == KVRELAY_LIVENESS_LIVE;
  }
  return kvrelay_readiness_judge(d->units, units);
}

/* Lists the cards of a kind of the sites order[from, to), sorted into units. */
static size_t kvrelay_entry_cards_(kvrelay_deriving_ *d, size_t from, size_t to, uint8_t kind) {
  size_t n = 0;
  for (; from < to; from++) {
    const kvrelay_site_ *const site = &d->sites[d->order[from]];
    for (size_t i = site->from; i < site->to; i++)
      if (d->placed[i].kind == kind && !d->claimed[d->placed[i].registration].left_out)
        d->shaped[n++] = &d->placed[i];
  }
  kvrelay_sort_(d->shaped, n, sizeof *d->shaped, kvrelay_unit_before_, NULL);
  return n;
}

/* One entry of the sites order[from, to). */
static void kvrelay_entry_(kvrelay_deriving_ *d, size_t from, size_t to) {
  const kvrelay_site_ *const site = &d->sites[d->order[from]];
  kvrelay_topology_entry *const e = &d->entries[d->entries_len++];
  kvrelay_readiness r =
      kvrelay_units_judge_(d, d->shaped, kvrelay_entry_cards_(d, from, to, KVRELAY_CARD_BASE_));
  size_t n, first, end;
  KVRELAY_MEMSET(e, 0, sizeof *e);
  e->namespace_ = site->state->endpoint.namespace_;
  e->canonical_model_id = site->base_model;
  e->state = r.state;
  e->present_roles = kvrelay_roles_of(r.present);
  e->missing_roles = kvrelay_roles_of(r.missing);
  e->duplicate_role_endpoints =
      kvrelay_roles_of(r.duplicates & (KVRELAY_ROLE_BIT_(KVRELAY_ROLE_PREFILL) |
                                       KVRELAY_ROLE_BIT_(KVRELAY_ROLE_DECODE)));
  e->legacy_fallback_active = r.legacy_fallback_active;
  e->members = &d->members[d->members_len];
  for (; e->members_len < to - from; e->members_len++, d->members_len++) {
    kvrelay_topology_member *const m = &d->members[d->members_len];
    KVRELAY_MEMSET(m, 0, sizeof *m);
    m->endpoint = d->states[d->order[from + e->members_len]].endpoint;
    m->roles = d->states[d->order[from + e->members_len]].roles;
  }
  e->adapters = &d->adapters[d->adapters_len];
  n = kvrelay_entry_cards_(d, from, to, KVRELAY_CARD_ADAPTER_);
  for (first = 0; first < n; first = end, e->adapters_len++) {
    kvrelay_adapter_readiness *const a = &d->adapters[d->adapters_len++];
    for (end = first + 1; end < n && kvrelay_text_compare(d->shaped[first]->card->model_id,
                                                          d->shaped[end]->card->model_id) == 0;
         end++) {
    }
    r = kvrelay_units_judge_(d, d->shaped + first, end - first);
    a->canonical_model_id = d->shaped[first]->card->model_id;
    a->state = r.state;
    a->missing_roles = kvrelay_roles_of(r.missing);
  }
}

static void kvrelay_deriving_entries_(kvrelay_deriving_ *d) {
  size_t n = 0, from, to;
  for (size_t i = 0; i < d->sites_len; i++)
    if (d->sites[i].takes_part && !(d->states[i].conflicts & KVRELAY_CONFLICT_TOPOLOGY))
      d->order[n++] = (uint32_t)i;
  kvrelay_sort_(d->order, n, sizeof *d->order, kvrelay_site_model_before_, d->sites);
  for (from = 0; from < n; from = to) {
    const kvrelay_site_ *const first = &d->sites[d->order[from]];
    for (to = from + 1; to < n; to++) {
      const kvrelay_site_ *const site = &d->sites[d->order[to]];
      if (kvrelay_text_compare(first->state->endpoint.namespace_,
                               site->state->endpoint.namespace_) != 0 ||
          kvrelay_text_compare(first->base_model, site->base_model) != 0)
        break;
    }
    kvrelay_entry_(d, from, to);
    if (d->entries[d->entries_len - 1].members_len <= KVRELAY_PARTS_MAX &&
        d->entries[d->entries_len - 1].adapters_len <= KVRELAY_PARTS_MAX)
      continue;
    d->entries_len--;
    for (size_t i = from; i < to; i++)
      kvrelay_conflict_(&d->states[d->order[i]], KVRELAY_CONFLICT_TOPOLOGY,
                        "its model has more endpoints or adapters than readers take");
  }
}

int kvrelay_topology_derive(const kvrelay_card *cards, size_t cards_len, void *mem, size_t mem_len,
                            kvrelay_topology *out) {
  const size_t need = kvrelay_topology_mem_size(cards, cards_len);
  kvrelay_deriving_ d;
  size_t i;
  for (i = 0; i < cards_len; i++)
    if (!cards[i].endpoint.present)
      return KVRELAY_ERR_ARG;
  if (need == SIZE_MAX || need > mem_len)
    return KVRELAY_ERR_NOSPACE;
  (void)kvrelay_deriving_plan_(&d, cards, cards_len, kvrelay_align_(mem));
  for (i = 0; i < cards_len; i++) {
    const kvrelay_placed_ placed = {&cards[i], NULL, 0, 0, KVRELAY_CARD_LEFT_OUT_};
    d.placed[i] = placed;
  }
  kvrelay_sort_(d.placed, cards_len, sizeof *d.placed, kvrelay_placed_before_, NULL);
  kvrelay_deriving_sites_(&d);
  kvrelay_deriving_claims_(&d);
  kvrelay_deriving_ambiguous_(&d);
  kvrelay_deriving_registrations_(&d);
  kvrelay_deriving_entries_(&d);
  kvrelay_deriving_pools_(&d);
  out->endpoints = d.states;
  out->endpoints_len = d.sites_len;
  out->entries = d.entries;
  out->entries_len = d.entries_len;
  return KVRELAY_OK;
}

/* ==== source (impl) ==== */
/*
 * Each mapping of the producer carries a tag of ours: in its low half the number of physical copies
 * the engine announced, 0 for one, and whether it was stored under two cache namespaces, in its
 * high half the number of its namespace.  So copies and namespaces live and die with the mapping
 * and need no table of their own.
 */

#define KVRELAY_TAG_COPIES_ 0x3FFFu
#define KVRELAY_TAG_LEAVING_ 0x4000u /* its removal is collected, but not yet carried out */
#define KVRELAY_TAG_AMBIGUOUS_ 0x8000u
#define KVRELAY_TAG_NUMBER_SHIFT_ 16

#define KVRELAY_RANK_SEEN_ 1u     /* the stream named it */
#define KVRELAY_RANK_COMPLETE_ 2u /* all its blocks are known */
#define KVRELAY_RANK_SWAP_ 4u     /* the recovery under way builds it anew */

#define KVRELAY_REQUESTS_MAX_ 64
#define KVRELAY_GAP_MAX_ ((uint64_t)1 << 32) /* farther away is another process */

enum {
  KVRELAY_RECOVERY_NONE_ = 0,
  KVRELAY_RECOVERY_COLLECT_, /* replies go into the hold */
  KVRELAY_RECOVERY_SCAN_,    /* which ranks does it say everything about? */
  KVRELAY_RECOVERY_SWAP_     /* the batches are applied anew, up to resume_ */
};

KVRELAY_API const char *kvrelay_count_name(int count) {
  static const char *const names[] = {
#define KVRELAY_COUNT_TEXT_(NAME, TEXT) TEXT,
      KVRELAY_COUNT_LIST(KVRELAY_COUNT_TEXT_)
#undef KVRELAY_COUNT_TEXT_
  };
  return count >= 0 && count < KVRELAY_COUNT_LEN ? names[count] : NULL;
}

KVRELAY_API kvrelay_source_config kvrelay_source_config_default(void) {
  kvrelay_source_config c;
  KVRELAY_MEMSET(&c, 0, sizeof c);
  c.ranks = 1;
  c.hash_format = HASHFMT_FORMAT_STANDARD;
  c.partial_memory = 65536;
  c.max_event_blocks = 65536;
  c.max_namespaces = 4096;
  c.hold_batches = 10000;
  c.hold_bytes = (uint32_t)64 << 20;
  c.replay_timeout_ns = (uint64_t)5 * 1000000000u;
  c.recovery_interval_ns = (uint64_t)30 * 1000000000u;
  c.silent_after_ns = (uint64_t)60 * 1000000000u;
  return c;
}

/* Smallest power of two that is at least twice n: a table that is never more than half full. */
static uint32_t kvrelay_table_size_(uint32_t n) {
  uint32_t size = 16;
  while (size < 2 * (uint64_t)n)
    size *= 2;
  return size;
}

static size_t kvrelay_source_place_(kvrelay_source *s, const kvrelay_source_config *c,
                                    uint8_t *mem) {
  kvrelay_bump_ b = {mem, 0, false};
  s->blocks_ = (ckf_block *)kvrelay_bump_take_(&b, c->max_event_blocks, sizeof *s->blocks_);
  s->removals_ = (uint64_t *)kvrelay_bump_take_(&b, c->max_event_blocks, sizeof *s->removals_);
  s->terms_ = (uint64_t *)kvrelay_bump_take_(&b, c->max_namespaces, sizeof *s->terms_);
  s->term_used_ = (bool *)kvrelay_bump_take_(&b, c->max_namespaces, sizeof *s->term_used_);
  s->term_index_ = (uint32_t *)kvrelay_bump_take_(&b, kvrelay_table_size_(c->max_namespaces),
                                                  sizeof *s->term_index_);
  s->ranks_ = (uint8_t *)kvrelay_bump_take_(&b, c->ranks, sizeof *s->ranks_);
  s->ring_ = (kvrelay_remembered_ *)kvrelay_bump_take_(&b, c->partial_memory, sizeof *s->ring_);
  s->index_ =
      (uint32_t *)kvrelay_bump_take_(&b, kvrelay_table_size_(c->partial_memory), sizeof *s->index_);
  if (c->replay) {
    s->held_ = (kvrelay_held_ *)kvrelay_bump_take_(&b, c->hold_batches, sizeof *s->held_);
    s->held_bytes_ = (uint8_t *)kvrelay_bump_take_(&b, c->hold_bytes, 1);
  }
  return b.overflow ? 0 : b.used + 16;
}

KVRELAY_API size_t kvrelay_source_mem_size(const kvrelay_source_config *cfg) {
  kvrelay_source scratch;
  if (cfg->block_size == 0 ||
      (cfg->hash_format != HASHFMT_FORMAT_STANDARD && cfg->hash_format != HASHFMT_FORMAT_EAGLE) ||
      cfg->ranks == 0 || cfg->ranks > 65536 || cfg->rank_start > UINT32_MAX - cfg->ranks ||
      cfg->max_event_blocks == 0 || cfg->max_event_blocks > 1u << 24 || cfg->max_namespaces == 0 ||
      cfg->max_namespaces > 65000 || cfg->partial_memory == 0 || cfg->partial_memory > 1u << 24 ||
      (cfg->replay && (cfg->hold_batches == 0 || cfg->hold_batches > 1u << 20)))
    return 0;
  return kvrelay_source_place_(&scratch, cfg, NULL);
}

static void kvrelay_index_clear_(uint32_t *index, uint32_t mask) {
  KVRELAY_MEMSET(index, 0, ((size_t)mask + 1) * sizeof *index);
}

/* What is asked from here on; whoever answers a former request is not heard any more. */
static void kvrelay_ask_(kvrelay_source *s, uint64_t now_ns) {
  s->replaying_ = s->asking_ = true;
  s->answered_ = s->advanced_ = s->hole_ = false;
  s->requests_++;
  s->replay_deadline_ns_ = now_ns + s->cfg_.replay_timeout_ns;
}

KVRELAY_API int kvrelay_source_init_abi(kvrelay_source *s, size_t s_size,
                                        const kvrelay_source_config *cfg, ckf_producer *state,
                                        void *mem, size_t mem_len, uint64_t now_ns) {
  if (s_size != sizeof *s)
    return KVRELAY_ERR_ABI;
  size_t need = kvrelay_source_mem_size(cfg);
  if (need == 0 || mem == NULL || state == NULL || !ckf_producer_has_tags(state))
    return KVRELAY_ERR_ARG;
  if (mem_len < need)
    return KVRELAY_ERR_NOSPACE;
  KVRELAY_MEMSET(s, 0, sizeof *s);
  s->cfg_ = *cfg;
  s->state_ = state;
  (void)kvrelay_source_place_(s, cfg, kvrelay_align_(mem));
  s->term_index_mask_ = kvrelay_table_size_(cfg->max_namespaces) - 1;
  s->index_mask_ = kvrelay_table_size_(cfg->partial_memory) - 1;
  s->swept_at_ = UINT64_MAX;
  s->stats_.last_batch_ns = KVRELAY_TIME_NONE;
  KVRELAY_MEMSET(s->term_used_, 0, cfg->max_namespaces * sizeof *s->term_used_);
  KVRELAY_MEMSET(s->ranks_, 0, cfg->ranks * sizeof *s->ranks_);
  kvrelay_index_clear_(s->term_index_, s->term_index_mask_);
  kvrelay_index_clear_(s->index_, s->index_mask_);
  s->heard_ns_ = now_ns;
  if (cfg->replay)
    kvrelay_ask_(s, now_ns);
  return KVRELAY_OK;
}

KVRELAY_API const kvrelay_source_stats *kvrelay_source_stats_get(const kvrelay_source *s) {
  return &s->stats_;
}

KVRELAY_API bool kvrelay_source_complete(const kvrelay_source *s, uint32_t rank) {
  return rank >= s->cfg_.rank_start && rank - s->cfg_.rank_start < s->cfg_.ranks &&
         (s->ranks_[rank - s->cfg_.rank_start] & KVRELAY_RANK_COMPLETE_) != 0;
}

/* The stream is complete when every rank is that it named. */
static void kvrelay_complete_sum_(kvrelay_source *s) {
  s->stats_.complete = true;
  for (uint32_t i = 0; i < s->cfg_.ranks && s->stats_.complete; i++)
    s->stats_.complete =
        (s->ranks_[i] & (KVRELAY_RANK_SEEN_ | KVRELAY_RANK_COMPLETE_)) != KVRELAY_RANK_SEEN_;
}

static void kvrelay_complete_rank_(kvrelay_source *s, uint32_t rank, bool complete) {
  uint8_t *bits = &s->ranks_[rank - s->cfg_.rank_start];
  *bits = (uint8_t)((*bits & KVRELAY_RANK_SWAP_) | KVRELAY_RANK_SEEN_ |
                    (complete ? KVRELAY_RANK_COMPLETE_ : 0));
  kvrelay_complete_sum_(s);
}

/* Of all ranks, also of those that the stream may still name. */
static void kvrelay_complete_all_(kvrelay_source *s, bool complete) {
  for (uint32_t i = 0; i < s->cfg_.ranks; i++)
    s->ranks_[i] = (uint8_t)((s->ranks_[i] & (KVRELAY_RANK_SEEN_ | KVRELAY_RANK_SWAP_)) |
                             (complete ? KVRELAY_RANK_COMPLETE_ : 0));
  s->stats_.complete = complete;
}

KVRELAY_API void kvrelay_source_count(kvrelay_source *s, int count, uint64_t n) {
  if (count >= 0 && count < KVRELAY_COUNT_LEN)
    s->stats_.counts[count] += n;
}

static void kvrelay_count_(kvrelay_source *s, int count) { s->stats_.counts[count]++; }

static ckf_member kvrelay_member_(const kvrelay_source *s, uint32_t rank) {
  ckf_member m;
  m.worker_id = s->cfg_.worker_id;
  m.dp_rank = rank;
  return m;
}

/* ---- remembered hashes ---- */

static uint32_t kvrelay_remembered_hash_(uint32_t rank, uint64_t external) {
  uint64_t h = (external ^ rank) * 0x9E3779B97F4A7C15u;
  return (uint32_t)(h >> 32);
}

/* Slot of the index that points to this hash; NIL when it is not remembered. */
static uint32_t kvrelay_remembered_find_(const kvrelay_source *s, uint32_t rank,
                                         uint64_t external) {
  for (uint32_t i = kvrelay_remembered_hash_(rank, external) & s->index_mask_; s->index_[i] != 0;
       i = (i + 1) & s->index_mask_) {
    if (s->index_[i] == KVRELAY_NIL_)
      continue;
    const kvrelay_remembered_ *r = &s->ring_[s->index_[i] - 1];
    if (r->external_ == external && r->rank_ == rank)
      return i;
  }
  return KVRELAY_NIL_;
}

static void kvrelay_remembered_index_(kvrelay_source *s, uint32_t place) {
  uint32_t i =
      kvrelay_remembered_hash_(s->ring_[place].rank_, s->ring_[place].external_) & s->index_mask_;
  while (s->index_[i] != 0)
    i = (i + 1) & s->index_mask_;
  s->index_[i] = place + 1;
}

/* Graves make probing long; when a quarter of the index is graves it is built anew. */
static void kvrelay_remembered_bury_(kvrelay_source *s, uint32_t slot) {
  s->ring_[s->index_[slot] - 1].live_ = false;
  s->index_[slot] = KVRELAY_NIL_;
  if (++s->graves_ <= s->index_mask_ / 4)
    return;
  kvrelay_index_clear_(s->index_, s->index_mask_);
  s->graves_ = 0;
  for (uint32_t i = 0; i < s->ring_len_; i++) {
    uint32_t place = (s->ring_head_ + i) % s->cfg_.partial_memory;
    if (s->ring_[place].live_)
      kvrelay_remembered_index_(s, place);
  }
}

static void kvrelay_remember_(kvrelay_source *s, uint32_t rank, uint64_t external) {
  if (kvrelay_remembered_find_(s, rank, external) != KVRELAY_NIL_)
    return;
  if (s->ring_len_ == s->cfg_.partial_memory) {
    const kvrelay_remembered_ *oldest = &s->ring_[s->ring_head_];
    uint32_t slot = oldest->live_ ? kvrelay_remembered_find_(s, oldest->rank_, oldest->external_)
                                  : KVRELAY_NIL_;
    s->ring_head_ = (s->ring_head_ + 1) % s->cfg_.partial_memory;
    s->ring_len_--;
    if (slot != KVRELAY_NIL_)
      kvrelay_remembered_bury_(s, slot);
  }
  uint32_t place = (s->ring_head_ + s->ring_len_++) % s->cfg_.partial_memory;
  s->ring_[place].external_ = external;
  s->ring_[place].rank_ = rank;
  s->ring_[place].live_ = true;
  kvrelay_remembered_index_(s, place);
}

static void kvrelay_remember_all_(kvrelay_source *s, uint32_t rank, const kvrelay_engine_event *ev,
                                  size_t from) {
  for (size_t i = from; i < ev->externals_len; i++)
    kvrelay_remember_(s, rank, ev->externals[i]);
}

/* True when the hash was remembered; it is forgotten then. */
static bool kvrelay_forget_(kvrelay_source *s, uint32_t rank, uint64_t external) {
  uint32_t slot = kvrelay_remembered_find_(s, rank, external);
  if (slot == KVRELAY_NIL_)
    return false;
  kvrelay_remembered_bury_(s, slot);
  return true;
}

static void kvrelay_forget_rank_(kvrelay_source *s, uint32_t rank) {
  for (uint32_t i = 0; i < s->ring_len_; i++) {
    const kvrelay_remembered_ *r = &s->ring_[(s->ring_head_ + i) % s->cfg_.partial_memory];
    if (r->live_ && r->rank_ == rank)
      (void)kvrelay_forget_(s, rank, r->external_);
  }
}

/* ---- namespaces ---- */

static uint32_t kvrelay_term_slot_(const kvrelay_source *s, uint64_t term) {
  uint32_t i = (uint32_t)(term >> 32) & s->term_index_mask_;
  while (s->term_index_[i] != 0 && s->terms_[s->term_index_[i] - 1] != term)
    i = (i + 1) & s->term_index_mask_;
  return i;
}

/* Frees the numbers that no mapping uses any more. */
static bool kvrelay_terms_sweep_(kvrelay_source *s) {
  bool found = false;
  if (s->swept_at_ == s->progress_)
    return false; /* nothing was removed since the last sweep found nothing */
  KVRELAY_MEMSET(s->term_used_, 0, s->cfg_.max_namespaces * sizeof *s->term_used_);
  for (uint32_t rank = 0; rank < s->cfg_.ranks; rank++) {
    ckf_member member = kvrelay_member_(s, s->cfg_.rank_start + rank);
    ckf_mapping mapping;
    if ((s->ranks_[rank] & KVRELAY_RANK_SEEN_) == 0)
      continue; /* tags of another stream */
    for (uint32_t at = 0; ckf_producer_mapping_next(s->state_, &member, &at, &mapping) == 1;) {
      uint32_t number = mapping.tag >> KVRELAY_TAG_NUMBER_SHIFT_;
      if (number != 0 && number <= s->cfg_.max_namespaces)
        s->term_used_[number - 1] = true;
    }
  }
  kvrelay_index_clear_(s->term_index_, s->term_index_mask_);
  for (uint32_t i = 0; i < s->cfg_.max_namespaces; i++) {
    found = found || !s->term_used_[i];
    if (s->term_used_[i])
      s->term_index_[kvrelay_term_slot_(s, s->terms_[i])] = i + 1;
  }
  if (!found)
    s->swept_at_ = s->progress_;
  return found;
}

/* Number of a namespace with this seed term, made when new; 0 when all numbers are in use. */
static uint32_t kvrelay_term_number_(kvrelay_source *s, uint64_t term) {
  uint32_t slot = kvrelay_term_slot_(s, term);
  if (s->term_index_[slot] != 0)
    return s->term_index_[slot];
  for (int attempt = 0; attempt < 2; attempt++) {
    for (uint32_t i = 0; i < s->cfg_.max_namespaces; i++)
      if (!s->term_used_[i]) {
        s->term_used_[i] = true;
        s->terms_[i] = term;
        s->term_index_[kvrelay_term_slot_(s, term)] = i + 1;
        return i + 1;
      }
    if (attempt == 0 && !kvrelay_terms_sweep_(s))
      return 0;
  }
  return 0;
}

/* ---- dropping state ---- */

static int kvrelay_drop_rank_(kvrelay_source *s, uint32_t rank) {
  ckf_member member = kvrelay_member_(s, rank);
  kvrelay_forget_rank_(s, rank);
  s->progress_++;
  return ckf_producer_remove_rank(s->state_, &member) == CKF_OK ? KVRELAY_OK
                                                                : KVRELAY_ERR_INVARIANT;
}

/* Of the ranks that this stream named: others of the worker may be another stream's. */
static int kvrelay_drop_seen_(kvrelay_source *s) {
  int err = KVRELAY_OK;
  for (uint32_t i = 0; i < s->cfg_.ranks && err == KVRELAY_OK; i++)
    if ((s->ranks_[i] & KVRELAY_RANK_SEEN_) != 0)
      err = kvrelay_drop_rank_(s, s->cfg_.rank_start + i);
  return err;
}

/* ---- batches that wait ---- */

static void kvrelay_hold_clear_(kvrelay_source *s) {
  s->held_first_ = s->held_end_ = s->held_used_ = 0;
}

static void kvrelay_hold_drop_first_(kvrelay_source *s) {
  if (++s->held_first_ == s->held_end_)
    kvrelay_hold_clear_(s);
}

/* In its place; false when there is no room.  Live batches come in order, so that the search from
 * the end is short. */
static bool kvrelay_hold_(kvrelay_source *s, const kvrelay_source_batch *b, bool reply) {
  uint32_t i = s->held_end_;
  while (i > s->held_first_ && s->held_[i - 1].sequence_ >= b->sequence)
    i--;
  if (i < s->held_end_ && s->held_[i].sequence_ == b->sequence) {
    s->stats_.batches_dropped++;
    return true;
  }
  if (s->held_end_ - s->held_first_ == s->cfg_.hold_batches ||
      b->len > s->cfg_.hold_bytes - s->held_used_)
    return false;
  if (s->held_end_ == s->cfg_.hold_batches) {
    KVRELAY_MEMMOVE(s->held_, s->held_ + s->held_first_,
                    (s->held_end_ - s->held_first_) * sizeof *s->held_);
    i -= s->held_first_;
    s->held_end_ -= s->held_first_;
    s->held_first_ = 0;
  }
  kvrelay_held_ *h = &s->held_[i];
  KVRELAY_MEMMOVE(h + 1, h, (s->held_end_ - i) * sizeof *h);
  s->held_end_++;
  h->sequence_ = b->sequence;
  h->at_ = s->held_used_;
  h->len_ = (uint32_t)b->len;
  h->reply_ = reply;
  h->lost_ = b->payload == NULL;
  if (b->len != 0)
    KVRELAY_MEMCPY(s->held_bytes_ + s->held_used_, b->payload, b->len);
  s->held_used_ += h->len_;
  s->stats_.batches_held++;
  return true;
}

static kvrelay_source_batch kvrelay_held_batch_(const kvrelay_source *s, uint32_t i) {
  kvrelay_source_batch b;
  b.sequence = s->held_[i].sequence_;
  b.payload = s->held_[i].lost_ ? NULL : s->held_bytes_ + s->held_[i].at_;
  b.len = s->held_[i].len_;
  return b;
}

/* ---- order, gaps, asking again ---- */

static void kvrelay_answer_over_(kvrelay_source *s) {
  s->replaying_ = s->asking_ = false;
  s->requests_ = 0;
  s->confirm_ = 0;
  s->repeated_ = false;
}

/* What is known of a process that is gone; batches that wait may be of the next one. */
static int kvrelay_forget_process_(kvrelay_source *s) {
  int err = kvrelay_drop_seen_(s);
  KVRELAY_MEMSET(s->ranks_, 0, s->cfg_.ranks * sizeof *s->ranks_);
  s->learned_len_ = 0;
  s->stats_.complete = s->stats_.has_sequence = false;
  s->has_live_ = s->overlap_ = s->wanted_ = s->reconnected_ = false;
  s->next_ = 0;
  s->recovery_ = KVRELAY_RECOVERY_NONE_;
  kvrelay_answer_over_(s);
  return err;
}

KVRELAY_API int kvrelay_source_clear(kvrelay_source *s, uint64_t now_ns) {
  (void)now_ns;
  kvrelay_hold_clear_(s);
  s->given_ = false;
  return kvrelay_forget_process_(s);
}

/* What may have been in `batches` lost ones: removals, stores, a clear. */
static int kvrelay_loss_(kvrelay_source *s, uint64_t batches) {
  s->stats_.counts[KVRELAY_COUNT_LOSS] += batches;
  kvrelay_complete_all_(s, false);
  return s->cfg_.on_loss == KVRELAY_ON_LOSS_KEEP ? KVRELAY_OK : kvrelay_drop_seen_(s);
}

static kvrelay_source_batch kvrelay_batch_(uint64_t sequence, const uint8_t *payload, size_t len) {
  kvrelay_source_batch b;
  b.sequence = sequence;
  b.payload = payload;
  b.len = payload == NULL ? 0 : len;
  return b;
}

static uint64_t kvrelay_payload_hash_(const kvrelay_source_batch *b) {
  return b->len == 0 ? 0 : hashfmt_hash64(b->payload, b->len, 0);
}

/* True while batches are to be taken before anything else may come. */
static bool kvrelay_due_(const kvrelay_source *s) {
  return s->given_ || s->recovery_ == KVRELAY_RECOVERY_SCAN_ ||
         s->recovery_ == KVRELAY_RECOVERY_SWAP_ ||
         (!s->replaying_ && s->held_first_ != s->held_end_);
}

static void kvrelay_lend_(kvrelay_source *s, const kvrelay_source_batch *b, bool reply) {
  s->given_ = true;
  s->lent_ = *b;
  s->lent_reply_ = reply;
}

/* Another process: its cache is empty, and so must be what is known of it. */
static int kvrelay_restart_(kvrelay_source *s) {
  kvrelay_count_(s, KVRELAY_COUNT_RESTART);
  return kvrelay_forget_process_(s);
}

/* Only the bits of a recovery; and what was counted a second time for it. */
static void kvrelay_recovery_close_(kvrelay_source *s) {
  bool complete = s->stats_.complete;
  uint64_t at_ns = s->stats_.last_batch_ns;
  if (s->recovery_ != KVRELAY_RECOVERY_COLLECT_) {
    s->stats_ = s->counted_;
    s->stats_.complete = complete;
    s->stats_.last_batch_ns = at_ns;
  }
  for (uint32_t i = 0; i < s->cfg_.ranks; i++)
    s->ranks_[i] &= (uint8_t)~KVRELAY_RANK_SWAP_;
  s->recovery_ = KVRELAY_RECOVERY_NONE_;
}

/* The stream goes on where it stood; what was collected is below and falls away. */
static void kvrelay_recovery_fail_(kvrelay_source *s) {
  s->next_ = s->resume_;
  s->replaying_ = s->asking_ = false;
  kvrelay_recovery_close_(s);
}

/* The ranks that the collected batches say everything about start anew from them. */
static int kvrelay_recovery_swap_(kvrelay_source *s) {
  bool whole = s->held_[s->held_first_].sequence_ == 0, any = false;
  int err = KVRELAY_OK;
  for (uint32_t i = 0; i < s->cfg_.ranks && err == KVRELAY_OK; i++) {
    if (whole)
      s->ranks_[i] |= KVRELAY_RANK_SWAP_ | KVRELAY_RANK_COMPLETE_;
    if ((s->ranks_[i] & KVRELAY_RANK_SWAP_) == 0)
      continue;
    any = true;
    if ((s->ranks_[i] & KVRELAY_RANK_SEEN_) != 0)
      err = kvrelay_drop_rank_(s, s->cfg_.rank_start + i);
  }
  if (!any) {
    kvrelay_recovery_fail_(s);
    return err;
  }
  kvrelay_complete_sum_(s);
  s->next_ = s->held_[s->held_first_].sequence_;
  s->recovery_ = KVRELAY_RECOVERY_SWAP_;
  return err;
}

/* The answer is over: does it reach from a known beginning to where the stream stands? */
static int kvrelay_recovery_end_(kvrelay_source *s) {
  if (s->next_ < s->resume_ || s->held_first_ == s->held_end_) {
    kvrelay_recovery_fail_(s);
    return KVRELAY_OK;
  }
  s->counted_ = s->stats_;
  if (s->held_[s->held_first_].sequence_ == 0)
    return kvrelay_recovery_swap_(s);
  s->recovery_ = KVRELAY_RECOVERY_SCAN_;
  s->scan_at_ = s->held_first_;
  return KVRELAY_OK;
}

static void kvrelay_recovery_begin_(kvrelay_source *s, uint64_t now_ns) {
  s->wanted_ = false;
  if (s->stats_.complete)
    return; /* a clear came first */
  kvrelay_count_(s, KVRELAY_COUNT_RECOVERY);
  s->recovery_ = KVRELAY_RECOVERY_COLLECT_;
  s->recovery_from_ns_ = now_ns + s->cfg_.recovery_interval_ns;
  s->resume_ = s->next_;
  s->next_ = 0;
  kvrelay_ask_(s, now_ns);
}

/* Marker or timeout. */
static int kvrelay_answer_end_(kvrelay_source *s, bool marker, uint64_t now_ns) {
  if (s->overlap_) { /* the batch applied last is not there: another process, or no telling */
    int err = kvrelay_restart_(s);
    kvrelay_hold_clear_(s);
    kvrelay_ask_(s, now_ns);
    return err;
  }
  bool again = (s->advanced_ && (s->hole_ || !marker)) || s->confirm_ == 1;
  if (again && s->requests_ < KVRELAY_REQUESTS_MAX_) {
    if (s->confirm_ == 1)
      s->confirm_ = 2;
    kvrelay_ask_(s, now_ns);
    return KVRELAY_OK;
  }
  s->replaying_ = s->asking_ = false;
  return s->recovery_ == KVRELAY_RECOVERY_COLLECT_ ? kvrelay_recovery_end_(s) : KVRELAY_OK;
}

/*
 * True when another process must have sent this live batch.  Numbers of one process only rise; but
 * replies overtake live batches, so that a number below `next_` proves nothing while live batches
 * lag.
 */
static bool kvrelay_restarted_(const kvrelay_source *s, uint64_t sequence, bool reconnected) {
  if (s->has_live_ && sequence <= s->newest_live_)
    return !s->replaying_ || sequence < s->newest_live_;
  if (s->replaying_ || !s->stats_.has_sequence)
    return false;
  if (reconnected)
    return sequence != s->next_; /* a new process may have passed it already */
  return sequence > s->next_ && sequence - s->next_ > KVRELAY_GAP_MAX_;
}

/* Batches that never came live; each number counts once. */
static void kvrelay_gap_(kvrelay_source *s, uint64_t sequence) {
  uint64_t expected = s->next_;
  if (s->has_live_ && s->newest_live_ + 1 > expected)
    expected = s->newest_live_ + 1;
  if ((s->has_live_ || (!s->replaying_ && s->stats_.has_sequence)) && sequence > expected)
    s->stats_.counts[KVRELAY_COUNT_GAP] += sequence - expected;
  s->has_live_ = true;
  s->newest_live_ = sequence;
}

/* No room for a live batch: it becomes the first of a stream whose past is lost. */
static int kvrelay_hold_full_(kvrelay_source *s, const kvrelay_source_batch *b) {
  int err = KVRELAY_OK;
  s->replaying_ = s->asking_ = false;
  if (s->recovery_ == KVRELAY_RECOVERY_COLLECT_) { /* nothing is lost but the recovery */
    kvrelay_recovery_fail_(s);
    kvrelay_lend_(s, b, false);
    return err;
  }
  if (s->stats_.has_sequence)
    err = kvrelay_loss_(s, b->sequence - s->next_);
  s->stats_.batches_dropped += s->held_end_ - s->held_first_;
  kvrelay_hold_clear_(s);
  s->stats_.has_sequence = s->overlap_ = false;
  s->next_ = b->sequence;
  kvrelay_lend_(s, b, false);
  return err;
}

KVRELAY_API int kvrelay_source_live(kvrelay_source *s, uint64_t sequence, const uint8_t *payload,
                                    size_t len, uint64_t now_ns) {
  kvrelay_source_batch b = kvrelay_batch_(sequence, payload, len);
  bool reconnected = s->reconnected_;
  int err = KVRELAY_OK;
  if (kvrelay_due_(s))
    return KVRELAY_ERR_STATE;
  s->reconnected_ = s->silent_ = false;
  s->heard_ns_ = now_ns;
  if (kvrelay_restarted_(s, sequence, reconnected)) {
    err = kvrelay_restart_(s);
    kvrelay_hold_clear_(s);
  }
  if (s->replaying_ && s->has_live_ && sequence == s->newest_live_) {
    s->stats_.batches_dropped++;
    return err;
  }
  kvrelay_gap_(s, sequence);
  if (!s->replaying_)
    kvrelay_lend_(s, &b, false);
  else if (sequence < (s->recovery_ == KVRELAY_RECOVERY_COLLECT_ ? s->resume_ : s->next_))
    s->stats_.batches_dropped++;
  else if (!kvrelay_hold_(s, &b, false))
    err = kvrelay_hold_full_(s, &b);
  return err;
}

/* The reply that is due. */
static int kvrelay_reply_take_(kvrelay_source *s, const kvrelay_source_batch *b) {
  s->advanced_ = true;
  s->confirm_ = 0;
  if (s->recovery_ != KVRELAY_RECOVERY_COLLECT_)
    kvrelay_lend_(s, b, true);
  else if (kvrelay_hold_(s, b, true))
    s->next_++;
  else
    kvrelay_recovery_fail_(s);
  return KVRELAY_OK;
}

/* A reply above the one that is due. */
static int kvrelay_reply_ahead_(kvrelay_source *s, const kvrelay_source_batch *b, bool first) {
  int err = KVRELAY_OK;
  if (!first || (s->requests_ > 1 && s->confirm_ != 2)) {
    /* Lost on the way, or the late reply to a former request: asked for again. */
    s->hole_ = true;
    if (first)
      s->confirm_ = 1;
    if (!kvrelay_hold_(s, b, true))
      s->stats_.batches_dropped++;
    return err;
  }
  /* The engine's buffer has rolled over. */
  if (s->recovery_ == KVRELAY_RECOVERY_COLLECT_ && s->next_ != 0) {
    kvrelay_recovery_fail_(s);
    return err;
  }
  if (s->stats_.has_sequence && s->recovery_ != KVRELAY_RECOVERY_COLLECT_)
    err = kvrelay_loss_(s, b->sequence - s->next_);
  s->next_ = b->sequence;
  int taken = kvrelay_reply_take_(s, b);
  return err != KVRELAY_OK ? err : taken;
}

KVRELAY_API int kvrelay_source_reply(kvrelay_source *s, uint64_t sequence, const uint8_t *payload,
                                     size_t len, uint64_t now_ns) {
  kvrelay_source_batch b = kvrelay_batch_(sequence, payload, len);
  if (kvrelay_due_(s))
    return KVRELAY_ERR_STATE;
  bool marker = sequence == UINT64_MAX, heard = s->replaying_ && !s->asking_;
  if (heard && marker)
    return kvrelay_answer_end_(s, true, now_ns);
  bool first = !s->answered_;
  if (heard) {
    s->replay_deadline_ns_ = now_ns + s->cfg_.replay_timeout_ns;
    s->answered_ = true;
    if (s->overlap_ && sequence == s->next_ - 1 && kvrelay_payload_hash_(&b) == s->last_hash_)
      s->overlap_ = false; /* the same process; the batch itself is known */
    else if (s->overlap_)
      return kvrelay_answer_end_(s, false, now_ns);
    else if (sequence == s->next_ && !s->hole_)
      return kvrelay_reply_take_(s, &b);
    else if (sequence > s->next_ && !s->hole_)
      return kvrelay_reply_ahead_(s, &b, first);
  }
  s->stats_.batches_dropped += !marker;
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_source_connection(kvrelay_source *s, bool connected, uint64_t now_ns) {
  if (kvrelay_due_(s))
    return KVRELAY_ERR_STATE;
  s->connected_ = connected;
  s->silent_ = false;
  s->heard_ns_ = now_ns;
  if (!connected)
    return KVRELAY_OK;
  if (!s->stats_.has_sequence) { /* nothing tells whose they are that wait; replies bring ours */
    s->stats_.batches_dropped += s->held_end_ - s->held_first_;
    kvrelay_hold_clear_(s);
    s->has_live_ = false;
  }
  s->reconnected_ = !s->cfg_.replay && s->stats_.has_sequence;
  if (!s->cfg_.replay || (s->replaying_ && !s->answered_ && !s->stats_.has_sequence))
    return KVRELAY_OK;
  if (s->recovery_ == KVRELAY_RECOVERY_COLLECT_)
    kvrelay_recovery_fail_(s);
  kvrelay_answer_over_(s);
  s->overlap_ = s->stats_.has_sequence;
  kvrelay_ask_(s, now_ns);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_source_tick(kvrelay_source *s, uint64_t now_ns) {
  if (kvrelay_due_(s))
    return KVRELAY_ERR_STATE;
  if (s->connected_ && s->loaded_ && !s->silent_ &&
      now_ns - s->heard_ns_ >= s->cfg_.silent_after_ns) {
    s->silent_ = true;
    kvrelay_count_(s, KVRELAY_COUNT_SILENT);
  }
  return s->replaying_ && now_ns >= s->replay_deadline_ns_ ? kvrelay_answer_end_(s, false, now_ns)
                                                           : KVRELAY_OK;
}

KVRELAY_API uint64_t kvrelay_source_deadline_ns(const kvrelay_source *s) {
  uint64_t at_ns = s->replaying_ ? s->replay_deadline_ns_ : KVRELAY_TIME_NONE;
  if (s->wanted_ && !s->replaying_)
    at_ns = s->recovery_from_ns_;
  if (s->connected_ && s->loaded_ && !s->silent_ && s->heard_ns_ + s->cfg_.silent_after_ns < at_ns)
    at_ns = s->heard_ns_ + s->cfg_.silent_after_ns;
  return at_ns;
}

KVRELAY_API int kvrelay_source_request(kvrelay_source *s, uint64_t *from) {
  int asking = s->asking_;
  s->asking_ = false;
  if (asking)
    *from = s->overlap_ ? s->next_ - 1 : s->next_;
  return asking;
}

KVRELAY_API void kvrelay_source_load(kvrelay_source *s, bool holds_blocks, uint64_t now_ns) {
  if (holds_blocks && !s->loaded_)
    s->heard_ns_ = now_ns;
  s->loaded_ = holds_blocks;
  s->silent_ = s->silent_ && holds_blocks;
}

KVRELAY_API int kvrelay_source_state(const kvrelay_source *s) {
  return s->replaying_   ? KVRELAY_SOURCE_REPLAY
         : s->silent_    ? KVRELAY_SOURCE_SILENT
         : s->connected_ ? KVRELAY_SOURCE_LIVE
                         : KVRELAY_SOURCE_CONNECTING;
}

/* A batch above the one that is due.  1: go on with it, next_ has moved or the state was dropped;
 * 0: it waits for an answer. */
static int kvrelay_step_over_(kvrelay_source *s, const kvrelay_source_batch *b, uint64_t now_ns) {
  bool known = s->stats_.has_sequence;
  uint64_t missing = b->sequence - s->next_;
  int err = KVRELAY_OK;
  if (known && missing > KVRELAY_GAP_MAX_)
    return (err = kvrelay_restart_(s)) == KVRELAY_OK ? 1 : err;
  bool repeat = s->requests_ != 0, tried = s->repeated_ && s->repeated_at_ == s->next_;
  if (s->cfg_.replay && !(repeat && tried) && s->requests_ < KVRELAY_REQUESTS_MAX_ &&
      (!s->given_ || kvrelay_hold_(s, &s->lent_, s->lent_reply_))) {
    s->given_ = false;
    s->repeated_ = repeat;
    s->repeated_at_ = s->next_;
    kvrelay_ask_(s, now_ns);
    return 0;
  }
  if (known)
    err = kvrelay_loss_(s, missing);
  s->next_ = b->sequence;
  return err == KVRELAY_OK ? 1 : err;
}

/* Bookkeeping of the batch that goes out now. */
static void kvrelay_deliver_(kvrelay_source *s, const kvrelay_source_batch *b, bool reply,
                             uint64_t now_ns) {
  kvrelay_source_stats *st = &s->stats_;
  if (!st->has_sequence)
    kvrelay_complete_all_(s, b->sequence == 0);
  st->has_sequence = true;
  st->last_sequence = b->sequence;
  st->last_batch_ns = now_ns;
  st->batches++;
  st->counts[KVRELAY_COUNT_REPLAY] += reply;
  s->next_ = b->sequence + 1;
  if (s->cfg_.replay)
    s->last_hash_ = kvrelay_payload_hash_(b);
}

KVRELAY_API int kvrelay_source_next(kvrelay_source *s, kvrelay_source_batch *out, uint64_t now_ns) {
  int err;
  if (s->recovery_ == KVRELAY_RECOVERY_SCAN_) {
    if (s->scan_at_ != s->held_end_ && s->held_[s->scan_at_].sequence_ < s->resume_) {
      *out = kvrelay_held_batch_(s, s->scan_at_++);
      return 1;
    }
    if ((err = kvrelay_recovery_swap_(s)) != KVRELAY_OK)
      return err;
  }
  for (;;) {
    bool held = !s->replaying_ && s->held_first_ != s->held_end_;
    if (held)
      *out = kvrelay_held_batch_(s, s->held_first_);
    else if (s->given_)
      *out = s->lent_;
    if (s->recovery_ == KVRELAY_RECOVERY_SWAP_ && (!held || out->sequence >= s->resume_))
      kvrelay_recovery_close_(s);
    if (!held && !s->given_)
      break;
    if (out->sequence > s->next_) {
      int step = kvrelay_step_over_(s, out, now_ns);
      if (step < 0)
        return step;
      if (step == 0)
        break;
      continue;
    }
    bool reply = held ? s->held_[s->held_first_].reply_ : s->lent_reply_;
    bool known = out->sequence < s->next_;
    if (held)
      kvrelay_hold_drop_first_(s);
    else
      s->given_ = false;
    if (!known) {
      kvrelay_deliver_(s, out, reply, now_ns);
      return 1;
    }
    s->stats_.batches_dropped++;
  }
  if (!s->replaying_) {
    kvrelay_answer_over_(s);
    if (s->wanted_ && now_ns >= s->recovery_from_ns_)
      kvrelay_recovery_begin_(s, now_ns);
  }
  return 0;
}

KVRELAY_API int kvrelay_source_lost(kvrelay_source *s, int reason, uint64_t now_ns) {
  (void)now_ns;
  if (s->recovery_ == KVRELAY_RECOVERY_SCAN_)
    return KVRELAY_OK;
  kvrelay_source_count(s, reason, 1);
  return kvrelay_loss_(s, 1);
}

/* ---- filters ---- */

static bool kvrelay_text_is_(kvrelay_text t, const char *word) {
  return kvrelay_bytes_are_(t.ptr, t.len, word);
}

/* ASCII case does not matter. */
static bool kvrelay_text_is_nocase_(kvrelay_text t, const char *upper) {
  size_t i = 0;
  for (; i < t.len && upper[i] != 0; i++) {
    uint8_t c = t.ptr[i];
    if ((c >= 'a' && c <= 'z' ? c - 32 : c) != (uint8_t)upper[i])
      return false;
  }
  return i == t.len && upper[i] == 0;
}

/* Tier of a medium, -1 when it is unknown. */
static int kvrelay_tier_(bool has_medium, kvrelay_text medium) {
  static const struct {
    const char *name;
    int tier;
  } media[] = {{"GPU", CKF_TIER_DEVICE},
               {"DEVICE", CKF_TIER_DEVICE},
               {"CPU", CKF_TIER_HOST_PINNED},
               {"CPU_PINNED", CKF_TIER_HOST_PINNED},
               {"CPU_TIER1", CKF_TIER_HOST_PINNED},
               {"CPU_TIER2", CKF_TIER_DISK},
               {"DISK", CKF_TIER_DISK},
               {"NVME", CKF_TIER_DISK},
               {"STORAGE", CKF_TIER_DISK},
               {"EXTERNAL", CKF_TIER_EXTERNAL},
               {"NETWORK", CKF_TIER_EXTERNAL},
               {"REMOTE", CKF_TIER_EXTERNAL},
               {"SHARED", CKF_TIER_EXTERNAL}};
  if (!has_medium || medium.len == 0)
    return CKF_TIER_DEVICE;
  for (size_t i = 0; i < sizeof media / sizeof media[0]; i++)
    if (kvrelay_text_is_nocase_(medium, media[i].name))
      return media[i].tier;
  return -1;
}

/* Reason to drop blocks of this kind of attention, KVRELAY_COUNT_LEN to keep them. */
static int kvrelay_kind_verdict_(kvrelay_text kind) {
  static const char *const keep[] = {"full_attention", "mla_attention", "sink_full_attention"};
  static const char *const drop[] = {
      "sliding_window",          "sliding_window_mla",     "mamba",
      "chunked_local_attention", "encoder_only_attention", "cross_attention"};
  for (size_t i = 0; i < sizeof keep / sizeof keep[0]; i++)
    if (kvrelay_text_is_(kind, keep[i]))
      return KVRELAY_COUNT_LEN;
  for (size_t i = 0; i < sizeof drop / sizeof drop[0]; i++)
    if (kvrelay_text_is_(kind, drop[i]))
      return KVRELAY_COUNT_NON_MAIN_ATTENTION_KIND;
  return KVRELAY_COUNT_UNKNOWN_KIND;
}

static kvrelay_learned_ *kvrelay_learned_find_(kvrelay_source *s, uint32_t rank, uint32_t group) {
  for (uint32_t i = 0; i < s->learned_len_; i++)
    if (s->learned_[i].rank_ == rank && s->learned_[i].group_ == group)
      return &s->learned_[i];
  return NULL;
}

static void kvrelay_learn_(kvrelay_source *s, uint32_t rank, const kvrelay_engine_event *ev) {
  kvrelay_learned_ *known = kvrelay_learned_find_(s, rank, ev->group);
  if (known == NULL && s->learned_len_ < KVRELAY_LEARNED_MAX_) {
    known = &s->learned_[s->learned_len_++];
    known->rank_ = rank;
    known->group_ = ev->group;
  }
  if (known != NULL)
    known->kind_ = kvrelay_kind_verdict_(ev->kind);
}

static int kvrelay_group_verdict_(kvrelay_source *s, uint32_t rank,
                                  const kvrelay_engine_event *ev) {
  if (ev->has_kind)
    return kvrelay_kind_verdict_(ev->kind);
  if (!ev->has_group)
    return KVRELAY_COUNT_LEN;
  const kvrelay_learned_ *known = kvrelay_learned_find_(s, rank, ev->group);
  if (known != NULL)
    return known->kind_ == KVRELAY_COUNT_NON_MAIN_ATTENTION_KIND
               ? KVRELAY_COUNT_NON_MAIN_ATTENTION_GROUP
               : known->kind_;
  uint32_t main_group = s->cfg_.has_main_group ? s->cfg_.main_group : 0;
  return ev->group == main_group ? KVRELAY_COUNT_LEN : KVRELAY_COUNT_UNLEARNED_GROUP_IDX;
}

/* The first filter that applies, KVRELAY_COUNT_LEN when the event may act on Device state. */
static int kvrelay_filter_(kvrelay_source *s, uint32_t rank, const kvrelay_engine_event *ev) {
  bool blocks = ev->type == KVRELAY_ENGINE_STORED || ev->type == KVRELAY_ENGINE_REMOVED;
  if (ev->has_ownership)
    return kvrelay_text_is_(ev->ownership, "kvcr") ? KVRELAY_COUNT_UNSUPPORTED_OWNERSHIP
                                                   : KVRELAY_COUNT_UNKNOWN_OWNERSHIP;
  if (ev->type == KVRELAY_ENGINE_IGNORED)
    return KVRELAY_COUNT_IGNORED_EVENT;
  if (ev->has_locality && !kvrelay_text_is_(ev->locality, "LOCAL"))
    return KVRELAY_COUNT_NON_LOCAL_LOCALITY;
  int tier = kvrelay_tier_(ev->has_medium, ev->medium);
  if (tier < 0)
    return KVRELAY_COUNT_UNKNOWN_MEDIUM;
  if (ev->type == KVRELAY_ENGINE_STORED && ev->has_kind && ev->has_group &&
      (tier == CKF_TIER_DEVICE || tier == CKF_TIER_HOST_PINNED))
    kvrelay_learn_(s, rank, ev);
  if (tier != CKF_TIER_DEVICE)
    return KVRELAY_COUNT_OTHER_TIER;
  return blocks ? kvrelay_group_verdict_(s, rank, ev) : KVRELAY_COUNT_LEN;
}

/* ---- from a stored event to blocks ---- */

/* One store on its way: what the steps find out about it. */
typedef struct kvrelay_store_ {
  const kvrelay_engine_event *ev;
  uint32_t rank;
  ckf_member member;
  size_t blocks;   /* that will be indexed */
  uint32_t number; /* of the namespace, 0 = none */
  uint64_t seed;
  bool tagged;            /* some block needs a tag: it was mapped before, or has a namespace */
  size_t extra_at, mm_at; /* first item of the block being hashed */
} kvrelay_store_;

static bool kvrelay_hex64_(kvrelay_text t) {
  for (size_t i = 0; i < t.len; i++) {
    uint8_t c = t.ptr[i];
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')))
      return false;
  }
  return t.len == 64;
}

/* Before vLLM 0.19 an object's identifier stood bare; longer events are newer. */
static bool kvrelay_bare_object_(const kvrelay_engine_event *ev, kvrelay_text t) {
  return ev->positional && ev->elements_len <= 9 && kvrelay_hex64_(t);
}

static const char kvrelay_salt_tag_[] = "dynamo-cache-salt:";
#define KVRELAY_SALT_TAG_LEN_ (sizeof kvrelay_salt_tag_ - 1)

/* The event's own namespace; empty when it names none.  Counts a salt that cannot be told from
 * other text. */
static kvrelay_text kvrelay_own_namespace_(kvrelay_source *s, const kvrelay_engine_event *ev) {
  kvrelay_text untagged = {NULL, 0};
  bool lora_seen = ev->lora_name.len == 0, bare = false;
  if (ev->cache_salt.len != 0)
    return ev->cache_salt;
  for (size_t i = 0; i < ev->extra_keys_len && ev->extra_keys[i].block == 0; i++) {
    kvrelay_text t = ev->extra_keys[i].text;
    if (ev->extra_keys[i].kind != KVRELAY_EXTRA_TEXT)
      continue;
    if (!lora_seen && kvrelay_text_equal(t, ev->lora_name)) {
      lora_seen = true;
    } else if (t.len > KVRELAY_SALT_TAG_LEN_ &&
               KVRELAY_MEMCMP(t.ptr, kvrelay_salt_tag_, KVRELAY_SALT_TAG_LEN_) == 0) {
      t.ptr += KVRELAY_SALT_TAG_LEN_;
      t.len -= KVRELAY_SALT_TAG_LEN_;
      return t;
    } else if (!kvrelay_bare_object_(ev, t)) {
      untagged = t;
      bare = true;
    }
  }
  if (s->cfg_.untagged_salt == KVRELAY_SALT_NAMESPACE)
    return untagged;
  if (bare)
    kvrelay_count_(s, KVRELAY_COUNT_SALT_UNTAGGED);
  untagged.len = 0;
  return untagged;
}

/* Format and block size of 8.3; KVRELAY_COUNT_LEN when the event fits the pool. */
static int kvrelay_shape_verdict_(kvrelay_source *s, const kvrelay_store_ *st) {
  const kvrelay_engine_event *ev = st->ev;
  bool eagle = s->cfg_.hash_format == HASHFMT_FORMAT_EAGLE;
  if (ev->block_size == 0 && ev->tokens_len == 0)
    return KVRELAY_COUNT_PLACEHOLDER;
  if (ev->tokens_len != 0 && ev->pairs != eagle)
    return KVRELAY_COUNT_FORMAT_MISMATCH;
  if (ev->block_size == s->cfg_.block_size)
    return KVRELAY_COUNT_LEN;
  if (ev->block_size == 0 || s->cfg_.block_size % ev->block_size != 0) {
    s->stats_.other_block_size = ev->block_size;
    return KVRELAY_COUNT_BLOCK_SIZE_MISMATCH;
  }
  kvrelay_remember_all_(s, st->rank, ev, 0);
  return KVRELAY_COUNT_SUB_BLOCK;
}

static bool kvrelay_external_before_(const void *context, const void *a, const void *b) {
  (void)context;
  return *(const uint64_t *)a < *(const uint64_t *)b;
}

/* Up to 32, looking at all pairs is faster than sorting. */
static bool kvrelay_has_repeat_(uint64_t *list, size_t len) {
  uint32_t repeats = 0;
  if (len <= 32) {
    for (size_t i = 1; i < len; i++)
      for (size_t j = 0; j < i; j++)
        repeats |= list[i] == list[j];
    return repeats != 0;
  }
  kvrelay_sort_(list, len, sizeof *list, kvrelay_external_before_, NULL);
  for (size_t i = 1; i < len; i++)
    if (list[i] == list[i - 1])
      return true;
  return false;
}

/* Whether the event agrees with itself, and how many whole blocks it has; sets st->blocks. */
static int kvrelay_cut_verdict_(kvrelay_source *s, kvrelay_store_ *st) {
  const kvrelay_engine_event *ev = st->ev;
  uint64_t block = s->cfg_.block_size, look_ahead = ev->pairs ? 1 : 0, tokens = ev->tokens_len;
  if (ev->externals_len > s->cfg_.max_event_blocks)
    return KVRELAY_COUNT_EVENT_TOO_LARGE;
  for (size_t i = 0; i < ev->externals_len; i++) {
    s->removals_[i] = ev->externals[i];
    if (ev->has_parent && ev->externals[i] == ev->parent)
      return KVRELAY_COUNT_DUPLICATE_HASH;
  }
  if (kvrelay_has_repeat_(s->removals_, ev->externals_len))
    return KVRELAY_COUNT_DUPLICATE_HASH;
  if (tokens >= (ev->externals_len + 1) * block + look_ahead) {
    kvrelay_remember_all_(s, st->rank, ev, 0);
    return KVRELAY_COUNT_TOKEN_SURPLUS;
  }
  uint64_t complete = tokens <= look_ahead ? 0 : (tokens - look_ahead) / block;
  st->blocks = complete < ev->externals_len ? (size_t)complete : ev->externals_len;
  /* Guessing for a list that is too short would index an image as text. */
  if ((ev->extra_keys_blocks != 0 && ev->extra_keys_blocks < st->blocks) ||
      (ev->has_mm_infos && ev->mm_infos_blocks != 0 && ev->mm_infos_blocks < st->blocks))
    return KVRELAY_COUNT_MALFORMED_EVENT;
  return KVRELAY_COUNT_LEN;
}

/* The tag of a mapping, NULL when there is none. */
static uint32_t *kvrelay_tag_(kvrelay_source *s, const ckf_member *member, uint64_t external) {
  uint32_t *tag = NULL;
  (void)ckf_producer_find(s->state_, member, external, NULL, &tag);
  return tag;
}

/* Namespace: own, inherited from the parent, or none; conflicts. */
static int kvrelay_namespace_verdict_(kvrelay_source *s, kvrelay_store_ *st) {
  const kvrelay_engine_event *ev = st->ev;
  kvrelay_text own = kvrelay_own_namespace_(s, ev);
  uint32_t *tag;
  bool conflict = false;
  if (own.len != 0) {
    st->number = kvrelay_term_number_(s, hashfmt_hash64(own.ptr, own.len, 1));
    if (st->number == 0)
      return KVRELAY_COUNT_NAMESPACE_LIMIT;
  } else if (ev->has_parent && (tag = kvrelay_tag_(s, &st->member, ev->parent)) != NULL) {
    st->number = *tag >> KVRELAY_TAG_NUMBER_SHIFT_;
    if ((*tag & KVRELAY_TAG_AMBIGUOUS_) != 0)
      return KVRELAY_COUNT_AMBIGUOUS_CACHE_NAMESPACE;
  }
  st->tagged = st->number != 0;
  for (size_t i = 0; i < st->blocks; i++) {
    if ((tag = kvrelay_tag_(s, &st->member, ev->externals[i])) == NULL)
      continue;
    st->tagged = true;
    if ((*tag & KVRELAY_TAG_COPIES_) == 0)
      ++*tag; /* from here on 0 tells the new blocks of this event */
    if (*tag >> KVRELAY_TAG_NUMBER_SHIFT_ == st->number)
      continue;
    *tag |= KVRELAY_TAG_AMBIGUOUS_;
    conflict = true;
  }
  if (conflict)
    return KVRELAY_COUNT_NAMESPACE_CONFLICT;
  st->seed = hashfmt_seed(ev->lora_name.ptr, ev->lora_name.len, NULL, 0);
  if (st->number != 0)
    st->seed += s->terms_[st->number - 1];
  return KVRELAY_COUNT_LEN;
}

/* A marker is 16 hex digits and 48 zeros: the form a frontend issues, as opposed to digests that
 * engines make. */
static bool kvrelay_mm_hash_(const kvrelay_source *s, kvrelay_text id, uint64_t *hash) {
  if (s->cfg_.mm_identifiers == KVRELAY_MM_MARKER) {
    if (!kvrelay_hex64_(id))
      return false;
    for (size_t i = 16; i < 64; i++)
      if (id.ptr[i] != '0')
        return false;
  }
  return hashfmt_mm_identifier(id.ptr, id.len, hash) == 1;
}

/*
 * Objects of one block into the removal scratch, in event order; items are consumed from where the
 * block before ended.  Returns false when the block is a prompt embedding: its tokens say nothing.
 */
static bool kvrelay_block_objects_(kvrelay_source *s, kvrelay_store_ *st, uint32_t block,
                                   size_t *count) {
  const kvrelay_engine_event *ev = st->ev;
  bool lora_seen = ev->lora_name.len == 0, embedded = false;
  *count = 0;
  for (; st->extra_at < ev->extra_keys_len && ev->extra_keys[st->extra_at].block == block;
       st->extra_at++) {
    const kvrelay_extra_key *item = &ev->extra_keys[st->extra_at];
    bool object = item->kind == KVRELAY_EXTRA_OBJECT;
    if (item->kind == KVRELAY_EXTRA_BIN) {
      embedded = true;
      continue;
    }
    if (item->kind == KVRELAY_EXTRA_TEXT) {
      if (!lora_seen && kvrelay_text_equal(item->text, ev->lora_name)) {
        lora_seen = true;
        continue;
      }
      object = kvrelay_bare_object_(ev, item->text);
      if (!object && block == 0)
        continue; /* salts of the first block are counted where the namespace is looked for */
    }
    uint64_t hash;
    if (!object)
      kvrelay_count_(s, KVRELAY_COUNT_EXTRA_KEY_IGNORED);
    else if (!ev->has_mm_infos && kvrelay_mm_hash_(s, item->text, &hash) &&
             *count < s->cfg_.max_event_blocks)
      s->removals_[(*count)++] = hash;
  }
  for (; st->mm_at < ev->mm_objects_len && ev->mm_objects[st->mm_at].block == block; st->mm_at++)
    if (ev->has_mm_infos && *count < s->cfg_.max_event_blocks)
      s->removals_[(*count)++] = ev->mm_objects[st->mm_at].mm_hash;
  return !embedded;
}

/* Local hashes of all blocks; a prompt embedding ends the list. */
static int kvrelay_hash_blocks_(kvrelay_source *s, kvrelay_store_ *st) {
  const kvrelay_engine_event *ev = st->ev;
  hashfmt_mm_tokens ids;
  size_t window = (size_t)s->cfg_.block_size + (ev->pairs ? 1 : 0);
  ids.image_token_id = s->cfg_.image_token_id;
  ids.video_token_id = s->cfg_.video_token_id;
  ids.has_image = s->cfg_.has_image_token_id;
  ids.has_video = s->cfg_.has_video_token_id;
  for (size_t i = 0; i < st->blocks; i++) {
    const uint32_t *tokens = ev->tokens + i * s->cfg_.block_size;
    size_t objects;
    s->blocks_[i].external = ev->externals[i];
    if (!kvrelay_block_objects_(s, st, (uint32_t)i, &objects)) {
      st->blocks = i;
      kvrelay_count_(s, KVRELAY_COUNT_EMBEDDED_PROMPT);
      kvrelay_remember_all_(s, st->rank, ev, i);
      return KVRELAY_COUNT_LEN;
    }
    if (objects == 0)
      s->blocks_[i].local = hashfmt_local(tokens, window, st->seed);
    else if (hashfmt_block_mm(tokens, window, s->removals_, objects, &ids, st->seed,
                              &s->blocks_[i].local) != HASHFMT_OK)
      return KVRELAY_COUNT_EVENT_TOO_LARGE;
  }
  for (size_t i = st->blocks; i < ev->externals_len; i++)
    kvrelay_count_(s, KVRELAY_COUNT_PARTIAL_BLOCK);
  kvrelay_remember_all_(s, st->rank, ev, st->blocks);
  return KVRELAY_COUNT_LEN;
}

/* ---- applying ---- */

/* One more physical copy of each block, under its namespace.  One copy without any needs no tag. */
static void kvrelay_tag_blocks_(kvrelay_source *s, const kvrelay_store_ *st) {
  for (size_t i = 0; st->tagged && i < st->blocks; i++) {
    uint32_t *tag = kvrelay_tag_(s, &st->member, s->blocks_[i].external);
    if (tag == NULL)
      continue;
    uint32_t copies = *tag & KVRELAY_TAG_COPIES_;
    if (copies < KVRELAY_TAG_COPIES_ && (copies == 0 || !s->cfg_.deduplicated))
      copies++;
    *tag = copies | (*tag & KVRELAY_TAG_AMBIGUOUS_) | st->number << KVRELAY_TAG_NUMBER_SHIFT_;
  }
}

static int kvrelay_apply_store_(kvrelay_source *s, const kvrelay_store_ *st) {
  const kvrelay_engine_event *ev = st->ev;
  ckf_outcome out;
  if (st->blocks == 0)
    return KVRELAY_OK;
  (void)ckf_producer_stored(s->state_, &st->member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING,
                            ev->has_parent, ev->parent, false, 0, s->blocks_, st->blocks, &out);
  switch (out.error) {
  case CKF_OK:
  case CKF_ERR_CAPACITY_EXHAUSTED:
    s->stats_.counts[KVRELAY_COUNT_OMITTED_CAPACITY] += out.omitted;
    s->stats_.blocks_stored += st->blocks;
    kvrelay_tag_blocks_(s, st);
    return KVRELAY_OK;
  case CKF_ERR_PARENT_NOT_FOUND:
    s->stats_.counts[KVRELAY_COUNT_ORPHAN] += st->blocks;
    /* Under a hash that was left out on purpose nothing is missing, and so all the way down. */
    if (kvrelay_remembered_find_(s, st->rank, ev->parent) != KVRELAY_NIL_) {
      kvrelay_remember_all_(s, st->rank, ev, 0);
      return KVRELAY_OK;
    }
    if (kvrelay_source_complete(s, st->rank)) {
      /* A recovery that meets one itself cannot heal it. */
      s->wanted_ = s->wanted_ || (s->cfg_.replay && s->recovery_ == KVRELAY_RECOVERY_NONE_);
      if (!s->cfg_.replay)
        kvrelay_count_(s, KVRELAY_COUNT_RECOVERY); /* asked for; nobody can be asked */
    }
    kvrelay_complete_rank_(s, st->rank, false);
    return KVRELAY_OK;
  case CKF_ERR_INVALID_BLOCK_SEQUENCE:
    kvrelay_count_(s, KVRELAY_COUNT_REMAP_CONFLICT);
    return KVRELAY_OK;
  case CKF_ERR_INVARIANT:
    return KVRELAY_ERR_INVARIANT;
  default: /* the exact state is full */
    kvrelay_count_(s, KVRELAY_COUNT_STATE_LIMIT);
    kvrelay_complete_rank_(s, st->rank, false);
    return KVRELAY_OK;
  }
}

static int kvrelay_stored_(kvrelay_source *s, uint32_t rank, const kvrelay_engine_event *ev) {
  kvrelay_store_ st;
  KVRELAY_MEMSET(&st, 0, sizeof st);
  st.ev = ev;
  st.rank = rank;
  st.member = kvrelay_member_(s, rank);
  int reason = kvrelay_shape_verdict_(s, &st);
  /* Hashing an adapter's blocks as base would let base requests match them. */
  if (reason == KVRELAY_COUNT_LEN && ev->lora_id_set && ev->lora_name.len == 0)
    reason = KVRELAY_COUNT_LORA_ID_WITHOUT_NAME;
  if (reason == KVRELAY_COUNT_LEN)
    reason = kvrelay_cut_verdict_(s, &st);
  if (reason == KVRELAY_COUNT_LEN)
    reason = kvrelay_namespace_verdict_(s, &st);
  if (reason == KVRELAY_COUNT_LEN)
    reason = kvrelay_hash_blocks_(s, &st);
  if (reason != KVRELAY_COUNT_LEN) {
    kvrelay_count_(s, reason);
    return KVRELAY_OK;
  }
  if (ev->pair_gap)
    kvrelay_count_(s, KVRELAY_COUNT_PAIR_GAP);
  return kvrelay_apply_store_(s, &st);
}

KVRELAY_API uint64_t kvrelay_source_copied(const kvrelay_source *s) {
  uint64_t copied = 0;
  for (uint32_t i = 0; i < s->cfg_.ranks; i++) {
    ckf_member member = kvrelay_member_(s, s->cfg_.rank_start + i);
    ckf_mapping m;
    if ((s->ranks_[i] & KVRELAY_RANK_SEEN_) == 0)
      continue; /* another stream's */
    for (uint32_t at = 0; ckf_producer_mapping_next(s->state_, &member, &at, &m) == 1;)
      copied += (m.tag & KVRELAY_TAG_COPIES_) > 1;
  }
  return copied;
}

/* Removes what the scratch holds. */
static int kvrelay_remove_some_(kvrelay_source *s, const ckf_member *member, size_t count) {
  ckf_outcome out;
  if (count == 0)
    return KVRELAY_OK;
  (void)ckf_producer_removed(s->state_, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, s->removals_,
                             count, &out);
  s->stats_.counts[KVRELAY_COUNT_UNKNOWN_REMOVAL] += out.unknown;
  s->stats_.blocks_removed += out.unmapped;
  s->progress_ += out.unmapped;
  return out.error == CKF_OK ? KVRELAY_OK : KVRELAY_ERR_INVARIANT;
}

static int kvrelay_removed_(kvrelay_source *s, uint32_t rank, const kvrelay_engine_event *ev) {
  ckf_member member = kvrelay_member_(s, rank);
  size_t count = 0;
  int err = KVRELAY_OK;
  for (size_t i = 0; i < ev->externals_len && err == KVRELAY_OK; i++) {
    uint32_t *tag = kvrelay_tag_(s, &member, ev->externals[i]);
    bool mapped = tag != NULL && (*tag & KVRELAY_TAG_LEAVING_) == 0;
    if (mapped && !s->cfg_.deduplicated && (*tag & KVRELAY_TAG_COPIES_) > 1) {
      --*tag; /* another physical copy is left */
      continue;
    }
    if (!mapped && kvrelay_forget_(s, rank, ev->externals[i]))
      continue;
    if (mapped)
      *tag |= KVRELAY_TAG_LEAVING_;
    s->removals_[count++] = ev->externals[i];
    if (count == s->cfg_.max_event_blocks) {
      err = kvrelay_remove_some_(s, &member, count);
      count = 0;
    }
  }
  return err == KVRELAY_OK ? kvrelay_remove_some_(s, &member, count) : err;
}

static bool kvrelay_clears_all_(const kvrelay_engine_event *ev) {
  return ev->type == KVRELAY_ENGINE_CLEARED && (!ev->has_medium || ev->medium.len == 0);
}

static int kvrelay_cleared_(kvrelay_source *s, uint32_t rank, const kvrelay_engine_event *ev) {
  ckf_member member = kvrelay_member_(s, rank);
  ckf_outcome out;
  (void)ckf_producer_cleared(s->state_, &member, CKF_DOMAIN_MISSING, &out);
  if (out.error != CKF_OK)
    return KVRELAY_ERR_INVARIANT;
  kvrelay_forget_rank_(s, rank);
  s->stats_.blocks_removed += out.unmapped;
  s->progress_++;
  if (kvrelay_clears_all_(ev))
    kvrelay_complete_rank_(s, rank, true);
  return KVRELAY_OK;
}

/* False when a recovery has no other use for the event than what is noted here: a clear, before
 * which nothing has to be known of the rank. */
static bool kvrelay_recovery_event_(kvrelay_source *s, uint32_t rank,
                                    const kvrelay_engine_event *ev) {
  uint32_t place = rank - s->cfg_.rank_start;
  if (place >= s->cfg_.ranks)
    return false;
  if (s->recovery_ == KVRELAY_RECOVERY_SWAP_)
    return (s->ranks_[place] & KVRELAY_RANK_SWAP_) != 0;
  if (kvrelay_clears_all_(ev) && kvrelay_filter_(s, rank, ev) == KVRELAY_COUNT_LEN)
    s->ranks_[place] |= KVRELAY_RANK_SWAP_;
  return false;
}

KVRELAY_API int kvrelay_source_event(kvrelay_source *s, bool has_rank, uint32_t rank,
                                     const kvrelay_engine_event *ev, uint64_t now_ns) {
  (void)now_ns;
  if (!has_rank)
    rank = s->cfg_.default_rank;
  if (s->recovery_ > KVRELAY_RECOVERY_COLLECT_ && !kvrelay_recovery_event_(s, rank, ev))
    return KVRELAY_OK;
  s->stats_.stored += ev->type == KVRELAY_ENGINE_STORED;
  s->stats_.removed += ev->type == KVRELAY_ENGINE_REMOVED;
  s->stats_.cleared += ev->type == KVRELAY_ENGINE_CLEARED;
  s->stats_.tier_cleared += ev->type == KVRELAY_ENGINE_TIER_CLEARED;
  int reason = KVRELAY_COUNT_LEN;
  if (rank < s->cfg_.rank_start || rank - s->cfg_.rank_start >= s->cfg_.ranks)
    reason = KVRELAY_COUNT_FOREIGN_RANK;
  else if (ev->type == KVRELAY_ENGINE_UNKNOWN)
    reason = KVRELAY_COUNT_UNKNOWN_EVENT;
  else if (ev->type == KVRELAY_ENGINE_TOO_LARGE)
    reason = KVRELAY_COUNT_EVENT_TOO_LARGE;
  else if (ev->type < KVRELAY_ENGINE_STORED || ev->type > KVRELAY_ENGINE_IGNORED)
    reason = KVRELAY_COUNT_MALFORMED_EVENT;
  else
    reason = kvrelay_filter_(s, rank, ev);
  if (reason != KVRELAY_COUNT_LEN) {
    kvrelay_count_(s, reason);
    return KVRELAY_OK;
  }
  if ((s->ranks_[rank - s->cfg_.rank_start] & KVRELAY_RANK_SEEN_) == 0)
    kvrelay_complete_rank_(s, rank, kvrelay_source_complete(s, rank));
  if (ev->type == KVRELAY_ENGINE_STORED)
    return kvrelay_stored_(s, rank, ev);
  if (ev->type == KVRELAY_ENGINE_REMOVED)
    return kvrelay_removed_(s, rank, ev);
  return kvrelay_cleared_(s, rank, ev);
}

/* ==== router events (impl) ==== */

KVRELAY_API kvrelay_router_config kvrelay_router_config_default(void) {
  kvrelay_router_config c;
  KVRELAY_MEMSET(&c, 0, sizeof c);
  c.hold_events = 1024;
  c.hold_bytes = (uint32_t)4 << 20;
  c.attempts = 8;
  c.attempt_timeout_ns = (uint64_t)30 * 1000000000u;
  c.retry_ns = 200000000u;
  c.recovery_interval_ns = (uint64_t)30 * 1000000000u;
  return c;
}

static size_t kvrelay_router_place_(kvrelay_router *r, const kvrelay_router_config *c,
                                    uint8_t *mem) {
  kvrelay_bump_ b = {mem, 0, false};
  r->held_ = (kvrelay_router_held_ *)kvrelay_bump_take_(&b, c->hold_events, sizeof *r->held_);
  r->cells_cap_ = c->hold_bytes / sizeof *r->cells_;
  r->cells_ = (ckf_block *)kvrelay_bump_take_(&b, r->cells_cap_, sizeof *r->cells_);
  return b.overflow ? 0 : b.used + 16;
}

KVRELAY_API size_t kvrelay_router_mem_size(const kvrelay_router_config *cfg) {
  kvrelay_router scratch;
  if (cfg->hold_events == 0 || cfg->hold_events > 1u << 16 || cfg->hold_bytes < 16 ||
      cfg->hold_bytes > 1u << 30 || cfg->attempts == 0 || cfg->attempts > 32)
    return 0;
  return kvrelay_router_place_(&scratch, cfg, NULL);
}

static void kvrelay_router_count_(kvrelay_router *r, int count, uint64_t n) {
  r->stats_.counts[count] += n;
}

static ckf_member kvrelay_router_member_(const kvrelay_router *r) {
  ckf_member m;
  m.worker_id = r->cfg_.worker_id;
  m.dp_rank = r->cfg_.rank;
  return m;
}

static int kvrelay_router_drop_(kvrelay_router *r) {
  ckf_member member = kvrelay_router_member_(r);
  r->stats_.complete = false;
  return ckf_producer_remove_rank(r->state_, &member) == CKF_OK ? KVRELAY_OK
                                                                : KVRELAY_ERR_INVARIANT;
}

/* ---- events that wait ---- */

static void kvrelay_router_hold_clear_(kvrelay_router *r) {
  r->held_first_ = r->held_end_ = r->cells_used_ = 0;
}

/* Room at the end of both arrays for one event of so many cells; the oldest go for it. */
static void kvrelay_router_room_(kvrelay_router *r, uint32_t cells) {
  uint32_t start = 0;
  while (r->held_first_ != r->held_end_) {
    start = r->held_[r->held_first_].at_;
    if (r->held_end_ - r->held_first_ < r->cfg_.hold_events &&
        cells <= r->cells_cap_ - (r->cells_used_ - start))
      break;
    r->held_first_++;
    kvrelay_router_count_(r, KVRELAY_COUNT_LOSS, 1);
  }
  if (r->held_first_ == r->held_end_) {
    kvrelay_router_hold_clear_(r);
    return;
  }
  if (r->held_end_ < r->cfg_.hold_events && cells <= r->cells_cap_ - r->cells_used_)
    return;
  r->held_end_ -= r->held_first_;
  KVRELAY_MEMMOVE(r->held_, r->held_ + r->held_first_, r->held_end_ * sizeof *r->held_);
  KVRELAY_MEMMOVE(r->cells_, r->cells_ + start, (r->cells_used_ - start) * sizeof *r->cells_);
  r->held_first_ = 0;
  r->cells_used_ -= start;
  for (uint32_t i = 0; i < r->held_end_; i++)
    r->held_[i].at_ -= start;
}

static void kvrelay_router_hold_(kvrelay_router *r, const kvrelay_router_event *ev) {
  uint64_t cells = ev->type == KVRELAY_ROUTER_STORED    ? ev->blocks_len
                   : ev->type == KVRELAY_ROUTER_REMOVED ? ev->externals_len / 2 + 1
                                                        : 0;
  if (cells > r->cells_cap_) {
    kvrelay_router_count_(r, KVRELAY_COUNT_EVENT_TOO_LARGE, 1);
    return;
  }
  kvrelay_router_room_(r, (uint32_t)cells);
  kvrelay_router_held_ *h = &r->held_[r->held_end_++];
  h->event_ = *ev;
  h->at_ = r->cells_used_;
  r->cells_used_ += (uint32_t)cells;
  if (ev->type == KVRELAY_ROUTER_STORED && cells != 0)
    KVRELAY_MEMCPY(r->cells_ + h->at_, ev->blocks, ev->blocks_len * sizeof *ev->blocks);
  if (ev->type == KVRELAY_ROUTER_REMOVED && ev->externals_len != 0)
    KVRELAY_MEMCPY(r->cells_ + h->at_, ev->externals, ev->externals_len * sizeof *ev->externals);
}

/* ---- applying ---- */

static void kvrelay_router_begin_(kvrelay_router *r, uint64_t now_ns) {
  r->recovering_ = r->asking_ = true;
  r->waiting_ = r->wanted_ = false;
  r->whole_ = !r->stats_.has_event_id || !r->stats_.complete;
  r->attempts_ = 0;
  r->deadline_ns_ = now_ns + r->cfg_.attempt_timeout_ns;
  r->from_ns_ = now_ns + r->cfg_.recovery_interval_ns;
  kvrelay_router_count_(r, KVRELAY_COUNT_RECOVERY, 1);
}

static void kvrelay_router_over_(kvrelay_router *r) {
  r->recovering_ = r->asking_ = r->waiting_ = false;
}

/* Ignored from here on; where a dump can be had, one heals it. */
static void kvrelay_router_fail_(kvrelay_router *r) {
  kvrelay_router_count_(r, KVRELAY_COUNT_FENCED_SOURCE, r->held_end_ - r->held_first_);
  kvrelay_router_hold_clear_(r);
  kvrelay_router_over_(r);
  r->failed_ = true;
  r->stats_.complete = false;
  r->wanted_ = r->cfg_.recoverable && !r->banned_;
}

/* The reason of a fault, KVRELAY_COUNT_LEN when the event was taken. */
static int kvrelay_router_reason_(int error) {
  switch (error) {
  case CKF_OK:
  case CKF_ERR_CAPACITY_EXHAUSTED:
    return KVRELAY_COUNT_LEN;
  case CKF_ERR_PARENT_NOT_FOUND:
    return KVRELAY_COUNT_ORPHAN;
  case CKF_ERR_INVALID_BLOCK_SEQUENCE:
    return KVRELAY_COUNT_REMAP_CONFLICT;
  case CKF_ERR_UNSUPPORTED_DOMAIN:
    return KVRELAY_COUNT_UNSUPPORTED_DOMAIN;
  default:
    return KVRELAY_COUNT_STATE_LIMIT;
  }
}

static void kvrelay_router_into_(ckf_producer *p, const kvrelay_router_event *ev,
                                 ckf_outcome *out) {
  ckf_member member;
  member.worker_id = ev->worker_id;
  member.dp_rank = ev->dp_rank;
  enum ckf_tier tier = (enum ckf_tier)ev->tier;
  enum ckf_domain domain = (enum ckf_domain)ev->domain;
  if (ev->type == KVRELAY_ROUTER_STORED)
    (void)ckf_producer_stored(p, &member, tier, domain, ev->has_parent, ev->parent, ev->has_start,
                              ev->start, ev->blocks, ev->blocks_len, out);
  else if (ev->type == KVRELAY_ROUTER_REMOVED)
    (void)ckf_producer_removed(p, &member, tier, domain, ev->externals, ev->externals_len, out);
  else
    (void)ckf_producer_cleared(p, &member, domain, out);
}

static int kvrelay_router_apply_(kvrelay_router *r, const kvrelay_router_event *ev) {
  ckf_outcome out;
  r->stats_.events++;
  r->stats_.has_event_id = true;
  r->stats_.last_event_id = ev->event_id;
  kvrelay_router_into_(r->state_, ev, &out);
  if (out.error == CKF_ERR_INVARIANT)
    return KVRELAY_ERR_INVARIANT;
  int reason = kvrelay_router_reason_(out.error);
  if (reason != KVRELAY_COUNT_LEN) {
    kvrelay_router_count_(r, reason, reason == KVRELAY_COUNT_ORPHAN ? ev->blocks_len : 1);
    kvrelay_router_fail_(r);
    return kvrelay_router_drop_(r);
  }
  bool device = ev->tier == CKF_TIER_DEVICE;
  if (ev->type == KVRELAY_ROUTER_CLEARED)
    r->stats_.complete = r->stats_.complete || ev->domain == CKF_DOMAIN_MISSING;
  else
    kvrelay_router_count_(r, KVRELAY_COUNT_OTHER_TIER, !device);
  r->stats_.blocks_stored += device ? ev->blocks_len : 0;
  r->stats_.blocks_removed += out.unmapped;
  kvrelay_router_count_(r, KVRELAY_COUNT_UNKNOWN_REMOVAL, out.unknown);
  kvrelay_router_count_(r, KVRELAY_COUNT_OMITTED_CAPACITY, out.omitted);
  return KVRELAY_OK;
}

/* Where nothing can be asked: what was missed may have been anything, so the rank starts anew. */
static int kvrelay_router_jump_(kvrelay_router *r, const kvrelay_router_event *ev) {
  int err = KVRELAY_OK;
  if (r->stats_.has_event_id && ev->event_id - r->stats_.last_event_id != 1) {
    uint64_t missing = ev->event_id - r->stats_.last_event_id - 1;
    kvrelay_router_count_(r, KVRELAY_COUNT_GAP, missing);
    kvrelay_router_count_(r, KVRELAY_COUNT_LOSS, missing);
    err = kvrelay_router_drop_(r);
  }
  return err == KVRELAY_OK ? kvrelay_router_apply_(r, ev) : err;
}

/* The events that waited, by their ids, each once.  `jump`: over a hole the rank starts anew. */
static int kvrelay_router_drain_(kvrelay_router *r, bool jump) {
  int err = KVRELAY_OK;
  while (err == KVRELAY_OK && !r->failed_) {
    kvrelay_router_held_ *least = NULL;
    for (uint32_t i = r->held_first_; i < r->held_end_; i++) {
      uint64_t id = r->held_[i].event_.event_id;
      if ((!r->stats_.has_event_id || id > r->stats_.last_event_id) &&
          (least == NULL || id < least->event_.event_id))
        least = &r->held_[i];
    }
    if (least == NULL)
      break;
    kvrelay_router_event ev = least->event_;
    uint64_t missing = r->stats_.has_event_id ? ev.event_id - r->stats_.last_event_id - 1 : 0;
    if (!jump && missing != 0) { /* accepted, but not in silence */
      kvrelay_router_count_(r, KVRELAY_COUNT_GAP, missing);
      r->stats_.complete = false;
    }
    ev.blocks = r->cells_ + least->at_;
    ev.externals = (const uint64_t *)(const void *)ev.blocks;
    err = jump ? kvrelay_router_jump_(r, &ev) : kvrelay_router_apply_(r, &ev);
  }
  kvrelay_router_hold_clear_(r);
  return err;
}

static bool kvrelay_router_ours_(const kvrelay_router *r, const kvrelay_router_event *ev) {
  return ev->worker_id == r->cfg_.worker_id && ev->dp_rank == r->cfg_.rank;
}

static bool kvrelay_router_new_(const kvrelay_router *r, const kvrelay_router_event *ev) {
  return !r->stats_.has_event_id || ev->event_id > r->stats_.last_event_id;
}

/* ---- live events ---- */

KVRELAY_API int kvrelay_router_init_abi(kvrelay_router *r, size_t r_size,
                                        const kvrelay_router_config *cfg, ckf_producer *state,
                                        void *mem, size_t mem_len, uint64_t now_ns) {
  if (r_size != sizeof *r)
    return KVRELAY_ERR_ABI;
  size_t need = kvrelay_router_mem_size(cfg);
  if (need == 0 || mem == NULL || state == NULL)
    return KVRELAY_ERR_ARG;
  if (mem_len < need)
    return KVRELAY_ERR_NOSPACE;
  KVRELAY_MEMSET(r, 0, sizeof *r);
  r->cfg_ = *cfg;
  r->state_ = state;
  (void)kvrelay_router_place_(r, cfg, kvrelay_align_(mem));
  if (cfg->recoverable)
    kvrelay_router_begin_(r, now_ns);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_router_live(kvrelay_router *r, const kvrelay_router_event *ev,
                                    uint64_t now_ns) {
  bool is_new = kvrelay_router_new_(r, ev);
  if (!kvrelay_router_ours_(r, ev) || ev->type < KVRELAY_ROUTER_STORED ||
      ev->type > KVRELAY_ROUTER_CLEARED) {
    kvrelay_router_count_(r, KVRELAY_COUNT_FOREIGN_RANK, 1);
    return KVRELAY_OK;
  }
  if (!is_new && !r->failed_) {
    kvrelay_router_count_(r, KVRELAY_COUNT_EVENT_ID_ORDER, 1);
    return KVRELAY_OK;
  }
  if (!r->failed_ && ev->type == KVRELAY_ROUTER_CLEARED && ev->domain == CKF_DOMAIN_MISSING) {
    kvrelay_router_over_(r); /* what came before it does not matter any more */
    kvrelay_router_hold_clear_(r);
    r->wanted_ = r->degraded_ = false;
    return kvrelay_router_apply_(r, ev);
  }
  bool hole = !r->stats_.has_event_id || ev->event_id - r->stats_.last_event_id != 1;
  if (!r->recovering_ && !r->failed_ && hole && r->cfg_.recoverable && !r->degraded_)
    kvrelay_router_begin_(r, now_ns);
  if (r->recovering_)
    kvrelay_router_hold_(r, ev);
  else if (r->failed_)
    kvrelay_router_count_(r, KVRELAY_COUNT_FENCED_SOURCE, 1);
  else
    return kvrelay_router_jump_(r, ev);
  return KVRELAY_OK;
}

KVRELAY_API int kvrelay_router_request(kvrelay_router *r, bool *whole, uint64_t *first) {
  int asking = r->asking_;
  r->asking_ = false;
  if (asking) {
    *whole = r->whole_;
    *first = r->whole_ ? 0 : r->stats_.last_event_id + 1;
  }
  return asking;
}

KVRELAY_API int kvrelay_router_failed(kvrelay_router *r, int how, uint64_t now_ns) {
  if (!r->recovering_ || r->waiting_)
    return KVRELAY_OK;
  r->attempts_++;
  if (how != KVRELAY_ROUTER_REFUSED && r->attempts_ < r->cfg_.attempts) {
    r->waiting_ = true;
    r->asking_ = false;
    r->deadline_ns_ = now_ns + (r->cfg_.retry_ns << (r->attempts_ - 1));
    return KVRELAY_OK;
  }
  kvrelay_router_over_(r);
  if (r->failed_) {
    kvrelay_router_fail_(r);
    return KVRELAY_OK;
  }
  if (how == KVRELAY_ROUTER_NO_DUMP) { /* a later hole asks again */
    kvrelay_router_hold_clear_(r);
    return KVRELAY_OK;
  }
  int err = kvrelay_router_drain_(r, true);
  if (!r->failed_)
    r->degraded_ = r->wanted_ = !r->stats_.complete;
  return err;
}

/* ---- answers ---- */

/* The rank is back, or goes on; events that waited follow, over any hole. */
static int kvrelay_router_recovered_(kvrelay_router *r, uint64_t last_event_id) {
  if (!r->stats_.has_event_id || last_event_id > r->stats_.last_event_id)
    r->stats_.last_event_id = last_event_id;
  r->stats_.has_event_id = true;
  kvrelay_router_over_(r);
  r->degraded_ = r->wanted_ = false;
  int err = kvrelay_router_drain_(r, false);
  r->wanted_ = r->wanted_ || (!r->failed_ && !r->stats_.complete);
  return err;
}

/* Events of somebody else in an answer: nothing this source says can be trusted. */
static int kvrelay_router_ban_(kvrelay_router *r) {
  r->banned_ = true;
  kvrelay_router_count_(r, KVRELAY_COUNT_FOREIGN_RANK, 1);
  kvrelay_router_fail_(r);
  return kvrelay_router_drop_(r);
}

KVRELAY_API int kvrelay_router_dump_begin(kvrelay_router *r, ckf_producer *next, void *mem,
                                          size_t mem_len, uint64_t now_ns) {
  ckf_member member = kvrelay_router_member_(r);
  if (!r->recovering_ || r->waiting_ || r->asking_ || r->next_ != NULL)
    return KVRELAY_ERR_STATE;
  int err = ckf_rebuild_begin(next, r->state_, &member, 1, mem, mem_len);
  if (err == CKF_ERR_NOSPACE) {
    err = kvrelay_router_failed(r, KVRELAY_ROUTER_BROKEN, now_ns);
    return err == KVRELAY_OK ? KVRELAY_ERR_NOSPACE : err;
  }
  if (err != CKF_OK)
    return KVRELAY_ERR_INVARIANT;
  r->next_ = next;
  r->foreign_ = r->invalid_ = false;
  return KVRELAY_OK;
}

KVRELAY_API void kvrelay_router_dump_event(kvrelay_router *r, const kvrelay_router_event *ev) {
  ckf_outcome out;
  r->foreign_ = r->foreign_ || !kvrelay_router_ours_(r, ev);
  if (r->next_ == NULL || r->foreign_ || r->invalid_)
    return;
  kvrelay_router_into_(r->next_, ev, &out);
  r->invalid_ = kvrelay_router_reason_(out.error) != KVRELAY_COUNT_LEN;
}

KVRELAY_API int kvrelay_router_dump_end(kvrelay_router *r, uint64_t last_event_id,
                                        uint64_t now_ns) {
  (void)now_ns;
  int err;
  if (r->next_ == NULL)
    return 0;
  ckf_producer *next = r->next_;
  r->next_ = NULL;
  if (r->foreign_)
    return kvrelay_router_ban_(r);
  if (r->invalid_) { /* old blocks stay until the next recovery */
    kvrelay_router_count_(r, KVRELAY_COUNT_MALFORMED_EVENT, 1);
    r->reset_due_ = true;
    kvrelay_router_fail_(r);
    return 0;
  }
  if (ckf_rebuild_commit(r->state_, next) != CKF_OK)
    return KVRELAY_ERR_INVARIANT;
  r->failed_ = r->reset_due_ = r->stats_.has_event_id = false; /* a dump's cursor is the worker's */
  r->stats_.complete = true;
  err = kvrelay_router_recovered_(r, last_event_id);
  return err == KVRELAY_OK ? 1 : err;
}

KVRELAY_API int kvrelay_router_again(kvrelay_router *r, const kvrelay_router_event *ev,
                                     uint64_t now_ns) {
  (void)now_ns;
  if (!r->recovering_ || r->waiting_ || r->asking_)
    return KVRELAY_OK;
  if (!kvrelay_router_ours_(r, ev))
    return kvrelay_router_ban_(r);
  if (r->failed_ || !kvrelay_router_new_(r, ev))
    return KVRELAY_OK;
  kvrelay_router_count_(r, KVRELAY_COUNT_REPLAY, 1);
  return kvrelay_router_apply_(r, ev);
}

KVRELAY_API int kvrelay_router_again_end(kvrelay_router *r, uint64_t last_event_id,
                                         uint64_t now_ns) {
  if (!r->recovering_ || r->waiting_ || r->asking_)
    return KVRELAY_OK;
  if (r->failed_) /* only a dump heals */
    return kvrelay_router_failed(r, KVRELAY_ROUTER_NO_DUMP, now_ns);
  return kvrelay_router_recovered_(r, last_event_id);
}

/* ---- time and read-outs ---- */

KVRELAY_API int kvrelay_router_tick(kvrelay_router *r, uint64_t now_ns) {
  int err = KVRELAY_OK;
  if (r->recovering_ && now_ns >= r->deadline_ns_) {
    if (!r->waiting_)
      return kvrelay_router_failed(r, KVRELAY_ROUTER_BROKEN, now_ns);
    r->waiting_ = false;
    r->asking_ = true;
    r->deadline_ns_ = now_ns + r->cfg_.attempt_timeout_ns;
  }
  if (r->wanted_ && !r->recovering_ && now_ns >= r->from_ns_) {
    if (r->reset_due_)
      err = kvrelay_router_drop_(r);
    r->reset_due_ = false;
    kvrelay_router_begin_(r, now_ns);
  }
  return err;
}

KVRELAY_API uint64_t kvrelay_router_deadline_ns(const kvrelay_router *r) {
  return r->recovering_ ? r->deadline_ns_ : r->wanted_ ? r->from_ns_ : KVRELAY_TIME_NONE;
}

KVRELAY_API int kvrelay_router_reset(kvrelay_router *r) {
  r->banned_ = true;
  r->next_ = NULL;
  kvrelay_router_fail_(r);
  return kvrelay_router_drop_(r);
}

KVRELAY_API int kvrelay_router_state(const kvrelay_router *r) {
  return r->failed_ ? KVRELAY_ROUTER_FAILED
                    : (r->recovering_ ? KVRELAY_ROUTER_RECOVERING : KVRELAY_ROUTER_LIVE);
}

KVRELAY_API const kvrelay_router_stats *kvrelay_router_stats_get(const kvrelay_router *r) {
  return &r->stats_;
}

#ifdef __cplusplus
}
#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif
#endif
#endif /* KVRELAY_IMPLEMENTATION */
