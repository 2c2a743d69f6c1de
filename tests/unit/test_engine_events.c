/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder of engine events alone: both encodings, odd values, and payloads that nobody should
 * send. */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>

#include "test_source.h"

typedef struct decoding {
  kvrelay_engine_decoder d;
  void *mem;
  packer p;
  kvrelay_engine_batch batch;
  kvrelay_engine_event ev;
} decoding;

static decoding *open_decoder(size_t max_tokens) {
  decoding *x = calloc(1, sizeof *x);
  size_t len = kvrelay_engine_decoder_mem_size(max_tokens);
  x->mem = malloc(len);
  cr_assert_eq(kvrelay_engine_decoder_init(&x->d, max_tokens, x->mem, len), KVRELAY_OK);
  return x;
}

static void close_decoder(decoding *x) {
  free(x->mem);
  free(x);
}

/* A payload in memory of exactly its size, so that the sanitizer sees every step beyond it. */
static int begin(decoding *x, const uint8_t *bytes, size_t len) {
  static uint8_t *copy;
  free(copy);
  copy = malloc(len + (len == 0));
  memcpy(copy, bytes, len);
  int err = kvrelay_engine_batch_begin(&x->d, copy, len, &x->batch);
  return err;
}

/* Decodes the single event written since put_batch(…, 1). */
static const kvrelay_engine_event *only_event(decoding *x) {
  put_uint(&x->p, 0);
  cr_assert_eq(begin(x, x->p.bytes, x->p.len), KVRELAY_OK);
  cr_assert_eq(x->batch.events, 1);
  cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 1);
  kvrelay_engine_event rest;
  cr_assert_eq(kvrelay_engine_batch_next(&x->d, &rest), 0);
  return &x->ev;
}

static bool is(kvrelay_text t, const char *word) {
  return t.len == strlen(word) && memcmp(t.ptr, word, t.len) == 0;
}

#define EVENT(X, WRITE)                                                                            \
  do {                                                                                             \
    put_batch(&(X)->p, 1);                                                                         \
    packer *p = &(X)->p;                                                                           \
    WRITE;                                                                                         \
  } while (0)

/* ---- whole payloads ---- */

Test(payloads, errors_are_told_apart) {
  decoding *x = open_decoder(64);
  static const struct {
    uint8_t bytes[16];
    size_t len;
    int err;
  } cases[] = {
      {{0}, 0, KVRELAY_ERR_TRUNCATED},
      {{0x93, 0xcb, 0, 0}, 4, KVRELAY_ERR_TRUNCATED},
      {{0x93, 0, 0x91}, 3, KVRELAY_ERR_TRUNCATED},
      {{0xdd, 0xff, 0xff, 0xff, 0xff, 0, 0x90}, 7, KVRELAY_ERR_TRUNCATED}, /* 2^32 - 1 elements */
      {{0xdf, 0xff, 0xff, 0xff, 0xff, 0, 0x90}, 7, KVRELAY_ERR_TRUNCATED},
      {{0x92, 0, 0xdb, 0xff, 0xff, 0xff, 0xff, 'x'},
       8,
       KVRELAY_ERR_TRUNCATED}, /* a string of 4 GiB */
      {{0x92, 0, 0xc6, 0xff, 0xff, 0xff, 0xff, 'x'}, 8, KVRELAY_ERR_TRUNCATED},
      {{0x93, 0, 0x90, 0xc1}, 4, KVRELAY_ERR_MALFORMED},
      {{0xc1}, 1, KVRELAY_ERR_MALFORMED},
      {{0xc0}, 1, KVRELAY_ERR_MALFORMED}, /* well-formed, but no batch */
      {{0x07}, 1, KVRELAY_ERR_MALFORMED},
      {{0x90}, 1, KVRELAY_ERR_MALFORMED},
      {{0x91, 0x00}, 2, KVRELAY_ERR_MALFORMED},
      {{0x92, 0, 0xc0}, 3, KVRELAY_ERR_MALFORMED},
      {{0x92, 0, 0x80}, 3, KVRELAY_ERR_MALFORMED},
      {{0x80}, 1, KVRELAY_ERR_MALFORMED},
      {{0x81, 0xa6, 'e', 'v', 'e', 'n', 't', 's', 0x07}, 9, KVRELAY_ERR_MALFORMED},
      {{0x92, 0, 0x90}, 3, KVRELAY_OK}, /* early SGLang sends two elements */
      {{0x95, 0, 0x90, 0xc0, 1, 2}, 6, KVRELAY_OK},
      {{0x92, 0xc0, 0x90}, 3, KVRELAY_OK}, /* any timestamp */
      {{0x81, 0xa6, 'e', 'v', 'e', 'n', 't', 's', 0x90}, 9, KVRELAY_OK},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    cr_assert_eq(begin(x, cases[i].bytes, cases[i].len), cases[i].err, "case %zu", i);
    cr_assert_eq(x->batch.events, 0);
    cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 0);
  }
  close_decoder(x);
}

Test(payloads, nesting_ends_at_32) {
  decoding *x = open_decoder(64);
  for (size_t depth = 1; depth <= 64; depth++) {
    /* [1.5, [], 0, [[ … ]]]: `depth` levels, the batch included */
    packer *p = &x->p;
    p->len = 0;
    put_array(p, 4);
    put_float(p);
    put_array(p, 0);
    put_uint(p, 0);
    for (size_t i = 1; i < depth; i++) {
      put_byte(p, i % 2 ? 0x91 : 0x81);
      if (i % 2 == 0)
        put_nil(p); /* the key */
    }
    put_nil(p);
    cr_assert_eq(begin(x, p->bytes, p->len),
                 depth <= KVRELAY_ENGINE_DEPTH_MAX ? KVRELAY_OK : KVRELAY_ERR_LIMIT, "depth %zu",
                 depth);
  }
  close_decoder(x);
}

Test(payloads, rank_in_all_its_forms) {
  static const struct {
    uint8_t bytes[10];
    size_t len;
    bool has, odd;
    uint32_t rank;
  } cases[] = {
      {{0x05}, 1, true, false, 5},
      {{0xd0, 0x05}, 2, true, false, 5},
      {{0xcf, 0, 0, 0, 0, 0, 0, 0, 7}, 9, true, false, 7},
      {{0xce, 0xff, 0xff, 0xff, 0xff}, 5, true, false, UINT32_MAX},
      {{0xff}, 1, true, false, UINT32_MAX}, /* -1 */
      {{0xd2, 0x80, 0, 0, 0}, 5, true, false, UINT32_C(0x80000000)},
      {{0xd3, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff}, 9, false, true, 0}, /* below -2^31 */
      {{0xcf, 0, 0, 0, 1, 0, 0, 0, 0}, 9, false, true, 0},
      {{0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 9, false, true, 0},
      {{0xc0}, 1, false, false, 0},
      {{0xa1, '1'}, 2, false, true, 0},
      {{0xca, 0, 0, 0, 0}, 5, false, true, 0},
      {{0xc3}, 1, false, true, 0},
      {{0x91, 0x00}, 2, false, true, 0},
  };
  decoding *x = open_decoder(64);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    uint8_t bytes[16] = {0x93, 0, 0x90};
    memcpy(bytes + 3, cases[i].bytes, cases[i].len);
    cr_assert_eq(begin(x, bytes, 3 + cases[i].len), KVRELAY_OK);
    cr_assert_eq(x->batch.has_rank, cases[i].has, "case %zu", i);
    cr_assert_eq(x->batch.rank_type, cases[i].odd, "case %zu", i);
    cr_assert_eq(x->batch.rank, cases[i].rank, "case %zu", i);
  }
  close_decoder(x);
}

Test(payloads, bytes_behind_the_batch_are_reported) {
  static const uint8_t bytes[] = {0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x90, 0xc0, 0xc1, 0xc1};
  decoding *x = open_decoder(64);
  cr_assert_eq(begin(x, bytes, sizeof bytes), KVRELAY_OK);
  cr_assert_eq(x->batch.trailing_bytes, 2);
  cr_assert(x->batch.has_ts);
  cr_assert_eq(x->batch.ts, 1.5);
  close_decoder(x);
}

Test(payloads, a_map_batch_takes_the_last_of_repeated_keys) {
  decoding *x = open_decoder(64);
  packer *p = &x->p;
  p->len = 0;
  put_map(p, 5);
  put_text(p, "events");
  put_array(p, 1);
  put_cleared(p, "AllBlocksCleared", NULL);
  put_text(p, "dp_rank");
  put_uint(p, 1);
  put_uint(p, 77); /* a key that is no string */
  put_text(p, "x");
  put_text(p, "events");
  put_array(p, 2);
  put_cleared(p, "Ignored", NULL);
  put_cleared(p, "Ignored", NULL);
  put_text(p, "dp_rank");
  put_text(p, "x");
  cr_assert_eq(begin(x, p->bytes, p->len), KVRELAY_OK);
  cr_assert_eq(x->batch.events, 2);
  cr_assert_not(x->batch.has_rank);
  cr_assert(x->batch.rank_type);
  cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 1);
  cr_assert_eq(x->ev.type, KVRELAY_ENGINE_IGNORED);
  close_decoder(x);
}

/* ---- events ---- */

/* A positional BlockStored with the five first fields; `elements` are announced. */
static void put_positional(packer *p, size_t elements) {
  put_array(p, elements);
  put_text(p, "BlockStored");
  put_array(p, 1);
  put_uint(p, 9);
  put_nil(p);
  put_array(p, 1);
  put_uint(p, 3);
  put_uint(p, 1);
}

Test(events, what_is_no_event_is_malformed_and_the_next_one_is_read) {
  decoding *x = open_decoder(64);
  packer *p = &x->p;
  put_batch(p, 14);
  put_nil(p);
  put_uint(p, 7);
  put_text(p, "BlockStored");
  put_array(p, 0);
  put_map(p, 0);
  put_array(p, 2);
  put_uint(p, 1);
  put_map(p, 1);
  put_text(p, "deep");
  put_array(p, 1);
  put_uint(p, 1);
  put_array(p, 1);
  put_text(p, "BlockRemoved"); /* hashes are missing */
  put_array(p, 2);
  put_text(p, "BlockRemoved");
  put_nil(p); /* nil equals absent */
  put_map(p, 2);
  put_text(p, "type");
  put_uint(p, 3);
  put_text(p, "block_hashes");
  put_array(p, 0);
  put_map(p, 1);
  put_text(p, "block_hashes");
  put_array(p, 0);
  put_array(p, 4);
  put_text(p, "BlockStored"); /* block size is missing */
  put_array(p, 0);
  put_nil(p);
  put_array(p, 0);
  put_bool(p, true);
  put_map(p, 1);
  put_text(p, "block_hashes"); /* no tag: nobody knows what the hashes are for */
  put_array(p, 1);
  put_uint(p, 5);
  put_removed(p, HASHES(5), NULL, NULL);
  put_nil(p);
  cr_assert_eq(begin(x, p->bytes, p->len), KVRELAY_OK);
  for (int i = 0; i < 13; i++) {
    cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 1);
    cr_assert_eq(x->ev.type, KVRELAY_ENGINE_MALFORMED, "event %d", i);
    cr_assert_eq(x->ev.externals_len + x->ev.tokens_len, 0, "event %d lends nothing", i);
  }
  cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 1);
  cr_assert_eq(x->ev.type, KVRELAY_ENGINE_REMOVED);
  cr_assert_eq(x->ev.externals[0], 5);
  cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 0);
  close_decoder(x);
}

/* One hash on the wire, as the only one of a removal; true when the event is good. */
static bool hash_value(decoding *x, const uint8_t *bytes, size_t len, uint64_t *out) {
  EVENT(x, {
    put_array(p, 2);
    put_text(p, "BlockRemoved");
    put_array(p, 1);
    put_raw(p, bytes, len);
  });
  const kvrelay_engine_event *ev = only_event(x);
  *out = ev->type == KVRELAY_ENGINE_REMOVED ? ev->externals[0] : 0;
  return ev->type == KVRELAY_ENGINE_REMOVED;
}

Test(events, hashes_of_all_types) {
  decoding *x = open_decoder(64);
  uint64_t h;
  static const struct {
    uint8_t bytes[10];
    size_t len;
    bool good;
    uint64_t value;
  } cases[] = {
      {{0x00}, 1, true, 0},
      {{0x7f}, 1, true, 127},
      {{0xcc, 0xff}, 2, true, 255},
      {{0xcd, 0xff, 0xfe}, 3, true, 0xfffe},
      {{0xce, 0xff, 0xff, 0xff, 0xfd}, 5, true, 0xfffffffd},
      {{0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfc}, 9, true, UINT64_MAX - 3},
      {{0xe0}, 1, true, UINT64_MAX - 31},
      {{0xff}, 1, true, UINT64_MAX},
      {{0xd0, 0x80}, 2, true, UINT64_MAX - 127},
      {{0xd0, 0x7f}, 2, true, 127},
      {{0xd1, 0x80, 0x00}, 3, true, UINT64_MAX - 32767},
      {{0xd2, 0x80, 0, 0, 0}, 5, true, UINT64_C(0xffffffff80000000)},
      {{0xd2, 0x7f, 0, 0, 0}, 5, true, 0x7f000000},
      {{0xd3, 0x80, 0, 0, 0, 0, 0, 0, 1}, 9, true, UINT64_C(0x8000000000000001)},
      {{0xd3, 0x7f, 0, 0, 0, 0, 0, 0, 1}, 9, true, UINT64_C(0x7f00000000000001)},
      {{0xa8, '1', '2', '3', '4', '5', '6', '7', '8'}, 9, false, 0},
      {{0xca, 0x3f, 0x80, 0, 0}, 5, false, 0},
      {{0xc2}, 1, false, 0},
      {{0xc0}, 1, false, 0},
      {{0x91, 0x01}, 2, false, 0},
      {{0x81, 0x01, 0x01}, 3, false, 0},
      {{0xd4, 0x01, 0x01}, 3, false, 0}, /* ext */
      {{0xd7, 0x01, 1, 2, 3, 4, 5, 6, 7, 8}, 10, false, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    cr_assert_eq(hash_value(x, cases[i].bytes, cases[i].len, &h), cases[i].good, "case %zu", i);
    cr_assert_eq(h, cases[i].value, "case %zu: %" PRIx64, i, h);
  }
  for (size_t len = 0; len <= 40; len++) { /* binary digests: the last 8 bytes of 8 .. 32 */
    packer bin = {{0}, 0};
    uint8_t bytes[40];
    for (size_t i = 0; i < 40; i++)
      bytes[i] = (uint8_t)(i + 1);
    put_bin(&bin, bytes, len);
    bool good = len >= 8 && len <= 32;
    cr_assert_eq(hash_value(x, bin.bytes, bin.len, &h), good, "%zu bytes", len);
    uint64_t want = 0;
    for (size_t i = good ? len - 8 : len; i < len; i++)
      want = want << 8 | bytes[i];
    cr_assert_eq(h, good ? want : 0);
  }
  close_decoder(x);
}

/* A store whose token_ids are these bytes. */
static const kvrelay_engine_event *with_tokens(decoding *x, const uint8_t *bytes, size_t len) {
  EVENT(x, {
    put_array(p, 5);
    put_text(p, "BlockStored");
    put_array(p, 0);
    put_nil(p);
    put_raw(p, bytes, len);
    put_uint(p, 4);
  });
  return only_event(x);
}

Test(events, tokens_flat_or_in_pairs) {
  decoding *x = open_decoder(64);
  const kvrelay_engine_event *ev =
      with_tokens(x, (const uint8_t[]){0x93, 0, 0xce, 0xff, 0xff, 0xff, 0xff, 0xd0, 5}, 9);
  cr_assert_eq(ev->type, KVRELAY_ENGINE_STORED);
  cr_assert_eq(ev->tokens_len, 3);
  cr_assert_eq(ev->tokens[1], UINT32_MAX);
  cr_assert_eq(ev->tokens[2], 5);
  cr_assert_not(ev->pairs);
  ev = with_tokens(x, (const uint8_t[]){0x90}, 1);
  cr_assert_eq(ev->type, KVRELAY_ENGINE_STORED);
  cr_assert_eq(ev->tokens_len, 0);
  cr_assert_not(ev->pairs);
  ev = with_tokens(x, (const uint8_t[]){0x92, 0x92, 1, 2, 0x92, 2, 3}, 7);
  cr_assert_eq(ev->tokens_len, 3);
  cr_assert(ev->pairs);
  cr_assert_not(ev->pair_gap);
  cr_assert_eq(ev->tokens[0] + 10 * ev->tokens[1] + 100 * ev->tokens[2], 321);
  ev = with_tokens(x, (const uint8_t[]){0x92, 0x92, 1, 2, 0x92, 7, 3}, 7);
  cr_assert(ev->pair_gap);
  cr_assert_eq(ev->tokens[0] + 10 * ev->tokens[1] + 100 * ev->tokens[2], 371);
  static const struct {
    uint8_t bytes[12];
    size_t len;
  } bad[] = {
      {{0x92, 1, 0x92, 1, 2}, 5},
      {{0x92, 0x92, 1, 2, 3}, 5},
      {{0x91, 0x91, 1}, 3},
      {{0x91, 0x93, 1, 2, 3}, 5},
      {{0x91, 0x92, 1, 0xff}, 4},
      {{0x91, 0xff}, 2},
      {{0x91, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0}, 10},
      {{0x91, 0xa1, 'x'}, 3},
      {{0x91, 0xca, 0, 0, 0, 0}, 6},
      {{0x80}, 1},
      {{0xc4, 1, 1}, 3},
      {{0x91, 0xc0}, 2},
      {{0x91, 0x92, 0x91, 1, 2}, 5},
      {{0xc0}, 1},
  };
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    cr_assert_eq(with_tokens(x, bad[i].bytes, bad[i].len)->type, KVRELAY_ENGINE_MALFORMED,
                 "case %zu", i);
  close_decoder(x);
}

Test(events, known_fields_of_wrong_types_are_malformed) {
  static const struct {
    const char *key;
    uint8_t bytes[4];
    size_t len;
    bool malformed;
  } cases[] = {
      {"block_hashes", {0x07}, 1, true},
      {"parent_block_hash", {0xa1, 'x'}, 2, true},
      {"block_size", {0xff}, 1, true},
      {"block_size", {0xa1, '4'}, 2, true},
      {"medium", {0x07}, 1, true},
      {"lora_name", {0x07}, 1, true},
      {"extra_keys", {0x07}, 1, true},
      {"extra_keys", {0x91, 0x07}, 2, true},
      {"group_idx", {0xa1, '0'}, 2, true},
      {"kv_cache_spec_kind", {0x07}, 1, true},
      {"kv_cache_spec_sliding_window", {0xa1, 'x'}, 2, true},
      {"locality", {0x07}, 1, true},
      {"ownership", {0xc3}, 1, true},
      {"cache_salt", {0x07}, 1, true},
      {"block_mm_infos", {0x07}, 1, true},
      {"block_mm_infos", {0x91, 0x07}, 2, true},
      {"lora_id", {0xa1, 'x'}, 2, false}, /* any type */
      {"session_id", {0x07}, 1, false},
      {"namespaced_block_hashes", {0x07}, 1, false},
      {"token_offset", {0xa1, 'x'}, 2, false},
      {"mm_keys", {0x07}, 1, false},
      {"never_heard_of", {0x91, 0x80}, 2, false},
  };
  decoding *x = open_decoder(64);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    for (int repaired = 0; repaired < 2; repaired++) {
      /* `repaired`: the key comes again with nil, and the last one wins; required ones are then
       * missing. */
      EVENT(x, {
        put_map(p, 5 + (size_t)repaired);
        put_text(p, "block_hashes");
        put_array(p, 0);
        put_text(p, "token_ids");
        put_array(p, 0);
        put_text(p, "block_size");
        put_uint(p, 4);
        put_text(p, cases[i].key);
        put_raw(p, cases[i].bytes, cases[i].len);
        if (repaired) {
          put_text(p, cases[i].key);
          put_nil(p);
        }
        put_text(p, "type");
        put_text(p, "BlockStored");
      });
      bool required = i == 0 || i == 2 || i == 3;
      bool malformed = cases[i].malformed && (!repaired || required);
      cr_assert_eq(only_event(x)->type,
                   malformed ? KVRELAY_ENGINE_MALFORMED : KVRELAY_ENGINE_STORED, "%s %d",
                   cases[i].key, repaired);
    }
  close_decoder(x);
}

Test(events, fields_that_a_tag_does_not_have_may_hold_anything) {
  decoding *x = open_decoder(64);
  EVENT(x, {
    put_map(p, 4);
    put_text(p, "token_ids");
    put_text(p, "none");
    put_text(p, "extra_keys");
    put_uint(p, 7);
    put_text(p, "type");
    put_text(p, "BlockRemoved");
    put_text(p, "block_hashes");
    put_array(p, 0);
  });
  cr_assert_eq(only_event(x)->type, KVRELAY_ENGINE_REMOVED);
  close_decoder(x);
}

Test(events, lora_ids_of_any_type) {
  static const struct {
    uint8_t bytes[2];
    size_t len;
    bool set;
  } cases[] = {{{0xc0}, 1, false}, {{0x00}, 1, false},     {{0x01}, 1, true},
               {{0xff}, 1, true},  {{0xa1, 'x'}, 2, true}, {{0xd0, 0x00}, 2, false}};
  decoding *x = open_decoder(64);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    EVENT(x, {
      put_positional(p, 6);
      put_raw(p, cases[i].bytes, cases[i].len);
    });
    const kvrelay_engine_event *ev = only_event(x);
    cr_assert_eq(ev->type, KVRELAY_ENGINE_STORED);
    cr_assert_eq(ev->lora_id_set, cases[i].set, "case %zu", i);
  }
  close_decoder(x);
}

Test(events, metadata_at_the_place_of_the_name) {
  decoding *x = open_decoder(64);
  EVENT(x, {
    put_positional(p, 8);
    put_nil(p);
    put_nil(p);
    put_map(p, 4);
    put_text(p, "other");
    put_uint(p, 1);
    put_uint(p, 5);
    put_nil(p);
    put_text(p, "lora_name");
    put_text(p, "adapter-a");
    put_text(p, "cache_salt");
    put_text(p, "tenant-a");
  });
  const kvrelay_engine_event *ev = only_event(x);
  cr_assert_eq(ev->type, KVRELAY_ENGINE_STORED);
  cr_assert(is(ev->lora_name, "adapter-a"));
  cr_assert(is(ev->cache_salt, "tenant-a"));
  EVENT(x, {
    put_positional(p, 8);
    put_nil(p);
    put_nil(p);
    put_map(p, 2);
    put_text(p, "lora_name");
    put_nil(p);
    put_text(p, "cache_salt");
    put_uint(p, 7);
  });
  ev = only_event(x);
  cr_assert_eq(ev->type, KVRELAY_ENGINE_STORED);
  cr_assert_eq(ev->lora_name.len + ev->cache_salt.len, 0);
  close_decoder(x);
}

Test(events, all_positions_of_a_store) {
  decoding *x = open_decoder(64);
  EVENT(x, {
    put_array(p, 16);
    put_text(p, "BlockStored");
    put_array(p, 2);
    put_uint(p, 1);
    put_int(p, -2);
    put_uint(p, 77);
    put_array(p, 1);
    put_uint(p, 3);
    put_uint(p, 16);
    put_uint(p, 4);
    put_text(p, "GPU");
    put_text(p, "adapter-a");
    put_array(p, 1);
    put_nil(p);
    put_uint(p, 2);
    put_text(p, "full_attention");
    put_uint(p, 512);
    put_text(p, "LOCAL");
    put_text(p, "kvcr");
    put_array(p, 0); /* beyond what is known */
    put_text(p, "x");
  });
  const kvrelay_engine_event *ev = only_event(x);
  cr_assert_eq(ev->type, KVRELAY_ENGINE_STORED);
  cr_assert(ev->positional);
  cr_assert_eq(ev->elements_len, 16);
  cr_assert_eq(ev->externals_len, 2);
  cr_assert_eq(ev->externals[1], UINT64_MAX - 1);
  cr_assert(ev->has_parent);
  cr_assert_eq(ev->parent, 77);
  cr_assert_eq(ev->block_size, 16);
  cr_assert(ev->lora_id_set);
  cr_assert(ev->has_medium && is(ev->medium, "GPU"));
  cr_assert(is(ev->lora_name, "adapter-a"));
  cr_assert_eq(ev->extra_keys_blocks, 1);
  cr_assert_eq(ev->extra_keys_len, 0);
  cr_assert(ev->has_group);
  cr_assert_eq(ev->group, 2);
  cr_assert(ev->has_kind && is(ev->kind, "full_attention"));
  cr_assert(ev->has_locality && is(ev->locality, "LOCAL"));
  cr_assert(ev->has_ownership && is(ev->ownership, "kvcr"));
  cr_assert_not(ev->has_mm_infos);
  close_decoder(x);
}

/* ---- the tail of positional events ---- */

typedef struct tail {
  const char *slots; /* n nil, a array, m map, b bool, f float, - negative, + beyond 32 bits,
                        digits, L R K k texts */
  int group, kind, locality, ownership;
  bool infos; /* -1 = absent; else which letter or number */
} tail;

static void put_slots(packer *p, const char *slots) {
  for (; *slots; slots++) {
    if (*slots >= '0' && *slots <= '9')
      put_uint(p, (uint64_t)(*slots - '0'));
    else if (*slots == 'n')
      put_nil(p);
    else if (*slots == 'a')
      put_raw(p, "\x91\xc0", 2);
    else if (*slots == 'm')
      put_map(p, 0);
    else if (*slots == 'b')
      put_bool(p, true);
    else if (*slots == 'f')
      put_float(p);
    else if (*slots == '-')
      put_int(p, -5);
    else if (*slots == '+')
      put_uint(p, UINT64_C(1) << 32);
    else
      put_text(p, *slots == 'L' ? "LOCAL" : *slots == 'R' ? "REMOTE" : *slots == 'K' ? "K" : "k");
  }
}

/* 'L' for LOCAL and so on, -1 when absent. */
static int letter(bool has, kvrelay_text t) { return !has ? -1 : t.ptr[0]; }

/* As long as the list of tails. */
Test(events, tails) {
  static const tail cases[] = {
      {"", -1, -1, -1, -1, false},
      {"2", 2, -1, -1, -1, false},
      {"2K", 2, 'K', -1, -1, false},
      {"2K5", 2, 'K', -1, -1, false},
      /* four or five slots that do not contradict the order */
      {"2K5L", 2, 'K', 'L', -1, false},
      {"2K5Lk", 2, 'K', 'L', 'k', false},
      {"2K5Kk", 2, 'K', 'K', 'k', false},
      {"nnnLK", -1, -1, 'L', 'K', false},
      {"nnnnK", -1, -1, -1, 'K', false},
      {"nnnK", -1, -1, 'K', -1, false},
      {"2Knnn", 2, 'K', -1, -1, false},
      /* odd slots count as nil */
      {"mK5L", -1, 'K', 'L', -1, false},
      {"2b5L", 2, -1, 'L', -1, false},
      {"2KfLk", 2, 'K', 'L', 'k', false},
      {"-K5L", -1, 'K', 'L', -1, false},
      {"+K5L", -1, 'K', 'L', -1, false},
      /* by type: too short, an array, or out of order */
      {"K", -1, 'K', -1, -1, false},
      {"L", -1, -1, 'L', -1, false},
      {"R", -1, -1, 'R', -1, false},
      {"KL", -1, 'K', 'L', -1, false},
      {"LK2", 2, 'K', 'L', -1, false},
      {"23", 2, -1, -1, -1, false},
      {"a", -1, -1, -1, -1, true},
      {"2a", 2, -1, -1, -1, true},
      {"2K5a", 2, 'K', -1, -1, true},
      {"2K5aL", 2, 'K', 'L', -1, true},
      {"K25L", 2, 'K', 'L', -1, false},
      {"Kk2L", 2, 'K', 'L', -1, false},
      {"22KL", 2, 'K', 'L', -1, false},
      {"n-Kf", -1, 'K', -1, -1, false},
      /* behind the fifth nothing counts */
      {"nnnnnK", -1, -1, -1, -1, false},
      {"2K5Lka", 2, 'K', 'L', 'k', false},
  };
  decoding *x = open_decoder(64);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    for (int removal = 0; removal < 2; removal++) {
      const tail *t = &cases[i];
      EVENT(x, {
        if (removal) {
          put_array(p, 3 + strlen(t->slots));
          put_text(p, "BlockRemoved");
          put_array(p, 0);
          put_nil(p);
        } else {
          put_positional(p, 9 + strlen(t->slots));
          for (int n = 0; n < 4; n++)
            put_nil(p);
        }
        put_slots(p, t->slots);
      });
      const kvrelay_engine_event *ev = only_event(x);
      cr_assert_eq(ev->type, removal ? KVRELAY_ENGINE_REMOVED : KVRELAY_ENGINE_STORED, "\"%s\"",
                   t->slots);
      cr_assert_eq(ev->has_group ? (int)ev->group : -1, t->group, "group of \"%s\"", t->slots);
      cr_assert_eq(letter(ev->has_kind, ev->kind), t->kind, "kind of \"%s\"", t->slots);
      cr_assert_eq(letter(ev->has_locality, ev->locality), t->locality, "locality of \"%s\"",
                   t->slots);
      cr_assert_eq(letter(ev->has_ownership, ev->ownership), t->ownership, "ownership of \"%s\"",
                   t->slots);
      cr_assert_eq(ev->has_mm_infos, t->infos && !removal, "infos of \"%s\"", t->slots);
    }
  close_decoder(x);
}

/* ---- limits ---- */

Test(limits, what_does_not_fit_is_too_large_and_the_next_event_is_read) {
  decoding *x = open_decoder(64);
  packer *p = &x->p;
  for (int what = 0; what < 4; what++) {
    put_batch(p, 2);
    put_map(p, what < 2 ? 4 : 5);
    put_text(p, "type");
    put_text(p, "BlockStored");
    put_text(p, "block_hashes");
    put_array(p, what == 0 ? 65 : 0);
    for (int i = 0; what == 0 && i < 65; i++)
      put_uint(p, (uint64_t)i);
    put_text(p, "token_ids");
    put_array(p, what == 1 ? 300 : 0);
    for (int i = 0; what == 1 && i < 300; i++)
      put_uint(p, (uint64_t)i);
    put_text(p, "block_size");
    put_uint(p, 4);
    if (what >= 2) {
      put_text(p, what == 2 ? "extra_keys" : "block_mm_infos");
      put_array(p, 1);
      if (what == 3) {
        put_map(p, 1);
        put_text(p, "mm_objects");
      }
      put_array(p, 500);
      for (int i = 0; i < 500; i++) {
        if (what == 2) {
          put_text(p, "x");
          continue;
        }
        put_map(p, 1);
        put_text(p, "mm_hash");
        put_uint(p, (uint64_t)i);
      }
    }
    put_removed(p, HASHES(5), NULL, NULL);
    put_uint(p, 0);
    cr_assert_eq(begin(x, p->bytes, p->len), KVRELAY_OK);
    cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 1);
    cr_assert_eq(x->ev.type, KVRELAY_ENGINE_TOO_LARGE, "%d", what);
    cr_assert_eq(kvrelay_engine_batch_next(&x->d, &x->ev), 1);
    cr_assert_eq(x->ev.type, KVRELAY_ENGINE_REMOVED, "%d", what);
  }
  close_decoder(x);
}

Test(limits, memory) {
  kvrelay_engine_decoder d;
  size_t need = kvrelay_engine_decoder_mem_size(64);
  void *mem = malloc(need);
  cr_assert_eq(kvrelay_engine_decoder_mem_size(63), 0);
  cr_assert_eq(kvrelay_engine_decoder_mem_size(((size_t)1 << 28) + 1), 0);
  cr_assert_eq(kvrelay_engine_decoder_init(&d, 63, mem, need), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_engine_decoder_init(&d, 64, NULL, need), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_engine_decoder_init(&d, 64, mem, need - 1), KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_engine_decoder_init(&d, 64, mem, need), KVRELAY_OK);
  free(mem);
}

/* ---- payloads that nobody should send ---- */

/* Whatever the bytes are: begin and next end, and nothing is read or written out of bounds (the
 * sanitizers watch). */
static void survive(feeder *f, const uint8_t *bytes, size_t len) {
  uint8_t *copy = malloc(len + (len == 0));
  memcpy(copy, bytes, len);
  cr_assert_eq(kvrelay_engine_feed(&f->decoder, &f->source, f->sequence++, copy, len, 0),
               KVRELAY_OK);
  free(copy);
}

/* A batch with everything in it. */
static void put_rich(packer *p) {
  static const packer keys = {{0x92, 0x93, 0xa1, 'x', 0x92, 0xa1, 'y', 0xff, 0xc4, 1, 1, 0xc0}, 12};
  packer infos = {{0}, 0};
  put_array(&infos, 2);
  put_nil(&infos);
  put_map(&infos, 1);
  put_text(&infos, "mm_objects");
  put_array(&infos, 1);
  put_map(&infos, 1);
  put_text(&infos, "mm_hash");
  put_uint(&infos, 99);
  put_batch(p, 6);
  put_stored(p, (stored){.hashes = HASHES(1, 2),
                         .count = 8,
                         .parent = PARENT(0),
                         .medium = "GPU",
                         .lora_name = "a",
                         .cache_salt = "s",
                         .kind = "full_attention",
                         .group = GROUP(0),
                         .extra_keys = &keys,
                         .mm_infos = &infos});
  put_stored(p, (stored){.hashes = HASHES(3), .count = 5, .pairs = true});
  put_positional(p, 13);
  for (int i = 0; i < 4; i++)
    put_nil(p);
  put_slots(p, "2K5L");
  put_removed(p, HASHES(1, 3), "GPU", NULL);
  put_cleared(p, "TierBlocksCleared", "CPU");
  put_cleared(p, "AllBlocksCleared", NULL);
  put_uint(p, 1);
}

Test(garbage, every_prefix_and_every_changed_byte) {
  kvrelay_source_config cfg = test_source_config();
  feeder *f = feeder_new(&cfg, 256, NULL);
  packer *p = calloc(1, sizeof *p);
  put_rich(p);
  survive(f, p->bytes, p->len);
  cr_assert_eq(kvrelay_source_stats_get(&f->source)->stored, 3, "the whole one is understood");
  cr_assert_eq(counted(f, KVRELAY_COUNT_MALFORMED_EVENT), 0);
  for (size_t len = 0; len < p->len; len++) {
    kvrelay_engine_batch batch;
    uint8_t *copy = malloc(len + (len == 0));
    memcpy(copy, p->bytes, len);
    cr_assert_eq(kvrelay_engine_batch_begin(&f->decoder, copy, len, &batch), KVRELAY_ERR_TRUNCATED,
                 "%zu bytes", len);
    free(copy);
  }
  for (size_t at = 0; at < p->len; at++) {
    uint8_t before = p->bytes[at];
    for (int value = 0; value < 256; value++) {
      p->bytes[at] = (uint8_t)value;
      survive(f, p->bytes, p->len);
    }
    p->bytes[at] = before;
  }
  cr_assert_eq(ckf_producer_check_(f->producer), CKF_OK);
  free(p);
  feeder_free(f);
}

Test(garbage, random_bytes_and_random_splices) {
  kvrelay_source_config cfg = test_source_config();
  feeder *f = feeder_new(&cfg, 256, NULL);
  packer *p = calloc(1, sizeof *p), *rich = calloc(1, sizeof *rich);
  uint64_t random = 99;
  put_rich(rich);
  for (int round = 0; round < 60000; round++) {
    p->len = 0;
    if (round % 2 == 0) {
      put_byte(p, 0x93);
      put_nil(p);
      put_byte(p, 0x90 | (ckf_rng_draw(&random) & 15));
      for (size_t n = ckf_rng_draw(&random) % 60; n != 0; n--)
        put_byte(p, ckf_rng_draw(&random) & 0xff);
    } else {
      put_raw(p, rich->bytes, rich->len);
      for (size_t n = ckf_rng_draw(&random) % 4; n != 0; n--) { /* a piece of it somewhere else */
        size_t from = ckf_rng_draw(&random) % rich->len, to = ckf_rng_draw(&random) % rich->len,
               len = ckf_rng_draw(&random) % 30;
        if (from + len <= rich->len && to + len <= rich->len)
          memmove(p->bytes + to, rich->bytes + from, len);
      }
    }
    survive(f, p->bytes, p->len);
  }
  cr_assert_eq(ckf_producer_check_(f->producer), CKF_OK);
  free(p);
  free(rich);
  feeder_free(f);
}
