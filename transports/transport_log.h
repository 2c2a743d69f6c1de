/* SPDX-License-Identifier: Apache-2.0 */
/* transport_log.h - what server transports tell operators of their connections. */
#ifndef KVRELAY_TRANSPORT_LOG_H
#define KVRELAY_TRANSPORT_LOG_H

#include "address.h"
#include "secure.h"

/* Levels of a transport's log callback. */
enum kvrelay_log_level { KVRELAY_LOG_DEBUG = 1, KVRELAY_LOG_WARN = 3, KVRELAY_LOG_ERROR = 4 };

/* Where it is told: `log` and `log_context` of a server's configuration. */
typedef struct kvrelay_log {
  void (*write)(void *context, int level, const char *event, const char *text); /* may be NULL */
  void *context;
} kvrelay_log;

/*
 * Tells `text` of the connection of `peer`: "127.0.0.1:4711: TEXT", and with the name that the
 * certificate of the peer of `secure` gives it "127.0.0.1:4711 (router.example): TEXT".  `peer`
 * NULL: it is about no connection; `secure` NULL: plaintext.
 */
void kvrelay_log_connection(kvrelay_log log, int level, const char *event,
                            const kvrelay_address *peer, const kvrelay_secure_session *secure,
                            const char *text);
/* Of a connection that ended for this error (enum kvrelay_transport_err): WARN when an operator
 * should see to it, for the peer broke the rules or is not trusted, or memory is short. */
int kvrelay_log_level_of_end(int err);

#endif
