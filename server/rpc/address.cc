// Parses addresses; finds out by trying why one cannot be bound.
#include "server/rpc/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "base/error.h"
#include "base/strings.h"

namespace expertd::rpc {
namespace {

absl::Status BindError(const HostPort& address, std::string_view why) {
  return Error(Reason::kConfigInvalid)
      .Text("cannot listen on ", JoinHostPort(address.host, address.port), ": ", why);
}

// 0, or the errno of binding a socket to one resolved address.
int TryBind(const addrinfo& info) {
  const int fd = socket(info.ai_family, info.ai_socktype, info.ai_protocol);
  if (fd < 0) return errno;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  int error = 0;
  if (bind(fd, info.ai_addr, info.ai_addrlen) != 0 || listen(fd, 1) != 0) error = errno;
  close(fd);
  return error;
}

}  // namespace

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const absl::Status bad =
      Error(Reason::kConfigInvalid)
          .Text("got \"", text, "\", need \"host:port\" with a port of 0 to 65535");
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return bad;
  std::string_view host = text.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad;
  }
  const std::string_view port = text.substr(colon + 1);
  int number = 0;
  const bool digits =
      !port.empty() && port.find_first_not_of("0123456789") == std::string_view::npos;
  if (host.empty() || !digits || !absl::SimpleAtoi(AbslView(port), &number) || number > 65535) {
    return bad;
  }
  return HostPort{std::string(host), number};
}

std::string JoinHostPort(std::string_view host, int port) {
  if (host.find(':') != std::string_view::npos) return StrCat("[", host, "]:", port);
  return StrCat(host, ":", port);
}

bool IsWildcard(std::string_view host) { return host == "0.0.0.0" || host == "::"; }

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "localhost";
  return name;
}

absl::Status ExplainBindFailure(const HostPort& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int resolved =
      getaddrinfo(address.host.c_str(), StrCat(address.port).c_str(), &hints, &found);
  if (resolved != 0) return BindError(address, gai_strerror(resolved));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &freeaddrinfo);
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int error = TryBind(*info);
    if (error == EADDRINUSE) {
      return absl::AlreadyExistsError(StrCat("cannot listen on ",
                                             JoinHostPort(address.host, address.port),
                                             ": the address is in use by another process"));
    }
    if (error != 0) return BindError(address, strerror(error));
  }
  return BindError(address, "gRPC could not bind it");
}

}  // namespace expertd::rpc
