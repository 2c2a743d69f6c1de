/* SPDX-License-Identifier: Apache-2.0 */

/*
 * tcp_server.h: any bytes of a client, in pieces of any size.  What comes back is well formed and
 * in order, every call that was opened is closed once, and nothing of it is left.
 *
 * SECURITY.md: 1, 2, 3, 10.
 *
 * Input: limits, whether a preface is in front, then pieces behind their length; lengths from 250
 * on are events: calls go on, the server stops, the client sends no more.
 */

#include "fuzz.h"
#include "tcp/tcp_server.h"
#include "tcp_peer.h"

enum { CALLS = 64, GO_ON = 250, STOP, NO_MORE };

typedef struct fuzz_call {
  kvrelay_call *call; /* NULL: not open */
  uint8_t messages, size, status;
  bool requested, half_closed, waits, ended;
} fuzz_call;

static struct world {
  kvrelay_service base; /* first */
  fuzz_call calls[CALLS];
  unsigned open;
} world;

static fuzz_call *open_one(void *handle) {
  fuzz_call *c = handle;
  FUZZ_CHECK(c->call != NULL && !c->ended);
  return c;
}

static int on_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t len,
                   uint64_t now_ns, void **handle, kvrelay_status *status) {
  (void)self;
  (void)now_ns;
  const int32_t method = kvrelay_method_from_path(path, len);
  fuzz_call *c = world.calls;
  while (c < world.calls + CALLS && c->call != NULL)
    c++;
  if (method == KVRELAY_METHOD_NONE || c == world.calls + CALLS)
    return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "no such method");
  *c = (fuzz_call){.call = call, .waits = method == KVRELAY_METHOD_SUBSCRIBE_LOAD};
  world.open++;
  *handle = c;
  return KVRELAY_OK;
}

static int on_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                      uint64_t now_ns, kvrelay_status *status) {
  fuzz_call *c = open_one(handle);
  (void)self;
  (void)now_ns;
  FUZZ_CHECK(!c->requested);
  c->requested = true;
  if (len < 3)
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "too short");
  c->messages = bytes[0] % 16;
  c->size = bytes[1];
  c->status = bytes[2] % 17;
  return KVRELAY_OK;
}

static int on_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                         kvrelay_status *status) {
  fuzz_call *c = open_one(handle);
  (void)self;
  (void)now_ns;
  (void)status;
  FUZZ_CHECK(c->requested && !c->half_closed);
  c->half_closed = true;
  return KVRELAY_OK;
}

static bool on_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  return open_one(handle)->half_closed;
}

/* Sizes go up to more than a client has to take. */
static int on_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                   kvrelay_status *status) {
  static const uint8_t bytes[255 * 260];
  fuzz_call *c = open_one(handle);
  (void)self;
  (void)now_ns;
  FUZZ_CHECK(c->half_closed);
  if (c->waits)
    return KVRELAY_PULL_NONE;
  if (c->messages-- > 0) {
    *parts = (kvrelay_parts){.part = {{bytes, c->size}, {bytes, c->size * (size_t)259}},
                             .part_len = 2,
                             .bytes = c->size * (size_t)260};
    return KVRELAY_PULL_MESSAGE;
  }
  c->ended = true;
  (void)kvrelay_refuse(status, c->status, "over");
  return KVRELAY_PULL_END;
}

static void on_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  fuzz_call *c = handle;
  (void)self;
  (void)now_ns;
  FUZZ_CHECK(c->call != NULL);
  c->call = NULL;
  world.open--;
}

static void go_on(void) {
  for (fuzz_call *c = world.calls; c < world.calls + CALLS; c++)
    if (c->call != NULL && c->waits) {
      c->waits = false;
      c->call->wake(c->call);
    }
}

/* Until nothing moves any more. */
static void run(kvrelay_transport *server, tcp_peer *client) {
  for (int i = 0; i < 1000 && server->run_once(server, 0) == 1; i++)
    peer_read(client);
  peer_read(client);
}

static void event(kvrelay_transport *server, const tcp_peer *client, uint8_t what) {
  if (what == GO_ON)
    go_on();
  else if (what == STOP)
    server->stop(server, 1000000);
  else
    (void)shutdown(client->fd, SHUT_WR);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static const uint8_t hello[] = {'K', 'V', 'R', 'F', 1, 1, 0, 0, 0, 0, 1, 0, 0, 4, 0, 0};
  fuzz_input in = {data, len};
  kvrelay_tcp_server_config cfg = kvrelay_tcp_server_config_default();
  kvrelay_transport *server;
  kvrelay_address from = {.storage = {.ss_family = AF_UNIX}};
  tcp_peer client;
  int ends[2];
  cfg.max_request_bytes = 1024u << fuzz_below(&in, 4);
  cfg.max_streams = (uint16_t)(1 + fuzz_below(&in, 8));
  memset(&world, 0, sizeof world);
  world.base =
      (kvrelay_service){on_open, on_message, on_half_close, on_admitted, on_pull, on_close};
  FUZZ_CHECK(kvrelay_tcp_server_open(&cfg, &world.base, &server) == KVRELAY_TRANSPORT_OK);
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0)
    abort();
  peer_open(&client, ends[0], false);
  kvrelay_tcp_server_adopt(server, ends[1], &from, NULL);
  if (fuzz_bit(&in))
    peer_send(&client, hello, sizeof hello);
  while (in.left > 0) {
    size_t n = fuzz_byte(&in);
    if (n >= GO_ON) {
      event(server, &client, (uint8_t)n);
    } else {
      uint8_t *bytes = fuzz_take(&in, n, &n);
      peer_send(&client, bytes, n);
      free(bytes);
    }
    run(server, &client);
    FUZZ_CHECK(world.open <= cfg.max_streams);
  }
  close(client.fd);
  while (kvrelay_tcp_server_connections(server) > 0 && server->run_once(server, 1000000) >= 0)
    continue;
  FUZZ_CHECK(world.open == 0);
  server->close(server);
  return 0;
}
