/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay info: one GetRelayInfo, timed. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kvrelay_pb.h"
#include "session.h"
#include "text.h"
#include "wire.h"

typedef struct asking {
  kvrelay_caller caller; /* first */
  const options *o;
  kvrelay_client_transport *wire;
  uint64_t asked_ns, answered_ns;
  kvrelay_relay_info info;
  int decoded;   /* KVRELAY_ERR_* of the answer */
  bool answered; /* a message came */
  bool over;
  int code;
} asking;

static void fail(asking *a, int code) {
  a->over = true;
  a->code = code;
}

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  asking *a = (asking *)(void *)self;
  (void)retry_ns;
  if (state == KVRELAY_CONNECTION_FAILED && !a->over) {
    char said[512];
    fprintf(stderr, "kvrelay: %s cannot be reached: %s\n", a->o->target,
            text != NULL && text[0] != 0 ? printable(text_of(text), said)
                                         : kvrelay_transport_strerror(err));
    fail(a, EXIT_UNREACHABLE);
  }
  if (state != KVRELAY_CONNECTION_READY)
    return;
  kvrelay_request request;
  uint8_t bytes[64];
  memset(&request, 0, sizeof request);
  request.method = KVRELAY_METHOD_GET_RELAY_INFO;
  request.contract_marker = KVRELAY_CONTRACT_MARKER;
  ptrdiff_t len = kvrelay_pb_encode_request(&request, bytes, sizeof bytes);
  a->asked_ns = now_ns;
  if (len < 0 || a->wire->call(a->wire, 1, kvrelay_method_path(request.method), bytes,
                               (size_t)len) != KVRELAY_TRANSPORT_OK)
    fail(a, EXIT_SYSTEM);
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)call;
  (void)now_ns;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  asking *a = (asking *)(void *)self;
  (void)call;
  a->answered = true;
  a->answered_ns = now_ns;
  a->decoded = kvrelay_pb_decode_info(bytes, len, NULL, &a->info);
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  asking *a = (asking *)(void *)self;
  const char *reason = kvrelay_reason_name(status->reason);
  char said[512];
  (void)call;
  (void)now_ns;
  if (a->over)
    return;
  if (status->grpc != KVRELAY_GRPC_OK || !a->answered) {
    fprintf(stderr, "kvrelay: %s answered %s%s%s: %s\n", a->o->target,
            kvrelay_grpc_status_name(status->grpc), reason != NULL ? ", " : "",
            reason != NULL ? reason : "", status_text(status, said));
    bool other = status->grpc == KVRELAY_GRPC_UNIMPLEMENTED ||
                 status->reason == KVRELAY_REASON_CONTRACT_MISMATCH;
    fail(a, other ? EXIT_CONTRACT : EXIT_UNREACHABLE);
    return;
  }
  fail(a, EXIT_FINE);
}

/* "2027-01-31T12:00:00Z" */
static const char *day(int64_t unix_s, char out[32]) {
  const time_t at = (time_t)unix_s;
  struct tm utc;
  if (gmtime_r(&at, &utc) == NULL || strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0)
    return "a time beyond telling";
  return out;
}

static int show(const asking *a) {
  const kvrelay_envelope *e = &a->info.envelope;
  double ms = (double)(a->answered_ns - a->asked_ns) / 1e6;
  kvrelay_verdict v = kvrelay_check_envelope(e);
  char until[32];
  if (a->decoded != KVRELAY_OK || v.class_ != KVRELAY_CLASS_OK) {
    fprintf(stderr,
            "kvrelay: %s speaks another contract: %s (marker 0x%08" PRIx32 ", version %" PRIu32
            "; wanted 0x%08x, %d)\n",
            a->o->target,
            a->decoded != KVRELAY_OK ? kvrelay_strerror(a->decoded)
                                     : kvrelay_condition_name(v.condition),
            e->contract_marker, e->protocol_version, KVRELAY_CONTRACT_MARKER, KVRELAY_WIRE_VERSION);
    return EXIT_CONTRACT;
  }
  if (a->o->json) {
    print_json(json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:f, s:o}", "target", json_text(text_of(a->o->target)),
        "protocol_version", json_u64(e->protocol_version), "contract_marker",
        json_u64(e->contract_marker), "drt_instance_id",
        e->relay_present ? json_hex(e->relay.drt_instance_id) : json_null(), "relay_incarnation",
        e->relay_present ? json_hex(e->relay.relay_incarnation) : json_null(), "round_trip_ms", ms,
        "certificate_not_after",
        a->wire->peer_not_after != 0 ? json_text(text_of(day(a->wire->peer_not_after, until)))
                                     : json_null()));
    return EXIT_FINE;
  }
  printf("relay        %s\n", a->o->target);
  printf("contract     dynamo.kvrelay.v1, version %" PRIu32 "\n", e->protocol_version);
  if (e->relay_present)
    printf("incarnation  0x%016" PRIx64 "\ninstance     0x%016" PRIx64 "\n",
           e->relay.relay_incarnation, e->relay.drt_instance_id);
  else
    printf("incarnation  not told\n");
  printf("round trip   %.2f ms\n", ms);
  if (a->wire->peer_not_after != 0)
    printf("certificate  until %s\n", day(a->wire->peer_not_after, until));
  return EXIT_FINE;
}

int cmd_info(const options *o) {
  asking a;
  memset(&a, 0, sizeof a);
  a.o = o;
  a.caller.connection = on_connection;
  a.caller.admitted = on_admitted;
  a.caller.message = on_message;
  a.caller.end = on_end;
  int err = wire_open(o->target, &a.caller, &a.wire);
  if (err != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: %s: %s\n", o->target, kvrelay_transport_strerror(err));
    return err == KVRELAY_TRANSPORT_ERR_ADDRESS ? EXIT_USAGE : EXIT_SYSTEM;
  }
  kvrelay_transport *t = &a.wire->base;
  uint64_t give_up_ns = t->now_ns(t) + (uint64_t)(o->timeout_s * 1e9);
  for (uint64_t now_ns; !a.over && (now_ns = t->now_ns(t)) < give_up_ns;) {
    uint64_t left_ns = give_up_ns - now_ns;
    if (t->run_once(t, left_ns < 1000000000u ? left_ns : 1000000000u) < 0)
      break;
  }
  if (!a.over) {
    fprintf(stderr, "kvrelay: %s: no answer within %g s\n", o->target, o->timeout_s);
    a.code = EXIT_UNREACHABLE;
  }
  if (a.over && a.code == EXIT_FINE)
    a.code = show(&a);
  t->close(t);
  return a.code;
}
