#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""--sources-file: the namespaces of the file are served and no other; it is followed, and what is wrong in it changes nothing."""

import json
import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
from support.reading import prompt, recording, trace_path  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402

RECORDING = "vllm0.32.0_plain"
SECRET = "hush-hush"


def configuration():
    """Two endpoints of one recording, in the namespaces prod and test."""
    data = recording(RECORDING)
    text = pool_yaml([(7, 0, 1, ["type: trace", f"file: {trace_path(RECORDING)}"])], block_size=data["block_size"])
    endpoint = text[text.index("  - namespace"):]
    return text + endpoint.replace("prod", "test").replace("llama", "other").replace("chat", "talk")


def sources(*names, **more):
    return json.dumps({"version": 1, "sources": [{"namespace": name} for name in names], **more})


class Sources:
    def __init__(self, text):
        self.folder = tempfile.TemporaryDirectory(prefix="sources-")
        self.path = os.path.join(self.folder.name, "sources.json")
        self.write(text)

    def write(self, text):
        with open(self.path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(self.path + ".new", self.path)


def catalog(daemon):
    code, out, err = kvrelay("catalog", daemon.address, "--json")
    return sorted(name for name in ("prod", "test") if f"{name}/backend" in out) if code == 0 else (code, err)


def models(daemon):
    """Of the readiness plane."""
    with grpc.insecure_channel(daemon.address) as channel:
        call = channel.unary_stream(
            "/dynamo.kvrelay.v1.KvEventRelay/SubscribeServingReadiness",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=pb.ServingReadinessUpdate.FromString,
        )
        update = next(iter(call(pb.SubscribeServingReadinessRequest(subscriber_id="a", contract_marker=0x4B565231), timeout=20)))
        return sorted(entry.canonical_model_id for entry in update.entries)


def turns(daemon, wanted, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while catalog(daemon) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return catalog(daemon) == wanted


def depth(daemon, model):
    data = recording(RECORDING)
    query = max(data["expected"]["queries"], key=lambda q: q["depth"]["0"])
    tokens = " ".join(map(str, prompt(data["operations"][query["op"]])))
    code, out, _ = kvrelay("query", daemon.address, "--model", model, "--tokens", "-", "--json", stdin=tokens)
    return code == 0 and json.loads(out)["answers"][0]["depth_blocks"] == query["depth"]["0"]


def followed():
    file = Sources(sources("test", "prod"))
    with Daemon(configuration(), "--sources-file", file.path) as daemon:
        check("I9: both namespaces of the file are served", catalog(daemon) == ["prod", "test"], catalog(daemon))
        check("I9: so are their models", models(daemon) == ["llama", "other"], models(daemon))
        file.write(sources("test"))
        check("I9: a namespace that leaves the file is withdrawn", turns(daemon, ["test"]), catalog(daemon))
        check("I9: and the model it had is known no more", models(daemon) == ["other"], models(daemon))
        file.write('{"version":1,"sources":[{"namespace":"' + SECRET)
        daemon.wait_for(r"event=sources_file .*error=.*is not JSON")
        file.write(sources(SECRET, SECRET))
        daemon.wait_for(r"event=sources_file .*error=.*twice")
        check("I9: a bad update keeps the previous selection", catalog(daemon) == ["test"], catalog(daemon))
        os.remove(file.path)
        daemon.wait_for(r"event=sources_file .*error=.*cannot be opened")
        check("I9: so does a file that is gone", catalog(daemon) == ["test"], catalog(daemon))
        check("I9: no line of the log has what the file contains", not any(SECRET in line for line in daemon.lines))
        file.write(sources())
        check("I9: an empty list leaves nothing", turns(daemon, []), catalog(daemon))
        file.write(sources("prod"))
        check("I9: a namespace comes back", turns(daemon, ["prod"]), catalog(daemon))
        check("I9: with the blocks it had", depth(daemon, "llama"))


def at_start():
    with tempfile.TemporaryDirectory(prefix="kvrelayd-") as folder:
        path = os.path.join(folder, "kvrelayd.yaml")
        with open(path, "w", encoding="utf-8") as out:
            out.write(configuration())

        def code(file, connection=None):
            environment = dict(os.environ)
            environment.pop("DYN_RELAY_CONNECTION_REVISION", None)
            if connection is not None:
                environment["DYN_RELAY_CONNECTION_REVISION"] = connection
            done = subprocess.run(
                [os.path.join(BIN, "kvrelayd"), "--check", path, "--sources-file", file],
                capture_output=True, text=True, timeout=60, check=False, env=environment,
            )
            return done.returncode

        plain, bound = Sources(sources("prod")), Sources(sources("prod", connectionRevision="c1"))
        check("a file for no connection", code(plain.path) == 0)
        check("a file for the configured connection", code(bound.path, "c1") == 0)
        check("I9: a file for another connection is refused", [code(plain.path, "c1"), code(bound.path, "c2"), code(bound.path)] == [78] * 3)
        check("an empty connection is an error", code(plain.path, "") == 78)
        check("a file that is not there", code(os.path.join(folder, "none")) == 69)


followed()
at_start()
finish()
