/* SPDX-License-Identifier: Apache-2.0 */

/* Producer: against a model of plain lists that follows the event rules word by word. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static uint64_t random_state = 1;

static uint64_t draw(uint64_t below) { return ckf_rng_draw(&random_state) % below; }

/* ---- model ---- */

enum { MAX_MAPPINGS = 400, MAX_BLOCKS = 300, MAX_MEMBERS = 12, MAX_BUCKETS = 64, MAX_EVENT = 40 };

typedef struct model_mapping {
  ckf_member member;
  uint64_t external, canonical;
  uint32_t tag;
} model_mapping;

typedef struct model_block {
  uint64_t canonical;
  bool resident;
} model_block;

typedef struct model {
  model_mapping mappings[MAX_MAPPINGS + MAX_EVENT];
  size_t mapping_len;
  model_block blocks[MAX_MAPPINGS + MAX_EVENT]; /* owned ones */
  size_t block_len;
  ckf_filter filter;
  ckf_image log[9];
  uint64_t words[MAX_BUCKETS], published[MAX_BUCKETS];
  bool touched[MAX_BUCKETS];
  uint32_t order[MAX_BUCKETS]; /* touched buckets in order of first touch */
  size_t order_len;
  bool any_order; /* a clear came: the order of images is free */
  uint64_t pending, every;
  ckf_producer_stats stats;
  bool rebuilding;
} model;

static bool same_member(const ckf_member *x, const ckf_member *y) {
  return x->worker_id == y->worker_id && x->dp_rank == y->dp_rank;
}

static model_mapping *model_find(model *m, const ckf_member *member, uint64_t external) {
  for (size_t i = 0; i < m->mapping_len; i++)
    if (m->mappings[i].external == external && same_member(&m->mappings[i].member, member))
      return &m->mappings[i];
  return NULL;
}

static uint32_t model_owners(const model *m, uint64_t canonical) {
  uint32_t owners = 0;
  for (size_t i = 0; i < m->mapping_len; i++)
    owners += m->mappings[i].canonical == canonical;
  return owners;
}

static model_block *model_block_of(model *m, uint64_t canonical) {
  for (size_t i = 0; i < m->block_len; i++)
    if (m->blocks[i].canonical == canonical)
      return &m->blocks[i];
  return NULL;
}

static size_t model_members(const model *m) {
  size_t members = 0;
  for (size_t i = 0; i < m->mapping_len; i++) {
    size_t first = 0;
    while (!same_member(&m->mappings[first].member, &m->mappings[i].member))
      first++;
    members += first == i;
  }
  return members;
}

static void model_touch(model *m) {
  size_t n;
  const ckf_image *log = ckf_filter_log(&m->filter, &n);
  m->stats.physical_touches += n;
  for (size_t i = 0; i < n && !m->rebuilding; i++)
    if (!m->touched[log[i].bucket]) {
      m->touched[log[i].bucket] = true;
      m->order[m->order_len++] = log[i].bucket;
    }
}

static bool model_admit(model *m, model_block *block, bool relocate) {
  const int rc = relocate ? ckf_filter_insert(&m->filter, block->canonical)
                          : ckf_filter_insert_home(&m->filter, block->canonical);
  block->resident = rc == CKF_OK;
  if (rc == CKF_OK)
    model_touch(m);
  return rc == CKF_OK;
}

static void list_add(uint64_t *list, size_t *len, uint64_t value) {
  for (size_t i = 0; i < *len; i++)
    if (list[i] == value)
      return;
  list[(*len)++] = value;
}

/* The limits are met one mapping at a time: an event may also fail later for another reason. */
static bool model_fits(model *m, size_t members_before, const uint64_t *candidates, size_t len) {
  size_t unique = m->block_len;
  for (size_t c = 0; c < len; c++)
    unique += !model_block_of(m, candidates[c]);
  return m->mapping_len <= MAX_MAPPINGS && unique <= MAX_BLOCKS &&
         (model_members(m) <= MAX_MEMBERS || model_members(m) <= members_before);
}

static int model_store(model *m, const ckf_member *member, bool has_parent, uint64_t parent,
                       bool has_start, uint64_t start, const ckf_block *blocks, size_t n) {
  uint64_t candidates[MAX_EVENT], repeats[MAX_EVENT], canonical = 0;
  size_t candidate_len = 0, repeat_len = 0;
  const size_t before = m->mapping_len, members = model_members(m);
  uint32_t failed = 0;
  if (n == 0)
    return CKF_OK;
  if (has_parent) {
    const model_mapping *mapping = model_find(m, member, parent);
    if (!mapping) {
      m->stats.parent_not_found += !m->rebuilding;
      return CKF_ERR_PARENT_NOT_FOUND;
    }
    canonical = mapping->canonical;
  } else if (has_start && start != 0) {
    return CKF_ERR_INVALID_BLOCK_SEQUENCE;
  }
  bool fits = true;
  for (size_t i = 0; i < n; i++) {
    canonical = i == 0 && !has_parent ? blocks[0].local : ckf_child(canonical, blocks[i].local);
    const model_mapping *mapping = model_find(m, member, blocks[i].external);
    if (mapping && mapping->canonical != canonical) {
      m->mapping_len = before;
      return CKF_ERR_INVALID_BLOCK_SEQUENCE;
    }
    if (mapping) {
      list_add(repeats, &repeat_len, canonical);
      continue;
    }
    if (!fits)
      continue;
    list_add(candidates, &candidate_len, canonical);
    m->mappings[m->mapping_len++] = (model_mapping){*member, blocks[i].external, canonical, 0};
    m->mapping_len -= !(fits = model_fits(m, members, candidates, candidate_len));
  }
  if (!fits) {
    m->mapping_len = before;
    m->stats.nospace_blocks += n;
    return CKF_ERR_NOSPACE;
  }
  for (size_t i = 0; i < candidate_len; i++) {
    model_block *block = model_block_of(m, candidates[i]);
    if (!block) {
      block = &m->blocks[m->block_len++];
      *block = (model_block){candidates[i], false};
    }
    if (!block->resident)
      failed += !model_admit(m, block, true);
  }
  for (size_t i = 0; i < repeat_len && !m->rebuilding; i++) {
    bool candidate = false;
    for (size_t c = 0; c < candidate_len; c++)
      candidate |= candidates[c] == repeats[i];
    if (!candidate && !model_block_of(m, repeats[i])->resident)
      model_admit(m, model_block_of(m, repeats[i]), false);
  }
  m->stats.capacity_failures += failed;
  return failed && !m->rebuilding ? CKF_ERR_CAPACITY_EXHAUSTED : CKF_OK;
}

static void model_unmap(model *m, model_mapping *mapping) {
  const uint64_t canonical = mapping->canonical;
  *mapping = m->mappings[--m->mapping_len];
  if (model_owners(m, canonical) == 0) {
    model_block *block = model_block_of(m, canonical);
    if (block->resident) {
      cr_assert_eq(ckf_filter_remove(&m->filter, canonical), CKF_OK);
      model_touch(m);
    }
    *block = m->blocks[--m->block_len];
  }
}

static void model_clear(model *m, const ckf_member *member, bool whole_worker) {
  m->any_order = true;
  for (size_t i = m->mapping_len; i-- > 0;)
    if (m->mappings[i].member.worker_id == member->worker_id &&
        (whole_worker || m->mappings[i].member.dp_rank == member->dp_rank))
      model_unmap(m, &m->mappings[i]);
}

/* ---- both side by side ---- */

/* What a listener knows: the owned canonicals. */
static uint64_t heard[MAX_MAPPINGS];
static size_t heard_len;

static void listen(void *user, uint64_t canonical, bool created) {
  size_t i = 0;
  cr_assert_eq(user, heard);
  while (i < heard_len && heard[i] != canonical)
    i++;
  cr_assert_eq(created, i == heard_len, "announced twice");
  if (created)
    heard[heard_len++] = canonical;
  else
    heard[i] = heard[--heard_len];
}

static model m, next_m;
static ckf_producer p, next_p;
static uint8_t memory[2][400000];
static int memory_used; /* which block p lives in */

static void expect_equal(ckf_producer *real, model *want) {
  const size_t buckets = (size_t)ckf_producer_format(real)->bucket_count;
  ckf_producer_stats st;
  cr_assert_eq(ckf_producer_check_(real), CKF_OK);
  ckf_producer_stats_get(real, &st);
  cr_assert_arr_eq(ckf_producer_words(real), want->words, buckets * 8);
  cr_assert_eq(st.generator, ckf_filter_rng(&want->filter));
  cr_assert_eq(st.members, model_members(want));
  cr_assert_eq(st.contributions, want->mapping_len);
  cr_assert_eq(st.unique_blocks, want->block_len);
  cr_assert_eq(st.pending_events, want->pending);
  cr_assert_eq(st.unknown_removals, want->stats.unknown_removals);
  cr_assert_eq(st.parent_not_found, want->stats.parent_not_found);
  cr_assert_eq(st.capacity_failures, want->stats.capacity_failures);
  cr_assert_eq(st.nospace_blocks, want->stats.nospace_blocks);
  cr_assert_eq(st.physical_touches, want->stats.physical_touches);
  cr_assert_eq(st.distinct_touched, want->stats.distinct_touched);
  cr_assert_eq(st.emitted, want->stats.emitted);
  cr_assert_eq(st.net_reverted, want->stats.net_reverted);
  for (size_t i = 0; i < want->block_len; i++) {
    uint32_t owners;
    bool resident;
    cr_assert_eq(ckf_producer_owners(real, want->blocks[i].canonical, &owners, &resident), 1);
    cr_assert_eq(owners, model_owners(want, want->blocks[i].canonical));
    cr_assert_eq(resident, want->blocks[i].resident);
  }
  for (size_t i = 0; i < want->mapping_len; i++) {
    const model_mapping *mapping = &want->mappings[i];
    uint64_t canonical;
    uint32_t *tag;
    cr_assert_eq(ckf_producer_find(real, &mapping->member, mapping->external, &canonical, &tag), 1);
    cr_assert_eq(canonical, mapping->canonical);
    cr_assert_eq(*tag, mapping->tag, "a tag moved to another mapping");
  }
}

/* Members ascending, and walking each one yields its mappings and nothing else. */
static void expect_members(void) {
  size_t count, walked = 0;
  cr_assert_eq(heard_len, m.block_len);
  for (size_t i = 0; i < heard_len; i++)
    cr_assert_not_null(model_block_of(&m, heard[i]));
  const ckf_member *list = ckf_producer_members(&p, &count);
  cr_assert_eq(count, model_members(&m));
  for (size_t i = 0; i < count; i++) {
    uint32_t cursor = 0, blocks = 0;
    ckf_mapping mapping;
    cr_assert(
        i == 0 || list[i - 1].worker_id < list[i].worker_id ||
        (list[i - 1].worker_id == list[i].worker_id && list[i - 1].dp_rank < list[i].dp_rank));
    while (ckf_producer_mapping_next(&p, &list[i], &cursor, &mapping)) {
      const model_mapping *want = model_find(&m, &list[i], mapping.external);
      cr_assert_not_null(want);
      cr_assert_eq(mapping.canonical, want->canonical);
      cr_assert_eq(mapping.tag, want->tag);
      blocks++;
    }
    cr_assert_eq(blocks, ckf_producer_member_blocks(&p, &list[i]));
    walked += blocks;
  }
  cr_assert_eq(walked, m.mapping_len);
}

static void drain_both(void) {
  ckf_batch batch;
  size_t changed = 0;
  const int rc = ckf_producer_drain(&p, &batch);
  for (size_t i = 0; i < m.order_len; i++) {
    const uint32_t bucket = m.order[i];
    if (m.words[bucket] != m.published[bucket]) {
      cr_assert_lt(changed, batch.image_count);
      cr_assert(m.any_order || ckf_batch_image(&batch, changed).bucket == bucket);
      changed++;
    }
  }
  cr_assert_eq(rc, changed > 0);
  cr_assert_eq(batch.image_count, changed);
  for (size_t i = 0; i < changed; i++) {
    const ckf_image image = ckf_batch_image(&batch, i);
    cr_assert(m.touched[image.bucket]);
    cr_assert_eq(image.word, m.words[image.bucket]);
    cr_assert_neq(image.word, m.published[image.bucket]);
    m.published[image.bucket] = image.word;
  }
  cr_assert_arr_eq(m.published, m.words, sizeof m.words);
  m.stats.distinct_touched += m.order_len;
  m.stats.emitted += changed;
  m.stats.net_reverted += m.order_len - changed;
  memset(m.touched, 0, sizeof m.touched);
  m.order_len = 0;
  m.any_order = false;
  m.pending = 0;
}

static ckf_producer_config small_config(uint64_t expected, bool delta_table) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected;
  cfg.filter.max_kicks = 8;
  cfg.filter.publish_every_n_events = 3;
  cfg.max_mappings = MAX_MAPPINGS;
  cfg.max_blocks = MAX_BLOCKS;
  cfg.max_members = MAX_MEMBERS;
  cfg.delta_table = delta_table;
  cfg.tags = true;
  return cfg;
}

static void model_init(model *x, const ckf_producer *like) {
  memset(x, 0, sizeof *x);
  x->every = like->cfg_.filter.publish_every_n_events;
  cr_assert_eq(ckf_filter_init(&x->filter, ckf_producer_format(like), 8, x->words, x->log, NULL),
               CKF_OK);
}

static void open_both(uint64_t expected) {
  const ckf_producer_config cfg = small_config(expected, false);
  cr_assert_leq(ckf_producer_mem_size(&cfg), sizeof memory[0]);
  memory_used = 0;
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], sizeof memory[0]), CKF_OK);
  heard_len = 0;
  ckf_producer_listen(&p, listen, heard);
  cr_assert_leq(ckf_producer_format(&p)->bucket_count, MAX_BUCKETS);
  model_init(&m, &p);
}

static ckf_member random_member(uint64_t workers) {
  return (ckf_member){draw(workers), (uint32_t)draw(3)};
}

/* External of a chain position: unique per alias, so repeats, aliases and conflicts all occur. */
static uint64_t external_of(uint64_t root, uint64_t depth, uint64_t alias) {
  return root * 1000 + depth * 10 + alias;
}

static void random_store(ckf_producer *real, model *want, const ckf_member *member) {
  ckf_block blocks[MAX_EVENT];
  ckf_outcome out;
  const uint64_t root = 1 + draw(14), first = draw(3) ? 0 : 1 + draw(6);
  const uint64_t alias = draw(8) ? 0 : 1;
  const size_t n = draw(12) ? (size_t)draw(8) : (size_t)draw(MAX_EVENT);
  const bool has_parent = first > 0, has_start = draw(4) == 0;
  const uint64_t parent = external_of(root, first - 1, 0), start = has_start ? draw(2) : 0;
  const uint64_t before = ckf_producer_pending(real);
  for (size_t i = 0; i < n; i++) {
    blocks[i].local = first + i == 0 ? root : root * 100 + first + i;
    blocks[i].external = external_of(root, first + i, alias);
    if (draw(60) == 0 && i > 0) /* twice in one event: a repeat, a conflict or an alias */
      blocks[i].external = blocks[draw(i)].external;
    if (draw(60) == 0)
      blocks[i].local++;
  }
  want->pending += !want->rebuilding;
  const int rc = model_store(want, member, has_parent, parent, has_start, start, blocks, n);
  const size_t mapped = want->mapping_len;
  cr_assert_eq(ckf_producer_stored(real, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, has_parent,
                                   parent, has_start, start, blocks, n, &out),
               rc);
  cr_assert_eq(out.error, rc);
  cr_assert_eq(out.ignored, false);
  cr_assert_eq(out.boundary, !want->rebuilding && before + 1 >= want->every);
  cr_assert_leq(out.mapped, mapped);
}

static void random_remove(void) {
  const ckf_member member = random_member(5);
  uint64_t externals[MAX_EVENT];
  ckf_outcome out;
  uint32_t unknown = 0;
  const size_t n = (size_t)draw(MAX_EVENT);
  const uint64_t root = 1 + draw(14);
  for (size_t i = 0; i < n; i++)
    externals[i] = external_of(root, draw(3) ? i : draw(12), draw(10) == 0);
  m.pending++;
  for (size_t i = 0; i < n; i++) {
    model_mapping *mapping = model_find(&m, &member, externals[i]);
    if (mapping)
      model_unmap(&m, mapping);
    else
      unknown++;
  }
  m.stats.unknown_removals += unknown;
  cr_assert_eq(
      ckf_producer_removed(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_WORKER, externals, n, &out),
      CKF_OK);
  cr_assert_eq(out.unknown, unknown);
  cr_assert_eq(out.unmapped, n - unknown);
}

static void random_tags(void) {
  for (int i = 0; i < 3 && m.mapping_len > 0; i++) {
    model_mapping *mapping = &m.mappings[draw(m.mapping_len)];
    uint32_t *tag;
    cr_assert_eq(ckf_producer_find(&p, &mapping->member, mapping->external, NULL, &tag), 1);
    *tag = mapping->tag = (uint32_t)draw(UINT32_MAX);
  }
}

/* Retained members of the model in the order in which the producer walks them, which is free. */
static void model_retain(const ckf_member *named, size_t named_len) {
  size_t count;
  const ckf_member *list = ckf_producer_members(&p, &count);
  for (size_t i = 0; i < count; i++) {
    bool skip = false;
    uint32_t cursor = 0;
    ckf_mapping mapping;
    uint64_t tried[MAX_MAPPINGS];
    size_t tried_len = 0;
    for (size_t j = 0; j < named_len; j++)
      skip |= same_member(&named[j], &list[i]);
    if (skip)
      continue;
    while (ckf_producer_mapping_next(&p, &list[i], &cursor, &mapping)) {
      next_m.mappings[next_m.mapping_len++] =
          (model_mapping){list[i], mapping.external, mapping.canonical, mapping.tag};
      if (!model_block_of(&next_m, mapping.canonical))
        next_m.blocks[next_m.block_len++] = (model_block){mapping.canonical, false};
      list_add(tried, &tried_len, mapping.canonical);
    }
    for (size_t t = 0; t < tried_len; t++) {
      model_block *block = model_block_of(&next_m, tried[t]);
      if (!block->resident)
        next_m.stats.capacity_failures += !model_admit(&next_m, block, true);
    }
  }
}

static void random_rebuild(void) {
  const ckf_member named[2] = {{draw(5), 0}, {5, 1}};
  uint8_t *const mem = memory[!memory_used];
  const bool give_up = draw(3) == 0;
  cr_assert_eq(ckf_rebuild_begin(&next_p, &p, named, 2, mem, sizeof memory[0]), CKF_OK);
  model_init(&next_m, &p);
  next_m.rebuilding = true;
  model_retain(named, 2);
  for (int i = 0; i < 6; i++)
    random_store(&next_p, &next_m, &named[i / 3]);
  expect_equal(&next_p, &next_m);
  if (give_up)
    return;
  cr_assert_eq(ckf_rebuild_commit(&p, &next_p), CKF_OK);
  memory_used = !memory_used;
  uint32_t order[MAX_BUCKETS];
  size_t order_len = 0;
  for (size_t i = 0; i < m.order_len; i++)
    if (next_m.words[m.order[i]] != m.published[m.order[i]])
      order[order_len++] = m.order[i];
  for (uint32_t bucket = 0; bucket < MAX_BUCKETS; bucket++)
    if (!m.touched[bucket] && next_m.words[bucket] != m.words[bucket])
      order[order_len++] = bucket;
  ckf_producer_stats stats = m.stats;
  stats.capacity_failures += next_m.stats.capacity_failures;
  stats.nospace_blocks += next_m.stats.nospace_blocks;
  stats.physical_touches += next_m.stats.physical_touches;
  memcpy(next_m.published, m.published, sizeof m.published);
  const uint64_t *const words = m.words;
  const bool any_order = m.any_order;
  m = next_m;
  m.rebuilding = false;
  m.any_order = any_order;
  m.stats = stats;
  m.pending = 1;
  m.order_len = order_len;
  memcpy(m.order, order, sizeof order);
  for (size_t i = 0; i < order_len; i++)
    m.touched[order[i]] = true;
  /* The model's filter moved with it. */
  const uint64_t rng = ckf_filter_rng(&next_m.filter);
  cr_assert_eq(ckf_filter_init(&m.filter, ckf_producer_format(&p), 8, (uint64_t *)(uintptr_t)words,
                               m.log, NULL),
               CKF_OK);
  ckf_filter_set_rng(&m.filter, rng);
  expect_equal(&p, &m);
  drain_both();
}

/* Moving changes nothing that the model knows. */
static void move(void) {
  ckf_producer_config cfg = p.cfg_;
  cfg.hash_seed++;
  cfg.max_mappings = MAX_MAPPINGS - 200 * (uint32_t)draw(2);
  const int rc = ckf_producer_move(&p, &cfg, memory[!memory_used], sizeof memory[0]);
  if (rc != CKF_OK) {
    cr_assert_eq(rc, CKF_ERR_NOSPACE);
    cr_assert_gt(m.mapping_len, MAX_MAPPINGS - 200);
    return;
  }
  memory_used = !memory_used;
  if (cfg.max_mappings < MAX_MAPPINGS) {
    cfg.max_mappings = MAX_MAPPINGS;
    cr_assert_eq(ckf_producer_move(&p, &cfg, memory[!memory_used], sizeof memory[0]), CKF_OK);
    memory_used = !memory_used;
  }
  expect_equal(&p, &m);
}

static void run_steps(uint64_t seed, uint64_t expected, int steps) {
  random_state = seed;
  open_both(expected);
  for (int step = 0; step < steps; step++) {
    const ckf_member member = random_member(6);
    const uint64_t kind = draw(100);
    ckf_outcome out;
    if (kind < 60) {
      random_store(&p, &m, &member);
    } else if (kind < 84) {
      random_remove();
    } else if (kind < 86) {
      m.pending++;
      model_clear(&m, &member, false);
      cr_assert_eq(ckf_producer_cleared(&p, &member, CKF_DOMAIN_MISSING, &out), CKF_OK);
    } else if (kind < 87) {
      model_clear(&m, &member, false);
      cr_assert_eq(ckf_producer_remove_rank(&p, &member), CKF_OK);
    } else if (kind < 88) {
      model_clear(&m, &member, true);
      cr_assert_eq(ckf_producer_remove_worker(&p, member.worker_id), CKF_OK);
    } else if (kind < 90) {
      random_rebuild();
    } else if (kind < 95) {
      random_tags();
    } else {
      drain_both();
    }
    expect_equal(&p, &m);
    if (step % 16 == 0)
      expect_members();
    if (step % 100 == 99)
      move();
  }
}

Test(ckf_producer, equals_the_model_with_room) {
  run_steps(11, 200, 1500);
  cr_assert_gt(m.stats.nospace_blocks, 10);
  cr_assert_gt(m.stats.parent_not_found, 10);
  cr_assert_gt(m.stats.net_reverted, 0);
}

Test(ckf_producer, equals_the_model_when_full) { run_steps(12, 20, 1500); }

Test(ckf_producer, equals_the_model_when_tiny) {
  run_steps(13, 1, 700);
  cr_assert_gt(m.stats.capacity_failures, 100);
}

/* ---- single topics ---- */

static int store(ckf_producer *to, const ckf_member *member, const ckf_block *blocks, size_t n,
                 ckf_outcome *out) {
  return ckf_producer_stored(to, member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0,
                             blocks, n, out);
}

Test(ckf_producer, memory_limits_are_exact_and_change_nothing) {
  ckf_producer_config cfg = small_config(100, false);
  const ckf_member member = {1, 0}, other = {2, 0};
  static ckf_block blocks[50];
  static uint64_t words[64];
  ckf_outcome out;
  ckf_batch batch;
  cfg.max_mappings = 40;
  cfg.max_blocks = 40;
  cfg.max_members = 1;
  const size_t len = ckf_producer_mem_size(&cfg);
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], len - 1), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_producer_init(&p, &cfg, NULL, len), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], len), CKF_OK);
  for (size_t i = 0; i < 50; i++)
    blocks[i] = (ckf_block){1000 + i, 5 + i};
  cr_assert_eq(store(&p, &member, blocks, 39, &out), CKF_OK);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
  memcpy(words, ckf_producer_words(&p), ckf_producer_format(&p)->bucket_count * 8);
  cr_assert_eq(store(&p, &member, blocks, 41, &out), CKF_ERR_NOSPACE);
  cr_assert_eq(out.mapped, 0);
  cr_assert_eq(ckf_producer_pending(&p), 1, "a refused event counts for the cadence");
  cr_assert_eq(store(&p, &other, blocks, 1, &out), CKF_ERR_NOSPACE, "no slot for a member");
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  cr_assert_arr_eq(words, ckf_producer_words(&p), ckf_producer_format(&p)->bucket_count * 8);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 0);
  cr_assert_eq(store(&p, &member, blocks, 40, &out), CKF_OK, "the last place can be used");
  cr_assert_eq(out.mapped, 1);
  cr_assert_eq(out.repeated, 39);
  /* a wrong event is the source's fault, whatever the room */
  blocks[45].external = blocks[2].external;
  cr_assert_eq(store(&p, &member, blocks, 50, &out), CKF_ERR_INVALID_BLOCK_SEQUENCE);
  ckf_producer_stats st;
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.nospace_blocks, 41 + 1);
  cr_assert_eq(st.max_mappings, 40);
  cr_assert_eq(st.max_blocks, 40);
}

/* The filter says how much it takes; limits that nobody has set do not bite before. */
Test(ckf_producer, a_small_filter_has_room_for_many_owners) {
  ckf_producer_config cfg = ckf_producer_config_default();
  const ckf_member member = {1, 0};
  static ckf_block blocks[32];
  ckf_producer_stats st;
  ckf_outcome out;
  cfg.filter.max_kicks = 1;
  const size_t len = ckf_producer_mem_size(&cfg);
  void *const mem = malloc(len);
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, len), CKF_OK);
  for (size_t i = 0; i < 32; i++)
    blocks[i] = (ckf_block){1000 + i, 5 + i};
  cr_assert_eq(store(&p, &member, blocks, 32, &out), CKF_ERR_CAPACITY_EXHAUSTED);
  cr_assert_eq(out.mapped, 32);
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.occupied_slots + out.omitted, 32);
  cr_assert_eq(st.capacity_failures, out.omitted);
  cr_assert_eq(st.mem_bytes, len);
  cr_assert_eq(st.exact_bytes + st.filter_bytes, len);
  cr_assert_eq(st.words_bytes, 64, "two words, whole cache lines");
  cr_assert_eq(st.dirty_bytes, 128);
  cr_assert_lt(st.words_bytes + st.dirty_bytes, st.filter_bytes);
  free(mem);
}

Test(ckf_producer, any_alignment_of_memory_works) {
  const ckf_producer_config cfg = small_config(20, true);
  const size_t len = ckf_producer_mem_size(&cfg);
  uint8_t *const mem = malloc(len + 64);
  for (size_t shift = 0; shift < 64; shift += 9) {
    const ckf_member member = {1, 0};
    const ckf_block block = {1, 2};
    ckf_outcome out;
    memset(mem, 0xA5, len + 64);
    cr_assert_eq(ckf_producer_init(&p, &cfg, mem + shift, len), CKF_OK);
    cr_assert_eq(store(&p, &member, &block, 1, &out), CKF_OK);
    cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
    for (size_t i = len + shift; i < len + 64; i++)
      cr_assert_eq(mem[i], 0xA5, "written behind the block");
  }
  free(mem);
}

Test(ckf_producer, refuses_impossible_configurations) {
  ckf_producer_config cfg = small_config(20, false);
  cr_assert_eq(ckf_producer_init_abi(&p, sizeof p + 8, &cfg, memory[0], sizeof memory[0]),
               CKF_ERR_ABI);
  cfg.filter.expected_blocks = 53687091;
  cr_assert_gt(ckf_producer_mem_size(&cfg), 0);
  cfg.filter.expected_blocks = 53687092;
  cr_assert_eq(ckf_producer_mem_size(&cfg), 0, "CBI1 ends at 2^24 buckets");
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], sizeof memory[0]), CKF_ERR_CAPACITY_OVERFLOW);
  cfg.filter.expected_blocks = 0;
  cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], sizeof memory[0]), CKF_ERR_EXPECTED_ZERO);
  cfg = small_config(20, false);
  cfg.max_mappings = UINT32_MAX;
  cr_assert_eq(ckf_producer_mem_size(&cfg), 0);
  cfg.max_mappings = cfg.max_blocks = UINT32_C(1) << 29;
  cfg.max_members = 1024;
  if (SIZE_MAX > UINT32_MAX)
    cr_assert_gt(ckf_producer_mem_size(&cfg), 0);
  for (cfg.max_members = 1u << 16; cfg.max_members <= 1u << 20; cfg.max_members *= 2) {
    cr_assert_eq(ckf_producer_mem_size(&cfg), 0, "more places than have numbers");
    cr_assert_eq(ckf_producer_init(&p, &cfg, memory[0], sizeof memory[0]),
                 CKF_ERR_CAPACITY_OVERFLOW);
  }
}

Test(ckf_producer, tags_live_as_long_as_their_mapping) {
  const ckf_member member = {4, 2};
  ckf_block blocks[40];
  uint64_t externals[40];
  uint32_t *tag;
  ckf_outcome out;
  open_both(100);
  for (size_t i = 0; i < 40; i++) {
    blocks[i] = (ckf_block){500 + i, 9 + i};
    externals[i] = 500 + i;
  }
  cr_assert_eq(store(&p, &member, blocks, 40, &out), CKF_OK);
  for (uint32_t i = 0; i < 40; i++) {
    cr_assert_eq(ckf_producer_find(&p, &member, externals[i], NULL, &tag), 1);
    cr_assert_eq(*tag, 0);
    *tag = i + 1;
  }
  cr_assert_eq(store(&p, &member, blocks, 40, &out), CKF_OK, "a repeat keeps the tags");
  cr_assert_eq(
      ckf_producer_removed(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals, 20, &out),
      CKF_OK);
  for (uint32_t i = 20; i < 40; i++) {
    cr_assert_eq(ckf_producer_find(&p, &member, externals[i], NULL, &tag), 1);
    cr_assert_eq(*tag, i + 1, "records that filled holes took their tags along");
  }
  cr_assert_eq(store(&p, &member, blocks, 40, &out), CKF_OK);
  for (uint32_t i = 0; i < 20; i++) {
    cr_assert_eq(ckf_producer_find(&p, &member, externals[i], NULL, &tag), 1);
    cr_assert_eq(*tag, 0, "a new mapping starts anew");
  }
  const ckf_member named = {9, 9};
  cr_assert_eq(ckf_rebuild_begin(&next_p, &p, &named, 1, memory[1], sizeof memory[1]), CKF_OK);
  cr_assert_eq(ckf_rebuild_commit(&p, &next_p), CKF_OK);
  for (uint32_t i = 20; i < 40; i++) {
    cr_assert_eq(ckf_producer_find(&p, &member, externals[i], NULL, &tag), 1);
    cr_assert_eq(*tag, i + 1, "a retained member keeps its tags");
  }
}

Test(ckf_producer, rebuild_guards_its_order) {
  const ckf_member one = {1, 0}, two = {2, 0}, three = {3, 0}, four = {4, 0}, five = {5, 0};
  const ckf_block block = {7, 8};
  ckf_outcome out;
  ckf_batch batch;
  open_both(20);
  cr_assert_eq(store(&p, &one, &block, 1, &out), CKF_OK);
  cr_assert_eq(ckf_rebuild_commit(&p, &p), CKF_ERR_ARG);
  cr_assert_eq(ckf_rebuild_begin(&next_p, &p, &two, 1, memory[1], 100), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_rebuild_begin(&next_p, &p, &two, 1, memory[1], sizeof memory[1]), CKF_OK);
  cr_assert_eq(store(&next_p, &one, &block, 1, &out), CKF_ERR_INVARIANT, "a retained member");
  cr_assert_eq(store(&next_p, &three, &block, 1, &out), CKF_OK);
  cr_assert_eq(store(&next_p, &three, &block, 1, &out), CKF_OK, "its next event");
  cr_assert_eq(store(&next_p, &two, &block, 1, &out), CKF_ERR_ARG, "not ascending");
  cr_assert_eq(store(&next_p, &four, &block, 0, &out), CKF_OK, "pushed, though with nothing");
  cr_assert_eq(store(&next_p, &three, &block, 1, &out), CKF_ERR_INVARIANT, "has blocks already");
  cr_assert_eq(ckf_producer_stored(&next_p, &five, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, true, 99,
                                   false, 0, &block, 1, &out),
               CKF_ERR_PARENT_NOT_FOUND, "pushed, though refused");
  cr_assert_eq(store(&next_p, &four, &block, 1, &out), CKF_ERR_ARG, "has none, but comes too late");
  cr_assert_eq(store(&next_p, &five, &block, 1, &out), CKF_OK);
  cr_assert_eq(ckf_producer_drain(&next_p, &batch), CKF_ERR_ARG);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1, "draining does not disturb a rebuild");
  cr_assert_eq(ckf_producer_remove_rank(&p, &one), CKF_OK);
  cr_assert_eq(ckf_rebuild_commit(&p, &next_p), CKF_ERR_ARG, "the rebuild missed a removal");
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
}

/* Named in any order, more than once, or without being there; `p` has slots that are free again. */
Test(ckf_producer, rebuild_retains_whoever_is_not_named) {
  enum { STRANGERS = 300 };
  ckf_member named[MAX_MEMBERS + STRANGERS];
  ckf_outcome out;
  size_t count, n = 0;
  open_both(100);
  for (uint32_t i = 0; i < MAX_MEMBERS; i++) {
    const ckf_member member = {MAX_MEMBERS - i, i % 3};
    const ckf_block block = {i, i};
    cr_assert_eq(store(&p, &member, &block, 1, &out), CKF_OK);
    if (i % 4 == 1) {
      cr_assert_eq(ckf_producer_remove_rank(&p, &member), CKF_OK);
    } else if (i % 4 == 2) {
      named[n++] = member;
    }
  }
  for (uint32_t i = 0; i < STRANGERS; i++) {
    named[n++] = (ckf_member){i % MAX_MEMBERS + 1, 3};
  }
  named[n] = named[0];
  cr_assert_eq(ckf_rebuild_begin(&next_p, &p, named, n + 1, memory[1], sizeof memory[1]), CKF_OK);
  const ckf_member *const kept = ckf_producer_members(&next_p, &count);
  cr_assert_eq(count, MAX_MEMBERS / 2);
  for (size_t i = 0; i < count; i++) {
    const uint32_t at = MAX_MEMBERS - (uint32_t)kept[i].worker_id;
    cr_assert(at % 4 == 0 || at % 4 == 3);
    cr_assert_eq(kept[i].dp_rank, at % 3);
    cr_assert(i == 0 || kept[i - 1].worker_id < kept[i].worker_id);
    cr_assert_eq(ckf_producer_find(&next_p, &kept[i], at, NULL, NULL), 1);
  }
  cr_assert_eq(ckf_producer_check_(&next_p), CKF_OK);
  cr_assert_eq(ckf_rebuild_commit(&p, &next_p), CKF_OK);
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
}

Test(ckf_producer, many_members_and_mappings_keep_the_tables_sound) {
  enum { MEMBERS = 700, EVENTS = 6000 };
  ckf_producer_config cfg = ckf_producer_config_default();
  ckf_block blocks[16];
  uint64_t externals[16];
  ckf_outcome out;
  cfg.filter.expected_blocks = 12000;
  cfg.max_mappings = 20000;
  cfg.max_blocks = 15000;
  cfg.max_members = MEMBERS;
  const size_t len = ckf_producer_mem_size(&cfg);
  void *mem = malloc(len);
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, len), CKF_OK);
  random_state = 5;
  for (int event = 0; event < EVENTS; event++) {
    const ckf_member member = {draw(MEMBERS) / 4, (uint32_t)draw(4)};
    const uint64_t root = 1 + draw(2000);
    for (size_t i = 0; i < 16; i++) {
      blocks[i] = (ckf_block){root * 64 + i, root + i * 5000};
      externals[i] = root * 64 + i;
    }
    const uint64_t kind = draw(16);
    if (kind < 9) {
      const int rc = store(&p, &member, blocks, 1 + (size_t)draw(16), &out);
      cr_assert(rc == CKF_OK || rc == CKF_ERR_NOSPACE || rc == CKF_ERR_CAPACITY_EXHAUSTED);
    } else if (kind < 15) {
      cr_assert_eq(ckf_producer_removed(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals,
                                        16, &out),
                   CKF_OK);
    } else {
      cr_assert_eq(ckf_producer_cleared(&p, &member, CKF_DOMAIN_MISSING, &out), CKF_OK);
    }
    if (event % 100 == 0)
      cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  }
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  ckf_producer_stats st;
  ckf_producer_stats_get(&p, &st);
  cr_assert_gt(st.contributions, 15000);
  for (uint64_t worker = 0; worker < MEMBERS; worker++)
    cr_assert_eq(ckf_producer_remove_worker(&p, worker), CKF_OK);
  ckf_producer_stats_get(&p, &st);
  cr_assert_eq(st.members + st.contributions + st.unique_blocks + st.occupied_slots, 0);
  for (size_t i = 0; i < ckf_producer_format(&p)->bucket_count; i++)
    cr_assert_eq(ckf_producer_words(&p)[i], 0);
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  free(mem);
}

Test(ckf_producer, the_check_notices_damage) {
  const ckf_member member = {1, 0};
  ckf_block blocks[40];
  ckf_outcome out;
  ckf_batch batch;
  open_both(100);
  for (size_t i = 0; i < 40; i++)
    blocks[i] = (ckf_block){500 + i, 9 + i};
  cr_assert_eq(store(&p, &member, blocks, 40, &out), CKF_OK);
  const size_t buckets = (size_t)ckf_producer_format(&p)->bucket_count;
  uint64_t *const words = (uint64_t *)(uintptr_t)ckf_producer_words(&p);
  size_t used = 0;
  while (words[used] == 0)
    used++;
  const uint64_t word = words[used];
  words[used] = 0;
  cr_assert_eq(ckf_producer_check_(&p), CKF_ERR_INVARIANT);

  /* Now removals of the lost blocks must say so, and keep their mappings. */
  uint64_t externals[40];
  for (size_t i = 0; i < 40; i++)
    externals[i] = 500 + i;
  cr_assert_eq(
      ckf_producer_removed(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, externals, 40, &out),
      CKF_ERR_INVARIANT);
  cr_assert_gt(ckf_producer_member_blocks(&p, &member), 0);
  cr_assert_lt(ckf_producer_member_blocks(&p, &member), 40);
  words[used] = word;
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  cr_assert_eq(ckf_producer_remove_rank(&p, &member), CKF_OK);
  cr_assert_geq(ckf_producer_drain(&p, &batch), 0);
  for (size_t i = 0; i < buckets; i++)
    cr_assert_eq(words[i], 0);
}

Test(ckf_producer, bad_arguments_change_nothing) {
  const ckf_member member = {1, 0};
  ckf_outcome out;
  open_both(20);
  cr_assert_eq(store(&p, &member, NULL, 1, &out), CKF_ERR_ARG);
  cr_assert_eq(
      ckf_producer_removed(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, NULL, 1, &out),
      CKF_ERR_ARG);
  cr_assert_eq(ckf_producer_pending(&p), 0);
  cr_assert_eq(store(&p, &member, NULL, 0, &out), CKF_OK);
  cr_assert_eq(ckf_producer_pending(&p), 1, "an empty event counts");
  cr_assert_not(ckf_producer_find(&p, &member, 1, NULL, NULL));
}
