/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TCP_PEER_H_
#define TCP_PEER_H_

/* What the other side of a raw connection reads: whole frames of the right sender, each stream from
 * its first to its last in order. */

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#include "kvrelay.h"

enum { PEER_STREAMS = 4096 };

typedef struct tcp_peer {
  int fd;
  bool from_client; /* who writes */
  bool over;        /* the end of the connection came */
  uint8_t preface[KVRELAY_RAW_PREFACE_LEN];
  size_t preface_len;
  kvrelay_framer framer;
  uint8_t stream[PEER_STREAMS]; /* by number, where it is below: the last type of frame */
  uint32_t last;                /* of the client's */
  bool goaway;
} tcp_peer;

static inline void peer_open(tcp_peer *p, int fd, bool from_client) {
  memset(p, 0, sizeof *p);
  p->fd = fd;
  p->from_client = from_client;
  kvrelay_framer_init_raw(&p->framer, from_client, 1 << 20);
}

static inline void peer_frame(tcp_peer *p, const kvrelay_frame *f) {
  if (f->type == KVRELAY_FRAME_REQUEST && f->offset == 0) {
    FUZZ_CHECK(f->stream > p->last);
    p->last = f->stream;
  }
  p->goaway |= f->type == KVRELAY_FRAME_GOAWAY;
  if (f->stream == 0 || f->stream >= PEER_STREAMS || p->from_client)
    return;
  uint8_t *before = &p->stream[f->stream];
  FUZZ_CHECK(*before != KVRELAY_FRAME_END);
  FUZZ_CHECK((f->type == KVRELAY_FRAME_RESPONSE) ? *before == 0 : true);
  FUZZ_CHECK((f->type == KVRELAY_FRAME_MESSAGE) ? *before != 0 : true);
  *before = (uint8_t)f->type;
}

/* All that is there by now. */
static inline void peer_read(tcp_peer *p) {
  static uint8_t buffer[65536];
  ssize_t n;
  while ((n = recv(p->fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0) {
    const uint8_t *at = buffer;
    size_t left = (size_t)n;
    for (; left > 0 && p->preface_len < sizeof p->preface; at++, left--)
      p->preface[p->preface_len++] = *at;
    kvrelay_frame f;
    while (left > 0) {
      const ptrdiff_t used = kvrelay_framer_feed(&p->framer, at, left, &f);
      FUZZ_CHECK(used >= 0);
      at += used;
      left -= (size_t)used;
      if (f.type != KVRELAY_FRAME_NONE)
        peer_frame(p, &f);
    }
  }
  p->over |= n == 0;
}

/* Sends what the socket takes: the rest is lost with the connection. */
static inline void peer_send(const tcp_peer *p, const uint8_t *bytes, size_t len) {
  if (len > 0)
    (void)!send(p->fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);
}

#endif
