// EpBackend `nccl`: our kernels around grouped ncclSend and ncclRecv; any number of GPUs and nodes.
//
// A token travels once to each other rank that owns one of its experts, with a table of its slots
// there (made in Prepare) and its route weights; the receiver spreads it. Sums go the other way:
// the receiver adds a token's rows in f32, rounds once, sends one row; the owner adds the ranks'
// partials in rank order. Rows between a rank and itself never leave their place. A world of 1
// needs no NCCL.
//
// Operations return once their kernels are queued on the device's stream; only Prepare waits, for
// the counts. The host notices a peer's death, a deadline or Cancel in whatever wait comes next,
// for this backend is a guard of the device's waits. After a failed wait the communicator is of no
// more use.
#ifndef KERNELS_EP_NCCL_EP_H_
#define KERNELS_EP_NCCL_EP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/nccl_communicator.h"
#include "kernels/cuda/scratch.h"
#include "kernels/ep/ep_layout.h"
#include "kernels/ep/nccl_ep_handle.h"
#include "kernels/ep_backend.h"

namespace expertd {

class NcclEp final : public EpBackend, private WaitGuard {
 public:
  // Collective. Errors: CONFIG_INVALID; those of NcclCommunicator::Create.
  static absl::StatusOr<std::unique_ptr<NcclEp>> Create(const EpGroupConfig& config,
                                                        const EpBootstrap& bootstrap,
                                                        CudaDevice& device);
  ~NcclEp() override;

  const EpCapabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::unique_ptr<EpHandle>> Prepare(const OpContext& context,
                                                    const PrepareArgs& args) override;
  absl::Status Dispatch(const OpContext& context, const EpHandle& handle, ConstMatrix x,
                        const float* topk_weights, Matrix recv_x, float* recv_w) override;
  absl::Status Combine(const OpContext& context, const EpHandle& handle, ConstMatrix z,
                       const float* slot_weights, Matrix y) override;
  absl::Status DispatchBackward(const OpContext& context, const EpHandle& handle,
                                ConstMatrix grad_recv_x, const float* grad_recv_w, Matrix grad_x,
                                float* grad_topk_weights) override;
  absl::Status CombineBackward(const OpContext& context, const EpHandle& handle, ConstMatrix grad_y,
                               const float* slot_weights, Matrix grad_z) override;
  absl::Status AllReduceSum(const OpContext& context, float* data, int64_t count) override;
  void Cancel(uint64_t sequence) override;
  void Abort() override;

 private:
  // Rows from tokens to slots, with one f32 value per route beside them.
  struct ScatterArgs {
    ConstMatrix rows;                     // [T, H]
    const float* route_values = nullptr;  // [T, K] or null
    Matrix slots;                         // [>= total, H]
    float* slot_values = nullptr;         // [>= total] or null
    const float* slot_factors = nullptr;  // [>= total] or null
  };
  // Rows from slots to tokens, summed, with one f32 value per route beside them.
  struct GatherArgs {
    ConstMatrix slots;                    // [>= total, H]
    const float* slot_factors = nullptr;  // [>= total] or null
    const float* slot_values = nullptr;   // [>= total] or null
    Matrix rows;                          // [T, H]
    float* route_values = nullptr;        // [T, K] or null
  };
  // One array that travels, `row_bytes` for each wire row.
  struct WirePart {
    const void* send = nullptr;
    void* recv = nullptr;
    int64_t row_bytes = 0;
  };

  NcclEp(const EpGroupConfig& config, CudaDevice& device);
  absl::Status Open(const EpBootstrap& bootstrap);

  // GROUP_BROKEN after Abort or a failure.
  absl::Status CheckAlive() const;
  // First thing in every operation: may it start?
  absl::Status Begin(const OpContext& context);
  // WaitGuard: may the host go on waiting for the stream?
  absl::Status Check() override;
  // Cancelled, late or unhealthy; OK otherwise. Failing breaks a communicator of more than one
  // rank.
  absl::Status CheckLimits();
  absl::Status Break(absl::Status why);

  // Prepare.
  RouteShape ShapeOf(const PrepareArgs& args) const;
  absl::Status ExchangeRecords(const PrepareArgs& args, const absl::Status& own);
  absl::Status JudgeRecords(const PrepareArgs& args, const absl::Status& own);
  absl::Status OwnIdError(const PrepareArgs& args);
  const int32_t* RecordOf(int64_t rank) const { return records_ + rank * RecordInts(experts_); }
  int64_t RecordInts(int64_t experts) const { return kRecordHeader + experts + config_.world; }
  absl::Status FillHandle(const PrepareArgs& args, const EpLayout& layout, NcclEpHandle& handle);
  void CountWireRows(const EpLayout& layout, NcclEpHandle& handle) const;
  absl::Status PlaceTables(NcclEpHandle& handle);
  // Returns the number of ints written.
  int64_t WriteLayout(const EpLayout& layout, const NcclEpHandle& handle);
  bool DropsRoutes(const EpLayout& layout) const;
  absl::Status AssignRoutes(const PrepareArgs& args, const EpLayout& layout, NcclEpHandle& handle);
  absl::Status ExchangeTables(NcclEpHandle& handle);

  // Rows.
  absl::Status CheckMatrices(const NcclEpHandle& handle, ConstMatrix tokens,
                             ConstMatrix slots) const;
  absl::Status CheckValues(const NcclEpHandle& handle, const float* route_values,
                           const float* slot_values) const;
  absl::Status Scatter(const NcclEpHandle& handle, const ScatterArgs& args);
  absl::Status Gather(const NcclEpHandle& handle, const GatherArgs& args);
  // Sends the rows of `out` and receives those of `in`, all parts in one group.
  absl::Status Exchange(const WireRows& out, const WireRows& in, std::span<const WirePart> parts);
  // all [R, bytes] = what every rank has in `own`; `own` lies outside `all`.
  absl::Status GatherFromAll(const void* own, int64_t bytes, void* all);
  // Runs `queue` (NCCL calls) as one group.
  template <typename Queue>
  absl::Status Group(std::string_view what, const Queue& queue);

  const EpGroupConfig config_;
  CudaDevice& device_;
  EpCapabilities capabilities_;
  std::unique_ptr<NcclCommunicator> comm_;  // null in a world of 1 and after Abort

  std::atomic<uint64_t> cancelled_{0};  // sequences up to here are
  bool aborted_ = false;
  bool broken_ = false;
  OpContext context_;          // of the operation whose work was queued last
  bool wire_running_ = false;  // NCCL work was queued and not yet seen to be done
  EventHandle wire_done_;
  EventHandle records_ready_;

  // Scratch of one operation; grows only.
  int64_t experts_ = 0;  // of the Prepare in progress
  Scratch tile_counts_;
  Scratch record_;  // own record, then the records of all ranks
  Scratch layout_;  // what LaunchAssign reads
  Scratch send_rows_;
  Scratch recv_rows_;
  Scratch send_values_;
  Scratch recv_values_;
  Scratch dropped_;
  Scratch gathered_;
  PinnedHandle pinned_records_;
  PinnedHandle pinned_layout_;
  int32_t* records_ = nullptr;  // in pinned_records_
};

}  // namespace expertd

#endif  // KERNELS_EP_NCCL_EP_H_
