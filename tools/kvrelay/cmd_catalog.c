/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay catalog: the pools of a relay, once or at each change. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "session.h"
#include "table.h"
#include "text.h"

/* "llama, also a, b"; adapters with the name engines use. */
static void model_text(const kvrelay_registration *r, char out[512]) {
  char text[512];
  size_t n = show_format(out, 512, "%s", printable(r->canonical_model_id, text));
  if (r->target.kind == KVRELAY_TARGET_LORA)
    n += show_format(out + n, 512 - n, " [adapter %s]", printable(r->target.adapter, text));
  for (size_t i = 0; i < r->aliases_len; i++)
    n += show_format(out + n, 512 - n, "%s%s", i == 0 ? ", also " : ", ",
                     printable(r->aliases[i], text));
}

static void show_table(const session *s, uint64_t revision, uint32_t pools) {
  static const char *const header[] = {"ENDPOINT", "MODEL",   "BLOCK",      "HASH",
                                       "ROLES",    "BUCKETS", "GENERATION", "VERDICT"};
  table t;
  kvrelay_relay_identity relay = {0, 0};
  (void)kvrelay_consumer_relay(&s->consumer, &relay);
  printf("relay incarnation 0x%016" PRIx64 ", catalog revision %" PRIu64 ", %" PRIu32 " pool%s\n",
         relay.relay_incarnation, revision, pools, pools == 1 ? "" : "s");
  table_init(&t, 8, header);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    char endpoint[512], model[512], verdict[128], roles[128] = "";
    if (kvrelay_consumer_pool_get(&s->consumer, i, session_now(s), &v) != KVRELAY_OK)
      continue;
    const kvrelay_descriptor *d = v.descriptor;
    for (size_t j = 0; j < d->pool_roles.len; j++) {
      const char *role = kvrelay_role_name(d->pool_roles.ptr[j]);
      size_t n = strlen(roles);
      snprintf(roles + n, sizeof roles - n, "%s%s", j == 0 ? "" : ",", role != NULL ? role : "?");
    }
    for (size_t j = 0; j < (d->registrations_len == 0 ? 1 : d->registrations_len); j++) {
      table_row(&t);
      if (j < d->registrations_len) {
        model_text(&d->registrations[j], model);
        table_cell(&t, 1, "%s", model);
      }
      if (j != 0) {
        table_cell(&t, 0, "%s", " ");
        for (int column = 2; column < 8; column++)
          table_cell(&t, column, "%s", " ");
        continue;
      }
      table_cell(&t, 0, "%s", endpoint_name(&d->serving_endpoint, endpoint));
      table_cell(&t, 2, "%" PRIu32, d->query_semantics.kv_block_size);
      table_cell(&t, 3, "%s", hash_format_name(d->query_semantics.hash_format));
      table_cell(&t, 4, "%s", roles);
      table_cell(&t, 5, "%" PRIu64, d->producer.ckf_format.bucket_count);
      table_cell(&t, 6, "%" PRIu64, d->producer.layout_generation);
      table_cell(&t, 7, "%s", verdict_text(&v.verdict, verdict));
    }
  }
  table_print(&t, stdout);
}

static void show_json(const session *s, uint64_t revision, uint32_t pools) {
  kvrelay_relay_identity relay = {0, 0};
  json_t *list = json_array();
  (void)kvrelay_consumer_relay(&s->consumer, &relay);
  for (uint32_t i = 0; i < pools; i++) {
    kvrelay_pool_view v;
    if (kvrelay_consumer_pool_get(&s->consumer, i, session_now(s), &v) == KVRELAY_OK)
      json_add(list, json_pool(&v));
  }
  print_json(json_pack("{s:o, s:o, s:o, s:o}", "target", json_text(text_of(s->o->target)),
                       "relay_incarnation", json_hex(relay.relay_incarnation), "revision",
                       json_u64(revision), "pools", list));
}

static int watch(session *s) {
  uint64_t shown = 0;
  for (;;) {
    int code = session_turn(s);
    if (code != EXIT_FINE)
      return code;
    kvrelay_event_out event;
    while (kvrelay_consumer_event_next(&s->consumer, &event) == 1) {
      uint64_t revision;
      uint32_t pools;
      if (s->o->watch)
        session_tell(s, &event);
      if (event.kind != KVRELAY_EVENT_CATALOG ||
          !kvrelay_consumer_catalog(&s->consumer, &revision, &pools))
        continue;
      session_answered(s);
      if (s->o->json)
        show_json(s, revision, pools);
      else
        show_table(s, revision, pools);
      show_flush();
      if (!s->o->watch || ++shown == s->o->count)
        return EXIT_FINE;
    }
  }
}

int cmd_catalog(const options *o) {
  session s;
  int code = session_open(&s, o, false);
  if (code == EXIT_FINE)
    code = session_connect(&s, NULL);
  if (code == EXIT_FINE)
    code = watch(&s);
  session_close(&s);
  return code;
}
