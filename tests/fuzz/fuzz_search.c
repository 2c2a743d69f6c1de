/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_search_rows: any evidence, for one lane and for sixteen together, against the contract: never
 * below a linear scan, exact where hits are contiguous, an answer is a position that missed or the
 * length, no row outside the query, bounded work. Then ckf_search over words that hold keys, where
 * nothing may be lost.
 *
 * SECURITY.md: 2, 4, 12, 15.
 */

#include "ckf.h"
#include "fuzz.h"

enum { LEN_CAP = 700 };

typedef struct evidence {
  uint16_t rows[LEN_CAP];
  size_t len;
  uint64_t probes;
} evidence;

static uint32_t row(void *user, size_t position) {
  evidence *e = user;
  FUZZ_CHECK(position < e->len);
  e->probes++;
  return e->rows[position];
}

static bool hit(const evidence *e, uint32_t lane, size_t position) {
  return e->rows[position] >> lane & 1;
}

/* Whether all that hits stands at the front. */
static bool contiguous(const evidence *e, uint32_t lane, size_t linear) {
  for (size_t i = linear; i < e->len; i++)
    if (hit(e, lane, i))
      return false;
  return true;
}

static void check_lane(const evidence *e, uint32_t lane, uint32_t depth) {
  size_t linear = 0;
  while (linear < e->len && hit(e, lane, linear))
    linear++;
  FUZZ_CHECK(depth <= e->len && depth >= linear);
  FUZZ_CHECK(depth == e->len || !hit(e, lane, depth));
  if (contiguous(e, lane, linear))
    FUZZ_CHECK(depth == linear);
}

static void search(evidence *e, uint32_t lanes) {
  uint32_t depths[CKF_LANES];
  uint64_t asked = 0;
  e->probes = 0;
  for (uint32_t lane = 0; lane < CKF_LANES; lane++)
    depths[lane] = UINT32_C(0xDEADBEEF);
  ckf_search_rows(row, e, e->len, lanes, depths);
  for (uint32_t lane = 0; lane < CKF_LANES; lane++) {
    if (lanes >> lane & 1) {
      check_lane(e, lane, depths[lane]);
      asked++;
    } else {
      FUZZ_CHECK(depths[lane] == UINT32_C(0xDEADBEEF));
    }
  }
  FUZZ_CHECK(e->probes <= asked * (2 * e->len + 16));
}

/* Words of a filter that holds a prefix: whatever else its words are, the prefix is found. */
static void search_words(fuzz_input *in) {
  enum { BUCKETS = 64, KEYS = 64 };
  const ckf_format format = {fuzz_byte(in), BUCKETS};
  uint64_t words[BUCKETS], keys[KEYS];
  ckf_image log[9];
  ckf_filter filter;
  const size_t len = fuzz_below(in, KEYS + 1);
  const size_t held = len ? fuzz_below(in, (uint32_t)len + 1) : 0;
  uint64_t state = fuzz_number(in, 2);
  for (size_t i = 0; i < BUCKETS; i++)
    words[i] = in->left ? fuzz_number(in, 2) * UINT64_C(0x0000000100000001) : 0;
  FUZZ_CHECK(ckf_filter_init(&filter, &format, 8, words, log, NULL) == CKF_OK);
  for (size_t i = 0; i < len; i++)
    keys[i] = ckf_rng_draw(&state);
  for (size_t i = 0; i < held; i++)
    if (ckf_filter_insert(&filter, keys[i]) != CKF_OK)
      return;
  size_t linear = 0;
  while (linear < len && ckf_filter_contains(&filter, keys[linear]))
    linear++;
  const uint32_t depth = ckf_search(&format, words, keys, len);
  FUZZ_CHECK(linear >= held && depth >= linear && depth <= len);
  FUZZ_CHECK(depth == len || !ckf_filter_contains(&filter, keys[depth]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t data_len) {
  fuzz_input in = {data, data_len};
  static evidence e;
  memset(&e, 0, sizeof e);
  e.len = fuzz_number(&in, 2) % (LEN_CAP + 1);
  const uint32_t lanes = (uint32_t)fuzz_number(&in, 2);
  while (in.left > 0 && e.len > 0) { /* ranges that hit, or stop hitting */
    const uint8_t op = fuzz_byte(&in);
    const size_t from = op & 0x40 ? fuzz_below(&in, (uint32_t)e.len) : 0;
    const size_t span = fuzz_number(&in, op & 0x20 ? 1 : 2) % (e.len - from + 1);
    for (size_t i = from; i < from + span; i++)
      e.rows[i] = (uint16_t)(op & 0x80 ? e.rows[i] & ~(1u << op % 16) : e.rows[i] | 1u << op % 16);
  }
  search(&e, lanes);
  for (uint32_t lane = 0; lane < CKF_LANES; lane++)
    search(&e, lanes & 1u << lane);
  search_words(&(fuzz_input){data, data_len});
  return 0;
}
