// The grouped matrix product kernel: a persistent block of one producer and two consumers.
//
// Blocks walk the units of sm90_tiles.h. The producer runs ahead of the consumers through the ring
// of stages, over tile borders too.
#ifndef KERNELS_MLP_SM90_KERNEL_CUH_
#define KERNELS_MLP_SM90_KERNEL_CUH_

#include "kernels/mlp/sm90_epilogue.cuh"
#include "kernels/mlp/sm90_epilogue_grad.cuh"
#include "kernels/mlp/sm90_producer.cuh"

namespace expertd::sm90 {

inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;

template <typename C>
__device__ __forceinline__ void Consume(const GemmParams& p, const Layout<C>& layout, int rank) {
  const int warp = threadIdx.x / 32 - 4;
  const Self self = {
      .consumer = warp / 4, .warp = warp, .lane = static_cast<int>(threadIdx.x % 32)};
  TileWalk walk(p.grid, rank);
  Ring<C::stages> ring;
  Staging<C::buffers> staging = {layout.Staging(self.warp), 0};
  Work work;
  float sum[C::sums] = {};
  const int clusters = gridDim.x / C::cluster;
  for (int unit = blockIdx.x / C::cluster; NextWork<C>(p, walk, unit, work); unit += clusters) {
    const int row = work.begin + work.tile.row * C::rows + LeftBlock<C>(self) * 64;
    if (C::weights || row < work.data_end) {
      Accumulate<C>(sum, layout, work, ring, self);
    } else {
      PassOver<C>(layout, work, ring, self);
    }
    if constexpr (C::product == Product::kInner) {
      FinishInner<C>(sum, p, work, staging, self);
    } else if constexpr (C::product == Product::kGradInner) {
      FinishGradInner<C>(sum, p, layout, work, ring, self);
    } else if constexpr (C::weights) {
      FinishWeights<C>(sum, p, work, staging, self);
    } else {
      FinishPlain<C>(sum, p, work, staging, self);
    }
  }
  // The stores read shared memory, which ends with the block.
  if (self.lane == 0) WaitGroupsRead<0>();
  __syncwarp();
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) GemmKernel(const __grid_constant__ GemmParams p) {
  extern __shared__ uint8_t shared[];
  const Layout<C> layout = {(SharedAddress(shared) + 1023) / 1024 * 1024};
  const int rank = C::cluster == 1 ? 0 : static_cast<int>(ClusterRank());
  if (threadIdx.x == 0) {
    PrefetchMap(&p.left);
    PrefetchMap(&p.right);
    PrefetchMap(&p.out);
    for (int stage = 0; stage < C::stages; ++stage) {
      InitBarrier(layout.Full(stage), 1);
      InitBarrier(layout.Empty(stage), kConsumerWarps * C::cluster);
    }
    PublishBarriers();
  }
  __syncthreads();
  if constexpr (C::cluster > 1) ClusterSync();

  if (threadIdx.x < 128) {
    GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce<C>(p, layout, rank);
    __syncwarp();
  } else {
    TakeRegisters<kConsumerRegisters>();
    Consume<C>(p, layout, rank);
  }
  // A block's shared memory must outlive what the other block loads into it or signals there.
  if constexpr (C::cluster > 1) ClusterSync();
}

template <typename C>
cudaError_t StartGemm(const GemmLaunch& launch, const GemmParams& params) {
  constexpr auto kernel = GemmKernel<C>;
  const cudaError_t set =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::shared_bytes);
  if (set != cudaSuccess) return set;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.sms / C::cluster * C::cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = C::shared_bytes;
  config.stream = launch.stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = C::cluster;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Chooses the element type.
template <Product product, TileKind kind>
cudaError_t StartKind(const GemmLaunch& launch, const GemmParams& params) {
  if (launch.token == DType::kBF16) {
    return StartGemm<Config<__nv_bfloat16, product, kind>>(launch, params);
  }
  if (launch.token == DType::kF16) return StartGemm<Config<__half, product, kind>>(launch, params);
  return cudaErrorInvalidValue;
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_KERNEL_CUH_
