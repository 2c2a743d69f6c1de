/* SPDX-License-Identifier: Apache-2.0 */
/* A recorded stream: read once, at start, as fast as it goes. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "feed.h"
#include "log.h"
#include "serve.h"
#include "trace.h"

#define PROGRESS_NS ((uint64_t)1000000000)

static uint64_t big_endian(const uint8_t *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++)
    value = value << 8 | bytes[i];
  return value;
}

/* Frames as on the socket: topic, sequence, payload, parsed from the end. */
static int apply_record(feed *f, const trace_record *r, uint64_t now_ns) {
  if (r->frames_len < 2 || r->frames_len > 3 || r->frame_len[r->frames_len - 2] != 8) {
    kvrelay_source_count(&f->source, KVRELAY_COUNT_FRAMES, 1);
    return KVRELAY_OK;
  }
  kvrelay_source_count(&f->source, KVRELAY_COUNT_FRAMES, r->frames_len == 2);
  return feed_batch(f, big_endian(r->frame[r->frames_len - 2]), r->frame[r->frames_len - 1],
                    r->frame_len[r->frames_len - 1], now_ns);
}

int feed_trace_read(feed *f) {
  const char *path = f->worker->events.file;
  trace t;
  trace_record record;
  char why[128];
  uint64_t batches = 0, replies = 0, said_ns = kvrelay_now_ns();
  int more = 1, err = KVRELAY_OK;
  if (trace_open(&t, path) != 0) {
    log_event(LOG_ERROR, "trace_failed", "source=%s file=%s error=\"%s\"", f->name, path,
              strerror(errno));
    return 69;
  }
  while (err == KVRELAY_OK && (more = trace_next(&t, &record, why)) == 1) {
    uint64_t now_ns = kvrelay_now_ns();
    if (record.kind != TRACE_LIVE) {
      replies++; /* answers to questions that nobody asks of a recording */
      continue;
    }
    err = apply_record(f, &record, now_ns);
    batches++;
    serve_pool_changed(f->pool, now_ns);
    if (now_ns - said_ns >= PROGRESS_NS) {
      said_ns = now_ns;
      log_event(LOG_INFO, "trace_progress", "source=%s batches=%" PRIu64, f->name, batches);
    }
  }
  trace_close(&t);
  f->dirty = false;
  if (more < 0 || err != KVRELAY_OK) {
    log_event(LOG_ERROR, "trace_failed", "source=%s file=%s error=\"%s\"", f->name, path,
              more < 0 ? why : kvrelay_strerror(err));
    return more < 0 ? 69 : 70;
  }
  const kvrelay_source_stats *stats = kvrelay_source_stats_get(&f->source);
  log_event(LOG_INFO, "trace_read",
            "source=%s batches=%" PRIu64 " replies_skipped=%" PRIu64 " blocks_stored=%" PRIu64
            " complete=%s",
            f->name, batches, replies, stats->blocks_stored, stats->complete ? "yes" : "no");
  feed_report(f);
  return 0;
}
