/* SPDX-License-Identifier: Apache-2.0 */
/* secure.h - how a transport carries its bytes over a secured socket, without knowing what secures
 * them. */

/*
 * A *security* is configuration: one side, its certificate, whom it trusts.  It makes one *session*
 * per connected socket.  tls/ implements both with OpenSSL; a transport only includes this header.
 *
 *   session = security->session(security, &(kvrelay_secure_config){fd, "h2", true, NULL});
 *   handshake, again whenever the socket is ready for what the session waits for, until OK
 *   then read and write, in any order
 *   shutdown, again while wants_write, then close the session, and last the socket
 *
 * The numbered contract:
 *  1. The socket does not block, and it stays the transport's: nobody else reads or writes it while
 * the session lives, and the transport closes it after the session.  No call blocks; none raises
 * SIGPIPE.
 *  2. A session always waits for the socket to become readable, and for it to become writable while
 * `wants_write` says so: it holds bytes then that the socket did not take.  When the socket is
 * writable, `handshake` before the handshake is done, `write` afterwards and `shutdown` once that
 * was called send them.
 *  3. What `write` takes is taken: it need not be offered again, and the next call may offer
 * anything.
 *  4. After a handshake is done and after `read` returned a positive number there may be more that
 * no readable socket announces: read until it returns 0, or come back without waiting while
 * `pending` says so.
 *  5. After a negative number the session is over: only `text` and `close` are left.  KVRELAY_
 * SECURE_CLOSED is the exception: writing still works.
 *  6. Memory and work for a peer's bytes are bounded, before the handshake is done above all.  Time
 * is not: a transport gives a handshake its limit.
 *  7. One thread at a time uses a security and all of its sessions.
 */
#ifndef KVRELAY_SECURE_H
#define KVRELAY_SECURE_H

#include "transport.h"

enum kvrelay_secure_err {
  KVRELAY_SECURE_AGAIN = 0,     /* nothing now */
  KVRELAY_SECURE_OK = 1,        /* done */
  KVRELAY_SECURE_CLOSED = -421, /* the peer said that it sends nothing more (TLS: close_notify) */
  KVRELAY_SECURE_CUT = -422,    /* the connection ended without that word: somebody may have cut
                                   off the end of what was sent */
  KVRELAY_SECURE_FAILED = -423  /* not to be trusted, not understood, or no memory */
};

/* What a session is made for; only read during that call. */
typedef struct kvrelay_secure_config {
  int fd;                 /* connected, non-blocking */
  const char *protocols;  /* what the transport speaks (ALPN), best first: "h2", "h2,kvrelay-raw/1";
                             each 1 .. 31 bytes, 255 in all */
  bool protocol_required; /* a peer that names no protocol is refused.  One that names others only
                             always is. */
  const char *peer_name;  /* client: whom it means to reach, a host name or an IP address as text;
                             the server's certificate has to say so.  Server: NULL. */
} kvrelay_secure_config;

typedef struct kvrelay_secure_session kvrelay_secure_session;
struct kvrelay_secure_session {
  /* Goes on with the handshake.  _OK: done; `protocol`, `peer` and `peer_not_after` are known now
   * and stay.  _AGAIN: wait for the socket.  _CUT, _FAILED: `text` says why. */
  int (*handshake)(kvrelay_secure_session *s);
  /*
   * Reads up to `cap` bytes, at least 1.  Their number; _AGAIN; _CLOSED; _CUT; _FAILED.  It may
   * have something to send then: see wants_write.
   */
  ptrdiff_t (*read)(kvrelay_secure_session *s, uint8_t *out, size_t cap);
  /*
   * Takes bytes of the pieces, in order, and sends what the socket takes; without pieces it sends
   * what is held.  Small pieces share a record.  Returns how many bytes it took, perhaps not all
   * and 0 while something is held; _CUT; _FAILED.
   */
  ptrdiff_t (*write)(kvrelay_secure_session *s, const kvrelay_iov *pieces, size_t len);
  /* Says that nothing more is sent, after what is held.  _OK: all of it is out; _AGAIN: when the
   * socket is writable, again; _CUT, _FAILED: it cannot be said any more. */
  int (*shutdown)(kvrelay_secure_session *s);
  /* Frees the session, in any state; sends nothing. */
  void (*close)(kvrelay_secure_session *s);

  /* Only read by the transport, as the last call left them. */
  bool wants_write;
  bool pending;
  char protocol[32];      /* agreed on; "": the peer named none */
  char peer[256];         /* what the peer's certificate calls it, printable; "": it has none */
  int64_t peer_not_after; /* end of that certificate in unix seconds; 0: it has none */
  char text[256];         /* why it failed, in plain words, printable */
};

/* What the raw transport is called in `protocols`. */
#define KVRELAY_SECURE_RAW "kvrelay-raw/1"

typedef struct kvrelay_security kvrelay_security;
struct kvrelay_security {
  /* NULL: no memory, or the configuration breaks its promise. */
  kvrelay_secure_session *(*session)(kvrelay_security *self, const kvrelay_secure_config *cfg);
};

#endif
