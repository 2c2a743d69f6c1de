/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gRPC's official test service (tests/interop/grpc/testing.proto) over our server transport, for
 * clients that others wrote.  Prints "listening ADDRESS".  Commands on standard input: "counts"
 * prints the calls opened and those still open, "encodings" what messages may be compressed with;
 * end of file ends it.  INTEROP_TLS as interop_tls.h has it.
 */
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "interop_messages.h"
#include "interop_tls.h"
#include "transports/grpc/grpc_server.h"

#define MESSAGE_CAP ((uint32_t)8 << 20)
#define QUEUE_CAP 1024u

typedef struct test_call {
  kvrelay_call *transport;
  enum interop_method method;
  bool half_closed;
  unsigned requests;
  uint64_t sum; /* of the bodies received */
  interop_answer queue[QUEUE_CAP];
  size_t first, queued;
  bool ended; /* by a status the client asked for, once the queue is empty */
  kvrelay_status end;
  uint8_t head[24]; /* of the message handed out */
} test_call;

static uint8_t zeros[MESSAGE_CAP];
static kvrelay_transport *server;
static unsigned long opened, open_now;

/* Metadata that asks to come back.  False without memory. */
static bool echo_metadata(kvrelay_call *call) {
  size_t cursor = 0;
  kvrelay_iov v;
  int err = KVRELAY_TRANSPORT_OK;
  while (err == KVRELAY_TRANSPORT_OK &&
         kvrelay_grpc_server_metadata(call, INTEROP_INITIAL, &cursor, &v))
    err = kvrelay_grpc_server_add_initial(call, INTEROP_INITIAL, v.base, v.len);
  cursor = 0;
  while (err == KVRELAY_TRANSPORT_OK &&
         kvrelay_grpc_server_metadata(call, INTEROP_TRAILING, &cursor, &v))
    err = kvrelay_grpc_server_add_trailing(call, INTEROP_TRAILING, v.base, v.len);
  return err == KVRELAY_TRANSPORT_OK;
}

static int on_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                   uint64_t now_ns, void **handle, kvrelay_status *status) {
  const size_t n = sizeof INTEROP_SERVICE - 1;
  (void)self;
  (void)now_ns;
  for (size_t i = 1; i < INTEROP_METHODS; i++)
    if (path_len == n + strlen(interop_names[i]) && memcmp(path, INTEROP_SERVICE, n) == 0 &&
        memcmp(path + n, interop_names[i], path_len - n) == 0) {
      test_call *c = echo_metadata(call) ? calloc(1, sizeof *c) : NULL;
      if (c == NULL)
        return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "no memory");
      c->transport = call;
      c->method = (enum interop_method)i;
      opened++;
      open_now++;
      *handle = c;
      return KVRELAY_OK;
    }
  return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "no such method");
}

static bool streams_requests(const test_call *c) { return c->method >= INTEROP_INPUT; }

static int enqueue(test_call *c, const interop_request *r, kvrelay_status *status) {
  if (c->queued + r->answers > QUEUE_CAP)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "too many answers wait");
  for (size_t i = 0; i < r->answers; i++) {
    if (r->answer[i].bytes > MESSAGE_CAP - sizeof c->head)
      return kvrelay_refuse(status, KVRELAY_GRPC_INVALID_ARGUMENT, "the answer would be too large");
    c->queue[(c->first + c->queued++) % QUEUE_CAP] = r->answer[i];
  }
  return KVRELAY_OK;
}

static int on_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                      uint64_t now_ns, kvrelay_status *status) {
  test_call *c = handle;
  interop_request r;
  (void)self;
  (void)now_ns;
  if (c->requests++ > 0 && !streams_requests(c))
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "more than one request message");
  if (c->ended)
    return KVRELAY_OK; /* after that status nothing is looked at */
  if (c->method == INTEROP_EMPTY)
    return KVRELAY_OK;
  if (!interop_request_read(c->method, bytes, len, &r))
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "the request does not decode");
  const bool zipped = kvrelay_grpc_server_compressed(c->transport);
  if (r.expect_zipped != INTEROP_ABSENT && zipped != (r.expect_zipped == INTEROP_TRUE))
    return kvrelay_refuse(status, KVRELAY_GRPC_INVALID_ARGUMENT, "not compressed as announced");
  c->sum += r.body_bytes;
  if (r.has_status) {
    c->ended = true;
    (void)kvrelay_refuse(&c->end, (int32_t)r.status, r.text);
    r.answers = c->method == INTEROP_UNARY ? 0 : r.answers;
  }
  int err = enqueue(c, &r, status);
  if (err == KVRELAY_OK)
    c->transport->wake(c->transport);
  return err;
}

static int on_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                         kvrelay_status *status) {
  test_call *c = handle;
  (void)self;
  (void)now_ns;
  c->half_closed = true;
  if (c->requests == 0 && !streams_requests(c))
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "no request message");
  c->queued += c->method == INTEROP_EMPTY || c->method == INTEROP_INPUT;
  return KVRELAY_OK;
}

/* Clients that stream may wait for headers before they send anything. */
static bool on_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  return ((test_call *)handle)->method == INTEROP_FULL_DUPLEX;
}

static void hand_out(test_call *c, kvrelay_parts *parts) {
  const interop_answer a = c->queue[c->first++ % QUEUE_CAP];
  size_t head = 0;
  c->queued--;
  kvrelay_grpc_server_compress(c->transport, a.zipped == INTEROP_TRUE);
  if (c->method == INTEROP_INPUT) {
    pb_ostream_t out = pb_ostream_from_buffer(c->head, sizeof c->head);
    if (pb_encode_tag(&out, PB_WT_VARINT, 1) && pb_encode_varint(&out, c->sum))
      head = out.bytes_written;
  } else if (c->method != INTEROP_EMPTY)
    head = interop_payload_head(c->head, 1, a.bytes);
  parts->part[0] = (kvrelay_iov){c->head, head};
  parts->part[1] = (kvrelay_iov){zeros, a.bytes};
  parts->part_len = 2;
  parts->bytes = head + a.bytes;
}

static int on_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                   kvrelay_status *status) {
  test_call *c = handle;
  (void)self;
  (void)now_ns;
  const bool may_answer = c->half_closed || c->method == INTEROP_FULL_DUPLEX;
  if (may_answer && c->queued > 0) {
    hand_out(c, parts);
    return KVRELAY_PULL_MESSAGE;
  }
  if (!c->half_closed && !c->ended)
    return KVRELAY_PULL_NONE;
  *status = c->end;
  return KVRELAY_PULL_END;
}

static void on_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  open_now--;
  free(handle);
}

static void on_log(void *context, int level, const char *event, const char *text) {
  (void)context;
  if (level >= KVRELAY_LOG_WARN)
    fprintf(stderr, "%s %s\n", event, text);
}

static void on_command(evutil_socket_t fd, short what, void *argument) {
  char line[64] = "";
  (void)what;
  (void)argument;
  if (read((int)fd, line, sizeof line - 1) <= 0)
    exit(open_now != 0);
  if (strncmp(line, "counts", 6) == 0)
    printf("counts %lu %lu\n", opened, open_now);
  if (strncmp(line, "encodings", 9) == 0)
    printf("encodings %s\n", kvrelay_grpc_encodings());
  fflush(stdout);
}

int main(int argc, char **argv) {
  kvrelay_service service = {on_open, on_message, on_half_close, on_admitted, on_pull, on_close};
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  char address[128];
  cfg.bind = argc > 1 ? argv[1] : "127.0.0.1:0";
  cfg.base = event_base_new();
  cfg.security = interop_security(true);
  cfg.log = on_log;
  cfg.request_metadata = true;
  cfg.response_encodings = ~0u;
  cfg.max_request_bytes = cfg.max_message_bytes = MESSAGE_CAP;
  int err = kvrelay_grpc_server_open(&cfg, &service, &server);
  if (err != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "interop_server: %s\n", kvrelay_transport_strerror(err));
    return 69;
  }
  struct event *command = event_new(cfg.base, 0, EV_READ | EV_PERSIST, on_command, NULL);
  event_add(command, NULL);
  kvrelay_grpc_server_address(server, address, sizeof address);
  printf("listening %s\n", address);
  fflush(stdout);
  while (server->run_once(server, KVRELAY_TIME_NONE) >= 0)
    continue;
  return 1;
}
