/* SPDX-License-Identifier: Apache-2.0 */
/* trace.h - recorded event streams; proto/WIRE.md has the format (Recordings). */
#ifndef KVRELAY_TOOLS_TRACE_H
#define KVRELAY_TOOLS_TRACE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum trace_kind { TRACE_LIVE = 0, TRACE_REPLAY_REPLY = 1 };
#define TRACE_FRAMES_MAX 8

typedef struct trace_record {
  uint64_t at_ns;
  uint8_t kind; /* enum trace_kind, or another number of a later format */
  uint8_t frames_len;
  const uint8_t *frame[TRACE_FRAMES_MAX]; /* lent until the next record */
  size_t frame_len[TRACE_FRAMES_MAX];
} trace_record;

typedef struct trace {
  FILE *file;
  uint8_t *bytes;
  size_t cap;
  uint64_t offset; /* of the record read last, for messages */
} trace;

/* 0, or -1 with errno. */
int trace_open(trace *t, const char *path);
/* 1 = a record, 0 = end of file, -1 = the file cannot be read or is no trace; `why` then says what
 * and where. */
int trace_next(trace *t, trace_record *record, char why[128]);
void trace_close(trace *t);

#endif
