/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does one connection carry over loopback, by gRPC and by the raw transport? Server and client
 * are two processes, so that the wall clock measures; the transports take turns, and a ratio is of
 * one run each.
 */

#include "bench.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transports/grpc/grpc_client.h"
#include "transports/grpc/grpc_server.h"
#include "transports/tcp/tcp_client.h"
#include "transports/tcp/tcp_server.h"

#define SMALL_BYTES 64
#define DELTA_BYTES 376 /* about a FilterUpdate with a delta of 16 images */
#define LARGE_BYTES ((size_t)4 << 20)
#define OUTSTANDING 100

/* ---- server: the contract's second to fourth method send as many messages of one size as the
 * request's number says, the first one echoes ---- */

typedef struct bench_call {
  int32_t method;
  bool half_closed;
  unsigned long left;
  uint8_t echo[16];
  size_t echo_len;
} bench_call;

enum { ECHO = 1, SMALL, DELTA, LARGE };
static const size_t message_bytes[] = {0, 0, SMALL_BYTES, DELTA_BYTES, LARGE_BYTES};

static uint8_t payload[LARGE_BYTES];

static int b_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                  uint64_t now_ns, void **handle, kvrelay_status *status) {
  bench_call *c = calloc(1, sizeof *c);
  (void)self;
  (void)call;
  (void)now_ns;
  (void)status;
  if (c == NULL)
    abort();
  c->method = kvrelay_method_from_path(path, path_len);
  *handle = c;
  return KVRELAY_OK;
}

static int b_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                     uint64_t now_ns, kvrelay_status *status) {
  bench_call *c = handle;
  (void)self;
  (void)now_ns;
  (void)status;
  c->echo_len = len < sizeof c->echo ? len : sizeof c->echo - 1;
  memcpy(c->echo, bytes, c->echo_len);
  return KVRELAY_OK;
}

static int b_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                        kvrelay_status *status) {
  bench_call *c = handle;
  (void)self;
  (void)now_ns;
  (void)status;
  c->half_closed = true;
  c->left = c->method == ECHO ? 1 : strtoul((const char *)c->echo, NULL, 10);
  return KVRELAY_OK;
}

static bool b_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  return ((bench_call *)handle)->half_closed;
}

static int b_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                  kvrelay_status *status) {
  bench_call *c = handle;
  (void)self;
  (void)now_ns;
  if (!c->half_closed)
    return KVRELAY_PULL_NONE;
  if (c->left == 0) {
    memset(status, 0, sizeof *status);
    return KVRELAY_PULL_END;
  }
  c->left--;
  parts->part[0].base = c->method == ECHO ? c->echo : payload;
  parts->part[0].len = c->method == ECHO ? c->echo_len : message_bytes[c->method];
  parts->part_len = 1;
  parts->bytes = parts->part[0].len;
  return KVRELAY_PULL_MESSAGE;
}

static void b_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  free(handle);
}

static kvrelay_service service = {b_open, b_message, b_half_close, b_admitted, b_pull, b_close};

static kvrelay_transport *grpc_serve(char *address, size_t cap) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  kvrelay_transport *server;
  cfg.bind = "127.0.0.1:0";
  bench_need(kvrelay_grpc_server_open(&cfg, &service, &server) == KVRELAY_TRANSPORT_OK);
  kvrelay_grpc_server_address(server, address, cap);
  return server;
}

static kvrelay_transport *raw_serve(char *address, size_t cap) {
  kvrelay_tcp_server_config cfg = kvrelay_tcp_server_config_default();
  kvrelay_transport *server;
  cfg.bind = "127.0.0.1:0";
  bench_need(kvrelay_tcp_server_open(&cfg, &service, &server) == KVRELAY_TRANSPORT_OK);
  kvrelay_tcp_server_address(server, address, cap);
  return server;
}

/* ---- client ---- */

typedef struct bench_client {
  kvrelay_caller base; /* first */
  kvrelay_client_transport *transport;
  pid_t server;
  bool ready;
  unsigned long messages, bytes, ended, failed;
  unsigned long calls_left; /* unary calls still to start */
  uint32_t next_number;
} bench_client;

static void unary(bench_client *c) {
  if (c->calls_left == 0)
    return;
  c->calls_left--;
  c->failed += c->transport->call(c->transport, ++c->next_number, kvrelay_method_path(ECHO),
                                  (const uint8_t *)"abcdef", 6) != KVRELAY_TRANSPORT_OK;
}

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  bench_client *c = (bench_client *)self;
  (void)err;
  (void)text;
  (void)retry_ns;
  (void)now_ns;
  c->ready = state == KVRELAY_CONNECTION_READY;
  c->failed += state == KVRELAY_CONNECTION_FAILED;
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)call;
  (void)now_ns;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  bench_client *c = (bench_client *)self;
  (void)call;
  (void)bytes;
  (void)now_ns;
  c->messages++;
  c->bytes += len;
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  bench_client *c = (bench_client *)self;
  (void)call;
  (void)now_ns;
  c->ended++;
  c->failed += status->grpc != KVRELAY_GRPC_OK;
  unary(c);
}

/* Nanoseconds from the call to its end, or to the end of `count` unary ones. */
static double run(bench_client *c, int32_t method, unsigned long count) {
  kvrelay_transport *t = &c->transport->base;
  char number[24];
  const int len = snprintf(number, sizeof number, "%lu", count);
  c->messages = c->bytes = c->ended = 0;
  const unsigned long ends = method == ECHO ? count : 1;
  const double start = bench_wall_ns();
  if (method == ECHO) {
    c->calls_left = count;
    for (int i = 0; i < OUTSTANDING; i++)
      unary(c);
  } else {
    bench_need(c->transport->call(c->transport, ++c->next_number, kvrelay_method_path(method),
                                  (const uint8_t *)number, (size_t)len) == KVRELAY_TRANSPORT_OK);
  }
  while (c->ended < ends && c->failed == 0)
    t->run_once(t, 1000000000);
  const double spent = bench_wall_ns() - start;
  bench_need(c->failed == 0 && c->messages == count);
  return spent;
}

static void grpc_connect(bench_client *c, const char *target) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  bench_need(kvrelay_grpc_client_open(&cfg, &c->base, &c->transport) == KVRELAY_TRANSPORT_OK);
}

static void raw_connect(bench_client *c, const char *target) {
  kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
  cfg.target = target;
  bench_need(kvrelay_tcp_client_open(&cfg, &c->base, &c->transport) == KVRELAY_TRANSPORT_OK);
}

/* A server in a process of its own, and a client connected to it. */
static void start(bench_client *c, kvrelay_transport *(*serve)(char *address, size_t cap),
                  void (*connect)(bench_client *c, const char *target)) {
  int report[2];
  char address[KVRELAY_ADDRESS_CAP];
  bench_need(pipe(report) == 0);
  c->server = fork();
  if (c->server == 0) {
    kvrelay_transport *server = serve(address, sizeof address);
    bench_need(write(report[1], address, sizeof address) == (ssize_t)sizeof address);
    while (server->run_once(server, KVRELAY_TIME_NONE) >= 0)
      continue;
    _exit(1);
  }
  bench_need(c->server > 0 && read(report[0], address, sizeof address) == (ssize_t)sizeof address);
  c->base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  connect(c, address);
  while (!c->ready && c->failed == 0)
    c->transport->base.run_once(&c->transport->base, 1000000000);
}

static void stop(bench_client *c) {
  c->transport->base.close(&c->transport->base);
  kill(c->server, SIGTERM);
  waitpid(c->server, NULL, 0);
}

/* `amount` is what one message counts for, in the unit times nanoseconds. */
static void print(bench_client *grpc, bench_client *raw, int32_t method, unsigned long count,
                  double amount, const char *unit, const char *name) {
  bench_sample rate[2] = {0}, ratio = {0};
  for (int i = 0; i < BENCH_RUNS; i++) {
    const double by_grpc = run(grpc, method, count), by_raw = run(raw, method, count);
    bench_add(&rate[0], (double)count * amount / by_grpc);
    bench_add(&rate[1], (double)count * amount / by_raw);
    bench_add(&ratio, by_grpc / by_raw);
  }
  bench_print(&rate[0], unit, "grpc_%s", name);
  bench_print(&rate[1], unit, "raw_%s", name);
  bench_print(&ratio, "x", "raw_to_grpc_%s", name);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  setvbuf(stdout, NULL, _IOLBF, 0);
  bench_client grpc = {0}, raw = {0};
  start(&grpc, grpc_serve, grpc_connect);
  start(&raw, raw_serve, raw_connect);
  print(&grpc, &raw, SMALL, 2000000, 1e9, "messages/s", "stream_64B");
  print(&grpc, &raw, DELTA, 1000000, 1e9, "messages/s", "stream_delta");
  print(&grpc, &raw, LARGE, 500, (double)LARGE_BYTES, "GB/s", "stream_4MiB");
  print(&grpc, &raw, ECHO, 50000, 1e9, "calls/s", "unary_100_open");
  stop(&grpc);
  stop(&raw);
  return 0;
}
