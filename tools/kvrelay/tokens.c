/* SPDX-License-Identifier: Apache-2.0 */
#include "tokens.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "show.h"
#include "text.h"

#define TOKENS_MAX ((size_t)16777216)
#define FILE_MAX_BYTES ((size_t)256 << 20)

static int grow(uint32_t **tokens, size_t *cap, size_t need) {
  if (need <= *cap)
    return 0;
  size_t next = *cap == 0 ? 1024 : *cap;
  while (next < need)
    next *= 2;
  uint32_t *more = realloc(*tokens, next * sizeof **tokens);
  if (more == NULL)
    return -1;
  *tokens = more;
  *cap = next;
  return 0;
}

/* One word: "7" or "7-12".  0, or -1. */
static int parse_word(const char *word, size_t len, uint64_t *first, uint64_t *last) {
  uint64_t value[2] = {0, 0};
  int part = 0, digits = 0;
  for (size_t i = 0; i < len; i++) {
    if (word[i] == '-' && part == 0 && digits > 0) {
      part = 1;
      digits = 0;
    } else if (word[i] >= '0' && word[i] <= '9' && digits < 10) {
      value[part] = value[part] * 10 + (uint64_t)(word[i] - '0');
      digits++;
    } else {
      return -1;
    }
  }
  *first = value[0];
  *last = part == 1 ? value[1] : value[0];
  return digits == 0 || *last < *first || *last > UINT32_MAX ? -1 : 0;
}

typedef struct reader {
  const char *text;
  size_t len, at;
  bool opened, closed; /* the brackets of a JSON list */
  bool comma;          /* one was read, its token was not */
  uint32_t *list;
  size_t count, cap;
} reader;

static const char *read_mark(reader *r) {
  const char c = r->text[r->at++];
  if (c == '[') {
    if (r->opened || r->count != 0 || r->comma)
      return "a second list begins";
    r->opened = true;
  } else if (c == ']') {
    if (!r->opened || r->closed)
      return "']' closes no list";
    if (r->comma)
      return "a token is missing between ',' and ']'";
    r->closed = true;
  } else {
    if (r->closed)
      return "there is more behind the list";
    if (r->comma || r->count == 0)
      return "a token is missing before ','";
    r->comma = true;
  }
  return NULL;
}

static const char *read_word(reader *r) {
  static const char ends[] = ", \t\r\n[]";
  const size_t start = r->at;
  uint64_t first, last;
  while (r->at < r->len && memchr(ends, r->text[r->at], sizeof ends - 1) == NULL)
    r->at++;
  if (parse_word(r->text + start, r->at - start, &first, &last) != 0)
    return "no token: numbers 0 to 4294967295 and ranges like 100-195 are";
  if (r->closed)
    return "there is more behind the list";
  if (last - first >= TOKENS_MAX - r->count)
    return "more than 16777216 tokens";
  if (grow(&r->list, &r->cap, r->count + (size_t)(last - first) + 1) != 0)
    return "no memory for the tokens";
  for (uint64_t token = first; token <= last; token++)
    r->list[r->count++] = (uint32_t)token;
  r->comma = false;
  return NULL;
}

/* What is missing at the end: half a prompt must not pass for a whole one. */
static const char *read_end(const reader *r) {
  return r->opened && !r->closed ? "the list is cut off, its ']' is missing"
         : r->comma              ? "the list is cut off behind a comma"
         : r->count == 0         ? "there is no token"
                                 : NULL;
}

int tokens_parse(const char *text, size_t len, uint32_t **tokens, size_t *count, char why[640]) {
  reader r = {.text = text, .len = len};
  const char *wrong = NULL;
  size_t start = 0;
  while (wrong == NULL && r.at < len) {
    start = r.at;
    const char c = text[start];
    if (c == ' ' || c == '\t' || c == '\r' || c == '\n')
      r.at++;
    else
      wrong = c == '[' || c == ']' || c == ',' ? read_mark(&r) : read_word(&r);
  }
  if (wrong == NULL) {
    start = r.at;
    wrong = read_end(&r);
  }
  if (wrong == NULL) {
    *tokens = r.list;
    *count = r.count;
    return 0;
  }
  const kvrelay_text word = {(const uint8_t *)text + start, r.at - start};
  char shown[512];
  if (word.len != 0)
    show_format(why, 640, "at '%s', byte %zu of the tokens: %s", printable(word, shown), start + 1,
                wrong);
  else
    show_format(why, 640, "the tokens (%zu bytes): %s", len, wrong);
  free(r.list);
  return -1;
}

int tokens_read(const char *path, uint32_t **tokens, size_t *count, char why[640]) {
  char shown[512];
  FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
  size_t len = 0, cap = 1 << 16;
  char *text = f == NULL ? NULL : malloc(cap);
  while (text != NULL && len < FILE_MAX_BYTES) {
    size_t got = fread(text + len, 1, cap - len, f);
    if (got == 0)
      break;
    len += got;
    if (len == cap) {
      char *more = realloc(text, cap *= 2);
      if (more == NULL) {
        free(text);
        text = NULL;
      } else {
        text = more;
      }
    }
  }
  int result = -1;
  if (text == NULL || ferror(f) != 0)
    show_format(why, 640, "%s cannot be read: %s", printable(text_of(path), shown),
                strerror(errno));
  else if (len >= FILE_MAX_BYTES)
    show_format(why, 640, "%s is larger than 256 MiB", printable(text_of(path), shown));
  else
    result = tokens_parse(text, len, tokens, count, why);
  free(text);
  if (f != NULL && f != stdin)
    fclose(f);
  return result;
}
