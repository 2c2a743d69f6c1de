/* SPDX-License-Identifier: Apache-2.0 */
#include "timer.h"

/* Beyond it a time means "never"; libevent adds it to the clock. */
#define LONGEST_S UINT64_C(1000000000)

static void on_due(evutil_socket_t fd, short what, void *timer_) {
  kvrelay_timer *timer = timer_;
  (void)fd;
  (void)what;
  kvrelay_timer_set(timer, KVRELAY_TIME_NONE); /* it is persistent only so as to keep its place */
  timer->due(timer->owner);
}

static struct timeval timeval_of(uint64_t ns) {
  uint64_t us = ns / 1000 + (ns % 1000 != 0);
  if (us / 1000000 >= LONGEST_S)
    us = LONGEST_S * 1000000;
  return (struct timeval){(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};
}

void kvrelay_timer_set(kvrelay_timer *timer, uint64_t delay_ns) {
  const struct timeval wait = timeval_of(delay_ns);
  (void)event_add(timer->event, &wait); /* of one that is pending: takes no memory */
}

void kvrelay_timer_set_at(kvrelay_timer *timer, uint64_t at_ns) {
  uint64_t delay_ns = KVRELAY_TIME_NONE;
  if (at_ns != KVRELAY_TIME_NONE) {
    const uint64_t now_ns = kvrelay_now_ns();
    delay_ns = at_ns > now_ns ? at_ns - now_ns : 0;
  }
  kvrelay_timer_set(timer, delay_ns);
}

int kvrelay_timer_open(kvrelay_timer *timer, struct event_base *base, void (*due)(void *owner),
                       void *owner) {
  const struct timeval never = timeval_of(KVRELAY_TIME_NONE);
  timer->due = due;
  timer->owner = owner;
  timer->event = event_new(base, -1, EV_PERSIST, on_due, timer);
  if (timer->event != NULL && event_add(timer->event, &never) == 0)
    return KVRELAY_TRANSPORT_OK;
  kvrelay_timer_close(timer);
  return KVRELAY_TRANSPORT_ERR_MEMORY;
}

void kvrelay_timer_close(kvrelay_timer *timer) {
  if (timer->event != NULL)
    event_free(timer->event);
  timer->event = NULL;
}
