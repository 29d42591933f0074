// Plans and tables of the sm90 products, and that tiles cover every output once: on the CPU.
#include "kernels/mlp/sm90_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <tuple>

#include "kernels/mlp/sm90_tiles.h"

namespace expertd::sm90 {
namespace {

using testing::HasSubstr;

struct Segments {
  explicit Segments(std::vector<int64_t> c, int64_t alignment) : counts(std::move(c)) {
    for (const int64_t count : counts) {
      padded.push_back((count + alignment - 1) / alignment * alignment);
    }
  }
  ExpertSegments view() const {
    return {&counts, &padded, std::accumulate(padded.begin(), padded.end(), int64_t{0})};
  }
  std::vector<int64_t> counts;
  std::vector<int64_t> padded;
};

MlpConfig Layer(DType token, DType weight, int64_t hidden, int64_t inner) {
  return {.local_experts = 4,
          .hidden = hidden,
          .intermediate = inner,
          .token_dtype = token,
          .weight_dtype = weight};
}

TEST(Sm90Plan, RefusesWhatTheProductsCannotMultiplyAndSaysWhy) {
  EXPECT_EQ(Refusal(Layer(DType::kBF16, DType::kBF16, 8, 16)), "");
  EXPECT_EQ(Refusal(Layer(DType::kF16, DType::kF16, 7168, 2048)), "");
  EXPECT_THAT(Refusal(Layer(DType::kF32, DType::kF32, 8, 8)), HasSubstr("DTYPE_F32"));
  EXPECT_THAT(Refusal(Layer(DType::kBF16, DType::kF16, 8, 8)), HasSubstr("one dtype"));
  EXPECT_THAT(Refusal(Layer(DType::kBF16, DType::kBF16, 12, 8)), HasSubstr("12"));
  EXPECT_THAT(Refusal(Layer(DType::kBF16, DType::kBF16, 8, 9)), HasSubstr("9"));
}

TEST(Sm90Plan, ServesAlignedMatricesOfFewerThan2To31Rows) {
  Segments segments({5}, 8);
  alignas(16) char memory[32];
  EXPECT_TRUE(CanServe(segments.view(), {memory, nullptr, memory + 16}));
  EXPECT_FALSE(CanServe(segments.view(), {memory, memory + 2}));
  Segments many({int64_t{1} << 31}, 1);
  EXPECT_FALSE(CanServe(many.view(), {memory}));
}

TEST(Sm90Plan, FewRowsGetNarrowTilesInForward) {
  const auto kind = [](Product product, std::vector<int64_t> counts) {
    return PlanFor(product, Segments(std::move(counts), 1).view()).kind;
  };
  for (const Product product : {Product::kInner, Product::kOuter}) {
    EXPECT_EQ(kind(product, {0, 64, 0, 3}), TileKind::kNarrow);
    EXPECT_EQ(kind(product, {65}), TileKind::kWide);
    EXPECT_EQ(kind(product, {300, 1, 0}), TileKind::kWide);
  }
  EXPECT_EQ(kind(Product::kGradTokens, {3}), TileKind::kWide);
  EXPECT_EQ(kind(Product::kGradInner, {3}), TileKind::kWide);
}

TEST(Sm90Plan, EveryPlanIsOfAKindThatTheProductHas) {
  for (int product = 0; product <= static_cast<int>(Product::kGradWeights); ++product) {
    for (const int64_t count : {1, 64, 65, 4096}) {
      const auto which = static_cast<Product>(product);
      const Plan plan = PlanFor(which, Segments({count, 0}, 8).view());
      EXPECT_TRUE(HasKind(which, plan.kind)) << product << " " << ToString(plan);
      EXPECT_EQ(plan.cluster, plan.kind == TileKind::kNarrow ? 1 : 2);
    }
  }
  EXPECT_THAT(ToString(Plan{}), HasSubstr("wide 128x256"));
}

TEST(Sm90Plan, TablesHoldEveryExpertOnce) {
  std::vector<int64_t> counts(kMostExperts * 2 + 3, 2);
  counts[1] = 0;
  const Segments segments(counts, 4);
  const std::vector<ExpertTable> tables = MakeTables(segments.view());
  ASSERT_EQ(tables.size(), 3u);
  int64_t begin = 0;
  for (int j = 0; j < static_cast<int>(counts.size()); ++j) {
    const ExpertTable& table = tables[static_cast<size_t>(j / kMostExperts)];
    const int at = j - table.first;
    ASSERT_LT(at, table.experts);
    EXPECT_EQ(table.begin[at], begin);
    EXPECT_EQ(table.count[at], counts[static_cast<size_t>(j)]);
    begin += segments.padded[static_cast<size_t>(j)];
  }
  EXPECT_EQ(tables[2].experts, 3);
  EXPECT_TRUE(HasRows(tables[0]));
  EXPECT_FALSE(HasRows(MakeTables(Segments({0, 0}, 4).view())[0]));
}

TEST(Sm90Plan, PadsOutsideTilesAreThoseThatNoTileReaches) {
  const Segments segments({3, 0, 129, 512}, 512);
  const std::vector<RowRange> pads = PadsOutsideTiles(segments.view(), 64);
  ASSERT_EQ(pads.size(), 2u);
  EXPECT_EQ(pads[0].begin, 64);
  EXPECT_EQ(pads[0].rows, 448);
  EXPECT_EQ(pads[1].begin, 512 + 192);
  EXPECT_EQ(pads[1].rows, 320);
  EXPECT_TRUE(PadsOutsideTiles(Segments({3, 200}, 128).view(), 128).empty());
}

// What every block of `clusters` clusters makes: (expert, row tile, column tile) -> times.
using Made = std::map<std::tuple<int, int, int>, int>;
Made WalkAll(const ExpertTable& table, const TileGrid& grid, int clusters) {
  Made made;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    std::vector<TileWalk> walks;
    for (int rank = 0; rank < grid.cluster; ++rank) walks.emplace_back(grid, rank);
    for (int unit = cluster;; unit += clusters) {
      std::vector<Tile> tiles;
      for (TileWalk& walk : walks) tiles.push_back(walk.Find(table, unit));
      if (tiles[0].expert < 0) break;
      for (const Tile& tile : tiles) {
        EXPECT_EQ(tile.expert, tiles[0].expert);
        EXPECT_EQ(tile.share, tiles[0].share);
        if (tile.share == Share::kRight) {
          EXPECT_EQ(tile.column, tiles[0].column);
        }
        if (tile.share == Share::kLeft) {
          EXPECT_EQ(tile.row, tiles[0].row);
        }
        // The last pair of an odd number of columns has a tile outside, which is never stored.
        if (tile.column < grid.columns) ++made[{tile.expert, tile.row, tile.column}];
      }
    }
  }
  return made;
}

TEST(Sm90Tiles, EveryTileIsMadeOnceByPairsThatShareAnOperand) {
  const Segments segments({0, 1, 128, 129, 1500, 3000, 0, 384}, 8);
  for (const int cluster : {1, 2}) {
    for (const int columns : {1, 2, 7, 16}) {
      for (const int fixed_rows : {0, 1, 5, 17, 32}) {
        for (const int clusters : {1, 5, 66}) {
          const TileGrid grid = {
              .tile_rows = 128, .columns = columns, .fixed_rows = fixed_rows, .cluster = cluster};
          const ExpertTable table = MakeTables(segments.view())[0];
          const Made made = WalkAll(table, grid, clusters);
          size_t tiles = 0;
          for (int j = 0; j < table.experts; ++j) {
            const int rows = RowTiles(grid, table.count[j]);
            tiles += static_cast<size_t>(rows * columns);
            for (int row = 0; row < rows; ++row) {
              for (int column = 0; column < columns; ++column) {
                const auto found = made.find({j, row, column});
                ASSERT_TRUE(found != made.end() && found->second == 1)
                    << "expert " << j << " tile " << row << ", " << column << " cluster "
                    << cluster;
              }
            }
          }
          EXPECT_EQ(made.size(), tiles);
        }
      }
    }
  }
}

}  // namespace
}  // namespace expertd::sm90
