/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our server transport with messages that were encoded before: grpc_server FOLDER writes them to
 * that folder, for the servers beside it, prints "listening ADDRESS", and ends with its standard
 * input.  INTEROP_TLS as interop_tls.h has it.
 */
#include <event2/event.h>
#include <unistd.h>

#include "../bench.h"
#include "kvrelay_pb.h"
#include "streams.h"
#include "tests/programs/interop_tls.h"
#include "transports/grpc/grpc_server.h"

typedef struct stream {
  const uint8_t *bytes;
  size_t len;
  unsigned long left;
  bool idle;
} stream;

static uint8_t delta[1024], chunk[STREAMS_CHUNK_BYTES];
static size_t delta_len, chunk_len;

/* ---- the messages ---- */

static kvrelay_filter_update frame_of(const uint8_t *payload, size_t len, int kind) {
  const kvrelay_digest digest = {
      true, {1, 2, 3}, KVRELAY_DIGEST_LEN, KVRELAY_SOURCE_DEFAULT_DERIVED};
  return (kvrelay_filter_update){
      .envelope = {KVRELAY_WIRE_VERSION,
                   true,
                   {0x1234567890abcdefu, 0x0fedcba987654321u},
                   KVRELAY_CONTRACT_MARKER},
      .producer = {true,
                   {true, 1, {true, digest, digest}, 0x04f110c98b1bfc48u},
                   0x0fedcba987654321u,
                   1,
                   {true, 1, CKF_DEFAULT_SEED, STREAMS_BUCKETS, 16, 4}},
      .base_sequence = kind == KVRELAY_UPDATE_DELTA ? 10000 : 10001,
      .sequence = 10001,
      .send_ts_us = 1700000000000000u,
      .kind = kind,
      .payload = payload,
      .payload_len = len};
}

static size_t encode(const kvrelay_filter_update *m, uint8_t *out, size_t cap) {
  ptrdiff_t len = kvrelay_pb_encode_filter(m, out, cap);
  bench_need(len > 0);
  return (size_t)len;
}

static void compose(void) {
  const ckf_format format = {CKF_DEFAULT_SEED, STREAMS_BUCKETS};
  const size_t len = ckf_cbi1_snapshot_size(&format, STREAMS_CHUNK_BUCKETS, 0);
  uint8_t *const payload = bench_memory(len), small[512];
  uint64_t *const words = bench_memory(8 * (size_t)STREAMS_BUCKETS);
  ckf_image images[STREAMS_IMAGES];
  for (uint64_t i = 0; i < STREAMS_BUCKETS; i++)
    words[i] = i * 0x9E3779B97F4A7C15u;
  for (uint32_t i = 0; i < STREAMS_IMAGES; i++)
    images[i] = (ckf_image){i * 1001, 0x0102030405060708u * i};
  ptrdiff_t n =
      ckf_cbi1_delta_encode(&format, 1, 10000, 10001, images, STREAMS_IMAGES, small, sizeof small);
  bench_need(n > 0);
  kvrelay_filter_update m = frame_of(small, (size_t)n, KVRELAY_UPDATE_DELTA);
  delta_len = encode(&m, delta, sizeof delta);
  bench_need(ckf_cbi1_snapshot_encode(&format, 1, 10001, words, STREAMS_BUCKETS,
                                      STREAMS_CHUNK_BUCKETS, 0, payload, len) == (ptrdiff_t)len);
  m = frame_of(payload, len, KVRELAY_UPDATE_SNAPSHOT_CHUNK);
  chunk_len = encode(&m, chunk, sizeof chunk);
  bench_need(chunk_len == STREAMS_CHUNK_BYTES);
  free(payload);
  free(words);
}

static void write_file(const char *folder, const char *name, const uint8_t *bytes, size_t len) {
  char path[512];
  bench_need(snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path);
  FILE *const f = fopen(path, "wb");
  bench_need(f != NULL && fwrite(bytes, 1, len, f) == len && fclose(f) == 0);
}

/* ---- the service ---- */

static int on_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                   uint64_t now_ns, void **handle, kvrelay_status *status) {
  (void)self;
  (void)call;
  (void)now_ns;
  if (path_len != sizeof STREAMS_PATH - 1 || memcmp(path, STREAMS_PATH, path_len) != 0)
    return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "no such method");
  *handle = calloc(1, sizeof(stream));
  return *handle != NULL ? KVRELAY_OK : kvrelay_refuse(status, KVRELAY_GRPC_UNAVAILABLE, "memory");
}

static int on_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                      uint64_t now_ns, kvrelay_status *status) {
  stream *s = handle;
  char id[64] = "", word[8] = "";
  (void)self;
  (void)now_ns;
  if (len > 2 && bytes[0] == 0x0a && bytes[1] < sizeof id && len >= 2u + bytes[1]) /* field 1 */
    memcpy(id, bytes + 2, bytes[1]);
  if (sscanf(id, "%7s %lu", word, &s->left) != 2)
    return kvrelay_refuse(status, KVRELAY_GRPC_INVALID_ARGUMENT, "the subscriber asks for nothing");
  const bool large = strcmp(word, STREAMS_CHUNK) == 0 || strcmp(word, STREAMS_ENCODED) == 0;
  s->bytes = large ? chunk : delta;
  s->len = large ? chunk_len : delta_len;
  s->idle = strcmp(word, STREAMS_IDLE) == 0;
  return KVRELAY_OK;
}

static int on_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                         kvrelay_status *status) {
  (void)self;
  (void)now_ns;
  if (((stream *)handle)->bytes == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "no request");
  return KVRELAY_OK;
}

static bool on_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  return ((stream *)handle)->bytes != NULL;
}

static int on_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                   kvrelay_status *status) {
  stream *s = handle;
  (void)self;
  (void)now_ns;
  if (s->bytes == NULL || s->idle)
    return KVRELAY_PULL_NONE;
  if (s->left == 0) {
    *status = (kvrelay_status){.grpc = KVRELAY_GRPC_OK};
    return KVRELAY_PULL_END;
  }
  s->left--;
  parts->part[0] = (kvrelay_iov){s->bytes, s->len};
  parts->part_len = parts->kept_len = 1; /* they never change */
  parts->bytes = s->len;
  return KVRELAY_PULL_MESSAGE;
}

static void on_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  free(handle);
}

static void on_input(evutil_socket_t fd, short what, void *argument) {
  char c;
  (void)what;
  (void)argument;
  if (read((int)fd, &c, 1) <= 0)
    exit(0);
}

int main(int argc, char **argv) {
  kvrelay_service service = {on_open, on_message, on_half_close, on_admitted, on_pull, on_close};
  kvrelay_grpc_server_config cfg = kvrelay_grpc_server_config_default();
  kvrelay_transport *server;
  char address[64];
  bench_arguments(argc, argv, 1, "FOLDER");
  bench_need(argc == 2);
  compose();
  write_file(argv[1], STREAMS_DELTA_FILE, delta, delta_len);
  write_file(argv[1], STREAMS_CHUNK_FILE, chunk, chunk_len);
  cfg.bind = "127.0.0.1:0";
  cfg.base = event_base_new();
  cfg.security = interop_security(true);
  cfg.max_connections = cfg.max_connections_per_peer = 4096;
  bench_need(kvrelay_grpc_server_open(&cfg, &service, &server) == KVRELAY_TRANSPORT_OK);
  struct event *const input = event_new(cfg.base, 0, EV_READ | EV_PERSIST, on_input, NULL);
  bench_need(input != NULL && event_add(input, NULL) == 0);
  kvrelay_grpc_server_address(server, address, sizeof address);
  printf("listening %s\n", address);
  fflush(stdout);
  while (server->run_once(server, KVRELAY_TIME_NONE) >= 0)
    continue;
  return 1;
}
