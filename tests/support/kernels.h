/* SPDX-License-Identifier: Apache-2.0 */

/* The search of ckf.h compiled with one kernel each; the library has the one of its compiler flags.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include "ckf.h"

int portable_find(const ckf_table *table, ckf_query *query, ckf_matches *out);

#ifdef __x86_64__
int avx2_find(const ckf_table *table, ckf_query *query, ckf_matches *out);
#endif

#endif
