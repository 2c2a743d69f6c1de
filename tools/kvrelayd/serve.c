/* SPDX-License-Identifier: Apache-2.0 */
#include "serve.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <zmq.h>

#include "kvrelay_pb.h"
#include "log.h"

/* Room the decoder may use for the tokens of one event; larger events are counted and skipped. */
#define SERVE_MAX_EVENT_TOKENS ((size_t)1 << 20)

void *serve_pages(serve *s, size_t bytes) {
  if (bytes == 0)
    return NULL;
  void *mem =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mem == MAP_FAILED)
    return NULL;
  s->worst_case_bytes += bytes;
  return mem;
}

void serve_pages_free(void *mem, size_t bytes) {
  if (mem != NULL)
    munmap(mem, bytes);
}

/* Of identities nothing is guessed: without random bits there is no relay. */
static bool random_id(uint64_t *id) {
  if (getrandom(id, sizeof *id, 0) != (ssize_t)sizeof *id) {
    log_event(LOG_ERROR, "no_random", "error=\"%s\"", strerror(errno));
    return false;
  }
  *id &= INT64_MAX; /* the contract clears the top bit */
  return true;
}

/* ---- one pool ---- */

static uint32_t state_limit(uint64_t expected_blocks, uint64_t times) {
  uint64_t limit = times * expected_blocks + 4096;
  return limit > UINT32_MAX / 4 ? UINT32_MAX / 4 : (uint32_t)limit;
}

static ckf_producer_config producer_config(const plan_pool *p) {
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = p->endpoint->expected_unique_blocks;
  cfg.filter.publish_every_n_events = kvrelay_relay_config_default().publication_threshold;
  cfg.delta_table = true;
  cfg.tags = true; /* engine events need them */
  /* Room beyond the filter's: a block that found no place in it still has owners and children. */
  cfg.max_blocks = state_limit(p->endpoint->expected_unique_blocks, 2);
  cfg.max_mappings = state_limit(p->endpoint->expected_unique_blocks, 4);
  return cfg;
}

/* The ranks of all workers, to be freed; NULL without memory. */
static kvrelay_rank_range *rank_ranges(const config_endpoint *e) {
  kvrelay_rank_range *ranges = calloc(e->workers_count + 1u, sizeof *ranges);
  for (unsigned i = 0; ranges != NULL && i < e->workers_count; i++)
    ranges[i] = (kvrelay_rank_range){e->workers[i].id, e->workers[i].rank_start,
                                     e->workers[i].ranks, e->workers[i].total_kv_blocks};
  return ranges;
}

/* What they use nobody reports yet. */
static int declare_ranks(served_pool *pool) {
  const config_endpoint *e = pool->plan->endpoint;
  kvrelay_rank_range *ranges = rank_ranges(e);
  int err = ranges == NULL ? KVRELAY_ERR_NOSPACE
                           : kvrelay_pool_set_ranks(pool->pool, ranges, e->workers_count,
                                                    pool->ranks_mem, pool->ranks_len);
  free(ranges);
  return err;
}

static bool selected(const served_pool *pool) {
  return scope_has(pool->serve->scope, pool->plan->descriptor.serving_endpoint.namespace_);
}

/* At most what a pool adds to a catalog, with what the relay fills in at its longest. */
static size_t catalog_share(const kvrelay_descriptor *d) {
  kvrelay_descriptor whole = *d;
  kvrelay_producer *p = &whole.producer;
  whole.serving_endpoint.present = whole.query_semantics.present = true;
  p->present = p->pool_id.present = p->ckf_format.present = true;
  p->producer_incarnation = p->layout_generation = UINT64_MAX;
  p->ckf_format =
      (kvrelay_ckf_format){true, UINT32_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX};
  const ptrdiff_t len = kvrelay_pb_encode_descriptor(&whole, NULL, 0);
  return (len > 0 ? (size_t)len : 0) + 6; /* the field's number and length */
}

static void withdraw(served_pool *pool, uint64_t now_ns) {
  if (pool->pool == NULL)
    return;
  kvrelay_relay_pool_remove(&pool->serve->relay, pool->pool, now_ns);
  pool->serve->catalog_bytes -= catalog_share(&pool->plan->descriptor);
  pool->pool = NULL;
}

/* Puts a pool whose producer is built where readers find it, when it is within the scope; after an
 * error, a log line, they do not. */
static int enlist(served_pool *pool, uint64_t now_ns) {
  serve *s = pool->serve;
  const kvrelay_descriptor *d = &pool->plan->descriptor;
  if (!selected(pool))
    return KVRELAY_OK;
  const size_t share = catalog_share(d);
  if (share > s->catalog_limit - s->catalog_bytes) { /* the others stay readable */
    s->catalog_full++;
    log_event(LOG_ERROR, "catalog_full", "pool=%s pools_left_out=%" PRIu64 " limit_bytes=%zu",
              pool->name, s->catalog_full, s->catalog_limit);
    return KVRELAY_OK;
  }
  int err = kvrelay_relay_pool_add(&s->relay, d, &pool->producer, pool->pool_mem,
                                   kvrelay_relay_pool_mem_size(&s->relay, d), now_ns, &pool->pool);
  if (err == KVRELAY_OK) {
    s->catalog_bytes += share;
    err = declare_ranks(pool);
  }
  if (err == KVRELAY_OK)
    return err;
  withdraw(pool, now_ns);
  log_event(LOG_ERROR, "pool_not_published", "pool=%s error=\"%s\"", pool->name,
            kvrelay_strerror(err));
  return err;
}

static int publish(served_pool *pool, uint64_t now_ns) {
  ckf_producer_config cfg = producer_config(pool->plan);
  if (!random_id(&cfg.hash_seed))
    return KVRELAY_ERR_STATE;
  int err =
      ckf_producer_init(&pool->producer, &cfg, pool->producer_mem, ckf_producer_mem_size(&cfg));
  if (err == CKF_OK)
    return enlist(pool, now_ns);
  log_event(LOG_ERROR, "pool_not_published", "pool=%s error=\"%s\"", pool->name, ckf_strerror(err));
  return err;
}

/* One that fails does not keep the others from starting. */
static bool start_feeds(served_pool *pool, uint64_t now_ns) {
  bool all = true;
  for (unsigned i = 0; i < pool->feeds_count; i++) {
    const int err = feed_start(&pool->feeds[i], now_ns);
    if (err != KVRELAY_OK)
      log_event(LOG_ERROR, "source_not_started", "source=%s error=\"%s\"", pool->feeds[i].name,
                kvrelay_strerror(err));
    all = all && err == KVRELAY_OK;
  }
  return all;
}

static unsigned sockets_of(const config_worker *w) {
  if (w->events.type == CONFIG_EVENTS_NONE)
    return 0;
  if (w->ranks == 0)
    return 0; /* the file said something impossible, and was warned about it */
  bool per_rank = w->events.type == CONFIG_EVENTS_ENGINE && w->events.rank_port_step != 0;
  return per_rank ? w->ranks : 1;
}

static int reserve_feeds(served_pool *pool) {
  const config_endpoint *e = pool->plan->endpoint;
  unsigned count = 0;
  for (unsigned i = 0; i < e->workers_count; i++)
    count += sockets_of(&e->workers[i]);
  pool->feeds = calloc(count + 1u, sizeof *pool->feeds);
  if (pool->feeds == NULL)
    return 71;
  for (unsigned i = 0; i < e->workers_count; i++)
    for (unsigned r = 0; r < sockets_of(&e->workers[i]); r++) {
      int code = feed_reserve(&pool->feeds[pool->feeds_count++], pool, &e->workers[i],
                              e->workers[i].rank_start + r);
      if (code != 0)
        return code;
    }
  return 0;
}

static int reserve_pool(serve *s, served_pool *pool, const plan_pool *p) {
  pool->plan = p;
  pool->serve = s;
  snprintf(pool->name, sizeof pool->name, "%s/%s/%s", p->endpoint->namespace_,
           p->endpoint->component, p->endpoint->endpoint);
  ckf_producer_config cfg = producer_config(p);
  kvrelay_rank_range *ranges = rank_ranges(p->endpoint);
  size_t producer_len = ckf_producer_mem_size(&cfg),
         pool_len = kvrelay_relay_pool_mem_size(&s->relay, &p->descriptor);
  if (ranges != NULL)
    pool->ranks_len = kvrelay_pool_ranks_mem_size(ranges, p->endpoint->workers_count);
  free(ranges);
  pool->producer_mem = serve_pages(s, producer_len);
  pool->pool_mem = serve_pages(s, pool_len);
  pool->ranks_mem = serve_pages(s, pool->ranks_len);
  if (pool->producer_mem == NULL || pool->pool_mem == NULL || pool->ranks_mem == NULL) {
    log_event(LOG_ERROR, "no_memory", "pool=%s bytes=%zu", pool->name,
              producer_len + pool_len + pool->ranks_len);
    return 71;
  }
  return reserve_feeds(pool);
}

static int open_pool(served_pool *pool, uint64_t now_ns) {
  return publish(pool, now_ns) == KVRELAY_OK && start_feeds(pool, now_ns) ? 0 : 70;
}

void serve_pool_fence(served_pool *pool, uint64_t now_ns) {
  log_event(LOG_ERROR, "producer_fenced", "pool=%s note=\"starts again, empty\"", pool->name);
  withdraw(pool, now_ns);
  (void)publish(pool, now_ns);
  (void)start_feeds(pool, now_ns); /* published or not, they read into the new producer */
}

void serve_pool_changed(served_pool *pool, uint64_t now_ns) {
  if (pool->pool != NULL &&
      kvrelay_relay_pool_changed(&pool->serve->relay, pool->pool, now_ns) != KVRELAY_OK)
    serve_pool_fence(pool, now_ns);
}

void serve_scope_changed(serve *s, uint64_t now_ns) {
  for (unsigned i = 0; i < s->pools_count; i++) {
    served_pool *pool = &s->pools[i];
    if (selected(pool) == (pool->pool != NULL))
      continue;
    log_event(LOG_INFO, pool->pool == NULL ? "pool_selected" : "pool_left_out", "pool=%s",
              pool->name);
    withdraw(pool, now_ns);
    (void)enlist(pool, now_ns); /* tried again when the scope changes again */
  }
  s->topology.told = false;
  topology_poll(&s->topology, s, now_ns);
}

void serve_poll(serve *s, uint64_t now_ns) {
  uint64_t fenced = kvrelay_relay_stats_get(&s->relay).producers_fenced;
  for (unsigned i = 0; i < s->pools_count && fenced != s->fenced_seen; i++)
    if (s->pools[i].pool != NULL && kvrelay_pool_fenced(s->pools[i].pool) != KVRELAY_OK)
      serve_pool_fence(&s->pools[i], now_ns);
  s->fenced_seen = fenced;
  if (s->look_ns <= now_ns) {
    s->look_ns = KVRELAY_TIME_NONE;
    for (unsigned i = 0; i < s->pools_count; i++)
      for (unsigned j = 0; j < s->pools[i].feeds_count; j++)
        feed_stir(&s->pools[i].feeds[j]);
    topology_poll(&s->topology, s, now_ns);
  }
  feed *f = s->stirred;
  s->stirred = NULL;
  for (; f != NULL; f = f->stirred_next) {
    feed_tick(f, now_ns);
    f->stirred = false;
    const uint64_t due_ns = feed_deadline_ns(f, now_ns);
    s->look_ns = due_ns < s->look_ns ? due_ns : s->look_ns;
  }
}

uint64_t serve_deadline_ns(const serve *s) {
  const uint64_t relay_ns = kvrelay_relay_deadline_ns(&s->relay);
  if (s->stirred != NULL || s->fenced_seen != kvrelay_relay_stats_get(&s->relay).producers_fenced)
    return 0;
  return s->look_ns < relay_ns ? s->look_ns : relay_ns;
}

/* ---- the whole daemon ---- */

static int open_relay(serve *s, const plan *p, uint64_t now_ns) {
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  if (!random_id(&cfg.identity.drt_instance_id) || !random_id(&cfg.identity.relay_incarnation))
    return 71;
  cfg.max_bucket_count = 2;
  for (unsigned i = 0; i < p->pools_count; i++) {
    uint64_t buckets = 0;
    ckf_producer_config producer = producer_config(&p->pools[i]);
    if (ckf_config_check(&producer.filter, &buckets) == CKF_OK && buckets > cfg.max_bucket_count)
      cfg.max_bucket_count = buckets;
  }
  s->relay_len = kvrelay_relay_mem_size(&cfg);
  s->relay_mem = serve_pages(s, s->relay_len);
  if (s->relay_mem == NULL)
    return 71;
  return kvrelay_relay_init(&s->relay, &cfg, s->relay_mem, s->relay_len, now_ns) == KVRELAY_OK ? 0
                                                                                               : 70;
}

static int open_decoder(serve *s) {
  size_t bytes = kvrelay_engine_decoder_mem_size(SERVE_MAX_EVENT_TOKENS);
  s->decoder_mem = serve_pages(s, bytes);
  if (s->decoder_mem == NULL)
    return 71;
  return kvrelay_engine_decoder_init(&s->decoder, SERVE_MAX_EVENT_TOKENS, s->decoder_mem, bytes) ==
                 KVRELAY_OK
             ? 0
             : 70;
}

static int read_traces(serve *s) {
  int code = 0;
  for (unsigned i = 0; i < s->pools_count && code == 0; i++)
    for (unsigned j = 0; j < s->pools[i].feeds_count && code == 0; j++)
      if (s->pools[i].feeds[j].worker->events.type == CONFIG_EVENTS_TRACE)
        code = feed_trace_read(&s->pools[i].feeds[j]);
  return code;
}

int serve_reserve(serve *s, const plan *p) {
  memset(s, 0, sizeof *s);
  s->plan = p;
  s->catalog_limit = KVRELAY_PB_MESSAGE_MAX - 1024;
  s->pools = calloc(p->pools_count + 1u, sizeof *s->pools);
  int code = s->pools == NULL ? 71 : open_relay(s, p, kvrelay_now_ns());
  if (code == 0)
    code = open_decoder(s);
  if (code != 0)
    log_event(LOG_ERROR, "no_memory", "what=relay bytes=%zu", s->relay_len);
  for (unsigned i = 0; i < p->pools_count && code == 0; i++)
    if (p->pools[i].no_pool == NULL)
      code = reserve_pool(s, &s->pools[s->pools_count++], &p->pools[i]);
  return code;
}

int serve_open(serve *s, const scope *within) {
  uint64_t now_ns = kvrelay_now_ns();
  int code = 0;
  s->scope = within;
  log_event(LOG_INFO, "memory", "worst_case_bytes=%zu pools=%u", s->worst_case_bytes,
            s->pools_count);
  for (unsigned i = 0; i < s->pools_count && code == 0; i++)
    code = open_pool(&s->pools[i], now_ns);
  if (code == 0)
    code = read_traces(s);
  if (code == 0)
    code = topology_open(&s->topology, s->plan);
  if (code == 0)
    topology_poll(&s->topology, s, now_ns);
  return code;
}

int serve_connect(serve *s, struct event_base *base) {
  int code = 0;
  s->zmq_context = zmq_ctx_new();
  if (s->zmq_context == NULL)
    return 71;
  for (unsigned i = 0; i < s->pools_count && code == 0; i++)
    for (unsigned j = 0; j < s->pools[i].feeds_count && code == 0; j++)
      if (s->pools[i].feeds[j].worker->events.type == CONFIG_EVENTS_ENGINE)
        code = feed_engine_connect(&s->pools[i].feeds[j], base, s->zmq_context);
  return code;
}

void serve_close(serve *s) {
  for (unsigned i = 0; i < s->pools_count; i++) {
    served_pool *pool = &s->pools[i];
    ckf_producer_config cfg = producer_config(pool->plan);
    for (unsigned j = 0; j < pool->feeds_count; j++)
      feed_close(&pool->feeds[j]);
    free(pool->feeds);
    serve_pages_free(pool->pool_mem,
                     kvrelay_relay_pool_mem_size(&s->relay, &pool->plan->descriptor));
    serve_pages_free(pool->producer_mem, ckf_producer_mem_size(&cfg));
    serve_pages_free(pool->ranks_mem, pool->ranks_len);
  }
  free(s->pools);
  topology_close(&s->topology);
  serve_pages_free(s->decoder_mem, kvrelay_engine_decoder_mem_size(SERVE_MAX_EVENT_TOKENS));
  serve_pages_free(s->relay_mem, s->relay_len);
  if (s->zmq_context != NULL)
    zmq_ctx_term(s->zmq_context);
}
