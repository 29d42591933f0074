// EP conformance: what moves where, bit for bit, on every backend and world size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <tuple>

#include "base/strings.h"
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

// Dispatches TokenRows(salt 7) and checks rows, weights, pads and the tail.
void CheckDispatch(EpWorld& world, const Problem& problem, const Layout& layout,
                   const Handles& handles, DType dtype, bool with_weights) {
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    const auto index = static_cast<size_t>(rank);
    const std::vector<SlotSource>& slots = layout.slots[index];
    const auto total = static_cast<int64_t>(slots.size());
    TestMatrix x = TokenRows(problem, rank, dtype, 7);
    TestMatrix recv_x(dtype, total + 4, problem.scenario.hidden);
    std::vector<float> recv_w(slots.size() + 4, -77.0f);
    const absl::Status status =
        world.rank(rank).Dispatch(context, *handles[index], x.view(),
                                  with_weights ? problem.ranks[index].weights.data() : nullptr,
                                  recv_x.view(), with_weights ? recv_w.data() : nullptr);
    ASSERT_TRUE(status.ok()) << status;
    TestMatrix expected = SlotRows(problem, layout, rank, dtype, 7);
    const std::vector<float> expected_w = SlotWeights(problem, layout, rank);
    for (int64_t slot = 0; slot < total; ++slot) {
      const bool pad = slots[static_cast<size_t>(slot)].source < 0;
      if (pad) {
        ASSERT_TRUE(recv_x.RowIs(slot, std::byte{0})) << "pad slot " << slot;
      } else {
        ASSERT_EQ(std::memcmp(recv_x.At(slot, 0), expected.At(slot, 0), expected.row_bytes()), 0)
            << "slot " << slot;
      }
      if (!with_weights) continue;
      ASSERT_EQ(recv_w[static_cast<size_t>(slot)],
                pad ? 0.0f : expected_w[static_cast<size_t>(slot)]);
    }
    for (int64_t slot = total; slot < total + 4; ++slot) {
      ASSERT_TRUE(recv_x.RowIs(slot, std::byte{0xFF})) << "past the total: " << slot;
      ASSERT_EQ(recv_w[static_cast<size_t>(slot)], -77.0f);
    }
  });
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

TEST_P(EpData, TwoHandlesInFlightDoNotTouchEachOther) {
  EpWorld world(backend(), world_size());
  const Problem first = MakeProblem({.name = "first", .tokens = {12, 5}, .seed = 21}, world.size());
  const Problem second = MakeProblem({.name = "second",
                                      .experts_per_rank = 5,
                                      .top_k = 4,
                                      .alignment = 4,
                                      .tokens = {3, 9},
                                      .seed = 22},
                                     world.size());
  const Handles of_first = PrepareAll(world, first);
  const Handles of_second = PrepareAll(world, second);
  for (int round = 0; round < 2; ++round) {
    CheckDispatch(world, second, BuildLayout(second), of_second, DType::kF32, true);
    CheckDispatch(world, first, BuildLayout(first), of_first, DType::kBF16, true);
  }
}

TEST_P(EpData, FewerTokensAfterMoreLeaveNothingBehind) {
  EpWorld world(backend(), world_size());
  for (int64_t tokens : {200, 3, 60, 1, 0, 17}) {
    const Problem problem = MakeProblem(
        {.name = "shrink", .top_k = 3, .alignment = 8, .hidden = 16, .tokens = {tokens}},
        world.size());
    const Handles handles = PrepareAll(world, problem);
    CheckDispatch(world, problem, BuildLayout(problem), handles, DType::kBF16, true);
  }
}

// Every top_k from 1 to 16, with ids of 32 bits.
TEST_P(EpData, TopKOneToSixteenWithNarrowIds) {
  EpWorld world(backend(), world_size());
  for (int64_t top_k = 1; top_k <= 16; ++top_k) {
    const Problem problem = MakeProblem(
        {.name = "k", .experts_per_rank = 16, .top_k = top_k, .tokens = {5, 2}}, world.size());
    Handles handles(static_cast<size_t>(world.size()));
    const OpContext context = world.Next();
    world.Run([&](int64_t rank) {
      const RankInput& input = problem.ranks[static_cast<size_t>(rank)];
      const std::vector<int32_t> ids(input.ids.begin(), input.ids.end());
      PrepareArgs args = ArgsOf(problem, rank);
      args.routing.ids = ids.data();
      args.routing.ids_dtype = DType::kI32;
      auto handle = world.rank(rank).Prepare(context, args);
      ASSERT_TRUE(handle.ok()) << handle.status();
      handles[static_cast<size_t>(rank)] = *std::move(handle);
    });
    CheckDispatch(world, problem, BuildLayout(problem), handles, DType::kF16, true);
  }
}

TEST_P(EpData, SameInputsTwiceGiveTheSameBits) {
  EpWorld world(backend(), world_size());
  const Problem problem =
      MakeProblem({.name = "bits", .experts_per_rank = 8, .top_k = 8, .hidden = 33, .tokens = {31}},
                  world.size());
  const Layout layout = BuildLayout(problem);
  std::vector<std::vector<std::byte>> results[2];
  for (auto& result : results) {
    result.resize(static_cast<size_t>(world.size()));
    const Handles handles = PrepareAll(world, problem);
    const OpContext context = world.Next();
    world.Run([&](int64_t rank) {
      const auto index = static_cast<size_t>(rank);
      TestMatrix z = SlotRows(problem, layout, rank, DType::kF32, 17);
      // Values whose sum depends on the order of the additions.
      for (int64_t slot = 0; slot < z.rows(); ++slot) {
        for (int64_t h = 0; h < z.cols(); ++h) z.Set(slot, h, z.Get(slot, h) * 1.1e-3 + 1.0 / 3);
      }
      const std::vector<float> weights = SlotWeights(problem, layout, rank);
      TestMatrix y(DType::kF32, problem.ranks[index].tokens, problem.scenario.hidden);
      const absl::Status status =
          world.rank(rank).Combine(context, *handles[index], z.view(), weights.data(), y.view());
      ASSERT_TRUE(status.ok()) << status;
      result[index] = y.bytes();
    });
  }
  EXPECT_EQ(results[0], results[1]);
}

// <Combine(z), g> = <z, CombineBackward(g)> over valid slots, with weights.
TEST_P(EpData, CombineAndCombineBackwardAreAdjoint) {
  EpWorld world(backend(), world_size());
  const Problem problem = MakeProblem(
      {.name = "adjoint", .top_k = 3, .alignment = 4, .tokens = {14}, .routes = Routes::kHoles},
      world.size());
  const Layout layout = BuildLayout(problem);
  const Handles handles = PrepareAll(world, problem);
  std::vector<double> left(static_cast<size_t>(world.size()));
  std::vector<double> right(left);
  const OpContext forward = world.Next();
  const OpContext backward = world.Next();
  world.Run([&](int64_t rank) {
    const auto index = static_cast<size_t>(rank);
    TestMatrix z = SlotRows(problem, layout, rank, DType::kF32, 19);
    TestMatrix g = TokenRows(problem, rank, DType::kF32, 23);
    const std::vector<float> weights = SlotWeights(problem, layout, rank);
    TestMatrix y(DType::kF32, g.rows(), g.cols());
    TestMatrix grad_z(DType::kF32, z.rows(), z.cols());
    EpBackend& ep = world.rank(rank);
    ASSERT_TRUE(ep.Combine(forward, *handles[index], z.view(), weights.data(), y.view()).ok());
    ASSERT_TRUE(
        ep.CombineBackward(backward, *handles[index], g.view(), weights.data(), grad_z.view())
            .ok());
    for (int64_t t = 0; t < g.rows(); ++t) {
      for (int64_t h = 0; h < g.cols(); ++h) left[index] += y.Get(t, h) * g.Get(t, h);
    }
    for (size_t slot = 0; slot < layout.slots[index].size(); ++slot) {
      if (layout.slots[index][slot].source < 0) continue;
      const auto row = static_cast<int64_t>(slot);
      for (int64_t h = 0; h < z.cols(); ++h) right[index] += z.Get(row, h) * grad_z.Get(row, h);
    }
  });
  double left_sum = 0;
  double right_sum = 0;
  for (size_t rank = 0; rank < left.size(); ++rank) {
    left_sum += left[rank];
    right_sum += right[rank];
  }
  EXPECT_NEAR(left_sum, right_sum, 1e-3);
}

TEST_P(EpData, AllReduceAddsInRankOrderWithTheSameBitsEverywhere) {
  EpWorld world(backend(), world_size());
  for (int64_t count : {0, 1, 7, 1000, 100003}) {
    SCOPED_TRACE(count);
    std::vector<std::vector<float>> data(static_cast<size_t>(world.size()));
    for (int64_t rank = 0; rank < world.size(); ++rank) {
      for (int64_t i = 0; i < count; ++i) {
        data[static_cast<size_t>(rank)].push_back(
            static_cast<float>(RowValue(rank, i, 5, 1) / 7 + 1e-4 * static_cast<double>(rank)));
      }
    }
    std::vector<float> expected = data[0];
    for (size_t rank = 1; rank < data.size(); ++rank) {
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += data[rank][i];
    }
    const OpContext context = world.Next();
    world.Run([&](int64_t rank) {
      std::vector<float>& own = data[static_cast<size_t>(rank)];
      const absl::Status status = world.rank(rank).AllReduceSum(context, own.data(), count);
      ASSERT_TRUE(status.ok()) << status;
    });
    for (const std::vector<float>& result : data) ASSERT_EQ(result, expected);
  }
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
