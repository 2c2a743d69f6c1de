#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What nobody should do to a gRPC server, S110 to S118: it ends the connection or bears it, its memory stays bounded, and it
serves the next one. HTTP/2 is made by hand against tests/programs/grpc_echo; resident memory before and after is printed."""

import os
import resource
import socket
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, check, finish  # noqa: E402

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PROTOCOL_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 1, 9, 11
CANCEL = struct.pack(">I", 8)
SLACK_KIB = 4096  # what an allocator may keep, and a sanitizer about as much again


def frame(kind, flags=0, stream=0, body=b""):
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def literal(name, value, index=0):
    return bytes([index, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def request_head(method, stream, flags=END_HEADERS):
    lines = ((":method", "POST"), (":scheme", "http"), (":path", "/kvrelay.test.Toy/" + method), (":authority", "x"),
             ("content-type", "application/grpc"))
    return frame(HEADERS, flags, stream, b"".join(literal(*line) for line in lines))


def message(body):
    return b"\0" + struct.pack(">I", len(body)) + body


def settings(*entries):
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *entry) for entry in entries))


class Peer:
    """A connection that has said hello."""

    def __init__(self, server, *entries, source="127.0.0.1", receive_buffer=None):
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.bind((source, 0))
        self.socket.settimeout(5)  # less than the server's own patience
        self.socket.connect(server.address)
        self.received = b""
        self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings(*entries))

    def send(self, *frames):
        """False once the other side has hung up."""
        try:
            self.socket.sendall(b"".join(frames))
        except OSError:
            return False
        return True

    def read(self):
        """The next frame as (type, flags, stream, body), or None at the end."""
        while len(self.received) < 9 or len(self.received) < 9 + int.from_bytes(self.received[:3], "big"):
            try:
                more = self.socket.recv(1 << 20)
            except ConnectionError:
                more = b""
            if not more:
                return None
            self.received += more
        n = 9 + int.from_bytes(self.received[:3], "big")
        head, self.received = self.received[:n], self.received[n:]
        return head[3], head[4], int.from_bytes(head[5:9], "big"), head[9:]

    def goaway(self):
        """The code of the GOAWAY that ends this connection; None: it ended without a word."""
        code = None
        while (got := self.read()) is not None:
            if got[0] == GOAWAY and code in (None, 0):
                code = int.from_bytes(got[3][4:8], "big")
        return code

    def echo(self, stream, body):
        """True when it comes back, followed by trailers."""
        self.send(request_head("Echo", stream), frame(DATA, END_STREAM, stream, message(body)))
        came = b""
        while (got := self.read()) is not None:
            if got[2] == stream and got[0] == DATA:
                came += got[3]
            if got[2] == stream and got[1] & END_STREAM:
                return came == message(body)
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


class Server:
    def __init__(self):
        self.process = subprocess.Popen([os.path.join(BIN, "tests", "grpc_echo")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        host, port = self.process.stdout.readline().split()[1].rsplit(":", 1)
        self.address = host, int(port)

    def resident_kib(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    def serves(self):
        with Peer(self) as peer:
            return peer.echo(1, b"still here")

    def stop(self):
        """True when it counted as many calls closed as opened, and broke no rule."""
        self.process.stdin.close()
        return self.process.wait(10) == 0


def flood(server, frames, count, batch=50):
    """Sends frames(i) for i below `count`, until the server hangs up: how many it took, and what it said."""
    with Peer(server) as peer:
        peer.send(request_head("Echo", 1))
        sent = 0
        while sent < count and peer.send(*(frames(i) for i in range(sent, sent + batch))):
            sent += batch
        return sent, peer.goaway()


def resets(server):
    code = flood(server, lambda i: request_head("Echo", 2 * i + 3) + frame(RST_STREAM, 0, 2 * i + 3, CANCEL), 3000)[1]
    # Fewer than the bucket holds are nobody's business.
    with Peer(server) as peer:
        for i in range(900):
            peer.send(request_head("Echo", 2 * i + 1), frame(RST_STREAM, 0, 2 * i + 1, CANCEL))
        served = peer.echo(2001, b"x")
        print(f"# GOAWAY {code} after many, {'served' if served else 'not served'} after few")
        return code == ENHANCE_YOUR_CALM and served


def continuations(server):
    """Eight may follow; a thousand do not."""
    def pieces(count, last):
        return [frame(CONTINUATION, last if i == count - 1 else 0, 1, literal("a", "b")) for i in range(count)]

    with Peer(server) as good, Peer(server) as bad:
        good.send(request_head("Echo", 1, 0), *pieces(8, END_HEADERS), frame(DATA, END_STREAM, 1, message(b"x")))
        bad.send(request_head("Echo", 1, 0), *pieces(1000, 0))
        bad.goaway()  # it ends, with or without one
        return good.echo(3, b"x")


def acknowledgements(server):
    """Of PINGs and SETTINGS, from one who does not read them."""
    with Peer(server, receive_buffer=4096) as peer:
        sent = 0
        while sent < 2000000 and peer.send(settings() * 1000):
            sent += 1000
        calm = sent < 2000000
    return calm and flood(server, lambda i: frame(PING, 0, 0, bytes(8)), 5000)[1] == ENHANCE_YOUR_CALM


def settings_entries(server):
    with Peer(server) as good, Peer(server) as bad:
        good.send(settings(*((0x100 + i, 1) for i in range(32))))
        bad.send(settings(*((0x100 + i, 1) for i in range(33))))
        return good.echo(1, b"x") and bad.goaway() == ENHANCE_YOUR_CALM


def nothing_useful(server):
    return all(flood(server, lambda i, f=one: f, 20000)[1] == ENHANCE_YOUR_CALM
               for one in (frame(DATA, 0, 1), frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"), frame(0xF0)))


def is_open(peer):
    """The server's SETTINGS came; one that is refused sees the end of file."""
    got = peer.read()
    return got is not None and got[0] == SETTINGS


def connections(server):
    """256 from one address, 1 024 from all."""
    peers = [Peer(server, source=f"127.0.0.{1 + i // 300}") for i in range(1500)]
    taken = [is_open(peer) for peer in peers]
    print(f"# {sum(taken)} of {len(peers)} connections taken, {server.resident_kib()} KiB with them")
    for peer in peers:
        peer.socket.close()
    time.sleep(0.2)
    return sum(taken[:300]) == 256 and sum(taken) == 1024


def requests(server):
    """Announced, and never sent: room follows what arrives."""
    with Peer(server) as peer:
        before = server.resident_kib()
        for i in range(1000):
            peer.send(request_head("Echo", 2 * i + 1), frame(DATA, 0, 2 * i + 1, b"\0\0\1\0\0" + b"x"))
        peer.send(request_head("Echo", 2001), frame(DATA, 0, 2001, b"\0\0\1\0\1"))
        while (got := peer.read()) is not None and (got[0] != HEADERS or got[2] != 2001):
            continue
        grown = server.resident_kib() - before
        print(f"# {grown} KiB for 1 000 requests of 64 KiB of which a byte came")
        return got is not None and bool(got[1] & END_STREAM) and grown < 16384


def output(server):
    """Any window, and nobody reads: eight streams without an end of messages of 1 MiB."""
    good = True
    for method in ("Copied", "Count"):
        with Peer(server, (4, 0x7FFFFFFF), receive_buffer=4096) as peer:
            before = server.resident_kib()
            peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0x7FFFFFFF - 65535)))
            for stream in range(1, 17, 2):
                peer.send(request_head(method, stream), frame(DATA, END_STREAM, stream, message(b"1000 1048576")))
            time.sleep(0.3)
            grown = server.resident_kib() - before
            print(f"# {grown} KiB for 8 GB that are not read, {method}")
            # Each stream's message in the service, a threshold and a message of the connection, and what waits for the socket.
            good = good and grown < 8 * 1024 + 2 * 1024 + 1024 + SLACK_KIB and server.serves()
    return good


def header_tables(server):
    """Ours holds 4 096 bytes, whatever is put into it; theirs is taken to hold no more, whatever is said."""
    with Peer(server, (1, 0xFFFFFFFF)) as peer:
        for i in range(500):
            block = b"".join(literal(f"x-{i}-{j}", "v" * 100, 0x40) for j in range(20))
            peer.send(request_head("Echo", 2 * i + 1, 0), frame(CONTINUATION, END_HEADERS, 2 * i + 1, block),
                      frame(DATA, END_STREAM, 2 * i + 1, message(b"x")))
        fine = peer.echo(1001, b"x")
    with Peer(server) as peer:
        peer.send(frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f"))  # from now on: 4 097 bytes
        return fine and peer.goaway() == COMPRESSION_ERROR


CASES = (
    ("S110 resets", resets), ("S111 CONTINUATION without end", continuations), ("S112 acknowledgements nobody reads", acknowledgements),
    ("S113 entries of SETTINGS", settings_entries), ("S114 frames that get nothing done", nothing_useful),
    ("S115 connections", connections), ("S116 request messages", requests), ("S117 output nobody reads", output),
    ("S118 header tables", header_tables),
)


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard) if hard > 0 else 8192, hard))
    server = Server()
    check("it serves", server.serves())
    for name, case in CASES:
        before = server.resident_kib()
        try:
            good = case(server)
        except OSError as error:
            print(f"# {error}")
            good = False
        after = server.resident_kib()
        print(f"# {name}: {before} KiB before, {after} KiB after")
        check(f"{name}: as specified", good)
        check(f"{name}: the next one is served", server.serves())
    check("every call was closed", server.stop())
    finish()


main()
