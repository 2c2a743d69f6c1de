/* SPDX-License-Identifier: Apache-2.0 */
/* timer.h - a libevent timer that, once it exists, can always be set. */
#ifndef KVRELAY_TIMER_H
#define KVRELAY_TIMER_H

#include <event2/event.h>

#include "transport.h"

/*
 * libevent takes memory when a timer is added, so adding one may fail; whoever waits for it would
 * then wait for ever.  This one keeps its place while it is idle.  Fields are private; all zero is
 * a closed timer.
 */
typedef struct kvrelay_timer {
  struct event *event;
  void (*due)(void *owner);
  void *owner;
} kvrelay_timer;

/* Opens it, idle.  `base` must outlive it.  KVRELAY_TRANSPORT_OK, or _ERR_MEMORY: it is closed. */
int kvrelay_timer_open(kvrelay_timer *timer, struct event_base *base, void (*due)(void *owner),
                       void *owner);
/* Calls `due` once, in the loop, `delay_ns` from now, rounded up to whole microseconds;
 * KVRELAY_TIME_NONE: never.  What was set before is forgotten. */
void kvrelay_timer_set(kvrelay_timer *timer, uint64_t delay_ns);
/* The same for a time of kvrelay_now_ns; one that has passed is due at once. */
void kvrelay_timer_set_at(kvrelay_timer *timer, uint64_t at_ns);
/* Harmless when it is closed. */
void kvrelay_timer_close(kvrelay_timer *timer);

#endif
