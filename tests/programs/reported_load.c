/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pools of a kvrelayd configuration (the one argument) without its engines, but with what
 * workers report of their use: lines "NAMESPACE/COMPONENT/ENDPOINT WORKER RANK USED" on standard
 * input, or "NAMESPACE/COMPONENT/ENDPOINT WORKER lost".  Prints "listening ADDRESS", then "ok" or
 * "error N" for each line; ends at end of file.
 */
#include <event2/event.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvrelayd/serve.h"
#include "transports/grpc/grpc_server.h"
#include "transports/service.h"

#define TURN_NS 100000000u /* the relay's own deadlines may wait so long */

static serve served;
static scope whole; /* all namespaces of the file */
static bool ended;

static kvrelay_pool *pool_named(const char *name) {
  for (unsigned i = 0; i < served.pools_count; i++)
    if (strcmp(served.pools[i].name, name) == 0)
      return served.pools[i].pool;
  return NULL;
}

static int report(const char *line) {
  char name[512];
  uint64_t worker, used;
  uint32_t rank;
  int at = 0;
  if (sscanf(line, "%511s %" SCNu64 " %n", name, &worker, &at) != 2 || at == 0 ||
      pool_named(name) == NULL)
    return KVRELAY_ERR_NOT_FOUND;
  if (strcmp(line + at, "lost\n") == 0)
    return kvrelay_pool_reports_lost(pool_named(name), worker);
  if (sscanf(line + at, "%" SCNu32 " %" SCNu64, &rank, &used) != 2)
    return KVRELAY_ERR_ARG;
  return kvrelay_pool_report(pool_named(name), worker, rank, used);
}

/* One line at a time: the script waits for the answer to each. */
static void on_line(evutil_socket_t fd, short what, void *argument) {
  char line[700];
  (void)what;
  (void)argument;
  ssize_t len = read(fd, line, sizeof line - 1);
  if (len <= 0) {
    ended = true;
    return;
  }
  line[len] = 0;
  int err = report(line);
  if (err == KVRELAY_OK)
    puts("ok");
  else
    printf("error %d\n", err);
  fflush(stdout);
}

static void run(kvrelay_relay_service *service, kvrelay_transport *server) {
  while (!ended) {
    uint64_t now = kvrelay_now_ns();
    kvrelay_relay_service_poll(service, now);
    serve_poll(&served, now);
    if (server->run_once(server, TURN_NS) < 0)
      return;
  }
}

static int serve_plan(const plan *p) {
  kvrelay_relay_service *service;
  kvrelay_transport *server;
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  char address[128];
  if (scope_open(&whole, NULL, NULL, kvrelay_now_ns()) != 0 || serve_reserve(&served, p) != 0 ||
      serve_open(&served, &whole) != 0)
    return 71;
  kvrelay_relay_service_config over = kvrelay_relay_service_config_default(&served.relay);
  if (kvrelay_relay_service_open(&over, &service) != KVRELAY_TRANSPORT_OK)
    return 71;
  cfg.base = event_base_new();
  cfg.bind = "127.0.0.1:0";
  if (cfg.base == NULL || kvrelay_grpc_server_open(&cfg, kvrelay_relay_service_base(service),
                                                   &server) != KVRELAY_TRANSPORT_OK)
    return 69;
  struct event *input = event_new(cfg.base, STDIN_FILENO, EV_READ | EV_PERSIST, on_line, NULL);
  if (input == NULL || event_add(input, NULL) != 0)
    return 71;
  kvrelay_grpc_server_address(server, address, sizeof address);
  printf("listening %s\n", address);
  fflush(stdout);
  run(service, server);
  event_free(input);
  server->close(server);
  kvrelay_relay_service_close(service);
  event_base_free(cfg.base);
  serve_close(&served);
  scope_close(&whole);
  return 0;
}

int main(int argc, char **argv) {
  int code = 64;
  config *c = argc == 2 ? config_load(argv[1], stderr, &code) : NULL;
  if (c == NULL)
    return code;
  plan *p = plan_make(c, stderr);
  code = p == NULL ? 71 : serve_plan(p);
  plan_free(p);
  config_free(c);
  return code;
}
