// The sums of a tile: a consumer warpgroup multiplies the stages of the ring.
#ifndef KERNELS_MLP_SM90_CONSUMER_CUH_
#define KERNELS_MLP_SM90_CONSUMER_CUH_

#include "kernels/mlp/sm90_layout.cuh"

namespace expertd::sm90 {

// Names of barriers between warps; 0 is __syncthreads.
inline constexpr int kMaskBarrier = 1;  // and 2: one for each consumer

// Who a consumer thread is.
struct Self {
  int consumer;  // 0 or 1
  int warp;      // among all consumer warps
  int lane;
};

// The block of the left operand that a consumer reads.
template <typename C>
__device__ __forceinline__ int LeftBlock(const Self& self) {
  return C::split_rows ? self.consumer : 0;
}

// The warp is done with a stage, in both blocks of the pair.
template <typename C>
__device__ __forceinline__ void Release(const Layout<C>& layout, int stage, int lane) {
  if constexpr (C::cluster == 1) {
    if (lane == 0) Arrive(layout.Empty(stage));
  } else {
    if (lane < C::cluster) ArriveAt(layout.Empty(stage), lane);
  }
}

// The last rows of an expert's segment may be followed by anything: zeroes the rows from `rows` on
// of the blocks that this consumer reads, so that no such value enters a sum. The other consumer
// writes the same zeros to the blocks that both read.
template <typename C>
__device__ __forceinline__ void ZeroTail(const Layout<C>& layout, int stage, int rows,
                                         const Self& self) {
  const int chunks = (kSumStep - rows) * 8;  // of 16 bytes
  const int thread = self.warp % 4 * 32 + self.lane;
  for (int i = thread; i < chunks * (1 + kRightBlocks); i += 128) {
    const int which = i / chunks;
    const int block = which == 0 ? LeftBlock<C>(self) : C::left_blocks + which - 1;
    const uint32_t at = layout.Block(stage, block) + rows * 128 + i % chunks * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  FenceAsync();
  NamedSync<128>(kMaskBarrier + self.consumer);
}

template <typename C>
__device__ __forceinline__ void MultiplyStage(float (&sum)[C::sums], const Layout<C>& layout,
                                              int stage, const Self& self) {
  const uint64_t left = OperandAt(layout.Block(stage, LeftBlock<C>(self)));
  const uint64_t right =
      OperandAt(layout.Block(stage, C::left_blocks + (C::split_columns ? 2 * self.consumer : 0)));
#pragma unroll
  for (int step = 0; step < kSumStep / 16; ++step) {
    Multiply<typename C::T, C::left_major, C::right_major>(
        sum, left + step * kNextStep<C::left_major>, right + step * kNextStep<C::right_major>);
  }
}

// The sums of a tile.
template <typename C>
__device__ __forceinline__ void Accumulate(float (&sum)[C::sums], const Layout<C>& layout,
                                           const Work& work, Ring<C::stages>& ring,
                                           const Self& self) {
  int last = 0;
#pragma unroll
  for (float& value : sum) value = 0.0f;
  for (int step = 0; step < work.steps; ++step) {
    Wait(layout.Full(ring.stage), ring.phase);
    if constexpr (C::weights) {
      const int rows = work.data_end - work.begin - step * kSumStep;
      if (rows < kSumStep) ZeroTail(layout, ring.stage, rows, self);
    }
    MatrixFence();
    MultiplyStage<C>(sum, layout, ring.stage, self);
    MatrixCommit();
    MatrixWait<1>();
    if (step > 0) Release(layout, last, self.lane);
    last = ring.stage;
    ring.Next();
  }
  MatrixWait<0>();
  Release(layout, last, self.lane);
}

// The same for a consumer whose rows are all padding: sums are not made, and not used.
template <typename C>
__device__ __forceinline__ void PassOver(const Layout<C>& layout, const Work& work,
                                         Ring<C::stages>& ring, const Self& self) {
  for (int step = 0; step < work.steps; ++step) {
    Wait(layout.Full(ring.stage), ring.phase);
    __syncwarp();
    Release(layout, ring.stage, self.lane);
    ring.Next();
  }
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_CONSUMER_CUH_
