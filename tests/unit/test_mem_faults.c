/* SPDX-License-Identifier: Apache-2.0 */

/* A relay and a consumer over mem/ while each allocation of either end fails once, and several in a
 * row: the consumer comes to hold what the relay holds. */

#include "support/faults.h"
#include "test_service.h"

#include <errno.h>

/* The consumer holds what the relay holds after two seconds in which allocations fail, and a minute
 * in which none does.  False: none was left to fail. */
static bool survives(unsigned long nth, unsigned long count) {
  const kvrelay_relay_config cfg = fx_config();
  world w;
  world_open(&w, &cfg, 20 * MS, 0);
  fx_pool *pool = fx_publish(w.f, 1, 1000);
  fx_store(pool, 100);
  faults_arm(FAULT_MEMORY, nth, count, ENOMEM);
  world_run(&w, SECOND);
  for (int round = 0; round < 10; round++) {
    fx_delta(w.f, pool);
    world_run(&w, 50 * MS);
  }
  const bool struck = faults_disarm();
  world_run(&w, 60 * SECOND);
  cr_assert(is_live_and_equal(&w, pool), "allocation %lu and %lu more", nth, count - 1);
  world_close(&w);
  return struck;
}

Test(mem_faults, each_allocation_fails_once_and_several_in_a_row) {
  faults_install();
  for (unsigned long count = 1; count <= 9; count += 4) {
    unsigned long nth = 1;
    while (survives(nth, count))
      nth++;
    cr_assert_gt(nth, 20, "requests, answers and replicas take some");
  }
}

Test(mem_faults, a_connection_that_cannot_be_opened) {
  const kvrelay_mem_config cfg = kvrelay_mem_config_default();
  kvrelay_service service = {0};
  kvrelay_caller caller = {0};
  kvrelay_mem *mem = NULL;
  faults_install();
  faults_arm(FAULT_MEMORY, 1, 1, ENOMEM);
  cr_assert_eq(kvrelay_mem_open(&cfg, &service, &caller, &mem), KVRELAY_TRANSPORT_ERR_MEMORY);
  cr_assert(faults_disarm());
  cr_assert_null(mem);
}
