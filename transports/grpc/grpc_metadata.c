/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_metadata.h"

#include <stdlib.h>
#include <string.h>

/* An entry in memory: two lengths of 16 bits, name, value. */
#define RECORD_HEAD ((size_t)4)
#define HTTP2_ENTRY_COST ((size_t)32)

void kvrelay_grpc_metadata_free(kvrelay_grpc_metadata *m) {
  free(m->records_);
  memset(m, 0, sizeof *m);
}

/* ---- names ---- */

static bool is(const uint8_t *name, size_t len, const char *what) {
  return len == strlen(what) && memcmp(name, what, len) == 0;
}

static bool reserved(const uint8_t *name, size_t len) {
  static const char *const names[] = {
      "connection", "content-length",        "content-type",     "host",
      "keep-alive", "kv-relay-error-reason", "proxy-connection", "te",
      "trailer",    "transfer-encoding",     "upgrade"};
  if (len == 0 || name[0] == ':' || (len >= 5 && memcmp(name, "grpc-", 5) == 0))
    return true;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (is(name, len, names[i]))
      return true;
  return false;
}

static bool legal_name(const uint8_t *name, size_t len) {
  for (size_t i = 0; i < len; i++) {
    uint8_t c = name[i];
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.'))
      return false;
  }
  return !reserved(name, len);
}

static bool legal_text(const uint8_t *value, size_t len) {
  for (size_t i = 0; i < len; i++)
    if (value[i] < 0x20 || value[i] > 0x7E)
      return false;
  return len == 0 || (value[0] != ' ' && value[len - 1] != ' ');
}

static bool binary(const uint8_t *name, size_t len) {
  return len >= 4 && memcmp(name + len - 4, "-bin", 4) == 0;
}

/* ---- base64 ---- */

static size_t base64_len(size_t len) { return len / 3 * 4 + (len % 3 == 0 ? 0 : len % 3 + 1); }

static void base64_encode(const uint8_t *in, size_t len, uint8_t *out) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint32_t bits = 0;
  int held = 0;
  for (size_t i = 0; i < len; i++) {
    bits = bits << 8 | in[i];
    for (held += 8; held >= 6; held -= 6)
      *out++ = (uint8_t)digits[bits >> (held - 6) & 63];
  }
  if (held > 0)
    *out = (uint8_t)digits[bits << (6 - held) & 63];
}

static int base64_value(uint8_t c) {
  if (c >= 'A' && c <= 'Z')
    return c - 'A';
  if (c >= 'a' && c <= 'z')
    return c - 'a' + 26;
  if (c >= '0' && c <= '9')
    return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Returns the length of what was decoded to `out`, which may be `in`; negative: not base64. */
static ptrdiff_t base64_decode(const uint8_t *in, size_t len, uint8_t *out) {
  uint32_t bits = 0;
  int held = 0;
  ptrdiff_t n = 0;
  if (len % 4 == 0)
    for (int pad = 0; pad < 2 && len > 0 && in[len - 1] == '='; pad++)
      len--;
  if (len % 4 == 1)
    return -1;
  for (size_t i = 0; i < len; i++) {
    int value = base64_value(in[i]);
    if (value < 0)
      return -1;
    bits = bits << 6 | (uint32_t)value;
    held += 6;
    if (held >= 8) {
      held -= 8;
      out[n++] = (uint8_t)(bits >> held);
    }
  }
  return n;
}

/* ---- the list ---- */

/* Room for one more entry; `*value` is where its value goes. */
static int append(kvrelay_grpc_metadata *m, const uint8_t *name, size_t name_len, size_t value_len,
                  uint8_t **value) {
  if (m->entries_ == KVRELAY_GRPC_METADATA_ENTRIES || name_len > KVRELAY_GRPC_METADATA_BYTES ||
      value_len > KVRELAY_GRPC_METADATA_BYTES ||
      name_len + value_len + HTTP2_ENTRY_COST > KVRELAY_GRPC_METADATA_BYTES - m->counted_)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  const size_t need = m->len_ + RECORD_HEAD + name_len + value_len;
  if (need > m->cap_) {
    uint8_t *grown = realloc(m->records_, 2 * need);
    if (grown == NULL)
      return KVRELAY_TRANSPORT_ERR_MEMORY;
    m->records_ = grown;
    m->cap_ = 2 * need;
  }
  uint8_t *p = m->records_ + m->len_;
  const uint16_t lengths[2] = {(uint16_t)name_len, (uint16_t)value_len};
  memcpy(p, lengths, RECORD_HEAD);
  memcpy(p + RECORD_HEAD, name, name_len);
  *value = p + RECORD_HEAD + name_len;
  m->len_ = need;
  m->counted_ += name_len + value_len + HTTP2_ENTRY_COST;
  m->entries_++;
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_grpc_metadata_add(kvrelay_grpc_metadata *m, const char *name_, const void *value,
                              size_t len) {
  const uint8_t *name = (const uint8_t *)name_;
  const size_t name_len = strlen(name_);
  const bool encode = binary(name, name_len);
  uint8_t *to;
  if (!legal_name(name, name_len) || (!encode && !legal_text(value, len)))
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (len > KVRELAY_GRPC_METADATA_BYTES)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  const int err = append(m, name, name_len, encode ? base64_len(len) : len, &to);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  if (encode)
    base64_encode(value, len, to);
  else if (len > 0)
    memcpy(to, value, len);
  return KVRELAY_TRANSPORT_OK;
}

/* One of the values between commas. */
static int receive_binary(kvrelay_grpc_metadata *m, const uint8_t *name, size_t name_len,
                          const uint8_t *value, size_t len) {
  uint8_t *to;
  while (len > 0 && value[0] == ' ') {
    value++;
    len--;
  }
  while (len > 0 && value[len - 1] == ' ')
    len--;
  const size_t before_len = m->len_, before_counted = m->counted_;
  const int err = append(m, name, name_len, len, &to);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  const ptrdiff_t decoded = base64_decode(value, len, to);
  if (decoded < 0) {
    m->len_ = before_len;
    m->counted_ = before_counted;
    m->entries_--;
    return KVRELAY_TRANSPORT_ERR_PROTOCOL;
  }
  const uint16_t value_len = (uint16_t)decoded;
  memcpy(m->records_ + before_len + 2, &value_len, sizeof value_len);
  m->len_ -= len - (size_t)decoded;
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_grpc_metadata_receive(kvrelay_grpc_metadata *m, const uint8_t *name, size_t name_len,
                                  const uint8_t *value, size_t value_len) {
  uint8_t *to;
  if (reserved(name, name_len))
    return KVRELAY_TRANSPORT_OK;
  if (!binary(name, name_len)) {
    const int err = append(m, name, name_len, value_len, &to);
    if (err == KVRELAY_TRANSPORT_OK && value_len > 0)
      memcpy(to, value, value_len);
    return err;
  }
  for (;;) {
    const uint8_t *comma = value_len > 0 ? memchr(value, ',', value_len) : NULL;
    const size_t len = comma != NULL ? (size_t)(comma - value) : value_len;
    const int err = receive_binary(m, name, name_len, value, len);
    if (err != KVRELAY_TRANSPORT_OK || comma == NULL)
      return err;
    value += len + 1;
    value_len -= len + 1;
  }
}

bool kvrelay_grpc_metadata_next(const kvrelay_grpc_metadata *m, size_t *cursor, kvrelay_iov *name,
                                kvrelay_iov *value) {
  uint16_t lengths[2];
  if (*cursor >= m->len_)
    return false;
  const uint8_t *p = m->records_ + *cursor;
  memcpy(lengths, p, RECORD_HEAD);
  *name = (kvrelay_iov){p + RECORD_HEAD, lengths[0]};
  *value = (kvrelay_iov){p + RECORD_HEAD + lengths[0], lengths[1]};
  *cursor += RECORD_HEAD + lengths[0] + lengths[1];
  return true;
}

bool kvrelay_grpc_metadata_find(const kvrelay_grpc_metadata *m, const char *name, size_t *cursor,
                                kvrelay_iov *value) {
  kvrelay_iov found;
  while (kvrelay_grpc_metadata_next(m, cursor, &found, value))
    if (is(found.base, found.len, name))
      return true;
  return false;
}
