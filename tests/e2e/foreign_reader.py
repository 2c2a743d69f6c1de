#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A foreign program reads us: stock grpcio with protoc's classes against a running kvrelayd, default message limits."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import Daemon, check, finish, pool_yaml  # noqa: E402
from support.reading import Replica, prompt, recording, sequence_hashes, trace_path  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402

MARKER = 0x4B565231
SERVICE = "/dynamo.kvrelay.v1.KvEventRelay/"


def unary(channel, method, request, reply):
    call = channel.unary_unary(SERVICE + method, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString)
    return call(request, timeout=10)


def stream(channel, method, request, reply, timeout=20):
    call = channel.unary_stream(SERVICE + method, request_serializer=lambda m: m.SerializeToString(), response_deserializer=reply.FromString)
    return call(request, timeout=timeout)


def refused(call):
    """Status name and reason trailer of a call that has to fail."""
    try:
        next(iter(call)) if hasattr(call, "__next__") else call
        return "OK", None
    except grpc.RpcError as error:
        trailers = {key: value for key, value in error.trailing_metadata() or ()}
        return error.code().name, trailers.get("kv-relay-error-reason")


def catalog(channel):
    request = pb.WatchKvPoolCatalogRequest(subscriber_id="judge", contract_marker=MARKER)
    call = stream(channel, "WatchKvPoolCatalog", request, pb.KvPoolCatalogUpdate)
    update = next(call)
    call.cancel()
    return update


def snapshot(channel, producer):
    request = pb.SubscribeKvPoolRequest(subscriber_id="judge", expected_producer=producer, contract_marker=MARKER)
    call = stream(channel, "SubscribeKvPool", request, pb.FilterUpdate)
    replica = Replica(producer)
    while not replica.live:
        replica.absorb(next(call))
    call.cancel()
    return replica


def read_recording(name, adapters=()):
    data = recording(name)
    (rank,) = data["expected"]["ranks"]
    block_size = data["block_size"]
    events = [(7, int(rank), 1, ["type: trace", f"file: {trace_path(name)}"])]
    with Daemon(pool_yaml(events, block_size=block_size, adapters=adapters)) as daemon, grpc.insecure_channel(daemon.address) as channel:
        info = unary(channel, "GetRelayInfo", pb.RelayInfoRequest(contract_marker=MARKER), pb.RelayInfo)
        check(f"{name}: relay info", info.protocol_version == 1 and info.contract_marker == MARKER and info.relay.relay_incarnation != 0)
        update = catalog(channel)
        (pool,) = update.snapshot.pools
        check(f"{name}: catalog", update.revision >= 1 and update.relay == info.relay and pool.query_semantics.kv_block_size == block_size)
        filter_ = snapshot(channel, pool.producer).filter()
        live = [int(key) for key in data["expected"]["ranks"][rank]["live"]]
        missing = [key for key in live if key not in filter_]
        check(f"{name}: every live block is there ({len(live)})", not missing and filter_.occupied() == len(live), f"missing {missing}, {filter_.occupied()} slots")
        wrong = []
        for query in data["expected"]["queries"]:
            if query["format"] != "DYNAMO_STANDARD_V1":
                continue
            keys = sequence_hashes(prompt(data["operations"][query["op"]]), block_size, 1, query["lora"], query["namespace"])
            if len(keys) != query["complete_blocks"] or filter_.depth(keys) != query["depth"][rank]:
                wrong.append((query, len(keys), filter_.depth(keys)))
        check(f"{name}: every query finds its depth", not wrong, wrong)
        return_codes(name, channel, pool.producer) if name == "vllm0.32.0_plain" else None


def changed(producer, change):
    copy = pb.ProducerIdentity()
    copy.CopyFrom(producer)
    change(copy)
    return copy


def return_codes(name, channel, good):
    def subscribe(producer=good, marker=MARKER, subscriber="judge"):
        request = pb.SubscribeKvPoolRequest(subscriber_id=subscriber, expected_producer=producer, contract_marker=marker)
        return refused(stream(channel, "SubscribeKvPool", request, pb.FilterUpdate))

    def bump(path, by=1):
        def change(producer):
            *parents, last = path.split(".")
            message = producer
            for parent in parents:
                message = getattr(message, parent)
            setattr(message, last, getattr(message, last) + by)

        return changed(good, change)

    reason = "RELAY_ERROR_REASON_"
    cases = [
        ("wrong marker", subscribe(marker=0), ("FAILED_PRECONDITION", reason + "CONTRACT_MISMATCH")),
        ("wrong marker before a bad subscriber", subscribe(marker=1, subscriber=""), ("FAILED_PRECONDITION", reason + "CONTRACT_MISMATCH")),
        ("empty subscriber", subscribe(subscriber=""), ("INVALID_ARGUMENT", reason + "INVALID_REQUEST")),
        ("long subscriber", subscribe(subscriber="x" * 129), ("INVALID_ARGUMENT", reason + "INVALID_REQUEST")),
        ("subscriber with a line feed", subscribe(subscriber="a\nb"), ("INVALID_ARGUMENT", reason + "INVALID_REQUEST")),
        ("no producer", subscribe(producer=None), ("INVALID_ARGUMENT", reason + "INVALID_REQUEST")),
        ("layout generation 0", subscribe(changed(good, lambda p: setattr(p, "layout_generation", 0))), ("INVALID_ARGUMENT", reason + "INVALID_REQUEST")),
        ("identity version", subscribe(bump("pool_id.identity_version")), ("FAILED_PRECONDITION", reason + "UNSUPPORTED_FEATURE")),
        ("unknown pool", subscribe(bump("pool_id.dc_id")), ("NOT_FOUND", reason + "POOL_NOT_FOUND")),
        ("another producer", subscribe(bump("layout_generation")), ("FAILED_PRECONDITION", reason + "PRODUCER_CHANGED")),
        ("another seed", subscribe(bump("ckf_format.seed", -1)), ("FAILED_PRECONDITION", reason + "PRODUCER_CHANGED")),
    ]
    for title, got, wanted in cases:
        check(f"{name}: {title}", got == wanted, f"{got}, wanted {wanted}")
    try:
        unary(channel, "GetRelayInfo", pb.RelayInfoRequest(contract_marker=5), pb.RelayInfo)
        got = ("OK", None)
    except grpc.RpcError as error:
        got = error.code().name, dict(error.trailing_metadata()).get("kv-relay-error-reason")
    check(f"{name}: info with a wrong marker", got == ("FAILED_PRECONDITION", reason + "CONTRACT_MISMATCH"), got)
    got = refused(stream(channel, "SubscribeNothing", pb.RelayInfoRequest(contract_marker=MARKER), pb.RelayInfo))
    check(f"{name}: unknown method", got == ("UNIMPLEMENTED", None), got)
    check(f"{name}: the right producer still works", snapshot(channel, good).live)


def main():
    for name in ("vllm0.32.0_plain", "vllm0.23.0_plain", "vllm0.19.1_plain", "vllm0.32.0_evict", "vllm0.23.0_evict", "vllm0.32.0_reset", "vllm0.19.1_reset", "vllm0.32.0_salt"):
        read_recording(name)
    read_recording("vllm0.32.0_lora", adapters=("adapter-a", "adapter-b"))
    finish()


main()
