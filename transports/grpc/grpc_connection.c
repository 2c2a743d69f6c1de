/* SPDX-License-Identifier: Apache-2.0 */
/* One connection of the server: GOAWAY and PINGs, limits against abuse, deadlines. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "grpc_server_private.h"

#define CONNECTION_WINDOW (1 << 20)
/* Frames that get nothing done, in a row, before the peer is told to calm down. */
#define MAX_IDLE_FRAMES 10000
#define MAX_PING_STRIKES 2
/* Frames that may wait, besides one per stream, for a peer that sends and does not read. */
#define MAX_QUEUED_FRAMES 10000
/* Streams that a peer may reset at once, and how soon it may reset one more. */
#define MAX_RESETS 1000
#define RESET_EVERY_NS (KVRELAY_SECOND_NS / 33)
#define DRAIN_PING_NS KVRELAY_SECOND_NS

static const uint8_t keepalive_ping[8] = "kvrelay";
static const uint8_t drain_ping[8] = "kvdrain";
static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
#define PREFACE_LEN (sizeof preface - 1)

/* ---- what nghttp2 tells ---- */

/* Sends GOAWAY and shuts down as soon as it is out; nothing that comes until then is read. */
static void calm_down(connection *conn, const char *debug) {
  conn->abused = true;
  kvrelay_grpc_server_say(conn->server, KVRELAY_LOG_WARN, "connection_abused", conn, debug);
  int32_t last = nghttp2_session_get_last_proc_stream_id(conn->link.session);
  kvrelay_grpc_link_submitted(&conn->link,
                              nghttp2_submit_goaway(conn->link.session, NGHTTP2_FLAG_NONE, last,
                                                    NGHTTP2_ENHANCE_YOUR_CALM,
                                                    (const uint8_t *)debug, strlen(debug)));
}

static void drain_final(connection *conn) {
  conn->drain = DRAIN_FINAL;
  int32_t last = nghttp2_session_get_last_proc_stream_id(conn->link.session);
  kvrelay_grpc_link_submitted(&conn->link,
                              nghttp2_submit_goaway(conn->link.session, NGHTTP2_FLAG_NONE, last,
                                                    NGHTTP2_NO_ERROR, NULL, 0));
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
      conn->ping_at_ns = kvrelay_later_ns(now, conn->server->cfg.keepalive_interval_ns);
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
  server_call *c = kvrelay_grpc_call_of(session, frame->hd.stream_id);
  if (c == NULL)
    return 0;
  if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST) {
    if (conn->server->stopping || conn->drain == DRAIN_FINAL)
      return nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, c->stream,
                                       NGHTTP2_REFUSED_STREAM);
    kvrelay_grpc_call_begin(c);
  }
  if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM)
    kvrelay_grpc_call_half_close(c);
  kvrelay_grpc_call_advance(c);
  return 0;
}

/*
 * Clients that close name a stream in their GOAWAY that is none of ours (grpc-go 2^31 - 1, others
 * their own last one); nghttp2 takes that for an error.  It is an end like any other.
 */
static int on_invalid_frame(nghttp2_session *session, const nghttp2_frame *frame, int error_code,
                            void *conn_) {
  connection *conn = conn_;
  (void)session;
  (void)error_code;
  conn->peer_left =
      frame->hd.type == NGHTTP2_GOAWAY && frame->goaway.error_code == NGHTTP2_NO_ERROR;
  return 0;
}

static int on_frame_sent(nghttp2_session *session, const nghttp2_frame *frame, void *conn_) {
  connection *conn = conn_;
  if (frame->hd.type == NGHTTP2_GOAWAY) {
    if (frame->goaway.error_code != NGHTTP2_NO_ERROR) {
      if (!conn->peer_left)
        kvrelay_grpc_server_say(conn->server, KVRELAY_LOG_WARN, "connection_error", conn,
                                nghttp2_http2_strerror(frame->goaway.error_code));
      conn->link.closing = true;
    } else if (conn->drain == DRAIN_NOTICE) {
      /* Only now: a PING overtakes what waits, and its answer has to prove that the notice arrived.
       */
      return nghttp2_submit_ping(session, NGHTTP2_FLAG_NONE, drain_ping);
    }
    return 0;
  }
  if (frame->hd.type == NGHTTP2_RST_STREAM && frame->hd.stream_id > conn->reset_stream)
    conn->reset_stream = frame->hd.stream_id;
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA)
    return 0;
  conn->ping_strikes = 0;
  conn->peer_ping_ns = 0;
  conn->idle_frames = 0;
  if ((frame->hd.flags & NGHTTP2_FLAG_END_STREAM) &&
      nghttp2_session_get_stream_remote_close(session, frame->hd.stream_id) == 0)
    return nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                     NGHTTP2_NO_ERROR);
  return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t stream, uint32_t error_code,
                           void *conn_) {
  connection *conn = conn_;
  server_call *c = kvrelay_grpc_call_of(session, stream);
  (void)error_code;
  if (c == NULL)
    return 0;
  kvrelay_grpc_call_free(c);
  if (conn->calls_count == 0) {
    conn->idle_since_ns = conn->server->loop.now_ns;
    conn->link.closing |= conn->drain == DRAIN_FINAL;
  }
  return 0;
}

int kvrelay_grpc_connection_callbacks(server *s) {
  if (nghttp2_session_callbacks_new(&s->callbacks) != 0 || nghttp2_option_new(&s->option) != 0)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  kvrelay_grpc_call_callbacks(s->callbacks);
  nghttp2_session_callbacks_set_on_frame_recv_callback(s->callbacks, on_frame);
  nghttp2_session_callbacks_set_on_invalid_frame_recv_callback(s->callbacks, on_invalid_frame);
  nghttp2_session_callbacks_set_on_frame_send_callback(s->callbacks, on_frame_sent);
  nghttp2_session_callbacks_set_on_stream_close_callback(s->callbacks, on_stream_close);
  nghttp2_session_callbacks_set_data_source_read_length_callback(s->callbacks,
                                                                 kvrelay_grpc_link_frame_len);
  nghttp2_option_set_max_continuations(s->option, 8);
  nghttp2_option_set_max_outbound_ack(s->option, 1000);
  nghttp2_option_set_max_settings(s->option, 32);
  /* nghttp2 would say INTERNAL_ERROR, and counts by whole seconds: count_reset comes first. */
  nghttp2_option_set_stream_reset_rate_limit(s->option, 2 * MAX_RESETS, 2 * MAX_RESETS);
  nghttp2_option_set_no_closed_streams(s->option, 1);
  return KVRELAY_TRANSPORT_OK;
}

/* ---- connections ---- */

static connection *connection_of(const kvrelay_grpc_link *link) {
  return (connection *)(uintptr_t)link;
}

void kvrelay_grpc_connection_free(connection *conn) {
  server *s = conn->server;
  server_call *c;
  if (conn->link.out != NULL) /* or its bytes would be copied before a service takes them back */
    (void)evbuffer_drain(conn->link.out, evbuffer_get_length(conn->link.out));
  while ((c = TAILQ_FIRST(&conn->calls)) != NULL)
    kvrelay_grpc_call_free(c);
  kvrelay_grpc_link_close(&conn->link);
  TAILQ_REMOVE(&s->connections, conn, entry);
  s->connections_count--;
  free(conn);
}

static void on_gone(kvrelay_grpc_link *link) {
  connection *conn = connection_of(link);
  kvrelay_grpc_server_say(conn->server, kvrelay_log_level_of_end(link->err), "connection_closed",
                          conn, link->text);
  kvrelay_grpc_connection_free(conn);
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

/* The preface, or what there is of it; 0: this is none. */
static size_t take_preface(connection *conn, const uint8_t *bytes, size_t len) {
  size_t left = PREFACE_LEN - conn->preface_len, n = len < left ? len : left;
  if (memcmp(bytes, preface + conn->preface_len, n) != 0) {
    kvrelay_grpc_link_fail(&conn->link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                           conn->preface_len == 0 ? likely_mistake(bytes, len) : "not HTTP/2");
    return 0;
  }
  conn->preface_len = (uint8_t)(conn->preface_len + n);
  return n;
}

/* A peer that opens streams only to reset them has work done for nothing. */
static void count_reset(connection *conn) {
  uint64_t earned = (kvrelay_now_ns() - conn->resets_at_ns) / RESET_EVERY_NS;
  conn->resets_at_ns += earned * RESET_EVERY_NS;
  conn->resets = earned < conn->resets ? conn->resets - (uint32_t)earned : 0;
  if (++conn->resets == MAX_RESETS + 1)
    calm_down(conn, "too_many_resets");
}

/*
 * Looks at a frame before nghttp2 does, which passes over some without a word: more of a stream
 * whose end its sender has sent itself, above all.  What crosses a reset of ours is no error.
 */
static void look_at_frame(connection *conn, const nghttp2_frame_hd *head) {
  nghttp2_session *session = conn->link.session;
  bool of_request = head->type == NGHTTP2_HEADERS || head->type == NGHTTP2_DATA;
  if (of_request && (head->stream_id & 1) != 0 && head->stream_id > conn->reset_stream &&
      head->stream_id <= nghttp2_session_get_last_proc_stream_id(session) &&
      nghttp2_session_find_stream(session, head->stream_id) == NULL)
    kvrelay_grpc_link_submitted(&conn->link,
                                nghttp2_session_terminate_session(session, NGHTTP2_STREAM_CLOSED));
  if (head->type == NGHTTP2_RST_STREAM)
    count_reset(conn);
  if (head->type == NGHTTP2_HEADERS || (head->type == NGHTTP2_DATA && head->length > 0))
    conn->idle_frames = 0;
  else if (++conn->idle_frames == MAX_IDLE_FRAMES)
    calm_down(conn, "too_many_frames");
}

static uint32_t big_endian(const uint8_t *p, size_t len) {
  uint32_t value = 0;
  for (size_t i = 0; i < len; i++)
    value = value << 8 | p[i];
  return value;
}

/* Up to the end of a frame, so that nghttp2 knows of all before when the next one is looked at. */
static size_t on_received(kvrelay_grpc_link *link, const uint8_t *bytes, size_t len) {
  connection *conn = connection_of(link);
  size_t n = 0;
  if (conn->abused)
    return 0;
  if (nghttp2_session_get_outbound_queue_size(link->session) >
      MAX_QUEUED_FRAMES + conn->server->cfg.max_concurrent_streams) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_LIMIT, "asks without reading the answers");
    return 0;
  }
  if (conn->preface_len < PREFACE_LEN)
    return take_preface(conn, bytes, len);
  while (conn->frame_left == 0 && n < len) {
    conn->head[conn->head_len++] = bytes[n++];
    if (conn->head_len < sizeof conn->head)
      continue;
    conn->head_len = 0;
    conn->frame_left = big_endian(conn->head, 3);
    look_at_frame(conn, &(nghttp2_frame_hd){
                            .length = conn->frame_left,
                            .stream_id = (int32_t)(big_endian(conn->head + 5, 4) & INT32_MAX),
                            .type = conn->head[3],
                        });
    if (conn->frame_left == 0)
      return n;
  }
  size_t payload = len - n < conn->frame_left ? len - n : conn->frame_left;
  conn->frame_left -= (uint32_t)payload;
  return n + payload;
}

static uint64_t on_deadline_ns(const kvrelay_grpc_link *link) {
  const connection *conn = connection_of(link);
  const kvrelay_grpc_server_config *cfg = &conn->server->cfg;
  uint64_t at = kvrelay_earlier_ns(conn->ping_at_ns, conn->expires_ns);
  if (!conn->saw_call)
    at = kvrelay_earlier_ns(at, kvrelay_later_ns(conn->opened_ns, cfg->handshake_timeout_ns));
  if (conn->drain == DRAIN_NOTICE)
    at = kvrelay_earlier_ns(at, conn->drain_ping_ns);
  if (conn->drain != DRAIN_NONE)
    return kvrelay_earlier_ns(at, conn->drain_until_ns);
  /* With calls open this is only when to look again. */
  uint64_t idle_since = conn->calls_count == 0 ? conn->idle_since_ns : kvrelay_now_ns();
  return kvrelay_earlier_ns(at, kvrelay_later_ns(idle_since, cfg->idle_timeout_ns));
}

/* GOAWAY in two steps, so that no call that is on its way gets lost. */
void kvrelay_grpc_connection_drain(connection *conn, uint64_t grace_ns) {
  uint64_t now = kvrelay_now_ns();
  if (conn->link.shaking) {
    kvrelay_grpc_link_fail(&conn->link, KVRELAY_TRANSPORT_CLOSED, "stopped in the handshake");
    return;
  }
  uint64_t until = kvrelay_later_ns(now, grace_ns);
  if (conn->drain == DRAIN_NONE) {
    conn->drain = DRAIN_NOTICE;
    conn->drain_until_ns = until;
    conn->drain_ping_ns = now + DRAIN_PING_NS;
    kvrelay_grpc_link_submitted(&conn->link, nghttp2_submit_shutdown_notice(conn->link.session));
  }
  conn->drain_until_ns = kvrelay_earlier_ns(conn->drain_until_ns, until);
  kvrelay_grpc_link_rearm(&conn->link);
  kvrelay_grpc_link_kick(&conn->link);
}

static void on_tick(kvrelay_grpc_link *link, uint64_t now) {
  connection *conn = connection_of(link);
  const kvrelay_grpc_server_config *cfg = &conn->server->cfg;
  if (!conn->saw_call && now >= kvrelay_later_ns(conn->opened_ns, cfg->handshake_timeout_ns)) {
    if (conn->preface_len < PREFACE_LEN) {
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                             link->shaking ? "no TLS handshake in time"
                                           : "no HTTP/2 preface in time");
      return;
    }
    conn->saw_call = true; /* looked at, once */
    kvrelay_grpc_connection_drain(conn, DRAIN_PING_NS);
  }
  if (conn->drain != DRAIN_NONE && now >= conn->drain_until_ns) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "grace time over");
    return;
  }
  if (conn->drain == DRAIN_NOTICE && now >= conn->drain_ping_ns)
    drain_final(conn);
  if (conn->drain == DRAIN_NONE && now >= conn->expires_ns) {
    conn->expires_ns = KVRELAY_TIME_NONE;
    kvrelay_grpc_connection_drain(conn, cfg->max_connection_age_grace_ns);
  }
  if (conn->drain == DRAIN_NONE && conn->calls_count == 0 &&
      now >= kvrelay_later_ns(conn->idle_since_ns, cfg->idle_timeout_ns))
    kvrelay_grpc_connection_drain(conn, DRAIN_PING_NS);
  if (now < conn->ping_at_ns)
    return;
  if (conn->ping_open) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "no answer to a keepalive PING");
    return;
  }
  conn->ping_open = true;
  conn->ping_at_ns = kvrelay_later_ns(now, cfg->keepalive_timeout_ns);
  kvrelay_grpc_link_submitted(
      link, nghttp2_submit_ping(link->session, NGHTTP2_FLAG_NONE, keepalive_ping));
}

static void on_given_away(kvrelay_grpc_link *link, int fd, kvrelay_secure_session *secure) {
  const connection *conn = connection_of(link);
  const kvrelay_grpc_server_config *cfg = &conn->server->cfg;
  cfg->raw(cfg->raw_context, fd, &conn->peer, secure);
}

static void on_secured(kvrelay_grpc_link *link) {
  kvrelay_grpc_server_say(connection_of(link)->server, KVRELAY_LOG_DEBUG, "connection_secured",
                          connection_of(link), "TLS");
}

static const kvrelay_grpc_link_events link_events = {.received = on_received,
                                                     .secured = on_secured,
                                                     .deadline_ns = on_deadline_ns,
                                                     .tick = on_tick,
                                                     .gone = on_gone,
                                                     .given_away = on_given_away};

static uint64_t random_below(server *s, uint64_t bound) {
  s->jitter = s->jitter * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return bound == 0 ? 0 : (s->jitter >> 11) % bound;
}

void kvrelay_grpc_connection_open(server *s, int fd, const kvrelay_address *peer) {
  connection *conn = calloc(1, sizeof *conn);
  if (conn == NULL) {
    close(fd);
    return;
  }
  uint64_t now = kvrelay_now_ns();
  TAILQ_INIT(&conn->calls);
  conn->server = s;
  conn->peer = *peer;
  conn->opened_ns = conn->idle_since_ns = conn->resets_at_ns = now;
  conn->ping_at_ns = kvrelay_later_ns(now, s->cfg.keepalive_interval_ns);
  conn->expires_ns = KVRELAY_TIME_NONE;
  if (s->cfg.max_connection_age_ns != KVRELAY_TIME_NONE)
    conn->expires_ns = kvrelay_later_ns(now, s->cfg.max_connection_age_ns / 10 * 9 +
                                                 random_below(s, s->cfg.max_connection_age_ns / 5));
  TAILQ_INSERT_TAIL(&s->connections, conn, entry);
  s->connections_count++;
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, s->cfg.max_concurrent_streams},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, (uint32_t)MAX_HEADER_LIST_BYTES}};
  conn->link.foreign_protocol = s->cfg.raw != NULL ? KVRELAY_SECURE_RAW : NULL;
  if (kvrelay_grpc_link_open(&conn->link, &s->loop, &link_events, fd,
                             s->cfg.output_threshold / SOCKET_SHARE) != KVRELAY_TRANSPORT_OK ||
      (s->cfg.security != NULL &&
       kvrelay_grpc_link_secure(&conn->link, s->cfg.security, NULL) != KVRELAY_TRANSPORT_OK) ||
      nghttp2_session_server_new3(&conn->link.session, s->callbacks, conn, s->option,
                                  &s->pool.mem) != 0 ||
      nghttp2_submit_settings(conn->link.session, NGHTTP2_FLAG_NONE, settings,
                              sizeof settings / sizeof *settings) != 0 ||
      nghttp2_session_set_local_window_size(conn->link.session, NGHTTP2_FLAG_NONE, 0,
                                            CONNECTION_WINDOW) != 0) {
    kvrelay_grpc_server_say(s, KVRELAY_LOG_ERROR, "connection_refused", conn, "no memory");
    kvrelay_grpc_connection_free(conn);
    return;
  }
  if (s->cfg.raw != NULL && s->cfg.security == NULL)
    conn->link.foreign_first = 'K';
  kvrelay_grpc_server_say(s, KVRELAY_LOG_DEBUG, "connection_opened", conn, "accepted");
  kvrelay_grpc_link_rearm(&conn->link);
  kvrelay_grpc_link_kick(&conn->link);
}
