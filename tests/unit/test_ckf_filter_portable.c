/* SPDX-License-Identifier: Apache-2.0 */

/* The same tests on the code that every host has, without vector kernels. */

#define CKF_PORTABLE
#define CKF_STATIC
#include "test_ckf_filter.c"
