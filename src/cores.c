/* SPDX-License-Identifier: Apache-2.0 */

/* The one unit of libkvrelay.a that holds the definitions of the three cores. */

#include <stddef.h>

#define HASHFMT_IMPLEMENTATION
#define CKF_IMPLEMENTATION
#define KVRELAY_IMPLEMENTATION

#if __has_include("hashfmt.h")
#include "hashfmt.h"
#endif
#if __has_include("ckf.h")
#include "ckf.h"
#endif
#if __has_include("kvrelay.h") && __has_include("ckf.h")
#include "kvrelay.h"
#endif
