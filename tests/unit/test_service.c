/* SPDX-License-Identifier: Apache-2.0 */

/* service.h and client.h: a real relay and a real consumer over the in-memory connection, then the
 * client alone. */

#include "test_service.h"

#define ASSERT_REFUSAL(TAKEN, GRPC, REASON)                                                        \
  do {                                                                                             \
    const taken *taken_ = (TAKEN);                                                                 \
    cr_assert(taken_->ends == 1 && taken_->messages == 0, "not refused");                          \
    cr_assert_eq(taken_->status.grpc, KVRELAY_GRPC_##GRPC, "%d %s", taken_->status.grpc,           \
                 taken_->status.text);                                                             \
    cr_assert_eq(taken_->status.reason, KVRELAY_REASON_##REASON, "%s", taken_->status.text);       \
    cr_assert_eq(taken_->admitted, 0, "trailers only");                                            \
  } while (0)

/* ---- the service ---- */

Test(service, T1_info) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  const kvrelay_request q = fx_request(KVRELAY_METHOD_GET_RELAY_INFO);
  const taken *c = ask_request(&b, 1, &q);
  kvrelay_relay_info info;
  cr_assert(c->messages == 1 && c->ends == 1 && c->status.grpc == KVRELAY_GRPC_OK);
  cr_assert_eq(kvrelay_pb_decode_info(c->bytes, c->len, NULL, &info), KVRELAY_OK);
  cr_assert_eq(kvrelay_check_envelope(&info.envelope).class_, KVRELAY_CLASS_OK);
  cr_assert(info.envelope.relay.drt_instance_id == 17 &&
            info.envelope.relay.relay_incarnation == 23);
  bare_close(&b);
}

Test(service, S1_S3_methods_that_are_not_there) {
  static const char *const paths[] = {"/dynamo.kvrelay.v1.KvEventRelay/SubscribeServingLoad",
                                      "/dynamo.kvrelay.v1.KvEventRelay/getrelayinfo",
                                      "/dynamo.kvrelay.v1.KvEventRelay/GetRelayInfo?x",
                                      "/dynamo.kvrelay.v1.KvEventRelay/GetRelayInf",
                                      "/grpc.health.v1.Health/Check",
                                      "",
                                      "/"};
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  static const kvrelay_iov junk = {(const uint8_t *)"\xff\xff", 2};
  for (uint32_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
    ASSERT_REFUSAL(ask(&b, i + 1, paths[i], &junk, 1), UNIMPLEMENTED, NONE);
  cr_assert_eq(kvrelay_relay_service_stats_get(b.service).unknown_methods, 7);
  bare_close(&b);
}

Test(service, X9_S6_S7_exactly_one_request_that_decodes) {
  static const uint8_t bad_utf8[] = {0x0a, 2, 'a', 0xff};
  static const uint8_t marked[] = {0x0a, 2, 'a', 0xff, 0xfd, 0x07, 0x31, 0x52, 0x56, 0x4b};
  static const uint8_t cut[] = {0x0a, 9, 'a'};
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  const char *path = kvrelay_method_path(KVRELAY_METHOD_WATCH_CATALOG);
  const kvrelay_iov one[] = {{bad_utf8, sizeof bad_utf8}};
  ASSERT_REFUSAL(ask(&b, 1, path, one, 1), INTERNAL, NONE);
  const kvrelay_iov with_marker[] = {{marked, sizeof marked}};
  ASSERT_REFUSAL(ask(&b, 2, path, with_marker, 1), INTERNAL, NONE);
  const kvrelay_iov truncated[] = {{cut, sizeof cut}};
  ASSERT_REFUSAL(ask(&b, 3, path, truncated, 1), INTERNAL, NONE);
  ASSERT_REFUSAL(ask(&b, 4, path, NULL, 0), INTERNAL, NONE);
  const kvrelay_iov good = {(const uint8_t *)"\x0a\x01x\xfd\x07\x31\x52\x56\x4b", 9};
  const kvrelay_iov two[] = {good, good};
  ASSERT_REFUSAL(ask(&b, 5, path, two, 2), INTERNAL, NONE);
  const kvrelay_iov empty_then_good[] = {{NULL, 0}, good};
  ASSERT_REFUSAL(ask(&b, 6, path, empty_then_good, 2), INTERNAL, NONE);
  const kvrelay_relay_service_stats stats = kvrelay_relay_service_stats_get(b.service);
  cr_assert(stats.undecodable == 3 && stats.cardinality == 3);
  /* an empty message is a message */
  const kvrelay_iov empty[] = {{NULL, 0}};
  ASSERT_REFUSAL(ask(&b, 7, path, empty, 1), FAILED_PRECONDITION, CONTRACT_MISMATCH);
  bare_close(&b);
}

Test(service, T5_T7_reasons) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, 100);
  const kvrelay_request good = fx_pool_request(pool);
  kvrelay_request q = good;
  q.contract_marker = 0;
  ASSERT_REFUSAL(ask_request(&b, 1, &q), FAILED_PRECONDITION, CONTRACT_MISMATCH);
  q = good;
  q.subscriber_id.len = 0;
  ASSERT_REFUSAL(ask_request(&b, 2, &q), INVALID_ARGUMENT, INVALID_REQUEST);
  static uint8_t long_id[5000];
  memset(long_id, 'x', sizeof long_id);
  q.subscriber_id = (kvrelay_text){long_id, 129};
  ASSERT_REFUSAL(ask_request(&b, 3, &q), INVALID_ARGUMENT, INVALID_REQUEST);
  q.subscriber_id.len = sizeof long_id;
  ASSERT_REFUSAL(ask_request(&b, 4, &q), INVALID_ARGUMENT, INVALID_REQUEST);
  q.subscriber_id = text_of("consumer\nspoof");
  ASSERT_REFUSAL(ask_request(&b, 5, &q), INVALID_ARGUMENT, INVALID_REQUEST);
  q = good;
  q.expected_producer.present = false;
  ASSERT_REFUSAL(ask_request(&b, 6, &q), INVALID_ARGUMENT, INVALID_REQUEST);
  q = good;
  q.expected_producer.pool_id.identity_version++;
  ASSERT_REFUSAL(ask_request(&b, 7, &q), FAILED_PRECONDITION, UNSUPPORTED_FEATURE);
  q = good;
  q.expected_producer.layout_generation = 0;
  ASSERT_REFUSAL(ask_request(&b, 8, &q), INVALID_ARGUMENT, INVALID_REQUEST);
  q = good;
  q.expected_producer.pool_id.dc_id++;
  ASSERT_REFUSAL(ask_request(&b, 9, &q), NOT_FOUND, POOL_NOT_FOUND);
  q = good;
  q.expected_producer.producer_incarnation++;
  ASSERT_REFUSAL(ask_request(&b, 10, &q), FAILED_PRECONDITION, PRODUCER_CHANGED);
  const taken *c = ask_request(&b, 11, &good); /* the right key still works */
  cr_assert(c->messages > 0 && c->ends == 0);
  bare_close(&b);
}

Test(service, T4_one_stream_only) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_pool_streams = 1;
  bare b;
  bare_open(&b, &cfg, 0);
  const kvrelay_request q = fx_pool_request(fx_publish(b.f, 1, 100));
  cr_assert_eq(ask_request(&b, 1, &q)->ends, 0);
  ASSERT_REFUSAL(ask_request(&b, 2, &q), RESOURCE_EXHAUSTED, RESOURCE_LIMIT);
  kvrelay_client_transport *client = kvrelay_mem_client(b.mem);
  client->cancel(client, 1);
  bare_turn(&b);
  cr_assert_eq(ask_request(&b, 3, &q)->ends, 0);
  bare_close(&b);
}

Test(service, H10_S63_a_stalled_reader_stops_the_snapshot_after_few_chunks) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, 1000);
  const size_t chunks = (size_t)(ckf_producer_format(&pool->state)->bucket_count / 64);
  const kvrelay_request q = fx_pool_request(pool);
  cr_assert_geq(chunks, 8);
  kvrelay_mem_hold(b.mem, 0, true);
  const taken *one = ask_request(&b, 1, &q);
  for (int i = 0; i < 10; i++) {
    bare_turn(&b);
    cr_assert_eq(one->messages, 0);
    cr_assert_leq(kvrelay_relay_service_stats_get(b.service).messages, 4);
  }
  kvrelay_mem_hold(b.mem, 0, false);
  bare_turn(&b);
  cr_assert_eq(one->messages, chunks);
  cr_assert_eq(one->ends, 0);
  bare_close(&b);
}

Test(service, H13_who_waits_for_a_permit_is_not_admitted) {
  kvrelay_relay_config cfg = fx_config();
  cfg.encoding_concurrency = 1;
  bare b;
  bare_open(&b, &cfg, 0);
  const kvrelay_request q = fx_pool_request(fx_publish(b.f, 1, 1000));
  uint8_t bytes[256];
  const ptrdiff_t len = kvrelay_pb_encode_request(&q, bytes, sizeof bytes);
  const kvrelay_iov message = {bytes, (size_t)len};
  const char *path = kvrelay_method_path(q.method);
  cr_assert_eq(kvrelay_mem_call_raw(b.mem, 1, path, &message, 1), KVRELAY_TRANSPORT_OK);
  kvrelay_mem_hold(b.mem, 0, true); /* its snapshot is stuck half-way */
  bare_turn(&b);
  const taken *second = ask(&b, 2, path, &message, 1);
  cr_assert(second->admitted == 0 && second->messages == 0 && second->ends == 0);
  kvrelay_mem_hold(b.mem, 0, false);
  bare_turn(&b);
  cr_assert_gt(b.caller.calls[1].messages, 1);
  cr_assert_eq(second->messages, b.caller.calls[1].messages);
  bare_close(&b);
}

/* What the splice sent is byte for byte what nanopb would have sent. */
static void assert_canonical(const taken *c, kvrelay_filter_update *m) {
  cr_assert_eq(kvrelay_pb_decode_filter(c->bytes, c->len, NULL, m), KVRELAY_OK);
  uint8_t *again = malloc(c->len);
  cr_assert_eq(kvrelay_pb_encode_filter(m, again, c->len), (ptrdiff_t)c->len);
  cr_assert_arr_eq(again, c->bytes, c->len);
  free(again);
}

Test(service, a_frame_tells_when_it_is_sent) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, 1000);
  const kvrelay_request q = fx_pool_request(pool);
  taken *c = ask_request(&b, 1, &q);
  kvrelay_filter_update m;
  for (uint64_t waited_us = 0; waited_us < 5000; waited_us += 1234) {
    b.f->wall_us += 1000000;
    fx_delta(b.f, pool);
    kvrelay_relay_service_poll(b.service, b.f->now);
    b.f->now += waited_us * 1000 + 999;
    cr_assert_eq(b.t->run_once(b.t, 0), 1);
    bare_turn(&b);
    assert_canonical(c, &m);
    cr_assert_eq(m.kind, KVRELAY_UPDATE_DELTA);
    cr_assert_eq(m.send_ts_us, b.f->wall_us + waited_us);
  }
  bare_close(&b);
}

Test(service, every_frame_of_a_stream_is_canonical) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, 1000);
  fx_store(pool, 40);
  const kvrelay_request q = fx_pool_request(pool);
  taken *c = ask_request(&b, 1, &q);
  kvrelay_filter_update m;
  assert_canonical(c, &m);
  cr_assert_eq(m.kind, KVRELAY_UPDATE_SNAPSHOT_CHUNK);
  cr_assert_eq(m.send_ts_us, b.f->wall_us);
  for (uint64_t i = 1; i <= 300; i++) {
    b.f->wall_us += 1 + i * i;
    fx_delta(b.f, pool);
    bare_turn(&b);
    assert_canonical(c, &m);
    cr_assert(m.kind == KVRELAY_UPDATE_DELTA && m.sequence == i && m.base_sequence == i - 1);
  }
  b.f->now += cfg.heartbeat_ns;
  bare_turn(&b);
  assert_canonical(c, &m);
  cr_assert(m.kind == KVRELAY_UPDATE_HEARTBEAT && m.payload_len == 0 && m.sequence == 300);
  const kvrelay_relay_service_stats stats = kvrelay_relay_service_stats_get(b.service);
  cr_assert_eq(stats.messages, c->messages);
  bare_close(&b);
}

/* The last whole chunk of a snapshot of the default filter. */
static size_t last_chunk(uint32_t chunk_buckets, size_t chunks, size_t payload) {
  kvrelay_relay_config cfg = fx_config();
  const kvrelay_relay_config usual = kvrelay_relay_config_default();
  cfg.max_bucket_count = usual.max_bucket_count;
  cfg.chunk_buckets = chunk_buckets != 0 ? chunk_buckets : usual.chunk_buckets;
  bare b;
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, UINT64_C(1) << 20);
  const kvrelay_request q = fx_pool_request(pool);
  const taken *c = ask_request(&b, 1, &q);
  kvrelay_filter_update m;
  assert_canonical(c, &m);
  cr_expect_eq(m.kind, KVRELAY_UPDATE_SNAPSHOT_CHUNK);
  cr_expect_eq(c->messages, chunks);
  cr_expect_eq(m.payload_len, payload);
  const size_t len = c->len;
  bare_close(&b);
  return len;
}

Test(service, S60_S63_chunks_of_the_default_filter) {
  const size_t stock_limit = 4194304;
  const size_t usual = last_chunk(0, 2, 2097216);
  cr_expect(usual > 2097216 && usual <= 2097359 && usual < stock_limit, "%zu", usual);
  const size_t as_upstream = last_chunk(524288, 1, 4194368);
  cr_expect(as_upstream > stock_limit && as_upstream <= 4194511, "%zu", as_upstream);
}

Test(service, H8_subscribers_of_one_pool_get_one_payload) {
  kvrelay_relay_config cfg = fx_config();
  cfg.max_pool_streams = cfg.max_subscribers_per_pool = 100;
  bare b;
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, 100);
  const kvrelay_request q = fx_pool_request(pool);
  for (uint32_t i = 1; i <= 100; i++)
    cr_assert_eq(ask_request(&b, i, &q)->ends, 0);
  fx_delta(b.f, pool);
  bare_turn(&b);
  const taken *first = &b.caller.calls[1];
  for (uint32_t i = 2; i <= 100; i++) {
    const taken *c = &b.caller.calls[i];
    cr_assert(c->len == first->len && memcmp(c->bytes, first->bytes, c->len) == 0);
  }
  ASSERT_REFUSAL(ask_request(&b, 101, &q), RESOURCE_EXHAUSTED, RESOURCE_LIMIT);
  bare_close(&b);
}

Test(service, catalog_follows_the_relay) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  const kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  const taken *one = ask_request(&b, 1, &q);
  cr_assert_eq(one->messages, 1, "at once, also when empty");
  const taken *two = ask_request(&b, 2, &q);
  static uint64_t mem[8192];
  for (unsigned i = 1; i <= 6; i++) {
    if (i == 5)
      fx_withdraw(b.f, 2);
    else
      fx_publish(b.f, i, 100);
    bare_turn(&b);
    kvrelay_pb_arena arena = {mem, sizeof mem, 0};
    kvrelay_catalog_update m;
    cr_assert_eq(kvrelay_pb_decode_catalog(one->bytes, one->len, &arena, &m), KVRELAY_OK);
    cr_assert(m.revision == i && m.snapshot_present && m.pools_len == (i < 5 ? i : i - 2));
    for (size_t p = 0; p < m.pools_len; p++)
      cr_assert_eq(kvrelay_check_descriptor(&m.pools[p]).class_, KVRELAY_CLASS_OK);
    cr_assert(one->len == two->len && memcmp(one->bytes, two->bytes, one->len) == 0);
    cr_assert_eq(kvrelay_relay_service_stats_get(b.service).catalog_bytes, one->len);
  }
  bare_close(&b);
}

Test(service, S62_catalog_above_the_message_bound) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 300);
  const kvrelay_request q = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  taken *c = ask_request(&b, 1, &q);
  fx_publish(b.f, 1, 100);
  bare_turn(&b);
  cr_assert(c->messages == 2 && c->ends == 0);
  fx_publish(b.f, 2, 100);
  bare_turn(&b);
  cr_assert(c->messages == 2 && c->ends == 1);
  cr_assert_eq(c->status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_assert_eq(c->status.reason, KVRELAY_REASON_RESOURCE_LIMIT);
  cr_assert_eq(kvrelay_relay_service_stats_get(b.service).oversized, 1);
  cr_assert_gt(kvrelay_relay_service_stats_get(b.service).catalog_bytes, 300);
  fx_withdraw(b.f, 1); /* and it heals */
  c = ask_request(&b, 2, &q);
  cr_assert(c->messages == 1 && c->ends == 0);
  bare_close(&b);
}

Test(service, orderly_stop) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  const kvrelay_request pool = fx_pool_request(fx_publish(b.f, 1, 100));
  const kvrelay_request catalog = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  const taken *one = ask_request(&b, 1, &pool), *two = ask_request(&b, 2, &catalog);
  kvrelay_relay_shutdown(&b.f->relay, b.f->now);
  bare_turn(&b);
  cr_assert(one->ends == 1 && one->status.grpc == KVRELAY_GRPC_OK);
  cr_assert(two->ends == 1 && two->status.grpc == KVRELAY_GRPC_OK);
  const kvrelay_request again = fx_request(KVRELAY_METHOD_WATCH_CATALOG);
  ASSERT_REFUSAL(ask_request(&b, 3, &again), UNAVAILABLE, PUBLICATION_UNAVAILABLE);
  bare_close(&b);
}

Test(service, random_requests) {
  const kvrelay_relay_config cfg = fx_config();
  bare b;
  bare_open(&b, &cfg, 0);
  const kvrelay_request q = fx_pool_request(fx_publish(b.f, 1, 100));
  uint8_t good[256], bytes[256];
  const ptrdiff_t good_len = kvrelay_pb_encode_request(&q, good, sizeof good);
  kvrelay_client_transport *client = kvrelay_mem_client(b.mem);
  srand(11);
  for (int round = 0; round < 20000; round++) {
    memcpy(bytes, good, (size_t)good_len);
    size_t len = (size_t)good_len;
    for (int k = rand() % 4; k > 0; k--)
      bytes[(size_t)rand() % len] = (uint8_t)rand();
    if (rand() % 3 == 0)
      len = (size_t)rand() % (len + 1);
    const kvrelay_iov messages[] = {{bytes, len}, {bytes, len}};
    const int32_t method = 1 + rand() % 6;
    memset(&b.caller.calls[1].ends, 0, sizeof b.caller.calls[1].ends);
    const taken *c =
        ask(&b, 1, kvrelay_method_path(method), messages, (size_t)(rand() % 16 ? 1 : 2));
    cr_assert_leq(c->ends, 1);
    client->cancel(client, 1);
  }
  bare_turn(&b);
  bare_close(&b);
}

/* ---- both sides ---- */

Test(service, a_replica_follows_its_pool) {
  const kvrelay_relay_config cfg = fx_config();
  world w;
  world_open(&w, &cfg, 20 * MS, 0);
  fx_pool *one = fx_publish(w.f, 1, 1000), *two = fx_publish(w.f, 2, 100);
  fx_store(one, 600);
  world_run(&w, SECOND);
  cr_assert(is_live_and_equal(&w, one) && is_live_and_equal(&w, two));
  for (int round = 0; round < 60; round++) {
    fx_store(one, 3);
    fx_drop(one, 2);
    fx_changed(w.f, one);
    world_run(&w, 100 * MS);
    cr_assert(is_live_and_equal(&w, one), "round %d", round);
  }
  kvrelay_relay_identity relay;
  cr_assert(kvrelay_consumer_relay(&w.consumer, &relay) && relay.drt_instance_id == 17);
  fx_pool *three = fx_publish(w.f, 3, 100);
  fx_withdraw(w.f, 2);
  world_run(&w, SECOND);
  cr_assert(is_live_and_equal(&w, three) && is_live_and_equal(&w, one));
  cr_assert_eq(live_pools(&w), 2);
  const kvrelay_client_stats stats = kvrelay_client_stats_get(w.client);
  cr_assert(stats.connects == 1 && stats.broken == 0 && stats.replicas == 3);
  cr_assert_eq(stats.open_calls, 5, "catalog, readiness, load and two pools");
  const ckf_format *a = ckf_producer_format(&one->state), *b = ckf_producer_format(&three->state);
  cr_assert_eq(stats.replica_bytes, ckf_replica_mem_size(a) + ckf_replica_mem_size(b),
               "the memory of the withdrawn pool is back");
  world_run(&w, 60 * SECOND); /* heartbeats keep it fresh */
  kvrelay_pool_view view;
  cr_assert_eq(kvrelay_consumer_pool_get(&w.consumer, 0, w.f->now, &view), KVRELAY_OK);
  cr_assert(view.heartbeats >= 5 && !view.stale);
  world_close(&w);
}

Test(service, X8_cut_at_any_moment_and_it_heals) {
  const kvrelay_relay_config cfg = fx_config();
  world w;
  world_open(&w, &cfg, 3 * MS, 0);
  fx_pool *pool = fx_publish(w.f, 1, 1000);
  fx_store(pool, 500);
  srand(5);
  for (int round = 0; round < 60; round++) {
    world_run(&w, (uint64_t)(rand() % 80) * MS / 4);
    fx_store(pool, 1 + (unsigned)rand() % 9);
    fx_changed(w.f, pool);
    world_run(&w, (uint64_t)(rand() % 8) * MS);
    kvrelay_mem_cut(w.mem);
    cr_assert_eq(live_pools(&w), 0, "nothing of a lost connection is kept");
    cr_assert_eq(kvrelay_relay_stats_get(&w.f->relay).pool_streams, 0);
    cr_assert_eq(kvrelay_client_stats_get(w.client).open_calls, 0);
    world_run(&w, 1000 * MS + (uint64_t)(rand() % 30) * MS);
    if (round % 3 == 0) {
      world_run(&w, 2 * SECOND);
      cr_assert(is_live_and_equal(&w, pool), "round %d", round);
    }
  }
  cr_assert_geq(kvrelay_client_stats_get(w.client).losses, 50);
  world_close(&w);
}

Test(service, a_slow_reader_lags_and_starts_over) {
  kvrelay_relay_config cfg = fx_config();
  cfg.queue_frames = 4;
  world w;
  world_open(&w, &cfg, 0, 0);
  fx_pool *pool = fx_publish(w.f, 1, 100);
  world_run(&w, SECOND);
  cr_assert(is_live_and_equal(&w, pool));
  kvrelay_mem_hold(w.mem, 0, true);
  for (int i = 0; i < 20; i++) {
    fx_delta(w.f, pool);
    world_run(&w, MS);
  }
  cr_assert_eq(kvrelay_relay_stats_get(&w.f->relay).lagged, 1);
  kvrelay_mem_hold(w.mem, 0, false);
  world_run(&w, 2 * SECOND);
  cr_assert(is_live_and_equal(&w, pool));
  kvrelay_pool_view view;
  cr_assert_eq(kvrelay_consumer_pool_get(&w.consumer, 0, w.f->now, &view), KVRELAY_OK);
  cr_assert_eq(view.last_end.reason, KVRELAY_REASON_SUBSCRIBER_LAGGED);
  cr_assert_eq(view.snapshots, 2);
  world_close(&w);
}

Test(service, replica_memory_is_bounded) {
  const kvrelay_relay_config cfg = fx_config();
  const ckf_format small = {0, 32};
  world w;
  world_open(&w, &cfg, 0, ckf_replica_mem_size(&small) + 100);
  fx_publish(w.f, 1, 100);
  fx_publish(w.f, 2, 100);
  world_run(&w, 5 * SECOND);
  cr_assert_eq(live_pools(&w), 1);
  cr_assert_gt(kvrelay_client_stats_get(w.client).replicas_refused, 0);
  fx_withdraw(w.f, 1);
  world_run(&w, 60 * SECOND);
  cr_assert(is_live_and_equal(&w, &w.f->pools[2]), "what was freed is used");
  world_close(&w);
}

Test(service, a_relay_that_stops) {
  const kvrelay_relay_config cfg = fx_config();
  world w;
  world_open(&w, &cfg, 0, 0);
  fx_publish(w.f, 1, 100);
  world_run(&w, SECOND);
  cr_assert_eq(live_pools(&w), 1);
  kvrelay_relay_shutdown(&w.f->relay, w.f->now);
  world_run(&w, 10 * MS);
  cr_assert_eq(live_pools(&w), 0, "an end with OK is an end");
  world_run(&w, 10 * SECOND); /* goes on asking, slower and slower, and is refused */
  const kvrelay_client_stats stats = kvrelay_client_stats_get(w.client);
  cr_assert(stats.calls > 4 && stats.calls < 60, "%zu calls", (size_t)stats.calls);
  world_close(&w);
}

/* ---- the client alone, with a transport that does what it is told ---- */

typedef struct script {
  kvrelay_client_transport base;
  int call_result;
  uint32_t last[8]; /* number of the last call by method */
  size_t calls, cancels, reconnects, stops;
} script;

static int script_call(kvrelay_client_transport *t, uint32_t call, const char *path,
                       const uint8_t *request, size_t len) {
  script *s = (script *)t;
  const int32_t method = kvrelay_method_from_path((const uint8_t *)path, strlen(path));
  kvrelay_request q;
  cr_assert_eq(kvrelay_pb_decode_request(method, request, len, &q), KVRELAY_OK);
  cr_assert_eq(q.contract_marker, KVRELAY_CONTRACT_MARKER);
  s->calls++;
  if (s->call_result == KVRELAY_TRANSPORT_OK)
    s->last[method] = call;
  return s->call_result;
}

static void script_cancel(kvrelay_client_transport *t, uint32_t call) {
  cr_assert_neq(call, 0);
  ((script *)t)->cancels++;
}

static void script_reconnect(kvrelay_client_transport *t) { ((script *)t)->reconnects++; }

static void script_stop(kvrelay_transport *t, uint64_t grace_ns) {
  (void)grace_ns;
  ((script *)t)->stops++;
}

typedef struct lone {
  script t;
  kvrelay_consumer consumer;
  void *mem;
  kvrelay_client *client;
  kvrelay_caller *caller;
  uint64_t now;
} lone;

static void lone_open(lone *l, const kvrelay_client_config *limits) {
  memset(l, 0, sizeof *l);
  l->now = SECOND;
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.max_pools = 4096;
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  l->mem = malloc(len);
  cr_assert_eq(kvrelay_consumer_init(&l->consumer, &cfg, l->mem, len, l->now), KVRELAY_OK);
  kvrelay_client_config client_cfg = kvrelay_client_config_default(&l->consumer);
  if (limits) {
    client_cfg = *limits;
    client_cfg.consumer = &l->consumer;
  }
  cr_assert_eq(kvrelay_client_open(&client_cfg, &l->client), KVRELAY_TRANSPORT_OK);
  l->t.base.call = script_call;
  l->t.base.cancel = script_cancel;
  l->t.base.reconnect = script_reconnect;
  l->t.base.base.stop = script_stop;
  l->caller = kvrelay_client_caller(l->client);
  kvrelay_client_attach(l->client, &l->t.base);
}

static void lone_ready(lone *l) {
  l->caller->connection(l->caller, KVRELAY_CONNECTION_READY, 0, NULL, KVRELAY_TIME_NONE, l->now);
  cr_assert_eq(kvrelay_client_run(l->client, l->now), KVRELAY_TRANSPORT_OK);
}

static void lone_close(lone *l) {
  kvrelay_client_close(l->client);
  free(l->mem);
}

static void lone_bytes(lone *l, int32_t method, const uint8_t *bytes, size_t len) {
  uint8_t *exact = malloc(len ? len : 1);
  memcpy(exact, bytes, len);
  l->caller->message(l->caller, l->t.last[method], exact, len, l->now);
  free(exact);
}

static const kvrelay_envelope envelope = {
    KVRELAY_WIRE_VERSION, true, {17, 23}, KVRELAY_CONTRACT_MARKER};

static void lone_info(lone *l, const kvrelay_envelope *e) {
  const kvrelay_relay_info info = {*e};
  uint8_t bytes[64];
  const ptrdiff_t len = kvrelay_pb_encode_info(&info, bytes, sizeof bytes);
  cr_assert_gt(len, 0);
  lone_bytes(l, KVRELAY_METHOD_GET_RELAY_INFO, bytes, (size_t)len);
  (void)kvrelay_client_run(l->client, l->now);
}

/* A catalog of `n` pools that differ by their data centre. */
static uint8_t *catalog_bytes(const kvrelay_descriptor *pattern, size_t n, size_t *len) {
  kvrelay_descriptor *pools = calloc(n, sizeof *pools);
  for (size_t i = 0; i < n; i++) {
    pools[i] = *pattern;
    pools[i].producer.pool_id.dc_id = i;
    pools[i].producer.layout_generation = i + 1;
    pools[i].producer.ckf_format = (kvrelay_ckf_format){true, 1, 42, 64, 16, 4};
  }
  const kvrelay_catalog_update m = {envelope, 1, true, pools, n};
  const ptrdiff_t size = kvrelay_pb_encode_catalog(&m, NULL, 0);
  cr_assert_gt(size, 0);
  uint8_t *bytes = malloc((size_t)size);
  cr_assert_eq(kvrelay_pb_encode_catalog(&m, bytes, (size_t)size), size);
  free(pools);
  *len = (size_t)size;
  return bytes;
}

static void lone_catalog(lone *l, size_t n) {
  static fx_pool pattern;
  fx_describe(&pattern, 1);
  size_t len;
  uint8_t *bytes = catalog_bytes(&pattern.descriptor, n, &len);
  lone_bytes(l, KVRELAY_METHOD_WATCH_CATALOG, bytes, len);
  free(bytes);
  (void)kvrelay_client_run(l->client, l->now);
}

Test(client, the_arena_grows_with_the_catalog) {
  lone l;
  lone_open(&l, NULL);
  lone_ready(&l);
  lone_info(&l, &envelope);
  lone_catalog(&l, 3000);
  uint64_t revision;
  uint32_t pools;
  cr_assert(kvrelay_consumer_catalog(&l.consumer, &revision, &pools) && pools == 3000);
  const kvrelay_client_stats stats = kvrelay_client_stats_get(l.client);
  cr_assert(stats.broken == 0 && stats.replicas == 3000);
  lone_close(&l); /* frees all of them */
}

Test(client, bounds_of_arena_and_message) {
  kvrelay_client_config limits = kvrelay_client_config_default(NULL);
  limits.max_arena_bytes = 100000;
  for (int round = 0; round < 2; round++) {
    lone l;
    lone_open(&l, &limits);
    lone_ready(&l);
    lone_info(&l, &envelope);
    lone_catalog(&l, 1000);
    cr_assert_eq(kvrelay_client_stats_get(l.client).broken, 1);
    uint64_t revision;
    uint32_t pools;
    cr_assert_not(kvrelay_consumer_catalog(&l.consumer, &revision, &pools));
    cr_assert_gt(l.t.cancels, 0, "the plane is given up");
    lone_close(&l);
    limits.max_arena_bytes = SIZE_MAX;
    limits.max_message_bytes = 1000;
  }
}

Test(client, another_contract_stops_everything) {
  lone l;
  lone_open(&l, NULL);
  lone_ready(&l);
  kvrelay_envelope other = envelope;
  other.protocol_version = 2;
  lone_info(&l, &other);
  cr_assert_eq(l.t.stops, 1);
  const size_t calls = l.t.calls;
  l.now += 1000 * SECOND;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_ERR_PROTOCOL);
  cr_assert_eq(l.t.calls, calls);
  lone_close(&l);
}

Test(client, two_relays_on_one_connection) {
  lone l;
  lone_open(&l, NULL);
  lone_ready(&l);
  lone_info(&l, &envelope);
  kvrelay_catalog_update m = {envelope, 1, true, NULL, 0};
  m.envelope.relay.relay_incarnation++;
  uint8_t bytes[64];
  const ptrdiff_t len = kvrelay_pb_encode_catalog(&m, bytes, sizeof bytes);
  lone_bytes(&l, KVRELAY_METHOD_WATCH_CATALOG, bytes, (size_t)len);
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(l.t.reconnects, 1);
  /* late news of the old connection mean nothing */
  const uint32_t old = l.t.last[KVRELAY_METHOD_WATCH_CATALOG];
  lone_ready(&l);
  const uint64_t messages = kvrelay_client_stats_get(l.client).messages;
  l.caller->message(l.caller, old + 100000, bytes, (size_t)len, l.now);
  const kvrelay_status status = {.grpc = KVRELAY_GRPC_OK};
  l.caller->end(l.caller, old + 100000, &status, l.now);
  cr_assert_eq(kvrelay_client_stats_get(l.client).messages, messages);
  lone_info(&l, &envelope);
  kvrelay_relay_identity relay;
  cr_assert(kvrelay_consumer_relay(&l.consumer, &relay));
  lone_close(&l);
}

Test(client, calls_that_cannot_be_made_end_at_once) {
  lone l;
  lone_open(&l, NULL);
  l.t.call_result = KVRELAY_TRANSPORT_ERR_LIMIT;
  lone_ready(&l);
  const size_t calls = l.t.calls;
  cr_assert_eq(calls, 4, "info, catalog, readiness, load, once each");
  const uint64_t next = kvrelay_client_deadline_ns(l.client);
  cr_assert(next > l.now && next != KVRELAY_TIME_NONE, "tries again later");
  l.t.call_result = KVRELAY_TRANSPORT_OK;
  l.now += 10 * SECOND;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_gt(l.t.calls, calls);
  lone_info(&l, &envelope);
  lone_catalog(&l, 1);
  uint64_t revision;
  uint32_t pools;
  cr_assert(kvrelay_consumer_catalog(&l.consumer, &revision, &pools));
  lone_close(&l);
}

Test(client, C6_B10_8_relay_info_has_a_limit_and_streams_have_none) {
  lone l;
  lone_open(&l, NULL);
  lone_ready(&l);
  const uint32_t first = l.t.last[KVRELAY_METHOD_GET_RELAY_INFO];
  const uint32_t catalog = l.t.last[KVRELAY_METHOD_WATCH_CATALOG];
  const uint64_t until = l.now + 5 * SECOND;
  cr_assert_leq(kvrelay_client_deadline_ns(l.client), until);
  l.now = until - 1;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(l.t.cancels, 0);
  l.now = until;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(l.t.cancels, 1);
  /* asked again after the consumer's pause, and then it has an answer */
  l.now += 2 * SECOND;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_neq(l.t.last[KVRELAY_METHOD_GET_RELAY_INFO], first);
  lone_info(&l, &envelope);
  const kvrelay_status status = {.grpc = KVRELAY_GRPC_OK};
  l.caller->end(l.caller, l.t.last[KVRELAY_METHOD_GET_RELAY_INFO], &status, l.now);
  const uint32_t second = l.t.last[KVRELAY_METHOD_GET_RELAY_INFO];
  l.now += 100 * SECOND;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(l.t.cancels, 1);
  cr_assert_eq(l.t.last[KVRELAY_METHOD_GET_RELAY_INFO], second);
  cr_assert_eq(l.t.last[KVRELAY_METHOD_WATCH_CATALOG], catalog);
  lone_close(&l);
}

Test(client, C14_the_end_of_a_stream_with_ok_is_followed_by_another) {
  lone l;
  lone_open(&l, NULL);
  lone_ready(&l);
  lone_info(&l, &envelope);
  const uint32_t first = l.t.last[KVRELAY_METHOD_WATCH_CATALOG];
  const kvrelay_status status = {.grpc = KVRELAY_GRPC_OK};
  l.caller->end(l.caller, first, &status, l.now);
  l.now += 2 * SECOND;
  cr_assert_eq(kvrelay_client_run(l.client, l.now), KVRELAY_TRANSPORT_OK);
  cr_assert_neq(l.t.last[KVRELAY_METHOD_WATCH_CATALOG], first);
  lone_close(&l);
}

Test(client, a_lost_connection_is_lost_once) {
  lone l;
  lone_open(&l, NULL);
  lone_ready(&l);
  for (int state = KVRELAY_CONNECTION_CONNECTING; state <= KVRELAY_CONNECTION_CLOSED; state++)
    if (state != KVRELAY_CONNECTION_READY)
      l.caller->connection(l.caller, state, KVRELAY_TRANSPORT_ERR_CONNECT, "gone", 0, l.now);
  cr_assert_eq(kvrelay_client_stats_get(l.client).losses, 1);
  lone_ready(&l);
  lone_ready(&l); /* a transport that forgot to tell */
  cr_assert_eq(kvrelay_client_stats_get(l.client).losses, 2);
  lone_close(&l);
}

Test(client, bytes_of_a_hostile_relay) {
  const kvrelay_relay_config cfg = fx_config();
  bare b; /* a real relay lends its frames */
  bare_open(&b, &cfg, 0);
  fx_pool *pool = fx_publish(b.f, 1, 100);
  fx_store(pool, 30);
  const kvrelay_request filter = fx_pool_request(pool),
                        catalog = fx_request(KVRELAY_METHOD_WATCH_CATALOG),
                        info = fx_request(KVRELAY_METHOD_GET_RELAY_INFO);
  const taken *samples[] = {ask_request(&b, 1, &info), ask_request(&b, 2, &catalog),
                            ask_request(&b, 3, &filter)};
  lone l;
  lone_open(&l, NULL);
  srand(3);
  size_t live = 0;
  for (int round = 0; round < 3000; round++) {
    l.now += 100 * SECOND;
    l.caller->connection(l.caller, KVRELAY_CONNECTION_READY, 0, NULL, KVRELAY_TIME_NONE, l.now);
    if (kvrelay_client_run(l.client, l.now) != KVRELAY_TRANSPORT_OK) {
      lone_close(&l); /* a changed marker or version: another contract */
      lone_open(&l, NULL);
      continue;
    }
    for (int32_t step = 0; step < 3; step++) {
      static const int32_t methods[] = {KVRELAY_METHOD_GET_RELAY_INFO, KVRELAY_METHOD_WATCH_CATALOG,
                                        KVRELAY_METHOD_SUBSCRIBE_POOL};
      uint8_t bytes[4096];
      size_t len = samples[step]->len;
      cr_assert(len > 0 && len <= sizeof bytes);
      memcpy(bytes, samples[step]->bytes, len);
      for (int k = rand() % 8 < 2 ? 1 + rand() % 3 : 0; k > 0; k--)
        bytes[(size_t)rand() % len] ^= (uint8_t)(1 << rand() % 8);
      if (rand() % 16 == 0)
        len = (size_t)rand() % len;
      lone_bytes(&l, methods[step], bytes, len);
      (void)kvrelay_client_run(l.client, l.now);
    }
    kvrelay_pool_view view;
    live += kvrelay_consumer_pool_get(&l.consumer, 0, l.now, &view) == KVRELAY_OK &&
            view.state == KVRELAY_REPLICA_LIVE;
  }
  cr_assert(live > 500 && live < 2900, "%zu", live);
  lone_close(&l);
  bare_close(&b);
}
