/* SPDX-License-Identifier: Apache-2.0 */
/* msgpack_read.h - values of msgpack in bytes of a peer, without allocation; for the decoders here.
 */
#ifndef KVRELAY_MSGPACK_READ_H
#define KVRELAY_MSGPACK_READ_H

#include <mpack.h>
#include <string.h>

#include "engine_events.h"

typedef kvrelay_engine_cursor_ cursor;

/* ---- tokens ---- */

/*
 * Unsigned integers, read here because they come by the thousand, as token ids and hashes, while
 * everything else comes by the dozen. False: another token, or one that is cut off.
 */
static inline bool read_unsigned(cursor *c, uint64_t *out) {
  const uint8_t *p = (const uint8_t *)c->at;
  if (c->left == 0)
    return false;
  size_t width = p[0] <= 0x7f ? 0 : p[0] >= 0xcc && p[0] <= 0xcf ? (size_t)1 << (p[0] - 0xcc) : 9;
  if (width >= c->left || width == 9)
    return false;
  switch (width) {
  case 0:
    *out = p[0];
    break;
  case 1:
    *out = p[1];
    break;
  case 2:
    *out = (uint64_t)p[1] << 8 | p[2];
    break;
  default:
    *out = (uint64_t)p[1] << 24 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 8 | p[4];
    if (width == 8)
      *out = *out << 32 | (uint64_t)p[5] << 24 | (uint64_t)p[6] << 16 | (uint64_t)p[7] << 8 | p[8];
    break;
  }
  c->at += width + 1;
  c->left -= width + 1;
  return true;
}

/* One token.  A string's or binary's bytes follow as a chunk, see read_bytes. */
static inline int read_token(cursor *c, mpack_token_t *t) {
  mpack_tokbuf_t buffer;
  uint64_t number;
  if (read_unsigned(c, &number)) {
    t->type = MPACK_TOKEN_UINT;
    t->length = sizeof number;
    t->data.value.lo = (mpack_uint32_t)number;
    t->data.value.hi = (mpack_uint32_t)(number >> 32);
    return KVRELAY_OK;
  }
  if (c->left == 0)
    return KVRELAY_ERR_TRUNCATED;
  mpack_tokbuf_init(&buffer);
  int result = mpack_read(&buffer, &c->at, &c->left, t);
  return result == MPACK_OK    ? KVRELAY_OK
         : result == MPACK_EOF ? KVRELAY_ERR_TRUNCATED
                               : KVRELAY_ERR_MALFORMED;
}

static inline int read_bytes(cursor *c, size_t len, kvrelay_text *out) {
  if (len > c->left)
    return KVRELAY_ERR_TRUNCATED;
  out->ptr = (const uint8_t *)c->at;
  out->len = len;
  c->at += len;
  c->left -= len;
  return KVRELAY_OK;
}

static inline bool has_bytes(const mpack_token_t *t) {
  return t->type == MPACK_TOKEN_STR || t->type == MPACK_TOKEN_BIN || t->type == MPACK_TOKEN_EXT;
}

/* Passes over one value of any kind, everything below it included, of at most `depth_max` levels.
 */
static inline int skip_levels(cursor *c, size_t depth_max) {
  uint64_t open[KVRELAY_ENGINE_DEPTH_MAX + 1] = {1}; /* values still to come, per level */
  size_t depth = 0;
  while (open[0] != 0 || depth != 0) {
    mpack_token_t t;
    kvrelay_text ignored;
    uint64_t number;
    while (open[depth] != 0 && read_unsigned(c, &number))
      open[depth]--;
    if (open[depth] == 0) {
      if (depth != 0)
        depth--;
      continue;
    }
    open[depth]--;
    int err = read_token(c, &t);
    if (err == KVRELAY_OK && has_bytes(&t))
      err = read_bytes(c, t.length, &ignored);
    if (err != KVRELAY_OK)
      return err;
    if (t.type == MPACK_TOKEN_ARRAY || t.type == MPACK_TOKEN_MAP) {
      if (depth == depth_max)
        return KVRELAY_ERR_LIMIT;
      open[++depth] = t.type == MPACK_TOKEN_MAP ? 2 * (uint64_t)t.length : t.length;
    }
  }
  return KVRELAY_OK;
}

static inline int skip_value(cursor *c) { return skip_levels(c, KVRELAY_ENGINE_DEPTH_MAX); }

/* The readers below work on payloads that skip_levels accepted: no token is missing.  Each reads
 * one whole value. */

static inline mpack_token_t next(cursor *c) {
  mpack_token_t t;
  if (read_token(c, &t) != KVRELAY_OK) {
    memset(&t, 0, sizeof t);
    t.type = MPACK_TOKEN_NIL;
  }
  return t;
}

/* What is behind a head: bytes of a string, values of a container. */
static inline void skip_rest(cursor *c, const mpack_token_t *head) {
  kvrelay_text ignored;
  uint64_t values = head->type == MPACK_TOKEN_ARRAY ? head->length
                    : head->type == MPACK_TOKEN_MAP ? 2 * (uint64_t)head->length
                                                    : 0;
  if (has_bytes(head))
    (void)read_bytes(c, head->length, &ignored);
  while (values-- != 0)
    if (skip_value(c) != KVRELAY_OK)
      return;
}

/* A string; false when the value is something else, which is then passed over. */
static inline bool read_text(cursor *c, kvrelay_text *out) {
  mpack_token_t t = next(c);
  if (t.type == MPACK_TOKEN_STR)
    return read_bytes(c, t.length, out) == KVRELAY_OK;
  skip_rest(c, &t);
  return false;
}

static inline bool text_is(kvrelay_text t, const char *word) {
  return t.len == strlen(word) && memcmp(t.ptr, word, t.len) == 0;
}

static inline uint64_t token_u64(const mpack_token_t *t) {
  return (uint64_t)t->data.value.hi << 32 | t->data.value.lo;
}

/* Any integer as 64 bits, negative ones in two's complement. */
static inline bool integer_of(const mpack_token_t *t, uint64_t *out) {
  if (t->type == MPACK_TOKEN_UINT)
    *out = token_u64(t);
  else if (t->type == MPACK_TOKEN_SINT)
    *out = (uint64_t)(int64_t)mpack_unpack_sint(*t);
  else
    return false;
  return true;
}

#endif
