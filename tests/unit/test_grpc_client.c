/* SPDX-License-Identifier: Apache-2.0 */
/* The gRPC client against our server, and against servers made by hand that break off, go away or
 * speak something else. */
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

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
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

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  caller.call[call].admitted++;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
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

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  caller.call[call].ends++;
  caller.call[call].status = *status;
}

/* ---- both sides on one loop ---- */

static kvrelay_grpc_client_config client_config(const char *target) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  cfg.base = base;
  cfg.backoff_first_ns = 30 * MS;
  cfg.backoff_max_ns = 100 * MS;
  return cfg;
}

static void open_client(const kvrelay_grpc_client_config *cfg) {
  memset(&caller, 0, sizeof caller);
  caller.base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  cr_assert_eq(kvrelay_grpc_client_open(cfg, &caller.base, &client), KVRELAY_TRANSPORT_OK);
}

static kvrelay_grpc_server_config server_config(void) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = "127.0.0.1:0";
  cfg.base = base;
  return cfg;
}

static void run_ms(uint64_t ms) {
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

static bool in_state(char state) {
  size_t n = strlen(caller.states);
  return n > 0 && caller.states[n - 1] == state;
}

static void start_with(const kvrelay_grpc_server_config *scfg, kvrelay_grpc_client_config *ccfg) {
  static char target[64];
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(scfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  kvrelay_grpc_server_address(server, target, sizeof target);
  ccfg->target = target;
  open_client(ccfg);
  RUN_UNTIL(in_state('R'));
}

static void start(void) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  start_with(&scfg, &ccfg);
}

static void finish(void) {
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

static int call(uint32_t number, const char *method, const char *request) {
  char path[64];
  snprintf(path, sizeof path, TOY "%s", method);
  memset(&caller.call[number], 0, sizeof caller.call[number]);
  return client->call(client, number, path, (const uint8_t *)request, strlen(request));
}

static void call_and_end(uint32_t number, const char *method, const char *request) {
  cr_assert_eq(call(number, method, request), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[number].ends > 0);
  cr_expect_eq(caller.call[number].ends, 1);
}

Test(grpc_client, unary) {
  start();
  call_and_end(1, "Echo", "hello");
  cr_expect_eq(caller.call[1].messages, 1);
  cr_expect_eq(caller.call[1].admitted, 1);
  cr_expect_arr_eq(caller.call[1].first, "hello", 5);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  call_and_end(2, "Echo", "");
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].bytes, 0);
  char *large = calloc(1, 65537);
  memset(large, 'x', 65536);
  call_and_end(3, "Echo", large);
  cr_expect_eq(caller.call[3].bytes, 65536);
  cr_expect_str_eq(caller.states, "CR");
  free(large);
  finish();
}

Test(grpc_client, streams_of_all_sizes) {
  static const struct {
    const char *request;
    int messages;
    size_t len;
  } cases[] = {{"0 10", 0, 0},
               {"1 0", 1, 0},
               {"1000 1", 1000, 1},
               {"20000 64", 20000, 64},
               {"5 16379", 5, 16379},
               {"5 16380", 5, 16380},
               {"40 262139", 40, 262139},
               {"40 262140", 40, 262140},
               {"7 300001", 7, 300001},
               {"5 4194304", 5, 4194304},
               {"2 8388608", 2, 8388608}};
  start();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    call_and_end(i + 1, "Count", cases[i].request);
    const noted *n = &caller.call[i + 1];
    cr_expect_eq(n->messages, cases[i].messages, "%s", cases[i].request);
    cr_expect_eq(n->bytes, cases[i].len * (size_t)cases[i].messages);
    cr_expect_eq(n->wrong, false, "%s", cases[i].request);
    cr_expect_eq(n->status.grpc, KVRELAY_GRPC_OK);
  }
  finish();
}

Test(grpc_client, refusals_carry_status_reason_and_text) {
  start();
  call_and_end(1, "Refuse", "5 4 pool \xE2\x98\xBA 50% gone");
  cr_expect_eq(caller.call[1].admitted, 0);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_NOT_FOUND);
  cr_expect_eq(caller.call[1].status.reason, KVRELAY_REASON_POOL_NOT_FOUND);
  cr_expect_str_eq(caller.call[1].status.text, "pool \xE2\x98\xBA 50% gone");
  call_and_end(2, "End", "8 7 lagged");
  cr_expect_eq(caller.call[2].admitted, 1);
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_expect_eq(caller.call[2].status.reason, KVRELAY_REASON_SUBSCRIBER_LAGGED);
  call_and_end(3, "Nothing", "");
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  cr_expect_eq(caller.call[3].status.reason, KVRELAY_REASON_NONE);
  finish();
}

Test(grpc_client, a_silent_stream_is_admitted_and_woken) {
  start();
  cr_assert_eq(call(1, "Silent", "x"), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  run_ms(20);
  cr_expect_eq(caller.call[1].messages, 0);
  toy_service_release(&toy);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].messages, 1);
  cr_expect_arr_eq(caller.call[1].first, "released", 8);
  finish();
}

Test(grpc_client, many_calls_and_the_callers_errors) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  ccfg.max_calls = 1000;
  start_with(&scfg, &ccfg);
  for (uint32_t i = 1; i <= 1000; i++)
    cr_assert_eq(call(i, i % 2 ? "Echo" : "Count", i % 2 ? "abc" : "30 500"), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(call(1001, "Echo", "x"), KVRELAY_TRANSPORT_ERR_LIMIT);
  cr_expect_eq(client->call(client, 1000, TOY "Echo", NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(client->call(client, 0, TOY "Echo", NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  for (uint32_t i = 1; i <= 1000; i++) {
    RUN_UNTIL(caller.call[i].ends == 1);
    cr_expect_eq(caller.call[i].messages, i % 2 ? 1 : 30);
    cr_expect_not(caller.call[i].wrong);
  }
  call_and_end(1000, "Echo", "again");
  finish();
}

Test(grpc_client, S27_the_servers_limit_is_an_error_not_a_queue) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  scfg.max_concurrent_streams = 2;
  start_with(&scfg, &ccfg);
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(call(3, "Silent", ""), KVRELAY_TRANSPORT_ERR_LIMIT);
  finish();
}

Test(grpc_client, cancel) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  client->cancel(client, 1);
  client->cancel(client, 1);
  client->cancel(client, 77);
  RUN_UNTIL(toy.open_now == 0);
  cr_expect_eq(caller.call[1].ends, 0, "no end after a cancel");
  /* From inside its own message, with much more on the way. */
  caller.cancel_at_message = 2;
  cr_assert_eq(call(2, "Count", "100000 64"), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[2].messages > 0);
  RUN_UNTIL(toy.open_now == 0);
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].ends, 0);
  /* Before anything was sent; and the number is free at once. */
  cr_assert_eq(call(3, "Echo", "never"), KVRELAY_TRANSPORT_OK);
  client->cancel(client, 3);
  call_and_end(3, "Echo", "second");
  cr_expect_arr_eq(caller.call[3].first, "second", 6);
  cr_expect_eq(caller.call[3].messages, 1);
  finish();
}

Test(grpc_client, C8_messages_above_a_limit) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  ccfg.max_message_bytes = 1000;
  scfg.max_message_bytes = 2000;
  start_with(&scfg, &ccfg);
  call_and_end(1, "Count", "3 1000");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  call_and_end(2, "Count", "3 1001"); /* ours */
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_expect_eq(caller.call[2].messages, 0);
  call_and_end(3, "Count", "3 2001"); /* the server's */
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  char *large = calloc(1, 1002);
  memset(large, 'x', 1001);
  cr_expect_eq(call(4, "Echo", large), KVRELAY_TRANSPORT_ERR_LIMIT);
  free(large);
  RUN_UNTIL(toy.open_now == 0);
  finish();
}

Test(grpc_client, a_stop_of_the_server_ends_streams_with_ok) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  uint64_t begin = server->now_ns(server);
  server->stop(server, 2000 * MS);
  toy_service_shutdown(&toy);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT, "the server goes away");
  RUN_UNTIL(strstr(caller.states, "CRF") != NULL);
  RUN_UNTIL(server->run_once(server, 0) == KVRELAY_TRANSPORT_CLOSED);
  cr_expect_lt(server->now_ns(server) - begin, 1000 * MS);
  finish();
}

Test(grpc_client, wake_from_a_foreign_thread_and_time_outs) {
  base = NULL;
  kvrelay_grpc_client_config cfg = client_config("127.0.0.1:1");
  cfg.backoff_first_ns = cfg.backoff_max_ns = 10000 * MS;
  open_client(&cfg);
  RUN_UNTIL(in_state('F'));
  kvrelay_transport *t = &client->base;
  uint64_t begin = t->now_ns(t);
  cr_expect_eq(t->run_once(t, 30 * MS), 0);
  uint64_t took = t->now_ns(t) - begin;
  cr_expect(took >= 29 * MS && took < 1000 * MS, "%lu ns", (unsigned long)took);
  cr_expect_eq(t->run_once(t, 0), 0);
  t->wake(t);
  begin = t->now_ns(t);
  cr_expect_eq(t->run_once(t, 3000 * MS), 1);
  cr_expect_lt(t->now_ns(t) - begin, 1000 * MS);
  t->close(t);
}

/* ---- connections ---- */

Test(grpc_client, C4_backoff_and_a_server_that_comes_later) {
  uint16_t port = 0;
  char target[32];
  base = event_base_new();
  close(raw_listen(&port)); /* a port that is free */
  snprintf(target, sizeof target, "127.0.0.1:%u", port);
  kvrelay_grpc_client_config cfg = client_config(target);
  open_client(&cfg);
  cr_expect_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  uint64_t begin = client->base.now_ns(&client->base);
  uint64_t last_wait = 0;
  for (int i = 1; i <= 4; i++) {
    RUN_UNTIL(strlen(caller.states) >= 2 * (size_t)i && in_state('F'));
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_CONNECT);
    last_wait = caller.retry_ns - caller.failed_at_ns;
  }
  uint64_t took = client->base.now_ns(&client->base) - begin;
  cr_expect_str_eq(caller.states, "CFCFCFCF");
  /* 30 + 48 + 77 ms, each - 20 %, before the fourth attempt; then at most 100 + 20 %. */
  cr_expect_geq(took, 120 * MS);
  cr_expect(last_wait >= 75 * MS && last_wait <= 121 * MS, "%lu", (unsigned long)last_wait);
  kvrelay_grpc_server_config scfg = server_config();
  scfg.bind = target;
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(&scfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(in_state('R'));
  call_and_end(1, "Echo", "at last");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  finish();
}

Test(grpc_client, reconnect_ends_calls_and_connects_again) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[2].admitted == 1);
  run_ms(40); /* older than the backoff: the next attempt is at once */
  client->reconnect(client);
  RUN_UNTIL(caller.call[1].ends == 1 && caller.call[2].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  RUN_UNTIL(in_state('R'));
  cr_expect_str_eq(caller.states, "CRFCR");
  cr_expect_eq(caller.retry_ns, caller.failed_at_ns);
  call_and_end(1, "Echo", "x");
  finish();
}

Test(grpc_client, stop_waits_for_calls_or_the_grace_time) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  client->base.stop(&client->base, 300 * MS);
  cr_expect_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  run_ms(20);
  cr_expect_eq(caller.call[1].ends, 0);
  RUN_UNTIL(in_state('X'));
  cr_expect_eq(caller.call[1].ends, 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  cr_expect_eq(client->base.run_once(&client->base, MS), KVRELAY_TRANSPORT_CLOSED);
  cr_expect_str_eq(caller.states, "CRX");
  finish();
}

Test(grpc_client, stop_without_a_connection) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config("127.0.0.1:1");
  open_client(&cfg);
  RUN_UNTIL(in_state('F'));
  client->base.stop(&client->base, 1000 * MS);
  RUN_UNTIL(in_state('X'));
  cr_expect_eq(client->base.run_once(&client->base, MS), KVRELAY_TRANSPORT_CLOSED);
  finish();
}

/* ---- servers made by hand ---- */

static int listener;
static raw_http2 peer;

static void start_scripted(kvrelay_grpc_client_config *cfg) {
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

static void scripted(void) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  start_scripted(&cfg);
}

static void ready(void) {
  raw_send_frame(&peer, RAW_SETTINGS, 0, 0, NULL, 0);
  raw_send_frame(&peer, RAW_SETTINGS, NGHTTP2_FLAG_ACK, 0, NULL, 0);
  RUN_UNTIL(in_state('R'));
}

/* The next frame of this type from the client. */
static raw_frame expect_frame(uint8_t type) {
  raw_frame f;
  bool got = false;
  RUN_UNTIL((got = raw_next(&peer, &f)) && f.type == type);
  return f;
}

static void finish_scripted(void) {
  raw_close(&peer);
  close(listener);
  client->base.close(&client->base);
  event_base_free(base);
}

#define ANSWER ":status: 200\ncontent-type: application/grpc\n"

Test(grpc_client, request_on_the_wire) {
  scripted();
  raw_frame f = expect_frame(RAW_SETTINGS);
  cr_expect_arr_eq(f.payload, "\0\2\0\0\0\0\0\4\0\200\0\0", 12); /* no push, windows of 8 MiB */
  ready();
  cr_assert_eq(call(1, "Echo", "abc"), KVRELAY_TRANSPORT_OK);
  f = expect_frame(RAW_HEADERS);
  static const char wanted[] =
      ":method: POST\n:scheme: http\n:path: " TOY "Echo\n:authority: 127.0.0.1:";
  cr_expect_eq(strncmp(f.headers, wanted, sizeof wanted - 1), 0, "%s", f.headers);
  cr_expect(strstr(f.headers, "\nte: trailers\ncontent-type: application/grpc\n") != NULL);
  cr_expect_not(f.flags & NGHTTP2_FLAG_END_STREAM);
  f = expect_frame(RAW_DATA);
  cr_expect_eq(f.len, 8);
  cr_expect_arr_eq(f.payload, "\0\0\0\0\3abc", 8);
  cr_expect(f.flags & NGHTTP2_FLAG_END_STREAM);
  /* The answer, one byte per frame. */
  static const uint8_t wire[] = "\0\0\0\0\3abc\0\0\0\0\0\0\0\0\0\2de";
  raw_send_headers(&peer, 0, 1, ANSWER);
  for (size_t i = 0; i < sizeof wire - 1; i++)
    raw_send_frame(&peer, RAW_DATA, 0, 1, wire + i, 1);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 1, "grpc-status: 0\n");
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].messages, 3);
  cr_expect_eq(caller.call[1].bytes, 5);
  finish_scripted();
}

Test(grpc_client, C12_answers_without_a_grpc_status) {
  static const struct {
    const char *headers;
    int grpc;
  } cases[] = {{":status: 400\n", KVRELAY_GRPC_INTERNAL},
               {":status: 401\n", KVRELAY_GRPC_UNAUTHENTICATED},
               {":status: 403\n", KVRELAY_GRPC_PERMISSION_DENIED},
               {":status: 404\n", KVRELAY_GRPC_UNIMPLEMENTED},
               {":status: 429\n", KVRELAY_GRPC_UNAVAILABLE},
               {":status: 431\n", KVRELAY_GRPC_INTERNAL},
               {":status: 502\n", KVRELAY_GRPC_UNAVAILABLE},
               {":status: 503\n", KVRELAY_GRPC_UNAVAILABLE},
               {":status: 504\n", KVRELAY_GRPC_UNAVAILABLE},
               {":status: 500\n", KVRELAY_GRPC_UNKNOWN},
               {":status: 200\n", KVRELAY_GRPC_UNKNOWN},
               {ANSWER, KVRELAY_GRPC_UNKNOWN},
               {ANSWER "grpc-status: abc\n", KVRELAY_GRPC_UNKNOWN},
               {ANSWER "grpc-status: 99\n", KVRELAY_GRPC_UNKNOWN},
               {ANSWER "grpc-status: 14\nkv-relay-error-reason: RELAY_ERROR_REASON_NEWER\n",
                KVRELAY_GRPC_UNAVAILABLE}};
  scripted();
  ready();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (uint32_t late = 0; late < 2; late++) {
      uint32_t number = 2 * i + late + 1;
      cr_assert_eq(call(number, "Echo", ""), KVRELAY_TRANSPORT_OK);
      expect_frame(RAW_HEADERS);
      raw_send_headers(&peer, late ? 0 : NGHTTP2_FLAG_END_STREAM, 2 * number - 1, cases[i].headers);
      if (late)
        raw_send_frame(&peer, RAW_DATA, NGHTTP2_FLAG_END_STREAM, 2 * number - 1, NULL, 0);
      RUN_UNTIL(caller.call[number].ends == 1);
      cr_expect_eq(caller.call[number].status.grpc, cases[i].grpc, "%s late %u: %d",
                   cases[i].headers, late, caller.call[number].status.grpc);
      cr_expect_eq(caller.call[number].status.reason, KVRELAY_REASON_NONE);
    }
  finish_scripted();
}

Test(grpc_client, C13_resets) {
  static const struct {
    uint8_t code;
    int grpc;
  } cases[] = {{7, KVRELAY_GRPC_UNAVAILABLE},
               {8, KVRELAY_GRPC_CANCELLED},
               {11, KVRELAY_GRPC_RESOURCE_EXHAUSTED},
               {12, KVRELAY_GRPC_PERMISSION_DENIED},
               {0, KVRELAY_GRPC_INTERNAL},
               {2, KVRELAY_GRPC_INTERNAL}};
  scripted();
  ready();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const uint8_t code[4] = {0, 0, 0, cases[i].code};
    cr_assert_eq(call(i + 1, "Echo", ""), KVRELAY_TRANSPORT_OK);
    expect_frame(RAW_DATA);
    if (i % 2 == 0)
      raw_send_headers(&peer, 0, 2 * i + 1, ANSWER);
    raw_send_frame(&peer, RAW_RST_STREAM, 0, 2 * i + 1, code, 4);
    RUN_UNTIL(caller.call[i + 1].ends == 1);
    cr_expect_eq(caller.call[i + 1].status.grpc, cases[i].grpc, "code %d", cases[i].code);
  }
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

Test(grpc_client, trailers_that_cut_a_message) {
  scripted();
  ready();
  cr_assert_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  raw_send_headers(&peer, 0, 1, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, 1, "\0\0\0\0\3ab", 7);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 1, "grpc-status: 0\n");
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].messages, 0);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_INTERNAL);
  /* A compressed message, although nothing was offered. */
  cr_assert_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  raw_send_headers(&peer, 0, 3, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, 3, "\1\0\0\0\1a", 6);
  RUN_UNTIL(caller.call[2].ends == 1);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_INTERNAL);
  cr_expect_eq(expect_frame(RAW_RST_STREAM).stream, 3);
  finish_scripted();
}

Test(grpc_client, C10_goaway) {
  scripted();
  ready();
  cr_assert_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  expect_frame(RAW_DATA);
  raw_send_frame(&peer, RAW_GOAWAY, 0, 0, "\0\0\0\1\0\0\0\0", 8);
  RUN_UNTIL(caller.call[2].ends == 1);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  cr_expect_eq(caller.call[1].ends, 0);
  cr_expect_eq(call(3, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  raw_send_headers(&peer, 0, 1, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, 1, "\0\0\0\0\1a", 6);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 1, "grpc-status: 0\n");
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect_eq(caller.call[1].messages, 1);
  RUN_UNTIL(strstr(caller.states, "CRFC") != NULL); /* and a new one */
  finish_scripted();
}

Test(grpc_client, a_server_that_breaks_off_at_any_point) {
  static const char *const points[] = {"accepted",       "settings", "request read", "headers",
                                       "half a message", "message",  "half a frame"};
  for (size_t at = 0; at < sizeof points / sizeof *points; at++) {
    scripted();
    if (at >= 1) {
      ready();
      cr_assert_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_OK);
      cr_assert_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_OK);
    }
    if (at >= 2)
      expect_frame(RAW_DATA);
    if (at >= 3)
      raw_send_headers(&peer, 0, 1, ANSWER);
    if (at >= 4)
      raw_send_frame(&peer, RAW_DATA, 0, 1, "\0\0\0\0\3ab", 7);
    if (at >= 5)
      raw_send_frame(&peer, RAW_DATA, 0, 1, "c", 1);
    if (at >= 6)
      raw_send(&peer, "\0\0\11\0\0", 5);
    raw_close(&peer);
    RUN_UNTIL(strchr(caller.states, 'F') != NULL);
    for (uint32_t number = 1; at >= 1 && number <= 2; number++) {
      cr_expect_eq(caller.call[number].ends, 1, "%s", points[at]);
      cr_expect_eq(caller.call[number].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
    }
    cr_expect_eq(caller.call[1].messages, at >= 5, "%s", points[at]);
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_CONNECT, "%s: %s", points[at], caller.text);
    cr_expect_geq(caller.retry_ns, caller.failed_at_ns);
    finish_scripted();
  }
}

Test(grpc_client, servers_that_speak_something_else) {
  static const struct {
    const char *bytes;
    size_t len;
    const char *word;
  } cases[] = {{"HTTP/1.1 400 Bad Request\r\n\r\n", 28, "HTTP/1.1"},
               {"\x15\x03\x01\x00\x02\x02\x46", 7, "TLS"},
               {"SSH-2.0-x\r\n", 11, "not HTTP/2"},
               {"\0\0\10\6\0\0\0\0\0abcdefgh", 17, "not HTTP/2"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    scripted();
    raw_send(&peer, cases[i].bytes, cases[i].len);
    RUN_UNTIL(strchr(caller.states, 'F') != NULL);
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_PROTOCOL);
    cr_expect(strstr(caller.text, cases[i].word) != NULL, "%s", caller.text);
    finish_scripted();
  }
}

Test(grpc_client, a_server_that_says_nothing) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.connect_timeout_ns = 50 * MS;
  start_scripted(&cfg);
  RUN_UNTIL(strchr(caller.states, 'F') != NULL);
  cr_expect(strstr(caller.text, "SETTINGS") != NULL, "%s", caller.text);
  finish_scripted();
}

Test(grpc_client, C9_keepalive) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.keepalive_interval_ns = 40 * MS;
  cfg.keepalive_timeout_ns = 250 * MS;
  start_scripted(&cfg);
  ready();
  run_ms(60);
  raw_frame f;
  while (raw_next(&peer, &f))
    cr_expect_neq(f.type, RAW_PING, "no PING without calls");
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  for (int i = 0; i < 3; i++) {
    f = expect_frame(RAW_PING);
    raw_send_frame(&peer, RAW_PING, NGHTTP2_FLAG_ACK, 0, f.payload, 8);
  }
  /* And the server's own are answered at once. */
  raw_send_frame(&peer, RAW_PING, 0, 0, "abcdefgh", 8);
  do
    f = expect_frame(RAW_PING);
  while (!(f.flags & NGHTTP2_FLAG_ACK));
  cr_expect_arr_eq(f.payload, "abcdefgh", 8);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  cr_expect(strstr(caller.text, "PING") != NULL, "%s", caller.text);
  finish_scripted();
}

Test(grpc_client, keepalive_of_both_sides_keeps_a_connection) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  scfg.keepalive_interval_ns = ccfg.keepalive_interval_ns = 20 * MS;
  scfg.keepalive_timeout_ns = ccfg.keepalive_timeout_ns = 150 * MS;
  scfg.peer_ping_interval_ns = MS;
  start_with(&scfg, &ccfg);
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  run_ms(500);
  cr_expect_str_eq(caller.states, "CR");
  cr_expect_eq(caller.call[1].ends, 0);
  finish();
}

Test(grpc_client, C9_too_many_pings_doubles_the_interval) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.keepalive_interval_ns = 60 * MS;
  start_scripted(&cfg);
  ready();
  raw_send_frame(&peer, RAW_GOAWAY, 0, 0, "\0\0\0\0\0\0\0\13too_many_pings", 22);
  RUN_UNTIL(strchr(caller.states, 'F') != NULL);
  raw_close(&peer);
  RUN_UNTIL((peer.fd = accept(listener, NULL, NULL)) >= 0);
  raw_take(&peer, peer.fd);
  uint8_t preface[24];
  RUN_UNTIL(recv(peer.fd, preface, sizeof preface, 0) == 24);
  ready();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  uint64_t begin = client->base.now_ns(&client->base);
  expect_frame(RAW_PING);
  uint64_t took = client->base.now_ns(&client->base) - begin;
  cr_expect(took >= 100 * MS, "%lu", (unsigned long)took);
  finish_scripted();
}

Test(grpc_client, malformed_frames_break_the_connection_only) {
  static const struct {
    const char *name, *bytes;
    size_t len;
  } cases[] = {{"frame longer than allowed", "\xff\xff\xff\0\0\0\0\0\1", 9},
               {"headers that do not decompress", "\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff", 13},
               {"DATA on stream 0", "\0\0\1\0\0\0\0\0\0x", 10},
               {"PUSH_PROMISE", "\0\0\5\5\4\0\0\0\1\0\0\0\2\x82", 14},
               {"window above 2^31 - 1", "\0\0\4\10\0\0\0\0\0\x7f\xff\xff\xff", 13}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    scripted();
    ready();
    cr_assert_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_OK);
    expect_frame(RAW_DATA);
    raw_send(&peer, cases[i].bytes, cases[i].len);
    RUN_UNTIL(strchr(caller.states, 'F') != NULL);
    cr_expect_eq(caller.call[1].ends, 1, "%s", cases[i].name);
    cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_PROTOCOL, "%s: %s", cases[i].name, caller.text);
    finish_scripted();
  }
}

/* ---- targets ---- */

Test(grpc_client, C1_targets) {
  static const struct {
    const char *text;
    int addresses; /* 0: a name; -1: refused */
    const char *authority;
  } cases[] = {{"127.0.0.1:5561", 1, "127.0.0.1:5561"},
               {"[::1]:5561", 1, "[::1]:5561"},
               {"dns:///10.0.0.1:80", 1, "10.0.0.1:80"},
               {"dns:///relay.example:80", 0, "relay.example:80"},
               {"relay.example:80", 0, "relay.example:80"},
               {"ipv4:10.0.0.1:80,10.0.0.2:81", 2, "10.0.0.1:80"},
               {"ipv6:[::1]:80,[::2]:80,[::3]:80", 3, "[::1]:80"},
               {"unix:/run/relay.sock", 1, "localhost"},
               {"unix:///run/relay.sock", 1, "localhost"},
               {"ipv4:relay.example:80", -1, ""},
               {"ipv4:10.0.0.1", -1, ""},
               {"ipv4:10.0.0.1:80,", -1, ""},
               {"relay.example", -1, ""},
               {"http://relay.example:80", -1, ""},
               {":80", -1, ""},
               {"x:99999", -1, ""},
               {"", -1, ""},
               {"unix:", -1, ""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    kvrelay_grpc_target target;
    int result = kvrelay_grpc_target_parse(cases[i].text, &target);
    cr_expect_eq(result == KVRELAY_TRANSPORT_OK, cases[i].addresses >= 0, "%s: %d", cases[i].text,
                 result);
    if (result != KVRELAY_TRANSPORT_OK)
      continue;
    cr_expect_eq(target.address_count, cases[i].addresses, "%s", cases[i].text);
    cr_expect_eq(target.kind == KVRELAY_GRPC_TARGET_NAME, cases[i].addresses == 0);
    cr_expect_str_eq(target.authority, cases[i].authority);
  }
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = "nowhere";
  cr_expect_eq(kvrelay_grpc_client_open(&cfg, &caller.base, &client),
               KVRELAY_TRANSPORT_ERR_ADDRESS);
  cfg.target = "127.0.0.1:1";
  cfg.stream_window_bytes = 10;
  cr_expect_eq(kvrelay_grpc_client_open(&cfg, &caller.base, &client), KVRELAY_TRANSPORT_ERR_ARG);
}

static void connect_by(const char *bind, const char *format) {
  char target[128];
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  scfg.bind = bind;
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(&scfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  snprintf(target, sizeof target, format, kvrelay_grpc_server_port(server));
  kvrelay_grpc_client_config cfg = client_config(target);
  open_client(&cfg);
  RUN_UNTIL(in_state('R'));
  cr_expect_str_eq(caller.states, "CR");
  call_and_end(1, "Echo", "x");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  finish();
}

Test(grpc_client, C2_a_name_is_resolved) { connect_by("127.0.0.1:0", "localhost:%u"); }

Test(grpc_client, C2_the_next_address_when_one_refuses) {
  connect_by("127.0.0.1:0", "ipv4:127.0.0.1:1,127.0.0.1:%u");
}

Test(grpc_client, ipv6) { connect_by("[::1]:0", "[::1]:%u"); }

Test(grpc_client, unix_socket) {
  char address[64];
  snprintf(address, sizeof address, "unix:/tmp/kvrelay-test-%d.sock", (int)getpid());
  connect_by(address, address); /* without a conversion: the port has no place in it */
  cr_expect_neq(access(address + 5, F_OK), 0, "the socket is removed");
}

Test(grpc_client, C2_a_name_that_does_not_resolve) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config("nowhere.invalid:80");
  open_client(&cfg);
  RUN_UNTIL(in_state('F'));
  cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_ADDRESS);
  server = NULL;
  finish();
}
