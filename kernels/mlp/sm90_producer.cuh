// The producer of a matrix product: one thread that keeps the ring of stages filled.
#ifndef KERNELS_MLP_SM90_PRODUCER_CUH_
#define KERNELS_MLP_SM90_PRODUCER_CUH_

#include "kernels/mlp/sm90_layout.cuh"

namespace expertd::sm90 {

// Block `block` (64 rows, or columns of a transposed operand) of the left operand at `step`.
template <typename C>
__device__ __forceinline__ Box LeftBox(const Work& work, int step, int block) {
  const int at = work.tile.row * C::rows + block * 64;
  if constexpr (C::weights) return {at, work.begin + step * kSumStep};
  return {step * kSumStep, work.begin + at};
}

// Block `block` (64 columns) of the right operand at `step`. For kInner a consumer's half of its
// columns are of [gate] and the other half the same columns of [up].
template <typename C>
__device__ __forceinline__ Box RightBox(const Work& work, int step, int block) {
  const int sum = step * kSumStep;
  if constexpr (C::product == Product::kInner) {
    const int part = C::split_columns ? block % 2 : block / 2;
    const int column = C::split_columns ? block / 2 : block % 2;
    return {work.tile.column * kTileColumns / 2 + column * 64, part, sum, work.expert};
  }
  const int at = work.tile.column * kTileColumns + block * 64;
  if constexpr (C::weights) return {at, work.begin + sum};
  if constexpr (C::right_major == kMajorMN) return {at, sum, work.expert};
  return {sum, at, work.expert};
}

template <typename C>
__device__ __forceinline__ void LoadOperands(const GemmParams& p, const Layout<C>& layout,
                                             const Work& work, int step, int stage, int rank) {
  const uint32_t full = layout.Full(stage);
  ArriveExpecting(full, C::stage_bytes);
#pragma unroll
  for (int block = 0; block < C::left_blocks; ++block) {
    const uint32_t to = layout.Block(stage, block);
    if (C::cluster == 1 || work.tile.share != Share::kLeft) {
      LoadBox(to, &p.left, full, LeftBox<C>(work, step, block));
    } else if (block % 2 == rank) {
      LoadBoxForPair(to, &p.left, full, LeftBox<C>(work, step, block));
    }
  }
#pragma unroll
  for (int block = 0; block < kRightBlocks; ++block) {
    const uint32_t to = layout.Block(stage, C::left_blocks + block);
    if (C::cluster == 1 || work.tile.share != Share::kRight) {
      LoadBox(to, &p.right, full, RightBox<C>(work, step, block));
    } else if (block / 2 == rank) {
      LoadBoxForPair(to, &p.right, full, RightBox<C>(work, step, block));
    }
  }
}

// 64 columns of [gate] and of [up] of h: blocks 0 and 1 of the stage, and 2 and 3.
template <typename C>
__device__ __forceinline__ void LoadExtra(const GemmParams& p, const Layout<C>& layout,
                                          const Work& work, int part, int stage) {
  const uint32_t full = layout.Full(stage);
  ArriveExpecting(full, 4 * kBlockBytes);
  const int column = work.tile.column * kTileColumns + part * 64;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int row = work.begin + work.tile.row * C::rows + block % 2 * 64;
    LoadBox(layout.Block(stage, block), &p.extra, full, {column, block / 2, row});
  }
}

template <typename C>
__device__ __forceinline__ void Produce(const GemmParams& p, const Layout<C>& layout, int rank) {
  TileWalk walk(p.grid, rank);
  Ring<C::stages> ring;
  Work work;
  const int clusters = gridDim.x / C::cluster;
  for (int unit = blockIdx.x / C::cluster; NextWork<C>(p, walk, unit, work); unit += clusters) {
    for (int step = 0; step < work.steps + C::extra_stages; ++step) {
      Wait(layout.Empty(ring.stage), ring.phase ^ 1);
      if (C::extra_stages == 0 || step < work.steps) {
        LoadOperands(p, layout, work, step, ring.stage, rank);
      } else {
        LoadExtra(p, layout, work, step - work.steps, ring.stage);
      }
      ring.Next();
    }
  }
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_PRODUCER_CUH_
