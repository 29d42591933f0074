// Defaults, comparison, encoding and fingerprints of configs.
#include "server/engine/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "base/error.h"
#include "tests/server/engine/step_inputs.h"
#include "tests/server/engine/test_seed.h"

namespace expertd::engine {
namespace {

using testing::HasSubstr;

TEST(DefaultsTest, AGroupGetsEveryDefaultOnceAndKeepsWhatIsGiven) {
  GroupConfig config = SmallGroup(2);
  config.dp_size = 0;
  config.backend.clear();
  config.base_timeout_ms = 0;
  config.max_token_dtype = DType::kInvalid;
  const GroupConfig filled = WithDefaults(config, "gloo");
  EXPECT_EQ(filled.dp_size, 1);
  EXPECT_EQ(filled.backend, "gloo");
  EXPECT_EQ(filled.base_timeout_ms, 30000);
  EXPECT_EQ(filled.kept_replies, 2);
  EXPECT_EQ(filled.ticket_memory_bytes, int64_t{1} << 30);
  EXPECT_EQ(filled.sequence_window, 64);
  EXPECT_EQ(filled.max_token_dtype, DType::kF32);
  EXPECT_EQ(filled.max_recv_rows_per_rank, 2 * 16 * 2 + 4 * 127);
  EXPECT_EQ(FieldsOf(WithDefaults(filled, "other")), FieldsOf(filled));

  GroupConfig given = SmallGroup(2);
  given.max_recv_rows_per_rank = 5;
  given.kept_replies = 9;
  EXPECT_EQ(WithDefaults(given, "gloo").max_recv_rows_per_rank, 5);
  EXPECT_EQ(WithDefaults(given, "gloo").kept_replies, 9);
  EXPECT_EQ(WithDefaults(given, "gloo").backend, "loopback");
}

TEST(DefaultsTest, ALayerGetsItsRoutersSizesAndTheUsualAdamW) {
  LayerConfig config = SmallLayer();
  config.optimizer.kind = OptimizerKind::kAdamW;
  const LayerConfig filled = WithDefaults(config);
  EXPECT_EQ(filled.alignment, 1);
  EXPECT_EQ(filled.recipe, "bf16");
  EXPECT_EQ(filled.router.expert_count, 8);
  EXPECT_EQ(filled.router.top_k, 2);
  EXPECT_EQ(filled.router.groups, 1);
  EXPECT_EQ(filled.router.kept_groups, 1);
  EXPECT_EQ(filled.router.scaling_factor, 1.0);
  EXPECT_EQ(filled.optimizer.beta1, 0.9);
  EXPECT_EQ(filled.optimizer.beta2, 0.999);
  EXPECT_EQ(filled.optimizer.epsilon, 1e-8);
  EXPECT_EQ(WithDefaults(SmallLayer()).optimizer.beta1, 0);  // SGD has none
}

// Every member of a config changes exactly one field: none is left out of comparison at join.
template <typename Config>
void ExpectFieldForEach(const Config& base,
                        const std::vector<std::function<void(Config&)>>& changes) {
  const std::vector<ConfigField> fields = FieldsOf(base);
  EXPECT_EQ(fields.size(), changes.size());
  std::set<std::string> changed;
  for (size_t i = 0; i < changes.size(); ++i) {
    Config config = base;
    changes[i](config);
    const std::vector<ConfigField> other = FieldsOf(config);
    ASSERT_EQ(other.size(), fields.size());
    std::vector<std::string> names;
    for (size_t f = 0; f < fields.size(); ++f) {
      EXPECT_EQ(other[f].name, fields[f].name);
      if (other[f] != fields[f]) names.push_back(fields[f].name);
    }
    ASSERT_EQ(names.size(), 1u) << "change " << i;
    EXPECT_TRUE(changed.insert(names[0]).second) << names[0];
  }
}

TEST(FieldsTest, EveryMemberOfAGroupConfigIsAField) {
  using C = GroupConfig;
  ExpectFieldForEach<C>(
      SmallGroup(2),
      {[](C& c) { c.dp_size = 7; }, [](C& c) { c.ep_size = 7; }, [](C& c) { c.backend = "x"; },
       [](C& c) { c.max_tokens_per_rank = 7; }, [](C& c) { c.max_recv_rows_per_rank = 7; },
       [](C& c) { c.max_hidden = 7; }, [](C& c) { c.max_top_k = 7; },
       [](C& c) { c.max_experts = 7; }, [](C& c) { c.max_token_dtype = DType::kBF16; },
       [](C& c) { c.capacity_policy = CapacityPolicy::kDrop; }, [](C& c) { c.comm_sm_count = 7; },
       [](C& c) { c.base_timeout_ms = 7; }, [](C& c) { c.kept_replies = 7; },
       [](C& c) { c.ticket_memory_bytes = 7; }, [](C& c) { c.sequence_window = 7; }});
}

TEST(FieldsTest, EveryMemberOfALayerConfigIsAField) {
  using C = LayerConfig;
  ExpectFieldForEach<C>(SmallLayer(), {[](C& c) { c.expert_count = 7; },
                                       [](C& c) { c.hidden = 7; },
                                       [](C& c) { c.intermediate = 7; },
                                       [](C& c) { c.top_k = 7; },
                                       [](C& c) { c.activation = Activation::kRelu2; },
                                       [](C& c) { c.gate_up_bias = true; },
                                       [](C& c) { c.down_bias = true; },
                                       [](C& c) { c.alignment = 7; },
                                       [](C& c) { c.token_dtype = DType::kF16; },
                                       [](C& c) { c.weight_dtype = DType::kF16; },
                                       [](C& c) { c.recipe = "x"; },
                                       [](C& c) { c.weighting = Weighting::kEarly; },
                                       [](C& c) { c.router.kind = RouterKind::kSigmoid; },
                                       [](C& c) { c.router.softmax_before_topk = true; },
                                       [](C& c) { c.router.groups = 7; },
                                       [](C& c) { c.router.kept_groups = 7; },
                                       [](C& c) { c.router.scaling_factor = 7; },
                                       [](C& c) { c.router.selection_bias = true; },
                                       [](C& c) { c.router_on_server = true; },
                                       [](C& c) { c.aux_loss_coefficient = 7; }});
}

TEST(FieldsTest, EveryMemberOfAnOptimizerConfigIsAField) {
  using C = OptimizerConfig;
  ExpectFieldForEach<C>(
      C{}, {[](C& c) { c.kind = OptimizerKind::kAdamW; }, [](C& c) { c.momentum = 7; },
            [](C& c) { c.beta1 = 7; }, [](C& c) { c.beta2 = 7; }, [](C& c) { c.epsilon = 7; },
            [](C& c) { c.weight_decay = 7; }, [](C& c) { c.max_gradient_norm = 7; }});
}

TEST(FieldsTest, DoublesThatDifferInTheLastBitDiffer) {
  OptimizerConfig a;
  OptimizerConfig b;
  a.epsilon = 0.1;
  b.epsilon = std::nextafter(0.1, 1.0);
  EXPECT_NE(FieldsOf(a), FieldsOf(b));
}

TEST(FieldsEncodingTest, RoundTripsAnyBytes) {
  const std::vector<ConfigField> fields = {
      {"a", "1"}, {"", ""}, {"3:x", std::string("\0:9", 3)}, {"b", std::string(1000, 'x')}};
  EXPECT_EQ(*DecodeFields(EncodeFields(fields)), fields);
  EXPECT_TRUE(DecodeFields("")->empty());
}

TEST(FieldsEncodingTest, IsTotal) {
  for (const char* bad : {"1", ":", "1:", "1:a", "1:a1", "1:a1:", "x", "-1:a1:b", "999999999:a1:b",
                          "1000000000:a", "18446744073709551617:a1:b"}) {
    EXPECT_EQ(ReasonOf(DecodeFields(bad).status()), Reason::kConfigInvalid) << bad;
  }
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  const std::string good = EncodeFields(FieldsOf(SmallGroup(2)));
  for (int i = 0; i < 20000; ++i) {
    const auto fields = DecodeFields(seed.Mutate(good));
    if (fields.ok()) DecodeFields(EncodeFields(*fields)).IgnoreError();
  }
}

TEST(CompareFieldsTest, NamesTheFirstDifferenceBothValuesAndBothRanks) {
  const std::vector<ConfigField> a = {{"x", "1"}, {"y", "2"}};
  const std::vector<ConfigField> b = {{"x", "1"}, {"y", "3"}};
  EXPECT_TRUE(CompareFields(Reason::kConfigMismatch, "it", {a, a, a}).ok());
  EXPECT_TRUE(CompareFields(Reason::kConfigMismatch, "it", {a}).ok());
  EXPECT_TRUE(CompareFields(Reason::kConfigMismatch, "it", {}).ok());
  const absl::Status status = CompareFields(Reason::kConfigMismatch, "it", {a, a, b});
  EXPECT_EQ(ReasonOf(status), Reason::kConfigMismatch);
  EXPECT_EQ(std::string(status.message()),
            "it differs between ranks in y: rank 0 has 2, rank 2 has 3");
}

TEST(CompareFieldsTest, FieldsThatOneSideLacksOrNamesOtherwiseDiffer) {
  const std::vector<ConfigField> a = {{"x", "1"}};
  for (const std::vector<ConfigField>& b :
       std::vector<std::vector<ConfigField>>{{}, {{"z", "1"}}, {{"x", "1"}, {"y", "2"}}}) {
    EXPECT_FALSE(CompareFields(Reason::kSequenceConflict, "it", {a, b}).ok());
    EXPECT_FALSE(CompareFields(Reason::kSequenceConflict, "it", {b, a}).ok());
  }
}

TEST(FingerprintTest, FollowsTheConfigButNotTheOptimizer) {
  const LayerConfig base = WithDefaults(SmallLayer());
  LayerConfig other = base;
  other.optimizer.kind = OptimizerKind::kAdamW;
  EXPECT_EQ(LayerFingerprint(other), LayerFingerprint(base));
  other.top_k = 1;
  EXPECT_NE(LayerFingerprint(other), LayerFingerprint(base));
}

TEST(SizesTest, FollowTheConfig) {
  const GroupSizes group = SizesOf(SmallGroup(4));
  EXPECT_EQ(group.ranks, 4);
  EXPECT_EQ(group.max_hidden, 8);
  EXPECT_EQ(group.token_bytes, 4);
  LayerConfig layer = SmallLayer();
  layer.weight_dtype = DType::kBF16;
  layer.optimizer.momentum = 0.9;
  EXPECT_EQ(SizesOf(layer, true).weight_bytes, 2);
  EXPECT_TRUE(SizesOf(layer, true).frozen);
  EXPECT_EQ(SizesOf(layer, false).optimizer_states, 1);
  layer.optimizer.kind = OptimizerKind::kAdamW;
  EXPECT_EQ(SizesOf(layer, false).optimizer_states, 2);
  EXPECT_EQ(SizesOf(SmallLayer(), false).optimizer_states, 0);
}

}  // namespace
}  // namespace expertd::engine
