// Gemm: b is packed into panels of kPanel columns; a register tile of kTile rows walks each panel.
#include "client/expertctl/train/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace expertd::train {
namespace {

// Sixteen floats; narrower machines split it. Under -O2 plain loops are not vectorised reliably.
typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int64_t kLanes = 16;
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kTile = 6;
constexpr int64_t kDepth = 256;  // Rows of b per pass: a panel of kDepth x kPanel stays in L1.

struct TileArgs {
  const float* a;  // Element (row, k) at a[row * a_row + k * a_col].
  int64_t a_row;
  int64_t a_col;
  const float* panel;  // [depth, kPanel], packed.
  int64_t depth;
};

// sums: [kTile, kPanel] = a rows times the panel. Reads kTile rows of a. Inlined into one function
// per instruction set below.
__attribute__((always_inline)) inline void MultiplyTileBody(const TileArgs& args,
                                                            float* __restrict sums) {
  Vec low[kTile] = {};
  Vec high[kTile] = {};
  const float* a = args.a;
  const float* panel = args.panel;
  for (int64_t k = 0; k < args.depth; ++k, a += args.a_col, panel += kPanel) {
    const Vec left = *reinterpret_cast<const Vec*>(panel);
    const Vec right = *reinterpret_cast<const Vec*>(panel + kLanes);
#pragma GCC unroll 6
    for (int64_t r = 0; r < kTile; ++r) {
      const float scalar = a[r * args.a_row];
      low[r] += scalar * left;
      high[r] += scalar * right;
    }
  }
#pragma GCC unroll 6
  for (int64_t r = 0; r < kTile; ++r) {
    *reinterpret_cast<Vec*>(sums + r * kPanel) = low[r];
    *reinterpret_cast<Vec*>(sums + r * kPanel + kLanes) = high[r];
  }
}

__attribute__((target("avx512f"))) void MultiplyTileAvx512(const TileArgs& args, float* sums) {
  MultiplyTileBody(args, sums);
}
__attribute__((target("avx2,fma"))) void MultiplyTileAvx2(const TileArgs& args, float* sums) {
  MultiplyTileBody(args, sums);
}
void MultiplyTileBaseline(const TileArgs& args, float* sums) { MultiplyTileBody(args, sums); }

using MultiplyTileFunction = void (*)(const TileArgs&, float*);

MultiplyTileFunction ChooseMultiplyTile() {
  if (__builtin_cpu_supports("avx512f")) return MultiplyTileAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return MultiplyTileAvx2;
  return MultiplyTileBaseline;
}

// panels: [ceil(cols / kPanel)][depth][kPanel] of b's rows [first, first + depth), zero padded.
void PackPanels(const MatrixView& b, int64_t first, int64_t depth, float* panels) {
  for (int64_t j0 = 0; j0 < b.cols; j0 += kPanel) {
    const int64_t width = std::min(kPanel, b.cols - j0);
    for (int64_t k = 0; k < depth; ++k, panels += kPanel) {
      const float* from = b.data + (first + k) * b.row_stride + j0 * b.col_stride;
      if (b.col_stride == 1) {
        std::memcpy(panels, from, width * sizeof(float));
      } else {
        for (int64_t j = 0; j < width; ++j) panels[j] = from[j * b.col_stride];
      }
      std::fill(panels + width, panels + kPanel, 0.0f);
    }
  }
}

// Copies up to kTile rows of a into [kTile][depth], zero padded, for the ragged end of the rows.
void PackLastRows(const MatrixView& a, int64_t row, int64_t first, int64_t depth, float* packed) {
  std::fill(packed, packed + kTile * depth, 0.0f);
  for (int64_t r = 0; row + r < a.rows && r < kTile; ++r) {
    const float* from = a.data + (row + r) * a.row_stride + first * a.col_stride;
    for (int64_t k = 0; k < depth; ++k) packed[r * depth + k] = from[k * a.col_stride];
  }
}

// Adds the first [rows, cols] of a tile to c.
void AddTile(const float* sums, int64_t rows, int64_t cols, float* c, int64_t c_row) {
  for (int64_t r = 0; r < rows; ++r) {
    if (cols == kPanel) {
      Vec* to = reinterpret_cast<Vec*>(c + r * c_row);
      const Vec* from = reinterpret_cast<const Vec*>(sums + r * kPanel);
      to[0] += from[0];
      to[1] += from[1];
      continue;
    }
    for (int64_t j = 0; j < cols; ++j) c[r * c_row + j] += sums[r * kPanel + j];
  }
}

}  // namespace

void Gemm(const MatrixView& a, const MatrixView& b, float* c, Store store) {
  static const MultiplyTileFunction multiply_tile = ChooseMultiplyTile();
  if (store == Store::kOverwrite) std::fill(c, c + a.rows * b.cols, 0.0f);
  thread_local std::vector<float> panels;
  thread_local std::vector<float> last_rows;
  const int64_t panel_count = (b.cols + kPanel - 1) / kPanel;
  float sums[kTile * kPanel];
  for (int64_t first = 0; first < a.cols; first += kDepth) {
    const int64_t depth = std::min(kDepth, a.cols - first);
    panels.resize(panel_count * depth * kPanel);
    last_rows.resize(kTile * depth);
    PackPanels(b, first, depth, panels.data());
    for (int64_t p = 0; p < panel_count; ++p) {
      const float* panel = panels.data() + p * depth * kPanel;
      const int64_t width = std::min(kPanel, b.cols - p * kPanel);
      for (int64_t i = 0; i < a.rows; i += kTile) {
        TileArgs args{a.data + i * a.row_stride + first * a.col_stride, a.row_stride, a.col_stride,
                      panel, depth};
        if (i + kTile > a.rows) {
          if (p == 0) PackLastRows(a, i, first, depth, last_rows.data());
          args.a = last_rows.data();
          args.a_row = depth;
          args.a_col = 1;
        }
        multiply_tile(args, sums);
        AddTile(sums, std::min(kTile, a.rows - i), width, c + i * b.cols + p * kPanel, b.cols);
      }
    }
  }
}

}  // namespace expertd::train
