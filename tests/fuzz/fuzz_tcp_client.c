/* SPDX-License-Identifier: Apache-2.0 */

/*
 * tcp_client.h: any bytes of a server, in pieces of any size.  What the client sends is well
 * formed, every call is told in order and ends once, unless it was cancelled, and a client that was
 * lied to connects again.
 *
 * SECURITY.md: 1, 2, 3, 10.
 *
 * Input: whether a preface is in front, then pieces behind their length; lengths from 250 on are
 * events: a call, a cancel, the server sends no more.
 */

#include <stdio.h>

#include "address.h"
#include "fuzz.h"
#include "tcp/tcp_client.h"
#include "tcp_peer.h"

enum { CALLS = 256, CALL = 250, TAKE_BACK, NO_MORE };

static struct world {
  kvrelay_caller base; /* first */
  kvrelay_client_transport *client;
  struct {
    bool open, admitted;
  } call[CALLS];
  unsigned calls, open;
  bool ready, lost;
} world;

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  (void)self;
  (void)retry_ns;
  (void)now_ns;
  FUZZ_CHECK(text != NULL && (state != KVRELAY_CONNECTION_FAILED || (err < 0 && text[0] != 0)));
  FUZZ_CHECK(state != KVRELAY_CONNECTION_FAILED || world.open == 0);
  world.ready = state == KVRELAY_CONNECTION_READY;
  world.lost |= state == KVRELAY_CONNECTION_FAILED;
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  FUZZ_CHECK(call < CALLS && world.call[call].open && !world.call[call].admitted);
  world.call[call].admitted = true;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  volatile uint8_t sum = 0;
  (void)self;
  (void)now_ns;
  FUZZ_CHECK(call < CALLS && world.call[call].open && world.call[call].admitted);
  for (size_t i = 0; i < len; i++)
    sum = (uint8_t)(sum + bytes[i]);
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  FUZZ_CHECK(call < CALLS && world.call[call].open);
  FUZZ_CHECK(status->grpc >= 0 && status->grpc <= 16);
  FUZZ_CHECK(memchr(status->text, 0, sizeof status->text) != NULL);
  world.call[call].open = false;
  world.open--;
}

static void start_call(void) {
  const uint32_t number = world.calls + 1;
  if (number == CALLS)
    return;
  world.calls++;
  if (world.client->call(world.client, number, kvrelay_method_path(1 + (int32_t)number % 5),
                         (const uint8_t *)"?", 1) != KVRELAY_TRANSPORT_OK)
    return;
  FUZZ_CHECK(world.ready);
  world.call[number].open = true;
  world.open++;
}

static void take_back(void) {
  for (uint32_t i = 1; i < CALLS; i++)
    if (world.call[i].open) {
      world.client->cancel(world.client, i);
      world.call[i].open = false;
      world.open--;
      return;
    }
}

/* A server's socket on a name that only this process has. */
static int listener(char *target, size_t cap) {
  static int fd = -1;
  snprintf(target, cap, "unix-abstract:kvrelay-fuzz-%d", (int)getpid());
  if (fd < 0) {
    kvrelay_address address;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (kvrelay_address_unix(target, &address) != 1 ||
        bind(fd, (struct sockaddr *)&address.storage, address.len) != 0 || listen(fd, 16) != 0)
      abort();
  }
  return fd;
}

static void connect_peer(tcp_peer *server, int from) {
  int fd = -1;
  while (fd < 0) {
    (void)world.client->base.run_once(&world.client->base, 1000000);
    fd = accept(from, NULL, NULL);
  }
  peer_open(server, fd, true);
  while (server->preface_len < sizeof server->preface) {
    (void)world.client->base.run_once(&world.client->base, 1000000);
    peer_read(server);
  }
}

/* Until nothing moves any more, or the connection is lost: the next one is of no interest. */
static void run(tcp_peer *server) {
  for (int i = 0; i < 1000 && !world.lost; i++) {
    const int turned = world.client->base.run_once(&world.client->base, 0);
    peer_read(server);
    if (turned != 1)
      break;
  }
}

static void event(const tcp_peer *server, uint8_t what) {
  if (what == CALL)
    start_call();
  else if (what == TAKE_BACK)
    take_back();
  else
    (void)shutdown(server->fd, SHUT_WR);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static const uint8_t hello[] = {'K', 'V', 'R', 'F', 1, 1, 8, 0, 0, 4, 0, 0, 0, 0, 0, 0};
  fuzz_input in = {data, len};
  kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
  tcp_peer server;
  char target[96];
  const int from = listener(target, sizeof target);
  memset(&world, 0, sizeof world);
  world.base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  cfg.target = target;
  cfg.max_message_bytes = 65536;
  cfg.stream_window_bytes = 1024;
  FUZZ_CHECK(kvrelay_tcp_client_open(&cfg, &world.base, &world.client) == KVRELAY_TRANSPORT_OK);
  connect_peer(&server, from);
  if (fuzz_bit(&in))
    peer_send(&server, hello, sizeof hello);
  run(&server);
  while (in.left > 0 && !world.lost) {
    size_t n = fuzz_byte(&in);
    if (n >= CALL) {
      event(&server, (uint8_t)n);
    } else {
      uint8_t *bytes = fuzz_take(&in, n, &n);
      peer_send(&server, bytes, n);
      free(bytes);
    }
    run(&server);
  }
  close(server.fd);
  while (!world.lost)
    (void)world.client->base.run_once(&world.client->base, 1000000);
  FUZZ_CHECK(world.open == 0);
  world.client->base.close(&world.client->base);
  return 0;
}
