// Rounding with bias, column sums, widening and zeroing of the expert MLP's matrices.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/mlp/mlp_kernels.h"

namespace expertd {
namespace {

constexpr int kThreads = 256;
// Column sums: columns and row lanes of a block.
constexpr int kColumns = 32;
constexpr int kRowLanes = 8;

template <typename T>
__global__ void __launch_bounds__(kThreads) RoundRowsKernel(RoundRowsParams p) {
  const int64_t row = blockIdx.x;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= p.cols) return;
  float value = p.sums[row * p.cols + column];
  if (p.bias != nullptr) {
    value += (p.factors != nullptr ? p.factors[row] : 1.0f) * p.bias[column];
  }
  static_cast<T*>(p.out)[row * p.cols + column] = FromFloat<T>(value);
}

// Lane y adds rows y, y + 8, ...; then the lanes are added in order.
template <typename T>
__global__ void ColumnSumsKernel(ColumnSumsParams p) {
  __shared__ float lanes[kRowLanes][kColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum = 0;
  if (column < p.cols) {
    for (int64_t row = threadIdx.y; row < p.rows; row += kRowLanes) {
      const float factor = p.factors != nullptr ? p.factors[row] : 1.0f;
      sum += factor * ToFloat(static_cast<const T*>(p.matrix)[row * p.cols + column]);
    }
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.cols) return;
  for (int lane = 1; lane < kRowLanes; ++lane) sum += lanes[lane][threadIdx.x];
  p.sums[column] += sum;
}

template <typename T>
__global__ void WidenKernel(const T* from, int64_t count, float* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = ToFloat(from[i]);
}

// blockIdx.x: range; blockIdx.y: share of its rows; blockIdx.z: matrix.
__global__ void __launch_bounds__(kThreads) ZeroPadsKernel(ZeroPadsParams p) {
  const int64_t row_bytes = p.row_bytes[blockIdx.z];
  auto* matrix = static_cast<unsigned char*>(p.matrix[blockIdx.z]);
  for (int64_t row = blockIdx.y; row < p.ranges.rows[blockIdx.x]; row += gridDim.y) {
    unsigned char* begin = matrix + (p.ranges.begin[blockIdx.x] + row) * row_bytes;
    if ((reinterpret_cast<uintptr_t>(begin) | static_cast<uintptr_t>(row_bytes)) % 16 == 0) {
      for (int64_t i = threadIdx.x; i < row_bytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(begin)[i] = uint4{};
      }
    } else {
      for (int64_t i = threadIdx.x; i < row_bytes; i += kThreads) begin[i] = 0;
    }
  }
}

dim3 RowGrid(int64_t rows, int64_t cols) {
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>((cols + kThreads - 1) / kThreads));
}

}  // namespace

cudaError_t LaunchRoundRows(const RoundRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return WithFloatType(p.token, [&](auto type) {
    using T = typename decltype(type)::type;
    RoundRowsKernel<T><<<RowGrid(p.rows, p.cols), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t LaunchColumnSums(const ColumnSumsParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return WithFloatType(p.token, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto blocks = static_cast<unsigned>((p.cols + kColumns - 1) / kColumns);
    ColumnSumsKernel<T><<<blocks, dim3(kColumns, kRowLanes), 0, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t LaunchWiden(DType dtype, const void* from, int64_t count, float* to,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return WithFloatType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    WidenKernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(from), count, to);
    return cudaGetLastError();
  });
}

cudaError_t LaunchZeroPads(const ZeroPadsParams& p, cudaStream_t stream) {
  if (p.ranges.count == 0) return cudaSuccess;
  int64_t most = 0;
  for (int i = 0; i < p.ranges.count; ++i) most = std::max(most, p.ranges.rows[i]);
  unsigned matrices = 0;
  while (matrices < 3 && p.row_bytes[matrices] > 0) ++matrices;
  const auto shares = static_cast<unsigned>(std::min<int64_t>(most, 16));
  const dim3 grid(static_cast<unsigned>(p.ranges.count), shares, matrices);
  ZeroPadsKernel<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace expertd
