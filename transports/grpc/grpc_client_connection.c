/* SPDX-License-Identifier: Apache-2.0 */
/* One connection of the client: SETTINGS, keepalive, GOAWAY, and what it hears first. */
#include "grpc_client_private.h"

#include <string.h>

#define MAX_FRAME_BYTES 262144
#define OUTPUT_THRESHOLD 262144

static const uint8_t keepalive_ping[8] = "kvrelay";

static client *client_of_link(const kvrelay_grpc_link *link) {
  return (client *)((uintptr_t)link - offsetof(client, link));
}

/* ---- frames ---- */

static void on_settings(client *k) {
  if (k->state != CLIENT_HANDSHAKE)
    return;
  uint64_t now = kvrelay_now_ns();
  k->state = CLIENT_READY;
  k->backoff.next_ns = k->backoff.first_ns;
  k->ping_at_ns = kvrelay_later_ns(now, k->keepalive_ns);
  kvrelay_grpc_link_rearm(&k->link);
  k->base.peer_not_after = k->link.secure != NULL ? k->link.secure->peer_not_after : 0;
  k->caller->connection(k->caller, KVRELAY_CONNECTION_READY, KVRELAY_TRANSPORT_OK, "",
                        KVRELAY_TIME_NONE, now);
}

static void on_goaway(client *k, const nghttp2_goaway *frame) {
  static const char calm[] = "too_many_pings";
  if (!client_goaway(k)) {
    const uint64_t until = kvrelay_later_ns(kvrelay_now_ns(), k->cfg.goaway_grace_ns);
    k->goaway_until_ns = until == KVRELAY_TIME_NONE ? until - 1 : until;
    kvrelay_grpc_link_rearm(&k->link);
  }
  if (frame->error_code == NGHTTP2_ENHANCE_YOUR_CALM && frame->opaque_data_len == sizeof calm - 1 &&
      memcmp(frame->opaque_data, calm, sizeof calm - 1) == 0)
    k->keepalive_ns =
        k->keepalive_ns > KVRELAY_TIME_NONE / 2 ? KVRELAY_TIME_NONE : 2 * k->keepalive_ns;
  if (k->open.len == 0)
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "the server goes away");
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
      k->ping_at_ns = kvrelay_later_ns(kvrelay_now_ns(), k->keepalive_ns);
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
  client_call *c = kvrelay_grpc_client_call_of(session, frame->hd.stream_id);
  if (c == NULL)
    return 0;
  bool last = (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  if (frame->hd.type == NGHTTP2_HEADERS)
    kvrelay_grpc_client_call_headers(c, last);
  if (last)
    kvrelay_grpc_client_call_finish(c);
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

int kvrelay_grpc_client_callbacks(client *k) {
  if (nghttp2_session_callbacks_new(&k->callbacks) != 0 || nghttp2_option_new(&k->option) != 0)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  kvrelay_grpc_client_call_callbacks(k->callbacks);
  nghttp2_session_callbacks_set_on_frame_recv_callback(k->callbacks, on_frame);
  nghttp2_session_callbacks_set_on_frame_send_callback(k->callbacks, on_frame_sent);
  nghttp2_option_set_no_closed_streams(k->option, 1);
  nghttp2_option_set_max_settings(k->option, 32);
  nghttp2_option_set_max_outbound_ack(k->option, 1000);
  nghttp2_option_set_max_continuations(k->option, 8);
  return KVRELAY_TRANSPORT_OK;
}

/* ---- link ---- */

static void on_gone(kvrelay_grpc_link *link) {
  client *k = client_of_link(link);
  char text[sizeof link->text];
  int err = link->err;
  memcpy(text, link->text, sizeof text);
  k->state = CLIENT_WAITING; /* no new calls from inside the callbacks */
  kvrelay_grpc_client_calls_fail(k, text);
  kvrelay_grpc_link_close(link);
  kvrelay_grpc_client_calls_free(k);
  kvrelay_grpc_client_failed(k, err, text);
}

/* A server's first frame is SETTINGS; anything else is worth a plain word. */
static size_t on_received(kvrelay_grpc_link *link, const uint8_t *bytes, size_t len) {
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
    return 0;
  }
  return len;
}

static uint64_t on_deadline_ns(const kvrelay_grpc_link *link) {
  const client *k = client_of_link(link);
  const client_call *c = TAILQ_FIRST(&k->due);
  uint64_t at = k->state == CLIENT_HANDSHAKE
                    ? kvrelay_later_ns(k->attempt_ns, k->cfg.connect_timeout_ns)
                    : k->ping_at_ns;
  if (c != NULL)
    at = kvrelay_earlier_ns(at, c->deadline_ns);
  at = kvrelay_earlier_ns(at, k->goaway_until_ns);
  return kvrelay_earlier_ns(at, k->stop_at_ns);
}

static void on_link_tick(kvrelay_grpc_link *link, uint64_t now) {
  client *k = client_of_link(link);
  kvrelay_grpc_client_calls_expire(k, now);
  if (now >= k->stop_at_ns) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "grace time over");
  } else if (now >= k->goaway_until_ns) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "the server goes away");
  } else if (k->state == CLIENT_HANDSHAKE) {
    if (now >= kvrelay_later_ns(k->attempt_ns, k->cfg.connect_timeout_ns))
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT,
                             link->shaking ? "no TLS handshake in time" : "no SETTINGS in time");
  } else if (now >= k->ping_at_ns) {
    if (k->ping_open) {
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "no answer to a keepalive PING");
    } else if (k->open.len == 0) {
      k->ping_at_ns = kvrelay_later_ns(now, k->keepalive_ns);
    } else {
      k->ping_open = true;
      k->ping_at_ns = kvrelay_later_ns(now, k->cfg.keepalive_timeout_ns);
      kvrelay_grpc_link_submitted(
          link, nghttp2_submit_ping(link->session, NGHTTP2_FLAG_NONE, keepalive_ping));
    }
  }
}

static const kvrelay_grpc_link_events link_events = {
    .received = on_received, .deadline_ns = on_deadline_ns, .tick = on_link_tick, .gone = on_gone};

bool kvrelay_grpc_client_link_open(client *k, int fd) {
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, k->cfg.stream_window_bytes},
      {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, MAX_FRAME_BYTES},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST_BYTES}};
  memset(&k->link, 0, sizeof k->link);
  k->link.no_linger = true;
  k->first_len = 0;
  k->ping_open = false;
  k->goaway_until_ns = KVRELAY_TIME_NONE;
  if (kvrelay_grpc_link_open(&k->link, &k->loop, &link_events, fd, OUTPUT_THRESHOLD) ==
          KVRELAY_TRANSPORT_OK &&
      (k->cfg.security == NULL ||
       kvrelay_grpc_link_secure(&k->link, k->cfg.security, k->peer_name) == KVRELAY_TRANSPORT_OK) &&
      nghttp2_session_client_new2(&k->link.session, k->callbacks, k, k->option) == 0 &&
      nghttp2_submit_settings(k->link.session, NGHTTP2_FLAG_NONE, settings,
                              sizeof settings / sizeof *settings) == 0 &&
      nghttp2_session_set_local_window_size(k->link.session, NGHTTP2_FLAG_NONE, 0,
                                            (int32_t)k->cfg.connection_window_bytes) == 0)
    return true;
  kvrelay_grpc_link_close(&k->link);
  return false;
}
