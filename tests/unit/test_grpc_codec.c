/* SPDX-License-Identifier: Apache-2.0 */
/* Compression: what comes back, what is bounded, what is refused; and through a server both ways.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test_grpc_server.h"
#include "transports/grpc/grpc_codec.h"
#include "transports/grpc/grpc_message.h"

enum { LAST = KVRELAY_GRPC_ZSTD };

/* Calls `run` for each encoding of this build; none is fine, it is optional. */
static void for_each_encoding(void (*run)(int encoding)) {
  for (int e = KVRELAY_GRPC_IDENTITY + 1; e <= LAST; e++)
    if (kvrelay_grpc_encoding_name(e) != NULL)
      run(e);
}

static kvrelay_parts parts_of(const uint8_t *bytes, size_t len) {
  kvrelay_parts parts = {
      .part = {{bytes, len / 3}, {bytes + len / 3, 0}, {bytes + len / 3, len - len / 3}},
      .part_len = 3,
      .bytes = len};
  return parts;
}

/* `len` bytes that shrink to about a quarter. */
static uint8_t *dull(size_t len) {
  uint8_t *bytes = malloc(len + 1);
  uint32_t dice = 7;
  for (size_t i = 0; i < len; i++) {
    dice = dice * 1664525 + 1013904223;
    bytes[i] = i % 4 == 0 ? (uint8_t)(dice >> 24) : 0;
  }
  return bytes;
}

static void round_trip(int encoding) {
  for (size_t len = 0; len < 200000; len = len * 3 + 40) {
    uint8_t *bytes = dull(len), *packed = NULL, *back = NULL;
    size_t packed_len = 0, back_len = 0;
    const kvrelay_parts parts = parts_of(bytes, len);
    const int err = kvrelay_grpc_compress(encoding, &parts, &packed, &packed_len);
    if (len < 100) { /* may be too short to shrink */
      cr_expect(err == KVRELAY_TRANSPORT_OK || err == KVRELAY_TRANSPORT_ERR_LIMIT);
    } else {
      cr_assert_eq(err, KVRELAY_TRANSPORT_OK, "%zu", len);
      cr_expect_lt(packed_len, len);
      cr_assert_eq(kvrelay_grpc_decompress(encoding, packed, packed_len, len, &back, &back_len),
                   KVRELAY_TRANSPORT_OK);
      cr_assert_eq(back_len, len);
      cr_expect_arr_eq(back, bytes, len);
      free(back);
      /* One byte less than it needs. */
      cr_expect_eq(kvrelay_grpc_decompress(encoding, packed, packed_len, len - 1, &back, &back_len),
                   KVRELAY_TRANSPORT_ERR_LIMIT);
      /* Cut anywhere, and with something behind it. */
      for (size_t cut = 0; cut < packed_len; cut += 1 + packed_len / 50)
        cr_expect_eq(kvrelay_grpc_decompress(encoding, packed, cut, 2 * len, &back, &back_len),
                     KVRELAY_TRANSPORT_ERR_PROTOCOL, "%zu of %zu", cut, packed_len);
      packed = realloc(packed, packed_len + 3);
      memcpy(packed + packed_len, "abc", 3);
      cr_expect_eq(
          kvrelay_grpc_decompress(encoding, packed, packed_len + 3, 2 * len, &back, &back_len),
          KVRELAY_TRANSPORT_ERR_PROTOCOL);
    }
    if (err == KVRELAY_TRANSPORT_OK)
      free(packed);
    free(bytes);
  }
}

Test(grpc_codec, S73_round_trip) { for_each_encoding(round_trip); }

static void bomb(int encoding) {
  const size_t len = 64 << 20; /* of zeroes */
  uint8_t *zeroes = calloc(1, len), *packed, *back;
  size_t packed_len, back_len;
  const kvrelay_parts parts = {.part = {{zeroes, len}}, .part_len = 1, .bytes = len};
  cr_assert_eq(kvrelay_grpc_compress(encoding, &parts, &packed, &packed_len), KVRELAY_TRANSPORT_OK);
  cr_expect_lt(packed_len, 100000);
  cr_expect_eq(kvrelay_grpc_decompress(encoding, packed, packed_len, 65536, &back, &back_len),
               KVRELAY_TRANSPORT_ERR_LIMIT);
  free(zeroes);
  free(packed);
}

Test(grpc_codec, S74_a_bomb_is_stopped_at_the_limit) { for_each_encoding(bomb); }

static void noise(int encoding) {
  uint32_t dice = 3;
  uint8_t bytes[400], *back;
  size_t back_len;
  for (int round = 0; round < 3000; round++) {
    const size_t len = dice % sizeof bytes;
    for (size_t i = 0; i < len; i++) {
      dice = dice * 1664525 + 1013904223;
      bytes[i] = (uint8_t)(dice >> 24);
    }
    if (len > 10) { /* the beginning of a real one */
      memcpy(bytes,
             encoding == KVRELAY_GRPC_GZIP ? "\x1f\x8b\x08\0\0\0\0\0\0\x03" : "\x28\xb5\x2f\xfd",
             encoding == KVRELAY_GRPC_GZIP ? 10 : 4);
    }
    dice++;
    if (kvrelay_grpc_decompress(encoding, bytes, len, 5000, &back, &back_len) ==
        KVRELAY_TRANSPORT_OK) {
      cr_expect_leq(back_len, 5000);
      free(back);
    }
  }
}

Test(grpc_codec, noise_does_no_harm) { for_each_encoding(noise); }

Test(grpc_codec, S71_names_and_lists) {
  static const char list[] = " gzip ,zstd,, deflate,identity";
  const uint8_t *text = (const uint8_t *)list;
  cr_expect_eq(strncmp(kvrelay_grpc_encodings(), "identity", 8), 0);
  cr_expect_eq(kvrelay_grpc_encoding_find((const uint8_t *)"identity", 8), KVRELAY_GRPC_IDENTITY);
  cr_expect_lt(kvrelay_grpc_encoding_find((const uint8_t *)"deflate", 7), 0);
  cr_expect_lt(kvrelay_grpc_encoding_find((const uint8_t *)"", 0), 0);
  cr_expect_null(kvrelay_grpc_encoding_name(-1));
  cr_expect_null(kvrelay_grpc_encoding_name(LAST + 1));
  for (int e = 1; e <= LAST; e++) {
    const bool there = kvrelay_grpc_encoding_name(e) != NULL;
    cr_expect_eq(kvrelay_grpc_encoding_listed(text, sizeof list - 1, e), there);
    cr_expect_not(kvrelay_grpc_encoding_listed((const uint8_t *)"gzipp,zst", 9, e));
    cr_expect_not(kvrelay_grpc_encoding_listed(NULL, 0, e));
  }
}

/* ---- through inbox and outbox ---- */

static void inbox_splits(int encoding) {
  uint8_t *bytes = dull(3000), wire[8000];
  const kvrelay_parts parts = parts_of(bytes, 3000),
                      small = {.part = {{bytes, 3}}, .part_len = 1, .bytes = 3};
  kvrelay_grpc_outbox out = {0};
  struct evbuffer *to = evbuffer_new();
  cr_assert_eq(kvrelay_grpc_outbox_add_compressed(&out, &parts, encoding), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_grpc_outbox_add_compressed(&out, &small, encoding), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_grpc_outbox_add_compressed(&out, &parts, encoding), KVRELAY_TRANSPORT_OK);
  size_t len = kvrelay_grpc_outbox_pending(&out);
  cr_assert_eq(kvrelay_grpc_outbox_move(&out, len, to), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(evbuffer_remove(to, wire, sizeof wire), (int)len);
  for (size_t piece = 1; piece <= len; piece += piece < 20 ? 1 : 97) {
    kvrelay_grpc_inbox in;
    size_t lengths[4] = {0}, count = 0;
    kvrelay_grpc_inbox_init(&in, 3000);
    kvrelay_grpc_inbox_encoding(&in, encoding);
    for (size_t at = 0; at < len;) {
      size_t n = len - at < piece ? len - at : piece;
      kvrelay_iov message;
      ptrdiff_t used = kvrelay_grpc_inbox_feed(&in, wire + at, n, &message);
      cr_assert_gt(used, 0, "%td", used);
      at += (size_t)used;
      if (message.base != NULL) {
        cr_assert_lt(count, 3);
        cr_expect_arr_eq(message.base, bytes, message.len);
        lengths[count++] = message.len;
      }
    }
    cr_expect(lengths[0] == 3000 && lengths[1] == 3 && lengths[2] == 3000);
    cr_expect(kvrelay_grpc_inbox_empty(&in));
    kvrelay_grpc_inbox_free(&in);
  }
  kvrelay_grpc_outbox_free(&out);
  evbuffer_free(to);
  free(bytes);
}

Test(grpc_codec, S72_compressed_and_plain_messages_at_every_split) {
  for_each_encoding(inbox_splits);
}

/* ---- through a server ---- */

static void send_packed(uint32_t stream, const char *headers, int encoding, const uint8_t *bytes,
                        size_t len, size_t cut) {
  uint8_t *packed = NULL;
  size_t packed_len = 0;
  const kvrelay_parts parts = parts_of(bytes, len);
  cr_assert_eq(kvrelay_grpc_compress(encoding, &parts, &packed, &packed_len), KVRELAY_TRANSPORT_OK);
  packed_len -= cut;
  uint8_t *body = malloc(5 + packed_len);
  kvrelay_grpc_prefix_put(body, (uint32_t)packed_len);
  body[0] = 1;
  memcpy(body + 5, packed, packed_len);
  raw_send_headers(&raw, 0, stream, headers);
  raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, stream, body, 5 + packed_len);
  free(body);
  free(packed);
}

static const char *head_with(int encoding) {
  static char lines[512];
  snprintf(lines, sizeof lines, HEAD "grpc-encoding: %s\n", kvrelay_grpc_encoding_name(encoding));
  return lines;
}

static void requests(int encoding) {
  uint8_t *bytes = dull(5000), *zeroes = calloc(1, 70000);
  start_greeted();
  send_packed(1, head_with(encoding), encoding, bytes, 5000, 0);
  expect_answer(&raw, 1, bytes, 5000);
  /* Flag 0 under an encoding. */
  raw_send_headers(&raw, 0, 3, head_with(encoding));
  raw_send_frame(&raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, 3, "\0\0\0\0\2ok", 7);
  expect_answer(&raw, 3, "ok", 2);
  /* Flag 1 without one. */
  send_packed(5, HEAD, encoding, bytes, 5000, 0);
  only_trailers("grpc-status: 13\n");
  /* Cut short. */
  send_packed(7, head_with(encoding), encoding, bytes, 5000, 1);
  raw_frame f = only_trailers("grpc-status: 13\n");
  cr_expect(has(&f, "decompress"), "%s", f.headers);
  /* Small on the wire, above the limit behind it. */
  send_packed(9, head_with(encoding), encoding, zeroes, 70000, 0);
  only_trailers("grpc-status: 8\n");
  raw_send_headers(&raw, NGHTTP2_FLAG_END_STREAM, 11, HEAD "grpc-encoding: snappy\n");
  f = only_trailers("grpc-status: 12\n");
  cr_expect(has(&f, "grpc-accept-encoding: identity"), "%s", f.headers);
  cr_expect(has(&f, kvrelay_grpc_encoding_name(encoding)), "%s", f.headers);
  finish();
  free(zeroes);
  free(bytes);
}

Test(grpc_codec, S71_S72_S74_requests) { for_each_encoding(requests); }

static bool plain_answers;
static void choose(kvrelay_call *call) { kvrelay_grpc_server_compress(call, !plain_answers); }

/* The flag of the first message of an answer, and whether an encoding was announced. */
static int answer_flag(uint32_t stream, const char *accept, bool *announced) {
  raw_send_request(&raw, stream, TOY "Count", accept, "1 2560", 6);
  raw_frame f = frame_of(RAW_HEADERS);
  *announced = has(&f, "grpc-encoding: ");
  f = frame_of(RAW_DATA);
  const int flag = f.payload[0];
  cr_expect_eq(flag == 0, f.len == 2565);
  frame_of(RAW_HEADERS);
  return flag;
}

static void responses(int encoding) {
  char accept[64];
  bool announced;
  snprintf(accept, sizeof accept, "grpc-accept-encoding: x, %s\n",
           kvrelay_grpc_encoding_name(encoding));
  kvrelay_grpc_server_config cfg = config();
  cfg.response_encodings = 1u << encoding;
  start(&cfg);
  toy.on_open = choose;
  raw_greet(&raw);
  plain_answers = false;
  cr_expect_eq(answer_flag(1, accept, &announced), 1);
  cr_expect(announced);
  cr_expect_eq(answer_flag(3, "", &announced), 0, "the client did not list it");
  cr_expect_not(announced);
  cr_expect_eq(answer_flag(5, "grpc-accept-encoding: snappy\n", &announced), 0);
  cr_expect_not(announced);
  plain_answers = true;
  cr_expect_eq(answer_flag(7, accept, &announced), 0, "the service did not want it");
  cr_expect(announced);
  finish();
  start_greeted(); /* not configured */
  cr_expect_eq(answer_flag(1, accept, &announced), 0);
  cr_expect_not(announced);
  finish();
}

Test(grpc_codec, S70_S73_responses) { for_each_encoding(responses); }
