/* SPDX-License-Identifier: Apache-2.0 */

/* The ZeroMQ sockets of a source while each allocation of ours and of libevent's fails once: what
 * opens works, what does not leaves nothing behind. */

#include "test_zmq.h"

#include "support/exchange.h"
#include "support/faults.h"

TestSuite(zmq_faults, .init = setup, .fini = teardown, .timeout = 120);

/* Runs the loop until a message is there; whether it ever was. */
static bool hears(void) {
  b.seen.messages = 0;
  for (int i = 0; i < 2000 && b.seen.messages == 0; i++) {
    publish(1);
    turn_us(2000);
  }
  return b.seen.messages != 0;
}

Test(zmq_faults, a_stream_opens_and_works_or_leaves_nothing_behind) {
  unsigned long nth = 0;
  unsigned before = 0;
  faults_install();
  publisher("tcp://127.0.0.1:*");
  b.cfg.endpoint = b.endpoint;
  for (bool struck = true; struck;) {
    faults_arm(FAULT_MEMORY, ++nth, 1, ENOMEM);
    const int err = kvrelay_zmq_sub_open(&b.cfg, &b.seen.listener, &b.sub);
    const bool open = err == KVRELAY_TRANSPORT_OK, heard = open && hears();
    struck = faults_disarm();
    cr_assert(open ? heard : struck, "allocation %lu: %s", nth, kvrelay_transport_strerror(err));
    cr_assert(open || err == KVRELAY_TRANSPORT_ERR_MEMORY, "%d", err);
    if (open)
      kvrelay_zmq_sub_close(b.sub);
    b.sub = NULL;
    for (int i = 0; nth > 3 && i < 500 && open_descriptors() > before; i++)
      usleep(2000); /* libzmq gives them back by and by */
    cr_assert(nth <= 3 || open_descriptors() <= before, "allocation %lu", nth);
    if (nth <= 3)
      before = open_descriptors() > before ? open_descriptors() : before;
  }
  cr_assert_gt(nth, 5);
}

Test(zmq_faults, a_request_is_sent_or_refused) {
  kvrelay_zmq_replay_config cfg = kvrelay_zmq_replay_config_default();
  unsigned long nth = 0;
  faults_install();
  publisher("tcp://127.0.0.1:*"); /* nobody who answers, but an address */
  cfg.context = b.context;
  cfg.base = b.base;
  cfg.endpoint = b.endpoint;
  for (bool struck = true; struck;) {
    kvrelay_zmq_replay *replay = NULL;
    faults_arm(FAULT_MEMORY, ++nth, 1, ENOMEM);
    int err = kvrelay_zmq_replay_open(&cfg, &b.seen.listener, &replay);
    if (err == KVRELAY_TRANSPORT_OK)
      err = kvrelay_zmq_replay_ask(replay, 1);
    struck = faults_disarm();
    cr_assert_eq(err, struck ? KVRELAY_TRANSPORT_ERR_MEMORY : KVRELAY_TRANSPORT_OK, "%lu", nth);
    if (replay != NULL) /* what was refused can be asked again */
      cr_assert_eq(kvrelay_zmq_replay_ask(replay, 1), KVRELAY_TRANSPORT_OK);
    kvrelay_zmq_replay_close(replay);
  }
  cr_assert_gt(nth, 3);
}
