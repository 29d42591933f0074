// Launchers of the grouped matrix products of the `sm90` expert MLP.
//
// Called by sm90_mlp. All matrices are named by tensor maps (sm90_tensor_map.h); the pointers
// beside them are the same matrices, for rows that no whole box covers. Element type bf16 or f16,
// sums in f32, no synchronisation. A launch without units does nothing.
#ifndef KERNELS_MLP_SM90_GEMM_H_
#define KERNELS_MLP_SM90_GEMM_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/mlp/sm90_plan.h"
#include "kernels/mlp/sm90_tiles.h"
#include "kernels/types.h"

namespace expertd::sm90 {

inline constexpr int kSumStep = 64;  // elements of the sum in one stage

struct GemmParams {
  CUtensorMap left;
  CUtensorMap right;
  CUtensorMap out;    // u, z, grad_h, grad_x or dW: boxes of one warp
  CUtensorMap extra;  // kInner: h, as `out`; kGradInner: h, boxes of 64 rows
  ExpertTable table;
  TileGrid grid;
  int sums = 0;     // length of the sums; of kGradWeights, whose sums are over rows, dW's rows
  int columns = 0;  // of the output; of [gate] and of [up] alone for kInner and kGradInner
  Activation activation = Activation::kSilu;
  void* rows = nullptr;            // u, z, grad_h or grad_x
  void* extra_rows = nullptr;      // kInner: h or null
  const float* bias = nullptr;     // kInner: [L, 2I], kOuter: [L, H], or null
  const float* factors = nullptr;  // [rows] or null for 1
  float* partials = nullptr;       // kGradInner: <u, grad_u> of each column tile, or null
  int64_t partial_rows = 0;        // rows of one column tile's partials
};

struct GemmLaunch {
  Product product = Product::kInner;
  TileKind kind = TileKind::kWide;  // grid.tile_rows are its rows; kWide alone for kGradInner
  DType token = DType::kInvalid;
  int sms = 0;
  cudaStream_t stream = nullptr;
};

// grid.cluster is 1 for kNarrow, which only kInner and kOuter have, and 2 for the others.
cudaError_t LaunchGemm(const GemmLaunch& launch, const GemmParams& params);

// u = factor * act(gate) * up of every row, padding too; [rows, 2I] to [rows, I]. I is a multiple
// of 8, matrices lie at multiples of 16 bytes.
struct WeightedInnerParams {
  Activation activation = Activation::kSilu;
  DType token = DType::kInvalid;
  int64_t rows = 0;
  int64_t inner = 0;
  const void* h = nullptr;
  const float* factors = nullptr;  // [rows] or null for 1
  void* u = nullptr;
};
cudaError_t LaunchWeightedInner(const WeightedInnerParams& params, cudaStream_t stream);

// grad_w [total] = sum over column tiles, in order, of partials + <down_bias, grad_out>.
struct RowDotsParams {
  ExpertTable table;
  DType token = DType::kInvalid;
  int tiles = 0;
  int64_t partial_rows = 0;
  const float* partials = nullptr;   // [tiles, partial_rows]
  const float* down_bias = nullptr;  // [L, H] or null
  const void* grad_out = nullptr;    // [., H], read with a bias
  int64_t hidden = 0;
  float* grad_w = nullptr;  // [.]: rows of the table's segments
};
cudaError_t LaunchRowDots(const RowDotsParams& params, cudaStream_t stream);

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_GEMM_H_
