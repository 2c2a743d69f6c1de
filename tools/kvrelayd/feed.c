/* SPDX-License-Identifier: Apache-2.0 */
#include "feed.h"

#include <inttypes.h>
#include <string.h>

#include "log.h"
#include "serve.h"

static kvrelay_source_config source_config(const feed *f) {
  const config_endpoint *e = f->pool->plan->endpoint;
  const config_events *ev = &f->worker->events;
  kvrelay_source_config c = kvrelay_source_config_default();
  c.worker_id = f->worker->id;
  c.default_rank = f->rank;
  c.rank_start = f->worker->rank_start;
  c.ranks = f->worker->ranks;
  c.block_size = e->block_size;
  c.hash_format = e->hash_format;
  c.on_loss = ev->on_loss;
  c.mm_identifiers = ev->mm_identifiers;
  c.untagged_salt = ev->untagged_salt;
  c.deduplicated = ev->source_kind != 0;
  c.partial_memory = ev->partial_memory;
  c.replay = ev->replay != NULL;
  c.hold_batches = ev->hold_batches;
  c.hold_bytes = ev->hold_bytes;
  c.replay_timeout_ns = ev->replay_timeout_s * 1000000000u;
  c.recovery_interval_ns = ev->recovery_interval_s * 1000000000u;
  c.has_image_token_id = ev->image_token_id != NULL;
  c.has_video_token_id = ev->video_token_id != NULL;
  c.has_main_group = ev->main_group != NULL;
  c.image_token_id = c.has_image_token_id ? *ev->image_token_id : 0;
  c.video_token_id = c.has_video_token_id ? *ev->video_token_id : 0;
  c.main_group = c.has_main_group ? *ev->main_group : 0;
  return c;
}

int feed_reserve(feed *f, struct served_pool *pool, const config_worker *worker, uint32_t rank) {
  f->pool = pool;
  f->worker = worker;
  f->rank = rank;
  snprintf(f->name, sizeof f->name, "%s/%" PRIu64 ".%" PRIu32, pool->name, worker->id, rank);
  kvrelay_source_config c = source_config(f);
  f->source_len = kvrelay_source_mem_size(&c);
  f->source_mem = serve_pages(pool->serve, f->source_len);
  if (f->source_mem != NULL)
    return 0;
  log_event(LOG_ERROR, "no_memory", "source=%s bytes=%zu", f->name, f->source_len);
  return 71;
}

#define LIVENESS_GRACE_NS UINT64_C(10000000000) /* of an engine that was never reached */
#define LIVENESS_DOWN_NS UINT64_C(5000000000)   /* of one that was lost */

/* When that may change by itself, KVRELAY_TIME_NONE = never. */
static uint64_t liveness_deadline_ns(const feed *f) {
  if (f->worker->events.type != CONFIG_EVENTS_ENGINE || f->link == FEED_UP || f->link_ns == 0)
    return KVRELAY_TIME_NONE;
  return f->link_ns + (f->link == FEED_LOST ? LIVENESS_DOWN_NS : LIVENESS_GRACE_NS);
}

int32_t feed_liveness(const feed *f, uint64_t now_ns) {
  if (f->worker->events.type != CONFIG_EVENTS_ENGINE)
    return KVRELAY_LIVENESS_UNKNOWN; /* a recording tells nothing of today */
  if (f->link == FEED_UP)
    return KVRELAY_LIVENESS_LIVE;
  if (now_ns >= liveness_deadline_ns(f))
    return KVRELAY_LIVENESS_DEAD;
  return f->link == FEED_LOST ? KVRELAY_LIVENESS_LIVE : KVRELAY_LIVENESS_UNKNOWN;
}

void feed_close(feed *f) {
  kvrelay_zmq_sub_close(f->socket);
  kvrelay_zmq_replay_close(f->replay);
  f->socket = NULL;
  f->replay = NULL;
  serve_pages_free(f->source_mem, f->source_len);
  f->source_mem = NULL;
}

int feed_start(feed *f, uint64_t now_ns) {
  kvrelay_source_config c = source_config(f);
  memset(f->logged, 0, sizeof f->logged);
  feed_stir(f);
  return kvrelay_source_init(&f->source, &c, &f->pool->producer, f->source_mem, f->source_len,
                             now_ns);
}

int feed_batch(feed *f, uint64_t sequence, const uint8_t *payload, size_t len, uint64_t now_ns) {
  f->dirty = true;
  feed_stir(f);
  return kvrelay_engine_feed(&f->pool->serve->decoder, &f->source, sequence, payload, len, now_ns);
}

int feed_drain(feed *f, int err, uint64_t now_ns) {
  f->dirty = true;
  feed_stir(f);
  return err == KVRELAY_OK ? kvrelay_engine_drain(&f->pool->serve->decoder, &f->source, now_ns)
                           : err;
}

void feed_turn(feed *f, uint64_t now_ns) {
  if (f->dirty)
    serve_pool_changed(f->pool, now_ns);
  f->dirty = false;
  feed_report(f);
}

/* The largest power of two in a count, 0 for none: what was already said about it. */
static uint64_t power_below(uint64_t n) {
  while ((n & (n - 1)) != 0)
    n &= n - 1;
  return n;
}

void feed_report(feed *f) {
  const kvrelay_source_stats *stats = kvrelay_source_stats_get(&f->source);
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++) {
    uint64_t power = power_below(stats->counts[i]);
    if (power == f->logged[i])
      continue;
    f->logged[i] = power;
    /* Healthy engines do these all the time; but when all blocks are smaller than the pool's, its
     * block size is wrong. */
    bool normal = i == KVRELAY_COUNT_OTHER_TIER ||
                  (i == KVRELAY_COUNT_SUB_BLOCK && stats->blocks_stored != 0) ||
                  i == KVRELAY_COUNT_PLACEHOLDER || i == KVRELAY_COUNT_NON_MAIN_ATTENTION_KIND ||
                  i == KVRELAY_COUNT_NON_MAIN_ATTENTION_GROUP || i == KVRELAY_COUNT_PARTIAL_BLOCK ||
                  i == KVRELAY_COUNT_IGNORED_EVENT;
    char sizes[64] = "";
    if (i == KVRELAY_COUNT_BLOCK_SIZE_MISMATCH)
      snprintf(sizes, sizeof sizes, " event_block_size=%" PRIu32 " pool_block_size=%" PRIu32,
               stats->other_block_size, f->pool->plan->endpoint->block_size);
    log_event(normal ? LOG_DEBUG : LOG_WARN, "ingest", "source=%s reason=%s count=%" PRIu64 "%s",
              f->name, kvrelay_count_name(i), stats->counts[i], sizes);
  }
}

void feed_stir(feed *f) {
  if (f->stirred)
    return;
  f->stirred = true;
  f->stirred_next = f->pool->serve->stirred;
  f->pool->serve->stirred = f;
}

/* When the blocks of a source that cannot be reached go, KVRELAY_TIME_NONE = never. */
static uint64_t forget_ns(const feed *f) {
  const uint64_t keep_ns = f->worker->events.disconnect_keep_s * 1000000000u;
  return f->down_ns == 0 || keep_ns == 0 ? KVRELAY_TIME_NONE : f->down_ns + keep_ns;
}

static void forget(feed *f, uint64_t now_ns) {
  f->down_ns = 0;
  log_event(LOG_WARN, "source_forgotten", "source=%s disconnected_s=%" PRIu64, f->name,
            f->worker->events.disconnect_keep_s);
  if (kvrelay_source_clear(&f->source, now_ns) != KVRELAY_OK)
    serve_pool_fence(f->pool, now_ns);
  else
    serve_pool_changed(f->pool, now_ns);
}

void feed_tick(feed *f, uint64_t now_ns) {
  uint64_t due_ns = kvrelay_source_deadline_ns(&f->source);
  if (due_ns != KVRELAY_TIME_NONE && due_ns <= now_ns) {
    if (feed_drain(f, kvrelay_source_tick(&f->source, now_ns), now_ns) != KVRELAY_OK)
      serve_pool_fence(f->pool, now_ns);
    feed_turn(f, now_ns);
  }
  feed_engine_watch(f, now_ns);
  if (forget_ns(f) <= now_ns)
    forget(f, now_ns);
  uint64_t first;
  if (f->replay != NULL && kvrelay_source_request(&f->source, &first) == 1)
    feed_engine_ask(f, first);
  else if (f->replay != NULL && kvrelay_source_state(&f->source) != KVRELAY_SOURCE_REPLAY)
    kvrelay_zmq_replay_stop(f->replay);
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

uint64_t feed_deadline_ns(const feed *f, uint64_t now_ns) {
  const uint64_t dead_ns = liveness_deadline_ns(f);
  const uint64_t due_ns = earlier(kvrelay_source_deadline_ns(&f->source), forget_ns(f));
  return dead_ns > now_ns ? earlier(due_ns, dead_ns) : due_ns;
}
