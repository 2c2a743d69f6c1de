/* SPDX-License-Identifier: Apache-2.0 */
#include "toy_service.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum toy_method { TOY_ECHO = 1, TOY_COUNT, TOY_COPIED, TOY_REFUSE, TOY_END, TOY_SILENT, TOY_CHAT };

struct toy_call {
  toy_call *next;
  kvrelay_call *transport;
  int method;
  int requests;
  bool half_closed, ended, shut;
  uint8_t *out; /* the message to hand out */
  size_t out_len;
  long left; /* messages to hand out */
  long index;
  bool released;
  kvrelay_status end;
};

static toy_service *toy_of(kvrelay_service *self) { return (toy_service *)self; }

static void set_status(kvrelay_status *status, int grpc, int reason, const char *text) {
  status->grpc = grpc;
  status->reason = reason;
  snprintf(status->text, sizeof status->text, "%s", text);
}

static int toy_open(kvrelay_service *self, kvrelay_call *call, const uint8_t *path, size_t path_len,
                    uint64_t now_ns, void **handle, kvrelay_status *status) {
  static const char *const names[] = {"Echo", "Count", "Copied", "Refuse", "End", "Silent", "Chat"};
  static const char prefix[] = "/kvrelay.test.Toy/";
  const size_t n = sizeof prefix - 1;
  toy_service *toy = toy_of(self);
  (void)now_ns;
  if (toy->on_open != NULL)
    toy->on_open(call);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (path_len == n + strlen(names[i]) && memcmp(path, prefix, n) == 0 &&
        memcmp(path + n, names[i], path_len - n) == 0) {
      toy_call *c = calloc(1, sizeof *c);
      if (c == NULL)
        abort();
      c->method = (int)i + 1;
      c->transport = call;
      c->next = toy->calls;
      toy->calls = c;
      toy->opened++;
      toy->open_now++;
      *handle = c;
      return KVRELAY_OK;
    }
  set_status(status, KVRELAY_GRPC_UNIMPLEMENTED, KVRELAY_REASON_NONE, "no such method");
  return KVRELAY_ERR_REFUSED;
}

static void keep(toy_call *c, const void *bytes, size_t len) {
  free(c->out);
  c->out = malloc(len + 1);
  if (c->out == NULL)
    abort();
  if (len > 0)
    memcpy(c->out, bytes, len);
  c->out[len] = 0;
  c->out_len = len;
}

static bool counts(const toy_call *c) { return c->method == TOY_COUNT || c->method == TOY_COPIED; }

/* Nobody may read what Count handed out. */
static void forget(toy_call *c) {
  if (!counts(c))
    return;
  free(c->out);
  c->out = NULL;
}

/* The message of Count that is next. */
static void count(toy_call *c) {
  forget(c);
  c->out = malloc(c->out_len + 1);
  if (c->out == NULL)
    abort();
  for (size_t j = 0; j < c->out_len; j++)
    c->out[j] = (uint8_t)((size_t)c->index + j);
}

static int toy_message(kvrelay_service *self, void *handle, const uint8_t *bytes, size_t len,
                       uint64_t now_ns, kvrelay_status *status) {
  toy_service *toy = toy_of(self);
  toy_call *c = handle;
  (void)now_ns;
  toy->messages++;
  toy->broken += c->ended || c->half_closed;
  if (c->method != TOY_CHAT && ++c->requests > 1) {
    set_status(status, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_NONE, "more than one request message");
    return KVRELAY_ERR_REFUSED;
  }
  keep(c, bytes, len);
  c->left = c->method == TOY_ECHO || c->method == TOY_CHAT;
  return KVRELAY_OK;
}

static int toy_half_close(kvrelay_service *self, void *handle, uint64_t now_ns,
                          kvrelay_status *status) {
  toy_service *toy = toy_of(self);
  toy_call *c = handle;
  (void)now_ns;
  toy->half_closes++;
  toy->broken += c->ended || c->half_closed;
  c->half_closed = true;
  if (c->method != TOY_CHAT && c->requests == 0) {
    set_status(status, KVRELAY_GRPC_INTERNAL, KVRELAY_REASON_NONE, "no request message");
    return KVRELAY_ERR_REFUSED;
  }
  const char *text = (const char *)c->out;
  if (counts(c)) {
    char *rest;
    c->left = strtol(text, &rest, 10);
    c->out_len = strtoul(rest, NULL, 10);
    forget(c);
  } else if (c->method == TOY_REFUSE || c->method == TOY_END) {
    char *rest;
    int grpc = (int)strtol(text, &rest, 10);
    int reason = (int)strtol(rest, &rest, 10);
    set_status(&c->end, grpc, reason, *rest == ' ' ? rest + 1 : rest);
    c->left = c->method == TOY_END;
    if (c->method == TOY_REFUSE) {
      *status = c->end;
      return KVRELAY_ERR_REFUSED;
    }
    keep(c, "x", 1);
  } else if (c->method == TOY_SILENT) {
    keep(c, "released", 8);
  }
  return KVRELAY_OK;
}

static bool toy_admitted(kvrelay_service *self, void *handle) {
  toy_call *c = handle;
  (void)self;
  return c->half_closed && c->method == TOY_SILENT;
}

static int toy_pull(kvrelay_service *self, void *handle, uint64_t now_ns, kvrelay_parts *parts,
                    kvrelay_status *status) {
  toy_service *toy = toy_of(self);
  toy_call *c = handle;
  (void)now_ns;
  toy->broken += c->ended;
  if (c->shut) {
    c->ended = true;
    set_status(status, KVRELAY_GRPC_OK, KVRELAY_REASON_NONE, "");
    return KVRELAY_PULL_END;
  }
  if (c->method == TOY_SILENT ? !c->released
                              : !c->half_closed && (c->method != TOY_CHAT || c->left == 0))
    return KVRELAY_PULL_NONE;
  if (c->method == TOY_SILENT && c->index == 0)
    c->left = 1;
  if (c->left == 0) {
    c->ended = true;
    *status = c->end;
    return KVRELAY_PULL_END;
  }
  if (counts(c))
    count(c);
  /* Three parts, of which one may be empty. */
  const uint8_t *from = c->out;
  size_t first = c->out_len / 3, second = c->out_len / 2 - first;
  parts->part[0] = (kvrelay_iov){from, first};
  parts->part[1] = (kvrelay_iov){from + first, second};
  parts->part[2] = (kvrelay_iov){from + first + second, c->out_len - first - second};
  parts->part_len = 3;
  parts->bytes = c->out_len;
  if (c->method == TOY_COUNT && c->transport->keeps)
    parts->kept_len = c->index % 2 == 0 ? 3 : 2;
  c->left--;
  c->index++;
  toy->pulled++;
  return KVRELAY_PULL_MESSAGE;
}

static void toy_close(kvrelay_service *self, void *handle, uint64_t now_ns) {
  toy_service *toy = toy_of(self);
  toy_call **at = &toy->calls;
  (void)now_ns;
  while (*at != NULL && *at != handle)
    at = &(*at)->next;
  if (*at == NULL) {
    toy->broken++;
    return;
  }
  toy_call *c = *at;
  *at = c->next;
  toy->closed++;
  toy->open_now--;
  free(c->out);
  free(c);
}

void toy_service_init(toy_service *toy) {
  memset(toy, 0, sizeof *toy);
  toy->base =
      (kvrelay_service){toy_open, toy_message, toy_half_close, toy_admitted, toy_pull, toy_close};
}

void toy_service_release(toy_service *toy) {
  for (toy_call *c = toy->calls; c != NULL; c = c->next)
    if (c->method == TOY_SILENT) {
      c->released = true;
      c->transport->wake(c->transport);
    }
}

void toy_service_wake(toy_service *toy) {
  for (toy_call *c = toy->calls; c != NULL; c = c->next) {
    c->transport->wake(c->transport);
    forget(c);
  }
}

void toy_service_shutdown(toy_service *toy) {
  for (toy_call *c = toy->calls; c != NULL; c = c->next) {
    c->shut = true;
    c->transport->wake(c->transport);
    forget(c);
  }
}

void toy_service_free(toy_service *toy) {
  while (toy->calls != NULL) {
    toy_call *c = toy->calls;
    toy->calls = c->next;
    free(c->out);
    free(c);
  }
}
