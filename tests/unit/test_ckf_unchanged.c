/* SPDX-License-Identifier: Apache-2.0 */

/* What is refused leaves no trace: objects and the memory behind them are compared byte by byte,
 * before and after each error that is not fatal. */

#include "ckf.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 64 };

static const ckf_format format = {0x5EED, BUCKETS};

/* ---- before and after ---- */

typedef struct shot {
  const void *at[4];
  size_t len[4], n;
  uint8_t *bytes[4];
} shot;

static void take(shot *s, const void *at, size_t len) {
  s->at[s->n] = at;
  s->len[s->n] = len;
  s->bytes[s->n] = malloc(len);
  memcpy(s->bytes[s->n++], at, len);
}

static bool same(const shot *s) {
  for (size_t i = 0; i < s->n; i++)
    if (memcmp(s->at[i], s->bytes[i], s->len[i]) != 0)
      return false;
  return true;
}

static void drop(shot *s) {
  while (s->n > 0)
    free(s->bytes[--s->n]);
}

/* ---- replica, assembly ---- */

static uint8_t frame[2048];

static ckf_cbi1_frame delta(uint64_t base, uint64_t sequence, const ckf_image *images, size_t n) {
  ckf_cbi1_frame view;
  const ptrdiff_t len =
      ckf_cbi1_delta_encode(&format, 1, base, sequence, images, n, frame, sizeof frame);
  cr_assert_eq(ckf_cbi1_decode(&format, frame, (size_t)len, &view), CKF_OK);
  return view;
}

static ckf_cbi1_frame chunk(const ckf_format *of, uint64_t sequence, uint32_t index) {
  uint64_t words[2 * BUCKETS];
  ckf_cbi1_frame view;
  for (size_t i = 0; i < 2 * BUCKETS; i++)
    words[i] = i * sequence;
  const ptrdiff_t len = ckf_cbi1_snapshot_encode(of, 1, sequence, words, (size_t)of->bucket_count,
                                                 BUCKETS / 2, index, frame, sizeof frame);
  cr_assert_eq(ckf_cbi1_decode(of, frame, (size_t)len, &view), CKF_OK);
  return view;
}

Test(ckf_unchanged, a_replica_that_refuses_a_frame) {
  static uint64_t memory[BUCKETS + 64];
  const ckf_format wider = {format.seed, 2 * BUCKETS};
  const ckf_image ok[2] = {{5, 50}, {6, 60}}, twice[40] = {{7, 1}, {8, 2}, [39] = {7, 3}};
  ckf_replica r;
  shot s = {0};
  memset(&r, 0x5A, sizeof r);
  memset(memory, 0x5A, sizeof memory);
  take(&s, &r, sizeof r);
  take(&s, memory, sizeof memory);
  cr_assert_eq(ckf_replica_init(&r, &format, memory, 8), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_replica_init(&r, &format, NULL, sizeof memory), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_replica_init_abi(&r, 1, &format, memory, sizeof memory), CKF_ERR_ABI);
  cr_assert(same(&s));
  drop(&s);
  cr_assert_eq(ckf_replica_init(&r, &format, memory, sizeof memory), CKF_OK);
  take(&s, &r, sizeof r);
  take(&s, memory, sizeof memory);
  ckf_cbi1_frame view = delta(9, 10, ok, 2);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_NOT_LIVE);
  view = chunk(&wider, 9, 0);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_FORMAT_MISMATCH);
  cr_assert(same(&s));
  drop(&s);
  view = chunk(&format, 9, 0);
  cr_assert_eq(ckf_replica_apply(&r, &view), 0);
  view = chunk(&format, 9, 1);
  cr_assert_eq(ckf_replica_apply(&r, &view), 1);
  take(&s, &r, sizeof r);
  take(&s, memory, sizeof memory);
  const struct {
    uint64_t base, sequence;
    const ckf_image *images;
    size_t n;
    int err;
  } bad[] = {{8, 9, ok, 2, CKF_ERR_SEQUENCE},     {9, 11, ok, 2, CKF_ERR_SEQUENCE},
             {10, 11, ok, 2, CKF_ERR_SEQUENCE},   {UINT64_MAX, 0, ok, 2, CKF_ERR_SEQUENCE},
             {9, 10, ok, 0, CKF_ERR_EMPTY_DELTA}, {9, 10, twice, 40, CKF_ERR_DUPLICATE_IMAGE}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    view = delta(bad[i].base, bad[i].sequence, bad[i].images, bad[i].n);
    cr_assert_eq(ckf_replica_apply(&r, &view), bad[i].err, "case %zu", i);
    cr_assert(same(&s), "case %zu", i);
  }
  view = chunk(&format, 9, 0);
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_SNAPSHOT_LIVE);
  view.format.bucket_count *= 2;
  cr_assert_eq(ckf_replica_apply(&r, &view), CKF_ERR_FORMAT_MISMATCH);
  cr_assert(same(&s));
  drop(&s);
}

Test(ckf_unchanged, an_assembly_that_is_given_what_is_no_chunk) {
  uint64_t words[BUCKETS], epoch = 77;
  const ckf_format odd = {1, 63};
  const ckf_image image = {1, 1};
  ckf_assembly as;
  shot s = {0};
  memset(&as, 0x5A, sizeof as);
  memset(words, 0x5A, sizeof words);
  take(&s, &as, sizeof as);
  take(&s, words, sizeof words);
  cr_assert_eq(ckf_assembly_init_abi(&as, 1, &format, words, BUCKETS), CKF_ERR_ABI);
  cr_assert_eq(ckf_assembly_init(&as, &odd, words, 63), CKF_ERR_FORMAT_BUCKET_COUNT);
  cr_assert_eq(ckf_assembly_init(&as, &format, NULL, BUCKETS), CKF_ERR_ARG);
  cr_assert_eq(ckf_assembly_init(&as, &format, words, BUCKETS - 1), CKF_ERR_ARG);
  cr_assert(same(&s));
  drop(&s);
  cr_assert_eq(ckf_assembly_init(&as, &format, words, BUCKETS), CKF_OK);
  ckf_cbi1_frame view = chunk(&format, 5, 0);
  cr_assert_eq(ckf_assembly_absorb(&as, &view, &epoch), 0);
  take(&s, &as, sizeof as);
  take(&s, words, sizeof words);
  take(&s, &epoch, sizeof epoch);
  view = delta(5, 6, &image, 1);
  cr_assert_eq(ckf_assembly_absorb(&as, &view, &epoch), CKF_ERR_CHUNK_SEQUENCE);
  cr_assert(same(&s));
  drop(&s);
  view = chunk(&format, 5, 1);
  cr_assert_eq(ckf_assembly_absorb(&as, &view, &epoch), 1);
  cr_assert_eq(epoch, 5);
}

/* ---- table, lane ---- */

static ckf_table table;
static uint64_t room[4 * (BUCKETS + 2) + 16];

static ckf_manifest a_manifest(void) {
  ckf_manifest m;
  memset(&m, 0, sizeof m);
  m.consumer_instance = 17;
  m.format = format;
  m.configured = 5;
  m.pools[2].dc_id = 3;
  return m;
}

static ckf_lane lane_two(ckf_identity *identity, ckf_lease *lease) {
  const ckf_manifest m = a_manifest();
  ckf_lane lane;
  memset(identity, 0, sizeof *identity);
  identity->pool = m.pools[2];
  identity->format = format;
  *lease = (ckf_lease){17, 2, 5};
  cr_assert_eq(ckf_table_init(&table, &m, 2, room, sizeof room), CKF_OK);
  cr_assert_eq(ckf_lane_claim(&lane, &table, 2), CKF_OK);
  return lane;
}

Test(ckf_unchanged, a_table_that_is_not_built_and_a_lane_that_is_not_claimed) {
  ckf_manifest m = a_manifest();
  ckf_identity identity;
  ckf_lease lease;
  ckf_lane other;
  shot s = {0};
  memset(&table, 0x5A, sizeof table);
  memset(room, 0x5A, sizeof room);
  take(&s, &table, sizeof table);
  take(&s, room, sizeof room);
  cr_assert_eq(ckf_table_init(&table, &m, 9, room, sizeof room), CKF_ERR_WINDOW);
  cr_assert_eq(ckf_table_init(&table, &m, 2, room, 100), CKF_ERR_NOSPACE);
  m.pools[2].dc_id = 0;
  cr_assert_eq(ckf_table_init(&table, &m, 2, room, sizeof room), CKF_ERR_DUPLICATE_POOL);
  m.configured = 0;
  cr_assert_eq(ckf_table_init(&table, &m, 2, room, sizeof room), CKF_ERR_NO_LANES);
  cr_assert(same(&s));
  drop(&s);
  const ckf_lane lane = lane_two(&identity, &lease);
  memset(&other, 0x5A, sizeof other);
  take(&s, &table, sizeof table);
  take(&s, room, sizeof room);
  take(&s, &other, sizeof other);
  cr_assert_eq(ckf_lane_claim(&other, &table, 2), CKF_ERR_LANE_CLAIMED);
  cr_assert_eq(ckf_lane_claim(&other, &table, 1), CKF_ERR_UNCONFIGURED_LANE);
  cr_assert_eq(ckf_lane_claim(&other, &table, 16), CKF_ERR_INVALID_LANE);
  cr_assert_eq(ckf_lane_claim_abi(&other, 1, &table, 0), CKF_ERR_ABI);
  cr_assert(same(&s));
  cr_assert_not(ckf_lane_ready(&lane));
  drop(&s);
}

Test(ckf_unchanged, a_lane_that_refuses_or_ignores) {
  const ckf_image ok = {1, 1};
  uint64_t words[BUCKETS];
  ckf_identity identity, wrong;
  ckf_lease lease, other;
  ckf_lane lane = lane_two(&identity, &lease);
  shot s = {0};
  memset(words, 0x11, sizeof words);
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
  take(&s, &table, sizeof table);
  take(&s, room, sizeof room);
  take(&s, &lane, sizeof lane);
  cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &lease, 8, 9, &ok, 1).result,
               CKF_LANE_AWAITING_SNAPSHOT);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 8, words, BUCKETS - 1).action,
               CKF_ACTION_RETRY_SNAPSHOT);
  cr_assert(same(&s));
  drop(&s);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 8, words, BUCKETS).result,
               CKF_LANE_SNAPSHOT_INSTALLED);
  take(&s, &table, sizeof table);
  take(&s, room, sizeof room);
  take(&s, &lane, sizeof lane);
  wrong = identity;
  wrong.format.seed++;
  other = (ckf_lease){18, 2, 6};
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &other), CKF_ERR_WRONG_CONSUMER);
  other = (ckf_lease){17, 3, 6};
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &other), CKF_ERR_WRONG_LANE);
  other = (ckf_lease){17, 2, 6};
  cr_assert_eq(ckf_lane_assign(&lane, &wrong, &other), CKF_ERR_WRONG_FORMAT);
  cr_assert_eq(ckf_lane_assignable(&lane, &wrong, &other), CKF_ERR_WRONG_FORMAT);
  wrong.pool.dc_id++;
  cr_assert_eq(ckf_lane_assign(&lane, &wrong, &other), CKF_ERR_WRONG_OWNER);
  cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_ERR_STALE_EPOCH);
  cr_assert_eq(ckf_lane_install(&lane, &identity, &other, 9, words, BUCKETS).result,
               CKF_LANE_IGNORED_FOREIGN_LEASE);
  cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &other, 8, 9, &ok, 1).result,
               CKF_LANE_IGNORED_FOREIGN_LEASE);
  cr_assert_eq(ckf_lane_drain(&lane, &other, 9).result, CKF_LANE_IGNORED_FOREIGN_LEASE);
  cr_assert_eq(ckf_lane_apply_delta(&lane, &identity, &lease, 7, 8, &ok, 1).result,
               CKF_LANE_IGNORED_STALE);
  cr_assert_eq(ckf_lane_drain(&lane, &lease, 8).result, CKF_LANE_DRAIN_ACKNOWLEDGED);
  cr_assert(same(&s));
  drop(&s);
}

/* A fault takes the readiness, and not a word more. */
Test(ckf_unchanged, words_under_a_lane_that_fails) {
  const ckf_image ok = {1, 1}, beyond = {BUCKETS, 1}, twice[2] = {{2, 1}, {2, 1}};
  const struct {
    uint64_t base, sequence;
    const ckf_image *images;
    size_t n;
    enum ckf_lane_fault fault;
  } bad[] = {{7, 9, &ok, 1, CKF_FAULT_BASE_MISMATCH},
             {8, 10, &ok, 1, CKF_FAULT_NON_CONTIGUOUS},
             {8, 9, &ok, 0, CKF_FAULT_EMPTY_DELTA},
             {8, 9, &beyond, 1, CKF_FAULT_IMAGE_INDEX},
             {8, 9, twice, 2, CKF_FAULT_DUPLICATE_IMAGE}};
  uint64_t words[BUCKETS];
  ckf_identity identity;
  ckf_lease lease;
  ckf_lane lane = lane_two(&identity, &lease);
  shot s = {0};
  memset(words, 0x11, sizeof words);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    lease.assignment_epoch++;
    cr_assert_eq(ckf_lane_assign(&lane, &identity, &lease), CKF_OK);
    cr_assert_eq(ckf_lane_install(&lane, &identity, &lease, 8, words, BUCKETS).result,
                 CKF_LANE_SNAPSHOT_INSTALLED);
    take(&s, room, sizeof room);
    const ckf_lane_outcome out = ckf_lane_apply_delta(&lane, &identity, &lease, bad[i].base,
                                                      bad[i].sequence, bad[i].images, bad[i].n);
    cr_assert_eq(out.fault, bad[i].fault, "case %zu", i);
    cr_assert_eq(out.result, CKF_LANE_DEACTIVATED);
    cr_assert_eq(ckf_table_ready(&table), 0);
    cr_assert(same(&s), "case %zu", i);
    drop(&s);
  }
}

Test(ckf_unchanged, a_query_to_which_nobody_answers) {
  const uint64_t locals[3] = {1, 2, 3};
  uint64_t keys[3] = {9, 9, 9};
  ckf_identity identity;
  ckf_lease lease;
  ckf_lane lane = lane_two(&identity, &lease);
  ckf_matches matches;
  ckf_query query;
  shot s = {0};
  ckf_lane_retire(&lane);
  ckf_query_init(&query, locals, 3, keys, 0);
  take(&s, &query, sizeof query);
  take(&s, keys, sizeof keys);
  memset(&matches, 0x5A, sizeof matches);
  cr_assert_eq(ckf_table_find(&table, &query, &matches), CKF_ERR_UNAVAILABLE);
  cr_assert_eq(matches.lanes, 0);
  cr_assert_eq(ckf_table_find_again(&table, &query, &matches), CKF_ERR_UNAVAILABLE);
  cr_assert(same(&s));
  drop(&s);
}

/* ---- filter ---- */

Test(ckf_unchanged, a_filter_without_a_place_or_without_the_key) {
  uint64_t words[2] = {0}, key = 1, rng;
  const ckf_format tiny = {1, 2};
  ckf_image log[9];
  size_t len;
  ckf_filter f;
  shot s = {0};
  cr_assert_eq(ckf_filter_init(&f, &tiny, 8, words, log, NULL), CKF_OK);
  while (ckf_filter_insert(&f, key) == CKF_OK)
    key++;
  cr_assert_eq(key, 9, "two full buckets");
  take(&s, words, sizeof words);
  for (uint64_t i = 0; i < 100; i++) {
    rng = ckf_filter_rng(&f);
    cr_assert_eq(ckf_filter_insert(&f, 1000 + i), CKF_ERR_CAPACITY_EXHAUSTED);
    for (int draws = 0; draws < 1 + 8; draws++)
      ckf_rng_draw(&rng);
    cr_assert_eq(ckf_filter_rng(&f), rng, "1 + max_kicks draws");
    (void)ckf_filter_log(&f, &len);
    cr_assert_eq(len, 0);
    cr_assert_eq(ckf_filter_insert_home(&f, 1000 + i), CKF_ERR_CAPACITY_EXHAUSTED);
    ckf_rng_draw(&rng);
    cr_assert_eq(ckf_filter_rng(&f), rng, "one draw");
    cr_assert(same(&s));
  }
  take(&s, &f, sizeof f);
  for (uint64_t i = 0; i < 100; i++)
    if (!ckf_filter_contains(&f, 1000 + i))
      cr_assert_eq(ckf_filter_remove(&f, 1000 + i), CKF_ERR_INVARIANT);
  cr_assert(same(&s));
  drop(&s);
}

/* ---- publisher ---- */

static size_t sent;
static bool refuses;

static bool sink(void *user, const ckf_delta_out *out) {
  (void)user;
  (void)out;
  sent++;
  return !refuses;
}

Test(ckf_unchanged, a_publisher_that_sends_nothing) {
  const ckf_lease lease = {17, 2, 1};
  uint8_t bytes[CKF_CBI1_IMAGE_BYTES] = {0};
  const ckf_batch batch = {bytes, 1};
  ckf_identity identity;
  ckf_lease holder = {1, 1, 1};
  uint64_t sequence = 77;
  ckf_publisher pub;
  shot s = {0};
  memset(&identity, 0, sizeof identity);
  memset(&pub, 0x5A, sizeof pub);
  take(&s, &pub, sizeof pub);
  cr_assert_eq(ckf_publisher_init_abi(&pub, 1, &identity, 0, sink, NULL), CKF_ERR_ABI);
  cr_assert_eq(ckf_publisher_init(&pub, &identity, 0, NULL, NULL), CKF_ERR_ARG);
  cr_assert(same(&s));
  drop(&s);
  cr_assert_eq(ckf_publisher_init(&pub, &identity, UINT64_MAX - 1, sink, NULL), CKF_OK);
  take(&s, &pub, sizeof pub);
  take(&s, &holder, sizeof holder);
  cr_assert_eq(ckf_publisher_publish(&pub, &batch), 0, "nobody holds a lease");
  cr_assert_eq(ckf_publisher_drain_marker(&pub, &holder, &sequence), 0);
  cr_assert(same(&s));
  drop(&s);
  cr_assert_eq(ckf_publisher_snapshot(&pub, &lease, NULL, &sequence), CKF_OK);
  cr_assert_eq(sequence, UINT64_MAX - 1);
  refuses = true;
  cr_assert_eq(ckf_publisher_publish(&pub, &batch), CKF_ERR_ENQUEUE);
  cr_assert_eq(ckf_publisher_fence(&pub), CKF_FENCE_DELIVERY_UNCERTAIN);
  cr_assert_eq(ckf_publisher_last_sequence(&pub), UINT64_MAX - 1);
  take(&s, &pub, sizeof pub);
  cr_assert_eq(ckf_publisher_publish(&pub, &batch), CKF_ERR_FENCED);
  cr_assert_eq(sent, 1, "the sink is not asked again");
  cr_assert(same(&s));
  drop(&s);
  refuses = false;
  cr_assert_eq(ckf_publisher_snapshot(&pub, &lease, NULL, &sequence), CKF_OK);
  cr_assert_eq(ckf_publisher_publish(&pub, &batch), 1);
  cr_assert_eq(ckf_publisher_publish(&pub, &batch), CKF_ERR_FENCED, "no number is left");
  cr_assert_eq(ckf_publisher_fence(&pub), CKF_FENCE_SEQUENCE_EXHAUSTED);
  cr_assert_eq(sent, 2);
  sequence = 77;
  take(&s, &pub, sizeof pub);
  take(&s, &sequence, sizeof sequence);
  cr_assert_eq(ckf_publisher_snapshot(&pub, &lease, NULL, &sequence), CKF_ERR_SEQUENCE_EXHAUSTED);
  cr_assert_eq(ckf_publisher_publish(&pub, &batch), CKF_ERR_FENCED);
  cr_assert(same(&s));
  drop(&s);
}

/* ---- producer ---- */

static const ckf_member member = {1, 0}, stranger = {2, 7};

static ckf_producer_config small_config(void) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = 40;
  cfg.max_blocks = 40;
  cfg.max_mappings = 48;
  cfg.max_members = 1;
  return cfg;
}

static int store(ckf_producer *producer, const ckf_member *m, bool has_parent, uint64_t parent,
                 const ckf_block *blocks, size_t n) {
  ckf_outcome out;
  return ckf_producer_stored(producer, m, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, has_parent, parent,
                             false, 0, blocks, n, &out);
}

/* A refused event counts, and does nothing else: the counters it may move are put back. */
static bool same_but_counters(const shot *s, const ckf_producer *producer) {
  ckf_producer now, *const then = (ckf_producer *)(void *)s->bytes[0];
  memcpy(&now, producer, sizeof now);
  now.pending_ = then->pending_;
  now.changes_ = then->changes_;
  now.parent_not_found_ = then->parent_not_found_;
  now.nospace_blocks_ = then->nospace_blocks_;
  now.unknown_removals_ = then->unknown_removals_;
  now.last_pushed_ = then->last_pushed_;
  now.pushed_ = then->pushed_;
  return memcmp(&now, then, sizeof now) == 0 && memcmp(s->at[1], s->bytes[1], s->len[1]) == 0;
}

/* All that can be seen of a producer, but for the counters of refusals. What an event that is taken
 * back leaves in a free place of a table cannot. */
typedef struct seen_mapping {
  uint64_t external, canonical, owners, resident;
} seen_mapping;

typedef struct outside {
  ckf_producer_stats stats;
  uint64_t words[BUCKETS];
  seen_mapping mappings[48]; /* by external */
  size_t len, members;
} outside;

static int by_external(const void *x, const void *y) {
  const seen_mapping *const a = x, *const b = y;
  return (a->external > b->external) - (a->external < b->external);
}

static outside seen(ckf_producer *producer) {
  ckf_mapping mapping;
  uint32_t cursor = 0, owners;
  bool resident;
  outside o;
  memset(&o, 0, sizeof o);
  ckf_producer_stats_get(producer, &o.stats);
  o.stats.pending_events = o.stats.parent_not_found = o.stats.nospace_blocks = 0;
  cr_assert_leq(ckf_producer_format(producer)->bucket_count, BUCKETS);
  memcpy(o.words, ckf_producer_words(producer),
         (size_t)ckf_producer_format(producer)->bucket_count * 8);
  (void)ckf_producer_members(producer, &o.members);
  while (ckf_producer_mapping_next(producer, &member, &cursor, &mapping)) {
    cr_assert_eq(ckf_producer_owners(producer, mapping.canonical, &owners, &resident), 1);
    cr_assert_lt(o.len, 48);
    o.mappings[o.len++] = (seen_mapping){mapping.external, mapping.canonical, owners, resident};
  }
  qsort(o.mappings, o.len, sizeof o.mappings[0], by_external);
  cr_assert_eq(ckf_producer_check_(producer), CKF_OK);
  return o;
}

static void as_before(ckf_producer *producer, const outside *before) {
  const outside now = seen(producer);
  ckf_batch batch;
  cr_assert_eq(memcmp(&now, before, sizeof now), 0);
  cr_assert_eq(ckf_producer_drain(producer, &batch), 0);
}

static ckf_producer p;
static ckf_block blocks[30], more[30];

/* A producer of one member with 30 blocks; returns its memory. */
static void *open_producer(size_t *len) {
  const ckf_producer_config cfg = small_config();
  *len = ckf_producer_mem_size(&cfg);
  void *const mem = calloc(1, *len);
  for (uint64_t i = 0; i < 30; i++) {
    blocks[i] = (ckf_block){i, i + 1};
    more[i] = (ckf_block){100 + i, 100 + i};
  }
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, *len), CKF_OK);
  cr_assert_eq(store(&p, &member, false, 0, blocks, 30), CKF_OK);
  return mem;
}

Test(ckf_unchanged, a_producer_that_is_not_built) {
  ckf_producer_config cfg = small_config();
  const size_t len = ckf_producer_mem_size(&cfg);
  void *const mem = calloc(1, len);
  shot s = {0};
  memset(&p, 0x5A, sizeof p);
  take(&s, &p, sizeof p);
  take(&s, mem, len);
  cr_assert_eq(ckf_producer_init_abi(&p, 1, &cfg, mem, len), CKF_ERR_ABI);
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, len / 2), CKF_ERR_NOSPACE);
  cfg.filter.max_kicks = 0;
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, len), CKF_ERR_MAX_KICKS);
  cr_assert(same(&s));
  drop(&s);
  free(mem);
}

Test(ckf_unchanged, a_producer_that_does_not_take_an_event) {
  const uint64_t unknown[2] = {900, 901};
  const enum ckf_tier host = CKF_TIER_HOST_PINNED;
  ckf_outcome out;
  shot s = {0};
  size_t len;
  void *const mem = open_producer(&len);
  take(&s, &p, sizeof p);
  take(&s, mem, len);
  cr_assert_eq(
      ckf_producer_stored(&p, &member, host, CKF_DOMAIN_MISSING, false, 0, false, 0, more, 2, &out),
      CKF_OK);
  cr_assert(out.ignored);
  cr_assert_eq(ckf_producer_stored(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_UNKNOWN, false, 0,
                                   false, 0, more, 2, &out),
               CKF_ERR_UNSUPPORTED_DOMAIN);
  cr_assert_eq(store(&p, &member, false, 0, NULL, 2), CKF_ERR_ARG);
  cr_assert(same(&s), "what does not count");
  cr_assert_eq(store(&p, &member, true, 777, more, 2), CKF_ERR_PARENT_NOT_FOUND);
  cr_assert(same_but_counters(&s, &p));
  cr_assert_eq(store(&p, &stranger, true, 3, more, 2), CKF_ERR_PARENT_NOT_FOUND);
  cr_assert(same_but_counters(&s, &p));
  cr_assert_eq(ckf_producer_stored(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, true,
                                   4, more, 2, &out),
               CKF_ERR_INVALID_BLOCK_SEQUENCE);
  cr_assert(same_but_counters(&s, &p));
  cr_assert_eq(
      ckf_producer_removed(&p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, unknown, 2, &out),
      CKF_OK);
  cr_assert_eq(out.unknown, 2);
  cr_assert(same_but_counters(&s, &p));
  cr_assert_eq(ckf_producer_remove_rank(&p, &stranger), CKF_OK);
  cr_assert(same_but_counters(&s, &p));
  drop(&s);
  free(mem);
}

Test(ckf_unchanged, a_producer_that_takes_an_event_back) {
  ckf_block torn[30]; /* new blocks, and then one that the member knows as another */
  ckf_batch batch;
  size_t len;
  void *const mem = open_producer(&len);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
  const outside before = seen(&p);
  for (size_t n = 1; n < 30; n++) {
    memcpy(torn, more, sizeof torn);
    torn[n] = (ckf_block){3, 999};
    cr_assert_eq(store(&p, &member, false, 0, torn, n + 1), CKF_ERR_INVALID_BLOCK_SEQUENCE);
    as_before(&p, &before);
    cr_assert_eq(store(&p, &member, true, 29, torn, n + 1), CKF_ERR_INVALID_BLOCK_SEQUENCE);
    as_before(&p, &before);
  }
  cr_assert_eq(store(&p, &member, false, 0, more, 30), CKF_ERR_NOSPACE, "too many mappings");
  as_before(&p, &before);
  cr_assert_eq(store(&p, &stranger, false, 0, more, 1), CKF_ERR_NOSPACE, "too many members");
  as_before(&p, &before);
  cr_assert_eq(store(&p, &member, false, 0, more, 5), CKF_OK);
  cr_assert_eq(ckf_producer_drain(&p, &batch), 1);
  free(mem);
}

Test(ckf_unchanged, a_producer_whose_rebuild_or_move_is_refused) {
  static ckf_producer next;
  ckf_producer_config cfg = small_config();
  const size_t len = ckf_producer_mem_size(&cfg);
  void *const mem = calloc(1, len), *const other = calloc(1, len);
  shot s = {0};
  for (uint64_t i = 0; i < 30; i++)
    blocks[i] = (ckf_block){i, i + 1};
  cr_assert_eq(ckf_producer_init(&p, &cfg, mem, len), CKF_OK);
  cr_assert_eq(store(&p, &member, false, 0, blocks, 20), CKF_OK);
  take(&s, &p, sizeof p);
  take(&s, mem, len);
  cfg.filter.seed++;
  cr_assert_eq(ckf_producer_move(&p, &cfg, other, len), CKF_ERR_ARG);
  cfg.filter.seed--;
  cfg.max_mappings = 8;
  cr_assert_eq(ckf_producer_move(&p, &cfg, other, len), CKF_ERR_NOSPACE);
  cr_assert_eq(ckf_rebuild_begin(&next, &p, NULL, 0, other, len / 2), CKF_ERR_NOSPACE);
  cr_assert(same(&s));
  cr_assert_eq(ckf_rebuild_begin(&next, &p, NULL, 0, other, len), CKF_OK);
  cr_assert(same(&s), "a rebuild that is given up");
  drop(&s);
  cr_assert_eq(store(&p, &member, true, 19, blocks + 20, 1), CKF_OK);
  take(&s, &p, sizeof p);
  take(&s, mem, len);
  take(&s, &next, sizeof next);
  take(&s, other, len);
  cr_assert_eq(ckf_rebuild_commit(&p, &next), CKF_ERR_ARG, "it missed an event");
  cr_assert_eq(ckf_rebuild_commit(&p, &p), CKF_ERR_ARG, "that is no rebuild");
  cr_assert(same(&s));
  drop(&s);
  cr_assert_eq(ckf_rebuild_begin(&next, &p, NULL, 0, other, len), CKF_OK);
  cr_assert_eq(ckf_rebuild_commit(&p, &next), CKF_OK);
  cr_assert_eq(ckf_producer_member_blocks(&p, &member), 21);
  cr_assert_eq(ckf_producer_check_(&p), CKF_OK);
  free(mem);
  free(other);
}
