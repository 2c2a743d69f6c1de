/* SPDX-License-Identifier: Apache-2.0 */
/* toy_service.h - a service of transport.h whose requests are small text commands, and which counts
 * what a transport does to it. */
#ifndef KVRELAY_TEST_TOY_SERVICE_H
#define KVRELAY_TEST_TOY_SERVICE_H

#include "transports/transport.h"

/*
 * Methods, all below "/kvrelay.test.Toy/":
 *   Echo      the request comes back
 *   Count     request "N SIZE": N messages of SIZE bytes, byte j of message i is (i + j) & 255
 *   Copied    as Count, and the transport has to copy
 *   Refuse    request "GRPC REASON TEXT": ends with this status before the first message
 *   End       request "GRPC REASON TEXT": one message "x", then this status
 *   Silent    admitted, nothing until toy_service_release; then one message "released" and OK
 *   Chat      each request comes back at once, the next may come after it; ends with OK after the
 * half-close
 */
typedef struct toy_call toy_call;

typedef struct toy_service {
  kvrelay_service base; /* first */
  toy_call *calls;      /* open ones */
  int opened, closed, open_now;
  int messages, half_closes;
  long pulled; /* messages handed out */
  /* Sees each call before it is opened; may be NULL. */
  void (*on_open)(kvrelay_call *call);
  int broken; /* what a transport must never do: calls after close, pulls after END */
} toy_service;

/* Count keeps its parts with it where the transport allows that; they are gone as soon as rule 2 of
 * transport.h allows it: when it is pulled again, closed or woken. */
void toy_service_init(toy_service *toy);
/* Wakes every open call, for nothing. */
void toy_service_wake(toy_service *toy);
/* Lets every Silent call go on. */
void toy_service_release(toy_service *toy);
/* Ends every open call with OK, as a relay that stops. */
void toy_service_shutdown(toy_service *toy);
void toy_service_free(toy_service *toy);

#endif
