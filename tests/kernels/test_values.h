// Typed test data: values exact in every float dtype, poisoned buffers, reading them back as f64.
#ifndef TESTS_KERNELS_TEST_VALUES_H_
#define TESTS_KERNELS_TEST_VALUES_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/types.h"

namespace expertd {

// Bits of `value`, which must be exact in the dtype (bf16 keeps the upper half of f32).
inline void EncodeExact(DType dtype, double value, std::byte* to) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::kF32) {
    std::memcpy(to, &single, 4);
  } else if (dtype == DType::kF16) {
    const auto half = static_cast<_Float16>(value);
    std::memcpy(to, &half, 2);
  } else {
    const auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16);
    std::memcpy(to, &upper, 2);
  }
}

inline double DecodeExact(DType dtype, const std::byte* from) {
  if (dtype == DType::kF32) {
    float single;
    std::memcpy(&single, from, 4);
    return single;
  }
  if (dtype == DType::kF16) {
    _Float16 half;
    std::memcpy(&half, from, 2);
    return static_cast<double>(half);
  }
  uint16_t upper;
  std::memcpy(&upper, from, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(upper) << 16);
}

// Relative error of one rounding to nearest.
inline double Roundoff(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
}

// An array in host memory; every byte 0xFF (NaN in every dtype) until set.
class TypedArray {
 public:
  TypedArray(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count) * DTypeSize(dtype), std::byte{0xFF}) {}

  void* data() { return bytes_.data(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size() / DTypeSize(dtype_)); }
  double Get(int64_t i) const { return DecodeExact(dtype_, bytes_.data() + Offset(i)); }
  void Set(int64_t i, double value) { EncodeExact(dtype_, value, bytes_.data() + Offset(i)); }
  bool Untouched(int64_t begin, int64_t end) const {
    return std::all_of(bytes_.begin() + static_cast<ptrdiff_t>(Offset(begin)),
                       bytes_.begin() + static_cast<ptrdiff_t>(Offset(end)),
                       [](std::byte b) { return b == std::byte{0xFF}; });
  }

 private:
  size_t Offset(int64_t i) const { return static_cast<size_t>(i) * DTypeSize(dtype_); }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

// A multiple of 1/16 in [-2, 2]: exact in every float dtype.
inline double SmallValue(std::mt19937& random) {
  return (static_cast<double>(random() % 65) - 32) / 16;
}

}  // namespace expertd

#endif  // TESTS_KERNELS_TEST_VALUES_H_
