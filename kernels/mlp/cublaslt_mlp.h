// The `cublaslt` expert MLP: one matrix product per expert that has rows, on a few streams.
//
// Experts are dealt to lanes; a lane is a stream with scratch of its own, which starts after all that
// the device's stream holds and which that stream waits for at the end. Products put their f32 sums
// into scratch, from where our kernels make what is stored: u is computed from f32 accumulators and
// everything is rounded once. Rows of one expert go through in blocks, so that scratch is bounded.
// Where token and weight dtypes differ, both are widened to f32 and multiplied so.
#ifndef KERNELS_MLP_CUBLASLT_MLP_H_
#define KERNELS_MLP_CUBLASLT_MLP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/scratch.h"
#include "kernels/cuda/stream.h"
#include "kernels/expert_mlp.h"
#include "kernels/mlp/mlp_kernels.h"

namespace expertd {

class CublasLtMlp final : public ExpertMlp {
 public:
  // REQUIRES: float dtypes in `config`; lanes >= 1.
  static absl::StatusOr<std::unique_ptr<CublasLtMlp>> Create(const MlpConfig& config,
                                                             CudaDevice& device,
                                                             int64_t lanes = kLanes);

  std::string_view name() const override { return "cublaslt"; }
  absl::Status Forward(const MlpForwardArgs& args) override;
  absl::Status Dgrad(const MlpDgradArgs& args) override;
  absl::Status Wgrad(const MlpWgradArgs& args) override;

 private:
  static constexpr int64_t kLanes = 2;
  static constexpr int64_t kBlockRows = 4096;

  struct Lane {
    StreamHandle stream;
    EventHandle done;
    Scratch sums;  // [block rows, 2I or I] f32
    Scratch out;   // [block rows, H] f32, where the product cannot store the tokens itself
    Scratch u;     // [block rows, I] operand dtype
    Scratch left;  // widened operands
    Scratch right;
  };
  // Consecutive data rows of one expert.
  struct Block {
    int64_t expert = 0;
    int64_t begin = 0;
    int64_t rows = 0;
    int64_t lane = 0;
  };
  using BlockStep = std::function<absl::Status(const Block&)>;

  CublasLtMlp(const MlpConfig& config, CudaDevice& device) : config_(config), device_(device) {}
  absl::Status Open(int64_t lanes);

  // Bytes of scratch for each row of a block.
  struct ScratchWidths {
    int64_t sums = 0;
    int64_t out = 0;
    int64_t u = 0;
    int64_t left = 0;
    int64_t right = 0;
  };
  // Before the fork: growing scratch gives memory back to the pool, whose users follow the device's
  // stream and not the lanes'.
  absl::Status ReserveScratch(const ExpertSegments& segments, const ScratchWidths& widths);
  // Calls `step` for all data rows between fork and join of the lanes.
  absl::Status ForBlocks(const ExpertSegments& segments, const BlockStep& step);
  absl::Status ForwardBlock(const MlpForwardArgs& args, const Block& block);
  absl::Status DgradBlock(const MlpDgradArgs& args, const Block& block);
  absl::Status WgradBlock(const MlpWgradArgs& args, const Block& block);
  absl::Status BiasGradients(const MlpWgradArgs& args, const Block& block);

  // The weights as the products read them: in place, or widened copies.
  absl::Status UseWeights(const MlpWeights& weights);
  const void* Weight(const void* matrix, int64_t expert, int64_t rows, int64_t cols) const;
  // Data rows of a [rows, cols] token-dtype matrix as an operand: in place, or widened to `scratch`.
  absl::StatusOr<const void*> Operand(const void* matrix, const Block& block, int64_t cols,
                                      Scratch& scratch);
  // out rows (token dtype) = left @ right (+ factor * bias), rounded once.
  absl::Status MultiplyToTokens(MatmulArgs product, const Block& block, const float* bias,
                                const float* factors, void* out);
  // Zeroes the pad rows of up to three matrices of the given widths in bytes.
  struct PadTarget {
    void* matrix = nullptr;
    int64_t row_bytes = 0;
  };
  absl::Status ZeroPads(const ExpertSegments& segments, const std::vector<PadTarget>& targets);

  int64_t TokenBytes() const { return static_cast<int64_t>(DTypeSize(config_.token_dtype)); }
  int64_t OperandBytes() const { return static_cast<int64_t>(DTypeSize(OperandDType())); }
  // f32 bytes of a row of an operand that must be widened; 0 when it is read in place.
  int64_t WidenedBytes(int64_t cols) const {
    return OperandDType() == config_.token_dtype ? 0 : cols * static_cast<int64_t>(sizeof(float));
  }
  DType OperandDType() const {
    return config_.token_dtype == config_.weight_dtype ? config_.token_dtype : DType::kF32;
  }
  void* RowsAt(void* matrix, const Block& block, int64_t cols) const {
    return static_cast<std::byte*>(matrix) + block.begin * cols * TokenBytes();
  }
  const void* RowsAt(const void* matrix, const Block& block, int64_t cols) const {
    return static_cast<const std::byte*>(matrix) + block.begin * cols * TokenBytes();
  }
  Lane& LaneOf(const Block& block) { return lanes_[static_cast<size_t>(block.lane)]; }

  const MlpConfig config_;
  CudaDevice& device_;
  std::unique_ptr<CublasMatmul> matmul_;
  std::vector<Lane> lanes_;
  EventHandle fork_;
  // Weights of the call in progress.
  const void* gate_up_ = nullptr;
  const void* down_ = nullptr;
  Scratch wide_gate_up_;
  Scratch wide_down_;
  uint64_t wide_version_ = 0;
  const void* wide_source_ = nullptr;
};

}  // namespace expertd

#endif  // KERNELS_MLP_CUBLASLT_MLP_H_
