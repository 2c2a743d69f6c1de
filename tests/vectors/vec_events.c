/* SPDX-License-Identifier: Apache-2.0 */

/* Kind of events.json: one payload through decoder and source. */

#include "vectors.h"

#include "tests/unit/test_source.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#define WRONG(...) return vec_fail(why, why_cap, __VA_ARGS__)

static bool text_same(kvrelay_text got, bool present, const json_t *want) {
  if (json_is_null(want))
    return !present;
  return present && got.len == json_string_length(want) &&
         memcmp(got.ptr, vec_str(want), got.len) == 0;
}

static bool u64s_same(const uint64_t *got, size_t len, const json_t *want) {
  size_t want_len;
  uint64_t *list = vec_u64s(want, &want_len);
  bool same = len == want_len && (len == 0 || memcmp(got, list, len * sizeof *got) == 0);
  free(list);
  return same;
}

static bool tokens_same(const kvrelay_engine_event *ev, const json_t *want) {
  size_t want_len;
  uint32_t *list = vec_u32s(want, &want_len);
  bool same = ev->tokens_len == want_len &&
              (want_len == 0 || memcmp(ev->tokens, list, want_len * sizeof *list) == 0);
  free(list);
  return same;
}

static const char *type_name(int32_t type) {
  switch (type) {
  case KVRELAY_ENGINE_STORED:
    return "stored";
  case KVRELAY_ENGINE_REMOVED:
    return "removed";
  case KVRELAY_ENGINE_CLEARED:
    return "cleared";
  default:
    return "neither stored, removed nor cleared";
  }
}

static int check_stored(const kvrelay_engine_event *ev, const json_t *want, char *why,
                        size_t why_cap) {
  const json_t *parent = vec_get(want, "parent");
  if (json_is_null(parent) ? ev->has_parent : !ev->has_parent || ev->parent != vec_u64(parent))
    WRONG("parent differs");
  if (!tokens_same(ev, vec_get(want, "tokens")))
    WRONG("tokens differ");
  if (ev->pairs != json_is_true(vec_get(want, "eagle")) ||
      ev->block_size != vec_u64(vec_get(want, "block_size")))
    WRONG("pairs or block size differ");
  if (!text_same(ev->lora_name, ev->lora_name.len != 0, vec_get(want, "lora_name")) ||
      !text_same(ev->cache_salt, ev->cache_salt.len != 0, vec_get(want, "cache_namespace")))
    WRONG("adapter or namespace differs");
  return VEC_PASSED;
}

static int check_event(const kvrelay_engine_event *ev, const json_t *want, char *why,
                       size_t why_cap) {
  const char *type = vec_str(vec_get(want, "type"));
  if (strcmp(type_name(ev->type), type) != 0)
    WRONG("the event is %s, wanted %s", type_name(ev->type), type);
  if (strcmp(vec_str(vec_get(want, "encoding")), ev->positional ? "positional" : "map") != 0)
    WRONG("encoding differs");
  if (ev->type == KVRELAY_ENGINE_CLEARED)
    return VEC_PASSED;
  if (!u64s_same(ev->externals, ev->externals_len, vec_get(want, "external")))
    WRONG("engine hashes differ");
  const json_t *group = vec_get(want, "group_idx");
  if (!text_same(ev->medium, ev->has_medium, vec_get(want, "medium")) ||
      !text_same(ev->kind, ev->has_kind, vec_get(want, "kv_cache_spec_kind")) ||
      (json_is_null(group) ? ev->has_group : !ev->has_group || ev->group != vec_u64(group)))
    WRONG("medium, kind or group differ");
  return ev->type == KVRELAY_ENGINE_STORED ? check_stored(ev, want, why, why_cap) : VEC_PASSED;
}

static int check_decoded(feeder *f, const uint8_t *payload, size_t len, const json_t *expected,
                         char *why, size_t why_cap) {
  kvrelay_engine_batch batch;
  kvrelay_engine_event ev;
  const json_t *events = vec_get(expected, "events");
  if (kvrelay_engine_batch_begin(&f->decoder, payload, len, &batch) != KVRELAY_OK)
    WRONG("the payload was refused");
  if (!batch.has_ts || batch.ts != json_number_value(vec_get(expected, "ts")) || !batch.has_rank ||
      batch.rank != vec_u64(vec_get(expected, "rank")))
    WRONG("timestamp or rank differ");
  if (batch.events != json_array_size(events))
    WRONG("%zu events, wanted %zu", batch.events, json_array_size(events));
  for (size_t i = 0; i < batch.events; i++) {
    if (kvrelay_engine_batch_next(&f->decoder, &ev) != 1)
      WRONG("event %zu is missing", i);
    if (check_event(&ev, json_array_get(events, i), why, why_cap) != VEC_PASSED)
      return VEC_FAILED;
  }
  if (kvrelay_engine_batch_next(&f->decoder, &ev) != 0)
    WRONG("more events than announced");
  return VEC_PASSED;
}

/* The blocks, and no others, are mapped afterwards; the local hash is the one that leads from block
 * to block. */
static int check_blocks(feeder *f, const json_t *expected, char *why, size_t why_cap) {
  const json_t *blocks = vec_get(expected, "blocks"), *block;
  ckf_member member = {f->cfg.worker_id, (uint32_t)vec_u64(vec_get(expected, "rank"))};
  size_t i;
  uint64_t before = 0;
  if (ckf_producer_member_blocks(f->producer, &member) != json_array_size(blocks))
    WRONG("%" PRIu32 " blocks, wanted %zu", ckf_producer_member_blocks(f->producer, &member),
          json_array_size(blocks));
  json_array_foreach (blocks, i, block) {
    uint64_t canonical, local = vec_u64(vec_get(block, "local")),
                        want = vec_u64(vec_get(block, "canonical"));
    const json_t *event =
        json_array_get(vec_get(expected, "events"), vec_u64(vec_get(block, "event")));
    const json_t *external =
        json_array_get(vec_get(event, "external"), vec_u64(vec_get(block, "index")));
    if (vec_u64(external) != vec_u64(vec_get(block, "external")))
      WRONG("block %zu names another hash than its event", i);
    if (ckf_producer_find(f->producer, &member, vec_u64(external), &canonical, NULL) != 1 ||
        canonical != want)
      WRONG("canonical hash of block %zu differs", i);
    if (canonical != (i == 0 ? hashfmt_root(local) : hashfmt_child(before, local)))
      WRONG("local hash of block %zu differs", i);
    before = canonical;
  }
  return VEC_PASSED;
}

static int run_payload(const json_t *vector, char *why, size_t why_cap) {
  const json_t *input = vec_get(vector, "input"), *expected = vec_get(vector, "expected"),
               *pool = vec_get(input, "pool");
  kvrelay_source_config cfg = kvrelay_source_config_default();
  cfg.worker_id = 7;
  cfg.block_size = (uint32_t)vec_u64(vec_get(pool, "block_size"));
  cfg.hash_format = strcmp(vec_str(vec_get(pool, "format")), "DYNAMO_EAGLE_V1") == 0
                        ? HASHFMT_FORMAT_EAGLE
                        : HASHFMT_FORMAT_STANDARD;
  size_t len;
  uint8_t *payload = vec_hex(vec_get(input, "payload_hex"), &len);
  feeder *f = feeder_new(&cfg, 64, NULL);
  int result = check_decoded(f, payload, len, expected, why, why_cap);
  if (result == VEC_PASSED &&
      kvrelay_engine_feed(&f->decoder, &f->source, 0, payload, len, 0) != KVRELAY_OK)
    result = vec_fail(why, why_cap, "the source refused the batch");
  if (result == VEC_PASSED)
    result = check_blocks(f, expected, why, why_cap);
  feeder_free(f);
  free(payload);
  return result;
}

const vec_kind vec_events_kinds[] = {{"payload", run_payload}, {NULL, NULL}};
