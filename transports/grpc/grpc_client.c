/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "grpc_dial.h"
#include "grpc_link.h"
#include "grpc_message.h"

#define SECOND_NS UINT64_C(1000000000)
#define MAX_FRAME_BYTES 262144
#define MAX_HEADER_LIST_BYTES 16384
#define CALL_BUCKETS 256
#define DEFAULT_WINDOW_BYTES 65535
#define OUTPUT_THRESHOLD 262144

static const uint8_t keepalive_ping[8] = "kvrelay";

typedef struct client client;
typedef struct client_call client_call;
TAILQ_HEAD(client_calls, client_call);
LIST_HEAD(call_bucket, client_call);

struct client_call {
  TAILQ_ENTRY(client_call) link;
  LIST_ENTRY(client_call) bucket;
  client *client;
  kvrelay_grpc_inbox inbox;
  kvrelay_grpc_outbox outbox;
  kvrelay_status status; /* from trailers */
  uint32_t number;
  int32_t stream;
  int http_status;
  bool grpc_content, has_status;
  bool got_headers; /* final ones */
  bool over;        /* ended or cancelled: its number is free, nothing is told any more */
};

enum client_state {
  CLIENT_WAITING = 1,
  CLIENT_DIALLING,
  CLIENT_HANDSHAKE,
  CLIENT_READY,
  CLIENT_CLOSED
};

struct client {
  kvrelay_client_transport base; /* first */
  kvrelay_grpc_client_config cfg;
  kvrelay_caller *caller;
  kvrelay_grpc_target target;
  kvrelay_grpc_loop loop;
  kvrelay_grpc_link link; /* open while state is HANDSHAKE or READY */
  kvrelay_grpc_dial dial; /* active while state is DIALLING */
  kvrelay_timer timer;    /* WAITING: next attempt; DIALLING: time limit */
  struct client_calls calls;
  struct call_bucket bucket[CALL_BUCKETS];
  uint32_t calls_count; /* not over */
  int state;            /* enum client_state */
  uint64_t attempt_ns;  /* start of the last attempt */
  uint64_t backoff_ns;  /* from one start to the next */
  uint64_t keepalive_ns, ping_at_ns;
  uint64_t stop_at_ns; /* KVRELAY_TIME_NONE: not stopping */
  uint64_t random;
  nghttp2_session_callbacks *callbacks;
  nghttp2_option *option;
  size_t first_len; /* of the server's first frame header, to tell what it speaks */
  bool ping_open, goaway;
};

static void set_status(kvrelay_status *status, int32_t grpc, const char *text) {
  status->grpc = grpc;
  status->reason = KVRELAY_REASON_NONE;
  snprintf(status->text, sizeof status->text, "%s", text);
}

static uint64_t later_by(uint64_t now, uint64_t delay) {
  return delay > KVRELAY_TIME_NONE - now ? KVRELAY_TIME_NONE : now + delay;
}

static client *client_of(const kvrelay_transport *t) { return (client *)(uintptr_t)t; }

/* ---- calls ---- */

static client_call *call_find(client *k, uint32_t number) {
  client_call *c;
  LIST_FOREACH(c, &k->bucket[number % CALL_BUCKETS], bucket)
  if (c->number == number)
    return c;
  return NULL;
}

/* From here on the call is only a stream that nghttp2 has not closed yet. */
static void call_over(client_call *c) {
  client *k = c->client;
  c->over = true;
  LIST_REMOVE(c, bucket);
  if (--k->calls_count == 0 && k->state == CLIENT_READY &&
      (k->goaway || k->stop_at_ns != KVRELAY_TIME_NONE))
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED,
                           k->goaway ? "the server goes away" : "stopped");
}

static void call_end(client_call *c, const kvrelay_status *status) {
  client *k = c->client;
  if (c->over)
    return;
  uint32_t number = c->number;
  kvrelay_status copy = *status;
  call_over(c);
  k->caller->end(k->caller, number, &copy, kvrelay_now_ns());
}

static void call_fail(client_call *c, int32_t grpc, const char *text) {
  kvrelay_status status;
  set_status(&status, grpc, text);
  call_end(c, &status);
}

static void call_free(client_call *c) {
  TAILQ_REMOVE(&c->client->calls, c, link);
  kvrelay_grpc_inbox_free(&c->inbox);
  kvrelay_grpc_outbox_free(&c->outbox);
  free(c);
}

static void call_reset(client_call *c) {
  kvrelay_grpc_link *link = &c->client->link;
  kvrelay_grpc_link_submitted(
      link, nghttp2_submit_rst_stream(link->session, NGHTTP2_FLAG_NONE, c->stream, NGHTTP2_CANCEL));
  kvrelay_grpc_link_kick(link);
}

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

/* The server ended its side of the stream. */
static void call_finish(client_call *c) {
  if (!c->has_status)
    call_fail_http(c);
  else if (c->status.grpc == KVRELAY_GRPC_OK && !kvrelay_grpc_inbox_empty(&c->inbox))
    call_fail(c, KVRELAY_GRPC_INTERNAL, "the answer ends inside a message");
  else
    call_end(c, &c->status);
}

static void call_receive(client_call *c, const uint8_t *bytes, size_t len) {
  client *k = c->client;
  while (len > 0 && !c->over) {
    kvrelay_iov message;
    ptrdiff_t used = kvrelay_grpc_inbox_feed(&c->inbox, bytes, len, &message);
    if (used < 0) {
      call_reset(c);
      if (used == KVRELAY_TRANSPORT_ERR_LIMIT)
        call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "answer message above the limit");
      else if (used == KVRELAY_TRANSPORT_ERR_PROTOCOL)
        call_fail(c, KVRELAY_GRPC_INTERNAL,
                  "answer message compressed, although nothing was offered");
      else
        call_fail(c, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory for an answer message");
      return;
    }
    bytes += used;
    len -= (size_t)used;
    if (message.base != NULL)
      k->caller->message(k->caller, c->number, message.base, message.len, kvrelay_now_ns());
  }
}

/* ---- nghttp2 callbacks ---- */

static client_call *call_of(nghttp2_session *session, int32_t stream) {
  return nghttp2_session_get_stream_user_data(session, stream);
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

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_,
                     nghttp2_rcbuf *value_, uint8_t flags, void *client_) {
  client_call *c = frame->hd.type == NGHTTP2_HEADERS ? call_of(session, frame->hd.stream_id) : NULL;
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
  } else if (is(name, "grpc-message")) {
    kvrelay_grpc_percent_decode(value.base, value.len, c->status.text, sizeof c->status.text);
  } else if (is(name, "kv-relay-error-reason")) {
    c->status.reason = kvrelay_reason_from_name(value.base, value.len);
  }
  return 0;
}

static void on_settings(client *k) {
  if (k->state != CLIENT_HANDSHAKE)
    return;
  uint64_t now = kvrelay_now_ns();
  k->state = CLIENT_READY;
  k->backoff_ns = k->cfg.backoff_first_ns;
  k->ping_at_ns = later_by(now, k->keepalive_ns);
  kvrelay_grpc_link_rearm(&k->link);
  k->caller->connection(k->caller, KVRELAY_CONNECTION_READY, KVRELAY_TRANSPORT_OK, "",
                        KVRELAY_TIME_NONE, now);
}

static void on_goaway(client *k, const nghttp2_goaway *frame) {
  static const char calm[] = "too_many_pings";
  k->goaway = true;
  if (frame->error_code == NGHTTP2_ENHANCE_YOUR_CALM && frame->opaque_data_len == sizeof calm - 1 &&
      memcmp(frame->opaque_data, calm, sizeof calm - 1) == 0)
    k->keepalive_ns =
        k->keepalive_ns > KVRELAY_TIME_NONE / 2 ? KVRELAY_TIME_NONE : 2 * k->keepalive_ns;
  if (k->calls_count == 0)
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "the server goes away");
}

static void on_answer_headers(client_call *c, bool last) {
  client *k = c->client;
  if (c->http_status >= 100 && c->http_status < 200)
    return;
  if (last || c->got_headers || c->over)
    return;
  c->got_headers = true;
  if (c->http_status == 200 && c->grpc_content) {
    k->caller->admitted(k->caller, c->number, kvrelay_now_ns());
    return;
  }
  call_reset(c);
  call_fail_http(c);
}

static int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *client_) {
  client *k = client_;
  switch (frame->hd.type) {
  case NGHTTP2_SETTINGS:
    if (!(frame->hd.flags & NGHTTP2_FLAG_ACK))
      on_settings(k);
    return 0;
  case NGHTTP2_PING:
    if ((frame->hd.flags & NGHTTP2_FLAG_ACK) && k->ping_open) {
      k->ping_open = false;
      k->ping_at_ns = later_by(kvrelay_now_ns(), k->keepalive_ns);
      kvrelay_grpc_link_rearm(&k->link);
    }
    return 0;
  case NGHTTP2_GOAWAY:
    on_goaway(k, &frame->goaway);
    return 0;
  case NGHTTP2_HEADERS:
  case NGHTTP2_DATA:
    break;
  default:
    return 0;
  }
  client_call *c = call_of(session, frame->hd.stream_id);
  if (c == NULL)
    return 0;
  bool last = (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  if (frame->hd.type == NGHTTP2_HEADERS)
    on_answer_headers(c, last);
  if (last) {
    if (nghttp2_session_get_stream_local_close(session, c->stream) == 0)
      call_reset(c); /* the rest of the request is of no use any more */
    call_finish(c);
  }
  return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *bytes,
                   size_t len, void *client_) {
  client_call *c = call_of(session, stream);
  (void)flags;
  (void)client_;
  if (c != NULL)
    call_receive(c, bytes, len);
  return 0;
}

static int on_frame_sent(nghttp2_session *session, const nghttp2_frame *frame, void *client_) {
  client *k = client_;
  (void)session;
  if (frame->hd.type == NGHTTP2_GOAWAY && frame->goaway.error_code != NGHTTP2_NO_ERROR)
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                           nghttp2_http2_strerror(frame->goaway.error_code));
  return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t stream, uint32_t error_code,
                           void *client_) {
  client_call *c = call_of(session, stream);
  char text[64];
  (void)client_;
  if (c == NULL)
    return 0;
  snprintf(text, sizeof text, "stream reset: %s", nghttp2_http2_strerror(error_code));
  call_fail(c, status_of_reset(error_code), text);
  call_free(c);
  return 0;
}

static ssize_t on_read_data(nghttp2_session *session, int32_t stream, uint8_t *buf, size_t length,
                            uint32_t *flags, nghttp2_data_source *source, void *client_) {
  const client_call *c = source->ptr;
  (void)session;
  (void)stream;
  (void)buf;
  (void)client_;
  size_t pending = kvrelay_grpc_outbox_pending(&c->outbox);
  size_t n = pending < length ? pending : length;
  *flags |= NGHTTP2_DATA_FLAG_NO_COPY | (n == pending ? NGHTTP2_DATA_FLAG_EOF : 0u);
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
  return kvrelay_grpc_link_has_room(&k->link) ? 0 : NGHTTP2_ERR_PAUSE;
}

static int make_callbacks(client *k) {
  if (nghttp2_session_callbacks_new(&k->callbacks) != 0 || nghttp2_option_new(&k->option) != 0)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  nghttp2_session_callbacks_set_on_header_callback2(k->callbacks, on_header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(k->callbacks, on_data);
  nghttp2_session_callbacks_set_on_frame_recv_callback(k->callbacks, on_frame);
  nghttp2_session_callbacks_set_on_frame_send_callback(k->callbacks, on_frame_sent);
  nghttp2_session_callbacks_set_on_stream_close_callback(k->callbacks, on_stream_close);
  nghttp2_session_callbacks_set_send_data_callback(k->callbacks, on_send_data);
  nghttp2_session_callbacks_set_data_source_read_length_callback(k->callbacks,
                                                                 kvrelay_grpc_link_frame_len);
  nghttp2_option_set_no_closed_streams(k->option, 1);
  nghttp2_option_set_max_settings(k->option, 32);
  nghttp2_option_set_max_outbound_ack(k->option, 1000);
  nghttp2_option_set_max_continuations(k->option, 8);
  return KVRELAY_TRANSPORT_OK;
}

/* ---- connection ---- */

static client *client_of_link(const kvrelay_grpc_link *link) {
  return (client *)((uintptr_t)link - offsetof(client, link));
}

static uint64_t random_below(client *k, uint64_t bound) {
  k->random = k->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return bound == 0 ? 0 : (k->random >> 11) % bound;
}

static bool stopping(const client *k) { return k->stop_at_ns != KVRELAY_TIME_NONE; }

static void all_closed(client *k) {
  k->state = CLIENT_CLOSED;
  kvrelay_timer_set_at(&k->timer, KVRELAY_TIME_NONE);
  k->caller->connection(k->caller, KVRELAY_CONNECTION_CLOSED, KVRELAY_TRANSPORT_CLOSED, "stopped",
                        KVRELAY_TIME_NONE, kvrelay_now_ns());
}

/* There is no connection (any more): tell it, and when the next attempt comes. */
static void connection_failed(client *k, int err, const char *text) {
  if (stopping(k)) {
    all_closed(k);
    return;
  }
  uint64_t now = kvrelay_now_ns();
  /* The pause counts from the start of the last attempt, so a connection that lived for a while is
   * replaced at once. */
  uint64_t jittered = k->backoff_ns / 5 * 4 + random_below(k, k->backoff_ns / 5 * 2);
  uint64_t retry = later_by(k->attempt_ns, jittered);
  if (retry < now)
    retry = now;
  k->backoff_ns =
      k->backoff_ns > k->cfg.backoff_max_ns / 8 * 5 ? k->cfg.backoff_max_ns : k->backoff_ns / 5 * 8;
  k->state = CLIENT_WAITING;
  kvrelay_timer_set_at(&k->timer, retry);
  k->caller->connection(k->caller, KVRELAY_CONNECTION_FAILED, err, text, retry, now);
}

static void on_gone(kvrelay_grpc_link *link) {
  client *k = client_of_link(link);
  client_call *c;
  char text[sizeof link->text];
  int err = link->err;
  memcpy(text, link->text, sizeof text);
  k->state = CLIENT_WAITING; /* no new calls from inside the callbacks */
  TAILQ_FOREACH(c, &k->calls, link)
  call_fail(c, KVRELAY_GRPC_UNAVAILABLE, text);
  kvrelay_grpc_link_close(link);
  while ((c = TAILQ_FIRST(&k->calls)) != NULL)
    call_free(c);
  connection_failed(k, err, text);
}

/* A server's first frame is SETTINGS; anything else is worth a plain word. */
static bool on_received(kvrelay_grpc_link *link, const uint8_t *bytes, size_t len) {
  static const char http1[] = "HTTP/";
  client *k = client_of_link(link);
  for (size_t i = 0; i < len && k->first_len < 4; i++, k->first_len++) {
    bool wrong_type = k->first_len == 3 && bytes[i] != NGHTTP2_SETTINGS;
    bool too_long = k->first_len == 0 && bytes[i] != 0;
    if (!wrong_type && !too_long)
      continue;
    const char *what = "not HTTP/2";
    if (k->first_len == 0 && bytes[i] == 0x15)
      what = "the server wants TLS";
    else if (k->first_len == 0 && len - i >= sizeof http1 - 1 &&
             memcmp(bytes + i, http1, sizeof http1 - 1) == 0)
      what = "the server answers HTTP/1.1";
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL, what);
    return false;
  }
  return true;
}

static uint64_t on_deadline_ns(const kvrelay_grpc_link *link) {
  const client *k = client_of_link(link);
  uint64_t at = k->state == CLIENT_HANDSHAKE ? later_by(k->attempt_ns, k->cfg.connect_timeout_ns)
                                             : k->ping_at_ns;
  return at < k->stop_at_ns ? at : k->stop_at_ns;
}

static void on_link_tick(kvrelay_grpc_link *link, uint64_t now) {
  client *k = client_of_link(link);
  if (now >= k->stop_at_ns) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "grace time over");
  } else if (k->state == CLIENT_HANDSHAKE) {
    if (now >= later_by(k->attempt_ns, k->cfg.connect_timeout_ns))
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "no SETTINGS in time");
  } else if (now >= k->ping_at_ns) {
    if (k->ping_open) {
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "no answer to a keepalive PING");
    } else if (k->calls_count == 0) {
      k->ping_at_ns = later_by(now, k->keepalive_ns);
    } else {
      k->ping_open = true;
      k->ping_at_ns = later_by(now, k->cfg.keepalive_timeout_ns);
      kvrelay_grpc_link_submitted(
          link, nghttp2_submit_ping(link->session, NGHTTP2_FLAG_NONE, keepalive_ping));
    }
  }
}

static const kvrelay_grpc_link_events link_events = {on_received, on_deadline_ns, on_link_tick,
                                                     on_gone};

static bool open_link(client *k, int fd) {
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, k->cfg.stream_window_bytes},
      {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, MAX_FRAME_BYTES},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST_BYTES}};
  memset(&k->link, 0, sizeof k->link);
  k->link.no_linger = true;
  k->first_len = 0;
  k->goaway = k->ping_open = false;
  return kvrelay_grpc_link_open(&k->link, &k->loop, &link_events, fd, OUTPUT_THRESHOLD) ==
             KVRELAY_TRANSPORT_OK &&
         nghttp2_session_client_new2(&k->link.session, k->callbacks, k, k->option) == 0 &&
         nghttp2_submit_settings(k->link.session, NGHTTP2_FLAG_NONE, settings,
                                 sizeof settings / sizeof *settings) == 0 &&
         nghttp2_session_set_local_window_size(k->link.session, NGHTTP2_FLAG_NONE, 0,
                                               (int32_t)k->cfg.connection_window_bytes) == 0;
}

static void on_dialled(void *client_, int fd, int err, const char *text) {
  client *k = client_;
  char copy[128];
  kvrelay_timer_set_at(&k->timer, KVRELAY_TIME_NONE);
  if (fd < 0) {
    snprintf(copy, sizeof copy, "%s", text);
    connection_failed(k, err, copy);
  } else if (!open_link(k, fd)) {
    kvrelay_grpc_link_close(&k->link);
    connection_failed(k, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for a connection");
  } else {
    k->state = CLIENT_HANDSHAKE;
    kvrelay_grpc_link_rearm(&k->link);
    kvrelay_grpc_link_kick(&k->link);
  }
}

static void on_timer(void *client_) {
  client *k = client_;
  uint64_t now = kvrelay_now_ns();
  k->loop.turns++;
  if (stopping(k)) {
    kvrelay_grpc_dial_cancel(&k->dial);
    all_closed(k);
    return;
  }
  if (k->state == CLIENT_DIALLING) {
    kvrelay_grpc_dial_cancel(&k->dial);
    connection_failed(k, KVRELAY_TRANSPORT_ERR_CONNECT, "no connection in time");
    return;
  }
  if (k->state != CLIENT_WAITING)
    return;
  k->state = CLIENT_DIALLING;
  k->attempt_ns = now;
  kvrelay_timer_set_at(&k->timer, later_by(now, k->cfg.connect_timeout_ns));
  k->caller->connection(k->caller, KVRELAY_CONNECTION_CONNECTING, KVRELAY_TRANSPORT_OK, "",
                        KVRELAY_TIME_NONE, now);
  int err = kvrelay_grpc_dial_start(&k->dial, k->loop.base, &k->target, on_dialled, k);
  if (err != KVRELAY_TRANSPORT_OK) {
    kvrelay_grpc_dial_cancel(&k->dial);
    connection_failed(k, err, "the attempt could not be started");
  }
}

/* ---- the transport ---- */

static bool has_link(const client *k) {
  return k->state == CLIENT_HANDSHAKE || k->state == CLIENT_READY;
}

static int on_run_once(kvrelay_transport *t, uint64_t timeout_ns) {
  client *k = client_of(t);
  return k->state == CLIENT_CLOSED ? KVRELAY_TRANSPORT_CLOSED
                                   : kvrelay_grpc_loop_run(&k->loop, timeout_ns);
}

static void on_wake(kvrelay_transport *t) { kvrelay_grpc_loop_wake(&client_of(t)->loop); }

static void on_stop(kvrelay_transport *t, uint64_t grace_ns) {
  client *k = client_of(t);
  uint64_t now = kvrelay_now_ns();
  k->stop_at_ns = later_by(now, grace_ns) - (grace_ns == KVRELAY_TIME_NONE ? 1 : 0);
  if (!has_link(k))
    kvrelay_timer_set_at(&k->timer, now);
  else if (k->calls_count == 0)
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "stopped");
  else
    kvrelay_grpc_link_rearm(&k->link);
}

static void on_close(kvrelay_transport *t) {
  client *k = client_of(t);
  client_call *c;
  kvrelay_grpc_dial_cancel(&k->dial);
  if (has_link(k))
    kvrelay_grpc_link_close(&k->link);
  while ((c = TAILQ_FIRST(&k->calls)) != NULL)
    call_free(c);
  kvrelay_timer_close(&k->timer);
  if (k->callbacks != NULL)
    nghttp2_session_callbacks_del(k->callbacks);
  if (k->option != NULL)
    nghttp2_option_del(k->option);
  kvrelay_grpc_loop_close(&k->loop);
  free(k);
}

static uint64_t on_now_ns(const kvrelay_transport *t) {
  (void)t;
  return kvrelay_now_ns();
}

static nghttp2_nv header(const char *name, const char *value, size_t value_len) {
  /* nghttp2 only reads them, although its type does not say so. */
  return (nghttp2_nv){(uint8_t *)(uintptr_t)name, (uint8_t *)(uintptr_t)value, strlen(name),
                      value_len, NGHTTP2_NV_FLAG_NO_COPY_NAME};
}

static int submit(client *k, client_call *c, const char *path) {
  static const char agent[] = "kvrelay";
  const nghttp2_nv headers[] = {
      header(":method", "POST", 4),
      header(":scheme", "http", 4),
      header(":path", path, strlen(path)),
      header(":authority", k->target.authority, strlen(k->target.authority)),
      header("te", "trailers", 8),
      header("content-type", "application/grpc", 16),
      header("user-agent", agent, sizeof agent - 1)};
  const nghttp2_data_provider provider = {.source = {.ptr = c}, .read_callback = on_read_data};
  c->stream = nghttp2_submit_request(k->link.session, NULL, headers,
                                     sizeof headers / sizeof *headers, &provider, c);
  return c->stream < 0 ? KVRELAY_TRANSPORT_ERR_LIMIT : KVRELAY_TRANSPORT_OK;
}

static int on_call(kvrelay_client_transport *t, uint32_t number, const char *path,
                   const uint8_t *request, size_t len) {
  client *k = client_of(&t->base);
  if (number == 0 || path == NULL || call_find(k, number) != NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (k->state != CLIENT_READY || k->goaway || k->link.err != 0 || stopping(k))
    return KVRELAY_TRANSPORT_ERR_CONNECT;
  /* Beyond the server's limit a call would wait in silence. */
  if (len > k->cfg.max_message_bytes || k->calls_count >= k->cfg.max_calls ||
      k->calls_count >= nghttp2_session_get_remote_settings(
                            k->link.session, NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS))
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  client_call *c = calloc(1, sizeof *c);
  if (c == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  const kvrelay_parts parts = {.part = {{request, len}}, .part_len = 1, .bytes = len};
  c->client = k;
  c->number = number;
  kvrelay_grpc_inbox_init(&c->inbox, k->cfg.max_message_bytes);
  int err = kvrelay_grpc_outbox_add(&c->outbox, &parts);
  if (err == KVRELAY_TRANSPORT_OK)
    err = submit(k, c, path);
  if (err != KVRELAY_TRANSPORT_OK) {
    kvrelay_grpc_outbox_free(&c->outbox);
    free(c);
    return err;
  }
  TAILQ_INSERT_TAIL(&k->calls, c, link);
  LIST_INSERT_HEAD(&k->bucket[number % CALL_BUCKETS], c, bucket);
  k->calls_count++;
  kvrelay_grpc_link_kick(&k->link);
  return KVRELAY_TRANSPORT_OK;
}

static void on_cancel(kvrelay_client_transport *t, uint32_t number) {
  client *k = client_of(&t->base);
  client_call *c = call_find(k, number);
  if (c == NULL)
    return;
  if (has_link(k))
    call_reset(c);
  call_over(c);
}

static void on_reconnect(kvrelay_client_transport *t) {
  client *k = client_of(&t->base);
  if (has_link(k))
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "closed to connect again");
}

kvrelay_grpc_client_config kvrelay_grpc_client_config_default(void) {
  return (kvrelay_grpc_client_config){
      .max_message_bytes = 8388608,
      .stream_window_bytes = 8388608,
      .connection_window_bytes = 16777216,
      .max_calls = 1024,
      .connect_timeout_ns = 20 * SECOND_NS,
      .backoff_first_ns = SECOND_NS,
      .backoff_max_ns = 120 * SECOND_NS,
      .keepalive_interval_ns = 30 * SECOND_NS,
      .keepalive_timeout_ns = 20 * SECOND_NS,
      .jitter_seed = kvrelay_now_ns(),
  };
}

int kvrelay_grpc_client_open(const kvrelay_grpc_client_config *cfg, kvrelay_caller *caller,
                             kvrelay_client_transport **out) {
  if (cfg == NULL || caller == NULL || cfg->target == NULL || cfg->max_calls == 0 ||
      cfg->stream_window_bytes < DEFAULT_WINDOW_BYTES || cfg->stream_window_bytes > INT32_MAX ||
      cfg->connection_window_bytes < DEFAULT_WINDOW_BYTES ||
      cfg->connection_window_bytes > INT32_MAX)
    return KVRELAY_TRANSPORT_ERR_ARG;
  client *k = calloc(1, sizeof *k);
  if (k == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  k->base = (kvrelay_client_transport){
      {on_run_once, on_wake, on_stop, on_close, on_now_ns}, on_call, on_cancel, on_reconnect};
  k->cfg = *cfg;
  k->caller = caller;
  k->state = CLIENT_WAITING;
  k->backoff_ns = cfg->backoff_first_ns;
  k->keepalive_ns = cfg->keepalive_interval_ns;
  k->stop_at_ns = KVRELAY_TIME_NONE;
  k->random = cfg->jitter_seed;
  TAILQ_INIT(&k->calls);
  int err = kvrelay_grpc_target_parse(cfg->target, &k->target);
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_grpc_loop_open(&k->loop, cfg->base, NULL, k);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(k);
    return err;
  }
  err = make_callbacks(k);
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_timer_open(&k->timer, k->loop.base, on_timer, k);
  if (err == KVRELAY_TRANSPORT_OK) {
    kvrelay_timer_set_at(&k->timer, 0);
    *out = &k->base;
    return KVRELAY_TRANSPORT_OK;
  }
  on_close(&k->base.base);
  return err;
}
