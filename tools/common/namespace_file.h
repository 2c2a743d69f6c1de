/* SPDX-License-Identifier: Apache-2.0 */
/* namespace_file.h - the namespaces that a relay is to serve, from a JSON file that somebody else
 * writes and changes:
 *
 *   {"version": 1, "connectionRevision": "c1", "sources": [{"namespace": "prod"}]}
 *
 * connectionRevision is optional, and has to be the configured one.
 */
#ifndef KVRELAY_TOOLS_NAMESPACE_FILE_H
#define KVRELAY_TOOLS_NAMESPACE_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "kvrelay.h"
#include "sha256.h"

#define NAMESPACE_FILE_MAX ((size_t)1 << 20) /* bytes */
#define NAMESPACE_SOURCES_MAX 4096
#define NAMESPACE_TEXT_MAX 512 /* bytes of a namespace and of a connectionRevision */
#define NAMESPACE_WHY_CAP 256

enum {
  NAMESPACES_SAME = 0,
  NAMESPACES_CHANGED = 1,
  NAMESPACES_ERR_READ = -1,    /* not there, not a regular file, too long, no memory */
  NAMESPACES_ERR_CONTENT = -2, /* read, and not valid */
};

/* What a file selects. */
typedef struct namespace_selection {
  kvrelay_text *namespaces; /* ascending, each once; texts and list are one allocation */
  size_t namespaces_len;
  char revision[SHA256_HEX_CAP]; /* of the canonical text; empty: nothing was read yet */
} namespace_selection;

/* A file and what was last read from it. */
typedef struct namespace_file {
  const char *path;       /* lent */
  const char *connection; /* lent: the connectionRevision to expect; NULL = none */
  namespace_selection now;
} namespace_file;

/*
 * Reads the file again.  NAMESPACES_CHANGED: `now` is another selection; NAMESPACES_SAME: also when
 * only order or spelling changed.  An error leaves `now` as it was, and `why` then says what is
 * wrong and where, never what the file contains.  Blocks while the file is read; files that are
 * not regular are refused, and never waited for.
 */
int namespace_file_poll(namespace_file *f, char why[NAMESPACE_WHY_CAP]);
void namespace_file_close(namespace_file *f);

/* As namespace_file_poll, for bytes: `out` is new after NAMESPACES_CHANGED, the only success. */
int namespace_selection_parse(const char *bytes, size_t len, const char *connection,
                              namespace_selection *out, char why[NAMESPACE_WHY_CAP]);
void namespace_selection_free(namespace_selection *s);
bool namespace_selection_has(const namespace_selection *s, kvrelay_text name);

/* The compact JSON that a revision is the SHA-256 of, terminated; the caller frees it.  NULL:
 * memory is gone.  `namespaces` are ascending. */
char *namespace_canonical(const kvrelay_text *namespaces, size_t len, const char *connection);

#endif
