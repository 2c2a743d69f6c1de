/* SPDX-License-Identifier: Apache-2.0 */
/* One call of the server: headers in, messages both ways, status out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grpc_server_private.h"

/* ---- status and headers ---- */

/* Names and values of a header block; both must stay until it is submitted. */
typedef struct header_block {
  nghttp2_nv nv[8 + KVRELAY_GRPC_METADATA_ENTRIES];
  size_t len;
  char grpc_status[12];
  char message[KVRELAY_GRPC_ENCODED_CAP];
} header_block;

static void add_bytes(header_block *b, kvrelay_iov name, kvrelay_iov value, uint8_t flags) {
  nghttp2_nv *nv = &b->nv[b->len++];
  /* nghttp2 only reads them, although its type does not say so. */
  nv->name = (uint8_t *)(uintptr_t)name.base;
  nv->namelen = name.len;
  nv->value = (uint8_t *)(uintptr_t)value.base;
  nv->valuelen = value.len;
  nv->flags = flags;
}

static void add_header(header_block *b, const char *name, const char *value, size_t value_len) {
  add_bytes(b, (kvrelay_iov){(const uint8_t *)name, strlen(name)},
            (kvrelay_iov){(const uint8_t *)value, value_len}, NGHTTP2_NV_FLAG_NO_COPY_NAME);
}

static void add_metadata(header_block *b, const kvrelay_grpc_metadata *m) {
  kvrelay_iov name, value;
  for (size_t cursor = 0; kvrelay_grpc_metadata_next(m, &cursor, &name, &value);)
    add_bytes(b, name, value, NGHTTP2_NV_FLAG_NONE);
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

static void begin_response(header_block *b, const char *http_status, const char *content_type) {
  b->len = 0;
  add_header(b, ":status", http_status, 3);
  add_header(b, "content-type", content_type, strlen(content_type));
}

/* ---- calls ---- */

static nghttp2_session *session_of(const server_call *c) { return c->conn->link.session; }

/* When nghttp2 cannot take a frame there is no memory left; the stream is what can be given up. */
static void submitted(const server_call *c, int result) {
  if (result != 0)
    kvrelay_grpc_link_submitted(&c->conn->link,
                                nghttp2_submit_rst_stream(session_of(c), NGHTTP2_FLAG_NONE,
                                                          c->stream, NGHTTP2_INTERNAL_ERROR));
}

/* Goes on with it in this turn of the loop or the next. */
static void call_wake(server_call *c) {
  server *s = c->conn->server;
  if (c->is_woken || !c->accepted)
    return;
  c->is_woken = true;
  TAILQ_INSERT_TAIL(&s->woken, c, woken);
  kvrelay_grpc_loop_kick(&s->loop);
}

static bool connection_has_room(const connection *conn) {
  return conn->held < conn->server->cfg.output_threshold;
}

/* The call holds more, or less, than before.  Those that waited for room go on. */
static void call_recount(server_call *c) {
  connection *conn = c->conn;
  const bool had_room = connection_has_room(conn);
  const size_t held = kvrelay_grpc_outbox_held(&c->outbox);
  conn->held += held - c->held;
  c->held = held;
  if (had_room || !connection_has_room(conn))
    return;
  server_call *other;
  TAILQ_FOREACH(other, &conn->calls, link) {
    if (other->starved)
      call_wake(other);
    other->starved = false;
  }
}

/* Nothing that the service lent is read any more. */
static void call_give_back(server_call *c) {
  if (kvrelay_grpc_outbox_give_back(&c->outbox, c->conn->link.out) != KVRELAY_TRANSPORT_OK)
    kvrelay_grpc_link_fail(&c->conn->link, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for output");
  call_recount(c);
}

/* Tells the service that the call is over, once. */
static void call_release(server_call *c) {
  server *s = c->conn->server;
  if (c->is_woken)
    TAILQ_REMOVE(&s->woken, c, woken);
  c->is_woken = false;
  kvrelay_timer_close(&c->deadline);
  if (!c->accepted)
    return;
  c->accepted = false;
  call_give_back(c);
  s->service->close(s->service, c->handle, s->loop.now_ns);
}

void kvrelay_grpc_call_free(server_call *c) {
  kvrelay_grpc_outbox_free(&c->outbox);
  call_release(c);
  TAILQ_REMOVE(&c->conn->calls, c, link);
  call_recount(c);
  c->conn->calls_count--;
  kvrelay_grpc_inbox_free(&c->inbox);
  kvrelay_grpc_metadata_free(&c->request);
  kvrelay_grpc_metadata_free(&c->initial);
  kvrelay_grpc_metadata_free(&c->trailing);
  if (c->path != NULL)
    nghttp2_rcbuf_decref(c->path);
  nghttp2_mem *mem = &c->conn->server->pool.mem;
  mem->free(c, mem->mem_user_data);
}

/* One header block that answers everything: errors before the first message. */
static void send_only_trailers(server_call *c) {
  header_block b;
  begin_response(&b, "200", "application/grpc");
  add_status(&b, &c->status);
  add_metadata(&b, &c->trailing);
  if (c->bad_encoding)
    add_header(&b, "grpc-accept-encoding", kvrelay_grpc_encodings(),
               strlen(kvrelay_grpc_encodings()));
  submitted(c, nghttp2_submit_response(session_of(c), c->stream, b.nv, b.len, NULL));
}

static void send_trailers(server_call *c) {
  header_block b;
  b.len = 0;
  add_status(&b, &c->status);
  add_metadata(&b, &c->trailing);
  submitted(c, nghttp2_submit_trailer(session_of(c), c->stream, b.nv, b.len));
}

static void call_resume(server_call *c) {
  if (!c->deferred)
    return;
  c->deferred = false;
  submitted(c, nghttp2_session_resume_data(session_of(c), c->stream));
}

static void send_headers(server_call *c);

/* Ends the call with this status; what is queued of a message goes out first. */
static void call_end(server_call *c, const kvrelay_status *status) {
  if (c->ended)
    return;
  c->ended = true;
  c->status = *status;
  call_release(c);
  if (c->headers_sent)
    call_resume(c);
  else if (c->initial.entries_ > 0)
    send_headers(c); /* what belongs before messages does not go among the trailers */
  else
    send_only_trailers(c);
}

static void call_fail(server_call *c, int32_t grpc, const char *text) {
  kvrelay_status status;
  (void)kvrelay_refuse(&status, grpc, text);
  call_end(c, &status);
}

/* ---- who does not speak gRPC ---- */

static ssize_t on_read_explanation(nghttp2_session *session, int32_t stream, uint8_t *buf,
                                   size_t length, uint32_t *flags, nghttp2_data_source *source,
                                   void *user_data) {
  server_call *c = source->ptr;
  size_t left = strlen(c->explanation), n = left < length ? left : length;
  (void)session;
  (void)stream;
  (void)user_data;
  memcpy(buf, c->explanation, n);
  c->explanation += n;
  if (n == left)
    *flags |= NGHTTP2_DATA_FLAG_EOF;
  return (ssize_t)n;
}

/* Answers in HTTP once the request has ended, as its sender expects, or took its time. */
static void send_http_error(server_call *c) {
  header_block b;
  nghttp2_data_provider provider = {.source = {.ptr = c}, .read_callback = on_read_explanation};
  begin_response(&b, c->http_status, "text/plain");
  c->http_status = NULL;
  submitted(c, nghttp2_submit_response(session_of(c), c->stream, b.nv, b.len,
                                       c->explanation != NULL ? &provider : NULL));
}

/* Takes a message over, in the form in which it is sent. */
static int call_keep(server_call *c, const kvrelay_parts *parts) {
  const int err = c->encoding == KVRELAY_GRPC_IDENTITY || c->plain
                      ? kvrelay_grpc_outbox_add(&c->outbox, parts)
                      : kvrelay_grpc_outbox_add_compressed(&c->outbox, parts, c->encoding);
  call_recount(c);
  return err;
}

/* Room for one more message, in the call and on its connection; if not, it is woken later. */
static bool call_may_pull(server_call *c) {
  c->starved = !connection_has_room(c->conn);
  return !c->starved && kvrelay_grpc_outbox_can_add(&c->outbox);
}

/* Asks the service for the next thing and takes it in.  False: there is nothing now. */
static bool call_pull(server_call *c) {
  server *s = c->conn->server;
  kvrelay_parts parts = {.kept_len = 0};
  kvrelay_status status;
  switch (s->service->pull(s->service, c->handle, s->loop.now_ns, &parts, &status)) {
  case KVRELAY_PULL_MESSAGE:
    if (parts.bytes > s->cfg.max_message_bytes)
      call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "response message above the limit");
    else if (call_keep(c, &parts) != KVRELAY_TRANSPORT_OK)
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
  while (!c->ended && kvrelay_grpc_outbox_pending(&c->outbox) < length && call_may_pull(c))
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
  call_recount(c);
  return kvrelay_grpc_link_has_room(&conn->link) ? 0 : NGHTTP2_ERR_PAUSE;
}

static void send_headers(server_call *c) {
  header_block b;
  nghttp2_data_provider provider = {.source = {.ptr = c}, .read_callback = on_read_data};
  begin_response(&b, "200", "application/grpc");
  if (c->encoding != KVRELAY_GRPC_IDENTITY) {
    const char *name = kvrelay_grpc_encoding_name(c->encoding);
    add_header(&b, "grpc-encoding", name, strlen(name));
  }
  add_metadata(&b, &c->initial);
  c->headers_sent = true;
  submitted(c, nghttp2_submit_response(session_of(c), c->stream, b.nv, b.len, &provider));
}

/* Something changed for this call: headers may be due, or there is something to pull. */
void kvrelay_grpc_call_advance(server_call *c) {
  server *s = c->conn->server;
  if (!c->accepted)
    return;
  if (c->headers_sent)
    call_resume(c);
  else if (s->service->admitted(s->service, c->handle) ||
           (call_may_pull(c) && call_pull(c) && !c->ended))
    send_headers(c);
}

static void on_call_wake(kvrelay_call *call) {
  server_call *c = (server_call *)call;
  if (c->accepted)
    call_give_back(c);
  call_wake(c);
}

/* The socket has taken what the service lent. */
static void on_returned(kvrelay_grpc_outbox *out) {
  call_wake((server_call *)(void *)((uint8_t *)out - offsetof(server_call, outbox)));
}

void kvrelay_grpc_calls_woken(void *server_) {
  server *s = server_;
  server_call *c;
  while ((c = TAILQ_FIRST(&s->woken)) != NULL) {
    TAILQ_REMOVE(&s->woken, c, woken);
    c->is_woken = false;
    kvrelay_grpc_link_kick(&c->conn->link);
    kvrelay_grpc_call_advance(c);
  }
}

static void on_call_deadline(void *call) {
  server_call *c = call;
  connection *conn = c->conn;
  kvrelay_grpc_loop_turn(&conn->server->loop);
  if (c->http_status != NULL) {
    send_http_error(c);
  } else if (c->headers_sent && !c->deferred) {
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
  if (kvrelay_timer_open(&c->deadline, c->conn->server->loop.base, on_call_deadline, c) ==
      KVRELAY_TRANSPORT_OK)
    kvrelay_timer_set(&c->deadline, c->timeout_ns);
  else
    call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for a deadline");
}

static void call_fail_http(server_call *c, const char *http_status, const char *explanation) {
  c->ended = true;
  c->http_status = http_status;
  c->explanation = c->method == METHOD_HEAD ? NULL : explanation;
  c->timeout_ns = c->conn->server->cfg.handshake_timeout_ns;
  call_set_deadline(c);
}

/* All headers of a request are there. */
void kvrelay_grpc_call_begin(server_call *c) {
  server *s = c->conn->server;
  kvrelay_status status;
  if (c->header_bytes > MAX_HEADER_LIST_BYTES) {
    call_fail_http(c, "431", "headers above 16 KiB\n");
  } else if (c->method != METHOD_POST) {
    call_fail_http(c, "405", "gRPC is spoken here: POST\n");
  } else if (c->content == KVRELAY_GRPC_CONTENT_FOREIGN) {
    call_fail_http(c, "415", "gRPC is spoken here: content-type application/grpc\n");
  } else if (c->content == KVRELAY_GRPC_CONTENT_OTHER) {
    call_fail(c, KVRELAY_GRPC_UNIMPLEMENTED,
              "only application/grpc and application/grpc+proto are spoken here");
  } else if (c->bad_encoding) {
    call_fail(c, KVRELAY_GRPC_UNIMPLEMENTED, "this compression of requests is not spoken here");
  } else if (c->bad_timeout) {
    call_fail(c, KVRELAY_GRPC_INTERNAL, "grpc-timeout is malformed");
  } else if (c->metadata_err == KVRELAY_TRANSPORT_ERR_PROTOCOL) {
    call_fail(c, KVRELAY_GRPC_INTERNAL, "binary metadata is not base64");
  } else if (c->metadata_err != KVRELAY_TRANSPORT_OK) {
    call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "too much metadata");
  } else {
    nghttp2_vec path = nghttp2_rcbuf_get_buf(c->path);
    int err = s->service->open(s->service, &c->base, path.base, path.len, s->loop.now_ns,
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

void kvrelay_grpc_call_half_close(server_call *c) {
  server *s = c->conn->server;
  kvrelay_status status;
  if (c->http_status != NULL)
    send_http_error(c);
  if (!c->accepted)
    return;
  if (!kvrelay_grpc_inbox_empty(&c->inbox))
    call_fail(c, KVRELAY_GRPC_INTERNAL, "the request ends inside a message");
  else
    call_told(c, s->service->half_close(s->service, c->handle, s->loop.now_ns, &status), &status);
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
                c->inbox.encoding_ == KVRELAY_GRPC_IDENTITY
                    ? "message flagged as compressed, but no encoding was announced"
                    : "message does not decompress");
    else if (used < 0)
      call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for a request message");
    if (used < 0)
      return;
    bytes += used;
    len -= (size_t)used;
    if (message.base != NULL)
      call_told(c,
                s->service->message(s->service, c->handle, message.base, message.len,
                                    s->loop.now_ns, &status),
                &status);
  }
}

/* ---- what nghttp2 tells ---- */

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *conn_) {
  connection *conn = conn_;
  if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
    return 0;
  nghttp2_mem *mem = &conn->server->pool.mem;
  server_call *c = mem->calloc(1, sizeof *c, mem->mem_user_data);
  if (c == NULL)
    return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  c->base = (kvrelay_call){.wake = on_call_wake, .keeps = true};
  c->outbox.returned = on_returned;
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

/* The client takes answers that are compressed like this. */
static void call_choose_encoding(server_call *c, nghttp2_vec list) {
  for (int e = KVRELAY_GRPC_ZSTD; e > c->encoding; e--)
    if ((c->conn->server->cfg.response_encodings >> e & 1) != 0 &&
        kvrelay_grpc_encoding_name(e) != NULL &&
        kvrelay_grpc_encoding_listed(list.base, list.len, e))
      c->encoding = (uint8_t)e;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_,
                     nghttp2_rcbuf *value_, uint8_t flags, void *conn_) {
  (void)flags;
  (void)conn_;
  if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
    return 0;
  server_call *c = kvrelay_grpc_call_of(session, frame->hd.stream_id);
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
    c->method = is(value, "POST") ? METHOD_POST : is(value, "HEAD") ? METHOD_HEAD : METHOD_OTHER;
  } else if (is(name, "content-type")) {
    c->content = (uint8_t)kvrelay_grpc_content_type(value.base, value.len);
  } else if (is(name, "grpc-timeout")) {
    c->bad_timeout = !kvrelay_grpc_timeout_parse(value.base, value.len, &c->timeout_ns);
  } else if (is(name, "grpc-encoding")) {
    int encoding = kvrelay_grpc_encoding_find(value.base, value.len);
    c->bad_encoding = encoding < 0;
    kvrelay_grpc_inbox_encoding(&c->inbox, c->bad_encoding ? KVRELAY_GRPC_IDENTITY : encoding);
  } else if (is(name, "grpc-accept-encoding")) {
    call_choose_encoding(c, value);
  } else if (c->conn->server->cfg.request_metadata && c->metadata_err == KVRELAY_TRANSPORT_OK) {
    c->metadata_err =
        kvrelay_grpc_metadata_receive(&c->request, name.base, name.len, value.base, value.len);
  }
  return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *bytes,
                   size_t len, void *conn_) {
  server_call *c = kvrelay_grpc_call_of(session, stream);
  (void)flags;
  (void)conn_;
  if (c != NULL)
    call_receive(c, bytes, len);
  return 0;
}

void kvrelay_grpc_call_callbacks(nghttp2_session_callbacks *callbacks) {
  nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, on_begin_headers);
  nghttp2_session_callbacks_set_on_header_callback2(callbacks, on_header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
  nghttp2_session_callbacks_set_send_data_callback(callbacks, on_send_data);
}

/* ---- for services ---- */

/* NULL: a call of another transport. */
static server_call *own_call(const kvrelay_call *call) {
  return call->wake == on_call_wake ? (server_call *)(uintptr_t)call : NULL;
}

bool kvrelay_grpc_server_metadata(const kvrelay_call *call, const char *name, size_t *cursor,
                                  kvrelay_iov *value) {
  const server_call *c = own_call(call);
  return c != NULL && kvrelay_grpc_metadata_find(&c->request, name, cursor, value);
}

int kvrelay_grpc_server_add_initial(kvrelay_call *call, const char *name, const void *value,
                                    size_t len) {
  server_call *c = own_call(call);
  if (c == NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  return c->headers_sent || c->ended ? KVRELAY_TRANSPORT_CLOSED
                                     : kvrelay_grpc_metadata_add(&c->initial, name, value, len);
}

int kvrelay_grpc_server_add_trailing(kvrelay_call *call, const char *name, const void *value,
                                     size_t len) {
  server_call *c = own_call(call);
  if (c == NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  return c->ended ? KVRELAY_TRANSPORT_CLOSED
                  : kvrelay_grpc_metadata_add(&c->trailing, name, value, len);
}

void kvrelay_grpc_server_compress(kvrelay_call *call, bool on) {
  server_call *c = own_call(call);
  if (c != NULL)
    c->plain = !on;
}

bool kvrelay_grpc_server_compressed(const kvrelay_call *call) {
  const server_call *c = own_call(call);
  return c != NULL && c->inbox.flagged_;
}
