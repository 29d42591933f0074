// NcclEp: forming, limits of waiting, and the groups of NCCL calls.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/nccl_ep.h"
#include "kernels/ep/row_kernels.h"

namespace expertd {
namespace {

absl::Status CheckConfig(const EpGroupConfig& config) {
  Violations violations;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto check = [&](std::string_view name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    violations.Add(Reason::kConfigInvalid, std::string(name),
                   StrCat("got ", value, ", need ", low, " to ", high));
  };
  check("world", config.world, 1, kMost);
  check("rank", config.rank, 0, config.world - 1);
  check("max_recv_rows_per_rank", config.max_recv_rows, 1, kMost);
  check("max_top_k", config.max_top_k, 1, kMost);
  const int64_t top_k = std::max<int64_t>(config.max_top_k, 1);
  const int64_t world = std::max<int64_t>(config.world, 1);
  // Row and twice the route numbers are 32-bit in the tables and records.
  check("max_tokens_per_rank", config.max_tokens_per_rank, 0, kMost / std::max(2 * top_k, world));
  check("max_experts", config.max_experts, 1, kMaxRouteColumns - world);
  return violations.ToStatus("EP group of backend nccl");
}

}  // namespace

NcclEp::NcclEp(const EpGroupConfig& config, CudaDevice& device) : config_(config), device_(device) {
  capabilities_.name = "nccl";
  capabilities_.survives_cancel = config.world == 1;
  capabilities_.multi_process = true;
  capabilities_.max_world = std::numeric_limits<int32_t>::max();
}

absl::StatusOr<std::unique_ptr<NcclEp>> NcclEp::Create(const EpGroupConfig& config,
                                                       const EpBootstrap& bootstrap,
                                                       CudaDevice& device) {
  RETURN_IF_ERROR(CheckConfig(config));
  std::unique_ptr<NcclEp> made(new NcclEp(config, device));
  RETURN_IF_ERROR(made->Open(bootstrap));
  return made;
}

absl::Status NcclEp::Open(const EpBootstrap& bootstrap) {
  RETURN_IF_ERROR(device_.MakeCurrent());
  ASSIGN_OR_RETURN(wire_done_, CreateEvent());
  ASSIGN_OR_RETURN(records_ready_, CreateEvent());
  const int64_t record_bytes = RecordInts(config_.max_experts) * int64_t{sizeof(int32_t)};
  ASSIGN_OR_RETURN(pinned_records_, AllocatePinned(config_.world * record_bytes));
  // Two ints for each expert of the group and of this rank, and one for each rank.
  ASSIGN_OR_RETURN(pinned_layout_, AllocatePinned(4 * record_bytes));
  records_ = static_cast<int32_t*>(pinned_records_.get());
  if (config_.world > 1) {
    ASSIGN_OR_RETURN(comm_, NcclCommunicator::Create(config_, bootstrap, device_));
  }
  device_.AddGuard(this);
  return absl::OkStatus();
}

NcclEp::~NcclEp() {
  device_.RemoveGuard(this);
  static_cast<void>(device_.MakeCurrent());
  comm_.reset();
}

void NcclEp::Cancel(uint64_t sequence) {
  // One above, so that 0 says that nothing is cancelled.
  const uint64_t mark = sequence == std::numeric_limits<uint64_t>::max() ? sequence : sequence + 1;
  uint64_t old = cancelled_.load();
  while (old < mark && !cancelled_.compare_exchange_weak(old, mark)) {
  }
}

void NcclEp::Abort() {
  aborted_ = true;
  wire_running_ = false;
  static_cast<void>(device_.MakeCurrent());
  comm_.reset();
}

absl::Status NcclEp::CheckAlive() const {
  if (!aborted_ && !broken_) return absl::OkStatus();
  return Error(Reason::kGroupBroken)
      .Text("rank ", config_.rank, ": the NCCL communicator ",
            aborted_ ? "was given up" : "is broken by an earlier failure");
}

absl::Status NcclEp::Begin(const OpContext& context) {
  RETURN_IF_ERROR(CheckAlive());
  RETURN_IF_ERROR(device_.MakeCurrent());
  // What an earlier operation queued is judged by its own limits, as far as it has not ended.
  RETURN_IF_ERROR(Check());
  context_ = context;
  return CheckLimits();
}

absl::Status NcclEp::Check() {
  if (!wire_running_) return absl::OkStatus();
  if (cudaEventQuery(wire_done_.get()) == cudaSuccess) {
    wire_running_ = false;
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckAlive());  // the cause was told to whoever waited first
  RETURN_IF_ERROR(CheckLimits());
  const absl::Status health = comm_->Health();
  return health.ok() ? health : Break(health);
}

absl::Status NcclEp::CheckLimits() {
  if (cancelled_.load() > context_.sequence) {
    return Break(
        Error(Reason::kCancelled)
            .Text("rank ", config_.rank, ": sequence ", context_.sequence, " was cancelled")
            .With("sequence", context_.sequence));
  }
  if (Clock::Real().Now() < context_.deadline) return absl::OkStatus();
  return Break(Error(Reason::kStepTimeout)
                   .Text("rank ", config_.rank, ": sequence ", context_.sequence,
                         " passed its deadline waiting for other ranks")
                   .With("sequence", context_.sequence));
}

absl::Status NcclEp::Break(absl::Status why) {
  broken_ = config_.world > 1;
  return why;
}

template <typename Queue>
absl::Status NcclEp::Group(std::string_view what, const Queue& queue) {
  ncclResult_t result = ncclGroupStart();
  const ncclResult_t queued = queue();
  const ncclResult_t ended = ncclGroupEnd();
  // The first failure explains the others.
  if (result == ncclSuccess) result = queued;
  if (result == ncclSuccess) result = ended;
  absl::Status status = NcclStatus(result, what, comm_->get());
  if (!status.ok()) return Break(std::move(status));
  RETURN_IF_ERROR(Record(wire_done_, device_.stream()));
  wire_running_ = true;
  return absl::OkStatus();
}

absl::Status NcclEp::Exchange(const WireRows& out, const WireRows& in,
                              std::span<const WirePart> parts) {
  if (out.total == 0 && in.total == 0) return absl::OkStatus();
  return Group("exchanging rows", [&] {
    ncclResult_t result = ncclSuccess;
    const auto keep = [&](ncclResult_t next) {
      if (result == ncclSuccess) result = next;
    };
    for (int64_t step = 1; step < config_.world; ++step) {
      // Every rank starts with another peer, so that not all send to one.
      const int64_t to = (config_.rank + step) % config_.world;
      const int64_t from = (config_.rank + config_.world - step) % config_.world;
      const auto o = static_cast<size_t>(to);
      const auto i = static_cast<size_t>(from);
      for (const WirePart& part : parts) {
        if (out.rows[o] > 0) {
          keep(ncclSend(static_cast<const std::byte*>(part.send) + out.begin[o] * part.row_bytes,
                        static_cast<size_t>(out.rows[o] * part.row_bytes), ncclUint8,
                        static_cast<int>(to), comm_->get(), device_.stream()));
        }
        if (in.rows[i] > 0) {
          keep(ncclRecv(static_cast<std::byte*>(part.recv) + in.begin[i] * part.row_bytes,
                        static_cast<size_t>(in.rows[i] * part.row_bytes), ncclUint8,
                        static_cast<int>(from), comm_->get(), device_.stream()));
        }
      }
    }
    return result;
  });
}

absl::Status NcclEp::GatherFromAll(const void* own, int64_t bytes, void* all) {
  const auto size = static_cast<size_t>(bytes);
  const auto part = [&](int64_t rank) { return static_cast<std::byte*>(all) + rank * bytes; };
  RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(part(config_.rank), own, size, cudaMemcpyDeviceToDevice, device_.stream()),
      "gathering"));
  return Group("gathering", [&] {
    ncclResult_t result = ncclSuccess;
    for (int64_t peer = 0; peer < config_.world && result == ncclSuccess; ++peer) {
      if (peer == config_.rank) continue;
      const int rank = static_cast<int>(peer);
      result = ncclSend(own, size, ncclUint8, rank, comm_->get(), device_.stream());
      if (result != ncclSuccess) break;
      result = ncclRecv(part(peer), size, ncclUint8, rank, comm_->get(), device_.stream());
    }
    return result;
  });
}

absl::Status NcclEp::AllReduceSum(const OpContext& context, float* data, int64_t count) {
  RETURN_IF_ERROR(Begin(context));
  if (config_.world == 1 || count == 0) return absl::OkStatus();
  const int64_t bytes = count * int64_t{sizeof(float)};
  RETURN_IF_ERROR(gathered_.Reserve(device_, config_.world * bytes));
  RETURN_IF_ERROR(GatherFromAll(data, bytes, gathered_.data()));
  return CudaStatus(
      LaunchOrderedSum(gathered_.as<float>(), config_.world, count, data, device_.stream()),
      "adding in rank order");
}

}  // namespace expertd
