#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Conformance scenarios that need a process: what a daemon is told to listen on, and how it stops."""

import os
import re
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
from support.reading import trace_path  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402

MARKER = 0x4B565231
SERVICE = "/dynamo.kvrelay.v1.KvEventRelay/"
EVENTS = [(7, 0, 1, ["type: trace", f"file: {trace_path('vllm0.32.0_plain')}"])]


def open_stream(channel, method, request, reply):
    call = channel.unary_stream(SERVICE + method, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString)
    return call(request)


def free_port(host):
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def stops():
    bind = f"127.0.0.2:{free_port('127.0.0.2')}"
    with Daemon(pool_yaml(EVENTS).replace("127.0.0.1:0", bind)) as daemon, grpc.insecure_channel(bind) as channel:
        check("C2: it listens where it was told to", daemon.address == bind, daemon.address)
        host, port = bind.split(":")
        idle = socket.create_connection((host, int(port)))
        catalog = open_stream(channel, "WatchKvPoolCatalog", pb.WatchKvPoolCatalogRequest(subscriber_id="idle", contract_marker=MARKER), pb.KvPoolCatalogUpdate)
        producer = next(catalog).snapshot.pools[0].producer
        request = pb.SubscribeKvPoolRequest(subscriber_id="idle", expected_producer=producer, contract_marker=MARKER)
        unread = [catalog] + [open_stream(channel, "SubscribeKvPool", request, pb.FilterUpdate) for _ in range(3)]
        for call in unread:
            call.initial_metadata()
        began = time.monotonic()
        code = daemon.stop()
        took = time.monotonic() - began
        check("T3: an idle connection and unread streams do not hold up the stop", code == 0 and took < 5, (code, took))
        check("T3: afterwards nobody answers", kvrelay("info", bind, "--timeout", "1")[0] == 69)
        errors = [line for line in daemon.lines if re.search(r"level=(error|warn)", line)]
        check("T10: a stop on purpose is no error", code == 0 and not errors, errors)
        idle.close()


def main():
    stops()
    finish()


if __name__ == "__main__":
    main()
