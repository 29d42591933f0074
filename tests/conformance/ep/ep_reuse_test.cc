// EP conformance: several handles, changing sizes, repeated steps, adjoints, the all-reduce.
#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>

#include "base/strings.h"
#include "tests/conformance/ep/ep_checks.h"
#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

class EpReuse : public testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int64_t world_size() const { return std::get<1>(GetParam()); }
};

TEST_P(EpReuse, TwoHandlesInFlightDoNotTouchEachOther) {
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

TEST_P(EpReuse, FewerTokensAfterMoreLeaveNothingBehind) {
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
TEST_P(EpReuse, TopKOneToSixteenWithNarrowIds) {
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

TEST_P(EpReuse, SameInputsTwiceGiveTheSameBits) {
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
TEST_P(EpReuse, CombineAndCombineBackwardAreAdjoint) {
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

TEST_P(EpReuse, AllReduceAddsInRankOrderWithTheSameBitsEverywhere) {
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

std::string NameOf(const testing::TestParamInfo<EpReuse::ParamType>& info) {
  return StrCat(std::get<0>(info.param), "_", std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, EpReuse,
                         testing::Combine(testing::Values("loopback", "gloo"),
                                          testing::Values(1, 2, 3, 4, 8)),
                         NameOf);

}  // namespace
}  // namespace expertd::conformance
