/* SPDX-License-Identifier: Apache-2.0 */

/* Consumer: names, adapters, and what replicas answer. */

#include "test_consumer.h"

#define B 4u /* block size of kit_pool */

/* ---- an exact engine behind each pool ---- */

typedef struct engine {
  ckf_producer state;
  void *mem;
  uint64_t sequence;
} engine;

static const ckf_member member = {7, 0};

static void engine_open(engine *e, kvrelay_descriptor *d, uint64_t expected_blocks) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected_blocks;
  cfg.filter.seed = d->producer.ckf_format.seed;
  const size_t len = ckf_producer_mem_size(&cfg);
  e->mem = malloc(len);
  e->sequence = 0;
  cr_assert_eq(ckf_producer_init(&e->state, &cfg, e->mem, len), CKF_OK);
  d->producer.ckf_format.bucket_count = ckf_producer_format(&e->state)->bucket_count;
}

/* Stores the complete blocks of a prompt as its pool hashes it; external = canonical ^ mask. */
static void engine_store(engine *e, const kvrelay_semantics *s, const char *lora, const char *ns,
                         const uint32_t *tokens, size_t tokens_len) {
  const uint64_t seed =
      hashfmt_seed((const uint8_t *)lora, strlen(lora), (const uint8_t *)ns, strlen(ns));
  uint64_t local[256], sequence[256];
  ckf_block blocks[256];
  ckf_outcome out;
  size_t n;
  cr_assert_eq(hashfmt_blocks(s->hash_format, s->kv_block_size, seed, tokens, tokens_len, local,
                              sequence, 256, &n),
               HASHFMT_OK);
  for (size_t i = 0; i < n; i++)
    blocks[i] = (ckf_block){sequence[i] ^ 0xA5A5A5A5, local[i]};
  cr_assert_eq(ckf_producer_stored(&e->state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false,
                                   0, false, 0, blocks, n, &out),
               CKF_OK);
}

/* Sends what changed as a delta, or everything as a snapshot. */
static void engine_publish(engine *e, kit *k, uint32_t index, const kvrelay_descriptor *d) {
  ckf_batch batch;
  const bool live = kit_view(k, index).state == KVRELAY_REPLICA_LIVE;
  if (ckf_producer_drain(&e->state, &batch) == 1 && live) {
    ckf_image *images = malloc(batch.image_count * sizeof *images);
    for (size_t i = 0; i < batch.image_count; i++)
      images[i] = ckf_batch_image(&batch, i);
    const kvrelay_filter_update u = kit_delta(d, images, batch.image_count, e->sequence++);
    kit_feed(k, index, &u);
    free(images);
  }
  if (!live)
    kit_snapshot(k, index, d, ckf_producer_words(&e->state), e->sequence);
  const kvrelay_pool_view v = kit_view(k, index);
  cr_assert_eq(v.state, KVRELAY_REPLICA_LIVE);
  cr_assert_eq(memcmp(v.words, ckf_producer_words(&e->state),
                      8 * ckf_producer_format(&e->state)->bucket_count),
               0);
}

/* ---- questions ---- */

static uint64_t scratch[4096];
static kvrelay_answer answers[64];

static ptrdiff_t ask(const kit *k, const char *model, const char *adapter, const uint32_t *tokens,
                     size_t len) {
  const kvrelay_query q = {text(model), text(adapter), {NULL, 0}, tokens, len};
  return kvrelay_consumer_query(&k->c, &q, answers, 64, scratch, 4096, k->now);
}

static void count_up(uint32_t *tokens, size_t len, uint32_t first) {
  for (size_t i = 0; i < len; i++)
    tokens[i] = first + (uint32_t)i;
}

Test(consumer_query, R1_unknown_is_not_zero) {
  const uint32_t tokens[] = {11, 22, 33, 44};
  const kvrelay_descriptor pool = kit_pool(1);
  kit k;
  kit_open(&k);
  cr_assert_eq(ask(&k, "llama", "", tokens, 4), KVRELAY_ERR_STATE);
  k.deny = true;
  kit_feed_pools(&k, 1, &pool, 1);
  for (int i = 0; i < 3; i++) { /* no memory, subscribed, half a snapshot */
    cr_assert_eq(ask(&k, "llama", "", tokens, 4), 1);
    cr_assert_eq(answers[0].state, KVRELAY_ANSWER_UNKNOWN);
    cr_assert_eq(answers[0].complete_blocks, 1);
    cr_assert_eq(answers[0].age_ns, KVRELAY_TIME_NONE);
    if (i == 0) {
      k.deny = false;
      kit_sleep(&k);
    } else if (i == 1) {
      const kvrelay_filter_update u = kit_chunk(&pool, kit_zeros, 0, 32, 0);
      kit_feed(&k, 0, &u);
    }
  }
  const kvrelay_filter_update u = kit_chunk(&pool, kit_zeros, 0, 32, 1);
  kit_feed(&k, 0, &u);
  k.now += 5 * SECOND;
  cr_assert_eq(ask(&k, "llama", "", tokens, 4), 1);
  cr_assert_eq(answers[0].state, KVRELAY_ANSWER_KNOWN);
  cr_assert_eq(answers[0].depth_blocks, 0);
  cr_assert_eq(answers[0].age_ns, 5 * SECOND);
  cr_assert_not(answers[0].stale);
  cr_assert_eq(ask(&k, "other", "", tokens, 4), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(ask(&k, "", "", tokens, 4), KVRELAY_ERR_NOT_FOUND);
  k.now += 30 * SECOND;
  cr_assert_eq(ask(&k, "chat", "", tokens, 4), 1);
  cr_assert(answers[0].stale);
  /* A delta of another producer withdraws the answer (R3). */
  kvrelay_filter_update bad = kit_heartbeat(&pool, 0);
  bad.producer.producer_incarnation++;
  kit_feed(&k, 0, &bad);
  cr_assert_eq(ask(&k, "llama", "", tokens, 4), 1);
  cr_assert_eq(answers[0].state, KVRELAY_ANSWER_UNKNOWN);
  kvrelay_consumer_disconnected(&k.c, k.now);
  cr_assert_eq(ask(&k, "llama", "", tokens, 4), KVRELAY_ERR_STATE);
  kit_close(&k);
}

Test(consumer_query, R2_stored_tokens_are_found) {
  const uint32_t tokens[] = {11, 22, 33, 44, 55};
  kvrelay_descriptor pool = kit_pool(1);
  engine e;
  kit k;
  engine_open(&e, &pool, 2048);
  cr_assert_eq(pool.producer.ckf_format.bucket_count, 1024);
  engine_store(&e, &pool.query_semantics, "", "", tokens, 4);
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  engine_publish(&e, &k, 0, &pool);
  for (size_t len = 0; len <= 5; len++) {
    cr_assert_eq(ask(&k, "llama", "", len ? tokens : NULL, len), 1);
    cr_assert_eq(answers[0].state, KVRELAY_ANSWER_KNOWN);
    cr_assert_eq(answers[0].complete_blocks, len / 4, "0 = shorter than one block");
    cr_assert_eq(answers[0].depth_blocks, len / 4);
    cr_assert_eq(answers[0].block_size, 4);
  }
  kit_close(&k);
  free(e.mem);
}

/* 13 tokens, then 21, by name and adapter of each kind; block size 4. */
Test(consumer_query, B5_what_the_producer_stores_the_consumer_finds_before_and_after_a_delta) {
  static const kvrelay_registration both[] = {
      {{(const uint8_t *)"llama", 5},
       {true, KVRELAY_TARGET_BASE, {(const uint8_t *)"llama", 5}, {NULL, 0}},
       kit_aliases,
       1},
      {{(const uint8_t *)"llama-sql", 9},
       {true, KVRELAY_TARGET_LORA, {(const uint8_t *)"llama", 5}, {(const uint8_t *)"sql-v1", 6}},
       NULL,
       0}};
  uint32_t tokens[21];
  count_up(tokens, 21, 1);
  for (int i = 0; i < 4; i++) {
    const char *const lora = i & 1 ? "sql-v1" : "";
    const kvrelay_query q = {
        text(i & 1 ? "llama-sql" : "chat"), {NULL, 0}, text("tenant-a"), tokens, 21};
    kvrelay_descriptor pool = kit_pool(1);
    engine e;
    kit k;
    pool.registrations = both;
    pool.registrations_len = 2;
    if (i & 2)
      pool.query_semantics.hash_format = HASHFMT_FORMAT_EAGLE;
    engine_open(&e, &pool, 2048);
    kit_open(&k);
    kit_feed_pools(&k, 1, &pool, 1);
    for (int step = 0; step < 2; step++) {
      engine_store(&e, &pool.query_semantics, lora, "tenant-a", tokens, step ? 21 : 13);
      engine_publish(&e, &k, 0, &pool); /* compares the words */
      cr_assert_eq(kit_view(&k, 0).sequence, (uint64_t)step);
      cr_assert_eq(kvrelay_consumer_query(&k.c, &q, answers, 64, scratch, 4096, k.now), 1);
      cr_assert_eq(answers[0].depth_blocks, step ? 5 : 3);
      cr_assert_eq(answers[0].complete_blocks, 5);
    }
    kit_close(&k);
    free(e.mem);
  }
}

/* Same tokens, all ways to hash them: each pool finds its own and nothing else. */
Test(consumer_query, B5_formats_adapters_and_namespaces_hash_apart) {
  static const kvrelay_registration both[] = {
      {{(const uint8_t *)"llama", 5},
       {true, KVRELAY_TARGET_BASE, {(const uint8_t *)"llama", 5}, {NULL, 0}},
       kit_aliases,
       1},
      {{(const uint8_t *)"llama-sql", 9},
       {true, KVRELAY_TARGET_LORA, {(const uint8_t *)"llama", 5}, {(const uint8_t *)"sql-v1", 6}},
       NULL,
       0}};
  uint32_t tokens[33];
  count_up(tokens, 33, 1);
  for (int i = 0; i < 8; i++) {
    const char *const lora = i & 1 ? "sql-v1" : "", *const ns = i & 2 ? "tenant-a" : "";
    kvrelay_descriptor pool = kit_pool(1);
    engine e;
    kit k;
    pool.registrations = both;
    pool.registrations_len = 2;
    if (i & 4)
      pool.query_semantics.hash_format = HASHFMT_FORMAT_EAGLE;
    engine_open(&e, &pool, 2048);
    engine_store(&e, &pool.query_semantics, lora, ns, tokens, 33);
    kit_open(&k);
    kit_feed_pools(&k, 1, &pool, 1);
    engine_publish(&e, &k, 0, &pool);
    for (int way = 0; way < 8; way++) {
      const bool adapter = way & 1;
      const kvrelay_query q = {text(way & 4 && adapter ? "llama-sql" : "chat"),
                               text(way & 4 || !adapter ? "" : "sql-v1"),
                               text(way & 2 ? "tenant-a" : ""), tokens, 32};
      cr_assert_eq(kvrelay_consumer_query(&k.c, &q, answers, 64, scratch, 4096, k.now), 1);
      cr_assert_eq(answers[0].complete_blocks, i & 4 ? 7 : 8);
      cr_assert_eq(answers[0].depth_blocks, (way & 3) == (i & 3) ? answers[0].complete_blocks : 0,
                   "%d %d", i, way);
    }
    /* The registration's id stands for its adapter, too. */
    cr_assert_eq(ask(&k, "llama", "llama-sql", tokens, 33), 1);
    cr_assert_eq(answers[0].depth_blocks, (i & 3) == 1 ? 8 : 0);
    cr_assert_eq(answers[0].complete_blocks, 8);
    kit_close(&k);
    free(e.mem);
  }
}

/* ---- names ---- */

#define T(S)                                                                                       \
  { (const uint8_t *)(S), sizeof(S) - 1 }
#define BASE(ID, MODEL, ALIASES, N)                                                                \
  { T(ID), {true, KVRELAY_TARGET_BASE, T(MODEL), {NULL, 0}}, ALIASES, N }
#define LORA(ID, MODEL, ADAPTER, ALIASES, N)                                                       \
  { T(ID), {true, KVRELAY_TARGET_LORA, T(MODEL), T(ADAPTER)}, ALIASES, N }

static const kvrelay_text chat[] = {T("chat")}, qwen[] = {T("qwen")}, s[] = {T("s")},
                          nul[] = {T("chat\0a")};

/* Pools p1, p2 with one registration each. */
static void open_two(kit *k, kvrelay_descriptor pools[2], const kvrelay_registration *a,
                     const kvrelay_registration *b) {
  pools[0] = kit_pool(1);
  pools[1] = kit_pool(3);
  pools[0].registrations = a;
  pools[1].registrations = b;
  kit_open(k);
  kit_feed_pools(k, 1, pools, 2);
}

/* The pools of a name as bits, or the error. */
static ptrdiff_t pools_of(const kit *k, const char *name) {
  const ptrdiff_t n = ask(k, name, "", NULL, 0);
  ptrdiff_t bits = 0;
  for (ptrdiff_t i = 0; i < n; i++) {
    cr_assert_eq(bits >> answers[i].pool & 1, 0, "a pool answers once");
    bits |= 1 << answers[i].pool;
  }
  return n < 0 ? n : bits;
}

Test(consumer_query, names_stand_for_one_binding) {
  static const kvrelay_registration llama = BASE("llama", "llama", chat, 1),
                                    qwen_chat = BASE("qwen", "qwen", chat, 1),
                                    llama_qwen = BASE("llama", "llama", qwen, 1),
                                    qwen_alone = BASE("qwen", "qwen", NULL, 0),
                                    sql_lora = LORA("sql", "llama", "sql", NULL, 0),
                                    sql_base = BASE("sql", "sql", NULL, 0),
                                    sql_s = LORA("sql", "llama", "sql-v1", s, 1),
                                    sql_v1 = LORA("sql", "llama", "sql-v1", NULL, 0),
                                    other_id = BASE("llama2", "llama", chat, 1),
                                    chat_nul = BASE("qwen", "qwen", nul, 1),
                                    itself = BASE("chat", "llama", chat, 1);
  static const struct {
    const kvrelay_registration *a, *b;
    const char *name;
    ptrdiff_t pools;
  } cases[] = {{&llama, &llama, "llama", 3},
               {&llama, &llama, "chat", 3},
               {&llama, &qwen_chat, "llama", 1},
               {&llama, &qwen_chat, "qwen", 2},
               {&llama, &qwen_chat, "chat", KVRELAY_ERR_MALFORMED},
               {&llama_qwen, &qwen_alone, "qwen", KVRELAY_ERR_MALFORMED},
               {&llama_qwen, &qwen_alone, "llama", 1},
               {&sql_lora, &sql_base, "sql", KVRELAY_ERR_MALFORMED},
               {&sql_s, &sql_v1, "sql", 3},
               {&sql_s, &sql_v1, "s", 1},
               {&sql_s, &sql_v1, "sql-v1", KVRELAY_ERR_NOT_FOUND}, /* an adapter is no name */
               {&llama, &other_id, "chat", KVRELAY_ERR_MALFORMED}, /* same target, two ids */
               {&llama, &chat_nul, "chat", 1},
               {&itself, &itself, "chat", 3}}; /* each pool once */
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    for (int swap = 0; swap < 2; swap++) {
      kvrelay_descriptor pools[2];
      kit k;
      open_two(&k, pools, swap ? cases[i].b : cases[i].a, swap ? cases[i].a : cases[i].b);
      ptrdiff_t want = cases[i].pools;
      if (swap && (want == 1 || want == 2))
        want = 3 - want;
      cr_assert_eq(pools_of(&k, cases[i].name), want, "%zu", i);
      kit_close(&k);
    }
}

/* The same rule over the catalogs of two relays, one of them twice. */
Test(consumer_query, names_stand_for_one_binding_over_all_relays) {
  static const kvrelay_registration llama = BASE("llama", "llama", chat, 1),
                                    qwen_chat = BASE("qwen", "qwen", chat, 1),
                                    other_id = BASE("llama2", "llama", chat, 1),
                                    itself = BASE("chat", "llama", NULL, 0),
                                    sql_lora = LORA("sql", "llama", "sql", NULL, 0),
                                    sql_v1 = LORA("sql", "llama", "sql-v1", NULL, 0);
  static const struct {
    const kvrelay_registration *a, *b;
    const char *model, *adapter;
    ptrdiff_t answers;
    int outcomes[3]; /* of a, b, a */
  } cases[] = {
      {&llama, &llama, "chat", "", 6, {0, 0, 0}},
      {&llama, &qwen_chat, "qwen", "", 2, {KVRELAY_ERR_NOT_FOUND, 0, KVRELAY_ERR_NOT_FOUND}},
      {&llama, &qwen_chat, "chat", "", KVRELAY_ERR_MALFORMED, {0, KVRELAY_ERR_MALFORMED, 0}},
      {&llama, &other_id, "chat", "", KVRELAY_ERR_MALFORMED, {0, KVRELAY_ERR_MALFORMED, 0}},
      {&llama, &itself, "chat", "", KVRELAY_ERR_MALFORMED, {0, KVRELAY_ERR_MALFORMED, 0}},
      {&sql_lora, &sql_v1, "sql", "", KVRELAY_ERR_MALFORMED, {0, KVRELAY_ERR_MALFORMED, 0}},
      {&sql_lora, &llama, "llama", "sql", 4, {0, KVRELAY_ERR_NOT_FOUND, 0}},
      {&llama,
       &llama,
       "other",
       "",
       KVRELAY_ERR_NOT_FOUND,
       {KVRELAY_ERR_NOT_FOUND, KVRELAY_ERR_NOT_FOUND, KVRELAY_ERR_NOT_FOUND}}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    kvrelay_descriptor pools[2][2];
    kit a, b;
    int outcomes[3];
    open_two(&a, pools[0], cases[i].a, cases[i].a);
    open_two(&b, pools[1], cases[i].b, cases[i].b);
    const kvrelay_consumer *const all[] = {&a.c, &b.c, &a.c};
    const kvrelay_query q = {text(cases[i].model), text(cases[i].adapter), {NULL, 0}, NULL, 0};
    cr_assert_eq(kvrelay_consumers_query(all, 3, &q, answers, 64, outcomes, NULL, 0, 1),
                 cases[i].answers, "%zu", i);
    cr_assert_eq(memcmp(outcomes, cases[i].outcomes, sizeof outcomes), 0, "%zu", i);
    kit_close(&a);
    kit_close(&b);
  }
}

/* X2. */
Test(consumer_query, X2_names_that_differ_behind_a_nul) {
  static const kvrelay_registration a = BASE("m\0a", "x", NULL, 0), b = BASE("m\0b", "y", NULL, 0);
  kvrelay_descriptor pools[2];
  kit k;
  open_two(&k, pools, &a, &b);
  const kvrelay_query q = {T("m\0b"), {NULL, 0}, {NULL, 0}, NULL, 0};
  cr_assert_eq(kvrelay_consumer_query(&k.c, &q, answers, 64, NULL, 0, k.now), 1);
  cr_assert_eq(answers[0].pool, 1);
  cr_assert_eq(pools_of(&k, "m"), KVRELAY_ERR_NOT_FOUND);
  kit_close(&k);
}

Test(consumer_query, quarantined_pools_contribute_no_name) {
  static const kvrelay_registration llama = BASE("llama", "llama", chat, 1),
                                    qwen_chat = BASE("qwen", "qwen", chat, 1);
  const kvrelay_status refusal =
      kit_status(KVRELAY_GRPC_FAILED_PRECONDITION, KVRELAY_REASON_UNSUPPORTED_FEATURE);
  kvrelay_descriptor pools[2];
  kit k;
  open_two(&k, pools, &llama, &qwen_chat);
  pools[1].query_semantics.hash_format = -1;
  kit_feed_pools(&k, 2, pools, 2);
  cr_assert_eq(pools_of(&k, "chat"), 1, "no longer ambiguous");
  cr_assert_eq(pools_of(&k, "qwen"), KVRELAY_ERR_NOT_FOUND);
  /* A pool that the relay refuses still has its names, and says so. */
  cr_assert_eq(kvrelay_consumer_feed_end(&k.c, k.calls[0], &refusal, k.now), KVRELAY_OK);
  cr_assert_eq(pools_of(&k, "chat"), 1);
  cr_assert_eq(answers[0].state, KVRELAY_ANSWER_UNSUPPORTED);
  kit_drop(k.open, &k.open_len, k.calls[0]);
  kit_run(&k);
  kit_close(&k);
}

Test(consumer_query, adapters_belong_to_their_base_model) {
  static const kvrelay_registration p1[] = {BASE("llama", "llama", chat, 1),
                                            LORA("l-sql", "llama", "sql", NULL, 0)},
                                    p2[] = {BASE("qwen", "qwen", NULL, 0),
                                            LORA("q-sql", "qwen", "sql", NULL, 0)};
  static const struct {
    const char *model, *adapter;
    ptrdiff_t result; /* the only pool + 1, or the error */
  } cases[] = {{"llama", "sql", 1},
               {"chat", "sql", 1},
               {"qwen", "sql", 2},
               {"llama", "l-sql", 1},
               {"qwen", "l-sql", KVRELAY_ERR_NOT_FOUND},
               {"llama", "qwen", KVRELAY_ERR_NOT_FOUND},
               {"llama", "csv", KVRELAY_ERR_NOT_FOUND},
               {"l-sql", "sql", KVRELAY_ERR_NOT_FOUND}, /* not a base model */
               {"gemma", "sql", KVRELAY_ERR_NOT_FOUND}};
  kvrelay_descriptor pools[2];
  kit k;
  open_two(&k, pools, p1, p2);
  pools[0].registrations_len = pools[1].registrations_len = 2;
  kit_feed_pools(&k, 2, pools, 2);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const ptrdiff_t n = ask(&k, cases[i].model, cases[i].adapter, NULL, 0);
    cr_assert_eq(n, cases[i].result < 0 ? cases[i].result : 1, "%zu", i);
    if (n > 0)
      cr_assert_eq(answers[0].pool + 1, cases[i].result);
  }
  /* A base model that no pool lists any more still names its adapters. */
  pools[0].registrations = p1 + 1;
  pools[0].registrations_len = 1;
  kit_feed_pools(&k, 3, pools, 2);
  cr_assert_eq(ask(&k, "llama", "", NULL, 0), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(ask(&k, "llama", "sql", NULL, 0), 1);
  cr_assert_eq(answers[0].pool, 0);
  kit_close(&k);
}

/* ---- scratch and order ---- */

Test(consumer_query, scratch_too_small_writes_nothing) {
  uint32_t tokens[40];
  kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(3)};
  kvrelay_answer before[4];
  uint64_t space[11];
  kit k;
  count_up(tokens, 40, 1);
  pools[1].query_semantics.kv_block_size = 8;
  kit_open(&k);
  kit_feed_pools(&k, 1, pools, 2);
  kit_snapshot(&k, 0, &pools[0], kit_zeros, 0);
  kit_snapshot(&k, 1, &pools[1], kit_zeros, 0);
  const kvrelay_query q = {text("llama"), {NULL, 0}, {NULL, 0}, tokens, 40};
  memset(answers, 0x33, sizeof answers);
  memset(space, 0x33, sizeof space);
  memcpy(before, answers, sizeof before);
  for (size_t len = 0; len < 10; len++) {
    cr_assert_eq(kvrelay_consumer_query(&k.c, &q, answers, 4, space, len, k.now),
                 KVRELAY_ERR_NOSPACE);
    cr_assert_eq(memcmp(answers, before, sizeof before), 0);
    cr_assert_eq(space[0], UINT64_C(0x3333333333333333));
  }
  cr_assert_eq(kvrelay_consumer_query(&k.c, &q, answers, 4, space, 10, k.now), 2);
  cr_assert_eq(space[10], UINT64_C(0x3333333333333333));
  cr_assert_eq(answers[0].complete_blocks + answers[1].complete_blocks, 15);
  cr_assert_eq(kvrelay_consumer_query(&k.c, &q, NULL, 0, space, 10, k.now), 2);
  kit_close(&k);
}

/* The first `cap` of the answers, whatever cap is, and nothing beyond. */
static void query_keeps_the_best(kit *k, const kvrelay_query *q, const kvrelay_answer *all,
                                 uint32_t len) {
  kvrelay_answer part[16];
  for (size_t cap = 0; cap <= len; cap++) {
    memset(part, 0x77, sizeof part);
    cr_assert_eq(kvrelay_consumer_query(&k->c, q, part, cap, scratch, 4096, k->now), len);
    for (size_t i = 0; i < cap; i++)
      cr_assert_eq(part[i].pool, all[i].pool, "cap %zu, %zu", cap, i);
    cr_assert_eq(part[cap].block_size, 0x77777777u, "beyond cap");
  }
}

static uint32_t prompt[64];

static ptrdiff_t ask_all(const kvrelay_consumer *const *consumers, size_t len, size_t cap,
                         int *outcomes, size_t scratch_len) {
  const kvrelay_query q = {text("llama"), {NULL, 0}, {NULL, 0}, prompt, 64};
  return kvrelay_consumers_query(consumers, len, &q, answers, cap, outcomes, scratch, scratch_len,
                                 5 * SECOND);
}

/* Each relay is followed alone; what one does not know is no answer of another, and none is 0. */
Test(consumer_query, relays_are_asked_at_once) {
  enum { RELAYS = 4, WITHOUT_NAME = 2, SILENT = 3 };
  const kvrelay_consumer *consumers[RELAYS];
  kvrelay_descriptor pools[RELAYS];
  engine e[RELAYS];
  kit k[RELAYS];
  int outcomes[RELAYS];
  count_up(prompt, 64, 1);
  for (uint32_t i = 0; i < RELAYS; i++) {
    kit_open(&k[i]);
    consumers[i] = &k[i].c;
    pools[i] = kit_pool((uint8_t)(i + 1));
    if (i == WITHOUT_NAME)
      pools[i].registrations_len = 0;
    engine_open(&e[i], &pools[i], 200);
    engine_store(&e[i], &pools[i].query_semantics, "", "", prompt, i == 0 ? 16 : 48);
  }
  cr_assert_eq(ask_all(consumers, RELAYS, 64, outcomes, 4096), KVRELAY_ERR_STATE);
  for (uint32_t i = 0; i < SILENT; i++)
    kit_feed_pools(&k[i], 1, &pools[i], 1);
  engine_publish(&e[0], &k[0], 0, &pools[0]);
  for (int round = 0; round < 2; round++) {
    const bool live = round == 1;
    if (live)
      engine_publish(&e[1], &k[1], 0, &pools[1]);
    cr_assert_eq(ask_all(consumers, RELAYS, 64, outcomes, 4096), 2);
    const kvrelay_answer *const first = &answers[live ? 1 : 0], *const second =
                                                                    &answers[live ? 0 : 1];
    cr_assert_eq(first->consumer, 0u);
    cr_assert_eq(first->depth_blocks, 16 / first->block_size);
    cr_assert_eq(second->consumer, 1u);
    cr_assert_eq(second->state, live ? KVRELAY_ANSWER_KNOWN : KVRELAY_ANSWER_UNKNOWN);
    cr_assert_eq(second->depth_blocks, live ? 48 / second->block_size : 0);
    cr_assert_eq(outcomes[0], KVRELAY_OK);
    cr_assert_eq(outcomes[1], KVRELAY_OK);
    cr_assert_eq(outcomes[WITHOUT_NAME], KVRELAY_ERR_NOT_FOUND);
    cr_assert_eq(outcomes[SILENT], KVRELAY_ERR_STATE);
    cr_assert_eq(ask_all(consumers, RELAYS, 64, NULL, 15), KVRELAY_ERR_NOSPACE);
    cr_assert_eq(ask_all(consumers, RELAYS, 1, NULL, 16), 2);
    cr_assert_eq(answers[0].consumer, live ? 1u : 0u);
  }
  cr_assert_eq(ask_all(&consumers[WITHOUT_NAME], 1, 64, NULL, 4096), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(ask_all(&consumers[WITHOUT_NAME], 2, 64, NULL, 4096), KVRELAY_ERR_STATE);
  for (uint32_t i = 0; i < RELAYS; i++) {
    free(e[i].mem);
    kit_close(&k[i]);
  }
}

/* Prefill and decode pools of one model, each with semantics and contents of its own. */
Test(consumer_query, answers_are_sorted_and_the_best_are_kept) {
  enum { N = 14 };
  uint32_t tokens[120];
  uint64_t random = 5;
  count_up(tokens, 120, 1);
  for (int round = 0; round < 30; round++) {
    kvrelay_descriptor pools[N];
    engine e[N];
    kvrelay_answer all[N];
    kit k;
    for (uint32_t i = 0; i < N; i++) {
      pools[i] = kit_pool((uint8_t)(2 * i + 1));
      pools[i].query_semantics.kv_block_size = 2u << kit_random(&random) % 3;
      pools[i].query_semantics.hash_format = 1 + (int32_t)(kit_random(&random) % 2);
      engine_open(&e[i], &pools[i], 200);
      engine_store(&e[i], &pools[i].query_semantics, "", "", tokens, 8 + kit_random(&random) % 100);
    }
    kit_open(&k);
    kit_feed_pools(&k, 1, pools, N);
    for (uint32_t i = 0; i < N; i++)
      if (i % 5 != 4) /* the others stay unknown */
        engine_publish(&e[i], &k, i, &pools[i]);
    const kvrelay_query q = {text("llama"), {NULL, 0}, {NULL, 0}, tokens, 120};
    cr_assert_eq(kvrelay_consumer_query(&k.c, &q, all, N, scratch, 4096, k.now), N);
    uint32_t seen = 0;
    for (uint32_t i = 0; i < N; i++) {
      const kvrelay_answer *const a = &all[i], *const b = &all[i - (i > 0)];
      const kvrelay_semantics *const sem = &pools[a->pool].query_semantics;
      uint64_t depth = 0, sequence[128];
      size_t n;
      seen |= 1u << a->pool;
      cr_assert_eq(a->block_size, sem->kv_block_size);
      cr_assert_eq(hashfmt_blocks(sem->hash_format, sem->kv_block_size, 1337, tokens, 120, NULL,
                                  sequence, 128, &n),
                   HASHFMT_OK);
      while (depth < n && ckf_producer_owners(&e[a->pool].state, sequence[depth], NULL, NULL))
        depth++;
      cr_assert_eq(a->complete_blocks, n);
      if (a->state == KVRELAY_ANSWER_KNOWN)
        cr_assert_geq(a->depth_blocks, depth);
      else
        cr_assert_eq(a->pool % 5, 4);
      cr_assert_leq(b->state, a->state);
      if (i > 0 && b->state == a->state) {
        const uint64_t x = b->depth_blocks * b->block_size, y = a->depth_blocks * a->block_size;
        cr_assert(x > y || (x == y && b->pool < a->pool));
      }
    }
    cr_assert_eq(seen, (1u << N) - 1);
    query_keeps_the_best(&k, &q, all, N);
    kit_close(&k);
    for (size_t i = 0; i < N; i++)
      free(e[i].mem);
  }
}

/* ---- against an exact model ---- */

/* Chains over a small set of prompts come and go; a live replica never answers less than what the
 * engine really holds. As long as a life is: prompts, events, questions, a break of the stream. */
Test(consumer_query, never_below_the_exact_depth) {
  enum { PROMPTS = 24, BLOCKS = 20 };
  uint32_t tokens[PROMPTS][BLOCKS * B];
  uint64_t keys[PROMPTS][BLOCKS], local[PROMPTS][BLOCKS], random = 17, exact = 0, deltas = 0;
  kvrelay_descriptor pool = kit_pool(1);
  ckf_outcome out;
  engine e;
  kit k;
  size_t n;
  engine_open(&e, &pool, 2048);
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  for (size_t p = 0; p < PROMPTS; p++) {
    count_up(tokens[p], BLOCKS * B, 1);
    for (size_t t = (p % 5) * B; t < BLOCKS * B; t++)
      tokens[p][t] += 1000 * (uint32_t)p; /* common starts of 0 .. 4 blocks */
    cr_assert_eq(hashfmt_blocks(1, B, 1337, tokens[p], BLOCKS * B, local[p], keys[p], BLOCKS, &n),
                 HASHFMT_OK);
  }
  for (int step = 0; step < 1500; step++) {
    const size_t p = kit_random(&random) % PROMPTS, m = 1 + kit_random(&random) % BLOCKS;
    const ckf_member who = {kit_random(&random) % 3, 0};
    if (kit_random(&random) % 3 != 0) {
      ckf_block blocks[BLOCKS];
      for (size_t i = 0; i < m; i++)
        blocks[i] = (ckf_block){~keys[p][i], local[p][i]};
      (void)ckf_producer_stored(&e.state, &who, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0,
                                false, 0, blocks, m, &out);
    } else {
      uint64_t gone[BLOCKS];
      for (size_t i = 0; i < m; i++)
        gone[i] = ~keys[p][BLOCKS - 1 - i];
      (void)ckf_producer_removed(&e.state, &who, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, gone, m,
                                 &out);
    }
    cr_assert_eq(out.error, CKF_OK);
    engine_publish(&e, &k, 0, &pool);
    for (size_t i = 0; i < 4; i++) {
      const size_t asked = kit_random(&random) % PROMPTS;
      uint64_t depth = 0;
      while (depth < BLOCKS && ckf_producer_owners(&e.state, keys[asked][depth], NULL, NULL))
        depth++;
      cr_assert_eq(ask(&k, "llama", "", tokens[asked], BLOCKS * B), 1);
      cr_assert_eq(answers[0].state, KVRELAY_ANSWER_KNOWN);
      cr_assert_geq(answers[0].depth_blocks, depth);
      exact += answers[0].depth_blocks == depth;
    }
    if (step % 100 == 99) { /* the stream breaks, a snapshot brings it back */
      deltas += kit_view(&k, 0).deltas;
      kit_end(&k, k.calls[0], KVRELAY_GRPC_RESOURCE_EXHAUSTED, KVRELAY_REASON_SUBSCRIBER_LAGGED);
      cr_assert_eq(ask(&k, "llama", "", tokens[0], BLOCKS * B), 1);
      cr_assert_eq(answers[0].state, KVRELAY_ANSWER_UNKNOWN);
      kit_run(&k);
      kit_sleep(&k);
      engine_publish(&e, &k, 0, &pool);
    }
  }
  cr_assert_gt(deltas, 1000);
  cr_assert_gt(exact, 5950, "%lu of 6000", (unsigned long)exact);
  kit_close(&k);
  free(e.mem);
}
