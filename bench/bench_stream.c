/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How long from connecting to the first whole snapshot of the default filter (4 MiB) over gRPC, and
 * how many deltas of 16 buckets a second arrive and are applied? Relay and consumer are two
 * processes on loopback, so that the wall clock measures.
 */

#include "bench.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transports/client.h"
#include "transports/grpc/grpc_client.h"
#include "transports/grpc/grpc_server.h"
#include "transports/service.h"

#define EXPECTED_BLOCKS 1048576
#define FILL_BLOCKS 524288
#define DELTAS 200000u
#define OUTSTANDING 4096u /* deltas on their way at once; the queue has room for them */

static kvrelay_text text(const char *s) { return (kvrelay_text){(const uint8_t *)s, strlen(s)}; }

static void must(bool good, const char *what) {
  if (good)
    return;
  fprintf(stderr, "bench_stream: %s\n", what);
  _Exit(1);
}

/* ---- server ---- */

static void fill(ckf_producer *p) {
  ckf_member member = {7, 0};
  ckf_batch batch;
  for (uint64_t i = 0; i < FILL_BLOCKS; i += 16) {
    ckf_block blocks[16];
    ckf_outcome out;
    for (uint64_t j = 0; j < 16; j++)
      blocks[j] = (ckf_block){i + j + 1, (i + j + 1) * 0x9E3779B97F4A7C15u};
    ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0, blocks,
                        16, &out);
  }
  must(ckf_producer_drain(p, &batch) >= 0, "drain");
}

/* Stores and removes 8 blocks: about 16 buckets change. */
static void change(ckf_producer *p, uint64_t round) {
  ckf_member member = {8, 0};
  ckf_block blocks[16];
  uint64_t gone[8];
  ckf_outcome out;
  for (uint64_t j = 0; j < 8; j++) {
    blocks[j] = (ckf_block){round * 8 + j, (round * 8 + j) * 0xD1B54A32D192ED03u};
    gone[j] = (round - 64) * 8 + j;
  }
  ckf_producer_stored(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, false, 0, false, 0, blocks,
                      8, &out);
  if (round >= 64)
    ckf_producer_removed(p, &member, CKF_TIER_DEVICE, CKF_DOMAIN_MISSING, gone, 8, &out);
}

/* As long as what it opens in turn: producer, relay, pool, service, transport. */
static void serve(int port_pipe) {
  static ckf_producer producer;
  static kvrelay_relay relay;
  static const int32_t role = KVRELAY_ROLE_AGGREGATED;
  ckf_producer_config pc = ckf_producer_config_default();
  pc.filter.expected_blocks = EXPECTED_BLOCKS;
  pc.delta_table = true;
  size_t len = ckf_producer_mem_size(&pc);
  must(ckf_producer_init(&producer, &pc, malloc(len), len) == CKF_OK, "producer");
  fill(&producer);
  kvrelay_relay_config rc = kvrelay_relay_config_default();
  rc.identity.relay_incarnation = 1;
  rc.queue_frames = 2 * OUTSTANDING;
  rc.publication_threshold = 1;
  len = kvrelay_relay_mem_size(&rc);
  must(kvrelay_relay_init(&relay, &rc, malloc(len), len, 0) == KVRELAY_OK, "relay");
  kvrelay_registration registration = {.canonical_model_id = text("m"),
                                       .target = {true, KVRELAY_TARGET_BASE, text("m"), {NULL, 0}}};
  kvrelay_descriptor d = {.serving_endpoint = {true, text("n"), text("c"), text("e")},
                          .registrations = &registration,
                          .registrations_len = 1,
                          .query_semantics = {true, 16, HASHFMT_FORMAT_STANDARD},
                          .pool_roles = {&role, 1}};
  d.producer.present = d.producer.pool_id.present = d.producer.pool_id.domain.present = true;
  d.producer.pool_id.identity_version = 1;
  must(kvrelay_cache_digest(text("m"), NULL, 0, 16, HASHFMT_FORMAT_STANDARD,
                            &d.producer.pool_id.domain.cache_semantics) == KVRELAY_OK &&
           kvrelay_scope_digest(&d.serving_endpoint, NULL, 0,
                                &d.producer.pool_id.domain.routing_scope) == KVRELAY_OK,
       "digests");
  kvrelay_pool *pool;
  len = kvrelay_relay_pool_mem_size(&relay, &d);
  must(kvrelay_relay_pool_add(&relay, &d, &producer, malloc(len), len, 0, &pool) == KVRELAY_OK,
       "pool");
  kvrelay_relay_service *service;
  kvrelay_relay_service_config sc = kvrelay_relay_service_config_default(&relay);
  must(kvrelay_relay_service_open(&sc, &service) == KVRELAY_TRANSPORT_OK, "service");
  kvrelay_grpc_server_config gc = kvrelay_grpc_server_config_default();
  gc.bind = "127.0.0.1:0";
  kvrelay_transport *t;
  must(kvrelay_grpc_server_open(&gc, kvrelay_relay_service_base(service), &t) ==
           KVRELAY_TRANSPORT_OK,
       "listen");
  uint16_t port = kvrelay_grpc_server_port(t);
  must(write(port_pipe, &port, sizeof port) == (ssize_t)sizeof port, "pipe");
  uint64_t round = 0, sent = 0;
  for (;;) {
    uint32_t subscribers = kvrelay_pool_subscribers(pool);
    must(t->run_once(t, subscribers == 1 ? 0 : 1000000000u) >= 0, "run");
    kvrelay_relay_service_poll(service, t->now_ns(t));
    /* The first subscribers only measure snapshots; the one that stays gets deltas as fast as it
     * takes them. */
    sent = kvrelay_relay_service_stats_get(service).messages;
    for (int i = 0; i < 64 && subscribers == 1 &&
                    kvrelay_pool_sequence(pool) < sent + OUTSTANDING && round < 10 * DELTAS;
         i++) {
      change(&producer, ++round);
      must(kvrelay_relay_pool_publish(&relay, pool, t->now_ns(t)) == KVRELAY_OK, "publish");
    }
    kvrelay_relay_service_poll(service, t->now_ns(t));
  }
}

/* ---- client ---- */

typedef struct side {
  kvrelay_consumer consumer;
  kvrelay_client *client;
  kvrelay_client_transport *grpc;
  void *mem;
} side;

static void side_open(side *c, uint16_t port) {
  char target[32];
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.subscriber_id = text("bench");
  size_t len = kvrelay_consumer_mem_size(&cfg);
  c->mem = malloc(len);
  must(kvrelay_consumer_init(&c->consumer, &cfg, c->mem, len, 0) == KVRELAY_OK, "consumer");
  kvrelay_client_config cc = kvrelay_client_config_default(&c->consumer);
  must(kvrelay_client_open(&cc, &c->client) == KVRELAY_TRANSPORT_OK, "client");
  snprintf(target, sizeof target, "127.0.0.1:%u", port);
  kvrelay_grpc_client_config gc = kvrelay_grpc_client_config_default();
  gc.target = target;
  must(kvrelay_grpc_client_open(&gc, kvrelay_client_caller(c->client), &c->grpc) ==
           KVRELAY_TRANSPORT_OK,
       "connect");
  kvrelay_client_attach(c->client, c->grpc);
}

static void side_close(side *c) {
  c->grpc->base.close(&c->grpc->base);
  kvrelay_client_close(c->client);
  free(c->mem);
}

static uint64_t side_now(const side *c) { return c->grpc->base.now_ns(&c->grpc->base); }

static void side_turn(side *c) {
  must(kvrelay_client_run(c->client, side_now(c)) == KVRELAY_TRANSPORT_OK, "contract");
  uint64_t now = side_now(c), until = kvrelay_client_deadline_ns(c->client),
           wait = until <= now ? 0 : until - now;
  must(c->grpc->base.run_once(&c->grpc->base, wait < 1000000000u ? wait : 1000000000u) >= 0,
       "loop");
}

/* Turns until the pool is live; the pool as it is then. */
static kvrelay_pool_view side_live(side *c) {
  kvrelay_pool_view v;
  for (;;) {
    uint64_t revision;
    uint32_t pools;
    if (kvrelay_consumer_catalog(&c->consumer, &revision, &pools) && pools == 1 &&
        kvrelay_consumer_pool_get(&c->consumer, 0, side_now(c), &v) == KVRELAY_OK &&
        v.state == KVRELAY_REPLICA_LIVE)
      return v;
    side_turn(c);
  }
}

static void ask(uint16_t port) {
  bench_sample ms = {0}, rate = {0};
  static side c;
  for (int i = 0; i < BENCH_RUNS; i++) {
    side_open(&c, port);
    uint64_t start = side_now(&c);
    (void)side_live(&c);
    bench_add(&ms, (double)(side_now(&c) - start) / 1e6);
    if (i + 1 < BENCH_RUNS)
      side_close(&c);
  }
  bench_print(&ms, "ms", "connect_to_first_snapshot_4MiB");
  for (int i = 0; i < BENCH_RUNS; i++) {
    kvrelay_pool_view v = side_live(&c);
    uint64_t from = v.deltas, lives = v.snapshots, start = side_now(&c);
    while (v.deltas < from + DELTAS / BENCH_RUNS) {
      side_turn(&c);
      v = side_live(&c);
      must(v.snapshots == lives, "the subscriber lagged");
    }
    bench_add(&rate, (double)(v.deltas - from) * 1e9 / (double)(side_now(&c) - start));
  }
  bench_print(&rate, "messages/s", "delta_stream_16_buckets");
  side_close(&c);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  int port_pipe[2];
  uint16_t port = 0;
  must(pipe(port_pipe) == 0, "pipe");
  pid_t server = fork();
  if (server == 0)
    serve(port_pipe[1]);
  must(server > 0 && read(port_pipe[0], &port, sizeof port) == (ssize_t)sizeof port, "server");
  ask(port);
  kill(server, SIGKILL);
  waitpid(server, NULL, 0);
  return 0;
}
