/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events that an engine hands out on request: JSON to the exact state of the producer.  The keys
 * are those of the streams' tests, which come from independent code.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>

#include "proto/polled_events.h"
#include "test_source.h"

/* Canonical hashes of the prompts 0..3, 0..7. */
#define CANON_4 UINT64_C(9143094415614847814)
#define CANON_8 UINT64_C(9510318385840434533)

typedef struct poller {
  feeder *f;
  kvrelay_polled polled;
  void *mem;
} poller;

static poller poller_new(void) {
  kvrelay_source_config cfg = test_source_config();
  const kvrelay_polled_config c = {.block_size = 4, .ranks = 2, .max_tokens = 64};
  poller p = {.f = feeder_new(&cfg, 256, NULL)};
  const size_t len = kvrelay_polled_mem_size(&c);
  p.mem = malloc(len);
  cr_assert_eq(kvrelay_polled_init(&p.polled, &c, p.mem, len), KVRELAY_OK);
  return p;
}

static void poller_free(poller *p) {
  cr_assert_eq(ckf_producer_check_(p->f->producer), CKF_OK);
  feeder_free(p->f);
  free(p->mem);
}

/* An answer in memory of exactly its size, so that the sanitizer sees every step beyond it. */
static void poll_bytes(poller *p, const char *json, size_t len) {
  uint8_t *copy = malloc(len + (len == 0));
  memcpy(copy, json, len);
  cr_assert_eq(kvrelay_polled_feed(&p->polled, &p->f->source, copy, len, 1), KVRELAY_OK);
  free(copy);
}

static void poll(poller *p, const char *json) { poll_bytes(p, json, strlen(json)); }

#define COUNTED(P, NAME, N)                                                                        \
  cr_assert_eq(counted((P)->f, KVRELAY_COUNT_##NAME), (N), #NAME " is %" PRIu64,                   \
               counted((P)->f, KVRELAY_COUNT_##NAME))
#define CLEAN(P) cr_assert_eq(counted_all((P)->f), 0)

#define T(N) "{\"token_id\":" #N ",\"token_extra_id\":0}"
#define BLOCK(HASH, A, B, C, D)                                                                    \
  "{\"block_hash\":" #HASH                                                                         \
  ",\"tokens\":[" T(A) "," T(B) "," T(C) "," T(D) "],\"cache_level\":0,"                           \
                                                  "\"priority\":35,\"mm_keys\":[]}"
#define STORED(ID, PARENT, BLOCKS)                                                                 \
  "{\"event_id\":" #ID ",\"data\":{\"type\":\"stored\",\"parent_hash\":" #PARENT                   \
  ",\"blocks\":[" BLOCKS "]}}"
#define REMOVED(ID, HASHES)                                                                        \
  "{\"event_id\":" #ID ",\"data\":{\"type\":\"removed\",\"block_hashes\":[" HASHES "]}}"
#define CREATED                                                                                    \
  "{\"event_id\":0,\"window_size\":4096,\"data\":{\"type\":\"created\",\"num_blocks_per_cache_"    \
  "level\":[100,0]}}"
#define FIRST BLOCK(18446744073709551615, 0, 1, 2, 3)
#define SECOND BLOCK(-2, 4, 5, 6, 7)

static bool holds(const poller *p, uint64_t canonical) {
  return ckf_producer_contains(p->f->producer, canonical);
}

Test(polled_events, stored_and_removed) {
  poller p = poller_new();
  poll(&p, "[]");
  poll(&p, "[" CREATED "," STORED(1, null, FIRST "," SECOND) "]\n");
  cr_assert(holds(&p, CANON_4) && holds(&p, CANON_8));
  cr_assert_eq(depth(p.f, 0, 8), 2);
  cr_assert(kvrelay_source_complete(&p.f->source, 0), "its events began with the first");
  poll(&p, "[]");
  /* The same bits, signed and not; one event alone. */
  poll(&p, REMOVED(2, "-1"));
  cr_assert_not(holds(&p, CANON_4));
  cr_assert(holds(&p, CANON_8));
  poll(&p, "[" REMOVED(3, "18446744073709551614") "]");
  cr_assert_not(holds(&p, CANON_8));
  COUNTED(&p, IGNORED_EVENT, 1); /* created */
  cr_assert_eq(counted_all(p.f), 1);
  poller_free(&p);
}

Test(polled_events, members_in_any_order) {
  poller p = poller_new();
  poll(&p, "[{\"hash_algo\":\"v1\",\"data\":{\"blocks\":[{\"mm_keys\":null,\"tokens\":[" T(0) "," T(
               1) "," T(2) "," T(3) "],\"more\":{\"block_hash\":[7,{\"token_id\":9}]},"
                                    "\"block_hash\":1}],\"lora_name\":null,\"parent_hash\":null,"
                                    "\"type\":\"stored\"},\"event_id\":0}]");
  cr_assert(holds(&p, CANON_4));
  CLEAN(&p);
  poller_free(&p);
}

Test(polled_events, an_attach_in_the_middle_is_partial) {
  poller p = poller_new();
  poll(&p, "[" STORED(7, null, FIRST) "]");
  cr_assert(holds(&p, CANON_4));
  cr_assert_not(kvrelay_source_complete(&p.f->source, 0));
  poll(&p, "[" STORED(8, 55, SECOND) "]");
  COUNTED(&p, ORPHAN, 1);
  poller_free(&p);
}

Test(polled_events, the_unfinished_block_is_known_and_not_indexed) {
  poller p = poller_new();
  poll(&p,
       "[" STORED(0, null,
                  FIRST ",{\"block_hash\":9,\"tokens\":[" T(4) "]}," BLOCK(10, 5, 6, 7, 8)) "]");
  cr_assert(holds(&p, CANON_4));
  cr_assert_eq(kvrelay_source_stats_get(&p.f->source)->blocks_stored, 1);
  poll(&p, "[" REMOVED(1, "9") "]");
  COUNTED(&p, UNKNOWN_REMOVAL, 0);
  poller_free(&p);
}

/* Its tokens are known, its followers' parent is not. */
Test(polled_events, a_block_without_hash_ends_what_can_be_placed) {
  poller p = poller_new();
  poll(&p, "[" STORED(0, null, FIRST "," BLOCK(null, 4, 5, 6, 7) "," BLOCK(3, 8, 9, 10, 11)) "]");
  cr_assert(holds(&p, CANON_4));
  cr_assert_eq(kvrelay_source_stats_get(&p.f->source)->blocks_stored, 1);
  COUNTED(&p, ORPHAN, 1);
  cr_assert_eq(counted_all(p.f), 1);
  poller_free(&p);
}

Test(polled_events, another_block_size_is_told_with_its_number) {
  poller p = poller_new();
  poll(&p, "[" STORED(0, null,
                      "{\"block_hash\":9,\"tokens\":[" T(0) "," T(1) "," T(2) "," T(3) "," T(
                          4) "," T(5) "]}") "]");
  COUNTED(&p, BLOCK_SIZE_MISMATCH, 1);
  cr_assert_eq(kvrelay_source_stats_get(&p.f->source)->other_block_size, 6u);
  poller_free(&p);
}

Test(polled_events, only_the_largest_window_counts) {
  poller p = poller_new();
#define WINDOW(ID, SIZE, DATA)                                                                     \
  "{\"event_id\":" #ID ",\"window_size\":" #SIZE ",\"data\":{" DATA "}}"
#define ONE "\"type\":\"stored\",\"parent_hash\":null,\"blocks\":[" FIRST "]"
  poll(&p, "[" WINDOW(0, 512, "\"type\":\"created\"") "," WINDOW(
               1, 4096, "\"type\":\"created\"") "," WINDOW(2, 512, ONE) "]");
  cr_assert_not(holds(&p, CANON_4));
  COUNTED(&p, NON_MAIN_ATTENTION_GROUP, 1);
  poll(&p, "[" WINDOW(3, 4096, ONE) "," WINDOW(4, 512,
                                               "\"type\":\"removed\",\"block_hashes\":[-1]") "]");
  cr_assert(holds(&p, CANON_4));
  /* One that was not announced makes the blocks so far another cache's. */
  poll(&p, "[" WINDOW(5, 8192, "\"type\":\"updated\",\"block_hash\":4") "]");
  cr_assert_not(holds(&p, CANON_4));
  poller_free(&p);
}

/* Also of one that had taken the blocks behind a window's change for its first. */
Test(polled_events, another_process_behind_a_larger_window) {
  poller p = poller_new();
  poll(&p, "[" WINDOW(0, 512, ONE) "," WINDOW(1, 8192, ONE) "]");
  cr_assert(holds(&p, CANON_4));
  poll(&p, "[" WINDOW(0, 8192, "\"type\":\"created\"") "]");
  COUNTED(&p, RESTART, 1);
  cr_assert_not(holds(&p, CANON_4));
  cr_assert(kvrelay_source_complete(&p.f->source, 0));
  poller_free(&p);
}

Test(polled_events, ids_that_jump_are_counted_and_ids_that_start_over_are_another_process) {
  poller p = poller_new();
  poll(&p, "[" STORED(0, null, FIRST) "]");
  poll(&p, "[" STORED(5, 18446744073709551615, SECOND) "]");
  COUNTED(&p, GAP, 4);
  cr_assert(holds(&p, CANON_4) && holds(&p, CANON_8));
  poll(&p, "[" REMOVED(9, "1") "," REMOVED(9, "-1") "]"); /* the same number twice */
  COUNTED(&p, EVENT_ID_ORDER, 1);
  cr_assert(holds(&p, CANON_4));
  COUNTED(&p, RESTART, 0);
  poll(&p, "[" STORED(0, null, FIRST) "]");
  COUNTED(&p, RESTART, 1);
  cr_assert(holds(&p, CANON_4));
  cr_assert_not(holds(&p, CANON_8), "of the process before");
  cr_assert(kvrelay_source_complete(&p.f->source, 0));
  poll(&p, "[" STORED(4, -1, SECOND) "]");
  poll(&p, "[" STORED(3, null, FIRST) "]"); /* a third one, whose beginning nobody saw */
  COUNTED(&p, RESTART, 2);
  cr_assert(holds(&p, CANON_4));
  cr_assert_not(holds(&p, CANON_8));
  cr_assert_not(kvrelay_source_complete(&p.f->source, 0));
  COUNTED(&p, LOSS, 0);
  poller_free(&p);
}

Test(polled_events, ranks_have_ids_of_their_own) {
  poller p = poller_new();
#define RANK(ID, R, BLOCKS)                                                                        \
  "{\"event_id\":" #ID ",\"attention_dp_rank\":" #R                                                \
  ",\"data\":{\"type\":\"stored\",\"parent_hash\":"                                                \
  "null,\"blocks\":[" BLOCKS "]}}"
  poll(&p, "[" RANK(0, 0, FIRST) "," RANK(0, 1, FIRST) "," RANK(1, 2, FIRST) "," RANK(
               2, 4294967296,
               FIRST) "," RANK(3, -1, FIRST) "," RANK(4, "x", FIRST) "," RANK(5, null, FIRST) "]");
  cr_assert_eq(owners_of(p.f, CANON_4), 2);
  COUNTED(&p, FOREIGN_RANK, 1);
  COUNTED(&p, MALFORMED_EVENT, 3);
  COUNTED(&p, RESTART, 0);
  poller_free(&p);
}

/* The ranks of one process start over together, even if the first to speak had never spoken. */
Test(polled_events, any_rank_tells_of_another_process) {
  poller p = poller_new();
  poll(&p, "[" RANK(0, 0, FIRST) "," RANK(8, 0, SECOND) "]");
  cr_assert(holds(&p, CANON_4));
  poll(&p, "[" RANK(0, 1, "") "," RANK(0, 0, "") "," RANK(9, 0, "") "," RANK(3, 0, "") "]");
  COUNTED(&p, RESTART, 1);
  COUNTED(&p, EVENT_ID_ORDER, 1);
  cr_assert_not(holds(&p, CANON_4));
  cr_assert(kvrelay_source_complete(&p.f->source, 0));
  poll(&p, "[" RANK(1, 1, "") "," RANK(20, 0, FIRST) "," RANK(2, 0, "") "]");
  COUNTED(&p, RESTART, 1);
  COUNTED(&p, EVENT_ID_ORDER, 2);
  cr_assert(holds(&p, CANON_4), "an odd number within an answer costs only its event");
  poller_free(&p);
}

/* An answer without a number of ours is no beginning: what went before may be anything. */
Test(polled_events, only_a_number_of_ours_tells_of_a_beginning) {
  static const char *const answers[] = {"[" RANK(500, 7, FIRST) "]", "[{}]", "[3]",
                                        "[" RANK(501, 0, FIRST) ","};
  for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
    poller p = poller_new();
    poll(&p, answers[i]);
    poll(&p, "[" RANK(502, 0, FIRST) "]");
    cr_assert(holds(&p, CANON_4));
    cr_assert_not(kvrelay_source_complete(&p.f->source, 0), "%s", answers[i]);
    poller_free(&p);
  }
}

/* Adapters, salts and images hash as they do in a stream. */
Test(polled_events, adapter_salt_and_images) {
  static const char *const blocks[] = {
      "\"lora_name\":\"sql\",\"blocks\":[" FIRST "]",
      "\"lora_name\":\"s\\u0071l\",\"blocks\":[{\"block_hash\":7,\"cache_salt\":\"t\\n\","
      "\"tokens\":[" T(0) "," T(1) "," T(2) "," T(3) "]}]",
      "\"blocks\":[{\"block_hash\":8,\"tokens\":[" T(0) "," T(1) "," T(2) "," T(
          3) "],\"mm_keys\":[{\"type\":\"mm_key\",\"hash\":"
             "\"00112233445566778899aABBccddeeff\",\"start_offset\":0}]}]"};
  const uint8_t image[8] = {0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0};
  const uint64_t seeds[] = {hashfmt_seed((const uint8_t *)"sql", 3, NULL, 0),
                            hashfmt_seed((const uint8_t *)"sql", 3, (const uint8_t *)"t\n", 2),
                            hashfmt_seed(NULL, 0, NULL, 0)};
  for (size_t i = 0; i < 3; i++) {
    poller p = poller_new();
    char json[1024];
    uint8_t bytes[24] = {0};
    for (uint8_t t = 0; t < 4; t++)
      bytes[4 * t] = t;
    memcpy(bytes + 16, image, 8);
    snprintf(json, sizeof json,
             "{\"event_id\":0,\"data\":{\"type\":\"stored\",\"parent_hash\":null,%s}}", blocks[i]);
    poll(&p, json);
    CLEAN(&p);
    cr_assert(holds(&p, hashfmt_hash64(bytes, i == 2 ? 24 : 16, seeds[i])), "%zu", i);
    poller_free(&p);
  }
}

/* each is well-formed JSON and no event that can be read */
static const char *const odd[] = {
    "5",
    "null",
    "\"x\"",
    "true",
    "[]",
    "{}",
    "{\"event_id\":1}",
    "{\"data\":{}}",
    "{\"event_id\":\"1\",\"data\":{}}",
    "{\"event_id\":1.5,\"data\":{}}",
    "{\"event_id\":-2,\"data\":{\"type\":7}}",
    "{\"event_id\":-1,\"data\":{}}",
    "{\"event_id\":9223372036854775808,\"data\":{}}",
    "{\"event_id\":1,\"window_size\":-1,\"data\":{\"type\":\"updated\"}}",
    "{\"event_id\":1,\"window_size\":9,\"data\":5}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"block_hashes\":[99],\"blocks\":[" FIRST "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"removed\",\"block_hashes\":[-1],\"blocks\":[]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"removed\",\"block_hashes\":[-1],\"block_hashes\":[-1]}"
    "}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4,\"tokens\":[{"
    "\"token_id\":0,\"token_id\":1}]}]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4,\"tokens\":[" T(
        0) "],\"mm_keys\":[{\"hash\":\"\\u0010123456789abcdef\"}]}]}}",
    "{\"event_id\":1,\"data\":[]}",
    "{\"event_id\":1,\"data\":{\"type\":7}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\"}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":{}}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[5]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4}]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4,\"tokens\":[0,1]"
    "}]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4,\"tokens\":[{}]}"
    "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[" BLOCK(4, -1, 1, 2, 3) "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[" BLOCK(4, 4294967296, 1, 2,
                                                                       3) "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[" BLOCK(18446744073709551616, 0, 1,
                                                                       2, 3) "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[" BLOCK(-9223372036854775809, 0, 1,
                                                                       2, 3) "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"parent_hash\":\"4\",\"blocks\":[" FIRST "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"lora_name\":4,\"blocks\":[" FIRST "]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4,\"tokens\":[" T(
        0) "],\"mm_keys\":[{\"hash\":\"0011\"}]}]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"stored\",\"blocks\":[{\"block_hash\":4,\"tokens\":[" T(
        0) "," T(1) "," T(2) "," T(3) "],\"mm_keys\":[{\"type\":\"mm_key\",\"hash\":null}]}]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"removed\",\"block_hashes\":4}}",
    "{\"event_id\":1,\"data\":{\"type\":\"removed\",\"block_hashes\":[null]}}",
    "{\"event_id\":1,\"data\":{\"type\":\"removed\",\"block_hashes\":[[-1]]}}"};

Test(polled_events, odd_events_cost_only_themselves) {
  for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
    poller p = poller_new();
    char json[2048];
    snprintf(json, sizeof json, "[" STORED(0, null, FIRST) ",%s," STORED(2, -1, SECOND) "]",
             odd[i]);
    poll(&p, json);
    cr_assert(holds(&p, CANON_4) && holds(&p, CANON_8), "%s", odd[i]);
    poll(&p, "[" STORED(3, null, FIRST) "]");
    cr_assert_eq(counted(p.f, KVRELAY_COUNT_RESTART), 0, "%s", odd[i]);
    cr_assert_eq(counted(p.f, KVRELAY_COUNT_MALFORMED_EVENT), 1, "%s", odd[i]);
    poller_free(&p);
  }
}

Test(polled_events, an_answer_of_odd_things_alone_is_counted) {
  poller p = poller_new();
  poll(&p, "[5,null,[]]");
  COUNTED(&p, MALFORMED_EVENT, 3);
  poller_free(&p);
}

/* What a foreign rank says of windows is not about this pool. */
Test(polled_events, windows_of_foreign_ranks_teach_nothing) {
  poller p = poller_new();
  poll(&p, "[" WINDOW(0, 4096, ONE) "]");
  poll(&p, "[{\"event_id\":1,\"attention_dp_rank\":9,\"window_size\":8192,\"data\":{\"type\":"
           "\"created\"}}]");
  cr_assert(holds(&p, CANON_4));
  COUNTED(&p, FOREIGN_RANK, 1);
  poll(&p, "[" WINDOW(2, 4096, ONE) "]");
  COUNTED(&p, NON_MAIN_ATTENTION_GROUP, 0);
  poller_free(&p);
}

Test(polled_events, events_beyond_the_room_are_skipped_whole) {
  poller p = poller_new();
  char json[8192],
      *at = json + sprintf(json, "[{\"event_id\":0,\"data\":{\"type\":\"stored\",\"blocks\":[");
  for (int i = 0; i < 17; i++) /* 68 tokens */
    at += sprintf(at, "%s" BLOCK(5, 0, 1, 2, 3), i ? "," : "");
  sprintf(at, "]}}," STORED(1, null, FIRST) "]");
  poll(&p, json);
  COUNTED(&p, EVENT_TOO_LARGE, 1);
  cr_assert(holds(&p, CANON_4));
  at = json + sprintf(json, "[{\"event_id\":2,\"data\":{\"type\":\"removed\",\"block_hashes\":[");
  for (int i = 0; i < 81; i++)
    at += sprintf(at, "%s-1", i ? "," : "");
  sprintf(at, "]}}]");
  poll(&p, json);
  COUNTED(&p, EVENT_TOO_LARGE, 2);
  cr_assert(holds(&p, CANON_4));
  poller_free(&p);
}

/* Nothing of an answer is applied before all of it is known to be whole. */
Test(polled_events, an_answer_that_is_cut_anywhere_is_one_lost_batch) {
  static const char whole[] = "[" STORED(1, null, FIRST "," SECOND) "," REMOVED(2, "77") "]";
  for (size_t len = 0; len + 1 < sizeof whole; len++) {
    poller p = poller_new();
    poll_bytes(&p, whole, len);
    cr_assert_eq(kvrelay_source_stats_get(&p.f->source)->blocks_stored, 0, "%zu", len);
    COUNTED(&p, PAYLOAD_MALFORMED, 1);
    poll(&p, whole);
    cr_assert(holds(&p, CANON_8));
    poller_free(&p);
  }
}

/* Any byte may be any other: nothing but counts comes of it. */
Test(polled_events, changed_bytes) {
  static const char whole[] =
      "[" CREATED "," STORED(1, null, FIRST "," SECOND) "," REMOVED(2, "77") "]";
  static const char bytes[] = "\0\"[]{},:0-9ntf\\ \xff";
  char json[sizeof whole];
  for (size_t i = 0; i + 1 < sizeof whole; i++)
    for (size_t k = 0; k + 1 < sizeof bytes; k++) {
      poller p = poller_new();
      memcpy(json, whole, sizeof whole);
      json[i] = bytes[k];
      poll_bytes(&p, json, sizeof whole - 1);
      poll_bytes(&p, json, sizeof whole - 1);
      poller_free(&p);
    }
}

Test(polled_events, nesting_is_bounded) {
  for (size_t deep = 1; deep < 100000; deep = deep < 20 ? deep + 1 : deep * 7) {
    poller p = poller_new();
    const size_t len = 2 * deep;
    char *json = malloc(len);
    memset(json, '[', deep);
    memset(json + deep, ']', deep);
    poll_bytes(&p, json, len);
    COUNTED(&p, PAYLOAD_MALFORMED, deep > KVRELAY_POLLED_DEPTH_MAX);
    free(json);
    poller_free(&p);
  }
}

Test(polled_events, configurations_out_of_range) {
  static const kvrelay_polled_config wrong[] = {{0, 0, 1, 64},
                                                {4, 0, 0, 64},
                                                {4, 0, 65537, 64},
                                                {4, 0, 1, 63},
                                                {4, 0, 1, ((size_t)1 << 28) + 1}};
  kvrelay_polled p;
  char mem[8192];
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    cr_assert_eq(kvrelay_polled_mem_size(&wrong[i]), 0);
    cr_assert_eq(kvrelay_polled_init(&p, &wrong[i], mem, sizeof mem), KVRELAY_ERR_ARG);
  }
  const kvrelay_polled_config good = {4, 0, 1, 64};
  const size_t len = kvrelay_polled_mem_size(&good);
  cr_assert_eq(kvrelay_polled_init(&p, &good, NULL, len), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_polled_init(&p, &good, mem, len - 1), KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_polled_init(&p, &good, mem + 1, len), KVRELAY_OK);
}
