// Finite differences of every variant of the reference router and of its auxiliary loss.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "tests/reference/router.h"
#include "tests/reference/test_random.h"

namespace expertd::reference {
namespace {

using Doubles = std::vector<double>;
using Int64s = std::vector<int64_t>;

struct RouterCase {
  std::string name;
  RouterConfig config;
  bool with_bias = false;
};

void PrintTo(const RouterCase& router_case, std::ostream* out) { *out << router_case.name; }

std::vector<RouterCase> GradientCases() {
  const auto config = [](RouterKind kind, int64_t top_k, int64_t groups, int64_t kept) {
    return RouterConfig{.kind = kind,
                        .num_experts = 8,
                        .top_k = top_k,
                        .num_groups = groups,
                        .kept_groups = kept,
                        .scaling_factor = 1.7};
  };
  return {{"SoftmaxAfter", config(RouterKind::kSoftmaxAfterTopK, 3, 1, 1)},
          {"SoftmaxAfterGroups", config(RouterKind::kSoftmaxAfterTopK, 4, 4, 2)},
          {"SoftmaxAfterOne", config(RouterKind::kSoftmaxAfterTopK, 1, 1, 1)},
          {"SoftmaxBefore", config(RouterKind::kSoftmaxBeforeTopK, 3, 1, 1)},
          {"SoftmaxBeforeGroups", config(RouterKind::kSoftmaxBeforeTopK, 2, 4, 2)},
          {"SoftmaxBeforeOne", config(RouterKind::kSoftmaxBeforeTopK, 1, 1, 1)},
          {"Sigmoid", config(RouterKind::kSigmoid, 3, 1, 1)},
          {"SigmoidBias", config(RouterKind::kSigmoid, 3, 1, 1), true},
          {"SigmoidBiasGroups", config(RouterKind::kSigmoid, 4, 4, 2), true},
          {"SigmoidOneBias", config(RouterKind::kSigmoid, 1, 1, 1), true}};
}

class RouterGradientTest : public ::testing::TestWithParam<RouterCase> {
 protected:
  static constexpr int64_t kTokens = 4;
  static constexpr int64_t kHidden = 3;

  void Draw() {
    const RouterConfig& config = GetParam().config;
    x_ = random_.Values(kTokens * kHidden);
    weights_ = random_.Values(kHidden * config.num_experts);
    bias_ = GetParam().with_bias ? random_.Values(config.num_experts) : Doubles();
    g_ = random_.Values(kTokens * config.top_k);
  }

  Doubles LogitsOf() const {
    return RouterLogits(x_, weights_, kHidden, GetParam().config.num_experts);
  }
  RouterChoice Choose() const { return ChooseExperts(GetParam().config, LogitsOf(), bias_); }

  // Whether a step of the finite differences can change no selection: the derivative is of the
  // weights with the selection held, so draws near a tie are replaced.
  bool SelectionIsStable() {
    const Int64s ids = Choose().ids;
    for (Doubles* values : {&x_, &weights_}) {
      for (double& value : *values) {
        const double original = value;
        for (const double step : {-kStep, kStep}) {
          value = original + step;
          const bool same = Choose().ids == ids;
          value = original;
          if (!same) return false;
        }
      }
    }
    return true;
  }

  TestRandom random_;
  Doubles x_;
  Doubles weights_;
  Doubles bias_;
  Doubles g_;
};

TEST_P(RouterGradientTest, MatchesFiniteDifferencesInXAndWeights) {
  SCOPED_TRACE(random_.Trace());
  const RouterConfig& config = GetParam().config;
  do Draw();
  while (!SelectionIsStable());

  const Doubles dl = ChooseExpertsBackward(config, LogitsOf(), Choose(), g_);
  const RouterGradients gradients =
      RouterLogitsBackward(x_, weights_, kHidden, config.num_experts, dl);
  const auto loss = [&] {
    const Doubles p = Choose().weights;
    return std::inner_product(p.begin(), p.end(), g_.begin(), 0.0);
  };
  ExpectGradient("x", x_, gradients.x, loss);
  ExpectGradient("weights", weights_, gradients.weights, loss);
}

TEST_P(RouterGradientTest, AuxLossMatchesFiniteDifferencesInLogits) {
  SCOPED_TRACE(random_.Trace());
  const RouterConfig& config = GetParam().config;
  Draw();
  Doubles logits = LogitsOf();
  const Int64s counts = CountRoutes(Choose().ids, config.num_experts);
  const double loss_gradient = 3.0;
  ExpectGradient("logits", logits, AuxLossBackward(config, 0.3, logits, counts, loss_gradient),
                 [&] { return loss_gradient * AuxLoss(config, 0.3, logits, counts); });
}

INSTANTIATE_TEST_SUITE_P(Variants, RouterGradientTest, ::testing::ValuesIn(GradientCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace expertd::reference
