// The router of one layer in float64, and bounds on the service's rounded results.
#ifndef TESTS_CONFORMANCE_SERVICE_ROUTER_BOUNDS_H_
#define TESTS_CONFORMANCE_SERVICE_ROUTER_BOUNDS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "expertd/v1/types.pb.h"
#include "tests/conformance/service/bounded.h"
#include "tests/reference/router.h"
#include "tests/reference/test_random.h"

namespace expertd::conformance {

inline reference::RouterConfig RouterOf(const v1::LayerConfig& layer) {
  const v1::RouterConfig& router = layer.router();
  reference::RouterConfig config;
  config.kind = router.kind() == v1::ROUTER_KIND_SIGMOID ? reference::RouterKind::kSigmoid
                : router.softmax_before_topk()           ? reference::RouterKind::kSoftmaxBeforeTopK
                                                         : reference::RouterKind::kSoftmaxAfterTopK;
  config.num_experts = layer.expert_count();
  config.top_k = layer.top_k();
  config.num_groups = std::max<int64_t>(1, router.groups());
  config.kept_groups = std::max<int64_t>(1, router.kept_groups());
  config.scaling_factor = router.scaling_factor() == 0 ? 1 : router.scaling_factor();
  return config;
}

// Whether the experts chosen for one token stay the same when every logit is off by up to 1e-5:
// then the service, whose logits are off by less, must choose the same ones.
inline bool IsClearChoice(const reference::RouterConfig& config, const std::vector<double>& logits,
                          const std::vector<double>& bias, reference::TestRandom& random) {
  const std::vector<int64_t> ids = reference::ChooseExperts(config, logits, bias).ids;
  for (int draw = 0; draw < 8; ++draw) {
    std::vector<double> shaken = logits;
    for (double& logit : shaken) logit += random.Uniform(-1e-5, 1e-5);
    if (reference::ChooseExperts(config, shaken, bias).ids != ids) return false;
  }
  return true;
}

// One rank's tokens through the router.
struct RoutedTokens {
  std::vector<double> logits;        // [T, E]
  std::vector<double> logits_error;  // [T]: the largest error of a token's logits.
  reference::RouterChoice choice;    // [T, K]
  BoundedRow weights;                // [T, K]
};

// A route weight is computed from the service's logits and rounded to f32 once. Each map from
// logits to weights used here changes a weight by at most 4 times itself per unit of change in
// all logits: 2 for a softmax, 2 for a sigmoid and its normaliser, doubled for second order.
inline BoundedRow BoundWeights(const RoutedTokens& tokens, int64_t top_k) {
  BoundedRow weights;
  for (size_t i = 0; i < tokens.choice.weights.size(); ++i) {
    const double value = tokens.choice.weights[i];
    const double logits_error = tokens.logits_error[i / static_cast<size_t>(top_k)];
    weights.push_back({value, std::abs(value) * (4 * logits_error + 2 * kUnitF32)});
  }
  return weights;
}

// Per token, the largest error of H products summed in f32.
inline std::vector<double> LogitErrors(const std::vector<double>& x,
                                       const std::vector<double>& router, int64_t hidden,
                                       int64_t experts) {
  std::vector<double> magnitudes_x = x;
  std::vector<double> magnitudes_w = router;
  for (double& value : magnitudes_x) value = std::abs(value);
  for (double& value : magnitudes_w) value = std::abs(value);
  const std::vector<double> sums =
      reference::RouterLogits(magnitudes_x, magnitudes_w, hidden, experts);
  std::vector<double> errors;
  for (size_t begin = 0; begin < sums.size(); begin += static_cast<size_t>(experts)) {
    const auto first = sums.begin() + static_cast<std::ptrdiff_t>(begin);
    errors.push_back(static_cast<double>(hidden + 2) * kUnitF32 *
                     *std::max_element(first, first + experts));
  }
  return errors;
}

// The gradient of one rank's logits, [T, E], with its bounds. The errors of the weights' gradients
// come through the Jacobian of the weights, whose entries are at most the scaling factor and move
// by at most 8 times that per unit of change in all logits; the auxiliary term is at most
// 2 max |scale| and moves alike. `aux` is the reference's auxiliary part, [T, E], or empty;
// `aux_scale` the largest factor of an affinity's gradient.
inline BoundedRow BoundLogitsGradient(const reference::RouterConfig& config,
                                      const RoutedTokens& tokens,
                                      const BoundedRow& weights_gradient,
                                      const std::vector<double>& aux, double aux_scale) {
  std::vector<double> gradient;
  for (const Bounded& value : weights_gradient) gradient.push_back(value.value);
  std::vector<double> values =
      reference::ChooseExpertsBackward(config, tokens.logits, tokens.choice, gradient);
  const double scaling = std::max(1.0, std::abs(config.scaling_factor));
  const auto top_k = static_cast<size_t>(config.top_k);
  std::vector<std::vector<double>> jacobian;  // [K] of [T, E]: d weight k / d logit.
  for (size_t k = 0; k < top_k; ++k) {
    std::vector<double> unit(gradient.size(), 0.0);
    for (size_t i = k; i < unit.size(); i += top_k) unit[i] = 1;
    jacobian.push_back(
        reference::ChooseExpertsBackward(config, tokens.logits, tokens.choice, unit));
  }
  BoundedRow bounded;
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t token = i / static_cast<size_t>(config.num_experts);
    double errors = 0;
    double magnitudes = 0;
    for (size_t k = 0; k < top_k; ++k) {
      const Bounded& g = weights_gradient[token * top_k + k];
      errors += std::abs(jacobian[k][i]) * g.error;
      magnitudes += std::abs(g.value) + g.error;
    }
    const double moved = 8 * tokens.logits_error[token] + 8 * kUnitF32;
    double error = errors + scaling * moved * magnitudes;
    if (!aux.empty()) {
      values[i] += aux[i];
      error += 2 * (moved + 8 * kUnitF32) * aux_scale;
    }
    bounded.push_back({values[i], error + kUnitF32 * std::abs(values[i])});
  }
  return bounded;
}

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_ROUTER_BOUNDS_H_
