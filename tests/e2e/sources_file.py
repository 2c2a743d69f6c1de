#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""--sources-file: the namespaces of the file are served and no other; it is followed, and what is wrong in it changes nothing."""

import json
import os
import re
import signal
import socket
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
MARKER = 0x4B565231


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


def readiness(channel):
    """The sorted models of each update."""
    call = channel.unary_stream(
        "/dynamo.kvrelay.v1.KvEventRelay/SubscribeServingReadiness",
        request_serializer=lambda m: m.SerializeToString(),
        response_deserializer=pb.ServingReadinessUpdate.FromString,
    )
    for update in call(pb.SubscribeServingReadinessRequest(subscriber_id="a", contract_marker=MARKER), timeout=60):
        yield sorted(entry.canonical_model_id for entry in update.entries)


def models(daemon):
    with grpc.insecure_channel(daemon.address) as channel:
        return next(readiness(channel))


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


def at_once():
    """Readers hear of a change in the turn that finds it, not when the next timer wakes the loop."""
    file = Sources(sources("test"))
    delays = []
    with Daemon(configuration(), "--sources-file", file.path) as daemon, grpc.insecure_channel(daemon.address) as channel:
        updates = readiness(channel)
        next(updates)
        for i in range(6):
            wanted, name = [(["llama", "other"], "prod"), (["other"], "none")][i % 2]
            file.write(sources("test", name, *(f"none-{k}" for k in range(i))))
            daemon.wait_for(rf"event=sources_file .*namespaces={i + 2} ")
            told = time.monotonic()
            while next(updates) != wanted:
                pass
            delays.append(time.monotonic() - told)
    check("readers hear of a change at once", sorted(delays)[len(delays) // 2] < 0.4, delays)


def cpu_s(daemon):
    """Processor time it has used."""
    with open(f"/proc/{daemon.process.pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def unread_call(address):
    """A connection with a call whose answer has no room on the way, so that it lasts until the grace time is over."""
    path = b"/dynamo.kvrelay.v1.KvEventRelay/SubscribeServingReadiness"
    request = pb.SubscribeServingReadinessRequest(subscriber_id="a", contract_marker=MARKER).SerializeToString()
    headers = b"\x83\x86\x04" + bytes([len(path)]) + path  # POST, http
    headers += b"\x0f\x10\x10application/grpc" + b"\x00\x02te\x08trailers"
    no_window = b"\x00\x04" + bytes(4)
    host, port = address.rsplit(":", 1)
    peer = socket.create_connection((host, int(port)), timeout=5)
    peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, no_window) + frame(1, 4, 1, headers))
    peer.sendall(frame(0, 1, 1, b"\0" + len(request).to_bytes(4, "big") + request))
    return peer


def while_stopping():
    file = Sources(sources("test"))
    with Daemon(configuration(), "--sources-file", file.path) as daemon, unread_call(daemon.address):
        time.sleep(0.3)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for("event=stopping")
        begun, used = time.monotonic(), cpu_s(daemon)
        file.write(sources("test", "prod"))
        time.sleep(1.5)
        check("a call that is not read holds the stop up", daemon.alive())
        used = cpu_s(daemon) - used if daemon.alive() else 0
        check("and the stop waits without turning", used < 0.3, used)
        check("a stop of two seconds at most", daemon.process.wait(10) == 0 and time.monotonic() - begun < 5)
        lines = [line for line in daemon.lines if re.search("pool_selected|pool_not_published", line)]
        check("a daemon that stops follows the file no more", not lines, lines)


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
            check("what is not right is not called fine", (": fine" in done.stdout) == (done.returncode == 0), done.returncode)
            return done.returncode

        plain, bound = Sources(sources("prod")), Sources(sources("prod", connectionRevision="c1"))
        check("a file for no connection", code(plain.path) == 0)
        check("a file for the configured connection", code(bound.path, "c1") == 0)
        check("I9: a file for another connection is refused", [code(plain.path, "c1"), code(bound.path, "c2"), code(bound.path)] == [78] * 3)
        check("an empty connection is an error", code(plain.path, "") == 78)
        check("a file that is not there", code(os.path.join(folder, "none")) == 69)


followed()
at_once()
while_stopping()
at_start()
finish()
