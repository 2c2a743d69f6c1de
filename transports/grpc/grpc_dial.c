/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_dial.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Head start of an address before the next one is tried as well (RFC 8305). */
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
static int parse_fixed(const char *text, kvrelay_grpc_target *out) {
  while (out->address_count < KVRELAY_GRPC_DIAL_MAX) {
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

int kvrelay_grpc_target_parse(const char *text, kvrelay_grpc_target *out) {
  memset(out, 0, sizeof *out);
  out->kind = KVRELAY_GRPC_TARGET_FIXED;
  if (cut_prefix(&text, "unix:")) {
    (void)cut_prefix(&text, "//"); /* "unix:///path" */
    out->address_count = 1;
    snprintf(out->authority, sizeof out->authority, "localhost");
    return kvrelay_address_unix(text, &out->address[0]);
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
  else
    out->kind = KVRELAY_GRPC_TARGET_NAME;
  return KVRELAY_TRANSPORT_OK;
}

/* ---- names: a thread asks, because the name service blocks; its answer is one datagram ---- */

typedef struct resolver {
  int fd; /* the thread's end */
  char host[256], port[8];
} resolver;

static void *resolve_in_thread(void *job_) {
  resolver *job = job_;
  kvrelay_address found[KVRELAY_GRPC_DIAL_MAX];
  int count = kvrelay_address_resolve(job->host, job->port, false, found, KVRELAY_GRPC_DIAL_MAX);
  size_t bytes = count > 0 ? (size_t)count * sizeof found[0] : 1; /* one byte: nothing found */
  memset(found, 0, count > 0 ? 0 : 1);
  (void)send(job->fd, found, bytes,
             MSG_NOSIGNAL); /* nobody listens any more when the dial was cancelled */
  close(job->fd);
  free(job);
  return NULL;
}

static int resolver_start(const kvrelay_grpc_target *target) {
  int ends[2];
  pthread_t thread;
  resolver *job = malloc(sizeof *job);
  if (job == NULL || socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) != 0) {
    free(job);
    return -1;
  }
  memcpy(job->host, target->host, sizeof job->host);
  memcpy(job->port, target->port, sizeof job->port);
  job->fd = ends[1];
  if (evutil_make_socket_nonblocking(ends[0]) != 0 ||
      pthread_create(&thread, NULL, resolve_in_thread, job) != 0) {
    close(ends[0]);
    close(ends[1]);
    free(job);
    return -1;
  }
  pthread_detach(thread);
  return ends[0];
}

/* The families take turns, starting with the one the system prefers. */
static void interleave(kvrelay_address *list, int count) {
  for (int at = 1; at < count; at++)
    for (int i = at; list[at].storage.ss_family == list[at - 1].storage.ss_family && i < count; i++)
      if (list[i].storage.ss_family != list[at - 1].storage.ss_family) {
        kvrelay_address moved = list[i];
        memmove(&list[at + 1], &list[at], (size_t)(i - at) * sizeof *list);
        list[at] = moved;
      }
}

/* ---- attempts ---- */

static void attempt_close(kvrelay_grpc_attempt *a) {
  if (a->event != NULL)
    event_free(a->event);
  if (a->fd >= 0)
    close(a->fd);
  a->event = NULL;
  a->fd = -1;
}

void kvrelay_grpc_dial_cancel(kvrelay_grpc_dial *dial) {
  if (!dial->active)
    return;
  dial->active = false;
  for (int i = 0; i < dial->started; i++)
    attempt_close(&dial->attempt[i]);
  if (dial->answer != NULL)
    event_free(dial->answer);
  kvrelay_timer_close(&dial->next);
  if (dial->answer_fd >= 0)
    close(dial->answer_fd);
  dial->answer = NULL;
  dial->answer_fd = -1;
}

static void finish(kvrelay_grpc_dial *dial, int fd, int err, const char *text) {
  kvrelay_grpc_dial_cancel(dial);
  dial->done(dial->owner, fd, err, text);
}

static void on_connected(evutil_socket_t fd, short what, void *attempt);

static bool attempt_start(kvrelay_grpc_dial *dial) {
  const kvrelay_address *address = &dial->address[dial->started];
  kvrelay_grpc_attempt *a = &dial->attempt[dial->started++];
  int one = 1;
  a->dial = dial;
  a->event = NULL;
  a->fd = socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (a->fd >= 0) {
    if (address->storage.ss_family != AF_UNIX)
      (void)setsockopt(a->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    a->event = event_new(dial->base, a->fd, EV_WRITE, on_connected, a);
    if (a->event != NULL &&
        (connect(a->fd, (const struct sockaddr *)&address->storage, address->len) == 0 ||
         errno == EINPROGRESS) &&
        event_add(a->event, NULL) == 0) {
      dial->open++;
      return true;
    }
  }
  dial->last_errno = errno;
  attempt_close(a);
  return false;
}

/* Starts the next address; ends the dial when none is left and none is on its way. */
static void advance(kvrelay_grpc_dial *dial) {
  while (dial->started < dial->address_count)
    if (attempt_start(dial)) {
      if (dial->started < dial->address_count)
        kvrelay_timer_set(&dial->next, HEAD_START_NS);
      return;
    }
  if (dial->open == 0)
    finish(dial, -1, KVRELAY_TRANSPORT_ERR_CONNECT, strerror(dial->last_errno));
}

static void on_connected(evutil_socket_t fd, short what, void *attempt) {
  kvrelay_grpc_attempt *a = attempt;
  kvrelay_grpc_dial *dial = a->dial;
  int error = 0;
  socklen_t len = sizeof error;
  (void)what;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0)
    error = errno;
  if (error == 0) {
    a->fd = -1; /* handed over */
    finish(dial, fd, KVRELAY_TRANSPORT_OK, "");
    return;
  }
  dial->last_errno = error;
  dial->open--;
  attempt_close(a);
  advance(dial);
}

static void on_next(void *dial) { advance(dial); }

static void on_answer(evutil_socket_t fd, short what, void *dial_) {
  kvrelay_grpc_dial *dial = dial_;
  (void)what;
  ssize_t n = recv(fd, dial->address, sizeof dial->address, 0);
  event_del(dial->answer);
  dial->address_count = n > 0 ? (int)((size_t)n / sizeof dial->address[0]) : 0;
  if (dial->address_count == 0) {
    finish(dial, -1, KVRELAY_TRANSPORT_ERR_ADDRESS, "the name does not resolve");
    return;
  }
  interleave(dial->address, dial->address_count);
  advance(dial);
}

int kvrelay_grpc_dial_start(kvrelay_grpc_dial *dial, struct event_base *base,
                            const kvrelay_grpc_target *target,
                            void (*done)(void *owner, int fd, int err, const char *text),
                            void *owner) {
  memset(dial, 0, sizeof *dial);
  dial->base = base;
  dial->target = target;
  dial->done = done;
  dial->owner = owner;
  dial->active = true;
  dial->answer_fd = -1;
  if (kvrelay_timer_open(&dial->next, base, on_next, dial) != KVRELAY_TRANSPORT_OK)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  if (target->kind == KVRELAY_GRPC_TARGET_FIXED) {
    memcpy(dial->address, target->address, sizeof dial->address);
    dial->address_count = target->address_count;
    kvrelay_timer_set(&dial->next, 0);
    return KVRELAY_TRANSPORT_OK;
  }
  dial->answer_fd = resolver_start(target);
  if (dial->answer_fd < 0)
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  dial->answer = event_new(base, dial->answer_fd, EV_READ, on_answer, dial);
  return dial->answer != NULL && event_add(dial->answer, NULL) == 0 ? KVRELAY_TRANSPORT_OK
                                                                    : KVRELAY_TRANSPORT_ERR_MEMORY;
}
