#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Conformance: `kvrelay conform` against our daemon and against a relay that breaks one rule at a time; how a daemon stops."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
from support.messages import BUCKETS, MARKER, RELAY, catalog, chunk, delta, heartbeat, pool, producer, update  # noqa: E402
from support.reading import trace_path  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402

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


REQUESTS = {
    "GetRelayInfo": pb.RelayInfoRequest,
    "WatchKvPoolCatalog": pb.WatchKvPoolCatalogRequest,
    "SubscribeKvPool": pb.SubscribeKvPoolRequest,
    "SubscribeServingReadiness": pb.SubscribeServingReadinessRequest,
    "SubscribeKvPoolLoad": pb.SubscribeKvPoolLoadRequest,
}


MANY = 5000
GREATEST = 2**64 - 1
NO_TEXT = b"a\xff" + "€".encode() * 60  # cut in the middle wherever the room ends


class FalseRelay(grpc.GenericRpcHandler):
    """A small relay that keeps the contract, but for what `broken` names."""

    def __init__(self, broken="", pools=None, without=()):
        self.broken, self.without = broken, without
        self.pools = [pool()] if pools is None else pools
        self.subscriptions = 0
        self.open_pools = {}  # by peer
        self.catalogs = {}  # likewise
        self.lock = threading.Lock()
        self.server = grpc.server(futures.ThreadPoolExecutor(64))
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details):
        method = details.method.rsplit("/", 1)[1]
        if not details.method.startswith(SERVICE) or method not in REQUESTS or method in self.without:
            if self.broken == "another status for an unknown method":
                return grpc.unary_unary_rpc_method_handler(lambda _, context: context.abort(grpc.StatusCode.NOT_FOUND, "what is that?"))
            if self.broken == "a refusal that is no text":
                return grpc.unary_unary_rpc_method_handler(lambda _, context: self.refuse(context, grpc.StatusCode.NOT_FOUND))
            return None
        return grpc.unary_stream_rpc_method_handler(lambda request, context: self.serve(method, request, context))

    def refuse(self, context, code, reason=None):
        if reason:
            context.set_trailing_metadata((("kv-relay-error-reason", "RELAY_ERROR_REASON_" + reason),))
        context.abort(code, NO_TEXT if self.broken == "a refusal that is no text" else "refused")

    def admit(self, method, request, context):
        """The checks of the contract, in its order."""
        code = grpc.StatusCode
        try:
            if b"a\xff" in request:
                raise DecodeError("not UTF-8")  # the library would say so on stderr
            q = REQUESTS[method].FromString(request)
        except DecodeError:
            self.refuse(context, code.INVALID_ARGUMENT if self.broken == "another status for what does not decode" else code.INTERNAL)
        if self.broken == "unknown fields are refused" and b"\xa0\x06" in request:
            self.refuse(context, code.INVALID_ARGUMENT, "INVALID_REQUEST")
        if q.contract_marker != MARKER and not (self.broken == "the marker is ignored" and method == "WatchKvPoolCatalog"):
            self.refuse(context, code.FAILED_PRECONDITION, "CONTRACT_MISMATCH")
        if method == "GetRelayInfo":
            return q
        longest = 1000 if self.broken == "long ids are taken" else 128
        if not 1 <= len(q.subscriber_id.encode()) <= longest or re.search(r"[\x00-\x1f]", q.subscriber_id):
            self.refuse(context, code.INVALID_ARGUMENT, "INVALID_REQUEST")
        if method == "SubscribeKvPool":
            self.admit_pool(q, context)
        return q

    def admit_pool(self, q, context):
        code, wanted, good = grpc.StatusCode, q.expected_producer, self.pools[0].producer
        if not q.HasField("expected_producer") or not wanted.layout_generation:
            self.refuse(context, code.INVALID_ARGUMENT, None if self.broken == "a refusal without reason" else "INVALID_REQUEST")
        if wanted.pool_id.identity_version != 1:
            self.refuse(context, code.FAILED_PRECONDITION, "UNSUPPORTED_FEATURE")
        if wanted.pool_id != good.pool_id:
            self.refuse(context, code.NOT_FOUND, "POOL_NOT_FOUND")
        if wanted != good and self.broken != "any producer of the pool will do":
            self.refuse(context, code.FAILED_PRECONDITION, "PRODUCER_CHANGED")

    def serve(self, method, request, context):
        q = self.admit(method, request, context)
        yield from getattr(self, method)(q, context)
        while method != "GetRelayInfo" and context.is_active():
            time.sleep(0.01)

    def GetRelayInfo(self, _, context):
        if self.broken == "no second call beside a filter stream" and self.open_pools.get(context.peer()):
            self.refuse(context, grpc.StatusCode.UNAVAILABLE)
        info = pb.RelayInfo(protocol_version=1, relay=RELAY, contract_marker=MARKER).SerializeToString()
        yield info
        if self.broken == "two answers":
            yield info

    def WatchKvPoolCatalog(self, _, context):
        with self.lock:
            self.catalogs[context.peer()] = self.catalogs.get(context.peer(), 0) + 1
        first = self.catalogs[context.peer()] == 1
        pools = [] if first and self.broken == "the first catalog of a connection is empty" else self.pools
        update = catalog(*pools, revision=GREATEST if self.broken == "the greatest numbers" else 1)
        yield update.replace(b"zz", b"z\xff").replace(b"yy", b"y\xff") if self.broken == "names that are no text" else update

    def SubscribeServingReadiness(self, *_):
        link = producer(scope=b"x" * 16 if self.broken == "a link to nowhere" else b"s" * 16).pool_id
        member = pb.TopologyMember(endpoint=self.pools[0].serving_endpoint, roles=[4], pool_id=link)
        members = [] if self.broken == "an entry without members" else [member]
        entry = pb.TopologyEntry(namespace="a", canonical_model_id="m", state=2, present_roles=[4], members=members)
        entries = [entry] * (2 if self.broken == "an entry twice" else 1)
        if self.broken == "the last of many entries twice":
            many = [pb.TopologyEntry() for _ in range(MANY)]
            for i, one in enumerate(many):
                one.CopyFrom(entry)
                one.canonical_model_id = f"m{min(i, MANY - 2):05}"
            entries += many
        yield pb.ServingReadinessUpdate(protocol_version=1, relay=RELAY, revision=1, entries=entries, contract_marker=MARKER).SerializeToString()

    def SubscribeKvPoolLoad(self, _, context):
        pools = [p.producer for p in self.pools]
        if self.broken == "the last of many pools twice":
            pools = [producer(scope=min(i, MANY - 2).to_bytes(16, "big")) for i in range(MANY)]
        used = GREATEST if self.broken == "the greatest numbers" else 0
        loads = [pb.KvPoolLoadEntry(producer=p, kv_used_blocks=used, total_kv_blocks=used, kv_expected_ranks=1, kv_observed_ranks=2 if self.broken == "more ranks than there are" else 1) for p in pools]
        window = 0
        while context.is_active():
            window += 0 if self.broken == "a window again and again" else 1
            yield pb.KvPoolLoadUpdate(
                protocol_version=1, relay=RELAY, window_sequence=window, observed_ms=1, window_ms=50, pools=loads, contract_marker=MARKER
            ).SerializeToString()
            time.sleep(0.05)

    def SubscribeKvPool(self, _, context):
        with self.lock:
            self.subscriptions += 1
            number = self.subscriptions
            self.open_pools[context.peer()] = self.open_pools.get(context.peer(), 0) + 1
        if self.broken == "places are never given back" and self.open_pools[context.peer()] > 2:
            self.refuse(context, grpc.StatusCode.INTERNAL, "INTERNAL")
        if self.broken == "the greatest numbers":
            yield update(3, GREATEST, 2**63, b"", sent_us=GREATEST, of=self.pools[0].producer)
        words = bytes([number % 256] * 8) + bytes(8 * BUCKETS - 8) if self.broken == "a filter for everybody" else bytes(8 * BUCKETS)
        first, second = chunk(0, words=words), chunk(1, words=words)
        yield second if self.broken == "the second chunk first" else first
        if self.broken == "a heartbeat between the chunks":
            yield heartbeat(5)
        yield first if self.broken == "the second chunk first" else second
        if self.broken == "a silent stream":
            return
        yield delta(7, 3, 1) if self.broken == "a gap" else delta(5, 3, 1)
        if self.broken == "silence behind a delta":
            return
        yield heartbeat(5 if self.broken == "a heartbeat of yesterday" else 6)


# What is broken, and the scenarios that have to notice.
BREAKS = {
    "two answers": {"T1"},
    "the second chunk first": {"T2", "H1", "H8", "H14"},
    "a heartbeat between the chunks": {"T2", "H1", "H8", "H14"},
    "a refusal without reason": {"T5"},
    "any producer of the pool will do": {"T5"},
    "long ids are taken": {"T7"},
    "the marker is ignored": {"W2"},
    "an entry without members": {"W8"},
    "an entry twice": {"W8"},
    "the last of many entries twice": {"W8"},
    "unknown fields are refused": {"W10"},
    "more ranks than there are": {"W12"},
    "the last of many pools twice": {"W12"},
    "a window again and again": {"W12"},
    "another status for an unknown method": {"W13"},
    "a gap": {"H1"},
    "a heartbeat of yesterday": {"H1"},
    "a filter for everybody": {"H8"},
    "places are never given back": {"H14"},
    "a link to nowhere": {"I8"},
    "no second call beside a filter stream": {"X7"},
    "another status for what does not decode": {"X9"},
    "a refusal that is no text": {"W13"},
}


def judged(relay, *arguments, timeout_s=3):
    """Exit code, what stands behind each id, why, and what was said beside it."""
    code, out, err = kvrelay("conform", relay.address, "--json", "--timeout", str(timeout_s), *arguments)
    lines = [json.loads(line) for line in out.splitlines()]
    return code, {line["id"]: line["verdict"] for line in lines}, {line["id"]: line.get("why", "") for line in lines}, err


def broken_relays():
    for name, noticed in {"": set(), **BREAKS}.items():
        relay = FalseRelay(name)
        code, verdicts, why, err = judged(relay)
        relay.server.stop(None)
        failed = {one for one, verdict in verdicts.items() if verdict == "failed"}
        skipped = {one for one, verdict in verdicts.items() if verdict == "not applicable"}
        good = code == (1 if noticed else 0) and len(verdicts) == 16 and failed == noticed and all(why[one] for one in failed)
        good = good and skipped == ({"I8"} if name == "an entry without members" else set())
        title = f"a relay that breaks a rule, {name}: told by {' '.join(sorted(noticed))}" if name else "a relay that keeps the contract passes"
        check(title, good, (code, verdicts, why, err))


def missing_heartbeats():
    cases = [("a silent stream", "not applicable", "snapshot"), ("silence behind a delta", "passed", "delta")]
    relays = [FalseRelay(name) for name, _, _ in cases]
    with futures.ThreadPoolExecutor(len(relays)) as together:  # each takes its whole time
        short = list(together.map(judged, relays))
        long = list(together.map(lambda relay: judged(relay, timeout_s=15), relays))
    for relay, (name, early, last), one, other in zip(relays, cases, short, long):
        relay.server.stop(None)
        code, verdicts, _, _ = one
        check(f"{name}, no longer than until a heartbeat is due: no failure", code == 0 and verdicts["H1"] == early, one)
        code, verdicts, why, _ = other
        failed = {one for one, verdict in verdicts.items() if verdict == "failed"}
        check(f"{name}, longer than that: H1 tells", code == 1 and failed == {"H1"} and f"{last} came nothing" in why["H1"], other)


def bad_catalogs():
    first, second = pool(), pool(endpoint="d")
    second.producer.pool_id.indexer_domain.routing_scope.digest = b"a" * 16  # belongs before the other
    for name, pools in {"in the wrong order": [first, second], "with a block size of 0": [first, pool(block_size=0)]}.items():
        relay = FalseRelay(pools=pools)
        code, verdicts, why, err = judged(relay)
        relay.server.stop(None)
        check(f"a catalog {name}: I3 tells", code == 1 and verdicts["I3"] == "failed", (code, verdicts, why, err))


def two_catalogs():
    relay = FalseRelay("the first catalog of a connection is empty")
    code, verdicts, why, err = judged(relay)
    relay.server.stop(None)
    check("another catalog of the same revision: I3 tells", code == 1 and verdicts["I3"] == "failed" and "differ" in why["I3"], (code, verdicts, why, err))


def greatest_numbers():
    first = pool()
    first.producer.layout_generation = first.producer.producer_incarnation = GREATEST
    relay = FalseRelay("the greatest numbers", pools=[first])
    code, out, err = kvrelay("catalog", relay.address, "--json")
    shown = json.loads(out)
    good = shown["revision"] == str(GREATEST) and shown["pools"][0]["layout_generation"] == str(GREATEST)
    check("catalog --json shows numbers of 64 bits as they are", good and shown["pools"][0]["producer_incarnation"] == hex(GREATEST), (code, out, err))
    code, out, err = kvrelay("watch", relay.address, "--json", "--count", "1")
    shown = json.loads(out)
    good = [shown[key] for key in ("base_sequence", "sequence", "send_ts_us")] == [str(GREATEST), str(2**63), str(GREATEST)]
    age_us = int(time.time() * 1e6) - GREATEST
    check("watch --json as well, and a frame from the far future is not old", good and abs(int(shown["age_us"]) - age_us) < 60e6, (code, out, err))
    code, out, err = kvrelay("query", relay.address, "--json", "--timeout", "1", "--model", "m", "--token-ids", "1-4")
    answer = json.loads(out)["answers"][0]
    good = code == 2 and answer["kv_used_blocks"] == answer["total_kv_blocks"] == str(GREATEST)
    check("query --json as well", good, (code, out, err))
    relay.server.stop(None)


def texts():
    relay = FalseRelay("names that are no text", pools=[pool(endpoint="zz", aliases=["yy"])])
    code, out, err = kvrelay("conform", relay.address, "--json", "--timeout", "3", "--pool", "a/b/z\ufffd")
    why = {line["id"]: line.get("why", "") for line in map(json.loads, out.splitlines())}
    check("conform --json: no line is lost to a name that is no text", len(why) == 16 and "a/b/z\ufffd" in why["T2"], (code, out, err))
    code, out, err = kvrelay("catalog", relay.address, "--json", "--timeout", "3")
    shown = json.loads(out)["pools"][0] if out else {}
    good = shown.get("endpoint") == "a/b/z\ufffd" and shown["models"][0]["aliases"] == ["y\ufffd"]
    check("catalog --json: likewise", good, (code, out, err))
    with open("/dev/full", "w") as full:
        done = subprocess.run([os.path.join(BIN, "kvrelay"), "info", relay.address, "--json"], stdout=full, stderr=subprocess.PIPE, check=False)
    check("a line that cannot be written is told", done.returncode == 71 and b"cannot be" in done.stderr, done)
    relay.server.stop(None)


def little_to_judge():
    relay = FalseRelay(pools=[], without=("SubscribeServingReadiness", "SubscribeKvPoolLoad"))
    code, verdicts, why, err = judged(relay)
    relay.server.stop(None)
    skipped = {one for one, verdict in verdicts.items() if verdict == "not applicable"}
    check("no pool, no readiness, no load: not applicable", code == 0 and skipped == {"T2", "T5", "W8", "W12", "H1", "H8", "H14", "I8"}, (code, verdicts, why, err))
    relay = FalseRelay()
    code, out, err = kvrelay("conform", relay.address, "--pool", "no/such/pool")
    relay.server.stop(None)
    check("a pool that is not there is 1 with what is", (code, out) == (1, "") and err == "kvrelay: no pool 'no/such/pool'; the catalog has: a/b/c\n", (code, out, err))
    code, out, err = kvrelay("conform", "127.0.0.1:1", "--timeout", "2")
    check("nobody there is 69", code == 69 and not out, (code, out, err))


def our_relay():
    with Daemon(pool_yaml(EVENTS)) as daemon:
        code, out, err = kvrelay("conform", daemon.address)
        check("our relay passes every scenario", code == 0 and out.endswith("16 passed, 0 failed, 0 not applicable\n"), (code, out, err))


def our_relay_over_raw_frames():
    with Daemon(pool_yaml(EVENTS).replace("  bind: ", "  raw_bind: ")) as daemon:
        target = f"raw://{daemon.address}"
        check("B: relay.raw_bind alone is a listener", "transport=raw" in "".join(daemon.lines) and "no_listener" not in "".join(daemon.lines), daemon.lines)
        code, out, err = kvrelay("conform", target)
        check("B: our relay passes every scenario over raw frames", code == 0 and out.endswith("16 passed, 0 failed, 0 not applicable\n"), (code, out, err))
        for command in (["info"], ["catalog"], ["watch", "--count", "1"]):
            code, out, err = kvrelay(command[0], target, *command[1:], "--json")
            check(f"B: {command[0]} over raw frames", code == 0 and isinstance(json.loads(out), dict), (code, out, err))
        code, out, err = kvrelay("query", target, "--model", "llama", "--token-ids", "1-320")
        check("B: query over raw frames", code in (0, 1) and "llama" in out + err, (code, out, err))
        host, port = daemon.address.split(":")
        idle = socket.create_connection((host, int(port)))
        watching = subprocess.Popen([os.path.join(BIN, "kvrelay"), "watch", target, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        watching.stdout.readline()
        began = time.monotonic()
        code = daemon.stop()
        took = time.monotonic() - began
        watching.kill()
        watching.communicate()
        errors = [line for line in daemon.lines if re.search(r"level=(error|warn)", line)]
        check("streams and an idle connection do not hold up the stop", code == 0 and took < 5 and not errors, (code, took, errors))
        idle.close()
    with Daemon(pool_yaml(EVENTS), "--raw-bind", "127.0.0.1:00") as daemon:  # not the text of relay.bind: a port of its own
        raw = daemon.wait_for(r"transport=raw address=(\S+)").group(1)
        check("B: gRPC and raw frames beside each other", [kvrelay("info", one)[0] for one in (daemon.address, f"raw://{raw}")] == [0, 0])
        code, _, err = kvrelay("info", f"raw://{daemon.address}", "--timeout", "3")
        check("B: raw frames on a gRPC port: 69, and what it is", code == 69 and "raw transport" in err, (code, err))
        check("B: gRPC on a port of raw frames: 69", kvrelay("info", raw, "--timeout", "3")[0] == 69)


def main():
    stops()
    our_relay()
    our_relay_over_raw_frames()
    broken_relays()
    missing_heartbeats()
    bad_catalogs()
    two_catalogs()
    greatest_numbers()
    texts()
    little_to_judge()
    finish()


if __name__ == "__main__":
    main()
