/* SPDX-License-Identifier: Apache-2.0 */
/* dial.h - from a target's text to a connected socket, beside the program. */
#ifndef KVRELAY_DIAL_H
#define KVRELAY_DIAL_H

#include "address.h"
#include "proxy.h"

#define KVRELAY_DIAL_MAX 8        /* addresses tried */
#define KVRELAY_DIAL_NAME_CAP 256 /* room for a name */

/* Whom to connect to; a name is resolved by each dial. */
typedef struct kvrelay_dial_target {
  kvrelay_address address[KVRELAY_DIAL_MAX];
  int address_count; /* 0: `host` is a name */
  bool fixed;        /* the text was a list of addresses */
  char host[KVRELAY_DIAL_NAME_CAP], port[8];
  char authority[272]; /* as HTTP calls it */
  kvrelay_proxy proxy; /* the way there; host "": straight */
} kvrelay_dial_target;

/*
 * "host:port", "[::1]:port", "dns:///host:port", "ipv4:a:port,b:port", "ipv6:[a]:port,[b]:port",
 * "unix:path", "unix-abstract:name".  KVRELAY_TRANSPORT_OK, or _ERR_ADDRESS: none of them.
 */
int kvrelay_dial_target_parse(const char *text, kvrelay_dial_target *out);

/*
 * Leads the way through an HTTP proxy, unless the target is a list of addresses or a socket of this
 * machine, or kvrelay_proxy_spared says that it needs none.  KVRELAY_TRANSPORT_OK, also with a
 * `proxy` that is NULL or ""; or _ERR_ADDRESS, see kvrelay_proxy_parse.
 */
int kvrelay_dial_target_proxy(kvrelay_dial_target *target, const char *proxy, const char *no_proxy);

/*
 * Whom the certificate of the target's server has to name: `given`, or the host when that is NULL.
 * KVRELAY_TRANSPORT_OK, or _ERR_ARG: it is empty or too long, or there is no host to go by, for the
 * target is a socket of this machine or a list of several addresses.
 */
int kvrelay_dial_target_name(const kvrelay_dial_target *target, const char *given,
                             char out[KVRELAY_DIAL_NAME_CAP]);

/*
 * Connects from a thread of its own, which resolves a name, gives each address a head start of
 * 250 ms, the families in turns, and takes the first that answers (RFC 8305); if that is a proxy,
 * it asks for the target and waits.  Returns a descriptor that becomes readable when
 * kvrelay_dial_result is due, whatever loop watches it; closing it instead calls everything off.
 * There is no time limit but the system's.  Below 0: KVRELAY_TRANSPORT_ERR_MEMORY, or _ERR_SYSTEM
 * (errno).
 */
int kvrelay_dial_start(const kvrelay_dial_target *target);
/*
 * Takes the result and closes the dial.  Returns a connected, non-blocking socket, then the
 * caller's; or KVRELAY_TRANSPORT_ERR_ADDRESS (the name does not resolve) or _ERR_CONNECT, with the
 * reason in `text`.
 */
int kvrelay_dial_result(int dial, char *text, size_t cap);

#endif
