/* SPDX-License-Identifier: Apache-2.0 */
/* certs.h - certificates that a test makes for itself, good ones and wrong ones. */
#ifndef KVRELAY_TEST_CERTS_H
#define KVRELAY_TEST_CERTS_H

#include <openssl/x509.h>
#include <stdbool.h>

typedef struct cert_wish {
  const char *names;    /* alternative names, "DNS:a.example,IP:::1,URI:spiffe://a/b"; NULL: none */
  const char *usage;    /* extended key usage, "serverAuth"; NULL: any */
  int from_day, to_day; /* valid from then to then, counted from now; 0 and 0: now, for ten days */
  bool authority;       /* may issue others */
  bool rsa;             /* else on the curve P-256, which is quicker */
  int rsa_bits;         /* 0: 2048 */
} cert_wish;

/* A folder of this process that goes away when it ends. */
const char *certs_folder(void);
/* FOLDER/name; CERTS_PATHS results may be in use at once. */
#define CERTS_PATHS 64
const char *certs_path(const char *name);
/*
 * Makes NAME.pem, with the common name NAME, and NAME.key in the folder, issued by ISSUER.pem;
 * NULL: by itself.  The test fails when it cannot.
 */
void certs_make(const char *name, const char *issuer, cert_wish wish);
/* Appends one file of the folder to another, as `cat`. */
void certs_append(const char *to, const char *from);
/* Writes a text file. */
void certs_write(const char *name, const char *text);
/* Writes the key of `name` as `to`, protected by a passphrase. */
void certs_lock_key(const char *name, const char *to);

#endif
