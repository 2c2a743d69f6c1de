/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REFERENCE_SEARCH_H_
#define REFERENCE_SEARCH_H_

/*
 * The reference's prefix search: doubling, halving level by level, verification of a window, scan
 * of what a miss at the window's left edge leaves open. Not fast; it counts what the reference
 * counts, so that its published figures and traces can be compared, and ours against it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define REFERENCE_LANES 16

typedef struct reference_stats {
  uint64_t row_probes;
  uint64_t left_edge_lanes;      /* missed at the left edge of their window */
  uint64_t activated_lanes;      /* of these: with something to scan */
  uint64_t fallback_rows;        /* rows probed while scanning */
  uint64_t fallback_lane_probes; /* lanes in these rows */
  uint64_t provenance_skips;     /* nothing known below the window */
} reference_stats;

/** Looks at or asks for a row: `lanes` are those that want it. The answer to a prefetch is unused.
 */
typedef uint32_t (*reference_row)(void *user, bool prefetch, size_t position, uint32_t lanes);

/** Depths of the lanes in `mask`, 0 elsewhere; `stats` is added to. */
void reference_search(reference_row row, void *user, size_t len, uint32_t mask, uint32_t window,
                      bool fallback, uint32_t depths[REFERENCE_LANES], reference_stats *stats);

#endif
