/* SPDX-License-Identifier: Apache-2.0 */
/* config.h - the daemon's YAML file: one declarative description of a data centre. */
#ifndef KVRELAYD_CONFIG_H
#define KVRELAYD_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kvrelay.h"
#include "tls/tls.h"

enum config_event_type { CONFIG_EVENTS_NONE = 0, CONFIG_EVENTS_ENGINE, CONFIG_EVENTS_TRACE };

/* `events` of a worker.  Pointers are NULL and numbers are their default when the file leaves them
 * out. */
typedef struct config_events {
  int type;       /* enum config_event_type */
  char *endpoint; /* engine: ZeroMQ address of rank rank_start */
  bool bind; /* engine: listen there instead of connecting (engines whose endpoint has no wildcard
                connect) */
  char *replay; /* engine: address that sends batches again; NULL = none */
  char *topic;  /* engine: prefix */
  char *file;   /* trace: path; one that was relative now starts at the folder of the file */
  uint32_t
      rank_port_step; /* rank r of the worker uses port + r * step; 0 = one socket for all ranks */
  uint64_t max_payload_bytes;
  uint64_t replay_timeout_s, recovery_interval_s;
  uint32_t hold_batches, hold_bytes;
  int on_loss, mm_identifiers, untagged_salt, source_kind;
  uint32_t *image_token_id, *video_token_id, *main_group;
  uint32_t partial_memory;
  uint32_t *rank_port_step_given, *partial_memory_given; /* as in the file; NULL = left out */
  uint64_t *max_payload_bytes_given, *replay_timeout_s_given, *recovery_interval_s_given;
  uint32_t *hold_batches_given, *hold_bytes_given;
  uint64_t disconnect_keep_s; /* how long an engine that is gone keeps its blocks; 0 = for ever */
  uint64_t *disconnect_keep_s_given;
} config_events;

enum config_live { CONFIG_LIVE_AUTO = 0, CONFIG_LIVE_YES, CONFIG_LIVE_NO, CONFIG_LIVE_UNKNOWN };

/* Roles one alternative of `needs` wants present. */
typedef struct config_need {
  int32_t roles[5];
  size_t len;
} config_need;

typedef struct config_worker {
  uint64_t id;
  int32_t role; /* enum kvrelay_role */
  uint32_t rank_start;
  uint32_t ranks;
  uint32_t *ranks_given;
  uint64_t total_kv_blocks; /* per rank, 0 = unknown */
  int live;                 /* enum config_live */
  config_need *needs;       /* alternatives; read beside the schema */
  unsigned needs_count;
  char **adapters; /* ids of the endpoint's adapters that this worker carries */
  unsigned adapters_count;
  config_events events;
} config_worker;

typedef struct config_adapter {
  char *id;
  char *runtime_name; /* never NULL after loading */
  char **aliases;
  unsigned aliases_count;
} config_adapter;

typedef struct config_map_entry {
  char *key, *value;
} config_map_entry;

typedef struct config_endpoint {
  char *namespace_, *component, *endpoint;
  char *model;
  char **aliases;
  unsigned aliases_count;
  char *model_source;  /* never NULL after loading */
  uint32_t block_size; /* tokens; 0: no pool */
  int32_t hash_format; /* HASHFMT_FORMAT_* */
  uint64_t expected_unique_blocks;
  uint64_t *expected_given;
  config_map_entry *semantics, *routing_scope; /* explicit identity maps, read beside the schema */
  unsigned semantics_count, routing_scope_count;
  config_adapter *adapters;
  unsigned adapters_count;
  config_worker *workers;
  unsigned workers_count;
} config_endpoint;

/* Files are PEM, see kvrelay_tls_config. */
typedef struct config_tls {
  char *cert, *key;
  char *client_ca; /* NULL: clients need no certificate */
  char **allow;
  unsigned allow_count;
} config_tls;

typedef struct config_relay {
  char *dc;
  char *bind, *raw_bind; /* NULL: no listener */
  config_tls *tls;       /* NULL: plaintext */
  uint64_t expected_unique_blocks;
  uint64_t *expected_given;
} config_relay;

typedef struct config {
  uint32_t version;
  config_relay relay;
  config_endpoint *endpoints;
  unsigned endpoints_count;
} config;

/*
 * Reads and checks the whole file.  Every problem is written to `report`, one line each:
 * file:line:column: key: what is wrong and what would be accepted; warnings start with "warning:"
 * behind the place.  Returns the configuration, which config_free takes back, or NULL after at
 * least one error line; `*exit_code` is then 69 (cannot be read, or only a recording cannot) or
 * 78 (not valid).
 */
config *config_load(const char *path, FILE *report, int *exit_code);
void config_free(config *c);

/* The same for kvrelay_tls_open, without anybody to warn. */
kvrelay_tls_config config_tls_of(const config_tls *tls);

/* Whether relay.bind, --bind and the like take it; CONFIG_BIND_FORM says what they take. */
bool config_bind_valid(const char *address);
#define CONFIG_BIND_FORM                                                                           \
  "must be a numeric address and port, for example 127.0.0.1:5561 or [::1]:5561"

#endif
