/* SPDX-License-Identifier: Apache-2.0 */

/*
 * grpc_message.h: any bytes as what a call receives, in pieces of any size, and as the texts of its
 * headers. The messages are those that a reader of the whole stream finds; sent on through an
 * outbox they give the same bytes again. Texts decode as a naive reader says, cut or not.
 *
 * SECURITY.md: 1, 2, 3, 10.
 *
 * Input: limit, size of the pieces, then the bytes.
 */

#include "fuzz.h"
#include "grpc/grpc_message.h"

enum { PREFIX = 5 };

/* Length of the message at the head of the stream with its prefix, 0 = not there yet, or why not.
 */
static ptrdiff_t expect(const uint8_t *bytes, size_t len, size_t max) {
  if (len < PREFIX)
    return 0;
  const size_t body =
      (size_t)bytes[1] << 24 | (size_t)bytes[2] << 16 | (size_t)bytes[3] << 8 | (size_t)bytes[4];
  if (bytes[0] != 0)
    return KVRELAY_TRANSPORT_ERR_PROTOCOL;
  if (body > max)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  return len - PREFIX < body ? 0 : (ptrdiff_t)(PREFIX + body);
}

/* What was received goes out as it came, `piece` bytes at a time. */
static void pass_on(kvrelay_grpc_outbox *out, const uint8_t *stream, size_t len, size_t piece) {
  struct evbuffer *to = evbuffer_new();
  FUZZ_CHECK(to != NULL && kvrelay_grpc_outbox_pending(out) == len);
  while (kvrelay_grpc_outbox_pending(out) > 0) {
    const size_t left = kvrelay_grpc_outbox_pending(out), n = piece < left ? piece : left;
    FUZZ_CHECK(kvrelay_grpc_outbox_move(out, n, to) == KVRELAY_OK);
    FUZZ_CHECK(kvrelay_grpc_outbox_pending(out) == left - n);
  }
  FUZZ_CHECK(evbuffer_get_length(to) == len);
  FUZZ_CHECK(len == 0 || memcmp(evbuffer_pullup(to, -1), stream, len) == 0);
  evbuffer_free(to);
  kvrelay_grpc_outbox_free(out);
}

static void check_stream(const uint8_t *stream, size_t len, size_t max, size_t piece) {
  kvrelay_grpc_inbox in;
  kvrelay_grpc_outbox out = {0};
  size_t at = 0; /* of the message that comes next */
  bool lost = false;
  kvrelay_grpc_inbox_init(&in, max);
  for (size_t fed = 0; fed < len && !lost; fed += piece) {
    const size_t n = piece < len - fed ? piece : len - fed;
    uint8_t *copy = fuzz_copy(stream + fed, n);
    for (size_t used = 0; used < n && !lost;) {
      kvrelay_iov message;
      const ptrdiff_t rc = kvrelay_grpc_inbox_feed(&in, copy + used, n - used, &message);
      const ptrdiff_t want = expect(stream + at, fed + n - at, max);
      if (rc < 0) {
        FUZZ_CHECK(rc == want || (want == 0 && stream[at] != 0));
        lost = true;
        break;
      }
      FUZZ_CHECK(rc > 0 && (size_t)rc <= n - used);
      used += (size_t)rc;
      FUZZ_CHECK(want >= 0 && (message.base != NULL) == (want > 0));
      if (!message.base)
        continue;
      FUZZ_CHECK((ptrdiff_t)(message.len + PREFIX) == want && fed + used == at + (size_t)want);
      FUZZ_CHECK(memcmp(message.base, stream + at + PREFIX, message.len) == 0);
      FUZZ_CHECK(kvrelay_grpc_outbox_can_add(&out) && kvrelay_grpc_inbox_empty(&in));
      const kvrelay_parts parts = {
          .part = {{message.base, message.len}}, .part_len = 1, .bytes = message.len};
      FUZZ_CHECK(kvrelay_grpc_outbox_add(&out, &parts) == KVRELAY_OK);
      at += (size_t)want;
    }
    free(copy);
  }
  FUZZ_CHECK(lost || kvrelay_grpc_inbox_empty(&in) == (at == len));
  kvrelay_grpc_inbox_free(&in);
  pass_on(&out, stream, at, piece);
}

static int hex(uint8_t c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                : -1;
}

/* Bytes of the character that begins here as table 3-7 of the Unicode standard has it, else 0. */
static size_t character(const uint8_t *b, size_t len) {
  static const struct {
    uint8_t from, to, second_from, second_to, len;
  } rows[] = {
      {0x00, 0x7F, 0, 0, 1},       {0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3},
      {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3},
      {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if (b[0] < rows[i].from || b[0] > rows[i].to || len < rows[i].len)
      continue;
    bool good = rows[i].len < 2 || (b[1] >= rows[i].second_from && b[1] <= rows[i].second_to);
    for (size_t k = 2; k < rows[i].len; k++)
      good &= (b[k] & 0xC0) == 0x80;
    return good ? rows[i].len : 0;
  }
  return 0;
}

/* A text that is decoded whole is what each "%" says, '?' for what is no UTF-8; a cut one is its
 * beginning; encoded and decoded again it is the same. */
static void check_percent(const uint8_t *text, size_t len, size_t cap) {
  char *whole = fuzz_alloc(len + 1), *cut = fuzz_alloc(cap), *naive = fuzz_alloc(len + 1);
  size_t n = 0;
  for (size_t i = 0; i < len; n++) {
    const bool escape =
        text[i] == '%' && len - i > 2 && hex(text[i + 1]) >= 0 && hex(text[i + 2]) >= 0;
    naive[n] = (char)(escape ? hex(text[i + 1]) * 16 + hex(text[i + 2]) : text[i]);
    i += escape ? 3 : 1;
  }
  for (size_t i = 0; i < n;) {
    const size_t whole_len = character((const uint8_t *)naive + i, n - i);
    if (whole_len == 0)
      naive[i] = '?';
    i += whole_len != 0 ? whole_len : 1;
  }
  kvrelay_grpc_percent_decode(text, len, whole, len + 1);
  FUZZ_CHECK(strcmp(whole, naive) == 0);
  memset(cut, 'x', cap);
  kvrelay_grpc_percent_decode(text, len, cut, cap);
  FUZZ_CHECK(memchr(cut, 0, cap) != NULL && strncmp(cut, naive, strlen(cut)) == 0);
  FUZZ_CHECK(n < cap || strlen(cut) + 4 >= cap || strlen(cut) == strlen(naive));
  char *encoded = fuzz_alloc(3 * len + 1);
  const size_t encoded_len = kvrelay_grpc_percent_encode(whole, encoded, 3 * len + 1);
  FUZZ_CHECK(encoded_len <= 3 * len);
  for (size_t i = 0; i < encoded_len; i++)
    FUZZ_CHECK(encoded[i] >= 0x20 && encoded[i] <= 0x7E);
  memset(naive, 'x', len + 1);
  kvrelay_grpc_percent_decode((const uint8_t *)encoded, encoded_len, naive, len + 1);
  FUZZ_CHECK(strcmp(whole, naive) == 0);
  free(encoded);
  free(naive);
  free(cut);
  free(whole);
}

static void check_headers(const uint8_t *text, size_t len) {
  static const char proto[] = "application/grpc";
  const int type = kvrelay_grpc_content_type(text, len);
  uint64_t ns = 77;
  size_t digits = 0;
  FUZZ_CHECK(type >= KVRELAY_GRPC_CONTENT_FOREIGN && type <= KVRELAY_GRPC_CONTENT_OTHER);
  FUZZ_CHECK(type == KVRELAY_GRPC_CONTENT_FOREIGN || len >= sizeof proto - 1);
  while (digits < len && text[digits] >= '0' && text[digits] <= '9')
    digits++;
  const bool good = digits >= 1 && digits <= 8 && len == digits + 1 && text[digits] != 0 &&
                    strchr("HMSmun", text[digits]) != NULL;
  FUZZ_CHECK(kvrelay_grpc_timeout_parse(text, len, &ns) == good);
  FUZZ_CHECK(good || ns == 77);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  fuzz_input in = {data, len};
  const size_t max = fuzz_byte(&in), piece = 1 + fuzz_byte(&in);
  size_t got;
  uint8_t *bytes = fuzz_take(&in, in.left, &got);
  check_stream(bytes, got, max, piece);
  check_percent(bytes, got, 1 + max);
  check_headers(bytes, got);
  free(bytes);
  return 0;
}
