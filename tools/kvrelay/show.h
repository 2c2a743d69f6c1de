/* SPDX-License-Identifier: Apache-2.0 */
/* show.h - what peers say, made fit for a terminal and for JSON. */
#ifndef KVRELAY_SHOW_H
#define KVRELAY_SHOW_H

#include <jansson.h>
#include <stdarg.h>

#include "cli.h"

/* ---- texts: always UTF-8.  A byte that is none shows as U+FFFD, a control character as '?', and
 * what is too long is cut between two characters. ---- */

#define SHOW_FORMAT_MAX 1024u

/* As snprintf and vsnprintf, into at most SHOW_FORMAT_MAX bytes; the length of what is there. */
size_t show_format(char *out, size_t cap, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
size_t show_vformat(char *out, size_t cap, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));
const char *printable(kvrelay_text t, char out[512]);
const char *status_text(const kvrelay_status *status, char out[512]); /* what it says to people */
/* Why a stream ended; never empty. */
const char *end_text(const kvrelay_status *status, char out[512]);
const char *endpoint_name(const kvrelay_endpoint *e,
                          char out[512]); /* namespace/component/endpoint */
/* Whether --pool means this one: its endpoint's name or its identity; NULL means all. */
bool is_pool(const char *name, const kvrelay_descriptor *d);
const char *hash_format_name(int32_t format);
const char *replica_state_name(int32_t state);
const char *fault_name(int32_t fault);
/* "ok", or condition and field; quarantined pools keep their place in every list. */
const char *verdict_text(const kvrelay_verdict *v, char out[128]);

/* Writes out what was printed.  Nothing is lost silently: what cannot be written ends the program
 * with EXIT_SYSTEM after a message. */
void show_flush(void);

/* ---- JSON ---- */

/* Writes one line of JSON and takes the object.  One that cannot be made ends the program likewise.
 */
void print_json(json_t *object);
/* Adds and takes the item; one that cannot be made or added ends the program likewise. */
void json_add(json_t *list, json_t *item);
/* The whole text; a byte that is not UTF-8 becomes U+FFFD. */
json_t *json_text(kvrelay_text t);
/* A number; beyond 2^63-1, where the integers of many JSON readers end, its decimal string. */
json_t *json_u64(uint64_t value);
json_t *json_difference(uint64_t from, uint64_t less); /* from - less, likewise */
json_t *json_hex(uint64_t value);                      /* "0x…" */
json_t *json_pool(const kvrelay_pool_view *view);

#endif
