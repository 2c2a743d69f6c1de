/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp_link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define INPUT_CAP ((size_t)262144)
#define OUT_CAP (2 * KVRELAY_TCP_OUT_FILL) /* of a fresh output buffer */
#define OUT_MAX ((size_t)1 << 20) /* waiting bytes above which nothing more is read either */
/* Bodies from here on are not copied while the socket has room. */
#define LARGE_BODY ((size_t)16384)
/* Bytes of one link in one turn, then the others. */
#define TURN_BYTES ((size_t)4 << 20)
#define SPARE_MAX ((size_t)16 << 20)
#define MAX_STRIKES 2
/* What waits, and the parts of a body. */
#define OUT_PIECES (1 + KVRELAY_PARTS_CAP)

/* ---- end ---- */

void kvrelay_tcp_link_kick_(kvrelay_tcp_link *link) {
  link->is_dirty = true;
  TAILQ_INSERT_TAIL(&link->hub->dirty, link, dirty);
  link->hub->dirty_len++;
}

static void unkick(kvrelay_tcp_link *link) {
  if (!link->is_dirty)
    return;
  link->is_dirty = false;
  TAILQ_REMOVE(&link->hub->dirty, link, dirty);
  link->hub->dirty_len--;
}

void kvrelay_tcp_link_fail(kvrelay_tcp_link *link, int err, const char *text) {
  if (link->err != 0)
    return;
  link->err = err;
  if (text != link->text)
    snprintf(link->text, sizeof link->text, "%s", text);
  kvrelay_tcp_link_kick(link);
}

/* The connection is over; one that was closing anyway ends for that reason. */
static void fail_for(kvrelay_tcp_link *link, int err, const char *text) {
  if (link->closing)
    kvrelay_tcp_link_fail(link, link->closing_err, link->text[0] ? link->text : "closed");
  else
    kvrelay_tcp_link_fail(link, err, text);
}

static void fail_lost(kvrelay_tcp_link *link, const char *text) {
  fail_for(link, KVRELAY_TRANSPORT_ERR_CONNECT, text);
}

static void fail_end(kvrelay_tcp_link *link) {
  fail_lost(link,
            kvrelay_framer_empty(&link->framer) ? "closed by the peer" : "cut off by the peer");
}

/* What a session says that is below 0. */
static void fail_session(kvrelay_tcp_link *link, ptrdiff_t code) {
  if (code == KVRELAY_SECURE_CLOSED)
    fail_end(link);
  else
    fail_for(link,
             code == KVRELAY_SECURE_CUT ? KVRELAY_TRANSPORT_ERR_CONNECT
                                        : KVRELAY_TRANSPORT_ERR_SECURITY,
             link->secure->text);
}

void kvrelay_tcp_link_rearm(kvrelay_tcp_link *link, uint64_t at_ns) {
  link->hub->tick_ns = kvrelay_earlier_ns(link->hub->tick_ns, at_ns);
}

/* ---- output ---- */

static size_t waiting(const kvrelay_tcp_link *link) { return link->to - link->from; }

/* What its input asks for would find no room. */
static bool deaf(const kvrelay_tcp_link *link) { return waiting(link) > OUT_MAX && !link->closing; }

static bool grow(kvrelay_tcp_link *link, size_t len) {
  kvrelay_tcp_hub *hub = link->hub;
  if (link->out == NULL && hub->spare_cap >= len) {
    link->out = hub->spare;
    link->out_cap = hub->spare_cap;
    hub->spare = NULL;
    hub->spare_cap = 0;
    return true;
  }
  size_t cap = waiting(link) + len;
  cap = cap < OUT_CAP ? OUT_CAP : cap + cap / 2;
  uint8_t *grown = realloc(link->out, cap);
  if (grown == NULL)
    return false;
  link->out = grown;
  link->out_cap = cap;
  return true;
}

uint8_t *kvrelay_tcp_link_put(kvrelay_tcp_link *link, size_t len) {
  if (link->out_cap - link->to < len) {
    if (link->from > 0)
      memmove(link->out, link->out + link->from, waiting(link));
    link->to -= link->from;
    link->from = 0;
    if (link->out_cap - link->to < len && !grow(link, len)) {
      kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for output");
      return NULL;
    }
  }
  return link->out + link->to;
}

static void drop_spare(kvrelay_tcp_hub *hub) {
  free(hub->spare);
  hub->spare = NULL;
  hub->spare_cap = 0;
}

/* Memory of output that is all gone serves another link. */
static void release_output(kvrelay_tcp_link *link) {
  kvrelay_tcp_hub *hub = link->hub;
  if (link->out == NULL || waiting(link) > 0)
    return;
  if (link->out_cap > hub->spare_cap && link->out_cap <= SPARE_MAX) {
    free(hub->spare);
    hub->spare = link->out;
    hub->spare_cap = link->out_cap;
  } else {
    free(link->out);
  }
  link->out = NULL;
  link->out_cap = link->from = link->to = 0;
}

static uint32_t body_len_at(const uint8_t *header) {
  return header[0] | (uint32_t)header[1] << 8 | (uint32_t)header[2] << 16 |
         (uint32_t)header[3] << 24;
}

/* `n` bytes are out, of what waits and of `extra` bytes of a last body behind it. */
static void note_sent(kvrelay_tcp_link *link, size_t n, size_t extra) {
  const size_t own = waiting(link) < n ? waiting(link) : n;
  if (n == waiting(link) + extra)
    link->cut = n;
  while (link->cut < n)
    link->cut += KVRELAY_RAW_HEADER_LEN + body_len_at(link->out + link->from + link->cut);
  link->cut -= n;
  link->from += own;
  link->sent += n;
  if (deaf(link) && n > 0) { /* a PONG would not be seen, but it takes what it gets */
    link->received_ns = link->hub->now_ns;
    link->ping_ns = 0;
  }
}

/* One gathered write; the bytes taken.  With less than all `blocked` says whether that is it for
 * now. */
static size_t write_pieces(kvrelay_tcp_link *link, const kvrelay_iov *pieces, size_t len,
                           size_t bytes) {
  struct iovec list[OUT_PIECES];
  const struct msghdr message = {.msg_iov = list, .msg_iovlen = len};
  if (link->secure != NULL) {
    const ptrdiff_t n = link->secure->write(link->secure, pieces, len);
    if (n < 0)
      fail_session(link, n);
    link->blocked = n <= 0 || link->secure->wants_write;
    return n > 0 ? (size_t)n : 0;
  }
  for (size_t i = 0; i < len; i++)
    list[i] = (struct iovec){(void *)(uintptr_t)pieces[i].base, pieces[i].len};
  const ssize_t n = sendmsg(link->watch.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
    fail_lost(link, strerror(errno));
  link->blocked = n < 0 || (size_t)n < bytes;
  return n > 0 ? (size_t)n : 0;
}

/* The first `n` bytes are done with. */
static void parts_skip(kvrelay_parts *parts, size_t n) {
  parts->bytes -= n;
  for (size_t i = 0; n > 0; i++) {
    kvrelay_iov *part = &parts->part[i];
    const size_t skip = part->len < n ? part->len : n;
    part->base = skip > 0 ? part->base + skip : part->base;
    part->len -= skip;
    n -= skip;
  }
}

/* Writes what waits and a body behind it, once; what is taken of the body is skipped in it. */
static void send_waiting(kvrelay_tcp_link *link, kvrelay_parts *body) {
  const size_t own = waiting(link), extra = body != NULL ? body->bytes : 0;
  kvrelay_iov pieces[OUT_PIECES] = {{link->out + link->from, own}};
  size_t len = 1;
  for (size_t i = 0; body != NULL && i < body->part_len; i++)
    pieces[len++] = body->part[i];
  const size_t n = write_pieces(link, pieces, len, own + extra);
  note_sent(link, n, extra);
  if (body != NULL && n > own)
    parts_skip(body, n - own);
}

static void put_body(kvrelay_tcp_link *link, const kvrelay_parts *body) {
  uint8_t *to = kvrelay_tcp_link_put(link, body->bytes);
  if (to == NULL)
    return;
  for (size_t i = 0; i < body->part_len; i++) {
    if (body->part[i].len > 0)
      memcpy(to, body->part[i].base, body->part[i].len);
    to += body->part[i].len;
  }
  kvrelay_tcp_link_put_done(link, body->bytes);
}

void kvrelay_tcp_link_put_frame(kvrelay_tcp_link *link, int32_t type, uint32_t stream, uint16_t aux,
                                const kvrelay_parts *body) {
  const bool large = body->bytes >= LARGE_BODY && !link->blocked;
  uint8_t *to = kvrelay_tcp_link_put(link, KVRELAY_RAW_HEADER_LEN + (large ? 0 : body->bytes));
  kvrelay_parts left = *body;
  if (to == NULL)
    return;
  kvrelay_raw_header_put(to, type, stream, aux, (uint32_t)body->bytes);
  kvrelay_tcp_link_put_done(link, KVRELAY_RAW_HEADER_LEN);
  while (large && left.bytes > 0 && !link->blocked) /* a session takes a piece at a time */
    send_waiting(link, &left);
  if (left.bytes > 0)
    put_body(link, &left);
}

/* A small frame ahead of all that waits, but not inside the frame that is on its way. */
static void put_first(kvrelay_tcp_link *link, const uint8_t *frame, size_t len) {
  uint8_t *to = kvrelay_tcp_link_put(link, len);
  if (to == NULL)
    return;
  to = link->out + link->from + link->cut;
  memmove(to + len, to, waiting(link) - link->cut);
  memcpy(to, frame, len);
  kvrelay_tcp_link_put_done(link, len);
}

static void put_ping(kvrelay_tcp_link *link, int32_t type, const uint8_t bytes[8]) {
  uint8_t frame[KVRELAY_RAW_HEADER_LEN + 8];
  kvrelay_raw_header_put(frame, type, 0, 0, 8);
  memcpy(frame + KVRELAY_RAW_HEADER_LEN, bytes, 8);
  put_first(link, frame, sizeof frame);
}

void kvrelay_tcp_link_goaway(kvrelay_tcp_link *link, int32_t code, const char *text) {
  uint8_t frame[KVRELAY_RAW_SMALL_CAP];
  put_first(link, frame, kvrelay_raw_goaway_put(frame, code, link->last_stream, text));
}

void kvrelay_tcp_link_finish(kvrelay_tcp_link *link, int err, uint64_t until_ns) {
  if (link->closing)
    return;
  link->closing_err = err;
  link->closing = true;
  link->closing_until_ns = until_ns;
  kvrelay_tcp_link_rearm(link, until_ns);
  kvrelay_tcp_link_kick(link);
}

void kvrelay_tcp_link_abort(kvrelay_tcp_link *link, int32_t code, const char *text) {
  if (link->closing || link->err != 0)
    return;
  snprintf(link->text, sizeof link->text, "%s", text);
  link->to = link->from + link->cut;
  kvrelay_tcp_link_goaway(link, code, text);
  kvrelay_tcp_link_finish(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                          kvrelay_later_ns(link->hub->now_ns, KVRELAY_SECOND_NS));
}

/* Says that nothing more comes. */
static void hang_up(kvrelay_tcp_link *link) {
  const int said = link->secure != NULL ? link->secure->shutdown(link->secure) : KVRELAY_SECURE_OK;
  if (said < 0)
    fail_session(link, said);
  if (said != KVRELAY_SECURE_OK)
    return; /* the session holds bytes: when the socket takes them */
  link->lingering = true;
  link->closing_until_ns = kvrelay_later_ns(link->hub->now_ns, KVRELAY_SECOND_NS);
  kvrelay_tcp_link_rearm(link, link->closing_until_ns);
  if (shutdown(link->watch.fd, SHUT_WR) != 0)
    fail_lost(link, strerror(errno));
}

static bool pending(const kvrelay_tcp_link *link) {
  return link->secure != NULL && link->secure->pending && !deaf(link);
}

static void flush(kvrelay_tcp_link *link) {
  const uint64_t until = link->sent + TURN_BYTES;
  bool more = true;
  while (more && link->sent < until) {
    if (kvrelay_tcp_link_has_room(link))
      link->events->fill(link);
    more = link->err == 0 && !link->blocked && waiting(link) > 0;
    if (more)
      send_waiting(link, NULL);
  }
  unkick(link); /* the puts of fill */
  release_output(link);
  if (link->err == 0 && link->closing && waiting(link) == 0 && !link->lingering)
    hang_up(link);
  if (link->err != 0)
    return;
  if (more || pending(link))
    kvrelay_tcp_link_kick(link); /* goes on in the next turn */
  const bool full = link->secure != NULL ? link->secure->wants_write : link->blocked;
  kvrelay_tcp_loop_want(&link->hub->loop, &link->watch,
                        (short)((deaf(link) ? 0 : POLLIN) | (full ? POLLOUT : 0)));
}

/* ---- input ---- */

static bool listens(const kvrelay_tcp_link *link) { return link->err == 0 && !link->closing; }

static void on_ping(kvrelay_tcp_link *link, const kvrelay_frame *f) {
  const uint64_t now = link->hub->now_ns;
  const bool early =
      link->peer_ping_ns != 0 && now - link->peer_ping_ns < link->cfg.peer_ping_interval_ns;
  link->peer_ping_ns = now;
  link->strikes = early ? (uint8_t)(link->strikes + 1) : 0;
  if (link->strikes >= MAX_STRIKES)
    kvrelay_tcp_link_abort(link, KVRELAY_GOAWAY_TOO_MANY_PINGS, "too many pings");
  else
    put_ping(link, KVRELAY_FRAME_PONG, f->piece);
}

/* Bodies that came in one piece are handed on where they lie. */
static void on_piece(kvrelay_tcp_link *link, kvrelay_frame *f) {
  if (f->offset == 0 && !kvrelay_frame_done(f)) {
    link->body = malloc(f->body_len);
    if (link->body == NULL) {
      kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_MEMORY, "no memory for a message");
      return;
    }
    link->body_len = f->body_len;
  }
  if (link->body != NULL) {
    if (f->piece != link->body + f->offset) /* else it was read to where it belongs */
      memcpy(link->body + f->offset, f->piece, f->piece_len);
    link->body_got = f->offset + f->piece_len;
    if (!kvrelay_frame_done(f))
      return;
    f->piece = link->body;
    f->piece_len = f->body_len;
    f->offset = 0;
  }
  uint8_t *body = link->body;
  link->body = NULL;
  link->events->frame(link, f);
  free(body);
}

static void on_frame(kvrelay_tcp_link *link, kvrelay_frame *f) {
  switch (f->type) {
  case KVRELAY_FRAME_PING:
    on_ping(link, f);
    break;
  case KVRELAY_FRAME_PONG: /* like anything received: the peer lives */
    break;
  case KVRELAY_FRAME_REQUEST:
  case KVRELAY_FRAME_MESSAGE:
    on_piece(link, f);
    break;
  default:
    link->events->frame(link, f);
    break;
  }
}

/* The bytes used of these for the preface. */
static size_t feed_preface(kvrelay_tcp_link *link, const uint8_t *bytes, size_t len) {
  const size_t left = KVRELAY_RAW_PREFACE_LEN - link->preface_len, n = len < left ? len : left;
  kvrelay_raw_preface preface;
  memcpy(link->preface + link->preface_len, bytes, n);
  link->preface_len = (uint8_t)(link->preface_len + n);
  const int err =
      kvrelay_raw_preface_get(link->preface, link->preface_len, link->cfg.from_client, &preface);
  if (err != KVRELAY_ERR_TRUNCATED)
    link->events->preface(link, err, &preface);
  kvrelay_tcp_link_rearm(link,
                         kvrelay_later_ns(link->hub->now_ns, link->cfg.keepalive_interval_ns));
  return n;
}

static void feed(kvrelay_tcp_link *link, const uint8_t *bytes, size_t len) {
  kvrelay_frame f;
  if (link->preface_len < KVRELAY_RAW_PREFACE_LEN && len > 0 && listens(link)) {
    const size_t n = feed_preface(link, bytes, len);
    bytes += n;
    len -= n;
    if (link->preface_len < KVRELAY_RAW_PREFACE_LEN)
      return;
  }
  while (listens(link)) {
    const ptrdiff_t n = kvrelay_framer_feed(&link->framer, bytes, len, &f);
    if (n < 0) {
      const bool limit = n == KVRELAY_ERR_LIMIT;
      kvrelay_tcp_link_abort(link, limit ? KVRELAY_GOAWAY_LIMIT : KVRELAY_GOAWAY_PROTOCOL_ERROR,
                             limit ? "frame above the limit" : "a frame that does not belong here");
      return;
    }
    if (f.type == KVRELAY_FRAME_NONE)
      return;
    bytes += n;
    len -= (size_t)n;
    on_frame(link, &f);
  }
}

/* The rest of a body that has begun is read to where it belongs, `direct`, and if there is room in
 * the same read what follows to the hub's input.  The bytes read; 0: none now. */
static size_t read_some(kvrelay_tcp_link *link, uint8_t *direct, size_t direct_len) {
  uint8_t *input = link->hub->input;
  if (link->secure != NULL) {
    const ptrdiff_t n = link->secure->read(link->secure, direct_len > 0 ? direct : input,
                                           direct_len > 0 ? direct_len : INPUT_CAP);
    if (n < 0)
      fail_session(link, n);
    return n > 0 ? (size_t)n : 0;
  }
  const struct iovec pieces[2] = {{direct, direct_len}, {input, INPUT_CAP}};
  const bool both = direct_len > 0;
  const ssize_t n = readv(link->watch.fd, both ? pieces : pieces + 1, both ? 2 : 1);
  if (n == 0)
    fail_end(link);
  else if (n < 0 && errno != EAGAIN && errno != EINTR)
    fail_lost(link, strerror(errno));
  return n > 0 ? (size_t)n : 0;
}

/* False: there is no more now. */
static bool read_once(kvrelay_tcp_link *link, size_t *spent) {
  const kvrelay_tcp_hub *hub = link->hub;
  uint8_t *direct = link->body != NULL ? link->body + link->body_got : NULL;
  const size_t direct_len = link->body != NULL ? link->body_len - link->body_got : 0;
  const size_t got = read_some(link, direct, direct_len);
  if (got == 0)
    return false;
  const size_t first = got < direct_len ? got : direct_len;
  link->received_ns = hub->now_ns;
  link->ping_ns = 0;
  if (first > 0)
    feed(link, direct, first);
  if (got > first)
    feed(link, hub->input, got - first);
  *spent += got;
  return link->secure != NULL || got == direct_len + INPUT_CAP;
}

static void receive(kvrelay_tcp_link *link) {
  size_t spent = 0;
  while (link->err == 0 && read_once(link, &spent) && spent < TURN_BYTES && !deaf(link))
    continue;
}

/* What the session has to do before anything else goes out, and what only it knows to be there. */
static void session_turn(kvrelay_tcp_link *link) {
  kvrelay_secure_session *s = link->secure;
  ptrdiff_t n = KVRELAY_SECURE_AGAIN;
  if (link->closing && waiting(link) == 0)
    return; /* it hangs up */
  if (link->shaking)
    n = s->handshake(s);
  else if (s->wants_write)
    n = s->write(s, NULL, 0);
  if (n < 0) {
    fail_session(link, n);
    return;
  }
  const bool shaken = link->shaking && n == KVRELAY_SECURE_OK;
  link->shaking &= !shaken;
  link->blocked = link->shaking || s->wants_write;
  if (shaken && link->events->secured != NULL)
    link->events->secured(link);
  if (!link->shaking && pending(link))
    receive(link);
}

static void on_ready(kvrelay_tcp_watch *watch, short events) {
  kvrelay_tcp_link *link = (kvrelay_tcp_link *)watch;
  if ((events & POLLOUT) && link->secure == NULL)
    link->blocked = false;
  if ((events & POLLIN) && !link->shaking)
    receive(link);
  kvrelay_tcp_link_kick(link);
}

/* ---- time ---- */

static uint64_t link_deadline_ns(const kvrelay_tcp_link *link) {
  if (link->err != 0)
    return KVRELAY_TIME_NONE;
  if (link->closing)
    return link->closing_until_ns;
  uint64_t at = kvrelay_earlier_ns(
      link->events->deadline_ns(link),
      link->ping_ns != 0 ? kvrelay_later_ns(link->ping_ns, link->cfg.keepalive_timeout_ns)
                         : kvrelay_later_ns(link->received_ns, link->cfg.keepalive_interval_ns));
  if (link->preface_len < KVRELAY_RAW_PREFACE_LEN)
    at = kvrelay_earlier_ns(at, kvrelay_later_ns(link->opened_ns, link->cfg.preface_timeout_ns));
  return at;
}

static void link_tick(kvrelay_tcp_link *link, uint64_t now) {
  static const uint8_t ping[8] = "kvrelay";
  if (link->closing) {
    fail_lost(link, "");
    return;
  }
  const bool greeted = link->preface_len == KVRELAY_RAW_PREFACE_LEN;
  if (!greeted && now >= kvrelay_later_ns(link->opened_ns, link->cfg.preface_timeout_ns))
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_PROTOCOL,
                          link->shaking ? "no TLS handshake in time" : "no preface in time");
  else if (link->ping_ns != 0 &&
           now >= kvrelay_later_ns(link->ping_ns, link->cfg.keepalive_timeout_ns))
    kvrelay_tcp_link_fail(link, KVRELAY_TRANSPORT_ERR_CONNECT, "no answer to a keepalive PING");
  else if (link->ping_ns == 0 &&
           now >= kvrelay_later_ns(link->received_ns, link->cfg.keepalive_interval_ns)) {
    link->ping_ns = now;
    if (greeted)
      put_ping(link, KVRELAY_FRAME_PING, ping);
  }
  if (link->err == 0)
    link->events->tick(link, now);
}

/* Looks at all links when the first of their deadlines may have come: they mostly move away. */
static bool tick(kvrelay_tcp_hub *hub) {
  if (hub->now_ns < hub->tick_ns)
    return false;
  kvrelay_tcp_link *link;
  hub->tick_ns = KVRELAY_TIME_NONE;
  TAILQ_FOREACH(link, &hub->links, entry) {
    if (hub->now_ns >= link_deadline_ns(link))
      link_tick(link, hub->now_ns);
    kvrelay_tcp_link_rearm(link, link_deadline_ns(link));
  }
  return true;
}

/* ---- life ---- */

int kvrelay_tcp_link_open(kvrelay_tcp_link *link, kvrelay_tcp_hub *hub,
                          const kvrelay_tcp_link_events *events, const kvrelay_tcp_link_config *cfg,
                          int fd) {
  link->watch = (kvrelay_tcp_watch){.fd = fd, .wants = POLLIN, .ready = on_ready};
  link->hub = hub;
  link->events = events;
  link->cfg = *cfg;
  link->cut = 0;
  link->opened_ns = link->received_ns = kvrelay_now_ns();
  kvrelay_framer_init_raw(&link->framer, cfg->from_client, cfg->max_frame);
  kvrelay_secure_session *session = NULL;
  int err = KVRELAY_TRANSPORT_OK;
  if (cfg->security != NULL) {
    const kvrelay_secure_config secure = {fd, KVRELAY_SECURE_RAW, !cfg->from_client,
                                          cfg->peer_name};
    session = cfg->security->session(cfg->security, &secure);
    if (session == NULL)
      err = KVRELAY_TRANSPORT_ERR_MEMORY;
  }
  if (err == KVRELAY_TRANSPORT_OK)
    err = kvrelay_tcp_loop_watch(&hub->loop, &link->watch);
  if (err != KVRELAY_TRANSPORT_OK) {
    if (session != NULL)
      session->close(session);
    close(fd);
    return err;
  }
  TAILQ_INSERT_TAIL(&hub->links, link, entry);
  kvrelay_tcp_link_rearm(link, link_deadline_ns(link));
  if (session != NULL)
    kvrelay_tcp_link_secure(link, session);
  return KVRELAY_TRANSPORT_OK;
}

void kvrelay_tcp_link_secure(kvrelay_tcp_link *link, kvrelay_secure_session *session) {
  link->secure = session;
  link->shaking = link->blocked = true;
  kvrelay_tcp_link_kick(link);
}

void kvrelay_tcp_link_close(kvrelay_tcp_link *link) {
  if (link->secure != NULL) {
    (void)link->secure->shutdown(link->secure); /* if it still can be said */
    link->secure->close(link->secure);
  }
  unkick(link);
  TAILQ_REMOVE(&link->hub->links, link, entry);
  kvrelay_tcp_loop_unwatch(&link->hub->loop, &link->watch);
  close(link->watch.fd);
  link->from = link->to;
  release_output(link);
  free(link->body);
  if (TAILQ_EMPTY(&link->hub->links))
    drop_spare(link->hub);
}

/* ---- hub ---- */

int kvrelay_tcp_hub_open(kvrelay_tcp_hub *hub, void (*alarm)(void *owner, uint64_t now_ns),
                         void *owner) {
  memset(hub, 0, sizeof *hub);
  TAILQ_INIT(&hub->links);
  TAILQ_INIT(&hub->dirty);
  hub->tick_ns = hub->alarm_ns = KVRELAY_TIME_NONE;
  hub->alarm = alarm;
  hub->owner = owner;
  hub->now_ns = kvrelay_now_ns();
  hub->input = malloc(INPUT_CAP);
  if (hub->input == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  const int err = kvrelay_tcp_loop_open(&hub->loop);
  if (err != KVRELAY_TRANSPORT_OK)
    free(hub->input);
  return err;
}

void kvrelay_tcp_hub_close(kvrelay_tcp_hub *hub) {
  kvrelay_tcp_loop_close(&hub->loop);
  free(hub->input);
  drop_spare(hub);
}

/* Writes what can be written, and ends what has failed; each link once. */
static bool settle(kvrelay_tcp_hub *hub) {
  const size_t all = hub->dirty_len;
  for (size_t i = 0; i < all && !TAILQ_EMPTY(&hub->dirty); i++) {
    kvrelay_tcp_link *link = TAILQ_FIRST(&hub->dirty);
    unkick(link);
    if (link->err == 0 && link->secure != NULL)
      session_turn(link);
    if (link->err == 0)
      flush(link);
    if (link->err != 0)
      link->events->gone(link);
  }
  return all > 0;
}

uint64_t kvrelay_tcp_hub_deadline_ns(const kvrelay_tcp_hub *hub) {
  return !TAILQ_EMPTY(&hub->dirty) ? 0 : kvrelay_earlier_ns(hub->tick_ns, hub->alarm_ns);
}

int kvrelay_tcp_hub_run(kvrelay_tcp_hub *hub, uint64_t timeout_ns) {
  hub->now_ns = kvrelay_now_ns();
  bool happened = settle(hub);
  const uint64_t at = kvrelay_tcp_hub_deadline_ns(hub);
  const uint64_t left = at == KVRELAY_TIME_NONE ? at : at > hub->now_ns ? at - hub->now_ns : 0;
  const int n = kvrelay_tcp_loop_wait(
      &hub->loop, happened ? 0 : kvrelay_earlier_ns(timeout_ns, left), &hub->now_ns);
  if (n < 0)
    return n;
  happened |= n > 0;
  happened |= tick(hub);
  if (hub->now_ns >= hub->alarm_ns) {
    hub->alarm_ns = KVRELAY_TIME_NONE;
    hub->alarm(hub->owner, hub->now_ns);
    happened = true;
  }
  happened |= settle(hub);
  return happened;
}
