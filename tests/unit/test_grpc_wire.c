/* SPDX-License-Identifier: Apache-2.0 */
/* The gRPC server against frames made by hand: what real peers do, and what they should not.
 * Numbers in names are those of the specification. */
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test_grpc_server.h"
#include "transports/tcp/tcp_server.h"

/* ---- answers ---- */

Test(grpc_wire, S20_unary) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Echo", "", "hello", 5);
  expect_answer(&raw, 1, "hello", 5);
  finish();
}

Test(grpc_wire, S21_refusal_is_one_header_block) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Refuse", "", "5 4 no \xE2\x98\xBA", 10);
  raw_frame f = only_trailers("grpc-status: 5\n");
  cr_expect(has(&f, "grpc-message: no %E2%98%BA\n"), "%s", f.headers);
  cr_expect(has(&f, "kv-relay-error-reason: RELAY_ERROR_REASON_POOL_NOT_FOUND\n"), "%s", f.headers);
  finish();
}

Test(grpc_wire, S21_no_reason_no_trailer) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Refuse", "", "13 0 ", 5);
  raw_frame f = only_trailers("grpc-status: 13\n");
  cr_expect_not(has(&f, "kv-relay-error-reason"));
  cr_expect_not(has(&f, "grpc-message"));
  finish();
}

Test(grpc_wire, reason_after_messages_travels_in_the_trailers) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "End", "", "8 7 lagged", 10);
  cr_expect_not(frame_of(RAW_HEADERS).flags & NGHTTP2_FLAG_END_STREAM);
  cr_expect_eq(frame_of(RAW_DATA).len, 6);
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect_str_eq(f.headers, "grpc-status: 8\ngrpc-message: lagged\nkv-relay-error-reason: "
                              "RELAY_ERROR_REASON_SUBSCRIBER_LAGGED\n");
  finish();
}

Test(grpc_wire, S22_statuses_in_decimal) {
  start_greeted();
  for (uint32_t code = 1; code <= 16; code++) {
    char request[16], line[32];
    int n = snprintf(request, sizeof request, "%u 0 ", code);
    snprintf(line, sizeof line, "grpc-status: %u\n", code);
    raw_send_request(&raw, 2 * code - 1, TOY "Refuse", "", request, (size_t)n);
    only_trailers(line);
  }
  finish();
}

Test(grpc_wire, S26_whatever_fails_ends_with_a_status) {
  static const struct {
    const char *method, *headers, *body;
    size_t len;
    bool ends; /* with the request's last byte */
    const char *answer;
  } cases[] = {
      {"Nope", "", "\0\0\0\0\0", 5, true, "grpc-status: 12\n"},
      {"Echo", "", "\0\0\1\0\1", 5, false, "grpc-status: 8\n"},
      {"Echo", "", "\1\0\0\0\0", 5, false, "grpc-status: 13\n"},
      {"Echo", "", "\0\0\0\0\2a", 6, true, "grpc-status: 13\n"},
      {"Echo", "", "", 0, true, "grpc-status: 13\n"},
      {"Echo", "grpc-timeout: x\n", "\0\0\0\0\0", 5, false, "grpc-status: 13\n"},
      {"Echo", "grpc-timeout: 20m\n", "\0\0\0\0\2a", 6, false, "grpc-status: 4\n"},
      {"Echo", "grpc-encoding: snappy\n", "\0\0\0\0\0", 5, false, "grpc-status: 12\n"},
      {"Refuse", "",
       "\0\0\0\0\4"
       "9 5 ",
       9, true, "grpc-status: 9\n"},
      {"End", "",
       "\0\0\0\0\4"
       "8 7 ",
       9, true, "grpc-status: 8\n"},
      {"Silent", "grpc-timeout: 20m\n", "\0\0\0\0\0", 5, true, "grpc-status: 4\n"},
      {"Count", "",
       "\0\0\0\0\11"
       "1 9000000",
       14, true, "grpc-status: 8\n"},
  };
  start_greeted();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char lines[256];
    raw_frame f;
    bool told = false;
    snprintf(lines, sizeof lines,
             ":method: POST\n:scheme: http\n:path: " TOY
             "%s\n:authority: x\ncontent-type: application/grpc\n%s",
             cases[i].method, cases[i].headers);
    raw_send_headers(&raw, 0, 2 * i + 1, lines);
    raw_send_frame(&raw, RAW_DATA, cases[i].ends ? NGHTTP2_FLAG_END_STREAM : 0, 2 * i + 1,
                   cases[i].body, cases[i].len);
    while (next_frame(&raw, &f, told ? 10 : 2000)) {
      cr_expect_neq(f.type, RAW_GOAWAY);
      if (f.type == RAW_RST_STREAM)
        cr_expect(told && memcmp(f.payload, "\0\0\0\0", 4) == 0, "case %u is reset", i);
      told |=
          f.type == RAW_HEADERS && (f.flags & NGHTTP2_FLAG_END_STREAM) && has(&f, cases[i].answer);
    }
    cr_expect(told, "case %u ends without %s", i, cases[i].answer);
  }
  finish();
}

Test(grpc_wire, S29_headers_say_what_is_needed_and_no_more) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Echo", "", "x", 1);
  cr_expect_str_eq(frame_of(RAW_HEADERS).headers, ":status: 200\ncontent-type: application/grpc\n");
  frame_of(RAW_DATA);
  cr_expect_str_eq(frame_of(RAW_HEADERS).headers, "grpc-status: 0\n");
  raw_send_request(&raw, 3, TOY "Refuse", "", "13 0 ", 5);
  cr_expect_str_eq(frame_of(RAW_HEADERS).headers,
                   ":status: 200\ncontent-type: application/grpc\ngrpc-status: 13\n");
  raw_send_request(&raw, 5, "/unknown.Service/Method", "", "", 0);
  const raw_frame f = frame_of(RAW_HEADERS);
  cr_expect(!has(&f, "date:") && !has(&f, "content-length:"), "%s", f.headers);
  finish();
}

Test(grpc_wire, S1_te_is_not_demanded_and_paths_are_exact) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Echo", "te: trailers\nuser-agent: x\n", "with", 4);
  expect_answer(&raw, 1, "with", 4);
  raw_send_request(&raw, 3, TOY "Echo", "", "without", 7);
  expect_answer(&raw, 3, "without", 7);
  raw_send_request(&raw, 5, TOY "ECHO", "", "", 0);
  only_trailers("grpc-status: 12\n");
  finish();
}

Test(grpc_wire, S3_unknown_paths) {
  static const char *const paths[] = {
      "/", "/x", TOY "echo", TOY "Echo?x=1", "/other.Service/Echo", TOY "Echo/"};
  start_greeted();
  for (uint32_t i = 0; i < sizeof paths / sizeof *paths; i++) {
    char lines[256];
    snprintf(
        lines, sizeof lines,
        ":method: POST\n:scheme: http\n:path: %s\n:authority: x\ncontent-type: application/grpc\n",
        paths[i]);
    raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 2 * i + 1, lines);
    only_trailers("grpc-status: 12\n");
  }
  cr_expect_eq(toy.opened, 0);
  finish();
}

Test(grpc_wire, S25_headers_before_the_first_message) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect(has(&f, ":status: 200\n"));
  cr_expect_not(next_frame(&raw, &f, 30), "silence");
  toy_service_release(&toy);
  cr_expect_eq(frame_of(RAW_DATA).len, 5 + 8);
  cr_expect_str_eq(frame_of(RAW_HEADERS).headers, "grpc-status: 0\n");
  finish();
}

Test(grpc_wire, S24_reset_follows_early_trailers) {
  start_greeted();
  raw_send_headers(&raw, 0, 1, HEAD);
  raw_send_frame(&raw, RAW_DATA, 0, 1, "\1\0\0\0\0", 5);
  only_trailers("grpc-status: 13\n");
  raw_frame f = frame_of(RAW_RST_STREAM);
  cr_expect_arr_eq(f.payload, "\0\0\0\0", 4);
  finish();
}

/* ---- requests ---- */

Test(grpc_wire, S5_request_split_at_every_byte) {
  static const uint8_t wire[] = "\0\0\0\0\13hello world";
  const size_t len = sizeof wire - 1;
  start_greeted();
  uint32_t stream = 1;
  for (size_t cut = 0; cut <= len; cut++, stream += 2) {
    raw_send_headers(&raw, 0, stream, HEAD);
    raw_send_frame(&raw, RAW_DATA, 0, stream, wire, cut);
    settle();
    raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, stream, wire + cut, len - cut);
    expect_answer(&raw, stream, "hello world", 11);
  }
  /* One byte per frame, each padded, with an empty frame behind it, END_STREAM late and alone. */
  raw_send_headers(&raw, 0, stream, HEAD);
  for (size_t i = 0; i < len; i++) {
    const uint8_t padded[] = {3, wire[i], 0, 0, 0};
    raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_PADDED, stream, padded, sizeof padded);
    raw_send_frame(&raw, RAW_DATA, 0, stream, NULL, 0);
  }
  settle();
  raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, stream, NULL, 0);
  expect_answer(&raw, stream, "hello world", 11);
  finish();
}

Test(grpc_wire, S5_bytes_of_a_connection_one_by_one) {
  /* A whole exchange, recorded from our own encoder, then sent in single bytes. */
  int pair[2];
  uint8_t bytes[1024];
  raw_http2 recorder;
  start_greeted();
  raw_close(&raw);
  cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  raw_take(&recorder, pair[0]);
  raw_greet(&recorder);
  raw_send_request(&recorder, 1, TOY "Echo", "", "slowly", 6);
  ssize_t n = read(pair[1], bytes, sizeof bytes);
  cr_assert_gt(n, 60);
  raw_open(&raw, kvrelay_grpc_server_port(server));
  for (ssize_t i = 0; i < n; i++) {
    raw_send(&raw, bytes + i, 1);
    server->run_once(server, MS);
  }
  expect_answer(&raw, 1, "slowly", 6);
  raw_close(&recorder);
  close(pair[1]);
  finish();
}

Test(grpc_wire, S12_a_message_alone_is_no_request_yet) {
  raw_frame f;
  start_greeted();
  raw_send_headers(&raw, 0, 1, HEAD);
  raw_send_frame(&raw, RAW_DATA, 0, 1, "\0\0\0\0\2ok", 7);
  cr_expect_not(next_frame(&raw, &f, 20), "its sender may still say more");
  raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 1, "x-trailer: of a request\n");
  expect_answer(&raw, 1, "ok", 2);
  finish();
}

Test(grpc_wire, S6_exactly_one_request_message) {
  start_greeted();
  raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 1, HEAD);
  raw_frame f = only_trailers("grpc-status: 13\n");
  cr_expect_not(has(&f, "kv-relay-error-reason"));
  raw_send_headers(&raw, 0, 3, HEAD);
  raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, 3, "\0\0\0\0\1a\0\0\0\0\1b", 12);
  only_trailers("grpc-status: 13\n");
  finish();
}

Test(grpc_wire, request_that_ends_inside_a_message) {
  static const uint8_t wire[] = "\0\0\0\0\4abcd";
  start_greeted();
  for (uint32_t cut = 1; cut < sizeof wire - 1; cut++) {
    raw_send_headers(&raw, 0, 2 * cut - 1, HEAD);
    raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, 2 * cut - 1, wire, cut);
    only_trailers("grpc-status: 13\n");
  }
  finish();
}

Test(grpc_wire, S8_too_large_from_the_prefix_alone) {
  static const uint8_t limit[] = {0, 0, 1, 0, 1}, huge[] = {0, 0xff, 0xff, 0xff, 0xff};
  start_greeted();
  raw_send_headers(&raw, 0, 1, HEAD);
  raw_send_frame(&raw, RAW_DATA, 0, 1, limit, 5);
  only_trailers("grpc-status: 8\n");
  frame_of(RAW_RST_STREAM);
  raw_send_headers(&raw, 0, 3, HEAD);
  raw_send_frame(&raw, RAW_DATA, 0, 3, huge, 5);
  only_trailers("grpc-status: 8\n");
  frame_of(RAW_RST_STREAM);
  cr_expect_eq(toy.messages, 0);
  finish();
}

/* A whole answer of HTTP/1.1 kind: what it is, and what is wrong in words. */
static void expect_http_error(uint32_t stream, const char *status, const char *words) {
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect_eq(f.stream, stream);
  cr_expect(has(&f, status), "%s", f.headers);
  cr_expect_not(has(&f, "grpc-"), "%s", f.headers);
  f = frame_of(RAW_DATA);
  cr_expect(f.flags & NGHTTP2_FLAG_END_STREAM);
  cr_expect(memmem(f.payload, f.len, words, strlen(words)) != NULL, "%.*s", (int)f.len,
            (const char *)f.payload);
}

#define FORM(METHOD) ":method: " METHOD "\n:scheme: http\n:path: " TOY "Echo\n:authority: x\n"

Test(grpc_wire, S2_requests_of_http) {
  static const struct {
    const char *headers, *status, *words;
  } cases[] = {
      {FORM("POST"), ":status: 415\n", "application/grpc"},
      {FORM("POST") "content-type: application/json\n", ":status: 415\n", "application/grpc"},
      {FORM("POST") "content-type: application/grpc-web\n", ":status: 415\n", "application/grpc"},
      {FORM("GET"), ":status: 405\n", "POST"},
      {FORM("post") "content-type: application/grpc\n", ":status: 405\n", "POST"},
  };
  uint32_t stream = 1;
  start_greeted();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++, stream += 4) {
    raw_frame f;
    raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, stream, cases[i].headers);
    expect_http_error(stream, cases[i].status, cases[i].words);
    /* Its sender may be slow. */
    raw_send_headers(&raw, 0, stream + 2, cases[i].headers);
    cr_expect_not(next_frame(&raw, &f, 10));
    raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, stream + 2, "{}", 2);
    expect_http_error(stream + 2, cases[i].status, cases[i].words);
  }
  raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, stream, FORM("HEAD"));
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect(has(&f, ":status: 405\n") && (f.flags & NGHTTP2_FLAG_END_STREAM), "no body");
  cr_expect_eq(toy.opened, 0);
  finish();
}

Test(grpc_wire, S2_S115_a_request_of_http_that_never_ends) {
  kvrelay_grpc_server_config cfg = config();
  cfg.handshake_timeout_ns = 50 * MS;
  start(&cfg);
  raw_greet(&raw);
  raw_send_headers(&raw, 0, 1, FORM("GET"));
  expect_http_error(1, ":status: 405\n", "POST");
  cr_expect_arr_eq(frame_of(RAW_RST_STREAM).payload, "\0\0\0\0", 4);
  expect_serving();
  finish();
}

Test(grpc_wire, S2_S71_S4_what_headers_may_say) {
  static const struct {
    const char *headers, *answer;
  } cases[] = {
      {FORM("POST") "content-type: application/grpc+json\n", "grpc-status: 12\n"},
      {FORM("POST") "content-type: application/grpc\ngrpc-encoding: snappy\n", "grpc-status: 12\n"},
      {FORM("POST") "content-type: application/grpc\ngrpc-encoding: snappy\n",
       "grpc-accept-encoding: identity"},
      {FORM("POST") "content-type: application/grpc\ngrpc-timeout: 5x\n", "grpc-status: 13\n"},
      {FORM("POST") "content-type: application/grpc\ngrpc-timeout: 123456789S\n",
       "grpc-status: 13\n"},
  };
  start_greeted();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 2 * i + 1, cases[i].headers);
    raw_frame f = frame_of(RAW_HEADERS);
    cr_expect(f.flags & NGHTTP2_FLAG_END_STREAM);
    cr_expect(has(&f, cases[i].answer), "%s answered with %s", cases[i].headers, f.headers);
  }
  cr_expect_eq(toy.opened, 0);
  finish();
}

Test(grpc_wire, S2_S72_what_is_fine) {
  static const char *const more[] = {"grpc-encoding: identity\n", "grpc-timeout: 5S\n",
                                     "x-other: 1\nx-other: 2\nx-bin: AAEC\n",
                                     "grpc-accept-encoding: gzip\n"};
  start_greeted();
  for (uint32_t i = 0; i < sizeof more / sizeof *more; i++) {
    raw_send_request(&raw, 2 * i + 1, TOY "Echo", more[i], "ok", 2);
    expect_answer(&raw, 2 * i + 1, "ok", 2);
  }
  finish();
}

Test(grpc_wire, S10_large_headers) {
  char *lines = malloc(40000);
  start_greeted();
  int n = sprintf(lines, "%sx-long: ", HEAD);
  memset(lines + n, 'a', 15000);
  strcpy(lines + n + 15000, "\n");
  raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 1, lines);
  only_trailers("grpc-status: 13\n"); /* read, and no message in it */
  size_t len;
  memset(lines + n, 'b', 30000);
  strcpy(lines + n + 30000, "\n");
  const uint8_t *block = raw_encode(&raw, lines, &len);
  cr_assert_gt(len, 16384);
  raw_send_frame(&raw, RAW_HEADERS, NGHTTP2_FLAG_END_STREAM, 3, block, 16384);
  raw_send_frame(&raw, RAW_CONTINUATION, NGHTTP2_FLAG_END_HEADERS, 3, block + 16384, len - 16384);
  expect_http_error(3, ":status: 431\n", "16 KiB");
  expect_serving();
  free(lines);
  finish();
}

Test(grpc_wire, S4_a_silent_stream_ends_with_its_deadline) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Silent", "grpc-timeout: 30m\n", "", 0);
  frame_of(RAW_HEADERS);
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect(has(&f, "grpc-status: 4\n"), "%s", f.headers);
  cr_expect_eq(toy.open_now, 0);
  /* And one without an answer yet. */
  raw_send_headers(&raw, 0, 3, HEAD "grpc-timeout: 30m\n");
  only_trailers("grpc-status: 4\n");
  finish();
}

Test(grpc_wire, S4_a_stuck_stream_is_reset_at_its_deadline) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Count", "grpc-timeout: 60m\n", "5 1000000", 9);
  raw_frame f;
  size_t got = 0;
  while (next_frame(&raw, &f, 2000) && f.type != RAW_RST_STREAM)
    got += f.type == RAW_DATA ? f.len : 0;
  cr_expect_eq(f.type, RAW_RST_STREAM);
  cr_expect_arr_eq(f.payload, "\0\0\0\10", 4); /* CANCEL */
  cr_expect_eq(got, 65535);
  cr_expect_eq(toy.open_now, 0);
  finish();
}

/* ---- flow ---- */

Test(grpc_wire, back_pressure_is_not_pulling) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Count", "", "1000 995", 8); /* 1 000 bytes each on the wire */
  settle();
  cr_expect_eq(toy.pulled, 66, "pulled %ld messages into a window of 65 535", toy.pulled);
  /* Another stream of the connection is not stopped by the connection's window. */
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\0\1\0\0", 4);
  raw_frame f;
  size_t got = 0;
  while (got < 65535 && next_frame(&raw, &f, 2000))
    got += f.type == RAW_DATA ? f.len : 0;
  raw_send_request(&raw, 3, TOY "Echo", "", "past the slow one", 17);
  expect_answer(&raw, 3, "past the slow one", 17);
  cr_expect_eq(toy.pulled, 67);
  /* Room for exactly two more messages. */
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\0\7\321", 4); /* 2 001 */
  settle();
  cr_expect_geq(toy.pulled, 69);
  cr_expect_leq(toy.pulled, 70);
  finish();
}

Test(grpc_wire, S46_window_changes_on_open_streams) {
  start_greeted();
  const uint8_t smaller[] = {0, 4, 0, 0, 0, 100}, larger[] = {0, 4, 0, 0, 0x40, 0};
  raw_frame f;
  size_t got = 0;
  raw_send_request(&raw, 1, TOY "Count", "", "100 995", 7);
  settle();
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, smaller, 6); /* the stream's window is negative now */
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\0\20\0\0", 4);
  while (next_frame(&raw, &f, 50))
    got += f.type == RAW_DATA ? f.len : 0;
  cr_expect_eq(got, 65535);
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\1\0\0", 4); /* 65 536 - 65 435 = 101 */
  while (next_frame(&raw, &f, 50))
    got += f.type == RAW_DATA ? f.len : 0;
  cr_expect_eq(got, 65535 + 101);
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, larger, 6);
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\1\0\0", 4);
  while (next_frame(&raw, &f, 50) && !(f.flags & NGHTTP2_FLAG_END_STREAM))
    got += f.type == RAW_DATA ? f.len : 0;
  cr_expect_eq(got, 100000);
  cr_expect_eq(f.type, RAW_HEADERS);
  finish();
}

/* A window for streams, and as much for the connection as HTTP/2 has. */
static void greet_with_windows(uint32_t stream_window) {
  const uint8_t settings[] = {0,
                              4,
                              (uint8_t)(stream_window >> 24),
                              (uint8_t)(stream_window >> 16),
                              (uint8_t)(stream_window >> 8),
                              (uint8_t)stream_window};
  raw_send(&raw, RAW_PREFACE, sizeof RAW_PREFACE - 1);
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, settings, sizeof settings);
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\x7f\xff\0\0", 4);
}

Test(grpc_wire, S43_answers_to_pings_overtake_data) {
  raw_frame f;
  size_t before = 0, all = 0;
  bool answered = false;
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  greet_with_windows(0x7fffffff);
  raw_send_request(&raw, 1, TOY "Count", "", "16 4194304", 10);
  for (int i = 0; i < 20; i++)
    server->run_once(server, MS); /* until the socket takes no more */
  raw_send_frame(&raw, RAW_PING, 0, 0, "whereami", 8);
  server->run_once(server, MS);
  while (next_frame(&raw, &f, 2000) && !(f.type == RAW_HEADERS && all > 0)) {
    all += f.type == RAW_DATA ? f.len : 0;
    answered |= f.type == RAW_PING && memcmp(f.payload, "whereami", 8) == 0;
    before = answered ? before : all;
  }
  cr_expect_eq(all, 16 * (5 + 4194304));
  cr_expect_lt(before, all / 2, "%zu bytes of %zu came before", before, all);
  finish();
}

Test(grpc_wire, S47_a_slow_stream_stalls_only_itself) {
  raw_frame f;
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  greet_with_windows(1000);
  raw_send_request(&raw, 1, TOY "Count", "", "100 5000", 8);
  frame_of(RAW_HEADERS);
  cr_expect_eq(frame_of(RAW_DATA).len, 1000);
  for (uint32_t stream = 3; stream < 20; stream += 2) {
    raw_send_request(&raw, stream, TOY "Echo", "", "quick", 5);
    expect_answer(&raw, stream, "quick", 5);
  }
  cr_expect_not(next_frame(&raw, &f, 20), "the slow one waits");
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\0\1\0", 4);
  f = frame_of(RAW_DATA);
  cr_expect(f.stream == 1 && f.len == 256, "and goes on");
  finish();
}

/* One byte of Count's message `index`, prefixes included. */
static uint8_t counted(size_t at, size_t size, size_t index) {
  const uint8_t prefix[] = {0, (uint8_t)(size >> 24), (uint8_t)(size >> 16), (uint8_t)(size >> 8),
                            (uint8_t)size};
  return at < sizeof prefix ? prefix[at] : (uint8_t)(index + at - sizeof prefix);
}

/* Takes DATA of the one call there is until `want` bytes of messages of `size` are there. */
static void take_counted(size_t *got, size_t want, size_t size) {
  while (*got < want) {
    const raw_frame f = frame_of(RAW_DATA);
    for (size_t i = 0; i < f.len; i++, ++*got)
      cr_assert_eq(f.payload[i], counted(*got % (size + 5), size, *got / (size + 5)), "byte %zu",
                   *got);
  }
}

/* Count frees what it kept when it may. */
Test(grpc_wire, parts_that_stay_with_the_service_are_copied_when_it_wants_them_back) {
  enum { SIZE = 600000 };
  static const size_t windows[] = {1, 5, 6, 1000, 200005, 400000, SIZE + 4, SIZE + 5, SIZE + 6};
  for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
    for (int end = 0; end < 2; end++) {
      size_t got = 0;
      kvrelay_grpc_server_config cfg = config();
      start(&cfg);
      greet_with_windows((uint32_t)windows[i]);
      raw_send_request(&raw, 1, TOY "Count", "", "3 600000", 8);
      frame_of(RAW_HEADERS);
      settle(); /* the window is used up, and the rest waits */
      if (end)
        toy_service_shutdown(&toy);
      else
        toy_service_wake(&toy);
      raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\1\0\0", 4);
      settle();
      toy_service_wake(&toy); /* again */
      raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\100\0\0", 4);
      /* A message that was begun is sent, whatever comes then. */
      take_counted(&got, end ? SIZE + 5 + (windows[i] > SIZE + 5 ? SIZE + 5 : 0) : 3 * (SIZE + 5),
                   SIZE);
      const raw_frame f = frame_of(RAW_HEADERS);
      cr_expect(has(&f, "grpc-status: 0\n"));
      finish();
    }
}

/* What of a message waits for the socket then depends on its size. */
static void reset_in_the_middle(size_t size) {
  size_t got[2] = {0, 0};
  char request[32];
  raw_frame f;
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  greet_with_windows(0x7fffffff);
  raw_send_request(&raw, 1, TOY "Count", "", request, (size_t)sprintf(request, "1000 %zu", size));
  for (int i = 0; i < 200; i++) /* until nothing fits any more */
    server->run_once(server, 0);
  raw_send_frame(&raw, RAW_RST_STREAM, 0, 1, "\0\0\0\10", 4);
  settle();
  cr_expect_eq(toy.closed, 1);
  raw_send_request(&raw, 3, TOY "Count", "", request, (size_t)sprintf(request, "2 %zu", size));
  for (int ended = 0; !ended;) {
    cr_assert(next_frame(&raw, &f, 2000));
    ended = f.stream == 3 && f.type == RAW_HEADERS && (f.flags & NGHTTP2_FLAG_END_STREAM);
    size_t *at = &got[f.stream == 3];
    for (size_t i = 0; f.type == RAW_DATA && i < f.len; i++, ++*at)
      cr_assert_eq(f.payload[i], counted(*at % (size + 5), size, *at / (size + 5)),
                   "byte %zu of %u", *at, f.stream);
  }
  cr_expect_gt(got[0], 300000, "%zu bytes of the first call", got[0]);
  cr_expect_eq(got[1], 2 * (size + 5));
  finish();
}

Test(grpc_wire, parts_that_wait_for_the_socket_survive_the_end_of_their_call) {
  for (size_t size = 1000000; size < 6000000; size += 700000)
    reset_in_the_middle(size);
}

Test(grpc_wire, S117_a_connection_holds_a_mebibyte_and_a_message) {
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  greet_with_windows(10);
  for (uint32_t stream = 1; stream < 200; stream += 2)
    raw_send_request(&raw, stream, TOY "Copied", "", "3 100000", 8);
  settle();
  cr_expect_eq(toy.opened, 100);
  cr_expect(toy.pulled >= 11 && toy.pulled <= 12, "%ld of 100 kB", toy.pulled);
  /* Those that could not be asked are, once there is room. */
  int ends = 0;
  size_t bytes = 0;
  raw_frame f;
  for (uint32_t stream = 1; stream < 200; stream += 2)
    raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, stream, "\0\100\0\0", 4);
  while (ends < 100) {
    cr_assert(next_frame(&raw, &f, 2000), "%d streams ended", ends);
    ends += f.type == RAW_HEADERS && (f.flags & NGHTTP2_FLAG_END_STREAM);
    bytes += f.type == RAW_DATA ? f.len : 0;
  }
  cr_expect_eq(bytes, 100 * 3 * 100005);
  finish();
}

Test(grpc_wire, S117_a_reset_makes_room) {
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  greet_with_windows(10);
  for (uint32_t stream = 1; stream < 200; stream += 2)
    raw_send_request(&raw, stream, TOY "Copied", "", "3 100000", 8);
  settle();
  const long before = toy.pulled;
  for (uint32_t stream = 1; stream < 11; stream += 2)
    raw_send_frame(&raw, RAW_RST_STREAM, 0, stream, "\0\0\0\10", 4);
  settle();
  cr_expect_eq(toy.pulled, before + 5);
  finish();
}

Test(grpc_wire, S46_no_header_table_and_no_push) {
  static const uint8_t none[] = {0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0};
  start_greeted();
  raw_send_request(&raw, 1, TOY "Echo", "", "before", 6);
  expect_answer(&raw, 1, "before", 6);
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, none, sizeof none);
  for (uint32_t stream = 3; stream < 9; stream += 2) {
    raw_send_request(&raw, stream, TOY "Echo", "", "after", 5);
    for (int block = 0; block < 2; block++) {
      const raw_frame f = frame_of(RAW_HEADERS);
      size_t at = stream == 3 && block == 0;
      if (at)
        cr_expect_eq(f.payload[0], 0x20, "the table is emptied at once: %02x", f.payload[0]);
      cr_expect(f.payload[at] != 0xbe && (f.payload[at] & 0xc0) != 0x40,
                "nothing is taken from a table, or added: %02x", f.payload[at]);
      if (block == 0)
        frame_of(RAW_DATA);
    }
  }
  finish();
}

Test(grpc_wire, S48_frames_as_large_as_allowed) {
  start_greeted();
  const uint8_t settings[] = {0, 5, 0, 1,    0, 0,
                              0, 4, 0, 0x40, 0, 0}; /* frames of 65 536, windows of 4 MiB */
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, settings, sizeof settings);
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\0\100\0\0", 4);
  raw_send_request(&raw, 1, TOY "Count", "", "1 1000000", 9);
  raw_frame f;
  size_t largest = 0, got = 0;
  uint8_t wanted = 0;
  while (next_frame(&raw, &f, 2000) && !(f.flags & NGHTTP2_FLAG_END_STREAM)) {
    if (f.type != RAW_DATA)
      continue;
    largest = f.len > largest ? f.len : largest;
    for (size_t i = got == 0 ? 5 : 0; i < f.len; i++)
      cr_assert_eq(f.payload[i], wanted++);
    got += f.len;
  }
  cr_expect_eq(got, 1000005);
  cr_expect_eq(largest, 65536);
  finish();
}

Test(grpc_wire, S48_streams_take_turns_frame_by_frame) {
  start_greeted();
  const uint8_t settings[] = {0, 4, 0, 0x40, 0, 0};
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, settings, sizeof settings);
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\0\100\0\0", 4);
  raw_send_request(&raw, 1, TOY "Count", "", "1 1000000", 9);
  raw_send_request(&raw, 3, TOY "Count", "", "1 1000000", 9);
  raw_frame f;
  uint32_t last = 0;
  int turns = 0, ends = 0;
  while (ends < 2 && next_frame(&raw, &f, 2000)) {
    ends += (f.flags & NGHTTP2_FLAG_END_STREAM) != 0;
    if (f.type == RAW_DATA) {
      turns += f.stream != last;
      last = f.stream;
    }
  }
  cr_expect_eq(ends, 2);
  cr_expect_geq(turns, 100, "122 frames changed the stream %d times", turns);
  finish();
}

Test(grpc_wire, a_silent_connection_is_no_abuse) {
  kvrelay_grpc_server_config cfg = config();
  cfg.keepalive_interval_ns = MS / 100;
  start(&cfg);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  frame_of(RAW_HEADERS);
  for (int i = 0; i < 10100; i++) {
    raw_frame f = frame_of(RAW_PING);
    raw_send_frame(&raw, RAW_PING, NGHTTP2_FLAG_ACK, 0, f.payload, 8);
  }
  cr_expect_eq(toy.open_now, 1);
  finish();
}

Test(grpc_wire, S11_reset_frees_the_call_at_once) {
  start_greeted();
  for (uint32_t i = 0; i < 200; i++) {
    raw_send_request(&raw, 2 * i + 1, TOY "Silent", "", "", 0);
    raw_send_frame(&raw, RAW_RST_STREAM, 0, 2 * i + 1, "\0\0\0\10", 4);
  }
  settle();
  cr_expect_eq(toy.opened, 200);
  cr_expect_eq(toy.open_now, 0);
  expect_serving();
  finish();
}

Test(grpc_wire, S27_too_many_streams) {
  kvrelay_grpc_server_config cfg = config();
  cfg.max_concurrent_streams = 2;
  start(&cfg);
  raw_greet(&raw);
  for (uint32_t i = 0; i < 2; i++) {
    raw_send_request(&raw, 2 * i + 1, TOY "Silent", "", "", 0);
    frame_of(RAW_HEADERS);
  }
  raw_send_request(&raw, 5, TOY "Silent", "", "", 0);
  raw_frame f = frame_of(RAW_RST_STREAM);
  cr_expect_eq(f.stream, 5);
  cr_expect_arr_eq(f.payload, "\0\0\0\7", 4);
  finish();
}

/* ---- life of a connection ---- */

Test(grpc_wire, S40_no_answer_to_a_ping) {
  kvrelay_grpc_server_config cfg = config();
  cfg.keepalive_interval_ns = 40 * MS;
  cfg.keepalive_timeout_ns = 250 * MS;
  start(&cfg);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  frame_of(RAW_HEADERS);
  for (int i = 0; i < 3; i++) {
    raw_frame f = frame_of(RAW_PING);
    raw_send_frame(&raw, RAW_PING, NGHTTP2_FLAG_ACK, 0, f.payload, 8);
  }
  frame_of(RAW_PING);
  raw_frame f;
  cr_expect_not(next_frame(&raw, &f, 1000));
  cr_expect(raw.eof);
  cr_expect_eq(toy.open_now, 0);
  finish();
}

Test(grpc_wire, S40_pings_go_out_while_data_flows) {
  kvrelay_grpc_server_config cfg = config();
  cfg.keepalive_interval_ns = 20 * MS;
  start(&cfg);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Count", "", "1000000 1000", 12);
  int pings = 0;
  size_t data = 0;
  const uint64_t until = server->now_ns(server) + 5000 * MS;
  while (pings < 5 && server->now_ns(server) < until) {
    raw_frame f;
    raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\0\0\4\0", 4);
    raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 1, "\0\0\4\0", 4);
    cr_assert(next_frame(&raw, &f, 2000));
    data += f.type == RAW_DATA;
    if (f.type != RAW_PING)
      continue;
    pings++;
    cr_expect_gt(data, 0, "data between two");
    data = 0;
    raw_send_frame(&raw, RAW_PING, NGHTTP2_FLAG_ACK, 0, f.payload, 8);
  }
  cr_expect_eq(pings, 5);
  finish();
}

Test(grpc_wire, S41_pings_far_enough_apart_are_no_strikes) {
  kvrelay_grpc_server_config cfg = config();
  cfg.peer_ping_interval_ns = 10 * MS;
  start(&cfg);
  raw_greet(&raw);
  for (int i = 0; i < 12; i++) {
    raw_frame f;
    if (i == 6) {
      raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
      frame_of(RAW_HEADERS);
    }
    raw_send_frame(&raw, RAW_PING, 0, 0, "12345678", 8);
    cr_expect(frame_of(RAW_PING).flags & NGHTTP2_FLAG_ACK);
    cr_expect_not(next_frame(&raw, &f, 12));
  }
  cr_expect_eq(toy.open_now, 1);
  finish();
}

Test(grpc_wire, S41_S42_too_many_pings) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  frame_of(RAW_HEADERS);
  /* The first, then two strikes, which are forgiven by a message that goes out; then once more. */
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 3; i++) {
      raw_send_frame(&raw, RAW_PING, 0, 0, "12345678", 8);
      cr_expect(frame_of(RAW_PING).flags & NGHTTP2_FLAG_ACK);
    }
    if (round == 0) {
      raw_send_request(&raw, 3, TOY "Echo", "", "x", 1);
      expect_answer(&raw, 3, "x", 1);
    }
  }
  raw_send_frame(&raw, RAW_PING, 0, 0, "12345678", 8);
  raw_frame f;
  do
    cr_assert(next_frame(&raw, &f, 2000));
  while (f.type == RAW_PING);
  cr_assert_eq(f.type, RAW_GOAWAY);
  cr_expect_arr_eq(f.payload + 4, "\0\0\0\13too_many_pings", 18);
  cr_expect_eq(f.len, 22);
  cr_expect_not(next_frame(&raw, &f, 2000));
  cr_expect(raw.eof);
  finish();
}

Test(grpc_wire, S44_orderly_stop) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  frame_of(RAW_HEADERS);
  server->stop(server, 2000 * MS);
  raw_frame f = frame_of(RAW_GOAWAY);
  cr_expect_arr_eq(f.payload, "\177\377\377\377\0\0\0\0", 8);
  f = frame_of(RAW_PING);
  /* A call that crossed the GOAWAY is refused so that it can go elsewhere. */
  raw_send_request(&raw, 3, TOY "Echo", "", "x", 1);
  raw_send_frame(&raw, RAW_PING, NGHTTP2_FLAG_ACK, 0, "kvdrain", 8);
  bool refused = false, final = false;
  while (!(refused && final) && next_frame(&raw, &f, 2000)) {
    refused |= f.type == RAW_RST_STREAM && f.stream == 3 && memcmp(f.payload, "\0\0\0\7", 4) == 0;
    final |= f.type == RAW_GOAWAY && memcmp(f.payload, "\0\0\0\3\0\0\0\0", 8) == 0;
  }
  cr_expect(refused && final);
  toy_service_shutdown(&toy);
  f = frame_of(RAW_HEADERS);
  cr_expect_str_eq(f.headers, "grpc-status: 0\n");
  cr_expect_not(next_frame(&raw, &f, 2000));
  cr_expect(raw.eof);
  raw_close(&raw);
  uint64_t until = server->now_ns(server) + 2000 * MS;
  int result = 0;
  while (result != KVRELAY_TRANSPORT_CLOSED && server->now_ns(server) < until)
    result = server->run_once(server, 10 * MS);
  cr_expect_eq(result, KVRELAY_TRANSPORT_CLOSED);
  cr_expect_eq(toy.open_now, 0);
  server->close(server);
}

Test(grpc_wire, S44_a_peer_that_does_not_care_is_cut_after_the_grace_time) {
  start_greeted();
  raw_send_request(&raw, 1, TOY "Count", "", "100000 10000", 12); /* never read */
  settle();
  uint64_t start_ns = server->now_ns(server);
  server->stop(server, 150 * MS);
  int result = 0;
  while (result != KVRELAY_TRANSPORT_CLOSED && server->now_ns(server) < start_ns + 5000 * MS)
    result = server->run_once(server, 10 * MS);
  uint64_t took_ms = (server->now_ns(server) - start_ns) / MS;
  cr_expect_eq(result, KVRELAY_TRANSPORT_CLOSED);
  cr_expect(took_ms >= 140 && took_ms < 1000, "%lu ms", (unsigned long)took_ms);
  cr_expect_eq(toy.open_now, 0);
  raw_close(&raw);
  server->close(server);
}

Test(grpc_wire, S49_idle_connection) {
  kvrelay_grpc_server_config cfg = config();
  cfg.idle_timeout_ns = 50 * MS;
  start(&cfg);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Echo", "", "x", 1);
  expect_answer(&raw, 1, "x", 1);
  cr_expect_eq(frame_of(RAW_GOAWAY).payload[7], 0);
  finish();
}

Test(grpc_wire, S45_old_connection) {
  kvrelay_grpc_server_config cfg = config();
  cfg.max_connection_age_ns = 50 * MS;
  cfg.max_connection_age_grace_ns = 100 * MS;
  start(&cfg);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  frame_of(RAW_HEADERS);
  frame_of(RAW_GOAWAY);
  frame_of(RAW_PING);
  raw_frame f;
  cr_expect_not(next_frame(&raw, &f, 1000));
  cr_expect(raw.eof);
  finish();
}

Test(grpc_wire, S115_slow_handshake_and_too_many_connections) {
  kvrelay_grpc_server_config cfg = config();
  cfg.handshake_timeout_ns = 400 * MS;
  cfg.max_connections = 2;
  start(&cfg);
  raw_send(&raw, RAW_PREFACE, 10);
  raw_http2 second, third;
  raw_open(&second, kvrelay_grpc_server_port(server));
  settle();
  raw_open(&third, kvrelay_grpc_server_port(server));
  raw_frame f;
  cr_expect_not(next_frame(&third, &f, 1000));
  cr_expect(third.eof, "one too many");
  cr_expect_eq(kvrelay_grpc_server_connections(server), 2);
  cr_expect_not(next_frame(&raw, &f, 2000));
  cr_expect(raw.eof, "half a preface");
  cr_expect_not(next_frame(&second, &f, 2000));
  cr_expect(second.eof, "no preface at all");
  expect_serving();
  raw_close(&second);
  raw_close(&third);
  finish();
}

Test(grpc_wire, S115_a_connection_that_calls_nothing_in_time) {
  kvrelay_grpc_server_config cfg = config();
  cfg.handshake_timeout_ns = 100 * MS;
  start(&cfg);
  raw_greet(&raw);
  raw_frame f;
  const uint64_t began = server->now_ns(server);
  while (next_frame(&raw, &f, 2000))
    cr_expect_neq(f.type, RAW_HEADERS);
  cr_expect(raw.eof, "SETTINGS alone are no reason to stay");
  cr_expect_geq(server->now_ns(server) - began, 80 * MS);
  expect_serving();
  finish();
}

Test(grpc_wire, S10_S27_S40_S41_S49_S104_S115_S116_the_numbers) {
  static const uint8_t streams[] = {0, 3, 0, 0, 4, 0}, headers[] = {0, 6, 0, 0, 0x40, 0};
  const kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  const kvrelay_relay_config relay = kvrelay_relay_config_default();
  cr_expect_eq(cfg.max_concurrent_streams, 1024);
  cr_expect_eq(relay.max_catalog_subscribers + relay.max_pool_streams +
                   relay.max_readiness_subscribers + relay.max_load_subscribers,
               256);
  cr_expect_eq(cfg.keepalive_interval_ns, 20000 * MS);
  cr_expect_eq(cfg.keepalive_timeout_ns, 10000 * MS);
  cr_expect_eq(cfg.peer_ping_interval_ns, 10000 * MS);
  cr_expect_eq(cfg.idle_timeout_ns, 300000 * MS);
  cr_expect_eq(cfg.handshake_timeout_ns, 10000 * MS);
  cr_expect_eq(cfg.max_connections, 1024);
  cr_expect_eq(cfg.max_connections_per_peer, 256);
  cr_expect_eq(cfg.max_request_bytes, 65536);
  start_greeted();
  raw_frame f;
  for (int i = 0; i < 50 && !raw_next(&raw, &f); i++)
    server->run_once(server, 5 * MS);
  cr_assert_eq(f.type, RAW_SETTINGS);
  cr_expect_not_null(memmem(f.payload, f.len, streams, sizeof streams));
  cr_expect_not_null(memmem(f.payload, f.len, headers, sizeof headers));
  finish();
}

/* ---- what is not HTTP/2, and what breaks it ---- */

Test(grpc_wire, S28_the_likely_mistake_is_logged) {
  static const struct {
    const char *bytes;
    size_t len;
    const char *word;
  } cases[] = {{"GET / HTTP/1.1\r\n\r\n", 18, "HTTP/1.1"},
               {"POST /x HTTP/1.1\r\n\r\n", 20, "HTTP/1.1"},
               {"\x16\x03\x01\x00\xc8\x01\x00\x00", 8, "TLS"},
               {"KVRF\1\1\0\0\0\0\0\0\0\0\0\0", 16, "raw transport"},
               {"\0\0\0\0", 4, "not HTTP/2"},
               {"PRI * HTTP/2.0\r\n\r\nSN", 20, "not HTTP/2"}};
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    raw_frame f;
    raw_http2 odd;
    logged[0] = '\0';
    raw_open(&odd, kvrelay_grpc_server_port(server));
    raw_send(&odd, cases[i].bytes, cases[i].len);
    while (next_frame(&odd, &f, 1000))
      continue;
    cr_expect(odd.eof);
    cr_expect(strstr(logged, cases[i].word) != NULL, "case %zu logged %s", i, logged);
    raw_close(&odd);
  }
  expect_serving();
  finish();
}

static void adopt(void *tcp, int fd, const kvrelay_address *peer, kvrelay_secure_session *secure) {
  kvrelay_tcp_server_adopt(tcp, fd, peer, secure);
}

/* Sends a raw preface and a request for method 9 in two pieces; the answer, at most `cap` bytes. */
static size_t speak_raw(kvrelay_transport *tcp, size_t cut, uint8_t *answer, size_t cap) {
  static const uint8_t wire[] = "KVRF\1\1\0\0\0\0\x80\0\0\0\x80\0"
                                "\0\0\0\0\1\0\0\0\1\0\11";
  raw_http2 it;
  size_t got = 0;
  raw_open(&it, kvrelay_grpc_server_port(server));
  raw_send(&it, wire, cut);
  settle();
  raw_send(&it, wire + cut, sizeof wire - cut);
  for (int i = 0; i < 50 && got < 30; i++) {
    server->run_once(server, MS);
    cr_assert_geq(tcp->run_once(tcp, MS), 0);
    ssize_t n = recv(it.fd, answer + got, cap - got, MSG_DONTWAIT);
    got += n > 0 ? (size_t)n : 0;
  }
  raw_close(&it);
  return got;
}

Test(grpc_wire, B12_one_listener_for_both_transports) {
  kvrelay_grpc_server_config cfg = config();
  kvrelay_tcp_server_config tcp_cfg = kvrelay_tcp_server_config_default();
  kvrelay_transport *tcp;
  cr_assert_eq(kvrelay_tcp_server_open(&tcp_cfg, &toy.base, &tcp), KVRELAY_TRANSPORT_OK);
  cfg.raw = adopt;
  cfg.raw_context = tcp;
  start(&cfg);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Echo", "", "hello", 5);
  expect_answer(&raw, 1, "hello", 5);
  for (size_t cut = 1; cut < 28; cut++) {
    uint8_t answer[256];
    size_t n = speak_raw(tcp, cut, answer, sizeof answer);
    cr_assert_geq(n, 30, "%zu bytes after %zu", n, cut);
    cr_expect_arr_eq(answer, "KVRF\1", 5, "no byte of HTTP/2 before");
    cr_expect_eq(answer[16 + 8], 4, "END");
    cr_expect_eq(answer[16 + 10], KVRELAY_GRPC_UNIMPLEMENTED);
  }
  cr_expect_eq(kvrelay_grpc_server_connections(server), 1, "only the one of gRPC");
  raw_http2 silent;
  raw_open(&silent, kvrelay_grpc_server_port(server));
  settle();
  raw_close(&silent);
  settle();
  cr_expect_eq(kvrelay_grpc_server_connections(server), 1);
  tcp->close(tcp);
  finish();
}

Test(grpc_wire, malformed_frames_end_one_connection_only) {
  static const struct {
    const char *name, *bytes;
    size_t len;
  } cases[] = {
      {"frame longer than allowed", "\xff\xff\xff\0\0\0\0\0\1", 9},
      {"SETTINGS on a stream", "\0\0\0\4\0\0\0\0\1", 9},
      {"SETTINGS of a wrong length", "\0\0\5\4\0\0\0\0\0\0\0\0\0\0", 14},
      {"PING of a wrong length", "\0\0\1\6\0\0\0\0\0x", 10},
      {"DATA on stream 0", "\0\0\1\0\0\0\0\0\0x", 10},
      {"DATA on a stream that never was", "\0\0\1\0\0\0\0\0\11x", 10},
      {"headers that do not decompress", "\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff", 13},
      {"CONTINUATION out of nowhere", "\0\0\0\11\4\0\0\0\1", 9},
      {"an even stream", "\0\0\1\1\5\0\0\0\2\x82", 10},
      {"WINDOW_UPDATE of zero", "\0\0\4\10\0\0\0\0\0\0\0\0\0", 13},
      {"window above 2^31 - 1", "\0\0\4\10\0\0\0\0\0\x7f\xff\xff\xff", 13},
      {"initial window above 2^31 - 1", "\0\0\6\4\0\0\0\0\0\0\4\xff\xff\xff\xff", 15},
      {"RST_STREAM of an idle stream", "\0\0\4\3\0\0\0\0\7\0\0\0\10", 13},
      {"padding longer than the frame", "\0\0\2\0\10\0\0\0\1\xff\0", 11},
      {"PUSH_PROMISE from a client", "\0\0\4\5\4\0\0\0\1\0\0\0\2", 13},
  };
  start_greeted();
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    raw_frame f;
    raw_http2 odd;
    bool goaway = false;
    raw_open(&odd, kvrelay_grpc_server_port(server));
    raw_greet(&odd);
    if (strstr(cases[i].name, "padding") != NULL)
      raw_send_headers(&odd, 0, 1, HEAD);
    raw_send(&odd, cases[i].bytes, cases[i].len);
    while (next_frame(&odd, &f, 2000))
      goaway |= f.type == RAW_GOAWAY && f.payload[7] != 0;
    cr_expect(odd.eof, "%s", cases[i].name);
    cr_expect(goaway, "%s: no GOAWAY", cases[i].name);
    raw_close(&odd);
  }
  expect_serving();
  finish();
}

/* A GOAWAY with this code, then the end of the connection. */
static void expect_goaway(uint32_t code) {
  raw_frame f = frame_of(RAW_GOAWAY);
  cr_expect_eq(f.payload[7], code);
  cr_expect_not(next_frame(&raw, &f, 2000));
  cr_expect(raw.eof);
}

Test(grpc_wire, S12_more_of_a_request_after_its_end) {
  for (int how = 0; how < 6; how++) {
    start_greeted();
    raw_send_request(&raw, 1, TOY "Echo", "", "x", 1);
    expect_answer(&raw, 1, "x", 1);
    raw_send_headers(&raw, 0, 3, HEAD);
    raw_send_frame(&raw, RAW_RST_STREAM, 0, 3, "\0\0\0\10", 4);
    if (how % 2 == 0)
      raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, how < 3 ? 1 : 3, "\0\0\0\0\0", 5);
    else
      raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, how < 3 ? 1 : 3, HEAD);
    expect_goaway(NGHTTP2_STREAM_CLOSED);
    finish();
  }
}

Test(grpc_wire, S24_more_of_a_request_crosses_our_reset) {
  start_greeted();
  raw_send_headers(&raw, 0, 1, HEAD);
  raw_send_frame(&raw, RAW_DATA, 0, 1, "\1\0\0\0\0", 5);
  only_trailers("grpc-status: 13\n");
  frame_of(RAW_RST_STREAM);
  raw_send_frame(&raw, RAW_DATA, 0, 1, "more", 4);
  raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 1, "trailer: x\n");
  raw_send_request(&raw, 3, TOY "Echo", "", "next", 4);
  expect_answer(&raw, 3, "next", 4);
  finish();
}

Test(grpc_wire, a_client_that_says_goodbye_is_no_error) {
  static const char *const last_streams[] = {"\x7f\xff\xff\xff\0\0\0\0", "\0\0\0\1\0\0\0\0",
                                             "\0\0\0\0\0\0\0\0"};
  for (size_t i = 0; i < sizeof last_streams / sizeof *last_streams; i++) {
    raw_frame f;
    start_greeted();
    raw_send_request(&raw, 1, TOY "Echo", "", "x", 1);
    expect_answer(&raw, 1, "x", 1);
    raw_send_frame(&raw, RAW_GOAWAY, 0, 0, last_streams[i], 8);
    while (next_frame(&raw, &f, 100))
      cr_expect_eq(f.type, RAW_GOAWAY);
    raw_close(&raw);
    settle();
    cr_expect_eq(kvrelay_grpc_server_connections(server), 0);
    cr_expect(strstr(logged, "3 connection_") == NULL, "%s", logged);
    finish();
  }
}

Test(grpc_wire, S110_S112_S114_floods_are_ended) {
  static const char *const names[] = {"resets",         "settings",   "empty data",
                                      "window updates", "priorities", "data of no stream"};
  start_greeted();
  for (size_t kind = 0; kind < sizeof names / sizeof *names; kind++) {
    raw_http2 odd;
    raw_frame f;
    bool goaway = false;
    raw_open(&odd, kvrelay_grpc_server_port(server));
    raw_greet(&odd);
    raw_send_headers(&odd, 0, 1, HEAD);
    for (uint32_t i = 0; i < 12000 && !odd.eof; i++) {
      if (kind == 0) {
        raw_send_headers(&odd, 0, 2 * i + 3, HEAD);
        raw_send_frame(&odd, RAW_RST_STREAM, 0, 2 * i + 3, "\0\0\0\10", 4);
      } else if (kind == 1) {
        raw_send_frame(&odd, RAW_SETTINGS, 0, 0, NULL, 0);
      } else if (kind == 2) {
        raw_send_frame(&odd, RAW_DATA, 0, 1, NULL, 0);
      } else if (kind == 3) {
        raw_send_frame(&odd, RAW_WINDOW_UPDATE, 0, 0, "\0\0\0\1", 4);
      } else if (kind == 5) {
        if (i == 0)
          raw_send_frame(&odd, RAW_DATA, 0, 1, "\1\0\0\0\0", 5); /* refused and reset */
        raw_send_frame(&odd, RAW_DATA, 0, 1, NULL, 0);
      } else {
        raw_send_frame(&odd, RAW_PRIORITY, 0, 1, "\0\0\0\0\1", 5);
      }
      if (i % 64 == 0)
        while (server->run_once(server, 0) > 0)
          continue;
    }
    while (next_frame(&odd, &f, 500))
      goaway |= f.type == RAW_GOAWAY && f.payload[7] != 0;
    cr_expect(odd.eof && goaway, "%s", names[kind]);
    raw_close(&odd);
  }
  expect_serving();
  finish();
}

Test(grpc_wire, a_peer_that_asks_and_does_not_read, .timeout = 60) {
  kvrelay_grpc_server_config cfg = config();
  cfg.max_concurrent_streams = 1;
  cfg.output_threshold = 16384;
  start(&cfg);
  int small = 4096, off = 0;
  cr_assert_eq(setsockopt(raw.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
  /* Millions of small frames: let them share segments. */
  cr_assert_eq(setsockopt(raw.fd, IPPROTO_TCP, TCP_NODELAY, &off, sizeof off), 0);
  raw_greet(&raw);
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  settle();
  uint32_t stream = 3;
  while (kvrelay_grpc_server_connections(server) == 1 && stream < 4000000) {
    for (int i = 0; i < 200; i++, stream += 2)
      raw_send_headers(&raw, 0, stream, HEAD); /* refused: one too many */
    while (server->run_once(server, 0) > 0)
      continue;
  }
  cr_expect_eq(kvrelay_grpc_server_connections(server), 0, "%u streams", stream / 2);
  cr_expect(strstr(logged, "without reading") != NULL, "%s", logged);
  expect_serving();
  finish();
}

Test(grpc_wire, S111_endless_continuations) {
  start_greeted();
  raw_send_frame(&raw, RAW_HEADERS, 0, 1, NULL, 0);
  for (int i = 0; i < 20; i++)
    raw_send_frame(&raw, RAW_CONTINUATION, 0, 1, "\0\1x\1y", 5);
  raw_frame f;
  while (next_frame(&raw, &f, 1000))
    continue;
  cr_expect(raw.eof);
  expect_serving();
  finish();
}

Test(grpc_wire, altered_and_cut_sessions_leave_the_server_serving, .timeout = 60) {
  int pair[2];
  uint8_t good[2048], bad[2048];
  raw_http2 recorder;
  kvrelay_grpc_server_config cfg = config();
  cfg.log = NULL;
  cfg.handshake_timeout_ns = 20 * MS;
  start(&cfg);
  cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  raw_take(&recorder, pair[0]);
  raw_greet(&recorder);
  raw_send_request(&recorder, 1, TOY "Count", "grpc-timeout: 50m\n", "40 100", 6);
  raw_send_request(&recorder, 3, TOY "Silent", "", "", 0);
  raw_send_frame(&recorder, RAW_PING, 0, 0, "12345678", 8);
  raw_send_frame(&recorder, RAW_WINDOW_UPDATE, 0, 1, "\0\0\1\0", 4);
  raw_send_frame(&recorder, RAW_RST_STREAM, 0, 3, "\0\0\0\10", 4);
  raw_send_request(&recorder, 5, TOY "Chat", "", "abc", 3);
  ssize_t len = read(pair[1], good, sizeof good);
  cr_assert_gt(len, 100);
  uint32_t dice = 12345;
  for (int round = 0; round < 1500; round++) {
    raw_http2 odd;
    size_t n = (size_t)len;
    memcpy(bad, good, n);
    for (int flips = round % 4; flips > 0; flips--) {
      dice = dice * 1664525 + 1013904223;
      bad[24 + (dice >> 8) % (n - 24)] ^= (uint8_t)(1u << (dice >> 29));
    }
    if (round % 4 == 0)
      n = (size_t)(round / 4) % n + 1; /* every prefix */
    raw_open(&odd, kvrelay_grpc_server_port(server));
    raw_send(&odd, bad, n);
    for (int turn = 0; turn < 4; turn++)
      server->run_once(server, 0);
    raw_close(&odd);
    if (round % 100 == 0)
      settle();
  }
  expect_serving();
  raw_close(&recorder);
  close(pair[1]);
  finish();
}

/* ---- addresses ---- */

Test(grpc_wire, bind_addresses) {
  static const struct {
    const char *bind;
    int result;
  } cases[] = {{"127.0.0.1:0", KVRELAY_TRANSPORT_OK},
               {"[::1]:0", KVRELAY_TRANSPORT_OK},
               {"127.0.0.1", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"127.0.0.1:", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"127.0.0.1:65536", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"127.0.0.1:http", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {":5561", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"::1:5561", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"unix:", KVRELAY_TRANSPORT_ERR_ADDRESS},
               {"192.0.2.1:1", KVRELAY_TRANSPORT_ERR_BIND}};
  kvrelay_grpc_server_config cfg = config();
  toy_service_init(&toy);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    kvrelay_transport *t = NULL;
    cfg.bind = cases[i].bind;
    int result = kvrelay_grpc_server_open(&cfg, &toy.base, &t);
    cr_expect_eq(result, cases[i].result, "%s: %d", cases[i].bind, result);
    if (t != NULL) {
      char address[64];
      kvrelay_grpc_server_address(t, address, sizeof address);
      cr_expect_eq(strncmp(address, cases[i].bind, strlen(cases[i].bind) - 1), 0, "%s", address);
      cr_expect_neq(kvrelay_grpc_server_port(t), 0);
      t->close(t);
    }
  }
}

Test(grpc_wire, a_port_in_use_and_the_callers_errors) {
  start_greeted();
  char address[64];
  kvrelay_transport *t = NULL;
  kvrelay_grpc_server_config cfg = config();
  kvrelay_grpc_server_address(server, address, sizeof address);
  cfg.bind = address;
  cr_expect_eq(kvrelay_grpc_server_open(&cfg, &toy.base, &t), KVRELAY_TRANSPORT_ERR_BIND);
  cfg.bind = NULL;
  cr_expect_eq(kvrelay_grpc_server_open(&cfg, &toy.base, &t), KVRELAY_TRANSPORT_ERR_ARG);
  cfg.bind = "127.0.0.1:0";
  cfg.output_threshold = 1;
  cr_expect_eq(kvrelay_grpc_server_open(&cfg, &toy.base, &t), KVRELAY_TRANSPORT_ERR_ARG);
  expect_serving();
  finish();
}
