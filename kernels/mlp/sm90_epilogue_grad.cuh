// The gradient of the activation, made where grad_u is summed: grad_h, and row dots for grad_w.
#ifndef KERNELS_MLP_SM90_EPILOGUE_GRAD_CUH_
#define KERNELS_MLP_SM90_EPILOGUE_GRAD_CUH_

#include "kernels/mlp/sm90_epilogue.cuh"

namespace expertd::sm90 {

// Of one warp and 64 columns: h is read from the stage where the producer put it, and grad_h takes
// its place there. dot += <u, grad_u> of the lane's two rows.
template <typename T, Activation kind>
__device__ __forceinline__ void GradChunk(const float* sum, uint32_t gate_at, uint32_t up_at,
                                          const WarpRows& rows, const float (&factor)[2], int lane,
                                          float (&dot)[2]) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t gate_row = ChunkRow(gate_at, lane, j);
    const uint32_t up_row = ChunkRow(up_at, lane, j);
    uint32_t gate[4];
    uint32_t up[4];
    WarpLoadMatrices(gate_row, gate);
    WarpLoadMatrices(up_row, up);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int side = k % 2;
      const float2 g = UnpackPair<T>(gate[k]);
      const float2 v = UnpackPair<T>(up[k]);
      const ActValue low = ActWithSlope<kind>(g.x);
      const ActValue high = ActWithSlope<kind>(g.y);
      const float grad_low = sum[4 * (j + k / 2) + 2 * side];
      const float grad_high = sum[4 * (j + k / 2) + 2 * side + 1];
      const float scaled_low = factor[side] * grad_low;
      const float scaled_high = factor[side] * grad_high;
      const bool valid = rows.valid[side];
      dot[side] += valid ? low.value * v.x * grad_low + high.value * v.y * grad_high : 0.0f;
      gate[k] =
          valid ? PackPair<T>(scaled_low * v.x * low.slope, scaled_high * v.y * high.slope) : 0;
      up[k] = valid ? PackPair<T>(scaled_low * low.value, scaled_high * high.value) : 0;
    }
    WarpStoreMatrices(gate_row, gate[0], gate[1], gate[2], gate[3]);
    WarpStoreMatrices(up_row, up[0], up[1], up[2], up[3]);
  }
}

// grad_h of a tile. Columns past I have zero sums and a zero h, and are not stored.
template <typename C>
__device__ __forceinline__ void FinishGradInner(float (&sum)[C::sums], const GemmParams& p,
                                                const Layout<C>& layout, const Work& work,
                                                Ring<C::stages>& ring, const Self& self) {
  using T = typename C::T;
  const WarpRows rows = RowsOf<C>(work, self);
  const float factor[2] = {FactorOf(p.factors, rows, 0), FactorOf(p.factors, rows, 1)};
  const int64_t inner = p.columns;
  float dot[2] = {};
  int last = 0;
#pragma unroll
  for (int c = 0; c < C::extra_stages; ++c) {
    Wait(layout.Full(ring.stage), ring.phase);
    const uint32_t gate = layout.Block(ring.stage, 0) + self.warp * kWarpBuffer;
    const uint32_t up = gate + 2 * kBlockBytes;
    WithActivation(p.activation, [&](auto act) {
      GradChunk<T, decltype(act)::kind>(sum + c * 32, gate, up, rows, factor, self.lane, dot);
    });
    const int column = work.tile.column * kTileColumns + c * kChunk;
    StoreChunk<true>({&p.out, p.rows, 2 * inner, 0, p.columns, 0}, gate, rows, column, self.lane);
    StoreChunk<true>({&p.out, p.rows, 2 * inner, inner, p.columns, 1}, up, rows, column, self.lane);
    // The stage before this one is free once its two stores have read it.
    if (c > 0) {
      if (self.lane == 0) WaitGroupsRead<2>();
      __syncwarp();
      Release(layout, last, self.lane);
    }
    last = ring.stage;
    ring.Next();
  }
  if (self.lane == 0) WaitGroupsRead<0>();
  __syncwarp();
  Release(layout, last, self.lane);
  // A pair's second tile may lie past the last column tile.
  if (p.partials == nullptr || work.tile.column >= p.grid.columns) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    dot[i] += __shfl_xor_sync(0xffffffffu, dot[i], 1);
    dot[i] += __shfl_xor_sync(0xffffffffu, dot[i], 2);
    if (self.lane % 4 == 0 && rows.row[i] < rows.end) {
      p.partials[work.tile.column * p.partial_rows + rows.row[i]] = dot[i];
    }
  }
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_EPILOGUE_GRAD_CUH_
