// Loops of plain_matmul.h: row operations that float_convert and activation vectorise.
#include "kernels/cpu/plain_matmul.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/activation.h"
#include "kernels/cpu/float_convert.h"

namespace expertd {
namespace {

// Rows that share one pass over the weight.
constexpr int64_t kRowBlock = 16;

const float* WeightRow(const ConstMatrix& weight, int64_t row, float* scratch) {
  const auto* bytes = static_cast<const std::byte*>(weight.data) +
                      row * weight.cols * static_cast<int64_t>(DTypeSize(weight.dtype));
  if (weight.dtype == DType::kF32) return reinterpret_cast<const float*>(bytes);
  RowToF32(weight.dtype, bytes, weight.cols, scratch);
  return scratch;
}

}  // namespace

void PlainMultiply(int64_t rows, const float* in, const ConstMatrix& weight, ByteArena& scratch,
                   float* out) {
  const int64_t k_size = weight.rows;
  const int64_t n = weight.cols;
  auto* converted = scratch.ReserveArray<float>(static_cast<size_t>(n));
  std::fill(out, out + rows * n, 0.0f);
  for (int64_t block = 0; block < rows; block += kRowBlock) {
    const int64_t end = std::min(block + kRowBlock, rows);
    for (int64_t k = 0; k < k_size; ++k) {
      const float* weight_row = WeightRow(weight, k, converted);
      for (int64_t r = block; r < end; ++r) {
        AddScaledRow(DType::kF32, weight_row, in[r * k_size + k], n, out + r * n);
      }
    }
  }
}

void PlainMultiplyTransposed(int64_t rows, const float* in, const ConstMatrix& weight,
                             ByteArena& scratch, float* out) {
  const int64_t n = weight.rows;
  const int64_t k_size = weight.cols;
  auto* converted = scratch.ReserveArray<float>(static_cast<size_t>(k_size));
  for (int64_t block = 0; block < rows; block += kRowBlock) {
    const int64_t end = std::min(block + kRowBlock, rows);
    for (int64_t i = 0; i < n; ++i) {
      const float* weight_row = WeightRow(weight, i, converted);
      for (int64_t r = block; r < end; ++r) {
        out[r * n + i] = Dot(in + r * k_size, weight_row, k_size);
      }
    }
  }
}

void PlainAddProduct(int64_t rows, int64_t m, int64_t n, const float* left, const float* right,
                     float* sum) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      AddScaledRow(DType::kF32, right + r * n, left[r * m + i], n, sum + i * n);
    }
  }
}

}  // namespace expertd
