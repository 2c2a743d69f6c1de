#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A foreign program follows readiness and load of a running kvrelayd: stock grpcio with protoc's classes, an engine of pyzmq."""

import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, Daemon, check, finish, kvrelay  # noqa: E402
from support.engine import Engine, stored  # noqa: E402

import grpc  # noqa: E402
import json  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402

MARKER = 0x4B565231
SERVICE = "/dynamo.kvrelay.v1.KvEventRelay/"
PREFILL, DECODE, AGGREGATED = 1, 2, 4
UNKNOWN, UNAVAILABLE, READY = 0, 1, 2

YAML = """version: 1
relay: {{dc: dc-a, bind: "127.0.0.1:0", expected_unique_blocks: 1000}}
endpoints:
  - namespace: prod
    component: prefill
    endpoint: generate
    model: llama
    block_size: 4
    adapters: [{{id: llama-sql, runtime_name: sql}}]
    workers:
      - id: 7
        role: prefill
        needs: [[decode], [aggregated]]
        rank_start: 2
        ranks: 2
        total_kv_blocks: 500
        live: yes
        adapters: [llama-sql]
        events: {{type: engine, endpoint: "tcp://127.0.0.1:9", rank_port_step: 0}}
  - namespace: prod
    component: decode
    endpoint: generate
    model: llama
    block_size: 8
    workers:
      - id: 8
        role: decode
        needs: [[prefill]]
        events: {{type: engine, endpoint: "{endpoint}"}}
  - namespace: prod
    component: other
    endpoint: generate
    model: mistral
    workers:
      - id: 9
        live: no
"""


def stream(channel, method, request, reply, timeout=60):
    call = channel.unary_stream(SERVICE + method, request_serializer=lambda m: m.SerializeToString(), response_deserializer=reply.FromString)
    return call(request, timeout=timeout)


def entries(update):
    return {entry.canonical_model_id: entry for entry in update.entries}


def until(call, wanted):
    """The first image that fulfils `wanted`, and how many came."""
    for count, update in enumerate(call, 1):
        if wanted(entries(update)["llama"]):
            return update, count
    raise RuntimeError("the stream ended")


def readiness(channel, engine, daemon):
    request = pb.SubscribeServingReadinessRequest(subscriber_id="judge", contract_marker=MARKER)
    call = stream(channel, "SubscribeServingReadiness", request, pb.ServingReadinessUpdate)
    first, _ = until(call, lambda e: e.state == READY)
    llama, mistral = entries(first)["llama"], entries(first)["mistral"]
    check("both roles are there", list(llama.present_roles) == [PREFILL, DECODE] and not llama.missing_roles, llama)
    check("members in order, linked to their pools", [m.endpoint.component for m in llama.members] == ["decode", "prefill"] and all(m.HasField("pool_id") for m in llama.members), llama)
    check("the adapter waits for a decoder of its own", [(a.canonical_model_id, a.state, list(a.missing_roles)) for a in llama.adapters] == [("llama-sql", UNAVAILABLE, [DECODE, AGGREGATED])], llama.adapters)
    check("a dead worker without role", (mistral.state, mistral.legacy_fallback_active, list(mistral.missing_roles)) == (UNAVAILABLE, True, []), mistral)
    check("without events no pool and no link", not mistral.members[0].HasField("pool_id"))
    began = time.monotonic()
    engine.close()
    update, _ = until(call, lambda e: e.state != READY)
    waited = time.monotonic() - began
    llama = entries(update)["llama"]
    check("a lost engine is dead", (llama.state, list(llama.present_roles), list(llama.missing_roles)) == (UNAVAILABLE, [PREFILL], [DECODE, AGGREGATED]), llama)
    check("but not at once", 4.5 < waited < 12, waited)
    daemon.wait_for(r"event=source_unreachable source=prod/decode/generate/8\.0 .* before=connected")
    lost = daemon.wait_for(r"event=source_unreachable source=prod/prefill/generate/7\.2 endpoint=tcp://127\.0\.0\.1:9 since_s=(\d+) before=never_reached")
    check("an engine that was never there is told too", 10 <= int(lost[1]) <= 12, lost[0])
    check("revisions grow", update.revision > first.revision, (first.revision, update.revision))
    call.cancel()


def load(channel):
    request = pb.SubscribeKvPoolLoadRequest(subscriber_id="judge", contract_marker=MARKER)
    call = stream(channel, "SubscribeKvPoolLoad", request, pb.KvPoolLoadUpdate)
    windows = [next(call) for _ in range(3)]
    call.cancel()
    check("windows count up", [w.window_sequence - windows[0].window_sequence for w in windows] == [0, 1, 2], windows)
    spread = [b.observed_ms - a.observed_ms for a, b in zip(windows[1:], windows[2:])]
    check("one window a second", all(900 < ms < 2000 for ms in spread) and windows[0].window_ms == 1000, spread)
    check("the clock is the wall's", abs(windows[-1].observed_ms / 1000 - time.time()) < 5, windows[-1].observed_ms)
    told = sorted((p.kv_used_blocks, p.total_kv_blocks, p.kv_observed_ranks, p.kv_expected_ranks) for p in windows[-1].pools)
    check("ranks and capacity, and that nobody reported", told == [(0, 0, 0, 1), (0, 1000, 0, 2)], told)


def refusals(channel):
    def code(method, request):
        try:
            next(stream(channel, method, request, pb.KvPoolLoadUpdate))
            return "OK", None
        except grpc.RpcError as error:
            return error.code().name, dict(error.trailing_metadata() or ()).get("kv-relay-error-reason")

    bad = code("SubscribeKvPoolLoad", pb.SubscribeKvPoolLoadRequest(subscriber_id="", contract_marker=MARKER))
    check("load without subscriber", bad == ("INVALID_ARGUMENT", "RELAY_ERROR_REASON_INVALID_REQUEST"), bad)
    bad = code("SubscribeServingReadiness", pb.SubscribeServingReadinessRequest(subscriber_id="a"))
    check("readiness without marker", bad == ("FAILED_PRECONDITION", "RELAY_ERROR_REASON_CONTRACT_MISMATCH"), bad)
    later = code("SubscribeServingLoad", pb.SubscribeKvPoolLoadRequest(subscriber_id="a", contract_marker=MARKER))
    check("serving load is not offered", later == ("UNIMPLEMENTED", None), later)


def all_at_once(channel, limit=64):
    """Every stream of every plane up to its limit on one connection; the next one of each is refused."""
    planes = (
        ("WatchKvPoolCatalog", pb.WatchKvPoolCatalogRequest, pb.KvPoolCatalogUpdate),
        ("SubscribeServingReadiness", pb.SubscribeServingReadinessRequest, pb.ServingReadinessUpdate),
        ("SubscribeKvPoolLoad", pb.SubscribeKvPoolLoadRequest, pb.KvPoolLoadUpdate),
    )

    def opened(method, kind, reply, **more):
        return stream(channel, method, kind(subscriber_id="crowd", contract_marker=MARKER, **more), reply)

    first = opened(*planes[0])
    producer = next(first).snapshot.pools[0].producer
    first.cancel()
    planes = [(method, kind, reply, {}) for method, kind, reply in planes]
    planes.append(("SubscribeKvPool", pb.SubscribeKvPoolRequest, pb.FilterUpdate, {"expected_producer": producer}))
    time.sleep(0.5)  # until the cancelled one has given its place back
    calls = [opened(method, kind, reply, **more) for _ in range(limit) for method, kind, reply, more in planes]
    answered = sum(1 for call in calls if next(call) is not None)
    check(f"X7: {len(calls)} streams on one connection", answered == 4 * limit, answered)
    for method, kind, reply, more in planes:
        try:
            next(opened(method, kind, reply, **more))
            got = "OK", None
        except grpc.RpcError as error:
            got = error.code().name, dict(error.trailing_metadata() or ()).get("kv-relay-error-reason")
        check(f"X7: one more of {method} is refused", got == ("RESOURCE_EXHAUSTED", "RELAY_ERROR_REASON_RESOURCE_LIMIT"), got)
    for call in calls:
        call.cancel()
    time.sleep(0.5)
    for method, kind, reply, more in planes:
        call = opened(method, kind, reply, **more)
        check(f"a place of {method} is free again", next(call) is not None)
        call.cancel()


def asked(address):
    """Our own tool beside it: what is not known has no number."""
    code, out, err = kvrelay("query", address, "--model", "llama", "--token-ids", ",".join(map(str, range(8))), "--json")
    answers = {a["endpoint"]: a for a in json.loads(out)["answers"]} if out else {}
    decode = answers.get("prod/decode/generate", {})
    check("the query finds the block", code == 0 and decode.get("depth_blocks") == 1, (code, out, err))
    check("with readiness and without load", decode.get("readiness") == "ready" and "kv_used_blocks" in decode and decode["kv_used_blocks"] is None, decode)


CONFLICTS = """version: 1
relay: {dc: dc-a}
endpoints:
  - {namespace: a, component: one, endpoint: g, model: x, aliases: [chat, x, same], block_size: 4, workers: [{id: 1, events: {type: engine, endpoint: "tcp://127.0.0.1:5557"}}]}
  - {namespace: a, component: two, endpoint: g, model: y, aliases: [x, same, fine, fine], block_size: 4, workers: [{id: 1, events: {type: engine, endpoint: "tcp://127.0.0.1:5557"}}]}
  - {namespace: a, component: three, endpoint: g, model: z, block_size: 4, semantics: {a: b}, routing_scope: {c: d}, workers: [{id: 1, events: {type: engine, endpoint: "tcp://127.0.0.1:5557"}}]}
  - {namespace: a, component: four, endpoint: g, model: w, block_size: 4, semantics: {a: b}, routing_scope: {c: d}, workers: [{id: 1, events: {type: engine, endpoint: "tcp://127.0.0.1:5557"}}]}
  - {namespace: a, component: five, endpoint: g, model: v, block_size: 4, workers: [{id: 1}]}
  - {namespace: a, component: six, endpoint: g, model: u, block_size: 4}
"""


def run_check(text):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return subprocess.run([os.path.join(BIN, "kvrelayd"), "--check", file.name], capture_output=True, text=True, check=False)


def conflicts():
    """What two endpoints claim, neither gets; the file is accepted."""
    done = run_check(CONFLICTS)
    check("conflicts are accepted", done.returncode == 0, done.stderr)
    wanted = [
        "a/one/g: the name 'x' has two meanings",
        "a/two/g: the alias 'x' has two meanings",
        "a/two/g: the alias 'same' has two meanings",
        "a/three/g gets no pool: another endpoint has the same pool identity",
        "a/four/g gets no pool: another endpoint has the same pool identity",
    ]
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    check("each is told once", len(warnings) == len(wanted) and all(w in line for w, line in zip(wanted, warnings)), done.stderr)
    pools = [line.split(None, 1)[1] for line in done.stdout.splitlines() if line.startswith("  pool ")]
    check("who gets a pool", [p == "yes" for p in pools] == [False, True, False, False, False, False], pools)
    check("under which names", [line.split(None, 1)[1] for line in done.stdout.splitlines() if line.startswith("  model ")] == ["y, also fine", "z", "w", "v"], done.stdout)


def wrong_files():
    """Each is refused with the key's name."""
    for key, good, bad in (
        ("needs", "[[prefill]]", ("[]", "[[]]", "[prefill]", "[[prefill], [sleeper]]", "[[decode, decode]]", "prefill")),
        ("live", "live: no", ("live: maybe",)),
    ):
        for text in bad:
            done = run_check(YAML.format(endpoint="tcp://127.0.0.1:9").replace(good, text))
            check(f"{key} may not be {text}", done.returncode == 78 and key in done.stderr, (done.returncode, done.stderr))


def main():
    wrong_files()
    conflicts()
    engine = Engine()
    with Daemon(YAML.format(endpoint=engine.endpoint)) as daemon, grpc.insecure_channel(daemon.address) as channel:
        engine.subscribed()
        engine.send([stored([99], list(range(4)), 4)])
        daemon.wait_for("level=warn event=ingest source=prod/decode/generate/8.0 reason=sub_block count=1")
        engine.send([stored([11], list(range(8)), 8)])
        load(channel)
        refusals(channel)
        all_at_once(channel)
        asked(daemon.address)
        readiness(channel, engine, daemon)
    finish()


main()
