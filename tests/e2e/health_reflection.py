#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Health and reflection of kvrelayd as stock clients see them: grpcio, and curl as a probe without stubs."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BUILD, Daemon, check, finish, pool_yaml  # noqa: E402

import grpc  # noqa: E402
import health_pb2 as health  # noqa: E402
import kvrelay_pb2  # noqa: E402
import reflection_pb2 as reflection  # noqa: E402
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: E402

RELAY = "dynamo.kvrelay.v1.KvEventRelay"
HEALTH = "grpc.health.v1.Health"
V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
FILES = {
    "kvrelay.proto": "dynamo.kvrelay.v1",
    "grpc/health/v1/health.proto": "grpc.health.v1",
    "grpc/reflection/v1/reflection.proto": "grpc.reflection.v1",
    "grpc/reflection/v1alpha/reflection.proto": "grpc.reflection.v1alpha",
}
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
Code = grpc.StatusCode
YAML = pool_yaml([(7, 0, 1, ["type: none"])])


def code_of(action):
    """Status and text of a call."""
    try:
        action()
        return Code.OK, ""
    except grpc.RpcError as error:
        return error.code(), error.details()


# ---- health ----


class Health:
    def __init__(self, channel):
        def stub(kind, method, request, response):
            return kind(f"/{HEALTH}/{method}", request_serializer=request.SerializeToString, response_deserializer=response.FromString)

        self.raw = channel
        self.check_stub = stub(channel.unary_unary, "Check", health.HealthCheckRequest, health.HealthCheckResponse)
        self.watch_stub = stub(channel.unary_stream, "Watch", health.HealthCheckRequest, health.HealthCheckResponse)
        self.list_stub = stub(channel.unary_unary, "List", health.HealthListRequest, health.HealthListResponse)

    def check(self, service):
        return self.check_stub(health.HealthCheckRequest(service=service), timeout=10).status

    def watch(self, service, timeout=60):
        return self.watch_stub(health.HealthCheckRequest(service=service), timeout=timeout)

    def list(self):
        return {name: answer.status for name, answer in self.list_stub(health.HealthListRequest(), timeout=10).statuses.items()}


def health_calls(daemon, channel):
    h = Health(channel)
    check("S80: the server and the relay are SERVING", (h.check(""), h.check(RELAY)) == (SERVING, SERVING))
    for name in ("nobody", RELAY.lower(), RELAY + ".", "x" * 1000):
        got = code_of(lambda name=name: h.check(name))[0]
        check(f"S80: Check of the unknown name {name[:40]!r} is NOT_FOUND", got == Code.NOT_FOUND, got)
    check("S82: List knows both", h.list() == {"": SERVING, RELAY: SERVING}, h.list())
    raw = channel.unary_unary(f"/{HEALTH}/Check")
    got = code_of(lambda: raw(b"\x0a\x05ab", timeout=10))[0]
    check("S80: a request that does not decode is INTERNAL", got == Code.INTERNAL, got)
    got = code_of(lambda: raw(b"\x0a\x02\xc3\x28", timeout=10))[0]
    check("S80: a name that is not UTF-8 is INTERNAL", got == Code.INTERNAL, got)
    got = raw(b"\x12\x03abc\x0a\x00", timeout=10)
    check("S80: an unknown field changes nothing", got == b"\x08\x01", got)
    for method in ("Nope", "check", "Check/", ""):
        got = code_of(lambda method=method: channel.unary_unary(f"/{HEALTH}/{method}")(b"", timeout=10))[0]
        check(f"S80: method {method!r} is UNIMPLEMENTED", got == Code.UNIMPLEMENTED, got)
    check_and_watch_limits(h)
    probe(daemon)


def check_and_watch_limits(h):
    calls = [h.watch(RELAY if i % 2 else "later") for i in range(64)]
    first = [next(call).status for call in calls]
    check("S81: 64 watchers get their first answer at once", first == [SERVICE_UNKNOWN, SERVING] * 32, first)
    check("S81: an unknown name keeps its stream", all(call.is_active() for call in calls))
    got = code_of(lambda: next(h.watch("")))[0]
    check("S84: the 65th watcher is RESOURCE_EXHAUSTED", got == Code.RESOURCE_EXHAUSTED, got)
    stub = h.raw.unary_stream(
        "/dynamo.kvrelay.v1.KvEventRelay/WatchKvPoolCatalog",
        request_serializer=kvrelay_pb2.WatchKvPoolCatalogRequest.SerializeToString,
        response_deserializer=kvrelay_pb2.KvPoolCatalogUpdate.FromString,
    )
    request = kvrelay_pb2.WatchKvPoolCatalogRequest(subscriber_id="s", contract_marker=0x4B565231)
    got = code_of(lambda: next(stub(request, timeout=10)))
    check("S84: watchers take no stream from the relay", got[0] == Code.OK, got)
    for call in calls:
        call.cancel()
    deadline = time.monotonic() + 10
    while True:  # the server hears of the ends a little later
        call = h.watch("")
        got = code_of(lambda: next(call))[0]
        if got == Code.OK or time.monotonic() > deadline:
            break
    check("S84: cancelled watchers make room", got == Code.OK, got)
    call.cancel()


def probe(daemon):
    """What a kubelet does: one Check of "", no metadata worth mentioning."""
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0\0\0\0\0")
        body.flush()
        url = f"http://{daemon.address}/{HEALTH}/Check"
        command = ["curl", "-sv", "--http2-prior-knowledge", "-H", "content-type: application/grpc", "--data-binary", "@" + body.name, "-o", "-", url]
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    check("S83: a bare probe is answered", done.stdout == b"\0\0\0\0\2\x08\x01" and b"grpc-status: 0" in done.stderr, done)


def shutdown():
    """NOT_SERVING is the first thing that a stopping daemon says, and then its streams end."""
    daemon = Daemon(YAML)
    with daemon:
        with grpc.insecure_channel(daemon.address) as channel:
            h = Health(channel)
            calls = {name: h.watch(name) for name in ("", RELAY, "other")}
            first = {name: next(call).status for name, call in calls.items()}
            check("S81: before the end", first == {"": SERVING, RELAY: SERVING, "other": SERVICE_UNKNOWN}, first)
            questions = queue.Queue()
            asked = Reflection(channel, V1).ask(iter(questions.get, None))
            questions.put(reflection.ServerReflectionRequest(list_services="*"))
            next(asked)
            begin = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            rest = {name: [answer.status for answer in call] for name, call in calls.items()}
            check("S44, S81: each watcher hears of the end once", rest == {"": [NOT_SERVING], RELAY: [NOT_SERVING], "other": []}, rest)
            codes = [call.code() for call in calls.values()] + [asked.code() if list(asked) == [] else None]
            check("S44: watchers and reflection end with OK", set(codes) == {Code.OK}, codes)
            questions.put(None)
            code = daemon.process.wait(10)
            took = time.monotonic() - begin
            check("S44: nobody has to wait for the end", code == 0 and took < 1.5, (code, took))


def probes_alone():
    """A second listener that knows nothing but health."""
    with Daemon(YAML, "--health-bind", "127.0.0.1:0") as daemon:
        address = daemon.wait_for(r"event=listening transport=health address=(\S+)").group(1)
        with grpc.insecure_channel(address) as channel:
            check("S83: a listener for probes alone answers Check", Health(channel).check("") == SERVING)
            other = channel.unary_unary("/dynamo.kvrelay.v1.KvEventRelay/GetRelayInfo")
            got = code_of(lambda: other(b"\xfd\x07\x31\x52\x56\x4b", timeout=10))[0]
            check("S83: and nothing else", got == Code.UNIMPLEMENTED, got)
            call = Health(channel).watch(RELAY)
            next(call)
            daemon.process.send_signal(signal.SIGTERM)
            got = [answer.status for answer in call]
            check("S83: it tells the end as well", got == [NOT_SERVING] and call.code() == Code.OK, (got, call.code()))
            check("S83: and ends", daemon.process.wait(10) == 0)
    with Daemon(YAML.replace("  bind: 127.0.0.1:0\n", ""), "--health-bind", "127.0.0.1:0") as daemon:
        address = daemon.wait_for(r"event=listening transport=health address=(\S+)").group(1)
        with grpc.insecure_channel(address) as channel:
            check("S83: without a listener of the relay too", Health(channel).check(RELAY) == SERVING)


# ---- reflection ----


class Reflection:
    def __init__(self, channel, service):
        self.stub = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=reflection.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection.ServerReflectionResponse.FromString,
        )

    def ask(self, questions, timeout=30):
        return self.stub(questions, timeout=timeout)

    def one(self, **question):
        request = reflection.ServerReflectionRequest(**question)
        (answer,) = self.ask(iter([request]))
        return answer

    def file(self, **question):
        answer = self.one(**question)
        (data,) = answer.file_descriptor_response.file_descriptor_proto
        return descriptor_pb2.FileDescriptorProto.FromString(data)


def every_symbol(file):
    """Full names of all things in a file, as its descriptor in a pool of its own has them."""
    pool = descriptor_pool.DescriptorPool()
    found = pool.Add(file) or pool.FindFileByName(file.name)
    names = []

    def enum(e):
        scope = e.full_name.rpartition(".")[0]
        names.extend([e.full_name] + [f"{scope}.{value.name}" for value in e.values])

    def message(m):
        names.append(m.full_name)
        names.extend(field.full_name for field in m.fields)
        names.extend(f"{m.full_name}.{o.name}" for o in m.oneofs)
        for nested in m.nested_types:
            message(nested)
        for e in m.enum_types:
            enum(e)

    for service in found.services_by_name.values():
        names.extend([service.full_name] + [method.full_name for method in service.methods])
    for m in found.message_types_by_name.values():
        message(m)
    for e in found.enum_types_by_name.values():
        enum(e)
    return names


def reflection_calls(channel, service):
    r = Reflection(channel, service)
    got = [s.name for s in r.one(list_services="").list_services_response.service]
    check(f"S90: {service} lists what is served", got == [RELAY, HEALTH, V1, V1ALPHA], got)
    symbols = {}
    for name, package in FILES.items():
        file = r.file(file_by_filename=name)
        check(f"S94: {service} has {name}", (file.name, file.package) == (name, package), file.package)
        symbols.update((symbol, name) for symbol in every_symbol(file))
    questions = [reflection.ServerReflectionRequest(file_containing_symbol=s) for s in symbols]
    answers = list(r.ask(iter(questions)))
    found = [descriptor_pb2.FileDescriptorProto.FromString(a.file_descriptor_response.file_descriptor_proto[0]).name for a in answers]
    check(f"S93, S94: {service} finds all {len(symbols)} symbols in one stream, in order", found == list(symbols.values()), len(found))
    same = [a.original_request for a in answers] == questions
    check("S92: each answer carries its question", same)
    for question in (
        {"file_containing_symbol": "dynamo.kvrelay.v1.Nothing"},
        {"file_containing_symbol": ""},
        {"file_containing_symbol": "dynamo.kvrelay.v1"},
        {"file_containing_symbol": "." + RELAY},
        {"file_containing_symbol": RELAY + "\0"},
        {"file_containing_symbol": "\U0010ffff" * 100},
        {"file_by_filename": "health.proto"},
        {"file_by_filename": ""},
        {"file_containing_extension": {"containing_type": "dynamo.kvrelay.v1.RelayInfo", "extension_number": 1}},
        {"all_extension_numbers_of_type": "dynamo.kvrelay.v1.RelayInfo"},
    ):
        answer = r.one(host="h.example", **question)
        good = answer.error_response.error_code == 5 and answer.error_response.error_message and answer.valid_host == "h.example"
        check(f"S93: {str(question)[:60]} is NOT_FOUND inside the stream", good and answer.original_request == reflection.ServerReflectionRequest(host="h.example", **question), answer)
    got = r.one(host="only").error_response.error_code
    check("S91: a question that asks nothing is INVALID_ARGUMENT inside the stream", got == 3, got)
    check("S93: a half-close without questions is OK", list(r.ask(iter([]))) == [])
    raw = channel.stream_stream(f"/{service}/ServerReflectionInfo")
    got = code_of(lambda: list(raw(iter([b"\x22\x7f"]), timeout=10)))[0]
    check("S93: what does not decode ends the stream with INTERNAL", got == Code.INTERNAL, got)
    got = code_of(lambda: list(channel.stream_stream(f"/{service}/Nope")(iter([]), timeout=10)))[0]
    check(f"S90: another method of {service} is UNIMPLEMENTED", got == Code.UNIMPLEMENTED, got)
    conversation(r)


def conversation(r):
    to_send = queue.Queue()
    call = r.ask(iter(to_send.get, None))
    call.initial_metadata()  # comes although nothing was asked
    got = []
    for name in list(FILES) * 5:
        to_send.put(reflection.ServerReflectionRequest(file_by_filename=name))
        data = next(call).file_descriptor_response.file_descriptor_proto[0]
        got.append(descriptor_pb2.FileDescriptorProto.FromString(data).name)
    to_send.put(None)
    check("S93: questions and answers in step, then OK", got == list(FILES) * 5 and list(call) == [] and call.code() == Code.OK)


def reflection_bounds(channel):
    r = Reflection(channel, V1)
    queues = [queue.Queue() for _ in range(64)]
    calls = [r.ask(iter(q.get, None)) for q in queues]
    for call in calls:
        call.initial_metadata()
    got = code_of(lambda: list(r.ask(iter([]))))[0]
    check("S93: the 65th stream is RESOURCE_EXHAUSTED", got == Code.RESOURCE_EXHAUSTED, got)
    for q in queues:
        q.put(None)
    check("S93: the others are fine", [list(call) for call in calls] == [[]] * 64)


def from_descriptors_alone(channel):
    """A client that has no file of ours: everything it needs comes from the server, or from the protoset."""
    r = Reflection(channel, V1ALPHA)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(r.file(file_containing_symbol=RELAY + ".GetRelayInfo"))
    method = pool.FindServiceByName(RELAY).methods_by_name["GetRelayInfo"]
    request, response = (message_factory.MessageFactory(pool).GetPrototype(t) for t in (method.input_type, method.output_type))
    stub = channel.unary_unary(f"/{RELAY}/GetRelayInfo", request_serializer=request.SerializeToString, response_deserializer=response.FromString)
    answer = stub(request(contract_marker=0x4B565231), timeout=10)
    check("S94: reflection is enough to call the relay", answer.contract_marker == 0x4B565231, answer)
    with open(os.path.join(BUILD, "kvrelay.protoset"), "rb") as file:
        protoset = descriptor_pb2.FileDescriptorSet.FromString(file.read())
    served = [r.file(file_by_filename=file.name) for file in protoset.file]
    check("S95: the protoset holds what the server says", list(protoset.file) == served and sorted(f.name for f in served) == sorted(FILES))


def main():
    with Daemon(YAML) as daemon, grpc.insecure_channel(daemon.address) as channel:
        health_calls(daemon, channel)
        for service in (V1, V1ALPHA):
            reflection_calls(channel, service)
        reflection_bounds(channel)
        from_descriptors_alone(channel)
    shutdown()
    probes_alone()
    finish()


main()
