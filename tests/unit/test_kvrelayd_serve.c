/* SPDX-License-Identifier: Apache-2.0 */

/* Pools of the daemon that cannot be published, cannot be read into, or break: each is told in the
 * log, leaves nothing behind, and is tried again. */

#include "kvrelay_pb.h"
#include "tools/kvrelayd/front.h"
#include "tools/kvrelayd/serve.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char yaml[] = "version: 1\n"
                           "relay: {dc: dc-a, expected_unique_blocks: 1000}\n"
                           "endpoints:\n"
                           "  - namespace: prod\n"
                           "    component: backend\n"
                           "    endpoint: generate\n"
                           "    model: llama\n"
                           "    block_size: 32\n"
                           "    hash_format: standard\n"
                           "    workers:\n"
                           "      - id: 7\n"
                           "        events: {type: engine, endpoint: 'tcp://127.0.0.1:1'}\n";

typedef struct world {
  char config_path[32], sources_path[32];
  FILE *log; /* what went to standard error */
  config *config;
  plan *plan;
  scope scope;
  serve serve;
  served_pool *pool; /* the only one */
  uint64_t now_ns;
} world;

static void write_file(const char *path, const char *text) {
  FILE *f = fopen(path, "w");
  cr_assert_not_null(f);
  cr_assert_gt(fputs(text, f), 0);
  cr_assert_eq(fclose(f), 0);
}

static void new_file(char path[32], const char *text) {
  strcpy(path, "/tmp/kvrelayd-XXXXXX");
  int fd = mkstemp(path);
  cr_assert_geq(fd, 0);
  cr_assert_eq(close(fd), 0);
  write_file(path, text);
}

static void select_namespace(const world *w, const char *name) {
  char text[128];
  snprintf(text, sizeof text, "{\"version\":1,\"sources\":[{\"namespace\":\"%s\"}]}", name);
  write_file(w->sources_path, text);
}

/* Everything but serve_open. */
static void open_world(world *w, const char *namespace_) {
  int code = 0;
  memset(w, 0, sizeof *w);
  w->log = tmpfile();
  cr_assert(w->log != NULL && dup2(fileno(w->log), STDERR_FILENO) == STDERR_FILENO);
  new_file(w->config_path, yaml);
  new_file(w->sources_path, "-");
  select_namespace(w, namespace_);
  w->config = config_load(w->config_path, stdout, &code);
  cr_assert_not_null(w->config, "%d", code);
  w->plan = plan_make(w->config, stdout);
  cr_assert_not_null(w->plan);
  w->now_ns = kvrelay_now_ns();
  cr_assert_eq(scope_open(&w->scope, w->sources_path, NULL, w->now_ns), 0);
  cr_assert_eq(serve_reserve(&w->serve, w->plan), 0);
  cr_assert_eq(w->serve.pools_count, 1);
  w->pool = &w->serve.pools[0];
}

static void close_world(world *w) {
  serve_close(&w->serve);
  scope_close(&w->scope);
  plan_free(w->plan);
  config_free(w->config);
  unlink(w->config_path);
  unlink(w->sources_path);
  fclose(w->log);
}

static void change_scope(world *w, const char *namespace_) {
  select_namespace(w, namespace_);
  w->now_ns += 2000000000u;
  cr_assert(scope_poll(&w->scope, w->now_ns));
  serve_scope_changed(&w->serve, w->now_ns);
}

/* How often the log names the event. */
static int logged(const world *w, const char *event) {
  char line[1024];
  int times = 0;
  rewind(w->log);
  while (fgets(line, sizeof line, w->log) != NULL)
    times += strstr(line, event) != NULL;
  return times;
}

Test(kvrelayd_serve, a_pool_without_ranks_is_in_no_catalog_and_is_tried_again) {
  world w;
  open_world(&w, "other");
  cr_assert_eq(serve_open(&w.serve, &w.scope), 0);
  cr_assert_null(w.pool->pool);
  const size_t ranks_len = w.pool->ranks_len;
  w.pool->ranks_len = 0;
  change_scope(&w, "prod");
  cr_assert_null(w.pool->pool);
  cr_assert_eq(logged(&w, "event=pool_not_published"), 1);
  w.pool->ranks_len = ranks_len;
  change_scope(&w, "prod\"},{\"namespace\":\"third"); /* selected as before */
  cr_assert_not_null(w.pool->pool, "it was in the catalog, or nobody tried");
  cr_assert_eq(logged(&w, "event=pool_not_published"), 1);
  change_scope(&w, "other");
  cr_assert_null(w.pool->pool);
  cr_assert_eq(logged(&w, "event=pool_left_out"), 1);
  close_world(&w);
}

Test(kvrelayd_serve, S62_a_pool_for_which_the_catalog_has_no_room_is_left_out_and_counted) {
  world w;
  open_world(&w, "prod");
  const size_t limit = w.serve.catalog_limit;
  cr_assert(limit <= 8388608 && limit > 8000000);
  w.serve.catalog_limit = 100;
  cr_assert_eq(serve_open(&w.serve, &w.scope), 0, "the others are served");
  cr_assert_null(w.pool->pool);
  cr_assert(w.serve.catalog_full == 1 && w.serve.catalog_bytes == 0);
  cr_assert_eq(logged(&w, "event=catalog_full pool=prod/backend/generate pools_left_out=1"), 1);
  w.serve.catalog_limit = limit;
  change_scope(&w, "prod\"},{\"namespace\":\"third");
  cr_assert_not_null(w.pool->pool, "there is room now");
  const size_t share = w.serve.catalog_bytes;
  /* What is counted is enough for the message, and not much more. */
  const kvrelay_descriptor *published = kvrelay_pool_descriptor(w.pool->pool);
  const ptrdiff_t len = kvrelay_pb_encode_descriptor(published, NULL, 0);
  cr_assert(len > 0 && share >= (size_t)len + 6 && share < (size_t)len + 80);
  change_scope(&w, "other");
  cr_assert_eq(w.serve.catalog_bytes, 0);
  cr_assert_eq(w.serve.catalog_full, 1);
  close_world(&w);
}

Test(kvrelayd_serve, S62_large_messages_are_told_once) {
  world w;
  bool told = false;
  open_world(&w, "prod");
  front_tell_large("readiness", 3145727, &told);
  cr_assert_eq(logged(&w, "event=message_large"), 0);
  for (size_t bytes = 3145728; bytes < 3145740; bytes++)
    front_tell_large("readiness", bytes, &told);
  cr_assert_eq(logged(&w, "level=warn event=message_large plane=readiness bytes=3145728"), 1);
  front_tell_large("readiness", 100, &told);
  front_tell_large("readiness", 4000000, &told);
  cr_assert_eq(logged(&w, "event=message_large"), 2);
  close_world(&w);
}

Test(kvrelayd_serve, a_pool_that_cannot_be_published_ends_the_start) {
  world w;
  open_world(&w, "prod");
  const size_t ranks_len = w.pool->ranks_len;
  w.pool->ranks_len = 0;
  cr_assert_eq(serve_open(&w.serve, &w.scope), 70);
  cr_assert_null(w.pool->pool);
  cr_assert_eq(logged(&w, "event=pool_not_published"), 1);
  w.pool->ranks_len = ranks_len;
  close_world(&w);
}

Test(kvrelayd_serve, a_source_that_cannot_start_is_named) {
  world w;
  open_world(&w, "prod");
  cr_assert_eq(w.pool->feeds_count, 1);
  const size_t source_len = w.pool->feeds[0].source_len;
  w.pool->feeds[0].source_len = 0;
  cr_assert_eq(serve_open(&w.serve, &w.scope), 70);
  cr_assert_eq(logged(&w, "event=source_not_started source=prod/backend/generate/7.0"), 1);
  w.pool->feeds[0].source_len = source_len;
  close_world(&w);
}

/* The relay finds it out when all else of the turn is done. */
Test(kvrelayd_serve, a_fenced_producer_starts_again_in_the_next_turn_at_once) {
  world w;
  open_world(&w, "prod");
  cr_assert_eq(serve_open(&w.serve, &w.scope), 0);
  w.now_ns = kvrelay_now_ns();
  serve_poll(&w.serve, w.now_ns);
  cr_assert_gt(serve_deadline_ns(&w.serve), w.now_ns);
  w.pool->producer.filter_.format_.bucket_count /= 2;
  uint64_t call;
  kvrelay_status status;
  kvrelay_request request = {.method = KVRELAY_METHOD_SUBSCRIBE_POOL,
                             .contract_marker = KVRELAY_CONTRACT_MARKER,
                             .subscriber_id = {(const uint8_t *)"a", 1}};
  request.expected_producer = kvrelay_pool_descriptor(w.pool->pool)->producer;
  cr_assert_eq(kvrelay_relay_call_open(&w.serve.relay, &request, w.now_ns, &call, &status),
               KVRELAY_ERR_REFUSED);
  cr_assert_eq(serve_deadline_ns(&w.serve), 0);
  serve_poll(&w.serve, w.now_ns);
  cr_assert(w.pool->pool != NULL && kvrelay_pool_fenced(w.pool->pool) == KVRELAY_OK);
  cr_assert_eq(logged(&w, "event=producer_fenced"), 1);
  serve_poll(&w.serve, w.now_ns);
  cr_assert_gt(serve_deadline_ns(&w.serve), w.now_ns);
  close_world(&w);
}

/* So that it may be published when the scope changes again. */
Test(kvrelayd_serve, a_fenced_producer_that_cannot_be_published_has_its_sources_started) {
  world w;
  open_world(&w, "prod");
  cr_assert_eq(serve_open(&w.serve, &w.scope), 0);
  serve_poll(&w.serve, kvrelay_now_ns());
  cr_assert(!w.pool->feeds[0].stirred);
  const size_t ranks_len = w.pool->ranks_len;
  w.pool->ranks_len = 0;
  serve_pool_fence(w.pool, w.now_ns);
  cr_assert_null(w.pool->pool);
  cr_assert(w.pool->feeds[0].stirred);
  w.pool->ranks_len = ranks_len;
  change_scope(&w, "prod\"},{\"namespace\":\"third");
  cr_assert_not_null(w.pool->pool);
  close_world(&w);
}
