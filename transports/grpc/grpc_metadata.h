/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_metadata.h - names and values that travel beside the messages of a call, for both sides:
 * a bounded list, without sockets. */
#ifndef KVRELAY_GRPC_METADATA_H
#define KVRELAY_GRPC_METADATA_H

#include "../transport.h"

/* What one list holds at most: entries, and bytes as HTTP/2 counts them (name + value + 32 each).
 */
#define KVRELAY_GRPC_METADATA_ENTRIES 64
#define KVRELAY_GRPC_METADATA_BYTES 16384

/* Zeroed, it is empty; fields are private. */
typedef struct kvrelay_grpc_metadata {
  uint8_t *records_;
  size_t len_, cap_;
  size_t counted_; /* bytes as HTTP/2 counts them */
  size_t entries_;
} kvrelay_grpc_metadata;

void kvrelay_grpc_metadata_free(kvrelay_grpc_metadata *m);

/*
 * Adds one to be sent.  `name` is of a-z 0-9 - _ . and not one that gRPC or HTTP keeps for itself
 * ("grpc-…", "content-type", "te", …).  The value of a name that ends in "-bin" is any bytes, which
 * are stored in base64 without padding; of others printable ASCII that neither begins nor ends with
 * a space.  KVRELAY_TRANSPORT_OK, or, with nothing changed, _ERR_ARG (name or value is not legal),
 * _ERR_LIMIT (the list is full), _ERR_MEMORY.
 */
int kvrelay_grpc_metadata_add(kvrelay_grpc_metadata *m, const char *name, const void *value,
                              size_t len);
/*
 * Takes in a header that was received.  Names that gRPC or HTTP keeps for itself are left out.  The
 * value of a "-bin" name is decoded, with or without padding; one with commas becomes several.
 * KVRELAY_TRANSPORT_OK, or _ERR_PROTOCOL (not base64), _ERR_LIMIT, _ERR_MEMORY; then the list may
 * hold a part of it.
 */
int kvrelay_grpc_metadata_receive(kvrelay_grpc_metadata *m, const uint8_t *name, size_t name_len,
                                  const uint8_t *value, size_t value_len);

/*
 * The entry at `*cursor`, which is moved on; begin with 0.  False when there is none left.  `name`
 * and `value` stay valid until the list is changed or freed.
 */
bool kvrelay_grpc_metadata_next(const kvrelay_grpc_metadata *m, size_t *cursor, kvrelay_iov *name,
                                kvrelay_iov *value);
/* As `next`, but only entries of this name. */
bool kvrelay_grpc_metadata_find(const kvrelay_grpc_metadata *m, const char *name, size_t *cursor,
                                kvrelay_iov *value);

#endif
