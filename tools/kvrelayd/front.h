/* SPDX-License-Identifier: Apache-2.0 */
/* front.h - what the daemon serves: the relay, over gRPC with its health and its descriptors and
 * over raw frames, and a listener for probes alone. */
#ifndef KVRELAYD_FRONT_H
#define KVRELAYD_FRONT_H

#include "grpc/grpc_health.h"
#include "grpc/grpc_reflection.h"
#include "mux.h"
#include "service.h"
#include "timer.h"
#include "tls/tls.h"

typedef struct front {
  struct event_base *base;
  kvrelay_relay_service *relay;
  kvrelay_grpc_health *health;
  kvrelay_grpc_reflection *reflection;
  kvrelay_mux all;
  kvrelay_tls *tls;                       /* NULL: plaintext */
  kvrelay_tls_config tls_files;           /* of front_secure */
  kvrelay_transport *grpc, *probes, *raw; /* NULL: not asked for, or ended */
  struct event *raw_ready;                /* raw has a loop of its own, inside of `base`: ... */
  kvrelay_timer raw_due;                  /* ... these two end a turn for it */
  bool stopping;
  bool catalog_large, readiness_large; /* the log says so */
} front;

/* From here on the message of a plane is told in the log: stock clients take 4 MiB. */
#define FRONT_LARGE_BYTES ((size_t)3 << 20)

/* Services without listeners; health is NOT_SERVING.  `relay` and `base` must outlive the front.
 * 0, or an exit code. */
int front_open(front *f, kvrelay_relay *relay, struct event_base *base);
/* Before front_listen, which then takes TLS only; probes stay plaintext (they show no certificate).
 * What `cfg` points to must outlive the front.  0, or an exit code after a log line. */
int front_secure(front *f, const kvrelay_tls_config *cfg);
/* Reads the files of front_secure again, for handshakes from now on.  Files that cannot be used are
 * logged and change nothing. */
void front_reload(front *f);
/* Listens for everybody, over gRPC and over raw frames: with one listener for both if the two
 * texts are the same.  NULL: not over that.  0, or an exit code after a log line. */
int front_listen(front *f, const char *bind, const char *raw_bind);
/* Listens for probes alone: those see health and nothing else.  As front_listen. */
int front_listen_probes(front *f, const char *bind);
/* Health is SERVING. */
void front_ready(front *f);
/* Health is NOT_SERVING; listeners close, and connections within `grace_ns`. */
void front_stop(front *f, uint64_t grace_ns);
/* Logs a message that has become large; `*told` is false again once it has not. */
void front_tell_large(const char *plane, size_t bytes, bool *told);
/* One turn of the loop, at most a second.  KVRELAY_TRANSPORT_CLOSED: stopped, nothing is left;
 * other errors are the loop's. */
int front_turn(front *f);
/* Harmless for a front of zeros. */
void front_close(front *f);

#endif
