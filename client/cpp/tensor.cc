// Packing, unpacking and half-precision conversion.
#include "client/cpp/tensor.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::client {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are copied as they are");

v1::Tensor Header(v1::DType dtype, const Shape& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (int64_t size : shape) tensor.add_shape(size);
  return tensor;
}

template <typename T>
void SetPayload(absl::Span<const T> values, v1::Tensor* tensor) {
  tensor->set_data(values.data(), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Elements(const std::string& data) {
  std::vector<T> values(data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data.data(), values.size() * sizeof(T));
  return values;
}

absl::Status CheckPayload(const v1::Tensor& tensor) {
  const int64_t need = PayloadBytes(tensor);
  const auto got = static_cast<int64_t>(tensor.data().size());
  if (got == need) return absl::OkStatus();
  return Error(Reason::kPayloadSizeMismatch)
      .Text("tensor payload: got ", got, " bytes, need ", need);
}

absl::Status WrongDType(const v1::Tensor& tensor, std::string_view need) {
  return Error(Reason::kDtypeUnsupported)
      .Text("tensor: got ", DTypeName(tensor.dtype()), ", need ", need);
}

}  // namespace

int64_t ElementBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
    case v1::DTYPE_I32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_F8E4M3FN:
    case v1::DTYPE_F8E5M2:
      return 1;
    case v1::DTYPE_I64:
      return 8;
    default:
      return 0;
  }
}

std::string DTypeName(v1::DType dtype) {
  const std::string name = v1::DType_Name(dtype);
  return absl::AsciiStrToLower(absl::StripPrefix(name, "DTYPE_"));
}

absl::StatusOr<v1::DType> ParseDType(const std::string& name) {
  const std::string upper = absl::AsciiStrToUpper(name);
  v1::DType dtype;
  if (v1::DType_Parse(upper, &dtype) || v1::DType_Parse("DTYPE_" + upper, &dtype)) {
    if (dtype != v1::DTYPE_UNSPECIFIED) return dtype;
  }
  return Error(Reason::kDtypeUnsupported)
      .Text("dtype: got \"", name, "\", need f32, f16, bf16, f8e4m3fn, f8e5m2, i32 or i64");
}

int64_t PayloadBytes(const v1::Tensor& tensor) {
  int64_t bytes = ElementBytes(tensor.dtype());
  for (int64_t size : tensor.shape()) bytes *= size;
  return bytes;
}

v1::Tensor FloatTensor(v1::DType dtype, const Shape& shape, absl::Span<const float> values) {
  v1::Tensor tensor = Header(dtype, shape);
  if (dtype == v1::DTYPE_F32) {
    SetPayload(values, &tensor);
    return tensor;
  }
  std::vector<uint16_t> narrow(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    narrow[i] = dtype == v1::DTYPE_BF16 ? ToBf16(values[i]) : ToF16(values[i]);
  }
  SetPayload(absl::MakeConstSpan(narrow), &tensor);
  return tensor;
}

v1::Tensor Int32Tensor(const Shape& shape, absl::Span<const int32_t> values) {
  v1::Tensor tensor = Header(v1::DTYPE_I32, shape);
  SetPayload(values, &tensor);
  return tensor;
}

v1::Tensor Int64Tensor(const Shape& shape, absl::Span<const int64_t> values) {
  v1::Tensor tensor = Header(v1::DTYPE_I64, shape);
  SetPayload(values, &tensor);
  return tensor;
}

v1::Tensor BufferTensor(v1::DType dtype, const Shape& shape, const std::string& buffer_id,
                        uint64_t offset_bytes) {
  v1::Tensor tensor = Header(dtype, shape);
  SetBuffer(buffer_id, tensor.mutable_buffer());
  tensor.mutable_buffer()->set_offset_bytes(offset_bytes);
  return tensor;
}

void SetBuffer(const std::string& buffer_id, v1::BufferRef* buffer) {
  buffer->set_buffer_id(buffer_id);
}

absl::StatusOr<std::vector<float>> ReadFloats(const v1::Tensor& tensor) {
  const v1::DType dtype = tensor.dtype();
  if (dtype != v1::DTYPE_F32 && dtype != v1::DTYPE_BF16 && dtype != v1::DTYPE_F16) {
    return WrongDType(tensor, "f32, f16 or bf16");
  }
  RETURN_IF_ERROR(CheckPayload(tensor));
  if (dtype == v1::DTYPE_F32) return Elements<float>(tensor.data());
  const std::vector<uint16_t> narrow = Elements<uint16_t>(tensor.data());
  std::vector<float> values(narrow.size());
  for (size_t i = 0; i < narrow.size(); ++i) {
    values[i] = dtype == v1::DTYPE_BF16 ? FromBf16(narrow[i]) : FromF16(narrow[i]);
  }
  return values;
}

absl::StatusOr<std::vector<int64_t>> ReadInts(const v1::Tensor& tensor) {
  if (tensor.dtype() != v1::DTYPE_I32 && tensor.dtype() != v1::DTYPE_I64) {
    return WrongDType(tensor, "i32 or i64");
  }
  RETURN_IF_ERROR(CheckPayload(tensor));
  if (tensor.dtype() == v1::DTYPE_I64) return Elements<int64_t>(tensor.data());
  const std::vector<int32_t> narrow = Elements<int32_t>(tensor.data());
  return std::vector<int64_t>(narrow.begin(), narrow.end());
}

uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);  // Stays a NaN.
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t ToF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;  // Rounds past the largest finite value.
  if (magnitude < 0x1p-14f) {                       // Subnormal: multiples of 2^-24.
    return sign | static_cast<uint16_t>(std::nearbyintf(magnitude * 0x1p24f));
  }
  const uint32_t rebased = (bits & 0x7fffffff) - (112u << 23);
  return sign | static_cast<uint16_t>((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13);
}

float FromF16(uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 0x1f;
  const auto fraction = static_cast<float>(bits & 0x3ff);
  if (exponent == 0) return sign * fraction * 0x1p-24f;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * std::ldexp(1.0f + fraction * 0x1p-10f, exponent - 15);
}

}  // namespace expertd::client
