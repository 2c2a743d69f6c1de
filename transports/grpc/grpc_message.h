/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_message.h - gRPC messages and the texts around them, without sockets: prefix, percent
 * encoding, timeout, content type. */
#ifndef KVRELAY_GRPC_MESSAGE_H
#define KVRELAY_GRPC_MESSAGE_H

#include <event2/buffer.h>

#include "../transport.h"
#include "grpc_codec.h"

/* ---- bytes in, whole messages out ---- */

/* Joins the messages of one call; fields are private. */
typedef struct kvrelay_grpc_inbox {
  kvrelay_framer framer_;
  uint8_t *body_; /* only for messages that arrive in pieces */
  size_t body_cap_;
  uint8_t *plain_; /* the last message, decompressed */
  size_t max_bytes_;
  int encoding_;
  bool flagged_; /* the message being read is compressed */
} kvrelay_grpc_inbox;

/* Messages above `max_bytes` will be refused. */
void kvrelay_grpc_inbox_init(kvrelay_grpc_inbox *in, size_t max_bytes);
/* Messages may be compressed like this; before the first byte. */
void kvrelay_grpc_inbox_encoding(kvrelay_grpc_inbox *in, int encoding);
void kvrelay_grpc_inbox_free(kvrelay_grpc_inbox *in);
/*
 * Takes bytes up to the end of the first message.  Returns how many; call again with the rest.
 * `message->base` is not NULL when a message is complete; it stays valid until the next feed and as
 * long as `bytes` does.  Errors, after which the call is lost: KVRELAY_TRANSPORT_ERR_LIMIT
 * (announced length above the limit, when nothing was buffered, or it became longer when
 * decompressed), _ERR_PROTOCOL (a flag other than 0 without an encoding or than 1, or it does not
 * decompress), _ERR_MEMORY.
 */
ptrdiff_t kvrelay_grpc_inbox_feed(kvrelay_grpc_inbox *in, const uint8_t *bytes, size_t len,
                                  kvrelay_iov *message);
/* False in the middle of a message. */
bool kvrelay_grpc_inbox_empty(const kvrelay_grpc_inbox *in);

/* ---- messages in, bytes out ---- */

/*
 * What a call has still to send, prefixes included; fields are private.  First bytes of its own,
 * then those of the last message that stayed with the service (`kept_len` of kvrelay_parts).  All
 * zero is an empty one.
 */
typedef struct kvrelay_grpc_outbox {
  struct kvrelay_grpc_blob *blob_; /* shared with the output buffers it was lent to */
  size_t off_;
  kvrelay_iov kept_[KVRELAY_PARTS_CAP]; /* unsent */
  uint8_t kept_first_, kept_len_;
  bool waits_;     /* can_add has said no because of kept bytes */
  uint32_t using_; /* pieces of kept bytes in output buffers */
  /* Set by the owner, may be NULL: kept bytes have left the output buffer, and somebody asked. */
  void (*returned)(struct kvrelay_grpc_outbox *out);
} kvrelay_grpc_outbox;

/* Drops what is unsent.  Kept bytes in output buffers stay in use, see below. */
void kvrelay_grpc_outbox_free(kvrelay_grpc_outbox *out);
/* Unsent bytes. */
size_t kvrelay_grpc_outbox_pending(const kvrelay_grpc_outbox *out);
/* Those of them that are copies of its own. */
size_t kvrelay_grpc_outbox_held(const kvrelay_grpc_outbox *out);
/* False while a message is both half sent and still in use by an output buffer, and as long as kept
 * bytes are in use at all: `returned` tells when that is over. */
bool kvrelay_grpc_outbox_can_add(kvrelay_grpc_outbox *out);
/* Takes one message behind the unsent bytes, after can_add: what does not stay is copied.
 * KVRELAY_TRANSPORT_ERR_MEMORY: nothing changed. */
int kvrelay_grpc_outbox_add(kvrelay_grpc_outbox *out, const kvrelay_parts *parts);
/* The same, compressed if that makes it shorter. */
int kvrelay_grpc_outbox_add_compressed(kvrelay_grpc_outbox *out, const kvrelay_parts *parts,
                                       int encoding);
/* Moves the first `n` unsent bytes to `to`; large pieces are lent, not copied, and so are kept
 * ones.  KVRELAY_TRANSPORT_ERR_MEMORY: lost in between. */
int kvrelay_grpc_outbox_move(kvrelay_grpc_outbox *out, size_t n, struct evbuffer *to);
/*
 * The service wants its bytes back: unsent ones are copied, and what `to` holds, the only output
 * buffer they were moved to, is copied as a whole.  KVRELAY_TRANSPORT_ERR_MEMORY: both are empty
 * then, and the connection is lost.
 */
int kvrelay_grpc_outbox_give_back(kvrelay_grpc_outbox *out, struct evbuffer *to);

/* ---- texts of headers ---- */

/* Room for any percent-encoded status text. */
#define KVRELAY_GRPC_ENCODED_CAP (3 * KVRELAY_STATUS_TEXT_CAP)
/* Encodes every byte outside 0x20 .. 0x7E, and '%'.  Returns the length; what does not fit is cut.
 */
size_t kvrelay_grpc_percent_encode(const char *text, char *out, size_t cap);
/* Decodes; a broken escape stays as it is, each byte that is no UTF-8 becomes '?'.  The result is
 * terminated, cut at a whole character, and ends at a zero byte. */
void kvrelay_grpc_percent_decode(const uint8_t *text, size_t len, char *out, size_t cap);

/* "5S", "100m": 1 to 8 digits and one of H M S m u n.  False when it is anything else; too large
 * for 64 bits = KVRELAY_TIME_NONE. */
bool kvrelay_grpc_timeout_parse(const uint8_t *text, size_t len, uint64_t *out_ns);
/* Room for any timeout as text. */
#define KVRELAY_GRPC_TIMEOUT_CAP 24
/* The shortest unit in which 8 digits hold it, rounded up; at least "1n".
 * Returns the length; not terminated. */
size_t kvrelay_grpc_timeout_put(uint64_t ns, char out[KVRELAY_GRPC_TIMEOUT_CAP]);

enum kvrelay_grpc_content {
  KVRELAY_GRPC_CONTENT_FOREIGN = 0,
  KVRELAY_GRPC_CONTENT_PROTO,
  KVRELAY_GRPC_CONTENT_OTHER
};
/* FOREIGN: not gRPC at all.  OTHER: gRPC with messages that are not protobuf. */
int kvrelay_grpc_content_type(const uint8_t *text, size_t len);

#endif
