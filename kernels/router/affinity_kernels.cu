// The auxiliary loss's sums over tokens and their gradient; element-wise helpers of the router.
#include <cstdint>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/router/select_kernels.h"
#include "kernels/router/token_warp.cuh"

namespace expertd {
namespace {

constexpr int kThreads = 256;
// Fixed, whatever the device: the order of the sums is the same everywhere.
constexpr int kShares = 512;

extern __shared__ double warp_memory[];

// Scratch: partial sums [kShares, E] f64, then counts [E] i32.
__device__ double* PartialOf(const AffinityParams& p, int64_t share) {
  return static_cast<double*>(p.scratch) + share * p.config.expert_count;
}
__host__ __device__ int32_t* CountsOf(void* scratch, int64_t experts) {
  return reinterpret_cast<int32_t*>(static_cast<double*>(scratch) + kShares * experts);
}

// Block b adds the affinities of tokens b, b + kShares, ...
__global__ void __launch_bounds__(kWarp) AffinityKernel(AffinityParams p) {
  const int64_t experts = p.config.expert_count;
  double* partial = PartialOf(p, blockIdx.x);
  for (int64_t e = threadIdx.x; e < experts; e += kWarp) partial[e] = 0;
  for (int64_t t = blockIdx.x; t < p.tokens; t += kShares) {
    TokenWarp token(p.config, p.logits + t * experts, warp_memory);
    const double divisor = token.Affinities();
    for (int64_t e = token.lane; e < experts; e += kWarp) {
      partial[e] += token.probabilities[e] / divisor;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads) RoutedKernel(AffinityParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.tokens * p.config.top_k || p.ids[i] < 0) return;
  atomicAdd(&CountsOf(p.scratch, p.config.expert_count)[p.ids[i]], 1);
}

__global__ void __launch_bounds__(kThreads) AffinityTotalKernel(AffinityParams p) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= p.config.expert_count) return;
  double sum = 0;
  for (int64_t share = 0; share < kShares; ++share) sum += PartialOf(p, share)[e];
  p.affinity[e] = static_cast<float>(sum);
  p.routed[e] = static_cast<float>(CountsOf(p.scratch, p.config.expert_count)[e]);
}

__global__ void __launch_bounds__(kWarp) AffinityBackwardKernel(AffinityParams p) {
  const int64_t experts = p.config.expert_count;
  const int64_t t = blockIdx.x;
  TokenWarp token(p.config, p.logits + t * experts, warp_memory);
  const double sum = token.Affinities();
  double mean = 0;
  for (int64_t e = token.lane; e < experts; e += kWarp) {
    mean += static_cast<double>(p.scale[e]) * token.probabilities[e] / sum;
  }
  mean = LaneSum(mean);
  for (int64_t e = token.lane; e < experts; e += kWarp) {
    const double q = token.probabilities[e];
    const double slope = token.IsSigmoid() ? q * (1 - q) / sum : q;
    p.grad_logits[t * experts + e] +=
        static_cast<float>(slope * (static_cast<double>(p.scale[e]) - mean));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AddToKernel(const float* extra, int64_t count, T* grad) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) grad[i] = FromFloat<T>(ToFloat(grad[i]) + extra[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) ToF32Kernel(const T* from, int64_t count, float* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = ToFloat(from[i]);
}

unsigned Blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

cudaError_t RaiseShared(void (*kernel)(AffinityParams), size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace

int64_t AffinityScratchBytes(int64_t experts) {
  return experts *
         (kShares * static_cast<int64_t>(sizeof(double)) + static_cast<int64_t>(sizeof(int32_t)));
}

cudaError_t LaunchAffinity(const AffinityParams& p, cudaStream_t stream) {
  const int64_t experts = p.config.expert_count;
  const size_t shared = TokenWarpBytes(p.config);
  const cudaError_t raised = RaiseShared(AffinityKernel, shared);
  if (raised != cudaSuccess) return raised;
  const cudaError_t cleared = cudaMemsetAsync(
      CountsOf(p.scratch, experts), 0, static_cast<size_t>(experts) * sizeof(int32_t), stream);
  if (cleared != cudaSuccess) return cleared;
  AffinityKernel<<<kShares, kWarp, shared, stream>>>(p);
  const int64_t routes = p.tokens * p.config.top_k;
  if (routes > 0) RoutedKernel<<<Blocks(routes), kThreads, 0, stream>>>(p);
  AffinityTotalKernel<<<Blocks(experts), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchAffinityBackward(const AffinityParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  const size_t shared = TokenWarpBytes(p.config);
  const cudaError_t raised = RaiseShared(AffinityBackwardKernel, shared);
  if (raised != cudaSuccess) return raised;
  AffinityBackwardKernel<<<static_cast<unsigned>(p.tokens), kWarp, shared, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchAddTo(DType dtype, const float* extra, int64_t count, void* grad,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return WithFloatType(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    AddToKernel<T><<<Blocks(count), kThreads, 0, stream>>>(extra, count, static_cast<T*>(grad));
    return cudaGetLastError();
  });
}

cudaError_t LaunchTokensToF32(DType dtype, const void* from, int64_t count, float* to,
                              cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return WithFloatType(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ToF32Kernel<T><<<Blocks(count), kThreads, 0, stream>>>(static_cast<const T*>(from), count, to);
    return cudaGetLastError();
  });
}

}  // namespace expertd
