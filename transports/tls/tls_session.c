/* SPDX-License-Identifier: Apache-2.0 */

/*
 * OpenSSL never sees the socket block while it writes: what it produces is collected, sent in one
 * go, and what the socket does not take is held by the session.  So no call of it has to be
 * repeated with the same bytes, and one system call carries several records.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#include "tls_private.h"

/* Bytes that one call takes from the socket: other connections want their turn. */
#define INPUT_PER_CALL ((size_t)262144)
/* What a peer may send before it is known. */
#define HANDSHAKE_MAX ((size_t)131072)
/* Output of one write; what a peer makes us say, against our will, is held up to that, too. */
#define OUTPUT_PER_CALL ((size_t)65536)
#define HELD_MAX ((size_t)262144)
#define FIRST_BYTES 8

typedef struct session {
  kvrelay_secure_session base; /* first */
  kvrelay_tls *tls;
  kvrelay_tls_material *material;
  SSL *ssl;
  uint8_t *held; /* records that the socket did not take */
  size_t held_at, held_len;
  size_t input_left; /* of this call */
  size_t handshake_bytes;
  int fd;
  int over;         /* enum kvrelay_secure_err, once it is */
  int socket_errno; /* the socket's error, if it has one */
  uint8_t first[FIRST_BYTES];
  uint8_t first_len;
  bool done; /* the handshake */
  bool eof;
  bool no_memory;
  bool protocol_required;
  uint16_t protocols_len;
  uint8_t protocols[256]; /* each behind its length */
} session;

static session *session_of(kvrelay_secure_session *s) { return (session *)s; }

/* ---- end ---- */

/* The first reason wins. */
__attribute__((format(printf, 3, 4))) static int end(session *s, int code, const char *format,
                                                     ...) {
  if (s->over != 0)
    return s->over;
  s->over = code;
  s->base.pending = s->base.wants_write = false;
  if (s->base.text[0] != '\0')
    return code; /* a callback knew better */
  va_list args;
  va_start(args, format);
  vsnprintf(s->base.text, sizeof s->base.text, format, args);
  va_end(args);
  return code;
}

static int cut(session *s) {
  if (s->socket_errno != 0)
    return end(s, KVRELAY_SECURE_CUT, "%s", strerror(s->socket_errno));
  return end(s, KVRELAY_SECURE_CUT, "%s",
             s->done ? "closed by the peer without a word" : "closed by the peer in the handshake");
}

static size_t send_some(session *s, const uint8_t *bytes, size_t len);

/* The peer begins with something that is no record of TLS.  A client hears in one what is spoken
 * here: many tell their user. */
static int not_tls(session *s) {
  static const uint8_t alert[] = {
      SSL3_RT_ALERT, TLS1_2_VERSION >> 8,      TLS1_2_VERSION & 0xff, 0, 2,
      SSL3_AL_FATAL, SSL_AD_UNEXPECTED_MESSAGE};
  if (s->tls->server)
    (void)send_some(s, alert, sizeof alert);
  char start[FIRST_BYTES + 1];
  size_t len = 0;
  for (; len < s->first_len; len++)
    start[len] = s->first[len] >= ' ' && s->first[len] <= '~' ? (char)s->first[len] : '.';
  start[len] = '\0';
  return end(s, KVRELAY_SECURE_FAILED,
             s->tls->server ? "not TLS, begins with \"%s\": plaintext on a TLS port"
                            : "not TLS, the server begins with \"%s\": it speaks plaintext",
             start);
}

static const char *plain_words(unsigned long error, const session *s) {
  switch (ERR_GET_REASON(error)) {
  case SSL_R_UNSUPPORTED_PROTOCOL:
  case SSL_R_UNKNOWN_PROTOCOL:
  case SSL_R_WRONG_SSL_VERSION:
  case SSL_R_NO_PROTOCOLS_AVAILABLE:
    return "no version of TLS in common; 1.2 and 1.3 are spoken here";
  case SSL_R_NO_SHARED_CIPHER:
    return "no cipher suite in common";
  case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
    return "the client shows no certificate";
  case SSL_R_NO_APPLICATION_PROTOCOL:
    return "the client speaks none of our protocols (ALPN)";
  case SSL_R_CALLBACK_FAILED:
    return "the client names no protocol (ALPN)";
  case SSL_R_WRONG_VERSION_NUMBER:
    return s->done ? "a record of another version of TLS" : "not TLS";
  default:
    return ERR_reason_error_string(error);
  }
}

/* "tlsv13 alert certificate required": the version is of no interest. */
static const char *alert_words(unsigned long error) {
  static const char mark[] = " alert ";
  const char *words = ERR_reason_error_string(error);
  const char *name = words != NULL ? strstr(words, mark) : NULL;
  if (name != NULL)
    return name + sizeof mark - 1;
  return words != NULL ? words : "unknown";
}

static int failed(session *s) {
  unsigned long error = ERR_peek_error();
  int reason = ERR_GET_REASON(error);
  if (s->no_memory || reason == ERR_R_MALLOC_FAILURE)
    return end(s, KVRELAY_SECURE_FAILED, "no memory");
  if (!s->done && s->first_len > 0 && s->first[0] != SSL3_RT_HANDSHAKE &&
      s->first[0] != SSL3_RT_ALERT)
    return not_tls(s);
  if (ERR_GET_LIB(error) == ERR_LIB_SSL && reason > SSL_AD_REASON_OFFSET)
    return end(s, KVRELAY_SECURE_FAILED, "the peer ended it with the alert \"%s\"",
               alert_words(error));
  const char *words = plain_words(error, s);
  return end(s, KVRELAY_SECURE_FAILED, "%s", words != NULL ? words : "TLS failed");
}

/* ---- output ---- */

/* Sends as much as the socket takes; the bytes sent. */
static size_t send_some(session *s, const uint8_t *bytes, size_t len) {
  size_t sent = 0;
  while (sent < len && s->socket_errno == 0) {
    ssize_t n = send(s->fd, bytes + sent, len - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
      sent += (size_t)n;
    else if (errno == EAGAIN)
      break;
    else if (errno != EINTR)
      s->socket_errno = errno;
  }
  return sent;
}

static bool hold(session *s, const uint8_t *bytes, size_t len) {
  if (len > HELD_MAX + OUTPUT_PER_CALL - s->held_len) {
    end(s, KVRELAY_SECURE_FAILED, "asks without reading the answers");
    return false;
  }
  uint8_t *grown = realloc(s->held, s->held_len + len);
  if (grown == NULL) {
    end(s, KVRELAY_SECURE_FAILED, "no memory");
    return false;
  }
  memcpy(grown + s->held_len, bytes, len);
  s->held = grown;
  s->held_len += len;
  return true;
}

/* Sends what is held and then what the call at work produced.  Negative: the session is over. */
static int flush(session *s) {
  kvrelay_tls *tls = s->tls;
  size_t out_len = tls->out_len, sent = 0;
  tls->out_len = 0;
  if (s->held != NULL) {
    s->held_at += send_some(s, s->held + s->held_at, s->held_len - s->held_at);
    if (s->held_at == s->held_len) {
      free(s->held);
      s->held = NULL;
      s->held_at = s->held_len = 0;
    }
  }
  if (s->held == NULL)
    sent = send_some(s, tls->out, out_len);
  if (s->socket_errno != 0)
    return cut(s);
  if (sent < out_len && !hold(s, tls->out + sent, out_len - sent))
    return s->over;
  s->base.wants_write = s->held != NULL;
  return 0;
}

/* ---- what OpenSSL reads from and writes to ---- */

static int on_bio_write(BIO *bio, const char *bytes, size_t len, size_t *written) {
  session *s = BIO_get_data(bio);
  kvrelay_tls *tls = s->tls;
  BIO_clear_retry_flags(bio);
  if (len > tls->out_cap - tls->out_len) {
    size_t cap =
        tls->out_len + len > 2 * OUTPUT_PER_CALL ? tls->out_len + len : 2 * OUTPUT_PER_CALL;
    uint8_t *grown = realloc(tls->out, cap);
    s->no_memory |= grown == NULL;
    if (grown == NULL)
      return 0;
    tls->out = grown;
    tls->out_cap = cap;
  }
  memcpy(tls->out + tls->out_len, bytes, len);
  tls->out_len += len;
  *written = len;
  return 1;
}

static int on_bio_read(BIO *bio, char *out, size_t cap, size_t *got) {
  session *s = BIO_get_data(bio);
  BIO_clear_retry_flags(bio);
  if (cap > s->input_left)
    cap = s->input_left;
  ssize_t n = -1;
  errno = EAGAIN;
  if (cap > 0)
    n = recv(s->fd, out, cap, MSG_DONTWAIT);
  s->eof |= n == 0;
  if (n > 0) {
    for (size_t i = 0; i < (size_t)n && s->first_len < FIRST_BYTES; i++)
      s->first[s->first_len++] = (uint8_t)out[i];
    s->input_left -= (size_t)n;
    if (!s->done)
      s->handshake_bytes += (size_t)n;
    *got = (size_t)n;
    return 1;
  }
  if (n < 0 && (errno == EAGAIN || errno == EINTR))
    BIO_set_retry_read(bio);
  else if (n < 0)
    s->socket_errno = errno;
  return 0;
}

static long on_bio_ctrl(BIO *bio, int command, long number, void *pointer) {
  const session *s = BIO_get_data(bio);
  (void)number;
  (void)pointer;
  if (command == BIO_CTRL_EOF)
    return s->eof;
  return command == BIO_CTRL_FLUSH;
}

BIO_METHOD *kvrelay_tls_bio_method(void) {
  BIO_METHOD *method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvrelay");
  if (method == NULL)
    return NULL;
  BIO_meth_set_write_ex(method, on_bio_write);
  BIO_meth_set_read_ex(method, on_bio_read);
  BIO_meth_set_ctrl(method, on_bio_ctrl);
  return method;
}

/* ---- callbacks of OpenSSL ---- */

static session *session_of_ssl(const SSL *ssl) { return SSL_get_app_data(ssl); }

/* S100: a peer without ALPN would only hear in HTTP/2 that it is not understood. */
int kvrelay_tls_on_hello(SSL *ssl, int *alert, void *argument) {
  const unsigned char *ignored;
  size_t len;
  (void)argument;
  if (!session_of_ssl(ssl)->protocol_required ||
      SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &ignored,
                                &len) == 1)
    return SSL_CLIENT_HELLO_SUCCESS;
  *alert = SSL_AD_NO_APPLICATION_PROTOCOL;
  return SSL_CLIENT_HELLO_ERROR;
}

int kvrelay_tls_on_protocols(SSL *ssl, const unsigned char **out, unsigned char *out_len,
                             const unsigned char *in, unsigned in_len, void *argument) {
  const session *s = session_of_ssl(ssl);
  unsigned char *chosen;
  (void)argument;
  if (SSL_select_next_proto(&chosen, out_len, s->protocols, s->protocols_len, in, in_len) !=
      OPENSSL_NPN_NEGOTIATED)
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

static void copy_name(session *s, const uint8_t *name, size_t len) {
  size_t n = 0;
  for (; n < len && n < sizeof s->base.peer - 1; n++)
    s->base.peer[n] = name[n] > ' ' && name[n] <= '~' ? (char)name[n] : '?';
  s->base.peer[n] = '\0';
}

static bool is_allowed(const kvrelay_tls_material *m, int type, const uint8_t *name, size_t len) {
  for (size_t i = 0; i < m->allow_len; i++) {
    const char *allowed = m->allow[i];
    bool dns = strncmp(allowed, "dns:", 4) == 0;
    if (dns)
      allowed += 4;
    if (dns != (type == GEN_DNS) || strlen(allowed) != len)
      continue;
    if (dns ? strncasecmp(allowed, (const char *)name, len) == 0 : memcmp(allowed, name, len) == 0)
      return true;
  }
  return false;
}

/* What the certificate calls its owner: the name that is allowed, else the first URI, DNS name or
 * common name.  True: one is allowed. */
static bool name_peer(session *s, X509 *cert) {
  GENERAL_NAMES *names = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);
  bool allowed = false;
  int best = 0;
  char common[128];
  int n = X509_NAME_get_text_by_NID(X509_get_subject_name(cert), NID_commonName, common,
                                    (int)sizeof common);
  copy_name(s, (const uint8_t *)common, n > 0 ? (size_t)n : 0);
  for (int i = 0; !allowed && i < sk_GENERAL_NAME_num(names); i++) {
    const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, i);
    if (name->type != GEN_URI && name->type != GEN_DNS)
      continue;
    const uint8_t *text = ASN1_STRING_get0_data(name->d.ia5);
    size_t len = (size_t)ASN1_STRING_length(name->d.ia5);
    int rank = name->type == GEN_URI ? 2 : 1;
    allowed = is_allowed(s->material, name->type, text, len);
    if (allowed || rank > best) {
      copy_name(s, text, len);
      best = rank;
    }
  }
  GENERAL_NAMES_free(names);
  return allowed;
}

static const char *plain_refusal(int error) {
  switch (error) {
  case X509_V_ERR_CERT_HAS_EXPIRED:
    return "has expired";
  case X509_V_ERR_CERT_NOT_YET_VALID:
    return "is not valid yet";
  case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
  case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
  case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
  case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
  case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    return "comes from an authority that is not trusted here";
  case X509_V_ERR_HOSTNAME_MISMATCH:
  case X509_V_ERR_IP_ADDRESS_MISMATCH:
    return "is for another host";
  case X509_V_ERR_INVALID_PURPOSE:
    return "is not meant for this side of a connection";
  default:
    return X509_verify_cert_error_string(error);
  }
}

int kvrelay_tls_on_verify(int ok, X509_STORE_CTX *store) {
  SSL *ssl = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
  session *s = session_of_ssl(ssl);
  X509 *cert = X509_STORE_CTX_get_current_cert(store);
  bool own = X509_STORE_CTX_get_error_depth(store) == 0;
  const char *why = NULL;
  if (!ok)
    why = plain_refusal(X509_STORE_CTX_get_error(store));
  if (cert != NULL && (own || !ok) && !name_peer(s, cert) && ok && s->material->allow_len > 0) {
    X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
    why = "carries none of the allowed names";
  }
  if (why == NULL)
    return 1;
  snprintf(s->base.text, sizeof s->base.text, "the %scertificate of \"%.100s\" %s",
           own ? "" : "issuing ", s->base.peer, why);
  s->base.peer[0] = '\0';
  return 0;
}

/* ---- calls ---- */

static void begin(session *s) {
  ERR_clear_error();
  s->input_left = INPUT_PER_CALL;
}

/* After an operation of OpenSSL that did not do all: why, with everything sent that it had to say.
 */
static int settle(session *s, int result) {
  int why = SSL_get_error(s->ssl, result);
  int code = KVRELAY_SECURE_AGAIN;
  if (why == SSL_ERROR_ZERO_RETURN && s->done)
    code = KVRELAY_SECURE_CLOSED;
  else if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE)
    code = s->socket_errno != 0 || s->eof ? cut(s) : failed(s);
  ERR_clear_error();
  int sent = flush(s); /* an alert, perhaps */
  return code == KVRELAY_SECURE_AGAIN && sent < 0 ? sent : code;
}

static int finish_handshake(session *s) {
  const unsigned char *protocol;
  unsigned len;
  SSL_get0_alpn_selected(s->ssl, &protocol, &len);
  if (len == 0 && s->protocol_required)
    return end(s, KVRELAY_SECURE_FAILED, "the server names no protocol (ALPN)");
  if (len >= sizeof s->base.protocol)
    return end(s, KVRELAY_SECURE_FAILED, "the protocol's name is too long");
  if (len > 0)
    memcpy(s->base.protocol, protocol, len);
  X509 *cert = SSL_get0_peer_certificate(s->ssl);
  if (cert != NULL) {
    (void)name_peer(s, cert);
    s->base.peer_not_after = kvrelay_tls_not_after(cert);
  }
  s->done = true;
  s->base.pending = SSL_has_pending(s->ssl) == 1;
  return KVRELAY_SECURE_OK;
}

static int on_handshake(kvrelay_secure_session *base) {
  session *s = session_of(base);
  if (s->over != 0)
    return s->over;
  if (s->done)
    return KVRELAY_SECURE_OK;
  begin(s);
  int n = SSL_do_handshake(s->ssl);
  if (n != 1) {
    n = settle(s, n);
    if (n == KVRELAY_SECURE_AGAIN && s->handshake_bytes > HANDSHAKE_MAX)
      n = end(s, KVRELAY_SECURE_FAILED, "the handshake is longer than any honest one");
    return n;
  }
  n = finish_handshake(s);
  int sent = flush(s);
  return n == KVRELAY_SECURE_OK && sent < 0 ? sent : n;
}

static ptrdiff_t on_read(kvrelay_secure_session *base, uint8_t *out, size_t cap) {
  session *s = session_of(base);
  size_t total = 0;
  int n = 1;
  if (s->over != 0)
    return s->over;
  begin(s);
  while (total < cap) {
    size_t want = cap - total > INT32_MAX ? INT32_MAX : cap - total;
    n = SSL_read(s->ssl, out + total, (int)want);
    if (n <= 0)
      break;
    total += (size_t)n;
  }
  s->base.pending = n > 0 && SSL_has_pending(s->ssl) == 1;
  if (n > 0)
    return flush(s) < 0 ? s->over : (ptrdiff_t)total;
  n = settle(s, n);
  if (total == 0)
    return n;
  /* What came before the end is told first; the end is told by the next call. */
  s->base.pending = n < 0;
  return (ptrdiff_t)total;
}

/* The next bytes for one record: of one large piece where they lie, or small ones put together. */
static kvrelay_iov next_record(kvrelay_tls *tls, const kvrelay_iov **piece, size_t *left,
                               size_t *at) {
  kvrelay_iov record = {tls->record, 0};
  while (*left > 0) {
    const uint8_t *bytes = (*piece)->base + *at;
    size_t len = (*piece)->len - *at;
    size_t room = KVRELAY_TLS_RECORD - record.len;
    size_t n = len < room ? len : room;
    bool alone = record.len == 0 && (n == KVRELAY_TLS_RECORD || *left == 1);
    if (alone)
      record.base = bytes;
    else if (n > 0)
      memcpy(tls->record + record.len, bytes, n);
    record.len += n;
    *at += n;
    if (n < len || (alone && n == KVRELAY_TLS_RECORD))
      break;
    ++*piece;
    --*left;
    *at = 0;
  }
  return record;
}

static ptrdiff_t on_write(kvrelay_secure_session *base, const kvrelay_iov *piece, size_t left) {
  session *s = session_of(base);
  size_t taken = 0, at = 0;
  if (s->over != 0)
    return s->over;
  if (flush(s) < 0)
    return s->over;
  begin(s);
  while (s->held == NULL && s->tls->out_len < OUTPUT_PER_CALL) {
    kvrelay_iov record = next_record(s->tls, &piece, &left, &at);
    if (record.len == 0)
      break;
    int n = SSL_write(s->ssl, record.base, (int)record.len);
    if (n <= 0) {
      n = settle(s, n);
      if (n < 0)
        return n;
      break; /* the peer is in the middle of a message of its own */
    }
    taken += record.len;
  }
  return flush(s) < 0 ? s->over : (ptrdiff_t)taken;
}

static int on_shutdown(kvrelay_secure_session *base) {
  session *s = session_of(base);
  if (s->over != 0 && s->over != KVRELAY_SECURE_CLOSED)
    return s->over;
  begin(s);
  if (s->done && (SSL_get_shutdown(s->ssl) & SSL_SENT_SHUTDOWN) == 0)
    (void)SSL_shutdown(s->ssl);
  ERR_clear_error();
  if (flush(s) < 0)
    return s->over;
  return s->held != NULL ? KVRELAY_SECURE_AGAIN : KVRELAY_SECURE_OK;
}

static void on_close(kvrelay_secure_session *base) {
  session *s = session_of(base);
  SSL_free(s->ssl);
  kvrelay_tls_material_release(s->material);
  free(s->held);
  free(s);
}

/* ---- a session ---- */

/* "h2,x" as its wire form. */
static bool set_protocols(session *s, const char *text) {
  size_t at = 0;
  for (; *text != '\0'; text += text[0] == ',') {
    size_t len = strcspn(text, ",");
    if (len == 0 || len >= sizeof s->base.protocol || len + 1 > sizeof s->protocols - at)
      return false;
    s->protocols[at] = (uint8_t)len;
    memcpy(s->protocols + at + 1, text, len);
    at += len + 1;
    text += len;
  }
  s->protocols_len = (uint16_t)at;
  return at > 0;
}

/* SNI for names only; the certificate has to be for that name or address. */
static bool expect_peer(SSL *ssl, const char *name) {
  uint8_t ignored[16];
  if (name == NULL || name[0] == '\0')
    return false;
  if (inet_pton(AF_INET, name, ignored) == 1 || inet_pton(AF_INET6, name, ignored) == 1)
    return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name) == 1;
  SSL_set_hostflags(ssl,
                    X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
  /* OpenSSL only reads the name, although its type does not say so. */
  return SSL_ctrl(ssl, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name,
                  (void *)(uintptr_t)name) == 1 &&
         SSL_set1_host(ssl, name) == 1;
}

static bool prepare(session *s, const kvrelay_secure_config *cfg) {
  BIO *bio = BIO_new(s->tls->bio);
  s->ssl = SSL_new(s->material->ctx);
  if (s->ssl == NULL || bio == NULL) {
    BIO_free(bio);
    return false;
  }
  BIO_set_data(bio, s);
  BIO_set_init(bio, 1);
  SSL_set_bio(s->ssl, bio, bio);
  SSL_set_app_data(s->ssl, s);
  if (!set_protocols(s, cfg->protocols))
    return false;
  if (s->tls->server) {
    SSL_set_accept_state(s->ssl);
    return true;
  }
  SSL_set_connect_state(s->ssl);
  return SSL_set_alpn_protos(s->ssl, s->protocols, s->protocols_len) == 0 &&
         expect_peer(s->ssl, cfg->peer_name);
}

kvrelay_secure_session *kvrelay_tls_session_open(kvrelay_security *self,
                                                 const kvrelay_secure_config *cfg) {
  session *s = calloc(1, sizeof *s);
  if (s == NULL)
    return NULL;
  s->base.handshake = on_handshake;
  s->base.read = on_read;
  s->base.write = on_write;
  s->base.shutdown = on_shutdown;
  s->base.close = on_close;
  s->tls = (kvrelay_tls *)self;
  s->material = s->tls->material;
  s->material->users++;
  s->fd = cfg->fd;
  s->protocol_required = cfg->protocol_required;
  if (prepare(s, cfg))
    return &s->base;
  ERR_clear_error();
  on_close(&s->base);
  return NULL;
}
