/* SPDX-License-Identifier: Apache-2.0 */
/* What server transports tell operators of a connection: whose it was, and how much it matters. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "transports/transport_log.h"

static char told[2048];

static void on_log(void *context, int level, const char *event, const char *text) {
  snprintf(told, sizeof told, "%s %d %s %s", (const char *)context, level, event, text);
}

Test(transport_log, lines_name_the_peer_and_its_certificate) {
  char here[] = "here";
  const kvrelay_log log = {on_log, here};
  kvrelay_secure_session known = {.peer = "router.example"}, nameless = {.peer = ""};
  kvrelay_address peer;
  cr_assert_eq(kvrelay_address_parse("127.0.0.1:4711", &peer), KVRELAY_TRANSPORT_OK);
  kvrelay_log_connection(log, KVRELAY_LOG_WARN, "closed", &peer, NULL, "cut");
  cr_expect_str_eq(told, "here 3 closed 127.0.0.1:4711: cut");
  kvrelay_log_connection(log, KVRELAY_LOG_DEBUG, "closed", &peer, &known, "cut");
  cr_expect_str_eq(told, "here 1 closed 127.0.0.1:4711 (router.example): cut");
  kvrelay_log_connection(log, KVRELAY_LOG_ERROR, "closed", &peer, &nameless, "cut");
  cr_expect_str_eq(told, "here 4 closed 127.0.0.1:4711: cut");
  kvrelay_log_connection(log, KVRELAY_LOG_ERROR, "accept", NULL, NULL, "%s%n");
  cr_expect_str_eq(told, "here 4 accept %s%n");
}

Test(transport_log, nobody_listens) {
  kvrelay_log_connection((kvrelay_log){NULL, NULL}, KVRELAY_LOG_WARN, "closed", NULL, NULL, "cut");
}

Test(transport_log, what_an_operator_should_see_to_is_a_warning) {
  for (int err = KVRELAY_TRANSPORT_ERR_ARG; err >= KVRELAY_TRANSPORT_ERR_SECURITY; err--) {
    const bool warns = err == KVRELAY_TRANSPORT_ERR_MEMORY ||
                       err == KVRELAY_TRANSPORT_ERR_PROTOCOL ||
                       err == KVRELAY_TRANSPORT_ERR_LIMIT || err == KVRELAY_TRANSPORT_ERR_SECURITY;
    cr_expect_eq(kvrelay_log_level_of_end(err), warns ? KVRELAY_LOG_WARN : KVRELAY_LOG_DEBUG, "%d",
                 err);
  }
}
