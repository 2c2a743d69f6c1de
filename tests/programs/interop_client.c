/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gRPC's official interop cases from our client transport, against a server that others wrote:
 *
 *   interop_client ADDRESS            a line "ok - CASE" or "not ok - CASE: why" for each
 *   interop_client ADDRESS farewell   prints "streaming" once a stream has brought a message; then
 * the server has to stop in order, and another to take its place
 *
 * INTEROP_TLS as interop_tls.h has it.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interop_messages.h"
#include "interop_tls.h"
#include "transports/grpc/grpc_client.h"

#define SECOND_NS ((uint64_t)1000000000)
#define LIMIT_NS (60 * SECOND_NS) /* of a whole case */
#define MESSAGE_CAP ((size_t)1 << 20)
#define PARALLEL 1000u

static const uint32_t up[] = {27182, 8, 1828, 45904}, down[] = {31415, 9, 2653, 58979};
static const char special[] = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP "
                              "\U0001F608\t\n";

/* The caller, and what the call of the moment has brought. */
typedef struct peer {
  kvrelay_caller base; /* first */
  const char *address;
  kvrelay_security *security;
  kvrelay_client_transport *client;
  bool may_fail; /* the connection */
  bool ready;
  uint32_t call; /* the newest */
  uint64_t until_ns;
  bool room;
  size_t messages, ends, good_ends; /* of all calls since `begin` */
  uint32_t size[8];                 /* of the first bodies */
  uint64_t number;                  /* field 1 of the newest message */
  kvrelay_status status;            /* of the newest end */
  bool initial, trailing;           /* our metadata came back */
  char why[256];                    /* what is wrong; empty: nothing */
} peer;

static uint8_t request[MESSAGE_CAP];

/* Remembers the first thing that is wrong. */
__attribute__((format(printf, 3, 4))) static bool need(peer *p, bool good, const char *what, ...) {
  va_list args;
  if (!good && p->why[0] == 0) {
    va_start(args, what);
    vsnprintf(p->why, sizeof p->why, what, args);
    va_end(args);
  }
  return p->why[0] == 0;
}

/* ---- what the transport reports ---- */

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  peer *p = (peer *)self;
  (void)retry_ns;
  (void)now_ns;
  p->ready = state == KVRELAY_CONNECTION_READY;
  if (state == KVRELAY_CONNECTION_FAILED && !p->may_fail)
    need(p, false, "connection: %s: %s", kvrelay_transport_strerror(err), text);
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)call;
  (void)now_ns;
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  peer *p = (peer *)self;
  pb_istream_t in = pb_istream_from_buffer(bytes, len);
  interop_field f;
  bool good = true;
  uint32_t size = 0;
  (void)call;
  (void)now_ns;
  while (interop_field_next(&in, &f, &good))
    if (f.tag == 1) {
      p->number = f.number;
      size = interop_body(f.body, 2, &good);
    }
  need(p, good, "an answer does not decode");
  if (p->messages < sizeof p->size / sizeof *p->size)
    p->size[p->messages] = size;
  p->messages++;
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  peer *p = (peer *)self;
  (void)call;
  (void)now_ns;
  p->ends++;
  p->good_ends += status->grpc == KVRELAY_GRPC_OK;
  p->status = *status;
}

static void on_room(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)call;
  (void)now_ns;
  ((peer *)self)->room = true;
}

static void on_metadata(kvrelay_caller *self, uint32_t call, bool trailing,
                        const kvrelay_grpc_metadata *list, uint64_t now_ns) {
  static const char text[] = "test_initial_metadata_value";
  peer *p = (peer *)self;
  size_t cursor = 0;
  kvrelay_iov v;
  (void)call;
  (void)now_ns;
  while (!trailing && kvrelay_grpc_metadata_find(list, INTEROP_INITIAL, &cursor, &v))
    p->initial |= v.len == sizeof text - 1 && memcmp(v.base, text, v.len) == 0;
  while (trailing && kvrelay_grpc_metadata_find(list, INTEROP_TRAILING, &cursor, &v))
    p->trailing |= v.len == 3 && memcmp(v.base, "\xab\xab\xab", 3) == 0;
}

static const kvrelay_grpc_call_events events = {on_metadata, on_room};

/* ---- steps of a case; each does nothing once something is wrong ---- */

static bool turn(peer *p) {
  kvrelay_transport *t = &p->client->base;
  need(p, t->now_ns(t) < p->until_ns, "takes too long");
  if (p->why[0] != 0)
    return false;
  need(p, t->run_once(t, SECOND_NS) >= 0, "the loop fails");
  return p->why[0] == 0;
}

static void start_with(peer *p, const char *path, const kvrelay_grpc_metadata *metadata,
                       uint64_t timeout_ns) {
  const kvrelay_grpc_call_options options = {path, metadata, &events, timeout_ns};
  while (!p->ready)
    if (!turn(p))
      return;
  for (;;) {
    int err = kvrelay_grpc_client_start(p->client, ++p->call, &options);
    if (err != KVRELAY_TRANSPORT_ERR_LIMIT) { /* more than the server takes at once: later */
      need(p, err == KVRELAY_TRANSPORT_OK, "start: %s", kvrelay_transport_strerror(err));
      return;
    }
    if (!turn(p))
      return;
  }
}

static void start(peer *p, enum interop_method method) {
  char path[64];
  snprintf(path, sizeof path, INTEROP_SERVICE "%s", interop_names[method]);
  start_with(p, path, NULL, KVRELAY_TIME_NONE);
}

static void send(peer *p, size_t len) {
  while (p->why[0] == 0) {
    p->room = false;
    int err = kvrelay_grpc_client_send(p->client, p->call, request, len);
    if (err != KVRELAY_TRANSPORT_ERR_LIMIT) {
      need(p, err == KVRELAY_TRANSPORT_OK, "send: %s", kvrelay_transport_strerror(err));
      return;
    }
    while (!p->room && p->ends == 0)
      if (!turn(p))
        return;
  }
}

static void half_close(peer *p) {
  if (p->why[0] == 0) {
    int err = kvrelay_grpc_client_half_close(p->client, p->call);
    need(p, err == KVRELAY_TRANSPORT_OK, "half-close: %s", kvrelay_transport_strerror(err));
  }
}

static void wait_messages(peer *p, size_t count) {
  while (p->messages < count && p->ends == 0)
    if (!turn(p))
      return;
  need(p, p->messages >= count, "%zu answers, then status %" PRId32, p->messages, p->status.grpc);
}

/* Until one call has ended, with this status and as many messages. */
static void wait_end(peer *p, int grpc, size_t messages) {
  while (p->ends == 0)
    if (!turn(p))
      return;
  need(p, p->status.grpc == grpc, "status %" PRId32 " \"%s\"", p->status.grpc, p->status.text);
  need(p, p->messages == messages, "%zu answers", p->messages);
}

/* ---- requests, into `request` ---- */

/* Field `tag`, a Payload of zeros. */
static bool put_payload(pb_ostream_t *out, uint32_t tag, uint32_t bytes) {
  static const uint8_t zeros[65536];
  uint8_t head[24];
  bool good = pb_write(out, head, interop_payload_head(head, tag, bytes));
  for (uint32_t left = bytes; left > 0 && good; left -= left < sizeof zeros ? left : sizeof zeros)
    good = pb_write(out, zeros, left < sizeof zeros ? left : sizeof zeros);
  return good;
}

static bool put_number(pb_ostream_t *out, uint32_t tag, uint64_t number) {
  return pb_encode_tag(out, PB_WT_VARINT, tag) && pb_encode_varint(out, number);
}

/* Writes the request of a method; `size` are the bodies wished for.  Its length. */
static size_t compose(enum interop_method method, uint32_t body, const uint32_t *size, size_t sizes,
                      const char *text) {
  pb_ostream_t out = pb_ostream_from_buffer(request, sizeof request);
  bool good = put_payload(&out, method == INTEROP_INPUT ? 1 : 3, body);
  if (method == INTEROP_UNARY && sizes == 1)
    good &= put_number(&out, 2, size[0]);
  for (size_t i = 0; i < sizes && method != INTEROP_UNARY; i++) {
    uint8_t inner[16];
    pb_ostream_t in = pb_ostream_from_buffer(inner, sizeof inner);
    good &= put_number(&in, 1, size[i]) && pb_encode_tag(&out, PB_WT_STRING, 2) &&
            pb_encode_string(&out, inner, in.bytes_written);
  }
  if (text != NULL) { /* a response_status */
    uint8_t inner[128];
    pb_ostream_t in = pb_ostream_from_buffer(inner, sizeof inner);
    good &= put_number(&in, 1, KVRELAY_GRPC_UNKNOWN) && pb_encode_tag(&in, PB_WT_STRING, 2) &&
            pb_encode_string(&in, (const pb_byte_t *)text, strlen(text)) &&
            pb_encode_tag(&out, PB_WT_STRING, 7) && pb_encode_string(&out, inner, in.bytes_written);
  }
  return good ? out.bytes_written : 0;
}

static size_t compose_large(void) {
  return compose(INTEROP_UNARY, 271828, &(uint32_t){314159}, 1, NULL);
}

/* ---- the cases ---- */

static void empty_unary(peer *p) {
  start(p, INTEROP_EMPTY);
  send(p, 0);
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 1);
}

static void large_unary(peer *p) {
  start(p, INTEROP_UNARY);
  send(p, compose_large());
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 1);
  need(p, p->size[0] == 314159, "a body of %" PRIu32 " bytes", p->size[0]);
}

static void client_streaming(peer *p) {
  start(p, INTEROP_INPUT);
  for (size_t i = 0; i < 4; i++)
    send(p, compose(INTEROP_INPUT, up[i], NULL, 0, NULL));
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 1);
  need(p, p->number == 74922, "the sum is %" PRIu64, p->number);
}

static void need_sizes(peer *p) {
  for (size_t i = 0; i < 4; i++)
    need(p, p->size[i] == down[i], "answer %zu has %" PRIu32 " bytes", i, p->size[i]);
}

static void server_streaming(peer *p) {
  start(p, INTEROP_OUTPUT);
  send(p, compose(INTEROP_OUTPUT, 0, down, 4, NULL));
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 4);
  need_sizes(p);
}

static void ping_pong(peer *p) {
  start(p, INTEROP_FULL_DUPLEX);
  for (size_t i = 0; i < 4; i++) {
    send(p, compose(INTEROP_FULL_DUPLEX, up[i], &down[i], 1, NULL));
    wait_messages(p, i + 1);
    need(p, p->messages == i + 1, "an answer too many");
  }
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 4);
  need_sizes(p);
}

static void empty_stream(peer *p) {
  start(p, INTEROP_FULL_DUPLEX);
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 0);
}

static void custom_metadata(peer *p) {
  static const char *const paths[] = {INTEROP_SERVICE "UnaryCall",
                                      INTEROP_SERVICE "FullDuplexCall"};
  kvrelay_grpc_metadata list = {0};
  need(p,
       kvrelay_grpc_metadata_add(&list, INTEROP_INITIAL, "test_initial_metadata_value", 27) ==
               KVRELAY_TRANSPORT_OK &&
           kvrelay_grpc_metadata_add(&list, INTEROP_TRAILING, "\xab\xab\xab", 3) ==
               KVRELAY_TRANSPORT_OK,
       "metadata cannot be added");
  for (size_t i = 0; i < 2; i++) {
    p->messages = p->ends = 0;
    p->initial = p->trailing = false;
    start_with(p, paths[i], &list, KVRELAY_TIME_NONE);
    send(p, i == 0 ? compose_large()
                   : compose(INTEROP_FULL_DUPLEX, 271828, &(uint32_t){314159}, 1, NULL));
    half_close(p);
    wait_end(p, KVRELAY_GRPC_OK, 1);
    need(p, p->initial, "no initial metadata, call %zu", i);
    need(p, p->trailing, "no trailing metadata, call %zu", i);
  }
  kvrelay_grpc_metadata_free(&list);
}

static void echo_status(peer *p, const char *text) {
  for (enum interop_method method = INTEROP_UNARY; method <= INTEROP_FULL_DUPLEX;
       method += INTEROP_FULL_DUPLEX - INTEROP_UNARY) {
    p->ends = 0;
    start(p, method);
    send(p, compose(method, 0, NULL, 0, text));
    half_close(p);
    wait_end(p, KVRELAY_GRPC_UNKNOWN, 0);
    need(p, strcmp(p->status.text, text) == 0, "text \"%s\"", p->status.text);
  }
}

static void status_code_and_message(peer *p) { echo_status(p, "test status message"); }
static void special_status_message(peer *p) { echo_status(p, special); }

static void unimplemented(peer *p, const char *path) {
  start_with(p, path, NULL, KVRELAY_TIME_NONE);
  send(p, 0);
  half_close(p);
  wait_end(p, KVRELAY_GRPC_UNIMPLEMENTED, 0);
}

static void unimplemented_method(peer *p) { unimplemented(p, INTEROP_SERVICE "UnimplementedCall"); }
static void unimplemented_service(peer *p) {
  unimplemented(p, "/grpc.testing.UnimplementedService/UnimplementedCall");
}

/* Our transport tells nobody of a call's end who has cancelled it himself. */
static void cancel(peer *p) {
  if (p->why[0] == 0)
    p->client->cancel(p->client, p->call);
  p->messages = 0;
  empty_unary(p);
  need(p, p->ends == 1, "a cancelled call reported an end");
}

static void cancel_after_begin(peer *p) {
  start(p, INTEROP_INPUT);
  cancel(p);
}

static void cancel_after_first_response(peer *p) {
  start(p, INTEROP_FULL_DUPLEX);
  send(p, compose(INTEROP_FULL_DUPLEX, up[0], down, 1, NULL));
  wait_messages(p, 1);
  cancel(p);
}

static void timeout_on_sleeping_server(peer *p) {
  start_with(p, INTEROP_SERVICE "FullDuplexCall", NULL, SECOND_NS / 1000);
  send(p, compose(INTEROP_FULL_DUPLEX, up[0], NULL, 0, NULL));
  wait_end(p, KVRELAY_GRPC_DEADLINE_EXCEEDED, 0);
}

static void concurrent_large_unary(peer *p) {
  const size_t len = compose_large();
  for (uint32_t i = 0; i < PARALLEL && p->why[0] == 0; i++) {
    start(p, INTEROP_UNARY);
    send(p, len);
    half_close(p);
  }
  while (p->ends < PARALLEL)
    if (!turn(p))
      return;
  need(p, p->good_ends == PARALLEL && p->messages == PARALLEL, "%zu good ends, %zu answers",
       p->good_ends, p->messages);
}

static void rpc_soak(peer *p) {
  for (int i = 0; i < 200; i++) {
    p->messages = p->ends = 0;
    large_unary(p);
  }
}

static void open_client(peer *p) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = p->address;
  cfg.security = p->security;
  cfg.max_calls = PARALLEL + 1;
  p->ready = false;
  if (kvrelay_grpc_client_open(&cfg, &p->base, &p->client) != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "interop_client: cannot open %s\n", p->address);
    exit(69);
  }
}

static void channel_soak(peer *p) {
  for (int i = 0; i < 50; i++) {
    p->client->base.close(&p->client->base);
    open_client(p);
    p->messages = p->ends = 0;
    large_unary(p);
  }
}

/* C10, C14: the stream goes on as if nothing were, what is new waits for another connection. */
static void farewell(peer *p) {
  const kvrelay_grpc_call_options options = {INTEROP_SERVICE "EmptyCall", NULL, &events,
                                             KVRELAY_TIME_NONE};
  start(p, INTEROP_FULL_DUPLEX);
  const uint32_t stream = p->call;
  p->may_fail = true;
  send(p, compose(INTEROP_FULL_DUPLEX, up[0], down, 1, NULL));
  wait_messages(p, 1);
  printf("streaming\n");
  fflush(stdout);
  while (turn(p) &&
         kvrelay_grpc_client_start(p->client, stream + 1, &options) == KVRELAY_TRANSPORT_OK)
    p->client->cancel(p->client, stream + 1);
  send(p, compose(INTEROP_FULL_DUPLEX, up[1], down + 1, 1, NULL));
  wait_messages(p, 2);
  need(p, p->ready, "the connection ended before its stream");
  half_close(p);
  wait_end(p, KVRELAY_GRPC_OK, 2);
  while (p->ready && turn(p))
    continue;
  p->messages = p->ends = 0;
  empty_unary(p);
}

typedef struct test_case {
  const char *name;
  void (*run)(peer *p);
} test_case;

static const test_case cases[] = {
#define CASE(NAME)                                                                                 \
  { #NAME, NAME }
    CASE(empty_unary),
    CASE(large_unary),
    CASE(client_streaming),
    CASE(server_streaming),
    CASE(ping_pong),
    CASE(empty_stream),
    CASE(custom_metadata),
    CASE(status_code_and_message),
    CASE(special_status_message),
    CASE(unimplemented_method),
    CASE(unimplemented_service),
    CASE(cancel_after_begin),
    CASE(cancel_after_first_response),
    CASE(timeout_on_sleeping_server),
    CASE(concurrent_large_unary),
    CASE(rpc_soak),
    CASE(channel_soak),
};

static bool judge(peer *p, const test_case *t) {
  open_client(p); /* what a case leaves open ends with its connection */
  p->messages = p->ends = p->good_ends = 0;
  p->initial = p->trailing = false;
  p->why[0] = 0;
  p->until_ns = p->client->base.now_ns(&p->client->base) + LIMIT_NS;
  t->run(p);
  p->client->base.close(&p->client->base);
  printf(p->why[0] == 0 ? "ok - %s\n" : "not ok - %s: %s\n", t->name, p->why);
  fflush(stdout);
  return p->why[0] == 0;
}

int main(int argc, char **argv) {
  static peer p = {.base = {on_connection, on_admitted, on_message, on_end}};
  const bool parting = argc == 3 && strcmp(argv[2], "farewell") == 0;
  bool good = true;
  if (argc != 2 && !parting) {
    fprintf(stderr, "usage: interop_client ADDRESS [farewell]\n");
    return 64;
  }
  p.address = argv[1];
  p.security = interop_security(false);
  if (parting)
    return judge(&p, &(test_case){"farewell", farewell}) ? 0 : 1;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    good &= judge(&p, &cases[i]);
  return good ? 0 : 1;
}
