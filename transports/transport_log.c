/* SPDX-License-Identifier: Apache-2.0 */
#include "transport_log.h"

#include <stdio.h>

void kvrelay_log_connection(kvrelay_log log, int level, const char *event,
                            const kvrelay_address *peer, const kvrelay_secure_session *secure,
                            const char *text) {
  char address[KVRELAY_ADDRESS_CAP] = "", line[1024];
  if (log.write == NULL)
    return;
  if (peer != NULL)
    kvrelay_address_format(peer, address);
  const char *name = secure != NULL ? secure->peer : "";
  snprintf(line, sizeof line, name[0] != '\0' ? "%s (%s)%s%s" : "%s%s%s%s", address, name,
           peer != NULL ? ": " : "", text);
  log.write(log.context, level, event, line);
}

int kvrelay_log_level_of_end(int err) {
  switch (err) {
  case KVRELAY_TRANSPORT_ERR_PROTOCOL:
  case KVRELAY_TRANSPORT_ERR_LIMIT:
  case KVRELAY_TRANSPORT_ERR_SECURITY:
  case KVRELAY_TRANSPORT_ERR_MEMORY:
    return KVRELAY_LOG_WARN;
  default:
    return KVRELAY_LOG_DEBUG;
  }
}
