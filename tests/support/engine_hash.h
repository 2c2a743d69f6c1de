/* SPDX-License-Identifier: Apache-2.0 */
/* engine_hash.h - block hashes as engines make them, for doubles of engines only: a relay never
 * computes them. */
#ifndef ENGINE_HASH_H_
#define ENGINE_HASH_H_

#include <stddef.h>
#include <stdint.h>

/*
 * vLLM with its default algorithm: SHA-256 of the Python pickle (protocol 5) of (parent's digest,
 * tuple of tokens, None); the root's parent is the hash of the seed string.  `out` gets one
 * external hash per complete block.  Returns their number, 0 when memory is gone or the seed is
 * above 255 bytes.
 */
size_t engine_hash_vllm(const char *seed, const uint32_t *tokens, size_t tokens_len,
                        size_t block_size, uint64_t *out, size_t cap);
/* SGLang: SHA-256 of the page before's digest, nothing for the first, and the tokens as LE32. */
size_t engine_hash_sglang(const uint32_t *tokens, size_t tokens_len, size_t block_size,
                          uint64_t *out, size_t cap);

#endif
