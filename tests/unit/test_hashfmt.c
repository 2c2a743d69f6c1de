/* SPDX-License-Identifier: Apache-2.0 */

/*
 * hashfmt.h against the xxHash library, naive models, and its own other paths. Two more programs
 * are made of this file: test_hashfmt_hook.c hashes through the library, test_hashfmt_bytewise.c
 * takes the path of hosts of unknown byte order.
 */

#define HASHFMT_STATIC
#include "test_hashfmt.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- helpers ---- */

/* Of its exact length, so that a sanitizer sees each byte read beyond it. */
static void *random_bytes(size_t len) {
  uint8_t *bytes = malloc(len);
  cr_assert(bytes != NULL || len == 0);
  for (size_t i = 0; i < len; i++)
    bytes[i] = (uint8_t)draw();
  return bytes;
}

static uint32_t *random_tokens(size_t count) { return random_bytes(4 * count); }

#define assert_u64(GOT, WANT, ...)                                                                 \
  do {                                                                                             \
    const uint64_t got_ = (GOT), want_ = (WANT);                                                   \
    if (got_ != want_) {                                                                           \
      char where_[160];                                                                            \
      snprintf(where_, sizeof where_, __VA_ARGS__);                                                \
      cr_assert_fail("%s: %" PRIu64 ", wanted %" PRIu64, where_, got_, want_);                     \
    }                                                                                              \
  } while (0)

static const int32_t formats[] = {HASHFMT_FORMAT_STANDARD, HASHFMT_FORMAT_EAGLE};

/* ---- hash function ---- */

Test(hashfmt, hash64_equals_the_library_for_every_length) {
  const uint64_t fixed_seeds[] = {0, 1, 1337, UINT64_MAX, UINT64_C(1) << 63, 0x80000000};
  for (size_t len = 0; len <= 5000; len++) {
    uint8_t *bytes = random_bytes(len);
    for (size_t i = 0; i < 8; i++) {
      const uint64_t seed = i < 6 ? fixed_seeds[i] : draw();
      assert_u64(hashfmt_hash64(bytes, len, seed), XXH3_64bits_withSeed(bytes, len, seed),
                 "length %zu seed %" PRIu64, len, seed);
    }
    free(bytes);
  }
  cr_assert_eq(hashfmt_hash64(NULL, 0, 5), XXH3_64bits_withSeed("", 0, 5));
}

Test(hashfmt, hash64_of_unaligned_input) {
  uint8_t bytes[700];
  for (size_t i = 0; i < sizeof bytes; i++)
    bytes[i] = (uint8_t)draw();
  for (size_t at = 0; at < 16; at++)
    for (size_t len = 0; len < 600; len++)
      assert_u64(hashfmt_hash64(bytes + at, len, 7), XXH3_64bits_withSeed(bytes + at, len, 7),
                 "length %zu at %zu", len, at);
}

Test(hashfmt, built_in_xxh3_fixed_lengths_and_prepared_secret) {
  uint8_t bytes[16];
  for (int i = 0; i < 20000; i++) {
    const uint64_t seed = draw(), lo = draw(), hi = draw();
    put_le(bytes, lo, 8);
    put_le(bytes + 8, hi, 8);
    assert_u64(hashfmt_xxh3_64_len2((uint16_t)lo, seed), XXH3_64bits_withSeed(bytes, 2, seed),
               "2 bytes");
    assert_u64(hashfmt_xxh3_64_len8(lo, seed), XXH3_64bits_withSeed(bytes, 8, seed), "8 bytes");
    assert_u64(hashfmt_xxh3_64_len16(lo, hi, seed), XXH3_64bits_withSeed(bytes, 16, seed),
               "16 bytes");
  }
  for (size_t len = 0; len < 2100; len++) {
    uint8_t *input = random_bytes(len);
    const uint64_t seed = draw();
    hashfmt_xxh3_secret secret;
    hashfmt_xxh3_secret_init(&secret, seed);
    assert_u64(hashfmt_xxh3_64_secret(input, len, seed, &secret),
               XXH3_64bits_withSeed(input, len, seed), "length %zu", len);
    free(input);
  }
}

/* ---- windows ---- */

Test(hashfmt, block_count_equals_its_definition) {
  for (size_t f = 0; f < 2; f++)
    for (uint32_t block_size = 1; block_size < 20; block_size++)
      for (uint64_t n = 0; n < 90; n++) {
        const uint64_t window = block_size + (formats[f] == HASHFMT_FORMAT_EAGLE);
        uint64_t count = 0;
        while (count * block_size + window <= n)
          count++;
        cr_assert_eq(hashfmt_window_len(formats[f], block_size), window);
        assert_u64(hashfmt_block_count(formats[f], block_size, n), count,
                   "format %d B %u n %" PRIu64, (int)formats[f], block_size, n);
      }
}

Test(hashfmt, windows_do_not_wrap) {
  const uint32_t largest = UINT32_MAX;
  cr_assert_eq(hashfmt_window_len(HASHFMT_FORMAT_EAGLE, largest), UINT64_C(1) << 32);
  cr_assert_eq(hashfmt_block_count(HASHFMT_FORMAT_EAGLE, largest, largest), 0);
  cr_assert_eq(hashfmt_block_count(HASHFMT_FORMAT_EAGLE, largest, UINT64_C(1) << 32), 1);
  cr_assert_eq(hashfmt_block_count(HASHFMT_FORMAT_STANDARD, largest, largest), 1);
  cr_assert_eq(hashfmt_block_count(HASHFMT_FORMAT_STANDARD, 1, UINT64_MAX), UINT64_MAX);
  cr_assert_eq(hashfmt_block_count(HASHFMT_FORMAT_EAGLE, 1, UINT64_MAX), UINT64_MAX - 1);
}

Test(hashfmt, no_windows_without_format_or_block_size) {
  const int32_t unknown[] = {HASHFMT_FORMAT_UNSPECIFIED, 3, -1, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    cr_assert_eq(hashfmt_window_len(unknown[i], 16), 0);
    cr_assert_eq(hashfmt_block_count(unknown[i], 16, 1000), 0);
  }
  for (size_t f = 0; f < 2; f++) {
    cr_assert_eq(hashfmt_window_len(formats[f], 0), 0);
    cr_assert_eq(hashfmt_block_count(formats[f], 0, 1000), 0);
  }
}

/* ---- request seed ---- */

static uint64_t seed_of(const char *lora, const char *ns) {
  return hashfmt_seed((const uint8_t *)lora, strlen(lora), (const uint8_t *)ns, strlen(ns));
}

Test(hashfmt, seed_terms) {
  cr_assert_eq(hashfmt_seed(NULL, 0, NULL, 0), 1337);
  cr_assert_eq(seed_of("", ""), 1337);
  cr_assert_eq(seed_of("x", ""), 1337 + XXH3_64bits_withSeed("x", 1, 0));
  cr_assert_eq(seed_of("", "x"), 1337 + XXH3_64bits_withSeed("x", 1, 1));
  cr_assert_eq(seed_of("x", "x"),
               1337 + XXH3_64bits_withSeed("x", 1, 0) + XXH3_64bits_withSeed("x", 1, 1));
  cr_assert_neq(seed_of("x", "y"), seed_of("y", "x"));
}

Test(hashfmt, seed_takes_the_bytes_as_they_are) {
  const uint8_t with_nul[] = {'a', 0, 'b'};
  cr_assert_eq(hashfmt_seed(with_nul, 3, NULL, 0), 1337 + XXH3_64bits_withSeed(with_nul, 3, 0));
  cr_assert_neq(hashfmt_seed(with_nul, 3, NULL, 0), hashfmt_seed(with_nul, 1, NULL, 0));
  cr_assert_neq(seed_of("Adapter", ""), seed_of("adapter", ""));
  cr_assert_neq(seed_of(" adapter", ""), seed_of("adapter", ""));
}

/* ---- local block hash ---- */

Test(hashfmt, local_is_the_hash_of_the_tokens_in_little_endian) {
  for (size_t window = 0; window < 1100; window += window < 300 ? 1 : 37) {
    uint32_t *tokens = random_tokens(window);
    const uint64_t seed = draw();
    assert_u64(hashfmt_local(tokens, window, seed), model_local(tokens, window, NULL, 0, seed),
               "window %zu", window);
    free(tokens);
  }
}

Test(hashfmt, local_takes_any_token) {
  const uint32_t edge[] = {0, UINT32_MAX, 0x80000000, 0x7fffffff};
  cr_assert_eq(hashfmt_local(edge, 4, 1337), model_local(edge, 4, NULL, 0, 1337));
  cr_assert_neq(hashfmt_local(edge, 1, 1337), hashfmt_local(edge + 1, 1, 1337));
}

/* ---- multimodal content ---- */

Test(hashfmt, local_mm_equals_the_model_in_any_order) {
  const size_t windows[] = {0,  1,  2,  15, 16,  17,  57,  58,  59,  60,  61,
                            62, 63, 64, 65, 127, 128, 255, 256, 257, 1056};
  for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
    uint32_t *tokens = random_tokens(windows[w]);
    for (size_t mm_len = 0; mm_len < 40; mm_len++) {
      uint64_t mm[40];
      uint64_t out = 0;
      const uint64_t seed = draw();
      for (size_t i = 0; i < mm_len; i++) {
        const uint64_t r = draw();
        mm[i] = r % 8 == 0 ? UINT64_MAX : r % 8 == 1 ? 0 : r % 8 < 5 ? r >> 62 : draw();
      }
      cr_assert_eq(hashfmt_local_mm(tokens, windows[w], mm, mm_len, seed, &out), HASHFMT_OK);
      assert_u64(out, model_local(tokens, windows[w], mm, mm_len, seed), "window %zu, %zu objects",
                 windows[w], mm_len);
    }
    free(tokens);
  }
}

Test(hashfmt, local_mm_keeps_equal_objects_apart_from_one) {
  const uint32_t tokens[2] = {0, 1};
  const uint64_t twice[2] = {7, 7};
  uint64_t one, two;
  cr_assert_eq(hashfmt_local_mm(tokens, 2, twice, 1, 1337, &one), HASHFMT_OK);
  cr_assert_eq(hashfmt_local_mm(tokens, 2, twice, 2, 1337, &two), HASHFMT_OK);
  cr_assert_neq(one, two);
}

Test(hashfmt, local_mm_limit_and_arguments) {
  const uint32_t tokens[2] = {0, 1};
  uint64_t *mm = malloc((HASHFMT_MM_MAX + 1) * sizeof *mm);
  uint64_t out = 99;
  for (size_t i = 0; i <= HASHFMT_MM_MAX; i++)
    mm[i] = draw();
  cr_assert_eq(hashfmt_local_mm(tokens, 2, mm, HASHFMT_MM_MAX + 1, 1, &out), HASHFMT_ERR_LIMIT);
  cr_assert_eq(hashfmt_local_mm(NULL, 2, mm, 1, 1, &out), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_local_mm(tokens, 2, NULL, 1, 1, &out), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_local_mm(tokens, 2, mm, 1, 1, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_block_mm(NULL, 2, mm, 1, NULL, 1, &out), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_block_mm(tokens, 2, NULL, 1, NULL, 1, &out), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_block_mm(tokens, 2, mm, 1, NULL, 1, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(out, 99);
  cr_assert_eq(hashfmt_local_mm(tokens, 2, mm, HASHFMT_MM_MAX, 1, &out), HASHFMT_OK);
  cr_assert_eq(out, model_local(tokens, 2, mm, HASHFMT_MM_MAX, 1));
  free(mm);
}

Test(hashfmt, pad_value_range) {
  cr_assert_eq(hashfmt_pad_value(0), 1000000);
  cr_assert_eq(hashfmt_pad_value((UINT64_C(1) << 30) - 1), 1074741823);
  cr_assert_eq(hashfmt_pad_value(UINT64_C(1) << 30), 1000000);
  cr_assert_eq(hashfmt_pad_value(UINT64_MAX), 1074741823);
}

Test(hashfmt, identifier_of_64_hex_digits_is_a_number) {
  const char *digits = "0123456789abcdefFEDCBA9876543210ffffffffffffffffAAAAAAAAAAAAAAAA";
  uint64_t hash = 0;
  cr_assert_eq(hashfmt_mm_identifier((const uint8_t *)digits, 64, &hash), 1);
  cr_assert_eq(hash, UINT64_C(0x0123456789abcdef));
  cr_assert_eq(
      hashfmt_mm_identifier(
          (const uint8_t *)"FEDCBA9876543210fedcba9876543210fedcba9876543210fedcba9876543210", 64,
          &hash),
      1);
  cr_assert_eq(hash, UINT64_C(0xfedcba9876543210));
}

Test(hashfmt, any_other_identifier_is_hashed) {
  const char around_digits[] = {'/', ':', '@', 'G', '`', 'g', 0, ' ', (char)0xff};
  uint64_t hash = 77;
  cr_assert_eq(hashfmt_mm_identifier(NULL, 0, &hash), 0);
  cr_assert_eq(hash, 77);
  for (size_t len = 1; len < 130; len++) {
    if (len == 64)
      continue;
    char id[130];
    memset(id, 'a', len);
    cr_assert_eq(hashfmt_mm_identifier((const uint8_t *)id, len, &hash), 1);
    assert_u64(hash, XXH3_64bits_withSeed(id, len, 0), "length %zu", len);
  }
  for (size_t at = 0; at < 64; at++)
    for (size_t c = 0; c < sizeof around_digits; c++) {
      char id[64];
      memset(id, '7', sizeof id);
      id[at] = around_digits[c];
      cr_assert_eq(hashfmt_mm_identifier((const uint8_t *)id, 64, &hash), 1);
      assert_u64(hash, XXH3_64bits_withSeed(id, 64, 0), "position %zu character %zu", at, c);
    }
}

enum { IMAGE = 500, VIDEO = 600, P21 = 1000021, P22 = 1000022 };

static const hashfmt_mm_tokens image_only = {IMAGE, 0, true, false};
static const hashfmt_mm_tokens video_only = {0, VIDEO, false, true};
static const hashfmt_mm_tokens both = {IMAGE, VIDEO, true, true};

static void assert_block(const hashfmt_mm_tokens *ids, const uint32_t *tokens, size_t token_count,
                         const uint64_t *mm, size_t mm_len, const uint32_t *substituted) {
  uint64_t out = 0;
  cr_assert_eq(hashfmt_block_mm(tokens, token_count, mm, mm_len, ids, 1337, &out), HASHFMT_OK);
  if (substituted)
    cr_assert_eq(out, model_local(substituted, token_count, NULL, 0, 1337));
  else
    cr_assert_eq(out, model_local(tokens, token_count, mm, mm_len, 1337));
}

#define BLOCK(IDS, MM_LEN, SUBSTITUTED, ...)                                                       \
  do {                                                                                             \
    const uint32_t tokens_[] = {__VA_ARGS__};                                                      \
    assert_block(IDS, tokens_, sizeof tokens_ / sizeof *tokens_, (const uint64_t[]){21, 22},       \
                 MM_LEN, SUBSTITUTED);                                                             \
  } while (0)
#define TOKENS(...) ((const uint32_t[]){__VA_ARGS__})

Test(hashfmt, block_mm_exact_substitution) {
  BLOCK(&both, 2, TOKENS(5, P21, 6, P22, 7, 8), 5, IMAGE, 6, IMAGE, 7, 8);
  BLOCK(&both, 2, TOKENS(P21, P21, 5, P21, 6, P22, P22), VIDEO, VIDEO, 5, VIDEO, 6, IMAGE, IMAGE);
  BLOCK(&both, 2, NULL, VIDEO, 5, VIDEO);
  BLOCK(&both, 1, TOKENS(P21, 5, P21), VIDEO, 5, VIDEO);
  BLOCK(&both, 1, NULL, IMAGE, 5, IMAGE);
  BLOCK(&both, 2, NULL, IMAGE, IMAGE);
  BLOCK(&both, 1, NULL, 5, 6);
  BLOCK(&both, 2, TOKENS(P21, P22), IMAGE, VIDEO); /* runs touch, kinds differ */
  BLOCK(&both, 2, TOKENS(P21, P22), VIDEO, IMAGE);
  BLOCK(&both, 2, NULL, VIDEO, IMAGE, VIDEO); /* the image splits the videos: three groups */
  BLOCK(&video_only, 1, TOKENS(IMAGE, P21, 6, P21), IMAGE, VIDEO, 6, VIDEO);
  BLOCK(&video_only, 2, NULL, IMAGE, VIDEO, 6, VIDEO);
  BLOCK(&video_only, 1, NULL, IMAGE, 6);
}

Test(hashfmt, block_mm_image_substitution) {
  BLOCK(&image_only, 2, TOKENS(5, P21, 6, P22, 7, P22), 5, IMAGE, 6, IMAGE, 7, IMAGE);
  BLOCK(&image_only, 2, TOKENS(P21, P21, 5), IMAGE, IMAGE, 5); /* the second object has no run */
  BLOCK(&image_only, 1, TOKENS(P21, VIDEO, P21), IMAGE, VIDEO, IMAGE);
  BLOCK(&image_only, 1, NULL, 5, 6);
  BLOCK(&image_only, 1, NULL, 5, VIDEO);
}

Test(hashfmt, block_mm_native_form) {
  const hashfmt_mm_tokens equal = {IMAGE, IMAGE, true, true};
  const hashfmt_mm_tokens none = {IMAGE, VIDEO, false, false};
  const hashfmt_mm_tokens zero_image = {0, 0, true, false};
  BLOCK(&equal, 1, NULL, 5, IMAGE);
  BLOCK(&none, 1, NULL, 5, IMAGE);
  BLOCK(NULL, 1, NULL, 5, IMAGE);
  BLOCK(&both, 0, NULL, IMAGE, 5);   /* no object: plain tokens */
  BLOCK(&video_only, 1, NULL, 0, 1); /* the unset image id is no token */
  BLOCK(&zero_image, 1, TOKENS(P21, 1), 0, 1);
}

/* Blocks of a recorded stream whose four tokens are all placeholders. */
Test(hashfmt, block_mm_known_numbers) {
  const uint32_t tokens[4] = {151655, 151655, 151655, 151655};
  const hashfmt_mm_tokens ids = {151655, 0, true, false};
  const uint64_t a = UINT64_C(0x0123456789abcdef), b = UINT64_C(0xfedcba9876543210);
  uint64_t out;
  cr_assert_eq(hashfmt_block_mm(tokens, 4, &a, 1, NULL, 1337, &out), HASHFMT_OK);
  cr_assert_eq(out, UINT64_C(17301219308700869532));
  cr_assert_eq(hashfmt_block_mm(tokens, 4, &b, 1, NULL, 1337, &out), HASHFMT_OK);
  cr_assert_eq(out, UINT64_C(10043087803035270926));
  cr_assert_eq(hashfmt_block_mm(tokens, 4, &a, 1, &ids, 1337, &out), HASHFMT_OK);
  cr_assert_eq(out, UINT64_C(9649191635784361572));
  cr_assert_eq(hashfmt_block_mm(tokens, 4, &b, 1, &ids, 1337, &out), HASHFMT_OK);
  cr_assert_eq(out, UINT64_C(14179982787209378246));
  cr_assert_eq(hashfmt_block_mm(tokens, 4, NULL, 0, &ids, 1337, &out), HASHFMT_OK);
  cr_assert_eq(out, UINT64_C(3745411083916171343));
}

/* The rules as a list of runs, grouped, then filled; true = substituted into `tokens`. */
static bool model_substitute(uint32_t *tokens, size_t count, const uint64_t *mm, size_t mm_len,
                             const hashfmt_mm_tokens *ids) {
  struct {
    size_t start, end, group;
    bool video;
  } runs[64];
  size_t run_len = 0, groups = 0;
  if (!ids->has_image && !ids->has_video)
    return false;
  if (ids->has_image && ids->has_video && ids->image_token_id == ids->video_token_id)
    return false;
  for (size_t i = 0; i < count;) {
    const bool image = ids->has_image && tokens[i] == ids->image_token_id;
    const bool video = ids->has_video && tokens[i] == ids->video_token_id;
    size_t end = i + 1;
    while (end < count && tokens[end] == tokens[i])
      end++;
    if (image || video) {
      runs[run_len].start = i;
      runs[run_len].end = end;
      runs[run_len].video = video;
      if (!(video && run_len > 0 && runs[run_len - 1].video))
        groups++;
      runs[run_len++].group = groups - 1;
    }
    i = end;
  }
  if (run_len == 0 || (ids->has_video && groups != mm_len))
    return false;
  for (size_t r = 0; r < run_len; r++)
    for (size_t i = runs[r].start; i < runs[r].end; i++)
      tokens[i] = (uint32_t)(1000000 + mm[runs[r].group < mm_len ? runs[r].group : mm_len - 1] %
                                           (UINT64_C(1) << 30));
  return true;
}

Test(hashfmt, block_mm_equals_the_model) {
  const uint32_t vocabulary[] = {IMAGE, VIDEO, 5, 0};
  size_t substituted = 0, native = 0;
  for (int round = 0; round < 30000; round++) {
    const size_t count = 1 + draw() % 64, mm_len = 1 + draw() % 6;
    const hashfmt_mm_tokens ids = {draw() % 16 ? IMAGE : 0, draw() % 16 ? VIDEO : IMAGE,
                                   draw() % 4 != 0, draw() % 2};
    uint32_t tokens[64], model[64];
    uint64_t mm[6], out = 0;
    uint32_t token = 5;
    for (size_t i = 0; i < count; i++) {
      if (draw() % 4 == 0)
        token = vocabulary[draw() % 4];
      tokens[i] = model[i] = token;
    }
    for (size_t i = 0; i < mm_len; i++)
      mm[i] = draw();
    cr_assert_eq(hashfmt_block_mm(tokens, count, mm, mm_len, &ids, 1337, &out), HASHFMT_OK);
    if (model_substitute(model, count, mm, mm_len, &ids)) {
      assert_u64(out, model_local(model, count, NULL, 0, 1337), "round %d, substituted", round);
      substituted++;
    } else {
      assert_u64(out, model_local(tokens, count, mm, mm_len, 1337), "round %d, native", round);
      native++;
    }
  }
  cr_assert(substituted > 3000 && native > 3000);
}

/* Token by token: which hashes lie on the block, in the order of the ranges. */
static size_t model_entry(const hashfmt_mm_range *ranges, size_t range_len, uint64_t total,
                          uint32_t block_size, uint64_t block, uint64_t *hashes) {
  size_t len = 0;
  for (size_t r = 0; r < range_len; r++) {
    bool on_block = false, known = false;
    for (uint64_t t = ranges[r].start; t < ranges[r].end && t < total; t++)
      on_block |= t / block_size == block;
    for (size_t i = 0; i < len; i++)
      known |= hashes[i] == ranges[r].mm_hash;
    if (on_block && !known)
      hashes[len++] = ranges[r].mm_hash;
  }
  return len;
}

Test(hashfmt, mm_entry_equals_the_model) {
  for (int round = 0; round < 3000; round++) {
    const uint64_t total = 1 + draw() % 40;
    const uint32_t block_size = 1 + (uint32_t)(draw() % 9);
    hashfmt_mm_range ranges[6];
    const size_t range_len = draw() % 7;
    for (size_t r = 0; r < range_len; r++) {
      ranges[r].mm_hash = draw() % 3;
      ranges[r].start = draw() % 45;
      ranges[r].end = draw() % 45; /* may lie before start, or behind the end */
    }
    for (uint64_t block = 0; block < 45; block++) {
      uint64_t got[6], want[6];
      size_t len = 99;
      const size_t want_len = model_entry(ranges, range_len, total, block_size, block, want);
      cr_assert_eq(hashfmt_mm_entry(ranges, range_len, total, block_size, block, got, 6, &len),
                   HASHFMT_OK);
      cr_assert_eq(len, want_len);
      cr_assert(len == 0 || memcmp(got, want, len * sizeof *got) == 0);
      for (size_t cap = 0; cap < want_len; cap++) {
        memset(got, 0, sizeof got);
        cr_assert_eq(hashfmt_mm_entry(ranges, range_len, total, block_size, block, got, cap, &len),
                     HASHFMT_ERR_NOSPACE);
        cr_assert_eq(len, cap);
        cr_assert(cap == 0 || memcmp(got, want, cap * sizeof *got) == 0);
      }
    }
  }
}

Test(hashfmt, mm_piece_cuts_at_blocks_and_end) {
  const hashfmt_mm_range range = {1, 3, 100};
  uint64_t start = 9, end = 9;
  cr_assert(hashfmt_mm_piece(&range, 10, 4, 0, &start, &end) && start == 3 && end == 4);
  cr_assert(hashfmt_mm_piece(&range, 10, 4, 1, &start, &end) && start == 4 && end == 8);
  cr_assert(hashfmt_mm_piece(&range, 10, 4, 2, &start, &end) && start == 8 && end == 10);
  start = end = 9;
  cr_assert(!hashfmt_mm_piece(&range, 10, 4, 3, &start, &end));
  cr_assert(!hashfmt_mm_piece(&range, 10, 4, UINT64_MAX, &start, &end));
  cr_assert(!hashfmt_mm_piece(&range, 0, 4, 0, &start, &end));
  cr_assert(!hashfmt_mm_piece(&range, 10, 0, 0, &start, &end));
  cr_assert(start == 9 && end == 9);
}

Test(hashfmt, mm_piece_of_the_largest_request) {
  const hashfmt_mm_range all = {1, 0, UINT64_MAX};
  uint64_t start, end;
  cr_assert(hashfmt_mm_piece(&all, UINT64_MAX, 16, UINT64_MAX / 16, &start, &end));
  cr_assert(start == UINT64_MAX - 15 && end == UINT64_MAX);
  cr_assert(!hashfmt_mm_piece(&all, UINT64_MAX, 16, UINT64_MAX / 16 + 1, &start, &end));
}

Test(hashfmt, mm_entry_arguments) {
  const hashfmt_mm_range range = {1, 0, 1};
  uint64_t hash;
  size_t len = 7;
  cr_assert_eq(hashfmt_mm_entry(&range, 1, 0, 4, 0, &hash, 1, &len), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_mm_entry(&range, 1, 4, 0, 0, &hash, 1, &len), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_mm_entry(NULL, 1, 4, 4, 0, &hash, 1, &len), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_mm_entry(&range, 1, 4, 4, 0, NULL, 1, &len), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_mm_entry(&range, 1, 4, 4, 0, &hash, 1, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(len, 7);
  cr_assert_eq(hashfmt_mm_entry(NULL, 0, 0, 4, 0, NULL, 0, &len), HASHFMT_OK);
  cr_assert_eq(len, 0);
}

Test(hashfmt, mm_entry_takes_so_many_hashes_and_no_more) {
  enum { MANY = 40 * HASHFMT_MM_MAX };
  hashfmt_mm_range *const ranges = malloc(MANY * sizeof *ranges);
  uint64_t *const hashes = malloc(MANY * sizeof *hashes);
  size_t len = 7;
  for (size_t r = 0; r < MANY; r++)
    ranges[r] = (hashfmt_mm_range){r % HASHFMT_MM_MAX, 0, 4};
  cr_assert_eq(hashfmt_mm_entry(ranges, MANY, 4, 4, 0, hashes, HASHFMT_MM_MAX, &len), HASHFMT_OK);
  cr_assert_eq(len, HASHFMT_MM_MAX);
  for (size_t i = 0; i < len; i++)
    cr_assert_eq(hashes[i], i);
  ranges[MANY - 1].mm_hash = MANY;
  len = 7;
  cr_assert_eq(hashfmt_mm_entry(ranges, MANY, 4, 4, 0, hashes, MANY, &len), HASHFMT_ERR_LIMIT);
  cr_assert_eq(hashfmt_mm_entry(ranges, MANY, 4, 4, 0, hashes, HASHFMT_MM_MAX, &len),
               HASHFMT_ERR_LIMIT, "more room would not help");
  cr_assert_eq(len, 7);
  free(ranges);
  free(hashes);
}

/* ---- sequence hash ---- */

Test(hashfmt, chain_equals_the_definition_and_resumes_anywhere) {
  uint64_t local[20], sequence[20];
  hashfmt_chain chain;
  for (size_t k = 0; k < 20; k++) {
    local[k] = draw();
    sequence[k] = k == 0 ? local[0] : model_child(sequence[k - 1], local[k]);
  }
  hashfmt_chain_init(&chain);
  for (size_t k = 0; k < 20; k++)
    assert_u64(hashfmt_chain_next(&chain, local[k]), sequence[k], "block %zu", k);
  for (size_t from = 1; from < 20; from++) {
    hashfmt_chain_resume(&chain, sequence[from - 1]);
    for (size_t k = from; k < 20; k++)
      assert_u64(hashfmt_chain_next(&chain, local[k]), sequence[k], "from %zu block %zu", from, k);
  }
  cr_assert_eq(hashfmt_root(local[0]), sequence[0]);
  cr_assert_eq(hashfmt_child(sequence[3], local[4]), sequence[4]);
}

Test(hashfmt, chain_tells_a_parent_of_0_from_none) {
  hashfmt_chain chain;
  hashfmt_chain_init(&chain);
  cr_assert_eq(hashfmt_chain_next(&chain, 0), 0);
  cr_assert_eq(hashfmt_chain_next(&chain, 5), model_child(0, 5));
  hashfmt_chain_resume(&chain, 0);
  cr_assert_eq(hashfmt_chain_next(&chain, 5), model_child(0, 5));
}

/* ---- whole request ---- */

Test(hashfmt, blocks_equals_one_by_one_at_every_capacity) {
  const uint32_t sizes[] = {1, 2, 3, 4, 16, 31, 32, 33, 59, 60, 61, 64, 256, 257, 512};
  for (size_t f = 0; f < 2; f++)
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
      for (size_t extra = 0; extra < 3; extra++) {
        const size_t n = 4 * sizes[s] + extra;
        const size_t window = (size_t)hashfmt_window_len(formats[f], sizes[s]);
        const size_t count = (size_t)hashfmt_block_count(formats[f], sizes[s], n);
        uint32_t *tokens = random_tokens(n);
        const uint64_t seed = draw();
        uint64_t want_local[8], want_sequence[8];
        for (size_t k = 0; k < count; k++) {
          want_local[k] = model_local(tokens + k * sizes[s], window, NULL, 0, seed);
          want_sequence[k] =
              k == 0 ? want_local[0] : model_child(want_sequence[k - 1], want_local[k]);
        }
        for (size_t cap = 0; cap < 8; cap++) {
          const size_t filled = cap < count ? cap : count;
          const int want = cap < count ? HASHFMT_ERR_NOSPACE : HASHFMT_OK;
          uint64_t local[8] = {0}, sequence[8] = {0}, only[8] = {0};
          size_t got = 99;
          cr_assert_eq(
              hashfmt_blocks(formats[f], sizes[s], seed, tokens, n, local, sequence, cap, &got),
              want);
          cr_assert_eq(got, count);
          cr_assert(memcmp(local, want_local, 8 * filled) == 0);
          cr_assert(memcmp(sequence, want_sequence, 8 * filled) == 0);
          for (size_t k = filled; k < 8; k++)
            cr_assert(local[k] == 0 && sequence[k] == 0);
          cr_assert_eq(hashfmt_blocks(formats[f], sizes[s], seed, tokens, n, NULL, only, cap, &got),
                       want);
          cr_assert(memcmp(only, sequence, sizeof only) == 0);
          memset(only, 0, sizeof only);
          cr_assert_eq(hashfmt_blocks(formats[f], sizes[s], seed, tokens, n, only, NULL, cap, &got),
                       want);
          cr_assert(memcmp(only, local, sizeof only) == 0);
        }
        free(tokens);
      }
}

Test(hashfmt, blocks_counts_without_arrays) {
  const uint32_t tokens[9] = {0};
  size_t count = 99;
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 4, 1, tokens, 9, NULL, NULL, 0, &count),
               HASHFMT_OK);
  cr_assert_eq(count, 2);
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_EAGLE, 4, 1, tokens, 8, NULL, NULL, 0, &count),
               HASHFMT_OK);
  cr_assert_eq(count, 1);
}

Test(hashfmt, blocks_of_a_short_prompt_are_none) {
  const uint32_t tokens[4] = {1, 2, 3, 4};
  uint64_t local[1] = {5};
  size_t count = 99;
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 4, 1, NULL, 0, local, NULL, 1, &count),
               HASHFMT_OK);
  cr_assert_eq(count, 0);
  count = 99;
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_EAGLE, 4, 1, tokens, 4, local, NULL, 1, &count),
               HASHFMT_OK);
  cr_assert_eq(count, 0);
  count = 99;
  cr_assert_eq(
      hashfmt_blocks(HASHFMT_FORMAT_EAGLE, UINT32_MAX, 1, tokens, 4, local, NULL, 1, &count),
      HASHFMT_OK);
  cr_assert_eq(count, 0);
  cr_assert_eq(local[0], 5);
}

Test(hashfmt, blocks_errors_write_no_hash) {
  const uint32_t tokens[4] = {1, 2, 3, 4};
  const int32_t unknown[] = {HASHFMT_FORMAT_UNSPECIFIED, 3, -1};
  uint64_t local[4] = {5, 5, 5, 5};
  size_t count = 99;
  for (size_t i = 0; i < 3; i++) {
    count = 99;
    cr_assert_eq(hashfmt_blocks(unknown[i], 2, 1, tokens, 4, local, NULL, 4, &count),
                 HASHFMT_ERR_UNSUPPORTED);
    cr_assert_eq(count, 0);
  }
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 0, 1, tokens, 4, local, NULL, 4, &count),
               HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 2, 1, NULL, 4, local, NULL, 4, &count),
               HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, 2, 1, tokens, 4, local, NULL, 4, NULL),
               HASHFMT_ERR_ARG);
  cr_assert_eq(count, 0);
  for (size_t i = 0; i < 4; i++)
    cr_assert_eq(local[i], 5);
}

/* ---- engine data ---- */

Test(hashfmt, pairs_become_flat_tokens) {
  const uint32_t pairs[] = {10, 11, 11, 12, 12, 13};
  const uint32_t flat[] = {10, 11, 12, 13};
  uint32_t in_place[6], tokens[4] = {0};
  size_t count = 99, gaps = 99;
  cr_assert_eq(hashfmt_pairs_flatten(pairs, 3, tokens, 4, &count, &gaps), HASHFMT_OK);
  cr_assert(count == 4 && gaps == 0 && memcmp(tokens, flat, sizeof flat) == 0);
  memcpy(in_place, pairs, sizeof pairs);
  cr_assert_eq(hashfmt_pairs_flatten(in_place, 3, in_place, 6, &count, NULL), HASHFMT_OK);
  cr_assert(count == 4 && memcmp(in_place, flat, sizeof flat) == 0);
  cr_assert_eq(hashfmt_pairs_flatten(pairs, 0, tokens, 0, &count, &gaps), HASHFMT_OK);
  cr_assert(count == 0 && gaps == 0);
}

Test(hashfmt, pairs_that_do_not_overlap_are_counted) {
  const uint32_t pairs[] = {10, 11, 20, 12, 12, 13, 1, 2};
  const uint32_t flat[] = {10, 20, 12, 1, 2};
  uint32_t tokens[8];
  size_t count = 99, gaps = 99;
  cr_assert_eq(hashfmt_pairs_flatten(pairs, 4, tokens, 8, &count, &gaps), HASHFMT_OK);
  cr_assert(count == 5 && gaps == 2 && memcmp(tokens, flat, sizeof flat) == 0);
  memcpy(tokens, pairs, sizeof pairs);
  cr_assert_eq(hashfmt_pairs_flatten(tokens, 4, tokens, 8, &count, &gaps), HASHFMT_OK);
  cr_assert(count == 5 && gaps == 2 && memcmp(tokens, flat, sizeof flat) == 0);
}

Test(hashfmt, pairs_without_room) {
  const uint32_t pairs[] = {10, 11, 11, 12};
  uint32_t tokens[3] = {7, 7, 7};
  size_t count = 99;
  cr_assert_eq(hashfmt_pairs_flatten(pairs, 2, tokens, 2, &count, NULL), HASHFMT_ERR_NOSPACE);
  cr_assert(count == 3 && tokens[0] == 7 && tokens[1] == 7);
  cr_assert_eq(hashfmt_pairs_flatten(NULL, 2, tokens, 3, &count, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_pairs_flatten(pairs, 2, tokens, 3, NULL, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_pairs_flatten(pairs, 2, NULL, 3, &count, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_pairs_flatten(pairs, SIZE_MAX, tokens, 3, &count, NULL), HASHFMT_ERR_ARG);
  cr_assert_eq(hashfmt_pairs_flatten(pairs, SIZE_MAX / 8, NULL, 0, &count, NULL),
               HASHFMT_ERR_NOSPACE);
}

Test(hashfmt, external_is_big_endian) {
  const uint8_t bytes[8] = {0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef};
  cr_assert_eq(hashfmt_external_read(bytes), UINT64_C(0x0123456789abcdef));
}

/* ---- blake3 ---- */

typedef struct model_node {
  uint32_t cv[8], message[16];
  uint64_t counter;
  uint32_t block_len, flags;
} model_node;

static uint32_t model_rotr(uint32_t v, int bits) { return v >> bits | v << (32 - bits); }

/* Permutes the message between rounds, as the definition has it, instead of using a table. */
static void model_compress(const model_node *node, uint32_t extra_flags, uint32_t out[8]) {
  static const int permutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
  static const int lanes[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                  {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};
  static const uint32_t iv[4] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a};
  uint32_t v[16], m[16], next[16];
  memcpy(v, node->cv, 32);
  memcpy(v + 8, iv, 16);
  v[12] = (uint32_t)node->counter;
  v[13] = (uint32_t)(node->counter >> 32);
  v[14] = node->block_len;
  v[15] = node->flags | extra_flags;
  memcpy(m, node->message, sizeof m);
  for (int round = 0; round < 7; round++) {
    for (int i = 0; i < 8; i++) {
      const int a = lanes[i][0], b = lanes[i][1], c = lanes[i][2], d = lanes[i][3];
      for (int half = 0; half < 2; half++) {
        v[a] += v[b] + m[2 * i + half];
        v[d] = model_rotr(v[d] ^ v[a], half ? 8 : 16);
        v[c] += v[d];
        v[b] = model_rotr(v[b] ^ v[c], half ? 7 : 12);
      }
    }
    for (int i = 0; i < 16; i++)
      next[i] = m[permutation[i]];
    memcpy(m, next, sizeof m);
  }
  for (int i = 0; i < 8; i++)
    out[i] = v[i] ^ v[i + 8];
}

static const uint32_t model_iv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* The tree from the top: the left subtree takes the largest power of two of chunks that leaves
 * something to the right. */
static model_node model_tree(const uint8_t *data, size_t len, uint64_t chunk) {
  model_node node;
  if (len <= 1024) {
    memcpy(node.cv, model_iv, 32);
    for (size_t at = 0;; at += 64) {
      const size_t take = len - at < 64 ? len - at : 64;
      uint8_t block[64] = {0};
      if (take > 0)
        memcpy(block, data + at, take);
      for (int i = 0; i < 16; i++)
        node.message[i] = (uint32_t)block[4 * i] | (uint32_t)block[4 * i + 1] << 8 |
                          (uint32_t)block[4 * i + 2] << 16 | (uint32_t)block[4 * i + 3] << 24;
      node.counter = chunk;
      node.block_len = (uint32_t)take;
      node.flags = at == 0 ? 1 : 0;
      if (len - at <= 64) {
        node.flags |= 2;
        return node;
      }
      model_compress(&node, 0, node.cv);
    }
  }
  size_t left_len = 1024;
  while (2 * left_len < len)
    left_len *= 2;
  const model_node left = model_tree(data, left_len, chunk);
  const model_node right = model_tree(data + left_len, len - left_len, chunk + left_len / 1024);
  model_compress(&left, 0, node.message);
  model_compress(&right, 0, node.message + 8);
  memcpy(node.cv, model_iv, 32);
  node.counter = 0;
  node.block_len = 64;
  node.flags = 4;
  return node;
}

static void model_blake3(const uint8_t *data, size_t len, uint8_t out[32]) {
  const model_node root = model_tree(data, len, 0);
  uint32_t words[8];
  model_compress(&root, 8, words);
  for (size_t i = 0; i < 8; i++)
    put_le(out + 4 * i, words[i], 4);
}

static void assert_hex(const uint8_t digest[32], const char *hex) {
  char text[65];
  for (size_t i = 0; i < 32; i++)
    snprintf(text + 2 * i, 3, "%02x", digest[i]);
  cr_assert_str_eq(text, hex);
}

Test(blake3, published_digests) {
  uint8_t digest[32];
  hashfmt_blake3(NULL, 0, digest);
  assert_hex(digest, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  hashfmt_blake3((const uint8_t *)"\0", 1, digest);
  assert_hex(digest, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213");
}

Test(blake3, equals_the_model_for_every_length_near_borders) {
  const size_t borders[] = {0,    64,   128,  1024,  2048,  3072,  4096,
                            5120, 7168, 8192, 16384, 31744, 65536, 100 * 1024};
  for (size_t b = 0; b < sizeof borders / sizeof *borders; b++)
    for (size_t len = borders[b] < 66 ? 0 : borders[b] - 66; len < borders[b] + 66;
         len += borders[b] < 9000 ? 1 : 13) {
      uint8_t *data = random_bytes(len);
      uint8_t got[32], want[32];
      hashfmt_blake3(data, len, got);
      model_blake3(data, len, want);
      cr_assert(memcmp(got, want, 32) == 0, "length %zu", len);
      free(data);
    }
}

Test(blake3, pieces_do_not_matter) {
  enum { LEN = 5000 };
  uint8_t *data = random_bytes(LEN);
  uint8_t want[32], got[32];
  hashfmt_blake3_state state;
  hashfmt_blake3(data, LEN, want);
  for (size_t piece = 1; piece <= LEN; piece += piece < 1100 ? 1 : 97) {
    hashfmt_blake3_init(&state);
    for (size_t at = 0; at < LEN; at += piece)
      hashfmt_blake3_update(&state, data + at, LEN - at < piece ? LEN - at : piece);
    hashfmt_blake3_final(&state, got);
    cr_assert(memcmp(got, want, 32) == 0, "pieces of %zu", piece);
  }
  for (size_t cut = 0; cut <= LEN; cut++) {
    hashfmt_blake3_init(&state);
    hashfmt_blake3_update(&state, data, cut);
    hashfmt_blake3_update(&state, NULL, 0);
    hashfmt_blake3_update(&state, data + cut, LEN - cut);
    hashfmt_blake3_final(&state, got);
    cr_assert(memcmp(got, want, 32) == 0, "cut at %zu", cut);
  }
  free(data);
}

Test(blake3, final_leaves_the_state_usable) {
  enum { LEN = 3100 };
  uint8_t *data = random_bytes(LEN);
  hashfmt_blake3_state state;
  hashfmt_blake3_init(&state);
  for (size_t len = 0; len <= LEN; len++) {
    uint8_t got[32], want[32];
    hashfmt_blake3_final(&state, got);
    hashfmt_blake3(data, len, want);
    cr_assert(memcmp(got, want, 32) == 0, "after %zu bytes", len);
    if (len < LEN)
      hashfmt_blake3_update(&state, data + len, 1);
  }
  free(data);
}

/* ---- errors ---- */

Test(hashfmt, every_error_has_its_own_text) {
  const int errors[] = {HASHFMT_OK,          HASHFMT_ERR_ARG,
                        HASHFMT_ERR_NOSPACE, HASHFMT_ERR_UNSUPPORTED,
                        HASHFMT_ERR_LIMIT,   -399};
  const size_t count = sizeof errors / sizeof *errors;
  for (size_t i = 0; i < count; i++)
    for (size_t j = 0; j < i; j++)
      cr_assert_str_neq(hashfmt_strerror(errors[i]), hashfmt_strerror(errors[j]));
  cr_assert_str_eq(hashfmt_strerror(1), hashfmt_strerror(-399));
}
