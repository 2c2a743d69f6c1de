/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of calls: any order of taking, resizing and giving back, beside the bytes that were put
 * in. */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "transports/grpc/grpc_pool.h"

#define PIECES 200

static kvrelay_grpc_pool pool;
static struct {
  uint8_t *bytes;
  size_t len;
  uint8_t fill;
} pieces[PIECES];

static bool whole(size_t i, size_t len) {
  for (size_t at = 0; at < len; at++)
    if (pieces[i].bytes[at] != pieces[i].fill)
      return false;
  return true;
}

static void fill(size_t i, size_t len, uint32_t dice) {
  cr_assert_eq((uintptr_t)pieces[i].bytes % 16, 0);
  pieces[i].len = len;
  pieces[i].fill = (uint8_t)(dice >> 24);
  memset(pieces[i].bytes, pieces[i].fill, len);
}

Test(grpc_pool, pieces_do_not_overlap_whatever_the_order) {
  nghttp2_mem *mem = &pool.mem;
  uint32_t dice = 7;
  kvrelay_grpc_pool_init(&pool);
  for (int step = 0; step < 200000; step++) {
    dice = dice * 1664525 + 1013904223;
    const size_t i = (dice >> 8) % PIECES, len = (dice >> 16) % 7 == 0 ? dice >> 19 : dice >> 25;
    cr_assert(pieces[i].bytes == NULL || whole(i, pieces[i].len), "step %d", step);
    if (pieces[i].bytes == NULL && step % 2 == 0) {
      pieces[i].bytes = mem->malloc(len, mem->mem_user_data);
    } else if (pieces[i].bytes == NULL) {
      pieces[i].bytes = mem->calloc(len, 1, mem->mem_user_data);
      for (size_t at = 0; at < len; at++)
        cr_assert_eq(pieces[i].bytes[at], 0);
    } else if (step % 3 == 0) {
      const size_t kept = len < pieces[i].len ? len : pieces[i].len;
      pieces[i].bytes = mem->realloc(pieces[i].bytes, len, mem->mem_user_data);
      cr_assert(whole(i, kept), "step %d", step);
    } else {
      mem->free(pieces[i].bytes, mem->mem_user_data);
      pieces[i].bytes = NULL;
      continue;
    }
    cr_assert_not_null(pieces[i].bytes);
    fill(i, len, dice);
  }
  for (size_t i = 0; i < PIECES; i++) {
    mem->free(pieces[i].bytes, mem->mem_user_data); /* NULL too */
    pieces[i].bytes = NULL;
  }
  kvrelay_grpc_pool_close(&pool);
}

Test(grpc_pool, what_is_kept_is_bounded) {
  enum { LEN = 1000, COUNT = 3000 };
  nghttp2_mem *mem = &pool.mem;
  void **all = malloc(COUNT * sizeof *all);
  kvrelay_grpc_pool_init(&pool);
  for (size_t i = 0; i < COUNT; i++)
    all[i] = mem->malloc(LEN, mem->mem_user_data);
  cr_expect_eq(pool.kept_, 0);
  for (size_t i = 0; i < COUNT; i++)
    mem->free(all[i], mem->mem_user_data);
  cr_expect_leq(pool.kept_, 1 << 20);
  void *large = mem->malloc(100000, mem->mem_user_data);
  const size_t kept = pool.kept_;
  mem->free(large, mem->mem_user_data);
  cr_expect_eq(pool.kept_, kept, "large pieces are not kept");
  void *again = mem->malloc(LEN, mem->mem_user_data);
  cr_expect(kept == 0 || pool.kept_ < kept, "what is kept is used");
  mem->free(again, mem->mem_user_data);
  kvrelay_grpc_pool_close(&pool);
  free(all);
}

Test(grpc_pool, sizes_that_no_memory_has) {
  nghttp2_mem *mem = &pool.mem;
  kvrelay_grpc_pool_init(&pool);
  for (size_t less = 0; less < 48; less++) {
    cr_expect_null(mem->malloc(SIZE_MAX - less, mem->mem_user_data));
    cr_expect_null(mem->calloc(SIZE_MAX - less, 2, mem->mem_user_data));
  }
  cr_expect_null(mem->calloc(SIZE_MAX / 8 + 1, 8, mem->mem_user_data));
  uint8_t *bytes = mem->malloc(10, mem->mem_user_data);
  memcpy(bytes, "0123456789", 10);
  cr_expect_null(mem->realloc(bytes, SIZE_MAX - 8, mem->mem_user_data));
  cr_expect_arr_eq(bytes, "0123456789", 10);
  mem->free(bytes, mem->mem_user_data);
  kvrelay_grpc_pool_close(&pool);
}
