/* SPDX-License-Identifier: Apache-2.0 */
#include "exchange.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tls_pair.h"
#include "transports/grpc/grpc_client.h"
#include "transports/grpc/grpc_server.h"
#include "transports/tcp/tcp_client.h"
#include "transports/tcp/tcp_server.h"

#define MS UINT64_C(1000000)

/* ---- transports ---- */

static kvrelay_tls *tls[2];

/* Both sides together: a process that is forked later shares their authority. */
void carriers_prepare(void) {
  if (tls[TLS_SERVER] != NULL)
    return;
  tls[TLS_SERVER] = tls_open(tls_server_config());
  tls[TLS_CLIENT] = tls_open(tls_client_config());
}

static kvrelay_security *security_of(int side) {
  carriers_prepare();
  return kvrelay_tls_security(tls[side]);
}

static int grpc_server(struct event_base *base, const char *bind, kvrelay_security *security,
                       kvrelay_service *service, kvrelay_transport **out) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = bind;
  cfg.base = base;
  cfg.security = security;
  cfg.max_connections_per_peer = cfg.max_connections = 4096;
  return kvrelay_grpc_server_open(&cfg, service, out);
}

static int open_grpc_server(struct event_base *base, const char *bind, kvrelay_service *service,
                            kvrelay_transport **out) {
  return grpc_server(base, bind, NULL, service, out);
}

static int open_grpc_tls_server(struct event_base *base, const char *bind, kvrelay_service *service,
                                kvrelay_transport **out) {
  return grpc_server(base, bind, security_of(TLS_SERVER), service, out);
}

static int grpc_client(struct event_base *base, const char *target, kvrelay_security *security,
                       kvrelay_caller *caller, kvrelay_client_transport **out) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  cfg.base = base;
  cfg.backoff_first_ns = cfg.backoff_max_ns = MS;
  cfg.security = security;
  cfg.server_name = "relay.example"; /* for sockets in the file system */
  return kvrelay_grpc_client_open(&cfg, caller, out);
}

static int open_grpc_client(struct event_base *base, const char *target, kvrelay_caller *caller,
                            kvrelay_client_transport **out) {
  return grpc_client(base, target, NULL, caller, out);
}

static int open_grpc_tls_client(struct event_base *base, const char *target, kvrelay_caller *caller,
                                kvrelay_client_transport **out) {
  return grpc_client(base, target, security_of(TLS_CLIENT), caller, out);
}

static int tcp_server(const char *bind, kvrelay_security *security, kvrelay_service *service,
                      kvrelay_transport **out) {
  kvrelay_tcp_server_config cfg = kvrelay_tcp_server_config_default();
  cfg.bind = bind;
  cfg.security = security;
  cfg.max_connections_per_peer = cfg.max_connections = 4096;
  return kvrelay_tcp_server_open(&cfg, service, out);
}

static int open_tcp_server(struct event_base *base, const char *bind, kvrelay_service *service,
                           kvrelay_transport **out) {
  (void)base;
  return tcp_server(bind, NULL, service, out);
}

static int open_tcp_tls_server(struct event_base *base, const char *bind, kvrelay_service *service,
                               kvrelay_transport **out) {
  (void)base;
  return tcp_server(bind, security_of(TLS_SERVER), service, out);
}

static int tcp_client(const char *target, kvrelay_security *security, kvrelay_caller *caller,
                      kvrelay_client_transport **out) {
  kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
  cfg.target = target;
  cfg.backoff_first_ns = cfg.backoff_max_ns = MS;
  cfg.security = security;
  cfg.server_name = "relay.example"; /* for sockets in the file system */
  return kvrelay_tcp_client_open(&cfg, caller, out);
}

static int open_tcp_client(struct event_base *base, const char *target, kvrelay_caller *caller,
                           kvrelay_client_transport **out) {
  (void)base;
  return tcp_client(target, NULL, caller, out);
}

static int open_tcp_tls_client(struct event_base *base, const char *target, kvrelay_caller *caller,
                               kvrelay_client_transport **out) {
  (void)base;
  return tcp_client(target, security_of(TLS_CLIENT), caller, out);
}

const carrier carriers[] = {
    {"grpc", open_grpc_server, kvrelay_grpc_server_address, open_grpc_client},
    {"grpc over TLS", open_grpc_tls_server, kvrelay_grpc_server_address, open_grpc_tls_client},
    {"raw", open_tcp_server, kvrelay_tcp_server_address, open_tcp_client},
    {"raw over TLS", open_tcp_tls_server, kvrelay_tcp_server_address, open_tcp_tls_client}};
const size_t carriers_len = sizeof carriers / sizeof *carriers;

/* ---- what is exchanged ---- */

static const struct shape {
  int32_t method;
  const char *request;
  unsigned messages;
  size_t bytes;
  int32_t grpc;
} shapes[EXCHANGE_CALLS] = {
    {KVRELAY_METHOD_GET_RELAY_INFO, "hello", 1, 5, KVRELAY_GRPC_OK},
    {KVRELAY_METHOD_WATCH_CATALOG, "20 500", 20, 10000, KVRELAY_GRPC_OK},
    {KVRELAY_METHOD_WATCH_CATALOG, "2 400000", 2, 800000, KVRELAY_GRPC_OK},
    {KVRELAY_METHOD_SUBSCRIBE_POOL, "9 5 producer changed", 0, 0, KVRELAY_GRPC_FAILED_PRECONDITION},
    {KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD, "", 0, 0, KVRELAY_GRPC_UNIMPLEMENTED},
};

static void wrong(exchange *e, const char *what) {
  if (e->wrong[0] == '\0')
    snprintf(e->wrong, sizeof e->wrong, "%s", what);
}

static size_t index_of(exchange *e, uint32_t number) {
  for (size_t i = 0; i < EXCHANGE_CALLS; i++)
    if (e->calls[i].number == number && number != 0)
      return i;
  wrong(e, "told of a call that is not open");
  return 0;
}

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  exchange *e = (exchange *)self;
  (void)now_ns;
  e->ready = state == KVRELAY_CONNECTION_READY;
  if (state != KVRELAY_CONNECTION_FAILED)
    return;
  e->failures++;
  if (err >= 0 || text[0] == '\0' || retry_ns == KVRELAY_TIME_NONE)
    wrong(e, "a failure without a reason or a next attempt");
  for (size_t i = 0; i < EXCHANGE_CALLS; i++)
    if (e->calls[i].number != 0)
      wrong(e, "a broken connection left a call open");
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)now_ns;
  (void)index_of((exchange *)self, call);
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  exchange *e = (exchange *)self;
  struct exchange_call *c = &e->calls[index_of(e, call)];
  (void)now_ns;
  if (len > 64 && (uint8_t)(bytes[len - 1] - bytes[0]) != (uint8_t)(len - 1))
    wrong(e, "a message with wrong content");
  c->messages++;
  c->bytes += len;
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  exchange *e = (exchange *)self;
  const size_t i = index_of(e, call);
  struct exchange_call *c = &e->calls[i];
  (void)now_ns;
  c->number = 0;
  c->done = status->grpc == shapes[i].grpc;
  if (c->done && status->grpc == KVRELAY_GRPC_OK &&
      (c->messages != shapes[i].messages || c->bytes != shapes[i].bytes))
    wrong(e, "an end with OK before all messages came");
}

bool exchange_advance(exchange *e) {
  bool all = true;
  for (size_t i = 0; i < EXCHANGE_CALLS; i++) {
    struct exchange_call *c = &e->calls[i];
    all &= c->done;
    if (c->done || c->number != 0 || !e->ready)
      continue;
    c->messages = 0;
    c->bytes = 0;
    c->number = ++e->last_number;
    /* It may refuse for want of memory; the next time it will not. */
    if (e->client->call(e->client, c->number, kvrelay_method_path(shapes[i].method),
                        (const uint8_t *)shapes[i].request,
                        strlen(shapes[i].request)) != KVRELAY_TRANSPORT_OK)
      c->number = 0;
  }
  return all;
}

void exchange_again(exchange *e) {
  for (size_t i = 0; i < EXCHANGE_CALLS; i++)
    e->calls[i].done = false;
}

static void run_once(exchange *e, kvrelay_transport *t, uint64_t timeout_ns) {
  const int err = t->run_once(t, timeout_ns);
  if (err < 0 && err != KVRELAY_TRANSPORT_ERR_MEMORY && err != KVRELAY_TRANSPORT_ERR_SYSTEM)
    wrong(e, kvrelay_transport_strerror(err));
}

bool exchange_run(exchange *e, kvrelay_transport *server, uint64_t patience_ns) {
  const uint64_t until = kvrelay_now_ns() + patience_ns;
  while (!exchange_advance(e) && e->wrong[0] == '\0') {
    if (kvrelay_now_ns() > until)
      wrong(e, "nothing goes on");
    if (server != NULL)
      run_once(e, server, 0);
    run_once(e, &e->client->base, MS / 4);
  }
  return e->wrong[0] == '\0';
}

int exchange_open(exchange *e, const carrier *how, struct event_base *base, const char *target) {
  memset(e, 0, sizeof *e);
  e->base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  return how->open_client(base, target, &e->base, &e->client);
}

void exchange_close(exchange *e) { e->client->base.close(&e->client->base); }

unsigned open_descriptors(void) {
  unsigned count = 0;
  DIR *list = opendir("/proc/self/fd");
  if (list == NULL)
    abort();
  while (readdir(list) != NULL)
    count++;
  closedir(list);
  return count;
}
