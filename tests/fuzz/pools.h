/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FUZZ_POOLS_H_
#define FUZZ_POOLS_H_

/* Pools for targets: descriptors of a few pools that share models and block size, good or odd. */

#include "fuzz.h"
#include "kvrelay.h"

enum { POOL_WIDTH = 4 /* tokens of a block */ };

static const int32_t pool_roles[] = {KVRELAY_ROLE_LEGACY, KVRELAY_ROLE_LEGACY};
static const kvrelay_text pool_aliases[] = {{(const uint8_t *)"chat", 4}};
static const kvrelay_registration pool_models[] = {
    {{(const uint8_t *)"llama", 5},
     {true, KVRELAY_TARGET_BASE, {(const uint8_t *)"llama", 5}, {NULL, 0}},
     pool_aliases,
     1},
    {{(const uint8_t *)"llama-law", 9},
     {true, KVRELAY_TARGET_LORA, {(const uint8_t *)"llama", 5}, {(const uint8_t *)"law", 3}},
     NULL,
     0}};

static inline kvrelay_text text(const char *s) {
  return (kvrelay_text){(const uint8_t *)s, strlen(s)};
}

static inline kvrelay_envelope pool_envelope(void) {
  return (kvrelay_envelope){1, true, {17, 23}, KVRELAY_CONTRACT_MARKER};
}

static inline kvrelay_digest pool_digest(uint8_t fill) {
  kvrelay_digest d = {true, {0}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_EXPLICIT};
  memset(d.digest, fill, sizeof d.digest);
  return d;
}

/* One of `pools` pools by two bytes: which one, and what is odd about it. */
static inline kvrelay_descriptor pool_describe(fuzz_input *in, uint8_t pools, uint64_t buckets) {
  const uint8_t which = fuzz_byte(in), odd = fuzz_byte(in);
  kvrelay_descriptor d = {0};
  d.producer = (kvrelay_producer){true,
                                  {true, 1, {true, pool_digest(which % pools), pool_digest(9)}, 7},
                                  23,
                                  1u + which / pools % 2,
                                  {true, 1, 42, buckets, 16, 4}};
  d.serving_endpoint = (kvrelay_endpoint){true, text("prod"), text("backend"), text("generate")};
  d.registrations = pool_models;
  d.registrations_len = odd == 9 ? 0 : 1 + (which & 1);
  d.query_semantics = (kvrelay_semantics){true, odd == 8 ? 0 : POOL_WIDTH, HASHFMT_FORMAT_STANDARD};
  d.pool_roles = (kvrelay_roles){pool_roles, odd == 7 ? 2 : 1};
  if (odd == 6)
    d.producer.ckf_format.bucket_count = 3;
  if (odd == 5)
    d.producer.pool_id.identity_version = 2;
  if (odd == 4)
    d.producer.pool_id.domain.routing_scope.digest_len = 15;
  return d;
}

#endif
