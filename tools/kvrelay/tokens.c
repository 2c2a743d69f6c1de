/* SPDX-License-Identifier: Apache-2.0 */
#include "tokens.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "show.h"
#include "text.h"

#define TOKENS_MAX ((size_t)1 << 24)
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

int tokens_parse(const char *text, size_t len, uint32_t **tokens, size_t *count, char why[640]) {
  static const char separators[] = ", \t\r\n[]";
  size_t cap = 0, n = 0;
  uint32_t *list = NULL;
  for (size_t i = 0; i < len;) {
    if (memchr(separators, text[i], sizeof separators - 1) != NULL) {
      i++;
      continue;
    }
    size_t start = i;
    while (i < len && memchr(separators, text[i], sizeof separators - 1) == NULL)
      i++;
    uint64_t first, last;
    if (parse_word(text + start, i - start, &first, &last) != 0) {
      const kvrelay_text word = {(const uint8_t *)text + start, i - start};
      char shown[512];
      show_format(why, 640, "'%s' is no token: numbers 0 to 4294967295 and ranges like 100-195 are",
                  printable(word, shown));
      free(list);
      return -1;
    }
    if (last - first >= TOKENS_MAX - n || grow(&list, &cap, n + (size_t)(last - first) + 1) != 0) {
      snprintf(why, 640, "more than %zu tokens, or no memory for them", TOKENS_MAX);
      free(list);
      return -1;
    }
    for (uint64_t token = first; token <= last; token++)
      list[n++] = (uint32_t)token;
  }
  *tokens = list;
  *count = n;
  return 0;
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
