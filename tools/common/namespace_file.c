/* SPDX-License-Identifier: Apache-2.0 */
#include "namespace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text.h"

static int refuse(char why[NAMESPACE_WHY_CAP], int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int refuse(char why[NAMESPACE_WHY_CAP], int code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(why, NAMESPACE_WHY_CAP, format, args);
  va_end(args);
  return code;
}

/* ---- the canonical text ---- */

/* Characters that a text has as \uXXXX; the last two are read from three bytes. */
static size_t escape_len(const uint8_t *at, size_t left, unsigned *code) {
  if (*at < 0x20 || *at == '&' || *at == '<' || *at == '>') {
    *code = *at;
    return 1;
  }
  if (left >= 3 && at[0] == 0xE2 && at[1] == 0x80 && (at[2] == 0xA8 || at[2] == 0xA9)) {
    *code = 0x2000u + (at[2] & 0x3Fu);
    return 3;
  }
  return 0;
}

static void put_text(FILE *out, kvrelay_text text) {
  static const char with_letter[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
  fputc('"', out);
  for (size_t i = 0; i < text.len;) {
    const uint8_t c = text.ptr[i];
    const char *letter = c ? strchr(with_letter, c) : NULL;
    unsigned code = 0;
    const size_t escaped = letter ? 1 : escape_len(text.ptr + i, text.len - i, &code);
    if (letter)
      fprintf(out, "\\%c", letters[letter - with_letter]);
    else if (escaped)
      fprintf(out, "\\u%04x", code);
    else
      fputc(c, out);
    i += escaped ? escaped : 1;
  }
  fputc('"', out);
}

char *namespace_canonical(const kvrelay_text *namespaces, size_t len, const char *connection) {
  char *text = NULL;
  size_t text_len;
  FILE *out = open_memstream(&text, &text_len);
  if (!out)
    return NULL;
  fputs("{\"version\":1", out);
  if (connection) {
    fputs(",\"connectionRevision\":", out);
    put_text(out, text_of(connection));
  }
  fputs(",\"sources\":[", out);
  for (size_t i = 0; i < len; i++) {
    fputs(i ? ",{\"namespace\":" : "{\"namespace\":", out);
    put_text(out, namespaces[i]);
    fputc('}', out);
  }
  fputs("]}", out);
  const bool whole = !ferror(out);
  if (fclose(out) == 0 && whole)
    return text;
  free(text);
  return NULL;
}

/* ---- from JSON ---- */

static kvrelay_text text_of_json(const json_t *value) {
  kvrelay_text text = {(const uint8_t *)json_string_value(value), json_string_length(value)};
  return text;
}

static int compare(const void *left, const void *right) {
  return kvrelay_text_compare(*(const kvrelay_text *)left, *(const kvrelay_text *)right);
}

/* The namespaces of the file, in its order; texts are lent from it. */
static int take_sources(const json_t *sources, kvrelay_text *names, char why[NAMESPACE_WHY_CAP]) {
  size_t i;
  const json_t *source;
  json_array_foreach (sources, i, source) {
    const json_t *name = json_object_get(source, "namespace");
    if (!json_is_string(name) || json_object_size(source) != 1)
      return refuse(why, NAMESPACES_ERR_CONTENT,
                    "sources[%zu]: must be an object with the one key namespace, a text", i);
    names[i] = text_of_json(name);
    if (names[i].len > NAMESPACE_TEXT_MAX || !kvrelay_text_valid(names[i]))
      return refuse(why, NAMESPACES_ERR_CONTENT,
                    "sources[%zu].namespace: must be 1 to %d bytes, without white space at either "
                    "end",
                    i, NAMESPACE_TEXT_MAX);
  }
  return NAMESPACES_CHANGED;
}

static int check_head(const json_t *root, const char *connection, char why[NAMESPACE_WHY_CAP]) {
  const json_t *version = json_object_get(root, "version");
  const json_t *revision = json_object_get(root, "connectionRevision");
  const json_t *sources = json_object_get(root, "sources");
  if (!json_is_object(root) || json_object_size(root) != (revision ? 3 : 2) || !version || !sources)
    return refuse(why, NAMESPACES_ERR_CONTENT,
                  "must be an object with the keys version, sources and at most "
                  "connectionRevision, each once");
  if (!json_is_integer(version) || json_integer_value(version) != 1)
    return refuse(why, NAMESPACES_ERR_CONTENT, "version: must be 1");
  const kvrelay_text text = text_of_json(revision);
  if (revision && (!json_is_string(revision) || text.len == 0 || text.len > NAMESPACE_TEXT_MAX))
    return refuse(why, NAMESPACES_ERR_CONTENT,
                  "connectionRevision: must be a text of 1 to %d bytes", NAMESPACE_TEXT_MAX);
  if (!revision != !connection || (revision && !kvrelay_text_equal(text, text_of(connection))))
    return refuse(why, NAMESPACES_ERR_CONTENT,
                  "connectionRevision: is not the configured one; write the file for this "
                  "connection, or configure the one that it is for");
  if (!json_is_array(sources) || json_array_size(sources) > NAMESPACE_SOURCES_MAX)
    return refuse(why, NAMESPACES_ERR_CONTENT, "sources: must be an array of at most %d entries",
                  NAMESPACE_SOURCES_MAX);
  return NAMESPACES_CHANGED;
}

/* The list as one allocation with its texts. */
static int keep(const kvrelay_text *names, size_t len, const char *connection,
                namespace_selection *out, char why[NAMESPACE_WHY_CAP]) {
  namespace_selection s = {NULL, len, ""};
  size_t bytes = (len + 1) * sizeof *names;
  for (size_t i = 0; i < len; i++)
    bytes += names[i].len;
  char *canonical = namespace_canonical(names, len, connection);
  s.namespaces = malloc(bytes);
  if (!canonical || !s.namespaces || !sha256_hex(canonical, strlen(canonical), s.revision)) {
    free(canonical);
    free(s.namespaces);
    return refuse(why, NAMESPACES_ERR_READ, "out of memory");
  }
  free(canonical);
  uint8_t *at = (uint8_t *)(s.namespaces + len + 1);
  for (size_t i = 0; i < len; i++) {
    memcpy(at, names[i].ptr, names[i].len);
    s.namespaces[i] = (kvrelay_text){at, names[i].len};
    at += names[i].len;
  }
  *out = s;
  return NAMESPACES_CHANGED;
}

static int select_from(const json_t *root, const char *connection, namespace_selection *out,
                       char why[NAMESPACE_WHY_CAP]) {
  int rc = check_head(root, connection, why);
  if (rc < 0)
    return rc;
  const json_t *sources = json_object_get(root, "sources");
  const size_t len = json_array_size(sources);
  kvrelay_text *names = calloc(len + 1, sizeof *names);
  rc =
      names ? take_sources(sources, names, why) : refuse(why, NAMESPACES_ERR_READ, "out of memory");
  if (rc > 0)
    qsort(names, len, sizeof *names, compare);
  for (size_t i = 1; rc > 0 && i < len; i++)
    if (compare(&names[i - 1], &names[i]) == 0)
      rc = refuse(why, NAMESPACES_ERR_CONTENT, "sources: a namespace stands there twice");
  if (rc > 0)
    rc = keep(names, len, connection, out, why);
  free(names);
  return rc;
}

int namespace_selection_parse(const char *bytes, size_t len, const char *connection,
                              namespace_selection *out, char why[NAMESPACE_WHY_CAP]) {
  json_error_t error;
  if (len > NAMESPACE_FILE_MAX)
    return refuse(why, NAMESPACES_ERR_READ, "is longer than %zu bytes", NAMESPACE_FILE_MAX);
  json_t *root =
      json_loadb(bytes, len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
  if (!root) /* the reader's own words would quote the file */
    return json_error_code(&error) == json_error_duplicate_key
               ? refuse(why, NAMESPACES_ERR_CONTENT, "line %d: a key stands there twice",
                        error.line)
               : refuse(why, NAMESPACES_ERR_CONTENT, "line %d, column %d: is not JSON", error.line,
                        error.column);
  const int rc = select_from(root, connection, out, why);
  json_decref(root);
  return rc;
}

void namespace_selection_free(namespace_selection *s) {
  free(s->namespaces);
  *s = (namespace_selection){NULL, 0, ""};
}

bool namespace_selection_has(const namespace_selection *s, kvrelay_text name) {
  return s->namespaces_len != 0 &&
         bsearch(&name, s->namespaces, s->namespaces_len, sizeof name, compare) != NULL;
}

/* ---- the file ---- */

/* At most one byte more than a file may have. */
static int read_all(const char *path, char *bytes, size_t *len, char why[NAMESPACE_WHY_CAP]) {
  struct stat about;
  ssize_t got = 1;
  const int fd =
      open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* never waits for a pipe's writer */
  if (fd < 0 || fstat(fd, &about) != 0)
    refuse(why, NAMESPACES_ERR_READ, "cannot be opened: %s", strerror(errno));
  else if (!S_ISREG(about.st_mode))
    refuse(why, NAMESPACES_ERR_READ, "is not a regular file");
  else
    why[0] = '\0';
  for (; !why[0] && got > 0 && *len <= NAMESPACE_FILE_MAX;) {
    got = read(fd, bytes + *len, NAMESPACE_FILE_MAX + 1 - *len);
    if (got > 0)
      *len += (size_t)got;
    else if (got < 0 && errno == EINTR)
      got = 1;
    else if (got < 0)
      refuse(why, NAMESPACES_ERR_READ, "cannot be read: %s", strerror(errno));
  }
  if (fd >= 0)
    close(fd);
  return why[0] ? NAMESPACES_ERR_READ : NAMESPACES_CHANGED;
}

int namespace_file_poll(namespace_file *f, char why[NAMESPACE_WHY_CAP]) {
  namespace_selection next;
  size_t len = 0;
  char *bytes = malloc(NAMESPACE_FILE_MAX + 1);
  int rc = bytes ? read_all(f->path, bytes, &len, why)
                 : refuse(why, NAMESPACES_ERR_READ, "out of memory");
  if (rc > 0)
    rc = namespace_selection_parse(bytes, len, f->connection, &next, why);
  free(bytes);
  if (rc < 0)
    return rc;
  if (strcmp(next.revision, f->now.revision) == 0) {
    namespace_selection_free(&next);
    return NAMESPACES_SAME;
  }
  namespace_selection_free(&f->now);
  f->now = next;
  return NAMESPACES_CHANGED;
}

void namespace_file_close(namespace_file *f) { namespace_selection_free(&f->now); }
