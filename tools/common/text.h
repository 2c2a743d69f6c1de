/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - terminated strings as the cores' counted texts. */
#ifndef KVRELAY_TOOLS_TEXT_H
#define KVRELAY_TOOLS_TEXT_H

#include <string.h>

#include "kvrelay.h"

/* Lent from `s`; NULL is the empty text. */
static inline kvrelay_text text_of(const char *s) {
  kvrelay_text t = {(const uint8_t *)s, s == NULL ? 0 : strlen(s)};
  return t;
}

#endif
