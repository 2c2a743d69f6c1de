/* SPDX-License-Identifier: Apache-2.0 */
#include "proxy.h"

#include "address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* ---- texts ---- */

static int hex(char c) {
  static const char digits[] = "0123456789abcdef";
  const char *at = c == '\0' ? NULL : strchr(digits, c | (c >= 'A' && c <= 'F' ? 0x20 : 0));
  return at == NULL ? -1 : (int)(at - digits);
}

/* Resolves percent escapes; a broken one stays as it is. */
static size_t unescape(const char *text, size_t len, uint8_t *out) {
  size_t n = 0;
  for (size_t i = 0; i < len; i++) {
    const bool escape =
        text[i] == '%' && i + 2 < len && hex(text[i + 1]) >= 0 && hex(text[i + 2]) >= 0;
    out[n++] = escape ? (uint8_t)(hex(text[i + 1]) << 4 | hex(text[i + 2])) : (uint8_t)text[i];
    i += escape ? 2 : 0;
  }
  return n;
}

/* Padded base64 of at most 256 bytes. */
static void base64(const uint8_t *in, size_t len, char *out) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < len; i += 3, out += 4) {
    const size_t left = len - i;
    const uint32_t group = (uint32_t)in[i] << 16 | (left > 1 ? (uint32_t)in[i + 1] << 8 : 0) |
                           (left > 2 ? (uint32_t)in[i + 2] : 0);
    out[0] = digits[group >> 18];
    out[1] = digits[group >> 12 & 63];
    out[2] = digits[group >> 6 & 63];
    out[3] = digits[group & 63];
    if (left < 3)
      out[3] = '=';
    if (left < 2)
      out[2] = '=';
  }
  *out = '\0';
}

int kvrelay_proxy_parse(const char *text, kvrelay_proxy *out) {
  char where[272];
  memset(out, 0, sizeof *out);
  if (strncmp(text, "http://", 7) == 0)
    text += 7;
  size_t len = strcspn(text, "/");
  const char *at = memchr(text, '@', len);
  if (at != NULL) {
    uint8_t plain[256];
    const size_t user_len = (size_t)(at - text);
    if (user_len > sizeof plain)
      return KVRELAY_TRANSPORT_ERR_ADDRESS;
    base64(plain, unescape(text, user_len, plain), out->credentials);
    len -= user_len + 1;
    text = at + 1;
  }
  /* Nothing but a closing slash may follow; "https:" fails here, too. */
  if (len >= sizeof where || (text[len] != '\0' && strcmp(text + len, "/") != 0))
    return KVRELAY_TRANSPORT_ERR_ADDRESS;
  memcpy(where, text, len);
  where[len] = '\0';
  return kvrelay_address_split(where, out->host, sizeof out->host, out->port, sizeof out->port);
}

/* ---- hosts that need none ---- */

static bool loopback(const char *host) {
  kvrelay_address address;
  if (strcasecmp(host, "localhost") == 0)
    return true;
  if (kvrelay_address_resolve(host, "0", true, &address, 1) != 1)
    return false;
  if (address.storage.ss_family == AF_INET) {
    struct sockaddr_in in;
    memcpy(&in, &address.storage, sizeof in);
    return ntohl(in.sin_addr.s_addr) >> 24 == 127;
  }
  struct sockaddr_in6 in6;
  memcpy(&in6, &address.storage, sizeof in6);
  return IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
}

/* `entry`: one of the list, without blanks around it. */
static bool entry_names(const char *entry, size_t len, const char *host, const char *port) {
  const size_t host_len = strlen(host), port_len = strlen(port);
  if (len == 1 && *entry == '*')
    return true;
  if (len > port_len + 1 && entry[len - port_len - 1] == ':' &&
      memcmp(entry + len - port_len, port, port_len) == 0 &&
      (memchr(host, ':', host_len) == NULL || entry[0] == '['))
    len -= port_len + 1;
  if (len > 2 && entry[0] == '[' && entry[len - 1] == ']') {
    entry++;
    len -= 2;
  }
  const bool domain = len > 0 && entry[0] == '.';
  if (domain) {
    entry++;
    len--;
  }
  if (len == 0 || len > host_len || strncasecmp(host + host_len - len, entry, len) != 0)
    return false;
  return len == host_len ? !domain : host[host_len - len - 1] == '.';
}

bool kvrelay_proxy_spared(const char *no_proxy, const char *host, const char *port) {
  static const char between[] = ", \t";
  if (loopback(host))
    return true;
  for (const char *at = no_proxy; at != NULL && *at != '\0';) {
    at += strspn(at, between);
    const size_t len = strcspn(at, between);
    if (len > 0 && entry_names(at, len, host, port))
      return true;
    at += len;
  }
  return false;
}

/* ---- CONNECT ---- */

/* Waits until the socket is ready for `events`; 0, or as kvrelay_proxy_connect. */
static int wait_for(int fd, int called_off, short events) {
  struct pollfd both[2] = {{.fd = fd, .events = events}, {.fd = called_off}};
  while (poll(both, 2, -1) < 0)
    if (errno != EINTR)
      return -errno;
  return both[1].revents != 0 ? -ECANCELED : 0;
}

static int send_all(int fd, int called_off, const char *text, size_t len) {
  while (len > 0) {
    const ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
      return -errno;
    const int err = n < 0 ? wait_for(fd, called_off, POLLOUT) : 0;
    if (err != 0)
      return err;
    text += n < 0 ? 0 : n;
    len -= n < 0 ? 0 : (size_t)n;
  }
  return 0;
}

/* "HTTP/1.x NNN": 0 for 2xx; as kvrelay_proxy_connect. */
static int status_of(const char line[12]) {
  int status = 0;
  if (line[8] != ' ')
    return 1;
  for (int i = 9; i < 12; i++) {
    if (line[i] < '0' || line[i] > '9')
      return 1;
    status = 10 * status + (line[i] - '0');
  }
  return status >= 200 && status < 300 ? 0 : status < 100 ? 1 : status;
}

/* One byte at a time: what follows the head belongs to the caller. */
static int read_head(int fd, int called_off) {
  static const char start[] = "HTTP/1.";
  char line[12] = "", byte;
  uint32_t last = 0; /* four bytes */
  for (size_t n = 0; n < KVRELAY_PROXY_HEAD_MAX;) {
    const ssize_t got = recv(fd, &byte, 1, 0);
    if (got == 0)
      return -ECONNRESET;
    if (got < 0) {
      if (errno != EAGAIN && errno != EINTR)
        return -errno;
      const int err = wait_for(fd, called_off, POLLIN);
      if (err != 0)
        return err;
      continue;
    }
    if (n < sizeof start - 1 && byte != start[n])
      return 1;
    if (n < sizeof line)
      line[n] = byte;
    n++;
    last = last << 8 | (uint8_t)byte;
    if (last == 0x0d0a0d0a)
      return n > sizeof line ? status_of(line) : 1;
  }
  return 1;
}

int kvrelay_proxy_connect(const kvrelay_proxy *proxy, int fd, int called_off, const char *host,
                          const char *port) {
  char head[2 * 272 + sizeof proxy->credentials + 128];
  const char *open = strchr(host, ':') != NULL ? "[" : "", *close = *open != '\0' ? "]" : "";
  const bool known = proxy->credentials[0] != '\0';
  const int len =
      snprintf(head, sizeof head, "CONNECT %s%s%s:%s HTTP/1.1\r\nHost: %s%s%s:%s\r\n%s%s%s\r\n",
               open, host, close, port, open, host, close, port,
               known ? "Proxy-Authorization: Basic " : "", proxy->credentials, known ? "\r\n" : "");
  const int err = send_all(fd, called_off, head, (size_t)len);
  return err != 0 ? err : read_head(fd, called_off);
}
