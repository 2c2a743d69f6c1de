/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include "text.h"
#include "trace.h"
#include "yaml_doc.h"

#define CONFIG_MAX_WORKERS 65536
#define CONFIG_MAX_RANKS 4096
#define CONFIG_TEXT_MAX 4096
#define CONFIG_LIST_MAX 65536
#define CONFIG_DEFAULT_UNIQUE_BLOCKS 1048576
#define CONFIG_MAX_UNIQUE_BLOCKS 53687091 /* more would be above CKF_MAX_BUCKETS */

/* ---- schema: what libcyaml reads, and what yaml_doc_check compares keys with ---- */

#define TEXT_REQUIRED(KEY, STRUCT, MEMBER)                                                         \
  CYAML_FIELD_STRING_PTR(KEY, CYAML_FLAG_POINTER, STRUCT, MEMBER, 0, CONFIG_TEXT_MAX)
#define TEXT(KEY, STRUCT, MEMBER)                                                                  \
  CYAML_FIELD_STRING_PTR(KEY, CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, STRUCT, MEMBER, 0,         \
                         CONFIG_TEXT_MAX)

/* May be left out.  libcyaml knows no range of a number and ignores what stands under `string`;
 * yaml_doc_check reads it there. */
#define NUMBER(KEY, STRUCT, MEMBER, MIN, MAX)                                                      \
  {                                                                                                \
    .key = KEY, .data_offset = offsetof(STRUCT, MEMBER), .value = {                                \
      .type = CYAML_UINT,                                                                          \
      .flags = CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL,                                           \
      .data_size = sizeof *((STRUCT *)NULL)->MEMBER,                                               \
      .string = {.min = MIN, .max = MAX}                                                           \
    }                                                                                              \
  }
#define EXPECTED_BLOCKS(STRUCT)                                                                    \
  NUMBER("expected_unique_blocks", STRUCT, expected_given, 1, CONFIG_MAX_UNIQUE_BLOCKS)

static const cyaml_schema_value_t text_entry = {
    CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char *, 0, CONFIG_TEXT_MAX)};

static const cyaml_strval_t event_types[] = {
    {"none", CONFIG_EVENTS_NONE}, {"engine", CONFIG_EVENTS_ENGINE}, {"trace", CONFIG_EVENTS_TRACE}};
static const cyaml_strval_t on_loss[] = {{"clear", KVRELAY_ON_LOSS_CLEAR},
                                         {"keep", KVRELAY_ON_LOSS_KEEP}};
static const cyaml_strval_t mm_identifiers[] = {{"hex64", KVRELAY_MM_HEX64},
                                                {"marker", KVRELAY_MM_MARKER}};
static const cyaml_strval_t untagged_salt[] = {{"ignore", KVRELAY_SALT_IGNORE},
                                               {"namespace", KVRELAY_SALT_NAMESPACE}};
static const cyaml_strval_t source_kinds[] = {{"raw", 0}, {"deduplicated", 1}};
static const cyaml_strval_t roles[] = {{"legacy", KVRELAY_ROLE_LEGACY},
                                       {"prefill", KVRELAY_ROLE_PREFILL},
                                       {"decode", KVRELAY_ROLE_DECODE},
                                       {"encode", KVRELAY_ROLE_ENCODE},
                                       {"aggregated", KVRELAY_ROLE_AGGREGATED}};
static const cyaml_strval_t live[] = {{"auto", CONFIG_LIVE_AUTO},
                                      {"yes", CONFIG_LIVE_YES},
                                      {"no", CONFIG_LIVE_NO},
                                      {"unknown", CONFIG_LIVE_UNKNOWN}};
static const cyaml_strval_t hash_formats[] = {{"standard", HASHFMT_FORMAT_STANDARD},
                                              {"eagle", HASHFMT_FORMAT_EAGLE}};

static const cyaml_schema_field_t events_fields[] = {
    CYAML_FIELD_ENUM("type", CYAML_FLAG_STRICT, config_events, type, event_types,
                     CYAML_ARRAY_LEN(event_types)),
    TEXT("endpoint", config_events, endpoint),
    CYAML_FIELD_BOOL("bind", CYAML_FLAG_OPTIONAL, config_events, bind),
    TEXT("replay", config_events, replay),
    TEXT("topic", config_events, topic),
    TEXT("file", config_events, file),
    CYAML_FIELD_UINT_PTR("rank_port_step", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_events,
                         rank_port_step_given),
    NUMBER("max_payload_bytes", config_events, max_payload_bytes_given, 1024, 1073741824),
    CYAML_FIELD_ENUM("on_loss", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_events, on_loss,
                     on_loss, CYAML_ARRAY_LEN(on_loss)),
    CYAML_FIELD_ENUM("mm_identifiers", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_events,
                     mm_identifiers, mm_identifiers, CYAML_ARRAY_LEN(mm_identifiers)),
    CYAML_FIELD_ENUM("untagged_salt", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_events,
                     untagged_salt, untagged_salt, CYAML_ARRAY_LEN(untagged_salt)),
    CYAML_FIELD_ENUM("source_kind", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_events,
                     source_kind, source_kinds, CYAML_ARRAY_LEN(source_kinds)),
    CYAML_FIELD_UINT_PTR("image_token_id", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_events,
                         image_token_id),
    CYAML_FIELD_UINT_PTR("video_token_id", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_events,
                         video_token_id),
    CYAML_FIELD_UINT_PTR("main_group", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_events,
                         main_group),
    NUMBER("partial_memory", config_events, partial_memory_given, 1, 16777216),
    NUMBER("disconnect_keep_s", config_events, disconnect_keep_s_given, 0, 31536000),
    NUMBER("replay_timeout_s", config_events, replay_timeout_s_given, 1, 3600),
    NUMBER("recovery_interval_s", config_events, recovery_interval_s_given, 1, 86400),
    NUMBER("hold_batches", config_events, hold_batches_given, 1, 1048576),
    NUMBER("hold_bytes", config_events, hold_bytes_given, 1024, 1073741824),
    CYAML_FIELD_END};

static const cyaml_schema_field_t worker_fields[] = {
    CYAML_FIELD_UINT("id", CYAML_FLAG_DEFAULT, config_worker, id),
    CYAML_FIELD_ENUM("role", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_worker, role, roles,
                     CYAML_ARRAY_LEN(roles)),
    CYAML_FIELD_UINT("rank_start", CYAML_FLAG_OPTIONAL, config_worker, rank_start),
    CYAML_FIELD_UINT_PTR("ranks", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_worker,
                         ranks_given),
    CYAML_FIELD_UINT("total_kv_blocks", CYAML_FLAG_OPTIONAL, config_worker, total_kv_blocks),
    CYAML_FIELD_ENUM("live", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_worker, live, live,
                     CYAML_ARRAY_LEN(live)),
    CYAML_FIELD_IGNORE("needs", CYAML_FLAG_OPTIONAL), /* lists of lists, see read_needs */
    CYAML_FIELD_SEQUENCE("adapters", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_worker,
                         adapters, &text_entry, 0, CONFIG_LIST_MAX),
    CYAML_FIELD_MAPPING("events", CYAML_FLAG_OPTIONAL, config_worker, events, events_fields),
    CYAML_FIELD_END};
static const cyaml_schema_value_t worker_entry = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, config_worker, worker_fields)};

static const cyaml_schema_field_t adapter_fields[] = {
    TEXT_REQUIRED("id", config_adapter, id), TEXT("runtime_name", config_adapter, runtime_name),
    CYAML_FIELD_SEQUENCE("aliases", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_adapter,
                         aliases, &text_entry, 0, CONFIG_LIST_MAX),
    CYAML_FIELD_END};
static const cyaml_schema_value_t adapter_entry = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, config_adapter, adapter_fields)};

static const cyaml_schema_field_t endpoint_fields[] = {
    TEXT_REQUIRED("namespace", config_endpoint, namespace_),
    TEXT_REQUIRED("component", config_endpoint, component),
    TEXT_REQUIRED("endpoint", config_endpoint, endpoint),
    TEXT_REQUIRED("model", config_endpoint, model),
    CYAML_FIELD_SEQUENCE("aliases", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_endpoint,
                         aliases, &text_entry, 0, CONFIG_LIST_MAX),
    TEXT("model_source", config_endpoint, model_source),
    CYAML_FIELD_UINT("block_size", CYAML_FLAG_OPTIONAL, config_endpoint, block_size),
    CYAML_FIELD_ENUM("hash_format", CYAML_FLAG_OPTIONAL | CYAML_FLAG_STRICT, config_endpoint,
                     hash_format, hash_formats, CYAML_ARRAY_LEN(hash_formats)),
    EXPECTED_BLOCKS(config_endpoint),
    /* maps with free keys: read from the document, see read_map */
    CYAML_FIELD_IGNORE("semantics", CYAML_FLAG_OPTIONAL),
    CYAML_FIELD_IGNORE("routing_scope", CYAML_FLAG_OPTIONAL),
    CYAML_FIELD_SEQUENCE("adapters", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_endpoint,
                         adapters, &adapter_entry, 0, CONFIG_LIST_MAX),
    CYAML_FIELD_SEQUENCE("workers", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_endpoint,
                         workers, &worker_entry, 0, CONFIG_MAX_WORKERS),
    CYAML_FIELD_END};
static const cyaml_schema_value_t endpoint_entry = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, config_endpoint, endpoint_fields)};

static const cyaml_schema_field_t tls_fields[] = {
    TEXT_REQUIRED("cert", config_tls, cert), TEXT_REQUIRED("key", config_tls, key),
    TEXT("client_ca", config_tls, client_ca),
    CYAML_FIELD_SEQUENCE("allow", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_tls, allow,
                         &text_entry, 0, CONFIG_LIST_MAX),
    CYAML_FIELD_END};

static const cyaml_schema_field_t relay_fields[] = {
    TEXT_REQUIRED("dc", config_relay, dc),
    TEXT("bind", config_relay, bind),
    TEXT("raw_bind", config_relay, raw_bind),
    EXPECTED_BLOCKS(config_relay),
    CYAML_FIELD_MAPPING_PTR("tls", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config_relay, tls,
                            tls_fields),
    CYAML_FIELD_END};

static const cyaml_schema_field_t config_fields[] = {
    CYAML_FIELD_UINT("version", CYAML_FLAG_DEFAULT, config, version),
    CYAML_FIELD_MAPPING("relay", CYAML_FLAG_DEFAULT, config, relay, relay_fields),
    CYAML_FIELD_SEQUENCE("endpoints", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, config, endpoints,
                         &endpoint_entry, 0, CONFIG_LIST_MAX),
    CYAML_FIELD_END};
static const cyaml_schema_value_t config_schema = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, config, config_fields)};

/* Nothing of libcyaml's is printed: what a file can get wrong, yaml_doc_check has found before. */
static const cyaml_config_t cyaml_settings = {.mem_fn = cyaml_mem, .flags = CYAML_CFG_NO_ALIAS};

/* ---- rules: each reports the place, the key and what would be accepted ---- */

#define PATH_CAP 256
#define LETTERS_AND_DIGITS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
#define SOCKET_PATH_CAP sizeof((struct sockaddr_un *)NULL)->sun_path
#define SECOND_NS ((uint64_t)1000000000)

/* A path for a message; a longer one is cut. */
static const char *place(char out[PATH_CAP], const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static const char *place(char out[PATH_CAP], const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(out, PATH_CAP, format, args);
  va_end(args);
  return out;
}

static void check_text(yaml_doc *doc, const char *path, const char *s) {
  if (s == NULL)
    return;
  if (!kvrelay_text_valid(text_of(s))) {
    yaml_doc_error(doc, path, "must be UTF-8, not empty, without white space at either end");
    return;
  }
  for (const unsigned char *p = (const unsigned char *)s; *p != 0; p++)
    if (*p < 0x20 || *p == 0x7F || (*p == 0xC2 && p[1] >= 0x80 && p[1] <= 0x9F)) {
      yaml_doc_error(doc, path, "control characters are not accepted");
      return;
    }
}

static bool host_numeric(const char *host, size_t len) {
  char text[64];
  unsigned char out[16];
  if (len == 0 || len >= sizeof text)
    return false;
  memcpy(text, host, len);
  text[len] = 0;
  if (text[0] == '[' && text[len - 1] == ']') {
    text[len - 1] = 0;
    return inet_pton(AF_INET6, text + 1, out) == 1;
  }
  return inet_pton(AF_INET, text, out) == 1;
}

/* `colon` is NULL or stands before the port. */
static bool port_read(const char *colon, unsigned long *port) {
  char *end;
  if (colon == NULL || colon[1] < '0' || colon[1] > '9')
    return false;
  *port = strtoul(colon + 1, &end, 10);
  return *end == 0 && *port <= 65535;
}

bool config_bind_valid(const char *address) {
  const char *colon = strrchr(address, ':');
  unsigned long port;
  return port_read(colon, &port) && host_numeric(address, (size_t)(colon - address));
}

/* libzmq's rules: a name is asked for when it connects, never when it binds. */
static bool host_usable(const char *host, size_t len, bool bind) {
  char name[256];
  if (len == 0 || len >= sizeof name)
    return false;
  memcpy(name, host, len);
  name[len] = 0;
  if (bind)
    return strcmp(name, "*") == 0 || host_numeric(name, len) || if_nametoindex(name) != 0;
  return strspn(name, LETTERS_AND_DIGITS "[:") > 0 &&
         strspn(name, LETTERS_AND_DIGITS "[]:.-%;_") == len;
}

/* What libzmq takes for every rank of the worker, but nothing of its own choice, which no engine
 * could know. */
static bool check_source_address(yaml_doc *doc, const config_worker *w, const char *address,
                                 bool bind, const char *path) {
  const uint32_t others = w->ranks == 0 ? 0 : w->ranks - 1;
  const char *colon = strrchr(address, ':');
  const bool ipc = strncmp(address, "ipc://", 6) == 0 && strcmp(address, "ipc://*") != 0,
             inproc = strncmp(address, "inproc://", 9) == 0,
             tcp = strncmp(address, "tcp://", 6) == 0;
  const char *name = address + (inproc ? 9 : tcp || ipc ? 6 : 0);
  const unsigned errors = doc->errors;
  unsigned long port = 0;
  char suffix[16] = "";
  if (others != 0)
    snprintf(suffix, sizeof suffix, "_dp%" PRIu32, others);
  if (name[0] == 0 || !(ipc || inproc || tcp) ||
      (tcp && (!port_read(colon, &port) || port == 0 || colon <= name)))
    yaml_doc_error(doc, path, "must be tcp://host:port, ipc://path or inproc://name");
  else if (ipc && strlen(name) + strlen(suffix) >= SOCKET_PATH_CAP)
    yaml_doc_error(doc, path, "the path '%s%s' of a socket is longer than %zu bytes", name, suffix,
                   SOCKET_PATH_CAP - 1);
  else if (inproc && strlen(address) + strlen(suffix) > 255)
    yaml_doc_error(doc, path, "longer than 255 bytes with the suffix of the last rank");
  else if (tcp && !host_usable(name, (size_t)(colon - name), bind))
    yaml_doc_error(doc, path,
                   bind ? "with bind: true the host must be *, a numeric address or a network "
                          "interface of this machine"
                        : "cannot be connected to; give the engine's address, for example "
                          "tcp://10.0.0.5:5557 (* only in 'endpoint' with bind: true)");
  else if (tcp && port + (uint64_t)others * w->events.rank_port_step > 65535)
    yaml_doc_error(doc, path, "the port of rank %" PRIu32 " is beyond 65535",
                   w->rank_start + others);
  return doc->errors == errors;
}

/* Batches and replies come from two sockets of the engine.  Whether another rank's are met depends
 * on what the engine adds to a port, so that is a warning only. */
static void check_apart(yaml_doc *doc, const config_worker *w, const char *path) {
  const char *a = w->events.endpoint, *b = w->events.replay;
  const char *host_end = strrchr(a, ':');
  const size_t host_len = (size_t)(host_end - a);
  const uint32_t step = w->events.rank_port_step;
  if (strcmp(a, b) == 0) {
    yaml_doc_error(doc, path,
                   "equal to 'endpoint'; an engine listens for replay requests at an address of "
                   "its own");
    return;
  }
  if (strncmp(a, "tcp://", 6) != 0 || strncmp(a, b, host_len + 1) != 0 ||
      strrchr(b, ':') != b + host_len || step == 0)
    return;
  const unsigned long x = strtoul(host_end + 1, NULL, 10), y = strtoul(b + host_len + 1, NULL, 10);
  const unsigned long between = x < y ? y - x : x - y;
  if (between == 0)
    yaml_doc_error(doc, path, "the port of 'endpoint'");
  else if (between % step == 0 && between / step < w->ranks)
    yaml_doc_warning(doc, path,
                     "rank %lu's %s has this port too; keep the two %" PRIu64
                     " ports apart, or set rank_port_step to what the engine adds for each rank",
                     w->rank_start + between / step, x < y ? "'endpoint'" : "'replay'",
                     (uint64_t)w->ranks * step);
}

static void check_source_addresses(yaml_doc *doc, const config_worker *w, const char *path) {
  const config_events *ev = &w->events;
  char at[PATH_CAP];
  bool good = ev->endpoint != NULL;
  if (good)
    good =
        check_source_address(doc, w, ev->endpoint, ev->bind, place(at, "%s/events/endpoint", path));
  if (ev->replay != NULL &&
      check_source_address(doc, w, ev->replay, false, place(at, "%s/events/replay", path)) && good)
    check_apart(doc, w, at);
}

static config_map_entry *read_map(yaml_doc *doc, const char *path, unsigned *count) {
  yaml_node_t *node = yaml_doc_find(doc, path);
  *count = 0;
  if (node == NULL)
    return NULL;
  size_t pairs = node->type == YAML_MAPPING_NODE
                     ? (size_t)(node->data.mapping.pairs.top - node->data.mapping.pairs.start)
                     : 0;
  if (pairs == 0 || pairs > 32) {
    yaml_doc_error(doc, path,
                   "must be a mapping of 1 to 32 entries; leave the key out to have no map");
    return NULL;
  }
  config_map_entry *map = calloc(pairs, sizeof *map);
  for (size_t i = 0; map != NULL && i < pairs; i++) {
    yaml_node_pair_t *pair = &node->data.mapping.pairs.start[i];
    size_t key_len, value_len;
    const char *key = yaml_doc_text(yaml_document_get_node(&doc->document, pair->key), &key_len);
    const char *value =
        yaml_doc_text(yaml_document_get_node(&doc->document, pair->value), &value_len);
    if (key == NULL || value == NULL || strlen(key) != key_len || strlen(value) != value_len ||
        key_len < 1 || key_len > 128 || value_len < 1 || value_len > 1024) {
      yaml_doc_error(doc, path,
                     "entry %zu: a key is 1 to 128 bytes and a value 1 to 1024 bytes of text",
                     i + 1);
      continue;
    }
    for (unsigned j = 0; j < *count; j++)
      if (strcmp(map[j].key, key) == 0)
        yaml_doc_error(doc, path, "the key '%s' stands twice", key);
    map[*count].key = strdup(key);
    map[(*count)++].value = strdup(value);
  }
  return map;
}

static int32_t role_named(const char *name) {
  for (size_t i = 0; name != NULL && i < CYAML_ARRAY_LEN(roles); i++)
    if (strcmp(roles[i].str, name) == 0)
      return (int32_t)roles[i].val;
  return 0;
}

/* One alternative; false when it is not a list of 1 to 5 different roles. */
static bool read_need(yaml_doc *doc, yaml_node_t *node, config_need *need) {
  if (node->type != YAML_SEQUENCE_NODE)
    return false;
  const yaml_node_item_t *item = node->data.sequence.items.start;
  for (; item < node->data.sequence.items.top; item++) {
    size_t len;
    const int32_t role =
        role_named(yaml_doc_text(yaml_document_get_node(&doc->document, *item), &len));
    for (size_t i = 0; i < need->len; i++)
      if (need->roles[i] == role)
        return false;
    if (role == 0 || need->len == CYAML_ARRAY_LEN(need->roles))
      return false;
    need->roles[need->len++] = role;
  }
  return need->len != 0;
}

static void read_needs(yaml_doc *doc, config_worker *w, const char *path) {
  yaml_node_t *node = yaml_doc_find(doc, path);
  char words[YAML_DOC_WORDS_CAP];
  if (node == NULL)
    return;
  const size_t count =
      node->type == YAML_SEQUENCE_NODE
          ? (size_t)(node->data.sequence.items.top - node->data.sequence.items.start)
          : 0;
  w->needs = count == 0 || count > CONFIG_LIST_MAX ? NULL : calloc(count, sizeof *w->needs);
  for (; w->needs != NULL && w->needs_count < count; w->needs_count++)
    if (!read_need(
            doc,
            yaml_document_get_node(&doc->document, node->data.sequence.items.start[w->needs_count]),
            &w->needs[w->needs_count]))
      break;
  if (count == 0 || w->needs_count < count)
    yaml_doc_error(
        doc, path,
        "must be a list of alternatives, each a list of different roles (%s), for example "
        "[[decode], [aggregated]]",
        yaml_doc_words(roles, CYAML_ARRAY_LEN(roles), words));
}

/* Limits of what waits behind a gap. */
static void default_replay(config_events *ev) {
  const kvrelay_source_config standard = kvrelay_source_config_default();
  ev->replay_timeout_s = ev->replay_timeout_s_given == NULL ? standard.replay_timeout_ns / SECOND_NS
                                                            : *ev->replay_timeout_s_given;
  ev->recovery_interval_s = ev->recovery_interval_s_given == NULL
                                ? standard.recovery_interval_ns / SECOND_NS
                                : *ev->recovery_interval_s_given;
  ev->hold_batches =
      ev->hold_batches_given == NULL ? standard.hold_batches : *ev->hold_batches_given;
  ev->hold_bytes = ev->hold_bytes_given == NULL ? standard.hold_bytes : *ev->hold_bytes_given;
}

/* From here on the path holds from everywhere. */
static bool resolve_file(const yaml_doc *doc, config_events *ev) {
  const char *slash = strrchr(doc->path, '/');
  const int folder_len = slash == NULL || ev->file[0] == '/' ? 0 : (int)(slash + 1 - doc->path);
  const size_t cap = (size_t)folder_len + strlen(ev->file) + 1;
  char *full = malloc(cap);
  if (full == NULL)
    return false;
  snprintf(full, cap, "%.*s%s", folder_len, doc->path, ev->file);
  free(ev->file);
  ev->file = full;
  return true;
}

/* The recording is there, whole, and of what the worker has. */
static void check_recording(yaml_doc *doc, config_worker *w, const char *path) {
  char at[PATH_CAP], why[128];
  config_events *ev = &w->events;
  trace t;
  trace_record record;
  int more = 1;
  place(at, "%s/events/file", path);
  if (w->ranks > 1 && ev->rank_port_step != 0)
    yaml_doc_error(doc, at,
                   "a recording is what one socket sent, and that is one rank: give each rank's "
                   "recording a worker with ranks: 1, or, when each batch names its rank, say "
                   "rank_port_step: 0");
  if (!resolve_file(doc, ev) || trace_open(&t, ev->file) != 0) {
    yaml_doc_error(doc, at,
                   "%s cannot be opened: %s; a relative path starts at the folder of this "
                   "file",
                   ev->file, strerror(errno));
    doc->unreadable++;
    return;
  }
  while (more == 1)
    more = trace_next(&t, &record, why);
  trace_close(&t);
  if (more < 0) {
    yaml_doc_error(doc, at, "%s is no whole recording: %s", ev->file, why);
    doc->unreadable++;
  }
}

static void check_events(yaml_doc *doc, config_events *ev, const char *path) {
  char at[PATH_CAP];
  bool engine = ev->type == CONFIG_EVENTS_ENGINE, recorded = ev->type == CONFIG_EVENTS_TRACE;
  if (engine && ev->endpoint == NULL)
    yaml_doc_error(doc, path, "type 'engine' needs 'endpoint', for example tcp://10.0.0.5:5557");
  if (!engine && ev->endpoint != NULL)
    yaml_doc_error(doc, place(at, "%s/endpoint", path), "only type 'engine' has an endpoint");
  if (!engine && ev->replay != NULL)
    yaml_doc_error(doc, place(at, "%s/replay", path), "only type 'engine' can be asked again");
  if (recorded && ev->file == NULL)
    yaml_doc_error(doc, path, "type 'trace' needs 'file', the path of a recorded stream");
  if (!recorded && ev->file != NULL)
    yaml_doc_error(doc, place(at, "%s/file", path), "only type 'trace' has a file");
  ev->disconnect_keep_s = ev->disconnect_keep_s_given == NULL ? 60 : *ev->disconnect_keep_s_given;
  ev->rank_port_step = ev->rank_port_step_given == NULL ? 1 : *ev->rank_port_step_given;
  ev->max_payload_bytes =
      ev->max_payload_bytes_given == NULL ? (uint64_t)64 << 20 : *ev->max_payload_bytes_given;
  ev->partial_memory = ev->partial_memory_given == NULL
                           ? kvrelay_source_config_default().partial_memory
                           : *ev->partial_memory_given;
  default_replay(ev);
}

static void check_worker(yaml_doc *doc, config_endpoint *e, unsigned index, const char *path) {
  char at[PATH_CAP];
  config_worker *w = &e->workers[index];
  w->ranks = w->ranks_given == NULL ? 1 : *w->ranks_given;
  if (w->role == 0)
    w->role = KVRELAY_ROLE_LEGACY;
  for (unsigned i = 0; i < index; i++)
    if (e->workers[i].id == w->id)
      yaml_doc_error(doc, place(at, "%s/id", path), "worker %llu stands twice in this endpoint",
                     (unsigned long long)w->id);
  if (w->ranks < 1 || w->ranks > CONFIG_MAX_RANKS || w->rank_start > UINT32_MAX - w->ranks) {
    yaml_doc_warning(doc, place(at, "%s/ranks", path),
                     "must be 1 to %d, and rank_start + ranks below 2^32; the worker counts as one "
                     "without ranks",
                     CONFIG_MAX_RANKS);
    w->ranks = 0;
  }
  for (unsigned i = 0; i < w->adapters_count; i++) {
    bool known = false;
    for (unsigned j = 0; j < e->adapters_count && !known; j++)
      known = strcmp(e->adapters[j].id, w->adapters[i]) == 0;
    if (!known)
      yaml_doc_error(doc, place(at, "%s/adapters/%u", path, i),
                     "no adapter of this endpoint has the id '%s'", w->adapters[i]);
  }
  read_needs(doc, w, place(at, "%s/needs", path));
  check_events(doc, &w->events, place(at, "%s/events", path));
  if (w->events.type == CONFIG_EVENTS_TRACE && w->events.file != NULL)
    check_recording(doc, w, path);
  check_source_addresses(doc, w, path);
}

static void check_endpoint(yaml_doc *doc, config *c, unsigned index) {
  char path[PATH_CAP], at[PATH_CAP];
  config_endpoint *e = &c->endpoints[index];
  place(path, "endpoints/%u", index);
  check_text(doc, place(at, "%s/namespace", path), e->namespace_);
  check_text(doc, place(at, "%s/component", path), e->component);
  check_text(doc, place(at, "%s/endpoint", path), e->endpoint);
  check_text(doc, place(at, "%s/model", path), e->model);
  check_text(doc, place(at, "%s/model_source", path), e->model_source);
  for (unsigned i = 0; i < e->aliases_count; i++)
    check_text(doc, place(at, "%s/aliases/%u", path, i), e->aliases[i]);
  for (unsigned i = 0; i < index; i++) {
    const config_endpoint *o = &c->endpoints[i];
    if (strcmp(o->namespace_, e->namespace_) == 0 && strcmp(o->component, e->component) == 0 &&
        strcmp(o->endpoint, e->endpoint) == 0)
      yaml_doc_error(doc, path, "%s/%s/%s stands twice; put all its workers into one entry",
                     e->namespace_, e->component, e->endpoint);
  }
  if (e->model_source == NULL)
    e->model_source = strdup(e->model);
  if (e->hash_format == 0)
    e->hash_format = HASHFMT_FORMAT_STANDARD;
  if (e->block_size == 0)
    yaml_doc_warning(doc, path, "no block_size: this endpoint gets no pool");
  e->expected_unique_blocks =
      e->expected_given == NULL ? c->relay.expected_unique_blocks : *e->expected_given;
  e->semantics = read_map(doc, place(at, "%s/semantics", path), &e->semantics_count);
  e->routing_scope = read_map(doc, place(at, "%s/routing_scope", path), &e->routing_scope_count);
  for (unsigned i = 0; i < e->adapters_count; i++) {
    config_adapter *a = &e->adapters[i];
    check_text(doc, place(at, "%s/adapters/%u/id", path, i), a->id);
    check_text(doc, place(at, "%s/adapters/%u/runtime_name", path, i), a->runtime_name);
    for (unsigned j = 0; j < a->aliases_count; j++)
      check_text(doc, place(at, "%s/adapters/%u/aliases/%u", path, i, j), a->aliases[j]);
    for (unsigned j = 0; j < i; j++)
      if (strcmp(e->adapters[j].id, a->id) == 0)
        yaml_doc_error(doc, place(at, "%s/adapters/%u", path, i), "adapter '%s' stands twice",
                       a->id);
    if (a->runtime_name == NULL)
      a->runtime_name = strdup(a->id);
  }
  for (unsigned i = 0; i < e->workers_count; i++)
    check_worker(doc, e, i, place(at, "%s/workers/%u", path, i));
}

kvrelay_tls_config config_tls_of(const config_tls *tls) {
  return (kvrelay_tls_config){.server = true,
                              .cert_file = tls->cert,
                              .key_file = tls->key,
                              .ca_file = tls->client_ca,
                              .allow = (const char *const *)tls->allow,
                              .allow_len = tls->allow_count};
}

/* The files are read, too: a start would need them. */
static void check_tls(yaml_doc *doc, const config_relay *r) {
  char why[KVRELAY_TLS_WHY_CAP];
  kvrelay_tls *tls = NULL;
  if (r->tls == NULL)
    return;
  if (r->tls->allow_count > 0 && r->tls->client_ca == NULL) {
    yaml_doc_error(doc, "relay/tls/allow",
                   "needs client_ca: nobody else's names are to be trusted");
    return;
  }
  const kvrelay_tls_config cfg = config_tls_of(r->tls);
  if (kvrelay_tls_open(&cfg, &tls, why) != KVRELAY_TRANSPORT_OK)
    yaml_doc_error(doc, "relay/tls", "%s", why);
  kvrelay_tls_close(tls);
}

static void check_rules(yaml_doc *doc, config *c) {
  if (c->version != 1)
    yaml_doc_error(doc, "version", "must be 1");
  check_text(doc, "relay/dc", c->relay.dc);
  if (c->relay.bind != NULL && !config_bind_valid(c->relay.bind))
    yaml_doc_error(doc, "relay/bind", CONFIG_BIND_FORM);
  if (c->relay.raw_bind != NULL && !config_bind_valid(c->relay.raw_bind))
    yaml_doc_error(doc, "relay/raw_bind", CONFIG_BIND_FORM);
  check_tls(doc, &c->relay);
  c->relay.expected_unique_blocks =
      c->relay.expected_given == NULL ? CONFIG_DEFAULT_UNIQUE_BLOCKS : *c->relay.expected_given;
  unsigned workers = 0;
  for (unsigned i = 0; i < c->endpoints_count; i++) {
    check_endpoint(doc, c, i);
    workers += c->endpoints[i].workers_count;
  }
  if (workers > CONFIG_MAX_WORKERS)
    yaml_doc_error(doc, "endpoints", "more than %d workers", CONFIG_MAX_WORKERS);
}

/* ---- loading ---- */

static void free_loaded(config *c) {
  for (unsigned i = 0; i < c->endpoints_count; i++) {
    config_endpoint *e = &c->endpoints[i];
    for (unsigned j = 0; j < e->semantics_count; j++) {
      free(e->semantics[j].key);
      free(e->semantics[j].value);
    }
    for (unsigned j = 0; j < e->routing_scope_count; j++) {
      free(e->routing_scope[j].key);
      free(e->routing_scope[j].value);
    }
    for (unsigned j = 0; j < e->workers_count; j++)
      free(e->workers[j].needs);
    free(e->semantics);
    free(e->routing_scope);
  }
  cyaml_free(&cyaml_settings, &config_schema, c, 0);
}

void config_free(config *c) {
  if (c != NULL)
    free_loaded(c);
}

config *config_load(const char *path, FILE *report, int *exit_code) {
  yaml_doc doc;
  config *c = NULL;
  *exit_code = yaml_doc_read(&doc, path, report);
  if (*exit_code == 0)
    yaml_doc_check(&doc, &config_schema);
  if (*exit_code == 0 && doc.errors == 0) {
    cyaml_err_t err = cyaml_load_data(doc.bytes, doc.len, &cyaml_settings, &config_schema,
                                      (cyaml_data_t **)&c, NULL);
    if (err != CYAML_OK)
      yaml_doc_error(&doc, "", "cannot be loaded: %s", cyaml_strerror(err));
    else
      check_rules(&doc, c);
  }
  if (*exit_code == 0 && doc.errors != 0)
    *exit_code = doc.errors == doc.unreadable ? 69 : 78;
  if (*exit_code != 0 && c != NULL) {
    free_loaded(c);
    c = NULL;
  }
  yaml_doc_free(&doc);
  return c;
}
