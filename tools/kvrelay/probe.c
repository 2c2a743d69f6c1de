/* SPDX-License-Identifier: Apache-2.0 */
#include "probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "show.h"
#include "wire.h"

static void end(probe_call_state *c, int32_t grpc, const char *text) {
  memset(&c->status, 0, sizeof c->status);
  c->status.grpc = grpc;
  snprintf(c->status.text, sizeof c->status.text, "%s", text);
  c->ended = true;
}

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  probe *p = (probe *)(void *)self;
  (void)retry_ns;
  (void)now_ns;
  p->ready = state == KVRELAY_CONNECTION_READY;
  if (state == KVRELAY_CONNECTION_FAILED) {
    p->failed = true;
    show_format(p->failure, sizeof p->failure, "%s",
                text != NULL && text[0] != 0 ? text : kvrelay_transport_strerror(err));
  }
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)call;
  (void)now_ns;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  probe *p = (probe *)(void *)self;
  probe_call_state *c = &p->call[call - 1];
  (void)now_ns;
  probe_message *m = p->bytes + len <= PROBE_BYTES_MAX ? malloc(sizeof *m + len) : NULL;
  if (m == NULL) {
    end(c, KVRELAY_GRPC_CANCELLED, "more came than there is memory for here");
    p->wire->cancel(p->wire, call);
    return;
  }
  m->next = NULL;
  m->len = len;
  if (len != 0)
    memcpy(m->bytes, bytes, len);
  *(c->last != NULL ? &c->last->next : &c->first) = m;
  c->last = m;
  p->bytes += len;
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  probe *p = (probe *)(void *)self;
  (void)now_ns;
  p->call[call - 1].status = *status;
  p->call[call - 1].ended = true;
}

int probe_open(probe *p, const char *target) {
  memset(p, 0, sizeof *p);
  p->caller = (kvrelay_caller){on_connection, on_admitted, on_message, on_end};
  return wire_open(target, &p->caller, &p->wire);
}

uint64_t probe_now(const probe *p) { return p->wire->base.now_ns(&p->wire->base); }

uint64_t probe_left_ns(const probe *p, uint64_t until_ns) {
  const uint64_t now_ns = probe_now(p);
  return until_ns > now_ns ? until_ns - now_ns : 0;
}

/* One turn of the loop; false: the time is up. */
static bool turn(probe *p, uint64_t until_ns) {
  const uint64_t left_ns = probe_left_ns(p, until_ns);
  if (left_ns == 0)
    return false;
  return p->wire->base.run_once(&p->wire->base, left_ns < 1000000000u ? left_ns : 1000000000u) >= 0;
}

bool probe_connect(probe *p, uint64_t until_ns) {
  while (!p->ready && !p->failed && turn(p, until_ns)) {
  }
  if (!p->ready && !p->failed)
    snprintf(p->failure, sizeof p->failure, "no answer in time");
  return p->ready;
}

uint32_t probe_call(probe *p, const char *path, const uint8_t *request, size_t len) {
  const bool room = p->calls < PROBE_CALLS;
  const uint32_t call = room ? ++p->calls : PROBE_CALLS + 1;
  const int err =
      room ? p->wire->call(p->wire, call, path, request, len) : KVRELAY_TRANSPORT_ERR_LIMIT;
  if (err != KVRELAY_TRANSPORT_OK)
    end(&p->call[call - 1], KVRELAY_GRPC_UNAVAILABLE, kvrelay_transport_strerror(err));
  return call;
}

int probe_next(probe *p, uint32_t call, uint64_t until_ns, probe_answer *out) {
  probe_call_state *c = &p->call[call - 1];
  free(c->shown);
  c->shown = NULL;
  while (c->first == NULL && !c->ended)
    if (!turn(p, until_ns))
      return PROBE_SILENT;
  if (c->first == NULL) {
    out->status = c->status;
    return PROBE_END;
  }
  c->shown = c->first;
  c->first = c->shown->next;
  if (c->first == NULL)
    c->last = NULL;
  p->bytes -= c->shown->len;
  out->bytes = c->shown->bytes;
  out->len = c->shown->len;
  return PROBE_MESSAGE;
}

static void forget(probe *p, probe_call_state *c) {
  free(c->shown);
  for (probe_message *m = c->first, *next; m != NULL; m = next) {
    next = m->next;
    p->bytes -= m->len;
    free(m);
  }
  c->first = c->last = c->shown = NULL;
}

void probe_cancel(probe *p, uint32_t call) {
  probe_call_state *c = &p->call[call - 1];
  p->wire->cancel(p->wire, call);
  forget(p, c);
  end(c, KVRELAY_GRPC_CANCELLED, "");
}

void probe_close(probe *p) {
  p->wire->base.close(&p->wire->base);
  for (size_t i = 0; i <= PROBE_CALLS; i++)
    forget(p, &p->call[i]);
}
