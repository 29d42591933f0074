// gRPC channels to daemons with the settings that client and server share.
#ifndef CLIENT_CPP_CHANNEL_H_
#define CLIENT_CPP_CHANNEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace expertd::client {

// Enough for every message that carries no tensor.
inline constexpr int64_t kControlMessageBytes = 16 << 20;

// The receive limit for a group whose GroupInfo.max_message_bytes is `max_message_bytes`: twice
// that, so that a size error reaches the service and comes back with its reason.
int MessageLimit(int64_t max_message_bytes);

// Keepalive: a ping after 30 s of silence while calls run, none without calls.
grpc::ChannelArguments MakeChannelArguments(int64_t max_message_bytes);

// PEM files. All empty: plaintext.
struct TlsFiles {
  std::string ca;    // Whom daemons' certificates must come from.
  std::string cert;  // The caller's own chain, where daemons ask for one; with `key`.
  std::string key;
};

// Errors: NOT_FOUND for a file that cannot be read; INVALID_ARGUMENT for a cert without a key, a
// key without a cert, or either without a ca.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const TlsFiles& files);

// Does not connect yet. `address` is "host:port"; null credentials: plaintext.
std::shared_ptr<grpc::Channel> OpenChannel(
    const std::string& address, int64_t max_message_bytes,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

// Blocks until the channel is connected. Errors: UNAVAILABLE, naming the address and how long.
absl::Status WaitConnected(grpc::Channel& channel, const std::string& address, absl::Time deadline);

// OK for "host:port" with a port in 1..65535; otherwise INVALID_ARGUMENT with what is missing.
absl::Status CheckAddress(const std::string& address);

}  // namespace expertd::client

#endif  // CLIENT_CPP_CHANNEL_H_
