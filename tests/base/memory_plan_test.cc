// Buffer and message sizes against hand-computed numbers, and every overflow.
#include "base/memory_plan.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "base/window_layout.h"

namespace expertd {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// T 4, K 2, R 2, E 8, so L 4; H 16 of f32.
GroupSizes Group() {
  GroupSizes group;
  group.ranks = 2;
  group.max_tokens_per_rank = 4;
  group.max_hidden = 16;
  group.max_top_k = 2;
  group.max_experts = 8;
  group.token_bytes = 4;
  return group;
}

LayerSizes Layer() {
  LayerSizes layer;
  layer.expert_count = 8;
  layer.hidden = 16;
  layer.intermediate = 6;
  layer.top_k = 2;
  return layer;
}

TEST(MemoryPlanTest, WorstCaseRowsCountRoutesAndPadding) {
  EXPECT_EQ(*RecvRows(Group()), 2 * 4 * 2 + 4 * 127);
  GroupSizes few_experts = Group();
  few_experts.max_experts = 2;  // one per rank: a token sends at most one route there
  EXPECT_EQ(*RecvRows(few_experts), 2 * 4 * 1 + 127);
}

TEST(MemoryPlanTest, AGivenCapacityIsTaken) {
  GroupSizes group = Group();
  group.max_recv_rows = 100;
  EXPECT_EQ(*RecvRows(group), 100);
}

TEST(MemoryPlanTest, AGroupsSizesAreThoseOfTheFormula) {
  GroupSizes group = Group();
  group.max_recv_rows = 100;
  const auto plan = *PlanGroup(group);
  EXPECT_EQ(plan.at("recv_rows"), 100);
  EXPECT_EQ(plan.at("recv_tokens"), 100 * 64);
  EXPECT_EQ(plan.at("expert_output"), 100 * 64);
  EXPECT_EQ(plan.at("recv_weights"), 400);
  EXPECT_EQ(plan.at("tokens_in"), 4 * 64);
  EXPECT_EQ(plan.at("tokens_out"), 4 * 64);
  EXPECT_EQ(plan.at("message"), 100 * (64 + 4) + 65536);
}

TEST(MemoryPlanTest, TheMessageIsAForwardWhereThatIsLarger) {
  GroupSizes group = Group();
  group.max_recv_rows = 1;
  EXPECT_EQ(*MaxMessageBytes(group), 4 * (64 + 8 * 4) + 65536);  // with logits of 8 experts
  group.max_experts = 4;
  group.max_top_k = 4;
  EXPECT_EQ(*MaxMessageBytes(group), 4 * (64 + 4 * 12) + 65536);  // with ids and weights
}

TEST(MemoryPlanTest, TheMessageIsCappedAtWhatGrpcCanHold) {
  GroupSizes group = Group();
  group.max_recv_rows = int64_t{1} << 40;
  EXPECT_EQ(*MaxMessageBytes(group), 2147483647);
  group.max_hidden = 1;
  group.token_bytes = 1;
  group.max_tokens_per_rank = 1;
  group.max_recv_rows = (2147483647 - 65536) / 5;
  EXPECT_EQ(*MaxMessageBytes(group), group.max_recv_rows * 5 + 65536);
  ++group.max_recv_rows;
  EXPECT_EQ(*MaxMessageBytes(group), 2147483647);
}

TEST(MemoryPlanTest, ALayersSizesAreThoseOfTheFormula) {
  GroupSizes group = Group();
  group.max_recv_rows = 100;
  const int64_t matrices = 4 * 3 * 16 * 6;
  auto plan = *PlanLayer(group, Layer());
  EXPECT_EQ(plan.at("master_weights"), matrices * 4);
  EXPECT_EQ(plan.at("compute_weights"), 0);  // f32 weights need no copy
  EXPECT_EQ(plan.at("gradients"), matrices * 4);
  EXPECT_EQ(plan.at("optimizer_state"), 0);
  EXPECT_EQ(plan.at("ticket_worst_case"), 100 * ((16 + 12) * 4 + 4));
  EXPECT_EQ(plan.at("total_weights"), matrices * 8);

  LayerSizes layer = Layer();
  layer.weight_bytes = 2;
  layer.gate_up_bias = true;
  layer.down_bias = true;
  layer.server_router = true;
  layer.optimizer_states = 2;
  const int64_t all = matrices + 4 * 12 + 4 * 16 + 16 * 8 + 8;
  plan = *PlanLayer(group, layer);
  EXPECT_EQ(plan.at("master_weights"), all * 4);
  EXPECT_EQ(plan.at("compute_weights"), matrices * 2);
  EXPECT_EQ(plan.at("optimizer_state"), all * 8);
  EXPECT_EQ(plan.at("ticket_worst_case"), 100 * ((16 + 12) * 4 + 4) + 4 * (8 * 4 + 2 * 8 + 16 * 4));
  EXPECT_EQ(plan.at("total_weights"), all * 16 + matrices * 2);
}

TEST(MemoryPlanTest, ATicketOfRoutedTokensKeepsLogitsAndIds) {
  LayerSizes layer = Layer();
  const int64_t plain = PlanLayer(Group(), layer)->at("ticket_worst_case");
  layer.router = true;
  EXPECT_EQ(PlanLayer(Group(), layer)->at("ticket_worst_case"), plain + 4 * (8 * 4 + 2 * 8));
}

TEST(MemoryPlanTest, AFrozenLayerHasNoGradientsAndNoState) {
  LayerSizes layer = Layer();
  layer.frozen = true;
  layer.optimizer_states = 2;
  const auto plan = *PlanLayer(Group(), layer);
  EXPECT_EQ(plan.at("gradients"), 0);
  EXPECT_EQ(plan.at("optimizer_state"), 0);
  EXPECT_EQ(plan.at("total_weights"), plan.at("master_weights"));
}

TEST(MemoryPlanTest, EveryGroupSizeThatOverflowsIsConfigInvalid) {
  int64_t GroupSizes::*const fields[] = {&GroupSizes::ranks,       &GroupSizes::max_tokens_per_rank,
                                         &GroupSizes::max_hidden,  &GroupSizes::max_top_k,
                                         &GroupSizes::max_experts, &GroupSizes::token_bytes};
  for (int64_t GroupSizes::*field : fields) {
    GroupSizes group = Group();
    group.*field = kHuge;
    if (field == &GroupSizes::max_top_k) group.max_experts = kHuge;
    EXPECT_EQ(ReasonOf(PlanGroup(group).status()), Reason::kConfigInvalid);
    EXPECT_EQ(ReasonOf(MaxMessageBytes(group).status()), Reason::kConfigInvalid);
  }
  GroupSizes group = Group();
  group.max_recv_rows = kHuge;
  EXPECT_EQ(ReasonOf(PlanGroup(group).status()), Reason::kConfigInvalid);
}

TEST(MemoryPlanTest, EveryLayerSizeThatOverflowsIsConfigInvalid) {
  int64_t LayerSizes::*const fields[] = {&LayerSizes::expert_count, &LayerSizes::hidden,
                                         &LayerSizes::intermediate, &LayerSizes::token_bytes};
  for (int64_t LayerSizes::*field : fields) {
    LayerSizes layer = Layer();
    layer.*field = kHuge;
    EXPECT_EQ(ReasonOf(PlanLayer(Group(), layer).status()), Reason::kConfigInvalid);
  }
  LayerSizes layer = Layer();
  layer.optimizer_states = kHuge;
  EXPECT_EQ(ReasonOf(PlanLayer(Group(), layer).status()), Reason::kConfigInvalid);
  layer = Layer();
  layer.weight_bytes = kHuge;
  EXPECT_EQ(ReasonOf(PlanLayer(Group(), layer).status()), Reason::kConfigInvalid);
}

TEST(MemoryPlanTest, AWindowIsListedForBackendsThatHaveOne) {
  GroupSizes group = Group();
  EXPECT_EQ(PlanGroup(group)->count("device_window"), 0u);
  group.device_window = true;
  EXPECT_EQ(PlanGroup(group)->at("device_window"), PlanWindow(group)->bytes);
  group.max_hidden = kHuge / 64;
  group.max_recv_rows = 1;
  group.token_bytes = 32;
  EXPECT_EQ(ReasonOf(PlanGroup(group).status()), Reason::kConfigInvalid);
}

TEST(MemoryPlanTest, ZeroRanksIsNoDivisionByZero) {
  GroupSizes group = Group();
  group.ranks = 0;
  EXPECT_TRUE(PlanGroup(group).ok());
  EXPECT_TRUE(PlanLayer(group, Layer()).ok());
}

}  // namespace
}  // namespace expertd
