/* SPDX-License-Identifier: Apache-2.0 */
/* The client as a transport: attempts to connect, one after the other, and one connection. */
#include "grpc_client_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_WINDOW_BYTES 65535

/* ---- attempts ---- */

static void all_closed(client *k) {
  k->state = CLIENT_CLOSED;
  kvrelay_timer_set_at(&k->timer, KVRELAY_TIME_NONE);
  k->caller->connection(k->caller, KVRELAY_CONNECTION_CLOSED, KVRELAY_TRANSPORT_CLOSED, "stopped",
                        KVRELAY_TIME_NONE, kvrelay_now_ns());
}

void kvrelay_grpc_client_failed(client *k, int err, const char *text) {
  if (client_stopping(k)) {
    all_closed(k);
    return;
  }
  uint64_t now = kvrelay_now_ns();
  uint64_t retry = kvrelay_backoff_failed(&k->backoff, k->attempt_ns, now);
  k->state = CLIENT_WAITING;
  kvrelay_timer_set_at(&k->timer, retry);
  k->caller->connection(k->caller, KVRELAY_CONNECTION_FAILED, err, text, retry, now);
}

static void on_dialled(void *client_, int fd, int err, const char *text) {
  client *k = client_;
  char copy[128];
  kvrelay_timer_set_at(&k->timer, KVRELAY_TIME_NONE);
  if (fd < 0) {
    snprintf(copy, sizeof copy, "%s", text);
    kvrelay_grpc_client_failed(k, err, copy);
  } else if (!kvrelay_grpc_client_link_open(k, fd)) {
    kvrelay_grpc_client_failed(k, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for a connection");
  } else {
    k->state = CLIENT_HANDSHAKE;
    kvrelay_grpc_link_rearm(&k->link);
    kvrelay_grpc_link_kick(&k->link);
  }
}

static void on_timer(void *client_) {
  client *k = client_;
  kvrelay_grpc_loop_turn(&k->loop);
  const uint64_t now = k->loop.now_ns;
  if (client_stopping(k)) {
    kvrelay_grpc_dial_cancel(&k->dial);
    all_closed(k);
    return;
  }
  if (k->state == CLIENT_DIALLING) {
    kvrelay_grpc_dial_cancel(&k->dial);
    kvrelay_grpc_client_failed(k, KVRELAY_TRANSPORT_ERR_CONNECT, "no connection in time");
    return;
  }
  if (k->state != CLIENT_WAITING)
    return;
  k->state = CLIENT_DIALLING;
  k->attempt_ns = now;
  kvrelay_timer_set_at(&k->timer, kvrelay_later_ns(now, k->cfg.connect_timeout_ns));
  k->caller->connection(k->caller, KVRELAY_CONNECTION_CONNECTING, KVRELAY_TRANSPORT_OK, "",
                        KVRELAY_TIME_NONE, now);
  int err = kvrelay_grpc_dial_start(&k->dial, k->loop.base, &k->target, on_dialled, k);
  if (err != KVRELAY_TRANSPORT_OK) {
    kvrelay_grpc_dial_cancel(&k->dial);
    kvrelay_grpc_client_failed(k, err, "the attempt could not be started");
  }
}

/* ---- the transport ---- */

/* Whom the certificate names, and how requests call the server. */
static int set_names(client *k) {
  kvrelay_dial_target *t = &k->target;
  const char *name = k->cfg.server_name;
  if (k->cfg.security == NULL)
    return KVRELAY_TRANSPORT_OK;
  const int err = kvrelay_dial_target_name(t, name, k->peer_name);
  if (err == KVRELAY_TRANSPORT_OK && name != NULL)
    snprintf(t->authority, sizeof t->authority, "%s", name);
  return err;
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
  k->stop_at_ns = kvrelay_later_ns(now, grace_ns) - (grace_ns == KVRELAY_TIME_NONE ? 1 : 0);
  if (!client_has_link(k))
    kvrelay_timer_set_at(&k->timer, now);
  else if (k->open.len == 0)
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "stopped");
  else
    kvrelay_grpc_link_rearm(&k->link);
}

static void on_close(kvrelay_transport *t) {
  client *k = client_of(t);
  kvrelay_grpc_dial_cancel(&k->dial);
  if (client_has_link(k))
    kvrelay_grpc_link_close(&k->link);
  kvrelay_grpc_client_calls_free(k);
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

static int on_call(kvrelay_client_transport *t, uint32_t number, const char *path,
                   const uint8_t *request, size_t len) {
  client *k = client_of(&t->base);
  const kvrelay_grpc_call_options options = {.path = path, .timeout_ns = KVRELAY_TIME_NONE};
  const kvrelay_iov message = {request, len};
  if (len > k->cfg.max_message_bytes)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  return kvrelay_grpc_client_call_start(k, number, &options, &message);
}

static void on_cancel(kvrelay_client_transport *t, uint32_t number) {
  kvrelay_grpc_client_call_cancel(client_of(&t->base), number);
}

static void on_reconnect(kvrelay_client_transport *t) {
  client *k = client_of(&t->base);
  if (client_has_link(k))
    kvrelay_grpc_link_fail(&k->link, KVRELAY_TRANSPORT_CLOSED, "closed to connect again");
}

static const char *environment(const char *large, const char *small) {
  const char *value = getenv(large);
  return value != NULL && *value != '\0' ? value : getenv(small);
}

kvrelay_grpc_client_config kvrelay_grpc_client_config_default(void) {
  return (kvrelay_grpc_client_config){
      .proxy = environment("HTTPS_PROXY", "https_proxy"),
      .no_proxy = environment("NO_PROXY", "no_proxy"),
      .max_message_bytes = 8388608,
      .stream_window_bytes = 8388608,
      .connection_window_bytes = 16777216,
      .max_calls = 1024,
      .connect_timeout_ns = 20 * KVRELAY_SECOND_NS,
      .backoff_first_ns = KVRELAY_SECOND_NS,
      .backoff_max_ns = 120 * KVRELAY_SECOND_NS,
      .keepalive_interval_ns = 30 * KVRELAY_SECOND_NS,
      .keepalive_timeout_ns = 20 * KVRELAY_SECOND_NS,
      .goaway_grace_ns = 30 * KVRELAY_SECOND_NS,
      .jitter_seed = kvrelay_now_ns(),
  };
}

int kvrelay_grpc_client_open(const kvrelay_grpc_client_config *cfg, kvrelay_caller *caller,
                             kvrelay_client_transport **out) {
  if (cfg == NULL || caller == NULL || out == NULL || cfg->target == NULL || cfg->max_calls == 0 ||
      cfg->stream_window_bytes < DEFAULT_WINDOW_BYTES || cfg->stream_window_bytes > INT32_MAX ||
      cfg->connection_window_bytes < DEFAULT_WINDOW_BYTES ||
      cfg->connection_window_bytes > INT32_MAX)
    return KVRELAY_TRANSPORT_ERR_ARG;
  client *k = calloc(1, sizeof *k);
  if (k == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  k->base = (kvrelay_client_transport){
      {on_run_once, on_wake, on_stop, on_close, on_now_ns}, on_call, on_cancel, on_reconnect, 0};
  k->cfg = *cfg;
  k->caller = caller;
  k->state = CLIENT_WAITING;
  k->backoff = (kvrelay_backoff){cfg->backoff_first_ns, cfg->backoff_max_ns, cfg->backoff_first_ns,
                                 cfg->jitter_seed};
  k->keepalive_ns = cfg->keepalive_interval_ns;
  k->stop_at_ns = k->goaway_until_ns = KVRELAY_TIME_NONE;
  TAILQ_INIT(&k->calls);
  TAILQ_INIT(&k->due);
  int err = kvrelay_dial_target_parse(cfg->target, &k->target);
  if (err == KVRELAY_TRANSPORT_OK)
    err = set_names(k);
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_dial_target_proxy(&k->target, cfg->proxy, cfg->no_proxy);
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_grpc_loop_open(&k->loop, cfg->base, NULL, k);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(k);
    return err;
  }
  err = kvrelay_grpc_client_callbacks(k);
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
