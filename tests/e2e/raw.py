#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The raw transport against a second implementation of grpc.md, part B, made from its text alone: as client and as server."""

import os
import queue
import resource
import select
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support import certs  # noqa: E402
from support.daemon import BIN, Daemon, check, finish, pool_yaml  # noqa: E402

import kvrelay_pb2 as pb  # noqa: E402

REQUEST, RESPONSE, MESSAGE, END, CANCEL, CREDIT, PING, PONG, GOAWAY = range(1, 10)
ECHO, COUNT, REFUSE, ENDS, SILENT = range(1, 6)  # the toy service by the numbers of the contract's methods
MAGIC = b"KVRF"
PROTOCOL = "kvrelay-raw/1"
PREFACE = struct.Struct("<4sBBHII")
HEADER = struct.Struct("<IIBBH")
WINDOW = 1 << 20


def frame(kind, stream=0, aux=0, body=b"", flags=0, length=None):
    return HEADER.pack(len(body) if length is None else length, stream, kind, flags, aux) + body


def credit(stream, count):
    return frame(CREDIT, stream, body=struct.pack("<I", count))


class Wire:
    """Frames on a socket; `get` returns (type, stream, aux, body), or None at the end of the connection."""

    def __init__(self, sock):
        self.sock, self.bytes = sock, b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, *pieces):
        self.sock.sendall(b"".join(pieces))

    def read(self, count, timeout):
        limit = time.monotonic() + timeout
        while len(self.bytes) < count:
            held = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0
            if not held and not select.select([self.sock], [], [], max(0, limit - time.monotonic()))[0]:
                raise TimeoutError
            try:
                more = self.sock.recv(1 << 20)
            except (ConnectionResetError, ssl.SSLError):
                more = b""
            if not more:
                return None
            self.bytes += more
        taken, self.bytes = self.bytes[:count], self.bytes[count:]
        return taken

    def get(self, timeout=5.0):
        head = self.read(HEADER.size, timeout)
        if head is None:
            return None
        length, stream, kind, flags, aux = HEADER.unpack(head)
        assert flags == 0, "flags"
        body = self.read(length, timeout)
        return None if body is None else (kind, stream, aux, body)

    def until(self, kind, timeout=5.0):
        """All frames up to the first of this kind, or to the end (None)."""
        found = []
        while not found or found[-1] is not None and found[-1][0] != kind:
            found.append(self.get(timeout))
        return found

    def silent(self, seconds=0.15):
        try:
            self.read(len(self.bytes) + 1, seconds)
            return False
        except TimeoutError:
            return True


class Program:
    """raw_echo in a process of its own; use as a context."""

    def __init__(self, *arguments):
        command = [os.path.join(BIN, "tests", "raw_echo"), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace")
        self.lines = queue.Queue()
        threading.Thread(target=self.pump, daemon=True).start()

    def pump(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def say(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def expect(self, start, timeout=5.0):
        """The first line from here on that begins so; what comes before is kept in `passed`."""
        self.passed = []
        while True:
            try:
                line = self.lines.get(timeout=timeout)
            except queue.Empty:
                return f"(no line {start!r}, only {self.passed})"
            if line.startswith(start):
                return line
            self.passed.append(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            check("the program ends in order", self.process.wait(10) == 0, self.process.returncode)
        except subprocess.TimeoutExpired:
            self.process.kill()
            check("the program ends in order", False, "had to be killed")


class Server(Program):
    tls = None  # a context of ssl

    def __init__(self, *arguments):
        super().__init__("serve", *arguments)
        host, port = self.expect("listening ").split()[1].rsplit(":", 1)
        self.address = (host, int(port))

    def counts(self):
        self.say("counts")
        return [int(n) for n in self.expect("counts ").split()[1:]]

    def wire(self):
        sock = socket.create_connection(self.address)
        return Wire(self.tls.wrap_socket(sock, server_hostname="localhost") if self.tls else sock)

    def connect(self, initial_credit=WINDOW, max_frame=8 << 20):
        wire = self.wire()
        wire.put(PREFACE.pack(MAGIC, 1, 1, 0, max_frame, initial_credit))
        wire.preface = PREFACE.unpack(wire.read(16, 5))
        return wire


def closed_with(wire, code, text=b""):
    """GOAWAY with this code, then the end; the last stream it names, or what came instead."""
    found = wire.until(GOAWAY)
    if found[-1] is None or found[-1][2] != code or text not in found[-1][3][4:]:
        return found
    while (more := wire.get()) is not None:
        if more[0] == GOAWAY:
            return ("twice", more)
    return struct.unpack("<I", found[-1][3][:4])[0]


# ---- our server ----


def examples(server):
    def answer(sent, count):
        wire.put(bytes.fromhex(sent))
        return wire.read(count, 5).hex()

    wire = server.wire()
    got = answer("4b565246 01 01 0000 00008000 00008000", 16)
    check("B13.1: prefaces", got == "4b56524601014001" + "00000100" + "00000000", got)
    got = answer("06000000 01000000 01 00 0100 fd073152564b", 12 + 12 + 6 + 14)
    check("B13.1: RESPONSE, MESSAGE, END", got == "000000000100000002000000" "060000000100000003000000" "fd073152564b" "020000000100000004000000" "0000", got)
    wire.put(frame(REQUEST, 2, REFUSE, b"9 5 producer changed"))
    got = wire.read(30, 5).hex()
    check("B13.2: a refusal", got == "120000000200000004000900" "0500" "70726f6475636572206368616e676564", got)
    wire.put(frame(REQUEST, 3, SILENT))
    wire.until(RESPONSE)
    wire.put(bytes.fromhex("04000000 03000000 06 00 0000 00000100 00000000 03000000 05 00 0000"))
    found = wire.until(END)
    check("B13.2: CREDIT, CANCEL", found[-1][1:3] == (3, 1), found)
    got = answer("08000000 00000000 07 00 0000 0102030405060708", 20)
    check("B13.2: PING", got == "080000000000000008000000" "0102030405060708", got)
    server.say("stop")
    got = wire.read(16, 5)
    code, last = HEADER.unpack(got[:12])[4], got[12:]
    check("B13.2: GOAWAY, shutdown, last stream 3", (code, last) == (1, b"\x03\0\0\0"), got)


def prefaces(server):
    for name, sent, version in (("a later client", (MAGIC, 9, 1, 0, 65536, 1), 1), ("a client of later versions only", (MAGIC, 9, 2, 0, 65536, 1), 0)):
        wire = server.wire()
        wire.put(PREFACE.pack(*sent))
        got = PREFACE.unpack(wire.read(16, 5))
        check(f"B8: {name}: version {version}", got[:3] == (MAGIC, version, 1), got)
        check(f"B8: {name}: {'open' if version else 'closed'}", wire.silent() if version else wire.get() is None)
    wire = server.wire()
    wire.put(b"GET / HTTP/1.1\r\n\r\n")
    check("B8: wrong magic is closed without a word", wire.read(1, 5) is None)
    logged = [server.expect("log ") for _ in range(2)]
    check("B8: both are logged with what they were", "no version in common" in logged[0] and "HTTP/1.1" in logged[1], logged)
    for name, sent in (
        ("max_frame below 65 536", (MAGIC, 1, 1, 0, 65535, 1)),
        ("max_frame above 2^31 - 1", (MAGIC, 1, 1, 0, 1 << 31, 1)),
        ("no credit", (MAGIC, 1, 1, 0, 65536, 0)),
        ("credit above 2^31 - 1", (MAGIC, 1, 1, 0, 65536, 1 << 31)),
    ):
        wire = server.wire()
        wire.put(PREFACE.pack(*sent))
        wire.read(16, 5)
        check(f"B8: {name} is a protocol error", closed_with(wire, 2) == 0)
    wire = server.wire()
    for byte in PREFACE.pack(MAGIC, 1, 1, 0, 65536, 4096) + frame(REQUEST, 1, ECHO, b"in pieces"):
        wire.put(bytes([byte]))
    wire.read(16, 5)
    check("B8: a byte at a time", [one[0] for one in wire.until(END)] == [RESPONSE, MESSAGE, END])


def protocol_errors(server):
    open_one = frame(REQUEST, 1, SILENT)
    cases = {
        "type 0": frame(0),
        "type 10": frame(10),
        "type 127": frame(127),
        "flags": frame(REQUEST, 2, ECHO, flags=1),
        "aux of a CANCEL": frame(CANCEL, 1, 1),
        "aux of a PING": frame(PING, aux=1, body=bytes(8)),
        "a PING of 7 bytes": frame(PING, body=bytes(7)),
        "a PING of 9 bytes": frame(PING, body=bytes(9)),
        "a PING on a stream": frame(PING, 1, body=bytes(8)),
        "a CREDIT of 3 bytes": frame(CREDIT, 1, body=bytes(3)),
        "a CREDIT of 5 bytes": frame(CREDIT, 1, body=bytes(5)),
        "a CANCEL with a body": frame(CANCEL, 1, body=b"x"),
        "a GOAWAY of 3 bytes": frame(GOAWAY, aux=1, body=bytes(3)),
        "a GOAWAY with 1 025 bytes of text": frame(GOAWAY, aux=1, body=bytes(4) + b"x" * 1025),
        "RESPONSE from the client": frame(RESPONSE, 1),
        "MESSAGE from the client": frame(MESSAGE, 1, body=b"x"),
        "END from the client": frame(END, 1, body=bytes(2)),
        "REQUEST on stream 0": frame(REQUEST, 0, ECHO),
        "a stream number again": frame(REQUEST, 1, ECHO),
        "CANCEL of a stream that never was": frame(CANCEL, 2),
        "CREDIT of a stream that never was": credit(2, 1),
        "CREDIT of 0": credit(1, 0),
        "a total above 2^31 - 1": credit(1, (1 << 31) - WINDOW),
    }
    for name, bad in cases.items():
        wire = server.connect()
        wire.put(open_one, bad)
        got = closed_with(wire, 2)
        check(f"B9, B11.7: {name} is a protocol error", got == 1, got)
    wire = server.connect()
    wire.put(open_one, HEADER.pack(65537, 2, REQUEST, 0, ECHO))  # the header alone decides
    got = closed_with(wire, 4)
    check("B11.1, B11.3: a request above 65 536 bytes: GOAWAY 4 from its header", got == 1, got)
    wire = server.connect()
    wire.put(frame(REQUEST, 1, ECHO, b"x" * 65536))
    check("B11.3: one of exactly 65 536 goes", [len(one[3]) for one in wire.until(END)] == [0, 65536, 2])
    wire = server.connect()
    wire.put(frame(128, 7, 9, b"?" * 1000, flags=3), frame(255, body=b"?"), frame(REQUEST, 1, ECHO, b"x"))
    check("B9: types from 128 on are skipped", [one[0] for one in wire.until(END)] == [RESPONSE, MESSAGE, END])
    wire.put(credit(1, 5), frame(CANCEL, 1), frame(PING, body=b"12345678"))
    got = wire.get()
    check("B10.5: CREDIT and CANCEL of a finished stream are ignored", got == (PONG, 0, 0, b"12345678"), got)
    wire.put(frame(REQUEST, 4_000_000_000, ECHO, b"x"), frame(REQUEST, 2, ECHO, b"x"))
    got = closed_with(wire, 2)
    check("B10.1: numbers may leap, never fall", got == 4_000_000_000, got)


def streams(server):
    wire = server.connect()
    wire.put(frame(REQUEST, 1, 77, b"x"), frame(REQUEST, 2, ENDS, b"8 3 \xe2\x98\xba"), frame(REQUEST, 3, SILENT))
    found = wire.until(END)
    check("B10.2: an unknown method is END 12 alone", len(found) == 1 and found[0][1:3] == (1, 12), found)
    found = wire.until(END)
    check("B9: status, reason and text", [one[0] for one in found] == [RESPONSE, MESSAGE, END] and found[-1][1:] == (2, 8, b"\x03\0\xe2\x98\xba"), found)
    check("B10.2: RESPONSE says that a silent call was admitted", wire.get() == (RESPONSE, 3, 0, b"") and wire.silent())
    wire.put(frame(CANCEL, 3))
    found = wire.until(END)
    check("B10.3: CANCEL is answered by END 1", len(found) == 1 and found[0][1:3] == (3, 1), found)
    # 3 100 bytes of credit, messages of 1 000 + 12: four of them go, the last one below 0.
    wire = server.connect(initial_credit=3100)
    wire.put(frame(REQUEST, 1, COUNT, b"6 1000"), frame(REQUEST, 2, COUNT, b"1 1000"))
    found = wire.until(END)
    check("B10.4: messages while credit is above 0", sum(one[:2] == (MESSAGE, 1) for one in found) == 4, found)
    check("B10.6: a stream without credit stalls only itself", found[-1][:3] == (END, 2, 0), found[-1])
    wire.put(credit(1, 948))
    check("B10.4: credit of exactly 0 is none", wire.silent())
    wire.put(credit(1, 1))
    check("B10.4: one byte of it is one message", wire.get()[:2] == (MESSAGE, 1) and wire.silent())
    wire.put(credit(1, 5000))
    check("B10.4: and more is the rest", [one[:3] for one in wire.until(END)] == [(MESSAGE, 1, 0), (END, 1, 0)])
    wire = server.connect(initial_credit=1)
    wire.put(frame(REQUEST, 1, ECHO, b"x" * 60000), frame(REQUEST, 2, ENDS, b"9 5 gone"))
    got = [one[:3] for _ in range(2) for one in wire.until(END) if one[0] != RESPONSE]
    check("B10.4: END needs no credit, nor does the first message fit", sorted(got, key=lambda one: one[1]) == [(MESSAGE, 1, 0), (END, 1, 0), (MESSAGE, 2, 0), (END, 2, 9)], got)
    wire = server.connect(initial_credit=WINDOW, max_frame=65536)
    wire.put(frame(REQUEST, 1, COUNT, b"1 65537"), frame(REQUEST, 2, COUNT, b"1 65536"))
    found = wire.until(END)
    good = found[-1][1:3] == (1, 8) and found[-1][3][:2] == b"\x06\0" and b"65537" in found[-1][3] and b"65536" in found[-1][3]
    check("B11.2: a message above the client's max_frame: END 8, RESOURCE_LIMIT, both sizes", good, found)
    check("B11.2: one of exactly that size goes", [len(one[3]) for one in wire.until(END) if one[0] == MESSAGE] == [65536])


def limits():
    with Server("max_streams=2", "keepalive=300", "idle=1000", "preface=400", "max_request=1024") as server:
        wire = server.connect()
        check("B8: the server's limits are in its preface", wire.preface == (MAGIC, 1, 1, 2, 1024, 0), wire.preface)
        wire.put(*(frame(REQUEST, stream, SILENT) for stream in (1, 2, 3)))
        found = wire.until(END)
        check("B10.7: beyond max_streams: END 8, RESOURCE_LIMIT, and the connection stays", found[-1][1:3] == (3, 8) and found[-1][3][:2] == b"\x06\0", found)
        found = wire.until(PING)
        check("B11.5: a PING after silence", [one[0] for one in found] == [RESPONSE, RESPONSE, PING] and len(found[-1][3]) == 8, found)
        wire.put(frame(PONG, body=found[-1][3]))
        check("B11.5: once it is answered the next one follows", wire.until(PING)[-1] is not None)
        began = time.monotonic()
        check("B11.5: unanswered, the connection is closed", wire.get() is None and 0.2 < time.monotonic() - began < 2)
        check("B11.10: its calls are closed", server.counts()[2] == 0)
        mute = server.wire()
        began = time.monotonic()
        check("B8: without a preface it is closed in time", mute.read(1, 5) is None and 0.3 < time.monotonic() - began < 2)
        wire = server.connect()
        wire.put(frame(PING, body=bytes(8)), frame(PING, body=bytes(8)), frame(PING, body=bytes(8)))
        got = closed_with(wire, 3)
        check("B11.6: too many pings: GOAWAY 3", got == 0, got)
        wire = server.connect()
        found = []
        while (one := wire.get()) is not None:
            found.append(one)
            if one[0] == PING:
                wire.put(frame(PONG, body=one[3]))
        check("B11.11: idle without streams it is closed, GOAWAY 1", found[-1][0] == GOAWAY and found[-1][2] == 1, found)
        wire = server.connect()
        wire.put(frame(REQUEST, 1, SILENT), HEADER.pack(100, 2, REQUEST, 0, ECHO) + b"cut")
        wire.until(RESPONSE)
        wire.sock.close()
        time.sleep(0.1)
        counts = server.counts()
        check("B11.8: a frame that is cut was never a request", counts[2:4] == [0, 0], counts)


def drain():
    with Server() as server:
        wire = server.connect()
        wire.put(frame(REQUEST, 1, SILENT))
        wire.until(RESPONSE)
        busy = server.connect(initial_credit=1)
        busy.put(frame(REQUEST, 5, COUNT, b"3 100"))
        busy.until(MESSAGE)
        server.say("stop")
        found = wire.until(END)
        check("B11.9: GOAWAY 1 names the last stream, open streams end with 0", [one[:3] for one in found] == [(GOAWAY, 0, 1), (END, 1, 0)] and found[0][3][:4] == b"\x01\0\0\0", found)
        check("B11.9: then it closes", wire.get() is None)
        found = busy.until(GOAWAY)
        busy.put(frame(REQUEST, 6, ECHO, b"late"))
        found = busy.until(END)
        check("B11.9: a request after GOAWAY: END 14, PUBLICATION_UNAVAILABLE", found[-1][1:3] == (6, 14) and found[-1][3][:2] == b"\x09\0", found)
        busy.put(credit(5, 10000))
        found = busy.until(END)
        check("B11.9: what had waited for credit still comes, then END", found[-1] is not None and found[-1][1:3] == (5, 0), found)


def a_thousand():
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with Server("per_peer=1024") as server:

        def resident():
            with open(f"/proc/{server.process.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * resource.getpagesize()

        def subscribe():
            wire = server.connect()
            wire.put(frame(REQUEST, 1, SILENT))
            wire.get()
            return wire

        first = [subscribe() for _ in range(20)]
        before = resident()
        wires = first + [subscribe() for _ in range(980)]
        each = (resident() - before) // 980
        check(f"B11.4: a thousand idle subscribers take {each} bytes each, less than 64 KiB", server.counts()[2] == 1000 and each < 65536, each)
        server.say("release")
        check("B11.4: all of them are served", all(wire.until(END)[-1] is not None for wire in wires))
        for wire in wires:
            wire.sock.close()


# ---- our client ----


class Client(Program):
    """raw_echo as the client of a server that stands here."""

    def __init__(self, *arguments, host="127.0.0.1", tls=None):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.tls = tls
        super().__init__("call", f"{host}:{self.listener.getsockname()[1]}", *arguments)

    def accept(self, preface=(MAGIC, 1, 1, 9, 65536, 0)):
        self.listener.settimeout(5)
        sock = self.listener.accept()[0]
        sock.settimeout(5)
        wire = Wire(self.tls.wrap_socket(sock, server_side=True) if self.tls else sock)
        wire.preface = wire.read(16, 5)
        if preface:
            wire.put(PREFACE.pack(*preface))
        return wire

    def ready(self, *preface):
        wire = self.accept(*preface)
        line = self.expect("state 2")
        if not line.startswith("state 2"):
            check("the client is ready", False, line)
        return wire

    def lost(self):
        """Why the connection was lost."""
        return self.expect("state 3")


def client_calls(client):
    wire = client.accept(None)
    check("B8: the client speaks first, and waits", PREFACE.unpack(wire.preface) == (MAGIC, 1, 1, 0, 65536, 65536) and wire.silent(), wire.preface)
    wire.put(PREFACE.pack(MAGIC, 1, 1, 2, 1024, 0))
    client.expect("state 2")
    client.say("7 Echo hello")
    check("B9: REQUEST", wire.get() == (REQUEST, 1, 1, b"hello"))
    wire.put(frame(RESPONSE, 1), frame(MESSAGE, 1, body=b"hello"), frame(END, 1, 0, bytes(2)))
    got = [client.expect(word) for word in ("admitted", "message", "end")]
    check("B10.2: RESPONSE, MESSAGE, END", got == ["admitted 7", "message 7 5 68656c6c6f", "end 7 0 0 "], got)
    client.say("8 Refuse x")
    check("B10.1: numbers count up", wire.get()[1] == 2)
    wire.put(frame(200, 3, 4, b"later versions", flags=9), frame(END, 2, 9, b"\x05\0producer changed"))
    check("B10.2: a refusal", client.expect("end") == "end 8 9 5 producer changed")
    client.say("9 Count x")
    wire.get()
    wire.put(frame(RESPONSE, 3), *[frame(MESSAGE, 3, body=bytes(10000))] * 4)
    got = wire.get()
    check("B10.4: CREDIT once half is used", got == (CREDIT, 3, 0, struct.pack("<I", 40048)), got)
    client.say("cancel 9")
    check("B10.3: CANCEL", wire.get() == (CANCEL, 3, 0, b""))
    wire.put(frame(MESSAGE, 3, body=b"too late"), frame(END, 3, 1, bytes(2)))
    client.say("10 Silent")
    client.say("11 Silent")
    client.say("12 Silent")
    check("B10.7: the server's max_streams is kept", client.expect("refused 12").startswith("refused 12 "))
    told = [line.split()[0] for line in client.passed if line.split()[1] == "9"]
    check("B10.3: nothing is told of what was cancelled", told == ["admitted"] + 4 * ["message"], told)
    found = wire.until(PING)
    check("B11.5: a PING after silence", [one[0] for one in found] == [REQUEST, REQUEST, PING], found)
    wire.put(frame(PONG, body=found[-1][3]), frame(PING, body=b"abcdefgh"))
    check("B9: PONG has the same bytes", wire.until(PONG)[-1][3] == b"abcdefgh")
    wire.sock.close()
    got = [client.expect("end") for _ in range(2)]
    check("B11.10: end of the connection without END: status 14, no reason", sorted(line.split()[1:4] for line in got) == [["10", "14", "0"], ["11", "14", "0"]], got)


def client_errors(client):
    response = frame(RESPONSE, 1)
    cases = {
        "REQUEST from the server": frame(REQUEST, 1, 1),
        "CREDIT from the server": credit(1, 1),
        "CANCEL from the server": frame(CANCEL, 1),
        "a message before RESPONSE": frame(MESSAGE, 1, body=b"x"),
        "RESPONSE twice": response + response,
        "RESPONSE with a body": frame(RESPONSE, 1, body=b"x"),
        "a stream that is not open": frame(RESPONSE, 2),
        "stream 0": frame(RESPONSE, 0),
        "END of 1 byte": frame(END, 1, body=b"x"),
        "END with status 17": frame(END, 1, 17, bytes(2)),
        "END with 1 025 bytes of text": frame(END, 1, 2, bytes(2) + b"x" * 1025),
        "something behind END": frame(END, 1, 0, bytes(2)) + frame(MESSAGE, 1, body=b"x"),
        "a message beyond the credit": response + frame(MESSAGE, 1, body=bytes(40000)) * 4 + frame(PING, body=bytes(8)),
    }
    for name, bad in cases.items():
        wire = client.ready()
        client.say("1 Echo x")
        wire.get()
        wire.put(bad)
        if name == "a message beyond the credit":  # it gives more as it reads: that one is no error
            check("B10.4: the client gives credit as it reads", wire.until(PONG)[-1] is not None)
            wire.sock.close()
            client.lost()
            continue
        found = wire.until(GOAWAY)
        check(f"B9, B11.7: {name} is a protocol error to the client", found[-1] is not None and found[-1][2] == 2, found)
        wire.sock.close()
        client.lost()
    wire = client.ready()
    client.say("1 Echo x")
    wire.get()
    wire.put(response, HEADER.pack(65537, 1, MESSAGE, 0, 0))
    found = wire.until(GOAWAY)
    check("B11.1: a body above the client's max_frame: GOAWAY 4", found[-1] is not None and found[-1][2] == 4, found)
    wire.sock.close()
    client.lost()
    wire = client.ready()
    client.say("1 Echo x")
    wire.get()
    wire.put(response, frame(MESSAGE, 1, body=b"whole"), frame(MESSAGE, 1, body=b"cut")[:-1])
    wire.sock.close()
    got = client.expect("end")
    messages = [line for line in client.passed if line.startswith("message")]
    check("B11.8: a message cut by the end is none, never a short one", len(messages) == 1 and got.startswith("end 1 14 0"), (messages, got))
    client.lost()


def client_prefaces(client):
    for name, preface, words in (
        ("version 0", (MAGIC, 0, 2, 1, 65536, 0), "versions"),
        ("a version it does not speak", (MAGIC, 2, 1, 1, 65536, 0), "versions"),
        ("max_frame below 1 024", (MAGIC, 1, 1, 1, 1023, 0), "range"),
        ("another protocol", (b"HTTP", 1, 1, 1, 65536, 0), "not the raw transport"),
    ):
        client.accept(preface)
        got = client.lost()
        check(f"B8: {name} is told", words in got, got)
    wire = client.ready((MAGIC, 1, 1, 0, 1024, 77))
    client.say("1 Echo x")
    check("B8: the server's credit is ignored, its max_streams of 0 kept", client.expect("refused 1").startswith("refused 1 "))
    wire.put(frame(GOAWAY, aux=3, body=bytes(4) + b"too many pings"))
    got = client.lost()
    check("B11.6: GOAWAY 3 ends the connection with its text", "too many pings" in got, got)
    wire = client.ready()
    client.say("1 Silent x")
    wire.get()
    wire.put(frame(RESPONSE, 1), frame(GOAWAY, aux=1, body=b"\x01\0\0\0shutdown"))
    client.expect("admitted")
    time.sleep(0.1)
    client.say("2 Echo x")
    check("B11.9: no calls after GOAWAY", client.expect("refused 2").startswith("refused 2 "))
    wire.put(frame(MESSAGE, 1, body=b"x"), frame(END, 1, 0, bytes(2)))
    check("B11.9: the open ones end as they do", client.expect("end") == "end 1 0 0 ")
    check("B11.9: then it connects again", client.ready() is not None)


# ---- over TLS ----


folder = tempfile.TemporaryDirectory(prefix="kvrelay-raw-")


def path(name):
    return os.path.join(folder.name, name)


def make_certs():
    certs.make(folder.name, "ca", ca=True)
    certs.make(folder.name, "other", ca=True)
    certs.make(folder.name, "server", "ca", "IP:127.0.0.1,DNS:localhost")
    certs.make(folder.name, "client", "ca", "URI:spiffe://example/router")
    certs.make(folder.name, "stranger", "other", "URI:spiffe://example/router")


def files(name):
    return [f"cert={path(name + '.pem')}", f"key={path(name + '.key')}"]


def context(side, name=None, protocols=(PROTOCOL,), ca="ca", version=ssl.TLSVersion.TLSv1_3):
    """One side of ssl, which trusts `ca`: a server asks clients for certificates when it does."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "server" else ssl.PROTOCOL_TLS_CLIENT)
    made.maximum_version = version
    if name:
        made.load_cert_chain(path(name + ".pem"), path(name + ".key"))
    if ca:
        made.load_verify_locations(path(ca + ".pem"))
        made.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        made.set_alpn_protocols(list(protocols))
    return made


def served(server, tls):
    """The protocol agreed on when Echo is answered, or what ended it."""
    try:
        server.tls = tls
        wire = server.connect()
        wire.put(frame(REQUEST, 1, ECHO, b"hello"))
        answered = [one and one[0] for one in wire.until(END)] == [RESPONSE, MESSAGE, END]
        return wire.sock.selected_alpn_protocol() if answered else "no answer"
    except (ssl.SSLError, OSError, TypeError, struct.error) as error:  # closed where a preface should be
        return f"failed: {error}"


def tls_server():
    with Server(*files("server")) as server:
        got = served(server, context("client"))
        check("B12: TLS, ALPN kvrelay-raw/1", got == PROTOCOL, got)
        got = served(server, context("client", version=ssl.TLSVersion.TLSv1_2))
        check("B12: TLS 1.2", got == PROTOCOL, got)
        got = served(server, context("client", protocols=()))
        check("B12: without ALPN the server goes by its configuration", got is None, got)
        got = served(server, context("client", protocols=("h2",)))
        check("B12: ALPN without this protocol is refused", "failed" in str(got), got)
        got = server.expect("log ")
        check("B12: and logged", "none of our protocols" in got, got)
        plain = socket.create_connection(server.address)
        plain.sendall(PREFACE.pack(MAGIC, 1, 1, 0, 65536, 1))
        check("B12: plaintext hears an alert of TLS", Wire(plain).read(1, 5) == b"\x15")
        got = server.expect("log ")
        check("B12: which is logged", "plaintext on a TLS port" in got, got)
        server.tls = context("client")
        streams(server)
        protocol_errors(server)
        wire = server.connect(initial_credit=(1 << 31) - 1, max_frame=1 << 26)
        wire.put(frame(REQUEST, 1, COUNT, b"4 2000000"))
        found = wire.until(END, 20)
        check("B12: messages of 2 MB", [len(one[3]) for one in found[1:-1]] == 4 * [2000000] and found[2][3][:3] == b"\1\2\3", len(found))


def tls_mutual():
    with Server(*files("server"), f"ca={path('ca.pem')}") as server:
        for name, good in (("client", True), (None, False), ("stranger", False)):
            got = served(server, context("client", name))
            check(f"B12: certificates demanded, the client shows {name or 'none'}", (got == PROTOCOL) == good, got)
        log = [server.expect("log ") for _ in range(2)]
        check("B12: what was wrong is logged", "shows no certificate" in log[0] and "not trusted" in log[1], log)


def tls_client():
    trust = f"ca={path('ca.pem')}"
    for test in (client_calls, client_errors):
        with Client(trust, tls=context("server", "server", ca=None)) as client:
            test(client)

    def refused(name, words, tls, *arguments, host="127.0.0.1"):
        with Client(*arguments, tls=tls, host=host) as client:
            try:
                client.accept(None)
            except (ssl.SSLError, OSError, AttributeError):
                pass  # it hears of it, or not, as TLS has it
            got = client.lost()
            check(f"B12: the client refuses {name}", words in got, got)

    refused("a server without ALPN", "names no protocol", context("server", "server", (), ca=None), trust)
    refused("a server with another ALPN", "names no protocol", context("server", "server", ("h2",), ca=None), trust)
    refused("another authority", "not trusted", context("server", "server", ca=None), f"ca={path('other.pem')}")
    refused("a certificate for another host", "another host", context("server", "client", ca=None), trust)
    with Client(trust, *files("client"), tls=context("server", "server"), host="localhost") as client:
        wire = client.ready()
        check("B12: the client shows its certificate", ("URI", "spiffe://example/router") in wire.sock.getpeercert()["subjectAltName"])
        check("B12: and names whom it means", wire.sock.selected_alpn_protocol() == PROTOCOL)
    with Client(trust, tls=context("server", "server", version=ssl.TLSVersion.TLSv1_2)) as client:
        try:
            client.accept(None)
            check("B12: without its certificate the client is refused", False)
        except ssl.SSLError:
            got = client.lost()
            check("B12: without its certificate the client is refused", "alert" in got, got)


def small_frames():
    """A client that takes no large frame gets its snapshot in chunks that it takes; 8 bytes a bucket, 4 096 of them in 65 536."""
    marker = 1263948337
    wires = []  # which nobody closes: the daemon stops all the same
    with Daemon(pool_yaml([(7, 0, 1, ["type: engine", "endpoint: tcp://127.0.0.1:1"])]).replace("blocks: 1000", "blocks: 131072"), "--raw-bind", "127.0.0.1:00") as daemon:
        host, port = daemon.wait_for(r"transport=raw address=(\S+)").group(1).rsplit(":", 1)
        for max_frame, chunks in ((65536, 16), (65770, 8), (8 << 20, 1)):
            wire = Wire(socket.create_connection((host, int(port))))
            wires.append(wire)
            wire.put(PREFACE.pack(MAGIC, 1, 1, 0, max_frame, WINDOW), frame(REQUEST, 1, 2, pb.WatchKvPoolCatalogRequest(
                subscriber_id="raw", contract_marker=marker).SerializeToString()))
            wire.read(16, 5)
            catalog = pb.KvPoolCatalogUpdate.FromString(wire.until(MESSAGE)[-1][3])
            wire.put(frame(REQUEST, 2, 3, pb.SubscribeKvPoolRequest(subscriber_id="raw", contract_marker=marker,
                                                                    expected_producer=catalog.snapshot.pools[0].producer).SerializeToString()))
            got = [wire.until(MESSAGE)[-1] for _ in range(chunks)]
            sizes = [len(pb.FilterUpdate.FromString(one[3]).payload) for one in got]
            check(f"B11.2: {chunks} chunks within frames of {max_frame}", sum(sizes) == 65536 * 8 + chunks * (sizes[0] - 65536 * 8 // chunks)
                  and max(len(one[3]) for one in got) <= max_frame and len(set(sizes)) == 1, sizes)
            check(f"B11.2: and no more, {max_frame}", wire.silent())
        check("B11.9: clients that hold on do not hold up the stop", daemon.stop() == 0)


def main():
    make_certs()
    with Server("max_streams=320") as server:
        examples(server)
    with Server() as server:
        prefaces(server)
        protocol_errors(server)
        streams(server)
        counts = server.counts()
        check("no call is left", counts[3] == 0, counts)
    limits()
    small_frames()
    drain()
    a_thousand()
    for test in (client_calls, client_errors, client_prefaces):
        with Client() as client:
            test(client)
    tls_server()
    tls_mutual()
    tls_client()
    finish()


if __name__ == "__main__":
    main()
