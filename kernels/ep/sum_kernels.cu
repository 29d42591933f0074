// Sums of slot rows: partial sums for other ranks, final sums for own tokens, ordered all-reduce.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/ep/row_kernels.h"
#include "kernels/ep/row_shape.cuh"

namespace expertd {
namespace {

// Products and sums are rounded each by itself, as on the CPU: no fused operations.
template <int N>
struct Sum {
  float value[N] = {};
  bool any = false;

  // The first addend is taken as it is: adding it to zero would turn -0 into 0.
  __device__ void Add(const float* addend) {
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] = any ? __fadd_rn(value[n], addend[n]) : addend[n];
    any = true;
  }
};

template <typename T, int N>
__device__ void Widen(const Pack<T, N>& piece, float* wide) {
#pragma unroll
  for (int n = 0; n < N; ++n) wide[n] = ToFloat(piece.value[n]);
}

// Piece c of the rows in `slots` [K], added in order of k.
template <typename T, int N>
__device__ Sum<N> SumSlots(const void* rows, const float* factors, const int32_t* slots,
                           int64_t top_k, int64_t pieces, int64_t c) {
  Sum<N> sum;
#pragma unroll 4
  for (int64_t k = 0; k < top_k; ++k) {
    const int64_t slot = slots[k];
    if (slot < 0) continue;
    const Pack<T, N> piece = (static_cast<const Pack<T, N>*>(rows) + slot * pieces)[c];
    float wide[N];
    Widen(piece, wide);
    if (factors != nullptr) {
      const float factor = factors[slot];
#pragma unroll
      for (int n = 0; n < N; ++n) wide[n] = __fmul_rn(wide[n], factor);
    }
    sum.Add(wide);
  }
  return sum;
}

template <typename T, int N>
__device__ Pack<T, N> Rounded(const Sum<N>& sum) {
  Pack<T, N> piece;
#pragma unroll
  for (int n = 0; n < N; ++n) piece.value[n] = FromFloat<T>(sum.value[n]);
  return piece;
}

template <typename T, int N>
__global__ void __launch_bounds__(kRowThreads) PartialKernel(PartialParams p, int64_t pieces) {
  const SourceRows& sources = p.sources;
  const int64_t i = RowOfThread();
  if (i >= sources.rows - sources.own_rows) return;
  const int64_t row = i < sources.own_begin ? i : i + sources.own_rows;
  const int32_t* slots = sources.slots + row * sources.top_k;
  auto* to = static_cast<Pack<T, N>*>(p.wire) + i * pieces;
  for (int64_t c = threadIdx.x; c < pieces; c += blockDim.x) {
    to[c] = Rounded<T, N>(SumSlots<T, N>(p.slots, p.factors, slots, sources.top_k, pieces, c));
  }
  if (p.slot_values == nullptr) return;
  for (int64_t k = threadIdx.x; k < sources.top_k; k += blockDim.x) {
    p.wire_values[i * sources.top_k + k] = slots[k] >= 0 ? p.slot_values[slots[k]] : 0.0f;
  }
}

__device__ float RouteValue(const FinalParams& p, int64_t token, int64_t k) {
  const int64_t owner = p.route_owner[token * p.top_k + k];
  if (owner < 0) return 0.0f;
  const int64_t row = p.row_of[token * p.world + owner];
  if (owner == p.rank) return p.slot_values[p.own_slots[row * p.top_k + k]];
  return p.wire_values[(p.wire_begin[owner] + row) * p.top_k + k];
}

template <typename T, int N>
__global__ void __launch_bounds__(kRowThreads) FinalKernel(FinalParams p, int64_t pieces) {
  using V = Pack<T, N>;
  const int64_t t = RowOfThread();
  if (t >= p.tokens) return;
  const int32_t* rows = p.row_of + t * p.world;
  for (int64_t c = threadIdx.x; c < pieces; c += blockDim.x) {
    Sum<N> sum;
    for (int64_t r = 0; r < p.world; ++r) {
      const int64_t row = rows[r];
      if (row < 0) continue;
      if (r == p.rank) {
        const Sum<N> own =
            SumSlots<T, N>(p.slots, p.factors, p.own_slots + row * p.top_k, p.top_k, pieces, c);
        if (own.any) sum.Add(own.value);
      } else {
        float wide[N];
        Widen((static_cast<const V*>(p.wire) + (p.wire_begin[r] + row) * pieces)[c], wide);
        sum.Add(wide);
      }
    }
    (static_cast<V*>(p.out) + t * pieces)[c] = Rounded<T, N>(sum);
  }
  if (p.out_values == nullptr) return;
  for (int64_t k = threadIdx.x; k < p.top_k; k += blockDim.x) {
    p.out_values[t * p.top_k + k] = RouteValue(p, t, k);
  }
}

__global__ void OrderedSumKernel(const float* gathered, int64_t world, int64_t count, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = gathered[i];
  for (int64_t rank = 1; rank < world; ++rank) sum += gathered[rank * count + i];
  out[i] = sum;
}

}  // namespace

cudaError_t LaunchPartials(const PartialParams& p, cudaStream_t stream) {
  const int64_t rows = p.sources.rows - p.sources.own_rows;
  if (rows == 0) return cudaSuccess;
  return WithFloatType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = p.cols % kWide == 0 && (Address(p.slots) | Address(p.wire)) % 16 == 0;
    const RowShape shape = RowShapeFor(rows, wide ? p.cols / kWide : p.cols);
    if (wide) {
      PartialKernel<T, kWide><<<shape.grid, shape.block, 0, stream>>>(p, p.cols / kWide);
    } else {
      PartialKernel<T, 1><<<shape.grid, shape.block, 0, stream>>>(p, p.cols);
    }
    return cudaGetLastError();
  });
}

cudaError_t LaunchFinal(const FinalParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return WithFloatType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWide = 16 / sizeof(T);
    const uintptr_t addresses = Address(p.slots) | Address(p.wire) | Address(p.out);
    const bool wide = p.cols % kWide == 0 && addresses % 16 == 0;
    const RowShape shape = RowShapeFor(p.tokens, wide ? p.cols / kWide : p.cols);
    if (wide) {
      FinalKernel<T, kWide><<<shape.grid, shape.block, 0, stream>>>(p, p.cols / kWide);
    } else {
      FinalKernel<T, 1><<<shape.grid, shape.block, 0, stream>>>(p, p.cols);
    }
    return cudaGetLastError();
  });
}

cudaError_t LaunchOrderedSum(const float* gathered, int64_t world, int64_t count, float* out,
                             cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  OrderedSumKernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                     stream>>>(gathered, world, count, out);
  return cudaGetLastError();
}

}  // namespace expertd
