/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sim: runs seeds of the simulated world; see sim.h.
 *
 * A failing seed is told with the command that runs it again. The last line is
 * "N passed, N failed"; exit status 1 when a seed failed, 2 for wrong arguments.
 */
#include "sim.h"

#include <getopt.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char usage[] =
    "Usage: sim [options]\n"
    "Simulates relays, engines and consumers on a network that fails, without waiting.\n"
    "  --seed N        the first seed (1)\n"
    "  --seeds N       how many (1000; 1 with --seed alone)\n"
    "  --relays N      1 to 8; like the following, by default the seed decides\n"
    "  --pools N       of each relay, 1 to 16\n"
    "  --consumers N   of each relay, 1 to 64\n"
    "  --hours N       simulated time with events and faults\n"
    "  --step MS       mean time from event to event\n";

static uint64_t number(const char *text, uint64_t most) {
  char *end;
  const unsigned long long n = strtoull(text, &end, 10);
  if (*text == '\0' || *text == '-' || *end != '\0' || n > most) {
    fprintf(stderr, "sim: not a number up to %llu: %s\n%s", (unsigned long long)most, text, usage);
    exit(2);
  }
  return n;
}

/* What a run is asked for, and how to ask for it again. */
typedef struct run {
  sim_plan plan;
  uint64_t seeds; /* 0 = not told */
  char again[256];
} run;

/* -1 to go on, or the exit status. */
static int take_arguments(run *r, int argc, char **argv) {
  static const struct option options[] = {
      {"seed", 1, NULL, 's'},  {"seeds", 1, NULL, 'n'}, {"relays", 1, NULL, 'r'},
      {"pools", 1, NULL, 'p'}, {"hours", 1, NULL, 't'}, {"consumers", 1, NULL, 'c'},
      {"step", 1, NULL, 'm'},  {"help", 0, NULL, 'h'},  {NULL, 0, NULL, 0}};
  for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
    switch (o) {
    case 's':
      r->plan.seed = number(optarg, UINT64_MAX);
      r->seeds = r->seeds ? r->seeds : 1;
      continue;
    case 'n':
      r->seeds = number(optarg, UINT32_MAX);
      continue;
    case 'r':
      r->plan.relays = (uint32_t)number(optarg, SIM_RELAYS_CAP);
      break;
    case 'p':
      r->plan.pools = (uint32_t)number(optarg, SIM_POOLS_CAP);
      break;
    case 'c':
      r->plan.consumers = (uint32_t)number(optarg, SIM_CONSUMERS_CAP);
      break;
    case 't':
      r->plan.active_ns = number(optarg, 100000) * 3600 * SIM_SECOND;
      break;
    case 'm':
      r->plan.step_ns = number(optarg, 3600000) * SIM_MS;
      break;
    default:
      fputs(usage, o == 'h' ? stdout : stderr);
      return o == 'h' ? 0 : 2;
    }
    const size_t n = strlen(r->again);
    for (const struct option *k = options; k->name; k++)
      if (k->val == o)
        snprintf(r->again + n, sizeof r->again - n, " --%s %s", k->name, optarg);
  }
  if (optind == argc)
    return -1;
  fputs(usage, stderr);
  return 2;
}

/* Seeds, of all kinds, after which everything has happened. */
enum { MANY = 1000 };

/* How often each thing happened; returns how many did not, but had to. */
static uint64_t tell_counts(const sim *s, bool all) {
#define TEXT(NAME, WORDS) WORDS,
  static const char *const texts[] = {SIM_COUNTS(TEXT)};
#undef TEXT
  uint64_t never = 0;
  for (int i = 0; i < SIM_COUNTS_LEN; i++) {
    printf("%12llu %s\n", (unsigned long long)s->counts[i], texts[i]);
    if (all && s->counts[i] == 0) {
      printf("FAILED: never %s\n", texts[i]);
      never++;
    }
  }
  return never;
}

int main(int argc, char **argv) {
  static sim world;
  run r = {{1, 0, 0, 0, 0, 0}, 0, ""};
  const int status = take_arguments(&r, argc, argv);
  uint64_t passed = 0, failed = 0;
  if (status >= 0)
    return status;
  r.seeds = r.seeds ? r.seeds : 1000;
  mallopt(M_TRIM_THRESHOLD, 1 << 30); /* what one seed gives back the next one takes */
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  for (uint64_t i = 0; i < r.seeds; i++, r.plan.seed++) {
    const char *const failure = sim_run(&r.plan, &world);
    passed += !failure;
    failed += failure != NULL;
    if (!failure)
      continue;
    printf("FAILED seed %llu: %s\n  again: build/tests/sim --seed %llu%s\n",
           (unsigned long long)r.plan.seed, failure, (unsigned long long)r.plan.seed, r.again);
    fflush(stdout);
  }
  struct rusage use;
  getrusage(RUSAGE_SELF, &use);
  printf("%ld KiB at most\n", use.ru_maxrss);
  failed += tell_counts(&world, r.again[0] == '\0' && r.seeds >= MANY);
  printf("%llu passed, %llu failed\n", (unsigned long long)passed, (unsigned long long)failed);
  return failed ? 1 : 0;
}
