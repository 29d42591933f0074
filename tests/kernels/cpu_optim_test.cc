// SGD, AdamW, gradient facts, rounding and initialisation against f64.
#include "kernels/cpu/cpu_optim.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "kernels/cpu/float_convert.h"
#include "tests/kernels/test_values.h"

namespace expertd {
namespace {

std::vector<float> Random(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = std::uniform_real_distribution<float>(-1, 1)(random);
  return values;
}

constexpr int64_t kCount = 1003;

class CpuOptimTest : public testing::Test {
 protected:
  std::unique_ptr<OptimKernels> optim_ = CreateCpuOptim();
};

TEST_F(CpuOptimTest, ShardsOfAnInitialisedParameterEqualTheWhole) {
  const InitArgs whole = {.seed = 5,
                          .layer_key = 6,
                          .parameter_key = 1,
                          .first_index = 0,
                          .count = 1000,
                          .bound = 0.05f};
  std::vector<float> all(1000);
  ASSERT_TRUE(optim_->InitUniform(whole, all.data()).ok());
  for (int64_t first : {0, 1, 2, 3, 5, 250, 999}) {
    for (int64_t count : {0, 1, 2, 7, 250}) {
      if (first + count > 1000) continue;
      InitArgs part = whole;
      part.first_index = first;
      part.count = count;
      std::vector<float> shard(static_cast<size_t>(count) + 1, 42.0f);
      ASSERT_TRUE(optim_->InitUniform(part, shard.data()).ok());
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(shard[static_cast<size_t>(i)], all[static_cast<size_t>(first + i)]);
      }
      ASSERT_EQ(shard.back(), 42.0f);
    }
  }
}

TEST_F(CpuOptimTest, InitialisationGoesPastThirtyTwoBitsOfIndex) {
  float low[1];
  float high[1];
  InitArgs args = {.seed = 5, .first_index = 7, .count = 1, .bound = 1};
  ASSERT_TRUE(optim_->InitUniform(args, low).ok());
  args.first_index += int64_t{1} << 36;
  ASSERT_TRUE(optim_->InitUniform(args, high).ok());
  EXPECT_NE(low[0], high[0]);
}

TEST_F(CpuOptimTest, InspectSumsSquaresAndFindsEveryNonFiniteElement) {
  std::vector<float> gradient = Random(kCount, 3);
  double want = 0;
  for (float g : gradient) want += static_cast<double>(g) * static_cast<double>(g);
  auto facts = optim_->Inspect(gradient.data(), kCount);
  ASSERT_TRUE(facts.ok());
  EXPECT_NEAR(facts->sum_of_squares, want, 1e-12 * want);
  EXPECT_TRUE(facts->finite);
  for (size_t at : {0u, 7u, 8u, 500u, 1002u}) {
    for (float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      const float kept = gradient[at];
      gradient[at] = bad;
      EXPECT_FALSE(optim_->Inspect(gradient.data(), kCount)->finite) << at;
      gradient[at] = kept;
    }
  }
  EXPECT_TRUE(optim_->Inspect(nullptr, 0)->finite);
  EXPECT_EQ(optim_->Inspect(nullptr, 0)->sum_of_squares, 0);
}

TEST_F(CpuOptimTest, SgdFollowsItsFormula) {
  const SgdArgs args = {
      .learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .gradient_scale = 0.5};
  const std::vector<float> gradient = Random(kCount, 1);
  const std::vector<float> before = Random(kCount, 2);
  const std::vector<float> buffer_before = Random(kCount, 3);
  std::vector<float> weight = before;
  std::vector<float> buffer = buffer_before;
  ASSERT_TRUE(optim_->Sgd(args, gradient.data(), kCount, buffer.data(), weight.data()).ok());
  for (size_t i = 0; i < weight.size(); ++i) {
    const double m = 0.9 * buffer_before[i] + 0.5 * gradient[i] + 0.01 * before[i];
    // Six roundings of values up to 2.5, constants included.
    ASSERT_NEAR(buffer[i], m, 6 * 2.5 * 0x1p-24);
    ASSERT_NEAR(weight[i], before[i] - 0.1 * m, 4 * 1.3 * 0x1p-24 + 0.1 * 6 * 2.5 * 0x1p-24);
  }
}

TEST_F(CpuOptimTest, SgdWithoutMomentumNeedsNoBuffer) {
  SgdArgs args = {.learning_rate = 0.25};
  const std::vector<float> gradient = {1, 2, -4};
  std::vector<float> weight = {1, 1, 1};
  ASSERT_TRUE(optim_->Sgd(args, gradient.data(), 3, nullptr, weight.data()).ok());
  EXPECT_EQ(weight, (std::vector<float>{0.75f, 0.5f, 2.0f}));
  args.momentum = 0.9;
  EXPECT_TRUE(
      HasReason(optim_->Sgd(args, gradient.data(), 3, nullptr, weight.data()), Reason::kInternal));
}

TEST_F(CpuOptimTest, AdamWFollowsItsFormulaOverManySteps) {
  AdamWArgs args = {.learning_rate = 1e-2, .weight_decay = 0.1, .gradient_scale = 0.5};
  std::vector<float> weight = Random(kCount, 2);
  std::vector<float> first(kCount, 0.0f);
  std::vector<float> second(kCount, 0.0f);
  std::vector<double> w(weight.begin(), weight.end());
  std::vector<double> m(kCount, 0.0);
  std::vector<double> v(kCount, 0.0);
  for (int64_t step = 1; step <= 20; ++step) {
    args.step = step;
    const std::vector<float> gradient = Random(kCount, static_cast<uint32_t>(step));
    ASSERT_TRUE(
        optim_->AdamW(args, gradient.data(), kCount, first.data(), second.data(), weight.data())
            .ok());
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = 0.5 * static_cast<double>(gradient[i]);
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      const double mhat = m[i] / (1 - std::pow(0.9, step));
      const double vhat = v[i] / (1 - std::pow(0.999, step));
      w[i] -= 1e-2 * (mhat / (std::sqrt(vhat) + 1e-8) + 0.1 * w[i]);
      // Each step adds at most a few roundings of the weight and of a step of about 1e-2; where
      // mhat nearly cancels, its absolute error is that of its terms over sqrt(vhat) >= 1e-2.
      ASSERT_NEAR(weight[i], w[i], static_cast<double>(step) * 2e-6) << "step " << step;
    }
  }
}

TEST_F(CpuOptimTest, RoundIsToNearestEven) {
  const float from[] = {1.0f, 1.00390625f, 1.01171875f, -3.3f};
  uint16_t to[4];
  ASSERT_TRUE(optim_->Round(from, 4, DType::kBF16, to).ok());
  EXPECT_EQ(to[0], 0x3f80);
  EXPECT_EQ(to[1], 0x3f80);  // halfway, down to even
  EXPECT_EQ(to[2], 0x3f82);  // halfway, up to even
  ASSERT_TRUE(optim_->Round(from, 4, DType::kF16, to).ok());
  EXPECT_EQ(to[3], F32ToF16(-3.3f));
  EXPECT_TRUE(HasReason(optim_->Round(from, 4, DType::kF32, to), Reason::kDtypeUnsupported));
}

}  // namespace
}  // namespace expertd
