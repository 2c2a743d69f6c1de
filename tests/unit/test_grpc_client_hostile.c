/* SPDX-License-Identifier: Apache-2.0 */
/* The gRPC client against servers that mean harm: what they send costs them the connection, or
 * nothing, and never memory; and a server's bytes cut and split everywhere. */
#include <errno.h>
#include <malloc.h>

#include "test_grpc_client.h"

#define FLOOD_BYTES ((size_t)8 << 20)
/* A session, its header tables and a call; nothing grows with what a flood sends. */
#define HEAP_MAX ((size_t)512 << 10)

static size_t heap_peak;

/* What is allocated now, large blocks of their own mapping included. */
static size_t heap(void) {
  const struct mallinfo2 m = mallinfo2();
  return m.uordblks + m.hblkhd;
}

/* False where a sanitizer allocates. */
static bool heap_is_counted(void) {
  const size_t before = heap();
  void *volatile probe = malloc(100000);
  const bool counted = heap() >= before + 100000;
  free(probe);
  return counted;
}

static bool failed(void) { return strchr(caller.states, 'F') != NULL; }

static void pump(const void *bytes_, size_t len) {
  const uint8_t *bytes = bytes_;
  while (len > 0 && !failed()) {
    const ssize_t n = send(peer.fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN)
      break;
    bytes += n < 0 ? 0 : n;
    len -= n < 0 ? 0 : (size_t)n;
    client->base.run_once(&client->base, n < 0 ? MS : 0);
    const size_t now = heap();
    heap_peak = now > heap_peak ? now : heap_peak;
  }
}

static size_t frame(uint8_t *out, uint8_t type, uint8_t flags, uint32_t stream, const void *payload,
                    size_t len) {
  const uint8_t head[9] = {(uint8_t)(len >> 16),
                           (uint8_t)(len >> 8),
                           (uint8_t)len,
                           type,
                           flags,
                           (uint8_t)(stream >> 24),
                           (uint8_t)(stream >> 16),
                           (uint8_t)(stream >> 8),
                           (uint8_t)stream};
  memcpy(out, head, 9);
  if (len > 0)
    memcpy(out + 9, payload, len);
  return 9 + len;
}

/* One call is open on stream 1, its answer has begun. */
static void begin_flood(bool with_headers) {
  scripted();
  ready();
  cr_assert_eq(call(1, "Echo", "x"), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  if (with_headers) {
    raw_send_headers(&peer, 0, 1, ANSWER);
    RUN_UNTIL(caller.call[1].admitted == 1);
  }
  heap_peak = heap();
}

static void flood(const char *name, const uint8_t *bytes, size_t len, bool breaks) {
  const size_t before = heap();
  size_t sent = 0;
  for (; sent < FLOOD_BYTES && !failed(); sent += len)
    pump(bytes, len);
  run_ms(10);
  printf("# %-28s %8zu bytes sent, heap + %zu bytes at most\n", name, sent, heap_peak - before);
  cr_expect_eq(failed(), breaks, "%s: %s", name, caller.text);
  cr_expect_eq(caller.call[1].ends, breaks, "%s", name);
  cr_expect_leq(heap_peak - before, HEAP_MAX, "%s: %zu", name, heap_peak - before);
  finish_scripted();
}

/* The same frame again and again, many in one write. */
static void flood_frames(const char *name, uint8_t type, uint8_t flags, uint32_t stream,
                         const void *payload, size_t len, bool breaks) {
  static uint8_t many[32768];
  size_t n = 0;
  while (n + 9 + len <= sizeof many)
    n += frame(many + n, type, flags, stream, payload, len);
  flood(name, many, n, breaks);
}

Test(grpc_client_hostile, floods_of_control_frames) {
  begin_flood(true);
  flood_frames("SETTINGS", RAW_SETTINGS, 0, 0, NULL, 0, true);
  begin_flood(true);
  flood_frames("PING", RAW_PING, 0, 0, "01234567", 8, true);
}

Test(grpc_client_hostile, floods_that_cost_nothing) {
  begin_flood(true);
  flood_frames("unknown frames", 0x77, 0xff, 1, "0123456789", 10, false);
  begin_flood(true);
  flood_frames("empty DATA", RAW_DATA, 0, 1, NULL, 0, false);
  begin_flood(true);
  flood_frames("padding", RAW_DATA, NGHTTP2_FLAG_PADDED, 1, "\x07\0\0\0\0\0\0\0", 8, false);
  begin_flood(true);
  flood_frames("SETTINGS acknowledged", RAW_SETTINGS, NGHTTP2_FLAG_ACK, 0, NULL, 0, true);
}

Test(grpc_client_hostile, windows) {
  begin_flood(true);
  flood_frames("WINDOW_UPDATE beyond 2^31", RAW_WINDOW_UPDATE, 0, 0, "\x7f\xff\xff\xff", 4, true);
  begin_flood(true);
  flood_frames("WINDOW_UPDATE of 0", RAW_WINDOW_UPDATE, 0, 0, "\0\0\0\0", 4, true);
}

Test(grpc_client_hostile, endless_continuation) {
  static uint8_t block[16384 + 9], chunk[16384];
  begin_flood(false);
  for (size_t i = 0; i + 4 <= sizeof chunk; i += 4)
    memcpy(chunk + i, "\0\1x\0", 4); /* "x: ", not indexed */
  const size_t n = frame(block, RAW_HEADERS, 0, 1, chunk, sizeof chunk);
  pump(block, n);
  frame(block, RAW_CONTINUATION, 0, 1, chunk, sizeof chunk);
  flood("CONTINUATION", block, n, true);
}

Test(grpc_client_hostile, header_bombs) {
  static uint8_t bomb[16384 + 9], block[16384];
  size_t n = 0;
  begin_flood(false);
  /* A value of 4 000 bytes enters the table; then each byte repeats it. */
  block[n++] = 0x40;
  block[n++] = 1;
  block[n++] = 'x';
  block[n++] = 0x7f; /* 127 + 3873 */
  block[n++] = 0xa1;
  block[n++] = 0x1e;
  memset(block + n, 'v', 4000);
  n += 4000;
  memset(block + n, 0x80 | 62, 12000);
  n += 12000;
  pump(bomb, frame(bomb, RAW_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, block, n));
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_neq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  finish_scripted();
}

Test(grpc_client_hostile, early_headers_without_end) {
  static uint8_t many[32768];
  size_t n = 0;
  begin_flood(false);
  /* ":status: 103" and a header of 20 bytes, never indexed. */
  static const uint8_t block[] = "\x08\x03"
                                 "103"
                                 "\0\1x\x14"
                                 "01234567890123456789";
  while (n + 9 + sizeof block <= sizeof many)
    n += frame(many + n, RAW_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, block, sizeof block - 1);
  flood("HEADERS of 103", many, n, false);
}

Test(grpc_client_hostile, announced_lengths) {
  begin_flood(true);
  const size_t before = heap();
  raw_send_frame(&peer, RAW_DATA, 0, 1, "\0\xff\xff\xff\xff", 5);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  /* 8 MiB announced, 1 000 bytes sent one by one. */
  cr_assert_eq(call(2, "Echo", "x"), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  raw_send_headers(&peer, 0, 3, ANSWER);
  raw_send_frame(&peer, RAW_DATA, 0, 3, "\0\0\x80\0\0", 5);
  for (int i = 0; i < 1000; i++) {
    raw_send_frame(&peer, RAW_DATA, 0, 3, "x", 1);
    client->base.run_once(&client->base, 0);
  }
  run_ms(5);
  cr_expect_eq(caller.call[2].ends, 0);
  cr_expect(heap() > before + 1000 || !heap_is_counted(), "what came is kept");
  printf("# 8 MiB announced, 1 000 sent: heap + %zu bytes\n",
         heap() > before ? heap() - before : 0);
  cr_expect(heap() < before + 65536);
  finish_scripted();
}

/* ---- every cut, every split ---- */

static uint8_t script[512];
static size_t script_len;

/* A whole answer as bytes, SETTINGS included; the encoder starts anew with each connection. */
static void write_script(void) {
  size_t len;
  const uint8_t *block;
  script_len = frame(script, RAW_SETTINGS, 0, 0, "\0\3\0\0\0\144", 6);
  block = raw_encode(&peer, ANSWER, &len);
  script_len += frame(script + script_len, RAW_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, block, len);
  script_len += frame(script + script_len, RAW_DATA, 0, 1, "\0\0\0\0\3abc\0\0\0\0\0\0\0", 15);
  script_len += frame(script + script_len, RAW_DATA, 0, 1, "\0\0\1d", 4);
  block = raw_encode(&peer, "grpc-status: 0\n", &len);
  script_len += frame(script + script_len, RAW_HEADERS,
                      NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_END_STREAM, 1, block, len);
}

static void run_turns(int turns) {
  while (turns-- > 0)
    client->base.run_once(&client->base, 0);
}

#define SETTINGS_LEN ((size_t)15)

/* The client has made its call once the first SETTINGS came; the rest follows up to `cut`. */
static void serve(size_t split, size_t cut) {
  scripted();
  write_script();
  raw_send(&peer, script, SETTINGS_LEN);
  RUN_UNTIL(in_state('R'));
  cr_assert_eq(call(1, "Echo", "x"), KVRELAY_TRANSPORT_OK);
  expect_frame(RAW_DATA);
  raw_send(&peer, script + SETTINGS_LEN, split - SETTINGS_LEN);
  run_turns(3);
  raw_send(&peer, script + split, cut - split);
}

Test(grpc_client_hostile, an_answer_split_everywhere) {
  size_t split = SETTINGS_LEN;
  do {
    serve(split, split); /* learns the length, too */
    raw_send(&peer, script + split, script_len - split);
    RUN_UNTIL(caller.call[1].ends == 1);
    cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK, "%zu", split);
    cr_expect_eq(caller.call[1].messages, 3);
    cr_expect_eq(caller.call[1].bytes, 4);
    finish_scripted();
  } while (++split < script_len);
}

Test(grpc_client_hostile, an_answer_cut_everywhere) {
  size_t cut = SETTINGS_LEN;
  do {
    serve(cut, cut);
    raw_close(&peer);
    RUN_UNTIL(failed());
    cr_expect_eq(caller.call[1].ends, 1, "%zu", cut);
    cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE, "%zu", cut);
    cr_expect_leq(caller.call[1].messages, 3);
    finish_scripted();
  } while (++cut < script_len);
}
