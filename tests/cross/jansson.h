/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CROSS_JANSSON_H_
#define CROSS_JANSSON_H_

/*
 * As much of jansson as the runner of vectors uses, for machines that have no jansson. Files are
 * our own: integers have 64 bits, \u escapes stay below 0x80, nesting is bounded.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum json_type {
  JSON_OBJECT,
  JSON_ARRAY,
  JSON_STRING,
  JSON_INTEGER,
  JSON_REAL,
  JSON_TRUE,
  JSON_FALSE,
  JSON_NULL
} json_type;

typedef struct json_t {
  json_type type;
  size_t refs;
  int64_t integer;
  double real;
  char *text;          /* a string, with a NUL behind it */
  size_t len;          /* of the string, or number of children */
  char **names;        /* of the members of an object */
  struct json_t **all; /* children */
} json_t;

typedef struct json_error_t {
  int line;
  char text[80];
} json_error_t;

enum { JSON_REJECT_DUPLICATES = 1, JSON_ENCODE_ANY = 2, JSON_COMPACT = 4 };

/* NULL with the reason in *error. Members of one object have different names, whatever the flags.
 */
json_t *json_load_file(const char *path, size_t flags, json_error_t *error);
/* The kind of the value, to be released with free(); not its text. */
char *json_dumps(const json_t *value, size_t flags);

json_t *json_incref(json_t *value);
void json_decref(json_t *value);

json_t *json_integer(int64_t number);
json_t *json_real(double number);
json_t *json_boolean(bool is_true);
json_t *json_string(const char *text);
json_t *json_pack(const char *format, const char *text); /* "[s]" only */

static inline bool json_is_(const json_t *value, json_type type) {
  return value && value->type == type;
}
#define json_is_object(V) json_is_(V, JSON_OBJECT)
#define json_is_array(V) json_is_(V, JSON_ARRAY)
#define json_is_integer(V) json_is_(V, JSON_INTEGER)
#define json_is_true(V) json_is_(V, JSON_TRUE)
#define json_is_boolean(V) (json_is_(V, JSON_TRUE) || json_is_(V, JSON_FALSE))
#define json_is_null(V) json_is_(V, JSON_NULL)
#define json_is_real(V) json_is_(V, JSON_REAL)

/* 0 or NULL for a value of another kind. */
int64_t json_integer_value(const json_t *value);
double json_real_value(const json_t *value);
double json_number_value(const json_t *value);
const char *json_string_value(const json_t *value);
size_t json_string_length(const json_t *value);
size_t json_array_size(const json_t *value);
size_t json_object_size(const json_t *value);
json_t *json_array_get(const json_t *value, size_t index);
json_t *json_object_get(const json_t *value, const char *name);

/* Put in the place of what is there; take over the reference. 0, or -1 when there is no such place.
 */
int json_array_set_new(json_t *array, size_t index, json_t *value);
int json_object_set_new(json_t *object, const char *name, json_t *value);

#define json_array_foreach(ARRAY, INDEX, VALUE)                                                    \
  for ((INDEX) = 0; (INDEX) < json_array_size(ARRAY) && ((VALUE) = (ARRAY)->all[INDEX]); (INDEX)++)
#define json_object_foreach(OBJECT, NAME, VALUE)                                                   \
  for (size_t member_ = 0; member_ < json_object_size(OBJECT) &&                                   \
                           ((NAME) = (OBJECT)->names[member_], (VALUE) = (OBJECT)->all[member_]);  \
       member_++)

#endif
