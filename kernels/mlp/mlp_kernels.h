// Launchers of the element-wise kernels between the expert MLP's matrix products.
//
// Called by cublaslt_mlp. Arithmetic in f32, rounded once to the token dtype. `operand` is the
// dtype that the matrix products read: the token dtype or f32 (holding values already rounded to
// the token dtype). No synchronisation. A launch without rows does nothing.
#ifndef KERNELS_MLP_MLP_KERNELS_H_
#define KERNELS_MLP_MLP_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace expertd {

// Runs of data rows, each of one expert; passed by value. Matrices of the layer have a run's rows
// from `begin` on, scratch matrices from `scratch` on.
inline constexpr int kMostRuns = 64;
struct RowRuns {
  int count = 0;
  int64_t begin[kMostRuns];
  int64_t scratch[kMostRuns];
  int64_t rows[kMostRuns];
  int64_t expert[kMostRuns];
};

// u = factor * act(gate) * up, for [gate, up] = from + bias.
struct ActivateParams {
  Activation activation = Activation::kSilu;
  int64_t inner = 0;  // I
  DType token = DType::kInvalid;
  DType operand = DType::kInvalid;
  RowRuns runs;
  const float* sums = nullptr;     // scratch [., 2I] f32 accumulators, or null: then `h_in` is read
  const void* h_in = nullptr;      // [., 2I] token dtype
  const float* bias = nullptr;     // [experts, 2I] or null
  const float* factors = nullptr;  // [.] or null for 1
  void* h_out = nullptr;           // [., 2I] token dtype, or null
  void* u = nullptr;               // scratch [., I] operand dtype
};
cudaError_t LaunchActivate(const ActivateParams& params, cudaStream_t stream);

// With s = factor * grad_u: grad_gate = s * up * act'(gate), grad_up = s * act(gate);
// grad_w = <act(gate) * up, grad_u> + <down_bias, grad_out>.
struct ActivateGradParams {
  Activation activation = Activation::kSilu;
  int64_t inner = 0;   // I
  int64_t hidden = 0;  // H, of the bias
  DType token = DType::kInvalid;
  RowRuns runs;
  const void* h = nullptr;           // [., 2I]
  const float* grad_u = nullptr;     // scratch [., I]
  const float* factors = nullptr;    // [.] or null for 1
  const float* down_bias = nullptr;  // [experts, H] or null
  const void* grad_out = nullptr;    // [., H], read with a bias
  void* grad_h = nullptr;            // [., 2I]
  float* grad_w = nullptr;           // [.] or null
};
cudaError_t LaunchActivateGrad(const ActivateGradParams& params, cudaStream_t stream);

// out = round(sums + factor * bias), [rows, cols]; bias [cols] or null; factors [rows] or null
// for 1.
struct RoundRowsParams {
  int64_t rows = 0;
  int64_t cols = 0;
  DType token = DType::kInvalid;
  const float* sums = nullptr;
  const float* bias = nullptr;
  const float* factors = nullptr;
  void* out = nullptr;
};
cudaError_t LaunchRoundRows(const RoundRowsParams& params, cudaStream_t stream);

// sums [cols] += sum over rows, in a fixed order, of factor * row.
struct ColumnSumsParams {
  int64_t rows = 0;
  int64_t cols = 0;
  DType token = DType::kInvalid;
  const void* matrix = nullptr;    // [rows, cols]
  const float* factors = nullptr;  // [rows] or null for 1
  float* sums = nullptr;
};
cudaError_t LaunchColumnSums(const ColumnSumsParams& params, cudaStream_t stream);

// to [count] f32 = from.
cudaError_t LaunchWiden(DType dtype, const void* from, int64_t count, float* to,
                        cudaStream_t stream);

// Rows that are padding, as ranges; passed by value, so at most kMostRanges in one launch.
inline constexpr int kMostRanges = 128;
struct PadRanges {
  int count = 0;
  int64_t begin[kMostRanges];
  int64_t rows[kMostRanges];
};
// Zeroes those rows of up to three matrices; row_bytes 0 stands for none.
struct ZeroPadsParams {
  void* matrix[3] = {};
  int64_t row_bytes[3] = {};
  PadRanges ranges;
};
cudaError_t LaunchZeroPads(const ZeroPadsParams& params, cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_MLP_MLP_KERNELS_H_
