// Tensor messages from plain arrays and back. Values are little-endian, rows are dense.
#ifndef CLIENT_CPP_TENSOR_H_
#define CLIENT_CPP_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "expertd/v1/types.pb.h"

namespace expertd::client {

using Shape = std::vector<int64_t>;

// Bytes of one element; 0 for DTYPE_UNSPECIFIED.
int64_t ElementBytes(v1::DType dtype);
// "f32", "bf16", ...
std::string DTypeName(v1::DType dtype);
// From "f32", "BF16" or "DTYPE_BF16". Errors: INVALID_ARGUMENT with the names there are.
absl::StatusOr<v1::DType> ParseDType(const std::string& name);

// Product of the shape times the element size: what the payload must hold.
int64_t PayloadBytes(const v1::Tensor& tensor);

// Rounds to nearest even; `dtype` is F32, F16 or BF16.
// REQUIRES: values.size() is the product of `shape`, here and below.
v1::Tensor FloatTensor(v1::DType dtype, const Shape& shape, absl::Span<const float> values);
v1::Tensor Int32Tensor(const Shape& shape, absl::Span<const int32_t> values);
v1::Tensor Int64Tensor(const Shape& shape, absl::Span<const int64_t> values);

// A tensor whose payload is in a resident tensor of the rank it is sent to, from `offset_bytes` on.
v1::Tensor BufferTensor(v1::DType dtype, const Shape& shape, const std::string& buffer_id,
                        uint64_t offset_bytes = 0);
// Names the place of a result: SetBuffer("y", request.mutable_output_buffer()).
void SetBuffer(const std::string& buffer_id, v1::BufferRef* buffer);

// The values of an inline F32, F16 or BF16 tensor, widened exactly.
// Errors: INVALID_ARGUMENT for another dtype or a payload of the wrong size.
absl::StatusOr<std::vector<float>> ReadFloats(const v1::Tensor& tensor);
// The values of an inline I32 or I64 tensor.
absl::StatusOr<std::vector<int64_t>> ReadInts(const v1::Tensor& tensor);

// Conversions of single values, as bits.
uint16_t ToBf16(float value);
float FromBf16(uint16_t bits);
uint16_t ToF16(float value);
float FromF16(uint16_t bits);

}  // namespace expertd::client

#endif  // CLIENT_CPP_TENSOR_H_
