/* SPDX-License-Identifier: Apache-2.0 */

/* Digests as Python's pickle and hashlib give them: the numbers below come from there. `D(x)` is
 * sha256(pickle.dumps(x, protocol=5)). */

#define HASHFMT_STATIC
#define HASHFMT_ENGINE_HASHES
#include "hashfmt.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

/* Fails unless the digest has this hex form. */
#define EXPECT_DIGEST(DIGEST, HEX)                                                                 \
  do {                                                                                             \
    char text_[65];                                                                                \
    for (int i_ = 0; i_ < 32; i_++)                                                                \
      snprintf(text_ + 2 * i_, 3, "%02x", (unsigned)(DIGEST)[i_]);                                 \
    cr_assert_str_eq(text_, HEX);                                                                  \
  } while (0)

static hashfmt_text text_of(const char *text) {
  return (hashfmt_text){(const uint8_t *)text, strlen(text)};
}

/* ---- SHA-256 ---- */

Test(sha256, published_examples) {
  static uint8_t million[1000000];
  uint8_t digest[32];
  hashfmt_sha256(NULL, 0, digest);
  EXPECT_DIGEST(digest, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  hashfmt_sha256((const uint8_t *)"abc", 3, digest);
  EXPECT_DIGEST(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  memset(million, 'a', sizeof million);
  hashfmt_sha256(million, sizeof million, digest);
  EXPECT_DIGEST(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* sha256 over the digests of bytes((7 i + n) & 255 for i in range(n)), n = 0 .. 300. */
Test(sha256, every_length_over_the_borders_of_blocks) {
  uint8_t bytes[300], digest[32];
  hashfmt_sha256_state all;
  hashfmt_sha256_init(&all);
  for (size_t n = 0; n <= sizeof bytes; n++) {
    for (size_t i = 0; i < n; i++)
      bytes[i] = (uint8_t)(7 * i + n);
    hashfmt_sha256(bytes, n, digest);
    hashfmt_sha256_update(&all, digest, sizeof digest);
  }
  hashfmt_sha256_final(&all, digest);
  EXPECT_DIGEST(digest, "60d63ff40b5558727a9b786ac0be9300f7ca58fd9ddd3b2f3681b369018a87dc");
}

Test(sha256, any_split_and_a_look_on_the_way_change_nothing) {
  uint8_t bytes[200], whole[32], digest[32];
  for (size_t i = 0; i < sizeof bytes; i++)
    bytes[i] = (uint8_t)(i * 11);
  hashfmt_sha256(bytes, sizeof bytes, whole);
  for (size_t a = 0; a <= sizeof bytes; a++)
    for (size_t b = a; b <= sizeof bytes; b++) {
      hashfmt_sha256_state state;
      hashfmt_sha256_init(&state);
      hashfmt_sha256_update(&state, bytes, a);
      hashfmt_sha256_update(&state, bytes + a, b - a);
      hashfmt_sha256_final(&state, digest);
      hashfmt_sha256_update(&state, bytes + b, sizeof bytes - b);
      hashfmt_sha256_final(&state, digest);
      cr_assert_arr_eq(digest, whole, 32, "split at %zu and %zu", a, b);
    }
}

/* ---- vLLM ---- */

static void root_of(const char *seed, uint8_t digest[32]) {
  cr_assert_eq(hashfmt_vllm_root(text_of(seed), digest), HASHFMT_OK);
}

Test(vllm, root_values) {
  char seed[257] = "";
  uint8_t digest[32];
  root_of("vllm-none-hash", digest);
  EXPECT_DIGEST(digest, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198");
  root_of("", digest);
  EXPECT_DIGEST(digest, "3279c4b947f331d055c47442171c9ea17712596bd7fe094c31d4a5d432b42d68");
  memset(seed, 's', 255); /* the longest that has its length in one byte */
  root_of(seed, digest);
  EXPECT_DIGEST(digest, "bbcf5327eef153511a61fe20f6ea03c685e9d870ce454d02d528e3324f01cdde");
  memset(seed, 's', 256);
  root_of(seed, digest);
  EXPECT_DIGEST(digest, "ea4333e762a3ec9e34a8f6f89b3789fcdd1c056a956a629c94af3b73f5819e3d");
}

/* D((root, tokens, None or keys)); the digest takes the place of its parent. */
#define EXPECT_BLOCK(TOKENS, COUNT, KEYS, KEY_COUNT, HEX)                                          \
  do {                                                                                             \
    uint8_t digest_[32];                                                                           \
    root_of("vllm-none-hash", digest_);                                                            \
    cr_assert_eq(hashfmt_vllm_block(digest_, TOKENS, COUNT, KEYS, KEY_COUNT, digest_),             \
                 HASHFMT_OK);                                                                      \
    EXPECT_DIGEST(digest_, HEX);                                                                   \
  } while (0)

Test(vllm, numbers_of_every_width) {
  const uint32_t tokens[] = {0, 255, 256, 65535, 65536, 0x7fffffff, 0x80000000, 0xffffffff};
  EXPECT_BLOCK(tokens, 8, NULL, 0,
               "d3c5c0353aa2f6b5c26e455f78af6431170fcbd87a667493ffa1cb84b1df2861");
}

Test(vllm, blocks_of_up_to_three_tokens_have_forms_of_their_own) {
  const uint32_t tokens[] = {7, 8, 9};
  EXPECT_BLOCK(NULL, 0, NULL, 0,
               "6b385b8167a0f2e87a4d0ef604c1a1398e533330e4b2ad529494414c5810ed15");
  EXPECT_BLOCK(tokens, 1, NULL, 0,
               "ad42afba4a7360560993bf7d42e4779856653b1fa26a67489cc9776a59d18d26");
  EXPECT_BLOCK(tokens, 2, NULL, 0,
               "a8742cb38b8a9b222a17320a9081a41d836383b12af2f6be76524759faa6b2c2");
  EXPECT_BLOCK(tokens, 3, NULL, 0,
               "61c80e2a1ad74012262976559efa3795a454e4aa5aad08e22dc574b13b30197d");
}

Test(vllm, extra_keys) {
  const uint32_t tokens[] = {1, 2, 3, 4};
  char long_text[301] = "";
  memset(long_text, 'x', 300);
  const hashfmt_text keys[] = {text_of("adapter-a"), text_of("dynamo-cache-salt:tenant-a")};
  const hashfmt_text many[] = {text_of("a"), text_of(""), text_of("salt"), text_of(long_text)};
  EXPECT_BLOCK(tokens, 4, keys, 1,
               "c6e07f23b93d10308bb76b9140edd5ace3330457948e37f09f22a5a9afb81930");
  EXPECT_BLOCK(tokens, 4, keys, 2,
               "67ddca6338482b66f5e5db6a9a4aecf6e1ff2571aa0d3679b713fc3a8207d203");
  EXPECT_BLOCK(tokens, 4, many, 4,
               "e6e755840a9b3bc2f03eb6820521276c55aed7e5446c697d40f59ab79118f2a3");
}

/* range(70000, 70000 + n): at 13097 tokens one frame is nearly full, at 13099 it is over. */
Test(vllm, large_blocks_up_to_one_frame) {
  static uint32_t tokens[13099];
  uint8_t root[32], digest[32] = {1, 2, 3};
  const uint8_t before[32] = {1, 2, 3};
  for (uint32_t i = 0; i < 13099; i++)
    tokens[i] = 70000 + i;
  EXPECT_BLOCK(tokens, 13096, NULL, 0,
               "d55a17beee31db7648318a743d08f9c0d1e6b6dc81e32019072925b3d4c5f98e");
  EXPECT_BLOCK(tokens, 13097, NULL, 0,
               "21f4056c111ff1a6d0cc0f0f71b4c0d2068d26f91d70a093756e6cbc65332ff8");
  root_of("", root);
  cr_assert_eq(hashfmt_vllm_block(root, tokens, 13099, NULL, 0, digest), HASHFMT_ERR_LIMIT);
  cr_assert_arr_eq(digest, before, sizeof digest);
}

Test(vllm, callers_mistakes) {
  const uint32_t token = 1;
  uint8_t digest[32] = {0};
  const uint8_t zeros[32] = {0};
  cr_assert_eq(hashfmt_vllm_root(text_of(""), NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_vllm_root((hashfmt_text){NULL, 1}, digest), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_vllm_block(NULL, &token, 1, NULL, 0, digest), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_vllm_block(digest, NULL, 1, NULL, 0, digest), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_vllm_block(digest, &token, 1, NULL, 1, digest), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_vllm_block(digest, &token, 1, NULL, 0, NULL), HASHFMT_ERR_ARG);
  cr_assert_arr_eq(digest, zeros, sizeof digest);
}

/* ---- SGLang ---- */

/* Pages of the pairs (1, 2), (2, 3) and (3, 4), (4, 2**32 - 1). */
Test(sglang, pages_of_pairs) {
  const uint32_t pairs[] = {1, 2, 2, 3, 3, 4, 4, 0xffffffff};
  uint8_t digest[32];
  hashfmt_sglang_page(NULL, pairs, 4, digest);
  EXPECT_DIGEST(digest, "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269");
  hashfmt_sglang_page(digest, pairs + 4, 4, digest);
  EXPECT_DIGEST(digest, "94c82de05a486e5418dc67403d3f5f58815af1b469c976eea6d6caccf7b75e73");
}
