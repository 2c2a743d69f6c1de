#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The tool against a running relay: answers, tables, JSON and exit codes; and every recorded question through the whole path."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
from support.reading import prompt, recording, trace_path  # noqa: E402

# Recordings whose expectation needs no replay and no group without a kind.
RECORDINGS = {
    "vllm0.32.0_plain": (),
    "vllm0.23.0_plain": (),
    "vllm0.19.1_plain": (),
    "vllm0.32.0_evict": (),
    "vllm0.23.0_evict": (),
    "vllm0.32.0_reset": (),
    "vllm0.19.1_reset": (),
    "vllm0.32.0_salt": (),
    "vllm0.32.0_copies": (),
    "vllm0.32.0_lora": ("adapter-a", "adapter-b", "abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789"),
}


def trace(name):
    return ["type: trace", f"file: {trace_path(name)}"]


def recorded_questions(name, adapters):
    data = recording(name)
    with Daemon(pool_yaml([(7, 0, 1, trace(name))], block_size=data["block_size"], adapters=adapters)) as daemon:
        wrong = []
        for query in data["expected"]["queries"]:
            tokens = " ".join(map(str, prompt(data["operations"][query["op"]])))
            arguments = ["query", daemon.address, "--model", "llama", "--tokens", "-", "--json"]
            if query["lora"]:
                arguments += ["--adapter", query["lora"]]
            if query["namespace"]:
                arguments += ["--namespace", query["namespace"]]
            code, out, err = kvrelay(*arguments, stdin=tokens)
            answer = json.loads(out)["answers"][0] if out else {}
            depth = query["depth"]["0"]
            if (code, answer.get("complete_blocks"), answer.get("depth_blocks")) != (0 if depth else 1, query["complete_blocks"], depth):
                wrong.append((query, code, out, err))
        check(f"{name}: the tool answers every recorded question ({len(data['expected']['queries'])})", not wrong, wrong)


def answers(daemon):
    at = daemon.address
    code, out, err = kvrelay("info", at)
    check("info shows the relay", code == 0 and "contract" in out and not err, (code, out, err))
    code, out, _ = kvrelay("info", at, "--json")
    check("info --json", code == 0 and json.loads(out)["protocol_version"] == 1, out)
    digits = out.rpartition(":")[2].rstrip("}\n").replace(".", "").lstrip("0")
    check("JSON: at most 15 digits of a number with a point", len(digits) <= 15, out)
    for command in (["info"], ["info", "--json"], ["catalog"], ["query", "--model", "chat", "--token-ids", "100-195"], ["watch"], ["--help"], ["--version"]):
        with open("/dev/full", "w") as full:
            arguments = command if command[0].startswith("--") else [command[0], at, *command[1:]]
            done = subprocess.run([os.path.join(BIN, "kvrelay"), *arguments], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
        check(f"{' '.join(command)}: output that cannot be written is 71", done.returncode == 71 and b"cannot be written" in done.stderr, done)
    code, out, _ = kvrelay("catalog", at)
    check("catalog shows the pool as a table", code == 0 and "prod/backend/generate" in out and "llama" in out and "chat" in out, out)
    code, out, _ = kvrelay("catalog", at, "--json")
    pool = json.loads(out)["pools"][0]
    check("catalog --json", code == 0 and pool["endpoint"] == "prod/backend/generate" and pool["verdict"] == "ok", out)
    code, out, _ = kvrelay("query", at, "--model", "chat", "--token-ids", "100-195")
    check("query: full match is 0", code == 0 and "3" in out, (code, out))
    code, out, _ = kvrelay("query", at, "--model", "chat", "--token-ids", "100-163,7000-7031")
    check("query: partial match is 0", code == 0 and "partial match" in out, (code, out))
    code, out, _ = kvrelay("query", at, "--model", "chat", "--token-ids", "7000-7127")
    check("query: no match is 1", code == 1, (code, out))
    code, out, _ = kvrelay("query", at, "--model", "chat", "--token-ids", "1-5", "--json")
    short = json.loads(out)["answers"][0]
    check("query: a prompt below one block has 0 complete blocks", code == 1 and short["complete_blocks"] == 0, out)
    code, out, err = kvrelay("query", at, "--model", "chta", "--token-ids", "100-195")
    check("query: an unknown model names what is there", code == 1 and "chat" in err and "llama" in err, (code, out, err))
    code, out, err = kvrelay("query", at, "--model", "chta", "--token-ids", "100-195", "--json")
    line = json.loads(out) if out else {}
    check("query --json: a line says so too", code == 1 and line.get("answers") == [] and "no pool serves 'chta'" in line.get("why", ""), (code, out, err))
    code, out, err = kvrelay("query", at, "--model", "chat", "--token-ids", "1,x")
    check("query: a bad token list is 64", code == 64 and "'x'" in err, (code, err))
    code, out, err = kvrelay("watch", at, "--pool", "prod/backend/nope")
    check("watch: an unknown pool is 1 and names what is there", (code, out, err) == (1, "", "kvrelay: no pool 'prod/backend/nope'; the catalog has: prod/backend/generate\n"), (code, out, err))
    for name in ("prod/backend/generate", pool["pool"]):
        code, out, err = kvrelay("watch", at, "--pool", name, "--count", "1")
        check("watch: a pool by its endpoint and by its identity", code == 0 and "snapshot" in out, (name, code, out, err))
    code, out, err = kvrelay("watch", at, "--json", "--count", "1")
    check("watch shows the snapshot", code == 0 and json.loads(out.splitlines()[0])["kind"] == "snapshot", (code, out, err))


def token_lists(daemon):
    ask = ("query", daemon.address, "--model", "chat")
    wrong = {
        "[100, 101,\n": "cut off",
        "[1,2": "cut off",
        "1,2,\n": "cut off",
        "[100,101,]": "between ',' and ']'",
        "1,,2": "before ','",
        ",1": "before ','",
        "1,2]": "closes no list",
        "[1,2]]": "closes no list",
        "[1,2],3": "behind the list",
        "[1,2]3": "behind the list",
        "[1,[2]]": "second list",
        "1[2]": "second list",
        "[]": "no token",
        " \n": "no token",
        "": "no token",
    }
    for text, why in wrong.items():
        for way, stdin in ((("--token-ids", text), None), (("--tokens", "-"), text)):
            code, out, err = kvrelay(*ask, *way, stdin=stdin)
            check(f"query {way[0]}: {text!r} is 64 with the reason", (code, out) == (64, "") and why in err, (code, out, err))
    tokens = list(range(100, 196))
    for text in (json.dumps(tokens), json.dumps(tokens, indent=2) + "\n", " ".join(map(str, tokens)), " , ".join(map(str, tokens)), "[100-195]"):
        code, out, err = kvrelay(*ask, "--tokens", "-", "--json", stdin=text)
        check(f"query: {text[:12]!r}... is read whole", code == 0 and json.loads(out)["tokens"] == 96, (code, out, err))


def usage():
    for arguments, said in (
        (["info", "127.0.0.1:1", "--model", "x"], "kvrelay: info takes no --model"),
        (["info", "127.0.0.1:1", "--subscriber-id", "x"], "kvrelay: info takes no --subscriber-id"),
        (["catalog", "127.0.0.1:1", "--pool", "a/b/c"], "kvrelay: catalog takes no --pool"),
        (["catalog", "127.0.0.1:1", "--count", "2"], "kvrelay: catalog --count needs --watch"),
        (["watch", "127.0.0.1:1", "--watch"], "kvrelay: watch takes no --watch"),
        (["conform", "127.0.0.1:1", "--count", "1"], "kvrelay: conform takes no --count"),
        (["query", "127.0.0.1:1", "--pool", "a/b/c"], "kvrelay: query takes no --pool"),
        *((["watch", "127.0.0.1:1", "--pool", name], f"kvrelay: --pool takes namespace/component/endpoint, not '{name}'") for name in ("nope", "a/b", "/b/c", "a//c", "a/b/", "a/b/c/d", "")),
        (["query", "127.0.0.1:1", "--bogus"], "kvrelay: unrecognized option '--bogus'"),
        (["query", "127.0.0.1:1", "--model"], "kvrelay: option '--model' requires an argument"),
    ):
        code, out, err = kvrelay(*arguments)
        check(f"usage: {' '.join(arguments)} is 64 and says what is wrong", (code, out) == (64, "") and err.startswith(said), (code, out, err))
    for arguments in ([], ["nothing"], ["info"], ["info", "a:1", "b:2"], ["info", "127.0.0.1:1", "--no-such"], ["query", "127.0.0.1:1"]):
        code, _, err = kvrelay(*arguments)
        check(f"usage: {' '.join(arguments) or 'no argument'} is 64 and points to --help", code == 64 and "--help" in err, (code, err))
    code, out, _ = kvrelay("--help")
    check("--help shows the commands and exit codes", code == 0 and all(w in out for w in ("info", "catalog", "query", "watch", "Exit codes")), out)
    code, _, err = kvrelay("info", "127.0.0.1:1", "--timeout", "3")
    check("nobody there is 69", code == 69 and "127.0.0.1:1" in err, (code, err))


def line_like(stream, part):
    """Whether one of the next lines has this; the tool's own end ends the wait."""
    return any(part in line for line in stream)


def losses():
    """A relay goes, in order and killed, and comes back at the same address."""
    yaml = pool_yaml([(7, 0, 1, trace("vllm0.32.0_plain"))])
    for how, reason in ((signal.SIGTERM, "ended in order"), (signal.SIGKILL, "UNAVAILABLE")):
        first = Daemon(yaml)
        at = first.address
        tools = {}
        for command in ("watch", "catalog --watch"):
            name, *more = command.split()
            arguments = [os.path.join(BIN, "kvrelay"), name, at, *more]
            tools[command] = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            watchdog = threading.Timer(60, tools[command].kill)
            watchdog.daemon = True
            watchdog.start()
        for tool in tools.values():
            line_like(tool.stdout, "prod/backend/generate")
        first.process.send_signal(how)
        first.process.wait(10)
        first.folder.cleanup()
        lost = {command: line_like(tool.stderr, f"kvrelay: {at} lost ({reason}") for command, tool in tools.items()}
        with Daemon(yaml.replace("127.0.0.1:0", at)):
            back = {command: line_like(tool.stderr, f"kvrelay: {at} is back") for command, tool in tools.items()}
        for command, tool in tools.items():
            check(f"{command}: a relay that goes ({reason}) is told lost, and back", lost[command] and back[command], (lost, back))
            tool.kill()
            tool.communicate()


def another_protocol():
    """Something that is no gRPC server at the other end."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    address = "127.0.0.1:%d" % server.getsockname()[1]
    code, _, err = kvrelay("info", address, "--timeout", "3")
    check("another protocol at the address is 69 with a reason", code == 69 and address in err, (code, err))
    server.close()


def main():
    usage()
    another_protocol()
    with Daemon(pool_yaml([(7, 0, 1, trace("vllm0.32.0_plain"))])) as daemon:
        answers(daemon)
        token_lists(daemon)
    losses()
    for name, adapters in RECORDINGS.items():
        recorded_questions(name, adapters)
    finish()


main()
