// Row-wise kernels beside the grouped products: u for the weight gradients, and grad_w.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/mlp/sm90_activation.cuh"
#include "kernels/mlp/sm90_gemm.h"

namespace expertd::sm90 {
namespace {

constexpr int kBlock = 256;
constexpr int kWide = 8;
constexpr int64_t kMostBlocks = 2048;  // then each makes several pieces

template <typename T, Activation kind>
__global__ void __launch_bounds__(kBlock) WeightedInnerKernel(WeightedInnerParams p) {
  const int64_t pieces = p.inner / kWide;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < p.rows * pieces;
       i += stride) {
    const int64_t row = i / pieces;
    const T* gate_at = static_cast<const T*>(p.h) + row * 2 * p.inner + i % pieces * kWide;
    const auto gate = *reinterpret_cast<const Pack<T, kWide>*>(gate_at);
    const auto up = *reinterpret_cast<const Pack<T, kWide>*>(gate_at + p.inner);
    const float factor = p.factors != nullptr ? p.factors[row] : 1.0f;
    Pack<T, kWide> u;
#pragma unroll
    for (int n = 0; n < kWide; ++n) {
      const float value = ActWithSlope<kind>(ToFloat(gate.value[n])).value;
      u.value[n] = FromFloat<T>(factor * (value * ToFloat(up.value[n])));
    }
    reinterpret_cast<Pack<T, kWide>*>(p.u)[i] = u;
  }
}

template <typename T>
cudaError_t WeightedInner(const WeightedInnerParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.rows * (p.inner / kWide) + kBlock - 1) / kBlock;
  const dim3 grid(static_cast<unsigned>(std::min(blocks, kMostBlocks)));
  switch (p.activation) {
    case Activation::kSilu:
      WeightedInnerKernel<T, Activation::kSilu><<<grid, kBlock, 0, stream>>>(p);
      break;
    case Activation::kGelu:
      WeightedInnerKernel<T, Activation::kGelu><<<grid, kBlock, 0, stream>>>(p);
      break;
    case Activation::kRelu2:
      WeightedInnerKernel<T, Activation::kRelu2><<<grid, kBlock, 0, stream>>>(p);
      break;
  }
  return cudaGetLastError();
}

// The expert whose segment has `row`.
__device__ int ExpertOf(const ExpertTable& table, int row) {
  int low = 0;
  int high = table.experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.begin[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// One warp for each row.
template <typename T>
__global__ void __launch_bounds__(kBlock) RowDotsKernel(const __grid_constant__ RowDotsParams p) {
  const int last = p.table.experts - 1;
  const int row =
      p.table.begin[0] + static_cast<int>(blockIdx.x * (kBlock / 32) + threadIdx.x / 32);
  if (row >= p.table.begin[last] + p.table.padded[last]) return;
  const int lane = threadIdx.x % 32;
  const int expert = ExpertOf(p.table, row);
  float dot = 0;
  if (row < p.table.begin[expert] + p.table.count[expert]) {
    for (int tile = lane; tile < p.tiles; tile += 32)
      dot += p.partials[tile * p.partial_rows + row];
    if (p.down_bias != nullptr) {
      const float* bias = p.down_bias + (p.table.first + expert) * p.hidden;
      const T* grad_out = static_cast<const T*>(p.grad_out) + row * p.hidden;
      for (int64_t i = lane; i < p.hidden; i += 32) dot += bias[i] * ToFloat(grad_out[i]);
    }
  }
  for (int step = 16; step > 0; step /= 2) dot += __shfl_down_sync(0xffffffffu, dot, step);
  if (lane == 0) p.grad_w[row] = dot;
}

}  // namespace

cudaError_t LaunchWeightedInner(const WeightedInnerParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return WithFloatType(
      p.token, [&](auto type) { return WeightedInner<typename decltype(type)::type>(p, stream); });
}

cudaError_t LaunchRowDots(const RowDotsParams& p, cudaStream_t stream) {
  const int last = p.table.experts - 1;
  if (last < 0) return cudaSuccess;
  const int rows = p.table.begin[last] + p.table.padded[last] - p.table.begin[0];
  if (rows == 0) return cudaSuccess;
  return WithFloatType(p.token, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto blocks = static_cast<unsigned>((rows + kBlock / 32 - 1) / (kBlock / 32));
    RowDotsKernel<T><<<blocks, kBlock, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace expertd::sm90
