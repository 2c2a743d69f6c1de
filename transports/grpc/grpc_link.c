/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define INPUT_CAP                                                                                  \
  ((size_t)65536) /* larger ones fall out of the cache before they are taken apart */
/* Reads and bytes written in one go before other links get their turn. */
#define READS_PER_TURN 16
#define WRITE_PER_TURN ((size_t)4 << 20)
#define WRITE_PIECES 64
#define LINGER_NS KVRELAY_SECOND_NS
#define FRAME_LEN_MAX ((ssize_t)262144)

/* ---- loop ---- */

static void link_turn(kvrelay_grpc_link *link, bool readable);
static void link_settle(kvrelay_grpc_link *link);

static void on_wake(evutil_socket_t fd, short what, void *loop_) {
  kvrelay_grpc_loop *loop = loop_;
  uint64_t count;
  (void)what;
  kvrelay_grpc_loop_turn(loop);
  if (read(fd, &count, sizeof count) < 0)
    return; /* another turn took it */
}

static void on_timeout(void *loop) { ((kvrelay_grpc_loop *)loop)->timed_out = true; }

static void on_kick(evutil_socket_t fd, short what, void *loop_) {
  kvrelay_grpc_loop *loop = loop_;
  (void)fd;
  (void)what;
  kvrelay_grpc_loop_turn(loop);
  if (loop->on_kick != NULL)
    loop->on_kick(loop->owner);
  kvrelay_grpc_link *link;
  while ((link = TAILQ_FIRST(&loop->kicked)) != NULL) {
    TAILQ_REMOVE(&loop->kicked, link, kicked);
    link->is_kicked = false;
    link_turn(link, false);
    link_settle(link);
  }
}

static struct event_base *own_base(void) {
  struct event_config *config = event_config_new();
  if (config == NULL)
    return NULL;
  event_config_set_flag(config, EVENT_BASE_FLAG_PRECISE_TIMER);
  struct event_base *base = event_base_new_with_config(config);
  event_config_free(config);
  return base;
}

int kvrelay_grpc_loop_open(kvrelay_grpc_loop *loop, struct event_base *base,
                           void (*kick)(void *owner), void *owner) {
  memset(loop, 0, sizeof *loop);
  TAILQ_INIT(&loop->kicked);
  loop->on_kick = kick;
  loop->owner = owner;
  loop->own_base = base == NULL;
  loop->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  loop->base = base != NULL ? base : own_base();
  loop->input = malloc(INPUT_CAP);
  if (loop->wake_fd >= 0 && loop->base != NULL && loop->input != NULL) {
    loop->wake = event_new(loop->base, loop->wake_fd, EV_READ | EV_PERSIST, on_wake, loop);
    loop->kick = event_new(loop->base, -1, 0, on_kick, loop);
    if (loop->wake != NULL && loop->kick != NULL && event_add(loop->wake, NULL) == 0 &&
        kvrelay_timer_open(&loop->timeout, loop->base, on_timeout, loop) == KVRELAY_TRANSPORT_OK)
      return KVRELAY_TRANSPORT_OK;
  }
  int err = loop->wake_fd < 0 ? KVRELAY_TRANSPORT_ERR_SYSTEM : KVRELAY_TRANSPORT_ERR_MEMORY;
  kvrelay_grpc_loop_close(loop);
  return err;
}

void kvrelay_grpc_loop_close(kvrelay_grpc_loop *loop) {
  if (loop->wake != NULL)
    event_free(loop->wake);
  kvrelay_timer_close(&loop->timeout);
  if (loop->kick != NULL)
    event_free(loop->kick);
  if (loop->own_base && loop->base != NULL)
    event_base_free(loop->base);
  if (loop->wake_fd >= 0)
    close(loop->wake_fd);
  free(loop->input);
}

int kvrelay_grpc_loop_run(kvrelay_grpc_loop *loop, uint64_t timeout_ns) {
  loop->timed_out = false;
  loop->turns = 0;
  int flags = EVLOOP_ONCE;
  if (timeout_ns == 0) {
    flags |= EVLOOP_NONBLOCK;
    loop->timed_out = true;
  }
  kvrelay_timer_set(&loop->timeout, timeout_ns == 0 ? KVRELAY_TIME_NONE : timeout_ns);
  int result = event_base_loop(loop->base, flags);
  kvrelay_timer_set(&loop->timeout, KVRELAY_TIME_NONE);
  if (result < 0)
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  /* Without a time-out something ran, perhaps an event of somebody else on this base. */
  return loop->turns > 0 || !loop->timed_out;
}

void kvrelay_grpc_loop_wake(kvrelay_grpc_loop *loop) {
  int saved = errno;
  uint64_t one = 1;
  if (write(loop->wake_fd, &one, sizeof one) < 0)
    errno = saved; /* the counter is full: it is awake */
  errno = saved;
}

void kvrelay_grpc_loop_kick(kvrelay_grpc_loop *loop) { event_active(loop->kick, EV_WRITE, 0); }

/* ---- link: end ---- */

void kvrelay_grpc_link_fail(kvrelay_grpc_link *link, int err, const char *text) {
  if (link->err != 0)
    return;
  link->err = err;
  snprintf(link->text, sizeof link->text, "%s", text);
  kvrelay_grpc_link_kick(link);
}

void kvrelay_grpc_link_submitted(kvrelay_grpc_link *link, int result) {
  if (result < 0)
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for a frame");
}

/* The last thing every entry from the loop does; the link may be gone afterwards. */
static void link_settle(kvrelay_grpc_link *link) {
  if (link->err != 0)
    link->events->gone(link);
}

/* A session said so. */
static void link_lost(kvrelay_grpc_link *link, ptrdiff_t code) {
  kvrelay_grpc_link_fail(link,
                         code == KVRELAY_SECURE_FAILED ? KVRELAY_TRANSPORT_ERR_SECURITY
                                                       : KVRELAY_TRANSPORT_ERR_CONNECT,
                         code == KVRELAY_SECURE_CLOSED ? "closed by the peer" : link->secure->text);
}

static void link_await_writable(kvrelay_grpc_link *link) {
  if (event_add(link->writable, NULL) != 0)
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for output");
}

static void link_linger(kvrelay_grpc_link *link) {
  if (link->no_linger) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "closed");
    return;
  }
  const int said = link->secure != NULL ? link->secure->shutdown(link->secure) : KVRELAY_SECURE_OK;
  if (said == KVRELAY_SECURE_AGAIN) {
    link_await_writable(link);
    return;
  }
  if (said < 0) {
    link_lost(link, said);
    return;
  }
  if (shutdown(link->fd, SHUT_WR) != 0) {
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, strerror(errno));
    return;
  }
  link->lingering = true;
  link->linger_until_ns = kvrelay_now_ns() + LINGER_NS;
  kvrelay_grpc_link_rearm(link);
}

/* ---- link: output ---- */

bool kvrelay_grpc_link_has_room(const kvrelay_grpc_link *link) {
  return evbuffer_get_length(link->out) < link->out_threshold;
}

ssize_t kvrelay_grpc_link_frame_len(nghttp2_session *session, uint8_t frame_type, int32_t stream_id,
                                    int32_t session_window, int32_t stream_window,
                                    uint32_t max_frame_size, void *user_data) {
  (void)session;
  (void)frame_type;
  (void)stream_id;
  (void)session_window; /* nghttp2 itself cuts to windows and frame size */
  (void)stream_window;
  (void)max_frame_size;
  (void)user_data;
  return FRAME_LEN_MAX;
}

/* Frames out of nghttp2 into `out`, up to the threshold. */
static void link_fill(kvrelay_grpc_link *link) {
  while (!link->closing && kvrelay_grpc_link_has_room(link)) {
    const uint8_t *data;
    ssize_t n = nghttp2_session_mem_send(link->session, &data);
    if (n < 0) {
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_MEMORY, nghttp2_strerror((int)n));
      return;
    }
    if (n == 0)
      return;
    if (evbuffer_add(link->out, data, (size_t)n) != 0) {
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for output");
      return;
    }
  }
}

/* Not evbuffer_write: that one raises SIGPIPE. */
static ptrdiff_t plain_write(kvrelay_grpc_link *link, struct evbuffer_iovec *pieces, size_t count) {
  struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
  ssize_t n = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && errno != EAGAIN && errno != EINTR)
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, strerror(errno));
  return n;
}

static ptrdiff_t secure_write(kvrelay_grpc_link *link, const struct evbuffer_iovec *pieces,
                              size_t count) {
  kvrelay_iov list[WRITE_PIECES];
  for (size_t i = 0; i < count; i++)
    list[i] = (kvrelay_iov){pieces[i].iov_base, pieces[i].iov_len};
  ptrdiff_t n = link->secure->write(link->secure, list, count);
  if (n < 0)
    link_lost(link, n);
  return n;
}

/* One gathered write.  Returns the bytes taken. */
static size_t link_write(kvrelay_grpc_link *link) {
  struct evbuffer_iovec pieces[WRITE_PIECES];
  int all = evbuffer_peek(link->out, -1, NULL, pieces, WRITE_PIECES);
  size_t count = (size_t)(all > WRITE_PIECES ? WRITE_PIECES : all);
  ptrdiff_t n =
      link->secure != NULL ? secure_write(link, pieces, count) : plain_write(link, pieces, count);
  if (n <= 0)
    return 0;
  evbuffer_drain(link->out, (size_t)n);
  return (size_t)n;
}

/* True while the session holds bytes that the socket has not taken. */
static bool link_holds(kvrelay_grpc_link *link) {
  if (link->secure == NULL || !link->secure->wants_write)
    return false;
  ptrdiff_t n = link->secure->write(link->secure, NULL, 0);
  if (n < 0)
    link_lost(link, n);
  else if (link->secure->wants_write)
    link_await_writable(link);
  return link->err != 0 || link->secure->wants_write;
}

static void link_flush(kvrelay_grpc_link *link) {
  size_t written = 0;
  if (link->lingering || link->err != 0 || link->session == NULL || link->foreign_first != 0 ||
      link->shaking)
    return;
  for (;;) {
    link_fill(link);
    if (link->err != 0 || evbuffer_get_length(link->out) == 0)
      break;
    size_t n = link_write(link);
    written += n;
    if (link->err != 0)
      return;
    if (n == 0 || written > WRITE_PER_TURN) {
      link_await_writable(link);
      return;
    }
  }
  if (link->err != 0 || link_holds(link))
    return;
  bool done =
      !nghttp2_session_want_read(link->session) && !nghttp2_session_want_write(link->session);
  if (link->closing || done)
    link_linger(link);
}

static void on_writable(evutil_socket_t fd, short what, void *link_) {
  kvrelay_grpc_link *link = link_;
  (void)fd;
  (void)what;
  kvrelay_grpc_loop_turn(link->loop);
  link_turn(link, false);
  link_settle(link);
}

void kvrelay_grpc_link_kick(kvrelay_grpc_link *link) {
  if (link->is_kicked)
    return;
  link->is_kicked = true;
  TAILQ_INSERT_TAIL(&link->loop->kicked, link, kicked);
  kvrelay_grpc_loop_kick(link->loop);
}

/* ---- link: input ---- */

static void link_feed(kvrelay_grpc_link *link, const uint8_t *bytes, size_t len) {
  while (len > 0 && link->err == 0) {
    size_t n = link->events->received(link, bytes, len);
    if (n == 0)
      return;
    ssize_t used = nghttp2_session_mem_recv(link->session, bytes, n);
    if (used < 0)
      kvrelay_grpc_link_fail(link,
                             used == NGHTTP2_ERR_NOMEM ? KVRELAY_TRANSPORT_ERR_MEMORY
                                                       : KVRELAY_TRANSPORT_ERR_PROTOCOL,
                             nghttp2_strerror((int)used));
    bytes += n;
    len -= n;
  }
}

static void link_give_away(kvrelay_grpc_link *link) {
  const int fd = link->fd;
  kvrelay_secure_session *secure = link->secure;
  event_del(link->readable); /* before somebody else watches or closes it */
  event_del(link->writable);
  link->fd = -1;
  link->secure = NULL;
  kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "given away");
  link->events->given_away(link, fd, secure);
}

/* Hands the socket over if its first byte says that it is not ours. */
static void link_tell_apart(kvrelay_grpc_link *link) {
  uint8_t first;
  if (recv(link->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1)
    return; /* what it is instead, the read that follows tells */
  bool foreign = first == link->foreign_first;
  link->foreign_first = 0;
  if (foreign)
    link_give_away(link);
}

/* Bytes that came; 0: none now, or none any more. */
static size_t link_read(kvrelay_grpc_link *link) {
  if (link->secure != NULL) {
    ptrdiff_t n = link->secure->read(link->secure, link->loop->input, INPUT_CAP);
    if (n < 0)
      link_lost(link, n);
    return n > 0 ? (size_t)n : 0;
  }
  ssize_t n = read(link->fd, link->loop->input, INPUT_CAP);
  if (n == 0)
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "closed by the peer");
  else if (n < 0 && errno != EAGAIN && errno != EINTR)
    kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, strerror(errno));
  return n > 0 ? (size_t)n : 0;
}

/* Input that no readable socket announces. */
static bool link_pending(const kvrelay_grpc_link *link) {
  return link->secure != NULL && link->secure->pending;
}

static void link_receive(kvrelay_grpc_link *link) {
  for (int i = 0; i < READS_PER_TURN && link->err == 0; i++) {
    size_t n = link_read(link);
    if (n > 0 && link->err == 0 && !link->lingering && !link->closing)
      link_feed(link, link->loop->input, n);
    if (n < INPUT_CAP && !link_pending(link))
      break;
  }
  if (link->err == 0 && link_pending(link))
    kvrelay_grpc_link_rearm(link);
}

/* True once there is no handshake (any more). */
static bool link_shake(kvrelay_grpc_link *link) {
  if (!link->shaking)
    return true;
  int result = link->secure->handshake(link->secure);
  if (result < 0) {
    link_lost(link, result);
  } else if (result == KVRELAY_SECURE_OK) {
    link->shaking = false;
    if (link->events->secured != NULL)
      link->events->secured(link);
    if (link->foreign_protocol != NULL &&
        strcmp(link->secure->protocol, link->foreign_protocol) == 0)
      link_give_away(link);
  } else if (link->secure->wants_write) {
    link_await_writable(link);
  }
  return !link->shaking;
}

/* All that a link does when its turn has come. */
static void link_turn(kvrelay_grpc_link *link, bool readable) {
  if (readable && link->foreign_first != 0)
    link_tell_apart(link);
  if (link->err == 0 && link_shake(link) && (readable || link_pending(link)))
    link_receive(link);
  link_flush(link);
}

static void on_readable(evutil_socket_t fd, short what, void *link_) {
  kvrelay_grpc_link *link = link_;
  (void)fd;
  (void)what;
  kvrelay_grpc_loop_turn(link->loop);
  link_turn(link, true);
  link_settle(link);
}

/* ---- link: time ---- */

static void on_timer(void *link_) {
  kvrelay_grpc_link *link = link_;
  kvrelay_grpc_loop_turn(link->loop);
  const uint64_t now = link->loop->now_ns;
  link->timer_at_ns = KVRELAY_TIME_NONE;
  if (link->lingering) {
    if (now >= link->linger_until_ns)
      kvrelay_grpc_link_fail(link, KVRELAY_TRANSPORT_CLOSED, "closed");
  } else {
    link->events->tick(link, now);
    link_turn(link, false);
  }
  if (link->err == 0)
    kvrelay_grpc_link_rearm(link);
  link_settle(link);
}

void kvrelay_grpc_link_rearm(kvrelay_grpc_link *link) {
  uint64_t at = link->lingering ? link->linger_until_ns : link->events->deadline_ns(link);
  if (link_pending(link) && !link->lingering)
    at = 0; /* in the next turn, behind the others */
  if (at == link->timer_at_ns)
    return;
  link->timer_at_ns = at;
  kvrelay_timer_set_at(&link->timer, at);
}

/* ---- link: life ---- */

int kvrelay_grpc_link_open(kvrelay_grpc_link *link, kvrelay_grpc_loop *loop,
                           const kvrelay_grpc_link_events *events, int fd, size_t out_threshold) {
  link->loop = loop;
  link->events = events;
  link->fd = fd;
  link->out_threshold = out_threshold;
  link->timer_at_ns = KVRELAY_TIME_NONE;
  link->out = evbuffer_new();
  link->readable = event_new(loop->base, fd, EV_READ | EV_PERSIST, on_readable, link);
  link->writable = event_new(loop->base, fd, EV_WRITE, on_writable, link);
  if (link->out == NULL || link->readable == NULL || link->writable == NULL ||
      event_add(link->readable, NULL) != 0 ||
      kvrelay_timer_open(&link->timer, loop->base, on_timer, link) != KVRELAY_TRANSPORT_OK) {
    kvrelay_grpc_link_close(link);
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  }
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_grpc_link_secure(kvrelay_grpc_link *link, kvrelay_security *security,
                             const char *peer_name) {
  char protocols[64] = "h2";
  if (link->foreign_protocol != NULL)
    snprintf(protocols, sizeof protocols, "h2,%s", link->foreign_protocol);
  const kvrelay_secure_config cfg = {link->fd, protocols, true, peer_name};
  link->secure = security->session(security, &cfg);
  link->shaking = link->secure != NULL;
  return link->shaking ? KVRELAY_TRANSPORT_OK : KVRELAY_TRANSPORT_ERR_MEMORY;
}

void kvrelay_grpc_link_close(kvrelay_grpc_link *link) {
  if (link->secure != NULL) {
    (void)link->secure->shutdown(link->secure); /* if it still can be said */
    link->secure->close(link->secure);
    link->secure = NULL;
  }
  if (link->is_kicked)
    TAILQ_REMOVE(&link->loop->kicked, link, kicked);
  link->is_kicked = false;
  if (link->session != NULL)
    nghttp2_session_del(link->session);
  if (link->readable != NULL)
    event_free(link->readable);
  if (link->writable != NULL)
    event_free(link->writable);
  kvrelay_timer_close(&link->timer);
  if (link->out != NULL)
    evbuffer_free(link->out);
  if (link->fd >= 0)
    close(link->fd);
  link->session = NULL;
  link->readable = link->writable = NULL;
  link->out = NULL;
  link->fd = -1;
}
