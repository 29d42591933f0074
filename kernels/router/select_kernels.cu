// Selection kernels; see select_kernels.h.
#include "kernels/router/select_kernels.h"

#include "kernels/router/token_warp.cuh"

namespace expertd {
namespace {

extern __shared__ double warp_memory[];

__device__ void Scores(TokenWarp& token, const float* bias) {
  const RouterConfig& config = token.config;
  const bool by_weight = token.IsSigmoid() || config.softmax_before_topk;
  for (int64_t e = token.lane; e < config.expert_count; e += kWarp) {
    double score = by_weight ? token.probabilities[e] : static_cast<double>(token.x[e]);
    if (token.IsSigmoid() && bias != nullptr) score += static_cast<double>(bias[e]);
    token.scores[e] = isnan(score) ? -INFINITY : score;
  }
  __syncwarp();
}

// Marks in `allowed` the experts of the kept groups.
__device__ void KeepGroups(TokenWarp& token) {
  const RouterConfig& config = token.config;
  const bool all = config.kept_groups >= config.groups;
  for (int64_t e = token.lane; e < config.expert_count; e += kWarp) {
    token.allowed[e] = all ? 1 : 0;
    token.remaining[e] = 1;
  }
  __syncwarp();
  if (all) return;
  const int64_t size = config.expert_count / config.groups;
  const int64_t per_group = min(config.top_k / config.kept_groups, size);
  for (int64_t g = 0; g < config.groups; ++g) {
    double sum = 0;
    for (int64_t i = 0; i < per_group; ++i) {
      sum += token.scores[token.TakeBest(g * size, (g + 1) * size, token.remaining)];
    }
    if (token.lane == 0) token.group_scores[g] = sum;
  }
  __syncwarp();
  for (int64_t kept = 0; kept < config.kept_groups; ++kept) {
    int64_t best = -1;
    for (int64_t g = 0; g < config.groups; ++g) {
      if (token.allowed[g * size] != 0) continue;
      if (best < 0 || token.group_scores[g] > token.group_scores[best]) best = g;
    }
    __syncwarp();
    for (int64_t i = token.lane; i < size; i += kWarp) token.allowed[best * size + i] = 1;
    __syncwarp();
  }
}

// Ascending.
__device__ void SortIds(TokenWarp& token) {
  if (token.lane == 0) {
    for (int64_t k = 1; k < token.config.top_k; ++k) {
      const int32_t id = token.ids[k];
      int64_t at = k;
      for (; at > 0 && token.ids[at - 1] > id; --at) token.ids[at] = token.ids[at - 1];
      token.ids[at] = id;
    }
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kWarp) SelectKernel(SelectParams p) {
  const int64_t t = blockIdx.x;
  const RouterConfig& config = p.config;
  TokenWarp token(config, p.logits + t * config.expert_count, warp_memory);
  token.Probabilities();
  Scores(token, p.bias);
  KeepGroups(token);
  for (int64_t k = 0; k < config.top_k; ++k) {
    const int best = token.TakeBest(0, config.expert_count, token.allowed);
    if (token.lane == 0) token.ids[k] = best;
  }
  __syncwarp();
  SortIds(token);
  token.SelectedWeights();
  for (int64_t k = token.lane; k < config.top_k; k += kWarp) {
    p.ids[t * config.top_k + k] = token.ids[k];
    p.weights[t * config.top_k + k] = static_cast<float>(token.selected[k] * config.scaling_factor);
  }
}

__global__ void __launch_bounds__(kWarp) SelectBackwardKernel(SelectParams p) {
  const int64_t t = blockIdx.x;
  const RouterConfig& config = p.config;
  TokenWarp token(config, p.logits + t * config.expert_count, warp_memory);
  const float* grad = p.grad_weights + t * config.top_k;
  float* grad_x = p.grad_logits + t * config.expert_count;
  for (int64_t k = token.lane; k < config.top_k; k += kWarp) {
    token.ids[k] = static_cast<int32_t>(p.ids[t * config.top_k + k]);
  }
  __syncwarp();
  token.Probabilities();
  token.SelectedWeights();
  double mean = 0;  // of the gradients, by weight
  double sum = 0;
  for (int64_t k = 0; k < config.top_k; ++k) {
    mean += token.selected[k] * static_cast<double>(grad[k]);
    if (token.IsSigmoid()) sum += token.probabilities[token.ids[k]];
  }
  const bool over_all = !token.IsSigmoid() && config.softmax_before_topk;
  for (int64_t e = token.lane; e < config.expert_count; e += kWarp) {
    grad_x[e] = over_all
                    ? static_cast<float>(-config.scaling_factor * token.probabilities[e] * mean)
                    : 0.0f;
  }
  __syncwarp();
  for (int64_t k = token.lane; k < config.top_k; k += kWarp) {
    const auto grad_k = static_cast<double>(grad[k]);
    double result = token.selected[k] * (grad_k - mean);  // both softmax forms
    if (token.IsSigmoid()) {
      const double s = token.probabilities[token.ids[k]];
      const double grad_s = config.top_k > 1 ? (grad_k - mean) / (sum + kTiny) : grad_k;
      result = grad_s * s * (1 - s);
    }
    grad_x[token.ids[k]] = static_cast<float>(config.scaling_factor * result);
  }
}

// Launches `kernel` with one warp for each of `blocks`.
template <typename Params>
cudaError_t LaunchWarps(void (*kernel)(Params), const Params& params, int64_t blocks,
                        cudaStream_t stream) {
  const size_t bytes = TokenWarpBytes(params.config);
  if (bytes > 48 * 1024) {
    const cudaError_t raised = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (raised != cudaSuccess) return raised;
  }
  kernel<<<static_cast<unsigned>(blocks), kWarp, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchSelect(const SelectParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  return LaunchWarps(SelectKernel, params, params.tokens, stream);
}

cudaError_t LaunchSelectBackward(const SelectParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  return LaunchWarps(SelectBackwardKernel, params, params.tokens, stream);
}

}  // namespace expertd
