/* SPDX-License-Identifier: Apache-2.0 */

/* Health, reflection and the mux in front of them, called as a transport calls them; numbers are
 * those of the transport's requirements. */

#include "descriptors.h"
#include "grpc/grpc_health.h"
#include "grpc/grpc_reflection.h"
#include "mux.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#define CHECK "/grpc.health.v1.Health/Check"
#define WATCH "/grpc.health.v1.Health/Watch"
#define LIST "/grpc.health.v1.Health/List"
#define REFLECT "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

/* ---- a transport of one call ---- */

typedef struct one_call {
  kvrelay_call base; /* first */
  kvrelay_service *service;
  void *handle;
  int woken;
  kvrelay_status status;
  uint8_t got[16384]; /* the last message */
  size_t got_len;
} one_call;

static void on_wake(kvrelay_call *call) { ((one_call *)call)->woken++; }

static int call_open(one_call *c, kvrelay_service *service, const char *path) {
  memset(c, 0, sizeof *c);
  c->base.wake = on_wake;
  c->service = service;
  return service->open(service, &c->base, (const uint8_t *)path, strlen(path), 1, &c->handle,
                       &c->status);
}

static int call_send(one_call *c, const void *bytes, size_t len) {
  return c->service->message(c->service, c->handle, bytes, len, 1, &c->status);
}

static int call_half_close(one_call *c) {
  return c->service->half_close(c->service, c->handle, 1, &c->status);
}

static int call_pull(one_call *c) {
  kvrelay_parts parts;
  const int what = c->service->pull(c->service, c->handle, 1, &parts, &c->status);
  if (what != KVRELAY_PULL_MESSAGE)
    return what;
  cr_assert_eq(parts.part_len, 1);
  cr_assert_eq(parts.part[0].len, parts.bytes);
  c->got_len = parts.bytes;
  memcpy(c->got, parts.part[0].base, parts.bytes < sizeof c->got ? parts.bytes : sizeof c->got);
  return what;
}

static void call_close(one_call *c) { c->service->close(c->service, c->handle, 1); }

/* ---- health ---- */

static kvrelay_grpc_health *health;
static kvrelay_service *service;

static void setup_health(void) {
  cr_assert_eq(kvrelay_grpc_health_open(&health), KVRELAY_TRANSPORT_OK);
  service = kvrelay_grpc_health_base(health);
}

static void teardown_health(void) { kvrelay_grpc_health_close(health); }

TestSuite(grpc_health, .init = setup_health, .fini = teardown_health);

static void ask(one_call *c, const char *path, const char *name) {
  uint8_t request[260];
  const size_t len = strlen(name);
  size_t at = 0;
  request[at++] = 0x0a;
  if (len >= 128)
    request[at++] = (uint8_t)(len | 0x80);
  request[at++] = (uint8_t)(len >= 128 ? len >> 7 : len);
  memcpy(request + at, name, len);
  cr_assert_eq(call_open(c, service, path), KVRELAY_OK);
  cr_assert_eq(call_send(c, request, at + len), KVRELAY_OK);
}

/* The status in the message that is there, 0 for an empty one. */
static int pulled_status(one_call *c) {
  cr_assert_eq(call_pull(c), KVRELAY_PULL_MESSAGE);
  cr_assert(c->got_len == 0 || (c->got_len == 2 && c->got[0] == 0x08));
  return c->got_len == 0 ? 0 : c->got[1];
}

/* The status that Check tells, or minus the gRPC status it is refused with. */
static int check(const char *name) {
  one_call c;
  ask(&c, CHECK, name);
  int result = call_half_close(&c) == KVRELAY_OK ? pulled_status(&c) : -c.status.grpc;
  if (result >= 0) {
    cr_assert_eq(call_pull(&c), KVRELAY_PULL_END);
    cr_assert_eq(c.status.grpc, KVRELAY_GRPC_OK);
  }
  call_close(&c);
  return result;
}

static void watch(one_call *c, const char *name) {
  ask(c, WATCH, name);
  cr_assert_eq(call_half_close(c), KVRELAY_OK);
}

Test(grpc_health, S80_check_tells_what_was_set) {
  cr_assert_eq(check(""), KVRELAY_GRPC_HEALTH_NOT_SERVING, "until somebody says otherwise");
  cr_assert_eq(check("a.B"), -KVRELAY_GRPC_NOT_FOUND);
  for (int status = KVRELAY_GRPC_HEALTH_UNKNOWN; status <= KVRELAY_GRPC_HEALTH_NOT_SERVING;
       status++) {
    cr_assert_eq(kvrelay_grpc_health_set(health, "a.B", status), KVRELAY_TRANSPORT_OK);
    cr_assert_eq(check("a.B"), status);
  }
  cr_assert_eq(check("a.b"), -KVRELAY_GRPC_NOT_FOUND);
  cr_assert_eq(check("a."), -KVRELAY_GRPC_NOT_FOUND);
  cr_assert_eq(check("a.BB"), -KVRELAY_GRPC_NOT_FOUND);
}

Test(grpc_health, S80_S6_exactly_one_request) {
  static const char *const paths[] = {CHECK, WATCH, LIST};
  for (size_t i = 0; i < 3; i++) {
    one_call c;
    cr_assert_eq(call_open(&c, service, paths[i]), KVRELAY_OK);
    cr_assert_eq(call_half_close(&c), KVRELAY_ERR_REFUSED);
    cr_assert_eq(c.status.grpc, KVRELAY_GRPC_INTERNAL);
    call_close(&c);
    cr_assert_eq(call_open(&c, service, paths[i]), KVRELAY_OK);
    cr_assert_eq(call_send(&c, "", 0), KVRELAY_OK);
    cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE, "not before the half-close");
    cr_assert_not(service->admitted(service, c.handle));
    cr_assert_eq(call_send(&c, "", 0), KVRELAY_ERR_REFUSED);
    cr_assert_eq(c.status.grpc, KVRELAY_GRPC_INTERNAL);
    call_close(&c);
  }
}

Test(grpc_health, S80_S7_requests_that_do_not_decode) {
  static const struct {
    const char *bytes;
    size_t len;
  } bad[] = {{"\x0a", 1}, {"\x0a\x02g", 3}, {"\x0a\x01\xff", 3}, {"\x08\x01", 2}, {"\xff", 1}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    for (int watched = 0; watched < 2; watched++) {
      one_call c;
      cr_assert_eq(call_open(&c, service, watched ? WATCH : CHECK), KVRELAY_OK);
      cr_assert_eq(call_send(&c, bad[i].bytes, bad[i].len), KVRELAY_ERR_REFUSED, "%zu", i);
      cr_assert_eq(c.status.grpc, KVRELAY_GRPC_INTERNAL);
      call_close(&c);
    }
  one_call c;
  cr_assert_eq(call_open(&c, service, LIST), KVRELAY_OK);
  cr_assert_eq(call_send(&c, "\x0a\x05", 2), KVRELAY_ERR_REFUSED);
  call_close(&c);
}

Test(grpc_health, S81_watch_tells_the_present_and_every_change) {
  one_call c, other;
  watch(&c, "a.B");
  watch(&other, "");
  cr_assert(service->admitted(service, c.handle));
  cr_assert_eq(pulled_status(&c), 3, "SERVICE_UNKNOWN");
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE, "and it stays open");
  static const int changes[] = {KVRELAY_GRPC_HEALTH_SERVING, KVRELAY_GRPC_HEALTH_NOT_SERVING,
                                KVRELAY_GRPC_HEALTH_UNKNOWN, KVRELAY_GRPC_HEALTH_SERVING};
  for (size_t i = 0; i < 4; i++) {
    c.woken = 0;
    cr_assert_eq(kvrelay_grpc_health_set(health, "a.B", changes[i]), KVRELAY_TRANSPORT_OK);
    cr_assert_eq(c.woken, 1);
    cr_assert_eq(pulled_status(&c), changes[i]);
    cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE);
  }
  cr_assert_eq(pulled_status(&other), KVRELAY_GRPC_HEALTH_NOT_SERVING);
  cr_assert_eq(call_pull(&other), KVRELAY_PULL_NONE, "the other name did not change");
  call_close(&c);
  call_close(&other);
}

Test(grpc_health, S81_a_slow_watcher_gets_the_newest) {
  one_call c;
  watch(&c, "");
  cr_assert_eq(pulled_status(&c), KVRELAY_GRPC_HEALTH_NOT_SERVING);
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_SERVING);
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_UNKNOWN);
  cr_assert_eq(pulled_status(&c), KVRELAY_GRPC_HEALTH_UNKNOWN);
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_SERVING);
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_UNKNOWN);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE, "back to what it knows");
  call_close(&c);
}

Test(grpc_health, S82_list_holds_all_names_at_their_longest) {
  char name[KVRELAY_GRPC_HEALTH_NAME_MAX + 2] = "";
  memset(name, 'n', KVRELAY_GRPC_HEALTH_NAME_MAX);
  for (int i = 1; i < KVRELAY_GRPC_HEALTH_SERVICES; i++) {
    name[0] = (char)('a' + i);
    cr_assert_eq(kvrelay_grpc_health_set(health, name, i % 3), KVRELAY_TRANSPORT_OK);
  }
  one_call c;
  cr_assert_eq(call_open(&c, service, LIST), KVRELAY_OK);
  cr_assert_eq(call_send(&c, "", 0), KVRELAY_OK);
  cr_assert_eq(call_half_close(&c), KVRELAY_OK);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_MESSAGE);
  size_t at = 0, entries = 0;
  for (; at < c.got_len; entries++) { /* 0a LENGTH [0a LENGTH name] 12 LENGTH [08 status] */
    cr_assert_eq(c.got[at++], 0x0a);
    at += c.got[at] & 0x80 ? 2 : 1;
    if (entries > 0) {
      cr_assert_eq(memcmp(c.got + at, "\x0a\x80\x01", 3), 0);
      at += 3;
      cr_assert_eq(c.got[at], 'a' + entries);
      at += KVRELAY_GRPC_HEALTH_NAME_MAX;
    }
    const int status = entries == 0 ? KVRELAY_GRPC_HEALTH_NOT_SERVING : (int)entries % 3;
    cr_assert_eq(c.got[at++], 0x12);
    cr_assert_eq(c.got[at++], status ? 2 : 0);
    if (status)
      cr_assert(c.got[at] == 0x08 && c.got[at + 1] == status);
    at += status ? 2 : 0;
  }
  cr_assert_eq(at, c.got_len);
  cr_assert_eq(entries, KVRELAY_GRPC_HEALTH_SERVICES);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_END);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_OK);
  call_close(&c);
  cr_assert_eq(kvrelay_grpc_health_set(health, "one more", 1), KVRELAY_TRANSPORT_ERR_LIMIT);
  cr_assert_eq(check("one more"), -KVRELAY_GRPC_NOT_FOUND);
}

Test(grpc_health, S82_names_and_statuses_that_cannot_be) {
  char name[KVRELAY_GRPC_HEALTH_NAME_MAX + 2] = "";
  memset(name, 'n', KVRELAY_GRPC_HEALTH_NAME_MAX + 1);
  cr_assert_eq(kvrelay_grpc_health_set(health, name, 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(kvrelay_grpc_health_set(health, "\xc0\x80", 1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(kvrelay_grpc_health_set(health, "x", -1), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(kvrelay_grpc_health_set(health, "x", 3), KVRELAY_TRANSPORT_ERR_ARG);
  cr_assert_eq(check("x"), -KVRELAY_GRPC_NOT_FOUND);
  /* Such a name may be watched: it is unknown for ever. */
  cr_assert_eq(check(name), -KVRELAY_GRPC_NOT_FOUND);
  one_call c;
  watch(&c, name);
  cr_assert_eq(pulled_status(&c), 3);
  name[KVRELAY_GRPC_HEALTH_NAME_MAX] = 0;
  cr_assert_eq(kvrelay_grpc_health_set(health, name, 1), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE);
  call_close(&c);
}

Test(grpc_health, S84_watchers_have_a_bound_of_their_own) {
  static one_call calls[KVRELAY_GRPC_HEALTH_WATCHERS];
  for (size_t i = 0; i < KVRELAY_GRPC_HEALTH_WATCHERS; i++)
    cr_assert_eq(call_open(&calls[i], service, WATCH), KVRELAY_OK);
  one_call c;
  cr_assert_eq(call_open(&c, service, WATCH), KVRELAY_ERR_REFUSED);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_assert_eq(check(""), KVRELAY_GRPC_HEALTH_NOT_SERVING, "probes go on");
  call_close(&calls[7]);
  cr_assert_eq(call_open(&calls[7], service, WATCH), KVRELAY_OK);
  for (size_t i = 0; i < KVRELAY_GRPC_HEALTH_WATCHERS; i++)
    call_close(&calls[i]);
}

Test(grpc_health, S44_shutdown_is_told_and_final) {
  one_call c, unknown, silent;
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_SERVING);
  watch(&c, "");
  watch(&unknown, "x");
  cr_assert_eq(pulled_status(&c), KVRELAY_GRPC_HEALTH_SERVING);
  cr_assert_eq(pulled_status(&unknown), 3);
  cr_assert_eq(call_open(&silent, service, WATCH), KVRELAY_OK);
  kvrelay_grpc_health_shutdown(health);
  cr_assert(c.woken && unknown.woken);
  cr_assert_eq(pulled_status(&c), KVRELAY_GRPC_HEALTH_NOT_SERVING);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_END);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_OK);
  cr_assert_eq(call_pull(&unknown), KVRELAY_PULL_END);
  cr_assert_eq(call_pull(&silent), KVRELAY_PULL_NONE, "it has not even asked");
  call_close(&c);
  call_close(&unknown);
  call_close(&silent);
  cr_assert_eq(kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_SERVING),
               KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_grpc_health_set(health, "new", KVRELAY_GRPC_HEALTH_SERVING),
               KVRELAY_TRANSPORT_OK);
  cr_assert_eq(check(""), KVRELAY_GRPC_HEALTH_NOT_SERVING);
  cr_assert_eq(check("new"), KVRELAY_GRPC_HEALTH_NOT_SERVING);
}

/* ---- reflection ---- */

static kvrelay_grpc_reflection *reflection;

static void setup_reflection(void) {
  static const char *const names[] = {"a.B"};
  cr_assert_eq(kvrelay_grpc_reflection_open(names, 1, &reflection), KVRELAY_TRANSPORT_OK);
  service = kvrelay_grpc_reflection_base(reflection);
}

static void teardown_reflection(void) { kvrelay_grpc_reflection_close(reflection); }

TestSuite(grpc_reflection, .init = setup_reflection, .fini = teardown_reflection);

Test(grpc_reflection, S92_an_answer_byte_by_byte) {
  one_call c;
  cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
  cr_assert(service->admitted(service, c.handle));
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE);
  cr_assert_eq(call_send(&c, "\x0a\x01h\x3a\x00", 5), KVRELAY_OK); /* host "h", list_services "" */
  cr_assert_eq(c.woken, 1);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_MESSAGE);
  static const char answer[] = "\x0a\x01h\x12\x05\x0a\x01h\x3a\x00\x32\x07\x0a\x05\x0a\x03"
                               "a.B";
  cr_assert_eq(c.got_len, sizeof answer - 1);
  cr_assert_eq(memcmp(c.got, answer, sizeof answer - 1), 0);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_NONE);
  cr_assert_eq(call_half_close(&c), KVRELAY_OK);
  cr_assert_eq(call_pull(&c), KVRELAY_PULL_END);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_OK);
  call_close(&c);
}

/* The last of several questions in one message counts, whatever their kinds. */
Test(grpc_reflection, S91_one_question_in_a_message) {
  static const struct {
    const char *bytes;
    size_t len;
    uint8_t kind, code; /* of the answer; code of an error */
  } cases[] = {
      {"\x22\x01x\x3a\x00", 5, 0x32, 0},
      {"\x3a\x00\x22\x01x", 5, 0x3a, 5},
      {"\x2a\x02\x10\x05\x22\x01x", 7, 0x3a, 5},
      {"\x22\x01x\x2a\x02\x10\x05", 7, 0x3a, 5},
      {"\x2a\x02\x10\x05\x3a\x00", 6, 0x32, 0},
      {"", 0, 0x3a, 3},
      {"\x4a\x01x", 3, 0x3a, 3}, /* a field of tomorrow */
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    one_call c;
    cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
    cr_assert_eq(call_send(&c, cases[i].bytes, cases[i].len), KVRELAY_OK, "%zu", i);
    cr_assert_eq(call_pull(&c), KVRELAY_PULL_MESSAGE);
    size_t at = 0;
    cr_assert_eq(c.got[at], 0x12, "no host was given");
    at += 2u + c.got[1];
    cr_assert_eq(c.got[at], cases[i].kind, "%zu", i);
    if (cases[i].code)
      cr_assert(c.got[at + 2] == 0x08 && c.got[at + 3] == cases[i].code, "%zu", i);
    call_close(&c);
  }
}

Test(grpc_reflection, S93_what_does_not_decode) {
  static const struct {
    const char *bytes;
    size_t len;
  } bad[] = {
      {"\x22", 1}, {"\x22\x02x", 3}, {"\x22\x01\xff", 3}, {"\x20\x01", 2}, {"\x0a\x01\x80", 3}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    one_call c;
    cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
    cr_assert_eq(call_send(&c, bad[i].bytes, bad[i].len), KVRELAY_ERR_REFUSED, "%zu", i);
    cr_assert_eq(c.status.grpc, KVRELAY_GRPC_INTERNAL);
    call_close(&c);
  }
}

Test(grpc_reflection, S93_questions_that_wait_are_bounded) {
  static uint8_t large[60003] = {0x0a, 0xdf, 0xd4, 0x03}; /* a host of 59 999 bytes */
  memset(large + 4, 'h', sizeof large - 4);
  one_call c;
  cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
  cr_assert_eq(call_send(&c, large, sizeof large), KVRELAY_OK);
  cr_assert_eq(call_send(&c, large, sizeof large), KVRELAY_OK, "one may come on top");
  cr_assert_eq(call_send(&c, large, sizeof large), KVRELAY_ERR_REFUSED);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  call_close(&c);
  cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
  for (int i = 0; i < 20; i++) {
    cr_assert_eq(call_send(&c, large, sizeof large), KVRELAY_OK);
    cr_assert_eq(call_pull(&c), KVRELAY_PULL_MESSAGE, "who reads may ask on");
  }
  call_close(&c);
  cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
  int sent = 0;
  while (call_send(&c, "", 0) == KVRELAY_OK)
    cr_assert_lt(++sent, 65536, "empty ones take memory as well");
  call_close(&c);
}

Test(grpc_reflection, S93_calls_are_bounded_and_shutdown_ends_them) {
  static one_call calls[KVRELAY_GRPC_REFLECTION_CALLS];
  for (size_t i = 0; i < KVRELAY_GRPC_REFLECTION_CALLS; i++)
    cr_assert_eq(call_open(&calls[i], service, REFLECT), KVRELAY_OK);
  one_call c;
  cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_ERR_REFUSED);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_assert_eq(call_send(&calls[0], "\x3a\x00", 2), KVRELAY_OK);
  kvrelay_grpc_reflection_shutdown(reflection);
  cr_assert_eq(calls[1].woken, 1);
  cr_assert_eq(call_pull(&calls[0]), KVRELAY_PULL_MESSAGE, "what was asked is answered");
  for (size_t i = 0; i < KVRELAY_GRPC_REFLECTION_CALLS; i++) {
    cr_assert_eq(call_pull(&calls[i]), KVRELAY_PULL_END);
    cr_assert_eq(calls[i].status.grpc, KVRELAY_GRPC_OK);
    call_close(&calls[i]);
  }
}

/* What the answer to "which file has this symbol" begins with, behind the question: 0x22 = a file,
 * 0x3a = an error. */
static uint8_t ask_symbol(one_call *c, const char *name) {
  uint8_t request[128] = {0x22, (uint8_t)strlen(name)};
  cr_assert_lt(strlen(name), sizeof request - 2);
  memcpy(request + 2, name, strlen(name));
  cr_assert_eq(call_send(c, request, strlen(name) + 2), KVRELAY_OK);
  cr_assert_eq(call_pull(c), KVRELAY_PULL_MESSAGE);
  const size_t question = strlen(name) + 2; /* below 128 */
  cr_assert(c->got[0] == 0x12 && c->got[1] == question &&
            memcmp(c->got + 2, request, question) == 0);
  return c->got[2 + question];
}

Test(grpc_reflection, S94_every_symbol_is_found_and_no_other) {
  one_call c;
  cr_assert_eq(call_open(&c, service, REFLECT), KVRELAY_OK);
  cr_assert_gt(kvrelay_descriptor_symbols_len, 100);
  for (size_t i = 0; i < kvrelay_descriptor_symbols_len; i++) {
    char name[128];
    cr_assert_lt(kvrelay_descriptor_symbols[i].file, kvrelay_descriptor_files_len);
    cr_assert_eq(ask_symbol(&c, kvrelay_descriptor_symbols[i].name), 0x22);
    snprintf(name, sizeof name, "%s!", kvrelay_descriptor_symbols[i].name);
    cr_assert_eq(ask_symbol(&c, name), 0x3a);
  }
  call_close(&c);
}

/* ---- mux ---- */

Test(grpc_mux, a_path_names_its_service) {
  setup_health();
  kvrelay_grpc_health *rest;
  cr_assert_eq(kvrelay_grpc_health_open(&rest), KVRELAY_TRANSPORT_OK);
  kvrelay_mux mux;
  kvrelay_mux_init(&mux, NULL);
  one_call c;
  cr_assert_eq(call_open(&c, &mux.base, CHECK), KVRELAY_ERR_REFUSED);
  cr_assert_eq(c.status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  cr_assert_eq(kvrelay_mux_add(&mux, KVRELAY_GRPC_HEALTH_NAME, service), KVRELAY_TRANSPORT_OK);
  static const char *const others[] = {
      "",
      "/",
      "/grpc.health.v1.Health",
      "/grpc.health.v1.HealthX/Check",
      "grpc.health.v1.Health/Check",
      "x/grpc.health.v1.Health/Check",
      "//",
      "/grpc.health.v1.Healt/",
  };
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    cr_assert_eq(call_open(&c, &mux.base, others[i]), KVRELAY_ERR_REFUSED);
    cr_assert_str_eq(c.status.text, "unknown service", "%s", others[i]);
  }
  cr_assert_eq(call_open(&c, &mux.base, "/grpc.health.v1.Health/"), KVRELAY_ERR_REFUSED);
  cr_assert_str_eq(c.status.text, "unknown method");
  /* Everything of a call arrives where it belongs. */
  service = &mux.base;
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_SERVING);
  cr_assert_eq(check(""), KVRELAY_GRPC_HEALTH_SERVING);
  watch(&c, "");
  cr_assert(mux.base.admitted(&mux.base, c.handle));
  cr_assert_eq(pulled_status(&c), KVRELAY_GRPC_HEALTH_SERVING);
  kvrelay_grpc_health_set(health, "", KVRELAY_GRPC_HEALTH_NOT_SERVING);
  cr_assert_eq(c.woken, 1);
  call_close(&c);
  /* And what is of nobody, at the rest. */
  kvrelay_mux_init(&mux, kvrelay_grpc_health_base(rest));
  kvrelay_grpc_health_set(rest, "", KVRELAY_GRPC_HEALTH_UNKNOWN);
  cr_assert_eq(check(""), KVRELAY_GRPC_HEALTH_UNKNOWN);
  for (int i = 0; i < KVRELAY_MUX_CAP; i++)
    cr_assert_eq(kvrelay_mux_add(&mux, "a.B", service), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(kvrelay_mux_add(&mux, "a.B", service), KVRELAY_TRANSPORT_ERR_LIMIT);
  kvrelay_grpc_health_close(rest);
  teardown_health();
}
