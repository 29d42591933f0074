// What becomes of a tile's sums: activation, bias and rounding in registers, then stores by warp.
//
// A warp has 16 rows. Of every 8 columns, lane l has columns 2 (l % 4) and the next in rows l / 4
// (sums 4j, 4j + 1) and l / 4 + 8 (sums 4j + 2, 4j + 3), for column block j. Outputs are made 128
// bytes of a row at a time, swizzled as the copy engine reads them, in a buffer.
#ifndef KERNELS_MLP_SM90_EPILOGUE_CUH_
#define KERNELS_MLP_SM90_EPILOGUE_CUH_

#include "kernels/cuda/numeric.cuh"
#include "kernels/mlp/sm90_activation.cuh"
#include "kernels/mlp/sm90_consumer.cuh"

namespace expertd::sm90 {

inline constexpr int kChunk = 64;  // columns of 16-bit elements in 128 bytes

// The 16 rows of a warp, and those of them that this lane has.
struct WarpRows {
  int first;
  int data_end;
  int end;
  int row[2];
  bool valid[2];  // holds data, not padding
};

template <typename C>
__device__ __forceinline__ WarpRows RowsOf(const Work& work, const Self& self) {
  WarpRows rows;
  const int warp = C::split_rows ? self.warp : self.warp % 4;
  rows.first = work.begin + work.tile.row * C::rows + warp * 16;
  rows.data_end = work.data_end;
  rows.end = work.end;
  for (int i = 0; i < 2; ++i) {
    rows.row[i] = rows.first + self.lane / 4 + i * 8;
    rows.valid[i] = rows.row[i] < work.data_end;
  }
  return rows;
}

template <typename T>
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  const Pack<T, 2> pair = {FromFloat<T>(low), FromFloat<T>(high)};
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <typename T>
__device__ __forceinline__ float2 UnpackPair(uint32_t bits) {
  const auto pair = *reinterpret_cast<const Pack<T, 2>*>(&bits);
  return {ToFloat(pair.value[0]), ToFloat(pair.value[1])};
}

// Where this lane's row of the matrices j and j + 1 (8 columns each) of a chunk lies in a buffer.
__device__ __forceinline__ uint32_t ChunkRow(uint32_t buffer, int lane, int j) {
  const int row = lane % 16;
  return buffer + row * 128 + ((j + lane / 16) ^ (row & 7)) * 16;
}

// A warp's buffers, used in turn.
template <int kBuffers>
struct Staging {
  uint32_t buffers;
  int turn;

  // The next buffer, once the store that used it last has read it.
  __device__ __forceinline__ uint32_t Take(int lane) {
    if (lane == 0) WaitGroupsRead<kBuffers - 1>();
    __syncwarp();
    turn = (turn + 1) % kBuffers;
    return buffers + turn * kWarpBuffer;
  }
};

// A [., width] matrix of 16-bit elements that a warp stores into: by boxes, or by elements where
// some rows of a box are not the expert's.
struct Target {
  const CUtensorMap* map;
  void* matrix;
  int64_t stride;  // elements from row to row
  int64_t offset;  // of column 0 in a row
  int columns;
  int part;  // second coordinate of a box where the matrix has [gate, up] rows
};

__device__ __forceinline__ void StoreByElements(const Target& to, uint32_t buffer,
                                                const WarpRows& rows, int column, int lane) {
  for (int i = lane; i < 16 * 8; i += 32) {
    const int row = i / 8;
    const int at = column + i % 8 * 8;
    if (rows.first + row >= rows.end || at >= to.columns) continue;
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(buffer + row * 128 + ((i % 8) ^ (row & 7)) * 16)
                 : "memory");
    auto* matrix = static_cast<uint16_t*>(to.matrix);
    *reinterpret_cast<uint4*>(matrix + (rows.first + row) * to.stride + to.offset + at) = value;
  }
}

// Stores the chunk that the warp has written to `buffer`; closes one group of copies.
template <bool kParts>
__device__ __forceinline__ void StoreChunk(const Target& to, uint32_t buffer, const WarpRows& rows,
                                           int column, int lane) {
  FenceAsync();
  __syncwarp();
  if (rows.first + 16 <= rows.end) {
    if (lane == 0) {
      if constexpr (kParts) {
        StoreBox(to.map, buffer, {column, to.part, rows.first});
      } else {
        StoreBox(to.map, buffer, {column, rows.first});
      }
    }
  } else if (rows.first < rows.end) {
    StoreByElements(to, buffer, rows, column, lane);
  }
  if (lane == 0) CloseGroup();
}

// Rounds 8 blocks of 8 columns, value(j, i) of which is that of sum 4j + i, and stores them.
template <typename T, bool kParts, int kBuffers, typename Value>
__device__ __forceinline__ void EmitChunk(const Target& to, Staging<kBuffers>& staging,
                                          const WarpRows& rows, int column, int lane,
                                          const Value& value) {
  const uint32_t buffer = staging.Take(lane);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    WarpStoreMatrices(ChunkRow(buffer, lane, j), PackPair<T>(value(j, 0), value(j, 1)),
                      PackPair<T>(value(j, 2), value(j, 3)),
                      PackPair<T>(value(j + 1, 0), value(j + 1, 1)),
                      PackPair<T>(value(j + 1, 2), value(j + 1, 3)));
  }
  StoreChunk<kParts>(to, buffer, rows, column, lane);
}

__device__ __forceinline__ float FactorOf(const float* factors, const WarpRows& rows, int i) {
  return factors != nullptr && rows.valid[i] ? factors[rows.row[i]] : 1.0f;
}

// Adds factor * bias to the sums of `blocks` blocks of 8 columns from sum `from` on. Columns past
// `columns` are made but never stored.
template <int kBlocks, int kSums>
__device__ __forceinline__ void AddBias(float (&sum)[kSums], int from, const float* bias,
                                        int column, int columns, float low, float high, int lane) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const int at = column + j * 8 + lane % 4 * 2;
    if (at >= columns) continue;
    const float2 value = *reinterpret_cast<const float2*>(bias + at);
    sum[from + 4 * j] += low * value.x;
    sum[from + 4 * j + 1] += low * value.y;
    sum[from + 4 * j + 2] += high * value.x;
    sum[from + 4 * j + 3] += high * value.y;
  }
}

// h and u of a tile: the first half of a thread's sums are of [gate], the second of [up].
template <typename C>
__device__ __forceinline__ void FinishInner(float (&sum)[C::sums], const GemmParams& p,
                                            const Work& work, Staging<C::buffers>& staging,
                                            const Self& self) {
  using T = typename C::T;
  constexpr int kHalf = C::sums / 2;
  constexpr int kChunks = kHalf / 32;
  const WarpRows rows = RowsOf<C>(work, self);
  const int column =
      work.tile.column * (kTileColumns / 2) + (C::split_columns ? self.consumer * kChunk : 0);
  const int64_t inner = p.columns;
  if (p.bias != nullptr) {
    const float* bias = p.bias + work.expert * 2 * inner;
    AddBias<kHalf / 4>(sum, 0, bias, column, p.columns, 1.0f, 1.0f, self.lane);
    AddBias<kHalf / 4>(sum, kHalf, bias + inner, column, p.columns, 1.0f, 1.0f, self.lane);
  }
#pragma unroll
  for (int i = 0; i < C::sums; ++i) sum[i] = rows.valid[i / 2 % 2] ? sum[i] : 0.0f;
  if (p.extra_rows != nullptr) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const Target h = {&p.extra, p.extra_rows, 2 * inner, part * inner, p.columns, part};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        EmitChunk<T, true>(h, staging, rows, column + c * kChunk, self.lane,
                           [&](int j, int i) { return sum[part * kHalf + c * 32 + 4 * j + i]; });
      }
    }
  }
  const float factor[2] = {FactorOf(p.factors, rows, 0), FactorOf(p.factors, rows, 1)};
  const Target u = {&p.out, p.rows, inner, 0, p.columns, 0};
  WithActivation(p.activation, [&](auto act) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      EmitChunk<T, false>(u, staging, rows, column + c * kChunk, self.lane, [&](int j, int i) {
        const int at = c * 32 + 4 * j + i;
        return factor[i / 2] * (ActWithSlope<decltype(act)::kind>(sum[at]).value * sum[kHalf + at]);
      });
    }
  });
}

// z or grad_x of a tile.
template <typename C>
__device__ __forceinline__ void FinishPlain(float (&sum)[C::sums], const GemmParams& p,
                                            const Work& work, Staging<C::buffers>& staging,
                                            const Self& self) {
  constexpr int kColumns = C::sums * 2;
  const WarpRows rows = RowsOf<C>(work, self);
  const int column =
      work.tile.column * kTileColumns + (C::split_columns ? self.consumer * kColumns : 0);
  if (p.bias != nullptr) {
    AddBias<kColumns / 8>(sum, 0, p.bias + static_cast<int64_t>(work.expert) * p.columns, column,
                          p.columns, FactorOf(p.factors, rows, 0), FactorOf(p.factors, rows, 1),
                          self.lane);
  }
#pragma unroll
  for (int i = 0; i < C::sums; ++i) sum[i] = rows.valid[i / 2 % 2] ? sum[i] : 0.0f;
  const Target out = {&p.out, p.rows, p.columns, 0, p.columns, 0};
#pragma unroll
  for (int c = 0; c < kColumns / kChunk; ++c) {
    EmitChunk<typename C::T, false>(out, staging, rows, column + c * kChunk, self.lane,
                                    [&](int j, int i) { return sum[c * 32 + 4 * j + i]; });
  }
}

// Adds a tile's f32 sums to the gradient, 32 columns at a time. Every element is of one tile, so
// that the order of tiles does not matter.
template <typename C>
__device__ __forceinline__ void FinishWeights(float (&sum)[C::sums], const GemmParams& p,
                                              const Work& work, Staging<C::buffers>& staging,
                                              const Self& self) {
  const int row = self.lane / 4;
  const int column = work.tile.column * kTileColumns;
  const int warp = C::split_rows ? self.warp : self.warp % 4;
#pragma unroll
  for (int c = 0; c < kTileColumns / 32; ++c) {
    const uint32_t buffer = staging.Take(self.lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int unit = 2 * j + self.lane % 4 / 2;
      const uint32_t at = buffer + row * 128 + (unit ^ (row & 7)) * 16 + self.lane % 2 * 8;
      const int from = c * 16 + 4 * j;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(sum[from]), "f"(sum[from + 1])
                   : "memory");
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 1024), "f"(sum[from + 2]),
                   "f"(sum[from + 3])
                   : "memory");
    }
    FenceAsync();
    __syncwarp();
    if (self.lane == 0) {
      AddBox(&p.out, buffer, {column + c * 32, work.tile.row * C::rows + warp * 16, work.expert});
      CloseGroup();
    }
  }
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_EPILOGUE_CUH_
