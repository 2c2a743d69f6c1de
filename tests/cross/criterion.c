/* SPDX-License-Identifier: Apache-2.0 */

/* Runs the tests of a program, one process after the other. */

#include "criterion/criterion.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define TIMEOUT_S 60.0 /* of a test that does not say */
#define EMULATED 8     /* how much longer an emulated machine may take */

static cross_test *first;
static bool some_failed; /* in the process of one test */

void cross_register(cross_test *test) {
  cross_test **end = &first;
  while (*end)
    end = &(*end)->next_;
  *end = test;
}

void cross_failed(bool fatal, const char *file, int line, const char *what, const char *format,
                  ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "%s:%d: wanted: %s  ", file, line, what);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  some_failed = true;
  if (fatal)
    _exit(1);
}

#define SKIPPED 77

void cross_skipped(const char *why) {
  printf("SKIPPED: %s\n", why);
  fflush(NULL);
  _exit(SKIPPED);
}

/* Status of the process that ran the test, as of waitpid. */
static int run(const cross_test *test) {
  int status = -1;
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    alarm((unsigned)((test->timeout > 0 ? test->timeout : TIMEOUT_S) * EMULATED));
    test->run_();
    fflush(NULL);
    _exit(some_failed);
  }
  if (child < 0 || waitpid(child, &status, 0) != child) {
    perror("criterion");
    exit(2);
  }
  return status;
}

int main(void) {
  int tested = 0, failing = 0, crashing = 0;
  for (const cross_test *test = first; test; test = test->next_) {
    const int status = run(test);
    if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED)
      continue;
    tested++;
    failing += status != 0;
    crashing += WIFSIGNALED(status);
    if (status != 0)
      fprintf(stderr, "FAILED %s/%s%s\n", test->suite_, test->name_,
              WIFSIGNALED(status) ? ", crashed or too slow" : "");
  }
  fflush(stderr);
  printf("Synthesis: Tested: %d | Passing: %d | Failing: %d | Crashing: %d\n", tested,
         tested - failing, failing, crashing);
  return failing != 0;
}
