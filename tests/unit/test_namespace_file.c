/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file of namespaces: what it means, what is refused and in which words, and what stays when it
 * changes for the worse.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "namespace_file.h"
#include "text.h"

#define EMPTY "b6e0bb87bd5035885d74e6e0a9345b7baad41e7ecfd1a03f366f11483213bd6e"
#define A_B "2ab89c10c04007ae0b4ca7cecd7734f9d9faaca5d20d4b9f6fe0a40105c7a804"
#define A_B_CONNECTION "d793bc7776b7e52603aba31342748306200023f865cac23f3d3dd83be7d9f565"

#define SECRET "hush-hush"
#define SOURCE(NAME) "{\"namespace\":\"" NAME "\"}"
#define FILE_OF(SOURCES) "{\"version\":1,\"sources\":[" SOURCES "]}"

static char why[NAMESPACE_WHY_CAP];

static int parse(const char *text, const char *connection, namespace_selection *out) {
  char *exact = malloc(strlen(text) + 1); /* without room for a byte too far */
  cr_assert(exact);
  memcpy(exact, text, strlen(text));
  exact = realloc(exact, strlen(text) ? strlen(text) : 1);
  const int rc = namespace_selection_parse(exact, strlen(text), connection, out, why);
  free(exact);
  return rc;
}

/* The revision of a text that is accepted; lent until the next call. */
static const char *revision(const char *text, const char *connection) {
  static char last[SHA256_HEX_CAP];
  namespace_selection s;
  cr_assert_eq(parse(text, connection, &s), NAMESPACES_CHANGED, "%s: %s", text, why);
  memcpy(last, s.revision, sizeof last);
  namespace_selection_free(&s);
  return last;
}

/* Refused, and the words have `word` but nothing of the file's own. */
static void refused(const char *text, const char *connection, const char *word) {
  namespace_selection s = {NULL, 7, "as before"};
  cr_assert_eq(parse(text, connection, &s), NAMESPACES_ERR_CONTENT, "%s", text);
  cr_assert(s.namespaces == NULL && s.namespaces_len == 7 && !strcmp(s.revision, "as before"));
  cr_assert(strstr(why, word), "%s: '%s' is not told of", why, word);
  cr_assert_null(strstr(why, SECRET), "%s", why);
}

Test(namespace_file, I9_revision_is_independent_of_order_and_spelling) {
  cr_assert_str_eq(revision(FILE_OF(""), NULL), EMPTY);
  cr_assert_str_eq(revision(FILE_OF(SOURCE("a") "," SOURCE("b")), NULL), A_B);
  cr_assert_str_eq(revision(FILE_OF(SOURCE("b") "," SOURCE("\\u0061")), NULL), A_B);
  cr_assert_str_eq(revision("\n{ \"sources\" : [" SOURCE("b") " ,\t" SOURCE(
                                "a") "], "
                                     "\"connectionRevision\":\"connection\", \"version\" : 1 }\n",
                            "connection"),
                   A_B_CONNECTION);
  cr_assert_str_neq(revision(FILE_OF(SOURCE("a")), NULL), A_B);
}

Test(namespace_file, order_is_that_of_bytes) {
  namespace_selection s;
  const char *const ascending[] = {"B", "a", "a-b", "aa", "\xc3\xa9", "\xf0\x9f\x98\x80"};
  cr_assert_eq(parse(FILE_OF(SOURCE("\xf0\x9f\x98\x80") "," SOURCE("aa") "," SOURCE("a") "," SOURCE(
                         "\xc3\xa9") "," SOURCE("B") "," SOURCE("a-b")),
                     NULL, &s),
               NAMESPACES_CHANGED);
  cr_assert_eq(s.namespaces_len, 6);
  for (size_t i = 0; i < 6; i++) {
    cr_assert(kvrelay_text_equal(s.namespaces[i], text_of(ascending[i])), "%zu", i);
    cr_assert(namespace_selection_has(&s, text_of(ascending[i])));
  }
  cr_assert_not(namespace_selection_has(&s, text_of("b")));
  cr_assert_not(namespace_selection_has(&s, text_of("")));
  namespace_selection_free(&s);
  cr_assert_not(namespace_selection_has(&s, text_of("a")));
}

Test(namespace_file, canonical_text_escapes) {
  const kvrelay_text names[] = {{(const uint8_t *)"a\0b", 3},
                                text_of("\"\\/\b\f\n\r\t\x01\x1f\x7f"),
                                text_of("&<>"),
                                text_of("x\xe2\x80\xa8y\xe2\x80\xa9z\xe2\x80\xaa"),
                                text_of("\xe2\x80")};
  char *text = namespace_canonical(names, 5, "<c>");
  cr_assert_str_eq(text, "{\"version\":1,\"connectionRevision\":\"\\u003cc\\u003e\",\"sources\":["
                         "{\"namespace\":\"a\\u0000b\"},"
                         "{\"namespace\":\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\"},"
                         "{\"namespace\":\"\\u0026\\u003c\\u003e\"},"
                         "{\"namespace\":\"x\\u2028y\\u2029z\xe2\x80\xaa\"},"
                         "{\"namespace\":\"\xe2\x80\"}]}");
  free(text);
}

Test(namespace_file, a_name_with_a_nul_is_whole) {
  namespace_selection s;
  cr_assert_eq(parse(FILE_OF(SOURCE("a") "," SOURCE("a\\u0000b")), NULL, &s), NAMESPACES_CHANGED);
  cr_assert(s.namespaces_len == 2 && s.namespaces[1].len == 3);
  namespace_selection_free(&s);
}

Test(namespace_file, I9_refused_and_nothing_of_the_file_is_told) {
  static const char *const no_json[] = {"",
                                        "{",
                                        FILE_OF(SOURCE(SECRET)) "x",
                                        "{\"" SECRET "\" 1}",
                                        FILE_OF(SOURCE("\xff" SECRET)),
                                        "nul",
                                        "\xef\xbb\xbf{}",
                                        FILE_OF(SOURCE("\\ud800" SECRET))};
  for (size_t i = 0; i < sizeof no_json / sizeof *no_json; i++)
    refused(no_json[i], NULL, "is not JSON");
  refused("{\"version\":1,\"version\":1,\"sources\":[]}", NULL, "twice");
  refused(FILE_OF("{\"namespace\":\"a\",\"namespace\":\"" SECRET "\"}"), NULL, "twice");
  static const char *const shapes[] = {"[]",
                                       "1",
                                       "null",
                                       "{}",
                                       "{\"version\":1}",
                                       "{\"sources\":[]}",
                                       "{\"version\":1,\"sources\":[],\"" SECRET "\":2}",
                                       "{\"version\":1,\"connectionRevision\":\"c\"}"};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    refused(shapes[i], NULL, "must be an object");
  refused("{\"version\":2,\"sources\":[]}", NULL, "version");
  refused("{\"version\":1.0,\"sources\":[]}", NULL, "version");
  refused("{\"version\":\"1\",\"sources\":[]}", NULL, "version");
  refused("{\"version\":1,\"sources\":{}}", NULL, "sources: must be an array");
  static const char *const entries[] = {"1", "{}", "\"a\"", "{\"namespace\":1}",
                                        "{\"namespace\":\"a\",\"" SECRET "\":1}"};
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    char text[256];
    snprintf(text, sizeof text, FILE_OF(SOURCE("a") ",%s"), entries[i]);
    refused(text, NULL, "sources[1]: ");
  }
  refused(FILE_OF(SOURCE("")), NULL, "sources[0].namespace");
  refused(FILE_OF(SOURCE(" " SECRET)), NULL, "sources[0].namespace");
  refused(FILE_OF(SOURCE("a") "," SOURCE(SECRET "\\u00a0")), NULL, "sources[1].namespace");
  refused(FILE_OF(SOURCE(SECRET) "," SOURCE("a") "," SOURCE(SECRET)), NULL, "twice");
}

Test(namespace_file, I9_the_connection_must_be_the_configured_one) {
  const char *with = "{\"version\":1,\"connectionRevision\":\"" SECRET "\",\"sources\":[]}";
  refused(with, NULL, "connectionRevision");
  refused(with, "other", "connectionRevision");
  refused(with, SECRET "2", "connectionRevision");
  refused(FILE_OF(""), "other", "connectionRevision");
  refused("{\"version\":1,\"connectionRevision\":null,\"sources\":[]}", NULL, "connectionRevision");
  refused("{\"version\":1,\"connectionRevision\":\"\",\"sources\":[]}", "", "connectionRevision");
  revision(with, SECRET);
}

/* A file with `count` namespaces of `len` bytes, to be freed. */
static char *many(size_t count, size_t len) {
  char *text = malloc(64 + count * (len + 32)), *at = text;
  cr_assert(text);
  at += sprintf(at, "{\"version\":1,\"sources\":[");
  for (size_t i = 0; i < count; i++) {
    at += sprintf(at, "%s{\"namespace\":\"%04zu", i ? "," : "", i);
    memset(at, 'x', len - 4);
    at += len - 4;
    at += sprintf(at, "\"}");
  }
  sprintf(at, "]}");
  return text;
}

Test(namespace_file, limits_hold_exactly) {
  static const struct {
    size_t count, len;
    const char *word; /* NULL: accepted */
  } cases[] = {{4096, 4, NULL}, {4097, 4, "sources"}, {1, 512, NULL}, {1, 513, "namespace"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *text = many(cases[i].count, cases[i].len);
    if (cases[i].word)
      refused(text, NULL, cases[i].word);
    else
      revision(text, NULL);
    free(text);
  }
  for (size_t len = NAMESPACE_TEXT_MAX; len <= NAMESPACE_TEXT_MAX + 1; len++) {
    char connection[NAMESPACE_TEXT_MAX + 2], text[2 * NAMESPACE_TEXT_MAX];
    memset(connection, 'c', len);
    connection[len] = '\0';
    snprintf(text, sizeof text, "{\"version\":1,\"connectionRevision\":\"%s\",\"sources\":[]}",
             connection);
    if (len == NAMESPACE_TEXT_MAX)
      revision(text, connection);
    else
      refused(text, connection, "connectionRevision");
  }
}

/* ---- the file ---- */

static char path[64];
static namespace_file file;

static void begin(void) {
  strcpy(path, "/tmp/namespace_file-XXXXXX");
  const int fd = mkstemp(path);
  cr_assert(fd >= 0);
  close(fd);
  file = (namespace_file){.path = path};
}

static void end(void) {
  namespace_file_close(&file);
  remove(path);
}

static void write_file(const char *text, size_t len) {
  FILE *out = fopen(path, "wb");
  cr_assert(out && fwrite(text, 1, len, out) == len && fclose(out) == 0);
}

static int poll_text(const char *text) {
  write_file(text, strlen(text));
  return namespace_file_poll(&file, why);
}

TestSuite(namespace_file_poll, .init = begin, .fini = end);

Test(namespace_file_poll, I9_reload_and_a_bad_update_keeps_the_previous_selection) {
  cr_assert_eq(poll_text(FILE_OF(SOURCE("a") "," SOURCE("b"))), NAMESPACES_CHANGED);
  cr_assert_str_eq(file.now.revision, A_B);
  cr_assert_eq(poll_text(FILE_OF(SOURCE("b") "," SOURCE("a"))), NAMESPACES_SAME);
  static const char twice[] = FILE_OF(SOURCE(SECRET) "," SOURCE(SECRET));
  static const char *const bad[] = {"", twice, "{"};
  for (size_t i = 0; i < 3; i++) {
    cr_assert_eq(poll_text(bad[i]), NAMESPACES_ERR_CONTENT);
    cr_assert_null(strstr(why, SECRET));
    cr_assert_str_eq(file.now.revision, A_B);
    cr_assert(namespace_selection_has(&file.now, text_of("a")));
  }
  cr_assert_eq(poll_text(FILE_OF(SOURCE("b"))), NAMESPACES_CHANGED);
  cr_assert_not(namespace_selection_has(&file.now, text_of("a")));
  cr_assert(namespace_selection_has(&file.now, text_of("b")));
  cr_assert_eq(poll_text(FILE_OF("")), NAMESPACES_CHANGED);
  cr_assert_str_eq(file.now.revision, EMPTY);
  cr_assert_not(namespace_selection_has(&file.now, text_of("b")));
}

Test(namespace_file_poll, what_is_no_readable_file) {
  cr_assert_eq(poll_text(FILE_OF(SOURCE("a") "," SOURCE("b"))), NAMESPACES_CHANGED);
  remove(path);
  cr_assert_eq(namespace_file_poll(&file, why), NAMESPACES_ERR_READ);
  cr_assert(strstr(why, "cannot be opened"));
  cr_assert_eq(mkfifo(path, 0600), 0);
  cr_assert_eq(namespace_file_poll(&file, why), NAMESPACES_ERR_READ);
  cr_assert(strstr(why, "regular"));
  remove(path);
  cr_assert_eq(mkdir(path, 0700), 0);
  cr_assert_eq(namespace_file_poll(&file, why), NAMESPACES_ERR_READ);
  cr_assert_str_eq(file.now.revision, A_B);
}

Test(namespace_file_poll, a_file_of_a_mebibyte_and_one_byte_more) {
  const char text[] = FILE_OF("");
  char *bytes = malloc(NAMESPACE_FILE_MAX + 1);
  cr_assert(bytes);
  memset(bytes, ' ', NAMESPACE_FILE_MAX + 1);
  memcpy(bytes, text, sizeof text - 1);
  write_file(bytes, NAMESPACE_FILE_MAX);
  cr_assert_eq(namespace_file_poll(&file, why), NAMESPACES_CHANGED);
  write_file(bytes, NAMESPACE_FILE_MAX + 1);
  cr_assert_eq(namespace_file_poll(&file, why), NAMESPACES_ERR_READ);
  cr_assert(strstr(why, "longer"));
  free(bytes);
}
