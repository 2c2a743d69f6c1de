/* SPDX-License-Identifier: Apache-2.0 */
/* test_source.h - what tests of engine events share: a source with its producer and decoder, and a
 * writer of msgpack. */
#ifndef KVRELAY_TEST_SOURCE_H
#define KVRELAY_TEST_SOURCE_H

#include <stdlib.h>
#include <string.h>

#include "kvrelay.h"
#include "proto/engine_events.h"

#define TEST_UNUSED __attribute__((unused))

/* ---- writer ---- */

typedef struct packer {
  uint8_t bytes[1 << 16];
  size_t len;
} packer;

TEST_UNUSED static void put_byte(packer *p, uint64_t byte) {
  if (p->len == sizeof p->bytes)
    abort();
  p->bytes[p->len++] = (uint8_t)byte;
}

TEST_UNUSED static void put_number(packer *p, uint8_t head, int width, uint64_t n) {
  put_byte(p, head);
  for (int i = width - 1; i >= 0; i--)
    put_byte(p, n >> (8 * i) & 0xff);
}

/* Shortest form. */
TEST_UNUSED static void put_uint(packer *p, uint64_t n) {
  if (n < 0x80)
    put_byte(p, n);
  else if (n <= 0xff)
    put_number(p, 0xcc, 1, n);
  else if (n <= 0xffff)
    put_number(p, 0xcd, 2, n);
  else if (n <= 0xffffffff)
    put_number(p, 0xce, 4, n);
  else
    put_number(p, 0xcf, 8, n);
}

TEST_UNUSED static void put_int(packer *p, int64_t n) {
  if (n >= 0)
    put_uint(p, (uint64_t)n);
  else if (n >= -32)
    put_byte(p, (uint64_t)n & 0xff);
  else
    put_number(p, 0xd3, 8, (uint64_t)n);
}

TEST_UNUSED static void put_nil(packer *p) { put_byte(p, 0xc0); }
TEST_UNUSED static void put_bool(packer *p, bool value) { put_byte(p, value ? 0xc3 : 0xc2); }
TEST_UNUSED static void put_float(packer *p) {
  put_number(p, 0xcb, 8, UINT64_C(0x3ff8000000000000));
} /* 1.5 */

TEST_UNUSED static void put_array(packer *p, size_t n) {
  if (n < 16)
    put_byte(p, 0x90 | n);
  else
    put_number(p, 0xdd, 4, n);
}

TEST_UNUSED static void put_map(packer *p, size_t n) {
  if (n < 16)
    put_byte(p, 0x80 | n);
  else
    put_number(p, 0xdf, 4, n);
}

TEST_UNUSED static void put_raw(packer *p, const void *bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    put_byte(p, ((const uint8_t *)bytes)[i]);
}

TEST_UNUSED static void put_text(packer *p, const char *text) {
  put_number(p, 0xd9, 1, strlen(text));
  put_raw(p, text, strlen(text));
}

TEST_UNUSED static void put_bin(packer *p, const void *bytes, size_t n) {
  put_number(p, 0xc4, 1, n);
  put_raw(p, bytes, n);
}

/* The head of a batch [1.5, [events …], and its end. */
TEST_UNUSED static void put_batch(packer *p, size_t events) {
  p->len = 0;
  put_array(p, 3);
  put_float(p);
  put_array(p, events);
}

/* ---- events as the tests think of them ---- */

typedef struct hashes {
  size_t len;
  uint64_t at[80];
} hashes;

#define HASHES(...) ((hashes){sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), {__VA_ARGS__}})

/* A store; members left out are absent on the wire. */
typedef struct stored {
  hashes hashes;
  const uint64_t *parent;
  uint32_t first, count;  /* tokens first, first + 1, … */
  const uint32_t *tokens; /* or these `count` ones */
  bool pairs;
  uint32_t block_size; /* 0: 4 */
  const char *medium, *lora_name, *cache_salt, *kind, *locality, *ownership;
  const uint32_t *group;
  const uint64_t *lora_id;
  const packer *extra_keys, *mm_infos; /* encoded values */
} stored;

#define PARENT(H) (&(const uint64_t){H})
#define GROUP(G) (&(const uint32_t){G})

TEST_UNUSED static void put_text_field(packer *p, const char *name, const char *text) {
  if (text == NULL)
    return;
  put_text(p, name);
  put_text(p, text);
}

TEST_UNUSED static void put_hash_list(packer *p, const hashes *list) {
  put_array(p, list->len);
  for (size_t i = 0; i < list->len; i++)
    put_uint(p, list->at[i]);
}

TEST_UNUSED static void put_tokens(packer *p, const stored *s) {
  uint32_t count = s->pairs && s->count != 0 ? s->count - 1 : s->count;
  put_array(p, count);
  for (uint32_t i = 0; i < count; i++) {
    if (s->pairs)
      put_array(p, 2);
    put_uint(p, s->tokens ? s->tokens[i] : s->first + i);
    if (s->pairs)
      put_uint(p, s->tokens ? s->tokens[i + 1] : s->first + i + 1);
  }
}

/* As a map. */
TEST_UNUSED static void put_stored(packer *p, stored s) {
  const void *optional[] = {s.medium,    s.lora_name, s.cache_salt, s.kind,       s.locality,
                            s.ownership, s.group,     s.lora_id,    s.extra_keys, s.mm_infos};
  size_t fields = 5;
  for (size_t i = 0; i < sizeof optional / sizeof optional[0]; i++)
    fields += optional[i] ? 1 : 0;
  put_map(p, fields);
  put_text_field(p, "type", "BlockStored");
  put_text(p, "block_hashes");
  put_hash_list(p, &s.hashes);
  put_text(p, "parent_block_hash");
  if (s.parent)
    put_uint(p, *s.parent);
  else
    put_nil(p);
  put_text(p, "token_ids");
  put_tokens(p, &s);
  put_text(p, "block_size");
  put_uint(p, s.block_size == 0 ? 4 : s.block_size);
  put_text_field(p, "medium", s.medium);
  put_text_field(p, "lora_name", s.lora_name);
  put_text_field(p, "cache_salt", s.cache_salt);
  put_text_field(p, "kv_cache_spec_kind", s.kind);
  put_text_field(p, "locality", s.locality);
  put_text_field(p, "ownership", s.ownership);
  if (s.group) {
    put_text(p, "group_idx");
    put_uint(p, *s.group);
  }
  if (s.lora_id) {
    put_text(p, "lora_id");
    put_uint(p, *s.lora_id);
  }
  if (s.extra_keys) {
    put_text(p, "extra_keys");
    put_raw(p, s.extra_keys->bytes, s.extra_keys->len);
  }
  if (s.mm_infos) {
    put_text(p, "block_mm_infos");
    put_raw(p, s.mm_infos->bytes, s.mm_infos->len);
  }
}

TEST_UNUSED static void put_removed(packer *p, hashes h, const char *medium,
                                    const uint32_t *group) {
  put_map(p, 2 + (size_t)(medium != NULL) + (size_t)(group != NULL));
  put_text_field(p, "type", "BlockRemoved");
  put_text(p, "block_hashes");
  put_hash_list(p, &h);
  put_text_field(p, "medium", medium);
  if (group) {
    put_text(p, "group_idx");
    put_uint(p, *group);
  }
}

TEST_UNUSED static void put_cleared(packer *p, const char *tag, const char *medium) {
  put_map(p, 1 + (size_t)(medium != NULL));
  put_text_field(p, "type", tag);
  put_text_field(p, "medium", medium);
}

/* ---- a source, its producer and its decoder ---- */

typedef struct feeder {
  kvrelay_source_config cfg;
  ckf_producer *producer;
  ckf_producer own_producer;
  kvrelay_source source;
  kvrelay_engine_decoder decoder;
  void *producer_mem, *source_mem, *decoder_mem;
  uint64_t sequence; /* of the next batch that feed sends */
  packer batch;
} feeder;

#define TEST_DECODER_TOKENS 65536

TEST_UNUSED static kvrelay_source_config test_source_config(void) {
  kvrelay_source_config c = kvrelay_source_config_default();
  c.worker_id = 1;
  c.ranks = 2;
  c.block_size = 4;
  c.partial_memory = 64;
  c.max_namespaces = 16;
  c.max_event_blocks = 4096;
  return c;
}

/* `shared`: the producer of another feeder, NULL = one of its own. */
TEST_UNUSED static feeder *feeder_new(const kvrelay_source_config *cfg, uint64_t expected_blocks,
                                      feeder *shared) {
  feeder *f = calloc(1, sizeof *f);
  ckf_producer_config pc = ckf_producer_config_default();
  pc.tags = true;
  pc.filter.expected_blocks = expected_blocks;
  f->cfg = *cfg;
  f->producer = shared ? shared->producer : &f->own_producer;
  f->producer_mem = malloc(ckf_producer_mem_size(&pc));
  f->source_mem = malloc(kvrelay_source_mem_size(cfg));
  f->decoder_mem = malloc(kvrelay_engine_decoder_mem_size(TEST_DECODER_TOKENS));
  if (ckf_producer_init(&f->own_producer, &pc, f->producer_mem, ckf_producer_mem_size(&pc)) !=
          CKF_OK ||
      kvrelay_source_init(&f->source, cfg, f->producer, f->source_mem, kvrelay_source_mem_size(cfg),
                          0) != KVRELAY_OK ||
      kvrelay_engine_decoder_init(&f->decoder, TEST_DECODER_TOKENS, f->decoder_mem,
                                  kvrelay_engine_decoder_mem_size(TEST_DECODER_TOKENS)) !=
          KVRELAY_OK)
    abort();
  return f;
}

TEST_UNUSED static void feeder_free(feeder *f) {
  free(f->producer_mem);
  free(f->source_mem);
  free(f->decoder_mem);
  free(f);
}

/* Ends the batch in f->batch with its rank, -1 = none, and feeds it with the next sequence. */
TEST_UNUSED static int feed(feeder *f, int rank) {
  if (rank >= 0)
    put_uint(&f->batch, (uint64_t)rank);
  else
    put_nil(&f->batch);
  return kvrelay_engine_feed(&f->decoder, &f->source, f->sequence++, f->batch.bytes, f->batch.len,
                             1);
}

/* Batches of one event. */
TEST_UNUSED static int feed_stored(feeder *f, int rank, stored s) {
  put_batch(&f->batch, 1);
  put_stored(&f->batch, s);
  return feed(f, rank);
}

TEST_UNUSED static int feed_removed(feeder *f, int rank, hashes h) {
  put_batch(&f->batch, 1);
  put_removed(&f->batch, h, NULL, NULL);
  return feed(f, rank);
}

TEST_UNUSED static int feed_cleared(feeder *f, int rank) {
  put_batch(&f->batch, 1);
  put_cleared(&f->batch, "AllBlocksCleared", NULL);
  return feed(f, rank);
}

TEST_UNUSED static uint64_t counted(const feeder *f, int count) {
  return kvrelay_source_stats_get(&f->source)->counts[count];
}

/* Sum of all counters. */
TEST_UNUSED static uint64_t counted_all(const feeder *f) {
  uint64_t sum = 0;
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    sum += counted(f, i);
  return sum;
}

TEST_UNUSED static uint32_t blocks_of(const feeder *f, uint32_t rank) {
  ckf_member m = {f->cfg.worker_id, rank};
  return ckf_producer_member_blocks(f->producer, &m);
}

/* Leading blocks of a prompt whose keys have an owner. */
TEST_UNUSED static size_t depth_of(const feeder *f, const uint32_t *tokens, size_t count,
                                   const char *lora, const char *ns) {
  uint64_t keys[256];
  size_t len, depth = 0;
  uint64_t seed = hashfmt_seed((const uint8_t *)lora, lora ? strlen(lora) : 0, (const uint8_t *)ns,
                               ns ? strlen(ns) : 0);
  if (hashfmt_blocks(f->cfg.hash_format, f->cfg.block_size, seed, tokens, count, NULL, keys, 256,
                     &len) != HASHFMT_OK)
    abort();
  while (depth < len && ckf_producer_owners(f->producer, keys[depth], NULL, NULL) == 1)
    depth++;
  return depth;
}

/* Of the prompt first, first + 1, …, base model, no namespace. */
TEST_UNUSED static size_t depth(const feeder *f, uint32_t first, uint32_t count) {
  uint32_t tokens[256];
  for (uint32_t i = 0; i < count; i++)
    tokens[i] = first + i;
  return depth_of(f, tokens, count, NULL, NULL);
}

TEST_UNUSED static uint32_t owners_of(const feeder *f, uint64_t canonical) {
  uint32_t owners = 0;
  return ckf_producer_owners(f->producer, canonical, &owners, NULL) == 1 ? owners : 0;
}

#endif
