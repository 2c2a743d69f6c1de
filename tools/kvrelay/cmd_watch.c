/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay watch: the filter streams, a line per frame.  Every frame is checked by a consumer that
 * keeps a replica. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kvrelay_pb.h"
#include "session.h"

/* Stands between transport and client and shows what passes. */
typedef struct tap {
  kvrelay_caller caller; /* first */
  kvrelay_caller *behind;
  session *s;
  uint64_t shown;
  bool found; /* what --pool means: it may go and come back */
} tap;

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  tap *t = (tap *)(void *)self;
  t->behind->connection(t->behind, state, err, text, retry_ns, now_ns);
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  tap *t = (tap *)(void *)self;
  t->behind->admitted(t->behind, call, now_ns);
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  tap *t = (tap *)(void *)self;
  t->behind->end(t->behind, call, status, now_ns);
}

/* The pool of a frame in the catalog that is in force; false when it is none. */
static bool find_pool(const session *s, const kvrelay_producer *producer, kvrelay_pool_view *view) {
  uint64_t revision;
  uint32_t pools;
  if (!kvrelay_consumer_catalog(&s->consumer, &revision, &pools))
    return false;
  for (uint32_t i = 0; i < pools; i++)
    if (kvrelay_consumer_pool_get(&s->consumer, i, session_now(s), view) == KVRELAY_OK &&
        kvrelay_producer_equal(&view->descriptor->producer, producer))
      return true;
  return false;
}

static void show(tap *t, const kvrelay_filter_update *u, const char *endpoint) {
  static const char *const kinds[] = {"unknown", "snapshot", "delta", "heartbeat"};
  const char *kind = kinds[u->kind >= 1 && u->kind <= 3 ? u->kind : 0];
  ckf_format format = {u->producer.ckf_format.seed, u->producer.ckf_format.bucket_count};
  ckf_cbi1_frame frame;
  char detail[96] = "";
  int err =
      u->payload_len == 0 ? CKF_OK : ckf_cbi1_decode(&format, u->payload, u->payload_len, &frame);
  struct timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  uint64_t wall_us = (uint64_t)wall.tv_sec * 1000000u + (uint64_t)wall.tv_nsec / 1000u;
  if (u->payload_len != 0 && err == CKF_OK && u->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK)
    snprintf(detail, sizeof detail, "chunk %" PRIu32 " of %" PRIu32, frame.chunk_index + 1,
             frame.chunk_count);
  else if (u->payload_len != 0 && err == CKF_OK)
    snprintf(detail, sizeof detail, "%" PRIu32 " buckets", frame.image_count);
  else if (err != CKF_OK)
    snprintf(detail, sizeof detail, "bad frame: %s", ckf_errname(err));
  if (t->s->o->json)
    print_json(json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:s}", "endpoint", endpoint, "kind",
                         kind, "base_sequence", json_u64(u->base_sequence), "sequence",
                         json_u64(u->sequence), "send_ts_us", json_u64(u->send_ts_us), "age_us",
                         json_difference(wall_us, u->send_ts_us), "bytes", json_u64(u->payload_len),
                         "detail", detail));
  else
    printf("%-30s %-9s %" PRIu64 " -> %" PRIu64 "  %zu bytes  %s  sent %.1f ms ago\n", endpoint,
           kind, u->base_sequence, u->sequence, u->payload_len, detail,
           ((double)wall_us - (double)u->send_ts_us) / 1000);
  show_flush();
  t->shown++;
}

/* Filter frames are the messages that decode as one and name a producer of the catalog. */
static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  tap *t = (tap *)(void *)self;
  kvrelay_filter_update update;
  kvrelay_pool_view view;
  char endpoint[512];
  if (kvrelay_pb_decode_filter(bytes, len, NULL, &update) == KVRELAY_OK &&
      update.producer.present && find_pool(t->s, &update.producer, &view))
    show(t, &update, endpoint_name(&view.descriptor->serving_endpoint, endpoint));
  t->behind->message(t->behind, call, bytes, len, now_ns);
}

/* Pools that were asked for are followed; with --pool only that one, which must be in the first
 * catalog.  To be done for each catalog: another relay may come with the revision of the one
 * before.  EXIT_FINE, or EXIT_NO after a message. */
static int follow(tap *t) {
  const session *s = t->s;
  uint64_t revision;
  uint32_t pools;
  kvrelay_pool_view v;
  char endpoint[512];
  if (!kvrelay_consumer_catalog(&s->consumer, &revision, &pools))
    return EXIT_FINE;
  t->found = t->found || s->o->pool == NULL;
  for (uint32_t i = 0; i < pools; i++)
    if (kvrelay_consumer_pool_get(&s->consumer, i, session_now(s), &v) == KVRELAY_OK &&
        is_pool(s->o->pool, v.descriptor)) {
      (void)!kvrelay_consumer_follow(&t->s->consumer, i, true, session_now(s));
      t->found = true;
    }
  if (t->found)
    return EXIT_FINE;
  fprintf(stderr, "kvrelay: no pool '%s'; the catalog has:", s->o->pool);
  for (uint32_t i = 0; i < pools; i++)
    if (kvrelay_consumer_pool_get(&s->consumer, i, session_now(s), &v) == KVRELAY_OK)
      fprintf(stderr, " %s", endpoint_name(&v.descriptor->serving_endpoint, endpoint));
  fputc('\n', stderr);
  return EXIT_NO;
}

static int take_event(tap *t, const kvrelay_event_out *event) {
  session *s = t->s;
  kvrelay_pool_view v;
  char endpoint[512], said[512];
  session_tell(s, event);
  if (event->kind == KVRELAY_EVENT_CATALOG)
    return follow(t);
  if (event->kind == KVRELAY_EVENT_POOL_VOID &&
      kvrelay_consumer_pool_get(&s->consumer, event->pool, session_now(s), &v) == KVRELAY_OK)
    fprintf(stderr, "kvrelay: %s lost (%s)\n",
            endpoint_name(&v.descriptor->serving_endpoint, endpoint),
            event->fault != KVRELAY_FAULT_NONE ? fault_name(event->fault)
                                               : end_text(&event->status, said));
  return EXIT_FINE;
}

int cmd_watch(const options *o) {
  session s;
  tap t;
  memset(&t, 0, sizeof t);
  int code = session_open(&s, o, false);
  t.s = &s;
  t.behind = s.tap;
  t.caller.connection = on_connection;
  t.caller.admitted = on_admitted;
  t.caller.message = on_message;
  t.caller.end = on_end;
  if (code == EXIT_FINE)
    code = session_connect(&s, &t.caller);
  while (code == EXIT_FINE && (o->count == 0 || t.shown < o->count)) {
    kvrelay_event_out event;
    code = session_turn(&s);
    while (code == EXIT_FINE && kvrelay_consumer_event_next(&s.consumer, &event) == 1)
      code = take_event(&t, &event);
    if (t.shown != 0)
      session_answered(&s);
  }
  session_close(&s);
  return code;
}
