/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_client.h - a caller of transport.h behind raw frames on one TCP connection. */
#ifndef KVRELAY_TCP_CLIENT_H
#define KVRELAY_TCP_CLIENT_H

#include "../secure.h"

typedef struct kvrelay_tcp_client_config {
  /* As dial.h has it; only read during open.  Names are resolved again for each connection. */
  const char *target;
  kvrelay_security *security; /* a client's; NULL: plaintext; must outlive the client */
  /* With `security`: whom the server's certificate has to name, when it is not the target's host;
   * only read during open.  NULL: the host, which "unix:" and a list of several addresses do not
   * have: these need it. */
  const char *server_name;
  uint32_t max_message_bytes;   /* of an answer, 65 536 .. 2^31 - 1; a server ends calls that would
                                   need more */
  uint32_t stream_window_bytes; /* what the server may send unread, per call, 1 .. 2^31 - 1 */
  uint32_t max_calls;           /* open at once, ≥ 1 */
  uint64_t connect_timeout_ns;  /* from the first attempt to the server's preface */
  uint64_t
      backoff_first_ns; /* between the starts of two attempts, × 1.6 up to backoff_max_ns, ± 20 % */
  uint64_t backoff_max_ns;
  uint64_t keepalive_interval_ns; /* of silence, then a PING; KVRELAY_TIME_NONE: never */
  uint64_t keepalive_timeout_ns;  /* without an answer the connection is broken */
  uint64_t peer_ping_interval_ns; /* PINGs of a server that come faster, twice: GOAWAY */
  uint64_t jitter_seed;           /* differs from client to client */
} kvrelay_tcp_client_config;

/* Everything but `target`; the seed is taken from the clock. */
kvrelay_tcp_client_config kvrelay_tcp_client_config_default(void);
/*
 * As kvrelay_grpc_client_open: connects in the background, and again whenever the connection is
 * lost.  `caller` must outlive the transport and is only called from inside run_once; it may use
 * the transport from there, except `close`.  Methods travel as numbers: a path that is none of
 * the contract's goes as number 0, which the server refuses.  KVRELAY_TRANSPORT_OK, or _ERR_ARG,
 * _ERR_ADDRESS (the target does not parse), _ERR_MEMORY, _ERR_SYSTEM (errno); then nothing is left
 * open.
 */
int kvrelay_tcp_client_open(const kvrelay_tcp_client_config *cfg, kvrelay_caller *caller,
                            kvrelay_client_transport **out);

#endif
