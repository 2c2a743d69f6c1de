/* SPDX-License-Identifier: Apache-2.0 */
#include "scope.h"

#include <string.h>

#include "log.h"

#define SCOPE_POLL_NS UINT64_C(1000000000)

static void tell(const scope *s) {
  char path[LOG_QUOTE_CAP];
  log_event(LOG_INFO, "sources_file", "path=%s namespaces=%zu revision=%s",
            log_quote(s->file.path, strlen(s->file.path), path), s->file.now.namespaces_len,
            s->file.now.revision);
}

static void complain(const scope *s, const char *then) {
  char path[LOG_QUOTE_CAP];
  log_event(LOG_ERROR, "sources_file", "path=%s error=\"%s\" note=\"%s\"",
            log_quote(s->file.path, strlen(s->file.path), path), s->said, then);
}

int scope_open(scope *s, const char *path, const char *connection, uint64_t now_ns) {
  memset(s, 0, sizeof *s);
  s->file.path = path;
  s->file.connection = connection;
  if (path == NULL)
    return 0;
  s->due_ns = now_ns + SCOPE_POLL_NS;
  const int rc = namespace_file_poll(&s->file, s->said);
  if (rc < 0) {
    complain(s, "it has to be right at start");
    return rc == NAMESPACES_ERR_READ ? 69 : 78;
  }
  s->said[0] = '\0';
  tell(s);
  return 0;
}

void scope_close(scope *s) { namespace_file_close(&s->file); }

bool scope_poll(scope *s, uint64_t now_ns) {
  char why[NAMESPACE_WHY_CAP] = "";
  if (now_ns < scope_deadline_ns(s))
    return false;
  s->due_ns = now_ns + SCOPE_POLL_NS;
  const int rc = namespace_file_poll(&s->file, why);
  const bool news = rc == NAMESPACES_CHANGED || (rc == NAMESPACES_SAME && s->said[0] != '\0');
  const bool worse = rc < 0 && strcmp(why, s->said) != 0;
  memcpy(s->said, why, sizeof why);
  if (rc >= 0)
    s->said[0] = '\0';
  if (worse)
    complain(s, "the selection before it stays");
  if (news)
    tell(s);
  return rc == NAMESPACES_CHANGED;
}

uint64_t scope_deadline_ns(const scope *s) {
  return s->file.path == NULL ? KVRELAY_TIME_NONE : s->due_ns;
}

bool scope_has(const scope *s, kvrelay_text namespace_) {
  return s->file.path == NULL || namespace_selection_has(&s->file.now, namespace_);
}
