#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The tool against a running relay: answers, tables, JSON and exit codes; and every recorded question through the whole path."""

import json
import os
import socket
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import Daemon, check, finish, kvrelay, pool_yaml  # noqa: E402
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
    code, out, err = kvrelay("query", at, "--model", "chat", "--token-ids", "1,x")
    check("query: a bad token list is 64", code == 64 and "'x'" in err, (code, err))
    code, out, err = kvrelay("watch", at, "--json", "--count", "1")
    check("watch shows the snapshot", code == 0 and json.loads(out.splitlines()[0])["kind"] == "snapshot", (code, out, err))


def usage():
    for arguments in ([], ["nothing"], ["info"], ["info", "a:1", "b:2"], ["info", "127.0.0.1:1", "--no-such"], ["query", "127.0.0.1:1"]):
        code, _, err = kvrelay(*arguments)
        check(f"usage: {' '.join(arguments) or 'no argument'} is 64 and points to --help", code == 64 and "--help" in err, (code, err))
    code, out, _ = kvrelay("--help")
    check("--help shows the commands and exit codes", code == 0 and all(w in out for w in ("info", "catalog", "query", "watch", "Exit codes")), out)
    code, _, err = kvrelay("info", "127.0.0.1:1", "--timeout", "3")
    check("nobody there is 69", code == 69 and "127.0.0.1:1" in err, (code, err))


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
    for name, adapters in RECORDINGS.items():
        recorded_questions(name, adapters)
    finish()


main()
