// GlooTransport::Create: listen, gather addresses, connect all pairs.
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cpu/gloo_address.h"
#include "kernels/cpu/gloo_transport.h"

namespace expertd {
namespace {

// gloo waits five times a pair's timeout for its connection.
constexpr int kConnectTimeouts = 5;

// gloo writes to sockets without MSG_NOSIGNAL: a peer that dies must not end this process.
void IgnoreBrokenPipes() {
  struct sigaction current = {};
  if (sigaction(SIGPIPE, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;
  current.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &current, nullptr);
}

std::chrono::milliseconds Remaining(SteadyTime deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::Real().Now());
  return std::max(left, std::chrono::milliseconds(1));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GlooTransport>> GlooTransport::Create(const EpGroupConfig& config,
                                                                     const EpBootstrap& bootstrap) {
  auto transport = std::unique_ptr<GlooTransport>(new GlooTransport(config.rank, config.world));
  if (config.world > 1) {
    if (bootstrap.exchange == nullptr) {
      return Error(Reason::kInternal).Text("gloo: world ", config.world, " needs an exchange");
    }
    IgnoreBrokenPipes();
    RETURN_IF_ERROR(transport->Form(bootstrap));
  }
  transport->watch_until_ = Clock::Real().Now();
  transport->watch_ = std::thread([raw = transport.get()] { raw->Watch(); });
  return transport;
}

absl::Status GlooTransport::Form(const EpBootstrap& bootstrap) {
  std::vector<std::vector<char>> addresses(static_cast<size_t>(world_));
  try {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = bootstrap.listen_host;
    device_ = gloo::transport::tcp::CreateDevice(attributes);
    context_ = device_->createContext(static_cast<int>(rank_), static_cast<int>(world_));
    context_->setTimeout(Remaining(bootstrap.deadline) / kConnectTimeouts +
                         std::chrono::milliseconds(1));
    for (int64_t peer = 0; peer < world_; ++peer) {
      if (peer == rank_) continue;
      addresses[static_cast<size_t>(peer)] =
          context_->createPair(static_cast<int>(peer))->address().bytes();
    }
  } catch (const std::exception& error) {
    return Error(Reason::kConfigInvalid)
        .Text("gloo: cannot listen on \"", bootstrap.listen_host, "\": ", error.what())
        .With("listen_host", bootstrap.listen_host);
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   bootstrap.exchange->AllGather("gloo/address", EncodeAddresses(addresses),
                                                 bootstrap.deadline));
  return Connect(all, bootstrap.deadline);
}

absl::Status GlooTransport::Connect(const std::vector<std::string>& addresses,
                                    SteadyTime deadline) {
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    const auto index = static_cast<size_t>(peer);
    std::optional<std::vector<char>> address;
    if (index < addresses.size()) {
      address = DecodeAddress(addresses[index], static_cast<size_t>(rank_), addresses.size());
    }
    if (!address.has_value()) {
      return Error(Reason::kInternal).Text("gloo: rank ", peer, " sent no readable addresses");
    }
    try {
      context_->getPair(static_cast<int>(peer))->connect(*address);
    } catch (const std::exception& error) {
      const bool late = Clock::Real().Now() >= deadline;
      return Error(late ? Reason::kStepTimeout : Reason::kPeerLost)
          .Text("gloo: no connection to rank ", peer, ": ", error.what())
          .With("ranks", peer);
    }
  }
  return absl::OkStatus();
}

}  // namespace expertd
