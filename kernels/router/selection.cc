// Selection and its gradients for one token; see selection.h.
#include "kernels/router/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace expertd {
namespace {

constexpr double kTiny = 1e-20;
constexpr double kLowest = -std::numeric_limits<double>::infinity();

size_t At(int64_t index) { return static_cast<size_t>(index); }

}  // namespace

TokenSelector::TokenSelector(const RouterConfig& config)
    : config_(config),
      probabilities_(At(config.expert_count)),
      scores_(At(config.expert_count)),
      selected_(At(config.top_k)),
      allowed_(At(config.expert_count)),
      remaining_(At(config.expert_count)) {}

void TokenSelector::Softmax(const float* x) {
  double largest = kLowest;
  for (int64_t e = 0; e < config_.expert_count; ++e) {
    largest = std::max(largest, static_cast<double>(x[e]));
  }
  double sum = 0;
  for (int64_t e = 0; e < config_.expert_count; ++e) {
    probabilities_[At(e)] = std::exp(static_cast<double>(x[e]) - largest);
    sum += probabilities_[At(e)];
  }
  for (double& p : probabilities_) p /= sum;
}

void TokenSelector::Sigmoid(const float* x) {
  for (int64_t e = 0; e < config_.expert_count; ++e) {
    probabilities_[At(e)] = 1 / (1 + std::exp(-static_cast<double>(x[e])));
  }
}

int64_t TokenSelector::TakeBest(int64_t begin, int64_t end, std::vector<uint8_t>& allowed) {
  int64_t best = -1;
  for (int64_t e = begin; e < end; ++e) {
    if (allowed[At(e)] == 0) continue;
    if (best < 0 || scores_[At(e)] > scores_[At(best)]) best = e;
  }
  if (best >= 0) allowed[At(best)] = 0;
  return best;
}

void TokenSelector::KeepGroups() {
  if (config_.kept_groups >= config_.groups) {
    std::fill(allowed_.begin(), allowed_.end(), uint8_t{1});
    return;
  }
  const int64_t size = config_.expert_count / config_.groups;
  const int64_t per_group = std::min(config_.top_k / config_.kept_groups, size);
  std::fill(remaining_.begin(), remaining_.end(), uint8_t{1});
  std::vector<double> group_scores(At(config_.groups), 0.0);
  for (int64_t g = 0; g < config_.groups; ++g) {
    for (int64_t i = 0; i < per_group; ++i) {
      group_scores[At(g)] += scores_[At(TakeBest(g * size, (g + 1) * size, remaining_))];
    }
  }
  std::fill(allowed_.begin(), allowed_.end(), uint8_t{0});
  for (int64_t kept = 0; kept < config_.kept_groups; ++kept) {
    int64_t best = -1;
    for (int64_t g = 0; g < config_.groups; ++g) {
      if (allowed_[At(g * size)] != 0) continue;
      if (best < 0 || group_scores[At(g)] > group_scores[At(best)]) best = g;
    }
    std::fill_n(allowed_.begin() + best * size, size, uint8_t{1});
  }
}

void TokenSelector::SelectedWeights(const float* x, const int64_t* ids) {
  const bool softmax_of_selected =
      config_.kind == RouterKind::kSoftmax && !config_.softmax_before_topk;
  double largest = kLowest;
  double sum = 0;
  for (int64_t k = 0; k < config_.top_k; ++k) {
    largest = std::max(largest, static_cast<double>(x[ids[k]]));
  }
  for (int64_t k = 0; k < config_.top_k; ++k) {
    selected_[At(k)] = softmax_of_selected ? std::exp(static_cast<double>(x[ids[k]]) - largest)
                                           : probabilities_[At(ids[k])];
    sum += selected_[At(k)];
  }
  const bool normalised_sigmoid = config_.kind == RouterKind::kSigmoid && config_.top_k > 1;
  if (!softmax_of_selected && !normalised_sigmoid) return;
  for (double& p : selected_) p /= normalised_sigmoid ? sum + kTiny : sum;
}

void TokenSelector::Select(const float* x, const float* bias, int64_t* ids, float* weights) {
  const bool sigmoid = config_.kind == RouterKind::kSigmoid;
  if (sigmoid) {
    Sigmoid(x);
  } else if (config_.softmax_before_topk) {
    Softmax(x);
  }
  for (int64_t e = 0; e < config_.expert_count; ++e) {
    double score =
        sigmoid || config_.softmax_before_topk ? probabilities_[At(e)] : static_cast<double>(x[e]);
    if (sigmoid && bias != nullptr) score += static_cast<double>(bias[e]);
    scores_[At(e)] = std::isnan(score) ? kLowest : score;
  }
  KeepGroups();
  for (int64_t k = 0; k < config_.top_k; ++k) {
    ids[k] = TakeBest(0, config_.expert_count, allowed_);
  }
  std::sort(ids, ids + config_.top_k);
  SelectedWeights(x, ids);
  for (int64_t k = 0; k < config_.top_k; ++k) {
    weights[k] = static_cast<float>(selected_[At(k)] * config_.scaling_factor);
  }
}

void TokenSelector::SelectBackward(const float* x, const int64_t* ids, const float* grad_weights,
                                   float* grad_x) {
  std::fill_n(grad_x, config_.expert_count, 0.0f);
  const bool sigmoid = config_.kind == RouterKind::kSigmoid;
  if (sigmoid) {
    Sigmoid(x);
  } else if (config_.softmax_before_topk) {
    Softmax(x);
  }
  SelectedWeights(x, ids);
  double mean = 0;  // of the gradients, by weight
  for (int64_t k = 0; k < config_.top_k; ++k) {
    mean += selected_[At(k)] * static_cast<double>(grad_weights[k]);
  }
  if (!sigmoid && config_.softmax_before_topk) {
    for (int64_t e = 0; e < config_.expert_count; ++e) {
      grad_x[e] = static_cast<float>(-config_.scaling_factor * probabilities_[At(e)] * mean);
    }
  }
  double sum = 0;
  for (int64_t k = 0; k < config_.top_k; ++k) sum += probabilities_[At(ids[k])];
  for (int64_t k = 0; k < config_.top_k; ++k) {
    const auto grad = static_cast<double>(grad_weights[k]);
    const double p = selected_[At(k)];
    double result = p * (grad - mean);  // both softmax forms
    if (sigmoid) {
      const double s = probabilities_[At(ids[k])];
      const double grad_s = config_.top_k > 1 ? (grad - mean) / (sum + kTiny) : grad;
      result = grad_s * s * (1 - s);
    }
    grad_x[ids[k]] = static_cast<float>(config_.scaling_factor * result);
  }
}

void TokenSelector::AddAffinity(const float* x, double* affinity) {
  double sum = 1;
  if (config_.kind == RouterKind::kSigmoid) {
    Sigmoid(x);
    sum = kTiny;
    for (double s : probabilities_) sum += s;
  } else {
    Softmax(x);
  }
  for (int64_t e = 0; e < config_.expert_count; ++e) affinity[e] += probabilities_[At(e)] / sum;
}

void TokenSelector::AddAffinityGradient(const float* x, const float* scale, float* grad_x) {
  const bool sigmoid = config_.kind == RouterKind::kSigmoid;
  double sum = 1;
  if (sigmoid) {
    Sigmoid(x);
    sum = kTiny;
    for (double s : probabilities_) sum += s;
  } else {
    Softmax(x);
  }
  double mean = 0;
  for (int64_t e = 0; e < config_.expert_count; ++e) {
    mean += static_cast<double>(scale[e]) * probabilities_[At(e)] / sum;
  }
  for (int64_t e = 0; e < config_.expert_count; ++e) {
    const double p = probabilities_[At(e)];
    const double slope = sigmoid ? p * (1 - p) / sum : p;
    grad_x[e] += static_cast<float>(slope * (static_cast<double>(scale[e]) - mean));
  }
}

}  // namespace expertd
