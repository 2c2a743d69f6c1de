/* SPDX-License-Identifier: Apache-2.0 */
/* Peers that are killed, that break off by the thousand, that are there in numbers and say nothing:
 * the other side goes on serving, and what they took is given back. */
#include <criterion/criterion.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/exchange.h"
#include "support/raw_pair.h"
#include "transports/address.h"

#define MS UINT64_C(1000000)
#define PATIENCE_NS (10000 * MS)

#define RESETS 10000
#define CROWD 1000

static struct event_base *base;
static raw_toy toy;
static kvrelay_transport *server;
static char address[64];
static uint64_t random_state = 1;

/* KILLS in the environment, else a hundred. */
static unsigned kills(void) {
  const char *text = getenv("KILLS");
  return text != NULL ? (unsigned)strtoul(text, NULL, 10) : 100;
}

static unsigned random_below(unsigned bound) {
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (unsigned)(random_state >> 33) % bound;
}

static void open_server(const carrier *how, const char *bind) {
  base = event_base_new();
  raw_toy_init(&toy);
  cr_assert_eq(how->open_server(base, bind, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  how->address(server, address, sizeof address);
}

static void close_server(void) {
  server->close(server);
  cr_assert_eq(toy.toy.broken, 0);
  cr_assert_eq(toy.toy.opened, toy.toy.closed);
  toy_service_free(&toy.toy);
  event_base_free(base);
}

static void run_ms(uint64_t ms) {
  const uint64_t until = kvrelay_now_ns() + ms * MS;
  while (kvrelay_now_ns() < until)
    (void)server->run_once(server, MS);
}

/* A client of its own gets all it asks for. */
static void must_serve(const carrier *how, const char *when) {
  exchange e;
  cr_assert_eq(exchange_open(&e, how, base, address), KVRELAY_TRANSPORT_OK);
  cr_assert(exchange_run(&e, server, PATIENCE_NS), "%s, %s: %s", how->name, when, e.wrong);
  exchange_close(&e);
}

/* Seven freed blocks of each size up to a kilobyte stay with the thread, in glibc, and count as
 * used: 240 KB once all of these sizes were seen.  The rest is for buffers that have not reached
 * theirs. */
#define SLACK ((size_t)(240 + 64) << 10)

/* What ended leaves no call, no descriptor and no memory behind. */
static void must_be_as_before(unsigned descriptors, size_t bytes) {
  const uint64_t until = kvrelay_now_ns() + PATIENCE_NS;
  while ((toy.toy.open_now > 0 || open_descriptors() > descriptors) && kvrelay_now_ns() < until)
    run_ms(2);
  cr_assert_eq(toy.toy.open_now, 0);
  cr_assert_eq(open_descriptors(), descriptors);
  cr_assert_leq(mallinfo2().uordblks, bytes + SLACK, "%zu bytes more",
                mallinfo2().uordblks - bytes);
}

/* ---- kills ---- */

/* A client in a process of its own, which asks and asks until it is killed. */
static pid_t start_client(const carrier *how) {
  const pid_t child = fork();
  cr_assert_geq(child, 0);
  if (child > 0)
    return child;
  exchange e;
  struct event_base *own = event_base_new();
  if (exchange_open(&e, how, own, address) != KVRELAY_TRANSPORT_OK)
    _exit(1);
  while (exchange_run(&e, NULL, PATIENCE_NS))
    exchange_again(&e);
  _exit(1);
}

static void kill_child(pid_t child) {
  int status = 0;
  cr_assert_eq(kill(child, SIGKILL), 0);
  cr_assert_eq(waitpid(child, &status, 0), child);
  cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it had ended by itself");
}

static void kill_one_client(const carrier *how) {
  const pid_t child = start_client(how);
  const uint64_t until = kvrelay_now_ns() + random_below(8000) * UINT64_C(1000);
  while (kvrelay_now_ns() < until)
    (void)server->run_once(server, MS / 4);
  kill_child(child);
}

static void kill_clients(const carrier *how) {
  open_server(how, "127.0.0.1:0");
  must_serve(how, "before");
  for (unsigned i = 0; i < 20; i++) /* buffers reach their size */
    kill_one_client(how);
  run_ms(20);
  const unsigned descriptors = open_descriptors();
  const size_t bytes = mallinfo2().uordblks;
  for (unsigned i = 0; i < kills(); i++) {
    kill_one_client(how);
    if (i % 10 == 0)
      must_serve(how, "after a client was killed");
  }
  must_be_as_before(descriptors, bytes);
  close_server();
}

Test(transport_peers, clients_are_killed_at_random_moments, .timeout = 120) {
  for (size_t i = 0; i < carriers_len; i++)
    kill_clients(&carriers[i]);
}

/* A server in a process of its own, on a path that stays the same. */
static pid_t start_server(const carrier *how, const char *path) {
  (void)unlink(path + strlen("unix:")); /* one that was killed did not do it */
  const pid_t child = fork();
  cr_assert_geq(child, 0);
  if (child > 0)
    return child;
  base = event_base_new();
  raw_toy_init(&toy);
  if (how->open_server(base, path, &toy.base, &server) != KVRELAY_TRANSPORT_OK)
    _exit(1);
  while (server->run_once(server, KVRELAY_TIME_NONE) >= 0)
    continue;
  _exit(1);
}

static void kill_servers(const carrier *how) {
  char path[] = "/tmp/kvrelay-peers-XXXXXX", bind[64];
  cr_assert_not_null(mkdtemp(path));
  snprintf(bind, sizeof bind, "unix:%s/s", path);
  struct event_base *own = event_base_new();
  exchange e;
  cr_assert_eq(exchange_open(&e, how, own, bind), KVRELAY_TRANSPORT_OK);
  for (unsigned i = 0; i < kills(); i++) {
    const pid_t child = start_server(how, bind);
    const uint64_t until = kvrelay_now_ns() + random_below(8000) * UINT64_C(1000);
    while (kvrelay_now_ns() < until && e.wrong[0] == '\0') {
      if (exchange_advance(&e))
        exchange_again(&e);
      (void)e.client->base.run_once(&e.client->base, MS / 4);
    }
    if (i % 10 == 0)
      cr_assert(exchange_run(&e, NULL, PATIENCE_NS), "%s: %s", how->name, e.wrong);
    cr_assert_str_empty(e.wrong);
    kill_child(child);
    exchange_again(&e);
  }
  cr_assert_geq(e.failures, kills() / 2);
  exchange_close(&e);
  event_base_free(own);
  (void)unlink(bind + strlen("unix:"));
  (void)rmdir(path);
}

Test(transport_peers, servers_are_killed_at_random_moments, .timeout = 120) {
  for (size_t i = 0; i < carriers_len; i++)
    kill_servers(&carriers[i]);
}

/* ---- many ---- */

static int connect_raw(void) {
  char host[64], port[8];
  kvrelay_address to;
  cr_assert_eq(kvrelay_address_split(address, host, sizeof host, port, sizeof port),
               KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_address_resolve(host, port, true, &to, 1), 1);
  const int fd = socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  cr_assert_geq(fd, 0);
  cr_assert_eq(connect(fd, (const struct sockaddr *)&to.storage, to.len), 0);
  return fd;
}

/* With a reset instead of an orderly end, after a few bytes that mean something or nothing. */
static void connect_and_reset(void) {
  static const char hello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";
  const struct linger at_once = {1, 0};
  const int fd = connect_raw();
  const size_t len = random_below(sizeof hello);
  cr_assert_eq(send(fd, hello, len, MSG_NOSIGNAL), (ssize_t)len);
  cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  if (random_below(2) == 0)
    (void)server->run_once(server, 0);
  close(fd);
  (void)server->run_once(server, 0);
}

Test(transport_peers, ten_thousand_connections_and_resets, .timeout = 120) {
  for (size_t i = 0; i < carriers_len; i++) {
    open_server(&carriers[i], "127.0.0.1:0");
    must_serve(&carriers[i], "before");
    for (unsigned j = 0; j < 1000; j++) /* tables reach their size */
      connect_and_reset();
    run_ms(20);
    const unsigned descriptors = open_descriptors();
    const size_t bytes = mallinfo2().uordblks;
    for (unsigned j = 0; j < RESETS; j++)
      connect_and_reset();
    must_be_as_before(descriptors, bytes);
    must_serve(&carriers[i], "after all");
    close_server();
  }
}

/* A thousand that connect and say nothing, half of them gone without a word of farewell. */
Test(transport_peers, a_thousand_connections, .timeout = 120) {
  struct rlimit files;
  cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = files.rlim_max < 4096 ? files.rlim_max : 4096;
  cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
  for (size_t i = 0; i < carriers_len; i++) {
    static int fds[CROWD];
    open_server(&carriers[i], "127.0.0.1:0");
    for (unsigned j = 0; j < CROWD; j++) {
      fds[j] = connect_raw();
      if (j % 100 == 0)
        run_ms(1);
    }
    must_serve(&carriers[i], "beside a thousand others");
    for (unsigned j = 0; j < CROWD; j++)
      close(fds[j]);
    must_serve(&carriers[i], "after they left");
    close_server();
  }
}
