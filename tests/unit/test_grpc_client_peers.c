/* SPDX-License-Identifier: Apache-2.0 */
/* The gRPC client against what real servers do on the wire: the negative cases of gRPC's official
 * list, and the numbers C1 to C18. */
#include "test_grpc_client.h"
#include "transports/grpc/grpc_codec.h"

static void answer(uint32_t stream, const char *trailers) {
  raw_send_headers(&peer, 0, stream, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, stream, "\0\0\0\0\2ok", 7);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, stream, trailers);
}

/* Starts a call and reads its request; what its stream is called. */
static uint32_t request(uint32_t number) {
  cr_assert_eq(call(number, "Echo", "x"), KVRELAY_TRANSPORT_OK);
  const raw_frame f = expect_frame(RAW_DATA);
  return f.stream;
}

static void expect_status(uint32_t number, int32_t grpc, int messages) {
  RUN_UNTIL(caller.call[number].ends == 1);
  cr_expect_eq(caller.call[number].status.grpc, grpc, "%u: %d %s", number,
               caller.call[number].status.grpc, caller.call[number].status.text);
  cr_expect_eq(caller.call[number].messages, messages);
}

static void reset(uint32_t stream, uint8_t code) {
  const uint8_t payload[4] = {0, 0, 0, code};
  raw_send_frame(&peer, RAW_RST_STREAM, 0, stream, payload, 4);
}

/* The client's next connection. */
static void accept_again(void) {
  uint8_t preface[24];
  raw_close(&peer);
  RUN_UNTIL((peer.fd = accept(listener, NULL, NULL)) >= 0);
  raw_take(&peer, peer.fd);
  RUN_UNTIL(recv(peer.fd, preface, sizeof preface, MSG_PEEK) == 24);
  cr_assert_eq(recv(peer.fd, preface, sizeof preface, 0), 24);
  raw_send_frame(&peer, RAW_SETTINGS, 0, 0, NULL, 0);
  RUN_UNTIL(in_state('R'));
}

/* ---- NEG ---- */

Test(grpc_client_peers, C10_NEG_goaway_the_second_call_is_on_another_connection) {
  scripted();
  ready();
  const uint32_t stream = request(1);
  raw_send_headers(&peer, 0, stream, ANSWER);
  raw_send_frame(&peer, RAW_GOAWAY, 0, 0, "\0\0\0\1\0\0\0\0", 8);
  raw_send_frame(&peer, RAW_DATA, 0, stream, "\0\0\0\0\2ok", 7);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, stream, "grpc-status: 0\n");
  expect_status(1, KVRELAY_GRPC_OK, 1);
  RUN_UNTIL(in_state('C'));
  accept_again();
  cr_expect_eq(request(2), 1, "the first stream of a new connection");
  answer(1, "grpc-status: 0\n");
  expect_status(2, KVRELAY_GRPC_OK, 1);
  finish_scripted();
}

Test(grpc_client_peers, C13_NEG_resets_after_header_during_and_after_data) {
  scripted();
  ready();
  uint32_t stream = request(1);
  raw_send_headers(&peer, 0, stream, ANSWER);
  reset(stream, 0);
  expect_status(1, KVRELAY_GRPC_INTERNAL, 0);
  stream = request(2);
  raw_send_headers(&peer, 0, stream, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, stream, "\0\0\0\0\2o", 6);
  reset(stream, 0);
  expect_status(2, KVRELAY_GRPC_INTERNAL, 0);
  stream = request(3);
  raw_send_headers(&peer, 0, stream, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, stream, "\0\0\0\0\2ok", 7);
  reset(stream, 0);
  expect_status(3, KVRELAY_GRPC_INTERNAL, 1);
  stream = request(4); /* the connection is as good as before */
  answer(stream, "grpc-status: 0\n");
  expect_status(4, KVRELAY_GRPC_OK, 1);
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

Test(grpc_client_peers, C9_NEG_ping_between_all_frames_is_answered) {
  scripted();
  ready();
  const uint32_t stream = request(1);
  int acks = 0;
  raw_frame f;
  static const char *const steps[] = {"", ANSWER, "data", "grpc-status: 0\n", ""};
  for (int i = 0; i < 5; i++) {
    if (i == 2)
      raw_send_frame(&peer, RAW_DATA, 0, stream, "\0\0\0\0\2ok", 7);
    else if (*steps[i] != '\0')
      raw_send_headers(&peer, i == 3 ? NGHTTP2_FLAG_END_STREAM : 0, stream, steps[i]);
    raw_send_frame(&peer, RAW_PING, 0, 0, "01234567", 8);
  }
  while (acks < 5) {
    f = expect_frame(RAW_PING);
    cr_expect_eq(f.flags, NGHTTP2_FLAG_ACK);
    cr_expect_arr_eq(f.payload, "01234567", 8);
    acks++;
  }
  expect_status(1, KVRELAY_GRPC_OK, 1);
  finish_scripted();
}

Test(grpc_client_peers, NEG_max_streams_one_at_a_time) {
  scripted();
  raw_send_frame(&peer, RAW_SETTINGS, 0, 0, "\0\3\0\0\0\1", 6);
  RUN_UNTIL(in_state('R'));
  for (uint32_t number = 1; number <= 10; number++) {
    const uint32_t stream = request(number);
    cr_expect_eq(call(100, "Echo", "x"), KVRELAY_TRANSPORT_ERR_LIMIT);
    answer(stream, "grpc-status: 0\n");
    expect_status(number, KVRELAY_GRPC_OK, 1);
  }
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

/* ---- C ---- */

Test(grpc_client_peers, C2_every_attempt_resolves_and_dials_anew) {
  scripted();
  ready();
  for (int i = 0; i < 3; i++)
    accept_again(); /* after the end of each connection */
  raw_send_frame(&peer, RAW_GOAWAY, 0, 0, "\0\0\0\0\0\0\0\0", 8);
  RUN_UNTIL(in_state('C'));
  accept_again();
  finish_scripted();
}

Test(grpc_client_peers, C3_several_relays_beside_each_other) {
  start();
  struct caller first = caller;
  kvrelay_client_transport *second;
  char target[64];
  kvrelay_grpc_server_address(server, target, sizeof target);
  const kvrelay_grpc_client_config cfg = client_config(target);
  cr_assert_eq(kvrelay_grpc_client_open(&cfg, &caller.base, &second), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(strcmp(caller.states, "CRCR") == 0);
  call_and_end(1, "Echo", "one");
  cr_assert_eq(second->call(second, 2, TOY "Echo", (const uint8_t *)"two", 3),
               KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[2].ends == 1);
  cr_expect_arr_eq(caller.call[2].first, "two", 3);
  cr_expect_str_eq(first.states, "CR");
  second->base.close(&second->base);
  finish();
}

Test(grpc_client_peers, C4_C8_the_numbers) {
  const kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cr_expect_eq(cfg.backoff_first_ns, 1000 * MS);
  cr_expect_eq(cfg.backoff_max_ns, 120000 * MS);
  cr_expect_eq(cfg.connect_timeout_ns, 20000 * MS);
  cr_expect_geq(cfg.max_message_bytes, 8388608);
  cr_expect_geq(cfg.stream_window_bytes, 8388608);
  cr_expect_geq(cfg.connection_window_bytes, 16777216);
  cr_expect(cfg.keepalive_interval_ns >= 30000 * MS && cfg.keepalive_interval_ns <= 60000 * MS);
  cr_expect_eq(cfg.keepalive_timeout_ns, 20000 * MS);
}

/* The server closes after its SETTINGS, or before them: only then the pauses grow. */
static uint64_t pause_after(int connections, bool settings) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.backoff_first_ns = 20 * MS;
  cfg.backoff_max_ns = 10000 * MS;
  start_scripted(&cfg);
  for (int i = 1;; i++) {
    const size_t known = strlen(caller.states);
    if (settings)
      ready();
    raw_close(&peer);
    RUN_UNTIL(strlen(caller.states) > known && strchr(caller.states + known, 'F') != NULL);
    if (i == connections)
      break;
    RUN_UNTIL((peer.fd = accept(listener, NULL, NULL)) >= 0);
    raw_take(&peer, peer.fd);
  }
  const uint64_t pause = caller.retry_ns - caller.failed_at_ns;
  finish_scripted();
  return pause;
}

Test(grpc_client_peers, C4_the_backoff_grows_until_settings_came) {
  /* 20 ms × 1.6^4 = 131 ms, ± 20 %, less what the attempt took. */
  const uint64_t grown = pause_after(5, false), kept = pause_after(5, true);
  cr_expect(grown > 70 * MS && grown <= 158 * MS, "%lu", (unsigned long)grown);
  cr_expect_leq(kept, 24 * MS);
}

static uint32_t updated(uint32_t stream) {
  raw_frame f;
  do
    f = expect_frame(RAW_WINDOW_UPDATE);
  while (f.stream != stream);
  return (uint32_t)f.payload[0] << 24 | (uint32_t)f.payload[1] << 16 | (uint32_t)f.payload[2] << 8 |
         f.payload[3];
}

Test(grpc_client_peers, C7_S64_windows_and_updates_when_half_is_used) {
  static uint8_t bytes[16000];
  const kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cr_expect_eq(cfg.stream_window_bytes, 8388608);
  cr_expect_gt(cfg.stream_window_bytes, 2 * (5 + 2097359), "a snapshot of the default filter");
  scripted();
  cr_expect_eq(updated(0), 16777216 - 65535);
  ready();
  const uint32_t stream = request(1);
  raw_send_headers(&peer, 0, stream, ANSWER);
  size_t sent = 0;
  raw_frame f;
  for (bool got = false; !got; sent += sizeof bytes) {
    cr_assert_leq(sent, 8388608 / 2 + 4 * sizeof bytes);
    raw_send_frame(&peer, RAW_DATA, 0, stream, bytes, sizeof bytes); /* empty messages */
    client->base.run_once(&client->base, MS);
    while (raw_next(&peer, &f))
      got |= f.type == RAW_WINDOW_UPDATE && f.stream == stream;
  }
  cr_expect_geq(sent, 8388608 / 2, "%zu", sent);
  finish_scripted();
}

Test(grpc_client_peers, C10_a_refused_stream_is_unavailable_and_may_be_made_again) {
  scripted();
  ready();
  reset(request(1), 7);
  expect_status(1, KVRELAY_GRPC_UNAVAILABLE, 0);
  answer(request(1), "grpc-status: 0\n");
  expect_status(1, KVRELAY_GRPC_OK, 1);
  cr_expect_str_eq(caller.states, "CR");
  finish_scripted();
}

Test(grpc_client_peers, C10_calls_outlive_a_goaway_for_a_while_only) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.goaway_grace_ns = 60 * MS;
  start_scripted(&cfg);
  ready();
  request(1);
  raw_send_frame(&peer, RAW_GOAWAY, 0, 0, "\x7f\xff\xff\xff\0\0\0\0", 8);
  run_ms(30);
  cr_expect_eq(caller.call[1].ends, 0);
  cr_expect_eq(call(2, "Echo", "x"), KVRELAY_TRANSPORT_ERR_CONNECT);
  expect_status(1, KVRELAY_GRPC_UNAVAILABLE, 0);
  accept_again();
  finish_scripted();
}

Test(grpc_client_peers, C14_an_end_with_ok_and_one_without_trailers_are_ends) {
  scripted();
  ready();
  answer(request(1), "grpc-status: 0\n");
  expect_status(1, KVRELAY_GRPC_OK, 1);
  cr_expect_str_eq(caller.states, "CR", "the connection stays");
  raw_send_headers(&peer, 0, request(2), ANSWER);
  RUN_UNTIL(caller.call[2].admitted == 1);
  accept_again();
  cr_expect_eq(caller.call[2].ends, 1);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  finish_scripted();
}

Test(grpc_client_peers, C15_status_texts) {
  static const struct {
    const char *sent, *text;
  } cases[] = {{"a%20b%09c", "a b\tc"},       {"50% off", "50% off"}, {"%zz%4", "%zz%4"},
               {"%E2%98%BA", "\xE2\x98\xBA"}, {"%FF", "?"},           {"", ""}};
  scripted();
  ready();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char trailers[80];
    snprintf(trailers, sizeof trailers, "grpc-status: 5\ngrpc-message: %s\n", cases[i].sent);
    answer(request(i + 1), trailers);
    expect_status(i + 1, KVRELAY_GRPC_NOT_FOUND, 1);
    cr_expect_str_eq(caller.call[i + 1].status.text, cases[i].text);
  }
  finish_scripted();
}

Test(grpc_client_peers, C18_states_with_reason_and_next_attempt) {
  scripted();
  cr_expect_str_eq(caller.states, "C");
  ready();
  cr_expect_str_eq(caller.states, "CR");
  raw_close(&peer);
  RUN_UNTIL(strlen(caller.states) > 2);
  cr_expect_eq(caller.states[2], 'F');
  cr_expect_str_neq(caller.text, "");
  cr_expect_neq(caller.retry_ns, KVRELAY_TIME_NONE);
  client->base.stop(&client->base, 0);
  RUN_UNTIL(in_state('X'));
  finish_scripted();
}

/* ---- S70 to S74 of the other side: compressed answers ---- */

static void scripted_for_compression(bool accept) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config(NULL);
  cfg.accept_compressed = accept;
  cfg.max_message_bytes = 100000;
  start_scripted(&cfg);
  ready();
}

/* Answers with `len` zeros, compressed. */
static void answer_compressed(uint32_t stream, int encoding, size_t len) {
  char headers[128];
  uint8_t *plain = calloc(1, len), *packed = NULL, *frame;
  size_t packed_len = 0;
  const kvrelay_parts parts = {.part = {{plain, len}}, .part_len = 1, .bytes = len};
  cr_assert_eq(kvrelay_grpc_compress(encoding, &parts, &packed, &packed_len), KVRELAY_TRANSPORT_OK);
  frame = malloc(packed_len + 5);
  memcpy(frame, "\1\0\0", 3);
  frame[3] = (uint8_t)(packed_len >> 8);
  frame[4] = (uint8_t)packed_len;
  memcpy(frame + 5, packed, packed_len);
  snprintf(headers, sizeof headers, ANSWER "grpc-encoding: %s\n",
           kvrelay_grpc_encoding_name(encoding));
  raw_send_headers(&peer, 0, stream, headers);
  raw_send_frame(&peer, RAW_DATA, 0, stream, frame, packed_len + 5);
  raw_send_headers(&peer, NGHTTP2_FLAG_END_STREAM, stream, "grpc-status: 0\n");
  free(plain);
  free(packed);
  free(frame);
}

Test(grpc_client_peers, S70_answers_are_compressed_only_as_offered) {
  raw_frame f;
  scripted_for_compression(true);
  cr_assert_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_OK);
  f = expect_frame(RAW_HEADERS);
  char offer[64];
  snprintf(offer, sizeof offer, "\ngrpc-accept-encoding: %s\n", kvrelay_grpc_encodings());
  cr_expect(strstr(f.headers, offer) != NULL, "%s", f.headers);
  expect_frame(RAW_DATA);
  client->cancel(client, 1);
  for (int encoding = KVRELAY_GRPC_GZIP; encoding <= KVRELAY_GRPC_ZSTD; encoding++) {
    if (kvrelay_grpc_encoding_name(encoding) == NULL)
      continue;
    const uint32_t n = (uint32_t)encoding * 10;
    answer_compressed(request(n), encoding, 100000);
    expect_status(n, KVRELAY_GRPC_OK, 1);
    cr_expect_eq(caller.call[n].bytes, 100000);
    /* S74: a bomb is refused at the bound. */
    answer_compressed(request(n + 1), encoding, 5000000);
    expect_status(n + 1, KVRELAY_GRPC_RESOURCE_EXHAUSTED, 0);
  }
  /* Unknown encodings: what is not compressed is fine, what is cannot be read. */
  uint32_t stream = request(50);
  raw_send_headers(&peer, 0, stream, ANSWER "grpc-encoding: snappy\n");
  raw_send_frame(&peer, RAW_DATA, 0, stream, "\0\0\0\0\2ok\1\0\0\0\1x", 13);
  expect_status(50, KVRELAY_GRPC_INTERNAL, 1);
  finish_scripted();
}

Test(grpc_client_peers, S70_nothing_is_offered_unless_asked) {
  scripted_for_compression(false);
  cr_assert_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_OK);
  const raw_frame f = expect_frame(RAW_HEADERS);
  cr_expect(strstr(f.headers, "grpc-accept-encoding") == NULL);
  expect_frame(RAW_DATA);
  raw_send_headers(&peer, 0, 1, ANSWER "grpc-encoding: gzip\n");
  raw_send_frame(&peer, RAW_DATA, 0, 1, "\1\0\0\0\1x", 6);
  expect_status(1, KVRELAY_GRPC_INTERNAL, 0);
  finish_scripted();
}
