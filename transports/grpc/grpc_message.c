/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_message.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Room of a message that arrives in pieces grows by what arrived, never by what was announced. */
#define INBOX_FIRST_CAP ((size_t)4096)
/* A piece this long is lent to the output buffer; below it a copy is cheaper than the bookkeeping.
 */
#define LEND_MIN ((size_t)4096)
/* Room an outbox starts with: a few small messages. */
#define BLOB_FIRST_CAP ((size_t)256)
/* Room that is kept without being needed. */
#define KEEP_CAP ((size_t)65536)

/* ---- inbox ---- */

void kvrelay_grpc_inbox_init(kvrelay_grpc_inbox *in, size_t max_bytes) {
  memset(in, 0, sizeof *in);
  in->max_bytes_ = max_bytes;
  kvrelay_framer_init_grpc(&in->framer_, max_bytes < UINT32_MAX ? (uint32_t)max_bytes : UINT32_MAX);
}

void kvrelay_grpc_inbox_encoding(kvrelay_grpc_inbox *in, int encoding) { in->encoding_ = encoding; }

static void inbox_drop_body(kvrelay_grpc_inbox *in) {
  free(in->body_);
  in->body_ = NULL;
  in->body_cap_ = 0;
}

void kvrelay_grpc_inbox_free(kvrelay_grpc_inbox *in) {
  inbox_drop_body(in);
  free(in->plain_);
  in->plain_ = NULL;
}

bool kvrelay_grpc_inbox_empty(const kvrelay_grpc_inbox *in) {
  return kvrelay_framer_empty(&in->framer_);
}

/* Joins a piece to those before it. */
static bool inbox_join(kvrelay_grpc_inbox *in, const kvrelay_frame *f) {
  size_t cap = (size_t)f->offset + f->piece_len;
  if (f->offset == 0 && in->body_cap_ > KEEP_CAP && f->body_len < in->body_cap_ / 4)
    inbox_drop_body(in); /* the large message was an exception */
  if (cap > in->body_cap_) {
    size_t grown = in->body_cap_ < INBOX_FIRST_CAP ? INBOX_FIRST_CAP : 2 * in->body_cap_;
    if (grown > f->body_len)
      grown = f->body_len;
    if (grown < cap)
      grown = cap;
    uint8_t *body = realloc(in->body_, grown);
    if (body == NULL)
      return false;
    in->body_ = body;
    in->body_cap_ = grown;
  }
  memcpy(in->body_ + f->offset, f->piece, f->piece_len);
  return true;
}

/* The framer knows plain messages only: it sees the flag of a compressed one as 0. */
static ptrdiff_t inbox_frame(kvrelay_grpc_inbox *in, const uint8_t *bytes, size_t len,
                             kvrelay_frame *f) {
  if (len == 0 || !kvrelay_framer_empty(&in->framer_))
    return kvrelay_framer_feed(&in->framer_, bytes, len, f);
  static const uint8_t plain_flag;
  in->flagged_ = bytes[0] == 1 && in->encoding_ != KVRELAY_GRPC_IDENTITY;
  const ptrdiff_t used =
      kvrelay_framer_feed(&in->framer_, in->flagged_ ? &plain_flag : bytes, 1, f);
  if (used != 1)
    return used;
  const ptrdiff_t rest = kvrelay_framer_feed(&in->framer_, bytes + 1, len - 1, f);
  return rest < 0 ? rest : 1 + rest;
}

static int inbox_decompress(kvrelay_grpc_inbox *in, kvrelay_iov *message) {
  const int err = kvrelay_grpc_decompress(in->encoding_, message->base, message->len,
                                          in->max_bytes_, &in->plain_, &message->len);
  message->base = err == KVRELAY_TRANSPORT_OK ? in->plain_ : NULL;
  return err;
}

ptrdiff_t kvrelay_grpc_inbox_feed(kvrelay_grpc_inbox *in, const uint8_t *bytes, size_t len,
                                  kvrelay_iov *message) {
  kvrelay_frame f;
  free(in->plain_);
  in->plain_ = NULL;
  ptrdiff_t used = inbox_frame(in, bytes, len, &f);
  message->base = NULL;
  message->len = 0;
  if (used < 0)
    return used == KVRELAY_ERR_LIMIT ? KVRELAY_TRANSPORT_ERR_LIMIT : KVRELAY_TRANSPORT_ERR_PROTOCOL;
  if (f.type == KVRELAY_FRAME_NONE)
    return used;
  bool whole = f.piece_len == f.body_len;
  if (!whole && !inbox_join(in, &f))
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  if (kvrelay_frame_done(&f)) {
    message->base = whole ? f.piece : in->body_;
    message->len = f.body_len;
    const int err = in->flagged_ ? inbox_decompress(in, message) : KVRELAY_TRANSPORT_OK;
    if (err != KVRELAY_TRANSPORT_OK)
      return err;
  }
  return used;
}

/* ---- outbox ---- */

struct kvrelay_grpc_blob {
  size_t refs; /* the outbox, and each piece an output buffer still holds */
  size_t len, cap;
  uint8_t bytes[];
};

static void blob_drop(struct kvrelay_grpc_blob *blob) {
  if (blob != NULL && --blob->refs == 0)
    free(blob);
}

static void blob_returned(const void *data, size_t len, void *blob) {
  (void)data;
  (void)len;
  blob_drop(blob);
}

static void outbox_drop_blob(kvrelay_grpc_outbox *out) {
  blob_drop(out->blob_);
  out->blob_ = NULL;
  out->off_ = 0;
}

void kvrelay_grpc_outbox_free(kvrelay_grpc_outbox *out) {
  outbox_drop_blob(out);
  out->kept_len_ = 0;
}

size_t kvrelay_grpc_outbox_held(const kvrelay_grpc_outbox *out) {
  return out->blob_ == NULL ? 0 : out->blob_->len - out->off_;
}

static size_t outbox_kept(const kvrelay_grpc_outbox *out) {
  size_t sum = 0;
  for (size_t i = out->kept_first_; i < out->kept_len_; i++)
    sum += out->kept_[i].len;
  return sum;
}

size_t kvrelay_grpc_outbox_pending(const kvrelay_grpc_outbox *out) {
  return kvrelay_grpc_outbox_held(out) + outbox_kept(out);
}

bool kvrelay_grpc_outbox_can_add(kvrelay_grpc_outbox *out) {
  out->waits_ = out->using_ > 0 || outbox_kept(out) > 0;
  return !out->waits_ &&
         (out->blob_ == NULL || out->blob_->refs == 1 || kvrelay_grpc_outbox_held(out) == 0);
}

/* Room for `more` bytes in a blob that nobody else reads. */
static bool outbox_reserve(kvrelay_grpc_outbox *out, size_t more) {
  struct kvrelay_grpc_blob *blob = out->blob_;
  size_t pending = kvrelay_grpc_outbox_held(out);
  if (blob != NULL && blob->refs == 1) {
    if (out->off_ > 0 && pending > 0)
      memmove(blob->bytes, blob->bytes + out->off_, pending);
    blob->len = pending;
    out->off_ = 0;
    if (more <= blob->cap - pending)
      return true;
  }
  bool own = blob != NULL && blob->refs == 1;
  size_t cap = own && blob->cap > (pending + more) / 2 ? 2 * blob->cap : pending + more;
  if (cap < BLOB_FIRST_CAP)
    cap = BLOB_FIRST_CAP;
  struct kvrelay_grpc_blob *grown = realloc(own ? blob : NULL, sizeof *grown + cap);
  if (grown == NULL)
    return false;
  if (!own) {
    blob_drop(blob);
    grown->refs = 1;
    grown->len = 0;
    out->off_ = 0;
  }
  grown->cap = cap;
  out->blob_ = grown;
  return true;
}

/* Behind the bytes that are there, for which there is room. */
static void outbox_put(kvrelay_grpc_outbox *out, const kvrelay_iov *parts, size_t len) {
  for (size_t i = 0; i < len; i++) {
    if (parts[i].len > 0)
      memcpy(out->blob_->bytes + out->blob_->len, parts[i].base, parts[i].len);
    out->blob_->len += parts[i].len;
  }
}

int kvrelay_grpc_outbox_add(kvrelay_grpc_outbox *out, const kvrelay_parts *parts) {
  const size_t copied = parts->part_len - parts->kept_len;
  size_t kept = 0;
  for (size_t i = copied; i < parts->part_len; i++)
    kept += parts->part[i].len;
  if (parts->bytes > UINT32_MAX ||
      !outbox_reserve(out, KVRELAY_GRPC_PREFIX_LEN + parts->bytes - kept))
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  kvrelay_grpc_prefix_put(out->blob_->bytes + out->blob_->len, (uint32_t)parts->bytes);
  out->blob_->len += KVRELAY_GRPC_PREFIX_LEN;
  outbox_put(out, parts->part, copied);
  memcpy(out->kept_, parts->part + copied, parts->kept_len * sizeof *out->kept_);
  out->kept_first_ = 0;
  out->kept_len_ = (uint8_t)parts->kept_len;
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_grpc_outbox_add_compressed(kvrelay_grpc_outbox *out, const kvrelay_parts *parts,
                                       int encoding) {
  uint8_t *packed;
  size_t packed_len;
  int err = kvrelay_grpc_compress(encoding, parts, &packed, &packed_len);
  if (err != KVRELAY_TRANSPORT_OK) /* not shorter, or not possible */
    return kvrelay_grpc_outbox_add(out, parts);
  const kvrelay_parts one = {.part = {{packed, packed_len}}, .part_len = 1, .bytes = packed_len};
  err = kvrelay_grpc_outbox_add(out, &one);
  if (err == KVRELAY_TRANSPORT_OK)
    out->blob_->bytes[out->blob_->len - packed_len - KVRELAY_GRPC_PREFIX_LEN] = 1;
  free(packed);
  return err;
}

static int outbox_move_blob(kvrelay_grpc_outbox *out, size_t n, struct evbuffer *to) {
  struct kvrelay_grpc_blob *blob = out->blob_;
  const uint8_t *from = blob->bytes + out->off_;
  if (n < LEND_MIN) {
    if (evbuffer_add(to, from, n) != 0)
      return KVRELAY_TRANSPORT_ERR_MEMORY;
  } else {
    if (evbuffer_add_reference(to, from, n, blob_returned, blob) != 0)
      return KVRELAY_TRANSPORT_ERR_MEMORY;
    blob->refs++;
  }
  out->off_ += n;
  if (out->off_ == blob->len && blob->cap > KEEP_CAP)
    outbox_drop_blob(out);
  return KVRELAY_TRANSPORT_OK;
}

static void kept_returned(const void *data, size_t len, void *out_) {
  kvrelay_grpc_outbox *out = out_;
  (void)data;
  (void)len;
  if (--out->using_ == 0 && out->waits_ && out->returned != NULL)
    out->returned(out);
}

int kvrelay_grpc_outbox_move(kvrelay_grpc_outbox *out, size_t n, struct evbuffer *to) {
  size_t own = kvrelay_grpc_outbox_held(out);
  if (own > n)
    own = n;
  if (own > 0 && outbox_move_blob(out, own, to) != KVRELAY_TRANSPORT_OK)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  for (n -= own; n > 0;) {
    kvrelay_iov *kept = &out->kept_[out->kept_first_];
    const size_t some = kept->len < n ? kept->len : n;
    if (some >= LEND_MIN) {
      if (evbuffer_add_reference(to, kept->base, some, kept_returned, out) != 0)
        return KVRELAY_TRANSPORT_ERR_MEMORY;
      out->using_++;
    } else if (evbuffer_add(to, kept->base, some) != 0) {
      return KVRELAY_TRANSPORT_ERR_MEMORY;
    }
    kept->base += some;
    kept->len -= some;
    n -= some;
    if (kept->len == 0)
      out->kept_first_++;
  }
  return KVRELAY_TRANSPORT_OK;
}

static void copy_returned(const void *data, size_t len, void *copy) {
  (void)data;
  (void)len;
  free(copy);
}

/* Bytes of its own instead of those that it borrowed. */
static bool buffer_own(struct evbuffer *buffer) {
  const size_t len = evbuffer_get_length(buffer);
  if (len == 0)
    return true;
  uint8_t *const copy = malloc(len);
  if (copy != NULL)
    (void)evbuffer_copyout(buffer, copy, len);
  (void)evbuffer_drain(buffer, len);
  if (copy != NULL && evbuffer_add_reference(buffer, copy, len, copy_returned, copy) == 0)
    return true;
  free(copy);
  return false;
}

int kvrelay_grpc_outbox_give_back(kvrelay_grpc_outbox *out, struct evbuffer *to) {
  const size_t kept = outbox_kept(out);
  out->waits_ = false; /* who gives back knows */
  bool good = (out->using_ == 0 && kept == 0) || buffer_own(to);
  if (good && kept > 0 && (good = outbox_reserve(out, kept))) /* `to` uses no blob either, now */
    outbox_put(out, out->kept_ + out->kept_first_, (size_t)out->kept_len_ - out->kept_first_);
  out->kept_len_ = 0;
  if (good)
    return KVRELAY_TRANSPORT_OK;
  (void)evbuffer_drain(to, evbuffer_get_length(to));
  kvrelay_grpc_outbox_free(out);
  return KVRELAY_TRANSPORT_ERR_MEMORY;
}

/* ---- texts ---- */

static bool plain(unsigned char c) { return c >= 0x20 && c <= 0x7E && c != '%'; }

size_t kvrelay_grpc_percent_encode(const char *text, char *out, size_t cap) {
  static const char digits[] = "0123456789ABCDEF";
  size_t n = 0;
  for (; *text != '\0'; text++) {
    unsigned char c = (unsigned char)*text;
    size_t need = plain(c) ? 1 : 3;
    if (need > cap - n)
      break;
    if (need == 1) {
      out[n++] = *text;
    } else {
      out[n++] = '%';
      out[n++] = digits[c >> 4];
      out[n++] = digits[c & 15];
    }
  }
  return n;
}

static int hex_value(uint8_t c) {
  if (c >= '0' && c <= '9')
    return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

void kvrelay_grpc_percent_decode(const uint8_t *text, size_t len, char *out, size_t cap) {
  size_t n = 0, i = 0;
  while (i < len && n + 1 < cap) {
    int high = -1, low = -1;
    if (text[i] == '%' && len - i > 2) {
      high = hex_value(text[i + 1]);
      low = hex_value(text[i + 2]);
    }
    if (high >= 0 && low >= 0) {
      out[n++] = (char)(high << 4 | low);
      i += 3;
    } else {
      out[n++] = (char)text[i++];
    }
  }
  if (i < len) { /* cut: take back the beginning of a character */
    size_t start = n;
    while (start > 0 && n - start < 3 && ((unsigned char)out[start - 1] & 0xC0) == 0x80)
      start--;
    if (start > 0 && ((unsigned char)out[start - 1] & 0xC0) == 0xC0) {
      unsigned char lead = (unsigned char)out[start - 1];
      size_t whole = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
      if (n - start + 1 < whole)
        n = start - 1;
    }
  }
  for (i = 0; i < n;) {
    uint32_t code;
    const size_t whole = kvrelay_utf8_next((const uint8_t *)out + i, n - i, &code);
    if (whole == 0)
      out[i] = '?';
    i += whole != 0 ? whole : 1;
  }
  out[n] = '\0';
}

bool kvrelay_grpc_timeout_parse(const uint8_t *text, size_t len, uint64_t *out_ns) {
  uint64_t value = 0, unit = 0;
  if (len < 2 || len > 9)
    return false;
  for (size_t i = 0; i + 1 < len; i++) {
    if (text[i] < '0' || text[i] > '9')
      return false;
    value = 10 * value + (uint64_t)(text[i] - '0');
  }
  switch (text[len - 1]) {
  case 'H':
    unit = UINT64_C(3600000000000);
    break;
  case 'M':
    unit = UINT64_C(60000000000);
    break;
  case 'S':
    unit = UINT64_C(1000000000);
    break;
  case 'm':
    unit = UINT64_C(1000000);
    break;
  case 'u':
    unit = UINT64_C(1000);
    break;
  case 'n':
    unit = 1;
    break;
  default:
    return false;
  }
  *out_ns = value > UINT64_MAX / unit ? KVRELAY_TIME_NONE : value * unit;
  return true;
}

size_t kvrelay_grpc_timeout_put(uint64_t ns, char out[KVRELAY_GRPC_TIMEOUT_CAP]) {
  static const struct {
    uint64_t ns;
    char unit;
  } units[] = {{1, 'n'},
               {1000, 'u'},
               {1000000, 'm'},
               {1000000000, 'S'},
               {UINT64_C(60000000000), 'M'},
               {UINT64_C(3600000000000), 'H'}};
  size_t i = 0;
  while (i < 5 && ns / units[i].ns >= 99999999)
    i++;
  uint64_t value = ns / units[i].ns + (ns % units[i].ns != 0);
  if (value == 0)
    value = 1;
  return (size_t)snprintf(out, KVRELAY_GRPC_TIMEOUT_CAP, "%llu%c", (unsigned long long)value,
                          units[i].unit);
}

int kvrelay_grpc_content_type(const uint8_t *text, size_t len) {
  static const char grpc[] = "application/grpc", proto[] = "+proto";
  const size_t grpc_len = sizeof grpc - 1, proto_len = sizeof proto - 1;
  if (len < grpc_len || memcmp(text, grpc, grpc_len) != 0)
    return KVRELAY_GRPC_CONTENT_FOREIGN;
  const uint8_t *rest = text + grpc_len;
  size_t rest_len = len - grpc_len;
  bool subtype = rest_len > 0 && rest[0] == '+';
  if (rest_len >= proto_len && memcmp(rest, proto, proto_len) == 0) {
    rest += proto_len;
    rest_len -= proto_len;
  }
  if (rest_len == 0 || rest[0] == ';' || rest[0] == ' ')
    return KVRELAY_GRPC_CONTENT_PROTO;
  return subtype ? KVRELAY_GRPC_CONTENT_OTHER : KVRELAY_GRPC_CONTENT_FOREIGN;
}
