/* SPDX-License-Identifier: Apache-2.0 */
/* address.h - texts of addresses: "host:port", "[::1]:port", "unix:path", "unix-abstract:name". */
#ifndef KVRELAY_ADDRESS_H
#define KVRELAY_ADDRESS_H

#include <sys/socket.h>

#include "transport.h"

typedef struct kvrelay_address {
  struct sockaddr_storage storage;
  socklen_t len;
} kvrelay_address;

/* Room for any address as text. */
#define KVRELAY_ADDRESS_CAP 128

/*
 * Splits "host:port" or "[v6]:port" into terminated texts.  KVRELAY_TRANSPORT_ERR_ADDRESS: it does
 * not look like that, or the port is not 0 .. 65 535.
 */
int kvrelay_address_split(const char *text, char *host, size_t host_cap, char *port,
                          size_t port_cap);
/*
 * Addresses of a host in the system's order, at most `cap`.  Returns their number or
 * KVRELAY_TRANSPORT_ERR_ADDRESS.  Asks the name service unless `numeric`, so it may take long.
 */
int kvrelay_address_resolve(const char *host, const char *port, bool numeric, kvrelay_address *out,
                            size_t cap);
/* "unix:path", "unix:///path", "unix-abstract:name" (a name of the kernel's, without a file).  1, 0
 * for a text that is none of them, or KVRELAY_TRANSPORT_ERR_ADDRESS: too long or empty. */
int kvrelay_address_unix(const char *text, kvrelay_address *out);
/* Any of the texts above, as something to bind: the first address of a host.  KVRELAY_TRANSPORT_OK,
 * or _ERR_ADDRESS.  May ask the name service. */
int kvrelay_address_parse(const char *text, kvrelay_address *out);
/*
 * Parses the text and listens there without blocking: `*fd` is the socket, `*bound` where it
 * listens, with the port that the system chose for 0.  KVRELAY_TRANSPORT_OK, or _ERR_ADDRESS,
 * _ERR_BIND (errno), _ERR_SYSTEM (errno); then `*fd` is -1.  May ask the name service.
 */
int kvrelay_address_listen(const char *text, kvrelay_address *bound, int *fd);
/* Two connections come from one host: the same IP address.  Unix sockets have no hosts. */
bool kvrelay_address_same_host(const kvrelay_address *a, const kvrelay_address *b);
/* Removes the file of a socket that is closed; of other addresses there is none. */
void kvrelay_address_remove(const kvrelay_address *address);
/* The address as its text form. */
void kvrelay_address_format(const kvrelay_address *address, char out[KVRELAY_ADDRESS_CAP]);

#endif
