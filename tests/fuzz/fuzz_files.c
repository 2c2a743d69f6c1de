/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The files that the programs read: a configuration, a recording, a list of tokens, a list of
 * namespaces. Any bytes are either read, or refused with words that say why; nothing is kept, and
 * no record or token is there that the bytes have no room for.
 *
 * SECURITY.md: 2, 3, 10, and the operator is not trusted to be free of mistakes.
 *
 * Input: one byte for the kind of file, then the file.
 */

#include <sys/mman.h>
#include <unistd.h>

#include "../../tools/common/namespace_file.h"
#include "../../tools/common/trace.h"
#include "../../tools/kvrelay/tokens.h"
#include "../../tools/kvrelayd/config.h"
#include "fuzz.h"

enum { TOKENS_MAX = 16777216 };

static void check_tokens(const uint8_t *bytes, size_t len) {
  char why[640] = "";
  uint32_t *tokens = NULL;
  size_t count = 0;
  if (tokens_parse((const char *)bytes, len, &tokens, &count, why) != 0) {
    FUZZ_CHECK(why[0] != 0);
    return;
  }
  FUZZ_CHECK(count >= 1 && count <= TOKENS_MAX && tokens != NULL);
  free(tokens);
}

static void check_trace(const char *path, size_t len) {
  trace t;
  trace_record record;
  char why[128] = "";
  size_t frames = 0;
  int rc;
  FUZZ_CHECK(trace_open(&t, path) == 0);
  while ((rc = trace_next(&t, &record, why)) == 1) {
    size_t bytes = 0;
    FUZZ_CHECK(record.frames_len <= TRACE_FRAMES_MAX);
    for (size_t i = 0; i < record.frames_len; i++) {
      uint8_t *copy = fuzz_copy(record.frame[i], record.frame_len[i]);
      bytes += record.frame_len[i];
      free(copy);
    }
    frames += 1 + bytes;
    FUZZ_CHECK(frames <= len);
  }
  FUZZ_CHECK(rc == 0 || (rc == -1 && why[0] != 0));
  trace_close(&t);
}

static void check_config(const char *path) {
  char *said = NULL;
  size_t said_len = 0;
  int exit_code = 0;
  FILE *report = open_memstream(&said, &said_len);
  FUZZ_CHECK(report != NULL);
  config *c = config_load(path, report, &exit_code);
  fclose(report);
  FUZZ_CHECK(c != NULL || (exit_code != 0 && said_len > 0));
  if (c)
    config_free(c);
  free(said);
}

/* What is accepted is in order, and its canonical text is the same selection. */
static void check_namespaces(const uint8_t *bytes, size_t len) {
  char why[NAMESPACE_WHY_CAP] = "";
  namespace_selection s, again;
  if (namespace_selection_parse((const char *)bytes, len, NULL, &s, why) != NAMESPACES_CHANGED) {
    FUZZ_CHECK(why[0] != 0);
    return;
  }
  for (size_t i = 0; i < s.namespaces_len; i++) {
    FUZZ_CHECK(kvrelay_text_valid(s.namespaces[i]) && s.namespaces[i].len <= NAMESPACE_TEXT_MAX);
    FUZZ_CHECK(namespace_selection_has(&s, s.namespaces[i]));
  }
  char *text = namespace_canonical(s.namespaces, s.namespaces_len, NULL);
  FUZZ_CHECK(text != NULL && namespace_selection_parse(text, strlen(text), NULL, &again, why) ==
                                 NAMESPACES_CHANGED);
  FUZZ_CHECK(strcmp(s.revision, again.revision) == 0);
  free(text);
  namespace_selection_free(&s);
  namespace_selection_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  fuzz_input in = {data, len};
  const uint8_t kind = fuzz_byte(&in);
  char path[32];
  size_t got;
  uint8_t *bytes = fuzz_take(&in, in.left, &got);
  const int fd = memfd_create("fuzz", 0);
  FUZZ_CHECK(fd >= 0 && write(fd, bytes, got) == (ssize_t)got);
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (kind == 3)
    check_namespaces(bytes, got);
  else if (kind % 3 == 0)
    check_tokens(bytes, got);
  else if (kind % 3 == 1)
    check_trace(path, got);
  else
    check_config(path);
  close(fd);
  free(bytes);
  return 0;
}
