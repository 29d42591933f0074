// The EP operations on the CPU over any CpuTransport: `loopback` and `gloo` differ only in that.
//
// Dispatch sends each token once to each rank that owns one of its experts; the receiver copies the
// row to its slots. Combine and DispatchBackward reduce a token's rows on the rank that holds them,
// in f32 in order of k, round the partial sum to the token dtype and send one row back; the owner
// adds the ranks' partials in rank order, its own unrounded, and rounds once.
#ifndef KERNELS_CPU_CPU_EP_H_
#define KERNELS_CPU_CPU_EP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/byte_arena.h"
#include "kernels/cpu/cpu_ep_handle.h"
#include "kernels/cpu/cpu_transport.h"
#include "kernels/ep_backend.h"

namespace expertd {

class CpuEp final : public EpBackend {
 public:
  // Not collective: the transport is formed. Errors: CONFIG_INVALID.
  static absl::StatusOr<std::unique_ptr<CpuEp>> Create(const EpGroupConfig& config,
                                                       std::unique_ptr<CpuTransport> transport);

  const EpCapabilities& capabilities() const override { return transport_->capabilities(); }
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
  void Cancel(uint64_t sequence) override { transport_->Cancel(sequence); }
  void Abort() override { transport_->Abort(); }

 private:
  CpuEp(const EpGroupConfig& config, std::unique_ptr<CpuTransport> transport);

  // Rows from tokens to slots, with one f32 value per route beside them.
  struct ScatterArgs {
    ConstMatrix rows;                     // [T, H]
    const float* route_values = nullptr;  // [T, K] or null
    Matrix slots;                         // [>= total, H]
    float* slot_values = nullptr;         // [>= total] or null
    const float* slot_factors = nullptr;  // [>= total] or null: multiplies each row on arrival
  };
  // Rows from slots to tokens, summed, with one f32 value per route beside them.
  struct GatherArgs {
    ConstMatrix slots;                    // [>= total, H]
    const float* slot_factors = nullptr;  // [>= total] or null
    const float* slot_values = nullptr;   // [>= total] or null
    Matrix rows;                          // [T, H]
    float* route_values = nullptr;        // [T, K] or null
  };

  absl::Status CheckPrepare(const PrepareArgs& args) const;
  absl::Status ExchangeRecords(const OpContext& context, const PrepareArgs& args,
                               const absl::Status& own);
  absl::Status JudgeRecords(const absl::Status& own) const;
  absl::Status ExchangeRoutes(const OpContext& context, const EpLayout& layout,
                              CpuEpHandle& handle);
  absl::Status CheckMatrices(const CpuEpHandle& handle, ConstMatrix tokens,
                             ConstMatrix slots) const;
  // A rank without tokens or without received rows may pass null on that side.
  absl::Status CheckValues(const CpuEpHandle& handle, const float* route_values,
                           const float* slot_values) const;

  absl::Status Scatter(const OpContext& context, const CpuEpHandle& handle,
                       const ScatterArgs& args);
  void ScatterFrom(const CpuEpHandle& handle, int64_t source, const ScatterArgs& args);
  absl::Status Gather(const OpContext& context, const CpuEpHandle& handle, const GatherArgs& args);
  void PackPartials(const CpuEpHandle& handle, int64_t target, const GatherArgs& args);
  void AddPartials(const CpuEpHandle& handle, const GatherArgs& args);
  absl::Status AllReduceSmall(const OpContext& context, float* data, int64_t count);
  absl::Status AllReduceLarge(const OpContext& context, float* data, int64_t count);

  // Points send_ and recv_ at scratch of the given sizes per rank; own rank's stay empty.
  using SizeOf = std::function<int64_t(int64_t rank)>;
  void LayOutMessages(const SizeOf& send_size, const SizeOf& recv_size);
  std::byte* SendData(int64_t rank) { return send_data_[static_cast<size_t>(rank)]; }
  const std::byte* RecvData(int64_t rank) const { return recv_[static_cast<size_t>(rank)].data(); }

  const EpGroupConfig config_;
  const std::unique_ptr<CpuTransport> transport_;

  // Scratch of one operation.
  ByteArena send_arena_;
  ByteArena recv_arena_;
  ByteArena sum_arena_;
  std::vector<ConstBytes> send_;       // [world]
  std::vector<std::byte*> send_data_;  // [world] the same memory, writable
  std::vector<MutableBytes> recv_;     // [world]
  std::vector<int64_t> counts_;        // [world, experts]
  std::vector<size_t> cursor_;         // [world]
};

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_EP_H_
