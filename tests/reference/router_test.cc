// Tests of the reference router and its auxiliary loss: tokens worked by hand.
#include "tests/reference/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/reference/test_random.h"

namespace expertd::reference {
namespace {

using Doubles = std::vector<double>;
using Int64s = std::vector<int64_t>;

// The logits whose softmax is `p`, for p that sums to 1.
Doubles Logs(const Doubles& p) {
  Doubles logits;
  for (double value : p) logits.push_back(std::log(value));
  return logits;
}

// The logits whose sigmoid is `s`.
Doubles Logits(const Doubles& s) {
  Doubles logits;
  for (double value : s) logits.push_back(std::log(value / (1.0 - value)));
  return logits;
}

RouterConfig HandConfig(RouterKind kind, int64_t top_k = 2) {
  return {.kind = kind, .num_experts = 4, .top_k = top_k};
}

void ExpectChoice(const RouterChoice& choice, const Int64s& ids, const Doubles& weights) {
  EXPECT_EQ(choice.ids, ids);
  ExpectAllNear(choice.weights, weights);
}

TEST(RouterHandTest, LogitsAreXTimesWeights) {
  // [1, 2] @ [[1, 0, 3], [0, 1, 4]] = [1, 2, 11]; [0, -1] @ ... = [0, -1, -4].
  EXPECT_EQ(RouterLogits({1, 2, 0, -1}, {1, 0, 3, 0, 1, 4}, 2, 3), (Doubles{1, 2, 11, 0, -1, -4}));
}

TEST(RouterHandTest, LogitsBackward) {
  // dl = [[1, 10, 100]]: dx = [1 + 300, 10 + 400]; dW = x^T dl.
  const RouterGradients gradients =
      RouterLogitsBackward({1, 2}, {1, 0, 3, 0, 1, 4}, 2, 3, {1, 10, 100});
  EXPECT_EQ(gradients.x, (Doubles{301, 410}));
  EXPECT_EQ(gradients.weights, (Doubles{1, 10, 100, 2, 20, 200}));
}

TEST(RouterHandTest, SoftmaxAfterTopKNormalisesOverTheSelected) {
  // Of [1, 4, 2, 3] / 10 the best are experts 1 and 3: 4/7 and 3/7.
  ExpectChoice(ChooseExperts(HandConfig(RouterKind::kSoftmaxAfterTopK), Logs({.1, .4, .2, .3}), {}),
               {1, 3}, {4.0 / 7.0, 3.0 / 7.0});
}

TEST(RouterHandTest, SoftmaxBeforeTopKIsNotRenormalised) {
  ExpectChoice(
      ChooseExperts(HandConfig(RouterKind::kSoftmaxBeforeTopK), Logs({.1, .4, .2, .3}), {}), {1, 3},
      {0.4, 0.3});
}

TEST(RouterHandTest, SigmoidBiasSelectsButDoesNotWeigh) {
  // s = [0.2, 0.5, 0.75, 0.8]; with the bias [1.2, 0.5, 0.75, 0.8]: experts 0 and 3, and
  // p = 0.2 / (0.2 + 0.8), 0.8 / (0.2 + 0.8).
  const Doubles logits = Logits({0.2, 0.5, 0.75, 0.8});
  const RouterConfig config = HandConfig(RouterKind::kSigmoid);
  ExpectChoice(ChooseExperts(config, logits, {1, 0, 0, 0}), {0, 3}, {0.2, 0.8});
  ExpectChoice(ChooseExperts(config, logits, {}), {2, 3}, {0.75 / 1.55, 0.8 / 1.55});
}

TEST(RouterHandTest, SigmoidOfOneExpertIsNotNormalised) {
  ExpectChoice(
      ChooseExperts(HandConfig(RouterKind::kSigmoid, 1), Logits({0.2, 0.5, 0.75, 0.8}), {}), {3},
      {0.8});
}

TEST(RouterHandTest, ScalingFactorMultipliesTheWeights) {
  RouterConfig config = HandConfig(RouterKind::kSoftmaxAfterTopK);
  config.scaling_factor = 2.5;
  ExpectChoice(ChooseExperts(config, Logs({.1, .4, .2, .3}), {}), {1, 3}, {10.0 / 7.0, 7.5 / 7.0});
}

TEST(RouterHandTest, TiesGoToTheLowerId) {
  const RouterConfig config = HandConfig(RouterKind::kSoftmaxAfterTopK);
  ExpectChoice(ChooseExperts(config, {7, 7, 7, 7}, {}), {0, 1}, {0.5, 0.5});
  // Expert 3 is the best; 1 and 2 tie for the second place.
  EXPECT_EQ(ChooseExperts(config, {0, 1, 1, 2}, {}).ids, (Int64s{1, 3}));
}

TEST(RouterHandTest, AllExpertsSelectedIsTheFullSoftmax) {
  const Doubles p = {.1, .4, .2, .3};
  ExpectChoice(ChooseExperts(HandConfig(RouterKind::kSoftmaxAfterTopK, 4), Logs(p), {}),
               {0, 1, 2, 3}, p);
}

TEST(RouterHandTest, TokensAreIndependentAndMayBeNone) {
  const RouterConfig config = HandConfig(RouterKind::kSoftmaxAfterTopK, 1);
  ExpectChoice(ChooseExperts(config, {0, 0, 1, 0, 5, 0, 1, 0}, {}), {2, 0}, {1, 1});
  ExpectChoice(ChooseExperts(config, {}, {}), {}, {});
}

RouterConfig GroupConfig(RouterKind kind, int64_t top_k, int64_t kept_groups) {
  return {
      .kind = kind, .num_experts = 6, .top_k = top_k, .num_groups = 3, .kept_groups = kept_groups};
}

TEST(RouterGroupTest, ScoreIsTheSumOfTheBestOfTheGroup) {
  // K / g = 2: group sums are 5 + 0, 3 + 3.5 and 1 + 1. Group 1 wins although 5 is the best score.
  const RouterConfig config = GroupConfig(RouterKind::kSoftmaxAfterTopK, 2, 1);
  EXPECT_EQ(ChooseExperts(config, {5, 0, 3, 3.5, 1, 1}, {}).ids, (Int64s{2, 3}));
}

TEST(RouterGroupTest, ExpertsOfOtherGroupsAreExcluded) {
  // K / g = 1: group scores are the maxima 5, 4 and 3; groups 0 and 1 stay. The best two of their
  // experts are 0 and 1, both of group 0.
  const RouterConfig config = GroupConfig(RouterKind::kSoftmaxAfterTopK, 2, 2);
  EXPECT_EQ(ChooseExperts(config, {5, 4.5, 4, 0, 3, 3}, {}).ids, (Int64s{0, 1}));
  EXPECT_EQ(ChooseExperts(config, {3, 3, 4, 0, 5, 1}, {}).ids, (Int64s{2, 4}));
}

TEST(RouterGroupTest, TiesBetweenGroupsGoToTheLowerGroup) {
  const RouterConfig config = GroupConfig(RouterKind::kSoftmaxAfterTopK, 2, 1);
  EXPECT_EQ(ChooseExperts(config, {0, 1, 1, 2, 3, 0}, {}).ids, (Int64s{2, 3}));  // 1, 3, 3
}

TEST(RouterGroupTest, TiesBetweenExpertsOfTwoGroupsGoToTheLowerId) {
  // Group 1 (maximum 5) ranks before group 0 (maximum 3); 0 and 3 tie for the second place.
  const RouterConfig config = GroupConfig(RouterKind::kSoftmaxAfterTopK, 2, 2);
  EXPECT_EQ(ChooseExperts(config, {3, 0, 5, 3, 1, 1}, {}).ids, (Int64s{0, 2}));
}

TEST(RouterGroupTest, BiasCountsInTheGroupScore) {
  // s is 0.5 everywhere; the bias lifts group 2 to 0.5 + 0.7.
  const RouterConfig config = GroupConfig(RouterKind::kSigmoid, 2, 1);
  ExpectChoice(ChooseExperts(config, {0, 0, 0, 0, 0, 0}, {0, 0, 0.1, 0, 0.2, 0}), {4, 5},
               {0.5, 0.5});
}

TEST(RouterGroupTest, ScoresAreProbabilitiesBeforeTopKAndLogitsAfter) {
  // Sums of p: 0.61, 0.39. Sums of log p: log(0.6 * 0.01) < log(0.2 * 0.19).
  RouterConfig config = HandConfig(RouterKind::kSoftmaxBeforeTopK);
  config.num_groups = 2;
  const Doubles logits = Logs({0.6, 0.01, 0.2, 0.19});
  EXPECT_EQ(ChooseExperts(config, logits, {}).ids, (Int64s{0, 1}));
  config.kind = RouterKind::kSoftmaxAfterTopK;
  EXPECT_EQ(ChooseExperts(config, logits, {}).ids, (Int64s{2, 3}));
}

TEST(RouterBackwardHandTest, SoftmaxAfterTopKTouchesOnlyTheSelected) {
  // p = [4/7, 3/7], g = [7, 0], sum p g = 4: 4/7 * (7 - 4) = 12/7 and 3/7 * (0 - 4) = -12/7.
  const RouterConfig config = HandConfig(RouterKind::kSoftmaxAfterTopK);
  const Doubles logits = Logs({.1, .4, .2, .3});
  ExpectAllNear(ChooseExpertsBackward(config, logits, ChooseExperts(config, logits, {}), {7, 0}),
                {0, 12.0 / 7.0, 0, -12.0 / 7.0});
}

TEST(RouterBackwardHandTest, SoftmaxBeforeTopKTouchesAll) {
  // g over all = [0, 10, 0, 0], sum p g = 4: p * (g - 4).
  const RouterConfig config = HandConfig(RouterKind::kSoftmaxBeforeTopK);
  const Doubles logits = Logs({.1, .4, .2, .3});
  ExpectAllNear(ChooseExpertsBackward(config, logits, ChooseExperts(config, logits, {}), {10, 0}),
                {-0.4, 2.4, -0.8, -1.2});
}

TEST(RouterBackwardHandTest, SigmoidNormalisedAndAlone) {
  // s = [0.2, 0.8], S = 1, g = [5, 0]: ds = 5 - 5 * 0.2 = 4 and -1; times s (1 - s) = 0.16.
  const Doubles logits = Logits({0.2, 0.5, 0.75, 0.8});
  RouterConfig config = HandConfig(RouterKind::kSigmoid);
  RouterChoice choice = ChooseExperts(config, logits, {1, 0, 0, 0});
  ExpectAllNear(ChooseExpertsBackward(config, logits, choice, {5, 0}), {0.64, 0, 0, -0.16});
  // K = 1: 5 * 0.16, for expert 3.
  config.top_k = 1;
  choice = ChooseExperts(config, logits, {});
  ExpectAllNear(ChooseExpertsBackward(config, logits, choice, {5}), {0, 0, 0, 0.8});
}

TEST(AuxLossTest, TwoTokensByHand) {
  // a = [[1/2, 1/2], [3/4, 1/4]], both tokens went to expert 0: n = [2, 0], N = 2, K = 1.
  // loss = 0.1 * 2 / (1 * 4) * 2 * (1/2 + 3/4) = 0.125.
  const RouterConfig config{.kind = RouterKind::kSoftmaxAfterTopK, .num_experts = 2, .top_k = 1};
  const Doubles logits = {0, 0, std::log(3.0), 0};
  EXPECT_NEAR(AuxLoss(config, 0.1, logits, {2, 0}), 0.125, 1e-15);
  // da = 0.1 * 2 / 4 * [2, 0] = [0.1, 0]; a_0 * (0.1 - 0.1 a_0) = 0.025, then 0.01875.
  ExpectAllNear(AuxLossBackward(config, 0.1, logits, {2, 0}, 1.0),
                {0.025, -0.025, 0.01875, -0.01875});
}

TEST(AuxLossTest, SigmoidIsNormalisedOverAllExperts) {
  // s = [0.2, 0.6]: a = [1/4, 3/4]; loss = 1 * 2 / (1 * 1) * 1 * 3/4.
  const RouterConfig config{.kind = RouterKind::kSigmoid, .num_experts = 2, .top_k = 1};
  EXPECT_NEAR(AuxLoss(config, 1.0, Logits({0.2, 0.6}), {0, 1}), 1.5, 1e-15);
}

TEST(AuxLossTest, PerfectBalanceGivesTheCoefficient) {
  // Six tokens. Uniform a = 1/E and n = N K / E: c E / (K N^2) * E * (N K / E) * (N / E) = c.
  for (const RouterKind kind : {RouterKind::kSoftmaxBeforeTopK, RouterKind::kSigmoid}) {
    EXPECT_NEAR(AuxLoss(HandConfig(kind), 0.25, Doubles(24, 0.5), {3, 3, 3, 3}), 0.25, 1e-15);
  }
}

TEST(AuxLossTest, NoTokensGiveZero) {
  const RouterConfig config = HandConfig(RouterKind::kSoftmaxAfterTopK);
  EXPECT_EQ(AuxLoss(config, 0.1, {}, {0, 0, 0, 0}), 0.0);
  EXPECT_TRUE(AuxLossBackward(config, 0.1, {}, {0, 0, 0, 0}, 1.0).empty());
}

TEST(AuxLossTest, CountRoutesSkipsNoRoute) {
  EXPECT_EQ(CountRoutes({2, 0, -1, 2}, 3), (Int64s{1, 0, 2}));
}

}  // namespace
}  // namespace expertd::reference
