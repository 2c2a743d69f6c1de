/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.h - token lists from the command line and from files. */
#ifndef KVRELAY_TOKENS_H
#define KVRELAY_TOKENS_H

#include <stddef.h>
#include <stdint.h>

/*
 * Reads numbers 0 .. 4294967295 and ranges "100-195", separated by white space or single commas, or
 * a JSON list of them.  `*tokens` is malloc'ed. 0, or -1 with a message in `why` that says where
 * and what is wrong; a list that is cut off or has no token is wrong too.  At most 16 777 216
 * tokens.
 */
int tokens_parse(const char *text, size_t len, uint32_t **tokens, size_t *count, char why[640]);
/* The same from a file, "-" = standard input. */
int tokens_read(const char *path, uint32_t **tokens, size_t *count, char why[640]);

#endif
