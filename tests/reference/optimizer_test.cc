// Tests of the reference optimizers: steps worked by hand.
#include "tests/reference/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/reference/test_random.h"

namespace expertd::reference {
namespace {

using Doubles = std::vector<double>;

TEST(SgdTest, MomentumCarriesTheVelocity) {
  const SgdConfig config{.learning_rate = 0.1, .momentum = 0.5};
  Doubles weights = {1.0, -2.0};
  Doubles velocity = {0.0, 0.0};

  // velocity = g; w -= 0.1 * velocity: 1 - 0.4 and -2 + 0.2.
  SgdStep(config, {4.0, -2.0}, velocity, weights);
  ExpectAllNear(weights, {0.6, -1.8});

  // velocity = 0.5 * [4, -2] + [1, 1] = [3, 0]: 0.6 - 0.3 and no change.
  SgdStep(config, {1.0, 1.0}, velocity, weights);
  ExpectAllNear(velocity, {3.0, 0.0});
  ExpectAllNear(weights, {0.3, -1.8});
}

TEST(AdamWTest, FirstStepIsTheSignOfTheGradient) {
  // m / (1 - beta1) = g and v / (1 - beta2) = g^2, so the step is lr * g / |g| for epsilon = 0.
  const AdamWConfig config{.learning_rate = 0.01, .epsilon = 0.0};
  AdamWState state = NewAdamWState(3);
  Doubles weights = {1.0, 1.0, 1.0};
  AdamWStep(config, {5.0, -0.001, 300.0}, state, weights);
  ExpectAllNear(weights, {0.99, 1.01, 0.99});
}

TEST(AdamWTest, TwoStepsWithBiasCorrectionAndEpsilon) {
  const AdamWConfig config{.learning_rate = 0.1, .beta1 = 0.5, .beta2 = 0.75, .epsilon = 1.0};
  AdamWState state = NewAdamWState(1);
  Doubles weights = {2.0};

  // m = 0.5, v = 0.25; corrected 1 and 1; w = 2 - 0.1 * 1 / (1 + 1) = 1.95.
  AdamWStep(config, {1.0}, state, weights);
  ExpectAllNear(weights, {1.95});

  // m = 0.25 + 1.5 = 1.75, corrected by 1 - 0.25: 7/3.
  // v = 0.1875 + 2.25 = 2.4375, corrected by 1 - 0.5625: 39/7.
  AdamWStep(config, {3.0}, state, weights);
  EXPECT_EQ(state.step, 2);
  ExpectAllNear(state.first, {1.75});
  ExpectAllNear(state.second, {2.4375});
  ExpectAllNear(weights, {1.95 - 0.1 * (7.0 / 3.0) / (std::sqrt(39.0 / 7.0) + 1.0)});
}

TEST(AdamWTest, WeightDecayIsDecoupledFromTheMoments) {
  const AdamWConfig config{.learning_rate = 0.1, .weight_decay = 0.5};
  AdamWState state = NewAdamWState(1);
  Doubles weights = {2.0};

  // A zero gradient leaves the moments zero: w = 2 - 0.1 * 0.5 * 2 = 1.9.
  AdamWStep(config, {0.0}, state, weights);
  ExpectAllNear(weights, {1.9});
  ExpectAllNear(state.first, {0.0});
  ExpectAllNear(state.second, {0.0});
}

TEST(ClipTest, ScalesAllGradientsByOneNorm) {
  Doubles a = {3.0, 0.0};
  Doubles b = {-4.0};
  Doubles empty;
  const std::vector<Doubles*> gradients = {&a, &b, &empty};

  // The norm is 5; both are scaled by 2 / 5.
  EXPECT_DOUBLE_EQ(ClipByGlobalNorm(2.0, gradients), 5.0);
  ExpectAllNear(a, {1.2, 0.0});
  ExpectAllNear(b, {-1.6});
}

TEST(ClipTest, LeavesGradientsAtOrBelowTheLimitAlone) {
  Doubles a = {3.0, -4.0};
  const std::vector<Doubles*> gradients = {&a};
  EXPECT_DOUBLE_EQ(ClipByGlobalNorm(5.0, gradients), 5.0);
  EXPECT_EQ(a, (Doubles{3.0, -4.0}));

  Doubles zero = {0.0, 0.0};
  const std::vector<Doubles*> zeros = {&zero};
  EXPECT_DOUBLE_EQ(ClipByGlobalNorm(1.0, zeros), 0.0);
  EXPECT_EQ(zero, (Doubles{0.0, 0.0}));
}

}  // namespace
}  // namespace expertd::reference
