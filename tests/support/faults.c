/* SPDX-License-Identifier: Apache-2.0 */
#include "faults.h"

#include <errno.h>

#include <event2/event.h>
#include <nghttp2/nghttp2.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Atomic: names are resolved by a thread of their own. */
static struct {
  atomic_bool armed, struck;
  unsigned spared; /* depth of calls into what must not fail */
  enum fault_kind kind;
  atomic_ulong done;        /* operations so far */
  unsigned long nth, count; /* the first of them that fails, and how many then */
  int error;
} faults;

static bool strikes(enum fault_kind kind) {
  if (!faults.armed || faults.spared > 0 || faults.kind != kind)
    return false;
  const unsigned long number = ++faults.done;
  if (number < faults.nth || number - faults.nth >= faults.count)
    return false;
  faults.struck = true;

  errno = kind == FAULT_MEMORY ? ENOMEM : faults.error;
  return true;
}

void faults_arm(enum fault_kind kind, unsigned long nth, unsigned long count, int error) {
  faults.struck = false;
  faults.kind = kind;
  faults.done = 0;
  faults.nth = nth;
  faults.count = count;
  faults.error = error;
  faults.armed = true;
}

bool faults_disarm(void) {
  faults.armed = false;
  return faults.struck;
}

/* ---- memory ---- */

/* The linker turns a call of NAME into one of __wrap_NAME, and __real_NAME into NAME. */
#define REAL(NAME) __real_##NAME
#define WRAP(NAME) __wrap_##NAME

void *REAL(malloc)(size_t size);
void *REAL(calloc)(size_t count, size_t size);
void *REAL(realloc)(void *old, size_t size);
void *WRAP(malloc)(size_t size);
void *WRAP(calloc)(size_t count, size_t size);
void *WRAP(realloc)(void *old, size_t size);

void *WRAP(malloc)(size_t size) { return strikes(FAULT_MEMORY) ? NULL : REAL(malloc)(size); }

void *WRAP(calloc)(size_t count, size_t size) {
  return strikes(FAULT_MEMORY) ? NULL : REAL(calloc)(count, size);
}

void *WRAP(realloc)(void *old, size_t size) {
  return strikes(FAULT_MEMORY) ? NULL : REAL(realloc)(old, size);
}

static void *h2_malloc(size_t size, void *context) {
  (void)context;
  return WRAP(malloc)(size);
}

static void h2_free(void *old, void *context) {
  (void)context;
  free(old);
}

static void *h2_calloc(size_t count, size_t size, void *context) {
  (void)context;
  return WRAP(calloc)(count, size);
}

static void *h2_realloc(void *old, size_t size, void *context) {
  (void)context;
  return WRAP(realloc)(old, size);
}

static nghttp2_mem memory = {NULL, h2_malloc, h2_free, h2_calloc, h2_realloc};

int WRAP(nghttp2_session_client_new2)(nghttp2_session **session,
                                      const nghttp2_session_callbacks *callbacks, void *user_data,
                                      const nghttp2_option *option);

int WRAP(nghttp2_session_client_new2)(nghttp2_session **session,
                                      const nghttp2_session_callbacks *callbacks, void *user_data,
                                      const nghttp2_option *option) {
  return nghttp2_session_client_new3(session, callbacks, user_data, option, &memory);
}

void faults_install(void) { event_set_mem_functions(WRAP(malloc), WRAP(realloc), free); }

/* ---- clocks ---- */

static int64_t jump_ns;

int REAL(clock_gettime)(clockid_t id, struct timespec *out);
int WRAP(clock_gettime)(clockid_t id, struct timespec *out);

int WRAP(clock_gettime)(clockid_t id, struct timespec *out) {
  const int result = REAL(clock_gettime)(id, out);
  const int64_t ns = out->tv_nsec + jump_ns % 1000000000;
  out->tv_sec += (time_t)(jump_ns / 1000000000) + (ns >= 1000000000) - (ns < 0);
  out->tv_nsec = (long)((ns + 1000000000) % 1000000000);
  return result;
}

void faults_jump(int64_t ns) { jump_ns += ns; }

/* ---- sockets ---- */

ssize_t REAL(read)(int fd, void *buf, size_t len);
ssize_t REAL(recv)(int fd, void *buf, size_t len, int flags);
ssize_t REAL(readv)(int fd, const struct iovec *pieces, int count);
ssize_t REAL(recvmsg)(int fd, struct msghdr *message, int flags);
ssize_t REAL(send)(int fd, const void *buf, size_t len, int flags);
ssize_t REAL(sendmsg)(int fd, const struct msghdr *message, int flags);
int REAL(accept4)(int fd, struct sockaddr *address, socklen_t *len, int flags);
int REAL(socket)(int family, int type, int protocol);
int REAL(connect)(int fd, const struct sockaddr *address, socklen_t len);
ssize_t WRAP(read)(int fd, void *buf, size_t len);
ssize_t WRAP(recv)(int fd, void *buf, size_t len, int flags);
ssize_t WRAP(readv)(int fd, const struct iovec *pieces, int count);
ssize_t WRAP(recvmsg)(int fd, struct msghdr *message, int flags);
ssize_t WRAP(send)(int fd, const void *buf, size_t len, int flags);
ssize_t WRAP(sendmsg)(int fd, const struct msghdr *message, int flags);
int WRAP(accept4)(int fd, struct sockaddr *address, socklen_t *len, int flags);
int WRAP(socket)(int family, int type, int protocol);
int WRAP(connect)(int fd, const struct sockaddr *address, socklen_t len);

/* An operation that moves `len` bytes: -1 with errno, or how many it may move now. */
static ssize_t allowed(enum fault_kind kind, size_t len) {
  if (!strikes(kind))
    return (ssize_t)len;
  return faults.error != 0 ? -1 : len > 0;
}

ssize_t WRAP(read)(int fd, void *buf, size_t len) {
  ssize_t n = allowed(FAULT_READ, len);
  return n < 0 ? n : REAL(read)(fd, buf, (size_t)n);
}

ssize_t WRAP(recv)(int fd, void *buf, size_t len, int flags) {
  ssize_t n = allowed(FAULT_READ, len);
  return n < 0 ? n : REAL(recv)(fd, buf, (size_t)n, flags);
}

ssize_t WRAP(readv)(int fd, const struct iovec *pieces, int count) {
  if (!strikes(FAULT_READ))
    return REAL(readv)(fd, pieces, count);
  return faults.error != 0 || count == 0
             ? -1
             : REAL(read)(fd, pieces[0].iov_base, pieces[0].iov_len > 0);
}

ssize_t WRAP(recvmsg)(int fd, struct msghdr *message, int flags) {
  return strikes(FAULT_READ) && faults.error != 0 ? -1 : REAL(recvmsg)(fd, message, flags);
}

ssize_t WRAP(send)(int fd, const void *buf, size_t len, int flags) {
  ssize_t n = allowed(FAULT_WRITE, len);
  return n < 0 ? n : REAL(send)(fd, buf, (size_t)n, flags);
}

ssize_t WRAP(sendmsg)(int fd, const struct msghdr *message, int flags) {
  struct msghdr cut = *message;
  struct iovec one;
  if (strikes(FAULT_WRITE)) {
    if (faults.error != 0 || message->msg_iovlen == 0)
      return -1;
    one = (struct iovec){message->msg_iov[0].iov_base, message->msg_iov[0].iov_len > 0};
    cut.msg_iov = &one;
    cut.msg_iovlen = 1;
  }
  return REAL(sendmsg)(fd, &cut, flags);
}

int WRAP(accept4)(int fd, struct sockaddr *address, socklen_t *len, int flags) {
  return strikes(FAULT_ACCEPT) ? -1 : REAL(accept4)(fd, address, len, flags);
}

int WRAP(socket)(int family, int type, int protocol) {
  return strikes(FAULT_SOCKET) ? -1 : REAL(socket)(family, type, protocol);
}

int WRAP(connect)(int fd, const struct sockaddr *address, socklen_t len) {
  return strikes(FAULT_SOCKET) ? -1 : REAL(connect)(fd, address, len);
}

/* ---- a service that is spared ---- */

static kvrelay_service *spared;

static int spared_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path,
                       size_t path_len, uint64_t now_ns, void **handle, kvrelay_status *status) {
  (void)self;
  faults.spared++;
  int err = spared->open(spared, call, path, path_len, now_ns, handle, status);
  faults.spared--;
  return err;
}

static int spared_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                          uint64_t now_ns, kvrelay_status *status) {
  (void)self;
  faults.spared++;
  int err = spared->message(spared, handle, bytes, len, now_ns, status);
  faults.spared--;
  return err;
}

static int spared_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                             kvrelay_status *status) {
  (void)self;
  faults.spared++;
  int err = spared->half_close(spared, handle, now_ns, status);
  faults.spared--;
  return err;
}

static bool spared_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  return spared->admitted(spared, handle);
}

static int spared_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                       kvrelay_status *status) {
  (void)self;
  faults.spared++;
  int what = spared->pull(spared, handle, now_ns, parts, status);
  faults.spared--;
  return what;
}

static void spared_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  (void)self;
  spared->close(spared, handle, now_ns);
}

kvrelay_service *faults_spare(kvrelay_service *service) {
  static kvrelay_service around = {spared_open,     spared_message, spared_half_close,
                                   spared_admitted, spared_pull,    spared_close};
  spared = service;
  return &around;
}
