/* SPDX-License-Identifier: Apache-2.0 */
/* The relay side without a socket: admission, catalog, publication hub, cadence, lag, shutdown. Ids
 * are the contract's. */
#include "test_relay_fixture.h"

/* ---- configuration ---- */

Test(relay, C1_C3_defaults_are_valid_and_zero_is_refused) {
  const kvrelay_relay_config good = fx_config();
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cr_assert_neq(kvrelay_relay_mem_size(&cfg), 0);
#define REFUSED(FIELD, VALUE)                                                                      \
  do {                                                                                             \
    cfg = good;                                                                                    \
    cfg.FIELD = (VALUE);                                                                           \
    cr_assert_eq(kvrelay_relay_mem_size(&cfg), 0, #FIELD " " #VALUE " was accepted");              \
  } while (0)
  REFUSED(max_pools, 0);
  REFUSED(max_pools, 65537);
  REFUSED(max_info_calls, 0);
  REFUSED(max_catalog_subscribers, 0);
  REFUSED(max_readiness_subscribers, 0);
  REFUSED(max_load_subscribers, 0);
  REFUSED(max_members, 65537);
  REFUSED(readiness_heartbeat_ns, 0);
  REFUSED(load_window_ns, 0);
  REFUSED(load_window_ns, 1500000);
  REFUSED(load_windows, 0);
  REFUSED(load_windows, 65537);
  REFUSED(max_pool_streams, 0);
  REFUSED(max_subscribers_per_pool, 0);
  REFUSED(max_hubs, 0);
  REFUSED(queue_frames, 0);
  REFUSED(queue_bytes, 4194368);
  REFUSED(queue_bytes, 4194623);
  REFUSED(encoding_concurrency, 0);
  REFUSED(max_bucket_count, 1);
  REFUSED(max_bucket_count, 48);
  REFUSED(max_bucket_count, (uint64_t)1 << 25);
  REFUSED(chunk_buckets, 63);
  REFUSED(chunk_buckets, 524289);
  REFUSED(publication_threshold, 0);
  REFUSED(publication_delay_ns, 0);
  REFUSED(heartbeat_ns, 0);
  REFUSED(snapshot_progress_ns, 0);
  REFUSED(max_pool_streams, UINT32_MAX);
#undef REFUSED
}

Test(relay, memory_one_byte_short_and_foreign_struct_size) {
  kvrelay_relay_config cfg = fx_config();
  kvrelay_relay relay;
  size_t len = kvrelay_relay_mem_size(&cfg);
  uint8_t *mem = malloc(len + 1);
  cr_assert_eq(kvrelay_relay_init(&relay, &cfg, mem, len - 1, 0), KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_relay_init_abi(&relay, sizeof relay + 8, &cfg, mem, len, 0),
               KVRELAY_ERR_ABI);
  cr_assert_eq(kvrelay_relay_init(&relay, &cfg, NULL, len, 0), KVRELAY_ERR_ARG);
  cr_assert_eq(kvrelay_relay_init(&relay, &cfg, mem + 1, len, 0), KVRELAY_OK); /* any alignment */
  cr_assert_eq(kvrelay_relay_check_(&relay), 0);
  cfg.max_hubs = 0;
  cr_assert_eq(kvrelay_relay_init(&relay, &cfg, mem, len, 0), KVRELAY_ERR_ARG);
  free(mem);
}

/* ---- GetRelayInfo ---- */

Test(relay, I3_info_has_both_numbers_and_ends_with_ok) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  kvrelay_request q = fx_request(KVRELAY_METHOD_GET_RELAY_INFO);
  q.subscriber_id.len = 0; /* this one has none */
  uint64_t calls[4];
  for (int i = 0; i < 4; i++)
    cr_assert_eq(fx_call(f, &q, &calls[i]), KVRELAY_OK);
  ASSERT_REFUSED(f, &q, RESOURCE_LIMIT);
  for (int i = 0; i < 4; i++) {
    cr_assert(kvrelay_relay_call_admitted(&f->relay, calls[i]));
    cr_assert_eq(fx_pull(f, calls[i]), KVRELAY_PULL_MESSAGE);
    const kvrelay_envelope *e = &f->out.u.info.envelope;
    cr_assert(f->out.method == KVRELAY_METHOD_GET_RELAY_INFO && e->protocol_version == 1 &&
              e->contract_marker == 0x4B565231 && e->relay_present &&
              e->relay.drt_instance_id == 17 && e->relay.relay_incarnation == 23);
    cr_assert_eq(fx_pull(f, calls[i]), KVRELAY_PULL_END);
    cr_assert(f->status.grpc == KVRELAY_GRPC_OK && f->status.reason == KVRELAY_REASON_NONE);
    fx_hang_up(f, calls[i]);
    cr_assert_eq(fx_pull(f, calls[i]), KVRELAY_ERR_NOT_FOUND);
    fx_hang_up(f, calls[i]); /* unknown by now: ignored */
  }
  cr_assert_eq(fx_call(f, &q, &calls[0]), KVRELAY_OK);
  cr_assert_eq(fx_pull(f, calls[3]), KVRELAY_ERR_NOT_FOUND,
               "a number of a former call reached a new one");
  fx_close(f);
}

Test(relay, W13_methods_that_are_not_offered_whatever_the_marker) {
  static const int32_t methods[] = {KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD, KVRELAY_METHOD_NONE, -1,
                                    7};
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
    kvrelay_request q = fx_request(methods[i]);
    q.subscriber_id.len = 0;
    ASSERT_REFUSED(f, &q, NONE);
    cr_assert_eq(f->status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
    q.contract_marker = 0;
    ASSERT_REFUSED(f, &q, NONE);
    cr_assert_eq(f->status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  }
  fx_close(f);
}

/* ---- admission ---- */

Test(relay, T7_subscriber_ids) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  char longest[129];
  memset(longest, 'x', sizeof longest);
  uint64_t call;
  kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK);
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK); /* a label: two may use it, both count */
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_streams, 2);
  q.subscriber_id = (kvrelay_text){(const uint8_t *)longest, 128};
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK);
  q.subscriber_id.len = 129;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  q.subscriber_id.len = 0;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  q.subscriber_id = text_of("consumer\nspoof");
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  fx_close(f);
}

Test(relay, T5_expected_producer) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  const kvrelay_request good = fx_pool_request(p);
  kvrelay_request q = good;
  q.contract_marker = 0;
  ASSERT_REFUSED(f, &q, CONTRACT_MISMATCH);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_FAILED_PRECONDITION);
  q = good;
  q.expected_producer.pool_id.identity_version++;
  ASSERT_REFUSED(f, &q, UNSUPPORTED_FEATURE);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_FAILED_PRECONDITION);
  cr_assert_not_null(strstr(f->status.text, "PoolIdentityVersion"));
  q = good;
  q.expected_producer.layout_generation = 0;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_INVALID_ARGUMENT);
  cr_assert_not_null(strstr(f->status.text, "ZeroLayoutGeneration"));
  q = good;
  q.expected_producer.present = false;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  q = good;
  q.expected_producer.pool_id.dc_id++;
  ASSERT_REFUSED(f, &q, POOL_NOT_FOUND);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_NOT_FOUND);
  cr_assert_not_null(
      strstr(f->status.text,
             "01010101010101010101010101010101:02020202020202020202020202020202/0000000000000004"));
  q = good;
  q.expected_producer.producer_incarnation++;
  ASSERT_REFUSED(f, &q, PRODUCER_CHANGED);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_FAILED_PRECONDITION);
  q = good;
  q.expected_producer.ckf_format.bucket_count *= 2;
  ASSERT_REFUSED(f, &q, PRODUCER_CHANGED);
  uint64_t call;
  cr_assert_eq(fx_call(f, &good, &call), KVRELAY_OK);
  kvrelay_relay_stats st = kvrelay_relay_stats_get(&f->relay);
  cr_assert(st.refused[KVRELAY_REASON_CONTRACT_MISMATCH] == 1 &&
            st.refused[KVRELAY_REASON_INVALID_REQUEST] == 2 &&
            st.refused[KVRELAY_REASON_UNSUPPORTED_FEATURE] == 1 &&
            st.refused[KVRELAY_REASON_POOL_NOT_FOUND] == 1 &&
            st.refused[KVRELAY_REASON_PRODUCER_CHANGED] == 2 && st.pool_streams == 1);
  fx_close(f);
}

/* Each step breaks the check of its number and all later ones; the earliest decides. */
Test(relay, order_of_admission) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_pool_streams = 1;
  cfg.max_catalog_subscribers = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  const kvrelay_request good = fx_pool_request(p);
  uint64_t call;
  cr_assert_eq(fx_call(f, &good, &call), KVRELAY_OK); /* step 5 refuses from here on */
  kvrelay_request q = good;
  q.expected_producer.pool_id.dc_id++;
  ASSERT_REFUSED(f, &q, RESOURCE_LIMIT);
  q.expected_producer.layout_generation = 0;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  cr_assert_not_null(strstr(f->status.text, "ZeroLayoutGeneration"));
  q.expected_producer.present = false;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  cr_assert_null(strstr(f->status.text, "ZeroLayoutGeneration"));
  q.subscriber_id.len = 0;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  cr_assert_not_null(strstr(f->status.text, "subscriber_id"));
  q.contract_marker++;
  ASSERT_REFUSED(f, &q, CONTRACT_MISMATCH);
  fx_hang_up(f, call);

  /* 6 before 7 before 8 */
  kvrelay_relay_shutdown(&f->relay, f->now);
  q = good;
  ASSERT_REFUSED(f, &q, PUBLICATION_UNAVAILABLE);
  q.expected_producer.layout_generation++;
  ASSERT_REFUSED(f, &q, PRODUCER_CHANGED);
  q.expected_producer.pool_id.dc_id++;
  ASSERT_REFUSED(f, &q, POOL_NOT_FOUND);
  fx_close(f);

  f = fx_open(&cfg);
  q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK);
  ASSERT_REFUSED(f, &q, RESOURCE_LIMIT);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_assert_not_null(strstr(f->status.text, "1"));
  q.subscriber_id.len = 0;
  ASSERT_REFUSED(f, &q, INVALID_REQUEST);
  fx_close(f);
}

Test(relay, T4_T8_H14_stream_permits) {
  for (uint32_t limit = 1; limit <= 65; limit += 64) {
    kvrelay_relay_config cfg = fx_config();
    cfg.max_pool_streams = cfg.max_subscribers_per_pool = limit;
    cfg.encoding_concurrency = limit;
    fx *f = fx_open(&cfg);
    fx_pool *p = fx_publish(f, 1, 32);
    kvrelay_request q = fx_pool_request(p);
    uint64_t calls[65];
    for (uint32_t i = 0; i < limit; i++)
      cr_assert_eq(fx_call(f, &q, &calls[i]), KVRELAY_OK);
    ASSERT_REFUSED(f, &q, RESOURCE_LIMIT);
    cr_assert_eq(f->status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
    fx_hang_up(f, calls[limit / 2]);
    cr_assert_eq(fx_call(f, &q, &calls[limit / 2]), KVRELAY_OK);
    ASSERT_REFUSED(f, &q, RESOURCE_LIMIT);
    fx_close(f);
  }
}

Test(relay, H3_subscribers_per_pool) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_subscribers_per_pool = 1;
  fx *f = fx_open(&cfg);
  reader a, b;
  fx_pool *p = fx_publish(f, 1, 32);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_ERR_REFUSED);
  cr_assert_eq(f->status.reason, KVRELAY_REASON_RESOURCE_LIMIT);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).pool_streams, 1,
               "a refused stream kept its permit");
  fx_publish(f, 2, 32);
  cr_assert_eq(reader_open(f, &b, &f->pools[2]), KVRELAY_OK);
  fx_close(f);
}

/* ---- snapshot permit ---- */

Test(relay, waiting_for_a_snapshot_permit_is_first_come_first_served) {
  kvrelay_relay_config cfg = fx_config();
  cfg.encoding_concurrency = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader r[3];
  for (int i = 0; i < 3; i++)
    cr_assert_eq(reader_open(f, &r[i], p), KVRELAY_OK);
  for (int i = 0; i < 3; i++)
    cr_assert_eq(kvrelay_relay_call_admitted(&f->relay, r[i].call), i == 0);
  cr_assert_eq(reader_pull(f, &r[1]), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_pull(f, &r[2]), KVRELAY_PULL_NONE);
  fx_delta(f, p); /* the waiting ones pin no copy: their cut comes later */
  for (int i = 0; i < 8; i++)
    cr_assert_eq(reader_pull(f, &r[0]), KVRELAY_PULL_MESSAGE);
  cr_assert_leq(kvrelay_relay_deadline_ns(&f->relay), f->now, "nobody would admit the next one");
  cr_assert(
      !kvrelay_relay_call_admitted(&f->relay, r[1].call)); /* the last chunk may still be read */
  fx_tick(f, 0);
  cr_assert_eq(reader_drain(f, &r[0]), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&r[0]) && r[0].sequence == 1);
  cr_assert(kvrelay_relay_call_admitted(&f->relay, r[1].call));
  cr_assert(!kvrelay_relay_call_admitted(&f->relay, r[2].call));
  cr_assert(fx_ready(f, r[1].call));
  reader_close(f, &r[1]); /* gives the permit back unused */
  cr_assert(kvrelay_relay_call_admitted(&f->relay, r[2].call));
  cr_assert(fx_ready(f, r[2].call));
  cr_assert_eq(reader_drain(f, &r[2]), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&r[2]) && r[2].sequence == 1);
  fx_close(f);
}

Test(relay, H13_a_wait_ends_with_retirement_or_shutdown) {
  for (int shutdown = 0; shutdown < 2; shutdown++) {
    kvrelay_relay_config cfg = fx_config();
    cfg.encoding_concurrency = 1;
    cfg.max_pool_streams = 2;
    fx *f = fx_open(&cfg);
    fx_publish(f, 1, 1000);
    fx_publish(f, 2, 1000);
    reader a, b, c;
    cr_assert_eq(reader_open(f, &a, &f->pools[1]), KVRELAY_OK);
    kvrelay_request unknown = fx_pool_request(&f->pools[1]);
    unknown.expected_producer.pool_id.dc_id++;
    ASSERT_REFUSED(f, &unknown, POOL_NOT_FOUND); /* before any wait */
    cr_assert_eq(reader_open(f, &b, &f->pools[2]), KVRELAY_OK);
    cr_assert_eq(reader_pull(f, &b), KVRELAY_PULL_NONE);
    ASSERT_REFUSED(f, &unknown, RESOURCE_LIMIT); /* global and at once */
    if (shutdown)
      kvrelay_relay_shutdown(&f->relay, f->now);
    else
      fx_withdraw(f, 2);
    cr_assert(fx_ready(f, b.call));
    ASSERT_ENDED(f, &b, PUBLICATION_UNAVAILABLE);
    cr_assert(!kvrelay_relay_call_admitted(&f->relay, b.call));
    cr_assert_eq(kvrelay_relay_stats_get(&f->relay).pool_streams, 2);
    reader_close(f, &b);
    cr_assert_eq(kvrelay_relay_stats_get(&f->relay).pool_streams, 1);
    if (!shutdown) {
      fx_publish(f, 3, 32);
      cr_assert_eq(reader_open(f, &c, &f->pools[3]), KVRELAY_OK);
    }
    fx_close(f);
  }
}

/* The only place for a snapshot is a's, and b waits for it. */
static fx *one_place(fx_pool **p, reader *a, reader *b) {
  kvrelay_relay_config cfg = fx_config();
  cfg.encoding_concurrency = 1;
  cfg.snapshot_progress_ns = 20 * MS;
  fx *f = fx_open(&cfg);
  *p = fx_publish(f, 1, 1000);
  cr_assert_eq(reader_open(f, a, *p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, b, *p), KVRELAY_OK);
  return f;
}

Test(relay, H11_progress_timeout_gives_the_permit_back) {
  fx_pool *p;
  reader a, b;
  fx *f = one_place(&p, &a, &b);
  cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE);
  fx_tick(f, 19 * MS);
  cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE); /* each chunk has the whole time */
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + 20 * MS);
  fx_tick(f, 20 * MS - 1);
  cr_assert(!kvrelay_relay_call_admitted(&f->relay, b.call));
  fx_tick(f, 1);
  cr_assert(kvrelay_relay_call_admitted(&f->relay, b.call)); /* before a reads again */
  cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
  ASSERT_ENDED(f, &a, SNAPSHOT_PROGRESS_TIMEOUT);
  cr_assert_not_null(strstr(f->status.text, "20"));
  cr_assert(a.chunks == 2 && reader_current(&b));
  kvrelay_relay_stats st = kvrelay_relay_stats_get(&f->relay);
  cr_assert(st.progress_timeouts == 1 && st.producers_fenced == 0 && st.pool_streams == 2);
  cr_assert_eq(kvrelay_pool_subscribers(p->pool), 1);
  fx_delta(f, p);
  cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&b));
  fx_close(f);
}

/* Chunks that a subscriber gets who takes so many bytes in a message. */
static uint32_t chunks_for(fx *f, fx_pool *p, size_t max_message_bytes, size_t *longest) {
  kvrelay_request q = fx_pool_request(p);
  uint64_t call;
  uint32_t chunks = 0;
  q.max_message_bytes = max_message_bytes;
  *longest = 0;
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK);
  uint64_t next = 0; /* bucket */
  while (fx_pull(f, call) == KVRELAY_PULL_MESSAGE) {
    ckf_cbi1_frame frame;
    const kvrelay_filter_update *m = &f->out.u.filter;
    cr_assert_eq(
        ckf_cbi1_decode(ckf_producer_format(&p->state), m->payload, m->payload_len, &frame),
        CKF_OK);
    cr_assert(frame.chunk_index == chunks && frame.bucket_offset == next);
    next += frame.word_count;
    chunks++;
    if (m->payload_len > *longest)
      *longest = m->payload_len;
  }
  cr_assert_eq(next, ckf_producer_format(&p->state)->bucket_count);
  fx_hang_up(f, call);
  return chunks;
}

Test(relay, B11_2_snapshots_come_in_chunks_that_the_subscriber_takes) {
  static const struct {
    size_t max;
    uint32_t chunk_buckets, buckets;
  } cases[] = {{0, 65536, 65536},      {1, 65536, 4096},
               {65536, 65536, 4096},   {65769, 65536, 4096},
               {65770, 65536, 8192},   {131305, 65536, 8192},
               {131306, 65536, 16384}, {524521, 65536, 32768},
               {524522, 65536, 65536}, {(size_t)1 << 40, 65536, 65536},
               {65536, 1024, 1024},    {65536, 5000, 4096},
               {65770, 5000, 5000},    {1, 64, 64}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    kvrelay_relay_config cfg = fx_config();
    size_t longest;
    cfg.max_bucket_count = 65536;
    cfg.chunk_buckets = cases[i].chunk_buckets;
    fx *f = fx_open(&cfg);
    fx_pool *p = fx_publish(f, 1, 131072);
    const uint64_t all = ckf_producer_format(&p->state)->bucket_count;
    cr_assert_eq(all, 65536);
    const uint32_t chunks = chunks_for(f, p, cases[i].max, &longest);
    cr_expect_eq(chunks, (all + cases[i].buckets - 1) / cases[i].buckets, "case %zu: %u", i,
                 chunks);
    cr_expect_eq(longest, 8 * cases[i].buckets + CKF_CBI1_SNAPSHOT_PREFIX_BYTES, "case %zu", i);
    /* Others on the same relay are not concerned. */
    cr_expect_eq(chunks_for(f, p, 0, &longest), (all + cfg.chunk_buckets - 1) / cfg.chunk_buckets,
                 "case %zu", i);
    fx_close(f);
  }
}

/* The chunk that was pulled last, and a copy of it. */
typedef struct kept_chunk {
  const uint8_t *bytes;
  size_t len;
  uint8_t copy[1024];
} kept_chunk;

static void keep_chunk(const fx *f, kept_chunk *k) {
  k->bytes = f->out.u.filter.payload;
  k->len = f->out.u.filter.payload_len;
  cr_assert(k->len <= sizeof k->copy);
  memcpy(k->copy, k->bytes, k->len);
}

Test(relay, a_held_chunk_stays_until_the_next_pull) {
  kvrelay_relay_config cfg = fx_config();
  cfg.encoding_concurrency = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader a, b;
  kept_chunk k;
  fx_store(p, 100);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_OK);
  kvrelay_relay_call_hold(&f->relay, a.call, true);
  while (!ckf_replica_live(&a.replica)) {
    cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE);
    keep_chunk(f, &k);
    fx_delta(f, p);
    fx_tick(f, MS);
    cr_assert_arr_eq(k.bytes, k.copy, k.len);
  }
  cr_assert(!fx_ready(f, a.call));
  cr_assert(!kvrelay_relay_call_admitted(&f->relay, b.call), "the last chunk may be on its way");
  cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE); /* the first delta */
  cr_assert(kvrelay_relay_call_admitted(&f->relay, b.call));
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&a) && reader_current(&b));
  kvrelay_relay_call_hold(&f->relay, 12345, true); /* nobody */
  fx_close(f);
}

Test(relay, a_held_chunk_stays_until_it_is_told_that_the_snapshot_is_over) {
  for (int closed = 0; closed < 2; closed++) {
    fx_pool *p;
    reader a, b;
    kept_chunk k;
    fx *f = one_place(&p, &a, &b);
    kvrelay_relay_call_hold(&f->relay, a.call, true);
    while (!ckf_replica_live(&a.replica))
      cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE);
    keep_chunk(f, &k);
    fx_tick(f, 20 * MS); /* the last chunk has its time as well */
    cr_assert(!kvrelay_relay_call_admitted(&f->relay, b.call));
    cr_assert_arr_eq(k.bytes, k.copy, k.len);
    if (closed) {
      reader_close(f, &a);
    } else {
      cr_assert(fx_ready(f, a.call), "its reader has to let go");
      ASSERT_ENDED(f, &a, SNAPSHOT_PROGRESS_TIMEOUT);
    }
    cr_assert(closed || kvrelay_relay_deadline_ns(&f->relay) > 0);
    fx_tick(f, 0);
    cr_assert(kvrelay_relay_call_admitted(&f->relay, b.call));
    cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
    cr_assert(reader_current(&b));
    fx_close(f);
  }
}

Test(relay, the_end_of_a_held_snapshot_that_nobody_has_read_of_lets_go_at_once) {
  fx_pool *p;
  reader a, b;
  fx *f = one_place(&p, &a, &b);
  kvrelay_relay_call_hold(&f->relay, a.call, true);
  fx_tick(f, 20 * MS);
  cr_assert(kvrelay_relay_call_admitted(&f->relay, b.call));
  ASSERT_ENDED(f, &a, SNAPSHOT_PROGRESS_TIMEOUT);
  fx_close(f);
}

/* ---- catalog ---- */

Test(relay, I3_catalog_of_32_pools_in_ascending_order) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  uint64_t call;
  kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  cr_assert_eq(fx_call(f, &q, &call), KVRELAY_OK);
  cr_assert(kvrelay_relay_call_admitted(&f->relay, call));
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_MESSAGE); /* at once, also when it is empty */
  cr_assert(f->out.u.catalog.revision == 0 && f->out.u.catalog.pools_len == 0 &&
            f->out.u.catalog.snapshot_present);
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  for (unsigned i = 0; i < 32; i++)
    fx_publish(f, (i * 19 + 7) % 32, 32);
  cr_assert(fx_ready(f, call));
  cr_assert(!fx_ready(f, call), "named twice");
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_MESSAGE); /* only the newest */
  const kvrelay_catalog_update *m = &f->out.u.catalog;
  cr_assert(m->revision == 32 && m->pools_len == 32);
  uint64_t generations = 0;
  for (unsigned i = 0; i < 32; i++) {
    const kvrelay_descriptor *d = &m->pools[i];
    cr_assert_eq(kvrelay_check_descriptor(d).class_, KVRELAY_CLASS_OK);
    cr_assert_eq(d->producer.pool_id.domain.cache_semantics.digest[0], i);
    cr_assert_eq(d->producer.producer_incarnation, 23);
    cr_assert(
        kvrelay_text_equal(d->serving_endpoint.endpoint, (kvrelay_text){f->pools[i].name, 3}));
    cr_assert_neq(d->serving_endpoint.endpoint.ptr, f->pools[i].name, "lent, not copied");
    generations |= UINT64_C(1) << d->producer.layout_generation;
  }
  cr_assert_eq(generations, 0x1FFFFFFFE, "layout generations are not 1 .. 32");
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_NONE);
  fx_withdraw(f, 5);
  cr_assert(fx_ready(f, call));
  cr_assert_eq(fx_pull(f, call), KVRELAY_PULL_MESSAGE);
  cr_assert(f->out.u.catalog.revision == 33 && f->out.u.catalog.pools_len == 31);
  cr_assert_eq(fx_try_publish(f, 5), KVRELAY_OK);
  cr_assert_eq(kvrelay_pool_descriptor(f->pools[5].pool)->producer.layout_generation, 33);
  fx_close(f);
}

/* One case for each rule. */
Test(relay, what_may_be_published) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_pools = 2;
  cfg.max_bucket_count = 64;
  fx *f = fx_open(&cfg);
  fx_pool *p = &f->pools[1];
  kvrelay_registration two[2];
  kvrelay_text names[2] = {text_of("chat"), text_of("llama")};
  enum { MANY = KVRELAY_PARTS_MAX + 1 };
  static kvrelay_registration many[MANY];
  const kvrelay_text tabbed = text_of("a\tb");
  static const int32_t twice[] = {2, 2};
  fx_state(p, 32);
  fx_describe(p, 1);
  for (size_t i = 0; i < MANY; i++)
    many[i] = p->registration;
#define REFUSED(CHANGE, SIZED)                                                                     \
  do {                                                                                             \
    fx_describe(p, 1);                                                                             \
    two[0] = two[1] = p->registration;                                                             \
    CHANGE;                                                                                        \
    cr_assert_eq(kvrelay_relay_pool_mem_size(&f->relay, &p->descriptor) != 0, SIZED, #CHANGE);     \
    cr_assert_eq(fx_try_publish(f, 1), KVRELAY_ERR_ARG, #CHANGE);                                  \
  } while (0)
#define NOT_FIT(CHANGE) REFUSED(CHANGE, false)
#define REPEATS(CHANGE) REFUSED(CHANGE, true)
  NOT_FIT(p->descriptor.registrations_len = 0);
  NOT_FIT(p->registration.canonical_model_id = text_of(""));
  NOT_FIT(p->registration.canonical_model_id = text_of(" llama"));
  NOT_FIT(p->registration.canonical_model_id = text_of("lla\nma"));
  NOT_FIT(p->registration.target.kind = 0);
  NOT_FIT(p->registration.target.base_model = text_of("lla\nma"));
  REPEATS(p->registration.aliases = &names[1]); /* alias equals an id of the pool */
  REPEATS(
      (p->descriptor.registrations = two, p->descriptor.registrations_len = 2)); /* repeated id */
  REPEATS((p->descriptor.registrations = two,
           p->descriptor.registrations_len = 2, /* alias with two owners */
           two[1].canonical_model_id = text_of("mistral")));
  NOT_FIT((p->descriptor.registrations = many, p->descriptor.registrations_len = MANY));
  NOT_FIT(p->registration.aliases = &tabbed);
  NOT_FIT(p->descriptor.pool_roles.len = 0);
  NOT_FIT((p->descriptor.pool_roles = (kvrelay_roles){twice, 2}));
  NOT_FIT(p->descriptor.serving_endpoint.component.len = 0);
  NOT_FIT(p->descriptor.query_semantics.kv_block_size = 0);
  NOT_FIT(p->descriptor.query_semantics.hash_format = 3);
  NOT_FIT(p->descriptor.producer.pool_id.domain.cache_semantics.digest_len = 15);
#undef REPEATS
#undef NOT_FIT
#undef REFUSED
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 0);
  fx_publish(f, 2, 32);
  cr_assert_eq(kvrelay_pool_descriptor(f->pools[2].pool)->producer.layout_generation, 1,
               "refused attempts took numbers");
  fx_describe(p, 2); /* the same id and endpoint */
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_ERR_STATE);
  p->descriptor.producer.pool_id.dc_id++; /* the same endpoint */
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_ERR_STATE);
  free(p->state_mem);
  fx_state(p, 1000); /* above max_bucket_count */
  fx_describe(p, 1);
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_ERR_LIMIT);
  fx_publish(f, 3, 32);
  fx_state(&f->pools[4], 32);
  fx_describe(&f->pools[4], 4);
  cr_assert_eq(fx_try_publish(f, 4), KVRELAY_ERR_LIMIT); /* max_pools */
  fx_withdraw(f, 3);
  size_t len = kvrelay_relay_pool_mem_size(&f->relay, &f->pools[4].descriptor);
  uint8_t *mem = malloc(len);
  kvrelay_pool *pool;
  cr_assert_eq(kvrelay_relay_pool_add(&f->relay, &f->pools[4].descriptor, &f->pools[4].state, mem,
                                      len - 1, 0, &pool),
               KVRELAY_ERR_NOSPACE);
  free(mem);
  kvrelay_relay_shutdown(&f->relay, f->now);
  cr_assert_eq(fx_try_publish(f, 4), KVRELAY_ERR_STATE);
  fx_close(f);
}

/* ---- names and roles that change in place ---- */

/* Tries the descriptor that `p` has now; the memory of the one before is not looked at again. */
static int describe(fx *f, fx_pool *p, size_t less) {
  static uint8_t *former; /* tests run in a process of their own */
  const size_t len = kvrelay_relay_pool_describe_mem_size(&p->descriptor);
  uint8_t *mem = malloc(len + 1);
  const int err = kvrelay_relay_pool_describe(&f->relay, p->pool, &p->descriptor, mem, len - less);
  if (err == KVRELAY_OK && former != NULL)
    memset(former, 0xA5, 64);
  free(err == KVRELAY_OK ? former : mem);
  former = err == KVRELAY_OK ? mem : former;
  fx_check(f);
  return err;
}

Test(relay, names_and_roles_change_in_place) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  static const int32_t decode[] = {KVRELAY_ROLE_DECODE};
  static const kvrelay_text aliases[] = {{(const uint8_t *)"chat", 4},
                                         {(const uint8_t *)"talk", 4}};
  kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  const kvrelay_producer producer = kvrelay_pool_descriptor(p->pool)->producer;
  uint64_t catalog;
  reader r;
  cr_assert_eq(fx_call(f, &q, &catalog), KVRELAY_OK);
  cr_assert_eq(fx_pull(f, catalog), KVRELAY_PULL_MESSAGE);
  cr_assert_eq(fx_pull(f, catalog), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);

  cr_assert_eq(describe(f, p, 0), KVRELAY_OK);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 1, "nothing differs");
  cr_assert_not(fx_ready(f, catalog));
  p->registration.aliases = aliases;
  p->registration.aliases_len = 2;
  cr_assert_eq(describe(f, p, 0), KVRELAY_OK);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 2);
  p->descriptor.pool_roles = (kvrelay_roles){decode, 1};
  cr_assert_eq(describe(f, p, 0), KVRELAY_OK);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 3);
  p->registration.canonical_model_id = p->registration.target.base_model = text_of("mistral");
  p->descriptor.pool_roles = (kvrelay_roles){&(const int32_t){KVRELAY_ROLE_LEGACY}, 1};
  cr_assert_eq(describe(f, p, 0), KVRELAY_OK);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 5, "one for each of the two");

  cr_assert(fx_ready(f, catalog));
  cr_assert_eq(fx_pull(f, catalog), KVRELAY_PULL_MESSAGE);
  const kvrelay_catalog_update *m = &f->out.u.catalog;
  cr_assert(m->revision == 5 && m->pools_len == 1);
  cr_assert(kvrelay_producer_equal(&m->pools[0].producer, &producer));
  cr_assert(
      kvrelay_text_equal(m->pools[0].registrations[0].canonical_model_id, text_of("mistral")));
  cr_assert_eq(m->pools[0].registrations[0].aliases_len, 2);
  cr_assert_eq(m->pools[0].pool_roles.ptr[0], KVRELAY_ROLE_LEGACY);
  fx_delta(f, p); /* the filter's stream goes on */
  cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
  cr_assert(r.sequence == 1 && !r.ended && reader_current(&r));
  fx_close(f);
}

Test(relay, what_does_not_describe_a_pool_leaves_it_as_it_was) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  static const kvrelay_text llama = {(const uint8_t *)"llama", 5};
#define REFUSED(ERR, LESS, CHANGE)                                                                 \
  do {                                                                                             \
    fx_describe(p, 1);                                                                             \
    p->registration.canonical_model_id = text_of("other");                                         \
    CHANGE;                                                                                        \
    cr_assert_eq(describe(f, p, LESS), ERR, #CHANGE);                                              \
    cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 1, #CHANGE);                 \
    cr_assert(kvrelay_text_equal(                                                                  \
        kvrelay_pool_descriptor(p->pool)->registrations[0].canonical_model_id, llama));            \
  } while (0)
  REFUSED(KVRELAY_ERR_NOSPACE, 1, (void)0);
  REFUSED(KVRELAY_ERR_ARG, 0, p->descriptor.pool_roles.len = 0);
  REFUSED(KVRELAY_ERR_ARG, 0, p->registration.canonical_model_id = text_of("chat")); /* an alias */
  REFUSED(KVRELAY_ERR_ARG, 0, p->descriptor.producer.pool_id.dc_id++);
  REFUSED(KVRELAY_ERR_ARG, 0, p->descriptor.serving_endpoint.component = text_of("back"));
  REFUSED(KVRELAY_ERR_ARG, 0, p->descriptor.query_semantics.kv_block_size++);
  REFUSED(KVRELAY_ERR_ARG, 0, p->descriptor.query_semantics.hash_format = HASHFMT_FORMAT_EAGLE);
#undef REFUSED
  fx_describe(p, 1);
  cr_assert_eq(kvrelay_relay_pool_describe(&f->relay, p->pool, &p->descriptor, NULL, 1 << 20),
               KVRELAY_ERR_ARG);
  free(p->state_mem); /* the state is another: the producer is fenced */
  fx_state(p, 1000);
  fx_store(p, 1);
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_ERR_INVARIANT);
  cr_assert_eq(describe(f, p, 0), KVRELAY_ERR_STATE);
  fx_close(f);
}

/* ---- hub ---- */

Test(relay, blocks_before_the_first_subscriber_are_in_the_snapshot_of_sequence_0) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader r;
  fx_store(p, 100);
  fx_changed(f, p); /* no hub: drained, not counted */
  cr_assert_eq(ckf_producer_pending(&p->state), 0);
  fx_store(p, 3); /* pending at the cut */
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
  cr_assert(r.sequence == 0 && r.chunks == 8 && reader_current(&r));
  cr_assert_eq(kvrelay_pool_sequence(p->pool), 0);
  fx_close(f);
}

Test(relay, H1_H8_one_frame_for_all_subscribers) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  reader a, b, c;
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
  fx_delta(f, p);
  cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE);
  const uint8_t *payload = f->out.u.filter.payload;
  cr_assert_eq(reader_pull(f, &b), KVRELAY_PULL_MESSAGE);
  cr_assert_eq(f->out.u.filter.payload, payload, "encoded twice");
  ckf_cbi1_frame frame;
  cr_assert_eq(ckf_cbi1_decode(&a.format, payload, f->out.u.filter.payload_len, &frame), CKF_OK);
  cr_assert_eq(ckf_replica_apply(&a.replica, &frame),
               CKF_ERR_SEQUENCE); /* the same delta again is a gap */
  cr_assert_eq(reader_open(f, &c, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &c), KVRELAY_PULL_NONE);
  cr_assert(c.sequence == 1 && reader_current(&c) && reader_current(&b));
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).deltas_published, 1);
  fx_close(f);
}

Test(relay, H6_an_idle_hub_advances_without_encoding) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  reader r;
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  reader_close(f, &r);
  for (int i = 0; i < 5; i++)
    fx_delta(f, p);
  kvrelay_relay_stats st = kvrelay_relay_stats_get(&f->relay);
  cr_assert(st.deltas_published == 0 && st.hubs == 1 && st.idle_hubs == 1);
  cr_assert_eq(kvrelay_pool_sequence(p->pool), 5);
  fx_store(p, 1); /* pending: one more */
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
  cr_assert(r.sequence == 6 && reader_current(&r));
  fx_close(f);
}

/* A change that is undone before the next delta must not stay in the snapshot of somebody who
 * joined in between. */
Test(relay, H7_a_change_that_is_undone_after_the_cut_reaches_the_newcomer) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  reader a, b;
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  fx_store(p, 1); /* pending */
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_OK);
  fx_drop(p, 1);
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&a) && reader_current(&b) && a.sequence == 2 && b.sequence == 2);
  fx_close(f);
}

Test(relay, H4_an_idle_hub_makes_room_and_its_sequence_goes_on_later) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_hubs = 1;
  cfg.encoding_concurrency = 4;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000), *q = fx_publish(f, 2, 1000);
  reader a, b;
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK); /* its snapshot is being sent */
  cr_assert_eq(reader_open(f, &b, q), KVRELAY_ERR_REFUSED);
  cr_assert_eq(f->status.reason, KVRELAY_REASON_RESOURCE_LIMIT);
  cr_assert_not_null(strstr(f->status.text, "hub"));
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE); /* now only a subscriber */
  cr_assert_eq(reader_open(f, &b, q), KVRELAY_ERR_REFUSED);
  fx_delta(f, p);
  reader_close(f, &a);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).pool_streams, 0);
  cr_assert_eq(reader_open(f, &b, q), KVRELAY_OK); /* idle: evicted */
  fx_delta(f, p);
  fx_delta(f, q);
  cr_assert_eq(kvrelay_pool_sequence(p->pool), 1, "it moved without a hub");
  reader_close(f, &b);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert(a.sequence == 1 && reader_current(&a));
  fx_delta(f, p);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert(a.sequence == 2 && reader_current(&a));
  fx_close(f);
}

Test(relay, H5_a_snapshot_is_the_state_at_its_cut_and_lets_go_of_it) {
  kvrelay_relay_config cfg = fx_config();
  cfg.encoding_concurrency = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  const size_t bytes = 8 * ckf_producer_format(&p->state)->bucket_count;
  uint64_t *const at_cut = malloc(bytes);
  reader a, b;
  fx_store(p, 100);
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_OK);
  memcpy(at_cut, ckf_producer_words(&p->state), bytes);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  for (int i = 0; !ckf_replica_live(&a.replica); i++) { /* the filter changes between the chunks */
    cr_assert_eq(reader_pull(f, &a), KVRELAY_PULL_MESSAGE);
    if (i < 3)
      fx_delta(f, p);
  }
  cr_assert(a.chunks > 3 && a.sequence == 0);
  cr_assert_eq(memcmp(ckf_replica_words(&a.replica), at_cut, bytes), 0);
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_OK); /* the only place for a snapshot is free again */
  cr_assert(kvrelay_relay_call_admitted(&f->relay, b.call));
  fx_delta(f, p);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &b), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&a) && reader_current(&b) && a.sequence == 4 && b.sequence == 4);
  free(at_cut);
  fx_close(f);
}

Test(relay, H4_a_hub_somebody_waits_for_is_not_evicted) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_hubs = 2;
  cfg.encoding_concurrency = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000), *q = fx_publish(f, 2, 1000), *s = fx_publish(f, 3, 1000);
  reader a, b, c, d;
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  reader_close(f, &a);                             /* p: idle */
  cr_assert_eq(reader_open(f, &b, q), KVRELAY_OK); /* q: busy, holds the permit */
  cr_assert_eq(reader_open(f, &c, s), KVRELAY_OK); /* waits, and will need a hub */
  cr_assert_eq(reader_open(f, &d, p), KVRELAY_OK); /* waits for p's */
  reader_drain(f, &b);
  fx_tick(f, 0);
  ASSERT_ENDED(f, &c, RESOURCE_LIMIT); /* p is wanted, q is used */
  cr_assert(!kvrelay_relay_call_admitted(&f->relay, c.call));
  cr_assert_eq(reader_drain(f, &d), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&d));
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).refused[KVRELAY_REASON_RESOURCE_LIMIT], 1);
  fx_close(f);
}

/* ---- withdrawal and fencing ---- */

Test(relay, withdrawal_ends_streams_and_drops_what_waits) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader a, b;
  kvrelay_request stale = fx_pool_request(p);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_OK); /* in its snapshot */
  fx_delta(f, p);
  fx_withdraw(f, 1);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).hubs, 0);
  cr_assert(fx_ready(f, a.call));
  ASSERT_ENDED(f, &a, PUBLICATION_UNAVAILABLE);
  ASSERT_ENDED(f, &b, PUBLICATION_UNAVAILABLE);
  ASSERT_ENDED(f, &b, PUBLICATION_UNAVAILABLE); /* until it is closed */
  ASSERT_REFUSED(f, &stale, POOL_NOT_FOUND);
  cr_assert_eq(fx_try_publish(f, 1), KVRELAY_OK);
  ASSERT_REFUSED(f, &stale, PRODUCER_CHANGED);
  reader_close(f, &a);
  reader_close(f, &b);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  fx_close(f);
}

/* Damages the state behind the relay's back, as memory errors would. */
static void damage(fx_pool *p) { p->state.filter_.format_.bucket_count /= 2; }

Test(relay, H12_a_broken_state_fences_the_producer) {
  for (int by_tick = 0; by_tick < 2; by_tick++) {
    kvrelay_relay_config cfg = fx_config();
    cfg.publication_threshold = 2;
    fx *f = fx_open(&cfg);
    fx_pool *p = fx_publish(f, 1, 1000);
    uint64_t catalog;
    kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
    cr_assert_eq(fx_call(f, &q, &catalog), KVRELAY_OK);
    (void)fx_pull(f, catalog);
    cr_assert_eq(fx_pull(f, catalog), KVRELAY_PULL_NONE);
    q = fx_pool_request(p);
    reader r;
    cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
    reader_drain(f, &r);
    fx_store(p, 1);
    fx_changed(f, p);
    damage(p);
    cr_assert_eq(kvrelay_pool_fenced(p->pool), KVRELAY_OK);
    if (by_tick)
      fx_tick(f, SECOND);
    else
      cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_ERR_INVARIANT);
    cr_assert_eq(kvrelay_pool_fenced(p->pool), KVRELAY_ERR_INVARIANT);
    cr_assert_eq(kvrelay_relay_pool_changed(&f->relay, p->pool, f->now), KVRELAY_ERR_INVARIANT);
    cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_ERR_INVARIANT);
    cr_assert_eq(kvrelay_relay_stats_get(&f->relay).producers_fenced, 1);
    cr_assert_eq(fx_pull(f, catalog), KVRELAY_PULL_MESSAGE);
    cr_assert(f->out.u.catalog.pools_len == 0 && f->out.u.catalog.revision == 2);
    ASSERT_ENDED(f, &r, PUBLICATION_UNAVAILABLE);
    ASSERT_REFUSED(f, &q, POOL_NOT_FOUND);
    fx_withdraw(f, 1);
    cr_assert_eq(kvrelay_relay_stats_get(&f->relay).catalog_revision, 2, "left the catalog twice");
    fx_close(f);
  }
}

/* Pools that come and go, some with an id or an endpoint that is taken, beside a list. */
static void pools_come_and_go(uint32_t max_pools, uint64_t seed) {
  enum { NAMES = 3, ENDPOINTS = NAMES * NAMES * NAMES, SLOTS = 24 };
  static const char *const name[NAMES] = {"a", "aa", "b"}; /* a.aa and aa.a, joined the same */
  kvrelay_relay_config cfg = fx_config();
  cfg.max_pools = max_pools;
  cfg.identity.relay_incarnation = seed;
  fx *f = fx_open(&cfg);
  unsigned published = 0, id[SLOTS], endpoint[SLOTS], taken = 0, limited = 0, fenced = 0;
  for (unsigned i = 0; i < SLOTS; i++)
    fx_state(&f->pools[i], 32);
  for (unsigned step = 0; step < 3000; step++) {
    seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
    const unsigned slot = (unsigned)(seed >> 33) % SLOTS;
    fx_pool *const p = &f->pools[slot];
    if (p->pool != NULL) {
      const bool fence = (seed >> 61) == 0;
      if (fence) { /* out of the catalog before it is removed */
        damage(p);
        cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_ERR_INVARIANT);
        p->state.filter_.format_.bucket_count *= 2;
        fx_check(f);
      }
      fx_withdraw(f, slot);
      fenced += fence;
      published--;
      continue;
    }
    id[slot] = (unsigned)(seed >> 40) % ENDPOINTS;
    endpoint[slot] = (unsigned)(seed >> 50) % ENDPOINTS;
    bool free_ = true;
    for (unsigned i = 0; i < SLOTS; i++)
      free_ = free_ &&
              (f->pools[i].pool == NULL || (id[i] != id[slot] && endpoint[i] != endpoint[slot]));
    fx_describe(p, id[slot]);
    p->descriptor.serving_endpoint = (kvrelay_endpoint){
        true, text_of(name[endpoint[slot] / (NAMES * NAMES)]),
        text_of(name[endpoint[slot] / NAMES % NAMES]), text_of(name[endpoint[slot] % NAMES])};
    const int expected = published == max_pools ? KVRELAY_ERR_LIMIT
                         : free_                ? KVRELAY_OK
                                                : KVRELAY_ERR_STATE;
    cr_assert_eq(fx_try_publish(f, slot), expected, "step %u", step);
    published += expected == KVRELAY_OK;
    taken += expected == KVRELAY_ERR_STATE;
    limited += expected == KVRELAY_ERR_LIMIT;
    cr_assert_eq(kvrelay_relay_stats_get(&f->relay).pools, published);
  }
  cr_assert_gt(fenced, 10);
  cr_assert_gt(max_pools > 5 ? taken : limited, 100);
  fx_close(f);
}

Test(relay, an_endpoint_has_one_pool_however_they_come_and_go, .timeout = 60) {
  static const uint32_t max_pools[] = {2, 5, 24}; /* chains of all lengths */
  for (size_t i = 0; i < sizeof max_pools / sizeof max_pools[0]; i++)
    for (uint64_t seed = 1; seed <= 4; seed++)
      pools_come_and_go(max_pools[i], seed);
}
Test(relay, H12_a_snapshot_that_cannot_be_encoded_is_an_invalid_publication) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  kvrelay_request q = fx_pool_request(p);
  damage(p);
  ASSERT_REFUSED(f, &q, INVALID_PUBLICATION);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_FAILED_PRECONDITION);
  cr_assert_eq(kvrelay_pool_fenced(p->pool), KVRELAY_ERR_INVARIANT);
  ASSERT_REFUSED(f, &q, POOL_NOT_FOUND);
  fx_close(f);
}

Test(relay, a_cut_goes_out_as_it_was_made) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader r;
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_MESSAGE);
  damage(p);
  reader_drain(f, &r); /* which looks at each frame */
  cr_assert(ckf_replica_live(&r.replica));
  fx_close(f);
}

Test(relay, the_last_sequence_is_the_end) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 32);
  reader r;
  p->pool->sequence_ = UINT64_MAX - 1;
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  fx_delta(f, p);
  cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
  cr_assert(r.sequence == UINT64_MAX && reader_current(&r));
  fx_store(p, 1);
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_ERR_EXHAUSTED);
  ASSERT_ENDED(f, &r, PUBLICATION_UNAVAILABLE);
  f->relay.generation_ = UINT64_MAX;
  fx_state(&f->pools[2], 32);
  fx_describe(&f->pools[2], 2);
  cr_assert_eq(fx_try_publish(f, 2), KVRELAY_ERR_EXHAUSTED);
  fx_close(f);
}

/* ---- cadence and heartbeat ---- */

Test(relay, S61_many_changed_buckets_do_not_wait) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_bucket_count = 1 << 19;
  cfg.chunk_buckets = 1 << 19;
  cfg.publication_threshold = UINT32_MAX;
  cfg.publication_delay_ns = 1000 * SECOND;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1 << 20);
  uint32_t dirty = 0;
  for (unsigned events = 0; events < 700000 && dirty <= 330000; events += 50) {
    fx_store(p, 50);
    dirty = ckf_producer_dirty(&p->state);
    cr_assert_eq(kvrelay_relay_pool_changed(&f->relay, p->pool, f->now), KVRELAY_OK);
    cr_assert_eq(ckf_producer_dirty(&p->state), dirty <= 330000 ? dirty : 0);
  }
  cr_expect(dirty > 330000 && dirty <= 330050, "%u", dirty);
  cr_expect_lt(ckf_cbi1_delta_size(dirty), 4000000);
  fx_close(f);
}

Test(relay, deltas_come_at_the_threshold_or_after_the_delay) {
  kvrelay_relay_config cfg = fx_config();
  cfg.publication_threshold = 16;
  cfg.publication_delay_ns = MS;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000), *q = fx_publish(f, 2, 1000);
  reader r, s;
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &s, q), KVRELAY_OK);
  reader_drain(f, &r);
  reader_drain(f, &s);
  for (int i = 0; i < 15; i++) {
    fx_store(p, 1);
    fx_changed(f, p);
    cr_assert_eq(kvrelay_pool_sequence(p->pool), 0);
  }
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + MS);
  fx_store(p, 1);
  fx_changed(f, p);
  cr_assert_eq(kvrelay_pool_sequence(p->pool), 1);
  cr_assert(fx_ready(f, r.call));
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + cfg.heartbeat_ns);
  fx_store(p, 1);
  fx_changed(f, p);
  fx_tick(f, MS / 2);
  fx_store(p, 1);
  fx_changed(f, p); /* counted from the first pending one */
  fx_store(q, 1);
  fx_changed(f, q);
  fx_tick(f, MS / 2 - 1);
  cr_assert_eq(kvrelay_pool_sequence(p->pool), 1);
  fx_tick(f, 1);
  cr_assert(kvrelay_pool_sequence(p->pool) == 2 && kvrelay_pool_sequence(q->pool) == 0);
  fx_tick(f, MS / 2);
  cr_assert_eq(kvrelay_pool_sequence(q->pool), 1);
  fx_tick(f, 0);
  cr_assert(kvrelay_pool_sequence(p->pool) == 2 && kvrelay_pool_sequence(q->pool) == 1);
  cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &s), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&r) && reader_current(&s));

  /* changes that cancel out publish nothing */
  fx_store(p, 1);
  p->first_key = p->next_key - 1;
  fx_drop(p, 1);
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_OK);
  cr_assert_eq(kvrelay_pool_sequence(p->pool), 2);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  fx_close(f);
}

Test(relay, T2_heartbeats_after_the_last_chunk_only_and_only_in_silence) {
  kvrelay_relay_config cfg = fx_config();
  cfg.heartbeat_ns = MS;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader r;
  cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
  for (int i = 0; i < 8; i++) {
    fx_tick(f, 5 * MS);
    f->wall_us += 5000;
    cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_MESSAGE);
    cr_assert_eq(r.last_kind, KVRELAY_UPDATE_SNAPSHOT_CHUNK);
  }
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), f->now + MS);
  fx_tick(f, MS - 1);
  cr_assert(!fx_ready(f, r.call));
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  fx_tick(f, 1);
  cr_assert(fx_ready(f, r.call));
  fx_tick(f, 10 * MS); /* missed ones are not made up */
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_MESSAGE);
  cr_assert_eq(r.last_kind, KVRELAY_UPDATE_HEARTBEAT);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  fx_tick(f, MS / 2);
  fx_delta(f, p);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_MESSAGE); /* restarts the timer */
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  fx_tick(f, MS / 2 + 1);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  fx_tick(f, MS / 2);
  fx_delta(f, p);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_MESSAGE); /* data before heartbeat */
  cr_assert_eq(r.last_kind, KVRELAY_UPDATE_DELTA);
  cr_assert_eq(reader_pull(f, &r), KVRELAY_PULL_NONE);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).heartbeats, 1);
  fx_close(f);
}

/* ---- lag ---- */

Test(relay, H2_lag_by_frames) {
  kvrelay_relay_config cfg = fx_config();
  cfg.queue_frames = 3;
  cfg.max_subscribers_per_pool = 2;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader slow, fast, third;
  cr_assert_eq(reader_open(f, &slow, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &fast, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &slow), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &fast), KVRELAY_PULL_NONE);
  for (int i = 0; i < 3; i++)
    fx_delta(f, p);
  cr_assert_eq(reader_pull(f, &slow), KVRELAY_PULL_MESSAGE); /* one place free again */
  cr_assert_eq(reader_drain(f, &fast), KVRELAY_PULL_NONE);
  fx_delta(f, p);
  cr_assert_eq(kvrelay_pool_subscribers(p->pool), 2);
  fx_delta(f, p);
  cr_assert_eq(kvrelay_pool_subscribers(p->pool), 1);               /* its place is free at once */
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).pool_streams, 2); /* its permit is not */
  cr_assert_eq(reader_open(f, &third, p), KVRELAY_OK);
  ASSERT_ENDED(f, &slow, SUBSCRIBER_LAGGED); /* what was queued is dropped */
  cr_assert_not_null(strstr(f->status.text, "01010101010101010101010101010101:"));
  cr_assert_eq(slow.sequence, 1);
  cr_assert_eq(reader_drain(f, &fast), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_drain(f, &third), KVRELAY_PULL_NONE);
  cr_assert(reader_current(&fast) && reader_current(&third));
  kvrelay_relay_stats st = kvrelay_relay_stats_get(&f->relay);
  cr_assert(st.lagged == 1 && st.producers_fenced == 0 && st.recuts == 0);
  fx_close(f);
}

Test(relay, H14_lag_during_the_snapshot_gives_the_permit_back) {
  kvrelay_relay_config cfg = fx_config();
  cfg.queue_frames = 2;
  cfg.encoding_concurrency = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader slow, next;
  cr_assert_eq(reader_open(f, &slow, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &next, p), KVRELAY_OK);
  cr_assert_eq(reader_pull(f, &slow), KVRELAY_PULL_MESSAGE);
  fx_delta(f, p);
  fx_delta(f, p);
  cr_assert_eq(reader_pull(f, &slow), KVRELAY_PULL_MESSAGE);
  fx_delta(f, p);
  cr_assert(kvrelay_relay_call_admitted(&f->relay, next.call));
  ASSERT_ENDED(f, &slow, SUBSCRIBER_LAGGED);
  cr_assert_eq(slow.chunks, 2);
  cr_assert_eq(reader_drain(f, &next), KVRELAY_PULL_NONE);
  cr_assert(next.sequence == 3 && reader_current(&next));
  fx_close(f);
}

/* Two deltas of about 2.2 MB each; how long exactly is learned from a producer of the same kind. */
static void big_window(fx_pool *p) {
  for (unsigned i = 0; i < 240; i++)
    fx_store(p, 1000);
}

Test(relay, H2_lag_by_bytes_to_the_byte, .timeout = 120) {
  size_t bytes = 0;
  fx_pool shadow = {0};
  fx_state(&shadow, 1000000);
  for (int i = 0; i < 2; i++) {
    ckf_batch batch;
    big_window(&shadow);
    cr_assert_eq(ckf_producer_drain(&shadow.state, &batch), 1);
    bytes += ckf_cbi1_delta_size(batch.image_count) + 256;
  }
  free(shadow.state_mem);
  cr_assert_geq(bytes, 4194624 + 1);
  for (int missing = 0; missing < 2; missing++) {
    kvrelay_relay_config cfg = fx_config();
    cfg.max_bucket_count = 524288;
    cfg.chunk_buckets = 262144;
    cfg.queue_bytes = bytes - (size_t)missing;
    fx *f = fx_open(&cfg);
    fx_pool *p = fx_publish(f, 1, 1000000);
    reader r;
    cr_assert_eq(reader_open(f, &r, p), KVRELAY_OK);
    cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
    for (int i = 0; i < 2; i++) {
      big_window(p);
      cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_OK);
      fx_check(f);
    }
    if (missing) {
      ASSERT_ENDED(f, &r, SUBSCRIBER_LAGGED);
    } else {
      cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
      cr_assert(r.sequence == 2 && reader_current(&r));
      fx_delta(f, p); /* the counter is back at 0: the ring turns over without loss */
      fx_delta(f, p);
      cr_assert_eq(reader_drain(f, &r), KVRELAY_PULL_NONE);
      cr_assert(r.sequence == 4 && reader_current(&r));
    }
    fx_close(f);
  }
}

Test(relay, H9_too_many_changes_for_one_delta_cut_the_hub_anew, .timeout = 120) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_bucket_count = 524288;
  cfg.chunk_buckets = 262144;
  cfg.encoding_concurrency = 1;
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000000);
  reader old, waiting, other;
  cr_assert_eq(reader_open(f, &old, p), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &waiting, p), KVRELAY_OK);
  for (int i = 0; i < 4; i++)
    big_window(p); /* more than 349 525 of 524 288 buckets */
  cr_assert_eq(kvrelay_relay_pool_publish(&f->relay, p->pool, f->now), KVRELAY_OK);
  fx_check(f);
  cr_assert_eq(kvrelay_relay_stats_get(&f->relay).recuts, 1);
  ASSERT_ENDED(f, &old, PUBLICATION_UNAVAILABLE);
  cr_assert_eq(kvrelay_pool_fenced(p->pool), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &waiting),
               KVRELAY_PULL_NONE); /* had no cut yet: gets the fresh one */
  cr_assert(waiting.sequence == 1 && reader_current(&waiting));
  cr_assert_eq(reader_open(f, &other, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &other), KVRELAY_PULL_NONE);
  cr_assert(other.sequence == 1 && reader_current(&other));
  fx_delta(f, p);
  cr_assert_eq(reader_drain(f, &other), KVRELAY_PULL_NONE);
  cr_assert(other.sequence == 2 && reader_current(&other));
  fx_close(f);
}

/* ---- shutdown ---- */

Test(relay, T3_shutdown_ends_streams_with_ok_and_before_data) {
  kvrelay_relay_config cfg = fx_config();
  fx *f = fx_open(&cfg);
  fx_pool *p = fx_publish(f, 1, 1000);
  reader a, b;
  uint64_t catalog, info;
  kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  cr_assert_eq(fx_call(f, &q, &catalog), KVRELAY_OK);
  kvrelay_request i = fx_request(KVRELAY_METHOD_GET_RELAY_INFO);
  cr_assert_eq(fx_call(f, &i, &info), KVRELAY_OK);
  cr_assert_eq(reader_open(f, &a, p), KVRELAY_OK);
  cr_assert_eq(reader_drain(f, &a), KVRELAY_PULL_NONE);
  cr_assert_eq(reader_open(f, &b, p), KVRELAY_OK); /* in its snapshot */
  fx_delta(f, p);
  kvrelay_relay_shutdown(&f->relay, f->now);
  fx_check(f);
  cr_assert(fx_ready(f, a.call));
  uint64_t calls[] = {catalog, a.call, b.call};
  for (int k = 0; k < 3; k++) {
    cr_assert_eq(fx_pull(f, calls[k]), KVRELAY_PULL_END);
    cr_assert(f->status.grpc == KVRELAY_GRPC_OK && f->status.reason == KVRELAY_REASON_NONE);
    fx_hang_up(f, calls[k]);
  }
  cr_assert_eq(fx_pull(f, info), KVRELAY_PULL_MESSAGE);
  ASSERT_REFUSED(f, &q, PUBLICATION_UNAVAILABLE);
  cr_assert_eq(f->status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  fx_delta(f, p);
  fx_withdraw(f, 1);
  cr_assert_eq(kvrelay_relay_deadline_ns(&f->relay), KVRELAY_TIME_NONE);
  fx_close(f);
}
