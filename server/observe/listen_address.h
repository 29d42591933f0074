// "host:port" texts and sockets that listen on them.
#ifndef SERVER_OBSERVE_LISTEN_ADDRESS_H_
#define SERVER_OBSERVE_LISTEN_ADDRESS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertd::observe {

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

// A listening TCP socket; the caller closes it. Port 0 takes any free one.
// Errors: ALREADY_EXISTS when the address is taken, CONFIG_INVALID when it cannot be bound for
// another reason; both name the address.
absl::StatusOr<int> Listen(const HostPort& address);
// The port that a listening socket was bound to.
int BoundPort(int socket);

}  // namespace expertd::observe

#endif  // SERVER_OBSERVE_LISTEN_ADDRESS_H_
