/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of the recorded relay: JSON lines of requests, messages and ends. Links -lcrypto. */
#ifndef TEST_CAPTURE_H
#define TEST_CAPTURE_H

#include <criterion/criterion.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../vectors/vectors.h"
#include "kvrelay.h"

typedef struct capture {
  FILE *file;
  char *line;
  size_t cap;
  uint8_t *bytes; /* of the last message or request */
  size_t len;
} capture;

static inline void capture_open(capture *c, const char *path) {
  memset(c, 0, sizeof *c);
  c->file = fopen(path, "r");
  cr_assert_not_null(c->file, "%s", path);
}

static inline void capture_close(capture *c) {
  fclose(c->file);
  free(c->line);
  free(c->bytes);
}

/* The next record: its type as 'r', 'm', 'e', or 0 at the end; fills the bytes of requests and
 * messages. */
static inline char capture_next(capture *c, kvrelay_status *end) {
  if (getline(&c->line, &c->cap, c->file) <= 0)
    return 0;
  json_error_t error;
  json_t *record = json_loads(c->line, 0, &error);
  cr_assert_not_null(record, "%s", error.text);
  char type = vec_str(vec_get(record, "type"))[0];
  free(c->bytes);
  c->bytes = NULL;
  if (type == 'r') {
    c->bytes = vec_hex(vec_get(record, "request"), &c->len);
  } else if (type == 'm') {
    const char *text = vec_str(vec_get(record, "b64"));
    size_t n = strlen(text);
    c->bytes = malloc(n + 4);
    int got = EVP_DecodeBlock(c->bytes, (const unsigned char *)text, (int)n);
    cr_assert_geq(got, 0);
    c->len = (size_t)got - (text[n - 1] == '=') - (text[n - 2] == '=');
  } else {
    memset(end, 0, sizeof *end);
    const json_t *reason = json_object_get(record, "reason");
    end->grpc = KVRELAY_GRPC_UNAVAILABLE;
    if (json_is_string(reason))
      end->reason = kvrelay_reason_from_name((const uint8_t *)json_string_value(reason),
                                             json_string_length(reason));
  }
  json_decref(record);
  return type;
}

#endif
