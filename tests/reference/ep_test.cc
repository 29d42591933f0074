// Tests of the reference EP operations: one routing worked by hand, then identities at random.
#include "tests/reference/ep.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tests/reference/matrix.h"
#include "tests/reference/test_random.h"

namespace expertd::reference {
namespace {

using Int64s = std::vector<int64_t>;
using Doubles = std::vector<double>;

// The case worked by hand: 2 ranks, 4 experts (rank 0: 0 and 1, rank 1: 2 and 3), K = 2, A = 2.
//
//   rank 0, token 0: [2, 0]    expert 0: (0,0,k1) (0,1,k0) (1,0,k0)   c = 3, p = 4
//   rank 0, token 1: [0, -1]   expert 1: (1,0,k1)                     c = 1, p = 2
//   rank 0, token 2: [3, 2]    expert 2: (0,0,k0) (0,2,k1) (1,1,k0)   c = 3, p = 4
//   rank 1, token 0: [0, 1]    expert 3: (0,2,k0) (1,1,k1)            c = 2, p = 2
//   rank 1, token 1: [2, 3]    so both ranks have base = [0, 4] and total = 6
const Routing kHandIds = {{2, 0, 0, -1, 3, 2}, {0, 1, 2, 3}};
const RouteSource kPad;

EpConfig HandConfig() { return {.num_experts = 4, .num_ranks = 2, .top_k = 2, .alignment = 2}; }

// Tokens and weights that name their place, hidden = 1: x = 10 * (rank + 1) + token, and the weight
// of route k is x * 10 + k. The weight of the -1 route is NaN: nothing may read it.
const PerRank kHandX = {{10, 11, 12}, {20, 21}};
const PerRank kHandWeights = {{100, 101, 110, kNan, 120, 121}, {200, 201, 210, 211}};

TEST(EpHandTest, PrepareCountsPadsAndPlaces) {
  const Layout layout = Prepare(HandConfig(), kHandIds);

  EXPECT_FALSE(layout.refused);
  EXPECT_EQ(layout.ranks[0].tokens_per_expert, (Int64s{3, 1}));
  EXPECT_EQ(layout.ranks[1].tokens_per_expert, (Int64s{3, 2}));
  EXPECT_EQ(layout.ranks[0].padded_per_expert, (Int64s{4, 2}));
  EXPECT_EQ(layout.ranks[1].padded_per_expert, (Int64s{4, 2}));
  EXPECT_EQ(layout.ranks[0].base, (Int64s{0, 4}));
  EXPECT_EQ(layout.ranks[0].total, 6);
  EXPECT_EQ(layout.ranks[0].dropped_per_expert, (Int64s{0, 0}));
  EXPECT_EQ(layout.ranks[0].sources,
            (std::vector<RouteSource>{{0, 0, 1}, {0, 1, 0}, {1, 0, 0}, kPad, {1, 0, 1}, kPad}));
  EXPECT_EQ(
      layout.ranks[1].sources,
      (std::vector<RouteSource>{{0, 0, 0}, {0, 2, 1}, {1, 1, 0}, kPad, {0, 2, 0}, {1, 1, 1}}));
  EXPECT_EQ(layout.Target(0, 2, 0), (RouteTarget{RouteState::kPlaced, 1, 4}));
  EXPECT_EQ(layout.Target(0, 1, 1), (RouteTarget{RouteState::kNone, -1, -1}));
}

TEST(EpHandTest, DispatchCopiesRowsAndWeightsAndZeroesPads) {
  const Layout layout = Prepare(HandConfig(), kHandIds);
  const Received received = Dispatch(layout, 1, kHandX, kHandWeights);

  EXPECT_EQ(received.x, (PerRank{{10, 11, 20, 0, 20, 0}, {10, 12, 21, 0, 12, 21}}));
  EXPECT_EQ(received.weights, (PerRank{{101, 110, 200, 0, 201, 0}, {100, 121, 210, 0, 120, 211}}));
}

// Slot rows that hold powers of two show which of them a sum contains; what may not be read is NaN,
// two rows past total included.
const PerRank kHandZ = {{1, 2, 4, kNan, 8, kNan, kNan, kNan},
                        {16, 32, 64, kNan, 128, 256, kNan, kNan}};

TEST(EpHandTest, CombineSumsPlacedRoutes) {
  const Layout layout = Prepare(HandConfig(), kHandIds);

  // (0,0): 16 + 1; (0,1): 2; (0,2): 128 + 32; (1,0): 4 + 8; (1,1): 64 + 256.
  EXPECT_EQ(Combine(layout, 1, kHandZ), (PerRank{{17, 2, 160}, {12, 320}}));
}

TEST(EpHandTest, CombineMultipliesBySlotWeights) {
  const Layout layout = Prepare(HandConfig(), kHandIds);
  const PerRank weights = {{3, 5, 7, kNan, 2, kNan}, {1, 4, 0, kNan, 6, 9}};

  // (0,0): 1*16 + 3*1; (0,1): 5*2; (0,2): 6*128 + 4*32; (1,0): 7*4 + 2*8; (1,1): 0*64 + 9*256.
  EXPECT_EQ(Combine(layout, 1, kHandZ, &weights), (PerRank{{19, 10, 896}, {44, 2304}}));
}

TEST(EpHandTest, DispatchBackwardSumsRowsAndPicksWeightGradients) {
  const Layout layout = Prepare(HandConfig(), kHandIds);
  const DispatchGradients gradients = DispatchBackward(layout, 1, kHandZ, kHandZ);

  EXPECT_EQ(gradients.x, (PerRank{{17, 2, 160}, {12, 320}}));
  EXPECT_EQ(gradients.weights, (PerRank{{16, 1, 2, 0, 128, 32}, {4, 8, 64, 256}}));
}

TEST(EpHandTest, CombineBackwardCopiesTokenGradientsToRows) {
  const Layout layout = Prepare(HandConfig(), kHandIds);
  const PerRank weights = {{3, 5, 7, kNan, 2, kNan}, {1, 4, 0, kNan, 6, 9}};

  EXPECT_EQ(CombineBackward(layout, 1, kHandX),
            (PerRank{{10, 11, 20, 0, 20, 0}, {10, 12, 21, 0, 12, 21}}));
  EXPECT_EQ(CombineBackward(layout, 1, kHandX, &weights),
            (PerRank{{30, 55, 140, 0, 40, 0}, {10, 48, 0, 0, 72, 189}}));
}

TEST(EpHandTest, RefuseTakesExactlyTheCapacityAndNoMore) {
  EpConfig config = HandConfig();
  config.capacity = 6;  // both totals are 6
  EXPECT_FALSE(Prepare(config, kHandIds).refused);
  config.capacity = 5;
  const Layout refused = Prepare(config, kHandIds);
  EXPECT_TRUE(refused.refused);
  EXPECT_EQ(refused.ranks[0].total, 6);
}

TEST(EpHandTest, RefuseIsForTheGroupWhenOneRankIsOver) {
  EpConfig config = HandConfig();
  config.capacity = 4;
  // Rank 0 receives 5 rows for expert 0, padded to 6; rank 1 receives nothing.
  EXPECT_TRUE(Prepare(config, {{0, -1, 0, -1, 0, -1}, {0, -1, 0, -1}}).refused);
}

TEST(EpHandTest, DropKeepsTheFirstRowsOfEachExpert) {
  EpConfig config = HandConfig();
  config.policy = CapacityPolicy::kDrop;
  config.capacity = 7;  // floor(7 / (2 * 2)) * 2 = 2 rows per expert
  const Layout layout = Prepare(config, kHandIds);

  // Experts 0 and 2 have three routes and lose the last: (1,0,k0) and (1,1,k0).
  EXPECT_FALSE(layout.refused);
  EXPECT_EQ(layout.ranks[0].tokens_per_expert, (Int64s{2, 1}));
  EXPECT_EQ(layout.ranks[0].dropped_per_expert, (Int64s{1, 0}));
  EXPECT_EQ(layout.ranks[1].dropped_per_expert, (Int64s{1, 0}));
  EXPECT_EQ(layout.ranks[0].base, (Int64s{0, 2}));
  EXPECT_EQ(layout.ranks[0].sources,
            (std::vector<RouteSource>{{0, 0, 1}, {0, 1, 0}, {1, 0, 1}, kPad}));
  EXPECT_EQ(layout.Target(1, 0, 0), (RouteTarget{RouteState::kDropped, 0, -1}));

  // What was dropped adds nothing and has zero gradients: (1,0) keeps only its row 2 on rank 0.
  const PerRank z = {{1, 2, 4, kNan}, {8, 16, 32, 64}};
  EXPECT_EQ(Combine(layout, 1, z), (PerRank{{9, 2, 48}, {4, 64}}));
  EXPECT_EQ(DispatchBackward(layout, 1, z, z).weights,
            (PerRank{{8, 1, 2, 0, 32, 16}, {0, 4, 0, 64}}));
}

TEST(EpHandTest, DropWithTooLittleCapacityForOneAlignedBlockDropsAll) {
  EpConfig config = HandConfig();
  config.policy = CapacityPolicy::kDrop;
  config.capacity = 3;  // floor(3 / 4) * 2 = 0 rows per expert
  const Layout layout = Prepare(config, kHandIds);

  EXPECT_EQ(layout.ranks[0].total, 0);
  EXPECT_EQ(layout.ranks[1].dropped_per_expert, (Int64s{3, 2}));
  EXPECT_EQ(Combine(layout, 1, {{}, {}}), (PerRank{{0, 0, 0}, {0, 0}}));
}

TEST(EpHandTest, NoTokensAnywhere) {
  const Layout layout = Prepare(HandConfig(), {{}, {}});

  EXPECT_EQ(layout.ranks[0].padded_per_expert, (Int64s{0, 0}));
  EXPECT_EQ(layout.ranks[1].total, 0);
  EXPECT_EQ(Dispatch(layout, 3, {{}, {}}, {{}, {}}).x, (PerRank{{}, {}}));
  EXPECT_EQ(Combine(layout, 3, {{}, {}}), (PerRank{{}, {}}));
}

// Random routings over (ranks, alignment, capacity; the policy is DROP wherever there is one).
class EpRandomTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t>> {
 protected:
  static constexpr int64_t kHidden = 3;

  void SetUp() override {
    const auto [ranks, alignment, capacity] = GetParam();
    config_ = {.num_experts = 6,
               .num_ranks = ranks,
               .top_k = 3,
               .alignment = alignment,
               .capacity = capacity,
               .policy = CapacityPolicy::kDrop};
    for (int64_t rank = 0; rank < ranks; ++rank) tokens_.push_back(random_.Integer(1, 6));
    if (ranks > 1) tokens_[1] = 0;
    layout_ = Prepare(config_, random_.Ids(tokens_, config_.top_k, config_.num_experts));
  }

  Doubles PlacedRoutes(int64_t rank) const {  // per token
    Doubles counts;
    for (int64_t token = 0; token < tokens_[rank]; ++token) {
      double placed = 0;
      for (int64_t k = 0; k < config_.top_k; ++k) {
        if (layout_.Target(rank, token, k).state == RouteState::kPlaced) ++placed;
      }
      counts.push_back(placed);
    }
    return counts;
  }

  // Expects actual[t] = (placed routes of t) * rows[t] on every rank.
  void ExpectTimesPlacedRoutes(const PerRank& actual, const PerRank& rows) const {
    for (int64_t rank = 0; rank < config_.num_ranks; ++rank) {
      const Doubles placed = PlacedRoutes(rank);
      Doubles expected = rows[rank];
      for (size_t i = 0; i < expected.size(); ++i) expected[i] *= placed[i / kHidden];
      ExpectAllNear(actual[rank], expected);
    }
  }

  PerRank SlotRows(int64_t columns) {
    Int64s totals;
    for (const RankLayout& rank : layout_.ranks) totals.push_back(rank.total);
    return random_.Rows(totals, columns);
  }

  TestRandom random_;
  EpConfig config_;
  Int64s tokens_;
  Layout layout_;
};

TEST_P(EpRandomTest, SourcesAndTargetsAreInverse) {
  SCOPED_TRACE(random_.Trace());
  int64_t filled = 0;
  for (int64_t rank = 0; rank < config_.num_ranks; ++rank) {
    const RankLayout& layout = layout_.ranks[rank];
    ASSERT_EQ(static_cast<int64_t>(layout.sources.size()), layout.total);
    if (config_.capacity > 0) {
      EXPECT_LE(layout.total, config_.capacity);
    }
    for (int64_t row = 0; row < layout.total; ++row) {
      const RouteSource& source = layout.sources[row];
      if (source.IsPad()) continue;
      ++filled;
      EXPECT_EQ(layout_.Target(source.rank, source.token, source.k),
                (RouteTarget{RouteState::kPlaced, rank, row}));
    }
  }
  double placed = 0;
  for (int64_t rank = 0; rank < config_.num_ranks; ++rank) {
    for (double count : PlacedRoutes(rank)) placed += count;
  }
  EXPECT_EQ(static_cast<double>(filled), placed);
}

TEST_P(EpRandomTest, IdentityExpertsGiveTokenTimesPlacedRoutes) {
  SCOPED_TRACE(random_.Trace());
  const PerRank x = random_.Rows(tokens_, kHidden);
  const Received received = Dispatch(layout_, kHidden, x, random_.Rows(tokens_, config_.top_k));
  ExpectTimesPlacedRoutes(Combine(layout_, kHidden, received.x), x);
}

TEST_P(EpRandomTest, CombineBackwardThenDispatchBackwardGivesGradientTimesPlacedRoutes) {
  SCOPED_TRACE(random_.Trace());
  const PerRank g = random_.Rows(tokens_, kHidden);
  const PerRank g_z = CombineBackward(layout_, kHidden, g);
  ExpectTimesPlacedRoutes(DispatchBackward(layout_, kHidden, g_z, SlotRows(1)).x, g);
}

TEST_P(EpRandomTest, CombineBackwardIsTheAdjointOfCombine) {
  SCOPED_TRACE(random_.Trace());
  PerRank z = SlotRows(kHidden);
  const PerRank g = random_.Rows(tokens_, kHidden);
  const PerRank weights = SlotRows(1);
  EXPECT_NEAR(Inner(Combine(layout_, kHidden, z), g),
              Inner(z, CombineBackward(layout_, kHidden, g)), 1e-12);
  EXPECT_NEAR(Inner(Combine(layout_, kHidden, z, &weights), g),
              Inner(z, CombineBackward(layout_, kHidden, g, &weights)), 1e-12);
}

TEST_P(EpRandomTest, DispatchBackwardIsTheAdjointOfDispatch) {
  SCOPED_TRACE(random_.Trace());
  const PerRank x = random_.Rows(tokens_, kHidden);
  const PerRank weights = random_.Rows(tokens_, config_.top_k);
  const PerRank g = SlotRows(kHidden);
  const PerRank gw = SlotRows(1);
  const Received received = Dispatch(layout_, kHidden, x, weights);
  const DispatchGradients gradients = DispatchBackward(layout_, kHidden, g, gw);
  EXPECT_NEAR(Inner(received.x, g), Inner(x, gradients.x), 1e-12);
  EXPECT_NEAR(Inner(received.weights, gw), Inner(weights, gradients.weights), 1e-12);
}

std::string ShapeName(const ::testing::TestParamInfo<std::tuple<int64_t, int64_t, int64_t>>& info) {
  const auto [ranks, alignment, capacity] = info.param;
  return "Ranks" + std::to_string(ranks) + "Alignment" + std::to_string(alignment) + "Capacity" +
         std::to_string(capacity);
}

INSTANTIATE_TEST_SUITE_P(Shapes, EpRandomTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 6), ::testing::Values(1, 4),
                                            ::testing::Values(0, 9)),
                         ShapeName);

}  // namespace
}  // namespace expertd::reference
