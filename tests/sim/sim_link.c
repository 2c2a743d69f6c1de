/* SPDX-License-Identifier: Apache-2.0 */
/* Consumers and their connections. */
#include "sim.h"

#include <stdlib.h>

void sim_link_open(sim *s, uint32_t r, uint32_t c) {
  sim_link *const l = &s->links[r][c];
  kvrelay_consumer_config consumer = kvrelay_consumer_config_default();
  consumer.max_pools = SIM_POOLS_CAP;
  consumer.catalog_bytes = consumer.readiness_bytes = 1 << 15;
  consumer.jitter_seed = sim_draw(s);
  const size_t len = kvrelay_consumer_mem_size(&consumer);
  l->consumer_mem = sim_alloc(s, len);
  if (kvrelay_consumer_init(&l->consumer, &consumer, l->consumer_mem, len - 1, s->now) !=
          KVRELAY_ERR_NOSPACE ||
      kvrelay_consumer_init(&l->consumer, &consumer, l->consumer_mem, len, s->now) != KVRELAY_OK)
    sim_fail(s, "a consumer cannot be made, or in too little memory");
  sim_count(s, SIM_SHORT_MEMORY);
  kvrelay_client_config client = kvrelay_client_config_default(&l->consumer);
  l->starved = sim_once(s, 12);
  if (l->starved) {
    sim_count(s, SIM_STARVED);
    client.max_replica_bytes = 4096;
  }
  kvrelay_mem_config mem = kvrelay_mem_config_default();
  mem.clock_ns = &s->now;
  mem.delay_ns = sim_below(s, 150) * SIM_MS;
  mem.queue_messages = 1 + sim_below(s, 8);
  l->slow = mem.delay_ns != 0; /* what is on its way counts as unread */
  if (kvrelay_client_open(&client, &l->client) != KVRELAY_TRANSPORT_OK ||
      kvrelay_mem_open(&mem, &s->relays[r].front.base, kvrelay_client_caller(l->client), &l->mem) !=
          KVRELAY_TRANSPORT_OK) {
    sim_fail(s, "a connection cannot be made");
    return;
  }
  l->transport = kvrelay_mem_client(l->mem);
  kvrelay_client_attach(l->client, l->transport);
}

void sim_link_close(sim *s, uint32_t r, uint32_t c) {
  sim_link *const l = &s->links[r][c];
  kvrelay_mem_close(l->mem);
  kvrelay_client_close(l->client);
  sim_free(s, l->consumer_mem);
}

static void hold_all(kvrelay_mem *mem, bool hold) { kvrelay_mem_hold(mem, 0, hold); }

/* Lifts what is due to be lifted, and lets something happen. */
void sim_link_step(sim *s, uint32_t r, uint32_t c) {
  sim_link *const l = &s->links[r][c];
  if (l->hold_until && (s->calm || s->now >= l->hold_until)) {
    hold_all(l->mem, false);
    kvrelay_mem_stall(l->mem, false);
    l->hold_until = 0;
  }
  if (l->refuse_until && (s->calm || s->now >= l->refuse_until)) {
    kvrelay_mem_refuse(l->mem, false);
    l->refuse_until = 0;
  }
  if (s->calm)
    return;
  const uint32_t what = sim_below(s, 600);
  switch (what) {
  case 0:
    sim_count(s, SIM_CUT);
    kvrelay_mem_cut(l->mem);
    break;
  case 1:
    sim_count(s, SIM_REFUSED);
    kvrelay_mem_refuse(l->mem, true);
    kvrelay_mem_cut(l->mem);
    l->refuse_until = s->now + sim_below(s, 20000) * SIM_MS + 1;
    break;
  case 2:
  case 7:
    sim_count(s, what == 2 ? SIM_HELD : SIM_STALLED);
    (what == 2 ? hold_all : kvrelay_mem_stall)(l->mem, true);
    l->held_from = l->hold_until ? l->held_from : s->now;
    l->hold_until = s->now + sim_below(s, 40000) * SIM_MS + 1;
    l->slow = true;
    break;
  case 3:
    sim_count(s, SIM_NO_COPY);
    kvrelay_mem_fail_copy(l->mem, sim_below(s, 20));
    break;
  case 4:
  case 5:
    sim_count(s, SIM_DELAYED);
    kvrelay_mem_delay(l->mem, sim_below(s, 400) * SIM_MS);
    l->slow = true;
    break;
  case 6:
    sim_count(s, SIM_SHORT_TURNS);
    kvrelay_mem_turn(l->mem, sim_below(s, 4));
    break;
  default:
    break;
  }
}

bool sim_link_turn(sim *s, uint32_t r, uint32_t c) {
  sim_link *const l = &s->links[r][c];
  const int happened = l->transport->base.run_once(&l->transport->base, 0);
  if (happened < 0)
    sim_fail(s, "relay %u, consumer %u: transport: %d", r, c, happened);
  if (kvrelay_client_run(l->client, s->now) != KVRELAY_TRANSPORT_OK)
    sim_fail(s, "relay %u, consumer %u: stopped for good", r, c);
  return happened > 0;
}
