/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_pool.h - memory for what comes and goes with every call. */
#ifndef KVRELAY_GRPC_POOL_H
#define KVRELAY_GRPC_POOL_H

#include <nghttp2/nghttp2.h>

/*
 * A call takes some twenty small pieces of memory, most of them nghttp2's, and gives them back
 * within microseconds.  Lists of free pieces by size are a tenth of a call faster than malloc
 * (GetRelayInfo of make bench-grpc).  Up to a mebibyte of them is kept.  Built with an address
 * sanitizer nothing is, so that it sees what is used too late.
 *
 * One thread, and fields are private but `mem`.
 */
#define KVRELAY_GRPC_POOL_STEP 32
#define KVRELAY_GRPC_POOL_SIZES 33 /* up to a kibibyte; larger pieces are malloc's */

typedef struct kvrelay_grpc_pool {
  nghttp2_mem
      mem; /* for nghttp2_session_…_new3, and for others: as malloc, free, calloc, realloc */
  struct kvrelay_grpc_piece *free_[KVRELAY_GRPC_POOL_SIZES];
  size_t kept_; /* bytes in free_ */
} kvrelay_grpc_pool;

void kvrelay_grpc_pool_init(kvrelay_grpc_pool *pool);
/* After everything taken from it was given back. */
void kvrelay_grpc_pool_close(kvrelay_grpc_pool *pool);

#endif
