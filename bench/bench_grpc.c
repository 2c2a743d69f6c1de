/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does one connection carry over loopback? Server and client are two processes, so that the
 * wall clock measures.
 */

#include "bench.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transports/grpc/grpc_client.h"
#include "transports/grpc/grpc_server.h"

#define SMALL_BYTES 64
#define LARGE_BYTES ((size_t)4 << 20)
#define OUTSTANDING 100

/* ---- server: "/S" and "/L" send as many small or large messages as the request's number says,
 * "/E" echoes ---- */

typedef struct bench_call {
  char method;
  bool half_closed;
  unsigned long left;
  uint8_t echo[16];
  size_t echo_len;
} bench_call;

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
  c->method = path_len == 2 ? (char)path[1] : '?';
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
  c->left = c->method == 'E' ? 1 : strtoul((const char *)c->echo, NULL, 10);
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
  parts->part[0].base = c->method == 'E' ? c->echo : payload;
  parts->part[0].len = c->method == 'E'   ? c->echo_len
                       : c->method == 'L' ? LARGE_BYTES
                                          : SMALL_BYTES;
  parts->part_len = 1;
  parts->bytes = parts->part[0].len;
  return KVRELAY_PULL_MESSAGE;
}

static void b_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  free(handle);
}

static _Noreturn void serve(int report) {
  kvrelay_service service = {b_open, b_message, b_half_close, b_admitted, b_pull, b_close};
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  kvrelay_transport *server;
  cfg.bind = "127.0.0.1:0";
  if (kvrelay_grpc_server_open(&cfg, &service, &server) != KVRELAY_TRANSPORT_OK)
    _exit(1);
  uint16_t port = kvrelay_grpc_server_port(server);
  if (write(report, &port, sizeof port) != (ssize_t)sizeof port)
    _exit(1);
  while (server->run_once(server, KVRELAY_TIME_NONE) >= 0)
    continue;
  _exit(0);
}

/* ---- client ---- */

typedef struct bench_client {
  kvrelay_caller base; /* first */
  kvrelay_client_transport *transport;
  bool ready;
  unsigned long messages, bytes, ended, failed;
  unsigned long calls_left; /* unary calls still to start */
  uint32_t next_number;
} bench_client;

static void unary(bench_client *c) {
  if (c->calls_left == 0)
    return;
  c->calls_left--;
  c->failed += c->transport->call(c->transport, ++c->next_number, "/E", (const uint8_t *)"abcdef",
                                  6) != KVRELAY_TRANSPORT_OK;
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
static double run(bench_client *c, char method, unsigned long count) {
  kvrelay_transport *t = &c->transport->base;
  char path[3] = {'/', method, 0}, number[16];
  int len = snprintf(number, sizeof number, "%lu", count);
  c->messages = c->bytes = c->ended = 0;
  unsigned long ends = method == 'E' ? count : 1;
  const double start = bench_wall_ns();
  if (method == 'E') {
    c->calls_left = count;
    for (int i = 0; i < OUTSTANDING; i++)
      unary(c);
  } else {
    bench_need(c->transport->call(c->transport, ++c->next_number, path, (const uint8_t *)number,
                                  (size_t)len) == KVRELAY_TRANSPORT_OK);
  }
  while (c->ended < ends && c->failed == 0)
    t->run_once(t, 1000000000);
  const double spent = bench_wall_ns() - start;
  bench_need(c->failed == 0 && c->messages == count);
  return spent;
}

/* `amount` is what one message counts for, in the unit times nanoseconds. */
static void print(bench_client *c, char method, unsigned long count, double amount,
                  const char *unit, const char *name) {
  bench_sample rate = {0};
  for (int i = 0; i < BENCH_RUNS; i++)
    bench_add(&rate, (double)count * amount / run(c, method, count));
  bench_print(&rate, unit, "%s", name);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  int report[2];
  uint16_t port = 0;
  char target[32];
  bench_need(pipe(report) == 0);
  pid_t child = fork();
  if (child == 0)
    serve(report[1]);
  bench_need(child > 0 && read(report[0], &port, sizeof port) == (ssize_t)sizeof port);
  snprintf(target, sizeof target, "127.0.0.1:%u", port);
  bench_client c = {.base = {on_connection, on_admitted, on_message, on_end}};
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = target;
  bench_need(kvrelay_grpc_client_open(&cfg, &c.base, &c.transport) == KVRELAY_TRANSPORT_OK);
  while (!c.ready && c.failed == 0)
    c.transport->base.run_once(&c.transport->base, 1000000000);
  print(&c, 'S', 1000000, 1e9, "messages/s", "grpc_stream_64B");
  print(&c, 'L', 500, (double)LARGE_BYTES, "GB/s", "grpc_stream_4MiB");
  print(&c, 'E', 50000, 1e9, "calls/s", "grpc_unary_100_open");
  c.transport->base.close(&c.transport->base);
  kill(child, SIGTERM);
  waitpid(child, NULL, 0);
  return 0;
}
