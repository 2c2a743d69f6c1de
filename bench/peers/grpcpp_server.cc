// SPDX-License-Identifier: Apache-2.0
//
// What grpc_server.c serves, by C++ gRPC at its best: the callback API on the library's own
// threads, messages as slices that were made before and are shared by all writes, and a hint that
// more follows, so that small writes are gathered. GetRelayInfo goes through the generated classes,
// as every server has it. grpcpp_server FOLDER prints "listening ADDRESS" and ends with its
// standard input. INTEROP_TLS as tls.h has it. With "synchronous" behind FOLDER it serves
// GetRelayInfo alone, through the API that most servers in C++ are written with: a function that
// returns the answer.

#include <grpcpp/grpcpp.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>

#include "kvrelay.grpc.pb.h"
#include "streams.h"
#include "tests/interop/grpc/cpp/tls.h"

namespace {

namespace v1 = dynamo::kvrelay::v1;

grpc::ByteBuffer Load(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (bytes.empty()) {
    std::cerr << "grpcpp_server: cannot read " << path << "\n";
    std::exit(2);
  }
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Sends the same bytes until the count is reached, those of `model` if there is one; without
// either, nothing.
class Stream : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
public:
  Stream(const grpc::ByteBuffer *bytes, const v1::FilterUpdate *model, unsigned long count)
      : bytes_(bytes), model_(model), left_(count) {
    StartSendInitialMetadata();
    if (!Idle())
      Next();
  }
  void OnWriteDone(bool ok) override {
    if (ok)
      Next();
    else
      Finish(grpc::Status::CANCELLED);
  }
  void OnCancel() override {
    if (Idle())
      Finish(grpc::Status::CANCELLED);
  }
  void OnDone() override { delete this; }

private:
  bool Idle() const { return bytes_ == nullptr && model_ == nullptr; }
  void Next() {
    if (left_ == 0) {
      Finish(grpc::Status::OK);
      return;
    }
    left_--;
    if (model_ == nullptr) {
      StartWrite(bytes_, grpc::WriteOptions().set_buffer_hint());
      return;
    }
    v1::FilterUpdate update; // the words of a filter, wherever they lie, have to come into a string
    grpc::ByteBuffer bytes;
    bool own;
    update.CopyFrom(*model_);
    if (!grpc::SerializationTraits<v1::FilterUpdate>::Serialize(update, &bytes, &own).ok())
      std::abort();
    encoded_.Swap(&bytes);
    StartWrite(&encoded_, grpc::WriteOptions());
  }
  const grpc::ByteBuffer *bytes_;
  const v1::FilterUpdate *model_;
  grpc::ByteBuffer encoded_;
  unsigned long left_;
};

void Answer(const v1::RelayInfoRequest *request, v1::RelayInfo *answer) {
  answer->set_protocol_version(1);
  answer->mutable_relay()->set_drt_instance_id(0x1234567890abcdefu);
  answer->mutable_relay()->set_relay_incarnation(0x0fedcba987654321u);
  answer->set_contract_marker(request->contract_marker());
}

using Base = v1::KvEventRelay::WithRawCallbackMethod_SubscribeKvPool<
    v1::KvEventRelay::WithCallbackMethod_GetRelayInfo<v1::KvEventRelay::Service>>;

class Relay final : public Base {
public:
  explicit Relay(const std::string &folder)
      : delta_(Load(folder + "/" STREAMS_DELTA_FILE)),
        chunk_(Load(folder + "/" STREAMS_CHUNK_FILE)) {
    grpc::ByteBuffer copy(chunk_);
    if (!grpc::SerializationTraits<v1::FilterUpdate>::Deserialize(&copy, &model_).ok())
      std::abort();
  }

  grpc::ServerUnaryReactor *GetRelayInfo(grpc::CallbackServerContext *context,
                                         const v1::RelayInfoRequest *request,
                                         v1::RelayInfo *answer) override {
    Answer(request, answer);
    grpc::ServerUnaryReactor *const reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer> *
  SubscribeKvPool(grpc::CallbackServerContext *, const grpc::ByteBuffer *bytes) override {
    v1::SubscribeKvPoolRequest request;
    grpc::ByteBuffer copy(*bytes);
    std::string what;
    unsigned long count = 0;
    if (grpc::SerializationTraits<v1::SubscribeKvPoolRequest>::Deserialize(&copy, &request).ok())
      std::istringstream(request.subscriber_id()) >> what >> count;
    return new Stream(what == STREAMS_DELTA   ? &delta_
                      : what == STREAMS_CHUNK ? &chunk_
                                              : nullptr,
                      what == STREAMS_ENCODED ? &model_ : nullptr, count);
  }

private:
  const grpc::ByteBuffer delta_, chunk_;
  v1::FilterUpdate model_;
};

class Synchronous final : public v1::KvEventRelay::Service {
  grpc::Status GetRelayInfo(grpc::ServerContext *, const v1::RelayInfoRequest *request,
                            v1::RelayInfo *answer) override {
    Answer(request, answer);
    return grpc::Status::OK;
  }
};

} // namespace

int main(int argc, char **argv) {
  const bool synchronous = argc == 3 && argv[2] == std::string("synchronous");
  if (argc != 2 && !synchronous) {
    std::cerr << "usage: grpcpp_server FOLDER [synchronous]\n";
    return 2;
  }
  Relay relay(argv[1]);
  Synchronous plain;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", interop::ServerCredentials(), &port);
  builder.RegisterService(synchronous ? static_cast<grpc::Service *>(&plain) : &relay);
  const std::unique_ptr<grpc::Server> server(builder.BuildAndStart());
  if (server == nullptr)
    return 1;
  std::cout << "listening 127.0.0.1:" << port << std::endl;
  std::cin.ignore(std::numeric_limits<std::streamsize>::max());
  std::_Exit(0); // open streams would be waited for
}
