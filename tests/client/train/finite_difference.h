// Compares an exact gradient with central differences of a loss computed in f32.
#ifndef TESTS_CLIENT_TRAIN_FINITE_DIFFERENCE_H_
#define TESTS_CLIENT_TRAIN_FINITE_DIFFERENCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/expertctl/train/random.h"

namespace expertd::train {

// Uniform values in [-1, 1), a function of (stream, index).
inline std::vector<float> RandomVector(size_t size, uint64_t stream) {
  std::vector<float> values(size);
  for (size_t i = 0; i < size; ++i) values[i] = RandomUniform(7, stream, i);
  return values;
}

// Summed in double, so that the loss adds no rounding of its own.
inline double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// Checks up to 40 entries of `gradient`, spread over it, against
// (loss(v + h) - loss(v - h)) / 2h with h = 2^-7. Losses here are of order 1 to 10 with third
// derivatives of order 10, so truncation is about h^2 * 10 / 6 = 1e-4 and rounding about
// 10 * 2^-24 * sqrt(terms) / h = 1e-3 at worst: the bound is 3e-3 of (1 + |gradient|).
inline void ExpectGradient(const std::string& name, std::vector<float>* values,
                           const std::vector<float>& gradient,
                           const std::function<double()>& loss) {
  ASSERT_EQ(values->size(), gradient.size()) << name;
  constexpr float kStep = 0x1p-7f;
  const size_t stride = std::max<size_t>(1, values->size() / 40);
  for (size_t i = 0; i < values->size(); i += stride) {
    const float kept = (*values)[i];
    const float high = kept + kStep;
    const float low = kept - kStep;
    (*values)[i] = high;
    const double above = loss();
    (*values)[i] = low;
    const double below = loss();
    (*values)[i] = kept;
    const double slope = (above - below) / (static_cast<double>(high) - low);
    EXPECT_NEAR(gradient[i], slope, 3e-3 * (1 + std::abs(slope))) << name << "[" << i << "]";
  }
}

}  // namespace expertd::train

#endif  // TESTS_CLIENT_TRAIN_FINITE_DIFFERENCE_H_
