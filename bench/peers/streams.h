/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What servers and clients of this folder agree on, whoever's library they use: the path, and the
 * subscriber's id that says what is sent.
 */
#ifndef BENCH_STREAMS_H
#define BENCH_STREAMS_H

#define STREAMS_PATH "/dynamo.kvrelay.v1.KvEventRelay/SubscribeKvPool"

/*
 * "delta N" and "chunk N": N messages, always the same bytes: a delta of 16 images, or half the
 * default filter.  "encoded N": as "chunk", but a C++ server makes each message anew from the
 * classes that protoc generates, as most programs would.  "idle 0": admitted, and nothing comes.
 */
#define STREAMS_DELTA "delta"
#define STREAMS_CHUNK "chunk"
#define STREAMS_ENCODED "encoded"
#define STREAMS_IDLE "idle"

/* Files that hold these bytes, in the folder that every server gets; ours writes them. */
#define STREAMS_DELTA_FILE "delta.bin"
#define STREAMS_CHUNK_FILE "chunk.bin"

#define STREAMS_IMAGES 16
#define STREAMS_BUCKETS 524288 /* of the default filter */
#define STREAMS_CHUNK_BUCKETS 262144
#define STREAMS_CHUNK_BYTES 2097359 /* the whole message */

#endif
