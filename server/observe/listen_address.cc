// Parses addresses, resolves and binds them.
#include "server/observe/listen_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "base/error.h"
#include "base/strings.h"

namespace expertd::observe {
namespace {

constexpr int kBacklog = 128;

// A socket that listens on one resolved address, or -1 with errno set.
int ListenOn(const addrinfo& info) {
  const int fd = socket(info.ai_family, info.ai_socktype | SOCK_CLOEXEC, info.ai_protocol);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, info.ai_addr, info.ai_addrlen) == 0 && listen(fd, kBacklog) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

absl::Status ListenError(const HostPort& address, int error) {
  const std::string where = JoinHostPort(address.host, address.port);
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(
        StrCat("cannot listen on ", where, ": another socket of this machine has the address"));
  }
  return Error(Reason::kConfigInvalid).Text("cannot listen on ", where, ": ", strerror(error));
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
  const bool digits =
      !port.empty() && port.find_first_not_of("0123456789") == std::string_view::npos;
  int number = 0;
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

absl::StatusOr<int> Listen(const HostPort& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int failed =
      getaddrinfo(address.host.c_str(), StrCat(address.port).c_str(), &hints, &found);
  if (failed != 0) {
    return Error(Reason::kConfigInvalid)
        .Text("cannot listen on ", JoinHostPort(address.host, address.port), ": ",
              gai_strerror(failed));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = ListenOn(*info);
    if (fd >= 0) return fd;
    error = errno;
  }
  return ListenError(address, error);
}

int BoundPort(int socket) {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (getsockname(socket, address, &size) != 0) return 0;
  if (storage.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(address)->sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);
}

}  // namespace expertd::observe
