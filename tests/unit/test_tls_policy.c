/* SPDX-License-Identifier: Apache-2.0 */
/* Whom TLS lets in and whom not, and what it says then; files that cannot be used; reload. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "support/certs.h"
#include "support/tls_pair.h"

#define CLIENT_USE .usage = "clientAuth"
#define SERVER_USE .usage = "serverAuth"

TestSuite(tls_policy, .init = tls_make_certs, .timeout = 600);

/* The same configuration with the certificate of somebody else. */
static kvrelay_tls_config with_cert(kvrelay_tls_config cfg, const char *name) {
  char file[64];
  snprintf(file, sizeof file, "%s.pem", name);
  cfg.cert_file = certs_path(file);
  snprintf(file, sizeof file, "%s.key", name);
  cfg.key_file = certs_path(file);
  return cfg;
}

static kvrelay_tls_config anonymous(void) {
  kvrelay_tls_config cfg = tls_client_config();
  cfg.cert_file = cfg.key_file = NULL;
  return cfg;
}

/* The side that refuses says this; the other is not left in the belief that all is well. */
static void refused(kvrelay_tls_config server, kvrelay_tls_config client, const char *host, int by,
                    const char *text) {
  tls_pair pair;
  tls_pair_open(&pair, server, client);
  tls_pair_hang_up(&pair);
  tls_pair_again(&pair, "h2", true, host);
  cr_expect_not(tls_pair_shake(&pair, 65536), "not refused: %s", text);
  cr_expect_eq(pair.result[by], KVRELAY_SECURE_FAILED, "%d instead of: %s", pair.result[by], text);
  cr_expect_str_eq(pair.session[by]->text, text);
  kvrelay_secure_session *other = pair.session[1 - by];
  uint8_t in[16];
  ptrdiff_t n = pair.result[1 - by];
  if (n == KVRELAY_SECURE_OK) /* of TLS 1.3 a client learns it when it reads */
    n = other->read(other, in, sizeof in);
  cr_expect_eq(n, KVRELAY_SECURE_FAILED, "%s: the other side: %td", text, n);
  cr_expect_neq(strstr(other->text, "the peer ended it with the alert"), NULL, "%s", other->text);
  tls_pair_close(&pair);
}

/* The server is served `peer` as the client's name. */
static void accepted(kvrelay_tls_config server, kvrelay_tls_config client, const char *host,
                     const char *peer) {
  tls_pair pair;
  tls_pair_open(&pair, server, client);
  tls_pair_hang_up(&pair);
  tls_pair_again(&pair, "h2", true, host);
  cr_assert(tls_pair_shake(&pair, 65536), "%s / %s", pair.session[0]->text, pair.session[1]->text);
  cr_expect_str_eq(pair.session[TLS_SERVER]->peer, peer);
  tls_pair_close(&pair);
}

#define HOST "relay.example"
#define ROUTER "spiffe://example/router"

Test(tls_policy, S102_client_certificates_that_are_not_good) {
  certs_make("other-ca", NULL, (cert_wish){.authority = true});
  certs_make("stranger", "other-ca", (cert_wish){CLIENT_USE});
  certs_make("alone", NULL, (cert_wish){CLIENT_USE});
  certs_make("old", "ca", (cert_wish){CLIENT_USE, .from_day = -9, .to_day = -1});
  certs_make("early", "ca", (cert_wish){CLIENT_USE, .from_day = 1, .to_day = 9});
  certs_make("by-client", "client", (cert_wish){CLIENT_USE});
  const kvrelay_tls_config server = tls_server_config(), client = tls_client_config();
  static const char *const cases[][2] = {
      {"stranger", "the certificate of \"stranger\" comes from an authority that is not trusted "
                   "here"},
      {"alone", "the certificate of \"alone\" comes from an authority that is not trusted here"},
      {"old", "the certificate of \"old\" has expired"},
      {"early", "the certificate of \"early\" is not valid yet"},
      {"server", "the certificate of \"relay.example\" is not meant for this side of a connection"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    refused(server, with_cert(client, cases[i][0]), HOST, TLS_SERVER, cases[i][1]);
  certs_append("by-client.pem", "client.pem");
  tls_pair pair;
  tls_pair_open(&pair, server, with_cert(client, "by-client"));
  cr_expect_not(tls_pair_shake(&pair, 65536), "a client is no authority");
  cr_expect_eq(pair.result[TLS_SERVER], KVRELAY_SECURE_FAILED);
  tls_pair_close(&pair);
  refused(server, anonymous(), HOST, TLS_SERVER, "the client shows no certificate");
}

Test(tls_policy, S102_certificates_are_optional_or_not_asked_for) {
  kvrelay_tls_config server = tls_server_config();
  accepted(server, tls_client_config(), HOST, ROUTER);
  server.client_optional = true;
  accepted(server, tls_client_config(), HOST, ROUTER);
  accepted(server, anonymous(), HOST, "");
  certs_make("alone", NULL, (cert_wish){CLIENT_USE});
  refused(server, with_cert(tls_client_config(), "alone"), HOST, TLS_SERVER,
          "the certificate of \"alone\" comes from an authority that is not trusted here");
  server.client_optional = false;
  server.ca_file = NULL;
  accepted(server, tls_client_config(), HOST, "");
  accepted(server, anonymous(), HOST, "");
}

Test(tls_policy, S102_only_names_on_the_list) {
  certs_make("many", "ca",
             (cert_wish){CLIENT_USE, .names = "DNS:One.example,URI:spiffe://example/two"});
  certs_make("none", "ca", (cert_wish){CLIENT_USE});
  const kvrelay_tls_config client = tls_client_config();
  kvrelay_tls_config server = tls_server_config();
  const struct {
    const char *allow, *cert, *peer; /* peer NULL: refused */
  } cases[] = {
      {ROUTER, "client", ROUTER},
      {"spiffe://example/Router", "client", NULL},
      {"spiffe://example/route", "client", NULL},
      {"spiffe://example/router/", "client", NULL},
      {"spiffe://example/*", "client", NULL},
      {"dns:one.EXAMPLE", "many", "One.example"},
      {"dns:*.example", "many", NULL},
      {"dns:example", "many", NULL},
      {"spiffe://example/two", "many", "spiffe://example/two"},
      {"dns:spiffe://example/two", "many", NULL},
      {"dns:none", "none", NULL}, /* the common name is no such name */
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *const list[] = {"spiffe://example/nobody", cases[i].allow};
    server.allow = list;
    server.allow_len = 2;
    if (cases[i].peer != NULL) {
      accepted(server, with_cert(client, cases[i].cert), HOST, cases[i].peer);
      continue;
    }
    char text[160];
    snprintf(text, sizeof text, "the certificate of \"%s\" carries none of the allowed names",
             strcmp(cases[i].cert, "many") == 0   ? "spiffe://example/two"
             : strcmp(cases[i].cert, "none") == 0 ? "none"
                                                  : ROUTER);
    refused(server, with_cert(client, cases[i].cert), HOST, TLS_SERVER, text);
  }
}

Test(tls_policy, C16_server_certificates_that_are_not_good) {
  certs_make("old", "ca",
             (cert_wish){SERVER_USE, .names = "DNS:" HOST, .from_day = -9, .to_day = -1});
  certs_make("alone", NULL, (cert_wish){SERVER_USE, .names = "DNS:" HOST});
  certs_make("relay", "ca", (cert_wish){SERVER_USE}); /* only its common name says so */
  certs_make("wild", "ca", (cert_wish){SERVER_USE, .names = "DNS:*.site.example,DNS:r*.test"});
  const kvrelay_tls_config server = tls_server_config(), client = tls_client_config();
  refused(with_cert(server, "old"), client, HOST, TLS_CLIENT,
          "the certificate of \"relay.example\" has expired");
  refused(with_cert(server, "alone"), client, HOST, TLS_CLIENT,
          "the certificate of \"relay.example\" comes from an authority that is not trusted here");
  refused(with_cert(server, "client"), client, HOST, TLS_CLIENT,
          "the certificate of \"" ROUTER "\" is not meant for this side of a connection");
  refused(server, client, "other.example", TLS_CLIENT,
          "the certificate of \"relay.example\" is for another host");
  refused(server, client, "127.0.0.2", TLS_CLIENT,
          "the certificate of \"relay.example\" is for another host");
  refused(with_cert(server, "relay"), client, "relay", TLS_CLIENT,
          "the certificate of \"relay\" is for another host");
  refused(with_cert(server, "wild"), client, "relay.test", TLS_CLIENT,
          "the certificate of \"*.site.example\" is for another host");
  accepted(with_cert(server, "wild"), client, "relay.site.example", ROUTER);
  accepted(server, client, "127.0.0.1", ROUTER);
  accepted(server, client, "RELAY.example", ROUTER);
  kvrelay_tls_config system = client; /* whose authorities do not know ours */
  system.ca_file = NULL;
  refused(server, system, HOST, TLS_CLIENT,
          "the issuing certificate of \"ca\" comes from an authority that is not trusted here");
}

/* ---- a client that is not ours ---- */

typedef struct foreign {
  SSL_CTX *ctx;
  SSL *ssl;
  kvrelay_tls *tls;
  kvrelay_secure_session *session;
  int fd[2];
} foreign;

static void foreign_open(foreign *f, int version, const char *suites, const char *alpn,
                         bool required) {
  cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, f->fd), 0);
  kvrelay_tls_config cfg = tls_server_config();
  cfg.ca_file = NULL;
  f->tls = tls_open(cfg);
  const kvrelay_secure_config how = {f->fd[0], "h2", required, NULL};
  f->session = kvrelay_tls_security(f->tls)->session(kvrelay_tls_security(f->tls), &how);
  f->ctx = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_security_level(f->ctx, 0);
  SSL_CTX_set_min_proto_version(f->ctx, version);
  SSL_CTX_set_max_proto_version(f->ctx, version);
  if (suites != NULL)
    cr_assert_eq(SSL_CTX_set_cipher_list(f->ctx, suites), 1);
  if (alpn != NULL)
    cr_assert_eq(SSL_CTX_set_alpn_protos(f->ctx, (const uint8_t *)alpn, (unsigned)strlen(alpn)), 0);
  f->ssl = SSL_new(f->ctx);
  SSL_set_fd(f->ssl, f->fd[1]);
}

static int foreign_shake(foreign *f) {
  int result = KVRELAY_SECURE_AGAIN;
  for (int i = 0; i < 10; i++) {
    (void)SSL_connect(f->ssl);
    if (result == KVRELAY_SECURE_AGAIN)
      result = f->session->handshake(f->session);
  }
  return result;
}

static void foreign_close(foreign *f) {
  f->session->close(f->session);
  kvrelay_tls_close(f->tls);
  SSL_free(f->ssl);
  SSL_CTX_free(f->ctx);
  close(f->fd[0]);
  close(f->fd[1]);
}

Test(tls_policy, S100_S101_versions_suites_and_protocols) {
  static const char h2[] = "\2h2";
  const struct {
    int version;
    const char *suites, *alpn;
    const char *text; /* NULL: accepted */
  } cases[] = {
      {TLS1_3_VERSION, NULL, h2, NULL},
      {TLS1_2_VERSION, NULL, h2, NULL},
      {TLS1_2_VERSION, "ECDHE-ECDSA-CHACHA20-POLY1305", h2, NULL},
      {TLS1_3_VERSION, NULL, "\10http/1.1\2h2", NULL},
      {TLS1_1_VERSION, "ALL:@SECLEVEL=0", h2,
       "no version of TLS in common; 1.2 and 1.3 are spoken here"},
      {TLS1_2_VERSION, "ECDHE-ECDSA-AES128-SHA256", h2, "no cipher suite in common"},
      {TLS1_2_VERSION, "AES128-GCM-SHA256", h2, "no cipher suite in common"},
      {TLS1_2_VERSION, "DHE-RSA-AES128-GCM-SHA256", h2, "no cipher suite in common"},
      {TLS1_3_VERSION, NULL, "\10http/1.1", "the client speaks none of our protocols (ALPN)"},
      {TLS1_2_VERSION, NULL, "\10http/1.1", "the client speaks none of our protocols (ALPN)"},
      {TLS1_3_VERSION, NULL, NULL, "the client names no protocol (ALPN)"},
      {TLS1_2_VERSION, NULL, NULL, "the client names no protocol (ALPN)"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    foreign f;
    foreign_open(&f, cases[i].version, cases[i].suites, cases[i].alpn, true);
    int result = foreign_shake(&f);
    cr_expect_eq(result, cases[i].text == NULL ? KVRELAY_SECURE_OK : KVRELAY_SECURE_FAILED,
                 "case %zu: %d %s", i, result, f.session->text);
    cr_expect_str_eq(f.session->text, cases[i].text != NULL ? cases[i].text : "");
    foreign_close(&f);
  }
}

Test(tls_policy, S100_who_need_not_name_a_protocol_may_not_name_another) {
  foreign f;
  foreign_open(&f, TLS1_3_VERSION, NULL, NULL, false);
  cr_expect_eq(foreign_shake(&f), KVRELAY_SECURE_OK, "%s", f.session->text);
  cr_expect_str_eq(f.session->protocol, "");
  foreign_close(&f);
  foreign_open(&f, TLS1_3_VERSION, NULL, "\3foo", false);
  cr_expect_eq(foreign_shake(&f), KVRELAY_SECURE_FAILED);
  foreign_close(&f);
}

Test(tls_policy, S101_no_renegotiation) {
  foreign f;
  uint8_t in[16];
  foreign_open(&f, TLS1_2_VERSION, NULL, "\2h2", true);
  cr_assert_eq(foreign_shake(&f), KVRELAY_SECURE_OK, "%s", f.session->text);
  cr_assert_eq(SSL_renegotiate(f.ssl), 1);
  bool over = false;
  for (int i = 0; i < 10 && !over; i++) {
    int n = SSL_do_handshake(f.ssl);
    over = n != 1 && SSL_get_error(f.ssl, n) == SSL_ERROR_SSL;
    (void)f.session->read(f.session, in, sizeof in);
  }
  cr_expect(over, "the client is told that there is none");
  foreign_close(&f);
}

/* ---- no TLS at all ---- */

static void answered_with(const char *bytes, size_t len, const char *server_text,
                          const char *client_text) {
  tls_pair pair;
  tls_pair_open(&pair, tls_server_config(), tls_client_config());
  for (int side = 0; side < 2; side++) {
    kvrelay_secure_session *s = pair.session[side];
    (void)s->handshake(s);
    cr_assert_eq(send(pair.wire[side], bytes, len, MSG_NOSIGNAL), (ssize_t)len);
    cr_expect_eq(s->handshake(s), KVRELAY_SECURE_FAILED);
    cr_expect_str_eq(s->text, side == TLS_SERVER ? server_text : client_text);
  }
  tls_pair_close(&pair);
}

Test(tls_policy, S28_plaintext_is_called_by_its_name) {
  answered_with("GET / HTTP/1.1\r\n\r\n", 18,
                "not TLS, begins with \"GET / HT\": plaintext on a TLS port",
                "not TLS, the server begins with \"GET / HT\": it speaks plaintext");
  answered_with("KVRF\1\1\0\0\0\0\0\0\0\0\0\0", 16,
                "not TLS, begins with \"KVRF....\": plaintext on a TLS port",
                "not TLS, the server begins with \"KVRF....\": it speaks plaintext");
}

Test(tls_policy, S104_garbage_in_the_place_of_a_hello) {
  uint64_t state = 1;
  tls_pair pair;
  tls_pair_open(&pair, tls_server_config(), tls_client_config());
  for (int i = 0; i < 300; i++) {
    uint8_t bytes[600] = {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc};
    for (size_t at = (size_t)(i % 10); at < sizeof bytes; at++) {
      state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
      bytes[at] = (uint8_t)(state >> 40);
    }
    kvrelay_secure_session *s = pair.session[i & 1];
    (void)s->handshake(s);
    cr_assert_eq(send(pair.wire[i & 1], bytes, sizeof bytes, MSG_NOSIGNAL), 600);
    shutdown(pair.wire[i & 1], SHUT_WR);
    int result = s->handshake(s);
    for (int again = 0; again < 5 && result == KVRELAY_SECURE_AGAIN; again++)
      result = s->handshake(s);
    cr_assert_lt(result, 0, "round %d", i);
    cr_assert_gt(strlen(s->text), 0u);
    tls_pair_hang_up(&pair);
    tls_pair_again(&pair, "h2", true, HOST);
  }
  tls_pair_close(&pair);
}

/* A hello that never ends, in records that are all in order. */
Test(tls_policy, S104_an_endless_hello_is_cut_off) {
  static uint8_t record[5 + 16384] = {0x16, 0x03, 0x01, 0x40, 0x00, 0x01, 0xff, 0xff, 0xff};
  tls_pair pair;
  tls_pair_open(&pair, tls_server_config(), tls_client_config());
  kvrelay_secure_session *s = pair.session[TLS_SERVER];
  int result = KVRELAY_SECURE_AGAIN;
  size_t taken = 0;
  while (result == KVRELAY_SECURE_AGAIN && taken < (1u << 20)) {
    ssize_t n = send(pair.wire[TLS_SERVER], record, sizeof record, MSG_NOSIGNAL);
    taken += n > 0 ? (size_t)n : 0;
    result = s->handshake(s);
  }
  cr_expect_eq(result, KVRELAY_SECURE_FAILED, "after %zu bytes", taken);
  tls_pair_close(&pair);
}

/* ---- files ---- */

static char warned[1024];

static void on_warn(void *context, const char *text) {
  (void)context;
  strncat(warned, text, sizeof warned - strlen(warned) - 1);
}

static void unusable(kvrelay_tls_config cfg, const char *file, const char *why_after) {
  char why[KVRELAY_TLS_WHY_CAP] = "", wanted[KVRELAY_TLS_WHY_CAP];
  kvrelay_tls *tls = NULL;
  snprintf(wanted, sizeof wanted, "%s%s", file, why_after);
  cr_expect_eq(kvrelay_tls_open(&cfg, &tls, why), KVRELAY_TRANSPORT_ERR_SECURITY, "%s", wanted);
  cr_expect_str_eq(why, wanted);
  cr_expect_null(tls);
}

Test(tls_policy, files_that_cannot_be_used_are_named) {
  const kvrelay_tls_config good = tls_server_config();
  kvrelay_tls_config cfg = good;
  certs_write("empty", "");
  certs_write("broken", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
  certs_lock_key("server", "locked.key");
  unusable(with_cert(good, "nothing"), certs_path("nothing.pem"), ": No such file or directory");
  cfg.key_file = certs_path("client.key");
  char both[512];
  snprintf(both, sizeof both, " does not belong to %s", cfg.cert_file);
  unusable(cfg, cfg.key_file, both);
  cfg.key_file = certs_path("locked.key");
  unusable(cfg, cfg.key_file, " is protected by a passphrase; a key without one is needed");
  cfg.key_file = certs_path("empty");
  unusable(cfg, cfg.key_file, " holds no private key in PEM form");
  cfg.key_file = certs_folder();
  unusable(cfg, cfg.key_file, ": not a file");
  cfg = good;
  cfg.cert_file = certs_path("empty");
  unusable(cfg, cfg.cert_file, " holds no certificate in PEM form");
  cfg = good;
  cfg.ca_file = certs_path("server.key");
  unusable(cfg, cfg.ca_file, " holds no certificate in PEM form");
  cfg.ca_file = certs_path("broken");
  char why[KVRELAY_TLS_WHY_CAP];
  kvrelay_tls *tls;
  cr_expect_eq(kvrelay_tls_open(&cfg, &tls, why), KVRELAY_TRANSPORT_ERR_SECURITY);
  cr_expect_not_null(strstr(why, "broken: certificate 1 is broken: "), "%s", why);
  const char *name = "router";
  cfg = good;
  cfg.allow = &name;
  cfg.allow_len = 1;
  unusable(cfg, "", "the name \"router\" is neither dns:NAME nor a URI");
  cfg.ca_file = NULL;
  cr_expect_eq(kvrelay_tls_open(&cfg, &tls, why), KVRELAY_TRANSPORT_ERR_ARG,
               "a list of names without authorities");
}

Test(tls_policy, what_an_operator_should_see_to_is_told) {
  certs_make("old", "ca", (cert_wish){SERVER_USE, .from_day = -9, .to_day = -1});
  kvrelay_tls_config cfg = with_cert(tls_server_config(), "old");
  cfg.warn = on_warn;
  kvrelay_tls_close(tls_open(cfg));
  cr_expect_not_null(strstr(warned, "old.pem: certificate 1 has expired"), "%s", warned);
  cr_expect_null(strstr(warned, "everybody"));
  cr_assert_eq(chmod(cfg.key_file, 0644), 0);
  kvrelay_tls_close(tls_open(cfg));
  cr_expect_not_null(strstr(warned, "old.key holds a private key and can be read by everybody"));
}

/* ---- reload ---- */

Test(tls_policy, S103_reload_is_for_new_connections_only) {
  char why[KVRELAY_TLS_WHY_CAP] = "";
  tls_pair pair, next;
  kvrelay_tls_config server = tls_server_config();
  tls_pair_open(&pair, server, tls_client_config());
  cr_assert(tls_pair_shake(&pair, 65536));
  certs_make("fresh", "ca",
             (cert_wish){SERVER_USE, .names = "DNS:" HOST ",URI:spiffe://example/fresh",
                         .from_day = -1, .to_day = 3});
  kvrelay_tls_config fresh = with_cert(server, "fresh");
  const char *nobody = "spiffe://example/nobody";
  /* One that cannot be used changes nothing. */
  kvrelay_tls_config bad = fresh;
  bad.key_file = server.key_file;
  const int64_t before = kvrelay_tls_cert_not_after(pair.tls[TLS_SERVER]);
  cr_expect_eq(kvrelay_tls_reload(pair.tls[TLS_SERVER], &bad, why), KVRELAY_TRANSPORT_ERR_SECURITY);
  cr_expect_not_null(strstr(why, "does not belong to"), "%s", why);
  cr_expect_eq(kvrelay_tls_cert_not_after(pair.tls[TLS_SERVER]), before);
  next = pair;
  tls_pair_again(&next, "h2", true, HOST);
  cr_expect(tls_pair_shake(&next, 65536));
  cr_expect_str_eq(next.session[TLS_CLIENT]->peer, HOST);
  tls_pair_hang_up(&next);
  /* A good one: what runs goes on, who comes sees the new certificate. */
  cr_assert_eq(kvrelay_tls_reload(pair.tls[TLS_SERVER], &fresh, why), KVRELAY_TRANSPORT_OK, "%s",
               why);
  cr_expect_lt(kvrelay_tls_cert_not_after(pair.tls[TLS_SERVER]), before);
  cr_expect(tls_pair_send(&pair, TLS_SERVER, 100000, 5000, 65536, 65536));
  cr_expect(tls_pair_send(&pair, TLS_CLIENT, 100000, 5000, 65536, 65536));
  tls_pair_again(&next, "h2", true, HOST);
  cr_expect(tls_pair_shake(&next, 65536));
  cr_expect_str_eq(next.session[TLS_CLIENT]->peer, "spiffe://example/fresh");
  cr_expect_eq(next.session[TLS_CLIENT]->peer_not_after,
               kvrelay_tls_cert_not_after(pair.tls[TLS_SERVER]));
  tls_pair_hang_up(&next);
  /* A name taken off the list is refused from now on. */
  fresh.allow = &nobody;
  fresh.allow_len = 1;
  cr_assert_eq(kvrelay_tls_reload(pair.tls[TLS_SERVER], &fresh, why), KVRELAY_TRANSPORT_OK);
  tls_pair_again(&next, "h2", true, HOST);
  cr_expect_not(tls_pair_shake(&next, 65536));
  tls_pair_hang_up(&next);
  cr_expect(tls_pair_send(&pair, TLS_SERVER, 1000, 500, 65536, 65536));
  tls_pair_close(&pair);
}
