/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_engine_batch_begin and _next: any bytes as a payload of an engine. Not more events than
 * were promised, none with lists longer than its bytes, the same again from the same bytes.
 *
 * SECURITY.md: 1, 2, 3, 4.
 *
 * Input: the payload.
 */

#include "engine_events.h"
#include "fuzz.h"

enum { TOKENS_MAX = 256 };

/* Reads all that is lent, so that a sanitizer sees what is not there. */
static uint64_t sum(const kvrelay_engine_event *ev, size_t payload_len) {
  uint64_t total = (uint64_t)ev->type;
  FUZZ_CHECK(ev->externals_len <= payload_len);
  FUZZ_CHECK(ev->tokens_len <= payload_len && ev->tokens_len <= TOKENS_MAX);
  for (size_t i = 0; i < ev->externals_len; i++)
    total = total * 31 + ev->externals[i];
  for (size_t i = 0; i < ev->tokens_len; i++)
    total = total * 31 + ev->tokens[i];
  return total;
}

static uint64_t run(kvrelay_engine_decoder *d, const uint8_t *payload, size_t len, int *rc) {
  kvrelay_engine_batch batch;
  kvrelay_engine_event ev;
  uint64_t total = 0;
  size_t events = 0;
  *rc = kvrelay_engine_batch_begin(d, payload, len, &batch);
  if (*rc != KVRELAY_OK) {
    FUZZ_CHECK(*rc == KVRELAY_ERR_TRUNCATED || *rc == KVRELAY_ERR_MALFORMED ||
               *rc == KVRELAY_ERR_LIMIT);
    return 0;
  }
  FUZZ_CHECK(batch.events <= len && batch.trailing_bytes < len);
  while (kvrelay_engine_batch_next(d, &ev)) {
    total = total * 31 + sum(&ev, len);
    events++;
  }
  FUZZ_CHECK(events == batch.events);
  FUZZ_CHECK(!kvrelay_engine_batch_next(d, &ev));
  return total;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  kvrelay_engine_decoder d;
  const size_t mem_len = kvrelay_engine_decoder_mem_size(TOKENS_MAX);
  void *mem = fuzz_alloc(mem_len);
  uint8_t *payload = fuzz_copy(data, len);
  int first, second;
  FUZZ_CHECK(kvrelay_engine_decoder_init(&d, TOKENS_MAX, mem, mem_len) == KVRELAY_OK);
  const uint64_t once = run(&d, payload, len, &first);
  FUZZ_CHECK(run(&d, payload, len, &second) == once && first == second);
  free(payload);
  free(mem);
  return 0;
}
