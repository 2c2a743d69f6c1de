/* SPDX-License-Identifier: Apache-2.0 */

/* The one unit of libkvrelay.a that holds the definitions of the three cores. */

#define HASHFMT_IMPLEMENTATION
#define CKF_IMPLEMENTATION
#define KVRELAY_IMPLEMENTATION

#include "ckf.h"
#include "hashfmt.h"
#include "kvrelay.h"
