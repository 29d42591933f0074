// Initialisation, inspection, updates and rounding of parameters, one thread an element or block.
#include "kernels/optim/update_kernels.h"

#include <algorithm>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"

#define EXPERTD_PHILOX_FN __host__ __device__ inline
#include "kernels/optim/philox.h"

namespace expertd {
namespace {

constexpr int kThreads = 256;
// Fixed, whatever the device: the order of the sum is the same everywhere.
constexpr int kInspectBlocks = 1024;

unsigned Blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

__device__ int64_t Index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

// Thread i makes block i of the range's Philox blocks: up to four elements.
__global__ void __launch_bounds__(kThreads) InitUniformKernel(InitUniformParams p) {
  const uint64_t block = p.first_index / 4 + static_cast<uint64_t>(Index());
  const uint64_t end = p.first_index + static_cast<uint64_t>(p.count);
  if (block * 4 >= end) return;
  const PhiloxBlock words = StreamBlock(StreamKey(p.seed, p.layer_key, p.parameter_key), block);
  const float unit = UniformUnit(p.bound);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t at = block * 4 + i;
    if (at >= p.first_index && at < end) {
      p.out[at - p.first_index] = UniformFromWord(words.word[i], unit);
    }
  }
}

// Sums of all threads of a block, by halving; thread 0 has them.
__device__ InspectResult BlockTotal(double sum, int special) {
  __shared__ double sums[kThreads];
  special = __syncthreads_or(special);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    __syncthreads();
  }
  return {sums[0], special, 0};
}

__global__ void __launch_bounds__(kThreads)
    InspectKernel(const float* gradient, int64_t count, InspectResult* partial) {
  double sum = 0;
  int special = 0;
  for (int64_t i = Index(); i < count; i += static_cast<int64_t>(kInspectBlocks) * kThreads) {
    const float value = gradient[i];
    sum += static_cast<double>(value) * static_cast<double>(value);
    special |= (__float_as_uint(value) & 0x7f800000u) == 0x7f800000u;
  }
  const InspectResult total = BlockTotal(sum, special);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    InspectTotalKernel(const InspectResult* partial, InspectResult* result) {
  double sum = 0;
  int special = 0;
  for (int i = threadIdx.x; i < kInspectBlocks; i += kThreads) {
    sum += partial[i].sum_of_squares;
    special |= partial[i].special;
  }
  const InspectResult total = BlockTotal(sum, special);
  if (threadIdx.x == 0) *result = total;
}

__global__ void __launch_bounds__(kThreads) SgdKernel(SgdParams p) {
  const int64_t i = Index();
  if (i >= p.count) return;
  const float weight = p.weight[i];
  float step = __fmul_rn(p.gradient_scale, p.gradient[i]);
  if (p.buffer != nullptr) step = __fadd_rn(__fmul_rn(p.momentum, p.buffer[i]), step);
  step = __fadd_rn(step, __fmul_rn(p.weight_decay, weight));
  if (p.buffer != nullptr) p.buffer[i] = step;
  p.weight[i] = __fsub_rn(weight, __fmul_rn(p.learning_rate, step));
}

__global__ void __launch_bounds__(kThreads) AdamWKernel(AdamWParams p) {
  const int64_t i = Index();
  if (i >= p.count) return;
  const float weight = p.weight[i];
  const float g = __fmul_rn(p.gradient_scale, p.gradient[i]);
  const float m = __fadd_rn(__fmul_rn(p.beta1, p.first[i]), __fmul_rn(p.one_minus_beta1, g));
  const float v =
      __fadd_rn(__fmul_rn(p.beta2, p.second[i]), __fmul_rn(p.one_minus_beta2, __fmul_rn(g, g)));
  p.first[i] = m;
  p.second[i] = v;
  const float denominator = __fadd_rn(__fsqrt_rn(__fmul_rn(v, p.second_correction)), p.epsilon);
  const float step = __fadd_rn(__fdiv_rn(__fmul_rn(m, p.first_correction), denominator),
                               __fmul_rn(p.weight_decay, weight));
  p.weight[i] = __fsub_rn(weight, __fmul_rn(p.learning_rate, step));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) RoundKernel(const float* from, int64_t count, T* to) {
  const int64_t i = Index();
  if (i < count) to[i] = FromFloat<T>(from[i]);
}

}  // namespace

int64_t InspectBytes() {
  return (1 + kInspectBlocks) * static_cast<int64_t>(sizeof(InspectResult));
}

cudaError_t LaunchInitUniform(const InitUniformParams& p, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  InitUniformKernel<<<Blocks(p.count / 4 + 2), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchInspect(const float* gradient, int64_t count, InspectResult* results,
                          cudaStream_t stream) {
  InspectKernel<<<kInspectBlocks, kThreads, 0, stream>>>(gradient, count, results + 1);
  InspectTotalKernel<<<1, kThreads, 0, stream>>>(results + 1, results);
  return cudaGetLastError();
}

cudaError_t LaunchSgd(const SgdParams& p, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  SgdKernel<<<Blocks(p.count), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchAdamW(const AdamWParams& p, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  AdamWKernel<<<Blocks(p.count), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchRound(const float* from, int64_t count, DType dtype, void* to,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return WithFloatType(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RoundKernel<T><<<Blocks(count), kThreads, 0, stream>>>(from, count, static_cast<T*>(to));
    return cudaGetLastError();
  });
}

}  // namespace expertd
