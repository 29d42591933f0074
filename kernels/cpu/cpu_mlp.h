// ExpertMlp on the CPU: everything but the matrix products, which an ExpertMatmul does.
//
// Rows of one expert go through in blocks; the f32 accumulators of a block never leave scratch.
#ifndef KERNELS_CPU_CPU_MLP_H_
#define KERNELS_CPU_CPU_MLP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "kernels/cpu/byte_arena.h"
#include "kernels/cpu/expert_matmul.h"
#include "kernels/expert_mlp.h"

namespace expertd {

class CpuMlp final : public ExpertMlp {
 public:
  // REQUIRES: float dtypes in `config`.
  CpuMlp(const MlpConfig& config, std::unique_ptr<ExpertMatmul> matmul)
      : config_(config), matmul_(std::move(matmul)) {}

  std::string_view name() const override { return matmul_->name(); }
  absl::Status Forward(const MlpForwardArgs& args) override;
  absl::Status Dgrad(const MlpDgradArgs& args) override;
  absl::Status Wgrad(const MlpWgradArgs& args) override;

 private:
  // Consecutive data rows of one expert.
  struct Block {
    int64_t expert;
    int64_t begin;
    int64_t rows;
  };
  using BlockStep = std::function<absl::Status(const Block&)>;
  // Calls `step` for all data rows, at most kMatmulRows at a time.
  static absl::Status ForBlocks(const ExpertSegments& segments, const BlockStep& step);
  absl::Status ForwardBlock(const MlpForwardArgs& args, const Block& block);
  absl::Status DgradBlock(const MlpDgradArgs& args, const Block& block);
  absl::Status WgradBlock(const MlpWgradArgs& args, const Block& block);

  int64_t OutRows(const Block& block) const { return matmul_->OutRows(block.rows); }
  int64_t TokenBytes() const { return static_cast<int64_t>(DTypeSize(config_.token_dtype)); }
  // Rows [begin, begin + rows) of a token-dtype matrix, as an operand: in place where the dtypes
  // are equal, else converted into `scratch`.
  const void* AsOperand(const void* matrix, const Block& block, int64_t cols, ByteArena& scratch);
  // to (operand dtype) = from, rounded to the token dtype first.
  void StoreOperand(const float* from, int64_t count, void* to);
  // Zeroes the pad rows of a token-dtype matrix.
  void ZeroPads(const ExpertSegments& segments, int64_t cols, void* matrix) const;

  const MlpConfig config_;
  const std::unique_ptr<ExpertMatmul> matmul_;
  ByteArena operand_;        // rows converted for the first product
  ByteArena hidden_;         // operand made between the two products
  ByteArena other_operand_;  // the third operand of Wgrad
  ByteArena wide_sum_;       // [rows, 2I] or [rows, I] f32
  ByteArena narrow_sum_;     // [rows, H] f32
  ByteArena row_;            // a few rows
  ByteArena activated_;      // [I] f32
};

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_MLP_H_
