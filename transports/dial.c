/* SPDX-License-Identifier: Apache-2.0 */
#include "dial.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Head start of an address before the next one is tried as well. */
#define HEAD_START_NS UINT64_C(250000000)

/* ---- targets ---- */

static bool cut_prefix(const char **text, const char *prefix) {
  size_t n = strlen(prefix);
  if (strncmp(*text, prefix, n) != 0)
    return false;
  *text += n;
  return true;
}

/* Comma-separated numeric addresses. */
static int parse_fixed(const char *text, kvrelay_dial_target *out) {
  out->fixed = true;
  while (out->address_count < KVRELAY_DIAL_MAX) {
    char one[KVRELAY_ADDRESS_CAP];
    size_t len = strcspn(text, ",");
    if (len >= sizeof one)
      return KVRELAY_TRANSPORT_ERR_ADDRESS;
    memcpy(one, text, len);
    one[len] = '\0';
    if (kvrelay_address_split(one, out->host, sizeof out->host, out->port, sizeof out->port) !=
            KVRELAY_TRANSPORT_OK ||
        kvrelay_address_resolve(out->host, out->port, true, &out->address[out->address_count], 1) !=
            1)
      return KVRELAY_TRANSPORT_ERR_ADDRESS;
    if (out->address_count++ == 0)
      snprintf(out->authority, sizeof out->authority, "%s", one);
    if (text[len] == '\0')
      return KVRELAY_TRANSPORT_OK;
    text += len + 1;
  }
  return KVRELAY_TRANSPORT_ERR_ADDRESS;
}

int kvrelay_dial_target_parse(const char *text, kvrelay_dial_target *out) {
  memset(out, 0, sizeof *out);
  const int local = kvrelay_address_unix(text, &out->address[0]);
  if (local != 0) {
    out->address_count = 1;
    snprintf(out->authority, sizeof out->authority, "localhost");
    return local < 0 ? local : KVRELAY_TRANSPORT_OK;
  }
  if (cut_prefix(&text, "ipv4:") || cut_prefix(&text, "ipv6:"))
    return parse_fixed(text, out);
  if (!cut_prefix(&text, "dns:///"))
    (void)cut_prefix(&text, "dns:");
  if (kvrelay_address_split(text, out->host, sizeof out->host, out->port, sizeof out->port) !=
      KVRELAY_TRANSPORT_OK)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  snprintf(out->authority, sizeof out->authority, "%s", text);
  if (kvrelay_address_resolve(out->host, out->port, true, &out->address[0], 1) == 1)
    out->address_count = 1;
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_dial_target_proxy(kvrelay_dial_target *t, const char *proxy, const char *no_proxy) {
  const bool named = t->host[0] != '\0' && !t->fixed;
  if (proxy == NULL || *proxy == '\0' || !named || kvrelay_proxy_spared(no_proxy, t->host, t->port))
    return KVRELAY_TRANSPORT_OK;
  t->address_count = 0;
  return kvrelay_proxy_parse(proxy, &t->proxy);
}

int kvrelay_dial_target_name(const kvrelay_dial_target *t, const char *given,
                             char out[KVRELAY_DIAL_NAME_CAP]) {
  if (given == NULL && (t->host[0] == '\0' || t->address_count > 1))
    return KVRELAY_TRANSPORT_ERR_ARG;
  if (given != NULL && (given[0] == '\0' || strlen(given) >= KVRELAY_DIAL_NAME_CAP))
    return KVRELAY_TRANSPORT_ERR_ARG;
  snprintf(out, KVRELAY_DIAL_NAME_CAP, "%s", given != NULL ? given : t->host);
  return KVRELAY_TRANSPORT_OK;
}

/* ---- the thread ---- */

/* What it tells; the socket goes along as a descriptor, so that one nobody takes is closed. */
typedef struct answer {
  int err; /* enum kvrelay_transport_err */
  int error_number;
  int proxy; /* as kvrelay_proxy_connect */
} answer;

typedef struct dialler {
  int fd; /* the thread's end */
  kvrelay_dial_target target;
  int started, open, error_number;
  struct pollfd attempt[1 + KVRELAY_DIAL_MAX]; /* behind `fd`, which hangs up when called off */
} dialler;

/* The families take turns, starting with the one the system prefers. */
static void interleave(kvrelay_address *list, int count) {
  for (int at = 1; at < count; at++)
    for (int i = at; i < count && list[at].storage.ss_family == list[at - 1].storage.ss_family; i++)
      if (list[i].storage.ss_family != list[at - 1].storage.ss_family) {
        kvrelay_address moved = list[i];
        memmove(&list[at + 1], &list[at], (size_t)(i - at) * sizeof *list);
        list[at] = moved;
      }
}

/* Begins with the next address; false when that failed at once. */
static bool attempt_start(dialler *d) {
  const kvrelay_address *address = &d->target.address[d->started];
  struct pollfd *a = &d->attempt[++d->started];
  const int one = 1;
  a->events = POLLOUT;
  a->fd = socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (a->fd >= 0) {
    if (address->storage.ss_family != AF_UNIX)
      (void)setsockopt(a->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(a->fd, (const struct sockaddr *)&address->storage, address->len) == 0 ||
        errno == EINPROGRESS) {
      d->open++;
      return true;
    }
  }
  d->error_number = errno;
  if (a->fd >= 0)
    close(a->fd);
  a->fd = -1;
  return false;
}

/* The first attempt that has succeeded, -1: none yet.  Those that failed are closed. */
static int attempt_won(dialler *d) {
  for (int i = 1; i <= d->started; i++) {
    struct pollfd *a = &d->attempt[i];
    int error = 0;
    socklen_t len = sizeof error;
    if (a->fd < 0 || a->revents == 0)
      continue;
    if (getsockopt(a->fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0)
      error = errno;
    if (error == 0)
      return i;
    d->error_number = error;
    d->open--;
    close(a->fd);
    a->fd = -1;
  }
  return -1;
}

/* A connected socket, or -1: nobody answered, or the dial was called off. */
static int race(dialler *d) {
  uint64_t next_ns = 0;
  d->attempt[0] = (struct pollfd){.fd = d->fd};
  for (;;) {
    const int before = d->open;
    const uint64_t now_ns = kvrelay_now_ns();
    while (d->started < d->target.address_count && (now_ns >= next_ns || d->open == 0) &&
           d->open == before)
      if (attempt_start(d))
        next_ns = now_ns + HEAD_START_NS;
    if (d->open == 0)
      return -1;
    const bool more = d->started < d->target.address_count;
    const int wait_ms = more ? (int)((next_ns - now_ns) / 1000000 + 1) : -1;
    if (poll(d->attempt, (nfds_t)d->started + 1, wait_ms) < 0 && errno != EINTR)
      return -1;
    if (d->attempt[0].revents != 0)
      return -1;
    const int open = d->open, won = attempt_won(d);
    if (won > 0) {
      const int fd = d->attempt[won].fd;
      d->attempt[won].fd = -1;
      return fd;
    }
    if (d->open < open)
      next_ns = 0; /* one has failed: the next need not wait */
  }
}

static void tell(const dialler *d, answer a, int fd) {
  struct iovec bytes = {&a, sizeof a};
  union {
    struct cmsghdr head;
    uint8_t room[CMSG_SPACE(sizeof(int))];
  } control;
  struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
  if (fd >= 0) {
    memset(&control, 0, sizeof control);
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
  }
  (void)sendmsg(d->fd, &message, MSG_NOSIGNAL); /* to nobody when the dial was called off */
}

static void *dial_in_thread(void *dialler_) {
  dialler *d = dialler_;
  kvrelay_dial_target *t = &d->target;
  const bool proxied = t->proxy.host[0] != '\0';
  answer a = {KVRELAY_TRANSPORT_OK, 0, 0};
  if (t->address_count == 0) {
    const int found = kvrelay_address_resolve(proxied ? t->proxy.host : t->host,
                                              proxied ? t->proxy.port : t->port, false, t->address,
                                              KVRELAY_DIAL_MAX);
    t->address_count = found > 0 ? found : 0;
    interleave(t->address, t->address_count);
  }
  const int fd = t->address_count > 0 ? race(d) : -1;
  for (int i = 1; i <= d->started; i++)
    if (d->attempt[i].fd >= 0)
      close(d->attempt[i].fd);
  if (fd >= 0 && proxied)
    a.proxy = kvrelay_proxy_connect(&t->proxy, fd, d->fd, t->host, t->port);
  a.error_number = a.proxy < 0 ? -a.proxy : d->error_number;
  if (t->address_count == 0)
    a.err = KVRELAY_TRANSPORT_ERR_ADDRESS;
  else if (fd < 0 || a.proxy != 0)
    a.err = KVRELAY_TRANSPORT_ERR_CONNECT;
  tell(d, a, a.err == KVRELAY_TRANSPORT_OK ? fd : -1);
  if (fd >= 0)
    close(fd);
  close(d->fd);
  free(d);
  return NULL;
}

/* The program's signals are none of the thread's business. */
static int start_thread(dialler *d) {
  pthread_t thread;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread, NULL, dial_in_thread, d);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0)
    pthread_detach(thread);
  return error;
}

int kvrelay_dial_start(const kvrelay_dial_target *target) {
  int ends[2];
  dialler *d = calloc(1, sizeof *d);
  if (d == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  d->target = *target;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    const int error = errno;
    free(d);
    errno = error;
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  }
  d->fd = ends[1];
  const int error = start_thread(d);
  if (error == 0)
    return ends[0];
  close(ends[0]);
  close(ends[1]);
  free(d);
  errno = error;
  return KVRELAY_TRANSPORT_ERR_SYSTEM;
}

int kvrelay_dial_result(int dial, char *text, size_t cap) {
  answer a = {KVRELAY_TRANSPORT_ERR_CONNECT, 0, 0};
  int fd = -1;
  struct iovec bytes = {&a, sizeof a};
  union {
    struct cmsghdr head;
    uint8_t room[CMSG_SPACE(sizeof(int))];
  } control;
  struct msghdr message = {.msg_iov = &bytes,
                           .msg_iovlen = 1,
                           .msg_control = &control,
                           .msg_controllen = sizeof control};
  const ssize_t n = recvmsg(dial, &message, MSG_CMSG_CLOEXEC);
  const struct cmsghdr *head = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
  if (head != NULL && head->cmsg_type == SCM_RIGHTS)
    memcpy(&fd, CMSG_DATA(head), sizeof fd);
  close(dial);
  if (fd >= 0)
    return fd;
  if (a.err == KVRELAY_TRANSPORT_ERR_ADDRESS)
    snprintf(text, cap, "the name does not resolve");
  else if (a.proxy == 1)
    snprintf(text, cap, "the proxy does not speak HTTP");
  else if (a.proxy > 1)
    snprintf(text, cap, "the proxy refuses with HTTP status %d", a.proxy);
  else
    snprintf(text, cap, "%s%s", a.proxy < 0 ? "proxy: " : "",
             strerror(a.error_number != 0 ? a.error_number : EIO));
  return a.err == KVRELAY_TRANSPORT_ERR_ADDRESS ? a.err : KVRELAY_TRANSPORT_ERR_CONNECT;
}
