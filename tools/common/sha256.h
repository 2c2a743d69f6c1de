/* SPDX-License-Identifier: Apache-2.0 */
/* sha256.h - SHA-256 as text. */
#ifndef KVRELAY_TOOLS_SHA256_H
#define KVRELAY_TOOLS_SHA256_H

#include <stdbool.h>
#include <stddef.h>

#define SHA256_HEX_CAP 65

/* Lower-case hex of the digest, terminated.  false: the library has none, `out` is empty then. */
bool sha256_hex(const void *bytes, size_t len, char out[SHA256_HEX_CAP]);

#endif
