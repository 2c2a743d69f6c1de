/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A router between three data centres: it receives their frames, keeps their filters side by side
 * in one table, and asks which one holds the longest cached prefix of a prompt.
 *
 *   cc -I.. router_query.c && ./a.out
 */

#include <string.h>

#define CKF_IMPLEMENTATION
#define HASHFMT_IMPLEMENTATION
#include "data_centre.h"

enum { CENTRES = 3, HASH_FORMAT = HASHFMT_FORMAT_STANDARD };

typedef struct router {
  ckf_table table;
  void *memory;
  ckf_lane lanes[CENTRES]; /* the writers; many threads may ask meanwhile */
  ckf_lease leases[CENTRES];
  ckf_identity identities[CENTRES];
  ckf_assembly assemblies[CENTRES];
  uint64_t *words[CENTRES];     /* a snapshot while it arrives */
  bool wants_snapshot[CENTRES]; /* its data centre has to be asked for one */
} router;

/* A prompt, and what is known of it from turn to turn of a conversation. Another seed, or a token
 * that has changed, makes another prompt of it. */
typedef struct prompt {
  const uint32_t *tokens;
  size_t token_count, blocks;
  uint64_t locals[MAX_BLOCKS], keys[MAX_BLOCKS];
  ckf_query query;
  ckf_matches matches;
} prompt;

/* Hashes the blocks that a search asks for, and no others: one, when nobody has the prompt. */
static void prompt_hashes(void *user, uint64_t *locals, size_t from, size_t to) {
  const prompt *const p = (const prompt *)user;
  size_t all;
  const int err = hashfmt_blocks(HASH_FORMAT, BLOCK_SIZE, hashfmt_seed(NULL, 0, NULL, 0),
                                 p->tokens + from * BLOCK_SIZE, p->token_count - from * BLOCK_SIZE,
                                 locals + from, NULL, to - from, &all);
  /* NOSPACE: there are more blocks than were asked for. All tokens that are left are handed over,
   * not only those of these blocks: with HASHFMT_FORMAT_EAGLE a block needs one token of the next.
   */
  need(err == HASHFMT_OK || err == HASHFMT_ERR_NOSPACE, "hashes");
}

/* Begins the next turn, with all tokens; those of the turn before have to be a prefix of them. */
static void prompt_grows(prompt *p, const uint32_t *tokens, size_t token_count) {
  const size_t known = ckf_query_known(&p->query);
  p->tokens = tokens;
  p->token_count = token_count;
  p->blocks = (size_t)hashfmt_block_count(HASH_FORMAT, BLOCK_SIZE, token_count);
  ckf_query_init_lazy(&p->query, p->locals, p->blocks, p->keys, known, prompt_hashes, p);
}

static void router_open(router *r) {
  const ckf_config cfg = agreed_config();
  ckf_manifest manifest;
  memset(&manifest, 0, sizeof manifest);
  memset(r, 0, sizeof *r);
  manifest.consumer_instance = 1;
  manifest.format.seed = cfg.seed;
  need(ckf_config_check(&cfg, &manifest.format.bucket_count) == CKF_OK, "configuration");
  for (unsigned i = 0; i < CENTRES; i++) {
    manifest.configured |= 1u << i;
    manifest.pools[i].dc_id = 100 + i;
  }

  /* The table says how much memory it needs; it never takes more. */
  const size_t len = ckf_table_mem_size(&manifest);
  r->memory = malloc(len);
  need(r->memory != NULL, "no memory");
  need(ckf_table_init(&r->table, &manifest, 2, r->memory, len) == CKF_OK, "table");
  printf("%u lanes of %u buckets: %zu bytes\n", CENTRES, (unsigned)manifest.format.bucket_count,
         len);

  for (unsigned i = 0; i < CENTRES; i++) {
    const size_t count = (size_t)manifest.format.bucket_count;
    const ckf_lease lease = {manifest.consumer_instance, (uint8_t)i, 1};
    r->leases[i] = lease;
    r->identities[i].pool = manifest.pools[i];
    r->identities[i].format = manifest.format;
    r->words[i] = (uint64_t *)malloc(count * sizeof(uint64_t));
    need(r->words[i] != NULL, "no memory");
    need(ckf_lane_claim(&r->lanes[i], &r->table, i) == CKF_OK, "claim");
    need(ckf_lane_assign(&r->lanes[i], &r->identities[i], &r->leases[i]) == CKF_OK, "assign");
    need(ckf_assembly_init(&r->assemblies[i], &manifest.format, r->words[i], count) == CKF_OK,
         "assembly");
  }
}

static void router_close(router *r) {
  for (unsigned i = 0; i < CENTRES; i++) {
    ckf_lane_release(&r->lanes[i]);
    free(r->words[i]);
  }
  free(r->memory);
}

/* One frame from the network. A frame that is refused leaves the lane as it was; the delta that it
 * may have been is missed by the next one. A lane that is deactivated, as by a delta that does not
 * continue what is there, is not asked any more until the snapshot comes that is to be asked for;
 * deltas until then are for nothing. */
static void router_receives(void *user, unsigned lane, const uint8_t *frame, size_t len) {
  router *const r = (router *)user;
  const ckf_identity *const identity = &r->identities[lane];
  static ckf_image images[CKF_CBI1_MAX_IMAGES];
  ckf_cbi1_frame view;
  ckf_lane_outcome outcome;
  size_t bytes = len;
  const int err = ckf_cbi1_decode(&identity->format, frame, len, &view);
  if (err != CKF_OK || view.dc_id != identity->pool.dc_id) {
    fprintf(stderr, "lane %u: frame refused: %s\n", lane,
            err != CKF_OK ? ckf_strerror(err) : "of another data centre");
    return;
  }
  if (view.kind == CKF_CBI1_SNAPSHOT) {
    uint64_t sequence;
    if (ckf_assembly_absorb(&r->assemblies[lane], &view, &sequence) != 1)
      return; /* more chunks to come, or out of order and started over */
    outcome = ckf_lane_install(&r->lanes[lane], identity, &r->leases[lane], sequence,
                               r->words[lane], (size_t)identity->format.bucket_count);
    bytes = (size_t)identity->format.bucket_count * sizeof(uint64_t); /* of all chunks */
  } else {
    for (uint32_t i = 0; i < view.image_count; i++)
      images[i] = ckf_cbi1_image(&view, i);
    outcome = ckf_lane_apply_delta(&r->lanes[lane], identity, &r->leases[lane], view.base_epoch,
                                   view.epoch, images, view.image_count);
  }
  printf("lane %u: %s, %zu bytes", lane, ckf_lane_result_name(outcome.result), bytes);
  if (outcome.result == CKF_LANE_DEACTIVATED) {
    printf(": %s, %s", ckf_lane_fault_name(outcome.fault), ckf_lane_action_name(outcome.action));
    r->wants_snapshot[lane] = true; /* whichever of the two actions it is */
  } else if (outcome.result == CKF_LANE_SNAPSHOT_INSTALLED) {
    r->wants_snapshot[lane] = false;
  }
  printf("\n");
}

/* What the network does now and then. */
static void router_loses(void *user, unsigned lane, const uint8_t *frame, size_t len) {
  (void)user;
  (void)frame;
  printf("lane %u: a delta of %zu bytes is lost\n", lane, len);
}

static void show(const char *what, const prompt *p) {
  const ckf_matches *const m = &p->matches;
  unsigned best = CENTRES;
  printf("%s, %zu blocks:", what, p->blocks);
  for (unsigned i = 0; i < CENTRES; i++) {
    if (!(m->lanes >> i & 1)) {
      printf(" unknown"); /* which is not 0 */
      continue;
    }
    printf(" %u", (unsigned)m->depths[i]);
    if (m->depths[i] > (best < CENTRES ? m->depths[best] : 0))
      best = i;
  }
  if (best < CENTRES)
    printf(" -> lane %u", best);
  else
    printf(" -> any");
  printf("; %zu blocks hashed\n", ckf_query_known(&p->query));
}

/* As long as the conversation that it follows. */
int main(void) {
  static router r;
  static data_centre centres[CENTRES];
  static uint32_t tokens[MAX_BLOCKS * BLOCK_SIZE], others[MAX_BLOCKS * BLOCK_SIZE];
  static prompt talk, news;

  for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
    tokens[i] = (uint32_t)(i * 2654435761u % 128000);
    others[i] = (uint32_t)(i * 40503u % 127997);
  }
  router_open(&r);
  for (unsigned i = 0; i < CENTRES; i++)
    data_centre_open(&centres[i], 100 + i, HASH_FORMAT);
  data_centre_caches(&centres[0], tokens, 0, 40);
  data_centre_caches(&centres[1], tokens, 0, 300);
  data_centre_sends_snapshot(&centres[0], router_receives, &r, 0);
  data_centre_sends_snapshot(&centres[1], router_receives, &r, 1);

  prompt_grows(&talk, tokens, 400 * BLOCK_SIZE);
  need(ckf_table_find(&r.table, &talk.query, &talk.matches) == CKF_OK, "no lane is ready");
  show("first turn", &talk);
  need(talk.matches.depths[0] == 40 && talk.matches.depths[1] == 300 && talk.matches.lanes == 3,
       "wrong depths");

  /* A prompt that nobody has. */
  prompt_grows(&news, others, 400 * BLOCK_SIZE);
  need(ckf_table_find(&r.table, &news.query, &news.matches) == CKF_OK, "no lane is ready");
  show("another prompt", &news);
  need(news.matches.depths[0] == 0 && news.matches.depths[1] == 0, "wrong depths");

  /* The talk ran on lane 1, and its engine tells what it has cached since. One delta is lost, so
   * the next one does not fit and the lane is unknown until its snapshot comes. */
  data_centre_caches(&centres[1], tokens, 300, 400);
  data_centre_sends_delta(&centres[1], router_loses, &r, 1);
  data_centre_caches(&centres[1], tokens, 400, 430);
  data_centre_sends_delta(&centres[1], router_receives, &r, 1);
  data_centre_caches(&centres[1], tokens, 430, 450);
  data_centre_sends_delta(&centres[1], router_receives, &r, 1);
  prompt_grows(&talk, tokens, 500 * BLOCK_SIZE);
  need(ckf_table_find_again(&r.table, &talk.query, &talk.matches) == CKF_OK, "no lane is ready");
  show("without lane 1", &talk);
  need(talk.matches.depths[0] == 40 && talk.matches.lanes == 1, "wrong depths");

  data_centre_sends_snapshot(&centres[2], router_receives, &r, 2);
  for (unsigned i = 0; i < CENTRES; i++)
    if (r.wants_snapshot[i])
      data_centre_sends_snapshot(&centres[i], router_receives, &r, i);

  /* The same turn, around the depths that are known by now. */
  need(ckf_table_find_again(&r.table, &talk.query, &talk.matches) == CKF_OK, "no lane is ready");
  show("next turn", &talk);
  need(talk.matches.depths[0] == 40 && talk.matches.depths[1] == 450 && talk.matches.lanes == 7,
       "wrong depths");

  router_close(&r);
  for (unsigned i = 0; i < CENTRES; i++)
    free(centres[i].memory);
  return 0;
}
