# SPDX-License-Identifier: Apache-2.0
"""An independent reading of the hash formats, the filter and CBI1: Python and the xxHash library, nothing of ours."""

import json
import os
import struct

import xxhash

MASK64 = (1 << 64) - 1
FORMATS = {"DYNAMO_STANDARD_V1": 1, "DYNAMO_EAGLE_V1": 2}


def xxh3(data, seed):
    return xxhash.xxh3_64_intdigest(data, seed)


def request_seed(lora=None, namespace=None):
    seed = 1337
    if lora:
        seed += xxh3(lora.encode(), 0)
    if namespace:
        seed += xxh3(namespace.encode(), 1)
    return seed & MASK64


def sequence_hashes(tokens, block_size, hash_format=1, lora=None, namespace=None):
    """Canonical keys of all complete blocks."""
    seed = request_seed(lora, namespace)
    window = block_size + (1 if hash_format == 2 else 0)
    keys, start = [], 0
    while len(tokens) - start >= window:
        local = xxh3(struct.pack(f"<{window}I", *tokens[start : start + window]), seed)
        keys.append(local if not keys else xxh3(struct.pack("<QQ", keys[-1], local), 1337))
        start += block_size
    return keys


class Filter:
    """The words of one pool and the question whether a key is in them."""

    def __init__(self, seed, words):
        self.seed, self.words = seed, words

    def __contains__(self, key):
        buckets = len(self.words)
        mixed = xxh3(struct.pack("<Q", key), self.seed)
        fingerprint = (mixed & 0xFFFF) or 1
        first = (mixed >> 16) & (buckets - 1)
        delta = (xxh3(struct.pack("<H", fingerprint), self.seed ^ 0x9E3779B97F4A7C15) & (buckets - 1)) or 1
        for bucket in (first, first ^ delta):
            word = self.words[bucket]
            if any((word >> shift) & 0xFFFF == fingerprint for shift in (0, 16, 32, 48)):
                return True
        return False

    def depth(self, keys):
        for depth, key in enumerate(keys):
            if key not in self:
                return depth
        return len(keys)

    def occupied(self):
        return sum(1 for word in self.words for shift in (0, 16, 32, 48) if (word >> shift) & 0xFFFF)


class Replica:
    """Assembles snapshot chunks and applies deltas of one stream; any deviation from the contract raises."""

    def __init__(self, producer):
        self.producer = producer
        self.format = producer.ckf_format
        self.words, self.sequence, self.next_chunk = [], None, 0
        self.live = False

    def absorb(self, update):
        assert update.protocol_version == 1 and update.contract_marker == 0x4B565231, "envelope"
        assert update.producer == self.producer, "another producer"
        if update.kind == 3:
            assert self.live and update.sequence == update.base_sequence == self.sequence and not update.payload, "heartbeat"
            return
        body = update.payload[48:]
        magic, wire, flags, bits, slots, version, seed, buckets, dc_id, epoch, checksum = struct.unpack(
            "<4sHHBBHQQQQI", update.payload[:48]
        )
        assert (magic, wire, bits, slots, version) == (b"CBI1", 1, 16, 4, 1), "header"
        assert checksum == xxh3(body, 0) & 0xFFFFFFFF, "checksum"
        assert (seed, buckets, dc_id) == (self.format.seed, self.format.bucket_count, self.producer.pool_id.dc_id), "format"
        assert epoch == update.sequence, "epoch"
        if flags == 1:
            self.chunk(update, body)
        else:
            assert flags == 2 and update.kind == 2, "kind"
            self.delta(update, body)

    def chunk(self, update, body):
        index, count, offset = struct.unpack("<IIQ", body[:16])
        assert update.kind == 1 and not self.live and update.base_sequence == update.sequence, "chunk"
        assert index == self.next_chunk and offset == len(self.words), "chunk order"
        assert self.sequence in (None, update.sequence), "chunks of two snapshots"
        self.sequence = update.sequence
        self.words += struct.unpack(f"<{(len(body) - 16) // 8}Q", body[16:])
        self.next_chunk += 1
        if self.next_chunk == count:
            assert len(self.words) == self.format.bucket_count, "coverage"
            self.live = True

    def delta(self, update, body):
        base, count = struct.unpack("<QI", body[:12])
        assert self.live and base == update.base_sequence == self.sequence, "base"
        assert update.sequence == base + 1 and len(body) == 12 + 12 * count and count > 0, "delta"
        for i in range(count):
            bucket, word = struct.unpack_from("<IQ", body, 12 + 12 * i)
            self.words[bucket] = word
        self.sequence = update.sequence

    def filter(self):
        assert self.live
        return Filter(self.format.seed, self.words)


# ---- recordings of real engines ----

DATA = os.path.join(os.path.dirname(__file__), "..", "..", "data", "engines")


def recording(name):
    with open(os.path.join(DATA, name + ".json"), encoding="utf-8") as file:
        return json.load(file)


def trace_path(name):
    return os.path.abspath(os.path.join(DATA, name + ".trace"))


def trace_frames(name, kind=0):
    """The frames of each recorded message of one kind (0 live, 1 reply of a replay request)."""
    with open(trace_path(name), "rb") as file:
        data = file.read()
    at = 0
    while at < len(data):
        length, _, record_kind, count = struct.unpack_from("<IQBB", data, at)
        end, at = at + 4 + length, at + 14
        frames = []
        for _ in range(count):
            (size,) = struct.unpack_from("<I", data, at)
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        assert at == end
        if record_kind == kind:
            yield frames


def prompt(operation):
    tokens = []
    for item in operation["tokens"]:
        if isinstance(item, dict):
            tokens += range(item["range"][0], item["range"][1] + 1)
        else:
            tokens.append(item)
    return tokens
