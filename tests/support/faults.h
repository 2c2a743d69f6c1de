/* SPDX-License-Identifier: Apache-2.0 */
/* faults.h - the n-th allocation, read, write, accept … fails: for tests of transports. */
#ifndef KVRELAY_TEST_FAULTS_H
#define KVRELAY_TEST_FAULTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transports/transport.h"

/*
 * A program whose name ends in _faults is linked so that what our code calls is what stands in
 * faults.c; shared libraries are reached by the hooks that libevent and nghttp2 have.  Nothing
 * fails until faults_arm.
 */
enum fault_kind {
  FAULT_MEMORY = 0, /* malloc, calloc, realloc, also those of libevent and nghttp2: NULL */
  FAULT_READ,       /* read, readv, recv, recvmsg */
  FAULT_WRITE,      /* sendmsg, send, write */
  FAULT_ACCEPT,     /* accept4 */
  FAULT_SOCKET,     /* socket, connect */
  FAULT_KINDS
};

/* Before anything of libevent is used. */
void faults_install(void);
/*
 * The `nth` operation of this kind from now on fails, and the `count` - 1 after it; `error` is what
 * errno becomes.  Of reads and writes, error 0 means: it moves one byte only.
 */
void faults_arm(enum fault_kind kind, unsigned long nth, unsigned long count, int error);
/* No fault any more.  True when one has struck since faults_arm. */
bool faults_disarm(void);
/* All clocks of our code jump by so much, while those of libevent and the system do not: what a
 * machine sees that was asleep, or whose clock was set. */
void faults_jump(int64_t ns);
/* The same service, but nothing that it does itself fails: what is under test is the transport. */
kvrelay_service *faults_spare(kvrelay_service *service);

#endif
