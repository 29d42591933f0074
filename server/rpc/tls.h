// Credentials of both directions: plaintext, or TLS from files that are read again when they
// change.
#ifndef SERVER_RPC_TLS_H_
#define SERVER_RPC_TLS_H_

#include <memory>
#include <string>

#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"

namespace expertd::rpc {

// PEM files. All empty: plaintext. Files are looked at again every few seconds, so that
// certificates can be rotated without a restart; new connections use the new ones.
struct TlsFiles {
  std::string cert;       // chain of this daemon, for clients and for other daemons
  std::string key;        // its private key
  std::string client_ca;  // who may connect: set means that callers must bring a certificate of it

  bool enabled() const { return !cert.empty(); }
};

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files);

// For connections to other daemons: this daemon's certificate is shown, theirs must come from
// `client_ca`, or from `cert` itself when there is none, and name the address they are reached at.
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const TlsFiles& files);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_TLS_H_
