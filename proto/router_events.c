/* SPDX-License-Identifier: Apache-2.0 */
#include "router_events.h"

#include "msgpack_read.h"

/* What one event's reading found wrong so far: KVRELAY_OK, or the first error. */
typedef struct reading {
  kvrelay_router_decoder *d;
  kvrelay_router_event *ev;
  int err;
  bool worker, id, data; /* required fields that were there */
} reading;

static void bad(reading *r, int err) { r->err = r->err == KVRELAY_OK ? err : r->err; }

/* The key of the next pair; the empty text when it is no string. */
static kvrelay_text read_key(cursor *c) {
  kvrelay_text key = {NULL, 0};
  if (!read_text(c, &key))
    key.len = 0;
  return key;
}

/* A map's head; its number of pairs, or -1 when the value is something else, which is passed over.
 */
static int64_t read_map(cursor *c) {
  mpack_token_t t = next(c);
  if (t.type == MPACK_TOKEN_MAP)
    return (int64_t)t.length;
  skip_rest(c, &t);
  return -1;
}

static bool read_u64(cursor *c, uint64_t *out) {
  mpack_token_t t = next(c);
  if (integer_of(&t, out)) /* hashes may be signed */
    return true;
  skip_rest(c, &t);
  return false;
}

/* nil, or a number. */
static void read_optional(cursor *c, reading *r, bool *has, uint64_t *out) {
  mpack_token_t t = next(c);
  *has = integer_of(&t, out);
  if (!*has && t.type != MPACK_TOKEN_NIL) {
    skip_rest(c, &t);
    bad(r, KVRELAY_ERR_MALFORMED);
  }
}

/* ---- events ---- */

static void read_block(cursor *c, reading *r, ckf_block *out) {
  bool external = false, local = false;
  for (int64_t pairs = read_map(c); pairs > 0; pairs--) {
    kvrelay_text key = read_key(c);
    if (text_is(key, "block_hash"))
      external = read_u64(c, &out->external);
    else if (text_is(key, "tokens_hash"))
      local = read_u64(c, &out->local);
    else
      (void)skip_value(c); /* images are in the local hash already */
  }
  if (!external || !local)
    bad(r, KVRELAY_ERR_MALFORMED);
}

/* Head of a list that fits, else 0 and everything passed over. */
static size_t read_list(cursor *c, reading *r) {
  mpack_token_t t = next(c);
  if (t.type == MPACK_TOKEN_ARRAY && t.length <= r->d->cap_)
    return t.length;
  skip_rest(c, &t);
  bad(r, t.type == MPACK_TOKEN_ARRAY ? KVRELAY_ERR_LIMIT : KVRELAY_ERR_MALFORMED);
  return 0;
}

static void read_stored(cursor *c, reading *r) {
  bool blocks = false;
  r->ev->type = KVRELAY_ROUTER_STORED;
  for (int64_t pairs = read_map(c); pairs > 0; pairs--) {
    kvrelay_text key = read_key(c);
    if (text_is(key, "parent_hash")) {
      read_optional(c, r, &r->ev->has_parent, &r->ev->parent);
    } else if (text_is(key, "start_position")) {
      read_optional(c, r, &r->ev->has_start, &r->ev->start);
    } else if (text_is(key, "blocks")) {
      blocks = true;
      r->ev->blocks = r->d->blocks_;
      r->ev->blocks_len = read_list(c, r);
      for (size_t i = 0; i < r->ev->blocks_len; i++)
        read_block(c, r, &r->d->blocks_[i]);
    } else {
      (void)skip_value(c);
    }
  }
  if (!blocks)
    bad(r, KVRELAY_ERR_MALFORMED);
}

static void read_removed(cursor *c, reading *r) {
  bool hashes = false;
  r->ev->type = KVRELAY_ROUTER_REMOVED;
  for (int64_t pairs = read_map(c); pairs > 0; pairs--) {
    if (!text_is(read_key(c), "block_hashes")) {
      (void)skip_value(c);
      continue;
    }
    hashes = true;
    r->ev->externals = r->d->externals_;
    r->ev->externals_len = read_list(c, r);
    for (size_t i = 0; i < r->ev->externals_len; i++)
      if (!read_u64(c, &r->d->externals_[i]))
        bad(r, KVRELAY_ERR_MALFORMED);
  }
  if (!hashes)
    bad(r, KVRELAY_ERR_MALFORMED);
}

/* {"stored": …}, {"removed": …}, or the text "cleared". */
static void read_data(cursor *c, reading *r) {
  cursor peek = *c;
  kvrelay_text word = {NULL, 0};
  r->data = true;
  if (next(&peek).type == MPACK_TOKEN_STR) {
    if (!read_text(c, &word) || !text_is(word, "cleared"))
      bad(r, KVRELAY_ERR_MALFORMED);
    r->ev->type = KVRELAY_ROUTER_CLEARED;
    return;
  }
  int64_t pairs = read_map(c);
  if (pairs != 1)
    bad(r, KVRELAY_ERR_MALFORMED);
  for (; pairs > 0; pairs--) {
    word = read_key(c);
    if (text_is(word, "stored")) {
      read_stored(c, r);
    } else if (text_is(word, "removed")) {
      read_removed(c, r);
    } else {
      (void)skip_value(c);
      bad(r, KVRELAY_ERR_MALFORMED);
    }
  }
}

static void read_inner(cursor *c, reading *r) {
  for (int64_t pairs = read_map(c); pairs > 0; pairs--) {
    kvrelay_text key = read_key(c);
    uint64_t rank = 0;
    if (text_is(key, "event_id")) {
      r->id = read_u64(c, &r->ev->event_id);
    } else if (text_is(key, "dp_rank")) {
      if (!read_u64(c, &rank) || rank > UINT32_MAX)
        bad(r, KVRELAY_ERR_MALFORMED);
      r->ev->dp_rank = (uint32_t)rank;
    } else if (text_is(key, "data")) {
      read_data(c, r);
    } else {
      (void)skip_value(c);
    }
  }
}

static void read_tier(cursor *c, reading *r) {
  static const char *const names[] = {"device", "host_pinned", "disk", "external"};
  kvrelay_text text = {NULL, 0};
  int32_t tier = 0;
  bool good = read_text(c, &text);
  while (good && tier < 4 && !text_is(text, names[tier]))
    tier++;
  r->ev->tier = tier;
  if (!good || tier == 4)
    bad(r, KVRELAY_ERR_MALFORMED);
}

static int32_t read_domain(cursor *c) {
  kvrelay_text text = {NULL, 0};
  if (!read_text(c, &text))
    return CKF_DOMAIN_MALFORMED;
  return text_is(text, "worker")        ? CKF_DOMAIN_WORKER
         : text_is(text, "cache_owner") ? CKF_DOMAIN_CACHE_OWNER
                                        : CKF_DOMAIN_UNKNOWN;
}

int kvrelay_router_batch_next(kvrelay_router_decoder *d, kvrelay_router_event *ev) {
  reading r = {d, ev, KVRELAY_OK, false, false, false};
  cursor *c = &d->next_;
  if (d->left_ == 0)
    return 0;
  d->left_--;
  memset(ev, 0, sizeof *ev);
  ev->domain = CKF_DOMAIN_MISSING;
  for (int64_t pairs = read_map(c); pairs > 0; pairs--) {
    kvrelay_text key = read_key(c);
    if (text_is(key, "worker_id"))
      r.worker = read_u64(c, &ev->worker_id);
    else if (text_is(key, "storage_tier"))
      read_tier(c, &r);
    else if (text_is(key, "residency_domain"))
      ev->domain = read_domain(c);
    else if (text_is(key, "event"))
      read_inner(c, &r);
    else
      (void)skip_value(c);
  }
  if (!r.worker || !r.id || !r.data)
    bad(&r, KVRELAY_ERR_MALFORMED);
  return r.err == KVRELAY_OK ? 1 : r.err;
}

/* ---- messages ---- */

int kvrelay_router_batch_begin(kvrelay_router_decoder *d, const uint8_t *payload, size_t len) {
  cursor c = {(const char *)payload, len}, whole = c;
  d->left_ = 0;
  int err = skip_value(&whole);
  if (err != KVRELAY_OK)
    return err;
  mpack_token_t t = next(&c);
  if (t.type != MPACK_TOKEN_ARRAY)
    return KVRELAY_ERR_MALFORMED;
  d->next_ = c;
  d->left_ = t.length;
  return KVRELAY_OK;
}

/* Members of a dump or a list of events. */
static bool read_list_answer(cursor *c, kvrelay_router_decoder *d, kvrelay_router_answer *out,
                             bool *all) {
  bool events = false, last = false;
  for (int64_t pairs = read_map(c); pairs > 0; pairs--) {
    kvrelay_text key = read_key(c), scope = {NULL, 0};
    if (text_is(key, "events")) {
      cursor list = *c;
      mpack_token_t t = next(&list);
      events = t.type == MPACK_TOKEN_ARRAY;
      d->left_ = events ? t.length : 0;
      d->next_ = list;
      (void)skip_value(c);
    } else if (text_is(key, "last_event_id")) {
      last = read_u64(c, &out->last_event_id);
    } else if (text_is(key, "reset_scope")) {
      *all = read_text(c, &scope) && text_is(scope, "all");
    } else {
      (void)skip_value(c);
    }
  }
  return events && last;
}

/* RESPONSE: a map with one key, or a text. */
static bool read_response(cursor *c, kvrelay_router_decoder *d, kvrelay_router_answer *out) {
  cursor peek = *c;
  bool all = true;
  out->kind = KVRELAY_ROUTER_ANSWER_OTHER;
  if (next(&peek).type == MPACK_TOKEN_STR)
    return read_text(c, &out->name);
  if (read_map(c) != 1)
    return false;
  out->name = read_key(c);
  if (text_is(out->name, "TreeDump")) {
    bool good = read_list_answer(c, d, out, &all);
    out->kind = all ? KVRELAY_ROUTER_ANSWER_DUMP : KVRELAY_ROUTER_ANSWER_NO_DUMP;
    return good;
  }
  if (text_is(out->name, "Events")) {
    out->kind = KVRELAY_ROUTER_ANSWER_EVENTS;
    return read_list_answer(c, d, out, &all);
  }
  if (text_is(out->name, "TreeDumpFailed"))
    out->kind = KVRELAY_ROUTER_ANSWER_NO_DUMP;
  else if (text_is(out->name, "TooNew") || text_is(out->name, "InvalidRange") ||
           text_is(out->name, "Error"))
    out->kind = KVRELAY_ROUTER_ANSWER_REFUSED;
  (void)skip_value(c);
  return true;
}

int kvrelay_router_answer_begin(kvrelay_router_decoder *d, const uint8_t *body, size_t len,
                                kvrelay_router_answer *out) {
  cursor c = {(const char *)body, len}, whole = c;
  bool found = false;
  memset(out, 0, sizeof *out);
  d->left_ = 0;
  int err = skip_value(&whole);
  if (err != KVRELAY_OK)
    return err;
  for (int64_t pairs = read_map(&c); pairs > 0; pairs--) {
    if (!text_is(read_key(&c), "data"))
      (void)skip_value(&c);
    else if (!(found = read_response(&c, d, out)))
      break;
  }
  if (!found ||
      (out->kind != KVRELAY_ROUTER_ANSWER_DUMP && out->kind != KVRELAY_ROUTER_ANSWER_EVENTS))
    d->left_ = 0;
  return found ? KVRELAY_OK : KVRELAY_ERR_MALFORMED;
}

/* ---- memory ---- */

size_t kvrelay_router_decoder_mem_size(size_t max_blocks) {
  if (max_blocks == 0 || max_blocks > (size_t)1 << 24)
    return 0;
  return max_blocks * (sizeof(ckf_block) + sizeof(uint64_t)) + 16;
}

int kvrelay_router_decoder_init(kvrelay_router_decoder *d, size_t max_blocks, void *mem,
                                size_t len) {
  size_t need = kvrelay_router_decoder_mem_size(max_blocks);
  if (need == 0 || mem == NULL)
    return KVRELAY_ERR_ARG;
  if (len < need)
    return KVRELAY_ERR_NOSPACE;
  char *at = (char *)mem + ((16 - ((uintptr_t)mem & 15)) & 15);
  memset(d, 0, sizeof *d);
  d->cap_ = max_blocks;
  d->blocks_ = (ckf_block *)(void *)at;
  d->externals_ = (uint64_t *)(void *)(at + max_blocks * sizeof *d->blocks_);
  return KVRELAY_OK;
}
