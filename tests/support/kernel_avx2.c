/* SPDX-License-Identifier: Apache-2.0 */

/* Compiled with -mavx2, so nothing here may run where the processor has none. */

#define CKF_STATIC
#include "kernels.h"

#ifdef __x86_64__
#ifndef CKF_KERNEL_AVX2_
#error "this file has to be compiled with -mavx2"
#endif
int avx2_find(const ckf_table *table, ckf_query *query, ckf_matches *out) {
  return ckf_table_find(table, query, out);
}
#endif
