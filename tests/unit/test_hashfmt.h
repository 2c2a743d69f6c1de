/* SPDX-License-Identifier: Apache-2.0 */

/* For tests of hashfmt.h: random numbers, and the definition of its hashes by the xxHash library.
 */

#ifndef TEST_HASHFMT_H
#define TEST_HASHFMT_H

#include "hashfmt.h"

#include <stdlib.h>
#include <xxhash.h>

static uint64_t random_state = 1;

/* splitmix64; every test starts its own process with the same state. */
static inline uint64_t draw(void) {
  uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}

static inline void put_le(uint8_t *to, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    to[i] = (uint8_t)(value >> 8 * i);
}

static inline int ascending(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

/* The definition, spelled out: serialise, sort, serialise, hash with the library. */
static inline uint64_t model_local(const uint32_t *tokens, size_t token_count, const uint64_t *mm,
                                   size_t mm_len, uint64_t seed) {
  const size_t len = 4 * token_count + 8 * mm_len;
  uint8_t *bytes = malloc(len + 1);
  uint64_t *sorted = malloc(8 * mm_len + 1);
  for (size_t i = 0; i < token_count; i++)
    put_le(bytes + 4 * i, tokens[i], 4);
  for (size_t i = 0; i < mm_len; i++)
    sorted[i] = mm[i];
  qsort(sorted, mm_len, sizeof *sorted, ascending);
  for (size_t i = 0; i < mm_len; i++)
    put_le(bytes + 4 * token_count + 8 * i, sorted[i], 8);
  const uint64_t hash = XXH3_64bits_withSeed(bytes, len, seed);
  free(bytes);
  free(sorted);
  return hash;
}

static inline uint64_t model_child(uint64_t parent, uint64_t local) {
  uint8_t bytes[16];
  put_le(bytes, parent, 8);
  put_le(bytes + 8, local, 8);
  return XXH3_64bits_withSeed(bytes, sizeof bytes, 1337);
}

#endif
