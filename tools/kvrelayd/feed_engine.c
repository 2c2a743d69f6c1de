/* SPDX-License-Identifier: Apache-2.0 */
/* The live stream of an engine's data-parallel rank. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "feed.h"
#include "log.h"
#include "serve.h"

static void on_batch(kvrelay_zmq_listener *self, kvrelay_text topic, uint64_t sequence,
                     const uint8_t *payload, size_t len, bool odd, uint64_t now_ns) {
  feed *f = (feed *)(void *)self;
  (void)topic; /* the source is known from the connection */
  kvrelay_source_count(&f->source, KVRELAY_COUNT_FRAMES, odd);
  if (feed_batch(f, sequence, payload, len, now_ns) != KVRELAY_OK)
    serve_pool_fence(f->pool, now_ns);
}

static void on_too_large(kvrelay_zmq_listener *self, uint64_t sequence, uint64_t now_ns) {
  feed *f = (feed *)(void *)self;
  if (feed_batch(f, sequence, NULL, 0, now_ns) != KVRELAY_OK)
    serve_pool_fence(f->pool, now_ns);
}

static void on_bad_frames(kvrelay_zmq_listener *self, uint64_t now_ns) {
  feed *f = (feed *)(void *)self;
  (void)now_ns;
  kvrelay_source_count(&f->source, KVRELAY_COUNT_FRAMES, 1);
}

/* A reconnect hides a restart of the engine: the source finds out by the next sequence. */
static void on_connection(kvrelay_zmq_listener *self, bool connected, uint64_t now_ns) {
  feed *f = (feed *)(void *)self;
  f->down_ns = connected ? 0 : now_ns;
  f->link = connected ? FEED_UP : f->link == FEED_NEVER ? FEED_NEVER : FEED_LOST;
  if (f->link != FEED_NEVER)
    f->link_ns = now_ns;
  if (connected)
    memset(f->attempts, 0, sizeof f->attempts);
  f->pool->serve->look_ns = 0; /* who is alive may be different now */
  int err = kvrelay_source_connection(&f->source, connected, now_ns);
  if (feed_drain(f, err, now_ns) != KVRELAY_OK)
    serve_pool_fence(f->pool, now_ns);
  feed_turn(f, now_ns); /* another process may be behind it */
  log_event(LOG_INFO, connected ? "source_connected" : "source_disconnected", "source=%s", f->name);
}

/* Nobody there yet is nothing to worry about for a while; feed_engine_watch says when it is. */
static void on_failed(kvrelay_zmq_listener *self, int failure, const char *text, uint64_t now_ns) {
  feed *f = (feed *)(void *)self;
  (void)now_ns;
  const uint64_t count = ++f->attempts[failure];
  if ((count & (count - 1)) == 0)
    log_event(failure == KVRELAY_ZMQ_UNREACHABLE ? LOG_DEBUG : LOG_WARN, "source_attempt",
              "source=%s reason=%s count=%" PRIu64 " note=\"%s\"", f->name,
              kvrelay_zmq_failure_name(failure), count, text);
}

static void on_turn(kvrelay_zmq_listener *self, uint64_t now_ns) {
  feed_turn((feed *)(void *)self, now_ns);
}

/* tcp: port + rank * step, which the configuration's rules keep in range; ipc and inproc: the
 * suffix engines give their own.  -1: too long. */
static int rank_endpoint(const feed *f, const char *endpoint, char out[512]) {
  uint32_t rank = f->rank - f->worker->rank_start;
  const char *colon = strrchr(endpoint, ':');
  if (rank == 0)
    return snprintf(out, 512, "%s", endpoint) < 512 ? 0 : -1;
  if (strncmp(endpoint, "tcp://", 6) != 0)
    return snprintf(out, 512, "%s_dp%" PRIu32, endpoint, rank) < 512 ? 0 : -1;
  unsigned long port =
      strtoul(colon + 1, NULL, 10) + (unsigned long)rank * f->worker->events.rank_port_step;
  return snprintf(out, 512, "%.*s:%lu", (int)(colon - endpoint), endpoint, port) < 512 ? 0 : -1;
}

/* Silence is all that a wrong address or port shows otherwise. */
void feed_engine_watch(feed *f, uint64_t now_ns) {
  char endpoint[512];
  bool unreachable = feed_liveness(f, now_ns) == KVRELAY_LIVENESS_DEAD;
  if (unreachable && !f->unreachable && rank_endpoint(f, f->worker->events.endpoint, endpoint) == 0)
    log_event(LOG_WARN, "source_unreachable", "source=%s endpoint=%s since_s=%" PRIu64 " before=%s",
              f->name, endpoint, (now_ns - f->link_ns) / 1000000000u,
              f->link == FEED_NEVER ? "never_reached" : "connected");
  f->unreachable = unreachable;
}

/* ---- the replay socket ---- */

static feed *feed_of_replies(kvrelay_zmq_listener *self) {
  return (feed *)(void *)((char *)self - offsetof(feed, replies));
}

static void on_reply(kvrelay_zmq_listener *self, kvrelay_text topic, uint64_t sequence,
                     const uint8_t *payload, size_t len, bool odd, uint64_t now_ns) {
  feed *f = feed_of_replies(self);
  (void)topic;
  (void)odd; /* a leading empty frame may be missing */
  int err = kvrelay_source_reply(&f->source, sequence, payload, len, now_ns);
  if (feed_drain(f, err, now_ns) != KVRELAY_OK)
    serve_pool_fence(f->pool, now_ns);
}

static void on_reply_too_large(kvrelay_zmq_listener *self, uint64_t sequence, uint64_t now_ns) {
  kvrelay_text none = {NULL, 0};
  on_reply(self, none, sequence, NULL, 0, false, now_ns);
}

static void on_reply_bad_frames(kvrelay_zmq_listener *self, uint64_t now_ns) {
  on_bad_frames(&feed_of_replies(self)->listener, now_ns);
}

static void on_replies_turn(kvrelay_zmq_listener *self, uint64_t now_ns) {
  feed_turn(feed_of_replies(self), now_ns);
}

void feed_engine_ask(feed *f, uint64_t first) {
  int err = kvrelay_zmq_replay_ask(f->replay, first);
  if (err != KVRELAY_TRANSPORT_OK)
    log_event(LOG_ERROR, "replay_failed", "source=%s error=\"%s\" system=\"%s\"", f->name,
              kvrelay_transport_strerror(err), zmq_strerror(errno));
  else
    log_event(LOG_INFO, "replay", "source=%s from=%" PRIu64, f->name, first);
}

static int open_replay(feed *f, struct event_base *base, void *zmq_context) {
  char endpoint[512];
  kvrelay_zmq_replay_config cfg = kvrelay_zmq_replay_config_default();
  f->replies.batch = on_reply;
  f->replies.too_large = on_reply_too_large;
  f->replies.bad_frames = on_reply_bad_frames;
  f->replies.turn = on_replies_turn;
  cfg.context = zmq_context;
  cfg.base = base;
  cfg.endpoint = endpoint;
  cfg.max_payload_bytes = (size_t)f->worker->events.max_payload_bytes;
  if (rank_endpoint(f, f->worker->events.replay, endpoint) == 0 &&
      kvrelay_zmq_replay_open(&cfg, &f->replies, &f->replay) == KVRELAY_TRANSPORT_OK)
    return 0;
  log_event(LOG_ERROR, "source_endpoint", "source=%s endpoint=%s error=\"not usable\"", f->name,
            f->worker->events.replay);
  return 78;
}

int feed_engine_connect(feed *f, struct event_base *base, void *zmq_context) {
  char endpoint[512];
  kvrelay_zmq_sub_config cfg = kvrelay_zmq_sub_config_default();
  if (rank_endpoint(f, f->worker->events.endpoint, endpoint) != 0) {
    log_event(LOG_ERROR, "source_endpoint", "source=%s endpoint=%s error=\"too long\"", f->name,
              f->worker->events.endpoint);
    return 78;
  }
  f->link_ns = kvrelay_now_ns();
  cfg.context = zmq_context;
  cfg.base = base;
  cfg.endpoint = endpoint;
  cfg.bind = f->worker->events.bind;
  cfg.topic = f->worker->events.topic;
  cfg.max_payload_bytes = (size_t)f->worker->events.max_payload_bytes;
  f->listener.batch = on_batch;
  f->listener.too_large = on_too_large;
  f->listener.bad_frames = on_bad_frames;
  f->listener.turn = on_turn;
  f->listener.connection = on_connection;
  f->listener.failed = on_failed;
  int err = kvrelay_zmq_sub_open(&cfg, &f->listener, &f->socket);
  if (err != KVRELAY_TRANSPORT_OK) {
    log_event(LOG_ERROR, "source_failed", "source=%s endpoint=%s error=\"%s\" system=\"%s\"",
              f->name, endpoint, kvrelay_transport_strerror(err), zmq_strerror(errno));
    return err == KVRELAY_TRANSPORT_ERR_ADDRESS ? 78 : 69;
  }
  log_event(LOG_INFO, "source", "source=%s endpoint=%s mode=%s", f->name, endpoint,
            cfg.bind ? "bind" : "connect");
  if (f->worker->events.replay == NULL)
    return 0;
  return open_replay(f, base, zmq_context);
}
