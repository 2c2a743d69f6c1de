/* SPDX-License-Identifier: Apache-2.0 */
#include "zmq_sub.h"

#include <errno.h>
#include <event2/event.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "zmq_message.h"

#define FRAMES_MAX 3 /* of a live message */
#define HANDSHAKE_FAILED                                                                           \
  (ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |                    \
   ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)

/* A connection as the monitor tells of it. */
typedef struct monitored {
  uint32_t fd;
  bool publisher; /* past its handshake */
} monitored;

struct kvrelay_zmq_sub {
  kvrelay_zmq_listener *listener;
  void *socket, *monitor;
  struct event *readable, *monitor_readable;
  kvrelay_timer again, redial;
  size_t max_payload_bytes;
  unsigned max_batches;
  monitored *links; /* those that stand, the newest last */
  size_t links_len, links_cap;
  unsigned publishers; /* among them */
  unsigned failed;     /* handshakes that failed and whose end is still to be told */
  bool connected;      /* as last told */
  bool reached;        /* the attempt under way got as far as a connection */
  bool bound;
  unsigned redial_ms;
  unsigned attempts; /* that libzmq has made by itself, modulo 2^32 */
  char endpoint[512];
};

kvrelay_zmq_sub_config kvrelay_zmq_sub_config_default(void) {
  kvrelay_zmq_sub_config cfg = {.max_payload_bytes = (size_t)64 << 20,
                                .max_batches = 256,
                                .attempt_ms = 10000,
                                .reconnect_min_ms = 100,
                                .reconnect_max_ms = 5000};
  return cfg;
}

const char *kvrelay_zmq_failure_name(int failure) {
  static const char *const names[KVRELAY_ZMQ_FAILURES] = {
      NULL, "unreachable", "no_handshake", "protocol", "refused", "not_accepted"};
  return failure > 0 && failure < KVRELAY_ZMQ_FAILURES ? names[failure] : "unknown";
}

/* ---- the monitor ---- */

typedef struct monitor_event {
  uint16_t what;
  uint32_t value;
} monitor_event;

/* One message of the monitor: the event's number and value in host order, then an address.  False:
 * none is waiting. */
static bool monitor_next(void *monitor, monitor_event *event) {
  int more = 1;
  memset(event, 0, sizeof *event);
  for (bool first = true; more; first = false) {
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    if (zmq_msg_recv(&frame, monitor, ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(&frame);
      return false;
    }
    const uint8_t *bytes = zmq_msg_data(&frame);
    if (first && zmq_msg_size(&frame) >= sizeof event->what + sizeof event->value) {
      memcpy(&event->what, bytes, sizeof event->what);
      memcpy(&event->value, bytes + sizeof event->what, sizeof event->value);
    }
    more = zmq_msg_more(&frame);
    zmq_msg_close(&frame);
  }
  return true;
}

/*
 * libzmq gives a peer up for good when that speaks something else, or sends more than it may.  So
 * when an end was not followed by libzmq's own news of another attempt, the attempt is made by
 * on_redial.
 */
static void redial_later(kvrelay_zmq_sub *sub) {
  if (!sub->bound)
    kvrelay_timer_set(&sub->redial, sub->redial_ms * UINT64_C(1000000));
}

static void tell_failure(kvrelay_zmq_sub *sub, int failure, uint64_t now_ns, const char *text) {
  if (sub->listener->failed != NULL)
    sub->listener->failed(sub->listener, failure, text, now_ns);
}

/* Why an attempt came to nothing. */
static void judge_failure(kvrelay_zmq_sub *sub, const monitor_event *event, uint64_t now_ns) {
  char text[128];
  const int number = (int)event->value;
  switch (event->what) {
  case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
    if (number == EAGAIN)
      snprintf(text, sizeof text, "no handshake in time: the peer is silent, or no ZeroMQ");
    else
      snprintf(text, sizeof text, "the peer broke off the handshake: %s", strerror(number));
    tell_failure(sub, KVRELAY_ZMQ_NO_HANDSHAKE, now_ns, text);
    break;
  case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
    if (event->value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
      snprintf(text, sizeof text, "the peer asks for PLAIN or CURVE, which is not spoken here");
    else
      snprintf(text, sizeof text, "the peer breaks the protocol: 0x%08" PRIx32, event->value);
    tell_failure(sub, KVRELAY_ZMQ_PROTOCOL, now_ns, text);
    break;
  case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
    snprintf(text, sizeof text, "the peer's authentication says %" PRIu32, event->value);
    tell_failure(sub, KVRELAY_ZMQ_REFUSED, now_ns, text);
    break;
  case ZMQ_EVENT_ACCEPT_FAILED:
    tell_failure(sub, KVRELAY_ZMQ_NOT_ACCEPTED, now_ns, strerror(number));
    break;
  case ZMQ_EVENT_CONNECT_RETRIED:
    /* One that got as far as a connection has told its end before. */
    if (!sub->reached)
      tell_failure(sub, KVRELAY_ZMQ_UNREACHABLE, now_ns,
                   "nobody listens there, or the name does not resolve");
    sub->reached = false;
    break;
  default:
    sub->reached |= event->what == ZMQ_EVENT_CONNECTED;
    break;
  }
}

/* One that there is no memory for is not known: it counts as no publisher, whatever it sends. */
static void add_link(kvrelay_zmq_sub *sub, uint32_t fd) {
  if (sub->links_len == sub->links_cap) {
    const size_t cap = sub->links_cap * 2 + 4;
    monitored *grown = realloc(sub->links, cap * sizeof *grown);
    if (grown == NULL)
      return;
    sub->links = grown;
    sub->links_cap = cap;
  }
  sub->links[sub->links_len++] = (monitored){fd, false};
}

/* The monitor does not say whose handshake that was: the newest that waits for one. */
static void promote_link(kvrelay_zmq_sub *sub) {
  size_t i = sub->links_len;
  while (i > 0 && sub->links[i - 1].publisher)
    i--;
  if (i == 0)
    return;
  sub->links[i - 1].publisher = true;
  sub->publishers++;
}

static void remove_link(kvrelay_zmq_sub *sub, uint32_t fd, uint64_t now_ns) {
  size_t i = 0;
  while (i < sub->links_len && sub->links[i].fd != fd)
    i++;
  if (i == sub->links_len)
    return;
  const bool publisher = sub->links[i].publisher;
  memmove(&sub->links[i], &sub->links[i + 1], (--sub->links_len - i) * sizeof *sub->links);
  if (publisher)
    sub->publishers--;
  else if (sub->failed > 0)
    sub->failed--; /* told when it failed */
  else
    tell_failure(sub, KVRELAY_ZMQ_NO_HANDSHAKE, now_ns,
                 "the peer left without a handshake: ZeroMQ 2, or something else");
}

static void count_connections(kvrelay_zmq_sub *sub, const monitor_event *event, uint64_t now_ns) {
  if (event->what == ZMQ_EVENT_CONNECT_RETRIED || event->what == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
    kvrelay_timer_set(&sub->redial, KVRELAY_TIME_NONE);
    sub->attempts++;
  }
  if (event->what == ZMQ_EVENT_CONNECTED || event->what == ZMQ_EVENT_ACCEPTED)
    add_link(sub, event->value);
  else if (event->what == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
    promote_link(sub);
  else if ((event->what & HANDSHAKE_FAILED) != 0)
    sub->failed++;
  else if (event->what == ZMQ_EVENT_DISCONNECTED) {
    remove_link(sub, event->value, now_ns);
    redial_later(sub);
  }
}

static void drain_monitor(kvrelay_zmq_sub *sub, uint64_t now_ns) {
  monitor_event event;
  while (monitor_next(sub->monitor, &event)) {
    count_connections(sub, &event, now_ns);
    bool connected = sub->publishers != 0;
    if (connected != sub->connected) {
      sub->connected = connected;
      if (sub->listener->connection != NULL)
        sub->listener->connection(sub->listener, connected, now_ns);
    }
    judge_failure(sub, &event, now_ns);
  }
}

/* A loop that was held up has libzmq's news and this timer at once: the news come first. */
static void on_redial(void *argument) {
  kvrelay_zmq_sub *sub = argument;
  const unsigned before = sub->attempts;
  drain_monitor(sub, kvrelay_now_ns());
  if (sub->attempts != before)
    return;
  sub->reached = false;
  sub->links_len = sub->publishers = sub->failed =
      0; /* nothing tells the end of what is cut here */
  (void)zmq_disconnect(sub->socket, sub->endpoint);
  (void)zmq_connect(sub->socket, sub->endpoint);
}

static void on_monitor(evutil_socket_t fd, short what, void *argument) {
  (void)fd;
  (void)what;
  drain_monitor(argument, kvrelay_now_ns());
}

/*
 * The descriptor only says that something may have changed: everything that waits is taken, or the
 * loop is asked to come again.  That is done by a timer: an event that activates itself would run
 * on and on before anybody else's.
 */
static void take(void *argument) {
  kvrelay_zmq_sub *sub = argument;
  uint64_t now_ns = kvrelay_now_ns();
  unsigned batches = 0;
  /* libzmq wakes only a reader that has found nothing before: without a first look the monitor
   * would be silent until a batch arrives. */
  drain_monitor(sub, now_ns);
  for (; batches < sub->max_batches; batches++) {
    kvrelay_zmq_message message;
    if (!kvrelay_zmq_receive(sub->socket, &message))
      break;
    drain_monitor(sub, now_ns); /* the news of a connection precedes its batches */
    kvrelay_zmq_deliver(sub->listener, &message, FRAMES_MAX, sub->max_payload_bytes, now_ns);
  }
  if (batches == sub->max_batches)
    kvrelay_timer_set(&sub->again, 0);
  sub->listener->turn(sub->listener, now_ns);
}

static void on_readable(evutil_socket_t fd, short what, void *sub) {
  (void)fd;
  (void)what;
  take(sub);
}

static bool set_options(void *socket, const kvrelay_zmq_sub_config *cfg) {
  const char *topic = cfg->topic == NULL ? "" : cfg->topic;
  /* TCP finds a machine that is gone; heartbeats of ZMTP would need a publisher that answers them.
   */
  return kvrelay_zmq_set_options(socket, cfg->max_payload_bytes, cfg->high_water,
                                 cfg->attempt_ms) &&
         kvrelay_zmq_set_int(socket, ZMQ_RECONNECT_IVL, (int)cfg->reconnect_min_ms) &&
         kvrelay_zmq_set_int(socket, ZMQ_RECONNECT_IVL_MAX, (int)cfg->reconnect_max_ms) &&
         kvrelay_zmq_set_int(socket, ZMQ_TCP_KEEPALIVE, 1) &&
         kvrelay_zmq_set_int(socket, ZMQ_TCP_KEEPALIVE_IDLE, 30) &&
         kvrelay_zmq_set_int(socket, ZMQ_TCP_KEEPALIVE_INTVL, 10) &&
         kvrelay_zmq_set_int(socket, ZMQ_TCP_KEEPALIVE_CNT, 3) &&
         zmq_setsockopt(socket, ZMQ_SUBSCRIBE, topic, strlen(topic)) == 0;
}

/*
 * The monitor stands before the first connection, so that it misses none.  Its queue has no limit:
 * a thread of libzmq that waits for room there holds the lock that zmq_socket_monitor takes in
 * kvrelay_zmq_sub_close, which would then wait for ever.
 */
static bool open_monitor(kvrelay_zmq_sub *sub, void *context) {
  const int watched = ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_ACCEPTED |
                      ZMQ_EVENT_ACCEPT_FAILED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                      ZMQ_EVENT_DISCONNECTED | HANDSHAKE_FAILED;
  char where[64];
  /* libzmq forgets the name of a closed monitor only some time later, when another socket may have
   * got the same memory. */
  snprintf(where, sizeof where, "inproc://kvrelay-monitor-%p-%" PRIu64, (void *)sub,
           kvrelay_now_ns());
  return zmq_socket_monitor(sub->socket, where, watched) == 0 &&
         (sub->monitor = zmq_socket(context, ZMQ_PAIR)) != NULL &&
         kvrelay_zmq_set_int(sub->monitor, ZMQ_LINGER, 0) &&
         kvrelay_zmq_set_int(sub->monitor, ZMQ_RCVHWM, 0) && zmq_connect(sub->monitor, where) == 0;
}

static int open_endpoint(kvrelay_zmq_sub *sub, const kvrelay_zmq_sub_config *cfg) {
  size_t len = sizeof sub->endpoint;
  if ((cfg->bind ? zmq_bind : zmq_connect)(sub->socket, cfg->endpoint) != 0)
    return cfg->bind && errno != EINVAL && errno != EPROTONOSUPPORT ? KVRELAY_TRANSPORT_ERR_BIND
                                                                    : KVRELAY_TRANSPORT_ERR_ADDRESS;
  if (zmq_getsockopt(sub->socket, ZMQ_LAST_ENDPOINT, sub->endpoint, &len) != 0)
    sub->endpoint[0] = 0;
  return KVRELAY_TRANSPORT_OK;
}

static bool watch_all(kvrelay_zmq_sub *sub, struct event_base *base) {
  sub->monitor_readable = kvrelay_zmq_watch(base, sub->monitor, on_monitor, sub);
  sub->readable = kvrelay_zmq_watch(base, sub->socket, on_readable, sub);
  if (sub->monitor_readable == NULL || sub->readable == NULL ||
      kvrelay_timer_open(&sub->again, base, take, sub) != KVRELAY_TRANSPORT_OK ||
      kvrelay_timer_open(&sub->redial, base, on_redial, sub) != KVRELAY_TRANSPORT_OK)
    return false;
  kvrelay_timer_set(&sub->again, 0); /* unasked: for what arrived before the loop runs */
  return true;
}

int kvrelay_zmq_sub_open(const kvrelay_zmq_sub_config *cfg, kvrelay_zmq_listener *listener,
                         kvrelay_zmq_sub **out) {
  if (cfg->context == NULL || cfg->base == NULL || cfg->endpoint == NULL || cfg->max_batches == 0 ||
      cfg->max_payload_bytes == 0 || cfg->max_payload_bytes > INT64_MAX / 2 ||
      cfg->reconnect_min_ms == 0 || cfg->reconnect_min_ms > cfg->reconnect_max_ms ||
      cfg->reconnect_max_ms > INT_MAX || cfg->attempt_ms == 0 || cfg->attempt_ms > INT_MAX ||
      cfg->high_water > INT_MAX)
    return KVRELAY_TRANSPORT_ERR_ARG;
  kvrelay_zmq_sub *sub = calloc(1, sizeof *sub);
  if (sub == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  sub->listener = listener;
  sub->max_payload_bytes = cfg->max_payload_bytes;
  sub->max_batches = cfg->max_batches;
  sub->bound = cfg->bind;
  sub->redial_ms = cfg->reconnect_max_ms;
  sub->socket = zmq_socket(cfg->context, ZMQ_SUB);
  bool ready =
      sub->socket != NULL && set_options(sub->socket, cfg) && open_monitor(sub, cfg->context);
  int err = ready ? open_endpoint(sub, cfg) : KVRELAY_TRANSPORT_ERR_SYSTEM;
  if (err == KVRELAY_TRANSPORT_OK && !watch_all(sub, cfg->base))
    err = KVRELAY_TRANSPORT_ERR_MEMORY;
  if (err != KVRELAY_TRANSPORT_OK) {
    int saved = errno;
    kvrelay_zmq_sub_close(sub);
    errno = saved;
    return err;
  }
  *out = sub;
  return KVRELAY_TRANSPORT_OK;
}

const char *kvrelay_zmq_sub_endpoint(const kvrelay_zmq_sub *sub) { return sub->endpoint; }

void kvrelay_zmq_sub_close(kvrelay_zmq_sub *sub) {
  if (sub == NULL)
    return;
  if (sub->readable != NULL)
    event_free(sub->readable);
  if (sub->monitor_readable != NULL)
    event_free(sub->monitor_readable);
  kvrelay_timer_close(&sub->again);
  kvrelay_timer_close(&sub->redial);
  if (sub->socket != NULL) {
    (void)zmq_socket_monitor(sub->socket, NULL, 0);
    zmq_close(sub->socket);
  }
  if (sub->monitor != NULL)
    zmq_close(sub->monitor);
  free(sub->links);
  free(sub);
}
