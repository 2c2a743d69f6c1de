/* SPDX-License-Identifier: Apache-2.0 */

/* The one unit of libkvrelay.a that holds the definitions of the cores. */

#define HASHFMT_IMPLEMENTATION
#define CKF_IMPLEMENTATION
#define CKF_INGEST_IMPLEMENTATION
#define KVRELAY_IMPLEMENTATION

#include "ckf.h"
#include "ckf_ingest.h"
#include "hashfmt.h"
#include "kvrelay.h"
