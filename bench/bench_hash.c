/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does it cost to turn a prompt into keys? Nanoseconds per block for local hashes alone, for
 * local and sequence hashes, and for one step of the chain; the same local hashes by the xxHash
 * library; BLAKE3 in MB/s. One JSON line per figure, the best of several rounds.
 */

#include "hashfmt.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <xxhash.h>

enum { TOKENS = 16384, ROUNDS = 25, REPEAT = 20, DIGEST_BYTES = 1 << 20 };

static uint32_t tokens[TOKENS];
static uint64_t local[TOKENS], sequence[TOKENS];
static uint8_t bytes[DIGEST_BYTES];
static volatile uint64_t sink; /* keeps results alive */

typedef void work(uint32_t block_size);

static void whole_prompt(uint32_t block_size, uint64_t *want_local, uint64_t *want_sequence) {
  size_t count;
  if (hashfmt_blocks(HASHFMT_FORMAT_STANDARD, block_size, HASHFMT_CHAIN_SEED, tokens, TOKENS,
                     want_local, want_sequence, TOKENS, &count) != HASHFMT_OK)
    abort();
}

static void local_hashes(uint32_t block_size) { whole_prompt(block_size, local, NULL); }

static void keys(uint32_t block_size) { whole_prompt(block_size, NULL, sequence); }

static void chain_steps(uint32_t block_size) {
  hashfmt_chain chain;
  hashfmt_chain_init(&chain);
  for (size_t k = 0; k < TOKENS / block_size; k++)
    sequence[k] = hashfmt_chain_next(&chain, local[k]);
}

static void library_hashes(uint32_t block_size) {
  for (size_t k = 0; k < TOKENS / block_size; k++)
    local[k] =
        XXH3_64bits_withSeed(tokens + k * block_size, 4 * (size_t)block_size, HASHFMT_CHAIN_SEED);
}

static void digest(uint32_t block_size) {
  uint8_t out[32];
  (void)block_size;
  hashfmt_blake3(bytes, sizeof bytes, out);
  sink += out[0];
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Nanoseconds of one run. */
static double best_ns(work *run, uint32_t block_size, int repeat) {
  uint64_t best = UINT64_MAX;
  for (int round = 0; round < ROUNDS; round++) {
    const uint64_t start = now_ns();
    for (int i = 0; i < repeat; i++)
      run(block_size);
    const uint64_t spent = now_ns() - start;
    best = spent < best ? spent : best;
    sink += sequence[0] + local[0];
  }
  return (double)best / repeat;
}

static void report(const char *name, uint32_t block_size, double value, const char *unit) {
  printf("{\"bench\":\"hash_%s", name);
  if (block_size != 0)
    printf("_%" PRIu32, block_size);
  printf("\",\"value\":%.2f,\"unit\":\"%s\"}\n", value, unit);
}

int main(void) {
  static const struct {
    const char *name;
    work *run;
  } questions[] = {{"local", local_hashes},
                   {"local_and_sequence", keys},
                   {"sequence_step", chain_steps},
                   {"local_by_library", library_hashes}};
  static const uint32_t block_sizes[] = {16, 64, 256};
  for (size_t i = 0; i < TOKENS; i++)
    tokens[i] = (uint32_t)i * 2654435761u;
  for (size_t i = 0; i < DIGEST_BYTES; i++)
    bytes[i] = (uint8_t)(i % 251);
  for (size_t q = 0; q < sizeof questions / sizeof *questions; q++)
    for (size_t b = 0; b < sizeof block_sizes / sizeof *block_sizes; b++) {
      const double blocks = (double)(TOKENS / block_sizes[b]);
      report(questions[q].name, block_sizes[b],
             best_ns(questions[q].run, block_sizes[b], REPEAT) / blocks, "ns/block");
    }
  report("blake3", 0, DIGEST_BYTES / best_ns(digest, 0, 1) * 1e3, "MB/s");
  return 0;
}
