/* SPDX-License-Identifier: Apache-2.0 */
/* proxy.h - the way through an HTTP proxy: CONNECT, then the connection is the caller's. */
#ifndef KVRELAY_PROXY_H
#define KVRELAY_PROXY_H

#include "transport.h"

#define KVRELAY_PROXY_HEAD_MAX 8192 /* bytes of the proxy's answer */

typedef struct kvrelay_proxy {
  char host[256], port[8]; /* host "": none */
  char credentials[352];   /* of Basic authentication, in base64; "": none */
} kvrelay_proxy;

/*
 * "http://host:port", "http://user:password@host:port/", "host:port": as HTTPS_PROXY has it, but
 * the port is required.  User and password may be percent-encoded.  KVRELAY_TRANSPORT_OK, or
 * _ERR_ADDRESS: none of these.
 */
int kvrelay_proxy_parse(const char *text, kvrelay_proxy *out);
/*
 * True for a host to be reached without a proxy: "localhost", a loopback address, or one that
 * `no_proxy` names.  That is a list with commas, as NO_PROXY has it (NULL: empty): "*" for all, a
 * host or address, a domain (with or without its first dot) for all hosts in it, each perhaps with
 * ":port".
 */
bool kvrelay_proxy_spared(const char *no_proxy, const char *host, const char *port);
/*
 * Asks the proxy at the other end of `fd`, connected and non-blocking, for `host`:`port`, and
 * waits for its answer until `called_off` hangs up.  Nothing behind the answer is read.  0: the
 * connection leads there.  Above 0: the HTTP status of a refusal, or 1 for an answer that is none.
 * Below 0: -errno; -ECANCELED: called off.
 */
int kvrelay_proxy_connect(const kvrelay_proxy *proxy, int fd, int called_off, const char *host,
                          const char *port);

#endif
