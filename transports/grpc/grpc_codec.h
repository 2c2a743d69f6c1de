/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grpc_codec.h - compression of single messages, for both sides.  Which encodings there are is
 * decided when this is built: gzip with zlib (KVRELAY_HAVE_ZLIB), zstd with libzstd
 * (KVRELAY_HAVE_ZSTD).  Identity is always there.
 */
#ifndef KVRELAY_GRPC_CODEC_H
#define KVRELAY_GRPC_CODEC_H

#include "../transport.h"

enum kvrelay_grpc_encoding { KVRELAY_GRPC_IDENTITY = 0, KVRELAY_GRPC_GZIP, KVRELAY_GRPC_ZSTD };

/* What grpc-accept-encoding says of this build: "identity,gzip,zstd" or a part of it. */
const char *kvrelay_grpc_encodings(void);
/* enum kvrelay_grpc_encoding; negative: this build does not have it. */
int kvrelay_grpc_encoding_find(const uint8_t *name, size_t len);
/* The name on the wire; NULL: this build does not have it. */
const char *kvrelay_grpc_encoding_name(int encoding);
/* The peer's grpc-accept-encoding, a list with commas, has it. */
bool kvrelay_grpc_encoding_listed(const uint8_t *list, size_t len, int encoding);

/*
 * Decompresses a whole message into `*out`, from malloc.  The result and the work are bounded by
 * `max_bytes` while it is made, whatever the message announces.  KVRELAY_TRANSPORT_OK, or
 * _ERR_LIMIT (larger), _ERR_PROTOCOL (broken, cut, or something behind its end), _ERR_MEMORY,
 * _ERR_ARG (identity, or not built in).
 */
int kvrelay_grpc_decompress(int encoding, const uint8_t *in, size_t len, size_t max_bytes,
                            uint8_t **out, size_t *out_len);
/*
 * Compresses the parts of a message into `*out`, from malloc.  KVRELAY_TRANSPORT_OK, or _ERR_LIMIT
 * (it would not become smaller: send it as it is), _ERR_MEMORY, _ERR_ARG (identity, or not built
 * in).
 */
int kvrelay_grpc_compress(int encoding, const kvrelay_parts *parts, uint8_t **out, size_t *out_len);

#endif
