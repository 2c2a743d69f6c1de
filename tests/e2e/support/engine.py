# SPDX-License-Identifier: Apache-2.0
"""An engine's event publisher: pyzmq PUB with the three frames, and a small msgpack writer of its own."""

import struct
import threading
import time

import zmq


def pack(value):
    """msgpack of None, bool, int, float, str, bytes, list and dict."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        if -32 <= value < 0:
            return struct.pack("b", value)
        return b"\xcf" + struct.pack(">Q", value) if value >= 0 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return b"\xdb" + struct.pack(">I", len(data)) + data
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, (list, tuple)):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
    return b"\xdf" + struct.pack(">I", len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())


def stored(hashes, tokens, block_size, parent=None, **more):
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": block_size}
    return dict(event, **more)


def removed(hashes, **more):
    return dict({"type": "BlockRemoved", "block_hashes": hashes}, **more)


CLEARED = {"type": "AllBlocksCleared"}


class Engine:
    """One publisher; `subscribed` waits until somebody listens, so that nothing is lost on the way."""

    def __init__(self, endpoint="tcp://127.0.0.1:*"):
        self.context = zmq.Context()
        self.context.setsockopt(zmq.IPV6, 1)
        self.socket = self.context.socket(zmq.XPUB)  # a PUB that shows its subscriptions
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self.sequence = 0

    def subscribed(self, timeout_s=20):
        if not self.socket.poll(int(timeout_s * 1000)):
            raise RuntimeError("nobody subscribed")
        return self.socket.recv()

    def send_frames(self, frames):
        self.socket.send_multipart(frames)

    def send_payload(self, payload, topic=b""):
        self.send_frames([topic, struct.pack(">Q", self.sequence), payload])
        self.sequence += 1

    def send(self, events, rank=0):
        self.send_payload(pack([time.time(), events, rank]))

    def lose(self, events, rank=0):
        """A batch that the subscriber never gets, and that waits for a replay."""
        publisher, self.send_frames = self.send_frames, lambda frames: None
        self.send(events, rank)
        self.send_frames = publisher

    def close(self):
        self.socket.close()
        self.context.term()


class ReplayEngine(Engine):
    """An engine that keeps what it published. `faults` are functions of the list of replies to one request, taken in
    turn, that give the list that is sent; then nothing goes wrong any more."""

    END = struct.pack(">Q", 2**64 - 1)

    def __init__(self, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topics=True, high_water=1000):
        super().__init__(endpoint)
        self.buffer = []
        self.requests = []
        self.faults = []
        self.topics = topics
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.SNDHWM, high_water)
        self.router.bind(replay_endpoint)
        self.replay_endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self.closing = False
        self.server = threading.Thread(target=self.serve)
        self.server.start()

    def send_payload(self, payload, topic=b""):
        self.buffer.append((self.sequence, payload))
        super().send_payload(payload, topic)

    def serve(self):
        while not self.closing:
            if not self.router.poll(20):
                continue
            frames = self.router.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                continue  # as the engines do
            (first,) = struct.unpack(">Q", frames[2])
            self.requests.append(first)
            replies = [(struct.pack(">Q", n), payload) for n, payload in list(self.buffer) if n >= first]
            replies.append((self.END, b""))
            if self.faults:
                replies = self.faults.pop(0)(replies)
            for sequence, payload in replies:
                self.router.send_multipart([frames[0], b""] + ([b""] if self.topics else []) + [sequence, payload])

    def close(self):
        self.closing = True
        self.server.join()
        self.router.close()
        super().close()
