// Row-major matrix helpers of the float64 reference.
#ifndef TESTS_REFERENCE_MATRIX_H_
#define TESTS_REFERENCE_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace expertd::reference {

// Row `row` of a row-major matrix that is `columns` wide.
// REQUIRES: (row + 1) * columns <= matrix.size().
inline std::span<const double> Row(const std::vector<double>& matrix, int64_t row,
                                   int64_t columns) {
  return std::span<const double>(matrix).subspan(static_cast<size_t>(row * columns),
                                                 static_cast<size_t>(columns));
}

inline std::span<double> MutableRow(std::vector<double>& matrix, int64_t row, int64_t columns) {
  return std::span<double>(matrix).subspan(static_cast<size_t>(row * columns),
                                           static_cast<size_t>(columns));
}

// REQUIRES: a.size() == b.size().
inline double Dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// to += scale * from. REQUIRES: from.size() == to.size().
inline void AddScaled(double scale, std::span<const double> from, std::span<double> to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += scale * from[i];
}

}  // namespace expertd::reference

#endif  // TESTS_REFERENCE_MATRIX_H_
