/* SPDX-License-Identifier: Apache-2.0 */

/* proto/: what the golden bytes of contract.json do not say. Those run in tests/vectors. */

#include "kvrelay_pb.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGE_CAP (1u << 21)

static uint64_t rng_state;

static uint64_t rng(void) {
  uint64_t z = rng_state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

/* ---- every decoder behind one signature ---- */

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

typedef struct decoder {
  const char *message;
  int (*decode)(const uint8_t *bytes, size_t len, kvrelay_pb_arena *arena, any_message *out);
  ptrdiff_t (*encode)(const any_message *m, uint8_t *out, size_t cap);
} decoder;

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

static const decoder decoders[] = {
    {"RelayInfoRequest", decode_info_request, encode_request},
    {"WatchKvPoolCatalogRequest", decode_catalog_request, encode_request},
    {"SubscribeKvPoolRequest", decode_pool_request, encode_request},
    {"SubscribeServingReadinessRequest", decode_readiness_request, encode_request},
    {"SubscribeKvPoolLoadRequest", decode_load_request, encode_request},
    {"SubscribeServingLoadRequest", decode_serving_request, encode_request},
    {"RelayInfo", decode_info, encode_info},
    {"KvPoolCatalogUpdate", decode_catalog, encode_catalog},
    {"FilterUpdate", decode_filter, encode_filter},
    {"ServingReadinessUpdate", decode_readiness, encode_readiness},
    {"KvPoolLoadUpdate", decode_load, encode_load},
    {"ServingLoadUpdate", decode_serving_load, encode_serving_load},
    {"ProducerIdentity", decode_producer, encode_producer},
    {"KvPoolDescriptor", decode_descriptor, encode_descriptor},
    {"KvPoolId", decode_pool_id, encode_pool_id},
    {"CkfFormat", decode_ckf_format, encode_ckf_format},
    {"DynamoEndpointId", decode_endpoint, encode_endpoint},
    {"ModelRegistration", decode_registration, encode_registration},
    {"KvQuerySemantics", decode_semantics, encode_semantics},
    {"TopologyEntry", decode_topology_entry, encode_topology_entry},
};
#define DECODERS_LEN (sizeof decoders / sizeof decoders[0])

static uint64_t arena_mem[1u << 20];

static kvrelay_pb_arena fresh_arena(void) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  return arena;
}

/* Decodes from a block of exactly this length, so that a byte too far is seen by the sanitizer. */
static int decode_exact(const decoder *d, const uint8_t *bytes, size_t len, bool *stable) {
  uint8_t *copy = malloc(len ? len : 1), *once = NULL, *again = NULL;
  cr_assert(copy);
  memcpy(copy, bytes, len);
  kvrelay_pb_arena arena = fresh_arena();
  any_message m, untouched;
  memset(&m, 0xA5, sizeof m);
  untouched = m;
  const int err = d->decode(copy, len, &arena, &m);
  *stable = true;
  if (err) {
    *stable = arena.used == 0 && memcmp(&m, &untouched, sizeof m) == 0;
  } else {
    /* The canonical form is a fixed point, also when the input was not canonical. */
    const ptrdiff_t size = d->encode(&m, NULL, 0);
    if (size >= 0) {
      once = malloc((size_t)size + 1);
      again = malloc((size_t)size + 1);
      any_message m2;
      *stable = d->encode(&m, once, (size_t)size) == size &&
                d->decode(once, (size_t)size, &arena, &m2) == KVRELAY_OK &&
                d->encode(&m2, again, (size_t)size) == size &&
                memcmp(once, again, (size_t)size) == 0;
    } else {
      *stable = size == KVRELAY_ERR_ARG; /* a digest longer than its struct holds */
    }
  }
  free(copy);
  free(once);
  free(again);
  return err;
}

/* ---- golden bytes, bent ---- */

typedef struct sample {
  const decoder *own;
  uint8_t bytes[2048];
  size_t len;
} sample;

static sample samples[256];
static size_t samples_len;

static void load_samples(void) {
  json_error_t error;
  json_t *root = json_load_file("tests/vectors/contract.json", 0, &error);
  cr_assert(root, "%s", error.text);
  static const char *const groups[] = {"protobuf", "decode_tolerant", "validation",
                                       "later_serving_load"};
  for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
    const json_t *group = json_object_get(root, groups[g]);
    for (size_t i = 0; i < json_array_size(group); i++) {
      const json_t *v = json_array_get(group, i);
      const char *hex = json_string_value(json_object_get(v, "hex"));
      const char *name = json_string_value(json_object_get(v, "message"));
      cr_assert(hex && name && samples_len < 256);
      sample *s = &samples[samples_len++];
      for (size_t d = 0; d < DECODERS_LEN; d++)
        if (strcmp(decoders[d].message, name) == 0)
          s->own = &decoders[d];
      s->len = strlen(hex) / 2;
      cr_assert(s->own && s->len <= sizeof s->bytes, "%s", name);
      for (size_t b = 0; b < s->len; b++) {
        const char pair[3] = {hex[2 * b], hex[2 * b + 1], 0};
        s->bytes[b] = (uint8_t)strtoul(pair, NULL, 16);
      }
    }
  }
  json_decref(root);
  cr_assert(samples_len > 130);
}

Test(pb, every_prefix_into_every_decoder) {
  load_samples();
  size_t truncated = 0;
  for (size_t i = 0; i < samples_len; i++)
    for (size_t len = 0; len <= samples[i].len; len++)
      for (size_t d = 0; d < DECODERS_LEN; d++) {
        bool stable;
        const int err = decode_exact(&decoders[d], samples[i].bytes, len, &stable);
        cr_assert(stable, "%s %zu at %zu", decoders[d].message, i, len);
        if (&decoders[d] != samples[i].own)
          continue;
        /* What is whole but for its end is never called malformed. */
        cr_assert(err == KVRELAY_OK || err == KVRELAY_ERR_TRUNCATED, "%zu at %zu: %d", i, len, err);
        cr_assert(len < samples[i].len || err == KVRELAY_OK);
        truncated += err != KVRELAY_OK;
      }
  cr_assert(truncated > 5000);
}

Test(pb, every_byte_changed) {
  load_samples();
  rng_state = 7;
  size_t refused = 0, taken = 0;
  for (size_t i = 0; i < samples_len; i++)
    for (size_t at = 0; at < samples[i].len; at++)
      for (int k = 0; k < 12; k++) {
        const uint8_t was = samples[i].bytes[at];
        samples[i].bytes[at] = k < 8 ? (uint8_t)(was ^ (1u << k)) : (uint8_t)rng();
        bool stable;
        const int err = decode_exact(samples[i].own, samples[i].bytes, samples[i].len, &stable);
        cr_assert(stable, "%zu at %zu", i, at);
        *(err ? &refused : &taken) += 1;
        samples[i].bytes[at] = was;
      }
  cr_assert(refused > 1000 && taken > 1000);
}

Test(pb, random_bytes) {
  rng_state = 8;
  for (int round = 0; round < 200000; round++) {
    uint8_t bytes[48];
    const size_t len = rng() % sizeof bytes;
    for (size_t b = 0; b < len; b++)
      bytes[b] = rng() % 3 ? (uint8_t)(rng() % 0x30) : (uint8_t)rng();
    bool stable;
    (void)decode_exact(&decoders[(size_t)round % DECODERS_LEN], bytes, len, &stable);
    cr_assert(stable);
  }
}

/* Frames every sample, feeds one byte a time and decodes what comes out. */
Test(pb, X4_golden_bytes_fed_one_by_one_are_what_they_are_in_one_piece) {
  load_samples();
  for (size_t i = 0; i < samples_len; i++) {
    uint8_t stream[KVRELAY_GRPC_PREFIX_LEN + sizeof samples[0].bytes], got[sizeof samples[0].bytes];
    const size_t len = samples[i].len, all = KVRELAY_GRPC_PREFIX_LEN + len;
    kvrelay_grpc_prefix_put(stream, (uint32_t)len);
    memcpy(stream + KVRELAY_GRPC_PREFIX_LEN, samples[i].bytes, len);
    for (size_t step = 1; step <= all; step += all - 1) { /* bytes, then the whole */
      kvrelay_framer framer;
      kvrelay_frame f = {0};
      size_t body = 0;
      kvrelay_framer_init_grpc(&framer, 4096);
      for (size_t at = 0; at < all; at += step) {
        cr_assert_eq(kvrelay_framer_feed(&framer, stream + at, step, &f), (ptrdiff_t)step);
        if (f.type == KVRELAY_FRAME_NONE)
          continue;
        cr_assert_eq(f.offset, body);
        memcpy(got + body, f.piece, f.piece_len);
        body += f.piece_len;
      }
      bool stable;
      cr_assert(kvrelay_frame_done(&f) && kvrelay_framer_empty(&framer) && body == len, "%zu", i);
      cr_assert_eq(memcmp(got, samples[i].bytes, len), 0);
      cr_assert_eq(decode_exact(samples[i].own, got, body, &stable), KVRELAY_OK);
    }
  }
}

/* The sample pb-<number> of the golden bytes, decoded; encoding it gives its bytes again. */
static any_message golden(size_t number) {
  const sample *s = &samples[number - 1];
  uint8_t again[sizeof s->bytes];
  kvrelay_pb_arena arena = fresh_arena();
  any_message m;
  cr_assert_eq(s->own->decode(s->bytes, s->len, &arena, &m), KVRELAY_OK);
  cr_assert_eq(s->own->encode(&m, again, sizeof again), (ptrdiff_t)s->len);
  cr_assert_eq(memcmp(again, s->bytes, s->len), 0);
  return m;
}

static bool is(kvrelay_text t, const char *word) {
  return t.len == strlen(word) && memcmp(t.ptr, word, t.len) == 0;
}

Test(pb, W11_a_pool_with_an_adapter_comes_back_and_is_valid) {
  load_samples();
  const kvrelay_catalog_update m = golden(18).catalog;
  cr_assert(m.pools_len == 1 && m.pools[0].registrations_len == 1);
  const kvrelay_registration *r = &m.pools[0].registrations[0];
  cr_assert_eq(kvrelay_check_descriptor(&m.pools[0]).class_, KVRELAY_CLASS_OK);
  cr_assert(is(r->canonical_model_id, "llama-lora") && r->target.kind == KVRELAY_TARGET_LORA);
  cr_assert(is(r->target.base_model, "llama") && r->aliases_len == 1 && is(r->aliases[0], "chat"));
  cr_assert(m.pools[0].pool_roles.len == 1 && m.pools[0].pool_roles.ptr[0] == KVRELAY_ROLE_DECODE);
}

Test(pb, W12_load_windows_come_back) {
  load_samples();
  const kvrelay_load_update full = golden(22).load;
  cr_assert(full.window_sequence == 12 && full.pools_len == 1);
  cr_assert_eq(kvrelay_check_producer(&full.pools[0].producer).class_, KVRELAY_CLASS_OK);
  const kvrelay_load_update idle = golden(23).load, first = golden(24).load;
  cr_assert(idle.window_sequence == 13 && idle.pools_len == 0);
  cr_assert(first.window_sequence == 0 && first.pools_len == 0);
}

Test(pb, W13_serving_load_tells_zero_from_absent) {
  load_samples();
  const kvrelay_pb_serving_load m = golden(samples_len).serving_load;
  cr_assert(m.window_sequence == 3 && m.pools_len == 1 && m.models_len == 1);
  const kvrelay_pb_pool_serving *pool = m.pools;
  cr_assert_eq(kvrelay_check_producer(&pool->producer).class_, KVRELAY_CLASS_OK);
  cr_assert(!pool->load.requests.present && pool->load.tokens.present && pool->load.status == 1);
  cr_assert(pool->load.tokens.active_prefill_tokens.present);
  cr_assert_eq(pool->load.tokens.active_prefill_tokens.value, 0);
  cr_assert_eq(pool->load.tokens.active_decode_blocks.value, 20);
  cr_assert(!pool->load.tokens.input_tokens_total.present);
  cr_assert(pool->deployment_present && pool->live_workers.value == 2);
  cr_assert(!pool->max_concurrency.present);
  const kvrelay_pb_model_serving *model = m.models;
  cr_assert(is(model->namespace_, "prod") && is(model->canonical_model_id, "llama"));
  cr_assert_eq(model->load.requests.requests_started_total, 9);
  cr_assert_eq(model->load.requests.requests_generating.value, 2);
  cr_assert_eq(model->load.tokens.output_tokens_total.value, 400);
  cr_assert(!model->load.tokens.active_decode_blocks.present);
  cr_assert(model->ready_frontends == 1 && model->serving_pools_len == 1);
  cr_assert_eq(kvrelay_check_pool_id(&model->serving_pools[0]).class_, KVRELAY_CLASS_OK);
}

/* ---- bytes by hand ---- */

static uint8_t out_bytes[MESSAGE_CAP];
static size_t out_len;

static void put_varint(uint64_t v) {
  for (; v >= 0x80; v >>= 7)
    out_bytes[out_len++] = (uint8_t)(v | 0x80);
  out_bytes[out_len++] = (uint8_t)v;
}

static void put_field(unsigned number, unsigned type, uint64_t v) {
  put_varint(number << 3 | type);
  put_varint(v);
}

static void put_fill(unsigned number, size_t len) {
  put_field(number, 2, len);
  memset(out_bytes + out_len, 'x', len);
  out_len += len;
}

/* Puts everything since `start` into a field. */
static void wrap(size_t start, unsigned number) {
  const size_t len = out_len - start;
  uint8_t *copy = malloc(len + 1);
  cr_assert(copy);
  memcpy(copy, out_bytes + start, len);
  out_len = start;
  put_field(number, 2, len);
  memcpy(out_bytes + out_len, copy, len);
  out_len += len;
  free(copy);
}

static int try_out(int (*decode)(const uint8_t *, size_t, kvrelay_pb_arena *, any_message *)) {
  kvrelay_pb_arena arena = fresh_arena();
  any_message m;
  return decode(out_bytes, out_len, &arena, &m);
}

/* `count` fields of `number`, each a copy of `len` bytes of text, in a fresh message. */
static void many(unsigned number, size_t count, size_t len) {
  out_len = 0;
  for (size_t i = 0; i < count; i++)
    put_fill(number, len);
}

Test(pb, bounds_hold_exactly) {
  static const struct {
    int (*decode)(const uint8_t *, size_t, kvrelay_pb_arena *, any_message *);
    unsigned number;
    size_t most;
    const char *what;
  } lists[] = {{decode_load, 6, KVRELAY_PB_ENTRIES_MAX, "load entries"},
               {decode_descriptor, 3, KVRELAY_PARTS_MAX, "registrations"},
               {decode_topology_entry, 6, KVRELAY_PARTS_MAX, "members"},
               {decode_topology_entry, 9, KVRELAY_PARTS_MAX, "adapters"},
               {decode_registration, 3, KVRELAY_ALIASES_MAX, "aliases"}};
  static uint8_t big[64u << 20];
  for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
    for (size_t more = 0; more < 2; more++) {
      many(lists[i].number, lists[i].most + more, 0);
      kvrelay_pb_arena arena = {big, sizeof big, 0};
      any_message m;
      cr_assert_eq(lists[i].decode(out_bytes, out_len, &arena, &m),
                   more ? KVRELAY_ERR_LIMIT : KVRELAY_OK, "%s", lists[i].what);
    }
  /* pools of a catalog stand one level deeper */
  for (size_t more = 0; more < 2; more++) {
    many(1, KVRELAY_PB_ENTRIES_MAX + more, 0);
    wrap(0, 4);
    kvrelay_pb_arena arena = {big, sizeof big, 0};
    kvrelay_catalog_update catalog;
    cr_assert_eq(kvrelay_pb_decode_catalog(out_bytes, out_len, &arena, &catalog),
                 more ? KVRELAY_ERR_LIMIT : KVRELAY_OK);
    cr_assert(more || catalog.pools_len == KVRELAY_PB_ENTRIES_MAX);
  }
  for (size_t more = 0; more < 2; more++) {
    many(1, 1, KVRELAY_TEXT_MAX + more);
    cr_assert_eq(try_out(decode_endpoint), more ? KVRELAY_ERR_LIMIT : KVRELAY_OK);
    many(3, 1, KVRELAY_TEXT_MAX + more);
    cr_assert_eq(try_out(decode_registration), more ? KVRELAY_ERR_LIMIT : KVRELAY_OK);
    many(5, 0, 0);
    for (size_t i = 0; i < KVRELAY_ROLES_MAX + more; i++)
      put_field(5, 0, 2);
    cr_assert_eq(try_out(decode_descriptor), more ? KVRELAY_ERR_LIMIT : KVRELAY_OK);
    many(5, 1, KVRELAY_ROLES_MAX + more); /* the same, packed */
    cr_assert_eq(try_out(decode_descriptor), more ? KVRELAY_ERR_LIMIT : KVRELAY_OK);
  }
  /* a request's text has no bound here, nor has a digest: their rules are the validators' */
  many(1, 1, 5000);
  cr_assert_eq(try_out(decode_catalog_request), KVRELAY_OK);
  kvrelay_pb_arena arena = fresh_arena();
  kvrelay_pool_id id;
  many(1, 1, 5000);
  wrap(0, 1);
  wrap(0, 2);
  cr_assert_eq(kvrelay_pb_decode_pool_id(out_bytes, out_len, &arena, &id), KVRELAY_OK);
  cr_assert_eq(id.domain.cache_semantics.digest_len, 5000);
}

Test(pb, arena_grows_until_it_fits) {
  many(3, 100, 0);
  for (size_t i = 0; i < 9; i++)
    put_field(5, 0, 2);
  size_t len = 0;
  for (int err = KVRELAY_ERR_NOSPACE; err == KVRELAY_ERR_NOSPACE; len += 8) {
    uint8_t *mem = malloc(len + 1);
    kvrelay_pb_arena arena = {mem, len, 0};
    any_message m;
    memset(&m, 0xA5, sizeof m);
    const any_message before = m;
    err = decode_descriptor(out_bytes, out_len, &arena, &m);
    if (err)
      cr_assert(err == KVRELAY_ERR_NOSPACE && arena.used == 0 && !memcmp(&m, &before, sizeof m));
    else
      cr_assert(m.descriptor.registrations_len == 100 && m.descriptor.pool_roles.len == 9);
    free(mem);
  }
  cr_assert(len > 100 * sizeof(kvrelay_registration) && len < 400 * sizeof(kvrelay_registration));
  kvrelay_descriptor d;
  cr_assert_eq(kvrelay_pb_decode_descriptor(out_bytes, out_len, NULL, &d), KVRELAY_ERR_NOSPACE);
}

Test(pb, arena_memory_may_start_anywhere) {
  static uint8_t mem[8192];
  many(3, 5, 0);
  for (size_t shift = 0; shift < 8; shift++) {
    kvrelay_pb_arena arena = {mem + shift, sizeof mem - 8, 0};
    kvrelay_descriptor d;
    cr_assert_eq(kvrelay_pb_decode_descriptor(out_bytes, out_len, &arena, &d), KVRELAY_OK);
    cr_assert_eq((uintptr_t)d.registrations % 8, 0);
    cr_assert_eq(d.registrations_len, 5);
    const size_t used = arena.used;
    cr_assert_eq(kvrelay_pb_decode_descriptor(out_bytes, out_len, &arena, &d), KVRELAY_OK);
    cr_assert_gt(arena.used, used); /* a second message stands behind the first */
  }
}

Test(pb, numbers_too_large_for_their_field) {
  out_len = 0;
  put_field(1, 0, UINT32_MAX);
  cr_assert_eq(try_out(decode_semantics), KVRELAY_OK);
  out_len = 0;
  put_field(1, 0, (uint64_t)UINT32_MAX + 1);
  cr_assert_eq(try_out(decode_semantics), KVRELAY_ERR_MALFORMED);
  kvrelay_pb_arena arena = fresh_arena();
  kvrelay_semantics s;
  static const int32_t odd[] = {-1, 99, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < 4; i++) {
    out_len = 0;
    put_field(2, 0, (uint64_t)(int64_t)odd[i]);
    cr_assert_eq(kvrelay_pb_decode_semantics(out_bytes, out_len, &arena, &s), KVRELAY_OK);
    cr_assert_eq(s.hash_format, odd[i]);
  }
}

Test(pb, wrong_wire_types_are_malformed) {
  static const struct {
    int (*decode)(const uint8_t *, size_t, kvrelay_pb_arena *, any_message *);
    unsigned number;
  } fields[] = {{decode_endpoint, 1},     {decode_registration, 1}, {decode_registration, 2},
                {decode_registration, 3}, {decode_descriptor, 3},   {decode_descriptor, 1},
                {decode_filter, 8},       {decode_catalog, 4},      {decode_readiness, 4},
                {decode_pool_request, 1}};
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    out_len = 0;
    put_field(fields[i].number, 0, 1);
    cr_assert_eq(try_out(fields[i].decode), KVRELAY_ERR_MALFORMED, "%zu", i);
  }
  out_len = 0; /* a length where a number is due */
  put_fill(1, 1);
  cr_assert_eq(try_out(decode_semantics), KVRELAY_ERR_MALFORMED);
}

Test(pb, X1_one_odd_pool_leaves_the_others_readable) {
  out_len = 0;
  for (int pool = 0; pool < 3; pool++) {
    const size_t start = out_len;
    put_field(1, 0, 64);
    put_field(2, 0, pool == 1 ? UINT64_MAX : 1);
    wrap(start, 4);
    wrap(start, 1);
  }
  wrap(0, 4);
  kvrelay_pb_arena arena = fresh_arena();
  kvrelay_catalog_update m;
  cr_assert_eq(kvrelay_pb_decode_catalog(out_bytes, out_len, &arena, &m), KVRELAY_OK);
  cr_assert_eq(m.pools_len, 3);
  for (int pool = 0; pool < 3; pool++)
    cr_assert_eq(m.pools[pool].query_semantics.hash_format, pool == 1 ? -1 : 1);
}

Test(pb, X2_names_that_differ_behind_a_nul) {
  static const uint8_t a[] = {0x0a, 3, 'p', 0, 'a'}, b[] = {0x0a, 3, 'p', 0, 'b'};
  kvrelay_endpoint x, y;
  cr_assert_eq(kvrelay_pb_decode_endpoint(a, sizeof a, NULL, &x), KVRELAY_OK);
  cr_assert_eq(kvrelay_pb_decode_endpoint(b, sizeof b, NULL, &y), KVRELAY_OK);
  cr_assert_eq(x.namespace_.len, 3);
  cr_assert_not(kvrelay_text_equal(x.namespace_, y.namespace_));
  cr_assert_eq(x.namespace_.ptr, a + 2); /* in place */
}

Test(pb, model_target_is_a_oneof) {
  static const uint8_t base_then_lora[] = {0x12, 9, 0x0a, 3, 0x0a, 1, 'b', /* base b */
                                           0x12, 2, 0x12, 0};
  kvrelay_registration r;
  cr_assert_eq(kvrelay_pb_decode_registration(base_then_lora, sizeof base_then_lora, NULL, &r),
               KVRELAY_OK);
  cr_assert(r.target.present && r.target.kind == KVRELAY_TARGET_LORA);
  cr_assert_eq(r.target.base_model.len, 0, "nothing of the other member is left");
  /* the same member twice is merged, over two occurrences of the target as well */
  static const uint8_t lora_twice[] = {0x12, 5, 0x12, 3, 0x0a, 1, 'b',
                                       0x12, 5, 0x12, 3, 0x12, 1, 'a'};
  cr_assert_eq(kvrelay_pb_decode_registration(lora_twice, sizeof lora_twice, NULL, &r), KVRELAY_OK);
  cr_assert(r.target.base_model.len == 1 && r.target.adapter.len == 1);
  cr_assert(*r.target.base_model.ptr == 'b' && *r.target.adapter.ptr == 'a');
  static const uint8_t empty[] = {0x12, 0}, future[] = {0x12, 3, 0x1a, 1, 'x'};
  cr_assert_eq(kvrelay_pb_decode_registration(empty, sizeof empty, NULL, &r), KVRELAY_OK);
  cr_assert(r.target.present && r.target.kind == KVRELAY_TARGET_NONE);
  cr_assert_eq(kvrelay_pb_decode_registration(future, sizeof future, NULL, &r), KVRELAY_OK);
  cr_assert(r.target.present && r.target.kind == KVRELAY_TARGET_NONE);
  cr_assert_eq(kvrelay_pb_decode_registration(empty, 0, NULL, &r), KVRELAY_OK);
  cr_assert_not(r.target.present);
}

Test(pb, snapshot_in_two_parts_is_merged) {
  many(1, 3, 0);
  wrap(0, 4);
  const size_t start = out_len;
  put_field(1, 2, 0);
  wrap(start, 4);
  kvrelay_pb_arena arena = fresh_arena();
  kvrelay_catalog_update m;
  cr_assert_eq(kvrelay_pb_decode_catalog(out_bytes, out_len, &arena, &m), KVRELAY_OK);
  cr_assert(m.snapshot_present && m.pools_len == 4);
}

/* ---- requests ---- */

Test(pb, X9_request_strings_must_be_utf8) {
  static const uint8_t bad[] = {0x0a, 2, 'a', 0xff}; /* and no marker */
  kvrelay_request r = {.method = 77};
  for (int32_t method = KVRELAY_METHOD_WATCH_CATALOG; method <= KVRELAY_METHOD_SUBSCRIBE_LOAD;
       method++)
    cr_assert_eq(kvrelay_pb_decode_request(method, bad, sizeof bad, &r), KVRELAY_ERR_MALFORMED);
  cr_assert_eq(r.method, 77);
  /* in a response it is the validator's business */
  kvrelay_endpoint e;
  cr_assert_eq(kvrelay_pb_decode_endpoint(bad, sizeof bad, NULL, &e), KVRELAY_OK);
}

Test(pb, methods_without_a_request) {
  kvrelay_request r = {0};
  static const int32_t methods[] = {KVRELAY_METHOD_NONE, KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD + 1,
                                    -1};
  for (size_t i = 0; i < 3; i++) {
    cr_assert_eq(kvrelay_pb_decode_request(methods[i], NULL, 0, &r), KVRELAY_ERR_UNSUPPORTED);
    kvrelay_request m = {.method = methods[i]};
    cr_assert_eq(kvrelay_pb_encode_request(&m, NULL, 0), KVRELAY_ERR_UNSUPPORTED);
  }
}

/* ---- encoding ---- */

Test(pb, what_cannot_be_encoded) {
  int32_t roles[KVRELAY_ROLES_MAX + 1] = {0};
  kvrelay_descriptor d = {.pool_roles = {roles, KVRELAY_ROLES_MAX}};
  cr_assert_eq(kvrelay_pb_encode_descriptor(&d, NULL, 0), 2 + KVRELAY_ROLES_MAX);
  d.pool_roles.len++;
  cr_assert_eq(kvrelay_pb_encode_descriptor(&d, NULL, 0), KVRELAY_ERR_ARG);
  kvrelay_catalog_update m = {.snapshot_present = true, .pools = &d, .pools_len = 1};
  cr_assert_eq(kvrelay_pb_encode_catalog(&m, NULL, 0), KVRELAY_ERR_ARG);
  uint8_t out[512];
  cr_assert_eq(kvrelay_pb_encode_catalog(&m, out, sizeof out), KVRELAY_ERR_ARG);
  kvrelay_pool_id id = {.domain = {true, {true, {0}, 17, 1}, {0}}};
  cr_assert_eq(kvrelay_pb_encode_pool_id(&id, NULL, 0), KVRELAY_ERR_ARG);
}

/* ---- FilterUpdate: the splice against nanopb ---- */

static uint64_t edge(void) {
  switch (rng() % 6) {
  case 0:
    return 0;
  case 1:
    return UINT64_MAX;
  case 2:
    return (UINT64_C(1) << rng() % 64) - 1;
  case 3:
    return UINT64_C(1) << rng() % 64;
  default:
    return rng() >> rng() % 64;
  }
}

static kvrelay_digest edge_digest(void) {
  kvrelay_digest d = {rng() % 8 != 0, {0}, KVRELAY_DIGEST_LEN, (int32_t)edge()};
  for (size_t i = 0; i < KVRELAY_DIGEST_LEN; i++)
    d.digest[i] = (uint8_t)rng();
  if (rng() % 8 == 0)
    d.digest_len = rng() % (KVRELAY_DIGEST_LEN + 1);
  return d;
}

static kvrelay_filter_update edge_update(const uint8_t *payload, size_t payload_cap) {
  kvrelay_filter_update m = {
      .envelope = {(uint32_t)edge(), rng() % 4 != 0, {edge(), edge()}, KVRELAY_CONTRACT_MARKER}};
  m.producer.present = rng() % 8 != 0;
  m.producer.pool_id.present = rng() % 8 != 0;
  m.producer.pool_id.identity_version = (uint32_t)edge();
  m.producer.pool_id.domain.present = rng() % 8 != 0;
  m.producer.pool_id.domain.cache_semantics = edge_digest();
  m.producer.pool_id.domain.routing_scope = edge_digest();
  m.producer.pool_id.dc_id = edge();
  m.producer.producer_incarnation = edge();
  m.producer.layout_generation = edge();
  m.producer.ckf_format = (kvrelay_ckf_format){rng() % 8 != 0, (uint32_t)edge(), edge(),
                                               edge(),         (uint32_t)edge(), (uint32_t)edge()};
  m.base_sequence = edge();
  m.sequence = edge();
  m.send_ts_us = edge();
  m.kind = rng() % 2 ? (int32_t)(rng() % 4) : (int32_t)edge();
  m.payload_len = rng() % 3 ? rng() % payload_cap : edge() % payload_cap;
  m.payload = payload;
  return m;
}

static void compare_splice(const kvrelay_filter_update *m) {
  static uint8_t whole[8192];
  kvrelay_pb_filter_prefix prefix;
  uint8_t head[KVRELAY_PB_FILTER_HEAD_CAP];
  cr_assert_eq(kvrelay_pb_filter_prefix_init(&prefix, m), KVRELAY_OK);
  const size_t head_len = kvrelay_pb_filter_head(&prefix, m, head);
  cr_assert_leq(head_len, sizeof head);
  const ptrdiff_t len = kvrelay_pb_encode_filter(m, whole, sizeof whole);
  cr_assert_eq(len, (ptrdiff_t)(head_len + m->payload_len + KVRELAY_PB_FILTER_TAIL_LEN));
  cr_assert_arr_eq(whole, head, head_len);
  cr_assert(m->payload_len == 0 || memcmp(whole + head_len, m->payload, m->payload_len) == 0);
  cr_assert_arr_eq(whole + head_len + m->payload_len, kvrelay_pb_filter_tail,
                   KVRELAY_PB_FILTER_TAIL_LEN);
}

Test(pb, splice_equals_tables) {
  static uint8_t payload[5000];
  rng_state = 9;
  for (size_t i = 0; i < sizeof payload; i++)
    payload[i] = (uint8_t)rng();
  for (int round = 0; round < 100000; round++) {
    const kvrelay_filter_update m = edge_update(payload, sizeof payload);
    compare_splice(&m);
  }
}

/* Whatever the bytes and whatever came before: as without the stream. */
static void compare_read(kvrelay_pb_filter_stream *stream, const uint8_t *bytes, size_t len) {
  uint8_t *const copy = len ? malloc(len) : NULL; /* nothing behind its end is looked at */
  kvrelay_filter_update want, got;
  memset(&want, 0xA5, sizeof want);
  memcpy(&got, &want, sizeof got);
  if (len)
    memcpy(copy, bytes, len);
  const int err = kvrelay_pb_decode_filter(copy, len, NULL, &want);
  cr_assert_eq(kvrelay_pb_filter_read(stream, copy, len, &got), err);
  cr_assert_eq(memcmp(&want, &got, sizeof got), 0);
  free(copy);
}

Test(pb, reading_a_stream_equals_reading_messages) {
  static uint8_t payload[300], whole[1024];
  rng_state = 11;
  int known = 0;
  for (int round = 0; round < 3000; round++) {
    kvrelay_pb_filter_stream stream;
    memset(&stream, 0, sizeof stream);
    kvrelay_filter_update m = edge_update(payload, sizeof payload);
    for (int next = 0; next < 30; next++) {
      const ptrdiff_t got = kvrelay_pb_encode_filter(&m, whole, sizeof whole);
      cr_assert_gt(got, 0);
      size_t len = (size_t)got;
      if (next % 2) { /* broken somewhere: a byte, the end, a byte more or less */
        const size_t at = rng() % len;
        if (rng() % 4)
          whole[at] ^= (uint8_t)(1u << rng() % 8);
        if (rng() % 4 == 0)
          len -= rng() % len;
        else if (rng() % 4 == 0)
          memmove(whole + at, whole + at + 1, --len - at);
      }
      compare_read(&stream, whole, len);
      const kvrelay_filter_update other = edge_update(payload, sizeof payload);
      if (rng() % 8 == 0)
        m.producer = other.producer;
      m.base_sequence = other.base_sequence;
      m.sequence = other.sequence;
      m.send_ts_us = other.send_ts_us;
      m.kind = other.kind;
      m.payload_len = other.payload_len;
    }
    known += stream.prefix_.len != 0;
  }
  cr_assert_gt(known, 2500);
}

Test(pb, a_stream_of_another_order_is_read_too) {
  /* the payload first, then what the splice writes before it */
  const kvrelay_filter_update identity = {.envelope = {1, true, {2, 3}, 0},
                                          .producer = {.present = true, .layout_generation = 4}};
  static uint8_t whole[256];
  size_t len = 0;
  memcpy(whole, "\x42\x01x", 3); /* payload */
  len = 3;
  const ptrdiff_t got = kvrelay_pb_encode_filter(&identity, whole + len, sizeof whole - len);
  cr_assert_gt(got, 0);
  len += (size_t)got;
  memcpy(whole + len, kvrelay_pb_filter_tail, KVRELAY_PB_FILTER_TAIL_LEN);
  len += KVRELAY_PB_FILTER_TAIL_LEN;
  kvrelay_pb_filter_stream stream;
  memset(&stream, 0, sizeof stream);
  for (int i = 0; i < 2; i++) {
    kvrelay_filter_update m;
    compare_read(&stream, whole, len);
    cr_assert_eq(kvrelay_pb_filter_read(&stream, whole, len, &m), KVRELAY_OK);
    cr_assert(m.producer.layout_generation == 4 && m.payload_len == 1 && m.payload[0] == 'x');
    cr_assert_eq(stream.prefix_.len, 0);
  }
}

Test(pb, splice_at_its_longest) {
  const kvrelay_digest d = {true, {1}, KVRELAY_DIGEST_LEN, -1};
  kvrelay_filter_update m = {
      .envelope = {UINT32_MAX, true, {UINT64_MAX, UINT64_MAX}, KVRELAY_CONTRACT_MARKER},
      .producer = {true,
                   {true, UINT32_MAX, {true, d, d}, UINT64_MAX},
                   UINT64_MAX,
                   UINT64_MAX,
                   {true, UINT32_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX}},
      .base_sequence = UINT64_MAX,
      .sequence = UINT64_MAX,
      .send_ts_us = UINT64_MAX,
      .kind = -1};
  compare_splice(&m);
  kvrelay_pb_filter_prefix prefix;
  cr_assert_eq(kvrelay_pb_filter_prefix_init(&prefix, &m), KVRELAY_OK);
  /* the head is the prefix and five fields; with the longest payload length it still fits */
  uint8_t head[KVRELAY_PB_FILTER_HEAD_CAP];
  m.payload_len = SIZE_MAX;
  cr_assert_leq(kvrelay_pb_filter_head(&prefix, &m, head), sizeof head);
  m.envelope.contract_marker ^= 1;
  cr_assert_eq(kvrelay_pb_filter_prefix_init(&prefix, &m), KVRELAY_ERR_ARG);
}

Test(pb, payload_is_read_in_place) {
  static uint8_t payload[3000], whole[4096];
  kvrelay_filter_update m = {.payload = payload, .payload_len = sizeof payload}, back;
  const ptrdiff_t len = kvrelay_pb_encode_filter(&m, whole, sizeof whole);
  cr_assert_gt(len, 3000);
  cr_assert_eq(kvrelay_pb_decode_filter(whole, (size_t)len, NULL, &back), KVRELAY_OK);
  cr_assert(back.payload >= whole && back.payload + back.payload_len <= whole + len);
  cr_assert_eq(back.payload_len, sizeof payload);
}
