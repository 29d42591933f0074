// Validation of step operations: every field wrong once, with its exact reason and path.
#include "server/engine/step_validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "base/error.h"
#include "tests/server/engine/step_inputs.h"

namespace expertd::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

LayerInfo Ready(LayerConfig config = SmallLayer()) {
  LayerInfo info;
  info.layer_id = "layer";
  info.config = WithDefaults(config);
  info.state = LayerState::kReady;
  info.weights_version = 1;
  return info;
}

LayerConfig Routed() {
  LayerConfig config = SmallLayer();
  config.router.kind = RouterKind::kSoftmax;
  return config;
}

std::vector<std::string> Paths(const absl::Status& status) {
  std::vector<std::string> paths;
  for (const FieldViolation& violation : DetailOf(status).violations) {
    paths.push_back(violation.path);
  }
  return paths;
}

void ExpectOne(const absl::Status& status, Reason reason, const std::string& path,
               const std::string& text) {
  EXPECT_EQ(ReasonOf(status), reason) << status;
  EXPECT_THAT(Paths(status), ElementsAre(path)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

// A handle with the counts that validation reads.
class FakeHandle final : public EpHandle {
 public:
  FakeHandle() { counts_.total = 6; }
  const RecvCounts& counts() const override { return counts_; }
  int64_t tokens() const override { return 2; }
  int64_t top_k() const override { return 2; }
  int64_t alignment() const override { return 1; }
  const std::vector<uint8_t>& dropped_routes() const override { return dropped_; }

 private:
  RecvCounts counts_;
  std::vector<uint8_t> dropped_;
};

struct ForwardCase {
  std::function<void(ForwardOp&)> break_it;
  Reason reason;
  std::string path;
  std::string text;
};

TEST(ValidateForwardTest, AGoodRequestPassesAlsoWithoutTokens) {
  for (int64_t tokens : {0, 1, 16}) {
    EXPECT_TRUE(
        ValidateForward(*MakeForward(GlobalRows(0, tokens), true), Ready(), SmallGroup(2)).ok());
  }
}

TEST(ValidateForwardTest, EveryFieldThatIsWrongIsNamed) {
  const std::vector<ForwardCase> cases = {
      {[](ForwardOp& op) { op.tokens = {}; }, Reason::kShapeMismatch, "tokens", "got nothing"},
      {[](ForwardOp& op) { op.tokens.dtype = DType::kBF16; }, Reason::kDtypeUnsupported,
       "tokens.dtype", "got DTYPE_BF16, need DTYPE_F32"},
      {[](ForwardOp& op) {
         op.tokens.shape = {2, 7};
       },
       Reason::kShapeMismatch, "tokens.shape[1]", "got 7, need 8"},
      {[](ForwardOp& op) { op.topk_ids = {}; }, Reason::kShapeMismatch, "topk.topk_ids",
       "got nothing, need [2,2]"},
      {[](ForwardOp& op) { op.topk_ids.dtype = DType::kF32; }, Reason::kDtypeUnsupported,
       "topk.topk_ids.dtype", "got DTYPE_F32, need DTYPE_I32 or DTYPE_I64"},
      {[](ForwardOp& op) {
         op.topk_ids.shape = {3, 2};
       },
       Reason::kShapeMismatch, "topk.topk_ids.shape[0]", "got 3, need 2"},
      {[](ForwardOp& op) { op.topk_ids.shape = {4}; }, Reason::kShapeMismatch,
       "topk.topk_ids.shape", "got [4], need 2 dimensions"},
      {[](ForwardOp& op) { op.topk_weights.dtype = DType::kF16; }, Reason::kDtypeUnsupported,
       "topk.topk_weights.dtype", "got DTYPE_F16, need DTYPE_F32"},
      {[](ForwardOp& op) {
         op.topk_weights.shape = {2, 1};
       },
       Reason::kShapeMismatch, "topk.topk_weights.shape[1]", "got 1, need 2"},
      {[](ForwardOp& op) { op.routing = RoutingSource::kLogits; }, Reason::kConfigInvalid,
       "router_logits", "the layer has no router"},
      {[](ForwardOp& op) { op.routing = RoutingSource::kLayerRouter; }, Reason::kConfigInvalid,
       "layer_router", "the layer has no router weights"},
  };
  for (const ForwardCase& c : cases) {
    auto op = MakeForward(GlobalRows(0, 2));
    c.break_it(*op);
    // Without tokens nothing says how many rows the routing needs: only the first path is certain.
    const absl::Status status = ValidateForward(*op, Ready(), SmallGroup(2));
    if (c.path == "tokens") {
      EXPECT_EQ(ReasonOf(status), c.reason);
      EXPECT_EQ(Paths(status).at(0), c.path);
      continue;
    }
    ExpectOne(status, c.reason, c.path, c.text);
  }
}

TEST(ValidateForwardTest, TokensOverTheGroupsLimitAreRefusedWithBothNumbers) {
  ExpectOne(ValidateForward(*MakeForward(GlobalRows(0, 17)), Ready(), SmallGroup(2)),
            Reason::kTokensOverLimit, "tokens.shape[0]",
            "got 17 tokens, need at most max_tokens_per_rank 16");
}

TEST(ValidateForwardTest, SeveralViolationsAreReportedTogether) {
  auto op = MakeForward(GlobalRows(0, 2));
  op->tokens.dtype = DType::kF16;
  op->tokens.shape = {2, 9};
  op->topk_weights.shape = {2, 3};
  EXPECT_THAT(Paths(ValidateForward(*op, Ready(), SmallGroup(2))),
              ElementsAre("tokens.dtype", "tokens.shape[1]", "topk.topk_weights.shape[1]"));
}

TEST(ValidateForwardTest, ExpertIdsOutOfRangeAreNamedByPosition) {
  for (int32_t id : {8, -2, INT32_MAX, INT32_MIN}) {
    ForwardInputs inputs = GlobalRows(0, 3);
    inputs.ids[5] = id;
    ExpectOne(ValidateForward(*MakeForward(inputs), Ready(), SmallGroup(2)), Reason::kExpertIdRange,
              "topk_ids[2,1]", "got " + std::to_string(id) + ", need -1 or 0..7");
  }
}

TEST(ValidateForwardTest, SixtyFourBitIdsAreNotTruncated) {
  auto op = MakeForward(GlobalRows(0, 1));
  const std::vector<int64_t> good = {3, -1};
  op->topk_ids = View(DType::kI64, {1, 2}, good);
  EXPECT_TRUE(ValidateForward(*op, Ready(), SmallGroup(2)).ok());
  const std::vector<int64_t> bad = {0, (int64_t{1} << 32) + 1};
  op->topk_ids = View(DType::kI64, {1, 2}, bad);
  ExpectOne(ValidateForward(*op, Ready(), SmallGroup(2)), Reason::kExpertIdRange, "topk_ids[0,1]",
            "got 4294967297");
}

TEST(ValidateForwardTest, AnExpertTwiceInOneTokenIsRefusedButNoRouteMayRepeat) {
  ForwardInputs inputs = GlobalRows(0, 2);
  inputs.ids = {-1, -1, 4, 4};
  ExpectOne(ValidateForward(*MakeForward(inputs), Ready(), SmallGroup(2)), Reason::kDuplicateExpert,
            "topk_ids[1,1]", "got expert 4 again");
}

TEST(ValidateForwardTest, WeightsMustBeFiniteWhereThereIsARoute) {
  ForwardInputs inputs = GlobalRows(0, 2);
  inputs.ids[1] = -1;
  inputs.weights[1] = kNan;
  EXPECT_TRUE(ValidateForward(*MakeForward(inputs), Ready(), SmallGroup(2)).ok());
  for (float value : {kNan, INFINITY, -INFINITY}) {
    inputs.weights[2] = value;
    ExpectOne(ValidateForward(*MakeForward(inputs), Ready(), SmallGroup(2)),
              Reason::kNonFiniteWeight, "topk_weights[1,0]", "need a finite value");
  }
}

TEST(ValidateForwardTest, ARequestWithEveryValueWrongGivesAShortAnswer) {
  ForwardInputs inputs = GlobalRows(0, 16);
  for (int32_t& id : inputs.ids) id = 99;
  const absl::Status status = ValidateForward(*MakeForward(inputs), Ready(), SmallGroup(2));
  EXPECT_LE(Paths(status).size(), 9u);
  EXPECT_LT(status.message().size(), 2048u);
}

TEST(ValidateForwardTest, LogitsAreCheckedLikeWeights) {
  auto op = MakeForward(GlobalRows(0, 2));
  std::vector<float> logits(16, 0.5f);
  op->routing = RoutingSource::kLogits;
  op->router_logits = View(DType::kF32, {2, 8}, logits);
  EXPECT_TRUE(ValidateForward(*op, Ready(Routed()), SmallGroup(2)).ok());
  logits[11] = kNan;
  ExpectOne(ValidateForward(*op, Ready(Routed()), SmallGroup(2)), Reason::kNonFiniteWeight,
            "router_logits[1,3]", "need a finite value");
  op->router_logits.shape = {2, 4};
  ExpectOne(ValidateForward(*op, Ready(Routed()), SmallGroup(2)), Reason::kShapeMismatch,
            "router_logits.shape[1]", "got 4, need 8");
}

TEST(ValidateForwardTest, LayersWithoutUsableWeightsNeedRestore) {
  LayerInfo info = Ready();
  info.state = LayerState::kCreated;
  const auto op = MakeForward(GlobalRows(0, 1));
  EXPECT_THAT(std::string(ValidateForward(*op, info, SmallGroup(2)).message()),
              HasSubstr("InitializeWeights or LoadWeights first"));
  info.state = LayerState::kNeedsRestore;
  info.reason = "rank 1 does not have it";
  const absl::Status status = ValidateForward(*op, info, SmallGroup(2));
  EXPECT_EQ(ReasonOf(status), Reason::kLayerNeedsRestore);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 does not have it"));
}

TEST(ValidateForwardTest, AFrozenLayerKeepsNoTickets) {
  LayerInfo info = Ready();
  info.frozen = true;
  EXPECT_TRUE(ValidateForward(*MakeForward(GlobalRows(0, 1)), info, SmallGroup(2)).ok());
  ExpectOne(ValidateForward(*MakeForward(GlobalRows(0, 1), true), info, SmallGroup(2)),
            Reason::kConfigInvalid, "keep_for_backward", "the layer is frozen");
}

TEST(ValidateBackwardTest, TheGradientHasTheShapeOfItsForward) {
  EXPECT_TRUE(ValidateBackward(*MakeBackward(1, 2), Ready(), 2).ok());
  EXPECT_TRUE(ValidateBackward(*MakeBackward(1, 0), Ready(), 0).ok());
  ExpectOne(ValidateBackward(*MakeBackward(1, 3), Ready(), 2), Reason::kShapeMismatch,
            "output_gradient.shape[0]", "got 3, need 2");
  auto op = MakeBackward(1, 2);
  op->output_gradient.dtype = DType::kF16;
  ExpectOne(ValidateBackward(*op, Ready(), 2), Reason::kDtypeUnsupported, "output_gradient.dtype",
            "got DTYPE_F16");
  op = MakeBackward(1, 2);
  op->aux_loss_gradient = std::nan("");
  ExpectOne(ValidateBackward(*op, Ready(), 2), Reason::kNonFiniteWeight, "aux_loss_gradient",
            "need a finite value");
}

TEST(ValidatePrimitivesTest, PrepareChecksShapeLimitAndIds) {
  PrepareOp op;
  std::vector<int32_t> ids = {0, 1, 2, 3};
  op.topk_ids = View(DType::kI32, {2, 2}, ids);
  EXPECT_TRUE(ValidatePrepare(op, Ready(), SmallGroup(2)).ok());
  ids[3] = 8;
  ExpectOne(ValidatePrepare(op, Ready(), SmallGroup(2)), Reason::kExpertIdRange, "topk_ids[1,1]",
            "got 8");
  op.topk_ids.shape = {4, 1};
  ExpectOne(ValidatePrepare(op, Ready(), SmallGroup(2)), Reason::kShapeMismatch,
            "topk_ids.shape[1]", "got 1, need 2");
  op.topk_ids.shape = {17, 2};
  ExpectOne(ValidatePrepare(op, Ready(), SmallGroup(2)), Reason::kTokensOverLimit,
            "topk_ids.shape[0]", "got 17");
}

TEST(ValidatePrimitivesTest, TheOthersFollowTheirHandle) {
  const LayerConfig layer = WithDefaults(SmallLayer());
  const FakeHandle handle;
  const std::vector<float> values(6 * 8);
  const TensorInput tokens = View(DType::kF32, {2, 8}, values);
  const TensorInput rows = View(DType::kF32, {6, 8}, values);
  const TensorInput slots = View(DType::kF32, {6}, values);
  const TensorInput short_slots = View(DType::kF32, {5}, values);
  DispatchOp dispatch;
  dispatch.tokens = tokens;
  dispatch.topk_weights = View(DType::kF32, {2, 2}, values);
  EXPECT_TRUE(ValidateDispatch(dispatch, layer, handle).ok());
  dispatch.topk_weights = {};
  ExpectOne(ValidateDispatch(dispatch, layer, handle), Reason::kShapeMismatch, "topk_weights",
            "got nothing");
  CombineOp combine;
  combine.expert_output = rows;
  EXPECT_TRUE(ValidateCombine(combine, layer, handle).ok());
  combine.slot_weights = short_slots;
  ExpectOne(ValidateCombine(combine, layer, handle), Reason::kShapeMismatch,
            "slot_weights.shape[0]", "got 5, need 6");
  combine.slot_weights = slots;
  combine.expert_output = tokens;
  ExpectOne(ValidateCombine(combine, layer, handle), Reason::kShapeMismatch,
            "expert_output.shape[0]", "got 2, need 6");
  DispatchBackwardOp dispatch_backward;
  dispatch_backward.recv_tokens_gradient = rows;
  EXPECT_TRUE(ValidateDispatchBackward(dispatch_backward, layer, handle).ok());
  dispatch_backward.recv_weights_gradient = short_slots;
  ExpectOne(ValidateDispatchBackward(dispatch_backward, layer, handle), Reason::kShapeMismatch,
            "recv_weights_gradient.shape[0]", "got 5, need 6");
  CombineBackwardOp combine_backward;
  combine_backward.output_gradient = tokens;
  EXPECT_TRUE(ValidateCombineBackward(combine_backward, layer, handle).ok());
  combine_backward.slot_weights = short_slots;
  ExpectOne(ValidateCombineBackward(combine_backward, layer, handle), Reason::kShapeMismatch,
            "slot_weights.shape[0]", "got 5, need 6");
}

TEST(ValidateApplyTest, TheVersionMayBeTheExpectedOneOrOneAhead) {
  LayerInfo info = Ready();
  info.weights_version = 5;
  EXPECT_TRUE(ValidateApply(*MakeApply(5), info).ok());
  EXPECT_TRUE(ValidateApply(*MakeApply(4), info).ok());
  for (uint64_t version : {uint64_t{3}, uint64_t{6}, UINT64_MAX}) {
    EXPECT_EQ(ReasonOf(ValidateApply(*MakeApply(version), info)), Reason::kVersionBehind);
  }
}

TEST(ValidateApplyTest, NumbersAndLayerMustFit) {
  for (double value : {-1.0, std::nan(""), static_cast<double>(INFINITY)}) {
    ExpectOne(ValidateApply(*MakeApply(1, value), Ready()), Reason::kConfigInvalid, "learning_rate",
              "need a finite value");
    auto op = MakeApply(1);
    op->gradient_scale = value;
    ExpectOne(ValidateApply(*op, Ready()), Reason::kConfigInvalid, "gradient_scale",
              "need a finite value");
  }
  LayerInfo info = Ready();
  info.frozen = true;
  info.config.optimizer.kind = OptimizerKind::kNone;
  EXPECT_THAT(Paths(ValidateApply(*MakeApply(1), info)), ElementsAre("layer_id", "layer_id"));
  info = Ready();
  info.state = LayerState::kCreated;
  EXPECT_EQ(ReasonOf(ValidateApply(*MakeApply(1), info)), Reason::kLayerNeedsRestore);
}

TEST(ValidateLayerIdTest, TakesNamesAndRefusesTheRest) {
  for (const std::string& good :
       {std::string("a"), std::string("model/layer.3_b-C"), std::string(128, 'x')}) {
    EXPECT_TRUE(ValidateLayerId(good).ok()) << good;
  }
  for (const std::string& bad :
       {std::string(), std::string(129, 'x'), std::string("a b"), std::string("a\n"),
        std::string("a\0b", 3), std::string("\xc3\xa4")}) {
    ExpectOne(ValidateLayerId(bad), Reason::kConfigInvalid, "layer_id", "need 1..128");
  }
}

}  // namespace
}  // namespace expertd::engine
