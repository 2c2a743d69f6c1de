/* SPDX-License-Identifier: Apache-2.0 */

/* Consumer: connection, info and catalog, quarantine, memory of replicas, retries. */

#include "test_consumer.h"

static bool in_force(const kit *k) {
  uint64_t revision;
  uint32_t pools;
  return kvrelay_consumer_catalog(&k->c, &revision, &pools);
}

/* ---- init ---- */

Test(consumer, memory_one_byte_short_is_refused) {
  const kvrelay_consumer_config cfg = kit_config();
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  uint8_t *const mem = malloc(len + 16);
  kvrelay_consumer c;
  memset(&c, 0x5A, sizeof c);
  cr_assert_eq(kvrelay_consumer_init(&c, &cfg, mem, len - 1, 0), KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_consumer_init(&c, &cfg, NULL, 0, 0), KVRELAY_ERR_NOSPACE);
  for (size_t i = 0; i < sizeof c; i++)
    cr_assert_eq(((const uint8_t *)&c)[i], 0x5A, "changed on error");
  cr_assert_eq(kvrelay_consumer_init_abi(&c, sizeof c + 8, &cfg, mem, len, 0), KVRELAY_ERR_ABI);
  /* Any alignment will do, and nothing behind the block is touched. */
  for (size_t shift = 0; shift < 16; shift++) {
    kvrelay_action a;
    mem[shift == 0 ? len : shift - 1] = 0x77;
    cr_assert_eq(kvrelay_consumer_init(&c, &cfg, mem + shift, len, 0), KVRELAY_OK);
    kvrelay_consumer_connected(&c, 0);
    cr_assert_eq(kvrelay_consumer_action_next(&c, 0, &a), 1);
    cr_assert_eq(mem[shift == 0 ? len : shift - 1], 0x77);
  }
  free(mem);
}

Test(consumer, impossible_configurations_are_refused) {
  const kvrelay_consumer_config good = kit_config();
  char long_id[130];
  kvrelay_consumer_config bad[9];
  kvrelay_consumer c;
  uint8_t mem[64];
  memset(long_id, 'x', sizeof long_id);
  for (size_t i = 0; i < 9; i++)
    bad[i] = good;
  bad[0].max_pools = 0;
  bad[1].max_pools = 65537;
  bad[2].catalog_bytes = 0;
  bad[3].catalog_bytes = SIZE_MAX;
  bad[4].backoff_first_ns = 0;
  bad[5].backoff_max_ns = bad[5].backoff_first_ns - 1;
  bad[6].subscriber_id.len = 0;
  bad[7].subscriber_id = (kvrelay_text){(const uint8_t *)long_id, 129};
  bad[8].subscriber_id = text("consumer\nspoof");
  for (size_t i = 0; i < 9; i++) {
    cr_assert_eq(kvrelay_consumer_mem_size(&bad[i]), 0, "%zu", i);
    cr_assert_eq(kvrelay_consumer_init(&c, &bad[i], mem, sizeof mem, 0), KVRELAY_ERR_ARG);
  }
  cr_assert_gt(kvrelay_consumer_mem_size(&good), 2 * good.catalog_bytes);
}

/* ---- connection ---- */

Test(consumer, nothing_is_wanted_before_a_connection) {
  const kvrelay_consumer_config cfg = kit_config();
  kvrelay_relay_identity relay;
  kvrelay_pool_view view;
  kit k;
  kit_init(&k, &cfg);
  cr_assert_eq(kit_run(&k), 0);
  cr_assert_eq(kvrelay_consumer_deadline_ns(&k.c), KVRELAY_TIME_NONE);
  cr_assert_not(kvrelay_consumer_relay(&k.c, &relay));
  cr_assert_not(in_force(&k));
  cr_assert_eq(kvrelay_consumer_pool_get(&k.c, 0, k.now, &view), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_follow(&k.c, 0, true, k.now), KVRELAY_ERR_NOT_FOUND);
  kit_close(&k);
}

Test(consumer, way_from_connection_to_a_live_pool) {
  const kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_relay_info info = {kit_envelope()};
  kvrelay_relay_identity relay;
  kvrelay_event_out e;
  kit k;
  kit_open(&k);
  cr_assert_eq(k.infos, 1);
  cr_assert_eq(k.watches, 1);
  cr_assert_eq(kvrelay_consumer_feed_info(&k.c, k.info, &info, k.now), KVRELAY_OK);
  cr_assert(kvrelay_consumer_relay(&k.c, &relay));
  cr_assert_eq(relay.drt_instance_id, 17);
  cr_assert_eq(relay.relay_incarnation, 23);
  kit_end(&k, k.info, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE);
  cr_assert_eq(kit_run(&k), 0, "a unary call that has ended is no reason for anything");

  kit_feed_pools(&k, 1, &pool, 1);
  cr_assert_eq(k.needs, 1);
  cr_assert(kvrelay_producer_equal(&k.wanted[0], &pool.producer));
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
  cr_assert_eq(kit_view(&k, 0).last_frame_ns, KVRELAY_TIME_NONE);
  const kvrelay_filter_update first = kit_chunk(&pool, kit_zeros, 9, 32, 0);
  kit_feed(&k, 0, &first);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_ASSEMBLING);
  cr_assert_null(kit_view(&k, 0).words);
  const kvrelay_filter_update second = kit_chunk(&pool, kit_zeros, 9, 32, 1);
  k.now += SECOND;
  kit_feed(&k, 0, &second);
  const kvrelay_pool_view v = kit_view(&k, 0);
  cr_assert_eq(v.state, KVRELAY_REPLICA_LIVE);
  cr_assert_eq(v.sequence, 9);
  cr_assert_eq(v.frames, 2);
  cr_assert_eq(v.snapshots, 1);
  cr_assert_eq(v.last_frame_ns, k.now);
  cr_assert_eq(v.retry_ns, KVRELAY_TIME_NONE);
  cr_assert_not_null(v.words);
  cr_assert_eq(kit_run(&k), 0);
  static const int32_t kinds[] = {KVRELAY_EVENT_INFO, KVRELAY_EVENT_CATALOG,
                                  KVRELAY_EVENT_POOL_LIVE};
  for (size_t i = 0; i < 3; i++) {
    cr_assert_eq(kvrelay_consumer_event_next(&k.c, &e), 1);
    cr_assert_eq(e.kind, kinds[i]);
  }
  cr_assert_eq(kvrelay_consumer_event_next(&k.c, &e), 0);
  kit_close(&k);
}

/* R1, its part about connections. */
Test(consumer, R1_late_ends_of_a_former_connection_change_nothing) {
  const kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_status end = kit_status(KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
  const kvrelay_relay_info info = {kit_envelope()};
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  kit_snapshot(&k, 0, &pool, kit_zeros, 0);
  const uint32_t old[3] = {k.info, k.watch, k.calls[0]};
  kvrelay_consumer_disconnected(&k.c, k.now);
  k.open_len = 0;
  kit_run(&k);
  cr_assert_eq(k.given_len, 0);
  cr_assert_eq(k.cancels, 0, "a connection that is gone has nothing to cancel");
  cr_assert_not(in_force(&k));
  kit_connect(&k);
  kit_feed_pools(&k, 0, &pool, 1);
  kit_snapshot(&k, 0, &pool, kit_zeros, 0);
  const kvrelay_filter_update frame = kit_heartbeat(&pool, 0);
  const kvrelay_catalog_update catalog = kit_catalog(5, NULL, 0);
  for (size_t i = 0; i < 3; i++) {
    cr_assert_eq(kvrelay_consumer_feed_end(&k.c, old[i], &end, k.now), KVRELAY_ERR_NOT_FOUND);
    cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, old[i], KVRELAY_ERR_LIMIT, k.now),
                 KVRELAY_ERR_NOT_FOUND);
    cr_assert_eq(kvrelay_consumer_feed_info(&k.c, old[i], &info, k.now), KVRELAY_ERR_NOT_FOUND);
    cr_assert_eq(kvrelay_consumer_feed_filter(&k.c, old[i], &frame, k.now), KVRELAY_ERR_NOT_FOUND);
    cr_assert_eq(kvrelay_consumer_feed_catalog(&k.c, old[i], &catalog, k.now),
                 KVRELAY_ERR_NOT_FOUND);
  }
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_LIVE);
  kit_close(&k);
}

Test(consumer, messages_of_another_kind_of_call_are_foreign) {
  const kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_relay_info info = {kit_envelope()};
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  const kvrelay_filter_update frame = kit_chunk(&pool, kit_zeros, 0, 64, 0);
  const kvrelay_catalog_update catalog = kit_catalog(5, NULL, 0);
  const uint32_t calls[] = {k.info, k.watch, k.calls[0], 0, 1, UINT32_MAX, k.calls[0] + 1};
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    if (calls[i] != k.info)
      cr_assert_eq(kvrelay_consumer_feed_info(&k.c, calls[i], &info, k.now), KVRELAY_ERR_NOT_FOUND);
    if (calls[i] != k.watch)
      cr_assert_eq(kvrelay_consumer_feed_catalog(&k.c, calls[i], &catalog, k.now),
                   KVRELAY_ERR_NOT_FOUND);
    if (calls[i] != k.calls[0])
      cr_assert_eq(kvrelay_consumer_feed_filter(&k.c, calls[i], &frame, k.now),
                   KVRELAY_ERR_NOT_FOUND);
  }
  cr_assert_eq(kit_run(&k), 0);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
  kit_close(&k);
}

/* ---- envelope and relay identity ---- */

enum { INFO, CATALOG, FILTER, PLANES };

static int feed_envelope(kit *k, int plane, const kvrelay_descriptor *pool, kvrelay_envelope e) {
  const kvrelay_relay_info info = {e};
  kvrelay_catalog_update catalog = kit_catalog(0, pool, 1);
  kvrelay_filter_update filter = kit_chunk(pool, kit_zeros, 0, 64, 0);
  catalog.envelope = filter.envelope = e;
  if (plane == INFO)
    return kvrelay_consumer_feed_info(&k->c, k->info, &info, k->now);
  if (plane == CATALOG) /* also wrong behind the envelope */
    return kvrelay_consumer_feed_catalog(&k->c, k->watch, &catalog, k->now);
  filter.producer.producer_incarnation++;
  return kvrelay_consumer_feed_filter(&k->c, k->calls[0], &filter, k->now);
}

/* Each envelope breaks everything that comes later, too. */
Test(consumer, envelope_error_on_any_plane_stops_everything) {
  static const struct {
    kvrelay_envelope e;
    uint8_t condition;
  } cases[] = {{{2, false, {1, 1}, 7}, KVRELAY_COND_CONTRACT_MARKER},
               {{2, false, {1, 1}, KVRELAY_CONTRACT_MARKER}, KVRELAY_COND_PROTOCOL_VERSION},
               {{1, true, {1, 1}, 0}, KVRELAY_COND_CONTRACT_MARKER},
               {{0, true, {1, 1}, KVRELAY_CONTRACT_MARKER}, KVRELAY_COND_PROTOCOL_VERSION}};
  for (int plane = 0; plane < PLANES; plane++)
    for (size_t i = 0; i < 4; i++) {
      const kvrelay_descriptor pool = kit_pool(1);
      kit k;
      kit_open(&k);
      kit_feed_pools(&k, 1, &pool, 1);
      cr_assert_eq(feed_envelope(&k, plane, &pool, cases[i].e), KVRELAY_OK);
      cr_assert_not(in_force(&k));
      k.open_len = 0;
      kit_run(&k);
      cr_assert_eq(k.stops, 1);
      cr_assert_eq(k.given_len, 0);
      cr_assert_eq(k.reconnects, 0);
      cr_assert_eq(kvrelay_consumer_deadline_ns(&k.c), KVRELAY_TIME_NONE);
      const kvrelay_event_out e = kit_event(&k, KVRELAY_EVENT_STOPPED);
      cr_assert_eq(e.verdict.class_, KVRELAY_CLASS_ENVELOPE);
      cr_assert_eq(e.verdict.condition, cases[i].condition);
      if (plane == FILTER)
        cr_assert_eq(kit_event(&k, KVRELAY_EVENT_POOL_VOID).fault, KVRELAY_FAULT_ENVELOPE);
      /* For good. */
      const size_t calls = k.opened;
      kvrelay_consumer_disconnected(&k.c, k.now);
      kit_connect(&k);
      cr_assert_eq(k.opened, calls);
      cr_assert_eq(k.stops, 1);
      kit_close(&k);
    }
}

Test(consumer, another_relay_on_the_connection_drops_everything) {
  for (int plane = 0; plane < PLANES; plane++)
    for (int half = 0; half < 2; half++) {
      const kvrelay_descriptor pool = kit_pool(1);
      kvrelay_envelope other = kit_envelope();
      kit k;
      kit_open(&k);
      kit_feed_pools(&k, 1, &pool, 1);
      *(half ? &other.relay.drt_instance_id : &other.relay.relay_incarnation) += 1;
      /* The catalog's revision is wrong as well, the filter's producer too: relay comes first. */
      cr_assert_eq(feed_envelope(&k, plane, &pool, other), KVRELAY_OK);
      kvrelay_relay_identity relay;
      cr_assert_not(kvrelay_consumer_relay(&k.c, &relay));
      cr_assert_not(in_force(&k));
      k.open_len = 0;
      kit_run(&k);
      cr_assert_eq(k.reconnects, 1);
      cr_assert_eq(k.given_len, 0);
      cr_assert_eq(kit_event(&k, KVRELAY_EVENT_CATALOG_VOID).verdict.class_, KVRELAY_CLASS_OK);
      if (plane == FILTER)
        cr_assert_eq(kit_event(&k, KVRELAY_EVENT_POOL_VOID).fault, KVRELAY_FAULT_RELAY);
      kvrelay_consumer_disconnected(&k.c, k.now);
      kit_connect(&k);
      cr_assert_eq(k.infos, 2);
      cr_assert_eq(k.watches, 2);
      cr_assert_eq(k.reconnects, 1);
      /* The other one is welcome now. */
      kvrelay_catalog_update u = kit_catalog(0, &pool, 1);
      u.envelope = other;
      cr_assert_eq(kvrelay_consumer_feed_catalog(&k.c, k.watch, &u, k.now), KVRELAY_OK);
      cr_assert(in_force(&k));
      kit_close(&k);
    }
}

Test(consumer, message_without_relay_closes_its_plane_only) {
  kvrelay_envelope none = kit_envelope();
  none.relay_present = false;
  for (int plane = 0; plane < PLANES; plane++) {
    const kvrelay_descriptor pool = kit_pool(1);
    kit k;
    kit_open(&k);
    kit_feed_pools(&k, 1, &pool, 1);
    cr_assert_eq(feed_envelope(&k, plane, &pool, none), KVRELAY_OK);
    kit_run(&k);
    cr_assert_eq(k.cancels, 1);
    cr_assert_eq(k.reconnects + k.stops, 0);
    cr_assert_eq(in_force(&k), plane != CATALOG);
    if (plane == CATALOG) {
      const kvrelay_event_out e = kit_event(&k, KVRELAY_EVENT_CATALOG_VOID);
      cr_assert_eq(e.verdict.condition, KVRELAY_COND_MISSING_FIELD);
      cr_assert_str_eq(e.verdict.field, "relay");
    }
    if (plane == FILTER)
      cr_assert_eq(kit_view(&k, 0).fault, KVRELAY_FAULT_RELAY);
    const size_t before[3] = {k.infos, k.watches, k.opened};
    kit_sleep(&k);
    cr_assert_eq(k.opened, before[2] + 1);
    cr_assert_eq(k.infos, before[0] + (plane == INFO));
    cr_assert_eq(k.watches, before[1] + (plane == CATALOG));
    kit_close(&k);
  }
}

/* ---- catalog ---- */

/* Feeds a catalog that must close the plane, and returns the event. */
static kvrelay_event_out refused(kit *k, const kvrelay_catalog_update *u) {
  const size_t cancels = k->cancels;
  cr_assert_eq(kvrelay_consumer_feed_catalog(&k->c, k->watch, u, k->now), KVRELAY_OK);
  kit_run(k);
  cr_assert_eq(k->cancels, cancels + 1);
  cr_assert_not(in_force(k));
  const kvrelay_event_out e = kit_event(k, KVRELAY_EVENT_CATALOG_VOID);
  cr_assert_neq(e.status.grpc, KVRELAY_GRPC_OK);
  cr_assert_neq(e.status.text[0], 0);
  return e;
}

static void accepted(kit *k, const kvrelay_catalog_update *u) {
  uint64_t revision;
  uint32_t pools;
  cr_assert_eq(kvrelay_consumer_feed_catalog(&k->c, k->watch, u, k->now), KVRELAY_OK);
  kit_run(k);
  cr_assert(kvrelay_consumer_catalog(&k->c, &revision, &pools));
  cr_assert_eq(revision, u->revision);
  cr_assert_eq(pools, u->pools_len);
}

Test(consumer, revisions_only_grow_within_a_stream) {
  const kvrelay_descriptor pool = kit_pool(1);
  kvrelay_catalog_update u = kit_catalog(7, &pool, 1);
  kit k;
  kit_open(&k);
  accepted(&k, &u);
  accepted(&k, &u); /* the same again is fine */
  u.revision = 9;
  accepted(&k, &u);
  u.revision = 8;
  refused(&k, &u);
  kit_sleep(&k);
  u.revision = 2; /* a new stream starts where it likes */
  accepted(&k, &u);
  cr_assert_eq(k.needs, 1, "the replica survived it all");
  kit_close(&k);
}

/* Each one differs from pool 1 by one decoded field. */
Test(consumer, T6_equal_revision_needs_equal_content) {
  static const kvrelay_text aliases[] = {{(const uint8_t *)"chaT", 4}};
  static const int32_t roles[] = {KVRELAY_ROLE_PREFILL};
  kvrelay_descriptor pools[24];
  kvrelay_registration r[6];
  size_t n = 0;
  for (size_t i = 0; i < 24; i++)
    pools[i] = kit_pool(1);
  for (size_t i = 0; i < 6; i++)
    r[i] = kit_llama;
  pools[n++].producer.producer_incarnation++;
  pools[n++].producer.layout_generation++;
  pools[n++].producer.ckf_format.seed++;
  pools[n++].producer.ckf_format.bucket_count *= 2;
  pools[n++].producer.pool_id.dc_id++;
  pools[n++].producer.pool_id.domain.cache_semantics.digest[15]++;
  pools[n++].producer.pool_id.domain.routing_scope.source = KVRELAY_SOURCE_DEFAULT_DERIVED;
  pools[n++].serving_endpoint.namespace_ = text("prof");
  pools[n++].serving_endpoint.component = text("back");
  pools[n++].serving_endpoint.endpoint = text("generatE");
  pools[n++].query_semantics.kv_block_size = 8;
  pools[n++].query_semantics.hash_format = HASHFMT_FORMAT_EAGLE;
  pools[n++].pool_roles.ptr = roles;
  pools[n++].registrations_len = 0;
  r[0].canonical_model_id = text("llamA");
  r[1].target.base_model = text("llamA");
  r[2].target.kind = KVRELAY_TARGET_LORA;
  r[2].target.adapter = text("a");
  r[3].aliases = aliases;
  r[4].aliases_len = 0;
  for (size_t i = 0; i < 5; i++)
    pools[n++].registrations = &r[i];
  for (size_t i = 0; i < n; i++) {
    const kvrelay_descriptor pool = kit_pool(1);
    const kvrelay_catalog_update was = kit_catalog(7, &pool, 1);
    kvrelay_catalog_update u = kit_catalog(7, &pools[i], 1);
    kit k;
    kit_open(&k);
    accepted(&k, &was);
    refused(&k, &u);
    kit_sleep(&k);
    accepted(&k, &was);
    u.revision = 8;
    accepted(&k, &u);
    kit_close(&k);
  }
  const kvrelay_descriptor pool = kit_pool(1);
  const kvrelay_catalog_update was = kit_catalog(7, &pool, 1);
  const kvrelay_catalog_update empty = kit_catalog(7, &pool, 0);
  kit k;
  kit_open(&k);
  accepted(&k, &was);
  refused(&k, &empty);
  kit_close(&k);
}

Test(consumer, order_of_catalog_checks) {
  kvrelay_descriptor bad = kit_pool(1);
  bad.producer.present = false;
  const kvrelay_descriptor good = kit_pool(1);
  const kvrelay_catalog_update was = kit_catalog(7, &good, 1);
  kvrelay_catalog_update u = kit_catalog(6, &bad, 1);
  kit k;
  kit_open(&k);
  accepted(&k, &was);
  /* relay, revision, snapshot and a pool are all wrong; one after the other is repaired. */
  u.envelope.relay_present = false;
  u.snapshot_present = false;
  kvrelay_event_out e = refused(&k, &u);
  cr_assert_str_eq(e.verdict.field, "relay");
  kit_sleep(&k);
  accepted(&k, &was);
  u.envelope.relay_present = true;
  e = refused(&k, &u);
  cr_assert_eq(e.verdict.class_, KVRELAY_CLASS_OK);
  cr_assert(strstr(e.status.text, "revision"));
  kit_sleep(&k);
  accepted(&k, &was);
  u.revision = 8;
  e = refused(&k, &u);
  cr_assert_str_eq(e.verdict.field, "snapshot");
  kit_sleep(&k);
  accepted(&k, &was);
  u.snapshot_present = true;
  e = refused(&k, &u);
  cr_assert_str_eq(e.verdict.field, "producer");
  kit_close(&k);
}

Test(consumer, a_pool_without_readable_id_closes_the_plane) {
  kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(5)};
  for (int i = 0; i < 6; i++) {
    kvrelay_pool_id *const id = &pools[1].producer.pool_id;
    pools[1] = kit_pool(5);
    if (i == 0)
      pools[1].producer.present = false;
    else if (i == 1)
      id->present = false;
    else if (i == 2)
      id->identity_version = 0;
    else if (i == 3)
      id->domain.present = false;
    else if (i == 4)
      id->domain.cache_semantics.digest_len = 15;
    else
      id->domain.routing_scope.source = 0;
    const kvrelay_catalog_update u = kit_catalog(1, pools, 2);
    kit k;
    kit_open(&k);
    cr_assert_eq(refused(&k, &u).verdict.class_, KVRELAY_CLASS_INVALID);
    kit_close(&k);
  }
}

Test(consumer, a_pool_listed_twice_closes_the_plane) {
  kvrelay_descriptor pools[3] = {kit_pool(5), kit_pool(1), kit_pool(5)};
  const kvrelay_catalog_update u = kit_catalog(1, pools, 3);
  kit k;
  kit_open(&k);
  pools[2].producer.producer_incarnation++; /* the id is what counts */
  cr_assert(strstr(refused(&k, &u).status.text, "twice"));
  kit_sleep(&k);
  pools[2].producer.pool_id.dc_id++;
  accepted(&k, &u);
  /* Ids of an unknown version match nothing, not even each other. */
  pools[0].producer.pool_id.identity_version = pools[2].producer.pool_id.identity_version = 2;
  pools[2].producer.pool_id.dc_id--;
  const kvrelay_catalog_update v = kit_catalog(2, pools, 3);
  accepted(&k, &v);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_QUARANTINED);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_SUBSCRIBING);
  cr_assert_eq(kit_view(&k, 2).state, KVRELAY_REPLICA_QUARANTINED);
  kit_close(&k);
}

/* X1, behind the decoder, and its relatives: one pool is set aside, the others go on. */
Test(consumer, X1_odd_pools_are_quarantined_alone) {
  static const kvrelay_registration no_kind = {
      {(const uint8_t *)"x", 1}, {true, KVRELAY_TARGET_NONE, {NULL, 0}, {NULL, 0}}, NULL, 0};
  static const int32_t odd_roles[] = {KVRELAY_ROLE_DECODE, 77};
  for (int i = 0; i < 8; i++) {
    kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(5)};
    kit k;
    kit_open(&k);
    kit_feed_pools(&k, 1, pools, 2);
    kit_snapshot(&k, 0, &pools[0], kit_zeros, 0);
    kit_snapshot(&k, 1, &pools[1], kit_zeros, 0);
    const uint32_t calls[2] = {k.calls[0], k.calls[1]};
    uint8_t class_ = KVRELAY_CLASS_UNSUPPORTED;
    if (i == 0)
      pools[0].query_semantics.hash_format = -1;
    else if (i == 1)
      pools[0].producer.pool_id.identity_version = 9;
    else if (i == 2)
      pools[0].producer.ckf_format.fingerprint_bits = 17;
    else if (i == 3)
      pools[0].registrations = &no_kind;
    else if (i == 4)
      pools[0].pool_roles = (kvrelay_roles){odd_roles, 2};
    else if (i == 5)
      pools[0].producer.pool_id.domain.cache_semantics.source = 3;
    else {
      class_ = KVRELAY_CLASS_INVALID;
      if (i == 6)
        pools[0].serving_endpoint.component = text(" x");
      else
        pools[0].producer.layout_generation = 0;
    }
    kit_feed_pools(&k, 2, pools, 2);
    cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_QUARANTINED, "%d", i);
    cr_assert_eq(kit_view(&k, 0).verdict.class_, class_, "%d", i);
    cr_assert_null(kit_view(&k, 0).words, "its old filter goes with it");
    cr_assert_eq(k.cancels, 1);
    cr_assert_eq(k.frees, 1);
    cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_LIVE);
    cr_assert_eq(k.calls[1], calls[1]);
    const kvrelay_filter_update late = kit_heartbeat(&pools[0], 0);
    cr_assert_eq(kvrelay_consumer_feed_filter(&k.c, calls[0], &late, k.now), KVRELAY_ERR_NOT_FOUND);
    /* Until the next complete message. */
    pools[0] = kit_pool(1);
    kit_feed_pools(&k, 3, pools, 2);
    cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
    cr_assert_neq(k.calls[0], calls[0]);
    kit_close(&k);
  }
}

Test(consumer, catalogs_carry_replicas_over) {
  kvrelay_descriptor a[4] = {kit_pool(1), kit_pool(3), kit_pool(5), kit_pool(7)};
  kvrelay_descriptor b[4];
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, a, 4);
  for (uint32_t i = 0; i < 4; i++) {
    uint64_t words[64] = {i + 1};
    kit_snapshot(&k, i, &a[i], words, 10 + i);
  }
  const uint32_t calls[4] = {k.calls[0], k.calls[1], k.calls[2], k.calls[3]};
  const size_t opened = k.opened;
  /* Another order; 3 is gone, 5 has a new producer, 7 another name, 9 is new. */
  b[0] = a[3];
  b[0].registrations_len = 0;
  b[0].serving_endpoint.component = text("elsewhere");
  b[1] = kit_pool(9);
  b[2] = a[2];
  b[2].producer.producer_incarnation++;
  b[2].producer.ckf_format.bucket_count = 128;
  b[3] = a[0];
  kit_feed_pools(&k, 2, b, 4);
  cr_assert_eq(k.opened, opened + 2);
  cr_assert_eq(k.cancels, 2);
  cr_assert_eq(k.frees, 2);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_LIVE);
  cr_assert_eq(kit_view(&k, 0).words[0], 4);
  cr_assert_eq(kit_view(&k, 0).sequence, 13);
  cr_assert_eq(kit_view(&k, 0).descriptor->registrations_len, 0);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_SUBSCRIBING);
  cr_assert_eq(kit_view(&k, 2).state, KVRELAY_REPLICA_SUBSCRIBING);
  cr_assert(kvrelay_producer_equal(&k.wanted[2], &b[2].producer));
  cr_assert_eq(kit_view(&k, 3).state, KVRELAY_REPLICA_LIVE);
  cr_assert_eq(kit_view(&k, 3).words[0], 1);
  /* Streams go on under their numbers. */
  const kvrelay_filter_update beat = kit_heartbeat(&a[3], 13);
  cr_assert_eq(kvrelay_consumer_feed_filter(&k.c, calls[3], &beat, k.now), KVRELAY_OK);
  cr_assert_eq(kit_view(&k, 0).heartbeats, 1);
  cr_assert_eq(kvrelay_consumer_feed_filter(&k.c, calls[1], &beat, k.now), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_feed_filter(&k.c, calls[2], &beat, k.now), KVRELAY_ERR_NOT_FOUND);
  kit_close(&k);
}

Test(consumer, the_copy_of_a_catalog_needs_nothing_of_the_message) {
  static const int32_t roles[] = {KVRELAY_ROLE_PREFILL, KVRELAY_ROLE_DECODE};
  kvrelay_descriptor *const pool = malloc(sizeof *pool);
  kvrelay_registration *const r = malloc(sizeof *r);
  kvrelay_text *const alias = malloc(sizeof *alias);
  char *const name = malloc(4);
  int32_t *const role = malloc(sizeof roles);
  kit k;
  kit_open(&k);
  memcpy(name, "a\0b", 4);
  memcpy(role, roles, sizeof roles);
  *alias = (kvrelay_text){(const uint8_t *)name, 3};
  *r = (kvrelay_registration){
      text("llama"), {true, KVRELAY_TARGET_LORA, text("llama"), text("ada")}, alias, 1};
  *pool = kit_pool(1);
  pool->registrations = r;
  pool->pool_roles = (kvrelay_roles){role, 2};
  kit_feed_pools(&k, 1, pool, 1);
  memset(name, 'z', 3);
  memset(role, 0, sizeof roles);
  memset(alias, 0, sizeof *alias);
  memset(r, 0, sizeof *r);
  memset(pool, 0, sizeof *pool);
  free(name);
  free(role);
  free(alias);
  free(r);
  free(pool);
  const kvrelay_descriptor *const d = kit_view(&k, 0).descriptor;
  cr_assert(kvrelay_text_equal(d->registrations[0].aliases[0],
                               (kvrelay_text){(const uint8_t *)"a\0b", 3}));
  cr_assert(kvrelay_text_equal(d->registrations[0].target.adapter, text("ada")));
  cr_assert(kvrelay_text_equal(d->serving_endpoint.endpoint, text("generate")));
  cr_assert_eq(d->pool_roles.len, 2);
  cr_assert_eq(d->pool_roles.ptr[1], KVRELAY_ROLE_DECODE);
  kit_close(&k);
}

Test(consumer, too_large_catalogs_void_the_plane_but_not_replicas) {
  kvrelay_consumer_config cfg = kit_config();
  kvrelay_descriptor pools[5] = {kit_pool(1), kit_pool(3), kit_pool(5), kit_pool(7), kit_pool(9)};
  char *const endless = malloc(40000);
  kit k;
  memset(endless, 'x', 40000);
  cfg.max_pools = 4;
  cfg.catalog_bytes = 32768;
  kit_init(&k, &cfg);
  kit_connect(&k);
  const kvrelay_catalog_update good = kit_catalog(1, pools, 4), five = kit_catalog(2, pools, 5);
  accepted(&k, &good);
  kit_snapshot(&k, 0, &pools[0], kit_zeros, 4);
  cr_assert(strstr(refused(&k, &five).status.text, "bound"));
  /* Streams go on meanwhile, unasked. */
  const kvrelay_filter_update beat = kit_heartbeat(&pools[0], 4);
  kit_feed(&k, 0, &beat);
  kit_sleep(&k);
  const size_t opened = k.opened;
  accepted(&k, &good);
  cr_assert_eq(k.opened, opened);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_LIVE);
  cr_assert_eq(kit_view(&k, 0).heartbeats, 1);
  kvrelay_catalog_update texts = kit_catalog(3, pools, 4);
  pools[2].serving_endpoint.component = (kvrelay_text){(const uint8_t *)endless, 40000};
  cr_assert(strstr(refused(&k, &texts).status.text, "bound"));
  /* Every size up to what fits: refused or whole, never beyond the block (the sanitizer looks). */
  size_t fitted = 0;
  for (size_t len = 20000; len < 33000; len += 7) {
    uint64_t revision;
    uint32_t n;
    kit_sleep(&k);
    pools[2].serving_endpoint.component.len = len;
    cr_assert_eq(kvrelay_consumer_feed_catalog(&k.c, k.watch, &texts, k.now), KVRELAY_OK);
    if (!kvrelay_consumer_catalog(&k.c, &revision, &n))
      break;
    fitted++;
    cr_assert_eq(n, 4);
    kit_end(&k, k.watch, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE);
    kit_run(&k);
  }
  cr_assert_gt(fitted, 10);
  free(endless);
  kit_close(&k);
}

Test(consumer, end_of_the_catalog_stream_voids_the_catalog_only) {
  const kvrelay_descriptor pool = kit_pool(1);
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  kit_snapshot(&k, 0, &pool, kit_zeros, 4);
  kit_end(&k, k.watch, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE);
  cr_assert_not(in_force(&k));
  cr_assert_eq(kit_run(&k), 0);
  cr_assert_str_eq(kit_event(&k, KVRELAY_EVENT_CATALOG_VOID).status.text, "because");
  kit_end(&k, k.calls[0], KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
  k.now += 3600 * SECOND; /* no subscription without a catalog that lists the pool */
  const size_t opened = k.opened;
  kit_run(&k);
  cr_assert_eq(k.opened, opened + 1);
  cr_assert_eq(k.watches, 2);
  kit_feed_pools(&k, 0, &pool, 1);
  cr_assert_eq(k.opened, opened + 2);
  cr_assert_eq(k.needs, 1);
  kit_close(&k);
}

/* ---- memory ---- */

Test(consumer, without_memory_a_pool_waits) {
  const kvrelay_descriptor pool = kit_pool(1);
  kit k;
  kit_open(&k);
  k.deny = true;
  kit_feed_pools(&k, 1, &pool, 1);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_WAITING);
  cr_assert_eq(kit_view(&k, 0).retry_ns, kvrelay_consumer_deadline_ns(&k.c));
  uint64_t delay = kit_sleep(&k);
  cr_assert(delay >= 250 * MS && delay <= 500 * MS);
  delay = kit_sleep(&k);
  cr_assert(delay >= 500 * MS && delay <= SECOND);
  cr_assert_eq(k.needs, 3);
  k.deny = false;
  kit_sleep(&k);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
  kit_close(&k);
}

Test(consumer, memory_is_taken_only_when_wanted) {
  kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(3)};
  kvrelay_action a;
  kit k;
  kit_open(&k);
  const kvrelay_catalog_update u = kit_catalog(1, pools, 2);
  cr_assert_eq(kvrelay_consumer_feed_catalog(&k.c, k.watch, &u, k.now), KVRELAY_OK);
  uint8_t *const mem = malloc(8192);
  cr_assert_eq(kvrelay_consumer_replica_give(&k.c, 0, mem, 8192, k.now), KVRELAY_ERR_STATE);
  cr_assert_eq(kvrelay_consumer_action_next(&k.c, k.now, &a), 1);
  cr_assert_eq(a.kind, KVRELAY_ACTION_REPLICA_NEED);
  cr_assert_eq(a.bytes, 64 * 8 + 64 / 8 + 63);
  cr_assert_eq(kvrelay_consumer_replica_give(&k.c, a.pool, mem, a.bytes - 1, k.now),
               KVRELAY_ERR_NOSPACE);
  cr_assert_eq(kvrelay_consumer_replica_give(&k.c, 2, mem, a.bytes, k.now), KVRELAY_ERR_NOT_FOUND);
  /* A new catalog forgets the wish, as indices may mean other pools now. */
  const kvrelay_catalog_update v = kit_catalog(2, pools, 2);
  cr_assert_eq(kvrelay_consumer_feed_catalog(&k.c, k.watch, &v, k.now), KVRELAY_OK);
  cr_assert_eq(kvrelay_consumer_replica_give(&k.c, a.pool, mem, a.bytes, k.now), KVRELAY_ERR_STATE);
  free(mem);
  kit_run(&k);
  cr_assert_eq(k.needs, 2);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
  kit_close(&k);
}

Test(consumer, follow_and_unfollow) {
  kvrelay_consumer_config cfg = kit_config();
  kvrelay_descriptor pools[3] = {kit_pool(1), kit_pool(3), kit_pool(5)};
  kit k;
  cfg.subscribe_all = false;
  kit_init(&k, &cfg);
  kit_connect(&k);
  kit_feed_pools(&k, 1, pools, 3);
  cr_assert_eq(k.needs, 0);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_IDLE);
  cr_assert_eq(kvrelay_consumer_follow(&k.c, 3, true, k.now), KVRELAY_ERR_NOT_FOUND);
  cr_assert_eq(kvrelay_consumer_follow(&k.c, 1, true, k.now), KVRELAY_OK);
  kit_run(&k);
  cr_assert_eq(k.needs, 1);
  kit_snapshot(&k, 1, &pools[1], kit_zeros, 0);
  /* The wish outlives a producer, not the pool. */
  pools[1].producer.layout_generation++;
  kit_feed_pools(&k, 2, pools, 3);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_SUBSCRIBING);
  kit_feed_pools(&k, 3, pools, 1);
  kit_feed_pools(&k, 4, pools, 3);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_IDLE);
  cr_assert_eq(k.given_len, 0);
  cr_assert_eq(kvrelay_consumer_follow(&k.c, 1, true, k.now), KVRELAY_OK);
  kit_run(&k);
  kit_snapshot(&k, 1, &pools[1], kit_zeros, 0);
  const size_t cancels = k.cancels;
  cr_assert_eq(kvrelay_consumer_follow(&k.c, 1, false, k.now), KVRELAY_OK);
  cr_assert_null(kit_view(&k, 1).words);
  kit_run(&k);
  cr_assert_eq(k.cancels, cancels + 1);
  cr_assert_eq(k.given_len, 0);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_IDLE);
  kit_close(&k);
}

Test(consumer, a_replica_given_up_before_its_call_was_cancelled) {
  const kvrelay_descriptor pool = kit_pool(1);
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.calls[0], KVRELAY_ERR_MALFORMED, k.now),
               KVRELAY_OK);
  kit_feed_pools(&k, 2, &pool, 0);
  cr_assert_eq(k.cancels, 1);
  cr_assert_eq(k.given_len, 0);
  cr_assert_eq(k.open_len, 2);
  kit_close(&k);
}

Test(consumer, a_catalog_may_fill_its_bound_and_not_a_byte_more) {
  kvrelay_consumer_config cfg = kit_config();
  const kvrelay_descriptor pools[3] = {kit_pool(1), kit_pool(3), kit_pool(5)};
  const kvrelay_catalog_update u = kit_catalog(1, pools, 3);
  kit k;
  kit_open(&k);
  accepted(&k, &u);
  const size_t used = k.c.catalogs_[k.c.current_].used;
  kit_close(&k);
  for (size_t len = 1; len <= used; len++) {
    cfg.catalog_bytes = len;
    kit_init(&k, &cfg);
    kit_connect(&k);
    if (len < used)
      refused(&k, &u);
    else
      accepted(&k, &u);
    kit_close(&k);
  }
}

/* ---- retries ---- */

enum expect { AGAIN, LATE, AFTER_CATALOG, AFTER_IDENTITY, BARRED_CATALOG, BARRED, STOPS };

static const struct {
  int32_t reason, grpc;
  bool heard; /* a frame came first */
  enum expect expect;
} policies[] = {
    {KVRELAY_REASON_CONTRACT_MISMATCH, KVRELAY_GRPC_FAILED_PRECONDITION, false, STOPS},
    {KVRELAY_REASON_INVALID_REQUEST, KVRELAY_GRPC_INVALID_ARGUMENT, false, BARRED},
    {KVRELAY_REASON_UNSUPPORTED_FEATURE, KVRELAY_GRPC_FAILED_PRECONDITION, false, BARRED_CATALOG},
    {KVRELAY_REASON_POOL_NOT_FOUND, KVRELAY_GRPC_NOT_FOUND, true, AFTER_CATALOG},
    {KVRELAY_REASON_PRODUCER_CHANGED, KVRELAY_GRPC_FAILED_PRECONDITION, false, AFTER_CATALOG},
    {KVRELAY_REASON_RESOURCE_LIMIT, KVRELAY_GRPC_RESOURCE_EXHAUSTED, false, AGAIN},
    {KVRELAY_REASON_SUBSCRIBER_LAGGED, KVRELAY_GRPC_RESOURCE_EXHAUSTED, true, AGAIN},
    {KVRELAY_REASON_SNAPSHOT_PROGRESS_TIMEOUT, KVRELAY_GRPC_RESOURCE_EXHAUSTED, true, AGAIN},
    {KVRELAY_REASON_PUBLICATION_UNAVAILABLE, KVRELAY_GRPC_UNAVAILABLE, true, AGAIN},
    {KVRELAY_REASON_INVALID_PUBLICATION, KVRELAY_GRPC_FAILED_PRECONDITION, true, AFTER_CATALOG},
    {KVRELAY_REASON_INTERNAL, KVRELAY_GRPC_INTERNAL, false, AGAIN},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_FAILED_PRECONDITION, false, AFTER_IDENTITY},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_RESOURCE_EXHAUSTED, false, AGAIN},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_UNAVAILABLE, true, AGAIN},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_OK, true, AGAIN},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_CANCELLED, false, AGAIN},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_INTERNAL, true, AGAIN},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_INTERNAL, false, LATE},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_OUT_OF_RANGE, false, LATE},
    {KVRELAY_REASON_NONE, KVRELAY_GRPC_UNIMPLEMENTED, false, LATE}};
#define POLICIES (sizeof policies / sizeof policies[0])

/* One case for each policy. */
static void filter_policy(size_t i) {
  const kvrelay_descriptor pools[2] = {kit_pool(1), kit_pool(3)};
  const kvrelay_relay_info info = {kit_envelope()};
  kit k;
  kit_open(&k);
  cr_assert_eq(kvrelay_consumer_feed_info(&k.c, k.info, &info, k.now), KVRELAY_OK);
  kit_end(&k, k.info, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE);
  kit_feed_pools(&k, 1, pools, 2);
  kit_snapshot(&k, 1, &pools[1], kit_zeros, 0);
  if (policies[i].heard)
    kit_snapshot(&k, 0, &pools[0], kit_zeros, 0);
  kit_events(&k, 0);
  const uint32_t call = k.calls[0];
  const size_t opened = k.opened;
  kit_end(&k, call, policies[i].grpc, policies[i].reason);
  if (policies[i].expect == STOPS) {
    k.open_len = 0;
    kit_run(&k);
    cr_assert_eq(k.stops, 1);
    cr_assert_eq(kit_event(&k, KVRELAY_EVENT_STOPPED).status.reason, policies[i].reason);
    kit_close(&k);
    return;
  }
  const kvrelay_event_out e = kit_event(&k, KVRELAY_EVENT_POOL_VOID);
  cr_assert_eq(e.pool, 0);
  cr_assert_eq(e.status.reason, policies[i].reason);
  kvrelay_pool_view v = kit_view(&k, 0);
  cr_assert_null(v.words);
  cr_assert_eq(v.last_end.grpc, policies[i].grpc);
  cr_assert_eq(kit_view(&k, 1).state, KVRELAY_REPLICA_LIVE, "the other pool is not concerned");
  kit_run(&k);
  uint64_t delay;
  switch (policies[i].expect) {
  case AGAIN:
  case LATE:
    cr_assert_eq(v.state, KVRELAY_REPLICA_WAITING);
    delay = kit_sleep(&k);
    if (policies[i].expect == AGAIN)
      cr_assert(delay >= 250 * MS && delay <= 500 * MS);
    else
      cr_assert(delay >= 15 * SECOND && delay <= 30 * SECOND);
    cr_assert_eq(k.opened, opened + 1);
    break;
  case AFTER_CATALOG:
    /* A newer catalog that still lists it: after the backoff. */
    cr_assert_eq(k.opened, opened);
    kit_feed_pools(&k, 2, pools, 2);
    cr_assert_eq(k.opened, opened);
    kit_sleep(&k);
    cr_assert_eq(k.opened, opened + 1);
    /* No newer catalog: it is asked for. */
    kit_end(&k, k.calls[0], policies[i].grpc, policies[i].reason);
    kit_run(&k);
    const size_t cancels = k.cancels;
    kit_sleep(&k);
    cr_assert_eq(k.cancels, cancels + 1);
    cr_assert(in_force(&k), "until it comes, the old one is used");
    kit_sleep(&k);
    cr_assert_eq(k.watches, 2);
    cr_assert_eq(k.opened, opened + 2);
    kit_feed_pools(&k, 0, pools, 2); /* a stream of its own: any revision */
    cr_assert_eq(k.opened, opened + 3);
    /* A new producer needs no patience. */
    kit_end(&k, k.calls[0], policies[i].grpc, policies[i].reason);
    kvrelay_descriptor next[2] = {pools[0], pools[1]};
    next[0].producer.layout_generation++;
    kit_feed_pools(&k, 3, next, 2);
    cr_assert_eq(k.opened, opened + 4);
    break;
  case AFTER_IDENTITY:
    cr_assert_eq(k.infos, 2);
    cr_assert_eq(k.cancels, 1);
    cr_assert_eq(k.opened, opened + 1);
    kit_sleep(&k);
    cr_assert_eq(k.watches, 2);
    cr_assert_eq(k.opened, opened + 2);
    kit_feed_pools(&k, 1, pools, 2);
    while (k.opened == opened + 2)
      kit_sleep(&k);
    cr_assert_eq(k.opened, opened + 3);
    break;
  default:
    cr_assert_eq(v.state, KVRELAY_REPLICA_QUARANTINED);
    cr_assert_eq(v.verdict.class_, KVRELAY_CLASS_OK);
    cr_assert_eq(k.given_len, 1);
    cr_assert_eq(kvrelay_consumer_deadline_ns(&k.c), KVRELAY_TIME_NONE);
    kit_feed_pools(&k, 2, pools, 2);
    k.now += 3600 * SECOND;
    kit_run(&k);
    cr_assert_eq(k.opened, opened + (policies[i].expect == BARRED_CATALOG));
    kvrelay_descriptor other[2] = {pools[0], pools[1]};
    other[0].producer.layout_generation++;
    kit_feed_pools(&k, 3, other, 2);
    cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_SUBSCRIBING);
  }
  kit_close(&k);
}

Test(consumer, C5_filter_retries_follow_the_reason) {
  for (size_t i = 0; i < POLICIES; i++)
    filter_policy(i);
}

Test(consumer, C5_catalog_retries_follow_the_reason) {
  for (size_t i = 0; i < POLICIES; i++) {
    const kvrelay_descriptor pool = kit_pool(1);
    const kvrelay_relay_info info = {kit_envelope()};
    kit k;
    kit_open(&k);
    cr_assert_eq(kvrelay_consumer_feed_info(&k.c, k.info, &info, k.now), KVRELAY_OK);
    kit_end(&k, k.info, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE);
    if (policies[i].heard)
      kit_feed_pools(&k, 1, &pool, 1);
    kit_end(&k, k.watch, policies[i].grpc, policies[i].reason);
    cr_assert_not(in_force(&k));
    const enum expect expect = policies[i].expect;
    if (expect == STOPS || expect == BARRED) {
      k.open_len = 0;
      kit_run(&k);
      cr_assert_eq(k.stops, expect == STOPS);
      cr_assert_eq(kvrelay_consumer_deadline_ns(&k.c), KVRELAY_TIME_NONE);
    } else {
      const uint64_t start = k.now;
      kit_run(&k);
      cr_assert_eq(k.infos, 1 + (expect == AFTER_IDENTITY));
      while (k.watches == 1)
        kit_sleep(&k);
      if (expect == LATE)
        cr_assert(k.now - start >= 15 * SECOND && k.now - start <= 30 * SECOND);
      else
        cr_assert(k.now - start >= 250 * MS && k.now - start <= 500 * MS);
    }
    kit_close(&k);
  }
}

/* A peer that says when it wants to be called again is called then, not earlier and not later. */
Test(consumer, C11_a_pushback_takes_the_place_of_the_backoff) {
  static const uint64_t waits[] = {1, 10 * MS, 90 * SECOND};
  for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
    const kvrelay_descriptor pool = kit_pool(1);
    kvrelay_status status = kit_status(KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
    kit k;
    status.retry_ns = waits[i];
    kit_open(&k);
    kit_feed_pools(&k, 1, &pool, 1);
    const size_t opened = k.opened;
    cr_assert_eq(kvrelay_consumer_feed_end(&k.c, k.calls[0], &status, k.now), KVRELAY_OK);
    cr_assert_eq(kit_view(&k, 0).retry_ns, k.now + waits[i]);
    kit_run(&k);
    cr_assert_eq(kit_sleep(&k), waits[i]);
    cr_assert_eq(k.opened, opened + 1);
    cr_assert_eq(kvrelay_consumer_feed_end(&k.c, k.watch, &status, k.now), KVRELAY_OK);
    kit_run(&k);
    cr_assert_eq(kit_sleep(&k), waits[i]);
    cr_assert_eq(k.watches, 2);
    kit_close(&k);
  }
}

Test(consumer, C11_who_is_not_to_call_again_waits_for_a_new_connection) {
  const kvrelay_descriptor pool = kit_pool(1);
  kvrelay_status status = kit_status(KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
  kit k;
  status.retry_ns = KVRELAY_TIME_NONE;
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  const size_t opened = k.opened;
  cr_assert_eq(kvrelay_consumer_feed_end(&k.c, k.calls[0], &status, k.now), KVRELAY_OK);
  kit_run(&k);
  cr_assert_eq(kit_view(&k, 0).state, KVRELAY_REPLICA_QUARANTINED);
  cr_assert_eq(kvrelay_consumer_feed_end(&k.c, k.watch, &status, k.now), KVRELAY_OK);
  k.now += 3600 * SECOND;
  kit_run(&k);
  cr_assert_eq(k.opened, opened);
  kvrelay_consumer_disconnected(&k.c, k.now);
  kit_run(&k);
  kit_connect(&k);
  cr_assert_eq(k.watches, 2);
  kit_close(&k);
}

Test(consumer, info_is_asked_until_it_is_there) {
  const kvrelay_relay_info info = {kit_envelope()};
  kit k;
  kit_open(&k);
  kit_end(&k, k.info, KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
  cr_assert_eq(kit_run(&k), 0);
  kit_sleep(&k);
  cr_assert_eq(k.infos, 2);
  kit_end(&k, k.info, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE); /* without a message */
  cr_assert_eq(kit_run(&k), 0);
  kit_sleep(&k);
  cr_assert_eq(k.infos, 3);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.info, KVRELAY_ERR_TRUNCATED, k.now),
               KVRELAY_OK);
  kit_run(&k);
  kit_sleep(&k);
  cr_assert_eq(k.infos, 4);
  cr_assert_eq(kvrelay_consumer_feed_info(&k.c, k.info, &info, k.now), KVRELAY_OK);
  kit_end(&k, k.info, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_NONE);
  k.now += 3600 * SECOND;
  kit_run(&k);
  cr_assert_eq(k.infos, 4);
  kit_close(&k);
}

/* Delays of `n` failures in a row. */
static void delays(uint64_t seed, uint64_t *out, size_t n) {
  const kvrelay_descriptor pool = kit_pool(1);
  kvrelay_consumer_config cfg = kit_config();
  kit k;
  cfg.jitter_seed = seed;
  kit_init(&k, &cfg);
  kit_connect(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  for (size_t i = 0; i < n; i++) {
    k.now += SECOND;
    kit_end(&k, k.calls[0], KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
    kit_run(&k);
    cr_assert_eq(kit_view(&k, 0).retry_ns, kvrelay_consumer_deadline_ns(&k.c));
    out[i] = kit_sleep(&k);
  }
  /* One life of 30 s starts over, one of less does not. */
  for (int i = 0; i < 2; i++) {
    k.now += 30 * SECOND - (i == 0);
    kit_end(&k, k.calls[0], KVRELAY_GRPC_UNAVAILABLE, KVRELAY_REASON_NONE);
    kit_run(&k);
    const uint64_t delay = kit_sleep(&k);
    if (i == 0)
      cr_assert_geq(delay, 15 * SECOND);
    else
      cr_assert_leq(delay, 500 * MS);
  }
  kit_close(&k);
}

Test(consumer, C5_backoff_doubles_to_its_end_with_jitter) {
  uint64_t a[12], b[12], c[12], full = 500 * MS;
  size_t differ = 0;
  delays(1, a, 12);
  delays(1, b, 12);
  delays(2, c, 12);
  for (size_t i = 0; i < 12; i++) {
    cr_assert(a[i] >= full / 2 && a[i] <= full, "%zu: %lu", i, (unsigned long)a[i]);
    cr_assert_eq(a[i], b[i]);
    differ += a[i] != c[i];
    full = full * 2 > 30 * SECOND ? 30 * SECOND : full * 2;
  }
  cr_assert_gt(differ, 8);
}

Test(consumer, broken_messages_close_their_plane) {
  const kvrelay_descriptor pool = kit_pool(1);
  kit k;
  kit_open(&k);
  kit_feed_pools(&k, 1, &pool, 1);
  kit_snapshot(&k, 0, &pool, kit_zeros, 0);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.calls[0], KVRELAY_ERR_MALFORMED, k.now),
               KVRELAY_OK);
  cr_assert_eq(kit_view(&k, 0).fault, KVRELAY_FAULT_DECODE);
  cr_assert_eq(kit_view(&k, 0).fault_code, KVRELAY_ERR_MALFORMED);
  cr_assert(in_force(&k));
  kit_run(&k);
  cr_assert_eq(k.cancels, 1);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.watch, KVRELAY_ERR_LIMIT, k.now), KVRELAY_OK);
  cr_assert_not(in_force(&k));
  cr_assert_str_eq(kit_event(&k, KVRELAY_EVENT_CATALOG_VOID).status.text,
                   kvrelay_strerror(KVRELAY_ERR_LIMIT));
  kit_run(&k);
  cr_assert_eq(k.cancels, 2);
  kit_close(&k);
}

Test(consumer, a_second_answer_that_is_broken_ends_the_call) {
  const kvrelay_relay_info info = {kit_envelope()};
  kit k;
  kit_open(&k);
  cr_assert_eq(kvrelay_consumer_feed_info(&k.c, k.info, &info, k.now), KVRELAY_OK);
  kit_run(&k);
  cr_assert_eq(k.cancels, 0);
  cr_assert_eq(kvrelay_consumer_feed_broken(&k.c, k.info, KVRELAY_ERR_MALFORMED, k.now),
               KVRELAY_OK);
  kit_run(&k); /* nothing else is wanted of this plane, the call has to go nevertheless */
  cr_assert_eq(k.cancels, 1);
  cr_assert_eq(k.infos, 1);
  kit_close(&k);
}

Test(consumer, the_oldest_events_go) {
  const kvrelay_descriptor pool = kit_pool(1);
  kit k;
  kit_open(&k);
  for (uint64_t i = 0; i < 200; i++)
    kit_feed_pools(&k, i, &pool, 1);
  kit_snapshot(&k, 0, &pool, kit_zeros, 0);
  kvrelay_event_out e;
  size_t n = 0;
  for (; kvrelay_consumer_event_next(&k.c, &e); n++)
    cr_assert_eq(e.kind, n < 63 ? KVRELAY_EVENT_CATALOG : KVRELAY_EVENT_POOL_LIVE);
  cr_assert_eq(n, 64);
  kit_close(&k);
}

/* ---- everything at random ---- */

/* What is known of one pool outside: the producer generation that catalogs list, 0 = absent. One
 * case for each thing that may happen next. */
static void soak(uint64_t seed) {
  kvrelay_consumer_config cfg = kit_config();
  uint64_t random = seed, revision = 0;
  uint64_t generation[10];
  uint32_t index[10];
  kit k;
  cfg.jitter_seed = seed;
  kit_init(&k, &cfg);
  kit_connect(&k);
  for (size_t i = 0; i < 10; i++)
    generation[i] = 1;
  for (int step = 0; step < 3000; step++) {
    const uint64_t r = kit_random(&random);
    const size_t i = r / 16 % 10;
    uint64_t rev;
    uint32_t n;
    switch (r % 16) {
    case 0:
    case 1: { /* a catalog */
      kvrelay_descriptor pools[10];
      size_t len = 0;
      generation[i] += r >> 60 & 1;
      for (size_t p = 0; p < 10; p++) {
        index[p] = UINT32_MAX;
        if (kit_random(&random) % 8 == 0)
          continue;
        pools[len] = kit_pool((uint8_t)(10 * p + 1));
        pools[len].producer.layout_generation = generation[p];
        pools[len].producer.ckf_format.bucket_count = 64u << generation[p] % 2;
        if (kit_random(&random) % 16 == 0)
          pools[len].query_semantics.hash_format = 99;
        index[p] = (uint32_t)len++;
      }
      const kvrelay_catalog_update u = kit_catalog(++revision, pools, len);
      (void)kvrelay_consumer_feed_catalog(&k.c, k.watch, &u, k.now);
      break;
    }
    case 2:
      k.deny = !k.deny && r >> 40 & 1;
      break;
    case 3:
      if (r % 5 == 0) {
        kvrelay_consumer_disconnected(&k.c, k.now);
        k.open_len = 0;
        kit_run(&k);
        cr_assert_eq(k.given_len, 0);
        kit_connect(&k);
      }
      break;
    case 4:
    case 5: { /* the peer ends some call */
      if (k.open_len > 2) {
        const uint32_t call = k.open[r / 7 % k.open_len];
        int32_t reason = (int32_t)(r / 3 % 12);
        if (reason == KVRELAY_REASON_CONTRACT_MISMATCH)
          reason = KVRELAY_REASON_NONE;
        kit_end(&k, call, reason ? kvrelay_reason_status(reason) : (int32_t)(r / 11 % 17), reason);
      }
      break;
    }
    case 6:
      if (kvrelay_consumer_catalog(&k.c, &rev, &n) && n != 0)
        cr_assert_eq(kvrelay_consumer_follow(&k.c, (uint32_t)(r / 9 % n), r >> 33 & 1, k.now),
                     KVRELAY_OK);
      break;
    default: /* frames, a few of them wrong */
      if (kvrelay_consumer_catalog(&k.c, &rev, &n) && index[i] < n) {
        const kvrelay_pool_view v = kit_view(&k, index[i]);
        if (v.state != KVRELAY_REPLICA_SUBSCRIBING && v.state != KVRELAY_REPLICA_LIVE)
          break;
        /* The call's index may be of an older catalog: look the open one up by its producer. */
        for (size_t p = 0; p < KIT_POOLS; p++)
          for (size_t o = 0; o < k.open_len; o++)
            if (k.open[o] == k.calls[p] &&
                kvrelay_producer_equal(&k.wanted[p], &v.descriptor->producer)) {
              const ckf_image image = {(uint32_t)(r >> 20) % 64, r};
              kvrelay_filter_update u = kit_heartbeat(v.descriptor, v.sequence);
              if (v.state == KVRELAY_REPLICA_SUBSCRIBING)
                u = kit_chunk(v.descriptor, kit_zeros, r >> 50, 128, 0);
              else if (r >> 45 & 1)
                u = kit_delta(v.descriptor, &image, 1, v.sequence + (r >> 46 & 31) / 31);
              const int rc = kvrelay_consumer_feed_filter(&k.c, k.open[o], &u, k.now);
              cr_assert(rc == KVRELAY_OK || rc == KVRELAY_ERR_NOT_FOUND);
              if (kit_view(&k, index[i]).frames > v.frames)
                cr_assert_eq(kit_view(&k, index[i]).state, KVRELAY_REPLICA_LIVE);
              p = KIT_POOLS - 1;
              break;
            }
      }
    }
    k.now += r >> 34;
    kit_run(&k);
    if (kvrelay_consumer_catalog(&k.c, &rev, &n))
      for (uint32_t p = 0; p < n; p++) {
        const kvrelay_pool_view v = kit_view(&k, p);
        cr_assert_eq(v.words != NULL, v.state == KVRELAY_REPLICA_LIVE);
        cr_assert_eq(v.state == KVRELAY_REPLICA_WAITING && v.retry_ns <= k.now, false,
                     "what is due was done");
      }
  }
  cr_assert_gt(k.opened, 300);
  cr_assert_gt(k.needs, 100);
  kit_close(&k);
}

Test(consumer, random_operations_lose_no_memory_and_no_call) {
  for (uint64_t seed = 1; seed <= 20; seed++)
    soak(seed);
}
