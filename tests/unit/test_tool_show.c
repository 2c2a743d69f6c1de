/* SPDX-License-Identifier: Apache-2.0 */

/* What kvrelay shows of its peers: any bytes end as UTF-8, and every number as itself. */

#include "tools/kvrelay/show.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "text.h"

#define BAD "\xEF\xBF\xBD" /* U+FFFD */

static kvrelay_text of(const char *bytes, size_t len) {
  kvrelay_text t = {(const uint8_t *)bytes, len};
  return t;
}

static bool is_utf8(const char *text) {
  return kvrelay_utf8_valid((const uint8_t *)text, strlen(text));
}

Test(tool_show, bytes_that_are_no_character_are_replaced) {
  static const struct {
    const char *in;
    size_t len;
    const char *out;
  } cases[] = {{"plain", 5, "plain"},
               {"", 0, ""},
               {"d\xC3\xA9j\xC3\xA0 \xE2\x82\xAC \xF0\x9F\x98\x80", 15,
                "d\xC3\xA9j\xC3\xA0 \xE2\x82\xAC \xF0\x9F\x98\x80"},
               {"a\xFF"
                "b",
                3, "a" BAD "b"},
               {"\xC3", 1, BAD},                          /* ends too early */
               {"\xE2\x82", 2, BAD BAD},                  /* likewise */
               {"\x80", 1, BAD},                          /* nothing before */
               {"\xC0\xAF", 2, BAD BAD},                  /* a longer form than needed */
               {"\xED\xA0\x80", 3, BAD BAD BAD},          /* a surrogate */
               {"\xF4\x90\x80\x80", 4, BAD BAD BAD BAD}}; /* beyond U+10FFFF */
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char out[512];
    cr_assert_str_eq(printable(of(cases[i].in, cases[i].len), out), cases[i].out, "case %zu", i);
    json_t *text = json_text(of(cases[i].in, cases[i].len));
    cr_assert_str_eq(json_string_value(text), cases[i].out, "case %zu", i);
    json_decref(text);
  }
}

Test(tool_show, controls_reach_no_terminal_but_json) {
  static const char in[] = "a\0b\n\x1B[2J\x7F\xC2\x9B\xC2\xA0";
  char out[512];
  cr_assert_str_eq(printable(of(in, sizeof in - 1), out), "a?b??[2J??\xC2\xA0");
  cr_assert_str_eq(status_text(&(kvrelay_status){.text = "a\r\xFF"}, out), "a?" BAD);
  json_t *text = json_text(of(in, sizeof in - 1));
  cr_assert_eq(json_string_length(text), sizeof in - 1);
  cr_assert_eq(memcmp(json_string_value(text), in, sizeof in - 1), 0);
  json_decref(text);
}

Test(tool_show, what_is_too_long_is_cut_between_characters) {
  char in[2000], out[SHOW_FORMAT_MAX], name[512];
  for (size_t shift = 0; shift < 4; shift++) {
    memset(in, 'x', sizeof in);
    for (size_t at = shift; at + 4 < sizeof in; at += 4)
      memcpy(in + at, "\xF0\x9F\x98\x80", 4);
    in[sizeof in - 1] = 0;
    for (size_t cap = 1; cap <= sizeof out; cap++) {
      const size_t len = show_format(out, cap, "%s", in);
      cr_assert(is_utf8(out) && strstr(out, BAD) == NULL);
      cr_assert(len == strlen(out) && len < cap && len + 4 >= cap, "%zu of %zu", len, cap);
    }
    printable(text_of(in), name);
    cr_assert(is_utf8(name) && strstr(name, BAD) == NULL && strlen(name) + 4 >= sizeof name);
    const kvrelay_endpoint e = {true, text_of("n"), text_of(in), text_of("e")};
    cr_assert(is_utf8(endpoint_name(&e, name)) && strstr(name, BAD) == NULL);
  }
}

/* The densest text: each two bytes become one, so that the most of it is looked at. */
Test(tool_show, a_format_is_full_before_its_source_ends) {
  char in[4 * SHOW_FORMAT_MAX], out[SHOW_FORMAT_MAX];
  for (size_t at = 0; at + 2 < sizeof in; at += 2)
    memcpy(in + at, "\xC2\x80", 2);
  in[sizeof in - 2] = 0;
  cr_assert_eq(show_format(out, sizeof out, "%s", in), sizeof out - 1);
  cr_assert_eq(strspn(out, "?"), sizeof out - 1);
  cr_assert_eq(show_format(out, sizeof out, "%s", in + 1), sizeof out - 1);
}

Test(tool_show, any_bytes_become_a_line_of_json) {
  uint64_t state = 1;
  for (int round = 0; round < 20000; round++) {
    char bytes[64], out[512];
    const size_t len = (size_t)round % sizeof bytes;
    for (size_t i = 0; i < len; i++) {
      static const char likely[] = "a\0\n\x80\xBF\xC2\xC3\xE0\xE2\xED\xEF\xF0\xF4\xFF";
      state = state * 6364136223846793005u + 1442695040888963407u;
      bytes[i] = likely[(state >> 33) % (sizeof likely - 1)];
    }
    json_t *object = json_pack("{s:o, s:s}", "text", json_text(of(bytes, len)), "shown",
                               printable(of(bytes, len), out));
    cr_assert_not_null(object);
    json_decref(object);
  }
}

static void assert_json(json_t *value, const char *wanted) {
  char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
  cr_assert_str_eq(text, wanted);
  free(text);
  json_decref(value);
}

Test(tool_show, numbers_are_never_negative) {
  assert_json(json_u64(0), "0");
  assert_json(json_u64(INT64_MAX), "9223372036854775807");
  assert_json(json_u64((uint64_t)INT64_MAX + 1), "\"9223372036854775808\"");
  assert_json(json_u64(UINT64_MAX), "\"18446744073709551615\"");
  assert_json(json_hex(UINT64_MAX), "\"0xffffffffffffffff\"");
}

Test(tool_show, differences_of_clocks_keep_their_sign) {
  assert_json(json_difference(7, 5), "2");
  assert_json(json_difference(5, 7), "-2");
  assert_json(json_difference(UINT64_MAX, 0), "\"18446744073709551615\"");
  assert_json(json_difference(0, INT64_MAX), "-9223372036854775807");
  assert_json(json_difference(0, (uint64_t)INT64_MAX + 1), "\"-9223372036854775808\"");
  assert_json(json_difference(1, UINT64_MAX), "\"-18446744073709551614\"");
}

/* ---- short of memory ---- */

static unsigned until_none; /* the allocations of jansson up to the one that fails */

static void *scarce(size_t size) { return until_none-- == 0 ? NULL : malloc(size); }

static kvrelay_text texts[] = {{(const uint8_t *)"first", 5}, {(const uint8_t *)"second", 6}};
static const int32_t roles[] = {KVRELAY_ROLE_PREFILL, 77};

/* In a process of its own: the line about two models and their aliases; the code it ends with. */
static int print_pool(unsigned failing, FILE *out) {
  const pid_t pid = fork();
  cr_assert(pid >= 0);
  if (pid == 0) {
    kvrelay_registration models[2];
    kvrelay_descriptor d;
    kvrelay_pool_view view;
    memset(models, 0, sizeof models);
    memset(&d, 0, sizeof d);
    memset(&view, 0, sizeof view);
    for (size_t i = 0; i < 2; i++) {
      models[i].canonical_model_id = texts[i];
      models[i].aliases = texts;
      models[i].aliases_len = 2;
    }
    d.registrations = models;
    d.registrations_len = 2;
    d.pool_roles.ptr = roles;
    d.pool_roles.len = 2;
    view.descriptor = &d;
    dup2(fileno(out), STDOUT_FILENO);
    if (freopen("/dev/null", "w", stderr) == NULL)
      _exit(3);
    until_none = failing;
    json_set_alloc_funcs(scarce, free);
    json_t *list = json_array();
    json_add(list, json_pool(&view));
    print_json(list);
    _exit(0);
  }
  int status = 0;
  cr_assert_eq(waitpid(pid, &status, 0), pid);
  cr_assert(WIFEXITED(status));
  return WEXITSTATUS(status);
}

/* What print_pool wrote; true when it is one line. */
static bool read_line(FILE *out, char line[4096]) {
  rewind(out);
  return fgets(line, 4096, out) != NULL && line[strlen(line) - 1] == '\n' && fgetc(out) == EOF;
}

#define ALLOCATIONS 400u /* more than the line takes */

Test(tool_show, a_line_is_whole_or_the_program_ends) {
  char whole[4096], line[4096];
  unsigned refused = 0;
  FILE *out = tmpfile();
  cr_assert(out);
  cr_assert_eq(print_pool(ALLOCATIONS, out), 0);
  cr_assert(read_line(out, whole));
  cr_assert(strstr(whole, "second") && strstr(whole, "77]"), "%s", whole);
  for (unsigned failing = 0; failing < ALLOCATIONS; failing++) {
    rewind(out);
    cr_assert_eq(ftruncate(fileno(out), 0), 0);
    const int code = print_pool(failing, out);
    if (code == 0) {
      cr_assert(read_line(out, line) && strcmp(line, whole) == 0, "%u: %s", failing, line);
    } else {
      cr_assert_eq(code, EXIT_SYSTEM, "%d when allocation %u fails", code, failing);
      refused++;
    }
  }
  cr_assert(refused > 50 && refused < ALLOCATIONS, "%u", refused);
  fclose(out);
}
