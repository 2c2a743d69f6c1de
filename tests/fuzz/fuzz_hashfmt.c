/* SPDX-License-Identifier: Apache-2.0 */

/*
 * hashfmt.h: every function that takes bytes, tokens or ranges of others, against the formulas over
 * an independent XXH3, and against itself in pieces.
 *
 * SECURITY.md: 1, 2, 4, 12.
 *
 * Input: one byte that picks the function, then its arguments.
 */

#include "fuzz.h"
#include "hashfmt.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static void put64(uint8_t *out, uint64_t value) {
  for (int i = 0; i < 8; i++)
    out[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t expect_child(uint64_t parent, uint64_t local) {
  uint8_t bytes[16];
  put64(bytes, parent);
  put64(bytes + 8, local);
  return XXH3_64bits_withSeed(bytes, 16, 1337);
}

static uint32_t *take_tokens(fuzz_input *in, size_t *count) {
  size_t bytes;
  uint8_t *raw = fuzz_take(in, in->left / 4 * 4, &bytes);
  *count = bytes / 4;
  uint32_t *tokens = fuzz_alloc(bytes);
  for (size_t i = 0; i < *count; i++)
    tokens[i] = raw[4 * i] | (uint32_t)raw[4 * i + 1] << 8 | (uint32_t)raw[4 * i + 2] << 16 |
                (uint32_t)raw[4 * i + 3] << 24;
  free(raw);
  return tokens;
}

/* Tokens are hashed as little-endian bytes. */
static uint64_t expect_local(const uint32_t *tokens, size_t count, const uint64_t *suffix,
                             size_t suffix_len, uint64_t seed) {
  uint8_t *bytes = fuzz_alloc(count * 4 + suffix_len * 8);
  for (size_t i = 0; i < count; i++)
    for (int b = 0; b < 4; b++)
      bytes[4 * i + (size_t)b] = (uint8_t)(tokens[i] >> 8 * b);
  for (size_t i = 0; i < suffix_len; i++)
    put64(bytes + count * 4 + i * 8, suffix[i]);
  const uint64_t hash = XXH3_64bits_withSeed(bytes, count * 4 + suffix_len * 8, seed);
  free(bytes);
  return hash;
}

static void check_hash(fuzz_input *in) {
  const uint64_t seed = fuzz_number(in, 8);
  size_t len;
  uint8_t *bytes = fuzz_take(in, in->left, &len);
  FUZZ_CHECK(hashfmt_hash64(bytes, len, seed) == XXH3_64bits_withSeed(bytes, len, seed));
  free(bytes);
}

static void check_blake3(fuzz_input *in) {
  const size_t piece = 1 + fuzz_number(in, 2) % 1500;
  size_t len;
  uint8_t *bytes = fuzz_take(in, in->left, &len), whole[32], pieces[32];
  hashfmt_blake3_state state;
  hashfmt_blake3(bytes, len, whole);
  hashfmt_blake3_init(&state);
  for (size_t at = 0; at < len; at += piece) {
    hashfmt_blake3_update(&state, bytes + at, len - at < piece ? len - at : piece);
    hashfmt_blake3_final(&state, pieces); /* leaves the state alone */
  }
  hashfmt_blake3_final(&state, pieces);
  FUZZ_CHECK(memcmp(whole, pieces, 32) == 0);
  free(bytes);
}

static void check_identifier(fuzz_input *in) {
  size_t len;
  uint8_t *id = fuzz_take(in, in->left, &len);
  uint64_t got = 0xABCDEF, expected = 0;
  bool hex = len == 64;
  for (size_t i = 0; i < len && hex; i++)
    hex = memchr("0123456789abcdefABCDEF", id[i], 22) != NULL;
  for (size_t i = 0; i < 16 && hex; i++) {
    const unsigned c = id[i];
    expected = expected << 4 | (c <= '9' ? c - '0' : (c | 0x20u) - 'a' + 10);
  }
  if (!hex)
    expected = XXH3_64bits(id, len);
  const int rc = hashfmt_mm_identifier(id, len, &got);
  FUZZ_CHECK(rc == (len > 0));
  FUZZ_CHECK(got == (len > 0 ? expected : 0xABCDEF));
  free(id);
}

/* All blocks of a request, block by block. */
static void check_blocks(fuzz_input *in) {
  const int32_t format = (int32_t)fuzz_byte(in) % 4;
  const uint32_t block_size = fuzz_byte(in) % 20;
  const uint64_t seed = fuzz_number(in, 1);
  const size_t cap = fuzz_byte(in) % 24;
  size_t count, blocks = 0xB;
  uint32_t *tokens = take_tokens(in, &count);
  uint64_t *local = fuzz_alloc(cap * 8), *sequence = fuzz_alloc(cap * 8), previous = 0;
  const int rc =
      hashfmt_blocks(format, block_size, seed, tokens, count, local, sequence, cap, &blocks);
  const size_t window = block_size + (format == HASHFMT_FORMAT_EAGLE);
  if (block_size == 0 || format < 1 || format > 2) {
    FUZZ_CHECK(rc == (block_size == 0 ? HASHFMT_ERR_ARG : HASHFMT_ERR_UNSUPPORTED));
    FUZZ_CHECK(blocks == 0);
  } else {
    const size_t whole = count < window ? 0 : (count - window) / block_size + 1;
    FUZZ_CHECK(blocks == whole && rc == (whole > cap ? HASHFMT_ERR_NOSPACE : HASHFMT_OK));
    FUZZ_CHECK(hashfmt_block_count(format, block_size, count) == whole);
    for (size_t i = 0; i < whole && i < cap; i++) {
      const uint64_t hash = expect_local(tokens + i * block_size, window, NULL, 0, seed);
      previous = i ? expect_child(previous, hash) : hash;
      FUZZ_CHECK(local[i] == hash && sequence[i] == previous);
    }
  }
  free(sequence);
  free(local);
  free(tokens);
}

static int by_value(const void *x, const void *y) {
  const uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
  return a < b ? -1 : a > b;
}

static void check_mm(fuzz_input *in) {
  enum { OBJECTS = 40 };
  uint64_t objects[OBJECTS] = {0}, sorted[OBJECTS], hash = 1, other = 2;
  const size_t n = fuzz_below(in, OBJECTS);
  const uint64_t seed = fuzz_number(in, 1);
  const uint8_t ids = fuzz_byte(in);
  const hashfmt_mm_tokens tokens_of = {1, 2, ids & 1, ids & 2};
  for (size_t i = 0; i < n; i++)
    objects[i] = fuzz_number(in, 1) * UINT64_C(0x0100000000000001);
  size_t count;
  uint32_t *tokens = take_tokens(in, &count);
  memcpy(sorted, objects, sizeof sorted);
  qsort(sorted, n, sizeof *sorted, by_value);
  FUZZ_CHECK(hashfmt_local_mm(tokens, count, objects, n, seed, &hash) == HASHFMT_OK);
  FUZZ_CHECK(hash == expect_local(tokens, count, sorted, n, seed));
  FUZZ_CHECK(hashfmt_block_mm(tokens, count, objects, n, NULL, seed, &other) == HASHFMT_OK);
  FUZZ_CHECK(other == hash);
  FUZZ_CHECK(hashfmt_block_mm(tokens, count, objects, n, &tokens_of, seed, &other) == HASHFMT_OK);
  bool placeholder = false;
  for (size_t i = 0; i < count; i++)
    placeholder |=
        (tokens_of.has_image && tokens[i] == 1) || (tokens_of.has_video && tokens[i] == 2);
  FUZZ_CHECK(placeholder || other == hash);
  free(tokens);
}

/* Ranges of a request, cut into blocks: position by position. */
static void check_ranges(fuzz_input *in) {
  enum { RANGES = 12, TOTAL = 64 };
  hashfmt_mm_range ranges[RANGES] = {{0, 0, 0}};
  uint64_t objects[RANGES];
  const size_t n = fuzz_below(in, RANGES), cap = fuzz_below(in, RANGES);
  const uint64_t total = 1 + fuzz_below(in, TOTAL);
  const uint32_t block_size = 1 + fuzz_below(in, 20);
  const uint64_t block = fuzz_below(in, TOTAL);
  for (size_t i = 0; i < n; i++) {
    ranges[i].mm_hash = fuzz_byte(in) % 5;
    ranges[i].start = fuzz_edge(in) + fuzz_byte(in) % 64;
    ranges[i].end = fuzz_edge(in) + fuzz_byte(in) % 64;
  }
  size_t len = 0xFF, expected_len = 0;
  uint64_t expected[RANGES];
  for (size_t i = 0; i < n; i++) {
    uint64_t first = UINT64_MAX, last = 0, start = 0xA, end = 0xB;
    for (uint64_t at = block * block_size; at < (block + 1) * block_size && at < total; at++)
      if (at >= ranges[i].start && at < ranges[i].end) {
        first = first < at ? first : at;
        last = at + 1;
      }
    const bool there = hashfmt_mm_piece(&ranges[i], total, block_size, block, &start, &end);
    FUZZ_CHECK(there == (last > 0));
    FUZZ_CHECK(there ? start == first && end == last : start == 0xA && end == 0xB);
    bool known = !there;
    for (size_t j = 0; j < expected_len; j++)
      known |= expected[j] == ranges[i].mm_hash;
    if (!known)
      expected[expected_len++] = ranges[i].mm_hash;
  }
  const int rc = hashfmt_mm_entry(ranges, n, total, block_size, block, objects, cap, &len);
  FUZZ_CHECK(rc == (expected_len > cap ? HASHFMT_ERR_NOSPACE : HASHFMT_OK));
  for (size_t i = 0; i < expected_len && i < cap; i++)
    FUZZ_CHECK(objects[i] == expected[i]);
  FUZZ_CHECK(rc != HASHFMT_OK || len == expected_len);
}

static void check_pairs(fuzz_input *in) {
  const size_t room = fuzz_byte(in) % 40;
  size_t count, tokens_len = 0, gaps = 0, expected_gaps = 0;
  uint32_t *pairs = take_tokens(in, &count);
  const size_t n = count / 2, need = n ? n + 1 : 0;
  uint32_t *tokens = fuzz_alloc(room * 4);
  const int rc = hashfmt_pairs_flatten(pairs, n, tokens, room, &tokens_len, &gaps);
  FUZZ_CHECK(rc == (need > room ? HASHFMT_ERR_NOSPACE : HASHFMT_OK) && tokens_len == need);
  for (size_t i = 0; i + 1 < n; i++)
    expected_gaps += pairs[2 * i + 1] != pairs[2 * i + 2];
  for (size_t i = 0; i < room; i++)
    FUZZ_CHECK(tokens[i] == (rc != HASHFMT_OK || i >= need ? 0
                             : i < n                       ? pairs[2 * i]
                                                           : pairs[2 * n - 1]));
  FUZZ_CHECK(rc != HASHFMT_OK || gaps == expected_gaps);
  free(tokens);
  free(pairs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static void (*const functions[])(fuzz_input *) = {check_hash,   check_blake3, check_identifier,
                                                    check_blocks, check_mm,     check_ranges,
                                                    check_pairs};
  fuzz_input in = {data, len};
  functions[fuzz_byte(&in) % (sizeof functions / sizeof *functions)](&in);
  return 0;
}
