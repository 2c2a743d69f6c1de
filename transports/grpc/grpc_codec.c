/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_codec.h"

#include <stdlib.h>
#include <string.h>

#ifdef KVRELAY_HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef KVRELAY_HAVE_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

/* Room for a result starts with this, or with four times what came if that is more, and doubles. */
#define FIRST_CAP ((size_t)4096)

/* One encoding; `name` NULL: not built in. */
typedef struct codec {
  const char *name;
  /* One attempt into a buffer of this size; KVRELAY_TRANSPORT_ERR_LIMIT: too small. */
  int (*decompress)(const uint8_t *in, size_t len, uint8_t *out, size_t cap, size_t *out_len);
  int (*compress)(const kvrelay_parts *parts, uint8_t *out, size_t cap, size_t *out_len);
} codec;

/* ---- gzip ---- */

#ifdef KVRELAY_HAVE_ZLIB
#define GZIP_WINDOW (15 + 16)
#define GZIP_LEVEL 6

static int gzip_decompress(const uint8_t *in, size_t len, uint8_t *out, size_t cap,
                           size_t *out_len) {
  z_stream z = {0};
  if (inflateInit2(&z, GZIP_WINDOW) != Z_OK)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  z.next_in = (Bytef *)(uintptr_t)in;
  z.avail_in = (uInt)len;
  z.next_out = out;
  z.avail_out = (uInt)cap;
  int result;
  do /* several members may follow each other */
    result = inflate(&z, Z_FINISH);
  while (result == Z_STREAM_END && z.avail_in > 0 && inflateReset(&z) == Z_OK);
  *out_len = cap - z.avail_out;
  const bool full = z.avail_out == 0;
  (void)inflateEnd(&z);
  if (result == Z_STREAM_END)
    return KVRELAY_TRANSPORT_OK;
  if (result == Z_MEM_ERROR)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  return result == Z_BUF_ERROR && full ? KVRELAY_TRANSPORT_ERR_LIMIT
                                       : KVRELAY_TRANSPORT_ERR_PROTOCOL;
}

static int gzip_compress(const kvrelay_parts *parts, uint8_t *out, size_t cap, size_t *out_len) {
  z_stream z = {0};
  int result = Z_OK;
  if (deflateInit2(&z, GZIP_LEVEL, Z_DEFLATED, GZIP_WINDOW, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  z.next_out = out;
  z.avail_out = (uInt)cap;
  for (size_t i = 0; i < parts->part_len && result == Z_OK; i++) {
    z.next_in = (Bytef *)(uintptr_t)parts->part[i].base;
    z.avail_in = (uInt)parts->part[i].len;
    while (z.avail_in > 0 && result == Z_OK)
      result = deflate(&z, Z_NO_FLUSH);
  }
  if (result == Z_OK)
    result = deflate(&z, Z_FINISH);
  *out_len = cap - z.avail_out;
  (void)deflateEnd(&z);
  return result == Z_STREAM_END ? KVRELAY_TRANSPORT_OK : KVRELAY_TRANSPORT_ERR_LIMIT;
}
#endif

/* ---- zstd ---- */

#ifdef KVRELAY_HAVE_ZSTD
#define ZSTD_LEVEL 1 /* sparse filters shrink as well, several times as fast */

/* In one go, so that the result itself is the window: no frame can ask for one of its own. */
static int zstd_decompress(const uint8_t *in, size_t len, uint8_t *out, size_t cap,
                           size_t *out_len) {
  const size_t n = ZSTD_decompress(out, cap, in, len);
  if (!ZSTD_isError(n)) {
    *out_len = n;
    return KVRELAY_TRANSPORT_OK;
  }
  switch (ZSTD_getErrorCode(n)) {
  case ZSTD_error_dstSize_tooSmall:
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  case ZSTD_error_memory_allocation:
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  default:
    return KVRELAY_TRANSPORT_ERR_PROTOCOL;
  }
}

static int zstd_compress(const kvrelay_parts *parts, uint8_t *out, size_t cap, size_t *out_len) {
  ZSTD_CCtx *z = ZSTD_createCCtx();
  ZSTD_outBuffer to = {out, cap, 0};
  if (z == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  (void)ZSTD_CCtx_setParameter(z, ZSTD_c_compressionLevel, ZSTD_LEVEL);
  (void)ZSTD_CCtx_setPledgedSrcSize(z, parts->bytes);
  size_t left = 0;
  for (size_t i = 0; i < parts->part_len && !ZSTD_isError(left); i++) {
    ZSTD_inBuffer from = {parts->part[i].base, parts->part[i].len, 0};
    const ZSTD_EndDirective end = i + 1 == parts->part_len ? ZSTD_e_end : ZSTD_e_continue;
    do
      left = ZSTD_compressStream2(z, &to, &from, end);
    while (!ZSTD_isError(left) && to.pos < cap &&
           (from.pos < from.size || (end == ZSTD_e_end && left > 0)));
    if (from.pos < from.size)
      break;
  }
  ZSTD_freeCCtx(z);
  *out_len = to.pos;
  if (ZSTD_isError(left))
    return ZSTD_getErrorCode(left) == ZSTD_error_memory_allocation ? KVRELAY_TRANSPORT_ERR_MEMORY
                                                                   : KVRELAY_TRANSPORT_ERR_LIMIT;
  return left == 0 && to.pos < cap ? KVRELAY_TRANSPORT_OK : KVRELAY_TRANSPORT_ERR_LIMIT;
}
#endif

/* ---- all of them ---- */

static const codec codecs[] = {[KVRELAY_GRPC_IDENTITY] = {"identity", NULL, NULL},
#ifdef KVRELAY_HAVE_ZLIB
                               [KVRELAY_GRPC_GZIP] = {"gzip", gzip_decompress, gzip_compress},
#endif
#ifdef KVRELAY_HAVE_ZSTD
                               [KVRELAY_GRPC_ZSTD] = {"zstd", zstd_decompress, zstd_compress}
#endif
};
#define CODECS ((int)(sizeof codecs / sizeof *codecs))

const char *kvrelay_grpc_encodings(void) {
  return "identity"
#ifdef KVRELAY_HAVE_ZLIB
         ",gzip"
#endif
#ifdef KVRELAY_HAVE_ZSTD
         ",zstd"
#endif
      ;
}

const char *kvrelay_grpc_encoding_name(int encoding) {
  return encoding >= 0 && encoding < CODECS ? codecs[encoding].name : NULL;
}

int kvrelay_grpc_encoding_find(const uint8_t *name, size_t len) {
  for (int i = 0; i < CODECS; i++)
    if (codecs[i].name != NULL && len == strlen(codecs[i].name) &&
        memcmp(name, codecs[i].name, len) == 0)
      return i;
  return -1;
}

bool kvrelay_grpc_encoding_listed(const uint8_t *list, size_t len, int encoding) {
  while (len > 0) {
    const uint8_t *comma = memchr(list, ',', len);
    size_t n = comma != NULL ? (size_t)(comma - list) : len, begin = 0, end = n;
    while (begin < end && list[begin] == ' ')
      begin++;
    while (end > begin && list[end - 1] == ' ')
      end--;
    if (kvrelay_grpc_encoding_find(list + begin, end - begin) == encoding)
      return true;
    n += comma != NULL;
    list += n;
    len -= n;
  }
  return false;
}

int kvrelay_grpc_decompress(int encoding, const uint8_t *in, size_t len, size_t max_bytes,
                            uint8_t **out, size_t *out_len) {
  if (encoding <= KVRELAY_GRPC_IDENTITY || kvrelay_grpc_encoding_name(encoding) == NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (len == 0 || len > UINT32_MAX)
    return len == 0 ? KVRELAY_TRANSPORT_ERR_PROTOCOL : KVRELAY_TRANSPORT_ERR_LIMIT;
  if (max_bytes > UINT32_MAX)
    max_bytes = UINT32_MAX;
  for (size_t cap = 4 * len > FIRST_CAP ? 4 * len : FIRST_CAP;; cap *= 2) {
    if (cap > max_bytes)
      cap = max_bytes;
    uint8_t *to = malloc(cap + 1);
    if (to == NULL)
      return KVRELAY_TRANSPORT_ERR_MEMORY;
    const int err = codecs[encoding].decompress(in, len, to, cap, out_len);
    if (err == KVRELAY_TRANSPORT_OK) {
      *out = to;
      return KVRELAY_TRANSPORT_OK;
    }
    free(to);
    if (err != KVRELAY_TRANSPORT_ERR_LIMIT || cap == max_bytes)
      return err;
  }
}

int kvrelay_grpc_compress(int encoding, const kvrelay_parts *parts, uint8_t **out,
                          size_t *out_len) {
  if (encoding <= KVRELAY_GRPC_IDENTITY || kvrelay_grpc_encoding_name(encoding) == NULL)
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (parts->bytes < 2 || parts->bytes > UINT32_MAX)
    return KVRELAY_TRANSPORT_ERR_LIMIT;
  uint8_t *to = malloc(parts->bytes);
  if (to == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  const int err = codecs[encoding].compress(parts, to, parts->bytes - 1, out_len);
  if (err != KVRELAY_TRANSPORT_OK) {
    free(to);
    return err;
  }
  *out = to;
  return KVRELAY_TRANSPORT_OK;
}
