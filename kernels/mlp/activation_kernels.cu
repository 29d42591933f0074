// Gated activations, forward and backward, of runs of rows.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/mlp/mlp_kernels.h"

namespace expertd {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 4;

// Value and slope of an activation.
template <Activation kind>
__device__ __forceinline__ float Act(float x) {
  if constexpr (kind == Activation::kSilu) return x / (1.0f + expf(-x));
  if constexpr (kind == Activation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  return x > 0.0f ? x * x : (x != x ? x : 0.0f);
}

template <Activation kind>
__device__ __forceinline__ float ActSlope(float x) {
  if constexpr (kind == Activation::kSilu) {
    const float s = 1.0f / (1.0f + expf(-x));
    return s * (1.0f + x * (1.0f - s));
  }
  if constexpr (kind == Activation::kGelu) {
    return 0.5f * (1.0f + erff(x * 0.70710678f)) + x * 0.39894228f * expf(-0.5f * x * x);
  }
  return x > 0.0f ? 2.0f * x : (x != x ? x : 0.0f);
}

template <typename To, typename From, int N>
__device__ __forceinline__ Pack<To, N> Convert(const Pack<From, N>& from) {
  Pack<To, N> to;
#pragma unroll
  for (int n = 0; n < N; ++n) to.value[n] = FromFloat<To>(ToFloat(from.value[n]));
  return to;
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> Load(const void* base, int64_t element) {
  return *reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(base) + element);
}

template <typename T, int N>
__device__ __forceinline__ void Store(void* base, int64_t element, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(base) + element) = pack;
}

// Where a row is; `valid` is false past the end of its run.
struct Row {
  bool valid;
  int64_t at;
  int64_t scratch;
  int64_t expert;
};

// The grid: x a row of the run, y a piece of its columns, z a run.
__device__ __forceinline__ Row RowOfBlock(const RowRuns& runs) {
  const int run = blockIdx.z;
  const int64_t row = blockIdx.x;
  return {row < runs.rows[run], runs.begin[run] + row, runs.scratch[run] + row, runs.expert[run]};
}

// N columns of [gate] or [up] from `column` of [2I] on, as f32 with the bias.
template <typename T, int N>
__device__ __forceinline__ Pack<float, N> Source(const ActivateParams& p, const Row& row,
                                                 int64_t column) {
  const int64_t width = 2 * p.inner;
  Pack<float, N> value = p.sums != nullptr
                             ? Load<float, N>(p.sums, row.scratch * width + column)
                             : Convert<float>(Load<T, N>(p.h_in, row.at * width + column));
  if (p.bias == nullptr) return value;
#pragma unroll
  for (int n = 0; n < N; ++n) value.value[n] += p.bias[row.expert * width + column + n];
  return value;
}

template <typename T, typename Operand, Activation kind, int N>
__global__ void __launch_bounds__(kThreads)
    ActivateKernel(const __grid_constant__ ActivateParams p) {
  const Row row = RowOfBlock(p.runs);
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (!row.valid || column >= p.inner) return;
  const Pack<float, N> gate = Source<T, N>(p, row, column);
  const Pack<float, N> up = Source<T, N>(p, row, p.inner + column);
  if (p.h_out != nullptr) {
    const int64_t at = row.at * 2 * p.inner + column;
    Store(p.h_out, at, Convert<T>(gate));
    Store(p.h_out, at + p.inner, Convert<T>(up));
  }
  const float factor = p.factors != nullptr ? p.factors[row.at] : 1.0f;
  Pack<T, N> u;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    u.value[n] = FromFloat<T>(factor * (Act<kind>(gate.value[n]) * up.value[n]));
  }
  Store(p.u, row.scratch * p.inner + column, Convert<Operand>(u));
}

// Sum over the block, the same for every launch; thread 0 has it.
__device__ float BlockSum(float value) {
  __shared__ float warps[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (float warp : warps) sum += warp;
  return sum;
}

// One block for each row.
template <typename T, Activation kind, int N>
__global__ void __launch_bounds__(kThreads)
    ActivateGradKernel(const __grid_constant__ ActivateGradParams p) {
  const Row row = RowOfBlock(p.runs);
  if (!row.valid) return;
  const float factor = p.factors != nullptr ? p.factors[row.at] : 1.0f;
  float dot = 0;
  for (int64_t column = threadIdx.x * N; column < p.inner; column += kThreads * N) {
    const int64_t gate_at = row.at * 2 * p.inner + column;
    const auto gate = Convert<float>(Load<T, N>(p.h, gate_at));
    const auto up = Convert<float>(Load<T, N>(p.h, gate_at + p.inner));
    const auto grad_u = Load<float, N>(p.grad_u, row.scratch * p.inner + column);
    Pack<T, N> grad_gate;
    Pack<T, N> grad_up;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float scaled = factor * grad_u.value[n];
      const float value = Act<kind>(gate.value[n]);
      dot += value * up.value[n] * grad_u.value[n];
      grad_gate.value[n] = FromFloat<T>((scaled * up.value[n]) * ActSlope<kind>(gate.value[n]));
      grad_up.value[n] = FromFloat<T>(scaled * value);
    }
    Store(p.grad_h, gate_at, grad_gate);
    Store(p.grad_h, gate_at + p.inner, grad_up);
  }
  if (p.grad_w == nullptr) return;
  if (p.down_bias != nullptr) {
    const float* bias = p.down_bias + row.expert * p.hidden;
    const T* grad_out = static_cast<const T*>(p.grad_out) + row.at * p.hidden;
    for (int64_t column = threadIdx.x; column < p.hidden; column += kThreads) {
      dot += bias[column] * ToFloat(grad_out[column]);
    }
  }
  const float sum = BlockSum(dot);
  if (threadIdx.x == 0) p.grad_w[row.at] = sum;
}

// Calls launch(ActTag) for the activation.
template <Activation kind>
struct ActTag {
  static constexpr Activation value = kind;
};
template <typename Launch>
cudaError_t WithActivation(Activation activation, const Launch& launch) {
  switch (activation) {
    case Activation::kSilu:
      return launch(ActTag<Activation::kSilu>());
    case Activation::kGelu:
      return launch(ActTag<Activation::kGelu>());
    case Activation::kRelu2:
      return launch(ActTag<Activation::kRelu2>());
  }
  return cudaErrorInvalidValue;
}

// Rows of I and of 2I elements begin at multiples of 4 elements then, and so do whole matrices.
bool IsWide(int64_t inner, const void* a, const void* b) {
  const auto addresses = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  return inner % kWide == 0 && addresses % 16 == 0;
}

int64_t MostRows(const RowRuns& runs) {
  int64_t most = 0;
  for (int run = 0; run < runs.count; ++run) most = std::max(most, runs.rows[run]);
  return most;
}

dim3 GridOf(const RowRuns& runs, int64_t columns) {
  return dim3(static_cast<unsigned>(MostRows(runs)), static_cast<unsigned>(columns),
              static_cast<unsigned>(runs.count));
}

template <typename T, typename Operand, Activation kind>
cudaError_t Activate(const ActivateParams& p, cudaStream_t stream) {
  const bool wide = IsWide(p.inner, p.h_in, p.h_out);
  const int64_t pieces = wide ? p.inner / kWide : p.inner;
  const dim3 grid = GridOf(p.runs, (pieces + kThreads - 1) / kThreads);
  if (wide) {
    ActivateKernel<T, Operand, kind, kWide><<<grid, kThreads, 0, stream>>>(p);
  } else {
    ActivateKernel<T, Operand, kind, 1><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchActivate(const ActivateParams& p, cudaStream_t stream) {
  if (MostRows(p.runs) == 0) return cudaSuccess;
  return WithFloatType(p.token, [&](auto type) {
    using T = typename decltype(type)::type;
    return WithActivation(p.activation, [&](auto act) {
      constexpr Activation kind = decltype(act)::value;
      if (p.operand == p.token) return Activate<T, T, kind>(p, stream);
      return Activate<T, float, kind>(p, stream);
    });
  });
}

cudaError_t LaunchActivateGrad(const ActivateGradParams& p, cudaStream_t stream) {
  if (MostRows(p.runs) == 0) return cudaSuccess;
  return WithFloatType(p.token, [&](auto type) {
    using T = typename decltype(type)::type;
    return WithActivation(p.activation, [&](auto act) {
      constexpr Activation kind = decltype(act)::value;
      const dim3 grid = GridOf(p.runs, 1);
      if (IsWide(p.inner, p.h, p.grad_h)) {
        ActivateGradKernel<T, kind, kWide><<<grid, kThreads, 0, stream>>>(p);
      } else {
        ActivateGradKernel<T, kind, 1><<<grid, kThreads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace expertd
