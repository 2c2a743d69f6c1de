/* SPDX-License-Identifier: Apache-2.0 */
/* The raw transport, both sides: client and server of ours against each other, and each against
 * bytes made by hand (grpc.md, sections 8 to 11). */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/raw_pair.h"
#include "transports/address.h"
#include "transports/tcp/tcp_client.h"
#include "transports/tcp/tcp_server.h"

#define MS UINT64_C(1000000)

/* ---- a caller that notes everything ---- */

typedef struct noted {
  int admitted, messages, ends;
  size_t bytes, last_len;
  bool wrong; /* a message out of order or with wrong content */
  kvrelay_status status;
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

static raw_toy toy;
static kvrelay_transport *server;
static kvrelay_client_transport *client;
static char target[128];
static char logged[2048];

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
  /* Of Count: byte j of message i is i + j. */
  n->wrong |= n->admitted != 1 || n->ends != 0;
  for (size_t j = 0; j < len && len > 64; j++)
    n->wrong |= bytes[j] != (uint8_t)((size_t)n->messages + j);
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

static void on_log(void *context, int level, const char *event, const char *text) {
  (void)context;
  size_t n = strlen(logged);
  snprintf(logged + n, sizeof logged - n, "%d %s %s\n", level, event, text);
}

/* ---- both sides ---- */

static kvrelay_tcp_server_config server_config(void) {
  kvrelay_tcp_server_config cfg = kvrelay_tcp_server_config_default();
  cfg.bind = "127.0.0.1:0";
  cfg.log = on_log;
  return cfg;
}

static kvrelay_tcp_client_config client_config(void) {
  kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
  cfg.target = target;
  cfg.backoff_first_ns = 30 * MS;
  cfg.backoff_max_ns = 100 * MS;
  return cfg;
}

static void turn(void) {
  if (server != NULL)
    cr_assert_geq(server->run_once(server, client == NULL ? 2 * MS : 0), 0);
  if (client != NULL)
    (void)client->base.run_once(&client->base, server == NULL ? 2 * MS : MS / 2);
}

static void run_ms(uint64_t ms) {
  const uint64_t until = kvrelay_now_ns() + ms * MS;
  while (kvrelay_now_ns() < until)
    turn();
}

/* Runs until the condition holds, at most 5 s. */
#define RUN_UNTIL(CONDITION)                                                                       \
  do {                                                                                             \
    const uint64_t until_ = kvrelay_now_ns() + 30000 * MS;                                         \
    bool met_;                                                                                     \
    while (!(met_ = (CONDITION)) && kvrelay_now_ns() < until_)                                     \
      turn();                                                                                      \
    cr_assert(met_, "states %s, text %s, log %s", caller.states, caller.text, logged);             \
  } while (0)

static bool in_state(char state) {
  size_t n = strlen(caller.states);
  return n > 0 && caller.states[n - 1] == state;
}

static void start_server(const kvrelay_tcp_server_config *cfg) {
  raw_toy_init(&toy);
  cr_assert_eq(kvrelay_tcp_server_open(cfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  kvrelay_tcp_server_address(server, target, sizeof target);
}

static void start_client(const kvrelay_tcp_client_config *cfg) {
  caller.base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  cr_assert_eq(kvrelay_tcp_client_open(cfg, &caller.base, &client), KVRELAY_TRANSPORT_OK);
}

static void start(void) {
  const kvrelay_tcp_server_config scfg = server_config();
  const kvrelay_tcp_client_config ccfg = client_config();
  start_server(&scfg);
  start_client(&ccfg);
  RUN_UNTIL(in_state('R'));
}

static void finish(void) {
  if (client != NULL)
    client->base.close(&client->base);
  client = NULL;
  if (server == NULL)
    return;
  for (int i = 0; i < 20; i++)
    server->run_once(server, MS);
  cr_expect_eq(toy.toy.opened, toy.toy.closed);
  cr_expect_eq(toy.toy.broken, 0);
  server->close(server);
  server = NULL;
  toy_service_free(&toy.toy);
}

static int call(uint32_t number, const char *method, const char *request) {
  memset(&caller.call[number], 0, sizeof caller.call[number]);
  return client->call(client, number, raw_toy_path(method), (const uint8_t *)request,
                      strlen(request));
}

static void call_and_end(uint32_t number, const char *method, const char *request) {
  cr_assert_eq(call(number, method, request), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[number].ends > 0);
  cr_expect_eq(caller.call[number].ends, 1);
  cr_expect(!caller.call[number].wrong);
}

Test(tcp, B10_2_unary) {
  start();
  call_and_end(1, "Echo", "hello");
  cr_expect_eq(caller.call[1].messages, 1);
  cr_expect_eq(caller.call[1].admitted, 1);
  cr_expect_eq(caller.call[1].bytes, 5);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  call_and_end(2, "Echo", "");
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].bytes, 0);
  cr_expect_str_eq(caller.states, "CR");
  cr_expect_eq(client->call(client, 3, NULL, NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(client->call(client, 0, raw_toy_path("Echo"), NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(call(4, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(client->call(client, 4, raw_toy_path("Echo"), NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  finish();
}

Test(tcp, B11_12_streams_of_all_sizes) {
  static const struct {
    const char *request;
    int messages;
    size_t bytes;
  } cases[] = {{"0 10", 0, 0},
               {"1 0", 1, 0},
               {"1000 64", 1000, 64},
               {"100000 100", 100000, 100},
               {"300 16384", 300, 16384},
               {"300 16383", 300, 16383},
               {"20 2097359", 20, 2097359},
               {"4 8388608", 4, 8388608}};
  start();
  for (uint32_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    call_and_end(i + 1, "Count", cases[i].request);
    cr_expect_eq(caller.call[i + 1].messages, cases[i].messages, "%s", cases[i].request);
    cr_expect_eq(caller.call[i + 1].bytes, cases[i].bytes * (size_t)cases[i].messages);
    cr_expect_eq(caller.call[i + 1].status.grpc, KVRELAY_GRPC_OK);
  }
  finish();
}

Test(tcp, streams_take_turns) {
  start();
  for (uint32_t i = 1; i <= 8; i++)
    cr_assert_eq(call(i, "Count", i % 2 ? "20000 100" : "40 300000"), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].ends && caller.call[2].ends);
  for (uint32_t i = 1; i <= 8; i++) {
    RUN_UNTIL(caller.call[i].ends == 1);
    cr_expect(!caller.call[i].wrong);
    cr_expect_eq(caller.call[i].messages, i % 2 ? 20000 : 40);
  }
  finish();
}

Test(tcp, statuses_and_refusals) {
  start();
  call_and_end(1, "Refuse", "9 5 producer changed");
  cr_expect_eq(caller.call[1].status.grpc, 9);
  cr_expect_eq(caller.call[1].status.reason, 5);
  cr_expect_str_eq(caller.call[1].status.text, "producer changed");
  cr_expect_eq(caller.call[1].admitted, 0);
  call_and_end(2, "End", "8 3 \xE2\x98\xBA");
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].status.grpc, 8);
  cr_expect_str_eq(caller.call[2].status.text, "\xE2\x98\xBA");
  /* The number of the method that is to come later: the service does not know it. */
  cr_assert_eq(client->call(client, 3, kvrelay_method_path(6), NULL, 0), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(client->call(client, 4, "/a/path/of/others", NULL, 0), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[3].ends == 1);
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  RUN_UNTIL(caller.call[4].ends == 1);
  cr_expect_eq(caller.call[4].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  finish();
}

Test(tcp, silent_calls_are_admitted_and_woken) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  cr_expect_eq(caller.call[1].messages, 0);
  toy_service_release(&toy.toy);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].bytes, 8);
  finish();
}

Test(tcp, B10_3_cancel_frees_at_once_and_tells_nothing_more) {
  start();
  cr_assert_eq(call(1, "Count", "1000000 1000"), KVRELAY_TRANSPORT_OK);
  caller.cancel_at_message = 1;
  RUN_UNTIL(toy.toy.opened == 1 && toy.toy.open_now == 0);
  run_ms(20);
  cr_expect_eq(caller.call[1].messages, 1);
  cr_expect_eq(caller.call[1].ends, 0);
  caller.cancel_at_message = 0;
  call_and_end(1, "Echo", "again"); /* its number is free */
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  client->cancel(client, 2);
  client->cancel(client, 77);
  RUN_UNTIL(toy.toy.opened == 3 && toy.toy.open_now == 0);
  cr_expect_str_eq(caller.states, "CR");
  finish();
}

/* Section 10.4: a message while the credit is above 0, whatever its size. */
Test(tcp, B10_4_credit_bounds_a_stream_and_a_message_larger_than_it_goes_through) {
  const kvrelay_tcp_server_config scfg = server_config();
  kvrelay_tcp_client_config ccfg = client_config();
  ccfg.stream_window_bytes = 1000;
  start_server(&scfg);
  start_client(&ccfg);
  RUN_UNTIL(in_state('R'));
  call_and_end(1, "Count", "50 300000");
  cr_expect_eq(caller.call[1].messages, 50);
  call_and_end(2, "Count", "5000 10");
  cr_expect_eq(caller.call[2].messages, 5000);
  finish();
}

/* Section 10.7. */
Test(tcp, B10_7_more_streams_than_allowed) {
  kvrelay_tcp_server_config scfg = server_config();
  const kvrelay_tcp_client_config ccfg = client_config();
  scfg.max_streams = 2;
  start_server(&scfg);
  start_client(&ccfg);
  RUN_UNTIL(in_state('R'));
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(call(3, "Silent", ""), KVRELAY_TRANSPORT_ERR_LIMIT);
  RUN_UNTIL(caller.call[1].admitted && caller.call[2].admitted);
  toy_service_release(&toy.toy);
  RUN_UNTIL(caller.call[1].ends && caller.call[2].ends);
  call_and_end(3, "Echo", "x");
  finish();
}

Test(tcp, B11_2_message_above_the_client_s_limit) {
  const kvrelay_tcp_server_config scfg = server_config();
  kvrelay_tcp_client_config ccfg = client_config();
  ccfg.max_message_bytes = 65536;
  start_server(&scfg);
  start_client(&ccfg);
  RUN_UNTIL(in_state('R'));
  call_and_end(1, "Count", "3 65536");
  cr_expect_eq(caller.call[1].messages, 3);
  call_and_end(2, "Count", "3 65537");
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_expect_eq(caller.call[2].status.reason, KVRELAY_REASON_RESOURCE_LIMIT);
  cr_expect(strstr(caller.call[2].status.text, "65537") &&
            strstr(caller.call[2].status.text, "65536"));
  cr_expect_str_eq(caller.states, "CR");
  finish();
}

Test(tcp, B11_9_server_stops_in_order) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  server->stop(server, 2000 * MS);
  run_ms(20);
  cr_expect_eq(call(2, "Echo", "x"), KVRELAY_TRANSPORT_ERR_CONNECT);
  cr_expect_eq(caller.call[1].ends, 0);
  toy_service_shutdown(&toy.toy);
  const uint64_t until = kvrelay_now_ns() + 3000 * MS;
  int turned = 0;
  while (turned != KVRELAY_TRANSPORT_CLOSED && kvrelay_now_ns() < until) {
    turned = server->run_once(server, 0);
    client->base.run_once(&client->base, MS);
  }
  cr_expect_eq(turned, KVRELAY_TRANSPORT_CLOSED);
  cr_expect_eq(caller.call[1].ends, 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect(strncmp(caller.states, "CRF", 3) == 0, "%s", caller.states);
  finish();
}

Test(tcp, client_stops_and_reconnects) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  client->reconnect(client);
  RUN_UNTIL(strcmp(caller.states, "CRFCR") == 0);
  cr_expect_eq(caller.call[1].ends, 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  RUN_UNTIL(toy.toy.open_now == 0);
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  client->base.stop(&client->base, 50 * MS);
  cr_expect_eq(call(3, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  RUN_UNTIL(in_state('X'));
  cr_expect_eq(caller.call[2].ends, 1);
  cr_expect_eq(client->base.run_once(&client->base, 0), KVRELAY_TRANSPORT_CLOSED);
  finish();
}

Test(tcp, nobody_there) {
  kvrelay_tcp_client_config ccfg = client_config();
  snprintf(target, sizeof target, "127.0.0.1:1");
  start_client(&ccfg);
  RUN_UNTIL(strncmp(caller.states, "CFCF", 4) == 0);
  cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_CONNECT);
  cr_expect_str_eq(caller.text, "Connection refused");
  cr_expect_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  finish();
}

/* ---- a client by hand ---- */

static int by_hand = -1;
static uint8_t got[1 << 20];
static size_t got_len;
static bool got_end;

static const char hello[] = "4b565246010100000000800000008000"; /* 8 MiB frames and credit */

static void hand_connect(void) {
  kvrelay_address to;
  cr_assert_eq(kvrelay_address_parse(target, &to), KVRELAY_TRANSPORT_OK);
  by_hand = socket(to.storage.ss_family, SOCK_STREAM, 0);
  cr_assert_eq(connect(by_hand, (struct sockaddr *)&to.storage, to.len), 0);
  cr_assert_eq(fcntl(by_hand, F_SETFL, O_NONBLOCK), 0);
  got_len = 0;
  got_end = false;
}

static size_t from_hex(const char *hex, uint8_t *out) {
  size_t n = 0;
  for (unsigned byte; hex[0] && hex[1]; hex += 2) {
    cr_assert_eq(sscanf(hex, "%2x", &byte), 1);
    out[n++] = (uint8_t)byte;
  }
  return n;
}

static void hand_send(const char *hex) {
  uint8_t bytes[1024];
  const size_t n = from_hex(hex, bytes);
  cr_assert_eq(send(by_hand, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
}

static void hand_read(void) {
  for (ssize_t n; (n = recv(by_hand, got + got_len, sizeof got - got_len, 0)) >= 0;) {
    got_len += (size_t)n;
    if (n == 0) {
      got_end = true;
      return;
    }
  }
}

static bool got_is(const char *hex) {
  uint8_t bytes[1024];
  const size_t n = from_hex(hex, bytes);
  hand_read();
  return got_len == n && memcmp(got, bytes, n) == 0;
}

#define EXPECT_GOT(HEX)                                                                            \
  do {                                                                                             \
    RUN_UNTIL(got_is(HEX));                                                                        \
    got_len = 0;                                                                                   \
  } while (0)

/* Reads until the server closes; true when the last thing it sent was this GOAWAY. */
static bool goaway_then_end(uint8_t code) {
  RUN_UNTIL((hand_read(), got_end));
  for (size_t at = 16; at + 12 <= got_len;) {
    const uint32_t len = got[at] | (uint32_t)got[at + 1] << 8 | (uint32_t)got[at + 2] << 16;
    if (got[at + 8] == 9)
      return got[at + 10] == code && at + 12 + len == got_len;
    at += 12 + len;
  }
  return false;
}

static void start_by_hand(void) {
  const kvrelay_tcp_server_config cfg = server_config();
  start_server(&cfg);
  hand_connect();
}

#define SERVER_HELLO "4b565246010100040000010000000000"
/* Section 13.1, with the toy's Echo. */
Test(tcp_wire, B13_1_frames_of_a_unary_call) {
  start_by_hand();
  hand_send(hello);
  EXPECT_GOT(SERVER_HELLO);
  hand_send("060000000100000001000100616263646566");
  EXPECT_GOT("000000000100000002000000"
             "060000000100000003000000616263646566"
             "0200000001000000040000000000");
  hand_send("0000000002000000010008000000000003000000010000000000000005000000010063000000"
            "0006000000");
  close(by_hand);
  run_ms(10);
  finish();
}

Test(tcp_wire, B9_every_split_of_the_input) {
  static const char whole[] = "4b565246010100000000800000008000"
                              "060000000100000001000100616263646566"
                              "080000000000000007000000"
                              "0102030405060708"
                              "040000000100000006000000ffff0000"
                              "0300000002000000c8ff0000aabbcc"
                              "060000000300000001000100616263646566";
  uint8_t bytes[256];
  const size_t len = from_hex(whole, bytes);
  start_by_hand();
  for (size_t cut = 1; cut < len; cut++) {
    cr_assert_eq(send(by_hand, bytes, cut, 0), (ssize_t)cut);
    run_ms(1);
    cr_assert_eq(send(by_hand, bytes + cut, len - cut, 0), (ssize_t)(len - cut));
    /* The PONG goes where it likes: count bytes. */
    RUN_UNTIL((hand_read(), got_len == 16 + 20 + 2 * (12 + 18 + 14)));
    close(by_hand);
    hand_connect();
  }
  close(by_hand);
  finish();
}

Test(tcp_wire, B8_preface_errors) {
  static const struct {
    const char *bytes, *answer, *log;
  } cases[] = {
      {"504f5354202f2068747470", "", "an HTTP/1.1 request"},
      {"505249202a20485454502f322e30", "", "HTTP/2 (gRPC)"},
      {"16030100c8", "", "TLS hello"},
      {"00", "", "not the raw transport"},
      {"4b565246050200000000800000008000", "4b565246000100040000010000000000", "no version"},
      {"4b56524601010000ff00000000008000", NULL, "out of range"},
      {"4b565246010100000000800000000000", NULL, "out of range"},
      {"4b565246010100000000800000000080", NULL, "out of range"},
  };
  start_by_hand();
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    logged[0] = 0;
    hand_send(cases[i].bytes);
    if (cases[i].answer == NULL) {
      cr_expect(goaway_then_end(KVRELAY_GOAWAY_PROTOCOL_ERROR), "%s", cases[i].bytes);
    } else {
      RUN_UNTIL(got_is(cases[i].answer));
      const uint64_t until = kvrelay_now_ns() + 2000 * MS;
      while (!got_end && kvrelay_now_ns() < until) {
        turn();
        uint8_t byte;
        got_end = recv(by_hand, &byte, 1, 0) == 0 || errno == ECONNRESET;
      }
      cr_expect(got_end, "%s", cases[i].bytes);
    }
    close(by_hand);
    RUN_UNTIL(kvrelay_tcp_server_connections(server) == 0);
    cr_expect(strstr(logged, cases[i].log), "%s: %s", cases[i].bytes, logged);
    hand_connect();
  }
  /* Versions above ours, but down to ours: the answer is ours. */
  hand_send("4b565246090100000000800000008000");
  EXPECT_GOT(SERVER_HELLO);
  close(by_hand);
  finish();
}

Test(tcp_wire, B9_B11_7_protocol_errors_are_goaway_2) {
  static const char *const cases[] = {
      "000000000100000000000000",                 /* type 0 */
      "00000000010000000a000000",                 /* type 10 */
      "000000000100000005010000",                 /* flags */
      "000000000100000005000100",                 /* aux */
      "000000000100000005000000",                 /* CANCEL of a stream that was never opened */
      "04000000010000000600000001000000",         /* CREDIT likewise */
      "000000000100000002000000",                 /* RESPONSE from a client */
      "0000000000000000010001000000",             /* REQUEST on stream 0 */
      "0800000001000000070000000102030405060708", /* PING on a stream */
      "0000000001000000010005000400000001000000060000000000000000", /* CREDIT of 0 */
      "00000000010000000100050004000000010000000600000000000080",   /* too much of it */
      "0000000005000000010005000000000004000000010005000000",       /* a smaller number */
      "000000000500000001000500000000000500000001000500",           /* the same number */
      "0100000001000000050000", /* wrong length, known before the header ends */
  };
  start_by_hand();
  for (size_t i = 0; i + 1 < sizeof cases / sizeof cases[0]; i++) {
    hand_send(hello);
    hand_send(cases[i]);
    cr_expect(goaway_then_end(KVRELAY_GOAWAY_PROTOCOL_ERROR), "%s", cases[i]);
    close(by_hand);
    RUN_UNTIL(kvrelay_tcp_server_connections(server) == 0);
    hand_connect();
  }
  /* Above max_frame: known from the header. */
  hand_send(hello);
  hand_send("010001000100000001000100");
  cr_expect(goaway_then_end(KVRELAY_GOAWAY_LIMIT));
  close(by_hand);
  finish();
}

Test(tcp_wire, B11_6_pings_are_answered_and_too_many_are_not) {
  start_by_hand();
  hand_send(hello);
  EXPECT_GOT(SERVER_HELLO);
  hand_send("0800000000000000070000000102030405060708");
  EXPECT_GOT("0800000000000000080000000102030405060708");
  hand_send("0800000000000000070000000102030405060708");
  EXPECT_GOT("0800000000000000080000000102030405060708");
  hand_send("0800000000000000070000000102030405060708");
  RUN_UNTIL((hand_read(), got_end));
  cr_expect(got_len >= 12 && got[8] == 9 && got[10] == KVRELAY_GOAWAY_TOO_MANY_PINGS);
  close(by_hand);
  finish();
}

/* A PONG goes ahead of queued messages, but never into one. */
Test(tcp_wire, B11_5_pong_overtakes_what_waits) {
  start_by_hand();
  hand_send(hello);
  hand_send("0d000000010000000100020031303030303030302031303030");
  run_ms(50);
  hand_send("0800000000000000070000000102030405060708");
  run_ms(50);
  size_t at = 16, frames = 0, pong_at = 0;
  for (int i = 0; i < 3000 && pong_at == 0; i++) {
    turn();
    hand_read();
    while (at + 12 <= got_len) {
      const uint32_t len = got[at] | (uint32_t)got[at + 1] << 8;
      cr_assert(got[at + 8] == 2 || got[at + 8] == 3 || got[at + 8] == 8, "type %u", got[at + 8]);
      cr_assert_eq(len, got[at + 8] == 2 ? 0 : got[at + 8] == 8 ? 8 : 1000);
      if (got[at + 8] == 8)
        pong_at = frames;
      frames++;
      at += 12 + len;
    }
    const size_t done = at < got_len ? at : got_len;
    memmove(got, got + done, got_len - done);
    got_len -= done;
    at -= done;
  }
  cr_expect_gt(pong_at, 0);
  cr_expect_gt(frames, 10);
  close(by_hand);
  finish();
}

/* Any credit, and nobody reads: what is not sent is bounded, and nothing more is produced. */
Test(tcp_wire, B11_4_unsent_output_is_bounded) {
  start_by_hand();
  const int small = 4096;
  cr_assert_eq(setsockopt(by_hand, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
  hand_send("4b5652460101000000008000ffffff7f");
  for (unsigned stream = 1; stream < 9; stream++) { /* Count "1000 100000" */
    char request[64];
    snprintf(request, sizeof request, "0b000000%02x000000010002003130303020313030303030", stream);
    hand_send(request);
  }
  run_ms(200);
  const long before = toy.toy.pulled;
  cr_expect(before > 10 && before < 80, "%ld messages of 100 kB, 8 000 are wanted", before);
  run_ms(50);
  cr_expect_eq(toy.toy.pulled, before);
  close(by_hand);
  finish();
}

/* A client that takes little at a time asks Count for that, which is 9 characters: more than
 * sockets hold. */
static void hand_ask_for_much(const char *what, int window) {
  static const char request[] = "090000000100000001000200";
  cr_assert_eq(setsockopt(by_hand, SOL_SOCKET, SO_RCVBUF, &window, sizeof window), 0);
  hand_send(hello);
  hand_send(request);
  cr_assert_eq(send(by_hand, what, 9, MSG_NOSIGNAL), 9);
}

/* Reads up to so many bytes of it; how many there were. */
static size_t hand_take(size_t cap) {
  const ssize_t n = recv(by_hand, got, cap, 0);
  got_end |= n == 0;
  return n > 0 ? (size_t)n : 0;
}

/* Behind a mebibyte nothing is read, not even a PONG: that it takes bytes shows that it lives. */
Test(tcp_wire, B11_5_a_slow_taker_lives_and_one_that_takes_nothing_does_not) {
  kvrelay_tcp_server_config cfg = server_config();
  size_t all = 0;
  cfg.bind = "unix-abstract:kvrelay-slow-taker"; /* its buffers are small */
  cfg.keepalive_interval_ns = cfg.keepalive_timeout_ns = 100 * MS;
  start_server(&cfg);
  hand_connect();
  hand_ask_for_much("1 8000000", 65536);
  for (uint64_t until = kvrelay_now_ns() + 400 * MS; kvrelay_now_ns() < until; run_ms(4))
    all += hand_take(32768);
  cr_expect_eq(kvrelay_tcp_server_connections(server), 1, "after %zu bytes: %s", all, logged);
  RUN_UNTIL(kvrelay_tcp_server_connections(server) == 0);
  cr_expect(strstr(logged, "no answer to a keepalive PING") != NULL, "%s", logged);
  close(by_hand);
  finish();
}

/* A call that is over has its last bytes on the way: they have the grace time. */
Test(tcp_wire, B11_9_what_waits_goes_out_within_the_grace_time) {
  kvrelay_tcp_server_config cfg = server_config();
  size_t all = 0;
  cfg.bind = "unix-abstract:kvrelay-last-bytes"; /* its buffers are small */
  start_server(&cfg);
  hand_connect();
  hand_ask_for_much("3000 1000", 65536);
  RUN_UNTIL((all += hand_take(4096), toy.toy.closed == 1));
  server->stop(server, 4000 * MS);
  for (uint64_t until = kvrelay_now_ns() + 1100 * MS; kvrelay_now_ns() < until;)
    (void)server->run_once(server, 20 * MS);
  for (uint64_t until = kvrelay_now_ns() + 5000 * MS; !got_end && kvrelay_now_ns() < until;) {
    (void)server->run_once(server, MS);
    all += hand_take(65536);
  }
  cr_expect_eq(all, 16 + 12 + 3000 * 1012 + 14 + 24, "preface, RESPONSE, MESSAGEs, END, GOAWAY");
  close(by_hand);
  finish();
}

Test(tcp_wire, B10_4_credit_used_up_exactly_is_none) {
  start_by_hand();
  hand_send("4b565246010100000000800090000000"); /* 144 bytes of credit: two messages */
  EXPECT_GOT(SERVER_HELLO);
  hand_send("060000000100000001000200313030203630"); /* Count "100 60" */
  RUN_UNTIL((hand_read(), got_len >= 12 + 2 * 72));
  run_ms(10);
  hand_read();
  cr_expect_eq(got_len, 12 + 2 * 72);
  close(by_hand);
  finish();
}

/* Section 10.6: lack of credit on one stream delays no other. */
Test(tcp_wire, B10_6_a_slow_reader_stalls_only_its_stream) {
  start_by_hand();
  hand_send("4b565246010100000000800064000000"); /* 100 bytes of credit */
  EXPECT_GOT(SERVER_HELLO);
  hand_send("060000000100000001000200313030203630"); /* Count "100 60" */
  RUN_UNTIL((hand_read(), got_len == 12 + 2 * 72));  /* 100, 28, -44 */
  got_len = 0;
  hand_send("020000000200000001000100"
            "6869"); /* Echo */
  EXPECT_GOT("0000000002000000020000000200000002000000030000006869"
             "0200000002000000040000000000");
  hand_send("0400000001000000060000002c000000"); /* to 0: not above */
  run_ms(10);
  hand_read();
  cr_expect_eq(got_len, 0);
  hand_send("04000000010000000600000001000000");
  RUN_UNTIL((hand_read(), got_len == 72));
  got_len = 0;
  hand_send("000000000100000005000000"); /* CANCEL needs no credit */
  RUN_UNTIL((hand_read(), got_len >= 14));
  cr_expect(got[8] == 4 && got[10] == KVRELAY_GRPC_CANCELLED);
  close(by_hand);
  finish();
}

Test(tcp_wire, B11_5_B11_11_keepalive_idle_and_preface_timeouts) {
  kvrelay_tcp_server_config cfg = server_config();
  cfg.preface_timeout_ns = 30 * MS;
  cfg.keepalive_interval_ns = 30 * MS;
  cfg.keepalive_timeout_ns = 30 * MS;
  start_server(&cfg);
  hand_connect();
  RUN_UNTIL((hand_read(), got_end)); /* no preface */
  cr_expect_eq(got_len, 0);
  close(by_hand);
  hand_connect();
  hand_send(hello);
  RUN_UNTIL((hand_read(), got_len == 16 + 20)); /* a PING */
  cr_expect_eq(got[16 + 8], 7);
  got_len = 0;
  hand_send("080000000000000008000000"
            "6b7672656c617900");
  RUN_UNTIL((hand_read(), got_len == 20)); /* the next */
  RUN_UNTIL((hand_read(), got_end));       /* unanswered */
  close(by_hand);
  finish();
  cfg = server_config();
  cfg.idle_timeout_ns = 30 * MS;
  start_server(&cfg);
  hand_connect();
  hand_send(hello);
  hand_send("000000000100000001000500"); /* Silent: not idle */
  run_ms(80);
  hand_read();
  cr_expect_eq(got_len, 16 + 12);
  toy_service_release(&toy.toy);
  cr_expect(goaway_then_end(KVRELAY_GOAWAY_SHUTDOWN));
  close(by_hand);
  finish();
}

Test(tcp_wire, B11_9_requests_after_goaway_are_refused) {
  start_by_hand();
  hand_send(hello);
  hand_send("000000000100000001000500"); /* Silent */
  RUN_UNTIL((hand_read(), got_len == 16 + 12));
  got_len = 0;
  server->stop(server, 2000 * MS);
  EXPECT_GOT("0c000000000000000900010001000000"
             "73687574646f776e");
  hand_send("000000000200000001000100");
  RUN_UNTIL((hand_read(), got_len >= 14));
  cr_expect(got[8] == 4 && got[4] == 2 && got[10] == KVRELAY_GRPC_UNAVAILABLE &&
            got[12] == KVRELAY_REASON_PUBLICATION_UNAVAILABLE);
  got_len = 0;
  toy_service_shutdown(&toy.toy);
  const uint64_t until = kvrelay_now_ns() + 3000 * MS;
  int turned = 0;
  while (turned != KVRELAY_TRANSPORT_CLOSED && kvrelay_now_ns() < until) {
    turned = server->run_once(server, 2 * MS);
    hand_read();
    if (got_end) {
      close(by_hand);
      by_hand = dup(0);
    }
  }
  cr_expect_eq(turned, KVRELAY_TRANSPORT_CLOSED);
  cr_expect_eq(got_len, 14); /* END, status 0 */
  close(by_hand);
  finish();
}

Test(tcp_wire, S115_limits_of_connections) {
  kvrelay_tcp_server_config cfg = server_config();
  cfg.max_connections_per_peer = 3;
  start_server(&cfg);
  int fds[4];
  for (int i = 0; i < 4; i++) {
    hand_connect();
    fds[i] = by_hand;
    run_ms(5);
  }
  RUN_UNTIL((hand_read(), got_end));
  cr_expect_eq(kvrelay_tcp_server_connections(server), 3);
  cr_expect(strstr(logged, "too many connections of this peer"));
  for (int i = 0; i < 4; i++)
    close(fds[i]);
  RUN_UNTIL(kvrelay_tcp_server_connections(server) == 0);
  finish();
}

/* ---- a server by hand ---- */

static int listener = -1;

static void hand_listen(void) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof at;
  listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  cr_assert_eq(bind(listener, (struct sockaddr *)&at, sizeof at), 0);
  cr_assert_eq(listen(listener, 8), 0);
  cr_assert_eq(getsockname(listener, (struct sockaddr *)&at, &len), 0);
  snprintf(target, sizeof target, "127.0.0.1:%u", ntohs(at.sin_port));
}

static void hand_accept(void) {
  RUN_UNTIL((by_hand = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0);
  got_len = 0;
  got_end = false;
}

static void start_against_hand(void) {
  const kvrelay_tcp_client_config cfg = client_config();
  hand_listen();
  start_client(&cfg);
  hand_accept();
  RUN_UNTIL(got_is(hello));
  got_len = 0;
}

static void greet_and_call(void) {
  hand_send(SERVER_HELLO);
  RUN_UNTIL(in_state('R'));
  cr_assert_eq(call(1, "Silent", "ab"), KVRELAY_TRANSPORT_OK);
  EXPECT_GOT("0200000001000000010005006162");
}

Test(tcp_wire, B11_8_B11_10_client_ends_calls_when_the_connection_does) {
  start_against_hand();
  greet_and_call();
  hand_send("000000000100000002000000"
            "040000000100000003000000ab"); /* cut inside a message */
  close(by_hand);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].messages, 0);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  cr_expect_eq(caller.call[1].status.reason, KVRELAY_REASON_NONE);
  cr_expect_str_eq(caller.text, "cut off by the peer");
  close(listener);
  finish();
}

Test(tcp_wire, client_refuses_what_a_server_may_not_send) {
  static const char *const cases[] = {
      "000000000200000002000000",                             /* a stream that is not open */
      "010000000100000003000000aa",                           /* MESSAGE before RESPONSE */
      "000000000100000002000000000000000100000002000000",     /* RESPONSE twice */
      "000000000100000001000100",                             /* REQUEST from a server */
      "0200000001000000040011000000",                         /* status 17 */
      "0200000001000000040000000000000000000100000002000000", /* after END */
  };
  start_against_hand();
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    greet_and_call();
    hand_send(cases[i]);
    RUN_UNTIL((hand_read(), got_end));
    cr_expect(got_len >= 12 && got[8] == 9 && got[10] == KVRELAY_GOAWAY_PROTOCOL_ERROR, "%s",
              cases[i]);
    close(by_hand);
    RUN_UNTIL(caller.call[1].ends == 1);
    hand_accept();
    RUN_UNTIL(got_is(hello));
    got_len = 0;
  }
  close(by_hand);
  close(listener);
  finish();
}

Test(tcp_wire, client_tells_what_answered_instead) {
  static const struct {
    const char *bytes, *text;
  } cases[] = {
      {"485454502f312e3120343030", "not the raw transport"},
      {"15030100020228", "the server wants TLS"},
      {"4b565246000200040000010000000000", "the server speaks other versions of the raw transport"},
      {"4b565246010100040000000000000000", "a preface with values out of range"}};
  start_against_hand();
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    caller.text[0] = 0;
    hand_send(cases[i].bytes);
    RUN_UNTIL((hand_read(), got_end));
    close(by_hand);
    RUN_UNTIL(caller.text[0] != 0);
    cr_expect_str_eq(caller.text, cases[i].text);
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_PROTOCOL);
    hand_accept();
    RUN_UNTIL(got_is(hello));
    got_len = 0;
  }
  close(by_hand);
  close(listener);
  finish();
}

Test(tcp_wire, client_and_goaway) {
  start_against_hand();
  greet_and_call();
  hand_send("0c000000000000000900010001000000"
            "73687574646f776e");
  run_ms(5);
  cr_expect_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  cr_expect_eq(caller.call[1].ends, 0);
  hand_send("000000000100000002000000"
            "0200000001000000040000000000");
  RUN_UNTIL(caller.call[1].ends == 1 && strstr(caller.states, "F"));
  cr_expect_str_eq(caller.text, "the server goes away");
  close(by_hand);
  hand_accept();
  RUN_UNTIL(got_is(hello));
  got_len = 0;
  greet_and_call();
  hand_send("0a000000000000000900030001000000"
            "63616c6d2121");
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_str_eq(caller.text, "the server says: calm!!");
  close(by_hand);
  close(listener);
  finish();
}
