/* SPDX-License-Identifier: Apache-2.0 */
/* Frames and prefaces of the raw transport: what the writers write the framer reads, every value of
 * a preface at its borders, texts of peers. Any stream at any cut: tests/fuzz/fuzz_framer.c. */
#include <criterion/criterion.h>
#include <string.h>

#include "kvrelay.h"

/* Feeds one byte at a time; the last frame that was told of, its body in `body`. */
static kvrelay_frame feed_bytes(bool from_client, const uint8_t *bytes, size_t len, uint8_t *body) {
  kvrelay_framer framer;
  kvrelay_frame f, last = {0};
  kvrelay_framer_init_raw(&framer, from_client, 65536);
  for (size_t i = 0; i < len; i++) {
    cr_assert_eq(kvrelay_framer_feed(&framer, bytes + i, 1, &f), 1);
    if (f.type != KVRELAY_FRAME_NONE) {
      memcpy(body + f.offset, f.piece, f.piece_len);
      last = f;
    }
  }
  cr_assert(kvrelay_framer_empty(&framer));
  last.piece = body;
  return last;
}

static uint8_t body[65536];

Test(framing, an_end_says_what_its_status_said) {
  kvrelay_status status = {.grpc = KVRELAY_GRPC_FAILED_PRECONDITION,
                           .reason = KVRELAY_REASON_PRODUCER_CHANGED},
                 got;
  uint8_t out[KVRELAY_RAW_SMALL_CAP];
  for (size_t n = 0; n < sizeof status.text; n++) {
    memset(status.text, 'x', n);
    status.text[n] = '\0';
    const size_t len = kvrelay_raw_end_put(out, 7, &status);
    cr_assert_eq(len, KVRELAY_RAW_HEADER_LEN + 2 + n);
    const kvrelay_frame f = feed_bytes(false, out, len, body);
    cr_assert_eq(f.type, KVRELAY_FRAME_END);
    cr_assert_eq(f.stream, 7);
    kvrelay_frame_status(&f, &got);
    cr_assert_eq(got.grpc, status.grpc);
    cr_assert_eq(got.reason, status.reason);
    cr_assert_str_eq(got.text, status.text);
  }
}

/* An END with any text, as a peer may send it. */
static kvrelay_status read_end(const char *text, size_t text_len) {
  uint8_t wire[KVRELAY_RAW_HEADER_LEN + 2 + KVRELAY_RAW_TEXT_MAX];
  kvrelay_status got;
  kvrelay_raw_header_put(wire, KVRELAY_FRAME_END, 1, 16, (uint32_t)(2 + text_len));
  wire[KVRELAY_RAW_HEADER_LEN] = 0x34;
  wire[KVRELAY_RAW_HEADER_LEN + 1] = 0x12;
  memcpy(wire + KVRELAY_RAW_HEADER_LEN + 2, text, text_len);
  const kvrelay_frame f = feed_bytes(false, wire, KVRELAY_RAW_HEADER_LEN + 2 + text_len, body);
  kvrelay_frame_status(&f, &got);
  cr_expect_eq(got.grpc, 16);
  cr_expect_eq(got.reason, 0x1234); /* one that this version does not know is kept */
  return got;
}

Test(framing, long_texts_are_cut_behind_a_character_and_broken_ones_left_out) {
  char text[KVRELAY_RAW_TEXT_MAX];
  for (size_t lead = 0; lead < 4; lead++) { /* the cut falls on each byte of a character */
    memset(text, 'a', lead);
    for (size_t at = lead; at + 3 <= sizeof text; at += 3)
      memcpy(text + at, "\xE2\x98\xBA", 3);
    const size_t whole = lead + (sizeof text - lead) / 3 * 3;
    const kvrelay_status got = read_end(text, whole);
    const size_t n = strlen(got.text), most = sizeof got.text - 1;
    cr_expect_eq(n, lead + (most - lead) / 3 * 3, "%zu: %zu", lead, n);
    cr_expect(memcmp(got.text, text, n) == 0);
  }
  cr_expect_str_eq(read_end("a\xE2\x98", 3).text, "");
  cr_expect_str_eq(read_end("", 0).text, "");
}

Test(framing, the_number_of_credit_and_goaway) {
  static const uint32_t numbers[] = {0, 1, 0x01020304, INT32_MAX, UINT32_MAX};
  uint8_t out[KVRELAY_RAW_SMALL_CAP];
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    size_t len = kvrelay_raw_credit_put(out, UINT32_MAX, numbers[i]);
    kvrelay_frame f = feed_bytes(true, out, len, body);
    cr_expect_eq(f.type, KVRELAY_FRAME_CREDIT);
    cr_expect_eq(f.stream, UINT32_MAX);
    cr_expect_eq(kvrelay_frame_u32(&f), numbers[i]);
    len = kvrelay_raw_goaway_put(out, KVRELAY_GOAWAY_LIMIT, numbers[i], "body too long");
    f = feed_bytes(i % 2 == 0, out, len, body);
    cr_expect_eq(f.type, KVRELAY_FRAME_GOAWAY);
    cr_expect_eq(f.aux, KVRELAY_GOAWAY_LIMIT);
    cr_expect_eq(kvrelay_frame_u32(&f), numbers[i]);
    cr_expect_eq(f.body_len, 4 + strlen("body too long"));
    cr_expect(memcmp(f.piece + 4, "body too long", 13) == 0);
  }
}

Test(framing, texts_of_ours_never_exceed_their_room) {
  char text[2 * KVRELAY_STATUS_TEXT_CAP];
  uint8_t out[KVRELAY_RAW_SMALL_CAP];
  memset(text, 'x', sizeof text - 1);
  text[sizeof text - 1] = '\0';
  cr_expect_eq(kvrelay_raw_goaway_put(out, KVRELAY_GOAWAY_LIMIT, 1, text), sizeof out - 1);
}

/* One member of a preface, one value, what comes of it. */
static int with(bool from_client, size_t at, size_t bytes, uint64_t value) {
  const kvrelay_raw_preface good = {1, 1, from_client ? 0 : 320, 65536, from_client ? 1 : 0};
  kvrelay_raw_preface got;
  uint8_t wire[KVRELAY_RAW_PREFACE_LEN];
  kvrelay_raw_preface_put(wire, &good);
  for (size_t i = 0; i < bytes; i++)
    wire[at + i] = (uint8_t)(value >> 8 * i);
  return kvrelay_raw_preface_get(wire, sizeof wire, from_client, &got);
}

Test(framing, a_preface_at_its_borders) {
  enum { VERSION = 4, LOWEST = 5, FRAME = 8, CREDIT = 12 };
  const int malformed = KVRELAY_ERR_MALFORMED, other = KVRELAY_ERR_UNSUPPORTED,
            limit = KVRELAY_ERR_LIMIT;
  for (int client = 0; client < 2; client++) {
    cr_expect_eq(with(client, 0, 0, 0), KVRELAY_OK);
    for (size_t at = 0; at < 4; at++)
      cr_expect_eq(with(client, at, 1, 'G'), malformed);
    cr_expect_eq(with(client, VERSION, 1, 0), other);
    cr_expect_eq(with(client, LOWEST, 1, 2), other);
    cr_expect_eq(with(client, LOWEST, 1, 0), limit);
    cr_expect_eq(with(client, FRAME, 4, INT32_MAX), KVRELAY_OK);
    cr_expect_eq(with(client, FRAME, 4, (uint64_t)INT32_MAX + 1), limit);
  }
  cr_expect_eq(with(true, VERSION, 1, 255), KVRELAY_OK); /* a newer client comes down */
  cr_expect_eq(with(false, VERSION, 1, 2), other);       /* a server has chosen */
  cr_expect_eq(with(true, FRAME, 4, 65535), limit);
  cr_expect_eq(with(false, FRAME, 4, 1024), KVRELAY_OK);
  cr_expect_eq(with(false, FRAME, 4, 1023), limit);
  cr_expect_eq(with(true, CREDIT, 4, 0), limit);
  cr_expect_eq(with(true, CREDIT, 4, INT32_MAX), KVRELAY_OK);
  cr_expect_eq(with(true, CREDIT, 4, (uint64_t)INT32_MAX + 1), limit);
  cr_expect_eq(with(false, CREDIT, 4, UINT32_MAX), KVRELAY_OK); /* ignored */
}

/* Places and order of bytes as the protocol has them, not only what our two functions agree on. */
Test(framing, every_member_of_a_preface_has_its_bytes) {
  static const uint8_t wire[KVRELAY_RAW_PREFACE_LEN] = {
      0x4B, 0x56, 0x52, 0x46, 1, 1, 0x40, 0x01, 0xFF, 0x56, 0x34, 0x12, 0x00, 0x00, 0x00, 0x00};
  const kvrelay_raw_preface sent = {1, 1, 0x0140, 0x123456FF, 0};
  kvrelay_raw_preface got;
  uint8_t out[KVRELAY_RAW_PREFACE_LEN];
  kvrelay_raw_preface_put(out, &sent);
  cr_expect_arr_eq(out, wire, sizeof wire);
  cr_expect_eq(kvrelay_raw_preface_get(wire, sizeof wire, false, &got), KVRELAY_OK);
  cr_expect_eq(got.version, 1);
  cr_expect_eq(got.lowest, 1);
  cr_expect_eq(got.max_streams, 320, "%u", got.max_streams);
  cr_expect_eq(got.max_frame, 0x123456FF);
  cr_expect_eq(got.initial_credit, 0);
}

Test(framing, another_protocol_is_known_from_its_first_byte) {
  kvrelay_raw_preface got;
  cr_expect_eq(kvrelay_raw_preface_get(NULL, 0, true, &got), KVRELAY_ERR_TRUNCATED);
  cr_expect_eq(kvrelay_raw_preface_get((const uint8_t *)"P", 1, true, &got), KVRELAY_ERR_MALFORMED);
  cr_expect_eq(kvrelay_raw_preface_get((const uint8_t *)"KVR", 3, true, &got),
               KVRELAY_ERR_TRUNCATED);
  cr_expect_eq(kvrelay_raw_preface_get((const uint8_t *)"KVRX", 4, true, &got),
               KVRELAY_ERR_MALFORMED);
}
