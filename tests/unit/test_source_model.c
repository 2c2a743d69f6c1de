/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random streams of an engine beside a naive model: lists of mappings that are searched from end to
 * end.  After each batch both hold the same engine hashes under the same keys, and have counted the
 * same.
 */
#include <criterion/criterion.h>
#include <inttypes.h>

#include "test_source.h"

enum { RANKS = 2, NAMESPACES = 3, BRANCHES = 3, LEVELS = 5, MAPPINGS_MAX = 4096, STEPS = 12000 };

typedef struct mapping {
  uint64_t external, canonical;
  int ns; /* 0 = none */
  uint32_t copies;
  bool ambiguous;
} mapping;

typedef struct rank_model {
  mapping at[MAPPINGS_MAX];
  size_t len;
  uint64_t silent[64]; /* remembered hashes, oldest first; as many as the source has room for */
  size_t silent_len;
  bool seen, complete;
} rank_model;

typedef struct model {
  rank_model rank[RANKS];
  uint64_t next;
  bool has_next;
  uint64_t counts[KVRELAY_COUNT_LEN];
} model;

static uint64_t random_state;
static uint32_t draw(uint32_t n) { return (uint32_t)(ckf_rng_draw(&random_state) % n); }

static const char *const names[NAMESPACES] = {"", "tenant-a", "tenant-b"};

/* ---- the model ---- */

static mapping *find(rank_model *r, uint64_t external) {
  for (size_t i = 0; i < r->len; i++)
    if (r->at[i].external == external)
      return &r->at[i];
  return NULL;
}

static bool is_silent(const rank_model *r, uint64_t external) {
  for (size_t i = 0; i < r->silent_len; i++)
    if (r->silent[i] == external)
      return true;
  return false;
}

static void drop(rank_model *r) { r->len = r->silent_len = 0; }

static void model_sequence(model *m, uint64_t s) {
  if (m->has_next && s < m->next) {
    m->counts[KVRELAY_COUNT_RESTART]++;
    for (int i = 0; i < RANKS; i++) {
      drop(&m->rank[i]);
      m->rank[i].seen = false;
    }
    m->has_next = false;
  }
  if (!m->has_next) {
    for (int i = 0; i < RANKS; i++)
      m->rank[i].complete = s == 0;
  } else if (s > m->next) {
    m->counts[KVRELAY_COUNT_GAP] += s - m->next;
    m->counts[KVRELAY_COUNT_LOSS] += s - m->next;
    for (int i = 0; i < RANKS; i++) {
      m->rank[i].complete = false;
      if (m->rank[i].seen)
        drop(&m->rank[i]);
    }
  }
  m->has_next = true;
  m->next = s + 1;
}

static void remember(rank_model *r, uint64_t external) {
  if (is_silent(r, external))
    return;
  cr_assert_lt(r->silent_len, 64, "the model does not forget the oldest");
  r->silent[r->silent_len++] = external;
}

/* What the source is told about one store. */
typedef struct told {
  uint64_t externals[LEVELS], locals[NAMESPACES][LEVELS]; /* local hash under each namespace */
  size_t len, blocks;                                     /* blocks: whole ones among them */
  bool has_parent;
  uint64_t parent;
  int own; /* namespace of its own, 0 = none */
} told;

static void model_store(model *m, rank_model *r, const told *t) {
  mapping *parent = t->has_parent ? find(r, t->parent) : NULL;
  int ns = t->own != 0 ? t->own : parent ? parent->ns : 0;
  bool conflict = false;
  if (t->own == 0 && parent && parent->ambiguous) {
    m->counts[KVRELAY_COUNT_AMBIGUOUS_CACHE_NAMESPACE]++;
    return;
  }
  for (size_t i = 0; i < t->blocks; i++) {
    mapping *known = find(r, t->externals[i]);
    if (known && known->ns != ns)
      known->ambiguous = conflict = true;
  }
  if (conflict) {
    m->counts[KVRELAY_COUNT_NAMESPACE_CONFLICT]++;
    return;
  }
  for (size_t i = t->blocks; i < t->len; i++) {
    m->counts[KVRELAY_COUNT_PARTIAL_BLOCK]++;
    remember(r, t->externals[i]);
  }
  if (t->blocks == 0)
    return;
  if (t->has_parent && !parent) {
    m->counts[KVRELAY_COUNT_ORPHAN] += t->blocks;
    if (is_silent(r, t->parent)) {
      for (size_t i = 0; i < t->len; i++)
        remember(r, t->externals[i]);
      return;
    }
    m->counts[KVRELAY_COUNT_RECOVERY] += r->complete;
    r->complete = false;
    return;
  }
  uint64_t canonical[LEVELS];
  for (size_t i = 0; i < t->blocks; i++) {
    uint64_t local = t->locals[ns][i];
    canonical[i] = i > 0    ? hashfmt_child(canonical[i - 1], local)
                   : parent ? hashfmt_child(parent->canonical, local)
                            : local;
    mapping *known = find(r, t->externals[i]);
    if (known && known->canonical != canonical[i]) {
      m->counts[KVRELAY_COUNT_REMAP_CONFLICT]++;
      return;
    }
  }
  for (size_t i = 0; i < t->blocks; i++) {
    mapping *known = find(r, t->externals[i]);
    if (known) {
      known->copies++;
      continue;
    }
    cr_assert_lt(r->len, MAPPINGS_MAX);
    r->at[r->len++] = (mapping){t->externals[i], canonical[i], ns, 1, false};
  }
}

static void model_remove(model *m, rank_model *r, uint64_t external) {
  mapping *known = find(r, external);
  if (known && --known->copies == 0) {
    *known = r->at[--r->len];
  } else if (!known && is_silent(r, external)) {
    size_t i = 0;
    while (r->silent[i] != external)
      i++;
    memmove(&r->silent[i], &r->silent[i + 1], (--r->silent_len - i) * sizeof r->silent[0]);
  } else if (!known) {
    m->counts[KVRELAY_COUNT_UNKNOWN_REMOVAL]++;
  }
}

/* ---- random events ---- */

/* A prompt is a path through a small tree under a namespace; an engine names a block by the path.
 */
typedef struct path {
  int ns;
  uint32_t step[LEVELS];
} path;

static uint64_t external_of(const path *p, size_t level) {
  uint32_t bytes[LEVELS + 2] = {(uint32_t)p->ns, (uint32_t)level};
  memcpy(bytes + 2, p->step, (level + 1) * sizeof p->step[0]);
  return hashfmt_hash64(bytes, sizeof bytes, 99);
}

static void random_store(feeder *f, model *m, int rank) {
  path p;
  told t;
  uint32_t tokens[4 * LEVELS];
  memset(&t, 0, sizeof t);
  p.ns = (int)draw(NAMESPACES);
  size_t first = draw(LEVELS), last = first + 1 + draw((uint32_t)(LEVELS - first));
  for (size_t i = 0; i < LEVELS; i++)
    p.step[i] = draw(BRANCHES);
  stored s = {.first = 0};
  for (size_t i = first; i < last; i++) {
    uint64_t external = external_of(&p, i);
    if (draw(60) == 0) { /* an engine that names a block wrongly */
      path other = p;
      other.step[i] = (other.step[i] + 1) % BRANCHES;
      external = external_of(&other, i);
    }
    for (uint32_t k = 0; k < 4; k++)
      tokens[4 * t.len + k] = 100 * (uint32_t)i + 10 * p.step[i] + k;
    for (int ns = 0; ns < NAMESPACES; ns++) {
      const uint8_t *name = (const uint8_t *)names[ns];
      uint64_t seed = hashfmt_seed(NULL, 0, name, strlen(names[ns]));
      t.locals[ns][t.len] = hashfmt_local(tokens + 4 * t.len, 4, seed);
    }
    t.externals[t.len++] = external;
  }
  t.blocks = t.len;
  if (draw(25) == 0)
    t.blocks--; /* the last one is not finished */
  t.has_parent = first > 0;
  t.parent = t.has_parent ? external_of(&p, first - 1) : 0;
  /* A salt comes with the first block; sometimes a later one says it again, or says another one. */
  t.own = first == 0 || draw(10) == 0 ? p.ns : 0;
  if (draw(12) == 0)
    t.own = (int)draw(NAMESPACES);
  s.hashes.len = t.len;
  memcpy(s.hashes.at, t.externals, t.len * sizeof t.externals[0]);
  s.parent = t.has_parent ? &t.parent : NULL;
  s.tokens = tokens;
  s.count = (uint32_t)(4 * t.blocks + (t.blocks < t.len ? draw(4) : 0));
  s.cache_salt = t.own ? names[t.own] : NULL;
  put_stored(&f->batch, s);
  model_store(m, &m->rank[rank], &t);
}

static void random_removal(feeder *f, model *m, int rank) {
  rank_model *r = &m->rank[rank];
  hashes h = {0, {0}};
  for (size_t n = 1 + draw(4); n != 0; n--) {
    uint64_t external =
        draw(8) == 0 || r->len == 0 ? draw(5) : r->at[draw((uint32_t)r->len)].external;
    if (r->silent_len != 0 && draw(3) == 0)
      external = r->silent[draw((uint32_t)r->silent_len)];
    h.at[h.len++] = external;
    model_remove(m, r, external);
  }
  put_removed(&f->batch, h, NULL, NULL);
}

static void random_event(feeder *f, model *m, int rank) {
  m->rank[rank].seen = true;
  if (m->rank[rank].silent_len > 40 || draw(300) == 0) {
    put_cleared(&f->batch, "AllBlocksCleared", NULL);
    drop(&m->rank[rank]);
    m->rank[rank].complete = true;
  } else if (draw(5) < 3) {
    random_store(f, m, rank);
  } else {
    random_removal(f, m, rank);
  }
}

/* ---- comparing ---- */

static void compare(feeder *f, model *m, int step) {
  bool all = true;
  for (uint32_t rank = 0; rank < RANKS; rank++) {
    rank_model *r = &m->rank[rank];
    ckf_member member = {f->cfg.worker_id, rank};
    cr_assert_eq(blocks_of(f, rank), r->len,
                 "step %d, rank %" PRIu32 ": %" PRIu32 " blocks, wanted %zu", step, rank,
                 blocks_of(f, rank), r->len);
    for (size_t i = 0; i < r->len; i++) {
      uint64_t canonical = 0;
      cr_assert_eq(ckf_producer_find(f->producer, &member, r->at[i].external, &canonical, NULL), 1,
                   "step %d", step);
      cr_assert_eq(canonical, r->at[i].canonical, "step %d", step);
    }
    cr_assert_eq(kvrelay_source_complete(&f->source, rank), r->complete, "step %d, rank %" PRIu32,
                 step, rank);
    all = all && (!r->seen || r->complete);
  }
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    cr_assert_eq(counted(f, i), m->counts[i], "step %d: %s is %" PRIu64 ", wanted %" PRIu64, step,
                 kvrelay_count_name(i), counted(f, i), m->counts[i]);
  /* Before any rank is named, the state of the stream counts, which all ranks then share. */
  bool named = m->rank[0].seen || m->rank[1].seen;
  cr_assert_eq(kvrelay_source_stats_get(&f->source)->complete, named ? all : m->rank[0].complete,
               "step %d", step);
}

static void run(uint64_t seed) {
  kvrelay_source_config cfg = test_source_config();
  cfg.partial_memory = 256; /* both ranks together never fill it */
  feeder *f = feeder_new(&cfg, 4096, NULL);
  model *m = calloc(1, sizeof *m);
  random_state = seed;
  for (int step = 0; step < STEPS; step++) {
    int rank = (int)draw(RANKS);
    size_t events = draw(4);
    uint32_t jump = draw(400);
    if (jump == 0)
      f->sequence += 1 + draw(5);
    else if (jump == 1 && f->sequence > 3)
      f->sequence = draw(2) ? 0 : f->sequence - 1 - draw(2);
    model_sequence(m, f->sequence);
    put_batch(&f->batch, events);
    for (size_t i = 0; i < events; i++)
      random_event(f, m, rank);
    cr_assert_eq(feed(f, rank), KVRELAY_OK);
    compare(f, m, step);
    if (step % 64 == 0)
      cr_assert_eq(ckf_producer_check_(f->producer), CKF_OK);
  }
  /* The streams were worth it: everything that can happen in them did. */
  static const int happened[] = {KVRELAY_COUNT_RESTART,
                                 KVRELAY_COUNT_LOSS,
                                 KVRELAY_COUNT_ORPHAN,
                                 KVRELAY_COUNT_RECOVERY,
                                 KVRELAY_COUNT_REMAP_CONFLICT,
                                 KVRELAY_COUNT_NAMESPACE_CONFLICT,
                                 KVRELAY_COUNT_AMBIGUOUS_CACHE_NAMESPACE,
                                 KVRELAY_COUNT_PARTIAL_BLOCK,
                                 KVRELAY_COUNT_UNKNOWN_REMOVAL};
  for (size_t i = 0; i < sizeof happened / sizeof happened[0]; i++)
    cr_assert_gt(counted(f, happened[i]), 0, "%s", kvrelay_count_name(happened[i]));
  free(m);
  feeder_free(f);
}

Test(source_model, random_streams_1) { run(1); }
Test(source_model, random_streams_2) { run(2); }
Test(source_model, random_streams_3) { run(3); }
