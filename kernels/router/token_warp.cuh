// One token's logits in the hands of one warp: softmax, sigmoid, best-of searches. Blocks are one
// warp.
#ifndef KERNELS_ROUTER_TOKEN_WARP_CUH_
#define KERNELS_ROUTER_TOKEN_WARP_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/router/router_kernels.h"

namespace expertd {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr double kTiny = 1e-20;

// Shared memory of a block, carved by TokenWarp.
inline size_t TokenWarpBytes(const RouterConfig& config) {
  const auto experts = static_cast<size_t>(config.expert_count);
  const auto top_k = static_cast<size_t>(config.top_k);
  const auto groups = static_cast<size_t>(config.groups);
  return sizeof(double) * (2 * experts + top_k + groups) + sizeof(int32_t) * top_k + 2 * experts;
}

__device__ inline double LaneSum(double value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

struct TokenWarp {
  const RouterConfig& config;
  const float* x;  // [E]
  int lane;
  double* probabilities;  // [E]
  double* scores;         // [E]
  double* selected;       // [K]
  double* group_scores;   // [G]
  int32_t* ids;           // [K]
  uint8_t* allowed;       // [E]
  uint8_t* remaining;     // [E]

  __device__ TokenWarp(const RouterConfig& router, const float* logits, void* memory)
      : config(router), x(logits), lane(static_cast<int>(threadIdx.x)) {
    probabilities = static_cast<double*>(memory);
    scores = probabilities + config.expert_count;
    selected = scores + config.expert_count;
    group_scores = selected + config.top_k;
    ids = reinterpret_cast<int32_t*>(group_scores + config.groups);
    allowed = reinterpret_cast<uint8_t*>(ids + config.top_k);
    remaining = allowed + config.expert_count;
  }

  __device__ bool IsSigmoid() const { return config.kind == RouterKind::kSigmoid; }

  __device__ void Softmax() {
    double largest = -INFINITY;
    for (int64_t e = lane; e < config.expert_count; e += kWarp) {
      largest = fmax(largest, static_cast<double>(x[e]));
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      largest = fmax(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    double sum = 0;
    for (int64_t e = lane; e < config.expert_count; e += kWarp) {
      probabilities[e] = exp(static_cast<double>(x[e]) - largest);
      sum += probabilities[e];
    }
    sum = LaneSum(sum);
    for (int64_t e = lane; e < config.expert_count; e += kWarp) probabilities[e] /= sum;
    __syncwarp();
  }

  __device__ void Sigmoid() {
    for (int64_t e = lane; e < config.expert_count; e += kWarp) {
      probabilities[e] = 1 / (1 + exp(-static_cast<double>(x[e])));
    }
    __syncwarp();
  }

  // What selection by weights of all experts needs.
  __device__ void Probabilities() {
    if (IsSigmoid()) {
      Sigmoid();
    } else if (config.softmax_before_topk) {
      Softmax();
    }
  }

  // The index of the largest score among those that `open` allows in [begin, end), the lowest of
  // equals, or -1; it is then closed.
  __device__ int TakeBest(int64_t begin, int64_t end, uint8_t* open) {
    int best = -1;
    double score = 0;
    for (int64_t e = begin + lane; e < end; e += kWarp) {
      if (open[e] == 0 || (best >= 0 && scores[e] <= score)) continue;
      best = static_cast<int>(e);
      score = scores[e];
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const int other = __shfl_xor_sync(kAllLanes, best, step);
      const double theirs = __shfl_xor_sync(kAllLanes, score, step);
      if (other < 0) continue;
      if (best < 0 || theirs > score || (theirs == score && other < best)) {
        best = other;
        score = theirs;
      }
    }
    __syncwarp();  // all have read
    if (best >= 0 && lane == 0) open[best] = 0;
    __syncwarp();
    return best;
  }

  // The weights of the selected experts, in order, before scaling.
  __device__ void SelectedWeights() {
    const bool of_selected = !IsSigmoid() && !config.softmax_before_topk;
    if (lane == 0) {
      double largest = -INFINITY;
      for (int64_t k = 0; k < config.top_k; ++k) {
        largest = fmax(largest, static_cast<double>(x[ids[k]]));
      }
      double sum = 0;
      for (int64_t k = 0; k < config.top_k; ++k) {
        selected[k] =
            of_selected ? exp(static_cast<double>(x[ids[k]]) - largest) : probabilities[ids[k]];
        sum += selected[k];
      }
      const bool normalised = IsSigmoid() && config.top_k > 1;
      if (of_selected || normalised) {
        const double divisor = normalised ? sum + kTiny : sum;
        for (int64_t k = 0; k < config.top_k; ++k) selected[k] /= divisor;
      }
    }
    __syncwarp();
  }

  // Affinities of the auxiliary loss are probabilities divided by what this returns.
  __device__ double Affinities() {
    if (!IsSigmoid()) {
      Softmax();
      return 1;
    }
    Sigmoid();
    double sum = 0;
    for (int64_t e = lane; e < config.expert_count; e += kWarp) sum += probabilities[e];
    return LaneSum(sum) + kTiny;
  }
};

}  // namespace expertd

#endif  // KERNELS_ROUTER_TOKEN_WARP_CUH_
