#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The real relay and kvrelayd beside it: the same workers, the same engines, the same answers on every plane."""

import json
import os
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "e2e"))
from support.daemon import Daemon, check, finish, kvrelay  # noqa: E402
from support.engine import CLEARED, removed, stored  # noqa: E402
from support.reading import sequence_hashes  # noqa: E402

from deployment import Deployment, engines  # noqa: E402
from planes import View, differences, place  # noqa: E402

LIMIT_S = 480
SEQUENCES = 98  # of 20 blocks: they fill the filter to more than nine tenths
CHAT = ["Chat", "Completions"]
PROD = dict(endpoint="prod.backend.generate", model="llama", aliases=["chat", "llama-small"], block_size=16, role="aggregated", model_type=CHAT)
PLACES = {"a": "prod/backend/generate", "b": "prod/backend/generate", "e": "pairs/backend/generate"}


# ---- the four planes, line by line ----


def compare(step, plane, real, ours, key, envelope):
    """One line for the order of entries and the envelope, one for each entry."""
    a, b = {key(entry): entry for entry in real}, {key(entry): entry for entry in ours}
    check(f"{step}: {plane}: which, in which order, and the envelope", list(a) == list(b) and not envelope, f"{list(a)}, ours {list(b)} {envelope}")
    for name in sorted({*a, *b}):
        found = differences(a[name], b[name]) if name in a and name in b else ["one relay alone has it"]
        check(f"{step}: {plane}: {name}", not found, "; ".join(found))


def envelope(real, ours, body):
    a, b = type(real)(), type(ours)()
    a.CopyFrom(real)
    b.CopyFrom(ours)
    a.ClearField(body)
    b.ClearField(body)
    return differences(a, b)


def compare_planes(step, real, ours):
    for view in (real, ours):
        view.until(lambda v=view: len(v.newest) == 3)
        view.quiet()
    a, b = real.newest["catalog"], ours.newest["catalog"]
    compare(step, "catalog", a.snapshot.pools, b.snapshot.pools, lambda p: place(p.serving_endpoint), envelope(a, b, "snapshot"))
    a, b = real.newest["readiness"], ours.newest["readiness"]
    compare(step, "readiness", a.entries, b.entries, lambda e: f"{e.namespace}/{e.canonical_model_id}", envelope(a, b, "entries"))
    compare_load(step, real, ours)
    compare_tool(step, real, ours)


def compare_load(step, real, ours):
    a, b = real.next_window(), ours.next_window()
    names = {p.producer.pool_id.SerializeToString(): place(p.serving_endpoint) for view in (real, ours) for p in view.pools()}
    compare(step, "load", a.pools, b.pools, lambda p: names[p.producer.pool_id.SerializeToString()], envelope(a, b, "pools"))


def compare_tool(step, real, ours):
    """What our consumer makes of both catalogs."""
    read = []
    for view in (real, ours):
        code, out, err = kvrelay("catalog", view.address, "--json")
        if not check(f"{step}: our consumer takes the catalog of {view.name}", code == 0 and "\n" in out, (code, err)):
            return
        pools = json.loads(out)["pools"]
        for pool in pools:
            del pool["producer_incarnation"], pool["layout_generation"]
        read.append(pools)
    check(f"{step}: and finds the same in both, all of it usable", read[0] == read[1] and all(p["verdict"] == "ok" for p in read[0]), read)


def compare_words(step, real, ours):
    for name in sorted({*real.replicas, *ours.replicas}):
        a, b = real.replicas[name].words, ours.replicas[name].words
        differ = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
        check(f"{step}: words of {name}, {real.replicas[name].filter().occupied()} of {4 * len(a)} slots in use", a == b and len(a) > 0, f"differ in {len(differ)}: {differ[:8]}, {len(a)} and {len(b)} buckets")


# ---- the engines ----


class Blocks:
    """The prompts of one pool, as engines know them: hashes of their own, parents before children."""

    def __init__(self, model, endpoint, block_size, pairs=False):
        self.model, self.endpoint, self.block_size, self.pairs = model, endpoint, block_size, pairs
        self.asked = []

    def keys(self, prompt, lora=None):
        return sequence_hashes(prompt, self.block_size, 2 if self.pairs else 1, lora=lora)

    def external(self, prompt, lora=None):
        return [key ^ 0xA5A5A5A5A5A5A5A5 for key in self.keys(prompt, lora)]

    def store(self, engine, prompt, first=0, rank=0, lora=None):
        """Blocks from `first` on, behind those before them."""
        hashes = self.external(prompt, lora)
        sent = list(map(list, zip(prompt, prompt[1:]))) if self.pairs else prompt
        parent = hashes[first - 1] if first else None
        more = {"lora_name": lora} if lora else {}
        engine.send([stored(hashes[first:], sent[first * self.block_size :], self.block_size, parent, **more)], rank)

    def remove(self, engine, prompt, first, last, rank=0):
        engine.send([removed(self.external(prompt)[first:last])], rank)

    def ask(self, prompt, depth, adapter=None):
        """What has to come out after this step."""
        self.asked.append((prompt, depth, adapter))

    def arrived(self, view):
        words = view.replicas[self.endpoint].filter()
        return all(words.depth(self.keys(prompt, adapter)) == depth for prompt, depth, adapter in self.asked)


def compare_answers(step, blocks, real, ours):
    """Our consumer asks both, and the script knows."""
    for number, (prompt, depth, adapter) in enumerate(blocks.asked):
        arguments = ["--model", blocks.model, "--token-ids", ",".join(map(str, prompt)), "--json"]
        got = []
        for view in (real, ours):
            code, out, err = kvrelay("query", view.address, *arguments, *(["--adapter", adapter] if adapter else []))
            answers = {a["endpoint"]: a["depth_blocks"] for a in json.loads(out)["answers"]} if out else {}
            got.append(answers.get(blocks.endpoint, (code, err)))
        check(f"{step}: our consumer asks for prompt {number} of {blocks.endpoint}: {depth} blocks", got == [depth, depth], got)
    blocks.asked.clear()


def settle(step, all_blocks, real, ours):
    """What was sent has come to both, and nothing comes any more."""
    for view in (real, ours):
        here = view.until(lambda v=view: all(blocks.arrived(v) for blocks in all_blocks))
        check(f"{step}: it comes to {view.name}", here)
    for view in (real, ours):
        view.quiet()
    compare_words(step, real, ours)
    for blocks in all_blocks:
        compare_answers(step, blocks, real, ours)


# ---- the run ----


def beside(deployment, real, text=None):
    """kvrelayd with what discovery says now."""
    daemon = Daemon(text or deployment.configuration()).__enter__()
    view = View(daemon.address)
    view.name, view.daemon = "kvrelayd", daemon
    real.quiet()
    return view


def leave(view):
    view.close()
    view.daemon.__exit__()
    check("kvrelayd's streams ended for no other reason", not view.errors, view.errors)


def start_workers(deployment):
    """Two ranks and one on one endpoint, an adapter, a pair of prefill and decode, token pairs, and a worker without events."""
    feeds = {"a": engines(2), "b": engines(1), "p": engines(1), "d": engines(1), "e": engines(1)}
    of = {name: [e.endpoint for e in each] for name, each in feeds.items()}
    deployment.add("a", **PROD, ranks=2, total_kv_blocks=500, events=of["a"])
    deployment.add("b", **PROD, ranks=1, total_kv_blocks=400, events=of["b"])
    deployment.workers["a"].do("adapter", name="sql")
    pair = dict(model="pair", block_size=4, total_kv_blocks=300)
    deployment.add("p", endpoint="pd.prefill.generate", role="prefill", model_type=["Prefill"], needs=[["decode"], ["aggregated"]], events=of["p"], **pair)
    deployment.add("d", endpoint="pd.decode.generate", role="decode", model_type=CHAT, needs=[["prefill"]], rank_start=3, events=of["d"], **pair)
    deployment.add("e", endpoint="pairs.backend.generate", model="eagle", block_size=4, role="aggregated", model_type=CHAT, eagle=True, events=of["e"])
    deployment.add("n", endpoint="quiet.encoder.generate", model="vision", block_size=16, role="encode", model_type=["Empty"], needs=[["prefill", "decode"], ["aggregated"]])
    return feeds


def tokens(start, count):
    return list(range(start, start + count))


def events(feeds, real, ours):
    """Ranks have no order among each other, and words tell the order: in a step one rank alone changes the words of a pool."""
    prod, pair, eagle = Blocks("llama", "prod/backend/generate", 16), Blocks("pair", "pd/decode/generate", 4), Blocks("eagle", "pairs/backend/generate", 4, True)
    a0, a1, b0, d0, e0 = feeds["a"][0], feeds["a"][1], feeds["b"][0], feeds["d"][0], feeds["e"][0]
    step = "stored"
    prod.store(a0, tokens(0, 160))
    prod.ask(tokens(0, 160), 10)
    prod.ask(tokens(0, 80) + tokens(9000, 80), 5)
    prod.ask(tokens(9000, 32), 0)
    pair.store(d0, tokens(5, 40), rank=3)
    pair.ask(tokens(5, 40), 10)
    eagle.store(e0, tokens(7, 41))
    eagle.ask(tokens(7, 41), 10)
    eagle.ask(tokens(7, 40), 9)
    settle(step, (prod, pair, eagle), real, ours)

    step = "a branch, an adapter, a second owner"
    branch = tokens(0, 64) + tokens(5000, 64)
    prod.store(a0, branch, first=4)
    prod.ask(branch, 8)
    prod.store(a0, tokens(0, 64), lora="sql")
    prod.ask(tokens(0, 64), 4, adapter="sql")
    prod.store(a1, tokens(0, 160), rank=1)
    prod.store(b0, tokens(0, 96))
    settle(step, (prod,), real, ours)

    step = "removed, while another rank still has some"
    prod.remove(a0, tokens(0, 160), 5, 10)
    prod.remove(b0, tokens(0, 96), 5, 6)
    prod.ask(tokens(0, 160), 10)
    settle(step, (prod,), real, ours)
    step = "removed by the last owner"
    prod.remove(a1, tokens(0, 160), 7, 10, rank=1)
    prod.ask(tokens(0, 160), 7)
    settle(step, (prod,), real, ours)
    step = "full of stores"
    for start in range(20000, 20000 + SEQUENCES * 320, 320):
        prod.store(b0, tokens(start, 320))
    prod.ask(tokens(20000, 320), 20)
    prod.ask(tokens(20000 + (SEQUENCES - 1) * 320, 320), 20)
    settle(step, (prod,), real, ours)
    step = "cleared"
    b0.send([CLEARED])
    prod.ask(tokens(20000, 320), 0)
    prod.ask(tokens(0, 160), 7)
    settle(step, (prod,), real, ours)


def compare_watched(view):
    """Our consumer has followed every filter of a relay to the frame that our other reading ends with."""
    ends = {}
    with open(view.watched, encoding="utf-8") as lines:
        for frame in map(json.loads, lines):
            ends[frame["endpoint"]] = frame["sequence"], frame["detail"].startswith("bad frame") or ends.get(frame["endpoint"], (0, False))[1]
    wanted = {name: (replica.sequence, False) for name, replica in view.replicas.items()}
    check(f"our consumer has followed {view.name} to sequences {[end for end, _ in wanted.values()]}", ends == wanted, (ends, wanted))


def conform(view):
    code, out, err = kvrelay("conform", view.address, "--json", timeout_s=120)
    verdicts = {line["id"]: line["verdict"] for line in map(json.loads, out.splitlines())}
    failed = [name for name, verdict in verdicts.items() if verdict == "failed"]
    passed = sum(1 for verdict in verdicts.values() if verdict == "passed")
    check(f"conform finds no fault in {view.name}, {passed} passed of {len(verdicts)}", code == 0 and passed > 0 and not failed, (code, failed, out, err))


def change_workers(deployment):
    """Who is there changes; kvrelayd is told by a new file."""
    deployment.workers["a"].do("drop", name="sql")
    yield "adapter gone"
    deployment.stop("b")
    yield "second worker gone"
    deployment.stop("d")
    yield "decode half gone"
    deployment.add("x", endpoint="prod.other.generate", model="mistral", aliases=["chat", "mi"], block_size=16, role="aggregated", model_type=CHAT)
    yield "an alias with two meanings"
    deployment.until_gone(deployment.crash("p"))
    yield "prefill half killed, its records expired"


def leave_workers(deployment):
    for name in list(deployment.workers):
        deployment.stop(name)
    yield "nobody left"


def load(deployment, real, feeds):
    """Reports of use: of some ranks, of all, of none in use, without capacity, and of a worker that goes."""
    prod = dict(PROD, ranks=1, total_kv_blocks=400, events=[feeds["b"][0].endpoint])
    deployment.add("b", **prod)
    told = {}
    steps = (
        ("one rank of three reports", "a", 0, 100),
        ("two ranks, one with nothing in use", "a", 1, 0),
        ("all ranks report", "b", 0, 400),
        ("a rank without capacity", "e", 0, 7),
        ("another report of a rank", "a", 0, 101),
        ("more in use than there is", "b", 0, 450),
    )
    ours = reported(deployment, told)
    for step, name, rank, used in steps:
        told[name, rank] = used
        deployment.workers[name].do("load", rank=rank, used=used)
        ours.program.report(PLACES[name], deployment.workers[name].id, rank, used)
        compare_reports(step, told, real, ours)
    ours.close()
    deployment.stop("b")
    del told["b", 0]
    ours = reported(deployment, told)
    compare_reports("a worker that reported is gone", told, real, ours)
    ours.close()


def reported(deployment, told):
    program = deployment.reported_load()
    for (name, rank), used in told.items():
        program.report(PLACES[name], deployment.workers[name].id, rank, used)
    view = View(program.address)
    view.name, view.program = "ours", program
    return view


def compare_reports(step, told, real, ours):
    """The script knows how many have reported; what comes of it both have to say."""
    wanted = {of: sum(1 for name, _ in told if PLACES[name] == of) for of in PLACES.values()}

    def here(view):
        seen = {p.producer.pool_id.SerializeToString(): p.kv_observed_ranks for p in view.newest["load"].pools} if "load" in view.newest else {}
        return all(seen.get(p.producer.pool_id.SerializeToString()) == wanted[place(p.serving_endpoint)] for p in view.pools())

    for view in (real, ours):
        check(f"{step}: {view.name} counts who has reported", view.until(lambda v=view: here(v)), (view.newest.get("load"), wanted))
    compare_load(step, real, ours)


def run(deployment):
    address = deployment.relay()
    real = View(address)
    real.name = "the real relay"
    ours = beside(deployment, real)
    compare_planes("empty", real, ours)
    leave(ours)

    feeds = start_workers(deployment)
    real.until(lambda: len(real.pools()) == 4)
    ours = beside(deployment, real)
    for each in feeds.values():
        for engine in each:
            engine.subscribed()
            engine.subscribed()
    compare_planes("workers", real, ours)
    real.follow_pools()
    ours.follow_pools()
    compare_words("workers", real, ours)
    for name, view in (("watch-real", real), ("watch-ours", ours)):
        view.watched = deployment.watch(name, view.address)
    events(feeds, real, ours)
    for view in (real, ours):
        compare_watched(view)
    for view in (real, ours):
        conform(view)
    check("no stream of the real relay ended", not real.errors, real.errors)
    leave(ours)

    change(change_workers(deployment), deployment, real)
    load(deployment, real, feeds)
    change(leave_workers(deployment), deployment, real)
    real.close()


def change(steps, deployment, real):
    for step in steps:
        time.sleep(0.5)
        ours = beside(deployment, real)
        compare_planes(step, real, ours)
        leave(ours)


def main():
    signal.alarm(LIMIT_S)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"not done after {LIMIT_S} s")))
    with Deployment(sys.argv[1]) as deployment:
        try:
            run(deployment)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure, and processes end
            check("the run comes to its end", False, repr(error))
            raise
    check("the run comes to its end", True)
    finish()


main()
