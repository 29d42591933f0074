// EP conformance: capacity (REFUSE and DROP) and rejected ids, alike on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "base/strings.h"
#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

using testing::HasSubstr;

class EpCapacity : public testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int64_t world_size() const { return std::get<1>(GetParam()); }
};

std::vector<absl::Status> PrepareStatuses(EpWorld& world, const Problem& problem) {
  std::vector<absl::Status> statuses(static_cast<size_t>(world.size()));
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    statuses[static_cast<size_t>(rank)] =
        world.rank(rank).Prepare(context, ArgsOf(problem, rank)).status();
  });
  return statuses;
}

void ExpectGoodStep(EpWorld& world) {
  const Problem problem = MakeProblem({.name = "good", .tokens = {2}}, world.size());
  for (const absl::Status& status : PrepareStatuses(world, problem))
    EXPECT_TRUE(status.ok()) << status;
}

// All tokens go to one expert: its owner is the fullest rank, with `rows` rows padded.
Problem OneHot(int64_t world) {
  return MakeProblem(
      {.name = "one_hot", .alignment = 8, .tokens = {5}, .routes = Routes::kOneExpert}, world);
}

TEST_P(EpCapacity, RefuseFailsOnAllRanksAlikeAndLeavesTheGroupGood) {
  const Problem problem = OneHot(world_size());
  const int64_t owner = problem.experts / 2 / problem.scenario.experts_per_rank;
  const int64_t rows = (5 * world_size() + 7) / 8 * 8;
  EpGroupConfig config = EpWorld::DefaultConfig();
  config.max_recv_rows = rows - 1;
  EpWorld world(backend(), world_size(), config);
  for (const absl::Status& status : PrepareStatuses(world, problem)) {
    EXPECT_TRUE(HasReason(status, Reason::kRecvCapacity)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(StrCat("rank ", owner, " would receive ", rows, " rows")));
    EXPECT_THAT(std::string(status.message()), HasSubstr(StrCat("at most ", rows - 1)));
  }
  ExpectGoodStep(world);
}

TEST_P(EpCapacity, ExactlyFullCapacityIsServed) {
  const Problem problem = OneHot(world_size());
  EpGroupConfig config = EpWorld::DefaultConfig();
  config.max_recv_rows = (5 * world_size() + 7) / 8 * 8;
  EpWorld world(backend(), world_size(), config);
  for (const absl::Status& status : PrepareStatuses(world, problem))
    EXPECT_TRUE(status.ok()) << status;
}

// Counts, dropped routes, and that a dropped route contributes and receives nothing.
TEST_P(EpCapacity, DropKeepsTheFirstRowsOfEachExpert) {
  const Scenario scenario = {.name = "drop",
                             .experts_per_rank = 3,
                             .top_k = 2,
                             .alignment = 4,
                             .tokens = {30, 11},
                             .policy = CapacityPolicy::kDrop,
                             .capacity = 3 * 8 + 5};  // 8 rows for each expert
  EpWorld world(backend(), world_size(), EpWorld::ConfigFor(scenario));
  const Problem problem = MakeProblem(scenario, world_size());
  const Layout layout = BuildLayout(problem);
  const Handles handles = PrepareAll(world, problem);
  const OpContext combine = world.Next();
  const OpContext backward = world.Next();
  int64_t dropped_at_experts = 0;
  for (const RecvCounts& counts : layout.counts) {
    for (int64_t dropped : counts.dropped_per_expert) dropped_at_experts += dropped;
  }
  ASSERT_GT(dropped_at_experts, 0) << "the scenario must drop something";
  world.Run([&](int64_t rank) {
    const auto index = static_cast<size_t>(rank);
    const RankInput& input = problem.ranks[index];
    const RecvCounts& counts = handles[index]->counts();
    EXPECT_EQ(counts.tokens_per_expert, layout.counts[index].tokens_per_expert);
    EXPECT_EQ(counts.padded_per_expert, layout.counts[index].padded_per_expert);
    EXPECT_EQ(counts.dropped_per_expert, layout.counts[index].dropped_per_expert);
    const std::vector<int64_t>& slot_of = layout.slot_of[index];
    std::vector<uint8_t> dropped;
    for (int64_t slot : slot_of) dropped.push_back(slot == -2);
    const bool any = std::count(dropped.begin(), dropped.end(), 1) > 0;
    EXPECT_EQ(handles[index]->dropped_routes(), any ? dropped : std::vector<uint8_t>());

    TestMatrix z = SlotRows(problem, layout, rank, DType::kF32, 3);
    TestMatrix y(DType::kF32, input.tokens, z.cols());
    EpBackend& ep = world.rank(rank);
    absl::Status status = ep.Combine(combine, *handles[index], z.view(), nullptr, y.view());
    ASSERT_TRUE(status.ok()) << status;
    const std::vector<float> grad_w = SlotWeights(problem, layout, rank);
    TestMatrix grad_x(DType::kF32, input.tokens, z.cols());
    std::vector<float> grad_topk(input.ids.size(), -77.0f);
    status = ep.DispatchBackward(backward, *handles[index], z.view(), grad_w.data(), grad_x.view(),
                                 grad_topk.data());
    ASSERT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < slot_of.size(); ++i) {
      EXPECT_EQ(grad_topk[i], slot_of[i] < 0 ? 0.0f : input.weights[i]);
    }
    for (int64_t t = 0; t < input.tokens; ++t) {
      const auto begin = slot_of.begin() + t * problem.top_k;
      const auto kept = static_cast<double>(
          std::count_if(begin, begin + problem.top_k, [](int64_t slot) { return slot >= 0; }));
      for (int64_t h = 0; h < y.cols(); ++h) {
        ASSERT_EQ(y.Get(t, h), kept * RowValue(rank, t, h, 3));
        ASSERT_EQ(grad_x.Get(t, h), kept * RowValue(rank, t, h, 3));
      }
    }
  });
}

TEST_P(EpCapacity, DropWithoutRoomForAnyRowDropsEverything) {
  const Scenario scenario = {.name = "no_room",
                             .alignment = 4,
                             .tokens = {3},
                             .policy = CapacityPolicy::kDrop,
                             .capacity = 11};  // 3 experts of 4 rows do not fit
  EpWorld world(backend(), world_size(), EpWorld::ConfigFor(scenario));
  const Problem problem = MakeProblem(scenario, world_size());
  const Handles handles = PrepareAll(world, problem);
  for (const auto& handle : handles) {
    EXPECT_EQ(handle->counts().total, 0);
    EXPECT_EQ(handle->dropped_routes(),
              std::vector<uint8_t>(static_cast<size_t>(3 * problem.top_k), 1));
  }
}

struct BadId {
  int64_t value;
  Reason reason;
};

TEST_P(EpCapacity, BadIdsOnOneRankFailAllAlikeAndTheNextStepWorks) {
  EpWorld world(backend(), world_size());
  const int64_t guilty = world_size() - 1;
  const int64_t experts = 3 * world_size();
  for (const auto& [value, reason] :
       {BadId{experts, Reason::kExpertIdRange}, BadId{-2, Reason::kExpertIdRange},
        BadId{int64_t{1} << 40, Reason::kExpertIdRange}, BadId{-100, Reason::kDuplicateExpert}}) {
    SCOPED_TRACE(value);
    Problem problem = MakeProblem({.name = "bad", .tokens = {7}}, world_size());
    std::vector<int64_t>& ids = problem.ranks.back().ids;
    ids[3 * 2 + 1] = value == -100 ? ids[3 * 2] : value;  // token 3, k 1
    const std::vector<absl::Status> statuses = PrepareStatuses(world, problem);
    for (int64_t rank = 0; rank < world_size(); ++rank) {
      const absl::Status& status = statuses[static_cast<size_t>(rank)];
      if (rank == guilty) {
        EXPECT_TRUE(HasReason(status, reason)) << status;
        ASSERT_EQ(DetailOf(status).violations.size(), 1u);
        EXPECT_EQ(DetailOf(status).violations[0].path, "topk_ids[3,1]");
      } else {
        EXPECT_TRUE(HasReason(status, Reason::kPeerRejected)) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr(StrCat("rank ", guilty)));
        EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(ReasonName(reason))));
        EXPECT_THAT(std::string(status.message()), HasSubstr("topk_ids[3,1]"));
      }
    }
    ExpectGoodStep(world);
  }
}

TEST_P(EpCapacity, TokensOverTheLimitOnOneRankFailAllAlike) {
  EpGroupConfig config = EpWorld::DefaultConfig();
  config.max_tokens_per_rank = 6;
  EpWorld world(backend(), world_size(), config);
  const Problem problem =
      MakeProblem({.name = "over", .tokens = {7, 6, 6, 6, 6, 6, 6, 6}}, world_size());
  const std::vector<absl::Status> statuses = PrepareStatuses(world, problem);
  EXPECT_TRUE(HasReason(statuses[0], Reason::kTokensOverLimit)) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("got 7, need at most 6"));
  for (size_t rank = 1; rank < statuses.size(); ++rank) {
    EXPECT_TRUE(HasReason(statuses[rank], Reason::kPeerRejected)) << statuses[rank];
  }
  ExpectGoodStep(world);
}

std::string NameOf(const testing::TestParamInfo<EpCapacity::ParamType>& info) {
  return StrCat(std::get<0>(info.param), "_", std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, EpCapacity,
                         testing::Combine(testing::Values("loopback", "gloo"),
                                          testing::Values(1, 3)),
                         NameOf);

}  // namespace
}  // namespace expertd::conformance
