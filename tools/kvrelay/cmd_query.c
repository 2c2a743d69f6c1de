/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay query: of these tokens, how many leading blocks does each pool hold? */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session.h"
#include "table.h"
#include "text.h"
#include "tokens.h"

#define ANSWERS_MAX 256
#define ASK_AGAIN (-1) /* beside the exit codes */

typedef struct question {
  session *s;
  kvrelay_query query;
  uint64_t *scratch;
  kvrelay_answer answers[ANSWERS_MAX];
  size_t len;
  char why[640]; /* there are no answers, empty = there are */
} question;

/* Why there are no answers, on standard error now and in the JSON line. */
static void say_why(question *q, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say_why(question *q, const char *format, ...) {
  va_list args;
  va_start(args, format);
  show_vformat(q->why, sizeof q->why, format, args);
  va_end(args);
  fprintf(stderr, "kvrelay: %s\n", q->why);
}

/* All names a person may have meant. */
static void print_names(const session *s, uint32_t pools) {
  char text[512];
  fputs("kvrelay: the catalog has:", stderr);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    if (kvrelay_consumer_pool_get(&s->consumer, i, session_now(s), &v) != KVRELAY_OK)
      continue;
    for (size_t j = 0; j < v.descriptor->registrations_len; j++) {
      const kvrelay_registration *r = &v.descriptor->registrations[j];
      fprintf(stderr, " %s", printable(r->canonical_model_id, text));
      for (size_t k = 0; k < r->aliases_len; k++)
        fprintf(stderr, " %s", printable(r->aliases[k], text));
    }
  }
  fputc('\n', stderr);
}

static bool registers(const kvrelay_descriptor *d, kvrelay_text name) {
  for (size_t i = 0; i < d->registrations_len; i++) {
    const kvrelay_registration *r = &d->registrations[i];
    bool same = kvrelay_text_equal(r->canonical_model_id, name);
    for (size_t j = 0; j < r->aliases_len && !same; j++)
      same = kvrelay_text_equal(r->aliases[j], name);
    if (same)
      return true;
  }
  return false;
}

/* Names the pools that list the model and cannot be used: what they hold is unknown, not nothing.
 */
static bool print_unusable(question *q, uint32_t pools) {
  bool any = false;
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    char endpoint[512], why[128];
    if (kvrelay_consumer_pool_get(&q->s->consumer, i, session_now(q->s), &v) != KVRELAY_OK ||
        v.verdict.class_ == KVRELAY_CLASS_OK || !registers(v.descriptor, q->query.model))
      continue;
    say_why(q, "'%s' is served by %s, which cannot be used: %s", q->s->o->model,
            endpoint_name(&v.descriptor->serving_endpoint, endpoint),
            verdict_text(&v.verdict, why));
    any = true;
  }
  return any;
}

/*
 * Asks once.  EXIT_FINE: q->answers is filled, maybe with unknown ones; ASK_AGAIN: there is no
 * catalog yet; else an exit code after a message.
 */
static int ask(question *q) {
  const options *o = q->s->o;
  uint64_t revision;
  uint32_t pools;
  if (!kvrelay_consumer_catalog(&q->s->consumer, &revision, &pools))
    return ASK_AGAIN;
  q->len = 0;
  ptrdiff_t n = kvrelay_consumer_query(&q->s->consumer, &q->query, q->answers, ANSWERS_MAX,
                                       q->scratch, q->query.tokens_len, session_now(q->s));
  if (n == KVRELAY_ERR_NOT_FOUND && print_unusable(q, pools))
    return EXIT_UNDECIDED;
  if (n == KVRELAY_ERR_NOT_FOUND) {
    say_why(q, "no pool serves '%s'%s%s%s", o->model, o->adapter != NULL ? " with adapter '" : "",
            o->adapter != NULL ? o->adapter : "", o->adapter != NULL ? "'" : "");
    print_names(q->s, pools);
    return EXIT_NO;
  }
  if (n < 0) {
    say_why(
        q, "'%s' cannot be asked for: %s", o->model,
        n == KVRELAY_ERR_MALFORMED
            ? "it has two meanings in this catalog; take another name of the model, see kvrelay "
              "catalog"
            : kvrelay_strerror((int)n));
    return EXIT_UNDECIDED;
  }
  q->len = (size_t)n < ANSWERS_MAX ? (size_t)n : ANSWERS_MAX;
  return EXIT_FINE;
}

/* Follows the pools that were named; true when every answer is known or can never be. */
static bool settled(question *q) {
  bool all = true;
  for (size_t i = 0; i < q->len; i++) {
    kvrelay_pool_view v;
    if (q->answers[i].state != KVRELAY_ANSWER_UNKNOWN)
      continue;
    if (kvrelay_consumer_pool_get(&q->s->consumer, q->answers[i].pool, session_now(q->s), &v) !=
        KVRELAY_OK)
      return false;
    if (v.state == KVRELAY_REPLICA_IDLE)
      (void)!kvrelay_consumer_follow(&q->s->consumer, q->answers[i].pool, true, session_now(q->s));
    all = false;
  }
  return all;
}

static const char *answer_text(const kvrelay_answer *a, const kvrelay_pool_view *v, char out[512]) {
  char said[512];
  if (a->state == KVRELAY_ANSWER_UNSUPPORTED)
    show_format(out, 512, "refused: %s (%s)", status_text(&v->last_end, said),
                kvrelay_grpc_status_name(v->last_end.grpc));
  else if (a->state == KVRELAY_ANSWER_UNKNOWN && v->last_end.text[0] != 0)
    show_format(out, 512, "unknown: %s (%s)", status_text(&v->last_end, said),
                kvrelay_grpc_status_name(v->last_end.grpc));
  else if (a->state == KVRELAY_ANSWER_UNKNOWN)
    snprintf(out, 512, "unknown: no replica yet (%s)", replica_state_name(v->state));
  else if (a->complete_blocks == 0)
    snprintf(out, 512, "prompt shorter than one block");
  else if (a->depth_blocks == 0)
    snprintf(out, 512, "no match");
  else
    snprintf(out, 512, "%s",
             a->depth_blocks == a->complete_blocks ? "full match" : "partial match");
  return out;
}

static const char *readiness_text(const kvrelay_serving_view *v) {
  return v->readiness == KVRELAY_READY_READY         ? "ready"
         : v->readiness == KVRELAY_READY_UNAVAILABLE ? "unavailable"
                                                     : "unknown";
}

static json_t *age_or_null(uint64_t age_ns) {
  return age_ns == KVRELAY_TIME_NONE ? json_null() : json_real((double)age_ns / 1e6);
}

/* What is not known has no number: nobody may read it as 0. */
static json_t *u64_or_null(bool known, uint64_t value) {
  return known ? json_u64(value) : json_null();
}

static json_t *json_answer(const kvrelay_answer *a, const kvrelay_pool_view *v) {
  const kvrelay_serving_view *serving = &a->serving;
  const bool known = a->state == KVRELAY_ANSWER_KNOWN;
  char name[KVRELAY_POOL_NAME_CAP], endpoint[512], text[512];
  kvrelay_pool_id_format(&v->descriptor->producer.pool_id, name);
  return json_pack(
      "{s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:b, s:s, s:o, s:o, s:o, s:o, s:s}", "pool", name,
      "endpoint", endpoint_name(&v->descriptor->serving_endpoint, endpoint), "state",
      known                                ? "known"
      : a->state == KVRELAY_ANSWER_UNKNOWN ? "unknown"
                                           : "unsupported",
      "block_size", json_u64(a->block_size), "complete_blocks",
      u64_or_null(known, a->complete_blocks), "depth_blocks", u64_or_null(known, a->depth_blocks),
      "depth_tokens", u64_or_null(known, a->depth_blocks * a->block_size), "age_ms",
      age_or_null(known ? a->age_ns : KVRELAY_TIME_NONE), "stale", a->stale, "readiness",
      readiness_text(serving), "readiness_age_ms", age_or_null(serving->readiness_age_ns),
      "kv_used_blocks", u64_or_null(serving->load_known, serving->kv_used_blocks),
      "total_kv_blocks", u64_or_null(serving->load_known, serving->total_kv_blocks), "load_age_ms",
      age_or_null(serving->load_age_ns), "answer", answer_text(a, v, text));
}

static void show_table(const question *q) {
  static const char *const header[] = {"POOL", "BLOCK", "BLOCKS", "FOUND", "TOKENS",
                                       "AGE",  "READY", "LOAD",   "ANSWER"};
  table t;
  table_init(&t, 9, header);
  for (size_t i = 0; i < q->len; i++) {
    const kvrelay_answer *a = &q->answers[i];
    kvrelay_pool_view v;
    char text[512];
    if (kvrelay_consumer_pool_get(&q->s->consumer, a->pool, session_now(q->s), &v) != KVRELAY_OK)
      continue;
    table_row(&t);
    table_cell(&t, 0, "%s", endpoint_name(&v.descriptor->serving_endpoint, text));
    table_cell(&t, 1, "%" PRIu32, a->block_size);
    if (a->state == KVRELAY_ANSWER_KNOWN) {
      table_cell(&t, 2, "%" PRIu64, a->complete_blocks);
      table_cell(&t, 3, "%" PRIu64, a->depth_blocks);
      table_cell(&t, 4, "%" PRIu64, a->depth_blocks * a->block_size);
      table_cell(&t, 5, "%.1f s%s", (double)a->age_ns / 1e9, a->stale ? " (stale)" : "");
    }
    table_cell(&t, 6, "%s", readiness_text(&a->serving));
    if (a->serving.load_known)
      table_cell(&t, 7, "%" PRIu64 "/%" PRIu64, a->serving.kv_used_blocks,
                 a->serving.total_kv_blocks);
    else
      table_cell(&t, 7, "unknown");
    table_cell(&t, 8, "%s", answer_text(a, &v, text));
  }
  printf("model %s%s%s%s%s, %zu tokens\n", q->s->o->model,
         q->s->o->adapter != NULL ? ", adapter " : "",
         q->s->o->adapter != NULL ? q->s->o->adapter : "",
         q->s->o->namespace_ != NULL ? ", namespace " : "",
         q->s->o->namespace_ != NULL ? q->s->o->namespace_ : "", q->query.tokens_len);
  table_print(&t, stdout);
}

static void show_json(const question *q) {
  json_t *list = json_array();
  for (size_t i = 0; i < q->len; i++) {
    const kvrelay_answer *a = &q->answers[i];
    kvrelay_pool_view v;
    if (kvrelay_consumer_pool_get(&q->s->consumer, a->pool, session_now(q->s), &v) == KVRELAY_OK)
      json_add(list, json_answer(a, &v));
  }
  print_json(json_pack("{s:o, s:o, s:o, s:o, s:s*}", "target", json_text(text_of(q->s->o->target)),
                       "model", json_text(q->query.model), "tokens", json_u64(q->query.tokens_len),
                       "answers", list, "why", q->why[0] != 0 ? q->why : NULL));
}

/* One block anywhere is a yes; a no needs the answer of every pool. */
static int verdict(const question *q) {
  bool known = q->len != 0;
  for (size_t i = 0; i < q->len; i++) {
    const kvrelay_answer *a = &q->answers[i];
    if (a->state == KVRELAY_ANSWER_KNOWN && a->depth_blocks != 0)
      return EXIT_FINE;
    known = known && a->state == KVRELAY_ANSWER_KNOWN;
  }
  return known ? EXIT_NO : EXIT_UNDECIDED;
}

/* Turns the loop until every pool has answered, or the time is up. */
static int answer(question *q) {
  int code = EXIT_FINE;
  for (;;) {
    int asked = ask(q);
    if (asked != EXIT_FINE && asked != ASK_AGAIN) {
      if (q->s->o->json)
        show_json(q);
      return asked;
    }
    if ((asked == EXIT_FINE && settled(q)) || code != EXIT_FINE)
      break;
    code = session_turn(q->s);
    if (code != EXIT_FINE && (code != EXIT_UNDECIDED || q->len == 0))
      return code; /* what is known when the time is up is still shown */
  }
  if (q->s->o->json)
    show_json(q);
  else
    show_table(q);
  return verdict(q);
}

static int read_tokens(const options *o, uint32_t **tokens, size_t *len) {
  char why[640];
  if (o->model == NULL || (o->tokens_file == NULL) == (o->token_ids == NULL)) {
    fprintf(stderr, "kvrelay: query needs --model and one of --tokens FILE and --token-ids LIST; "
                    "see kvrelay --help\n");
    return EXIT_USAGE;
  }
  int err = o->token_ids != NULL
                ? tokens_parse(o->token_ids, strlen(o->token_ids), tokens, len, why)
                : tokens_read(o->tokens_file, tokens, len, why);
  if (err == 0)
    return EXIT_FINE;
  fprintf(stderr, "kvrelay: %s\n", why);
  return EXIT_USAGE;
}

int cmd_query(const options *o) {
  session s;
  uint32_t *tokens = NULL;
  size_t len = 0;
  int code = read_tokens(o, &tokens, &len);
  if (code != EXIT_FINE)
    return code;
  question *q = calloc(1, sizeof *q);
  uint64_t *scratch = malloc((len + 1) * sizeof *scratch);
  if (q == NULL || scratch == NULL) {
    fprintf(stderr, "kvrelay: no memory\n");
    code = EXIT_SYSTEM;
  } else {
    q->s = &s;
    q->scratch = scratch;
    q->query.model = text_of(o->model);
    q->query.adapter = text_of(o->adapter);
    q->query.cache_namespace = text_of(o->namespace_);
    q->query.tokens = tokens;
    q->query.tokens_len = len;
    code = session_open(&s, o, false);
    if (code == EXIT_FINE)
      code = session_connect(&s, NULL);
    if (code == EXIT_FINE)
      code = answer(q);
    session_close(&s);
  }
  free(q);
  free(scratch);
  free(tokens);
  return code;
}
