// Tests of config conversion: round trips, and enum values that do not exist.
#include "server/rpc/convert_config.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "google/protobuf/text_format.h"

namespace expertd::rpc {
namespace {

using google::protobuf::TextFormat;
using google::protobuf::util::MessageDifferencer;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(TextFormat::ParseFromString(text, &message));
  return message;
}

// Every field set to something that is not its default.
constexpr char kGroup[] = R"(
  dp_size: 2 ep_size: 3 backend: "gloo" max_tokens_per_rank: 4 max_recv_rows_per_rank: 5
  max_hidden: 6 max_top_k: 7 max_experts: 8 max_token_dtype: DTYPE_BF16
  capacity_policy: CAPACITY_POLICY_DROP comm_sm_count: 9 base_timeout_ms: 10 kept_replies: 11
  ticket_memory_bytes: 12 sequence_window: 13)";
constexpr char kLayer[] = R"(
  expert_count: 1 hidden: 2 intermediate: 3 top_k: 4 activation: ACTIVATION_RELU2
  gate_up_bias: true down_bias: true alignment: 5 token_dtype: DTYPE_F16 weight_dtype: DTYPE_BF16
  recipe: "bf16" weighting: WEIGHTING_EARLY
  router { kind: ROUTER_KIND_SIGMOID softmax_before_topk: true groups: 6 kept_groups: 7
           scaling_factor: 8.5 selection_bias: true on_server: true }
  aux_loss_coefficient: 0.5
  optimizer { kind: OPTIMIZER_KIND_ADAMW momentum: 0.1 beta1: 0.2 beta2: 0.3 epsilon: 0.4
              weight_decay: 0.5 max_gradient_norm: 0.6 })";

// That a text sets every field of its message: a new field must be added here, too.
void ExpectAllFieldsSet(const google::protobuf::Message& message) {
  std::vector<const google::protobuf::FieldDescriptor*> set;
  message.GetReflection()->ListFields(message, &set);
  EXPECT_EQ(static_cast<int>(set.size()), message.GetDescriptor()->field_count())
      << message.ShortDebugString();
}

TEST(ConvertConfigTest, GroupConfigRoundTrip) {
  const auto config = Parse<v1::GroupConfig>(kGroup);
  ExpectAllFieldsSet(config);
  Violations violations;
  v1::GroupConfig back;
  ToProto(FromProto(config, "config", &violations), &back);
  EXPECT_TRUE(violations.empty());
  EXPECT_TRUE(MessageDifferencer::Equals(config, back)) << back.ShortDebugString();
}

TEST(ConvertConfigTest, LayerConfigRoundTrip) {
  const auto config = Parse<v1::LayerConfig>(kLayer);
  ExpectAllFieldsSet(config);
  ExpectAllFieldsSet(config.router());
  ExpectAllFieldsSet(config.optimizer());
  Violations violations;
  v1::LayerConfig back;
  ToProto(FromProto(config, "config", &violations), &back);
  EXPECT_TRUE(violations.empty());
  EXPECT_TRUE(MessageDifferencer::Equals(config, back)) << back.ShortDebugString();
}

TEST(ConvertConfigTest, UnspecifiedEnumsMeanTheirDefault) {
  Violations violations;
  const engine::LayerConfig layer = FromProto(v1::LayerConfig(), "config", &violations);
  EXPECT_EQ(layer.activation, Activation::kSilu);
  EXPECT_EQ(layer.weighting, Weighting::kLate);
  EXPECT_EQ(layer.router.kind, RouterKind::kNone);
  EXPECT_EQ(layer.optimizer.kind, engine::OptimizerKind::kNone);
  EXPECT_EQ(layer.token_dtype, DType::kInvalid);
  EXPECT_EQ(FromProto(v1::GroupConfig(), "config", &violations).capacity_policy,
            CapacityPolicy::kRefuse);
  EXPECT_TRUE(violations.empty());
}

TEST(ConvertConfigTest, EveryUnknownEnumValueIsReportedWithItsPath) {
  v1::LayerConfig config;
  config.set_activation(static_cast<v1::Activation>(77));
  config.set_token_dtype(static_cast<v1::DType>(-1));
  config.set_weight_dtype(static_cast<v1::DType>(78));
  config.set_weighting(static_cast<v1::Weighting>(79));
  config.mutable_router()->set_kind(static_cast<v1::RouterKind>(80));
  config.mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(81));
  Violations violations;
  FromProto(config, "config", &violations);
  const absl::Status status = violations.ToStatus("x");
  EXPECT_EQ(ReasonOf(status), Reason::kConfigInvalid);
  const std::vector<FieldViolation> found = DetailOf(status).violations;
  ASSERT_EQ(found.size(), 6u);
  EXPECT_EQ(found[0].path, "config.activation");
  EXPECT_EQ(found[0].description, "got 77, which the enum does not have");
  EXPECT_EQ(found[1].path, "config.token_dtype");
  EXPECT_EQ(found[2].path, "config.weight_dtype");
  EXPECT_EQ(found[3].path, "config.weighting");
  EXPECT_EQ(found[4].path, "config.router.kind");
  EXPECT_EQ(found[5].path, "config.optimizer.kind");
}

}  // namespace
}  // namespace expertd::rpc
