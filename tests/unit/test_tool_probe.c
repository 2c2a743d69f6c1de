/* SPDX-License-Identifier: Apache-2.0 */

/* The calls of a probe: each has its own number and its own answers, until there is no room. */

#include "tools/kvrelay/probe.h"

#include <criterion/criterion.h>
#include <string.h>

#define NOW 1000u

/* A connection that takes every call and says nothing. */
typedef struct mute {
  kvrelay_client_transport base;
  uint32_t calls, last, cancelled;
} mute;

static uint64_t mute_now(const kvrelay_transport *t) {
  (void)t;
  return NOW;
}

static int mute_call(kvrelay_client_transport *t, uint32_t call, const char *path,
                     const uint8_t *request, size_t len) {
  mute *m = (mute *)(void *)t;
  (void)path;
  (void)request;
  (void)len;
  cr_assert_eq(call, m->last + 1, "number %u behind %u", call, m->last);
  m->last = call;
  m->calls++;
  return KVRELAY_TRANSPORT_OK;
}

static void mute_cancel(kvrelay_client_transport *t, uint32_t call) {
  (void)call;
  ((mute *)(void *)t)->cancelled++;
}

static void mute_close(kvrelay_transport *t) { (void)t; }

static mute open_mute(void) {
  mute m;
  memset(&m, 0, sizeof m);
  m.base.base.now_ns = mute_now;
  m.base.base.close = mute_close;
  m.base.call = mute_call;
  m.base.cancel = mute_cancel;
  return m;
}

Test(tool_probe, a_call_without_room_is_refused_and_leaves_the_others_alone) {
  mute m = open_mute();
  probe p;
  probe_answer a;
  memset(&p, 0, sizeof p);
  p.wire = &m.base;
  for (uint32_t i = 1; i <= PROBE_CALLS; i++)
    cr_assert_eq(probe_call(&p, "/a/b", NULL, 0), i);
  for (int again = 0; again < 3; again++) {
    const uint32_t refused = probe_call(&p, "/a/b", NULL, 0);
    cr_assert_gt(refused, PROBE_CALLS);
    cr_assert_eq(probe_next(&p, refused, NOW, &a), PROBE_END);
    cr_assert_eq(a.status.grpc, KVRELAY_GRPC_UNAVAILABLE);
    cr_assert_str_eq(a.status.text, kvrelay_transport_strerror(KVRELAY_TRANSPORT_ERR_LIMIT));
    probe_cancel(&p, refused);
  }
  cr_assert_eq(m.calls, PROBE_CALLS);
  for (uint32_t i = 1; i <= PROBE_CALLS; i++)
    cr_assert_eq(probe_next(&p, i, NOW, &a), PROBE_SILENT, "call %u is still open", i);
  probe_close(&p);
}

Test(tool_probe, no_time_is_left_behind_the_end) {
  mute m = open_mute();
  probe p;
  memset(&p, 0, sizeof p);
  p.wire = &m.base;
  cr_assert_eq(probe_left_ns(&p, NOW + 5), 5);
  cr_assert_eq(probe_left_ns(&p, NOW), 0);
  cr_assert_eq(probe_left_ns(&p, NOW - 1), 0);
  cr_assert_eq(probe_left_ns(&p, 0), 0);
}
