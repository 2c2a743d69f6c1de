/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_consumer as a whole: messages of all planes (as bytes and as structs, good and damaged),
 * ends, broken messages, connections, jumps of time, memory given, refused and too small. Every
 * action fits what was done before; a filter stream is given up by the first frame that does not
 * fit a model of its own, and by no other; what is asked is answered from the words of the model;
 * memory comes back; nothing is due again and again.
 *
 * SECURITY.md: 1, 2, 3, 5, 6, 7, 9, 15.
 *
 * Input: one byte of options, then operations of one byte with what they need.
 */

#include "frames.h"
#include "kvrelay_pb.h"
#include "pools.h"

enum {
  ARENA_LEN = 1 << 15,
  POOLS = 6,
  CALLS = 16,
  BLOCKS = 3,
  GUARD = 64,
  WIRE_CAP = 1 << 13,
  REPLICA_CAP = 1 << 16, /* there is no memory for more */
  MS = 1000000
};

/* A call as the transport knows it, with what its filter stream brought so far. */
typedef struct call {
  uint32_t id; /* 0 = free */
  int32_t method;
  kvrelay_producer producer;
  ckf_format format;
  ckf_replica replica;
  void *replica_mem;
  uint64_t cut; /* of the snapshot begun, or the sequence */
  bool cut_known;
} call;

typedef struct world {
  kvrelay_consumer c;
  fuzz_input in;
  uint64_t now;
  call calls[CALLS];
  void *given[2 * CALLS]; /* memory lent to the consumer */
  bool connected, stopped;
  uint8_t memory; /* of the next replica: odd none, 2 too little at first, else enough */
} world;

static uint64_t arena_mem[ARENA_LEN / 8];
static uint8_t wire[WIRE_CAP], frame[FRAME_CAP];
static uint32_t tokens[BLOCKS * POOL_WIDTH];
static uint64_t hashes[BLOCKS];
static uint64_t full[FRAME_BUCKETS]; /* words that hold all blocks */

/* The words that snapshots and deltas are made of. */
static void prepare(void) {
  static const ckf_format format = {42, FRAME_BUCKETS};
  static bool done;
  uint64_t local[BLOCKS];
  ckf_image log[9];
  ckf_filter filter;
  size_t blocks;
  if (done)
    return;
  done = true;
  for (uint32_t i = 0; i < BLOCKS * POOL_WIDTH; i++)
    tokens[i] = i + 1;
  FUZZ_CHECK(hashfmt_blocks(HASHFMT_FORMAT_STANDARD, POOL_WIDTH, hashfmt_seed(NULL, 0, NULL, 0),
                            tokens, BLOCKS * POOL_WIDTH, local, hashes, BLOCKS,
                            &blocks) == HASHFMT_OK);
  FUZZ_CHECK(ckf_filter_init(&filter, &format, 8, full, log, NULL) == CKF_OK);
  for (size_t i = 0; i < blocks; i++)
    FUZZ_CHECK(ckf_filter_insert(&filter, hashes[i]) == CKF_OK);
}

/* ---- messages ---- */

static void damage_envelope(world *w, kvrelay_envelope *e) {
  const uint8_t how = fuzz_byte(&w->in);
  if (how == 255)
    e->contract_marker++;
  else if (how == 254)
    e->protocol_version++;
  else if (how == 253)
    e->relay_present = false;
  else if (how == 252)
    e->relay.relay_incarnation++;
}

/* What arrives of `len` encoded bytes: mostly they, else a few others, or a part. A copy. */
static uint8_t *travel(world *w, ptrdiff_t len, size_t *arrived) {
  const uint8_t how = fuzz_byte(&w->in);
  FUZZ_CHECK(len >= 0);
  *arrived = (size_t)len;
  if (how >= 250)
    *arrived = fuzz_below(&w->in, (uint32_t)len + 1);
  else if (how >= 230)
    for (uint8_t i = how; i >= 230 && len > 0; i = (uint8_t)(i - 5))
      wire[fuzz_below(&w->in, (uint32_t)len)] = fuzz_byte(&w->in);
  return fuzz_copy(wire, *arrived);
}

/* ---- calls and actions ---- */

static call *find(world *w, uint32_t id) {
  for (size_t i = 0; i < CALLS; i++)
    if (id != 0 && w->calls[i].id == id)
      return &w->calls[i];
  return NULL;
}

static call *find_producer(world *w, const kvrelay_producer *p) {
  for (size_t i = 0; i < CALLS; i++)
    if (w->calls[i].id != 0 && w->calls[i].method == KVRELAY_METHOD_SUBSCRIBE_POOL &&
        kvrelay_producer_equal(&w->calls[i].producer, p))
      return &w->calls[i];
  return NULL;
}

static void forget(call *k) {
  if (!k)
    return;
  free(k->replica_mem);
  memset(k, 0, sizeof *k);
}

static void hang_up(world *w) {
  for (size_t i = 0; i < CALLS; i++)
    forget(&w->calls[i]);
  w->connected = false;
}

static void act_call(world *w, const kvrelay_action *a) {
  call *free_one = NULL;
  FUZZ_CHECK(w->connected && !w->stopped && a->call != 0 && !find(w, a->call));
  FUZZ_CHECK(a->request.contract_marker == KVRELAY_CONTRACT_MARKER);
  for (size_t i = 0; i < CALLS; i++) {
    if (w->calls[i].id == 0)
      free_one = &w->calls[i];
    else if (a->request.method != KVRELAY_METHOD_SUBSCRIBE_POOL)
      FUZZ_CHECK(w->calls[i].method != a->request.method); /* one of each */
  }
  FUZZ_CHECK(free_one != NULL);
  if (a->request.method == KVRELAY_METHOD_SUBSCRIBE_POOL) {
    const kvrelay_producer *p = &a->request.expected_producer;
    const ckf_format format = {p->ckf_format.seed, p->ckf_format.bucket_count};
    kvrelay_pool_view v;
    FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, a->pool, w->now, &v) == KVRELAY_OK);
    FUZZ_CHECK(v.verdict.class_ == KVRELAY_CLASS_OK && v.state == KVRELAY_REPLICA_SUBSCRIBING);
    FUZZ_CHECK(kvrelay_producer_equal(p, &v.descriptor->producer) && !find_producer(w, p));
    free_one->producer = *p;
    free_one->format = format;
    free_one->replica_mem = fuzz_alloc(ckf_replica_mem_size(&format));
    FUZZ_CHECK(ckf_replica_init(&free_one->replica, &format, free_one->replica_mem,
                                ckf_replica_mem_size(&format)) == CKF_OK);
  }
  free_one->id = a->call;
  free_one->method = a->request.method;
}

static void act_need(world *w, const kvrelay_action *a) {
  const uint8_t how = w->memory;
  size_t i = 0;
  kvrelay_pool_view v;
  FUZZ_CHECK(w->connected && !w->stopped);
  FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, a->pool, w->now, &v) == KVRELAY_OK);
  FUZZ_CHECK(v.verdict.class_ == KVRELAY_CLASS_OK && v.state == KVRELAY_REPLICA_WAITING);
  const ckf_format format = {v.descriptor->producer.ckf_format.seed,
                             v.descriptor->producer.ckf_format.bucket_count};
  FUZZ_CHECK(a->bytes == ckf_replica_mem_size(&format));
  if ((how & 1) || a->bytes > REPLICA_CAP) {
    FUZZ_CHECK(kvrelay_consumer_replica_give(&w->c, a->pool, NULL, 0, w->now) == KVRELAY_OK);
    return;
  }
  void *mem = fuzz_alloc(a->bytes);
  if (how & 2)
    FUZZ_CHECK(kvrelay_consumer_replica_give(&w->c, a->pool, mem, a->bytes - 1, w->now) ==
               KVRELAY_ERR_NOSPACE);
  FUZZ_CHECK(kvrelay_consumer_replica_give(&w->c, a->pool, mem, a->bytes, w->now) == KVRELAY_OK);
  FUZZ_CHECK(kvrelay_consumer_replica_give(&w->c, a->pool, mem, a->bytes, w->now) ==
             KVRELAY_ERR_STATE);
  while (i < 2 * CALLS && w->given[i] != NULL)
    i++;
  FUZZ_CHECK(i < 2 * CALLS);
  w->given[i] = mem;
}

static void act(world *w, const kvrelay_action *a) {
  size_t i = 0;
  switch (a->kind) {
  case KVRELAY_ACTION_CALL:
    act_call(w, a);
    break;
  case KVRELAY_ACTION_CANCEL:
    FUZZ_CHECK(find(w, a->call) != NULL);
    forget(find(w, a->call));
    break;
  case KVRELAY_ACTION_REPLICA_NEED:
    act_need(w, a);
    break;
  case KVRELAY_ACTION_REPLICA_FREE:
    while (i < 2 * CALLS && w->given[i] != a->mem)
      i++;
    FUZZ_CHECK(i < 2 * CALLS);
    free(a->mem);
    w->given[i] = NULL;
    break;
  default:
    FUZZ_CHECK(a->kind == KVRELAY_ACTION_RECONNECT || a->kind == KVRELAY_ACTION_STOP);
    FUZZ_CHECK(w->connected && !w->stopped);
    w->stopped = a->kind == KVRELAY_ACTION_STOP;
    hang_up(w);
  }
}

/* Everything that is due. It must end, and then nothing may be due. */
static void run(world *w) {
  kvrelay_action a;
  kvrelay_event_out event;
  size_t count = 0;
  for (; kvrelay_consumer_action_next(&w->c, w->now, &a); count++) {
    FUZZ_CHECK(count < 4 * CALLS);
    act(w, &a);
  }
  FUZZ_CHECK(kvrelay_consumer_deadline_ns(&w->c) > w->now);
  for (count = 0; kvrelay_consumer_event_next(&w->c, &event); count++)
    FUZZ_CHECK(count < 64 && event.kind >= KVRELAY_EVENT_INFO &&
               event.kind <= KVRELAY_EVENT_LOAD_VOID && event.pool < POOLS);
}

/* ---- what comes from the relay ---- */

/* By the contract: is this the next message of the call? Takes it, when it is. */
static bool fits(const world *w, call *k, const kvrelay_filter_update *m) {
  kvrelay_relay_identity relay;
  ckf_cbi1_frame view;
  const bool live = ckf_replica_live(&k->replica);
  if (kvrelay_check_envelope(&m->envelope).class_ != KVRELAY_CLASS_OK ||
      !m->envelope.relay_present ||
      (kvrelay_consumer_relay(&w->c, &relay) &&
       (relay.drt_instance_id != m->envelope.relay.drt_instance_id ||
        relay.relay_incarnation != m->envelope.relay.relay_incarnation)))
    return false;
  if (kvrelay_check_producer(&m->producer).class_ != KVRELAY_CLASS_OK ||
      !kvrelay_producer_equal(&m->producer, &k->producer))
    return false;
  if (m->kind == KVRELAY_UPDATE_HEARTBEAT)
    return live && m->payload_len == 0 && m->sequence == k->cut && m->base_sequence == k->cut;
  if (ckf_cbi1_decode(&k->format, m->payload, m->payload_len, &view) != CKF_OK ||
      view.dc_id != k->producer.pool_id.dc_id || view.epoch != m->sequence)
    return false;
  if (m->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK) {
    if (live || view.kind != CKF_CBI1_SNAPSHOT || m->base_sequence != m->sequence ||
        (k->cut_known && k->cut != m->sequence))
      return false;
  } else if (m->kind != KVRELAY_UPDATE_DELTA || !live || view.kind != CKF_CBI1_DELTA ||
             m->base_sequence != k->cut || view.base_epoch != k->cut)
    return false;
  if (ckf_replica_apply(&k->replica, &view) < 0)
    return false;
  k->cut = m->sequence;
  k->cut_known = true;
  return true;
}

/* Feeds one message of a call, however it was made, and looks at what became of the call. */
static void feed_filter(world *w, call *k, const kvrelay_filter_update *m) {
  const uint32_t id = k->id;
  const bool good = fits(w, k, m);
  FUZZ_CHECK(kvrelay_consumer_feed_filter(&w->c, id, m, w->now) == KVRELAY_OK);
  run(w);
  FUZZ_CHECK(!good || find(w, id) != NULL);
  FUZZ_CHECK(good || find(w, id) == NULL);
}

static void broken(world *w, uint32_t id, int err) {
  FUZZ_CHECK(kvrelay_consumer_feed_broken(&w->c, id, err, w->now) ==
             (find(w, id) ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
  run(w);
  FUZZ_CHECK(find(w, id) == NULL);
}

/* The payload of a frame, mostly one that can come now. */
static size_t make_payload(world *w, const kvrelay_filter_update *m) {
  const ckf_format format = {42, FRAME_BUCKETS};
  const uint8_t shape = fuzz_byte(&w->in);
  ptrdiff_t len = 0;
  if (m->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK) {
    uint64_t words[FRAME_BUCKETS];
    const uint32_t chunk = 4u << (shape >> 6), count = ckf_cbi1_chunk_count(&format, chunk);
    for (size_t i = 0; i < FRAME_BUCKETS; i++)
      words[i] = shape >> i % 6 & 1 ? 0 : full[i];
    len = ckf_cbi1_snapshot_encode(&format, 7, m->sequence, words, FRAME_BUCKETS, chunk,
                                   fuzz_below(&w->in, count), frame, sizeof frame);
  } else if (m->kind == KVRELAY_UPDATE_DELTA) {
    const uint32_t bucket = shape % FRAME_BUCKETS;
    const ckf_image image[2] = {{bucket, shape & 16 ? 0 : full[bucket]},
                                {(bucket + (shape >> 6)) % FRAME_BUCKETS, shape}};
    len = ckf_cbi1_delta_encode(&format, 7, m->base_sequence, m->sequence, image,
                                shape & 32 ? 2 : 1, frame, sizeof frame);
  } else if (shape == 255)
    return 1;
  if (len < 0) /* the library makes no such frame: a peer may */
    return frame_read(&w->in, &format, frame);
  return (size_t)len;
}

static void op_filter(world *w) {
  call *k = &w->calls[fuzz_below(&w->in, CALLS)];
  for (size_t i = 0; i < CALLS && k->method != KVRELAY_METHOD_SUBSCRIBE_POOL; i++)
    k = &w->calls[i];
  if (k->method != KVRELAY_METHOD_SUBSCRIBE_POOL)
    return;
  const uint8_t kind = fuzz_byte(&w->in), shift = fuzz_byte(&w->in);
  kvrelay_filter_update m = {0};
  m.envelope = pool_envelope();
  m.producer = k->producer;
  m.kind = kind >= 240 ? kind % 5 : !ckf_replica_live(&k->replica) ? 1 : 2 + kind % 2;
  m.base_sequence = k->cut_known ? k->cut : fuzz_edge(&w->in);
  m.sequence = m.base_sequence + (m.kind == KVRELAY_UPDATE_DELTA);
  if (shift >= 240) {
    m.base_sequence += shift & 1;
    m.sequence += shift >> 1 & 1;
    m.producer.layout_generation += shift >> 2 & 1;
    m.producer.pool_id.dc_id += shift >> 3 & 1;
  }
  m.payload = frame;
  m.payload_len = make_payload(w, &m);
  damage_envelope(w, &m.envelope);
  if (fuzz_bit(&w->in)) { /* the struct, as it is */
    uint8_t *payload = fuzz_copy(m.payload, m.payload_len);
    m.payload = payload;
    feed_filter(w, k, &m);
    free(payload);
    return;
  }
  size_t len;
  uint8_t *bytes = travel(w, kvrelay_pb_encode_filter(&m, wire, sizeof wire), &len);
  kvrelay_filter_update got;
  const int rc = kvrelay_pb_decode_filter(bytes, len, NULL, &got);
  if (rc == KVRELAY_OK)
    feed_filter(w, k, &got);
  else
    broken(w, k->id, rc);
  free(bytes);
}

/* The call of a plane, or a number that is none. */
static uint32_t call_of(const world *w, int32_t method) {
  for (size_t i = 0; i < CALLS; i++)
    if (w->calls[i].method == method)
      return w->calls[i].id;
  return 0;
}

static void op_info(world *w) {
  const uint32_t id = call_of(w, KVRELAY_METHOD_GET_RELAY_INFO);
  kvrelay_relay_info m = {pool_envelope()}, got;
  size_t len;
  damage_envelope(w, &m.envelope);
  uint8_t *bytes = travel(w, kvrelay_pb_encode_info(&m, wire, sizeof wire), &len);
  const int rc = kvrelay_pb_decode_info(bytes, len, NULL, &got);
  if (rc == KVRELAY_OK)
    FUZZ_CHECK(kvrelay_consumer_feed_info(&w->c, id, &got, w->now) ==
               (id ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
  else
    broken(w, id, rc);
  free(bytes);
}

static bool same_descriptor(const kvrelay_descriptor *a, const kvrelay_descriptor *b) {
  static uint8_t one[WIRE_CAP], two[WIRE_CAP];
  const ptrdiff_t x = kvrelay_pb_encode_descriptor(a, one, sizeof one);
  const ptrdiff_t y = kvrelay_pb_encode_descriptor(b, two, sizeof two);
  return x == y && (x < 0 || memcmp(one, two, (size_t)x) == 0);
}

/* A stream that goes on has its last catalog in force, pool for pool. */
static void feed_catalog(world *w, uint32_t id, const kvrelay_catalog_update *m) {
  uint64_t revision;
  uint32_t pools;
  kvrelay_pool_view v;
  FUZZ_CHECK(kvrelay_consumer_feed_catalog(&w->c, id, m, w->now) ==
             (id ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
  run(w);
  if (!find(w, id))
    return;
  FUZZ_CHECK(kvrelay_consumer_catalog(&w->c, &revision, &pools));
  FUZZ_CHECK(revision == m->revision && pools == m->pools_len);
  for (uint32_t i = 0; i < pools; i++) {
    FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, i, w->now, &v) == KVRELAY_OK);
    FUZZ_CHECK(same_descriptor(v.descriptor, &m->pools[i]));
    FUZZ_CHECK(v.verdict.class_ == kvrelay_check_descriptor(&m->pools[i]).class_);
  }
}

static void op_catalog(world *w) {
  const uint32_t id = call_of(w, KVRELAY_METHOD_WATCH_CATALOG);
  kvrelay_descriptor pools[POOLS + 1];
  kvrelay_catalog_update m = {pool_envelope(), fuzz_edge(&w->in), true, pools, 0}, got;
  size_t len;
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  const uint8_t how = fuzz_byte(&w->in);
  if (how >= 128 && kvrelay_consumer_catalog(&w->c, &m.revision, &(uint32_t){0}))
    m.revision++;
  m.snapshot_present = how % 128 != 127;
  m.pools_len = fuzz_below(&w->in, POOLS + 2);
  for (size_t i = 0; i < m.pools_len; i++)
    pools[i] = pool_describe(&w->in, POOLS, FRAME_BUCKETS);
  damage_envelope(w, &m.envelope);
  uint8_t *bytes = travel(w, kvrelay_pb_encode_catalog(&m, wire, sizeof wire), &len);
  const int rc = kvrelay_pb_decode_catalog(bytes, len, &arena, &got);
  if (rc == KVRELAY_OK)
    feed_catalog(w, id, &got);
  else
    broken(w, id, rc);
  free(bytes);
}

static void op_readiness(world *w) {
  const uint32_t id = call_of(w, KVRELAY_METHOD_SUBSCRIBE_READINESS);
  const uint8_t how = fuzz_byte(&w->in);
  const kvrelay_descriptor d = pool_describe(&w->in, POOLS, FRAME_BUCKETS);
  const kvrelay_topology_member member = {
      d.serving_endpoint, {pool_roles, how & 1}, d.producer.pool_id};
  const kvrelay_topology_entry entry = {text("prod"), text("llama"), how % 3, {pool_roles, 1},
                                        {NULL, 0},    &member,       1,       {NULL, 0},
                                        true,         NULL,          0};
  kvrelay_readiness_update m = {pool_envelope(), fuzz_edge(&w->in), &entry, how >> 7}, got;
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  size_t len;
  damage_envelope(w, &m.envelope);
  const ptrdiff_t whole = kvrelay_pb_encode_readiness(&m, wire, sizeof wire);
  uint8_t *bytes = travel(w, whole, &len);
  const int rc = kvrelay_pb_decode_readiness(bytes, len, &arena, &got);
  if (rc == KVRELAY_OK)
    FUZZ_CHECK(kvrelay_consumer_feed_readiness(&w->c, id, &got, w->now) ==
               (id ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
  else
    broken(w, id, rc);
  free(bytes);
}

static void op_load(world *w) {
  const uint32_t id = call_of(w, KVRELAY_METHOD_SUBSCRIBE_LOAD);
  const uint8_t how = fuzz_byte(&w->in);
  const kvrelay_load_entry entry = {pool_describe(&w->in, POOLS, FRAME_BUCKETS).producer, how, 100,
                                    how % 3, 2};
  kvrelay_load_update m = {pool_envelope(), fuzz_edge(&w->in), 1, fuzz_edge(&w->in),
                           &entry,          how >> 7};
  kvrelay_load_update got;
  kvrelay_pb_arena arena = {arena_mem, sizeof arena_mem, 0};
  size_t len;
  damage_envelope(w, &m.envelope);
  uint8_t *bytes = travel(w, kvrelay_pb_encode_load(&m, wire, sizeof wire), &len);
  const int rc = kvrelay_pb_decode_load(bytes, len, &arena, &got);
  if (rc == KVRELAY_OK)
    FUZZ_CHECK(kvrelay_consumer_feed_load(&w->c, id, &got, w->now) ==
               (id ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
  else
    broken(w, id, rc);
  free(bytes);
}

/* ---- what it says ---- */

static void check_pools(world *w) {
  uint64_t revision;
  uint32_t pools = 0;
  if (!kvrelay_consumer_catalog(&w->c, &revision, &pools))
    return;
  FUZZ_CHECK(w->connected && pools <= POOLS);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, i, w->now, &v) == KVRELAY_OK);
    FUZZ_CHECK((v.words != NULL) == (v.state == KVRELAY_REPLICA_LIVE));
    if (v.verdict.class_ != KVRELAY_CLASS_OK) {
      FUZZ_CHECK(v.state == KVRELAY_REPLICA_QUARANTINED);
      continue;
    }
    const call *k = find_producer(w, &v.descriptor->producer);
    FUZZ_CHECK((k != NULL) ==
               (v.state == KVRELAY_REPLICA_SUBSCRIBING || v.state == KVRELAY_REPLICA_ASSEMBLING ||
                v.state == KVRELAY_REPLICA_LIVE));
    FUZZ_CHECK((k && ckf_replica_live(&k->replica)) == (v.state == KVRELAY_REPLICA_LIVE));
    FUZZ_CHECK((k && k->cut_known && !ckf_replica_live(&k->replica)) ==
               (v.state == KVRELAY_REPLICA_ASSEMBLING));
    FUZZ_CHECK(v.state != KVRELAY_REPLICA_WAITING || v.retry_ns > w->now);
    if (v.state == KVRELAY_REPLICA_LIVE)
      FUZZ_CHECK(v.sequence == k->cut &&
                 memcmp(v.words, ckf_replica_words(&k->replica), 8 * k->format.bucket_count) == 0);
  }
  kvrelay_pool_view none;
  FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, pools, w->now, &none) == KVRELAY_ERR_NOT_FOUND);
}

/* The registration that a question means, NULL when the pool does not list it. */
static const kvrelay_registration *listed(const kvrelay_descriptor *d, const kvrelay_query *q) {
  for (size_t i = 0; i < d->registrations_len; i++) {
    const kvrelay_registration *r = &d->registrations[i];
    if (q->adapter.len != 0) {
      if (r->target.kind == KVRELAY_TARGET_LORA &&
          kvrelay_text_equal(r->target.adapter, q->adapter))
        return r;
      continue;
    }
    if (kvrelay_text_equal(r->canonical_model_id, q->model))
      return r;
    for (size_t k = 0; k < r->aliases_len; k++)
      if (kvrelay_text_equal(r->aliases[k], q->model))
        return r;
  }
  return NULL;
}

/* The depth that the words of the model say. */
static uint32_t depth(const call *k, const kvrelay_descriptor *d, const kvrelay_registration *r,
                      uint64_t *complete) {
  uint64_t local[BLOCKS * POOL_WIDTH], sequence[BLOCKS * POOL_WIDTH];
  size_t blocks;
  const kvrelay_text salt =
      r->target.kind == KVRELAY_TARGET_LORA ? r->target.adapter : (kvrelay_text){NULL, 0};
  FUZZ_CHECK(hashfmt_blocks(d->query_semantics.hash_format, d->query_semantics.kv_block_size,
                            hashfmt_seed(salt.ptr, salt.len, NULL, 0), tokens, BLOCKS * POOL_WIDTH,
                            local, sequence, BLOCKS * POOL_WIDTH, &blocks) == HASHFMT_OK);
  *complete = blocks;
  return k ? ckf_search(&k->format, ckf_replica_words(&k->replica), sequence, blocks) : 0;
}

static void check_answer(world *w, const kvrelay_query *q, const kvrelay_answer *a) {
  kvrelay_pool_view v;
  uint64_t complete;
  FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, a->pool, w->now, &v) == KVRELAY_OK);
  FUZZ_CHECK(v.verdict.class_ == KVRELAY_CLASS_OK && listed(v.descriptor, q) != NULL);
  const bool live = v.state == KVRELAY_REPLICA_LIVE;
  const call *k = live ? find_producer(w, &v.descriptor->producer) : NULL;
  const uint32_t found = depth(k, v.descriptor, listed(v.descriptor, q), &complete);
  FUZZ_CHECK(a->consumer == 0 && a->complete_blocks == complete);
  FUZZ_CHECK(a->block_size == v.descriptor->query_semantics.kv_block_size);
  FUZZ_CHECK(a->state == (live                                     ? KVRELAY_ANSWER_KNOWN
                          : v.state == KVRELAY_REPLICA_QUARANTINED ? KVRELAY_ANSWER_UNSUPPORTED
                                                                   : KVRELAY_ANSWER_UNKNOWN));
  if (!live)
    return;
  FUZZ_CHECK(a->depth_blocks == found && a->stale == v.stale);
  FUZZ_CHECK(a->age_ns == w->now - v.last_frame_ns);
}

static void check_query(world *w) {
  static const char *const names[][2] = {
      {"llama", ""}, {"chat", ""}, {"llama-law", ""}, {"llama", "law"}, {"other", ""}};
  const char *const *name = names[fuzz_below(&w->in, 5)];
  const kvrelay_query q = {text(name[0]), text(name[1]), {NULL, 0}, tokens, BLOCKS * POOL_WIDTH};
  kvrelay_answer answers[POOLS];
  uint64_t scratch[BLOCKS * POOL_WIDTH], revision;
  uint32_t pools = 0, count = 0;
  const bool in_force = kvrelay_consumer_catalog(&w->c, &revision, &pools);
  const ptrdiff_t got =
      kvrelay_consumer_query(&w->c, &q, answers, POOLS, scratch, BLOCKS * POOL_WIDTH, w->now);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, i, w->now, &v) == KVRELAY_OK);
    count += v.verdict.class_ == KVRELAY_CLASS_OK && listed(v.descriptor, &q) != NULL;
  }
  if (!in_force)
    FUZZ_CHECK(got == KVRELAY_ERR_STATE);
  else if (q.adapter.len == 0)
    FUZZ_CHECK(got == (count ? (ptrdiff_t)count : KVRELAY_ERR_NOT_FOUND) ||
               (got == KVRELAY_ERR_MALFORMED && count > 1));
  for (ptrdiff_t i = 0; i < got; i++) {
    const kvrelay_answer *a = &answers[i], *before = i ? &answers[i - 1] : a;
    check_answer(w, &q, a);
    FUZZ_CHECK(before->state == KVRELAY_ANSWER_KNOWN || a->state != KVRELAY_ANSWER_KNOWN);
    FUZZ_CHECK(before->state != KVRELAY_ANSWER_KNOWN || a->state != KVRELAY_ANSWER_KNOWN ||
               before->depth_blocks * before->block_size >= a->depth_blocks * a->block_size);
  }
}

/* ---- steps ---- */

static void op_end(world *w) {
  call *k = &w->calls[fuzz_below(&w->in, CALLS)];
  kvrelay_status status = {fuzz_byte(&w->in) % 20 - 1, fuzz_byte(&w->in) % 14, "over", 0};
  const uint32_t id = k->id ? k->id : (uint32_t)fuzz_number(&w->in, 2);
  const bool ours = find(w, id) != NULL;
  forget(find(w, id));
  FUZZ_CHECK(kvrelay_consumer_feed_end(&w->c, id, &status, w->now) ==
             (ours ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
}

static void op_follow(world *w) {
  uint64_t revision;
  uint32_t pools = 0;
  kvrelay_pool_view v;
  const uint32_t pool = fuzz_below(&w->in, POOLS + 1);
  const bool follow = fuzz_bit(&w->in);
  (void)kvrelay_consumer_catalog(&w->c, &revision, &pools);
  FUZZ_CHECK(kvrelay_consumer_follow(&w->c, pool, follow, w->now) ==
             (pool < pools ? KVRELAY_OK : KVRELAY_ERR_NOT_FOUND));
  run(w);
  if (pool >= pools || !kvrelay_consumer_catalog(&w->c, &revision, &pools))
    return;
  FUZZ_CHECK(kvrelay_consumer_pool_get(&w->c, pool, w->now, &v) == KVRELAY_OK);
  FUZZ_CHECK(v.state == KVRELAY_REPLICA_QUARANTINED ||
             (v.state == KVRELAY_REPLICA_IDLE) == !follow);
}

/* Memory that nobody asked for is not taken. */
static void op_give(world *w) {
  uint64_t unwanted[FRAME_BUCKETS * 2];
  FUZZ_CHECK(kvrelay_consumer_replica_give(&w->c, fuzz_below(&w->in, POOLS + 1), unwanted,
                                           sizeof unwanted, w->now) < 0);
}

static void op_time(world *w) {
  const uint8_t how = fuzz_byte(&w->in);
  const uint64_t deadline = kvrelay_consumer_deadline_ns(&w->c);
  if (how < 128)
    w->now += (uint64_t)how * how * 10 * MS;
  else if (deadline != KVRELAY_TIME_NONE && deadline > w->now + (how & 1))
    w->now = deadline - (how & 1);
}

static void op_connection(world *w) {
  const uint8_t how = fuzz_byte(&w->in);
  hang_up(w);
  if (how & 3)
    kvrelay_consumer_disconnected(&w->c, w->now);
  if (how & 2)
    run(w);
  if (how & 1) {
    kvrelay_consumer_connected(&w->c, w->now);
    w->connected = !w->stopped;
  } else {
    kvrelay_consumer_disconnected(&w->c, w->now);
  }
}

static void operate(world *w) {
  const uint8_t op = fuzz_byte(&w->in) % 32;
  switch (op) {
  case 0:
  case 1:
    op_time(w);
    break;
  case 2:
    op_connection(w);
    break;
  case 3:
    op_end(w);
    break;
  case 4:
    w->memory = fuzz_byte(&w->in);
    break;
  case 5:
    op_follow(w);
    break;
  case 6:
    op_give(w);
    break;
  case 7:
    broken(w, w->calls[fuzz_below(&w->in, CALLS)].id, KVRELAY_ERR_LIMIT);
    break;
  case 8:
    op_info(w);
    break;
  case 9:
    op_readiness(w);
    break;
  case 10:
    op_load(w);
    break;
  case 11:
  case 12:
  case 13:
    op_catalog(w);
    break;
  default:
    op_filter(w);
    break;
  }
}

/* Left alone it sleeps from deadline to deadline, and gives back what it got. */
static void finish(world *w) {
  for (int i = 0; i < 20 && kvrelay_consumer_deadline_ns(&w->c) != KVRELAY_TIME_NONE; i++) {
    w->now = kvrelay_consumer_deadline_ns(&w->c);
    run(w);
  }
  kvrelay_consumer_disconnected(&w->c, w->now);
  hang_up(w);
  run(w);
  FUZZ_CHECK(kvrelay_consumer_deadline_ns(&w->c) == KVRELAY_TIME_NONE);
  for (size_t i = 0; i < 2 * CALLS; i++)
    FUZZ_CHECK(w->given[i] == NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  world *w = fuzz_alloc(sizeof *w);
  w->in = (fuzz_input){data, len};
  w->now = 1000;
  prepare();
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  const uint8_t options = fuzz_byte(&w->in);
  cfg.max_pools = POOLS;
  cfg.catalog_bytes = options & 8 ? 2048 : 16384;
  cfg.readiness_bytes = options & 16 ? 512 : 4096;
  cfg.subscribe_all = !(options & 1);
  cfg.follow_readiness = !(options & 2);
  cfg.follow_load = !(options & 4);
  const size_t need = kvrelay_consumer_mem_size(&cfg);
  uint8_t *mem = fuzz_alloc(need + GUARD);
  memset(mem + need, 0xA7, GUARD);
  FUZZ_CHECK(kvrelay_consumer_init(&w->c, &cfg, mem, need, w->now) == KVRELAY_OK);
  kvrelay_consumer_connected(&w->c, w->now);
  w->connected = true;
  run(w);
  while (w->in.left > 0) {
    operate(w);
    run(w);
    check_pools(w);
    check_query(w);
  }
  finish(w);
  for (size_t i = 0; i < GUARD; i++)
    FUZZ_CHECK(mem[need + i] == 0xA7);
  free(mem);
  free(w);
  return 0;
}
