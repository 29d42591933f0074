// Forming, watching and aborting; see nccl_communicator.h.
#include "kernels/cuda/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"

namespace expertd {
namespace {

constexpr std::chrono::seconds kAbortBound{10};
constexpr std::chrono::microseconds kFormingNap{200};
// Blocks that move data when the group leaves it open: two H200 moved 318 GB/s one way with 64, 270
// with NCCL's own choice.
constexpr int kDefaultBlocks = 64;

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

absl::Status Late(const EpGroupConfig& config) {
  return Error(Reason::kStepTimeout)
      .Text("rank ", config.rank, ": forming the NCCL communicator of ", config.world,
            " ranks passed its deadline")
      .With("rank", config.rank);
}

// What a non-blocking communicator is at; ncclInProgress while `comm` does not exist yet.
ncclResult_t StateOf(ncclComm_t comm) {
  if (comm == nullptr) return ncclInProgress;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
  return asked != ncclSuccess ? asked : state;
}

// Waits until `made`, which NCCL's own thread may store late, is ready to be used. `source` is the
// communicator it is made from, or null.
absl::Status AwaitReady(ncclComm_t* made, ncclComm_t source, const EpGroupConfig& config,
                        SteadyTime deadline) {
  while (true) {
    const ncclComm_t comm = __atomic_load_n(made, __ATOMIC_ACQUIRE);
    const ncclResult_t state = StateOf(comm);
    const ncclResult_t before = source == nullptr ? ncclSuccess : StateOf(source);
    RETURN_IF_ERROR(NcclStatus(before, "forming the NCCL communicator", source));
    RETURN_IF_ERROR(NcclStatus(state, "forming the NCCL communicator", comm));
    if (state == ncclSuccess && before == ncclSuccess) return absl::OkStatus();
    if (Clock::Real().Now() >= deadline) return Late(config);
    std::this_thread::sleep_for(kFormingNap);
  }
}

// One byte to and from every other rank.
ncclResult_t GreetAll(ncclComm_t comm, const EpGroupConfig& config, char* bytes,
                      cudaStream_t stream) {
  ncclResult_t result = ncclGroupStart();
  for (int64_t peer = 0; peer < config.world && result == ncclSuccess; ++peer) {
    if (peer == config.rank) continue;
    result = ncclSend(bytes, 1, ncclUint8, static_cast<int>(peer), comm, stream);
    if (result != ncclSuccess) break;
    result = ncclRecv(bytes + 1 + peer, 1, ncclUint8, static_cast<int>(peer), comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

// Objects to waiting past a deadline.
class DeadlineGuard final : public WaitGuard {
 public:
  DeadlineGuard(const EpGroupConfig& config, SteadyTime deadline)
      : config_(config), deadline_(deadline) {}
  absl::Status Check() override {
    return Clock::Real().Now() < deadline_ ? absl::OkStatus() : Late(config_);
  }

 private:
  const EpGroupConfig& config_;
  const SteadyTime deadline_;
};

// ncclCommAbort can hang with work in flight: it runs beside this thread, which waits a while.
void AbortBounded(ncclComm_t comm) {
  if (comm == nullptr) return;
  std::packaged_task<ncclResult_t()> abort([comm] { return ncclCommAbort(comm); });
  std::future<ncclResult_t> done = abort.get_future();
  std::thread(std::move(abort)).detach();
  if (done.wait_for(kAbortBound) != std::future_status::ready) {
    Log(LogLevel::kError, "nccl_abort_stuck").Field("seconds", kAbortBound.count());
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const EpGroupConfig& config, const EpBootstrap& bootstrap, CudaDevice& device) {
  RETURN_IF_ERROR(device.MakeCurrent());
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator);
  RETURN_IF_ERROR(made->Form(config, bootstrap));
  RETURN_IF_ERROR(made->Split(config, bootstrap.deadline));
  RETURN_IF_ERROR(made->Connect(config, bootstrap.deadline, device));
  return made;
}

absl::Status NcclCommunicator::Form(const EpGroupConfig& config, const EpBootstrap& bootstrap) {
  ASSIGN_OR_RETURN(const ncclUniqueId id, AgreeOnId(config, bootstrap));
  ncclConfig_t nccl = NCCL_CONFIG_INITIALIZER;
  nccl.blocking = 0;
  const ncclResult_t started = ncclCommInitRankConfig(&parent_, static_cast<int>(config.world), id,
                                                      static_cast<int>(config.rank), &nccl);
  RETURN_IF_ERROR(NcclStatus(started, "forming the NCCL communicator", parent_));
  return AwaitReady(&parent_, nullptr, config, bootstrap.deadline);
}

absl::Status NcclCommunicator::Split(const EpGroupConfig& config, SteadyTime deadline) {
  ncclConfig_t nccl = NCCL_CONFIG_INITIALIZER;
  nccl.blocking = 1;
  nccl.minCTAs = config.comm_sm_count > 0 ? static_cast<int>(config.comm_sm_count) : kDefaultBlocks;
  nccl.maxCTAs = nccl.minCTAs;
  const ncclResult_t started =
      ncclCommSplit(parent_, 0, static_cast<int>(config.rank), &comm_, &nccl);
  RETURN_IF_ERROR(NcclStatus(started, "splitting the NCCL communicator", parent_));
  return AwaitReady(&comm_, parent_, config, deadline);
}

absl::Status NcclCommunicator::Connect(const EpGroupConfig& config, SteadyTime deadline,
                                       CudaDevice& device) {
  ASSIGN_OR_RETURN(const DeviceBuffer bytes, device.Allocate(1 + config.world));
  ASSIGN_OR_RETURN(const EventHandle greeted, CreateEvent());
  // The call blocks until the peers connect too; aborting from here ends it.
  std::packaged_task<ncclResult_t()> greet([&] {
    if (!device.MakeCurrent().ok()) return ncclUnhandledCudaError;
    return GreetAll(comm_, config, bytes.as<char>(), device.stream());
  });
  std::future<ncclResult_t> done = greet.get_future();
  std::thread greeter(std::move(greet));
  const bool late = done.wait_until(deadline) != std::future_status::ready;
  if (late) AbortBounded(std::exchange(comm_, nullptr));
  greeter.join();
  if (late) return Late(config);
  RETURN_IF_ERROR(NcclStatus(done.get(), "connecting to all ranks", comm_));
  RETURN_IF_ERROR(Record(greeted, device.stream()));
  DeadlineGuard guard(config, deadline);
  return PollEvent(greeted, &guard);
}

absl::Status NcclCommunicator::Health() const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
  return NcclStatus(asked != ncclSuccess ? asked : state, "NCCL communicator", comm_);
}

void NcclCommunicator::Abort() {
  AbortBounded(std::exchange(comm_, nullptr));
  AbortBounded(std::exchange(parent_, nullptr));
}

}  // namespace expertd
