#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The tool against relays that lie: odd catalogs, broken streams, names made for a terminal. What is not known is never a number."""

import json
import os
import sys
import time
from concurrent import futures

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import check, finish, kvrelay  # noqa: E402
from support.messages import MARKER, RELAY, catalog, chunk, delta, heartbeat, pool, producer, update  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402

SNAPSHOT = [chunk(0), chunk(1)]


class LyingRelay(grpc.GenericRpcHandler):
    """Says to everybody what it was told to say, and leaves the streams open."""

    def __init__(self):
        self.catalogs, self.updates = [], []
        self.server = grpc.server(futures.ThreadPoolExecutor(64))
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details):
        if details.method.endswith("GetRelayInfo"):
            info = pb.RelayInfo(protocol_version=1, relay=RELAY, contract_marker=MARKER).SerializeToString()
            return grpc.unary_unary_rpc_method_handler(lambda *_: info)

        def serve(_, context):
            yield from self.catalogs if details.method.endswith("WatchKvPoolCatalog") else self.updates
            while context.is_active():
                time.sleep(0.02)

        return grpc.unary_stream_rpc_method_handler(serve)

    def ask(self, command, *arguments, catalogs=None, updates=None):
        self.catalogs = [catalog(pool())] if catalogs is None else catalogs
        self.updates = SNAPSHOT if updates is None else updates
        return kvrelay(command, self.address, "--timeout", "1", *arguments)

    def query(self, *arguments, **more):
        return self.ask("query", "--model", "m", "--token-ids", "1-16", *arguments, **more)


def streams(relay):
    code, out, err = relay.query("--json")
    check("an honest stream is answered: no match is 1", code == 1 and json.loads(out)["answers"][0]["depth_blocks"] == 0, (code, out, err))
    cases = {
        "chunks out of order": SNAPSHOT[::-1],
        "a heartbeat before the snapshot": [heartbeat(5)],
        "a snapshot without end": SNAPSHOT[:1],
        "a wrong checksum": [chunk(0, damage=1)],
        "2^32 - 1 chunks": [chunk(0, count=2**32 - 1)],
        "the filter of another pool": [chunk(0, of=producer(scope=b"t" * 16))],
        "frames of another relay": [chunk(0, relay=pb.RelayIdentity(drt_instance_id=9, relay_incarnation=9))],
        "an unknown kind": [update(77, 5, 5, b"")],
        "a delta before the snapshot": [delta(5, 0, 0)],
    }
    for name, updates in cases.items():
        code, out, err = relay.query("--json", updates=updates)
        answers = json.loads(out)["answers"] if out else []
        check(f"{name}: not decided, and no number", code == 2 and all(a["depth_blocks"] is None for a in answers), (code, out, err))
    two = catalog(pool(), pool(endpoint="d", scope=b"t" * 16))
    code, out, err = relay.query("--json", catalogs=[two])
    states = sorted((a["state"], a["depth_blocks"]) for a in json.loads(out)["answers"]) if out else []
    check("one pool says no, the other nothing: not decided", (code, states) == (2, [("known", 0), ("unknown", None)]), (code, out, err))
    check("and --timeout is named", "--timeout" in err, err)
    for sent_us in (2**63, 2**64 - 1):
        code, out, err = relay.ask("watch", "--count", "2", updates=[chunk(0, sent_us=sent_us), chunk(1, sent_us=sent_us)])
        check(f"watch: a relay whose clock says {sent_us}", code == 0 and len(out.splitlines()) >= 2, (code, out, err))


def catalogs(relay):
    cases = {"hash format -1": pool(hash_format=-1), "block size 0": pool(block_size=0), "3 buckets": pool(buckets=3), "2^63 buckets": pool(buckets=2**63)}
    for name, odd in cases.items():
        code, _, err = relay.query(catalogs=[catalog(odd)])
        check(f"{name}: the model is there, its pool unusable: not decided", code == 2 and "a/b/c" in err and "cannot be used" in err, (code, err))
    for name, odd in {"another marker": catalog(pool(), marker=1), "an empty message": b""}.items():
        for command in ("catalog", "watch"):
            code, _, err = relay.ask(command, catalogs=[odd])
            check(f"{command}: {name} is another contract: 76", code == 76, (code, err))
    for name, odd in {"bytes that do not decode": b"\xff" * 50, "a pool listed twice": catalog(pool(), pool())}.items():
        code, out, err = relay.query(catalogs=[odd])
        check(f"{name}: no catalog, not decided", code == 2, (code, out, err))


def names(relay):
    """Output that is not UTF-8 would raise in kvrelay()."""
    spells = "\x1b[31m\0\u009bx\n"
    code, out, err = relay.ask("catalog", catalogs=[catalog(pool(endpoint=spells, aliases=[spells]))])
    check("no control character of a name reaches the terminal", code == 0 and not set("\x1b\0\u009b") & set(out + err), (code, out, err))
    for shift in ("", "x"):
        for command in (["catalog"], ["catalog", "--json"], ["query", "--model", "m", "--token-ids", "1-16"], ["watch", "--count", "1", "--json"]):
            code, out, err = relay.ask(*command, catalogs=[catalog(pool(endpoint=shift + "é" * 2000, aliases=[shift + "é" * 1999]))])
            check(f"{command[0]}: long names are cut between characters", code in (0, 1) and "é" * 100 in out, (code, err))


def main():
    relay = LyingRelay()
    streams(relay)
    catalogs(relay)
    names(relay)
    relay.server.stop(None)
    finish()


if __name__ == "__main__":
    main()
