// Tests of tensor decoding: every way a tensor can be malformed, each named by its field path.
#include "server/rpc/convert_tensor.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace expertd::rpc {
namespace {

const TensorRule kRule{"tokens", 2, {DType::kF32, DType::kBF16}};

v1::Tensor Tensor(v1::DType dtype, std::vector<int64_t> shape, size_t bytes) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(std::string(bytes, '\1'));
  return tensor;
}

std::vector<FieldViolation> ViolationsOf(const v1::Tensor* tensor) {
  Violations violations;
  const engine::TensorInput input = FromProto(tensor, kRule, &violations);
  EXPECT_EQ(input.present(), violations.empty());
  return violations.empty() ? std::vector<FieldViolation>{}
                            : DetailOf(violations.ToStatus("x")).violations;
}

std::vector<FieldViolation> ViolationsOf(const v1::Tensor& tensor) { return ViolationsOf(&tensor); }

Reason ReasonOf(const v1::Tensor& tensor) {
  Violations violations;
  FromProto(&tensor, kRule, &violations);
  return expertd::ReasonOf(violations.ToStatus("x"));
}

using Found = std::vector<FieldViolation>;

TEST(ConvertTensorTest, ViewsThePayload) {
  const v1::Tensor tensor = Tensor(v1::DTYPE_BF16, {3, 5}, 30);
  Violations violations;
  const engine::TensorInput input = FromProto(&tensor, kRule, &violations);
  ASSERT_TRUE(violations.empty());
  EXPECT_EQ(input.dtype, DType::kBF16);
  EXPECT_EQ(input.shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(input.data, tensor.data().data());
  EXPECT_EQ(input.bytes, 30);
  EXPECT_EQ(input.path, "tokens");
}

TEST(ConvertTensorTest, ZeroRowsNeedNoPayload) {
  EXPECT_TRUE(ViolationsOf(Tensor(v1::DTYPE_F32, {0, 5}, 0)).empty());
  v1::Tensor unset = Tensor(v1::DTYPE_F32, {0, 5}, 0);
  unset.clear_data();
  EXPECT_TRUE(ViolationsOf(unset).empty());
}

TEST(ConvertTensorTest, ZeroRowsBesideHugeColumnsDoNotOverflow) {
  EXPECT_TRUE(
      ViolationsOf(Tensor(v1::DTYPE_F32, {0, std::numeric_limits<int64_t>::max()}, 0)).empty());
}

TEST(ConvertTensorTest, MissingTensor) {
  EXPECT_EQ(ViolationsOf(nullptr), (Found{{"tokens", "got no tensor, need one"}}));
}

TEST(ConvertTensorTest, PayloadSizeIsExact) {
  for (const size_t bytes : {0, 1, 59, 61, 120}) {
    const v1::Tensor tensor = Tensor(v1::DTYPE_F32, {3, 5}, bytes);
    EXPECT_EQ(ViolationsOf(tensor),
              (Found{{"tokens.data", "got " + std::to_string(bytes) +
                                         " bytes, need 60 (15 elements of DTYPE_F32)"}}));
    EXPECT_EQ(ReasonOf(tensor), Reason::kPayloadSizeMismatch);
  }
}

TEST(ConvertTensorTest, NegativeDimensionIsNamed) {
  const v1::Tensor tensor = Tensor(v1::DTYPE_F32, {3, -1}, 0);
  EXPECT_EQ(ViolationsOf(tensor), (Found{{"tokens.shape[1]", "got -1, need at least 0"}}));
  EXPECT_EQ(ReasonOf(tensor), Reason::kShapeMismatch);
}

TEST(ConvertTensorTest, OverflowingShapesAreRefused) {
  EXPECT_EQ(ViolationsOf(Tensor(v1::DTYPE_F32, {int64_t{1} << 32, int64_t{1} << 32}, 4)),
            (Found{{"tokens.shape", "got more elements than 64 bits count"}}));
  EXPECT_EQ(ViolationsOf(Tensor(v1::DTYPE_F32, {int64_t{1} << 31, int64_t{1} << 31}, 4)),
            (Found{{"tokens.shape", "got more bytes than 64 bits count"}}));
}

TEST(ConvertTensorTest, WrongNumberOfDimensions) {
  EXPECT_EQ(ViolationsOf(Tensor(v1::DTYPE_F32, {}, 4)),
            (Found{{"tokens.shape", "got 0 dimensions, need 2"}}));
  EXPECT_EQ(ViolationsOf(Tensor(v1::DTYPE_F32, std::vector<int64_t>(100000, -1), 4)),
            (Found{{"tokens.shape", "got 100000 dimensions, need 2"}}));
}

TEST(ConvertTensorTest, DtypeMustBeOneTheMethodTakes) {
  EXPECT_EQ(ViolationsOf(Tensor(v1::DTYPE_I32, {3, 5}, 60)),
            (Found{{"tokens.dtype", "got DTYPE_I32, need DTYPE_F32 or DTYPE_BF16"}}));
  EXPECT_EQ(ViolationsOf(Tensor(v1::DTYPE_UNSPECIFIED, {3, 5}, 60)),
            (Found{{"tokens.dtype", "got DTYPE_UNSPECIFIED, need DTYPE_F32 or DTYPE_BF16"}}));
  const v1::Tensor unknown = Tensor(static_cast<v1::DType>(99), {3, 5}, 60);
  EXPECT_EQ(ViolationsOf(unknown),
            (Found{{"tokens.dtype", "got value 99, need DTYPE_F32 or DTYPE_BF16"}}));
  EXPECT_EQ(ReasonOf(unknown), Reason::kDtypeUnsupported);
}

TEST(ConvertTensorTest, AllProblemsOfOneTensorAreReported) {
  const Found found = ViolationsOf(Tensor(v1::DTYPE_I64, {-2, -3}, 1));
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].path, "tokens.dtype");
  EXPECT_EQ(found[1].path, "tokens.shape[0]");
  EXPECT_EQ(found[2].path, "tokens.shape[1]");
}

TEST(ConvertTensorTest, BufferIsAPlaceOfTheShapesBytes) {
  v1::Tensor tensor = Tensor(v1::DTYPE_BF16, {3, 5}, 0);
  tensor.mutable_buffer()->set_buffer_id("b");
  tensor.mutable_buffer()->set_offset_bytes(std::numeric_limits<uint64_t>::max());
  Violations violations;
  const engine::TensorInput input = FromProto(&tensor, kRule, &violations);
  ASSERT_TRUE(violations.empty());
  EXPECT_EQ(input.bytes, 30);
  EXPECT_EQ(input.data, nullptr);
  EXPECT_EQ(input.buffer.buffer_id, "b");
  EXPECT_EQ(input.buffer.offset_bytes, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(input.buffer.path, "tokens.buffer");
  EXPECT_EQ(input.buffer.tensor, nullptr);
}

TEST(ConvertTensorTest, BufferWithoutOrWithTooLongIdIsReported) {
  v1::Tensor tensor = Tensor(v1::DTYPE_F32, {3, 5}, 0);
  tensor.mutable_buffer();
  ASSERT_EQ(ViolationsOf(tensor).size(), 1u);
  EXPECT_EQ(ViolationsOf(tensor)[0].path, "tokens.buffer.buffer_id");
  tensor.mutable_buffer()->set_buffer_id("shm\n" + std::string(1000, 'x'));
  const Found found = ViolationsOf(tensor);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_NE(found[0].description.find("shm\\n"), std::string::npos);
  EXPECT_LT(found[0].description.size(), 250u);
  EXPECT_EQ(ReasonOf(tensor), Reason::kBufferUnknown);
}

TEST(ConvertTensorTest, OverflowingShapeInABufferIsRefused) {
  v1::Tensor tensor = Tensor(v1::DTYPE_F32, {int64_t{1} << 31, int64_t{1} << 31}, 0);
  tensor.mutable_buffer()->set_buffer_id("b");
  EXPECT_EQ(ViolationsOf(tensor), (Found{{"tokens.shape", "got more bytes than 64 bits count"}}));
}

TEST(ConvertTensorTest, SpecTakesAnyDimensionsAndNoPayload) {
  const TensorRule rule{"tensor", -1, {DType::kF32}};
  Violations violations;
  v1::Tensor spec = Tensor(v1::DTYPE_F32, {2, 3, 4}, 0);
  spec.clear_data();
  EXPECT_EQ(CheckSpec(spec, rule, &violations), 96);
  spec.clear_shape();
  EXPECT_EQ(CheckSpec(spec, rule, &violations), 4);  // one element
  EXPECT_TRUE(violations.empty());
  spec = Tensor(v1::DTYPE_F32, std::vector<int64_t>(9, 1), 4);
  EXPECT_EQ(CheckSpec(spec, rule, &violations), -1);
  const Found found = DetailOf(violations.ToStatus("x")).violations;
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0], (FieldViolation{"tensor.shape", "got 9 dimensions, need at most 8"}));
  EXPECT_EQ(found[1].path, "tensor");
}

TEST(ConvertTensorTest, DimensionsOfTwoTensorsAreCompared) {
  engine::TensorInput a{.dtype = DType::kF32, .shape = {3, 5}, .path = "a"};
  engine::TensorInput b{.dtype = DType::kF32, .shape = {4, 5}, .path = "b"};
  Violations violations;
  CheckSameDimension(a, 1, b, 1, &violations);
  CheckSameDimension(a, 0, {}, 0, &violations);  // an absent one has been reported already
  EXPECT_TRUE(violations.empty());
  CheckSameDimension(a, 0, b, 0, &violations);
  EXPECT_EQ(DetailOf(violations.ToStatus("x")).violations,
            (Found{{"a.shape[0]", "got 3, need 4 as in b.shape[0]"}}));
}

TEST(ConvertTensorTest, OutputIsCopied) {
  engine::TensorOutput output{.dtype = DType::kI64, .shape = {1, 2}, .data = std::string(16, '\7')};
  v1::Tensor tensor;
  ToProto(output, &tensor);
  EXPECT_EQ(tensor.dtype(), v1::DTYPE_I64);
  EXPECT_EQ(tensor.shape_size(), 2);
  EXPECT_EQ(tensor.data(), output.data);
}

}  // namespace
}  // namespace expertd::rpc
