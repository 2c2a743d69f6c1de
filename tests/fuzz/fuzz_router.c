/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_router_batch_begin, _answer_begin and _next: any bytes as a worker's message or answer,
 * and what comes out of them through a router into a producer. Events within their bounds, and an
 * exact state without damage.
 *
 * SECURITY.md: 1, 2, 3, 4, 5, 14.
 *
 * Input: a byte that is odd for an answer, then the bytes.
 */

#include "fuzz.h"
#include "router_events.h"

enum { BLOCKS_MAX = 64 };

typedef struct life {
  kvrelay_router_decoder decoder;
  kvrelay_router router;
  ckf_producer producer, next;
  size_t producer_len;
  void *decoder_mem, *router_mem, *producer_mem, *next_mem;
} life;

static void check_event(const kvrelay_router_event *ev, int more, size_t len) {
  FUZZ_CHECK(more == 1 || more == KVRELAY_ERR_MALFORMED || more == KVRELAY_ERR_LIMIT);
  FUZZ_CHECK(ev->blocks_len <= BLOCKS_MAX && ev->externals_len <= BLOCKS_MAX);
  FUZZ_CHECK(ev->blocks_len <= len && ev->externals_len <= len);
}

static void run_message(life *l, const uint8_t *bytes, size_t len) {
  kvrelay_router_event ev;
  if (kvrelay_router_batch_begin(&l->decoder, bytes, len) != KVRELAY_OK)
    return;
  for (int more; (more = kvrelay_router_batch_next(&l->decoder, &ev)) != 0;) {
    check_event(&ev, more, len);
    if (more == 1)
      FUZZ_CHECK(kvrelay_router_live(&l->router, &ev, 0) == KVRELAY_OK);
  }
}

static void run_answer(life *l, const uint8_t *bytes, size_t len) {
  kvrelay_router_answer answer;
  kvrelay_router_event ev;
  bool whole;
  uint64_t first;
  (void)kvrelay_router_request(&l->router, &whole, &first);
  if (kvrelay_router_answer_begin(&l->decoder, bytes, len, &answer) != KVRELAY_OK)
    return;
  bool dump = answer.kind == KVRELAY_ROUTER_ANSWER_DUMP;
  if (dump)
    FUZZ_CHECK(kvrelay_router_dump_begin(&l->router, &l->next, l->next_mem, l->producer_len, 0) ==
               KVRELAY_OK);
  for (int more; (more = kvrelay_router_batch_next(&l->decoder, &ev)) != 0;) {
    check_event(&ev, more, len);
    if (more == 1 && dump)
      kvrelay_router_dump_event(&l->router, &ev);
    else if (more == 1)
      FUZZ_CHECK(kvrelay_router_again(&l->router, &ev, 0) == KVRELAY_OK);
  }
  if (dump)
    FUZZ_CHECK(kvrelay_router_dump_end(&l->router, answer.last_event_id, 0) >= 0);
  else
    FUZZ_CHECK(kvrelay_router_again_end(&l->router, answer.last_event_id, 0) == KVRELAY_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  life l;
  fuzz_input in = {data, len};
  const bool answer = fuzz_bit(&in);
  uint8_t *bytes = fuzz_copy(in.at, in.left);
  ckf_producer_config pc = ckf_producer_config_default();
  kvrelay_router_config cfg = kvrelay_router_config_default();
  pc.filter.expected_blocks = 64;
  cfg.worker_id = UINT64_C(14376672764556661439); /* of the recorded messages */
  cfg.hold_events = 8;
  cfg.hold_bytes = 1024;
  cfg.recoverable = answer;
  l.producer_len = ckf_producer_mem_size(&pc);
  l.producer_mem = fuzz_alloc(l.producer_len);
  l.next_mem = fuzz_alloc(l.producer_len);
  l.router_mem = fuzz_alloc(kvrelay_router_mem_size(&cfg));
  l.decoder_mem = fuzz_alloc(kvrelay_router_decoder_mem_size(BLOCKS_MAX));
  FUZZ_CHECK(ckf_producer_init(&l.producer, &pc, l.producer_mem, l.producer_len) == CKF_OK);
  FUZZ_CHECK(kvrelay_router_init(&l.router, &cfg, &l.producer, l.router_mem,
                                 kvrelay_router_mem_size(&cfg), 0) == KVRELAY_OK);
  FUZZ_CHECK(kvrelay_router_decoder_init(&l.decoder, BLOCKS_MAX, l.decoder_mem,
                                         kvrelay_router_decoder_mem_size(BLOCKS_MAX)) ==
             KVRELAY_OK);
  if (answer)
    run_answer(&l, bytes, in.left);
  else
    run_message(&l, bytes, in.left);
  FUZZ_CHECK(ckf_producer_check_(&l.producer) == CKF_OK);
  free(bytes);
  free(l.producer_mem);
  free(l.next_mem);
  free(l.router_mem);
  free(l.decoder_mem);
  return 0;
}
