/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_producer: events, removals, rebuilds and drains in any order, at limits so small that all of
 * them are reached, against lists of mappings and blocks. After every step the producer's own check
 * holds, and words, generator, owners and counters are those of the lists; what was refused changed
 * nothing; batches rebuild the words.
 *
 * SECURITY.md: 4, 5, 9, 11, 12, 14, 15.
 */

#include "ckf.h"
#include "fuzz.h"

enum {
  MAPPINGS = 48,
  BLOCKS = 40,
  MEMBERS = 4,
  BUCKETS_CAP = 32,
  EVENT = 16,
  KICKS_CAP = 8,
  ROOM = MAPPINGS + EVENT
};

typedef struct mapping {
  ckf_member member;
  uint64_t external, canonical;
} mapping;

typedef struct block {
  uint64_t canonical;
  bool resident;
} block;

typedef struct model {
  mapping mappings[ROOM];
  size_t mapping_len;
  block blocks[ROOM];
  size_t block_len;
  ckf_filter filter;
  ckf_image log[KICKS_CAP + 1];
  uint64_t words[BUCKETS_CAP], published[BUCKETS_CAP];
  uint64_t pending, every, unknown_removals, parent_not_found, capacity_failures;
  bool rebuilding; /* nothing is placed: the producer may choose the order of what it retains */
} model;

typedef struct pair {
  ckf_producer p, next;
  uint8_t *memory, *next_memory;
  size_t memory_len;
  model m;
} pair;

static bool same(const ckf_member *x, const ckf_member *y) {
  return x->worker_id == y->worker_id && x->dp_rank == y->dp_rank;
}

static const mapping *find(const model *m, const ckf_member *member, uint64_t external) {
  for (size_t i = 0; i < m->mapping_len; i++)
    if (m->mappings[i].external == external && same(&m->mappings[i].member, member))
      return &m->mappings[i];
  return NULL;
}

/* The block, which comes into being if `create`. */
static block *block_of(model *m, uint64_t canonical, bool create) {
  size_t i = 0;
  while (i < m->block_len && m->blocks[i].canonical != canonical)
    i++;
  FUZZ_CHECK(i < m->block_len || create);
  if (i == m->block_len)
    m->blocks[m->block_len++] = (block){canonical, false};
  return &m->blocks[i];
}

static uint32_t owners_of(const model *m, uint64_t canonical) {
  uint32_t owners = 0;
  for (size_t i = 0; i < m->mapping_len; i++)
    owners += m->mappings[i].canonical == canonical;
  return owners;
}

static size_t members_of(const model *m) {
  size_t members = 0;
  for (size_t i = 0; i < m->mapping_len; i++) {
    size_t first = 0;
    while (!same(&m->mappings[first].member, &m->mappings[i].member))
      first++;
    members += first == i;
  }
  return members;
}

static void add(uint64_t *list, size_t *len, uint64_t value) {
  for (size_t i = 0; i < *len; i++)
    if (list[i] == value)
      return;
  list[(*len)++] = value;
}

/* One event of at most EVENT blocks. */
typedef struct store {
  ckf_member member;
  uint64_t parent, start;
  size_t n;
  bool has_parent, has_start;
  ckf_block blocks[EVENT];
} store;

/* Appends the new mappings; on an error the lists are as before. */
static int model_map(model *m, const store *s, uint64_t *candidates, size_t *candidate_len,
                     uint64_t *repeats, size_t *repeat_len) {
  const mapping *parent = s->has_parent ? find(m, &s->member, s->parent) : NULL;
  const size_t before = m->mapping_len;
  uint64_t canonical = parent ? parent->canonical : 0;
  if (s->has_parent && !parent)
    return CKF_ERR_PARENT_NOT_FOUND;
  if (!s->has_parent && s->has_start && s->start != 0)
    return CKF_ERR_INVALID_BLOCK_SEQUENCE;
  for (size_t i = 0; i < s->n; i++) {
    const uint64_t local = s->blocks[i].local;
    const mapping *known = find(m, &s->member, s->blocks[i].external);
    canonical = i == 0 && !s->has_parent ? local : ckf_child(canonical, local);
    if (known && known->canonical != canonical) {
      m->mapping_len = before;
      return CKF_ERR_INVALID_BLOCK_SEQUENCE;
    }
    if (known) {
      add(repeats, repeat_len, canonical);
    } else {
      add(candidates, candidate_len, canonical);
      m->mappings[m->mapping_len++] = (mapping){s->member, s->blocks[i].external, canonical};
    }
  }
  return CKF_OK;
}

static bool model_place(model *m, block *b, bool relocate) {
  if (m->rebuilding)
    return true;
  b->resident = (relocate ? ckf_filter_insert(&m->filter, b->canonical)
                          : ckf_filter_insert_home(&m->filter, b->canonical)) == CKF_OK;
  return b->resident;
}

static int model_store(model *m, const store *s) {
  uint64_t candidates[EVENT], repeats[EVENT], failed = 0;
  size_t candidate_len = 0, repeat_len = 0;
  if (s->n == 0)
    return CKF_OK;
  const int rc = model_map(m, s, candidates, &candidate_len, repeats, &repeat_len);
  if (rc != CKF_OK)
    return rc;
  for (size_t i = 0; i < candidate_len; i++) {
    block *const b = block_of(m, candidates[i], true);
    failed += !b->resident && !model_place(m, b, true);
  }
  for (size_t i = 0; i < repeat_len && !m->rebuilding; i++) {
    bool candidate = false;
    for (size_t c = 0; c < candidate_len; c++)
      candidate |= candidates[c] == repeats[i];
    block *const b = block_of(m, repeats[i], false);
    if (!candidate && !b->resident)
      (void)model_place(m, b, false);
  }
  m->capacity_failures += failed;
  return failed ? CKF_ERR_CAPACITY_EXHAUSTED : CKF_OK;
}

static void model_unmap(model *m, size_t at) {
  const uint64_t canonical = m->mappings[at].canonical;
  m->mappings[at] = m->mappings[--m->mapping_len];
  if (owners_of(m, canonical) == 0) {
    block *const b = block_of(m, canonical, false);
    if (b->resident)
      FUZZ_CHECK(ckf_filter_remove(&m->filter, canonical) == CKF_OK);
    *b = m->blocks[--m->block_len];
  }
}

static void model_drop(model *m, const ckf_member *member, bool whole_worker) {
  for (size_t i = m->mapping_len; i-- > 0;)
    if (m->mappings[i].member.worker_id == member->worker_id &&
        (whole_worker || m->mappings[i].member.dp_rank == member->dp_rank))
      model_unmap(m, i);
}

/* ---- both ---- */

static ckf_member read_member(fuzz_input *in) {
  const uint8_t byte = fuzz_byte(in);
  return (ckf_member){byte / 2 % 4, byte % 2};
}

/* External ids of chain positions: repeats, aliases and conflicts all come up. */
static uint64_t external_of(uint32_t root, uint32_t depth, uint32_t alias) {
  return root * 1000 + depth * 10 + alias;
}

static store read_store(fuzz_input *in) {
  const uint8_t shape = fuzz_byte(in), chain = fuzz_byte(in);
  const uint32_t root = chain % 8, alias = chain / 64;
  uint32_t depth = chain / 8 % 8;
  store s = {.member = read_member(in), .n = fuzz_below(in, EVENT + 1)};
  s.has_parent = shape % 4 == 1;
  s.has_start = shape % 4 == 2;
  s.start = shape / 32;
  s.parent = external_of(root, depth, alias);
  depth = s.has_parent ? depth + 1 : 0;
  for (uint32_t i = 0; i < s.n; i++, depth++)
    s.blocks[i] = (ckf_block){external_of(root, depth, alias), root * 77 + depth};
  if (shape % 16 >= 12 && s.n > 0) /* one block that does not belong there */
    s.blocks[shape / 16u % s.n].local ^= shape % 2;
  if (shape % 16 == 11 && s.n > 1)
    s.blocks[s.n - 1] = s.blocks[0];
  return s;
}

static bool above(const model *m, size_t divisor) {
  return m->mapping_len > MAPPINGS / divisor || m->block_len > BLOCKS / divisor ||
         members_of(m) > MEMBERS / divisor;
}

/* Limits are met with the tables as they are: an event that would pass one, or, well filled, finds
 * no place, is refused and leaves no trace. */
static void store_both(pair *x, ckf_producer *p, const store *s) {
  static model before;
  ckf_outcome out;
  before = x->m;
  const int want = model_store(&x->m, s);
  const int rc =
      ckf_producer_stored(p, &s->member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, s->has_parent,
                          s->parent, s->has_start, s->start, s->blocks, s->n, &out);
  const bool placed = want == CKF_OK || want == CKF_ERR_CAPACITY_EXHAUSTED;
  FUZZ_CHECK(out.error == rc);
  if (rc == CKF_ERR_NOSPACE) {
    /* The mappings before a conflict may have been the ones too many. */
    FUZZ_CHECK(!placed || above(&x->m, 2));
    x->m = before;
    return;
  }
  FUZZ_CHECK(rc == want);
  FUZZ_CHECK(!placed || !above(&x->m, 1));
  FUZZ_CHECK(out.mapped == x->m.mapping_len - before.mapping_len);
  if (!x->m.rebuilding)
    FUZZ_CHECK(out.omitted == x->m.capacity_failures - before.capacity_failures);
  x->m.parent_not_found += rc == CKF_ERR_PARENT_NOT_FOUND && !x->m.rebuilding;
}

static void removed_both(pair *x, fuzz_input *in) {
  const ckf_member member = read_member(in);
  const uint8_t chain = fuzz_byte(in);
  const uint32_t n = fuzz_below(in, EVENT), step = 1 + fuzz_byte(in) % 3;
  uint64_t externals[EVENT], unknown = 0;
  ckf_outcome out;
  for (uint32_t i = 0; i < n; i++) {
    externals[i] = external_of(chain % 8, chain / 8 % 8 + i * step, chain / 64);
    const mapping *known = find(&x->m, &member, externals[i]);
    unknown += !known;
    if (known)
      model_unmap(&x->m, (size_t)(known - x->m.mappings));
  }
  FUZZ_CHECK(ckf_producer_removed(&x->p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_WORKER, externals, n,
                                  &out) == CKF_OK);
  FUZZ_CHECK(out.unknown == unknown && out.unmapped == n - unknown);
  x->m.unknown_removals += unknown;
}

static ckf_image image_of(const ckf_batch *batch, size_t i) { return ckf_batch_image(batch, i); }

static void drain_both(pair *x) {
  const uint64_t buckets = ckf_producer_format(&x->p)->bucket_count;
  ckf_batch batch;
  bool seen[BUCKETS_CAP] = {false};
  const int rc = ckf_producer_drain(&x->p, &batch);
  FUZZ_CHECK(rc == (memcmp(x->m.published, x->m.words, sizeof x->m.words) != 0));
  for (size_t i = 0; rc == 1 && i < batch.image_count; i++) {
    const ckf_image image = image_of(&batch, i);
    FUZZ_CHECK(image.bucket < buckets && !seen[image.bucket]);
    FUZZ_CHECK(image.word != x->m.published[image.bucket]);
    seen[image.bucket] = true;
    x->m.published[image.bucket] = image.word;
  }
  FUZZ_CHECK(memcmp(x->m.published, x->m.words, sizeof x->m.words) == 0);
  x->m.pending = 0;
  FUZZ_CHECK(!ckf_producer_has_pending(&x->p));
}

/* Where each block lies is the producer's choice now: taken over, and checked like everything. */
static void adopt(pair *x) {
  ckf_producer_stats stats;
  ckf_producer_stats_get(&x->p, &stats);
  FUZZ_CHECK(stats.capacity_failures >= x->m.capacity_failures);
  x->m.capacity_failures = stats.capacity_failures;
  memcpy(x->m.words, ckf_producer_words(&x->p),
         (size_t)ckf_producer_format(&x->p)->bucket_count * 8);
  ckf_filter_set_rng(&x->m.filter, stats.generator);
  for (size_t i = 0; i < x->m.block_len; i++)
    FUZZ_CHECK(
        ckf_producer_owners(&x->p, x->m.blocks[i].canonical, NULL, &x->m.blocks[i].resident) == 1);
}

static void rebuild_both(pair *x, fuzz_input *in) {
  static model before;
  const uint8_t shape = fuzz_byte(in);
  const ckf_member low = read_member(in);
  const ckf_member named[2] = {low, {low.worker_id, low.dp_rank + 1}};
  const size_t named_len = 1 + shape % 2;
  before = x->m;
  x->m.rebuilding = true;
  const uint64_t failures = x->m.capacity_failures;
  if (ckf_rebuild_begin(&x->next, &x->p, named, named_len, x->next_memory, x->memory_len) !=
      CKF_OK) /* what is retained found no place in the other order */
    FUZZ_CHECK(above(&x->m, 2));
  else {
    for (size_t i = x->m.block_len; i-- > 0;)
      x->m.blocks[i].resident = false; /* so that dropping a member does not touch the filter */
    for (size_t i = 0; i < named_len; i++)
      model_drop(&x->m, &named[i], false);
    for (size_t i = 0; i < named_len; i++)
      for (int push = shape / 2 % 4; push > 0; push--) {
        store s = read_store(in);
        s.member = named[i];
        store_both(x, &x->next, &s);
      }
    if (shape & 128) {
      FUZZ_CHECK(ckf_rebuild_commit(&x->p, &x->next) == CKF_OK);
      uint8_t *const free_memory = x->memory;
      x->memory = x->next_memory;
      x->next_memory = free_memory;
      x->m.rebuilding = false;
      x->m.pending = 1;
      x->m.capacity_failures = failures;
      adopt(x);
      return;
    }
  }
  x->m = before; /* given up: nothing happened */
}

static void check(pair *x) {
  ckf_producer_stats stats;
  FUZZ_CHECK(ckf_producer_check_(&x->p) == CKF_OK);
  ckf_producer_stats_get(&x->p, &stats);
  FUZZ_CHECK(memcmp(ckf_producer_words(&x->p), x->m.words,
                    (size_t)ckf_producer_format(&x->p)->bucket_count * 8) == 0);
  FUZZ_CHECK(stats.generator == ckf_filter_rng(&x->m.filter));
  FUZZ_CHECK(stats.members == members_of(&x->m));
  FUZZ_CHECK(stats.contributions == x->m.mapping_len);
  FUZZ_CHECK(stats.unique_blocks == x->m.block_len);
  FUZZ_CHECK(stats.pending_events == x->m.pending);
  FUZZ_CHECK(stats.unknown_removals == x->m.unknown_removals);
  FUZZ_CHECK(stats.parent_not_found == x->m.parent_not_found);
  FUZZ_CHECK(stats.capacity_failures == x->m.capacity_failures);
  for (size_t i = 0; i < x->m.block_len; i++) {
    const block *b = &x->m.blocks[i];
    uint32_t owners;
    bool resident;
    FUZZ_CHECK(ckf_producer_owners(&x->p, b->canonical, &owners, &resident) == 1);
    FUZZ_CHECK(owners == owners_of(&x->m, b->canonical) && resident == b->resident);
    FUZZ_CHECK(!resident || ckf_producer_contains(&x->p, b->canonical));
  }
  for (size_t i = 0; i < x->m.mapping_len; i++) {
    const mapping *known = &x->m.mappings[i];
    uint64_t canonical;
    FUZZ_CHECK(ckf_producer_find(&x->p, &known->member, known->external, &canonical, NULL) == 1);
    FUZZ_CHECK(canonical == known->canonical);
  }
}

static void step(pair *x, fuzz_input *in) {
  const uint8_t op = fuzz_byte(in) % 16;
  ckf_outcome out;
  if (op < 7) {
    const store s = read_store(in);
    store_both(x, &x->p, &s);
    x->m.pending++;
  } else if (op < 10) {
    removed_both(x, in);
    x->m.pending++;
  } else if (op == 10) {
    const ckf_member member = read_member(in);
    model_drop(&x->m, &member, false);
    FUZZ_CHECK(ckf_producer_cleared(&x->p, &member, CKF_DOMAIN_WORKER, &out) == CKF_OK);
    x->m.pending++;
    FUZZ_CHECK(out.boundary == (x->m.pending >= x->m.every));
  } else if (op == 11) {
    const ckf_member member = read_member(in);
    model_drop(&x->m, &member, false);
    FUZZ_CHECK(ckf_producer_remove_rank(&x->p, &member) == CKF_OK);
  } else if (op == 12) {
    const ckf_member member = read_member(in);
    model_drop(&x->m, &member, true);
    FUZZ_CHECK(ckf_producer_remove_worker(&x->p, member.worker_id) == CKF_OK);
  } else if (op < 15) {
    drain_both(x);
  } else {
    rebuild_both(x, in);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static const uint8_t expected[] = {1, 6, 12, 40};
  static pair x;
  fuzz_input in = {data, len};
  const uint8_t shape = fuzz_byte(&in);
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected[shape % 4];
  cfg.filter.max_kicks = 1 + shape / 4u % KICKS_CAP;
  cfg.filter.publish_every_n_events = 1 + shape / 32u;
  cfg.max_mappings = MAPPINGS;
  cfg.max_blocks = BLOCKS;
  cfg.max_members = MEMBERS;
  cfg.hash_seed = fuzz_byte(&in);
  cfg.delta_table = cfg.hash_seed == 7; /* slow to fill, and the same everywhere */
  memset(&x, 0, sizeof x);
  x.memory_len = ckf_producer_mem_size(&cfg);
  x.memory = fuzz_alloc(x.memory_len);
  x.next_memory = fuzz_alloc(x.memory_len);
  FUZZ_CHECK(ckf_producer_init(&x.p, &cfg, x.memory, x.memory_len) == CKF_OK);
  FUZZ_CHECK(ckf_producer_format(&x.p)->bucket_count <= BUCKETS_CAP);
  FUZZ_CHECK(ckf_filter_init(&x.m.filter, ckf_producer_format(&x.p), cfg.filter.max_kicks,
                             x.m.words, x.m.log, NULL) == CKF_OK);
  x.m.every = cfg.filter.publish_every_n_events;
  while (in.left > 0) {
    step(&x, &in);
    check(&x);
  }
  drain_both(&x);
  free(x.memory);
  free(x.next_memory);
  return 0;
}
