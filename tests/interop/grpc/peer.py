#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""gRPC's official interop cases with stock grpcio, any version, on either side.

    peer.py client ADDRESS [CASE…]   a line "ok - CASE" or "not ok - CASE: why" for each; all cases without names
    peer.py server                   prints "listening ADDRESS" and serves until its standard input ends; a line "stop" there
                                     stops the server in order, and another takes its place

KVRELAY_BUILD names the build folder, which has the protobuf classes. INTEROP_TLS, a folder, asks for TLS: it has ca.pem, and
server.pem and .key; with client.pem and .key, clients show these and servers ask for them.
"""

import os
import queue
import sys
from concurrent import futures

sys.path.insert(0, os.path.join(os.environ["KVRELAY_BUILD"], "tests", "python"))

import grpc  # noqa: E402
import testing_pb2 as pb  # noqa: E402

Code = grpc.StatusCode
INITIAL, TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
METADATA = ((INITIAL, "test_initial_metadata_value"), (TRAILING, b"\xab\xab\xab"))
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
UP, DOWN = (27182, 8, 1828, 45904), (31415, 9, 2653, 58979)
METHODS = {
    "EmptyCall": ("unary_unary", pb.Empty, pb.Empty),
    "UnaryCall": ("unary_unary", pb.SimpleRequest, pb.SimpleResponse),
    "StreamingOutputCall": ("unary_stream", pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse),
    "StreamingInputCall": ("stream_unary", pb.StreamingInputCallRequest, pb.StreamingInputCallResponse),
    "FullDuplexCall": ("stream_stream", pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse),
    "HalfDuplexCall": ("stream_stream", pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse),
    "UnimplementedCall": ("unary_unary", pb.Empty, pb.Empty),
}
GZIP, PLAIN = grpc.Compression.Gzip, grpc.Compression.NoCompression


def zeros(size):
    return pb.Payload(body=bytes(size))


def output(*sizes, up=0, **more):
    return pb.StreamingOutputCallRequest(response_parameters=[pb.ResponseParameters(size=n) for n in sizes], payload=zeros(up), **more)


def large(**more):
    return pb.SimpleRequest(response_size=314159, payload=zeros(271828), **more)


def read(name):
    """A file of INTEROP_TLS; None when it is not there."""
    try:
        with open(os.path.join(os.environ["INTEROP_TLS"], name), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


# ---- client ----


def need(good, what):
    if not good:
        raise AssertionError(what)


def sizes(answers):
    return [len(answer.payload.body) for answer in answers]


def fails(code, call, details=None):
    """The call must end with this status; `call` starts it and reads all of it."""
    try:
        got = call()
    except grpc.RpcError as error:
        need(error.code() == code and details in (None, error.details()), f"{error.code()} {error.details()!r}")
    else:
        raise AssertionError(f"no error: {got!r:.80}")


class Stub:
    def __init__(self, channel):
        for name, (kind, request, response) in METHODS.items():
            make = getattr(channel, kind)
            setattr(self, name, make(f"/grpc.testing.TestService/{name}", request.SerializeToString, response.FromString))
        self.unimplemented = channel.unary_unary("/grpc.testing.UnimplementedService/UnimplementedCall")


def empty_unary(stub):
    need(stub.EmptyCall(pb.Empty(), timeout=10).ByteSize() == 0, "the answer is not empty")


def large_unary(stub):
    need(stub.UnaryCall(large(), timeout=10).payload.body == bytes(314159), "another body")


def client_streaming(stub):
    requests = (pb.StreamingInputCallRequest(payload=zeros(n)) for n in UP)
    need(stub.StreamingInputCall(requests, timeout=10).aggregated_payload_size == 74922, "another sum")


def server_streaming(stub):
    need(sizes(stub.StreamingOutputCall(output(*DOWN), timeout=10)) == list(DOWN), "other sizes")


class Dialogue:
    """A stream of requests that are sent one by one."""

    def __init__(self, method, **more):
        self.requests = queue.Queue()
        self.call = method(iter(self.requests.get, None), **more)

    def ask(self, request):
        self.requests.put(request)
        return len(next(self.call).payload.body)

    def rest(self):
        self.requests.put(None)
        return list(self.call)


def ping_pong(stub):
    dialogue = Dialogue(stub.FullDuplexCall, timeout=10)
    got = [dialogue.ask(output(down, up=up)) for down, up in zip(DOWN, UP)]
    need(got == list(DOWN) and dialogue.rest() == [], f"other answers: {got}")


def half_duplex(stub):
    need(sizes(stub.HalfDuplexCall((output(n) for n in DOWN), timeout=10)) == list(DOWN), "other sizes")


def empty_stream(stub):
    need(list(stub.FullDuplexCall(iter(()), timeout=10)) == [], "there are answers")


def client_compressed_unary(stub):
    fails(Code.INVALID_ARGUMENT, lambda: stub.UnaryCall(large(expect_compressed=pb.BoolValue(value=True)), timeout=10))
    for value, how in ((True, GZIP), (False, PLAIN)):
        got = stub.UnaryCall(large(expect_compressed=pb.BoolValue(value=value)), compression=how, timeout=10)
        need(len(got.payload.body) == 314159, "another size")


def client_compressed_streaming(stub):
    def ask(*requests, **more):
        messages = (pb.StreamingInputCallRequest(payload=zeros(n), expect_compressed=pb.BoolValue(value=v)) for n, v in requests)
        return stub.StreamingInputCall(messages, timeout=10, **more).aggregated_payload_size

    fails(Code.INVALID_ARGUMENT, lambda: ask((27182, True)))
    # grpcio cannot leave out one message of a compressed stream.
    need(ask((27182, True), compression=GZIP) == 27182 and ask((45904, False)) == 45904, "another sum")


def server_compressed_unary(stub):
    for value in (True, False):
        got = stub.UnaryCall(large(response_compressed=pb.BoolValue(value=value)), timeout=10)
        need(len(got.payload.body) == 314159, "another size")


def server_compressed_streaming(stub):
    request = pb.StreamingOutputCallRequest()
    for size, value in ((31415, True), (92653, False)):
        request.response_parameters.add(size=size, compressed=pb.BoolValue(value=value))
    need(sizes(stub.StreamingOutputCall(request, timeout=10)) == [31415, 92653], "other sizes")


def custom_metadata(stub):
    _, unary = stub.UnaryCall.with_call(large(), metadata=METADATA, timeout=10)
    duplex = stub.FullDuplexCall(iter([output(314159, up=271828)]), metadata=METADATA, timeout=10)
    need(sizes(duplex) == [314159], "another size")
    for call in (unary, duplex):
        need(METADATA[0] in tuple(call.initial_metadata()), f"initial: {call.initial_metadata()}")
        need(METADATA[1] in tuple(call.trailing_metadata()), f"trailing: {call.trailing_metadata()}")


def status_code_and_message(stub, text="test status message"):
    status = pb.EchoStatus(code=2, message=text)
    fails(Code.UNKNOWN, lambda: stub.UnaryCall(pb.SimpleRequest(response_status=status), timeout=10), text)
    fails(Code.UNKNOWN, lambda: list(stub.FullDuplexCall(iter([output(response_status=status)]), timeout=10)), text)


def special_status_message(stub):
    status_code_and_message(stub, SPECIAL)


def unimplemented_method(stub):
    fails(Code.UNIMPLEMENTED, lambda: stub.UnimplementedCall(pb.Empty(), timeout=10))


def unimplemented_service(stub):
    fails(Code.UNIMPLEMENTED, lambda: stub.unimplemented(b"", timeout=10))


def cancel_after_begin(stub):
    requests = queue.Queue()
    call = stub.StreamingInputCall.future(iter(requests.get, None))
    call.cancel()
    need(call.cancelled() and call.code() == Code.CANCELLED, call.code())
    requests.put(None)


def cancel_after_first_response(stub):
    dialogue = Dialogue(stub.FullDuplexCall)
    need(dialogue.ask(output(31415, up=27182)) == 31415, "another size")
    dialogue.call.cancel()
    fails(Code.CANCELLED, dialogue.rest)


def timeout_on_sleeping_server(stub):
    dialogue = Dialogue(stub.FullDuplexCall, timeout=0.001)
    dialogue.requests.put(output(up=27182))
    fails(Code.DEADLINE_EXCEEDED, lambda: next(dialogue.call))
    dialogue.requests.put(None)


def concurrent_large_unary(stub):
    calls = [stub.UnaryCall.future(large(), timeout=60) for _ in range(1000)]
    need(all(len(call.result().payload.body) == 314159 for call in calls), "another size")


CASES = (
    *(empty_unary, large_unary, client_streaming, server_streaming, ping_pong, half_duplex, empty_stream),
    *(client_compressed_unary, client_compressed_streaming, server_compressed_unary, server_compressed_streaming),
    *(custom_metadata, status_code_and_message, special_status_message, unimplemented_method, unimplemented_service),
    *(cancel_after_begin, cancel_after_first_response, timeout_on_sleeping_server, concurrent_large_unary),
)


def connect(address):
    if "INTEROP_TLS" not in os.environ:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(read("ca.pem"), read("client.key"), read("client.pem")))


def judge(address, names=()):
    """True when every case passes; says what came of each."""
    unknown = set(names) - {case.__name__ for case in CASES}
    need(not unknown, f"no such case: {unknown}")
    passed = True
    with connect(address) as channel:
        stub = Stub(channel)
        for case in CASES:
            if names and case.__name__ not in names:
                continue
            try:
                case(stub)
                print(f"ok - {case.__name__}", flush=True)
            except Exception as error:  # whatever it is, the others are asked too
                passed = False
                print(f"not ok - {case.__name__}: {type(error).__name__} {str(error)[:300]!r}", flush=True)
    return passed


# ---- server ----


def echo(context):
    for key, value in context.invocation_metadata():
        if key == INITIAL:
            context.send_initial_metadata(((key, value),))
        if key == TRAILING:
            context.set_trailing_metadata(((key, value),))


def stop_if_asked(request, context):
    if request.HasField("response_status") and request.response_status.code:
        code = next(code for code in Code if code.value[0] == request.response_status.code)
        context.abort(code, request.response_status.message)


def answer(parameters, context):
    if parameters.HasField("compressed") and not parameters.compressed.value:
        context.disable_next_message_compression()
    return pb.StreamingOutputCallResponse(payload=zeros(parameters.size))


def unary_call(request, context):
    echo(context)
    stop_if_asked(request, context)
    if request.HasField("response_compressed") and request.response_compressed.value:
        context.set_compression(GZIP)
    return pb.SimpleResponse(payload=zeros(request.response_size))


def streaming_output_call(request, context):
    return duplex_call([request], context)


def streaming_input_call(requests, _):
    return pb.StreamingInputCallResponse(aggregated_payload_size=sum(len(r.payload.body) for r in requests))


def duplex_call(requests, context):
    echo(context)
    for request in requests:
        if any(p.compressed.value for p in request.response_parameters):
            context.set_compression(GZIP)
        for parameters in request.response_parameters:
            yield answer(parameters, context)
        stop_if_asked(request, context)


def bind(server, address):
    if "INTEROP_TLS" not in os.environ:
        return server.add_insecure_port(address)
    pair, mutual = [(read("server.key"), read("server.pem"))], read("client.pem") is not None
    return server.add_secure_port(address, grpc.ssl_server_credentials(pair, read("ca.pem") if mutual else None, mutual))


def start(address):
    """The server, and the port that it has."""
    behaviour = {
        "EmptyCall": lambda request, context: pb.Empty(),
        "UnaryCall": unary_call,
        "StreamingOutputCall": streaming_output_call,
        "StreamingInputCall": streaming_input_call,
        "FullDuplexCall": duplex_call,
        "HalfDuplexCall": lambda requests, context: duplex_call(list(requests), context),
    }
    handlers = {}
    for name, function in behaviour.items():
        kind, request, response = METHODS[name]
        make = getattr(grpc, kind + "_rpc_method_handler")
        handlers[name] = make(function, request_deserializer=request.FromString, response_serializer=response.SerializeToString)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.testing.TestService", handlers),))
    port = bind(server, address)
    server.start()
    return server, port


def serve():
    server, port = start("127.0.0.1:0")
    print(f"listening 127.0.0.1:{port}", flush=True)
    for _ in sys.stdin:
        before = server.stop(30)  # seconds of grace
        server, port = start(f"127.0.0.1:{port}")
        before.wait()
    server.stop(None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"] and len(sys.argv) > 2:
        sys.exit(0 if judge(sys.argv[2], sys.argv[3:]) else 1)
    elif sys.argv[1:] == ["server"]:
        serve()
    else:
        sys.exit(__doc__)
