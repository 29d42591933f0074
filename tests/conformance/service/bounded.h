// Numbers with a bound on how far the service's rounded value of them may lie away.
//
// A running error analysis: each operation adds the rounding it may cost in the service to the
// errors of its operands, so that a bound follows from the values at hand, the unit roundoffs and
// the lengths of the sums, and nothing has to be guessed. Rounding to nearest in a dtype with unit
// roundoff u costs u * |value|, or half the smallest subnormal; a sum of n products in f32, in any
// order, costs at most (n + 1) * u32 * sum |products| (Higham, "Accuracy and Stability of Numerical
// Algorithms", section 3.1, to first order).
#ifndef TESTS_CONFORMANCE_SERVICE_BOUNDED_H_
#define TESTS_CONFORMANCE_SERVICE_BOUNDED_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "expertd/v1/types.pb.h"

namespace expertd::conformance {

constexpr double kUnitF32 = 0x1p-24;

struct Bounded {
  double value = 0;
  double error = 0;
};

using BoundedRow = std::vector<Bounded>;

inline Bounded Exact(double value) { return {value, 0}; }

// How values of one dtype are rounded.
struct Rounding {
  double unit = kUnitF32;
  double tiny = 0;  // Half the smallest subnormal; below f32's and bf16's nothing here lies.
};

inline Rounding RoundingOf(v1::DType dtype) {
  if (dtype == v1::DTYPE_BF16) return {0x1p-8, 0};
  if (dtype == v1::DTYPE_F16) return {0x1p-11, 0x1p-25};
  return {};
}

inline Bounded Rounded(const Bounded& a, const Rounding& rounding) {
  return {a.value, a.error + rounding.unit * (std::abs(a.value) + a.error) + rounding.tiny};
}

// The product in f32.
inline Bounded Times(const Bounded& a, const Bounded& b) {
  const double value = a.value * b.value;
  return {value, std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error +
                     kUnitF32 * std::abs(value)};
}

// A sum in f32, in any order.
class Sum {
 public:
  void Add(const Bounded& term) {
    value_ += term.value;
    error_ += term.error;
    magnitude_ += std::abs(term.value);
    ++terms_;
  }
  void AddProduct(const Bounded& a, const Bounded& b) { Add(Times(a, b)); }

  double magnitude() const { return magnitude_; }
  Bounded Total() const {
    return {value_, error_ + static_cast<double>(terms_ + 1) * kUnitF32 * (magnitude_ + error_)};
  }

 private:
  double value_ = 0;
  double error_ = 0;
  double magnitude_ = 0;
  int64_t terms_ = 0;
};

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_BOUNDED_H_
