/* SPDX-License-Identifier: Apache-2.0 */
/* One call of the client: its request out, headers and messages in, and how it ends. */
#include "grpc_client_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Unsent bytes of a call beyond which it takes no further message until all of them are gone. */
#define SEND_CAP ((size_t)65536)

static client_call *call_find(client *k, uint32_t number) {
  return kvrelay_call_map_find(&k->open, number);
}

/* ---- end ---- */

/* From here on the call is only a stream that nghttp2 has not closed yet. */
static void call_over(client_call *c) {
  client *k = c->client;
  c->over = true;
  kvrelay_call_map_remove(&k->open, &c->node);
  if (c->deadline_ns != KVRELAY_TIME_NONE)
    TAILQ_REMOVE(&k->due, c, due);
  if (k->open.len == 0 && k->state == CLIENT_READY && (client_goaway(k) || client_stopping(k)))
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED,
                           client_goaway(k) ? "the server goes away" : "stopped");
}

static void call_end(client_call *c, const kvrelay_status *status) {
  client *k = c->client;
  if (c->over)
    return;
  call_over(c);
  k->caller->end(k->caller, c->number, status, kvrelay_now_ns());
}

static void call_fail(client_call *c, int32_t grpc, const char *text) {
  kvrelay_status status;
  (void)kvrelay_refuse(&status, grpc, text);
  call_end(c, &status);
}

static void call_free(client_call *c) {
  TAILQ_REMOVE(&c->client->calls, c, link);
  kvrelay_grpc_inbox_free(&c->inbox);
  kvrelay_grpc_outbox_free(&c->outbox);
  kvrelay_grpc_metadata_free(&c->metadata);
  free(c);
}

static void call_reset(client_call *c) {
  kvrelay_grpc_link *link = &c->client->link;
  kvrelay_grpc_link_submitted(
      link, nghttp2_submit_rst_stream(link->session, NGHTTP2_FLAG_NONE, c->stream, NGHTTP2_CANCEL));
  kvrelay_grpc_link_kick(link);
}

/* The server has nothing to say any more that would count. */
static void call_reset_and_fail(client_call *c, int32_t grpc, const char *text) {
  if (c->over)
    return;
  call_reset(c);
  call_fail(c, grpc, text);
}

void kvrelay_grpc_client_call_cancel(client *k, uint32_t number) {
  client_call *c = call_find(k, number);
  if (c == NULL)
    return;
  if (client_has_link(k))
    call_reset(c);
  call_over(c);
}

void kvrelay_grpc_client_calls_expire(client *k, uint64_t now_ns) {
  client_call *c;
  while ((c = TAILQ_FIRST(&k->due)) != NULL && c->deadline_ns <= now_ns)
    call_reset_and_fail(c, KVRELAY_GRPC_DEADLINE_EXCEEDED, "no end of the call in time");
}

void kvrelay_grpc_client_calls_fail(client *k, const char *text) {
  client_call *c;
  TAILQ_FOREACH(c, &k->calls, link)
  call_fail(c, KVRELAY_GRPC_UNAVAILABLE, text);
}

void kvrelay_grpc_client_calls_free(client *k) {
  client_call *c;
  while ((c = TAILQ_FIRST(&k->calls)) != NULL)
    call_free(c);
}

/* ---- answer ---- */

/* What an HTTP status means when there is no gRPC status. */
static int32_t status_of_http(int http) {
  switch (http) {
  case 400:
  case 431:
    return KVRELAY_GRPC_INTERNAL;
  case 401:
    return KVRELAY_GRPC_UNAUTHENTICATED;
  case 403:
    return KVRELAY_GRPC_PERMISSION_DENIED;
  case 404:
    return KVRELAY_GRPC_UNIMPLEMENTED;
  case 429:
  case 502:
  case 503:
  case 504:
    return KVRELAY_GRPC_UNAVAILABLE;
  default:
    return KVRELAY_GRPC_UNKNOWN;
  }
}

static int32_t status_of_reset(uint32_t error_code) {
  switch (error_code) {
  case NGHTTP2_REFUSED_STREAM:
    return KVRELAY_GRPC_UNAVAILABLE;
  case NGHTTP2_CANCEL:
    return KVRELAY_GRPC_CANCELLED;
  case NGHTTP2_ENHANCE_YOUR_CALM:
    return KVRELAY_GRPC_RESOURCE_EXHAUSTED;
  case NGHTTP2_INADEQUATE_SECURITY:
    return KVRELAY_GRPC_PERMISSION_DENIED;
  default:
    return KVRELAY_GRPC_INTERNAL;
  }
}

static void call_fail_http(client_call *c) {
  char text[64];
  if (c->http_status == 200)
    snprintf(text, sizeof text, "%s",
             c->grpc_content ? "the answer has no gRPC status" : "the answer is not gRPC");
  else
    snprintf(text, sizeof text, "HTTP status %d", c->http_status);
  call_fail(c, status_of_http(c->http_status), text);
}

void kvrelay_grpc_client_call_finish(client_call *c) {
  if (nghttp2_session_get_stream_local_close(c->client->link.session, c->stream) == 0)
    call_reset(c); /* the rest of the request is of no use any more */
  if (!c->has_status)
    call_fail_http(c);
  else if (c->status.grpc == KVRELAY_GRPC_OK && !kvrelay_grpc_inbox_empty(&c->inbox))
    call_fail(c, KVRELAY_GRPC_INTERNAL, "the answer ends inside a message");
  else
    call_end(c, &c->status);
}

static void call_feed_failed(client_call *c, ptrdiff_t err) {
  if (err == KVRELAY_TRANSPORT_ERR_LIMIT)
    call_reset_and_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "answer message above the limit");
  else if (err == KVRELAY_TRANSPORT_ERR_PROTOCOL)
    call_reset_and_fail(c, KVRELAY_GRPC_INTERNAL,
                        "answer message broken, or compressed as nobody offered");
  else
    call_reset_and_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for an answer message");
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *bytes,
                   size_t len, void *client_) {
  client *k = client_;
  client_call *c = kvrelay_grpc_client_call_of(session, stream);
  (void)flags;
  while (c != NULL && len > 0 && !c->over) {
    kvrelay_iov message;
    ptrdiff_t used = kvrelay_grpc_inbox_feed(&c->inbox, bytes, len, &message);
    if (used < 0) {
      call_feed_failed(c, used);
      return 0;
    }
    bytes += used;
    len -= (size_t)used;
    if (message.base != NULL)
      k->caller->message(k->caller, c->number, message.base, message.len, kvrelay_now_ns());
  }
  return 0;
}

static bool is(nghttp2_vec text, const char *what) {
  return text.len == strlen(what) && memcmp(text.base, what, text.len) == 0;
}

/* Up to nine digits; -1 for anything else. */
static int decimal(nghttp2_vec text) {
  int value = 0;
  if (text.len == 0 || text.len > 9)
    return -1;
  for (size_t i = 0; i < text.len; i++) {
    if (text.base[i] < '0' || text.base[i] > '9')
      return -1;
    value = 10 * value + (text.base[i] - '0');
  }
  return value;
}

/* As kvrelay_status has it.  What is no number of milliseconds, one below 0 included, means that
 * the call is not to be made again. */
static uint64_t pushback(nghttp2_vec text) {
  const int ms = decimal(text);
  if (ms < 0)
    return KVRELAY_TIME_NONE;
  return ms == 0 ? 1 : (uint64_t)ms * 1000000u;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_,
                     nghttp2_rcbuf *value_, uint8_t flags, void *client_) {
  client_call *c = frame->hd.type == NGHTTP2_HEADERS
                       ? kvrelay_grpc_client_call_of(session, frame->hd.stream_id)
                       : NULL;
  (void)flags;
  (void)client_;
  if (c == NULL || c->over)
    return 0;
  nghttp2_vec name = nghttp2_rcbuf_get_buf(name_), value = nghttp2_rcbuf_get_buf(value_);
  if (is(name, ":status")) {
    c->http_status = decimal(value);
  } else if (is(name, "content-type")) {
    c->grpc_content =
        kvrelay_grpc_content_type(value.base, value.len) != KVRELAY_GRPC_CONTENT_FOREIGN;
  } else if (is(name, "grpc-status")) {
    int number = decimal(value);
    c->has_status = true;
    c->status.grpc =
        number >= 0 && number <= KVRELAY_GRPC_UNAUTHENTICATED ? number : KVRELAY_GRPC_UNKNOWN;
  } else if (is(name, "grpc-encoding") && !c->got_headers && c->client->cfg.accept_compressed) {
    const int encoding = kvrelay_grpc_encoding_find(value.base, value.len);
    if (encoding > KVRELAY_GRPC_IDENTITY)
      kvrelay_grpc_inbox_encoding(&c->inbox, encoding);
  } else if (is(name, "grpc-message")) {
    kvrelay_grpc_percent_decode(value.base, value.len, c->status.text, sizeof c->status.text);
  } else if (is(name, "kv-relay-error-reason")) {
    c->status.reason = kvrelay_reason_from_name(value.base, value.len);
  } else if (is(name, "grpc-retry-pushback-ms")) {
    c->status.retry_ns = pushback(value);
  } else if (c->events != NULL && c->events->metadata != NULL &&
             c->metadata_err == KVRELAY_TRANSPORT_OK) {
    c->metadata_err =
        kvrelay_grpc_metadata_receive(&c->metadata, name.base, name.len, value.base, value.len);
  }
  return 0;
}

/* Hands the metadata of one header block on; false: it ended the call. */
static bool call_metadata(client_call *c, bool trailing) {
  client *k = c->client;
  size_t cursor = 0;
  kvrelay_iov name, value;
  if (c->metadata_err == KVRELAY_TRANSPORT_ERR_PROTOCOL)
    call_reset_and_fail(c, KVRELAY_GRPC_INTERNAL, "metadata of the answer is not base64");
  else if (c->metadata_err != KVRELAY_TRANSPORT_OK)
    call_reset_and_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED,
                        "metadata of the answer above the limit");
  else if (kvrelay_grpc_metadata_next(&c->metadata, &cursor, &name, &value))
    c->events->metadata(k->caller, c->number, trailing, &c->metadata, kvrelay_now_ns());
  kvrelay_grpc_metadata_free(&c->metadata);
  return !c->over;
}

void kvrelay_grpc_client_call_headers(client_call *c, bool last) {
  client *k = c->client;
  if (c->over)
    return;
  if (c->http_status >= 100 && c->http_status < 200) {
    kvrelay_grpc_metadata_free(&c->metadata);
    return;
  }
  if (!call_metadata(c, last || c->got_headers) || last || c->got_headers)
    return;
  c->got_headers = true;
  if (c->http_status == 200 && c->grpc_content) {
    k->caller->admitted(k->caller, c->number, kvrelay_now_ns());
    return;
  }
  call_reset(c);
  call_fail_http(c);
}

static int on_stream_close(nghttp2_session *session, int32_t stream, uint32_t error_code,
                           void *client_) {
  client_call *c = kvrelay_grpc_client_call_of(session, stream);
  char text[64];
  (void)client_;
  if (c == NULL)
    return 0;
  snprintf(text, sizeof text, "stream reset: %s", nghttp2_http2_strerror(error_code));
  call_fail(c, status_of_reset(error_code), text);
  call_free(c);
  return 0;
}

/* ---- request ---- */

static ssize_t on_read_data(nghttp2_session *session, int32_t stream, uint8_t *buf, size_t length,
                            uint32_t *flags, nghttp2_data_source *source, void *client_) {
  client_call *c = source->ptr;
  (void)session;
  (void)stream;
  (void)buf;
  (void)client_;
  size_t pending = kvrelay_grpc_outbox_pending(&c->outbox);
  size_t n = pending < length ? pending : length;
  c->deferred = n == 0 && !c->half_closed;
  if (c->deferred)
    return NGHTTP2_ERR_DEFERRED;
  *flags |=
      NGHTTP2_DATA_FLAG_NO_COPY | (n == pending && c->half_closed ? NGHTTP2_DATA_FLAG_EOF : 0u);
  return (ssize_t)n;
}

static int on_send_data(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head,
                        size_t length, nghttp2_data_source *source, void *client_) {
  client *k = client_;
  client_call *c = source->ptr;
  (void)session;
  (void)frame;
  if (evbuffer_add(k->link.out, head, 9) != 0 ||
      (length > 0 &&
       kvrelay_grpc_outbox_move(&c->outbox, length, k->link.out) != KVRELAY_TRANSPORT_OK))
    return NGHTTP2_ERR_CALLBACK_FAILURE;
  if (c->wants_room && !c->over && kvrelay_grpc_outbox_pending(&c->outbox) == 0) {
    c->wants_room = false;
    c->events->room(k->caller, c->number, kvrelay_now_ns());
  }
  return kvrelay_grpc_link_has_room(&k->link) ? 0 : NGHTTP2_ERR_PAUSE;
}

static void call_resume(client_call *c) {
  if (!c->deferred)
    return;
  c->deferred = false;
  kvrelay_grpc_link_submitted(&c->client->link,
                              nghttp2_session_resume_data(c->client->link.session, c->stream));
  kvrelay_grpc_link_kick(&c->client->link);
}

int kvrelay_grpc_client_send(kvrelay_client_transport *t, uint32_t number, const uint8_t *bytes,
                             size_t len) {
  client *k = client_of(&t->base);
  client_call *c = call_find(k, number);
  if (c == NULL || c->half_closed || len > k->cfg.max_message_bytes)
    return KVRELAY_TRANSPORT_ERR_ARG;
  const size_t pending = kvrelay_grpc_outbox_pending(&c->outbox);
  if ((pending > 0 && len + pending > SEND_CAP) || !kvrelay_grpc_outbox_can_add(&c->outbox)) {
    c->wants_room = c->events != NULL && c->events->room != NULL;
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  }
  const kvrelay_parts parts = {.part = {{bytes, len}}, .part_len = 1, .bytes = len};
  const int err = kvrelay_grpc_outbox_add(&c->outbox, &parts);
  if (err == KVRELAY_TRANSPORT_OK)
    call_resume(c);
  return err;
}

int kvrelay_grpc_client_half_close(kvrelay_client_transport *t, uint32_t number) {
  client_call *c = call_find(client_of(&t->base), number);
  if (c == NULL || c->half_closed)
    return KVRELAY_TRANSPORT_ERR_ARG;
  c->half_closed = true;
  call_resume(c);
  return KVRELAY_TRANSPORT_OK;
}

/* ---- start ---- */

/* Values that are not `lasting` are copied by nghttp2, which only reads them although its type does
 * not say so. */
static nghttp2_nv header(const void *name, size_t name_len, const void *value, size_t value_len,
                         bool lasting) {
  const unsigned flags = NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE;
  return (nghttp2_nv){(uint8_t *)(uintptr_t)name, (uint8_t *)(uintptr_t)value, name_len, value_len,
                      (uint8_t)(lasting ? flags : NGHTTP2_NV_FLAG_NONE)};
}

#define TEXT(NAME, VALUE) header(NAME, sizeof NAME - 1, VALUE, sizeof VALUE - 1, true)

static int submit(client_call *c, const kvrelay_grpc_call_options *options) {
  client *k = c->client;
  const char *authority = k->target.authority;
  char timeout[KVRELAY_GRPC_TIMEOUT_CAP];
  nghttp2_nv list[9 + KVRELAY_GRPC_METADATA_ENTRIES];
  size_t n = 0, cursor = 0;
  kvrelay_iov name, value;
  list[n++] = TEXT(":method", "POST");
  list[n++] = k->cfg.security != NULL ? TEXT(":scheme", "https") : TEXT(":scheme", "http");
  list[n++] = header(":path", 5, options->path, strlen(options->path), false);
  list[n++] = header(":authority", 10, authority, strlen(authority), true);
  if (options->timeout_ns != KVRELAY_TIME_NONE)
    list[n++] = header("grpc-timeout", 12, timeout,
                       kvrelay_grpc_timeout_put(options->timeout_ns, timeout), false);
  list[n++] = TEXT("te", "trailers");
  list[n++] = TEXT("content-type", "application/grpc");
  list[n++] = TEXT("user-agent", "kvrelay");
  if (k->cfg.accept_compressed)
    list[n++] = header("grpc-accept-encoding", 20, kvrelay_grpc_encodings(),
                       strlen(kvrelay_grpc_encodings()), true);
  while (options->metadata != NULL && n < sizeof list / sizeof *list &&
         kvrelay_grpc_metadata_next(options->metadata, &cursor, &name, &value))
    list[n++] = header(name.base, name.len, value.base, value.len, false);
  const nghttp2_data_provider provider = {.source = {.ptr = c}, .read_callback = on_read_data};
  c->stream = nghttp2_submit_request(k->link.session, NULL, list, n, &provider, c);
  return c->stream < 0 ? KVRELAY_TRANSPORT_ERR_LIMIT : KVRELAY_TRANSPORT_OK;
}

/* In order of their time; most limits are equal, so the place is near the end. */
static void add_due(client_call *c) {
  client *k = c->client;
  client_call *before;
  TAILQ_FOREACH_REVERSE(before, &k->due, client_calls, due)
  if (before->deadline_ns <= c->deadline_ns)
    break;
  if (before != NULL)
    TAILQ_INSERT_AFTER(&k->due, before, c, due);
  else
    TAILQ_INSERT_HEAD(&k->due, c, due);
  if (c->deadline_ns < k->link.timer_at_ns) /* a timer that comes too early does no harm */
    kvrelay_grpc_link_rearm(&k->link);
}

static int may_start(client *k, uint32_t number, const kvrelay_grpc_call_options *options) {
  if (number == 0 || options->path == NULL || call_find(k, number) != NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (k->state != CLIENT_READY || client_goaway(k) || k->link.err != 0 || client_stopping(k))
    return KVRELAY_TRANSPORT_ERR_CONNECT;
  /* Beyond the server's limit a call would wait in silence. */
  if (k->open.len >= k->cfg.max_calls ||
      k->open.len >= nghttp2_session_get_remote_settings(k->link.session,
                                                         NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS))
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_grpc_client_call_start(client *k, uint32_t number,
                                   const kvrelay_grpc_call_options *options,
                                   const kvrelay_iov *message) {
  int err = may_start(k, number, options);
  client_call *c = err == KVRELAY_TRANSPORT_OK ? calloc(1, sizeof *c) : NULL;
  if (c == NULL)
    return err != KVRELAY_TRANSPORT_OK ? err : KVRELAY_TRANSPORT_ERR_MEMORY;
  c->client = k;
  c->number = number;
  c->events = options->events;
  c->half_closed = message != NULL;
  c->deadline_ns = options->timeout_ns == KVRELAY_TIME_NONE
                       ? KVRELAY_TIME_NONE
                       : kvrelay_later_ns(kvrelay_now_ns(), options->timeout_ns);
  kvrelay_grpc_inbox_init(&c->inbox, k->cfg.max_message_bytes);
  if (message != NULL) {
    const kvrelay_parts parts = {.part = {*message}, .part_len = 1, .bytes = message->len};
    err = kvrelay_grpc_outbox_add(&c->outbox, &parts);
  }
  if (err == KVRELAY_TRANSPORT_OK)
    err = submit(c, options);
  if (err != KVRELAY_TRANSPORT_OK) {
    kvrelay_grpc_outbox_free(&c->outbox);
    free(c);
    return err;
  }
  TAILQ_INSERT_TAIL(&k->calls, c, link);
  kvrelay_call_map_add(&k->open, &c->node, number);
  if (c->deadline_ns != KVRELAY_TIME_NONE)
    add_due(c);
  kvrelay_grpc_link_kick(&k->link);
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_grpc_client_start(kvrelay_client_transport *t, uint32_t number,
                              const kvrelay_grpc_call_options *options) {
  return kvrelay_grpc_client_call_start(client_of(&t->base), number, options, NULL);
}

void kvrelay_grpc_client_call_callbacks(nghttp2_session_callbacks *callbacks) {
  nghttp2_session_callbacks_set_on_header_callback2(callbacks, on_header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_stream_close);
  nghttp2_session_callbacks_set_send_data_callback(callbacks, on_send_data);
  nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks,
                                                                 kvrelay_grpc_link_frame_len);
}
