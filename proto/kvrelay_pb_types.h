/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay_pb_types.h - C types that kvrelay.options gives to fields of the generated structs. */

#ifndef KVRELAY_PB_TYPES_H
#define KVRELAY_PB_TYPES_H

#include "kvrelay.h"

/* A list of core structs; which ones follows from the field. */
typedef struct kvrelay_pb_list {
  void *ptr; /* lent; only read when encoding */
  size_t len;
} kvrelay_pb_list;

#endif /* KVRELAY_PB_TYPES_H */
