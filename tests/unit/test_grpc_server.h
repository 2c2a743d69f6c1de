/* SPDX-License-Identifier: Apache-2.0 */
/* test_grpc_server.h - the toy service behind a gRPC server, and frames made by hand in front of
 * it.
 */
#ifndef KVRELAY_TEST_GRPC_SERVER_H
#define KVRELAY_TEST_GRPC_SERVER_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/raw_http2.h"
#include "support/toy_service.h"
#include "transports/grpc/grpc_server.h"

#define MS UINT64_C(1000000)
#define TOY "/kvrelay.test.Toy/"

static toy_service toy;
static kvrelay_transport *server;
static raw_http2 raw;
static char logged[8192];

static inline void on_log(void *context, int level, const char *event, const char *text) {
  size_t n = strlen(logged);
  (void)context;
  snprintf(logged + n, sizeof logged - n, "%d %s %s\n", level, event, text);
}

static inline kvrelay_grpc_server_config config(void) {
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  cfg.bind = "127.0.0.1:0";
  cfg.log = on_log;
  return cfg;
}

static inline void start(const kvrelay_grpc_server_config *cfg) {
  logged[0] = '\0';
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(cfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  raw_open(&raw, kvrelay_grpc_server_port(server));
}

static inline void start_greeted(void) {
  kvrelay_grpc_server_config cfg = config();
  start(&cfg);
  raw_greet(&raw);
}

/* Runs the server until its side is quiet for a moment. */
static inline void settle(void) {
  for (int quiet = 0; quiet < 3;)
    quiet = server->run_once(server, 2 * MS) == 0 ? quiet + 1 : 0;
}

static inline void finish(void) {
  raw_close(&raw);
  settle();
  cr_expect_eq(toy.opened, toy.closed, "each call is closed once");
  cr_expect_eq(toy.broken, 0);
  server->close(server);
  toy_service_free(&toy);
}

/* The next frame that is not SETTINGS, WINDOW_UPDATE or an answer to them; false when the
 * connection ended or nothing came for a while. */
static inline bool next_frame(raw_http2 *r, raw_frame *frame, uint64_t wait_ms) {
  uint64_t until = server->now_ns(server) + wait_ms * MS;
  for (;;) {
    while (raw_next(r, frame))
      if (frame->type != RAW_SETTINGS && frame->type != RAW_WINDOW_UPDATE)
        return true;
    if (r->eof || server->now_ns(server) >= until)
      return false;
    server->run_once(server, 5 * MS);
  }
}

static inline raw_frame frame_of(uint8_t type) {
  raw_frame frame;
  cr_assert(next_frame(&raw, &frame, 2000), "no frame of type %d", type);
  cr_assert_eq(frame.type, type, "type %d, wanted %d, headers %s", frame.type, type, frame.headers);
  return frame;
}

static inline bool has(const raw_frame *frame, const char *line) {
  return strstr(frame->headers, line) != NULL;
}

/* A single header block with END_STREAM and this status. */
static inline raw_frame only_trailers(const char *grpc_status_line) {
  raw_frame f = frame_of(RAW_HEADERS);
  cr_expect(f.flags & NGHTTP2_FLAG_END_STREAM);
  cr_expect(has(&f, ":status: 200\n") && has(&f, "content-type: application/grpc\n"), "%s",
            f.headers);
  cr_expect(has(&f, grpc_status_line), "%s, wanted %s", f.headers, grpc_status_line);
  return f;
}

/* HEADERS, one message, trailers with status 0. */
static inline void expect_answer(raw_http2 *r, uint32_t stream, const void *message, size_t len) {
  raw_frame f;
  cr_assert(next_frame(r, &f, 2000));
  cr_assert_eq(f.type, RAW_HEADERS);
  cr_expect_eq(f.stream, stream);
  cr_expect(has(&f, ":status: 200\n") && !(f.flags & NGHTTP2_FLAG_END_STREAM), "%s", f.headers);
  cr_assert(next_frame(r, &f, 2000));
  cr_assert_eq(f.type, RAW_DATA);
  cr_assert_eq(f.len, 5 + len);
  cr_expect_arr_eq(f.payload + 5, message, len);
  cr_assert(next_frame(r, &f, 2000));
  cr_assert_eq(f.type, RAW_HEADERS);
  cr_expect(f.flags & NGHTTP2_FLAG_END_STREAM);
  cr_expect_str_eq(f.headers, "grpc-status: 0\n");
}

static inline void expect_serving(void) {
  raw_http2 other;
  raw_open(&other, kvrelay_grpc_server_port(server));
  raw_greet(&other);
  raw_send_request(&other, 1, TOY "Echo", "", "still here", 10);
  expect_answer(&other, 1, "still here", 10);
  raw_close(&other);
}

#define HEAD                                                                                       \
  ":method: POST\n:scheme: http\n:path: " TOY                                                      \
  "Echo\n:authority: x\ncontent-type: application/grpc\n"

#endif
