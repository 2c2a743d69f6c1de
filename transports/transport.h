/* SPDX-License-Identifier: Apache-2.0 */
/* transport.h - what every carrier of the contract offers, and what it asks of the program behind
 * it. */

/*
 * Three parties meet here.  A *transport* (grpc/, tcp/, mem/) owns sockets, timers and
 * memory.  A *service* is what a server transport asks about each call; service.h binds a
 * kvrelay_relay to it.  A *caller* is what a client transport reports to; client.h binds a
 * kvrelay_consumer to it.  All of it runs in one thread: the one that runs the loop.
 *
 * The numbered contract:
 *  1. A transport never looks into a message.  Messages are whole: it frames, splits and joins
 * them.
 *  2. Bytes handed over by `pull` are valid until the transport calls the service again or returns
 * to its loop, whichever is first: it copies them at once.  Only the last `kept_len` parts may stay
 * where they are until that call is pulled again, closed or woken; when it is woken the transport
 * copies, before it returns, what it has not sent.  Bytes handed to `message` are valid during that
 * call.
 *  3. A transport pulls a call only while it can take one more message: when the message before has
 * left its own queue for that call and its unsent output is below its bound.  Back-pressure is
 * nothing but not pulling.
 *  4. `pull` answers NONE, MESSAGE or END, and may be called from `open` on.  After NONE the
 * transport waits until the service calls `wake` for that call.  After END it sends the status and
 * calls `close`.  Zero never means "end" and never means "error".
 *  5. `close` is called exactly once for every call that `open` accepted, whatever ended it, and
 * nothing is called for it afterwards.
 *  6. A refused `open` has no `close`.
 *  7. `now_ns` is the transport's monotonic clock; one clock for all transports of a loop.
 *  8. run_once waits at most `timeout_ns`, which may be rounded up to milliseconds, and returns 1
 * when something happened, 0 on time-out, negative on error.
 *  9. wake may be called from any thread or signal handler: run_once returns soon.  Everything else
 * belongs to the loop's thread.
 * 10. After `stop` the transport takes no new calls and ends when the last one is gone or the grace
 * time is over; then run_once returns KVRELAY_TRANSPORT_CLOSED.
 */
#ifndef KVRELAY_TRANSPORT_H
#define KVRELAY_TRANSPORT_H

#include "kvrelay.h"

enum kvrelay_transport_err {
  KVRELAY_TRANSPORT_OK = 0,
  KVRELAY_TRANSPORT_ERR_ARG = -401,
  KVRELAY_TRANSPORT_ERR_MEMORY = -402,
  KVRELAY_TRANSPORT_ERR_ADDRESS = -403,  /* does not parse or resolve */
  KVRELAY_TRANSPORT_ERR_BIND = -404,     /* cannot be bound; errno says why */
  KVRELAY_TRANSPORT_ERR_CONNECT = -405,  /* nobody there */
  KVRELAY_TRANSPORT_ERR_PROTOCOL = -406, /* the peer speaks something else */
  KVRELAY_TRANSPORT_ERR_LIMIT = -407,    /* a configured bound was reached */
  KVRELAY_TRANSPORT_ERR_SYSTEM = -408,   /* the system refused something; errno says what */
  KVRELAY_TRANSPORT_CLOSED = -409,       /* stopped, nothing left to run */
  KVRELAY_TRANSPORT_ERR_SECURITY = -410  /* one side does not trust the other, see secure.h */
};
const char *kvrelay_transport_strerror(int err);

#define KVRELAY_SECOND_NS UINT64_C(1000000000)

/* The monotonic clock that all transports on sockets go by. */
uint64_t kvrelay_now_ns(void);
/* When a delay that begins now is over; KVRELAY_TIME_NONE, never, where that is beyond all time. */
static inline uint64_t kvrelay_later_ns(uint64_t now_ns, uint64_t delay_ns) {
  return delay_ns > KVRELAY_TIME_NONE - now_ns ? KVRELAY_TIME_NONE : now_ns + delay_ns;
}
static inline uint64_t kvrelay_earlier_ns(uint64_t a_ns, uint64_t b_ns) {
  return a_ns < b_ns ? a_ns : b_ns;
}

/* Servers on sockets give no longer grace than this: whoever stops them waits below 5 s. */
#define KVRELAY_GRACE_MAX_NS (4 * KVRELAY_SECOND_NS)

typedef struct kvrelay_transport kvrelay_transport;
struct kvrelay_transport {
  int (*run_once)(kvrelay_transport *t, uint64_t timeout_ns);
  void (*wake)(kvrelay_transport *t);
  void (*stop)(kvrelay_transport *t, uint64_t grace_ns); /* rule 10 */
  void (*close)(kvrelay_transport *t); /* frees everything; open calls are closed first */
  uint64_t (*now_ns)(const kvrelay_transport *t);
};

/* ---- server side ---- */

/* A call as the transport knows it; embedded at the start of the transport's own struct. */
typedef struct kvrelay_call kvrelay_call;
struct kvrelay_call {
  void (*wake)(kvrelay_call *call); /* set by the transport: this call has something to pull */
  bool keeps; /* set by the transport: it sends parts from where they are, rule 2 */
  /* Set by the transport: the client takes no longer messages; 0: not known.  Where the service can
   * choose, it makes them fit. */
  size_t max_message_bytes;
};

#define KVRELAY_PARTS_CAP 3

/* One message to send: the concatenation of its parts. */
typedef struct kvrelay_parts {
  kvrelay_iov part[KVRELAY_PARTS_CAP]; /* lent, see rule 2 */
  size_t part_len;
  size_t bytes;    /* sum */
  size_t kept_len; /* of the last ones; 0 unless the call `keeps` */
} kvrelay_parts;

/* Fills in a status without a reason, which belongs to the contract's own errors.  Returns
 * KVRELAY_ERR_REFUSED. */
int kvrelay_refuse(kvrelay_status *status, int32_t grpc, const char *text);

/* A service; `self` is its first argument everywhere. */
typedef struct kvrelay_service kvrelay_service;
struct kvrelay_service {
  /*
   * A call arrived.  `path` is ":path", not terminated.  KVRELAY_OK: `*handle` is the service's
   * name for it.  KVRELAY_ERR_REFUSED: `status` is sent as a trailers-only answer (UNIMPLEMENTED
   * for a path it does not know).
   */
  int (*open)(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
              uint64_t now_ns, void **handle, kvrelay_status *status);
  /* One whole request message.  KVRELAY_OK, or KVRELAY_ERR_REFUSED with a status that ends the
   * call. */
  int (*message)(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                 uint64_t now_ns, kvrelay_status *status);
  /* The client sent its last message.  As `message`. */
  int (*half_close)(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_status *status);
  /* True once response headers may go out although no message is there yet. */
  bool (*admitted)(kvrelay_service *self, void *handle);
  /* enum kvrelay_pull; with END `status` is filled. */
  int (*pull)(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
              kvrelay_status *status);
  void (*close)(kvrelay_service *self, void *handle, uint64_t now_ns);
};

/* ---- client side ---- */

enum kvrelay_connection_state {
  KVRELAY_CONNECTION_CONNECTING = 1,
  KVRELAY_CONNECTION_READY,
  KVRELAY_CONNECTION_FAILED, /* `err`, `text`; next attempt at `retry_ns` (KVRELAY_TIME_NONE: none)
                              */
  KVRELAY_CONNECTION_CLOSED
};

/* What a client transport reports; `self` is its first argument everywhere.  Call numbers are
 * chosen by the caller, not 0. */
typedef struct kvrelay_caller kvrelay_caller;
struct kvrelay_caller {
  void (*connection)(kvrelay_caller *self, int state, int err, const char *text, uint64_t retry_ns,
                     uint64_t now_ns);
  void (*admitted)(kvrelay_caller *self, uint32_t call,
                   uint64_t now_ns); /* response headers arrived */
  /* One whole message; valid during the call. */
  void (*message)(kvrelay_caller *self, uint32_t call, const uint8_t *bytes, size_t len,
                  uint64_t now_ns);
  /* The call is over; never follows a cancel.  A broken connection ends every open call with
   * UNAVAILABLE before `connection` is told. */
  void (*end)(kvrelay_caller *self, uint32_t call, const kvrelay_status *status, uint64_t now_ns);
};

/* A client transport: a transport that can also call. */
typedef struct kvrelay_client_transport kvrelay_client_transport;
struct kvrelay_client_transport {
  kvrelay_transport base;
  /* Sends one request message, which is copied, and half-closes.  KVRELAY_TRANSPORT_OK, or, with
   * nothing sent, _ERR_ARG (number 0 or in use), _ERR_CONNECT (not ready: wait for the connection),
   * _ERR_LIMIT (too many calls are open: wait for an end; or the request is too long), _ERR_MEMORY.
   */
  int (*call)(kvrelay_client_transport *t, uint32_t call, const char *path, const uint8_t *request,
              size_t len);
  void (*cancel)(kvrelay_client_transport *t, uint32_t call); /* unknown numbers are ignored */
  /* Closes the connection and opens a new one (after the backoff). */
  void (*reconnect)(kvrelay_client_transport *t);
  /* Of the last connection that was told READY: when the server's certificate ends, in unix
   * seconds; 0: it showed none.  Only read. */
  int64_t peer_not_after;
};

#endif /* KVRELAY_TRANSPORT_H */
