/* SPDX-License-Identifier: Apache-2.0 */
#include "yaml_doc.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define YAML_DOC_MAX_BYTES ((size_t)16 << 20)
#define YAML_DOC_MAX_DEPTH 16
#define YAML_DOC_MAX_ERRORS 20 /* then nothing new is looked for */

/* "endpoints/0/model" as people write it: endpoints[0].model. */
static void put_path(FILE *out, const char *path) {
  for (size_t len; path[0] != 0; path += len) {
    const bool first = path[0] != '/';
    path += !first;
    len = strcspn(path, "/");
    if (len != 0 && strspn(path, "0123456789") == len)
      fprintf(out, "[%.*s]", (int)len, path);
    else
      fprintf(out, "%s%.*s", first ? "" : ".", (int)len, path);
  }
}

static void say(yaml_doc *doc, size_t line, size_t column, const char *path, bool warning,
                const char *format, va_list args) __attribute__((format(printf, 6, 0)));
static void say(yaml_doc *doc, size_t line, size_t column, const char *path, bool warning,
                const char *format, va_list args) {
  fprintf(doc->report, "%s:%zu:%zu: ", doc->path, line, column);
  if (warning)
    fputs("warning: ", doc->report);
  if (path[0] != 0) {
    put_path(doc->report, path);
    fputs(": ", doc->report);
  }
  vfprintf(doc->report, format, args);
  fputc('\n', doc->report);
  if (warning)
    doc->warnings++;
  else
    doc->errors++;
}

static void say_at(yaml_doc *doc, yaml_mark_t mark, const char *path, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void say_at(yaml_doc *doc, yaml_mark_t mark, const char *path, const char *format, ...) {
  va_list args;
  va_start(args, format);
  say(doc, mark.line + 1, mark.column + 1, path, false, format, args);
  va_end(args);
}

static int read_bytes(yaml_doc *doc) {
  FILE *f = fopen(doc->path, "rb");
  if (f == NULL) {
    fprintf(doc->report, "%s: cannot be read: %s\n", doc->path, strerror(errno));
    return 69;
  }
  doc->bytes = malloc(YAML_DOC_MAX_BYTES + 1);
  doc->len = doc->bytes == NULL ? 0 : fread(doc->bytes, 1, YAML_DOC_MAX_BYTES + 1, f);
  bool bad = doc->bytes == NULL || ferror(f) != 0;
  fclose(f);
  if (bad) {
    fprintf(doc->report, "%s: cannot be read: %s\n", doc->path, strerror(errno));
    return 69;
  }
  if (doc->len > YAML_DOC_MAX_BYTES) {
    fprintf(doc->report, "%s: larger than 16 MiB\n", doc->path);
    return 78;
  }
  return 0;
}

/* What a configuration needs no syntax for, and what hides surprises: refused in one pass over the
 * events, one case for each kind of them. */
static void check_events(yaml_doc *doc) {
  yaml_parser_t parser;
  yaml_parser_initialize(&parser);
  yaml_parser_set_input_string(&parser, doc->bytes, doc->len);
  unsigned documents = 0, depth = 0;
  for (bool more = true; more;) {
    yaml_event_t event;
    if (!yaml_parser_parse(&parser, &event)) {
      say_at(doc, parser.problem_mark, "", "not YAML: %s",
             parser.problem != NULL ? parser.problem : "cannot be parsed");
      break;
    }
    const yaml_char_t *anchor = NULL, *tag = NULL;
    switch (event.type) {
    case YAML_DOCUMENT_START_EVENT:
      if (++documents > 1)
        say_at(doc, event.start_mark, "", "a second document; put everything into one");
      break;
    case YAML_ALIAS_EVENT:
      say_at(doc, event.start_mark, "", "aliases are not accepted; write the value out");
      break;
    case YAML_SCALAR_EVENT:
      anchor = event.data.scalar.anchor;
      tag = event.data.scalar.tag;
      break;
    case YAML_SEQUENCE_START_EVENT:
      anchor = event.data.sequence_start.anchor;
      tag = event.data.sequence_start.tag;
      depth++;
      break;
    case YAML_MAPPING_START_EVENT:
      anchor = event.data.mapping_start.anchor;
      tag = event.data.mapping_start.tag;
      depth++;
      break;
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
      depth--;
      break;
    case YAML_STREAM_END_EVENT:
      if (documents == 0)
        say_at(doc, event.start_mark, "",
               "the file is empty; it needs at least 'version: 1' and 'relay:'");
      more = false;
      break;
    default:
      break;
    }
    if (anchor != NULL)
      say_at(doc, event.start_mark, "", "anchors are not accepted; write the value out");
    if (tag != NULL)
      say_at(doc, event.start_mark, "", "tags are not accepted; write a plain value");
    if (depth > YAML_DOC_MAX_DEPTH) {
      say_at(doc, event.start_mark, "", "nested deeper than %d levels", YAML_DOC_MAX_DEPTH);
      more = false;
    }
    yaml_event_delete(&event);
    if (doc->errors >= YAML_DOC_MAX_ERRORS)
      more = false;
  }
  yaml_parser_delete(&parser);
}

int yaml_doc_read(yaml_doc *doc, const char *path, FILE *report) {
  memset(doc, 0, sizeof *doc);
  doc->path = path;
  doc->report = report;
  int code = read_bytes(doc);
  if (code != 0)
    return code;
  check_events(doc);
  if (doc->errors != 0)
    return 78;
  yaml_parser_t parser;
  yaml_parser_initialize(&parser);
  yaml_parser_set_input_string(&parser, doc->bytes, doc->len);
  int loaded = yaml_parser_load(&parser, &doc->document);
  if (!loaded)
    say_at(doc, parser.problem_mark, "", "not YAML: %s",
           parser.problem != NULL ? parser.problem : "cannot be parsed");
  yaml_parser_delete(&parser);
  return loaded ? 0 : 78;
}

void yaml_doc_free(yaml_doc *doc) {
  yaml_document_delete(&doc->document);
  free(doc->bytes);
}

/* ---- keys against the schema ---- */

static unsigned distance(const char *a, size_t a_len, const char *b) {
  unsigned row[64];
  size_t b_len = strlen(b);
  if (a_len >= 64 || b_len >= 64)
    return 99;
  for (size_t j = 0; j <= b_len; j++)
    row[j] = (unsigned)j;
  for (size_t i = 1; i <= a_len; i++) {
    unsigned diagonal = row[0];
    row[0] = (unsigned)i;
    for (size_t j = 1; j <= b_len; j++) {
      unsigned replace = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      unsigned best = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
      row[j] = replace < best ? replace : best;
    }
  }
  return row[b_len];
}

static const cyaml_schema_field_t *field_of(const cyaml_schema_field_t *fields, const char *key,
                                            size_t len, const char **nearest) {
  unsigned best = UINT_MAX;
  *nearest = fields->key; /* no list is empty */
  for (; fields->key != NULL; fields++) {
    if (strlen(fields->key) == len && memcmp(fields->key, key, len) == 0)
      return fields;
    unsigned d = distance(key, len, fields->key);
    if (d < best) {
      best = d;
      *nearest = fields->key;
    }
  }
  return NULL;
}

static void check_node(yaml_doc *doc, yaml_node_t *node, const cyaml_schema_value_t *schema,
                       const char *path);

static void child_path(char out[512], const char *path, const char *key, size_t len) {
  snprintf(out, 512, "%s%s%.*s", path, path[0] != 0 ? "/" : "", (int)(len < 128 ? len : 128), key);
}

static void check_mapping(yaml_doc *doc, yaml_node_t *node, const cyaml_schema_field_t *fields,
                          const char *path) {
  yaml_node_pair_t *first = node->data.mapping.pairs.start, *end = node->data.mapping.pairs.top;
  char below[512];
  for (yaml_node_pair_t *pair = first; pair < end && doc->errors < YAML_DOC_MAX_ERRORS; pair++) {
    yaml_node_t *key = yaml_document_get_node(&doc->document, pair->key);
    if (key->type != YAML_SCALAR_NODE) {
      say_at(doc, key->start_mark, path, "a key must be a plain word");
      continue;
    }
    const char *name = (const char *)key->data.scalar.value, *nearest;
    size_t len = key->data.scalar.length;
    child_path(below, path, name, len);
    for (yaml_node_pair_t *other = first; other < pair; other++) {
      yaml_node_t *before = yaml_document_get_node(&doc->document, other->key);
      if (before->type == YAML_SCALAR_NODE && before->data.scalar.length == len &&
          memcmp(before->data.scalar.value, name, len) == 0) {
        say_at(doc, key->start_mark, below, "the key stands twice; first in line %zu",
               before->start_mark.line + 1);
        break;
      }
    }
    const cyaml_schema_field_t *field = field_of(fields, name, len, &nearest);
    if (field == NULL)
      say_at(doc, key->start_mark, below, "unknown key; the nearest known one is '%s'", nearest);
    else
      check_node(doc, yaml_document_get_node(&doc->document, pair->value), &field->value, below);
  }
  for (const cyaml_schema_field_t *field = fields; field->key != NULL; field++) {
    bool found = (field->value.flags & CYAML_FLAG_OPTIONAL) != 0;
    for (yaml_node_pair_t *pair = first; pair < end && !found; pair++) {
      yaml_node_t *key = yaml_document_get_node(&doc->document, pair->key);
      found = key->type == YAML_SCALAR_NODE &&
              strcmp((const char *)key->data.scalar.value, field->key) == 0;
    }
    if (!found)
      say_at(doc, node->start_mark, path, "the key '%s' is missing", field->key);
  }
}

/* What libcyaml would take, and only that: it reads any other word as true. */
static const char *const bool_words[] = {"true", "false", "yes", "no"};

/* Up to `size` bytes wide; in the forms of libcyaml, hexadecimal too. */
static bool number_fits(const char *text, const cyaml_schema_value_t *schema, uint64_t *max) {
  const uint64_t size = schema->data_size;
  char *end;
  *max = size >= 8 ? UINT64_MAX : (UINT64_C(1) << 8 * size) - 1;
  if (schema->string.max != 0) /* its own range */
    *max = schema->string.max;
  errno = 0;
  const uint64_t value = strtoull(text, &end, 0);
  return text[0] >= '0' && text[0] <= '9' && value >= schema->string.min && value <= *max &&
         *end == 0 && errno == 0;
}

/* What YAML calls null is no text; in quotes it is. */
static bool is_null(const yaml_node_t *node) {
  static const char *const words[] = {"~", "null", "Null", "NULL"};
  bool found = false;
  for (size_t i = 0; i < CYAML_ARRAY_LEN(words) && !found; i++)
    found = strcmp((const char *)node->data.scalar.value, words[i]) == 0;
  return found && node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
}

const char *yaml_doc_words(const cyaml_strval_t *words, size_t len, char out[YAML_DOC_WORDS_CAP]) {
  size_t at = 0;
  out[0] = 0;
  for (size_t i = 0; i < len && at < YAML_DOC_WORDS_CAP; i++)
    at += (size_t)snprintf(out + at, YAML_DOC_WORDS_CAP - at, "%s%s", i == 0 ? "" : ", ",
                           words[i].str);
  return out;
}

static void check_scalar(yaml_doc *doc, const yaml_node_t *node, const cyaml_schema_value_t *schema,
                         const char *path) {
  const char *text = (const char *)node->data.scalar.value;
  char words[YAML_DOC_WORDS_CAP];
  uint64_t max;
  bool found = false;
  if (strlen(text) != node->data.scalar.length) {
    say_at(doc, node->start_mark, path, "NUL characters are not accepted");
    return;
  }
  switch (schema->type) {
  case CYAML_ENUM:
    for (uint32_t i = 0; i < schema->enumeration.count && !found; i++)
      found = strcmp(schema->enumeration.strings[i].str, text) == 0;
    if (!found)
      say_at(doc, node->start_mark, path, "must be one of %s, not '%.64s'",
             yaml_doc_words(schema->enumeration.strings, schema->enumeration.count, words), text);
    break;
  case CYAML_BOOL:
    for (size_t i = 0; i < CYAML_ARRAY_LEN(bool_words) && !found; i++)
      found = strcmp(bool_words[i], text) == 0;
    if (!found)
      say_at(doc, node->start_mark, path, "must be true or false, not '%.64s'", text);
    break;
  case CYAML_UINT:
    if (!number_fits(text, schema, &max))
      say_at(doc, node->start_mark, path,
             "must be a whole number, %" PRIu32 " to %" PRIu64 ", not '%.64s'", schema->string.min,
             max, text);
    break;
  default:
    if (is_null(node))
      say_at(doc, node->start_mark, path,
             "empty (YAML reads %s as nothing); write it in quotes if it is a text", text);
    else if (node->data.scalar.length > schema->string.max)
      say_at(doc, node->start_mark, path, "longer than %" PRIu32 " bytes", schema->string.max);
    break;
  }
}

/* Depth is bounded by check_events, so the recursion is. */
static void check_node(yaml_doc *doc, yaml_node_t *node, const cyaml_schema_value_t *schema,
                       const char *path) {
  static const char *const kinds[] = {"nothing", "a single value", "a list", "a mapping of keys"};
  int wanted = YAML_SCALAR_NODE;
  if (schema->type == CYAML_IGNORE)
    return;
  if (schema->type == CYAML_MAPPING)
    wanted = YAML_MAPPING_NODE;
  else if (schema->type == CYAML_SEQUENCE || schema->type == CYAML_SEQUENCE_FIXED)
    wanted = YAML_SEQUENCE_NODE;
  if ((int)node->type != wanted) {
    say_at(doc, node->start_mark, path, "this must be %s, not %s", kinds[wanted],
           kinds[node->type <= 3 ? node->type : 0]);
    return;
  }
  if (wanted == YAML_MAPPING_NODE) {
    check_mapping(doc, node, schema->mapping.fields, path);
  } else if (wanted == YAML_SEQUENCE_NODE) {
    size_t n = (size_t)(node->data.sequence.items.top - node->data.sequence.items.start);
    if (n > schema->sequence.max)
      say_at(doc, node->start_mark, path, "more than %" PRIu32 " entries", schema->sequence.max);
    for (size_t i = 0; i < n && doc->errors < YAML_DOC_MAX_ERRORS; i++) {
      char below[512], index[24];
      int len = snprintf(index, sizeof index, "%zu", i);
      child_path(below, path, index, (size_t)len);
      check_node(doc, yaml_document_get_node(&doc->document, node->data.sequence.items.start[i]),
                 schema->sequence.entry, below);
    }
  } else {
    check_scalar(doc, node, schema, path);
  }
}

void yaml_doc_check(yaml_doc *doc, const cyaml_schema_value_t *schema) {
  check_node(doc, yaml_document_get_root_node(&doc->document), schema, "");
}

/* ---- places ---- */

static yaml_node_t *step(const yaml_doc *doc, yaml_node_t *node, const char *name, size_t len) {
  yaml_document_t *document =
      (yaml_document_t *)(uintptr_t)&doc->document; /* libyaml's getters lack const */
  if (node->type == YAML_MAPPING_NODE) {
    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start;
         pair < node->data.mapping.pairs.top; pair++) {
      yaml_node_t *key = yaml_document_get_node(document, pair->key);
      if (key->type == YAML_SCALAR_NODE && key->data.scalar.length == len &&
          memcmp(key->data.scalar.value, name, len) == 0)
        return yaml_document_get_node(document, pair->value);
    }
  } else if (node->type == YAML_SEQUENCE_NODE) {
    size_t i = strtoul(name, NULL, 10),
           n = (size_t)(node->data.sequence.items.top - node->data.sequence.items.start);
    if (i < n)
      return yaml_document_get_node(document, node->data.sequence.items.start[i]);
  }
  return NULL;
}

static yaml_node_t *deepest(const yaml_doc *doc, const char *path, bool *whole) {
  yaml_node_t *node = yaml_document_get_root_node((yaml_document_t *)(uintptr_t)&doc->document);
  *whole = true;
  while (node != NULL && path[0] != 0) {
    size_t len = strcspn(path, "/");
    yaml_node_t *next = step(doc, node, path, len);
    if (next == NULL) {
      *whole = false;
      return node;
    }
    node = next;
    path += len + (path[len] == '/');
  }
  return node;
}

yaml_node_t *yaml_doc_find(const yaml_doc *doc, const char *path) {
  bool whole;
  yaml_node_t *node = deepest(doc, path, &whole);
  return whole ? node : NULL;
}

const char *yaml_doc_text(const yaml_node_t *node, size_t *len) {
  if (node == NULL || node->type != YAML_SCALAR_NODE)
    return NULL;
  *len = node->data.scalar.length;
  return (const char *)node->data.scalar.value;
}

static void say_path(yaml_doc *doc, const char *path, bool warning, const char *format,
                     va_list args) __attribute__((format(printf, 4, 0)));
static void say_path(yaml_doc *doc, const char *path, bool warning, const char *format,
                     va_list args) {
  bool whole;
  yaml_node_t *node = deepest(doc, path, &whole);
  say(doc, node->start_mark.line + 1, node->start_mark.column + 1, path, warning, format, args);
}

void yaml_doc_error(yaml_doc *doc, const char *path, const char *format, ...) {
  va_list args;
  va_start(args, format);
  say_path(doc, path, false, format, args);
  va_end(args);
}

void yaml_doc_warning(yaml_doc *doc, const char *path, const char *format, ...) {
  va_list args;
  va_start(args, format);
  say_path(doc, path, true, format, args);
  va_end(args);
}
