/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_loop.h - waits for sockets and times, with nothing but what the system has. */
#ifndef KVRELAY_TCP_LOOP_H
#define KVRELAY_TCP_LOOP_H

#include <poll.h>

#include "../transport.h"

#if defined(__linux__) && !defined(KVRELAY_TCP_POLL)
#define KVRELAY_TCP_EPOLL 1 /* a thousand idle connections cost nothing */
#include <sys/epoll.h>
#else
#define KVRELAY_TCP_EPOLL 0 /* poll, which every POSIX system has */
#endif

#define KVRELAY_TCP_EVENTS 64 /* taken from the system at a time */

/* A descriptor that is looked after. */
typedef struct kvrelay_tcp_watch kvrelay_tcp_watch;
struct kvrelay_tcp_watch {
  int fd; /* -1: nothing is watched */
  short wants;
  void (*ready)(kvrelay_tcp_watch *watch, short events); /* POLLIN, POLLOUT; may unwatch any */
  size_t place_;
};

/* Fields are private. */
typedef struct kvrelay_tcp_loop {
  kvrelay_tcp_watch wake_;
  int wake_write_;
#if KVRELAY_TCP_EPOLL
  int epoll_;
  struct epoll_event ready_[KVRELAY_TCP_EVENTS];
  int ready_len_;
#else
  kvrelay_tcp_watch **watches_;
  struct pollfd *fds_;
  size_t len_, cap_;
#endif
} kvrelay_tcp_loop;

/* KVRELAY_TRANSPORT_OK, or _ERR_SYSTEM (errno), _ERR_MEMORY; then nothing is open. */
int kvrelay_tcp_loop_open(kvrelay_tcp_loop *loop);
void kvrelay_tcp_loop_close(kvrelay_tcp_loop *loop);
/* Begins to watch `watch->fd` for `watch->wants`; the watch stays where it is until unwatch.
 * KVRELAY_TRANSPORT_OK, or _ERR_SYSTEM, _ERR_MEMORY: it is not watched. */
int kvrelay_tcp_loop_watch(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch);
void kvrelay_tcp_loop_want(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch, short wants);
/* Before the descriptor is closed. */
void kvrelay_tcp_loop_unwatch(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch);
/* Waits, at most `timeout_ns` rounded up to milliseconds, sets the clock, and calls what is ready:
 * the number of calls, or KVRELAY_TRANSPORT_ERR_SYSTEM (errno). */
int kvrelay_tcp_loop_wait(kvrelay_tcp_loop *loop, uint64_t timeout_ns, uint64_t *now_ns);
/* From any thread or signal handler: the wait that runs, or the next one, ends at once. */
void kvrelay_tcp_loop_wake(kvrelay_tcp_loop *loop);
/* A descriptor that is readable while something watched is ready; -1: this system has none. */
int kvrelay_tcp_loop_fd(const kvrelay_tcp_loop *loop);

#endif
