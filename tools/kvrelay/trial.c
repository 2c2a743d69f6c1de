/* SPDX-License-Identifier: Apache-2.0 */
#include "trial.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvrelay_pb.h"
#include "show.h"

#define ARENA_FIRST 65536u
#define ARENA_MAX (64u << 20)

/* ---- verdicts ---- */

int trial_fail(trial *t, const char *format, ...) {
  va_list list;
  va_start(list, format);
  show_vformat(t->why, sizeof t->why, format, list);
  va_end(list);
  return TRIAL_FAILED;
}

int trial_skip(trial *t, const char *format, ...) {
  va_list list;
  va_start(list, format);
  show_vformat(t->why, sizeof t->why, format, list);
  va_end(list);
  return TRIAL_NOT_APPLICABLE;
}

/* "NOT_FOUND, RELAY_ERROR_REASON_POOL_NOT_FOUND (what the relay says)" */
static const char *status_line(int32_t grpc, int32_t reason, const char *said, char out[640]) {
  const char *name = kvrelay_reason_name(reason);
  snprintf(out, 640, "%s, %s%s%s%s", kvrelay_grpc_status_name(grpc),
           name != NULL ? name : "no reason", said[0] != 0 ? " (" : "", said,
           said[0] != 0 ? ")" : "");
  return out;
}

/* A call that should be served ended: because the pool has just gone, because there is no place
 * for us, or because the relay is wrong. */
static int ended(trial *t, const char *what, const kvrelay_status *status) {
  char said[512], line[640];
  status_line(status->grpc, status->reason, status_text(status, said), line);
  switch (status->reason) {
  case KVRELAY_REASON_POOL_NOT_FOUND:
  case KVRELAY_REASON_PRODUCER_CHANGED:
  case KVRELAY_REASON_PUBLICATION_UNAVAILABLE:
  case KVRELAY_REASON_SUBSCRIBER_LAGGED:
    (void)trial_fail(t, "%s ended with %s", what, line);
    return TRIAL_AGAIN;
  case KVRELAY_REASON_RESOURCE_LIMIT:
    return trial_skip(t, "%s found no place: %s", what, line);
  default:
    return trial_fail(t, "%s ended with %s", what, line);
  }
}

static int silent(trial *t, const char *what) {
  return trial_fail(t, "%s: nothing came within %g s", what, t->o->timeout_s);
}

/* ---- calls ---- */

kvrelay_request trial_request(const trial *t, int32_t method) {
  kvrelay_request q;
  memset(&q, 0, sizeof q);
  q.method = method;
  q.contract_marker = KVRELAY_CONTRACT_MARKER;
  q.subscriber_id.ptr = (const uint8_t *)t->o->subscriber_id;
  q.subscriber_id.len = strlen(t->o->subscriber_id);
  if (method == KVRELAY_METHOD_SUBSCRIBE_POOL)
    q.expected_producer = t->producer;
  return q;
}

uint32_t trial_call(trial *t, const kvrelay_request *q) {
  uint8_t bytes[1024];
  const ptrdiff_t len = kvrelay_pb_encode_request(q, bytes, sizeof bytes);
  return probe_call(&t->p, kvrelay_method_path(q->method), bytes, len > 0 ? (size_t)len : 0);
}

static int decode(trial *t, int32_t method, const probe_answer *a, void *out) {
  kvrelay_pb_arena arena = {t->arena, t->arena_len, 0};
  switch (method) {
  case KVRELAY_METHOD_GET_RELAY_INFO:
    return kvrelay_pb_decode_info(a->bytes, a->len, &arena, out);
  case KVRELAY_METHOD_WATCH_CATALOG:
    return kvrelay_pb_decode_catalog(a->bytes, a->len, &arena, out);
  case KVRELAY_METHOD_SUBSCRIBE_POOL:
    return kvrelay_pb_decode_filter(a->bytes, a->len, &arena, out);
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    return kvrelay_pb_decode_readiness(a->bytes, a->len, &arena, out);
  default:
    return kvrelay_pb_decode_load(a->bytes, a->len, &arena, out);
  }
}

static int decode_growing(trial *t, int32_t method, const probe_answer *a, void *out) {
  int err = KVRELAY_ERR_NOSPACE;
  while (err == KVRELAY_ERR_NOSPACE && t->arena_len <= ARENA_MAX) {
    err = t->arena != NULL ? decode(t, method, a, out) : KVRELAY_ERR_NOSPACE;
    if (err != KVRELAY_ERR_NOSPACE)
      break;
    free(t->arena);
    t->arena_len = t->arena_len == 0 ? ARENA_FIRST : t->arena_len * 2;
    t->arena = malloc(t->arena_len);
  }
  return err;
}

/* What every message of every plane has to say of its relay. */
static int check_envelope(trial *t, const char *what, const kvrelay_envelope *e) {
  char text[128];
  const kvrelay_verdict v = kvrelay_check_envelope(e);
  if (v.class_ != KVRELAY_CLASS_OK)
    return trial_fail(t, "%s: %s (marker 0x%08" PRIx32 ", version %" PRIu32 ")", what,
                      verdict_text(&v, text), e->contract_marker, e->protocol_version);
  if (!e->relay_present)
    return trial_fail(t, "%s names no relay", what);
  if (t->relay.relay_incarnation != 0 &&
      (e->relay.relay_incarnation != t->relay.relay_incarnation ||
       e->relay.drt_instance_id != t->relay.drt_instance_id))
    return trial_fail(t,
                      "%s is of relay 0x%016" PRIx64 " 0x%016" PRIx64 ", GetRelayInfo said "
                      "0x%016" PRIx64 " 0x%016" PRIx64,
                      what, e->relay.drt_instance_id, e->relay.relay_incarnation,
                      t->relay.drt_instance_id, t->relay.relay_incarnation);
  return TRIAL_PASSED;
}

static const char *method_name(int32_t method) {
  const char *slash = strrchr(kvrelay_method_path(method), '/');
  return slash + 1;
}

int trial_message(trial *t, uint32_t call, int32_t method, void *out) {
  union {
    kvrelay_relay_info info;
    kvrelay_catalog_update catalog;
    kvrelay_filter_update filter;
    kvrelay_readiness_update readiness;
    kvrelay_load_update load;
    kvrelay_envelope envelope; /* what all begin with */
  } own;
  const char *what = method_name(method);
  probe_answer a;
  switch (probe_next(&t->p, call, t->until_ns, &a)) {
  case PROBE_SILENT:
    return silent(t, what);
  case PROBE_END:
    return ended(t, what, &a.status);
  default:
    break;
  }
  const int err = decode_growing(t, method, &a, out != NULL ? out : &own);
  if (err != KVRELAY_OK)
    return trial_fail(t, "%s: a message of %zu bytes is none: %s", what, a.len,
                      kvrelay_strerror(err));
  return check_envelope(t, what, out != NULL ? out : &own.envelope);
}

int trial_first(trial *t, const kvrelay_request *q, void *out) {
  return trial_message(t, trial_call(t, q), q->method, out);
}

int trial_accepted(trial *t, const kvrelay_request *q, const char *what) {
  const uint32_t call = trial_call(t, q);
  char said[sizeof t->why];
  const int verdict = trial_message(t, call, q->method, NULL);
  probe_cancel(&t->p, call);
  if (verdict == TRIAL_PASSED)
    return verdict;
  memcpy(said, t->why, sizeof said);
  show_format(t->why, sizeof t->why, "%s must be accepted: %s", what, said);
  return verdict;
}

int trial_refused(trial *t, uint32_t call, int32_t grpc, int32_t reason, const char *what) {
  char said[512], came[640], must[640];
  probe_answer a;
  status_line(grpc, reason, "", must);
  const int event = probe_next(&t->p, call, t->until_ns, &a);
  probe_cancel(&t->p, call);
  if (event == PROBE_SILENT)
    return trial_fail(t, "%s: neither refused nor answered within %g s, must be %s", what,
                      t->o->timeout_s, must);
  if (event == PROBE_MESSAGE)
    return trial_fail(t, "%s was answered with a message of %zu bytes, must be %s", what, a.len,
                      must);
  if (a.status.grpc == grpc && a.status.reason == reason)
    return TRIAL_PASSED;
  status_line(a.status.grpc, a.status.reason, status_text(&a.status, said), came);
  return trial_fail(t, "%s: came %s; must be %s", what, came, must);
}

/* ---- pools ---- */

int trial_names(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_WATCH_CATALOG);
  char endpoint[512];
  kvrelay_catalog_update m;
  TRY(trial_first(t, &q, &m));
  for (size_t i = 0; i < m.pools_len; i++)
    if (is_pool(t->o->pool, &m.pools[i]))
      return TRIAL_PASSED;
  fprintf(stderr, "kvrelay: no pool '%s'; the catalog has:", t->o->pool);
  for (size_t i = 0; i < m.pools_len; i++)
    fprintf(stderr, " %s", endpoint_name(&m.pools[i].serving_endpoint, endpoint));
  fputc('\n', stderr);
  return TRIAL_NO_POOL;
}

int trial_pool(trial *t) {
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_WATCH_CATALOG);
  const uint32_t call = trial_call(t, &q);
  const kvrelay_descriptor *best = NULL;
  kvrelay_catalog_update m;
  TRY(trial_message(t, call, q.method, &m));
  for (size_t i = 0; i < m.pools_len; i++)
    if (is_pool(t->o->pool, &m.pools[i]) &&
        kvrelay_check_descriptor(&m.pools[i]).class_ == KVRELAY_CLASS_OK &&
        (best == NULL ||
         m.pools[i].producer.ckf_format.bucket_count < best->producer.ckf_format.bucket_count))
      best = &m.pools[i];
  if (best == NULL)
    return trial_skip(t, "the catalog has no usable pool%s%s", t->o->pool != NULL ? " " : "",
                      t->o->pool != NULL ? t->o->pool : "");
  t->producer = best->producer;
  probe_cancel(&t->p, call);
  return TRIAL_PASSED;
}

/* ---- filter streams ---- */

int trial_follow(trial *t, follower *f) {
  memset(f, 0, sizeof *f);
  f->format = (ckf_format){t->producer.ckf_format.seed, t->producer.ckf_format.bucket_count};
  const size_t len = ckf_replica_mem_size(&f->format);
  f->mem = malloc(len);
  if (f->mem == NULL || ckf_replica_init(&f->replica, &f->format, f->mem, len) != CKF_OK)
    return trial_skip(t, "no memory here for a replica of %" PRIu64 " buckets",
                      f->format.bucket_count);
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_SUBSCRIBE_POOL);
  f->call = trial_call(t, &q);
  return TRIAL_PASSED;
}

/* What is said beside the payload; the kinds take turns as they may. */
static int check_numbers(trial *t, const follower *f, const kvrelay_filter_update *u) {
  const bool live = ckf_replica_live(&f->replica);
  if (!kvrelay_producer_equal(&u->producer, &t->producer))
    return trial_fail(t, "a frame of another producer than the one asked for");
  switch (u->kind) {
  case KVRELAY_UPDATE_SNAPSHOT_CHUNK:
    if (live)
      return trial_fail(t, "a snapshot chunk behind the last one");
    if (u->base_sequence != u->sequence || (f->chunks != 0 && u->sequence != f->sequence))
      return trial_fail(t,
                        "chunk %" PRIu32 " says %" PRIu64 " to %" PRIu64
                        ": both numbers of all chunks must be those of the cut",
                        f->chunks, u->base_sequence, u->sequence);
    return TRIAL_PASSED;
  case KVRELAY_UPDATE_DELTA:
    if (!live)
      return trial_fail(t, "a delta between the chunks, behind %" PRIu32 " of them", f->chunks);
    if (u->base_sequence != f->sequence || u->sequence != f->sequence + 1)
      return trial_fail(t,
                        "a delta %" PRIu64 " to %" PRIu64 " behind %" PRIu64
                        ": it must start there and count one",
                        u->base_sequence, u->sequence, f->sequence);
    return TRIAL_PASSED;
  case KVRELAY_UPDATE_HEARTBEAT:
    if (!live)
      return trial_fail(t, "a heartbeat between the chunks, behind %" PRIu32 " of them", f->chunks);
    if (u->base_sequence != f->sequence || u->sequence != f->sequence || u->payload_len != 0)
      return trial_fail(t,
                        "a heartbeat says %" PRIu64 " to %" PRIu64 " with %zu bytes, must be "
                        "%" PRIu64 " twice and empty",
                        u->base_sequence, u->sequence, u->payload_len, f->sequence);
    return TRIAL_PASSED;
  default:
    return trial_fail(t, "a frame of kind %" PRId32, u->kind);
  }
}

static int apply(trial *t, follower *f, const kvrelay_filter_update *u) {
  ckf_cbi1_frame frame;
  int err = ckf_cbi1_decode(&f->format, u->payload, u->payload_len, &frame);
  if (err != CKF_OK)
    return trial_fail(t, "the payload of a frame is no CBI1: %s", ckf_strerror(err));
  const bool is_delta = u->kind == KVRELAY_UPDATE_DELTA;
  if ((frame.kind == CKF_CBI1_DELTA) != is_delta || frame.epoch != u->sequence ||
      (is_delta && frame.base_epoch != u->base_sequence) ||
      frame.dc_id != t->producer.pool_id.dc_id)
    return trial_fail(t, "the header of a payload contradicts its frame, or its pool");
  err = ckf_replica_apply(&f->replica, &frame);
  if (err < 0)
    return trial_fail(t, "%s %" PRIu32 " does not fit behind what came before: %s",
                      is_delta ? "delta" : "chunk", is_delta ? f->deltas : f->chunks,
                      ckf_strerror(err));
  if (is_delta)
    f->deltas++;
  else
    f->chunks++;
  return TRIAL_PASSED;
}

int trial_frame(trial *t, follower *f, uint64_t until_ns) {
  kvrelay_filter_update u;
  probe_answer a;
  switch (probe_next(&t->p, f->call, until_ns, &a)) {
  case PROBE_SILENT:
    return TRIAL_SILENT;
  case PROBE_END:
    return ended(t, "SubscribeKvPool", &a.status);
  default:
    break;
  }
  const int err = decode_growing(t, KVRELAY_METHOD_SUBSCRIBE_POOL, &a, &u);
  if (err != KVRELAY_OK)
    return trial_fail(t, "a frame of %zu bytes is none: %s", a.len, kvrelay_strerror(err));
  TRY(check_envelope(t, "a frame", &u.envelope));
  TRY(check_numbers(t, f, &u));
  if (u.kind == KVRELAY_UPDATE_HEARTBEAT)
    f->heartbeats++;
  else
    TRY(apply(t, f, &u));
  f->sequence = u.sequence;
  return TRIAL_PASSED;
}

int trial_snapshot(trial *t, follower *f) {
  while (!ckf_replica_live(&f->replica)) {
    const int verdict = trial_frame(t, f, t->until_ns);
    if (verdict == TRIAL_SILENT)
      return trial_fail(t, "the snapshot is not whole within %g s: %" PRIu32 " chunks came",
                        t->o->timeout_s, f->chunks);
    TRY(verdict);
  }
  return TRIAL_PASSED;
}

void trial_unfollow(trial *t, follower *f) {
  if (f->call != 0)
    probe_cancel(&t->p, f->call);
  free(f->mem);
  f->mem = NULL;
}

/* ---- one scenario ---- */

/* Who is there; every scenario holds all messages against it. */
static int greet(trial *t) {
  kvrelay_relay_info info;
  const kvrelay_request q = trial_request(t, KVRELAY_METHOD_GET_RELAY_INFO);
  TRY(trial_first(t, &q, &info));
  t->relay = info.envelope.relay;
  return TRIAL_PASSED;
}

int trial_run(const scenario *s, const options *o, char why[TRIAL_WHY_CAP]) {
  trial t;
  memset(&t, 0, sizeof t);
  t.o = o;
  int verdict = TRIAL_FAILED;
  const int err = probe_open(&t.p, o->target);
  if (err != KVRELAY_TRANSPORT_OK) {
    (void)trial_fail(&t, "%s", kvrelay_transport_strerror(err));
  } else {
    t.until_ns = probe_now(&t.p) + (uint64_t)(o->timeout_s * 1e9);
    if (!probe_connect(&t.p, t.until_ns))
      (void)trial_fail(&t, "no connection: %s", t.p.failure);
    else if ((verdict = greet(&t)) == TRIAL_PASSED)
      verdict = s->run(&t);
    probe_close(&t.p);
  }
  free(t.arena);
  memcpy(why, t.why, sizeof t.why);
  return verdict;
}
