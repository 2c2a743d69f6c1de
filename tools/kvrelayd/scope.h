/* SPDX-License-Identifier: Apache-2.0 */
/* scope.h - which namespaces of the configuration are served: all, or those of a file that is read
 * again every second. */
#ifndef KVRELAYD_SCOPE_H
#define KVRELAYD_SCOPE_H

#include "namespace_file.h"

typedef struct scope {
  namespace_file file; /* its path is NULL: all */
  uint64_t due_ns;
  char said[NAMESPACE_WHY_CAP]; /* what was wrong the last time; empty: nothing */
} scope;

/*
 * Reads the file for the first time; a `path` of NULL is no file.  Both texts are lent until
 * scope_close, which is due either way.  0; 69 (cannot be read) or 78 (not valid), after a log
 * line.
 */
int scope_open(scope *s, const char *path, const char *connection, uint64_t now_ns);
void scope_close(scope *s);
/* Reads it again when that is due; true: the namespaces are others now.  What is wrong is logged
 * once, and the last selection stays. */
bool scope_poll(scope *s, uint64_t now_ns);
/* When that is due, KVRELAY_TIME_NONE = never. */
uint64_t scope_deadline_ns(const scope *s);
bool scope_has(const scope *s, kvrelay_text namespace_);

#endif
