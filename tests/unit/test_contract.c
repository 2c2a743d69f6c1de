/* SPDX-License-Identifier: Apache-2.0 */
/* Names, texts, identity digests, validation and keys of the contract.  Ids are the contract's. */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvrelay.h"
#include "proto/kvrelay_pb.h"

static kvrelay_text text_of(const char *s) { return (kvrelay_text){(const uint8_t *)s, strlen(s)}; }

/* ---- names ---- */

Test(contract, T9_T11_reasons) {
  static const struct {
    const char *name;
    int32_t status;
  } reasons[] = {{"CONTRACT_MISMATCH", 9},
                 {"INVALID_REQUEST", 3},
                 {"UNSUPPORTED_FEATURE", 9},
                 {"POOL_NOT_FOUND", 5},
                 {"PRODUCER_CHANGED", 9},
                 {"RESOURCE_LIMIT", 8},
                 {"SUBSCRIBER_LAGGED", 8},
                 {"SNAPSHOT_PROGRESS_TIMEOUT", 8},
                 {"PUBLICATION_UNAVAILABLE", 14},
                 {"INVALID_PUBLICATION", 9},
                 {"INTERNAL", 13}};
  for (int32_t i = 1; i <= 11; i++) {
    char full[80];
    int len = snprintf(full, sizeof full, "RELAY_ERROR_REASON_%s", reasons[i - 1].name);
    cr_assert_str_eq(kvrelay_reason_name(i), full);
    cr_assert_eq(kvrelay_reason_from_name((const uint8_t *)full, (size_t)len), i);
    cr_assert_eq(kvrelay_reason_from_name((const uint8_t *)full, (size_t)len - 1), 0);
    cr_assert_eq(kvrelay_reason_from_name((const uint8_t *)full, (size_t)len + 1), 0,
                 "the terminator is no part of the name");
    cr_assert_eq(kvrelay_reason_status(i), reasons[i - 1].status);
  }
  cr_assert_null(kvrelay_reason_name(0));
  cr_assert_null(kvrelay_reason_name(12));
  cr_assert_null(kvrelay_reason_name(-1));
  cr_assert_eq(kvrelay_reason_from_name((const uint8_t *)"RELAY_ERROR_REASON_UNSPECIFIED", 30), 0);
  cr_assert_eq(kvrelay_reason_from_name((const uint8_t *)"relay_error_reason_internal", 27), 0);
  cr_assert_eq(kvrelay_reason_from_name(NULL, 0), 0);
  cr_assert_eq(kvrelay_reason_status(0), 13);
  cr_assert_eq(kvrelay_reason_status(12), 13);
}

Test(contract, names_of_methods_states_and_roles) {
  for (int32_t method = -1; method < 9; method++) {
    const char *path = kvrelay_method_path(method);
    cr_assert_eq(path != NULL, method >= 1 && method <= 6);
    if (path == NULL)
      continue;
    cr_assert_eq(strncmp(path, "/dynamo.kvrelay.v1.KvEventRelay/", 32), 0);
    cr_assert_eq(kvrelay_method_from_path((const uint8_t *)path, strlen(path)), method);
    cr_assert_eq(kvrelay_method_from_path((const uint8_t *)path, strlen(path) - 1), 0);
  }
  cr_assert_str_eq(kvrelay_method_path(KVRELAY_METHOD_SUBSCRIBE_POOL),
                   "/dynamo.kvrelay.v1.KvEventRelay/SubscribeKvPool");
  cr_assert_str_eq(kvrelay_method_path(KVRELAY_METHOD_SUBSCRIBE_LOAD),
                   "/dynamo.kvrelay.v1.KvEventRelay/SubscribeKvPoolLoad");
  cr_assert_eq(kvrelay_method_from_path((const uint8_t *)"/grpc.health.v1.Health/Check", 28), 0);
  cr_assert_str_eq(kvrelay_grpc_status_name(KVRELAY_GRPC_OK), "OK");
  cr_assert_str_eq(kvrelay_grpc_status_name(KVRELAY_GRPC_UNAUTHENTICATED), "UNAUTHENTICATED");
  cr_assert_str_eq(kvrelay_grpc_status_name(KVRELAY_GRPC_RESOURCE_EXHAUSTED), "RESOURCE_EXHAUSTED");
  cr_assert_str_eq(kvrelay_grpc_status_name(17), "UNKNOWN");
  cr_assert_str_eq(kvrelay_grpc_status_name(-1), "UNKNOWN");
  cr_assert_str_eq(kvrelay_condition_name(KVRELAY_COND_OK), "");
  cr_assert_str_eq(kvrelay_condition_name(KVRELAY_COND_MISSING_FIELD), "MissingField");
  cr_assert_str_eq(kvrelay_condition_name(KVRELAY_COND_QUERY_HASH_FORMAT), "QueryHashFormat");
  cr_assert_str_eq(kvrelay_condition_name(KVRELAY_COND_DUPLICATE_ADAPTER), "DuplicateAdapter");
  cr_assert_str_eq(kvrelay_condition_name(KVRELAY_COND_LIST_TOO_LONG), "ListTooLong");
  cr_assert_str_eq(kvrelay_condition_name(KVRELAY_COND_LIST_TOO_LONG + 1), "");
  cr_assert_str_eq(kvrelay_role_name(KVRELAY_ROLE_PREFILL), "PREFILL");
  cr_assert_str_eq(kvrelay_role_name(KVRELAY_ROLE_LEGACY), "LEGACY");
  cr_assert_null(kvrelay_role_name(0));
  cr_assert_null(kvrelay_role_name(6));
  static const int errors[] = {0,    -101, -102, -103, -104, -105, -106,
                               -107, -108, -109, -110, -111, -151};
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    for (size_t j = 0; j < i; j++)
      cr_assert_str_neq(kvrelay_strerror(errors[i]), kvrelay_strerror(errors[j]));
  cr_assert_str_eq(kvrelay_strerror(-9999), kvrelay_strerror(1));
}

/* ---- texts ---- */

static size_t put_utf8(uint32_t c, uint8_t *out) {
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
  for (size_t i = n; i-- > 1; c >>= 6)
    out[i] = (uint8_t)(0x80 | (c & 63));
  out[0] = (uint8_t)(lead[n] | c);
  return n;
}

static bool is_surrogate(uint32_t c) { return c >= 0xD800 && c < 0xE000; }

/* Valid is what can be put together from encoded characters, and nothing else: all inputs of up to
 * three bytes. */
Test(contract, utf8_of_up_to_three_bytes, .timeout = 60) {
  bool *two = calloc(65536, 1), *three = calloc(1 << 24, 1);
  uint8_t b[4];
  for (uint32_t c = 0x80; c < 0x10000; c++) {
    if (is_surrogate(c))
      continue;
    if (put_utf8(c, b) == 2)
      two[b[0] << 8 | b[1]] = true;
    else
      three[b[0] << 16 | b[1] << 8 | b[2]] = true;
  }
  for (uint32_t i = 0; i < 1 << 24; i++) {
    b[0] = (uint8_t)(i >> 16);
    b[1] = (uint8_t)(i >> 8);
    b[2] = (uint8_t)i;
    bool tail = two[i & 0xFFFF] || (b[1] < 0x80 && b[2] < 0x80);
    bool want = three[i] || (b[0] < 0x80 && tail) || (two[i >> 8] && b[2] < 0x80);
    if (kvrelay_utf8_valid(b, 3) != want)
      cr_assert_fail("%06x", i);
    if ((i >> 16) == 0 && kvrelay_utf8_valid(b + 1, 2) != tail)
      cr_assert_fail("%04x", i);
    if (i < 256 && kvrelay_utf8_valid(b + 2, 1) != (i < 0x80))
      cr_assert_fail("%02x", i);
  }
  cr_assert(kvrelay_utf8_valid(NULL, 0));
  free(two);
  free(three);
}

Test(contract, utf8_of_four_bytes, .timeout = 60) {
  uint8_t b[4];
  uint32_t valid = 0;
  for (uint32_t c = 0x10000; c <= 0x10FFFF; c++) {
    cr_assert_eq(put_utf8(c, b), 4);
    if (!kvrelay_utf8_valid(b, 4) || kvrelay_utf8_valid(b, 3))
      cr_assert_fail("U+%x", c);
  }
  for (unsigned b0 = 0xF0; b0 < 0x100; b0++)
    for (unsigned b1 = 0x7F; b1 < 0xC2; b1++)
      for (unsigned b2 = 0x7F; b2 < 0xC2; b2++)
        for (unsigned b3 = 0x7F; b3 < 0xC2; b3++) {
          const uint8_t x[4] = {(uint8_t)b0, (uint8_t)b1, (uint8_t)b2, (uint8_t)b3};
          valid += kvrelay_utf8_valid(x, 4);
        }
  cr_assert_eq(valid, 0x100000, "more than the encoded characters pass");
}

Test(contract, text_rule_over_all_characters) {
  static const uint32_t white[] = {0x09,   0x0A,   0x0B,   0x0C,   0x0D,   0x20,   0x85,
                                   0xA0,   0x1680, 0x2000, 0x2001, 0x2002, 0x2003, 0x2004,
                                   0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200A, 0x2028,
                                   0x2029, 0x202F, 0x205F, 0x3000};
  for (uint32_t c = 0; c <= 0x10FFFF; c++) {
    uint8_t text[8] = {'a'};
    size_t n = put_utf8(c, text + 1);
    text[1 + n] = 'b';
    bool is_white = false;
    for (size_t i = 0; i < sizeof white / sizeof white[0]; i++)
      is_white = is_white || white[i] == c;
    bool good = !is_white && !is_surrogate(c);
    if (kvrelay_text_valid((kvrelay_text){text + 1, n}) != good ||
        kvrelay_text_valid((kvrelay_text){text + 1, n + 1}) != good ||
        kvrelay_text_valid((kvrelay_text){text, n + 1}) != good ||
        kvrelay_text_valid((kvrelay_text){text, n + 2}) == is_surrogate(c))
      cr_assert_fail("U+%04X", c);
    bool control = c < 0x20 || (c >= 0x7F && c < 0xA0);
    if (kvrelay_subscriber_id_valid((kvrelay_text){text, n + 2}) != (!control && !is_surrogate(c)))
      cr_assert_fail("U+%04X in a subscriber id", c);
  }
  cr_assert(!kvrelay_text_valid((kvrelay_text){NULL, 0}));
}

/* ---- digests ---- */

static const char *hex(const uint8_t *bytes, size_t len) {
  static char out[65];
  for (size_t i = 0; i < len; i++)
    snprintf(out + 2 * i, 3, "%02x", bytes[i]);
  return out;
}

static const char *cache(const char *source, const kvrelay_map_entry *map, size_t n, uint32_t block,
                         int32_t format) {
  kvrelay_digest d;
  cr_assert_eq(kvrelay_cache_digest(text_of(source), map, n, block, format, &d), KVRELAY_OK);
  cr_assert(d.present && d.digest_len == 16 &&
            d.source == (n == 0 ? KVRELAY_SOURCE_DEFAULT_DERIVED : KVRELAY_SOURCE_EXPLICIT));
  return hex(d.digest, 16);
}

static const char *scope(const char *a, const char *b, const char *c, const kvrelay_map_entry *map,
                         size_t n) {
  kvrelay_digest d;
  kvrelay_endpoint e = {true, text_of(a), text_of(b), text_of(c)};
  cr_assert_eq(kvrelay_scope_digest(&e, map, n, &d), KVRELAY_OK);
  cr_assert_eq(d.source, n == 0 ? KVRELAY_SOURCE_DEFAULT_DERIVED : KVRELAY_SOURCE_EXPLICIT);
  return hex(d.digest, 16);
}

static kvrelay_map_entry pair(const char *key, const char *value) {
  return (kvrelay_map_entry){text_of(key), text_of(value)};
}

Test(contract, I1_digests) {
  const kvrelay_map_entry revision[] = {pair("revision", "r1")}, tier[] = {pair("tier", "gold")};
  const kvrelay_map_entry ab_c[] = {pair("ab", "c")}, a_bc[] = {pair("a", "bc")};
  const kvrelay_map_entry four[] = {pair("z", "1"), pair("\xC3\xA9", "2"), pair("a", "3"),
                                    pair("Z", "4")};
  const kvrelay_map_entry turned[] = {four[3], four[1], four[0], four[2]};
  cr_assert_str_eq(cache("meta/llama", NULL, 0, 512, 1), "7d31eb9019357572470605f4a8be687e");
  cr_assert_str_eq(cache("meta/llama", NULL, 0, 512, 2), "deae03cf69f6e4a47cbec26ceba95354");
  cr_assert_str_eq(cache("meta/llama", NULL, 0, 64, 1), "e7b20757355a7f4395af8e9d432d2e1c");
  cr_assert_str_eq(cache("x", NULL, 0, 1, 1), "2f926501a31f7f0da58af09a2e3240a4");
  cr_assert_str_eq(cache("", revision, 1, 64, 1), "8bcdd42c55fbe2438181e698f65dfa12");
  cr_assert_str_eq(cache("ignored", revision, 1, 128, 1), "a3862ccb140692e1fac654e21eb7821c");
  cr_assert_str_eq(cache("", four, 4, 64, 2), "82472d2c8c88430db2e848f6145ea230");
  cr_assert_str_eq(cache("", turned, 4, 64, 2), "82472d2c8c88430db2e848f6145ea230");
  cr_assert_str_eq(cache("", ab_c, 1, 64, 1), "9b7dac83996e333abe2459f0bc34cae2");
  cr_assert_str_eq(cache("", a_bc, 1, 64, 1), "cf133f7661728a8ceb1cd836f63197c7");
  cr_assert_str_eq(scope("prod", "router", "generate", NULL, 0),
                   "18270d3ba03effaec8d167ba02c7752d");
  cr_assert_str_eq(scope("prod", "backend", "generate", NULL, 0),
                   "c8f1fa2be6aeee2120fe20f02ca940e6");
  cr_assert_str_eq(scope("prod", "a.b", "c", NULL, 0), "82e640e2f7f6e02697f027380b271838");
  cr_assert_str_eq(scope("prod", "a", "b.c", NULL, 0), "b55c2e0e873dfb12c749d5d00451c85f");
  cr_assert_str_eq(scope("prod", "router", "generate", tier, 1),
                   "8e977d8072627689fd2f6f6e679e5487");
  cr_assert_str_eq(scope("any", "other", "place", tier, 1), "8e977d8072627689fd2f6f6e679e5487");
}

Test(contract, I1_largest_map_and_what_is_beyond) {
  static uint8_t keys[33][129], values[33][1025];
  kvrelay_map_entry map[33], order[33];
  kvrelay_digest d = {0}, untouched;
  for (int i = 0; i < 33; i++) {
    memset(keys[i], 'x', sizeof keys[i]);
    memset(values[i], 'y', sizeof values[i]);
    keys[i][0] = 'k';
    values[i][0] = 'v';
    keys[i][1] = values[i][1] = (uint8_t)('0' + i / 10);
    keys[i][2] = values[i][2] = (uint8_t)('0' + i % 10);
    map[i] = (kvrelay_map_entry){{keys[i], 128}, {values[i], 1024}};
  }
  for (int i = 0; i < 32; i++)
    order[i] = map[(i * 13 + 5) % 32];
  cr_assert_str_eq(cache("", order, 32, 64, 1), "80246b58645e36fd3add32a91ea9b799");
  memset(&d, 0x5A, sizeof d);
  untouched = d;
#define REFUSED(N)                                                                                 \
  do {                                                                                             \
    cr_assert_eq(kvrelay_cache_digest(text_of("m"), order, (N), 64, 1, &d), KVRELAY_ERR_ARG);      \
    cr_assert_eq(                                                                                  \
        kvrelay_scope_digest(&(kvrelay_endpoint){true, text_of("a"), text_of("b"), text_of("c")},  \
                             order, (N), &d),                                                      \
        KVRELAY_ERR_ARG);                                                                          \
    cr_assert_eq(memcmp(&d, &untouched, sizeof d), 0);                                             \
    memcpy(order, map, sizeof order);                                                              \
  } while (0)
  REFUSED(33);
  order[3].key.len = 0;
  REFUSED(32);
  order[3].key.len = 129;
  REFUSED(32);
  order[3].value.len = 0;
  REFUSED(32);
  order[3].value.len = 1025;
  REFUSED(32);
  order[3].key = order[30].key;
  REFUSED(32);
  order[31].key = text_of("\xFF");
  REFUSED(32);
#undef REFUSED
  cr_assert_eq(kvrelay_cache_digest(text_of(""), NULL, 0, 64, 1, &d), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_cache_digest(text_of("m"), NULL, 0, 64, 0, &d), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_cache_digest(text_of("m"), NULL, 0, 64, 3, &d), KVRELAY_ERR_ARG);
}

Test(contract, data_centre_ids) {
  uint64_t id = 7;
  cr_assert_eq(kvrelay_dc_id(text_of("dc-a"), &id), KVRELAY_OK);
  cr_assert_eq(id, 0x04f110c98b1bfc48);
  cr_assert_eq(kvrelay_dc_id(text_of("dc-b"), &id), KVRELAY_OK);
  cr_assert_eq(id, 0xa80b8cea06f82376);
  cr_assert_eq(kvrelay_dc_id(text_of("\xE6\x9D\xB1\xE4\xBA\xAC"), &id), KVRELAY_OK);
  cr_assert_eq(id, 0x59e5726993555d50);
  cr_assert_eq(kvrelay_dc_id(text_of(""), &id), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_dc_id(text_of(" dc-a"), &id), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_dc_id(text_of("dc-a\n"), &id), KVRELAY_ERR_ARG);
  cr_assert_eq(id, 0x59e5726993555d50);
}

/* ---- validation ---- */

typedef struct everything {
  kvrelay_descriptor d;
  kvrelay_registration registrations[2];
  kvrelay_text aliases[3];
  int32_t roles[3];
  kvrelay_topology_entry entry;
  kvrelay_topology_member members[2];
  kvrelay_adapter_readiness adapters[2];
  int32_t member_roles[2], present[2], missing[2], duplicates[2], adapter_missing[2];
} everything;

static void fill(everything *x) {
  memset(x, 0, sizeof *x);
  kvrelay_producer *p = &x->d.producer;
  p->present = p->pool_id.present = p->pool_id.domain.present = true;
  p->pool_id.identity_version = 1;
  p->pool_id.domain.cache_semantics = (kvrelay_digest){true, {1}, 16, KVRELAY_SOURCE_EXPLICIT};
  p->pool_id.domain.routing_scope = (kvrelay_digest){true, {2}, 16, KVRELAY_SOURCE_DEFAULT_DERIVED};
  p->layout_generation = 1;
  p->ckf_format = (kvrelay_ckf_format){true, 1, 0, 64, 16, 4};
  x->d.serving_endpoint =
      (kvrelay_endpoint){true, text_of("prod"), text_of("backend"), text_of("generate")};
  x->aliases[0] = text_of("chat");
  x->aliases[1] = text_of("talk");
  x->aliases[2] = text_of("llama");
  x->registrations[0] = (kvrelay_registration){
      text_of("llama"), {true, KVRELAY_TARGET_BASE, text_of("llama"), {NULL, 0}}, x->aliases, 3};
  x->registrations[1] =
      (kvrelay_registration){text_of("llama-lora"),
                             {true, KVRELAY_TARGET_LORA, text_of("llama"), text_of("adapter")},
                             x->aliases,
                             2};
  x->d.registrations = x->registrations;
  x->d.registrations_len = 2;
  x->d.query_semantics = (kvrelay_semantics){true, 64, 1};
  x->roles[0] = 1;
  x->roles[1] = 2;
  x->roles[2] = 5;
  x->d.pool_roles = (kvrelay_roles){x->roles, 3};
  x->member_roles[0] = x->member_roles[1] = 1;
  x->member_roles[1] = 2;
  for (int i = 0; i < 2; i++) {
    x->members[i].endpoint = x->d.serving_endpoint;
    x->members[i].roles = (kvrelay_roles){x->member_roles, 2};
    x->present[i] = x->missing[i] = x->duplicates[i] = x->adapter_missing[i] = i + 1;
    x->adapters[i] = (kvrelay_adapter_readiness){
        text_of(i == 0 ? "a" : "b"), KVRELAY_READY_READY, {x->adapter_missing, 2}};
  }
  x->members[1].endpoint.component = text_of("backend.generate");
  x->members[1].pool_id = p->pool_id;
  x->entry = (kvrelay_topology_entry){text_of("prod"),
                                      text_of("llama"),
                                      KVRELAY_READY_UNKNOWN,
                                      {x->present, 2},
                                      {x->missing, 2},
                                      x->members,
                                      2,
                                      {x->duplicates, 2},
                                      false,
                                      x->adapters,
                                      2};
}

/* A list of breaks in the order of the contract: each alone gives its verdict, and so it does with
 * all later ones. */
typedef struct breakage {
  void (*apply)(everything *x);
  uint8_t class_, condition;
  const char *field;
} breakage;

typedef kvrelay_verdict (*check)(const everything *x);

static void expect(const everything *x, check run, const breakage *b, size_t i) {
  kvrelay_verdict v = run(x);
  cr_assert(v.class_ == b->class_ && v.condition == b->condition,
            "break %zu: class %d, %s at \"%s\"", i, v.class_, kvrelay_condition_name(v.condition),
            v.field);
  cr_assert_str_eq(v.field, b->field);
}

static void in_order(check run, const breakage *list, size_t n) {
  everything *x = malloc(sizeof *x);
  fill(x);
  kvrelay_verdict v = run(x);
  cr_assert_eq(v.class_, KVRELAY_CLASS_OK, "%s at %s", kvrelay_condition_name(v.condition),
               v.field);
  cr_assert_str_eq(v.field, "");
  for (size_t i = n; i-- > 0;) {
    list[i].apply(x); /* together with all later ones */
    expect(x, run, &list[i], i);
  }
  for (size_t i = 0; i < n; i++) {
    fill(x);
    list[i].apply(x);
    expect(x, run, &list[i], i);
  }
  free(x);
}

#define BREAK(NAME, STATEMENT)                                                                     \
  static void NAME(everything *x) { STATEMENT; }
#define INVALID KVRELAY_CLASS_INVALID
#define UNSUPPORTED KVRELAY_CLASS_UNSUPPORTED
#define IN_ORDER(RUN, LIST) in_order((RUN), (LIST), sizeof(LIST) / sizeof(LIST)[0])

BREAK(no_pool_id, x->d.producer.pool_id.present = false)
BREAK(version_2, x->d.producer.pool_id.identity_version = 2)
BREAK(version_0, x->d.producer.pool_id.identity_version = 0)
BREAK(no_domain, x->d.producer.pool_id.domain.present = false)
BREAK(no_cache, x->d.producer.pool_id.domain.cache_semantics.present = false)
BREAK(cache_15, x->d.producer.pool_id.domain.cache_semantics.digest_len = 15)
BREAK(cache_source_3, x->d.producer.pool_id.domain.cache_semantics.source = 3)
BREAK(cache_source_0, x->d.producer.pool_id.domain.cache_semantics.source = 0)
BREAK(no_scope, x->d.producer.pool_id.domain.routing_scope.present = false)
BREAK(scope_17, x->d.producer.pool_id.domain.routing_scope.digest_len = 17)
BREAK(scope_source_minus, x->d.producer.pool_id.domain.routing_scope.source = -1)
BREAK(generation_0, x->d.producer.layout_generation = 0)
BREAK(no_format, x->d.producer.ckf_format.present = false)
BREAK(format_0, x->d.producer.ckf_format.format_version = 0)
BREAK(buckets_0, x->d.producer.ckf_format.bucket_count = 0)
BREAK(bits_0, x->d.producer.ckf_format.fingerprint_bits = 0)
BREAK(slots_0, x->d.producer.ckf_format.slots_per_bucket = 0)
BREAK(format_2, x->d.producer.ckf_format.format_version = 2)
BREAK(bits_17, x->d.producer.ckf_format.fingerprint_bits = 17)
BREAK(slots_5, x->d.producer.ckf_format.slots_per_bucket = 5)
BREAK(buckets_over, x->d.producer.ckf_format.bucket_count = (1 << 24) + 1)
BREAK(buckets_3, x->d.producer.ckf_format.bucket_count = 3)

static kvrelay_verdict check_producer(const everything *x) {
  return kvrelay_check_producer(&x->d.producer);
}
static kvrelay_verdict check_format(const everything *x) {
  return kvrelay_check_ckf_format(&x->d.producer.ckf_format);
}

Test(contract, W1_W3_order_of_a_producer) {
  static const breakage list[] = {
      {no_pool_id, INVALID, KVRELAY_COND_MISSING_FIELD, "pool_id"},
      {version_2, UNSUPPORTED, KVRELAY_COND_POOL_IDENTITY_VERSION, "pool_id"},
      {no_domain, INVALID, KVRELAY_COND_MISSING_FIELD, "pool_id.indexer_domain"},
      {no_cache, INVALID, KVRELAY_COND_MISSING_FIELD, "cache_semantics"},
      {cache_15, INVALID, KVRELAY_COND_DIGEST_LENGTH, "cache_semantics"},
      {cache_source_3, UNSUPPORTED, KVRELAY_COND_IDENTITY_SOURCE, "cache_semantics"},
      {no_scope, INVALID, KVRELAY_COND_MISSING_FIELD, "routing_scope"},
      {scope_17, INVALID, KVRELAY_COND_DIGEST_LENGTH, "routing_scope"},
      {scope_source_minus, UNSUPPORTED, KVRELAY_COND_IDENTITY_SOURCE, "routing_scope"},
      {generation_0, INVALID, KVRELAY_COND_ZERO_LAYOUT_GENERATION, "layout_generation"},
      {no_format, INVALID, KVRELAY_COND_MISSING_FIELD, "ckf_format"},
      {slots_0, INVALID, KVRELAY_COND_ZERO_FORMAT_FIELD, "slots_per_bucket"}};
  IN_ORDER(check_producer, list);
  static const breakage zero[] = {
      {version_0, INVALID, KVRELAY_COND_POOL_IDENTITY_VERSION, "pool_id"},
      {cache_source_0, INVALID, KVRELAY_COND_IDENTITY_SOURCE, "cache_semantics"}};
  IN_ORDER(check_producer, zero);
}

Test(contract, W3_order_of_a_filter_format) {
  static const breakage zero[] = {
      {format_0, INVALID, KVRELAY_COND_ZERO_FORMAT_FIELD, "format_version"},
      {buckets_0, INVALID, KVRELAY_COND_ZERO_FORMAT_FIELD, "bucket_count"},
      {bits_0, INVALID, KVRELAY_COND_ZERO_FORMAT_FIELD, "fingerprint_bits"},
      {slots_0, INVALID, KVRELAY_COND_ZERO_FORMAT_FIELD, "slots_per_bucket"},
      {format_2, UNSUPPORTED, KVRELAY_COND_UNSUPPORTED_CKF_FORMAT, "format_version"}};
  static const breakage unknown[] = {
      {slots_0, INVALID, KVRELAY_COND_ZERO_FORMAT_FIELD, "slots_per_bucket"},
      {bits_17, UNSUPPORTED, KVRELAY_COND_UNSUPPORTED_CKF_FORMAT, "fingerprint_bits"},
      {buckets_over, UNSUPPORTED, KVRELAY_COND_BUCKET_COUNT_TOO_LARGE, "bucket_count"}};
  static const breakage shape[] = {
      {slots_5, UNSUPPORTED, KVRELAY_COND_UNSUPPORTED_CKF_FORMAT, "slots_per_bucket"},
      {buckets_3, INVALID, KVRELAY_COND_UNSUPPORTED_BUCKET_COUNT, "bucket_count"}};
  /* format_version 0 and 2 are one field: the later break would be undone by the earlier one, which
   * is what a list needs */
  IN_ORDER(check_format, zero);
  IN_ORDER(check_format, unknown);
  IN_ORDER(check_format, shape);
  kvrelay_ckf_format f = {true, 1, 0, 1, 16, 4};
  for (unsigned shift = 0; shift < 64; shift++) {
    f.bucket_count = UINT64_C(1) << shift;
    kvrelay_verdict v = kvrelay_check_ckf_format(&f);
    cr_assert_eq(v.class_, shift == 0 ? INVALID : shift <= 24 ? KVRELAY_CLASS_OK : UNSUPPORTED);
  }
}

BREAK(namespace_empty, x->d.serving_endpoint.namespace_.len = 0)
BREAK(component_white, x->d.serving_endpoint.component = text_of("backend "))
BREAK(endpoint_bad, x->d.serving_endpoint.endpoint = text_of("\xC0\x80"))
BREAK(no_producer, x->d.producer.present = false)
BREAK(no_endpoint, x->d.serving_endpoint.present = false)
BREAK(no_semantics, x->d.query_semantics.present = false)
BREAK(block_0, x->d.query_semantics.kv_block_size = 0)
BREAK(hash_0, x->d.query_semantics.hash_format = 0)
BREAK(hash_minus, x->d.query_semantics.hash_format = -1)
BREAK(id_white, x->registrations[0].canonical_model_id = text_of(" llama"))
BREAK(second_id_empty, x->registrations[1].canonical_model_id.len = 0)
BREAK(no_target, x->registrations[0].target.present = false)
BREAK(target_none, x->registrations[0].target.kind = 0)
BREAK(base_empty, x->registrations[0].target.base_model.len = 0)
BREAK(lora_base_empty, x->registrations[1].target.base_model.len = 0)
BREAK(adapter_empty, x->registrations[1].target.adapter.len = 0)
BREAK(alias_repeated, x->aliases[1] = text_of("chat"))
BREAK(third_alias_empty, x->aliases[2].len = 0)
BREAK(no_roles, x->d.pool_roles.len = 0)
BREAK(role_0, x->roles[0] = 0)
BREAK(role_99, x->roles[1] = 99)
BREAK(role_minus, x->roles[0] = -1)
BREAK(role_repeated, x->roles[2] = 1)

static kvrelay_verdict check_descriptor(const everything *x) {
  return kvrelay_check_descriptor(&x->d);
}
static kvrelay_verdict check_endpoint(const everything *x) {
  return kvrelay_check_endpoint(&x->d.serving_endpoint);
}
static kvrelay_verdict check_semantics(const everything *x) {
  return kvrelay_check_semantics(&x->d.query_semantics);
}
static kvrelay_verdict check_registration(const everything *x) {
  return kvrelay_check_registration(&x->registrations[0]);
}
static kvrelay_verdict check_lora(const everything *x) {
  return kvrelay_check_registration(&x->registrations[1]);
}

Test(contract, W4_W5_W6_W7_order_of_a_descriptor) {
  static const breakage endpoint[] = {
      {namespace_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "namespace"},
      {component_white, INVALID, KVRELAY_COND_INVALID_TEXT, "component"},
      {endpoint_bad, INVALID, KVRELAY_COND_INVALID_TEXT, "endpoint"}};
  static const breakage semantics[] = {
      {block_0, INVALID, KVRELAY_COND_ZERO_QUERY_BLOCK_SIZE, "kv_block_size"},
      {hash_0, INVALID, KVRELAY_COND_QUERY_HASH_FORMAT, "hash_format"}};
  static const breakage format[] = {
      {hash_minus, UNSUPPORTED, KVRELAY_COND_QUERY_HASH_FORMAT, "hash_format"}};
  static const breakage registration[] = {
      {id_white, INVALID, KVRELAY_COND_INVALID_TEXT, "canonical_model_id"},
      {no_target, INVALID, KVRELAY_COND_MISSING_FIELD, "target"},
      {target_none, UNSUPPORTED, KVRELAY_COND_UNSUPPORTED_MODEL_TARGET, "target"},
      {base_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "base_model"},
      {alias_repeated, INVALID, KVRELAY_COND_DUPLICATE_ALIAS, "aliases"},
      {third_alias_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "aliases"}};
  static const breakage lora[] = {
      {second_id_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "canonical_model_id"},
      {lora_base_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "base_model"},
      {adapter_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "adapter"},
      {alias_repeated, INVALID, KVRELAY_COND_DUPLICATE_ALIAS, "aliases"}};
  static const breakage descriptor[] = {
      {no_producer, INVALID, KVRELAY_COND_MISSING_FIELD, "producer"},
      {generation_0, INVALID, KVRELAY_COND_ZERO_LAYOUT_GENERATION, "layout_generation"},
      {no_endpoint, INVALID, KVRELAY_COND_MISSING_FIELD, "serving_endpoint"},
      {component_white, INVALID, KVRELAY_COND_INVALID_TEXT, "component"},
      {no_semantics, INVALID, KVRELAY_COND_MISSING_FIELD, "query_semantics"},
      {hash_minus, UNSUPPORTED, KVRELAY_COND_QUERY_HASH_FORMAT, "hash_format"},
      {target_none, UNSUPPORTED, KVRELAY_COND_UNSUPPORTED_MODEL_TARGET, "target"},
      {second_id_empty, INVALID, KVRELAY_COND_INVALID_TEXT, "canonical_model_id"},
      {no_roles, INVALID, KVRELAY_COND_MISSING_WORKER_ROLES, "pool_roles"}};
  static const breakage roles[] = {{role_0, INVALID, KVRELAY_COND_WORKER_ROLE, "pool_roles"},
                                   {role_99, UNSUPPORTED, KVRELAY_COND_WORKER_ROLE, "pool_roles"}};
  static const breakage role[] = {
      {role_minus, UNSUPPORTED, KVRELAY_COND_WORKER_ROLE, "pool_roles"}};
  static const breakage repeated[] = {
      {role_repeated, INVALID, KVRELAY_COND_DUPLICATE_WORKER_ROLE, "pool_roles"}};
  IN_ORDER(check_endpoint, endpoint);
  IN_ORDER(check_semantics, semantics);
  IN_ORDER(check_semantics, format);
  IN_ORDER(check_registration, registration);
  IN_ORDER(check_lora, lora);
  IN_ORDER(check_descriptor, descriptor);
  IN_ORDER(check_descriptor, roles);
  IN_ORDER(check_descriptor, role);
  IN_ORDER(check_descriptor, repeated);
  everything x;
  memset(&x, 0, sizeof x);
  kvrelay_verdict v = kvrelay_check_descriptor(&x.d);
  cr_assert(v.condition == KVRELAY_COND_MISSING_FIELD && strcmp(v.field, "producer") == 0);
  fill(&x); /* odd, but fine on the wire: no registrations, one id twice, dc, seed and incarnation 0
             */
  x.d.registrations_len = 0;
  cr_assert_eq(kvrelay_check_descriptor(&x.d).class_, KVRELAY_CLASS_OK);
  fill(&x);
  x.registrations[1].canonical_model_id = text_of("llama");
  cr_assert_eq(kvrelay_check_descriptor(&x.d).class_, KVRELAY_CLASS_OK);
}

/* ---- long lists ---- */

enum { LONG = 200000 };

/* Distinct texts of one length and one beginning, in no order; one block for free(). */
static kvrelay_text *long_list(size_t n) {
  kvrelay_text *const list = malloc(n * (sizeof *list + 32));
  char *const bytes = (char *)(list + n);
  cr_assert(list != NULL);
  for (size_t i = 0; i < n; i++) {
    char *const to = bytes + i * 32;
    snprintf(to, 32, "a-name-that-begins-alike-%06zu", i * 7919 % 1000003 % 1000000);
    list[i] = text_of(to);
  }
  return list;
}

/* Puts a copy of another element at `i` of a list of `n`, which the check must find there. */
#define FINDS_REPEATS(LIST, N, CHECK, CONDITION)                                                   \
  do {                                                                                             \
    cr_assert_eq((CHECK).class_, KVRELAY_CLASS_OK);                                                \
    for (size_t at = 1, of = 0; at < (N); at = at < 8 ? at + 1 : at + 97, of = at * 31 % at) {     \
      for (int near = 0; near < 2; near++) {                                                       \
        const kvrelay_text kept = (LIST)[at];                                                      \
        (LIST)[at] = (LIST)[near ? at - 1 : of];                                                   \
        const kvrelay_verdict v = (CHECK);                                                         \
        cr_assert(v.condition == (CONDITION) && v.value == at, "%zu: %s %" PRIu64, at,             \
                  kvrelay_condition_name(v.condition), v.value);                                   \
        (LIST)[at] = kept;                                                                         \
      }                                                                                            \
    }                                                                                              \
  } while (0)

Test(contract, repeats_are_found_among_many_aliases) {
  kvrelay_text *const list = long_list(LONG);
  kvrelay_registration r = {text_of("id"),
                            {true, KVRELAY_TARGET_BASE, text_of("id"), {NULL, 0}},
                            list,
                            KVRELAY_ALIASES_MAX};
  FINDS_REPEATS(list, r.aliases_len, kvrelay_check_registration(&r), KVRELAY_COND_DUPLICATE_ALIAS);
  /* The first failure wins, whichever it is; of equal ones the second is the repeat. */
  list[700] = list[900] = list[10];
  list[800] = text_of("");
  cr_expect_eq(kvrelay_check_registration(&r).value, 700);
  list[600] = text_of(" ");
  kvrelay_verdict v = kvrelay_check_registration(&r);
  cr_expect(v.condition == KVRELAY_COND_INVALID_TEXT && v.value == 600);
  for (r.aliases_len = KVRELAY_ALIASES_MAX + 1; r.aliases_len <= LONG; r.aliases_len *= 9) {
    v = kvrelay_check_registration(&r);
    cr_expect(v.class_ == UNSUPPORTED && v.condition == KVRELAY_COND_LIST_TOO_LONG &&
              v.value == r.aliases_len && strcmp(v.field, "aliases") == 0);
  }
  free(list);
}

/* A naive look for the first repeat, over lists with few different texts. */
Test(contract, the_first_repeat_is_the_naive_one) {
  uint64_t rng = 3;
  for (int round = 0; round < 400; round++) {
    static kvrelay_text list[KVRELAY_ALIASES_MAX];
    const size_t n = ckf_rng_draw(&rng) % (round % 2 ? KVRELAY_ALIASES_MAX : 12),
                 kinds = 1 + ckf_rng_draw(&rng) % (round % 3 ? 400000 : 40);
    char bytes[KVRELAY_ALIASES_MAX][8];
    kvrelay_registration r = {
        text_of("id"), {true, KVRELAY_TARGET_BASE, text_of("id"), {NULL, 0}}, list, n};
    size_t want = n;
    for (size_t i = 0; i < n; i++) {
      snprintf(bytes[i], sizeof bytes[i], "%zu", (size_t)ckf_rng_draw(&rng) % kinds);
      list[i] = text_of(bytes[i]);
      for (size_t k = 0; want == n && k < i; k++)
        if (kvrelay_text_equal(list[k], list[i]))
          want = i;
    }
    const kvrelay_verdict v = kvrelay_check_registration(&r);
    cr_assert_eq(v.class_ == KVRELAY_CLASS_OK, want == n);
    cr_assert_eq(v.value, want == n ? 0 : want);
  }
}

BREAK(entry_namespace, x->entry.namespace_.len = 0)
BREAK(entry_model, x->entry.canonical_model_id = text_of("llama\t"))
BREAK(entry_state, x->entry.state = 99)
BREAK(present_99, x->present[0] = 99)
BREAK(missing_0, x->missing[0] = 0)
BREAK(duplicates_repeat, x->duplicates[1] = 1)
BREAK(duplicates_encode, x->duplicates[1] = KVRELAY_ROLE_ENCODE)
BREAK(duplicates_aggregated, x->duplicates[0] = KVRELAY_ROLE_AGGREGATED)
BREAK(duplicates_legacy, x->duplicates[1] = KVRELAY_ROLE_LEGACY)
BREAK(no_members, x->entry.members_len = 0)
BREAK(member_no_endpoint, x->members[0].endpoint.present = false)
BREAK(member_endpoint, x->members[0].endpoint.endpoint.len = 0)
BREAK(member_foreign, x->members[0].endpoint.namespace_ = text_of("test"))
BREAK(member_no_roles, x->members[0].roles.len = 0)
BREAK(member_role_0, (x->members[0].roles.len = 2, x->member_roles[1] = 0))
BREAK(member_link, x->members[1].pool_id.identity_version = 2)
BREAK(member_twice, x->members[1].endpoint.component = text_of("backend"))
BREAK(adapter_id, x->adapters[0].canonical_model_id.len = 0)
BREAK(adapter_state, x->adapters[0].state = -1)
BREAK(adapter_missing, x->adapter_missing[1] = 1)
BREAK(adapter_twice, x->adapters[1].canonical_model_id = text_of("a"))

static kvrelay_verdict check_entry(const everything *x) {
  return kvrelay_check_topology_entry(&x->entry);
}

Test(contract, W8_W9_order_of_a_topology_entry) {
  static const breakage head[] = {
      {entry_namespace, INVALID, KVRELAY_COND_INVALID_TEXT, "namespace"},
      {entry_model, INVALID, KVRELAY_COND_INVALID_TEXT, "canonical_model_id"},
      {entry_state, UNSUPPORTED, KVRELAY_COND_READINESS_STATE, "state"},
      {present_99, UNSUPPORTED, KVRELAY_COND_WORKER_ROLE, "present_roles"},
      {missing_0, INVALID, KVRELAY_COND_WORKER_ROLE, "missing_roles"},
      {duplicates_repeat, INVALID, KVRELAY_COND_DUPLICATE_WORKER_ROLE, "duplicate_role_endpoints"},
      {no_members, INVALID, KVRELAY_COND_MISSING_TOPOLOGY_MEMBERS, "members"},
      {adapter_twice, INVALID, KVRELAY_COND_DUPLICATE_ADAPTER, "adapters"}};
  static const breakage members[] = {
      {duplicates_encode, INVALID, KVRELAY_COND_UNSUPPORTED_DUPLICATE_ENDPOINT_ROLE,
       "duplicate_role_endpoints"},
      {member_no_endpoint, INVALID, KVRELAY_COND_MISSING_FIELD, "members.endpoint"},
      {member_endpoint, INVALID, KVRELAY_COND_INVALID_TEXT, "endpoint"},
      {member_foreign, INVALID, KVRELAY_COND_TOPOLOGY_NAMESPACE_MISMATCH, "members.endpoint"},
      {member_no_roles, INVALID, KVRELAY_COND_MISSING_WORKER_ROLES, "members.roles"},
      {member_link, UNSUPPORTED, KVRELAY_COND_POOL_IDENTITY_VERSION, "members.pool_id"},
      {member_twice, INVALID, KVRELAY_COND_DUPLICATE_TOPOLOGY_MEMBER, "members"},
      {adapter_id, INVALID, KVRELAY_COND_INVALID_TEXT, "adapters.canonical_model_id"},
      {adapter_state, UNSUPPORTED, KVRELAY_COND_READINESS_STATE, "adapters.state"},
      {adapter_missing, INVALID, KVRELAY_COND_DUPLICATE_WORKER_ROLE, "adapters.missing_roles"},
      {adapter_twice, INVALID, KVRELAY_COND_DUPLICATE_ADAPTER, "adapters"}};
  static const breakage member_roles[] = {
      {member_role_0, INVALID, KVRELAY_COND_WORKER_ROLE, "members.roles"}};
  static const breakage aggregated[] = {{duplicates_aggregated, INVALID,
                                         KVRELAY_COND_UNSUPPORTED_DUPLICATE_ENDPOINT_ROLE,
                                         "duplicate_role_endpoints"}};
  static const breakage legacy[] = {{duplicates_legacy, INVALID,
                                     KVRELAY_COND_UNSUPPORTED_DUPLICATE_ENDPOINT_ROLE,
                                     "duplicate_role_endpoints"}};
  IN_ORDER(check_entry, head);
  IN_ORDER(check_entry, members);
  IN_ORDER(check_entry, member_roles);
  IN_ORDER(check_entry, aggregated);
  IN_ORDER(check_entry, legacy);
}

Test(contract, repeats_are_found_among_many_members_and_adapters) {
  static kvrelay_topology_member members[LONG];
  static kvrelay_adapter_readiness adapters[LONG];
  kvrelay_text *const list = long_list(LONG);
  everything x;
  fill(&x);
  for (size_t i = 0; i < LONG; i++) {
    members[i] = x.members[0];
    members[i].endpoint.component = list[i / 2]; /* half of a name may repeat */
    members[i].endpoint.endpoint = list[i % 2];
    adapters[i] = x.adapters[0];
    adapters[i].canonical_model_id = list[i];
  }
  x.entry.members = members;
  x.entry.adapters = adapters;
  x.entry.members_len = x.entry.adapters_len = KVRELAY_PARTS_MAX;
  cr_assert_eq(check_entry(&x).class_, KVRELAY_CLASS_OK);
  for (size_t i = 1; i < KVRELAY_PARTS_MAX; i += 511) {
    const kvrelay_topology_member member = members[i];
    const kvrelay_adapter_readiness adapter = adapters[i];
    adapters[i] = adapters[i / 3];
    kvrelay_verdict v = check_entry(&x);
    cr_expect(v.condition == KVRELAY_COND_DUPLICATE_ADAPTER && v.value == i);
    members[i] = members[i / 2];
    v = check_entry(&x);
    cr_expect(v.condition == KVRELAY_COND_DUPLICATE_TOPOLOGY_MEMBER && v.value == i);
    members[i] = member;
    adapters[i] = adapter;
  }
  x.entry.adapters_len = LONG;
  kvrelay_verdict v = check_entry(&x);
  cr_expect(v.class_ == UNSUPPORTED && v.condition == KVRELAY_COND_LIST_TOO_LONG &&
            v.value == LONG && strcmp(v.field, "adapters") == 0);
  x.entry.members_len = LONG;
  v = check_entry(&x);
  cr_expect(v.class_ == UNSUPPORTED && v.condition == KVRELAY_COND_LIST_TOO_LONG &&
            v.value == LONG && strcmp(v.field, "members") == 0);
  free(list);
}

Test(contract, more_registrations_than_readers_take) {
  static kvrelay_registration registrations[KVRELAY_PARTS_MAX + 1];
  everything x;
  fill(&x);
  for (size_t i = 0; i <= KVRELAY_PARTS_MAX; i++)
    registrations[i] = x.registrations[0];
  x.d.registrations = registrations;
  x.d.registrations_len = KVRELAY_PARTS_MAX;
  cr_expect_eq(kvrelay_check_descriptor(&x.d).class_, KVRELAY_CLASS_OK);
  x.d.registrations_len++;
  const kvrelay_verdict v = kvrelay_check_descriptor(&x.d);
  cr_expect(v.class_ == UNSUPPORTED && v.condition == KVRELAY_COND_LIST_TOO_LONG &&
            strcmp(v.field, "registrations") == 0);
}

Test(contract, X2_names_that_differ_after_a_nul_are_two) {
  everything x;
  fill(&x);
  x.members[0].endpoint.component = (kvrelay_text){(const uint8_t *)"a\0b", 3};
  x.members[1].endpoint.component = (kvrelay_text){(const uint8_t *)"a\0c", 3};
  cr_assert_eq(kvrelay_check_topology_entry(&x.entry).class_, KVRELAY_CLASS_OK);
  cr_assert(!kvrelay_text_equal(x.members[0].endpoint.component, x.members[1].endpoint.component));
}

Test(contract, W2_envelope) {
  kvrelay_envelope e = {1, false, {0, 0}, 0x4B565231};
  cr_assert_eq(kvrelay_check_envelope(&e).class_,
               KVRELAY_CLASS_OK); /* presence of relay is another check */
  e.protocol_version = 2;
  kvrelay_verdict v = kvrelay_check_envelope(&e);
  cr_assert(v.class_ == KVRELAY_CLASS_ENVELOPE && v.condition == KVRELAY_COND_PROTOCOL_VERSION &&
            v.value == 2);
  e.contract_marker = 0;
  v = kvrelay_check_envelope(&e);
  cr_assert(v.class_ == KVRELAY_CLASS_ENVELOPE && v.condition == KVRELAY_COND_CONTRACT_MARKER);
}

/* ---- keys ---- */

Test(contract, W10_producer_key_is_13_values) {
  everything x, y;
  fill(&x);
  kvrelay_producer *p = &y.d.producer;
  fill(&y);
  cr_assert(kvrelay_producer_equal(&x.d.producer, p));
#define DIFFERS(FIELD, POOL_TOO)                                                                   \
  do {                                                                                             \
    fill(&y);                                                                                      \
    p->FIELD++;                                                                                    \
    cr_assert(!kvrelay_producer_equal(&x.d.producer, p), #FIELD);                                  \
    cr_assert_eq(kvrelay_pool_id_equal(&x.d.producer.pool_id, &p->pool_id), !(POOL_TOO), #FIELD);  \
  } while (0)
  DIFFERS(pool_id.identity_version, true);
  DIFFERS(pool_id.domain.cache_semantics.digest[15], true);
  DIFFERS(pool_id.domain.cache_semantics.source, true);
  DIFFERS(pool_id.domain.routing_scope.digest[0], true);
  DIFFERS(pool_id.domain.routing_scope.source, true);
  DIFFERS(pool_id.dc_id, true);
  DIFFERS(producer_incarnation, false);
  DIFFERS(layout_generation, false);
  DIFFERS(ckf_format.format_version, false);
  DIFFERS(ckf_format.seed, false);
  DIFFERS(ckf_format.bucket_count, false);
  DIFFERS(ckf_format.fingerprint_bits, false);
  DIFFERS(ckf_format.slots_per_bucket, false);
#undef DIFFERS
}

Test(contract, T13_catalog_order_and_name_of_a_pool) {
  /* ascending: cache digest, cache source, routing digest, routing source, dc_id */
  static const uint64_t rows[][5] = {
      {1, 1, 1, 1, 5}, {1, 1, 1, 2, 0}, {1, 1, 1, 2, 1},    {1, 1, 2, 1, 0},
      {1, 2, 0, 1, 0}, {2, 1, 0, 1, 0}, {0x80, 1, 0, 1, 0}, {0x80, 1, 0, 1, UINT64_MAX}};
  enum { N = sizeof rows / sizeof rows[0] };
  kvrelay_pool_id ids[N];
  everything x;
  fill(&x);
  for (int i = 0; i < N; i++) {
    ids[i] = x.d.producer.pool_id;
    ids[i].domain.cache_semantics =
        (kvrelay_digest){true, {(uint8_t)rows[i][0]}, 16, (int32_t)rows[i][1]};
    ids[i].domain.routing_scope =
        (kvrelay_digest){true, {(uint8_t)rows[i][2]}, 16, (int32_t)rows[i][3]};
    ids[i].dc_id = rows[i][4];
  }
  for (int i = 0; i < N; i++)
    for (int j = 0; j < N; j++) {
      int order = kvrelay_pool_id_compare(&ids[i], &ids[j]);
      cr_assert((order < 0) == (i < j) && (order > 0) == (i > j), "%d and %d", i, j);
      cr_assert_eq(kvrelay_pool_id_equal(&ids[i], &ids[j]), i == j);
    }
  char name[KVRELAY_POOL_NAME_CAP];
  ids[0].dc_id = 0xAABBCCDDEEFF0011;
  kvrelay_pool_id_format(&ids[0], name);
  cr_assert_str_eq(
      name, "01000000000000000000000000000000:01000000000000000000000000000000/aabbccddeeff0011");
}
