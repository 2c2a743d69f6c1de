/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VECTORS_H_
#define VECTORS_H_

/*
 * Golden vectors: what a file of kinds has to provide, and helpers to read values.
 *
 * tests/vectors/vec_<domain>.c defines one table that ends with an entry whose kind is NULL:
 *
 *   static int run_chain(const json_t *vector, char *why, size_t why_cap) {
 *     ...
 *     return sum == want ? VEC_PASSED : vec_fail(why, why_cap, "block %zu differs", i);
 *   }
 *   const vec_kind vec_hashfmt_kinds[] = {{"chain", run_chain}, {NULL, NULL}};
 *
 * A vector gets its whole JSON object: {"id": …, "kind": …, "input": …, "expected": …}, in
 * contract.json the entry of the group. Memory from the helpers comes from malloc; the caller frees
 * it.
 */

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* One that passed may leave in `why` what it has to say of itself. */
enum { VEC_FAILED = 0, VEC_PASSED = 1 };

typedef struct vec_kind {
  const char *kind;
  int (*run)(const json_t *vector, char *why, size_t why_cap);
} vec_kind;

extern const vec_kind vec_hashfmt_kinds[]; /* vec_hashfmt.c, hashfmt.json */
extern const vec_kind vec_ckf_kinds[];     /* vec_ckf.c, ckf.json */
extern const vec_kind
    vec_contract_groups[]; /* vec_contract.c, contract.json; the kind is the group's name */
extern const vec_kind vec_planes_groups[]; /* vec_planes.c, more groups of contract.json */
extern const vec_kind vec_events_kinds[];  /* vec_events.c, events.json */

/* Writes the reason and returns VEC_FAILED. */
int vec_fail(char *why, size_t why_cap, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * The readers below end the current vector as failed, with a reason, when the value is missing or
 * has another shape: an unreadable expectation must not pass.
 */

/* Member of an object; must exist. */
json_t *vec_get(const json_t *object, const char *name);

/* A number, a decimal string or "0x…". Negative values come in two's complement. */
uint64_t vec_u64(const json_t *value);

/* vec_u64 of each element; *len gets the count. Never NULL. */
uint64_t *vec_u64s(const json_t *array, size_t *len);

/* vec_u64 of each element, each at most UINT32_MAX; for tokens. Never NULL. */
uint32_t *vec_u32s(const json_t *array, size_t *len);

/* The bytes of a hex string; *len gets the count. Never NULL. */
uint8_t *vec_hex(const json_t *value, size_t *len);

/* A string. */
const char *vec_str(const json_t *value);

#endif
