/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

static void on_connection(void *context, int state, int err, const char *text, uint64_t retry_ns) {
  session *s = context;
  (void)retry_ns;
  if (state == KVRELAY_CONNECTION_READY) {
    s->connected = true;
    s->failed = false;
  } else if (state == KVRELAY_CONNECTION_FAILED) {
    s->failed = true;
    show_format(s->failure, sizeof s->failure, "%s",
                text != NULL && text[0] != 0 ? text : kvrelay_transport_strerror(err));
  }
}

int session_open(session *s, const options *o, bool subscribe_all) {
  memset(s, 0, sizeof *s);
  s->o = o;
  kvrelay_consumer_config cfg = kvrelay_consumer_config_default();
  cfg.subscriber_id.ptr = (const uint8_t *)o->subscriber_id;
  cfg.subscriber_id.len = strlen(o->subscriber_id);
  cfg.subscribe_all = subscribe_all;
  if (!kvrelay_subscriber_id_valid(cfg.subscriber_id)) {
    fprintf(stderr, "kvrelay: --subscriber-id must be 1 to 128 bytes without control characters\n");
    return EXIT_USAGE;
  }
  size_t len = kvrelay_consumer_mem_size(&cfg);
  s->consumer_mem = malloc(len);
  kvrelay_client_config client = kvrelay_client_config_default(&s->consumer);
  client.connection = on_connection;
  client.context = s;
  if (s->consumer_mem == NULL ||
      kvrelay_consumer_init(&s->consumer, &cfg, s->consumer_mem, len, 0) != KVRELAY_OK ||
      kvrelay_client_open(&client, &s->client) != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: no memory\n");
    return EXIT_SYSTEM;
  }
  s->tap = kvrelay_client_caller(s->client);
  return EXIT_FINE;
}

int session_connect(session *s, kvrelay_caller *tap) {
  if (tap != NULL)
    s->tap = tap;
  int err = wire_open(s->o->target, s->tap, &s->wire);
  if (err != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: %s: %s\n", s->o->target, kvrelay_transport_strerror(err));
    return err == KVRELAY_TRANSPORT_ERR_ADDRESS ? EXIT_USAGE : EXIT_SYSTEM;
  }
  kvrelay_client_attach(s->client, s->wire);
  s->give_up_ns = session_now(s) + (uint64_t)(s->o->timeout_s * 1e9);
  return EXIT_FINE;
}

uint64_t session_now(const session *s) { return s->wire->base.now_ns(&s->wire->base); }

void session_answered(session *s) { s->give_up_ns = KVRELAY_TIME_NONE; }

void session_tell(session *s, const kvrelay_event_out *event) {
  char said[512];
  if (event->kind == KVRELAY_EVENT_CATALOG && s->lost)
    fprintf(stderr, "kvrelay: %s is back\n", s->o->target);
  if (event->kind == KVRELAY_EVENT_CATALOG)
    s->lost = false;
  if (event->kind != KVRELAY_EVENT_CATALOG_VOID || s->lost)
    return;
  s->lost = true;
  fprintf(stderr, "kvrelay: %s lost (%s), trying again\n", s->o->target,
          end_text(&event->status, said));
}

int session_turn(session *s) {
  if (kvrelay_client_run(s->client, session_now(s)) != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "kvrelay: %s speaks another contract than dynamo.kvrelay.v1\n", s->o->target);
    return EXIT_CONTRACT;
  }
  uint64_t now = session_now(s), until = kvrelay_client_deadline_ns(s->client);
  if (until > s->give_up_ns)
    until = s->give_up_ns;
  uint64_t wait = until <= now ? 0 : until - now;
  if (s->wire->base.run_once(&s->wire->base, wait > 1000000000u ? 1000000000u : wait) < 0) {
    fprintf(stderr, "kvrelay: %s: the connection's loop ended\n", s->o->target);
    return EXIT_UNREACHABLE;
  }
  if (s->failed && !s->connected) {
    fprintf(stderr, "kvrelay: %s cannot be reached: %s\n", s->o->target, s->failure);
    return EXIT_UNREACHABLE;
  }
  if (session_now(s) < s->give_up_ns)
    return EXIT_FINE;
  fprintf(stderr, "kvrelay: %s: no whole answer within %g s%s%s; --timeout waits longer\n",
          s->o->target, s->o->timeout_s, s->failure[0] != 0 ? ": " : "", s->failure);
  return s->connected ? EXIT_UNDECIDED : EXIT_UNREACHABLE;
}

void session_close(session *s) {
  if (s->wire != NULL)
    s->wire->base.close(&s->wire->base);
  if (s->client != NULL)
    kvrelay_client_close(s->client);
  free(s->consumer_mem);
}
