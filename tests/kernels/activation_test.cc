// Activations and their slopes against the standard library in f64; dot products.
#include "kernels/cpu/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace expertd {
namespace {

double Value(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kRelu2:
      return x > 0 ? x * x : 0;
  }
  return 0;
}

double Slope(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
    case Activation::kGelu:
      return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) +
             x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case Activation::kRelu2:
      return x > 0 ? 2 * x : 0;
  }
  return 0;
}

class ActivationRows : public testing::TestWithParam<Activation> {
 protected:
  static std::vector<float> Inputs() {
    std::vector<float> inputs;
    for (double x = -30; x <= 30; x += 0.00371) inputs.push_back(static_cast<float>(x));
    for (float x : {0.0f, -0.0f, 1e-30f, -1e-30f, 100.0f, -100.0f, 3e4f, -3e4f})
      inputs.push_back(x);
    return inputs;
  }
};

TEST_P(ActivationRows, ForwardIsWithinOneMillionth) {
  const std::vector<float> gate = Inputs();
  const std::vector<float> up(gate.size(), 1.0f);
  std::vector<float> u(gate.size());
  ActivateRow(GetParam(), gate.data(), up.data(), 1.0f, static_cast<int64_t>(gate.size()),
              u.data());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double want = Value(GetParam(), gate[i]);
    ASSERT_NEAR(u[i], want, 1e-6 * (std::abs(want) + std::min(std::abs(gate[i]), 1.0f))) << gate[i];
  }
}

TEST_P(ActivationRows, BackwardIsWithinTwoMillionths) {
  const std::vector<float> gate = Inputs();
  const size_t count = gate.size();
  const std::vector<float> up(count, 0.5f);
  const std::vector<float> grad_u(count, 3.0f);
  std::vector<float> u(count);
  std::vector<float> grad_gate(count);
  std::vector<float> grad_up(count);
  ActivateRowBackward(GetParam(), {.gate = gate.data(),
                                   .up = up.data(),
                                   .grad_u = grad_u.data(),
                                   .factor = 0.25f,
                                   .count = static_cast<int64_t>(count),
                                   .u = u.data(),
                                   .grad_gate = grad_gate.data(),
                                   .grad_up = grad_up.data()});
  for (size_t i = 0; i < count; ++i) {
    const double value = Value(GetParam(), gate[i]);
    const double slope = Slope(GetParam(), gate[i]);
    const double bound = 2e-6 * (1 + std::abs(value) + std::abs(slope));
    ASSERT_NEAR(u[i], 0.5 * value, bound) << gate[i];
    ASSERT_NEAR(grad_gate[i], 0.75 * 0.5 * slope, bound) << gate[i];
    ASSERT_NEAR(grad_up[i], 0.75 * value, bound) << gate[i];
  }
}

TEST_P(ActivationRows, NanAndFactorPassThrough) {
  const float gate[] = {std::numeric_limits<float>::quiet_NaN(), 2.0f};
  const float up[] = {1.0f, 1.0f};
  float u[2];
  float doubled[2];
  ActivateRow(GetParam(), gate, up, 1.0f, 2, u);
  ActivateRow(GetParam(), gate, up, 2.0f, 2, doubled);
  EXPECT_TRUE(std::isnan(u[0]));
  EXPECT_EQ(doubled[1], 2 * u[1]);
}

INSTANTIATE_TEST_SUITE_P(All, ActivationRows,
                         testing::Values(Activation::kSilu, Activation::kGelu, Activation::kRelu2));

TEST(Dot, SumsEveryElementAtEveryLength) {
  for (int64_t count : {0, 1, 15, 16, 17, 31, 32, 33, 1000}) {
    std::vector<float> left(static_cast<size_t>(count));
    std::vector<float> right(left.size());
    double want = 0;
    for (size_t i = 0; i < left.size(); ++i) {
      left[i] = static_cast<float>(i % 7) - 3;
      right[i] = static_cast<float>(i % 5) + 1;
      want += static_cast<double>(left[i]) * static_cast<double>(right[i]);
    }
    EXPECT_EQ(Dot(left.data(), right.data(), count), want) << count;  // integers: exact
  }
}

}  // namespace
}  // namespace expertd
