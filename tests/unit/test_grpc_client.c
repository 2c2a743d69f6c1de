/* SPDX-License-Identifier: Apache-2.0 */
/* The gRPC client against our server. */
#include "test_grpc_client.h"

Test(grpc_client, unary) {
  start();
  call_and_end(1, "Echo", "hello");
  cr_expect_eq(caller.call[1].messages, 1);
  cr_expect_eq(caller.call[1].admitted, 1);
  cr_expect_arr_eq(caller.call[1].first, "hello", 5);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  call_and_end(2, "Echo", "");
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].bytes, 0);
  char *large = calloc(1, 65537);
  memset(large, 'x', 65536);
  call_and_end(3, "Echo", large);
  cr_expect_eq(caller.call[3].bytes, 65536);
  cr_expect_str_eq(caller.states, "CR");
  free(large);
  finish();
}

Test(grpc_client, streams_of_all_sizes) {
  static const struct {
    const char *request;
    int messages;
    size_t len;
  } cases[] = {{"0 10", 0, 0},
               {"1 0", 1, 0},
               {"1000 1", 1000, 1},
               {"20000 64", 20000, 64},
               {"5 16379", 5, 16379},
               {"5 16380", 5, 16380},
               {"40 262139", 40, 262139},
               {"40 262140", 40, 262140},
               {"7 300001", 7, 300001},
               {"5 4194304", 5, 4194304},
               {"2 8388608", 2, 8388608}};
  start();
  for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    call_and_end(i + 1, "Count", cases[i].request);
    const noted *n = &caller.call[i + 1];
    cr_expect_eq(n->messages, cases[i].messages, "%s", cases[i].request);
    cr_expect_eq(n->bytes, cases[i].len * (size_t)cases[i].messages);
    cr_expect_eq(n->wrong, false, "%s", cases[i].request);
    cr_expect_eq(n->status.grpc, KVRELAY_GRPC_OK);
  }
  finish();
}

Test(grpc_client, refusals_carry_status_reason_and_text) {
  start();
  call_and_end(1, "Refuse", "5 4 pool \xE2\x98\xBA 50% gone");
  cr_expect_eq(caller.call[1].admitted, 0);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_NOT_FOUND);
  cr_expect_eq(caller.call[1].status.reason, KVRELAY_REASON_POOL_NOT_FOUND);
  cr_expect_str_eq(caller.call[1].status.text, "pool \xE2\x98\xBA 50% gone");
  call_and_end(2, "End", "8 7 lagged");
  cr_expect_eq(caller.call[2].admitted, 1);
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_expect_eq(caller.call[2].status.reason, KVRELAY_REASON_SUBSCRIBER_LAGGED);
  call_and_end(3, "Nothing", "");
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_UNIMPLEMENTED);
  cr_expect_eq(caller.call[3].status.reason, KVRELAY_REASON_NONE);
  finish();
}

Test(grpc_client, a_silent_stream_is_admitted_and_woken) {
  start();
  cr_assert_eq(call(1, "Silent", "x"), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  run_ms(20);
  cr_expect_eq(caller.call[1].messages, 0);
  toy_service_release(&toy);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].messages, 1);
  cr_expect_arr_eq(caller.call[1].first, "released", 8);
  finish();
}

Test(grpc_client, many_calls_and_the_callers_errors) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  ccfg.max_calls = 1000;
  start_with(&scfg, &ccfg);
  for (uint32_t i = 1; i <= 1000; i++)
    cr_assert_eq(call(i, i % 2 ? "Echo" : "Count", i % 2 ? "abc" : "30 500"), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(call(1001, "Echo", "x"), KVRELAY_TRANSPORT_ERR_LIMIT);
  cr_expect_eq(client->call(client, 1000, TOY "Echo", NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  cr_expect_eq(client->call(client, 0, TOY "Echo", NULL, 0), KVRELAY_TRANSPORT_ERR_ARG);
  for (uint32_t i = 1; i <= 1000; i++) {
    RUN_UNTIL(caller.call[i].ends == 1);
    cr_expect_eq(caller.call[i].messages, i % 2 ? 1 : 30);
    cr_expect_not(caller.call[i].wrong);
  }
  call_and_end(1000, "Echo", "again");
  finish();
}

Test(grpc_client, S27_the_servers_limit_is_an_error_not_a_queue) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  scfg.max_concurrent_streams = 2;
  start_with(&scfg, &ccfg);
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(call(3, "Silent", ""), KVRELAY_TRANSPORT_ERR_LIMIT);
  finish();
}

Test(grpc_client, cancel) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  client->cancel(client, 1);
  client->cancel(client, 1);
  client->cancel(client, 77);
  RUN_UNTIL(toy.open_now == 0);
  cr_expect_eq(caller.call[1].ends, 0, "no end after a cancel");
  /* From inside its own message, with much more on the way. */
  caller.cancel_at_message = 2;
  cr_assert_eq(call(2, "Count", "100000 64"), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[2].messages > 0);
  RUN_UNTIL(toy.open_now == 0);
  cr_expect_eq(caller.call[2].messages, 1);
  cr_expect_eq(caller.call[2].ends, 0);
  /* Before anything was sent; and the number is free at once. */
  cr_assert_eq(call(3, "Echo", "never"), KVRELAY_TRANSPORT_OK);
  client->cancel(client, 3);
  call_and_end(3, "Echo", "second");
  cr_expect_arr_eq(caller.call[3].first, "second", 6);
  cr_expect_eq(caller.call[3].messages, 1);
  finish();
}

Test(grpc_client, C8_messages_above_a_limit) {
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  kvrelay_grpc_client_config ccfg = client_config(NULL);
  ccfg.max_message_bytes = 1000;
  scfg.max_message_bytes = 2000;
  start_with(&scfg, &ccfg);
  call_and_end(1, "Count", "3 1000");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  call_and_end(2, "Count", "3 1001"); /* ours */
  cr_expect_eq(caller.call[2].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  cr_expect_eq(caller.call[2].messages, 0);
  call_and_end(3, "Count", "3 2001"); /* the server's */
  cr_expect_eq(caller.call[3].status.grpc, KVRELAY_GRPC_RESOURCE_EXHAUSTED);
  char *large = calloc(1, 1002);
  memset(large, 'x', 1001);
  cr_expect_eq(call(4, "Echo", large), KVRELAY_TRANSPORT_ERR_LIMIT);
  free(large);
  RUN_UNTIL(toy.open_now == 0);
  finish();
}

Test(grpc_client, a_stop_of_the_server_ends_streams_with_ok) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  uint64_t begin = server->now_ns(server);
  server->stop(server, 2000 * MS);
  toy_service_shutdown(&toy);
  RUN_UNTIL(caller.call[1].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  cr_expect_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT, "the server goes away");
  RUN_UNTIL(strstr(caller.states, "CRF") != NULL);
  RUN_UNTIL(server->run_once(server, 0) == KVRELAY_TRANSPORT_CLOSED);
  cr_expect_lt(server->now_ns(server) - begin, 1000 * MS);
  finish();
}

Test(grpc_client, wake_from_a_foreign_thread_and_time_outs) {
  base = NULL;
  kvrelay_grpc_client_config cfg = client_config("127.0.0.1:1");
  cfg.backoff_first_ns = cfg.backoff_max_ns = 10000 * MS;
  open_client(&cfg);
  RUN_UNTIL(in_state('F'));
  kvrelay_transport *t = &client->base;
  uint64_t begin = t->now_ns(t);
  cr_expect_eq(t->run_once(t, 30 * MS), 0);
  uint64_t took = t->now_ns(t) - begin;
  cr_expect(took >= 29 * MS && took < 1000 * MS, "%lu ns", (unsigned long)took);
  cr_expect_eq(t->run_once(t, 0), 0);
  t->wake(t);
  begin = t->now_ns(t);
  cr_expect_eq(t->run_once(t, 3000 * MS), 1);
  cr_expect_lt(t->now_ns(t) - begin, 1000 * MS);
  t->close(t);
}

/* ---- connections ---- */

Test(grpc_client, C4_backoff_and_a_server_that_comes_later) {
  uint16_t port = 0;
  char target[32];
  base = event_base_new();
  close(raw_listen(&port)); /* a port that is free */
  snprintf(target, sizeof target, "127.0.0.1:%u", port);
  kvrelay_grpc_client_config cfg = client_config(target);
  open_client(&cfg);
  cr_expect_eq(call(1, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  uint64_t begin = client->base.now_ns(&client->base);
  uint64_t last_wait = 0;
  for (int i = 1; i <= 4; i++) {
    RUN_UNTIL(strlen(caller.states) >= 2 * (size_t)i && in_state('F'));
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_CONNECT);
    last_wait = caller.retry_ns - caller.failed_at_ns;
  }
  uint64_t took = client->base.now_ns(&client->base) - begin;
  cr_expect_str_eq(caller.states, "CFCFCFCF");
  /* 30 + 48 + 77 ms, each - 20 %, before the fourth attempt; then at most 100 + 20 %. */
  cr_expect_geq(took, 120 * MS);
  cr_expect(last_wait >= 75 * MS && last_wait <= 121 * MS, "%lu", (unsigned long)last_wait);
  kvrelay_grpc_server_config scfg = server_config();
  scfg.bind = target;
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(&scfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(in_state('R'));
  call_and_end(1, "Echo", "at last");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  finish();
}

Test(grpc_client, reconnect_ends_calls_and_connects_again) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  cr_assert_eq(call(2, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[2].admitted == 1);
  run_ms(40); /* older than the backoff: the next attempt is at once */
  client->reconnect(client);
  RUN_UNTIL(caller.call[1].ends == 1 && caller.call[2].ends == 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  RUN_UNTIL(in_state('R'));
  cr_expect_str_eq(caller.states, "CRFCR");
  cr_expect_eq(caller.retry_ns, caller.failed_at_ns);
  call_and_end(1, "Echo", "x");
  finish();
}

Test(grpc_client, stop_waits_for_calls_or_the_grace_time) {
  start();
  cr_assert_eq(call(1, "Silent", ""), KVRELAY_TRANSPORT_OK);
  RUN_UNTIL(caller.call[1].admitted == 1);
  client->base.stop(&client->base, 300 * MS);
  cr_expect_eq(call(2, "Echo", ""), KVRELAY_TRANSPORT_ERR_CONNECT);
  run_ms(20);
  cr_expect_eq(caller.call[1].ends, 0);
  RUN_UNTIL(in_state('X'));
  cr_expect_eq(caller.call[1].ends, 1);
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_UNAVAILABLE);
  cr_expect_eq(client->base.run_once(&client->base, MS), KVRELAY_TRANSPORT_CLOSED);
  cr_expect_str_eq(caller.states, "CRX");
  finish();
}

Test(grpc_client, stop_without_a_connection) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config("127.0.0.1:1");
  open_client(&cfg);
  RUN_UNTIL(in_state('F'));
  client->base.stop(&client->base, 1000 * MS);
  RUN_UNTIL(in_state('X'));
  cr_expect_eq(client->base.run_once(&client->base, MS), KVRELAY_TRANSPORT_CLOSED);
  finish();
}

/* ---- targets ---- */

Test(grpc_client, C1_targets) {
  static const struct {
    const char *text;
    int addresses; /* 0: a name; -1: refused */
    const char *authority;
  } cases[] = {{"127.0.0.1:5561", 1, "127.0.0.1:5561"},
               {"[::1]:5561", 1, "[::1]:5561"},
               {"dns:///10.0.0.1:80", 1, "10.0.0.1:80"},
               {"dns:///relay.example:80", 0, "relay.example:80"},
               {"relay.example:80", 0, "relay.example:80"},
               {"ipv4:10.0.0.1:80,10.0.0.2:81", 2, "10.0.0.1:80"},
               {"ipv6:[::1]:80,[::2]:80,[::3]:80", 3, "[::1]:80"},
               {"unix:/run/relay.sock", 1, "localhost"},
               {"unix:///run/relay.sock", 1, "localhost"},
               {"unix-abstract:relay", 1, "localhost"},
               {"unix-abstract:", -1, ""},
               {"ipv4:relay.example:80", -1, ""},
               {"ipv4:10.0.0.1", -1, ""},
               {"ipv4:10.0.0.1:80,", -1, ""},
               {"relay.example", -1, ""},
               {"http://relay.example:80", -1, ""},
               {":80", -1, ""},
               {"x:99999", -1, ""},
               {"", -1, ""},
               {"unix:", -1, ""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    kvrelay_dial_target target;
    int result = kvrelay_dial_target_parse(cases[i].text, &target);
    cr_expect_eq(result == KVRELAY_TRANSPORT_OK, cases[i].addresses >= 0, "%s: %d", cases[i].text,
                 result);
    if (result != KVRELAY_TRANSPORT_OK)
      continue;
    cr_expect_eq(target.address_count, cases[i].addresses, "%s", cases[i].text);
    cr_expect_str_eq(target.authority, cases[i].authority);
  }
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = "nowhere";
  cr_expect_eq(kvrelay_grpc_client_open(&cfg, &caller.base, &client),
               KVRELAY_TRANSPORT_ERR_ADDRESS);
  cfg.target = "127.0.0.1:1";
  cfg.stream_window_bytes = 10;
  cr_expect_eq(kvrelay_grpc_client_open(&cfg, &caller.base, &client), KVRELAY_TRANSPORT_ERR_ARG);
}

static void connect_by(const char *bind, const char *format) {
  char target[128];
  base = event_base_new();
  kvrelay_grpc_server_config scfg = server_config();
  scfg.bind = bind;
  toy_service_init(&toy);
  cr_assert_eq(kvrelay_grpc_server_open(&scfg, &toy.base, &server), KVRELAY_TRANSPORT_OK);
  snprintf(target, sizeof target, format, kvrelay_grpc_server_port(server));
  kvrelay_grpc_client_config cfg = client_config(target);
  open_client(&cfg);
  RUN_UNTIL(in_state('R'));
  cr_expect_str_eq(caller.states, "CR");
  call_and_end(1, "Echo", "x");
  cr_expect_eq(caller.call[1].status.grpc, KVRELAY_GRPC_OK);
  finish();
}

Test(grpc_client, C2_a_name_is_resolved) { connect_by("127.0.0.1:0", "localhost:%u"); }

Test(grpc_client, C2_the_next_address_when_one_refuses) {
  connect_by("127.0.0.1:0", "ipv4:127.0.0.1:1,127.0.0.1:%u");
}

Test(grpc_client, C1_ipv6) { connect_by("[::1]:0", "[::1]:%u"); }

Test(grpc_client, C1_a_socket_without_a_file) {
  char address[64], named[KVRELAY_ADDRESS_CAP];
  snprintf(address, sizeof address, "unix-abstract:kvrelay-test-%d", (int)getpid());
  kvrelay_address parsed;
  cr_assert_eq(kvrelay_address_parse(address, &parsed), KVRELAY_TRANSPORT_OK);
  kvrelay_address_format(&parsed, named);
  cr_expect_str_eq(named, address);
  connect_by(address, address);
}

Test(grpc_client, C1_a_missing_port_is_told) {
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cfg.target = "relay.example";
  const int err = kvrelay_grpc_client_open(&cfg, &caller.base, &client);
  cr_expect(strstr(kvrelay_transport_strerror(err), "port") != NULL);
}

Test(grpc_client, C1_unix_socket) {
  char address[64];
  snprintf(address, sizeof address, "unix:/tmp/kvrelay-test-%d.sock", (int)getpid());
  connect_by(address, address); /* without a conversion: the port has no place in it */
  cr_expect_neq(access(address + 5, F_OK), 0, "the socket is removed");
}

Test(grpc_client, C2_a_name_that_does_not_resolve) {
  base = event_base_new();
  kvrelay_grpc_client_config cfg = client_config("nowhere.invalid:80");
  open_client(&cfg);
  RUN_UNTIL(in_state('F'));
  cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_ADDRESS);
  server = NULL;
  finish();
}
