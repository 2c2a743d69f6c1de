/* SPDX-License-Identifier: Apache-2.0 */
#include "engine_events.h"

#include "msgpack_read.h"

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
  if (read_unsigned(c, out))
    return true;
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
  uint64_t number;
  if (read_unsigned(c, &number)) {
    *out = (uint32_t)number;
    return number <= UINT32_MAX;
  }
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

/* Item of a block's extra keys: a bare string, [identifier, offset], a digest, or something to
 * ignore. */
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
    if (is_text && text_is(key, "cache_salt")) {
      r->ev->cache_salt = value;
      r->seen |= FIELD_SALT;
    } else if (is_text && text_is(key, "lora_name")) {
      r->ev->lora_name = value;
    }
  }
  return true;
}

/* One field's value; nil equals absent, and what a repeated key said before is gone.  As long as
 * the list of fields, one case each. */
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
    good = read_text(c, &ev->medium);
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
    good = read_text(c, &ev->kind);
    break;
  case FIELD_WINDOW:
    good = read_u32(c, &number);
    break;
  case FIELD_LOCALITY:
    good = read_text(c, &ev->locality);
    break;
  case FIELD_OWNERSHIP:
    good = read_text(c, &ev->ownership);
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

/* ---- events ---- */

static const struct {
  const char *tag;
  int32_t type;
  unsigned fields; /* that mean something; others may hold anything */
  unsigned required;
} tags[] = {
    {"BlockStored", KVRELAY_ENGINE_STORED, ~0u, FIELD_HASHES | FIELD_TOKENS | FIELD_BLOCK_SIZE},
    {"BlockRemoved", KVRELAY_ENGINE_REMOVED,
     FIELD_HASHES | FIELD_MEDIUM | FIELD_GROUP | FIELD_KIND | FIELD_WINDOW | FIELD_LOCALITY |
         FIELD_OWNERSHIP,
     FIELD_HASHES},
    {"AllBlocksCleared", KVRELAY_ENGINE_CLEARED, FIELD_MEDIUM | FIELD_OWNERSHIP, 0},
    {"TierBlocksCleared", KVRELAY_ENGINE_TIER_CLEARED, FIELD_MEDIUM | FIELD_OWNERSHIP, 0},
    {"Ignored", KVRELAY_ENGINE_IGNORED, 0, 0},
};
#define TAGS_LEN (sizeof tags / sizeof tags[0])

static size_t tag_index(kvrelay_text tag) {
  size_t i = 0;
  while (i < TAGS_LEN && !text_is(tag, tags[i].tag))
    i++;
  return i;
}

/* Settles what was read: nil is absent, whatever a repeated key said before. */
static void settle(reading *r, size_t tag) {
  static const kvrelay_text nothing = {NULL, 0};
  kvrelay_engine_event *ev = r->ev;
  if (tag == TAGS_LEN) {
    ev->type = KVRELAY_ENGINE_UNKNOWN;
    return;
  }
  if ((r->bad & tags[tag].fields) != 0 || (tags[tag].required & ~r->seen) != 0) {
    ev->type = KVRELAY_ENGINE_MALFORMED;
    return;
  }
  ev->type = r->too_large ? KVRELAY_ENGINE_TOO_LARGE : tags[tag].type;
  r->seen &= tags[tag].fields;
  ev->externals = r->d->externals_;
  ev->tokens = r->d->tokens_;
  ev->extra_keys = r->d->extra_keys_;
  ev->mm_objects = r->d->mm_objects_;
  ev->has_parent = (r->seen & FIELD_PARENT) != 0;
  ev->has_medium = (r->seen & FIELD_MEDIUM) != 0;
  ev->has_locality = (r->seen & FIELD_LOCALITY) != 0;
  ev->has_ownership = (r->seen & FIELD_OWNERSHIP) != 0;
  ev->has_kind = (r->seen & FIELD_KIND) != 0;
  ev->has_group = (r->seen & FIELD_GROUP) != 0;
  ev->has_mm_infos = ev->has_mm_infos && (r->seen & FIELD_MM_INFOS) != 0;
  ev->lora_id_set = ev->lora_id_set && (r->seen & FIELD_LORA_ID) != 0;
  if ((r->seen & FIELD_LORA_NAME) == 0)
    ev->lora_name = nothing;
  if ((r->seen & FIELD_SALT) == 0)
    ev->cache_salt = nothing;
  if ((r->seen & FIELD_EXTRA_KEYS) == 0)
    ev->extra_keys_len = ev->extra_keys_blocks = 0;
  if (!ev->has_mm_infos)
    ev->mm_objects_len = ev->mm_infos_blocks = 0;
}

static unsigned field_of_key(kvrelay_text key) {
  static const struct {
    const char *name;
    unsigned field;
  } names[] = {{"block_hashes", FIELD_HASHES},
               {"parent_block_hash", FIELD_PARENT},
               {"token_ids", FIELD_TOKENS},
               {"block_size", FIELD_BLOCK_SIZE},
               {"lora_id", FIELD_LORA_ID},
               {"medium", FIELD_MEDIUM},
               {"lora_name", FIELD_LORA_NAME},
               {"extra_keys", FIELD_EXTRA_KEYS},
               {"group_idx", FIELD_GROUP},
               {"kv_cache_spec_kind", FIELD_KIND},
               {"kv_cache_spec_sliding_window", FIELD_WINDOW},
               {"locality", FIELD_LOCALITY},
               {"ownership", FIELD_OWNERSHIP},
               {"cache_salt", FIELD_SALT},
               {"block_mm_infos", FIELD_MM_INFOS}};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (text_is(key, names[i].name))
      return names[i].field;
  return 0;
}

static void read_map_event(cursor *c, reading *r, size_t pairs) {
  kvrelay_text tag = {NULL, 0};
  bool has_tag = false;
  for (size_t i = 0; i < pairs; i++) {
    kvrelay_text key = {NULL, 0};
    bool named = read_text(c, &key);
    if (named && text_is(key, "type"))
      has_tag = read_text(c, &tag);
    else
      read_field(c, r, named ? field_of_key(key) : 0);
  }
  if (has_tag)
    settle(r, tag_index(tag));
}

/* The tail of positional events (WIRE.md, Engine events): up to five slots whose meaning depends on
 * their types.
 */
#define TAIL_SLOTS 5
static const unsigned tail_order[TAIL_SLOTS] = {FIELD_GROUP, FIELD_KIND, FIELD_WINDOW,
                                                FIELD_LOCALITY, FIELD_OWNERSHIP};

static bool tail_wants_number(size_t slot) { return slot == 0 || slot == 2; }

static bool is_u32(const mpack_token_t *t) {
  return t->type == MPACK_TOKEN_UINT && t->data.value.hi == 0;
}

/* What a slot means when the fixed order does not hold. */
static unsigned tail_field_by_type(const mpack_token_t *t, kvrelay_text text, const reading *r) {
  if (is_u32(t))
    return (r->seen & FIELD_GROUP) == 0 ? FIELD_GROUP : FIELD_WINDOW;
  if (t->type == MPACK_TOKEN_STR) {
    if (text_is(text, "LOCAL") || text_is(text, "REMOTE"))
      return FIELD_LOCALITY;
    return (r->seen & FIELD_KIND) == 0 ? FIELD_KIND : 0;
  }
  return t->type == MPACK_TOKEN_ARRAY ? FIELD_MM_INFOS : 0;
}

static void read_tail(cursor *c, reading *r, size_t count) {
  mpack_token_t heads[TAIL_SLOTS];
  kvrelay_text texts[TAIL_SLOTS];
  size_t slots = count < TAIL_SLOTS ? count : TAIL_SLOTS;
  bool in_order = slots >= 4;
  cursor scan = *c;
  for (size_t i = 0; i < slots; i++) {
    cursor value = scan;
    heads[i] = next(&value);
    texts[i].ptr = NULL;
    texts[i].len = 0;
    if (heads[i].type == MPACK_TOKEN_STR)
      (void)read_bytes(&value, heads[i].length, &texts[i]);
    bool contradicts = heads[i].type == MPACK_TOKEN_ARRAY ||
                       (is_u32(&heads[i]) && !tail_wants_number(i)) ||
                       (heads[i].type == MPACK_TOKEN_STR && tail_wants_number(i));
    in_order = in_order && !contradicts;
    (void)skip_value(&scan);
  }
  for (size_t i = 0; i < slots; i++) {
    unsigned field = in_order ? tail_order[i] : tail_field_by_type(&heads[i], texts[i], r);
    bool usable =
        is_u32(&heads[i]) || heads[i].type == MPACK_TOKEN_STR || heads[i].type == MPACK_TOKEN_ARRAY;
    if (usable && field != 0)
      read_field(c, r, field);
    else
      (void)skip_value(c); /* an odd slot counts as nil */
  }
  for (size_t i = slots; i < count; i++)
    (void)skip_value(c);
}

static void read_positional_event(cursor *c, reading *r, size_t elements) {
  static const unsigned stored[] = {FIELD_HASHES,  FIELD_PARENT, FIELD_TOKENS,    FIELD_BLOCK_SIZE,
                                    FIELD_LORA_ID, FIELD_MEDIUM, FIELD_LORA_NAME, FIELD_EXTRA_KEYS};
  static const unsigned removed[] = {FIELD_HASHES, FIELD_MEDIUM};
  static const unsigned cleared[] = {FIELD_OWNERSHIP};
  static const unsigned tier_cleared[] = {FIELD_MEDIUM, FIELD_OWNERSHIP};
  static const struct {
    const unsigned *fields;
    size_t len;
    bool tail;
  } shapes[TAGS_LEN] = {{stored, 8, true},
                        {removed, 2, true},
                        {cleared, 1, false},
                        {tier_cleared, 2, false},
                        {NULL, 0, false}};
  kvrelay_text tag = {NULL, 0};
  if (elements == 0)
    return;
  bool has_tag = read_text(c, &tag);
  size_t index = tag_index(tag), done = 1;
  r->ev->positional = true;
  r->ev->elements_len = elements;
  if (has_tag && index < TAGS_LEN) {
    for (size_t i = 0; i < shapes[index].len && done < elements; i++, done++)
      read_field(c, r, shapes[index].fields[i]);
    if (shapes[index].tail) {
      read_tail(c, r, elements - done);
      done = elements;
    }
  }
  for (; done < elements; done++)
    (void)skip_value(c);
  if (has_tag)
    settle(r, index);
}

int kvrelay_engine_batch_next(kvrelay_engine_decoder *d, kvrelay_engine_event *ev) {
  if (d->events_left_ == 0)
    return 0;
  d->events_left_--;
  memset(ev, 0, sizeof *ev); /* MALFORMED until settled */
  reading r = {d, ev, 0, 0, false};
  mpack_token_t head = next(&d->next_);
  if (head.type == MPACK_TOKEN_ARRAY)
    read_positional_event(&d->next_, &r, head.length);
  else if (head.type == MPACK_TOKEN_MAP)
    read_map_event(&d->next_, &r, head.length);
  else
    skip_rest(&d->next_, &head);
  if (ev->externals == NULL) /* not settled: its lists are nobody's business */
    ev->externals_len = ev->tokens_len = ev->extra_keys_len = ev->mm_objects_len = 0;
  return 1;
}

/* ---- batches ---- */

/*
 * The readers of a batch's own elements.  Each has a cursor of its own: the element was passed over
 * already, which is its check.
 */

static void read_ts(cursor c, kvrelay_engine_batch *batch) {
  mpack_token_t t = next(&c);
  batch->has_ts = t.type == MPACK_TOKEN_FLOAT;
  if (batch->has_ts)
    batch->ts = mpack_unpack_float(t);
}

static void read_rank(cursor c, kvrelay_engine_batch *batch) {
  mpack_token_t t = next(&c);
  uint64_t rank;
  /* -2^31 .. 2^32 - 1 */
  batch->has_rank = integer_of(&t, &rank) &&
                    (t.type == MPACK_TOKEN_UINT ? rank <= UINT32_MAX : rank >= (uint64_t)INT32_MIN);
  batch->rank = batch->has_rank ? (uint32_t)rank : 0;
  batch->rank_type = !batch->has_rank && t.type != MPACK_TOKEN_NIL;
}

/* The list of events; remembers where it starts. */
static bool find_events(cursor c, kvrelay_engine_decoder *d, kvrelay_engine_batch *batch) {
  mpack_token_t t = next(&c);
  batch->events = t.type == MPACK_TOKEN_ARRAY ? t.length : 0;
  d->next_ = c;
  return t.type == MPACK_TOKEN_ARRAY;
}

static int read_positional_batch(cursor *c, kvrelay_engine_decoder *d, kvrelay_engine_batch *batch,
                                 size_t elements) {
  bool found = false;
  for (size_t i = 0; i < elements; i++) {
    cursor element = *c;
    int err = skip_levels(c, KVRELAY_ENGINE_DEPTH_MAX - 1);
    if (err != KVRELAY_OK)
      return err;
    if (i == 0)
      read_ts(element, batch);
    else if (i == 1)
      found = find_events(element, d, batch);
    else if (i == 2)
      read_rank(element, batch);
  }
  return found ? KVRELAY_OK : KVRELAY_ERR_MALFORMED;
}

static int read_map_batch(cursor *c, kvrelay_engine_decoder *d, kvrelay_engine_batch *batch,
                          size_t pairs) {
  bool found = false;
  for (size_t i = 0; i < pairs; i++) {
    cursor name = *c, value;
    kvrelay_text key = {NULL, 0};
    int err = skip_levels(c, KVRELAY_ENGINE_DEPTH_MAX - 1);
    value = *c;
    if (err == KVRELAY_OK)
      err = skip_levels(c, KVRELAY_ENGINE_DEPTH_MAX - 1);
    if (err != KVRELAY_OK)
      return err;
    if (!read_text(&name, &key))
      continue;
    if (text_is(key, "events"))
      found = find_events(value, d, batch);
    else if (text_is(key, "ts"))
      read_ts(value, batch);
    else if (text_is(key, "data_parallel_rank") || text_is(key, "dp_rank") ||
             text_is(key, "attn_dp_rank"))
      read_rank(value, batch);
  }
  return found ? KVRELAY_OK : KVRELAY_ERR_MALFORMED;
}

int kvrelay_engine_batch_begin(kvrelay_engine_decoder *d, const uint8_t *payload, size_t len,
                               kvrelay_engine_batch *batch) {
  cursor c = {(const char *)payload, len};
  mpack_token_t root;
  memset(batch, 0, sizeof *batch);
  d->events_left_ = 0;
  int err = read_token(&c, &root);
  if (err == KVRELAY_OK && root.type == MPACK_TOKEN_ARRAY)
    err = read_positional_batch(&c, d, batch, root.length);
  else if (err == KVRELAY_OK && root.type == MPACK_TOKEN_MAP)
    err = read_map_batch(&c, d, batch, root.length);
  else if (err == KVRELAY_OK)
    err = KVRELAY_ERR_MALFORMED;
  if (err != KVRELAY_OK) {
    memset(batch, 0, sizeof *batch);
    return err;
  }
  batch->trailing_bytes = c.left;
  d->events_left_ = batch->events;
  return KVRELAY_OK;
}

static int apply(kvrelay_engine_decoder *d, kvrelay_source *s, const kvrelay_source_batch *b,
                 uint64_t now_ns) {
  kvrelay_engine_batch batch;
  kvrelay_engine_event event;
  if (b->payload == NULL)
    return kvrelay_source_lost(s, KVRELAY_COUNT_PAYLOAD_TOO_LARGE, now_ns);
  if (kvrelay_engine_batch_begin(d, b->payload, b->len, &batch) != KVRELAY_OK)
    return kvrelay_source_lost(s, KVRELAY_COUNT_PAYLOAD_MALFORMED, now_ns);
  kvrelay_source_count(s, KVRELAY_COUNT_TRAILING_BYTES, batch.trailing_bytes != 0);
  kvrelay_source_count(s, KVRELAY_COUNT_RANK_TYPE, batch.rank_type);
  int err = KVRELAY_OK;
  while (err == KVRELAY_OK && kvrelay_engine_batch_next(d, &event) == 1)
    err = kvrelay_source_event(s, batch.has_rank, batch.rank, &event, now_ns);
  return err;
}

int kvrelay_engine_drain(kvrelay_engine_decoder *d, kvrelay_source *s, uint64_t now_ns) {
  kvrelay_source_batch b;
  int more;
  while ((more = kvrelay_source_next(s, &b, now_ns)) == 1) {
    int err = apply(d, s, &b, now_ns);
    if (err != KVRELAY_OK)
      return err;
  }
  return more;
}

int kvrelay_engine_feed(kvrelay_engine_decoder *d, kvrelay_source *s, uint64_t sequence,
                        const uint8_t *payload, size_t len, uint64_t now_ns) {
  int err = kvrelay_source_live(s, sequence, payload, len, now_ns);
  return err == KVRELAY_OK ? kvrelay_engine_drain(d, s, now_ns) : err;
}

/* ---- memory ---- */

/* Room for the parts that most events do not have. */
static size_t few(size_t max_tokens) { return max_tokens / 8 + 64; }

size_t kvrelay_engine_decoder_mem_size(size_t max_tokens) {
  if (max_tokens < 64 || max_tokens > (size_t)1 << 28)
    return 0;
  return max_tokens * (sizeof(uint64_t) + sizeof(uint32_t)) +
         few(max_tokens) * (sizeof(kvrelay_extra_key) + sizeof(kvrelay_mm_object)) + 16;
}

int kvrelay_engine_decoder_init(kvrelay_engine_decoder *d, size_t max_tokens, void *mem,
                                size_t len) {
  size_t need = kvrelay_engine_decoder_mem_size(max_tokens);
  if (need == 0 || mem == NULL)
    return KVRELAY_ERR_ARG;
  if (len < need)
    return KVRELAY_ERR_NOSPACE;
  char *at = (char *)mem + ((16 - ((uintptr_t)mem & 15)) & 15);
  memset(d, 0, sizeof *d);
  d->extra_keys_cap_ = d->mm_objects_cap_ = few(max_tokens);
  d->externals_cap_ = d->tokens_cap_ = max_tokens;
  d->extra_keys_ = (kvrelay_extra_key *)(void *)at;
  at += d->extra_keys_cap_ * sizeof *d->extra_keys_;
  d->mm_objects_ = (kvrelay_mm_object *)(void *)at;
  at += d->mm_objects_cap_ * sizeof *d->mm_objects_;
  d->externals_ = (uint64_t *)(void *)at;
  at += d->externals_cap_ * sizeof *d->externals_;
  d->tokens_ = (uint32_t *)(void *)at;
  return KVRELAY_OK;
}
