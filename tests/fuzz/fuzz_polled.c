/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_polled_feed: any bytes as answers of an engine, through a source into a producer. Counted
 * whatever they are, an exact state without damage, and no block that no whole answer had.
 *
 * SECURITY.md: 1, 2, 3, 4, 5, 14.
 *
 * Input: answers with 0xff between them, which is in no JSON.
 */

#include "fuzz.h"
#include "polled_events.h"

enum { BLOCK_SIZE = 2, TOKENS_MAX = 64 };

static uint64_t stored_by(kvrelay_polled *p, kvrelay_source *s, const uint8_t *at, size_t len) {
  const kvrelay_source_stats *stats = kvrelay_source_stats_get(s);
  const uint64_t blocks = stats->blocks_stored;
  const uint64_t lost = stats->counts[KVRELAY_COUNT_PAYLOAD_MALFORMED];
  uint8_t *copy = fuzz_copy(at, len);
  FUZZ_CHECK(kvrelay_polled_feed(p, s, copy, len, 1) == KVRELAY_OK);
  free(copy);
  FUZZ_CHECK(lost == stats->counts[KVRELAY_COUNT_PAYLOAD_MALFORMED] ||
             blocks == stats->blocks_stored);
  return stats->blocks_stored - blocks;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  kvrelay_polled polled;
  kvrelay_source source;
  ckf_producer producer;
  ckf_producer_config pc = ckf_producer_config_default();
  kvrelay_source_config sc = kvrelay_source_config_default();
  const kvrelay_polled_config cfg = {BLOCK_SIZE, 0, 2, TOKENS_MAX};
  pc.filter.expected_blocks = 64;
  pc.tags = true;
  sc.ranks = 2;
  sc.block_size = BLOCK_SIZE;
  sc.partial_memory = 8;
  sc.max_namespaces = 4;
  sc.max_event_blocks = 64;
  void *polled_mem = fuzz_alloc(kvrelay_polled_mem_size(&cfg));
  void *source_mem = fuzz_alloc(kvrelay_source_mem_size(&sc));
  void *producer_mem = fuzz_alloc(ckf_producer_mem_size(&pc));
  FUZZ_CHECK(ckf_producer_init(&producer, &pc, producer_mem, ckf_producer_mem_size(&pc)) == CKF_OK);
  FUZZ_CHECK(kvrelay_source_init(&source, &sc, &producer, source_mem, kvrelay_source_mem_size(&sc),
                                 0) == KVRELAY_OK);
  FUZZ_CHECK(kvrelay_polled_init(&polled, &cfg, polled_mem, kvrelay_polled_mem_size(&cfg)) ==
             KVRELAY_OK);
  for (size_t from = 0, to; from < len; from = to + 1) {
    const uint8_t *end = memchr(data + from, 0xff, len - from);
    to = end == NULL ? len : (size_t)(end - data);
    FUZZ_CHECK(stored_by(&polled, &source, data + from, to - from) <= (to - from) / BLOCK_SIZE);
    FUZZ_CHECK(ckf_producer_check_(&producer) == CKF_OK);
  }
  free(polled_mem);
  free(source_mem);
  free(producer_mem);
  return 0;
}
