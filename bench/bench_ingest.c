/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What does an engine's stream cost? Batches of one store event as vLLM sends it today (a map, 16
 * blocks of 16 tokens, 32-bit token ids), prompts of 16 events; then the removals, in events of 16.
 * Decoding alone; events as decoded, through the source to the filter: hashes, owners, words, a
 * drain after each 16th batch; and both together, from bytes to the filter.
 */

#include "bench.h"
#include "kvrelay.h"
#include "proto/engine_events.h"

enum { BLOCKS = 16, TOKENS = 16, PROMPT_EVENTS = 16, EVENTS = 16384 };

typedef struct stream {
  uint8_t *bytes;
  size_t len, cap;
  size_t start[EVENTS + 1];
} stream;

/* What the decoder gives for each batch, kept. */
typedef struct decoded {
  kvrelay_engine_event event[EVENTS];
  uint64_t externals[EVENTS][BLOCKS];
  uint32_t tokens[EVENTS][BLOCKS * TOKENS];
} decoded;

typedef struct target {
  ckf_producer producer;
  kvrelay_source source;
  void *producer_mem, *source_mem;
} target;

static void *take(size_t bytes) {
  void *memory = malloc(bytes);
  bench_need(memory != NULL);
  return memory;
}

/* ---- writing the stream ---- */

static void put(stream *s, uint8_t head, int width, uint64_t n) {
  if (s->cap - s->len < 16) {
    s->cap = 2 * s->cap + 4096;
    s->bytes = realloc(s->bytes, s->cap);
    bench_need(s->bytes != NULL);
  }
  s->bytes[s->len++] = head;
  for (int i = width - 1; i >= 0; i--)
    s->bytes[s->len++] = (uint8_t)(n >> (8 * i));
}

static void put_text(stream *s, const char *text) {
  size_t len = strlen(text);
  put(s, (uint8_t)(0xa0 | len), 0, 0);
  for (size_t i = 0; i < len; i++)
    put(s, (uint8_t)text[i], 0, 0);
}

static uint64_t external_of(size_t event, size_t block) {
  return hashfmt_hash64(&(uint64_t){event * BLOCKS + block}, 8, 77);
}

static void put_hashes(stream *s, size_t event) {
  put_text(s, "block_hashes");
  put(s, 0xdc, 2, BLOCKS);
  for (size_t i = 0; i < BLOCKS; i++)
    put(s, 0xcf, 8, external_of(event, i));
}

/* [1.5, [event], 0] */
static void put_batch(stream *s, size_t event, bool store) {
  s->start[event] = s->len;
  put(s, 0x93, 0, 0);
  put(s, 0xcb, 8, UINT64_C(0x3ff8000000000000));
  put(s, 0x91, 0, 0);
  put(s, (uint8_t)(0x80 | (store ? 9 : 3)), 0, 0);
  put_text(s, "type");
  put_text(s, store ? "BlockStored" : "BlockRemoved");
  put_hashes(s, event);
  if (store) {
    put_text(s, "parent_block_hash");
    if (event % PROMPT_EVENTS == 0)
      put(s, 0xc0, 0, 0);
    else
      put(s, 0xcf, 8, external_of(event - 1, BLOCKS - 1));
    put_text(s, "token_ids");
    put(s, 0xdc, 2, BLOCKS * TOKENS);
    for (size_t i = 0; i < BLOCKS * TOKENS; i++)
      put(s, 0xce, 4, (event * BLOCKS * TOKENS + i) % 150000 + 65536 + event);
    put_text(s, "block_size");
    put(s, TOKENS, 0, 0);
    put_text(s, "lora_id");
    put(s, 0xc0, 0, 0);
    put_text(s, "lora_name");
    put(s, 0xc0, 0, 0);
    put_text(s, "group_idx");
    put(s, 0x00, 0, 0);
  }
  put_text(s, "medium");
  put_text(s, "GPU");
  put(s, 0x00, 0, 0);
  s->start[event + 1] = s->len;
}

static stream *stream_new(bool store) {
  stream *s = calloc(1, sizeof *s);
  bench_need(s != NULL);
  for (size_t i = 0; i < EVENTS; i++)
    put_batch(s, i, store);
  return s;
}

static void stream_free(stream *s) {
  free(s->bytes);
  free(s);
}

/* ---- measuring ---- */

static double decode(kvrelay_engine_decoder *d, const stream *s) {
  kvrelay_engine_batch batch;
  kvrelay_engine_event ev;
  size_t hashes = 0;
  const double start = bench_cpu_ns();
  for (size_t i = 0; i < EVENTS; i++) {
    bench_need(kvrelay_engine_batch_begin(d, s->bytes + s->start[i], s->start[i + 1] - s->start[i],
                                          &batch) == KVRELAY_OK);
    while (kvrelay_engine_batch_next(d, &ev) == 1)
      hashes += ev.externals_len;
  }
  const double taken = bench_cpu_ns() - start;
  bench_need(hashes == (size_t)EVENTS * BLOCKS);
  return taken;
}

static decoded *decoded_new(kvrelay_engine_decoder *d, const stream *s) {
  decoded *const all = bench_memory(sizeof *all);
  for (size_t i = 0; i < EVENTS; i++) {
    kvrelay_engine_batch batch;
    kvrelay_engine_event *const ev = &all->event[i];
    bench_need(kvrelay_engine_batch_begin(d, s->bytes + s->start[i], s->start[i + 1] - s->start[i],
                                          &batch) == KVRELAY_OK);
    bench_need(kvrelay_engine_batch_next(d, ev) == 1 && ev->externals_len == BLOCKS &&
               ev->tokens_len <= BLOCKS * TOKENS);
    memcpy(all->externals[i], ev->externals, sizeof all->externals[i]);
    ev->externals = all->externals[i];
    if (ev->tokens_len)
      memcpy(all->tokens[i], ev->tokens, ev->tokens_len * sizeof *ev->tokens);
    ev->tokens = all->tokens[i];
  }
  return all;
}

static target *target_new(void) {
  target *t = take(sizeof *t);
  ckf_producer_config pc = ckf_producer_config_default();
  pc.tags = true;
  kvrelay_source_config sc = kvrelay_source_config_default();
  pc.filter.expected_blocks = (uint64_t)EVENTS * BLOCKS;
  sc.worker_id = 1;
  sc.block_size = TOKENS;
  const size_t producer_len = ckf_producer_mem_size(&pc), source_len = kvrelay_source_mem_size(&sc);
  t->producer_mem = take(producer_len);
  t->source_mem = take(source_len);
  bench_need(ckf_producer_init(&t->producer, &pc, t->producer_mem, producer_len) == CKF_OK);
  bench_need(kvrelay_source_init(&t->source, &sc, &t->producer, t->source_mem, source_len, 0) ==
             KVRELAY_OK);
  return t;
}

static void target_free(target *t) {
  free(t->producer_mem);
  free(t->source_mem);
  free(t);
}

/* Nanoseconds for the batches of a stream, decoded before or here. */
static double ingest(kvrelay_engine_decoder *d, target *t, const stream *s, const decoded *before,
                     uint64_t sequence) {
  const double start = bench_cpu_ns();
  for (size_t i = 0; i < EVENTS; i++) {
    ckf_batch changed;
    kvrelay_source_batch batch;
    const uint8_t *const payload = s->bytes + s->start[i];
    const size_t len = s->start[i + 1] - s->start[i];
    if (before == NULL) {
      bench_need(kvrelay_engine_feed(d, &t->source, sequence + i, payload, len, 0) == KVRELAY_OK);
    } else {
      bench_need(kvrelay_source_live(&t->source, sequence + i, payload, len, 0) == KVRELAY_OK);
      while (kvrelay_source_next(&t->source, &batch, 0) == 1)
        bench_need(kvrelay_source_event(&t->source, true, 0, &before->event[i], 0) == KVRELAY_OK);
    }
    if (i % 16 == 15)
      bench_need(ckf_producer_drain(&t->producer, &changed) >= 0);
  }
  return bench_cpu_ns() - start;
}

static uint32_t blocks_of(const target *t) {
  const ckf_member member = {1, 0};
  return ckf_producer_member_blocks(&t->producer, &member);
}

/* Megablocks a second: new ones, a second copy, and the removals, of which the first take one copy
 * of two. */
typedef struct rates {
  bench_sample stored, copied, removed;
} rates;

static void run(rates *r, kvrelay_engine_decoder *d, const stream *const streams[2],
                decoded *const before[2]) {
  const double blocks = (double)EVENTS * BLOCKS;
  target *t = target_new();
  bench_add(&r->stored, blocks * 1e3 / ingest(d, t, streams[0], before[0], 0));
  bench_add(&r->copied, blocks * 1e3 / ingest(d, t, streams[0], before[0], EVENTS));
  bench_need(blocks_of(t) == (uint32_t)EVENTS * BLOCKS);
  const double first_ns = ingest(d, t, streams[1], before[1], 2 * EVENTS);
  bench_add(&r->removed,
            2 * blocks * 1e3 / (first_ns + ingest(d, t, streams[1], before[1], 3 * EVENTS)));
  bench_need(blocks_of(t) == 0);
  for (int i = 0; i < KVRELAY_COUNT_LEN; i++)
    bench_need(kvrelay_source_stats_get(&t->source)->counts[i] == 0);
  target_free(t);
}

static void print(rates *r, const char *from) {
  bench_print(&r->stored, "M/s", "ingest_%sstored_blocks_new", from);
  bench_print(&r->copied, "M/s", "ingest_%sstored_blocks_copy", from);
  bench_print(&r->removed, "M/s", "ingest_%sremoved_blocks", from);
}

int main(int argc, char **argv) {
  bench_arguments(argc, argv, 0, "");
  bench_start();
  enum { MAX_TOKENS = 1 << 16 };
  kvrelay_engine_decoder decoder;
  void *memory = take(kvrelay_engine_decoder_mem_size(MAX_TOKENS));
  bench_need(kvrelay_engine_decoder_init(&decoder, MAX_TOKENS, memory,
                                         kvrelay_engine_decoder_mem_size(MAX_TOKENS)) ==
             KVRELAY_OK);
  stream *streams[] = {stream_new(true), stream_new(false)};
  decoded *before[] = {decoded_new(&decoder, streams[0]), decoded_new(&decoder, streams[1])};
  decoded *const none[] = {NULL, NULL};
  bench_sample stored = {0}, bytes = {0}, removed = {0};
  rates from_events = {0}, from_bytes = {0};
  for (int i = 0; i < BENCH_RUNS; i++) {
    const double store_ns = decode(&decoder, streams[0]);
    bench_add(&stored, EVENTS * 1e3 / store_ns);
    bench_add(&bytes, (double)streams[0]->len * 1e3 / store_ns);
    bench_add(&removed, EVENTS * 1e3 / decode(&decoder, streams[1]));
    run(&from_events, &decoder, (const stream *const *)streams, before);
    run(&from_bytes, &decoder, (const stream *const *)streams, none);
  }
  bench_print(&stored, "M/s", "ingest_decode_stored_events");
  bench_print(&bytes, "MB/s", "ingest_decode_stored_bytes");
  bench_print(&removed, "M/s", "ingest_decode_removed_events");
  print(&from_events, "events_");
  print(&from_bytes, "");
  for (size_t i = 0; i < 2; i++) {
    stream_free(streams[i]);
    free(before[i]);
  }
  free(memory);
  return 0;
}
