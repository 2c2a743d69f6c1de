/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../backoff.h"
#include "../call_map.h"
#include "../dial.h"
#include "tcp_link.h"

typedef struct client_call {
  kvrelay_call_node by_stream; /* first; until its END has come */
  kvrelay_call_node by_number; /* until it is over */
  uint32_t number;
  int64_t credit; /* as the server knows it once it has all our frames */
  uint32_t used;  /* bytes not given back yet */
  bool admitted;
  bool over; /* ended or cancelled: nothing is told any more */
} client_call;

enum client_state {
  CLIENT_WAITING = 1,
  CLIENT_DIALLING,
  CLIENT_HANDSHAKE,
  CLIENT_READY,
  CLIENT_CLOSED
};

typedef struct client {
  kvrelay_client_transport base; /* first */
  kvrelay_tcp_client_config cfg;
  kvrelay_caller *caller;
  kvrelay_dial_target target;
  kvrelay_tcp_hub hub;
  kvrelay_tcp_link link;  /* open while state is HANDSHAKE or READY */
  kvrelay_tcp_watch dial; /* while state is DIALLING */
  kvrelay_call_map streams, numbers;
  client_call *last; /* found: mostly the next one too */
  int state;         /* enum client_state */
  kvrelay_backoff backoff;
  uint64_t attempt_ns, keepalive_ns;
  uint64_t stop_at_ns;               /* KVRELAY_TIME_NONE: not stopping */
  uint32_t next_stream;              /* 0: all are used up */
  uint32_t max_streams, max_request; /* of the server */
  bool goaway;
  char peer_name[KVRELAY_DIAL_NAME_CAP]; /* whom the server's certificate has to name */
} client;

static client *client_of(const kvrelay_transport *t) { return (client *)(uintptr_t)t; }

static client *client_of_link(const kvrelay_tcp_link *link) {
  return (client *)((uintptr_t)link - offsetof(client, link));
}

static bool stopping(const client *k) { return k->stop_at_ns != KVRELAY_TIME_NONE; }

static bool has_link(const client *k) {
  return k->state == CLIENT_HANDSHAKE || k->state == CLIENT_READY;
}

/* ---- calls ---- */

static client_call *call_by_number(client *k, uint32_t number) {
  uint8_t *node = kvrelay_call_map_find(&k->numbers, number);
  return node == NULL ? NULL : (client_call *)(void *)(node - offsetof(client_call, by_number));
}

static client_call *call_by_stream(client *k, uint32_t stream) {
  if (k->last == NULL || k->last->by_stream.number != stream)
    k->last = kvrelay_call_map_find(&k->streams, stream);
  return k->last;
}

/* A connection that takes no new calls ends with the last one. */
static void maybe_done(client *k) {
  if (k->state != CLIENT_READY || k->numbers.len > 0)
    return;
  if (stopping(k))
    kvrelay_tcp_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "stopped");
  else if (k->goaway)
    kvrelay_tcp_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "the server goes away");
  else if (k->next_stream == 0)
    kvrelay_tcp_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "all stream numbers are used");
}

static void call_over(client *k, client_call *c) {
  c->over = true;
  kvrelay_call_map_remove(&k->numbers, &c->by_number);
  maybe_done(k);
}

static void call_free(client *k, client_call *c) {
  if (k->last == c)
    k->last = NULL;
  kvrelay_call_map_remove(&k->streams, &c->by_stream);
  free(c);
}

static void protocol_error(client *k, const char *text) {
  kvrelay_tcp_link_abort(&k->link, KVRELAY_GOAWAY_PROTOCOL_ERROR, text);
}

/* ---- frames ---- */

static void on_message(client *k, client_call *c, const kvrelay_frame *f) {
  if (!c->admitted || c->credit <= 0) {
    protocol_error(k, c->admitted ? "a message beyond the credit" : "a message before RESPONSE");
    return;
  }
  const uint32_t cost = f->body_len + KVRELAY_RAW_HEADER_LEN;
  c->credit -= cost;
  c->used += cost;
  if (c->over)
    return; /* of no use any more: no credit for more */
  if (c->used >= k->cfg.stream_window_bytes / 2) {
    uint8_t *to = kvrelay_tcp_link_put(&k->link, KVRELAY_RAW_SMALL_CAP);
    if (to == NULL)
      return;
    kvrelay_tcp_link_put_done(&k->link,
                              kvrelay_raw_credit_put(to, (uint32_t)c->by_stream.number, c->used));
    c->credit += c->used;
    c->used = 0;
  }
  k->caller->message(k->caller, c->number, f->piece, f->piece_len, k->hub.now_ns);
}

static void on_end(client *k, client_call *c, const kvrelay_frame *f) {
  kvrelay_status status;
  const uint32_t number = c->number;
  const bool tell = !c->over;
  kvrelay_frame_status(f, &status);
  if (tell)
    call_over(k, c);
  call_free(k, c);
  if (tell)
    k->caller->end(k->caller, number, &status, k->hub.now_ns);
}

static void on_goaway(client *k, const kvrelay_frame *f) {
  char text[96];
  int len = f->piece_len - 4 > 64 ? 64 : (int)(f->piece_len - 4);
  for (int i = 0; i < len; i++) /* shown to people */
    if (f->piece[4 + i] < 0x20 || f->piece[4 + i] > 0x7E)
      len = i;
  snprintf(text, sizeof text, "the server says: %.*s", len, (const char *)f->piece + 4);
  k->goaway = true;
  if (f->aux == KVRELAY_GOAWAY_TOO_MANY_PINGS)
    k->keepalive_ns =
        k->keepalive_ns > KVRELAY_TIME_NONE / 2 ? KVRELAY_TIME_NONE : 2 * k->keepalive_ns;
  if (f->aux != KVRELAY_GOAWAY_SHUTDOWN)
    kvrelay_tcp_link_fail(&k->link, KVRELAY_TRANSPORT_ERR_PROTOCOL, text);
  else
    maybe_done(k);
}

static void on_frame(kvrelay_tcp_link *link, const kvrelay_frame *f) {
  client *k = client_of_link(link);
  if (f->type == KVRELAY_FRAME_GOAWAY) {
    on_goaway(k, f);
    return;
  }
  client_call *c = call_by_stream(k, f->stream);
  if (c == NULL || (f->type == KVRELAY_FRAME_RESPONSE && c->admitted)) {
    protocol_error(k, c == NULL ? "a stream that is not open" : "a second RESPONSE");
    return;
  }
  if (f->type == KVRELAY_FRAME_MESSAGE) {
    on_message(k, c, f);
  } else if (f->type == KVRELAY_FRAME_END) {
    on_end(k, c, f);
  } else {
    c->admitted = true;
    if (!c->over)
      k->caller->admitted(k->caller, c->number, k->hub.now_ns);
  }
}

/* ---- connection ---- */

static void on_preface(kvrelay_tcp_link *link, int err, const kvrelay_raw_preface *preface) {
  client *k = client_of_link(link);
  switch (err) {
  case KVRELAY_OK:
    k->state = CLIENT_READY;
    k->backoff.next_ns = k->backoff.first_ns;
    k->max_streams = preface->max_streams;
    k->max_request = preface->max_frame;
    k->base.peer_not_after = link->secure != NULL ? link->secure->peer_not_after : 0;
    k->caller->connection(k->caller, KVRELAY_CONNECTION_READY, KVRELAY_TRANSPORT_OK, "",
                          KVRELAY_TIME_NONE, k->hub.now_ns);
    break;
  case KVRELAY_ERR_UNSUPPORTED:
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                          "the server speaks other versions of the raw transport");
    break;
  case KVRELAY_ERR_LIMIT:
    protocol_error(k, "a preface with values out of range");
    break;
  default:
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                          link->preface[0] == 0x15 ? "the server wants TLS"
                                                   : "not the raw transport");
    break;
  }
}

static void all_closed(client *k) {
  k->state = CLIENT_CLOSED;
  k->hub.alarm_ns = KVRELAY_TIME_NONE;
  k->caller->connection(k->caller, KVRELAY_CONNECTION_CLOSED, KVRELAY_TRANSPORT_CLOSED, "stopped",
                        KVRELAY_TIME_NONE, kvrelay_now_ns());
}

/* There is no connection (any more): tell it, and when the next attempt comes. */
static void connection_failed(client *k, int err, const char *text) {
  if (stopping(k)) {
    all_closed(k);
    return;
  }
  const uint64_t now = kvrelay_now_ns();
  const uint64_t retry = kvrelay_backoff_failed(&k->backoff, k->attempt_ns, now);
  k->state = CLIENT_WAITING;
  k->hub.alarm_ns = retry;
  k->caller->connection(k->caller, KVRELAY_CONNECTION_FAILED, err, text, retry, now);
}

static void drop_calls(client *k) {
  for (client_call *c; (c = kvrelay_call_map_any(&k->streams)) != NULL;)
    call_free(k, c);
  memset(&k->numbers, 0, sizeof k->numbers);
}

static void on_gone(kvrelay_tcp_link *link) {
  client *k = client_of_link(link);
  kvrelay_status status;
  char text[sizeof link->text];
  const int err = link->err;
  memcpy(text, link->text, sizeof text);
  (void)kvrelay_refuse(&status, KVRELAY_GRPC_UNAVAILABLE, text);
  k->state = CLIENT_WAITING; /* no new calls from inside the callbacks */
  for (uint8_t *node; (node = kvrelay_call_map_any(&k->numbers)) != NULL;) {
    client_call *c = (client_call *)(void *)(node - offsetof(client_call, by_number));
    call_over(k, c);
    k->caller->end(k->caller, c->number, &status, k->hub.now_ns);
  }
  drop_calls(k);
  kvrelay_tcp_link_close(link);
  connection_failed(k, err, text);
}

static void on_fill(kvrelay_tcp_link *link) { (void)link; }

static uint64_t on_deadline_ns(const kvrelay_tcp_link *link) {
  return client_of_link(link)->stop_at_ns;
}

static void on_tick(kvrelay_tcp_link *link, uint64_t now) {
  if (now >= client_of_link(link)->stop_at_ns)
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "grace time over");
}

static const kvrelay_tcp_link_events link_events = {on_preface, on_frame, on_fill, on_deadline_ns,
                                                    on_tick,    on_gone,  NULL};

static int open_link(client *k, int fd) {
  const uint64_t now = kvrelay_now_ns(),
                 limit = kvrelay_later_ns(k->attempt_ns, k->cfg.connect_timeout_ns);
  const kvrelay_tcp_link_config cfg = {.max_frame = k->cfg.max_message_bytes,
                                       .preface_timeout_ns = limit > now ? limit - now : 0,
                                       .keepalive_interval_ns = k->keepalive_ns,
                                       .keepalive_timeout_ns = k->cfg.keepalive_timeout_ns,
                                       .peer_ping_interval_ns = k->cfg.peer_ping_interval_ns,
                                       .security = k->cfg.security,
                                       .peer_name = k->peer_name};
  const kvrelay_raw_preface own = {.version = KVRELAY_RAW_VERSION,
                                   .lowest = KVRELAY_RAW_VERSION,
                                   .max_frame = k->cfg.max_message_bytes,
                                   .initial_credit = k->cfg.stream_window_bytes};
  memset(&k->link, 0, sizeof k->link);
  k->goaway = false;
  k->next_stream = 1;
  const int err = kvrelay_tcp_link_open(&k->link, &k->hub, &link_events, &cfg, fd);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  k->state = CLIENT_HANDSHAKE;
  uint8_t *to = kvrelay_tcp_link_put(&k->link, KVRELAY_RAW_PREFACE_LEN);
  if (to != NULL) { /* else the link has failed */
    kvrelay_raw_preface_put(to, &own);
    k->link.cut = KVRELAY_RAW_PREFACE_LEN;
    kvrelay_tcp_link_put_done(&k->link, KVRELAY_RAW_PREFACE_LEN);
  }
  return KVRELAY_TRANSPORT_OK;
}

static void on_dialled(kvrelay_tcp_watch *watch, short events) {
  client *k = (client *)(void *)((uint8_t *)watch - offsetof(client, dial));
  char text[128] = "";
  (void)events;
  kvrelay_tcp_loop_unwatch(&k->hub.loop, watch);
  const int fd = kvrelay_dial_result(watch->fd, text, sizeof text);
  watch->fd = -1;
  k->hub.alarm_ns = KVRELAY_TIME_NONE;
  if (fd < 0) {
    connection_failed(k, fd, text);
    return;
  }
  const int err = open_link(k, fd);
  if (err != KVRELAY_TRANSPORT_OK)
    connection_failed(k, err, kvrelay_transport_strerror(err));
}

static void dial_cancel(client *k) {
  if (k->dial.fd < 0)
    return;
  kvrelay_tcp_loop_unwatch(&k->hub.loop, &k->dial);
  close(k->dial.fd);
  k->dial.fd = -1;
}

static void dial(client *k, uint64_t now) {
  k->state = CLIENT_DIALLING;
  k->attempt_ns = now;
  k->hub.alarm_ns = kvrelay_later_ns(now, k->cfg.connect_timeout_ns);
  k->caller->connection(k->caller, KVRELAY_CONNECTION_CONNECTING, KVRELAY_TRANSPORT_OK, "",
                        KVRELAY_TIME_NONE, now);
  const int fd = kvrelay_dial_start(&k->target);
  int err = fd < 0 ? fd : KVRELAY_TRANSPORT_OK;
  k->dial = (kvrelay_tcp_watch){.fd = fd, .wants = POLLIN, .ready = on_dialled};
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_tcp_loop_watch(&k->hub.loop, &k->dial);
  if (err == KVRELAY_TRANSPORT_OK)
    return;
  if (fd >= 0)
    close(fd);
  k->dial.fd = -1;
  connection_failed(k, err, "the attempt could not be started");
}

static void on_alarm(void *client_, uint64_t now) {
  client *k = client_;
  if (has_link(k) || k->state == CLIENT_CLOSED)
    return;
  dial_cancel(k);
  if (stopping(k))
    all_closed(k);
  else if (k->state == CLIENT_DIALLING)
    connection_failed(k, KVRELAY_TRANSPORT_ERR_CONNECT, "no connection in time");
  else
    dial(k, now);
}

/* ---- the transport ---- */

static int on_run_once(kvrelay_transport *t, uint64_t timeout_ns) {
  client *k = client_of(t);
  return k->state == CLIENT_CLOSED ? KVRELAY_TRANSPORT_CLOSED
                                   : kvrelay_tcp_hub_run(&k->hub, timeout_ns);
}

static void on_wake(kvrelay_transport *t) { kvrelay_tcp_loop_wake(&client_of(t)->hub.loop); }

static void on_stop(kvrelay_transport *t, uint64_t grace_ns) {
  client *k = client_of(t);
  const uint64_t now = kvrelay_now_ns();
  k->stop_at_ns = kvrelay_later_ns(now, grace_ns) - (grace_ns == KVRELAY_TIME_NONE ? 1 : 0);
  if (!has_link(k)) {
    k->hub.alarm_ns = now;
    return;
  }
  kvrelay_tcp_link_rearm(&k->link, k->state == CLIENT_READY ? k->stop_at_ns : now);
  if (k->state == CLIENT_HANDSHAKE)
    kvrelay_tcp_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "stopped");
  maybe_done(k);
}

static void on_close(kvrelay_transport *t) {
  client *k = client_of(t);
  dial_cancel(k);
  if (has_link(k))
    kvrelay_tcp_link_close(&k->link);
  drop_calls(k);
  kvrelay_tcp_hub_close(&k->hub);
  free(k);
}

static uint64_t on_now_ns(const kvrelay_transport *t) {
  (void)t;
  return kvrelay_now_ns();
}

static int on_call(kvrelay_client_transport *t, uint32_t number, const char *path,
                   const uint8_t *request, size_t len) {
  client *k = client_of(&t->base);
  if (number == 0 || path == NULL || call_by_number(k, number) != NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  const int32_t method = kvrelay_method_from_path((const uint8_t *)path, strlen(path));
  if (k->state != CLIENT_READY || k->goaway || k->next_stream == 0 || stopping(k) ||
      k->link.err != 0 || k->link.closing)
    return KVRELAY_TRANSPORT_ERR_CONNECT;
  if (len > k->max_request || k->streams.len >= k->cfg.max_calls ||
      k->streams.len >= k->max_streams)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  client_call *c = calloc(1, sizeof *c);
  if (c == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  const kvrelay_parts body = {.part = {{request, len}}, .part_len = 1, .bytes = len};
  c->number = number;
  c->credit = k->cfg.stream_window_bytes;
  kvrelay_call_map_add(&k->streams, &c->by_stream, k->next_stream);
  kvrelay_call_map_add(&k->numbers, &c->by_number, number);
  kvrelay_tcp_link_put_frame(&k->link, KVRELAY_FRAME_REQUEST, k->next_stream, (uint16_t)method,
                             &body);
  k->next_stream++; /* 0 behind the last one */
  return KVRELAY_TRANSPORT_OK;
}

static void on_cancel(kvrelay_client_transport *t, uint32_t number) {
  static const kvrelay_parts empty;
  client *k = client_of(&t->base);
  client_call *c = call_by_number(k, number);
  if (c == NULL)
    return;
  if (has_link(k) && k->link.err == 0 && !k->link.closing)
    kvrelay_tcp_link_put_frame(&k->link, KVRELAY_FRAME_CANCEL, (uint32_t)c->by_stream.number, 0,
                               &empty);
  call_over(k, c);
}

static void on_reconnect(kvrelay_client_transport *t) {
  client *k = client_of(&t->base);
  if (has_link(k))
    kvrelay_tcp_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "closed to connect again");
}

kvrelay_tcp_client_config kvrelay_tcp_client_config_default(void) {
  return (kvrelay_tcp_client_config){
      .max_message_bytes = 8388608,
      .stream_window_bytes = 8388608,
      .max_calls = 1024,
      .connect_timeout_ns = 20 * KVRELAY_SECOND_NS,
      .backoff_first_ns = KVRELAY_SECOND_NS,
      .backoff_max_ns = 120 * KVRELAY_SECOND_NS,
      .keepalive_interval_ns = 20 * KVRELAY_SECOND_NS,
      .keepalive_timeout_ns = 10 * KVRELAY_SECOND_NS,
      .peer_ping_interval_ns = 10 * KVRELAY_SECOND_NS,
      .jitter_seed = kvrelay_now_ns(),
  };
}

int kvrelay_tcp_client_open(const kvrelay_tcp_client_config *cfg, kvrelay_caller *caller,
                            kvrelay_client_transport **out) {
  if (cfg == NULL || caller == NULL || out == NULL || cfg->target == NULL || cfg->max_calls == 0 ||
      cfg->max_message_bytes < KVRELAY_RAW_MESSAGE_MIN || cfg->max_message_bytes > INT32_MAX ||
      cfg->stream_window_bytes == 0 || cfg->stream_window_bytes > INT32_MAX)
    return KVRELAY_TRANSPORT_ERR_ARG;
  client *k = calloc(1, sizeof *k);
  if (k == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  k->base = (kvrelay_client_transport){
      {on_run_once, on_wake, on_stop, on_close, on_now_ns}, on_call, on_cancel, on_reconnect, 0};
  k->cfg = *cfg;
  k->caller = caller;
  k->state = CLIENT_WAITING;
  k->dial.fd = -1;
  k->backoff = (kvrelay_backoff){cfg->backoff_first_ns, cfg->backoff_max_ns, cfg->backoff_first_ns,
                                 cfg->jitter_seed};
  k->keepalive_ns = cfg->keepalive_interval_ns;
  k->stop_at_ns = KVRELAY_TIME_NONE;
  int err = kvrelay_dial_target_parse(cfg->target, &k->target);
  if (err == KVRELAY_TRANSPORT_OK && cfg->security != NULL)
    err = kvrelay_dial_target_name(&k->target, cfg->server_name, k->peer_name);
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_tcp_hub_open(&k->hub, on_alarm, k);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(k);
    return err;
  }
  k->hub.alarm_ns = 0;
  *out = &k->base;
  return KVRELAY_TRANSPORT_OK;
}
