// Forming, polling and aborting; see nccl_communicator.h.
#include "kernels/cuda/nccl_communicator.h"

#include <chrono>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"

namespace expertd {
namespace {

constexpr std::chrono::seconds kAbortSeconds{10};
constexpr std::chrono::microseconds kFormingNap{200};

// The id that rank 0 made, on every rank.
absl::StatusOr<ncclUniqueId> AgreeOnId(const EpGroupConfig& config, const EpBootstrap& bootstrap) {
  ncclUniqueId id;
  std::string own;
  absl::Status made = absl::OkStatus();
  if (config.rank == 0) {
    made = NcclStatus(ncclGetUniqueId(&id), "making the NCCL id", nullptr);
    if (made.ok()) own.assign(id.internal, sizeof(id.internal));
  }
  // Also when there is no id: the others must not wait for it.
  ASSIGN_OR_RETURN(const std::vector<std::string> blobs,
                   bootstrap.exchange->AllGather("nccl/id", own, bootstrap.deadline));
  RETURN_IF_ERROR(made);
  if (blobs.empty() || blobs[0].size() != sizeof(id.internal)) {
    return Error(Reason::kPeerLost).Text("rank 0 could not make an NCCL id").With("rank", 0);
  }
  std::memcpy(id.internal, blobs[0].data(), sizeof(id.internal));
  return id;
}

ncclConfig_t ConfigFor(const EpGroupConfig& config) {
  ncclConfig_t nccl = NCCL_CONFIG_INITIALIZER;
  nccl.blocking = 0;
  if (config.comm_sm_count > 0) nccl.maxCTAs = static_cast<int>(config.comm_sm_count);
  return nccl;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const EpGroupConfig& config, const EpBootstrap& bootstrap, CudaDevice& device) {
  RETURN_IF_ERROR(device.MakeCurrent());
  ASSIGN_OR_RETURN(const ncclUniqueId id, AgreeOnId(config, bootstrap));
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator);
  ncclConfig_t nccl = ConfigFor(config);
  ncclResult_t state =
      ncclCommInitRankConfig(&made->comm_, static_cast<int>(config.world), id,
                             static_cast<int>(config.rank), &nccl);
  while (state == ncclInProgress) {
    if (Clock::Real().Now() >= bootstrap.deadline) {
      return Error(Reason::kStepTimeout)
          .Text("rank ", config.rank, ": forming the NCCL communicator of ", config.world,
                " ranks passed its deadline")
          .With("rank", config.rank);
    }
    std::this_thread::sleep_for(kFormingNap);
    const ncclResult_t asked = ncclCommGetAsyncError(made->comm_, &state);
    if (asked != ncclSuccess) state = asked;
  }
  RETURN_IF_ERROR(NcclStatus(state, "forming the NCCL communicator", made->comm_));
  return made;
}

absl::Status NcclCommunicator::Health() const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
  return NcclStatus(asked != ncclSuccess ? asked : state, "NCCL communicator", comm_);
}

absl::Status NcclCommunicator::Settle(ncclResult_t result, std::string_view what,
                                      WaitGuard& guard) const {
  RETURN_IF_ERROR(NcclStatus(result, what, comm_));
  ncclResult_t state = result;
  while (state == ncclInProgress) {
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    if (asked != ncclSuccess) state = asked;
    if (state == ncclInProgress) {
      RETURN_IF_ERROR(guard.Check());
      std::this_thread::yield();
    }
  }
  return NcclStatus(state, what, comm_);
}

void NcclCommunicator::Abort() {
  if (comm_ == nullptr) return;
  // ncclCommAbort can hang with work in flight: it runs beside this thread, which waits a while.
  std::packaged_task<ncclResult_t()> abort([comm = comm_] { return ncclCommAbort(comm); });
  std::future<ncclResult_t> done = abort.get_future();
  std::thread(std::move(abort)).detach();
  comm_ = nullptr;
  if (done.wait_for(kAbortSeconds) != std::future_status::ready) {
    Log(LogLevel::kError, "nccl_abort_stuck").Field("seconds", kAbortSeconds.count());
  }
}

}  // namespace expertd
