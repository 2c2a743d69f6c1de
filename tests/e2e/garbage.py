#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Garbage on the gRPC port, on the ZeroMQ socket and in the configuration: a clear message and a running relay, or exit 78."""

import os
import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
from support.engine import Engine, pack, stored  # noqa: E402
from support.reading import trace_path  # noqa: E402

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def throw(address, data, linger_s=0.3):
    """Sends bytes to the port and reads whatever comes back."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as s:
        s.settimeout(linger_s)
        try:
            s.sendall(data)
            while s.recv(65536):
                pass
        except OSError:
            pass


def grpc_port(daemon):
    dice = random.Random(7)
    cases = {
        "an HTTP/1.1 request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(190),
        "a raw transport's preface": b"KVRF" + bytes(12),
        "random bytes": dice.randbytes(4096),
        "a preface and random frames": PREFACE + SETTINGS + dice.randbytes(4096),
        "half a preface": PREFACE[:11],
        "nothing": b"",
        "a frame of the largest length": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1",
        "headers that do not decompress": PREFACE + SETTINGS + b"\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff",
    }
    for name, data in cases.items():
        throw(daemon.address, data)
        code, out, err = kvrelay("info", daemon.address)
        check(f"gRPC port: {name}, and the relay answers the next", daemon.alive() and code == 0, f"{code} {out} {err}")
    for i in range(60):
        cut = dice.randrange(1, 200)
        throw(daemon.address, PREFACE + SETTINGS + dice.randbytes(cut), 0.01)
    code, _, err = kvrelay("info", daemon.address)
    check("gRPC port: sixty odd connections later the relay answers", code == 0, err)


def zmq_socket(daemon, engine):
    dice = random.Random(8)
    good = pack([1.5, [stored([1], [1, 2, 3, 4], 4)], 0])
    for frames in ([], [b""], [b"x"], [b"a", b"b"], [b"", b"short", good], [b"", b"\0" * 8], [b"t", b"\0" * 9, good], [b"1", b"2", b"3", b"4", b"5"]):
        if frames:
            engine.send_frames(frames)
    payloads = [b"", b"\xc1", b"\x93", good[:-1], good + b"\0", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, pack({"events": 5}), pack([1, 2, 3])]
    payloads += [dice.randbytes(dice.randrange(1, 300)) for _ in range(300)]
    for at in range(len(good)):
        payloads.append(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
    for payload in payloads:
        engine.send_payload(payload)
    tokens = list(range(900, 908))
    engine.send([stored([91, 92], tokens, 4)])
    code, out, err = 0, "", ""
    for _ in range(100):
        code, out, err = kvrelay("query", daemon.address, "--model", "llama", "--token-ids", "900-907")
        if code == 0:
            break
        time.sleep(0.1)
    check("ZeroMQ socket: after all that garbage a good batch counts", code == 0 and daemon.alive(), f"{code} {out} {err}")
    log = "\n".join(daemon.lines)
    check("ZeroMQ socket: the log names the reasons", "payload_malformed" in log and "reason=frames" in log, log[-2000:])


def configuration():
    good = pool_yaml([(7, 0, 1, ["type: none"])])
    engine = pool_yaml([(7, 0, 4, ["type: engine", "endpoint: tcp://127.0.0.1:5557"])])
    cases = {
        "an unknown key": (good.replace("  dc: dc-a", "  dcc: dc-a"), ["relay.dcc", "unknown key", "'dc'", ":3:"]),
        "an unknown key further down": (good.replace("type: none", "typ: none"), ["endpoints[0].workers[0].events.typ:", "'type'"]),
        "no YAML at all": ("\x00\x01\x02", [":1:"]),
        "an open list": ("version: 1\nrelay: [\n", ["not YAML"]),
        "an empty file": ("", ["empty"]),
        "a key twice": (good.replace("  dc: dc-a", "  dc: dc-a\n  dc: dc-b"), ["stands twice"]),
        "a number that is none": (good.replace("block_size: 32", "block_size: many"), ["endpoints[0].block_size: must be a whole number, 0 to 4294967295, not 'many'"]),
        "an alias": (good.replace("dc-a", "&x dc-a"), ["anchors"]),
        "a wrong version": (good.replace("version: 1", "version: 2"), ["version", "must be 1"]),
        "a name with outer blanks": (good.replace("dc-a", "' dc-a'"), ["relay.dc:", "white space"]),
        "a bad address": (good.replace("127.0.0.1:0", "localhost:port"), ["relay.bind:", "numeric"]),
        "an unknown value": (good.replace("type: none", "type: kafka"), ["endpoints[0].workers[0].events.type: must be one of none, engine, trace, not 'kafka'"]),
        "an unknown value further up": (good.replace("hash_format: standard", "hash_format: Eagle"), ["endpoints[0].hash_format: must be one of standard, eagle, not 'Eagle'"]),
        "two wrong values": (good.replace("ranks: 1", "ranks: -1").replace("dc: dc-a", "dc: [a]"), ["workers[0].ranks: must be a whole number", "relay.dc: this must be a single value"]),
        "a number beyond its bits": (good.replace("ranks: 1", "ranks: 4294967296"), ["endpoints[0].workers[0].ranks:", "0 to 4294967295"]),
        "a worker beyond 64 bits": (good.replace("id: 7", "id: 18446744073709551616"), ["workers[0].id:", "0 to 18446744073709551615"]),
        "a number with more behind it": (good.replace("ranks: 1", "ranks: 1x"), ["workers[0].ranks:", "'1x'"]),
        "no number": (good.replace("block_size: 32", "block_size:"), ["block_size:", "not ''"]),
        "a switch that is neither on nor off": (engine.replace("type: engine", "type: engine\n          bind: off"), ["events.bind: must be true or false, not 'off'"]),
        "a text with a NUL": (good.replace("model: llama", 'model: "a\\0b"'), ["endpoints[0].model: NUL"]),
        "a text that is too long": (good.replace("model: llama", "model: " + "m" * 4097), ["endpoints[0].model:", "4096"]),
        "a role that is none": (good.replace("ranks: 1", "needs: [[decode], [all]]"), ["workers[0].needs:", "legacy, prefill, decode, encode, aggregated"]),
        "a source without a port": (engine.replace(":5557", ""), ["endpoints[0].workers[0].events.endpoint:", "tcp://host:port"]),
        "a source at any port": (engine.replace(":5557", ":*"), ["endpoints[0].workers[0].events.endpoint:", "tcp://host:port"]),
        "a rank beyond the last port": (engine.replace(":5557", ":65533"), ["endpoints[0].workers[0].events.endpoint:", "rank 3", "65535"]),
        "a source at every host": (engine.replace("127.0.0.1:5557", "*:5557"), ["endpoints[0].workers[0].events.endpoint:", "give the engine's address", "bind: true", ":20:21:"]),
        "a source at a host that is no name": (engine.replace("127.0.0.1:5557", "a host:5557"), ["events.endpoint:", "cannot be connected to"]),
        "a source that binds a name": (engine.replace("127.0.0.1:5557", "no-such-name:5557\n          bind: true"), ["events.endpoint:", "network interface"]),
        "a source of a socket's own choice": (engine.replace("tcp://127.0.0.1:5557", "ipc://*"), ["events.endpoint:", "ipc://path"]),
        "a source at a path that is too long": (engine.replace("tcp://127.0.0.1:5557", "ipc:///" + "p" * 103), ["events.endpoint:", "107 bytes"]),
        "a source with a name that is too long": (engine.replace("tcp://127.0.0.1:5557", "inproc://" + "p" * 250), ["events.endpoint:", "255 bytes"]),
        "a replay at every host": (engine.replace("type: engine", "type: engine\n          bind: true\n          replay: tcp://*:5600"), ["events.replay:", "engine's address"]),
        "a replay at the source's port": (engine.replace("type: engine", "type: engine\n          replay: tcp://127.0.0.1:05557"), ["events.replay:", "the port of 'endpoint'"]),
        "a replay at the source's path": (engine.replace("type: engine", "type: engine\n          replay: ipc:///tmp/x").replace("tcp://127.0.0.1:5557", "ipc:///tmp/x"), ["events.replay:", "equal to 'endpoint'"]),
        "a filter of nothing": (good.replace("expected_unique_blocks: 1000", "expected_unique_blocks: 0"), ["expected_unique_blocks: must be a whole number, 1 to 53687091, not '0'"]),
        "a filter that is too large for every endpoint": (good.replace("expected_unique_blocks: 1000", "expected_unique_blocks: 53687092"), [":5:27: relay.expected_unique_blocks: must be a whole number, 1 to 53687091, not '53687092'"]),
        "a filter of many": (good.replace("block_size: 32", "block_size: 32\n    expected_unique_blocks: many"), ["endpoints[0].expected_unique_blocks: must be a whole number, 1 to 53687091, not 'many'"]),
        "a name that YAML reads as nothing": (good.replace("dc: dc-a", "dc: ~"), [":3:7: relay.dc: empty", "quotes"]),
        "a model that YAML reads as nothing": (good.replace("model: llama", "model: null"), ["endpoints[0].model: empty", "quotes"]),
        "a replay of nothing": (engine.replace("type: engine", "type: engine\n          replay: tcp://10.0.0.1"), ["endpoints[0].workers[0].events.replay:", "tcp://host:port"]),
        "a hold of nothing": (engine.replace("type: engine", "type: engine\n          hold_batches: 0"), ["endpoints[0].workers[0].events.hold_batches:", "1 to"]),
        "a memory of nothing": (engine.replace("type: engine", "type: engine\n          partial_memory: 0"), ["endpoints[0].workers[0].events.partial_memory:", "1 to"]),
        "a list instead of a mapping": ("version: 1\nrelay: [a]\n", ["relay", "mapping"]),
        "a missing key": ("version: 1\nrelay:\n  bind: 127.0.0.1:0\n", ["'dc' is missing"]),
        "nothing but depth": ("[" * 5000, ["nested deeper"]),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bad.yaml")
        for name, (text, words) in cases.items():
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            for arguments in (["--check", path], ["--config", path]):
                done = subprocess.run([os.path.join(BIN, "kvrelayd"), *arguments], capture_output=True, text=True, timeout=30, check=False)
                good_answer = done.returncode == 78 and all(word in done.stderr for word in words) and path in done.stderr
                check(f"configuration with {name} ({arguments[0]})", good_answer, f"{done.returncode}\n{done.stderr}")
        accepted(path, good, engine)
        recordings(folder)
        done = subprocess.run([os.path.join(BIN, "kvrelayd"), "--config", path + ".no"], capture_output=True, text=True, timeout=30, check=False)
        check("a missing file ends with 69", done.returncode == 69 and "cannot be read" in done.stderr, done)
        done = subprocess.run([os.path.join(BIN, "kvrelayd"), "--no-such-flag"], capture_output=True, text=True, timeout=30, check=False)
        check("a bad flag ends with 64", done.returncode == 64, done)
        done = subprocess.run(
            [os.path.join(BIN, "kvrelayd"), "--config", path, "--bind", "localhost:1"], capture_output=True, text=True, timeout=30, check=False
        )
        check("--bind takes what relay.bind takes", done.returncode == 64 and "must be a numeric address" in done.stderr, done)
        for files in (6, 7, 8):  # each is too few for another step of the start
            done = subprocess.run(
                [os.path.join(BIN, "kvrelayd"), "--config", path],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
                preexec_fn=lambda n=files: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)),
            )
            check(f"no more than {files} files: an end with a reason", done.returncode in (69, 71) and "Too many open files" in done.stderr, done)


def accepted(path, good, engine):
    """What is valid, with the words --check says about it."""
    replay = engine.replace("type: engine", "type: engine\n          replay: tcp://127.0.0.1:{}")
    cases = {
        "a good one": (good, ["dc_id 0x04f110c98b1bfc48"], []),
        "a worker without ranks": (engine.replace("ranks: 4", "ranks: 0"), ["no worker with valid ranks"], ["warning:", "workers[0].ranks:", "1 to 4096"]),
        "a worker of too many ranks": (replay.format(5558).replace("ranks: 4", "ranks: 100000"), ["no worker with valid ranks"], ["warning:", "1 to 4096"]),
        "a name in quotes": (good.replace("dc: dc-a", 'dc: "~"'), ["fine"], []),
        "a source by name": (engine.replace("127.0.0.1:5557", "engine-7.example:5557"), ["fine"], []),
        "a source that binds every host": (engine.replace("127.0.0.1:5557", "*:5557\n          bind: true"), ["fine"], []),
        "a source that binds one": (engine.replace("127.0.0.1:5557", "[::1]:5557\n          bind: true"), ["fine"], []),
        "a replay behind the last rank": (replay.format(5561), ["fine"], []),
        "a replay at another rank's source": (replay.format(5558), ["fine"], ["warning:", "events.replay:", "rank 1's 'endpoint'", "4 ports apart"]),
        "a replay below the source": (replay.format(5554), ["fine"], ["warning:", "rank 3's 'replay'"]),
        "a replay between the ranks": (replay.format(5558).replace("type: engine", "type: engine\n          rank_port_step: 2"), ["fine"], []),
        "the largest filter": (good.replace("expected_unique_blocks: 1000", "expected_unique_blocks: 53687091"), ["fine"], []),
    }
    for name, (text, out, err) in cases.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        done = subprocess.run([os.path.join(BIN, "kvrelayd"), "--check", path], capture_output=True, text=True, timeout=30, check=False)
        told = all(word in done.stdout for word in out) and all(word in done.stderr for word in err)
        check(f"configuration with {name} is accepted", done.returncode == 0 and told and bool(err) == ("warning:" in done.stderr), done)
    with open(path, "w", encoding="utf-8") as file:
        file.write(good)


def recordings(folder):
    """What a recording can get wrong is told before anything starts; relative paths start at the folder of the file."""
    with open(trace_path("vllm0.32.0_plain"), "rb") as file:
        whole = file.read()
    for name, data in (("whole", whole), ("cut", whole[:-3]), ("text", b"no recording at all")):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    cases = (
        ("that is whole", 1, "whole", 0, []),
        ("that is not there", 1, "none.trace", 69, ["events.file:", "none.trace", "No such file", "relative path"]),
        ("that is cut", 1, "cut", 69, ["events.file:", "the file ends", "at byte"]),
        ("that is none", 1, "text", 69, ["events.file:", "no whole recording"]),
        ("of two ranks", 2, "whole", 78, ["events.file:", "ranks: 1", "rank_port_step: 0"]),
        ("of two ranks on one socket", 2, "whole\n          rank_port_step: 0", 0, []),
    )
    path = os.path.join(folder, "recording.yaml")
    for name, ranks, file_name, code, words in cases:
        with open(path, "w", encoding="utf-8") as file:
            file.write(pool_yaml([(7, 0, ranks, ["type: trace", f"file: {file_name}"])]))
        for option in ("--check", "--config")[: 2 if code else 1]:
            done = subprocess.run([os.path.join(BIN, "kvrelayd"), option, path], capture_output=True, text=True, timeout=30, check=False)
            good = done.returncode == code and all(word in done.stderr for word in words) and ("fine" in done.stdout) == (code == 0)
            check(f"a recording {name} ({option})", good, f"{done.returncode}\n{done.stdout}{done.stderr}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(pool_yaml([(7, 0, 1, ["type: trace", "file: whole"])]).replace("expected_unique_blocks: 1000", "expected_unique_blocks: 53687091"))
    done = subprocess.run(
        [os.path.join(BIN, "kvrelayd"), "--check", path], capture_output=True, text=True, timeout=30, check=False
    )
    told = re.search(r"memory at worst (\d+) bytes", done.stdout)
    check("--check tells the memory of the largest filter", done.returncode == 0 and told and int(told.group(1)) > 4 << 30, done)
    with Daemon(pool_yaml([(7, 0, 1, ["type: trace", f"file: {trace_path('vllm0.32.0_plain')}"])])) as daemon:
        logged = int(daemon.wait_for(r"event=memory worst_case_bytes=(\d+)").group(1))
        done = subprocess.run([os.path.join(BIN, "kvrelayd"), "--check", daemon.config], capture_output=True, text=True, timeout=30, check=False)
        check("--check tells the memory that the daemon takes", f"memory at worst {logged} bytes" in done.stdout, (logged, done.stdout))


def main():
    engine = Engine()
    with Daemon(pool_yaml([(7, 0, 1, ["type: engine", f"endpoint: {engine.endpoint}"])], block_size=4)) as daemon:
        engine.subscribed()
        grpc_port(daemon)
        zmq_socket(daemon, engine)
    engine.close()
    configuration()
    finish()


main()
