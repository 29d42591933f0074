// Every rule of group, layer and optimizer configs, violated alone and together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "base/error.h"
#include "server/engine/config.h"
#include "tests/server/engine/step_inputs.h"

namespace expertd::engine {
namespace {

constexpr int64_t kLimit = int64_t{64} << 20;
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
const double kNan = std::nan("");
const double kInf = std::numeric_limits<double>::infinity();

GroupConfig Group() { return WithDefaults(SmallGroup(2), "loopback"); }
LayerConfig Layer() { return WithDefaults(SmallLayer()); }

// A layer with a softmax router that lives on the server.
LayerConfig Routed() {
  LayerConfig config = SmallLayer();
  config.router.kind = RouterKind::kSoftmax;
  config.router_on_server = true;
  return WithDefaults(config);
}

std::vector<std::string> Paths(const absl::Status& status) {
  std::vector<std::string> paths;
  for (const FieldViolation& violation : DetailOf(status).violations) {
    paths.push_back(violation.path);
    EXPECT_THAT(violation.description, testing::HasSubstr("got "));
  }
  return paths;
}

template <typename Config>
struct Rule {
  std::string path;
  std::function<void(Config&)> break_it;
};

TEST(GroupValidationTest, AGoodConfigPasses) {
  EXPECT_TRUE(ValidateGroupConfig(Group(), kLimit).ok());
}

TEST(GroupValidationTest, EveryRuleIsNamedByItsPath) {
  using C = GroupConfig;
  const std::vector<Rule<C>> rules = {
      {"dp_size", [](C& c) { c.dp_size = 0; }},
      {"ep_size", [](C& c) { c.ep_size = 0; }},
      {"max_tokens_per_rank", [](C& c) { c.max_tokens_per_rank = 0; }},
      {"max_tokens_per_rank", [](C& c) { c.max_tokens_per_rank = kMin; }},
      {"max_recv_rows_per_rank", [](C& c) { c.max_recv_rows_per_rank = -1; }},
      {"max_hidden", [](C& c) { c.max_hidden = 0; }},
      {"max_top_k", [](C& c) { c.max_top_k = 0; }},
      {"max_top_k", [](C& c) { c.max_top_k = 33; }},
      {"max_experts", [](C& c) { c.max_experts = 0; }},
      {"max_experts", [](C& c) { c.max_experts = 9; }},
      {"max_token_dtype", [](C& c) { c.max_token_dtype = DType::kI32; }},
      {"max_token_dtype", [](C& c) { c.max_token_dtype = DType::kF8E4M3FN; }},
      {"comm_sm_count", [](C& c) { c.comm_sm_count = -1; }},
      {"base_timeout_ms", [](C& c) { c.base_timeout_ms = 9; }},
      {"base_timeout_ms", [](C& c) { c.base_timeout_ms = 3600001; }},
      {"kept_replies", [](C& c) { c.kept_replies = 65; }},
      {"ticket_memory_bytes", [](C& c) { c.ticket_memory_bytes = -1; }},
      {"sequence_window", [](C& c) { c.sequence_window = 4097; }},
  };
  for (const Rule<C>& rule : rules) {
    GroupConfig config = Group();
    rule.break_it(config);
    const absl::Status status = ValidateGroupConfig(config, kLimit);
    EXPECT_EQ(ReasonOf(status), Reason::kConfigInvalid);
    EXPECT_THAT(Paths(status), testing::ElementsAre(rule.path)) << status;
  }
}

TEST(GroupValidationTest, AllViolationsAreReportedAtOnce) {
  GroupConfig config = Group();
  config.max_hidden = -5;
  config.max_top_k = 99;
  config.base_timeout_ms = 1;
  const absl::Status status = ValidateGroupConfig(config, kLimit);
  EXPECT_THAT(Paths(status), testing::ElementsAre("max_hidden", "max_top_k", "base_timeout_ms"));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("got 99, need 1..32"));
}

TEST(GroupValidationTest, TooManyRanksAndDataParallelismAreRefused) {
  GroupConfig config = Group();
  config.ep_size = 4097;
  EXPECT_THAT(Paths(ValidateGroupConfig(config, kLimit)), testing::Contains("ep_size"));
  config = Group();
  config.dp_size = 2;
  EXPECT_EQ(ReasonOf(ValidateGroupConfig(config, kLimit)), Reason::kNotImplemented);
}

TEST(GroupValidationTest, MessagesMustFitTwiceIntoTheReceiveLimit) {
  const int64_t message = *MaxMessageBytes(SizesOf(Group()));
  EXPECT_TRUE(ValidateGroupConfig(Group(), 2 * message).ok());
  const absl::Status status = ValidateGroupConfig(Group(), 2 * message - 1);
  EXPECT_EQ(ReasonOf(status), Reason::kConfigInvalid);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("--max_receive_message_bytes"));
}

TEST(GroupValidationTest, SizesThatOverflowAreRefused) {
  for (auto change : {+[](GroupConfig& c) { c.max_tokens_per_rank = kMax; },
                      +[](GroupConfig& c) { c.max_hidden = kMax; },
                      +[](GroupConfig& c) { c.max_experts = kMax - 1; },
                      +[](GroupConfig& c) { c.max_recv_rows_per_rank = kMax; }}) {
    GroupConfig config = SmallGroup(2);
    change(config);
    EXPECT_EQ(ReasonOf(ValidateGroupConfig(WithDefaults(config, "loopback"), 2147483647)),
              Reason::kConfigInvalid);
  }
}

TEST(LayerValidationTest, GoodConfigsPass) {
  EXPECT_TRUE(ValidateLayerConfig(Layer(), Group(), false).ok());
  EXPECT_TRUE(ValidateLayerConfig(Layer(), Group(), true).ok());
  EXPECT_TRUE(ValidateLayerConfig(Routed(), Group(), false).ok());
  LayerConfig grouped = Routed();
  grouped.router.groups = 4;
  grouped.router.kept_groups = 2;
  EXPECT_TRUE(ValidateLayerConfig(grouped, Group(), false).ok());
  LayerConfig sigmoid = Routed();
  sigmoid.router.kind = RouterKind::kSigmoid;
  sigmoid.router.selection_bias = true;
  sigmoid.aux_loss_coefficient = 0.01;
  EXPECT_TRUE(ValidateLayerConfig(sigmoid, Group(), false).ok());
}

TEST(LayerValidationTest, EveryRuleIsNamedByItsPath) {
  using C = LayerConfig;
  const std::vector<Rule<C>> rules = {
      {"expert_count", [](C& c) { c.expert_count = 10; }},
      {"expert_count", [](C& c) { c.expert_count = 7; }},
      {"hidden", [](C& c) { c.hidden = 0; }},
      {"hidden", [](C& c) { c.hidden = 9; }},
      {"hidden", [](C& c) { c.hidden = kMax; }},
      {"hidden", [](C& c) { c.hidden = kMin; }},
      {"intermediate", [](C& c) { c.intermediate = 0; }},
      {"top_k", [](C& c) { c.top_k = 0; }},
      {"top_k", [](C& c) { c.top_k = 3; }},
      {"alignment", [](C& c) { c.alignment = 3; }},
      {"alignment", [](C& c) { c.alignment = 256; }},
      {"alignment", [](C& c) { c.alignment = -1; }},
      {"alignment", [](C& c) { c.alignment = kMin; }},
      {"token_dtype", [](C& c) { c.token_dtype = DType::kInvalid; }},
      {"weight_dtype", [](C& c) { c.weight_dtype = DType::kI32; }},
      {"router.on_server", [](C& c) { c.router_on_server = true; }},
      {"router.softmax_before_topk", [](C& c) { c.router.softmax_before_topk = true; }},
      {"router.scaling_factor", [](C& c) { c.router.scaling_factor = -1; }},
      {"router.scaling_factor", [](C& c) { c.router.scaling_factor = kNan; }},
      {"aux_loss_coefficient", [](C& c) { c.aux_loss_coefficient = 0.5; }},
      {"router.groups", [](C& c) { c.router.groups = -1; }},
      {"router.groups", [](C& c) { c.router.groups = 3; }},
      {"router.kept_groups", [](C& c) { c.router.kept_groups = 2; }},
      {"router.kept_groups", [](C& c) { c.router.kept_groups = kMax; }},
      {"optimizer.weight_decay", [](C& c) { c.optimizer.weight_decay = -1; }},
      {"optimizer.max_gradient_norm", [](C& c) { c.optimizer.max_gradient_norm = kInf; }},
      {"optimizer.momentum", [](C& c) { c.optimizer.momentum = 1; }},
      {"optimizer.momentum", [](C& c) { c.optimizer.momentum = kNan; }},
  };
  for (const Rule<C>& rule : rules) {
    LayerConfig config = Layer();
    rule.break_it(config);
    const absl::Status status = ValidateLayerConfig(config, Group(), false);
    EXPECT_EQ(ReasonOf(status), Reason::kConfigInvalid);
    EXPECT_THAT(Paths(status), testing::ElementsAre(rule.path)) << status;
  }
}

TEST(LayerValidationTest, EveryRuleOfARouterIsNamedByItsPath) {
  using C = LayerConfig;
  const std::vector<Rule<C>> rules = {
      {"router.selection_bias", [](C& c) { c.router.selection_bias = true; }},
      {"router.selection_bias",
       [](C& c) {
         c.router.kind = RouterKind::kSigmoid;
         c.router.selection_bias = true;
         c.router_on_server = false;
       }},
      {"router.softmax_before_topk",
       [](C& c) {
         c.router.kind = RouterKind::kSigmoid;
         c.router.softmax_before_topk = true;
       }},
      {"aux_loss_coefficient", [](C& c) { c.aux_loss_coefficient = kNan; }},
      {"router.kept_groups",  // two groups kept cannot share one choice
       [](C& c) {
         c.top_k = 1;
         c.router.groups = 4;
         c.router.kept_groups = 2;
       }},
      {"router.kept_groups",  // one expert in the kept group, two wanted
       [](C& c) {
         c.router.groups = 8;
         c.router.kept_groups = 1;
       }},
  };
  for (const Rule<C>& rule : rules) {
    LayerConfig config = Routed();
    rule.break_it(config);
    EXPECT_THAT(Paths(ValidateLayerConfig(config, Group(), false)),
                testing::ElementsAre(rule.path));
  }
}

TEST(LayerValidationTest, TokensMayNotBeWiderThanTheGroups) {
  GroupConfig group = Group();
  group.max_token_dtype = DType::kBF16;
  EXPECT_THAT(Paths(ValidateLayerConfig(Layer(), group, false)),
              testing::ElementsAre("token_dtype"));
}

TEST(LayerValidationTest, RowsOnGpusAreMultiplesOfSixteenBytes) {
  LayerConfig config = Layer();
  config.hidden = 7;
  EXPECT_TRUE(ValidateLayerConfig(config, Group(), false).ok());
  EXPECT_THAT(Paths(ValidateLayerConfig(config, Group(), true)), testing::ElementsAre("hidden"));
}

TEST(LayerValidationTest, AllViolationsAreReportedAtOnce) {
  LayerConfig config = Layer();
  config.expert_count = 16;
  config.top_k = 3;
  config.alignment = 5;
  config.optimizer.momentum = 2;
  EXPECT_THAT(
      Paths(ValidateLayerConfig(config, Group(), false)),
      testing::UnorderedElementsAre("expert_count", "top_k", "alignment", "optimizer.momentum"));
}

TEST(OptimizerValidationTest, AdamWNeedsItsBetasAndEpsilon) {
  OptimizerConfig good;
  good.kind = OptimizerKind::kAdamW;
  good = WithDefaults(good);
  EXPECT_TRUE(ValidateOptimizerConfig(good).ok());
  using C = OptimizerConfig;
  const std::vector<Rule<C>> rules = {
      {"optimizer.beta1", [](C& c) { c.beta1 = 1; }},
      {"optimizer.beta1", [](C& c) { c.beta1 = kNan; }},
      {"optimizer.beta2", [](C& c) { c.beta2 = -0.1; }},
      {"optimizer.epsilon", [](C& c) { c.epsilon = -1; }},
      {"optimizer.epsilon", [](C& c) { c.epsilon = kInf; }},
      {"optimizer.weight_decay", [](C& c) { c.weight_decay = kNan; }},
  };
  for (const Rule<C>& rule : rules) {
    OptimizerConfig config = good;
    rule.break_it(config);
    EXPECT_THAT(Paths(ValidateOptimizerConfig(config)), testing::ElementsAre(rule.path));
  }
}

}  // namespace
}  // namespace expertd::engine
