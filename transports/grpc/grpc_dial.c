/* SPDX-License-Identifier: Apache-2.0 */
#include "grpc_dial.h"

#include <unistd.h>

static void on_answer(evutil_socket_t fd, short what, void *dial_) {
  kvrelay_grpc_dial *dial = dial_;
  char text[128] = "";
  (void)what;
  event_free(dial->answer);
  dial->answer = NULL;
  const int result = kvrelay_dial_result(fd, text, sizeof text);
  dial->done(dial->owner, result < 0 ? -1 : result, result < 0 ? result : KVRELAY_TRANSPORT_OK,
             text);
}

int kvrelay_grpc_dial_start(kvrelay_grpc_dial *dial, struct event_base *base,
                            const kvrelay_dial_target *target,
                            void (*done)(void *owner, int fd, int err, const char *text),
                            void *owner) {
  dial->done = done;
  dial->owner = owner;
  dial->answer = NULL;
  dial->fd = kvrelay_dial_start(target);
  if (dial->fd < 0)
    return dial->fd;
  dial->answer = event_new(base, dial->fd, EV_READ, on_answer, dial);
  if (dial->answer != NULL && event_add(dial->answer, NULL) == 0)
    return KVRELAY_TRANSPORT_OK;
  if (dial->answer != NULL)
    event_free(dial->answer);
  dial->answer = NULL;
  close(dial->fd);
  return KVRELAY_TRANSPORT_ERR_MEMORY;
}

void kvrelay_grpc_dial_cancel(kvrelay_grpc_dial *dial) {
  if (dial->answer == NULL)
    return;
  event_free(dial->answer);
  dial->answer = NULL;
  close(dial->fd);
}
