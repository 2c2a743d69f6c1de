/* SPDX-License-Identifier: Apache-2.0 */
/* raw_http2.h - HTTP/2 frames by hand, either side, so that a test may say what no library would.
 */
#ifndef KVRELAY_TEST_RAW_HTTP2_H
#define KVRELAY_TEST_RAW_HTTP2_H

#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RAW_PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

enum {
  RAW_DATA,
  RAW_HEADERS,
  RAW_PRIORITY,
  RAW_RST_STREAM,
  RAW_SETTINGS,
  RAW_PUSH_PROMISE,
  RAW_PING,
  RAW_GOAWAY,
  RAW_WINDOW_UPDATE,
  RAW_CONTINUATION
};

typedef struct raw_frame {
  uint8_t type, flags;
  uint32_t stream;
  size_t len;
  const uint8_t *payload;
  char headers[4096]; /* of HEADERS: "name: value\n" … */
} raw_frame;

typedef struct raw_http2 {
  int fd;
  bool eof;
  uint8_t *in;
  size_t in_len, in_cap, taken;
  nghttp2_hd_inflater *inflater;
  nghttp2_hd_deflater *deflater;
} raw_http2;

int raw_listen(uint16_t *port);
/* Connects; the test fails when it cannot. */
void raw_open(raw_http2 *raw, uint16_t port);
/* Takes an accepted socket. */
void raw_take(raw_http2 *raw, int fd);
/* Harmless when it is closed. */
void raw_close(raw_http2 *raw);
void raw_send(raw_http2 *raw, const void *bytes, size_t len);
void raw_send_frame(raw_http2 *raw, uint8_t type, uint8_t flags, uint32_t stream,
                    const void *payload, size_t len);
/* `lines`: "name: value\n" …; returns the encoded block, valid until the next call. */
const uint8_t *raw_encode(raw_http2 *raw, const char *lines, size_t *len);
void raw_send_headers(raw_http2 *raw, uint8_t flags, uint32_t stream, const char *lines);
/* Preface and empty SETTINGS. */
void raw_greet(raw_http2 *raw);
/* One gRPC request message in one DATA frame with END_STREAM. */
void raw_send_request(raw_http2 *raw, uint32_t stream, const char *path, const char *more_headers,
                      const void *message, size_t len);
/* Reads what is there; true and the next whole frame, valid until the next call. */
bool raw_next(raw_http2 *raw, raw_frame *frame);

#endif
