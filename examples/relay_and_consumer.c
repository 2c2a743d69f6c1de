/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Both sides of the contract in one program, without a socket: what the consumer wants is called at
 * the relay, what the relay says is fed to the consumer. A transport of your own stands where
 * `talk` stands, with bytes on the way.
 *
 *   cc -I.. relay_and_consumer.c && ./a.out
 */

#include <inttypes.h>
#include <string.h>

#define CKF_IMPLEMENTATION
#define HASHFMT_IMPLEMENTATION
#define KVRELAY_IMPLEMENTATION
#include "data_centre.h"
#include "kvrelay.h"

enum { POOLS = 2, CALLS = 16, FORMAT = HASHFMT_FORMAT_STANDARD, PROMPT_BLOCKS = 40 };

typedef struct world {
  kvrelay_relay relay;
  data_centre engines[POOLS];
  kvrelay_pool *pools[POOLS];
  kvrelay_consumer consumer;
  struct {
    bool open;
    uint32_t theirs; /* number of the call at the consumer, */
    uint64_t ours;   /* and at the relay */
  } calls[CALLS];
  size_t room; /* bytes left for replicas */
  uint64_t now_ns;
  void *blocks[2 + POOLS]; /* of the relay, the consumer and the pools, to be freed */
  unsigned blocks_len;
} world;

/* Every object says how much it needs, and takes no more. */
static void *memory(world *w, size_t len) {
  void *const mem = malloc(len);
  need(len != 0 && mem != NULL, "no memory");
  return w->blocks[w->blocks_len++] = mem;
}

static kvrelay_text text(const char *word) {
  kvrelay_text t;
  t.ptr = (const uint8_t *)word;
  t.len = strlen(word);
  return t;
}

/* ---- the relay's side ---- */

static void relay_open(world *w) {
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity.drt_instance_id = 1;
  cfg.identity.relay_incarnation = 1;
  cfg.max_pools = POOLS;
  cfg.max_bucket_count = 1 << 16; /* the room of a snapshot on its way depends on it */
  const size_t len = kvrelay_relay_mem_size(&cfg);
  need(kvrelay_relay_init(&w->relay, &cfg, memory(w, len), len, w->now_ns) == KVRELAY_OK, "relay");
}

/* A pool of one engine, under the same model name as the others. */
static void relay_publishes(world *w, unsigned i) {
  static const int32_t role[] = {KVRELAY_ROLE_AGGREGATED};
  kvrelay_registration model;
  kvrelay_descriptor d;
  memset(&model, 0, sizeof model);
  memset(&d, 0, sizeof d);
  model.canonical_model_id = model.target.base_model = text("llama");
  model.target.present = true;
  model.target.kind = KVRELAY_TARGET_BASE;
  d.registrations = &model;
  d.registrations_len = 1;
  d.pool_roles.ptr = role;
  d.pool_roles.len = 1;
  d.query_semantics.kv_block_size = BLOCK_SIZE;
  d.query_semantics.hash_format = FORMAT;
  d.serving_endpoint.namespace_ = text("prod");
  d.serving_endpoint.component = text(i == 0 ? "east" : "west");
  d.serving_endpoint.endpoint = text("generate");
  kvrelay_pool_id *const id = &d.producer.pool_id;
  id->identity_version = 1;
  id->domain.present = true;
  need(kvrelay_dc_id(text("data centre 1"), &id->dc_id) == KVRELAY_OK &&
           kvrelay_cache_digest(text("llama"), NULL, 0, BLOCK_SIZE, FORMAT,
                                &id->domain.cache_semantics) == KVRELAY_OK &&
           kvrelay_scope_digest(&d.serving_endpoint, NULL, 0, &id->domain.routing_scope) ==
               KVRELAY_OK,
       "identity");
  data_centre_open(&w->engines[i], id->dc_id, FORMAT);
  const size_t len = kvrelay_relay_pool_mem_size(&w->relay, &d);
  need(kvrelay_relay_pool_add(&w->relay, &d, &w->engines[i].producer, memory(w, len), len,
                              w->now_ns, &w->pools[i]) == KVRELAY_OK,
       "pool");
}

/* ---- between them ---- */

static void consumer_hears(world *w, unsigned i, const kvrelay_outgoing *out) {
  kvrelay_consumer *const c = &w->consumer;
  const uint32_t call = w->calls[i].theirs;
  switch (out->method) {
  case KVRELAY_METHOD_GET_RELAY_INFO:
    kvrelay_consumer_feed_info(c, call, &out->u.info, w->now_ns);
    break;
  case KVRELAY_METHOD_WATCH_CATALOG:
    kvrelay_consumer_feed_catalog(c, call, &out->u.catalog, w->now_ns);
    break;
  default:
    kvrelay_consumer_feed_filter(c, call, &out->u.filter, w->now_ns);
    break;
  }
}

static void call_open(world *w, const kvrelay_action *a) {
  kvrelay_status status;
  unsigned i = 0;
  while (i < CALLS && w->calls[i].open)
    i++;
  need(i < CALLS, "too many calls");
  w->calls[i].theirs = a->call;
  w->calls[i].open = kvrelay_relay_call_open(&w->relay, &a->request, w->now_ns, &w->calls[i].ours,
                                             &status) == KVRELAY_OK;
  if (!w->calls[i].open)
    kvrelay_consumer_feed_end(&w->consumer, a->call, &status, w->now_ns);
}

static void call_close(world *w, unsigned i) {
  kvrelay_relay_call_close(&w->relay, w->calls[i].ours, w->now_ns);
  w->calls[i].open = false;
}

static void consumer_wants(world *w, const kvrelay_action *a) {
  switch (a->kind) {
  case KVRELAY_ACTION_CALL:
    call_open(w, a);
    break;
  case KVRELAY_ACTION_CANCEL:
    for (unsigned i = 0; i < CALLS; i++)
      if (w->calls[i].open && w->calls[i].theirs == a->call)
        call_close(w, i);
    break;
  case KVRELAY_ACTION_REPLICA_NEED: {
    void *const mem = a->bytes <= w->room ? malloc(a->bytes) : NULL; /* NULL: not now */
    w->room -= mem != NULL ? a->bytes : 0;
    need(kvrelay_consumer_replica_give(&w->consumer, a->pool, mem, a->bytes, w->now_ns) ==
             KVRELAY_OK,
         "replica");
    break;
  }
  case KVRELAY_ACTION_REPLICA_FREE:
    free(a->mem);
    break;
  default:
    need(false, "a quarrel");
  }
}

/* Carries everything until both have nothing to say. */
static void talk(world *w) {
  kvrelay_action action;
  kvrelay_outgoing out;
  for (bool again = true; again;) {
    again = false;
    kvrelay_relay_tick(&w->relay, w->now_ns);
    kvrelay_consumer_tick(&w->consumer, w->now_ns);
    while (kvrelay_consumer_action_next(&w->consumer, w->now_ns, &action)) {
      consumer_wants(w, &action);
      again = true;
    }
    for (unsigned i = 0; i < CALLS; i++)
      while (w->calls[i].open) {
        const int got =
            kvrelay_relay_call_pull(&w->relay, w->calls[i].ours, w->now_ns / 1000, w->now_ns, &out);
        if (got == KVRELAY_PULL_NONE)
          break;
        again = true;
        if (got == KVRELAY_PULL_MESSAGE) {
          consumer_hears(w, i, &out);
          continue;
        }
        call_close(w, i);
        kvrelay_consumer_feed_end(&w->consumer, w->calls[i].theirs, &out.end, w->now_ns);
      }
  }
}

/* Both sides lose every call, and the consumer all it knows from them. */
static void disconnect(world *w) {
  kvrelay_action action;
  kvrelay_consumer_disconnected(&w->consumer, w->now_ns);
  while (kvrelay_consumer_action_next(&w->consumer, w->now_ns, &action))
    consumer_wants(w, &action);
  for (unsigned i = 0; i < CALLS; i++)
    if (w->calls[i].open)
      call_close(w, i);
}

/* ---- the consumer's side ---- */

static void ask(const world *w, const char *when, const char *model, const uint32_t *tokens) {
  kvrelay_answer answers[POOLS];
  uint64_t scratch[PROMPT_BLOCKS];
  kvrelay_query q;
  memset(&q, 0, sizeof q);
  q.model = text(model);
  q.tokens = tokens;
  q.tokens_len = PROMPT_BLOCKS * BLOCK_SIZE;
  const ptrdiff_t n =
      kvrelay_consumer_query(&w->consumer, &q, answers, POOLS, scratch, PROMPT_BLOCKS, w->now_ns);
  printf("%s, who holds a prompt of %s?", when, model);
  if (n < 0) /* without a catalog this relay may hold anything, too */
    printf(n == KVRELAY_ERR_STATE ? " unknown" : " nobody");
  for (ptrdiff_t i = 0; i < n; i++) {
    kvrelay_pool_view pool;
    need(kvrelay_consumer_pool_get(&w->consumer, answers[i].pool, w->now_ns, &pool) == KVRELAY_OK,
         "pool");
    const kvrelay_text name = pool.descriptor->serving_endpoint.component;
    printf(" %.*s ", (int)name.len, (const char *)name.ptr);
    if (answers[i].state == KVRELAY_ANSWER_KNOWN)
      printf("%" PRIu64 " of %" PRIu64 " blocks", answers[i].depth_blocks,
             answers[i].complete_blocks);
    else
      printf("unknown"); /* which is not 0: any number of blocks may be there */
  }
  printf("\n");
}

int main(void) {
  static world w;
  static uint32_t prompt[PROMPT_BLOCKS * BLOCK_SIZE];
  for (uint32_t i = 0; i < PROMPT_BLOCKS * BLOCK_SIZE; i++)
    prompt[i] = 1000 + i * i % 997;

  relay_open(&w);
  for (unsigned i = 0; i < POOLS; i++)
    relay_publishes(&w, i);
  data_centre_caches(&w.engines[0], prompt, 0, 7);
  data_centre_caches(&w.engines[1], prompt, 0, 25);

  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.follow_readiness = cfg.follow_load = false;
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  need(kvrelay_consumer_init(&w.consumer, &cfg, memory(&w, len), len, w.now_ns) == KVRELAY_OK,
       "consumer");
  ask(&w, "before the connection", "llama", prompt);

  w.room = 20000; /* bytes, enough for one replica */
  kvrelay_consumer_connected(&w.consumer, w.now_ns);
  talk(&w);
  ask(&w, "with room for one replica", "llama", prompt);

  w.room = 20000;
  w.now_ns = 2000000000; /* the consumer asks again after a while */
  talk(&w);
  ask(&w, "with room for both", "llama", prompt);

  data_centre_caches(&w.engines[0], prompt, 7, 32);
  need(kvrelay_relay_pool_publish(&w.relay, w.pools[0], w.now_ns) == KVRELAY_OK, "publish");
  talk(&w);
  ask(&w, "a delta later", "llama", prompt);
  ask(&w, "at the same time", "mistral", prompt);

  disconnect(&w);
  ask(&w, "after the connection", "llama", prompt);
  for (unsigned i = 0; i < POOLS; i++)
    free(w.engines[i].memory);
  while (w.blocks_len > 0)
    free(w.blocks[--w.blocks_len]);
  return 0;
}
