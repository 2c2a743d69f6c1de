/* SPDX-License-Identifier: Apache-2.0 */
/* grpc_link.h - what server and client share: the loop, and one HTTP/2 connection on a socket. */
#ifndef KVRELAY_GRPC_LINK_H
#define KVRELAY_GRPC_LINK_H

#include <event2/buffer.h>
#include <event2/event.h>
#include <nghttp2/nghttp2.h>
#include <sys/queue.h>

#include "../secure.h"
#include "../timer.h"

typedef struct kvrelay_grpc_link kvrelay_grpc_link;
TAILQ_HEAD(kvrelay_grpc_links, kvrelay_grpc_link);

/* ---- loop ---- */

typedef struct kvrelay_grpc_loop {
  struct event_base *base;
  struct event *wake, *kick;
  kvrelay_timer timeout;
  struct kvrelay_grpc_links kicked; /* links with something to write */
  void (*on_kick)(void *owner);     /* before they are written; may be NULL */
  void *owner;
  uint8_t *input; /* one for all links: nothing stays in it */
  int wake_fd;
  uint64_t now_ns; /* when this turn began */
  unsigned turns;  /* callbacks of ours that ran */
  bool own_base, timed_out;
} kvrelay_grpc_loop;

/* `base` NULL: one of its own.  KVRELAY_TRANSPORT_OK, or _ERR_SYSTEM (errno), _ERR_MEMORY; then
 * nothing is open. */
int kvrelay_grpc_loop_open(kvrelay_grpc_loop *loop, struct event_base *base,
                           void (*on_kick)(void *owner), void *owner);
void kvrelay_grpc_loop_close(kvrelay_grpc_loop *loop);
/* A callback of ours begins: it is a new turn, and the time is looked at once for all of it. */
static inline void kvrelay_grpc_loop_turn(kvrelay_grpc_loop *loop) {
  loop->turns++;
  loop->now_ns = kvrelay_now_ns();
}
/* One turn; as run_once of transport.h. */
int kvrelay_grpc_loop_run(kvrelay_grpc_loop *loop, uint64_t timeout_ns);
/* From any thread or signal handler. */
void kvrelay_grpc_loop_wake(kvrelay_grpc_loop *loop);
/* Calls `on_kick` and writes the links that wait, in this turn or the next. */
void kvrelay_grpc_loop_kick(kvrelay_grpc_loop *loop);

/* ---- link ---- */

/* What a link tells its owner. */
typedef struct kvrelay_grpc_link_events {
  /* Everything received, before it goes to nghttp2.  Returns how many of these bytes (len > 0) it
   * gets before this is called for the rest; 0: they are dropped. */
  size_t (*received)(kvrelay_grpc_link *link, const uint8_t *bytes, size_t len);
  /* The handshake is done: `link->secure` knows the peer.  May be NULL. */
  void (*secured)(kvrelay_grpc_link *link);
  /* Monotonic time of the next `tick`; KVRELAY_TIME_NONE: none. */
  uint64_t (*deadline_ns)(const kvrelay_grpc_link *link);
  void (*tick)(kvrelay_grpc_link *link, uint64_t now_ns);
  /* The connection is over, for `link->err` and `link->text`.  The owner frees the link now.  Never
   * called from inside an nghttp2 callback. */
  void (*gone)(kvrelay_grpc_link *link);
  /* With `foreign_first`: a connection that begins with this byte; with `foreign_protocol`: one
   * that has agreed on it, and its session.  Takes both; `gone` follows. */
  void (*given_away)(kvrelay_grpc_link *link, int fd, kvrelay_secure_session *secure);
} kvrelay_grpc_link_events;

struct kvrelay_grpc_link {
  kvrelay_grpc_loop *loop;
  const kvrelay_grpc_link_events *events;
  nghttp2_session *session;
  struct evbuffer *out;
  size_t out_threshold; /* bytes in `out` above which nothing more is produced */
  struct event *readable, *writable;
  kvrelay_timer timer;
  uint64_t linger_until_ns;
  uint64_t timer_at_ns;
  TAILQ_ENTRY(kvrelay_grpc_link) kicked;
  int fd;
  int err; /* 0 while it lives */
  char text[256];
  kvrelay_secure_session *secure; /* NULL: plaintext */
  uint8_t
      foreign_first; /* first byte of another protocol, which is left unread; 0: none, or told */
  const char *foreign_protocol; /* offered besides "h2"; NULL: none */
  bool shaking;                 /* the handshake is not done: nothing else is sent or received */
  bool is_kicked;
  bool no_linger; /* closes without waiting for the peer */
  bool closing;   /* send what is in `out`, then shut down */
  bool lingering; /* shut down: reads until the peer closes, for a second at most */
};

/* Takes `fd` (also on failure) and `session`; both may be closed and freed only through
 * kvrelay_grpc_link_close.  KVRELAY_TRANSPORT_OK, or _ERR_MEMORY: it is closed. */
int kvrelay_grpc_link_open(kvrelay_grpc_link *link, kvrelay_grpc_loop *loop,
                           const kvrelay_grpc_link_events *events, int fd, size_t out_threshold);
void kvrelay_grpc_link_close(kvrelay_grpc_link *link);
/* Before anything is sent: what the link carries from now on goes through a session of `security`.
 * `peer_name` as in kvrelay_secure_config.  KVRELAY_TRANSPORT_OK, or _ERR_MEMORY. */
int kvrelay_grpc_link_secure(kvrelay_grpc_link *link, kvrelay_security *security,
                             const char *peer_name);
/* Something was submitted: write soon. */
void kvrelay_grpc_link_kick(kvrelay_grpc_link *link);
/* The deadline may have become earlier. */
void kvrelay_grpc_link_rearm(kvrelay_grpc_link *link);
/* What nghttp2_submit_… answered.  It only fails for want of memory; who waits for that frame would
 * wait for ever, so the connection is given up. */
void kvrelay_grpc_link_submitted(kvrelay_grpc_link *link, int result);
/* The connection is lost; `gone` follows in the same or the next turn.  The first reason wins. */
void kvrelay_grpc_link_fail(kvrelay_grpc_link *link, int err, const char *text);
/* True while the link takes more output: rule 3 of transport.h. */
bool kvrelay_grpc_link_has_room(const kvrelay_grpc_link *link);

/* Data-frame length callback of nghttp2: as large as the peer allows, up to a bound that keeps
 * streams taking turns. */
ssize_t kvrelay_grpc_link_frame_len(nghttp2_session *session, uint8_t frame_type, int32_t stream_id,
                                    int32_t session_window, int32_t stream_window,
                                    uint32_t max_frame_size, void *user_data);

#endif
