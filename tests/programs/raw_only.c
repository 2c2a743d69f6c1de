/* SPDX-License-Identifier: Apache-2.0 */
/* Relay and consumer over raw frames, each with its own loop, in one process: what a build without
 * nghttp2, libevent and OpenSSL has (scripts/check-raw). */
#include <string.h>

#include "client.h"
#include "examples/data_centre.h"
#include "service.h"
#include "tcp/tcp_client.h"
#include "tcp/tcp_server.h"

#define PATIENCE_NS UINT64_C(10000000000)

static kvrelay_relay relay;
static data_centre centre;
static kvrelay_consumer consumer;

static void *memory(size_t len) {
  void *mem = malloc(len);
  need(len != 0 && mem != NULL, "no memory");
  return mem;
}

static kvrelay_text text(const char *word) {
  return (kvrelay_text){(const uint8_t *)word, strlen(word)};
}

static void open_relay(const uint32_t *prompt, size_t blocks) {
  static const int32_t role[] = {KVRELAY_ROLE_AGGREGATED};
  kvrelay_relay_config cfg = kvrelay_relay_config_default();
  cfg.max_pools = 1;
  cfg.max_bucket_count = 1 << 16;
  cfg.identity.relay_incarnation = 1;
  size_t len = kvrelay_relay_mem_size(&cfg);
  need(kvrelay_relay_init(&relay, &cfg, memory(len), len, kvrelay_now_ns()) == KVRELAY_OK, "relay");
  kvrelay_registration model = {
      .canonical_model_id = text("llama"),
      .target = {.present = true, .kind = KVRELAY_TARGET_BASE, .base_model = text("llama")}};
  kvrelay_descriptor d = {
      .registrations = &model,
      .registrations_len = 1,
      .pool_roles = {role, 1},
      .query_semantics = {.kv_block_size = BLOCK_SIZE, .hash_format = HASHFMT_FORMAT_STANDARD},
      .serving_endpoint = {
          .namespace_ = text("prod"), .component = text("east"), .endpoint = text("generate")}};
  kvrelay_pool_id *id = &d.producer.pool_id;
  id->identity_version = 1;
  id->domain.present = true;
  need(kvrelay_dc_id(text("dc-a"), &id->dc_id) == KVRELAY_OK &&
           kvrelay_cache_digest(text("llama"), NULL, 0, BLOCK_SIZE, HASHFMT_FORMAT_STANDARD,
                                &id->domain.cache_semantics) == KVRELAY_OK &&
           kvrelay_scope_digest(&d.serving_endpoint, NULL, 0, &id->domain.routing_scope) ==
               KVRELAY_OK,
       "identity");
  data_centre_open(&centre, id->dc_id, HASHFMT_FORMAT_STANDARD);
  data_centre_caches(&centre, prompt, 0, blocks);
  kvrelay_pool *pool;
  len = kvrelay_relay_pool_mem_size(&relay, &d);
  need(kvrelay_relay_pool_add(&relay, &d, &centre.producer, memory(len), len, kvrelay_now_ns(),
                              &pool) == KVRELAY_OK,
       "pool");
}

static bool live(void) {
  kvrelay_event_out event;
  while (kvrelay_consumer_event_next(&consumer, &event) == 1)
    if (event.kind == KVRELAY_EVENT_POOL_LIVE)
      return true;
  return false;
}

int main(void) {
  static uint32_t prompt[MAX_BLOCKS * BLOCK_SIZE];
  kvrelay_relay_service *service;
  kvrelay_transport *server;
  kvrelay_client *client;
  kvrelay_client_transport *wire = NULL;
  char address[64];

  for (uint32_t i = 0; i < sizeof prompt / sizeof *prompt; i++)
    prompt[i] = i;
  open_relay(prompt, 40);
  const kvrelay_relay_service_config offered = kvrelay_relay_service_config_default(&relay);
  kvrelay_tcp_server_config listening = kvrelay_tcp_server_config_default();
  listening.bind = "127.0.0.1:0";
  need(kvrelay_relay_service_open(&offered, &service) == KVRELAY_TRANSPORT_OK &&
           kvrelay_tcp_server_open(&listening, kvrelay_relay_service_base(service), &server) ==
               KVRELAY_TRANSPORT_OK,
       "server");
  kvrelay_tcp_server_address(server, address, sizeof address);

  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.subscriber_id = text("raw-only");
  cfg.subscribe_all = true;
  const size_t len = kvrelay_consumer_mem_size(&cfg);
  need(kvrelay_consumer_init(&consumer, &cfg, memory(len), len, 0) == KVRELAY_OK, "consumer");
  const kvrelay_client_config asking = kvrelay_client_config_default(&consumer);
  kvrelay_tcp_client_config dialling = kvrelay_tcp_client_config_default();
  dialling.target = address;
  need(kvrelay_client_open(&asking, &client) == KVRELAY_TRANSPORT_OK &&
           kvrelay_tcp_client_open(&dialling, kvrelay_client_caller(client), &wire) ==
               KVRELAY_TRANSPORT_OK,
       "client");
  kvrelay_client_attach(client, wire);

  const uint64_t until = kvrelay_now_ns() + PATIENCE_NS;
  while (!live() && kvrelay_now_ns() < until) {
    need(kvrelay_client_run(client, kvrelay_now_ns()) == KVRELAY_TRANSPORT_OK, "another contract");
    (void)wire->base.run_once(&wire->base, 1000000);
    (void)server->run_once(server, 0);
    kvrelay_relay_service_poll(service, kvrelay_now_ns());
  }
  const kvrelay_query question = {.model = text("llama"), .tokens = prompt, .tokens_len = 50 * 16};
  kvrelay_answer answer;
  static uint64_t scratch[MAX_BLOCKS];
  const bool right = kvrelay_consumer_query(&consumer, &question, &answer, 1, scratch, MAX_BLOCKS,
                                            kvrelay_now_ns()) == 1 &&
                     answer.state == KVRELAY_ANSWER_KNOWN && answer.depth_blocks == 40;
  printf("%s - relay and consumer over raw frames alone\n", right ? "ok" : "not ok");
  wire->base.close(&wire->base);
  kvrelay_client_close(client);
  server->close(server);
  kvrelay_relay_service_close(service);
  return right ? 0 : 1;
}
