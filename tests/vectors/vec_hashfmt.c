/* SPDX-License-Identifier: Apache-2.0 */

/* Kinds of hashfmt.json. */

#include "vectors.h"

#define HASHFMT_STATIC
#define HASHFMT_ENGINE_HASHES
#include "hashfmt.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static int expect_u64(const char *what, size_t index, uint64_t got, const json_t *want, char *why,
                      size_t why_cap) {
  if (got == vec_u64(want))
    return VEC_PASSED;
  return vec_fail(why, why_cap, "%s %zu is %" PRIu64 ", wanted %" PRIu64, what, index, got,
                  vec_u64(want));
}

/* A string or null; *len is 0 for null. */
static const uint8_t *optional_bytes(const json_t *value, size_t *len) {
  *len = 0;
  if (json_is_null(value))
    return NULL;
  const char *text = vec_str(value);
  *len = json_string_length(value);
  return (const uint8_t *)text;
}

static uint64_t seed_of(const json_t *input) {
  size_t lora_len, ns_len;
  const uint8_t *lora = optional_bytes(vec_get(input, "lora_name"), &lora_len);
  const uint8_t *ns = optional_bytes(vec_get(input, "cache_namespace"), &ns_len);
  return hashfmt_seed(lora, lora_len, ns, ns_len);
}

static int32_t format_of(const json_t *value) {
  const char *name = vec_str(value);
  if (strcmp(name, "DYNAMO_STANDARD_V1") == 0)
    return HASHFMT_FORMAT_STANDARD;
  if (strcmp(name, "DYNAMO_EAGLE_V1") == 0)
    return HASHFMT_FORMAT_EAGLE;
  return HASHFMT_FORMAT_UNSPECIFIED;
}

static int run_bytes(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  const json_t *text = vec_get(input, "utf8");
  const uint64_t hash =
      hashfmt_hash64(vec_str(text), json_string_length(text), vec_u64(vec_get(input, "seed")));
  return expect_u64("hash", 0, hash, vec_get(vec_get(vector, "expected"), "hash"), why, why_cap);
}

static int run_seed(const json_t *vector, char *why, size_t why_cap) {
  return expect_u64("seed", 0, seed_of(vec_get(vector, "input")),
                    vec_get(vec_get(vector, "expected"), "seed"), why, why_cap);
}

/* The blocks of a vector one by one, with the objects of each; NULL where mm has no entry. */
static int check_block_by_block(const json_t *input, const json_t *expected, uint64_t seed,
                                const uint32_t *tokens, char *why, size_t why_cap) {
  const int32_t format = format_of(vec_get(input, "format"));
  const uint32_t block_size = (uint32_t)vec_u64(vec_get(input, "block_size"));
  const size_t window = (size_t)hashfmt_window_len(format, block_size);
  const json_t *want_local = vec_get(expected, "local");
  const json_t *want_sequence = vec_get(expected, "sequence");
  const json_t *mm = vec_get(input, "mm");
  hashfmt_chain chain;
  hashfmt_chain_init(&chain);
  for (size_t k = 0; k < json_array_size(want_local); k++) {
    const json_t *objects = json_array_get(mm, k); /* NULL when mm is null or short */
    size_t mm_len = 0;
    uint64_t *mm_hashes = json_is_array(objects) ? vec_u64s(objects, &mm_len) : NULL;
    uint64_t local = 0;
    const int err =
        hashfmt_local_mm(tokens + k * block_size, window, mm_hashes, mm_len, seed, &local);
    free(mm_hashes);
    if (err != HASHFMT_OK)
      return vec_fail(why, why_cap, "local %zu: %s", k, hashfmt_strerror(err));
    if (!expect_u64("local", k, local, json_array_get(want_local, k), why, why_cap) ||
        !expect_u64("sequence", k, hashfmt_chain_next(&chain, local),
                    json_array_get(want_sequence, k), why, why_cap))
      return VEC_FAILED;
  }
  return VEC_PASSED;
}

static int check_whole_request(const json_t *input, const json_t *expected, uint64_t seed,
                               const uint32_t *tokens, size_t token_count, char *why,
                               size_t why_cap) {
  const json_t *want_local = vec_get(expected, "local");
  const json_t *want_sequence = vec_get(expected, "sequence");
  const size_t cap = json_array_size(want_local) + 1;
  uint64_t *local = calloc(cap, sizeof *local);
  uint64_t *sequence = calloc(cap, sizeof *sequence);
  size_t count = 0;
  const int err = hashfmt_blocks(format_of(vec_get(input, "format")),
                                 (uint32_t)vec_u64(vec_get(input, "block_size")), seed, tokens,
                                 token_count, local, sequence, cap, &count);
  int result = VEC_PASSED;
  if (err != HASHFMT_OK)
    result = vec_fail(why, why_cap, "blocks: %s", hashfmt_strerror(err));
  for (size_t k = 0; result == VEC_PASSED && k < count; k++) {
    result = expect_u64("blocks: local", k, local[k], json_array_get(want_local, k), why, why_cap);
    if (result == VEC_PASSED)
      result = expect_u64("blocks: sequence", k, sequence[k], json_array_get(want_sequence, k), why,
                          why_cap);
  }
  free(local);
  free(sequence);
  return result;
}

static int run_blocks(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  const json_t *expected = vec_get(vector, "expected");
  const size_t want_count = json_array_size(vec_get(expected, "local"));
  const uint64_t seed = seed_of(input);
  size_t token_count;
  uint32_t *tokens = vec_u32s(vec_get(input, "tokens"), &token_count);
  const uint64_t count =
      hashfmt_block_count(format_of(vec_get(input, "format")),
                          (uint32_t)vec_u64(vec_get(input, "block_size")), token_count);
  int result = expect_u64("seed", 0, seed, vec_get(expected, "seed"), why, why_cap);
  if (result == VEC_PASSED &&
      (count != want_count || count != json_array_size(vec_get(expected, "sequence"))))
    result = vec_fail(why, why_cap, "%" PRIu64 " blocks, wanted %zu", count, want_count);
  if (result == VEC_PASSED)
    result = check_block_by_block(input, expected, seed, tokens, why, why_cap);
  if (result == VEC_PASSED && json_is_null(vec_get(input, "mm")))
    result = check_whole_request(input, expected, seed, tokens, token_count, why, why_cap);
  free(tokens);
  return result;
}

static int run_chain(const json_t *vector, char *why, size_t why_cap) {
  const json_t *want = vec_get(vec_get(vector, "expected"), "sequence");
  size_t len;
  uint64_t *local = vec_u64s(vec_get(vec_get(vector, "input"), "local"), &len);
  hashfmt_chain chain;
  int result = VEC_PASSED;
  if (len != json_array_size(want))
    result = vec_fail(why, why_cap, "%zu locals, %zu sequence hashes", len, json_array_size(want));
  hashfmt_chain_init(&chain);
  for (size_t k = 0; result == VEC_PASSED && k < len; k++)
    result = expect_u64("sequence", k, hashfmt_chain_next(&chain, local[k]),
                        json_array_get(want, k), why, why_cap);
  free(local);
  return result;
}

static int check_windows(int32_t format, uint32_t block_size, const uint32_t *tokens,
                         size_t token_count, const json_t *want, char *why, size_t why_cap) {
  const uint64_t count = hashfmt_block_count(format, block_size, token_count);
  const size_t window = (size_t)hashfmt_window_len(format, block_size);
  int result = VEC_PASSED;
  if (count != json_array_size(want))
    return vec_fail(why, why_cap, "%" PRIu64 " windows, wanted %zu", count, json_array_size(want));
  for (size_t k = 0; result == VEC_PASSED && k < count; k++) {
    size_t len;
    uint32_t *want_tokens = vec_u32s(json_array_get(want, k), &len);
    if (len != window || memcmp(tokens + k * block_size, want_tokens, window * sizeof *tokens) != 0)
      result = vec_fail(why, why_cap, "window %zu differs", k);
    free(want_tokens);
  }
  return result;
}

static int run_windows(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  size_t token_count;
  uint32_t *tokens = vec_u32s(vec_get(input, "tokens"), &token_count);
  const int result = check_windows(
      format_of(vec_get(input, "format")), (uint32_t)vec_u64(vec_get(input, "block_size")), tokens,
      token_count, vec_get(vec_get(vector, "expected"), "windows"), why, why_cap);
  free(tokens);
  return result;
}

static int run_bigram(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  const json_t *expected = vec_get(vector, "expected");
  const json_t *pairs = vec_get(input, "pairs");
  const size_t pair_count = json_array_size(pairs);
  size_t want_len, count = 0;
  uint32_t *want_tokens = vec_u32s(vec_get(expected, "tokens"), &want_len);
  uint32_t *numbers = calloc(2 * pair_count + 1, sizeof *numbers);
  uint32_t *tokens = calloc(pair_count + 1, sizeof *tokens);
  for (size_t i = 0; i < 2 * pair_count; i++)
    numbers[i] = (uint32_t)vec_u64(json_array_get(json_array_get(pairs, i / 2), i % 2));
  int result = VEC_PASSED;
  const int err = hashfmt_pairs_flatten(numbers, pair_count, tokens, pair_count + 1, &count, NULL);
  if (err != HASHFMT_OK)
    result = vec_fail(why, why_cap, "pairs: %s", hashfmt_strerror(err));
  else if (count != want_len || memcmp(tokens, want_tokens, count * sizeof *tokens) != 0)
    result = vec_fail(why, why_cap, "flat tokens differ");
  else
    result = check_windows(format_of(vec_get(expected, "format")),
                           (uint32_t)vec_u64(vec_get(input, "block_size")), tokens, count,
                           vec_get(expected, "windows"), why, why_cap);
  free(want_tokens);
  free(numbers);
  free(tokens);
  return result;
}

static int run_pad_value(const json_t *vector, char *why, size_t why_cap) {
  return expect_u64("token", 0,
                    hashfmt_pad_value(vec_u64(vec_get(vec_get(vector, "input"), "mm_hash"))),
                    vec_get(vec_get(vector, "expected"), "token"), why, why_cap);
}

static int run_mm_identifier(const json_t *vector, char *why, size_t why_cap) {
  const json_t *id = vec_get(vec_get(vector, "input"), "identifier");
  uint64_t mm_hash = 0;
  if (!hashfmt_mm_identifier((const uint8_t *)vec_str(id), json_string_length(id), &mm_hash))
    return vec_fail(why, why_cap, "no object");
  return expect_u64("mm_hash", 0, mm_hash, vec_get(vec_get(vector, "expected"), "mm_hash"), why,
                    why_cap);
}

/* One block of one member, in the plainest form: a list that is searched from the start. */
typedef struct mapping {
  uint64_t worker_id, dp_rank, external, canonical;
} mapping;

static const mapping *find_mapping(const mapping *list, size_t len, const mapping *like) {
  for (size_t i = 0; i < len; i++)
    if (list[i].worker_id == like->worker_id && list[i].dp_rank == like->dp_rank &&
        list[i].external == like->external)
      return &list[i];
  return NULL;
}

#define MAPPINGS_CAP 64

static int run_canonical(const json_t *vector, char *why, size_t why_cap) {
  const json_t *owners = vec_get(vec_get(vector, "expected"), "owners");
  mapping list[MAPPINGS_CAP];
  size_t len = 0, s, b;
  json_t *store, *block;
  json_array_foreach (vec_get(vec_get(vector, "input"), "stores"), s, store) {
    const json_t *parent = vec_get(store, "parent");
    mapping next = {vec_u64(vec_get(store, "worker_id")), vec_u64(vec_get(store, "dp_rank")), 0, 0};
    hashfmt_chain chain;
    hashfmt_chain_init(&chain);
    if (!json_is_null(parent)) {
      next.external = vec_u64(parent);
      const mapping *known = find_mapping(list, len, &next);
      if (!known)
        return vec_fail(why, why_cap, "store %zu: unknown parent", s);
      hashfmt_chain_resume(&chain, known->canonical);
    }
    json_array_foreach (vec_get(store, "blocks"), b, block) {
      next.external = vec_u64(vec_get(block, "external"));
      next.canonical = hashfmt_chain_next(&chain, vec_u64(vec_get(block, "tokens_hash")));
      if (find_mapping(list, len, &next))
        continue;
      if (len == MAPPINGS_CAP)
        return vec_fail(why, why_cap, "more than %d mappings", MAPPINGS_CAP);
      list[len++] = next;
    }
  }
  uint64_t total = 0;
  json_t *owner;
  json_array_foreach (owners, s, owner) {
    const uint64_t canonical = vec_u64(vec_get(owner, "canonical"));
    uint64_t count = 0;
    for (size_t i = 0; i < len; i++)
      count += list[i].canonical == canonical;
    if (!expect_u64("count", s, count, vec_get(owner, "count"), why, why_cap))
      return VEC_FAILED;
    total += count;
  }
  return total == len ? VEC_PASSED : vec_fail(why, why_cap, "a canonical hash is not expected");
}

static int run_digest_prefix(const json_t *vector, char *why, size_t why_cap) {
  const json_t *expected = vec_get(vector, "expected");
  size_t len;
  uint8_t *digest = vec_hex(vec_get(vec_get(vector, "input"), "digest_hex"), &len);
  const uint64_t external = len >= 8 ? hashfmt_external_read(digest) : 0;
  free(digest);
  if (len < 8)
    return vec_fail(why, why_cap, "digest too short");
  if (!expect_u64("external", 0, external, vec_get(expected, "external"), why, why_cap))
    return VEC_FAILED;
  return expect_u64("wire_signed", 0, external, vec_get(expected, "wire_signed"), why, why_cap);
}

/* Ids that engines make themselves; takes the next block and gives its id. */
typedef uint64_t engine_next(const uint32_t *tokens, size_t block_size, bool first,
                             uint8_t digest[32]);

static uint64_t vllm_next(const uint32_t *tokens, size_t block_size, bool first,
                          uint8_t digest[32]) {
  (void)first; /* the digest is the root's */
  return hashfmt_vllm_block(digest, tokens, block_size, NULL, 0, digest) == HASHFMT_OK
             ? hashfmt_external_read(digest + 24)
             : 0;
}

static uint64_t sglang_next(const uint32_t *tokens, size_t block_size, bool first,
                            uint8_t digest[32]) {
  hashfmt_sglang_page(first ? NULL : digest, tokens, block_size, digest);
  return hashfmt_external_read(digest);
}

/* The ids of all whole blocks, and where an engine sends them signed, that form. */
static int check_engine(const json_t *vector, engine_next *next, uint8_t digest[32], char *why,
                        size_t why_cap) {
  const json_t *input = vec_get(vector, "input");
  const json_t *expected = vec_get(vector, "expected");
  const json_t *want = vec_get(expected, "external");
  const json_t *want_signed = json_object_get(expected, "wire_signed");
  const size_t block_size = (size_t)vec_u64(vec_get(input, "block_size"));
  size_t tokens_len;
  uint32_t *tokens = vec_u32s(vec_get(input, "tokens"), &tokens_len);
  int verdict = VEC_PASSED;
  if (block_size == 0 || tokens_len / block_size != json_array_size(want))
    verdict = vec_fail(why, why_cap, "%zu ids wanted", json_array_size(want));
  for (size_t i = 0; i < json_array_size(want) && verdict == VEC_PASSED; i++) {
    const uint64_t external = next(tokens + i * block_size, block_size, i == 0, digest);
    verdict = expect_u64("external", i, external, json_array_get(want, i), why, why_cap);
    if (verdict == VEC_PASSED && want_signed)
      verdict =
          expect_u64("wire_signed", i, external, json_array_get(want_signed, i), why, why_cap);
  }
  free(tokens);
  return verdict;
}

static int run_engine_vllm(const json_t *vector, char *why, size_t why_cap) {
  const json_t *seed = vec_get(vec_get(vector, "input"), "python_hash_seed");
  const hashfmt_text text = {(const uint8_t *)vec_str(seed), json_string_length(seed)};
  uint8_t digest[32];
  if (strcmp(vec_str(vec_get(vec_get(vector, "input"), "algorithm")), "sha256") != 0)
    return vec_fail(why, why_cap, "another algorithm");
  if (hashfmt_vllm_root(text, digest) != HASHFMT_OK)
    return vec_fail(why, why_cap, "no root value");
  return check_engine(vector, vllm_next, digest, why, why_cap);
}

static int run_engine_sglang(const json_t *vector, char *why, size_t why_cap) {
  uint8_t digest[32];
  return check_engine(vector, sglang_next, digest, why, why_cap);
}

const vec_kind vec_hashfmt_kinds[] = {
    {"bytes", run_bytes},
    {"seed", run_seed},
    {"blocks", run_blocks},
    {"chain", run_chain},
    {"windows", run_windows},
    {"bigram", run_bigram},
    {"pad_value", run_pad_value},
    {"mm_identifier", run_mm_identifier},
    {"canonical", run_canonical},
    {"digest_prefix", run_digest_prefix},
    {"engine_vllm", run_engine_vllm},
    {"engine_sglang", run_engine_sglang},
    {NULL, NULL},
};
