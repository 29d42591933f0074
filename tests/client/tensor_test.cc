// Tests of tensor messages and half-precision conversion.
#include "client/cpp/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "client/cpp/rank_client.h"

namespace expertd::client {
namespace {

using ::testing::ElementsAre;

TEST(TensorTest, F32PayloadIsLittleEndianAndDense) {
  const std::vector<float> values = {1.0f, -2.0f};
  const v1::Tensor tensor = FloatTensor(v1::DTYPE_F32, {1, 2}, values);
  EXPECT_EQ(tensor.data(), std::string("\x00\x00\x80\x3f\x00\x00\x00\xc0", 8));
  EXPECT_THAT(tensor.shape(), ElementsAre(1, 2));
  EXPECT_THAT(*ReadFloats(tensor), ElementsAre(1.0f, -2.0f));
}

TEST(TensorTest, NarrowTypesRoundTrip) {
  const std::vector<float> values = {0.0f, 1.0f, -3.5f, 96.0f};
  for (v1::DType dtype : {v1::DTYPE_F16, v1::DTYPE_BF16}) {
    const v1::Tensor tensor = FloatTensor(dtype, {4}, values);
    EXPECT_EQ(tensor.data().size(), 8u);
    EXPECT_EQ(*ReadFloats(tensor), values);
  }
}

TEST(TensorTest, Integers) {
  const std::vector<int32_t> narrow = {-1, 7};
  const std::vector<int64_t> wide = {-1, int64_t{1} << 40};
  EXPECT_THAT(*ReadInts(Int32Tensor({2}, narrow)), ElementsAre(-1, 7));
  EXPECT_EQ(*ReadInts(Int64Tensor({2}, wide)), wide);
}

TEST(TensorTest, ZeroRowsAreLegal) {
  const v1::Tensor tensor = FloatTensor(v1::DTYPE_BF16, {0, 16}, {});
  EXPECT_EQ(PayloadBytes(tensor), 0);
  EXPECT_TRUE(ReadFloats(tensor)->empty());
}

TEST(TensorTest, WrongSizeAndWrongTypeAreNamed) {
  v1::Tensor tensor = FloatTensor(v1::DTYPE_F32, {1}, std::vector<float>{1});
  tensor.mutable_data()->pop_back();
  EXPECT_EQ(ReasonOf(ReadFloats(tensor).status()), Reason::kPayloadSizeMismatch);
  EXPECT_EQ(ReasonOf(ReadInts(tensor).status()), Reason::kDtypeUnsupported);
}

TEST(Bf16Test, RoundsToNearestEven) {
  EXPECT_EQ(ToBf16(1.0f), 0x3f80);
  EXPECT_EQ(ToBf16(1.0f + 0x1p-8f), 0x3f80);             // Halfway, down to even.
  EXPECT_EQ(ToBf16(1.0f + 3 * 0x1p-8f), 0x3f82);         // Halfway, up to even.
  EXPECT_EQ(ToBf16(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);  // Just above halfway.
  EXPECT_TRUE(std::isnan(FromBf16(ToBf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(FromBf16(ToBf16(std::numeric_limits<float>::max()))));
}

TEST(F16Test, EveryBitPatternRoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = FromF16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(ToF16(value), bits) << value;
  }
}

TEST(F16Test, RoundsToNearestEvenWithSubnormalsAndOverflow) {
  EXPECT_EQ(ToF16(1.0f + 0x1p-11f), 0x3c00);      // Halfway, down to even.
  EXPECT_EQ(ToF16(1.0f + 3 * 0x1p-11f), 0x3c02);  // Halfway, up to even.
  EXPECT_EQ(ToF16(0x1p-25f), 0x0000);             // Half the least subnormal.
  EXPECT_EQ(ToF16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(ToF16(65519.0f), 0x7bff);
  EXPECT_EQ(ToF16(65520.0f), 0x7c00);
  EXPECT_EQ(ToF16(-65520.0f), 0xfc00);
}

TEST(DTypeTest, NamesGoBothWays) {
  EXPECT_EQ(DTypeName(v1::DTYPE_BF16), "bf16");
  EXPECT_EQ(*ParseDType("bf16"), v1::DTYPE_BF16);
  EXPECT_EQ(*ParseDType("DTYPE_F32"), v1::DTYPE_F32);
  EXPECT_EQ(ReasonOf(ParseDType("f64").status()), Reason::kDtypeUnsupported);
  EXPECT_FALSE(ParseDType("unspecified").ok());
}

TEST(TensorTest, BufferTensorNamesThePlaceAndCarriesNoBytes) {
  const v1::Tensor tensor = BufferTensor(v1::DTYPE_BF16, {3, 4}, "x", 8);
  EXPECT_EQ(tensor.dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(PayloadBytes(tensor), 24);
  EXPECT_TRUE(tensor.has_buffer());
  EXPECT_EQ(tensor.buffer().buffer_id(), "x");
  EXPECT_EQ(tensor.buffer().offset_bytes(), 8u);
  v1::BufferRef place;
  SetBuffer("y", &place);
  EXPECT_EQ(place.buffer_id(), "y");
}

TEST(TensorTest, PutTensorRefusesAPayloadOfAnotherSizeBeforeItCalls) {
  RankClient client({.rank = 0, .address = "127.0.0.1:1"});
  v1::Tensor tensor = Int32Tensor({2}, {1, 2});
  tensor.set_shape(0, 3);
  const auto stored = client.PutTensor("x", tensor, absl::InfiniteFuture());
  EXPECT_TRUE(HasReason(stored.status(), Reason::kPayloadSizeMismatch)) << stored.status();
}

}  // namespace
}  // namespace expertd::client
