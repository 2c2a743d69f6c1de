/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static int log_level = LOG_INFO;
static const char *const log_level_names[] = {"trace", "debug", "info", "warn", "error"};

void log_set_level(int level) { log_level = level; }

int log_level_from_name(const char *name) {
  for (int i = LOG_TRACE; i <= LOG_ERROR; i++)
    if (strcmp(name, log_level_names[i]) == 0)
      return i;
  return -1;
}

void log_event(int level, const char *event, const char *format, ...) {
  if (level < log_level)
    return;
  struct timespec now;
  struct tm utc;
  char stamp[32], rest[2048];
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &utc);
  strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
  va_list args;
  va_start(args, format);
  vsnprintf(rest, sizeof rest, format, args);
  va_end(args);
  /* One write per line: lines of a daemon and of its tests do not interleave. */
  char line[2200];
  int n =
      snprintf(line, sizeof line, "time=%s.%03ldZ level=%s event=%s%s%s\n", stamp,
               now.tv_nsec / 1000000, log_level_names[level], event, rest[0] != 0 ? " " : "", rest);
  if (n > 0)
    fwrite(line, 1, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1, stderr);
}

const char *log_quote(const void *text, size_t len, char out[LOG_QUOTE_CAP]) {
  static const char hex[] = "0123456789abcdef";
  const unsigned char *p = text;
  char *o = out;
  *o++ = '"';
  for (size_t i = 0; i < len && i < 256; i++) {
    if (p[i] == '"' || p[i] == '\\') {
      *o++ = '\\';
      *o++ = (char)p[i];
    } else if (p[i] < 0x20 || p[i] >= 0x7F) {
      *o++ = '\\';
      *o++ = 'x';
      *o++ = hex[p[i] >> 4];
      *o++ = hex[p[i] & 15];
    } else {
      *o++ = (char)p[i];
    }
  }
  if (len > 256) {
    memcpy(o, "...", 3);
    o += 3;
  }
  *o++ = '"';
  *o = 0;
  return out;
}
