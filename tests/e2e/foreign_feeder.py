#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A foreign program feeds us: pyzmq publishes events while two grpcio consumers watch; both replicas must follow."""

import json
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
from support.engine import CLEARED, Engine, ReplayEngine, removed, stored  # noqa: E402
from support.reading import Replica, prompt, recording, sequence_hashes, trace_frames  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402

MARKER = 0x4B565231
SERVICE = "/dynamo.kvrelay.v1.KvEventRelay/"
BLOCK = 16


class Watcher:
    """A consumer in a thread of its own: a replica that follows, and the arrival time of each sequence."""

    def __init__(self, address, name):
        self.channel = grpc.insecure_channel(address)
        call = self.channel.unary_stream(SERVICE + "WatchKvPoolCatalog", lambda m: m.SerializeToString(), pb.KvPoolCatalogUpdate.FromString)
        catalog = call(pb.WatchKvPoolCatalogRequest(subscriber_id=name, contract_marker=MARKER), timeout=20)
        producer = next(catalog).snapshot.pools[0].producer
        catalog.cancel()
        call = self.channel.unary_stream(SERVICE + "SubscribeKvPool", lambda m: m.SerializeToString(), pb.FilterUpdate.FromString)
        request = pb.SubscribeKvPoolRequest(subscriber_id=name, expected_producer=producer, contract_marker=MARKER)
        self.call = call(request, timeout=120)
        self.replica = Replica(producer)
        self.changed = threading.Condition()
        self.arrived = {}
        self.error = None
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        try:
            for update in self.call:
                with self.changed:
                    self.replica.absorb(update)
                    self.arrived[self.replica.sequence] = time.monotonic()
                    self.changed.notify_all()
        except (grpc.RpcError, AssertionError) as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def wait(self, good, timeout_s=20):
        """Waits until good(replica) holds."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not (self.replica.live and good(self.replica)):
                left = deadline - time.monotonic()
                if self.error is not None or left <= 0:
                    return False
                self.changed.wait(left)
            return True

    def close(self):
        self.call.cancel()
        self.channel.close()


def depth(replica, tokens):
    return replica.filter().depth(sequence_hashes(tokens, BLOCK))


def follow_events():
    engine = Engine()
    with Daemon(pool_yaml([(7, 0, 1, ["type: engine", f"endpoint: {engine.endpoint}"])], block_size=BLOCK)) as daemon:
        engine.subscribed()
        watchers = [Watcher(daemon.address, "watcher-a"), Watcher(daemon.address, "watcher-b")]
        check("both consumers have a whole snapshot", all(w.wait(lambda r: True) for w in watchers))
        first = list(range(1000, 1000 + 4 * BLOCK))
        engine.send([stored([11, 12, 13, 14], first, BLOCK)])
        check("both see a stored prompt", all(w.wait(lambda r: depth(r, first) == 4) for w in watchers))
        more = list(range(5000, 5000 + 2 * BLOCK))
        engine.send([stored([15, 16], more, BLOCK, parent=14)])
        check("both see its continuation", all(w.wait(lambda r: depth(r, first + more) == 6) for w in watchers))
        check("the continuation alone is no prompt", all(depth(w.replica, more) == 0 for w in watchers))
        engine.send([removed([13])])
        check("both see a removal", all(w.wait(lambda r: depth(r, first + more) == 2) for w in watchers))
        check("both replicas are equal", watchers[0].replica.words == watchers[1].replica.words)
        measure_delay(engine, watchers)
        code, out, err = kvrelay("query", daemon.address, "--model", "chat", "--token-ids", "1000-1063", "--json")
        answer = json.loads(out.splitlines()[0]) if out else {}
        check("our tool agrees", code == 0 and answer["answers"][0]["depth_blocks"] == 2, f"{code} {out} {err}")
        engine.send([CLEARED])
        check("both see a clear", all(w.wait(lambda r: r.filter().occupied() == 0) for w in watchers))
        late = Watcher(daemon.address, "late")
        check("a late consumer starts where the others are", late.wait(lambda r: r.sequence == watchers[0].replica.sequence))
        for watcher in watchers + [late]:
            check("a consumer saw no fault", watcher.error is None, watcher.error)
            watcher.close()
    engine.close()


def measure_delay(engine, watchers):
    """Time from the send call to the delta at each consumer."""
    delays = []
    for i in range(200):
        tokens = list(range(100_000 + i * BLOCK, 100_000 + (i + 1) * BLOCK))
        before = [w.replica.sequence for w in watchers]
        sent = time.monotonic()
        engine.send([stored([10_000 + i], tokens, BLOCK)])
        for watcher, sequence in zip(watchers, before):
            if not watcher.wait(lambda r, s=sequence: r.sequence > s):
                check("every store reaches both consumers", False, f"store {i}: {watcher.error}")
                return
            delays.append(watcher.arrived[sequence + 1] - sent)
    check("every store reaches both consumers", True)
    delays.sort()
    for name, at in (("p50", 0.5), ("p95", 0.95)):
        print(json.dumps({"bench": f"store_to_delta_{name}", "value": round(delays[int(len(delays) * at)] * 1e3, 3), "unit": "ms"}))


def restarted_engine():
    """A new process at the old address has nothing in its cache, also when its numbers look like a mere gap."""
    engine = Engine()
    source = ["type: engine", f"endpoint: {engine.endpoint}", "on_loss: keep"]
    with Daemon(pool_yaml([(7, 0, 1, source)], block_size=BLOCK)) as daemon:
        engine.subscribed()
        watcher = Watcher(daemon.address, "watcher")
        old, new = list(range(1000, 1000 + 2 * BLOCK)), list(range(5000, 5000 + BLOCK))
        engine.send([stored([11, 12], old, BLOCK)])
        check("the first process's blocks are seen", watcher.wait(lambda r: depth(r, old) == 2), watcher.error)
        engine.close()
        engine = Engine(engine.endpoint)
        engine.subscribed()
        engine.sequence = 50
        engine.send([stored([21], new, BLOCK)])
        check("the second process's block is seen", watcher.wait(lambda r: depth(r, new) == 1), watcher.error)
        check("the first process's blocks are gone", watcher.wait(lambda r: depth(r, old) == 0, 5), watcher.error)
        watcher.close()
    engine.close()


def engine_that_stays_away():
    """An engine that cannot be reached for longer than its setting loses its blocks."""
    engine = Engine()
    source = ["type: engine", f"endpoint: {engine.endpoint}", "disconnect_keep_s: 1"]
    with Daemon(pool_yaml([(7, 0, 1, source)], block_size=BLOCK)) as daemon:
        engine.subscribed()
        watcher = Watcher(daemon.address, "watcher")
        tokens = list(range(1000, 1000 + 2 * BLOCK))
        engine.send([stored([11, 12], tokens, BLOCK)])
        check("its blocks are seen while it is there", watcher.wait(lambda r: depth(r, tokens) == 2), watcher.error)
        engine.close()
        check("an engine that stays away loses its blocks", watcher.wait(lambda r: depth(r, tokens) == 0), watcher.error)
        daemon.wait_for("event=source_forgotten")
        watcher.close()


def blocks(n):
    """Tokens of the first n blocks of one long prompt."""
    return list(range(1000, 1000 + n * BLOCK))


def store(n):
    """Block n of that prompt."""
    return [stored([100 + n], blocks(n + 1)[-BLOCK:], BLOCK, parent=99 + n if n else None)]


def lost_batches(topics):
    """Batches that never arrive live are asked for again, whatever happens to the answers, and nothing is cleared."""
    form = "three frames" if topics else "two frames"
    engine = ReplayEngine(topics=topics)
    for n in range(3):
        engine.send(store(n))
    source = ["type: engine", f"endpoint: {engine.endpoint}", f"replay: {engine.replay_endpoint}", "replay_timeout_s: 1"]
    with Daemon(pool_yaml([(7, 0, 1, source)], block_size=BLOCK)) as daemon:
        engine.subscribed()
        watcher = Watcher(daemon.address, "watcher")
        check(f"{form}: batches from before the subscription come by replay", watcher.wait(lambda r: depth(r, blocks(3)) == 3), watcher.error)
        check(f"{form}: asked from the beginning", engine.requests[:1] == [0], engine.requests)
        engine.send(store(3))
        check(f"{form}: then live", watcher.wait(lambda r: depth(r, blocks(4)) == 4), watcher.error)
        asked = len(engine.requests)
        engine.lose(store(4))
        engine.lose(store(5))
        engine.send(store(6))
        check(f"{form}: a gap is closed", watcher.wait(lambda r: depth(r, blocks(7)) == 7), watcher.error)
        check(f"{form}: asked from the first lost batch", engine.requests[asked:] == [4], engine.requests)
        for n in range(7, 27):
            engine.lose(store(n))
        engine.faults = [
            lambda replies: replies[:3] + replies[9:],  # dropped in the middle
            lambda replies: replies[:4],  # no end
            lambda replies: [replies[0], replies[0], replies[2], replies[1]] + replies[3:],  # twice, and out of order
        ]
        asked = len(engine.requests)
        engine.send(store(27))
        check(f"{form}: holes, a missing end and disorder are asked again", watcher.wait(lambda r: depth(r, blocks(28)) == 28), watcher.error)
        check(f"{form}: each time from where it stood", engine.requests[asked:] == [7, 10, 14, 15], engine.requests)
        engine.send(store(28))
        check(f"{form}: live again", watcher.wait(lambda r: depth(r, blocks(29)) == 29), watcher.error)
        check(f"{form}: nothing was lost", not any("reason=loss" in line or "reason=restart" in line for line in daemon.lines))
        engine.lose(store(29))
        engine.buffer = []
        engine.send(store(30))
        check(f"{form}: what the engine no longer has is a loss", watcher.wait(lambda r: r.filter().occupied() == 0), watcher.error)
        engine.send([CLEARED] + [event for n in range(3) for event in store(n)])
        check(f"{form}: and a clear makes it whole", watcher.wait(lambda r: depth(r, blocks(3)) == 3), watcher.error)
        watcher.close()
    engine.close()


def long_replay():
    """A ROUTER drops what does not fit its high-water mark: a long buffer comes in pieces if the reader is slow, and whole."""
    engine = ReplayEngine(high_water=100)
    for n in range(2_000):  # one block at a time: it goes with the next batch
        engine.send(([removed([n - 1])] if n else []) + [stored([n], [n] * BLOCK, BLOCK)])
    source = ["type: engine", f"endpoint: {engine.endpoint}", f"replay: {engine.replay_endpoint}", "replay_timeout_s: 1"]
    with Daemon(pool_yaml([(7, 0, 1, source)], block_size=BLOCK)) as daemon:
        watcher = Watcher(daemon.address, "watcher")
        check("a long buffer comes whole", watcher.wait(lambda r: depth(r, [1_999] * BLOCK) == 1, 60), watcher.error)
        check("and nothing but its end is held", watcher.wait(lambda r: r.filter().occupied() == 1), watcher.replica.filter().occupied())
        check("nothing of it was lost", not any(reason in line for line in daemon.lines for reason in ("=loss", "=restart", "=orphan", "=unknown_removal", "=token_surplus")), daemon.lines[-5:])
        watcher.close()
    engine.close()


def recovered_by_overlap():
    """After a broken connection the batch applied last tells whether the process is the same; its blocks stay if so."""
    engine = ReplayEngine()
    source = ["type: engine", f"endpoint: {engine.endpoint}", f"replay: {engine.replay_endpoint}", "on_loss: keep"]
    with Daemon(pool_yaml([(7, 0, 1, source)], block_size=BLOCK)) as daemon:
        engine.subscribed()
        watcher = Watcher(daemon.address, "watcher")
        for n in range(4):
            engine.send(store(n))
        check("blocks before the break", watcher.wait(lambda r: depth(r, blocks(4)) == 4), watcher.error)
        engine.socket.unbind(engine.endpoint)
        engine.socket.close()
        daemon.wait_for("event=source_disconnected")
        again = Engine(engine.endpoint)
        engine.socket, again.socket = again.socket, engine.socket
        engine.subscribed()
        check("a reconnect asks for the batch applied last", wait_until(lambda: 3 in engine.requests), engine.requests)
        engine.send(store(4))
        check("the same process goes on", watcher.wait(lambda r: depth(r, blocks(5)) == 5), watcher.error)
        check("without a restart", not any("reason=restart" in line for line in daemon.lines))
        endpoint, replay_endpoint = engine.endpoint, engine.replay_endpoint
        engine.close()
        again.context.destroy(0)
        engine = ReplayEngine(endpoint, replay_endpoint)
        for n in range(40, 50):
            engine.send([stored([n], list(range(n * BLOCK, (n + 1) * BLOCK)), BLOCK)])
        engine.subscribed()
        check("another process's blocks come by replay", watcher.wait(lambda r: r.filter().occupied() == 10), watcher.error)
        check("and the former's are gone", depth(watcher.replica, blocks(5)) == 0)
        daemon.wait_for("reason=restart")
        watcher.close()
    engine.close()


def wait_until(good, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not good() and time.monotonic() < deadline:
        time.sleep(0.01)
    return good()


def replay_recording(name):
    """A recorded stream over a real socket ends in the expected state."""
    data = recording(name)
    block_size, live = data["block_size"], [int(k) for k in data["expected"]["ranks"]["0"]["live"]]
    engine = Engine()
    with Daemon(pool_yaml([(7, 0, 1, ["type: engine", f"endpoint: {engine.endpoint}"])], block_size=block_size, adapters=("adapter-a", "adapter-b"))) as daemon:
        engine.subscribed()
        watcher = Watcher(daemon.address, "watcher")
        check(f"{name}: subscribed before the first event", watcher.wait(lambda r: True))
        for frames in trace_frames(name):
            engine.send_frames(frames)

        def arrived(replica):
            filter_ = replica.filter()
            return filter_.occupied() == len(live) and all(key in filter_ for key in live)

        check(f"{name}: over ZeroMQ the live blocks are the expected ones ({len(live)})", watcher.wait(arrived), watcher.error)
        wrong = []
        for query in data["expected"]["queries"]:
            if query["format"] == "DYNAMO_STANDARD_V1":
                keys = sequence_hashes(prompt(data["operations"][query["op"]]), block_size, 1, query["lora"], query["namespace"])
                if watcher.replica.filter().depth(keys) != query["depth"]["0"]:
                    wrong.append(query)
        check(f"{name}: over ZeroMQ every query finds its depth", not wrong, wrong)
        watcher.close()
    engine.close()


def main():
    follow_events()
    restarted_engine()
    engine_that_stays_away()
    lost_batches(topics=True)
    lost_batches(topics=False)
    recovered_by_overlap()
    long_replay()
    for name in ("vllm0.32.0_plain", "vllm0.23.0_plain", "vllm0.32.0_evict", "vllm0.32.0_reset", "vllm0.32.0_lora", "vllm0.32.0_salt"):
        replay_recording(name)
    finish()


main()
