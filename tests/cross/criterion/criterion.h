/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CROSS_CRITERION_H_
#define CROSS_CRITERION_H_

/*
 * As much of Criterion as the tests of the cores use, for machines that have no Criterion. Each
 * test runs in a process of its own, so that a crash is one failed test; the last line printed has
 * Criterion's form. What is missing here does not compile, so no test changes its meaning.
 */

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef struct cross_test {
  const char *suite_, *name_;
  void (*run_)(void);
  struct cross_test *next_;
  double timeout; /* seconds on a machine of one's own; emulated ones get more */
} cross_test;

void cross_register(cross_test *test);

/* Says what failed where; does not return when `fatal`. */
void cross_failed(bool fatal, const char *file, int line, const char *what, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* A test's options are members of the struct. */
#define Test(SUITE, NAME, ...)                                                                     \
  static void SUITE##_##NAME##_run_(void);                                                         \
  static __attribute__((constructor)) void SUITE##_##NAME##_register_(void) {                      \
    static cross_test test = {__VA_ARGS__};                                                        \
    test.suite_ = #SUITE;                                                                          \
    test.name_ = #NAME;                                                                            \
    test.run_ = SUITE##_##NAME##_run_;                                                             \
    cross_register(&test);                                                                         \
  }                                                                                                \
  static void SUITE##_##NAME##_run_(void)

#define CROSS_CHECK_(FATAL, CONDITION, WHAT, ...)                                                  \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      cross_failed(FATAL, __FILE__, __LINE__, WHAT, "" __VA_ARGS__);                               \
  } while (0)

/* Ends the test; it does not count. */
void cross_skipped(const char *why);
#define cr_skip_test(WHY) cross_skipped(WHY)

#define cr_assert(C, ...) CROSS_CHECK_(true, C, #C, __VA_ARGS__)
#define cr_assert_not(C, ...) CROSS_CHECK_(true, !(C), "not " #C, __VA_ARGS__)
#define cr_assert_fail(...) CROSS_CHECK_(true, false, "failure", __VA_ARGS__)
#define cr_assert_eq(A, B, ...) CROSS_CHECK_(true, (A) == (B), #A " == " #B, __VA_ARGS__)
#define cr_assert_neq(A, B, ...) CROSS_CHECK_(true, (A) != (B), #A " != " #B, __VA_ARGS__)
#define cr_assert_lt(A, B, ...) CROSS_CHECK_(true, (A) < (B), #A " < " #B, __VA_ARGS__)
#define cr_assert_leq(A, B, ...) CROSS_CHECK_(true, (A) <= (B), #A " <= " #B, __VA_ARGS__)
#define cr_assert_gt(A, B, ...) CROSS_CHECK_(true, (A) > (B), #A " > " #B, __VA_ARGS__)
#define cr_assert_geq(A, B, ...) CROSS_CHECK_(true, (A) >= (B), #A " >= " #B, __VA_ARGS__)
#define cr_assert_null(P, ...) CROSS_CHECK_(true, (P) == NULL, #P " is NULL", __VA_ARGS__)
#define cr_assert_not_null(P, ...) CROSS_CHECK_(true, (P) != NULL, #P " is not NULL", __VA_ARGS__)
#define cr_assert_str_eq(A, B, ...)                                                                \
  CROSS_CHECK_(true, strcmp(A, B) == 0, #A " as text " #B, __VA_ARGS__)
#define cr_assert_str_neq(A, B, ...)                                                               \
  CROSS_CHECK_(true, strcmp(A, B) != 0, #A " not as text " #B, __VA_ARGS__)
#define cr_assert_arr_eq(A, B, BYTES, ...)                                                         \
  CROSS_CHECK_(true, memcmp(A, B, BYTES) == 0, #A " as bytes " #B, __VA_ARGS__)

#define cr_expect(C, ...) CROSS_CHECK_(false, C, #C, __VA_ARGS__)
#define cr_expect_not(C, ...) CROSS_CHECK_(false, !(C), "not " #C, __VA_ARGS__)
#define cr_expect_eq(A, B, ...) CROSS_CHECK_(false, (A) == (B), #A " == " #B, __VA_ARGS__)
#define cr_expect_neq(A, B, ...) CROSS_CHECK_(false, (A) != (B), #A " != " #B, __VA_ARGS__)
#define cr_expect_lt(A, B, ...) CROSS_CHECK_(false, (A) < (B), #A " < " #B, __VA_ARGS__)
#define cr_expect_leq(A, B, ...) CROSS_CHECK_(false, (A) <= (B), #A " <= " #B, __VA_ARGS__)
#define cr_expect_geq(A, B, ...) CROSS_CHECK_(false, (A) >= (B), #A " >= " #B, __VA_ARGS__)
#define cr_expect_null(P, ...) CROSS_CHECK_(false, (P) == NULL, #P " is NULL", __VA_ARGS__)
#define cr_expect_str_eq(A, B, ...)                                                                \
  CROSS_CHECK_(false, strcmp(A, B) == 0, #A " as text " #B, __VA_ARGS__)
#define cr_expect_arr_eq(A, B, BYTES, ...)                                                         \
  CROSS_CHECK_(false, memcmp(A, B, BYTES) == 0, #A " as bytes " #B, __VA_ARGS__)

#endif
