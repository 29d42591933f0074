// What the roles of a matrix product's block agree on: shared memory, the ring of stages, tiles.
#ifndef KERNELS_MLP_SM90_LAYOUT_CUH_
#define KERNELS_MLP_SM90_LAYOUT_CUH_

#include <cstdint>

#include "kernels/mlp/sm90_gemm.h"
#include "kernels/mlp/sm90_ptx.cuh"
#include "kernels/mlp/sm90_wgmma.cuh"

namespace expertd::sm90 {

inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kConsumerWarps = kConsumers * 4;
inline constexpr int kThreads = (1 + kConsumers) * 128;
inline constexpr int kRightBlocks = kTileColumns / 64;
// A warp's output leaves through buffers of 16 rows by 128 bytes.
inline constexpr int kWarpBuffer = 2048;

template <typename Element, Product kProduct, TileKind kKind>
struct Config {
  using T = Element;
  static constexpr Product product = kProduct;
  static constexpr int rows = RowsOf(kKind);
  static constexpr bool split_rows = kKind == TileKind::kWide;
  static constexpr bool split_columns = kKind == TileKind::kNarrow;
  static constexpr int cluster = split_columns ? 1 : 2;
  static constexpr int left_blocks = rows / 64;
  static constexpr int stage_blocks = left_blocks + kRightBlocks;
  static constexpr int stage_bytes = stage_blocks * kBlockBytes;
  static constexpr bool weights = product == Product::kGradWeights;
  static constexpr Major left_major = weights ? kMajorMN : kMajorK;
  static constexpr Major right_major =
      product == Product::kGradInner || product == Product::kGradTokens ? kMajorK : kMajorMN;
  static constexpr int sums = split_columns ? 64 : 128;  // of one thread
  static constexpr int stages = 4;
  static constexpr int buffers = 2;  // of one warp
  // Stages with h that follow the sums of a tile, 64 columns each.
  static constexpr int extra_stages = product == Product::kGradInner ? kTileColumns / 64 : 0;
  static constexpr int staging_offset = stages * stage_bytes;
  static constexpr int barrier_offset = staging_offset + kConsumerWarps * buffers * kWarpBuffer;
  static constexpr int shared_bytes = barrier_offset + 2 * stages * 8 + 1024;
  static_assert(extra_stages == 0 || split_rows);
  static_assert(!weights || !split_columns);
  static_assert(shared_bytes <= 227 * 1024);
};

// Position in the ring; all roles walk it alike.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Addresses in shared memory. A stage has the left operand's blocks, then the right one's.
template <typename C>
struct Layout {
  uint32_t base;
  __device__ __forceinline__ uint32_t Stage(int stage) const {
    return base + stage * C::stage_bytes;
  }
  __device__ __forceinline__ uint32_t Block(int stage, int block) const {
    return Stage(stage) + block * kBlockBytes;
  }
  __device__ __forceinline__ uint32_t Staging(int warp) const {
    return base + C::staging_offset + warp * C::buffers * kWarpBuffer;
  }
  // Bytes have arrived.
  __device__ __forceinline__ uint32_t Full(int stage) const {
    return base + C::barrier_offset + stage * 8;
  }
  // Consumers, of the pair's other block too, are done.
  __device__ __forceinline__ uint32_t Empty(int stage) const {
    return base + C::barrier_offset + (C::stages + stage) * 8;
  }
};

// A tile in terms of rows and stages.
struct Work {
  Tile tile;
  int expert;    // of the layer
  int begin;     // first row of the segment
  int data_end;  // end of the segment's data rows
  int end;       // end of the segment
  int steps;     // stages of operands
};

template <typename C>
__device__ __forceinline__ bool NextWork(const GemmParams& p, TileWalk& walk, int unit,
                                         Work& work) {
  work.tile = walk.Find(p.table, unit);
  if (work.tile.expert < 0) return false;
  work.expert = p.table.first + work.tile.expert;
  work.begin = p.table.begin[work.tile.expert];
  work.data_end = work.begin + p.table.count[work.tile.expert];
  work.end = work.begin + p.table.padded[work.tile.expert];
  const int sums = C::weights ? p.table.count[work.tile.expert] : p.sums;
  work.steps = CeilDiv(sums, kSumStep);
  return true;
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_LAYOUT_CUH_
