/* SPDX-License-Identifier: Apache-2.0 */
#include "certs.h"

#include <ftw.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];
static pid_t owner;

static void need(bool good, const char *what) {
  if (good)
    return;
  perror(what);
  abort();
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at) {
  (void)info;
  (void)kind;
  (void)at;
  return remove(path);
}

static void remove_folder(void) {
  if (getpid() == owner)
    (void)nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

const char *certs_folder(void) {
  if (owner != getpid()) {
    snprintf(folder, sizeof folder, "/tmp/kvrelay-certs-XXXXXX");
    need(mkdtemp(folder) != NULL, "mkdtemp");
    owner = getpid();
    atexit(remove_folder);
  }
  return folder;
}

const char *certs_path(const char *name) {
  static char path[CERTS_PATHS][160];
  static unsigned turn;
  char *out = path[turn++ % CERTS_PATHS];
  snprintf(out, sizeof path[0], "%s/%s", certs_folder(), name);
  return out;
}

static FILE *open_file(const char *name, const char *ending, const char *mode) {
  char whole[96];
  snprintf(whole, sizeof whole, "%s%s", name, ending);
  FILE *file = fopen(certs_path(whole), mode);
  need(file != NULL, whole);
  return file;
}

static X509 *read_certificate(const char *name) {
  FILE *file = open_file(name, ".pem", "r");
  X509 *cert = PEM_read_X509(file, NULL, NULL, NULL);
  need(cert != NULL, name);
  fclose(file);
  return cert;
}

static EVP_PKEY *read_key(const char *name) {
  FILE *file = open_file(name, ".key", "r");
  EVP_PKEY *key = PEM_read_PrivateKey(file, NULL, NULL, NULL);
  need(key != NULL, name);
  fclose(file);
  return key;
}

static void extend(X509 *cert, X509 *issuer, int nid, const char *value) {
  X509V3_CTX context;
  if (value == NULL)
    return;
  X509V3_set_ctx(&context, issuer, cert, NULL, NULL, 0);
  X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, nid, value);
  need(extension != NULL && X509_add_ext(cert, extension, -1) == 1, value);
  X509_EXTENSION_free(extension);
}

void certs_make(const char *name, const char *issuer, cert_wish wish) {
  static long serial = 1;
  EVP_PKEY *key = wish.rsa ? EVP_RSA_gen(wish.rsa_bits > 0 ? (unsigned)wish.rsa_bits : 2048u)
                           : EVP_EC_gen("P-256");
  EVP_PKEY *issuer_key = issuer != NULL ? read_key(issuer) : key;
  X509 *cert = X509_new();
  X509 *issuer_cert = issuer != NULL ? read_certificate(issuer) : cert;
  need(key != NULL && cert != NULL, name);
  X509_set_version(cert, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(cert), serial++);
  int to_day = wish.to_day == 0 && wish.from_day == 0 ? 10 : wish.to_day;
  X509_time_adj_ex(X509_getm_notBefore(cert), wish.from_day, wish.from_day == 0 ? -60 : 0, NULL);
  X509_time_adj_ex(X509_getm_notAfter(cert), to_day, 0, NULL);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(cert), "CN", MBSTRING_ASC,
                             (const unsigned char *)name, -1, -1, 0);
  X509_set_issuer_name(cert, X509_get_subject_name(issuer_cert));
  X509_set_pubkey(cert, key);
  extend(cert, issuer_cert, NID_basic_constraints,
         wish.authority ? "critical,CA:TRUE" : "critical,CA:FALSE");
  extend(cert, issuer_cert, NID_ext_key_usage, wish.usage);
  extend(cert, issuer_cert, NID_subject_alt_name, wish.names);
  need(X509_sign(cert, issuer_key, EVP_sha256()) > 0, "sign");
  FILE *file = open_file(name, ".pem", "w");
  need(PEM_write_X509(file, cert) == 1 && fclose(file) == 0, name);
  file = open_file(name, ".key", "w");
  need(fchmod(fileno(file), 0600) == 0 &&
           PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL) == 1 && fclose(file) == 0,
       name);
  if (issuer != NULL) {
    X509_free(issuer_cert);
    EVP_PKEY_free(issuer_key);
  }
  X509_free(cert);
  EVP_PKEY_free(key);
}

void certs_append(const char *to, const char *from) {
  FILE *in = open_file(from, "", "r"), *out = open_file(to, "", "a");
  int c;
  while ((c = getc(in)) != EOF)
    putc(c, out);
  fclose(in);
  need(fclose(out) == 0, to);
}

void certs_write(const char *name, const char *text) {
  FILE *file = open_file(name, "", "w");
  fputs(text, file);
  need(fclose(file) == 0, name);
}

void certs_lock_key(const char *name, const char *to) {
  EVP_PKEY *key = read_key(name);
  FILE *file = open_file(to, "", "w");
  need(PEM_write_PKCS8PrivateKey(file, key, EVP_aes_128_cbc(), "secret", 6, NULL, NULL) == 1, to);
  need(fclose(file) == 0, to);
  EVP_PKEY_free(key);
}
