/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_server.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "../address.h"
#include "grpc_link.h"
#include "grpc_message.h"

#define SECOND_NS UINT64_C(1000000000)
#define MAX_HEADER_LIST_BYTES ((size_t)16384)
#define CONNECTION_WINDOW (1 << 20)
/* Frames that get nothing done, in a row, before the peer is told to calm down. */
#define MAX_IDLE_FRAMES 10000
#define MAX_PING_STRIKES 2
/* Frames that may wait, besides one per stream, for a peer that sends and does not read. */
#define MAX_QUEUED_FRAMES 10000
#define DRAIN_PING_NS SECOND_NS
#define MAX_GRACE_NS (4 * SECOND_NS)
#define ACCEPT_PAUSE_NS (SECOND_NS / 10)
#define ACCEPTS_PER_TURN 64

static const uint8_t keepalive_ping[8] = "kvrelay";
static const uint8_t drain_ping[8] = "kvdrain";
static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

typedef struct server server;
typedef struct connection connection;
typedef struct server_call server_call;
TAILQ_HEAD(call_list, server_call);
TAILQ_HEAD(connection_list, connection);

struct server_call {
  kvrelay_call base;
  connection *conn;
  void *handle;
  TAILQ_ENTRY(server_call) link;
  TAILQ_ENTRY(server_call) woken;
  kvrelay_grpc_inbox inbox;
  kvrelay_grpc_outbox outbox;
  nghttp2_rcbuf *path;
  struct event *deadline;
  uint64_t timeout_ns; /* as asked for */
  size_t header_bytes;
  kvrelay_status status; /* valid once ended */
  int32_t stream;
  uint8_t content; /* enum kvrelay_grpc_content */
  bool post, bad_timeout, compressed;
  bool accepted;     /* the service knows it and has not been told of its end */
  bool headers_sent; /* the data provider is in charge */
  bool deferred;     /* nghttp2 waits for a resume */
  bool ended;        /* the status is known */
  bool is_woken;
};

enum drain_state { DRAIN_NONE = 0, DRAIN_NOTICE, DRAIN_FINAL };

struct connection {
  kvrelay_grpc_link link; /* first */
  server *server;
  TAILQ_ENTRY(connection) entry;
  struct call_list calls;
  uint32_t calls_count;
  uint32_t idle_frames;
  uint64_t opened_ns, idle_since_ns;
  uint64_t ping_at_ns;   /* next keepalive PING, or when its answer is overdue */
  uint64_t peer_ping_ns; /* last PING of the peer since we sent something; 0: none */
  uint64_t drain_ping_ns, drain_until_ns, expires_ns;
  kvrelay_address peer;
  uint8_t preface_len; /* bytes of the preface that came */
  uint8_t ping_strikes;
  uint8_t drain; /* enum drain_state */
  bool ping_open;
  bool saw_call;
};

struct server {
  kvrelay_transport base; /* first */
  kvrelay_grpc_server_config cfg;
  kvrelay_service *service;
  kvrelay_grpc_loop loop;
  struct connection_list connections;
  struct call_list woken;
  uint32_t connections_count;
  uint64_t jitter; /* state of a small generator */
  uint64_t refused_connections;
  struct event *acceptable, *accept_again;
  nghttp2_session_callbacks *callbacks;
  nghttp2_option *option;
  kvrelay_address address;
  int fd;
  bool stopping;
};

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t later_by(uint64_t now, uint64_t delay) {
  return delay > KVRELAY_TIME_NONE - now ? KVRELAY_TIME_NONE : now + delay;
}

/* ---- log ---- */

static void say(const server *s, int level, const char *event, const connection *conn,
                const char *text) {
  char peer[KVRELAY_ADDRESS_CAP] = "", line[512];
  if (s->cfg.log == NULL)
    return;
  if (conn != NULL)
    kvrelay_address_format(&conn->peer, peer);
  snprintf(line, sizeof line, "%s%s%s", peer, conn != NULL ? ": " : "", text);
  s->cfg.log(s->cfg.log_context, level, event, line);
}

/* ---- status and headers ---- */

static void set_status(kvrelay_status *status, int32_t grpc, const char *text) {
  status->grpc = grpc;
  status->reason = KVRELAY_REASON_NONE;
  snprintf(status->text, sizeof status->text, "%s", text);
}

/* Names and values of a header block; both must stay until it is submitted. */
typedef struct header_block {
  nghttp2_nv nv[8];
  size_t len;
  char grpc_status[12];
  char message[KVRELAY_GRPC_ENCODED_CAP];
} header_block;

static void add_header(header_block *b, const char *name, const char *value, size_t value_len) {
  nghttp2_nv *nv = &b->nv[b->len++];
  /* nghttp2 only reads them, although its type does not say so. */
  nv->name = (uint8_t *)(uintptr_t)name;
  nv->namelen = strlen(name);
  nv->value = (uint8_t *)(uintptr_t)value;
  nv->valuelen = value_len;
  nv->flags = NGHTTP2_NV_FLAG_NO_COPY_NAME;
}

static void add_status(header_block *b, const kvrelay_status *status) {
  int n = snprintf(b->grpc_status, sizeof b->grpc_status, "%d", (int)status->grpc);
  add_header(b, "grpc-status", b->grpc_status, (size_t)n);
  size_t len = kvrelay_grpc_percent_encode(status->text, b->message, sizeof b->message);
  if (len > 0)
    add_header(b, "grpc-message", b->message, len);
  const char *reason = kvrelay_reason_name(status->reason);
  if (reason != NULL)
    add_header(b, "kv-relay-error-reason", reason, strlen(reason));
}

static void begin_response(header_block *b, const char *http_status) {
  b->len = 0;
  add_header(b, ":status", http_status, 3);
  if (strcmp(http_status, "200") == 0)
    add_header(b, "content-type", "application/grpc", 16);
}

/* ---- calls ---- */

static nghttp2_session *session_of(const server_call *c) { return c->conn->link.session; }

/* When nghttp2 cannot take a frame there is no memory left; the stream is what can be given up. */
static void submitted(const server_call *c, int result) {
  if (result != 0)
    (void)nghttp2_submit_rst_stream(session_of(c), NGHTTP2_FLAG_NONE, c->stream,
                                    NGHTTP2_INTERNAL_ERROR);
}

/* Tells the service that the call is over, once. */
static void call_release(server_call *c) {
  server *s = c->conn->server;
  if (c->is_woken)
    TAILQ_REMOVE(&s->woken, c, woken);
  c->is_woken = false;
  if (c->deadline != NULL)
    event_free(c->deadline);
  c->deadline = NULL;
  if (!c->accepted)
    return;
  c->accepted = false;
  s->service->close(s->service, c->handle, kvrelay_now_ns());
}

static void call_free(server_call *c) {
  call_release(c);
  TAILQ_REMOVE(&c->conn->calls, c, link);
  c->conn->calls_count--;
  kvrelay_grpc_inbox_free(&c->inbox);
  kvrelay_grpc_outbox_free(&c->outbox);
  if (c->path != NULL)
    nghttp2_rcbuf_decref(c->path);
  free(c);
}

/* One header block that answers everything: HTTP errors, and gRPC errors before the first message.
 */
static void send_only_trailers(server_call *c, const char *http_status) {
  header_block b;
  begin_response(&b, http_status);
  if (strcmp(http_status, "200") == 0)
    add_status(&b, &c->status);
  if (c->compressed)
    add_header(&b, "grpc-accept-encoding", "identity", 8);
  submitted(c, nghttp2_submit_response(session_of(c), c->stream, b.nv, b.len, NULL));
}

static void send_trailers(server_call *c) {
  header_block b;
  b.len = 0;
  add_status(&b, &c->status);
  submitted(c, nghttp2_submit_trailer(session_of(c), c->stream, b.nv, b.len));
}

static void call_resume(server_call *c) {
  if (!c->deferred)
    return;
  c->deferred = false;
  submitted(c, nghttp2_session_resume_data(session_of(c), c->stream));
}

/* Ends the call with this status; what is queued of a message goes out first. */
static void call_end(server_call *c, const kvrelay_status *status) {
  if (c->ended)
    return;
  c->ended = true;
  c->status = *status;
  call_release(c);
  if (c->headers_sent)
    call_resume(c);
  else
    send_only_trailers(c, "200");
}

static void call_fail(server_call *c, int32_t grpc, const char *text) {
  kvrelay_status status;
  set_status(&status, grpc, text);
  call_end(c, &status);
}

static void call_fail_http(server_call *c, const char *http_status) {
  c->ended = true;
  send_only_trailers(c, http_status);
}

/* Asks the service for the next thing and takes it in.  False: there is nothing now. */
static bool call_pull(server_call *c) {
  server *s = c->conn->server;
  kvrelay_parts parts;
  kvrelay_status status;
  switch (s->service->pull(s->service, c->handle, kvrelay_now_ns(), &parts, &status)) {
  case KVRELAY_PULL_MESSAGE:
    if (parts.bytes > s->cfg.max_message_bytes)
      call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "response message above the limit");
    else if (kvrelay_grpc_outbox_add(&c->outbox, &parts) != KVRELAY_TRANSPORT_OK)
      call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for a response message");
    return true;
  case KVRELAY_PULL_END:
    call_end(c, &status);
    return true;
  default:
    return false;
  }
}

/* nghttp2 can send up to `length` bytes of this call: small messages share a frame, large ones take
 * several. */
static ssize_t on_read_data(nghttp2_session *session, int32_t stream, uint8_t *buf, size_t length,
                            uint32_t *flags, nghttp2_data_source *source, void *user_data) {
  server_call *c = source->ptr;
  (void)session;
  (void)stream;
  (void)buf;
  (void)user_data;
  while (!c->ended && kvrelay_grpc_outbox_pending(&c->outbox) < length &&
         kvrelay_grpc_outbox_can_add(&c->outbox))
    if (!call_pull(c))
      break;
  size_t pending = kvrelay_grpc_outbox_pending(&c->outbox);
  size_t n = pending < length ? pending : length;
  *flags |= NGHTTP2_DATA_FLAG_NO_COPY;
  if (c->ended && n == pending) {
    *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    send_trailers(c);
  } else if (n == 0) {
    c->deferred = true;
    return NGHTTP2_ERR_DEFERRED;
  }
  return (ssize_t)n;
}

static int on_send_data(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head,
                        size_t length, nghttp2_data_source *source, void *conn_) {
  connection *conn = conn_;
  server_call *c = source->ptr;
  (void)session;
  (void)frame;
  if (evbuffer_add(conn->link.out, head, 9) != 0 ||
      (length > 0 &&
       kvrelay_grpc_outbox_move(&c->outbox, length, conn->link.out) != KVRELAY_TRANSPORT_OK))
    return NGHTTP2_ERR_CALLBACK_FAILURE;
  return kvrelay_grpc_link_has_room(&conn->link) ? 0 : NGHTTP2_ERR_PAUSE;
}

static void send_headers(server_call *c) {
  header_block b;
  nghttp2_data_provider provider = {.source = {.ptr = c}, .read_callback = on_read_data};
  begin_response(&b, "200");
  c->headers_sent = true;
  submitted(c, nghttp2_submit_response(session_of(c), c->stream, b.nv, b.len, &provider));
}

/* Something changed for this call: headers may be due, or there is something to pull. */
static void call_advance(server_call *c) {
  server *s = c->conn->server;
  if (!c->accepted)
    return;
  if (c->headers_sent)
    call_resume(c);
  else if (s->service->admitted(s->service, c->handle) || (call_pull(c) && !c->ended))
    send_headers(c);
}

static void on_call_wake(kvrelay_call *call) {
  server_call *c = (server_call *)call;
  server *s = c->conn->server;
  if (c->is_woken || !c->accepted)
    return;
  c->is_woken = true;
  TAILQ_INSERT_TAIL(&s->woken, c, woken);
  kvrelay_grpc_loop_kick(&s->loop);
}

static void on_kick(void *server_) {
  server *s = server_;
  server_call *c;
  while ((c = TAILQ_FIRST(&s->woken)) != NULL) {
    TAILQ_REMOVE(&s->woken, c, woken);
    c->is_woken = false;
    kvrelay_grpc_link_kick(&c->conn->link);
    call_advance(c);
  }
}

static void on_call_deadline(evutil_socket_t fd, short what, void *call) {
  server_call *c = call;
  connection *conn = c->conn;
  (void)fd;
  (void)what;
  conn->server->loop.turns++;
  if (c->headers_sent && !c->deferred) {
    /* Part of a message may be out, and perhaps it never moves on: only a reset ends that. */
    c->ended = true;
    call_release(c);
    submitted(c, nghttp2_submit_rst_stream(conn->link.session, NGHTTP2_FLAG_NONE, c->stream,
                                           NGHTTP2_CANCEL));
  } else {
    call_fail(c, KVRELAY_GRPC_DEADLINE_EXCEEDED, "deadline exceeded");
  }
  kvrelay_grpc_link_kick(&conn->link);
}

static void call_set_deadline(server_call *c) {
  if (c->timeout_ns == KVRELAY_TIME_NONE)
    return;
  struct timeval wait = kvrelay_grpc_timeval(c->timeout_ns);
  c->deadline = evtimer_new(c->conn->server->loop.base, on_call_deadline, c);
  if (c->deadline == NULL || evtimer_add(c->deadline, &wait) != 0)
    call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for a deadline");
}

/* All headers of a request are there. */
static void call_begin(server_call *c) {
  server *s = c->conn->server;
  kvrelay_status status;
  if (c->header_bytes > MAX_HEADER_LIST_BYTES) {
    call_fail_http(c, "431");
  } else if (!c->post) {
    call_fail_http(c, "405");
  } else if (c->content == KVRELAY_GRPC_CONTENT_FOREIGN) {
    call_fail_http(c, "415");
  } else if (c->content == KVRELAY_GRPC_CONTENT_OTHER) {
    call_fail(c, KVRELAY_GRPC_UNIMPLEMENTED,
              "only application/grpc and application/grpc+proto are spoken here");
  } else if (c->compressed) {
    call_fail(c, KVRELAY_GRPC_UNIMPLEMENTED, "request messages must not be compressed");
  } else if (c->bad_timeout) {
    call_fail(c, KVRELAY_GRPC_INTERNAL, "grpc-timeout is malformed");
  } else {
    nghttp2_vec path = nghttp2_rcbuf_get_buf(c->path);
    int err = s->service->open(s->service, &c->base, path.base, path.len, kvrelay_now_ns(),
                               &c->handle, &status);
    c->accepted = err == KVRELAY_OK;
    if (err == KVRELAY_OK)
      call_set_deadline(c);
    else if (err == KVRELAY_ERR_REFUSED)
      call_end(c, &status);
    else
      call_fail(c, KVRELAY_GRPC_INTERNAL, "the call could not be opened");
  }
}

/* The service's answer to a message or a half-close. */
static void call_told(server_call *c, int err, const kvrelay_status *status) {
  if (err == KVRELAY_ERR_REFUSED)
    call_end(c, status);
  else if (err != KVRELAY_OK)
    call_fail(c, KVRELAY_GRPC_INTERNAL, kvrelay_strerror(err));
}

static void call_half_close(server_call *c) {
  server *s = c->conn->server;
  kvrelay_status status;
  if (!c->accepted)
    return;
  if (!kvrelay_grpc_inbox_empty(&c->inbox))
    call_fail(c, KVRELAY_GRPC_INTERNAL, "the request ends inside a message");
  else
    call_told(c, s->service->half_close(s->service, c->handle, kvrelay_now_ns(), &status), &status);
}

static void call_receive(server_call *c, const uint8_t *bytes, size_t len) {
  server *s = c->conn->server;
  while (len > 0 && c->accepted) {
    kvrelay_iov message;
    kvrelay_status status;
    ptrdiff_t used = kvrelay_grpc_inbox_feed(&c->inbox, bytes, len, &message);
    if (used == KVRELAY_TRANSPORT_ERR_LIMIT)
      call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "request message above the limit");
    else if (used == KVRELAY_TRANSPORT_ERR_PROTOCOL)
      call_fail(c, KVRELAY_GRPC_INTERNAL,
                "message flagged as compressed, but no encoding was announced");
    else if (used < 0)
      call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for a request message");
    if (used < 0)
      return;
    bytes += used;
    len -= (size_t)used;
    if (message.base != NULL)
      call_told(c,
                s->service->message(s->service, c->handle, message.base, message.len,
                                    kvrelay_now_ns(), &status),
                &status);
  }
}

/* ---- nghttp2 callbacks ---- */

static server_call *call_of(nghttp2_session *session, int32_t stream) {
  return nghttp2_session_get_stream_user_data(session, stream);
}

/* Sends GOAWAY and shuts down as soon as it is out. */
static void calm_down(connection *conn, const char *debug) {
  say(conn->server, KVRELAY_GRPC_LOG_WARN, "connection_abused", conn, debug);
  int32_t last = nghttp2_session_get_last_proc_stream_id(conn->link.session);
  (void)nghttp2_submit_goaway(conn->link.session, NGHTTP2_FLAG_NONE, last,
                              NGHTTP2_ENHANCE_YOUR_CALM, (const uint8_t *)debug, strlen(debug));
}

static int on_begin_frame(nghttp2_session *session, const nghttp2_frame_hd *head, void *conn_) {
  connection *conn = conn_;
  (void)session;
  if (head->type == NGHTTP2_HEADERS || (head->type == NGHTTP2_DATA && head->length > 0))
    conn->idle_frames = 0;
  else if (++conn->idle_frames == MAX_IDLE_FRAMES)
    calm_down(conn, "too_many_frames");
  return 0;
}

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *conn_) {
  connection *conn = conn_;
  if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
    return 0;
  server_call *c = calloc(1, sizeof *c);
  if (c == NULL)
    return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  c->base.wake = on_call_wake;
  c->conn = conn;
  c->stream = frame->hd.stream_id;
  c->timeout_ns = KVRELAY_TIME_NONE;
  kvrelay_grpc_inbox_init(&c->inbox, conn->server->cfg.max_request_bytes);
  TAILQ_INSERT_TAIL(&conn->calls, c, link);
  conn->calls_count++;
  conn->saw_call = true;
  return nghttp2_session_set_stream_user_data(session, c->stream, c);
}

static bool is(nghttp2_vec text, const char *what) {
  return text.len == strlen(what) && memcmp(text.base, what, text.len) == 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_,
                     nghttp2_rcbuf *value_, uint8_t flags, void *conn_) {
  (void)flags;
  (void)conn_;
  if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
    return 0;
  server_call *c = call_of(session, frame->hd.stream_id);
  if (c == NULL)
    return 0;
  nghttp2_vec name = nghttp2_rcbuf_get_buf(name_), value = nghttp2_rcbuf_get_buf(value_);
  c->header_bytes += name.len + value.len + 32;
  if (c->header_bytes > MAX_HEADER_LIST_BYTES)
    return 0; /* answered when the block ends */
  if (is(name, ":path") && c->path == NULL) {
    nghttp2_rcbuf_incref(value_);
    c->path = value_;
  } else if (is(name, ":method")) {
    c->post = is(value, "POST");
  } else if (is(name, "content-type")) {
    c->content = (uint8_t)kvrelay_grpc_content_type(value.base, value.len);
  } else if (is(name, "grpc-timeout")) {
    c->bad_timeout = !kvrelay_grpc_timeout_parse(value.base, value.len, &c->timeout_ns);
  } else if (is(name, "grpc-encoding")) {
    c->compressed = !is(value, "identity");
  }
  return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *bytes,
                   size_t len, void *conn_) {
  server_call *c = call_of(session, stream);
  (void)flags;
  (void)conn_;
  if (c != NULL)
    call_receive(c, bytes, len);
  return 0;
}

static void drain_final(connection *conn) {
  conn->drain = DRAIN_FINAL;
  int32_t last = nghttp2_session_get_last_proc_stream_id(conn->link.session);
  (void)nghttp2_submit_goaway(conn->link.session, NGHTTP2_FLAG_NONE, last, NGHTTP2_NO_ERROR, NULL,
                              0);
}

static void on_ping(connection *conn, const nghttp2_ping *ping) {
  uint64_t now = kvrelay_now_ns();
  if (ping->hd.flags & NGHTTP2_FLAG_ACK) {
    if (memcmp(ping->opaque_data, drain_ping, sizeof drain_ping) == 0) {
      if (conn->drain == DRAIN_NOTICE)
        drain_final(conn);
    } else if (conn->ping_open &&
               memcmp(ping->opaque_data, keepalive_ping, sizeof keepalive_ping) == 0) {
      conn->ping_open = false;
      conn->idle_frames = 0; /* asked for: a connection may be silent for weeks */
      conn->ping_at_ns = later_by(now, conn->server->cfg.keepalive_interval_ns);
      kvrelay_grpc_link_rearm(&conn->link);
    }
    return;
  }
  bool early =
      conn->peer_ping_ns != 0 && now - conn->peer_ping_ns < conn->server->cfg.peer_ping_interval_ns;
  conn->peer_ping_ns = now;
  if (early && conn->ping_strikes <= MAX_PING_STRIKES && ++conn->ping_strikes > MAX_PING_STRIKES)
    calm_down(conn, "too_many_pings");
}

static int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *conn_) {
  connection *conn = conn_;
  if (frame->hd.type == NGHTTP2_PING)
    on_ping(conn, &frame->ping);
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA)
    return 0;
  server_call *c = call_of(session, frame->hd.stream_id);
  if (c == NULL)
    return 0;
  if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST) {
    if (conn->server->stopping || conn->drain == DRAIN_FINAL)
      return nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, c->stream,
                                       NGHTTP2_REFUSED_STREAM);
    call_begin(c);
  }
  if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM)
    call_half_close(c);
  call_advance(c);
  return 0;
}

static int on_frame_sent(nghttp2_session *session, const nghttp2_frame *frame, void *conn_) {
  connection *conn = conn_;
  if (frame->hd.type == NGHTTP2_GOAWAY) {
    if (frame->goaway.error_code != NGHTTP2_NO_ERROR) {
      say(conn->server, KVRELAY_GRPC_LOG_WARN, "connection_error", conn,
          nghttp2_http2_strerror(frame->goaway.error_code));
      conn->link.closing = true;
    } else if (conn->drain == DRAIN_NOTICE) {
      /* Only now: a PING overtakes what waits, and its answer has to prove that the notice arrived.
       */
      return nghttp2_submit_ping(session, NGHTTP2_FLAG_NONE, drain_ping);
    }
    return 0;
  }
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA)
    return 0;
  conn->ping_strikes = 0;
  conn->peer_ping_ns = 0;
  conn->idle_frames = 0;
  bool last = frame->hd.type == NGHTTP2_HEADERS && (frame->hd.flags & NGHTTP2_FLAG_END_STREAM);
  if (last && nghttp2_session_get_stream_remote_close(session, frame->hd.stream_id) == 0)
    return nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                     NGHTTP2_NO_ERROR);
  return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t stream, uint32_t error_code,
                           void *conn_) {
  connection *conn = conn_;
  server_call *c = call_of(session, stream);
  (void)error_code;
  if (c == NULL)
    return 0;
  call_free(c);
  if (conn->calls_count == 0) {
    conn->idle_since_ns = kvrelay_now_ns();
    conn->link.closing |= conn->drain == DRAIN_FINAL;
  }
  return 0;
}

static int make_callbacks(server *s) {
  if (nghttp2_session_callbacks_new(&s->callbacks) != 0 || nghttp2_option_new(&s->option) != 0)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  nghttp2_session_callbacks_set_on_begin_frame_callback(s->callbacks, on_begin_frame);
  nghttp2_session_callbacks_set_on_begin_headers_callback(s->callbacks, on_begin_headers);
  nghttp2_session_callbacks_set_on_header_callback2(s->callbacks, on_header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(s->callbacks, on_data);
  nghttp2_session_callbacks_set_on_frame_recv_callback(s->callbacks, on_frame);
  nghttp2_session_callbacks_set_on_frame_send_callback(s->callbacks, on_frame_sent);
  nghttp2_session_callbacks_set_on_stream_close_callback(s->callbacks, on_stream_close);
  nghttp2_session_callbacks_set_send_data_callback(s->callbacks, on_send_data);
  nghttp2_session_callbacks_set_data_source_read_length_callback(s->callbacks,
                                                                 kvrelay_grpc_link_frame_len);
  nghttp2_option_set_stream_reset_rate_limit(s->option, 1000, 33);
  nghttp2_option_set_max_continuations(s->option, 8);
  nghttp2_option_set_max_outbound_ack(s->option, 1000);
  nghttp2_option_set_max_settings(s->option, 32);
  nghttp2_option_set_no_closed_streams(s->option, 1);
  return KVRELAY_TRANSPORT_OK;
}

/* ---- connections ---- */

static connection *connection_of(const kvrelay_grpc_link *link) {
  return (connection *)(uintptr_t)link;
}

static void connection_free(connection *conn) {
  server *s = conn->server;
  server_call *c;
  while ((c = TAILQ_FIRST(&conn->calls)) != NULL)
    call_free(c);
  kvrelay_grpc_link_close(&conn->link);
  TAILQ_REMOVE(&s->connections, conn, entry);
  s->connections_count--;
  free(conn);
}

static void on_gone(kvrelay_grpc_link *link) {
  connection *conn = connection_of(link);
  bool strange =
      link->err == KVRELAY_TRANSPORT_ERR_PROTOCOL || link->err == KVRELAY_TRANSPORT_ERR_LIMIT;
  say(conn->server, strange ? KVRELAY_GRPC_LOG_WARN : KVRELAY_GRPC_LOG_DEBUG, "connection_closed",
      conn, link->text);
  connection_free(conn);
}

/* What somebody probably meant who does not speak HTTP/2. */
static const char *likely_mistake(const uint8_t *bytes, size_t len) {
  static const char *const methods[] = {"GET ",     "HEAD ",    "POST ",  "PUT ",  "DELETE ",
                                        "OPTIONS ", "CONNECT ", "PATCH ", "TRACE "};
  if (bytes[0] == 0x16)
    return "a TLS hello on a plaintext port";
  if (len >= 4 && memcmp(bytes, "KVRF", 4) == 0)
    return "the preface of the raw transport on a gRPC port";
  for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
    size_t n = strlen(methods[i]);
    if (memcmp(bytes, methods[i], n < len ? n : len) == 0)
      return "an HTTP/1.1 request on a gRPC port";
  }
  return "not HTTP/2";
}

static bool on_received(kvrelay_grpc_link *link, const uint8_t *bytes, size_t len) {
  connection *conn = connection_of(link);
  size_t left = sizeof preface - 1 - conn->preface_len;
  if (nghttp2_session_get_outbound_queue_size(link->session) >
      MAX_QUEUED_FRAMES + conn->server->cfg.max_concurrent_streams) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_LIMIT, "asks without reading the answers");
    return false;
  }
  if (left == 0)
    return true;
  size_t n = len < left ? len : left;
  if (memcmp(bytes, preface + conn->preface_len, n) != 0) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                           conn->preface_len == 0 ? likely_mistake(bytes, len) : "not HTTP/2");
    return false;
  }
  conn->preface_len = (uint8_t)(conn->preface_len + n);
  return true;
}

static uint64_t on_deadline_ns(const kvrelay_grpc_link *link) {
  const connection *conn = connection_of(link);
  const kvrelay_grpc_server_config *cfg = &conn->server->cfg;
  uint64_t at = earlier(conn->ping_at_ns, conn->expires_ns);
  if (!conn->saw_call)
    at = earlier(at, later_by(conn->opened_ns, cfg->handshake_timeout_ns));
  if (conn->drain == DRAIN_NOTICE)
    at = earlier(at, conn->drain_ping_ns);
  if (conn->drain != DRAIN_NONE)
    return earlier(at, conn->drain_until_ns);
  /* With calls open this is only when to look again. */
  uint64_t idle_since = conn->calls_count == 0 ? conn->idle_since_ns : kvrelay_now_ns();
  return earlier(at, later_by(idle_since, cfg->idle_timeout_ns));
}

/* GOAWAY in two steps, so that no call that is on its way gets lost. */
static void drain(connection *conn, uint64_t grace_ns) {
  uint64_t now = kvrelay_now_ns();
  uint64_t until = later_by(now, grace_ns);
  if (conn->drain == DRAIN_NONE) {
    conn->drain = DRAIN_NOTICE;
    conn->drain_until_ns = until;
    conn->drain_ping_ns = now + DRAIN_PING_NS;
    (void)nghttp2_submit_shutdown_notice(conn->link.session);
  }
  conn->drain_until_ns = earlier(conn->drain_until_ns, until);
  kvrelay_grpc_link_rearm(&conn->link);
  kvrelay_grpc_link_kick(&conn->link);
}

static void on_tick(kvrelay_grpc_link *link, uint64_t now) {
  connection *conn = connection_of(link);
  const kvrelay_grpc_server_config *cfg = &conn->server->cfg;
  if (!conn->saw_call && now >= later_by(conn->opened_ns, cfg->handshake_timeout_ns)) {
    if (conn->preface_len < sizeof preface - 1) {
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL, "no HTTP/2 preface in time");
      return;
    }
    conn->saw_call = true; /* looked at, once */
    drain(conn, DRAIN_PING_NS);
  }
  if (conn->drain != DRAIN_NONE && now >= conn->drain_until_ns) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "grace time over");
    return;
  }
  if (conn->drain == DRAIN_NOTICE && now >= conn->drain_ping_ns)
    drain_final(conn);
  if (conn->drain == DRAIN_NONE && now >= conn->expires_ns) {
    conn->expires_ns = KVRELAY_TIME_NONE;
    drain(conn, cfg->max_connection_age_grace_ns);
  }
  if (conn->drain == DRAIN_NONE && conn->calls_count == 0 &&
      now >= later_by(conn->idle_since_ns, cfg->idle_timeout_ns))
    drain(conn, DRAIN_PING_NS);
  if (now < conn->ping_at_ns)
    return;
  if (conn->ping_open) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "no answer to a keepalive PING");
    return;
  }
  conn->ping_open = true;
  conn->ping_at_ns = later_by(now, cfg->keepalive_timeout_ns);
  (void)nghttp2_submit_ping(link->session, NGHTTP2_FLAG_NONE, keepalive_ping);
}

static const kvrelay_grpc_link_events link_events = {on_received, on_deadline_ns, on_tick, on_gone};

static uint64_t random_below(server *s, uint64_t bound) {
  s->jitter = s->jitter * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return bound == 0 ? 0 : (s->jitter >> 11) % bound;
}

static void connection_open(server *s, int fd, const kvrelay_address *peer) {
  connection *conn = calloc(1, sizeof *conn);
  if (conn == NULL) {
    close(fd);
    return;
  }
  uint64_t now = kvrelay_now_ns();
  TAILQ_INIT(&conn->calls);
  conn->server = s;
  conn->peer = *peer;
  conn->opened_ns = conn->idle_since_ns = now;
  conn->ping_at_ns = later_by(now, s->cfg.keepalive_interval_ns);
  conn->expires_ns = KVRELAY_TIME_NONE;
  if (s->cfg.max_connection_age_ns != KVRELAY_TIME_NONE)
    conn->expires_ns = later_by(now, s->cfg.max_connection_age_ns / 10 * 9 +
                                         random_below(s, s->cfg.max_connection_age_ns / 5));
  TAILQ_INSERT_TAIL(&s->connections, conn, entry);
  s->connections_count++;
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, s->cfg.max_concurrent_streams},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, (uint32_t)MAX_HEADER_LIST_BYTES}};
  if (kvrelay_grpc_link_open(&conn->link, &s->loop, &link_events, fd, s->cfg.output_threshold) !=
          KVRELAY_TRANSPORT_OK ||
      nghttp2_session_server_new2(&conn->link.session, s->callbacks, conn, s->option) != 0 ||
      nghttp2_submit_settings(conn->link.session, NGHTTP2_FLAG_NONE, settings,
                              sizeof settings / sizeof *settings) != 0 ||
      nghttp2_session_set_local_window_size(conn->link.session, NGHTTP2_FLAG_NONE, 0,
                                            CONNECTION_WINDOW) != 0) {
    say(s, KVRELAY_GRPC_LOG_ERROR, "connection_refused", conn, "no memory");
    connection_free(conn);
    return;
  }
  say(s, KVRELAY_GRPC_LOG_DEBUG, "connection_opened", conn, "accepted");
  kvrelay_grpc_link_rearm(&conn->link);
  kvrelay_grpc_link_kick(&conn->link);
}

static bool same_host(const kvrelay_address *a, const kvrelay_address *b) {
  if (a->storage.ss_family != b->storage.ss_family)
    return false;
  if (a->storage.ss_family == AF_INET)
    return ((const struct sockaddr_in *)&a->storage)->sin_addr.s_addr ==
           ((const struct sockaddr_in *)&b->storage)->sin_addr.s_addr;
  if (a->storage.ss_family == AF_INET6)
    return memcmp(&((const struct sockaddr_in6 *)&a->storage)->sin6_addr,
                  &((const struct sockaddr_in6 *)&b->storage)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
  return false; /* sockets in the file system have no hosts */
}

static const char *refusal(const server *s, const kvrelay_address *peer) {
  if (s->connections_count >= s->cfg.max_connections)
    return "too many connections";
  uint32_t count = 0;
  const connection *conn;
  TAILQ_FOREACH(conn, &s->connections, entry)
  count += same_host(&conn->peer, peer);
  return count >= s->cfg.max_connections_per_peer ? "too many connections of this peer" : NULL;
}

static void on_accept_again(evutil_socket_t fd, short what, void *server_) {
  server *s = server_;
  (void)fd;
  (void)what;
  event_add(s->acceptable, NULL);
}

static void on_acceptable(evutil_socket_t listener, short what, void *server_) {
  server *s = server_;
  (void)what;
  s->loop.turns++;
  for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
    kvrelay_address peer;
    memset(&peer, 0, sizeof peer);
    peer.len = sizeof peer.storage;
    int fd = accept4(listener, (struct sockaddr *)&peer.storage, &peer.len,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        /* The queue stays readable: without a pause this would spin. */
        struct timeval pause = kvrelay_grpc_timeval(ACCEPT_PAUSE_NS);
        say(s, KVRELAY_GRPC_LOG_WARN, "accept_failed", NULL, strerror(errno));
        event_del(s->acceptable);
        evtimer_add(s->accept_again, &pause);
      }
      return;
    }
    const char *why = refusal(s, &peer);
    if (why != NULL) {
      uint64_t n = ++s->refused_connections;
      if ((n & (n - 1)) == 0)
        say(s, KVRELAY_GRPC_LOG_WARN, "connection_refused", NULL, why);
      close(fd);
      continue;
    }
    int one = 1;
    if (peer.storage.ss_family != AF_UNIX)
      (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connection_open(s, fd, &peer);
  }
}

/* ---- the transport ---- */

static server *server_of(const kvrelay_transport *t) { return (server *)(uintptr_t)t; }

static int on_run_once(kvrelay_transport *t, uint64_t timeout_ns) {
  server *s = server_of(t);
  if (s->stopping && TAILQ_EMPTY(&s->connections))
    return KVRELAY_TRANSPORT_CLOSED;
  return kvrelay_grpc_loop_run(&s->loop, timeout_ns);
}

static void on_wake(kvrelay_transport *t) { kvrelay_grpc_loop_wake(&server_of(t)->loop); }

static void stop_listening(server *s) {
  bool bound = s->acceptable != NULL;
  if (s->acceptable != NULL)
    event_free(s->acceptable);
  if (s->accept_again != NULL)
    event_free(s->accept_again);
  if (s->fd >= 0) {
    close(s->fd);
    if (bound && s->address.storage.ss_family == AF_UNIX)
      (void)unlink(((const struct sockaddr_un *)&s->address.storage)->sun_path);
  }
  s->acceptable = s->accept_again = NULL;
  s->fd = -1;
}

static void on_stop(kvrelay_transport *t, uint64_t grace_ns) {
  server *s = server_of(t);
  connection *conn;
  s->stopping = true;
  stop_listening(s);
  TAILQ_FOREACH(conn, &s->connections, entry)
  drain(conn, earlier(grace_ns, MAX_GRACE_NS));
}

static void on_close(kvrelay_transport *t) {
  server *s = server_of(t);
  connection *conn;
  while ((conn = TAILQ_FIRST(&s->connections)) != NULL)
    connection_free(conn);
  stop_listening(s);
  if (s->callbacks != NULL)
    nghttp2_session_callbacks_del(s->callbacks);
  if (s->option != NULL)
    nghttp2_option_del(s->option);
  kvrelay_grpc_loop_close(&s->loop);
  free(s);
}

static uint64_t on_now_ns(const kvrelay_transport *t) {
  (void)t;
  return kvrelay_now_ns();
}

static int listen_on(server *s, const char *bind_text) {
  char host[256], port[8];
  static const char unix_prefix[] = "unix:";
  int err;
  if (strncmp(bind_text, unix_prefix, sizeof unix_prefix - 1) == 0) {
    err = kvrelay_address_unix(bind_text + sizeof unix_prefix - 1, &s->address);
  } else {
    err = kvrelay_address_split(bind_text, host, sizeof host, port, sizeof port);
    if (err == KVRELAY_TRANSPORT_OK)
      err = kvrelay_address_resolve(host, port, false, &s->address, 1);
  }
  if (err < 0)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  int one = 1;
  s->fd = socket(s->address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (s->fd < 0)
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  if (s->address.storage.ss_family != AF_UNIX)
    (void)setsockopt(s->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(s->fd, (const struct sockaddr *)&s->address.storage, s->address.len) != 0 ||
      listen(s->fd, SOMAXCONN) != 0)
    return KVRELAY_TRANSPORT_ERR_BIND;
  s->address.len = sizeof s->address.storage;
  if (getsockname(s->fd, (struct sockaddr *)&s->address.storage, &s->address.len) != 0)
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  s->acceptable = event_new(s->loop.base, s->fd, EV_READ | EV_PERSIST, on_acceptable, s);
  s->accept_again = evtimer_new(s->loop.base, on_accept_again, s);
  return s->acceptable != NULL && s->accept_again != NULL && event_add(s->acceptable, NULL) == 0
             ? KVRELAY_TRANSPORT_OK
             : KVRELAY_TRANSPORT_ERR_MEMORY;
}

kvrelay_grpc_server_config kvrelay_grpc_server_config_default(void) {
  return (kvrelay_grpc_server_config){
      .max_request_bytes = 65536,
      .max_message_bytes = 8388608,
      .output_threshold = 262144,
      .max_connections = 1024,
      .max_connections_per_peer = 256,
      .max_concurrent_streams = 1024,
      .keepalive_interval_ns = 20 * SECOND_NS,
      .keepalive_timeout_ns = 10 * SECOND_NS,
      .peer_ping_interval_ns = 10 * SECOND_NS,
      .handshake_timeout_ns = 10 * SECOND_NS,
      .idle_timeout_ns = 300 * SECOND_NS,
      .max_connection_age_ns = KVRELAY_TIME_NONE,
      .max_connection_age_grace_ns = 10 * SECOND_NS,
  };
}

int kvrelay_grpc_server_open(const kvrelay_grpc_server_config *cfg, kvrelay_service *service,
                             kvrelay_transport **out) {
  if (cfg == NULL || service == NULL || cfg->bind == NULL || cfg->output_threshold == 0 ||
      cfg->max_connections == 0 || cfg->max_connections_per_peer == 0 ||
      cfg->max_concurrent_streams == 0)
    return KVRELAY_TRANSPORT_ERR_ARG;
  server *s = calloc(1, sizeof *s);
  if (s == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  s->base = (kvrelay_transport){on_run_once, on_wake, on_stop, on_close, on_now_ns};
  s->cfg = *cfg;
  s->service = service;
  s->fd = -1;
  s->jitter = kvrelay_now_ns();
  TAILQ_INIT(&s->connections);
  TAILQ_INIT(&s->woken);
  int err = kvrelay_grpc_loop_open(&s->loop, cfg->base, on_kick, s);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(s);
    return err;
  }
  err = make_callbacks(s);
  if (err == KVRELAY_TRANSPORT_OK)
    err = listen_on(s, cfg->bind);
  if (err != KVRELAY_TRANSPORT_OK) {
    int saved = errno;
    on_close(&s->base);
    errno = saved;
    return err;
  }
  *out = &s->base;
  return KVRELAY_TRANSPORT_OK;
}

uint16_t kvrelay_grpc_server_port(const kvrelay_transport *t) {
  const struct sockaddr_storage *a = &server_of(t)->address.storage;
  if (a->ss_family == AF_INET)
    return ntohs(((const struct sockaddr_in *)a)->sin_port);
  return a->ss_family == AF_INET6 ? ntohs(((const struct sockaddr_in6 *)a)->sin6_port) : 0;
}

void kvrelay_grpc_server_address(const kvrelay_transport *t, char *out, size_t cap) {
  char text[KVRELAY_ADDRESS_CAP];
  kvrelay_address_format(&server_of(t)->address, text);
  snprintf(out, cap, "%s", text);
}

uint32_t kvrelay_grpc_server_connections(const kvrelay_transport *t) {
  return server_of(t)->connections_count;
}
