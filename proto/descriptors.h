/* SPDX-License-Identifier: Apache-2.0 */
/* descriptors.h - the descriptors of proto/ and who is in them, as `make` embeds them
 * (scripts/embed-descriptors writes the source). */
#ifndef KVRELAY_DESCRIPTORS_H
#define KVRELAY_DESCRIPTORS_H

#include "kvrelay.h"

/* A .proto file; names are terminated. */
typedef struct kvrelay_descriptor_file {
  const char *name;
  /* google.protobuf.FileDescriptorProto each: of the file, then of all that it imports. */
  const kvrelay_text *descriptors;
  size_t descriptors_len;
} kvrelay_descriptor_file;

/* A service, method, message, field, oneof, enum or enum value, by its full name. */
typedef struct kvrelay_descriptor_symbol {
  const char *name;
  size_t file; /* index in kvrelay_descriptor_files */
} kvrelay_descriptor_symbol;

extern const kvrelay_descriptor_file kvrelay_descriptor_files[];
extern const size_t kvrelay_descriptor_files_len;
/* In the order of strcmp. */
extern const kvrelay_descriptor_symbol kvrelay_descriptor_symbols[];
extern const size_t kvrelay_descriptor_symbols_len;

#endif
