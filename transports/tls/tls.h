/* SPDX-License-Identifier: Apache-2.0 */
/* tls.h - TLS and mutual TLS as a security of secure.h, with OpenSSL 3. */

/*
 * What holds for every connection: TLS 1.3 or 1.2, with forward secrecy and authenticated
 * encryption only; no renegotiation, no compression, no early data.  A server that asks for client
 * certificates resumes no session: each handshake looks at the certificate anew, so that a change
 * of authorities or names counts at once.
 */
#ifndef KVRELAY_TLS_H
#define KVRELAY_TLS_H

#include "../secure.h"

typedef struct kvrelay_tls kvrelay_tls;

/* Files are PEM.  Everything is only read during the call that gets it, but for `warn`. */
typedef struct kvrelay_tls_config {
  bool server;
  const char *cert_file; /* chain, the own certificate first.  Client: NULL when it shows none. */
  const char *key_file;  /* its private key, without a passphrase; NULL with cert_file */
  /*
   * Authorities that the peer's certificate has to come from.  Client, NULL: those of the system.
   * Server, NULL: clients are not asked for certificates.
   */
  const char *ca_file;
  bool client_optional; /* server with ca_file: a client without certificate is served too */
  /*
   * Server with ca_file: of those certificates, the ones that carry at least one of these names as
   * subject alternative name.  "dns:NAME": a DNS name, compared without regard to the case of
   * ASCII letters; anything else: a URI, "spiffe://example/router", compared byte by byte.  No
   * patterns on either side.  allow_len 0: every certificate of those authorities.  A client
   * without certificate has no name: with client_optional the list does not keep it out.
   */
  const char *const *allow;
  size_t allow_len;
  /* What an operator should see to although it works: a key that everybody can read, a certificate
   * that has expired.  Text terminated, valid during the call.  May be NULL. */
  void (*warn)(void *context, const char *text);
  void *warn_context;
} kvrelay_tls_config;

/* Room for the reason of an error. */
#define KVRELAY_TLS_WHY_CAP 512

/*
 * Reads the files.  KVRELAY_TRANSPORT_OK; _ERR_ARG, _ERR_MEMORY; _ERR_SECURITY: a file or name
 * cannot be used, `why` names it and says why.  Then there is nothing to close.
 */
int kvrelay_tls_open(const kvrelay_tls_config *cfg, kvrelay_tls **out,
                     char why[KVRELAY_TLS_WHY_CAP]);
/*
 * Reads the files again, the same or others, of the same side.  Sessions made from now on use them,
 * those there are go on with what they began with.  As kvrelay_tls_open; after an error everything
 * is as before.
 */
int kvrelay_tls_reload(kvrelay_tls *tls, const kvrelay_tls_config *cfg,
                       char why[KVRELAY_TLS_WHY_CAP]);
/* After its sessions are closed; NULL is fine. */
void kvrelay_tls_close(kvrelay_tls *tls);

/* For the configuration of a transport; lives as long as `tls`. */
kvrelay_security *kvrelay_tls_security(kvrelay_tls *tls);
/* When the own chain and when the authorities of ca_file expire, the first certificate of each, in
 * unix seconds; 0: there is none. */
int64_t kvrelay_tls_cert_not_after(const kvrelay_tls *tls);
int64_t kvrelay_tls_ca_not_after(const kvrelay_tls *tls);

#endif
