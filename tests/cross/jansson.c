/* SPDX-License-Identifier: Apache-2.0 */
#include "jansson.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 64

static void *grown(void *memory, size_t bytes) {
  memory = realloc(memory, bytes);
  if (!memory)
    abort();
  return memory;
}

static json_t *made(json_type type) {
  json_t *value = grown(NULL, sizeof *value);
  *value = (json_t){.type = type, .refs = 1};
  return value;
}

json_t *json_incref(json_t *value) {
  value->refs++;
  return value;
}

void json_decref(json_t *value) {
  if (!value || --value->refs > 0)
    return;
  for (size_t i = 0; value->all && i < value->len; i++) {
    json_decref(value->all[i]);
    if (value->names)
      free(value->names[i]);
  }
  free(value->all);
  free((void *)value->names);
  free(value->text);
  free(value);
}

/* Takes over both; name is NULL in an array. */
static void add(json_t *parent, char *name, json_t *child) {
  if ((parent->len & (parent->len - 1)) == 0) { /* a power of two is full */
    const size_t cap = parent->len ? 2 * parent->len : 1;
    parent->all = grown((void *)parent->all, cap * sizeof *parent->all);
    if (name)
      parent->names = grown((void *)parent->names, cap * sizeof *parent->names);
  }
  parent->all[parent->len] = child;
  if (name)
    parent->names[parent->len] = name;
  parent->len++;
}

/* ---- reading ---- */

typedef struct reader {
  const char *at, *wrong; /* wrong: what is missing, or NULL */
  int line;
} reader;

static json_t *read_value(reader *r, int depth);

static char peek(reader *r) {
  for (; *r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r'; r->at++)
    r->line += *r->at == '\n';
  return *r->at;
}

static bool took(reader *r, char c) {
  if (peek(r) != c)
    return false;
  r->at++;
  return true;
}

static json_t *wrong(reader *r, const char *what) {
  if (!r->wrong)
    r->wrong = what;
  return NULL;
}

static json_t *read_string(reader *r) {
  static const char escapes[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
  json_t *value = made(JSON_STRING);
  size_t cap = 1; /* escapes are longer than what they mean */
  for (const char *c = r->at; *c && *c != '"'; c++) {
    cap++;
    c += *c == '\\' && c[1];
  }
  value->text = grown(NULL, cap + 1);
  while (*r->at != '"') {
    char c = *r->at++;
    if (c == '\\' && *r->at == 'u') {
      unsigned code = 0x80;
      if (sscanf(r->at, "u%4x", &code) != 1 || code >= 0x80)
        break;
      c = (char)code;
      r->at += 5;
    } else if (c == '\\') {
      const char *escape = *r->at ? strchr(escapes, *r->at) : NULL;
      if (!escape)
        break;
      c = meant[escape - escapes];
      r->at++;
    } else if ((unsigned char)c < 0x20) {
      break;
    }
    value->text[value->len++] = c;
  }
  value->text[value->len] = '\0';
  if (*r->at == '"') {
    r->at++;
    return value;
  }
  json_decref(value);
  return wrong(r, "a string that ends");
}

static json_t *read_object(reader *r, int depth) {
  json_t *value = made(JSON_OBJECT);
  if (took(r, '}'))
    return value;
  do {
    json_t *name = took(r, '"') ? read_string(r) : wrong(r, "a name");
    if (name && json_object_get(value, name->text))
      wrong(r, "a name that is new");
    if (name && !took(r, ':'))
      wrong(r, "a colon");
    json_t *child = r->wrong ? NULL : read_value(r, depth);
    if (child) {
      add(value, name->text, child);
      name->text = NULL;
    }
    json_decref(name);
  } while (!r->wrong && took(r, ','));
  if (!r->wrong && !took(r, '}'))
    wrong(r, "the end of an object");
  return value;
}

static json_t *read_array(reader *r, int depth) {
  json_t *value = made(JSON_ARRAY);
  if (took(r, ']'))
    return value;
  do {
    json_t *child = read_value(r, depth);
    if (child)
      add(value, NULL, child);
  } while (!r->wrong && took(r, ','));
  if (!r->wrong && !took(r, ']'))
    wrong(r, "the end of an array");
  return value;
}

static json_t *read_word(reader *r, const char *word, json_type type) {
  if (strncmp(r->at, word, strlen(word)) != 0)
    return wrong(r, "a value");
  r->at += strlen(word);
  return made(type);
}

static json_t *read_number(reader *r) {
  char *end;
  errno = 0;
  const long long number = strtoll(r->at, &end, 10);
  const bool is_real = *end == '.' || *end == 'e' || *end == 'E';
  if (end == r->at || (!is_real && errno != 0))
    return wrong(r, "a number");
  const double real = is_real ? strtod(r->at, &end) : 0;
  r->at = end;
  return is_real ? json_real(real) : json_integer(number);
}

/* A value, or what there is of it when r->wrong is set. */
static json_t *read_value(reader *r, int depth) {
  if (depth == DEPTH_MAX)
    return wrong(r, "less nesting");
  switch (peek(r)) {
  case '{':
    r->at++;
    return read_object(r, depth + 1);
  case '[':
    r->at++;
    return read_array(r, depth + 1);
  case '"':
    r->at++;
    return read_string(r);
  case 't':
    return read_word(r, "true", JSON_TRUE);
  case 'f':
    return read_word(r, "false", JSON_FALSE);
  case 'n':
    return read_word(r, "null", JSON_NULL);
  default:
    return read_number(r);
  }
}

static char *read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  char *text = NULL;
  size_t len = 0, got = 1;
  while (file && got > 0) {
    text = grown(text, len + 65536 + 1);
    got = fread(text + len, 1, 65536, file);
    len += got;
    text[len] = '\0';
  }
  if (file)
    fclose(file);
  return text;
}

json_t *json_load_file(const char *path, size_t flags, json_error_t *error) {
  char *text = read_file(path);
  reader r = {text ? text : "", NULL, 1};
  json_t *value = read_value(&r, 0);
  (void)flags;
  if (!r.wrong && peek(&r) != '\0')
    wrong(&r, "the end of the file");
  free(text);
  if (!r.wrong)
    return value;
  error->line = r.line;
  snprintf(error->text, sizeof error->text, "wanted %s", r.wrong);
  json_decref(value);
  return NULL;
}

/* ---- values ---- */

char *json_dumps(const json_t *value, size_t flags) {
  static const char *const kinds[] = {"an object", "an array", "a string", "an integer",
                                      "a real",    "true",     "false",    "null"};
  (void)flags;
  return strdup(kinds[value->type]);
}

json_t *json_integer(int64_t number) {
  json_t *value = made(JSON_INTEGER);
  value->integer = number;
  return value;
}

json_t *json_real(double number) {
  json_t *value = made(JSON_REAL);
  value->real = number;
  return value;
}

json_t *json_boolean(bool is_true) { return made(is_true ? JSON_TRUE : JSON_FALSE); }

json_t *json_string(const char *text) {
  json_t *value = made(JSON_STRING);
  value->len = strlen(text);
  value->text = strcpy(grown(NULL, value->len + 1), text);
  return value;
}

json_t *json_pack(const char *format, const char *text) {
  json_t *value = made(JSON_ARRAY);
  if (strcmp(format, "[s]") != 0)
    abort();
  add(value, NULL, json_string(text));
  return value;
}

int64_t json_integer_value(const json_t *value) {
  return json_is_integer(value) ? value->integer : 0;
}

double json_real_value(const json_t *value) { return json_is_real(value) ? value->real : 0; }

double json_number_value(const json_t *value) {
  return json_is_integer(value) ? (double)value->integer : json_real_value(value);
}

const char *json_string_value(const json_t *value) {
  return json_is_(value, JSON_STRING) ? value->text : NULL;
}

size_t json_string_length(const json_t *value) {
  return json_is_(value, JSON_STRING) ? value->len : 0;
}

size_t json_array_size(const json_t *value) { return json_is_array(value) ? value->len : 0; }

size_t json_object_size(const json_t *value) { return json_is_object(value) ? value->len : 0; }

json_t *json_array_get(const json_t *value, size_t index) {
  return index < json_array_size(value) ? value->all[index] : NULL;
}

/* Place of a member, or the number of members. */
static size_t find(const json_t *object, const char *name) {
  size_t i = 0;
  while (i < json_object_size(object) && strcmp(object->names[i], name) != 0)
    i++;
  return i;
}

json_t *json_object_get(const json_t *value, const char *name) {
  const size_t i = find(value, name);
  return i < json_object_size(value) ? value->all[i] : NULL;
}

static int put(json_t *parent, size_t index, json_t *value) {
  json_decref(parent->all[index]);
  parent->all[index] = value;
  return 0;
}

int json_array_set_new(json_t *array, size_t index, json_t *value) {
  return index < json_array_size(array) ? put(array, index, value) : -1;
}

int json_object_set_new(json_t *object, const char *name, json_t *value) {
  const size_t i = find(object, name);
  return i < json_object_size(object) ? put(object, i, value) : -1;
}
