/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What holds of hashfmt.h for any input: random windows, formats, seeds, objects and rooms against
 * a reference that writes the bytes of the protocol out one by one and hands them to the xxHash
 * library.
 */

#define HASHFMT_STATIC
#include "test_hashfmt.h"

#include <criterion/criterion.h>
#include <string.h>

enum { TOKENS_MAX = 600, MM_MAX = 12 };

static const uint64_t edges[] = {
    0, 1, 0xff, 0x100, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, HASHFMT_CHAIN_SEED};
enum { EDGES = sizeof edges / sizeof *edges };

/* One in four is a number at an edge. */
static uint64_t draw_edgy(void) {
  const uint64_t kind = draw();
  return kind % 4 == 0 ? edges[kind / 4 % EDGES] : draw();
}

/* All complete blocks of a prompt, found by walking it. */
static size_t reference_blocks(bool eagle, size_t block_size, uint64_t seed, const uint32_t *tokens,
                               size_t count, uint64_t *local, uint64_t *sequence) {
  const size_t window = block_size + (eagle ? 1 : 0);
  size_t blocks = 0;
  for (size_t at = 0; at + window <= count; at += block_size, blocks++) {
    local[blocks] = model_local(tokens + at, window, NULL, 0, seed);
    sequence[blocks] = blocks == 0 ? local[0] : model_child(sequence[blocks - 1], local[blocks]);
  }
  return blocks;
}

static uint32_t tokens[TOKENS_MAX];

static void draw_tokens(void) {
  for (size_t i = 0; i < TOKENS_MAX; i++)
    tokens[i] = (uint32_t)draw_edgy();
}

Test(hashfmt_props, every_window_length_with_any_seed) {
  for (size_t count = 0; count <= TOKENS_MAX; count++)
    for (int round = 0; round < 4; round++) {
      const uint64_t seed = draw_edgy();
      draw_tokens();
      cr_assert_eq(hashfmt_local(tokens, count, seed), model_local(tokens, count, NULL, 0, seed),
                   "%zu tokens", count);
    }
}

Test(hashfmt_props, every_short_window_of_edge_tokens) {
  for (size_t count = 0; count <= 3; count++) {
    size_t all = 1;
    for (size_t i = 0; i < count; i++)
      all *= EDGES;
    for (size_t n = 0; n < all; n++) {
      uint32_t window[3] = {0};
      for (size_t i = 0, rest = n; i < count; i++, rest /= EDGES)
        window[i] = (uint32_t)edges[rest % EDGES];
      for (size_t s = 0; s < EDGES; s++)
        cr_assert_eq(hashfmt_local(window, count, edges[s]),
                     model_local(window, count, NULL, 0, edges[s]));
    }
  }
}

Test(hashfmt_props, objects_in_any_order) {
  for (int round = 0; round < 4000; round++) {
    const size_t count = draw() % 200, mm_len = draw() % (MM_MAX + 1);
    const uint64_t seed = draw_edgy();
    uint64_t mm[MM_MAX], got = 0;
    draw_tokens();
    for (size_t i = 0; i < mm_len; i++)
      mm[i] = i > 0 && draw() % 4 == 0 ? mm[draw() % i] : draw_edgy();
    cr_assert_eq(hashfmt_local_mm(tokens, count, mm, mm_len, seed, &got), HASHFMT_OK);
    cr_assert_eq(got, model_local(tokens, count, mm, mm_len, seed));
  }
}

/* Every block size up to beyond the longest length class, both formats, any room for results. What
 * does not fit is not written. */
Test(hashfmt_props, whole_prompt_equals_the_walk) {
  for (uint32_t block_size = 1; block_size <= 130; block_size++)
    for (int eagle = 0; eagle < 2; eagle++)
      for (int round = 0; round < 4; round++) {
        const int32_t format = eagle ? HASHFMT_FORMAT_EAGLE : HASHFMT_FORMAT_STANDARD;
        const size_t count = round == 0 ? TOKENS_MAX : draw() % (TOKENS_MAX + 1);
        const uint64_t seed = draw_edgy(), mark = draw();
        uint64_t want[2][TOKENS_MAX], got[2][TOKENS_MAX + 1];
        size_t blocks, cap, written, found = SIZE_MAX;
        draw_tokens();
        blocks = reference_blocks(eagle, block_size, seed, tokens, count, want[0], want[1]);
        cap = round == 0 ? TOKENS_MAX : draw() % (blocks + 2);
        written = cap < blocks ? cap : blocks;
        got[0][written] = got[1][written] = mark;
        cr_assert_eq(hashfmt_blocks(format, block_size, seed, tokens, count,
                                    round == 2 ? NULL : got[0], round == 3 ? NULL : got[1], cap,
                                    &found),
                     cap < blocks ? HASHFMT_ERR_NOSPACE : HASHFMT_OK);
        cr_assert_eq(found, blocks);
        if (round != 2)
          cr_assert_arr_eq(got[0], want[0], written * sizeof **got, "block size %u", block_size);
        if (round != 3)
          cr_assert_arr_eq(got[1], want[1], written * sizeof **got, "block size %u", block_size);
        cr_assert(got[0][written] == mark && got[1][written] == mark);
      }
}

/* A prompt that grows: the first part hashed whole, the rest below its last block. */
Test(hashfmt_props, a_prompt_may_be_split_at_every_block) {
  static const uint32_t block_sizes[] = {1, 7, 16, 64};
  for (size_t b = 0; b < sizeof block_sizes / sizeof *block_sizes; b++)
    for (int eagle = 0; eagle < 2; eagle++) {
      const int32_t format = eagle ? HASHFMT_FORMAT_EAGLE : HASHFMT_FORMAT_STANDARD;
      const uint32_t block_size = block_sizes[b];
      const uint64_t seed = draw();
      uint64_t want[2][TOKENS_MAX], local[TOKENS_MAX], sequence[TOKENS_MAX];
      size_t blocks;
      draw_tokens();
      blocks = reference_blocks(eagle, block_size, seed, tokens, TOKENS_MAX, want[0], want[1]);
      for (size_t split = 0; split <= blocks; split++) {
        const size_t head = split == 0 ? 0 : split * block_size + (size_t)eagle;
        const size_t skip = split * block_size;
        hashfmt_chain chain;
        size_t first, rest;
        cr_assert_eq(hashfmt_blocks(format, block_size, seed, tokens, head, local, sequence,
                                    TOKENS_MAX, &first),
                     HASHFMT_OK);
        cr_assert_eq(hashfmt_blocks(format, block_size, seed, tokens + skip, TOKENS_MAX - skip,
                                    local + first, NULL, TOKENS_MAX - first, &rest),
                     HASHFMT_OK);
        cr_assert_eq(first, split);
        cr_assert_eq(first + rest, blocks);
        if (first > 0)
          hashfmt_chain_resume(&chain, sequence[first - 1]);
        else
          hashfmt_chain_init(&chain);
        for (size_t i = first; i < blocks; i++)
          sequence[i] = hashfmt_chain_next(&chain, local[i]);
        cr_assert_arr_eq(local, want[0], blocks * sizeof *local);
        cr_assert_arr_eq(sequence, want[1], blocks * sizeof *sequence);
      }
    }
}
