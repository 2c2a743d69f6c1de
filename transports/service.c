/* SPDX-License-Identifier: Apache-2.0 */

#include "service.h"

#include "call_map.h"
#include "kvrelay_pb.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* One call, from open to close. */
typedef struct service_call {
  kvrelay_call_node node; /* in `calls`, by the relay's number, while `admitted` */
  kvrelay_call *transport_call;
  int32_t method;
  bool requested; /* the request message is there */
  bool opened;    /* the relay knows the call */
  bool prefixed;
  uint8_t *bytes; /* of the request, which points into them */
  kvrelay_request request;
  kvrelay_pb_filter_prefix prefix;
} service_call;

/* The newest message of a plane, encoded; all its subscribers get the same bytes. */
typedef struct plane_image {
  uint8_t *bytes;
  size_t cap, len;
  uint64_t revision;
} plane_image;

struct kvrelay_relay_service {
  kvrelay_service base;
  kvrelay_relay_service_config cfg;
  kvrelay_relay_service_stats stats;
  kvrelay_call_map calls;
  plane_image catalog, readiness, load;
  uint64_t stamp_us, stamp_ns; /* one moment on the wall clock and on the transports' */
  uint8_t info[64];            /* RelayInfo, encoded */
  size_t info_len;
  /* What comes before a filter's payload; lent out until the next pull. */
  uint8_t head[KVRELAY_PB_FILTER_HEAD_CAP];
};

static void stamp(kvrelay_relay_service *s, uint64_t now_ns) {
  s->stamp_us = s->cfg.wall_us(s->cfg.wall_context);
  s->stamp_ns = now_ns;
}

/* The wall clock, which would cost as much as the message if it was asked for each. */
static uint64_t wall_us(const kvrelay_relay_service *s, uint64_t now_ns) {
  return s->stamp_us + (now_ns > s->stamp_ns ? (now_ns - s->stamp_ns) / 1000 : 0);
}

/* ---- requests ---- */

static int service_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path,
                        size_t path_len, uint64_t now_ns, void **handle, kvrelay_status *status) {
  (void)now_ns;
  kvrelay_relay_service *s = (kvrelay_relay_service *)self;
  const int32_t method = kvrelay_method_from_path(path, path_len);
  if (!kvrelay_method_offered(method)) {
    s->stats.unknown_methods++;
    return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "unknown method");
  }
  service_call *c = calloc(1, sizeof *c);
  if (!c)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
  s->stats.requests++;
  c->transport_call = call;
  c->method = method;
  *handle = c;
  return KVRELAY_OK;
}

static int service_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                           uint64_t now_ns, kvrelay_status *status) {
  (void)now_ns;
  kvrelay_relay_service *s = (kvrelay_relay_service *)self;
  service_call *c = handle;
  if (c->requested) {
    s->stats.cardinality++;
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "more than one request message");
  }
  c->bytes = malloc(len + 1);
  if (!c->bytes)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
  if (len)
    memcpy(c->bytes, bytes, len);
  const int err = kvrelay_pb_decode_request(c->method, c->bytes, len, &c->request);
  if (err) {
    s->stats.undecodable++;
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "the request does not decode");
  }
  c->requested = true;
  return KVRELAY_OK;
}

static int service_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                              kvrelay_status *status) {
  kvrelay_relay_service *s = (kvrelay_relay_service *)self;
  service_call *c = handle;
  if (!c->requested) {
    s->stats.cardinality++;
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "no request message");
  }
  uint64_t number;
  c->request.max_message_bytes = c->transport_call->max_message_bytes;
  const int err = kvrelay_relay_call_open(s->cfg.relay, &c->request, now_ns, &number, status);
  free(c->bytes);
  c->bytes = NULL;
  if (err == KVRELAY_ERR_REFUSED)
    return err;
  if (err)
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, kvrelay_strerror(err));
  c->opened = true;
  kvrelay_relay_call_hold(s->cfg.relay, number, c->transport_call->keeps);
  kvrelay_call_map_add(&s->calls, &c->node, number);
  return KVRELAY_OK;
}

static bool service_admitted(kvrelay_service *self, void *handle) {
  const kvrelay_relay_service *s = (const kvrelay_relay_service *)self;
  const service_call *c = handle;
  return c->opened && kvrelay_relay_call_admitted(s->cfg.relay, c->node.number);
}

static void service_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  kvrelay_relay_service *s = (kvrelay_relay_service *)self;
  service_call *c = handle;
  if (c->opened) {
    kvrelay_relay_call_close(s->cfg.relay, c->node.number, now_ns);
    kvrelay_call_map_remove(&s->calls, &c->node);
  }
  free(c->bytes);
  free(c);
}

/* ---- messages ---- */

static void add_part(kvrelay_parts *parts, const uint8_t *base, size_t len) {
  if (len == 0)
    return;
  parts->part[parts->part_len++] = (kvrelay_iov){base, len};
  parts->bytes += len;
}

static int end(kvrelay_status *status, int32_t grpc, int32_t reason, const char *text) {
  (void)kvrelay_refuse(status, grpc, text);
  status->reason = reason;
  return KVRELAY_PULL_END;
}

static int pull_info(kvrelay_relay_service *s, const kvrelay_relay_info *m, kvrelay_parts *parts,
                     kvrelay_status *status) {
  if (s->info_len == 0) { /* nothing in it changes while there is this relay */
    const ptrdiff_t len = kvrelay_pb_encode_info(m, s->info, sizeof s->info);
    if (len < 0)
      return end(status, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_INTERNAL,
                 kvrelay_strerror((int)len));
    s->info_len = (size_t)len;
  }
  add_part(parts, s->info, s->info_len);
  return KVRELAY_PULL_MESSAGE;
}

/* Room for a message of this size, and for a somewhat larger one, but never above the bound. */
static int grow_image(const kvrelay_relay_service *s, plane_image *image, size_t len) {
  image->len = len;
  if (len > s->cfg.max_message_bytes)
    return KVRELAY_ERR_LIMIT;
  const size_t cap = len > s->cfg.max_message_bytes / 2 ? s->cfg.max_message_bytes : len * 2;
  uint8_t *grown = realloc(image->bytes, cap);
  if (!grown)
    return KVRELAY_ERR_NOSPACE;
  image->bytes = grown;
  image->cap = cap;
  return KVRELAY_OK;
}

static ptrdiff_t encode_plane(const kvrelay_outgoing *m, uint8_t *out, size_t cap) {
  switch (m->method) {
  case KVRELAY_METHOD_WATCH_CATALOG:
    return kvrelay_pb_encode_catalog(&m->u.catalog, out, cap);
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    return kvrelay_pb_encode_readiness(&m->u.readiness, out, cap);
  default:
    return kvrelay_pb_encode_load(&m->u.load, out, cap);
  }
}

static int encode_image(const kvrelay_relay_service *s, const kvrelay_outgoing *m,
                        plane_image *image) {
  ptrdiff_t len = image->bytes ? encode_plane(m, image->bytes, image->cap) : KVRELAY_ERR_NOSPACE;
  if (len == KVRELAY_ERR_NOSPACE) { /* rare, and the only time the size is computed apart */
    len = encode_plane(m, NULL, 0);
    const int err = len < 0 ? (int)len : grow_image(s, image, (size_t)len);
    if (err)
      return err;
    len = encode_plane(m, image->bytes, image->cap);
  }
  if (len < 0)
    return (int)len;
  image->len = (size_t)len;
  return KVRELAY_OK;
}

/* Within one relay a revision, or window, stands for one content. */
static int pull_plane(kvrelay_relay_service *s, const kvrelay_outgoing *m, plane_image *image,
                      uint64_t revision, kvrelay_parts *parts, kvrelay_status *status) {
  int err = KVRELAY_OK;
  if (image->len == 0 || image->revision != revision)
    err = encode_image(s, m, image);
  if (m->method == KVRELAY_METHOD_WATCH_CATALOG)
    s->stats.catalog_bytes = image->len;
  else if (m->method == KVRELAY_METHOD_SUBSCRIBE_READINESS)
    s->stats.readiness_bytes = image->len;
  if (err == KVRELAY_OK) {
    image->revision = revision;
    add_part(parts, image->bytes, image->len);
    return KVRELAY_PULL_MESSAGE;
  }
  char text[KVRELAY_STATUS_TEXT_CAP];
  snprintf(text, sizeof text, "message of %zu bytes, the limit is %zu", image->len,
           s->cfg.max_message_bytes);
  image->len = 0;
  s->stats.oversized += err == KVRELAY_ERR_LIMIT;
  if (err == KVRELAY_ERR_LIMIT || err == KVRELAY_ERR_NOSPACE)
    return end(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, KVRELAY_REASON_RESOURCE_LIMIT,
               err == KVRELAY_ERR_LIMIT ? text : "out of memory");
  return end(status, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_INTERNAL, kvrelay_strerror(err));
}

static int pull_filter(kvrelay_relay_service *s, service_call *c, const kvrelay_filter_update *m,
                       kvrelay_parts *parts, kvrelay_status *status) {
  if (!c->prefixed && kvrelay_pb_filter_prefix_init(&c->prefix, m) != KVRELAY_OK)
    return end(status, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_INTERNAL, "producer not encodable");
  c->prefixed = true;
  add_part(parts, s->head, kvrelay_pb_filter_head(&c->prefix, m, s->head));
  add_part(parts, m->payload, m->payload_len);
  add_part(parts, kvrelay_pb_filter_tail, KVRELAY_PB_FILTER_TAIL_LEN);
  if (c->transport_call->keeps && m->kind == KVRELAY_UPDATE_SNAPSHOT_CHUNK)
    parts->kept_len = 2; /* the payload, which the relay holds, and the tail, which is a constant */
  return KVRELAY_PULL_MESSAGE;
}

static int pull_message(kvrelay_relay_service *s, service_call *c, const kvrelay_outgoing *out,
                        kvrelay_parts *parts, kvrelay_status *status) {
  switch (out->method) {
  case KVRELAY_METHOD_SUBSCRIBE_POOL:
    return pull_filter(s, c, &out->u.filter, parts, status);
  case KVRELAY_METHOD_WATCH_CATALOG:
    return pull_plane(s, out, &s->catalog, out->u.catalog.revision, parts, status);
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
    return pull_plane(s, out, &s->readiness, out->u.readiness.revision, parts, status);
  case KVRELAY_METHOD_SUBSCRIBE_LOAD:
    return pull_plane(s, out, &s->load, out->u.load.window_sequence, parts, status);
  default:
    return pull_info(s, &out->u.info, parts, status);
  }
}

static int service_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                        kvrelay_status *status) {
  kvrelay_relay_service *s = (kvrelay_relay_service *)self;
  service_call *c = handle;
  memset(parts, 0, sizeof *parts);
  if (!c->opened)
    return KVRELAY_PULL_NONE;
  if (s->stamp_us == 0)
    stamp(s, now_ns);
  kvrelay_outgoing out;
  int what =
      kvrelay_relay_call_pull(s->cfg.relay, c->node.number, wall_us(s, now_ns), now_ns, &out);
  if (what == KVRELAY_PULL_END)
    *status = out.end;
  else if (what == KVRELAY_PULL_MESSAGE)
    what = pull_message(s, c, &out, parts, status);
  else if (what < 0)
    what = end(status, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_INTERNAL, kvrelay_strerror(what));
  s->stats.messages += what == KVRELAY_PULL_MESSAGE;
  s->stats.bytes += parts->bytes;
  return what;
}

/* ---- life ---- */

static uint64_t system_wall_us(void *context) {
  (void)context;
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

kvrelay_relay_service_config kvrelay_relay_service_config_default(kvrelay_relay *relay) {
  const kvrelay_relay_service_config cfg = {relay, system_wall_us, NULL, KVRELAY_PB_MESSAGE_MAX};
  return cfg;
}

int kvrelay_relay_service_open(const kvrelay_relay_service_config *cfg,
                               kvrelay_relay_service **out) {
  if (!cfg || !cfg->relay || !cfg->wall_us || cfg->max_message_bytes == 0 || !out)
    return KVRELAY_TRANSPORT_ERR_ARG;
  kvrelay_relay_service *s = calloc(1, sizeof *s);
  if (!s)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  s->base = (kvrelay_service){service_open,     service_message, service_half_close,
                              service_admitted, service_pull,    service_close};
  s->cfg = *cfg;
  *out = s;
  return KVRELAY_TRANSPORT_OK;
}

kvrelay_service *kvrelay_relay_service_base(kvrelay_relay_service *service) {
  return &service->base;
}

void kvrelay_relay_service_poll(kvrelay_relay_service *service, uint64_t now_ns) {
  stamp(service, now_ns);
  kvrelay_relay_tick(service->cfg.relay, now_ns);
  uint64_t number;
  while (kvrelay_relay_ready_next(service->cfg.relay, &number) == 1) {
    service_call *c = kvrelay_call_map_find(&service->calls, number);
    if (c)
      c->transport_call->wake(c->transport_call);
  }
}

kvrelay_relay_service_stats kvrelay_relay_service_stats_get(const kvrelay_relay_service *service) {
  return service->stats;
}

void kvrelay_relay_service_close(kvrelay_relay_service *service) {
  if (!service)
    return;
  for (service_call *c; (c = kvrelay_call_map_any(&service->calls));)
    service_close(&service->base, c, 0);
  free(service->catalog.bytes);
  free(service->readiness.bytes);
  free(service->load.bytes);
  free(service);
}
