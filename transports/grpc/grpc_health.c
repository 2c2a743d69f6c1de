/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_health.h"

#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "health.pb.h"

#define NOT_TOLD (-1)
/* Of an entry in the answer of List: its name, and less than 16 bytes around it. */
#define LIST_CAP (KVRELAY_GRPC_HEALTH_SERVICES * (KVRELAY_GRPC_HEALTH_NAME_MAX + 16))

enum method { METHOD_CHECK, METHOD_WATCH, METHOD_LIST, METHOD_COUNT };
static const char *const paths[METHOD_COUNT] = {"/" KVRELAY_GRPC_HEALTH_NAME "/Check",
                                                "/" KVRELAY_GRPC_HEALTH_NAME "/Watch",
                                                "/" KVRELAY_GRPC_HEALTH_NAME "/List"};

typedef struct service_name {
  uint8_t bytes[KVRELAY_GRPC_HEALTH_NAME_MAX];
  size_t len; /* larger: a name too long for anybody to set */
} service_name;

typedef struct health_call {
  TAILQ_ENTRY(health_call) link;
  kvrelay_call *transport;
  service_name name;
  int method;
  int told; /* the last status that was sent, NOT_TOLD: none */
  bool requested, half_closed, answered;
} health_call;

typedef struct health_entry {
  service_name name;
  int status;
} health_entry;

struct kvrelay_grpc_health {
  kvrelay_service base; /* first */
  health_entry entries[KVRELAY_GRPC_HEALTH_SERVICES];
  size_t entries_len, watchers;
  TAILQ_HEAD(, health_call) calls;
  bool stopping;
  uint8_t out[LIST_CAP]; /* lent out until the next pull */
};

static void name_set(service_name *name, kvrelay_text text) {
  name->len = text.len;
  if (text.len != 0 && text.len <= sizeof name->bytes)
    memcpy(name->bytes, text.ptr, text.len);
}

static health_entry *find(kvrelay_grpc_health *h, const service_name *name) {
  for (size_t i = 0; i < h->entries_len; i++)
    if (h->entries[i].name.len == name->len &&
        memcmp(h->entries[i].name.bytes, name->bytes, name->len) == 0)
      return &h->entries[i];
  return NULL;
}

static void wake_watchers(kvrelay_grpc_health *h) {
  health_call *c;
  TAILQ_FOREACH(c, &h->calls, link)
  if (c->method == METHOD_WATCH)
    c->transport->wake(c->transport);
}

/* ---- calls ---- */

static int health_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path,
                       size_t path_len, uint64_t now_ns, void **handle, kvrelay_status *status) {
  kvrelay_grpc_health *h = (kvrelay_grpc_health *)self;
  (void)now_ns;
  int method = 0;
  while (method < METHOD_COUNT &&
         (path_len != strlen(paths[method]) || memcmp(path, paths[method], path_len) != 0))
    method++;
  if (method == METHOD_COUNT)
    return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "unknown method");
  if (method == METHOD_WATCH && h->watchers == KVRELAY_GRPC_HEALTH_WATCHERS)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "too many watchers of health");
  health_call *c = calloc(1, sizeof *c);
  if (c == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
  c->transport = call;
  c->method = method;
  c->told = NOT_TOLD;
  h->watchers += method == METHOD_WATCH;
  TAILQ_INSERT_TAIL(&h->calls, c, link);
  *handle = c;
  return KVRELAY_OK;
}

static int health_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                          uint64_t now_ns, kvrelay_status *status) {
  health_call *c = handle;
  (void)self;
  (void)now_ns;
  if (c->requested)
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "more than one request message");
  kvhealth_HealthCheckRequest check;
  kvhealth_HealthListRequest list;
  memset(&check, 0, sizeof check);
  memset(&list, 0, sizeof list);
  if (c->method == METHOD_LIST
          ? kvrelay_lent_decode(kvhealth_HealthListRequest_fields, bytes, len, &list)
          : kvrelay_lent_decode(kvhealth_HealthCheckRequest_fields, bytes, len, &check))
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "the request does not decode");
  name_set(&c->name, check.service);
  c->requested = true;
  return KVRELAY_OK;
}

static int health_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                             kvrelay_status *status) {
  kvrelay_grpc_health *h = (kvrelay_grpc_health *)self;
  health_call *c = handle;
  (void)now_ns;
  if (!c->requested)
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "no request message");
  if (c->method == METHOD_CHECK && find(h, &c->name) == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_NOT_FOUND, "unknown service");
  c->half_closed = true;
  return KVRELAY_OK;
}

static bool health_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  return ((const health_call *)handle)->half_closed;
}

static void health_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  kvrelay_grpc_health *h = (kvrelay_grpc_health *)self;
  health_call *c = handle;
  (void)now_ns;
  h->watchers -= c->method == METHOD_WATCH;
  TAILQ_REMOVE(&h->calls, c, link);
  free(c);
}

/* ---- answers ---- */

static int send_message(kvrelay_grpc_health *h, const pb_msgdesc_t *fields, const void *message,
                        kvrelay_parts *parts, kvrelay_status *status) {
  const ptrdiff_t len = kvrelay_lent_encode(fields, message, h->out, sizeof h->out);
  if (len < 0) { /* cover: the buffer is large enough for every answer */
    (void)kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, kvrelay_strerror((int)len));
    return KVRELAY_PULL_END;
  }
  *parts = (kvrelay_parts){.part = {{h->out, (size_t)len}}, .part_len = 1, .bytes = (size_t)len};
  return KVRELAY_PULL_MESSAGE;
}

static int send_list(kvrelay_grpc_health *h, kvrelay_parts *parts, kvrelay_status *status) {
  kvhealth_HealthListResponse_StatusesEntry entries[KVRELAY_GRPC_HEALTH_SERVICES];
  memset(entries, 0, sizeof entries);
  for (size_t i = 0; i < h->entries_len; i++) {
    entries[i].key = (kvrelay_text){h->entries[i].name.bytes, h->entries[i].name.len};
    entries[i].has_value = true;
    entries[i].value.status = (kvhealth_HealthCheckResponse_ServingStatus)h->entries[i].status;
  }
  const kvhealth_HealthListResponse list = {{entries, h->entries_len, sizeof entries[0]}};
  return send_message(h, kvhealth_HealthListResponse_fields, &list, parts, status);
}

static int health_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                       kvrelay_status *status) {
  kvrelay_grpc_health *h = (kvrelay_grpc_health *)self;
  health_call *c = handle;
  (void)now_ns;
  if (!c->half_closed)
    return KVRELAY_PULL_NONE;
  const health_entry *entry = find(h, &c->name);
  const kvhealth_HealthCheckResponse_ServingStatus now =
      entry == NULL ? kvhealth_HealthCheckResponse_ServingStatus_SERVICE_UNKNOWN
                    : (kvhealth_HealthCheckResponse_ServingStatus)entry->status;
  if (c->method == METHOD_WATCH ? c->told != (int)now : !c->answered) {
    c->answered = true;
    c->told = (int)now;
    const kvhealth_HealthCheckResponse response = {now};
    return c->method == METHOD_LIST
               ? send_list(h, parts, status)
               : send_message(h, kvhealth_HealthCheckResponse_fields, &response, parts, status);
  }
  if (c->method == METHOD_WATCH && !h->stopping)
    return KVRELAY_PULL_NONE;
  (void)kvrelay_refuse(status, KVRELAY_GRPC_OK, "");
  return KVRELAY_PULL_END;
}

/* ---- life ---- */

int kvrelay_grpc_health_open(kvrelay_grpc_health **out) {
  kvrelay_grpc_health *h = calloc(1, sizeof *h);
  if (h == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  h->base = (kvrelay_service){health_open,     health_message, health_half_close,
                              health_admitted, health_pull,    health_close};
  TAILQ_INIT(&h->calls);
  *out = h;
  return kvrelay_grpc_health_set(h, "", KVRELAY_GRPC_HEALTH_NOT_SERVING);
}

kvrelay_service *kvrelay_grpc_health_base(kvrelay_grpc_health *health) { return &health->base; }

int kvrelay_grpc_health_set(kvrelay_grpc_health *h, const char *service, int status) {
  service_name name;
  name_set(&name, (kvrelay_text){(const uint8_t *)service, strlen(service)});
  if (status < KVRELAY_GRPC_HEALTH_UNKNOWN || status > KVRELAY_GRPC_HEALTH_NOT_SERVING ||
      name.len > sizeof name.bytes || !kvrelay_utf8_valid(name.bytes, name.len))
    return KVRELAY_TRANSPORT_ERR_ARG;
  health_entry *entry = find(h, &name);
  if (entry == NULL) {
    if (h->entries_len == KVRELAY_GRPC_HEALTH_SERVICES)
      return KVRELAY_TRANSPORT_ERR_LIMIT;
    entry = &h->entries[h->entries_len++];
    entry->name = name;
  }
  entry->status = h->stopping ? KVRELAY_GRPC_HEALTH_NOT_SERVING : status;
  wake_watchers(h);
  return KVRELAY_TRANSPORT_OK;
}

void kvrelay_grpc_health_shutdown(kvrelay_grpc_health *h) {
  h->stopping = true;
  for (size_t i = 0; i < h->entries_len; i++)
    h->entries[i].status = KVRELAY_GRPC_HEALTH_NOT_SERVING;
  wake_watchers(h);
}

void kvrelay_grpc_health_close(kvrelay_grpc_health *health) { free(health); }
