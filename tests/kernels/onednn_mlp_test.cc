// The row classes of oneDNN products; the experts themselves are in expert_mlp_test.cc.
#include "kernels/cpu/onednn_mlp.h"

#include <gtest/gtest.h>

namespace expertd {
namespace {

TEST(OnednnRowClass, IsNeverSmallerAndAtMostAnEighthMore) {
  int64_t classes = 0;
  for (int64_t rows = 1; rows <= 512; ++rows) {
    const int64_t padded = OnednnRowClass(rows);
    ASSERT_GE(padded, rows);
    ASSERT_EQ(OnednnRowClass(padded), padded);
    if (rows >= 128) {
      ASSERT_LE(padded * 8, rows * 9 + 8);
    }
    if (padded == rows) ++classes;
  }
  EXPECT_LE(classes, 32) << "each class is a primitive per product";
}

}  // namespace
}  // namespace expertd
