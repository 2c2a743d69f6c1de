/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of any shape: several request messages, back-pressure, metadata, time limits. */
#include "test_grpc_client.h"
#include "transports/grpc/grpc_message.h"

/* What the events of a call said, as text. */
static char said[4096];
static int rooms;

static void on_metadata(kvrelay_caller *self, uint32_t number, bool trailing,
                        const kvrelay_grpc_metadata *list, uint64_t now_ns) {
  size_t cursor = 0;
  kvrelay_iov name, value;
  (void)self;
  (void)now_ns;
  while (kvrelay_grpc_metadata_next(list, &cursor, &name, &value)) {
    size_t n = strlen(said);
    snprintf(said + n, sizeof said - n, "%u %s %d/%d %.*s=%.*s\n", number, trailing ? "T" : "I",
             caller.call[number].admitted, caller.call[number].ends, (int)name.len,
             (const char *)name.base, (int)value.len, (const char *)value.base);
  }
}

static void on_room(kvrelay_caller *self, uint32_t number, uint64_t now_ns) {
  (void)self;
  (void)number;
  (void)now_ns;
  rooms++;
}

static const kvrelay_grpc_call_events events = {on_metadata, on_room};

static int start_call(uint32_t number, const char *path, const kvrelay_grpc_metadata *metadata,
                      uint64_t timeout_ns) {
  const kvrelay_grpc_call_options options = {path, metadata, &events, timeout_ns};
  memset(&caller.call[number], 0, sizeof caller.call[number]);
  return kvrelay_grpc_client_start(client, number, &options);
}

static void open_call(uint32_t number, const char *path) {
  cr_assert_eq(start_call(number, path, NULL, KVRELAY_TIME_NONE), KVRELAY_TRANSPORT_OK);
}

static int send_text(uint32_t number, const char *text) {
  return kvrelay_grpc_client_send(client, number, (const uint8_t *)text, strlen(text));
}

Test(grpc_client_stream, a_conversation_in_step) {
  start();
  open_call(1, TOY "Chat");
  for (int i = 0; i < 100; i++) {
    char text[16];
    snprintf(text, sizeof text, "question %d", i);
    cr_assert_eq(send_text(1, text), KVRELAY_TRANSPORT_OK);
    RUN_UNTIL(caller.call[1].messages == i + 1);
    cr_expect_eq(caller.call[1].last_len, strlen(text));
  }
  cr_expect_eq(caller.call[1].ends, 0);
  cr_expect_eq(kvrelay_grpc_client_half_close(client, 1), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_grpc_client_half_close(client, 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(send_text(1, "too late"), KVRELAY_TRANSPORT_ERR_ARG);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect_eq(caller.call[1].messages, 100);
  cr_expect_eq(send_text(1, "gone"), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(kvrelay_grpc_client_half_close(client, 1), KVRELAY_TRANSPORT_ERR_ARG);
  finish();
}

Test(grpc_client_stream, an_empty_stream) {
  start();
  open_call(1, TOY "Chat");
  cr_expect_eq(kvrelay_grpc_client_half_close(client, 1), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect_eq(caller.call[1].messages, 0);
  /* Half-closed only after the headers went out alone. */
  open_call(2, TOY "Chat");
  RUN_UNTIL(toy.open_now == 1);
  cr_expect_eq(kvrelay_grpc_client_half_close(client, 2), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[2].ends == 1);
  finish();
}

Test(grpc_client_stream, callers_errors) {
  kvrelay_grpc_call_options options = {.path = NULL, .timeout_ns = KVRELAY_TIME_NONE};
  start();
  open_call(1, TOY "Chat");
  cr_expect_eq(start_call(1, TOY "Chat", NULL, KVRELAY_TIME_NONE), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(start_call(0, TOY "Chat", NULL, KVRELAY_TIME_NONE), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(kvrelay_grpc_client_start(client, 2, &options), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(send_text(2, "x"), KVRELAY_TRANSPORT_ERR_ARG);
  uint8_t *large = calloc(1, 8388609);
  cr_expect_eq(kvrelay_grpc_client_send(client, 1, large, 8388609), KVRELAY_TRANSPORT_ERR_ARG);
  free(large);
  client->cancel(client, 1);
  cr_expect_eq(send_text(1, "x"), KVRELAY_TRANSPORT_ERR_ARG);
  RUN_UNTIL(toy.open_now == 0);
  client->reconnect(client);
  cr_expect_eq(start_call(3, TOY "Chat", NULL, KVRELAY_TIME_NONE), KVRELAY_TRANSPORT_ERR_CONNECT);
  finish();
}

/* ---- back-pressure ---- */

static void window_update(uint32_t stream, uint32_t bytes) {
  const uint8_t payload[4] = {(uint8_t)(bytes >> 24), (uint8_t)(bytes >> 16), (uint8_t)(bytes >> 8),
                              (uint8_t)bytes};
  raw_send_frame(&peer, RAW_WINDOW_UPDATE, 0, stream, payload, 4);
}

Test(grpc_client_stream, a_server_that_does_not_read_bounds_what_waits) {
  static uint8_t message[10000];
  int sent = 0;
  scripted();
  raw_send_frame(&peer, RAW_SETTINGS, 0, 0, "\0\4\0\0\0\0", 6); /* windows of 0 bytes */
  RUN_UNTIL(in_state('R'));
  open_call(1, "/x/Y");
  while (kvrelay_grpc_client_send(client, 1, message, sizeof message) == KVRELAY_TRANSPORT_OK)
    cr_assert_lt(++sent, 10);
  cr_expect_eq(sent, 6, "64 KiB hold %d", sent);
  run_ms(20);
  cr_expect_eq(rooms, 0);
  cr_expect_eq(kvrelay_grpc_client_send(client, 1, message, sizeof message),
               KVRELAY_TRANSPORT_ERR_LIMIT);
  /* Room comes once, when all of it is gone. */
  window_update(1, 60029);
  run_ms(20);
  cr_expect_eq(rooms, 0);
  window_update(1, 1);
  RUN_UNTIL(rooms == 1);
  cr_expect_eq(kvrelay_grpc_client_send(client, 1, message, sizeof message), KVRELAY_TRANSPORT_OK);
  window_update(1, 100000);
  window_update(0, 100000);
  run_ms(20);
  cr_expect_eq(rooms, 1, "nobody was refused since");
  kvrelay_grpc_client_half_close(client, 1);
  size_t bytes = 0;
  raw_frame f;
  do {
    f = expect_frame(RAW_DATA);
    bytes += f.len;
  } while (!(f.flags & NGHTTP2_FLAG_END_STREAM));
  cr_expect_eq(bytes, 7 * (sizeof message + 5));
  finish_scripted();
}

Test(grpc_client_stream, one_large_message_may_always_go) {
  uint8_t *large = calloc(1, 5000000);
  start();
  open_call(1, TOY "Chat");
  cr_expect_eq(kvrelay_grpc_client_send(client, 1, large, 60000), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].messages == 1);
  /* Above what the server takes: it answers before the end of the message. */
  cr_expect_eq(kvrelay_grpc_client_send(client, 1, large, 5000000), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  free(large);
  finish();
}

/* ---- metadata ---- */

Test(grpc_client_stream, S9_metadata_of_a_request) {
  kvrelay_grpc_metadata list = {0};
  cr_assert_eq(kvrelay_grpc_metadata_add(&list, "x-token", "a secret", 8), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_grpc_metadata_add(&list, "x-raw-bin", "\253\253\253\0", 4),
               KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_grpc_metadata_add(&list, "x-token", "", 0), KVRELAY_TRANSPORT_OK);
  scripted();
  ready();
  cr_assert_eq(start_call(1, "/x/Y", &list, KVRELAY_TIME_NONE), KVRELAY_TRANSPORT_OK);
  kvrelay_grpc_metadata_free(&list); /* it was copied */
  const raw_frame f = expect_frame(RAW_HEADERS);
  cr_expect(strstr(f.headers, "\nx-token: a secret\nx-raw-bin: q6urAA\nx-token: \n") != NULL, "%s",
            f.headers);
  cr_expect(strstr(f.headers, "grpc-timeout") == NULL);
  finish_scripted();
}

#define ANSWER_WITH(MORE) ":status: 200\ncontent-type: application/grpc\n" MORE

Test(grpc_client_stream, S9_metadata_of_an_answer) {
  scripted();
  ready();
  open_call(1, "/x/Y");
  open_call(2, "/x/Y");
  expect_frame(RAW_HEADERS);
  expect_frame(RAW_HEADERS);
  raw_send_headers(&peer, 0, 1, ":status: 103\nx-early: hint\n");
  raw_send_headers(&peer, 0, 1,
                   ANSWER_WITH("x-a: 1\nx-b-bin: Zm9v,YmFy\ngrpc-encoding: identity\n"));
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 1, "grpc-status: 0\nx-c: 2\nx-a: \n");
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 3, ANSWER_WITH("grpc-status: 5\nx-d: 3\n"));
  RUN_UNTIL(caller.call[1].ends == 1 && caller.call[2].ends == 1);
  cr_expect_str_eq(said, "1 I 0/0 x-a=1\n1 I 0/0 x-b-bin=foo\n1 I 0/0 x-b-bin=bar\n"
                         "1 T 1/0 x-c=2\n1 T 1/0 x-a=\n2 T 0/0 x-d=3\n");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_NOT_FOUND);
  /* Nobody asked for it: ignored, whatever it is. */
  cr_assert_eq(call(3, "Echo", ""), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 5, ANSWER_WITH("grpc-status: 0\nx-bin: !\n"));
  RUN_UNTIL(caller.call[3].ends == 1);
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_OK);
  finish_scripted();
}

Test(grpc_client_stream, C11_a_pushback_is_part_of_the_end) {
  static const struct {
    const char *line;
    uint64_t retry_ns;
  } cases[] = {{"", 0},
               {"grpc-retry-pushback-ms: 1500\n", 1500 * MS},
               {"grpc-retry-pushback-ms: 0\n", 1},
               {"grpc-retry-pushback-ms: 999999999\n", 999999999 * MS},
               {"grpc-retry-pushback-ms: 9999999999\n", KVRELAY_TIME_NONE},
               {"grpc-retry-pushback-ms: -1\n", KVRELAY_TIME_NONE},
               {"grpc-retry-pushback-ms: soon\n", KVRELAY_TIME_NONE},
               {"grpc-retry-pushback-ms: \n", KVRELAY_TIME_NONE}};
  scripted();
  ready();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char lines[256];
    snprintf(lines, sizeof lines, ANSWER_WITH("grpc-status: 14\n%s"), cases[i].line);
    open_call(i + 1, "/x/Y");
    expect_frame(RAW_HEADERS);
    raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 2 * i + 1, lines);
    RUN_UNTIL(caller.call[i + 1].ends == 1);
    cr_expect_eq(caller.call[i + 1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
    cr_expect_eq(caller.call[i + 1].status.retry_ns, cases[i].retry_ns, "%s", cases[i].line);
  }
  cr_expect_str_eq(said, "");
  finish_scripted();
}

Test(grpc_client_stream, S9_metadata_that_is_broken_or_too_long_ends_its_call) {
  static char many[4000] = ANSWER_WITH("");
  for (int i = 0; i < 6; i++) /* 66 values */
    snprintf(many + strlen(many), sizeof many - strlen(many), "x-%d-bin: ,,,,,,,,,,\n", i);
  scripted();
  ready();
  for (uint32_t i = 1; i <= 4; i++)
    open_call(i, "/x/Y");
  for (uint32_t i = 1; i <= 4; i++)
    expect_frame(RAW_HEADERS);
  raw_send_headers(&peer, 0, 1, ANSWER_WITH("x-bin: Zm9v!\n"));
  raw_send_headers(&peer, 0, 3, many);
  raw_send_headers(&peer, 0, 5, ANSWER_WITH(""));
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 5, "grpc-status: 0\nx-bin: A\n");
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 7, ANSWER_WITH("grpc-status: 0\n"));
  RUN_UNTIL(caller.call[4].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_INTERNAL);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_INTERNAL);
  cr_expect_eq(caller.call[4].status.grpc, KVRELAY_GRPC_OK);
  for (uint32_t i = 1; i <= 4; i++)
    cr_expect_eq(caller.call[i].ends, 1, "%u", i);
  cr_expect_str_eq(said, "");
  cr_expect_eq(expect_frame(RAW_RST_STREAM).stream, 1);
  cr_expect_eq(expect_frame(RAW_RST_STREAM).stream, 3);
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

/* ---- time limits ---- */

Test(grpc_client_stream, C6_a_time_limit_is_told_and_kept) {
  scripted();
  ready();
  cr_assert_eq(start_call(1, "/x/Y", NULL, 50 * MS), KVRELAY_TRANSPORT_OK);
  const uint64_t begin = client->base.now_ns(&client->base);
  const raw_frame f = expect_frame(RAW_HEADERS);
  cr_expect(strstr(f.headers, "\ngrpc-timeout: 50000000n\n") != NULL, "%s", f.headers);
  RUN_UNTIL(caller.call[1].ends == 1);
  const uint64_t took = client->base.now_ns(&client->base) - begin;
  cr_expect(took >= 50 * MS && took < 1000 * MS, "%lu", (unsigned long)took);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_DEADLINE_EXCEEDED);
  const raw_frame reset = expect_frame(RAW_RST_STREAM);
  cr_expect_arr_eq(reset.payload, "\0\0\0\10", 4);
  /* An answer that comes too late is nobody's. */
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, 1, ANSWER_WITH("grpc-status: 0\n"));
  run_ms(10);
  cr_expect_eq(caller.call[1].ends, 1);
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

Test(grpc_client_stream, C6_many_limits_end_in_their_order) {
  uint64_t earliest[21], latest[21], ended[21] = {0}; /* earliest, latest: the limit lies between */
  scripted(); /* says nothing: time limits of a server would hide ours */
  ready();
  for (uint32_t i = 1; i <= 20; i++) {
    const uint64_t timeout = (uint64_t)(i * 7 % 20 + 1) * 10 * MS;
    earliest[i] = client->base.now_ns(&client->base) + timeout;
    cr_assert_eq(start_call(i, "/x/Y", NULL, timeout), KVRELAY_TRANSPORT_OK);
    latest[i] = client->base.now_ns(&client->base) + timeout;
  }
  client->cancel(client, 20); /* the first of all */
  for (int left = 19; left > 0;) {
    client->base.run_once(&client->base, 5 * MS);
    const uint64_t now = client->base.now_ns(&client->base);
    for (uint32_t i = 1; i <= 20; i++)
      if (caller.call[i].ends == 1 && ended[i] == 0) {
        ended[i] = now;
        left--;
      }
  }
  for (uint32_t i = 1; i < 20; i++)
    for (uint32_t j = 1; j < 20; j++)
      if (latest[i] < earliest[j])
        cr_expect_leq(ended[i], ended[j]);
  cr_expect_eq(caller.call[20].ends, 0);
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

Test(grpc_client_stream, C6_an_end_before_the_limit_is_the_end) {
  start();
  cr_assert_eq(start_call(1, TOY "Chat", NULL, 40 * MS), KVRELAY_TRANSPORT_OK);
  kvrelay_grpc_client_half_close(client, 1);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  run_ms(60);
  cr_expect_eq(caller.call[1].ends, 1);
  /* Of a lost connection, too. */
  cr_assert_eq(start_call(2, TOY "Chat", NULL, 40 * MS), KVRELAY_TRANSPORT_OK);
  client->reconnect(client);
  RUN_UNTIL(caller.call[2].ends == 1);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  run_ms(60);
  cr_expect_eq(caller.call[2].ends, 1);
  finish();
}

Test(grpc_client_stream, C6_limits_as_text) {
  static const struct {
    uint64_t ns;
    const char *text;
  } cases[] = {{0, "1n"},
               {1, "1n"},
               {99999998, "99999998n"},
               {99999999, "100000u"},
               {5000000000, "5000000u"},
               {UINT64_C(99999998001), "99999999u"},
               {UINT64_C(100000000000), "100000m"},
               {UINT64_C(90000000000000), "90000000m"},
               {UINT64_C(900000000000000), "900000S"},
               {UINT64_MAX - 1, "5124096H"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char text[KVRELAY_GRPC_TIMEOUT_CAP];
    uint64_t back;
    const size_t n = kvrelay_grpc_timeout_put(cases[i].ns, text);
    cr_expect_eq(n, strlen(cases[i].text), "%s", text);
    cr_expect_eq(memcmp(text, cases[i].text, n), 0, "%s", text);
    cr_assert(kvrelay_grpc_timeout_parse((const uint8_t *)text, n, &back), "%s", text);
    cr_expect_geq(back, cases[i].ns);
  }
}
