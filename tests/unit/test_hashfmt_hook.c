/* SPDX-License-Identifier: Apache-2.0 */

/* All of test_hashfmt.c, with the xxHash library behind HASHFMT_XXH3_64. That the hook is in use
 * shows in the count. */

#include <stddef.h>
#include <stdint.h>
#include <xxhash.h>

static unsigned long hook_calls;

static inline uint64_t hook(const void *data, size_t len, uint64_t seed) {
  hook_calls++;
  return XXH3_64bits_withSeed(data, len, seed);
}

#define HASHFMT_XXH3_64(data, len, seed) hook(data, len, seed)
#include "test_hashfmt.c"

Test(hashfmt, the_hook_takes_every_hash_of_one_piece) {
  const uint32_t tokens[300] = {0};
  const uint64_t mm = 1;
  uint64_t local[4], sequence[4];
  size_t count;
  hook_calls = 0;
  (void)hashfmt_hash64(tokens, 3, 0);
  cr_assert_eq(hook_calls, 1);
  (void)hashfmt_child(1, 2);
  cr_assert_eq(hook_calls, 2);
  cr_assert_eq(hashfmt_local_mm(tokens, 16, &mm, 1, 0, local), HASHFMT_OK);
  cr_assert_eq(hook_calls, 3);
  cr_assert_eq(
      hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 75, 0, tokens, 300, local, sequence, 4, &count),
      HASHFMT_OK);
  /* The first sequence hash is the local hash. Where tokens do not lie in memory as they are
   * hashed, 300 bytes are not in one piece. */
#ifdef HASHFMT_XXH3_LITTLE_ENDIAN
  cr_assert_eq(hook_calls, 3 + 4 + 3);
#else
  cr_assert_eq(hook_calls, 3 + 3);
#endif
}
