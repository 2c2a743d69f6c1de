/* SPDX-License-Identifier: Apache-2.0 */
#include "vectors.h"

#include "vectors_run.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static vec_guard *current; /* where a malformed value of the running vector leads */

int vec_fail(char *why, size_t why_cap, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(why, why_cap, format, args);
  va_end(args);
  return VEC_FAILED;
}

static _Noreturn void malformed(const char *wanted, const json_t *value) {
  char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
  char what[160];
  snprintf(what, sizeof what, "wanted %s, got %.100s", wanted, text ? text : "nothing");
  free(text);
  if (!current) {
    fprintf(stderr, "vectors: %s\n", what);
    exit(2);
  }
  memcpy(current->what, what, sizeof what);
  longjmp(current->back, 1);
}

int vec_run_guarded(const vec_kind *kind, const json_t *vector, char *why, size_t why_cap) {
  vec_guard guard;
  int result;
  current = &guard;
  if (setjmp(guard.back) == 0)
    result = kind->run(vector, why, why_cap);
  else
    result = vec_fail(why, why_cap, "%s", guard.what);
  current = NULL;
  return result;
}

json_t *vec_get(const json_t *object, const char *name) {
  json_t *value = json_object_get(object, name);
  if (!value) {
    char wanted[80];
    snprintf(wanted, sizeof wanted, "a member \"%.60s\"", name);
    malformed(wanted, object);
  }
  return value;
}

uint64_t vec_u64(const json_t *value) {
  if (json_is_integer(value))
    return (uint64_t)json_integer_value(value);
  const char *text = json_string_value(value);
  if (!text)
    malformed("a 64-bit number", value);
  int negative = *text == '-';
  const char *digits = text + negative;
  int base = strncmp(digits, "0x", 2) == 0 ? 16 : 10;
  const char *first = base == 16 ? digits + 2 : digits;
  char *end = NULL;
  errno = 0;
  unsigned long long magnitude = strtoull(digits, &end, base);
  int starts_well =
      (*first >= '0' && *first <= '9') || (base == 16 && strchr("abcdefABCDEF", *first));
  if (errno != 0 || !*first || !starts_well || *end || (negative && magnitude > 1ull << 63))
    malformed("a 64-bit number", value);
  return negative ? 0 - (uint64_t)magnitude : (uint64_t)magnitude;
}

static void *elements(const json_t *array, size_t size, size_t *len) {
  if (!json_is_array(array))
    malformed("an array of numbers", array);
  *len = json_array_size(array);
  void *memory = calloc(*len + 1, size);
  if (!memory)
    abort();
  return memory;
}

uint64_t *vec_u64s(const json_t *array, size_t *len) {
  uint64_t *numbers = (uint64_t *)elements(array, sizeof *numbers, len);
  for (size_t i = 0; i < *len; i++)
    numbers[i] = vec_u64(json_array_get(array, i));
  return numbers;
}

uint32_t *vec_u32s(const json_t *array, size_t *len) {
  uint32_t *numbers = (uint32_t *)elements(array, sizeof *numbers, len);
  for (size_t i = 0; i < *len; i++) {
    uint64_t number = vec_u64(json_array_get(array, i));
    if (number > UINT32_MAX)
      malformed("a 32-bit number", json_array_get(array, i));
    numbers[i] = (uint32_t)number;
  }
  return numbers;
}

static int nibble(char c) {
  if (c >= '0' && c <= '9')
    return c - '0';
  if (c >= 'a' && c <= 'f')
    return c - 'a' + 10;
  return -1;
}

uint8_t *vec_hex(const json_t *value, size_t *len) {
  const char *text = json_string_value(value);
  size_t digits = text ? strlen(text) : 1;
  if (digits % 2 != 0)
    malformed("lower-case hex", value);
  uint8_t *bytes = malloc(digits / 2 + 1);
  if (!bytes)
    abort();
  for (size_t i = 0; i < digits; i += 2) {
    int high = nibble(text[i]), low = nibble(text[i + 1]);
    if (high < 0 || low < 0) {
      free(bytes);
      malformed("lower-case hex", value);
    }
    bytes[i / 2] = (uint8_t)(high * 16 + low);
  }
  *len = digits / 2;
  return bytes;
}

const char *vec_str(const json_t *value) {
  const char *text = json_string_value(value);
  if (!text)
    malformed("a string", value);
  return text;
}
