/* SPDX-License-Identifier: Apache-2.0 */
/* address.h - texts of addresses: "host:port", "[::1]:port", "unix:path". */
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
/* "unix:path" and, after its prefix is removed, the path of a socket.
 * KVRELAY_TRANSPORT_ERR_ADDRESS: too long or empty. */
int kvrelay_address_unix(const char *path, kvrelay_address *out);
/* The address as its text form. */
void kvrelay_address_format(const kvrelay_address *address, char out[KVRELAY_ADDRESS_CAP]);

#endif
