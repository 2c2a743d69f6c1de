/* SPDX-License-Identifier: Apache-2.0 */
#include "polled_events.h"

#include <string.h>
#include <yajl/yajl_parse.h>

/* The value that is open, by its place in an answer. */
enum place {
  PLACE_TOP = 0,
  PLACE_ANSWER, /* list of events */
  PLACE_EVENT,
  PLACE_DATA,
  PLACE_BLOCKS,
  PLACE_BLOCK,
  PLACE_TOKENS,
  PLACE_TOKEN,
  PLACE_MM_KEYS,
  PLACE_MM_KEY,
  PLACE_HASHES, /* removed */
  PLACE_OTHER
};

/* Members that are read. */
enum key {
  KEY_OTHER = 0,
  KEY_EVENT_ID,
  KEY_RANK,
  KEY_WINDOW,
  KEY_DATA,
  KEY_TYPE,
  KEY_PARENT,
  KEY_LORA_NAME,
  KEY_BLOCKS,
  KEY_HASHES,
  KEY_BLOCK_HASH,
  KEY_SALT,
  KEY_TOKENS,
  KEY_TOKEN_ID,
  KEY_MM_KEYS,
  KEY_MM_HASH
};

static const struct {
  const char *name;
  uint8_t place, key;
  uint8_t
      inside; /* the place that a list or map under this key is, PLACE_OTHER: neither is wanted */
  bool list;
} members[] = {{"event_id", PLACE_EVENT, KEY_EVENT_ID, PLACE_OTHER, false},
               {"attention_dp_rank", PLACE_EVENT, KEY_RANK, PLACE_OTHER, false},
               {"window_size", PLACE_EVENT, KEY_WINDOW, PLACE_OTHER, false},
               {"data", PLACE_EVENT, KEY_DATA, PLACE_DATA, false},
               {"type", PLACE_DATA, KEY_TYPE, PLACE_OTHER, false},
               {"parent_hash", PLACE_DATA, KEY_PARENT, PLACE_OTHER, false},
               {"lora_name", PLACE_DATA, KEY_LORA_NAME, PLACE_OTHER, false},
               {"blocks", PLACE_DATA, KEY_BLOCKS, PLACE_BLOCKS, true},
               {"block_hashes", PLACE_DATA, KEY_HASHES, PLACE_HASHES, true},
               {"block_hash", PLACE_BLOCK, KEY_BLOCK_HASH, PLACE_OTHER, false},
               {"cache_salt", PLACE_BLOCK, KEY_SALT, PLACE_OTHER, false},
               {"tokens", PLACE_BLOCK, KEY_TOKENS, PLACE_TOKENS, true},
               {"mm_keys", PLACE_BLOCK, KEY_MM_KEYS, PLACE_MM_KEYS, true},
               {"token_id", PLACE_TOKEN, KEY_TOKEN_ID, PLACE_OTHER, false},
               {"hash", PLACE_MM_KEY, KEY_MM_HASH, PLACE_OTHER, false}};
#define MEMBERS_LEN (sizeof members / sizeof members[0])

enum data_type { DATA_UNKNOWN = 0, DATA_STORED, DATA_REMOVED, DATA_IGNORED };

/* One event as far as it was read. */
typedef struct reading {
  uint32_t seen, bad; /* by bit of enum key; null is neither */
  uint64_t id, window;
  uint32_t rank;
  int data_type;
  bool too_large;
  bool cut;            /* a block that is not full ended the list */
  bool broken;         /* one without hash did */
  uint64_t orphans;    /* blocks behind that */
  uint32_t block_seen; /* members of the block that is open */
  size_t block_tokens; /* of it */
  size_t block_start;  /* tokens of the event before it */
  uint64_t block_hash;
  kvrelay_engine_event ev;
} reading;

/* An answer on its way. */
typedef struct answer {
  kvrelay_polled *p;
  kvrelay_source *s; /* NULL: only looks whether all of it is well-formed */
  uint64_t now_ns;
  int err;
  size_t events;
  bool has_first; /* id of the first event whose rank is ours */
  uint64_t first_id;
  bool starts_over; /* some rank's first id is not above its last */
  size_t depth;
  uint8_t places[KVRELAY_POLLED_DEPTH_MAX + 1], member; /* last key's place in `members` */
  reading r;
} answer;

static uint32_t bit(unsigned key) { return UINT32_C(1) << key; }

/* ---- scalars ---- */

/* An integer of 64 bits, signed or not, as two's complement. */
static bool integer_of(const char *text, size_t len, uint64_t *out) {
  const bool minus = len != 0 && text[0] == '-';
  uint64_t v = 0;
  if (len == (minus ? 1 : 0))
    return false;
  for (size_t i = minus ? 1 : 0; i < len; i++) {
    const uint64_t digit = (uint64_t)(text[i] - '0');
    if (text[i] < '0' || text[i] > '9' || v > (UINT64_MAX - digit) / 10)
      return false;
    v = v * 10 + digit;
  }
  if (minus && v > UINT64_C(1) << 63)
    return false;
  *out = minus ? 0 - v : v;
  return true;
}

/* The first 16 hex digits of a digest, the most significant first. */
static bool digest_of(const char *text, size_t len, uint64_t *out) {
  uint64_t v = 0;
  for (size_t i = 0; i < 16; i++) {
    const char c = i < len ? text[i] : ' ', letter = (char)(c | 0x20);
    if (c >= '0' && c <= '9')
      v = v << 4 | (uint64_t)(c - '0');
    else if (letter >= 'a' && letter <= 'f')
      v = v << 4 | (uint64_t)(letter - 'a' + 10);
    else
      return false;
  }
  *out = v;
  return true;
}

static bool text_is(const char *text, size_t len, const char *word) {
  return len == strlen(word) && memcmp(text, word, len) == 0;
}

static bool keep_text(const answer *a, unsigned which, const char *text, size_t len,
                      kvrelay_text *out) {
  char *room = a->p->texts_ + which * KVRELAY_POLLED_TEXT_MAX;
  if (len > KVRELAY_POLLED_TEXT_MAX)
    return false;
  memcpy(room, text, len);
  out->ptr = (const uint8_t *)room;
  out->len = len;
  return true;
}

static int data_type_of(const char *text, size_t len) {
  if (text_is(text, len, "stored"))
    return DATA_STORED;
  if (text_is(text, len, "removed"))
    return DATA_REMOVED;
  return text_is(text, len, "created") || text_is(text, len, "updated") ? DATA_IGNORED
                                                                        : DATA_UNKNOWN;
}

static bool add_external(answer *a, uint64_t external) {
  if (a->r.ev.externals_len == a->p->blocks_cap_)
    a->r.too_large = true;
  else
    a->p->externals_[a->r.ev.externals_len++] = external;
  return true;
}

static bool add_token(answer *a, uint64_t token) {
  a->r.block_tokens++;
  if (token > UINT32_MAX)
    return false;
  if (a->r.cut || a->r.broken)
    return true;
  if (a->r.ev.tokens_len == a->p->cfg_.max_tokens)
    a->r.too_large = true;
  else
    a->p->tokens_[a->r.ev.tokens_len++] = (uint32_t)token;
  return true;
}

static bool add_mm_object(answer *a, uint64_t hash) {
  kvrelay_engine_event *ev = &a->r.ev;
  if (a->r.cut || a->r.broken)
    return true;
  if (ev->mm_objects_len == a->p->blocks_cap_) {
    a->r.too_large = true;
    return true;
  }
  a->p->mm_objects_[ev->mm_objects_len].block = (uint32_t)ev->externals_len;
  a->p->mm_objects_[ev->mm_objects_len++].mm_hash = hash;
  return true;
}

/* A number where an integer is wanted; false: it is none, or too large for its place. */
static bool take_integer(answer *a, unsigned key, uint64_t v) {
  reading *r = &a->r;
  switch (key) {
  case KEY_EVENT_ID:
    r->id = v;
    return v <= INT64_MAX; /* nor negative */
  case KEY_RANK:
    r->rank = (uint32_t)v;
    return v <= UINT32_MAX;
  case KEY_WINDOW:
    r->window = v;
    return v <= INT64_MAX;
  case KEY_PARENT:
    r->ev.parent = v;
    return true;
  case KEY_HASHES:
    return add_external(a, v);
  case KEY_BLOCK_HASH:
    r->block_hash = v;
    return true;
  case KEY_TOKEN_ID:
    return add_token(a, v);
  default:
    return false;
  }
}

static bool take_text(answer *a, unsigned key, const char *text, size_t len) {
  reading *r = &a->r;
  uint64_t hash;
  switch (key) {
  case KEY_TYPE:
    r->data_type = data_type_of(text, len);
    return true;
  case KEY_LORA_NAME:
    return keep_text(a, 0, text, len, &r->ev.lora_name);
  case KEY_SALT: /* of the first block; the others say the same */
    return r->ev.externals_len != 0 || r->broken || keep_text(a, 1, text, len, &r->ev.cache_salt);
  case KEY_MM_HASH:
    return digest_of(text, len, &hash) && add_mm_object(a, hash);
  default:
    return false;
  }
}

/* The key whose value comes now. */
static unsigned key_now(const answer *a) {
  const unsigned place = a->places[a->depth];
  if (place == PLACE_HASHES)
    return KEY_HASHES;
  return a->member < MEMBERS_LEN && members[a->member].place == place ? members[a->member].key
                                                                      : KEY_OTHER;
}

/* Whether a number or text may stand here; what adds to a list may only once in its map. */
static bool wants_scalar(const answer *a, unsigned key) {
  if ((key == KEY_TOKEN_ID || key == KEY_MM_HASH) && (a->r.block_seen & bit(key)) != 0)
    return false;
  return a->places[a->depth] == PLACE_HASHES || a->member == MEMBERS_LEN ||
         members[a->member].inside == PLACE_OTHER;
}

/* Notes that the value of a wanted key was there, and whether it was of use. */
static void note(answer *a, unsigned key, bool good) {
  if (key == KEY_OTHER)
    return;
  a->r.seen |= bit(key);
  a->r.block_seen |= bit(key);
  if (!good)
    a->r.bad |= bit(key);
}

/* A list of maps or lists has no scalars in it. */
static void scalar_in_list(answer *a) {
  const unsigned place = a->places[a->depth];
  if (place == PLACE_BLOCKS || place == PLACE_TOKENS || place == PLACE_MM_KEYS)
    a->r.bad |= bit(KEY_BLOCKS);
  if (place != PLACE_ANSWER)
    return;
  a->events++;
  if (a->s != NULL)
    kvrelay_source_count(a->s, KVRELAY_COUNT_MALFORMED_EVENT, 1);
}

static int on_null(void *context) {
  answer *a = (answer *)context;
  scalar_in_list(a);
  if (a->places[a->depth] == PLACE_HASHES)
    a->r.bad |= bit(KEY_HASHES);
  return a->depth != 0;
}

static int on_boolean(void *context, int value) {
  answer *a = (answer *)context;
  (void)value;
  scalar_in_list(a);
  note(a, key_now(a), false);
  return a->depth != 0;
}

static int on_number(void *context, const char *text, size_t len) {
  answer *a = (answer *)context;
  const unsigned key = key_now(a);
  uint64_t v;
  scalar_in_list(a);
  note(a, key, wants_scalar(a, key) && integer_of(text, len, &v) && take_integer(a, key, v));
  return a->depth != 0;
}

static int on_string(void *context, const unsigned char *text, size_t len) {
  answer *a = (answer *)context;
  const unsigned key = key_now(a);
  scalar_in_list(a);
  note(a, key, wants_scalar(a, key) && take_text(a, key, (const char *)text, len));
  return a->depth != 0;
}

/* ---- events ---- */

/* Where the last id of the event's rank stands; NULL: a foreign rank. */
static uint64_t *last_id_of(const answer *a) {
  const uint32_t i = a->r.rank - a->p->cfg_.rank_start;
  return i < a->p->cfg_.ranks ? &a->p->last_ids_[i] : NULL;
}

static bool has(const reading *r, unsigned key) { return (r->seen & bit(key)) != 0; }

/* A block of the list is over. */
static void end_block(answer *a) {
  reading *r = &a->r;
  kvrelay_engine_event *ev = &r->ev;
  const bool named = (r->block_seen & bit(KEY_BLOCK_HASH)) != 0;
  if (r->broken) {
    r->orphans += named;
    return;
  }
  if (!named) { /* what follows hangs on something that nobody can name */
    r->broken = true;
    ev->tokens_len = r->block_start;
    while (ev->mm_objects_len != 0 &&
           a->p->mm_objects_[ev->mm_objects_len - 1].block == ev->externals_len)
      ev->mm_objects_len--;
    return;
  }
  if (r->block_tokens == 0)
    r->bad |= bit(KEY_BLOCKS);
  else if (r->block_tokens > a->p->cfg_.block_size)
    ev->block_size = r->block_tokens < UINT32_MAX ? (uint32_t)r->block_tokens : UINT32_MAX;
  add_external(a, r->block_hash);
  r->cut = r->cut || r->block_tokens < a->p->cfg_.block_size;
}

/* What the source gets of an event whose number is all right. */
static void settle(answer *a) {
  reading *r = &a->r;
  const unsigned list = r->data_type == DATA_STORED ? KEY_BLOCKS : KEY_HASHES;
  kvrelay_engine_event *ev = &r->ev;
  ev->externals = a->p->externals_;
  ev->tokens = a->p->tokens_;
  ev->mm_objects = a->p->mm_objects_;
  ev->has_parent = has(r, KEY_PARENT);
  ev->has_mm_infos = ev->mm_objects_len != 0;
  ev->mm_infos_blocks = ev->has_mm_infos ? ev->externals_len : 0;
  if (!has(r, KEY_TYPE) || (r->bad & bit(KEY_TYPE)) != 0)
    ev->type = KVRELAY_ENGINE_MALFORMED;
  else if (r->data_type == DATA_UNKNOWN)
    ev->type = KVRELAY_ENGINE_UNKNOWN;
  else if (r->data_type == DATA_IGNORED)
    ev->type = KVRELAY_ENGINE_IGNORED;
  else if (r->bad != 0 || !has(r, list) || (has(r, KEY_BLOCKS) && has(r, KEY_HASHES)))
    ev->type = KVRELAY_ENGINE_MALFORMED;
  else if (r->too_large)
    ev->type = KVRELAY_ENGINE_TOO_LARGE;
  else
    ev->type = r->data_type == DATA_STORED ? KVRELAY_ENGINE_STORED : KVRELAY_ENGINE_REMOVED;
}

/*
 * Whether the event is one of the engine's main attention, the largest window.  A larger one that
 * shows up late makes what was stored so far another cache's.
 */
static bool is_main(answer *a) {
  kvrelay_polled *p = a->p;
  const int type = a->r.ev.type;
  if (!has(&a->r, KEY_WINDOW) || last_id_of(a) == NULL || type == KVRELAY_ENGINE_MALFORMED ||
      type == KVRELAY_ENGINE_UNKNOWN)
    return true; /* teaches nothing; the source counts it */
  if (a->r.window > p->window_) {
    p->window_ = a->r.window;
    if (p->stored_)
      a->err = kvrelay_source_clear(a->s, a->now_ns);
    p->stored_ = false;
  }
  p->stored_ = p->stored_ || a->r.data_type == DATA_STORED;
  return a->r.window == p->window_;
}

/* Whether it is the turn of the event's number; counts what is odd about it. */
static bool take_number(answer *a) {
  uint64_t *last = last_id_of(a);
  if (last == NULL)
    return true; /* the source counts it */
  if (*last != UINT64_MAX && a->r.id <= *last) {
    kvrelay_source_count(a->s, KVRELAY_COUNT_EVENT_ID_ORDER, 1);
    return false;
  }
  if (*last != UINT64_MAX)
    kvrelay_source_count(a->s, KVRELAY_COUNT_GAP, a->r.id - *last - 1);
  *last = a->r.id;
  return true;
}

/* What the number says of the process that answers. */
static void look_at_number(answer *a) {
  const uint64_t *last = last_id_of(a);
  if (last == NULL)
    return;
  bool *spoke = &a->p->spoke_[last - a->p->last_ids_];
  a->starts_over |= !*spoke && *last != UINT64_MAX && a->r.id <= *last;
  *spoke = true;
  if (!a->has_first)
    a->first_id = a->r.id;
  a->has_first = true;
}

static void begin_event(answer *a) {
  memset(&a->r, 0, sizeof a->r);
  a->r.rank = a->p->cfg_.rank_start;
  a->r.ev.block_size = a->p->cfg_.block_size;
}

static void end_event(answer *a) {
  const reading *r = &a->r;
  const uint32_t head = bit(KEY_EVENT_ID) | bit(KEY_RANK) | bit(KEY_WINDOW);
  const bool numbered = has(r, KEY_EVENT_ID) && (r->bad & head) == 0;
  a->events++;
  if (a->s == NULL) {
    if (numbered)
      look_at_number(a);
    return;
  }
  if (!numbered) {
    kvrelay_source_count(a->s, KVRELAY_COUNT_MALFORMED_EVENT, 1);
    return;
  }
  if (!take_number(a))
    return;
  settle(a);
  if (!is_main(a)) {
    kvrelay_source_count(a->s, KVRELAY_COUNT_NON_MAIN_ATTENTION_GROUP, 1);
    return;
  }
  kvrelay_source_count(a->s, KVRELAY_COUNT_ORPHAN, r->orphans);
  if (a->err == KVRELAY_OK)
    a->err = kvrelay_source_event(a->s, true, r->rank, &r->ev, a->now_ns);
}

/* ---- lists and maps ---- */

/* The place that a list or map is which opens now. */
static unsigned place_inside(answer *a, bool list) {
  switch (a->places[a->depth]) {
  case PLACE_TOP:
    return list ? PLACE_ANSWER : PLACE_EVENT;
  case PLACE_ANSWER:
    return list ? PLACE_OTHER : PLACE_EVENT;
  case PLACE_BLOCKS:
    return list ? PLACE_OTHER : PLACE_BLOCK;
  case PLACE_TOKENS:
    return list ? PLACE_OTHER : PLACE_TOKEN;
  case PLACE_MM_KEYS:
    return list ? PLACE_OTHER : PLACE_MM_KEY;
  case PLACE_HASHES:
    note(a, KEY_HASHES, false);
    return PLACE_OTHER;
  default:
    break;
  }
  const unsigned key = key_now(a);
  const uint32_t before = a->places[a->depth] == PLACE_BLOCK ? a->r.block_seen : a->r.seen;
  const bool fits = key != KEY_OTHER && members[a->member].inside != PLACE_OTHER &&
                    members[a->member].list == list && (before & bit(key)) == 0;
  note(a, key, fits);
  return fits ? members[a->member].inside : PLACE_OTHER;
}

static int begin(answer *a, bool list) {
  const unsigned place = place_inside(a, list);
  if (a->depth == KVRELAY_POLLED_DEPTH_MAX)
    return 0;
  if (place == PLACE_OTHER && a->places[a->depth] != PLACE_OTHER)
    scalar_in_list(a);
  a->places[++a->depth] = (uint8_t)place;
  if (place == PLACE_EVENT)
    begin_event(a);
  if (place == PLACE_BLOCK) {
    a->r.block_seen = 0;
    a->r.block_tokens = 0;
    a->r.block_start = a->r.ev.tokens_len;
  }
  if (place == PLACE_TOKEN || place == PLACE_MM_KEY)
    a->r.block_seen &= ~(bit(KEY_TOKEN_ID) | bit(KEY_MM_HASH));
  a->member = MEMBERS_LEN;
  return 1;
}

static int on_start_map(void *context) { return begin((answer *)context, false); }
static int on_start_array(void *context) { return begin((answer *)context, true); }

static int on_end(void *context) {
  answer *a = (answer *)context;
  const unsigned place = a->places[a->depth--];
  a->member = MEMBERS_LEN;
  if (place == PLACE_TOKEN && (a->r.block_seen & bit(KEY_TOKEN_ID)) == 0)
    a->r.bad |= bit(KEY_TOKENS);
  if (place == PLACE_MM_KEY && (a->r.block_seen & bit(KEY_MM_HASH)) == 0)
    a->r.bad |= bit(KEY_MM_KEYS); /* without its image it would be the block of a text */
  if (place == PLACE_BLOCK)
    end_block(a);
  if (place == PLACE_EVENT)
    end_event(a);
  return a->err == KVRELAY_OK;
}

static int on_key(void *context, const unsigned char *text, size_t len) {
  answer *a = (answer *)context;
  for (a->member = 0; a->member < MEMBERS_LEN; a->member++)
    if (members[a->member].place == a->places[a->depth] &&
        text_is((const char *)text, len, members[a->member].name))
      break;
  return 1;
}

/* ---- one answer ---- */

/* Goes through the whole text; false: it is not JSON, cut off, too deep, or no answer. */
static bool read_answer(answer *a, const uint8_t *text, size_t len) {
  static const yajl_callbacks callbacks = {.yajl_null = on_null,
                                           .yajl_boolean = on_boolean,
                                           .yajl_number = on_number,
                                           .yajl_string = on_string,
                                           .yajl_start_map = on_start_map,
                                           .yajl_map_key = on_key,
                                           .yajl_end_map = on_end,
                                           .yajl_start_array = on_start_array,
                                           .yajl_end_array = on_end};
  yajl_handle parser = yajl_alloc(&callbacks, NULL, a);
  if (parser == NULL)
    return false;
  const bool whole = yajl_parse(parser, text, len) == yajl_status_ok &&
                     yajl_complete_parse(parser) == yajl_status_ok;
  yajl_free(parser);
  return whole;
}

static void forget(kvrelay_polled *p) {
  memset(p->last_ids_, 0xff, p->cfg_.ranks * sizeof *p->last_ids_);
  p->window_ = 0;
  p->stored_ = false;
}

/* The ids started over: what was known is another process's, whatever the source had of it. */
static int start_over(kvrelay_polled *p, kvrelay_source *s, uint64_t now_ns) {
  forget(p);
  p->sequence_ = 0;
  kvrelay_source_count(s, KVRELAY_COUNT_RESTART, 1);
  return kvrelay_source_clear(s, now_ns);
}

/* The number of an answer: the next one, 0 only where an id of ours says that it is the first. */
static uint64_t number_of(kvrelay_polled *p, const answer *a) {
  if (p->sequence_ == 0 && !(a->has_first && a->first_id == 0))
    p->sequence_ = 1;
  return p->sequence_++;
}

int kvrelay_polled_feed(kvrelay_polled *p, kvrelay_source *s, const uint8_t *json, size_t len,
                        uint64_t now_ns) {
  answer a = {.p = p}, applied = {.p = p, .s = s, .now_ns = now_ns};
  kvrelay_source_batch batch;
  memset(p->spoke_, 0, p->cfg_.ranks * sizeof *p->spoke_);
  const bool whole = read_answer(&a, json, len);
  if (whole && a.events == 0)
    return KVRELAY_OK;
  int err = a.starts_over ? start_over(p, s, now_ns) : KVRELAY_OK;
  if (err == KVRELAY_OK)
    err = kvrelay_source_live(s, number_of(p, &a), whole ? json : NULL, len, now_ns);
  while (err == KVRELAY_OK && kvrelay_source_next(s, &batch, now_ns) == 1) {
    if (batch.payload == NULL)
      err = kvrelay_source_lost(s, KVRELAY_COUNT_PAYLOAD_MALFORMED, now_ns);
    else if (!read_answer(&applied, json, len) && applied.err == KVRELAY_OK)
      err = kvrelay_source_lost(s, KVRELAY_COUNT_PAYLOAD_MALFORMED, now_ns); /* no memory for it */
    else
      err = applied.err;
  }
  return err;
}

/* ---- memory ---- */

/* Blocks of one event: as many as its tokens make at the smallest size that engines use. */
static size_t blocks_cap(const kvrelay_polled_config *cfg) { return cfg->max_tokens / 4 + 64; }

size_t kvrelay_polled_mem_size(const kvrelay_polled_config *cfg) {
  if (cfg->block_size == 0 || cfg->ranks == 0 || cfg->ranks > 65536 || cfg->max_tokens < 64 ||
      cfg->max_tokens > (size_t)1 << 28)
    return 0;
  return cfg->ranks * (sizeof(uint64_t) + sizeof(bool)) + cfg->max_tokens * sizeof(uint32_t) +
         blocks_cap(cfg) * (sizeof(uint64_t) + sizeof(kvrelay_mm_object)) +
         2 * KVRELAY_POLLED_TEXT_MAX + 16;
}

int kvrelay_polled_init(kvrelay_polled *p, const kvrelay_polled_config *cfg, void *mem,
                        size_t len) {
  const size_t need = kvrelay_polled_mem_size(cfg);
  if (need == 0 || mem == NULL)
    return KVRELAY_ERR_ARG;
  if (len < need)
    return KVRELAY_ERR_NOSPACE;
  char *at = (char *)mem + ((16 - ((uintptr_t)mem & 15)) & 15);
  memset(p, 0, sizeof *p);
  p->cfg_ = *cfg;
  p->blocks_cap_ = blocks_cap(cfg);
  p->last_ids_ = (uint64_t *)(void *)at;
  at += cfg->ranks * sizeof *p->last_ids_;
  p->externals_ = (uint64_t *)(void *)at;
  at += p->blocks_cap_ * sizeof *p->externals_;
  p->mm_objects_ = (kvrelay_mm_object *)(void *)at;
  at += p->blocks_cap_ * sizeof *p->mm_objects_;
  p->tokens_ = (uint32_t *)(void *)at;
  at += cfg->max_tokens * sizeof *p->tokens_;
  p->spoke_ = (bool *)at;
  p->texts_ = at + cfg->ranks * sizeof *p->spoke_;
  forget(p);
  return KVRELAY_OK;
}
