/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VECTORS_RUN_H_
#define VECTORS_RUN_H_

/* Between run_vectors.c and vectors.c: a vector runs inside a guard that catches unreadable values.
 */

#include "vectors.h"

#include <setjmp.h>

typedef struct vec_guard {
  jmp_buf back;
  char what[160];
} vec_guard;

/* Runs one vector. A value that a reader of vectors.h refuses makes it VEC_FAILED with the reason.
 */
int vec_run_guarded(const vec_kind *kind, const json_t *vector, char *why, size_t why_cap);

#endif
