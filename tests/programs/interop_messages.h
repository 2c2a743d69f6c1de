/* SPDX-License-Identifier: Apache-2.0 */
/* interop_messages.h - the few fields of gRPC's official test service that our programs need. */
#ifndef KVRELAY_TEST_INTEROP_MESSAGES_H
#define KVRELAY_TEST_INTEROP_MESSAGES_H

#include <pb_decode.h>
#include <pb_encode.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INTEROP_SERVICE "/grpc.testing.TestService/"
/* Metadata of a request that comes back with the answer. */
#define INTEROP_INITIAL "x-grpc-test-echo-initial"
#define INTEROP_TRAILING "x-grpc-test-echo-trailing-bin"

enum interop_method {
  INTEROP_EMPTY = 1,
  INTEROP_UNARY,
  INTEROP_OUTPUT,
  INTEROP_INPUT,
  INTEROP_FULL_DUPLEX,
  INTEROP_HALF_DUPLEX
};
static const char *const interop_names[] = {"",
                                            "EmptyCall",
                                            "UnaryCall",
                                            "StreamingOutputCall",
                                            "StreamingInputCall",
                                            "FullDuplexCall",
                                            "HalfDuplexCall"};
#define INTEROP_METHODS (sizeof interop_names / sizeof *interop_names)

/* A BoolValue: absent, or one of both. */
enum interop_bool { INTEROP_ABSENT = 0, INTEROP_FALSE, INTEROP_TRUE };

typedef struct interop_answer {
  uint32_t bytes;           /* of its body */
  enum interop_bool zipped; /* as the client wishes it */
} interop_answer;

#define INTEROP_ANSWERS_CAP 64

/* Every request of the service; what a method's message does not have stays 0. */
typedef struct interop_request {
  uint32_t body_bytes; /* zeros */
  interop_answer answer[INTEROP_ANSWERS_CAP];
  size_t answers;
  enum interop_bool expect_zipped;
  bool has_status;
  uint32_t status;
  char text[128];
} interop_request;

/* One field of a message, as interop_field_next finds it. */
typedef struct interop_field {
  uint32_t tag;
  uint64_t number;   /* of a varint */
  pb_istream_t body; /* of what has a length */
} interop_field;

/* Steps over the fields of a message: true for each; false at the end, or when it is broken, which
 * makes `*good` false. */
static inline bool interop_field_next(pb_istream_t *in, interop_field *f, bool *good) {
  pb_wire_type_t type;
  bool end;
  if (!*good)
    return false;
  if (!pb_decode_tag(in, &type, &f->tag, &end)) {
    *good = end;
    return false;
  }
  f->number = 0;
  f->body = (pb_istream_t)PB_ISTREAM_EMPTY;
  if (type == PB_WT_VARINT)
    *good = pb_decode_varint(in, &f->number);
  else if (type == PB_WT_STRING) {
    *good = pb_make_string_substream(in, &f->body);
    pb_istream_t rest = f->body;
    *good = *good && pb_close_string_substream(in, &rest);
  } else
    *good = pb_skip_field(in, type);
  return *good;
}

/* The number in field `tag` of a message of numbers. */
static inline uint64_t interop_number(pb_istream_t in, uint32_t tag, bool *good) {
  interop_field f;
  uint64_t number = 0;
  while (interop_field_next(&in, &f, good))
    if (f.tag == tag)
      number = f.number;
  return number;
}

/* Length of field `tag`, which holds bytes. */
static inline uint32_t interop_body(pb_istream_t in, uint32_t tag, bool *good) {
  interop_field f;
  size_t bytes = 0;
  while (interop_field_next(&in, &f, good))
    if (f.tag == tag)
      bytes = f.body.bytes_left;
  return (uint32_t)bytes;
}

static inline enum interop_bool interop_wish(pb_istream_t in, bool *good) {
  return interop_number(in, 1, good) != 0 ? INTEROP_TRUE : INTEROP_FALSE;
}

static inline void interop_status_read(pb_istream_t in, interop_request *r, bool *good) {
  interop_field f;
  r->has_status = true;
  while (interop_field_next(&in, &f, good))
    if (f.tag == 1)
      r->status = (uint32_t)f.number;
    else if (f.tag == 2) {
      const size_t len = f.body.bytes_left;
      *good = len < sizeof r->text && pb_read(&f.body, (pb_byte_t *)r->text, len);
      r->text[*good ? len : 0] = 0;
    }
}

static inline void interop_answer_read(pb_istream_t in, interop_request *r, bool *good) {
  interop_field f;
  if (r->answers == INTEROP_ANSWERS_CAP) {
    *good = false;
    return;
  }
  interop_answer *a = &r->answer[r->answers++];
  while (interop_field_next(&in, &f, good))
    if (f.tag == 1)
      a->bytes = (uint32_t)f.number;
    else if (f.tag == 3)
      a->zipped = interop_wish(f.body, good);
}

/* Reads a request; false when it does not decode. */
static inline bool interop_request_read(enum interop_method method, const uint8_t *bytes,
                                        size_t len, interop_request *r) {
  pb_istream_t in = pb_istream_from_buffer(bytes, len);
  interop_field f;
  bool good = true;
  memset(r, 0, sizeof *r);
  r->answers = method == INTEROP_UNARY;
  while (interop_field_next(&in, &f, &good))
    if (f.tag == (method == INTEROP_INPUT ? 1 : 3))
      r->body_bytes = interop_body(f.body, 2, &good);
    else if (f.tag == (method == INTEROP_INPUT ? 2 : 8))
      r->expect_zipped = interop_wish(f.body, &good);
    else if (method == INTEROP_INPUT)
      continue;
    else if (f.tag == 7)
      interop_status_read(f.body, r, &good);
    else if (method != INTEROP_UNARY && f.tag == 2)
      interop_answer_read(f.body, r, &good);
    else if (f.tag == 2)
      r->answer[0].bytes = (uint32_t)f.number;
    else if (f.tag == 6)
      r->answer[0].zipped = interop_wish(f.body, &good);
  return good;
}

/* Writes field `tag`, a Payload of `bytes` zeros, without the zeros; its length. */
static inline size_t interop_payload_head(uint8_t out[24], uint32_t tag, uint32_t bytes) {
  pb_ostream_t size = PB_OSTREAM_SIZING, to = pb_ostream_from_buffer(out, 24);
  bool good =
      bytes == 0 || (pb_encode_tag(&size, PB_WT_STRING, 2) && pb_encode_varint(&size, bytes));
  good &=
      pb_encode_tag(&to, PB_WT_STRING, tag) && pb_encode_varint(&to, bytes + size.bytes_written);
  if (bytes > 0)
    good &= pb_encode_tag(&to, PB_WT_STRING, 2) && pb_encode_varint(&to, bytes);
  return good ? to.bytes_written : 0;
}

#endif
