// The primitive steps and the routers through the whole engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

template <typename Op>
const Op& As(const Answer& answer) {
  return static_cast<const Op&>(*answer);
}

// An operation whose inputs live in one vector that it owns.
template <typename Op>
std::shared_ptr<Op> WithFloats(std::shared_ptr<std::vector<float>> values) {
  auto op = std::make_shared<Op>();
  op->keep_alive = std::move(values);
  return op;
}

std::shared_ptr<PrepareOp> MakePrepare(const ForwardInputs& inputs) {
  auto op = std::make_shared<PrepareOp>();
  auto owned = std::make_shared<ForwardInputs>(inputs);
  op->layer_id = "layer";
  op->topk_ids = View(DType::kI32, {static_cast<int64_t>(inputs.ids.size() / 2), 2}, owned->ids);
  op->keep_alive = owned;
  return op;
}

// A formed group of two with a layer, rows of both ranks and the handles of their Prepare.
class EnginePrimitivesTest : public testing::Test {
 protected:
  EnginePrimitivesTest() {
    cluster_.Form();
    cluster_.CreateReadyLayer();
    for (const Answer& answer :
         cluster_.Good([](int64_t rank) { return MakePrepare(GlobalRows(rank * 3, 3)); })) {
      handles_.push_back(As<PrepareOp>(answer).handle);
      rows_.push_back(As<PrepareOp>(answer).total_rows);
    }
  }
  uint64_t Handle(int64_t rank) { return handles_[static_cast<size_t>(rank)]; }
  std::shared_ptr<Operation> MakeDispatch(int64_t rank) {
    auto op = std::make_shared<DispatchOp>();
    auto owned = std::make_shared<ForwardInputs>(GlobalRows(rank * 3, 3));
    op->handle = Handle(rank);
    op->tokens = View(DType::kF32, {3, 8}, owned->tokens);
    op->topk_weights = View(DType::kF32, {3, 2}, owned->weights);
    op->keep_alive = owned;
    return op;
  }

  Cluster cluster_{2};
  std::vector<uint64_t> handles_;
  std::vector<int64_t> rows_;
};

TEST_F(EnginePrimitivesTest, CombineOfDispatchedRowsIsTheWeightedSumOfTheToken) {
  EXPECT_EQ(rows_[0] + rows_[1], 2 * 3 * 2);
  const Answers dispatched = cluster_.Good([&](int64_t rank) { return MakeDispatch(rank); });
  const Answers combined = cluster_.Good([&](int64_t rank) {
    const auto& from = As<DispatchOp>(dispatched[static_cast<size_t>(rank)]);
    auto op = std::make_shared<CombineOp>();
    auto owned = std::make_shared<std::pair<std::vector<float>, std::vector<float>>>(
        Floats(from.recv_tokens), Floats(from.recv_weights));
    op->handle = Handle(rank);
    op->expert_output = View(DType::kF32, from.recv_tokens.shape, owned->first);
    op->slot_weights = View(DType::kF32, from.recv_weights.shape, owned->second);
    op->keep_alive = owned;
    return op;
  });
  for (int64_t rank : {0, 1}) {
    const ForwardInputs inputs = GlobalRows(rank * 3, 3);
    const std::vector<float> output =
        Floats(As<CombineOp>(combined[static_cast<size_t>(rank)]).output);
    ASSERT_EQ(output.size(), 24u);
    for (size_t i = 0; i < output.size(); ++i) {
      const float weight = inputs.weights[i / 8 * 2] + inputs.weights[i / 8 * 2 + 1];
      EXPECT_NEAR(output[i], weight * inputs.tokens[i], 1e-6f);
    }
  }
}

TEST_F(EnginePrimitivesTest, TheBackwardsAreExactCopies) {
  const Answers spread = cluster_.Good([&](int64_t rank) {
    auto values = std::make_shared<std::vector<float>>(GlobalRows(rank * 3, 3).tokens);
    auto op = WithFloats<CombineBackwardOp>(values);
    op->handle = Handle(rank);
    op->output_gradient = View(DType::kF32, {3, 8}, *values);
    return op;
  });
  const Answers gathered = cluster_.Good([&](int64_t rank) {
    const auto& from = As<CombineBackwardOp>(spread[static_cast<size_t>(rank)]);
    auto values = std::make_shared<std::vector<float>>(Floats(from.expert_output_gradient));
    auto op = WithFloats<DispatchBackwardOp>(values);
    op->handle = Handle(rank);
    op->recv_tokens_gradient = View(DType::kF32, from.expert_output_gradient.shape, *values);
    return op;
  });
  for (int64_t rank : {0, 1}) {
    const auto& op = As<DispatchBackwardOp>(gathered[static_cast<size_t>(rank)]);
    EXPECT_FALSE(op.topk_weights_gradient.present());
    std::vector<float> twice = GlobalRows(rank * 3, 3).tokens;
    for (float& value : twice) value *= 2;
    EXPECT_EQ(Floats(op.tokens_gradient), twice);
  }
}

TEST_F(EnginePrimitivesTest, WeightsGivenOnOneRankOnlyAreAConflict) {
  const auto combine = [&](int64_t rank) {
    const int64_t rows = rows_[static_cast<size_t>(rank)];
    auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(rows * 8), 1.0f);
    auto op = WithFloats<CombineOp>(values);
    op->handle = Handle(rank);
    op->expert_output = View(DType::kF32, {rows, 8}, *values);
    if (rank == 0) op->slot_weights = View(DType::kF32, {rows}, *values);
    return op;
  };
  for (const Answer& answer : cluster_.Step(combine)) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceConflict) << answer->status;
  }
  cluster_.ExpectWorks();
}

TEST_F(EnginePrimitivesTest, TwoHandlesAreAliveAtOnceAndMixingThemIsAConflict) {
  const Answers second =
      cluster_.Good([](int64_t rank) { return MakePrepare(GlobalRows(rank + 1, 3)); });
  cluster_.Good([&](int64_t rank) { return MakeDispatch(rank); });
  handles_[1] = As<PrepareOp>(second[1]).handle;  // rank 0 still speaks of the first Prepare
  for (const Answer& answer : cluster_.Step([&](int64_t rank) { return MakeDispatch(rank); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceConflict) << answer->status;
    EXPECT_THAT(std::string(answer->status.message()), testing::HasSubstr("forward_sequence"));
  }
  cluster_.ExpectWorks();
}

TEST_F(EnginePrimitivesTest, AHandleThatWasReleasedIsUnknown) {
  for (int64_t rank : {0, 1}) {
    auto promise = std::make_shared<std::promise<int64_t>>();
    cluster_.engine(rank).Release({}, {Handle(rank)},
                                  [promise](int64_t count) { promise->set_value(count); });
    EXPECT_EQ(Await(promise->get_future()), 1);
  }
  for (const Answer& answer : cluster_.Step([&](int64_t rank) { return MakeDispatch(rank); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kHandleUnknown);
  }
}

TEST_F(EnginePrimitivesTest, DeletingALayerEndsItsHandlesAndTickets) {
  const Answers kept =
      cluster_.Good([](int64_t rank) { return MakeForward(GlobalRows(rank, 1), true); });
  cluster_.Good([](int64_t) { return MakeLayerOp(OpKind::kDeleteLayer); });
  for (const Answer& answer : cluster_.Step([&](int64_t rank) { return MakeDispatch(rank); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kHandleUnknown);
  }
  for (const Answer& answer : cluster_.Step([&](int64_t rank) {
         return MakeBackward(As<ForwardOp>(kept[static_cast<size_t>(rank)]).ticket, 1);
       })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kTicketUnknown);
  }
  EXPECT_EQ(cluster_.engine(0).Counters().ticket_bytes, 0);
}

// A training step with the layer's own router; returns the router's gradient of every rank.
std::vector<std::vector<float>> RouterWeightsAfterAStep(int64_t world) {
  LayerConfig config = SmallLayer();
  config.router.kind = RouterKind::kSoftmax;
  config.router_on_server = true;
  config.aux_loss_coefficient = 0.5;
  Cluster cluster(world);
  cluster.Form();
  cluster.CreateReadyLayer(config);
  const int64_t rows = 8 / world;
  const Answers forward = cluster.Good([&](int64_t rank) {
    auto op = MakeForward(GlobalRows(rank * rows, rows), true);
    op->routing = RoutingSource::kLayerRouter;
    return op;
  });
  for (const Answer& answer : forward) {
    EXPECT_GT(As<ForwardOp>(answer).aux_loss, 0.0);
    EXPECT_EQ(As<ForwardOp>(answer).aux_loss, As<ForwardOp>(forward[0]).aux_loss);
    EXPECT_EQ(As<ForwardOp>(answer).used_topk_ids.shape, (std::vector<int64_t>{rows, 2}));
  }
  cluster.Good([&](int64_t rank) {
    auto values = std::make_shared<std::vector<float>>(GlobalRows(rank * rows, rows).tokens);
    auto op = MakeBackward(As<ForwardOp>(forward[static_cast<size_t>(rank)]).ticket, rows);
    op->output_gradient = View(DType::kF32, {rows, 8}, *values);
    op->aux_loss_gradient = 1;
    op->keep_alive = values;
    return op;
  });
  cluster.Good([](int64_t) { return MakeApply(1); });
  std::vector<std::vector<float>> weights;
  for (int64_t rank = 0; rank < world; ++rank) {
    weights.push_back(Floats(cluster.Parameter(rank, "router", ParameterKind::kMaster).tensor));
  }
  return weights;
}

TEST(EngineRouterTest, RouterWeightsStayTheSameOnAllRanksAndFollowTheWholeGroup) {
  const auto alone = RouterWeightsAfterAStep(1);
  const auto group = RouterWeightsAfterAStep(4);
  for (size_t rank = 1; rank < 4; ++rank) EXPECT_EQ(group[rank], group[0]);  // the same bits
  for (size_t i = 0; i < alone[0].size(); ++i) EXPECT_NEAR(group[0][i], alone[0][i], 1e-5f);
}

TEST(EngineRouterTest, LogitsGiveTheRoutingUsedAndTheirGradient) {
  LayerConfig config = SmallLayer();
  config.router.kind = RouterKind::kSoftmax;
  Cluster cluster(2);
  cluster.Form();
  cluster.CreateReadyLayer(config);
  const Answers forward = cluster.Good([&](int64_t) {
    auto op = MakeForward(GlobalRows(0, 1), true);
    auto owned = std::make_shared<std::pair<ForwardInputs, std::vector<float>>>(
        GlobalRows(0, 1), std::vector<float>{0, 5, 0, 0, 4, 0, 0, 0});
    op->routing = RoutingSource::kLogits;
    op->tokens = View(DType::kF32, {1, 8}, owned->first.tokens);
    op->router_logits = View(DType::kF32, {1, 8}, owned->second);
    op->keep_alive = owned;
    return op;
  });
  const std::string& ids = As<ForwardOp>(forward[0]).used_topk_ids.data;
  ASSERT_EQ(ids.size(), 16u);
  int64_t used[2];
  std::memcpy(used, ids.data(), sizeof(used));
  EXPECT_EQ(used[0], 1);
  EXPECT_EQ(used[1], 4);
  for (const Answer& answer : cluster.Good([&](int64_t rank) {
         return MakeBackward(As<ForwardOp>(forward[static_cast<size_t>(rank)]).ticket, 1);
       })) {
    EXPECT_EQ(As<BackwardOp>(answer).router_logits_gradient.shape, (std::vector<int64_t>{1, 8}));
    EXPECT_FALSE(As<BackwardOp>(answer).topk_weights_gradient.present());
  }
}

}  // namespace
}  // namespace expertd::engine
