/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lives of an engine whose events are polled, beside a model that only knows what the engine holds:
 * answers that are lost, restarts, odd and foreign events, an attach in the middle.  No rank ever
 * has a block that its engine does not have, and a complete one has them all.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/polled_events.h"

/* A prompt of three blocks is a path in a tree whose nodes have four children: those of n are
 * 4 n + 1 .. 4 n + 4, and 0 is the root. */
enum { RANKS = 3, OURS = 2, NODES = 1 + 4 + 16 + 64, BLOCK_SIZE = 4, STEPS = 25, LIVES = 3000 };

typedef struct life {
  uint64_t rng;
  bool own_ids; /* of each rank, else shared */
  uint64_t ids[RANKS];
  bool held[RANKS][4 * NODES + 1];
  bool unheard; /* events that nobody asks for */
  bool hidden;  /* a restart that no answer has told yet */
  /* What a reader knows. */
  int64_t last[OURS]; /* id, -1 = none */
  /* The answer under way. */
  char json[16384];
  size_t len;
  bool tells; /* a rank's first id is not above its last */
  int64_t newest[OURS];
} life;

static uint64_t draw(life *l, uint64_t below) { return ckf_rng_draw(&l->rng) % below; }

static uint64_t external(int node) { return UINT64_MAX - (uint64_t)node * UINT64_C(0x2F5C41D0E5); }

static void add(life *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(life *l, const char *format, ...) {
  va_list list;
  va_start(list, format);
  const int n = vsnprintf(l->json + l->len, sizeof l->json - l->len, format, list);
  va_end(list);
  cr_assert(n >= 0 && (size_t)n < sizeof l->json - l->len, "the answer is too long");
  l->len += (size_t)n;
}

/* A block hash is the same with sign and without. */
static void add_hash(life *l, int node) {
  if (node == 0)
    add(l, "null");
  else if (draw(l, 2))
    add(l, "%" PRIu64, external(node));
  else
    add(l, "%" PRId64, (int64_t)external(node));
}

static void add_block(life *l, int node) {
  add(l, "{\"tokens\":[");
  for (int i = 0; i < BLOCK_SIZE; i++)
    add(l, "%s{\"token_id\":%d}", i ? "," : "", node * BLOCK_SIZE + i);
  add(l, "],\"block_hash\":");
  add_hash(l, node);
  add(l, "}");
}

static void begin_event(life *l, int rank) {
  const uint64_t id = l->ids[l->own_ids ? rank : 0]++;
  if (rank < OURS && !l->unheard) {
    if (l->newest[rank] < 0)
      l->tells |= (int64_t)id <= l->last[rank];
    l->newest[rank] = (int64_t)id;
  }
  add(l, "%s{\"event_id\":%" PRIu64 ",\"attention_dp_rank\":%d,%s\"data\":", l->len > 1 ? "," : "",
      id, rank, draw(l, 2) ? "\"window_size\":4096," : "");
}

/* The part of a prompt that the rank does not have yet. */
static void store(life *l, int rank) {
  int parent = 0, node, left = 1 + (int)draw(l, 3);
  while (left > 0 && l->held[rank][node = 4 * parent + 1 + (int)draw(l, 4)]) {
    parent = node;
    left--;
  }
  if (left == 0)
    return;
  begin_event(l, rank);
  add(l, "{\"type\":\"stored\",\"parent_hash\":");
  add_hash(l, parent);
  add(l, ",\"blocks\":[");
  for (bool more = false;; more = true) {
    add(l, more ? "," : "");
    add_block(l, node);
    l->held[rank][node] = true;
    if (--left == 0)
      break;
    node = 4 * node + 1 + (int)draw(l, 4);
  }
  add(l, "]}}");
}

/* A block without children. */
static void drop(life *l, int rank) {
  const bool *const held = l->held[rank];
  int node = 1 + (int)draw(l, NODES - 1);
  if (!held[node])
    return;
  for (int i = 1; i <= 4;)
    if (held[4 * node + i]) {
      node = 4 * node + i;
      i = 1;
    } else
      i++;
  begin_event(l, rank);
  add(l, "{\"type\":\"removed\",\"block_hashes\":[");
  add_hash(l, node);
  add(l, "]}}");
  l->held[rank][node] = false;
}

static void live(life *l, uint64_t events) {
  static const char *const odd[] = {"5", "{}", "null", "{\"data\":{}}", "{\"event_id\":-3}"};
  l->len = 0;
  l->tells = false;
  for (int i = 0; i < OURS; i++)
    l->newest[i] = -1;
  add(l, "[");
  while (events-- > 0) {
    const int rank = (int)draw(l, RANKS);
    if (draw(l, 12) == 0)
      add(l, "%s%s", l->len > 1 ? "," : "", odd[draw(l, 5)]);
    else if (draw(l, 3))
      store(l, rank);
    else
      drop(l, rank);
  }
  add(l, "]");
}

static void restart(life *l) {
  memset(l->held, 0, sizeof l->held);
  memset(l->ids, 0, sizeof l->ids);
  l->hidden = true;
}

/* Takes note of what an answer told; false: of a restart it told nothing that anybody can see. */
static bool told(life *l, bool whole) {
  bool ours = false, spoke = false;
  for (int i = 0; i < OURS; i++) {
    ours |= l->newest[i] >= 0;
    spoke |= l->last[i] >= 0;
  }
  if (l->hidden && (!whole || (ours && spoke && !l->tells)))
    return false;
  for (int i = 0; whole && i < OURS; i++)
    if (l->newest[i] >= 0 || (l->hidden && ours))
      l->last[i] = l->newest[i];
  l->hidden = l->hidden && !ours;
  return true;
}

static void compare(const life *l, const kvrelay_source *s, ckf_producer *p, uint64_t seed) {
  for (int rank = 0; rank < OURS; rank++) {
    const ckf_member m = {.dp_rank = (uint32_t)rank};
    const bool complete = kvrelay_source_complete(s, m.dp_rank);
    for (int node = 1; node < NODES; node++) {
      const bool found = ckf_producer_find(p, &m, external(node), NULL, NULL);
      cr_assert(found ? l->held[rank][node] : !complete || !l->held[rank][node],
                "life %" PRIu64 ", rank %d, block %d: %s", seed, rank, node,
                found ? "of another time" : "missing");
    }
  }
}

/* Returns how often a rank was complete. */
static unsigned one_life(uint64_t seed) {
  static life l;
  kvrelay_polled polled;
  kvrelay_source source;
  ckf_producer producer;
  ckf_producer_config pc = ckf_producer_config_default();
  kvrelay_source_config sc = kvrelay_source_config_default();
  const kvrelay_polled_config cfg = {BLOCK_SIZE, 0, OURS, 64};
  unsigned complete = 0;
  pc.filter.expected_blocks = 512;
  pc.tags = true;
  sc.ranks = OURS;
  sc.block_size = BLOCK_SIZE;
  sc.partial_memory = sc.max_namespaces = 16;
  const size_t polled_len = kvrelay_polled_mem_size(&cfg);
  const size_t source_len = kvrelay_source_mem_size(&sc);
  const size_t producer_len = ckf_producer_mem_size(&pc);
  void *const mem[] = {malloc(polled_len), malloc(source_len), malloc(producer_len)};
  cr_assert_eq(ckf_producer_init(&producer, &pc, mem[2], producer_len), CKF_OK);
  cr_assert_eq(kvrelay_source_init(&source, &sc, &producer, mem[1], source_len, 0), KVRELAY_OK);
  cr_assert_eq(kvrelay_polled_init(&polled, &cfg, mem[0], polled_len), KVRELAY_OK);
  memset(&l, 0, sizeof l);
  l.rng = seed;
  l.own_ids = draw(&l, 2);
  l.last[0] = l.last[1] = -1;
  l.unheard = true;
  if (!l.own_ids) /* else a rank that begins with 0 would speak for one that does not */
    live(&l, draw(&l, 10));
  l.unheard = false;
  for (int step = 0; step < STEPS; step++) {
    if (draw(&l, 8) == 0)
      restart(&l);
    live(&l, draw(&l, 8));
    const bool whole = draw(&l, 10) != 0;
    if (!told(&l, whole))
      break;
    const size_t len = whole ? l.len : (size_t)draw(&l, l.len);
    cr_assert_eq(kvrelay_polled_feed(&polled, &source, (uint8_t *)l.json, len, 1), KVRELAY_OK);
    if (!l.hidden)
      compare(&l, &source, &producer, seed);
    complete += kvrelay_source_complete(&source, 0) + kvrelay_source_complete(&source, 1);
  }
  cr_assert_eq(ckf_producer_check_(&producer), CKF_OK);
  for (int i = 0; i < 3; i++)
    free(mem[i]);
  return complete;
}

Test(polled_model, lives_beside_what_the_engine_holds) {
  unsigned complete = 0;
  for (uint64_t seed = 1; seed <= LIVES; seed++)
    complete += one_life(seed);
  cr_assert_gt(complete, LIVES, "too little is complete to tell");
}
