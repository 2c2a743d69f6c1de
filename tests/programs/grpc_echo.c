/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The toy service behind the gRPC server, with health and reflection, for foreign clients.  Prints
 * "listening ADDRESS", takes commands on standard input: "release" (Silent calls go on), "counts"
 * (prints what the service saw), "encodings" (what requests may be compressed with), "stop" (in
 * order); ends at end of file.
 */
#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../support/toy_service.h"
#include "transports/grpc/grpc_health.h"
#include "transports/grpc/grpc_reflection.h"
#include "transports/grpc/grpc_server.h"
#include "transports/mux.h"

static toy_service toy;
static kvrelay_mux all;
static kvrelay_grpc_health *health;
static kvrelay_grpc_reflection *reflection;
static kvrelay_transport *server;

static void on_log(void *context, int level, const char *event, const char *text) {
  (void)context;
  if (level >= KVRELAY_LOG_WARN)
    fprintf(stderr, "%s %s\n", event, text);
}

static void on_command(evutil_socket_t fd, short what, void *argument) {
  char line[64];
  (void)fd;
  (void)what;
  (void)argument;
  ssize_t n = read(0, line, sizeof line - 1);
  line[n > 0 ? n : 0] = '\0';
  if (n == 0)
    exit(0);
  if (strncmp(line, "release", 7) == 0)
    toy_service_release(&toy);
  if (strncmp(line, "counts", 6) == 0)
    printf("counts %d %d %d %d\n", toy.opened, toy.closed, toy.open_now, toy.broken);
  if (strncmp(line, "encodings", 9) == 0)
    printf("encodings %s\n", kvrelay_grpc_encodings());
  if (strncmp(line, "stop", 4) == 0) {
    server->stop(server, 2000000000u);
    toy_service_shutdown(&toy);
    kvrelay_grpc_health_shutdown(health);
    kvrelay_grpc_reflection_shutdown(reflection);
  }
  fflush(stdout);
}

static bool open_services(void) {
  static const char *const names[] = {"kvrelay.test.Toy", KVRELAY_GRPC_HEALTH_NAME,
                                      KVRELAY_GRPC_REFLECTION_NAME};
  toy_service_init(&toy);
  kvrelay_mux_init(&all, &toy.base);
  if (kvrelay_grpc_health_open(&health) != KVRELAY_TRANSPORT_OK ||
      kvrelay_grpc_reflection_open(names, 3, &reflection) != KVRELAY_TRANSPORT_OK)
    return false;
  (void)kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_SERVING);
  (void)kvrelay_mux_add(&all, KVRELAY_GRPC_HEALTH_NAME, kvrelay_grpc_health_base(health));
  (void)kvrelay_mux_add(&all, KVRELAY_GRPC_REFLECTION_NAME,
                        kvrelay_grpc_reflection_base(reflection));
  return true;
}

int main(int argc, char **argv) {
  char address[128];
  if (!open_services())
    return 71;
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = argc > 1 ? argv[1] : "127.0.0.1:0";
  cfg.base = event_base_new();
  cfg.log = on_log;
  if (argc > 2)
    cfg.keepalive_interval_ns = strtoull(argv[2], NULL, 10) * 1000000u;
  int err = kvrelay_grpc_server_open(&cfg, &all.base, &server);
  if (err != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "cannot listen: %d\n", err);
    return 69;
  }
  struct event *command = event_new(cfg.base, 0, EV_READ | EV_PERSIST, on_command, NULL);
  event_add(command, NULL);
  kvrelay_grpc_server_address(server, address, sizeof address);
  printf("listening %s\n", address);
  fflush(stdout);
  while (server->run_once(server, KVRELAY_TIME_NONE) >= 0)
    continue;
  server->close(server);
  event_free(command);
  event_base_free(cfg.base);
  printf("stopped %d\n", toy.broken);
  toy_service_free(&toy);
  kvrelay_grpc_health_close(health);
  kvrelay_grpc_reflection_close(reflection);
  return toy.broken != 0 || toy.open_now != 0;
}
