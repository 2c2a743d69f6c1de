/* SPDX-License-Identifier: Apache-2.0 */
#include "lent_pb.h"

#include <pb_decode.h>
#include <pb_encode.h>
#include <string.h>

/* What nanopb calls for each text and list; its name stands in the options. */
bool kvrelay_lent_field_(pb_istream_t *in, pb_ostream_t *out, const pb_field_t *field);

/* `state` is where the stream stands in the bytes. */
static bool read_bytes(pb_istream_t *stream, pb_byte_t *buf, size_t count) {
  const uint8_t *at = stream->state;
  if (buf)
    memcpy(buf, at, count);
  stream->state = (void *)(uintptr_t)(at + count);
  return true;
}

static bool read_field(pb_istream_t *in, const pb_field_t *field) {
  /* A number where a length was due: nanopb has put it into a stream of its own. */
  if (in->callback != read_bytes)
    return false;
  const kvrelay_text text = {in->state, in->bytes_left};
  if (!pb_read(in, NULL, in->bytes_left))
    return false;
  if (PB_HTYPE(field->type) == PB_HTYPE_REPEATED)
    return true;
  if (PB_HTYPE(field->type) == PB_HTYPE_ONEOF)
    *(pb_size_t *)field->pSize = field->tag; /* nanopb leaves that to who takes the value */
  *(kvrelay_text *)field->pData = text;
  return PB_LTYPE(field->type) != PB_LTYPE_STRING || kvrelay_utf8_valid(text.ptr, text.len);
}

static bool write_text(pb_ostream_t *out, const pb_field_t *field, const kvrelay_text *text) {
  return pb_encode_tag_for_field(out, field) && pb_encode_string(out, text->ptr, text->len);
}

static bool write_list(pb_ostream_t *out, const pb_field_t *field, const kvrelay_lent_list *list) {
  bool ok = true;
  for (size_t i = 0; i < list->len && ok; i++) {
    const void *item = (const uint8_t *)list->items + i * list->item_bytes;
    if (PB_LTYPE_IS_SUBMSG(field->type))
      ok = pb_encode_tag_for_field(out, field) &&
           pb_encode_submessage(out, field->submsg_desc, item);
    else
      ok = write_text(out, field, item);
  }
  return ok;
}

bool kvrelay_lent_field_(pb_istream_t *in, pb_ostream_t *out, const pb_field_t *field) {
  if (in)
    return read_field(in, field);
  if (PB_HTYPE(field->type) == PB_HTYPE_REPEATED)
    return write_list(out, field, field->pData);
  const kvrelay_text *text = field->pData;
  /* What is chosen among several is told even when it is empty. */
  return (text->len == 0 && PB_HTYPE(field->type) != PB_HTYPE_ONEOF) ||
         write_text(out, field, text);
}

int kvrelay_lent_decode(const pb_msgdesc_t *fields, const uint8_t *bytes, size_t len, void *out) {
  pb_istream_t stream = {read_bytes, (void *)(uintptr_t)bytes, len, NULL};
  return pb_decode_ex(&stream, fields, out, PB_DECODE_NOINIT) ? KVRELAY_OK : KVRELAY_ERR_MALFORMED;
}

size_t kvrelay_lent_size(const pb_msgdesc_t *fields, const void *message) {
  size_t size = 0;
  return pb_get_encoded_size(&size, fields, message) ? size : 0;
}

ptrdiff_t kvrelay_lent_encode(const pb_msgdesc_t *fields, const void *message, uint8_t *out,
                              size_t cap) {
  pb_ostream_t stream = pb_ostream_from_buffer(out, cap);
  return pb_encode(&stream, fields, message) ? (ptrdiff_t)stream.bytes_written
                                             : KVRELAY_ERR_NOSPACE;
}
