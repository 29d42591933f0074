// Gemm against a double loop, over ragged, empty and transposed shapes.
#include "client/expertctl/train/gemm.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "tests/client/train/finite_difference.h"

namespace expertd::train {
namespace {

float At(const MatrixView& m, int64_t i, int64_t j) {
  return m.data[i * m.row_stride + j * m.col_stride];
}

void ExpectProduct(const MatrixView& a, const MatrixView& b, Store store) {
  const std::vector<float> before = RandomVector(a.rows * b.cols, 3);
  std::vector<float> c = before;
  Gemm(a, b, c.data(), store);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < b.cols; ++j) {
      double want = store == Store::kAdd ? before[i * b.cols + j] : 0.0;
      for (int64_t k = 0; k < a.cols; ++k) {
        want += static_cast<double>(At(a, i, k)) * At(b, k, j);
      }
      // Terms are below 1 in size: each of the a.cols + 1 sums rounds by at most 2^-24 of a
      // partial sum no larger than a.cols + 1.
      const double terms = static_cast<double>(a.cols) + 1;
      ASSERT_NEAR(c[i * b.cols + j], want, terms * terms * 0x1p-24) << i << "," << j;
    }
  }
}

class GemmTest : public testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t>> {};

TEST_P(GemmTest, MatchesDoubleLoop) {
  const auto [m, n, k] = GetParam();
  const std::vector<float> a = RandomVector(m * k, 1);
  const std::vector<float> b = RandomVector(k * n, 2);
  for (const Store store : {Store::kOverwrite, Store::kAdd}) {
    ExpectProduct(RowMajor(a.data(), m, k), RowMajor(b.data(), k, n), store);
    ExpectProduct(Transposed(RowMajor(a.data(), k, m)), RowMajor(b.data(), k, n), store);
    ExpectProduct(RowMajor(a.data(), m, k), Transposed(RowMajor(b.data(), n, k)), store);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         testing::Combine(testing::Values(0, 1, 5, 6, 7, 13),
                                          testing::Values(0, 1, 31, 32, 33, 65),
                                          testing::Values(0, 1, 17, 256, 257)));

TEST(GemmDeterminismTest, EqualInputsGiveEqualBits) {
  const std::vector<float> a = RandomVector(50 * 70, 1);
  const std::vector<float> b = RandomVector(70 * 40, 2);
  std::vector<float> first(50 * 40);
  std::vector<float> second(50 * 40);
  Gemm(RowMajor(a.data(), 50, 70), RowMajor(b.data(), 70, 40), first.data(), Store::kOverwrite);
  Gemm(RowMajor(a.data(), 50, 70), RowMajor(b.data(), 70, 40), second.data(), Store::kOverwrite);
  EXPECT_EQ(first, second);
}

}  // namespace
}  // namespace expertd::train
