#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Engines of pyzmq and what may stand in their place: every kind of address, kill -9 at random moments, peers that are no engine or
say no, garbage to a port of ours. Needs nothing but pyzmq, so that any version of it can be the peer (PYZMQ=folder in front of the path)."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402

if "PYZMQ" in os.environ:
    sys.path.insert(0, os.environ["PYZMQ"])
import zmq  # noqa: E402
from support.engine import CLEARED, Engine, ReplayEngine, stored  # noqa: E402

BLOCK = 16
KILLS = int(os.environ.get("KILLS", "12"))


def tokens(prompt, blocks):
    """The first blocks of one of many long prompts that have nothing in common."""
    return list(range(prompt * 10000, prompt * 10000 + blocks * BLOCK))


def store(prompt, block):
    """Block number `block` of a prompt."""
    key = prompt * 1000 + block
    return stored([key], tokens(prompt, block + 1)[-BLOCK:], BLOCK, parent=key - 1 if block else None)


def depth(daemon, prompt, blocks):
    """Leading blocks of a prompt that the relay knows of."""
    code, out, _ = kvrelay("query", daemon.address, "--model", "llama", "--token-ids", ",".join(map(str, tokens(prompt, blocks))), "--timeout", "5")
    fields = out.splitlines()[-1].split() if code in (0, 1) and out else []
    return int(fields[3]) if len(fields) > 4 and fields[3].isdigit() else 0 if code == 1 else None


def comes_to(daemon, prompt, blocks, wanted, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while (got := depth(daemon, prompt, blocks)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return got == wanted or got


def descriptors(daemon):
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def addresses():
    """IPv6, a socket file, an abstract one, and the replay socket over each."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = {
            "IPv6": ("tcp://[::1]:*", "tcp://[::1]:*"),
            "a socket file": (f"ipc://{folder}/live", f"ipc://{folder}/replay"),
            "an abstract socket": (f"ipc://@kvrelay-live-{os.getpid()}", f"ipc://@kvrelay-replay-{os.getpid()}"),
        }
        engines = [ReplayEngine(live, replay) for live, replay in pairs.values()]
        workers = [(i, 0, 1, ["type: engine", f'endpoint: "{e.endpoint}"', f'replay: "{e.replay_endpoint}"']) for i, e in enumerate(engines, 1)]
        for prompt, engine in enumerate(engines, 1):
            engine.send([store(prompt, 0)])  # before anybody listens
        with Daemon(pool_yaml(workers, block_size=BLOCK)) as daemon:
            for prompt, (engine, name) in enumerate(zip(engines, pairs), 1):
                engine.subscribed()
                got = comes_to(daemon, prompt, 3, 1)
                check(f"{name}: what was published before comes by replay", got is True, got)
                engine.send([store(prompt, 1)])
                got = comes_to(daemon, prompt, 3, 2)
                check(f"{name}: and then live", got is True, got)
        for engine in engines:
            engine.close()


def engine_program(endpoint, prompt):
    """An engine that says all it has, again and again, until somebody kills it."""
    engine = Engine(endpoint)
    while True:
        engine.send([CLEARED])
        for block in range(20):
            engine.send([store(prompt, block)])
        time.sleep(0.01)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def killed():
    """Whatever the moment, the relay goes on, and in the end knows what the last engine has and nothing else."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    chance = random.Random(1)
    with Daemon(pool_yaml([(7, 0, 1, ["type: engine", f"endpoint: {endpoint}"])], block_size=BLOCK)) as daemon:
        before = 0
        for prompt in range(KILLS):
            engine = subprocess.Popen([sys.executable, os.path.abspath(__file__), "engine", endpoint, str(prompt)])
            time.sleep(0.15 + chance.random() * 0.25)
            engine.kill()
            engine.wait()
            if prompt == 2:
                before = descriptors(daemon)
        check("killed engines leave the relay alive", daemon.alive())
        last = Engine(endpoint)
        last.subscribed()
        last.send([CLEARED] + [store(KILLS, block) for block in range(5)])
        got = comes_to(daemon, KILLS, 8, 5)
        check(f"after {KILLS} kills the last engine is known", got is True, got)
        stale = [prompt for prompt in range(KILLS) if depth(daemon, prompt, 20) != 0]
        check("and nothing of those before it", not stale, stale)
        check("no descriptor is left behind", descriptors(daemon) <= before + 2, (before, descriptors(daemon)))
        check("nothing that was half said was believed", not any("malformed" in line or "fenced" in line for line in daemon.lines))
        last.close()


def closing_peer():
    """Takes every connection and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    return listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def judge(context):
    """Refuses everybody who asks the sockets of this context."""
    socket_ = context.socket(zmq.REP)
    socket_.bind("inproc://zeromq.zap.01")

    def serve():
        while True:
            try:
                version, request, *_ = socket_.recv_multipart()
                socket_.send_multipart([version, request, b"400", b"no", b"", b""])
            except zmq.ZMQError:
                socket_.close(0)
                return

    threading.Thread(target=serve, daemon=True).start()


def no_engines():
    """Each is told by what is wrong with it."""
    context = zmq.Context()
    judge(context)
    public, secret = zmq.curve_keypair()
    plain, curve, zap = (context.socket(zmq.PUB) for _ in range(3))
    plain.plain_server = True
    curve.curve_server, curve.curve_secretkey, curve.curve_publickey = True, secret, public
    zap.setsockopt(zmq.ZAP_DOMAIN, b"test")
    closing, closes = closing_peer()
    endpoints = [closes] + [f"tcp://127.0.0.1:{s.bind_to_random_port('tcp://127.0.0.1')}" for s in (plain, curve, zap)]
    workers = [(i, 0, 1, ["type: engine", f"endpoint: {endpoint}"]) for i, endpoint in enumerate(endpoints, 1)]
    with Daemon(pool_yaml(workers, block_size=BLOCK)) as daemon:
        # Who asks for PLAIN or CURVE may have closed before it has said so.
        reasons = {"closes": ("no_handshake",), "PLAIN": ("protocol", "no_handshake"), "CURVE": ("protocol", "no_handshake"), "refuses": ("refused",)}
        for worker, (name, expected) in enumerate(reasons.items(), 1):
            line = daemon.wait_for(rf"event=source_attempt source=\S+/{worker}\.0 reason=(\w+)")
            check(f"a peer that is no engine of ours ({name}) is told by its reason", line.group(1) in expected, line.group(0))
        check("none of them counts as connected", not any("event=source_connected" in line for line in daemon.lines))
    closing.close()
    for s in (plain, curve, zap):
        s.close(0)
    context.term()  # ends the judge's thread, whose socket nobody else may close


def garbage():
    """Engines connect to us: whoever else comes to that port takes nothing away from them."""
    port = free_port()
    source = ["type: engine", f"endpoint: tcp://127.0.0.1:{port}", "bind: true"]
    chance = random.Random(2)
    with Daemon(pool_yaml([(7, 0, 1, source)], block_size=BLOCK)) as daemon:
        context = zmq.Context()
        engine = Engine.__new__(Engine)
        engine.context, engine.sequence = context, 0
        engine.socket = context.socket(zmq.XPUB)
        engine.socket.connect(f"tcp://127.0.0.1:{port}")
        engine.subscribed()
        engine.send([store(1, 0)])
        got = comes_to(daemon, 1, 3, 1)
        check("an engine that connects to us is known", got is True, got)
        before = descriptors(daemon)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        for n in range(100):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                noise = chance.randbytes(chance.randrange(200))
                stranger.sendall((b"", greeting, greeting[: chance.randrange(64)], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"\x01\0" * 20)[n % 6] + noise)
        engine.send([store(1, 1)])
        got = comes_to(daemon, 1, 3, 2)
        check("and stays so among a hundred strangers", got is True, got)
        deadline = time.monotonic() + 20
        while descriptors(daemon) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        check("who leave no descriptor behind", descriptors(daemon) <= before, (before, descriptors(daemon)))
        check("and are not taken for its end", not any("event=source_disconnected" in line for line in daemon.lines), [line for line in daemon.lines if "connected" in line])
        engine.socket.close(0)
        daemon.wait_for("event=source_disconnected")
        check("its end is told when it comes", True)
        context.destroy(0)


def main():
    if sys.argv[1:2] == ["engine"]:
        engine_program(sys.argv[2], int(sys.argv[3]))
    print(f"# pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}")
    addresses()
    killed()
    no_engines()
    garbage()
    finish()


main()
