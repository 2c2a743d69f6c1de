/* SPDX-License-Identifier: Apache-2.0 */

/* ==== ckf.h: the cuckoo filter of KV-cache blocks ==== */
/*
 * One side keeps exact ownership of blocks per (worker, rank) and derives filter words from it; the
 * other keeps a replica of the words and asks how many leading blocks of a prompt they hold.
 *
 *   #include <stdio.h>
 *   #include <stdlib.h>
 *   #define CKF_IMPLEMENTATION
 *   #include "ckf.h"
 *
 *   int main(void) {
 *     const ckf_member engine = {7, 0};
 *     const ckf_block blocks[] = {{0xE1, 0xA1}, {0xE2, 0xA2}};
 *     const uint64_t query[] = {0xA1, ckf_child(0xA1, 0xA2)};
 *     ckf_producer_config cfg = ckf_producer_config_default();
 *     ckf_producer p;
 *     ckf_outcome out;
 *     cfg.filter.expected_blocks = 1000;
 *     const size_t len = ckf_producer_mem_size(&cfg);
 *     if (ckf_producer_init(&p, &cfg, malloc(len), len) != CKF_OK ||
 *         ckf_producer_stored(&p, &engine, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
 *                             blocks, 2, &out) != CKF_OK)
 *       return 1;
 *     printf("%u\n", ckf_search(ckf_producer_format(&p), ckf_producer_words(&p), query, 2));
 *     return 0;
 *   }
 *
 * A plain include declares; CKF_IMPLEMENTATION, in one unit, defines; CKF_STATIC makes a private
 * copy of everything for this unit.
 */

/* ==== contents ==== */
/*
 * conventions and trust
 * version
 * configuration
 * compiler shims
 * types
 * errors
 * format and addressing
 * packed bucket and generator
 * filter
 * producer
 * rebuild
 * publisher
 * cbi1
 * assembly
 * replica
 * table
 * lane
 * search
 */

/* ==== conventions and trust ==== */
/*
 * - No allocation, clock, randomness, I/O or global state. Memory comes from the caller: ask
 *   `..._mem_size`, pass a block, keep it as long as the object is used.
 * - What can fail returns CKF_OK or a negative `enum ckf_err`; the object is unchanged on every
 *   error except where the function says otherwise. CKF_ERR_INVARIANT means damaged state: stop
 *   using the object and build a new one. Only from ckf_filter_remove it may also mean that the
 *   caller never inserted the key, and from a rebuild that a member is there already.
 * - A struct's `..._init` and `..._claim` return CKF_ERR_ABI when this unit and the one with the
 *   implementation see it in different sizes: compile both with one configuration.
 * - A canonical is a 64-bit sequence hash, the filter key; an external is an engine's block id.
 * - Engine events and CBI1 bytes are untrusted: none reaches an assertion, a large allocation or a
 *   loop that its own length does not bound. Who knows `hash_seed` can craft keys that all want the
 *   same few places, so that events are refused: give a random one where sources are not trusted.
 * - Pointers and lengths are the caller's: a pointer may be NULL only with length 0 or where said.
 * - An object is used by one thread at a time. Only the words and the readiness of a ckf_lane, and
 *   the words of a live ckf_replica, may be read while their one writer applies deltas.
 */

#if defined(CKF_STATIC) && defined(CKF_IMPLEMENTATION)
#error "ckf.h: define CKF_STATIC or CKF_IMPLEMENTATION, not both"
#endif

#ifndef CKF_H_
#define CKF_H_

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef CKF_CONFIG_H
#include CKF_CONFIG_H
#endif

/* ==== version ==== */

#define CKF_VERSION_MAJOR 0
#define CKF_VERSION_MINOR 1
#define CKF_VERSION_PATCH 0
#define CKF_FORMAT_VERSION 1    /* bits of the filter */
#define CKF_CBI1_WIRE_VERSION 1 /* bytes of a frame */

/* ==== configuration ==== */
/*
 * Set before the first include, or in a file that CKF_CONFIG_H names:
 *
 * CKF_MEMCPY, CKF_MEMSET, CKF_MEMCMP: all three, instead of those of <string.h>.
 * CKF_LOAD_ACQUIRE and its five companions below: atomic access where the compiler has none.
 * CKF_PORTABLE: no vector instructions.
 * CKF_BYTEWISE: assume no byte order; slower, the same results, and no ckf_cbi1_snapshot_prefix.
 */

#ifndef CKF_MEMCPY
#include <string.h>
#define CKF_MEMCPY memcpy
#define CKF_MEMSET memset
#define CKF_MEMCMP memcmp
#endif

/* ==== compiler shims ==== */

#if defined(__GNUC__)
#define CKF_MUST_USE __attribute__((warn_unused_result))
#define CKF_UNUSED_ __attribute__((unused))
#else
#define CKF_MUST_USE
#define CKF_UNUSED_
#endif

/* What readers and writers of a table need: define all six before including, or none. The two that
 * change bits return the value before. The fallback is for one thread. */
#ifndef CKF_LOAD_ACQUIRE
#if defined(__GCC_ATOMIC_LLONG_LOCK_FREE) && __GCC_ATOMIC_LLONG_LOCK_FREE == 2
#define CKF_LOAD_ACQUIRE(P) __atomic_load_n((P), __ATOMIC_ACQUIRE)
#define CKF_STORE_RELEASE(P, V) __atomic_store_n((P), (V), __ATOMIC_RELEASE)
#define CKF_LOAD_RELAXED(P) __atomic_load_n((P), __ATOMIC_RELAXED)
#define CKF_STORE_RELAXED(P, V) __atomic_store_n((P), (V), __ATOMIC_RELAXED)
#define CKF_FETCH_OR(P, V) __atomic_fetch_or((P), (V), __ATOMIC_ACQ_REL)
#define CKF_FETCH_AND(P, V) __atomic_fetch_and((P), (V), __ATOMIC_ACQ_REL)
#else
#define CKF_LOAD_ACQUIRE(P) (*(P))
#define CKF_STORE_RELEASE(P, V) ((void)(*(P) = (V)))
#define CKF_LOAD_RELAXED(P) (*(P))
#define CKF_STORE_RELAXED(P, V) ((void)(*(P) = (V)))
#define CKF_FETCH_OR(P, V) ckf_fetch_or_plain_((P), (V))
#define CKF_FETCH_AND(P, V) ckf_fetch_and_plain_((P), (V))
#define CKF_PLAIN_BITS_
#endif
#endif

#ifdef CKF_STATIC
#define CKF_MODE_STATIC_
#define CKF_API static CKF_UNUSED_
#else
#define CKF_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== types ==== */

#define CKF_FINGERPRINT_BITS 16
#define CKF_SLOTS_PER_BUCKET 4
#define CKF_MIN_BUCKETS 2
#define CKF_MAX_BUCKETS (UINT64_C(1) << 24)
#define CKF_MAX_KICKS 4096
#define CKF_MAX_WINDOW 8
#define CKF_LANES 16
#define CKF_DEFAULT_SEED UINT64_C(0x5DEECE66D1B54A33)
#define CKF_CHAIN_SEED 1337
#define CKF_DELTA_TABLE_LEN 65536u

#define CKF_CBI1_HEADER_BYTES 48
#define CKF_CBI1_SNAPSHOT_PREFIX_BYTES 64 /* header and chunk header, in front of the words */
#define CKF_CBI1_DELTA_PREFIX_BYTES 60    /* header, base epoch and count, in front of the images */
#define CKF_CBI1_IMAGE_BYTES 12
#define CKF_CBI1_MAX_CHUNK_BUCKETS 524288
#define CKF_CBI1_MAX_FRAME_BYTES 4194368
#define CKF_CBI1_MAX_IMAGES 349525

/** Where an engine holds a block; only CKF_TIER_DEVICE reaches the filter. */
enum ckf_tier { CKF_TIER_DEVICE = 0, CKF_TIER_HOST_PINNED, CKF_TIER_DISK, CKF_TIER_EXTERNAL };

/** Residency domain of an event as it was read. */
enum ckf_domain {
  CKF_DOMAIN_MISSING = 0,
  CKF_DOMAIN_WORKER,
  CKF_DOMAIN_CACHE_OWNER,
  CKF_DOMAIN_UNKNOWN,
  CKF_DOMAIN_MALFORMED
};

/** What two sides must share to understand each other's words; the other three parts of the
 * identity are constants. */
typedef struct ckf_format {
  uint64_t seed;
  uint64_t bucket_count; /* a power of two in 2 .. CKF_MAX_BUCKETS */
} ckf_format;

/** Filter parameters; start from ckf_config_default(). */
typedef struct ckf_config {
  uint64_t expected_blocks; /* 1 .. 53,687,091; default 1 */
  uint32_t max_kicks;       /* 1 .. 4096 relocations per insertion; default 500 */
  uint32_t
      verification_window; /* 1 .. 8; checked, and used by no search of this library; default 2 */
  uint64_t publish_every_n_events; /* 1 .. ; default 1 */
  uint64_t seed;                   /* any; default CKF_DEFAULT_SEED */
} ckf_config;

/** The fingerprint of a key and its two home buckets, a != b. */
typedef struct ckf_probe {
  uint16_t fp; /* never 0 */
  uint32_t a, b;
} ckf_probe;

/** One bucket and a word: the new one in a batch, the one before the write in a write log. */
typedef struct ckf_image {
  uint32_t bucket;
  uint64_t word;
} ckf_image;

/** A filter over the caller's words; private fields, size may change. */
typedef struct ckf_filter {
  uint64_t *words_;
  ckf_image *log_;         /* writes of the last call, old words; a failed one leaves none */
  const uint32_t *deltas_; /* unmasked low bits per fingerprint, or NULL */
  uint64_t rng_;
  ckf_format format_;
  uint32_t mask_;
  uint32_t max_kicks_;
  uint32_t log_len_;
} ckf_filter;

/** One engine rank. Members are ordered by worker, then rank. */
typedef struct ckf_member {
  uint64_t worker_id;
  uint32_t dp_rank;
} ckf_member;

/** One block of a store event. */
typedef struct ckf_block {
  uint64_t external;
  uint64_t local; /* local block hash */
} ckf_block;

/** Parameters of a producer. All limits are capacities that are reserved at init; an event that
 * would exceed one is refused as a whole (CKF_ERR_NOSPACE). */
typedef struct ckf_producer_config {
  ckf_config filter;
  uint32_t max_mappings; /* 0 = 2 * expected_blocks, at least 2048; (member, external) pairs, 11.4
                            bytes each */
  uint32_t max_blocks;   /* 0 = 1.25 * expected_blocks, at least 1280; unique canonicals, 10 bytes
                            each; never more than max_mappings */
  uint32_t max_members;  /* 0 = 1024; about 180 bytes each */
  bool delta_table;      /* true: 256 KiB more, a lookup instead of a hash per fingerprint */
  bool tags;             /* true: 4 bytes more per mapping for ckf_producer_find; default false */
  uint64_t hash_seed; /* keys the private hash tables; random where event sources are not trusted */
} ckf_producer_config;

/** Outcome of one event. */
typedef struct ckf_outcome {
  int error;         /* first error or CKF_OK; the value the call returned */
  bool ignored;      /* the event does not count (tier or domain): nothing pends, nothing changed */
  bool boundary;     /* the cadence is reached: call ckf_producer_drain when it suits */
  uint32_t unknown;  /* externals of a removal that the member does not map */
  uint32_t mapped;   /* new mappings */
  uint32_t repeated; /* externals the member mapped already, to the same canonical */
  uint32_t unmapped; /* mappings removed */
  uint32_t omitted;  /* blocks that found no place in the filter */
} ckf_outcome;

/** A drained window: absolute words of changed buckets in order of first touch, in the bytes of a
 * CBI1 delta; read one with ckf_batch_image. Lent until the next call that changes the producer. */
typedef struct ckf_batch {
  const uint8_t *images; /* CKF_CBI1_IMAGE_BYTES each */
  size_t image_count;    /* at least 1 when a batch was returned */
} ckf_batch;

/** Hears that a canonical got its first owner (`created`) or lost its last one. It must not call
 * the producer. */
typedef void (*ckf_listener_fn)(void *user, uint64_t canonical, bool created);

/** Counters and sizes of a producer. */
typedef struct ckf_producer_stats {
  uint64_t members, contributions, unique_blocks, occupied_slots, pending_events;
  uint64_t unknown_removals, parent_not_found;
  uint64_t capacity_failures; /* blocks that found no place in the filter, ever */
  uint64_t nospace_blocks;    /* blocks of the events that CKF_ERR_NOSPACE refused */
  uint64_t physical_touches, distinct_touched, emitted, net_reverted;
  uint64_t generator;                /* state of the relocation generator */
  uint64_t mem_bytes;                /* the whole memory block */
  uint64_t exact_bytes;              /* of these: members, mappings, blocks */
  uint64_t filter_bytes;             /* of these: words, dirty tracking, scratch, delta table */
  uint64_t words_bytes, dirty_bytes; /* of the filter's */
  uint64_t max_mappings, max_blocks; /* limits, defaults filled in */
} ckf_producer_stats;

/** One mapping of a member. */
typedef struct ckf_mapping {
  uint64_t external;
  uint64_t canonical;
  uint32_t tag; /* 0 in a producer without tags */
} ckf_mapping;

/* Private parts of a producer, complete in the implementation. */
struct ckf_slot_;
struct ckf_spill_;
typedef struct ckf_table_ {
  uint64_t *rows; /* of 64 bytes, aligned to 64 */
  uint64_t key, factor, inverse;
  uint32_t row_count;
  uint32_t implied; /* bits of a hash that need not be stored because the row tells them */
} ckf_table_;

/** Exact state, filter and publication window of one pool; private fields, size may change. */
typedef struct ckf_producer {
  ckf_filter filter_;
  ckf_producer_config cfg_;
  ckf_table_ mappings_, blocks_;
  uint32_t *tags_;           /* one per place of a mapping, or NULL */
  struct ckf_slot_ *slots_;  /* members */
  uint64_t *regions_;        /* per slot: where in the table its mappings are */
  uint32_t *member_index_;   /* hash table of slot + 1 */
  struct ckf_spill_ *spill_; /* owner counts that do not fit a block's cell */
  ckf_member *sorted_;       /* scratch for the ordered member list */
  uint64_t *dirty_bits_;
  uint8_t *dirty_; /* touched buckets with their word at first touch, as images of a delta */
  uint32_t dirty_len_;
  uint32_t slot_bits_, match_bits_, region_shift_, owner_bits_;
  uint32_t member_mask_, spill_mask_;
  uint32_t slot_used_, slot_free_, member_count_;
  uint32_t block_count_, resident_count_, mapping_count_;
  uint64_t changes_; /* events and removals so far: a rebuild must not miss one */
  uint64_t pending_;
  uint64_t unknown_removals_, parent_not_found_, capacity_failures_, nospace_blocks_;
  uint64_t physical_touches_, distinct_touched_, emitted_, net_reverted_;
  size_t mem_bytes_, exact_bytes_;
  ckf_listener_fn listener_;
  void *listener_user_;
  ckf_member last_pushed_;
  bool rebuilding_, pushed_;
} ckf_producer;

/** A decoded CBI1 frame: a view into the bytes that were decoded, valid as long as they are. */
typedef struct ckf_cbi1_frame {
  int kind; /* CKF_CBI1_SNAPSHOT or CKF_CBI1_DELTA */
  ckf_format format;
  uint64_t dc_id;
  uint64_t epoch;       /* the publication sequence */
  uint64_t base_epoch;  /* delta only */
  uint32_t image_count; /* delta only */
  uint32_t chunk_index; /* snapshot chunk only, as are the next three */
  uint32_t chunk_count;
  uint64_t bucket_offset;
  uint32_t word_count;
  const uint8_t *data; /* images or words, little endian, any alignment */
  uint64_t detail;     /* after an error: the offending value where the error has one */
} ckf_cbi1_frame;

enum ckf_cbi1_kind { CKF_CBI1_SNAPSHOT = 1, CKF_CBI1_DELTA = 2 };

/** Joins the chunks of one snapshot in the caller's words; private fields, size may change. */
typedef struct ckf_assembly {
  uint64_t *words_;
  uint64_t bucket_count_;
  uint64_t epoch_;
  uint64_t next_bucket_;
  uint32_t chunk_count_, next_chunk_;
} ckf_assembly;

/** One pool as seen over one stream: snapshot, then deltas; private fields, size may change. */
typedef struct ckf_replica {
  ckf_assembly assembly_;
  ckf_format format_;
  uint64_t *seen_; /* one bit per bucket, all zero between calls */
  uint64_t sequence_;
  bool live_;
} ckf_replica;

/** What one cache means, whatever data centre holds it: two digests with their sources (explicit or
 * default-derived, compared as numbers). */
typedef struct ckf_indexer_domain {
  uint8_t semantics_digest[16];
  uint8_t routing_digest[16];
  uint8_t semantics_source;
  uint8_t routing_source;
} ckf_indexer_domain;

/** A pool: an indexer domain in one data centre. */
typedef struct ckf_pool {
  ckf_indexer_domain domain;
  uint64_t dc_id;
} ckf_pool;

/** One life of a pool's producer. */
typedef struct ckf_identity {
  ckf_pool pool;
  uint64_t producer_incarnation;
  uint64_t layout_generation;
  ckf_format format;
} ckf_identity;

/** The right to fill one lane of one consumer; the consumer makes it and the producer's side hands
 * it back with each delta. */
typedef struct ckf_lease {
  uint64_t consumer_instance; /* one life of the consumer; that of its manifest */
  uint8_t physical_lane;      /* 0 .. 15 */
  uint64_t assignment_epoch;  /* greater than in any lease that this lane had before */
} ckf_lease;

/** Why a publisher sends nothing until the next snapshot. */
enum ckf_fence {
  CKF_FENCE_NONE = 0,
  CKF_FENCE_SEQUENCE_EXHAUSTED, /* for good: only a new generation of the producer helps */
  CKF_FENCE_DELIVERY_UNCERTAIN,
  CKF_FENCE_LEASE_STALLED
};

/** One delta on its way to the holder of a lease; everything is lent for the call of the sink. */
typedef struct ckf_delta_out {
  const ckf_identity *identity;
  const ckf_lease *lease;
  uint64_t base;
  uint64_t sequence; /* base + 1 */
  ckf_batch batch;
} ckf_delta_out;

/** Takes a delta; false refuses it, and the publisher fences itself. */
typedef bool (*ckf_sink_fn)(void *user, const ckf_delta_out *delta);

/** Numbers the batches of one producer for one lease at a time; private fields, size may change. */
typedef struct ckf_publisher {
  ckf_identity identity_;
  ckf_lease lease_;
  ckf_sink_fn sink_;
  void *user_;
  uint64_t last_;
  enum ckf_fence fence_;
  bool leased_;
} ckf_publisher;

/** What a lane call did. */
enum ckf_lane_result {
  CKF_LANE_IGNORED_FOREIGN_LEASE = 0,
  CKF_LANE_IGNORED_STALE, /* a: installed sequence */
  CKF_LANE_AWAITING_SNAPSHOT,
  CKF_LANE_SNAPSHOT_INSTALLED, /* a: sequence */
  CKF_LANE_DELTA_APPLIED,      /* a: sequence, b: images */
  CKF_LANE_DRAIN_ACKNOWLEDGED, /* a: installed sequence */
  CKF_LANE_DEACTIVATED         /* fault and action say why and what next */
};

/** Why a lane was deactivated; a and b as in the comments. */
enum ckf_lane_fault {
  CKF_FAULT_NONE = 0,
  CKF_FAULT_WRONG_IDENTITY,
  CKF_FAULT_SNAPSHOT_BUCKET_COUNT, /* a: expected, b: actual */
  CKF_FAULT_SNAPSHOT_WHILE_READY,  /* a: installed, b: snapshot */
  CKF_FAULT_BASE_MISMATCH,         /* a: expected, b: actual */
  CKF_FAULT_SEQUENCE_EXHAUSTED,    /* completes the list; at the last number every delta is stale */
  CKF_FAULT_NON_CONTIGUOUS,        /* a: base, b: sequence */
  CKF_FAULT_EMPTY_DELTA,
  CKF_FAULT_IMAGE_INDEX,      /* a: bucket */
  CKF_FAULT_DUPLICATE_IMAGE,  /* a: bucket */
  CKF_FAULT_TERMINAL_MISMATCH /* a: expected, b: installed, UINT64_MAX when not ready */
};

/** What the owner of a failed state does; a lane's outcome has only the last two. */
enum ckf_lane_action {
  CKF_ACTION_NONE = 0,
  CKF_ACTION_CONTINUE_CAPACITY_OMISSION, /* nothing: the filter holds less than it could */
  CKF_ACTION_REPORT_RESOURCE_FAILURE,
  CKF_ACTION_REJECT_SOURCE,
  CKF_ACTION_FENCE_AND_REBUILD_PRODUCER,
  CKF_ACTION_DEACTIVATE_AND_SNAPSHOT,
  CKF_ACTION_RETRY_SNAPSHOT
};

typedef struct ckf_lane_outcome {
  enum ckf_lane_result result;
  enum ckf_lane_fault fault;
  enum ckf_lane_action action;
  uint64_t a, b;
} ckf_lane_outcome;

/** Which pool each lane of one consumer holds; never changes once a table is built of it. */
typedef struct ckf_manifest {
  uint64_t consumer_instance;
  ckf_indexer_domain domain; /* all pools share it */
  ckf_format format;         /* and this */
  uint32_t configured;       /* bit L: lane L is in use and holds pools[L] */
  ckf_pool pools[CKF_LANES];
} ckf_manifest;

/** The words of up to 16 filters of one format, one column per lane, and which of them are ready.
 * One writer per lane, any number of readers; private fields, size may change. */
typedef struct ckf_table {
  uint64_t *words_; /* row after row; row = bucket */
  uint64_t *seen_;  /* one bit per bucket and column, all zero between calls of a lane */
  ckf_manifest manifest_;
  uint32_t column_shift_; /* log2 of the words of a row */
  uint32_t ready_;        /* bit L; with the words all that readers load */
  uint32_t claimed_;
} ckf_table;

/** One lane of a table and its only writer; private fields, size may change. */
typedef struct ckf_lane {
  ckf_table *table_;
  uint64_t *seen_;
  ckf_identity identity_;
  ckf_lease lease_;
  uint64_t last_epoch_;
  uint64_t installed_;
  uint32_t number_;
  bool ready_, assigned_, epoch_known_;
} ckf_lane;

/** Writes the local block hashes [from, to) of a prompt into `locals`, for ckf_query_init_lazy. */
typedef void (*ckf_locals_fn)(void *user, uint64_t *locals, size_t from, size_t to);

/** A prompt that is hashed as far as some search has looked; private fields, size may change. */
typedef struct ckf_query {
  uint64_t *locals_;   /* local block hashes, NULL when all keys are there; `make_` alone writes */
  uint64_t *keys_;     /* sequence hashes, `known_` of them */
  ckf_locals_fn make_; /* writes locals that are not there yet, or NULL */
  void *user_;
  uint32_t len_, known_;
} ckf_query;

/** The answers of all lanes of a table. */
typedef struct ckf_matches {
  uint32_t lanes;             /* bit L: lane L was ready, and depths[L] is its answer */
  uint32_t depths[CKF_LANES]; /* leading blocks that the lane holds; 0 where it was not ready */
} ckf_matches;

/** Row of answers for one position: bit L is set when lane L may hold the block there. */
typedef uint32_t (*ckf_row_fn)(void *user, size_t position);

/* ==== errors ==== */

/** Return codes, -2xx. */
enum ckf_err {
  CKF_OK = 0,
  CKF_ERR_ARG = -201,     /* caller error */
  CKF_ERR_NOSPACE = -202, /* memory too small or table full: AllocationFailed, nothing changed */
  CKF_ERR_ABI = -203,     /* struct size differs: units built with different configurations */
  /* events */
  CKF_ERR_CAPACITY_EXHAUSTED = -210, /* no place in the filter; a producer owns the block anyway */
  CKF_ERR_PARENT_NOT_FOUND = -211,
  CKF_ERR_INVALID_BLOCK_SEQUENCE = -212,
  CKF_ERR_OWNERSHIP_OVERFLOW = -213,
  CKF_ERR_INVARIANT = -214, /* damaged: fence and rebuild */
  CKF_ERR_UNSUPPORTED_DOMAIN = -215,
  CKF_ERR_BLOCK_NOT_FOUND = -216, /* completes the list; never returned */
  /* configuration */
  CKF_ERR_EXPECTED_ZERO = -220,
  CKF_ERR_MAX_KICKS = -221,
  CKF_ERR_WINDOW = -222,
  CKF_ERR_PUBLISH_EVERY = -223,
  CKF_ERR_CAPACITY_OVERFLOW = -224,
  /* CBI1 */
  CKF_ERR_TRUNCATED = -230,
  CKF_ERR_FRAME_TOO_LARGE = -231,
  CKF_ERR_MAGIC = -232,
  CKF_ERR_WIRE_VERSION = -233,
  CKF_ERR_CHECKSUM = -234,
  CKF_ERR_MALFORMED = -235,
  CKF_ERR_FORMAT_VERSION = -236,
  CKF_ERR_FORMAT_FINGERPRINT_BITS = -237,
  CKF_ERR_FORMAT_SLOTS = -238,
  CKF_ERR_FORMAT_MISMATCH = -239,
  CKF_ERR_FORMAT_BUCKET_COUNT = -240,
  CKF_ERR_FLAGS = -241,
  CKF_ERR_DELTA_IMAGE_COUNT = -242,
  CKF_ERR_SNAPSHOT_WORD_COUNT = -243,
  CKF_ERR_SNAPSHOT_BUCKET_COUNT = -244,
  CKF_ERR_BUCKET_INDEX = -245,
  CKF_ERR_CHUNK_SEQUENCE = -246,
  CKF_ERR_INCOMPLETE_COVERAGE = -247,
  /* replica: the stream cannot go on */
  CKF_ERR_NOT_LIVE = -250,      /* delta before the snapshot is complete */
  CKF_ERR_SNAPSHOT_LIVE = -251, /* chunk after the snapshot is complete */
  CKF_ERR_SEQUENCE = -252, /* base is not the installed sequence, or sequence is not base + 1 */
  CKF_ERR_EMPTY_DELTA = -253,
  CKF_ERR_DUPLICATE_IMAGE = -254,
  /* lane assignment */
  CKF_ERR_WRONG_CONSUMER = -260,
  CKF_ERR_WRONG_LANE = -261,
  CKF_ERR_WRONG_OWNER = -262,
  CKF_ERR_WRONG_FORMAT = -263,
  CKF_ERR_STALE_EPOCH = -264,
  /* publisher */
  CKF_ERR_FENCED = -270,  /* the batch is lost; a snapshot lifts the fence while numbers are left */
  CKF_ERR_ENQUEUE = -271, /* the sink refused: fenced from now on */
  CKF_ERR_SEQUENCE_EXHAUSTED = -272, /* no number is left: a new producer generation */
  /* table */
  CKF_ERR_MIXED_DOMAIN = -280,
  CKF_ERR_DUPLICATE_POOL = -281,
  CKF_ERR_DUPLICATE_DC = -282, /* completes the list; in one domain it is _DUPLICATE_POOL */
  CKF_ERR_NO_LANES = -283,
  CKF_ERR_INVALID_LANE = -284,
  CKF_ERR_UNCONFIGURED_LANE = -285,
  CKF_ERR_LANE_CLAIMED = -286,
  CKF_ERR_UNAVAILABLE = -287 /* no lane is ready: nothing is known, which is not depth 0 */
};

/** A short sentence for people; never NULL. */
CKF_API const char *ckf_strerror(int err);
/** The protocol's name of an error (`ParentBlockNotFound`, `FormatMismatch`), "" for CKF_OK; never
 * NULL. */
CKF_API const char *ckf_errname(int err);

/** Kinds of failure, told apart by what they may have damaged. */
enum ckf_failure {
  CKF_FAILURE_NONE = 0, /* a success, or a refusal that concerns nobody's state */
  CKF_FAILURE_BOUNDED_RELOCATION,
  CKF_FAILURE_PRECOMMIT_ALLOCATION,
  CKF_FAILURE_SOURCE_PROTOCOL,
  CKF_FAILURE_PREWRITE_INVARIANT,
  CKF_FAILURE_CONSUMER_BEFORE_WRITE,     /* gap or malformed: a lane's faults, a full queue */
  CKF_FAILURE_CONSUMER_WORKER_MID_APPLY, /* a worker died, or took too long */
  CKF_FAILURE_INACTIVE_SNAPSHOT_INSTALL  /* a bad snapshot on a lane that was not ready */
};

/** A state that fails and recovers as a whole. */
enum ckf_part { CKF_PART_NONE = 0, CKF_PART_PRODUCER_CORE, CKF_PART_CONSUMER_LANE };

/** What is known of the state after a failure. */
enum ckf_commit {
  CKF_COMMIT_KNOWN_UNCHANGED = 0,
  CKF_COMMIT_PHYSICAL_OMITTED, /* ownership is exact, the filter lacks some of the blocks */
  CKF_COMMIT_UNCERTAIN
};

/** What follows from a failure. */
typedef struct ckf_disposition {
  enum ckf_part part; /* where it happened; CKF_PART_NONE: there is nothing to do */
  enum ckf_commit commit;
  enum ckf_part recover; /* what has to be rebuilt or sent anew, if anything */
  enum ckf_lane_action action;
} ckf_disposition;

/** The kind of a producer's or decoder's error, CKF_FAILURE_NONE for mistakes of the caller. What a
 * lane or its worker did is known to its owner only: lane faults are
 * CKF_FAILURE_CONSUMER_BEFORE_WRITE, or, where the action is to retry,
 * CKF_FAILURE_INACTIVE_SNAPSHOT_INSTALL. */
CKF_API enum ckf_failure ckf_failure_of(int err);
/** What to do about a kind of failure. */
CKF_API ckf_disposition ckf_failure_disposition(enum ckf_failure failure);
/** The protocol's names (`BoundedRelocationFailure`, `ProducerCore`, `KnownUnchanged`), "" for
 * none; never NULL. */
CKF_API const char *ckf_failure_name(enum ckf_failure failure);
CKF_API const char *ckf_part_name(enum ckf_part part);
CKF_API const char *ckf_commit_name(enum ckf_commit commit);

/* ==== format and addressing ==== */

/** Defaults: 1 block, 500 kicks, window 2, cadence 1, CKF_DEFAULT_SEED. */
CKF_API ckf_config ckf_config_default(void);
/** Checks a configuration in the protocol's order and computes the bucket count (may be NULL).
 * CKF_ERR_EXPECTED_ZERO, CKF_ERR_MAX_KICKS, CKF_ERR_WINDOW, CKF_ERR_PUBLISH_EVERY,
 * CKF_ERR_CAPACITY_OVERFLOW; there is no upper limit here, but CBI1 and with it a producer ends at
 * CKF_MAX_BUCKETS. */
CKF_API CKF_MUST_USE int ckf_config_check(const ckf_config *cfg, uint64_t *bucket_count);
/** CKF_OK when the bucket count is a power of two in 2 .. CKF_MAX_BUCKETS, else
 * CKF_ERR_FORMAT_BUCKET_COUNT. */
CKF_API CKF_MUST_USE int ckf_format_check(const ckf_format *format);
/** Canonical hash of a child block. */
CKF_API uint64_t ckf_child(uint64_t parent_canonical, uint64_t local);
/** Fingerprint and home buckets of a canonical (tests, tools). The format must be valid. */
CKF_API ckf_probe ckf_probe_make(const ckf_format *format, uint64_t key);
/** Distance between the two homes of a fingerprint, 1 .. bucket_count - 1 (tests, tools). */
CKF_API uint32_t ckf_delta(const ckf_format *format, uint16_t fp);
/** The hash of a canonical before it is split (tests, tools). */
CKF_API uint64_t ckf_mix(const ckf_format *format, uint64_t key);
/** Fills a table of CKF_DELTA_TABLE_LEN entries that serves every bucket count of this seed; about
 * 1 ms. */
CKF_API void ckf_delta_table(uint64_t seed, uint32_t *table);

/* ==== packed bucket and generator ==== */

/** First empty slot of a word, 4 when full (tests, tools, as the next three). */
CKF_API unsigned ckf_word_first_empty(uint64_t word);
/** First slot that holds fp (not 0), 4 when none does. */
CKF_API unsigned ckf_word_first(uint64_t word, uint16_t fp);
/** True when a slot holds fp (not 0). */
CKF_API bool ckf_word_contains(uint64_t word, uint16_t fp);
/** Starting generator state of a lane; producers use lane 0. */
CKF_API uint64_t ckf_rng_start(uint64_t seed, uint32_t lane);
/** One splitmix64 draw. */
CKF_API uint64_t ckf_rng_draw(uint64_t *state);

/* ==== filter ==== */

/** Sets up a filter over `words` (format.bucket_count, zeroed or filled by the caller) and `log`
 * (max_kicks + 1 entries); `deltas` is a table of ckf_delta_table or NULL. All are lent for the
 * life of the filter. CKF_ERR_ARG (no words or log), CKF_ERR_MAX_KICKS,
 * CKF_ERR_FORMAT_BUCKET_COUNT, CKF_ERR_ABI: not set up. The generator starts as lane 0 of the seed.
 */
CKF_API CKF_MUST_USE int ckf_filter_init_abi(ckf_filter *filter, size_t filter_size,
                                             const ckf_format *format, uint32_t max_kicks,
                                             uint64_t *words, ckf_image *log,
                                             const uint32_t *deltas);
#define ckf_filter_init(FILTER, FORMAT, MAX_KICKS, WORDS, LOG, DELTAS)                             \
  ckf_filter_init_abi((FILTER), sizeof(ckf_filter), (FORMAT), (MAX_KICKS), (WORDS), (LOG), (DELTAS))
/** State of the relocation generator; with it and the words a filter goes on elsewhere exactly as
 * here (tests, tools). */
CKF_API uint64_t ckf_filter_rng(const ckf_filter *filter);
/** Sets what ckf_filter_rng returned (tests, tools). */
CKF_API void ckf_filter_set_rng(ckf_filter *filter, uint64_t state);
/** Inserts one copy of a key. CKF_ERR_CAPACITY_EXHAUSTED: words unchanged, log empty, generator
 * advanced by 1 + max_kicks. */
CKF_API CKF_MUST_USE int ckf_filter_insert(ckf_filter *filter, uint64_t key);
/** The same without moving residents; a failure costs one draw. */
CKF_API CKF_MUST_USE int ckf_filter_insert_home(ckf_filter *filter, uint64_t key);
/** Removes one copy of a key that was inserted; another key with the same fingerprint and homes
 * would lose its own. CKF_ERR_INVARIANT: no copy there, words unchanged, log empty. */
CKF_API CKF_MUST_USE int ckf_filter_remove(ckf_filter *filter, uint64_t key);
/** True for every key that is in, and by chance for about one in 8,000 of the others in a full
 * filter. */
CKF_API bool ckf_filter_contains(const ckf_filter *filter, uint64_t key);
/** Writes of the last insertion or removal in order: bucket and the word before; none when it
 * failed. Valid until the next one. */
CKF_API const ckf_image *ckf_filter_log(const ckf_filter *filter, size_t *len);
/** Batch forms with prefetch, in order, equal to n single calls; each returns how many succeeded,
 * and sets ok[i] (may be NULL) per key. The write log afterwards is that of the last key only. */
CKF_API size_t ckf_filter_insert_n(ckf_filter *filter, const uint64_t *keys, size_t n, bool *ok);
CKF_API size_t ckf_filter_remove_n(ckf_filter *filter, const uint64_t *keys, size_t n, bool *ok);
CKF_API size_t ckf_filter_contains_n(const ckf_filter *filter, const uint64_t *keys, size_t n,
                                     bool *ok);

/* ==== producer ==== */

/** Defaults of ckf_config_default and of the comments at the fields; set expected_blocks. */
CKF_API ckf_producer_config ckf_producer_config_default(void);
/** Bytes a producer needs, at any alignment; 0 when the configuration is refused. From about 1 M
 * blocks on, memory in huge pages makes events up to twice as fast. */
CKF_API size_t ckf_producer_mem_size(const ckf_producer_config *cfg);
/** Builds an empty producer in `mem`, which it uses as long as it lives; nothing has to be freed
 * but that block. Configuration errors as ckf_config_check, CKF_ERR_CAPACITY_OVERFLOW above
 * CKF_MAX_BUCKETS, more mappings than can be numbered (very many members and blocks at once) or
 * more bytes than the machine addresses, CKF_ERR_NOSPACE when `mem` is NULL or `len` too small,
 * CKF_ERR_ABI: not built. */
CKF_API CKF_MUST_USE int ckf_producer_init_abi(ckf_producer *p, size_t p_size,
                                               const ckf_producer_config *cfg, void *mem,
                                               size_t len);
#define ckf_producer_init(P, CFG, MEM, LEN)                                                        \
  ckf_producer_init_abi((P), sizeof(ckf_producer), (CFG), (MEM), (LEN))

/** A store event: blocks in chain order under `parent` (an external of this member; it counts only
 * with `has_parent`) or as a root. `start` is the place of blocks[0] in its prompt, in blocks,
 * where the source tells it (`has_start`): a root that does not start at 0 is refused as
 * CKF_ERR_INVALID_BLOCK_SEQUENCE, and under a parent it says nothing. A source that tells no place
 * passes false and 0.
 * Whole or nothing, except CKF_ERR_CAPACITY_EXHAUSTED, where everything stands and `out->omitted`
 * blocks have owners but no place in the filter. CKF_ERR_PARENT_NOT_FOUND,
 * CKF_ERR_INVALID_BLOCK_SEQUENCE, CKF_ERR_OWNERSHIP_OVERFLOW: the source is wrong, the event is
 * refused. CKF_ERR_NOSPACE: a limit of the configuration is reached, or the tables have no place
 * within reach: practically never, but from 96 % of `max_mappings` on when externals follow a very
 * regular pattern. Nothing of the event is kept, its blocks are counted in `nospace_blocks`, and
 * the producer goes on: later children of these blocks are CKF_ERR_PARENT_NOT_FOUND, their removals
 * unknown. CKF_ERR_UNSUPPORTED_DOMAIN: does not count; CKF_ERR_INVARIANT: fence and rebuild. A
 * refused event still counts for the cadence. `out` must not be NULL. */
CKF_API int ckf_producer_stored(ckf_producer *p, const ckf_member *member, enum ckf_tier tier,
                                enum ckf_domain domain, bool has_parent, uint64_t parent,
                                bool has_start, uint64_t start, const ckf_block *blocks, size_t n,
                                ckf_outcome *out);
/** A removal event; unknown externals are counted and skipped. CKF_ERR_ARG (no array, or one above
 * every limit), CKF_ERR_UNSUPPORTED_DOMAIN: does not count, nothing changed; CKF_ERR_INVARIANT:
 * fence and rebuild. */
CKF_API int ckf_producer_removed(ckf_producer *p, const ckf_member *member, enum ckf_tier tier,
                                 enum ckf_domain domain, const uint64_t *externals, size_t n,
                                 ckf_outcome *out);
/** A clear event: all mappings of the member go. CKF_ERR_UNSUPPORTED_DOMAIN, CKF_ERR_INVARIANT: as
 * ckf_producer_removed. */
CKF_API int ckf_producer_cleared(ckf_producer *p, const ckf_member *member, enum ckf_domain domain,
                                 ckf_outcome *out);
/** Drops a member outside any event; the caller drains right after. CKF_OK also for an unknown
 * member; CKF_ERR_INVARIANT: fence and rebuild. */
CKF_API CKF_MUST_USE int ckf_producer_remove_rank(ckf_producer *p, const ckf_member *member);
/** The same for all ranks of a worker. */
CKF_API CKF_MUST_USE int ckf_producer_remove_worker(ckf_producer *p, uint64_t worker_id);
/** Closes the window: 1 = `out` holds a batch, 0 = nothing changed. Pending events are 0
 * afterwards. CKF_ERR_ARG: `p` is the `next` of a rebuild, commit it first. */
CKF_API CKF_MUST_USE int ckf_producer_drain(ckf_producer *p, ckf_batch *out);
/** Image i < image_count of a batch. */
CKF_API ckf_image ckf_batch_image(const ckf_batch *batch, size_t i);
/** Writes image i of a batch that the caller makes of its own bytes (tests, tools). */
CKF_API void ckf_batch_put(uint8_t *images, size_t i, ckf_image image);

/** The format of its words; valid as long as the producer. */
CKF_API const ckf_format *ckf_producer_format(const ckf_producer *p);
/** The bucket_count words as they are now, drained or not; valid until a rebuild or a move. */
CKF_API const uint64_t *ckf_producer_words(const ckf_producer *p);
/** Events since the last drain. */
CKF_API uint64_t ckf_producer_pending(const ckf_producer *p);
/** Buckets that changed since then, each once: as many images as the next batch has at most. */
CKF_API uint32_t ckf_producer_dirty(const ckf_producer *p);
/** True when a drain would have something to look at. */
CKF_API bool ckf_producer_has_pending(const ckf_producer *p);
/** True when mappings have tags, see ckf_producer_config. */
CKF_API bool ckf_producer_has_tags(const ckf_producer *p);
/** Fills in all counters and sizes as they are now; no scan. */
CKF_API void ckf_producer_stats_get(const ckf_producer *p, ckf_producer_stats *out);
/** Buckets with at least one fingerprint: a full scan (tests, tools). */
CKF_API uint64_t ckf_producer_occupied_buckets(const ckf_producer *p);
/** The filter's answer; may be a false positive. */
CKF_API bool ckf_producer_contains(const ckf_producer *p, uint64_t canonical);
/** 1 and the number of owning mappings and whether the block is in the filter (either may be NULL);
 * 0 = no owner. */
CKF_API int ckf_producer_owners(const ckf_producer *p, uint64_t canonical, uint32_t *owners,
                                bool *resident);
/** 1 = mapped: its canonical and the caller's 32-bit tag (either may be NULL); 0 = not mapped.
 * `*tag` is NULL in a producer without tags. A new mapping has tag 0; the tag dies with the
 * mapping; the pointer is valid until the next event or removal. */
CKF_API int ckf_producer_find(ckf_producer *p, const ckf_member *member, uint64_t external,
                              uint64_t *canonical, uint32_t **tag);
/** Mappings of a member, 0 when it does not exist. */
CKF_API uint32_t ckf_producer_member_blocks(const ckf_producer *p, const ckf_member *member);
/** All members ascending; valid until the next call on the producer. */
CKF_API const ckf_member *ckf_producer_members(ckf_producer *p, size_t *count);
/** Walks the mappings of a member in no promised order: start with `*cursor` = 0; 1 = `out` is set,
 * 0 = no more. The producer must not change in between. */
CKF_API int ckf_producer_mapping_next(const ckf_producer *p, const ckf_member *member,
                                      uint32_t *cursor, ckf_mapping *out);
/** Has every canonical announced whose first owner comes or last owner goes from now on, also one
 * that finds no place in the filter; NULL ends it. An event announces in the order of its blocks,
 * and nothing if it is refused. A rebuild announces when it is committed, and only the difference:
 * removals first, each part in no promised order. */
CKF_API void ckf_producer_listen(ckf_producer *p, ckf_listener_fn listener, void *user);
/** Verifies every invariant by brute force (tests): CKF_OK or CKF_ERR_INVARIANT. */
CKF_API CKF_MUST_USE int ckf_producer_check_(const ckf_producer *p);

/* ==== rebuild ==== */
/*
 * Replaces whole ranks at once. `next` is built beside the living producer in a second block of the
 * same size: begin(next, p, named ranks) -> stored / removed / cleared on `next`, named ranks
 * ascending -> commit(p, next). Until the commit `p` is untouched, so dropping `next` gives up.
 * Events on `next` follow the rules of a recovery dump: nothing pends, repeats change nothing, an
 * applied removal or clear is CKF_ERR_INVALID_BLOCK_SEQUENCE, and a block without place is no error
 * (`omitted` counts it). A store for a member that has blocks already, retained or pushed before
 * another one, is CKF_ERR_INVARIANT, any other for a member below the last pushed CKF_ERR_ARG: the
 * order is wrong, `next` is unchanged. A member is pushed by its first store, also by one that is
 * empty or refused. */

/** Starts `next` from the members of `p` that are not in `named`. `mem` is not the memory of `p`.
 * `p` may be drained but not changed until the commit. CKF_ERR_NOSPACE: `len` is too small or,
 * practically never, what is retained finds no place in the new order: `p` goes on, try again with
 * another hash seed (ckf_producer_move) or more memory. CKF_ERR_ARG: `p` is itself the `next` of a
 * rebuild, or `named` is missing. After an error drop `next`. */
CKF_API CKF_MUST_USE int ckf_rebuild_begin(ckf_producer *next, const ckf_producer *p,
                                           const ckf_member *named, size_t named_len, void *mem,
                                           size_t len);
/** Puts `next` in the place of `p` with one pending event and the buckets that differ as its
 * window: drain right after. `p` then lives in the memory of `next`; its former memory is free.
 * CKF_ERR_ARG: `p` has changed since, start over. */
CKF_API CKF_MUST_USE int ckf_rebuild_commit(ckf_producer *p, ckf_producer *next);
/** Moves a producer as it is, window and counters included, into another block with other limits,
 * tags or hash seed; nobody who reads batches notices. `cfg->filter` must be that of `p`. Its
 * former memory is free afterwards; a rebuild under way must start over. CKF_ERR_ARG;
 * CKF_ERR_NOSPACE: `len` or a limit is too small; `p` is as before. */
CKF_API CKF_MUST_USE int ckf_producer_move(ckf_producer *p, const ckf_producer_config *cfg,
                                           void *mem, size_t len);

/* ==== publisher ==== */

/** Sets up a publisher without a lease; `last_sequence` is the number of the last batch so far.
 * CKF_ERR_ARG: no sink; CKF_ERR_ABI. */
CKF_API CKF_MUST_USE int ckf_publisher_init_abi(ckf_publisher *pub, size_t pub_size,
                                                const ckf_identity *identity,
                                                uint64_t last_sequence, ckf_sink_fn sink,
                                                void *user);
#define ckf_publisher_init(PUB, IDENTITY, LAST_SEQUENCE, SINK, USER)                               \
  ckf_publisher_init_abi((PUB), sizeof(ckf_publisher), (IDENTITY), (LAST_SEQUENCE), (SINK), (USER))
/** Sends a batch with the next number: 1 = sent, 0 = nobody holds a lease, the batch has no number
 * and is dropped. CKF_ERR_ENQUEUE (the sink refused), CKF_ERR_FENCED (a fence stands, lease or
 * not): the batch is lost, give the lease anew with ckf_publisher_snapshot. */
CKF_API CKF_MUST_USE int ckf_publisher_publish(ckf_publisher *pub, const ckf_batch *batch);
/** Gives the lease to a new holder, whose snapshot is numbered `*sequence`. Before: the caller
 * copies the words of the producer, then drains it; what the drain returned is `tail` (NULL = no
 * batch) and goes out under the old lease, if no fence stands; then the fence is lifted.
 * CKF_ERR_SEQUENCE_EXHAUSTED: the last number is spent, fence or not, for good; CKF_ERR_ENQUEUE:
 * the tail was refused, a second try with a new copy of the words succeeds. */
CKF_API CKF_MUST_USE int ckf_publisher_snapshot(ckf_publisher *pub, const ckf_lease *lease,
                                                const ckf_batch *tail, uint64_t *sequence);
/** Takes the lease back; what is published next is dropped. */
CKF_API void ckf_publisher_retire(ckf_publisher *pub);
/** Takes it back from a holder that does not keep up, and fences: what is published next gives
 * CKF_ERR_FENCED. */
CKF_API void ckf_publisher_retire_stalled(ckf_publisher *pub);
/** 1 = there is a lease: its holder must have installed `*expected_sequence`; 0 = there is none. */
CKF_API int ckf_publisher_drain_marker(const ckf_publisher *pub, ckf_lease *lease,
                                       uint64_t *expected_sequence);
/** Number of the last batch that was sent, or the one it was set up with. */
CKF_API uint64_t ckf_publisher_last_sequence(const ckf_publisher *pub);
/** Why nothing is sent, CKF_FENCE_NONE while it is. */
CKF_API enum ckf_fence ckf_publisher_fence(const ckf_publisher *pub);
/** The protocol's name of a fence, "" for none. */
CKF_API const char *ckf_fence_name(enum ckf_fence fence);

/* ==== cbi1 ==== */

/** Bytes of a delta frame with n images, 0 above CKF_CBI1_MAX_IMAGES. */
CKF_API size_t ckf_cbi1_delta_size(size_t image_count);
/** Encodes a delta; returns its bytes or an error: CKF_ERR_FORMAT_BUCKET_COUNT,
 * CKF_ERR_DELTA_IMAGE_COUNT, CKF_ERR_BUCKET_INDEX, CKF_ERR_NOSPACE (cap too small), nothing usable
 * written. */
CKF_API CKF_MUST_USE ptrdiff_t ckf_cbi1_delta_encode(const ckf_format *format, uint64_t dc_id,
                                                     uint64_t base_epoch, uint64_t epoch,
                                                     const ckf_image *images, size_t image_count,
                                                     uint8_t *out, size_t cap);
/** The same for the batch of a producer with this format. */
CKF_API CKF_MUST_USE ptrdiff_t ckf_cbi1_batch_encode(const ckf_format *format, uint64_t dc_id,
                                                     uint64_t base_epoch, uint64_t epoch,
                                                     const ckf_batch *batch, uint8_t *out,
                                                     size_t cap);
/** Number of chunks at `chunk_buckets` (1 .. 524,288) words each; 0 for impossible arguments. */
CKF_API uint32_t ckf_cbi1_chunk_count(const ckf_format *format, uint32_t chunk_buckets);
/** Bytes of one chunk's frame; 0 for impossible arguments. */
CKF_API size_t ckf_cbi1_snapshot_size(const ckf_format *format, uint32_t chunk_buckets,
                                      uint32_t chunk_index);
/** Encodes one chunk from all `word_count` words; returns its bytes or an error:
 * CKF_ERR_SNAPSHOT_BUCKET_COUNT, CKF_ERR_FORMAT_BUCKET_COUNT, CKF_ERR_ARG, CKF_ERR_NOSPACE. */
CKF_API CKF_MUST_USE ptrdiff_t ckf_cbi1_snapshot_encode(const ckf_format *format, uint64_t dc_id,
                                                        uint64_t epoch, const uint64_t *words,
                                                        size_t word_count, uint32_t chunk_buckets,
                                                        uint32_t chunk_index, uint8_t *out,
                                                        size_t cap);
/** The first 64 bytes of the same frame; the caller sends `*body_words` words (`*body`) after them
 * from memory. Only where memory is known to be little endian, else CKF_ERR_ARG. */
CKF_API CKF_MUST_USE int ckf_cbi1_snapshot_prefix(const ckf_format *format, uint64_t dc_id,
                                                  uint64_t epoch, const uint64_t *words,
                                                  size_t word_count, uint32_t chunk_buckets,
                                                  uint32_t chunk_index,
                                                  uint8_t out[CKF_CBI1_SNAPSHOT_PREFIX_BYTES],
                                                  const uint64_t **body, size_t *body_words);
/** Checks a whole frame in the protocol's order and fills a view into `bytes`. Any error: the frame
 * is refused, only `view->detail` is meaningful. `view->dc_id` is for the caller to compare. */
CKF_API CKF_MUST_USE int ckf_cbi1_decode(const ckf_format *expected, const uint8_t *bytes,
                                         size_t len, ckf_cbi1_frame *view);
/** Image i < image_count of a decoded delta. */
CKF_API ckf_image ckf_cbi1_image(const ckf_cbi1_frame *view, size_t i);
/** Word i < word_count of a decoded chunk. */
CKF_API uint64_t ckf_cbi1_word(const ckf_cbi1_frame *view, size_t i);

/* ==== assembly ==== */

/** Prepares to collect chunks in `words` (format->bucket_count of them), whose contents mean
 * nothing until a snapshot is complete; they are lent for the life of the assembly.
 * CKF_ERR_FORMAT_BUCKET_COUNT, CKF_ERR_ARG (no words, or another number), CKF_ERR_ABI: not set up.
 */
CKF_API CKF_MUST_USE int ckf_assembly_init_abi(ckf_assembly *as, size_t as_size,
                                               const ckf_format *format, uint64_t *words,
                                               size_t word_count);
#define ckf_assembly_init(AS, FORMAT, WORDS, WORD_COUNT)                                           \
  ckf_assembly_init_abi((AS), sizeof(ckf_assembly), (FORMAT), (WORDS), (WORD_COUNT))
/** Takes a decoded frame: 0 = more chunks wanted, 1 = complete and `*epoch` set.
 * CKF_ERR_CHUNK_SEQUENCE: out of order, started over (a frame that is no chunk changes nothing);
 * CKF_ERR_INCOMPLETE_COVERAGE: the last chunk left buckets open. */
CKF_API CKF_MUST_USE int ckf_assembly_absorb(ckf_assembly *as, const ckf_cbi1_frame *frame,
                                             uint64_t *epoch);

/* ==== replica ==== */

/** Bytes a replica needs for its words and its duplicate check; 0 for a bad format. */
CKF_API size_t ckf_replica_mem_size(const ckf_format *format);
/** Sets up a replica that awaits chunk 0 of a snapshot in `mem`, lent for its life.
 * CKF_ERR_FORMAT_BUCKET_COUNT, CKF_ERR_NOSPACE (`mem` is NULL or `len` below ckf_replica_mem_size),
 * CKF_ERR_ABI: not set up. */
CKF_API CKF_MUST_USE int ckf_replica_init_abi(ckf_replica *r, size_t r_size,
                                              const ckf_format *format, void *mem, size_t len);
#define ckf_replica_init(R, FORMAT, MEM, LEN)                                                      \
  ckf_replica_init_abi((R), sizeof(ckf_replica), (FORMAT), (MEM), (LEN))
/** Forgets everything: the next frame must be chunk 0 of a snapshot. */
CKF_API void ckf_replica_reset(ckf_replica *r);
/** Takes a decoded frame: 0 = more chunks wanted, 1 = live at a new sequence. Any error: nothing
 * was written to live words, the stream has to start over with ckf_replica_reset
 * (CKF_ERR_FORMAT_MISMATCH, CKF_ERR_NOT_LIVE, CKF_ERR_SNAPSHOT_LIVE, CKF_ERR_SEQUENCE,
 * CKF_ERR_EMPTY_DELTA, CKF_ERR_DUPLICATE_IMAGE, CKF_ERR_CHUNK_SEQUENCE,
 * CKF_ERR_INCOMPLETE_COVERAGE). */
CKF_API CKF_MUST_USE int ckf_replica_apply(ckf_replica *r, const ckf_cbi1_frame *frame);
/** True from a complete snapshot until the reset. */
CKF_API bool ckf_replica_live(const ckf_replica *r);
/** Installed sequence; meaningful while live. */
CKF_API uint64_t ckf_replica_sequence(const ckf_replica *r);
/** The format it was set up with. */
CKF_API const ckf_format *ckf_replica_format(const ckf_replica *r);
/** The words; NULL while not live. */
CKF_API const uint64_t *ckf_replica_words(const ckf_replica *r);

/* ==== table ==== */
/*
 * A consumer's filters side by side: a query looks at one row for all data centres. Memory is 8
 * bytes per bucket and column, the columns being the smallest power of two that reaches the highest
 * configured lane, so a consumer with one pool uses lane 0 and pays for one column.
 *
 * Threads: claims and lanes may be used from several threads at once, one thread per lane at a
 * time. Readers only take `const ckf_table *`; they never wait and never retry. A reader sees a
 * lane as ready only with all words of its snapshot; a delta is seen bucket by bucket. A query that
 * captured a lane before its retirement may finish on what is written there next.
 */

/** Checks lanes 0 .. 15 in order: CKF_ERR_MIXED_DOMAIN, CKF_ERR_DUPLICATE_POOL
 * (`*lane`, may be NULL, names the lane), then CKF_ERR_NO_LANES, and CKF_ERR_FORMAT_BUCKET_COUNT.
 * Bits above lane 15: CKF_ERR_INVALID_LANE. */
CKF_API CKF_MUST_USE int ckf_manifest_check(const ckf_manifest *manifest, uint32_t *lane);
/** Bytes a table needs at any alignment, 0 for a manifest that does not pass its check. */
CKF_API size_t ckf_table_mem_size(const ckf_manifest *manifest);
/** Builds a table without claims in `mem`, which is lent for its life. `verification_window` is
 * checked (1 .. 8, else CKF_ERR_WINDOW) and not needed. Errors of ckf_manifest_check;
 * CKF_ERR_CAPACITY_OVERFLOW: more bytes than the machine addresses; CKF_ERR_NOSPACE: `mem` is NULL
 * or `len` too small; CKF_ERR_ABI. Words in huge pages make queries of large tables faster. */
CKF_API CKF_MUST_USE int ckf_table_init_abi(ckf_table *table, size_t table_size,
                                            const ckf_manifest *manifest,
                                            uint32_t verification_window, void *mem, size_t len);
#define ckf_table_init(TABLE, MANIFEST, WINDOW, MEM, LEN)                                          \
  ckf_table_init_abi((TABLE), sizeof(ckf_table), (MANIFEST), (WINDOW), (MEM), (LEN))
/** The table's copy of its manifest; valid as long as the table. */
CKF_API const ckf_manifest *ckf_table_manifest(const ckf_table *table);
/** Lanes that are ready, one acquire load. */
CKF_API uint32_t ckf_table_ready(const ckf_table *table);
/** One bucket of a lane (tests, tools). */
CKF_API uint64_t ckf_table_word(const ckf_table *table, uint32_t lane, uint32_t bucket);
/** Takes readiness from the lanes of a mask, from any thread. Their writers are not told:
 * ckf_lane_ready stays true and deltas are applied where no reader looks, until a fault
 * (CKF_FAULT_SNAPSHOT_WHILE_READY at the next snapshot) or a new assignment. The snapshot after
 * that brings the readers back, and after a fault the lease is still the same: who withdraws for
 * good hands in nothing more under that lease, as ckf_ingest.h sees to. The caller excludes that a
 * ckf_lane_install or _activate of one of the lanes goes on meanwhile: it would put the bit back.
 */
CKF_API void ckf_table_withdraw(ckf_table *table, uint32_t lanes);

/* ==== lane ==== */
/*
 * The way of a lane: claim, assign, install a snapshot, apply deltas in order, drain, retire,
 * release.
 *
 * A lane that is ready takes no second snapshot: a newer one takes readiness away
 * (SNAPSHOT_WHILE_READY) and is taken when it is installed again. To refresh a lane without a
 * fault, assign it with a higher epoch first; it is not ready in between either way. Frames know
 * nothing of leases: the caller keeps the lease under which it asked for a stream and hands it in
 * with what that stream brings, so that what an earlier one still brings is ignored. It compares
 * ckf_cbi1_frame.dc_id with the pool's as well, because neither ckf_cbi1_decode nor a lane does.
 *
 * What the caller does on a `result`:
 *
 * - SNAPSHOT_INSTALLED, DELTA_APPLIED: wait for the delta with base `a`.
 * - DRAIN_ACKNOWLEDGED: nothing is missing; retire or assign.
 * - IGNORED_STALE: drop it, the words have it already.
 * - IGNORED_FOREIGN_LEASE: drop it; it belongs to another assignment, or there is none.
 * - AWAITING_SNAPSHOT: drop it and see that a snapshot comes. One that is older than this delta
 *   leaves a gap, which is a BASE_MISMATCH at the next delta.
 * - DEACTIVATED: the lane is not ready any more, its lease stays. By `fault`:
 *   - BASE_MISMATCH, NON_CONTIGUOUS, TERMINAL_MISMATCH: a delta was lost; get a snapshot.
 *   - EMPTY_DELTA, IMAGE_INDEX, DUPLICATE_IMAGE, SNAPSHOT_BUCKET_COUNT: the sender is wrong; report
 *     it and get a snapshot.
 *   - SNAPSHOT_WHILE_READY: install the same snapshot again.
 *   - WRONG_IDENTITY: the producer has begun a new life, so assign its identity with a higher epoch
 *     and get a snapshot; or it came from another stream.
 *
 * A snapshot after a fault is installed under the same lease, whatever its sequence, also an older
 * one; deltas meanwhile are AWAITING_SNAPSHOT. `action` is CKF_ACTION_RETRY_SNAPSHOT where a
 * snapshot was refused and the lane was not ready before, else CKF_ACTION_DEACTIVATE_AND_SNAPSHOT.
 * ckf_ingest.h is stricter: there only the former keeps its lease.
 */

/** Makes `lane` the writer of lane `number`: CKF_ERR_INVALID_LANE (16 or more),
 * CKF_ERR_UNCONFIGURED_LANE, CKF_ERR_LANE_CLAIMED (release it first), CKF_ERR_ABI: not claimed. The
 * lane has no assignment, knows no epoch and is not ready. */
CKF_API CKF_MUST_USE int ckf_lane_claim_abi(ckf_lane *lane, size_t lane_size, ckf_table *table,
                                            uint32_t number);
#define ckf_lane_claim(LANE, TABLE, NUMBER)                                                        \
  ckf_lane_claim_abi((LANE), sizeof(ckf_lane), (TABLE), (NUMBER))
/** Gives the lane up: readiness goes first, then the claim. The object is then unused, and the last
 * assignment epoch is forgotten with it: whoever claims the lane next goes on counting. */
CKF_API void ckf_lane_release(ckf_lane *lane);
/** Takes a new lease, both are copied: CKF_OK, not ready until a snapshot comes. Unchanged, even
 * ready: CKF_ERR_WRONG_CONSUMER, CKF_ERR_WRONG_LANE, CKF_ERR_WRONG_OWNER (not the pool of the
 * manifest), CKF_ERR_WRONG_FORMAT (a table has one format: such a pool needs another table);
 * CKF_ERR_STALE_EPOCH: not above the last one, take a higher one. */
CKF_API CKF_MUST_USE int ckf_lane_assign(ckf_lane *lane, const ckf_identity *identity,
                                         const ckf_lease *lease);
/** The error ckf_lane_assign would return; changes nothing. */
CKF_API CKF_MUST_USE int ckf_lane_assignable(const ckf_lane *lane, const ckf_identity *identity,
                                             const ckf_lease *lease);
/** Ends the assignment; readers stop, the last epoch stays known. */
CKF_API void ckf_lane_retire(ckf_lane *lane);

/** Writes a whole snapshot and makes the lane ready: CKF_LANE_SNAPSHOT_INSTALLED, the delta with
 * base `sequence` may follow. Ignored: a foreign lease; ready, and `sequence` is not new.
 * Deactivated: CKF_FAULT_WRONG_IDENTITY, CKF_FAULT_SNAPSHOT_BUCKET_COUNT,
 * CKF_FAULT_SNAPSHOT_WHILE_READY (a new one, to a lane that was ready). */
CKF_API CKF_MUST_USE ckf_lane_outcome ckf_lane_install(ckf_lane *lane, const ckf_identity *identity,
                                                       const ckf_lease *lease, uint64_t sequence,
                                                       const uint64_t *words, size_t word_count);
/** The first half of ckf_lane_install, with the same outcomes: everything but readiness.
 * CKF_LANE_SNAPSHOT_INSTALLED says that ckf_lane_activate may follow, at a moment the caller has
 * chosen; until then a lane is as one without a snapshot. */
CKF_API CKF_MUST_USE ckf_lane_outcome ckf_lane_stage(ckf_lane *lane, const ckf_identity *identity,
                                                     const ckf_lease *lease, uint64_t sequence,
                                                     const uint64_t *words, size_t word_count);
/** The second half; only after CKF_LANE_SNAPSHOT_INSTALLED, with no other call for this lane in
 * between: it is not checked. */
CKF_API void ckf_lane_activate(ckf_lane *lane);
/** Applies the next delta, CKF_LANE_DELTA_APPLIED; every check precedes the first write. Ignored: a
 * foreign lease; a sequence that is here. CKF_LANE_AWAITING_SNAPSHOT: not ready, drop it, the
 * snapshot comes. Deactivated: CKF_FAULT_WRONG_IDENTITY (also while not ready),
 * CKF_FAULT_BASE_MISMATCH, CKF_FAULT_NON_CONTIGUOUS, CKF_FAULT_EMPTY_DELTA, CKF_FAULT_IMAGE_INDEX,
 * CKF_FAULT_DUPLICATE_IMAGE. */
CKF_API CKF_MUST_USE ckf_lane_outcome ckf_lane_apply_delta(ckf_lane *lane,
                                                           const ckf_identity *identity,
                                                           const ckf_lease *lease, uint64_t base,
                                                           uint64_t sequence,
                                                           const ckf_image *images, size_t n);
/** Is everything up to `expected_sequence` here, and no more? CKF_LANE_DRAIN_ACKNOWLEDGED: it is. A
 * foreign lease is ignored. Deactivated: CKF_FAULT_TERMINAL_MISMATCH, also when it was not ready.
 */
CKF_API CKF_MUST_USE ckf_lane_outcome ckf_lane_drain(ckf_lane *lane, const ckf_lease *lease,
                                                     uint64_t expected_sequence);
/** What the writer believes; ckf_table_ready is what readers see. They differ after
 * ckf_table_withdraw, until a fault or a new assignment tells the writer. */
CKF_API bool ckf_lane_ready(const ckf_lane *lane);
/** Sequence of the last snapshot or delta; kept by a fault, 0 after an assignment or retirement. */
CKF_API uint64_t ckf_lane_installed(const ckf_lane *lane);
/** The protocol's names of an outcome, a fault and an action. */
CKF_API const char *ckf_lane_result_name(enum ckf_lane_result result);
CKF_API const char *ckf_lane_fault_name(enum ckf_lane_fault fault);
CKF_API const char *ckf_lane_action_name(enum ckf_lane_action action);

/* ==== search ==== */
/*
 * Every search answers with the number of leading blocks that a filter seems to hold, 0 .. len, at
 * most 2^32 - 1: exact where hits are contiguous, never below a linear scan, at most 2 * len + 16
 * probes per lane. It jumps, so blocks that are missing in the middle may go unnoticed, and the
 * answer then counts them. While a writer is at work the answer is approximate.
 */

/** Starts a query over a prompt of `len` blocks. `keys` has room for `len` sequence hashes, of
 * which the first `known` are there already, from an earlier turn of a conversation or from
 * elsewhere; the rest is hashed from `locals` (NULL when known is len) when a search wants it. Both
 * are lent until the query is done with. Nobody can tell that kept hashes are those of another
 * prompt, and the depths are then that one's: after an edit cut `known` to the blocks whose windows
 * lie before the first token that differs; for another seed (LoRA, namespace) start at 0. */
CKF_API void ckf_query_init(ckf_query *query, const uint64_t *locals, size_t len, uint64_t *keys,
                            size_t known);
/** The same before the local hashes are there: `make` (NULL: they are) writes into `locals` (room
 * for `len`) those that the next sequence hashes need, in order and each once, from `known` on. A
 * prompt that nobody has costs one block. */
CKF_API void ckf_query_init_lazy(ckf_query *query, uint64_t *locals, size_t len, uint64_t *keys,
                                 size_t known, ckf_locals_fn make, void *user);
/** How many sequence hashes are there now. */
CKF_API size_t ckf_query_known(const ckf_query *query);
/** Asks all lanes that are ready. CKF_ERR_UNAVAILABLE: none is, `out` is empty; that is no depth of
 * 0. CKF_ERR_ARG: the query has no keys or locals where it needs them, `out` is unchanged. One
 * query may go through several tables, one after the other. */
CKF_API CKF_MUST_USE int ckf_table_find(const ckf_table *table, ckf_query *query, ckf_matches *out);
/** The same for the next turn of a conversation: `matches` holds the answers to a prompt that this
 * one continues, or any other guess, and receives the new ones; without any, set its `lanes` to 0.
 * CKF_ERR_UNAVAILABLE: no lane is ready, `matches` is empty and the guesses are gone. CKF_ERR_ARG:
 * as ckf_table_find. A lane whose depth is the old one costs three probes; one that has grown is
 * searched from there, one that has lost blocks or has no old answer anew. */
CKF_API CKF_MUST_USE int ckf_table_find_again(const ckf_table *table, ckf_query *query,
                                              ckf_matches *matches);
/** The same as ckf_table_find for lanes captured earlier (bits of configured lanes count), ready or
 * not by now; `out` is empty where that would return CKF_ERR_ARG. */
CKF_API void ckf_table_find_captured(const ckf_table *table, uint32_t lanes, ckf_query *query,
                                     ckf_matches *out);
/** The same over the words of one filter and given sequence hashes, jumps included: to ask for one
 * block, whatever is before it, pass its hash alone, `ckf_search(format, words, &hash, 1)`. Another
 * thread may write the words meanwhile only by relaxed stores, as a live ckf_replica applies its
 * deltas; a producer and an assembly store plainly. */
CKF_API uint32_t ckf_search(const ckf_format *format, const uint64_t *words,
                            const uint64_t *sequence_hashes, size_t len);
/** The same search over a callback, for the lanes of a mask (bits 0 .. 15); depths of other lanes
 * are not written. */
CKF_API void ckf_search_rows(ckf_row_fn row, void *user, size_t len, uint32_t lanes,
                             uint32_t depths[CKF_LANES]);

#ifdef __cplusplus
}
#endif

#endif /* CKF_H_ */

#if defined(CKF_STATIC) && !defined(CKF_MODE_STATIC_)
#error "ckf.h: CKF_STATIC must be defined before the first inclusion"
#endif

#if defined(CKF_IMPLEMENTATION) || defined(CKF_STATIC)
#ifndef CKF_IMPLEMENTATION_
#define CKF_IMPLEMENTATION_

#if defined(__cplusplus) && defined(__GNUC__) /* casts are those of C */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif

/* ---- xxh3 begin ---- */
/* Wrapped by hand: scripts/sync-xxh3 carries these lines into another header, under a prefix of
   another length. */
/* clang-format off */

/* XXH3 with a 64-bit result and a numeric seed. Input may be unaligned and is read as little endian
   on every host. */
#if !defined(CKF_BYTEWISE)
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define CKF_XXH3_LITTLE_ENDIAN
#endif
#elif defined(_MSC_VER)
#define CKF_XXH3_LITTLE_ENDIAN
#endif
#endif

#if defined(__GNUC__) || defined(__clang__)
#define CKF_XXH3_FN static inline __attribute__((unused))
#else
#define CKF_XXH3_FN static inline
#endif

/* Vector instructions for the accumulators of long input: compilers do not find them by themselves.
   Freestanding builds may lack their header, and builds for size want the loop. */
#if defined(__SSE2__) && defined(CKF_XXH3_LITTLE_ENDIAN) && !defined(CKF_PORTABLE) && \
    __STDC_HOSTED__ != 0 && !defined(__OPTIMIZE_SIZE__)
#define CKF_XXH3_SSE2
#include <emmintrin.h>
#endif

/* gcc unrolls loops of known length from level 3 on only; those here are short. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__)
#define CKF_XXH3_UNROLL _Pragma("GCC unroll 4")
#else
#define CKF_XXH3_UNROLL
#endif

#define CKF_XXH3_SECRET_BYTES 192
#define CKF_XXH3_SHORT_MAX 240 /* longest input that is hashed without accumulators */
#define CKF_XXH3_STRIPE_BYTES 64
#define CKF_XXH3_BLOCK_STRIPES 16 /* (192 - 64) / 8: the secret moves 8 bytes per stripe */

#define CKF_XXH3_P32_1 UINT64_C(0x9e3779b1)
#define CKF_XXH3_P32_2 UINT64_C(0x85ebca77)
#define CKF_XXH3_P32_3 UINT64_C(0xc2b2ae3d)
#define CKF_XXH3_P64_1 UINT64_C(0x9e3779b185ebca87)
#define CKF_XXH3_P64_2 UINT64_C(0xc2b2ae3d27d4eb4f)
#define CKF_XXH3_P64_3 UINT64_C(0x165667b19e3779f9)
#define CKF_XXH3_P64_4 UINT64_C(0x85ebca77c2b2ae63)
#define CKF_XXH3_P64_5 UINT64_C(0x27d4eb2f165667c5)
#define CKF_XXH3_MX_1 UINT64_C(0x165667919e3779f9)
#define CKF_XXH3_MX_2 UINT64_C(0x9fb21c651e98df25)

/* The secret of seed 0. */
static const uint8_t ckf_xxh3_default[CKF_XXH3_SECRET_BYTES] = {
  0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
  0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
  0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
  0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
  0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
  0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
  0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
  0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
  0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
  0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
  0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
  0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e
};

/* The secret of one seed; derive it once when many inputs above 240 bytes share the seed. */
typedef struct ckf_xxh3_secret {
  uint8_t bytes[CKF_XXH3_SECRET_BYTES];
} ckf_xxh3_secret;

CKF_XXH3_FN uint32_t ckf_xxh3_swap32(uint32_t v) {
  return v >> 24 | (v >> 8 & 0xff00u) | (v & 0xff00u) << 8 | v << 24;
}

CKF_XXH3_FN uint64_t ckf_xxh3_swap64(uint64_t v) {
  const uint64_t high = ckf_xxh3_swap32((uint32_t)v);
  return high << 32 | ckf_xxh3_swap32((uint32_t)(v >> 32));
}

CKF_XXH3_FN uint64_t ckf_xxh3_rotl(uint64_t v, unsigned bits) {
  return v << bits | v >> (64 - bits);
}

CKF_XXH3_FN uint64_t ckf_xxh3_read32(const uint8_t *p) {
#if defined(CKF_XXH3_LITTLE_ENDIAN)
  uint32_t v;
  CKF_MEMCPY(&v, p, sizeof v);
  return v;
#else
  return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24;
#endif
}

CKF_XXH3_FN uint64_t ckf_xxh3_read64(const uint8_t *p) {
#if defined(CKF_XXH3_LITTLE_ENDIAN)
  uint64_t v;
  CKF_MEMCPY(&v, p, sizeof v);
  return v;
#else
  return ckf_xxh3_read32(p) | ckf_xxh3_read32(p + 4) << 32;
#endif
}

CKF_XXH3_FN void ckf_xxh3_write64(uint8_t *p, uint64_t v) {
#if defined(CKF_XXH3_LITTLE_ENDIAN)
  CKF_MEMCPY(p, &v, sizeof v);
#else
  int i;
  for (i = 0; i < 8; i++) {
    p[i] = (uint8_t)(v >> 8 * i);
  }
#endif
}

/* Both halves of the 128-bit product, xored. */
CKF_XXH3_FN uint64_t ckf_xxh3_fold(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
  __extension__ typedef unsigned __int128 ckf_xxh3_u128;
  const ckf_xxh3_u128 product = (ckf_xxh3_u128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
  const uint64_t a_lo = a & 0xffffffffu, a_hi = a >> 32;
  const uint64_t b_lo = b & 0xffffffffu, b_hi = b >> 32;
  const uint64_t low = a_lo * b_lo;
  const uint64_t mid = a_hi * b_lo + (low >> 32);
  const uint64_t cross = a_lo * b_hi + (mid & 0xffffffffu);
  return (cross << 32 | (low & 0xffffffffu)) ^ (a_hi * b_hi + (mid >> 32) + (cross >> 32));
#endif
}

/* Final mixers: for inputs above 8 bytes, up to 3 bytes, and 4 to 8 bytes. */
CKF_XXH3_FN uint64_t ckf_xxh3_finish(uint64_t h) {
  h = (h ^ h >> 37) * CKF_XXH3_MX_1;
  return h ^ h >> 32;
}

CKF_XXH3_FN uint64_t ckf_xxh3_finish_tiny(uint64_t h) {
  h = (h ^ h >> 33) * CKF_XXH3_P64_2;
  h = (h ^ h >> 29) * CKF_XXH3_P64_3;
  return h ^ h >> 32;
}

CKF_XXH3_FN uint64_t ckf_xxh3_finish_word(uint64_t h, uint64_t len) {
  h = (h ^ ckf_xxh3_rotl(h, 49) ^ ckf_xxh3_rotl(h, 24)) * CKF_XXH3_MX_2;
  h = (h ^ ((h >> 35) + len)) * CKF_XXH3_MX_2;
  return h ^ h >> 28;
}

/* The cores of the classes 1 to 3, 4 to 8 and 9 to 16 bytes, given what the input contributes. */
CKF_XXH3_FN uint64_t ckf_xxh3_tiny(uint64_t mixed, uint64_t seed) {
  const uint8_t *const k = ckf_xxh3_default;
  const uint64_t key = ckf_xxh3_read32(k) ^ ckf_xxh3_read32(k + 4);
  return ckf_xxh3_finish_tiny(mixed ^ (key + seed));
}

CKF_XXH3_FN uint64_t ckf_xxh3_word(uint64_t first, uint64_t last, uint64_t len,
                                           uint64_t seed) {
  const uint8_t *const k = ckf_xxh3_default;
  const uint64_t key = ckf_xxh3_read64(k + 8) ^ ckf_xxh3_read64(k + 16);
  seed ^= (uint64_t)ckf_xxh3_swap32((uint32_t)seed) << 32;
  return ckf_xxh3_finish_word((first << 32 | last) ^ (key - seed), len);
}

CKF_XXH3_FN uint64_t ckf_xxh3_pair(uint64_t first, uint64_t last, uint64_t len,
                                           uint64_t seed) {
  const uint8_t *const k = ckf_xxh3_default;
  const uint64_t lo = first ^ ((ckf_xxh3_read64(k + 24) ^ ckf_xxh3_read64(k + 32)) + seed);
  const uint64_t hi = last ^ ((ckf_xxh3_read64(k + 40) ^ ckf_xxh3_read64(k + 48)) - seed);
  return ckf_xxh3_finish(len + ckf_xxh3_swap64(lo) + hi + ckf_xxh3_fold(lo, hi));
}

/* Hashes of a fixed length: 2, 8 and 16 bytes, given as little-endian numbers. */
CKF_XXH3_FN uint64_t ckf_xxh3_64_len2(uint16_t value, uint64_t seed) {
  const uint64_t first = value & 0xffu, last = value >> 8;
  return ckf_xxh3_tiny(first << 16 | last << 24 | 2u << 8 | last, seed);
}

CKF_XXH3_FN uint64_t ckf_xxh3_64_len8(uint64_t value, uint64_t seed) {
  return ckf_xxh3_word(value & 0xffffffffu, value >> 32, 8, seed);
}

CKF_XXH3_FN uint64_t ckf_xxh3_64_len16(uint64_t lo, uint64_t hi, uint64_t seed) {
  return ckf_xxh3_pair(lo, hi, 16, seed);
}

CKF_XXH3_FN uint64_t ckf_xxh3_mix16(const uint8_t *p, const uint8_t *key, uint64_t seed) {
  return ckf_xxh3_fold(ckf_xxh3_read64(p) ^ (ckf_xxh3_read64(key) + seed),
                           ckf_xxh3_read64(p + 8) ^ (ckf_xxh3_read64(key + 8) - seed));
}

/* 17 to 128 bytes: pieces of 16 bytes pairwise from both ends. The keys are the default secret and
   the seed, or the secret of the seed and 0, which saves the additions. */
CKF_XXH3_FN uint64_t ckf_xxh3_medium(const uint8_t *p, size_t len, const uint8_t *k,
                                             uint64_t seed) {
  uint64_t h = (uint64_t)len * CKF_XXH3_P64_1;
  size_t i;
  CKF_XXH3_UNROLL
  for (i = 0; i <= (len - 1) / 32; i++) {
    h += ckf_xxh3_mix16(p + 16 * i, k + 32 * i, seed);
    h += ckf_xxh3_mix16(p + len - 16 * (i + 1), k + 32 * i + 16, seed);
  }
  return ckf_xxh3_finish(h);
}

/* 129 to 240 bytes: eight pieces, a mixing step, the other whole pieces, the last 16 bytes. */
CKF_XXH3_FN uint64_t ckf_xxh3_large(const uint8_t *p, size_t len, uint64_t seed) {
  const uint8_t *const k = ckf_xxh3_default;
  uint64_t h = (uint64_t)len * CKF_XXH3_P64_1;
  size_t i;
  for (i = 0; i < 8; i++) {
    h += ckf_xxh3_mix16(p + 16 * i, k + 16 * i, seed);
  }
  h = ckf_xxh3_finish(h);
  for (i = 8; i < len / 16; i++) {
    h += ckf_xxh3_mix16(p + 16 * i, k + 16 * (i - 8) + 3, seed);
  }
  return ckf_xxh3_finish(h + ckf_xxh3_mix16(p + len - 16, k + 119, seed));
}

/* Up to 240 bytes; only the default secret is read, the seed enters by arithmetic. */
CKF_XXH3_FN uint64_t ckf_xxh3_short(const uint8_t *p, size_t len, uint64_t seed) {
  const uint8_t *const k = ckf_xxh3_default;
  if (len > 128) {
    return ckf_xxh3_large(p, len, seed);
  }
  if (len > 16) {
    return ckf_xxh3_medium(p, len, k, seed);
  }
  if (len > 8) {
    return ckf_xxh3_pair(ckf_xxh3_read64(p), ckf_xxh3_read64(p + len - 8), len, seed);
  }
  if (len >= 4) {
    return ckf_xxh3_word(ckf_xxh3_read32(p), ckf_xxh3_read32(p + len - 4), len, seed);
  }
  if (len > 0) {
    const uint64_t first = p[0], middle = p[len / 2], last = p[len - 1];
    return ckf_xxh3_tiny(first << 16 | middle << 24 | (uint64_t)len << 8 | last, seed);
  }
  return ckf_xxh3_finish_tiny(seed ^ ckf_xxh3_read64(k + 56) ^ ckf_xxh3_read64(k + 64));
}

CKF_XXH3_FN void ckf_xxh3_secret_init(ckf_xxh3_secret *secret, uint64_t seed) {
  const uint8_t *const k = ckf_xxh3_default;
  size_t i;
  for (i = 0; i < CKF_XXH3_SECRET_BYTES; i += 16) {
    ckf_xxh3_write64(secret->bytes + i, ckf_xxh3_read64(k + i) + seed);
    ckf_xxh3_write64(secret->bytes + i + 8, ckf_xxh3_read64(k + i + 8) - seed);
  }
}

CKF_XXH3_FN void ckf_xxh3_acc_init(uint64_t acc[8]) {
  acc[0] = CKF_XXH3_P32_3;
  acc[1] = CKF_XXH3_P64_1;
  acc[2] = CKF_XXH3_P64_2;
  acc[3] = CKF_XXH3_P64_3;
  acc[4] = CKF_XXH3_P64_4;
  acc[5] = CKF_XXH3_P32_2;
  acc[6] = CKF_XXH3_P64_5;
  acc[7] = CKF_XXH3_P32_1;
}

/* One stripe: each lane takes its neighbour's data and the product of its own keyed halves. */
#if defined(CKF_XXH3_SSE2)
CKF_XXH3_FN __m128i ckf_xxh3_load(const void *p) {
  return _mm_loadu_si128((const __m128i *)p);
}

CKF_XXH3_FN void ckf_xxh3_stripe(uint64_t acc[8], const uint8_t *p, const uint8_t *key) {
  size_t i;
  CKF_XXH3_UNROLL
  for (i = 0; i < 4; i++) {
    const __m128i data = ckf_xxh3_load(p + 16 * i);
    const __m128i keyed = _mm_xor_si128(data, ckf_xxh3_load(key + 16 * i));
    const __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
    const __m128i sum = _mm_add_epi64(_mm_shuffle_epi32(data, 0x4E), ckf_xxh3_load(acc + 2 * i));
    _mm_storeu_si128((__m128i *)(void *)(acc + 2 * i), _mm_add_epi64(sum, product));
  }
}
#else
CKF_XXH3_FN void ckf_xxh3_stripe(uint64_t acc[8], const uint8_t *p, const uint8_t *key) {
  size_t i;
  for (i = 0; i < 8; i++) {
    const uint64_t data = ckf_xxh3_read64(p + 8 * i);
    const uint64_t keyed = data ^ ckf_xxh3_read64(key + 8 * i);
    acc[i ^ 1] += data;
    acc[i] += (keyed & 0xffffffffu) * (keyed >> 32);
  }
}
#endif

/* Runs after each 16 stripes, when the secret is used up. */
CKF_XXH3_FN void ckf_xxh3_scramble(uint64_t acc[8], const ckf_xxh3_secret *secret) {
  const uint8_t *const key = secret->bytes + CKF_XXH3_SECRET_BYTES - CKF_XXH3_STRIPE_BYTES;
  size_t i;
  for (i = 0; i < 8; i++) {
    acc[i] = (acc[i] ^ acc[i] >> 47 ^ ckf_xxh3_read64(key + 8 * i)) * CKF_XXH3_P32_1;
  }
}

/* Takes the last 64 bytes, which may overlap the stripe before, and folds all lanes into one. */
CKF_XXH3_FN uint64_t ckf_xxh3_acc_finish(uint64_t acc[8], const uint8_t *last, uint64_t len,
                                                 const ckf_xxh3_secret *secret) {
  uint64_t h = len * CKF_XXH3_P64_1;
  size_t i;
  ckf_xxh3_stripe(acc, last, secret->bytes + 121); /* 7 bytes before the scramble key */
  for (i = 0; i < 4; i++) {
    h += ckf_xxh3_fold(acc[2 * i] ^ ckf_xxh3_read64(secret->bytes + 11 + 16 * i),
                           acc[2 * i + 1] ^ ckf_xxh3_read64(secret->bytes + 19 + 16 * i));
  }
  return ckf_xxh3_finish(h);
}

/* Above 240 bytes. */
CKF_XXH3_FN uint64_t ckf_xxh3_long(const uint8_t *p, size_t len,
                                                  const ckf_xxh3_secret *secret) {
  const size_t stripes = (len - 1) / CKF_XXH3_STRIPE_BYTES;
  uint64_t acc[8];
  size_t i;
  ckf_xxh3_acc_init(acc);
  for (i = 0; i < stripes; i++) {
    const size_t turn = i % CKF_XXH3_BLOCK_STRIPES;
    ckf_xxh3_stripe(acc, p + CKF_XXH3_STRIPE_BYTES * i, secret->bytes + 8 * turn);
    if (turn == CKF_XXH3_BLOCK_STRIPES - 1) {
      ckf_xxh3_scramble(acc, secret);
    }
  }
  return ckf_xxh3_acc_finish(acc, p + len - CKF_XXH3_STRIPE_BYTES, len, secret);
}

/* `secret` must come from `seed`. */
CKF_XXH3_FN uint64_t ckf_xxh3_64_secret(const void *data, size_t len, uint64_t seed,
                                                const ckf_xxh3_secret *secret) {
  const uint8_t *const p = (const uint8_t *)data;
  if (len <= CKF_XXH3_SHORT_MAX) {
    return ckf_xxh3_short(p, len, seed);
  }
  return ckf_xxh3_long(p, len, secret);
}

CKF_XXH3_FN uint64_t ckf_xxh3_64(const void *data, size_t len, uint64_t seed) {
  ckf_xxh3_secret secret;
  if (len <= CKF_XXH3_SHORT_MAX) {
    return ckf_xxh3_short((const uint8_t *)data, len, seed);
  }
  ckf_xxh3_secret_init(&secret, seed);
  return ckf_xxh3_long((const uint8_t *)data, len, &secret);
}

/* clang-format on */
/* ---- xxh3 end ---- */

/* CKF_PORTABLE leaves the vector kernels out. So do the thread sanitizer, which cannot see through
 * them, and freestanding builds, whose vector headers may want a C library. */
#if defined(CKF_PORTABLE) || defined(__SANITIZE_THREAD__) || __STDC_HOSTED__ == 0
#define CKF_KERNEL_PORTABLE_
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CKF_KERNEL_PORTABLE_
#endif
#endif
#ifndef CKF_KERNEL_PORTABLE_
#if defined(__AVX2__)
#define CKF_KERNEL_AVX2_
#include <immintrin.h>
#elif defined(__SSE2__)
#define CKF_KERNEL_SSE2_
#include <emmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define CKF_KERNEL_NEON_
#include <arm_neon.h>
#endif
#endif

#if defined(__GNUC__)
#define CKF_PREFETCH_(P) __builtin_prefetch(P)
#define CKF_PREFETCH_WRITE_(P) __builtin_prefetch((P), 1)
#ifdef __OPTIMIZE_SIZE__
#define CKF_INLINE_ inline
#else
#define CKF_INLINE_ inline __attribute__((always_inline))
#endif
#define CKF_UNLIKELY_(X) __builtin_expect(!!(X), 0)
#else
#define CKF_PREFETCH_(P) ((void)(P))
#define CKF_PREFETCH_WRITE_(P) ((void)(P))
#define CKF_INLINE_ inline
#define CKF_UNLIKELY_(X) (X)
#endif

#define CKF_NONE_ UINT32_MAX
#define CKF_BATCH_ 16u /* keys that are prefetched together */
#define CKF_ONES_ UINT64_C(0x0001000100010001)
#define CKF_TOPS_ UINT64_C(0x8000800080008000)

#ifdef CKF_PLAIN_BITS_
static inline uint32_t ckf_fetch_or_plain_(uint32_t *p, uint32_t bits) {
  const uint32_t before = *p;
  *p |= bits;
  return before;
}

static inline uint32_t ckf_fetch_and_plain_(uint32_t *p, uint32_t bits) {
  const uint32_t before = *p;
  *p &= bits;
  return before;
}
#endif

/* ==== errors (impl) ==== */

typedef struct ckf_error_row_ {
  int err;
  const char *name;
  const char *text;
} ckf_error_row_;

static const ckf_error_row_ ckf_error_rows_[] = {
    {CKF_OK, "", "success"},
    {CKF_ERR_ARG, "InvalidArgument", "argument out of its range"},
    {CKF_ERR_NOSPACE, "AllocationFailed", "memory or a configured limit is exhausted"},
    {CKF_ERR_ABI, "StructSizeMismatch", "units were built with different configurations"},
    {CKF_ERR_CAPACITY_EXHAUSTED, "CapacityExhausted", "no place in the filter"},
    {CKF_ERR_PARENT_NOT_FOUND, "ParentBlockNotFound", "parent is not mapped by this member"},
    {CKF_ERR_INVALID_BLOCK_SEQUENCE, "InvalidBlockSequence", "event contradicts the lineage"},
    {CKF_ERR_OWNERSHIP_OVERFLOW, "OwnershipDegreeOverflow", "too many owners of one block"},
    {CKF_ERR_INVARIANT, "IndexerInvariantViolation", "state is damaged, rebuild it"},
    {CKF_ERR_UNSUPPORTED_DOMAIN, "UnsupportedResidencyDomain", "residency domain is not supported"},
    {CKF_ERR_BLOCK_NOT_FOUND, "BlockNotFound", "block is not known"},
    {CKF_ERR_EXPECTED_ZERO, "ExpectedCapacityZero", "expected_blocks is 0"},
    {CKF_ERR_MAX_KICKS, "InvalidMaxKicks", "max_kicks is not in 1 .. 4096"},
    {CKF_ERR_WINDOW, "InvalidVerificationWindow", "verification_window is not in 1 .. 8"},
    {CKF_ERR_PUBLISH_EVERY, "InvalidPublishEveryNEvents", "publish_every_n_events is 0"},
    {CKF_ERR_CAPACITY_OVERFLOW, "CapacityOverflow", "sizes exceed what can be represented"},
    {CKF_ERR_TRUNCATED, "Truncated", "frame is shorter than its header"},
    {CKF_ERR_FRAME_TOO_LARGE, "FrameTooLarge", "frame is longer than allowed"},
    {CKF_ERR_MAGIC, "Magic", "not a CBI1 frame"},
    {CKF_ERR_WIRE_VERSION, "WireVersion", "wire version is not supported"},
    {CKF_ERR_CHECKSUM, "Checksum", "body does not match its checksum"},
    {CKF_ERR_MALFORMED, "Malformed", "body contradicts itself"},
    {CKF_ERR_FORMAT_VERSION, "FormatVersion", "format version is not supported"},
    {CKF_ERR_FORMAT_FINGERPRINT_BITS, "FormatFingerprintBits", "fingerprints are not 16 bits"},
    {CKF_ERR_FORMAT_SLOTS, "FormatSlotsPerBucket", "buckets do not have 4 slots"},
    {CKF_ERR_FORMAT_MISMATCH, "FormatMismatch", "seed or bucket count is not the expected one"},
    {CKF_ERR_FORMAT_BUCKET_COUNT, "FormatBucketCount", "bucket count is not 2^1 .. 2^24"},
    {CKF_ERR_FLAGS, "Flags", "neither a snapshot chunk nor a delta"},
    {CKF_ERR_DELTA_IMAGE_COUNT, "DeltaImageCount", "too many images for one frame"},
    {CKF_ERR_SNAPSHOT_WORD_COUNT, "SnapshotChunkWordCount", "too many words for one chunk"},
    {CKF_ERR_SNAPSHOT_BUCKET_COUNT, "SnapshotBucketCount", "words are not one per bucket"},
    {CKF_ERR_BUCKET_INDEX, "BucketIndex", "bucket index beyond the bucket count"},
    {CKF_ERR_CHUNK_SEQUENCE, "ChunkSequence", "snapshot chunk out of order"},
    {CKF_ERR_INCOMPLETE_COVERAGE, "IncompleteCoverage", "last chunk left buckets open"},
    {CKF_ERR_NOT_LIVE, "NotLive", "delta before the snapshot is complete"},
    {CKF_ERR_SNAPSHOT_LIVE, "SnapshotWhileLive", "snapshot chunk after the snapshot is complete"},
    {CKF_ERR_SEQUENCE, "SequenceMismatch", "delta does not continue the installed sequence"},
    {CKF_ERR_EMPTY_DELTA, "EmptyDelta", "delta without images"},
    {CKF_ERR_DUPLICATE_IMAGE, "DuplicateImageIndex", "delta names a bucket twice"},
    {CKF_ERR_WRONG_CONSUMER, "WrongConsumerInstance", "lease is for another consumer"},
    {CKF_ERR_WRONG_LANE, "WrongPhysicalLane", "lease is for another lane"},
    {CKF_ERR_WRONG_OWNER, "WrongLaneOwner", "pool is not the one of this lane"},
    {CKF_ERR_WRONG_FORMAT, "WrongFormat", "format is not the one of this consumer"},
    {CKF_ERR_STALE_EPOCH, "StaleAssignmentEpoch", "assignment epoch was accepted before"},
    {CKF_ERR_MIXED_DOMAIN, "MixedIndexerDomain", "pool of a lane is of another indexer domain"},
    {CKF_ERR_DUPLICATE_POOL, "DuplicatePool", "two lanes hold one pool"},
    {CKF_ERR_DUPLICATE_DC, "DuplicateDcLane", "two lanes hold one data centre"},
    {CKF_ERR_NO_LANES, "NoConfiguredLanes", "no lane is configured"},
    {CKF_ERR_INVALID_LANE, "InvalidLane", "lane is not in 0 .. 15"},
    {CKF_ERR_UNCONFIGURED_LANE, "UnconfiguredLane", "lane is not in use"},
    {CKF_ERR_LANE_CLAIMED, "LaneAlreadyClaimed", "lane has a writer already"},
    {CKF_ERR_UNAVAILABLE, "Unavailable", "no lane is ready"},
    {CKF_ERR_FENCED, "Fenced", "nothing is sent before the next snapshot"},
    {CKF_ERR_ENQUEUE, "Enqueue", "the sink refused a delta"},
    {CKF_ERR_SEQUENCE_EXHAUSTED, "SequenceExhausted", "no sequence number is left"},
};

static const ckf_error_row_ *ckf_error_row_find_(int err) {
  size_t i;
  for (i = 0; i < sizeof ckf_error_rows_ / sizeof ckf_error_rows_[0]; i++) {
    if (ckf_error_rows_[i].err == err) {
      return &ckf_error_rows_[i];
    }
  }
  return NULL;
}

const char *ckf_strerror(int err) {
  const ckf_error_row_ *const row = ckf_error_row_find_(err);
  return row ? row->text : "unknown error";
}

const char *ckf_errname(int err) {
  const ckf_error_row_ *const row = ckf_error_row_find_(err);
  return row ? row->name : "Unknown";
}

enum ckf_failure ckf_failure_of(int err) {
  switch (err) {
  case CKF_ERR_CAPACITY_EXHAUSTED:
    return CKF_FAILURE_BOUNDED_RELOCATION;
  case CKF_ERR_NOSPACE:
    return CKF_FAILURE_PRECOMMIT_ALLOCATION;
  case CKF_ERR_INVARIANT:
    return CKF_FAILURE_PREWRITE_INVARIANT;
  case CKF_ERR_PARENT_NOT_FOUND:
  case CKF_ERR_INVALID_BLOCK_SEQUENCE:
  case CKF_ERR_OWNERSHIP_OVERFLOW:
  case CKF_ERR_UNSUPPORTED_DOMAIN:
  case CKF_ERR_BLOCK_NOT_FOUND:
    return CKF_FAILURE_SOURCE_PROTOCOL;
  default: /* the codes of frames and replicas are one range */
    return err <= CKF_ERR_TRUNCATED && err >= CKF_ERR_DUPLICATE_IMAGE
               ? CKF_FAILURE_CONSUMER_BEFORE_WRITE
               : CKF_FAILURE_NONE;
  }
}

typedef struct ckf_failure_row_ {
  const char *name;
  ckf_disposition what;
} ckf_failure_row_;

static const ckf_failure_row_ ckf_failure_rows_[] = {
    {"", {CKF_PART_NONE, CKF_COMMIT_KNOWN_UNCHANGED, CKF_PART_NONE, CKF_ACTION_NONE}},
    {"BoundedRelocationFailure",
     {CKF_PART_PRODUCER_CORE, CKF_COMMIT_PHYSICAL_OMITTED, CKF_PART_NONE,
      CKF_ACTION_CONTINUE_CAPACITY_OMISSION}},
    {"PrecommitAllocationFailure",
     {CKF_PART_PRODUCER_CORE, CKF_COMMIT_KNOWN_UNCHANGED, CKF_PART_NONE,
      CKF_ACTION_REPORT_RESOURCE_FAILURE}},
    {"SourceProtocolFailure",
     {CKF_PART_PRODUCER_CORE, CKF_COMMIT_KNOWN_UNCHANGED, CKF_PART_NONE, CKF_ACTION_REJECT_SOURCE}},
    {"PrewriteInvariantMismatch",
     {CKF_PART_PRODUCER_CORE, CKF_COMMIT_KNOWN_UNCHANGED, CKF_PART_PRODUCER_CORE,
      CKF_ACTION_FENCE_AND_REBUILD_PRODUCER}},
    {"ConsumerGapOrMalformedBeforeWrite",
     {CKF_PART_CONSUMER_LANE, CKF_COMMIT_KNOWN_UNCHANGED, CKF_PART_CONSUMER_LANE,
      CKF_ACTION_DEACTIVATE_AND_SNAPSHOT}},
    {"ConsumerWorkerFailureMidApply",
     {CKF_PART_CONSUMER_LANE, CKF_COMMIT_UNCERTAIN, CKF_PART_CONSUMER_LANE,
      CKF_ACTION_DEACTIVATE_AND_SNAPSHOT}},
    {"InactiveSnapshotInstallFailure",
     {CKF_PART_CONSUMER_LANE, CKF_COMMIT_KNOWN_UNCHANGED, CKF_PART_CONSUMER_LANE,
      CKF_ACTION_RETRY_SNAPSHOT}},
};

static const ckf_failure_row_ *ckf_failure_row_find_(enum ckf_failure failure) {
  const size_t i = (size_t)failure;
  return &ckf_failure_rows_[i < sizeof ckf_failure_rows_ / sizeof ckf_failure_rows_[0] ? i : 0];
}

ckf_disposition ckf_failure_disposition(enum ckf_failure failure) {
  return ckf_failure_row_find_(failure)->what;
}

const char *ckf_failure_name(enum ckf_failure failure) {
  return ckf_failure_row_find_(failure)->name;
}

const char *ckf_part_name(enum ckf_part part) {
  return part == CKF_PART_PRODUCER_CORE   ? "ProducerCore"
         : part == CKF_PART_CONSUMER_LANE ? "ConsumerLane"
                                          : "";
}

const char *ckf_commit_name(enum ckf_commit commit) {
  return commit == CKF_COMMIT_KNOWN_UNCHANGED    ? "KnownUnchanged"
         : commit == CKF_COMMIT_PHYSICAL_OMITTED ? "ExactCommittedPhysicalOmitted"
                                                 : "Uncertain";
}

/* ==== format and addressing (impl) ==== */

ckf_config ckf_config_default(void) {
  ckf_config cfg;
  cfg.expected_blocks = 1;
  cfg.max_kicks = 500;
  cfg.verification_window = 2;
  cfg.publish_every_n_events = 1;
  cfg.seed = CKF_DEFAULT_SEED;
  return cfg;
}

int ckf_config_check(const ckf_config *cfg, uint64_t *bucket_count) {
  uint64_t required, buckets = CKF_MIN_BUCKETS;
  if (cfg->expected_blocks == 0) {
    return CKF_ERR_EXPECTED_ZERO;
  }
  if (cfg->max_kicks == 0 || cfg->max_kicks > CKF_MAX_KICKS) {
    return CKF_ERR_MAX_KICKS;
  }
  if (cfg->verification_window == 0 || cfg->verification_window > CKF_MAX_WINDOW) {
    return CKF_ERR_WINDOW;
  }
  if (cfg->publish_every_n_events == 0) {
    return CKF_ERR_PUBLISH_EVERY;
  }
  if (cfg->expected_blocks > (UINT64_MAX - 15) / 5) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  required = (5 * cfg->expected_blocks + 15) / 16; /* at most 2^60: the doubling ends */
  while (buckets < required) {
    buckets *= 2;
  }
  if (bucket_count) {
    *bucket_count = buckets;
  }
  return CKF_OK;
}

int ckf_format_check(const ckf_format *format) {
  const uint64_t buckets = format->bucket_count;
  return buckets >= CKF_MIN_BUCKETS && buckets <= CKF_MAX_BUCKETS && (buckets & (buckets - 1)) == 0
             ? CKF_OK
             : CKF_ERR_FORMAT_BUCKET_COUNT;
}

uint64_t ckf_child(uint64_t parent_canonical, uint64_t local) {
  return ckf_xxh3_64_len16(parent_canonical, local, CKF_CHAIN_SEED);
}

/* The delta of a fingerprint before it is masked. */
static inline uint32_t ckf_delta_bits_(uint64_t seed, uint16_t fp) {
  return (uint32_t)ckf_xxh3_64_len2(fp, seed ^ UINT64_C(0x9E3779B97F4A7C15));
}

static inline uint32_t ckf_delta_mask_(uint32_t bits, uint32_t mask) {
  bits &= mask;
  return bits + (bits == 0);
}

static inline uint16_t ckf_fingerprint_(uint64_t mixed) {
  const uint32_t fp = (uint32_t)mixed & 0xFFFFu;
  return (uint16_t)(fp + (fp == 0));
}

uint64_t ckf_mix(const ckf_format *format, uint64_t key) {
  return ckf_xxh3_64_len8(key, format->seed);
}

uint32_t ckf_delta(const ckf_format *format, uint16_t fp) {
  return ckf_delta_mask_(ckf_delta_bits_(format->seed, fp), (uint32_t)(format->bucket_count - 1));
}

ckf_probe ckf_probe_make(const ckf_format *format, uint64_t key) {
  const uint64_t mixed = ckf_mix(format, key);
  ckf_probe probe;
  probe.fp = ckf_fingerprint_(mixed);
  probe.a = (uint32_t)((mixed >> 16) & (format->bucket_count - 1));
  probe.b = probe.a ^ ckf_delta(format, probe.fp);
  return probe;
}

void ckf_delta_table(uint64_t seed, uint32_t *table) {
  uint32_t fp;
  for (fp = 0; fp < CKF_DELTA_TABLE_LEN; fp++) {
    table[fp] = ckf_delta_bits_(seed, (uint16_t)fp);
  }
}

/* ==== packed bucket and generator (impl) ==== */

/* Marks the top bit of each zero slot; marks above the lowest one may be wrong, none below it is.
 */
static inline uint64_t ckf_zero_slots_(uint64_t word) {
  return (word - CKF_ONES_) & ~word & CKF_TOPS_;
}

static inline uint64_t ckf_match_slots_(uint64_t word, uint16_t fp) {
  return ckf_zero_slots_(word ^ fp * CKF_ONES_);
}

/* Bit position of the slot that a non-zero mark set names first: 0, 16, 32 or 48. */
static inline unsigned ckf_first_shift_(uint64_t marks) {
#if defined(__GNUC__)
  return (unsigned)__builtin_ctzll(marks) & 48u;
#else
  unsigned shift = 0;
  while (!(marks >> shift & 0x8000u)) {
    shift += 16;
  }
  return shift;
#endif
}

unsigned ckf_word_first_empty(uint64_t word) {
  const uint64_t marks = ckf_zero_slots_(word);
  return marks ? ckf_first_shift_(marks) / 16 : CKF_SLOTS_PER_BUCKET;
}

unsigned ckf_word_first(uint64_t word, uint16_t fp) {
  const uint64_t marks = ckf_match_slots_(word, fp);
  return marks ? ckf_first_shift_(marks) / 16 : CKF_SLOTS_PER_BUCKET;
}

bool ckf_word_contains(uint64_t word, uint16_t fp) { return ckf_match_slots_(word, fp) != 0; }

uint64_t ckf_rng_draw(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

uint64_t ckf_rng_start(uint64_t seed, uint32_t lane) {
  uint64_t state = seed ^ (((uint64_t)lane + 1) * UINT64_C(0x9E3779B97F4A7C15));
  return ckf_rng_draw(&state);
}

/* ==== filter (impl) ==== */

int ckf_filter_init_abi(ckf_filter *filter, size_t filter_size, const ckf_format *format,
                        uint32_t max_kicks, uint64_t *words, ckf_image *log,
                        const uint32_t *deltas) {
  if (filter_size != sizeof *filter) {
    return CKF_ERR_ABI;
  }
  if (!words || !log) {
    return CKF_ERR_ARG;
  }
  if (max_kicks == 0 || max_kicks > CKF_MAX_KICKS) {
    return CKF_ERR_MAX_KICKS;
  }
  if (ckf_format_check(format) != CKF_OK) {
    return CKF_ERR_FORMAT_BUCKET_COUNT;
  }
  filter->words_ = words;
  filter->log_ = log;
  filter->deltas_ = deltas;
  filter->format_ = *format;
  filter->rng_ = ckf_rng_start(format->seed, 0);
  filter->mask_ = (uint32_t)(format->bucket_count - 1);
  filter->max_kicks_ = max_kicks;
  filter->log_len_ = 0;
  return CKF_OK;
}

uint64_t ckf_filter_rng(const ckf_filter *filter) { return filter->rng_; }

void ckf_filter_set_rng(ckf_filter *filter, uint64_t state) { filter->rng_ = state; }

const ckf_image *ckf_filter_log(const ckf_filter *filter, size_t *len) {
  *len = filter->log_len_;
  return filter->log_;
}

static inline uint64_t ckf_filter_mix_(const ckf_filter *f, uint64_t key) {
  return ckf_xxh3_64_len8(key, f->format_.seed);
}

static inline uint32_t ckf_filter_home_(const ckf_filter *f, uint64_t mixed) {
  return (uint32_t)(mixed >> 16) & f->mask_;
}

/* The other home. Most operations end in the first one, so nothing computes this in advance. */
static inline uint32_t ckf_filter_alt_(const ckf_filter *f, uint32_t bucket, uint16_t fp) {
  const uint32_t bits = f->deltas_ ? f->deltas_[fp] : ckf_delta_bits_(f->format_.seed, fp);
  return bucket ^ ckf_delta_mask_(bits, f->mask_);
}

static inline void ckf_filter_write_(ckf_filter *f, uint32_t bucket, uint64_t word) {
  ckf_image *const entry = &f->log_[f->log_len_++];
  entry->bucket = bucket;
  entry->word = f->words_[bucket];
  f->words_[bucket] = word;
}

/* Writes fp into the first empty slot of a bucket, if it has one. */
static inline bool ckf_filter_place_(ckf_filter *f, uint32_t bucket, uint16_t fp) {
  const uint64_t word = f->words_[bucket];
  const uint64_t empty = ckf_zero_slots_(word);
  if (!empty) {
    return false;
  }
  ckf_filter_write_(f, bucket, word | (uint64_t)fp << ckf_first_shift_(empty));
  return true;
}

/* Both homes are full: moves residents, at most `kicks` of them, or restores every word. */
static int ckf_filter_relocate_(ckf_filter *f, uint32_t a, uint32_t b, uint16_t fp,
                                uint32_t kicks) {
  uint32_t bucket = ckf_rng_draw(&f->rng_) & 1 ? b : a;
  while (kicks-- > 0) {
    const unsigned shift = ((unsigned)ckf_rng_draw(&f->rng_) & 3u) * 16;
    const uint64_t word = f->words_[bucket];
    const uint16_t evicted = (uint16_t)(word >> shift);
    ckf_filter_write_(f, bucket, word ^ (uint64_t)(evicted ^ fp) << shift);
    fp = evicted;
    bucket = ckf_filter_alt_(f, bucket, fp);
    if (ckf_filter_place_(f, bucket, fp)) {
      return CKF_OK;
    }
  }
  while (f->log_len_ > 0) {
    const ckf_image *const entry = &f->log_[--f->log_len_];
    f->words_[entry->bucket] = entry->word;
  }
  return CKF_ERR_CAPACITY_EXHAUSTED;
}

static inline int ckf_filter_insert_mixed_(ckf_filter *f, uint64_t mixed, uint32_t kicks) {
  const uint16_t fp = ckf_fingerprint_(mixed);
  const uint32_t a = ckf_filter_home_(f, mixed);
  uint32_t b;
  f->log_len_ = 0;
  if (ckf_filter_place_(f, a, fp)) {
    return CKF_OK;
  }
  b = ckf_filter_alt_(f, a, fp);
  return ckf_filter_place_(f, b, fp) ? CKF_OK : ckf_filter_relocate_(f, a, b, fp, kicks);
}

static inline int ckf_filter_remove_mixed_(ckf_filter *f, uint64_t mixed) {
  const uint16_t fp = ckf_fingerprint_(mixed);
  uint32_t bucket = ckf_filter_home_(f, mixed);
  uint64_t match = ckf_match_slots_(f->words_[bucket], fp);
  f->log_len_ = 0;
  if (!match) {
    bucket = ckf_filter_alt_(f, bucket, fp);
    match = ckf_match_slots_(f->words_[bucket], fp);
    if (!match) {
      return CKF_ERR_INVARIANT;
    }
  }
  ckf_filter_write_(f, bucket, f->words_[bucket] ^ (uint64_t)fp << ckf_first_shift_(match));
  return CKF_OK;
}

static inline bool ckf_filter_contains_mixed_(const ckf_filter *f, uint64_t mixed) {
  const uint16_t fp = ckf_fingerprint_(mixed);
  const uint32_t a = ckf_filter_home_(f, mixed);
  return ckf_match_slots_(f->words_[a], fp) != 0 ||
         ckf_match_slots_(f->words_[ckf_filter_alt_(f, a, fp)], fp) != 0;
}

int ckf_filter_insert(ckf_filter *filter, uint64_t key) {
  return ckf_filter_insert_mixed_(filter, ckf_filter_mix_(filter, key), filter->max_kicks_);
}

int ckf_filter_insert_home(ckf_filter *filter, uint64_t key) {
  return ckf_filter_insert_mixed_(filter, ckf_filter_mix_(filter, key), 0);
}

int ckf_filter_remove(ckf_filter *filter, uint64_t key) {
  return ckf_filter_remove_mixed_(filter, ckf_filter_mix_(filter, key));
}

bool ckf_filter_contains(const ckf_filter *filter, uint64_t key) {
  return ckf_filter_contains_mixed_(filter, ckf_filter_mix_(filter, key));
}

/* Hashes up to CKF_BATCH_ keys and asks for the first home of each. */
static inline size_t ckf_filter_prepare_(const ckf_filter *f, const uint64_t *keys, size_t n,
                                         uint64_t mixed[CKF_BATCH_]) {
  size_t i;
  n = n < CKF_BATCH_ ? n : CKF_BATCH_;
  for (i = 0; i < n; i++) {
    mixed[i] = ckf_filter_mix_(f, keys[i]);
    CKF_PREFETCH_(&f->words_[ckf_filter_home_(f, mixed[i])]);
  }
  return n;
}

size_t ckf_filter_insert_n(ckf_filter *filter, const uint64_t *keys, size_t n, bool *ok) {
  uint64_t mixed[CKF_BATCH_];
  size_t at, i, step, done = 0;
  for (at = 0; at < n; at += step) {
    step = ckf_filter_prepare_(filter, keys + at, n - at, mixed);
    for (i = 0; i < step; i++) {
      const bool in = ckf_filter_insert_mixed_(filter, mixed[i], filter->max_kicks_) == CKF_OK;
      done += in;
      if (ok) {
        ok[at + i] = in;
      }
    }
  }
  return done;
}

size_t ckf_filter_remove_n(ckf_filter *filter, const uint64_t *keys, size_t n, bool *ok) {
  uint64_t mixed[CKF_BATCH_];
  size_t at, i, step, done = 0;
  for (at = 0; at < n; at += step) {
    step = ckf_filter_prepare_(filter, keys + at, n - at, mixed);
    for (i = 0; i < step; i++) {
      const bool out = ckf_filter_remove_mixed_(filter, mixed[i]) == CKF_OK;
      done += out;
      if (ok) {
        ok[at + i] = out;
      }
    }
  }
  return done;
}

#ifdef __OPTIMIZE_SIZE__
size_t ckf_filter_contains_n(const ckf_filter *filter, const uint64_t *keys, size_t n, bool *ok) {
  size_t i, done = 0;
  for (i = 0; i < n; i++) {
    const bool in = ckf_filter_contains(filter, keys[i]);
    done += in;
    if (ok) {
      ok[i] = in;
    }
  }
  return done;
}
#else
/* Buckets that are asked for, and what is looked for in them. Lines are under way while the batch
 * before is looked at, so a batch lasts as long as memory takes. */
#define CKF_LOOKS_ 64u
#define CKF_BYTES_ UINT64_C(0x0101010101010101)
typedef struct ckf_looks_ {
  uint32_t bucket[CKF_LOOKS_];
  uint16_t fp[CKF_LOOKS_];
  uint8_t key[CKF_LOOKS_]; /* which key of its batch; second homes only */
  size_t len;
} ckf_looks_;

/* Number of the lowest byte of a value that is not 0. */
static inline size_t ckf_first_byte_(uint64_t value) {
#if defined(__GNUC__)
  return (size_t)__builtin_ctzll(value) >> 3;
#else
  size_t byte = 0;
  while (!(value >> 8 * byte & 0xFFu)) {
    byte++;
  }
  return byte;
#endif
}

/* Fills up the last eight with looks whose outcome is not asked for. */
static inline void ckf_looks_end_(ckf_looks_ *looks, size_t len) {
  looks->len = len;
  for (; len % 8 != 0; len++) {
    looks->bucket[len] = 0;
    looks->fp[len] = 0;
  }
}

/* Byte i of the result is 1 when look `from` + i finds its fingerprint, else 0. */
static CKF_INLINE_ uint64_t ckf_looks_hits_(const ckf_looks_ *looks, size_t from,
                                            const uint64_t *words) {
  const uint32_t *const bucket = looks->bucket + from;
  const uint16_t *const fp = looks->fp + from;
#if defined(CKF_KERNEL_AVX2_) || defined(CKF_KERNEL_SSE2_)
#define CKF_ONE_(I) _mm_loadl_epi64((const __m128i *)(const void *)&words[bucket[I]])
#define CKF_TWO_(I) _mm_unpacklo_epi64(CKF_ONE_(I), CKF_ONE_((I) + 1))
  const __m128i all = _mm_loadu_si128((const __m128i *)(const void *)fp);
  const __m128i low = _mm_unpacklo_epi16(all, all), high = _mm_unpackhi_epi16(all, all);
  const __m128i h0 = _mm_cmpeq_epi16(_mm_shuffle_epi32(low, 0x50), CKF_TWO_(0));
  const __m128i h2 = _mm_cmpeq_epi16(_mm_shuffle_epi32(low, 0xFA), CKF_TWO_(2));
  const __m128i h4 = _mm_cmpeq_epi16(_mm_shuffle_epi32(high, 0x50), CKF_TWO_(4));
  const __m128i h6 = _mm_cmpeq_epi16(_mm_shuffle_epi32(high, 0xFA), CKF_TWO_(6));
  const __m128i hits = _mm_packs_epi32(_mm_packs_epi16(h0, h2), _mm_packs_epi16(h4, h6));
  const __m128i none = _mm_cmpeq_epi16(hits, _mm_setzero_si128());
  const __m128i bytes = _mm_add_epi8(_mm_packs_epi16(none, none), _mm_set1_epi8(1));
  uint64_t result;
  _mm_storel_epi64((__m128i *)(void *)&result, bytes);
  return result;
#undef CKF_TWO_
#undef CKF_ONE_
#else
  uint64_t result = 0;
  unsigned i;
  for (i = 0; i < 8; i++) {
    const uint64_t marks = ckf_match_slots_(CKF_LOAD_RELAXED(&words[bucket[i]]), fp[i]);
    result |= (uint64_t)(marks != 0) << 8 * i;
  }
  return result;
#endif
}

/* Asks for the first homes of a batch. */
static CKF_INLINE_ void ckf_looks_first_(const ckf_filter *f, const uint64_t *keys, size_t n,
                                         ckf_looks_ *first) {
  const uint32_t mask = f->mask_;
  const uint64_t seed = f->format_.seed;
  size_t i;
  for (i = 0; i < n; i++) {
    const uint64_t mixed = ckf_xxh3_64_len8(keys[i], seed);
    first->bucket[i] = (uint32_t)(mixed >> 16) & mask;
    first->fp[i] = ckf_fingerprint_(mixed);
    CKF_PREFETCH_(&f->words_[first->bucket[i]]);
  }
  ckf_looks_end_(first, n);
}

/* Looks at the first homes and asks for the second ones where these do not answer; returns how many
 * did. Eight keys that are all absent from their first homes, as usual for keys the filter does not
 * hold, go through without a branch. */
static CKF_INLINE_ size_t ckf_looks_second_(const ckf_filter *f, const ckf_looks_ *first,
                                            ckf_looks_ *second, bool *ok) {
  const uint32_t mask = f->mask_, *const deltas = f->deltas_;
  size_t at, i, len = 0;
  for (at = 0; at < first->len; at += 8) {
    const size_t n = first->len - at < 8 ? first->len - at : 8;
    const uint64_t hits = ckf_looks_hits_(first, at, f->words_);
    uint64_t open = (hits ^ CKF_BYTES_) & UINT64_MAX >> (64 - 8 * n);
    if (ok) {
      for (i = 0; i < n; i++) {
        ok[at + i] = hits >> 8 * i & 1;
      }
    }
    if (open == CKF_BYTES_ && deltas) {
      for (i = 0; i < 8; i++) {
        const uint16_t fp = first->fp[at + i];
        second->fp[len + i] = fp;
        second->key[len + i] = (uint8_t)(at + i);
        second->bucket[len + i] = first->bucket[at + i] ^ ckf_delta_mask_(deltas[fp], mask);
      }
      for (i = 0; i < 8; i++) {
        CKF_PREFETCH_(&f->words_[second->bucket[len + i]]);
      }
      len += 8;
      continue;
    }
    for (; open; open &= open - 1) {
      const size_t key = at + ckf_first_byte_(open);
      const uint16_t fp = first->fp[key];
      second->fp[len] = fp;
      second->key[len] = (uint8_t)key;
      second->bucket[len] = ckf_filter_alt_(f, first->bucket[key], fp);
      CKF_PREFETCH_(&f->words_[second->bucket[len]]);
      len++;
    }
  }
  ckf_looks_end_(second, len);
  return first->len - len;
}

/* Looks at the second homes; returns how many answer. */
static CKF_INLINE_ size_t ckf_looks_last_(const ckf_filter *f, const ckf_looks_ *second, bool *ok) {
  size_t at, done = 0;
  for (at = 0; at < second->len; at += 8) {
    const size_t n = second->len - at < 8 ? second->len - at : 8;
    uint64_t hits = ckf_looks_hits_(second, at, f->words_) & UINT64_MAX >> (64 - 8 * n);
    for (; hits; hits &= hits - 1) {
      done++;
      if (ok) {
        ok[second->key[at + ckf_first_byte_(hits)]] = true;
      }
    }
  }
  return done;
}

size_t ckf_filter_contains_n(const ckf_filter *filter, const uint64_t *keys, size_t n, bool *ok) {
  ckf_looks_ first[2], second[2]; /* of even and of odd batches */
  size_t at, done = 0;
  unsigned turn = 0;
  if (n == 1) {
    const bool in = ckf_filter_contains(filter, keys[0]);
    if (ok) {
      ok[0] = in;
    }
    return in;
  }
  second[1].len = 0;
  ckf_looks_first_(filter, keys, n < CKF_LOOKS_ ? n : CKF_LOOKS_, &first[0]);
  for (at = 0; at < n; at += CKF_LOOKS_, turn ^= 1) {
    if (n - at > CKF_LOOKS_) {
      const size_t left = n - at - CKF_LOOKS_;
      ckf_looks_first_(filter, keys + at + CKF_LOOKS_, left < CKF_LOOKS_ ? left : CKF_LOOKS_,
                       &first[turn ^ 1]);
    }
    done += ckf_looks_second_(filter, &first[turn], &second[turn], ok ? ok + at : NULL);
    done += ckf_looks_last_(filter, &second[turn ^ 1], ok && at > 0 ? ok + at - CKF_LOOKS_ : NULL);
  }
  return done +
         ckf_looks_last_(filter, &second[turn ^ 1], ok && n > 0 ? ok + at - CKF_LOOKS_ : NULL);
}
#endif

/* ==== producer (impl) ==== */
/*
 * Two tables of 64-byte rows hold the exact state; both store a key as the part of a reversible
 * hash that its row does not tell already.
 *
 * - mappings: six to a row, (slot of the member, external) to block number. A key has two candidate
 *   rows, each computed from the other. It goes into the first one if it can, and entries move to
 *   their other row to make room, so the table may be 15/16 full. Nothing else names their places.
 * - blocks: eight cells to a row, canonical to owners and state. A block stays where it is, because
 *   mappings name its place: in its home row or, that being full, in the first with room of 31 rows
 *   at fixed distances. The table may be 4/5 full.
 *
 * Each row knows of the keys that it should hold and that are elsewhere, so most searches read one.
 *
 * Beside them: slots (one per member), an index of the slots, and per slot a bitmap of the regions
 * of the mapping table that may hold one of its mappings. An insertion sets a bit, a clear scans
 * what is set, and with the last mapping all bits go: every scan of a region was paid for by an
 * insertion.
 */

#define CKF_ROW_WORDS_ 8u
#define CKF_ROW_ENTRIES_ 6u /* of a mapping row: one word each, and 20 bits in the last two */
#define CKF_EXTRA_BITS_ 20u
#define CKF_ENTRY_BITS_ ((1u << CKF_ROW_ENTRIES_) - 1)
#define CKF_NEW_ (1u << (CKF_EXTRA_BITS_ - 1)) /* extra bit: made by the event under way */
#define CKF_AWAY_SHIFT_ 60u /* in the word behind the entries: how many are in their second row */
#define CKF_AWAY_MAX_ 15u   /* stays: how many more there are is not known */
#define CKF_USED_ 1u
#define CKF_SECOND_ 2u        /* the entry is in the second of its rows */
#define CKF_SEARCH_ROWS_ 128u /* that an insertion looks at before it gives up */
#define CKF_REGIONS_ 1024u    /* at most */
#define CKF_REGION_WORDS_ (CKF_REGIONS_ / 64)

/* A block's cell, from the low end: owners, way from the home row, rest of the hash; from the high
 * end: a mark of the row, state. */
#define CKF_AWAY_ (UINT64_C(1) << 63) /* in cell i of a home row: way i + 1 leads to a block */
#define CKF_STATE_SHIFT_ 61u
#define CKF_STATE_ (UINT64_C(3) << CKF_STATE_SHIFT_)
#define CKF_OMITTED_ 0u
#define CKF_RESIDENT_ 1u
#define CKF_TRIED_ 2u /* refused by the filter during the current event */
#define CKF_FRESH_ 3u /* made by the current event, not yet offered to the filter */
#define CKF_WAY_BITS_ 5u
#define CKF_WAYS_ (1u << CKF_WAY_BITS_)
#define CKF_MIN_EXPECTED_ 1024u   /* for default limits: a small filter is no small exact state */
#define CKF_MIN_BLOCK_ROWS_ 2048u /* the rest of smaller hashes would not fit a cell */
#define CKF_OWNER_BITS_MAX_ 16u

#define CKF_MAX_OWNERS_ UINT32_C(0x3FFFFFFF)
#define CKF_EVENT_ 64u /* blocks of an event that are hashed and prefetched together */

/* Of each configured limit: numbers fit their bits. */
#define CKF_MAX_LIMIT_ (UINT32_C(1) << 29)
#define CKF_MAX_MEMBERS_ (UINT32_C(1) << 20)
#define CKF_MAX_ROWS_ (UINT32_MAX / CKF_ROW_WORDS_) /* a place is a number of 32 bits */

typedef struct ckf_slot_ {
  uint64_t worker_id;
  uint64_t salt;    /* enters the hash of the member's externals */
  uint32_t dp_rank; /* of a free slot: the next free one */
  uint32_t count;   /* mappings; 0 = free */
} ckf_slot_;

typedef struct ckf_spill_ {
  uint32_t block; /* number + 1; 0 = free */
  uint32_t owners;
} ckf_spill_;

static inline void ckf_count_(uint64_t *counter, uint64_t n) {
  *counter = n > UINT64_MAX - *counter ? UINT64_MAX : *counter + n;
}

/* Number of the lowest bit that is set; one must be. */
static inline uint32_t ckf_lowest_(uint32_t bits) {
#if defined(__GNUC__)
  return (uint32_t)__builtin_ctz(bits);
#else
  uint32_t i = 0;
  while (!(bits >> i & 1)) {
    i++;
  }
  return i;
#endif
}

/* Bits that numbers below n need. */
static inline unsigned ckf_width_(uint64_t n) {
  unsigned bits = 0;
  while (bits < 64 && UINT64_C(1) << bits < n) {
    bits++;
  }
  return bits;
}

/* ---- reversible hashes ---- */

#define CKF_GOLDEN_ UINT64_C(0x9E3779B97F4A7C15)
#define CKF_GOLDEN_INVERSE_ UINT64_C(0xF1DE83E19937733D)
#define CKF_MX_2_INVERSE_ UINT64_C(0x02AB9C720D1024AD)

static uint64_t ckf_odd_inverse_(uint64_t odd) {
  uint64_t x = odd; /* right in the lowest 3 bits; each step doubles them */
  unsigned i;
  for (i = 0; i < 5; i++) {
    x *= 2 - odd * x;
  }
  return x;
}

static inline uint64_t ckf_scramble_(const ckf_table_ *t, uint64_t key) {
  const uint64_t x = (key ^ t->key) * t->factor;
  return x ^ x >> 32;
}

static inline uint64_t ckf_unscramble_(const ckf_table_ *t, uint64_t hash) {
  return (hash ^ hash >> 32) * t->inverse ^ t->key;
}

/* Row of a hash, and the rest of it: 64 - implied bits. The upper half times the number of rows is
 * the row and a fraction, whose last bits say nothing that the others do not say. */
static inline uint32_t ckf_split_(const ckf_table_ *t, uint64_t hash, uint64_t *rest) {
  const uint64_t wide = (hash >> 32) * t->row_count;
  *rest = (wide & 0xFFFFFFFFu) >> t->implied << 32 | (hash & 0xFFFFFFFFu);
  return (uint32_t)(wide >> 32);
}

static inline uint64_t ckf_join_(const ckf_table_ *t, uint32_t row, uint64_t rest) {
  const uint64_t wide = (uint64_t)row << 32 | rest >> 32 << t->implied;
  return (wide + t->row_count - 1) / t->row_count << 32 | (rest & 0xFFFFFFFFu);
}

/* A key's second row given the first, and the first given the second. */
static inline uint32_t ckf_other_row_(const ckf_table_ *t, uint32_t row, uint64_t rest) {
  const uint64_t spread = rest * CKF_GOLDEN_ >> 32;
  const uint32_t sum = (uint32_t)(spread * t->row_count >> 32);
  return sum >= row ? sum - row : sum + t->row_count - row;
}

static inline uint64_t *ckf_row_(const ckf_table_ *t, uint32_t row) {
  return t->rows + (size_t)row * CKF_ROW_WORDS_;
}

/* Bit i is set when the lower half of word i, under the mask, is `want`. */
#if defined(__SSE2__) && defined(__GNUC__)
typedef uint32_t ckf_four_ __attribute__((vector_size(16), may_alias));
typedef float ckf_four_float_ __attribute__((vector_size(16), may_alias));

static inline uint32_t ckf_four_match_(const uint64_t *words, ckf_four_ want, ckf_four_ mask) {
  const ckf_four_float_ *const at = (const ckf_four_float_ *)(const void *)words;
  const ckf_four_ lower = (ckf_four_)__builtin_ia32_shufps(at[0], at[1], 0x88);
  return (uint32_t)__builtin_ia32_movmskps((ckf_four_float_)((lower & mask) == want));
}

static inline uint32_t ckf_row_match_(const uint64_t *row, uint32_t want, uint32_t mask) {
  const ckf_four_ wants = {want, want, want, want}, masks = {mask, mask, mask, mask};
  return ckf_four_match_(row, wants, masks) | ckf_four_match_(row + 4, wants, masks) << 4;
}
#else
static inline uint32_t ckf_row_match_(const uint64_t *row, uint32_t want, uint32_t mask) {
  uint32_t here = 0, i;
  for (i = 0; i < CKF_ROW_WORDS_; i++) {
    here |= (uint32_t)(((uint32_t)row[i] & mask) == want) << i;
  }
  return here;
}
#endif

/* Undoes the last steps of the hash of 8 bytes. The step with two rotations is its own inverse
 * after 64 rounds, so 63 rounds undo it; squaring it doubles the distances. */
static inline uint64_t ckf_unfinish_(uint64_t h) {
  h = (h ^ h >> 28 ^ h >> 56) * CKF_MX_2_INVERSE_;
  h = (h ^ ((h >> 35) + 8)) * CKF_MX_2_INVERSE_;
  h ^= ckf_xxh3_rotl(h, 49) ^ ckf_xxh3_rotl(h, 24);
  h ^= ckf_xxh3_rotl(h, 34) ^ ckf_xxh3_rotl(h, 48);
  h ^= ckf_xxh3_rotl(h, 4) ^ ckf_xxh3_rotl(h, 32);
  return ckf_xxh3_rotl(h, 56);
}

/* The canonical of the filter's hash of it. */
static inline uint64_t ckf_unmix_(const ckf_producer *p, uint64_t mixed) {
  const uint64_t key = ckf_unfinish_(ckf_filter_mix_(&p->filter_, 0));
  return ckf_xxh3_rotl(ckf_unfinish_(mixed) ^ key, 32);
}

/* ---- members ---- */

static inline uint64_t ckf_member_hash_(const ckf_producer *p, const ckf_member *m) {
  return ckf_xxh3_64_len16(m->worker_id, m->dp_rank, p->cfg_.hash_seed);
}

static uint32_t ckf_member_find_(const ckf_producer *p, const ckf_member *m) {
  uint32_t at = (uint32_t)ckf_member_hash_(p, m) & p->member_mask_;
  for (; p->member_index_[at]; at = (at + 1) & p->member_mask_) {
    const ckf_slot_ *const s = &p->slots_[p->member_index_[at] - 1];
    if (s->worker_id == m->worker_id && s->dp_rank == m->dp_rank) {
      return p->member_index_[at] - 1;
    }
  }
  return CKF_NONE_;
}

/* A member without mappings; CKF_NONE_ when all slots are taken. */
static uint32_t ckf_member_add_(ckf_producer *p, const ckf_member *m) {
  uint32_t slot = p->slot_free_, at;
  ckf_slot_ *s;
  if (slot != CKF_NONE_) {
    p->slot_free_ = p->slots_[slot].dp_rank;
  } else if (p->slot_used_ < p->cfg_.max_members) {
    slot = p->slot_used_++;
  } else {
    return CKF_NONE_;
  }
  s = &p->slots_[slot];
  s->worker_id = m->worker_id;
  s->dp_rank = m->dp_rank;
  s->salt = ckf_member_hash_(p, m);
  s->count = 0;
  for (at = (uint32_t)s->salt & p->member_mask_; p->member_index_[at];) {
    at = (at + 1) & p->member_mask_;
  }
  p->member_index_[at] = slot + 1;
  p->member_count_++;
  return slot;
}

static void ckf_member_drop_if_empty_(ckf_producer *p, uint32_t slot) {
  ckf_slot_ *const s = &p->slots_[slot];
  const uint32_t mask = p->member_mask_;
  uint32_t hole, at;
  if (s->count > 0) {
    return;
  }
  for (hole = (uint32_t)s->salt & mask; p->member_index_[hole] != slot + 1;) {
    hole = (hole + 1) & mask;
  }
  for (at = (hole + 1) & mask; p->member_index_[at]; at = (at + 1) & mask) {
    const uint32_t home = (uint32_t)p->slots_[p->member_index_[at] - 1].salt & mask;
    if (((at - home) & mask) >= ((at - hole) & mask)) { /* it may stand in the hole */
      p->member_index_[hole] = p->member_index_[at];
      hole = at;
    }
  }
  p->member_index_[hole] = 0;
  CKF_MEMSET(p->regions_ + (size_t)slot * CKF_REGION_WORDS_, 0, CKF_REGIONS_ / 8);
  s->dp_rank = p->slot_free_;
  p->slot_free_ = slot;
  p->member_count_--;
}

/* ---- owner counts that do not fit ---- */

/* The place of a block, or the free one where it belongs: there is always one, see the layout. */
static ckf_spill_ *ckf_spill_find_(const ckf_producer *p, uint32_t block) {
  uint32_t at = (uint32_t)(block * CKF_GOLDEN_ >> 32) & p->spill_mask_;
  while (p->spill_[at].block && p->spill_[at].block != block + 1) {
    at = (at + 1) & p->spill_mask_;
  }
  return &p->spill_[at];
}

static void ckf_spill_drop_(ckf_producer *p, ckf_spill_ *place) {
  const uint32_t mask = p->spill_mask_;
  uint32_t hole = (uint32_t)(place - p->spill_), at;
  for (at = (hole + 1) & mask; p->spill_[at].block; at = (at + 1) & mask) {
    const uint32_t home = (uint32_t)((p->spill_[at].block - 1) * CKF_GOLDEN_ >> 32) & mask;
    if (((at - home) & mask) >= ((at - hole) & mask)) {
      p->spill_[hole] = p->spill_[at];
      hole = at;
    }
  }
  p->spill_[hole].block = 0;
}

/* ---- blocks ---- */

static inline uint64_t *ckf_cell_(const ckf_producer *p, uint32_t block) {
  return &p->blocks_.rows[block];
}

static inline uint32_t ckf_cell_state_(uint64_t cell) {
  return (uint32_t)(cell >> CKF_STATE_SHIFT_) & 3;
}

static inline void ckf_cell_set_state_(uint64_t *cell, uint32_t state) {
  *cell = (*cell & ~CKF_STATE_) | (uint64_t)state << CKF_STATE_SHIFT_;
}

/* Largest number of owners in a cell; it means that the number is in the spill. */
static inline uint32_t ckf_cell_full_(const ckf_producer *p) { return (1u << p->owner_bits_) - 1; }

static inline uint32_t ckf_cell_owners_(const ckf_producer *p, uint64_t cell) {
  return (uint32_t)cell & ckf_cell_full_(p);
}

static uint32_t ckf_block_owners_(const ckf_producer *p, uint32_t block) {
  const uint32_t owners = ckf_cell_owners_(p, *ckf_cell_(p, block));
  return owners == ckf_cell_full_(p) ? ckf_spill_find_(p, block)->owners : owners;
}

static inline uint32_t ckf_cell_way_(const ckf_producer *p, uint64_t cell) {
  return (uint32_t)(cell >> p->owner_bits_) % CKF_WAYS_;
}

/* Distance between a home row and the row of a way. Triangular numbers, so that the overflow of two
 * rows that share one goes on to different ones. */
static inline uint32_t ckf_way_distance_(const ckf_producer *p, uint32_t way) {
  const uint32_t spread = way * (way + 1) / 2 * (uint32_t)(CKF_GOLDEN_ >> 32);
  return (uint32_t)((uint64_t)spread * p->blocks_.row_count >> 32);
}

static inline uint32_t ckf_way_row_(const ckf_producer *p, uint32_t home, uint32_t way) {
  const uint32_t row = home + ckf_way_distance_(p, way), rows = p->blocks_.row_count;
  return row < rows ? row : row - rows;
}

/* The home row of a cell and, as *rest, what it stores of the hash. */
static inline uint32_t ckf_block_home_(const ckf_producer *p, uint32_t block, uint64_t *rest) {
  const uint64_t cell = *ckf_cell_(p, block) & ~(CKF_STATE_ | CKF_AWAY_);
  const uint32_t distance = ckf_way_distance_(p, ckf_cell_way_(p, cell));
  const uint32_t row = block / CKF_ROW_WORDS_;
  *rest = cell >> (p->owner_bits_ + CKF_WAY_BITS_);
  return row >= distance ? row - distance : row + p->blocks_.row_count - distance;
}

/* The filter's hash of a block. */
static inline uint64_t ckf_block_mixed_(const ckf_producer *p, uint32_t block) {
  uint64_t rest;
  const uint32_t home = ckf_block_home_(p, block, &rest);
  return ckf_unscramble_(&p->blocks_, ckf_join_(&p->blocks_, home, rest));
}

static uint64_t ckf_block_canonical_(const ckf_producer *p, uint32_t block) {
  return ckf_unmix_(p, ckf_block_mixed_(p, block));
}

/* The cell of a block without owners and state. */
static inline uint64_t ckf_cell_make_(const ckf_producer *p, uint32_t way, uint64_t rest) {
  return (uint64_t)way << p->owner_bits_ | rest << (p->owner_bits_ + CKF_WAY_BITS_);
}

/* The block in a row that looks like this cell, or CKF_NONE_. */
static inline uint32_t ckf_row_block_(const ckf_producer *p, uint32_t row, uint64_t want) {
  const uint64_t *const cells = ckf_row_(&p->blocks_, row);
  const uint64_t owners = ckf_cell_full_(p);
  uint32_t here = ckf_row_match_(cells, (uint32_t)want, ~(uint32_t)owners);
  for (; here; here &= here - 1) {
    const uint32_t i = ckf_lowest_(here);
    if (((cells[i] ^ want) & ~(owners | CKF_STATE_ | CKF_AWAY_)) == 0 && (cells[i] & owners)) {
      return row * CKF_ROW_WORDS_ + i;
    }
  }
  return CKF_NONE_;
}

/* The mark of a way in its home row: set when a block lies there. The last one stands for all ways
 * from its own on. */
static inline uint64_t *ckf_way_mark_(const ckf_producer *p, uint32_t home, uint32_t way) {
  return ckf_row_(&p->blocks_, home) + (way < CKF_ROW_WORDS_ ? way : CKF_ROW_WORDS_) - 1;
}

/* The bits that any cell of a row has. */
static inline uint64_t ckf_row_bits_(const ckf_producer *p, uint32_t row) {
  const uint64_t *const c = ckf_row_(&p->blocks_, row);
  return c[0] | c[1] | c[2] | c[3] | c[4] | c[5] | c[6] | c[7];
}

static inline uint32_t ckf_block_find_(const ckf_producer *p, uint32_t home, uint64_t rest) {
  uint32_t block = ckf_row_block_(p, home, ckf_cell_make_(p, 0, rest)), way;
  if (block == CKF_NONE_ && (ckf_row_bits_(p, home) & CKF_AWAY_)) {
    for (way = 1; way < CKF_WAYS_ && block == CKF_NONE_; way++) {
      if (*ckf_way_mark_(p, home, way) & CKF_AWAY_) {
        block = ckf_row_block_(p, ckf_way_row_(p, home, way), ckf_cell_make_(p, way, rest));
      }
    }
  }
  return block;
}

/* Puts a block with one owner into a row, if it has an empty cell. */
static inline uint32_t ckf_row_add_(ckf_producer *p, uint32_t row, uint32_t way, uint64_t rest) {
  const uint32_t empty = ckf_row_match_(ckf_row_(&p->blocks_, row), 0, ckf_cell_full_(p));
  const uint32_t block = row * CKF_ROW_WORDS_ + (empty ? ckf_lowest_(empty) : 0);
  if (!empty) {
    return CKF_NONE_;
  }
  *ckf_cell_(p, block) |=
      ckf_cell_make_(p, way, rest) | (uint64_t)CKF_FRESH_ << CKF_STATE_SHIFT_ | 1;
  p->block_count_++;
  return block;
}

/* A block that the caller knows to be new; CKF_NONE_: no empty cell within reach. */
static inline uint32_t ckf_block_add_(ckf_producer *p, uint32_t home, uint64_t rest) {
  uint32_t block = ckf_row_add_(p, home, 0, rest), way;
  for (way = 1; block == CKF_NONE_ && way < CKF_WAYS_; way++) {
    block = ckf_row_add_(p, ckf_way_row_(p, home, way), way, rest);
    if (block != CKF_NONE_) {
      *ckf_way_mark_(p, home, way) |= CKF_AWAY_;
    }
  }
  return block;
}

/* True when a block lies where the way leads, or where one of those with the same mark does. What
 * came to a row by one way is from one home. */
static bool ckf_way_leads_(const ckf_producer *p, uint32_t home, uint32_t way) {
  const uint64_t *const mark = ckf_way_mark_(p, home, way);
  for (way = way < CKF_ROW_WORDS_ ? way : CKF_ROW_WORDS_;
       way < CKF_WAYS_ && ckf_way_mark_(p, home, way) == mark; way++) {
    const uint64_t *const cells = ckf_row_(&p->blocks_, ckf_way_row_(p, home, way));
    uint32_t i;
    for (i = 0; i < CKF_ROW_WORDS_; i++) {
      if ((cells[i] & ckf_cell_full_(p)) && ckf_cell_way_(p, cells[i]) == way) {
        return true;
      }
    }
  }
  return false;
}

static inline void ckf_block_erase_(ckf_producer *p, uint32_t block) {
  uint64_t *const cell = ckf_cell_(p, block), rest;
  const uint32_t home = ckf_block_home_(p, block, &rest), way = ckf_cell_way_(p, *cell);
  *cell &= CKF_AWAY_;
  p->block_count_--;
  if (way > 0 && !ckf_way_leads_(p, home, way)) {
    *ckf_way_mark_(p, home, way) &= ~CKF_AWAY_;
  }
}

static int ckf_block_own_more_(ckf_producer *p, uint32_t block) {
  uint64_t *const cell = ckf_cell_(p, block);
  const uint32_t owners = ckf_cell_owners_(p, *cell), full = ckf_cell_full_(p);
  if (owners == full) {
    ckf_spill_ *const place = ckf_spill_find_(p, block);
    if (place->owners == CKF_MAX_OWNERS_) {
      return CKF_ERR_OWNERSHIP_OVERFLOW;
    }
    place->owners++;
    return CKF_OK;
  }
  ++*cell;
  if (owners + 1 == full) {
    ckf_spill_ *const place = ckf_spill_find_(p, block);
    place->block = block + 1;
    place->owners = full;
  }
  return CKF_OK;
}

/* Of a block with more than one owner. */
static void ckf_block_own_less_(ckf_producer *p, uint32_t block) {
  if (CKF_UNLIKELY_(ckf_cell_owners_(p, *ckf_cell_(p, block)) == ckf_cell_full_(p))) {
    ckf_spill_ *const place = ckf_spill_find_(p, block);
    if (--place->owners >= ckf_cell_full_(p)) {
      return;
    }
    ckf_spill_drop_(p, place);
  }
  --*ckf_cell_(p, block);
}

/* ---- mappings ---- */
/*
 * An entry's word, from the low end: used, in the second row, slot, rest of the hash, and what is
 * left takes low bits of the block number; the higher ones are in the entry's extra bits. A place
 * is row * 8 + entry.
 */

/* Where an external of a member belongs. */
typedef struct ckf_key_ {
  uint64_t want; /* the entry's matching bits in the first row; CKF_SECOND_ more in the second */
  uint32_t row, second;
} ckf_key_;

/* How many keys of a first row are in their second; CKF_AWAY_MAX_ may be more. */
static inline uint32_t ckf_away_(const ckf_producer *p, uint32_t row) {
  return (uint32_t)(ckf_row_(&p->mappings_, row)[CKF_ROW_ENTRIES_] >> CKF_AWAY_SHIFT_);
}

static inline ckf_key_ ckf_key_make_(const ckf_producer *p, uint32_t slot, uint64_t external) {
  const uint64_t first = (external ^ p->slots_[slot].salt) * CKF_GOLDEN_;
  ckf_key_ key;
  uint64_t rest;
  key.row = ckf_split_(&p->mappings_, ckf_scramble_(&p->mappings_, first ^ first >> 32), &rest);
  key.second = ckf_other_row_(&p->mappings_, key.row, rest);
  key.want = CKF_USED_ | (uint64_t)slot << 2 | rest << (2 + p->slot_bits_);
  return key;
}

/* The entry in a row with these bits, or CKF_NONE_. */
static inline uint32_t ckf_row_entry_(const ckf_producer *p, uint32_t row, uint64_t want) {
  const uint64_t *const entries = ckf_row_(&p->mappings_, row);
  uint32_t here = ckf_row_match_(entries, (uint32_t)want, UINT32_MAX) & CKF_ENTRY_BITS_;
  for (; here; here &= here - 1) {
    const uint32_t i = ckf_lowest_(here);
    if ((entries[i] ^ want) << (64 - p->match_bits_) == 0) {
      return row * CKF_ROW_WORDS_ + i;
    }
  }
  return CKF_NONE_;
}

static inline uint32_t ckf_mapping_find_(const ckf_producer *p, const ckf_key_ *key) {
  const uint32_t place = ckf_row_entry_(p, key->row, key->want);
  return place == CKF_NONE_ && ckf_away_(p, key->row)
             ? ckf_row_entry_(p, key->second, key->want | CKF_SECOND_)
             : place;
}

static inline uint64_t *ckf_extra_word_(const ckf_producer *p, uint32_t place, unsigned *shift) {
  const uint32_t i = place % CKF_ROW_WORDS_, second = i >= 3;
  *shift = (i - 3 * second) * CKF_EXTRA_BITS_;
  return ckf_row_(&p->mappings_, place / CKF_ROW_WORDS_) + CKF_ROW_ENTRIES_ + second;
}

static inline uint32_t ckf_extra_(const ckf_producer *p, uint32_t place) {
  unsigned shift;
  const uint64_t *const word = ckf_extra_word_(p, place, &shift);
  return (uint32_t)(*word >> shift) & ((1u << CKF_EXTRA_BITS_) - 1);
}

static inline void ckf_extra_set_(ckf_producer *p, uint32_t place, uint32_t extra) {
  unsigned shift;
  uint64_t *const word = ckf_extra_word_(p, place, &shift);
  *word = (*word & ~(((UINT64_C(1) << CKF_EXTRA_BITS_) - 1) << shift)) | (uint64_t)extra << shift;
}

static inline uint64_t *ckf_entry_(const ckf_producer *p, uint32_t place) {
  return &p->mappings_.rows[place];
}

static inline uint32_t ckf_entry_slot_(const ckf_producer *p, uint64_t entry) {
  return (uint32_t)(entry >> 2) & ((1u << p->slot_bits_) - 1);
}

/* All of an entry above the matching bits; they may be all 64. */
static inline uint32_t ckf_mapping_block_(const ckf_producer *p, uint32_t place) {
  const uint64_t high = ckf_extra_(p, place) & ~CKF_NEW_;
  return (uint32_t)(*ckf_entry_(p, place) >> 1 >> (p->match_bits_ - 1) |
                    high << (64 - p->match_bits_));
}

static inline uint64_t ckf_entry_rest_(const ckf_producer *p, uint64_t entry) {
  return (entry << (64 - p->match_bits_)) >> (64 - p->match_bits_) >> (2 + p->slot_bits_);
}

static uint64_t ckf_mapping_external_(const ckf_producer *p, uint32_t place) {
  const uint64_t entry = *ckf_entry_(p, place), rest = ckf_entry_rest_(p, entry);
  uint32_t row = place / CKF_ROW_WORDS_;
  uint64_t first;
  if (entry & CKF_SECOND_) {
    row = ckf_other_row_(&p->mappings_, row, rest);
  }
  first = ckf_unscramble_(&p->mappings_, ckf_join_(&p->mappings_, row, rest));
  return (first ^ first >> 32) * CKF_GOLDEN_INVERSE_ ^ p->slots_[ckf_entry_slot_(p, entry)].salt;
}

static inline uint32_t *ckf_tag_(const ckf_producer *p, uint32_t place) {
  return &p->tags_[(size_t)(place / CKF_ROW_WORDS_) * CKF_ROW_ENTRIES_ + place % CKF_ROW_WORDS_];
}

static inline uint64_t *ckf_region_word_(const ckf_producer *p, uint32_t slot, uint32_t region) {
  return &p->regions_[(size_t)slot * CKF_REGION_WORDS_ + region / 64];
}

/* The member of a slot has a mapping in this row now. */
static inline void ckf_region_note_(ckf_producer *p, uint32_t slot, uint32_t row) {
  const uint32_t region = row >> p->region_shift_;
  *ckf_region_word_(p, slot, region) |= UINT64_C(1) << region % 64;
}

/* First free place of a row, or CKF_NONE_. */
static inline uint32_t ckf_row_free_(const ckf_producer *p, uint32_t row) {
  const uint32_t here =
      ckf_row_match_(ckf_row_(&p->mappings_, row), 0, CKF_USED_) & CKF_ENTRY_BITS_;
  return here ? row * CKF_ROW_WORDS_ + ckf_lowest_(here) : CKF_NONE_;
}

/* A key of this first row went to its second or, `by` -1, left it. */
static inline void ckf_away_add_(ckf_producer *p, uint32_t row, int by) {
  const uint64_t one = UINT64_C(1) << CKF_AWAY_SHIFT_;
  if (ckf_away_(p, row) < CKF_AWAY_MAX_) {
    ckf_row_(&p->mappings_, row)[CKF_ROW_ENTRIES_] += by > 0 ? one : 0 - one;
  }
}

static void ckf_mapping_move_(ckf_producer *p, uint32_t from, uint32_t to) {
  uint64_t *const entry = ckf_entry_(p, from);
  *ckf_entry_(p, to) = *entry ^ CKF_SECOND_;
  ckf_extra_set_(p, to, ckf_extra_(p, from));
  ckf_region_note_(p, ckf_entry_slot_(p, *entry), to / CKF_ROW_WORDS_);
  if (*entry & CKF_SECOND_) {
    ckf_away_add_(p, to / CKF_ROW_WORDS_, -1);
  } else {
    ckf_away_add_(p, from / CKF_ROW_WORDS_, 1);
  }
  if (p->tags_) {
    *ckf_tag_(p, to) = *ckf_tag_(p, from);
  }
  *entry = 0;
}

/* A row that a search for room looks at, and from which place of which row it is reached. */
typedef struct ckf_step_ {
  uint32_t row, place, parent;
} ckf_step_;

/*
 * Both rows of a key are full: looks, nearest first, for a chain of entries that can each move to
 * their other row, the last one to a free place. Returns the place that becomes free in one of the
 * two rows, or CKF_NONE_ when CKF_SEARCH_ROWS_ rows were not enough; then nothing has moved.
 */
static uint32_t ckf_mapping_room_(ckf_producer *p, const ckf_key_ *key) {
  ckf_step_ steps[CKF_SEARCH_ROWS_];
  uint32_t n = 2, at, i;
  steps[0].row = key->row;
  steps[1].row = key->second;
  for (at = 0; at < n; at++) {
    const uint64_t *const row = ckf_row_(&p->mappings_, steps[at].row);
    uint32_t other[CKF_ROW_ENTRIES_];
    for (i = 0; i < CKF_ROW_ENTRIES_; i++) {
      other[i] = ckf_other_row_(&p->mappings_, steps[at].row, ckf_entry_rest_(p, row[i]));
      CKF_PREFETCH_(ckf_row_(&p->mappings_, other[i]));
    }
    for (i = 0; i < CKF_ROW_ENTRIES_; i++) {
      uint32_t place = steps[at].row * CKF_ROW_WORDS_ + i, to = ckf_row_free_(p, other[i]);
      if (to != CKF_NONE_) {
        for (;; place = steps[at].place, at = steps[at].parent) {
          ckf_mapping_move_(p, place, to);
          to = place;
          if (at < 2) {
            return to;
          }
        }
      }
      if (n < CKF_SEARCH_ROWS_) {
        steps[n].row = other[i];
        steps[n].place = place;
        steps[n++].parent = at;
      }
    }
  }
  return CKF_NONE_;
}

/* Adds a mapping that is not there yet; CKF_NONE_: no room. */
static inline uint32_t ckf_mapping_add_(ckf_producer *p, uint32_t slot, const ckf_key_ *key,
                                        uint32_t block, uint32_t flag) {
  uint32_t place = ckf_row_free_(p, key->row), second;
  if (place == CKF_NONE_) {
    place = ckf_row_free_(p, key->second);
    if (CKF_UNLIKELY_(place == CKF_NONE_)) {
      place = ckf_mapping_room_(p, key);
      if (place == CKF_NONE_) {
        return CKF_NONE_;
      }
    }
  }
  second = place / CKF_ROW_WORDS_ == key->row ? 0 : CKF_SECOND_;
  *ckf_entry_(p, place) = key->want | second | (uint64_t)block << (p->match_bits_ - 1) << 1;
  if (second) {
    ckf_away_add_(p, key->row, 1);
  }
  ckf_extra_set_(p, place, flag | (uint32_t)((uint64_t)block >> (64 - p->match_bits_)));
  if (p->tags_) {
    *ckf_tag_(p, place) = 0;
  }
  ckf_region_note_(p, slot, place / CKF_ROW_WORDS_);
  p->slots_[slot].count++;
  p->mapping_count_++;
  return place;
}

static inline void ckf_mapping_erase_(ckf_producer *p, uint32_t slot, uint32_t place) {
  const uint64_t entry = *ckf_entry_(p, place);
  if (entry & CKF_SECOND_) {
    const uint64_t rest = ckf_entry_rest_(p, entry);
    ckf_away_add_(p, ckf_other_row_(&p->mappings_, place / CKF_ROW_WORDS_, rest), -1);
  }
  *ckf_entry_(p, place) = 0;
  p->slots_[slot].count--;
  p->mapping_count_--;
}

/* The first place from `place` on that holds a mapping of the slot, or CKF_NONE_. */
static uint32_t ckf_mapping_next_(const ckf_producer *p, uint32_t slot, uint32_t place) {
  const uint32_t mask = CKF_USED_ | ((1u << p->slot_bits_) - 1) << 2;
  const uint32_t want = CKF_USED_ | slot << 2;
  uint32_t row = place / CKF_ROW_WORDS_, skip = place % CKF_ROW_WORDS_;
  while (row < p->mappings_.row_count) {
    const uint32_t region = row >> p->region_shift_;
    uint32_t here;
    if (!(*ckf_region_word_(p, slot, region) >> region % 64 & 1)) {
      row = (region + 1) << p->region_shift_;
      skip = 0;
      continue;
    }
    here = (ckf_row_match_(ckf_row_(&p->mappings_, row), want, mask) & CKF_ENTRY_BITS_) >> skip;
    if (here) {
      return row * CKF_ROW_WORDS_ + skip + ckf_lowest_(here);
    }
    row++;
    skip = 0;
  }
  return CKF_NONE_;
}

/* ---- filter and publication window ---- */

static inline ckf_image ckf_image_get_(const uint8_t *bytes) {
  ckf_image image;
  image.bucket = (uint32_t)ckf_xxh3_read32(bytes);
  image.word = ckf_xxh3_read64(bytes + 4);
  return image;
}

static inline void ckf_image_put_(uint8_t *bytes, uint32_t bucket, uint64_t word) {
  bytes[0] = (uint8_t)bucket;
  bytes[1] = (uint8_t)(bucket >> 8);
  bytes[2] = (uint8_t)(bucket >> 16);
  bytes[3] = (uint8_t)(bucket >> 24);
  ckf_xxh3_write64(bytes + 4, word);
}

/* Notes the writes of the last filter call. A rebuild only counts them: its window comes from
 * comparing words. */
static inline void ckf_touch_(ckf_producer *p) {
  const uint32_t n = p->filter_.log_len_;
  uint32_t i;
  ckf_count_(&p->physical_touches_, n);
  if (p->rebuilding_) {
    return;
  }
  for (i = 0; i < n; i++) {
    const ckf_image write = p->filter_.log_[i];
    uint64_t *const bits = &p->dirty_bits_[write.bucket / 64];
    const uint64_t bit = UINT64_C(1) << write.bucket % 64;
    if (!(*bits & bit)) {
      *bits |= bit;
      ckf_image_put_(p->dirty_ + (size_t)p->dirty_len_++ * CKF_CBI1_IMAGE_BYTES, write.bucket,
                     write.word);
    }
  }
}

static inline void ckf_announce_(const ckf_producer *p, uint64_t mixed, bool created) {
  if (CKF_UNLIKELY_(p->listener_ != NULL)) {
    p->listener_(p->listener_user_, ckf_unmix_(p, mixed), created);
  }
}

/* Tries to bring a block that is not resident into the filter. */
static inline bool ckf_admit_(ckf_producer *p, uint64_t *cell, uint64_t mixed, uint32_t kicks) {
  if (ckf_filter_insert_mixed_(&p->filter_, mixed, kicks) != CKF_OK) {
    ckf_cell_set_state_(cell, CKF_TRIED_);
    return false;
  }
  ckf_cell_set_state_(cell, CKF_RESIDENT_);
  p->resident_count_++;
  ckf_touch_(p);
  return true;
}

/* Takes one owner from a block; `mixed` is the filter's hash of it when it has only one. Only
 * damaged state makes it fail, and then nothing has changed. */
static inline int ckf_disown_(ckf_producer *p, uint32_t block, uint64_t mixed) {
  const uint64_t cell = *ckf_cell_(p, block);
  const uint32_t owners = ckf_cell_owners_(p, cell);
  if (owners > 1) {
    ckf_block_own_less_(p, block);
    return CKF_OK;
  }
  if (CKF_UNLIKELY_(owners == 0)) {
    return CKF_ERR_INVARIANT;
  }
  if (ckf_cell_state_(cell) == CKF_RESIDENT_) {
    if (CKF_UNLIKELY_(ckf_filter_remove_mixed_(&p->filter_, mixed) != CKF_OK)) {
      return CKF_ERR_INVARIANT;
    }
    p->resident_count_--;
    ckf_touch_(p);
  }
  ckf_block_erase_(p, block);
  ckf_announce_(p, mixed, false);
  return CKF_OK;
}

/* ---- memory ---- */

ckf_producer_config ckf_producer_config_default(void) {
  ckf_producer_config cfg;
  cfg.filter = ckf_config_default();
  cfg.max_mappings = 0;
  cfg.max_blocks = 0;
  cfg.max_members = 0;
  cfg.delta_table = true;
  cfg.tags = false;
  cfg.hash_seed = 0;
  return cfg;
}

/* Sizes of all arrays for a configuration whose defaults are filled in. */
typedef struct ckf_layout_ {
  uint64_t buckets;
  uint32_t mapping_rows, block_rows, slot_bits, owner_bits;
  uint32_t member_places, spill_places; /* powers of two */
  uint64_t words, dirty_bits, dirty, log, deltas, mappings, tags, blocks, slots, regions, members,
      spill, sorted;
} ckf_layout_;

static inline uint64_t ckf_align_(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

static inline uint32_t ckf_log2_(uint32_t n) { return ckf_width_((uint64_t)n + 1) - 1; }

static uint32_t ckf_limit_(uint32_t configured, uint64_t fallback) {
  return configured ? configured
                    : (uint32_t)(fallback < CKF_MAX_LIMIT_ ? fallback : CKF_MAX_LIMIT_);
}

/* Rows, and what fits beside the rest of a hash: the fewer the rows, the longer that rest. False
 * when members and blocks together need more rows than have numbers for their places. */
static bool ckf_layout_rows_(const ckf_producer_config *cfg, ckf_layout_ *l) {
  const uint32_t cells = cfg->max_blocks + cfg->max_blocks / 4; /* 4 of 5 used at most */
  l->block_rows = cells / CKF_ROW_WORDS_ + 1;
  if (l->block_rows < CKF_MIN_BLOCK_ROWS_) {
    l->block_rows = CKF_MIN_BLOCK_ROWS_;
  }
  l->owner_bits = ckf_log2_(l->block_rows) - 8; /* 64 less state, way, rest and a bit of its own */
  if (l->owner_bits > CKF_OWNER_BITS_MAX_) {
    l->owner_bits = CKF_OWNER_BITS_MAX_;
  }
  l->slot_bits = ckf_width_(cfg->max_members);
  l->mapping_rows = (uint32_t)((uint64_t)cfg->max_mappings * 16 / (15 * CKF_ROW_ENTRIES_)) + 1;
  if (l->mapping_rows < 4u << l->slot_bits) {
    l->mapping_rows = 4u << l->slot_bits;
  }
  while (l->mapping_rows <= CKF_MAX_ROWS_ &&
         ckf_log2_(l->mapping_rows) - l->slot_bits - 2 + CKF_EXTRA_BITS_ - 1 <
             ckf_width_((uint64_t)l->block_rows * CKF_ROW_WORDS_)) {
    l->mapping_rows *= 2;
  }
  l->spill_places = 2;
  while (l->spill_places / 2 <= cfg->max_mappings / ((1u << l->owner_bits) - 1)) {
    l->spill_places *= 2;
  }
  return l->mapping_rows <= CKF_MAX_ROWS_;
}

/* What depends on the number of buckets alone. */
static void ckf_layout_buckets_(ckf_layout_ *l) {
  l->words = ckf_align_(l->buckets * 8);
  l->dirty_bits = ckf_align_((l->buckets + 63) / 64 * 8);
  l->dirty = ckf_align_(l->buckets * CKF_CBI1_IMAGE_BYTES);
}

static int ckf_layout_make_(ckf_producer_config *cfg, ckf_layout_ *l) {
  const int rc = ckf_config_check(&cfg->filter, &l->buckets);
  const uint64_t expected = cfg->filter.expected_blocks < CKF_MIN_EXPECTED_
                                ? CKF_MIN_EXPECTED_
                                : cfg->filter.expected_blocks;
  if (rc != CKF_OK) {
    return rc;
  }
  if (l->buckets > CKF_MAX_BUCKETS) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  cfg->max_mappings = ckf_limit_(cfg->max_mappings, expected * 2);
  cfg->max_blocks = ckf_limit_(cfg->max_blocks, expected + expected / 4);
  cfg->max_members = ckf_limit_(cfg->max_members, 1024);
  if (cfg->max_mappings > CKF_MAX_LIMIT_ || cfg->max_blocks > CKF_MAX_LIMIT_ ||
      cfg->max_members > CKF_MAX_MEMBERS_) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  if (cfg->max_blocks > cfg->max_mappings) { /* each has an owner */
    cfg->max_blocks = cfg->max_mappings;
  }
  if (!ckf_layout_rows_(cfg, l)) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  ckf_layout_buckets_(l);
  l->member_places = 2u << ckf_width_(cfg->max_members);
  l->log = ckf_align_((cfg->filter.max_kicks + UINT64_C(1)) * sizeof(ckf_image));
  l->deltas = cfg->delta_table ? CKF_DELTA_TABLE_LEN * sizeof(uint32_t) : 0;
  l->mappings = (uint64_t)l->mapping_rows * 64;
  l->tags =
      cfg->tags ? ckf_align_((uint64_t)l->mapping_rows * CKF_ROW_ENTRIES_ * sizeof(uint32_t)) : 0;
  l->blocks = (uint64_t)l->block_rows * 64;
  l->slots = ckf_align_((uint64_t)cfg->max_members * sizeof(ckf_slot_));
  l->regions = (uint64_t)cfg->max_members * (CKF_REGIONS_ / 8);
  l->members = ckf_align_((uint64_t)l->member_places * sizeof(uint32_t));
  l->spill = ckf_align_((uint64_t)l->spill_places * sizeof(ckf_spill_));
  l->sorted = ckf_align_((uint64_t)cfg->max_members * sizeof(ckf_member));
  return CKF_OK;
}

static uint64_t ckf_layout_exact_(const ckf_layout_ *l) {
  return l->mappings + l->tags + l->blocks + l->slots + l->regions + l->members + l->spill +
         l->sorted;
}

static uint64_t ckf_layout_bytes_(const ckf_layout_ *l) {
  return ckf_layout_exact_(l) + l->words + l->dirty_bits + l->dirty + l->log + l->deltas + 63;
}

size_t ckf_producer_mem_size(const ckf_producer_config *cfg) {
  ckf_producer_config full = *cfg;
  ckf_layout_ l;
  uint64_t bytes;
  if (ckf_layout_make_(&full, &l) != CKF_OK) {
    return 0;
  }
  bytes = ckf_layout_bytes_(&l);
  return bytes <= PTRDIFF_MAX ? (size_t)bytes : 0;
}

/* Cuts the next array from the block. */
static void *ckf_carve_(uint8_t **at, uint64_t bytes) {
  uint8_t *const start = *at;
  *at += (size_t)bytes;
  return start;
}

/* The same, zeroed. */
static void *ckf_carve_zero_(uint8_t **at, uint64_t bytes) {
  return CKF_MEMSET(ckf_carve_(at, bytes), 0, (size_t)bytes);
}

static void ckf_table_init_(ckf_table_ *t, uint8_t **at, uint32_t rows, uint64_t *seed) {
  t->rows = (uint64_t *)ckf_carve_zero_(at, (uint64_t)rows * 64);
  t->row_count = rows;
  t->implied = ckf_log2_(rows);
  t->key = ckf_rng_draw(seed);
  t->factor = ckf_rng_draw(seed) | 1;
  t->inverse = ckf_odd_inverse_(t->factor);
}

int ckf_producer_init_abi(ckf_producer *p, size_t p_size, const ckf_producer_config *cfg, void *mem,
                          size_t len) {
  ckf_producer_config full;
  ckf_layout_ l;
  ckf_format format;
  ckf_image *log;
  uint32_t *deltas = NULL;
  uint64_t *words, seed;
  uint8_t *at;
  int rc;
  if (p_size != sizeof *p) {
    return CKF_ERR_ABI;
  }
  full = *cfg;
  rc = ckf_layout_make_(&full, &l);
  if (rc != CKF_OK) {
    return rc;
  }
  if (ckf_layout_bytes_(&l) > PTRDIFF_MAX) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  if (!mem || len < ckf_layout_bytes_(&l)) {
    return CKF_ERR_NOSPACE;
  }
  CKF_MEMSET(p, 0, sizeof *p);
  p->cfg_ = full;
  p->mem_bytes_ = len;
  p->exact_bytes_ = (size_t)ckf_layout_exact_(&l);
  at = (uint8_t *)mem + (64 - (uintptr_t)mem % 64) % 64;
  seed = full.hash_seed;
  ckf_table_init_(&p->mappings_, &at, l.mapping_rows, &seed);
  ckf_table_init_(&p->blocks_, &at, l.block_rows, &seed);
  words = (uint64_t *)ckf_carve_zero_(&at, l.words);
  p->dirty_bits_ = (uint64_t *)ckf_carve_zero_(&at, l.dirty_bits);
  p->dirty_ = (uint8_t *)ckf_carve_(&at, l.dirty);
  log = (ckf_image *)ckf_carve_(&at, l.log);
  if (full.delta_table) {
    deltas = (uint32_t *)ckf_carve_(&at, l.deltas);
    ckf_delta_table(full.filter.seed, deltas);
  }
  p->tags_ = full.tags ? (uint32_t *)ckf_carve_(&at, l.tags) : NULL;
  p->slots_ = (ckf_slot_ *)ckf_carve_(&at, l.slots);
  p->regions_ = (uint64_t *)ckf_carve_zero_(&at, l.regions);
  p->member_index_ = (uint32_t *)ckf_carve_zero_(&at, l.members);
  p->spill_ = (ckf_spill_ *)ckf_carve_zero_(&at, l.spill);
  p->sorted_ = (ckf_member *)ckf_carve_(&at, l.sorted);
  p->member_mask_ = l.member_places - 1;
  p->spill_mask_ = l.spill_places - 1;
  p->slot_free_ = CKF_NONE_;
  p->slot_bits_ = l.slot_bits;
  p->owner_bits_ = l.owner_bits;
  p->match_bits_ = 66 + l.slot_bits - p->mappings_.implied;
  while (l.mapping_rows >> p->region_shift_ >= CKF_REGIONS_) {
    p->region_shift_++;
  }
  format.seed = full.filter.seed;
  format.bucket_count = l.buckets;
  return ckf_filter_init(&p->filter_, &format, full.filter.max_kicks, words, log, deltas);
}

/* ---- events ---- */

/* Which events count: CKF_OK with `out->ignored` false. */
static int ckf_gate_(bool cleared, enum ckf_tier tier, enum ckf_domain domain, ckf_outcome *out) {
  CKF_MEMSET(out, 0, sizeof *out);
  if (domain != CKF_DOMAIN_MISSING && domain != CKF_DOMAIN_WORKER &&
      domain != CKF_DOMAIN_CACHE_OWNER) {
    out->ignored = true;
    return out->error = CKF_ERR_UNSUPPORTED_DOMAIN;
  }
  if (cleared) {
    out->ignored = domain == CKF_DOMAIN_CACHE_OWNER;
    return CKF_OK;
  }
  out->ignored = tier != CKF_TIER_DEVICE || domain == CKF_DOMAIN_CACHE_OWNER;
  if (tier == CKF_TIER_DEVICE && domain == CKF_DOMAIN_CACHE_OWNER) {
    return out->error = CKF_ERR_UNSUPPORTED_DOMAIN;
  }
  return CKF_OK;
}

/* Before an event that counts is processed: it pends whatever becomes of it. */
static void ckf_event_begin_(ckf_producer *p) {
  p->changes_++;
  ckf_count_(&p->pending_, 1);
}

static int ckf_event_end_(ckf_producer *p, int rc, ckf_outcome *out) {
  out->error = rc;
  out->boundary = p->pending_ >= p->cfg_.filter.publish_every_n_events;
  return rc;
}

/* A rebuild takes its members in order and leaves the retained ones alone. */
static int ckf_rebuild_order_(ckf_producer *p, const ckf_member *m);

/* A store event on its way, CKF_EVENT_ of its blocks at a time. */
typedef struct ckf_store_ {
  const ckf_block *blocks;
  size_t n;
  uint32_t slot;
  bool rooted;          /* the first block is a root */
  bool omitted_repeats; /* some repeat is not in the filter */
  uint64_t parent;      /* canonical of the parent, unless rooted */
  uint64_t last;        /* canonical of the last block that was hashed */
  /* The blocks that are looked at: */
  ckf_key_ key[CKF_EVENT_];
  uint64_t mixed[CKF_EVENT_];
  uint64_t rest[CKF_EVENT_];
  uint32_t home[CKF_EVENT_];
  uint32_t block[CKF_EVENT_]; /* number of a new mapping's block, CKF_NONE_ of a repeat */
} ckf_store_;

/* Hashes the next blocks, from `at` on, and asks for the rows that they will touch. */
static size_t ckf_store_hash_(const ckf_producer *p, ckf_store_ *st, size_t at) {
  const size_t step = st->n - at < CKF_EVENT_ ? st->n - at : CKF_EVENT_;
  uint64_t canonical = at == 0 ? st->parent : st->last;
  size_t i;
  for (i = 0; i < step; i++) {
    const ckf_block *const b = &st->blocks[at + i];
    canonical = st->rooted && at + i == 0 ? b->local : ckf_child(canonical, b->local);
    st->mixed[i] = ckf_filter_mix_(&p->filter_, canonical);
    st->key[i] = ckf_key_make_(p, st->slot, b->external);
    st->home[i] = ckf_split_(&p->blocks_, ckf_scramble_(&p->blocks_, st->mixed[i]), &st->rest[i]);
    CKF_PREFETCH_(ckf_row_(&p->mappings_, st->key[i].row));
    CKF_PREFETCH_(ckf_row_(&p->blocks_, st->home[i]));
  }
  st->last = canonical;
  for (i = 0; i < step;
       i++) { /* a full row is read on its own account, its other row perhaps too */
    const uint64_t *const entries = ckf_row_(&p->mappings_, st->key[i].row);
    const uint64_t *const cells = ckf_row_(&p->blocks_, st->home[i]);
    const bool full = entries[CKF_ROW_ENTRIES_ - 1] || entries[CKF_ROW_ENTRIES_] >> CKF_AWAY_SHIFT_;
    CKF_PREFETCH_(full ? ckf_row_(&p->mappings_, st->key[i].second) : entries);
    CKF_PREFETCH_(cells[CKF_ROW_WORDS_ - 1] & ckf_cell_full_(p)
                      ? ckf_row_(&p->blocks_, ckf_way_row_(p, st->home[i], 1))
                      : cells);
  }
  return step;
}

/* Gives a block that may be new one owner more; its number goes to *block. */
static int ckf_own_(ckf_producer *p, uint32_t home, uint64_t rest, uint32_t *block) {
  *block = ckf_block_find_(p, home, rest);
  if (*block != CKF_NONE_) {
    return ckf_block_own_more_(p, *block);
  }
  if (p->block_count_ < p->cfg_.max_blocks) {
    *block = ckf_block_add_(p, home, rest);
  }
  return *block == CKF_NONE_ ? CKF_ERR_NOSPACE : CKF_OK;
}

/* Takes it back; a block that the event made is in no filter yet. */
static void ckf_own_undo_(ckf_producer *p, uint32_t block) {
  if (ckf_cell_owners_(p, *ckf_cell_(p, block)) == 1) {
    ckf_block_erase_(p, block);
  } else {
    ckf_block_own_less_(p, block);
  }
}

/* Asks for the filter word in the first home of a block. */
static inline void ckf_word_prefetch_(const ckf_producer *p, uint64_t mixed) {
  CKF_PREFETCH_(&p->filter_.words_[ckf_filter_home_(&p->filter_, mixed)]);
}

/* Maps block i of those that are hashed. */
static inline int ckf_store_map_one_(ckf_producer *p, ckf_store_ *st, size_t i, uint32_t flag) {
  const uint32_t place = ckf_mapping_find_(p, &st->key[i]);
  int rc;
  st->block[i] = CKF_NONE_;
  if (place != CKF_NONE_) {
    const uint32_t block = ckf_mapping_block_(p, place);
    uint64_t rest;
    if (ckf_block_home_(p, block, &rest) != st->home[i] || rest != st->rest[i]) {
      return CKF_ERR_INVALID_BLOCK_SEQUENCE;
    }
    st->omitted_repeats |= ckf_cell_state_(*ckf_cell_(p, block)) != CKF_RESIDENT_;
    return CKF_OK;
  }
  if (p->mapping_count_ == p->cfg_.max_mappings) {
    return CKF_ERR_NOSPACE;
  }
  rc = ckf_own_(p, st->home[i], st->rest[i], &st->block[i]);
  if (rc == CKF_OK && ckf_mapping_add_(p, st->slot, &st->key[i], st->block[i], flag) == CKF_NONE_) {
    ckf_own_undo_(p, st->block[i]);
    rc = CKF_ERR_NOSPACE;
  }
  ckf_word_prefetch_(p, st->mixed[i]);
  return rc;
}

/* What an event that found no room is refused for: does a block contradict a mapping, the event's
 * own first ones included? Then the source is wrong, whatever the room. */
static int ckf_store_refusal_(ckf_producer *p, const ckf_store_ *st) {
  uint64_t canonical = st->parent;
  size_t i;
  for (i = 0; i < st->n; i++) {
    const ckf_key_ key = ckf_key_make_(p, st->slot, st->blocks[i].external);
    const uint32_t place = ckf_mapping_find_(p, &key);
    canonical =
        st->rooted && i == 0 ? st->blocks[i].local : ckf_child(canonical, st->blocks[i].local);
    if (place != CKF_NONE_ && ckf_block_canonical_(p, ckf_mapping_block_(p, place)) != canonical) {
      return CKF_ERR_INVALID_BLOCK_SEQUENCE;
    }
  }
  return CKF_ERR_NOSPACE;
}

/* Maps the blocks of the event to canonicals and owns them. Stops at the first error with `*done`
 * blocks mapped. Only an event that is hashed in several steps needs the marks of new mappings. */
static int ckf_store_map_(ckf_producer *p, ckf_store_ *st, size_t *done) {
  const uint32_t flag = st->n > CKF_EVENT_ ? CKF_NEW_ : 0;
  for (*done = 0; *done < st->n;) {
    const size_t step = ckf_store_hash_(p, st, *done);
    size_t i;
    for (i = 0; i < step; i++, ++*done) {
      const int rc = ckf_store_map_one_(p, st, i, flag);
      if (rc != CKF_OK) {
        return rc;
      }
    }
  }
  return CKF_OK;
}

/* The number of the block behind a new mapping, whose mark goes; CKF_NONE_ for a repeat. */
static uint32_t ckf_store_new_(ckf_producer *p, const ckf_key_ *key) {
  const uint32_t place = ckf_mapping_find_(p, key);
  const uint32_t extra = place == CKF_NONE_ ? 0 : ckf_extra_(p, place);
  if (!(extra & CKF_NEW_)) {
    return CKF_NONE_;
  }
  ckf_extra_set_(p, place, extra & ~CKF_NEW_);
  return ckf_mapping_block_(p, place);
}

/* Takes back the first `done` mappings of a refused event. */
static void ckf_store_undo_(ckf_producer *p, ckf_store_ *st, size_t done) {
  size_t at, i, step;
  for (at = 0; at < done; at += step) {
    step = st->n > CKF_EVENT_ ? ckf_store_hash_(p, st, at) : st->n;
    for (i = 0; i < step && at + i < done; i++) {
      const uint32_t block = st->n > CKF_EVENT_ ? ckf_store_new_(p, &st->key[i]) : st->block[i];
      if (block != CKF_NONE_) {
        ckf_mapping_erase_(p, st->slot, ckf_mapping_find_(p, &st->key[i]));
        ckf_own_undo_(p, block);
      }
    }
  }
  ckf_member_drop_if_empty_(p, st->slot);
}

/* Offers a block to the filter, unless it is there or was refused during this event. */
static inline bool ckf_offer_(ckf_producer *p, uint32_t block, uint64_t mixed) {
  uint64_t *const cell = ckf_cell_(p, block);
  const uint32_t state = ckf_cell_state_(*cell);
  if (state == CKF_RESIDENT_ || state == CKF_TRIED_) {
    return true;
  }
  if (state == CKF_FRESH_) {
    ckf_announce_(p, mixed, true);
  }
  return ckf_admit_(p, cell, mixed, p->filter_.max_kicks_);
}

/* Offers the blocks of the new mappings, each canonical once; returns how many found no place. */
static uint32_t ckf_store_admit_(ckf_producer *p, ckf_store_ *st) {
  uint32_t failed = 0;
  size_t at, i, step;
  for (at = 0; at < st->n; at += step) {
    step = st->n;
    if (st->n > CKF_EVENT_) { /* what was known of these blocks has been overwritten */
      step = ckf_store_hash_(p, st, at);
      for (i = 0; i < step; i++) {
        st->block[i] = ckf_store_new_(p, &st->key[i]);
        if (st->block[i] != CKF_NONE_) {
          ckf_word_prefetch_(p, st->mixed[i]);
        }
      }
    }
    for (i = 0; i < step; i++) {
      if (st->block[i] != CKF_NONE_) {
        failed += !ckf_offer_(p, st->block[i], st->mixed[i]);
      }
    }
  }
  return failed;
}

/* Repeats of omitted blocks get one try without relocation. Rare, so it may look everything up
 * again. Then the marks of both rounds go. */
static void ckf_store_retry_(ckf_producer *p, ckf_store_ *st) {
  unsigned round;
  for (round = p->rebuilding_ || !st->omitted_repeats; round < 2; round++) {
    size_t i;
    for (i = 0; i < st->n; i++) {
      const ckf_key_ key = ckf_key_make_(p, st->slot, st->blocks[i].external);
      const uint32_t block = ckf_mapping_block_(p, ckf_mapping_find_(p, &key));
      uint64_t *const cell = ckf_cell_(p, block);
      const uint32_t state = ckf_cell_state_(*cell);
      if (round == 1 && state == CKF_TRIED_) {
        ckf_cell_set_state_(cell, CKF_OMITTED_);
      } else if (round == 0 && state == CKF_OMITTED_) {
        (void)ckf_admit_(p, cell, ckf_block_mixed_(p, block), 0);
      }
    }
  }
}

/* The canonical that the first block hangs under. */
static int ckf_store_parent_(ckf_producer *p, ckf_store_ *st, bool has_parent, uint64_t parent,
                             bool has_start, uint64_t start) {
  uint32_t place = CKF_NONE_;
  st->rooted = !has_parent;
  if (!has_parent) {
    return has_start && start != 0 ? CKF_ERR_INVALID_BLOCK_SEQUENCE : CKF_OK;
  }
  if (st->slot != CKF_NONE_) {
    const ckf_key_ key = ckf_key_make_(p, st->slot, parent);
    place = ckf_mapping_find_(p, &key);
  }
  if (place == CKF_NONE_) {
    ckf_count_(&p->parent_not_found_, !p->rebuilding_);
    return CKF_ERR_PARENT_NOT_FOUND;
  }
  st->parent = ckf_block_canonical_(p, ckf_mapping_block_(p, place));
  return CKF_OK;
}

static int ckf_store_run_(ckf_producer *p, const ckf_member *m, bool has_parent, uint64_t parent,
                          bool has_start, uint64_t start, const ckf_block *blocks, size_t n,
                          ckf_outcome *out) {
  ckf_store_ st;
  uint32_t before;
  size_t done = 0;
  int rc;
  if (n == 0) {
    return CKF_OK;
  }
  st.blocks = blocks;
  st.n = n;
  st.omitted_repeats = false;
  st.parent = st.last = 0;
  st.slot = ckf_member_find_(p, m);
  rc = ckf_store_parent_(p, &st, has_parent, parent, has_start, start);
  if (rc != CKF_OK) {
    return rc;
  }
  if (st.slot == CKF_NONE_) {
    st.slot = ckf_member_add_(p, m);
    if (st.slot == CKF_NONE_) {
      ckf_count_(&p->nospace_blocks_, n);
      return CKF_ERR_NOSPACE;
    }
  }
  before = p->slots_[st.slot].count;
  rc = ckf_store_map_(p, &st, &done);
  if (rc != CKF_OK) {
    rc = rc == CKF_ERR_NOSPACE ? ckf_store_refusal_(p, &st) : rc;
    ckf_store_undo_(p, &st, done);
    ckf_count_(&p->nospace_blocks_, rc == CKF_ERR_NOSPACE ? n : 0);
    return rc;
  }
  out->mapped = p->slots_[st.slot].count - before;
  out->repeated = (uint32_t)n - out->mapped;
  out->omitted = ckf_store_admit_(p, &st);
  ckf_count_(&p->capacity_failures_, out->omitted);
  if (out->omitted || st.omitted_repeats) {
    ckf_store_retry_(p, &st);
  }
  return out->omitted && !p->rebuilding_ ? CKF_ERR_CAPACITY_EXHAUSTED : CKF_OK;
}

int ckf_producer_stored(ckf_producer *p, const ckf_member *member, enum ckf_tier tier,
                        enum ckf_domain domain, bool has_parent, uint64_t parent, bool has_start,
                        uint64_t start, const ckf_block *blocks, size_t n, ckf_outcome *out) {
  int rc = ckf_gate_(false, tier, domain, out);
  if (rc != CKF_OK || out->ignored) {
    return rc;
  }
  if ((n > 0 && !blocks) || n > CKF_MAX_LIMIT_) {
    return out->error = CKF_ERR_ARG;
  }
  if (p->rebuilding_) {
    rc = ckf_rebuild_order_(p, member);
    if (rc == CKF_OK) {
      rc = ckf_store_run_(p, member, has_parent, parent, has_start, start, blocks, n, out);
    }
    return out->error = rc;
  }
  ckf_event_begin_(p);
  rc = ckf_store_run_(p, member, has_parent, parent, has_start, start, blocks, n, out);
  return ckf_event_end_(p, rc, out);
}

/* What is known of the mappings that are about to be removed together. */
typedef struct ckf_doomed_ {
  uint32_t place[CKF_EVENT_]; /* CKF_NONE_: not mapped */
  uint32_t block[CKF_EVENT_];
  uint64_t entry[CKF_EVENT_]; /* to notice one that is gone since */
  uint64_t mixed[CKF_EVENT_]; /* of blocks that have one owner */
} ckf_doomed_;

/* Asks for the block row and then for the filter word of each. Every step serves all of them before
 * the next one reads what the step before it asked for. */
static inline void ckf_doomed_prefetch_(const ckf_producer *p, ckf_doomed_ *d, size_t n) {
  size_t i;
  for (i = 0; i < n; i++) {
    if (d->place[i] != CKF_NONE_) {
      d->entry[i] = *ckf_entry_(p, d->place[i]);
      d->block[i] = ckf_mapping_block_(p, d->place[i]);
      CKF_PREFETCH_(ckf_cell_(p, d->block[i]));
    }
  }
  for (i = 0; i < n; i++) {
    if (d->place[i] != CKF_NONE_ && ckf_cell_owners_(p, *ckf_cell_(p, d->block[i])) == 1) {
      d->mixed[i] = ckf_block_mixed_(p, d->block[i]);
      ckf_word_prefetch_(p, d->mixed[i]);
    } else {
      d->mixed[i] = 0;
    }
  }
}

/* Removes mapping i; `known` says that the block had one owner when it was looked at. */
static inline int ckf_doomed_remove_(ckf_producer *p, uint32_t slot, ckf_doomed_ *d, size_t i) {
  const uint32_t block = d->block[i];
  int rc;
  if (d->mixed[i] == 0) { /* it may have lost other owners since */
    d->mixed[i] = ckf_cell_owners_(p, *ckf_cell_(p, block)) == 1 ? ckf_block_mixed_(p, block) : 0;
  }
  rc = ckf_disown_(p, block, d->mixed[i]);
  if (rc == CKF_OK) {
    ckf_mapping_erase_(p, slot, d->place[i]);
  }
  return rc;
}

static int ckf_remove_run_(ckf_producer *p, const ckf_member *m, const uint64_t *externals,
                           size_t n, ckf_outcome *out) {
  const uint32_t slot = ckf_member_find_(p, m);
  ckf_key_ key[CKF_EVENT_];
  ckf_doomed_ d;
  size_t at = 0, i, step;
  int first = CKF_OK;
  for (; slot != CKF_NONE_ && at < n; at += step) {
    step = n - at < CKF_EVENT_ ? n - at : CKF_EVENT_;
    for (i = 0; i < step; i++) {
      key[i] = ckf_key_make_(p, slot, externals[at + i]);
      CKF_PREFETCH_(ckf_row_(&p->mappings_, key[i].row));
    }
    for (i = 0; i < step; i++) {
      d.place[i] = ckf_row_entry_(p, key[i].row, key[i].want);
      if (d.place[i] == CKF_NONE_) {
        CKF_PREFETCH_(ckf_row_(&p->mappings_, key[i].second));
      }
    }
    for (i = 0; i < step; i++) {
      if (d.place[i] == CKF_NONE_ && ckf_away_(p, key[i].row)) {
        d.place[i] = ckf_row_entry_(p, key[i].second, key[i].want | CKF_SECOND_);
      }
    }
    ckf_doomed_prefetch_(p, &d, step);
    for (i = 0; i < step; i++) {
      int rc;
      if (d.place[i] == CKF_NONE_ || *ckf_entry_(p, d.place[i]) != d.entry[i]) {
        out->unknown++; /* removals move nothing: what is not there any more is gone */
        continue;
      }
      rc = ckf_doomed_remove_(p, slot, &d, i);
      out->unmapped += rc == CKF_OK;
      first = first == CKF_OK ? rc : first;
    }
  }
  if (slot != CKF_NONE_) {
    ckf_member_drop_if_empty_(p, slot);
  }
  out->unknown += (uint32_t)(n - at); /* of a member that does not exist */
  ckf_count_(&p->unknown_removals_, out->unknown);
  return first;
}

int ckf_producer_removed(ckf_producer *p, const ckf_member *member, enum ckf_tier tier,
                         enum ckf_domain domain, const uint64_t *externals, size_t n,
                         ckf_outcome *out) {
  const int rc = ckf_gate_(false, tier, domain, out);
  if (rc != CKF_OK || out->ignored) {
    return rc;
  }
  if ((n > 0 && !externals) || n > CKF_MAX_LIMIT_) {
    return out->error = CKF_ERR_ARG;
  }
  if (p->rebuilding_) {
    return out->error = CKF_ERR_INVALID_BLOCK_SEQUENCE;
  }
  ckf_event_begin_(p);
  return ckf_event_end_(p, ckf_remove_run_(p, member, externals, n, out), out);
}

/* Drops all mappings of a member. What it scanned needs no second scan: the last mapping ends it,
 * and the member's bitmap goes with the member. */
static int ckf_clear_slot_(ckf_producer *p, uint32_t slot, uint32_t *unmapped) {
  ckf_doomed_ d;
  uint32_t place = 0, step, i;
  while (p->slots_[slot].count > 0) {
    for (step = 0; step < CKF_EVENT_ && step < p->slots_[slot].count; step++) {
      place = ckf_mapping_next_(p, slot, place);
      if (place == CKF_NONE_) {
        break;
      }
      d.place[step] = place++;
    }
    if (step == 0) {
      return CKF_ERR_INVARIANT;
    }
    ckf_doomed_prefetch_(p, &d, step);
    for (i = 0; i < step; i++) {
      const int rc = ckf_doomed_remove_(p, slot, &d, i);
      if (rc != CKF_OK) {
        return rc;
      }
      (*unmapped)++;
    }
  }
  ckf_member_drop_if_empty_(p, slot);
  return CKF_OK;
}

int ckf_producer_cleared(ckf_producer *p, const ckf_member *member, enum ckf_domain domain,
                         ckf_outcome *out) {
  uint32_t slot;
  int rc = ckf_gate_(true, CKF_TIER_DEVICE, domain, out);
  if (rc != CKF_OK || out->ignored) {
    return rc;
  }
  if (p->rebuilding_) {
    return out->error = CKF_ERR_INVALID_BLOCK_SEQUENCE;
  }
  ckf_event_begin_(p);
  slot = ckf_member_find_(p, member);
  rc = slot == CKF_NONE_ ? CKF_OK : ckf_clear_slot_(p, slot, &out->unmapped);
  return ckf_event_end_(p, rc, out);
}

int ckf_producer_remove_rank(ckf_producer *p, const ckf_member *member) {
  const uint32_t slot = ckf_member_find_(p, member);
  uint32_t unmapped = 0;
  p->changes_++;
  return slot == CKF_NONE_ ? CKF_OK : ckf_clear_slot_(p, slot, &unmapped);
}

int ckf_producer_remove_worker(ckf_producer *p, uint64_t worker_id) {
  uint32_t slot, unmapped = 0;
  p->changes_++;
  for (slot = 0; slot < p->slot_used_; slot++) {
    if (p->slots_[slot].count > 0 && p->slots_[slot].worker_id == worker_id) {
      const int rc = ckf_clear_slot_(p, slot, &unmapped);
      if (rc != CKF_OK) {
        return rc;
      }
    }
  }
  return CKF_OK;
}

int ckf_producer_drain(ckf_producer *p, ckf_batch *out) {
  const uint32_t touched = p->dirty_len_;
  uint8_t *to = p->dirty_;
  uint32_t i, changed = 0;
  out->images = p->dirty_;
  out->image_count = 0;
  if (p->rebuilding_) {
    return CKF_ERR_ARG;
  }
  for (i = 0; i < touched; i++) { /* the list of old words becomes the list of new ones in place */
    const ckf_image was = ckf_image_get_(p->dirty_ + (size_t)i * CKF_CBI1_IMAGE_BYTES);
    const uint64_t now = p->filter_.words_[was.bucket];
    p->dirty_bits_[was.bucket / 64] = 0;
    if (now != was.word) {
      ckf_image_put_(to, was.bucket, now);
      to += CKF_CBI1_IMAGE_BYTES;
      changed++;
    }
  }
  p->dirty_len_ = 0;
  p->pending_ = 0;
  ckf_count_(&p->distinct_touched_, touched);
  ckf_count_(&p->emitted_, changed);
  ckf_count_(&p->net_reverted_, touched - changed);
  out->image_count = changed;
  return changed > 0;
}

ckf_image ckf_batch_image(const ckf_batch *batch, size_t i) {
  return ckf_image_get_(batch->images + i * CKF_CBI1_IMAGE_BYTES);
}

void ckf_batch_put(uint8_t *images, size_t i, ckf_image image) {
  ckf_image_put_(images + i * CKF_CBI1_IMAGE_BYTES, image.bucket, image.word);
}

/* ---- read-outs ---- */

const ckf_format *ckf_producer_format(const ckf_producer *p) { return &p->filter_.format_; }

const uint64_t *ckf_producer_words(const ckf_producer *p) { return p->filter_.words_; }

uint64_t ckf_producer_pending(const ckf_producer *p) { return p->pending_; }

uint32_t ckf_producer_dirty(const ckf_producer *p) { return p->dirty_len_; }

bool ckf_producer_has_pending(const ckf_producer *p) {
  return p->pending_ != 0 || p->dirty_len_ != 0;
}

bool ckf_producer_has_tags(const ckf_producer *p) { return p->tags_ != NULL; }

void ckf_producer_stats_get(const ckf_producer *p, ckf_producer_stats *out) {
  ckf_layout_ l;
  l.buckets = p->filter_.format_.bucket_count;
  ckf_layout_buckets_(&l);
  out->members = p->member_count_;
  out->contributions = p->mapping_count_;
  out->unique_blocks = p->block_count_;
  out->occupied_slots = p->resident_count_;
  out->pending_events = p->pending_;
  out->unknown_removals = p->unknown_removals_;
  out->parent_not_found = p->parent_not_found_;
  out->capacity_failures = p->capacity_failures_;
  out->nospace_blocks = p->nospace_blocks_;
  out->physical_touches = p->physical_touches_;
  out->distinct_touched = p->distinct_touched_;
  out->emitted = p->emitted_;
  out->net_reverted = p->net_reverted_;
  out->generator = p->filter_.rng_;
  out->mem_bytes = p->mem_bytes_;
  out->exact_bytes = p->exact_bytes_;
  out->filter_bytes = p->mem_bytes_ - p->exact_bytes_;
  out->words_bytes = l.words;
  out->dirty_bytes = l.dirty_bits + l.dirty;
  out->max_mappings = p->cfg_.max_mappings;
  out->max_blocks = p->cfg_.max_blocks;
}

uint64_t ckf_producer_occupied_buckets(const ckf_producer *p) {
  uint64_t bucket, occupied = 0;
  for (bucket = 0; bucket < p->filter_.format_.bucket_count; bucket++) {
    occupied += p->filter_.words_[bucket] != 0;
  }
  return occupied;
}

bool ckf_producer_contains(const ckf_producer *p, uint64_t canonical) {
  return ckf_filter_contains(&p->filter_, canonical);
}

/* Number of the block with this filter hash. */
static uint32_t ckf_block_of_(const ckf_producer *p, uint64_t mixed) {
  uint64_t rest;
  const uint32_t home = ckf_split_(&p->blocks_, ckf_scramble_(&p->blocks_, mixed), &rest);
  return ckf_block_find_(p, home, rest);
}

int ckf_producer_owners(const ckf_producer *p, uint64_t canonical, uint32_t *owners,
                        bool *resident) {
  const uint32_t block = ckf_block_of_(p, ckf_filter_mix_(&p->filter_, canonical));
  if (owners) {
    *owners = block == CKF_NONE_ ? 0 : ckf_block_owners_(p, block);
  }
  if (resident) {
    *resident = block != CKF_NONE_ && ckf_cell_state_(*ckf_cell_(p, block)) == CKF_RESIDENT_;
  }
  return block != CKF_NONE_;
}

int ckf_producer_find(ckf_producer *p, const ckf_member *member, uint64_t external,
                      uint64_t *canonical, uint32_t **tag) {
  const uint32_t slot = ckf_member_find_(p, member);
  uint32_t place = CKF_NONE_;
  if (slot != CKF_NONE_) {
    const ckf_key_ key = ckf_key_make_(p, slot, external);
    place = ckf_mapping_find_(p, &key);
  }
  if (place == CKF_NONE_) {
    return 0;
  }
  if (canonical) {
    *canonical = ckf_block_canonical_(p, ckf_mapping_block_(p, place));
  }
  if (tag) {
    *tag = p->tags_ ? ckf_tag_(p, place) : NULL;
  }
  return 1;
}

uint32_t ckf_producer_member_blocks(const ckf_producer *p, const ckf_member *member) {
  const uint32_t slot = ckf_member_find_(p, member);
  return slot == CKF_NONE_ ? 0 : p->slots_[slot].count;
}

static bool ckf_member_less_(const ckf_member *x, const ckf_member *y) {
  return x->worker_id != y->worker_id ? x->worker_id < y->worker_id : x->dp_rank < y->dp_rank;
}

static void ckf_member_sift_(ckf_member *heap, size_t at, size_t n) {
  const ckf_member value = heap[at];
  size_t child;
  for (; (child = 2 * at + 1) < n; at = child) {
    child += child + 1 < n && ckf_member_less_(&heap[child], &heap[child + 1]);
    if (!ckf_member_less_(&value, &heap[child])) {
      break;
    }
    heap[at] = heap[child];
  }
  heap[at] = value;
}

/* Members of `p`, ascending, into `out`. */
static size_t ckf_members_sort_(const ckf_producer *p, ckf_member *out) {
  size_t n = 0, i;
  uint32_t slot;
  for (slot = 0; slot < p->slot_used_; slot++) {
    if (p->slots_[slot].count > 0) {
      out[n].worker_id = p->slots_[slot].worker_id;
      out[n++].dp_rank = p->slots_[slot].dp_rank;
    }
  }
  for (i = n / 2; i-- > 0;) {
    ckf_member_sift_(out, i, n);
  }
  for (i = n; i-- > 1;) {
    const ckf_member largest = out[0];
    out[0] = out[i];
    out[i] = largest;
    ckf_member_sift_(out, 0, i);
  }
  return n;
}

const ckf_member *ckf_producer_members(ckf_producer *p, size_t *count) {
  *count = ckf_members_sort_(p, p->sorted_);
  return p->sorted_;
}

int ckf_producer_mapping_next(const ckf_producer *p, const ckf_member *member, uint32_t *cursor,
                              ckf_mapping *out) {
  const uint32_t slot = ckf_member_find_(p, member);
  const uint32_t place = slot == CKF_NONE_ ? CKF_NONE_ : ckf_mapping_next_(p, slot, *cursor);
  if (place == CKF_NONE_) {
    return 0;
  }
  out->external = ckf_mapping_external_(p, place);
  out->canonical = ckf_block_canonical_(p, ckf_mapping_block_(p, place));
  out->tag = p->tags_ ? *ckf_tag_(p, place) : 0;
  *cursor = place + 1;
  return 1;
}

void ckf_producer_listen(ckf_producer *p, ckf_listener_fn listener, void *user) {
  p->listener_ = listener;
  p->listener_user_ = user;
}

/* ---- invariants ---- */

/* A mapping's part in a sum that tells whether each block has as many mappings as it has owners. */
static inline uint64_t ckf_check_share_(uint32_t block) {
  uint64_t state = block;
  return ckf_rng_draw(&state);
}

static bool ckf_check_mappings_(const ckf_producer *p, uint64_t *shares) {
  uint32_t row, i, slot, mappings = 0, away = 0, elsewhere = 0;
  bool good = true, stuck = false;
  *shares = 0;
  for (row = 0; row < p->mappings_.row_count; row++) {
    stuck = stuck || ckf_away_(p, row) == CKF_AWAY_MAX_;
    away += ckf_away_(p, row);
    for (i = 0; i < CKF_ROW_ENTRIES_; i++) {
      const uint32_t place = row * CKF_ROW_WORDS_ + i, region = row >> p->region_shift_;
      const uint64_t entry = *ckf_entry_(p, place);
      ckf_key_ key;
      if (entry == 0) {
        continue;
      }
      slot = ckf_entry_slot_(p, entry);
      if (slot >= p->slot_used_ || p->slots_[slot].count == 0 ||
          ckf_mapping_block_(p, place) / CKF_ROW_WORDS_ >= p->blocks_.row_count) {
        return false;
      }
      key = ckf_key_make_(p, slot, ckf_mapping_external_(p, place));
      good = good && ckf_mapping_find_(p, &key) == place && !(ckf_extra_(p, place) & CKF_NEW_) &&
             (*ckf_region_word_(p, slot, region) >> region % 64 & 1);
      *shares += ckf_check_share_(ckf_mapping_block_(p, place));
      elsewhere += (entry & CKF_SECOND_) != 0;
      mappings++;
    }
  }
  return good && (stuck || away == elsewhere) && mappings == p->mapping_count_;
}

static bool ckf_check_members_(const ckf_producer *p) {
  uint32_t slot, at, members = 0, mappings = 0, indexed = 0;
  bool good = true;
  for (slot = 0; slot < p->slot_used_; slot++) {
    uint32_t place = 0, n = 0;
    ckf_member m;
    if (p->slots_[slot].count == 0) {
      continue;
    }
    for (; (place = ckf_mapping_next_(p, slot, place)) != CKF_NONE_; place++) {
      n++;
    }
    m.worker_id = p->slots_[slot].worker_id;
    m.dp_rank = p->slots_[slot].dp_rank;
    good = good && n == p->slots_[slot].count && ckf_member_find_(p, &m) == slot;
    members++;
    mappings += n;
  }
  for (at = 0; at <= p->member_mask_; at++) {
    indexed += p->member_index_[at] != 0;
  }
  return good && members == p->member_count_ && indexed == members && mappings == p->mapping_count_;
}

static bool ckf_check_blocks_(const ckf_producer *p, uint64_t *shares) {
  uint64_t slots = 0, bucket;
  uint32_t row, i, at, blocks = 0, residents = 0, spilled = 0, places = 0;
  bool good = true;
  *shares = 0;
  for (row = 0; row < p->blocks_.row_count; row++) {
    for (i = 0; i < CKF_ROW_WORDS_ && ckf_row_bits_(p, row) != 0; i++) {
      const uint32_t block = row * CKF_ROW_WORDS_ + i;
      const uint64_t cell = *ckf_cell_(p, block) & ~CKF_AWAY_;
      const uint32_t state = ckf_cell_state_(cell);
      good = good && (*ckf_cell_(p, block) == cell || ckf_way_leads_(p, row, i + 1));
      if (ckf_cell_owners_(p, cell) == 0) {
        good = good && cell == 0;
        continue;
      }
      blocks++;
      residents += state == CKF_RESIDENT_;
      spilled += ckf_cell_owners_(p, cell) == ckf_cell_full_(p);
      *shares += ckf_check_share_(block) * ckf_block_owners_(p, block);
      good = good && ckf_block_of_(p, ckf_block_mixed_(p, block)) == block &&
             (state == CKF_OMITTED_ ||
              (state == CKF_RESIDENT_ &&
               ckf_filter_contains(&p->filter_, ckf_block_canonical_(p, block))));
    }
  }
  for (bucket = 0; bucket < p->filter_.format_.bucket_count; bucket++) {
    for (i = 0; i < 64; i += 16) {
      slots += (p->filter_.words_[bucket] >> i & 0xFFFF) != 0;
    }
  }
  for (at = 0; at <= p->spill_mask_; at++) {
    places += p->spill_[at].block != 0;
    good = good && (p->spill_[at].block == 0 ||
                    (p->spill_[at].owners >= ckf_cell_full_(p) &&
                     ckf_spill_find_(p, p->spill_[at].block - 1) == &p->spill_[at]));
  }
  return good && blocks == p->block_count_ && residents == p->resident_count_ &&
         slots == residents && spilled == places;
}

static bool ckf_check_window_(const ckf_producer *p) {
  uint64_t bits = 0, word;
  uint64_t i;
  for (i = 0; i < (p->filter_.format_.bucket_count + 63) / 64; i++) {
    for (word = p->dirty_bits_[i]; word; word &= word - 1) {
      bits++;
    }
  }
  for (i = 0; i < p->dirty_len_; i++) {
    const uint32_t bucket = ckf_image_get_(p->dirty_ + i * CKF_CBI1_IMAGE_BYTES).bucket;
    if (!(p->dirty_bits_[bucket / 64] >> bucket % 64 & 1)) {
      return false;
    }
  }
  return bits == p->dirty_len_;
}

int ckf_producer_check_(const ckf_producer *p) {
  uint64_t mapped, owned;
  return ckf_check_mappings_(p, &mapped) && ckf_check_members_(p) && ckf_check_blocks_(p, &owned) &&
                 mapped == owned && ckf_check_window_(p)
             ? CKF_OK
             : CKF_ERR_INVARIANT;
}

/* ==== rebuild (impl) ==== */

static int ckf_rebuild_order_(ckf_producer *p, const ckf_member *m) {
  const bool again = p->pushed_ && !ckf_member_less_(&p->last_pushed_, m) &&
                     !ckf_member_less_(m, &p->last_pushed_);
  if (again) {
    return CKF_OK;
  }
  if (ckf_member_find_(p, m) != CKF_NONE_) {
    return CKF_ERR_INVARIANT;
  }
  if (p->pushed_ && ckf_member_less_(m, &p->last_pushed_)) {
    return CKF_ERR_ARG;
  }
  p->pushed_ = true;
  p->last_pushed_ = *m;
  return CKF_OK;
}

/* Gives a member of `next` the mapping that `p` has at a place; *block is the block's number. */
static int ckf_mapping_copy_(ckf_producer *next, uint32_t slot, const ckf_producer *p,
                             uint32_t place, uint32_t *block) {
  const uint64_t mixed = ckf_block_mixed_(p, ckf_mapping_block_(p, place));
  const ckf_key_ key = ckf_key_make_(next, slot, ckf_mapping_external_(p, place));
  uint64_t rest;
  const uint32_t home = ckf_split_(&next->blocks_, ckf_scramble_(&next->blocks_, mixed), &rest);
  const int rc = next->mapping_count_ == next->cfg_.max_mappings
                     ? CKF_ERR_NOSPACE
                     : ckf_own_(next, home, rest, block);
  uint32_t to;
  if (rc != CKF_OK) {
    return rc;
  }
  to = ckf_mapping_add_(next, slot, &key, *block, 0);
  if (to == CKF_NONE_) {
    return CKF_ERR_NOSPACE;
  }
  if (next->tags_ && p->tags_) {
    *ckf_tag_(next, to) = *ckf_tag_(p, place);
  }
  return CKF_OK;
}

/* Copies a member with its tags and offers its blocks to the filter, each once. */
static int ckf_rebuild_retain_(ckf_producer *next, const ckf_producer *p, const ckf_member *m) {
  const uint32_t from = ckf_member_find_(p, m), slot = ckf_member_add_(next, m);
  uint32_t place, block, failed = 0;
  for (place = 0; (place = ckf_mapping_next_(p, from, place)) != CKF_NONE_; place++) {
    const int rc = ckf_mapping_copy_(next, slot, p, place, &block);
    if (rc != CKF_OK) {
      return rc;
    }
    failed += !ckf_offer_(next, block, ckf_block_mixed_(next, block));
  }
  ckf_count_(&next->capacity_failures_, failed);
  for (place = 0; failed && (place = ckf_mapping_next_(next, slot, place)) != CKF_NONE_; place++) {
    uint64_t *const cell = ckf_cell_(next, ckf_mapping_block_(next, place));
    if (ckf_cell_state_(*cell) == CKF_TRIED_) {
      ckf_cell_set_state_(cell, CKF_OMITTED_);
    }
  }
  return CKF_OK;
}

/* Lists the members of `p` that are not named, ascending, in the scratch of `next`. Its slots are
 * free so far: they mark the ones of `p` that are named. */
static size_t ckf_rebuild_rest_(ckf_producer *next, const ckf_producer *p, const ckf_member *named,
                                size_t named_len) {
  const size_t count = ckf_members_sort_(p, next->sorted_);
  size_t i, kept = 0;
  uint32_t slot;
  for (slot = 0; slot < p->slot_used_; slot++) {
    next->slots_[slot].count = 0;
  }
  for (i = 0; i < named_len; i++) {
    slot = ckf_member_find_(p, &named[i]);
    if (slot != CKF_NONE_) {
      next->slots_[slot].count = 1;
    }
  }
  for (i = 0; i < count; i++) {
    if (next->slots_[ckf_member_find_(p, &next->sorted_[i])].count == 0) {
      next->sorted_[kept++] = next->sorted_[i];
    }
  }
  return kept;
}

int ckf_rebuild_begin(ckf_producer *next, const ckf_producer *p, const ckf_member *named,
                      size_t named_len, void *mem, size_t len) {
  size_t count, i;
  int rc;
  if (p->rebuilding_ || (named_len > 0 && !named)) {
    return CKF_ERR_ARG;
  }
  rc = ckf_producer_init(next, &p->cfg_, mem, len);
  if (rc != CKF_OK) {
    return rc;
  }
  next->rebuilding_ = true;
  next->changes_ = p->changes_;
  count = ckf_rebuild_rest_(next, p, named, named_len);
  for (i = 0; i < count; i++) {
    rc = ckf_rebuild_retain_(next, p, &next->sorted_[i]);
    if (rc != CKF_OK) {
      return rc;
    }
  }
  return CKF_OK;
}

/* Enters a bucket into the window of `next` when its word is not the one that subscribers have. */
static void ckf_rebuild_mark_(ckf_producer *next, uint32_t bucket, uint64_t known) {
  if (next->filter_.words_[bucket] != known) {
    next->dirty_bits_[bucket / 64] |= UINT64_C(1) << bucket % 64;
    ckf_image_put_(next->dirty_ + (size_t)next->dirty_len_++ * CKF_CBI1_IMAGE_BYTES, bucket, known);
  }
}

/* Takes over what is counted over the whole life of a producer. */
static void ckf_rebuild_counters_(ckf_producer *next, const ckf_producer *p) {
  next->unknown_removals_ = p->unknown_removals_;
  next->parent_not_found_ = p->parent_not_found_;
  next->distinct_touched_ = p->distinct_touched_;
  next->emitted_ = p->emitted_;
  next->net_reverted_ = p->net_reverted_;
  ckf_count_(&next->capacity_failures_, p->capacity_failures_);
  ckf_count_(&next->nospace_blocks_, p->nospace_blocks_);
  ckf_count_(&next->physical_touches_, p->physical_touches_);
}

/* Announces the blocks of `p` that `other` does not have. */
static void ckf_rebuild_announce_(const ckf_producer *p, const ckf_producer *other, bool created) {
  uint32_t block;
  for (block = 0; block < p->blocks_.row_count * CKF_ROW_WORDS_; block++) {
    if (ckf_cell_owners_(p, *ckf_cell_(p, block)) > 0) {
      const uint64_t mixed = ckf_block_mixed_(p, block);
      if (ckf_block_of_(other, mixed) == CKF_NONE_) {
        ckf_announce_(p, mixed, created);
      }
    }
  }
}

int ckf_rebuild_commit(ckf_producer *p, ckf_producer *next) {
  const uint32_t buckets = (uint32_t)p->filter_.format_.bucket_count;
  ckf_producer old;
  uint32_t i;
  if (!next->rebuilding_ || p->rebuilding_ || next->changes_ != p->changes_) {
    return CKF_ERR_ARG;
  }
  for (i = 0; i < p->dirty_len_; i++) {
    const ckf_image was = ckf_image_get_(p->dirty_ + (size_t)i * CKF_CBI1_IMAGE_BYTES);
    ckf_rebuild_mark_(next, was.bucket, was.word);
  }
  for (i = 0; i < buckets; i++) {
    if (!(p->dirty_bits_[i / 64] >> i % 64 & 1)) {
      ckf_rebuild_mark_(next, i, p->filter_.words_[i]);
    }
  }
  next->rebuilding_ = false;
  next->pushed_ = false;
  next->changes_++;
  next->pending_ = 1;
  ckf_rebuild_counters_(next, p);
  next->listener_ = p->listener_;
  next->listener_user_ = p->listener_user_;
  if (p->listener_) {
    ckf_rebuild_announce_(p, next, false);
    ckf_rebuild_announce_(next, p, true);
  }
  old = *p;
  *p = *next;
  *next = old;
  return CKF_OK;
}

/* Copies what does not depend on where blocks and mappings lie. */
static void ckf_move_rest_(ckf_producer *next, const ckf_producer *p) {
  const size_t buckets = (size_t)p->filter_.format_.bucket_count;
  CKF_MEMCPY(next->filter_.words_, p->filter_.words_, buckets * 8);
  CKF_MEMCPY(next->dirty_bits_, p->dirty_bits_, (buckets + 63) / 64 * 8);
  CKF_MEMCPY(next->dirty_, p->dirty_, (size_t)p->dirty_len_ * CKF_CBI1_IMAGE_BYTES);
  next->filter_.rng_ = p->filter_.rng_;
  next->dirty_len_ = p->dirty_len_;
  next->resident_count_ = p->resident_count_;
  next->changes_ = p->changes_ + 1;
  next->pending_ = p->pending_;
  ckf_rebuild_counters_(next, p);
  next->listener_ = p->listener_;
  next->listener_user_ = p->listener_user_;
}

/* Copies a member with everything that is known of its blocks. */
static int ckf_move_member_(ckf_producer *next, const ckf_producer *p, uint32_t from) {
  uint32_t slot, place, block;
  ckf_member m;
  m.worker_id = p->slots_[from].worker_id;
  m.dp_rank = p->slots_[from].dp_rank;
  slot = ckf_member_add_(next, &m);
  if (slot == CKF_NONE_) {
    return CKF_ERR_NOSPACE;
  }
  for (place = 0; (place = ckf_mapping_next_(p, from, place)) != CKF_NONE_; place++) {
    const int rc = ckf_mapping_copy_(next, slot, p, place, &block);
    if (rc != CKF_OK) {
      return rc;
    }
    ckf_cell_set_state_(ckf_cell_(next, block),
                        ckf_cell_state_(*ckf_cell_(p, ckf_mapping_block_(p, place))));
  }
  return CKF_OK;
}

int ckf_producer_move(ckf_producer *p, const ckf_producer_config *cfg, void *mem, size_t len) {
  const ckf_config *const f = &cfg->filter, *const g = &p->cfg_.filter;
  ckf_producer next;
  uint32_t slot;
  int rc;
  if (p->rebuilding_ || f->expected_blocks != g->expected_blocks || f->max_kicks != g->max_kicks ||
      f->verification_window != g->verification_window || f->seed != g->seed ||
      f->publish_every_n_events != g->publish_every_n_events) {
    return CKF_ERR_ARG;
  }
  rc = ckf_producer_init(&next, cfg, mem, len);
  for (slot = 0; rc == CKF_OK && slot < p->slot_used_; slot++) {
    if (p->slots_[slot].count > 0) {
      rc = ckf_move_member_(&next, p, slot);
    }
  }
  if (rc == CKF_OK) {
    ckf_move_rest_(&next, p);
    *p = next;
  }
  return rc;
}

/* ==== publisher (impl) ==== */

int ckf_publisher_init_abi(ckf_publisher *pub, size_t pub_size, const ckf_identity *identity,
                           uint64_t last_sequence, ckf_sink_fn sink, void *user) {
  if (pub_size != sizeof *pub) {
    return CKF_ERR_ABI;
  }
  if (!sink) {
    return CKF_ERR_ARG;
  }
  CKF_MEMSET(pub, 0, sizeof *pub);
  pub->identity_ = *identity;
  pub->sink_ = sink;
  pub->user_ = user;
  pub->last_ = last_sequence;
  return CKF_OK;
}

int ckf_publisher_publish(ckf_publisher *pub, const ckf_batch *batch) {
  ckf_delta_out delta;
  if (pub->fence_ != CKF_FENCE_NONE) {
    return CKF_ERR_FENCED;
  }
  if (!pub->leased_) {
    return 0;
  }
  if (pub->last_ == UINT64_MAX) {
    pub->fence_ = CKF_FENCE_SEQUENCE_EXHAUSTED;
    return CKF_ERR_FENCED;
  }
  delta.identity = &pub->identity_;
  delta.lease = &pub->lease_;
  delta.base = pub->last_;
  delta.sequence = pub->last_ + 1;
  delta.batch = *batch;
  if (!pub->sink_(pub->user_, &delta)) {
    pub->fence_ = CKF_FENCE_DELIVERY_UNCERTAIN;
    return CKF_ERR_ENQUEUE;
  }
  pub->last_++;
  return 1;
}

int ckf_publisher_snapshot(ckf_publisher *pub, const ckf_lease *lease, const ckf_batch *tail,
                           uint64_t *sequence) {
  if (pub->last_ == UINT64_MAX) {
    return CKF_ERR_SEQUENCE_EXHAUSTED;
  }
  if (tail && pub->fence_ == CKF_FENCE_NONE) {
    const int rc = ckf_publisher_publish(pub, tail);
    if (rc < 0) {
      return rc;
    }
  }
  pub->lease_ = *lease;
  pub->leased_ = true;
  pub->fence_ = CKF_FENCE_NONE;
  *sequence = pub->last_;
  return CKF_OK;
}

void ckf_publisher_retire(ckf_publisher *pub) { pub->leased_ = false; }

void ckf_publisher_retire_stalled(ckf_publisher *pub) {
  pub->leased_ = false;
  pub->fence_ = CKF_FENCE_LEASE_STALLED;
}

int ckf_publisher_drain_marker(const ckf_publisher *pub, ckf_lease *lease,
                               uint64_t *expected_sequence) {
  if (!pub->leased_) {
    return 0;
  }
  *lease = pub->lease_;
  *expected_sequence = pub->last_;
  return 1;
}

uint64_t ckf_publisher_last_sequence(const ckf_publisher *pub) { return pub->last_; }

enum ckf_fence ckf_publisher_fence(const ckf_publisher *pub) { return pub->fence_; }

const char *ckf_fence_name(enum ckf_fence fence) {
  switch (fence) {
  case CKF_FENCE_NONE:
    return "";
  case CKF_FENCE_SEQUENCE_EXHAUSTED:
    return "SequenceExhausted";
  case CKF_FENCE_DELIVERY_UNCERTAIN:
    return "DeliveryUncertain";
  case CKF_FENCE_LEASE_STALLED:
    return "LeaseStalled";
  }
  return "Unknown";
}

/* ==== cbi1 (impl) ==== */

static inline uint32_t ckf_get16_(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8; }

static inline void ckf_put32_(uint8_t *p, uint32_t v) {
  p[0] = (uint8_t)v;
  p[1] = (uint8_t)(v >> 8);
  p[2] = (uint8_t)(v >> 16);
  p[3] = (uint8_t)(v >> 24);
}

#define CKF_CBI1_MAGIC_ UINT64_C(0x31494243) /* "CBI1" */

static void ckf_cbi1_header_(uint8_t *out, const ckf_format *format, int kind, uint64_t dc_id,
                             uint64_t epoch, uint32_t checksum) {
  ckf_xxh3_write64(out,
                   CKF_CBI1_MAGIC_ | (uint64_t)CKF_CBI1_WIRE_VERSION << 32 | (uint64_t)kind << 48);
  ckf_xxh3_write64(out + 8, CKF_FINGERPRINT_BITS | CKF_SLOTS_PER_BUCKET << 8 |
                                CKF_FORMAT_VERSION << 16); /* the seed overwrites the upper half */
  ckf_xxh3_write64(out + 12, format->seed);
  ckf_xxh3_write64(out + 20, format->bucket_count);
  ckf_xxh3_write64(out + 28, dc_id);
  ckf_xxh3_write64(out + 36, epoch);
  ckf_put32_(out + 44, checksum);
}

size_t ckf_cbi1_delta_size(size_t image_count) {
  return image_count <= CKF_CBI1_MAX_IMAGES
             ? CKF_CBI1_DELTA_PREFIX_BYTES + image_count * CKF_CBI1_IMAGE_BYTES
             : 0;
}

/* Completes a frame whose count and images are there; returns its bytes. */
static ptrdiff_t ckf_cbi1_delta_seal_(const ckf_format *format, uint64_t dc_id, uint64_t base_epoch,
                                      uint64_t epoch, size_t image_count, uint8_t *out) {
  const size_t size = ckf_cbi1_delta_size(image_count);
  uint8_t *const body = out + CKF_CBI1_HEADER_BYTES;
  ckf_xxh3_write64(body, base_epoch);
  ckf_cbi1_header_(out, format, CKF_CBI1_DELTA, dc_id, epoch,
                   (uint32_t)ckf_xxh3_64(body, size - CKF_CBI1_HEADER_BYTES, 0));
  return (ptrdiff_t)size;
}

ptrdiff_t ckf_cbi1_delta_encode(const ckf_format *format, uint64_t dc_id, uint64_t base_epoch,
                                uint64_t epoch, const ckf_image *images, size_t image_count,
                                uint8_t *out, size_t cap) {
  const size_t size = ckf_cbi1_delta_size(image_count);
  uint8_t *const body = out + CKF_CBI1_HEADER_BYTES;
  uint8_t *at = body + 8;
  uint64_t rest = image_count; /* the next four bytes */
  uint32_t largest = 0;
  size_t i;
  if (ckf_format_check(format) != CKF_OK) {
    return CKF_ERR_FORMAT_BUCKET_COUNT;
  }
  if (size == 0) {
    return CKF_ERR_DELTA_IMAGE_COUNT;
  }
  if (size > cap) {
    return CKF_ERR_NOSPACE;
  }
  /* Pieces of eight bytes as the checksum reads them: in others, what was just written is slow to
   * read. Two images fill three of them, after the four bytes that the count or an image left. */
  for (i = 0; i + 1 < image_count; i += 2, at += 24) {
    const ckf_image first = images[i], second = images[i + 1];
    ckf_xxh3_write64(at, rest | (uint64_t)first.bucket << 32);
    ckf_xxh3_write64(at + 8, first.word);
    ckf_xxh3_write64(at + 16, second.bucket | second.word << 32);
    rest = second.word >> 32;
    largest = first.bucket > largest ? first.bucket : largest;
    largest = second.bucket > largest ? second.bucket : largest;
  }
  if (i < image_count) {
    ckf_xxh3_write64(at, rest | (uint64_t)images[i].bucket << 32);
    ckf_xxh3_write64(at + 8, images[i].word);
    largest = images[i].bucket > largest ? images[i].bucket : largest;
  } else {
    ckf_put32_(at, (uint32_t)rest);
  }
  if (largest >= format->bucket_count) {
    return CKF_ERR_BUCKET_INDEX;
  }
  return ckf_cbi1_delta_seal_(format, dc_id, base_epoch, epoch, image_count, out);
}

ptrdiff_t ckf_cbi1_batch_encode(const ckf_format *format, uint64_t dc_id, uint64_t base_epoch,
                                uint64_t epoch, const ckf_batch *batch, uint8_t *out, size_t cap) {
  const size_t size = ckf_cbi1_delta_size(batch->image_count);
  if (ckf_format_check(format) != CKF_OK) {
    return CKF_ERR_FORMAT_BUCKET_COUNT;
  }
  if (size == 0) {
    return CKF_ERR_DELTA_IMAGE_COUNT;
  }
  if (size > cap) {
    return CKF_ERR_NOSPACE;
  }
  ckf_put32_(out + CKF_CBI1_HEADER_BYTES + 8, (uint32_t)batch->image_count);
  CKF_MEMCPY(out + CKF_CBI1_DELTA_PREFIX_BYTES, batch->images, size - CKF_CBI1_DELTA_PREFIX_BYTES);
  return ckf_cbi1_delta_seal_(format, dc_id, base_epoch, epoch, batch->image_count, out);
}

/* Words of a chunk, 0 for impossible arguments. */
static uint32_t ckf_cbi1_chunk_words_(const ckf_format *format, uint32_t chunk_buckets,
                                      uint32_t chunk_index) {
  const uint32_t chunks = ckf_cbi1_chunk_count(format, chunk_buckets);
  uint64_t left;
  if (chunk_index >= chunks) {
    return 0;
  }
  left = format->bucket_count - (uint64_t)chunk_index * chunk_buckets;
  return left < chunk_buckets ? (uint32_t)left : chunk_buckets;
}

uint32_t ckf_cbi1_chunk_count(const ckf_format *format, uint32_t chunk_buckets) {
  if (ckf_format_check(format) != CKF_OK || chunk_buckets == 0 ||
      chunk_buckets > CKF_CBI1_MAX_CHUNK_BUCKETS) {
    return 0;
  }
  return (uint32_t)((format->bucket_count + chunk_buckets - 1) / chunk_buckets);
}

size_t ckf_cbi1_snapshot_size(const ckf_format *format, uint32_t chunk_buckets,
                              uint32_t chunk_index) {
  const size_t words = ckf_cbi1_chunk_words_(format, chunk_buckets, chunk_index);
  return words ? CKF_CBI1_SNAPSHOT_PREFIX_BYTES + words * 8 : 0;
}

/* Checks the arguments of a chunk and writes its chunk header; the words it covers go to *words. */
static int ckf_cbi1_chunk_begin_(const ckf_format *format, size_t word_count,
                                 uint32_t chunk_buckets, uint32_t chunk_index, uint8_t *out,
                                 size_t cap, uint32_t *words) {
  uint8_t *const body = out + CKF_CBI1_HEADER_BYTES;
  if (ckf_format_check(format) != CKF_OK) {
    return CKF_ERR_FORMAT_BUCKET_COUNT;
  }
  if (word_count != format->bucket_count) {
    return CKF_ERR_SNAPSHOT_BUCKET_COUNT;
  }
  *words = ckf_cbi1_chunk_words_(format, chunk_buckets, chunk_index);
  if (*words == 0) {
    return CKF_ERR_ARG;
  }
  if (cap < ckf_cbi1_snapshot_size(format, chunk_buckets, chunk_index)) {
    return CKF_ERR_NOSPACE;
  }
  ckf_put32_(body, chunk_index);
  ckf_put32_(body + 4, ckf_cbi1_chunk_count(format, chunk_buckets));
  ckf_xxh3_write64(body + 8, (uint64_t)chunk_index * chunk_buckets);
  return CKF_OK;
}

ptrdiff_t ckf_cbi1_snapshot_encode(const ckf_format *format, uint64_t dc_id, uint64_t epoch,
                                   const uint64_t *words, size_t word_count, uint32_t chunk_buckets,
                                   uint32_t chunk_index, uint8_t *out, size_t cap) {
  uint8_t *const body = out + CKF_CBI1_HEADER_BYTES;
  uint8_t *const to = out + CKF_CBI1_SNAPSHOT_PREFIX_BYTES;
  const uint64_t *from;
  uint32_t n = 0;
  const int rc =
      ckf_cbi1_chunk_begin_(format, word_count, chunk_buckets, chunk_index, out, cap, &n);
  if (rc != CKF_OK) {
    return rc;
  }
  from = words + (size_t)chunk_index * chunk_buckets;
#ifdef CKF_XXH3_LITTLE_ENDIAN
  CKF_MEMCPY(to, from, (size_t)n * 8);
#else
  {
    uint32_t i;
    for (i = 0; i < n; i++) {
      ckf_xxh3_write64(to + (size_t)i * 8, from[i]);
    }
  }
#endif
  ckf_cbi1_header_(out, format, CKF_CBI1_SNAPSHOT, dc_id, epoch,
                   (uint32_t)ckf_xxh3_64(body, 16 + (size_t)n * 8, 0));
  return (ptrdiff_t)(CKF_CBI1_SNAPSHOT_PREFIX_BYTES + (size_t)n * 8);
}

#ifdef CKF_XXH3_LITTLE_ENDIAN
/* XXH3 of 16 bytes followed by words that lie elsewhere. */
static uint64_t ckf_cbi1_split_hash_(const uint8_t head[16], const uint64_t *words, size_t n) {
  const uint8_t *const tail = (const uint8_t *)words;
  const size_t len = 16 + n * 8;
  uint8_t joined[CKF_XXH3_SHORT_MAX];
  ckf_xxh3_secret secret;
  uint64_t acc[8];
  size_t i;
  const size_t stripes = (len - 1) / CKF_XXH3_STRIPE_BYTES;
  CKF_MEMCPY(joined, head, 16);
  if (len <= CKF_XXH3_SHORT_MAX) {
    CKF_MEMCPY(joined + 16, tail, n * 8);
    return ckf_xxh3_64(joined, len, 0);
  }
  CKF_MEMCPY(joined + 16, tail, CKF_XXH3_STRIPE_BYTES - 16);
  ckf_xxh3_secret_init(&secret, 0);
  ckf_xxh3_acc_init(acc);
  for (i = 0; i < stripes; i++) {
    const size_t turn = i % CKF_XXH3_BLOCK_STRIPES;
    ckf_xxh3_stripe(acc, i == 0 ? joined : tail + CKF_XXH3_STRIPE_BYTES * i - 16,
                    secret.bytes + 8 * turn);
    if (turn == CKF_XXH3_BLOCK_STRIPES - 1) {
      ckf_xxh3_scramble(acc, &secret);
    }
  }
  return ckf_xxh3_acc_finish(acc, tail + n * 8 - CKF_XXH3_STRIPE_BYTES, len, &secret);
}
#endif

int ckf_cbi1_snapshot_prefix(const ckf_format *format, uint64_t dc_id, uint64_t epoch,
                             const uint64_t *words, size_t word_count, uint32_t chunk_buckets,
                             uint32_t chunk_index, uint8_t out[CKF_CBI1_SNAPSHOT_PREFIX_BYTES],
                             const uint64_t **body, size_t *body_words) {
#ifdef CKF_XXH3_LITTLE_ENDIAN
  uint32_t n = 0;
  const int rc =
      ckf_cbi1_chunk_begin_(format, word_count, chunk_buckets, chunk_index, out, SIZE_MAX, &n);
  if (rc != CKF_OK) {
    return rc;
  }
  *body = words + (size_t)chunk_index * chunk_buckets;
  *body_words = n;
  ckf_cbi1_header_(out, format, CKF_CBI1_SNAPSHOT, dc_id, epoch,
                   (uint32_t)ckf_cbi1_split_hash_(out + CKF_CBI1_HEADER_BYTES, *body, n));
  return CKF_OK;
#else
  (void)format, (void)dc_id, (void)epoch, (void)words, (void)word_count, (void)chunk_buckets;
  (void)chunk_index, (void)out, (void)body, (void)body_words;
  return CKF_ERR_ARG;
#endif
}

static int ckf_cbi1_refuse_(ckf_cbi1_frame *view, int err, uint64_t detail) {
  view->detail = detail;
  return err;
}

static int ckf_cbi1_delta_body_(ckf_cbi1_frame *view, const uint8_t *body, size_t len) {
  uint64_t count;
  uint32_t largest = 0, i;
  if (len < 12) {
    return CKF_ERR_MALFORMED;
  }
  count = ckf_xxh3_read32(body + 8);
  if (count > CKF_CBI1_MAX_IMAGES) {
    return ckf_cbi1_refuse_(view, CKF_ERR_DELTA_IMAGE_COUNT, count);
  }
  if (len - 12 != count * CKF_CBI1_IMAGE_BYTES) {
    return CKF_ERR_MALFORMED;
  }
  view->base_epoch = ckf_xxh3_read64(body);
  view->image_count = (uint32_t)count;
  view->data = body + 12;
  for (i = 0; i < count; i++) {
    const uint32_t bucket = (uint32_t)ckf_xxh3_read32(body + 12 + (size_t)i * CKF_CBI1_IMAGE_BYTES);
    largest = bucket > largest ? bucket : largest;
  }
  return count == 0 || largest < view->format.bucket_count ? CKF_OK : CKF_ERR_MALFORMED;
}

static int ckf_cbi1_snapshot_body_(ckf_cbi1_frame *view, const uint8_t *body, size_t len) {
  size_t words;
  if (len < 16) {
    return CKF_ERR_MALFORMED;
  }
  view->chunk_index = (uint32_t)ckf_xxh3_read32(body);
  view->chunk_count = (uint32_t)ckf_xxh3_read32(body + 4);
  view->bucket_offset = ckf_xxh3_read64(body + 8);
  if (view->chunk_index >= view->chunk_count || (len - 16) % 8 != 0) {
    return CKF_ERR_MALFORMED;
  }
  words = (len - 16) / 8;
  if (words > CKF_CBI1_MAX_CHUNK_BUCKETS) {
    return ckf_cbi1_refuse_(view, CKF_ERR_SNAPSHOT_WORD_COUNT, words);
  }
  if (view->bucket_offset > view->format.bucket_count ||
      words > view->format.bucket_count - view->bucket_offset) {
    return CKF_ERR_MALFORMED;
  }
  view->word_count = (uint32_t)words;
  view->data = body + 16;
  return CKF_OK;
}

int ckf_cbi1_decode(const ckf_format *expected, const uint8_t *bytes, size_t len,
                    ckf_cbi1_frame *view) {
  const uint8_t *body;
  uint64_t v;
  /* What the frame's kind does not have; field by field, since clearing all of them takes a fifth
   * of the time of a small delta. */
  view->base_epoch = view->bucket_offset = view->detail = 0;
  view->image_count = view->chunk_index = view->chunk_count = view->word_count = 0;
  if (len < CKF_CBI1_HEADER_BYTES) {
    return ckf_cbi1_refuse_(view, CKF_ERR_TRUNCATED, len);
  }
  body = bytes + CKF_CBI1_HEADER_BYTES;
  if (len > CKF_CBI1_MAX_FRAME_BYTES) {
    return ckf_cbi1_refuse_(view, CKF_ERR_FRAME_TOO_LARGE, len);
  }
  if (ckf_xxh3_read32(bytes) != CKF_CBI1_MAGIC_) {
    return CKF_ERR_MAGIC;
  }
  v = ckf_get16_(bytes + 4);
  if (v != CKF_CBI1_WIRE_VERSION) {
    return ckf_cbi1_refuse_(view, CKF_ERR_WIRE_VERSION, v);
  }
  if (ckf_xxh3_read32(bytes + 44) !=
      (ckf_xxh3_64(body, len - CKF_CBI1_HEADER_BYTES, 0) & UINT32_MAX)) {
    return CKF_ERR_CHECKSUM;
  }
  view->format.seed = ckf_xxh3_read64(bytes + 12);
  view->format.bucket_count = ckf_xxh3_read64(bytes + 20);
  if (view->format.bucket_count > SIZE_MAX) {
    return CKF_ERR_MALFORMED;
  }
  v = ckf_get16_(bytes + 10);
  if (v != CKF_FORMAT_VERSION) {
    return ckf_cbi1_refuse_(view, CKF_ERR_FORMAT_VERSION, v);
  }
  if (bytes[8] != CKF_FINGERPRINT_BITS) {
    return ckf_cbi1_refuse_(view, CKF_ERR_FORMAT_FINGERPRINT_BITS, bytes[8]);
  }
  if (bytes[9] != CKF_SLOTS_PER_BUCKET) {
    return ckf_cbi1_refuse_(view, CKF_ERR_FORMAT_SLOTS, bytes[9]);
  }
  if (view->format.seed != expected->seed || view->format.bucket_count != expected->bucket_count) {
    return CKF_ERR_FORMAT_MISMATCH;
  }
  view->dc_id = ckf_xxh3_read64(bytes + 28);
  view->epoch = ckf_xxh3_read64(bytes + 36);
  v = ckf_get16_(bytes + 6);
  view->kind = (int)v;
  if (v == CKF_CBI1_DELTA) {
    return ckf_cbi1_delta_body_(view, body, len - CKF_CBI1_HEADER_BYTES);
  }
  if (v == CKF_CBI1_SNAPSHOT) {
    return ckf_cbi1_snapshot_body_(view, body, len - CKF_CBI1_HEADER_BYTES);
  }
  return ckf_cbi1_refuse_(view, CKF_ERR_FLAGS, v);
}

ckf_image ckf_cbi1_image(const ckf_cbi1_frame *view, size_t i) {
  const uint8_t *const at = view->data + i * CKF_CBI1_IMAGE_BYTES;
  ckf_image image;
  image.bucket = (uint32_t)ckf_xxh3_read32(at);
  image.word = ckf_xxh3_read64(at + 4);
  return image;
}

uint64_t ckf_cbi1_word(const ckf_cbi1_frame *view, size_t i) {
  return ckf_xxh3_read64(view->data + i * 8);
}

/* ==== assembly (impl) ==== */

int ckf_assembly_init_abi(ckf_assembly *as, size_t as_size, const ckf_format *format,
                          uint64_t *words, size_t word_count) {
  if (as_size != sizeof *as) {
    return CKF_ERR_ABI;
  }
  if (ckf_format_check(format) != CKF_OK) {
    return CKF_ERR_FORMAT_BUCKET_COUNT;
  }
  if (!words || word_count != format->bucket_count) {
    return CKF_ERR_ARG;
  }
  CKF_MEMSET(as, 0, sizeof *as);
  as->words_ = words;
  as->bucket_count_ = format->bucket_count;
  return CKF_OK;
}

static void ckf_assembly_reset_(ckf_assembly *as) {
  as->epoch_ = 0;
  as->next_bucket_ = 0;
  as->chunk_count_ = 0;
  as->next_chunk_ = 0;
}

int ckf_assembly_absorb(ckf_assembly *as, const ckf_cbi1_frame *frame, uint64_t *epoch) {
  if (frame->kind != CKF_CBI1_SNAPSHOT) {
    return CKF_ERR_CHUNK_SEQUENCE;
  }
  if (frame->chunk_index == 0) {
    ckf_assembly_reset_(as);
    as->epoch_ = frame->epoch;
    as->chunk_count_ = frame->chunk_count;
  }
  if (frame->chunk_index >= frame->chunk_count || frame->chunk_index != as->next_chunk_ ||
      frame->chunk_count != as->chunk_count_ || frame->epoch != as->epoch_ ||
      frame->format.bucket_count != as->bucket_count_ || frame->bucket_offset != as->next_bucket_ ||
      frame->word_count > as->bucket_count_ - as->next_bucket_) {
    ckf_assembly_reset_(as);
    return CKF_ERR_CHUNK_SEQUENCE;
  }
#ifdef CKF_XXH3_LITTLE_ENDIAN
  CKF_MEMCPY(as->words_ + as->next_bucket_, frame->data, (size_t)frame->word_count * 8);
#else
  {
    uint32_t i;
    for (i = 0; i < frame->word_count; i++) {
      as->words_[as->next_bucket_ + i] = ckf_cbi1_word(frame, i);
    }
  }
#endif
  as->next_bucket_ += frame->word_count;
  as->next_chunk_++;
  if (as->next_chunk_ < as->chunk_count_) {
    return 0;
  }
  if (as->next_bucket_ != as->bucket_count_) {
    ckf_assembly_reset_(as);
    return CKF_ERR_INCOMPLETE_COVERAGE;
  }
  *epoch = as->epoch_;
  ckf_assembly_reset_(as);
  return 1;
}

/* ==== replica (impl) ==== */

/* Marks a bucket; false when it was marked already. */
static inline bool ckf_seen_add_(uint64_t *seen, uint32_t bucket) {
  const uint64_t bit = UINT64_C(1) << bucket % 64;
  const bool fresh = !(seen[bucket / 64] & bit);
  seen[bucket / 64] |= bit;
  return fresh;
}

size_t ckf_replica_mem_size(const ckf_format *format) {
  const uint64_t buckets = format->bucket_count;
  return ckf_format_check(format) == CKF_OK ? (size_t)(buckets * 8 + (buckets + 63) / 64 * 8 + 63)
                                            : 0;
}

int ckf_replica_init_abi(ckf_replica *r, size_t r_size, const ckf_format *format, void *mem,
                         size_t len) {
  const size_t need = ckf_replica_mem_size(format);
  uint64_t *words;
  if (r_size != sizeof *r) {
    return CKF_ERR_ABI;
  }
  if (need == 0) {
    return CKF_ERR_FORMAT_BUCKET_COUNT;
  }
  if (!mem || len < need) {
    return CKF_ERR_NOSPACE;
  }
  CKF_MEMSET(r, 0, sizeof *r);
  words = (uint64_t *)(void *)((uint8_t *)mem + (64 - (uintptr_t)mem % 64) % 64);
  r->format_ = *format;
  r->seen_ = words + format->bucket_count;
  CKF_MEMSET(r->seen_, 0, (size_t)((format->bucket_count + 63) / 64 * 8));
  return ckf_assembly_init(&r->assembly_, format, words, (size_t)format->bucket_count);
}

void ckf_replica_reset(ckf_replica *r) {
  ckf_assembly_reset_(&r->assembly_);
  r->live_ = false;
  r->sequence_ = 0;
}

static int ckf_replica_delta_(ckf_replica *r, const ckf_cbi1_frame *frame) {
  uint32_t i, checked;
  int rc = CKF_OK;
  if (!r->live_) {
    return CKF_ERR_NOT_LIVE;
  }
  if (frame->base_epoch != r->sequence_ || frame->base_epoch == UINT64_MAX ||
      frame->epoch != frame->base_epoch + 1) {
    return CKF_ERR_SEQUENCE;
  }
  if (frame->image_count == 0) {
    return CKF_ERR_EMPTY_DELTA;
  }
  for (checked = 0; checked < frame->image_count && rc == CKF_OK; checked++) {
    if (!ckf_seen_add_(r->seen_, ckf_cbi1_image(frame, checked).bucket)) {
      rc = CKF_ERR_DUPLICATE_IMAGE;
    }
  }
  for (i = 0; i < checked; i++) {
    const ckf_image image = ckf_cbi1_image(frame, i);
    r->seen_[image.bucket / 64] = 0;
    if (rc == CKF_OK) {
      CKF_STORE_RELAXED(&r->assembly_.words_[image.bucket], image.word);
    }
  }
  if (rc != CKF_OK) {
    return rc;
  }
  r->sequence_ = frame->epoch;
  return 1;
}

int ckf_replica_apply(ckf_replica *r, const ckf_cbi1_frame *frame) {
  int rc;
  if (frame->format.seed != r->format_.seed ||
      frame->format.bucket_count != r->format_.bucket_count) {
    return CKF_ERR_FORMAT_MISMATCH;
  }
  if (frame->kind == CKF_CBI1_DELTA) {
    return ckf_replica_delta_(r, frame);
  }
  if (r->live_) {
    return CKF_ERR_SNAPSHOT_LIVE;
  }
  rc = ckf_assembly_absorb(&r->assembly_, frame, &r->sequence_);
  r->live_ = rc == 1;
  return rc;
}

bool ckf_replica_live(const ckf_replica *r) { return r->live_; }

uint64_t ckf_replica_sequence(const ckf_replica *r) { return r->sequence_; }

const ckf_format *ckf_replica_format(const ckf_replica *r) { return &r->format_; }

const uint64_t *ckf_replica_words(const ckf_replica *r) {
  return r->live_ ? r->assembly_.words_ : NULL;
}

/* ==== table (impl) ==== */

static bool ckf_domain_equal_(const ckf_indexer_domain *x, const ckf_indexer_domain *y) {
  return CKF_MEMCMP(x->semantics_digest, y->semantics_digest, 16) == 0 &&
         CKF_MEMCMP(x->routing_digest, y->routing_digest, 16) == 0 &&
         x->semantics_source == y->semantics_source && x->routing_source == y->routing_source;
}

static bool ckf_pool_equal_(const ckf_pool *x, const ckf_pool *y) {
  return ckf_domain_equal_(&x->domain, &y->domain) && x->dc_id == y->dc_id;
}

static bool ckf_format_equal_(const ckf_format *x, const ckf_format *y) {
  return x->seed == y->seed && x->bucket_count == y->bucket_count;
}

static bool ckf_identity_equal_(const ckf_identity *x, const ckf_identity *y) {
  return ckf_pool_equal_(&x->pool, &y->pool) &&
         x->producer_incarnation == y->producer_incarnation &&
         x->layout_generation == y->layout_generation && ckf_format_equal_(&x->format, &y->format);
}

static int ckf_manifest_check_lane_(const ckf_manifest *m, uint32_t number) {
  const ckf_pool *const pool = &m->pools[number];
  uint32_t i;
  if (!ckf_domain_equal_(&pool->domain, &m->domain)) {
    return CKF_ERR_MIXED_DOMAIN;
  }
  for (i = 0; i < number; i++) {
    if ((m->configured >> i & 1) && ckf_pool_equal_(&m->pools[i], pool)) {
      return CKF_ERR_DUPLICATE_POOL;
    }
  }
  return CKF_OK;
}

int ckf_manifest_check(const ckf_manifest *manifest, uint32_t *lane) {
  uint32_t i;
  if (manifest->configured >> CKF_LANES) {
    return CKF_ERR_INVALID_LANE;
  }
  for (i = 0; i < CKF_LANES; i++) {
    const int rc = manifest->configured >> i & 1 ? ckf_manifest_check_lane_(manifest, i) : CKF_OK;
    if (rc != CKF_OK) {
      if (lane) {
        *lane = i;
      }
      return rc;
    }
  }
  return manifest->configured == 0 ? CKF_ERR_NO_LANES : ckf_format_check(&manifest->format);
}

/* log2 of the columns: the highest configured lane must have one. */
static uint32_t ckf_column_shift_(uint32_t configured) {
  uint32_t shift = 0;
  while (configured >> (1u << shift)) {
    shift++;
  }
  return shift;
}

#define CKF_ROW_ALIGN_ 128u /* a row of 16 columns: two cache lines, not three */

static size_t ckf_seen_words_(const ckf_format *format) {
  return (size_t)((format->bucket_count + 63) / 64);
}

size_t ckf_table_mem_size(const ckf_manifest *manifest) {
  uint64_t columns, bytes;
  if (ckf_manifest_check(manifest, NULL) != CKF_OK) {
    return 0;
  }
  columns = UINT64_C(1) << ckf_column_shift_(manifest->configured);
  bytes = columns * 8 * (manifest->format.bucket_count + ckf_seen_words_(&manifest->format)) +
          CKF_ROW_ALIGN_ - 1;
  return bytes <= PTRDIFF_MAX ? (size_t)bytes : 0;
}

int ckf_table_init_abi(ckf_table *table, size_t table_size, const ckf_manifest *manifest,
                       uint32_t verification_window, void *mem, size_t len) {
  const size_t need = ckf_table_mem_size(manifest);
  const int rc = ckf_manifest_check(manifest, NULL);
  size_t words;
  if (table_size != sizeof *table) {
    return CKF_ERR_ABI;
  }
  if (rc != CKF_OK) {
    return rc;
  }
  if (verification_window == 0 || verification_window > CKF_MAX_WINDOW) {
    return CKF_ERR_WINDOW;
  }
  if (need == 0) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  if (!mem || len < need) {
    return CKF_ERR_NOSPACE;
  }
  CKF_MEMSET(table, 0, sizeof *table);
  table->manifest_ = *manifest;
  table->column_shift_ = ckf_column_shift_(manifest->configured);
  table->words_ =
      (uint64_t *)(void *)((uint8_t *)mem +
                           (CKF_ROW_ALIGN_ - (uintptr_t)mem % CKF_ROW_ALIGN_) % CKF_ROW_ALIGN_);
  words = (size_t)manifest->format.bucket_count << table->column_shift_;
  table->seen_ = table->words_ + words;
  CKF_MEMSET(table->words_, 0,
             (words + (ckf_seen_words_(&manifest->format) << table->column_shift_)) * 8);
  return CKF_OK;
}

const ckf_manifest *ckf_table_manifest(const ckf_table *table) { return &table->manifest_; }

uint32_t ckf_table_ready(const ckf_table *table) { return CKF_LOAD_ACQUIRE(&table->ready_); }

static inline uint64_t *ckf_table_at_(const ckf_table *table, uint32_t lane, uint32_t bucket) {
  return &table->words_[((size_t)bucket << table->column_shift_) + lane];
}

uint64_t ckf_table_word(const ckf_table *table, uint32_t lane, uint32_t bucket) {
  return CKF_LOAD_RELAXED(ckf_table_at_(table, lane, bucket));
}

void ckf_table_withdraw(ckf_table *table, uint32_t lanes) {
  (void)CKF_FETCH_AND(&table->ready_, ~lanes);
}

/* ==== lane (impl) ==== */

int ckf_lane_claim_abi(ckf_lane *lane, size_t lane_size, ckf_table *table, uint32_t number) {
  if (lane_size != sizeof *lane) {
    return CKF_ERR_ABI;
  }
  if (number >= CKF_LANES) {
    return CKF_ERR_INVALID_LANE;
  }
  if (!(table->manifest_.configured >> number & 1)) {
    return CKF_ERR_UNCONFIGURED_LANE;
  }
  if (CKF_FETCH_OR(&table->claimed_, UINT32_C(1) << number) >> number & 1) {
    return CKF_ERR_LANE_CLAIMED;
  }
  CKF_MEMSET(lane, 0, sizeof *lane);
  lane->table_ = table;
  lane->seen_ = table->seen_ + ckf_seen_words_(&table->manifest_.format) * number;
  lane->number_ = number;
  return CKF_OK;
}

/* Readers stop coming before anything of the lane changes. */
static void ckf_lane_withdraw_(ckf_lane *lane) {
  lane->ready_ = false;
  ckf_table_withdraw(lane->table_, UINT32_C(1) << lane->number_);
}

void ckf_lane_release(ckf_lane *lane) {
  ckf_lane_withdraw_(lane);
  (void)CKF_FETCH_AND(&lane->table_->claimed_, ~(UINT32_C(1) << lane->number_));
  lane->table_ = NULL;
}

int ckf_lane_assignable(const ckf_lane *lane, const ckf_identity *identity,
                        const ckf_lease *lease) {
  const ckf_manifest *const m = &lane->table_->manifest_;
  if (lease->consumer_instance != m->consumer_instance) {
    return CKF_ERR_WRONG_CONSUMER;
  }
  if (lease->physical_lane != lane->number_) {
    return CKF_ERR_WRONG_LANE;
  }
  if (!ckf_pool_equal_(&identity->pool, &m->pools[lane->number_])) {
    return CKF_ERR_WRONG_OWNER;
  }
  if (!ckf_format_equal_(&identity->format, &m->format)) {
    return CKF_ERR_WRONG_FORMAT;
  }
  return lane->epoch_known_ && lease->assignment_epoch <= lane->last_epoch_ ? CKF_ERR_STALE_EPOCH
                                                                            : CKF_OK;
}

int ckf_lane_assign(ckf_lane *lane, const ckf_identity *identity, const ckf_lease *lease) {
  const int rc = ckf_lane_assignable(lane, identity, lease);
  if (rc != CKF_OK) {
    return rc;
  }
  ckf_lane_withdraw_(lane);
  lane->identity_ = *identity;
  lane->lease_ = *lease;
  lane->assigned_ = true;
  lane->last_epoch_ = lease->assignment_epoch;
  lane->epoch_known_ = true;
  lane->installed_ = 0;
  return CKF_OK;
}

void ckf_lane_retire(ckf_lane *lane) {
  ckf_lane_withdraw_(lane);
  lane->assigned_ = false;
  lane->installed_ = 0;
}

static ckf_lane_outcome ckf_lane_report_(enum ckf_lane_result result, uint64_t a, uint64_t b) {
  ckf_lane_outcome out;
  out.result = result;
  out.fault = CKF_FAULT_NONE;
  out.action = CKF_ACTION_NONE;
  out.a = a;
  out.b = b;
  return out;
}

/* Withdraws readiness; assignment and words stay. */
static ckf_lane_outcome ckf_lane_fail_(ckf_lane *lane, enum ckf_lane_fault fault, uint64_t a,
                                       uint64_t b) {
  ckf_lane_outcome out = ckf_lane_report_(CKF_LANE_DEACTIVATED, a, b);
  out.fault = fault;
  out.action = CKF_ACTION_DEACTIVATE_AND_SNAPSHOT;
  ckf_lane_withdraw_(lane);
  return out;
}

static bool ckf_lane_holds_(const ckf_lane *lane, const ckf_lease *lease) {
  return lane->assigned_ && lease->consumer_instance == lane->lease_.consumer_instance &&
         lease->physical_lane == lane->lease_.physical_lane &&
         lease->assignment_epoch == lane->lease_.assignment_epoch;
}

#define CKF_AHEAD_ 16u  /* rows whose cache lines are on their way while one is written */
#define CKF_STREAMS_ 4u /* parts of the table that are written in turn */
#define CKF_FEW_ 16u    /* images of a delta that need no marks to be told apart */

/* One column, a row apart from word to word. Without asking ahead, each store would wait for its
 * cache line; several parts at once keep more of them on their way. */
static void ckf_lane_fill_(const ckf_lane *lane, const uint64_t *words) {
  const size_t n = (size_t)lane->table_->manifest_.format.bucket_count;
  const size_t part = (n + CKF_STREAMS_ - 1) / CKF_STREAMS_;
  const uint32_t shift = lane->table_->column_shift_;
  uint64_t *const column = lane->table_->words_ + lane->number_;
  size_t i, at;
  for (i = 0; i < part; i++) {
    for (at = i; at < n; at += part) {
      if (i + CKF_AHEAD_ < part) {
        CKF_PREFETCH_WRITE_(&column[(at + CKF_AHEAD_) << shift]);
      }
      CKF_STORE_RELAXED(&column[at << shift], words[at]);
    }
  }
}

ckf_lane_outcome ckf_lane_stage(ckf_lane *lane, const ckf_identity *identity,
                                const ckf_lease *lease, uint64_t sequence, const uint64_t *words,
                                size_t word_count) {
  const uint64_t buckets = lane->table_->manifest_.format.bucket_count;
  const bool ready = lane->ready_;
  ckf_lane_outcome out;
  if (!ckf_lane_holds_(lane, lease)) {
    return ckf_lane_report_(CKF_LANE_IGNORED_FOREIGN_LEASE, 0, 0);
  }
  if (!ckf_identity_equal_(identity, &lane->identity_)) {
    out = ckf_lane_fail_(lane, CKF_FAULT_WRONG_IDENTITY, 0, 0);
    out.action = ready ? out.action : CKF_ACTION_RETRY_SNAPSHOT;
    return out;
  }
  if (ready && sequence <= lane->installed_) {
    return ckf_lane_report_(CKF_LANE_IGNORED_STALE, lane->installed_, 0);
  }
  if (word_count != buckets) {
    out = ckf_lane_fail_(lane, CKF_FAULT_SNAPSHOT_BUCKET_COUNT, buckets, word_count);
    out.action = ready ? out.action : CKF_ACTION_RETRY_SNAPSHOT;
    return out;
  }
  if (ready) {
    return ckf_lane_fail_(lane, CKF_FAULT_SNAPSHOT_WHILE_READY, lane->installed_, sequence);
  }
  ckf_lane_fill_(lane, words);
  lane->installed_ = sequence;
  return ckf_lane_report_(CKF_LANE_SNAPSHOT_INSTALLED, sequence, 0);
}

void ckf_lane_activate(ckf_lane *lane) {
  lane->ready_ = true;
  (void)CKF_FETCH_OR(&lane->table_->ready_, UINT32_C(1) << lane->number_);
}

ckf_lane_outcome ckf_lane_install(ckf_lane *lane, const ckf_identity *identity,
                                  const ckf_lease *lease, uint64_t sequence, const uint64_t *words,
                                  size_t word_count) {
  const ckf_lane_outcome out = ckf_lane_stage(lane, identity, lease, sequence, words, word_count);
  if (out.result == CKF_LANE_SNAPSHOT_INSTALLED) {
    ckf_lane_activate(lane);
  }
  return out;
}

/* The cache lines of the first images are asked for before these are looked at, so that they come
 * while the delta is checked; bucket counts are powers of two. */
static void ckf_lane_ask_images_(const ckf_lane *lane, const ckf_image *images, size_t n) {
  const uint32_t mask = (uint32_t)(lane->table_->manifest_.format.bucket_count - 1);
  size_t i;
  for (i = 0; i < n && i < CKF_AHEAD_; i++) {
    CKF_PREFETCH_WRITE_(ckf_table_at_(lane->table_, lane->number_, images[i].bucket & mask));
  }
}

/* The number of images before the first whose bucket is none of the table or was named before.
 * Few images are told apart without a store, so that one delta's words do not hold up the next
 * delta: each sets a bit in three words, chosen by three parts of its bucket, and only one that
 * finds all of them set is searched for. */
static size_t ckf_images_distinct_few_(const ckf_image *images, size_t n, uint64_t bucket_count) {
  uint64_t low = 0, middle = 0, high = 0;
  size_t i, k;
  for (i = 0; i < n; i++) {
    const uint32_t bucket = images[i].bucket;
    const uint32_t l = bucket % 64, m = bucket / 64 % 64, h = bucket / 4096 % 64;
    if (bucket >= bucket_count) {
      break;
    }
    if (low >> l & middle >> m & high >> h & 1) {
      for (k = 0; images[k].bucket != bucket; k++) {
      }
      if (k < i) {
        break;
      }
    }
    low |= UINT64_C(1) << l;
    middle |= UINT64_C(1) << m;
    high |= UINT64_C(1) << h;
  }
  return i;
}

/* The same with one bit per bucket, for any number. */
static size_t ckf_images_distinct_many_(const ckf_image *images, size_t n, uint64_t bucket_count,
                                        uint64_t *seen) {
  size_t i = 0, k;
  while (i < n && images[i].bucket < bucket_count && ckf_seen_add_(seen, images[i].bucket)) {
    i++;
  }
  for (k = 0; k < i; k++) {
    seen[images[k].bucket / 64] = 0;
  }
  return i;
}

static void ckf_lane_write_images_(const ckf_lane *lane, const ckf_image *images, size_t n) {
  const uint32_t shift = lane->table_->column_shift_;
  uint64_t *const column = lane->table_->words_ + lane->number_;
  size_t i;
  for (i = 0; i < n; i++) {
    if (i + CKF_AHEAD_ < n) {
      CKF_PREFETCH_WRITE_(&column[(size_t)images[i + CKF_AHEAD_].bucket << shift]);
    }
    CKF_STORE_RELAXED(&column[(size_t)images[i].bucket << shift], images[i].word);
  }
}

ckf_lane_outcome ckf_lane_apply_delta(ckf_lane *lane, const ckf_identity *identity,
                                      const ckf_lease *lease, uint64_t base, uint64_t sequence,
                                      const ckf_image *images, size_t n) {
  const uint64_t bucket_count = lane->table_->manifest_.format.bucket_count;
  size_t good;
  if (!ckf_lane_holds_(lane, lease)) {
    return ckf_lane_report_(CKF_LANE_IGNORED_FOREIGN_LEASE, 0, 0);
  }
  if (!ckf_identity_equal_(identity, &lane->identity_)) {
    return ckf_lane_fail_(lane, CKF_FAULT_WRONG_IDENTITY, 0, 0);
  }
  if (!lane->ready_) {
    return ckf_lane_report_(CKF_LANE_AWAITING_SNAPSHOT, 0, 0);
  }
  if (sequence <= lane->installed_) {
    return ckf_lane_report_(CKF_LANE_IGNORED_STALE, lane->installed_, 0);
  }
  if (base != lane->installed_) {
    return ckf_lane_fail_(lane, CKF_FAULT_BASE_MISMATCH, lane->installed_, base);
  }
  if (sequence != base + 1) { /* base is no UINT64_MAX, or nothing would be above it */
    return ckf_lane_fail_(lane, CKF_FAULT_NON_CONTIGUOUS, base, sequence);
  }
  if (n == 0) {
    return ckf_lane_fail_(lane, CKF_FAULT_EMPTY_DELTA, 0, 0);
  }
  ckf_lane_ask_images_(lane, images, n);
  good = n <= CKF_FEW_ ? ckf_images_distinct_few_(images, n, bucket_count)
                       : ckf_images_distinct_many_(images, n, bucket_count, lane->seen_);
  if (good < n) {
    return ckf_lane_fail_(lane,
                          images[good].bucket < bucket_count ? CKF_FAULT_DUPLICATE_IMAGE
                                                             : CKF_FAULT_IMAGE_INDEX,
                          images[good].bucket, 0);
  }
  ckf_lane_write_images_(lane, images, n);
  lane->installed_ = sequence;
  return ckf_lane_report_(CKF_LANE_DELTA_APPLIED, sequence, n);
}

ckf_lane_outcome ckf_lane_drain(ckf_lane *lane, const ckf_lease *lease,
                                uint64_t expected_sequence) {
  const bool ready = lane->ready_;
  if (!ckf_lane_holds_(lane, lease)) {
    return ckf_lane_report_(CKF_LANE_IGNORED_FOREIGN_LEASE, 0, 0);
  }
  if (ready && lane->installed_ == expected_sequence) {
    return ckf_lane_report_(CKF_LANE_DRAIN_ACKNOWLEDGED, lane->installed_, 0);
  }
  return ckf_lane_fail_(lane, CKF_FAULT_TERMINAL_MISMATCH, expected_sequence,
                        ready ? lane->installed_ : UINT64_MAX);
}

bool ckf_lane_ready(const ckf_lane *lane) { return lane->ready_; }

uint64_t ckf_lane_installed(const ckf_lane *lane) { return lane->installed_; }

const char *ckf_lane_result_name(enum ckf_lane_result result) {
  switch (result) {
  case CKF_LANE_IGNORED_FOREIGN_LEASE:
    return "IgnoredForeignLease";
  case CKF_LANE_IGNORED_STALE:
    return "IgnoredStaleOrDuplicate";
  case CKF_LANE_AWAITING_SNAPSHOT:
    return "AwaitingSnapshot";
  case CKF_LANE_SNAPSHOT_INSTALLED:
    return "SnapshotInstalled";
  case CKF_LANE_DELTA_APPLIED:
    return "DeltaApplied";
  case CKF_LANE_DRAIN_ACKNOWLEDGED:
    return "DrainAcknowledged";
  case CKF_LANE_DEACTIVATED:
    return "LaneDeactivated";
  }
  return "Unknown";
}

const char *ckf_lane_fault_name(enum ckf_lane_fault fault) {
  switch (fault) {
  case CKF_FAULT_NONE:
    return "";
  case CKF_FAULT_WRONG_IDENTITY:
    return "WrongIdentity";
  case CKF_FAULT_SNAPSHOT_BUCKET_COUNT:
    return "InvalidSnapshotBucketCount";
  case CKF_FAULT_SNAPSHOT_WHILE_READY:
    return "SnapshotWhileReady";
  case CKF_FAULT_BASE_MISMATCH:
    return "BaseSequenceMismatch";
  case CKF_FAULT_SEQUENCE_EXHAUSTED:
    return "SequenceExhausted";
  case CKF_FAULT_NON_CONTIGUOUS:
    return "NonContiguousSequence";
  case CKF_FAULT_EMPTY_DELTA:
    return "EmptyDelta";
  case CKF_FAULT_IMAGE_INDEX:
    return "InvalidImageIndex";
  case CKF_FAULT_DUPLICATE_IMAGE:
    return "DuplicateImageIndex";
  case CKF_FAULT_TERMINAL_MISMATCH:
    return "TerminalSequenceMismatch";
  }
  return "Unknown";
}

const char *ckf_lane_action_name(enum ckf_lane_action action) {
  switch (action) {
  case CKF_ACTION_NONE:
    return "";
  case CKF_ACTION_CONTINUE_CAPACITY_OMISSION:
    return "ContinueCapacityOmission";
  case CKF_ACTION_REPORT_RESOURCE_FAILURE:
    return "ReportResourceFailure";
  case CKF_ACTION_REJECT_SOURCE:
    return "RejectSource";
  case CKF_ACTION_FENCE_AND_REBUILD_PRODUCER:
    return "FenceAndRebuildProducer";
  case CKF_ACTION_DEACTIVATE_AND_SNAPSHOT:
    return "DeactivateAndSnapshot";
  case CKF_ACTION_RETRY_SNAPSHOT:
    return "RetrySnapshot";
  }
  return "Unknown";
}

/* ==== search (impl) ==== */
/*
 * All lanes together, in rounds; what a round wants is asked for before any of it is looked at.
 *
 * - position 0: most prompts end here, with one sequence hash made
 * - samples at 1, 2, 4 and so on, from CKF_SPREAD_ samples per prompt on at equal distances, and at
 *   the last two positions. A sample is a row: one answer for all lanes. They end when no lane is
 *   left that hit all samples so far; not more than one sample behind is hashed.
 * - a lane that missed a sample lies between that and the one before. Cells (one position, one
 *   lane) halve the ranges, or cut them in up to 16 parts while few lanes are left.
 *
 * Everything ends at a position that missed, so no answer is below a linear scan. An answer right
 * behind a hit rests on that hit, and one hit may be a collision: unless the position before it is
 * known to hit it is asked too, and if that misses, the range below is scanned from the last hit
 * that was trusted. Two collisions side by side are as rare as their product.
 */

#define CKF_SPREAD_ 16u /* samples of one prompt at equal distances; their distance is ... */
#define CKF_STRIDE_ 32u /* ... at least this */
#define CKF_ROUND_ 16u  /* rows or cells asked for at once */
#define CKF_IDLE_ 4u    /* lanes that do not keep the memory busy with one cell each */

/* Rows or cells that were asked for. */
typedef struct ckf_asked_ {
  uint32_t n;
  uint32_t at[CKF_ROUND_];  /* positions, for rows ascending */
  uint8_t lane[CKF_ROUND_]; /* cells only */
  uint16_t fp[CKF_ROUND_];
  const uint64_t *a[CKF_ROUND_], *b[CKF_ROUND_]; /* the words in both homes */
} ckf_asked_;

/* Where answers come from; as constants in an inlined call these become direct calls. */
typedef struct ckf_source_ {
  void (*ask_rows)(const void *user, ckf_asked_ *asked);
  void (*rows)(const void *user, const ckf_asked_ *asked, uint32_t *hits); /* bit L: lane L */
  void (*ask_cells)(const void *user, ckf_asked_ *asked);
  uint32_t (*cells)(const void *user, const ckf_asked_ *asked); /* bit i: cell i */
} ckf_source_;

/* One lane: `lower` hits, `upper` misses or is the end, `trusted` is the hit known below lower (or
 * lower itself at 0). */
typedef struct ckf_range_ {
  uint32_t lower, upper, trusted;
} ckf_range_;

/* Appends at most `n` samples behind the last one, fewer when the prompt ends; they started behind
 * `from`. */
static inline void ckf_samples_add_(ckf_asked_ *rows, uint32_t from, uint32_t last, uint32_t n,
                                    uint32_t len, uint32_t stride) {
  for (rows->n = 0; rows->n < n && last != len - 1; rows->n++) {
    const uint32_t gone = last - from, step = gone == 0 ? 1 : gone < stride ? gone : stride;
    const uint64_t next = (uint64_t)last + step;
    last = next < len - 2 ? (uint32_t)next : last < len - 2 ? len - 2 : len - 1;
    rows->at[rows->n] = last;
  }
}

static inline uint32_t ckf_count_bits_(uint32_t bits) {
  uint32_t n = 0;
  for (; bits; bits &= bits - 1) {
    n++;
  }
  return n;
}

/* First miss of a lane in [from, to), or `to`. */
static CKF_INLINE_ uint32_t ckf_search_scan_(const ckf_source_ *source, const void *user,
                                             uint32_t lane, uint32_t from, uint32_t to) {
  ckf_asked_ asked;
  CKF_MEMSET(asked.lane, (int)lane, sizeof asked.lane);
  for (; from < to; from += asked.n) {
    uint32_t misses;
    for (asked.n = 0; asked.n < CKF_ROUND_ && from + asked.n < to; asked.n++) {
      asked.at[asked.n] = from + asked.n;
    }
    source->ask_cells(user, &asked);
    misses = ~source->cells(user, &asked) & ((UINT32_C(1) << asked.n) - 1);
    if (misses) {
      return from + ckf_lowest_(misses);
    }
  }
  return to;
}

static inline bool ckf_range_open_(const ckf_range_ *r) {
  return (r->upper - r->lower > 1) | (r->lower - r->trusted > 1);
}

/* The place below a closed range misses, so its lower end was a collision: the answer is further
 * down. */
static CKF_INLINE_ void ckf_search_down_(const ckf_source_ *source, const void *user, uint32_t lane,
                                         ckf_range_ *r) {
  r->upper = ckf_search_scan_(source, user, lane, r->trusted + 1, r->lower - 1);
  r->lower = r->trusted = r->upper - 1;
}

/* Asks for one cell per lane of a mask: the middle of an open range, the place below a closed one.
 */
static CKF_INLINE_ void ckf_search_ask_halves_(const ckf_source_ *source, const void *user,
                                               uint32_t lanes, const ckf_range_ *ranges,
                                               ckf_asked_ *cells) {
  for (cells->n = 0; lanes; lanes &= lanes - 1, cells->n++) {
    const uint32_t lane = ckf_lowest_(lanes);
    const uint32_t lower = ranges[lane].lower, width = ranges[lane].upper - lower;
    cells->lane[cells->n] = (uint8_t)lane;
    cells->at[cells->n] = lower + width / 2 - (width == 1);
  }
  source->ask_cells(user, cells);
}

/* Looks at them. Returns the lanes that have no answer yet. */
static CKF_INLINE_ uint32_t ckf_search_halve_(const ckf_source_ *source, const void *user,
                                              const ckf_asked_ *cells, ckf_range_ *ranges) {
  const uint32_t hits = source->cells(user, cells);
  uint32_t i, lanes = 0;
  for (i = 0; i < cells->n; i++) {
    /* a coin's toss mostly, so what follows from it is computed, not branched to */
    ckf_range_ *const r = &ranges[cells->lane[i]];
    const uint32_t at = cells->at[i], hit = 0u - (hits >> i & 1);
    const uint32_t open = 0u - (uint32_t)(at > r->lower);
    if (CKF_UNLIKELY_(!(open | hit))) {
      ckf_search_down_(source, user, cells->lane[i], r);
      continue;
    }
    r->upper = (r->upper & (hit | ~open)) | (at & open & ~hit);
    r->trusted = hit ? open ? r->lower : at : r->trusted;
    r->lower = hit & open ? at : r->lower;
    lanes |= (uint32_t)ckf_range_open_(r) << cells->lane[i];
  }
  return lanes;
}

/* Samples behind `from`, which all lanes of a mask hit, as they do the position before it, until no
 * lane is left; what each lies between is in its range then. Each batch is asked for before the
 * last one is looked at, so what it takes to hash it hides the memory's answer, also to the cells
 * of the lanes that missed, whose ranges are halved by the way. Returns the lanes that have no
 * answer yet.
 */
static CKF_INLINE_ uint32_t ckf_search_sample_(const ckf_source_ *source, const void *user,
                                               uint32_t from, uint32_t len, bool eager,
                                               uint32_t lanes, ckf_range_ *ranges) {
  ckf_asked_ rows[2], cells;
  uint32_t hits[CKF_ROUND_], i, turn = 0;
  uint32_t stride = CKF_STRIDE_, asked, last = from, before = from - (from > 0), open = 0;
  const uint32_t n = eager ? 4 : 1; /* a key that has to be made costs as much as its stride */
  while ((len - from) / stride > CKF_SPREAD_) {
    stride *= 2;
  }
  cells.n = 0;
  ckf_samples_add_(&rows[0], from, from, eager ? 8 : 6, len, stride);
  source->ask_rows(user, &rows[0]);
  asked = rows[0].n ? rows[0].at[rows[0].n - 1] : from;
  for (;; turn ^= 1) {
    const ckf_asked_ *const row = &rows[turn];
    ckf_asked_ *const next = &rows[turn ^ 1];
    ckf_samples_add_(next, from, asked, n, len, stride);
    source->ask_rows(user, next);
    asked = next->n ? next->at[next->n - 1] : asked;
    open = ckf_search_halve_(source, user, &cells, ranges);
    source->rows(user, row, hits);
    for (i = 0; i <= row->n; i++) {
      const bool end = i == row->n; /* of this batch, or of the prompt */
      const uint32_t at = end ? len : row->at[i];
      uint32_t missed = !end ? lanes & ~hits[i] : last == len - 1 ? lanes : 0;
      for (lanes &= ~missed; missed; missed &= missed - 1) {
        const uint32_t lane = ckf_lowest_(missed);
        ranges[lane].lower = last;
        ranges[lane].upper = at;
        ranges[lane].trusted = before;
        open |= (uint32_t)ckf_range_open_(&ranges[lane]) << lane;
      }
      if (!end) {
        before = last;
        last = at;
      }
    }
    if (lanes == 0) {
      return open;
    }
    ckf_search_ask_halves_(source, user, open, ranges, &cells);
  }
}

/* Border `i` of a range cut in 1 << shift parts: lower for 0, upper for the last. */
static inline uint32_t ckf_range_cut_(const ckf_range_ *r, uint32_t i, uint32_t shift) {
  return r->lower + (uint32_t)((uint64_t)(r->upper - r->lower) * i >> shift);
}

/* The same for few lanes, where the memory would be idle: ranges are cut in at most 1 << most
 * parts. */
static CKF_INLINE_ uint32_t ckf_search_cut_(const ckf_source_ *source, const void *user,
                                            uint32_t lanes, uint32_t most, ckf_range_ *ranges) {
  ckf_asked_ cells;
  uint32_t shifts[CKF_IDLE_], todo, k, hits, n = 0;
  cells.n = 0;
  for (todo = lanes; todo; todo &= todo - 1, n++) {
    const uint32_t lane = ckf_lowest_(todo);
    const ckf_range_ *const r = &ranges[lane];
    uint32_t shift = most;
    while ((r->upper - r->lower) >> shift == 0) {
      shift--;
    }
    shifts[n] = shift;
    for (k = shift > 0; k < UINT32_C(1) << shift; k++) {
      cells.lane[cells.n] = (uint8_t)lane;
      cells.at[cells.n++] = shift > 0 ? ckf_range_cut_(r, k, shift) : r->lower - 1;
    }
  }
  source->ask_cells(user, &cells);
  hits = source->cells(user, &cells);
  for (n = 0, todo = lanes; todo; todo &= todo - 1, n++) {
    const uint32_t lane = ckf_lowest_(todo), shift = shifts[n];
    const uint32_t count = shift > 0 ? (UINT32_C(1) << shift) - 1 : 1;
    const uint32_t in = ckf_lowest_(~hits | UINT32_C(1) << count); /* hits up to the first miss */
    ckf_range_ *const r = &ranges[lane], old = *r;
    hits >>= count;
    if (shift > 0) {
      r->upper = ckf_range_cut_(&old, in + 1, shift);
      r->lower = ckf_range_cut_(&old, in, shift);
      r->trusted = in > 0 ? ckf_range_cut_(&old, in - 1, shift) : r->trusted;
    } else if (in > 0) {
      r->trusted = r->lower - 1;
    } else {
      ckf_search_down_(source, user, lane, r);
    }
    lanes &= ~((uint32_t)!ckf_range_open_(r) << lane);
  }
  return lanes;
}

/* Narrows the ranges of the lanes of `open`; then every lane of `lanes` has its answer. */
static CKF_INLINE_ void ckf_search_narrow_(const ckf_source_ *source, const void *user,
                                           ckf_range_ *ranges, uint32_t open, uint32_t lanes,
                                           uint32_t *depths) {
  while (open) {
    const uint32_t n = ckf_count_bits_(open);
    ckf_asked_ cells;
    if (n > CKF_IDLE_) {
      ckf_search_ask_halves_(source, user, open, ranges, &cells);
      open = ckf_search_halve_(source, user, &cells, ranges);
    } else {
      const uint32_t most = n == 1 ? 4 : n == 2 ? 3 : 2;
      open = ckf_search_cut_(source, user, open, most, ranges);
    }
  }
  for (; lanes; lanes &= lanes - 1) {
    depths[ckf_lowest_(lanes)] = ranges[ckf_lowest_(lanes)].upper;
  }
}

/* `eager`: no key has to be hashed, so more samples at once cost nothing but memory. */
static CKF_INLINE_ void ckf_search_run_(const ckf_source_ *source, const void *user, uint32_t len,
                                        bool eager, uint32_t lanes, uint32_t depths[CKF_LANES]) {
  ckf_range_ ranges[CKF_LANES];
  ckf_asked_ first;
  uint32_t todo, row;
  for (todo = lanes; todo; todo &= todo - 1) {
    depths[ckf_lowest_(todo)] = 0;
  }
  if (len == 0 || lanes == 0) {
    return;
  }
  first.n = 1;
  first.at[0] = 0;
  source->ask_rows(user, &first);
  source->rows(user, &first, &row);
  lanes &= row;
  if (lanes) {
    const uint32_t open = ckf_search_sample_(source, user, 0, len, eager, lanes, ranges);
    ckf_search_narrow_(source, user, ranges, open, lanes, depths);
  }
}

static CKF_INLINE_ void ckf_cells_add_(ckf_asked_ *cells, uint32_t lane, uint32_t at) {
  cells->lane[cells->n] = (uint8_t)lane;
  cells->at[cells->n++] = at;
}

/* The lanes among those asked, one cell each, that missed. */
static CKF_INLINE_ uint32_t ckf_cells_missed_(const ckf_source_ *source, const void *user,
                                              const ckf_asked_ *cells) {
  const uint32_t hits = cells->n ? source->cells(user, cells) : 0;
  uint32_t i, missed = 0;
  for (i = 0; i < cells->n; i++) {
    missed |= (~hits >> i & 1) << cells->lane[i];
  }
  return missed;
}

/* The same when depths[] holds a guess for each lane, 1 or more, and `len` is not 0. A guess is
 * right when the two positions below it hit and its own misses; where only the last fails the lane
 * has grown, else it is searched anew. The lanes that grew from the greatest depth, the end of the
 * last prompt as a rule, are sampled from there. */
static CKF_INLINE_ void ckf_search_again_(const ckf_source_ *source, const void *user, uint32_t len,
                                          bool eager, uint32_t lanes, uint32_t depths[CKF_LANES]) {
  ckf_range_ ranges[CKF_LANES];
  ckf_asked_ below[2], own;
  uint32_t todo, lost = 0, ended = 0, grown, open = 0, from = 0, ahead = 0;
  below[0].n = below[1].n = own.n = 0;
  for (todo = lanes; todo; todo &= todo - 1) {
    const uint32_t lane = ckf_lowest_(todo), depth = depths[lane] < len ? depths[lane] : len;
    ranges[lane].lower = depth;
    ranges[lane].upper = len;
    ranges[lane].trusted = depth - 1;
    depths[lane] = depth;
    ckf_cells_add_(&below[0], lane, depth - 1);
    if (depth > 1) {
      ckf_cells_add_(&below[1], lane, depth - 2);
    }
    if (depth < len) {
      ckf_cells_add_(&own, lane, depth);
    } else {
      ended |= UINT32_C(1) << lane;
    }
  }
  source->ask_cells(user, &below[0]);
  source->ask_cells(user, &below[1]);
  source->ask_cells(user, &own);
  lost |= ckf_cells_missed_(source, user, &below[0]) | ckf_cells_missed_(source, user, &below[1]);
  grown = lanes & ~(lost | ended | ckf_cells_missed_(source, user, &own));
  for (todo = grown; todo; todo &= todo - 1) {
    const uint32_t lane = ckf_lowest_(todo), depth = ranges[lane].lower;
    ahead = depth > from ? 0 : ahead;
    from = depth > from ? depth : from;
    ahead |= (uint32_t)(depth == from) << lane;
    open |= (uint32_t)ckf_range_open_(&ranges[lane]) << lane;
  }
  if (ahead & (ahead - 1)) {
    open &= ~ahead;
    open |= ckf_search_sample_(source, user, from, len, eager, ahead, ranges);
  }
  ckf_search_narrow_(source, user, ranges, open, grown, depths);
  if (lost) {
    ckf_search_run_(source, user, len, eager, lost, depths);
  }
}

/* ---- rows of a table ---- */
/*
 * Does a bucket of four neighbouring columns hold a fingerprint, in row a or in row b? Bit i for
 * column i. The vector forms compare 16 bits at a time and read words whole, as the relaxed loads
 * of the portable form do.
 */

#ifdef CKF_KERNEL_AVX2_
static inline uint32_t ckf_quad_(const uint64_t *a, const uint64_t *b, uint16_t fp) {
  const __m256i want = _mm256_set1_epi16((short)fp);
  const __m256i hit = _mm256_or_si256(
      _mm256_cmpeq_epi16(_mm256_load_si256((const __m256i *)(const void *)a), want),
      _mm256_cmpeq_epi16(_mm256_load_si256((const __m256i *)(const void *)b), want));
  const __m256i none = _mm256_cmpeq_epi64(hit, _mm256_setzero_si256());
  return ~(uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(none)) & 15u;
}
#endif
#if defined(CKF_KERNEL_AVX2_) || defined(CKF_KERNEL_SSE2_)
static inline uint32_t ckf_lane_hit_(const uint64_t *a, const uint64_t *b, uint16_t fp) {
  const __m128i words = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)(const void *)a),
                                           _mm_loadl_epi64((const __m128i *)(const void *)b));
  return _mm_movemask_epi8(_mm_cmpeq_epi16(words, _mm_set1_epi16((short)fp))) != 0;
}
#else
static inline uint32_t ckf_lane_hit_(const uint64_t *a, const uint64_t *b, uint16_t fp) {
  return (ckf_match_slots_(CKF_LOAD_RELAXED(a), fp) | ckf_match_slots_(CKF_LOAD_RELAXED(b), fp)) !=
         0;
}
#endif

#ifdef CKF_KERNEL_SSE2_
static inline __m128i ckf_pair_(const uint64_t *a, const uint64_t *b, __m128i want) {
  return _mm_or_si128(_mm_cmpeq_epi16(_mm_load_si128((const __m128i *)(const void *)a), want),
                      _mm_cmpeq_epi16(_mm_load_si128((const __m128i *)(const void *)b), want));
}

static inline uint32_t ckf_quad_(const uint64_t *a, const uint64_t *b, uint16_t fp) {
  const __m128i want = _mm_set1_epi16((short)fp);
  const __m128i slots = _mm_packs_epi16(ckf_pair_(a, b, want), ckf_pair_(a + 2, b + 2, want));
  const __m128i none = _mm_cmpeq_epi32(slots, _mm_setzero_si128());
  return ~(uint32_t)_mm_movemask_ps(_mm_castsi128_ps(none)) & 15u;
}
#elif defined(CKF_KERNEL_NEON_)
static inline uint8x8_t ckf_pair_(const uint64_t *a, const uint64_t *b, uint16x8_t want) {
  const uint16x8_t hit = vorrq_u16(vceqq_u16(vreinterpretq_u16_u64(vld1q_u64(a)), want),
                                   vceqq_u16(vreinterpretq_u16_u64(vld1q_u64(b)), want));
  return vmovn_u16(hit);
}

static inline uint32_t ckf_quad_(const uint64_t *a, const uint64_t *b, uint16_t fp) {
  static const uint32_t bits[4] = {1, 2, 4, 8};
  const uint16x8_t want = vdupq_n_u16(fp);
  const uint32x4_t slots =
      vreinterpretq_u32_u8(vcombine_u8(ckf_pair_(a, b, want), ckf_pair_(a + 2, b + 2, want)));
  return vaddvq_u32(vandq_u32(vtstq_u32(slots, slots), vld1q_u32(bits)));
}
#elif !defined(CKF_KERNEL_AVX2_)
static inline uint32_t ckf_quad_(const uint64_t *a, const uint64_t *b, uint16_t fp) {
  uint32_t i, hits = 0;
  for (i = 0; i < 4; i++) {
    hits |= ckf_lane_hit_(&a[i], &b[i], fp) << i;
  }
  return hits;
}
#endif

/* Hashes a query up to a block count. Each step waits for the one before: about 14 cycles that
 * nothing shortens, so not a block more than a sample needs. */
static void ckf_query_reach_(ckf_query *query, uint32_t count) {
  uint64_t key;
  uint32_t i = query->known_;
  if (query->make_) {
    query->make_(query->user_, query->locals_, i, count);
  }
  if (i == 0) {
    query->keys_[i++] = query->locals_[0];
  }
  key = query->keys_[i - 1];
  for (; i < count; i++) {
    query->keys_[i] = key = ckf_xxh3_64_len16(key, query->locals_[i], CKF_CHAIN_SEED);
  }
  query->known_ = count;
}

/* What a search over words looks at: `columns` = 1 << shift words per bucket. */
typedef struct ckf_view_ {
  const uint64_t *words;
  const uint64_t *keys;
  ckf_query *query; /* makes the keys, NULL when all are there */
  uint64_t seed;
  uint32_t mask, shift;
} ckf_view_;

static inline uint64_t ckf_view_mix_(const ckf_view_ *v, uint32_t at) {
  if (v->query && at >= v->query->known_) {
    ckf_query_reach_(v->query, at + 1);
  }
  return ckf_xxh3_64_len8(v->keys[at], v->seed);
}

static inline const uint64_t *ckf_view_row_(const ckf_view_ *v, uint32_t bucket) {
  return &v->words[(size_t)bucket << v->shift];
}

/* Asks for what a look at `columns` words from `lane` on will want. */
static CKF_INLINE_ void ckf_view_ask_(const ckf_view_ *v, ckf_asked_ *asked, uint32_t i,
                                      uint32_t lane, uint32_t columns) {
  const uint64_t mixed = ckf_view_mix_(v, asked->at[i]);
  const uint32_t a = (uint32_t)(mixed >> 16) & v->mask;
  const uint16_t fp = ckf_fingerprint_(mixed);
  const uint32_t b = a ^ ckf_delta_mask_(ckf_delta_bits_(v->seed, fp), v->mask);
  asked->fp[i] = fp;
  asked->a[i] = ckf_view_row_(v, a) + lane;
  asked->b[i] = ckf_view_row_(v, b) + lane;
  CKF_PREFETCH_(asked->a[i]);
  CKF_PREFETCH_(asked->b[i]);
  if (columns > 8) { /* a second cache line */
    CKF_PREFETCH_(asked->a[i] + 8);
    CKF_PREFETCH_(asked->b[i] + 8);
  }
}

static CKF_INLINE_ void ckf_view_ask_rows_(const void *user, ckf_asked_ *asked) {
  const ckf_view_ *const v = (const ckf_view_ *)user;
  uint32_t i;
  for (i = 0; i < asked->n; i++) {
    ckf_view_ask_(v, asked, i, 0, UINT32_C(1) << v->shift);
  }
}

static CKF_INLINE_ void ckf_view_rows_(const void *user, const ckf_asked_ *asked, uint32_t *hits) {
  const ckf_view_ *const v = (const ckf_view_ *)user;
  const uint32_t columns = UINT32_C(1) << v->shift;
  uint32_t i, lane;
  for (i = 0; i < asked->n; i++) {
    hits[i] = 0;
    if (v->shift >= 2) {
      for (lane = 0; lane < columns; lane += 4) {
        hits[i] |= ckf_quad_(asked->a[i] + lane, asked->b[i] + lane, asked->fp[i]) << lane;
      }
    } else {
      for (lane = 0; lane < columns; lane++) {
        hits[i] |= ckf_lane_hit_(asked->a[i] + lane, asked->b[i] + lane, asked->fp[i]) << lane;
      }
    }
  }
}

static CKF_INLINE_ void ckf_view_ask_cells_(const void *user, ckf_asked_ *asked) {
  const ckf_view_ *const v = (const ckf_view_ *)user;
  uint32_t i;
  for (i = 0; i < asked->n; i++) {
    if (i > 0 && asked->at[i] == asked->at[i - 1]) { /* as lanes of equal depth do */
      asked->fp[i] = asked->fp[i - 1];
      asked->a[i] = asked->a[i - 1] - asked->lane[i - 1] + asked->lane[i];
      asked->b[i] = asked->b[i - 1] - asked->lane[i - 1] + asked->lane[i];
      CKF_PREFETCH_(asked->a[i]);
      CKF_PREFETCH_(asked->b[i]);
    } else {
      ckf_view_ask_(v, asked, i, asked->lane[i], 1);
    }
  }
}

static CKF_INLINE_ uint32_t ckf_view_cells_(const void *user, const ckf_asked_ *asked) {
  uint32_t i, hits = 0;
  (void)user;
  for (i = 0; i < asked->n; i++) {
    hits |= ckf_lane_hit_(asked->a[i], asked->b[i], asked->fp[i]) << i;
  }
  return hits;
}

static CKF_INLINE_ void ckf_view_run_(const ckf_view_ *view, uint32_t len, bool eager, bool again,
                                      uint32_t lanes, uint32_t depths[CKF_LANES]) {
  const ckf_source_ source = {ckf_view_ask_rows_, ckf_view_rows_, ckf_view_ask_cells_,
                              ckf_view_cells_};
  if (again) {
    ckf_search_again_(&source, view, len, eager, lanes, depths);
  } else {
    ckf_search_run_(&source, view, len, eager, lanes, depths);
  }
}

static void ckf_view_search_(const ckf_view_ *view, uint32_t len, bool eager, uint32_t lanes,
                             uint32_t depths[CKF_LANES]) {
#ifndef __OPTIMIZE_SIZE__
  if (view->shift == 4) { /* a constant from here on: rows of 16 without a loop */
    ckf_view_ wide = *view;
    wide.shift = 4;
    ckf_view_run_(&wide, len, eager, false, lanes, depths);
    return;
  }
#endif
  ckf_view_run_(view, len, eager, false, lanes, depths);
}

/* ---- entry points ---- */

static uint32_t ckf_search_len_(size_t len) {
  return (uint32_t)(len < UINT32_MAX ? len : UINT32_MAX);
}

void ckf_query_init(ckf_query *query, const uint64_t *locals, size_t len, uint64_t *keys,
                    size_t known) {
  ckf_query_init_lazy(query, (uint64_t *)(uintptr_t)locals, len, keys, known, NULL, NULL);
}

void ckf_query_init_lazy(ckf_query *query, uint64_t *locals, size_t len, uint64_t *keys,
                         size_t known, ckf_locals_fn make, void *user) {
  query->locals_ = locals;
  query->keys_ = keys;
  query->make_ = make;
  query->user_ = user;
  query->len_ = ckf_search_len_(len);
  query->known_ = ckf_search_len_(known < len ? known : len);
}

size_t ckf_query_known(const ckf_query *query) { return query->known_; }

/* False: the hashes it needs can neither be found nor made. */
static bool ckf_query_whole_(const ckf_query *query) {
  return query->len_ == 0 || (query->keys_ && (query->locals_ || query->known_ == query->len_));
}

int ckf_table_find(const ckf_table *table, ckf_query *query, ckf_matches *out) {
  const uint32_t ready = ckf_table_ready(table) & table->manifest_.configured;
  if (!ckf_query_whole_(query)) {
    return CKF_ERR_ARG;
  }
  ckf_table_find_captured(table, ready, query, out);
  return ready ? CKF_OK : CKF_ERR_UNAVAILABLE;
}

static ckf_view_ ckf_table_view_(const ckf_table *table, ckf_query *query) {
  ckf_view_ view;
  view.words = table->words_;
  view.keys = query->keys_;
  view.query = query;
  view.seed = table->manifest_.format.seed;
  view.mask = (uint32_t)(table->manifest_.format.bucket_count - 1);
  view.shift = table->column_shift_;
  return view;
}

void ckf_table_find_captured(const ckf_table *table, uint32_t lanes, ckf_query *query,
                             ckf_matches *out) {
  const ckf_view_ view = ckf_table_view_(table, query);
  CKF_MEMSET(out, 0, sizeof *out);
  out->lanes = ckf_query_whole_(query) ? lanes & table->manifest_.configured : 0;
  ckf_view_search_(&view, query->len_, query->known_ == query->len_, out->lanes, out->depths);
}

int ckf_table_find_again(const ckf_table *table, ckf_query *query, ckf_matches *matches) {
  const uint32_t ready = ckf_table_ready(table) & table->manifest_.configured;
  const ckf_view_ view = ckf_table_view_(table, query);
  const bool eager = query->known_ == query->len_;
  uint32_t lane, guessed = 0;
  if (!ckf_query_whole_(query)) {
    return CKF_ERR_ARG;
  }
  for (lane = 0; lane < CKF_LANES; lane++) {
    const bool guess = query->len_ > 0 && matches->depths[lane] > 0;
    guessed |= (uint32_t)guess << lane;
    matches->depths[lane] = guess && ready >> lane & 1 ? matches->depths[lane] : 0;
  }
  guessed &= matches->lanes & ready;
  matches->lanes = ready;
  if (guessed) {
    ckf_view_run_(&view, query->len_, eager, true, guessed, matches->depths);
  }
  if (ready & ~guessed) { /* one row asks all of these */
    ckf_view_search_(&view, query->len_, eager, ready & ~guessed, matches->depths);
  }
  return ready ? CKF_OK : CKF_ERR_UNAVAILABLE;
}

uint32_t ckf_search(const ckf_format *format, const uint64_t *words,
                    const uint64_t *sequence_hashes, size_t len) {
  uint32_t depths[CKF_LANES];
  ckf_view_ view;
  view.words = words;
  view.keys = sequence_hashes;
  view.query = NULL;
  view.seed = format->seed;
  view.mask = (uint32_t)(format->bucket_count - 1);
  view.shift = 0;
  ckf_view_search_(&view, ckf_search_len_(len), true, 1, depths);
  return depths[0];
}

typedef struct ckf_callback_ {
  ckf_row_fn row;
  void *user;
} ckf_callback_;

static void ckf_callback_ask_(const void *user, ckf_asked_ *asked) {
  (void)user;
  (void)asked;
}

static void ckf_callback_rows_(const void *user, const ckf_asked_ *asked, uint32_t *hits) {
  const ckf_callback_ *const c = (const ckf_callback_ *)user;
  uint32_t i;
  for (i = 0; i < asked->n; i++) {
    hits[i] = c->row(c->user, asked->at[i]);
  }
}

static uint32_t ckf_callback_cells_(const void *user, const ckf_asked_ *asked) {
  const ckf_callback_ *const c = (const ckf_callback_ *)user;
  uint32_t i, row = 0, hits = 0;
  for (i = 0; i < asked->n; i++) {
    row = i > 0 && asked->at[i] == asked->at[i - 1] ? row : c->row(c->user, asked->at[i]);
    hits |= (row >> asked->lane[i] & 1) << i;
  }
  return hits;
}

void ckf_search_rows(ckf_row_fn row, void *user, size_t len, uint32_t lanes,
                     uint32_t depths[CKF_LANES]) {
  const ckf_source_ source = {ckf_callback_ask_, ckf_callback_rows_, ckf_callback_ask_,
                              ckf_callback_cells_};
  ckf_callback_ callback;
  callback.row = row;
  callback.user = user;
  ckf_search_run_(&source, &callback, ckf_search_len_(len), true,
                  lanes & ((UINT32_C(1) << CKF_LANES) - 1), depths);
}

#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif /* CKF_IMPLEMENTATION_ */
#endif /* CKF_IMPLEMENTATION or CKF_STATIC */
