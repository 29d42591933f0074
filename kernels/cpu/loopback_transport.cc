// Joins the hub of the epoch after checking that all ranks live in this process.
#include "kernels/cpu/loopback_transport.h"

#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cpu/loopback_hub.h"

namespace expertd {
namespace {

constexpr EpCapabilities kCapabilities = {
    .name = "loopback", .survives_cancel = true, .multi_process = false, .max_world = 1024};

// Equal for two ranks exactly when they share a process. The host's boot id and the process id make
// it readable; containers can share both, so a number drawn by the process decides.
std::string ProcessIdentity() {
  static const uint64_t drawn = RandomId();
  std::string boot_id = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return StrCat("pid ", getpid(), " of host ", boot_id, " (", Hex(drawn), ")");
}

absl::Status CheckOneProcess(const EpGroupConfig& config, const EpBootstrap& bootstrap) {
  if (config.world == 1) return absl::OkStatus();
  if (bootstrap.exchange == nullptr) {
    return Error(Reason::kInternal).Text("loopback: world ", config.world, " needs an exchange");
  }
  const std::string own = ProcessIdentity();
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   bootstrap.exchange->AllGather("loopback/process", own, bootstrap.deadline));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == own) continue;
    return Error(Reason::kBackendUnsupported)
        .Text("loopback joins ranks of one process: rank ", config.rank, " is ", own, ", rank ",
              rank, " is ", all[rank], "; choose gloo")
        .With("backend", "loopback")
        .With("rank", rank);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<LoopbackTransport>> LoopbackTransport::Create(
    const EpGroupConfig& config, const EpBootstrap& bootstrap) {
  const std::string key = StrCat(bootstrap.group_id, "/", bootstrap.epoch, "/",
                                 Hex(Fingerprint(bootstrap.bootstrap_id)));
  ASSIGN_OR_RETURN(std::shared_ptr<LoopbackHub> hub, LoopbackHub::Find(key, config.world));
  RETURN_IF_ERROR(hub->Join(config.rank));
  auto transport =
      std::unique_ptr<LoopbackTransport>(new LoopbackTransport(std::move(hub), config.rank));
  // After the exchange every rank holds the hub, so none can find a fresh one instead.
  RETURN_IF_ERROR(CheckOneProcess(config, bootstrap));
  return transport;
}

LoopbackTransport::~LoopbackTransport() { hub_->Leave(rank_); }

const EpCapabilities& LoopbackTransport::capabilities() const { return kCapabilities; }

absl::Status LoopbackTransport::Exchange(const OpContext& context, std::span<const ConstBytes> send,
                                         std::span<const MutableBytes> recv) {
  return hub_->Exchange(rank_, context, counter_.Next(context.sequence), send, recv);
}

void LoopbackTransport::Cancel(uint64_t sequence) { hub_->Cancel(rank_, sequence); }
void LoopbackTransport::Abort() { hub_->Abort(rank_); }

}  // namespace expertd
