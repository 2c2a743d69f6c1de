/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What every benchmark shares: one core, one clock, memory in huge pages, and one line per figure.
 *
 *   bench_arguments(argc, argv, 0, "");
 *   bench_start();
 *   bench_sample rate = {0};
 *   for (int run = 0; run < BENCH_RUNS; run++) {
 *     const double start = bench_cpu_ns();
 *     work(n);
 *     bench_add(&rate, (double)n * 1e3 / (bench_cpu_ns() - start));
 *   }
 *   bench_print(&rate, "M/s", "filter_insert_%s", "1M");
 */

#ifndef BENCH_H
#define BENCH_H

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* A median of fewer says little; more than the capacity are not kept. */
enum { BENCH_RUNS = 7, BENCH_RUNS_CAP = 64 };

typedef struct bench_sample {
  double value[BENCH_RUNS_CAP];
  size_t runs;
} bench_sample;

/* The compiler must compute VALUE, and may not know what it is. */
#define BENCH_KEEP(VALUE) __asm__ volatile("" : : "g"(VALUE) : "memory")

/* Ends the program with 2 when a figure would rest on a wrong result. */
#define bench_need(HOLDS) bench_need_((HOLDS), #HOLDS, __LINE__)

static inline void bench_need_(bool holds, const char *what, int line) {
  if (holds)
    return;
  fprintf(stderr, "%s: line %d: not so: %s\n", program_invocation_short_name, line, what);
  exit(2);
}

/* Says what the program takes and ends it: with 0 and on stdout when that was asked for, else
 * with 2. */
static inline void bench_usage(bool asked, const char *arguments) {
  fprintf(asked ? stdout : stderr, "usage: %s%s%s\n", program_invocation_short_name,
          arguments[0] ? " " : "", arguments);
  exit(asked ? 0 : 2);
}

/* Begins main, before anything is measured: takes `most` arguments that are no options, and
 * --help. */
static inline void bench_arguments(int argc, char **argv, int most, const char *arguments) {
  for (int i = 1; i < argc; i++)
    if (argv[i][0] == '-')
      bench_usage(strcmp(argv[i], "--help") == 0, arguments);
  if (argc - 1 > most)
    bench_usage(false, arguments);
}

/* An argument that is a number, 1 .. most. */
static inline size_t bench_number(const char *text, size_t most, const char *arguments) {
  char *end;
  errno = 0;
  const unsigned long long number = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != 0 || errno != 0 || number == 0 || number > most)
    bench_usage(false, arguments);
  return (size_t)number;
}

/* Time this thread has run; what others do on the machine does not count. */
static inline double bench_cpu_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Cheap enough to time one query, and what several threads or processes take together. */
static inline double bench_wall_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Binds the thread to the core named by BENCH_CPU, or to the last one it may use; a program with
 * threads of its own leaves this out. Lines appear as they are printed. */
static inline void bench_start(void) {
  const char *const wish = getenv("BENCH_CPU");
  cpu_set_t allowed, one;
  size_t core = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  bench_need(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  for (size_t i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &allowed))
      core = i;
  if (wish != NULL)
    core = strtoul(wish, NULL, 10);
  CPU_ZERO(&one);
  CPU_SET(core, &one); /* no bit at all when it is beyond the set */
  if (sched_setaffinity(0, sizeof one, &one) != 0) {
    fprintf(stderr, "%s: core %zu: %s\n", program_invocation_short_name, core, strerror(errno));
    exit(2);
  }
}

/* Zeroed memory, in huge pages where the system gives them, all of it touched; free() it. */
static inline void *bench_memory(size_t bytes) {
  const size_t page = (size_t)1 << 21, len = (bytes + page - 1) / page * page;
  void *const p = aligned_alloc(page, len);
  bench_need(p != NULL);
  (void)madvise(p, len, MADV_HUGEPAGE); /* a refusal costs speed, nothing else */
  memset(p, 0, len);
  return p;
}

static inline int bench_order_(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Sorts the values; afterwards v[n / 2] is the median, v[n * 99 / 100] the 99th percentile. */
static inline void bench_sort(double *v, size_t n) { qsort(v, n, sizeof *v, bench_order_); }

static inline void bench_add(bench_sample *s, double value) {
  bench_need(s->runs < BENCH_RUNS_CAP);
  s->value[s->runs++] = value;
}

/* One JSON line: the median of the runs as the value, and noisy when they spread over more than
 * 15 % of it. The name is a printf format. Empties the sample. */
__attribute__((format(printf, 3, 4))) static inline void
bench_print(bench_sample *s, const char *unit, const char *name, ...) {
  va_list args;
  bench_need(s->runs > 0);
  bench_sort(s->value, s->runs);
  const double median = s->value[s->runs / 2], min = s->value[0], max = s->value[s->runs - 1];
  printf("{\"bench\":\"");
  va_start(args, name);
  vprintf(name, args);
  va_end(args);
  printf("\",\"value\":%.4g,\"min\":%.4g,\"max\":%.4g,\"runs\":%zu,\"unit\":\"%s\",\"noisy\":%s}\n",
         median, min, max, s->runs, unit, max - min > 0.15 * median ? "true" : "false");
  s->runs = 0;
}

#endif
