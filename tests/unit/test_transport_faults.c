/* SPDX-License-Identifier: Apache-2.0 */
/* Every i-th allocation, read, write, accept and connect of server and client fails, once and for a
 * while: whoever lost something says so, gives all back, and serves again. */
#include <criterion/criterion.h>
#include <errno.h>
#include <unistd.h>

#include "support/exchange.h"
#include "support/faults.h"
#include "support/raw_pair.h"

/* Longer than any pause of a transport after a fault: then nothing goes on by itself any more. */
#define PATIENCE_NS UINT64_C(5000000000)

static raw_toy toy;
static kvrelay_transport *server;
static exchange client;

/* An error of opening leaves nothing behind, and the next attempt, without the fault, succeeds. */
static bool opened(int err) {
  if (err == KVRELAY_TRANSPORT_OK)
    return true;
  cr_assert(err == KVRELAY_TRANSPORT_ERR_MEMORY || err == KVRELAY_TRANSPORT_ERR_SYSTEM, "%d", err);
  cr_assert(faults_disarm());
  return false;
}

static void open_both(const carrier *how, struct event_base *base) {
  kvrelay_service *service = faults_spare(&toy.base);
  char target[64];
  if (!opened(how->open_server(base, "127.0.0.1:0", service, &server)))
    cr_assert_eq(how->open_server(base, "127.0.0.1:0", service, &server), KVRELAY_TRANSPORT_OK);
  how->address(server, target, sizeof target);
  if (!opened(exchange_open(&client, how, base, target)))
    cr_assert_eq(exchange_open(&client, how, base, target), KVRELAY_TRANSPORT_OK);
}

/* One world with one fault.  True when the fault struck. */
static bool survive(const carrier *how, enum fault_kind kind, unsigned long nth,
                    unsigned long count, int error) {
  const unsigned before = open_descriptors();
  struct event_base *base = event_base_new();
  raw_toy_init(&toy);
  faults_arm(kind, nth, count, error);
  open_both(how, base);
  cr_assert(exchange_run(&client, server, PATIENCE_NS), "%s, fault %lu: %s", how->name, nth,
            client.wrong);
  const bool struck = faults_disarm();
  exchange_close(&client);
  server->close(server);
  cr_assert(toy.toy.open_now == 0 && toy.toy.broken == 0 && toy.toy.opened == toy.toy.closed);
  toy_service_free(&toy.toy);
  event_base_free(base);
  const uint64_t until = kvrelay_now_ns() + PATIENCE_NS;
  while (open_descriptors() > before && kvrelay_now_ns() < until)
    usleep(100); /* a dial that was called off ends in a thread */
  cr_assert_eq(open_descriptors(), before, "%s, fault %lu: descriptors left open", how->name, nth);
  return struck;
}

/* Every position until the fault comes too late to strike. */
static void survive_all(enum fault_kind kind, unsigned long count, int error,
                        unsigned long at_least) {
  faults_install();
  carriers_prepare();
  for (size_t i = 0; i < carriers_len; i++) {
    unsigned long nth = 1;
    while (survive(&carriers[i], kind, nth, count, error))
      nth++;
    cr_assert_gt(nth, at_least, "%s: the faults do not reach what they should", carriers[i].name);
  }
}

TestSuite(transport_faults, .timeout = 600); /* under valgrind; else seconds */

Test(transport_faults, memory) { survive_all(FAULT_MEMORY, 1, 0, 8); }
Test(transport_faults, no_memory_for_a_while) { survive_all(FAULT_MEMORY, 7, 0, 8); }
Test(transport_faults, reads_fail) { survive_all(FAULT_READ, 1, ECONNRESET, 5); }
Test(transport_faults, reads_of_one_byte) {
  survive_all(FAULT_READ, 1, 0, 5);
  survive_all(FAULT_READ, 100, 0, 5);
}
Test(transport_faults, reads_are_interrupted) {
  survive_all(FAULT_READ, 1, EINTR, 5);
  survive_all(FAULT_READ, 3, EAGAIN, 5);
}
Test(transport_faults, writes_fail) {
  survive_all(FAULT_WRITE, 1, EPIPE, 5);
  survive_all(FAULT_WRITE, 1, ENOBUFS, 5);
}
Test(transport_faults, writes_of_one_byte) {
  survive_all(FAULT_WRITE, 1, 0, 5);
  survive_all(FAULT_WRITE, 100, 0, 5);
}
Test(transport_faults, writes_are_interrupted) {
  survive_all(FAULT_WRITE, 1, EINTR, 5);
  survive_all(FAULT_WRITE, 3, EAGAIN, 5);
}
Test(transport_faults, accepts_and_connects_fail) {
  survive_all(FAULT_ACCEPT, 1, EMFILE, 1);
  survive_all(FAULT_ACCEPT, 2, ECONNABORTED, 1);
  survive_all(FAULT_SOCKET, 1, EMFILE, 2);
  survive_all(FAULT_SOCKET, 3, ENETUNREACH, 2);
}

/* Or the next server could not bind there. */
Test(transport_faults, a_server_that_cannot_be_opened_leaves_no_socket_file) {
  static const char bind[] = "unix:faults.sock";
  faults_install();
  carriers_prepare();
  raw_toy_init(&toy);
  for (size_t i = 0; i < carriers_len; i++) {
    int err = KVRELAY_TRANSPORT_ERR_MEMORY;
    for (unsigned long nth = 1; err != KVRELAY_TRANSPORT_OK; nth++) {
      struct event_base *base = event_base_new(); /* what libevent keeps needs no memory again */
      faults_arm(FAULT_MEMORY, nth, 1, 0);
      err = carriers[i].open_server(base, bind, &toy.base, &server);
      (void)faults_disarm();
      cr_assert_eq(access(bind + 5, F_OK) == 0, err == KVRELAY_TRANSPORT_OK, "%s, fault %lu: %d",
                   carriers[i].name, nth, err);
      if (err == KVRELAY_TRANSPORT_OK)
        server->close(server);
      event_base_free(base);
    }
    cr_assert_neq(access(bind + 5, F_OK), 0, "%s: left behind by close", carriers[i].name);
  }
}

/* Forward only: the monotonic clock never goes back. */
static void survive_jump(const carrier *how, struct event_base *base, int64_t jump) {
  char target[64];
  raw_toy_init(&toy);
  cr_assert_eq(how->open_server(base, "127.0.0.1:0", &toy.base, &server), KVRELAY_TRANSPORT_OK);
  how->address(server, target, sizeof target);
  cr_assert_eq(exchange_open(&client, how, base, target), KVRELAY_TRANSPORT_OK);
  for (int i = 0; i < 20; i++) {
    exchange_again(&client);
    for (int turn = 0; turn < i; turn++) {
      (void)exchange_advance(&client);
      (void)server->run_once(server, PATIENCE_NS / 5000);
    }
    faults_jump(jump);
    cr_assert(exchange_run(&client, server, PATIENCE_NS + (uint64_t)jump), "%s: %s", how->name,
              client.wrong);
  }
  exchange_close(&client);
  server->close(server);
  cr_assert(toy.toy.open_now == 0 && toy.toy.broken == 0 && toy.toy.opened == toy.toy.closed);
  toy_service_free(&toy.toy);
}

Test(transport_faults, clock_jumps) {
  struct event_base *base = event_base_new();
  for (size_t i = 0; i < carriers_len; i++) {
    survive_jump(&carriers[i], base, 1000000);
    survive_jump(&carriers[i], base, INT64_C(15000000000));
    survive_jump(&carriers[i], base, INT64_C(86400000000000));
  }
  event_base_free(base);
}
