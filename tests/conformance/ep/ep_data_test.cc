// EP conformance: what moves where, bit for bit, on every backend and world size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <tuple>

#include "base/strings.h"
#include "tests/conformance/ep/ep_checks.h"
#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};

std::vector<Scenario> Scenarios() {
  return {
      {.name = "plain"},
      {.name = "aligned", .alignment = 8, .tokens = {17, 9}},
      {.name = "aligned_128", .experts_per_rank = 2, .alignment = 128, .tokens = {33}},
      {.name = "odd_hidden", .hidden = 37, .tokens = {13, 1, 5}},
      {.name = "one_column", .top_k = 3, .hidden = 1, .tokens = {11}},
      {.name = "one_expert_per_rank", .experts_per_rank = 1, .top_k = 1, .tokens = {6}},
      {.name = "many_experts", .experts_per_rank = 64, .top_k = 8, .alignment = 4, .tokens = {19}},
      {.name = "top_k_16", .experts_per_rank = 16, .top_k = 16, .tokens = {5, 8}},
      {.name = "every_expert", .experts_per_rank = 3, .top_k = 64, .tokens = {4, 3}},
      {.name = "holes", .top_k = 3, .alignment = 2, .tokens = {21}, .routes = Routes::kHoles},
      {.name = "no_routes", .tokens = {4}, .routes = Routes::kAllHoles},
      {.name = "one_hot", .top_k = 2, .alignment = 16, .tokens = {9}, .routes = Routes::kOneExpert},
      {.name = "last_rank_receives_nothing", .tokens = {8}, .routes = Routes::kNotToLastRank},
      {.name = "skewed",
       .experts_per_rank = 4,
       .top_k = 4,
       .tokens = {40, 2},
       .routes = Routes::kSkewed},
      {.name = "rank_without_tokens", .alignment = 4, .tokens = {0, 9, 3}},
      {.name = "nobody_has_tokens", .alignment = 4, .tokens = {0}},
  };
}

class EpData : public testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int64_t world_size() const { return std::get<1>(GetParam()); }
};

// Calls `check(problem, layout, handles)` for every scenario in one world.
template <typename Check>
void ForScenarios(EpWorld& world, const Check& check) {
  for (const Scenario& scenario : Scenarios()) {
    SCOPED_TRACE(scenario.name);
    const Problem problem = MakeProblem(scenario, world.size());
    const Layout layout = BuildLayout(problem);
    const Handles handles = PrepareAll(world, problem);
    if (testing::Test::HasFatalFailure()) return;
    check(problem, layout, handles);
  }
}

TEST_P(EpData, CountsAndTotalsAreExact) {
  EpWorld world(backend(), world_size());
  ForScenarios(world, [&](const Problem& problem, const Layout& layout, const Handles& handles) {
    for (size_t rank = 0; rank < handles.size(); ++rank) {
      const RecvCounts& counts = handles[rank]->counts();
      EXPECT_EQ(counts.tokens_per_expert, layout.counts[rank].tokens_per_expert);
      EXPECT_EQ(counts.padded_per_expert, layout.counts[rank].padded_per_expert);
      EXPECT_EQ(counts.dropped_per_expert, layout.counts[rank].dropped_per_expert);
      EXPECT_EQ(counts.total, layout.counts[rank].total);
      EXPECT_EQ(handles[rank]->tokens(), problem.ranks[rank].tokens);
      EXPECT_EQ(handles[rank]->top_k(), problem.top_k);
      EXPECT_EQ(handles[rank]->alignment(), problem.scenario.alignment);
      EXPECT_TRUE(handles[rank]->dropped_routes().empty());
    }
  });
}

TEST_P(EpData, DispatchIsBitExactInSourceThenTokenOrder) {
  EpWorld world(backend(), world_size());
  ForScenarios(world, [&](const Problem& problem, const Layout& layout, const Handles& handles) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3FN, DType::kI32}) {
      SCOPED_TRACE(std::string(DTypeName(dtype)));
      CheckDispatch(world, problem, layout, handles, dtype, /*with_weights=*/true);
    }
    CheckDispatch(world, problem, layout, handles, DType::kBF16, /*with_weights=*/false);
  });
}

TEST_P(EpData, CombineOfDispatchedRowsIsValidCountTimesRow) {
  EpWorld world(backend(), world_size());
  ForScenarios(world, [&](const Problem& problem, const Layout& layout, const Handles& handles) {
    for (DType dtype : kFloats) {
      const OpContext context = world.Next();
      world.Run([&](int64_t rank) {
        const auto index = static_cast<size_t>(rank);
        const RankInput& input = problem.ranks[index];
        TestMatrix z = SlotRows(problem, layout, rank, dtype, 3);
        TestMatrix y(dtype, input.tokens, problem.scenario.hidden);
        const absl::Status status =
            world.rank(rank).Combine(context, *handles[index], z.view(), nullptr, y.view());
        ASSERT_TRUE(status.ok()) << status;
        for (int64_t t = 0; t < input.tokens; ++t) {
          const auto begin = input.ids.begin() + t * problem.top_k;
          const auto holes = std::count(begin, begin + problem.top_k, -1);
          const auto valid = static_cast<double>(problem.top_k - holes);
          // Every sum of at most 16 values of at most 15 is exact, whatever is rounded when.
          if (valid > 16) continue;
          for (int64_t h = 0; h < y.cols(); ++h) {
            ASSERT_EQ(y.Get(t, h), valid * RowValue(rank, t, h, 3)) << "t " << t << " h " << h;
          }
        }
      });
    }
  });
}

// One rounding of each rank's partial sum, one of the total, and K additions in f32.
double CombineBound(DType dtype, int64_t top_k, double magnitude) {
  const double u = UnitRoundoff(dtype);
  return (2 * u + u * u + static_cast<double>(top_k + 2) * 0x1p-23) * magnitude;
}

TEST_P(EpData, WeightedCombineIsWithinTwoRoundings) {
  EpWorld world(backend(), world_size());
  ForScenarios(world, [&](const Problem& problem, const Layout& layout, const Handles& handles) {
    for (DType dtype : kFloats) {
      const OpContext context = world.Next();
      world.Run([&](int64_t rank) {
        const auto index = static_cast<size_t>(rank);
        const RankInput& input = problem.ranks[index];
        TestMatrix z = SlotRows(problem, layout, rank, dtype, 5);
        const std::vector<float> weights = SlotWeights(problem, layout, rank);
        TestMatrix y(dtype, input.tokens, problem.scenario.hidden);
        const absl::Status status =
            world.rank(rank).Combine(context, *handles[index], z.view(), weights.data(), y.view());
        ASSERT_TRUE(status.ok()) << status;
        for (int64_t t = 0; t < input.tokens; ++t) {
          double sum = 0;
          double magnitude = 0;
          for (int64_t k = 0; k < problem.top_k; ++k) {
            const auto position = static_cast<size_t>(t * problem.top_k + k);
            if (input.ids[position] < 0) continue;
            sum += static_cast<double>(input.weights[position]);
            magnitude += std::abs(static_cast<double>(input.weights[position]));
          }
          for (int64_t h = 0; h < y.cols(); ++h) {
            const double row = RowValue(rank, t, h, 5);
            ASSERT_NEAR(y.Get(t, h), sum * row,
                        CombineBound(dtype, problem.top_k, magnitude * std::abs(row)))
                << "t " << t << " h " << h;
          }
        }
      });
    }
  });
}

TEST_P(EpData, CombineBackwardFillsEveryValidSlotAndZeroesPads) {
  EpWorld world(backend(), world_size());
  ForScenarios(world, [&](const Problem& problem, const Layout& layout, const Handles& handles) {
    for (DType dtype : kFloats) {
      for (const bool weighted : {false, true}) {
        const OpContext context = world.Next();
        world.Run([&](int64_t rank) {
          const auto index = static_cast<size_t>(rank);
          const std::vector<SlotSource>& slots = layout.slots[index];
          TestMatrix grad_y = TokenRows(problem, rank, dtype, 11);
          TestMatrix grad_z(dtype, static_cast<int64_t>(slots.size()) + 4, problem.scenario.hidden);
          const std::vector<float> weights = SlotWeights(problem, layout, rank);
          const absl::Status status =
              world.rank(rank).CombineBackward(context, *handles[index], grad_y.view(),
                                               weighted ? weights.data() : nullptr, grad_z.view());
          ASSERT_TRUE(status.ok()) << status;
          for (int64_t slot = 0; slot < grad_z.rows(); ++slot) {
            const auto at = static_cast<size_t>(slot);
            if (at >= slots.size() || slots[at].source < 0) {
              ASSERT_TRUE(
                  grad_z.RowIs(slot, std::byte{at >= slots.size() ? uint8_t{0xFF} : uint8_t{0}}));
              continue;
            }
            const double factor = weighted ? static_cast<double>(weights[at]) : 1;
            for (int64_t h = 0; h < grad_z.cols(); ++h) {
              const double want = factor * RowValue(slots[at].source, slots[at].token, h, 11);
              // The product in f32, then one rounding.
              ASSERT_NEAR(grad_z.Get(slot, h), want,
                          (UnitRoundoff(dtype) * 1.01 + 0x1p-24) * std::abs(want));
            }
          }
        });
      }
    }
  });
}

TEST_P(EpData, DispatchBackwardUndoesCombineBackwardAndReturnsWeightGradients) {
  EpWorld world(backend(), world_size());
  ForScenarios(world, [&](const Problem& problem, const Layout& layout, const Handles& handles) {
    for (DType dtype : kFloats) {
      const OpContext context = world.Next();
      world.Run([&](int64_t rank) {
        const auto index = static_cast<size_t>(rank);
        const RankInput& input = problem.ranks[index];
        TestMatrix grad = SlotRows(problem, layout, rank, dtype, 13);
        const std::vector<float> grad_w = SlotWeights(problem, layout, rank);
        TestMatrix grad_x(dtype, input.tokens, problem.scenario.hidden);
        std::vector<float> grad_topk(input.ids.size(), -77.0f);
        const absl::Status status = world.rank(rank).DispatchBackward(
            context, *handles[index], grad.view(), grad_w.data(), grad_x.view(), grad_topk.data());
        ASSERT_TRUE(status.ok()) << status;
        for (size_t i = 0; i < input.ids.size(); ++i) {
          ASSERT_EQ(grad_topk[i], input.ids[i] < 0 ? 0.0f : input.weights[i]) << "route " << i;
        }
        for (int64_t t = 0; t < input.tokens; ++t) {
          const auto begin = input.ids.begin() + t * problem.top_k;
          const auto holes = std::count(begin, begin + problem.top_k, -1);
          const auto valid = static_cast<double>(problem.top_k - holes);
          if (valid > 16) continue;
          for (int64_t h = 0; h < grad_x.cols(); ++h) {
            ASSERT_EQ(grad_x.Get(t, h), valid * RowValue(rank, t, h, 13));
          }
        }
        std::fill(grad_topk.begin(), grad_topk.end(), -77.0f);
      });
      const OpContext unweighted = world.Next();
      world.Run([&](int64_t rank) {
        const auto index = static_cast<size_t>(rank);
        TestMatrix grad = SlotRows(problem, layout, rank, dtype, 13);
        TestMatrix grad_x(dtype, problem.ranks[index].tokens, problem.scenario.hidden);
        const absl::Status status = world.rank(rank).DispatchBackward(
            unweighted, *handles[index], grad.view(), nullptr, grad_x.view(), nullptr);
        ASSERT_TRUE(status.ok()) << status;
      });
    }
  });
}

std::string NameOf(const testing::TestParamInfo<EpData::ParamType>& info) {
  return StrCat(std::get<0>(info.param), "_", std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, EpData,
                         testing::Combine(testing::Values("loopback", "gloo"),
                                          testing::Values(1, 2, 3, 4, 8)),
                         NameOf);

}  // namespace
}  // namespace expertd::conformance
