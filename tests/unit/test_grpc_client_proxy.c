/* SPDX-License-Identifier: Apache-2.0 */
/* C17: the gRPC client through an HTTP proxy, and where it goes without. */
#include "test_grpc_client.h"
#include "transports/proxy.h"

static void open_through(const char *target, const char *user) {
  static char proxy[96];
  uint16_t port = 0;
  base = event_base_new();
  listener = raw_listen(&port);
  snprintf(proxy, sizeof proxy, "http://%s127.0.0.1:%u/", user, port);
  kvrelay_grpc_client_config cfg = client_config(target);
  cfg.proxy = proxy;
  open_client(&cfg);
  RUN_UNTIL((peer.fd = accept(listener, NULL, NULL)) >= 0);
}

/* What the client says to the proxy. */
static void expect_head(const char *wanted) {
  char head[1024] = "";
  size_t n = 0;
  while (strstr(head, "\r\n\r\n") == NULL && n < sizeof head - 1)
    if (recv(peer.fd, head + n, 1, MSG_DONTWAIT) == 1)
      n++;
    else
      client->base.run_once(&client->base, MS);
  cr_expect_str_eq(head, wanted);
}

Test(grpc_client_proxy, C17_connect_and_then_the_tunnel) {
  open_through("relay.example:443", "");
  expect_head("CONNECT relay.example:443 HTTP/1.1\r\nHost: relay.example:443\r\n\r\n");
  /* The answer comes in pieces, the first bytes of the tunnel right behind it. */
  static const char answer[] = "HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n";
  static const char settings[] = "\0\0\0\4\0\0\0\0\0";
  char both[sizeof answer + sizeof settings];
  memcpy(both, answer, sizeof answer - 1);
  memcpy(both + sizeof answer - 1, settings, 9);
  raw_take(&peer, peer.fd);
  raw_send(&peer, both, 20);
  run_ms(20);
  raw_send(&peer, both + 20, sizeof answer - 1 + 9 - 20);
  RUN_UNTIL(in_state('R'));
  uint8_t preface[24];
  RUN_UNTIL(recv(peer.fd, preface, sizeof preface, MSG_DONTWAIT) == 24);
  cr_expect_arr_eq(preface, RAW_PREFACE, 24);
  cr_assert_eq(call(1, "Echo", "x"), KVRELAY_TRANSPORT_OK);
  const raw_frame f = expect_frame(RAW_HEADERS);
  cr_expect(strstr(f.headers, ":authority: relay.example:443\n") != NULL, "%s", f.headers);
  finish_scripted();
}

Test(grpc_client_proxy, C17_credentials_and_an_address_as_target) {
  open_through("[2001:db8::1]:5561", "Aladdin:open%20sesame@");
  expect_head("CONNECT [2001:db8::1]:5561 HTTP/1.1\r\nHost: [2001:db8::1]:5561\r\n"
              "Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\n");
  raw_take(&peer, peer.fd);
  finish_scripted();
}

Test(grpc_client_proxy, C17_a_proxy_that_refuses_or_is_none) {
  static const struct {
    const char *answer, *word;
  } cases[] = {{"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "status 407"},
               {"HTTP/1.0 503 x\r\n\r\n", "status 503"},
               {"HTTP/1.1 abc\r\n\r\n", "not speak HTTP"},
               {"HTTP/1.1 \r\n\r\n", "not speak HTTP"},
               {"\x15\x03\x01\x00\x02\x02\x46", "not speak HTTP"},
               {"HTTP/1.1 200 O", "proxy: "},
               {"", "proxy: "}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    open_through("relay.example:443", "");
    raw_take(&peer, peer.fd);
    run_ms(5);
    char head[256];
    (void)!recv(peer.fd, head, sizeof head, MSG_DONTWAIT);
    raw_send(&peer, cases[i].answer, strlen(cases[i].answer));
    shutdown(peer.fd, SHUT_WR);
    RUN_UNTIL(in_state('F'));
    cr_expect_eq(caller.err, KVRELAY_TRANSPORT_ERR_CONNECT);
    cr_expect(strstr(caller.text, cases[i].word) != NULL, "%s: %s", cases[i].answer, caller.text);
    finish_scripted();
  }
}

Test(grpc_client_proxy, C17_an_endless_answer_is_cut) {
  static char line[1024];
  memset(line, 'x', sizeof line);
  open_through("relay.example:443", "");
  raw_take(&peer, peer.fd);
  raw_send(&peer, "HTTP/1.1 200 OK\r\n", 17);
  for (int i = 0; i < KVRELAY_PROXY_HEAD_MAX / 1024; i++)
    raw_send(&peer, line, sizeof line);
  RUN_UNTIL(in_state('F'));
  finish_scripted();
}

Test(grpc_client_proxy, C17_a_proxy_that_says_nothing_is_called_off) {
  uint16_t port = 0;
  char proxy[64];
  base = event_base_new();
  listener = raw_listen(&port);
  snprintf(proxy, sizeof proxy, "127.0.0.1:%u", port);
  kvrelay_grpc_client_config cfg = client_config("relay.example:443");
  cfg.proxy = proxy;
  cfg.connect_timeout_ns = 50 * MS;
  open_client(&cfg);
  RUN_UNTIL((peer.fd = accept(listener, NULL, NULL)) >= 0);
  raw_take(&peer, peer.fd);
  RUN_UNTIL(in_state('F'));
  cr_expect_str_eq(caller.text, "no connection in time");
  char head[256];
  RUN_UNTIL(recv(peer.fd, head, sizeof head, MSG_DONTWAIT) == 0); /* and its socket is closed */
  finish_scripted();
}

Test(grpc_client_proxy, C17_texts_of_proxies) {
  static const struct {
    const char *text, *host, *port, *credentials; /* host NULL: refused */
  } cases[] = {{"http://proxy:3128", "proxy", "3128", ""},
               {"http://proxy:3128/", "proxy", "3128", ""},
               {"proxy:3128", "proxy", "3128", ""},
               {"http://[::1]:80", "::1", "80", ""},
               {"u@proxy:80", "proxy", "80", "dQ=="},
               {"http://us:@proxy:80", "proxy", "80", "dXM6"},
               {"http://a%3ab%zz:%40@proxy:80", "proxy", "80", "YTpiJXp6OkA="},
               {"http://proxy", NULL, "", ""},
               {"http://proxy:80/path", NULL, "", ""},
               {"https://proxy:80", NULL, "", ""},
               {"socks5://proxy:80", NULL, "", ""},
               {"http://:80", NULL, "", ""},
               {"http://", NULL, "", ""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    kvrelay_proxy proxy;
    const int err = kvrelay_proxy_parse(cases[i].text, &proxy);
    cr_expect_eq(err, cases[i].host != NULL ? KVRELAY_TRANSPORT_OK : KVRELAY_TRANSPORT_ERR_ADDRESS,
                 "%s", cases[i].text);
    if (err != KVRELAY_TRANSPORT_OK || cases[i].host == NULL)
      continue;
    cr_expect_str_eq(proxy.host, cases[i].host);
    cr_expect_str_eq(proxy.port, cases[i].port);
    cr_expect_str_eq(proxy.credentials, cases[i].credentials);
  }
}

Test(grpc_client_proxy, C17_who_is_spared) {
  static const struct {
    const char *list, *host;
    bool spared;
  } cases[] = {{NULL, "relay.example", false},
               {NULL, "localhost", true},
               {NULL, "127.1.2.3", true},
               {NULL, "::1", true},
               {"*", "relay.example", true},
               {"relay.example", "RELAY.example", true},
               {"example", "relay.example", true},
               {".example", "relay.example", true},
               {".example", "example", false},
               {"ample", "relay.example", false},
               {"a.relay.example", "relay.example", false},
               {"x, 10.0.0.1 ,y", "10.0.0.1", true},
               {"10.0.0.1", "10.0.0.10", false},
               {"relay.example:443", "relay.example", true},
               {"relay.example:80", "relay.example", false},
               {"2001:db8::443", "2001:db8::443", true},
               {"[2001:db8::1]:443", "2001:db8::1", true},
               {",, ,", "relay.example", false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    cr_expect_eq(kvrelay_proxy_spared(cases[i].list, cases[i].host, "443"), cases[i].spared,
                 "%s %s", cases[i].list, cases[i].host);
}

Test(grpc_client_proxy, C17_the_environment_and_targets_that_need_none) {
  static const char *const straight[] = {"unix:/x", "unix-abstract:x", "ipv4:10.0.0.1:80",
                                         "127.0.0.1:80", "spared.example:80"};
  kvrelay_dial_target target;
  setenv("HTTPS_PROXY", "", 1);
  setenv("https_proxy", "http://proxy:80", 1);
  setenv("NO_PROXY", "spared.example", 1);
  kvrelay_grpc_client_config cfg = kvrelay_grpc_client_config_default();
  cr_expect_str_eq(cfg.proxy, "http://proxy:80");
  cr_expect_str_eq(cfg.no_proxy, "spared.example");
  for (size_t i = 0; i < sizeof straight / sizeof *straight; i++) {
    cr_assert_eq(kvrelay_dial_target_parse(straight[i], &target), KVRELAY_TRANSPORT_OK);
    cr_expect_eq(kvrelay_dial_target_proxy(&target, cfg.proxy, cfg.no_proxy), KVRELAY_TRANSPORT_OK);
    cr_expect_str_eq(target.proxy.host, "", "%s", straight[i]);
  }
  cr_assert_eq(kvrelay_dial_target_parse("10.0.0.1:80", &target), KVRELAY_TRANSPORT_OK);
  cr_expect_eq(kvrelay_dial_target_proxy(&target, cfg.proxy, cfg.no_proxy), KVRELAY_TRANSPORT_OK);
  cr_expect_str_eq(target.proxy.host, "proxy");
  cfg.target = "10.0.0.1:80";
  cfg.proxy = "socks5://proxy:80";
  cr_expect_eq(kvrelay_grpc_client_open(&cfg, &caller.base, &client),
               KVRELAY_TRANSPORT_ERR_ADDRESS);
}
