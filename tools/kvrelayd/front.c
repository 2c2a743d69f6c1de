/* SPDX-License-Identifier: Apache-2.0 */
#include "front.h"

#include <errno.h>
#include <event2/event.h>
#include <string.h>
#include <unistd.h>

#include "grpc/grpc_server.h"
#include "kvrelay_pb.h"
#include "log.h"
#include "tcp/tcp_server.h"

#define RELAY_NAME "dynamo.kvrelay.v1.KvEventRelay"

_Static_assert((int)KVRELAY_LOG_DEBUG == (int)LOG_DEBUG && (int)KVRELAY_LOG_WARN == (int)LOG_WARN &&
                   (int)KVRELAY_LOG_ERROR == (int)LOG_ERROR,
               "levels of transports are those of the log");

static void on_transport_log(void *context, int level, const char *event, const char *text) {
  char quoted[LOG_QUOTE_CAP];
  (void)context;
  log_event(level, event, "text=%s", log_quote(text, strlen(text), quoted));
}

int front_open(front *f, kvrelay_relay *relay, struct event_base *base) {
  static const char *const names[] = {RELAY_NAME, KVRELAY_GRPC_HEALTH_NAME,
                                      KVRELAY_GRPC_REFLECTION_NAME,
                                      KVRELAY_GRPC_REFLECTION_OLD_NAME};
  kvrelay_relay_service_config cfg = kvrelay_relay_service_config_default(relay);
  f->base = base;
  if (kvrelay_relay_service_open(&cfg, &f->relay) != KVRELAY_TRANSPORT_OK ||
      kvrelay_grpc_health_open(&f->health) != KVRELAY_TRANSPORT_OK ||
      kvrelay_grpc_health_set(f->health, RELAY_NAME, KVRELAY_GRPC_HEALTH_NOT_SERVING) !=
          KVRELAY_TRANSPORT_OK ||
      kvrelay_grpc_reflection_open(names, sizeof names / sizeof names[0], &f->reflection) !=
          KVRELAY_TRANSPORT_OK)
    return 71;
  kvrelay_mux_init(&f->all, kvrelay_relay_service_base(f->relay));
  kvrelay_service *reflection = kvrelay_grpc_reflection_base(f->reflection);
  (void)kvrelay_mux_add(&f->all, KVRELAY_GRPC_HEALTH_NAME, kvrelay_grpc_health_base(f->health));
  (void)kvrelay_mux_add(&f->all, KVRELAY_GRPC_REFLECTION_NAME, reflection);
  (void)kvrelay_mux_add(&f->all, KVRELAY_GRPC_REFLECTION_OLD_NAME, reflection);
  return 0;
}

static void on_tls_warning(void *context, const char *text) {
  on_transport_log(context, LOG_WARN, "tls_warning", text);
}

/* True when the files are in use now; `why` says why not. */
static bool secured(const front *f, int err, const char *why, const char *note) {
  char quoted[LOG_QUOTE_CAP];
  if (err != KVRELAY_TRANSPORT_OK)
    log_event(LOG_ERROR, "tls_failed", "text=%s note=\"%s\"", log_quote(why, strlen(why), quoted),
              note);
  else
    log_event(LOG_INFO, "tls", "client_certificates=%s cert_expires=%lld client_ca_expires=%lld",
              f->tls_files.ca_file != NULL ? "required" : "no",
              (long long)kvrelay_tls_cert_not_after(f->tls),
              (long long)kvrelay_tls_ca_not_after(f->tls));
  return err == KVRELAY_TRANSPORT_OK;
}

int front_secure(front *f, const kvrelay_tls_config *cfg) {
  char why[KVRELAY_TLS_WHY_CAP] = "";
  f->tls_files = *cfg;
  f->tls_files.warn = on_tls_warning;
  const int err = kvrelay_tls_open(&f->tls_files, &f->tls, why);
  return secured(f, err, why, "nothing is served") ? 0 : 78;
}

void front_reload(front *f) {
  char why[KVRELAY_TLS_WHY_CAP] = "";
  if (f->tls != NULL)
    (void)secured(f, kvrelay_tls_reload(f->tls, &f->tls_files, why), why,
                  "the files read before stay in use");
}

/* 0, or an exit code, after a log line. */
static int listening(int err, const char *transport, const char *bind, const char *address) {
  if (err == KVRELAY_TRANSPORT_OK) {
    log_event(LOG_INFO, "listening", "transport=%s address=%s", transport, address);
    return 0;
  }
  log_event(LOG_ERROR, "bind_failed", "address=%s error=\"%s\" system=\"%s\"", bind,
            kvrelay_transport_strerror(err), strerror(errno));
  return 69;
}

static kvrelay_security *security(const front *f) {
  return f->tls != NULL ? kvrelay_tls_security(f->tls) : NULL;
}

static kvrelay_grpc_server_config grpc_config(front *f, const char *bind) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = bind;
  cfg.base = f->base;
  cfg.log = on_transport_log;
  return cfg;
}

static int listen_with(const kvrelay_grpc_server_config *cfg, kvrelay_service *service,
                       const char *transport, kvrelay_transport **out) {
  char address[128] = "";
  const int err = kvrelay_grpc_server_open(cfg, service, out);
  if (err == KVRELAY_TRANSPORT_OK)
    kvrelay_grpc_server_address(*out, address, sizeof address);
  return listening(err, transport, cfg->bind, address);
}

int front_listen_probes(front *f, const char *bind) {
  const kvrelay_grpc_server_config cfg = grpc_config(f, bind);
  return listen_with(&cfg, kvrelay_grpc_health_base(f->health), "health", &f->probes);
}

static void on_raw_ready(evutil_socket_t fd, short what, void *argument) {
  (void)fd;
  (void)what;
  (void)argument; /* ending the turn is all it is for: front_turn does the rest */
}

static void on_raw_due(void *argument) { (void)argument; /* the same */ }

/* `bind` NULL: connections come from the listener of gRPC. */
static int open_raw(front *f, const char *bind) {
  char address[128] = "";
  kvrelay_tcp_server_config cfg = kvrelay_tcp_server_config_default();
  cfg.bind = bind;
  cfg.security = security(f);
  cfg.log = on_transport_log;
  const int err = kvrelay_tcp_server_open(&cfg, kvrelay_relay_service_base(f->relay), &f->raw);
  if (err == KVRELAY_TRANSPORT_OK)
    kvrelay_tcp_server_address(f->raw, address, sizeof address);
  if (bind != NULL || err != KVRELAY_TRANSPORT_OK) {
    const int code = listening(err, "raw", bind != NULL ? bind : "shared", address);
    if (code != 0)
      return code;
  }
  f->raw_ready =
      event_new(f->base, kvrelay_tcp_server_fd(f->raw), EV_READ | EV_PERSIST, on_raw_ready, NULL);
  return f->raw_ready != NULL && event_add(f->raw_ready, NULL) == 0 &&
                 kvrelay_timer_open(&f->raw_due, f->base, on_raw_due, f) == KVRELAY_TRANSPORT_OK
             ? 0
             : 71;
}

/* On the way out there may be nobody left to take it. */
static void on_shared(void *front_, int fd, const kvrelay_address *peer,
                      kvrelay_secure_session *secure) {
  front *f = front_;
  if (f->raw != NULL) {
    kvrelay_tcp_server_adopt(f->raw, fd, peer, secure);
    return;
  }
  if (secure != NULL)
    secure->close(secure);
  close(fd);
}

int front_listen(front *f, const char *bind, const char *raw_bind) {
  const bool shared = bind != NULL && raw_bind != NULL && strcmp(bind, raw_bind) == 0;
  char address[128];
  int code = shared ? open_raw(f, NULL) : 0;
  if (code == 0 && bind != NULL) {
    kvrelay_grpc_server_config cfg = grpc_config(f, bind);
    cfg.security = security(f);
    cfg.raw = shared ? on_shared : NULL;
    cfg.raw_context = f;
    code = listen_with(&cfg, &f->all.base, "grpc", &f->grpc);
  }
  if (code != 0 || raw_bind == NULL)
    return code;
  if (!shared)
    return open_raw(f, raw_bind);
  kvrelay_grpc_server_address(f->grpc, address, sizeof address);
  return listening(KVRELAY_TRANSPORT_OK, "raw", bind, address);
}

void front_ready(front *f) {
  (void)kvrelay_grpc_health_set(f->health, "", KVRELAY_GRPC_HEALTH_SERVING);
  (void)kvrelay_grpc_health_set(f->health, RELAY_NAME, KVRELAY_GRPC_HEALTH_SERVING);
}

void front_stop(front *f, uint64_t grace_ns) {
  f->stopping = true;
  kvrelay_grpc_health_shutdown(f->health);
  kvrelay_grpc_reflection_shutdown(f->reflection);
  if (f->grpc != NULL)
    f->grpc->stop(f->grpc, grace_ns);
  if (f->probes != NULL)
    f->probes->stop(f->probes, grace_ns);
  if (f->raw != NULL)
    f->raw->stop(f->raw, grace_ns);
}

static void close_raw(front *f) {
  if (f->raw_ready != NULL)
    event_free(f->raw_ready); /* before the descriptor is closed */
  f->raw_ready = NULL;
  kvrelay_timer_close(&f->raw_due);
  if (f->raw != NULL)
    f->raw->close(f->raw);
  f->raw = NULL;
}

/* What is ready by now, without waiting; as front_turn. */
static int turn_raw(front *f) {
  if (f->raw == NULL)
    return 0;
  const int turned = f->raw->run_once(f->raw, 0);
  if (turned >= 0)
    kvrelay_timer_set_at(&f->raw_due, kvrelay_tcp_server_deadline_ns(f->raw));
  if (turned != KVRELAY_TRANSPORT_CLOSED)
    return turned;
  close_raw(f);
  return 1;
}

void front_tell_large(const char *plane, size_t bytes, bool *told) {
  const bool large = bytes >= FRONT_LARGE_BYTES;
  if (large && !*told)
    log_event(LOG_WARN, "message_large", "plane=%s bytes=%zu limit_bytes=%u", plane, bytes,
              KVRELAY_PB_MESSAGE_MAX);
  *told = large;
}

int front_turn(front *f) {
  const kvrelay_relay_service_stats said = kvrelay_relay_service_stats_get(f->relay);
  front_tell_large("catalog", said.catalog_bytes, &f->catalog_large);
  front_tell_large("readiness", said.readiness_bytes, &f->readiness_large);
  const int raw = turn_raw(f);
  if (raw < 0)
    return raw;
  /* The others share the loop, so that running one runs all. */
  kvrelay_transport **one = f->grpc != NULL ? &f->grpc : &f->probes;
  if (*one == NULL) {
    if (f->stopping && f->raw == NULL)
      return KVRELAY_TRANSPORT_CLOSED;
    return event_base_loop(f->base, EVLOOP_ONCE) < 0 ? KVRELAY_TRANSPORT_ERR_SYSTEM : 1;
  }
  const int turned = (*one)->run_once(*one, 1000000000u);
  if (turned != KVRELAY_TRANSPORT_CLOSED)
    return turned;
  (*one)->close(*one);
  *one = NULL;
  return 1;
}

void front_close(front *f) {
  if (f->grpc != NULL)
    f->grpc->close(f->grpc);
  if (f->probes != NULL)
    f->probes->close(f->probes);
  close_raw(f);
  kvrelay_tls_close(f->tls);
  kvrelay_grpc_reflection_close(f->reflection);
  kvrelay_grpc_health_close(f->health);
  kvrelay_relay_service_close(f->relay);
}
