// Seeded random inputs and finite differences for the tests of the float64 reference.
//
//   TestRandom random;
//   SCOPED_TRACE(random.Trace());  // a failure prints EXPERTD_TEST_SEED=..., which replays it
#ifndef TESTS_REFERENCE_TEST_RANDOM_H_
#define TESTS_REFERENCE_TEST_RANDOM_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/reference/ep.h"

namespace expertd::reference {

class TestRandom {
 public:
  // The seed is EXPERTD_TEST_SEED if set, else fresh.
  TestRandom() {
    const char* seed = std::getenv("EXPERTD_TEST_SEED");
    seed_ = seed != nullptr ? std::strtoull(seed, nullptr, 10) : std::random_device()();
    engine_.seed(seed_);
  }

  std::string Trace() const { return "EXPERTD_TEST_SEED=" + std::to_string(seed_); }

  double Uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine_);
  }

  int64_t Integer(int64_t low, int64_t high) {  // both ends included
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }

  std::vector<double> Values(int64_t count) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) value = Uniform(-1.0, 1.0);
    return values;
  }

  // Per rank [T_r, columns].
  PerRank Rows(const std::vector<int64_t>& tokens, int64_t columns) {
    PerRank rows;
    for (int64_t count : tokens) rows.push_back(Values(count * columns));
    return rows;
  }

  // Per rank [T_r, K]: distinct experts below `expert_count`, in random order, about one in five
  // replaced by -1.
  Routing Ids(const std::vector<int64_t>& tokens, int64_t top_k, int64_t expert_count) {
    std::vector<int64_t> experts(static_cast<size_t>(expert_count));
    std::iota(experts.begin(), experts.end(), 0);
    Routing ids;
    for (int64_t count : tokens) {
      std::vector<int64_t>& rank_ids = ids.emplace_back();
      for (int64_t t = 0; t < count; ++t) {
        std::ranges::shuffle(experts, engine_);
        for (int64_t k = 0; k < top_k; ++k) {
          rank_ids.push_back(Integer(1, 5) == 1 ? -1 : experts[static_cast<size_t>(k)]);
        }
      }
    }
    return ids;
  }

 private:
  uint64_t seed_ = 0;
  std::mt19937_64 engine_;
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The step of the finite differences. The error of a central difference is near step^2 where the
// function is smooth, near step at a kink of its first derivative (relu2), and that of rounding is
// near 1e-16 / step; kGradientTolerance is above all three, and far below any term left out.
constexpr double kStep = 1e-6;
constexpr double kGradientTolerance = 1e-5;

// Expects `gradient` to be the derivative of `loss` in each element of `values`, through which
// `loss` reads its input. Leaves `values` as they were.
inline void ExpectGradient(const std::string& name, std::vector<double>& values,
                           const std::vector<double>& gradient,
                           const std::function<double()>& loss) {
  ASSERT_EQ(values.size(), gradient.size()) << name;
  for (size_t i = 0; i < values.size(); ++i) {
    const double original = values[i];
    values[i] = original + kStep;
    const double above = loss();
    values[i] = original - kStep;
    const double below = loss();
    values[i] = original;
    const double expected = (above - below) / (2.0 * kStep);
    EXPECT_NEAR(gradient[i], expected, kGradientTolerance * (1.0 + std::abs(expected)))
        << name << "[" << i << "]";
  }
}

inline void ExpectAllNear(const std::vector<double>& actual, const std::vector<double>& expected,
                          double tolerance = 1e-12) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], tolerance) << "[" << i << "]";
  }
}

// The inner product of two groups of buffers of the same shapes.
inline double Inner(const PerRank& a, const PerRank& b) {
  double sum = 0.0;
  for (size_t rank = 0; rank < a.size(); ++rank) {
    sum = std::inner_product(a[rank].begin(), a[rank].end(), b[rank].begin(), sum);
  }
  return sum;
}

}  // namespace expertd::reference

#endif  // TESTS_REFERENCE_TEST_RANDOM_H_
