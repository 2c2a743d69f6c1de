/* SPDX-License-Identifier: Apache-2.0 */
#include "engine_events.h"

#include <mpack.h>
#undef bool /* libmpack's header brings one of its own along */
#include <string.h>

typedef kvrelay_engine_cursor_ cursor;

/* ---- tokens ---- */

/* One token.  A string's or binary's bytes follow as a chunk, see read_bytes. */
static int read_token(cursor *c, mpack_token_t *t) {
  mpack_tokbuf_t buffer;
  mpack_tokbuf_init(&buffer);
  if (c->left == 0)
    return KVRELAY_ERR_TRUNCATED;
  int result = mpack_read(&buffer, &c->at, &c->left, t);
  return result == MPACK_OK ? KVRELAY_OK : result == MPACK_EOF ? KVRELAY_ERR_TRUNCATED : KVRELAY_ERR_MALFORMED;
}

static int read_bytes(cursor *c, size_t len, kvrelay_text *out) {
  if (len > c->left)
    return KVRELAY_ERR_TRUNCATED;
  out->ptr = (const uint8_t *)c->at;
  out->len = len;
  c->at += len;
  c->left -= len;
  return KVRELAY_OK;
}

static bool has_bytes(const mpack_token_t *t) {
  return t->type == MPACK_TOKEN_STR || t->type == MPACK_TOKEN_BIN || t->type == MPACK_TOKEN_EXT;
}

/* Passes over one value of any kind; everything below it included. */
static int skip_value(cursor *c) {
  uint64_t open[KVRELAY_ENGINE_DEPTH_MAX + 1] = {1}; /* values still to come, per level */
  size_t depth = 0;
  while (open[0] != 0 || depth != 0) {
    mpack_token_t t;
    kvrelay_text ignored;
    if (open[depth] == 0) {
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
      if (depth == KVRELAY_ENGINE_DEPTH_MAX)
        return KVRELAY_ERR_LIMIT;
      open[++depth] = t.type == MPACK_TOKEN_MAP ? 2 * (uint64_t)t.length : t.length;
    }
  }
  return KVRELAY_OK;
}

/* The readers below work on payloads that skip_value accepted: no token is missing.  Each reads one whole value. */

static mpack_token_t next(cursor *c) {
  mpack_token_t t;
  if (read_token(c, &t) != KVRELAY_OK) {
    memset(&t, 0, sizeof t);
    t.type = MPACK_TOKEN_NIL;
  }
  return t;
}

/* What is behind a head: bytes of a string, values of a container. */
static void skip_rest(cursor *c, const mpack_token_t *head) {
  kvrelay_text ignored;
  uint64_t values = head->type == MPACK_TOKEN_ARRAY ? head->length : head->type == MPACK_TOKEN_MAP ? 2 * (uint64_t)head->length : 0;
  if (has_bytes(head))
    (void)read_bytes(c, head->length, &ignored);
  while (values-- != 0)
    if (skip_value(c) != KVRELAY_OK)
      return;
}

/* A string; false when the value is something else, which is then passed over. */
static bool read_text(cursor *c, kvrelay_text *out) {
  mpack_token_t t = next(c);
  if (t.type == MPACK_TOKEN_STR)
    return read_bytes(c, t.length, out) == KVRELAY_OK;
  skip_rest(c, &t);
  return false;
}

static bool text_is(kvrelay_text t, const char *word) { return t.len == strlen(word) && memcmp(t.ptr, word, t.len) == 0; }

static uint64_t token_u64(const mpack_token_t *t) { return (uint64_t)t->data.value.hi << 32 | t->data.value.lo; }

/* Any integer as 64 bits, negative ones in two's complement. */
static bool integer_of(const mpack_token_t *t, uint64_t *out) {
  if (t->type == MPACK_TOKEN_UINT)
    *out = token_u64(t);
  else if (t->type == MPACK_TOKEN_SINT)
    *out = (uint64_t)(int64_t)mpack_unpack_sint(*t);
  else
    return false;
  return true;
}

/* ---- fields of an event ---- */

enum {
  FIELD_HASHES = 1u << 0,
  FIELD_PARENT = 1u << 1,
  FIELD_TOKENS = 1u << 2,
  FIELD_BLOCK_SIZE = 1u << 3,
  FIELD_LORA_ID = 1u << 4,
  FIELD_MEDIUM = 1u << 5,
  FIELD_LORA_NAME = 1u << 6,
  FIELD_EXTRA_KEYS = 1u << 7,
  FIELD_GROUP = 1u << 8,
  FIELD_KIND = 1u << 9,
  FIELD_WINDOW = 1u << 10,
  FIELD_LOCALITY = 1u << 11,
  FIELD_OWNERSHIP = 1u << 12,
  FIELD_SALT = 1u << 13,
  FIELD_MM_INFOS = 1u << 14
};

/* What an event has so far. */
typedef struct reading {
  kvrelay_engine_decoder *d;
  kvrelay_engine_event *ev;
  unsigned seen; /* FIELD_ bits of values that are there and not nil */
  unsigned bad;  /* of impossible type */
  bool too_large;
} reading;

/* One hash: any integer, or the last 8 bytes of a digest. */
static bool read_hash(cursor *c, uint64_t *out) {
  mpack_token_t t = next(c);
  kvrelay_text digest;
  if (integer_of(&t, out))
    return true;
  if (t.type != MPACK_TOKEN_BIN) {
    skip_rest(c, &t);
    return false;
  }
  if (read_bytes(c, t.length, &digest) != KVRELAY_OK || digest.len < 8 || digest.len > 32)
    return false;
  *out = 0;
  for (size_t i = digest.len - 8; i < digest.len; i++)
    *out = *out << 8 | digest.ptr[i];
  return true;
}

static bool read_hashes(cursor *c, reading *r) {
  mpack_token_t t = next(c);
  bool good = t.type == MPACK_TOKEN_ARRAY;
  r->ev->externals_len = 0;
  if (!good || t.length > r->d->externals_cap_) {
    r->too_large = r->too_large || good;
    skip_rest(c, &t);
    return good;
  }
  for (size_t i = 0; i < t.length; i++)
    good = read_hash(c, &r->d->externals_[i]) && good;
  r->ev->externals_len = t.length;
  return good;
}

static bool read_token_id(cursor *c, uint32_t *out) {
  mpack_token_t t = next(c);
  if (t.type == MPACK_TOKEN_UINT && t.data.value.hi == 0) {
    *out = t.data.value.lo;
    return true;
  }
  skip_rest(c, &t);
  return false;
}

/* [a, b]; the pairs overlap by one token, so a list of N of them becomes N + 1 tokens. */
static bool read_pair(cursor *c, uint32_t pair[2]) {
  mpack_token_t t = next(c);
  if (t.type != MPACK_TOKEN_ARRAY || t.length != 2) {
    skip_rest(c, &t);
    return false;
  }
  bool good = read_token_id(c, &pair[0]);
  return read_token_id(c, &pair[1]) && good;
}

static bool read_pairs(cursor *c, reading *r, size_t count) {
  uint32_t pair[2] = {0, 0}, before;
  bool good = true;
  for (size_t i = 0; i < count; i++) {
    before = pair[1];
    good = read_pair(c, pair) && good;
    r->ev->pair_gap = r->ev->pair_gap || (i != 0 && pair[0] != before);
    r->d->tokens_[i] = pair[0];
  }
  r->d->tokens_[count] = pair[1];
  r->ev->pairs = true;
  r->ev->tokens_len = count + 1;
  return good;
}

static bool read_tokens(cursor *c, reading *r) {
  mpack_token_t t = next(c);
  bool good = t.type == MPACK_TOKEN_ARRAY;
  r->ev->tokens_len = 0;
  r->ev->pairs = r->ev->pair_gap = false;
  if (!good || t.length >= r->d->tokens_cap_) {
    r->too_large = r->too_large || good;
    skip_rest(c, &t);
    return good;
  }
  cursor peek = *c;
  if (t.length != 0 && next(&peek).type == MPACK_TOKEN_ARRAY)
    return read_pairs(c, r, t.length);
  for (size_t i = 0; i < t.length; i++)
    good = read_token_id(c, &r->d->tokens_[i]) && good;
  r->ev->tokens_len = t.length;
  return good;
}

static bool read_u32(cursor *c, uint32_t *out) { return read_token_id(c, out); }

/* Item of a block's extra keys: a bare string, [identifier, offset], a digest, or something to ignore. */
static void read_extra_key(cursor *c, kvrelay_extra_key *item) {
  mpack_token_t t = next(c);
  item->kind = KVRELAY_EXTRA_OTHER;
  item->text.ptr = NULL;
  item->text.len = 0;
  if (t.type == MPACK_TOKEN_STR || t.type == MPACK_TOKEN_BIN) {
    item->kind = t.type == MPACK_TOKEN_STR ? KVRELAY_EXTRA_TEXT : KVRELAY_EXTRA_BIN;
    (void)read_bytes(c, t.length, &item->text);
  } else if (t.type == MPACK_TOKEN_ARRAY && t.length == 2) {
    uint64_t offset;
    bool named = read_text(c, &item->text);
    mpack_token_t second = next(c);
    if (named && integer_of(&second, &offset))
      item->kind = KVRELAY_EXTRA_OBJECT;
    else
      skip_rest(c, &second);
  } else {
    skip_rest(c, &t);
  }
}

static bool read_extra_keys(cursor *c, reading *r) {
  mpack_token_t list = next(c);
  r->ev->extra_keys_len = r->ev->extra_keys_blocks = 0;
  if (list.type != MPACK_TOKEN_ARRAY) {
    skip_rest(c, &list);
    return false;
  }
  r->ev->extra_keys_blocks = list.length;
  bool good = true;
  for (uint32_t block = 0; block < list.length; block++) {
    mpack_token_t items = next(c);
    if (items.type != MPACK_TOKEN_ARRAY) {
      good = good && items.type == MPACK_TOKEN_NIL;
      skip_rest(c, &items);
      continue;
    }
    for (size_t i = 0; i < items.length; i++) {
      if (r->ev->extra_keys_len == r->d->extra_keys_cap_) {
        r->too_large = true;
        (void)skip_value(c);
        continue;
      }
      kvrelay_extra_key *item = &r->d->extra_keys_[r->ev->extra_keys_len++];
      item->block = block;
      read_extra_key(c, item);
    }
  }
  return good;
}

/* {"mm_hash": h, …} */
static bool read_mm_object(cursor *c, uint64_t *hash) {
  mpack_token_t map = next(c);
  bool good = false;
  if (map.type != MPACK_TOKEN_MAP) {
    skip_rest(c, &map);
    return false;
  }
  for (size_t i = 0; i < map.length; i++) {
    kvrelay_text key = {NULL, 0};
    if (read_text(c, &key) && text_is(key, "mm_hash")) {
      mpack_token_t value = next(c);
      good = integer_of(&value, hash);
      if (!good)
        skip_rest(c, &value);
    } else {
      (void)skip_value(c);
    }
  }
  return good;
}

/* {"mm_objects": [ … ]} of one block */
static bool read_mm_info(cursor *c, reading *r, uint32_t block, const mpack_token_t *map) {
  bool good = true;
  for (size_t i = 0; i < map->length; i++) {
    kvrelay_text key = {NULL, 0};
    if (!read_text(c, &key) || !text_is(key, "mm_objects")) {
      (void)skip_value(c);
      continue;
    }
    mpack_token_t list = next(c);
    if (list.type != MPACK_TOKEN_ARRAY) {
      good = good && list.type == MPACK_TOKEN_NIL;
      skip_rest(c, &list);
      continue;
    }
    for (size_t j = 0; j < list.length; j++) {
      uint64_t hash = 0;
      good = read_mm_object(c, &hash) && good;
      if (r->ev->mm_objects_len == r->d->mm_objects_cap_) {
        r->too_large = true;
        continue;
      }
      kvrelay_mm_object *object = &r->d->mm_objects_[r->ev->mm_objects_len++];
      object->block = block;
      object->mm_hash = hash;
    }
  }
  return good;
}

static bool read_mm_infos(cursor *c, reading *r) {
  mpack_token_t list = next(c);
  r->ev->mm_objects_len = r->ev->mm_infos_blocks = 0;
  r->ev->has_mm_infos = false;
  if (list.type != MPACK_TOKEN_ARRAY) {
    skip_rest(c, &list);
    return false;
  }
  r->ev->mm_infos_blocks = list.length;
  r->ev->has_mm_infos = list.length != 0;
  bool good = true;
  for (uint32_t block = 0; block < list.length; block++) {
    mpack_token_t info = next(c);
    if (info.type == MPACK_TOKEN_MAP) {
      good = read_mm_info(c, r, block, &info) && good;
    } else {
      good = good && info.type == MPACK_TOKEN_NIL;
      skip_rest(c, &info);
    }
  }
  return good;
}

/* The adapter's name, or a map of metadata that may hold it beside a salt. */
static bool read_lora_name(cursor *c, reading *r) {
  mpack_token_t t = next(c);
  if (t.type == MPACK_TOKEN_STR)
    return read_bytes(c, t.length, &r->ev->lora_name) == KVRELAY_OK;
  if (t.type != MPACK_TOKEN_MAP) {
    skip_rest(c, &t);
    return false;
  }
  for (size_t i = 0; i < t.length; i++) {
    kvrelay_text key = {NULL, 0}, value = {NULL, 0};
    if (!read_text(c, &key)) {
      (void)skip_value(c);
      continue;
    }
    bool is_text = read_text(c, &value);
    if (is_text && text_is(key, "cache_salt"))
      r->ev->cache_salt = value;
    else if (is_text && text_is(key, "lora_name"))
      r->ev->lora_name = value;
  }
  return true;
}

static bool read_optional_text(cursor *c, kvrelay_text *out, bool *has) {
  *has = read_text(c, out);
  return *has;
}

/* One field's value; nil equals absent, and what a repeated key said before is gone. */
static void read_field(cursor *c, reading *r, unsigned field) {
  kvrelay_engine_event *ev = r->ev;
  cursor peek = *c;
  mpack_token_t head = next(&peek);
  bool good = true;
  uint32_t number;
  r->seen &= ~field;
  r->bad &= ~field;
  if (head.type == MPACK_TOKEN_NIL) {
    *c = peek;
    return;
  }
  switch (field) {
  case FIELD_HASHES:
    good = read_hashes(c, r);
    break;
  case FIELD_PARENT:
    good = read_hash(c, &ev->parent);
    break;
  case FIELD_TOKENS:
    good = read_tokens(c, r);
    break;
  case FIELD_BLOCK_SIZE:
    good = read_u32(c, &ev->block_size);
    break;
  case FIELD_LORA_ID:
    ev->lora_id_set = head.type != MPACK_TOKEN_UINT || token_u64(&head) != 0;
    (void)skip_value(c);
    break;
  case FIELD_MEDIUM:
    good = read_optional_text(c, &ev->medium, &ev->has_medium);
    break;
  case FIELD_LORA_NAME:
    good = read_lora_name(c, r);
    break;
  case FIELD_EXTRA_KEYS:
    good = read_extra_keys(c, r);
    break;
  case FIELD_GROUP:
    good = read_u32(c, &ev->group);
    break;
  case FIELD_KIND:
    good = read_optional_text(c, &ev->kind, &ev->has_kind);
    break;
  case FIELD_WINDOW:
    good = read_u32(c, &number);
    break;
  case FIELD_LOCALITY:
    good = read_optional_text(c, &ev->locality, &ev->has_locality);
    break;
  case FIELD_OWNERSHIP:
    good = read_optional_text(c, &ev->ownership, &ev->has_ownership);
    break;
  case FIELD_SALT:
    good = read_text(c, &ev->cache_salt);
    break;
  case FIELD_MM_INFOS:
    good = read_mm_infos(c, r);
    break;
  default:
    (void)skip_value(c);
    break;
  }
  if (good)
    r->seen |= field;
  else
    r->bad |= field;
}
