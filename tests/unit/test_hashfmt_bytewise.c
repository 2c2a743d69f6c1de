/* SPDX-License-Identifier: Apache-2.0 */

/* All of test_hashfmt.c, as a host of unknown byte order runs it, without 128-bit integers. */

#define HASHFMT_BYTEWISE
#undef __SIZEOF_INT128__
#include "test_hashfmt.c"

#ifdef HASHFMT_XXH3_LITTLE_ENDIAN
#error "the byte order was taken for known"
#endif
