// Single-threaded f32 matrix multiplication over strided views: the trainer's only heavy kernel.
//
// Any thread may call; packing space is thread local. The accumulation order depends only on the
// shapes, so equal inputs give equal bits on one machine.
#ifndef CLIENT_EXPERTCTL_TRAIN_GEMM_H_
#define CLIENT_EXPERTCTL_TRAIN_GEMM_H_

#include <cstddef>
#include <cstdint>

namespace expertd::train {

// A read-only matrix [rows, cols], f32; element (i, j) is data[i * row_stride + j * col_stride].
struct MatrixView {
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// Dense row-major data [rows, cols].
inline MatrixView RowMajor(const float* data, int64_t rows, int64_t cols) {
  return {data, rows, cols, cols, 1};
}

inline MatrixView Transposed(const MatrixView& m) {
  return {m.data, m.cols, m.rows, m.col_stride, m.row_stride};
}

enum class Store { kOverwrite, kAdd };

// c = a @ b, or c += a @ b. c: [a.rows, b.cols], dense row-major, overlapping neither input.
// REQUIRES: a.cols == b.rows. Empty dimensions are legal: with a.cols == 0 kOverwrite writes zeros.
void Gemm(const MatrixView& a, const MatrixView& b, float* c, Store store);

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_GEMM_H_
