// Packing rows for the wire and spreading received rows to their slots, bit for bit or scaled.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/ep/row_kernels.h"
#include "kernels/ep/row_shape.cuh"

namespace expertd {
namespace {

constexpr int kUnroll = 4;

template <typename V>
__global__ void __launch_bounds__(kRowThreads) PackKernel(PackParams p, int64_t pieces) {
  const int64_t i = RowOfThread();
  if (i >= p.wire_rows) return;
  const int64_t token = p.tokens[i];
  const V* from = static_cast<const V*>(p.rows) + token * pieces;
  V* to = static_cast<V*>(p.wire) + i * pieces;
  for (int64_t c = threadIdx.x; c < pieces; c += kUnroll * blockDim.x) {
    V piece[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = c + u * blockDim.x;
      if (at < pieces) piece[u] = from[at];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = c + u * blockDim.x;
      if (at < pieces) to[at] = piece[u];
    }
  }
  if (p.values == nullptr) return;
  for (int64_t k = threadIdx.x; k < p.top_k; k += blockDim.x) {
    p.wire_values[i * p.top_k + k] = p.values[token * p.top_k + k];
  }
}

// Source row i: its data and its values.
struct Source {
  int64_t row;  // in own or in wire
  bool own;
};

__device__ Source SourceOf(const SourceRows& sources, int64_t i) {
  const int64_t past = i - sources.own_begin;
  if (past < 0) return {i, false};
  if (past < sources.own_rows) return {sources.own_tokens[past], true};
  return {i - sources.own_rows, false};
}

// Values of one source row, to its slots.
__device__ void ScatterValues(const ScatterParams& p, const Source& source, const int32_t* slots) {
  if (p.out_values == nullptr) return;
  const int64_t top_k = p.sources.top_k;
  const float* values = (source.own ? p.own_values : p.wire_values) + source.row * top_k;
  for (int64_t k = threadIdx.x; k < top_k; k += blockDim.x) {
    if (slots[k] >= 0) p.out_values[slots[k]] = values[k];
  }
}

template <typename V>
__device__ void ZeroPad(const ScatterParams& p, int64_t pad, int64_t pieces) {
  const int64_t slot = p.pad_slots[pad];
  V* to = static_cast<V*>(p.out) + slot * pieces;
  for (int64_t c = threadIdx.x; c < pieces; c += blockDim.x) to[c] = V{};
  if (p.out_values != nullptr && threadIdx.x == 0) p.out_values[slot] = 0.0f;
}

template <typename V>
__global__ void __launch_bounds__(kRowThreads) ScatterKernel(ScatterParams p, int64_t pieces) {
  const int64_t i = RowOfThread();
  if (i >= p.sources.rows + p.pad_rows) return;
  if (i >= p.sources.rows) return ZeroPad<V>(p, i - p.sources.rows, pieces);
  const Source source = SourceOf(p.sources, i);
  const int32_t* slots = p.sources.slots + i * p.sources.top_k;
  const V* from = static_cast<const V*>(source.own ? p.own : p.wire) + source.row * pieces;
  for (int64_t c = threadIdx.x; c < pieces; c += kUnroll * blockDim.x) {
    V piece[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = c + u * blockDim.x;
      if (at < pieces) piece[u] = from[at];
    }
    for (int64_t k = 0; k < p.sources.top_k; ++k) {
      const int64_t slot = slots[k];
      if (slot < 0) continue;
      V* to = static_cast<V*>(p.out) + slot * pieces;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = c + u * blockDim.x;
        if (at < pieces) to[at] = piece[u];
      }
    }
  }
  ScatterValues(p, source, slots);
}

template <typename T, int N>
__global__ void __launch_bounds__(kRowThreads)
    ScaledScatterKernel(ScatterParams p, int64_t pieces) {
  using V = Pack<T, N>;
  const int64_t i = RowOfThread();
  if (i >= p.sources.rows + p.pad_rows) return;
  if (i >= p.sources.rows) return ZeroPad<V>(p, i - p.sources.rows, pieces);
  const Source source = SourceOf(p.sources, i);
  const int32_t* slots = p.sources.slots + i * p.sources.top_k;
  const V* from = static_cast<const V*>(source.own ? p.own : p.wire) + source.row * pieces;
  for (int64_t c = threadIdx.x; c < pieces; c += blockDim.x) {
    const V piece = from[c];
    for (int64_t k = 0; k < p.sources.top_k; ++k) {
      const int64_t slot = slots[k];
      if (slot < 0) continue;
      const float factor = p.factors[slot];
      V scaled;
#pragma unroll
      for (int n = 0; n < N; ++n) scaled.value[n] = FromFloat<T>(factor * ToFloat(piece.value[n]));
      (static_cast<V*>(p.out) + slot * pieces)[c] = scaled;
    }
  }
  ScatterValues(p, source, slots);
}

// Calls launch(TypeTag<V>(), pieces) with the widest V that divides rows of `bytes` at `addresses`.
template <typename Launch>
cudaError_t WithPieces(int64_t bytes, uintptr_t addresses, const Launch& launch) {
  const uintptr_t all = addresses | static_cast<uintptr_t>(bytes);
  if (all % 16 == 0) return launch(TypeTag<uint4>(), bytes / 16);
  if (all % 8 == 0) return launch(TypeTag<uint2>(), bytes / 8);
  if (all % 4 == 0) return launch(TypeTag<uint32_t>(), bytes / 4);
  if (all % 2 == 0) return launch(TypeTag<uint16_t>(), bytes / 2);
  return launch(TypeTag<uint8_t>(), bytes);
}

}  // namespace

cudaError_t LaunchPack(const PackParams& p, cudaStream_t stream) {
  if (p.wire_rows == 0) return cudaSuccess;
  return WithPieces(p.row_bytes, Address(p.rows) | Address(p.wire), [&](auto tag, int64_t pieces) {
    using V = typename decltype(tag)::type;
    const RowShape shape = RowShapeFor(p.wire_rows, pieces);
    PackKernel<V><<<shape.grid, shape.block, 0, stream>>>(p, pieces);
    return cudaGetLastError();
  });
}

cudaError_t LaunchScatter(const ScatterParams& p, cudaStream_t stream) {
  const int64_t rows = p.sources.rows + p.pad_rows;
  if (rows == 0) return cudaSuccess;
  const uintptr_t addresses = Address(p.own) | Address(p.wire) | Address(p.out);
  if (p.factors == nullptr) {
    const int64_t bytes = p.cols * static_cast<int64_t>(DTypeSize(p.dtype));
    return WithPieces(bytes, addresses, [&](auto tag, int64_t pieces) {
      using V = typename decltype(tag)::type;
      const RowShape shape = RowShapeFor(rows, pieces);
      ScatterKernel<V><<<shape.grid, shape.block, 0, stream>>>(p, pieces);
      return cudaGetLastError();
    });
  }
  return WithFloatType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = p.cols % kWide == 0 && addresses % 16 == 0;
    const RowShape shape = RowShapeFor(rows, wide ? p.cols / kWide : p.cols);
    if (wide) {
      ScaledScatterKernel<T, kWide><<<shape.grid, shape.block, 0, stream>>>(p, p.cols / kWide);
    } else {
      ScaledScatterKernel<T, 1><<<shape.grid, shape.block, 0, stream>>>(p, p.cols);
    }
    return cudaGetLastError();
  });
}

}  // namespace expertd
