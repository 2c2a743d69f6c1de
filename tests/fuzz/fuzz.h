/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FUZZ_H_
#define FUZZ_H_

/*
 * A fuzz target is one file with one function: it turns any bytes into calls of one entry point
 * and compares what comes back with a model of plain lists. Linked with libFuzzer it looks for
 * inputs by itself; linked with driver.c it reads inputs from files, folders or stdin.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** Runs one input, and returns 0, only when everything held. libFuzzer gives the name. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

/* Ends the process: the input that did it is the finding. */
#define FUZZ_CHECK(COND) ((COND) ? (void)0 : fuzz_fail(__FILE__, __LINE__, #COND))

__attribute__((noreturn)) static inline void fuzz_fail(const char *file, int line,
                                                       const char *what) {
  fflush(stdout);
  fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
  abort();
}

/* What is left of an input. Behind its end everything reads as 0. */
typedef struct fuzz_input {
  const uint8_t *at;
  size_t left;
} fuzz_input;

static inline uint64_t fuzz_number(fuzz_input *in, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes && in->left > 0; i++, in->at++, in->left--)
    value |= (uint64_t)*in->at << 8 * i;
  return value;
}

static inline uint8_t fuzz_byte(fuzz_input *in) { return (uint8_t)fuzz_number(in, 1); }

/* 0 .. limit - 1, from as few bytes as that takes; limit is not 0. */
static inline uint32_t fuzz_below(fuzz_input *in, uint32_t limit) {
  return (uint32_t)(fuzz_number(in, limit <= 256 ? 1 : limit <= 65536 ? 2 : 4) % limit);
}

static inline bool fuzz_bit(fuzz_input *in) { return fuzz_byte(in) & 1; }

/* A 64-bit number that is small, next to the end, or anything. */
static inline uint64_t fuzz_edge(fuzz_input *in) {
  const uint8_t shape = fuzz_byte(in);
  if (shape < 192)
    return shape % 8;
  return shape < 224 ? UINT64_MAX - shape % 4 : fuzz_number(in, 8);
}

static inline void *fuzz_alloc(size_t len) {
  void *memory = calloc(len ? len : 1, 1);
  if (!memory)
    abort();
  return memory;
}

/* A copy that ends where it ends, so that a sanitizer sees the first byte behind it; freed by the
 * caller. */
static inline uint8_t *fuzz_copy(const uint8_t *bytes, size_t len) {
  uint8_t *copy = fuzz_alloc(len);
  if (len)
    memcpy(copy, bytes, len);
  return copy;
}

/* The next `len` bytes, fewer at the end (*got says how many); freed by the caller. */
static inline uint8_t *fuzz_take(fuzz_input *in, size_t len, size_t *got) {
  *got = len < in->left ? len : in->left;
  uint8_t *copy = fuzz_copy(in->at, *got);
  in->at += *got;
  in->left -= *got;
  return copy;
}

#endif
