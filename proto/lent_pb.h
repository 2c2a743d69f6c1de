/* SPDX-License-Identifier: Apache-2.0 */
/* lent_pb.h - small protobuf messages through nanopb, with texts and lists that are lent: what the
 * options of health.proto and reflection.proto make of their fields. */
#ifndef KVRELAY_LENT_PB_H
#define KVRELAY_LENT_PB_H

#include <pb.h>

#include "kvrelay.h"

/* A repeated field to be written: kvrelay_text for texts and bytes, generated structs for
 * messages. */
typedef struct kvrelay_lent_list {
  const void *items;
  size_t len, item_bytes;
} kvrelay_lent_list;

/*
 * Decodes one message into `out`, a generated struct of zeros; its texts point into `bytes`, its
 * lists are skipped.  KVRELAY_OK, or KVRELAY_ERR_MALFORMED, also for a text that is no UTF-8.
 */
KVRELAY_MUST_USE int kvrelay_lent_decode(const pb_msgdesc_t *fields, const uint8_t *bytes,
                                         size_t len, void *out);
/* Bytes of the message as kvrelay_lent_encode writes it. */
size_t kvrelay_lent_size(const pb_msgdesc_t *fields, const void *message);
/* Encodes it; returns its length, or KVRELAY_ERR_NOSPACE. */
ptrdiff_t kvrelay_lent_encode(const pb_msgdesc_t *fields, const void *message, uint8_t *out,
                              size_t cap);

#endif
