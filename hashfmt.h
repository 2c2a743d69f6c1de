/* SPDX-License-Identifier: Apache-2.0 */
/* ==== hashfmt.h: from tokens to filter keys ==== */
/*
 * The two query hash formats of dynamo.kvrelay.v1: tokens -> local block hashes -> sequence hashes,
 * which are the keys of the filter; with LoRA, cache namespaces and multimodal content. Also the
 * digest of pool identities, BLAKE3. Pure functions: no allocation, no I/O, no global state.
 *
 *   #include <stdio.h>
 *   #define HASHFMT_IMPLEMENTATION
 *   #include "hashfmt.h"
 *
 *   int main(void) {
 *     const uint32_t tokens[40] = {3923, 374, 264};
 *     const uint64_t seed = hashfmt_seed(NULL, 0, NULL, 0);
 *     uint64_t keys[64];
 *     size_t count;
 *     if (hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 16, seed, tokens, 40, NULL, keys, 64, &count) !=
 *         HASHFMT_OK)
 *       return 1;
 *     for (size_t i = 0; i < count; i++)
 *       printf("%016llx\n", (unsigned long long)keys[i]);
 *     return 0;
 *   }
 *
 * A plain include declares; HASHFMT_IMPLEMENTATION, in one unit, defines; HASHFMT_STATIC makes a
 * private copy of everything for this unit.
 */

/* ==== contents ==== */
/*
 * conventions and trust
 * version
 * configuration
 * compiler shims
 * types
 * errors
 * hash function
 * windows
 * request seed
 * local block hash
 * multimodal content
 * sequence hash
 * whole request
 * engine data
 * blake3
 * engine hashes (with HASHFMT_ENGINE_HASHES)
 */

/* ==== conventions and trust ==== */
/*
 * - Names as in the field: B = block size, W = window, local = local block hash (depends on the
 *   window alone), sequence = sequence hash (depends on all blocks before), canonical = the filter
 *   key, equal to sequence. External ids, made by engines, never go through these functions.
 * - All hashes are plain 64-bit numbers and equal on every host; what enters a hash does so in
 *   little-endian order.
 * - Every value of a token, hash, string or count may come from a peer: none reaches an assertion,
 *   and work is linear in the input, but for telling up to HASHFMT_MM_MAX multimodal hashes apart.
 *   Pointers and lengths are the caller's: a pointer may be NULL only with length 0 or where said.
 * - No hash here is keyed. Two tenants are kept apart for convenience, not for security.
 * - No knob changes the size of a struct or a result.
 */
#ifndef HASHFMT_H_INCLUDED
#define HASHFMT_H_INCLUDED

/* ==== version ==== */
#define HASHFMT_VERSION_MAJOR 0
#define HASHFMT_VERSION_MINOR 1
#define HASHFMT_VERSION_PATCH 0

/* ==== configuration ==== */

/* Name of a header with the settings below, in quotes. */
#ifdef HASHFMT_CONFIG_H
#include HASHFMT_CONFIG_H
#endif

/*
 * HASHFMT_XXH3_64(data, len, seed): replaces the built-in XXH3 wherever the input is in one piece,
 * for instance by XXH3_64bits_withSeed of the xxHash library. Must give equal results. Default: not
 * defined.
 *
 * HASHFMT_ENGINE_HASHES: the part of that name, for doubles of engines. Default: not defined.
 *
 * HASHFMT_PORTABLE: no vector instructions. Same results. Default: not defined.
 *
 * HASHFMT_BYTEWISE: assume no byte order, read all input byte by byte. Slower, same results.
 * Default: not defined; little-endian hosts are recognised.
 *
 * HASHFMT_MEMCPY, HASHFMT_MEMSET: replace those of string.h, which is then not included. Define
 * both or neither.
 */

/* Most multimodal objects in one block of the native form; 1 .. 65536. Sorting them, or
   telling them apart, costs up to this number squared; no memory. */
#ifndef HASHFMT_MM_MAX
#define HASHFMT_MM_MAX 1024
#endif
#if HASHFMT_MM_MAX < 1 || HASHFMT_MM_MAX > 65536
#error "HASHFMT_MM_MAX must be 1 .. 65536"
#endif

/* ==== compiler shims ==== */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(HASHFMT_STATIC) && defined(HASHFMT_IMPLEMENTATION)
#error "define HASHFMT_STATIC or HASHFMT_IMPLEMENTATION, not both"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define HASHFMT_UNUSED_ __attribute__((unused))
#define HASHFMT_MUST_USE __attribute__((warn_unused_result))
#else
#define HASHFMT_UNUSED_
#define HASHFMT_MUST_USE
#endif

/* Worth a copy wherever it is called, but for builds for size. */
#if defined(__GNUC__) && !defined(__OPTIMIZE_SIZE__)
#define HASHFMT_INLINE_ static inline __attribute__((always_inline))
#else
#define HASHFMT_INLINE_ static inline
#endif

#ifdef HASHFMT_STATIC
#define HASHFMT_STATIC_INCLUDED_
#define HASHFMT_API static HASHFMT_UNUSED_
#define HASHFMT_IMPL_API_ static HASHFMT_UNUSED_
#else
#define HASHFMT_API extern
#define HASHFMT_IMPL_API_
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== types ==== */

/* The hash format of a pool, as on the wire. Any other value: never hash, quarantine the pool. */
enum {
  HASHFMT_FORMAT_UNSPECIFIED = 0, /* invalid */
  HASHFMT_FORMAT_STANDARD = 1,    /* W = B */
  HASHFMT_FORMAT_EAGLE = 2        /* W = B + 1: the last token of a window starts the next one */
};

/* Seed of the chain, and of a request without LoRA and namespace. */
#define HASHFMT_CHAIN_SEED 1337

/* Sequence hashes one by one. Private members, size may change. */
typedef struct hashfmt_chain {
  uint64_t value_;
  bool started_;
} hashfmt_chain;

/* One multimodal object on the tokens [start, end) of a request. */
typedef struct hashfmt_mm_range {
  uint64_t mm_hash;
  uint64_t start;
  uint64_t end;
} hashfmt_mm_range;

/* The placeholder tokens of a pool, as far as it names them. */
typedef struct hashfmt_mm_tokens {
  uint32_t image_token_id;
  uint32_t video_token_id;
  bool has_image; /* image_token_id is set */
  bool has_video; /* video_token_id is set */
} hashfmt_mm_tokens;

/* BLAKE3 of input that comes in pieces. Private members, size may change. */
typedef struct hashfmt_blake3_state {
  uint64_t chunk_count_;     /* chunks that are complete */
  uint32_t chunk_cv_[8];     /* chaining value of the open chunk */
  uint32_t stack_[54][8];    /* roots of complete subtrees, the largest first */
  uint8_t block_[64];        /* input not yet compressed */
  uint32_t block_len_;       /* bytes in block_ */
  uint32_t chunk_block_len_; /* blocks of the open chunk that are compressed, 0 .. 15 */
  uint32_t stack_len_;
} hashfmt_blake3_state;

/* ==== errors ==== */
enum {
  HASHFMT_OK = 0,
  HASHFMT_ERR_ARG = -301,         /* the caller's mistake: NULL, or a block size of 0 */
  HASHFMT_ERR_NOSPACE = -302,     /* the output array is too short; what is in it is valid */
  HASHFMT_ERR_UNSUPPORTED = -303, /* no known hash format */
  HASHFMT_ERR_LIMIT = -304        /* more in a block than is taken, HASHFMT_MM_MAX objects */
};

/** Short English text for a code of this header; never NULL, static storage. */
HASHFMT_API const char *hashfmt_strerror(int err);

/* ==== hash function ==== */

/** XXH3, 64-bit result, of \p len bytes with a numeric seed; any length, NULL allowed for 0. */
HASHFMT_API uint64_t hashfmt_hash64(const void *data, size_t len, uint64_t seed);

/* ==== windows ==== */

/** Tokens that the hash of one block reads: B or B + 1, at most 2^32. 0 = no known format, or B =
   0: the pool cannot be asked. */
HASHFMT_API uint64_t hashfmt_window_len(int32_t format, uint32_t block_size);

/** Complete blocks of \p token_count tokens. Block k reads the window that begins at token k B;
   what follows the last complete window is ignored. 0 also for an unknown format or B = 0; tell
   these apart with hashfmt_window_len. */
HASHFMT_API uint64_t hashfmt_block_count(int32_t format, uint32_t block_size, uint64_t token_count);

/* ==== request seed ==== */

/** Seed of the local hashes of one request. \p lora is the adapter's name, never an alias or
   number; \p ns the cache namespace. Bytes as they are, NUL allowed; length 0 = none, then NULL is
   fine. */
HASHFMT_API uint64_t hashfmt_seed(const uint8_t *lora, size_t lora_len, const uint8_t *ns,
                                  size_t ns_len);

/* ==== local block hash ==== */

/** Local hash of one window of plain tokens; \p token_count is W. Any token value is legal. Little
    endian hosts hash the array in place. */
HASHFMT_API uint64_t hashfmt_local(const uint32_t *tokens, size_t token_count, uint64_t seed);

/* ==== multimodal content ==== */

/** Local hash in the native form: the window, then the hashes of all objects of the block, each as
    often as given. Order does not matter; none = hashfmt_local.
    \returns HASHFMT_OK; HASHFMT_ERR_LIMIT: more than HASHFMT_MM_MAX objects, leave the block out;
    HASHFMT_ERR_ARG. \p out is written only on success. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_local_mm(const uint32_t *tokens, size_t token_count,
                                                  const uint64_t *mm_hashes, size_t mm_len,
                                                  uint64_t seed, uint64_t *out);

/** Local hash of a block as its pool wants it. \p mm_hashes are the block's objects in the order of
    the event, \p ids the pool's placeholder tokens, NULL = none known. Placeholders become pad
    values where runs and objects can be matched; otherwise, and always without ids, this is
    hashfmt_local_mm.
    \returns as hashfmt_local_mm. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_block_mm(const uint32_t *tokens, size_t token_count,
                                                  const uint64_t *mm_hashes, size_t mm_len,
                                                  const hashfmt_mm_tokens *ids, uint64_t seed,
                                                  uint64_t *out);

/** Token that stands for an object in the pad-value form, 1000000 .. 1074741823. */
HASHFMT_API uint32_t hashfmt_pad_value(uint64_t mm_hash);

/** Object hash of an identifier string: 64 hex digits give their first 16 as a number, other text
    its XXH3.
    \returns 1: \p mm_hash is set; 0: the identifier is empty, no object, \p mm_hash unchanged. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_mm_identifier(const uint8_t *id, size_t len,
                                                       uint64_t *mm_hash);

/** Part of a range that falls on block \p block of a request of \p total tokens; blocks end after B
    tokens in both formats.
    \returns true: the part is [start, end) in tokens of the request; false: nothing falls there,
    outputs unchanged. */
HASHFMT_API HASHFMT_MUST_USE bool hashfmt_mm_piece(const hashfmt_mm_range *range, uint64_t total,
                                                   uint32_t block_size, uint64_t block,
                                                   uint64_t *start, uint64_t *end);

/** Objects of one block, from the ranges of its request: each hash once, in the order of the
   ranges. Blocks without any, and those behind the end, have length 0. \returns HASHFMT_OK: \p len
   hashes are written; HASHFMT_ERR_NOSPACE: the first \p cap are, call again with more room, the
   smaller of range_len and HASHFMT_MM_MAX is always enough; HASHFMT_ERR_LIMIT: more than
   HASHFMT_MM_MAX hashes, leave the block out; HASHFMT_ERR_ARG: B = 0, or ranges in a request
   without tokens. Where not OK or NOSPACE, \p len is unchanged and \p mm_hashes means nothing. At
   most HASHFMT_MM_MAX steps for each range that falls on the block, one for each other. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_mm_entry(const hashfmt_mm_range *ranges, size_t range_len,
                                                  uint64_t total, uint32_t block_size,
                                                  uint64_t block, uint64_t *mm_hashes, size_t cap,
                                                  size_t *len);

/* ==== sequence hash ==== */

/** Canonical hash of a block without parent: its local hash. */
HASHFMT_API uint64_t hashfmt_root(uint64_t local);

/** Canonical hash of a block under the block with this canonical hash. */
HASHFMT_API uint64_t hashfmt_child(uint64_t parent_canonical, uint64_t local);

/** Begins at a root. */
HASHFMT_API void hashfmt_chain_init(hashfmt_chain *chain);

/** Begins below a block that is known already. */
HASHFMT_API void hashfmt_chain_resume(hashfmt_chain *chain, uint64_t parent_canonical);

/** Takes the next block and gives its sequence hash. */
HASHFMT_API uint64_t hashfmt_chain_next(hashfmt_chain *chain, uint64_t local);

/* ==== whole request ==== */

/** Local and sequence hashes of all complete blocks of a text or pad-valued request. \p local and
    \p sequence have room for \p cap hashes each; either may be NULL and is then left out, both NULL
    only counts. \p block_count gets the number of complete blocks, also when \p cap is smaller, and
   0 on the other errors. A prompt shorter than one window has 0 blocks, which is no error. \returns
   HASHFMT_OK; HASHFMT_ERR_NOSPACE: the first \p cap hashes are written, call again with room for \p
   block_count or use these; HASHFMT_ERR_UNSUPPORTED: the pool cannot be asked; HASHFMT_ERR_ARG: B =
   0 or NULL. To go on behind the first k blocks of a prompt that has grown, give tokens + k * B and
   local + k, in both formats; \p block_count is then that of the rest. The chain would start anew:
   sequence is NULL then, and hashfmt_chain_resume goes on with the sequence hashes. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_blocks(int32_t format, uint32_t block_size, uint64_t seed,
                                                const uint32_t *tokens, size_t token_count,
                                                uint64_t *local, uint64_t *sequence, size_t cap,
                                                size_t *block_count);

/* ==== engine data ==== */

/** Flat tokens a0, a1, .. aN-1, bN-1 of N token pairs (a0, b0), ..; N + 1 tokens, none for no
   pairs. \p pairs holds 2 N numbers; \p tokens may be the same array. \p gap_count, if not NULL,
   gets the number of neighbours that do not overlap (b of one is not a of the next): usable, worth
   counting. \returns HASHFMT_OK; HASHFMT_ERR_NOSPACE: nothing is written but \p token_count, the
   room needed; HASHFMT_ERR_ARG. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_pairs_flatten(const uint32_t *pairs, size_t pair_count,
                                                       uint32_t *tokens, size_t cap,
                                                       size_t *token_count, size_t *gap_count);

/** External id from 8 bytes of an engine's digest, big endian: the first 8 of SGLang's, the last 8
   of vLLM's. An id that comes signed on the wire is the same number in two's complement. */
HASHFMT_API uint64_t hashfmt_external_read(const uint8_t bytes[8]);

/* ==== blake3 ==== */

/** BLAKE3 in plain hash mode, 32 bytes of output, of input of any length. */
HASHFMT_API void hashfmt_blake3(const uint8_t *data, size_t len, uint8_t out[32]);

/** Begins a hash of input in pieces. */
HASHFMT_API void hashfmt_blake3_init(hashfmt_blake3_state *state);

/** Takes the next piece, which may be empty. */
HASHFMT_API void hashfmt_blake3_update(hashfmt_blake3_state *state, const uint8_t *data,
                                       size_t len);

/** Hash of everything taken so far; the state is unchanged and may take more. */
HASHFMT_API void hashfmt_blake3_final(const hashfmt_blake3_state *state, uint8_t out[32]);

#ifdef HASHFMT_ENGINE_HASHES
/* ==== engine hashes ==== */
/*
 * The ids that engines give to blocks, for doubles of engines: nothing in a relay or a query
 * computes them. hashfmt_external_read makes the id of an event out of a digest: SGLang's from its
 * first 8 bytes, sent as a signed number; vLLM's from its last 8, at digest + 24. TensorRT-LLM's
 * ids have no published form; a double may send any that depend on the blocks before.
 */

/* SHA-256 of input that comes in pieces. Private members, size may change. */
typedef struct hashfmt_sha256_state {
  uint64_t len_;      /* bytes so far; what the last block lacks is in block_ */
  uint32_t value_[8]; /* of all whole blocks */
  uint8_t block_[64];
} hashfmt_sha256_state;

/* UTF-8 text as its bytes are; NULL is fine when len is 0. */
typedef struct hashfmt_text {
  const uint8_t *bytes;
  size_t len;
} hashfmt_text;

/** SHA-256 of \p len bytes; NULL allowed for 0. */
HASHFMT_API void hashfmt_sha256(const uint8_t *data, size_t len, uint8_t out[32]);

/** Begins a hash of input in pieces. */
HASHFMT_API void hashfmt_sha256_init(hashfmt_sha256_state *state);

/** Takes the next piece, which may be empty. */
HASHFMT_API void hashfmt_sha256_update(hashfmt_sha256_state *state, const uint8_t *data,
                                       size_t len);

/** Hash of everything taken so far; the state is unchanged and may take more. */
HASHFMT_API void hashfmt_sha256_final(const hashfmt_sha256_state *state, uint8_t out[32]);

/** The value that stands for the parent of vLLM's first block: hash of the seed string, which is
    PYTHONHASHSEED or, since 0.29, "vllm-none-hash".
    \returns HASHFMT_OK; HASHFMT_ERR_LIMIT: above about 64 KiB, \p digest unchanged;
   HASHFMT_ERR_ARG.
 */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_vllm_root(hashfmt_text seed, uint8_t digest[32]);

/** Digest of a vLLM block under \p parent, a digest or the root value; the two may be the same
    memory. \p keys are the block's extra keys as far as they are strings, in vLLM's order: the name
    of a LoRA, and the salt in the first block of a prompt; no keys are Python's None. Not for keys
    that are equal, because vLLM's bytes then depend on where the strings came from.
    \returns as hashfmt_vllm_root; the limit is for the block and its keys. */
HASHFMT_API HASHFMT_MUST_USE int hashfmt_vllm_block(const uint8_t parent[32],
                                                    const uint32_t *tokens, size_t token_count,
                                                    const hashfmt_text *keys, size_t key_count,
                                                    uint8_t digest[32]);

/** Digest of an SGLang page under \p parent, NULL for the first page; it may be the same memory as
    \p digest. A page of token pairs has both numbers of each pair. */
HASHFMT_API void hashfmt_sglang_page(const uint8_t *parent, const uint32_t *tokens,
                                     size_t token_count, uint8_t digest[32]);
#endif

#ifdef __cplusplus
}
#endif

#elif defined(HASHFMT_STATIC_INCLUDED_) ? !defined(HASHFMT_STATIC) : defined(HASHFMT_STATIC)
#error "hashfmt.h was included in this unit in another mode"
#endif /* HASHFMT_H_INCLUDED */

#if (defined(HASHFMT_IMPLEMENTATION) || defined(HASHFMT_STATIC)) && !defined(HASHFMT_IMPLEMENTED_)
#define HASHFMT_IMPLEMENTED_

#ifndef HASHFMT_MEMCPY
#include <string.h>
#define HASHFMT_MEMCPY memcpy
#define HASHFMT_MEMSET memset
#endif

#ifdef __cplusplus
#ifdef __GNUC__ /* casts are those of C */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif
extern "C" {
#endif

/* ==== errors (impl) ==== */

HASHFMT_IMPL_API_ const char *hashfmt_strerror(int err) {
  switch (err) {
  case HASHFMT_OK:
    return "success";
  case HASHFMT_ERR_ARG:
    return "invalid argument";
  case HASHFMT_ERR_NOSPACE:
    return "output array too short";
  case HASHFMT_ERR_UNSUPPORTED:
    return "unknown hash format";
  case HASHFMT_ERR_LIMIT:
    return "too much in one block";
  default:
    return "unknown error";
  }
}

/* ==== hash function (impl) ==== */

/* ---- xxh3 begin ---- */
/* Wrapped by hand: scripts/sync-xxh3 carries these lines into another header, under a prefix of
   another length. */
/* clang-format off */

/* XXH3 with a 64-bit result and a numeric seed. Input may be unaligned and is read as little endian
   on every host. */
#if !defined(HASHFMT_BYTEWISE)
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HASHFMT_XXH3_LITTLE_ENDIAN
#endif
#elif defined(_MSC_VER)
#define HASHFMT_XXH3_LITTLE_ENDIAN
#endif
#endif

#if defined(__GNUC__) || defined(__clang__)
#define HASHFMT_XXH3_FN static inline __attribute__((unused))
#else
#define HASHFMT_XXH3_FN static inline
#endif

/* Vector instructions for the accumulators of long input: compilers do not find them by themselves.
   Freestanding builds may lack their header, and builds for size want the loop. */
#if defined(__SSE2__) && defined(HASHFMT_XXH3_LITTLE_ENDIAN) && !defined(HASHFMT_PORTABLE) && \
    __STDC_HOSTED__ != 0 && !defined(__OPTIMIZE_SIZE__)
#define HASHFMT_XXH3_SSE2
#include <emmintrin.h>
#endif

/* gcc unrolls loops of known length from level 3 on only; those here are short. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__)
#define HASHFMT_XXH3_UNROLL _Pragma("GCC unroll 4")
#else
#define HASHFMT_XXH3_UNROLL
#endif

#define HASHFMT_XXH3_SECRET_BYTES 192
#define HASHFMT_XXH3_SHORT_MAX 240 /* longest input that is hashed without accumulators */
#define HASHFMT_XXH3_STRIPE_BYTES 64
#define HASHFMT_XXH3_BLOCK_STRIPES 16 /* (192 - 64) / 8: the secret moves 8 bytes per stripe */

#define HASHFMT_XXH3_P32_1 UINT64_C(0x9e3779b1)
#define HASHFMT_XXH3_P32_2 UINT64_C(0x85ebca77)
#define HASHFMT_XXH3_P32_3 UINT64_C(0xc2b2ae3d)
#define HASHFMT_XXH3_P64_1 UINT64_C(0x9e3779b185ebca87)
#define HASHFMT_XXH3_P64_2 UINT64_C(0xc2b2ae3d27d4eb4f)
#define HASHFMT_XXH3_P64_3 UINT64_C(0x165667b19e3779f9)
#define HASHFMT_XXH3_P64_4 UINT64_C(0x85ebca77c2b2ae63)
#define HASHFMT_XXH3_P64_5 UINT64_C(0x27d4eb2f165667c5)
#define HASHFMT_XXH3_MX_1 UINT64_C(0x165667919e3779f9)
#define HASHFMT_XXH3_MX_2 UINT64_C(0x9fb21c651e98df25)

/* The secret of seed 0. */
static const uint8_t hashfmt_xxh3_default[HASHFMT_XXH3_SECRET_BYTES] = {
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
typedef struct hashfmt_xxh3_secret {
  uint8_t bytes[HASHFMT_XXH3_SECRET_BYTES];
} hashfmt_xxh3_secret;

HASHFMT_XXH3_FN uint32_t hashfmt_xxh3_swap32(uint32_t v) {
  return v >> 24 | (v >> 8 & 0xff00u) | (v & 0xff00u) << 8 | v << 24;
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_swap64(uint64_t v) {
  const uint64_t high = hashfmt_xxh3_swap32((uint32_t)v);
  return high << 32 | hashfmt_xxh3_swap32((uint32_t)(v >> 32));
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_rotl(uint64_t v, unsigned bits) {
  return v << bits | v >> (64 - bits);
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_read32(const uint8_t *p) {
#if defined(HASHFMT_XXH3_LITTLE_ENDIAN)
  uint32_t v;
  HASHFMT_MEMCPY(&v, p, sizeof v);
  return v;
#else
  return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24;
#endif
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_read64(const uint8_t *p) {
#if defined(HASHFMT_XXH3_LITTLE_ENDIAN)
  uint64_t v;
  HASHFMT_MEMCPY(&v, p, sizeof v);
  return v;
#else
  return hashfmt_xxh3_read32(p) | hashfmt_xxh3_read32(p + 4) << 32;
#endif
}

HASHFMT_XXH3_FN void hashfmt_xxh3_write64(uint8_t *p, uint64_t v) {
#if defined(HASHFMT_XXH3_LITTLE_ENDIAN)
  HASHFMT_MEMCPY(p, &v, sizeof v);
#else
  int i;
  for (i = 0; i < 8; i++) {
    p[i] = (uint8_t)(v >> 8 * i);
  }
#endif
}

/* Both halves of the 128-bit product, xored. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_fold(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
  __extension__ typedef unsigned __int128 hashfmt_xxh3_u128;
  const hashfmt_xxh3_u128 product = (hashfmt_xxh3_u128)a * b;
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
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_finish(uint64_t h) {
  h = (h ^ h >> 37) * HASHFMT_XXH3_MX_1;
  return h ^ h >> 32;
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_finish_tiny(uint64_t h) {
  h = (h ^ h >> 33) * HASHFMT_XXH3_P64_2;
  h = (h ^ h >> 29) * HASHFMT_XXH3_P64_3;
  return h ^ h >> 32;
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_finish_word(uint64_t h, uint64_t len) {
  h = (h ^ hashfmt_xxh3_rotl(h, 49) ^ hashfmt_xxh3_rotl(h, 24)) * HASHFMT_XXH3_MX_2;
  h = (h ^ ((h >> 35) + len)) * HASHFMT_XXH3_MX_2;
  return h ^ h >> 28;
}

/* The cores of the classes 1 to 3, 4 to 8 and 9 to 16 bytes, given what the input contributes. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_tiny(uint64_t mixed, uint64_t seed) {
  const uint8_t *const k = hashfmt_xxh3_default;
  const uint64_t key = hashfmt_xxh3_read32(k) ^ hashfmt_xxh3_read32(k + 4);
  return hashfmt_xxh3_finish_tiny(mixed ^ (key + seed));
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_word(uint64_t first, uint64_t last, uint64_t len,
                                           uint64_t seed) {
  const uint8_t *const k = hashfmt_xxh3_default;
  const uint64_t key = hashfmt_xxh3_read64(k + 8) ^ hashfmt_xxh3_read64(k + 16);
  seed ^= (uint64_t)hashfmt_xxh3_swap32((uint32_t)seed) << 32;
  return hashfmt_xxh3_finish_word((first << 32 | last) ^ (key - seed), len);
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_pair(uint64_t first, uint64_t last, uint64_t len,
                                           uint64_t seed) {
  const uint8_t *const k = hashfmt_xxh3_default;
  const uint64_t lo = first ^ ((hashfmt_xxh3_read64(k + 24) ^ hashfmt_xxh3_read64(k + 32)) + seed);
  const uint64_t hi = last ^ ((hashfmt_xxh3_read64(k + 40) ^ hashfmt_xxh3_read64(k + 48)) - seed);
  return hashfmt_xxh3_finish(len + hashfmt_xxh3_swap64(lo) + hi + hashfmt_xxh3_fold(lo, hi));
}

/* Hashes of a fixed length: 2, 8 and 16 bytes, given as little-endian numbers. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_64_len2(uint16_t value, uint64_t seed) {
  const uint64_t first = value & 0xffu, last = value >> 8;
  return hashfmt_xxh3_tiny(first << 16 | last << 24 | 2u << 8 | last, seed);
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_64_len8(uint64_t value, uint64_t seed) {
  return hashfmt_xxh3_word(value & 0xffffffffu, value >> 32, 8, seed);
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_64_len16(uint64_t lo, uint64_t hi, uint64_t seed) {
  return hashfmt_xxh3_pair(lo, hi, 16, seed);
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_mix16(const uint8_t *p, const uint8_t *key, uint64_t seed) {
  return hashfmt_xxh3_fold(hashfmt_xxh3_read64(p) ^ (hashfmt_xxh3_read64(key) + seed),
                           hashfmt_xxh3_read64(p + 8) ^ (hashfmt_xxh3_read64(key + 8) - seed));
}

/* 17 to 128 bytes: pieces of 16 bytes pairwise from both ends. The keys are the default secret and
   the seed, or the secret of the seed and 0, which saves the additions. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_medium(const uint8_t *p, size_t len, const uint8_t *k,
                                             uint64_t seed) {
  uint64_t h = (uint64_t)len * HASHFMT_XXH3_P64_1;
  size_t i;
  HASHFMT_XXH3_UNROLL
  for (i = 0; i <= (len - 1) / 32; i++) {
    h += hashfmt_xxh3_mix16(p + 16 * i, k + 32 * i, seed);
    h += hashfmt_xxh3_mix16(p + len - 16 * (i + 1), k + 32 * i + 16, seed);
  }
  return hashfmt_xxh3_finish(h);
}

/* 129 to 240 bytes: eight pieces, a mixing step, the other whole pieces, the last 16 bytes. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_large(const uint8_t *p, size_t len, uint64_t seed) {
  const uint8_t *const k = hashfmt_xxh3_default;
  uint64_t h = (uint64_t)len * HASHFMT_XXH3_P64_1;
  size_t i;
  for (i = 0; i < 8; i++) {
    h += hashfmt_xxh3_mix16(p + 16 * i, k + 16 * i, seed);
  }
  h = hashfmt_xxh3_finish(h);
  for (i = 8; i < len / 16; i++) {
    h += hashfmt_xxh3_mix16(p + 16 * i, k + 16 * (i - 8) + 3, seed);
  }
  return hashfmt_xxh3_finish(h + hashfmt_xxh3_mix16(p + len - 16, k + 119, seed));
}

/* Up to 240 bytes; only the default secret is read, the seed enters by arithmetic. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_short(const uint8_t *p, size_t len, uint64_t seed) {
  const uint8_t *const k = hashfmt_xxh3_default;
  if (len > 128) {
    return hashfmt_xxh3_large(p, len, seed);
  }
  if (len > 16) {
    return hashfmt_xxh3_medium(p, len, k, seed);
  }
  if (len > 8) {
    return hashfmt_xxh3_pair(hashfmt_xxh3_read64(p), hashfmt_xxh3_read64(p + len - 8), len, seed);
  }
  if (len >= 4) {
    return hashfmt_xxh3_word(hashfmt_xxh3_read32(p), hashfmt_xxh3_read32(p + len - 4), len, seed);
  }
  if (len > 0) {
    const uint64_t first = p[0], middle = p[len / 2], last = p[len - 1];
    return hashfmt_xxh3_tiny(first << 16 | middle << 24 | (uint64_t)len << 8 | last, seed);
  }
  return hashfmt_xxh3_finish_tiny(seed ^ hashfmt_xxh3_read64(k + 56) ^ hashfmt_xxh3_read64(k + 64));
}

HASHFMT_XXH3_FN void hashfmt_xxh3_secret_init(hashfmt_xxh3_secret *secret, uint64_t seed) {
  const uint8_t *const k = hashfmt_xxh3_default;
  size_t i;
  for (i = 0; i < HASHFMT_XXH3_SECRET_BYTES; i += 16) {
    hashfmt_xxh3_write64(secret->bytes + i, hashfmt_xxh3_read64(k + i) + seed);
    hashfmt_xxh3_write64(secret->bytes + i + 8, hashfmt_xxh3_read64(k + i + 8) - seed);
  }
}

HASHFMT_XXH3_FN void hashfmt_xxh3_acc_init(uint64_t acc[8]) {
  acc[0] = HASHFMT_XXH3_P32_3;
  acc[1] = HASHFMT_XXH3_P64_1;
  acc[2] = HASHFMT_XXH3_P64_2;
  acc[3] = HASHFMT_XXH3_P64_3;
  acc[4] = HASHFMT_XXH3_P64_4;
  acc[5] = HASHFMT_XXH3_P32_2;
  acc[6] = HASHFMT_XXH3_P64_5;
  acc[7] = HASHFMT_XXH3_P32_1;
}

/* One stripe: each lane takes its neighbour's data and the product of its own keyed halves. */
#if defined(HASHFMT_XXH3_SSE2)
HASHFMT_XXH3_FN __m128i hashfmt_xxh3_load(const void *p) {
  return _mm_loadu_si128((const __m128i *)p);
}

HASHFMT_XXH3_FN void hashfmt_xxh3_stripe(uint64_t acc[8], const uint8_t *p, const uint8_t *key) {
  size_t i;
  HASHFMT_XXH3_UNROLL
  for (i = 0; i < 4; i++) {
    const __m128i data = hashfmt_xxh3_load(p + 16 * i);
    const __m128i keyed = _mm_xor_si128(data, hashfmt_xxh3_load(key + 16 * i));
    const __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
    const __m128i sum = _mm_add_epi64(_mm_shuffle_epi32(data, 0x4E), hashfmt_xxh3_load(acc + 2 * i));
    _mm_storeu_si128((__m128i *)(void *)(acc + 2 * i), _mm_add_epi64(sum, product));
  }
}
#else
HASHFMT_XXH3_FN void hashfmt_xxh3_stripe(uint64_t acc[8], const uint8_t *p, const uint8_t *key) {
  size_t i;
  for (i = 0; i < 8; i++) {
    const uint64_t data = hashfmt_xxh3_read64(p + 8 * i);
    const uint64_t keyed = data ^ hashfmt_xxh3_read64(key + 8 * i);
    acc[i ^ 1] += data;
    acc[i] += (keyed & 0xffffffffu) * (keyed >> 32);
  }
}
#endif

/* Runs after each 16 stripes, when the secret is used up. */
HASHFMT_XXH3_FN void hashfmt_xxh3_scramble(uint64_t acc[8], const hashfmt_xxh3_secret *secret) {
  const uint8_t *const key = secret->bytes + HASHFMT_XXH3_SECRET_BYTES - HASHFMT_XXH3_STRIPE_BYTES;
  size_t i;
  for (i = 0; i < 8; i++) {
    acc[i] = (acc[i] ^ acc[i] >> 47 ^ hashfmt_xxh3_read64(key + 8 * i)) * HASHFMT_XXH3_P32_1;
  }
}

/* Takes the last 64 bytes, which may overlap the stripe before, and folds all lanes into one. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_acc_finish(uint64_t acc[8], const uint8_t *last, uint64_t len,
                                                 const hashfmt_xxh3_secret *secret) {
  uint64_t h = len * HASHFMT_XXH3_P64_1;
  size_t i;
  hashfmt_xxh3_stripe(acc, last, secret->bytes + 121); /* 7 bytes before the scramble key */
  for (i = 0; i < 4; i++) {
    h += hashfmt_xxh3_fold(acc[2 * i] ^ hashfmt_xxh3_read64(secret->bytes + 11 + 16 * i),
                           acc[2 * i + 1] ^ hashfmt_xxh3_read64(secret->bytes + 19 + 16 * i));
  }
  return hashfmt_xxh3_finish(h);
}

/* Above 240 bytes. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_long(const uint8_t *p, size_t len,
                                                  const hashfmt_xxh3_secret *secret) {
  const size_t stripes = (len - 1) / HASHFMT_XXH3_STRIPE_BYTES;
  uint64_t acc[8];
  size_t i;
  hashfmt_xxh3_acc_init(acc);
  for (i = 0; i < stripes; i++) {
    const size_t turn = i % HASHFMT_XXH3_BLOCK_STRIPES;
    hashfmt_xxh3_stripe(acc, p + HASHFMT_XXH3_STRIPE_BYTES * i, secret->bytes + 8 * turn);
    if (turn == HASHFMT_XXH3_BLOCK_STRIPES - 1) {
      hashfmt_xxh3_scramble(acc, secret);
    }
  }
  return hashfmt_xxh3_acc_finish(acc, p + len - HASHFMT_XXH3_STRIPE_BYTES, len, secret);
}

/* `secret` must come from `seed`. */
HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_64_secret(const void *data, size_t len, uint64_t seed,
                                                const hashfmt_xxh3_secret *secret) {
  const uint8_t *const p = (const uint8_t *)data;
  if (len <= HASHFMT_XXH3_SHORT_MAX) {
    return hashfmt_xxh3_short(p, len, seed);
  }
  return hashfmt_xxh3_long(p, len, secret);
}

HASHFMT_XXH3_FN uint64_t hashfmt_xxh3_64(const void *data, size_t len, uint64_t seed) {
  hashfmt_xxh3_secret secret;
  if (len <= HASHFMT_XXH3_SHORT_MAX) {
    return hashfmt_xxh3_short((const uint8_t *)data, len, seed);
  }
  hashfmt_xxh3_secret_init(&secret, seed);
  return hashfmt_xxh3_long((const uint8_t *)data, len, &secret);
}

/* clang-format on */
/* ---- xxh3 end ---- */

/* Hash of bytes that lie in one piece. */
HASHFMT_IMPL_API_ uint64_t hashfmt_hash64(const void *data, size_t len, uint64_t seed) {
#ifdef HASHFMT_XXH3_64
  return HASHFMT_XXH3_64(data, len, seed);
#else
  return hashfmt_xxh3_64(data, len, seed);
#endif
}

/*
 * Hash of 32-bit words that do not lie in memory as they are hashed. The buffer is compressed only
 * when more follows, so that input up to its size can still be hashed in one piece, and a drained
 * buffer still holds the bytes that the last stripe needs.
 */
#define HASHFMT_STREAM_BYTES_ (4 * HASHFMT_XXH3_STRIPE_BYTES)

typedef struct hashfmt_stream_ {
  uint64_t seed;
  uint64_t stripe_count; /* compressed so far; 0 = acc and secret are not set */
  uint64_t acc[8];
  hashfmt_xxh3_secret secret;
  size_t buffer_len;
  uint8_t buffer[HASHFMT_STREAM_BYTES_];
} hashfmt_stream_;

static void hashfmt_stream_init_(hashfmt_stream_ *stream, uint64_t seed) {
  stream->seed = seed;
  stream->stripe_count = 0;
  stream->buffer_len = 0;
}

static void hashfmt_stream_stripes_(hashfmt_stream_ *stream, size_t count) {
  size_t i;
  for (i = 0; i < count; i++) {
    const size_t turn = (size_t)(stream->stripe_count++ % HASHFMT_XXH3_BLOCK_STRIPES);
    hashfmt_xxh3_stripe(stream->acc, stream->buffer + HASHFMT_XXH3_STRIPE_BYTES * i,
                        stream->secret.bytes + 8 * turn);
    if (turn == HASHFMT_XXH3_BLOCK_STRIPES - 1) {
      hashfmt_xxh3_scramble(stream->acc, &stream->secret);
    }
  }
}

static void hashfmt_stream_put32_(hashfmt_stream_ *stream, uint32_t word) {
  uint8_t *to;
  if (stream->buffer_len == HASHFMT_STREAM_BYTES_) {
    if (stream->stripe_count == 0) {
      hashfmt_xxh3_secret_init(&stream->secret, stream->seed);
      hashfmt_xxh3_acc_init(stream->acc);
    }
    hashfmt_stream_stripes_(stream, HASHFMT_STREAM_BYTES_ / HASHFMT_XXH3_STRIPE_BYTES);
    stream->buffer_len = 0;
  }
  to = stream->buffer + stream->buffer_len;
  to[0] = (uint8_t)word;
  to[1] = (uint8_t)(word >> 8);
  to[2] = (uint8_t)(word >> 16);
  to[3] = (uint8_t)(word >> 24);
  stream->buffer_len += 4;
}

static void hashfmt_stream_put64_(hashfmt_stream_ *stream, uint64_t value) {
  hashfmt_stream_put32_(stream, (uint32_t)value);
  hashfmt_stream_put32_(stream, (uint32_t)(value >> 32));
}

/* Ends the stream. */
static uint64_t hashfmt_stream_finish_(hashfmt_stream_ *stream) {
  const uint64_t len = stream->stripe_count * HASHFMT_XXH3_STRIPE_BYTES + stream->buffer_len;
  uint8_t last[HASHFMT_XXH3_STRIPE_BYTES];
  size_t old = 0; /* bytes of the last stripe that were compressed before */
  if (stream->stripe_count == 0) {
    return hashfmt_hash64(stream->buffer, stream->buffer_len, stream->seed);
  }
  if (stream->buffer_len < sizeof last) {
    old = sizeof last - stream->buffer_len;
    HASHFMT_MEMCPY(last, stream->buffer + HASHFMT_STREAM_BYTES_ - old, old);
  }
  HASHFMT_MEMCPY(last + old, stream->buffer + stream->buffer_len - (sizeof last - old),
                 sizeof last - old);
  hashfmt_stream_stripes_(stream, (stream->buffer_len - 1) / HASHFMT_XXH3_STRIPE_BYTES);
  return hashfmt_xxh3_acc_finish(stream->acc, last, len, &stream->secret);
}

static void hashfmt_stream_tokens_(hashfmt_stream_ *stream, const uint32_t *tokens, size_t count) {
  size_t i;
  for (i = 0; i < count; i++) {
    hashfmt_stream_put32_(stream, tokens[i]);
  }
}

/* ==== windows (impl) ==== */

HASHFMT_IMPL_API_ uint64_t hashfmt_window_len(int32_t format, uint32_t block_size) {
  if (block_size == 0) {
    return 0;
  }
  switch (format) {
  case HASHFMT_FORMAT_STANDARD:
    return block_size;
  case HASHFMT_FORMAT_EAGLE:
    return (uint64_t)block_size + 1;
  default:
    return 0;
  }
}

HASHFMT_IMPL_API_ uint64_t hashfmt_block_count(int32_t format, uint32_t block_size,
                                               uint64_t token_count) {
  const uint64_t window = hashfmt_window_len(format, block_size);
  if (window == 0 || token_count < window) {
    return 0;
  }
  return (token_count - window) / block_size + 1;
}

/* ==== request seed (impl) ==== */

HASHFMT_IMPL_API_ uint64_t hashfmt_seed(const uint8_t *lora, size_t lora_len, const uint8_t *ns,
                                        size_t ns_len) {
  uint64_t seed = HASHFMT_CHAIN_SEED;
  if (lora_len > 0) {
    seed += hashfmt_hash64(lora, lora_len, 0);
  }
  if (ns_len > 0) {
    seed += hashfmt_hash64(ns, ns_len, 1);
  }
  return seed;
}

/* ==== local block hash (impl) ==== */

HASHFMT_IMPL_API_ uint64_t hashfmt_local(const uint32_t *tokens, size_t token_count,
                                         uint64_t seed) {
#ifdef HASHFMT_XXH3_LITTLE_ENDIAN
  return hashfmt_hash64(tokens, 4 * token_count, seed);
#else
  hashfmt_stream_ stream;
  hashfmt_stream_init_(&stream, seed);
  hashfmt_stream_tokens_(&stream, tokens, token_count);
  return hashfmt_stream_finish_(&stream);
#endif
}

/* ==== multimodal content (impl) ==== */

/* Puts the hashes in ascending order by searching the next larger value again and again: blocks
   have few objects, and it needs no scratch. */
static void hashfmt_stream_sorted_(hashfmt_stream_ *stream, const uint64_t *hashes, size_t len) {
  uint64_t floor = 0;
  size_t done = 0;
  while (done < len) {
    uint64_t next = UINT64_MAX;
    size_t times = 0;
    size_t i;
    for (i = 0; i < len; i++) {
      if (hashes[i] >= floor && hashes[i] <= next) {
        times = hashes[i] == next ? times + 1 : 1;
        next = hashes[i];
      }
    }
    for (i = 0; i < times; i++) {
      hashfmt_stream_put64_(stream, next);
    }
    done += times;
    floor = next + 1;
  }
}

HASHFMT_IMPL_API_ int hashfmt_local_mm(const uint32_t *tokens, size_t token_count,
                                       const uint64_t *mm_hashes, size_t mm_len, uint64_t seed,
                                       uint64_t *out) {
  hashfmt_stream_ stream;
  if (out == NULL || (tokens == NULL && token_count > 0) || (mm_hashes == NULL && mm_len > 0)) {
    return HASHFMT_ERR_ARG;
  }
  if (mm_len == 0) {
    *out = hashfmt_local(tokens, token_count, seed);
    return HASHFMT_OK;
  }
  if (mm_len > HASHFMT_MM_MAX) {
    return HASHFMT_ERR_LIMIT;
  }
  hashfmt_stream_init_(&stream, seed);
  hashfmt_stream_tokens_(&stream, tokens, token_count);
  hashfmt_stream_sorted_(&stream, mm_hashes, mm_len);
  *out = hashfmt_stream_finish_(&stream);
  return HASHFMT_OK;
}

enum { HASHFMT_RUN_NONE_, HASHFMT_RUN_IMAGE_, HASHFMT_RUN_VIDEO_ };

/* Walks over the tokens of a window and numbers the groups of placeholder runs. */
typedef struct hashfmt_groups_ {
  const hashfmt_mm_tokens *ids;
  int token_kind; /* of the token before */
  int run_kind;   /* of the run before, whatever lies between */
  size_t count;   /* groups so far */
} hashfmt_groups_;

static void hashfmt_groups_init_(hashfmt_groups_ *groups, const hashfmt_mm_tokens *ids) {
  groups->ids = ids;
  groups->token_kind = HASHFMT_RUN_NONE_;
  groups->run_kind = HASHFMT_RUN_NONE_;
  groups->count = 0;
}

/* Takes the next token: whether it is a placeholder, then of the group with number count. One video
   may come as several runs, so these share a group until an image comes between. */
static bool hashfmt_groups_take_(hashfmt_groups_ *groups, uint32_t token) {
  const hashfmt_mm_tokens *const ids = groups->ids;
  int kind = HASHFMT_RUN_NONE_;
  if (ids->has_image && token == ids->image_token_id) {
    kind = HASHFMT_RUN_IMAGE_;
  } else if (ids->has_video && token == ids->video_token_id) {
    kind = HASHFMT_RUN_VIDEO_;
  }
  if (kind != HASHFMT_RUN_NONE_ && kind != groups->token_kind) {
    if (kind == HASHFMT_RUN_IMAGE_ || groups->run_kind != HASHFMT_RUN_VIDEO_) {
      groups->count++;
    }
    groups->run_kind = kind;
  }
  groups->token_kind = kind;
  return kind != HASHFMT_RUN_NONE_;
}

/* Whether the placeholders of a window can be replaced by its objects. With images alone the last
   object serves all runs that remain; where videos may occur, groups and objects must match. */
static bool hashfmt_mm_fits_(const uint32_t *tokens, size_t token_count, size_t mm_len,
                             const hashfmt_mm_tokens *ids) {
  hashfmt_groups_ groups;
  size_t i;
  if (ids == NULL ||
      (ids->has_image && ids->has_video && ids->image_token_id == ids->video_token_id)) {
    return false;
  }
  hashfmt_groups_init_(&groups, ids);
  for (i = 0; i < token_count; i++) {
    (void)hashfmt_groups_take_(&groups, tokens[i]);
  }
  return groups.count > 0 && (!ids->has_video || groups.count == mm_len);
}

HASHFMT_IMPL_API_ int hashfmt_block_mm(const uint32_t *tokens, size_t token_count,
                                       const uint64_t *mm_hashes, size_t mm_len,
                                       const hashfmt_mm_tokens *ids, uint64_t seed, uint64_t *out) {
  hashfmt_stream_ stream;
  hashfmt_groups_ groups;
  size_t i;
  if (out == NULL || (tokens == NULL && token_count > 0) || (mm_hashes == NULL && mm_len > 0)) {
    return HASHFMT_ERR_ARG;
  }
  if (mm_len == 0 || !hashfmt_mm_fits_(tokens, token_count, mm_len, ids)) {
    return hashfmt_local_mm(tokens, token_count, mm_hashes, mm_len, seed, out);
  }
  hashfmt_stream_init_(&stream, seed);
  hashfmt_groups_init_(&groups, ids);
  for (i = 0; i < token_count; i++) {
    uint32_t token = tokens[i];
    if (hashfmt_groups_take_(&groups, token)) {
      const size_t object = groups.count < mm_len ? groups.count : mm_len;
      token = hashfmt_pad_value(mm_hashes[object - 1]);
    }
    hashfmt_stream_put32_(&stream, token);
  }
  *out = hashfmt_stream_finish_(&stream);
  return HASHFMT_OK;
}

HASHFMT_IMPL_API_ uint32_t hashfmt_pad_value(uint64_t mm_hash) {
  return 1000000u + (uint32_t)(mm_hash & 0x3fffffffu);
}

/* Value of a hex digit, or 16. */
static uint64_t hashfmt_hex_digit_(uint8_t c) {
  if (c >= '0' && c <= '9') {
    return (uint64_t)(c - '0');
  }
  if (c >= 'a' && c <= 'f') {
    return (uint64_t)(c - 'a') + 10;
  }
  if (c >= 'A' && c <= 'F') {
    return (uint64_t)(c - 'A') + 10;
  }
  return 16;
}

HASHFMT_IMPL_API_ int hashfmt_mm_identifier(const uint8_t *id, size_t len, uint64_t *mm_hash) {
  uint64_t prefix = 0;
  size_t i = 0;
  if (len == 0) {
    return 0;
  }
  while (len == 64 && i < len && hashfmt_hex_digit_(id[i]) < 16) {
    if (i < 16) {
      prefix = prefix << 4 | hashfmt_hex_digit_(id[i]);
    }
    i++;
  }
  *mm_hash = i == 64 ? prefix : hashfmt_hash64(id, len, 0);
  return 1;
}

HASHFMT_IMPL_API_ bool hashfmt_mm_piece(const hashfmt_mm_range *range, uint64_t total,
                                        uint32_t block_size, uint64_t block, uint64_t *start,
                                        uint64_t *end) {
  uint64_t from;
  uint64_t to;
  if (block_size == 0 || block > total / block_size) {
    return false;
  }
  from = block * block_size;
  to = total - from < block_size ? total : from + block_size;
  from = range->start > from ? range->start : from;
  to = range->end < to ? range->end : to;
  if (from >= to) {
    return false;
  }
  *start = from;
  *end = to;
  return true;
}

HASHFMT_IMPL_API_ int hashfmt_mm_entry(const hashfmt_mm_range *ranges, size_t range_len,
                                       uint64_t total, uint32_t block_size, uint64_t block,
                                       uint64_t *mm_hashes, size_t cap, size_t *len) {
  size_t count = 0;
  size_t i;
  if (len == NULL || block_size == 0 || (ranges == NULL && range_len > 0) ||
      (mm_hashes == NULL && cap > 0) || (total == 0 && range_len > 0)) {
    return HASHFMT_ERR_ARG;
  }
  for (i = 0; i < range_len; i++) {
    uint64_t start;
    uint64_t end;
    size_t same = 0;
    if (!hashfmt_mm_piece(&ranges[i], total, block_size, block, &start, &end)) {
      continue;
    }
    while (same < count && mm_hashes[same] != ranges[i].mm_hash) {
      same++;
    }
    if (same < count) {
      continue;
    }
    if (count == HASHFMT_MM_MAX) {
      return HASHFMT_ERR_LIMIT;
    }
    if (count == cap) {
      *len = count;
      return HASHFMT_ERR_NOSPACE;
    }
    mm_hashes[count++] = ranges[i].mm_hash;
  }
  *len = count;
  return HASHFMT_OK;
}

/* ==== sequence hash (impl) ==== */

HASHFMT_IMPL_API_ uint64_t hashfmt_root(uint64_t local) { return local; }

HASHFMT_IMPL_API_ uint64_t hashfmt_child(uint64_t parent_canonical, uint64_t local) {
#ifdef HASHFMT_XXH3_64
  uint8_t bytes[16];
  hashfmt_xxh3_write64(bytes, parent_canonical);
  hashfmt_xxh3_write64(bytes + 8, local);
  return HASHFMT_XXH3_64(bytes, sizeof bytes, HASHFMT_CHAIN_SEED);
#else
  return hashfmt_xxh3_64_len16(parent_canonical, local, HASHFMT_CHAIN_SEED);
#endif
}

HASHFMT_IMPL_API_ void hashfmt_chain_init(hashfmt_chain *chain) {
  chain->value_ = 0;
  chain->started_ = false;
}

HASHFMT_IMPL_API_ void hashfmt_chain_resume(hashfmt_chain *chain, uint64_t parent_canonical) {
  chain->value_ = parent_canonical;
  chain->started_ = true;
}

HASHFMT_IMPL_API_ uint64_t hashfmt_chain_next(hashfmt_chain *chain, uint64_t local) {
  chain->value_ = chain->started_ ? hashfmt_child(chain->value_, local) : hashfmt_root(local);
  chain->started_ = true;
  return chain->value_;
}

/* ==== whole request (impl) ==== */

/* hashfmt_local for windows that share a seed; `secret` is that of the seed. */
HASHFMT_INLINE_ uint64_t hashfmt_window_hash_(const uint32_t *tokens, size_t token_count,
                                              uint64_t seed, const hashfmt_xxh3_secret *secret) {
#if defined(HASHFMT_XXH3_LITTLE_ENDIAN) && !defined(HASHFMT_XXH3_64)
  const size_t len = 4 * token_count;
#ifndef __OPTIMIZE_SIZE__
  if (len > 16 && len <= 128) {
    return hashfmt_xxh3_medium((const uint8_t *)tokens, len, secret->bytes, 0);
  }
#endif
  return hashfmt_xxh3_64_secret(tokens, len, seed, secret);
#else
  (void)secret;
  return hashfmt_local(tokens, token_count, seed);
#endif
}

/* The hashes of `count` blocks of one request. */
HASHFMT_INLINE_ void hashfmt_windows_(const uint32_t *tokens, size_t count, size_t block_size,
                                      size_t window, uint64_t seed,
                                      const hashfmt_xxh3_secret *secret, uint64_t *local,
                                      uint64_t *sequence) {
  hashfmt_chain chain;
  size_t i;
  hashfmt_chain_init(&chain);
  for (i = 0; i < count; i++) {
    const uint64_t hash = hashfmt_window_hash_(tokens + i * block_size, window, seed, secret);
    if (local != NULL) {
      local[i] = hash;
    }
    if (sequence != NULL) {
      sequence[i] = hashfmt_chain_next(&chain, hash);
    }
  }
}

HASHFMT_IMPL_API_ int hashfmt_blocks(int32_t format, uint32_t block_size, uint64_t seed,
                                     const uint32_t *tokens, size_t token_count, uint64_t *local,
                                     uint64_t *sequence, size_t cap, size_t *block_count) {
  const uint64_t window = hashfmt_window_len(format, block_size);
  hashfmt_xxh3_secret secret;
  size_t count;
  if (block_count == NULL) {
    return HASHFMT_ERR_ARG;
  }
  *block_count = 0;
  if (block_size == 0 || (tokens == NULL && token_count > 0)) {
    return HASHFMT_ERR_ARG;
  }
  if (window == 0) {
    return HASHFMT_ERR_UNSUPPORTED;
  }
  count = (size_t)hashfmt_block_count(format, block_size, token_count); /* <= token_count */
  *block_count = count;
  if (local == NULL && sequence == NULL) {
    return HASHFMT_OK;
  }
  hashfmt_xxh3_secret_init(&secret, seed);
  count = count < cap ? count : cap;
  switch (window) {
#ifndef __OPTIMIZE_SIZE__
  case 16: /* the usual lengths, known to the compiler, cost less */
    hashfmt_windows_(tokens, count, block_size, 16, seed, &secret, local, sequence);
    break;
  case 17:
    hashfmt_windows_(tokens, count, block_size, 17, seed, &secret, local, sequence);
    break;
  case 64:
    hashfmt_windows_(tokens, count, block_size, 64, seed, &secret, local, sequence);
    break;
#endif
  default:
    hashfmt_windows_(tokens, count, block_size, (size_t)window, seed, &secret, local, sequence);
  }
  return *block_count > cap ? HASHFMT_ERR_NOSPACE : HASHFMT_OK;
}

/* ==== engine data (impl) ==== */

HASHFMT_IMPL_API_ int hashfmt_pairs_flatten(const uint32_t *pairs, size_t pair_count,
                                            uint32_t *tokens, size_t cap, size_t *token_count,
                                            size_t *gap_count) {
  const size_t count = pair_count > 0 ? pair_count + 1 : 0;
  size_t gaps = 0;
  size_t i;
  if (token_count == NULL || (pair_count > 0 && pairs == NULL) ||
      pair_count > SIZE_MAX / (2 * sizeof *pairs)) { /* no such array, and count could wrap */
    return HASHFMT_ERR_ARG;
  }
  *token_count = count;
  if (count > cap) {
    return HASHFMT_ERR_NOSPACE;
  }
  if (count > 0 && tokens == NULL) {
    return HASHFMT_ERR_ARG;
  }
  for (i = 0; i < pair_count; i++) {
    const uint32_t second = pairs[2 * i + 1];
    tokens[i] = pairs[2 * i];
    if (i + 1 == pair_count) {
      tokens[i + 1] = second;
    } else if (second != pairs[2 * i + 2]) {
      gaps++;
    }
  }
  if (gap_count != NULL) {
    *gap_count = gaps;
  }
  return HASHFMT_OK;
}

HASHFMT_IMPL_API_ uint64_t hashfmt_external_read(const uint8_t bytes[8]) {
  uint64_t value = 0;
  int i;
  for (i = 0; i < 8; i++) {
    value = value << 8 | bytes[i];
  }
  return value;
}

/* ==== blake3 (impl) ==== */

#define HASHFMT_BLAKE3_BLOCK_BYTES_ 64u
#define HASHFMT_BLAKE3_CHUNK_BLOCKS_ 16u
#define HASHFMT_BLAKE3_CHUNK_START_ 1u
#define HASHFMT_BLAKE3_CHUNK_END_ 2u
#define HASHFMT_BLAKE3_PARENT_ 4u
#define HASHFMT_BLAKE3_ROOT_ 8u

static const uint32_t hashfmt_blake3_iv_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* Order in which each of the seven rounds takes the message words. */
static const uint8_t hashfmt_blake3_order_[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

static inline uint32_t hashfmt_blake3_rotr_(uint32_t v, unsigned bits) {
  return v >> bits | v << (32 - bits);
}

/* Quarter round: mixes two message words into one column or diagonal of the state. */
static inline void hashfmt_blake3_mix_(uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d,
                                       uint32_t x, uint32_t y) {
  *a += *b + x;
  *d = hashfmt_blake3_rotr_(*d ^ *a, 16);
  *c += *d;
  *b = hashfmt_blake3_rotr_(*b ^ *c, 12);
  *a += *b + y;
  *d = hashfmt_blake3_rotr_(*d ^ *a, 8);
  *c += *d;
  *b = hashfmt_blake3_rotr_(*b ^ *c, 7);
}

/* The compression function, as far as its first 8 output words. `out` may be `cv`. */
static void hashfmt_blake3_compress_(const uint32_t cv[8], const uint32_t message[16],
                                     uint64_t counter, uint32_t block_len, uint32_t flags,
                                     uint32_t out[8]) {
  uint32_t v[16];
  size_t i;
  for (i = 0; i < 8; i++) {
    v[i] = cv[i];
  }
  for (i = 0; i < 4; i++) {
    v[8 + i] = hashfmt_blake3_iv_[i];
  }
  v[12] = (uint32_t)counter;
  v[13] = (uint32_t)(counter >> 32);
  v[14] = block_len;
  v[15] = flags;
  for (i = 0; i < 7; i++) {
    const uint8_t *const at = hashfmt_blake3_order_[i];
    hashfmt_blake3_mix_(&v[0], &v[4], &v[8], &v[12], message[at[0]], message[at[1]]);
    hashfmt_blake3_mix_(&v[1], &v[5], &v[9], &v[13], message[at[2]], message[at[3]]);
    hashfmt_blake3_mix_(&v[2], &v[6], &v[10], &v[14], message[at[4]], message[at[5]]);
    hashfmt_blake3_mix_(&v[3], &v[7], &v[11], &v[15], message[at[6]], message[at[7]]);
    hashfmt_blake3_mix_(&v[0], &v[5], &v[10], &v[15], message[at[8]], message[at[9]]);
    hashfmt_blake3_mix_(&v[1], &v[6], &v[11], &v[12], message[at[10]], message[at[11]]);
    hashfmt_blake3_mix_(&v[2], &v[7], &v[8], &v[13], message[at[12]], message[at[13]]);
    hashfmt_blake3_mix_(&v[3], &v[4], &v[9], &v[14], message[at[14]], message[at[15]]);
  }
  for (i = 0; i < 8; i++) {
    out[i] = v[i] ^ v[8 + i];
  }
}

/* Compresses the buffered block into the open chunk's chaining value. */
static void hashfmt_blake3_block_(const hashfmt_blake3_state *state, uint32_t flags,
                                  uint32_t out[8]) {
  uint32_t message[16];
  size_t i;
  for (i = 0; i < 16; i++) {
    message[i] = (uint32_t)hashfmt_xxh3_read32(state->block_ + 4 * i);
  }
  if (state->chunk_block_len_ == 0) {
    flags |= HASHFMT_BLAKE3_CHUNK_START_;
  }
  hashfmt_blake3_compress_(state->chunk_cv_, message, state->chunk_count_, state->block_len_, flags,
                           out);
}

static void hashfmt_blake3_parent_(const uint32_t left[8], const uint32_t right[8], uint32_t flags,
                                   uint32_t out[8]) {
  uint32_t message[16];
  HASHFMT_MEMCPY(message, left, 32);
  HASHFMT_MEMCPY(message + 8, right, 32);
  hashfmt_blake3_compress_(hashfmt_blake3_iv_, message, 0, HASHFMT_BLAKE3_BLOCK_BYTES_,
                           flags | HASHFMT_BLAKE3_PARENT_, out);
}

static void hashfmt_blake3_chunk_begin_(hashfmt_blake3_state *state) {
  HASHFMT_MEMCPY(state->chunk_cv_, hashfmt_blake3_iv_, sizeof state->chunk_cv_);
  state->chunk_block_len_ = 0;
}

/* Empties the full buffer; called only when more input follows, because the last block, chunk and
   subtree of all are compressed with other flags. */
static void hashfmt_blake3_drain_(hashfmt_blake3_state *state) {
  uint32_t cv[8];
  uint64_t pairs;
  if (state->chunk_block_len_ < HASHFMT_BLAKE3_CHUNK_BLOCKS_ - 1) {
    hashfmt_blake3_block_(state, 0, state->chunk_cv_);
    state->chunk_block_len_++;
  } else {
    hashfmt_blake3_block_(state, HASHFMT_BLAKE3_CHUNK_END_, cv);
    state->chunk_count_++;
    /* Two subtrees of one size become one: as often as the new count is divisible by two. */
    for (pairs = state->chunk_count_; (pairs & 1) == 0; pairs >>= 1) {
      hashfmt_blake3_parent_(state->stack_[--state->stack_len_], cv, 0, cv);
    }
    HASHFMT_MEMCPY(state->stack_[state->stack_len_++], cv, sizeof cv);
    hashfmt_blake3_chunk_begin_(state);
  }
  HASHFMT_MEMSET(state->block_, 0, sizeof state->block_); /* a short last block ends in zeros */
  state->block_len_ = 0;
}

HASHFMT_IMPL_API_ void hashfmt_blake3(const uint8_t *data, size_t len, uint8_t out[32]) {
  hashfmt_blake3_state state;
  hashfmt_blake3_init(&state);
  hashfmt_blake3_update(&state, data, len);
  hashfmt_blake3_final(&state, out);
}

HASHFMT_IMPL_API_ void hashfmt_blake3_init(hashfmt_blake3_state *state) {
  HASHFMT_MEMSET(state, 0, sizeof *state);
  hashfmt_blake3_chunk_begin_(state);
}

HASHFMT_IMPL_API_ void hashfmt_blake3_update(hashfmt_blake3_state *state, const uint8_t *data,
                                             size_t len) {
  while (len > 0) {
    size_t take;
    if (state->block_len_ == HASHFMT_BLAKE3_BLOCK_BYTES_) {
      hashfmt_blake3_drain_(state);
    }
    take = HASHFMT_BLAKE3_BLOCK_BYTES_ - state->block_len_;
    take = len < take ? len : take;
    HASHFMT_MEMCPY(state->block_ + state->block_len_, data, take);
    state->block_len_ += (uint32_t)take;
    data += take;
    len -= take;
  }
}

HASHFMT_IMPL_API_ void hashfmt_blake3_final(const hashfmt_blake3_state *state, uint8_t out[32]) {
  const uint32_t root = HASHFMT_BLAKE3_ROOT_;
  uint32_t left = state->stack_len_;
  uint32_t cv[8];
  size_t i;
  hashfmt_blake3_block_(state, HASHFMT_BLAKE3_CHUNK_END_ | (left == 0 ? root : 0), cv);
  while (left > 0) {
    left--;
    hashfmt_blake3_parent_(state->stack_[left], cv, left == 0 ? root : 0, cv);
  }
  for (i = 0; i < 32; i++) {
    out[i] = (uint8_t)(cv[i / 4] >> 8 * (i % 4));
  }
}

#ifdef HASHFMT_ENGINE_HASHES
/* ==== engine hashes (impl) ==== */

static const uint32_t hashfmt_sha256_start_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t hashfmt_sha256_rounds_[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t hashfmt_sha256_rotr_(uint32_t v, unsigned bits) {
  return v >> bits | v << (32 - bits);
}

static void hashfmt_sha256_block_(uint32_t value[8], const uint8_t block[64]) {
  uint32_t w[16]; /* the last 16 words of the schedule, a ring */
  uint32_t v[8];
  unsigned i;
  HASHFMT_MEMCPY(v, value, sizeof v);
  for (i = 0; i < 64; i++) {
    uint32_t a;
    uint32_t e;
    if (i < 16) {
      w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
             (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    } else {
      const uint32_t w2 = w[(i - 2) % 16];
      const uint32_t w15 = w[(i - 15) % 16];
      w[i % 16] += w[(i - 7) % 16] +
                   (hashfmt_sha256_rotr_(w15, 7) ^ hashfmt_sha256_rotr_(w15, 18) ^ w15 >> 3) +
                   (hashfmt_sha256_rotr_(w2, 17) ^ hashfmt_sha256_rotr_(w2, 19) ^ w2 >> 10);
    }
    e = v[7] + hashfmt_sha256_rounds_[i] + w[i % 16] + ((v[4] & v[5]) ^ (~v[4] & v[6])) +
        (hashfmt_sha256_rotr_(v[4], 6) ^ hashfmt_sha256_rotr_(v[4], 11) ^
         hashfmt_sha256_rotr_(v[4], 25));
    a = e + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2])) +
        (hashfmt_sha256_rotr_(v[0], 2) ^ hashfmt_sha256_rotr_(v[0], 13) ^
         hashfmt_sha256_rotr_(v[0], 22));
    e += v[3];
    v[7] = v[6];
    v[6] = v[5];
    v[5] = v[4];
    v[4] = e;
    v[3] = v[2];
    v[2] = v[1];
    v[1] = v[0];
    v[0] = a;
  }
  for (i = 0; i < 8; i++) {
    value[i] += v[i];
  }
}

HASHFMT_IMPL_API_ void hashfmt_sha256(const uint8_t *data, size_t len, uint8_t out[32]) {
  hashfmt_sha256_state state;
  hashfmt_sha256_init(&state);
  hashfmt_sha256_update(&state, data, len);
  hashfmt_sha256_final(&state, out);
}

HASHFMT_IMPL_API_ void hashfmt_sha256_init(hashfmt_sha256_state *state) {
  HASHFMT_MEMSET(state, 0, sizeof *state);
  HASHFMT_MEMCPY(state->value_, hashfmt_sha256_start_, sizeof state->value_);
}

HASHFMT_IMPL_API_ void hashfmt_sha256_update(hashfmt_sha256_state *state, const uint8_t *data,
                                             size_t len) {
  while (len > 0) {
    const size_t have = (size_t)(state->len_ % 64);
    const size_t take = len < 64 - have ? len : 64 - have;
    HASHFMT_MEMCPY(state->block_ + have, data, take);
    state->len_ += take;
    data += take;
    len -= take;
    if (have + take == 64) {
      hashfmt_sha256_block_(state->value_, state->block_);
    }
  }
}

/* Behind the input: one bit, zeros up to the end of a block but for 8 bytes, the length in bits. */
HASHFMT_IMPL_API_ void hashfmt_sha256_final(const hashfmt_sha256_state *state, uint8_t out[32]) {
  const uint64_t bits = state->len_ * 8;
  uint8_t padding[72] = {0x80};
  const size_t zeros = (size_t)((119 - state->len_ % 64) % 64); /* with the bit */
  hashfmt_sha256_state last = *state;
  size_t i;
  for (i = 0; i < 8; i++) {
    padding[zeros + 1 + i] = (uint8_t)(bits >> (56 - 8 * i));
  }
  hashfmt_sha256_update(&last, padding, zeros + 9);
  for (i = 0; i < 32; i++) {
    out[i] = (uint8_t)(last.value_[i / 4] >> (24 - 8 * (i % 4)));
  }
}

/*
 * Python's pickle, protocol 5: one frame with the length of its content in front. Everything is put
 * twice, first to count, so that no buffer is needed. Above the limit Python would open a second
 * frame.
 */
#define HASHFMT_PICKLE_FRAME_MAX_ 65536

typedef struct hashfmt_pickle_ {
  hashfmt_sha256_state *sha; /* NULL while counting */
  uint64_t len;              /* bytes of the frame so far */
} hashfmt_pickle_;

static void hashfmt_pickle_bytes_(hashfmt_pickle_ *pickle, const uint8_t *bytes, size_t len) {
  if (pickle->sha != NULL) {
    hashfmt_sha256_update(pickle->sha, bytes, len);
  }
  pickle->len += len;
}

static void hashfmt_pickle_op_(hashfmt_pickle_ *pickle, uint8_t code) {
  hashfmt_pickle_bytes_(pickle, &code, 1);
}

static void hashfmt_pickle_le_(hashfmt_pickle_ *pickle, uint64_t value, size_t len) {
  size_t i;
  for (i = 0; i < len; i++) {
    hashfmt_pickle_op_(pickle, (uint8_t)(value >> 8 * i));
  }
}

/* Texts, digests and tuples that are not empty are kept for later reference. */
static void hashfmt_pickle_memoize_(hashfmt_pickle_ *pickle) { hashfmt_pickle_op_(pickle, 0x94); }

static void hashfmt_pickle_number_(hashfmt_pickle_ *pickle, uint32_t value) {
  if (value <= 0xff) {
    hashfmt_pickle_op_(pickle, 'K');
    hashfmt_pickle_le_(pickle, value, 1);
  } else if (value <= 0xffff) {
    hashfmt_pickle_op_(pickle, 'M');
    hashfmt_pickle_le_(pickle, value, 2);
  } else if (value <= 0x7fffffff) {
    hashfmt_pickle_op_(pickle, 'J');
    hashfmt_pickle_le_(pickle, value, 4);
  } else {
    hashfmt_pickle_op_(pickle, 0x8a); /* signed, of as many bytes as follow */
    hashfmt_pickle_le_(pickle, 5, 1);
    hashfmt_pickle_le_(pickle, value, 5);
  }
}

static void hashfmt_pickle_text_(hashfmt_pickle_ *pickle, hashfmt_text text) {
  if (text.len <= 0xff) {
    hashfmt_pickle_op_(pickle, 0x8c);
    hashfmt_pickle_le_(pickle, text.len, 1);
  } else {
    hashfmt_pickle_op_(pickle, 'X');
    hashfmt_pickle_le_(pickle, text.len, 4);
  }
  hashfmt_pickle_bytes_(pickle, text.bytes, text.len);
  hashfmt_pickle_memoize_(pickle);
}

/* Before and after the members of a tuple; up to three need no mark. */
static void hashfmt_pickle_tuple_begin_(hashfmt_pickle_ *pickle, size_t count) {
  if (count > 3) {
    hashfmt_pickle_op_(pickle, '(');
  }
}

static void hashfmt_pickle_tuple_end_(hashfmt_pickle_ *pickle, size_t count) {
  if (count == 0) {
    hashfmt_pickle_op_(pickle, ')');
    return;
  }
  hashfmt_pickle_op_(pickle, count > 3 ? (uint8_t)'t' : (uint8_t)(0x84 + count));
  hashfmt_pickle_memoize_(pickle);
}

/* What is hashed: the seed alone when parent is NULL, else (parent, tokens, keys or None). */
typedef struct hashfmt_vllm_input_ {
  hashfmt_text seed;
  const uint8_t *parent;
  const uint32_t *tokens;
  size_t token_count;
  const hashfmt_text *keys;
  size_t key_count;
} hashfmt_vllm_input_;

static void hashfmt_vllm_put_(hashfmt_pickle_ *pickle, const hashfmt_vllm_input_ *in) {
  size_t i;
  if (in->parent == NULL) {
    hashfmt_pickle_text_(pickle, in->seed);
  } else {
    hashfmt_pickle_op_(pickle, 'C');
    hashfmt_pickle_le_(pickle, 32, 1);
    hashfmt_pickle_bytes_(pickle, in->parent, 32);
    hashfmt_pickle_memoize_(pickle);
    hashfmt_pickle_tuple_begin_(pickle, in->token_count);
    for (i = 0; i < in->token_count; i++) {
      hashfmt_pickle_number_(pickle, in->tokens[i]);
    }
    hashfmt_pickle_tuple_end_(pickle, in->token_count);
    if (in->key_count == 0) {
      hashfmt_pickle_op_(pickle, 'N');
    } else {
      hashfmt_pickle_tuple_begin_(pickle, in->key_count);
      for (i = 0; i < in->key_count; i++) {
        hashfmt_pickle_text_(pickle, in->keys[i]);
      }
      hashfmt_pickle_tuple_end_(pickle, in->key_count);
    }
    hashfmt_pickle_tuple_end_(pickle, 3);
  }
  hashfmt_pickle_op_(pickle, '.');
}

static int hashfmt_vllm_hash_(const hashfmt_vllm_input_ *in, uint8_t digest[32]) {
  hashfmt_sha256_state sha;
  hashfmt_pickle_ pickle = {NULL, 0};
  uint64_t frame_len;
  hashfmt_vllm_put_(&pickle, in);
  frame_len = pickle.len;
  if (frame_len > HASHFMT_PICKLE_FRAME_MAX_) {
    return HASHFMT_ERR_LIMIT;
  }
  hashfmt_sha256_init(&sha);
  pickle.sha = &sha;
  hashfmt_pickle_op_(&pickle, 0x80); /* protocol */
  hashfmt_pickle_op_(&pickle, 5);
  hashfmt_pickle_op_(&pickle, 0x95); /* frame */
  hashfmt_pickle_le_(&pickle, frame_len, 8);
  hashfmt_vllm_put_(&pickle, in);
  hashfmt_sha256_final(&sha, digest);
  return HASHFMT_OK;
}

HASHFMT_IMPL_API_ int hashfmt_vllm_root(hashfmt_text seed, uint8_t digest[32]) {
  hashfmt_vllm_input_ in = {{NULL, 0}, NULL, NULL, 0, NULL, 0};
  if (digest == NULL || (seed.bytes == NULL && seed.len > 0)) {
    return HASHFMT_ERR_ARG;
  }
  in.seed = seed;
  return hashfmt_vllm_hash_(&in, digest);
}

HASHFMT_IMPL_API_ int hashfmt_vllm_block(const uint8_t parent[32], const uint32_t *tokens,
                                         size_t token_count, const hashfmt_text *keys,
                                         size_t key_count, uint8_t digest[32]) {
  hashfmt_vllm_input_ in = {{NULL, 0}, NULL, NULL, 0, NULL, 0};
  if (parent == NULL || digest == NULL || (tokens == NULL && token_count > 0) ||
      (keys == NULL && key_count > 0)) {
    return HASHFMT_ERR_ARG;
  }
  in.parent = parent;
  in.tokens = tokens;
  in.token_count = token_count;
  in.keys = keys;
  in.key_count = key_count;
  return hashfmt_vllm_hash_(&in, digest);
}

HASHFMT_IMPL_API_ void hashfmt_sglang_page(const uint8_t *parent, const uint32_t *tokens,
                                           size_t token_count, uint8_t digest[32]) {
  hashfmt_sha256_state sha;
  size_t i;
  hashfmt_sha256_init(&sha);
  hashfmt_sha256_update(&sha, parent, parent == NULL ? 0 : 32);
  for (i = 0; i < token_count; i++) {
    const uint32_t token = tokens[i];
    const uint8_t bytes[4] = {(uint8_t)token, (uint8_t)(token >> 8), (uint8_t)(token >> 16),
                              (uint8_t)(token >> 24)};
    hashfmt_sha256_update(&sha, bytes, sizeof bytes);
  }
  hashfmt_sha256_final(&sha, digest);
}
#endif /* HASHFMT_ENGINE_HASHES */

#ifdef __cplusplus
}
#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif
#endif

#endif /* implementation */
