/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_pool.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KEEP_BYTES 0
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define KEEP_BYTES 0
#endif
#ifndef KEEP_BYTES
#define KEEP_BYTES ((size_t)1 << 20)
#endif

typedef struct kvrelay_grpc_piece {
  _Alignas(16) size_t steps; /* what follows has so many times KVRELAY_GRPC_POOL_STEP bytes */
  struct kvrelay_grpc_piece *next;
} piece;

static piece *piece_of(void *bytes) { return (piece *)bytes - 1; }

static void *take(size_t size, void *pool_) {
  kvrelay_grpc_pool *pool = pool_;
  if (size > SIZE_MAX - sizeof(piece) - KVRELAY_GRPC_POOL_STEP)
    return NULL;
  const size_t steps = (size + KVRELAY_GRPC_POOL_STEP - 1) / KVRELAY_GRPC_POOL_STEP;
  piece *p = steps < KVRELAY_GRPC_POOL_SIZES ? pool->free_[steps] : NULL;
  if (p != NULL) {
    pool->free_[steps] = p->next;
    pool->kept_ -= steps * KVRELAY_GRPC_POOL_STEP;
    return p + 1;
  }
  p = malloc(sizeof *p + steps * KVRELAY_GRPC_POOL_STEP);
  if (p == NULL)
    return NULL;
  p->steps = steps;
  return p + 1;
}

static void give(void *bytes, void *pool_) {
  kvrelay_grpc_pool *pool = pool_;
  if (bytes == NULL)
    return;
  piece *p = piece_of(bytes);
  const size_t size = p->steps * KVRELAY_GRPC_POOL_STEP;
  if (p->steps >= KVRELAY_GRPC_POOL_SIZES || pool->kept_ + size > KEEP_BYTES) {
    free(p);
    return;
  }
  p->next = pool->free_[p->steps];
  pool->free_[p->steps] = p;
  pool->kept_ += size;
}

static void *take_zeroed(size_t count, size_t size, void *pool) {
  if (size != 0 && count > SIZE_MAX / size)
    return NULL;
  void *bytes = take(count * size, pool);
  if (bytes != NULL)
    memset(bytes, 0, count * size);
  return bytes;
}

static void *resize(void *bytes, size_t size, void *pool) {
  const size_t room = bytes != NULL ? piece_of(bytes)->steps * KVRELAY_GRPC_POOL_STEP : 0;
  if (bytes != NULL && size <= room)
    return bytes;
  void *larger = take(size, pool);
  if (larger != NULL && room > 0)
    memcpy(larger, bytes, room);
  if (larger != NULL)
    give(bytes, pool);
  return larger;
}

void kvrelay_grpc_pool_init(kvrelay_grpc_pool *pool) {
  memset(pool, 0, sizeof *pool);
  pool->mem = (nghttp2_mem){pool, take, give, take_zeroed, resize};
}

void kvrelay_grpc_pool_close(kvrelay_grpc_pool *pool) {
  for (size_t i = 0; i < KVRELAY_GRPC_POOL_SIZES; i++)
    for (piece *p; (p = pool->free_[i]) != NULL; free(p))
      pool->free_[i] = p->next;
}
