/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_reflection.h"

#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "descriptors.h"
#include "reflection.pb.h"

typedef struct question {
  STAILQ_ENTRY(question) link;
  kvreflect_ServerReflectionRequest request; /* points into the bytes */
  size_t len;
  uint8_t bytes[];
} question;

typedef struct reflection_call {
  TAILQ_ENTRY(reflection_call) link;
  kvrelay_call *transport;
  STAILQ_HEAD(, question) questions;
  size_t waiting_bytes;
  uint8_t *answer; /* lent out until the next pull */
  bool half_closed;
} reflection_call;

struct kvrelay_grpc_reflection {
  kvrelay_service base; /* first */
  TAILQ_HEAD(, reflection_call) calls;
  size_t calls_len;
  kvreflect_ServiceResponse *services;
  size_t services_len;
  bool stopping;
};

/* ---- questions ---- */

static int reflection_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path,
                           size_t path_len, uint64_t now_ns, void **handle,
                           kvrelay_status *status) {
  static const char *const paths[] = {"/" KVRELAY_GRPC_REFLECTION_NAME "/ServerReflectionInfo",
                                      "/" KVRELAY_GRPC_REFLECTION_OLD_NAME "/ServerReflectionInfo"};
  kvrelay_grpc_reflection *r = (kvrelay_grpc_reflection *)self;
  bool known = false;
  (void)now_ns;
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
    known |= path_len == strlen(paths[i]) && memcmp(path, paths[i], path_len) == 0;
  if (!known)
    return kvrelay_refuse(status, KVRELAY_GRPC_UNIMPLEMENTED, "unknown method");
  if (r->calls_len == KVRELAY_GRPC_REFLECTION_CALLS)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "too many calls of reflection");
  reflection_call *c = calloc(1, sizeof *c);
  if (c == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
  c->transport = call;
  STAILQ_INIT(&c->questions);
  TAILQ_INSERT_TAIL(&r->calls, c, link);
  r->calls_len++;
  *handle = c;
  return KVRELAY_OK;
}

static int reflection_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                              uint64_t now_ns, kvrelay_status *status) {
  reflection_call *c = handle;
  (void)self;
  (void)now_ns;
  if (c->waiting_bytes > KVRELAY_GRPC_REFLECTION_WAITING)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED,
                          "questions come faster than their answers are read");
  question *q = malloc(sizeof *q + len);
  if (q == NULL)
    return kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
  memset(q, 0, sizeof *q);
  q->len = len;
  if (len != 0)
    memcpy(q->bytes, bytes, len);
  if (kvrelay_lent_decode(kvreflect_ServerReflectionRequest_fields, q->bytes, len, &q->request)) {
    free(q);
    return kvrelay_refuse(status, KVRELAY_GRPC_INTERNAL, "the request does not decode");
  }
  STAILQ_INSERT_TAIL(&c->questions, q, link);
  c->waiting_bytes += sizeof *q + len;
  c->transport->wake(c->transport);
  return KVRELAY_OK;
}

static int reflection_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                                 kvrelay_status *status) {
  (void)self;
  (void)now_ns;
  (void)status;
  ((reflection_call *)handle)->half_closed = true;
  return KVRELAY_OK;
}

static bool reflection_admitted(kvrelay_service *self, void *handle) {
  (void)self;
  (void)handle;
  return true; /* some clients ask only when they have seen the headers */
}

static void drop_question(reflection_call *c) {
  question *q = STAILQ_FIRST(&c->questions);
  c->waiting_bytes -= sizeof *q + q->len;
  STAILQ_REMOVE_HEAD(&c->questions, link);
  free(q);
}

static void reflection_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  kvrelay_grpc_reflection *r = (kvrelay_grpc_reflection *)self;
  reflection_call *c = handle;
  (void)now_ns;
  while (!STAILQ_EMPTY(&c->questions))
    drop_question(c);
  TAILQ_REMOVE(&r->calls, c, link);
  r->calls_len--;
  free(c->answer);
  free(c);
}

/* ---- answers ---- */

/* As strcmp; what was asked for may hold anything. */
static int compare(kvrelay_text asked, const char *name) {
  return kvrelay_text_compare(asked, (kvrelay_text){(const uint8_t *)name, strlen(name)});
}

static const kvrelay_descriptor_file *file_by_name(kvrelay_text name) {
  for (size_t i = 0; i < kvrelay_descriptor_files_len; i++)
    if (compare(name, kvrelay_descriptor_files[i].name) == 0)
      return &kvrelay_descriptor_files[i];
  return NULL;
}

static const kvrelay_descriptor_file *file_by_symbol(kvrelay_text symbol) {
  size_t low = 0, high = kvrelay_descriptor_symbols_len;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    const int order = compare(symbol, kvrelay_descriptor_symbols[middle].name);
    if (order == 0)
      return &kvrelay_descriptor_files[kvrelay_descriptor_symbols[middle].file];
    if (order < 0)
      high = middle;
    else
      low = middle + 1;
  }
  return NULL;
}

static void answer_error(kvreflect_ServerReflectionResponse *out, int32_t code, const char *text) {
  out->which_message_response = kvreflect_ServerReflectionResponse_error_response_tag;
  out->message_response.error_response.error_code = code;
  out->message_response.error_response.error_message =
      (kvrelay_text){(const uint8_t *)text, strlen(text)};
}

static void answer_file(kvreflect_ServerReflectionResponse *out,
                        const kvrelay_descriptor_file *file, const char *otherwise) {
  if (file == NULL) {
    answer_error(out, KVRELAY_GRPC_NOT_FOUND, otherwise);
    return;
  }
  out->which_message_response = kvreflect_ServerReflectionResponse_file_descriptor_response_tag;
  out->message_response.file_descriptor_response.file_descriptor_proto =
      (kvrelay_lent_list){file->descriptors, file->descriptors_len, sizeof(kvrelay_text)};
}

static void answer(const kvrelay_grpc_reflection *r, const kvreflect_ServerReflectionRequest *in,
                   kvreflect_ServerReflectionResponse *out) {
  memset(out, 0, sizeof *out);
  out->valid_host = in->host;
  out->has_original_request = true;
  out->original_request = *in;
  switch (in->which_message_request) {
  case kvreflect_ServerReflectionRequest_file_by_filename_tag:
    answer_file(out, file_by_name(in->message_request.file_by_filename), "no such file");
    break;
  case kvreflect_ServerReflectionRequest_file_containing_symbol_tag:
    answer_file(out, file_by_symbol(in->message_request.file_containing_symbol), "no such symbol");
    break;
  case kvreflect_ServerReflectionRequest_file_containing_extension_tag:
  case kvreflect_ServerReflectionRequest_all_extension_numbers_of_type_tag:
    answer_error(out, KVRELAY_GRPC_NOT_FOUND, "there are no extensions");
    break;
  case kvreflect_ServerReflectionRequest_list_services_tag:
    out->which_message_response = kvreflect_ServerReflectionResponse_list_services_response_tag;
    out->message_response.list_services_response.service =
        (kvrelay_lent_list){r->services, r->services_len, sizeof *r->services};
    break;
  default:
    answer_error(out, KVRELAY_GRPC_INVALID_ARGUMENT, "nothing is asked");
    break;
  }
}

static int reflection_pull(kvrelay_service *self, void *handle, uint64_t now_ns,
                           kvrelay_parts *parts, kvrelay_status *status) {
  const kvrelay_grpc_reflection *r = (const kvrelay_grpc_reflection *)self;
  reflection_call *c = handle;
  (void)now_ns;
  free(c->answer);
  c->answer = NULL;
  const question *q = STAILQ_FIRST(&c->questions);
  if (q == NULL && !c->half_closed && !r->stopping)
    return KVRELAY_PULL_NONE;
  (void)kvrelay_refuse(status, KVRELAY_GRPC_OK, "");
  if (q == NULL)
    return KVRELAY_PULL_END;
  kvreflect_ServerReflectionResponse response;
  answer(r, &q->request, &response);
  const size_t len = kvrelay_lent_size(kvreflect_ServerReflectionResponse_fields, &response);
  c->answer = malloc(len);
  if (c->answer == NULL || kvrelay_lent_encode(kvreflect_ServerReflectionResponse_fields, &response,
                                               c->answer, len) < 0) {
    (void)kvrelay_refuse(status, KVRELAY_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    return KVRELAY_PULL_END;
  }
  drop_question(c);
  *parts = (kvrelay_parts){.part = {{c->answer, len}}, .part_len = 1, .bytes = len};
  return KVRELAY_PULL_MESSAGE;
}

/* ---- life ---- */

int kvrelay_grpc_reflection_open(const char *const *services, size_t services_len,
                                 kvrelay_grpc_reflection **out) {
  kvrelay_grpc_reflection *r = calloc(1, sizeof *r);
  if (r == NULL)
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  TAILQ_INIT(&r->calls);
  r->base = (kvrelay_service){reflection_open,     reflection_message, reflection_half_close,
                              reflection_admitted, reflection_pull,    reflection_close};
  r->services_len = services_len;
  r->services = calloc(services_len + 1, sizeof *r->services);
  if (r->services == NULL) {
    free(r);
    return KVRELAY_TRANSPORT_ERR_MEMORY;
  }
  for (size_t i = 0; i < services_len; i++)
    r->services[i].name = (kvrelay_text){(const uint8_t *)services[i], strlen(services[i])};
  *out = r;
  return KVRELAY_TRANSPORT_OK;
}

kvrelay_service *kvrelay_grpc_reflection_base(kvrelay_grpc_reflection *reflection) {
  return &reflection->base;
}

void kvrelay_grpc_reflection_shutdown(kvrelay_grpc_reflection *r) {
  reflection_call *c;
  r->stopping = true;
  TAILQ_FOREACH(c, &r->calls, link)
  c->transport->wake(c->transport);
}

void kvrelay_grpc_reflection_close(kvrelay_grpc_reflection *reflection) {
  if (reflection == NULL)
    return;
  free(reflection->services);
  free(reflection);
}
