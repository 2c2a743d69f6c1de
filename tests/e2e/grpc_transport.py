#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Stock clients judge the gRPC server alone: grpcio, curl and h2load against the toy service of tests/programs/grpc_echo."""

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, check, finish  # noqa: E402

import grpc  # noqa: E402

TOY = "/kvrelay.test.Toy/"
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
Code = grpc.StatusCode


class Server:
    """grpc_echo in a process of its own; use as a context."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [os.path.join(BIN, "tests", "grpc_echo"), "127.0.0.1:0", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.process.stdout.readline().split()[1]
        self.channel = self.connect()

    def connect(self, *options):
        return grpc.insecure_channel(self.address, options=[("grpc.max_receive_message_length", -1), *options])

    def say(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def counts(self):
        """Calls opened, closed, open now, and broken rules."""
        self.say("counts")
        return [int(n) for n in self.process.stdout.readline().split()[1:]]

    def settled(self):
        """True once no call is open; the server may hear of it a little later."""
        for _ in range(100):
            opened, closed, now, broken = self.counts()
            if now == 0:
                return opened == closed and broken == 0
            time.sleep(0.02)
        return False

    def unary(self, method, request=b"", channel=None, **more):
        return (channel or self.channel).unary_unary(TOY + method)(request, **more)

    def stream(self, method, request=b"", channel=None, **more):
        return (channel or self.channel).unary_stream(TOY + method)(request, **more)

    def chat(self, requests):
        """The answers of one call, each request sent after the answer to the one before."""
        to_send = queue.Queue()
        call = self.channel.stream_stream(TOY + "Chat")(iter(to_send.get, None), timeout=10)
        answers = []
        for request in requests:
            to_send.put(request)
            answers.append(next(call))
        to_send.put(None)
        return answers + list(call)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()
        self.say("stop")
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = "had to be killed"
        check("the server stops in order, without a broken rule", code == 0, code)


def failure(action):
    """Status, text and reason trailer of a call that has to fail."""
    try:
        result = action()
        return Code.OK, repr(result)[:80], None
    except grpc.RpcError as error:
        trailers = {key: value for key, value in error.trailing_metadata() or ()}
        return error.code(), error.details(), trailers.get("kv-relay-error-reason")


def unary(server):
    check("empty_unary", server.unary("Echo") == b"")
    for size in (1, 16379, 16384, 65535, 65536):
        body = bytes(i * 7 & 255 for i in range(size))
        check(f"unary of {size} bytes", server.unary("Echo", body, timeout=10) == body)
    code, _, _ = failure(lambda: server.unary("Echo", bytes(65537)))
    check("a request above the limit is RESOURCE_EXHAUSTED", code == Code.RESOURCE_EXHAUSTED, code)
    calls = [server.channel.unary_unary(TOY + "Echo").future(b"%d" % i, timeout=30) for i in range(1000)]
    check("1 000 unary calls at once", [c.result() for c in calls] == [b"%d" % i for i in range(1000)])


def content(index, size):
    """Message `index` of Count."""
    start = index % 256
    return (bytes(range(256)) * ((size + start) // 256 + 1))[start : start + size]


def streams(server):
    for count, size in ((0, 0), (1, 0), (4, 31415), (2000, 100), (60, 65536), (5, 4194304)):
        got = list(server.stream("Count", f"{count} {size}".encode(), timeout=60))
        check(f"server stream of {count} messages of {size} bytes", got == [content(i, size) for i in range(count)])
    results = [None] * 8

    def read(i):
        results[i] = sum(len(m) for m in server.stream("Count", b"300 20000", timeout=60))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check("eight streams side by side", results == [6000000] * 8, results)
    slow = 0
    for message in server.stream("Count", b"40 300000", timeout=60):
        slow += message == content(slow, 300000)
        time.sleep(0.005)
    check("a slow reader gets everything", slow == 40, slow)
    requests = [b"a", b"b" * 20000, b"", b"c"]
    check("ping_pong over one call", server.chat(requests) == requests)
    check("empty_stream", server.chat([]) == [])


def errors(server):
    check("unimplemented_method", failure(lambda: server.unary("Nope"))[0] == Code.UNIMPLEMENTED)
    other = server.channel.unary_unary("/some.other.Service/Call")
    check("unimplemented_service", failure(lambda: other(b""))[0] == Code.UNIMPLEMENTED)
    got = failure(lambda: server.unary("Refuse", b"2 0 test status message"))
    check("status_code_and_message", got == (Code.UNKNOWN, "test status message", None), got)
    got = failure(lambda: server.unary("Refuse", b"2 0 " + SPECIAL.encode()))
    check("special_status_message", got == (Code.UNKNOWN, SPECIAL, None), got)
    got = failure(lambda: server.unary("Refuse", b"5 4 gone"))
    check("reason of a refusal", got == (Code.NOT_FOUND, "gone", "RELAY_ERROR_REASON_POOL_NOT_FOUND"), got)
    got = failure(lambda: list(server.stream("End", b"8 7 too slow")))
    check("reason behind messages", got == (Code.RESOURCE_EXHAUSTED, "too slow", "RELAY_ERROR_REASON_SUBSCRIBER_LAGGED"), got)
    deflate = server.connect(("grpc.default_compression_algorithm", 1))
    got = failure(lambda: server.unary("Echo", b"z" * 1000, channel=deflate))
    check("S71: a deflate request is UNIMPLEMENTED", got[0] == Code.UNIMPLEMENTED, got)
    deflate.close()


def compressed(server):
    server.say("encodings")
    if "gzip" not in server.process.stdout.readline():
        return  # built without zlib
    gzip = server.connect(("grpc.default_compression_algorithm", 2))
    check("S71: a gzip request", server.unary("Echo", b"z" * 50000, channel=gzip) == b"z" * 50000)
    got = failure(lambda: server.unary("Echo", b"z" * 1000000, channel=gzip))
    check("S74: one above the limit once decompressed", got[0] == Code.RESOURCE_EXHAUSTED, got)
    gzip.close()


def ends(server):
    check("timeout_on_sleeping_server", failure(lambda: list(server.stream("Silent", timeout=0.001)))[0] == Code.DEADLINE_EXCEEDED)
    check("a silent stream ends with its deadline", failure(lambda: list(server.stream("Silent", timeout=0.2)))[0] == Code.DEADLINE_EXCEEDED)
    call = server.stream("Silent")
    call.cancel()
    check("cancel_after_begin", failure(lambda: list(call))[0] == Code.CANCELLED)
    call = server.stream("Silent", timeout=5)
    call.initial_metadata()
    check("headers of a silent stream arrive", call.is_active(), call)
    call.cancel()
    call = server.stream("Count", b"100000 1000")
    next(call)
    call.cancel()
    check("cancel_after_first_response", failure(lambda: list(call))[0] == Code.CANCELLED)
    check("no call stays open", server.settled(), server.counts())
    call = server.stream("Silent", timeout=10)
    call.initial_metadata()
    server.say("release")
    check("a woken stream goes on", list(call) == [b"released"])


def other_clients(server):
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0\0\0\0\x05hello")
        body.flush()
        url = f"http://{server.address}{TOY}Echo"
        curl = ["curl", "-sv", "--http2-prior-knowledge", "-H", "content-type: application/grpc", "--data-binary", "@" + body.name, "-o", "-"]
        done = subprocess.run([*curl, url], capture_output=True, timeout=30, check=False)
        check("curl", done.stdout == b"\0\0\0\0\x05hello" and b"grpc-status: 0" in done.stderr, done)
        done = subprocess.run(["curl", "-s", "-o", "-", "-w", "%{http_code}", "--http2-prior-knowledge", url], capture_output=True, timeout=30, check=False)
        check("curl without gRPC gets an HTTP status, and why", done.stdout == b"gRPC is spoken here: POST\n405", done)
        done = subprocess.run(["curl", "-s", "--http1.1", "-m", "5", url], capture_output=True, timeout=30, check=False)
        check("curl with HTTP/1.1 is cut off", done.returncode in (1, 52, 56), done)  # the bytes before the end are SETTINGS
        load = ["h2load", "-n", "5000", "-c", "5", "-m", "50", "-H", "content-type: application/grpc", "-d", body.name, url]
        text = subprocess.run(load, capture_output=True, text=True, timeout=60, check=False).stdout
        check("h2load", re.search(r"5000 succeeded, 0 failed, 0 errored", text) is not None, text)


def life():
    with Server("100") as server:  # a keepalive PING every 100 ms
        call = server.stream("Silent", timeout=20)
        call.initial_metadata()
        time.sleep(1.2)
        server.say("release")
        check("grpcio answers keepalive", list(call) == [b"released"])
    server = Server()
    call = server.stream("Silent", timeout=20)
    call.initial_metadata()
    begin = time.monotonic()
    server.say("stop")
    check("an orderly stop ends streams with OK", list(call) == [] and call.code() == Code.OK, call.code())
    code = server.process.wait(10)
    check("and is quick", code == 0 and time.monotonic() - begin < 5, code)
    check("afterwards nobody is there", failure(lambda: server.unary("Echo", timeout=5))[0] == Code.UNAVAILABLE)


def main():
    with Server() as server:
        unary(server)
        streams(server)
        errors(server)
        compressed(server)
        ends(server)
        other_clients(server)
        check("in the end no call is open", server.settled(), server.counts())
    life()
    finish()


main()
