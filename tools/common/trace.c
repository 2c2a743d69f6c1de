/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define RECORD_MAX_BYTES ((size_t)1 << 30)

static uint32_t u32(const uint8_t *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

int trace_open(trace *t, const char *path) {
  memset(t, 0, sizeof *t);
  t->file = fopen(path, "rb");
  return t->file == NULL ? -1 : 0;
}

void trace_close(trace *t) {
  if (t->file != NULL)
    fclose(t->file);
  free(t->bytes);
  memset(t, 0, sizeof *t);
}

static int broken(const trace *t, char why[128], const char *what) {
  snprintf(why, 128, "%s in the record at byte %llu", what, (unsigned long long)t->offset);
  return -1;
}

/* Exactly len bytes behind the ones already there. */
static int fill(trace *t, size_t len) {
  if (len > t->cap) {
    uint8_t *more = realloc(t->bytes, len);
    if (more == NULL)
      return -1;
    t->bytes = more;
    t->cap = len;
  }
  return fread(t->bytes, 1, len, t->file) == len ? 0 : -1;
}

int trace_next(trace *t, trace_record *record, char why[128]) {
  uint8_t head[4];
  t->offset = (uint64_t)ftell(t->file);
  size_t got = fread(head, 1, 4, t->file);
  if (got == 0 && feof(t->file))
    return 0;
  size_t len = got == 4 ? u32(head) : 0;
  if (got != 4 || len < 10 || len > RECORD_MAX_BYTES)
    return broken(t, why, "no length of a trace record");
  if (fill(t, len) != 0)
    return broken(t, why, "the file ends");
  record->at_ns = u32(t->bytes) | (uint64_t)u32(t->bytes + 4) << 32;
  record->kind = t->bytes[8];
  record->frames_len = t->bytes[9];
  if (record->frames_len > TRACE_FRAMES_MAX)
    return broken(t, why, "too many frames");
  size_t at = 10;
  for (int i = 0; i < record->frames_len; i++) {
    if (len - at < 4 || u32(t->bytes + at) > len - at - 4)
      return broken(t, why, "a frame is cut off");
    record->frame_len[i] = u32(t->bytes + at);
    record->frame[i] = t->bytes + at + 4;
    at += 4 + record->frame_len[i];
  }
  return at == len ? 1 : broken(t, why, "bytes behind the last frame");
}
