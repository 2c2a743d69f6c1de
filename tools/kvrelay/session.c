/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void on_connection(void *context, int state, int err, const char *text, uint64_t retry_ns) {
  session *s = context;
  (void)retry_ns;
  if (state == KVRELAY_CONNECTION_READY) {
    s->connected = true;
    s->failed = false;
  } else if (state == KVRELAY_CONNECTION_FAILED) {
    s->failed = true;
    snprintf(s->failure, sizeof s->failure, "%s",
             text != NULL && text[0] != 0 ? text : kvrelay_transport_strerror(err));
  }
}

int session_open(session *s, const options *o, bool subscribe_all) {
  memset(s, 0, sizeof *s);
  s->o = o;
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.subscriber_id.ptr = (const uint8_t *)o->subscriber_id;
  cfg.subscriber_id.len = strlen(o->subscriber_id);
  cfg.subscribe_all = subscribe_all;
  if (!kvrelay_subscriber_id_valid(cfg.subscriber_id)) {
    fprintf(stderr, "kvrelay: --subscriber-id must be 1 to 128 bytes without control characters\n");
    return EXIT_USAGE;
  }
  size_t len = kvrelay_consumer_mem_size(&cfg);
  s->consumer_mem = malloc(len);
  kvrelay_client_config client = kvrelay_client_config_default(&s->consumer);
  client.connection = on_connection;
  client.context = s;
  if (s->consumer_mem == NULL ||
      kvrelay_consumer_init(&s->consumer, &cfg, s->consumer_mem, len, 0) != KVRELAY_OK ||
      kvrelay_client_open(&client, &s->client) != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: no memory\n");
    return EXIT_SYSTEM;
  }
  s->tap = kvrelay_client_caller(s->client);
  return EXIT_FINE;
}

int session_connect(session *s, kvrelay_caller *tap) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = s->o->target;
  if (tap != NULL)
    s->tap = tap;
  int err = kvrelay_grpc_client_open(&cfg, s->tap, &s->grpc);
  if (err != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: %s: %s\n", s->o->target, kvrelay_transport_strerror(err));
    return err == KVRELAY_TRANSPORT_ERR_ADDRESS ? EXIT_USAGE : EXIT_SYSTEM;
  }
  kvrelay_client_attach(s->client, s->grpc);
  s->give_up_ns = session_now(s) + (uint64_t)(s->o->timeout_s * 1e9);
  return EXIT_FINE;
}

uint64_t session_now(const session *s) { return s->grpc->base.now_ns(&s->grpc->base); }

void session_answered(session *s) { s->give_up_ns = KVRELAY_TIME_NONE; }

int session_turn(session *s) {
  if (kvrelay_client_run(s->client, session_now(s)) != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: %s speaks another contract than dynamo.kvrelay.v1\n", s->o->target);
    return EXIT_CONTRACT;
  }
  uint64_t now = session_now(s), until = kvrelay_client_deadline_ns(s->client);
  if (until > s->give_up_ns)
    until = s->give_up_ns;
  uint64_t wait = until <= now ? 0 : until - now;
  if (s->grpc->base.run_once(&s->grpc->base, wait > 1000000000u ? 1000000000u : wait) < 0) {
    fprintf(stderr, "kvrelay: %s: the connection's loop ended\n", s->o->target);
    return EXIT_UNREACHABLE;
  }
  if (s->failed && !s->connected) {
    fprintf(stderr, "kvrelay: %s cannot be reached: %s\n", s->o->target, s->failure);
    return EXIT_UNREACHABLE;
  }
  if (session_now(s) < s->give_up_ns)
    return EXIT_FINE;
  fprintf(stderr, "kvrelay: %s: no answer within %g s%s%s\n", s->o->target, s->o->timeout_s,
          s->failure[0] != 0 ? ": " : "", s->failure);
  return s->connected ? EXIT_UNDECIDED : EXIT_UNREACHABLE;
}

void session_close(session *s) {
  if (s->grpc != NULL)
    s->grpc->base.close(&s->grpc->base);
  if (s->client != NULL)
    kvrelay_client_close(s->client);
  free(s->consumer_mem);
}

/* ---- texts and JSON ---- */

void print_json(json_t *object) {
  json_dumpf(object, stdout, JSON_COMPACT);
  putchar('\n');
  fflush(stdout);
  json_decref(object);
}

json_t *json_text(kvrelay_text t) {
  json_t *text = json_stringn(t.len == 0 ? "" : (const char *)t.ptr, t.len);
  return text != NULL ? text : json_null();
}

json_t *json_hex(uint64_t value) { return json_sprintf("0x%016" PRIx64, value); }

/* Texts of peers may hold anything: control characters show as '?', and what is too long is cut
 * between two characters. */
static void put_text(char *out, size_t cap, size_t *at, kvrelay_text t) {
  for (size_t i = 0, n; i < t.len; i += n) {
    const uint8_t *p = t.ptr + i;
    for (n = 1; i + n < t.len && (p[n] & 0xC0) == 0x80; n++) {
    }
    if (n >= cap - *at)
      break;
    if (p[0] < 0x20 || p[0] == 0x7F || (p[0] == 0xC2 && n == 2 && p[1] < 0xA0)) {
      out[(*at)++] = '?';
    } else {
      memcpy(out + *at, p, n);
      *at += n;
    }
  }
  out[*at] = 0;
}

const char *printable(kvrelay_text t, char out[512]) {
  size_t at = 0;
  put_text(out, 512, &at, t);
  return out;
}

const char *status_text(const kvrelay_status *status, char out[512]) {
  kvrelay_text t = {(const uint8_t *)status->text, strlen(status->text)};
  return printable(t, out);
}

const char *endpoint_name(const kvrelay_endpoint *e, char out[512]) {
  static const kvrelay_text slash = {(const uint8_t *)"/", 1};
  size_t at = 0;
  put_text(out, 512, &at, e->namespace_);
  put_text(out, 512, &at, slash);
  put_text(out, 512, &at, e->component);
  put_text(out, 512, &at, slash);
  put_text(out, 512, &at, e->endpoint);
  return out;
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

static json_t *json_registration(const kvrelay_registration *r) {
  json_t *aliases = json_array();
  for (size_t i = 0; i < r->aliases_len; i++)
    json_array_append_new(aliases, json_text(r->aliases[i]));
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
    json_array_append_new(models, json_registration(&d->registrations[i]));
  for (size_t i = 0; i < d->pool_roles.len; i++) {
    const char *role = kvrelay_role_name(d->pool_roles.ptr[i]);
    json_array_append_new(roles,
                          role != NULL ? json_string(role) : json_integer(d->pool_roles.ptr[i]));
  }
  kvrelay_pool_id_format(&d->producer.pool_id, name);
  json_t *endpoint_text = json_string(endpoint_name(&d->serving_endpoint, endpoint));
  return json_pack("{s:s, s:o, s:I, s:s, s:o, s:o, s:o, s:o, s:I, s:s}", "pool", name, "endpoint",
                   endpoint_text != NULL ? endpoint_text : json_null(), "block_size",
                   (json_int_t)d->query_semantics.kv_block_size, "hash_format",
                   hash_format_name(d->query_semantics.hash_format), "models", models, "roles",
                   roles, "producer_incarnation", json_hex(d->producer.producer_incarnation),
                   "layout_generation", json_integer((json_int_t)d->producer.layout_generation),
                   "bucket_count", (json_int_t)d->producer.ckf_format.bucket_count, "verdict",
                   verdict_text(&view->verdict, verdict));
}
