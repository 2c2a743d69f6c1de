/* SPDX-License-Identifier: Apache-2.0 */
/* tls_pair.h - two sessions with a wire between them that splits, cuts and bends what it carries.
 */
#ifndef KVRELAY_TEST_TLS_PAIR_H
#define KVRELAY_TEST_TLS_PAIR_H

#include "transports/tls/tls.h"

enum { TLS_SERVER = 0, TLS_CLIENT = 1 };

typedef struct tls_pair {
  kvrelay_tls *tls[2];
  kvrelay_secure_session *session[2];
  int fd[2];       /* of the sessions */
  int wire[2];     /* the other ends */
  size_t moved[2]; /* bytes that a side has sent */
  size_t limit[2]; /* the wire carries no more than that, then it is cut; SIZE_MAX: never */
  size_t bend[2];  /* the byte with this number arrives changed; SIZE_MAX: none */
  int result[2];   /* of the handshake */
} tls_pair;

/* Files "server.pem", "client.pem" …, from the folder of certs.h, made once: an authority "ca",
 * "server" for "relay.example" and 127.0.0.1, "client" with the URI "spiffe://example/router". */
void tls_make_certs(void);
/* Mutual TLS with those. */
kvrelay_tls_config tls_server_config(void);
kvrelay_tls_config tls_client_config(void);
/* Fails the test when it cannot be opened. */
kvrelay_tls *tls_open(kvrelay_tls_config cfg);

/* Both sides speak "h2" and the client means "relay.example". */
void tls_pair_open(tls_pair *pair, kvrelay_tls_config server, kvrelay_tls_config client);
/* New sessions of the same configurations. */
void tls_pair_again(tls_pair *pair, const char *protocols, bool required, const char *peer_name);
/* Closes sessions and wire, not the configurations. */
void tls_pair_hang_up(tls_pair *pair);
void tls_pair_close(tls_pair *pair);
/* Carries at most `chunk` bytes each way; what it carried, ends included. */
size_t tls_pair_carry(tls_pair *pair, size_t chunk);
/* Until both know their result, or nothing moves any more.  True: both are done. */
bool tls_pair_shake(tls_pair *pair, size_t chunk);
/*
 * Sends `len` bytes of a pattern from one side, offered in pieces of at most `piece` bytes, and
 * reads them at the other side with `cap` bytes of room.  True: all came, in order.
 */
bool tls_pair_send(tls_pair *pair, int from, size_t len, size_t piece, size_t chunk, size_t cap);

#endif
