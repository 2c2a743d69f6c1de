/* SPDX-License-Identifier: Apache-2.0 */
#include "raw_http2.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void need(bool good, const char *what) {
  if (good)
    return;
  perror(what);
  abort();
}

static struct sockaddr_in loopback(uint16_t port) {
  struct sockaddr_in a = {
      .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  return a;
}

int raw_listen(uint16_t *port) {
  struct sockaddr_in a = loopback(*port);
  socklen_t len = sizeof a;
  int one = 1;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  need(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0, "socket");
  need(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 16) == 0, "listen");
  need(getsockname(fd, (struct sockaddr *)&a, &len) == 0, "getsockname");
  *port = ntohs(a.sin_port);
  return fd;
}

void raw_take(raw_http2 *raw, int fd) {
  const int one = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* each frame now */
  memset(raw, 0, sizeof *raw);
  raw->fd = fd;
  need(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "fcntl");
  need(nghttp2_hd_inflate_new(&raw->inflater) == 0 &&
           nghttp2_hd_deflate_new(&raw->deflater, 4096) == 0,
       "hpack");
}

void raw_open(raw_http2 *raw, uint16_t port) {
  struct sockaddr_in a = loopback(port);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  int one = 1;
  need(fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0, "connect");
  need(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "TCP_NODELAY");
  raw_take(raw, fd);
}

void raw_close(raw_http2 *raw) {
  if (raw->fd >= 0)
    close(raw->fd);
  if (raw->inflater != NULL)
    nghttp2_hd_inflate_del(raw->inflater);
  if (raw->deflater != NULL)
    nghttp2_hd_deflate_del(raw->deflater);
  free(raw->in);
  memset(raw, 0, sizeof *raw);
  raw->fd = -1;
}

void raw_send(raw_http2 *raw, const void *bytes, size_t len) {
  const uint8_t *p = bytes;
  while (len > 0) {
    ssize_t n = send(raw->fd, p, len, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN)
      return; /* the peer has closed; what comes of it is the test's business */
    if (n < 0) {
      struct pollfd wait = {.fd = raw->fd, .events = POLLOUT};
      if (poll(&wait, 1, 1000) <= 0)
        return;
      continue;
    }
    p += n;
    len -= (size_t)n;
  }
}

void raw_send_frame(raw_http2 *raw, uint8_t type, uint8_t flags, uint32_t stream,
                    const void *payload, size_t len) {
  uint8_t *frame = malloc(9 + len);
  need(frame != NULL, "malloc");
  const uint8_t head[9] = {(uint8_t)(len >> 16),
                           (uint8_t)(len >> 8),
                           (uint8_t)len,
                           type,
                           flags,
                           (uint8_t)(stream >> 24),
                           (uint8_t)(stream >> 16),
                           (uint8_t)(stream >> 8),
                           (uint8_t)stream};
  memcpy(frame, head, 9);
  if (len > 0)
    memcpy(frame + 9, payload, len);
  raw_send(raw, frame, 9 + len);
  free(frame);
}

const uint8_t *raw_encode(raw_http2 *raw, const char *lines, size_t *len) {
  static uint8_t block[65536];
  nghttp2_nv nv[32];
  size_t count = 0;
  while (*lines != '\0') {
    const char *end = strchr(lines, '\n');
    const char *colon = strchr(lines + 1, ':');
    need(end != NULL && colon != NULL && colon < end && count < 32, "header lines");
    nv[count].name = (uint8_t *)(uintptr_t)lines;
    nv[count].namelen = (size_t)(colon - lines);
    nv[count].value = (uint8_t *)(uintptr_t)(colon + 2);
    nv[count].valuelen = (size_t)(end - colon - 2);
    nv[count++].flags = NGHTTP2_NV_FLAG_NONE;
    lines = end + 1;
  }
  ssize_t n = nghttp2_hd_deflate_hd(raw->deflater, block, sizeof block, nv, count);
  need(n >= 0, "deflate");
  *len = (size_t)n;
  return block;
}

void raw_send_headers(raw_http2 *raw, uint8_t flags, uint32_t stream, const char *lines) {
  size_t len;
  const uint8_t *block = raw_encode(raw, lines, &len);
  raw_send_frame(raw, RAW_HEADERS, flags | NGHTTP2_FLAG_END_HEADERS, stream, block, len);
}

void raw_greet(raw_http2 *raw) {
  raw_send(raw, RAW_PREFACE, sizeof RAW_PREFACE - 1);
  raw_send_frame(raw, RAW_SETTINGS, 0, 0, NULL, 0);
}

void raw_send_request(raw_http2 *raw, uint32_t stream, const char *path, const char *more_headers,
                      const void *message, size_t len) {
  char lines[2048];
  uint8_t *body = malloc(5 + len);
  need(body != NULL, "malloc");
  const uint8_t prefix[5] = {0, (uint8_t)(len >> 24), (uint8_t)(len >> 16), (uint8_t)(len >> 8),
                             (uint8_t)len};
  snprintf(lines, sizeof lines,
           ":method: POST\n:scheme: http\n:path: %s\n:authority: test\nte: trailers\ncontent-type: "
           "application/grpc\n%s",
           path, more_headers);
  raw_send_headers(raw, 0, stream, lines);
  memcpy(body, prefix, 5);
  if (len > 0)
    memcpy(body + 5, message, len);
  raw_send_frame(raw, RAW_DATA, NGHTTP2_FLAG_END_STREAM, stream, body, 5 + len);
  free(body);
}

static void decode(raw_http2 *raw, raw_frame *frame) {
  const uint8_t *in = frame->payload;
  size_t len = frame->len, out = 0;
  for (;;) {
    nghttp2_nv nv;
    int flags = 0;
    ssize_t n = nghttp2_hd_inflate_hd2(raw->inflater, &nv, &flags, in, len, 1);
    need(n >= 0, "inflate");
    in += n;
    len -= (size_t)n;
    if (flags & NGHTTP2_HD_INFLATE_EMIT)
      out += (size_t)snprintf(frame->headers + out, sizeof frame->headers - out, "%.*s: %.*s\n",
                              (int)nv.namelen, (const char *)nv.name, (int)nv.valuelen,
                              (const char *)nv.value);
    if (flags & NGHTTP2_HD_INFLATE_FINAL)
      break;
    if (!(flags & NGHTTP2_HD_INFLATE_EMIT) && len == 0)
      break;
  }
  nghttp2_hd_inflate_end_headers(raw->inflater);
}

bool raw_next(raw_http2 *raw, raw_frame *frame) {
  if (raw->taken > 0) {
    memmove(raw->in, raw->in + raw->taken, raw->in_len - raw->taken);
    raw->in_len -= raw->taken;
    raw->taken = 0;
  }
  for (;;) {
    if (raw->in_len >= 9) {
      const uint8_t *p = raw->in;
      size_t len = (size_t)p[0] << 16 | (size_t)p[1] << 8 | p[2];
      if (raw->in_len - 9 >= len) {
        frame->type = p[3];
        frame->flags = p[4];
        frame->stream =
            ((uint32_t)p[5] << 24 | (uint32_t)p[6] << 16 | (uint32_t)p[7] << 8 | p[8]) & 0x7fffffff;
        frame->len = len;
        frame->payload = p + 9;
        frame->headers[0] = '\0';
        raw->taken = 9 + len;
        if (frame->type == RAW_HEADERS)
          decode(raw, frame);
        return true;
      }
    }
    if (raw->in_cap - raw->in_len < 65536) {
      raw->in_cap = raw->in_cap * 2 + 131072;
      raw->in = realloc(raw->in, raw->in_cap);
      need(raw->in != NULL, "realloc");
    }
    ssize_t n = recv(raw->fd, raw->in + raw->in_len, raw->in_cap - raw->in_len, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN))
      raw->eof = true;
    if (n <= 0)
      return false;
    raw->in_len += (size_t)n;
  }
}
