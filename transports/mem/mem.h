/* SPDX-License-Identifier: Apache-2.0 */
/* mem.h - one connection inside the process, with a clock that stands still until told: for tests
 * and simulations. */
#ifndef KVRELAY_MEM_H
#define KVRELAY_MEM_H

#include "../transport.h"

/*
 *   kvrelay_mem_config cfg = kvrelay_mem_config_default();
 *   cfg.delay_ns = 40000000;                              // one way
 *   kvrelay_mem *mem;
 *   if (kvrelay_mem_open(&cfg, service, caller, &mem) < 0) return;
 *   kvrelay_client_attach(client, kvrelay_mem_client(mem));
 *   kvrelay_transport *t = kvrelay_mem_server(mem);
 *   while (t->run_once(t, 1000000000) > 0) { kvrelay_client_run(…); kvrelay_relay_service_poll(…);
 * }
 *
 * Both ends follow transport.h to the letter, so whatever works here has kept its rules.  One end's
 * functions drive the whole connection: run_once of either delivers everything that is due; when
 * nothing is, the clock jumps to the next delivery, at most by the time-out.  Nothing ever waits.
 * Several connections may share a service and a clock.
 *
 * Messages are whole to both ends whatever carries them, so nothing is split here but time: what a
 * transport on sockets finds in one read, or in ten, kvrelay_mem_turn delivers in one turn, or in
 * ten, and what comes between two turns comes between any two steps of a call.
 */
typedef struct kvrelay_mem kvrelay_mem;

typedef struct kvrelay_mem_config {
  uint64_t *clock_ns; /* shared clock, must outlive the connection; NULL: one of its own that starts
                         at 1 s */
  uint64_t delay_ns;  /* each way */
  uint64_t retry_ns;  /* from a broken connection to the next attempt */
  size_t queue_messages;    /* of one call, on their way or unread, ≥ 1: the bound behind
                                     back-pressure; the server notices at once what was read */
  size_t max_message_bytes; /* a longer response ends its call with RESOURCE_EXHAUSTED */
} kvrelay_mem_config;

/* Own clock, no delay, retry after 1 s, 1 message, 8 MiB. */
kvrelay_mem_config kvrelay_mem_config_default(void);
/* The first attempt to connect is made by the first run_once.  KVRELAY_TRANSPORT_OK, or _ERR_ARG,
 * _ERR_MEMORY. */
int kvrelay_mem_open(const kvrelay_mem_config *cfg, kvrelay_service *service,
                     kvrelay_caller *caller, kvrelay_mem **out);
kvrelay_transport *kvrelay_mem_server(kvrelay_mem *mem);
kvrelay_client_transport *kvrelay_mem_client(kvrelay_mem *mem);

/* ---- script ---- */

/* Delay of what is sent from now on; nothing overtakes. */
void kvrelay_mem_delay(kvrelay_mem *mem, uint64_t delay_ns);
/* The client stops, or goes on, reading this call (0 = all of them); its messages stay where they
 * are. */
void kvrelay_mem_hold(kvrelay_mem *mem, uint32_t call, bool hold);
/* The connection breaks now; what was on its way is lost. */
void kvrelay_mem_cut(kvrelay_mem *mem);
/* Attempts to connect fail from now on, or succeed again. */
void kvrelay_mem_refuse(kvrelay_mem *mem, bool refuse);
/* Taking over a pulled message fails for want of memory, once, after `after` more have succeeded.
 */
void kvrelay_mem_fail_copy(kvrelay_mem *mem, size_t after);
/* At most so many steps are taken in one turn of either end: a request, one of its messages, a
 * message of the answer, an end.  0, the default: all that are due. */
void kvrelay_mem_turn(kvrelay_mem *mem, size_t steps);
/* Nothing arrives at either end from now on, or everything again: a peer that has vanished without
 * a word. */
void kvrelay_mem_stall(kvrelay_mem *mem, bool stall);
/* A call step by step: its path, any number of messages, its half-close.  As
 * kvrelay_client_transport.call; the latter two _ERR_ARG for a call that is not open or was
 * half-closed. */
int kvrelay_mem_call_open(kvrelay_mem *mem, uint32_t call, const char *path);
int kvrelay_mem_call_send(kvrelay_mem *mem, uint32_t call, const void *message, size_t len);
int kvrelay_mem_call_half_close(kvrelay_mem *mem, uint32_t call);
/* All of that at once. */
int kvrelay_mem_call_raw(kvrelay_mem *mem, uint32_t call, const char *path,
                         const kvrelay_iov *messages, size_t messages_len);
/* Messages of all calls that were pulled and not yet read. */
size_t kvrelay_mem_unread(const kvrelay_mem *mem);
/* Calls that the service has open. */
size_t kvrelay_mem_calls(const kvrelay_mem *mem);

/* Frees both ends; the service is told, the caller is not. */
void kvrelay_mem_close(kvrelay_mem *mem);

#endif
