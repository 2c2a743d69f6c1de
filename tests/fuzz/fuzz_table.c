/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ckf_table and ckf_lane: claims, assignments, snapshots, deltas, drains and withdrawals of four
 * lanes in any order, good and bad, against the tables of outcomes row by row; words against plain
 * arrays; every query against a linear scan of each lane.
 *
 * SECURITY.md: 2, 4, 5, 6, 7, 9, 12, 15.
 */

#include "ckf.h"
#include "fuzz.h"

enum { LANES = 4, BUCKETS = 16, IMAGES = 8, PROMPT = 24, CONSUMER = 5 };

typedef struct lane_model {
  ckf_identity identity;
  ckf_lease lease;
  uint64_t words[BUCKETS], installed, last_epoch;
  bool claimed, assigned, epoch_known, ready;
} lane_model;

typedef struct both {
  ckf_manifest manifest;
  ckf_table table;
  ckf_lane lanes[LANES];
  lane_model models[LANES];
  uint32_t ready; /* what readers see */
} both;

/* ---- what comes in ---- */

static ckf_identity read_identity(fuzz_input *in, const both *x, uint32_t number) {
  const uint8_t shape = fuzz_byte(in);
  ckf_identity identity;
  memset(&identity, 0, sizeof identity);
  identity.pool = x->manifest.pools[shape >= 0xF0 ? (number + 1) % LANES : number];
  identity.format = x->manifest.format;
  identity.producer_incarnation = shape & 8 && shape >= 0xE0 ? 2 : 1;
  identity.layout_generation = shape & 4 && shape >= 0xE0 ? 2 : 1;
  identity.format.seed += shape >= 0xE0 && (shape & 3) == 1;
  identity.format.bucket_count <<= shape >= 0xE0 && (shape & 3) == 2;
  return identity;
}

static ckf_lease read_lease(fuzz_input *in, uint32_t number) {
  const uint8_t shape = fuzz_byte(in);
  return (ckf_lease){CONSUMER + (shape >= 0xF8), (uint8_t)(number + (shape % 32 == 31)),
                     shape / 8 % 4};
}

static bool same_domain(const ckf_indexer_domain *a, const ckf_indexer_domain *b) {
  return memcmp(a->semantics_digest, b->semantics_digest, 16) == 0 &&
         memcmp(a->routing_digest, b->routing_digest, 16) == 0 &&
         a->semantics_source == b->semantics_source && a->routing_source == b->routing_source;
}

static bool same_format(const ckf_format *a, const ckf_format *b) {
  return a->seed == b->seed && a->bucket_count == b->bucket_count;
}

static bool same_identity(const ckf_identity *a, const ckf_identity *b) {
  return same_domain(&a->pool.domain, &b->pool.domain) && a->pool.dc_id == b->pool.dc_id &&
         a->producer_incarnation == b->producer_incarnation &&
         a->layout_generation == b->layout_generation && same_format(&a->format, &b->format);
}

static bool holds(const lane_model *m, const ckf_lease *lease) {
  return m->assigned && m->lease.consumer_instance == lease->consumer_instance &&
         m->lease.physical_lane == lease->physical_lane &&
         m->lease.assignment_epoch == lease->assignment_epoch;
}

/* ---- the rows ---- */

static ckf_lane_outcome outcome(enum ckf_lane_result result, uint64_t a, uint64_t b) {
  return (ckf_lane_outcome){result, CKF_FAULT_NONE, CKF_ACTION_NONE, a, b};
}

static void withdraw(both *x, uint32_t number) {
  x->models[number].ready = false;
  x->ready &= ~(1u << number);
}

static ckf_lane_outcome fault(both *x, uint32_t number, enum ckf_lane_fault why, uint64_t a,
                              uint64_t b) {
  withdraw(x, number);
  return (ckf_lane_outcome){CKF_LANE_DEACTIVATED, why, CKF_ACTION_DEACTIVATE_AND_SNAPSHOT, a, b};
}

static int model_assign(both *x, uint32_t number, const ckf_identity *identity,
                        const ckf_lease *lease) {
  lane_model *m = &x->models[number];
  if (lease->consumer_instance != CONSUMER)
    return CKF_ERR_WRONG_CONSUMER;
  if (lease->physical_lane != number)
    return CKF_ERR_WRONG_LANE;
  if (identity->pool.dc_id != x->manifest.pools[number].dc_id)
    return CKF_ERR_WRONG_OWNER;
  if (!same_format(&identity->format, &x->manifest.format))
    return CKF_ERR_WRONG_FORMAT;
  if (m->epoch_known && lease->assignment_epoch <= m->last_epoch)
    return CKF_ERR_STALE_EPOCH;
  withdraw(x, number);
  m->identity = *identity;
  m->lease = *lease;
  m->last_epoch = lease->assignment_epoch;
  m->assigned = m->epoch_known = true;
  m->installed = 0;
  return CKF_OK;
}

static ckf_lane_outcome model_install(both *x, uint32_t number, const ckf_identity *identity,
                                      const ckf_lease *lease, uint64_t sequence,
                                      const uint64_t *words, size_t n) {
  lane_model *m = &x->models[number];
  const bool ready = m->ready;
  ckf_lane_outcome out;
  if (!holds(m, lease))
    return outcome(CKF_LANE_IGNORED_FOREIGN_LEASE, 0, 0);
  if (!same_identity(identity, &m->identity)) {
    out = fault(x, number, CKF_FAULT_WRONG_IDENTITY, 0, 0);
  } else if (ready && sequence <= m->installed) {
    return outcome(CKF_LANE_IGNORED_STALE, m->installed, 0);
  } else if (n != BUCKETS) {
    out = fault(x, number, CKF_FAULT_SNAPSHOT_BUCKET_COUNT, BUCKETS, n);
  } else if (ready) {
    return fault(x, number, CKF_FAULT_SNAPSHOT_WHILE_READY, m->installed, sequence);
  } else {
    memcpy(m->words, words, sizeof m->words);
    m->installed = sequence;
    m->ready = true;
    x->ready |= 1u << number;
    return outcome(CKF_LANE_SNAPSHOT_INSTALLED, sequence, 0);
  }
  out.action = ready ? CKF_ACTION_DEACTIVATE_AND_SNAPSHOT : CKF_ACTION_RETRY_SNAPSHOT;
  return out;
}

static ckf_lane_outcome model_delta(both *x, uint32_t number, const ckf_identity *identity,
                                    const ckf_lease *lease, uint64_t base, uint64_t sequence,
                                    const ckf_image *images, size_t n) {
  lane_model *m = &x->models[number];
  if (!holds(m, lease))
    return outcome(CKF_LANE_IGNORED_FOREIGN_LEASE, 0, 0);
  if (!same_identity(identity, &m->identity))
    return fault(x, number, CKF_FAULT_WRONG_IDENTITY, 0, 0);
  if (!m->ready)
    return outcome(CKF_LANE_AWAITING_SNAPSHOT, 0, 0);
  if (sequence <= m->installed)
    return outcome(CKF_LANE_IGNORED_STALE, m->installed, 0);
  if (base != m->installed)
    return fault(x, number, CKF_FAULT_BASE_MISMATCH, m->installed, base);
  if (sequence != base + 1)
    return fault(x, number, CKF_FAULT_NON_CONTIGUOUS, base, sequence);
  if (n == 0)
    return fault(x, number, CKF_FAULT_EMPTY_DELTA, 0, 0);
  for (size_t i = 0; i < n; i++) {
    if (images[i].bucket >= BUCKETS)
      return fault(x, number, CKF_FAULT_IMAGE_INDEX, images[i].bucket, 0);
    for (size_t j = 0; j < i; j++)
      if (images[i].bucket == images[j].bucket)
        return fault(x, number, CKF_FAULT_DUPLICATE_IMAGE, images[i].bucket, 0);
  }
  for (size_t i = 0; i < n; i++)
    m->words[images[i].bucket] = images[i].word;
  m->installed = sequence;
  return outcome(CKF_LANE_DELTA_APPLIED, sequence, n);
}

static ckf_lane_outcome model_drain(both *x, uint32_t number, const ckf_lease *lease,
                                    uint64_t expected) {
  const lane_model *m = &x->models[number];
  if (!holds(m, lease))
    return outcome(CKF_LANE_IGNORED_FOREIGN_LEASE, 0, 0);
  if (m->ready && m->installed == expected)
    return outcome(CKF_LANE_DRAIN_ACKNOWLEDGED, expected, 0);
  return fault(x, number, CKF_FAULT_TERMINAL_MISMATCH, expected,
               m->ready ? m->installed : UINT64_MAX);
}

static void check_outcome(ckf_lane_outcome got, ckf_lane_outcome want) {
  FUZZ_CHECK(got.result == want.result && got.fault == want.fault && got.action == want.action);
  FUZZ_CHECK(got.a == want.a && got.b == want.b);
}

/* ---- queries ---- */

static bool there(const both *x, uint32_t number, uint64_t key) {
  const ckf_probe probe = ckf_probe_make(&x->manifest.format, key);
  return ckf_word_contains(x->models[number].words[probe.a], probe.fp) ||
         ckf_word_contains(x->models[number].words[probe.b], probe.fp);
}

static void check_depth(const both *x, uint32_t number, const uint64_t *keys, size_t len,
                        uint32_t depth) {
  size_t linear = 0, hits = 0;
  while (linear < len && there(x, number, keys[linear]))
    linear++;
  for (size_t i = 0; i < len; i++)
    hits += there(x, number, keys[i]);
  FUZZ_CHECK(depth >= linear && depth <= len);
  FUZZ_CHECK(depth == len || !there(x, number, keys[depth]));
  FUZZ_CHECK(hits != linear || depth == linear);
}

static void check_matches(const both *x, const uint64_t *keys, size_t len,
                          const ckf_matches *matches) {
  for (uint32_t number = 0; number < CKF_LANES; number++)
    if (matches->lanes >> number & 1)
      check_depth(x, number, keys, len, matches->depths[number]);
    else
      FUZZ_CHECK(matches->depths[number] == 0);
}

static void query_both(both *x, fuzz_input *in) {
  const uint8_t root = fuzz_byte(in) % 4;
  const size_t len = fuzz_below(in, PROMPT + 1);
  const uint32_t captured = fuzz_byte(in);
  uint64_t locals[PROMPT], keys[PROMPT], room[PROMPT];
  ckf_query query;
  ckf_matches matches;
  for (size_t i = 0; i < len; i++) {
    locals[i] = root * 100u + i;
    keys[i] = i ? ckf_child(keys[i - 1], locals[i]) : locals[i];
  }
  ckf_query_init(&query, locals, len, room, 0);
  const int rc = ckf_table_find(&x->table, &query, &matches);
  FUZZ_CHECK(rc == (x->ready ? CKF_OK : CKF_ERR_UNAVAILABLE));
  FUZZ_CHECK(matches.lanes == x->ready);
  check_matches(x, keys, len, &matches);
  FUZZ_CHECK(ckf_query_known(&query) <= len);
  FUZZ_CHECK(memcmp(room, keys, ckf_query_known(&query) * 8) == 0);
  ckf_table_find_captured(&x->table, captured, &query, &matches);
  FUZZ_CHECK(matches.lanes == (captured & x->manifest.configured));
  check_matches(x, keys, len, &matches);
  /* from any guess, beyond the end too */
  matches.lanes = captured;
  for (uint32_t number = 0; number < CKF_LANES; number++)
    matches.depths[number] = captured * (number + 1) % (PROMPT + 3);
  FUZZ_CHECK(ckf_table_find_again(&x->table, &query, &matches) == rc);
  FUZZ_CHECK(matches.lanes == x->ready);
  check_matches(x, keys, len, &matches);
}

/* Words that hold a prefix of one of the prompts, and noise. */
static void read_words(fuzz_input *in, const both *x, uint64_t words[BUCKETS + 1]) {
  const uint8_t root = fuzz_byte(in) % 4;
  const uint32_t held = fuzz_below(in, PROMPT);
  ckf_image log[9];
  ckf_filter filter;
  uint64_t key = 0;
  for (size_t i = 0; i <= BUCKETS; i++)
    words[i] = i % 5 == 0 ? fuzz_number(in, 1) : 0;
  FUZZ_CHECK(ckf_filter_init(&filter, &x->manifest.format, 8, words, log, NULL) == CKF_OK);
  for (uint32_t i = 0; i < held; i++) {
    key = i ? ckf_child(key, root * 100u + i) : root * 100u;
    if (ckf_filter_insert(&filter, key) != CKF_OK)
      break;
  }
}

/* ---- one step ---- */

static void claim_both(both *x, uint32_t number) {
  lane_model *m = &x->models[number];
  ckf_lane other;
  const int rc = ckf_lane_claim(m->claimed ? &other : &x->lanes[number], &x->table, number);
  if (!(x->manifest.configured >> number & 1)) {
    FUZZ_CHECK(rc == CKF_ERR_UNCONFIGURED_LANE);
  } else if (m->claimed) {
    FUZZ_CHECK(rc == CKF_ERR_LANE_CLAIMED);
  } else {
    FUZZ_CHECK(rc == CKF_OK);
    m->claimed = true;
    m->assigned = m->epoch_known = m->ready = false;
    m->installed = 0;
  }
}

static void lane_step(both *x, fuzz_input *in, uint32_t number, uint8_t op) {
  ckf_lane *lane = &x->lanes[number];
  lane_model *m = &x->models[number];
  const ckf_lease lease = read_lease(in, number);
  if (op < 3) {
    const ckf_identity identity = read_identity(in, x, number);
    const int before = ckf_lane_assignable(lane, &identity, &lease);
    const int want = model_assign(x, number, &identity, &lease);
    FUZZ_CHECK(before == want && ckf_lane_assign(lane, &identity, &lease) == want);
  } else if (op < 6) {
    const ckf_identity identity = read_identity(in, x, number);
    const uint64_t sequence = fuzz_edge(in);
    uint64_t words[BUCKETS + 1];
    const uint8_t shape = fuzz_byte(in);
    const size_t n = shape >= 0xF0 ? BUCKETS - 1 : shape >= 0xE0 ? BUCKETS + 1 : BUCKETS;
    read_words(in, x, words);
    check_outcome(ckf_lane_install(lane, &identity, &lease, sequence, words, n),
                  model_install(x, number, &identity, &lease, sequence, words, n));
  } else if (op < 10) {
    const ckf_identity identity = read_identity(in, x, number);
    const uint8_t shape = fuzz_byte(in);
    const uint64_t base = shape & 1 ? m->installed : fuzz_edge(in);
    const uint64_t sequence = shape & 2 ? base + 1 : fuzz_edge(in);
    const size_t n = fuzz_below(in, IMAGES + 1);
    ckf_image images[IMAGES];
    for (size_t i = 0; i < n; i++)
      images[i] = (ckf_image){fuzz_below(in, BUCKETS + 1), fuzz_number(in, 3)};
    check_outcome(ckf_lane_apply_delta(lane, &identity, &lease, base, sequence, images, n),
                  model_delta(x, number, &identity, &lease, base, sequence, images, n));
  } else if (op == 10) {
    const uint64_t expected = fuzz_bit(in) ? m->installed : fuzz_edge(in);
    check_outcome(ckf_lane_drain(lane, &lease, expected), model_drain(x, number, &lease, expected));
  } else if (op == 11) {
    withdraw(x, number);
    m->assigned = false;
    m->installed = 0;
    ckf_lane_retire(lane);
  } else {
    withdraw(x, number);
    m->claimed = false;
    ckf_lane_release(lane);
  }
}

static void step(both *x, fuzz_input *in) {
  const uint8_t byte = fuzz_byte(in);
  const uint32_t number = byte % LANES;
  const uint8_t op = byte / LANES % 20;
  if (op < 5)
    query_both(x, in);
  else if (op == 5)
    claim_both(x, number);
  else if (op == 6) {
    x->ready &= ~(1u << number); /* the writer finds out at its next assignment */
    ckf_table_withdraw(&x->table, 1u << number);
  } else if (x->models[number].claimed)
    lane_step(x, in, number, op - 7);
  else
    claim_both(x, number);
}

static void check(both *x) {
  FUZZ_CHECK(ckf_table_ready(&x->table) == x->ready);
  for (uint32_t number = 0; number < LANES; number++) {
    const lane_model *m = &x->models[number];
    if (!(x->manifest.configured >> number & 1))
      continue;
    for (uint32_t i = 0; i < BUCKETS; i++)
      FUZZ_CHECK(ckf_table_word(&x->table, number, i) == m->words[i]);
    if (m->claimed) {
      FUZZ_CHECK(ckf_lane_ready(&x->lanes[number]) == m->ready);
      FUZZ_CHECK(ckf_lane_installed(&x->lanes[number]) == m->installed);
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static both x;
  fuzz_input in = {data, len};
  memset(&x, 0, sizeof x);
  x.manifest.consumer_instance = CONSUMER;
  x.manifest.configured = fuzz_byte(&in) % (1u << LANES);
  x.manifest.format = (ckf_format){CKF_DEFAULT_SEED, BUCKETS};
  for (uint32_t i = 0; i < LANES; i++)
    x.manifest.pools[i].dc_id = 100 + i;
  const size_t mem_len = ckf_table_mem_size(&x.manifest);
  FUZZ_CHECK((mem_len > 0) == (x.manifest.configured != 0));
  uint8_t *memory = fuzz_alloc(mem_len);
  const int rc = ckf_table_init(&x.table, &x.manifest, 2, memory, mem_len);
  FUZZ_CHECK(rc == (x.manifest.configured ? CKF_OK : CKF_ERR_NO_LANES));
  while (rc == CKF_OK && in.left > 0) {
    step(&x, &in);
    check(&x);
  }
  free(memory);
  return 0;
}
