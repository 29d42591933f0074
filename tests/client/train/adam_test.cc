// AdamW's first steps by hand, clipping, and which parameters decay.
#include "client/expertctl/train/adam.h"

#include <gtest/gtest.h>

#include <cmath>

namespace expertd::train {
namespace {

// With constant gradients both bias-corrected moments are exact, so each step is learning_rate.
TEST(AdamTest, ConstantGradientMovesByTheLearningRate) {
  Parameter parameter("p", 2, 1.0f);
  Adam adam({.max_norm = 0}, {&parameter});
  for (int step = 1; step <= 3; ++step) {
    parameter.gradient = {5.0f, -0.01f};
    adam.Step(0.1);
    EXPECT_NEAR(parameter.value[0], 1 - 0.1 * step, 1e-5);
    EXPECT_NEAR(parameter.value[1], 1 + 0.1 * step, 1e-5);
    EXPECT_EQ(parameter.gradient[0], 0);
  }
}

TEST(AdamTest, ReturnsTheNormOfAllGradients) {
  Parameter first("first", 1, 0.0f);
  Parameter second("second", 1, 0.0f);
  Adam adam({}, {&first, &second});
  first.gradient[0] = 3;
  second.gradient[0] = 4;
  EXPECT_DOUBLE_EQ(adam.Step(0.1), 5);
}

// Adam ignores a constant scale, so clipping shows when the gradient grows: the second, unclipped
// step would be larger.
TEST(AdamTest, ClippingBoundsALaterLargeGradient) {
  Parameter clipped("clipped", 1, 0.0f);
  Parameter free("free", 1, 0.0f);
  Adam with({.max_norm = 1}, {&clipped});
  Adam without({.max_norm = 0}, {&free});
  for (const float gradient : {1.0f, 100.0f}) {
    clipped.gradient[0] = gradient;
    free.gradient[0] = gradient;
    with.Step(0.1);
    without.Step(0.1);
  }
  EXPECT_NEAR(clipped.value[0], -0.2f, 1e-5);
  EXPECT_GT(std::abs(free.value[0] - clipped.value[0]), 1e-3);
}

TEST(AdamTest, OnlyDecayedParametersShrinkWithoutGradient) {
  Parameter matrix("matrix", 1, 1.0f);
  Parameter gain("gain", 1, 1.0f);
  matrix.decayed = true;
  Adam adam({.weight_decay = 0.5}, {&matrix, &gain});
  adam.Step(0.1);
  EXPECT_FLOAT_EQ(matrix.value[0], 0.95f);
  EXPECT_FLOAT_EQ(gain.value[0], 1.0f);
}

}  // namespace
}  // namespace expertd::train
