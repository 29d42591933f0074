// Receive capacity: what REFUSE and DROP do when a rank would receive more rows than allowed.
#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/conformance/service/layer_check.h"
#include "tests/conformance/service/primitives.h"

namespace expertd::conformance {
namespace {

using reference::TestRandom;

constexpr int64_t kLocalExperts = 3;
constexpr int64_t kAlignment = 2;
// floor(14 / (3 * 2)) * 2 = 4 rows for each expert.
constexpr int64_t kCapacity = 14;

v1::GroupConfig Limited(v1::GroupConfig config, v1::CapacityPolicy policy) {
  config.set_max_recv_rows_per_rank(kCapacity);
  config.set_capacity_policy(policy);
  return config;
}

reference::Layout LayoutOf(const PrimitiveCase& c, int64_t world, const reference::Routing& ids,
                           reference::CapacityPolicy policy) {
  return reference::Prepare({.num_experts = c.experts,
                             .num_ranks = world,
                             .top_k = c.top_k,
                             .alignment = c.alignment,
                             .capacity = kCapacity,
                             .policy = policy},
                            ids);
}

PrimitiveCase CaseOf(int64_t world) {
  return {.experts = kLocalExperts * world, .top_k = 2, .hidden = 8, .alignment = kAlignment};
}

// Six tokens of every rank, half of their routes at expert 0: rank 0 is over capacity at any world
// size but one where there are too few tokens, so that world gets more of them.
reference::Routing Crowded(int64_t world, TestRandom& random) {
  const PrimitiveCase c = CaseOf(world);
  reference::Routing ids = random.Ids(
      std::vector<int64_t>(static_cast<size_t>(world), world == 1 ? 12 : 6), c.top_k, c.experts);
  for (auto& rank : ids) {
    for (size_t t = 0; t < rank.size(); t += 2) {
      rank[t] = 0;
      if (rank[t + 1] <= 0) rank[t + 1] = static_cast<int64_t>(t / 2 % 2) + 1;
    }
  }
  return ids;
}

TEST_P(ServiceTest, DropKeepsEachExpertsFirstRowsInSlotOrder) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  UseGroup(Limited(DefaultGroup(), v1::CAPACITY_POLICY_DROP));
  const PrimitiveCase c = CaseOf(world());
  const reference::Routing ids = Crowded(world(), random);
  const std::string layer_id = MakeLayer(LayerOf(c));
  Primitives p(service(), layer_id, c, ids);
  p.SetLayout(LayoutOf(c, world(), ids, reference::CapacityPolicy::kDrop));
  ASSERT_GT(p.layout().ranks[0].dropped_per_expert[0], 0);
  ASSERT_TRUE(p.Prepare());
  p.CheckAll(1);
}

TEST_P(ServiceTest, DropIsCountedPerExpert) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  UseGroup(Limited(DefaultGroup(), v1::CAPACITY_POLICY_DROP));
  const PrimitiveCase c = CaseOf(world());
  const reference::Routing ids = Crowded(world(), random);
  const std::string layer_id = MakeLayer(LayerOf(c));
  const reference::Layout want = LayoutOf(c, world(), ids, reference::CapacityPolicy::kDrop);
  std::vector<v1::PrepareRequest> requests;
  for (const auto& rank : ids) {
    requests.emplace_back().set_layer_id(layer_id);
    *requests.back().mutable_topk_ids() = IdTensor(rank, c.top_k);
  }
  const auto responses = Run(std::move(requests));
  ASSERT_EQ(responses.size(), ids.size());
  for (size_t rank = 0; rank < responses.size(); ++rank) {
    EXPECT_TRUE(std::ranges::equal(responses[rank].dropped_per_expert(),
                                   want.ranks[rank].dropped_per_expert))
        << "rank " << rank << ": " << responses[rank].ShortDebugString();
  }
}

TEST_P(ServiceTest, DroppedRoutesContributeNothingAndGetZeroGradients) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  UseGroup(Limited(DefaultGroup(), v1::CAPACITY_POLICY_DROP));
  for (const v1::Weighting weighting : {v1::WEIGHTING_LATE, v1::WEIGHTING_EARLY}) {
    v1::LayerConfig config = SmallLayer(kLocalExperts * world(), 2, 10, 6);
    config.set_alignment(kAlignment);
    config.set_weighting(weighting);
    const reference::Routing ids = Crowded(world(), random);
    const LayerCase c = {
        .config = config, .tokens = TokenCounts(ids, 2), .ids = ids, .capacity = kCapacity};
    LayerCheck(*this, c, random).Run();
  }
}

TEST_P(ServiceTest, RefusedStepFailsOnEveryRankAndTheNextOneWorks) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  UseGroup(Limited(DefaultGroup(), v1::CAPACITY_POLICY_REFUSE));
  const PrimitiveCase c = CaseOf(world());
  const reference::Routing ids = Crowded(world(), random);
  const std::string layer_id = MakeLayer(LayerOf(c));
  ASSERT_TRUE(LayoutOf(c, world(), ids, reference::CapacityPolicy::kRefuse).refused);
  std::vector<v1::PrepareRequest> requests;
  for (const auto& rank : ids) {
    requests.emplace_back().set_layer_id(layer_id);
    *requests.back().mutable_topk_ids() = IdTensor(rank, c.top_k);
  }
  const auto replies = driver().RunEach(std::move(requests));
  for (const absl::Status& status : replies.statuses) {
    EXPECT_TRUE(HasReason(status, Reason::kRecvCapacity)) << status;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  }
  const reference::Routing few(static_cast<size_t>(world()), std::vector<int64_t>{0, -1});
  Primitives next(service(), layer_id, c, few);
  if (world() * kAlignment <= kCapacity) {
    ASSERT_TRUE(next.Prepare());
    next.CheckAll(2);
  }
}

}  // namespace
}  // namespace expertd::conformance
