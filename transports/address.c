/* SPDX-License-Identifier: Apache-2.0 */
#include "address.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

static bool port_valid(const char *port) {
  unsigned value = 0;
  if (*port == '\0' || strlen(port) > 5)
    return false;
  for (const char *p = port; *p != '\0'; p++) {
    if (*p < '0' || *p > '9')
      return false;
    value = 10 * value + (unsigned)(*p - '0');
  }
  return value <= 65535;
}

int kvrelay_address_split(const char *text, char *host, size_t host_cap, char *port,
                          size_t port_cap) {
  const char *colon = strrchr(text, ':');
  if (colon == NULL || !port_valid(colon + 1) || strlen(colon + 1) >= port_cap)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  size_t len = (size_t)(colon - text);
  if (len >= 2 && text[0] == '[' && text[len - 1] == ']') {
    text++;
    len -= 2;
  } else if (memchr(text, ':', len) != NULL) {
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  }
  if (len == 0 || len >= host_cap)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  memcpy(host, text, len);
  host[len] = '\0';
  memcpy(port, colon + 1, strlen(colon + 1) + 1);
  return KVRELAY_TRANSPORT_OK;
}

int kvrelay_address_resolve(const char *host, const char *port, bool numeric, kvrelay_address *out,
                            size_t cap) {
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                           .ai_family = AF_UNSPEC,
                           .ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0)};
  struct addrinfo *list = NULL;
  if (getaddrinfo(host, port, &hints, &list) != 0)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  int count = 0;
  for (const struct addrinfo *a = list; a != NULL && (size_t)count < cap; a = a->ai_next) {
    if (a->ai_addrlen > sizeof out->storage)
      continue;
    memset(&out[count], 0, sizeof out[count]);
    memcpy(&out[count].storage, a->ai_addr, a->ai_addrlen);
    out[count++].len = a->ai_addrlen;
  }
  freeaddrinfo(list);
  return count > 0 ? count : KVRELAY_TRANSPORT_ERR_ADDRESS;
}

/* Text behind a prefix; NULL: it starts with something else. */
static const char *behind(const char *text, const char *prefix) {
  const size_t len = strlen(prefix);
  return strncmp(text, prefix, len) == 0 ? text + len : NULL;
}

int kvrelay_address_unix(const char *text, kvrelay_address *out) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const char *name = behind(text, "unix-abstract:");
  const size_t abstract = name != NULL; /* its name stands behind a zero byte, without another */
  if (name == NULL && (name = behind(text, "unix:")) == NULL)
    return 0;
  if (!abstract && behind(name, "//") != NULL)
    name += 2; /* "unix:///path" */
  const size_t len = strlen(name);
  if (len == 0 || len >= sizeof address.sun_path)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  memcpy(address.sun_path + abstract, name, len);
  memset(out, 0, sizeof *out);
  memcpy(&out->storage, &address, sizeof address);
  out->len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + 1);
  return 1;
}

int kvrelay_address_parse(const char *text, kvrelay_address *out) {
  char host[256], port[8];
  const int local = kvrelay_address_unix(text, out);
  if (local != 0)
    return local < 0 ? local : KVRELAY_TRANSPORT_OK;
  const int err = kvrelay_address_split(text, host, sizeof host, port, sizeof port);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  return kvrelay_address_resolve(host, port, false, out, 1) == 1 ? KVRELAY_TRANSPORT_OK
                                                                 : KVRELAY_TRANSPORT_ERR_ADDRESS;
}

void kvrelay_address_remove(const kvrelay_address *address) {
  struct sockaddr_un un;
  memcpy(&un, &address->storage, sizeof un);
  if (un.sun_family == AF_UNIX && un.sun_path[0] != '\0')
    (void)unlink(un.sun_path);
}

/* A path ends at a zero byte, an abstract name where the address ends; printable bytes only. */
static void format_unix(const kvrelay_address *address, char out[KVRELAY_ADDRESS_CAP]) {
  struct sockaddr_un un;
  const size_t head = offsetof(struct sockaddr_un, sun_path);
  const size_t room = address->len > head ? address->len - head : 0;
  memcpy(&un, &address->storage, sizeof un);
  const bool abstract = room > 1 && un.sun_path[0] == '\0';
  const char *name = un.sun_path + (abstract ? 1 : 0);
  const size_t len = abstract ? room - 1 : strnlen(name, room);
  size_t n =
      (size_t)snprintf(out, KVRELAY_ADDRESS_CAP, "%s", abstract ? "unix-abstract:" : "unix:");
  for (size_t i = 0; i < len && n < KVRELAY_ADDRESS_CAP - 1; i++)
    out[n++] = name[i] > ' ' && name[i] < 0x7f ? name[i] : '?';
  out[n] = '\0';
}

void kvrelay_address_format(const kvrelay_address *address, char out[KVRELAY_ADDRESS_CAP]) {
  char host[80], port[8];
  struct sockaddr_storage copy = address->storage;
  if (copy.ss_family == AF_UNIX) {
    format_unix(address, out);
    return;
  }
  if (getnameinfo((struct sockaddr *)&copy, address->len, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    snprintf(out, KVRELAY_ADDRESS_CAP, "?");
    return;
  }
  snprintf(out, KVRELAY_ADDRESS_CAP, copy.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

int kvrelay_address_listen(const char *text, kvrelay_address *bound, int *fd) {
  kvrelay_address address;
  const int one = 1;
  *fd = -1;
  if (kvrelay_address_parse(text, &address) != KVRELAY_TRANSPORT_OK)
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  const int s = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (s < 0)
    return KVRELAY_TRANSPORT_ERR_SYSTEM;
  if (address.storage.ss_family != AF_UNIX)
    (void)setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  const bool named = bind(s, (const struct sockaddr *)&address.storage, address.len) == 0;
  int err = KVRELAY_TRANSPORT_OK;
  bound->len = sizeof bound->storage;
  if (!named || listen(s, SOMAXCONN) != 0)
    err = KVRELAY_TRANSPORT_ERR_BIND;
  else if (getsockname(s, (struct sockaddr *)&bound->storage, &bound->len) != 0)
    err = KVRELAY_TRANSPORT_ERR_SYSTEM;
  if (err == KVRELAY_TRANSPORT_OK) {
    *fd = s;
    return err;
  }
  const int saved = errno;
  close(s);
  if (named)
    kvrelay_address_remove(&address);
  errno = saved;
  return err;
}

bool kvrelay_address_same_host(const kvrelay_address *a, const kvrelay_address *b) {
  if (a->storage.ss_family != b->storage.ss_family)
    return false;
  if (a->storage.ss_family == AF_INET)
    return ((const struct sockaddr_in *)&a->storage)->sin_addr.s_addr ==
           ((const struct sockaddr_in *)&b->storage)->sin_addr.s_addr;
  if (a->storage.ss_family == AF_INET6)
    return memcmp(&((const struct sockaddr_in6 *)&a->storage)->sin6_addr,
                  &((const struct sockaddr_in6 *)&b->storage)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
  return false; /* sockets in the file system have no hosts */
}
