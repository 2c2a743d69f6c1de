// SPDX-License-Identifier: Apache-2.0
//
// Credentials of C++ gRPC as INTEROP_TLS says: a folder with ca.pem, and server.pem and .key; with
// client.pem and .key, clients show these and servers ask for them. Without it, plaintext.
#ifndef KVRELAY_INTEROP_CPP_TLS_H
#define KVRELAY_INTEROP_CPP_TLS_H

#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

namespace interop {

inline bool Secure() { return std::getenv("INTEROP_TLS") != nullptr; }

// A file of that folder; empty when it is not there.
inline std::string Pem(const std::string &name) {
  std::ifstream file(std::string(std::getenv("INTEROP_TLS")) + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::shared_ptr<grpc::ChannelCredentials> ClientCredentials() {
  if (!Secure())
    return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = Pem("ca.pem");
  options.pem_private_key = Pem("client.key");
  options.pem_cert_chain = Pem("client.pem");
  return grpc::SslCredentials(options);
}

inline std::shared_ptr<grpc::ServerCredentials> ServerCredentials() {
  if (!Secure())
    return grpc::InsecureServerCredentials();
  const bool mutual = !Pem("client.pem").empty();
  grpc::SslServerCredentialsOptions options(
      mutual ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
             : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  options.pem_root_certs = mutual ? Pem("ca.pem") : "";
  options.pem_key_cert_pairs.push_back({Pem("server.key"), Pem("server.pem")});
  return grpc::SslServerCredentials(options);
}

} // namespace interop

#endif
