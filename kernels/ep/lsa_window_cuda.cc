// Allocating, registering and freeing a window; see lsa_window.h.
#include "kernels/ep/lsa_window.h"

#include <nccl_device.h>

#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/lsa_addresses.h"

namespace expertd {
namespace {

absl::Status NotOneDomain(const EpGroupConfig& config, int reachable) {
  return Error(Reason::kBackendUnsupported)
      .Text("EP backend nccl_lsa: rank ", config.rank, " reaches the memory of ", reachable, " of ",
            config.world,
            " ranks, need all: GPUs of one NVLink domain with peer access; use backend nccl")
      .With("backend", "nccl_lsa");
}

}  // namespace

absl::StatusOr<std::unique_ptr<LsaWindow>> LsaWindow::Create(const EpGroupConfig& config,
                                                             const EpBootstrap& bootstrap,
                                                             CudaDevice& device, int64_t bytes) {
  RETURN_IF_ERROR(device.MakeCurrent());
  std::unique_ptr<LsaWindow> made(new LsaWindow);
  RETURN_IF_ERROR(made->Open(config, bootstrap, device, bytes));
  return made;
}

absl::Status LsaWindow::Open(const EpGroupConfig& config, const EpBootstrap& bootstrap,
                             CudaDevice& device, int64_t bytes) {
  if (config.world == 1) {
    ASSIGN_OR_RETURN(alone_, device.Allocate(bytes));
    bases_ = {alone_.as<std::byte>()};
    return device.Zero(alone_.data(), bytes);
  }
  ASSIGN_OR_RETURN(comm_, NcclCommunicator::Create(config, bootstrap, device));
  const absl::Status allocated = Allocate(config, bytes);
  // All or none: a rank without memory must not leave the others waiting in the registration.
  ASSIGN_OR_RETURN(const std::vector<std::string> made,
                   bootstrap.exchange->AllGather("nccl_lsa/window", allocated.ok() ? "made" : "",
                                                 bootstrap.deadline));
  RETURN_IF_ERROR(allocated);
  for (size_t rank = 0; rank < made.size(); ++rank) {
    if (made[rank] == "made") continue;
    return Error(Reason::kPeerLost)
        .Text("rank ", rank, " has no memory for its window of ", bytes, " bytes")
        .With("rank", rank);
  }
  RETURN_IF_ERROR(device.Zero(memory_, bytes));
  RETURN_IF_ERROR(Register(config, bootstrap.deadline, device, bytes));
  return FindPeers(config, device);
}

absl::Status LsaWindow::Allocate(const EpGroupConfig& config, int64_t bytes) {
  const ncclResult_t allocated = ncclMemAlloc(&memory_, static_cast<size_t>(bytes));
  if (allocated == ncclSuccess) return absl::OkStatus();
  memory_ = nullptr;
  cudaGetLastError();
  return Error(Reason::kMemoryBudget)
      .Text("rank ", config.rank, ": a window of ", bytes,
            " bytes: ", ncclGetErrorString(allocated),
            "; lower max_tokens_per_rank or max_hidden, or use backend nccl")
      .With("bytes", bytes);
}

// The call blocks until all ranks make it; giving up the communicator ends it.
absl::Status LsaWindow::Register(const EpGroupConfig& config, SteadyTime deadline,
                                 CudaDevice& device, int64_t bytes) {
  std::packaged_task<ncclResult_t()> work([&] {
    if (!device.MakeCurrent().ok()) return ncclUnhandledCudaError;
    return ncclCommWindowRegister(comm_->get(), memory_, static_cast<size_t>(bytes), &window_,
                                  NCCL_WIN_COLL_SYMMETRIC);
  });
  std::future<ncclResult_t> done = work.get_future();
  std::thread worker(std::move(work));
  const bool late = done.wait_until(deadline) != std::future_status::ready;
  if (late) comm_->Abort();
  worker.join();
  if (late) {
    return Error(Reason::kStepTimeout)
        .Text("rank ", config.rank, ": registering the window passed the deadline")
        .With("rank", config.rank);
  }
  RETURN_IF_ERROR(NcclStatus(done.get(), "registering the window", comm_->get()));
  if (window_ == nullptr) return NotOneDomain(config, 1);
  return absl::OkStatus();
}

absl::Status LsaWindow::FindPeers(const EpGroupConfig& config, CudaDevice& device) {
  const ncclTeam_t team = ncclTeamLsa(comm_->get());
  if (team.nRanks != config.world) return NotOneDomain(config, team.nRanks);
  const int64_t bytes = config.world * static_cast<int64_t>(sizeof(void*));
  ASSIGN_OR_RETURN(const DeviceBuffer addresses, device.Allocate(bytes));
  RETURN_IF_ERROR(CudaStatus(LaunchWindowAddresses(window_, static_cast<int>(config.world),
                                                   addresses.as<void*>(), device.stream()),
                             "finding the windows"));
  bases_.resize(static_cast<size_t>(config.world));
  return device.CopyToHost(bases_.data(), addresses.data(), bytes);
}

LsaWindow::~LsaWindow() {
  comm_.reset();  // registration and mappings go with it
  if (memory_ != nullptr) static_cast<void>(ncclMemFree(memory_));
}

}  // namespace expertd
