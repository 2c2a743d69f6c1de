# SPDX-License-Identifier: Apache-2.0
"""What a relay says on every plane, held for comparison: stock grpcio, protoc's classes, and replicas of our own reading."""

import re
import threading
import time

from support.reading import Replica

import grpc
import kvrelay_pb2 as pb

MARKER = 0x4B565231
SERVICE = "/dynamo.kvrelay.v1.KvEventRelay/"
UNLIMITED = [("grpc.max_receive_message_length", -1)]

# What two relays may say differently of the same thing, and why. A path ends as written here.
FREE = {
    "relay.drt_instance_id": "drawn at the start of a relay's host",
    "relay.relay_incarnation": "drawn at the start of a relay",
    "producer.producer_incarnation": "drawn when a pool is built",
    "producer.layout_generation": "counts how often that relay laid the pool out, and ours is started anew for a new topology",
    "revision": "counts changes from the start of a relay, and both choose which changes go together",
    "window_sequence": "counts load windows from the start of a relay",
    "observed_ms": "the time of the window",
}


def place(endpoint):
    return f"{endpoint.namespace}/{endpoint.component}/{endpoint.endpoint}"


def fields(message, path=""):
    """Every field of a message by its path, defaults too; an absent one is None."""
    found = {}
    for field in message.DESCRIPTOR.fields:
        name = f"{path}.{field.name}" if path else field.name
        value = getattr(message, field.name)
        if field.label == field.LABEL_REPEATED:
            found[name + ".length"] = len(value)
            for i, item in enumerate(value):
                found.update(fields(item, f"{name}[{i}]") if field.message_type else {f"{name}[{i}]": item})
        elif field.has_presence and not message.HasField(field.name):
            found[name] = None
        else:
            found.update(fields(value, name) if field.message_type else {name: value})
    return found


def is_free(path):
    plain = re.sub(r"\[\d+\]", "", path)
    return any(plain == name or plain.endswith("." + name) for name in FREE)


def differences(real, ours):
    """Empty when both say the same but for what is free."""
    a, b = fields(real), fields(ours)
    return [f"{path}: {a.get(path)!r}, ours {b.get(path)!r}" for path in sorted({*a, *b}) if not is_free(path) and a.get(path, "-") != b.get(path, "-")]


class View:
    """Follows one relay: the newest message of each plane, and a replica of each pool."""

    PLANES = {
        "catalog": ("WatchKvPoolCatalog", pb.WatchKvPoolCatalogRequest, pb.KvPoolCatalogUpdate),
        "readiness": ("SubscribeServingReadiness", pb.SubscribeServingReadinessRequest, pb.ServingReadinessUpdate),
        "load": ("SubscribeKvPoolLoad", pb.SubscribeKvPoolLoadRequest, pb.KvPoolLoadUpdate),
    }

    def __init__(self, address):
        self.address = address
        self.channel = grpc.insecure_channel(address, options=UNLIMITED)
        grpc.channel_ready_future(self.channel).result(60)
        self.newest, self.replicas, self.errors, self.calls = {}, {}, [], []
        self.changed = threading.Condition()
        self.changed_at = time.monotonic()
        for plane, (method, request, reply) in self.PLANES.items():
            self.follow(method, request(subscriber_id="side-by-side", contract_marker=MARKER), reply, lambda m, plane=plane: self.hold(plane, m))

    def follow(self, method, request, reply, take):
        call = self.channel.unary_stream(SERVICE + method, request_serializer=lambda m: m.SerializeToString(), response_deserializer=reply.FromString)(request)
        self.calls.append(call)

        def run():
            try:
                for message in call:
                    take(message)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.CANCELLED:
                    self.errors.append(f"{method}: {error.code().name} {error.details()}")
            except AssertionError as error:
                self.errors.append(f"{method}: broken rule: {error}")

        threading.Thread(target=run, daemon=True).start()

    def touch(self):
        self.changed_at = time.monotonic()
        self.changed.notify_all()

    def hold(self, plane, message):
        with self.changed:
            first = plane not in self.newest
            self.newest[plane] = message
            if plane != "load" or first:
                self.touch()

    def follow_pools(self):
        """A replica of every pool that is in the catalog now."""
        for pool in self.pools():
            replica = self.replicas[place(pool.serving_endpoint)] = Replica(pool.producer)

            def take(update, replica=replica):
                with self.changed:
                    replica.absorb(update)
                    if update.kind != 3:
                        self.touch()

            request = pb.SubscribeKvPoolRequest(subscriber_id="side-by-side", expected_producer=pool.producer, contract_marker=MARKER)
            self.follow("SubscribeKvPool", request, pb.FilterUpdate, take)
        self.until(lambda: all(replica.live for replica in self.replicas.values()))

    def until(self, good, timeout_s=30):
        """Whether it came true in time."""
        with self.changed:
            return self.changed.wait_for(good, timeout_s)

    def quiet(self, seconds=1.0, timeout_s=30):
        """Until nothing but heartbeats and load windows came for some time from now."""
        began = time.monotonic()
        while max(self.changed_at, began) + seconds > time.monotonic() < began + timeout_s:
            time.sleep(0.05)

    def pools(self):
        return self.newest["catalog"].snapshot.pools if "catalog" in self.newest else []

    def next_window(self):
        """The second load window from now: nothing in it is from before."""
        with self.changed:
            after = self.newest["load"].window_sequence + 2
        deadline = time.monotonic() + 10
        while self.newest["load"].window_sequence < after and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.newest["load"]

    def close(self):
        for call in self.calls:
            call.cancel()
        self.channel.close()
