// EpBackend `nccl_lsa`: our kernels on NCCL's symmetric windows, for GPUs of one NVLink domain.
//
// A token's row is stored once into the window of each other rank that has one of its experts, at
// the token's own number, and spread there; sums go back the same way. Each row has a flag that
// carries the operation's tag (epoch, sequence, place in the sequence), so nothing is ever cleared.
// A rank stores into another's window only once that one has begun something later than the last
// operation that read there: its kernels from before have ended. So an operation may stop halfway
// on any rank, and the next sequence finds everything in order.
//
// Operations return once their kernel is queued on the device's stream; only Prepare waits, for the
// counts. Kernels end by themselves when a rank does not come; whatever wait of the device comes
// next then says why, for this backend is a guard of those.
#ifndef KERNELS_EP_LSA_EP_H_
#define KERNELS_EP_LSA_EP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/window_layout.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/scratch.h"
#include "kernels/ep/ep_layout.h"
#include "kernels/ep/lsa_handle.h"
#include "kernels/ep/lsa_kernels.h"
#include "kernels/ep/lsa_window.h"
#include "kernels/ep/route_record.h"
#include "kernels/ep_backend.h"

namespace expertd {

class LsaEp final : public EpBackend, private WaitGuard {
 public:
  // Collective. Errors: CONFIG_INVALID; those of LsaWindow::Create.
  static absl::StatusOr<std::unique_ptr<LsaEp>> Create(const EpGroupConfig& config,
                                                       const EpBootstrap& bootstrap,
                                                       CudaDevice& device);
  ~LsaEp() override;

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
  // What reads and writes one part of the windows, in the order that all ranks have.
  enum Part { kIdsPart, kScatterPart, kGatherPart, kSumPart, kParts };

  LsaEp(const EpGroupConfig& config, CudaDevice& device) : config_(config), device_(device) {}
  absl::Status Open(const EpBootstrap& bootstrap);

  absl::Status CheckAlive() const;
  // First thing in every operation: may it start?
  absl::Status Begin(const OpContext& context);
  // The next operation of this sequence, which uses `part`.
  absl::StatusOr<LsaOp> NextOp(Part part);
  // Last thing in every operation: `launched` is how its kernel's launch went.
  absl::Status Queued(cudaError_t launched, std::string_view what);

  // WaitGuard: may the host go on waiting for the stream; has what was queued gone well?
  absl::Status Check() override;
  absl::Status Finished() override;
  absl::Status CheckLimits();
  // What a kernel has reported that no caller was told; OK when nothing.
  absl::Status Report();
  absl::Status StoppedStatus(uint64_t sequence) const;
  absl::Status Fail(absl::Status why);
  void StopKernels(uint64_t LsaHostWords::*word, uint64_t mark);

  // Prepare.
  absl::StatusOr<LsaPrepareParams> PlanPrepare(const PrepareArgs& args, const absl::Status& own,
                                               LsaHandle& handle);
  absl::Status AwaitRecord();
  absl::Status JudgeRecord(const PrepareArgs& args, const absl::Status& own);
  absl::Status OwnIdError(const PrepareArgs& args);
  absl::Status FillHandle(const PrepareArgs& args, const EpLayout& layout, LsaHandle& handle);
  const int32_t* RecordOf(int64_t rank) const {
    return record_.data() + rank * (kRecordHeader + experts_);
  }
  EpLayoutConfig LayoutConfigOf(const PrepareArgs& args) const;

  // Rows.
  absl::Status CheckMatrices(const LsaHandle& handle, ConstMatrix tokens, ConstMatrix slots) const;
  absl::Status CheckValues(const LsaHandle& handle, const float* route_values,
                           const float* slot_values) const;
  absl::Status Scatter(const LsaHandle& handle, ConstMatrix rows, Matrix slots,
                       LsaScatterParams params);
  absl::Status Gather(const LsaHandle& handle, ConstMatrix slots, Matrix rows,
                      LsaGatherParams params);
  LsaWork WorkOf(const LsaHandle& handle, int64_t row_bytes) const;

  const EpGroupConfig config_;
  CudaDevice& device_;
  EpCapabilities capabilities_;
  uint64_t epoch_ = 0;
  WindowLayout layout_;
  std::unique_ptr<LsaWindow> window_;  // null after Abort
  PinnedHandle pinned_words_;
  LsaHostWords* words_ = nullptr;  // in pinned_words_
  DeviceBuffer device_words_;
  EventHandle done_;

  bool aborted_ = false;
  OpContext context_;     // of the sequence that was begun last
  uint64_t ordinal_ = 0;  // operations of that sequence so far
  uint64_t gates_[kParts] = {};
  bool running_ = false;  // a kernel was queued and not yet seen to be done
  absl::Status failure_;  // what this sequence ended with
  uint64_t told_ = 0;     // mark of the newest sequence whose failure was returned

  // Of the Prepare in progress.
  int64_t experts_ = 0;
  Scratch dropped_;
  Scratch counts_;
  uint32_t nonce_ = 0;           // of its record
  PinnedHandle pinned_record_;   // where the kernel writes
  std::vector<int32_t> record_;  // [world, kRecordHeader + E], taken from there
};

}  // namespace expertd

#endif  // KERNELS_EP_LSA_EP_H_
