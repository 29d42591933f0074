// The window's layout: parts do not overlap, sizes grow as they should, sizes past 64 bits.
#include "base/window_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"

namespace expertd {
namespace {

GroupSizes Deepseek(int64_t ranks) {
  return {.ranks = ranks,
          .max_tokens_per_rank = 8192,
          .max_hidden = 7168,
          .max_top_k = 8,
          .max_experts = 256,
          .token_bytes = 2};
}

// {begin, size} of every part, by what stands in the header's comments.
std::vector<std::pair<int64_t, int64_t>> PartsOf(const WindowLayout& w) {
  const int64_t others = w.world - 1;
  const int64_t slices = others * WindowLayout::kSumSlices;
  std::vector<std::pair<int64_t, int64_t>> parts = {
      {w.arrivals, w.world * 8},
      {w.ids, w.world * w.cells * 16},
      {w.sum_flags, slices * 8},
      {w.sum_slices, slices * WindowLayout::kSumSliceBytes},
      {w.scatter_flags, others * w.rows * 8},
      {w.scatter_values, others * w.rows * w.top_k * 4},
      {w.scatter_rows, others * w.rows * w.pitch},
      {w.gather_flags, others * w.rows * 8},
      {w.gather_values, others * w.rows * w.top_k * 4},
      {w.gather_rows, others * w.rows * w.pitch}};
  std::sort(parts.begin(), parts.end());
  return parts;
}

TEST(WindowLayoutTest, PartsAreAlignedAndDoNotOverlap) {
  for (int64_t ranks : {1, 2, 3, 8, 72}) {
    for (int64_t tokens : {0, 1, 127, 8192}) {
      GroupSizes sizes = Deepseek(ranks);
      sizes.max_tokens_per_rank = tokens;
      sizes.max_hidden = 37;
      const auto window = PlanWindow(sizes);
      ASSERT_TRUE(window.ok()) << window.status();
      EXPECT_EQ(window->pitch, 80);
      int64_t end = 0;
      for (const auto& [begin, size] : PartsOf(*window)) {
        EXPECT_EQ(begin % 256, 0);
        EXPECT_GE(begin, end);
        end = begin + size;
      }
      EXPECT_GE(window->bytes, end);
    }
  }
}

TEST(WindowLayoutTest, AllIdsOfARankFitItsCells) {
  for (int64_t tokens : {0, 1, 5, 1000}) {
    GroupSizes sizes = Deepseek(2);
    sizes.max_tokens_per_rank = tokens;
    sizes.max_top_k = 3;
    const WindowLayout window = *PlanWindow(sizes);
    EXPECT_GE((window.cells - WindowLayout::kHeaderCells) * WindowLayout::kCellIds, tokens * 3);
  }
}

// Two rows a token and other rank, values, flags; ids; the sum's slices.
TEST(WindowLayoutTest, SizeIsWhatAPersonWouldAddUp) {
  const WindowLayout window = *PlanWindow(Deepseek(2));
  const int64_t rows = 8192 * (14336 + 8 + 8 * 4);
  const int64_t ids = 2 * (8192 * 8 / 4 + 3) * 16;
  const int64_t sums = 256 * (4096 + 8);
  EXPECT_NEAR(static_cast<double>(window.bytes), static_cast<double>(2 * rows + ids + sums + 16),
              10 * 256);
}

TEST(WindowLayoutTest, EachOtherRankHasAPartOfItsOwn) {
  for (int64_t world : {2, 3, 8, 72}) {
    for (int64_t owner = 0; owner < world; ++owner) {
      std::set<int64_t> parts;
      for (int64_t source = 0; source < world; ++source) {
        if (source == owner) continue;
        const int64_t part = WindowPart(owner, source);
        EXPECT_GE(part, 0);
        EXPECT_LT(part, world - 1);
        parts.insert(part);
      }
      EXPECT_EQ(parts.size(), static_cast<size_t>(world - 1));
    }
  }
}

TEST(WindowLayoutTest, SizesPastSixtyFourBitsAreRefused) {
  for (int field : {0, 1, 2}) {
    GroupSizes sizes = Deepseek(8);
    int64_t* const fields[] = {&sizes.max_tokens_per_rank, &sizes.max_hidden, &sizes.max_top_k};
    *fields[field] = std::numeric_limits<int64_t>::max() / 2;
    EXPECT_TRUE(HasReason(PlanWindow(sizes).status(), Reason::kConfigInvalid));
  }
}

}  // namespace
}  // namespace expertd
