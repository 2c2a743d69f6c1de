/* SPDX-License-Identifier: Apache-2.0 */
/* Every i-th allocation, read, write, accept and connect of server and client fails, once and for a
 * while: whoever lost something says so, gives all back, and serves again. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <string.h>

#include "support/faults.h"
#include "support/toy_service.h"
#include "transports/grpc/grpc_client.h"
#include "transports/grpc/grpc_server.h"

#define MS UINT64_C(1000000)
#define TOY "/kvrelay.test.Toy/"
/* Longer than any pause of a transport after a fault: then nothing goes on by itself any more. */
#define PATIENCE_NS (5000 * MS)

/* ---- what is exchanged ---- */

/* Calls of every shape; each is made again until it has ended as it should. */
static const struct exchange {
  const char *path, *request;
  unsigned messages;
  size_t bytes;
  int32_t grpc;
} exchanges[] = {
    {TOY "Echo", "hello", 1, 5, KVRELAY_GRPC_OK},
    {TOY "Count", "20 500", 20, 10000, KVRELAY_GRPC_OK},
    {TOY "Count", "2 400000", 2, 800000, KVRELAY_GRPC_OK},
    {TOY "Refuse", "9 5 producer changed", 0, 0, KVRELAY_GRPC_FAILED_PRECONDITION},
    {TOY "Nothing", "", 0, 0, KVRELAY_GRPC_UNIMPLEMENTED},
};
#define EXCHANGES (sizeof exchanges / sizeof *exchanges)

typedef struct progress {
  uint32_t number; /* 0: not open */
  bool done;
  unsigned messages;
  size_t bytes;
} progress;

/* A world: one server, one client. */
static struct world {
  kvrelay_caller base; /* first */
  toy_service toy;
  kvrelay_transport *server;
  kvrelay_client_transport *client;
  bool ready;
  uint32_t last_number;
  progress progress[EXCHANGES];
} world;

static progress *progress_of(uint32_t number) {
  for (size_t i = 0; i < EXCHANGES; i++)
    if (world.progress[i].number == number)
      return &world.progress[i];
  cr_assert_fail("told of call %u, which is not open", number);
  return NULL;
}

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  world.ready = state == KVRELAY_CONNECTION_READY;
  if (state != KVRELAY_CONNECTION_FAILED)
    return;
  cr_assert(err < 0 && text[0] != '\0', "a failure has a reason");
  cr_assert_neq(retry_ns, KVRELAY_TIME_NONE);
  for (size_t i = 0; i < EXCHANGES; i++)
    cr_assert_eq(world.progress[i].number, 0, "a broken connection ends its calls first");
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  (void)progress_of(call);
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  progress *p = progress_of(call);
  (void)self;
  (void)now_ns;
  if (len > 64)
    cr_assert_eq((uint8_t)(bytes[len - 1] - bytes[0]), (uint8_t)(len - 1));
  p->messages++;
  p->bytes += len;
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  progress *p = progress_of(call);
  const struct exchange *e = &exchanges[p - world.progress];
  (void)self;
  (void)now_ns;
  p->number = 0;
  p->done = status->grpc == e->grpc;
  if (p->done && e->grpc == KVRELAY_GRPC_OK)
    cr_assert(p->messages == e->messages && p->bytes == e->bytes, "OK means that all came");
}

/* Starts what is not done and not under way; a transport may refuse for want of memory. */
static bool advance(void) {
  bool all = true;
  for (size_t i = 0; i < EXCHANGES; i++) {
    progress *p = &world.progress[i];
    all &= p->done;
    if (p->done || p->number != 0 || !world.ready)
      continue;
    p->messages = 0;
    p->bytes = 0;
    p->number = ++world.last_number;
    const char *request = exchanges[i].request;
    if (world.client->call(world.client, p->number, exchanges[i].path, (const uint8_t *)request,
                           strlen(request)) != KVRELAY_TRANSPORT_OK)
      p->number = 0;
  }
  return all;
}

/* ---- transports ---- */

typedef struct carrier {
  const char *name;
  int (*open_server)(struct event_base *base, kvrelay_service *service, kvrelay_transport **out);
  int (*open_client)(struct event_base *base, const kvrelay_transport *server,
                     kvrelay_caller *caller, kvrelay_client_transport **out);
} carrier;

static int open_grpc_server(struct event_base *base, kvrelay_service *service,
                            kvrelay_transport **out) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = "127.0.0.1:0";
  cfg.base = base;
  return kvrelay_grpc_server_open(&cfg, service, out);
}

static int open_grpc_client(struct event_base *base, const kvrelay_transport *server,
                            kvrelay_caller *caller, kvrelay_client_transport **out) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  char target[KVRELAY_STATUS_TEXT_CAP];
  kvrelay_grpc_server_address(server, target, sizeof target);
  cfg.target = target;
  cfg.base = base;
  cfg.backoff_first_ns = cfg.backoff_max_ns = MS;
  return kvrelay_grpc_client_open(&cfg, caller, out);
}

static const carrier grpc = {"grpc", open_grpc_server, open_grpc_client};

/* ---- one world with one fault ---- */

static unsigned open_descriptors(void) {
  unsigned count = 0;
  DIR *list = opendir("/proc/self/fd");
  cr_assert_not_null(list);
  while (readdir(list) != NULL)
    count++;
  closedir(list);
  return count;
}

static void exchange_all(unsigned long nth) {
  kvrelay_transport *t = &world.client->base;
  const uint64_t until = kvrelay_now_ns() + PATIENCE_NS;
  while (!advance()) {
    cr_assert_lt(kvrelay_now_ns(), until, "fault %lu: stuck", nth);
    int err = t->run_once(t, 5 * MS);
    cr_assert(err >= 0 || err == KVRELAY_TRANSPORT_ERR_MEMORY ||
              err == KVRELAY_TRANSPORT_ERR_SYSTEM);
  }
}

/* An error of opening leaves nothing behind, and the next attempt, without the fault, succeeds. */
static void open_both(const carrier *how, struct event_base *base) {
  kvrelay_service *service = faults_spare(&world.toy.base);
  int err = how->open_server(base, service, &world.server);
  if (err != KVRELAY_TRANSPORT_OK) {
    cr_assert(err == KVRELAY_TRANSPORT_ERR_MEMORY || err == KVRELAY_TRANSPORT_ERR_SYSTEM, "%d",
              err);
    cr_assert(faults_disarm());
    cr_assert_eq(how->open_server(base, service, &world.server), KVRELAY_TRANSPORT_OK);
  }
  err = how->open_client(base, world.server, &world.base, &world.client);
  if (err != KVRELAY_TRANSPORT_OK) {
    cr_assert(err == KVRELAY_TRANSPORT_ERR_MEMORY || err == KVRELAY_TRANSPORT_ERR_SYSTEM, "%d",
              err);
    cr_assert(faults_disarm());
    cr_assert_eq(how->open_client(base, world.server, &world.base, &world.client),
                 KVRELAY_TRANSPORT_OK);
  }
}

/* True when the fault struck. */
static bool survive(const carrier *how, enum fault_kind kind, unsigned long nth,
                    unsigned long count, int error) {
  const unsigned before = open_descriptors();
  struct event_base *base = event_base_new();
  memset(&world, 0, sizeof world);
  world.base = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  toy_service_init(&world.toy);
  faults_arm(kind, nth, count, error);
  open_both(how, base);
  exchange_all(nth);
  const bool struck = faults_disarm();
  world.client->base.close(&world.client->base);
  world.server->close(world.server);
  cr_assert(world.toy.open_now == 0 && world.toy.broken == 0 &&
            world.toy.opened == world.toy.closed);
  toy_service_free(&world.toy);
  event_base_free(base);
  cr_assert_eq(open_descriptors(), before, "fault %lu: descriptors left open", nth);
  return struck;
}

/* Every position until the fault comes too late to strike. */
static void survive_all(const carrier *how, enum fault_kind kind, unsigned long count, int error,
                        unsigned long at_least) {
  unsigned long nth = 1;
  faults_install();
  while (survive(how, kind, nth, count, error))
    nth++;
  cr_log_info("%s: %lu positions", how->name, nth - 1);
  cr_assert_gt(nth, at_least, "the faults do not reach what they should");
}

Test(transport_faults, grpc_memory, .timeout = 120) { survive_all(&grpc, FAULT_MEMORY, 1, 0, 200); }
Test(transport_faults, grpc_no_memory_for_a_while, .timeout = 120) {
  survive_all(&grpc, FAULT_MEMORY, 7, 0, 200);
}
Test(transport_faults, grpc_reads_fail, .timeout = 120) {
  survive_all(&grpc, FAULT_READ, 1, ECONNRESET, 5);
}
Test(transport_faults, grpc_reads_of_one_byte, .timeout = 120) {
  survive_all(&grpc, FAULT_READ, 1, 0, 5);
  survive_all(&grpc, FAULT_READ, 100, 0, 5);
}
Test(transport_faults, grpc_reads_are_interrupted, .timeout = 120) {
  survive_all(&grpc, FAULT_READ, 1, EINTR, 5);
  survive_all(&grpc, FAULT_READ, 3, EAGAIN, 5);
}
Test(transport_faults, grpc_writes_fail, .timeout = 120) {
  survive_all(&grpc, FAULT_WRITE, 1, EPIPE, 5);
  survive_all(&grpc, FAULT_WRITE, 1, ENOBUFS, 5);
}
Test(transport_faults, grpc_writes_of_one_byte, .timeout = 120) {
  survive_all(&grpc, FAULT_WRITE, 1, 0, 5);
  survive_all(&grpc, FAULT_WRITE, 100, 0, 5);
}
Test(transport_faults, grpc_writes_are_interrupted, .timeout = 120) {
  survive_all(&grpc, FAULT_WRITE, 1, EINTR, 5);
  survive_all(&grpc, FAULT_WRITE, 3, EAGAIN, 5);
}
Test(transport_faults, grpc_accepts_and_connects_fail, .timeout = 120) {
  survive_all(&grpc, FAULT_ACCEPT, 1, EMFILE, 1);
  survive_all(&grpc, FAULT_ACCEPT, 2, ECONNABORTED, 1);
  survive_all(&grpc, FAULT_SOCKET, 1, EMFILE, 2);
  survive_all(&grpc, FAULT_SOCKET, 3, ENETUNREACH, 2);
}
