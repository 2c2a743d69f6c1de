/* SPDX-License-Identifier: Apache-2.0 */
/* probe.h - calls on one connection, asked and answered in the order of a program's text. */
#ifndef KVRELAY_PROBE_H
#define KVRELAY_PROBE_H

#include "transport.h"

/*
 *   probe p;
 *   if (probe_open(&p, "relay:5561") != KVRELAY_TRANSPORT_OK) return;
 *   if (probe_connect(&p, probe_now(&p) + 1000000000u)) {
 *     uint32_t call = probe_call(&p, path, request, len);
 *     while (probe_next(&p, call, until_ns, &answer) == PROBE_MESSAGE)
 *       use(answer.bytes, answer.len);
 *   }
 *   probe_close(&p);
 */

#define PROBE_CALLS 64               /* of one connection; further ones are refused */
#define PROBE_BYTES_MAX (256u << 20) /* that wait to be looked at; beyond, the call ends */

enum probe_event { PROBE_SILENT = 0, PROBE_MESSAGE = 1, PROBE_END = 2 };

typedef struct probe_answer {
  const uint8_t *bytes; /* PROBE_MESSAGE; lent until the next probe_next of this call */
  size_t len;
  kvrelay_status status; /* PROBE_END */
} probe_answer;

typedef struct probe_message {
  struct probe_message *next;
  size_t len;
  uint8_t bytes[];
} probe_message;

typedef struct probe_call_state {
  probe_message *first, *last, *shown;
  bool ended;
  kvrelay_status status;
} probe_call_state;

typedef struct probe {
  kvrelay_caller caller; /* first */
  kvrelay_client_transport *wire;
  bool ready;
  bool failed;       /* the attempt to connect, or the connection */
  char failure[256]; /* why */
  uint32_t calls;    /* numbers are 1 .. calls, and one more for all that were refused */
  probe_call_state call[PROBE_CALLS + 1];
  size_t bytes; /* that wait */
} probe;

/* KVRELAY_TRANSPORT_OK, or what wire_open says; then nothing is open. */
int probe_open(probe *p, const char *target);
/* Waits for the connection; false: `failure` says why there is none. */
bool probe_connect(probe *p, uint64_t until_ns);
/* The number of the new call; one that could not be made ends with UNAVAILABLE, the text says that
 * this side is why. */
uint32_t probe_call(probe *p, const char *path, const uint8_t *request, size_t len);
/* enum probe_event: what comes next on this call, SILENT when nothing has come until then. */
int probe_next(probe *p, uint32_t call, uint64_t until_ns, probe_answer *out);
/* Nothing more comes on this call. */
void probe_cancel(probe *p, uint32_t call);
uint64_t probe_now(const probe *p);
uint64_t probe_left_ns(const probe *p, uint64_t until_ns); /* 0: the time is up */
void probe_close(probe *p);

#endif
