// The expert MLP in f64 with a running error bound, for expert_mlp_test.
//
// Every value carries a bound on how far the product may be from it: sums of n products in f32 add
// (n + 4) 2^-23 of the sum of magnitudes, activations and exponentials 2e-6, a stored tensor one
// rounding of its dtype, and errors of inputs pass through the formulas. Written from expert_mlp.h.
#ifndef TESTS_KERNELS_MLP_REFERENCE_H_
#define TESTS_KERNELS_MLP_REFERENCE_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/expert_mlp.h"
#include "tests/kernels/test_values.h"

namespace expertd {

struct Bounded {
  double value = 0;
  double error = 0;
};

inline Bounded Stored(Bounded x, DType dtype) {
  x.error += Roundoff(dtype) * (std::abs(x.value) + x.error) + 1e-7 * 0x1p-10;
  return x;
}

// sum of a[i] * b[i] in f32.
class BoundedSum {
 public:
  void Add(Bounded a, Bounded b) {
    sum_ += a.value * b.value;
    const double a_size = std::abs(a.value) + a.error;
    const double b_size = std::abs(b.value) + b.error;
    magnitude_ += a_size * b_size;
    error_ += a.error * b_size + b.error * std::abs(a.value);
    ++terms_;
  }
  Bounded Result() const { return {sum_, error_ + (terms_ + 4) * 0x1p-23 * magnitude_}; }

 private:
  double sum_ = 0;
  double magnitude_ = 0;
  double error_ = 0;
  double terms_ = 0;
};

inline double Act(Activation activation, double x) {
  if (activation == Activation::kSilu) return x / (1 + std::exp(-x));
  if (activation == Activation::kGelu) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return x > 0 ? x * x : 0;
}

inline double ActSlope(Activation activation, double x) {
  if (activation == Activation::kSilu) {
    const double s = 1 / (1 + std::exp(-x));
    return s * (1 + x * (1 - s));
  }
  if (activation == Activation::kGelu) {
    return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) +
           x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
  }
  return x > 0 ? 2 * x : 0;
}

// act(x): the slope carries the error, curvature is at most 2, the approximation 1e-6.
inline Bounded BoundedAct(Activation activation, Bounded x) {
  const double value = Act(activation, x.value);
  return {value, std::abs(ActSlope(activation, x.value)) * x.error + x.error * x.error +
                     2e-6 * (std::abs(value) + std::min(1.0, std::abs(x.value)))};
}

inline Bounded BoundedSlope(Activation activation, Bounded x) {
  const double value = ActSlope(activation, x.value);
  return {value, 2 * x.error + 2e-6 * (1 + std::abs(value))};
}

inline Bounded Times(Bounded a, Bounded b) {
  const double product = a.value * b.value;
  return {product, a.error * (std::abs(b.value) + b.error) + b.error * std::abs(a.value) +
                       0x1p-23 * std::abs(product)};
}

}  // namespace expertd

#endif  // TESTS_KERNELS_MLP_REFERENCE_H_
