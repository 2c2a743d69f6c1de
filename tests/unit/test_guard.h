/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_GUARD_H_
#define TEST_GUARD_H_

/* Memory that ends where readable memory ends: one byte too far is a crash, in every build. */

#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static inline size_t guard_pages(size_t len) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (len + page - 1) / page * page;
}

/* `len` zeroed bytes, of any alignment that `len` gives. */
static inline void *guard_alloc(size_t len) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), all = guard_pages(len) + page;
  uint8_t *const map = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  cr_assert_neq((void *)map, MAP_FAILED);
  cr_assert_eq(mprotect(map + all - page, page, PROT_NONE), 0);
  return map + all - page - len;
}

static inline void guard_free(void *at, size_t len) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  uint8_t *const end = (uint8_t *)at + len;
  munmap(end - guard_pages(len), guard_pages(len) + page);
}

static inline void *guard_copy(const void *bytes, size_t len) {
  void *const at = guard_alloc(len);
  if (len > 0)
    memcpy(at, bytes, len);
  return at;
}

#endif
