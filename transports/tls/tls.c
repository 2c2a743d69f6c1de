/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "tls_private.h"

#define FILE_MAX (4 << 20) /* bundles of authorities have some 200 KiB */
#define CHAIN_DEPTH 8

/* Forward secrecy and authenticated encryption: nothing that RFC 9113, appendix A, forbids. */
static const char suites_12[] = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
                                "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:"
                                "ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305";
static const char suites_13[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

/* ---- errors ---- */

typedef struct loading {
  const kvrelay_tls_config *cfg;
  kvrelay_tls_material *material;
  char *why;
} loading;

__attribute__((format(printf, 2, 3))) static int refuse(const loading *l, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(l->why, KVRELAY_TLS_WHY_CAP, format, args);
  va_end(args);
  ERR_clear_error();
  return KVRELAY_TRANSPORT_ERR_SECURITY;
}

static int no_memory(const loading *l) {
  snprintf(l->why, KVRELAY_TLS_WHY_CAP, "no memory");
  ERR_clear_error();
  return KVRELAY_TRANSPORT_ERR_MEMORY;
}

/* OpenSSL's own words for the last error. */
static const char *reason(void) {
  const char *text = ERR_reason_error_string(ERR_peek_last_error());
  return text != NULL ? text : "it is not understood";
}

__attribute__((format(printf, 2, 3))) static void warn(const loading *l, const char *format, ...) {
  char text[KVRELAY_TLS_WHY_CAP];
  va_list args;
  if (l->cfg->warn == NULL)
    return;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  l->cfg->warn(l->cfg->warn_context, text);
}

/* ---- files ---- */

static int open_file(const loading *l, const char *name, bool secret, BIO **out) {
  struct stat info;
  FILE *file = fopen(name, "re");
  if (file == NULL)
    return refuse(l, "%s: %s", name, strerror(errno));
  const char *problem = NULL;
  if (fstat(fileno(file), &info) != 0)
    problem = strerror(errno);
  else if (!S_ISREG(info.st_mode))
    problem = "not a file";
  else if (info.st_size > FILE_MAX)
    problem = "larger than 4 MiB";
  if (problem != NULL) {
    fclose(file);
    return refuse(l, "%s: %s", name, problem);
  }
  if (secret && (info.st_mode & S_IROTH) != 0)
    warn(l, "%s holds a private key and can be read by everybody", name);
  if ((info.st_mode & S_IWOTH) != 0)
    warn(l, "%s can be changed by everybody", name);
  *out = BIO_new_fp(file, BIO_CLOSE);
  if (*out == NULL) {
    fclose(file);
    return no_memory(l);
  }
  return KVRELAY_TRANSPORT_OK;
}

/* All certificates of a file, at least one; the caller frees the list. */
static int read_certificates(const loading *l, const char *name, STACK_OF(X509) * *out) {
  BIO *bio;
  int err = open_file(l, name, false, &bio);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  STACK_OF(X509) *list = sk_X509_new_null();
  X509 *cert;
  ERR_clear_error();
  while (list != NULL && (cert = PEM_read_bio_X509(bio, NULL, NULL, NULL)) != NULL)
    if (sk_X509_push(list, cert) == 0) {
      X509_free(cert);
      break;
    }
  BIO_free(bio);
  bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (list == NULL)
    err = no_memory(l);
  else if (!at_end)
    err = refuse(l, "%s: certificate %d is broken: %s", name, sk_X509_num(list) + 1, reason());
  else if (sk_X509_num(list) == 0)
    err = refuse(l, "%s holds no certificate in PEM form", name);
  ERR_clear_error();
  if (err == KVRELAY_TRANSPORT_OK)
    *out = list;
  else
    sk_X509_pop_free(list, X509_free);
  return err;
}

/* Nobody is there to be asked. */
static int on_passphrase(char *buf, int size, int writing, void *asked) {
  (void)buf;
  (void)size;
  (void)writing;
  *(bool *)asked = true;
  return -1;
}

static int read_key(const loading *l, const char *name, EVP_PKEY **out) {
  BIO *bio;
  bool asked = false;
  int err = open_file(l, name, true, &bio);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  ERR_clear_error();
  *out = PEM_read_bio_PrivateKey(bio, NULL, on_passphrase, &asked);
  BIO_free(bio);
  if (*out != NULL)
    return KVRELAY_TRANSPORT_OK;
  if (asked)
    return refuse(l, "%s is protected by a passphrase; a key without one is needed", name);
  const int why = ERR_GET_REASON(ERR_peek_last_error());
  if (why == PEM_R_NO_START_LINE || why == ERR_R_UNSUPPORTED)
    return refuse(l, "%s holds no private key in PEM form", name);
  return refuse(l, "%s: the private key is broken: %s", name, reason());
}

/* ---- certificates ---- */

int64_t kvrelay_tls_not_after(const X509 *cert) {
  struct tm parts;
  return ASN1_TIME_to_tm(X509_get0_notAfter(cert), &parts) == 1 ? (int64_t)timegm(&parts) : 0;
}

/* The earliest end of the list; tells of those that have ended. */
static int64_t earliest_end(const loading *l, const char *name, const STACK_OF(X509) * list) {
  int64_t earliest = 0;
  for (int i = 0; i < sk_X509_num(list); i++) {
    const X509 *cert = sk_X509_value(list, i);
    int64_t end = kvrelay_tls_not_after(cert);
    if (X509_cmp_current_time(X509_get0_notAfter(cert)) < 0)
      warn(l, "%s: certificate %d has expired", name, i + 1);
    else if (X509_cmp_current_time(X509_get0_notBefore(cert)) > 0)
      warn(l, "%s: certificate %d is not valid yet", name, i + 1);
    if (earliest == 0 || end < earliest)
      earliest = end;
  }
  return earliest;
}

static int use_chain(const loading *l, const STACK_OF(X509) * chain, EVP_PKEY *key) {
  const kvrelay_tls_config *cfg = l->cfg;
  SSL_CTX *ctx = l->material->ctx;
  X509 *own = sk_X509_value(chain, 0);
  if (X509_check_private_key(own, key) != 1)
    return refuse(l, "%s does not belong to %s", cfg->key_file, cfg->cert_file);
  if (SSL_CTX_use_certificate(ctx, own) != 1)
    return refuse(l, "%s: %s", cfg->cert_file, reason());
  if (SSL_CTX_use_PrivateKey(ctx, key) != 1)
    return refuse(l, "%s: %s", cfg->key_file, reason());
  for (int i = 1; i < sk_X509_num(chain); i++) {
    if (X509_check_issued(sk_X509_value(chain, i), sk_X509_value(chain, i - 1)) != X509_V_OK)
      warn(l, "%s: certificate %d did not issue certificate %d", cfg->cert_file, i + 1, i);
    if (SSL_CTX_add1_chain_cert(ctx, sk_X509_value(chain, i)) != 1)
      return refuse(l, "%s: certificate %d: %s", cfg->cert_file, i + 1, reason());
  }
  l->material->cert_not_after = earliest_end(l, cfg->cert_file, chain);
  return KVRELAY_TRANSPORT_OK;
}

static int load_own(const loading *l) {
  STACK_OF(X509) *chain = NULL;
  EVP_PKEY *key = NULL;
  if (l->cfg->cert_file == NULL)
    return KVRELAY_TRANSPORT_OK;
  int err = read_certificates(l, l->cfg->cert_file, &chain);
  if (err == KVRELAY_TRANSPORT_OK)
    err = read_key(l, l->cfg->key_file, &key);
  if (err == KVRELAY_TRANSPORT_OK)
    err = use_chain(l, chain, key);
  EVP_PKEY_free(key);
  sk_X509_pop_free(chain, X509_free);
  return err;
}

static int trust(const loading *l, const STACK_OF(X509) * list) {
  SSL_CTX *ctx = l->material->ctx;
  X509_STORE *store = SSL_CTX_get_cert_store(ctx);
  for (int i = 0; i < sk_X509_num(list); i++) {
    X509 *cert = sk_X509_value(list, i);
    /* A server's handshake names those authorities to the client. */
    if (X509_STORE_add_cert(store, cert) != 1 ||
        (l->cfg->server && SSL_CTX_add_client_CA(ctx, cert) != 1))
      return no_memory(l);
  }
  l->material->ca_not_after = earliest_end(l, l->cfg->ca_file, list);
  return KVRELAY_TRANSPORT_OK;
}

static int load_authorities(const loading *l) {
  STACK_OF(X509) *list = NULL;
  if (l->cfg->ca_file == NULL) {
    if (!l->cfg->server && SSL_CTX_set_default_verify_paths(l->material->ctx) != 1)
      return refuse(l, "the authorities of the system cannot be read: %s", reason());
    return KVRELAY_TRANSPORT_OK;
  }
  int err = read_certificates(l, l->cfg->ca_file, &list);
  if (err == KVRELAY_TRANSPORT_OK)
    err = trust(l, list);
  sk_X509_pop_free(list, X509_free);
  return err;
}

static int load_names(const loading *l) {
  kvrelay_tls_material *m = l->material;
  if (l->cfg->allow_len == 0)
    return KVRELAY_TRANSPORT_OK;
  m->allow = calloc(l->cfg->allow_len, sizeof *m->allow);
  if (m->allow == NULL)
    return no_memory(l);
  for (size_t i = 0; i < l->cfg->allow_len; i++) {
    const char *name = l->cfg->allow[i];
    bool dns = strncmp(name, "dns:", 4) == 0;
    if (dns ? name[4] == '\0' : strchr(name, ':') == NULL)
      return refuse(l, "the name \"%s\" is neither dns:NAME nor a URI", name);
    m->allow[i] = strdup(name);
    if (m->allow[i] == NULL)
      return no_memory(l);
    m->allow_len++;
  }
  return KVRELAY_TRANSPORT_OK;
}

/* ---- material ---- */

void kvrelay_tls_material_release(kvrelay_tls_material *m) {
  if (m == NULL || --m->users > 0)
    return;
  for (size_t i = 0; i < m->allow_len; i++)
    free(m->allow[i]);
  free(m->allow);
  SSL_CTX_free(m->ctx);
  free(m);
}

/* What holds for every context, whatever its files. */
static bool set_rules(SSL_CTX *ctx, const kvrelay_tls_config *cfg) {
  bool asks = cfg->server && cfg->ca_file != NULL;
  int verify = SSL_VERIFY_NONE;
  if (!cfg->server || asks)
    verify = SSL_VERIFY_PEER;
  if (asks && !cfg->client_optional)
    verify |= SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
  SSL_CTX_set_verify(ctx, verify, kvrelay_tls_on_verify);
  SSL_CTX_set_verify_depth(ctx, CHAIN_DEPTH);
  SSL_CTX_set_options(ctx, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION |
                               SSL_OP_CIPHER_SERVER_PREFERENCE);
  /* Idle connections keep no buffers; each read of the socket takes several records. */
  SSL_CTX_set_mode(ctx, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_read_ahead(ctx, 1);
  SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
  if (asks)
    SSL_CTX_set_options(ctx, SSL_OP_NO_TICKET);
  if (cfg->server) {
    SSL_CTX_set_client_hello_cb(ctx, kvrelay_tls_on_hello, NULL);
    SSL_CTX_set_alpn_select_cb(ctx, kvrelay_tls_on_protocols, NULL);
  }
  return SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION) == 1 &&
         SSL_CTX_set_max_proto_version(ctx, TLS1_3_VERSION) == 1 &&
         SSL_CTX_set_cipher_list(ctx, suites_12) == 1 &&
         SSL_CTX_set_ciphersuites(ctx, suites_13) == 1 &&
         (!asks || SSL_CTX_set_num_tickets(ctx, 0) == 1);
}

static int load(const kvrelay_tls_config *cfg, kvrelay_tls_material **out, char *why) {
  loading l = {cfg, calloc(1, sizeof(kvrelay_tls_material)), why};
  if (l.material == NULL)
    return no_memory(&l);
  l.material->users = 1;
  ERR_clear_error();
  l.material->ctx = SSL_CTX_new(cfg->server ? TLS_server_method() : TLS_client_method());
  int err = l.material->ctx != NULL && set_rules(l.material->ctx, cfg) ? KVRELAY_TRANSPORT_OK
                                                                       : no_memory(&l);
  if (err == KVRELAY_TRANSPORT_OK)
    err = load_own(&l);
  if (err == KVRELAY_TRANSPORT_OK)
    err = load_authorities(&l);
  if (err == KVRELAY_TRANSPORT_OK)
    err = load_names(&l);
  if (err == KVRELAY_TRANSPORT_OK)
    *out = l.material;
  else
    kvrelay_tls_material_release(l.material);
  return err;
}

/* ---- the security ---- */

static bool usable(const kvrelay_tls_config *cfg) {
  if ((cfg->cert_file == NULL) != (cfg->key_file == NULL))
    return false;
  if (cfg->allow_len > 0 && (!cfg->server || cfg->ca_file == NULL))
    return false;
  return !cfg->server || cfg->cert_file != NULL;
}

int kvrelay_tls_open(const kvrelay_tls_config *cfg, kvrelay_tls **out,
                     char why[KVRELAY_TLS_WHY_CAP]) {
  if (!usable(cfg)) {
    snprintf(why, KVRELAY_TLS_WHY_CAP, "%s", kvrelay_transport_strerror(KVRELAY_TRANSPORT_ERR_ARG));
    return KVRELAY_TRANSPORT_ERR_ARG;
  }
  kvrelay_tls *tls = calloc(1, sizeof *tls);
  if (tls == NULL || (tls->bio = kvrelay_tls_bio_method()) == NULL) {
    free(tls);
    snprintf(why, KVRELAY_TLS_WHY_CAP, "no memory");
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  }
  tls->base.session = kvrelay_tls_session_open;
  tls->server = cfg->server;
  int err = load(cfg, &tls->material, why);
  if (err == KVRELAY_TRANSPORT_OK)
    *out = tls;
  else
    kvrelay_tls_close(tls);
  return err;
}

int kvrelay_tls_reload(kvrelay_tls *tls, const kvrelay_tls_config *cfg,
                       char why[KVRELAY_TLS_WHY_CAP]) {
  kvrelay_tls_material *fresh;
  if (cfg->server != tls->server || !usable(cfg)) {
    snprintf(why, KVRELAY_TLS_WHY_CAP, "%s", kvrelay_transport_strerror(KVRELAY_TRANSPORT_ERR_ARG));
    return KVRELAY_TRANSPORT_ERR_ARG;
  }
  int err = load(cfg, &fresh, why);
  if (err != KVRELAY_TRANSPORT_OK)
    return err;
  kvrelay_tls_material_release(tls->material);
  tls->material = fresh;
  return KVRELAY_TRANSPORT_OK;
}

void kvrelay_tls_close(kvrelay_tls *tls) {
  if (tls == NULL)
    return;
  kvrelay_tls_material_release(tls->material);
  BIO_meth_free(tls->bio);
  free(tls->out);
  free(tls);
}

kvrelay_security *kvrelay_tls_security(kvrelay_tls *tls) { return &tls->base; }

int64_t kvrelay_tls_cert_not_after(const kvrelay_tls *tls) { return tls->material->cert_not_after; }

int64_t kvrelay_tls_ca_not_after(const kvrelay_tls *tls) { return tls->material->ca_not_after; }
