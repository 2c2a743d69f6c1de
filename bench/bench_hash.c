/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does it cost to turn a prompt of 100,000 tokens into keys? Per block: the local hashes
 * alone, by this library and by xxHash; local and sequence hashes together; one step of the chain.
 * BLAKE3 by the byte.
 */

#include "bench.h"
#include "hashfmt.h"

#include <xxhash.h>

enum { TOKENS = 100000, REPEAT = 20, DIGEST_BYTES = 1 << 20 };

static uint32_t tokens[TOKENS];
static uint64_t local[TOKENS], sequence[TOKENS];
static uint8_t bytes[DIGEST_BYTES];

typedef void work(uint32_t block_size);

static void whole_prompt(uint32_t block_size, uint64_t *want_local, uint64_t *want_sequence) {
  size_t count;
  bench_need(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, block_size, HASHFMT_CHAIN_SEED, tokens, TOKENS,
                            want_local, want_sequence, TOKENS, &count) == HASHFMT_OK);
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

static void report(const char *name, work *run, uint32_t block_size) {
  const double blocks = (double)REPEAT * (double)(TOKENS / block_size);
  bench_sample cost = {0};
  run(block_size); /* pages and caches are warm before the first run */
  for (int i = 0; i < BENCH_RUNS; i++) {
    const double start = bench_cpu_ns();
    for (int k = 0; k < REPEAT; k++) {
      run(block_size);
      BENCH_KEEP(local[0] + sequence[0]);
    }
    bench_add(&cost, (bench_cpu_ns() - start) / blocks);
  }
  bench_print(&cost, "ns", "hash_%s_%u", name, (unsigned)block_size);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  static const uint32_t block_sizes[] = {16, 64, 256};
  bench_sample rate = {0};
  bench_start();
  for (size_t i = 0; i < TOKENS; i++)
    tokens[i] = (uint32_t)i * 2654435761u % 128000;
  for (size_t b = 0; b < sizeof block_sizes / sizeof *block_sizes; b++) {
    report("local", local_hashes, block_sizes[b]);
    report("local_by_library", library_hashes, block_sizes[b]);
    report("local_and_sequence", keys, block_sizes[b]);
    report("sequence_step", chain_steps, block_sizes[b]);
  }
  for (size_t i = 0; i < DIGEST_BYTES; i++)
    bytes[i] = (uint8_t)(i % 251);
  for (int i = 0; i < BENCH_RUNS; i++) {
    uint8_t out[32];
    const double start = bench_cpu_ns();
    hashfmt_blake3(bytes, sizeof bytes, out);
    BENCH_KEEP(out[0]);
    bench_add(&rate, DIGEST_BYTES * 1e3 / (bench_cpu_ns() - start));
  }
  bench_print(&rate, "MB/s", "hash_blake3");
  return 0;
}
