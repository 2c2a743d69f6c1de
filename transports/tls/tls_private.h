/* SPDX-License-Identifier: Apache-2.0 */
/* tls_private.h - what tls.c and tls_session.c share. */
#ifndef KVRELAY_TLS_PRIVATE_H
#define KVRELAY_TLS_PRIVATE_H

#include <openssl/ssl.h>

#include "tls.h"

#define KVRELAY_TLS_RECORD ((size_t)16384) /* plaintext of the largest record */

/* What one reading of the files gave.  Sessions hold it, so that a reload does not touch them. */
typedef struct kvrelay_tls_material {
  SSL_CTX *ctx;
  char **allow;
  size_t allow_len;
  size_t users;
  int64_t cert_not_after, ca_not_after;
  bool asks_clients;
} kvrelay_tls_material;

struct kvrelay_tls {
  kvrelay_security base; /* first */
  kvrelay_tls_material *material;
  BIO_METHOD *bio;
  bool server;
  /* Lent to whichever session is at work; empty between two calls. */
  uint8_t *out; /* records for the socket */
  size_t out_len, out_cap;
  uint8_t record[KVRELAY_TLS_RECORD]; /* small pieces that share one */
};

void kvrelay_tls_material_release(kvrelay_tls_material *m);
/* A certificate's end in unix seconds; 0: it cannot be read. */
int64_t kvrelay_tls_not_after(const X509 *cert);

/* The session side. */
BIO_METHOD *kvrelay_tls_bio_method(void);
kvrelay_secure_session *kvrelay_tls_session_open(kvrelay_security *self,
                                                 const kvrelay_secure_config *cfg);
/* Callbacks of a context. */
int kvrelay_tls_on_verify(int ok, X509_STORE_CTX *store);
int kvrelay_tls_on_hello(SSL *ssl, int *alert, void *argument);
int kvrelay_tls_on_protocols(SSL *ssl, const unsigned char **out, unsigned char *out_len,
                             const unsigned char *in, unsigned in_len, void *argument);

#endif
