/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay.h: both framers, against a reader that has all bytes at once and against every cut that
 * the input asks for.
 *
 * SECURITY.md: 1, 2, 4, 5.
 *
 * Input: kind (0 gRPC, 1 raw client, 2 raw server), limit, seed of the cuts; the stream.
 */

#include "fuzz.h"
#include "kvrelay.h"

enum { GRPC, CLIENT, SERVER };

/* What the raw transport's table of types allows; *bounded when `limit` does not matter. */
static bool allowed(int kind, uint8_t flags, const kvrelay_frame *f, bool *bounded) {
  const bool on_stream = f->stream != 0, plain = f->aux == 0 && flags == 0;
  const uint32_t n = f->body_len;
  *bounded = f->type == 4 || (f->type >= 6 && f->type <= 9);
  switch (f->type) {
  case 1:
    return kind == CLIENT && on_stream && flags == 0;
  case 2:
    return kind == SERVER && on_stream && plain && n == 0;
  case 3:
    return kind == SERVER && on_stream && plain;
  case 4:
    return kind == SERVER && on_stream && flags == 0 && f->aux <= 16 && n >= 2 && n <= 1026;
  case 5:
    return kind == CLIENT && on_stream && plain && n == 0;
  case 6:
    return kind == CLIENT && on_stream && plain && n == 4;
  case 7:
  case 8:
    return !on_stream && plain && n == 8;
  case 9:
    return !on_stream && flags == 0 && n >= 4 && n <= 1028;
  default:
    return f->type >= 128;
  }
}

/* The next frame as plain rules say: the bytes it takes, 0 when it is cut, else an error. */
static ptrdiff_t reference(int kind, uint32_t limit, const uint8_t *p, size_t len,
                           kvrelay_frame *f) {
  const size_t head = kind == GRPC ? 5 : 12;
  bool bounded = false;
  memset(f, 0, sizeof *f);
  if (len < head)
    return 0;
  f->piece = p + head;
  if (kind == GRPC) {
    f->type = KVRELAY_FRAME_MESSAGE;
    f->body_len = (uint32_t)p[1] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 8 | p[4];
    if (p[0] > 0)
      return p[0] == 1 ? KVRELAY_ERR_UNSUPPORTED : KVRELAY_ERR_MALFORMED;
  } else {
    f->body_len = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    f->stream = p[4] | (uint32_t)p[5] << 8 | (uint32_t)p[6] << 16 | (uint32_t)p[7] << 24;
    f->type = p[8];
    f->aux = (uint16_t)(p[10] | p[11] << 8);
    if (!allowed(kind, p[9], f, &bounded))
      return KVRELAY_ERR_MALFORMED;
  }
  if (!bounded && f->body_len > limit)
    return KVRELAY_ERR_LIMIT;
  return len - head < f->body_len ? 0 : (ptrdiff_t)(head + f->body_len);
}

/* The same behind the frames that are skipped; *at moves to the one that it tells of. */
static ptrdiff_t reference_next(int kind, uint32_t limit, const uint8_t *stream, size_t len,
                                size_t *at, kvrelay_frame *f) {
  ptrdiff_t want;
  while ((want = reference(kind, limit, stream + *at, len - *at, f)) > 0 && f->type >= 128)
    *at += (size_t)want;
  return want;
}

static size_t next_cut(uint64_t *cuts, size_t left) {
  *cuts = *cuts * UINT64_C(6364136223846793005) + 1442695040888963407u;
  const size_t n = (*cuts >> 33) % 40;
  return n < left ? n : left;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  fuzz_input in = {data, len};
  const int kind = (int)fuzz_below(&in, 3);
  const uint32_t limit = (uint32_t)fuzz_number(&in, 2);
  uint64_t cuts = fuzz_number(&in, 2);
  kvrelay_framer framer;
  const uint8_t *const stream = in.at;
  size_t at = 0, body = 0, given = 0;
  kvrelay_frame model, f;
  if (kind == GRPC)
    kvrelay_framer_init_grpc(&framer, limit);
  else
    kvrelay_framer_init_raw(&framer, kind == CLIENT, limit);
  for (ptrdiff_t used = 0; used >= 0 && given < in.left;) {
    const size_t n = next_cut(&cuts, in.left - given);
    uint8_t *const copy = fuzz_copy(stream + given, n);
    for (size_t fed = 0;; fed += (size_t)used) {
      used = kvrelay_framer_feed(&framer, copy + fed, n - fed, &f);
      if (used < 0)
        break;
      FUZZ_CHECK((size_t)used <= n - fed);
      if (f.type == KVRELAY_FRAME_NONE) {
        FUZZ_CHECK((size_t)used == n - fed);
        break;
      }
      const ptrdiff_t want = reference_next(kind, limit, stream, in.left, &at, &model);
      FUZZ_CHECK(want >= 0 && f.type == model.type && f.aux == model.aux);
      FUZZ_CHECK(f.stream == model.stream && f.body_len == model.body_len && f.offset == body);
      FUZZ_CHECK(f.piece && (f.piece_len > 0 || f.body_len == 0));
      FUZZ_CHECK(memcmp(f.piece, model.piece + body, f.piece_len) == 0);
      body += f.piece_len;
      FUZZ_CHECK(kvrelay_frame_done(&f) == (body == f.body_len));
      if (body == f.body_len) {
        FUZZ_CHECK(want > 0);
        at += (size_t)want;
        body = 0;
      } else { /* only bodies that may be large come in pieces */
        FUZZ_CHECK(f.type == KVRELAY_FRAME_MESSAGE || f.type == KVRELAY_FRAME_REQUEST);
      }
    }
    free(copy);
    given += n;
    if (used < 0) {
      FUZZ_CHECK(kvrelay_framer_feed(&framer, NULL, 0, &f) == used && body == 0);
      FUZZ_CHECK(reference_next(kind, limit, stream, in.left, &at, &model) == used);
      return 0;
    }
  }
  /* Nothing whole is left over. */
  FUZZ_CHECK(reference_next(kind, limit, stream, in.left, &at, &model) == 0);
  FUZZ_CHECK(kvrelay_framer_empty(&framer) == (at == in.left));
  return 0;
}
