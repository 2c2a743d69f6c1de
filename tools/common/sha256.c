/* SPDX-License-Identifier: Apache-2.0 */
#include "sha256.h"

#include <openssl/evp.h>
#include <stdio.h>

bool sha256_hex(const void *bytes, size_t len, char out[SHA256_HEX_CAP]) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned digest_len = 0;
  out[0] = '\0';
  if (EVP_Digest(bytes, len, digest, &digest_len, EVP_sha256(), NULL) != 1)
    return false;
  for (unsigned i = 0; i < digest_len; i++)
    snprintf(out + 2 * i, 3, "%02x", digest[i]);
  return true;
}
