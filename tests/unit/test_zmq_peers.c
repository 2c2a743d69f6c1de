/* SPDX-License-Identifier: Apache-2.0 */

/* The ZeroMQ sockets of a source against peers that are something else, say no, break off at every
 * byte, crawl, are killed, or send more than anybody reads. */

#include "test_zmq.h"

#include "support/exchange.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

static int raw = -1; /* a listener that speaks what a test makes it speak */

static void setup_peers(void) {
  setup();
  b.cfg.reconnect_min_ms = 1;
  b.cfg.reconnect_max_ms = 20;
  b.cfg.attempt_ms = 300;
}

static void teardown_peers(void) {
  teardown();
  if (raw >= 0)
    close(raw);
  raw = -1;
}

TestSuite(zmq_peers, .init = setup_peers, .fini = teardown_peers, .timeout = 120);

/* RECONNECTS in the environment, else a hundred. */
static int reconnects(void) {
  const char *text = getenv("RECONNECTS");
  return text != NULL ? atoi(text) : 100;
}

static void raw_listen(void) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof at;
  raw = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int one = 1; /* an engine takes its place */
  cr_assert(raw >= 0 && setsockopt(raw, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
            bind(raw, (struct sockaddr *)&at, len) == 0 && listen(raw, 64) == 0);
  cr_assert_eq(getsockname(raw, (struct sockaddr *)&at, &len), 0);
  snprintf(b.endpoint, sizeof b.endpoint, "tcp://127.0.0.1:%d", ntohs(at.sin_port));
}

/* The next one that connects. */
static int raw_accept(void) {
  int fd = -1, one = 1;
  for (time_t start = time(NULL); (fd = accept4(raw, NULL, NULL, SOCK_CLOEXEC)) < 0; turn_us(1000))
    cr_assert_leq(time(NULL) - start, PATIENCE_S, "nobody connects");
  cr_assert_eq(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), 0);
  return fd;
}

/* The peer has gone, whatever it was, and an engine is in its place. */
static void must_recover(void) {
  char endpoint[256];
  snprintf(endpoint, sizeof endpoint, "%s", b.endpoint);
  if (raw >= 0)
    close(raw);
  raw = -1;
  if (b.pub != NULL)
    zmq_close(b.pub);
  publisher(endpoint);
  b.seen.messages = 0;
  meet();
  cr_assert_eq(b.seen.up, b.seen.down + 1);
}

/* ---- peers that are no engine: each is told by its kind ---- */

Test(zmq_peers, nobody_is_there) {
  raw_listen();
  close(raw);
  raw = -1;
  subscribe();
  WAIT_FOR(b.seen.failed[KVRELAY_ZMQ_UNREACHABLE] >= 3);
  cr_assert_eq(b.seen.failures, b.seen.failed[KVRELAY_ZMQ_UNREACHABLE], "%s", b.seen.failure);
  must_recover();
}

Test(zmq_peers, a_peer_that_says_nothing) {
  raw_listen();
  subscribe();
  const int fd = raw_accept();
  WAIT_FOR(b.seen.failed[KVRELAY_ZMQ_NO_HANDSHAKE] == 1);
  cr_assert_str_eq(b.seen.failure, "no handshake in time: the peer is silent, or no ZeroMQ");
  close(fd);
  must_recover();
  cr_assert_eq(b.seen.up, 1);
}

Test(zmq_peers, a_peer_that_breaks_off) {
  raw_listen();
  subscribe();
  for (int i = 1; i <= 5; i++) {
    close(raw_accept());
    WAIT_FOR(b.seen.failed[KVRELAY_ZMQ_NO_HANDSHAKE] >= i);
    cr_assert_eq(strncmp(b.seen.failure, "the peer broke off the handshake: ", 34), 0);
  }
  cr_assert_eq(b.seen.failed[KVRELAY_ZMQ_UNREACHABLE], 0, "it is there");
  must_recover();
}

/* A publisher with a security mechanism that is not ours. */
static void secured_publisher(int mechanism) {
  char public_key[41], secret_key[41];
  size_t len = sizeof b.endpoint;
  int one = 1;
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_eq(zmq_curve_keypair(public_key, secret_key), 0);
  cr_assert_eq(zmq_setsockopt(b.pub, mechanism, &one, sizeof one), 0);
  if (mechanism == ZMQ_CURVE_SERVER)
    cr_assert_eq(zmq_setsockopt(b.pub, ZMQ_CURVE_SECRETKEY, secret_key, 40), 0);
  cr_assert_eq(zmq_bind(b.pub, "tcp://127.0.0.1:*"), 0);
  cr_assert_eq(zmq_getsockopt(b.pub, ZMQ_LAST_ENDPOINT, b.endpoint, &len), 0);
}

Test(zmq_peers, a_peer_that_asks_for_PLAIN_or_CURVE) {
  const int mechanisms[] = {ZMQ_PLAIN_SERVER, ZMQ_CURVE_SERVER};
  for (size_t i = 0; i < 2; i++) {
    secured_publisher(mechanisms[i]);
    subscribe();
    WAIT_FOR(b.seen.failed[KVRELAY_ZMQ_PROTOCOL] >= 2);
    cr_assert_str_eq(b.seen.failure, "the peer asks for PLAIN or CURVE, which is not spoken here");
    cr_assert_eq(b.seen.up, b.seen.down);
    must_recover();
    kvrelay_zmq_sub_close(b.sub);
    zmq_close(b.pub);
    memset(b.seen.failed, 0, sizeof b.seen.failed);
    b.sub = NULL;
    b.pub = NULL;
    b.cfg.endpoint = NULL;
    b.seen.messages = 0;
    b.seen.up = b.seen.down = 0;
  }
}

/* Says no to whoever asks: version, number of the request, status, text, and two empty frames. */
static void refuse_all(void *judge) {
  char frames[8][64];
  int lens[8], count = 0, more = 1;
  size_t more_len = sizeof more;
  if ((lens[0] = zmq_recv(judge, frames[0], 64, ZMQ_DONTWAIT)) < 0)
    return;
  for (count = 1; count < 8; count++) {
    cr_assert_eq(zmq_getsockopt(judge, ZMQ_RCVMORE, &more, &more_len), 0);
    if (!more)
      break;
    lens[count] = zmq_recv(judge, frames[count], 64, 0);
  }
  cr_assert_geq(count, 6);
  zmq_send(judge, frames[0], (size_t)lens[0], ZMQ_SNDMORE);
  zmq_send(judge, frames[1], (size_t)lens[1], ZMQ_SNDMORE);
  zmq_send(judge, "400", 3, ZMQ_SNDMORE);
  zmq_send(judge, "no", 2, ZMQ_SNDMORE);
  zmq_send(judge, "", 0, ZMQ_SNDMORE);
  zmq_send(judge, "", 0, 0);
}

Test(zmq_peers, a_peer_that_refuses_us) {
  size_t len = sizeof b.endpoint;
  void *judge = zmq_socket(b.context, ZMQ_REP);
  cr_assert_eq(zmq_bind(judge, "inproc://zeromq.zap.01"), 0);
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_eq(zmq_setsockopt(b.pub, ZMQ_ZAP_DOMAIN, "test", 4), 0);
  cr_assert_eq(zmq_bind(b.pub, "tcp://127.0.0.1:*"), 0);
  cr_assert_eq(zmq_getsockopt(b.pub, ZMQ_LAST_ENDPOINT, b.endpoint, &len), 0);
  subscribe();
  while (b.seen.failed[KVRELAY_ZMQ_REFUSED] < 3) {
    refuse_all(judge);
    turn_us(1000);
  }
  cr_assert_str_eq(b.seen.failure, "the peer's authentication says 400");
  cr_assert_eq(b.seen.up, 0);
  zmq_close(judge);
  must_recover();
}

Test(zmq_peers, failures_have_names) {
  for (int i = 1; i < KVRELAY_ZMQ_FAILURES; i++)
    cr_assert_str_neq(kvrelay_zmq_failure_name(i), "unknown");
  cr_assert_str_eq(kvrelay_zmq_failure_name(0), "unknown");
  cr_assert_str_eq(kvrelay_zmq_failure_name(KVRELAY_ZMQ_FAILURES), "unknown");
}

/* ---- an engine byte by byte ---- */

/* ZMTP 3.0 as a publisher speaks it: greeting, READY, one message of three frames. */
static size_t engine_bytes(uint8_t *out) {
  static const uint8_t ready[] = "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";
  static const uint8_t message[] = "\x01\x02kv\x01\x08\0\0\0\0\0\0\0\x2a\x00\x07payload";
  memset(out, 0, 64);
  out[0] = 0xff;
  out[9] = 0x7f;
  out[10] = 3;
  memcpy(out + 12, "NULL", 4);
  memcpy(out + 64, ready, sizeof ready - 1);
  memcpy(out + 64 + sizeof ready - 1, message, sizeof message - 1);
  return 64 + sizeof ready - 1 + sizeof message - 1;
}

/* Writes it all; libzmq answers in between, and what it says is of no interest. */
static void write_bytes(int fd, const uint8_t *bytes, size_t len) {
  for (size_t at = 0; at < len;) {
    const ssize_t n = send(fd, bytes + at, len - at, MSG_NOSIGNAL);
    if (n < 0)
      return; /* it has given us up */
    at += (size_t)n;
  }
}

Test(zmq_peers, an_engine_that_crawls) {
  uint8_t bytes[256];
  const size_t len = engine_bytes(bytes);
  b.cfg.attempt_ms = 10000;
  raw_listen();
  subscribe();
  const int fd = raw_accept();
  for (size_t i = 0; i < len; i++) {
    cr_assert_eq(b.seen.messages, 0, "byte %zu of %zu", i, len);
    write_bytes(fd, bytes + i, 1);
    turn_us(1000);
  }
  WAIT_FOR(b.seen.messages == 1);
  cr_assert(b.seen.sequence[0] == 42 && b.seen.payload_len == 7 && b.seen.odd == 0);
  cr_assert_str_eq(b.seen.topic, "kv");
  cr_assert(b.seen.up == 1 && b.seen.failures == 0);
  close(fd);
  WAIT_FOR(b.seen.down == 1);
  must_recover();
}

Test(zmq_peers, an_engine_that_breaks_off_at_every_byte) {
  uint8_t bytes[256];
  const size_t len = engine_bytes(bytes);
  raw_listen();
  subscribe();
  for (size_t cut = 0; cut < len; cut++) {
    const int fd = raw_accept();
    write_bytes(fd, bytes, cut);
    close(fd);
  }
  for (int i = 0; i < 20; i++)
    turn();
  cr_assert_eq(b.seen.messages, 0, "no part of one is a message");
  must_recover();
}

/* ---- descriptors ---- */

Test(zmq_peers, reconnecting_leaves_no_descriptor_behind) {
  raw_listen();
  subscribe();
  for (int i = 0; i < 10; i++)
    close(raw_accept());
  const unsigned before = open_descriptors();
  for (int i = 0; i < reconnects(); i++)
    close(raw_accept());
  must_recover(); /* a socket more, and a descriptor of the listener less */
  zmq_close(b.pub);
  b.pub = NULL;
  for (int i = 0; i < PATIENCE_S * 50 && open_descriptors() > before; i++)
    turn();
  cr_assert_leq(open_descriptors(), before);
}

Test(zmq_peers, engines_that_restart_leave_no_descriptor_behind) {
  char endpoint[256];
  publisher("tcp://127.0.0.1:*");
  snprintf(endpoint, sizeof endpoint, "%s", b.endpoint);
  subscribe();
  unsigned before = 0;
  for (int i = 0; i < reconnects() / 2; i++) {
    WAIT_FOR(b.seen.up == i + 1);
    if (i == 5)
      before = open_descriptors();
    if (i > 5)
      cr_assert_leq(open_descriptors(), before + 2, "restart %d", i);
    zmq_close(b.pub);
    WAIT_FOR(b.seen.down == i + 1);
    publisher(endpoint);
  }
  meet();
}

/* ---- garbage to a port of ours ---- */

Test(zmq_peers, garbage_to_the_port_harms_nobody) {
  static const struct {
    const char *bytes;
    size_t len;
  } garbage[] = {
      {"", 0},
      {"\xff", 1},
      {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11},
      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33},
      {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27},
      {"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", 16},
      {"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE", 17},
      {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 16},
      {"\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16}, /* so did ZeroMQ 2 begin */
      {"KVRF\x01\x01\0\0\0\0\1\0\0\0\1\0", 16},
  };
  b.cfg.bind = true;
  b.cfg.endpoint = "tcp://127.0.0.1:*";
  subscribe();
  const int port = atoi(strrchr(kvrelay_zmq_sub_endpoint(b.sub), ':') + 1);
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_eq(zmq_connect(b.pub, kvrelay_zmq_sub_endpoint(b.sub)), 0);
  meet();
  const unsigned before = open_descriptors();
  const struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                 .sin_port = htons((uint16_t)port)};
  int fds[sizeof garbage / sizeof garbage[0]];
  for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
    fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(connect(fds[i], (const struct sockaddr *)&at, sizeof at), 0);
    write_bytes(fds[i], (const uint8_t *)garbage[i].bytes, garbage[i].len);
    publish(i);
    WAIT_FOR(b.seen.messages == i + 1);
  }
  WAIT_FOR(b.seen.failures == (int)(sizeof garbage / sizeof garbage[0]));
  for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++)
    close(fds[i]);
  for (int i = 0; i < PATIENCE_S * 50 && open_descriptors() > before; i++)
    turn();
  cr_assert_leq(open_descriptors(), before);
  cr_assert(b.seen.up == 1 && b.seen.down == 0, "the engine stays");
  cr_assert_eq(b.seen.bad_frames, 0);
}

/* Whose handshake it was that succeeded, the monitor does not say. */
Test(zmq_peers, a_stranger_that_came_before_the_engine) {
  static const uint8_t like_zeromq_2[] = {1, 0, 2, 0, 'x'}; /* no name, a frame */
  b.cfg.bind = true;
  b.cfg.endpoint = "tcp://127.0.0.1:*";
  subscribe();
  const int port = atoi(strrchr(kvrelay_zmq_sub_endpoint(b.sub), ':') + 1);
  const struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                 .sin_port = htons((uint16_t)port)};
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  cr_assert_eq(connect(stranger, (const struct sockaddr *)&at, sizeof at), 0);
  write_bytes(stranger, like_zeromq_2, sizeof like_zeromq_2);
  WAIT_FOR(b.seen.bad_frames > 0); /* it has been taken in */
  cr_assert_eq(b.seen.up, 0);
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_eq(zmq_connect(b.pub, kvrelay_zmq_sub_endpoint(b.sub)), 0);
  meet();
  close(stranger);
  WAIT_FOR(b.seen.failed[KVRELAY_ZMQ_NO_HANDSHAKE] == 1);
  cr_assert(b.seen.up == 1 && b.seen.down == 0, "the engine stays");
  zmq_close(b.pub);
  b.pub = NULL;
  WAIT_FOR(b.seen.down == 1);
}

/* ---- engines that are killed ---- */

/* Publishes numbers as fast as it can, from 0 on, until it is killed. */
static pid_t start_engine(const char *endpoint) {
  const pid_t child = fork();
  cr_assert_geq(child, 0);
  if (child > 0)
    return child;
  void *context = zmq_ctx_new(), *pub = zmq_socket(context, ZMQ_PUB);
  while (zmq_bind(pub, endpoint) != 0)
    usleep(1000);
  for (uint64_t i = 0;; i++) {
    uint8_t number[8];
    for (int k = 0; k < 8; k++)
      number[k] = (uint8_t)(i >> (56 - 8 * k));
    zmq_send(pub, "kv", 2, ZMQ_SNDMORE);
    zmq_send(pub, number, 8, ZMQ_SNDMORE);
    zmq_send(pub, "payload", 7, 0);
    if (i % 16 == 0)
      usleep(1000);
  }
}

Test(zmq_peers, engines_are_killed_at_random_moments) {
  raw_listen(); /* only to find a port */
  close(raw);
  raw = -1;
  subscribe();
  unsigned before = 0;
  int lived = 0;
  srand(1);
  for (int i = 0; i < reconnects() / 4; i++) {
    const pid_t child = start_engine(b.endpoint);
    for (int k = rand() % 60; k > 0; k--)
      turn_us(1000);
    cr_assert_eq(kill(child, SIGKILL), 0);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    WAIT_FOR(b.seen.up == b.seen.down);
    lived += b.seen.messages != 0;
    for (size_t k = 1; k < b.seen.messages; k++)
      cr_assert_eq(b.seen.sequence[k], b.seen.sequence[k - 1] + 1, "of one life nothing is lost");
    b.seen.messages = 0;
    if (i == 5)
      before = open_descriptors();
  }
  cr_assert(lived > 0 && b.seen.bad_frames == 0 && b.seen.odd == 0);
  cr_assert_leq(open_descriptors(), before + 2);
  must_recover();
}

/* ---- more than anybody reads ---- */

#define FLOOD 6000
#define FLOOD_BYTES 8192

/* Publishes while the loop stands still, then lets it run until the last one is there. */
static void flood(unsigned high_water) {
  static char payload[FLOOD_BYTES];
  b.cfg.high_water = high_water;
  int bound = high_water == 0 ? 0 : (int)high_water;
  publisher("tcp://127.0.0.1:*");
  zmq_close(b.pub);
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  zmq_setsockopt(b.pub, ZMQ_SNDHWM, &bound, sizeof bound);
  for (int i = 0; zmq_bind(b.pub, b.endpoint) != 0; i++) {
    cr_assert_lt(i, 200, "%s", strerror(errno));
    usleep(10000);
  }
  subscribe();
  meet();
  for (uint64_t i = 0; i < FLOOD; i++)
    publish_bytes("kv", i, payload, sizeof payload);
  usleep(200000);
  for (int i = 0; b.seen.messages == 0 || b.seen.sequence[b.seen.messages - 1] < FLOOD; i++) {
    cr_assert_lt(i, PATIENCE_S * 50);
    publish_bytes("kv", FLOOD + (uint64_t)i, "", 0);
    turn();
  }
  for (size_t i = 1; i < b.seen.messages; i++)
    cr_assert_gt(b.seen.sequence[i], b.seen.sequence[i - 1], "in order, none twice");
}

Test(zmq_peers, without_high_water_nothing_is_lost) {
  flood(0);
  for (size_t i = 0; i < FLOOD; i++)
    cr_assert_eq(b.seen.sequence[i], i);
}

Test(zmq_peers, at_high_water_the_sequence_shows_what_the_publisher_dropped) {
  flood(10);
  size_t kept = 0;
  while (b.seen.sequence[kept] < FLOOD)
    kept++;
  cr_assert_lt(kept, FLOOD / 2, "%zu of %d", kept, FLOOD);
  cr_assert_gt(kept, 0);
  cr_assert_eq(b.seen.down, 0, "the connection stands");
}

/* ---- the replay socket ---- */

/* An engine's: its queue has the bound that libzmq gives by default, and what does not fit is
 * dropped without a word.  Answers one request, if there is one, from a buffer of `count`. */
static void replay_engine(void *router, uint64_t count) {
  static char payload[4096];
  uint8_t identity[64], bytes[16];
  const int len = zmq_recv(router, identity, sizeof identity, ZMQ_DONTWAIT);
  if (len < 0)
    return;
  cr_assert(zmq_recv(router, bytes, sizeof bytes, 0) == 0);
  cr_assert(zmq_recv(router, bytes, sizeof bytes, 0) == 8);
  uint64_t first = 0;
  for (int i = 0; i < 8; i++)
    first = first << 8 | bytes[i];
  for (uint64_t i = first; i <= count; i++) {
    const uint64_t number = i == count ? UINT64_MAX : i;
    for (int k = 0; k < 8; k++)
      bytes[k] = (uint8_t)(number >> (56 - 8 * k));
    zmq_send(router, identity, (size_t)len, ZMQ_SNDMORE);
    zmq_send(router, "", 0, ZMQ_SNDMORE);
    zmq_send(router, bytes, 8, ZMQ_SNDMORE);
    zmq_send(router, payload, i == count ? 0 : sizeof payload, 0);
  }
}

Test(zmq_peers, replies_that_an_engine_drops_are_asked_for_again) {
  enum { BUFFERED = 10000 };
  kvrelay_zmq_replay_config cfg = kvrelay_zmq_replay_config_default();
  kvrelay_zmq_replay *replay = NULL;
  size_t len = sizeof b.endpoint;
  b.pub = zmq_socket(b.context, ZMQ_ROUTER);
  cr_assert_eq(zmq_bind(b.pub, "tcp://127.0.0.1:*"), 0);
  cr_assert_eq(zmq_getsockopt(b.pub, ZMQ_LAST_ENDPOINT, b.endpoint, &len), 0);
  cfg.context = b.context;
  cfg.base = b.base;
  cfg.endpoint = b.endpoint;
  cr_assert_eq(kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &replay), KVRELAY_TRANSPORT_OK);
  uint64_t next = 0;
  int asked = 0;
  while (next < BUFFERED) {
    cr_assert_lt(++asked, 65);
    cr_assert_eq(kvrelay_zmq_replay_ask(replay, next), KVRELAY_TRANSPORT_OK);
    b.seen.messages = 0;
    const uint64_t before = next;
    for (int idle = 0; idle < 10;) { /* 50 ms of silence end an answer without a marker */
      const size_t had = b.seen.messages;
      replay_engine(b.pub, BUFFERED);
      turn_us(5000);
      idle = b.seen.messages != had || b.seen.messages == 0 ? 0 : idle + 1;
    }
    for (size_t i = 0; i < b.seen.messages && b.seen.sequence[i] == next; i++)
      next++;
    cr_assert_gt(next, before, "each answer goes further");
  }
  cr_assert_gt(asked, 1, "the engine must have dropped some");
  kvrelay_zmq_replay_close(replay);
}

Test(zmq_peers, a_thousand_requests_to_nobody_leave_no_descriptor_behind) {
  kvrelay_zmq_replay_config cfg = kvrelay_zmq_replay_config_default();
  kvrelay_zmq_replay *replay = NULL;
  raw_listen();
  close(raw);
  raw = -1;
  cfg.context = b.context;
  cfg.base = b.base;
  cfg.endpoint = b.endpoint;
  cr_assert_eq(kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &replay), KVRELAY_TRANSPORT_OK);
  unsigned before = 0;
  for (int i = 0; i < 1000; i++) {
    cr_assert_eq(kvrelay_zmq_replay_ask(replay, 0), KVRELAY_TRANSPORT_OK, "%s",
                 zmq_strerror(errno));
    if (i % 10 == 0)
      turn_us(1000);
    if (i == 10)
      before = open_descriptors();
  }
  kvrelay_zmq_replay_stop(replay);
  for (int i = 0; i < PATIENCE_S * 50 && open_descriptors() > before; i++)
    turn();
  cr_assert_leq(open_descriptors(), before);
  cr_assert_eq(b.seen.messages, 0);
  kvrelay_zmq_replay_close(replay);
}
