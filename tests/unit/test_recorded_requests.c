/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Odd, bad and too many requests that the relay of Dynamo was sent: ours, with the same pool and
 * the same limits, takes and refuses the same ones, with the same status and reason.
 */
/* make: -lcrypto */
#include "test_service.h"

#include <jansson.h>

#include "../vectors/vectors.h"

#define RELAY "tests/data/relay/"

static json_t *load(const char *path) {
  json_error_t error;
  json_t *all = json_load_file(path, JSON_ALLOW_NUL, &error);
  cr_assert_not_null(all, "%s: %s", path, error.text);
  return all;
}

/* The line of this type of a recorded stream. */
static json_t *line_of(const char *name, const char *type) {
  char path[128];
  json_t *line = NULL;
  snprintf(path, sizeof path, RELAY "limits/%s.jsonl", name);
  FILE *file = fopen(path, "r");
  cr_assert_not_null(file, "%s", path);
  while ((line = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL)) != NULL &&
         strcmp(vec_str(vec_get(line, "type")), type) != 0)
    json_decref(line);
  fclose(file);
  cr_assert_not_null(line, "%s has no line of type %s", path, type);
  return line;
}

static taken *send_to(bare *b, uint32_t call, const char *method, const json_t *hex) {
  char path[128];
  size_t len;
  snprintf(path, sizeof path, "/dynamo.kvrelay.v1.KvEventRelay/%s", method);
  uint8_t *const bytes = vec_hex(hex, &len);
  const kvrelay_iov message = {bytes, len};
  taken *const c = ask(b, call, path, &message, 1);
  free(bytes);
  return c;
}

static void hang_up(bare *b, uint32_t call) {
  kvrelay_client_transport *const client = kvrelay_mem_client(b->mem);
  client->cancel(client, call);
  bare_turn(b);
}

/* The producer that a recorded request for a filter stream expects. */
static kvrelay_producer producer_of(const json_t *hex) {
  size_t len;
  uint8_t *const bytes = vec_hex(hex, &len);
  kvrelay_request q;
  cr_assert_eq(kvrelay_pb_decode_request(KVRELAY_METHOD_SUBSCRIBE_POOL, bytes, len, &q),
               KVRELAY_OK);
  free(bytes); /* a producer points nowhere */
  return q.expected_producer;
}

/* A pool with this producer; the relay has its incarnation, and counts up to its generation. */
static void publish_as(fx *f, unsigned i, const kvrelay_producer *wanted) {
  fx_pool *const p = &f->pools[i];
  fx_describe(p, i);
  p->descriptor.producer.pool_id = wanted->pool_id;
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.seed = wanted->ckf_format.seed;
  cfg.filter.expected_blocks = wanted->ckf_format.bucket_count * 3;
  const size_t len = ckf_producer_mem_size(&cfg);
  p->state_mem = malloc(len);
  cr_assert_eq(ckf_producer_init(&p->state, &cfg, p->state_mem, len), CKF_OK);
  for (;;) {
    cr_assert_eq(fx_try_publish(f, i), KVRELAY_OK);
    const uint64_t generation = kvrelay_pool_descriptor(p->pool)->producer.layout_generation;
    cr_assert_leq(generation, wanted->layout_generation);
    if (generation == wanted->layout_generation)
      break;
    kvrelay_relay_pool_remove(&f->relay, p->pool, f->now);
    free(p->pool_mem);
    p->pool = NULL;
  }
  cr_assert(kvrelay_producer_equal(&kvrelay_pool_descriptor(p->pool)->producer, wanted));
}

static void assert_end(const taken *c, const json_t *recorded, const char *id) {
  const json_t *const reason = vec_get(recorded, "reason");
  const char *const name = json_is_null(reason) ? "" : vec_str(reason);
  cr_assert(c->ends == 1 && c->messages == 0 && c->admitted == 0, "%s: not refused", id);
  cr_assert_str_eq(kvrelay_grpc_status_name(c->status.grpc), vec_str(vec_get(recorded, "status")),
                   "%s: %s", id, c->status.text);
  cr_assert_eq(c->status.reason, kvrelay_reason_from_name((const uint8_t *)name, strlen(name)),
               "%s: %d %s", id, c->status.reason, c->status.text);
}

static const json_t *case_of(const json_t *cases, const char *id) {
  size_t i = 0;
  while (i < json_array_size(cases) &&
         strcmp(vec_str(vec_get(json_array_get(cases, i), "id")), id) != 0)
    i++;
  cr_assert_lt(i, json_array_size(cases), "no case %s", id);
  return json_array_get(cases, i);
}

static const json_t *request_of(const json_t *v) {
  const json_t *const requests = vec_get(v, "requests");
  cr_assert_eq(json_array_size(requests), 1);
  return json_array_get(requests, 0);
}

Test(recorded_requests, each_is_taken_or_refused_as_it_was) {
  json_t *const all = load(RELAY "cases.json");
  const json_t *const cases = vec_get(all, "cases");
  const kvrelay_producer good = producer_of(request_of(case_of(cases, "pool_ok")));
  kvrelay_relay_config cfg = fx_config();
  cfg.identity.relay_incarnation = good.producer_incarnation;
  bare b;
  bare_open(&b, &cfg, 0);
  publish_as(b.f, 0, &good);
  size_t i, taken_ones = 0;
  json_t *v;
  json_array_foreach (cases, i, v) {
    const char *const id = vec_str(vec_get(v, "id"));
    const uint32_t call = (uint32_t)i + 1;
    const taken *const c = send_to(&b, call, vec_str(vec_get(v, "method")), request_of(v));
    if (!json_is_true(vec_get(v, "accepted"))) {
      assert_end(c, v, id);
      continue;
    }
    fx_tick(b.f, UINT64_C(1000000000)); /* a window of load is closed meanwhile */
    bare_turn(&b);
    cr_assert(c->ends == 0, "%s: %d %s", id, c->status.grpc, c->status.text);
    cr_assert_geq(c->messages, vec_u64(vec_get(v, "messages")), "%s", id);
    hang_up(&b, call);
    taken_ones++;
  }
  cr_assert(json_array_size(cases) == 57 && taken_ones == 15, "%zu", taken_ones);
  json_decref(all);
  bare_close(&b);
}

Test(recorded_requests, a_second_stream_is_refused_as_it_was_and_taken_after_the_first) {
  static const char *const methods[] = {"WatchKvPoolCatalog", "SubscribeServingReadiness",
                                        "SubscribeKvPoolLoad"};
  static const char *const steps[] = {"first", "over_limit", "after_release"};
  kvrelay_relay_config cfg = fx_config();
  cfg.max_catalog_subscribers = cfg.max_readiness_subscribers = cfg.max_load_subscribers = 1;
  bare b;
  bare_open(&b, &cfg, 0);
  for (uint32_t m = 0; m < 3; m++)
    for (uint32_t k = 0; k < 3; k++) {
      char name[64];
      snprintf(name, sizeof name, "%s_%s", methods[m], steps[k]);
      json_t *const request = line_of(name, "request"), *const end = line_of(name, "end");
      const taken *const c = send_to(&b, 3 * m + k + 1, methods[m], vec_get(request, "request"));
      if (strcmp(vec_str(vec_get(end, "by")), "server") == 0) {
        assert_end(c, end, name);
        hang_up(&b, 3 * m + k);
      } else {
        cr_assert(c->ends == 0 && c->admitted + c->messages != 0, "%s: %s", name, c->status.text);
      }
      json_decref(request);
      json_decref(end);
    }
  bare_close(&b);
}

Test(recorded_requests, a_second_reader_or_hub_is_refused_as_it_was) {
  static const char *const names[] = {"pool_first", "pool_per_pool_limit", "pool_hub_limit"};
  json_t *requests[3];
  kvrelay_producer producers[3];
  for (size_t i = 0; i < 3; i++) {
    requests[i] = line_of(names[i], "request");
    producers[i] = producer_of(vec_get(requests[i], "request"));
  }
  kvrelay_relay_config cfg = fx_config();
  cfg.identity.relay_incarnation = producers[0].producer_incarnation;
  cfg.max_hubs = cfg.max_subscribers_per_pool = 1;
  cfg.max_pool_streams = 2;
  bare b;
  bare_open(&b, &cfg, 0);
  publish_as(b.f, 0, &producers[0]);
  publish_as(b.f, 1, &producers[2]);
  for (uint32_t i = 0; i < 3; i++) {
    const taken *const c = send_to(&b, i + 1, "SubscribeKvPool", vec_get(requests[i], "request"));
    if (i == 0) {
      cr_assert(c->ends == 0 && c->messages > 1, "%s", c->status.text);
    } else {
      json_t *const end = line_of(names[i], "end");
      assert_end(c, end, names[i]);
      json_decref(end);
    }
    json_decref(requests[i]);
  }
  bare_close(&b);
}
