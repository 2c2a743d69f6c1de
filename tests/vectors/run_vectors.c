/* SPDX-License-Identifier: Apache-2.0 */

/*
 * run_vectors [--self-test] [--verbose] [--only KIND] FILE…   runs every vector of the files
 *
 * --self-test   also falsifies the expectation of every vector that passes; it must fail then
 * --verbose     names each vector, and shows what it has to say of itself when it passed
 * --only KIND   leaves out those of other kinds
 *
 * A kind that nobody runs has failed. Ends with "N passed, N failed".
 *
 * Exit: 0 all passed, 1 something failed, 2 a file cannot be read or has another shape.
 */

#include "vectors_run.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The Makefile defines HAVE_VEC_<DOMAIN> for each vec_<domain>.c it links. */
static const struct {
  const char *subject;
  const vec_kind *kinds;
} tables[] = {
#ifdef HAVE_VEC_HASHFMT
    {"hashfmt", vec_hashfmt_kinds},
#endif
#ifdef HAVE_VEC_CKF
    {"ckf", vec_ckf_kinds},
#endif
#ifdef HAVE_VEC_CONTRACT
    {"contract", vec_contract_groups},
#endif
#ifdef HAVE_VEC_PLANES
    {"contract", vec_planes_groups},
#endif
#ifdef HAVE_VEC_EVENTS
    {"events", vec_events_kinds},
#endif
    {NULL, NULL},
};

typedef struct tally {
  size_t passed, failed;
} tally;

static const vec_kind *find_kind(const char *subject, const char *kind) {
  for (size_t t = 0; tables[t].subject; t++) {
    if (strcmp(tables[t].subject, subject) != 0)
      continue;
    for (const vec_kind *k = tables[t].kinds; k->kind; k++)
      if (strcmp(k->kind, kind) == 0)
        return k;
  }
  return NULL;
}

/* ---- self-test ---- */

typedef struct falsifier {
  const vec_kind *kind;
  const json_t *vector;
  size_t tries; /* falsified values so far */
} falsifier;

#define TRIES_CAP 64

static bool describes_only(const char *member) {
  static const char *const names[] = {"id", "kind", "name", "note", "place", "source", "op"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strcmp(member, names[i]) == 0)
      return true;
  return false;
}

/* Another value of the same shape, or NULL when there is none. */
static json_t *falsified(const json_t *value) {
  if (json_is_integer(value))
    return json_integer(json_integer_value(value) + 1);
  if (json_is_real(value))
    return json_real(json_real_value(value) + 1);
  if (json_is_boolean(value))
    return json_boolean(!json_is_true(value));
  if (json_is_null(value))
    return json_string("1");
  if (json_is_array(value) && json_array_size(value) == 0)
    return json_pack("[s]", "1");
  const char *text = json_string_value(value);
  if (!text)
    return NULL;
  size_t len = strlen(text);
  if (len == 0)
    return json_string("11");
  char *other = malloc(len + 1);
  if (!other)
    abort();
  memcpy(other, text, len + 1);
  other[len - 1] = other[len - 1] == '1' ? '2' : '1';
  json_t *result = json_string(other);
  free(other);
  return result;
}

static bool noticed(falsifier *f) {
  char why[512] = "";
  f->tries++;
  return vec_run_guarded(f->kind, f->vector, why, sizeof why) == VEC_FAILED;
}

static bool some_lie_noticed(falsifier *f, json_t *parent, bool in_expected);

/* Falsifies one child, or what is below it; the child is as before afterwards. */
static bool lie_in_child(falsifier *f, json_t *parent, const char *member, size_t index,
                         bool in_expected) {
  json_t *child = member ? json_object_get(parent, member) : json_array_get(parent, index);
  if (json_is_object(child) || (json_is_array(child) && json_array_size(child) > 0))
    return some_lie_noticed(f, child, in_expected);
  json_t *lie = in_expected ? falsified(child) : NULL;
  if (!lie)
    return false;
  json_incref(child);
  if (member)
    json_object_set_new(parent, member, lie);
  else
    json_array_set_new(parent, index, lie);
  bool result = noticed(f);
  if (member)
    json_object_set_new(parent, member, child);
  else
    json_array_set_new(parent, index, child);
  return result;
}

/* Tries one lie after the other until one is noticed. Recursion is bounded by the depth of our own
 * files. */
static bool some_lie_noticed(falsifier *f, json_t *parent, bool in_expected) {
  if (json_is_object(parent)) {
    size_t count = json_object_size(parent), i = 0;
    const char **members = malloc((count + 1) * sizeof *members);
    if (!members)
      abort();
    const char *member;
    json_t *value;
    json_object_foreach (parent, member, value)
      members[i++] = member;
    bool result = false;
    for (i = 0; i < count && !result && f->tries < TRIES_CAP; i++) {
      bool inside = in_expected || strncmp(members[i], "expect", 6) == 0;
      if (inside || !describes_only(members[i]))
        result = lie_in_child(f, parent, members[i], 0, inside);
    }
    free((void *)members);
    return result;
  }
  for (size_t i = 0; i < json_array_size(parent) && f->tries < TRIES_CAP; i++)
    if (lie_in_child(f, parent, NULL, i, in_expected))
      return true;
  return false;
}

/* Where a vector has no member "expected" or "expect", the whole of it is a statement. */
static bool states_whole(const json_t *vector) {
  return !json_object_get(vector, "expected") && !json_object_get(vector, "expect") &&
         !json_object_get(vector, "steps");
}

/* ---- one vector, one file ---- */

static bool self_test, verbose;
static const char *only;

static void run_one(tally *sum, const char *subject, const char *kind_name, json_t *vector) {
  const char *id = json_string_value(json_object_get(vector, "id"));
  if (only && strcmp(kind_name, only) != 0)
    return;
  if (verbose)
    printf("%s %s %s\n", subject, kind_name, id ? id : "?");
  const vec_kind *kind = find_kind(subject, kind_name);
  char why[2048] = "";
  int result = kind ? vec_run_guarded(kind, vector, why, sizeof why)
                    : vec_fail(why, sizeof why, "nothing runs this kind");
  if (result == VEC_PASSED && self_test) {
    falsifier f = {kind, vector, 0};
    if (!some_lie_noticed(&f, vector, states_whole(vector))) {
      snprintf(why, sizeof why, "still passes after each of %zu falsified values", f.tries);
      result = VEC_FAILED;
    }
  }
  if (result == VEC_PASSED) {
    sum->passed++;
    if (verbose && why[0])
      printf("%s\n", why);
    return;
  }
  sum->failed++;
  printf("FAILED %s %s %s: %s\n", subject, kind_name, id ? id : "?",
         why[0] ? why : "no reason given");
}

static bool run_file(tally *sum, const char *path, json_t *root) {
  const char *format = json_string_value(json_object_get(root, "format"));
  const char *subject = json_string_value(json_object_get(root, "subject"));
  if (!format || strcmp(format, "kvrelay-vectors") != 0 || !subject ||
      json_integer_value(json_object_get(root, "version")) != 1) {
    fprintf(stderr, "run_vectors: %s: not a kvrelay-vectors file of version 1\n", path);
    return false;
  }
  const json_t *vectors = json_object_get(root, "vectors");
  size_t i;
  json_t *vector;
  json_array_foreach (vectors, i, vector) {
    const char *kind = json_string_value(json_object_get(vector, "kind"));
    run_one(sum, subject, kind ? kind : "(none)", vector);
  }
  if (vectors)
    return true;
  const char *group;
  json_t *entries;
  json_object_foreach (root, group, entries) {
    if (json_is_object(entries))
      run_one(sum, subject, group, entries);
    json_array_foreach (entries, i, vector)
      run_one(sum, subject, group, vector);
  }
  return true;
}

int main(int argc, char **argv) {
  int first = 1;
  for (; first < argc && strncmp(argv[first], "--", 2) == 0; first++) {
    if (strcmp(argv[first], "--self-test") == 0)
      self_test = true;
    else if (strcmp(argv[first], "--verbose") == 0)
      verbose = true;
    else if (strcmp(argv[first], "--only") == 0 && first + 1 < argc)
      only = argv[++first];
    else
      break;
  }
  if (first >= argc || argv[first][0] == '-') {
    fprintf(stderr, "usage: run_vectors [--self-test] [--verbose] [--only KIND] FILE...\n");
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF,
          BUFSIZ); /* what was found stays visible if a later vector crashes */
  tally sum = {0};
  bool readable = true;
  for (int i = first; i < argc; i++) {
    json_error_t error;
    json_t *root = json_load_file(argv[i], JSON_REJECT_DUPLICATES, &error);
    if (!root)
      fprintf(stderr, "run_vectors: %s:%d: %s\n", argv[i], error.line, error.text);
    if (!root || !run_file(&sum, argv[i], root))
      readable = false;
    json_decref(root);
  }
  if (only && sum.passed == 0 && sum.failed == 0) {
    printf("FAILED no vector of kind %s was run\n", only);
    sum.failed = 1;
  }
  printf("%zu passed, %zu failed\n", sum.passed, sum.failed);
  if (!readable)
    return 2;
  return sum.failed == 0 ? 0 : 1;
}
