/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay conform: the conformance scenarios against any relay, a line for each. */
#include <stdio.h>
#include <string.h>

#include "show.h"
#include "trial.h"

#define TRIES 3 /* of a scenario at most, while a living relay changes under it */

static const char *const verdict_names[] = {"passed", "failed", "not applicable"};

/* Passed, failed or not applicable: the other two verdicts are steps on the way. */
static int judge(const scenario *s, const options *o, char why[TRIAL_WHY_CAP]) {
  int verdict = TRIAL_AGAIN;
  for (int i = 0; i < TRIES && verdict == TRIAL_AGAIN; i++)
    verdict = trial_run(s, o, why);
  if (verdict == TRIAL_SILENT)
    show_format(why, TRIAL_WHY_CAP, "nothing came within %g s", o->timeout_s);
  return verdict == TRIAL_AGAIN || verdict == TRIAL_SILENT ? TRIAL_FAILED : verdict;
}

/* The first contact decides whether there is anybody to judge. */
static int reach(const options *o) {
  probe p;
  const int err = probe_open(&p, o->target);
  if (err != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: %s: %s\n", o->target, kvrelay_transport_strerror(err));
    return err == KVRELAY_TRANSPORT_ERR_ADDRESS ? EXIT_USAGE : EXIT_SYSTEM;
  }
  const bool there = probe_connect(&p, probe_now(&p) + (uint64_t)(o->timeout_s * 1e9));
  if (!there)
    fprintf(stderr, "kvrelay: %s cannot be reached: %s\n", o->target, p.failure);
  probe_close(&p);
  return there ? EXIT_FINE : EXIT_UNREACHABLE;
}

/* A relay that does not even tell its catalog is left to the scenarios. */
static bool has_pool(const options *o) {
  static const scenario names = {"", "", trial_names};
  char why[TRIAL_WHY_CAP];
  return o->pool == NULL || trial_run(&names, o, why) != TRIAL_NO_POOL;
}

int cmd_conform(const options *o) {
  unsigned count[3] = {0, 0, 0};
  const kvrelay_text id = {(const uint8_t *)o->subscriber_id, strlen(o->subscriber_id)};
  if (!kvrelay_subscriber_id_valid(id)) {
    fprintf(stderr, "kvrelay: --subscriber-id must be 1 to 128 bytes without control characters\n");
    return EXIT_USAGE;
  }
  const int code = reach(o);
  if (code != EXIT_FINE)
    return code;
  if (!has_pool(o))
    return EXIT_NO;
  for (const scenario *s = scenarios; s->id != NULL; s++) {
    char why[TRIAL_WHY_CAP];
    const int verdict = judge(s, o, why);
    count[verdict]++;
    if (o->json) {
      print_json(json_pack("{s:s, s:s, s:s, s:s*}", "id", s->id, "verdict", verdict_names[verdict],
                           "what", s->what, "why", verdict != TRIAL_PASSED ? why : NULL));
      continue;
    }
    printf("%-4s %-14s  %s\n", s->id, verdict_names[verdict], s->what);
    if (verdict != TRIAL_PASSED)
      printf("                     %s\n", why);
    show_flush();
  }
  if (!o->json)
    printf("%u passed, %u failed, %u not applicable\n", count[TRIAL_PASSED], count[TRIAL_FAILED],
           count[TRIAL_NOT_APPLICABLE]);
  return count[TRIAL_FAILED] == 0 ? EXIT_FINE : EXIT_NO;
}
