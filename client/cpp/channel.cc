// Channel arguments, connecting with a deadline, and the shape of an address.
#include "client/cpp/channel.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "grpcpp/create_channel.h"

namespace expertd::client {
namespace {

constexpr int kKeepaliveMs = 30000;
constexpr int kKeepaliveTimeoutMs = 20000;
// A daemon that is just starting should be found soon.
constexpr int kFirstReconnectMs = 100;
constexpr int kLastReconnectMs = 1000;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  if (in) text << in.rdbuf();
  if (!in) return absl::NotFoundError(StrCat(path, ": cannot be read"));
  return text.str();
}

}  // namespace

int MessageLimit(int64_t max_message_bytes) {
  constexpr int64_t kCap = std::numeric_limits<int>::max();
  if (max_message_bytes > kCap / 2) return static_cast<int>(kCap);
  return static_cast<int>(2 * std::max(max_message_bytes, kControlMessageBytes / 2));
}

grpc::ChannelArguments MakeChannelArguments(int64_t max_message_bytes) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(MessageLimit(max_message_bytes));
  arguments.SetMaxSendMessageSize(-1);  // The daemon's own message says more than the transport's.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLastReconnectMs);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);     // We retry, with the same request id.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // Daemons are never behind a web proxy.
  return arguments;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const TlsFiles& files) {
  if (files.ca.empty() && files.cert.empty() && files.key.empty()) {
    return grpc::InsecureChannelCredentials();
  }
  if (files.ca.empty() || files.cert.empty() != files.key.empty()) {
    return absl::InvalidArgumentError("TLS: need a ca, and a cert and a key together or neither");
  }
  grpc::SslCredentialsOptions options;
  ASSIGN_OR_RETURN(options.pem_root_certs, ReadFile(files.ca));
  if (!files.cert.empty()) {
    ASSIGN_OR_RETURN(options.pem_cert_chain, ReadFile(files.cert));
    ASSIGN_OR_RETURN(options.pem_private_key, ReadFile(files.key));
  }
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::Channel> OpenChannel(
    const std::string& address, int64_t max_message_bytes,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  return grpc::CreateCustomChannel(
      address, credentials != nullptr ? credentials : grpc::InsecureChannelCredentials(),
      MakeChannelArguments(max_message_bytes));
}

absl::Status WaitConnected(grpc::Channel& channel, const std::string& address,
                           absl::Time deadline) {
  const absl::Time start = absl::Now();
  if (channel.WaitForConnected(absl::ToChronoTime(deadline))) return absl::OkStatus();
  return absl::UnavailableError(
      StrCat(address, ": no connection within ", absl::FormatDuration(absl::Now() - start)));
}

absl::Status CheckAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return Error(Reason::kConfigInvalid)
        .Text("address: got \"", address, "\", need host:port with a port in 1..65535")
        .With("address", address);
  }
  return absl::OkStatus();
}

}  // namespace expertd::client
