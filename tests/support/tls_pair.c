/* SPDX-License-Identifier: Apache-2.0 */
#include "tls_pair.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "certs.h"

#define PIECES 32

static void need(bool good, const char *what) {
  if (good)
    return;
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  abort();
}

void tls_make_certs(void) {
  static pid_t made;
  if (made == getpid())
    return;
  made = getpid();
  certs_make("ca", NULL, (cert_wish){.authority = true});
  certs_make("server", "ca",
             (cert_wish){.names = "DNS:relay.example,IP:127.0.0.1", .usage = "serverAuth"});
  certs_make("client", "ca",
             (cert_wish){.names = "URI:spiffe://example/router", .usage = "clientAuth"});
}

kvrelay_tls_config tls_server_config(void) {
  tls_make_certs();
  return (kvrelay_tls_config){.server = true,
                              .cert_file = certs_path("server.pem"),
                              .key_file = certs_path("server.key"),
                              .ca_file = certs_path("ca.pem")};
}

kvrelay_tls_config tls_client_config(void) {
  tls_make_certs();
  return (kvrelay_tls_config){.cert_file = certs_path("client.pem"),
                              .key_file = certs_path("client.key"),
                              .ca_file = certs_path("ca.pem")};
}

kvrelay_tls *tls_open(kvrelay_tls_config cfg) {
  char why[KVRELAY_TLS_WHY_CAP] = "";
  kvrelay_tls *tls = NULL;
  need(kvrelay_tls_open(&cfg, &tls, why) == KVRELAY_TRANSPORT_OK, why);
  return tls;
}

void tls_pair_again(tls_pair *pair, const char *protocols, bool required, const char *peer_name) {
  for (int side = 0; side < 2; side++) {
    int ends[2];
    need(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "sockets");
    pair->fd[side] = ends[0];
    pair->wire[side] = ends[1];
    pair->moved[side] = 0;
    pair->limit[side] = pair->bend[side] = SIZE_MAX;
    pair->result[side] = KVRELAY_SECURE_AGAIN;
    kvrelay_security *security = kvrelay_tls_security(pair->tls[side]);
    const kvrelay_secure_config cfg = {ends[0], protocols, required,
                                       side == TLS_CLIENT ? peer_name : NULL};
    pair->session[side] = security->session(security, &cfg);
    need(pair->session[side] != NULL, "session");
  }
}

void tls_pair_open(tls_pair *pair, kvrelay_tls_config server, kvrelay_tls_config client) {
  pair->tls[TLS_SERVER] = tls_open(server);
  pair->tls[TLS_CLIENT] = tls_open(client);
  tls_pair_again(pair, "h2", true, "relay.example");
}

void tls_pair_hang_up(tls_pair *pair) {
  for (int side = 0; side < 2; side++) {
    pair->session[side]->close(pair->session[side]);
    close(pair->fd[side]);
    if (pair->wire[side] >= 0)
      close(pair->wire[side]);
  }
}

void tls_pair_close(tls_pair *pair) {
  tls_pair_hang_up(pair);
  kvrelay_tls_close(pair->tls[TLS_SERVER]);
  kvrelay_tls_close(pair->tls[TLS_CLIENT]);
}

static size_t carry_from(tls_pair *pair, int side, size_t chunk) {
  static uint8_t bytes[65536];
  int from = pair->wire[side], to = pair->wire[1 - side];
  if (from < 0 || to < 0)
    return 0;
  size_t room = pair->limit[side] - pair->moved[side];
  if (chunk > sizeof bytes)
    chunk = sizeof bytes;
  if (chunk > room)
    chunk = room;
  if (room == 0) {
    (void)shutdown(to, SHUT_WR);
    return 0;
  }
  ssize_t n = recv(from, bytes, chunk, MSG_PEEK);
  if (n == 0)
    (void)shutdown(to, SHUT_WR);
  if (n <= 0)
    return 0;
  if (pair->bend[side] - pair->moved[side] < (size_t)n)
    bytes[pair->bend[side] - pair->moved[side]] ^= 0x41;
  n = send(to, bytes, (size_t)n, MSG_NOSIGNAL);
  if (n < 0)
    return 0;
  need(recv(from, bytes, (size_t)n, 0) == n, "wire");
  pair->moved[side] += (size_t)n;
  return (size_t)n;
}

size_t tls_pair_carry(tls_pair *pair, size_t chunk) {
  return carry_from(pair, TLS_SERVER, chunk) + carry_from(pair, TLS_CLIENT, chunk);
}

bool tls_pair_shake(tls_pair *pair, size_t chunk) {
  for (int still = 0; still < 3;) {
    for (int side = 0; side < 2; side++)
      pair->result[side] = pair->session[side]->handshake(pair->session[side]);
    still = tls_pair_carry(pair, chunk) == 0 ? still + 1 : 0;
  }
  return pair->result[0] == KVRELAY_SECURE_OK && pair->result[1] == KVRELAY_SECURE_OK;
}

static uint8_t pattern(size_t at) { return (uint8_t)(at * 7 + at / 251); }

/* Offers a few pieces of the rest; the bytes taken. */
static ptrdiff_t offer(kvrelay_secure_session *s, const uint8_t *bytes, size_t len, size_t piece) {
  kvrelay_iov pieces[PIECES];
  size_t count = 0;
  for (size_t at = 0; at < len && count < PIECES; count++) {
    size_t n = len - at < piece ? len - at : piece;
    pieces[count] = (kvrelay_iov){bytes + at, n};
    at += n;
  }
  return s->write(s, pieces, count);
}

bool tls_pair_send(tls_pair *pair, int from, size_t len, size_t piece, size_t chunk, size_t cap) {
  kvrelay_secure_session *out = pair->session[from], *in = pair->session[1 - from];
  uint8_t *sent = malloc(len + 1), *got = malloc(cap);
  size_t written = 0, read = 0;
  bool good = true;
  for (size_t i = 0; i < len; i++)
    sent[i] = pattern(i);
  for (int still = 0; still < 3 && read < len && good;) {
    ptrdiff_t n = offer(out, sent + written, len - written, piece);
    good = n >= 0;
    written += good ? (size_t)n : 0;
    size_t moved = tls_pair_carry(pair, chunk) + (size_t)n;
    while ((n = in->read(in, got, cap)) > 0) {
      for (ptrdiff_t i = 0; i < n; i++)
        good &= got[i] == pattern(read + (size_t)i);
      read += (size_t)n;
      moved++;
    }
    good &= n == KVRELAY_SECURE_AGAIN && !in->pending;
    still = moved == 0 ? still + 1 : 0;
  }
  free(sent);
  free(got);
  return good && read == len;
}
