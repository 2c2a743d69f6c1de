/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvrelay conform makes of the verdicts of scenarios.  The scenarios, their trials and the
 * connection are this test's.
 */
#include "tools/kvrelay/show.h"
#include "tools/kvrelay/trial.h"

#include <criterion/criterion.h>
#include <criterion/redirect.h>
#include <stdio.h>
#include <string.h>

static int verdicts[8]; /* of each try, in order */
static unsigned tries;

const scenario scenarios[] = {{"Z1", "the only one", NULL}, {NULL, NULL, NULL}};

int trial_run(const scenario *s, const options *o, char why[TRIAL_WHY_CAP]) {
  (void)s;
  (void)o;
  tries++;
  show_format(why, TRIAL_WHY_CAP, "reason %u", tries);
  return verdicts[tries - 1];
}

int trial_names(trial *t) {
  (void)t;
  return TRIAL_FAILED; /* not reached: trial_run runs nothing */
}

int probe_open(probe *p, const char *target) {
  (void)p;
  (void)target;
  return KVRELAY_TRANSPORT_OK;
}
uint64_t probe_now(const probe *p) {
  (void)p;
  return 1;
}
bool probe_connect(probe *p, uint64_t until_ns) {
  (void)p;
  return until_ns > 1;
}
void probe_close(probe *p) { (void)p; }

Test(tool_conform, every_verdict_becomes_one_of_three, .init = cr_redirect_stdout) {
  static const struct {
    int verdicts[4];
    unsigned tries;
    int code;
    const char *verdict, *why;
  } cases[] = {
      {{TRIAL_PASSED}, 1, EXIT_FINE, "passed", NULL},
      {{TRIAL_FAILED}, 1, EXIT_NO, "failed", "reason 1"},
      {{TRIAL_NOT_APPLICABLE}, 1, EXIT_FINE, "not applicable", "reason 1"},
      {{TRIAL_AGAIN, TRIAL_PASSED}, 2, EXIT_FINE, "passed", NULL},
      {{TRIAL_AGAIN, TRIAL_AGAIN, TRIAL_AGAIN}, 3, EXIT_NO, "failed", "reason 3"},
      {{TRIAL_SILENT}, 1, EXIT_NO, "failed", "nothing came within 2.5 s"},
      {{TRIAL_AGAIN, TRIAL_SILENT}, 2, EXIT_NO, "failed", "nothing came within 2.5 s"},
  };
  const options o = {.target = "here:1", .subscriber_id = "me", .timeout_s = 2.5, .json = true};
  FILE *out = cr_get_redirected_stdout();
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char line[1024];
    memcpy(verdicts, cases[i].verdicts, sizeof cases[i].verdicts);
    tries = 0;
    cr_assert_eq(cmd_conform(&o), cases[i].code, "case %zu", i);
    cr_assert_eq(tries, cases[i].tries, "case %zu", i);
    cr_assert(fgets(line, sizeof line, out), "case %zu", i);
    json_t *said = json_loads(line, 0, NULL);
    cr_assert_str_eq(json_string_value(json_object_get(said, "verdict")), cases[i].verdict);
    const char *why = json_string_value(json_object_get(said, "why"));
    cr_assert_eq(why == NULL, cases[i].why == NULL, "case %zu", i);
    if (why != NULL)
      cr_assert_str_eq(why, cases[i].why);
    json_decref(said);
  }
}

Test(tool_conform, a_pool_that_is_not_there_ends_it_and_another_failure_does_not,
     .init = cr_redirect_stdout) {
  const options o = {
      .target = "here:1", .subscriber_id = "me", .timeout_s = 2.5, .json = true, .pool = "a/b/c"};
  static const int others[] = {TRIAL_PASSED, TRIAL_FAILED, TRIAL_NOT_APPLICABLE, TRIAL_AGAIN,
                               TRIAL_SILENT};
  verdicts[0] = TRIAL_NO_POOL;
  verdicts[1] = TRIAL_PASSED;
  tries = 0;
  cr_assert_eq(cmd_conform(&o), EXIT_NO);
  cr_assert_eq(tries, 1);
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    verdicts[0] = others[i];
    tries = 0;
    cr_assert_eq(cmd_conform(&o), EXIT_FINE, "case %zu", i);
    cr_assert_eq(tries, 2, "case %zu", i);
  }
}
