/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our client transport reads a server of this folder, whosever it is:
 *
 *   grpc_client ADDRESS delta|chunk|encoded COUNT NAME   COUNT messages a run, one line named NAME
 *
 * INTEROP_TLS as interop_tls.h has it.
 */
#include "transports/grpc/grpc_client.h"
#include "../bench.h"
#include "streams.h"
#include "tests/programs/interop_tls.h"

typedef struct reader {
  kvrelay_caller base; /* first */
  bool ready;
  unsigned long messages, bytes;
  unsigned ended, failed;
} reader;

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  reader *r = (reader *)self;
  (void)err;
  (void)text;
  (void)retry_ns;
  (void)now_ns;
  r->ready = state == KVRELAY_CONNECTION_READY;
  r->failed += state == KVRELAY_CONNECTION_FAILED;
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)call;
  (void)now_ns;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  reader *r = (reader *)self;
  (void)call;
  (void)bytes;
  (void)now_ns;
  r->messages++;
  r->bytes += len;
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  reader *r = (reader *)self;
  (void)call;
  (void)now_ns;
  r->ended++;
  r->failed += status->grpc != KVRELAY_GRPC_OK;
}

int main(int argc, char **argv) {
  static const char usage[] = "ADDRESS delta|chunk|encoded COUNT NAME";
  reader r = {.base = {on_connection, on_admitted, on_message, on_end}};
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  kvrelay_client_transport *client;
  bench_sample rate = {0};
  uint8_t request[64] = {0x0a}; /* field 1 */
  bench_arguments(argc, argv, 4, usage);
  if (argc != 5)
    bench_usage(false, usage);
  const bool large = strcmp(argv[2], STREAMS_DELTA) != 0;
  const size_t count = bench_number(argv[3], SIZE_MAX, usage);
  const int len = snprintf((char *)request + 2, sizeof request - 2, "%s %zu", argv[2], count);
  bench_need(len > 0 && len < 62);
  request[1] = (uint8_t)len;
  cfg.target = argv[1];
  cfg.security = interop_security(false);
  bench_need(kvrelay_grpc_client_open(&cfg, &r.base, &client) == KVRELAY_TRANSPORT_OK);
  kvrelay_transport *const t = &client->base;
  while (!r.ready && r.failed == 0)
    t->run_once(t, 1000000000);
  for (uint32_t run = 1; run <= BENCH_RUNS; run++) {
    r.messages = r.bytes = r.ended = 0;
    const double start = bench_wall_ns();
    bench_need(client->call(client, run, STREAMS_PATH, request, (size_t)len + 2) ==
               KVRELAY_TRANSPORT_OK);
    while (r.ended == 0 && r.failed == 0)
      t->run_once(t, 1000000000);
    const double spent = bench_wall_ns() - start;
    bench_need(r.failed == 0 && r.messages == count);
    bench_add(&rate, large ? (double)r.bytes / spent : (double)count * 1e9 / spent);
  }
  bench_print(&rate, large ? "GB/s" : "messages/s", "%s", argv[4]);
  t->close(t);
  return 0;
}
