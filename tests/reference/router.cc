// Float64 reference of the router: see router.h.
#include "tests/reference/router.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "tests/reference/matrix.h"

namespace expertd::reference {
namespace {

constexpr double kNormaliserEpsilon = 1e-20;

std::vector<double> Softmax(std::span<const double> logits) {
  const double largest = *std::ranges::max_element(logits);
  std::vector<double> p;
  for (double logit : logits) p.push_back(std::exp(logit - largest));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  return p;
}

// p = softmax(l): dl_i = p_i * (dp_i - sum_j p_j dp_j).
std::vector<double> SoftmaxBackward(std::span<const double> p, std::span<const double> dp) {
  const double mean = Dot(p, dp);
  std::vector<double> dl;
  for (size_t i = 0; i < p.size(); ++i) dl.push_back(p[i] * (dp[i] - mean));
  return dl;
}

std::vector<double> Sigmoid(std::span<const double> logits) {
  std::vector<double> s;
  for (double logit : logits) s.push_back(1.0 / (1.0 + std::exp(-logit)));
  return s;
}

std::vector<double> SigmoidBackward(std::span<const double> s, std::span<const double> ds) {
  std::vector<double> dl;
  for (size_t i = 0; i < s.size(); ++i) dl.push_back(ds[i] * s[i] * (1.0 - s[i]));
  return dl;
}

std::vector<double> Normalise(std::span<const double> s) {
  const double sum = std::accumulate(s.begin(), s.end(), 0.0) + kNormaliserEpsilon;
  std::vector<double> p;
  for (double value : s) p.push_back(value / sum);
  return p;
}

// p_i = s_i / S with S = sum_j s_j + epsilon: ds_i = dp_i / S - sum_j dp_j s_j / S^2.
std::vector<double> NormaliseBackward(std::span<const double> s, std::span<const double> dp) {
  const double sum = std::accumulate(s.begin(), s.end(), 0.0) + kNormaliserEpsilon;
  const double common = Dot(dp, s) / (sum * sum);
  std::vector<double> ds;
  for (size_t i = 0; i < s.size(); ++i) ds.push_back(dp[i] / sum - common);
  return ds;
}

// What one token's groups and experts are selected by: [E].
std::vector<double> Scores(const RouterConfig& config, std::span<const double> logits,
                           const std::vector<double>& bias) {
  std::vector<double> scores(logits.begin(), logits.end());
  if (config.kind == RouterKind::kSoftmaxBeforeTopK) scores = Softmax(logits);
  if (config.kind == RouterKind::kSigmoid) scores = Sigmoid(logits);
  if (!bias.empty()) AddScaled(1.0, bias, scores);
  return scores;
}

// The `count` candidates with the highest scores, best first; the lower index wins a tie.
// REQUIRES: candidates ascending.
std::vector<int64_t> Best(std::vector<int64_t> candidates, std::span<const double> scores,
                          int64_t count) {
  std::ranges::stable_sort(candidates, std::greater<>(),
                           [&](int64_t candidate) { return scores[candidate]; });
  candidates.resize(count);
  return candidates;
}

std::vector<int64_t> Ascending(int64_t first, int64_t count) {
  std::vector<int64_t> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// The experts of the kept groups, ascending.
std::vector<int64_t> EligibleExperts(const RouterConfig& config, std::span<const double> scores) {
  const int64_t group_size = config.num_experts / config.num_groups;
  if (config.kept_groups == config.num_groups) return Ascending(0, config.num_experts);

  std::vector<double> group_scores;
  for (int64_t group = 0; group < config.num_groups; ++group) {
    double sum = 0.0;
    for (int64_t expert : Best(Ascending(group * group_size, group_size), scores,
                               config.top_k / config.kept_groups)) {
      sum += scores[expert];
    }
    group_scores.push_back(sum);
  }

  std::vector<int64_t> kept =
      Best(Ascending(0, config.num_groups), group_scores, config.kept_groups);
  std::ranges::sort(kept);
  std::vector<int64_t> eligible;
  for (int64_t group : kept) {
    for (int64_t expert : Ascending(group * group_size, group_size)) eligible.push_back(expert);
  }
  return eligible;
}

std::vector<double> Gather(std::span<const double> values, std::span<const int64_t> ids) {
  std::vector<double> picked;
  for (int64_t id : ids) picked.push_back(values[id]);
  return picked;
}

// The route weights of one token before scaling: [K].
std::vector<double> RouteWeights(const RouterConfig& config, std::span<const double> logits,
                                 std::span<const int64_t> ids) {
  const std::vector<double> selected = Gather(logits, ids);
  switch (config.kind) {
    case RouterKind::kSoftmaxAfterTopK:
      return Softmax(selected);
    case RouterKind::kSoftmaxBeforeTopK:
      return Gather(Softmax(logits), ids);
    case RouterKind::kSigmoid:
      return config.top_k > 1 ? Normalise(Sigmoid(selected)) : Sigmoid(selected);
  }
  return {};
}

// The gradient of one token's logits [E] from that of its unscaled route weights dp [K].
std::vector<double> RouteWeightsBackward(const RouterConfig& config, std::span<const double> logits,
                                         std::span<const int64_t> ids, std::span<const double> dp) {
  const std::vector<double> selected = Gather(logits, ids);
  std::vector<double> d_selected;  // [K]
  switch (config.kind) {
    case RouterKind::kSoftmaxAfterTopK:
      d_selected = SoftmaxBackward(Softmax(selected), dp);
      break;
    case RouterKind::kSoftmaxBeforeTopK: {
      // The selected weights depend on every logit, so the result is dense.
      std::vector<double> dp_all(logits.size(), 0.0);
      for (size_t k = 0; k < ids.size(); ++k) dp_all[ids[k]] = dp[k];
      return SoftmaxBackward(Softmax(logits), dp_all);
    }
    case RouterKind::kSigmoid: {
      const std::vector<double> s = Sigmoid(selected);
      const std::vector<double> ds =
          config.top_k > 1 ? NormaliseBackward(s, dp) : std::vector<double>(dp.begin(), dp.end());
      d_selected = SigmoidBackward(s, ds);
      break;
    }
  }
  std::vector<double> dl(logits.size(), 0.0);
  for (size_t k = 0; k < ids.size(); ++k) dl[ids[k]] = d_selected[k];
  return dl;
}

// The loss gradient of every a_te is the same for all tokens t: this one, [E].
std::vector<double> AuxShareGradient(const RouterConfig& config, double coefficient,
                                     int64_t token_count,
                                     const std::vector<int64_t>& routes_per_expert) {
  const double n = static_cast<double>(token_count);
  const double scale = coefficient * static_cast<double>(config.num_experts) /
                       (static_cast<double>(config.top_k) * n * n);
  std::vector<double> gradient;
  gradient.reserve(routes_per_expert.size());
  for (int64_t routes : routes_per_expert) gradient.push_back(scale * static_cast<double>(routes));
  return gradient;
}

}  // namespace

std::vector<double> RouterLogits(const std::vector<double>& x, const std::vector<double>& weights,
                                 int64_t hidden, int64_t num_experts) {
  const int64_t token_count = static_cast<int64_t>(x.size()) / hidden;
  std::vector<double> logits(token_count * num_experts, 0.0);
  for (int64_t t = 0; t < token_count; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      AddScaled(x[t * hidden + i], Row(weights, i, num_experts),
                MutableRow(logits, t, num_experts));
    }
  }
  return logits;
}

RouterGradients RouterLogitsBackward(const std::vector<double>& x,
                                     const std::vector<double>& weights, int64_t hidden,
                                     int64_t num_experts,
                                     const std::vector<double>& logits_gradient) {
  const int64_t token_count = static_cast<int64_t>(x.size()) / hidden;
  RouterGradients gradients{.x = std::vector<double>(x.size(), 0.0),
                            .weights = std::vector<double>(weights.size(), 0.0)};
  for (int64_t t = 0; t < token_count; ++t) {
    const std::span<const double> dl = Row(logits_gradient, t, num_experts);
    for (int64_t i = 0; i < hidden; ++i) {
      gradients.x[t * hidden + i] = Dot(dl, Row(weights, i, num_experts));
      AddScaled(x[t * hidden + i], dl, MutableRow(gradients.weights, i, num_experts));
    }
  }
  return gradients;
}

RouterChoice ChooseExperts(const RouterConfig& config, const std::vector<double>& logits,
                           const std::vector<double>& bias) {
  const int64_t token_count = static_cast<int64_t>(logits.size()) / config.num_experts;
  RouterChoice choice;
  for (int64_t t = 0; t < token_count; ++t) {
    const std::span<const double> row = Row(logits, t, config.num_experts);
    const std::vector<double> scores = Scores(config, row, bias);
    std::vector<int64_t> ids = Best(EligibleExperts(config, scores), scores, config.top_k);
    std::ranges::sort(ids);
    choice.ids.insert(choice.ids.end(), ids.begin(), ids.end());
    for (double p : RouteWeights(config, row, ids)) {
      choice.weights.push_back(config.scaling_factor * p);
    }
  }
  return choice;
}

std::vector<double> ChooseExpertsBackward(const RouterConfig& config,
                                          const std::vector<double>& logits,
                                          const RouterChoice& choice,
                                          const std::vector<double>& weights_gradient) {
  const int64_t token_count = static_cast<int64_t>(logits.size()) / config.num_experts;
  std::vector<double> logits_gradient;
  for (int64_t t = 0; t < token_count; ++t) {
    std::vector<double> dp(config.top_k, 0.0);
    AddScaled(config.scaling_factor, Row(weights_gradient, t, config.top_k), dp);
    const std::vector<double> dl =
        RouteWeightsBackward(config, Row(logits, t, config.num_experts),
                             std::span(choice.ids).subspan(t * config.top_k, config.top_k), dp);
    logits_gradient.insert(logits_gradient.end(), dl.begin(), dl.end());
  }
  return logits_gradient;
}

std::vector<int64_t> CountRoutes(const std::vector<int64_t>& ids, int64_t num_experts) {
  std::vector<int64_t> counts(num_experts, 0);
  for (int64_t id : ids) {
    if (id >= 0) ++counts[id];
  }
  return counts;
}

double AuxLoss(const RouterConfig& config, double coefficient, const std::vector<double>& logits,
               const std::vector<int64_t>& routes_per_expert) {
  const int64_t token_count = static_cast<int64_t>(logits.size()) / config.num_experts;
  if (token_count == 0) return 0.0;
  const std::vector<double> da =
      AuxShareGradient(config, coefficient, token_count, routes_per_expert);
  double loss = 0.0;  // linear in a, so the loss is the sum of da * a
  for (int64_t t = 0; t < token_count; ++t) {
    const std::span<const double> row = Row(logits, t, config.num_experts);
    loss += Dot(da, config.kind == RouterKind::kSigmoid ? Normalise(Sigmoid(row)) : Softmax(row));
  }
  return loss;
}

std::vector<double> AuxLossBackward(const RouterConfig& config, double coefficient,
                                    const std::vector<double>& logits,
                                    const std::vector<int64_t>& routes_per_expert,
                                    double loss_gradient) {
  const int64_t token_count = static_cast<int64_t>(logits.size()) / config.num_experts;
  if (token_count == 0) return {};
  const std::vector<double> da =
      AuxShareGradient(config, coefficient * loss_gradient, token_count, routes_per_expert);
  std::vector<double> logits_gradient;
  for (int64_t t = 0; t < token_count; ++t) {
    const std::span<const double> row = Row(logits, t, config.num_experts);
    std::vector<double> dl;
    if (config.kind == RouterKind::kSigmoid) {
      const std::vector<double> s = Sigmoid(row);
      dl = SigmoidBackward(s, NormaliseBackward(s, da));
    } else {
      dl = SoftmaxBackward(Softmax(row), da);
    }
    logits_gradient.insert(logits_gradient.end(), dl.begin(), dl.end());
  }
  return logits_gradient;
}

}  // namespace expertd::reference
