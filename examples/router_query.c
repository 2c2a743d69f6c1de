/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A router between three data centres: it receives their frames, keeps their filters side by side
 * in one table, and asks which one holds the longest cached prefix of a prompt.
 *
 *   cc -I.. router_query.c && ./a.out
 */

#define CKF_IMPLEMENTATION
#define HASHFMT_IMPLEMENTATION
#include "data_centre.h"

enum { CENTRES = 3 };

typedef struct router {
  ckf_table table;
  void *memory;
  ckf_lane lanes[CENTRES]; /* the writers; many threads may ask meanwhile */
  ckf_lease leases[CENTRES];
  ckf_identity identities[CENTRES];
  ckf_assembly assemblies[CENTRES];
  uint64_t *words[CENTRES]; /* a snapshot while it arrives */
} router;

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

/* One frame from the network. Whatever is wrong with it, the lane stays as it was or stops being
 * ready; the data centre has to start over with a snapshot then. */
static void router_receives(void *user, unsigned lane, const uint8_t *frame, size_t len) {
  router *const r = (router *)user;
  const ckf_identity *const identity = &r->identities[lane];
  static ckf_image images[CKF_CBI1_MAX_IMAGES];
  ckf_cbi1_frame view;
  ckf_lane_outcome outcome;
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
  } else {
    for (uint32_t i = 0; i < view.image_count; i++)
      images[i] = ckf_cbi1_image(&view, i);
    outcome = ckf_lane_apply_delta(&r->lanes[lane], identity, &r->leases[lane], view.base_epoch,
                                   view.epoch, images, view.image_count);
  }
  printf("lane %u: %s, %zu bytes\n", lane, ckf_lane_result_name(outcome.result), len);
}

static void show(const char *what, const ckf_matches *matches, size_t blocks) {
  unsigned best = 0;
  printf("%s, %zu blocks:", what, blocks);
  for (unsigned i = 0; i < CENTRES; i++) {
    if (matches->lanes >> i & 1)
      printf(" %u", (unsigned)matches->depths[i]);
    else
      printf(" unknown"); /* which is not 0 */
    best = matches->depths[i] > matches->depths[best] ? i : best;
  }
  printf(" -> lane %u\n", best);
}

int main(void) {
  static router r;
  static data_centre centres[CENTRES];
  static uint32_t tokens[MAX_BLOCKS * BLOCK_SIZE];
  static uint64_t locals[MAX_BLOCKS], keys[MAX_BLOCKS];
  size_t blocks;
  ckf_query query;
  ckf_matches matches;

  for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++)
    tokens[i] = (uint32_t)(i * 2654435761u % 128000);
  router_open(&r);
  for (unsigned i = 0; i < CENTRES; i++)
    data_centre_open(&centres[i], 100 + i);
  data_centre_caches(&centres[0], tokens, 0, 40);
  data_centre_caches(&centres[1], tokens, 0, 300);
  data_centre_sends_snapshot(&centres[0], router_receives, &r, 0);
  data_centre_sends_snapshot(&centres[1], router_receives, &r, 1);

  /* The first turn. Local hashes first; sequence hashes are made while the search wants them. */
  need(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, BLOCK_SIZE, hashfmt_seed(NULL, 0, NULL, 0), tokens,
                      400 * BLOCK_SIZE, locals, NULL, MAX_BLOCKS, &blocks) == HASHFMT_OK,
       "hashes");
  ckf_query_init(&query, locals, blocks, keys, 0);
  need(ckf_table_find(&r.table, &query, &matches) == CKF_OK, "no lane is ready");
  show("first turn", &matches, blocks);
  need(matches.depths[0] == 40 && matches.depths[1] == 300 && matches.lanes == 3, "wrong depths");

  /* It ran on lane 1, and its engine tells what it has cached since. */
  data_centre_caches(&centres[1], tokens, 300, 450);
  data_centre_sends_delta(&centres[1], router_receives, &r, 1);
  data_centre_sends_snapshot(&centres[2], router_receives, &r, 2);

  /* The next turn is longer; hashes and depths of the last one are still there, so only the blocks
   * behind them are hashed. */
  const size_t known = ckf_query_known(&query), old = blocks;
  need(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, BLOCK_SIZE, hashfmt_seed(NULL, 0, NULL, 0),
                      tokens + old * BLOCK_SIZE, (500 - old) * BLOCK_SIZE, locals + old, NULL,
                      MAX_BLOCKS - old, &blocks) == HASHFMT_OK,
       "hashes");
  blocks += old;
  ckf_query_init(&query, locals, blocks, keys, known);
  need(ckf_table_find_again(&r.table, &query, &matches) == CKF_OK, "no lane is ready");
  show("next turn", &matches, blocks);
  need(matches.depths[0] == 40 && matches.depths[1] == 450 && matches.lanes == 7, "wrong depths");

  for (unsigned i = 0; i < CENTRES; i++) {
    ckf_lane_release(&r.lanes[i]);
    free(r.words[i]);
    free(centres[i].memory);
  }
  free(r.memory);
  return 0;
}
