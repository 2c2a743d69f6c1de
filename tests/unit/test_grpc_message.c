/* SPDX-License-Identifier: Apache-2.0 */
/* gRPC's prefix at every split, its percent encoding, its timeout and content type. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transports/grpc/grpc_message.h"

/* Feeds `len` bytes in pieces of `piece` and appends each message to `log` as "length:bytes;". */
static ptrdiff_t feed_all(kvrelay_grpc_inbox *in, const uint8_t *bytes, size_t len, size_t piece,
                          char *log) {
  size_t at = 0;
  log[0] = '\0';
  while (at < len) {
    size_t n = len - at < piece ? len - at : piece;
    /* A copy of exactly this size: reading further is an error that the sanitizer sees. */
    uint8_t *copy = malloc(n);
    memcpy(copy, bytes + at, n);
    size_t used = 0;
    while (used < n) {
      kvrelay_iov message;
      ptrdiff_t r = kvrelay_grpc_inbox_feed(in, copy + used, n - used, &message);
      if (r < 0) {
        free(copy);
        return r;
      }
      cr_assert_gt(r, 0);
      used += (size_t)r;
      if (message.base != NULL)
        sprintf(log + strlen(log), "%zu:%.*s;", message.len, (int)message.len,
                (const char *)message.base);
    }
    free(copy);
    at += n;
  }
  return 0;
}

Test(grpc_message, S5_messages_at_every_split) {
  static const uint8_t wire[] = "\0\0\0\0\5hello\0\0\0\0\0\0\0\0\0\1x\0\0\0\0\13hello world";
  char log[128];
  for (size_t piece = 1; piece <= sizeof wire - 1; piece++) {
    kvrelay_grpc_inbox in;
    kvrelay_grpc_inbox_init(&in, 11);
    cr_assert_eq(feed_all(&in, wire, sizeof wire - 1, piece, log), 0);
    cr_expect_str_eq(log, "5:hello;0:;1:x;11:hello world;", "piece %zu: %s", piece, log);
    cr_expect(kvrelay_grpc_inbox_empty(&in));
    kvrelay_grpc_inbox_free(&in);
  }
}

Test(grpc_message, a_cut_message_is_not_empty) {
  static const uint8_t wire[] = "\0\0\0\0\3ab";
  char log[64];
  for (size_t len = 1; len <= sizeof wire - 1; len++) {
    kvrelay_grpc_inbox in;
    kvrelay_grpc_inbox_init(&in, 100);
    cr_assert_eq(feed_all(&in, wire, len, 1, log), 0);
    cr_expect_not(kvrelay_grpc_inbox_empty(&in), "%zu", len);
    cr_expect_str_eq(log, "");
    kvrelay_grpc_inbox_free(&in);
  }
}

Test(grpc_message, S8_too_long_from_the_prefix_alone) {
  static const struct {
    uint8_t prefix[5];
    ptrdiff_t result;
  } cases[] = {{{0, 0, 0, 0, 100}, 5},
               {{0, 0, 0, 0, 101}, KVRELAY_TRANSPORT_ERR_LIMIT},
               {{0, 0xff, 0xff, 0xff, 0xff}, KVRELAY_TRANSPORT_ERR_LIMIT},
               {{1, 0, 0, 0, 1}, KVRELAY_TRANSPORT_ERR_PROTOCOL},
               {{0x80, 0, 0, 0, 0}, KVRELAY_TRANSPORT_ERR_PROTOCOL}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    kvrelay_grpc_inbox in;
    kvrelay_iov message;
    kvrelay_grpc_inbox_init(&in, 100);
    cr_expect_eq(kvrelay_grpc_inbox_feed(&in, cases[i].prefix, 5, &message), cases[i].result,
                 "case %zu", i);
    cr_expect_null(message.base);
    cr_expect_null(in.body_);
    kvrelay_grpc_inbox_free(&in);
  }
}

Test(grpc_message, room_follows_what_arrived_not_what_was_announced) {
  kvrelay_grpc_inbox in;
  kvrelay_iov message;
  const uint8_t start[] = {0, 0, 0x7f, 0xff, 0xff, 1, 2, 3};
  kvrelay_grpc_inbox_init(&in, 8388608);
  cr_assert_eq(kvrelay_grpc_inbox_feed(&in, start, sizeof start, &message),
               (ptrdiff_t)sizeof start);
  cr_expect_leq(in.body_cap_, 8192);
  kvrelay_grpc_inbox_free(&in);
}

Test(grpc_message, outbox_gives_back_what_was_put_in) {
  /* A naive model beside it: one flat array. */
  enum { CAP = 1 << 20 };
  uint8_t *model = malloc(CAP), *got = malloc(CAP), *message = malloc(20000);
  size_t model_len = 0, got_len = 0;
  kvrelay_grpc_outbox out = {0};
  struct evbuffer *buffer = evbuffer_new();
  uint32_t dice = 1;
  for (int step = 0; step < 400; step++) {
    dice = dice * 1664525 + 1013904223;
    if (kvrelay_grpc_outbox_can_add(&out) && (dice >> 8) % 3 != 0) {
      size_t len = (dice >> 12) % (step % 7 == 0 ? 20000 : 60);
      if (model_len + len + 5 > CAP)
        break;
      for (size_t i = 0; i < len; i++)
        message[i] = (uint8_t)(dice + i);
      kvrelay_parts parts = {
          .part = {{message, len / 2}, {NULL, 0}, {message + len / 2, len - len / 2}},
          .part_len = 3,
          .bytes = len};
      cr_assert_eq(kvrelay_grpc_outbox_add(&out, &parts), KVRELAY_TRANSPORT_OK);
      const uint8_t prefix[5] = {0, 0, 0, (uint8_t)(len >> 8), (uint8_t)len};
      memcpy(model + model_len, prefix, 5);
      memcpy(model + model_len + 5, message, len);
      model_len += 5 + len;
    } else {
      size_t pending = kvrelay_grpc_outbox_pending(&out);
      size_t n = pending == 0 ? 0 : 1 + (dice >> 10) % pending;
      if (n > 0)
        cr_assert_eq(kvrelay_grpc_outbox_move(&out, n, buffer), KVRELAY_TRANSPORT_OK);
    }
    if (step % 5 == 0) /* the socket takes some of it later */
      got_len += (size_t)evbuffer_remove(buffer, got + got_len, (dice >> 16) % 30000);
    memset(message, 0xEE, 20000);
  }
  size_t pending = kvrelay_grpc_outbox_pending(&out);
  if (pending > 0)
    cr_assert_eq(kvrelay_grpc_outbox_move(&out, pending, buffer), KVRELAY_TRANSPORT_OK);
  kvrelay_grpc_outbox_free(&out); /* before the buffer that still holds pieces of it */
  got_len += (size_t)evbuffer_remove(buffer, got + got_len, CAP - got_len);
  cr_assert_gt(model_len, 100000);
  cr_assert_eq(got_len, model_len);
  cr_expect_arr_eq(got, model, model_len);
  evbuffer_free(buffer);
  free(model);
  free(got);
  free(message);
}

Test(grpc_message, S23_percent_encoding_both_ways) {
  static const char text[] =
      "\t\ntest with whitespace\r\nand Unicode BMP \xE2\x98\xBA and non-BMP \xF0\x9F\x98\x88\t\n";
  static const char encoded[] =
      "%09%0Atest with whitespace%0D%0Aand Unicode BMP %E2%98%BA and non-BMP %F0%9F%98%88%09%0A";
  char out[256], back[256];
  size_t n = kvrelay_grpc_percent_encode(text, out, sizeof out);
  cr_assert_eq(n, sizeof encoded - 1);
  cr_expect_arr_eq(out, encoded, n);
  kvrelay_grpc_percent_decode((const uint8_t *)out, n, back, sizeof back);
  cr_expect_str_eq(back, text);
  n = kvrelay_grpc_percent_encode("100 %", out, sizeof out);
  cr_expect_arr_eq(out, "100 %25", 7);
  cr_expect_eq(n, 7);
  cr_expect_eq(kvrelay_grpc_percent_encode("ab\n", out, 4), 2, "an escape is never cut");
}

static const char *decoded(const char *text, size_t cap) {
  static char out[64];
  kvrelay_grpc_percent_decode((const uint8_t *)text, strlen(text), out, cap);
  return out;
}

Test(grpc_message, C15_broken_escapes_stay) {
  cr_expect_str_eq(decoded("a%20b", 64), "a b");
  cr_expect_str_eq(decoded("50%", 64), "50%");
  cr_expect_str_eq(decoded("50%2", 64), "50%2");
  cr_expect_str_eq(decoded("%zz%4", 64), "%zz%4");
  cr_expect_str_eq(decoded("%e2%98%ba", 64), "\xE2\x98\xBA");
  cr_expect_str_eq(decoded("", 64), "");
  cr_expect_str_eq(decoded("abcdef", 4), "abc");
  cr_expect_str_eq(decoded("ab%E2%98%BA", 5), "ab", "cut before a character, not inside");
  cr_expect_str_eq(decoded("ab%E2%98%BA", 6), "ab\xE2\x98\xBA");
  cr_expect_str_eq(decoded("a%E2%98%BAx", 5), "a\xE2\x98\xBA");
  cr_expect_str_eq(decoded("a%FFb%C3", 64), "a?b?", "what is no UTF-8 does not get through");
  cr_expect_str_eq(decoded("%E2%98%BA%98%E2%98x%C0%AF%ED%A0%80", 64),
                   "\xE2\x98\xBA\x3F\x3F\x3Fx\x3F\x3F\x3F\x3F\x3F");
}

Test(grpc_message, S4_timeouts) {
  static const struct {
    const char *text;
    bool good;
    uint64_t ns;
  } cases[] = {{"1n", true, 1},
               {"25u", true, 25000},
               {"100m", true, 100000000},
               {"5S", true, UINT64_C(5000000000)},
               {"2M", true, UINT64_C(120000000000)},
               {"1H", true, UINT64_C(3600000000000)},
               {"99999999H", true, KVRELAY_TIME_NONE},
               {"99999999S", true, UINT64_C(99999999000000000)},
               {"0S", true, 0},
               {"000000001S", false, 0},
               {"S", false, 0},
               {"", false, 0},
               {"5", false, 0},
               {"5s", false, 0},
               {"-5S", false, 0},
               {"5 S", false, 0},
               {" 5S", false, 0},
               {"1.5S", false, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    uint64_t ns = 7;
    bool good =
        kvrelay_grpc_timeout_parse((const uint8_t *)cases[i].text, strlen(cases[i].text), &ns);
    cr_expect_eq(good, cases[i].good, "%s", cases[i].text);
    cr_expect_eq(ns, good ? cases[i].ns : 7, "%s", cases[i].text);
  }
}

Test(grpc_message, S2_content_types) {
  static const struct {
    const char *text;
    int kind;
  } cases[] = {{"application/grpc", KVRELAY_GRPC_CONTENT_PROTO},
               {"application/grpc+proto", KVRELAY_GRPC_CONTENT_PROTO},
               {"application/grpc;charset=utf-8", KVRELAY_GRPC_CONTENT_PROTO},
               {"application/grpc+proto; x=y", KVRELAY_GRPC_CONTENT_PROTO},
               {"application/grpc+json", KVRELAY_GRPC_CONTENT_OTHER},
               {"application/grpc+protobuf", KVRELAY_GRPC_CONTENT_OTHER},
               {"application/grpc-web", KVRELAY_GRPC_CONTENT_FOREIGN},
               {"application/json", KVRELAY_GRPC_CONTENT_FOREIGN},
               {"application/grp", KVRELAY_GRPC_CONTENT_FOREIGN},
               {"", KVRELAY_GRPC_CONTENT_FOREIGN}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    cr_expect_eq(kvrelay_grpc_content_type((const uint8_t *)cases[i].text, strlen(cases[i].text)),
                 cases[i].kind, "%s", cases[i].text);
}
