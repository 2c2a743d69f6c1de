/* SPDX-License-Identifier: Apache-2.0 */
/* The service wants parts back that wait to be sent, and there is no memory for the copy. */
#include "test_grpc_server.h"

#include <errno.h>

#include "support/faults.h"

/* More than sockets take, so that the first message, all of which is kept, waits. */
enum { SIZE = 40000000, ENOUGH = 30000000 };

static void open_counting(void) {
  static const uint8_t window[] = {0, 4, 0x7f, 0xff, 0xff, 0xff};
  kvrelay_grpc_server_config cfg = config();
  char request[32];
  logged[0] = '\0';
  cfg.max_message_bytes = SIZE;
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(&cfg, faults_spare(&toy.base), &server),
               KVRELAY_TRANSPORT_OK);
  raw_open(&raw, kvrelay_grpc_server_port(server));
  raw_send(&raw, RAW_PREFACE, sizeof RAW_PREFACE - 1);
  raw_send_frame(&raw, RAW_SETTINGS, 0, 0, window, sizeof window);
  raw_send_frame(&raw, RAW_WINDOW_UPDATE, 0, 0, "\x7f\xff\0\0", 4);
  raw_send_request(&raw, 1, TOY "Count", "", request, (size_t)sprintf(request, "1 %d", SIZE));
  for (int i = 0; i < 200; i++) /* until the socket is full */
    server->run_once(server, 0);
}

/* Bytes of the messages, each of which has to be right. */
static size_t read_all(void) {
  size_t got = 0;
  raw_frame f;
  while (next_frame(&raw, &f, 50) && got < ENOUGH)
    for (size_t i = 0; f.type == RAW_DATA && i < f.len; i++, got++)
      if (got >= 5)
        cr_assert_eq(f.payload[i], (uint8_t)(got - 5), "byte %zu", got);
  return got;
}

static void wants_back(bool reset) {
  faults_install();
  unsigned long nth = 0, lost = 0;
  for (bool struck = true; struck;) {
    open_counting();
    if (reset)
      raw_send_frame(&raw, RAW_RST_STREAM, 0, 1, "\0\0\0\10", 4);
    faults_arm(FAULT_MEMORY, ++nth, 1, ENOMEM);
    if (reset)
      settle();
    else
      toy_service_wake(&toy);
    struck = faults_disarm();
    const size_t got = read_all();
    cr_assert(raw.eof || reset || got >= ENOUGH);
    lost += raw.eof;
    raw_close(&raw);
    raw_open(&raw, kvrelay_grpc_server_port(server));
    raw_greet(&raw);
    raw_send_request(&raw, 1, TOY "Echo", "", "abc", 3);
    expect_answer(&raw, 1, "abc", 3);
    finish();
  }
  cr_assert(nth > 1 && lost > 0, "%lu allocations, %lu connections lost", nth, lost);
}

Test(grpc_wire_faults, no_memory_when_a_service_wants_its_parts_back, .timeout = 60) {
  wants_back(false);
}

Test(grpc_wire_faults, no_memory_when_a_call_with_kept_parts_ends, .timeout = 60) {
  wants_back(true);
}
