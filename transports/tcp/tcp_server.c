/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp_server.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tcp_link.h"

#define CALL_BUCKETS 64            /* stream numbers follow each other: they spread evenly */
#define TURN_BYTES ((size_t)16384) /* of one stream, then the next */
#define ACCEPTS_PER_TURN 64
#define ACCEPT_PAUSE_NS (KVRELAY_SECOND_NS / 10)

typedef struct server server;
typedef struct connection connection;
typedef struct server_call server_call;

struct server_call {
  kvrelay_call base;
  connection *conn;
  void *handle;
  LIST_ENTRY(server_call) bucket;
  TAILQ_ENTRY(server_call) ready;
  uint32_t stream;
  int32_t credit; /* from -2^31 + 13 on: one message below 0 */
  uint8_t *held;  /* the message that waits for credit; NULL: none */
  size_t held_len;
  bool is_ready, responded;
};

struct connection {
  kvrelay_tcp_link link; /* first */
  server *server;
  kvrelay_address peer;
  uint64_t idle_since_ns;
  uint64_t drain_until_ns;            /* KVRELAY_TIME_NONE: not draining */
  uint32_t max_frame, initial_credit; /* of the client */
  uint32_t calls_count;
  TAILQ_HEAD(, server_call) ready; /* those worth pulling, in turns */
  LIST_HEAD(, server_call) bucket[CALL_BUCKETS];
};

struct server {
  kvrelay_transport base; /* first */
  kvrelay_tcp_server_config cfg;
  kvrelay_service *service;
  kvrelay_tcp_hub hub;
  kvrelay_tcp_watch listener;
  kvrelay_address address;
  uint64_t refused_connections;
  uint32_t connections;
  bool stopping;
};

static connection *connection_of(const kvrelay_tcp_link *link) {
  return (connection *)(uintptr_t)link;
}

static server *server_of(const kvrelay_transport *t) { return (server *)(uintptr_t)t; }

static void say(const server *s, int level, const char *event, const connection *conn,
                const char *text) {
  kvrelay_log_connection((kvrelay_log){s->cfg.log, s->cfg.log_context}, level, event,
                         conn != NULL ? &conn->peer : NULL, conn != NULL ? conn->link.secure : NULL,
                         text);
}

/* ---- calls ---- */

static void call_ready(server_call *c) {
  if (!c->is_ready)
    TAILQ_INSERT_TAIL(&c->conn->ready, c, ready);
  c->is_ready = true;
  kvrelay_tcp_link_kick(&c->conn->link);
}

static void on_call_wake(kvrelay_call *call) { call_ready((server_call *)call); }

static server_call *call_find(connection *conn, uint32_t stream) {
  server_call *c;
  LIST_FOREACH(c, &conn->bucket[stream % CALL_BUCKETS], bucket)
  if (c->stream == stream)
    return c;
  return NULL;
}

static void call_close(server_call *c) {
  connection *conn = c->conn;
  kvrelay_service *service = conn->server->service;
  if (c->is_ready)
    TAILQ_REMOVE(&conn->ready, c, ready);
  LIST_REMOVE(c, bucket);
  service->close(service, c->handle, conn->link.hub->now_ns);
  free(c->held);
  free(c);
  if (--conn->calls_count > 0)
    return;
  conn->idle_since_ns = conn->link.hub->now_ns;
  kvrelay_tcp_link_rearm(&conn->link,
                         kvrelay_later_ns(conn->idle_since_ns, conn->server->cfg.idle_timeout_ns));
  if (conn->drain_until_ns != KVRELAY_TIME_NONE)
    kvrelay_tcp_link_finish(&conn->link, KVRELAY_TRANSPORT_CLOSED, conn->drain_until_ns);
}

static void put_end(connection *conn, uint32_t stream, const kvrelay_status *status) {
  uint8_t *to = kvrelay_tcp_link_put(&conn->link, KVRELAY_RAW_SMALL_CAP);
  if (to != NULL)
    kvrelay_tcp_link_put_done(&conn->link, kvrelay_raw_end_put(to, stream, status));
}

static void refuse(connection *conn, uint32_t stream, int32_t grpc, int32_t reason,
                   const char *text) {
  kvrelay_status status;
  (void)kvrelay_refuse(&status, grpc, text);
  status.reason = reason;
  put_end(conn, stream, &status);
}

static void call_end(server_call *c, const kvrelay_status *status) {
  put_end(c->conn, c->stream, status);
  call_close(c);
}

static void put_response(server_call *c) {
  static const kvrelay_parts empty;
  if (c->responded)
    return;
  c->responded = true;
  kvrelay_tcp_link_put_frame(&c->conn->link, KVRELAY_FRAME_RESPONSE, c->stream, 0, &empty);
}

static void end_too_large(server_call *c, size_t bytes) {
  kvrelay_status status;
  char text[KVRELAY_STATUS_TEXT_CAP];
  snprintf(text, sizeof text, "message of %zu bytes, the client takes %u", bytes,
           c->conn->max_frame);
  (void)kvrelay_refuse(&status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, text);
  status.reason = KVRELAY_REASON_RESOURCE_LIMIT;
  call_end(c, &status);
}

static void put_message(server_call *c, const kvrelay_parts *parts) {
  put_response(c);
  c->credit -= (int32_t)(parts->bytes + KVRELAY_RAW_HEADER_LEN);
  kvrelay_tcp_link_put_frame(&c->conn->link, KVRELAY_FRAME_MESSAGE, c->stream, 0, parts);
}

/* Without credit a message waits here: only behind it can be seen that the call ends, which needs
 * no credit. */
static void hold(server_call *c, const kvrelay_parts *parts) {
  c->held = malloc(parts->bytes + 1);
  if (c->held == NULL) {
    kvrelay_status status;
    (void)kvrelay_refuse(&status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    call_end(c, &status);
    return;
  }
  c->held_len = 0;
  for (size_t i = 0; i < parts->part_len; i++) {
    if (parts->part[i].len > 0)
      memcpy(c->held + c->held_len, parts->part[i].base, parts->part[i].len);
    c->held_len += parts->part[i].len;
  }
  put_response(c);
}

static void put_held(server_call *c) {
  const kvrelay_parts parts = {
      .part = {{c->held, c->held_len}}, .part_len = 1, .bytes = c->held_len};
  put_message(c, &parts);
  free(c->held);
  c->held = NULL;
}

/* Its messages until a turn is over: then the next stream. */
static void call_turn(server_call *c) {
  kvrelay_tcp_link *link = &c->conn->link;
  kvrelay_service *service = c->conn->server->service;
  kvrelay_parts parts;
  kvrelay_status status;
  if (c->held != NULL && c->credit <= 0)
    return;
  if (c->held != NULL)
    put_held(c);
  for (size_t spent = 0; spent < TURN_BYTES && kvrelay_tcp_link_has_room(link);
       spent += parts.bytes + KVRELAY_RAW_HEADER_LEN) {
    const int what = service->pull(service, c->handle, link->hub->now_ns, &parts, &status);
    if (what == KVRELAY_PULL_END) {
      call_end(c, &status);
      return;
    }
    if (what != KVRELAY_PULL_MESSAGE) {
      if (!c->responded && service->admitted(service, c->handle))
        put_response(c);
      return;
    }
    if (parts.bytes > c->conn->max_frame) {
      end_too_large(c, parts.bytes);
      return;
    }
    if (c->credit <= 0) {
      hold(c, &parts);
      return;
    }
    put_message(c, &parts);
  }
  call_ready(c);
}

static void on_fill(kvrelay_tcp_link *link) {
  connection *conn = connection_of(link);
  server_call *c;
  while (kvrelay_tcp_link_has_room(link) && (c = TAILQ_FIRST(&conn->ready)) != NULL) {
    TAILQ_REMOVE(&conn->ready, c, ready);
    c->is_ready = false;
    call_turn(c);
  }
}

/* ---- frames ---- */

static void protocol_error(connection *conn, const char *text) {
  kvrelay_tcp_link_abort(&conn->link, KVRELAY_GOAWAY_PROTOCOL_ERROR, text);
}

static void call_open(connection *conn, const kvrelay_frame *f) {
  kvrelay_service *service = conn->server->service;
  const uint64_t now = conn->link.hub->now_ns;
  const char *path = kvrelay_method_path(f->aux);
  kvrelay_status status;
  server_call *c = calloc(1, sizeof *c);
  if (c == NULL) {
    refuse(conn, f->stream, KVRELAY_GRPC_RESOURCE_EXHAUSTED, KVRELAY_REASON_NONE, "out of memory");
    return;
  }
  c->base = (kvrelay_call){.wake = on_call_wake, .max_message_bytes = conn->max_frame};
  c->conn = conn;
  c->stream = f->stream;
  c->credit = (int32_t)conn->initial_credit;
  LIST_INSERT_HEAD(&conn->bucket[f->stream % CALL_BUCKETS], c, bucket);
  conn->calls_count++;
  if (path == NULL)
    path = "";
  int err = service->open(service, &c->base, (const uint8_t *)path, strlen(path), now, &c->handle,
                          &status);
  if (err != KVRELAY_OK) { /* without a close */
    if (c->is_ready)
      TAILQ_REMOVE(&conn->ready, c, ready);
    LIST_REMOVE(c, bucket);
    conn->calls_count--;
    free(c);
    put_end(conn, f->stream, &status);
    return;
  }
  err = service->message(service, c->handle, f->piece, f->piece_len, now, &status);
  if (err == KVRELAY_OK)
    err = service->half_close(service, c->handle, now, &status);
  if (err == KVRELAY_OK)
    call_ready(c);
  else
    call_end(c, &status);
}

static void on_request(connection *conn, const kvrelay_frame *f) {
  if (f->stream <= conn->link.last_stream) {
    protocol_error(conn, "a stream number that was there before");
    return;
  }
  conn->link.last_stream = f->stream;
  if (conn->drain_until_ns != KVRELAY_TIME_NONE)
    refuse(conn, f->stream, KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_PUBLICATION_UNAVAILABLE,
           "shutting down");
  else if (conn->calls_count >= conn->server->cfg.max_streams)
    refuse(conn, f->stream, KVRELAY_GRPC_RESOURCE_EXHAUSTED, KVRELAY_REASON_RESOURCE_LIMIT,
           "too many streams of this connection");
  else
    call_open(conn, f);
}

static void on_credit(connection *conn, server_call *c, uint32_t bytes) {
  if (bytes == 0 || (int64_t)bytes + (c != NULL ? c->credit : 0) > INT32_MAX) {
    protocol_error(conn, "credit of nothing, or of too much");
    return;
  }
  if (c == NULL)
    return; /* it has ended meanwhile */
  const bool stalled = c->credit <= 0;
  c->credit = (int32_t)((int64_t)c->credit + bytes);
  if (stalled && c->credit > 0)
    call_ready(c);
}

static void on_cancel(server_call *c) {
  kvrelay_status status;
  if (c == NULL)
    return; /* the END is on its way */
  (void)kvrelay_refuse(&status, KVRELAY_GRPC_CANCELLED, "cancelled");
  call_end(c, &status);
}

static void on_goaway(connection *conn, const kvrelay_frame *f) {
  if (f->aux == KVRELAY_GOAWAY_SHUTDOWN)
    return; /* it closes when it likes */
  say(conn->server, KVRELAY_LOG_WARN, "connection_error", conn,
      f->aux == KVRELAY_GOAWAY_TOO_MANY_PINGS ? "the client says: too many pings"
      : f->aux == KVRELAY_GOAWAY_LIMIT        ? "the client says: frame above its limit"
                                              : "the client says: protocol error");
}

static void on_frame(kvrelay_tcp_link *link, const kvrelay_frame *f) {
  connection *conn = connection_of(link);
  if (f->type == KVRELAY_FRAME_REQUEST) {
    on_request(conn, f);
    return;
  }
  if (f->type == KVRELAY_FRAME_GOAWAY) {
    on_goaway(conn, f);
    return;
  }
  if (f->stream > conn->link.last_stream) {
    protocol_error(conn, "a stream that was never opened");
    return;
  }
  server_call *c = call_find(conn, f->stream);
  if (f->type == KVRELAY_FRAME_CREDIT)
    on_credit(conn, c, kvrelay_frame_u32(f));
  else
    on_cancel(c);
}

/* ---- connections ---- */

/* What somebody probably meant who does not speak this. */
static const char *likely_mistake(const uint8_t *bytes) {
  if (bytes[0] == 0x16)
    return "a TLS hello on a plaintext port";
  if (bytes[0] == 'P' && (bytes[1] == 'R' || bytes[1] == 0))
    return "HTTP/2 (gRPC) on a port of the raw transport";
  if (bytes[0] >= 'A' && bytes[0] <= 'Z')
    return "an HTTP/1.1 request on a port of the raw transport";
  return "not the raw transport";
}

static void put_preface(connection *conn, uint8_t version) {
  const server *s = conn->server;
  const kvrelay_raw_preface own = {.version = version,
                                   .lowest = KVRELAY_RAW_VERSION,
                                   .max_streams = s->cfg.max_streams,
                                   .max_frame = s->cfg.max_request_bytes};
  uint8_t *to = kvrelay_tcp_link_put(&conn->link, KVRELAY_RAW_PREFACE_LEN);
  if (to == NULL)
    return;
  kvrelay_raw_preface_put(to, &own);
  conn->link.cut = KVRELAY_RAW_PREFACE_LEN; /* nothing goes before it */
  kvrelay_tcp_link_put_done(&conn->link, KVRELAY_RAW_PREFACE_LEN);
}

static void on_preface(kvrelay_tcp_link *link, int err, const kvrelay_raw_preface *preface) {
  connection *conn = connection_of(link);
  switch (err) {
  case KVRELAY_OK:
    conn->max_frame = preface->max_frame;
    conn->initial_credit = preface->initial_credit;
    put_preface(conn, KVRELAY_RAW_VERSION);
    break;
  case KVRELAY_ERR_UNSUPPORTED:
    put_preface(conn, 0);
    snprintf(link->text, sizeof link->text, "no version in common, the client's are %u to %u",
             preface->lowest, preface->version);
    kvrelay_tcp_link_finish(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                            kvrelay_later_ns(link->hub->now_ns, KVRELAY_SECOND_NS));
    break;
  case KVRELAY_ERR_LIMIT:
    put_preface(conn, KVRELAY_RAW_VERSION);
    protocol_error(conn, "a preface with values out of range");
    break;
  default:
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL, likely_mistake(link->preface));
    break;
  }
}

static void drain(connection *conn, uint64_t grace_ns, const char *text) {
  conn->drain_until_ns =
      kvrelay_earlier_ns(conn->drain_until_ns, kvrelay_later_ns(conn->link.hub->now_ns, grace_ns));
  kvrelay_tcp_link_rearm(&conn->link, conn->drain_until_ns);
  if (conn->link.preface_len < KVRELAY_RAW_PREFACE_LEN) {
    kvrelay_tcp_link_fail(&conn->link, KVRELAY_TRANSPORT_CLOSED, text);
    return;
  }
  kvrelay_tcp_link_goaway(&conn->link, KVRELAY_GOAWAY_SHUTDOWN, text);
  if (conn->calls_count == 0)
    kvrelay_tcp_link_finish(&conn->link, KVRELAY_TRANSPORT_CLOSED, conn->drain_until_ns);
}

static uint64_t on_deadline_ns(const kvrelay_tcp_link *link) {
  const connection *conn = connection_of(link);
  if (conn->drain_until_ns != KVRELAY_TIME_NONE || conn->calls_count > 0)
    return conn->drain_until_ns;
  return kvrelay_later_ns(conn->idle_since_ns, conn->server->cfg.idle_timeout_ns);
}

static void on_tick(kvrelay_tcp_link *link, uint64_t now) {
  connection *conn = connection_of(link);
  if (now < on_deadline_ns(link))
    return;
  if (conn->drain_until_ns != KVRELAY_TIME_NONE)
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "grace time over");
  else
    drain(conn, KVRELAY_SECOND_NS, "idle");
}

static void connection_close(connection *conn) {
  for (size_t i = 0; i < CALL_BUCKETS; i++)
    for (server_call *c; (c = LIST_FIRST(&conn->bucket[i])) != NULL;)
      call_close(c);
  conn->server->connections--;
  kvrelay_tcp_link_close(&conn->link);
  free(conn);
}

static void on_gone(kvrelay_tcp_link *link) {
  connection *conn = connection_of(link);
  say(conn->server, kvrelay_log_level_of_end(link->err), "connection_closed", conn, link->text);
  connection_close(conn);
}

static void on_secured(kvrelay_tcp_link *link) {
  say(connection_of(link)->server, KVRELAY_LOG_DEBUG, "connection_secured", connection_of(link),
      "TLS");
}

static const kvrelay_tcp_link_events link_events = {on_preface, on_frame, on_fill,   on_deadline_ns,
                                                    on_tick,    on_gone,  on_secured};

static const char *refusal(const server *s, const kvrelay_address *peer) {
  const kvrelay_tcp_link *link;
  uint32_t count = 0;
  if (s->stopping)
    return "shutting down";
  if (s->connections >= s->cfg.max_connections)
    return "too many connections";
  TAILQ_FOREACH(link, &s->hub.links, entry)
  count += kvrelay_address_same_host(&connection_of(link)->peer, peer);
  return count >= s->cfg.max_connections_per_peer ? "too many connections of this peer" : NULL;
}

static void refuse_connection(server *s, int fd, kvrelay_secure_session *secure, const char *why) {
  const uint64_t n = ++s->refused_connections;
  if ((n & (n - 1)) == 0)
    say(s, KVRELAY_LOG_WARN, "connection_refused", NULL, why != NULL ? why : "no memory");
  if (secure != NULL)
    secure->close(secure);
  close(fd);
}

void kvrelay_tcp_server_adopt(kvrelay_transport *t, int fd, const kvrelay_address *peer,
                              kvrelay_secure_session *secure) {
  server *s = server_of(t);
  const kvrelay_tcp_link_config cfg = {.from_client = true,
                                       .max_frame = s->cfg.max_request_bytes,
                                       .preface_timeout_ns = s->cfg.preface_timeout_ns,
                                       .keepalive_interval_ns = s->cfg.keepalive_interval_ns,
                                       .keepalive_timeout_ns = s->cfg.keepalive_timeout_ns,
                                       .peer_ping_interval_ns = s->cfg.peer_ping_interval_ns,
                                       .security = secure == NULL ? s->cfg.security : NULL};
  const char *why = refusal(s, peer);
  connection *conn = why == NULL ? calloc(1, sizeof *conn) : NULL;
  if (conn == NULL) {
    refuse_connection(s, fd, secure, why);
    return;
  }
  const int one = 1;
  if (peer->storage.ss_family != AF_UNIX)
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  TAILQ_INIT(&conn->ready);
  conn->server = s;
  conn->peer = *peer;
  conn->idle_since_ns = kvrelay_now_ns();
  conn->drain_until_ns = KVRELAY_TIME_NONE;
  const int err = kvrelay_tcp_link_open(&conn->link, &s->hub, &link_events, &cfg, fd);
  if (err != KVRELAY_TRANSPORT_OK) {
    say(s, KVRELAY_LOG_ERROR, "connection_refused", conn,
        err == KVRELAY_TRANSPORT_ERR_SYSTEM ? strerror(errno) : kvrelay_transport_strerror(err));
    if (secure != NULL)
      secure->close(secure);
    free(conn);
    return;
  }
  if (secure != NULL)
    kvrelay_tcp_link_secure(&conn->link, secure);
  s->connections++;
  say(s, KVRELAY_LOG_DEBUG, "connection_opened", conn, "accepted");
}

static void on_acceptable(kvrelay_tcp_watch *watch, short events) {
  server *s = (server *)(void *)((uint8_t *)watch - offsetof(server, listener));
  (void)events;
  for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
    kvrelay_address peer;
    memset(&peer, 0, sizeof peer);
    peer.len = sizeof peer.storage;
    const int fd = accept4(watch->fd, (struct sockaddr *)&peer.storage, &peer.len,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      kvrelay_tcp_server_adopt(&s->base, fd, &peer, NULL);
      continue;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      /* The queue stays readable: without a pause this would spin. */
      say(s, KVRELAY_LOG_WARN, "accept_failed", NULL, strerror(errno));
      kvrelay_tcp_loop_want(&s->hub.loop, watch, 0);
      s->hub.alarm_ns = kvrelay_later_ns(s->hub.now_ns, ACCEPT_PAUSE_NS);
    }
    return;
  }
}

static void on_alarm(void *server_, uint64_t now_ns) {
  server *s = server_;
  (void)now_ns;
  if (s->listener.fd >= 0)
    kvrelay_tcp_loop_want(&s->hub.loop, &s->listener, POLLIN);
}

/* ---- the transport ---- */

static int on_run_once(kvrelay_transport *t, uint64_t timeout_ns) {
  server *s = server_of(t);
  if (s->stopping && s->connections == 0)
    return KVRELAY_TRANSPORT_CLOSED;
  return kvrelay_tcp_hub_run(&s->hub, timeout_ns);
}

static void on_wake(kvrelay_transport *t) { kvrelay_tcp_loop_wake(&server_of(t)->hub.loop); }

static void stop_listening(server *s) {
  if (s->listener.fd < 0)
    return;
  kvrelay_tcp_loop_unwatch(&s->hub.loop, &s->listener);
  close(s->listener.fd);
  s->listener.fd = -1;
  kvrelay_address_remove(&s->address);
}

static void on_stop(kvrelay_transport *t, uint64_t grace_ns) {
  server *s = server_of(t);
  kvrelay_tcp_link *link;
  s->stopping = true;
  s->hub.now_ns = kvrelay_now_ns();
  stop_listening(s);
  TAILQ_FOREACH(link, &s->hub.links, entry)
  drain(connection_of(link), kvrelay_earlier_ns(grace_ns, KVRELAY_GRACE_MAX_NS), "shutdown");
}

static void on_close(kvrelay_transport *t) {
  server *s = server_of(t);
  for (kvrelay_tcp_link *link; (link = TAILQ_FIRST(&s->hub.links)) != NULL;)
    connection_close(connection_of(link));
  stop_listening(s);
  kvrelay_tcp_hub_close(&s->hub);
  free(s);
}

static uint64_t on_now_ns(const kvrelay_transport *t) {
  (void)t;
  return kvrelay_now_ns();
}

static int listen_on(server *s, const char *text) {
  int fd;
  int err = kvrelay_address_listen(text, &s->address, &fd);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  s->listener = (kvrelay_tcp_watch){.fd = fd, .wants = POLLIN, .ready = on_acceptable};
  err = kvrelay_tcp_loop_watch(&s->hub.loop, &s->listener);
  if (err == KVRELAY_TRANSPORT_OK)
    return err;
  const int saved = errno;
  close(fd);
  kvrelay_address_remove(&s->address);
  s->listener.fd = -1;
  errno = saved;
  return err;
}

kvrelay_tcp_server_config kvrelay_tcp_server_config_default(void) {
  return (kvrelay_tcp_server_config){
      .max_request_bytes = 65536,
      .max_streams = 1024,
      .max_connections = 1024,
      .max_connections_per_peer = 256,
      .preface_timeout_ns = 10 * KVRELAY_SECOND_NS,
      .keepalive_interval_ns = 20 * KVRELAY_SECOND_NS,
      .keepalive_timeout_ns = 10 * KVRELAY_SECOND_NS,
      .peer_ping_interval_ns = 10 * KVRELAY_SECOND_NS,
      .idle_timeout_ns = 300 * KVRELAY_SECOND_NS,
  };
}

int kvrelay_tcp_server_open(const kvrelay_tcp_server_config *cfg, kvrelay_service *service,
                            kvrelay_transport **out) {
  if (cfg == NULL || service == NULL || out == NULL ||
      cfg->max_request_bytes < KVRELAY_RAW_FRAME_MIN || cfg->max_request_bytes > INT32_MAX ||
      cfg->max_streams == 0 || cfg->max_connections == 0 || cfg->max_connections_per_peer == 0)
    return KVRELAY_TRANSPORT_ERR_ARG;
  server *s = calloc(1, sizeof *s);
  if (s == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  s->base = (kvrelay_transport){on_run_once, on_wake, on_stop, on_close, on_now_ns};
  s->cfg = *cfg;
  s->service = service;
  s->listener.fd = -1;
  int err = kvrelay_tcp_hub_open(&s->hub, on_alarm, s);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(s);
    return err;
  }
  if (cfg->bind != NULL)
    err = listen_on(s, cfg->bind);
  if (err != KVRELAY_TRANSPORT_OK) {
    const int saved = errno;
    on_close(&s->base);
    errno = saved;
    return err;
  }
  *out = &s->base;
  return KVRELAY_TRANSPORT_OK;
}

void kvrelay_tcp_server_address(const kvrelay_transport *t, char *out, size_t cap) {
  char text[KVRELAY_ADDRESS_CAP];
  kvrelay_address_format(&server_of(t)->address, text);
  snprintf(out, cap, "%s", text);
}

uint32_t kvrelay_tcp_server_connections(const kvrelay_transport *t) {
  return server_of(t)->connections;
}

int kvrelay_tcp_server_fd(const kvrelay_transport *t) {
  return kvrelay_tcp_loop_fd(&server_of(t)->hub.loop);
}

uint64_t kvrelay_tcp_server_deadline_ns(const kvrelay_transport *t) {
  const server *s = server_of(t);
  /* The next turn says that it was the last. */
  return s->stopping && s->connections == 0 ? 0 : kvrelay_tcp_hub_deadline_ns(&s->hub);
}
