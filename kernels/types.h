// Plain value types that every kernel shares: element types, tensor views, routing views.
//
// A view never owns memory and says nothing about where it lives: each interface states whether a
// pointer is host memory or memory of the Device it was created with.
#ifndef KERNELS_TYPES_H_
#define KERNELS_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace expertd {

enum class DType : uint8_t { kInvalid = 0, kF32, kF16, kBF16, kF8E4M3FN, kF8E5M2, kI32, kI64 };

// Bytes of one element; 0 for kInvalid.
constexpr size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
      return 1;
    case DType::kI64:
      return 8;
    case DType::kInvalid:
      return 0;
  }
  return 0;
}

// The public name, "DTYPE_BF16" and so on.
constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "DTYPE_F32";
    case DType::kF16:
      return "DTYPE_F16";
    case DType::kBF16:
      return "DTYPE_BF16";
    case DType::kF8E4M3FN:
      return "DTYPE_F8E4M3FN";
    case DType::kF8E5M2:
      return "DTYPE_F8E5M2";
    case DType::kI32:
      return "DTYPE_I32";
    case DType::kI64:
      return "DTYPE_I64";
    case DType::kInvalid:
      return "DTYPE_UNSPECIFIED";
  }
  return "DTYPE_UNSPECIFIED";
}

// A dense row-major [rows, cols] matrix that is only read. Vectors have rows == 1.
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::kInvalid;
  int64_t rows = 0;
  int64_t cols = 0;

  int64_t bytes() const { return rows * cols * static_cast<int64_t>(DTypeSize(dtype)); }
};

// The same, written.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kInvalid;
  int64_t rows = 0;
  int64_t cols = 0;

  int64_t bytes() const { return rows * cols * static_cast<int64_t>(DTypeSize(dtype)); }
  operator ConstMatrix() const { return {data, dtype, rows, cols}; }  // NOLINT: a view narrows
};

// Which experts each token goes to. ids: [tokens, top_k] of ids_dtype (kI32 or kI64), -1 for no
// route.
struct RoutingView {
  const void* ids = nullptr;
  DType ids_dtype = DType::kInvalid;
  int64_t tokens = 0;
  int64_t top_k = 0;
};

enum class Activation : uint8_t { kSilu = 0, kGelu, kRelu2 };  // gelu is the exact (erf) form
enum class Weighting : uint8_t { kLate = 0, kEarly };
enum class CapacityPolicy : uint8_t { kRefuse = 0, kDrop };

}  // namespace expertd

#endif  // KERNELS_TYPES_H_
