/* SPDX-License-Identifier: Apache-2.0 */
/* What travels beside the messages: names, base64, bounds; and through a server both ways. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test_grpc_server.h"
#include "transports/grpc/grpc_metadata.h"

/* ---- the list ---- */

/* All entries as "name=value;", bytes that are not printable as \xNN. */
static const char *listed(const kvrelay_grpc_metadata *m) {
  static char text[4096];
  kvrelay_iov name, value;
  size_t n = 0;
  text[0] = '\0';
  for (size_t cursor = 0; kvrelay_grpc_metadata_next(m, &cursor, &name, &value);) {
    n += (size_t)sprintf(text + n, "%.*s=", (int)name.len, (const char *)name.base);
    for (size_t i = 0; i < value.len; i++)
      n += (size_t)sprintf(
          text + n, value.base[i] > 0x20 && value.base[i] < 0x7F ? "%c" : "\\x%02x", value.base[i]);
    n += (size_t)sprintf(text + n, ";");
  }
  return text;
}

static int add(kvrelay_grpc_metadata *m, const char *name, const char *value) {
  return kvrelay_grpc_metadata_add(m, name, value, strlen(value));
}

static int receive(kvrelay_grpc_metadata *m, const char *name, const char *value) {
  return kvrelay_grpc_metadata_receive(m, (const uint8_t *)name, strlen(name),
                                       (const uint8_t *)value, strlen(value));
}

Test(grpc_metadata, S9_what_is_sent) {
  kvrelay_grpc_metadata m = {0};
  cr_expect_eq(add(&m, "x-one", "a value, with a comma"), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(add(&m, "x-one", ""), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_grpc_metadata_add(&m, "b-bin", "\xab\xab\xab", 3), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_grpc_metadata_add(&m, "b-bin", "\0", 1), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_grpc_metadata_add(&m, "b-bin", "\xff\xfe", 2), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_grpc_metadata_add(&m, "b-bin", NULL, 0), KVRELAY_TRANSPORT_OK);
  cr_expect_str_eq(listed(&m),
                   "x-one=a\\x20value,\\x20with\\x20a\\x20comma;x-one=;b-bin=q6ur;b-bin="
                   "AA;b-bin=//4;b-bin=;");
  kvrelay_grpc_metadata_free(&m);
}

Test(grpc_metadata, S9_names_and_values_that_are_refused) {
  static const char *const names[] = {"",
                                      "X-Upper",
                                      ":path",
                                      "a b",
                                      "grpc-status",
                                      "grpc-",
                                      "content-type",
                                      "te",
                                      "connection",
                                      "host",
                                      "kv-relay-error-reason",
                                      "n\xc3\xa4me",
                                      "a:b",
                                      "content-length"};
  static const char *const values[] = {"a\n", "\t", "\x7f", "caf\xc3\xa9", " a", "a "};
  kvrelay_grpc_metadata m = {0};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    cr_expect_eq(add(&m, names[i], "x"), KVRELAY_TRANSPORT_ERR_ARG, "%s", names[i]);
  for (size_t i = 0; i < sizeof values / sizeof *values; i++)
    cr_expect_eq(add(&m, "x", values[i]), KVRELAY_TRANSPORT_ERR_ARG, "%s", values[i]);
  cr_expect_str_eq(listed(&m), "");
}

Test(grpc_metadata, S9_what_is_received) {
  kvrelay_grpc_metadata m = {0};
  static const char *const good[][2] = {
      {"x", "as it is, with comma"}, {"b-bin", "q6ur"},  {"b-bin", "AA=="},    {"b-bin", "AA"},
      {"b-bin", "//4=, AAEC,,Zm9v"}, {"grpc-x", "none"}, {"te", "trailers"},   {":path", "/"},
      {"content-type", "x"},         {"x", ""},          {"user-agent", "me"}, {"b-bin", "//4="}};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++)
    cr_expect_eq(receive(&m, good[i][0], good[i][1]), KVRELAY_TRANSPORT_OK, "%s", good[i][1]);
  cr_expect_str_eq(listed(&m),
                   "x=as\\x20it\\x20is,\\x20with\\x20comma;b-bin=\\xab\\xab\\xab;b-bin=\\x00;b-bin="
                   "\\x00;b-bin=\\xff\\xfe;b-bin=\\x00\\x01\\x02;b-bin=;b-bin=foo;x=;user-agent=me;"
                   "b-bin=\\xff\\xfe;");
  static const char *const bad[] = {"A",    "A===",     "AAAAA", "A*AA",   "AA=A", "=",
                                    "====", "AAAA====", "AA\n",  "AA==,A", "AA-_"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    cr_expect_eq(receive(&m, "b-bin", bad[i]), KVRELAY_TRANSPORT_ERR_PROTOCOL, "%s", bad[i]);
  kvrelay_grpc_metadata_free(&m);
}

Test(grpc_metadata, every_length_comes_back) {
  uint8_t bytes[300];
  for (size_t len = 0; len < sizeof bytes; len++) {
    kvrelay_grpc_metadata sent = {0}, got = {0};
    kvrelay_iov name, value;
    size_t cursor = 0;
    for (size_t i = 0; i < len; i++)
      bytes[i] = (uint8_t)(i * 37 + len * 101);
    cr_assert_eq(kvrelay_grpc_metadata_add(&sent, "x-bin", bytes, len), KVRELAY_TRANSPORT_OK);
    cr_assert(kvrelay_grpc_metadata_next(&sent, &cursor, &name, &value));
    cr_expect_null(value.len > 0 ? memchr(value.base, '=', value.len) : NULL);
    cr_assert_eq(kvrelay_grpc_metadata_receive(&got, name.base, name.len, value.base, value.len),
                 KVRELAY_TRANSPORT_OK);
    cursor = 0;
    cr_assert(kvrelay_grpc_metadata_find(&got, "x-bin", &cursor, &value));
    cr_assert_eq(value.len, len);
    cr_expect_arr_eq(value.base, bytes, len);
    cr_expect_not(kvrelay_grpc_metadata_find(&got, "x-bin", &cursor, &value));
    kvrelay_grpc_metadata_free(&sent);
    kvrelay_grpc_metadata_free(&got);
  }
}

Test(grpc_metadata, S10_a_list_is_bounded) {
  kvrelay_grpc_metadata m = {0};
  char *large = calloc(1, KVRELAY_GRPC_METADATA_BYTES + 1);
  for (int i = 0; i < KVRELAY_GRPC_METADATA_ENTRIES; i++)
    cr_expect_eq(add(&m, "x", "y"), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(add(&m, "x", "y"), KVRELAY_TRANSPORT_ERR_LIMIT);
  kvrelay_grpc_metadata_free(&m);
  memset(large, 'a', KVRELAY_GRPC_METADATA_BYTES);
  cr_expect_eq(add(&m, "x", large), KVRELAY_TRANSPORT_ERR_LIMIT);
  cr_expect_eq(add(&m, "x-bin", large), KVRELAY_TRANSPORT_ERR_LIMIT);
  large[KVRELAY_GRPC_METADATA_BYTES - 32] = '\0';
  cr_expect_eq(add(&m, "x", large), KVRELAY_TRANSPORT_ERR_LIMIT);
  cr_expect_eq(add(&m, "x", large + 1), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(add(&m, "x", ""), KVRELAY_TRANSPORT_ERR_LIMIT);
  kvrelay_grpc_metadata_free(&m);
  memset(large, ',', 200);
  large[200] = '\0';
  cr_expect_eq(receive(&m, "x-bin", large), KVRELAY_TRANSPORT_ERR_LIMIT, "200 empty values");
  kvrelay_grpc_metadata_free(&m);
  free(large);
}

/* ---- through a server ---- */

/* Gives each request's metadata back: "x-text" before the messages, "x-bytes-bin" behind them. */
static void on_open(kvrelay_call *call) {
  kvrelay_iov value;
  for (size_t cursor = 0; kvrelay_grpc_server_metadata(call, "x-text", &cursor, &value);)
    cr_expect_eq(kvrelay_grpc_server_add_initial(call, "x-text", value.base, value.len),
                 KVRELAY_TRANSPORT_OK);
  for (size_t cursor = 0; kvrelay_grpc_server_metadata(call, "x-bytes-bin", &cursor, &value);)
    cr_expect_eq(kvrelay_grpc_server_add_trailing(call, "x-bytes-bin", value.base, value.len),
                 KVRELAY_TRANSPORT_OK);
}

static void start_echoing(bool keep) {
  kvrelay_grpc_server_config cfg = config();
  cfg.request_metadata = keep;
  start(&cfg);
  toy.on_open = on_open;
  raw_greet(&raw);
}

#define BOTH "x-text: one\nx-text: two\nx-bytes-bin: q6ur, AA==\n"

Test(grpc_metadata, S9_both_ways_through_a_call) {
  start_echoing(true);
  raw_send_request(&raw, 1, TOY "Echo", BOTH, "hello", 5);
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect_str_eq(f.headers,
                   ":status: 200\ncontent-type: application/grpc\nx-text: one\nx-text: two\n");
  cr_expect_eq(frame_of(RAW_DATA).len, 10);
  f = frame_of(RAW_HEADERS);
  cr_expect_str_eq(f.headers, "grpc-status: 0\nx-bytes-bin: q6ur\nx-bytes-bin: AA\n");
  finish();
}

Test(grpc_metadata, S21_with_a_refusal) {
  start_echoing(true);
  raw_send_request(&raw, 1, TOY "Refuse", "x-bytes-bin: AA==\n", "5 0 no", 6);
  raw_frame f = only_trailers("grpc-status: 5\n");
  cr_expect(has(&f, "x-bytes-bin: AA\n"), "%s", f.headers);
  /* What belongs before the messages stays there, also when there are none. */
  raw_send_request(&raw, 3, TOY "Refuse", BOTH, "5 0 no", 6);
  f = frame_of(RAW_HEADERS);
  cr_expect_not(f.flags & NGHTTP2_FLAG_END_STREAM);
  cr_expect(has(&f, "x-text: one\nx-text: two\n"), "%s", f.headers);
  f = frame_of(RAW_HEADERS);
  cr_expect(f.flags & NGHTTP2_FLAG_END_STREAM);
  cr_expect_str_eq(f.headers,
                   "grpc-status: 5\ngrpc-message: no\nx-bytes-bin: q6ur\nx-bytes-bin: AA\n");
  /* Also for a method that is not there. */
  raw_send_request(&raw, 5, TOY "Nope", "x-bytes-bin: AA==\n", "", 0);
  f = only_trailers("grpc-status: 12\n");
  cr_expect(has(&f, "x-bytes-bin: AA\n"), "%s", f.headers);
  finish();
}

Test(grpc_metadata, S9_unread_unless_asked_for) {
  start_echoing(false);
  raw_send_request(&raw, 1, TOY "Echo", BOTH "x-bytes-bin: *\n", "hello", 5);
  expect_answer(&raw, 1, "hello", 5);
  finish();
}

Test(grpc_metadata, S9_what_does_not_decode_or_fit) {
  char many[4096] = "";
  start_echoing(true);
  raw_send_request(&raw, 1, TOY "Echo", "x-bytes-bin: A\n", "", 0);
  raw_frame f = only_trailers("grpc-status: 13\n");
  cr_expect(has(&f, "base64"), "%s", f.headers);
  strcpy(many, "x-bytes-bin: ");
  for (int i = 0; i < KVRELAY_GRPC_METADATA_ENTRIES; i++)
    strcat(many, "AA,");
  strcat(many, "AA\n");
  raw_send_request(&raw, 3, TOY "Echo", many, "", 0);
  f = only_trailers("grpc-status: 8\n");
  cr_expect_eq(toy.opened, 0);
  raw_send_request(&raw, 5, TOY "Echo", "grpc-trace-bin: *\n", "fine", 4);
  expect_answer(&raw, 5, "fine", 4);
  finish();
}

static kvrelay_call *seen;
static void remember(kvrelay_call *call) { seen = call; }

Test(grpc_metadata, too_late_and_not_ours) {
  kvrelay_call foreign = {.wake = NULL};
  kvrelay_iov value;
  size_t cursor = 0;
  start_echoing(true);
  toy.on_open = remember;
  raw_send_request(&raw, 1, TOY "Silent", "", "", 0);
  frame_of(RAW_HEADERS);
  cr_expect_eq(kvrelay_grpc_server_add_initial(seen, "x", "y", 1), KVRELAY_TRANSPORT_CLOSED);
  cr_expect_eq(kvrelay_grpc_server_add_trailing(seen, "x", "y", 1), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_grpc_server_add_trailing(seen, "X", "y", 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(kvrelay_grpc_server_add_initial(&foreign, "x", "y", 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(kvrelay_grpc_server_add_trailing(&foreign, "x", "y", 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_not(kvrelay_grpc_server_metadata(&foreign, "x", &cursor, &value));
  toy_service_release(&toy);
  frame_of(RAW_DATA);
  cr_expect_str_eq(frame_of(RAW_HEADERS).headers, "grpc-status: 0\nx: y\n");
  finish();
}
