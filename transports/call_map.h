/* SPDX-License-Identifier: Apache-2.0 */
/* call_map.h - open calls by number; a node is the first member of whatever is looked up. */
#ifndef KVRELAY_CALL_MAP_H
#define KVRELAY_CALL_MAP_H

#include <stddef.h>
#include <stdint.h>

#define KVRELAY_CALL_BUCKETS 256 /* a few hundred calls are many */

typedef struct kvrelay_call_node kvrelay_call_node;
struct kvrelay_call_node {
  kvrelay_call_node *next;
  uint64_t number;
};

typedef struct kvrelay_call_map {
  kvrelay_call_node *buckets[KVRELAY_CALL_BUCKETS];
  size_t len;
} kvrelay_call_map;

/* Where the node of this number hangs, or would hang. */
static inline kvrelay_call_node **kvrelay_call_map_place_(kvrelay_call_map *map, uint64_t number) {
  kvrelay_call_node **place = &map->buckets[(number ^ number >> 32) % KVRELAY_CALL_BUCKETS];
  while (*place && (*place)->number != number)
    place = &(*place)->next;
  return place;
}

/* The node of a number, NULL when there is none. */
static inline void *kvrelay_call_map_find(kvrelay_call_map *map, uint64_t number) {
  return *kvrelay_call_map_place_(map, number);
}

/* Adds a node under a number that is not there. */
static inline void kvrelay_call_map_add(kvrelay_call_map *map, kvrelay_call_node *node,
                                        uint64_t number) {
  kvrelay_call_node **place = kvrelay_call_map_place_(map, number);
  node->next = NULL;
  node->number = number;
  *place = node;
  map->len++;
}

/* Takes a node out that is there. */
static inline void kvrelay_call_map_remove(kvrelay_call_map *map, const kvrelay_call_node *node) {
  kvrelay_call_node **place = kvrelay_call_map_place_(map, node->number);
  *place = node->next;
  map->len--;
}

/* Any node, for clearing the map; NULL when it is empty. */
static inline void *kvrelay_call_map_any(const kvrelay_call_map *map) {
  for (size_t i = 0; i < KVRELAY_CALL_BUCKETS; i++)
    if (map->buckets[i])
      return map->buckets[i];
  return NULL;
}

#endif
