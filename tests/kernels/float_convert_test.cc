// Conversions against the compiler's _Float16 and a bf16 rounding written out; row functions.
#include "kernels/cpu/float_convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/kernels/test_values.h"

namespace expertd {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr int64_t kCounts[] = {0, 1, 2, 15, 16, 17, 63, 64, 100, 1027};

// The nearer of the two bf16 neighbours; the even one when both are as near.
uint16_t NearestBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto below = static_cast<uint16_t>(bits >> 16);
  const uint32_t rest = bits & 0xffffu;
  if (rest > 0x8000u || (rest == 0x8000u && (below & 1u) != 0)) {
    return static_cast<uint16_t>(below + 1);
  }
  return below;
}

// Patterns around every rounding case: all exponents, both signs, mantissas at ties and next to
// them.
std::vector<float> RoundingCases() {
  std::vector<float> cases;
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (uint32_t high = 0; high < 8; ++high) {
      for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u,
                           0xffffu, 0x2fffu, 0x3000u, 0x3001u}) {
        for (uint32_t sign : {0u, 0x80000000u}) {
          cases.push_back(
              std::bit_cast<float>(sign | (exponent << 23) | (high << 16) | (high << 20) | low));
        }
      }
    }
  }
  cases.push_back(std::numeric_limits<float>::infinity());
  cases.push_back(-std::numeric_limits<float>::infinity());
  return cases;
}

TEST(FloatConvert, EveryF16WidensExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    const auto expected = static_cast<float>(std::bit_cast<_Float16>(narrow));
    const float got = F16ToF32(narrow);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(expected)) << bits;
      ASSERT_EQ(F32ToF16(got), narrow);
    }
  }
}

TEST(FloatConvert, EveryBf16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    const float wide = Bf16ToF32(narrow);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(Bf16ToF32(F32ToBf16(wide))));
    } else {
      ASSERT_EQ(F32ToBf16(wide), narrow);
    }
  }
}

TEST(FloatConvert, F32RoundsToNearestEven) {
  for (float value : RoundingCases()) {
    ASSERT_EQ(F32ToF16(value), std::bit_cast<uint16_t>(static_cast<_Float16>(value))) << value;
    if (std::isfinite(value)) {
      ASSERT_EQ(F32ToBf16(value), NearestBf16(value)) << value;
    }
  }
}

TEST(FloatConvert, NanStaysNan) {
  for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xffffffffu, 0xff800001u, 0x7f80ffffu}) {
    const auto nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(nan))));
    EXPECT_TRUE(std::isnan(Bf16ToF32(F32ToBf16(nan))));
  }
}

TEST(FloatConvert, RowsEqualSingleConversions) {
  const std::vector<float> cases = RoundingCases();
  const auto count = static_cast<int64_t>(cases.size());
  TypedArray bf16(DType::kBF16, count);
  TypedArray f16(DType::kF16, count);
  RowFromF32(DType::kBF16, cases.data(), count, bf16.data());
  RowFromF32(DType::kF16, cases.data(), count, f16.data());
  for (size_t i = 0; i < cases.size(); ++i) {
    ASSERT_EQ(static_cast<uint16_t*>(bf16.data())[i], F32ToBf16(cases[i]));
    ASSERT_EQ(static_cast<uint16_t*>(f16.data())[i], F32ToF16(cases[i]));
  }
}

TEST(FloatConvert, RowArithmeticIsF32AtEveryLength) {
  std::mt19937 random(5);
  for (DType dtype : kFloats) {
    for (int64_t count : kCounts) {
      TypedArray row(dtype, count);
      std::vector<float> sum(static_cast<size_t>(count) + 1, 3.5f);
      std::vector<float> scaled_sum(sum);
      std::vector<float> wide(sum);
      TypedArray scaled(dtype, count + 1);
      for (int64_t i = 0; i < count; ++i) row.Set(i, SmallValue(random));
      RowToF32(dtype, row.data(), count, wide.data());
      AddRow(dtype, row.data(), count, sum.data());
      AddScaledRow(dtype, row.data(), 0.3f, count, scaled_sum.data());
      ScaleRow(dtype, row.data(), 0.75f, count, scaled.data());
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(i);
        const auto value = static_cast<float>(row.Get(i));
        const volatile float product = 0.3f * value;  // rounded before it is added
        ASSERT_EQ(wide[at], value);
        ASSERT_EQ(sum[at], 3.5f + value);
        ASSERT_EQ(scaled_sum[at], 3.5f + product);
        ASSERT_EQ(scaled.Get(i), 0.75 * row.Get(i));
      }
      // Nothing past the end is written.
      EXPECT_EQ(sum.back(), 3.5f);
      EXPECT_EQ(scaled_sum.back(), 3.5f);
      EXPECT_EQ(wide.back(), 3.5f);
      EXPECT_TRUE(scaled.Untouched(count, count + 1));
    }
  }
}

}  // namespace
}  // namespace expertd
