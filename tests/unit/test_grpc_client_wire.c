/* SPDX-License-Identifier: Apache-2.0 */
/* The gRPC client against servers made by hand that break off, go away or speak something else. */
#include "test_grpc_client.h"

Test(grpc_client_wire, request_on_the_wire) {
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

Test(grpc_client_wire, C12_answers_without_a_grpc_status) {
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

Test(grpc_client_wire, C13_resets) {
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

Test(grpc_client_wire, trailers_that_cut_a_message) {
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

Test(grpc_client_wire, C10_goaway) {
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

Test(grpc_client_wire, a_server_that_breaks_off_at_any_point) {
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

Test(grpc_client_wire, servers_that_speak_something_else) {
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

Test(grpc_client_wire, a_server_that_says_nothing) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.connect_timeout_ns = 50 * MS;
  start_scripted(&cfg);
  RUN_UNTIL(strchr(caller.states, 'F') != NULL);
  cr_expect(strstr(caller.text, "SETTINGS") != NULL, "%s", caller.text);
  finish_scripted();
}

Test(grpc_client_wire, C9_keepalive) {
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

Test(grpc_client_wire, keepalive_of_both_sides_keeps_a_connection) {
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

Test(grpc_client_wire, C9_too_many_pings_doubles_the_interval) {
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

Test(grpc_client_wire, malformed_frames_break_the_connection_only) {
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
