// SPDX-License-Identifier: Apache-2.0
//
// What grpc_client.c does, by C++ gRPC: the callback API, and bytes that nobody decodes. A message
// may be of any size, as ours allows.
//
//   grpcpp_client ADDRESS delta|chunk|encoded COUNT NAME

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>

extern "C++" {
#include "../bench.h"
}
#include "kvrelay.grpc.pb.h"
#include "streams.h"
#include "tests/interop/grpc/cpp/tls.h"

namespace {

class Reader : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
public:
  Reader(grpc::GenericStub *stub, const grpc::ByteBuffer *request) {
    stub->PrepareBidiStreamingCall(&context_, STREAMS_PATH, grpc::StubOptions(), this);
    StartWriteLast(request, grpc::WriteOptions());
    StartRead(&message_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok)
      return;
    messages++;
    bytes += message_.Length();
    StartRead(&message_);
  }
  void OnDone(const grpc::Status &status) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    done_ = true;
    changed_.notify_one();
  }
  grpc::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return status_;
  }
  unsigned long messages = 0, bytes = 0;

private:
  grpc::ClientContext context_;
  grpc::ByteBuffer message_;
  grpc::Status status_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

} // namespace

int main(int argc, char **argv) {
  static const char usage[] = "ADDRESS delta|chunk|encoded COUNT NAME";
  bench_arguments(argc, argv, 4, usage);
  if (argc != 5)
    bench_usage(false, usage);
  const bool large = strcmp(argv[2], STREAMS_DELTA) != 0;
  const size_t count = bench_number(argv[3], SIZE_MAX, usage);
  dynamo::kvrelay::v1::SubscribeKvPoolRequest request;
  request.set_subscriber_id(std::string(argv[2]) + " " + argv[3]);
  const grpc::Slice slice(request.SerializeAsString());
  const grpc::ByteBuffer bytes(&slice, 1);
  grpc::GenericStub stub(grpc::CreateChannel(argv[1], interop::ClientCredentials()));
  bench_sample rate = {};
  for (int run = -1; run < BENCH_RUNS; run++) { // the first also connects
    const double start = bench_wall_ns();
    Reader reader(&stub, &bytes);
    const grpc::Status status = reader.Wait();
    const double spent = bench_wall_ns() - start;
    bench_need(status.ok() && reader.messages == count);
    if (run >= 0)
      bench_add(&rate, large ? static_cast<double>(reader.bytes) / spent
                             : static_cast<double>(count) * 1e9 / spent);
  }
  bench_print(&rate, large ? "GB/s" : "messages/s", "%s", argv[4]);
  return 0;
}
