/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp_loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void on_wake(kvrelay_tcp_watch *watch, short events) {
  uint8_t bytes[64];
  (void)events;
  while (read(watch->fd, bytes, sizeof bytes) == (ssize_t)sizeof bytes)
    continue;
}

void kvrelay_tcp_loop_wake(kvrelay_tcp_loop *loop) {
  const int saved = errno;
  if (write(loop->wake_write_, "", 1) < 0)
    errno = saved; /* the pipe is full: it is awake */
  errno = saved;
}

static int wait_ms(uint64_t timeout_ns) {
  const uint64_t ms = timeout_ns / 1000000 + (timeout_ns % 1000000 != 0);
  return timeout_ns == KVRELAY_TIME_NONE ? -1 : ms > 86400000 ? 86400000 : (int)ms;
}

#if KVRELAY_TCP_EPOLL

static bool system_open(kvrelay_tcp_loop *loop) {
  loop->epoll_ = epoll_create1(EPOLL_CLOEXEC);
  return loop->epoll_ >= 0;
}

static void system_close(kvrelay_tcp_loop *loop) {
  if (loop->epoll_ >= 0)
    close(loop->epoll_);
  loop->epoll_ = -1;
}

static int control(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch, int what) {
  struct epoll_event event = {.events = (watch->wants & POLLIN ? EPOLLIN : 0u) |
                                        (watch->wants & POLLOUT ? EPOLLOUT : 0u),
                              .data = {.ptr = watch}};
  return epoll_ctl(loop->epoll_, what, watch->fd, &event);
}

int kvrelay_tcp_loop_watch(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch) {
  return control(loop, watch, EPOLL_CTL_ADD) == 0 ? KVRELAY_TRANSPORT_OK
                                                  : KVRELAY_TRANSPORT_ERR_SYSTEM;
}

void kvrelay_tcp_loop_want(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch, short wants) {
  if (watch->wants == wants)
    return;
  watch->wants = wants;
  (void)control(loop, watch, EPOLL_CTL_MOD); /* of one that is there: takes no memory */
}

void kvrelay_tcp_loop_unwatch(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch) {
  (void)control(loop, watch, EPOLL_CTL_DEL);
  for (int i = 0; i < loop->ready_len_; i++)
    if (loop->ready_[i].data.ptr == watch)
      loop->ready_[i].data.ptr = NULL;
}

int kvrelay_tcp_loop_wait(kvrelay_tcp_loop *loop, uint64_t timeout_ns, uint64_t *now_ns) {
  const int n = epoll_wait(loop->epoll_, loop->ready_, KVRELAY_TCP_EVENTS, wait_ms(timeout_ns));
  *now_ns = kvrelay_now_ns();
  if (n < 0)
    return errno == EINTR ? 1 : KVRELAY_TRANSPORT_ERR_SYSTEM;
  loop->ready_len_ = n;
  for (int i = 0; i < n; i++) {
    kvrelay_tcp_watch *watch = loop->ready_[i].data.ptr;
    const uint32_t e = loop->ready_[i].events;
    /* Errors and hang-ups show when reading, or writing, is tried. */
    if (watch != NULL)
      watch->ready(watch, (short)((e & (uint32_t)~EPOLLOUT ? POLLIN : 0) |
                                  (e & (EPOLLOUT | EPOLLERR | EPOLLHUP) ? POLLOUT : 0)));
  }
  loop->ready_len_ = 0;
  return n;
}

int kvrelay_tcp_loop_fd(const kvrelay_tcp_loop *loop) { return loop->epoll_; }

#else

static bool system_open(kvrelay_tcp_loop *loop) {
  (void)loop;
  return true;
}

static void system_close(kvrelay_tcp_loop *loop) {
  free(loop->watches_);
  free(loop->fds_);
}

int kvrelay_tcp_loop_watch(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch) {
  if (loop->len_ == loop->cap_) {
    const size_t cap = loop->cap_ ? 2 * loop->cap_ : 16;
    kvrelay_tcp_watch **watches = realloc(loop->watches_, cap * sizeof(kvrelay_tcp_watch *));
    if (watches == NULL)
      return KVRELAY_TRANSPORT_ERR_MEMORY;
    loop->watches_ = watches;
    struct pollfd *fds = realloc(loop->fds_, cap * sizeof *fds);
    if (fds == NULL)
      return KVRELAY_TRANSPORT_ERR_MEMORY;
    loop->fds_ = fds;
    loop->cap_ = cap;
  }
  watch->place_ = loop->len_++;
  loop->watches_[watch->place_] = watch;
  loop->fds_[watch->place_] = (struct pollfd){.fd = watch->fd, .events = watch->wants};
  return KVRELAY_TRANSPORT_OK;
}

void kvrelay_tcp_loop_want(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch, short wants) {
  watch->wants = wants;
  loop->fds_[watch->place_].events = wants;
}

void kvrelay_tcp_loop_unwatch(kvrelay_tcp_loop *loop, kvrelay_tcp_watch *watch) {
  const size_t last = --loop->len_, place = watch->place_;
  loop->watches_[place] = loop->watches_[last];
  loop->fds_[place] = loop->fds_[last];
  loop->watches_[place]->place_ = place;
}

int kvrelay_tcp_loop_wait(kvrelay_tcp_loop *loop, uint64_t timeout_ns, uint64_t *now_ns) {
  int n = poll(loop->fds_, (nfds_t)loop->len_, wait_ms(timeout_ns));
  *now_ns = kvrelay_now_ns();
  if (n < 0)
    return errno == EINTR ? 1 : KVRELAY_TRANSPORT_ERR_SYSTEM;
  const int all = n;
  /* From the end: what an unwatch moves has had its turn. */
  for (size_t i = loop->len_; n > 0 && i-- > 0;) {
    if (i >= loop->len_ || loop->fds_[i].revents == 0)
      continue;
    const short e = loop->fds_[i].revents;
    kvrelay_tcp_watch *watch = loop->watches_[i];
    loop->fds_[i].revents = 0;
    n--;
    watch->ready(watch, (short)((e & ~POLLOUT ? POLLIN : 0) | (e & ~POLLIN ? POLLOUT : 0)));
  }
  return all;
}

int kvrelay_tcp_loop_fd(const kvrelay_tcp_loop *loop) {
  (void)loop;
  return -1;
}

#endif

int kvrelay_tcp_loop_open(kvrelay_tcp_loop *loop) {
  int ends[2];
  memset(loop, 0, sizeof *loop);
  if (!system_open(loop))
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  if (pipe(ends) != 0) {
    system_close(loop);
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  }
  for (int i = 0; i < 2; i++) {
    (void)fcntl(ends[i], F_SETFD, FD_CLOEXEC);
    (void)fcntl(ends[i], F_SETFL, O_NONBLOCK);
  }
  loop->wake_write_ = ends[1];
  loop->wake_ = (kvrelay_tcp_watch){.fd = ends[0], .wants = POLLIN, .ready = on_wake};
  const int err = kvrelay_tcp_loop_watch(loop, &loop->wake_);
  if (err != KVRELAY_TRANSPORT_OK)
    kvrelay_tcp_loop_close(loop);
  return err;
}

void kvrelay_tcp_loop_close(kvrelay_tcp_loop *loop) {
  close(loop->wake_.fd);
  close(loop->wake_write_);
  system_close(loop);
}
