# SPDX-License-Identifier: Apache-2.0
"""Messages of relays that are none: one small pool, its snapshot, its deltas, all of it written by hand."""

import struct

import kvrelay_pb2 as pb
import xxhash

MARKER = 0x4B565231
RELAY = pb.RelayIdentity(drt_instance_id=1, relay_incarnation=2)
BUCKETS = 64


def producer(buckets=BUCKETS, scope=b"s" * 16):
    domain = pb.IndexerDomainId(
        cache_semantics=pb.DigestIdentity(digest=b"d" * 16, source=1), routing_scope=pb.DigestIdentity(digest=scope, source=1)
    )
    return pb.ProducerIdentity(
        pool_id=pb.KvPoolId(identity_version=1, indexer_domain=domain, dc_id=7),
        producer_incarnation=5,
        layout_generation=1,
        ckf_format=pb.CkfFormat(format_version=1, seed=42, bucket_count=buckets, fingerprint_bits=16, slots_per_bucket=4),
    )


def pool(endpoint="c", hash_format=1, block_size=4, aliases=(), buckets=BUCKETS, scope=b"s" * 16):
    target = pb.ModelTarget(base=pb.BaseModelTarget(base_model="m"))
    return pb.KvPoolDescriptor(
        producer=producer(buckets, scope),
        serving_endpoint=pb.DynamoEndpointId(namespace="a", component="b", endpoint=endpoint),
        registrations=[pb.ModelRegistration(canonical_model_id="m", target=target, aliases=aliases)],
        query_semantics=pb.KvQuerySemantics(kv_block_size=block_size, hash_format=hash_format),
        pool_roles=[4],
    )


def catalog(*pools, marker=MARKER, revision=1):
    snapshot = pb.KvPoolCatalogSnapshot(pools=pools)
    update = pb.KvPoolCatalogUpdate(protocol_version=1, relay=RELAY, revision=revision, snapshot=snapshot, contract_marker=marker)
    return update.SerializeToString()


def frame(kind, epoch, body, damage=0):
    checksum = (xxhash.xxh3_64_intdigest(body, 0) + damage) & 0xFFFFFFFF
    return struct.pack("<4sHHBBHQQQQI", b"CBI1", 1, kind, 16, 4, 1, 42, BUCKETS, 7, epoch, checksum) + body


def update(kind, base, sequence, payload, sent_us=5, of=None, relay=RELAY):
    return pb.FilterUpdate(
        protocol_version=1,
        relay=relay,
        producer=of or producer(),
        base_sequence=base,
        sequence=sequence,
        send_ts_us=sent_us,
        kind=kind,
        payload=payload,
        contract_marker=MARKER,
    ).SerializeToString()


def chunk(index, damage=0, count=2, words=bytes(8 * BUCKETS), **more):
    half = 8 * BUCKETS // 2
    body = struct.pack("<IIQ", index, count, index * BUCKETS // 2) + words[index * half : (index + 1) * half]
    return update(1, 5, 5, frame(1, 5, body, damage), **more)


def delta(base, bucket, word):
    """One image, as the contract numbers it: base to base + 1."""
    return update(2, base, base + 1, frame(2, base + 1, struct.pack("<QIIQ", base, 1, bucket, word)))


def heartbeat(sequence):
    return update(3, sequence, sequence, b"")
