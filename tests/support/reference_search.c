/* SPDX-License-Identifier: Apache-2.0 */

#include "reference_search.h"

#include <string.h>

typedef struct search {
  reference_row row;
  void *user;
  reference_stats *stats;
  size_t len;
  uint32_t active;
  /* pred: the position known before lower; upper: len, or a position that missed */
  size_t lower[REFERENCE_LANES], pred[REFERENCE_LANES], upper[REFERENCE_LANES];
  size_t depth[REFERENCE_LANES], left_edge[REFERENCE_LANES];
} search;

static uint32_t bit(uint32_t lane) { return UINT32_C(1) << lane; }

static void prefetch(search *s, size_t position, uint32_t lanes) {
  (void)s->row(s->user, true, position, lanes);
}

static uint32_t probe(search *s, size_t position, uint32_t lanes) {
  s->stats->row_probes++;
  return s->row(s->user, false, position, lanes) & lanes;
}

static void take(search *s, uint32_t lanes, size_t position, uint32_t hits) {
  for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++) {
    if (!(lanes & bit(lane)))
      continue;
    if (hits & bit(lane)) {
      s->pred[lane] = s->lower[lane];
      s->lower[lane] = position;
    } else {
      s->upper[lane] = position;
    }
  }
}

static void doubling(search *s) {
  uint32_t sampling = s->active;
  if (s->len > 1 && sampling)
    prefetch(s, 1, sampling);
  for (size_t position = 1; position < s->len && sampling; position *= 2) {
    if (position * 2 < s->len)
      prefetch(s, position * 2, sampling);
    const uint32_t hits = probe(s, position, sampling);
    take(s, sampling, position, hits);
    sampling &= hits;
  }
}

static void halving(search *s) {
  for (;;) {
    size_t midpoints[REFERENCE_LANES];
    uint32_t groups[REFERENCE_LANES];
    size_t count = 0;
    for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++) {
      if (!(s->active & bit(lane)) || s->upper[lane] - s->lower[lane] <= 1)
        continue;
      const size_t midpoint = s->lower[lane] + (s->upper[lane] - s->lower[lane]) / 2;
      size_t g = 0;
      while (g < count && midpoints[g] != midpoint)
        g++;
      if (g == count) {
        midpoints[count] = midpoint;
        groups[count++] = 0;
      }
      groups[g] |= bit(lane);
    }
    if (count == 0)
      return;
    for (size_t g = 0; g < count; g++)
      prefetch(s, midpoints[g], groups[g]);
    for (size_t g = 0; g < count; g++)
      take(s, groups[g], midpoints[g], probe(s, midpoints[g], groups[g]));
  }
}

/* The lowest position at or above `from` in the window of any lane, and those lanes. */
static bool next_in_window(const search *s, uint32_t lanes, size_t from, size_t *position,
                           uint32_t *wanted) {
  *wanted = 0;
  for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++) {
    const size_t at = from > s->left_edge[lane] ? from : s->left_edge[lane];
    if (!(lanes & bit(lane)) || at >= s->upper[lane])
      continue;
    if (*wanted == 0 || at < *position) {
      *position = at;
      *wanted = 0;
    }
    if (at == *position)
      *wanted |= bit(lane);
  }
  return *wanted != 0;
}

/* Returns the lanes that missed at the left edge of their window. */
static uint32_t verification(search *s, uint32_t window) {
  uint32_t verifying = s->active, flagged = 0, wanted;
  size_t position = 0;
  for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++) {
    s->depth[lane] = s->active & bit(lane) ? s->upper[lane] : 0;
    s->left_edge[lane] = s->upper[lane] > window ? s->upper[lane] - window : 0;
  }
  for (size_t from = 0; next_in_window(s, verifying, from, &position, &wanted);
       from = position + 1) {
    prefetch(s, position, wanted);
    const uint32_t missed = wanted & ~probe(s, position, wanted);
    verifying &= ~missed;
    for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++)
      if (missed & bit(lane)) {
        s->depth[lane] = position;
        flagged |= position == s->left_edge[lane] ? bit(lane) : 0;
        s->stats->left_edge_lanes += position == s->left_edge[lane];
      }
  }
  return flagged;
}

static void scan(search *s, uint32_t flagged) {
  size_t cursor[REFERENCE_LANES] = {0};
  uint32_t scanning = 0;
  for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++) {
    if (!(flagged & bit(lane)))
      continue;
    cursor[lane] = s->pred[lane] + 1;
    s->stats->provenance_skips += s->pred[lane] >= s->left_edge[lane];
    if (cursor[lane] < s->left_edge[lane]) {
      scanning |= bit(lane);
      s->stats->activated_lanes++;
    }
  }
  while (scanning) {
    size_t position = SIZE_MAX;
    uint32_t wanted = 0;
    for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++)
      if (scanning & bit(lane) && cursor[lane] < position)
        position = cursor[lane];
    for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++)
      if (scanning & bit(lane) && cursor[lane] == position) {
        wanted |= bit(lane);
        s->stats->fallback_lane_probes++;
      }
    prefetch(s, position, wanted);
    const uint32_t hits = probe(s, position, wanted);
    s->stats->fallback_rows++;
    for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++) {
      if (!(wanted & bit(lane)))
        continue;
      if (!(hits & bit(lane)))
        s->depth[lane] = position;
      if (!(hits & bit(lane)) || ++cursor[lane] == s->left_edge[lane])
        scanning &= ~bit(lane);
    }
  }
}

void reference_search(reference_row row, void *user, size_t len, uint32_t mask, uint32_t window,
                      bool fallback, uint32_t depths[REFERENCE_LANES], reference_stats *stats) {
  search s = {.row = row, .user = user, .stats = stats, .len = len};
  memset(depths, 0, REFERENCE_LANES * sizeof *depths);
  if (len == 0)
    return;
  s.active = probe(&s, 0, mask);
  if (!s.active)
    return;
  for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++)
    s.upper[lane] = s.active & bit(lane) ? len : 0;
  doubling(&s);
  halving(&s);
  const uint32_t flagged = verification(&s, window);
  if (fallback)
    scan(&s, flagged);
  for (uint32_t lane = 0; lane < REFERENCE_LANES; lane++)
    depths[lane] = s.depth[lane] < UINT32_MAX ? (uint32_t)s.depth[lane] : UINT32_MAX;
}
