/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_relay as a whole: requests (as bytes, good and damaged), events of the pools, topologies,
 * load, slow and vanished readers, time, pools that come, go and break, the end. Some calls are
 * those of a consumer, which is fed with what the relay sends, byte by byte. After every step the
 * relay's own check holds and its counters are those of lists; each filter stream brings one cut
 * and every delta after it, or ends for the reason that a model foresees; what is sent survives its
 * encoding; the consumer has nothing to complain about, and holds the words of the producer.
 *
 * SECURITY.md: 1, 2, 3, 5, 6, 8, 9, 11.
 *
 * Input: one byte of options, then operations of one byte with what they need.
 */

#include "fuzz.h"
#include "kvrelay_pb.h"
#include "pools.h"

enum {
  PLACES = 4,
  POOLS_MAX = 3,
  BUCKETS_MAX = 128,
  CHUNK_BUCKETS = 64,
  QUEUE_FRAMES = 3,
  RAW = 8,
  CALLS = RAW + 4 + 2 * PLACES, /* behind the first RAW ones those of the consumer */
  LOAD_WINDOWS = 2,
  CARDS = 6,
  KEYS_CAP = 256,
  GUARD = 64,
  WIRE_CAP = 1 << 14,
  ARENA_LEN = 1 << 15,
  MS = 1000000,
  RUNNING = -1,
  ANYHOW = -2 /* its pool broke */
};

typedef struct place {
  ckf_producer state;
  void *state_mem, *pool_mem, *ranks_mem, *names_mem;
  kvrelay_pool *pool; /* NULL = not published */
  bool broken;        /* its state was replaced */
  uint64_t first_key, next_key;
} place;

typedef struct call {
  bool open, admitted, armed, sent;
  int32_t method;
  uint64_t id;
  uint32_t mine; /* the consumer's number, 0 = of nobody */
  int32_t end;   /* enum kvrelay_reason it has to end with, RUNNING or ANYHOW */
  uint64_t last; /* revision, window, or sequence; of the cut before the first frame */
  uint64_t since, observed_ms;
  place *at;
  kvrelay_producer producer;
  ckf_format format;
  uint32_t chunks;
  ckf_replica replica;
  void *replica_mem;
  kvrelay_pb_filter_prefix prefix;
  kvrelay_pb_filter_stream stream;
} call;

typedef struct world {
  kvrelay_relay r;
  kvrelay_relay_config cfg;
  fuzz_input in;
  uint64_t now;
  bool stopping, broke; /* some pool did */
  place places[PLACES];
  call calls[CALLS];
  uint64_t lagged, timeouts, generation;
  kvrelay_topology topology[2];
  void *topology_mem[2];
  int topology_at;
  kvrelay_consumer c;
  bool connected;
  void *lent[4 * PLACES];
} world;

static uint64_t arena_mem[ARENA_LEN / 8];
static uint8_t wire[WIRE_CAP];

/* ---- what the model knows ---- */

static uint32_t open_calls(const world *w, int32_t method) {
  uint32_t n = 0;
  for (size_t i = 0; i < CALLS; i++)
    n += w->calls[i].open && w->calls[i].method == method;
  return n;
}

static bool in_force(const place *p) {
  return p->pool != NULL && kvrelay_pool_fenced(p->pool) == KVRELAY_OK;
}

static place *find_pool(world *w, const kvrelay_pool_id *id) {
  for (size_t i = 0; i < PLACES; i++)
    if (in_force(&w->places[i]) &&
        kvrelay_pool_id_equal(&kvrelay_pool_descriptor(w->places[i].pool)->producer.pool_id, id))
      return &w->places[i];
  return NULL;
}

static place *find_producer(world *w, const kvrelay_producer *producer) {
  place *p = find_pool(w, &producer->pool_id);
  return p && kvrelay_producer_equal(&kvrelay_pool_descriptor(p->pool)->producer, producer) ? p
                                                                                            : NULL;
}

/* What the operation just done means for a filter stream. */
static void settle_call(world *w, call *k) {
  if (!in_force(k->at)) {
    k->end = ANYHOW;
    return;
  }
  const uint64_t sequence = kvrelay_pool_sequence(k->at->pool);
  const bool admitted = kvrelay_relay_call_admitted(&w->r, k->id);
  FUZZ_CHECK(admitted || !k->admitted);
  if (admitted && !k->admitted) {
    k->admitted = true;
    k->last = sequence;
    k->since = w->now;
  }
  if (!admitted)
    return;
  const bool lagged = sequence - k->last > QUEUE_FRAMES,
             late =
                 !ckf_replica_live(&k->replica) && w->now - k->since >= w->cfg.snapshot_progress_ns;
  /* One turn of the clock may bring both; the relay says which came first. */
  const bool by_time = late && kvrelay_relay_stats_get(&w->r).progress_timeouts > w->timeouts;
  if (lagged && !by_time) {
    k->end = KVRELAY_REASON_SUBSCRIBER_LAGGED;
    w->lagged++;
  } else if (late) {
    k->end = KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT;
    w->timeouts++;
  }
}

static void settle(world *w) {
  uint32_t pools = 0;
  for (size_t i = 0; i < CALLS; i++) {
    call *k = &w->calls[i];
    if (k->open && k->method == KVRELAY_METHOD_SUBSCRIBE_POOL && k->end == RUNNING)
      settle_call(w, k);
  }
  for (size_t i = 0; i < PLACES; i++)
    pools += in_force(&w->places[i]);
  const kvrelay_relay_stats st = kvrelay_relay_stats_get(&w->r);
  FUZZ_CHECK(kvrelay_relay_check_(&w->r) == 0);
  FUZZ_CHECK(st.pools == pools && pools <= POOLS_MAX && st.hubs <= w->cfg.max_hubs);
  FUZZ_CHECK(st.pool_streams == open_calls(w, KVRELAY_METHOD_SUBSCRIBE_POOL));
  FUZZ_CHECK(st.catalog_streams == open_calls(w, KVRELAY_METHOD_WATCH_CATALOG));
  FUZZ_CHECK(st.readiness_streams == open_calls(w, KVRELAY_METHOD_SUBSCRIBE_READINESS));
  FUZZ_CHECK(st.load_streams == open_calls(w, KVRELAY_METHOD_SUBSCRIBE_LOAD));
  FUZZ_CHECK(w->broke || (st.lagged == w->lagged && st.progress_timeouts == w->timeouts));
}

/* Ends of everything that hangs on a pool that goes, or of all. */
static void end_streams(world *w, const place *p, int32_t reason) {
  for (size_t i = 0; i < CALLS; i++) {
    call *k = &w->calls[i];
    if (k->open && k->method != KVRELAY_METHOD_GET_RELAY_INFO && k->end == RUNNING &&
        (p == NULL || k->at == p))
      k->end = k->method == KVRELAY_METHOD_SUBSCRIBE_POOL && !k->admitted
                   ? KVRELAY_REASON_PUBLICATION_UNAVAILABLE
                   : reason;
  }
}

/* ---- calls ---- */

static uint32_t limit_of(const world *w, int32_t method) {
  switch (method) {
  case KVRELAY_METHOD_GET_RELAY_INFO:
    return w->cfg.max_info_calls;
  case KVRELAY_METHOD_WATCH_CATALOG:
    return w->cfg.max_catalog_subscribers;
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    return w->cfg.max_readiness_subscribers;
  case KVRELAY_METHOD_SUBSCRIBE_LOAD:
    return w->cfg.max_load_subscribers;
  default:
    return w->cfg.max_pool_streams;
  }
}

/* The reason a request has to be refused with, by the order of the contract. */
static int32_t refusal(world *w, const kvrelay_request *q) {
  const bool filter = q->method == KVRELAY_METHOD_SUBSCRIBE_POOL;
  const kvrelay_verdict v = kvrelay_check_producer(&q->expected_producer);
  if (q->contract_marker != KVRELAY_CONTRACT_MARKER)
    return KVRELAY_REASON_CONTRACT_MISMATCH;
  if (q->method != KVRELAY_METHOD_GET_RELAY_INFO && !kvrelay_subscriber_id_valid(q->subscriber_id))
    return KVRELAY_REASON_INVALID_REQUEST;
  if (filter && (!q->expected_producer.present || v.class_ != KVRELAY_CLASS_OK))
    return q->expected_producer.present && v.class_ == KVRELAY_CLASS_UNSUPPORTED
               ? KVRELAY_REASON_UNSUPPORTED_FEATURE
               : KVRELAY_REASON_INVALID_REQUEST;
  if (open_calls(w, q->method) >= limit_of(w, q->method))
    return KVRELAY_REASON_RESOURCE_LIMIT;
  if (filter && !find_pool(w, &q->expected_producer.pool_id))
    return KVRELAY_REASON_POOL_NOT_FOUND;
  if (filter && !find_producer(w, &q->expected_producer))
    return KVRELAY_REASON_PRODUCER_CHANGED;
  if (w->stopping && q->method != KVRELAY_METHOD_GET_RELAY_INFO)
    return KVRELAY_REASON_PUBLICATION_UNAVAILABLE;
  return KVRELAY_REASON_NONE;
}

static void open_filter(world *w, call *k, const kvrelay_request *q) {
  k->at = find_producer(w, &q->expected_producer);
  if (!k->at) { /* its pool broke at this call */
    k->end = ANYHOW;
    return;
  }
  k->producer = q->expected_producer;
  k->format = (ckf_format){k->producer.ckf_format.seed, k->producer.ckf_format.bucket_count};
  k->replica_mem = fuzz_alloc(ckf_replica_mem_size(&k->format));
  FUZZ_CHECK(ckf_replica_init(&k->replica, &k->format, k->replica_mem,
                              ckf_replica_mem_size(&k->format)) == CKF_OK);
}

/* Opens the call at a free place, or says why not. */
static bool open_call(world *w, call *k, const kvrelay_request *q, kvrelay_status *status) {
  const int32_t want = refusal(w, q);
  const place *at = find_producer(w, &q->expected_producer);
  FUZZ_CHECK(!k->open);
  memset(k, 0, sizeof *k);
  const int rc = kvrelay_relay_call_open(&w->r, q, w->now, &k->id, status);
  if (rc != KVRELAY_OK) {
    FUZZ_CHECK(rc == KVRELAY_ERR_REFUSED && status->text[0] != 0);
    FUZZ_CHECK(status->reason != KVRELAY_REASON_NONE &&
               status->grpc == kvrelay_reason_status(status->reason));
    /* hubs and readers of a pool are not modelled, nor is what breaks */
    FUZZ_CHECK(status->reason == want ||
               (want == KVRELAY_REASON_NONE && q->method == KVRELAY_METHOD_SUBSCRIBE_POOL &&
                (status->reason == KVRELAY_REASON_RESOURCE_LIMIT || at->broken)));
    settle(w);
    return false;
  }
  FUZZ_CHECK(want == KVRELAY_REASON_NONE);
  k->open = true;
  k->method = q->method;
  k->end = RUNNING;
  if (q->method == KVRELAY_METHOD_SUBSCRIBE_POOL)
    open_filter(w, k, q);
  settle(w);
  return true;
}

static void close_call(world *w, call *k) {
  kvrelay_relay_call_close(&w->r, k->id, w->now);
  free(k->replica_mem);
  memset(k, 0, sizeof *k);
  settle(w);
}

/* A request by a few bytes: of a pool that is there, mostly, and seldom odd. */
static void op_open(world *w) {
  const uint8_t shape = fuzz_byte(&w->in), odd = fuzz_byte(&w->in);
  const place *p = &w->places[shape % PLACES];
  call *k = &w->calls[shape / PLACES % RAW];
  kvrelay_request q = {
      1 + shape / (PLACES * RAW) % 8, KVRELAY_CONTRACT_MARKER, text("reader"), {0}, 0};
  kvrelay_request got;
  kvrelay_status status;
  if (k->open)
    return;
  if (q.method > KVRELAY_METHOD_SUBSCRIBE_LOAD)
    q.method = KVRELAY_METHOD_SUBSCRIBE_POOL;
  if (p->pool)
    q.expected_producer = kvrelay_pool_descriptor(p->pool)->producer;
  if (odd == 255)
    q.contract_marker++;
  else if (odd == 254)
    q.subscriber_id = text("");
  else if (odd == 253)
    q.subscriber_id = text("a\nb");
  else if (odd == 252)
    q.expected_producer.producer_incarnation++;
  else if (odd == 251)
    q.expected_producer.pool_id.dc_id++;
  else if (odd == 250)
    q.expected_producer.ckf_format.bucket_count = 3;
  const ptrdiff_t whole = kvrelay_pb_encode_request(&q, wire, sizeof wire);
  FUZZ_CHECK(whole >= 0);
  size_t len = (size_t)whole;
  if (odd >= 240 && odd < 250 && len > 0) {
    wire[fuzz_below(&w->in, (uint32_t)len)] = fuzz_byte(&w->in);
    len -= odd & 1;
  }
  uint8_t *bytes = fuzz_copy(wire, len);
  if (kvrelay_pb_decode_request(q.method, bytes, len, &got) == KVRELAY_OK)
    (void)open_call(w, k, &got, &status);
  free(bytes);
}

/* ---- what is sent ---- */

static void check_envelope(const kvrelay_envelope *e) {
  FUZZ_CHECK(kvrelay_check_envelope(e).class_ == KVRELAY_CLASS_OK && e->relay_present &&
             e->relay.drt_instance_id == 17 && e->relay.relay_incarnation == 23);
}

static void take_catalog(world *w, call *k, const kvrelay_catalog_update *m) {
  uint32_t pools = 0;
  check_envelope(&m->envelope);
  FUZZ_CHECK(m->revision == kvrelay_relay_stats_get(&w->r).catalog_revision && m->snapshot_present);
  FUZZ_CHECK(!k->sent || m->revision > k->last);
  k->last = m->revision;
  for (size_t i = 0; i < PLACES; i++)
    pools += in_force(&w->places[i]);
  FUZZ_CHECK(m->pools_len == pools);
  for (size_t i = 0; i < m->pools_len; i++)
    FUZZ_CHECK(kvrelay_check_descriptor(&m->pools[i]).class_ == KVRELAY_CLASS_OK &&
               find_producer(w, &m->pools[i].producer) != NULL);
}

static void take_readiness(world *w, call *k, const kvrelay_readiness_update *m) {
  check_envelope(&m->envelope);
  FUZZ_CHECK(!k->sent || m->revision >= k->last);
  k->last = m->revision;
  for (size_t i = 0; i < m->entries_len; i++) {
    const kvrelay_topology_entry *e = &m->entries[i];
    FUZZ_CHECK(kvrelay_check_topology_entry(e).class_ == KVRELAY_CLASS_OK);
    for (size_t j = 0; j < e->members_len; j++)
      FUZZ_CHECK(!e->members[j].pool_id.present || find_pool(w, &e->members[j].pool_id) != NULL);
  }
}

static void take_load(world *w, call *k, const kvrelay_load_update *m) {
  check_envelope(&m->envelope);
  FUZZ_CHECK(!k->sent || (m->window_sequence == k->last + 1 && m->observed_ms >= k->observed_ms));
  FUZZ_CHECK(m->window_ms == w->cfg.load_window_ns / MS && m->pools_len <= POOLS_MAX);
  k->last = m->window_sequence;
  k->observed_ms = m->observed_ms;
  for (size_t i = 0; i < m->pools_len; i++)
    FUZZ_CHECK(m->pools[i].kv_observed_ranks <= m->pools[i].kv_expected_ranks &&
               find_producer(w, &m->pools[i].producer) != NULL);
}

static void take_filter(world *w, call *k, const kvrelay_filter_update *m) {
  ckf_cbi1_frame frame;
  const bool live = ckf_replica_live(&k->replica);
  check_envelope(&m->envelope);
  FUZZ_CHECK(k->admitted && kvrelay_producer_equal(&m->producer, &k->producer));
  FUZZ_CHECK(m->send_ts_us == w->now / 1000);
  k->since = w->now;
  if (m->kind == KVRELAY_UPDATE_HEARTBEAT) {
    FUZZ_CHECK(live && m->payload_len == 0 && m->sequence == k->last &&
               m->base_sequence == k->last);
    return;
  }
  FUZZ_CHECK(ckf_cbi1_decode(&k->format, m->payload, m->payload_len, &frame) == CKF_OK);
  FUZZ_CHECK(frame.dc_id == k->producer.pool_id.dc_id && frame.epoch == m->sequence);
  if (m->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK) {
    FUZZ_CHECK(frame.kind == CKF_CBI1_SNAPSHOT && !live && frame.chunk_index == k->chunks++);
    FUZZ_CHECK(m->sequence == k->last && m->base_sequence == k->last);
    FUZZ_CHECK(ckf_replica_apply(&k->replica, &frame) == (k->chunks == frame.chunk_count));
    return;
  }
  FUZZ_CHECK(m->kind == KVRELAY_UPDATE_DELTA && frame.kind == CKF_CBI1_DELTA && live);
  FUZZ_CHECK(m->base_sequence == k->last && frame.base_epoch == k->last &&
             m->sequence == k->last + 1);
  FUZZ_CHECK(ckf_replica_apply(&k->replica, &frame) == 1);
  k->last++;
}

/* By the splice, which has to write what the encoder writes. */
static size_t splice(call *k, const kvrelay_filter_update *m) {
  uint8_t head[KVRELAY_PB_FILTER_HEAD_CAP];
  if (!k->sent)
    FUZZ_CHECK(kvrelay_pb_filter_prefix_init(&k->prefix, m) == KVRELAY_OK);
  const size_t head_len = kvrelay_pb_filter_head(&k->prefix, m, head);
  const size_t whole = head_len + m->payload_len + KVRELAY_PB_FILTER_TAIL_LEN;
  FUZZ_CHECK(kvrelay_pb_encode_filter(m, wire, sizeof wire) == (ptrdiff_t)whole);
  FUZZ_CHECK(memcmp(wire, head, head_len) == 0);
  FUZZ_CHECK(m->payload_len == 0 || memcmp(wire + head_len, m->payload, m->payload_len) == 0);
  FUZZ_CHECK(memcmp(wire + head_len + m->payload_len, kvrelay_pb_filter_tail,
                    KVRELAY_PB_FILTER_TAIL_LEN) == 0);
  return whole;
}

/* A message goes through its bytes to the model and, for its calls, to the consumer. */
#define CARRY(NAME)                                                                                \
  do {                                                                                             \
    kvrelay_##NAME##_update got;                                                                   \
    const ptrdiff_t len = kvrelay_pb_encode_##NAME(&out->u.NAME, wire, sizeof wire);               \
    FUZZ_CHECK(len >= 0);                                                                          \
    bytes = fuzz_copy(wire, (size_t)len);                                                          \
    FUZZ_CHECK(kvrelay_pb_decode_##NAME(bytes, (size_t)len, &arena, &got) == KVRELAY_OK);          \
    take_##NAME(w, k, &got);                                                                       \
    FUZZ_CHECK(k->mine == 0 ||                                                                     \
               kvrelay_consumer_feed_##NAME(&w->c, k->mine, &got, w->now) == KVRELAY_OK);          \
  } while (0)

static void carry(world *w, call *k, const kvrelay_outgoing *out) {
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  kvrelay_filter_update frame;
  uint8_t *bytes = NULL;
  size_t whole;
  FUZZ_CHECK(out->method == k->method);
  switch (k->method) {
  case KVRELAY_METHOD_GET_RELAY_INFO:
    FUZZ_CHECK(!k->sent);
    check_envelope(&out->u.info.envelope);
    FUZZ_CHECK(k->mine == 0 ||
               kvrelay_consumer_feed_info(&w->c, k->mine, &out->u.info, w->now) == KVRELAY_OK);
    break;
  case KVRELAY_METHOD_WATCH_CATALOG:
    CARRY(catalog);
    break;
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    CARRY(readiness);
    break;
  case KVRELAY_METHOD_SUBSCRIBE_LOAD:
    CARRY(load);
    break;
  default:
    whole = splice(k, &out->u.filter);
    bytes = fuzz_copy(wire, whole);
    FUZZ_CHECK(kvrelay_pb_filter_read(&k->stream, bytes, whole, &frame) == KVRELAY_OK);
    take_filter(w, k, &frame);
    FUZZ_CHECK(k->mine == 0 ||
               kvrelay_consumer_feed_filter(&w->c, k->mine, &frame, w->now) == KVRELAY_OK);
  }
  k->sent = true;
  free(bytes);
}

static void take_end(world *w, call *k, const kvrelay_status *end) {
  const uint32_t mine = k->mine;
  if (k->method == KVRELAY_METHOD_SUBSCRIBE_LOAD && k->end == RUNNING) {
    FUZZ_CHECK(end->reason == KVRELAY_REASON_SUBSCRIBER_LAGGED);
    FUZZ_CHECK(kvrelay_relay_stats_get(&w->r).load_windows - k->last > LOAD_WINDOWS);
  } else if (k->method == KVRELAY_METHOD_GET_RELAY_INFO)
    FUZZ_CHECK(k->sent && end->reason == KVRELAY_REASON_NONE);
  else if (k->end == ANYHOW || (!k->admitted && end->reason == KVRELAY_REASON_RESOURCE_LIMIT))
    FUZZ_CHECK(k->method == KVRELAY_METHOD_SUBSCRIBE_POOL);
  else
    FUZZ_CHECK(end->reason == k->end);
  FUZZ_CHECK(end->grpc == (end->reason ? kvrelay_reason_status(end->reason) : KVRELAY_GRPC_OK));
  close_call(w, k);
  if (mine)
    FUZZ_CHECK(kvrelay_consumer_feed_end(&w->c, mine, end, w->now) == KVRELAY_OK);
}

/* One pull; true when there was something. */
static bool pull(world *w, call *k) {
  kvrelay_outgoing out;
  if (!k->open)
    return false;
  const int rc = kvrelay_relay_call_pull(&w->r, k->id, w->now / 1000, w->now, &out);
  w->lagged += rc == KVRELAY_PULL_END && k->method == KVRELAY_METHOD_SUBSCRIBE_LOAD &&
               k->end == RUNNING; /* only noticed here */
  settle(w);                      /* it may have cut a snapshot for this call, or others, before */
  k->armed = rc == KVRELAY_PULL_NONE;
  if (rc == KVRELAY_PULL_END) {
    take_end(w, k, &out.end);
    return true;
  }
  FUZZ_CHECK(k->end == RUNNING);
  if (rc == KVRELAY_PULL_MESSAGE) {
    carry(w, k, &out);
  } else {
    FUZZ_CHECK(rc == KVRELAY_PULL_NONE);
    if (k->method == KVRELAY_METHOD_SUBSCRIBE_POOL && k->admitted) {
      FUZZ_CHECK(ckf_replica_live(&k->replica) && k->last == kvrelay_pool_sequence(k->at->pool));
      FUZZ_CHECK(k->at->broken || ckf_producer_has_pending(&k->at->state) ||
                 memcmp(ckf_replica_words(&k->replica), ckf_producer_words(&k->at->state),
                        8 * k->format.bucket_count) == 0);
    }
  }
  settle(w);
  return rc == KVRELAY_PULL_MESSAGE;
}

/* ---- the consumer ---- */

static call *call_of(world *w, uint32_t mine) {
  for (size_t i = RAW; i < CALLS; i++)
    if (w->calls[i].open && w->calls[i].mine == mine)
      return &w->calls[i];
  return NULL;
}

static void act_call(world *w, const kvrelay_action *a) {
  kvrelay_status status;
  const uint32_t mine = a->call;
  size_t i = RAW;
  while (i < CALLS && w->calls[i].open)
    i++;
  FUZZ_CHECK(i < CALLS && w->connected && call_of(w, mine) == NULL);
  if (open_call(w, &w->calls[i], &a->request, &status))
    w->calls[i].mine = mine;
  else
    FUZZ_CHECK(kvrelay_consumer_feed_end(&w->c, mine, &status, w->now) == KVRELAY_OK);
}

/* It hangs up on a pool that its catalog does not have any more, and to be told that catalog anew.
 */
static void act_cancel(world *w, const kvrelay_action *a) {
  call *k = call_of(w, a->call);
  uint64_t revision;
  uint32_t pools = 0;
  FUZZ_CHECK(k != NULL);
  if (k->method == KVRELAY_METHOD_WATCH_CATALOG) {
    close_call(w, k);
    return;
  }
  FUZZ_CHECK(k->method == KVRELAY_METHOD_SUBSCRIBE_POOL &&
             kvrelay_consumer_catalog(&w->c, &revision, &pools));
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, i, w->now, &v) == KVRELAY_OK);
    FUZZ_CHECK(!kvrelay_producer_equal(&v.descriptor->producer, &k->producer));
  }
  close_call(w, k);
}

static void act_need(world *w, const kvrelay_action *a) {
  size_t i = 0;
  while (i < 4 * PLACES && w->lent[i] != NULL)
    i++;
  FUZZ_CHECK(i < 4 * PLACES && a->bytes < 1 << 14);
  w->lent[i] = fuzz_alloc(a->bytes);
  FUZZ_CHECK(kvrelay_consumer_replica_give(&w->c, a->pool, w->lent[i], a->bytes, w->now) ==
             KVRELAY_OK);
}

static void act_free(world *w, const kvrelay_action *a) {
  size_t i = 0;
  while (i < 4 * PLACES && w->lent[i] != a->mem)
    i++;
  FUZZ_CHECK(i < 4 * PLACES);
  free(a->mem);
  w->lent[i] = NULL;
}

/* What the consumer wants; it never has a reason to give the relay up. */
static void consume(world *w) {
  kvrelay_action a;
  kvrelay_event_out event;
  for (int count = 0; kvrelay_consumer_action_next(&w->c, w->now, &a); count++) {
    FUZZ_CHECK(count < 4 * CALLS);
    if (a.kind == KVRELAY_ACTION_CALL)
      act_call(w, &a);
    else if (a.kind == KVRELAY_ACTION_CANCEL)
      act_cancel(w, &a);
    else if (a.kind == KVRELAY_ACTION_REPLICA_NEED)
      act_need(w, &a);
    else if (a.kind == KVRELAY_ACTION_REPLICA_FREE)
      act_free(w, &a);
    else
      fuzz_fail(__FILE__, __LINE__, "the consumer gives the relay up");
  }
  while (kvrelay_consumer_event_next(&w->c, &event)) {
    FUZZ_CHECK(event.kind != KVRELAY_EVENT_STOPPED || w->stopping);
    FUZZ_CHECK(event.fault == 0 && event.verdict.class_ == KVRELAY_CLASS_OK);
  }
}

/* Each replica is that of the model. */
static void check_replicas(world *w) {
  uint64_t revision;
  uint32_t pools = 0;
  (void)kvrelay_consumer_catalog(&w->c, &revision, &pools);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    const call *k = NULL;
    FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, i, w->now, &v) == KVRELAY_OK);
    FUZZ_CHECK(v.verdict.class_ == KVRELAY_CLASS_OK);
    for (size_t j = RAW; j < CALLS; j++)
      if (w->calls[j].open && w->calls[j].method == KVRELAY_METHOD_SUBSCRIBE_POOL &&
          kvrelay_producer_equal(&w->calls[j].producer, &v.descriptor->producer))
        k = &w->calls[j];
    FUZZ_CHECK((v.state == KVRELAY_REPLICA_LIVE) == (k != NULL && ckf_replica_live(&k->replica)));
    if (v.state == KVRELAY_REPLICA_LIVE)
      FUZZ_CHECK(v.sequence == k->last &&
                 memcmp(v.words, ckf_replica_words(&k->replica), 8 * k->format.bucket_count) == 0);
  }
}

/* ---- pools ---- */

static void new_state(place *p, uint8_t shape) {
  static const uint16_t expected[] = {8, 100, 400, 900};
  ckf_producer_config cfg = ckf_producer_config_default();
  cfg.filter.expected_blocks = expected[shape % 4];
  cfg.filter.publish_every_n_events = 1 + shape / 4u % 4;
  cfg.max_mappings = cfg.max_blocks = KEYS_CAP;
  cfg.max_members = 2;
  cfg.delta_table = false; /* slow to fill, and the same everywhere */
  const size_t len = ckf_producer_mem_size(&cfg);
  free(p->state_mem);
  p->state_mem = fuzz_alloc(len);
  FUZZ_CHECK(ckf_producer_init(&p->state, &cfg, p->state_mem, len) == CKF_OK);
  p->first_key = p->next_key = 0;
}

static void publish(world *w, place *p) {
  const uint8_t shape = fuzz_byte(&w->in);
  kvrelay_descriptor d = pool_describe(&w->in, PLACES, BUCKETS_MAX);
  kvrelay_relay_stats before = kvrelay_relay_stats_get(&w->r);
  d.serving_endpoint.component = text(shape >= 240 ? "e" : shape & 64 ? "ee" : "eee");
  new_state(p, shape);
  const bool free_name = find_pool(w, &d.producer.pool_id) == NULL;
  const size_t need = kvrelay_relay_pool_mem_size(&w->r, &d);
  void *mem = fuzz_alloc(need);
  FUZZ_CHECK(need == 0 || kvrelay_relay_pool_add(&w->r, &d, &p->state, mem, need - 1, w->now,
                                                 &p->pool) != KVRELAY_OK);
  const int rc = kvrelay_relay_pool_add(&w->r, &d, &p->state, mem, need, w->now, &p->pool);
  const kvrelay_relay_stats after = kvrelay_relay_stats_get(&w->r);
  FUZZ_CHECK(after.catalog_revision == before.catalog_revision + (rc == KVRELAY_OK));
  if (rc != KVRELAY_OK) {
    FUZZ_CHECK((rc == KVRELAY_ERR_ARG) == (need == 0));
    FUZZ_CHECK(need == 0 || rc == KVRELAY_ERR_STATE || rc == KVRELAY_ERR_LIMIT);
    FUZZ_CHECK(p->pool == NULL);
    free(mem);
    return;
  }
  const kvrelay_producer *producer = &kvrelay_pool_descriptor(p->pool)->producer;
  FUZZ_CHECK(free_name && !w->stopping && before.pools < POOLS_MAX);
  FUZZ_CHECK(producer->ckf_format.bucket_count <= BUCKETS_MAX);
  FUZZ_CHECK(producer->producer_incarnation == 23 && producer->layout_generation > w->generation);
  w->generation = producer->layout_generation;
  p->pool_mem = mem;
}

static void withdraw(world *w, place *p) {
  end_streams(w, p, KVRELAY_REASON_PUBLICATION_UNAVAILABLE);
  kvrelay_relay_pool_remove(&w->r, p->pool, w->now);
  free(p->pool_mem);
  free(p->ranks_mem);
  free(p->names_mem);
  p->pool = NULL;
  p->pool_mem = p->ranks_mem = p->names_mem = NULL;
  p->broken = false;
}

static void op_pool(world *w) {
  place *p = &w->places[fuzz_below(&w->in, PLACES)];
  if (p->pool)
    withdraw(w, p);
  else
    publish(w, p);
}

/* Other names and roles, or something that is no description of this pool. */
static void op_describe(world *w) {
  static const int32_t decode[] = {KVRELAY_ROLE_DECODE};
  const uint8_t which = fuzz_byte(&w->in);
  place *p = &w->places[which % PLACES];
  const kvrelay_descriptor d = pool_describe(&w->in, PLACES, BUCKETS_MAX);
  const uint64_t before = kvrelay_relay_stats_get(&w->r).catalog_revision;
  if (!p->pool)
    return;
  kvrelay_descriptor next = *kvrelay_pool_descriptor(p->pool);
  const kvrelay_roles roles = which & 128 ? (kvrelay_roles){decode, 1} : d.pool_roles;
  const bool same_roles = next.pool_roles.ptr[0] == roles.ptr[0],
             same_names = next.registrations_len == d.registrations_len,
             same_blocks = next.query_semantics.kv_block_size == d.query_semantics.kv_block_size;
  next.registrations = d.registrations;
  next.registrations_len = d.registrations_len;
  next.pool_roles = roles;
  next.query_semantics = d.query_semantics;
  const size_t need = kvrelay_relay_pool_describe_mem_size(&next);
  void *mem = fuzz_alloc(need);
  FUZZ_CHECK(need == 0 ||
             kvrelay_relay_pool_describe(&w->r, p->pool, &next, mem, need - 1) != KVRELAY_OK);
  const int rc = kvrelay_relay_pool_describe(&w->r, p->pool, &next, mem, need);
  const uint64_t after = kvrelay_relay_stats_get(&w->r).catalog_revision;
  if (rc != KVRELAY_OK) {
    FUZZ_CHECK(after == before && (rc == KVRELAY_ERR_STATE) == (need != 0 && same_blocks));
    free(mem);
    return;
  }
  FUZZ_CHECK(in_force(p) && same_blocks && after == before + !same_names + !same_roles);
  free(p->names_mem);
  p->names_mem = mem;
}

/* Blocks come and go, and sometimes the relay is told. */
static void op_events(world *w) {
  static const ckf_member member = {7, 0};
  const uint8_t shape = fuzz_byte(&w->in), count = fuzz_byte(&w->in);
  place *p = &w->places[shape % PLACES];
  ckf_outcome out;
  int rc;
  if (!p->pool)
    return;
  for (uint8_t i = 0; i < count % 16; i++) {
    if (shape & 128 ? p->next_key - p->first_key < KEYS_CAP : p->first_key == p->next_key) {
      const ckf_block block = {p->next_key, p->next_key * UINT64_C(0x9E3779B97F4A7C15)};
      p->next_key++;
      rc = ckf_producer_stored(&p->state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0,
                               false, 0, &block, 1, &out);
      FUZZ_CHECK(rc == CKF_OK || rc == CKF_ERR_CAPACITY_EXHAUSTED || rc == CKF_ERR_NOSPACE);
    } else {
      FUZZ_CHECK(ckf_producer_removed(&p->state, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING,
                                      &p->first_key, 1, &out) == CKF_OK);
      p->first_key++;
    }
  }
  if (count == 255)
    FUZZ_CHECK(ckf_producer_remove_rank(&p->state, &member) == CKF_OK);
  if (shape & 32) /* applied, not yet told */
    return;
  const bool fit = in_force(p) && !p->broken;
  rc = shape & 64 ? kvrelay_relay_pool_publish(&w->r, p->pool, w->now)
                  : kvrelay_relay_pool_changed(&w->r, p->pool, w->now);
  FUZZ_CHECK(rc == KVRELAY_OK || (rc == KVRELAY_ERR_INVARIANT && !fit));
  FUZZ_CHECK(!fit || rc == KVRELAY_OK);
}

/* A mistake of whoever owns the state: another one at its place. */
static void op_break(world *w) {
  const uint8_t shape = fuzz_byte(&w->in);
  place *p = &w->places[shape % PLACES];
  if (!p->pool || shape < 128)
    return;
  new_state(p, shape / PLACES);
  p->broken = w->broke = true;
}

static void op_load(world *w) {
  const uint8_t shape = fuzz_byte(&w->in), more = fuzz_byte(&w->in);
  place *p = &w->places[shape % PLACES];
  const uint64_t worker = 1 + more % 3;
  const kvrelay_rank_range ranges[2] = {{worker, more / 4 % 2, more / 8 % 4, more & 32 ? 100 : 0},
                                        {2, more / 64, more == 255 ? 4097 : 1, 50}};
  int rc = KVRELAY_OK;
  if (!p->pool)
    return;
  if (shape < 64) {
    const size_t len = shape / PLACES % 3, need = kvrelay_pool_ranks_mem_size(ranges, len);
    void *mem = fuzz_alloc(need);
    const bool twice = len == 2 && worker == 2 && more != 255 &&
                       ranges[1].rank_start - ranges[0].rank_start < ranges[0].ranks;
    rc = kvrelay_pool_set_ranks(p->pool, ranges, len, mem, need);
    FUZZ_CHECK(rc == (twice ? KVRELAY_ERR_ARG : KVRELAY_OK));
    free(rc == KVRELAY_OK ? p->ranks_mem : mem);
    if (rc == KVRELAY_OK)
      p->ranks_mem = mem;
    return;
  }
  if (shape < 192)
    rc = kvrelay_pool_report(p->pool, worker, more / 4 % 4, more / 16);
  else if (shape < 224)
    rc = kvrelay_pool_set_capacity(p->pool, worker, more / 4 % 4, more / 16 * 10);
  else
    rc = kvrelay_pool_reports_lost(p->pool, worker);
  FUZZ_CHECK(rc == KVRELAY_OK || rc == KVRELAY_ERR_NOT_FOUND);
}

/* ---- topology ---- */

static kvrelay_card card(uint8_t shape, uint8_t odd) {
  static const int32_t decode[] = {KVRELAY_ROLE_DECODE};
  static const kvrelay_roles needs[] = {{decode, 1}, {pool_roles, 1}};
  static const char *const components[] = {"e", "ee", "eee", "other"};
  kvrelay_card c = {0};
  c.endpoint =
      (kvrelay_endpoint){true, text("prod"), text(components[shape % 4]), text("generate")};
  c.worker_id = shape / 4 % 4;
  c.liveness = shape / 16 % 3;
  c.model_id = text(odd == 255 ? " x" : shape & 64 ? "llama" : "other");
  c.role = odd % 6;
  c.needs = needs;
  c.needs_len = odd / 8 % 3;
  c.aliases = pool_aliases;
  c.aliases_len = odd / 32 % 2;
  c.semantics = (kvrelay_semantics){true, POOL_WIDTH, HASHFMT_FORMAT_STANDARD};
  c.domain = (kvrelay_domain){true, pool_digest(odd / 64), pool_digest(9)};
  if (shape & 128) {
    c.has_suffix = c.has_lora = true;
    c.model_id = c.adapter = text("law");
    c.adapter_limit = odd % 3;
  }
  return c;
}

static void op_topology(world *w) {
  const size_t len = fuzz_below(&w->in, CARDS + 1);
  const int next = w->topology_at ^ 1;
  kvrelay_card cards[CARDS];
  for (size_t i = 0; i < len; i++) {
    const uint8_t shape = fuzz_byte(&w->in);
    cards[i] = card(shape, fuzz_byte(&w->in));
  }
  const size_t need = kvrelay_topology_mem_size(cards, len);
  uint8_t *mem = fuzz_alloc(need + sizeof cards);
  kvrelay_card *kept = (kvrelay_card *)(void *)mem; /* lent as long as what was derived */
  memcpy(kept, cards, sizeof cards);
  FUZZ_CHECK(kvrelay_topology_derive(kept, len, mem + sizeof cards, need, &w->topology[next]) ==
             KVRELAY_OK);
  const int rc = kvrelay_relay_set_topology(&w->r, &w->topology[next]);
  if (rc != KVRELAY_OK) {
    FUZZ_CHECK(rc == KVRELAY_ERR_LIMIT && w->topology[next].endpoints_len > w->cfg.max_members);
    free(mem);
    return;
  }
  free(w->topology_mem[w->topology_at]);
  w->topology_mem[w->topology_at] = NULL;
  w->topology_mem[next] = mem;
  w->topology_at = next;
}

/* ---- steps ---- */

static void tick(world *w) {
  kvrelay_relay_tick(&w->r, w->now);
  FUZZ_CHECK(kvrelay_relay_deadline_ns(&w->r) > w->now);
}

static void op_time(world *w) {
  const uint8_t how = fuzz_byte(&w->in);
  const uint64_t deadline = kvrelay_relay_deadline_ns(&w->r);
  if (how < 128)
    w->now += (uint64_t)how * MS / 8;
  else if (how < 160)
    w->now += (uint64_t)(how - 127) * 100 * MS;
  else if (deadline != KVRELAY_TIME_NONE && deadline > w->now + (how & 1))
    w->now = deadline - (how & 1);
  tick(w);
}

/* Who is named waits; who waits and is not named misses nothing. */
static void op_ready(world *w) {
  uint64_t id;
  if (kvrelay_relay_deadline_ns(&w->r) <= w->now)
    tick(w);
  settle(w);
  while (kvrelay_relay_ready_next(&w->r, &id) == 1) {
    size_t i = 0;
    while (i < CALLS && !(w->calls[i].open && w->calls[i].id == id))
      i++;
    FUZZ_CHECK(i < CALLS && w->calls[i].armed);
    w->calls[i].armed = false;
  }
  for (size_t i = 0; i < CALLS; i++) {
    call *k = &w->calls[i];
    if (k->open && k->armed)
      FUZZ_CHECK(!pull(w, k));
  }
}

static void op_connection(world *w) {
  if (w->connected)
    for (size_t i = RAW; i < CALLS; i++)
      if (w->calls[i].open)
        close_call(w, &w->calls[i]);
  w->connected = !w->connected;
  if (w->connected)
    kvrelay_consumer_connected(&w->c, w->now);
  else
    kvrelay_consumer_disconnected(&w->c, w->now);
}

static void op_shutdown(world *w) {
  if (fuzz_byte(&w->in) < 250)
    return;
  kvrelay_relay_shutdown(&w->r, w->now);
  w->stopping = true;
  end_streams(w, NULL, KVRELAY_REASON_NONE);
}

static void pull_all(world *w, size_t from, size_t to) {
  for (size_t i = from; i < to; i++)
    for (int count = 0; pull(w, &w->calls[i]); count++) {
      FUZZ_CHECK(count < 32);
      consume(w);
    }
}

static void operate(world *w) {
  const uint8_t op = fuzz_byte(&w->in) % 32;
  call *const k = &w->calls[op >= 8 && op < 18 ? fuzz_below(&w->in, CALLS) : 0];
  if (op < 6)
    op_events(w);
  else if (op < 8)
    op_open(w);
  else if (op < 13)
    (void)pull(w, k);
  else if (op < 17)
    pull_all(w, (size_t)(k - w->calls), (size_t)(k - w->calls) + 1);
  else if (op == 17 && k->open && k->mine == 0)
    close_call(w, k);
  else if (op < 21)
    op_time(w);
  else if (op < 23)
    op_pool(w);
  else if (op == 23)
    op_topology(w);
  else if (op == 24)
    op_load(w);
  else if (op == 25)
    op_break(w);
  else if (op == 26)
    op_connection(w);
  else if (op == 27)
    op_shutdown(w);
  else if (op < 30)
    op_ready(w);
  else if (op == 30)
    op_describe(w);
  else
    pull_all(w, RAW, CALLS);
}

/* Told everything, each replica is what the producers hold; then all go. */
static void finish(world *w) {
  for (size_t i = 0; i < PLACES; i++)
    if (in_force(&w->places[i]))
      FUZZ_CHECK(kvrelay_relay_pool_publish(&w->r, w->places[i].pool, w->now) == KVRELAY_OK ||
                 w->places[i].broken);
  settle(w);
  pull_all(w, 0, CALLS);
  consume(w);
  check_replicas(w);
  for (size_t i = 0; i < CALLS; i++)
    if (w->calls[i].open)
      close_call(w, &w->calls[i]);
  for (size_t i = 0; i < PLACES; i++) {
    if (w->places[i].pool)
      withdraw(w, &w->places[i]);
    free(w->places[i].state_mem);
  }
  settle(w);
  kvrelay_consumer_disconnected(&w->c, w->now);
  w->connected = false;
  consume(w);
  for (size_t i = 0; i < 4 * PLACES; i++)
    FUZZ_CHECK(w->lent[i] == NULL);
  tick(w);
  FUZZ_CHECK(kvrelay_relay_stats_get(&w->r).hubs == 0);
  free(w->topology_mem[w->topology_at]);
}

static kvrelay_relay_config configure(uint8_t options) {
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.identity = (kvrelay_relay_identity){17, 23};
  cfg.max_pools = POOLS_MAX;
  cfg.max_members = 3;
  cfg.max_info_calls = cfg.max_load_subscribers = 2;
  cfg.max_catalog_subscribers = cfg.max_readiness_subscribers = 2;
  cfg.max_pool_streams = options & 1 ? 4 : 8;
  cfg.max_subscribers_per_pool = options & 2 ? 2 : 4;
  cfg.max_hubs = options & 4 ? 1 : 2;
  cfg.queue_frames = QUEUE_FRAMES;
  cfg.encoding_concurrency = options & 8 ? 1 : 2;
  cfg.max_bucket_count = BUCKETS_MAX;
  cfg.chunk_buckets = CHUNK_BUCKETS;
  cfg.publication_threshold = options & 16 ? 1 : 4;
  cfg.publication_delay_ns = 3 * MS;
  cfg.heartbeat_ns = 6 * MS;
  cfg.snapshot_progress_ns = 12 * MS;
  cfg.readiness_heartbeat_ns = 20 * MS;
  cfg.load_window_ns = 10 * MS;
  cfg.load_windows = LOAD_WINDOWS;
  return cfg;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  world *w = fuzz_alloc(sizeof *w);
  w->in = (fuzz_input){data, len};
  w->now = UINT64_C(1000) * MS;
  w->cfg = configure(fuzz_byte(&w->in));
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.max_pools = PLACES;
  cfg.catalog_bytes = cfg.readiness_bytes = 16384;
  cfg.backoff_first_ns = 2 * MS;
  cfg.backoff_max_ns = 8 * MS;
  const size_t need = kvrelay_relay_mem_size(&w->cfg), more = kvrelay_consumer_mem_size(&cfg);
  uint8_t *mem = fuzz_alloc(need + GUARD), *consumer_mem = fuzz_alloc(more);
  memset(mem + need, 0xA7, GUARD);
  FUZZ_CHECK(kvrelay_relay_init(&w->r, &w->cfg, mem, need, w->now) == KVRELAY_OK);
  FUZZ_CHECK(kvrelay_consumer_init(&w->c, &cfg, consumer_mem, more, w->now) == KVRELAY_OK);
  while (w->in.left > 0) {
    operate(w);
    settle(w);
    consume(w);
    check_replicas(w);
  }
  finish(w);
  for (size_t i = 0; i < GUARD; i++)
    FUZZ_CHECK(mem[need + i] == 0xA7);
  free(mem);
  free(consumer_mem);
  free(w);
  return 0;
}
