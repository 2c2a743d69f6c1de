// SPDX-License-Identifier: Apache-2.0
//
// gRPC's official interop cases with Debian's libgrpc++, on either side; as peer.py:
//
//   peer client ADDRESS
//   peer server

#include <grpc/compression.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "testing.grpc.pb.h"
#include "tls.h"

namespace {

using grpc::ClientContext;
using grpc::Status;
using grpc::StatusCode;
using namespace grpc::testing;
using Stub = TestService::Stub;

constexpr int kUp[] = {27182, 8, 1828, 45904}, kDown[] = {31415, 9, 2653, 58979};
constexpr char kInitial[] = "x-grpc-test-echo-initial",
               kTrailing[] = "x-grpc-test-echo-trailing-bin";
constexpr char kInitialValue[] = "test_initial_metadata_value", kTrailingValue[] = "\xab\xab\xab";
constexpr char kSpecial[] =
    "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001F608\t\n";

void Need(bool good, const std::string &what) {
  if (!good)
    throw std::runtime_error(what);
}

void NeedStatus(const Status &status, StatusCode code) {
  Need(status.error_code() == code,
       "status " + std::to_string(status.error_code()) + " " + status.error_message());
}

// ---- client ----

std::unique_ptr<ClientContext> Context(int limit_ms = 60000) {
  auto context = std::make_unique<ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(limit_ms));
  return context;
}

SimpleRequest Large() {
  SimpleRequest request;
  request.set_response_size(314159);
  request.mutable_payload()->set_body(std::string(271828, '\0'));
  return request;
}

StreamingOutputCallRequest Output(int up, std::vector<int> down) {
  StreamingOutputCallRequest request;
  for (const int size : down)
    request.add_response_parameters()->set_size(size);
  request.mutable_payload()->set_body(std::string(static_cast<size_t>(up), '\0'));
  return request;
}

void Unary(Stub *stub, ClientContext *context, const SimpleRequest &request) {
  SimpleResponse answer;
  NeedStatus(stub->UnaryCall(context, request, &answer), StatusCode::OK);
  Need(answer.payload().body() == std::string(314159, '\0'), "another body");
}

void EmptyUnary(Stub *stub) {
  Empty answer;
  NeedStatus(stub->EmptyCall(Context().get(), Empty(), &answer), StatusCode::OK);
}

void LargeUnary(Stub *stub) { Unary(stub, Context().get(), Large()); }

void ClientStreaming(Stub *stub) {
  StreamingInputCallResponse answer;
  const auto context = Context();
  const auto writer = stub->StreamingInputCall(context.get(), &answer);
  for (const int size : kUp) {
    StreamingInputCallRequest request;
    request.mutable_payload()->set_body(std::string(static_cast<size_t>(size), '\0'));
    Need(writer->Write(request), "a write fails");
  }
  writer->WritesDone();
  NeedStatus(writer->Finish(), StatusCode::OK);
  Need(answer.aggregated_payload_size() == 74922, "another sum");
}

void ServerStreaming(Stub *stub) {
  const auto context = Context();
  const auto reader =
      stub->StreamingOutputCall(context.get(), Output(0, {std::begin(kDown), std::end(kDown)}));
  StreamingOutputCallResponse answer;
  for (const int size : kDown)
    Need(reader->Read(&answer) && answer.payload().body().size() == static_cast<size_t>(size),
         "another size");
  Need(!reader->Read(&answer), "too many answers");
  NeedStatus(reader->Finish(), StatusCode::OK);
}

void PingPong(Stub *stub) {
  const auto context = Context();
  const auto call = stub->FullDuplexCall(context.get());
  StreamingOutputCallResponse answer;
  for (size_t i = 0; i < 4; i++) {
    Need(call->Write(Output(kUp[i], {kDown[i]})) && call->Read(&answer), "no answer");
    Need(answer.payload().body().size() == static_cast<size_t>(kDown[i]), "another size");
  }
  call->WritesDone();
  Need(!call->Read(&answer), "too many answers");
  NeedStatus(call->Finish(), StatusCode::OK);
}

void EmptyStream(Stub *stub) {
  const auto context = Context();
  const auto call = stub->FullDuplexCall(context.get());
  StreamingOutputCallResponse answer;
  call->WritesDone();
  Need(!call->Read(&answer), "an answer");
  NeedStatus(call->Finish(), StatusCode::OK);
}

void ClientCompressedUnary(Stub *stub) {
  SimpleRequest request = Large();
  SimpleResponse answer;
  request.mutable_expect_compressed()->set_value(true);
  NeedStatus(stub->UnaryCall(Context().get(), request, &answer), StatusCode::INVALID_ARGUMENT);
  const auto context = Context();
  context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
  Unary(stub, context.get(), request);
  request.mutable_expect_compressed()->set_value(false);
  Unary(stub, Context().get(), request);
}

void ClientCompressedStreaming(Stub *stub) {
  StreamingInputCallRequest request;
  StreamingInputCallResponse answer;
  request.mutable_expect_compressed()->set_value(true);
  request.mutable_payload()->set_body(std::string(27182, '\0'));
  const auto probe = Context();
  auto writer = stub->StreamingInputCall(probe.get(), &answer);
  writer->Write(request);
  writer->WritesDone();
  NeedStatus(writer->Finish(), StatusCode::INVALID_ARGUMENT);
  const auto context = Context();
  context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
  writer = stub->StreamingInputCall(context.get(), &answer);
  Need(writer->Write(request), "a write fails");
  request.mutable_expect_compressed()->set_value(false);
  request.mutable_payload()->set_body(std::string(45904, '\0'));
  Need(writer->Write(request, grpc::WriteOptions().set_no_compression()), "a write fails");
  writer->WritesDone();
  NeedStatus(writer->Finish(), StatusCode::OK);
  Need(answer.aggregated_payload_size() == 73086, "another sum");
}

void ServerCompressedUnary(Stub *stub) {
  for (const bool zipped : {true, false}) {
    SimpleRequest request = Large();
    request.mutable_response_compressed()->set_value(zipped);
    Unary(stub, Context().get(), request);
  }
}

void ServerCompressedStreaming(Stub *stub) {
  StreamingOutputCallRequest request = Output(0, {31415, 92653});
  request.mutable_response_parameters(0)->mutable_compressed()->set_value(true);
  request.mutable_response_parameters(1)->mutable_compressed()->set_value(false);
  const auto context = Context();
  const auto reader = stub->StreamingOutputCall(context.get(), request);
  StreamingOutputCallResponse answer;
  for (const size_t size : {31415, 92653})
    Need(reader->Read(&answer) && answer.payload().body().size() == size, "another size");
  Need(!reader->Read(&answer), "too many answers");
  NeedStatus(reader->Finish(), StatusCode::OK);
}

void NeedMetadata(const ClientContext &context) {
  const auto &initial = context.GetServerInitialMetadata();
  const auto first = initial.find(kInitial);
  Need(first != initial.end() && first->second == kInitialValue, "initial metadata");
  const auto &trailing = context.GetServerTrailingMetadata();
  const auto last = trailing.find(kTrailing);
  Need(last != trailing.end() && last->second == kTrailingValue, "trailing metadata");
}

void CustomMetadata(Stub *stub) {
  const auto unary = Context(), duplex = Context();
  for (const auto &context : {unary.get(), duplex.get()}) {
    context->AddMetadata(kInitial, kInitialValue);
    context->AddMetadata(kTrailing, kTrailingValue);
  }
  Unary(stub, unary.get(), Large());
  NeedMetadata(*unary);
  const auto call = stub->FullDuplexCall(duplex.get());
  StreamingOutputCallResponse answer;
  Need(call->Write(Output(271828, {314159})), "a write fails");
  call->WritesDone();
  Need(call->Read(&answer) && !call->Read(&answer), "other answers");
  NeedStatus(call->Finish(), StatusCode::OK);
  NeedMetadata(*duplex);
}

void NeedEcho(const Status &status, const std::string &text) {
  NeedStatus(status, StatusCode::UNKNOWN);
  Need(status.error_message() == text, "text \"" + status.error_message() + "\"");
}

void EchoText(Stub *stub, const std::string &text) {
  SimpleRequest request;
  SimpleResponse answer;
  request.mutable_response_status()->set_code(2);
  request.mutable_response_status()->set_message(text);
  NeedEcho(stub->UnaryCall(Context().get(), request, &answer), text);
  StreamingOutputCallRequest streamed;
  *streamed.mutable_response_status() = request.response_status();
  const auto context = Context();
  const auto call = stub->FullDuplexCall(context.get());
  StreamingOutputCallResponse none;
  call->Write(streamed);
  call->WritesDone();
  Need(!call->Read(&none), "an answer");
  NeedEcho(call->Finish(), text);
}

void StatusCodeAndMessage(Stub *stub) { EchoText(stub, "test status message"); }
void SpecialStatusMessage(Stub *stub) { EchoText(stub, kSpecial); }

void UnimplementedMethod(Stub *stub) {
  Empty answer;
  NeedStatus(stub->UnimplementedCall(Context().get(), Empty(), &answer), StatusCode::UNIMPLEMENTED);
}

void CancelAfterBegin(Stub *stub) {
  StreamingInputCallResponse answer;
  const auto context = Context();
  const auto writer = stub->StreamingInputCall(context.get(), &answer);
  context->TryCancel();
  NeedStatus(writer->Finish(), StatusCode::CANCELLED);
}

void CancelAfterFirstResponse(Stub *stub) {
  const auto context = Context();
  const auto call = stub->FullDuplexCall(context.get());
  StreamingOutputCallResponse answer;
  Need(call->Write(Output(kUp[0], {kDown[0]})) && call->Read(&answer), "no answer");
  context->TryCancel();
  NeedStatus(call->Finish(), StatusCode::CANCELLED);
}

void TimeoutOnSleepingServer(Stub *stub) {
  const auto context = Context(1);
  const auto call = stub->FullDuplexCall(context.get());
  StreamingOutputCallResponse answer;
  call->Write(Output(27182, {}));
  Need(!call->Read(&answer), "an answer");
  NeedStatus(call->Finish(), StatusCode::DEADLINE_EXCEEDED);
}

void ConcurrentLargeUnary(Stub *stub) {
  struct Call {
    std::unique_ptr<ClientContext> context = Context();
    SimpleResponse answer;
    Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<SimpleResponse>> reader;
  };
  grpc::CompletionQueue queue;
  std::vector<Call> calls(1000);
  for (Call &call : calls) {
    call.reader = stub->AsyncUnaryCall(call.context.get(), Large(), &queue);
    call.reader->Finish(&call.answer, &call.status, &call);
  }
  for (size_t i = 0; i < calls.size(); i++) {
    void *tag;
    bool good;
    Need(queue.Next(&tag, &good) && good, "a call is lost");
  }
  for (const Call &call : calls) {
    NeedStatus(call.status, StatusCode::OK);
    Need(call.answer.payload().body().size() == 314159, "another size");
  }
}

bool Judge(const std::string &address) {
  const auto channel = grpc::CreateChannel(address, interop::ClientCredentials());
  const auto stub = TestService::NewStub(channel);
  const std::pair<const char *, std::function<void(Stub *)>> cases[] = {
      {"empty_unary", EmptyUnary},
      {"large_unary", LargeUnary},
      {"client_streaming", ClientStreaming},
      {"server_streaming", ServerStreaming},
      {"ping_pong", PingPong},
      {"empty_stream", EmptyStream},
      {"client_compressed_unary", ClientCompressedUnary},
      {"client_compressed_streaming", ClientCompressedStreaming},
      {"server_compressed_unary", ServerCompressedUnary},
      {"server_compressed_streaming", ServerCompressedStreaming},
      {"custom_metadata", CustomMetadata},
      {"status_code_and_message", StatusCodeAndMessage},
      {"special_status_message", SpecialStatusMessage},
      {"unimplemented_method", UnimplementedMethod},
      {"unimplemented_service",
       [&channel](Stub *) {
         Empty answer;
         NeedStatus(UnimplementedService::NewStub(channel)->UnimplementedCall(Context().get(),
                                                                              Empty(), &answer),
                    StatusCode::UNIMPLEMENTED);
       }},
      {"cancel_after_begin", CancelAfterBegin},
      {"cancel_after_first_response", CancelAfterFirstResponse},
      {"timeout_on_sleeping_server", TimeoutOnSleepingServer},
      {"concurrent_large_unary", ConcurrentLargeUnary},
  };
  bool passed = true;
  for (const auto &[name, run] : cases) {
    try {
      run(stub.get());
      std::cout << "ok - " << name << std::endl;
    } catch (const std::exception &error) {
      passed = false;
      std::cout << "not ok - " << name << ": " << error.what() << std::endl;
    }
  }
  return passed;
}

// ---- server ----

class Service final : public TestService::Service {
  using Context = grpc::ServerContext;
  using Duplex = grpc::ServerReaderWriter<StreamingOutputCallResponse, StreamingOutputCallRequest>;

  static void Echo(Context *context) {
    const auto &metadata = context->client_metadata();
    const auto text = [](grpc::string_ref value) {
      return std::string(value.data(), value.size());
    };
    if (const auto found = metadata.find(kInitial); found != metadata.end())
      context->AddInitialMetadata(kInitial, text(found->second));
    if (const auto found = metadata.find(kTrailing); found != metadata.end())
      context->AddTrailingMetadata(kTrailing, text(found->second));
  }

  template <typename Request> static Status Wished(const Request &request) {
    return Status(static_cast<StatusCode>(request.response_status().code()),
                  request.response_status().message());
  }

  template <typename Stream>
  static void Answer(const StreamingOutputCallRequest &request, Stream *stream) {
    for (const auto &parameters : request.response_parameters()) {
      StreamingOutputCallResponse answer;
      answer.mutable_payload()->set_body(std::string(static_cast<size_t>(parameters.size()), '\0'));
      stream->Write(answer);
    }
  }

  Status EmptyCall(Context *, const Empty *, Empty *) override { return Status::OK; }

  Status UnaryCall(Context *context, const SimpleRequest *request,
                   SimpleResponse *answer) override {
    Echo(context);
    if (request->response_compressed().value())
      context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
    answer->mutable_payload()->set_body(
        std::string(static_cast<size_t>(request->response_size()), '\0'));
    return Wished(*request);
  }

  Status StreamingOutputCall(Context *, const StreamingOutputCallRequest *request,
                             grpc::ServerWriter<StreamingOutputCallResponse> *writer) override {
    Answer(*request, writer);
    return Status::OK;
  }

  Status StreamingInputCall(Context *, grpc::ServerReader<StreamingInputCallRequest> *reader,
                            StreamingInputCallResponse *answer) override {
    StreamingInputCallRequest request;
    size_t sum = 0;
    while (reader->Read(&request))
      sum += request.payload().body().size();
    answer->set_aggregated_payload_size(static_cast<int>(sum));
    return Status::OK;
  }

  Status FullDuplexCall(Context *context, Duplex *stream) override {
    StreamingOutputCallRequest request;
    Echo(context);
    while (stream->Read(&request)) {
      Answer(request, stream);
      if (request.response_status().code() != 0)
        return Wished(request);
    }
    return Status::OK;
  }
};

int Serve() {
  Service service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", interop::ServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (server == nullptr)
    return 1;
  std::cout << "listening 127.0.0.1:" << port << std::endl;
  std::cin.ignore(std::numeric_limits<std::streamsize>::max());
  std::_Exit(0);
}

} // namespace

int main(int argc, char **argv) {
  if (argc == 3 && std::string(argv[1]) == "client")
    return Judge(argv[2]) ? 0 : 1;
  if (argc == 2 && std::string(argv[1]) == "server")
    return Serve();
  std::cerr << "usage: peer client ADDRESS | peer server\n";
  return 2;
}
