/* SPDX-License-Identifier: Apache-2.0 */
/* The ZeroMQ socket of a source against publishers of libzmq in the same process. */
#include "test_zmq.h"

TestSuite(zmq_sub, .init = setup, .fini = teardown, .timeout = 60);

/* ---- tests ---- */

Test(zmq_sub, delivers_topic_sequence_and_payload) {
  publisher("tcp://127.0.0.1:*");
  subscribe();
  meet();
  publish_bytes("kv@pod-1", UINT64_C(0x0102030405060708), "\x01\x02\x03", 3);
  WAIT_FOR(b.seen.messages == 1);
  cr_assert_eq(b.seen.sequence[0], UINT64_C(0x0102030405060708));
  cr_assert_str_eq(b.seen.topic, "kv@pod-1");
  cr_assert_eq(b.seen.odd, 0);
  cr_assert_eq(b.seen.payload_len, 3);
  cr_assert_eq(b.seen.payload_sum, 6);
  cr_assert_eq(b.seen.up, 1);
  cr_assert_gt(b.seen.turns, 0);
}

Test(zmq_sub, takes_an_empty_topic_and_an_empty_payload) {
  publisher("tcp://127.0.0.1:*");
  subscribe();
  meet();
  publish_bytes("", 3, "", 0);
  WAIT_FOR(b.seen.messages == 1);
  cr_assert_eq(b.seen.odd, 0);
  cr_assert_eq(b.seen.payload_len, 0);
}

Test(zmq_sub, subscribes_by_prefix) {
  b.cfg.topic = "kv@pod-1";
  publisher("tcp://127.0.0.1:*");
  subscribe();
  while (b.seen.messages == 0) {
    publish_bytes("kv@pod-1", 0, "x", 1);
    turn();
  }
  publish_bytes("kv@pod-2", 1, "x", 1);
  publish_bytes("kv", 2, "x", 1);
  publish_bytes("kv@pod-17", 3, "x", 1);
  WAIT_FOR(b.seen.sequence[b.seen.messages - 1] == 3);
  for (size_t i = 0; i < b.seen.messages; i++)
    cr_assert(b.seen.sequence[i] == 0 || b.seen.sequence[i] == 3);
}

Test(zmq_sub, works_over_ipv6_ipc_and_inproc) {
  char abstract[64];
  snprintf(abstract, sizeof abstract, "ipc://@kvrelay-test-%d", (int)getpid());
  /* A file of its own choice is one that the library removes. */
  const char *const where[] = {"tcp://[::1]:*", "ipc://*", abstract, "inproc://kvrelay-test"};
  for (size_t i = 0; i < 4; i++) {
    publisher(where[i]);
    b.cfg.endpoint = NULL;
    b.seen.messages = 0;
    subscribe();
    meet();
    publish(5);
    WAIT_FOR(b.seen.messages == 1);
    cr_assert_eq(b.seen.sequence[0], 5, "%s", where[i]);
    kvrelay_zmq_sub_close(b.sub);
    b.sub = NULL;
    zmq_close(b.pub);
    b.pub = NULL;
  }
}

Test(zmq_sub, binds_for_engines_that_connect) {
  b.cfg.bind = true;
  b.cfg.endpoint = "tcp://127.0.0.1:*";
  subscribe();
  b.pub = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_eq(zmq_connect(b.pub, kvrelay_zmq_sub_endpoint(b.sub)), 0);
  meet();
  publish(1);
  WAIT_FOR(b.seen.messages == 1);
  /* A second engine on the same socket: one of two going away is no disconnection. */
  void *second = zmq_socket(b.context, ZMQ_PUB);
  cr_assert_eq(zmq_connect(second, kvrelay_zmq_sub_endpoint(b.sub)), 0);
  while (b.seen.messages < 2) {
    uint8_t number[8] = {0, 0, 0, 0, 0, 0, 0, 42};
    zmq_send(second, number, 8, ZMQ_SNDMORE);
    zmq_send(second, "", 0, 0);
    turn();
  }
  cr_assert_eq(b.seen.sequence[1], 42);
  zmq_close(second);
  for (int i = 0; i < 10; i++)
    turn();
  cr_assert_eq(b.seen.up, 1);
  cr_assert_eq(b.seen.down, 0);
}

Test(zmq_sub, counts_what_is_no_message_of_an_engine) {
  static const uint8_t eight[9] = {0, 0, 0, 0, 0, 0, 0, 7, 0};
  publisher("tcp://127.0.0.1:*");
  subscribe();
  meet();
  send_frames(1, (const void *const[]){"x"}, (const size_t[]){1});
  send_frames(2, (const void *const[]){eight, "x"}, (const size_t[]){7, 1});
  send_frames(3, (const void *const[]){"kv", eight, "x"}, (const size_t[]){2, 9, 1});
  send_frames(3, (const void *const[]){"kv", "", "x"}, (const size_t[]){2, 0, 1});
  send_frames(4, (const void *const[]){"", "kv", eight, "x"}, (const size_t[]){0, 2, 8, 1});
  for (int i = 0; i < 1000; i++)
    zmq_send(b.pub, "", 0, ZMQ_SNDMORE);
  zmq_send(b.pub, eight, 8, ZMQ_SNDMORE);
  zmq_send(b.pub, "x", 1, 0);
  send_frames(2, (const void *const[]){eight, "x"}, (const size_t[]){8, 1});
  WAIT_FOR(b.seen.messages == 1);
  cr_assert_eq(b.seen.bad_frames, 6);
  cr_assert_eq(b.seen.sequence[0], 7);
  cr_assert_eq(b.seen.odd, 1, "two frames are odd");
  cr_assert_str_eq(b.seen.topic, "");
}

Test(zmq_sub, reports_large_payloads_as_lost_and_goes_on) {
  char *payload = calloc(1, 8 << 20);
  memset(payload, 1, 8 << 20);
  b.cfg.max_payload_bytes = 5 << 20;
  publisher("tcp://127.0.0.1:*");
  subscribe();
  meet();
  publish_bytes("kv", 10, payload, 5 << 20);
  publish_bytes("kv", 11, payload, (5 << 20) + 1);
  publish_bytes("kv", 12, payload, 8 << 20);
  publish(13);
  WAIT_FOR(b.seen.messages == 2);
  free(payload);
  cr_assert_eq(b.seen.sequence[0], 10);
  cr_assert_eq(b.seen.sequence[1], 13);
  cr_assert_eq(b.seen.too_large, 2);
  cr_assert_eq(b.seen.lost_sequence, 12);
  cr_assert_eq(b.seen.down, 0);
}

Test(zmq_sub, cuts_the_connection_before_it_receives_far_too_much) {
  char *payload = calloc(1, 17 << 20);
  b.cfg.max_payload_bytes = 1000;
  publisher("tcp://127.0.0.1:*");
  subscribe();
  meet();
  publish_bytes("kv", 1, payload, 17 << 20);
  WAIT_FOR(b.seen.down == 1);
  free(payload);
  WAIT_FOR(b.seen.up == 2);
  cr_assert_eq(b.seen.messages, 0);
  cr_assert_eq(b.seen.too_large, 0);
  meet();
}

Test(zmq_sub, survives_restarts_of_the_publisher) {
  char endpoint[256];
  publisher("tcp://127.0.0.1:*");
  subscribe();
  for (int generation = 1; generation <= 3; generation++) {
    meet();
    publish((uint64_t)generation);
    WAIT_FOR(b.seen.messages == 1);
    cr_assert_eq(b.seen.sequence[0], (uint64_t)generation);
    cr_assert_eq(b.seen.up, generation);
    zmq_close(b.pub);
    WAIT_FOR(b.seen.down == generation);
    b.seen.messages = 0;
    snprintf(endpoint, sizeof endpoint, "%s", b.endpoint);
    publisher(endpoint);
  }
}

/* An address of this machine where nobody listens. */
static void nowhere(char endpoint[256]) {
  void *context = zmq_ctx_new(), *nobody = zmq_socket(context, ZMQ_PUB);
  size_t len = 256;
  cr_assert_eq(zmq_bind(nobody, "tcp://127.0.0.1:*"), 0);
  cr_assert_eq(zmq_getsockopt(nobody, ZMQ_LAST_ENDPOINT, endpoint, &len), 0);
  zmq_close(nobody);
  zmq_ctx_term(context);
}

Test(zmq_sub, waits_for_a_publisher_that_comes_later) {
  char endpoint[256];
  nowhere(endpoint);
  b.cfg.endpoint = endpoint;
  subscribe();
  for (int i = 0; i < 5; i++)
    turn();
  cr_assert_eq(b.seen.up, 0);
  publisher(endpoint);
  meet();
  cr_assert_eq(b.seen.up, 1);
}

Test(zmq_sub, tells_a_connection_although_nothing_is_published) {
  publisher("tcp://127.0.0.1:*");
  subscribe();
  WAIT_FOR(b.seen.up == 1);
  cr_assert_eq(b.seen.messages, 0);
  zmq_close(b.pub);
  b.pub = NULL;
  WAIT_FOR(b.seen.down == 1);
}

/* More attempts than a queue of libzmq holds by default, and a loop that does not run. */
Test(zmq_sub, closes_after_thousands_of_attempts_that_nobody_looked_at) {
  char endpoint[256];
  nowhere(endpoint);
  b.cfg.endpoint = endpoint;
  b.cfg.reconnect_min_ms = b.cfg.reconnect_max_ms = 1;
  subscribe();
  usleep(6000000);
}

static void on_tick(evutil_socket_t fd, short what, void *owner) {
  (void)fd;
  (void)what;
  ((seen *)owner)->ticked = true;
}

Test(zmq_sub, loses_nothing_and_starves_nobody) {
  b.cfg.max_batches = 16;
  publisher("tcp://127.0.0.1:*");
  subscribe();
  meet();
  b.seen.worst_turn = 0;
  for (uint64_t i = 0; i < LOG_CAP; i++)
    publish(i);
  struct event *tick = event_new(b.base, -1, EV_PERSIST, on_tick, &b.seen);
  struct timeval soon = {0, 1000};
  event_add(tick, &soon);
  WAIT_FOR(b.seen.messages > 0);
  b.seen.ticked = false;
  WAIT_FOR(b.seen.ticked);
  cr_assert_lt(b.seen.messages, LOG_CAP,
               "another event of the loop ran while messages were waiting");
  WAIT_FOR(b.seen.messages == LOG_CAP);
  event_free(tick);
  for (uint64_t i = 0; i < LOG_CAP; i++)
    cr_assert_eq(b.seen.sequence[i], i);
  cr_assert_leq(b.seen.worst_turn, 32, "at most what one event and one timer may take");
}

/* Speaks garbage instead of ZMTP to whoever connects; later an engine takes its place. */
Test(zmq_sub, outlives_a_peer_that_is_no_zeromq) {
  void *raw = zmq_socket(b.context, ZMQ_STREAM);
  int zero = 0;
  zmq_setsockopt(raw, ZMQ_LINGER, &zero, sizeof zero);
  size_t len = sizeof b.endpoint;
  cr_assert_eq(zmq_bind(raw, "tcp://127.0.0.1:*"), 0);
  zmq_getsockopt(raw, ZMQ_LAST_ENDPOINT, b.endpoint, &len);
  subscribe();
  for (int i = 0; i < 20; i++) {
    uint8_t id[256];
    int id_len;
    while ((id_len = zmq_recv(raw, id, sizeof id, ZMQ_DONTWAIT)) >= 0) {
      int more;
      size_t more_len = sizeof more;
      zmq_getsockopt(raw, ZMQ_RCVMORE, &more, &more_len);
      if (more == 0)
        continue;
      uint8_t rest[256];
      zmq_recv(raw, rest, sizeof rest, ZMQ_DONTWAIT);
      if (zmq_send(raw, id, (size_t)id_len, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(raw, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, ZMQ_DONTWAIT);
    }
    turn();
  }
  cr_assert_eq(b.seen.messages, 0);
  cr_assert_eq(b.seen.bad_frames, 0);
  cr_assert_eq(b.seen.down, 0);
  cr_assert_eq(b.seen.up, 0);
  char endpoint[256];
  snprintf(endpoint, sizeof endpoint, "%s", b.endpoint);
  zmq_close(raw);
  publisher(endpoint);
  meet();
  cr_assert_eq(b.seen.up, 1);
}

Test(zmq_sub, refuses_what_cannot_work) {
  kvrelay_zmq_sub *sub = NULL;
  static const char *const bad[] = {
      "", "tcp", "tcp://", "tcp://127.0.0.1", "nonsense://x", "tcp://127.0.0.1:notaport"};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    b.cfg.endpoint = bad[i];
    cr_assert_eq(kvrelay_zmq_sub_open(&b.cfg, &b.seen.listener, &sub),
                 KVRELAY_TRANSPORT_ERR_ADDRESS, "%s", bad[i]);
    cr_assert_null(sub);
  }
  publisher("tcp://127.0.0.1:*");
  b.cfg.endpoint = b.endpoint;
  b.cfg.bind = true;
  cr_assert_eq(kvrelay_zmq_sub_open(&b.cfg, &b.seen.listener, &sub), KVRELAY_TRANSPORT_ERR_BIND);
  cr_assert_eq(errno, EADDRINUSE);
  b.cfg.bind = false;
  b.cfg.max_batches = 0;
  cr_assert_eq(kvrelay_zmq_sub_open(&b.cfg, &b.seen.listener, &sub), KVRELAY_TRANSPORT_ERR_ARG);
  b.cfg.max_batches = 1;
  b.cfg.reconnect_min_ms = b.cfg.reconnect_max_ms + 1;
  cr_assert_eq(kvrelay_zmq_sub_open(&b.cfg, &b.seen.listener, &sub), KVRELAY_TRANSPORT_ERR_ARG);
}

/* ---- the replay socket ---- */

static kvrelay_zmq_replay *replay;

static void setup_replay(void) {
  setup();
  size_t len = sizeof b.endpoint;
  int zero = 0;
  b.pub = zmq_socket(b.context, ZMQ_ROUTER); /* the engine's */
  zmq_setsockopt(b.pub, ZMQ_LINGER, &zero, sizeof zero);
  cr_assert_eq(zmq_bind(b.pub, "tcp://127.0.0.1:*"), 0);
  cr_assert_eq(zmq_getsockopt(b.pub, ZMQ_LAST_ENDPOINT, b.endpoint, &len), 0);
  kvrelay_zmq_replay_config cfg = kvrelay_zmq_replay_config_default();
  cfg.context = b.context;
  cfg.base = b.base;
  cfg.endpoint = b.endpoint;
  cfg.max_payload_bytes = 100;
  cr_assert_eq(kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &replay), KVRELAY_TRANSPORT_OK);
}

static void teardown_replay(void) {
  kvrelay_zmq_replay_close(replay);
  teardown();
}

TestSuite(zmq_replay, .init = setup_replay, .fini = teardown_replay, .timeout = 60);

/* Takes a request as the engines do: identity, an empty frame, eight bytes. */
static size_t request(uint8_t identity[64], uint64_t *first) {
  int patience_ms = PATIENCE_S * 1000;
  zmq_setsockopt(b.pub, ZMQ_RCVTIMEO, &patience_ms, sizeof patience_ms);
  uint8_t bytes[16];
  int len = zmq_recv(b.pub, identity, 64, 0);
  cr_assert_gt(len, 0);
  cr_assert_eq(zmq_recv(b.pub, bytes, sizeof bytes, 0), 0);
  cr_assert_eq(zmq_recv(b.pub, bytes, sizeof bytes, 0), 8);
  int more;
  size_t more_len = sizeof more;
  cr_assert_eq(zmq_getsockopt(b.pub, ZMQ_RCVMORE, &more, &more_len), 0);
  cr_assert_not(more);
  *first = 0;
  for (int i = 0; i < 8; i++)
    *first = *first << 8 | bytes[i];
  return (size_t)len;
}

static void answer(const uint8_t *identity, size_t identity_len, size_t empty, uint64_t sequence,
                   const char *payload) {
  uint8_t number[8];
  for (int i = 0; i < 8; i++)
    number[i] = (uint8_t)(sequence >> (56 - 8 * i));
  const void *frames[8] = {identity};
  size_t lens[8] = {identity_len}, count = 1;
  for (; empty != 0; empty--) {
    frames[count] = "";
    lens[count++] = 0;
  }
  frames[count] = number;
  lens[count++] = 8;
  frames[count] = payload;
  lens[count++] = strlen(payload);
  send_frames(count, frames, lens);
}

Test(zmq_replay, asks_as_engines_expect_and_reads_either_form) {
  uint8_t identity[64];
  uint64_t first;
  cr_assert_eq(kvrelay_zmq_replay_ask(replay, UINT64_C(0x0102030405060708)), KVRELAY_TRANSPORT_OK);
  size_t len = request(identity, &first);
  cr_assert_eq(first, UINT64_C(0x0102030405060708));
  for (size_t empty = 0; empty < 3; empty++) /* no empty frame, one, and one with a topic */
    answer(identity, len, empty, 5 + empty, "payload");
  answer(identity, len, 3, 9, "a frame too many");
  answer(identity, len, 1, UINT64_MAX, "");
  WAIT_FOR(b.seen.messages == 4);
  cr_assert_eq(b.seen.sequence[0], 5);
  cr_assert_eq(b.seen.sequence[1], 6);
  cr_assert_eq(b.seen.sequence[2], 7);
  cr_assert_eq(b.seen.sequence[3], UINT64_MAX);
  cr_assert_eq(b.seen.payload_len, 0);
  cr_assert_eq(b.seen.bad_frames, 1);
  char large[102] = {0};
  memset(large, 'x', 101);
  answer(identity, len, 1, 11, large);
  WAIT_FOR(b.seen.too_large == 1);
  cr_assert_eq(b.seen.lost_sequence, 11);
}

Test(zmq_replay, a_request_anew_hears_nothing_of_the_former) {
  uint8_t former[64], identity[64];
  uint64_t first;
  cr_assert_eq(kvrelay_zmq_replay_ask(replay, 1), KVRELAY_TRANSPORT_OK);
  size_t former_len = request(former, &first);
  answer(former, former_len, 1, 1, "payload");
  WAIT_FOR(b.seen.messages == 1);
  cr_assert_eq(kvrelay_zmq_replay_ask(replay, 2), KVRELAY_TRANSPORT_OK);
  size_t len = request(identity, &first);
  cr_assert_eq(first, 2);
  cr_assert(len != former_len || memcmp(identity, former, len) != 0);
  answer(former, former_len, 1, 7, "payload");
  answer(identity, len, 1, 2, "payload");
  WAIT_FOR(b.seen.messages == 2);
  cr_assert_eq(b.seen.sequence[1], 2);
  kvrelay_zmq_replay_stop(replay);
  kvrelay_zmq_replay_stop(replay);
  answer(identity, len, 1, 3, "payload");
  for (int i = 0; i < 10; i++)
    turn();
  cr_assert_eq(b.seen.messages, 2);
}

Test(zmq_replay, long_answers_share_the_loop_and_nothing_of_them_is_dropped) {
  uint8_t identity[64];
  uint64_t first;
  int zero = 0;
  zmq_setsockopt(b.pub, ZMQ_SNDHWM, &zero, sizeof zero);
  cr_assert_eq(zmq_unbind(b.pub, b.endpoint), 0);
  for (int i = 0; zmq_bind(b.pub, b.endpoint) != 0; i++) {
    cr_assert_lt(i, 200, "%s", strerror(errno));
    usleep(10000);
  }
  cr_assert_eq(kvrelay_zmq_replay_ask(replay, 0), KVRELAY_TRANSPORT_OK);
  size_t len = request(identity, &first);
  for (uint64_t i = 0; i < 10000; i++)
    answer(identity, len, 1, i, "payload");
  WAIT_FOR(b.seen.messages == 10000);
  for (uint64_t i = 0; i < 10000; i++)
    cr_assert_eq(b.seen.sequence[i], i);
  cr_assert_leq(b.seen.worst_turn, kvrelay_zmq_replay_config_default().max_batches);
}

Test(zmq_replay, refuses_what_cannot_work) {
  kvrelay_zmq_replay *r = NULL;
  kvrelay_zmq_replay_config cfg = kvrelay_zmq_replay_config_default();
  cr_assert_eq(kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &r), KVRELAY_TRANSPORT_ERR_ARG);
  cfg.context = b.context;
  cfg.base = b.base;
  cfg.endpoint = "nonsense://x";
  cr_assert_eq(kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &r), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_zmq_replay_ask(r, 0), KVRELAY_TRANSPORT_ERR_ADDRESS);
  kvrelay_zmq_replay_close(r);
  cfg.max_batches = 0;
  cr_assert_eq(kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &r), KVRELAY_TRANSPORT_ERR_ARG);
}
