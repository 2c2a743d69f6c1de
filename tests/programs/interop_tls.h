/* SPDX-License-Identifier: Apache-2.0 */
/* interop_tls.h - TLS for the programs of the official test service. */
#ifndef KVRELAY_TEST_INTEROP_TLS_H
#define KVRELAY_TEST_INTEROP_TLS_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "transports/tls/tls.h"

/*
 * What INTEROP_TLS, a folder, says of TLS; NULL: plaintext.  It has ca.pem, and server.pem and .key
 * issued by it; with client.pem and .key, clients show these and servers ask for them.  Ends the
 * program when a file cannot be used.
 */
static inline kvrelay_security *interop_security(bool server) {
  const char *const folder = getenv("INTEROP_TLS");
  char ca[512], client[512], cert[512], key[512], why[KVRELAY_TLS_WHY_CAP];
  kvrelay_tls *tls;
  if (folder == NULL)
    return NULL;
  snprintf(ca, sizeof ca, "%s/ca.pem", folder);
  snprintf(client, sizeof client, "%s/client.pem", folder);
  snprintf(cert, sizeof cert, "%s/%s.pem", folder, server ? "server" : "client");
  snprintf(key, sizeof key, "%s/%s.key", folder, server ? "server" : "client");
  const bool mutual = access(client, F_OK) == 0, shows = server || mutual;
  const kvrelay_tls_config cfg = {.server = server,
                                  .cert_file = shows ? cert : NULL,
                                  .key_file = shows ? key : NULL,
                                  .ca_file = server && !mutual ? NULL : ca};
  if (kvrelay_tls_open(&cfg, &tls, why) != KVRELAY_TRANSPORT_OK) {
    fprintf(stderr, "%s\n", why);
    exit(69);
  }
  return kvrelay_tls_security(tls);
}

#endif
