/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Either side of the raw transport, for an implementation that others than we could have written
 * (tests/e2e/raw.py).
 *
 * Both take KEY=VALUE words: "cert", "key" and "ca" are files, and mean TLS.
 *
 * raw_echo serve [KEY=VALUE]...: the toy service of raw_pair.h, limits and times (in ms) by name.
 * Prints "listening ADDRESS", "log EVENT TEXT"; takes "release", "counts", "stop" on standard
 * input.
 *
 * raw_echo call TARGET [KEY=VALUE]...: prints "state N TEXT"; each line "NUMBER METHOD REQUEST" is
 * a call, "cancel NUMBER" takes it back, "stop" ends in order.  Prints "admitted NUMBER", "message
 * NUMBER LENGTH BYTES" (in hexadecimal, at most 64 of them) and "end NUMBER GRPC REASON TEXT".
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../support/raw_pair.h"
#include "transports/tcp/tcp_client.h"
#include "transports/tcp/tcp_server.h"
#include "transports/tls/tls.h"

#define MS UINT64_C(1000000)

static raw_toy toy;
static kvrelay_tls_config files;
static kvrelay_tls *tls;

/* Takes a word that names a file of TLS. */
static bool configure_tls(const char *word) {
  if (strncmp(word, "cert=", 5) == 0)
    files.cert_file = word + 5;
  else if (strncmp(word, "key=", 4) == 0)
    files.key_file = word + 4;
  else if (strncmp(word, "ca=", 3) == 0)
    files.ca_file = word + 3;
  else
    return false;
  return true;
}

/* NULL: no file was named. */
static kvrelay_security *security(bool server) {
  char why[KVRELAY_TLS_WHY_CAP];
  files.server = server;
  if (files.cert_file == NULL && files.ca_file == NULL)
    return NULL;
  if (kvrelay_tls_open(&files, &tls, why) == KVRELAY_TRANSPORT_OK)
    return kvrelay_tls_security(tls);
  fprintf(stderr, "%s\n", why);
  exit(78);
}

/* One line of standard input, when there is one: false at its end. */
static bool read_line(char *line, size_t cap) {
  static char held[4096];
  static size_t len;
  struct pollfd in = {.fd = 0, .events = POLLIN};
  char *newline = memchr(held, '\n', len);
  line[0] = '\0';
  if (newline == NULL && poll(&in, 1, 0) > 0) {
    const ssize_t n = read(0, held + len, sizeof held - len);
    if (n <= 0)
      return false;
    len += (size_t)n;
    newline = memchr(held, '\n', len);
  }
  if (newline == NULL)
    return true;
  const size_t used = (size_t)(newline - held) + 1;
  snprintf(line, cap, "%.*s", (int)used - 1, held);
  len -= used;
  memmove(held, held + used, len);
  return true;
}

/* ---- server ---- */

static void on_log(void *context, int level, const char *event, const char *text) {
  (void)context;
  if (level >= KVRELAY_LOG_WARN)
    printf("log %s %s\n", event, text);
  fflush(stdout);
}

static bool configure(kvrelay_tcp_server_config *cfg, const char *word) {
  const char *equals = strchr(word, '=');
  if (equals == NULL)
    return false;
  const uint64_t value = strtoull(equals + 1, NULL, 10);
  if (strncmp(word, "max_streams=", 12) == 0)
    cfg->max_streams = (uint16_t)value;
  else if (strncmp(word, "max_request=", 12) == 0)
    cfg->max_request_bytes = (uint32_t)value;
  else if (strncmp(word, "per_peer=", 9) == 0)
    cfg->max_connections_per_peer = (uint32_t)value;
  else if (strncmp(word, "preface=", 8) == 0)
    cfg->preface_timeout_ns = value * MS;
  else if (strncmp(word, "keepalive=", 10) == 0)
    cfg->keepalive_interval_ns = cfg->keepalive_timeout_ns = value * MS;
  else if (strncmp(word, "idle=", 5) == 0)
    cfg->idle_timeout_ns = value * MS;
  else
    return false;
  return true;
}

static int serve(char **words) {
  kvrelay_tcp_server_config cfg = kvrelay_tcp_server_config_default();
  kvrelay_transport *server;
  char text[128];
  cfg.bind = "127.0.0.1:0";
  cfg.log = on_log;
  for (; *words != NULL; words++)
    if (!configure_tls(*words) && !configure(&cfg, *words))
      return 64;
  cfg.security = security(true);
  raw_toy_init(&toy);
  if (kvrelay_tcp_server_open(&cfg, &toy.base, &server) != KVRELAY_TRANSPORT_OK)
    return 69;
  kvrelay_tcp_server_address(server, text, sizeof text);
  printf("listening %s\n", text);
  fflush(stdout);
  while (read_line(text, sizeof text) && server->run_once(server, 5 * MS) >= 0) {
    if (strcmp(text, "release") == 0)
      toy_service_release(&toy.toy);
    if (strcmp(text, "counts") == 0)
      printf("counts %d %d %d %d %ld\n", toy.toy.opened, toy.toy.closed, toy.toy.open_now,
             toy.toy.broken, toy.toy.pulled);
    if (strcmp(text, "stop") == 0) {
      server->stop(server, 2000 * MS);
      toy_service_shutdown(&toy.toy);
    }
    fflush(stdout);
  }
  server->close(server);
  printf("stopped %d\n", toy.toy.broken);
  kvrelay_tls_close(tls);
  toy_service_free(&toy.toy);
  return toy.toy.broken != 0 || toy.toy.open_now != 0;
}

/* ---- client ---- */

static void on_connection(kvrelay_caller *self, int state, int err, const char *text,
                          uint64_t retry_ns, uint64_t now_ns) {
  (void)self;
  (void)err;
  (void)retry_ns;
  (void)now_ns;
  printf("state %d %s\n", state, text);
}

static void on_admitted(kvrelay_caller *self, uint32_t call, uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  printf("admitted %u\n", call);
}

static void on_message(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                       uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  printf("message %u %zu ", call, len);
  for (size_t i = 0; i < len && i < 64; i++)
    printf("%02x", bytes[i]);
  putchar('\n');
}

static void on_end(kvrelay_caller *self, uint32_t call, const kvrelay_status *status,
                   uint64_t now_ns) {
  (void)self;
  (void)now_ns;
  printf("end %u %d %d %s\n", call, status->grpc, status->reason, status->text);
}

static void command(kvrelay_client_transport *client, const char *line) {
  unsigned number;
  char method[32];
  int used = 0;
  if (sscanf(line, "cancel %u", &number) == 1) {
    client->cancel(client, number);
  } else if (sscanf(line, "%u %31s %n", &number, method, &used) == 2) {
    const int err = client->call(client, number, raw_toy_path(method), (const uint8_t *)line + used,
                                 strlen(line + used));
    if (err != KVRELAY_TRANSPORT_OK)
      printf("refused %u %d\n", number, err);
  } else if (strcmp(line, "stop") == 0) {
    client->base.stop(&client->base, 1000 * MS);
  }
}

static int call(const char *target, char **words) {
  kvrelay_caller caller = {on_connection, on_admitted, on_message, on_end};
  kvrelay_tcp_client_config cfg = kvrelay_tcp_client_config_default();
  kvrelay_client_transport *client;
  char line[1024];
  for (; *words != NULL; words++)
    if (!configure_tls(*words))
      return 64;
  cfg.target = target;
  cfg.security = security(false);
  cfg.max_message_bytes = cfg.stream_window_bytes = 65536;
  cfg.backoff_first_ns = cfg.backoff_max_ns = 50 * MS;
  cfg.keepalive_interval_ns = 300 * MS;
  cfg.keepalive_timeout_ns = 300 * MS;
  if (kvrelay_tcp_client_open(&cfg, &caller, &client) != KVRELAY_TRANSPORT_OK)
    return 69;
  while (read_line(line, sizeof line) && client->base.run_once(&client->base, 5 * MS) >= 0) {
    command(client, line);
    fflush(stdout);
  }
  client->base.close(&client->base);
  kvrelay_tls_close(tls);
  fflush(stdout);
  return 0;
}

int main(int argc, char **argv) {
  if (argc >= 2 && strcmp(argv[1], "serve") == 0)
    return serve(argv + 2);
  return argc >= 3 && strcmp(argv[1], "call") == 0 ? call(argv[2], argv + 3) : 64;
}
