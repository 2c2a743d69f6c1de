/* SPDX-License-Identifier: Apache-2.0 */
#include "show.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

/* ---- texts ---- */

static bool is_control(const uint8_t *p) {
  return p[0] < 0x20 || p[0] == 0x7F || (p[0] == 0xC2 && p[1] < 0xA0);
}

/* Adds at `at` what fits of the text; the new end. */
static size_t put_text(char *out, size_t cap, size_t at, kvrelay_text t, bool keep_controls) {
  static const uint8_t replacement[] = {0xEF, 0xBF, 0xBD}, masked[] = {'?'};
  for (size_t i = 0; i < t.len;) {
    const uint8_t *p = t.ptr + i;
    uint32_t code;
    size_t n = kvrelay_utf8_next(p, t.len - i, &code);
    i += n != 0 ? n : 1;
    if (n == 0) {
      p = replacement;
      n = sizeof replacement;
    } else if (!keep_controls && is_control(p)) {
      p = masked;
      n = sizeof masked;
    }
    if (n >= cap - at)
      break;
    memcpy(out + at, p, n);
    at += n;
  }
  out[at] = 0;
  return at;
}

/* `raw` is cut anywhere, but only where `out` is full before: no character takes more than twice
 * the room in `raw` that it gets in `out`. */
size_t show_vformat(char *out, size_t cap, const char *format, va_list args) {
  char raw[2 * SHOW_FORMAT_MAX];
  vsnprintf(raw, sizeof raw, format, args);
  return put_text(out, cap < SHOW_FORMAT_MAX ? cap : SHOW_FORMAT_MAX, 0, text_of(raw), false);
}

size_t show_format(char *out, size_t cap, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const size_t len = show_vformat(out, cap, format, args);
  va_end(args);
  return len;
}

const char *printable(kvrelay_text t, char out[512]) {
  put_text(out, 512, 0, t, false);
  return out;
}

const char *status_text(const kvrelay_status *status, char out[512]) {
  return printable(text_of(status->text), out);
}

const char *end_text(const kvrelay_status *status, char out[512]) {
  char said[512];
  if (status->grpc == KVRELAY_GRPC_OK)
    return "ended in order";
  show_format(out, 512, "%s%s%s", kvrelay_grpc_status_name(status->grpc),
              status->text[0] != 0 ? ": " : "", status_text(status, said));
  return out;
}

const char *endpoint_name(const kvrelay_endpoint *e, char out[512]) {
  const kvrelay_text parts[] = {e->namespace_, text_of("/"), e->component, text_of("/"),
                                e->endpoint};
  size_t at = 0;
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
    at = put_text(out, 512, at, parts[i], false);
  return out;
}

bool is_pool(const char *name, const kvrelay_descriptor *d) {
  char identity[KVRELAY_POOL_NAME_CAP], endpoint[512];
  if (name == NULL)
    return true;
  kvrelay_pool_id_format(&d->producer.pool_id, identity);
  return strcmp(name, identity) == 0 ||
         strcmp(name, endpoint_name(&d->serving_endpoint, endpoint)) == 0;
}

const char *hash_format_name(int32_t format) {
  return format == HASHFMT_FORMAT_STANDARD ? "standard"
         : format == HASHFMT_FORMAT_EAGLE  ? "eagle"
                                           : "unknown";
}

const char *replica_state_name(int32_t state) {
  static const char *const names[] = {"idle",       "waiting", "subscribing",
                                      "assembling", "live",    "quarantined"};
  return state >= 0 && state < (int32_t)(sizeof names / sizeof names[0]) ? names[state] : "unknown";
}

const char *fault_name(int32_t fault) {
  static const char *const names[] = {
      "none",           "another relay",   "another producer", "unknown frame kind", "bad frame",
      "header differs", "frame too early", "sequence gap",     "undecodable",        "envelope"};
  return fault >= 0 && fault < (int32_t)(sizeof names / sizeof names[0]) ? names[fault] : "unknown";
}

const char *verdict_text(const kvrelay_verdict *v, char out[128]) {
  if (v->class_ == KVRELAY_CLASS_OK)
    return "ok";
  snprintf(out, 128, "%s: %s%s%s",
           v->class_ == KVRELAY_CLASS_UNSUPPORTED ? "unsupported" : "invalid",
           kvrelay_condition_name(v->condition), v->field[0] != 0 ? " at " : "", v->field);
  return out;
}

/* ---- JSON ---- */

static void must(bool done, const char *what) {
  if (!done) {
    fprintf(stderr, "kvrelay: %s\n", what);
    exit(EXIT_SYSTEM);
  }
}

void show_flush(void) {
  must(fflush(stdout) == 0 && ferror(stdout) == 0, "standard output cannot be written");
}

static void must_json(bool done) { must(done, "a line of JSON cannot be made"); }

/* 15 digits: the most of which every one is true.  json_dumps would go on after a lack of memory.
 */
void print_json(json_t *object) {
  const size_t format = JSON_COMPACT | JSON_REAL_PRECISION(15);
  const bool made = object != NULL && json_dumpf(object, stdout, format) == 0;
  if (made)
    putchar('\n');
  json_decref(object);
  show_flush(); /* tells first when it was the writing that failed */
  must_json(made);
}

void json_add(json_t *list, json_t *item) { must_json(json_array_append_new(list, item) == 0); }

json_t *json_text(kvrelay_text t) {
  const size_t cap = 3 * t.len + 1; /* every byte a replacement character */
  char *safe = malloc(cap);
  if (safe == NULL)
    return NULL;
  json_t *text = json_stringn(safe, put_text(safe, cap, 0, t, true));
  free(safe);
  return text;
}

json_t *json_u64(uint64_t value) {
  return value <= INT64_MAX ? json_integer((json_int_t)value) : json_sprintf("%" PRIu64, value);
}

json_t *json_difference(uint64_t from, uint64_t less) {
  if (from >= less)
    return json_u64(from - less);
  const uint64_t below = less - from;
  return below <= INT64_MAX ? json_integer(-(json_int_t)below) : json_sprintf("-%" PRIu64, below);
}

json_t *json_hex(uint64_t value) { return json_sprintf("0x%016" PRIx64, value); }

static json_t *json_registration(const kvrelay_registration *r) {
  json_t *aliases = json_array();
  for (size_t i = 0; i < r->aliases_len; i++)
    json_add(aliases, json_text(r->aliases[i]));
  bool lora = r->target.kind == KVRELAY_TARGET_LORA;
  return json_pack("{s:o, s:s, s:o, s:o, s:o}", "id", json_text(r->canonical_model_id), "kind",
                   lora ? "lora" : "base", "base_model", json_text(r->target.base_model), "adapter",
                   lora ? json_text(r->target.adapter) : json_null(), "aliases", aliases);
}

json_t *json_pool(const kvrelay_pool_view *view) {
  const kvrelay_descriptor *d = view->descriptor;
  char name[KVRELAY_POOL_NAME_CAP], endpoint[512], verdict[128];
  json_t *models = json_array(), *roles = json_array();
  for (size_t i = 0; i < d->registrations_len; i++)
    json_add(models, json_registration(&d->registrations[i]));
  for (size_t i = 0; i < d->pool_roles.len; i++) {
    const char *role = kvrelay_role_name(d->pool_roles.ptr[i]);
    json_add(roles, role != NULL ? json_string(role) : json_integer(d->pool_roles.ptr[i]));
  }
  kvrelay_pool_id_format(&d->producer.pool_id, name);
  return json_pack("{s:s, s:s, s:o, s:s, s:o, s:o, s:o, s:o, s:o, s:s}", "pool", name, "endpoint",
                   endpoint_name(&d->serving_endpoint, endpoint), "block_size",
                   json_u64(d->query_semantics.kv_block_size), "hash_format",
                   hash_format_name(d->query_semantics.hash_format), "models", models, "roles",
                   roles, "producer_incarnation", json_hex(d->producer.producer_incarnation),
                   "layout_generation", json_u64(d->producer.layout_generation), "bucket_count",
                   json_u64(d->producer.ckf_format.bucket_count), "verdict",
                   verdict_text(&view->verdict, verdict));
}
