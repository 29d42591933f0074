// "host:port" texts and what the system says about binding them.
#ifndef SERVER_RPC_ADDRESS_H_
#define SERVER_RPC_ADDRESS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertd::rpc {

struct HostPort {
  std::string host;  // without brackets
  int port = 0;
};

// "127.0.0.1:7301", "[::1]:0", "localhost:80". Errors: CONFIG_INVALID.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);
// The inverse; an IPv6 address gets brackets.
std::string JoinHostPort(std::string_view host, int port);

// True for the addresses that mean every interface.
bool IsWildcard(std::string_view host);

// This machine's name.
std::string HostName();

// Why `address` cannot be bound: ALREADY_EXISTS when it is taken, else CONFIG_INVALID.
absl::Status ExplainBindFailure(const HostPort& address);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_ADDRESS_H_
