/* SPDX-License-Identifier: Apache-2.0 */
/* cli.h - what the subcommands of kvrelay share: options, exit codes, commands. */
#ifndef KVRELAY_CLI_H
#define KVRELAY_CLI_H

#include <stdbool.h>
#include <stdint.h>

#include "kvrelay.h"

/* Exit codes. */
enum {
  EXIT_FINE = 0,
  EXIT_NO = 1,        /* a sure "no": no match, no such model, a check failed */
  EXIT_UNDECIDED = 2, /* neither yes nor no can be said */
  EXIT_USAGE = 64,
  EXIT_UNREACHABLE = 69,
  EXIT_SYSTEM = 71,  /* lack of a resource of this machine, or output that cannot be written */
  EXIT_CONTRACT = 76 /* the other side speaks another contract */
};

typedef struct options {
  const char *target;
  const char *model, *adapter, *namespace_;
  const char *tokens_file; /* "-" = standard input */
  const char *token_ids;   /* "1,2,10-20" */
  const char *pool; /* watch, conform: namespace/component/endpoint, or the pool's identity */
  double timeout_s; /* for a first answer; conform: for each try of a scenario */
  uint64_t count;   /* watch, catalog --watch: stop after this many, 0 = never */
  bool json, watch;
  bool tls; /* also with any of the following */
  const char *tls_ca, *tls_cert, *tls_key, *tls_name;
  const char *subscriber_id;
} options;

int cmd_info(const options *o);
int cmd_catalog(const options *o);
int cmd_conform(const options *o);
int cmd_query(const options *o);
int cmd_watch(const options *o);

#endif
