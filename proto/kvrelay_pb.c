/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay.options makes every field of the generated structs either a plain number, a plain
 * submessage, a bounded array of roles, a kvrelay_text or a kvrelay_pb_list.  The last two are
 * nanopb "callback" fields.  So a message is read in two steps, nanopb from bytes to the generated
 * struct and lift from that to the core struct, and written in two, fill and a walk through
 * nanopb's tables; elements of lists do the same one by one.
 */

#include "kvrelay_pb.h"

#include <pb_common.h>
#include <pb_decode.h>
#include <string.h>

#include "kvrelay.pb.h"

/* ---- reader ---- */

/* State of a nanopb stream over bytes in memory. */
typedef struct reader {
  const uint8_t *pos;
  kvrelay_pb_arena *arena;
  size_t text_max;
  int err; /* of ours; else nanopb's text tells */
} reader;

static bool reader_read(pb_istream_t *stream, pb_byte_t *buf, size_t count) {
  reader *r = stream->state;
  if (buf)
    memcpy(buf, r->pos, count);
  r->pos += count;
  return true;
}

static bool reader_fail(reader *r, int err) {
  r->err = err;
  return false;
}

static void *reader_alloc(reader *r, size_t count, size_t size) {
  kvrelay_pb_arena *a = r->arena;
  if (!a || !a->mem) {
    r->err = KVRELAY_ERR_NOSPACE;
    return NULL;
  }
  uintptr_t base = (uintptr_t)a->mem;
  size_t at = (size_t)((base + a->used + 7u) / 8u * 8u - base);
  if (at > a->len || count > (a->len - at) / size) {
    r->err = KVRELAY_ERR_NOSPACE;
    return NULL;
  }
  a->used = at + count * size;
  return (uint8_t *)a->mem + at;
}

/* Room for one more element.  Lists double where they outgrow their place: the capacity is the next
 * power of two. */
static void *reader_push(reader *r, kvrelay_pb_list *list, size_t size, size_t max) {
  if (list->len == max) {
    r->err = KVRELAY_ERR_LIMIT;
    return NULL;
  }
  if ((list->len & (list->len - 1)) == 0) {
    void *grown = reader_alloc(r, list->len ? list->len * 2 : 1, size);
    if (!grown)
      return NULL;
    if (list->len)
      memcpy(grown, list->ptr, list->len * size);
    list->ptr = grown;
  }
  return (uint8_t *)list->ptr + list->len++ * size;
}

/* ---- codecs ---- */

/* How one kind of message moves between its generated struct (`pb`) and its core struct. */
typedef struct codec {
  const pb_msgdesc_t *fields;
  size_t pb_size, core_size;
  size_t list_max; /* elements of this kind in one list */
  bool (*lift)(reader *r, const void *pb, void *core);
  bool (*fill)(const void *core, void *pb);
} codec;

/* ---- identity ---- */

static void lift_envelope(kvrelay_envelope *out, uint32_t version, bool has_relay,
                          const kvpb_RelayIdentity *relay, uint32_t marker) {
  out->protocol_version = version;
  out->relay_present = has_relay;
  out->relay.drt_instance_id = relay->drt_instance_id;
  out->relay.relay_incarnation = relay->relay_incarnation;
  out->contract_marker = marker;
}

static void fill_envelope(const kvrelay_envelope *in, uint32_t *version, bool *has_relay,
                          kvpb_RelayIdentity *relay, uint32_t *marker) {
  *version = in->protocol_version;
  *has_relay = in->relay_present;
  relay->drt_instance_id = in->relay.drt_instance_id;
  relay->relay_incarnation = in->relay.relay_incarnation;
  *marker = in->contract_marker;
}

static void lift_digest(bool has, const kvpb_DigestIdentity *in, kvrelay_digest *out) {
  out->present = has;
  out->digest_len = in->digest.len;
  if (in->digest.len)
    memcpy(out->digest, in->digest.ptr,
           in->digest.len < KVRELAY_DIGEST_LEN ? in->digest.len : KVRELAY_DIGEST_LEN);
  out->source = in->source;
}

static bool fill_digest(const kvrelay_digest *in, bool *has, kvpb_DigestIdentity *out) {
  *has = in->present;
  out->digest.ptr = in->digest;
  out->digest.len = in->digest_len;
  out->source = in->source;
  return !in->present || in->digest_len <= KVRELAY_DIGEST_LEN;
}

static bool lift_pool_id(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_KvPoolId *in = pb;
  kvrelay_pool_id *out = core;
  out->present = true;
  out->identity_version = in->identity_version;
  out->domain.present = in->has_indexer_domain;
  lift_digest(in->indexer_domain.has_cache_semantics, &in->indexer_domain.cache_semantics,
              &out->domain.cache_semantics);
  lift_digest(in->indexer_domain.has_routing_scope, &in->indexer_domain.routing_scope,
              &out->domain.routing_scope);
  out->dc_id = in->dc_id;
  return true;
}

static bool fill_pool_id(const void *core, void *pb) {
  const kvrelay_pool_id *in = core;
  kvpb_KvPoolId *out = pb;
  out->identity_version = in->identity_version;
  out->has_indexer_domain = in->domain.present;
  out->dc_id = in->dc_id;
  kvpb_IndexerDomainId *domain = &out->indexer_domain;
  return fill_digest(&in->domain.cache_semantics, &domain->has_cache_semantics,
                     &domain->cache_semantics) &&
         fill_digest(&in->domain.routing_scope, &domain->has_routing_scope, &domain->routing_scope);
}

static bool lift_ckf_format(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_CkfFormat *in = pb;
  kvrelay_ckf_format *out = core;
  out->present = true;
  out->format_version = in->format_version;
  out->seed = in->seed;
  out->bucket_count = in->bucket_count;
  out->fingerprint_bits = in->fingerprint_bits;
  out->slots_per_bucket = in->slots_per_bucket;
  return true;
}

static bool fill_ckf_format(const void *core, void *pb) {
  const kvrelay_ckf_format *in = core;
  kvpb_CkfFormat *out = pb;
  out->format_version = in->format_version;
  out->seed = in->seed;
  out->bucket_count = in->bucket_count;
  out->fingerprint_bits = in->fingerprint_bits;
  out->slots_per_bucket = in->slots_per_bucket;
  return true;
}

static bool lift_producer(reader *r, const void *pb, void *core) {
  const kvpb_ProducerIdentity *in = pb;
  kvrelay_producer *out = core;
  out->present = true;
  out->producer_incarnation = in->producer_incarnation;
  out->layout_generation = in->layout_generation;
  if (in->has_pool_id)
    (void)lift_pool_id(r, &in->pool_id, &out->pool_id);
  if (in->has_ckf_format)
    (void)lift_ckf_format(r, &in->ckf_format, &out->ckf_format);
  return true;
}

static bool fill_producer(const void *core, void *pb) {
  const kvrelay_producer *in = core;
  kvpb_ProducerIdentity *out = pb;
  out->has_pool_id = in->pool_id.present;
  out->producer_incarnation = in->producer_incarnation;
  out->layout_generation = in->layout_generation;
  out->has_ckf_format = in->ckf_format.present;
  return fill_pool_id(&in->pool_id, &out->pool_id) &&
         fill_ckf_format(&in->ckf_format, &out->ckf_format);
}

static bool lift_endpoint(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_DynamoEndpointId *in = pb;
  kvrelay_endpoint *out = core;
  out->present = true;
  out->namespace_ = in->namespace;
  out->component = in->component;
  out->endpoint = in->endpoint;
  return true;
}

static bool fill_endpoint(const void *core, void *pb) {
  const kvrelay_endpoint *in = core;
  kvpb_DynamoEndpointId *out = pb;
  out->namespace = in->namespace_;
  out->component = in->component;
  out->endpoint = in->endpoint;
  return true;
}

/* ---- lists ---- */

static kvrelay_pb_list fill_list(const void *ptr, size_t len) {
  kvrelay_pb_list list = {(void *)(uintptr_t)ptr, len}; /* only read from here on */
  return list;
}

static bool lift_roles(reader *r, const int32_t *roles, size_t len, kvrelay_roles *out) {
  if (len == 0)
    return true;
  int32_t *copy = reader_alloc(r, len, sizeof *copy);
  if (!copy)
    return false;
  memcpy(copy, roles, len * sizeof *copy);
  out->ptr = copy;
  out->len = len;
  return true;
}

static bool fill_roles(const kvrelay_roles *in, int32_t *roles, pb_size_t *len) {
  if (in->len > KVRELAY_ROLES_MAX)
    return false;
  if (in->len)
    memcpy(roles, in->ptr, in->len * sizeof *roles);
  *len = (pb_size_t)in->len;
  return true;
}

/* ---- catalog ---- */

static bool lift_registration(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_ModelRegistration *in = pb;
  kvrelay_registration *out = core;
  out->canonical_model_id = in->canonical_model_id;
  out->target.present = in->has_target;
  if (in->target.which_target == kvpb_ModelTarget_base_tag) {
    out->target.kind = KVRELAY_TARGET_BASE;
    out->target.base_model = in->target.target.base.base_model;
  } else if (in->target.which_target == kvpb_ModelTarget_lora_tag) {
    out->target.kind = KVRELAY_TARGET_LORA;
    out->target.base_model = in->target.target.lora.base_model;
    out->target.adapter = in->target.target.lora.adapter;
  }
  out->aliases = in->aliases.ptr;
  out->aliases_len = in->aliases.len;
  return true;
}

static bool fill_registration(const void *core, void *pb) {
  const kvrelay_registration *in = core;
  kvpb_ModelRegistration *out = pb;
  out->canonical_model_id = in->canonical_model_id;
  out->has_target = in->target.present;
  if (in->target.kind == KVRELAY_TARGET_BASE) {
    out->target.which_target = kvpb_ModelTarget_base_tag;
    out->target.target.base.base_model = in->target.base_model;
  } else if (in->target.kind == KVRELAY_TARGET_LORA) {
    out->target.which_target = kvpb_ModelTarget_lora_tag;
    out->target.target.lora.base_model = in->target.base_model;
    out->target.target.lora.adapter = in->target.adapter;
  }
  out->aliases = fill_list(in->aliases, in->aliases_len);
  return true;
}

static bool lift_semantics(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_KvQuerySemantics *in = pb;
  kvrelay_semantics *out = core;
  out->present = true;
  out->kv_block_size = in->kv_block_size;
  out->hash_format = in->hash_format;
  return true;
}

static bool fill_semantics(const void *core, void *pb) {
  const kvrelay_semantics *in = core;
  kvpb_KvQuerySemantics *out = pb;
  out->kv_block_size = in->kv_block_size;
  out->hash_format = in->hash_format;
  return true;
}

static bool lift_descriptor(reader *r, const void *pb, void *core) {
  const kvpb_KvPoolDescriptor *in = pb;
  kvrelay_descriptor *out = core;
  if (in->has_producer)
    (void)lift_producer(r, &in->producer, &out->producer);
  if (in->has_serving_endpoint)
    (void)lift_endpoint(r, &in->serving_endpoint, &out->serving_endpoint);
  if (in->has_query_semantics)
    (void)lift_semantics(r, &in->query_semantics, &out->query_semantics);
  out->registrations = in->registrations.ptr;
  out->registrations_len = in->registrations.len;
  return lift_roles(r, in->pool_roles, in->pool_roles_count, &out->pool_roles);
}

static bool fill_descriptor(const void *core, void *pb) {
  const kvrelay_descriptor *in = core;
  kvpb_KvPoolDescriptor *out = pb;
  out->has_producer = in->producer.present;
  out->has_serving_endpoint = in->serving_endpoint.present;
  out->has_query_semantics = in->query_semantics.present;
  out->registrations = fill_list(in->registrations, in->registrations_len);
  return fill_producer(&in->producer, &out->producer) &&
         fill_endpoint(&in->serving_endpoint, &out->serving_endpoint) &&
         fill_semantics(&in->query_semantics, &out->query_semantics) &&
         fill_roles(&in->pool_roles, out->pool_roles, &out->pool_roles_count);
}

static bool lift_catalog(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_KvPoolCatalogUpdate *in = pb;
  kvrelay_catalog_update *out = core;
  lift_envelope(&out->envelope, in->protocol_version, in->has_relay, &in->relay,
                in->contract_marker);
  out->revision = in->revision;
  out->snapshot_present = in->has_snapshot;
  out->pools = in->snapshot.pools.ptr;
  out->pools_len = in->snapshot.pools.len;
  return true;
}

static bool fill_catalog(const void *core, void *pb) {
  const kvrelay_catalog_update *in = core;
  kvpb_KvPoolCatalogUpdate *out = pb;
  fill_envelope(&in->envelope, &out->protocol_version, &out->has_relay, &out->relay,
                &out->contract_marker);
  out->revision = in->revision;
  out->has_snapshot = in->snapshot_present;
  out->snapshot.pools = fill_list(in->pools, in->pools_len);
  return true;
}

/* ---- readiness and load ---- */

static bool lift_member(reader *r, const void *pb, void *core) {
  const kvpb_TopologyMember *in = pb;
  kvrelay_topology_member *out = core;
  if (in->has_endpoint)
    (void)lift_endpoint(r, &in->endpoint, &out->endpoint);
  if (in->has_pool_id)
    (void)lift_pool_id(r, &in->pool_id, &out->pool_id);
  return lift_roles(r, in->roles, in->roles_count, &out->roles);
}

static bool fill_member(const void *core, void *pb) {
  const kvrelay_topology_member *in = core;
  kvpb_TopologyMember *out = pb;
  out->has_endpoint = in->endpoint.present;
  out->has_pool_id = in->pool_id.present;
  return fill_endpoint(&in->endpoint, &out->endpoint) &&
         fill_pool_id(&in->pool_id, &out->pool_id) &&
         fill_roles(&in->roles, out->roles, &out->roles_count);
}

static bool lift_adapter(reader *r, const void *pb, void *core) {
  const kvpb_AdapterReadiness *in = pb;
  kvrelay_adapter_readiness *out = core;
  out->canonical_model_id = in->canonical_model_id;
  out->state = in->state;
  return lift_roles(r, in->missing_roles, in->missing_roles_count, &out->missing_roles);
}

static bool fill_adapter(const void *core, void *pb) {
  const kvrelay_adapter_readiness *in = core;
  kvpb_AdapterReadiness *out = pb;
  out->canonical_model_id = in->canonical_model_id;
  out->state = in->state;
  return fill_roles(&in->missing_roles, out->missing_roles, &out->missing_roles_count);
}

static bool lift_topology_entry(reader *r, const void *pb, void *core) {
  const kvpb_TopologyEntry *in = pb;
  kvrelay_topology_entry *out = core;
  out->namespace_ = in->namespace;
  out->canonical_model_id = in->canonical_model_id;
  out->state = in->state;
  out->members = in->members.ptr;
  out->members_len = in->members.len;
  out->legacy_fallback_active = in->legacy_fallback_active;
  out->adapters = in->adapters.ptr;
  out->adapters_len = in->adapters.len;
  return lift_roles(r, in->present_roles, in->present_roles_count, &out->present_roles) &&
         lift_roles(r, in->missing_roles, in->missing_roles_count, &out->missing_roles) &&
         lift_roles(r, in->duplicate_role_endpoints, in->duplicate_role_endpoints_count,
                    &out->duplicate_role_endpoints);
}

static bool fill_topology_entry(const void *core, void *pb) {
  const kvrelay_topology_entry *in = core;
  kvpb_TopologyEntry *out = pb;
  out->namespace = in->namespace_;
  out->canonical_model_id = in->canonical_model_id;
  out->state = in->state;
  out->members = fill_list(in->members, in->members_len);
  out->legacy_fallback_active = in->legacy_fallback_active;
  out->adapters = fill_list(in->adapters, in->adapters_len);
  return fill_roles(&in->present_roles, out->present_roles, &out->present_roles_count) &&
         fill_roles(&in->missing_roles, out->missing_roles, &out->missing_roles_count) &&
         fill_roles(&in->duplicate_role_endpoints, out->duplicate_role_endpoints,
                    &out->duplicate_role_endpoints_count);
}

static bool lift_readiness(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_ServingReadinessUpdate *in = pb;
  kvrelay_readiness_update *out = core;
  lift_envelope(&out->envelope, in->protocol_version, in->has_relay, &in->relay,
                in->contract_marker);
  out->revision = in->revision;
  out->entries = in->entries.ptr;
  out->entries_len = in->entries.len;
  return true;
}

static bool fill_readiness(const void *core, void *pb) {
  const kvrelay_readiness_update *in = core;
  kvpb_ServingReadinessUpdate *out = pb;
  fill_envelope(&in->envelope, &out->protocol_version, &out->has_relay, &out->relay,
                &out->contract_marker);
  out->revision = in->revision;
  out->entries = fill_list(in->entries, in->entries_len);
  return true;
}

static bool lift_load_entry(reader *r, const void *pb, void *core) {
  const kvpb_KvPoolLoadEntry *in = pb;
  kvrelay_load_entry *out = core;
  if (in->has_producer)
    (void)lift_producer(r, &in->producer, &out->producer);
  out->kv_used_blocks = in->kv_used_blocks;
  out->total_kv_blocks = in->total_kv_blocks;
  out->kv_observed_ranks = in->kv_observed_ranks;
  out->kv_expected_ranks = in->kv_expected_ranks;
  return true;
}

static bool fill_load_entry(const void *core, void *pb) {
  const kvrelay_load_entry *in = core;
  kvpb_KvPoolLoadEntry *out = pb;
  out->has_producer = in->producer.present;
  out->kv_used_blocks = in->kv_used_blocks;
  out->total_kv_blocks = in->total_kv_blocks;
  out->kv_observed_ranks = in->kv_observed_ranks;
  out->kv_expected_ranks = in->kv_expected_ranks;
  return fill_producer(&in->producer, &out->producer);
}

static bool lift_load(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_KvPoolLoadUpdate *in = pb;
  kvrelay_load_update *out = core;
  lift_envelope(&out->envelope, in->protocol_version, in->has_relay, &in->relay,
                in->contract_marker);
  out->window_sequence = in->window_sequence;
  out->observed_ms = in->observed_ms;
  out->window_ms = in->window_ms;
  out->pools = in->pools.ptr;
  out->pools_len = in->pools.len;
  return true;
}

static bool fill_load(const void *core, void *pb) {
  const kvrelay_load_update *in = core;
  kvpb_KvPoolLoadUpdate *out = pb;
  fill_envelope(&in->envelope, &out->protocol_version, &out->has_relay, &out->relay,
                &out->contract_marker);
  out->window_sequence = in->window_sequence;
  out->observed_ms = in->observed_ms;
  out->window_ms = in->window_ms;
  out->pools = fill_list(in->pools, in->pools_len);
  return true;
}

/* ---- serving load ---- */

#define LIFT_OPTIONAL(OUT, IN, FIELD)                                                              \
  ((OUT)->FIELD.present = (IN)->has_##FIELD, (OUT)->FIELD.value = (IN)->FIELD)
#define FILL_OPTIONAL(OUT, IN, FIELD)                                                              \
  ((OUT)->has_##FIELD = (IN)->FIELD.present, (OUT)->FIELD = (IN)->FIELD.value)

static void lift_view(bool has, const kvpb_LoadView *in, kvrelay_pb_load_view *out) {
  const kvpb_RequestLifecycleStats *requests = &in->requests;
  const kvpb_TokenLoadStats *tokens = &in->tokens;
  out->present = has;
  out->status = in->status;
  out->source_observed_ms = in->source_observed_ms;
  out->requests.present = in->has_requests;
  out->requests.requests_started_total = requests->requests_started_total;
  out->requests.requests_completed_total = requests->requests_completed_total;
  out->requests.requests_failed_total = requests->requests_failed_total;
  out->requests.requests_cancelled_total = requests->requests_cancelled_total;
  LIFT_OPTIONAL(&out->requests, requests, requests_awaiting_first_token);
  LIFT_OPTIONAL(&out->requests, requests, requests_generating);
  out->tokens.present = in->has_tokens;
  LIFT_OPTIONAL(&out->tokens, tokens, active_prefill_tokens);
  LIFT_OPTIONAL(&out->tokens, tokens, active_decode_blocks);
  LIFT_OPTIONAL(&out->tokens, tokens, awaiting_first_token_input_tokens);
  LIFT_OPTIONAL(&out->tokens, tokens, inflight_input_tokens);
  LIFT_OPTIONAL(&out->tokens, tokens, input_tokens_total);
  LIFT_OPTIONAL(&out->tokens, tokens, output_tokens_total);
}

static void fill_view(const kvrelay_pb_load_view *in, bool *has, kvpb_LoadView *out) {
  kvpb_RequestLifecycleStats *requests = &out->requests;
  kvpb_TokenLoadStats *tokens = &out->tokens;
  *has = in->present;
  out->status = in->status;
  out->source_observed_ms = in->source_observed_ms;
  out->has_requests = in->requests.present;
  requests->requests_started_total = in->requests.requests_started_total;
  requests->requests_completed_total = in->requests.requests_completed_total;
  requests->requests_failed_total = in->requests.requests_failed_total;
  requests->requests_cancelled_total = in->requests.requests_cancelled_total;
  FILL_OPTIONAL(requests, &in->requests, requests_awaiting_first_token);
  FILL_OPTIONAL(requests, &in->requests, requests_generating);
  out->has_tokens = in->tokens.present;
  FILL_OPTIONAL(tokens, &in->tokens, active_prefill_tokens);
  FILL_OPTIONAL(tokens, &in->tokens, active_decode_blocks);
  FILL_OPTIONAL(tokens, &in->tokens, awaiting_first_token_input_tokens);
  FILL_OPTIONAL(tokens, &in->tokens, inflight_input_tokens);
  FILL_OPTIONAL(tokens, &in->tokens, input_tokens_total);
  FILL_OPTIONAL(tokens, &in->tokens, output_tokens_total);
}

static bool lift_pool_serving(reader *r, const void *pb, void *core) {
  const kvpb_PoolServingLoad *in = pb;
  kvrelay_pb_pool_serving *out = core;
  if (in->has_producer)
    (void)lift_producer(r, &in->producer, &out->producer);
  lift_view(in->has_load, &in->load, &out->load);
  out->deployment_present = in->has_deployment;
  LIFT_OPTIONAL(out, &in->deployment, live_workers);
  LIFT_OPTIONAL(out, &in->deployment, max_concurrency);
  return true;
}

static bool fill_pool_serving(const void *core, void *pb) {
  const kvrelay_pb_pool_serving *in = core;
  kvpb_PoolServingLoad *out = pb;
  out->has_producer = in->producer.present;
  fill_view(&in->load, &out->has_load, &out->load);
  out->has_deployment = in->deployment_present;
  FILL_OPTIONAL(&out->deployment, in, live_workers);
  FILL_OPTIONAL(&out->deployment, in, max_concurrency);
  return fill_producer(&in->producer, &out->producer);
}

static bool lift_model_serving(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_ModelServingLoad *in = pb;
  kvrelay_pb_model_serving *out = core;
  out->namespace_ = in->namespace;
  out->canonical_model_id = in->canonical_model_id;
  lift_view(in->has_load, &in->load, &out->load);
  out->deployment_present = in->has_deployment;
  out->expected_frontends = in->deployment.expected_frontends;
  out->observed_frontends = in->deployment.observed_frontends;
  out->ready_frontends = in->deployment.ready_frontends;
  out->serving_pools = in->deployment.serving_pools.ptr;
  out->serving_pools_len = in->deployment.serving_pools.len;
  return true;
}

static bool fill_model_serving(const void *core, void *pb) {
  const kvrelay_pb_model_serving *in = core;
  kvpb_ModelServingLoad *out = pb;
  out->namespace = in->namespace_;
  out->canonical_model_id = in->canonical_model_id;
  fill_view(&in->load, &out->has_load, &out->load);
  out->has_deployment = in->deployment_present;
  out->deployment.expected_frontends = in->expected_frontends;
  out->deployment.observed_frontends = in->observed_frontends;
  out->deployment.ready_frontends = in->ready_frontends;
  out->deployment.serving_pools = fill_list(in->serving_pools, in->serving_pools_len);
  return true;
}

static bool lift_serving_load(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_ServingLoadUpdate *in = pb;
  kvrelay_pb_serving_load *out = core;
  lift_envelope(&out->envelope, in->protocol_version, in->has_relay, &in->relay,
                in->contract_marker);
  out->window_sequence = in->window_sequence;
  out->observed_ms = in->observed_ms;
  out->window_ms = in->window_ms;
  out->pools = in->pools.ptr;
  out->pools_len = in->pools.len;
  out->models = in->models.ptr;
  out->models_len = in->models.len;
  return true;
}

static bool fill_serving_load(const void *core, void *pb) {
  const kvrelay_pb_serving_load *in = core;
  kvpb_ServingLoadUpdate *out = pb;
  fill_envelope(&in->envelope, &out->protocol_version, &out->has_relay, &out->relay,
                &out->contract_marker);
  out->window_sequence = in->window_sequence;
  out->observed_ms = in->observed_ms;
  out->window_ms = in->window_ms;
  out->pools = fill_list(in->pools, in->pools_len);
  out->models = fill_list(in->models, in->models_len);
  return true;
}

/* ---- info, filter, requests ---- */

static bool lift_info(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_RelayInfo *in = pb;
  kvrelay_relay_info *out = core;
  lift_envelope(&out->envelope, in->protocol_version, in->has_relay, &in->relay,
                in->contract_marker);
  return true;
}

static bool fill_info(const void *core, void *pb) {
  const kvrelay_relay_info *in = core;
  kvpb_RelayInfo *out = pb;
  fill_envelope(&in->envelope, &out->protocol_version, &out->has_relay, &out->relay,
                &out->contract_marker);
  return true;
}

static bool lift_filter(reader *r, const void *pb, void *core) {
  const kvpb_FilterUpdate *in = pb;
  kvrelay_filter_update *out = core;
  lift_envelope(&out->envelope, in->protocol_version, in->has_relay, &in->relay,
                in->contract_marker);
  if (in->has_producer)
    (void)lift_producer(r, &in->producer, &out->producer);
  out->base_sequence = in->base_sequence;
  out->sequence = in->sequence;
  out->send_ts_us = in->send_ts_us;
  out->kind = in->kind;
  out->payload = in->payload.ptr;
  out->payload_len = in->payload.len;
  return true;
}

static bool fill_filter(const void *core, void *pb) {
  const kvrelay_filter_update *in = core;
  kvpb_FilterUpdate *out = pb;
  fill_envelope(&in->envelope, &out->protocol_version, &out->has_relay, &out->relay,
                &out->contract_marker);
  out->has_producer = in->producer.present;
  out->base_sequence = in->base_sequence;
  out->sequence = in->sequence;
  out->send_ts_us = in->send_ts_us;
  out->kind = in->kind;
  out->payload.ptr = in->payload;
  out->payload.len = in->payload_len;
  return fill_producer(&in->producer, &out->producer);
}

static bool lift_info_request(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_RelayInfoRequest *in = pb;
  kvrelay_request *out = core;
  out->contract_marker = in->contract_marker;
  return true;
}

static bool fill_info_request(const void *core, void *pb) {
  const kvrelay_request *in = core;
  kvpb_RelayInfoRequest *out = pb;
  out->contract_marker = in->contract_marker;
  return true;
}

/* Four methods have requests of one shape; the assertions below keep that true. */
static bool lift_plain_request(reader *r, const void *pb, void *core) {
  (void)r;
  const kvpb_WatchKvPoolCatalogRequest *in = pb;
  kvrelay_request *out = core;
  out->contract_marker = in->contract_marker;
  out->subscriber_id = in->subscriber_id;
  return true;
}

static bool fill_plain_request(const void *core, void *pb) {
  const kvrelay_request *in = core;
  kvpb_WatchKvPoolCatalogRequest *out = pb;
  out->contract_marker = in->contract_marker;
  out->subscriber_id = in->subscriber_id;
  return true;
}

static bool lift_pool_request(reader *r, const void *pb, void *core) {
  const kvpb_SubscribeKvPoolRequest *in = pb;
  kvrelay_request *out = core;
  out->contract_marker = in->contract_marker;
  out->subscriber_id = in->subscriber_id;
  if (in->has_expected_producer)
    (void)lift_producer(r, &in->expected_producer, &out->expected_producer);
  return true;
}

static bool fill_pool_request(const void *core, void *pb) {
  const kvrelay_request *in = core;
  kvpb_SubscribeKvPoolRequest *out = pb;
  out->contract_marker = in->contract_marker;
  out->subscriber_id = in->subscriber_id;
  out->has_expected_producer = in->expected_producer.present;
  return fill_producer(&in->expected_producer, &out->expected_producer);
}

/* ---- table ---- */

typedef union any_pb {
  kvpb_RelayInfo info;
  kvpb_KvPoolCatalogUpdate catalog;
  kvpb_FilterUpdate filter;
  kvpb_ServingReadinessUpdate readiness;
  kvpb_KvPoolLoadUpdate load;
  kvpb_KvPoolDescriptor descriptor;
  kvpb_TopologyEntry topology_entry;
  kvpb_TopologyMember member;
  kvpb_KvPoolLoadEntry load_entry;
  kvpb_ServingLoadUpdate serving_load;
  kvpb_PoolServingLoad pool_serving;
  kvpb_ModelServingLoad model_serving;
  kvpb_ModelRegistration registration;
  kvpb_SubscribeKvPoolRequest pool_request;
} any_pb;

typedef union any_core {
  kvrelay_relay_info info;
  kvrelay_catalog_update catalog;
  kvrelay_filter_update filter;
  kvrelay_readiness_update readiness;
  kvrelay_load_update load;
  kvrelay_pb_serving_load serving_load;
  kvrelay_descriptor descriptor;
  kvrelay_topology_entry topology_entry;
  kvrelay_request request;
} any_core;

#define CODEC(NAME, MESSAGE, TYPE, MAX)                                                            \
  static const codec NAME##_codec = {                                                              \
      &kvpb_##MESSAGE##_msg, sizeof(kvpb_##MESSAGE), sizeof(TYPE), MAX, lift_##NAME, fill_##NAME}

CODEC(info, RelayInfo, kvrelay_relay_info, 0);
CODEC(catalog, KvPoolCatalogUpdate, kvrelay_catalog_update, 0);
CODEC(filter, FilterUpdate, kvrelay_filter_update, 0);
CODEC(readiness, ServingReadinessUpdate, kvrelay_readiness_update, 0);
CODEC(load, KvPoolLoadUpdate, kvrelay_load_update, 0);
CODEC(serving_load, ServingLoadUpdate, kvrelay_pb_serving_load, 0);
CODEC(producer, ProducerIdentity, kvrelay_producer, 0);
CODEC(pool_id, KvPoolId, kvrelay_pool_id, KVRELAY_PARTS_MAX);
CODEC(ckf_format, CkfFormat, kvrelay_ckf_format, 0);
CODEC(endpoint, DynamoEndpointId, kvrelay_endpoint, 0);
CODEC(semantics, KvQuerySemantics, kvrelay_semantics, 0);
CODEC(descriptor, KvPoolDescriptor, kvrelay_descriptor, KVRELAY_PB_ENTRIES_MAX);
CODEC(registration, ModelRegistration, kvrelay_registration, KVRELAY_PARTS_MAX);
CODEC(topology_entry, TopologyEntry, kvrelay_topology_entry, KVRELAY_PB_ENTRIES_MAX);
CODEC(member, TopologyMember, kvrelay_topology_member, KVRELAY_PARTS_MAX);
CODEC(adapter, AdapterReadiness, kvrelay_adapter_readiness, KVRELAY_PARTS_MAX);
CODEC(load_entry, KvPoolLoadEntry, kvrelay_load_entry, KVRELAY_PB_ENTRIES_MAX);
CODEC(pool_serving, PoolServingLoad, kvrelay_pb_pool_serving, KVRELAY_PB_ENTRIES_MAX);
CODEC(model_serving, ModelServingLoad, kvrelay_pb_model_serving, KVRELAY_PB_ENTRIES_MAX);
CODEC(info_request, RelayInfoRequest, kvrelay_request, 0);
CODEC(plain_request, WatchKvPoolCatalogRequest, kvrelay_request, 0);
CODEC(pool_request, SubscribeKvPoolRequest, kvrelay_request, 0);

_Static_assert(
    sizeof(kvpb_SubscribeServingReadinessRequest) == sizeof(kvpb_WatchKvPoolCatalogRequest) &&
        sizeof(kvpb_SubscribeKvPoolLoadRequest) == sizeof(kvpb_WatchKvPoolCatalogRequest) &&
        sizeof(kvpb_SubscribeServingLoadRequest) == sizeof(kvpb_WatchKvPoolCatalogRequest) &&
        kvpb_SubscribeServingReadinessRequest_subscriber_id_tag == 1 &&
        kvpb_SubscribeServingLoadRequest_subscriber_id_tag == 1 &&
        kvpb_SubscribeKvPoolLoadRequest_subscriber_id_tag == 1,
    "requests of one shape");
_Static_assert(sizeof((kvpb_KvPoolDescriptor *)0)->pool_roles / sizeof(int32_t) ==
                   KVRELAY_ROLES_MAX,
               "the bound of kvrelay.options");

static const codec *element_codec(const pb_msgdesc_t *fields) {
  static const codec *const others[] = {
      &descriptor_codec, &registration_codec, &topology_entry_codec, &member_codec,
      &adapter_codec,    &pool_serving_codec, &model_serving_codec,  &pool_id_codec};
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
    if (others[i]->fields == fields)
      return others[i];
  return &load_entry_codec;
}

static const codec *request_codec(int32_t method) {
  switch (method) {
  case KVRELAY_METHOD_GET_RELAY_INFO:
    return &info_request_codec;
  case KVRELAY_METHOD_WATCH_CATALOG:
  case KVRELAY_METHOD_SUBSCRIBE_READINESS:
  case KVRELAY_METHOD_SUBSCRIBE_LOAD:
  case KVRELAY_METHOD_SUBSCRIBE_SERVING_LOAD:
    return &plain_request_codec;
  case KVRELAY_METHOD_SUBSCRIBE_POOL:
    return &pool_request_codec;
  default:
    return NULL;
  }
}

/* ---- bytes in ---- */

/* Reads what is left of the stream.  `core` must be zero. */
static bool read_message(pb_istream_t *stream, const codec *c, void *core) {
  any_pb pb;
  memset(&pb, 0, c->pb_size);
  return pb_decode_ex(stream, c->fields, &pb, PB_DECODE_NOINIT) &&
         c->lift(stream->state, &pb, core);
}

/* The rest of the stream, in place. */
static bool read_text(pb_istream_t *stream, const pb_field_t *field, kvrelay_text *out) {
  reader *r = stream->state;
  if (PB_LTYPE(field->type) == PB_LTYPE_STRING && stream->bytes_left > r->text_max)
    return reader_fail(r, KVRELAY_ERR_LIMIT);
  out->ptr = r->pos;
  out->len = stream->bytes_left;
  r->pos += out->len; /* pb_read would fetch what it skips, 16 bytes at a time */
  stream->bytes_left = 0;
  return true;
}

/* What nanopb calls for each field that is a text or a list; its name stands in kvrelay.options. */
bool kvrelay_pb_field_(pb_istream_t *stream, pb_ostream_t *never, const pb_field_t *field) {
  (void)never; /* nothing is written through nanopb */
  /* A number where a length was due: nanopb has put it into a stream of its own. */
  if (stream->callback != reader_read)
    return false;
  if (PB_HTYPE(field->type) != PB_HTYPE_REPEATED)
    return read_text(stream, field, field->pData);
  reader *r = stream->state;
  if (!PB_LTYPE_IS_SUBMSG(field->type)) {
    kvrelay_text *text = reader_push(r, field->pData, sizeof *text, KVRELAY_ALIASES_MAX);
    return text && read_text(stream, field, text);
  }
  const codec *c = element_codec(field->submsg_desc);
  void *core = reader_push(r, field->pData, c->core_size, c->list_max);
  if (!core)
    return false;
  memset(core, 0, c->core_size);
  return read_message(stream, c, core);
}

/* True when the last of the outermost fields lacks bytes; any other defect is one of content. */
static bool ends_early(const uint8_t *bytes, size_t len) {
  pb_istream_t stream = pb_istream_from_buffer(bytes, len);
  pb_wire_type_t type;
  uint32_t tag;
  bool eof;
  while (pb_decode_tag(&stream, &type, &tag, &eof) && tag != 0)
    if (!pb_skip_field(&stream, type))
      return strcmp(PB_GET_ERROR(&stream), "end-of-stream") == 0;
  return !eof && strcmp(PB_GET_ERROR(&stream), "end-of-stream") == 0;
}

static int decode(const codec *c, size_t text_max, const uint8_t *bytes, size_t len,
                  kvrelay_pb_arena *arena, void *out) {
  if ((!bytes && len) || !out)
    return KVRELAY_ERR_ARG;
  reader r = {bytes, arena, text_max, KVRELAY_OK};
  const size_t used = arena ? arena->used : 0;
  pb_istream_t stream = {reader_read, &r, len, NULL};
  any_core core;
  memset(&core, 0, c->core_size);
  if (read_message(&stream, c, &core)) {
    memcpy(out, &core, c->core_size);
    return KVRELAY_OK;
  }
  if (arena)
    arena->used = used;
  if (r.err)
    return r.err;
  if (strcmp(PB_GET_ERROR(&stream), "array overflow") == 0)
    return KVRELAY_ERR_LIMIT;
  return ends_early(bytes, len) ? KVRELAY_ERR_TRUNCATED : KVRELAY_ERR_MALFORMED;
}

int kvrelay_pb_decode_request(int32_t method, const uint8_t *bytes, size_t len,
                              kvrelay_request *out) {
  const codec *c = request_codec(method);
  if (!c)
    return KVRELAY_ERR_UNSUPPORTED;
  kvrelay_request request;
  const int err = decode(c, SIZE_MAX, bytes, len, NULL, &request);
  if (err)
    return err;
  if (!kvrelay_utf8_valid(request.subscriber_id.ptr, request.subscriber_id.len))
    return KVRELAY_ERR_MALFORMED;
  request.method = method;
  *out = request;
  return KVRELAY_OK;
}

/* ---- bytes out ---- */

/* nanopb's writer computes the size of a submessage by writing it once more, so that each level of
 * nesting doubles the work below it; this one goes through nanopb's tables once. */
typedef struct writer {
  uint8_t *out; /* NULL: only count */
  size_t cap, len;
  int err;
} writer;

static size_t varint(uint8_t *out, uint64_t value) {
  size_t len = 0;
  for (; value >= 0x80; value >>= 7)
    out[len++] = (uint8_t)(value | 0x80);
  out[len++] = (uint8_t)value;
  return len;
}

static void put(writer *w, const void *bytes, size_t len) {
  if (w->out && len > w->cap - w->len)
    w->err = KVRELAY_ERR_NOSPACE;
  if (w->err)
    return;
  if (w->out && len)
    memcpy(w->out + w->len, bytes, len);
  w->len += len;
}

static void put_varint(writer *w, uint64_t value) {
  uint8_t bytes[10];
  put(w, bytes, varint(bytes, value));
}

static void put_tag(writer *w, const pb_field_t *field, pb_wire_type_t type) {
  put_varint(w, (uint64_t)field->tag << 3 | (unsigned)type);
}

/* Begins a field with a length, for which one byte is left; returns where it stands. */
static size_t put_open(writer *w, const pb_field_t *field) {
  put_tag(w, field, PB_WT_STRING);
  put(w, "", 1);
  return w->len;
}

/* Ends it: what was written since is its content, moved where the length needs more bytes. */
static void put_close(writer *w, size_t start) {
  if (w->err)
    return;
  uint8_t bytes[10];
  const size_t len = w->len - start, len_len = varint(bytes, len);
  put(w, bytes + 1, len_len - 1);
  if (!w->out || w->err)
    return;
  if (len_len > 1)
    memmove(w->out + start + len_len - 1, w->out + start, len);
  memcpy(w->out + start - 1, bytes, len_len);
}

static void put_text(writer *w, const pb_field_t *field, const kvrelay_text *text) {
  put_tag(w, field, PB_WT_STRING);
  put_varint(w, text->len);
  put(w, text->ptr, text->len);
}

static void write_message(writer *w, const pb_msgdesc_t *fields, const void *pb);

static void write_element(writer *w, const pb_field_t *field, const codec *c, const void *core) {
  any_pb pb;
  memset(&pb, 0, c->pb_size);
  if (!c->fill(core, &pb)) {
    w->err = KVRELAY_ERR_ARG;
    return;
  }
  const size_t start = put_open(w, field);
  write_message(w, c->fields, &pb);
  put_close(w, start);
}

/* A text or a list. */
static void write_lent(writer *w, const pb_field_t *field) {
  if (PB_HTYPE(field->type) != PB_HTYPE_REPEATED) {
    const kvrelay_text *text = field->pData;
    if (text->len)
      put_text(w, field, text);
    return;
  }
  const kvrelay_pb_list *list = field->pData;
  const bool texts = !PB_LTYPE_IS_SUBMSG(field->type);
  const codec *c = texts ? NULL : element_codec(field->submsg_desc);
  for (size_t i = 0; i < list->len && !w->err; i++)
    if (texts)
      put_text(w, field, (const kvrelay_text *)list->ptr + i);
    else
      write_element(w, field, c, (const uint8_t *)list->ptr + i * c->core_size);
}

static void write_roles(writer *w, const pb_field_t *field, size_t len) {
  const int32_t *roles = field->pData;
  if (len == 0)
    return;
  const size_t start = put_open(w, field);
  for (size_t i = 0; i < len; i++)
    put_varint(w, (uint64_t)(int64_t)roles[i]);
  put_close(w, start);
}

static void write_fixed(writer *w, const pb_field_t *field, uint64_t value) {
  const bool wide = field->data_size == 8;
  uint8_t bytes[8];
  for (int i = 0; i < 8; i++)
    bytes[i] = (uint8_t)(value >> (8 * i));
  put_tag(w, field, wide ? PB_WT_64BIT : PB_WT_32BIT);
  put(w, bytes, wide ? 8 : 4);
}

/* The number of a field: 32 bits with sign or without, 64 without, or a bool. */
static uint64_t number(const pb_field_t *field) {
  if (PB_LTYPE(field->type) == PB_LTYPE_BOOL)
    return *(const bool *)field->pData;
  if (PB_LTYPE(field->type) == PB_LTYPE_VARINT)
    return (uint64_t)(int64_t) * (const int32_t *)field->pData;
  return field->data_size == 8 ? *(const uint64_t *)field->pData : *(const uint32_t *)field->pData;
}

static void write_field(writer *w, const pb_field_t *field) {
  const pb_type_t has = PB_HTYPE(field->type);
  if (PB_ATYPE(field->type) == PB_ATYPE_CALLBACK) {
    write_lent(w, field);
  } else if (has == PB_HTYPE_REPEATED) {
    write_roles(w, field, *(const pb_size_t *)field->pSize);
  } else if (PB_LTYPE_IS_SUBMSG(field->type)) {
    if (has == PB_HTYPE_ONEOF ? *(const pb_size_t *)field->pSize != field->tag
                              : !*(const bool *)field->pSize)
      return;
    const size_t start = put_open(w, field);
    write_message(w, field->submsg_desc, field->pData);
    put_close(w, start);
  } else {
    const uint64_t value = number(field);
    if (field->pSize ? !*(const bool *)field->pSize : value == 0)
      return;
    if (PB_LTYPE(field->type) == PB_LTYPE_FIXED32 || PB_LTYPE(field->type) == PB_LTYPE_FIXED64) {
      write_fixed(w, field, value);
    } else {
      put_tag(w, field, PB_WT_VARINT);
      put_varint(w, value);
    }
  }
}

static void write_message(writer *w, const pb_msgdesc_t *fields, const void *pb) {
  pb_field_iter_t field;
  if (!pb_field_iter_begin_const(&field, fields, pb))
    return; /* a message without fields */
  do
    write_field(w, &field);
  while (pb_field_iter_next(&field) && !w->err);
}

static ptrdiff_t encode(const codec *c, const void *core, uint8_t *out, size_t cap) {
  any_pb pb;
  memset(&pb, 0, c->pb_size);
  if (!core || !c->fill(core, &pb))
    return KVRELAY_ERR_ARG;
  writer w = {out, cap, 0, KVRELAY_OK};
  write_message(&w, c->fields, &pb);
  return w.err ? w.err : (ptrdiff_t)w.len;
}

ptrdiff_t kvrelay_pb_encode_request(const kvrelay_request *m, uint8_t *out, size_t cap) {
  const codec *c = m ? request_codec(m->method) : NULL;
  return c ? encode(c, m, out, cap) : KVRELAY_ERR_UNSUPPORTED;
}

#define DEFINE(NAME, TYPE)                                                                         \
  int kvrelay_pb_decode_##NAME(const uint8_t *bytes, size_t len, kvrelay_pb_arena *arena,          \
                               TYPE *out) {                                                        \
    return decode(&NAME##_codec, KVRELAY_TEXT_MAX, bytes, len, arena, out);                        \
  }                                                                                                \
  ptrdiff_t kvrelay_pb_encode_##NAME(const TYPE *m, uint8_t *out, size_t cap) {                    \
    return encode(&NAME##_codec, m, out, cap);                                                     \
  }
KVRELAY_PB_MESSAGES(DEFINE)

/* ---- FilterUpdate by splice ---- */

const uint8_t kvrelay_pb_filter_tail[KVRELAY_PB_FILTER_TAIL_LEN] = {0xfd, 0x07, 0x31,
                                                                    0x52, 0x56, 0x4b};

int kvrelay_pb_filter_prefix_init(kvrelay_pb_filter_prefix *prefix,
                                  const kvrelay_filter_update *m) {
  if (m->envelope.contract_marker != KVRELAY_CONTRACT_MARKER)
    return KVRELAY_ERR_ARG;
  kvrelay_filter_update part = {.envelope = m->envelope, .producer = m->producer};
  part.envelope.contract_marker = 0;
  const ptrdiff_t len =
      kvrelay_pb_encode_filter(&part, prefix->bytes, KVRELAY_PB_FILTER_PREFIX_CAP);
  if (len < 0)
    return (int)len;
  prefix->len = (size_t)len;
  return KVRELAY_OK;
}

/* A varint field as proto3 writes it: nothing when zero. */
static size_t put_field(uint8_t *out, unsigned number, unsigned wire_type, uint64_t value) {
  if (value == 0)
    return 0;
  out[0] = (uint8_t)(number << 3 | wire_type);
  return 1 + varint(out + 1, value);
}

size_t kvrelay_pb_filter_head(const kvrelay_pb_filter_prefix *prefix,
                              const kvrelay_filter_update *m,
                              uint8_t out[KVRELAY_PB_FILTER_HEAD_CAP]) {
  memcpy(out, prefix->bytes, prefix->len);
  size_t len = prefix->len;
  len += put_field(out + len, kvpb_FilterUpdate_base_sequence_tag, PB_WT_VARINT, m->base_sequence);
  len += put_field(out + len, kvpb_FilterUpdate_sequence_tag, PB_WT_VARINT, m->sequence);
  len += put_field(out + len, kvpb_FilterUpdate_send_ts_us_tag, PB_WT_VARINT, m->send_ts_us);
  len += put_field(out + len, kvpb_FilterUpdate_kind_tag, PB_WT_VARINT, (uint64_t)(int64_t)m->kind);
  len += put_field(out + len, kvpb_FilterUpdate_payload_tag, PB_WT_STRING, m->payload_len);
  return len;
}

/* At most nine bytes, which all numbers but the largest have. */
static bool take_varint(const uint8_t **at, const uint8_t *end, uint64_t *value) {
  *value = 0;
  for (unsigned shift = 0; shift < 63 && *at < end; shift += 7) {
    const uint8_t byte = *(*at)++;
    *value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80)
      return true;
  }
  return false;
}

/* Reads what kvrelay_pb_filter_head writes behind the prefix, payload and tail; false: anything
 * else. */
static bool read_spliced(const uint8_t *at, const uint8_t *end, kvrelay_filter_update *m) {
  enum { BASE, SEQUENCE, SENT, KIND, PAYLOAD, NUMBERS };
  static const uint8_t tags[NUMBERS] = {kvpb_FilterUpdate_base_sequence_tag << 3 | PB_WT_VARINT,
                                        kvpb_FilterUpdate_sequence_tag << 3 | PB_WT_VARINT,
                                        kvpb_FilterUpdate_send_ts_us_tag << 3 | PB_WT_VARINT,
                                        kvpb_FilterUpdate_kind_tag << 3 | PB_WT_VARINT,
                                        kvpb_FilterUpdate_payload_tag << 3 | PB_WT_STRING};
  uint64_t value[NUMBERS] = {0};
  m->payload = NULL;
  for (int i = 0; i < NUMBERS; i++)
    if (at < end && *at == tags[i]) {
      at++;
      if (!take_varint(&at, end, &value[i]))
        return false;
      if (i == PAYLOAD)
        m->payload = at;
    }
  const size_t left = (size_t)(end - at);
  if (left < KVRELAY_PB_FILTER_TAIL_LEN || value[PAYLOAD] != left - KVRELAY_PB_FILTER_TAIL_LEN ||
      value[KIND] > INT32_MAX ||
      memcmp(at + value[PAYLOAD], kvrelay_pb_filter_tail, KVRELAY_PB_FILTER_TAIL_LEN) != 0)
    return false;
  m->base_sequence = value[BASE];
  m->sequence = value[SEQUENCE];
  m->send_ts_us = value[SENT];
  m->kind = (int32_t)value[KIND];
  m->payload_len = (size_t)value[PAYLOAD];
  return true;
}

/* The prefix is of use when the message begins with exactly these bytes. */
static void begin_stream(kvrelay_pb_filter_stream *stream, const uint8_t *bytes, size_t len,
                         const kvrelay_filter_update *m) {
  kvrelay_pb_filter_prefix *prefix = &stream->prefix_;
  stream->begun_ = true;
  stream->envelope_ = m->envelope;
  stream->producer_ = m->producer;
  if (kvrelay_pb_filter_prefix_init(prefix, m) != KVRELAY_OK || prefix->len > len ||
      memcmp(prefix->bytes, bytes, prefix->len) != 0)
    prefix->len = 0;
}

int kvrelay_pb_filter_read(kvrelay_pb_filter_stream *stream, const uint8_t *bytes, size_t len,
                           kvrelay_filter_update *out) {
  const kvrelay_pb_filter_prefix *prefix = &stream->prefix_;
  if (prefix->len && len >= prefix->len && out && bytes &&
      memcmp(bytes, prefix->bytes, prefix->len) == 0) {
    kvrelay_filter_update m;
    memset(&m, 0, sizeof m);
    if (read_spliced(bytes + prefix->len, bytes + len, &m)) {
      m.envelope = stream->envelope_;
      m.producer = stream->producer_;
      *out = m;
      return KVRELAY_OK;
    }
  }
  const int err = kvrelay_pb_decode_filter(bytes, len, NULL, out);
  if (err == KVRELAY_OK && !stream->begun_)
    begin_stream(stream, bytes, len, out);
  return err;
}
