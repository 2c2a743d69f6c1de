/* SPDX-License-Identifier: Apache-2.0 */
/* yaml_doc.h - one YAML document with places: finds everything that libcyaml would refuse, and
 * names it by line, column, path and what would be accepted. */
#ifndef KVRELAYD_YAML_DOC_H
#define KVRELAYD_YAML_DOC_H

#include <cyaml/cyaml.h>
#include <stdbool.h>
#include <stdio.h>
#include <yaml.h>

typedef struct yaml_doc {
  const char *path; /* for messages */
  unsigned char *bytes;
  size_t len;
  yaml_document_t document;
  FILE *report;
  unsigned errors, warnings;
  unsigned unreadable; /* those of the errors that are about another file */
} yaml_doc;

/*
 * Reads a file of at most 16 MiB.  0; 69 when it cannot be read; 78 when it is not one plain
 * document (syntax, several documents, anchors, aliases, tags); a line is then on `report`.
 */
int yaml_doc_read(yaml_doc *doc, const char *path, FILE *report);
void yaml_doc_free(yaml_doc *doc);

/* Unknown and repeated keys, missing required keys, values that are not what the schema reads: one
 * error line each, with the nearest known key, or the values that are accepted. */
void yaml_doc_check(yaml_doc *doc, const cyaml_schema_value_t *schema);

#define YAML_DOC_WORDS_CAP 256
/* "a, b, c" for messages, in `out`, which is returned. */
const char *yaml_doc_words(const cyaml_strval_t *words, size_t len, char out[YAML_DOC_WORDS_CAP]);

/* The node at a path of keys and indices, "endpoints/0/model"; NULL when there is none. */
yaml_node_t *yaml_doc_find(const yaml_doc *doc, const char *path);
const char *yaml_doc_text(const yaml_node_t *node, size_t *len);

/* One line `file:line:column: path: …` for the deepest existing node of `path`, which is shown as
 * endpoints[0].model; error lines make the file invalid. */
void yaml_doc_error(yaml_doc *doc, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void yaml_doc_warning(yaml_doc *doc, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
