// Every operation's backward against finite differences of its forward.
#include "client/expertctl/train/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/client/train/finite_difference.h"

namespace expertd::train {
namespace {

TEST(OpsTest, EmbeddingGradientSumsOverRepeatedBytes) {
  Parameter table("table", 256 * 3, 0.0f);
  const std::vector<uint8_t> bytes = {5, 255, 5};
  const std::vector<float> gradient = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  EmbeddingBackward(bytes, gradient, &table);
  EXPECT_EQ(table.gradient[5 * 3], 8);
  EXPECT_EQ(table.gradient[5 * 3 + 2], 12);
  EXPECT_EQ(table.gradient[255 * 3 + 1], 5);
  EXPECT_EQ(table.gradient[0], 0);
}

TEST(OpsTest, EmbeddingForwardPicksRows) {
  Parameter table("table", 256 * 2, 0.0f);
  table.value[2 * 200] = 3;
  table.value[2 * 200 + 1] = 4;
  EXPECT_EQ(EmbeddingForward({0, 200}, table), (std::vector<float>{0, 0, 3, 4}));
}

TEST(OpsTest, RmsNormGradient) {
  constexpr int64_t kWidth = 7;
  std::vector<float> x = RandomVector(4 * kWidth, 1);
  Parameter gain("gain", kWidth, 0.0f);
  gain.value = RandomVector(kWidth, 2);
  const std::vector<float> direction = RandomVector(x.size(), 3);
  const auto loss = [&] { return Dot(RmsNormForward(x, gain), direction); };
  const std::vector<float> x_gradient = RmsNormBackward(x, direction, &gain);
  ExpectGradient("x", &x, x_gradient, loss);
  ExpectGradient("gain", &gain.value, gain.gradient, loss);
}

TEST(OpsTest, RmsNormOfZerosIsZeroWithFiniteGradient) {
  Parameter gain("gain", 2, 1.0f);
  EXPECT_EQ(RmsNormForward({0, 0}, gain), (std::vector<float>{0, 0}));
  for (const float g : RmsNormBackward({0, 0}, {1, 1}, &gain)) EXPECT_TRUE(std::isfinite(g));
}

TEST(OpsTest, LinearGradient) {
  std::vector<float> x = RandomVector(5 * 6, 1);
  Parameter weight("weight", 6 * 3, 0.0f);
  weight.value = RandomVector(6 * 3, 2);
  const std::vector<float> direction = RandomVector(5 * 3, 3);
  const auto loss = [&] { return Dot(LinearForward(x, 6, weight), direction); };
  const std::vector<float> x_gradient = LinearBackward(x, 6, direction, &weight);
  ExpectGradient("x", &x, x_gradient, loss);
  ExpectGradient("weight", &weight.value, weight.gradient, loss);
}

TEST(OpsTest, CrossEntropyGradientIsOfTheMeanOverScoredRows) {
  std::vector<float> logits = RandomVector(4 * 5, 1);
  const std::vector<int> targets = {0, 4, kIgnoredTarget, 2};
  const auto loss = [&] {
    const CrossEntropy result = SoftmaxCrossEntropy(logits, targets);
    return result.sum / static_cast<double>(result.scored);
  };
  const CrossEntropy result = SoftmaxCrossEntropy(logits, targets);
  EXPECT_EQ(result.scored, 3);
  ExpectGradient("logits", &logits, result.gradient, loss);
}

TEST(OpsTest, CrossEntropyOfEqualLogitsIsLogOfClasses) {
  const CrossEntropy result = SoftmaxCrossEntropy(std::vector<float>(8, 90.0f), {1, 3});
  EXPECT_NEAR(result.sum, 2 * std::log(4.0), 1e-6);
}

TEST(OpsTest, CrossEntropyWithNothingScoredIsZero) {
  const CrossEntropy result = SoftmaxCrossEntropy({1, 2}, {kIgnoredTarget});
  EXPECT_EQ(result.sum, 0);
  EXPECT_EQ(result.scored, 0);
  EXPECT_EQ(result.gradient, (std::vector<float>{0, 0}));
}

}  // namespace
}  // namespace expertd::train
