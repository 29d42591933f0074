// The whole engine without gRPC: forming a group and running the steps of a layer on it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

const ForwardOp& AsForward(const Answer& answer) { return static_cast<const ForwardOp&>(*answer); }
const BackwardOp& AsBackward(const Answer& answer) {
  return static_cast<const BackwardOp&>(*answer);
}
const ApplyGradientsOp& AsApply(const Answer& answer) {
  return static_cast<const ApplyGradientsOp&>(*answer);
}

void Append(std::vector<float>& to, const std::vector<float>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

void ExpectNear(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << "[" << i << "]";
}

// Everything that a training step gives, over all ranks in rank order.
struct StepResults {
  std::vector<float> output;
  std::vector<float> tokens_gradient;
  std::vector<float> weights_gradient;
  std::vector<float> gate_up_gradient;
  std::vector<float> gate_up;
  double norm = 0;
};

// Forward, Backward and Apply over the same 8 global rows, in a group of `world`.
StepResults TrainOnce(int64_t world) {
  Cluster cluster(world);
  cluster.Form();
  cluster.CreateReadyLayer();
  const int64_t rows = 8 / world;
  StepResults results;
  std::vector<uint64_t> tickets;
  for (const Answer& answer : cluster.Good(
           [&](int64_t rank) { return MakeForward(GlobalRows(rank * rows, rows), true); })) {
    Append(results.output, Floats(AsForward(answer).output));
    tickets.push_back(AsForward(answer).ticket);
  }
  for (const Answer& answer : cluster.Good([&](int64_t rank) {
         auto op = MakeBackward(tickets[static_cast<size_t>(rank)], rows);
         auto gradient = std::make_shared<std::vector<float>>();
         for (int64_t i = 0; i < rows * 8; ++i) {
           gradient->push_back(static_cast<float>((rank * rows * 8 + i) % 5 - 2) / 2.0f);
         }
         op->output_gradient = View(DType::kF32, {rows, 8}, *gradient);
         op->keep_alive = gradient;
         return op;
       })) {
    Append(results.tokens_gradient, Floats(AsBackward(answer).tokens_gradient));
    Append(results.weights_gradient, Floats(AsBackward(answer).topk_weights_gradient));
  }
  for (int64_t rank = 0; rank < world; ++rank) {
    Append(results.gate_up_gradient,
           Floats(cluster.Parameter(rank, "gate_up", ParameterKind::kGradient).tensor));
  }
  for (const Answer& answer : cluster.Good([](int64_t) { return MakeApply(1); })) {
    EXPECT_TRUE(AsApply(answer).applied);
    EXPECT_EQ(AsApply(answer).weights_version, 2u);
    results.norm = AsApply(answer).gradient_norm;
  }
  for (int64_t rank = 0; rank < world; ++rank) {
    const ParameterShard shard = cluster.Parameter(rank, "gate_up", ParameterKind::kMaster);
    EXPECT_EQ(shard.weights_version, 2u);
    Append(results.gate_up, Floats(shard.tensor));
  }
  return results;
}

class EngineWorldTest : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, EngineWorldTest, testing::Values(1, 2, 4));

TEST_P(EngineWorldTest, AFormedGroupIsDescribedAlikeOnEveryRank) {
  Cluster cluster(GetParam());
  cluster.Form(5);
  for (int64_t rank = 0; rank < cluster.world(); ++rank) {
    const GroupInfo info = cluster.engine(rank).DescribeGroup();
    EXPECT_EQ(info.state, GroupState::kReady);
    EXPECT_EQ(info.epoch, 5u);
    EXPECT_EQ(info.rank, rank);
    EXPECT_EQ(info.members.size(), static_cast<size_t>(GetParam()));
    EXPECT_EQ(info.next_sequence, 1u);
    EXPECT_EQ(info.backend, "loopback");
    EXPECT_EQ(info.config.kept_replies, 2);
    EXPECT_GT(info.config.max_recv_rows_per_rank, 0);
    EXPECT_GT(info.max_message_bytes, 0);
  }
}

TEST_P(EngineWorldTest, AStepGivesWhatOneRankAloneGives) {
  const StepResults alone = TrainOnce(1);
  const StepResults group = TrainOnce(GetParam());
  ExpectNear(group.output, alone.output, 1e-5f);
  ExpectNear(group.tokens_gradient, alone.tokens_gradient, 1e-5f);
  ExpectNear(group.weights_gradient, alone.weights_gradient, 1e-5f);
  ExpectNear(group.gate_up_gradient, alone.gate_up_gradient, 1e-5f);
  ExpectNear(group.gate_up, alone.gate_up, 1e-5f);
  EXPECT_NEAR(group.norm, alone.norm, 1e-5);
  double moved = 0;
  for (float value : group.gate_up_gradient) moved += std::abs(value);
  EXPECT_GT(moved, 0.1);
}

TEST_P(EngineWorldTest, ARankWithoutTokensTakesPart) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  std::vector<uint64_t> tickets;
  auto rows = [&](int64_t rank) { return rank + 1 == GetParam() ? int64_t{0} : int64_t{2}; };
  for (const Answer& answer : cluster.Good([&](int64_t rank) {
         auto op = MakeForward(GlobalRows(0, rows(rank)), true);
         if (rows(rank) == 0) {
           op->tokens.data = op->topk_ids.data = op->topk_weights.data = nullptr;
         }
         return op;
       })) {
    tickets.push_back(AsForward(answer).ticket);
  }
  for (const Answer& answer : cluster.Good([&](int64_t rank) {
         return MakeBackward(tickets[static_cast<size_t>(rank)], rows(rank));
       })) {
    EXPECT_EQ(AsBackward(answer).tokens_gradient.shape[1], 8);
  }
  cluster.Good([](int64_t) { return MakeApply(1); });
  cluster.ExpectWorks();
}

TEST_P(EngineWorldTest, ARankThatReceivesNothingTakesPart) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  ForwardInputs inputs = GlobalRows(0, 2);
  inputs.ids = {0, 1, 1, 0};  // both at rank 0, also in a group of four
  cluster.Good([&](int64_t) { return MakeForward(inputs); });
  inputs.ids = {-1, -1, -1, -1};
  for (const Answer& answer : cluster.Good([&](int64_t) { return MakeForward(inputs); })) {
    for (float value : Floats(AsForward(answer).output)) EXPECT_EQ(value, 0.0f);
  }
}

TEST_P(EngineWorldTest, ATicketServesOneBackward) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  std::vector<uint64_t> tickets;
  for (const Answer& answer :
       cluster.Good([](int64_t rank) { return MakeForward(GlobalRows(rank, 1), true); })) {
    tickets.push_back(AsForward(answer).ticket);
    EXPECT_NE(tickets.back(), 0u);
  }
  const auto backward = [&](int64_t rank) {
    return MakeBackward(tickets[static_cast<size_t>(rank)], 1);
  };
  cluster.Good(backward);
  for (const Answer& answer : cluster.Step(backward)) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kTicketUnknown) << answer->status;
  }
  cluster.ExpectWorks();
}

TEST_P(EngineWorldTest, ApplyIsExactlyOnceByItsExpectedVersion) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  cluster.Good([](int64_t) { return MakeApply(1); });
  for (const Answer& answer : cluster.Good([](int64_t) { return MakeApply(1); })) {
    EXPECT_FALSE(AsApply(answer).applied);
    EXPECT_EQ(AsApply(answer).weights_version, 2u);
  }
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(3); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kVersionBehind);
  }
}

TEST_P(EngineWorldTest, ANonFiniteGradientAppliesOnNoRank) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  std::vector<uint64_t> tickets;
  for (const Answer& answer :
       cluster.Good([](int64_t rank) { return MakeForward(GlobalRows(rank, 1), true); })) {
    tickets.push_back(AsForward(answer).ticket);
  }
  const auto gradient = std::make_shared<std::vector<float>>(8, NAN);
  cluster.Good([&](int64_t rank) {
    auto op = MakeBackward(tickets[static_cast<size_t>(rank)], 1);
    if (rank == 0) {
      op->output_gradient.data = gradient->data();
      op->keep_alive = gradient;
    }
    return op;
  });
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(1); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kNonFiniteGradient) << answer->status;
  }
  cluster.Good([](int64_t) { return MakeLayerOp(OpKind::kClearGradients); });
  for (const Answer& answer : cluster.Good([](int64_t) { return MakeApply(1); })) {
    EXPECT_TRUE(AsApply(answer).applied);
  }
}

TEST_P(EngineWorldTest, CreatingTheSameLayerAgainKeepsItAndAnotherConfigIsRefused) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  for (const Answer& answer : cluster.Good([](int64_t) { return MakeCreateLayer(); })) {
    EXPECT_EQ(static_cast<const CreateLayerOp&>(*answer).layer.weights_version, 1u);
  }
  LayerConfig tuned = SmallLayer();
  tuned.optimizer.momentum = 0.5;
  for (const Answer& answer : cluster.Step([&](int64_t) { return MakeCreateLayer(tuned); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kLayerExists);
    EXPECT_THAT(std::string(answer->status.message()), testing::HasSubstr("optimizer.momentum"));
  }
  LayerConfig other = SmallLayer();
  other.intermediate = 6;
  for (const Answer& answer : cluster.Step([&](int64_t) { return MakeCreateLayer(other); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kLayerExists);
    EXPECT_THAT(std::string(answer->status.message()), testing::HasSubstr("intermediate"));
  }
  cluster.Good([](int64_t) { return MakeLayerOp(OpKind::kDeleteLayer); });
  EXPECT_TRUE(cluster.engine(0).ListLayers().empty());
  cluster.Good([&](int64_t) { return MakeCreateLayer(other); });
}

TEST_P(EngineWorldTest, TheMemoryOfALayerFollowsItsOptimizerAndItsFreezing) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  const auto bytes = [&] { return cluster.engine(0).FindLayer("layer")->memory_bytes; };
  const auto plain = bytes();
  auto configure = [](int64_t) {
    auto op = std::make_shared<ConfigureOptimizerOp>();
    op->layer_id = "layer";
    op->optimizer.kind = OptimizerKind::kAdamW;
    return op;
  };
  cluster.Good(configure);
  EXPECT_GT(bytes().at("optimizer_state"), plain.at("optimizer_state"));
  cluster.Good([](int64_t) { return MakeLayerOp(OpKind::kFreezeLayer); });
  EXPECT_EQ(bytes().at("optimizer_state"), 0);
  EXPECT_EQ(bytes().at("gradients"), 0);
}

TEST_P(EngineWorldTest, AnEnormousLayerIsRefusedBeforeItIsAllocated) {
  Cluster cluster(GetParam());
  cluster.Form();
  LayerConfig config = SmallLayer();
  config.intermediate = int64_t{1} << 59;
  for (const Answer& answer : cluster.Step([&](int64_t) { return MakeCreateLayer(config); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kConfigInvalid) << answer->status;
  }
  config.intermediate = int64_t{1} << 44;
  for (const Answer& answer : cluster.Step([&](int64_t) { return MakeCreateLayer(config); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kMemoryBudget) << answer->status;
  }
  cluster.CreateReadyLayer();
  cluster.ExpectWorks();
}

TEST_P(EngineWorldTest, AFrozenLayerServesForwardOnly) {
  Cluster cluster(GetParam());
  cluster.Form();
  cluster.CreateReadyLayer();
  cluster.Good([](int64_t) { return MakeLayerOp(OpKind::kFreezeLayer); });
  cluster.ExpectWorks();
  for (const Answer& answer :
       cluster.Step([](int64_t) { return MakeForward(GlobalRows(0, 1), true); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kConfigInvalid);
  }
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(1); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kConfigInvalid);
  }
}

TEST_P(EngineWorldTest, TicketMemoryIsBoundedAndComesBackOnRelease) {
  Cluster cluster(GetParam());
  // One worst-case ticket: rows * ((H + 2I) * 4 + 4) bytes.
  const GroupConfig sized = WithDefaults(cluster.config, "loopback");
  cluster.config.ticket_memory_bytes = sized.max_recv_rows_per_rank * ((8 + 8) * 4 + 4) + 100;
  cluster.Form();
  cluster.CreateReadyLayer();
  const auto keep = [](int64_t) { return MakeForward(GlobalRows(0, 2), true); };
  std::vector<uint64_t> tickets;
  for (const Answer& answer : cluster.Good(keep)) tickets.push_back(AsForward(answer).ticket);
  bool rank_refused = false;
  for (const Answer& answer : cluster.Step(keep)) {
    const Reason reason = ReasonOf(answer->status);
    EXPECT_TRUE(reason == Reason::kTicketMemory || reason == Reason::kPeerRejected);
    rank_refused |= reason == Reason::kTicketMemory;
  }
  EXPECT_TRUE(rank_refused);
  for (int64_t rank = 0; rank < cluster.world(); ++rank) {
    auto promise = std::make_shared<std::promise<int64_t>>();
    cluster.engine(rank).Release({tickets[static_cast<size_t>(rank)], 12345}, {},
                                 [promise](int64_t count) { promise->set_value(count); });
    EXPECT_EQ(Await(promise->get_future()), 1);
  }
  cluster.Good(keep);
}

TEST(EngineTest, RecipesThatCannotBeServedAreRefusedByName) {
  Cluster cluster(2);
  cluster.Form();
  for (const char* recipe : {"fp8_current", "fp8_block", "mxfp8", "nvfp4", "int3"}) {
    LayerConfig layer = SmallLayer();
    layer.recipe = recipe;
    for (const Answer& answer : cluster.Step([&](int64_t) { return MakeCreateLayer(layer); })) {
      EXPECT_TRUE(HasReason(answer->status, Reason::kRecipeUnsupported)) << answer->status;
      EXPECT_THAT(std::string(answer->status.message()), testing::HasSubstr(recipe));
    }
  }
  LayerConfig layer = SmallLayer();
  layer.recipe = "f32";
  cluster.CreateReadyLayer(layer);
  cluster.ExpectWorks();
}

}  // namespace
}  // namespace expertd::engine
