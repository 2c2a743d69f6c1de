/* SPDX-License-Identifier: Apache-2.0 */
#include "engine_hash.h"

#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

/* ---- pickle, protocol 5: one frame of what the hash is made from ---- */

typedef struct pickle {
  uint8_t *bytes;
  size_t len;
} pickle;

static void put(pickle *p, const void *bytes, size_t len) {
  memcpy(p->bytes + p->len, bytes, len);
  p->len += len;
}

static void op(pickle *p, uint8_t code) { put(p, &code, 1); }

static void put_le(pickle *p, uint64_t value, size_t len) {
  for (size_t i = 0; i < len; i++)
    op(p, (uint8_t)(value >> (8 * i)));
}

#define MEMOIZE 0x94
#define HEAD_LEN 11 /* PROTO 5, FRAME and its length */

static void begin(pickle *p) { p->len = HEAD_LEN; }

static void end(pickle *p) {
  op(p, '.');
  pickle head = {p->bytes, 0};
  put(&head, "\x80\x05\x95", 3);
  put_le(&head, p->len - HEAD_LEN, 8);
}

static void put_number(pickle *p, uint32_t value) {
  if (value < 0x100) {
    op(p, 'K');
    put_le(p, value, 1);
  } else if (value < 0x10000) {
    op(p, 'M');
    put_le(p, value, 2);
  } else if (value <= INT32_MAX) {
    op(p, 'J');
    put_le(p, value, 4);
  } else {
    put(p, "\x8a\x05", 2); /* LONG1 of five bytes: the top bit is the sign */
    put_le(p, value, 5);
  }
}

static void put_tuple(pickle *p, const uint32_t *tokens, size_t len) {
  if (len > 3)
    op(p, '(');
  for (size_t i = 0; i < len; i++)
    put_number(p, tokens[i]);
  if (len > 3)
    op(p, 't');
  else
    op(p, len == 0 ? ')' : (uint8_t)(0x84 + len));
  if (len != 0)
    op(p, MEMOIZE);
}

/* The last 8 bytes of a digest, or the first 8, as a big-endian number. */
static uint64_t eight(const uint8_t *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++)
    value = value << 8 | bytes[i];
  return value;
}

size_t engine_hash_vllm(const char *seed, const uint32_t *tokens, size_t tokens_len,
                        size_t block_size, uint64_t *out, size_t cap) {
  uint8_t digest[SHA256_DIGEST_LENGTH];
  size_t blocks = block_size == 0 ? 0 : tokens_len / block_size, seed_len = strlen(seed);
  pickle p = {malloc(512 + 8 * block_size), 0};
  if (blocks > cap)
    blocks = cap;
  if (p.bytes == NULL || seed_len > 255)
    blocks = 0;
  if (blocks != 0) {
    begin(&p);
    op(&p, 0x8c); /* SHORT_BINUNICODE */
    put_le(&p, seed_len, 1);
    put(&p, seed, seed_len);
    op(&p, MEMOIZE);
    end(&p);
    SHA256(p.bytes, p.len, digest);
  }
  for (size_t i = 0; i < blocks; i++) {
    begin(&p);
    put(&p, "C\x20", 2); /* SHORT_BINBYTES */
    put(&p, digest, sizeof digest);
    op(&p, MEMOIZE);
    put_tuple(&p, tokens + i * block_size, block_size);
    put(&p, "N\x87", 2); /* NONE, TUPLE3 */
    op(&p, MEMOIZE);
    end(&p);
    SHA256(p.bytes, p.len, digest);
    out[i] = eight(digest + sizeof digest - 8);
  }
  free(p.bytes);
  return blocks;
}

size_t engine_hash_sglang(const uint32_t *tokens, size_t tokens_len, size_t block_size,
                          uint64_t *out, size_t cap) {
  uint8_t digest[SHA256_DIGEST_LENGTH];
  size_t blocks = block_size == 0 ? 0 : tokens_len / block_size;
  pickle p = {malloc(SHA256_DIGEST_LENGTH + 4 * block_size), 0};
  if (p.bytes == NULL)
    blocks = 0;
  for (size_t i = 0; i < blocks && i < cap; i++) {
    p.len = 0;
    if (i != 0)
      put(&p, digest, sizeof digest);
    for (size_t j = 0; j < block_size; j++)
      put_le(&p, tokens[i * block_size + j], 4);
    SHA256(p.bytes, p.len, digest);
    out[i] = eight(digest);
  }
  free(p.bytes);
  return blocks < cap ? blocks : cap;
}
