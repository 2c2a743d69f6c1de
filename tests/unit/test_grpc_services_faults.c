/* SPDX-License-Identifier: Apache-2.0 */

/* Health, reflection and mux when memory runs out: each allocation fails once. */

#include "grpc/grpc_health.h"
#include "grpc/grpc_reflection.h"
#include "mux.h"
#include "support/faults.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

static void on_wake(kvrelay_call *call) { (void)call; }

/* One call with one question; true when it was answered and ended with OK. */
static bool call_once(kvrelay_service *s, const char *path, const void *request, size_t len) {
  kvrelay_call call = {.wake = on_wake};
  kvrelay_status status = {.grpc = -1};
  kvrelay_parts parts;
  void *handle;
  int err = s->open(s, &call, (const uint8_t *)path, strlen(path), 1, &handle, &status);
  if (err == KVRELAY_OK) {
    int what = KVRELAY_PULL_END;
    err = s->message(s, handle, request, len, 1, &status);
    if (err == KVRELAY_OK)
      err = s->half_close(s, handle, 1, &status);
    while (err == KVRELAY_OK &&
           (what = s->pull(s, handle, 1, &parts, &status)) == KVRELAY_PULL_MESSAGE)
      continue;
    cr_assert(err || what == KVRELAY_PULL_END);
    s->close(s, handle, 1);
  }
  cr_assert(status.grpc == KVRELAY_GRPC_OK || status.grpc == KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  return status.grpc == KVRELAY_GRPC_OK;
}

/* Calls that were answered, -1: the services could not even be opened. */
static int everything(void) {
  static const char *const names[] = {"a.B"};
  kvrelay_grpc_health *health = NULL;
  kvrelay_grpc_reflection *reflection = NULL;
  kvrelay_mux mux;
  int answered = -1;
  if (kvrelay_grpc_health_open(&health) == KVRELAY_TRANSPORT_OK &&
      kvrelay_grpc_reflection_open(names, 1, &reflection) == KVRELAY_TRANSPORT_OK) {
    kvrelay_mux_init(&mux, kvrelay_grpc_reflection_base(reflection));
    cr_assert_eq(kvrelay_mux_add(&mux, KVRELAY_GRPC_HEALTH_NAME, kvrelay_grpc_health_base(health)),
                 KVRELAY_TRANSPORT_OK);
    answered = call_once(&mux.base, "/grpc.health.v1.Health/Check", "", 0);
    answered += call_once(&mux.base, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                          "\x3a\x00", 2);
  }
  kvrelay_grpc_health_close(health);
  kvrelay_grpc_reflection_close(reflection);
  return answered;
}

Test(grpc_services_faults, each_allocation_fails_once) {
  faults_install();
  cr_assert_eq(everything(), 2);
  unsigned long nth = 0;
  for (bool struck = true; struck;) {
    faults_arm(FAULT_MEMORY, ++nth, 1, ENOMEM);
    const int answered = everything();
    struck = faults_disarm();
    cr_assert_eq(answered < 2, struck, "allocation %lu", nth);
  }
  cr_assert_gt(nth, 7, "every object and every call takes some");
}
