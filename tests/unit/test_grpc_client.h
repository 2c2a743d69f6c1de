/* SPDX-License-Identifier: Apache-2.0 */
/* test_grpc_client.h - the gRPC client beside our server or a peer made by hand, on one loop, and a
 * caller that notes everything. */
#ifndef KVRELAY_TEST_GRPC_CLIENT_H
#define KVRELAY_TEST_GRPC_CLIENT_H

#include <criterion/criterion.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/raw_http2.h"
#include "support/toy_service.h"
#include "transports/grpc/grpc_client.h"
#include "transports/grpc/grpc_dial.h"
#include "transports/grpc/grpc_server.h"

#define MS UINT64_C(1000000)
#define TOY "/kvrelay.test.Toy/"

/* ---- a caller that notes everything ---- */

typedef struct noted {
  int admitted, messages, ends;
  size_t bytes, last_len;
  bool wrong; /* a message out of order or with wrong content */
  kvrelay_status status;
  uint8_t first[64];
} noted;

static struct caller {
  kvrelay_caller base; /* first */
  noted call[2048];
  char states[256]; /* one letter each: C R F X */
  int err;
  char text[128];
  uint64_t retry_ns, failed_at_ns;
  uint32_t cancel_at_message; /* call to cancel from inside its first message */
} caller;

static struct event_base *base;
static toy_service toy;
static kvrelay_transport *server;
static kvrelay_client_transport *client;

static inline void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                                 uint64_t retry_ns, uint64_t now_ns) {
  size_t n = strlen(caller.states);
  (void)self;
  if (n < sizeof caller.states - 1)
    caller.states[n] = "?CRFX"[state];
  if (state != KVRELAY_CONNECTION_FAILED)
    return;
  caller.err = err;
  snprintf(caller.text, sizeof caller.text, "%s", text);
  caller.retry_ns = retry_ns;
  caller.failed_at_ns = now_ns;
}

static inline void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  caller.call[call].admitted++;
}

static inline void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                              uint64_t now_ns) {
  noted *n = &caller.call[call];
  (void)self;
  (void)now_ns;
  if (n->messages == 0)
    memcpy(n->first, bytes, len < sizeof n->first ? len : sizeof n->first);
  /* Of Count: byte j of message i is i + j. */
  n->wrong |= n->admitted != 1 || n->ends != 0;
  n->wrong |= len > 1 && (uint8_t)(bytes[len - 1] - bytes[0]) != (uint8_t)(len - 1) && len > 64;
  n->messages++;
  n->bytes += len;
  n->last_len = len;
  if (call == caller.cancel_at_message)
    client->cancel(client, call);
}

static inline void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                          uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  caller.call[call].ends++;
  caller.call[call].status = *status;
}

/* ---- both sides on one loop ---- */

static inline kvrelay_grpc_client_config client_config(const char *target) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  cfg.proxy = NULL; /* whatever the environment says */
  cfg.base = base;
  cfg.backoff_first_ns = 30 * MS;
  cfg.backoff_max_ns = 100 * MS;
  return cfg;
}

static inline void open_client(const kvrelay_grpc_client_config *cfg) {
  memset(&caller, 0, sizeof caller);
  caller.base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  cr_assert_eq(kvrelay_grpc_client_open(cfg, &caller.base, &client), KVRELAY_TRANSPORT_OK);
}

static inline kvrelay_grpc_server_config server_config(void) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = "127.0.0.1:0";
  cfg.base = base;
  return cfg;
}

static inline void run_ms(uint64_t ms) {
  uint64_t until = client->base.now_ns(&client->base) + ms * MS;
  while (client->base.now_ns(&client->base) < until)
    client->base.run_once(&client->base, 5 * MS);
}

/* Runs until the condition holds, at most 5 s. */
#define RUN_UNTIL(CONDITION)                                                                       \
  do {                                                                                             \
    uint64_t until_ = client->base.now_ns(&client->base) + 5000 * MS;                              \
    bool met_;                                                                                     \
    while (!(met_ = (CONDITION)) && client->base.now_ns(&client->base) < until_)                   \
      client->base.run_once(&client->base, 5 * MS);                                                \
    cr_assert(met_, "states %s, text %s", caller.states, caller.text);                             \
  } while (0)

static inline bool in_state(char state) {
  size_t n = strlen(caller.states);
  return n > 0 && caller.states[n - 1] == state;
}

static inline void start_with(const kvrelay_grpc_server_config *scfg,
                              kvrelay_grpc_client_config *ccfg) {
  static char target[64];
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(scfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  kvrelay_grpc_server_address(server, target, sizeof target);
  ccfg->target = target;
  open_client(ccfg);
  RUN_UNTIL(in_state('R'));
}

static inline void start(void) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  start_with(&scfg, &ccfg);
}

static inline void finish(void) {
  client->base.close(&client->base);
  if (server != NULL) {
    for (int i = 0; i < 20; i++)
      server->run_once(server, MS);
    cr_expect_eq(toy.opened, toy.closed);
    cr_expect_eq(toy.broken, 0);
    server->close(server);
    toy_service_free(&toy);
  }
  event_base_free(base);
}

static inline int call(uint32_t number, const char *method, const char *request) {
  char path[64];
  snprintf(path, sizeof path, TOY "%s", method);
  memset(&caller.call[number], 0, sizeof caller.call[number]);
  return client->call(client, number, path, (const uint8_t *)request, strlen(request));
}

static inline void call_and_end(uint32_t number, const char *method, const char *request) {
  cr_assert_eq(call(number, method, request), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[number].ends > 0);
  cr_expect_eq(caller.call[number].ends, 1);
}

/* ---- servers made by hand ---- */

static int listener;
static raw_http2 peer;

static inline void start_scripted(kvrelay_grpc_client_config *cfg) {
  static char target[32];
  uint16_t port = 0;
  listener = raw_listen(&port);
  snprintf(target, sizeof target, "127.0.0.1:%u", port);
  cfg->target = target;
  open_client(cfg);
  RUN_UNTIL((peer.fd = accept(listener, NULL, NULL)) >= 0);
  raw_take(&peer, peer.fd);
  /* The client's preface. */
  uint8_t preface[24];
  ssize_t n = 0;
  RUN_UNTIL((n = recv(peer.fd, preface, sizeof preface, MSG_PEEK)) == 24);
  n = recv(peer.fd, preface, sizeof preface, 0);
  cr_assert_arr_eq(preface, RAW_PREFACE, 24);
}

static inline void scripted(void) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  start_scripted(&cfg);
}

static inline void ready(void) {
  raw_send_frame(&peer, RAW_SETTINGS, 0, 0, NULL, 0);
  raw_send_frame(&peer, RAW_SETTINGS, NGHTTP2_FLAG_ACK, 0, NULL, 0);
  RUN_UNTIL(in_state('R'));
}

/* The next frame of this type from the client. */
static inline raw_frame expect_frame(uint8_t type) {
  raw_frame f;
  bool got = false;
  RUN_UNTIL((got = raw_next(&peer, &f)) && f.type == type);
  return f;
}

static inline void finish_scripted(void) {
  raw_close(&peer);
  close(listener);
  client->base.close(&client->base);
  event_base_free(base);
}

#define ANSWER ":status: 200\ncontent-type: application/grpc\n"

#endif
