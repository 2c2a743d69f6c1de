/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Groups of contract.json; those about readiness and load are in vec_planes.c.
 */

#include "vectors.h"

#include "kvrelay.h"
#include "kvrelay_pb.h"
#include "namespace_file.h"
#include "sha256.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENSURE(CONDITION, ...)                                                                     \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return vec_fail(why, why_cap, __VA_ARGS__);                                                  \
  } while (0)

/* A vector needs few bytes; one buffer for each purpose serves them all. */
static uint64_t arena_mem[1 << 15];
static uint8_t bytes_in[1 << 16], bytes_out[1 << 16];

static kvrelay_pb_arena fresh_arena(void) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  return arena;
}

/* Hex into bytes_in or another place of this size. */
static size_t hex_into(uint8_t *place, const json_t *value) {
  size_t len;
  uint8_t *bytes = vec_hex(value, &len);
  const size_t kept = len < sizeof bytes_in ? len : sizeof bytes_in;
  memcpy(place, bytes, kept);
  free(bytes);
  return kept;
}

static kvrelay_text text_of(const char *word) {
  kvrelay_text text = {(const uint8_t *)word, strlen(word)};
  return text;
}

/* ---- constants, hashes, digests ---- */

static int run_constants(const json_t *v, char *why, size_t why_cap) {
  const struct {
    const char *name;
    uint64_t value;
  } numbers[] = {{"protocol_version", KVRELAY_WIRE_VERSION},
                 {"contract_marker", KVRELAY_CONTRACT_MARKER},
                 {"digest_bytes", KVRELAY_DIGEST_LEN},
                 {"subscriber_id_max_bytes", KVRELAY_SUBSCRIBER_ID_MAX},
                 {"max_bucket_count", CKF_MAX_BUCKETS},
                 {"max_chunk_buckets", CKF_CBI1_MAX_CHUNK_BUCKETS},
                 {"max_cbi1_frame", CKF_CBI1_MAX_FRAME_BYTES},
                 {"max_delta_images", CKF_CBI1_MAX_IMAGES},
                 {"default_max_message_bytes", KVRELAY_PB_MESSAGE_MAX}};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
    ENSURE(vec_u64(vec_get(v, numbers[i].name)) == numbers[i].value, "%s", numbers[i].name);
  ENSURE(vec_u64(vec_get(v, "contract_marker_hex")) == KVRELAY_CONTRACT_MARKER, "marker in hex");
  const size_t len = hex_into(bytes_in, vec_get(v, "contract_marker_wire"));
  ENSURE(len == KVRELAY_PB_FILTER_TAIL_LEN && memcmp(bytes_in, kvrelay_pb_filter_tail, len) == 0,
         "marker on the wire");
  char path[128];
  snprintf(path, sizeof path, "/%s/GetRelayInfo", vec_str(vec_get(v, "service")));
  ENSURE(kvrelay_method_from_path((const uint8_t *)path, strlen(path)) ==
             KVRELAY_METHOD_GET_RELAY_INFO,
         "service");
  const char *package = vec_str(vec_get(v, "package"));
  ENSURE(strncmp(path + 1, package, strlen(package)) == 0, "package");
  return VEC_PASSED;
}

static int run_blake3(const json_t *v, char *why, size_t why_cap) {
  const size_t len = vec_u64(vec_get(v, "length"));
  ENSURE(len <= sizeof bytes_in, "length");
  for (size_t i = 0; i < len; i++)
    bytes_in[i] = (uint8_t)(i % 251);
  uint8_t hash[32];
  hashfmt_blake3(bytes_in, len, hash);
  const size_t want = hex_into(bytes_out, vec_get(v, "blake3"));
  ENSURE(want == 32 && memcmp(hash, bytes_out, 32) == 0, "hash differs");
  return VEC_PASSED;
}

#define MAP_CAP 33

/* Entries of the member "map", or of the rule of "generator". */
static size_t map_of(const json_t *v, kvrelay_map_entry map[MAP_CAP], char pool[][1200]) {
  size_t n = 0;
  const json_t *given = json_object_get(v, "map");
  if (!given) {
    const uint64_t count = vec_u64(vec_get(vec_get(v, "generator"), "count"));
    for (; n < count && n < MAP_CAP; n++) {
      memset(pool[n], 'x', 128);
      memset(pool[n] + 128, 'y', 1024);
      char name[8];
      memcpy(pool[n], name, (size_t)snprintf(name, sizeof name, "k%02zu", n));
      memcpy(pool[n] + 128, name, (size_t)snprintf(name, sizeof name, "v%02zu", n));
      map[n].key = (kvrelay_text){(const uint8_t *)pool[n], 128};
      map[n].value = (kvrelay_text){(const uint8_t *)pool[n] + 128, 1024};
    }
    return n;
  }
  for (void *it = json_object_iter((json_t *)(uintptr_t)given); it && n < MAP_CAP;
       it = json_object_iter_next((json_t *)(uintptr_t)given, it), n++) {
    map[n].key = text_of(json_object_iter_key(it));
    map[n].value = text_of(vec_str(json_object_iter_value(it)));
  }
  return n;
}

static int run_identity_digest(const json_t *v, char *why, size_t why_cap) {
  static char pool[MAP_CAP][1200];
  kvrelay_map_entry map[MAP_CAP];
  const bool is_map = json_object_get(v, "map") || json_object_get(v, "generator");
  const size_t map_len = is_map ? map_of(v, map, pool) : 0;
  kvrelay_digest digest;
  int err = KVRELAY_ERR_ARG;
  if (strcmp(vec_str(vec_get(v, "kind")), "cache_semantics") == 0) {
    const kvrelay_text source = text_of(is_map ? "" : vec_str(vec_get(v, "model_source")));
    err = kvrelay_cache_digest(source, map, map_len, (uint32_t)vec_u64(vec_get(v, "kv_block_size")),
                               (int32_t)vec_u64(vec_get(v, "hash_format")), &digest);
  } else if (strcmp(vec_str(vec_get(v, "kind")), "routing_scope") == 0) {
    kvrelay_endpoint endpoint = {0};
    if (!is_map) {
      const json_t *triple = vec_get(v, "endpoint");
      endpoint.namespace_ = text_of(vec_str(json_array_get(triple, 0)));
      endpoint.component = text_of(vec_str(json_array_get(triple, 1)));
      endpoint.endpoint = text_of(vec_str(json_array_get(triple, 2)));
    }
    err = kvrelay_scope_digest(&endpoint, map, map_len, &digest);
  }
  ENSURE(err == KVRELAY_OK, "%s", kvrelay_strerror(err));
  const size_t want = hex_into(bytes_out, vec_get(v, "digest"));
  ENSURE(want == KVRELAY_DIGEST_LEN && memcmp(digest.digest, bytes_out, want) == 0,
         "digest differs");
  ENSURE(digest.source == (is_map ? KVRELAY_SOURCE_EXPLICIT : KVRELAY_SOURCE_DEFAULT_DERIVED),
         "source differs");
  const json_t *hashed = json_object_get(v, "input_hex");
  if (hashed) {
    const size_t len = hex_into(bytes_in, hashed);
    uint8_t hash[32];
    hashfmt_blake3(bytes_in, len, hash);
    ENSURE(len == vec_u64(vec_get(v, "input_len")), "length of the hashed bytes");
    ENSURE(memcmp(hash, digest.digest, KVRELAY_DIGEST_LEN) == 0, "hashed bytes differ");
  }
  return VEC_PASSED;
}

static int run_dc_id(const json_t *v, char *why, size_t why_cap) {
  uint64_t id;
  const int err = kvrelay_dc_id(text_of(vec_str(vec_get(v, "name"))), &id);
  ENSURE(err == KVRELAY_OK, "%s", kvrelay_strerror(err));
  ENSURE(id == vec_u64(vec_get(v, "dc_id")), "dc_id is %" PRIu64, id);
  ENSURE(id == vec_u64(vec_get(v, "dc_id_hex")), "dc_id_hex differs");
  return VEC_PASSED;
}

/* ---- protobuf ---- */

typedef union any_message {
  kvrelay_request request;
  kvrelay_relay_info info;
  kvrelay_catalog_update catalog;
  kvrelay_filter_update filter;
  kvrelay_readiness_update readiness;
  kvrelay_load_update load;
  kvrelay_pb_serving_load serving_load;
  kvrelay_producer producer;
  kvrelay_descriptor descriptor;
  kvrelay_pool_id pool_id;
  kvrelay_ckf_format ckf_format;
  kvrelay_endpoint endpoint;
  kvrelay_registration registration;
  kvrelay_semantics semantics;
  kvrelay_topology_entry topology_entry;
} any_message;

typedef struct message {
  const char *name;
  int (*decode)(const uint8_t *bytes, size_t len, kvrelay_pb_arena *arena, any_message *out);
  ptrdiff_t (*encode)(const any_message *m, uint8_t *out, size_t cap);
  kvrelay_verdict (*check)(const any_message *m);
} message;

#define CODEC(NAME, TYPE)                                                                          \
  static int decode_##NAME(const uint8_t *bytes, size_t len, kvrelay_pb_arena *arena,              \
                           any_message *out) {                                                     \
    return kvrelay_pb_decode_##NAME(bytes, len, arena, &out->NAME);                                \
  }                                                                                                \
  static ptrdiff_t encode_##NAME(const any_message *m, uint8_t *out, size_t cap) {                 \
    return kvrelay_pb_encode_##NAME(&m->NAME, out, cap);                                           \
  }
KVRELAY_PB_MESSAGES(CODEC)

#define REQUEST(NAME, METHOD)                                                                      \
  static int decode_##NAME(const uint8_t *bytes, size_t len, kvrelay_pb_arena *arena,              \
                           any_message *out) {                                                     \
    (void)arena;                                                                                   \
    return kvrelay_pb_decode_request(METHOD, bytes, len, &out->request);                           \
  }
REQUEST(info_request, KVRELAY_METHOD_GET_RELAY_INFO)
REQUEST(catalog_request, KVRELAY_METHOD_WATCH_CATALOG)
REQUEST(pool_request, KVRELAY_METHOD_SUBSCRIBE_POOL)
REQUEST(readiness_request, KVRELAY_METHOD_SUBSCRIBE_READINESS)
REQUEST(load_request, KVRELAY_METHOD_SUBSCRIBE_LOAD)
REQUEST(serving_request, KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD)

static ptrdiff_t encode_request(const any_message *m, uint8_t *out, size_t cap) {
  return kvrelay_pb_encode_request(&m->request, out, cap);
}

#define CHECK(NAME)                                                                                \
  static kvrelay_verdict check_##NAME(const any_message *m) {                                      \
    return kvrelay_check_##NAME(&m->NAME);                                                         \
  }
CHECK(producer)
CHECK(descriptor)
CHECK(pool_id)
CHECK(ckf_format)
CHECK(endpoint)
CHECK(registration)
CHECK(semantics)
CHECK(topology_entry)

static kvrelay_verdict check_info(const any_message *m) {
  return kvrelay_check_envelope(&m->info.envelope);
}

static const message messages[] = {
    {"RelayInfoRequest", decode_info_request, encode_request, NULL},
    {"WatchKvPoolCatalogRequest", decode_catalog_request, encode_request, NULL},
    {"SubscribeKvPoolRequest", decode_pool_request, encode_request, NULL},
    {"SubscribeServingReadinessRequest", decode_readiness_request, encode_request, NULL},
    {"SubscribeKvPoolLoadRequest", decode_load_request, encode_request, NULL},
    {"SubscribeServingLoadRequest", decode_serving_request, encode_request, NULL},
    {"RelayInfo", decode_info, encode_info, check_info},
    {"KvPoolCatalogUpdate", decode_catalog, encode_catalog, NULL},
    {"FilterUpdate", decode_filter, encode_filter, NULL},
    {"ServingReadinessUpdate", decode_readiness, encode_readiness, NULL},
    {"KvPoolLoadUpdate", decode_load, encode_load, NULL},
    {"ServingLoadUpdate", decode_serving_load, encode_serving_load, NULL},
    {"ProducerIdentity", decode_producer, encode_producer, check_producer},
    {"KvPoolDescriptor", decode_descriptor, encode_descriptor, check_descriptor},
    {"KvPoolId", decode_pool_id, encode_pool_id, check_pool_id},
    {"CkfFormat", decode_ckf_format, encode_ckf_format, check_ckf_format},
    {"DynamoEndpointId", decode_endpoint, encode_endpoint, check_endpoint},
    {"ModelRegistration", decode_registration, encode_registration, check_registration},
    {"KvQuerySemantics", decode_semantics, encode_semantics, check_semantics},
    {"TopologyEntry", decode_topology_entry, encode_topology_entry, check_topology_entry},
    {NULL, NULL, NULL, NULL},
};

static const message *message_of(const json_t *v) {
  const char *name = vec_str(vec_get(v, "message"));
  const message *m = messages;
  while (m->name && strcmp(m->name, name) != 0)
    m++;
  return m->name ? m : NULL;
}

/* Decodes `from` and encodes it again; the result must be bytes `want`. */
static int run_round_trip(const json_t *v, const json_t *from, const json_t *want, char *why,
                          size_t why_cap) {
  static uint8_t expected[sizeof bytes_out];
  const message *m = message_of(v);
  ENSURE(m, "no such message");
  const size_t len = hex_into(bytes_in, from), want_len = hex_into(expected, want);
  kvrelay_pb_arena arena = fresh_arena();
  any_message decoded;
  const int err = m->decode(bytes_in, len, &arena, &decoded);
  ENSURE(err == KVRELAY_OK, "decode: %s", kvrelay_strerror(err));
  ENSURE(m->encode(&decoded, NULL, 0) == (ptrdiff_t)want_len, "size differs");
  const ptrdiff_t got = m->encode(&decoded, bytes_out, want_len);
  ENSURE(got == (ptrdiff_t)want_len && memcmp(bytes_out, expected, want_len) == 0, "bytes differ");
  ENSURE(want_len == 0 || m->encode(&decoded, bytes_out, want_len - 1) == KVRELAY_ERR_NOSPACE,
         "a short buffer is not refused");
  return VEC_PASSED;
}

static int run_protobuf(const json_t *v, char *why, size_t why_cap) {
  const json_t *hex = vec_get(v, "hex");
  const json_t *bytes = json_object_get(v, "bytes"); /* not of every request */
  ENSURE(!bytes || json_string_length(hex) / 2 == vec_u64(bytes), "length of the hex");
  return run_round_trip(v, hex, hex, why, why_cap);
}

static int run_tolerant(const json_t *v, char *why, size_t why_cap) {
  const json_t *same = vec_get(v, "same_as_hex");
  const int result = run_round_trip(v, vec_get(v, "hex"), same, why, why_cap);
  return result == VEC_PASSED ? run_round_trip(v, same, same, why, why_cap) : result;
}

static int run_malformed(const json_t *v, char *why, size_t why_cap) {
  const message *m = message_of(v);
  ENSURE(m, "no such message");
  const size_t len = hex_into(bytes_in, vec_get(v, "hex"));
  kvrelay_pb_arena arena = fresh_arena();
  any_message decoded;
  const int err = m->decode(bytes_in, len, &arena, &decoded);
  ENSURE(err == KVRELAY_ERR_TRUNCATED || err == KVRELAY_ERR_MALFORMED, "decode: %s",
         kvrelay_strerror(err));
  ENSURE(arena.used == 0, "the arena has changed");
  return VEC_PASSED;
}

static const char *class_name(uint8_t class_) {
  static const char *const names[] = {"ok", "invalid", "unsupported", "envelope"};
  return class_ < sizeof names / sizeof names[0] ? names[class_] : "?";
}

static int run_validation(const json_t *v, char *why, size_t why_cap) {
  const message *m = message_of(v);
  ENSURE(m && m->check, "no such validator");
  const size_t len = hex_into(bytes_in, vec_get(v, "hex"));
  kvrelay_pb_arena arena = fresh_arena();
  any_message decoded;
  const int err = m->decode(bytes_in, len, &arena, &decoded);
  ENSURE(err == KVRELAY_OK, "decode: %s", kvrelay_strerror(err));
  const kvrelay_verdict verdict = m->check(&decoded);
  const char *condition = kvrelay_condition_name(verdict.condition);
  const json_t *error = json_object_get(v, "error"), *field = json_object_get(v, "field");
  ENSURE(strcmp(class_name(verdict.class_), vec_str(vec_get(v, "class"))) == 0, "class %s (%s)",
         class_name(verdict.class_), condition);
  ENSURE(strcmp(condition, error ? vec_str(error) : "") == 0, "condition %s", condition);
  ENSURE(!field || strcmp(verdict.field, vec_str(field)) == 0, "field %s", verdict.field);
  return VEC_PASSED;
}

/* As a server sees it: decode, then the rule for subscriber ids. */
static int run_subscriber_id(const json_t *v, char *why, size_t why_cap) {
  kvrelay_request request = {.method = KVRELAY_METHOD_WATCH_CATALOG,
                             .contract_marker = KVRELAY_CONTRACT_MARKER};
  request.subscriber_id.len = hex_into(bytes_in, vec_get(v, "utf8_hex"));
  request.subscriber_id.ptr = bytes_in;
  const ptrdiff_t len = kvrelay_pb_encode_request(&request, bytes_out, sizeof bytes_out);
  ENSURE(len > 0, "encode");
  kvrelay_request decoded;
  const int err =
      kvrelay_pb_decode_request(KVRELAY_METHOD_WATCH_CATALOG, bytes_out, (size_t)len, &decoded);
  const bool ok = json_is_true(vec_get(v, "ok"));
  const json_t *status = json_object_get(v, "status");
  if (status) {
    ENSURE(!ok && strcmp(vec_str(status), "INTERNAL") == 0 && json_is_null(vec_get(v, "reason")),
           "only a decode failure has a status of its own");
    ENSURE(err == KVRELAY_ERR_MALFORMED, "decode: %s", kvrelay_strerror(err));
    return VEC_PASSED;
  }
  ENSURE(err == KVRELAY_OK, "decode: %s", kvrelay_strerror(err));
  ENSURE(kvrelay_subscriber_id_valid(decoded.subscriber_id) == ok, "verdict differs");
  return VEC_PASSED;
}

/* ---- sizes ---- */

static int run_chunk_plan(const json_t *v, char *why, size_t why_cap) {
  const ckf_format format = {42, vec_u64(vec_get(v, "bucket_count"))};
  const uint64_t chunk_buckets = vec_u64(vec_get(v, "chunk_buckets"));
  const uint32_t count = ckf_cbi1_chunk_count(&format, (uint32_t)chunk_buckets);
  ENSURE(count == vec_u64(vec_get(v, "chunk_count")), "%" PRIu32 " chunks", count);
  ENSURE(ckf_cbi1_snapshot_size(&format, (uint32_t)chunk_buckets, 0) ==
             vec_u64(vec_get(v, "payload_bytes")),
         "payload_bytes");
  const size_t last = ckf_cbi1_snapshot_size(&format, (uint32_t)chunk_buckets, count - 1);
  ENSURE(last == vec_u64(vec_get(v, "last_payload_bytes")), "last_payload_bytes");
  ENSURE((last - CKF_CBI1_SNAPSHOT_PREFIX_BYTES) / 8 == vec_u64(vec_get(v, "last_chunk_buckets")),
         "last_chunk_buckets");
  return VEC_PASSED;
}

static kvrelay_filter_update some_filter_update(uint64_t bucket_count, uint64_t number,
                                                uint64_t ts_us, size_t payload_len) {
  kvrelay_filter_update m = {
      .envelope = {
          KVRELAY_WIRE_VERSION, true, {~UINT64_C(0), ~UINT64_C(0)}, KVRELAY_CONTRACT_MARKER}};
  const kvrelay_digest digest = {true, {1}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  m.producer.present = m.producer.pool_id.present = m.producer.pool_id.domain.present = true;
  m.producer.pool_id.identity_version = 1;
  m.producer.pool_id.domain.cache_semantics = m.producer.pool_id.domain.routing_scope = digest;
  m.producer.pool_id.dc_id = m.producer.producer_incarnation = ~UINT64_C(0);
  m.producer.layout_generation = number > UINT32_MAX ? number : 1;
  m.producer.ckf_format = (kvrelay_ckf_format){true, 1, 42, bucket_count, 16, 4};
  m.base_sequence = m.sequence = number;
  m.send_ts_us = ts_us;
  m.kind = KVRELAY_UPDATE_SNAPSHOT_CHUNK;
  m.payload_len = payload_len;
  return m;
}

/* Sizes alone: the payload is never read. */
static size_t envelope_size(const kvrelay_filter_update *m) {
  kvrelay_pb_filter_prefix prefix;
  uint8_t head[KVRELAY_PB_FILTER_HEAD_CAP];
  if (kvrelay_pb_filter_prefix_init(&prefix, m) != KVRELAY_OK)
    return 0;
  return kvrelay_pb_filter_head(&prefix, m, head) + KVRELAY_PB_FILTER_TAIL_LEN;
}

static int run_envelope_bytes(const json_t *v, char *why, size_t why_cap) {
  const kvrelay_filter_update typical =
      some_filter_update(1 << 20, 300, UINT64_C(1700000000000000), CKF_CBI1_MAX_FRAME_BYTES);
  const kvrelay_filter_update largest =
      some_filter_update(CKF_MAX_BUCKETS, UINT64_MAX, INT64_MAX, CKF_CBI1_MAX_FRAME_BYTES);
  ENSURE(envelope_size(&typical) == vec_u64(vec_get(v, "typical")), "typical is %zu",
         envelope_size(&typical));
  ENSURE(envelope_size(&largest) == vec_u64(vec_get(v, "largest")), "largest is %zu",
         envelope_size(&largest));
  return VEC_PASSED;
}

/* A length-prefixed body: flag, length, message. */
static int run_grpc_message(const json_t *v, char *why, size_t why_cap) {
  const size_t len = hex_into(bytes_in, vec_get(v, "hex"));
  ENSURE(len >= 5 && bytes_in[0] == 0, "flag");
  const size_t body = (size_t)bytes_in[1] << 24 | (size_t)bytes_in[2] << 16 |
                      (size_t)bytes_in[3] << 8 | bytes_in[4];
  ENSURE(body == len - 5, "length");
  ptrdiff_t got = -1;
  if (strstr(vec_str(vec_get(v, "name")), "GetRelayInfo request")) {
    const kvrelay_request request = {.method = KVRELAY_METHOD_GET_RELAY_INFO,
                                     .contract_marker = KVRELAY_CONTRACT_MARKER};
    got = kvrelay_pb_encode_request(&request, bytes_out, sizeof bytes_out);
  } else if (strstr(vec_str(vec_get(v, "name")), "GetRelayInfo response")) {
    const kvrelay_relay_info info = {
        {KVRELAY_WIRE_VERSION, true, {17, 23}, KVRELAY_CONTRACT_MARKER}};
    got = kvrelay_pb_encode_info(&info, bytes_out, sizeof bytes_out);
  }
  ENSURE(got == (ptrdiff_t)body && memcmp(bytes_out, bytes_in + 5, body) == 0, "message differs");
  return VEC_PASSED;
}

/* ---- a consumer that is given one catalog ---- */

#define CALLS_CAP 8

typedef struct asker {
  kvrelay_consumer consumer;
  void *mem;
  uint32_t calls[CALLS_CAP]; /* by method */
  bool in_force, closed, stopped;
} asker;

static void note_calls(asker *a) {
  kvrelay_action action;
  while (kvrelay_consumer_action_next(&a->consumer, 1, &action) == 1)
    if (action.kind == KVRELAY_ACTION_CALL && action.request.method < CALLS_CAP)
      a->calls[action.request.method] = action.call;
}

/* The relay of the vectors is 17/23. */
static bool asker_feed(asker *a, const kvrelay_catalog_update *update) {
  memset(a, 0, sizeof *a);
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.catalog_bytes = 1 << 16;
  cfg.max_pools = 16;
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  a->mem = malloc(len);
  if (!a->mem || kvrelay_consumer_init(&a->consumer, &cfg, a->mem, len, 0) != KVRELAY_OK)
    return false;
  kvrelay_consumer_connected(&a->consumer, 1);
  note_calls(a);
  const kvrelay_relay_info info = {{KVRELAY_WIRE_VERSION, true, {17, 23}, KVRELAY_CONTRACT_MARKER}};
  if (kvrelay_consumer_feed_info(&a->consumer, a->calls[KVRELAY_METHOD_GET_RELAY_INFO], &info, 1) !=
      KVRELAY_OK)
    return false;
  note_calls(a);
  if (kvrelay_consumer_feed_catalog(&a->consumer, a->calls[KVRELAY_METHOD_WATCH_CATALOG], update,
                                    1) != KVRELAY_OK)
    return false;
  kvrelay_event_out event;
  while (kvrelay_consumer_event_next(&a->consumer, &event) == 1) {
    a->in_force |= event.kind == KVRELAY_EVENT_CATALOG;
    a->closed |= event.kind == KVRELAY_EVENT_CATALOG_VOID;
    a->stopped |= event.kind == KVRELAY_EVENT_STOPPED;
  }
  return true;
}

static int judge_catalog(const asker *a, const json_t *v, char *why, size_t why_cap) {
  const char *plane = a->stopped ? "stop" : a->closed ? "plane_invalid" : a->in_force ? "ok" : "?";
  ENSURE(strcmp(plane, vec_str(vec_get(v, "plane"))) == 0, "plane %s", plane);
  const json_t *wanted = json_object_get(v, "pools");
  uint64_t revision;
  uint32_t pools = 0;
  ENSURE(kvrelay_consumer_catalog(&a->consumer, &revision, &pools) == (wanted != NULL),
         "catalog in force");
  ENSURE(pools == json_array_size(wanted), "%" PRIu32 " pools", pools);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view view;
    ENSURE(kvrelay_consumer_pool_get(&a->consumer, i, 1, &view) == KVRELAY_OK, "pool %" PRIu32, i);
    ENSURE(strcmp(class_name(view.verdict.class_),
                  vec_str(vec_get(json_array_get(wanted, i), "class"))) == 0,
           "pool %" PRIu32 " is %s", i, class_name(view.verdict.class_));
    ENSURE((view.verdict.class_ != KVRELAY_CLASS_OK) == (view.state == KVRELAY_REPLICA_QUARANTINED),
           "pool %" PRIu32 ": quarantine", i);
  }
  return VEC_PASSED;
}

static int run_catalog_verdict(const json_t *v, char *why, size_t why_cap) {
  const size_t len = hex_into(bytes_in, vec_get(v, "hex"));
  kvrelay_pb_arena arena = fresh_arena();
  kvrelay_catalog_update update;
  const int err = kvrelay_pb_decode_catalog(bytes_in, len, &arena, &update);
  ENSURE(err == KVRELAY_OK, "decode: %s", kvrelay_strerror(err));
  asker a;
  const int result = asker_feed(&a, &update) ? judge_catalog(&a, v, why, why_cap)
                                             : vec_fail(why, why_cap, "no way to feed it");
  free(a.mem);
  return result;
}

/* ---- name index ---- */

#define POOLS_CAP 4
#define NAMES_CAP 4

/* "base:<model>" or "lora:<model>:<adapter>" */
static kvrelay_target target_of(const char *text) {
  kvrelay_target t = {.present = true};
  const char *model = strchr(text, ':');
  if (!model)
    return t;
  const char *adapter = strchr(++model, ':');
  t.base_model = text_of(model);
  t.kind = KVRELAY_TARGET_BASE;
  if (adapter) {
    t.kind = KVRELAY_TARGET_LORA;
    t.base_model.len = (size_t)(adapter - model);
    t.adapter = text_of(adapter + 1);
  }
  return t;
}

/* Pools that answer to a name, as "p1 p2 ". */
static const char *pools_of(const asker *a, const char *name) {
  static char list[64];
  kvrelay_answer answers[POOLS_CAP];
  const kvrelay_query query = {.model = text_of(name)};
  const ptrdiff_t n = kvrelay_consumer_query(&a->consumer, &query, answers, POOLS_CAP, NULL, 0, 1);
  bool named[POOLS_CAP] = {false};
  for (ptrdiff_t i = 0; i < n && i < POOLS_CAP; i++)
    named[answers[i].pool] = true;
  list[0] = 0;
  for (uint32_t p = 0; p < POOLS_CAP; p++)
    if (named[p])
      snprintf(list + strlen(list), sizeof list - strlen(list), "p%" PRIu32 " ", p + 1);
  return list;
}

static int judge_name(const asker *a, const char *name, const json_t *index, char *why,
                      size_t why_cap) {
  char want[64] = "";
  const json_t *pools = json_object_get(index, name);
  for (size_t i = 0; i < json_array_size(pools); i++)
    snprintf(want + strlen(want), sizeof want - strlen(want), "%s ",
             vec_str(json_array_get(pools, i)));
  ENSURE(strcmp(pools_of(a, name), want) == 0, "%s is in %s", name, pools_of(a, name));
  return VEC_PASSED;
}

static int judge_names(const asker *a, const json_t *registrations, const json_t *index, char *why,
                       size_t why_cap) {
  int result = VEC_PASSED;
  size_t seen = 0;
  for (void *it = json_object_iter((json_t *)(uintptr_t)index); it && result == VEC_PASSED;
       it = json_object_iter_next((json_t *)(uintptr_t)index, it), seen++)
    result = judge_name(a, json_object_iter_key(it), index, why, why_cap);
  for (size_t i = 0; i < json_array_size(registrations) && result == VEC_PASSED; i++) {
    const json_t *row = json_array_get(registrations, i), *aliases = json_array_get(row, 3);
    result = judge_name(a, vec_str(json_array_get(row, 1)), index, why, why_cap);
    for (size_t k = 0; k < json_array_size(aliases) && result == VEC_PASSED; k++)
      result = judge_name(a, vec_str(json_array_get(aliases, k)), index, why, why_cap);
  }
  return result;
}

static int run_name_index(const json_t *v, char *why, size_t why_cap) {
  static const int32_t role = KVRELAY_ROLE_LEGACY;
  const json_t *rows = vec_get(v, "registrations");
  kvrelay_descriptor pools[POOLS_CAP];
  kvrelay_registration registrations[POOLS_CAP];
  kvrelay_text aliases[POOLS_CAP][NAMES_CAP];
  const size_t n = json_array_size(rows);
  ENSURE(n <= POOLS_CAP, "more pools than this test takes");
  for (size_t i = 0; i < n; i++) {
    const json_t *row = json_array_get(rows, i), *other = json_array_get(row, 3);
    char pool[8];
    snprintf(pool, sizeof pool, "p%zu", i + 1);
    ENSURE(strcmp(vec_str(json_array_get(row, 0)), pool) == 0, "pools are not p1, p2 …");
    ENSURE(json_array_size(other) <= NAMES_CAP, "more aliases than this test takes");
    for (size_t k = 0; k < json_array_size(other); k++)
      aliases[i][k] = text_of(vec_str(json_array_get(other, k)));
    registrations[i] = (kvrelay_registration){text_of(vec_str(json_array_get(row, 1))),
                                              target_of(vec_str(json_array_get(row, 2))),
                                              aliases[i], json_array_size(other)};
    memset(&pools[i], 0, sizeof pools[i]);
    pools[i].producer = some_filter_update(64, 0, 0, 0).producer;
    pools[i].producer.pool_id.dc_id = i;
    pools[i].serving_endpoint = (kvrelay_endpoint){true, text_of("n"), text_of("c"), text_of("e")};
    pools[i].registrations = &registrations[i];
    pools[i].registrations_len = 1;
    pools[i].query_semantics = (kvrelay_semantics){true, 4, HASHFMT_FORMAT_STANDARD};
    pools[i].pool_roles = (kvrelay_roles){&role, 1};
  }
  const kvrelay_catalog_update update = {
      {KVRELAY_WIRE_VERSION, true, {17, 23}, KVRELAY_CONTRACT_MARKER}, 1, true, pools, n};
  asker a;
  const int result = asker_feed(&a, &update)
                         ? judge_names(&a, rows, vec_get(v, "index"), why, why_cap)
                         : vec_fail(why, why_cap, "no way to feed it");
  free(a.mem);
  return result;
}

/* ---- frames of the raw transport ---- */

static int run_raw_preface(const json_t *v, size_t len, char *why, size_t why_cap) {
  const bool client = strcmp(vec_str(vec_get(v, "by")), "client") == 0;
  kvrelay_raw_preface preface;
  for (size_t n = 0; n < len; n++)
    ENSURE(kvrelay_raw_preface_get(bytes_in, n, client, &preface) == KVRELAY_ERR_TRUNCATED,
           "%zu bytes are taken", n);
  ENSURE(kvrelay_raw_preface_get(bytes_in, len, client, &preface) == KVRELAY_OK, "refused");
  ENSURE((preface.max_streams == 0) == client && (preface.initial_credit != 0) == client,
         "it reads %u streams, %" PRIu32 " credit", preface.max_streams, preface.initial_credit);
  kvrelay_raw_preface_put(bytes_out, &preface);
  ENSURE(len == KVRELAY_RAW_PREFACE_LEN && memcmp(bytes_in, bytes_out, len) == 0,
         "written again it differs");
  return VEC_PASSED;
}

/* The frame's type and stream as its name tells them: "CREDIT 65536 on stream 3", "PING". */
static int32_t named_type(const char *name) {
  static const char *const types[] = {"?",      "REQUEST", "RESPONSE", "MESSAGE", "END",
                                      "CANCEL", "CREDIT",  "PING",     "PONG",    "GOAWAY"};
  for (int32_t type = 1; type < (int32_t)(sizeof types / sizeof *types); type++)
    if (strncmp(name, types[type], strlen(types[type])) == 0)
      return type;
  return KVRELAY_FRAME_NONE;
}

static int run_raw_frame(const json_t *v, char *why, size_t why_cap) {
  const size_t len = hex_into(bytes_in, vec_get(v, "hex"));
  const char *const name = vec_str(vec_get(v, "name")), *const on = strstr(name, "stream ");
  const int32_t type = named_type(name);
  const uint32_t stream =
      on && type != KVRELAY_FRAME_GOAWAY ? (uint32_t)strtoul(on + 7, NULL, 10) : 0;
  if (strstr(name, "preface"))
    return run_raw_preface(v, len, why, why_cap);
  for (size_t split = 1; split <= len; split++) { /* one part for split == len */
    kvrelay_framer framer;
    kvrelay_frame f = {0};
    size_t body = 0;
    kvrelay_framer_init_raw(&framer, strcmp(vec_str(vec_get(v, "by")), "server") != 0, 65536);
    for (size_t at = 0; at < len;) {
      const size_t end = at < split ? split : len;
      const ptrdiff_t used = kvrelay_framer_feed(&framer, bytes_in + at, end - at, &f);
      ENSURE(used > 0, "cut at %zu: error %td", split, used);
      at += (size_t)used;
      if (f.type == KVRELAY_FRAME_NONE)
        continue;
      ENSURE(f.type == type && f.stream == stream && f.offset == body,
             "cut at %zu: type %d, stream %" PRIu32 ", offset %" PRIu32, split, (int)f.type,
             f.stream, f.offset);
      memcpy(bytes_out + KVRELAY_RAW_HEADER_LEN + body, f.piece, f.piece_len);
      body += f.piece_len;
    }
    ENSURE(kvrelay_frame_done(&f) && kvrelay_framer_empty(&framer), "cut at %zu: not done", split);
    if (type == KVRELAY_FRAME_CREDIT)
      ENSURE(kvrelay_frame_u32(&f) == strtoul(name + 7, NULL, 10), "another number");
    if (type == KVRELAY_FRAME_GOAWAY) { /* "GOAWAY shutdown, last stream 3" */
      const char *const word = name + 7;
      const size_t n = strcspn(word, ",");
      ENSURE(f.aux == KVRELAY_GOAWAY_SHUTDOWN && on &&
                 kvrelay_frame_u32(&f) == strtoul(on + 7, NULL, 10) && body == 4 + n &&
                 memcmp(bytes_out + KVRELAY_RAW_HEADER_LEN + 4, word, n) == 0,
             "another code, stream or text");
    }
    kvrelay_raw_header_put(bytes_out, f.type, f.stream, f.aux, f.body_len);
    ENSURE(KVRELAY_RAW_HEADER_LEN + body == len && memcmp(bytes_in, bytes_out, len) == 0,
           "cut at %zu: written again it differs", split);
  }
  return VEC_PASSED;
}

/* ---- what upstream hashes with SHA-256 ---- */

/* The file that the vector describes, in its order. */
static char *namespace_json(const json_t *v) {
  json_t *sources = json_array();
  size_t i;
  json_t *name;
  json_array_foreach (vec_get(v, "namespaces"), i, name)
    json_array_append_new(sources, json_pack("{s:O}", "namespace", name));
  json_t *file = json_pack("{s:o, s:i}", "sources", sources, "version", 1);
  json_t *connection = json_object_get(v, "connection_revision");
  if (json_is_string(connection))
    json_object_set(file, "connectionRevision", connection);
  char *text = json_dumps(file, JSON_INDENT(2));
  json_decref(file);
  return text;
}

static int run_namespace_file(const json_t *v, char *why, size_t why_cap) {
  const char *connection = json_string_value(json_object_get(v, "connection_revision"));
  namespace_selection selection;
  char what[NAMESPACE_WHY_CAP];
  char *file = namespace_json(v);
  const int rc = namespace_selection_parse(file, strlen(file), connection, &selection, what);
  free(file);
  ENSURE(rc == NAMESPACES_CHANGED, "%s", what);
  char *canonical = namespace_canonical(selection.namespaces, selection.namespaces_len, connection);
  const bool same = canonical && strcmp(canonical, vec_str(vec_get(v, "canonical"))) == 0;
  const bool hash = strcmp(selection.revision, vec_str(vec_get(v, "sha256"))) == 0;
  free(canonical);
  namespace_selection_free(&selection);
  ENSURE(same, "another canonical text");
  ENSURE(hash, "another revision");
  return VEC_PASSED;
}

static int run_endpoint_suffix(const json_t *v, char *why, size_t why_cap) {
  const char *dc = vec_str(vec_get(v, "dc"));
  char hex[SHA256_HEX_CAP];
  ENSURE(sha256_hex(dc, strlen(dc), hex), "no SHA-256");
  hex[32] = '\0';
  ENSURE(strcmp(hex, vec_str(vec_get(v, "sha256_first_32_hex"))) == 0, "is %s", hex);
  return VEC_PASSED;
}

const vec_kind vec_contract_groups[] = {
    {"constants", run_constants},
    {"blake3", run_blake3},
    {"identity_digests", run_identity_digest},
    {"dc_ids", run_dc_id},
    {"protobuf", run_protobuf},
    {"decode_tolerant", run_tolerant},
    {"decode_malformed", run_malformed},
    {"validation", run_validation},
    {"subscriber_ids", run_subscriber_id},
    {"catalog_verdicts", run_catalog_verdict},
    {"name_index", run_name_index},
    {"chunk_plans", run_chunk_plan},
    {"envelope_bytes", run_envelope_bytes},
    {"grpc_messages", run_grpc_message},
    {"raw_frames", run_raw_frame},
    {"later_serving_load", run_protobuf},
    {"namespace_file", run_namespace_file},
    {"relay_endpoint_suffix", run_endpoint_suffix},
    {NULL, NULL},
};
