// bf16, f16 and f32: conversions of single values and of rows, and sums of rows in f32.
//
// Rounding is to nearest even; NaN stays NaN. Row functions take kF32, kF16 or kBF16 (IsFloat) and
// give the same bits on every instruction set.
#ifndef KERNELS_CPU_FLOAT_CONVERT_H_
#define KERNELS_CPU_FLOAT_CONVERT_H_

#include <bit>
#include <cstdint>

#include "kernels/cpu/vector_dispatch.h"
#include "kernels/types.h"

namespace expertd {

EXPERTD_INLINE float Bf16ToF32(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

EXPERTD_INLINE uint16_t F32ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

EXPERTD_INLINE float F16ToF32(uint16_t value) {
  const uint32_t magnitude = (value & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  // Moves the exponent bias from 15 to 127; makes denormals normal on the way.
  const auto scaled =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000u));
  const uint32_t special = (value & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : scaled;
  return std::bit_cast<float>(special | sign);
}

EXPERTD_INLINE uint16_t F32ToF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 puts the denormal's last place at the mantissa's last place: the adder rounds.
  const uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? nan : result;
  return static_cast<uint16_t>(result | sign);
}

// True for the dtypes that arithmetic is done on.
constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// to[i] = from[i] as f32.
void RowToF32(DType dtype, const void* from, int64_t count, float* to);
// to[i] = round(from[i]).
void RowFromF32(DType dtype, const float* from, int64_t count, void* to);
// sum[i] += row[i].
void AddRow(DType dtype, const void* row, int64_t count, float* sum);
// sum[i] += factor * row[i].
void AddScaledRow(DType dtype, const void* row, float factor, int64_t count, float* sum);
// to[i] = round(factor * row[i]).
void ScaleRow(DType dtype, const void* row, float factor, int64_t count, void* to);

}  // namespace expertd

#endif  // KERNELS_CPU_FLOAT_CONVERT_H_
