/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions of TLS that go well, over a wire that splits as it likes, and ones that are cut or bent
 * at every byte. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "support/certs.h"
#include "support/tls_pair.h"

static tls_pair pair;

static void start(void) { tls_pair_open(&pair, tls_server_config(), tls_client_config()); }

static void finish(void) { tls_pair_close(&pair); }

TestSuite(tls, .init = start, .fini = finish, .timeout = 600); /* under valgrind; else seconds */

static kvrelay_secure_session *side(int which) { return pair.session[which]; }

Test(tls, S100_S102_both_sides_know_protocol_name_and_expiry) {
  cr_assert(tls_pair_shake(&pair, 65536), "%s / %s", side(0)->text, side(1)->text);
  cr_assert_str_eq(side(TLS_SERVER)->protocol, "h2");
  cr_assert_str_eq(side(TLS_CLIENT)->protocol, "h2");
  cr_assert_str_eq(side(TLS_SERVER)->peer, "spiffe://example/router");
  cr_assert_str_eq(side(TLS_CLIENT)->peer, "relay.example");
  int64_t in_ten_days = (int64_t)time(NULL) + 10 * 86400;
  for (int i = 0; i < 2; i++) {
    cr_assert(side(i)->peer_not_after <= in_ten_days);
    cr_assert(side(i)->peer_not_after > in_ten_days - 60);
    cr_assert_eq(kvrelay_tls_cert_not_after(pair.tls[i]) / 100, in_ten_days / 100);
    cr_assert_eq(kvrelay_tls_ca_not_after(pair.tls[i]) / 100, in_ten_days / 100);
  }
}

Test(tls, a_handshake_and_data_in_pieces_of_every_size) {
  static const size_t sizes[] = {1, 2, 3, 5, 7, 16, 61, 256, 1000, 4096, 16384, 16385, 65536};
  const size_t n = sizeof sizes / sizeof *sizes;
  for (size_t i = 0; i < n; i++) {
    size_t chunk = sizes[i], other = sizes[(i + 5) % n], third = sizes[(i * 7 + 3) % n];
    size_t len = chunk < 61 ? 3000 : 200000;
    cr_assert(tls_pair_shake(&pair, chunk), "%zu: %s / %s", chunk, side(0)->text, side(1)->text);
    for (int from = 0; from < 2; from++) {
      cr_assert(tls_pair_send(&pair, from, len, other, chunk, third), "%zu", chunk);
      cr_assert(tls_pair_send(&pair, from, len, third, chunk, other), "%zu", chunk);
      cr_assert(tls_pair_send(&pair, from, 65537, 65537, 65536, chunk), "%zu", chunk);
    }
    tls_pair_hang_up(&pair);
    tls_pair_again(&pair, "h2", true, "relay.example");
  }
}

Test(tls, every_length_of_a_write_arrives) {
  cr_assert(tls_pair_shake(&pair, 65536));
  for (size_t len = 1; len < 200; len++)
    cr_assert(tls_pair_send(&pair, (int)(len & 1), len, len % 13 + 1, 65536, len % 17 + 1));
  for (size_t len = 16380; len < 16390; len++)
    cr_assert(tls_pair_send(&pair, (int)(len & 1), len, len, 65536, 65536));
  for (size_t len = 65530; len < 65542; len++)
    cr_assert(tls_pair_send(&pair, (int)(len & 1), 2 * len, len, 65536, 65536));
}

Test(tls, small_pieces_share_a_record_and_large_ones_fill_them) {
  cr_assert(tls_pair_shake(&pair, 65536));
  const uint8_t bytes[64] = {0};
  static uint8_t large[65536];
  kvrelay_iov pieces[1000];
  for (int i = 0; i < 1000; i++)
    pieces[i] = (kvrelay_iov){bytes, 16};
  kvrelay_secure_session *s = side(TLS_SERVER);
  while (tls_pair_carry(&pair, 65536) > 0)
    continue;
  size_t before = pair.moved[TLS_SERVER];
  cr_assert_eq(s->write(s, pieces, 1000), 16000);
  tls_pair_carry(&pair, 65536);
  cr_assert_leq(pair.moved[TLS_SERVER] - before, 16000 + 40, "one record");
  before = pair.moved[TLS_SERVER];
  pieces[0] = (kvrelay_iov){large, sizeof large};
  cr_assert_eq(s->write(s, pieces, 1), 65536);
  while (tls_pair_carry(&pair, 65536) > 0)
    continue;
  cr_assert_leq(pair.moved[TLS_SERVER] - before, 65536 + 4 * 40, "four records");
}

Test(tls, what_the_socket_does_not_take_is_held_and_comes_in_order) {
  static uint8_t large[1 << 20];
  cr_assert(tls_pair_shake(&pair, 65536));
  kvrelay_secure_session *s = side(TLS_SERVER), *c = side(TLS_CLIENT);
  size_t offered = 0, got = 0, stalls = 0;
  for (size_t i = 0; i < sizeof large; i++)
    large[i] = (uint8_t)(i * 31 + i / 256);
  for (int still = 0; still < 3;) {
    ptrdiff_t n = 1;
    while (n > 0 && offered < sizeof large) {
      kvrelay_iov piece = {large + offered, sizeof large - offered};
      n = s->write(s, &piece, 1);
      cr_assert_geq(n, 0);
      offered += (size_t)n;
      stalls += n == 0;
      cr_assert(n > 0 || s->wants_write);
    }
    if (offered == sizeof large)
      cr_assert_eq(s->write(s, NULL, 0), 0);
    uint8_t in[3000];
    size_t moved = tls_pair_carry(&pair, 5000);
    while ((n = c->read(c, in, sizeof in)) > 0) {
      cr_assert_eq(memcmp(in, large + got, (size_t)n), 0);
      got += (size_t)n;
    }
    still = moved == 0 && !s->wants_write ? still + 1 : 0;
  }
  cr_assert_eq(got, sizeof large);
  cr_assert_gt(stalls, 0);
}

Test(tls, close_notify_is_a_clean_end_and_anything_else_is_cut) {
  uint8_t in[100];
  const kvrelay_iov word = {(const uint8_t *)"last", 4};
  cr_assert(tls_pair_shake(&pair, 65536));
  kvrelay_secure_session *s = side(TLS_SERVER), *c = side(TLS_CLIENT);
  cr_assert_eq(s->write(s, &word, 1), 4);
  cr_assert_eq(s->shutdown(s), KVRELAY_SECURE_OK);
  cr_assert_eq(s->shutdown(s), KVRELAY_SECURE_OK, "once is enough");
  tls_pair_carry(&pair, 65536);
  cr_assert_eq(c->read(c, in, sizeof in), 4);
  cr_assert(c->pending, "the end is still to be told");
  cr_assert_eq(c->read(c, in, sizeof in), KVRELAY_SECURE_CLOSED);
  cr_assert_eq(c->read(c, in, sizeof in), KVRELAY_SECURE_CLOSED);
  /* The other direction is still open. */
  cr_assert_eq(c->write(c, &word, 1), 4);
  tls_pair_carry(&pair, 65536);
  cr_assert_eq(s->read(s, in, sizeof in), 4);
  shutdown(pair.wire[TLS_SERVER], SHUT_WR);
  cr_assert_eq(s->read(s, in, sizeof in), KVRELAY_SECURE_CUT);
  cr_assert_str_eq(s->text, "closed by the peer without a word");
  cr_assert_eq(s->write(s, &word, 1), KVRELAY_SECURE_CUT, "over is over");
}

Test(tls, a_reset_is_told_with_the_systems_word) {
  uint8_t in[100];
  const kvrelay_iov word = {(const uint8_t *)"last", 4};
  cr_assert(tls_pair_shake(&pair, 65536));
  close(pair.wire[TLS_SERVER]);
  pair.wire[TLS_SERVER] = -1;
  kvrelay_secure_session *s = side(TLS_SERVER);
  cr_assert_eq(s->write(s, &word, 1), KVRELAY_SECURE_CUT, "no SIGPIPE either");
  cr_assert_str_eq(s->text, "Broken pipe");
  cr_assert_eq(s->read(s, in, sizeof in), KVRELAY_SECURE_CUT);
  cr_assert_eq(s->shutdown(s), KVRELAY_SECURE_CUT);
}

/* Every byte takes its time: `make check` looks at some, all over the handshake. */
static size_t next_byte(void) { return getenv("EVERY_BYTE") != NULL ? 1 : 7; }

/* How much each side sends in a handshake. */
static void measure(size_t out[2]) {
  cr_assert(tls_pair_shake(&pair, 65536));
  out[0] = pair.moved[0];
  out[1] = pair.moved[1];
  tls_pair_hang_up(&pair);
  tls_pair_again(&pair, "h2", true, "relay.example");
}

Test(tls, a_handshake_cut_at_every_byte_is_never_done) {
  size_t whole[2];
  measure(whole);
  for (int from = 0; from < 2; from++)
    for (size_t at = 0; at + 80 < whole[from];
         at += next_byte()) { /* signatures differ in length */
      pair.limit[from] = at;
      cr_assert_not(tls_pair_shake(&pair, 65536));
      cr_assert_eq(pair.result[1 - from], KVRELAY_SECURE_CUT, "side %d, byte %zu: %d %s", from, at,
                   pair.result[1 - from], side(1 - from)->text);
      cr_assert_str_eq(side(1 - from)->text, "closed by the peer in the handshake");
      tls_pair_hang_up(&pair);
      tls_pair_again(&pair, "h2", true, "relay.example");
    }
}

Test(tls, a_handshake_bent_at_any_byte_delivers_nothing) {
  size_t whole[2];
  measure(whole);
  for (int from = 0; from < 2; from++)
    for (size_t at = 0; at + 10 < whole[from]; at += next_byte()) {
      pair.bend[from] = at;
      bool done = tls_pair_shake(&pair, 65536);
      if (done) /* the last bytes: the receiver finds out when it reads */
        done = tls_pair_send(&pair, from, 10, 10, 65536, 100);
      /* The minor version in front of a hello means nothing in TLS 1.3. */
      cr_assert(!done || at == 2, "side %d, byte %zu", from, at);
      tls_pair_hang_up(&pair);
      tls_pair_again(&pair, "h2", true, "relay.example");
    }
}

Test(tls, a_record_bent_at_any_byte_is_not_delivered) {
  for (size_t at = 0; at < 38; at++) {
    uint8_t in[100];
    const kvrelay_iov word = {(const uint8_t *)"sixteen bytes ..", 16};
    cr_assert(tls_pair_shake(&pair, 65536));
    kvrelay_secure_session *s = side(TLS_SERVER), *c = side(TLS_CLIENT);
    pair.bend[TLS_CLIENT] = pair.moved[TLS_CLIENT] + at;
    cr_assert_eq(c->write(c, &word, 1), 16);
    tls_pair_carry(&pair, 65536);
    ptrdiff_t n = s->read(s, in, sizeof in);
    if (n == KVRELAY_SECURE_AGAIN) { /* the length grew: it waits for the rest */
      shutdown(pair.wire[TLS_SERVER], SHUT_WR);
      n = s->read(s, in, sizeof in);
    }
    cr_assert_lt(n, 0, "byte %zu", at);
    cr_assert_gt(strlen(s->text), 0u);
    tls_pair_hang_up(&pair);
    tls_pair_again(&pair, "h2", true, "relay.example");
  }
}

/* ---- what it costs ---- */

static int descriptors(void) {
  int count = 0;
  DIR *folder = opendir("/proc/self/fd");
  while (readdir(folder) != NULL)
    count++;
  closedir(folder);
  return count;
}

Test(tls, a_thousand_handshakes_leave_nothing_behind) {
  size_t used = 0;
  int open = 0;
  for (int i = 0; i < 1000; i++) {
    cr_assert(tls_pair_shake(&pair, 65536));
    if (i % 3 == 0)
      cr_assert(tls_pair_send(&pair, i & 1, 20000, 700, 65536, 4096));
    tls_pair_hang_up(&pair);
    tls_pair_again(&pair, "h2", true, "relay.example");
    if (i == 299) { /* what OpenSSL keeps for itself is there by now */
      used = mallinfo2().uordblks;
      open = descriptors();
    }
  }
  cr_assert_eq(descriptors(), open);
  cr_assert_leq(mallinfo2().uordblks, used + 4096);
}

Test(tls, an_idle_session_is_small) {
  enum { COUNT = 100 };
  static tls_pair many[COUNT];
  cr_assert(tls_pair_shake(&pair, 65536));
  cr_assert(tls_pair_send(&pair, TLS_SERVER, 100000, 16384, 65536, 65536));
  size_t used = mallinfo2().uordblks;
  for (int i = 0; i < COUNT; i++) {
    many[i] = pair;
    tls_pair_again(&many[i], "h2", true, "relay.example");
    cr_assert(tls_pair_shake(&many[i], 65536));
    cr_assert(tls_pair_send(&many[i], TLS_SERVER, 100000, 16384, 65536, 65536));
    cr_assert(tls_pair_send(&many[i], TLS_CLIENT, 100000, 16384, 65536, 65536));
  }
  size_t each = (mallinfo2().uordblks - used) / COUNT / 2;
  fprintf(stderr, "an idle session: %zu bytes\n", each);
  cr_assert_leq(each, 40000);
  for (int i = 0; i < COUNT; i++)
    tls_pair_hang_up(&many[i]);
}
