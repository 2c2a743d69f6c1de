/* SPDX-License-Identifier: Apache-2.0 */
/* The server: its configuration, its socket, its connections as a whole. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "grpc_server_private.h"

#define ACCEPT_PAUSE_NS (KVRELAY_SECOND_NS / 10)
#define ACCEPTS_PER_TURN 64

/* ---- log ---- */

void kvrelay_grpc_server_say(const server *s, int level, const char *event, const connection *conn,
                             const char *text) {
  kvrelay_log_connection((kvrelay_log){s->cfg.log, s->cfg.log_context}, level, event,
                         conn != NULL ? &conn->peer : NULL, conn != NULL ? conn->link.secure : NULL,
                         text);
}

/* ---- connections ---- */

static const char *refusal(const server *s, const kvrelay_address *peer) {
  if (s->connections_count >= s->cfg.max_connections)
    return "too many connections";
  uint32_t count = 0;
  const connection *conn;
  TAILQ_FOREACH(conn, &s->connections, entry)
  count += kvrelay_address_same_host(&conn->peer, peer);
  return count >= s->cfg.max_connections_per_peer ? "too many connections of this peer" : NULL;
}

static void on_accept_again(void *server_) {
  server *s = server_;
  if (event_add(s->acceptable, NULL) != 0)
    kvrelay_timer_set(&s->accept_again, ACCEPT_PAUSE_NS);
}

static void on_acceptable(evutil_socket_t listener, short what, void *server_) {
  server *s = server_;
  (void)what;
  kvrelay_grpc_loop_turn(&s->loop);
  for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
    kvrelay_address peer;
    memset(&peer, 0, sizeof peer);
    peer.len = sizeof peer.storage;
    int fd = accept4(listener, (struct sockaddr *)&peer.storage, &peer.len,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        /* The queue stays readable: without a pause this would spin. */
        kvrelay_grpc_server_say(s, KVRELAY_LOG_WARN, "accept_failed", NULL, strerror(errno));
        event_del(s->acceptable);
        kvrelay_timer_set(&s->accept_again, ACCEPT_PAUSE_NS);
      }
      return;
    }
    const char *why = refusal(s, &peer);
    if (why != NULL) {
      uint64_t n = ++s->refused_connections;
      if ((n & (n - 1)) == 0)
        kvrelay_grpc_server_say(s, KVRELAY_LOG_WARN, "connection_refused", NULL, why);
      close(fd);
      continue;
    }
    int one = 1;
    if (peer.storage.ss_family != AF_UNIX)
      (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    kvrelay_grpc_connection_open(s, fd, &peer);
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
  if (s->acceptable != NULL)
    event_free(s->acceptable);
  kvrelay_timer_close(&s->accept_again);
  if (s->fd >= 0) {
    close(s->fd);
    kvrelay_address_remove(&s->address);
  }
  s->acceptable = NULL;
  s->fd = -1;
}

static void on_stop(kvrelay_transport *t, uint64_t grace_ns) {
  server *s = server_of(t);
  connection *conn;
  kvrelay_grpc_loop_turn(&s->loop);
  s->stopping = true;
  stop_listening(s);
  TAILQ_FOREACH(conn, &s->connections, entry)
  kvrelay_grpc_connection_drain(conn, kvrelay_earlier_ns(grace_ns, KVRELAY_GRACE_MAX_NS));
}

static void on_close(kvrelay_transport *t) {
  server *s = server_of(t);
  connection *conn;
  kvrelay_grpc_loop_turn(&s->loop);
  while ((conn = TAILQ_FIRST(&s->connections)) != NULL)
    kvrelay_grpc_connection_free(conn);
  stop_listening(s);
  if (s->callbacks != NULL)
    nghttp2_session_callbacks_del(s->callbacks);
  if (s->option != NULL)
    nghttp2_option_del(s->option);
  kvrelay_grpc_loop_close(&s->loop);
  kvrelay_grpc_pool_close(&s->pool);
  free(s);
}

static uint64_t on_now_ns(const kvrelay_transport *t) {
  (void)t;
  return kvrelay_now_ns();
}

static int listen_on(server *s, const char *bind_text) {
  const int err = kvrelay_address_listen(bind_text, &s->address, &s->fd);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  s->acceptable = event_new(s->loop.base, s->fd, EV_READ | EV_PERSIST, on_acceptable, s);
  if (s->acceptable == NULL || event_add(s->acceptable, NULL) != 0)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  return kvrelay_timer_open(&s->accept_again, s->loop.base, on_accept_again, s);
}

kvrelay_grpc_server_config kvrelay_grpc_server_config_default(void) {
  return (kvrelay_grpc_server_config){
      .max_request_bytes = 65536,
      .max_message_bytes = 8388608,
      .output_threshold = 1048576,
      .max_connections = 1024,
      .max_connections_per_peer = 256,
      .max_concurrent_streams = 1024,
      .keepalive_interval_ns = 20 * KVRELAY_SECOND_NS,
      .keepalive_timeout_ns = 10 * KVRELAY_SECOND_NS,
      .peer_ping_interval_ns = 10 * KVRELAY_SECOND_NS,
      .handshake_timeout_ns = 10 * KVRELAY_SECOND_NS,
      .idle_timeout_ns = 300 * KVRELAY_SECOND_NS,
      .max_connection_age_ns = KVRELAY_TIME_NONE,
      .max_connection_age_grace_ns = 10 * KVRELAY_SECOND_NS,
  };
}

int kvrelay_grpc_server_open(const kvrelay_grpc_server_config *cfg, kvrelay_service *service,
                             kvrelay_transport **out) {
  if (cfg == NULL || service == NULL || out == NULL || cfg->bind == NULL ||
      cfg->output_threshold < SOCKET_SHARE || cfg->max_connections == 0 ||
      cfg->max_connections_per_peer == 0 || cfg->max_concurrent_streams == 0)
    return KVRELAY_TRANSPORT_ERR_ARG;
  server *s = calloc(1, sizeof *s);
  if (s == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  s->base = (kvrelay_transport){on_run_once, on_wake, on_stop, on_close, on_now_ns};
  s->cfg = *cfg;
  s->service = service;
  s->fd = -1;
  s->jitter = kvrelay_now_ns();
  kvrelay_grpc_pool_init(&s->pool);
  TAILQ_INIT(&s->connections);
  TAILQ_INIT(&s->woken);
  int err = kvrelay_grpc_loop_open(&s->loop, cfg->base, kvrelay_grpc_calls_woken, s);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(s);
    return err;
  }
  err = kvrelay_grpc_connection_callbacks(s);
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
