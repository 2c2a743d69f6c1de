/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_link.h - what raw server and client share: one connection, and all that turn in one loop. */
#ifndef KVRELAY_TCP_LINK_H
#define KVRELAY_TCP_LINK_H

#include <sys/queue.h>

#include "../secure.h"
#include "tcp_loop.h"

#define KVRELAY_TCP_OUT_FILL ((size_t)65536) /* waiting bytes above which no more is produced */

typedef struct kvrelay_tcp_link kvrelay_tcp_link;
TAILQ_HEAD(kvrelay_tcp_links, kvrelay_tcp_link);

/* ---- hub: the links of one transport ---- */

typedef struct kvrelay_tcp_hub {
  kvrelay_tcp_loop loop;
  struct kvrelay_tcp_links links; /* all */
  struct kvrelay_tcp_links dirty; /* those with something to write, or to end */
  size_t dirty_len;
  uint64_t now_ns;   /* of this turn */
  uint64_t tick_ns;  /* no link has a deadline before */
  uint64_t alarm_ns; /* the owner's own; KVRELAY_TIME_NONE: none.  It is set back before the call */
  void (*alarm)(void *owner, uint64_t now_ns);
  void *owner;
  uint8_t *input; /* one for all links: nothing stays in it */
  uint8_t *spare; /* output memory that no link needs now */
  size_t spare_cap;
} kvrelay_tcp_hub;

/* KVRELAY_TRANSPORT_OK, or _ERR_SYSTEM (errno), _ERR_MEMORY; then nothing is open. */
int kvrelay_tcp_hub_open(kvrelay_tcp_hub *hub, void (*alarm)(void *owner, uint64_t now_ns),
                         void *owner);
/* After its links are closed. */
void kvrelay_tcp_hub_close(kvrelay_tcp_hub *hub);
/* One turn; as run_once of transport.h. */
int kvrelay_tcp_hub_run(kvrelay_tcp_hub *hub, uint64_t timeout_ns);
/* When a turn is due although no descriptor is ready: 0 = now, KVRELAY_TIME_NONE = never. */
uint64_t kvrelay_tcp_hub_deadline_ns(const kvrelay_tcp_hub *hub);

/* ---- link ---- */

/* What a link tells its owner. */
typedef struct kvrelay_tcp_link_events {
  /* The peer's preface as kvrelay_raw_preface_get has it; after anything but KVRELAY_OK the link is
   * expected to be failed or closing. */
  void (*preface)(kvrelay_tcp_link *link, int err, const kvrelay_raw_preface *preface);
  /* A whole frame: neither PING nor PONG. */
  void (*frame)(kvrelay_tcp_link *link, const kvrelay_frame *frame);
  /* Room for output: puts frames while kvrelay_tcp_link_has_room. */
  void (*fill)(kvrelay_tcp_link *link);
  /* The owner's own next deadline, and what to do then. */
  uint64_t (*deadline_ns)(const kvrelay_tcp_link *link);
  void (*tick)(kvrelay_tcp_link *link, uint64_t now_ns);
  /* The connection is over, for `link->err` and `link->text`; the owner closes the link now. */
  void (*gone)(kvrelay_tcp_link *link);
  /* The handshake is done: `link->secure` knows the peer.  May be NULL. */
  void (*secured)(kvrelay_tcp_link *link);
} kvrelay_tcp_link_events;

typedef struct kvrelay_tcp_link_config {
  bool from_client;   /* which side the peer is */
  uint32_t max_frame; /* largest body taken */
  uint64_t preface_timeout_ns;
  uint64_t keepalive_interval_ns; /* of silence, then a PING; KVRELAY_TIME_NONE: never */
  uint64_t keepalive_timeout_ns;
  uint64_t peer_ping_interval_ns; /* PINGs of the peer that come faster, twice: GOAWAY */
  kvrelay_security *security;     /* NULL: plaintext, or a session that is there already */
  const char *peer_name;          /* as kvrelay_secure_config has it; only read during open */
} kvrelay_tcp_link_config;

struct kvrelay_tcp_link {
  kvrelay_tcp_watch watch; /* first */
  kvrelay_tcp_hub *hub;
  const kvrelay_tcp_link_events *events;
  TAILQ_ENTRY(kvrelay_tcp_link) entry, dirty;
  kvrelay_tcp_link_config cfg;
  uint64_t opened_ns, received_ns;
  uint64_t ping_ns;      /* when ours went out that nothing has answered; 0: none */
  uint64_t peer_ping_ns; /* when the peer's last one came; 0: none */
  uint64_t closing_until_ns;
  uint32_t last_stream; /* accepted of the peer: what GOAWAY names */
  uint8_t *out; /* what waits is out[from .. to - 1]; the frame at its beginning, of which a part
                   may be gone, ends behind `cut` of these bytes */
  size_t out_cap, from, to, cut;
  uint64_t sent;                  /* bytes, ever */
  kvrelay_secure_session *secure; /* NULL: plaintext */
  uint8_t *body;                  /* of a frame that did not come in one piece */
  uint32_t body_len, body_got;
  int err;         /* 0 while it lives */
  int closing_err; /* what becomes of it when `closing` is over */
  char text[256];
  uint8_t preface[KVRELAY_RAW_PREFACE_LEN];
  uint8_t preface_len;
  uint8_t strikes;
  bool is_dirty;
  bool shaking;   /* the handshake is not done */
  bool blocked;   /* the socket, or the session, takes no more for now */
  bool closing;   /* nothing is read or produced any more: what waits goes out, then it ends */
  bool lingering; /* shut down: waits for the peer to close */
  kvrelay_framer framer;
};

/* Takes `fd`, also on failure; `link` is zeroed memory.  KVRELAY_TRANSPORT_OK, _ERR_SYSTEM or
 * _ERR_MEMORY: it is closed. */
int kvrelay_tcp_link_open(kvrelay_tcp_link *link, kvrelay_tcp_hub *hub,
                          const kvrelay_tcp_link_events *events, const kvrelay_tcp_link_config *cfg,
                          int fd);
void kvrelay_tcp_link_close(kvrelay_tcp_link *link);
/* Right behind open: everything goes through this session, which the link takes; also one whose
 * handshake is done. */
void kvrelay_tcp_link_secure(kvrelay_tcp_link *link, kvrelay_secure_session *session);
/* The connection is lost; `gone` follows before the turn ends, never from inside this call.  The
 * first reason wins. */
void kvrelay_tcp_link_fail(kvrelay_tcp_link *link, int err, const char *text);
void kvrelay_tcp_link_kick_(kvrelay_tcp_link *link);
/* Something waits to be written or filled. */
static inline void kvrelay_tcp_link_kick(kvrelay_tcp_link *link) {
  if (!link->is_dirty)
    kvrelay_tcp_link_kick_(link);
}
/* A deadline may have come nearer. */
void kvrelay_tcp_link_rearm(kvrelay_tcp_link *link, uint64_t at_ns);
/* Rule 3 of transport.h. */
static inline bool kvrelay_tcp_link_has_room(const kvrelay_tcp_link *link) {
  return link->to - link->from < KVRELAY_TCP_OUT_FILL && !link->blocked && !link->closing &&
         link->err == 0;
}

/* Room for `len` more bytes of output, which kvrelay_tcp_link_put_done then makes part of it.
 * NULL: no memory, the link has failed. */
uint8_t *kvrelay_tcp_link_put(kvrelay_tcp_link *link, size_t len);
static inline void kvrelay_tcp_link_put_done(kvrelay_tcp_link *link, size_t len) {
  link->to += len;
  kvrelay_tcp_link_kick(link);
}
/* A frame whose body lies elsewhere: a large one goes to the socket from there, and what that does
 * not take is copied. */
void kvrelay_tcp_link_put_frame(kvrelay_tcp_link *link, int32_t type, uint32_t stream, uint16_t aux,
                                const kvrelay_parts *body);
/* Says goodbye, ahead of all that waits. */
void kvrelay_tcp_link_goaway(kvrelay_tcp_link *link, int32_t code, const char *text);
/* The same for an error of the peer: what waits is dropped, nothing is read any more, and the link
 * ends as soon as this is out; `text` becomes the link's, and the error is
 * KVRELAY_TRANSPORT_ERR_PROTOCOL. */
void kvrelay_tcp_link_abort(kvrelay_tcp_link *link, int32_t code, const char *text);
/* Ends the link, for `err`, once everything has gone out, at `until_ns` at the latest; then the
 * peer has a second to close. */
void kvrelay_tcp_link_finish(kvrelay_tcp_link *link, int err, uint64_t until_ns);

#endif
