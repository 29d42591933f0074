// The matrix products of the experts, as CpuMlp needs them: what the CPU MLPs differ in.
//
// Called from the device thread only. No call has an empty dimension.
#ifndef KERNELS_CPU_EXPERT_MATMUL_H_
#define KERNELS_CPU_EXPERT_MATMUL_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/expert_mlp.h"

namespace expertd {

// A weight matrix of one expert as a right operand [k, n].
enum class WeightUse : uint8_t {
  kGateUp,            // [H, 2I]
  kDown,              // [I, H]
  kGateUpTransposed,  // [2I, H]
  kDownTransposed,    // [H, I]
};

// Most rows that one call may have: enough for the products to run at full speed, few enough for a
// block's accumulators to stay in cache.
inline constexpr int64_t kMatmulRows = 512;

class ExpertMatmul {
 public:
  virtual ~ExpertMatmul() = default;
  virtual std::string_view name() const = 0;
  // Of every `in`, `left` and `right` below: kF32 or kBF16.
  virtual DType operand_dtype() const = 0;
  // Rows that `out` of Multiply must have room for; at least `rows`. The rest is clobbered.
  virtual int64_t OutRows(int64_t rows) const { return rows; }

  // The weights of the Multiply calls that follow.
  virtual absl::Status UseWeights(const MlpWeights& weights) = 0;
  // out [rows, n] f32 = in [rows, k] @ weight.
  virtual absl::Status Multiply(WeightUse use, int64_t expert, int64_t rows, const void* in,
                                float* out) = 0;
  // sum [m, n] f32 += left^T [m, rows] @ right [rows, n].
  virtual absl::Status AddProduct(int64_t rows, int64_t m, int64_t n, const void* left,
                                  const void* right, float* sum) = 0;
};

}  // namespace expertd

#endif  // KERNELS_CPU_EXPERT_MATMUL_H_
