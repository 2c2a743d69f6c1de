/* SPDX-License-Identifier: Apache-2.0 */
/* log.h - one event per line on stderr, logfmt. */
#ifndef KVRELAY_TOOLS_LOG_H
#define KVRELAY_TOOLS_LOG_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

enum log_level { LOG_TRACE = 0, LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

/* Lines below this level are not written.  Default LOG_INFO. */
void log_set_level(int level);
/* "debug" …; -1 when there is no such level. */
int log_level_from_name(const char *name);
/*
 * Writes `time=… level=… event=EVENT` and then the formatted rest, which is a list of key=value in
 * logfmt.  Texts of peers go through log_quote first.
 */
void log_event(int level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Quotes `len` bytes for a logfmt value: at most 256 bytes of them, control characters and quotes
 * escaped. */
#define LOG_QUOTE_CAP (256 * 4 + 8)
const char *log_quote(const void *text, size_t len, char out[LOG_QUOTE_CAP]);

#endif
