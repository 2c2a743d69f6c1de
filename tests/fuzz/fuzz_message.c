/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay_pb_decode_*: any bytes as any message. What is refused changes nothing, what is accepted
 * has a canonical form that is a fixed point; lists come out of the arena and nowhere else; a
 * FilterUpdate put together from its parts equals the one that is encoded in one go.
 *
 * SECURITY.md: 1, 2, 3, 4, 5.
 *
 * Input: one byte that picks the message, then its bytes.
 */

#include "fuzz.h"
#include "kvrelay_pb.h"

enum { ARENA_LEN = 1 << 16 };

static uint64_t arena_mem[ARENA_LEN / 8];

static kvrelay_pb_arena fresh_arena(void) {
  return (kvrelay_pb_arena){arena_mem, sizeof arena_mem, 0};
}

/* The message as a relay sends it: what a stream shares, the head, the payload, the tail. */
static void check_splice(const kvrelay_filter_update *m, const uint8_t *whole, size_t len) {
  kvrelay_pb_filter_prefix prefix;
  uint8_t head[KVRELAY_PB_FILTER_HEAD_CAP];
  if (kvrelay_pb_filter_prefix_init(&prefix, m) != KVRELAY_OK)
    return;
  const size_t head_len = kvrelay_pb_filter_head(&prefix, m, head);
  FUZZ_CHECK(head_len + m->payload_len + KVRELAY_PB_FILTER_TAIL_LEN == len);
  FUZZ_CHECK(memcmp(whole, head, head_len) == 0);
  FUZZ_CHECK(m->payload_len == 0 || memcmp(whole + head_len, m->payload, m->payload_len) == 0);
  FUZZ_CHECK(memcmp(whole + head_len + m->payload_len, kvrelay_pb_filter_tail,
                    KVRELAY_PB_FILTER_TAIL_LEN) == 0);
  kvrelay_pb_filter_stream stream;
  memset(&stream, 0, sizeof stream);
  for (int i = 0; i < 2; i++) { /* the second time by splice */
    kvrelay_filter_update back, slow;
    FUZZ_CHECK(kvrelay_pb_decode_filter(whole, len, NULL, &slow) == KVRELAY_OK);
    FUZZ_CHECK(kvrelay_pb_filter_read(&stream, whole, len, &back) == KVRELAY_OK);
    FUZZ_CHECK(memcmp(&slow, &back, sizeof back) == 0);
  }
}

#define CHECK_MESSAGE(NAME, TYPE, DECODE, ENCODE, AND)                                             \
  static void check_##NAME(const uint8_t *bytes, size_t len) {                                     \
    kvrelay_pb_arena arena = fresh_arena();                                                        \
    TYPE m, before, again;                                                                         \
    memset(&m, 0xA5, sizeof m);                                                                    \
    memcpy(&before, &m, sizeof m);                                                                 \
    const int rc = DECODE(&m);                                                                     \
    if (rc != KVRELAY_OK) {                                                                        \
      FUZZ_CHECK(arena.used == 0 && memcmp(&m, &before, sizeof m) == 0);                           \
      return;                                                                                      \
    }                                                                                              \
    const ptrdiff_t size = ENCODE(&m, NULL, 0);                                                    \
    if (size < 0) {                                                                                \
      FUZZ_CHECK(size == KVRELAY_ERR_ARG); /* a digest longer than its struct holds */             \
      return;                                                                                      \
    }                                                                                              \
    uint8_t *once = fuzz_alloc((size_t)size), *twice = fuzz_alloc((size_t)size);                   \
    FUZZ_CHECK(ENCODE(&m, once, (size_t)size) == size);                                            \
    FUZZ_CHECK(size == 0 || ENCODE(&m, twice, (size_t)size - 1) == KVRELAY_ERR_NOSPACE);           \
    AND;                                                                                           \
    bytes = once;                                                                                  \
    len = (size_t)size;                                                                            \
    arena.used = 0; /* m is gone */                                                                \
    FUZZ_CHECK(DECODE(&again) == KVRELAY_OK);                                                      \
    FUZZ_CHECK(ENCODE(&again, twice, (size_t)size) == size);                                       \
    FUZZ_CHECK(memcmp(once, twice, (size_t)size) == 0);                                            \
    free(once);                                                                                    \
    free(twice);                                                                                   \
  }

#define DECODE_(NAME, OUT) kvrelay_pb_decode_##NAME(bytes, len, &arena, (OUT))
#define DECODE_INFO(OUT) DECODE_(info, OUT)
#define DECODE_CATALOG(OUT) DECODE_(catalog, OUT)
#define DECODE_FILTER(OUT) DECODE_(filter, OUT)
#define DECODE_READINESS(OUT) DECODE_(readiness, OUT)
#define DECODE_LOAD(OUT) DECODE_(load, OUT)
#define DECODE_SERVING_LOAD(OUT) DECODE_(serving_load, OUT)
#define DECODE_DESCRIPTOR(OUT) DECODE_(descriptor, OUT)

CHECK_MESSAGE(info, kvrelay_relay_info, DECODE_INFO, kvrelay_pb_encode_info, (void)0)
CHECK_MESSAGE(catalog, kvrelay_catalog_update, DECODE_CATALOG, kvrelay_pb_encode_catalog, (void)0)
CHECK_MESSAGE(filter, kvrelay_filter_update, DECODE_FILTER, kvrelay_pb_encode_filter,
              check_splice(&m, once, (size_t)size))
CHECK_MESSAGE(readiness, kvrelay_readiness_update, DECODE_READINESS, kvrelay_pb_encode_readiness,
              (void)0)
CHECK_MESSAGE(load, kvrelay_load_update, DECODE_LOAD, kvrelay_pb_encode_load, (void)0)
CHECK_MESSAGE(descriptor, kvrelay_descriptor, DECODE_DESCRIPTOR, kvrelay_pb_encode_descriptor,
              (void)0)

CHECK_MESSAGE(serving_load, kvrelay_pb_serving_load, DECODE_SERVING_LOAD,
              kvrelay_pb_encode_serving_load, (void)0)

static int32_t method;
#define DECODE_REQUEST(OUT) ((void)arena, kvrelay_pb_decode_request(method, bytes, len, (OUT)))
CHECK_MESSAGE(request, kvrelay_request, DECODE_REQUEST, kvrelay_pb_encode_request, (void)0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t data_len) {
  static void (*const messages[])(const uint8_t *, size_t) = {
      check_info, check_catalog,    check_filter,      check_readiness,
      check_load, check_descriptor, check_serving_load};
  enum { MESSAGES = sizeof messages / sizeof *messages };
  fuzz_input in = {data, data_len};
  const uint8_t pick = fuzz_byte(&in) % 16;
  size_t len;
  uint8_t *bytes = fuzz_take(&in, in.left, &len);
  method = pick - MESSAGES;
  if (pick < MESSAGES)
    messages[pick](bytes, len);
  else
    check_request(bytes, len);
  free(bytes);
  return 0;
}
