// Tests of the reference layer: rows worked by hand, finite differences, and identities.
#include "tests/reference/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tests/reference/matrix.h"
#include "tests/reference/test_random.h"

namespace expertd::reference {
namespace {

using Doubles = std::vector<double>;

TEST(ActivationTest, ValuesAndDerivativesAtOne) {
  // sigmoid(1) = 0.7310585786300049; Phi(1) = 0.8413447460685429, phi(1) = 0.24197072451914337.
  EXPECT_NEAR(Activate(Activation::kSilu, 1.0), 0.7310585786300049, 1e-15);
  EXPECT_NEAR(ActivateDerivative(Activation::kSilu, 1.0),
              0.7310585786300049 * (1.0 + 0.2689414213699951), 1e-15);
  EXPECT_NEAR(Activate(Activation::kGelu, 1.0), 0.8413447460685429, 1e-15);
  EXPECT_NEAR(ActivateDerivative(Activation::kGelu, 1.0), 0.8413447460685429 + 0.24197072451914337,
              1e-15);
  EXPECT_EQ(Activate(Activation::kRelu2, 3.0), 9.0);
  EXPECT_EQ(ActivateDerivative(Activation::kRelu2, 3.0), 6.0);
  EXPECT_EQ(Activate(Activation::kRelu2, -3.0), 0.0);
  EXPECT_EQ(ActivateDerivative(Activation::kRelu2, -3.0), 0.0);
}

LayerConfig HandConfig(Weighting weighting) {
  LayerConfig config;  // E = R = K = H = I = 1
  config.activation = Activation::kRelu2;
  config.weighting = weighting;
  return config;
}

TEST(LayerHandTest, OneScalarRowWithoutBias) {
  const LayerConfig config = HandConfig(Weighting::kLate);
  const ExpertParameters parameters{
      .gate_up = {3, 5}, .down = {0.5}, .gate_up_bias = {}, .down_bias = {}};

  // gate = 2*3 = 6, up = 2*5 = 10, u = 36*10 = 360, z = 180, y = 0.25 * 180 = 45.
  const LayerForwardResult forward = LayerForward(config, parameters, {{2}}, {{0}}, {{0.25}});
  EXPECT_EQ(forward.h[0], (Doubles{6, 10}));
  EXPECT_EQ(forward.u[0], (Doubles{360}));
  EXPECT_EQ(forward.z[0], (Doubles{180}));
  EXPECT_EQ(forward.output[0], (Doubles{45}));

  // gz = 0.25 * 2 = 0.5; d weight = 2 * 180; d down = 360 * 0.5; du = 0.5 * 0.5 = 0.25;
  // d gate = 0.25 * 10 * (2 * 6) = 30; d up = 0.25 * 36 = 9; dx = 30 * 3 + 9 * 5 = 135.
  const LayerGradients gradients = LayerBackward(config, parameters, forward, {{2}});
  EXPECT_EQ(gradients.topk_weights[0], (Doubles{360}));
  EXPECT_EQ(gradients.experts.down, (Doubles{180}));
  EXPECT_EQ(gradients.experts.gate_up, (Doubles{60, 18}));
  EXPECT_EQ(gradients.tokens[0], (Doubles{135}));
  EXPECT_TRUE(gradients.experts.gate_up_bias.empty());
  EXPECT_TRUE(gradients.experts.down_bias.empty());
}

TEST(LayerHandTest, BothWeightingsAgreeOnOneScalarRowWithBiases) {
  const ExpertParameters parameters{
      .gate_up = {3, 5}, .down = {0.5}, .gate_up_bias = {1, -1}, .down_bias = {4}};
  for (const Weighting weighting : {Weighting::kLate, Weighting::kEarly}) {
    const LayerConfig config = HandConfig(weighting);

    // gate = 3 + 1 = 4, up = 5 - 1 = 4, u = 16 * 4 = 64.
    // LATE: 0.25 * (64 * 0.5 + 4) = 9. EARLY: (0.25 * 64) * 0.5 + 0.25 * 4 = 9.
    const LayerForwardResult forward = LayerForward(config, parameters, {{1}}, {{0}}, {{0.25}});
    EXPECT_EQ(forward.z[0], (Doubles{weighting == Weighting::kLate ? 36.0 : 9.0}));
    EXPECT_EQ(forward.output[0], (Doubles{9}));

    // d weight: LATE 2 * 36, EARLY (2 * 0.5) * 64 + 2 * 4. d down = 2 * 0.25 * 64 = 32.
    // d down_bias = 2 * 0.25. du = 2 * 0.25 * 0.5 = 0.25, d gate = 0.25 * 4 * 8, d up = 0.25 * 16.
    const LayerGradients gradients = LayerBackward(config, parameters, forward, {{2}});
    EXPECT_EQ(gradients.topk_weights[0], (Doubles{72}));
    EXPECT_EQ(gradients.experts.down, (Doubles{32}));
    EXPECT_EQ(gradients.experts.down_bias, (Doubles{0.5}));
    EXPECT_EQ(gradients.experts.gate_up, (Doubles{8, 4}));
    EXPECT_EQ(gradients.experts.gate_up_bias, (Doubles{8, 4}));
    EXPECT_EQ(gradients.tokens[0], (Doubles{8 * 3 + 4 * 5}));
  }
}

TEST(LayerHandTest, FirstColumnsAreGateAndLastAreUp) {
  LayerConfig config = HandConfig(Weighting::kLate);
  config.intermediate = 2;
  const ExpertParameters parameters{
      .gate_up = {1, -2, 3, 4}, .down = {10, 1}, .gate_up_bias = {}, .down_bias = {}};

  // x = 1: gate = [1, -2], up = [3, 4], u = [1*3, 0*4], z = 3*10 + 0*1.
  const LayerForwardResult forward = LayerForward(config, parameters, {{1}}, {{0}}, {{1}});
  EXPECT_EQ(forward.u[0], (Doubles{3, 0}));
  EXPECT_EQ(forward.output[0], (Doubles{30}));
}

TEST(LayerHandTest, EachRouteUsesTheParametersOfItsExpert) {
  // 2 ranks, 4 experts of which expert e maps x to (e + 1)^2 * 1 * x^3; K = 2.
  LayerConfig config = HandConfig(Weighting::kEarly);
  config.ep = {.num_experts = 4, .num_ranks = 2, .top_k = 2};
  const ExpertParameters parameters{.gate_up = {1, 1, 2, 1, 3, 1, 4, 1},
                                    .down = {1, 1, 1, 1},
                                    .gate_up_bias = {},
                                    .down_bias = {}};

  // Rank 0: 0.5 * 16 * 8 + 0.25 * 1 * 8 = 66. Rank 1: 1 * 9 = 9.
  const LayerForwardResult forward =
      LayerForward(config, parameters, {{2}, {1}}, {{3, 0}, {-1, 2}}, {{0.5, 0.25}, {kNan, 1}});
  EXPECT_EQ(forward.output, (PerRank{{66}, {9}}));
}

TEST(LayerHandTest, RefusedForwardHasNoOutput) {
  LayerConfig config = HandConfig(Weighting::kLate);
  config.ep.capacity = 1;
  const ExpertParameters parameters{
      .gate_up = {3, 5}, .down = {0.5}, .gate_up_bias = {}, .down_bias = {}};
  const LayerForwardResult forward = LayerForward(config, parameters, {{1, 2}}, {{0, 0}}, {{1, 1}});
  EXPECT_TRUE(forward.layout.refused);
  EXPECT_TRUE(forward.output.empty());
}

TEST(LayerHandTest, PadRowsStayZeroUnderBiases) {
  LayerConfig config = HandConfig(Weighting::kLate);
  config.ep.alignment = 2;
  const ExpertParameters parameters{
      .gate_up = {3, 5}, .down = {0.5}, .gate_up_bias = {1, -1}, .down_bias = {4}};
  const LayerForwardResult forward = LayerForward(config, parameters, {{1}}, {{0}}, {{0.25}});
  EXPECT_EQ(forward.h[0], (Doubles{4, 4, 0, 0}));
  EXPECT_EQ(forward.u[0], (Doubles{64, 0}));
  EXPECT_EQ(forward.z[0], (Doubles{36, 0}));
}

// A random group of 3 ranks, one of them without tokens, with -1 ids, dropped routes, and an expert
// that no route chooses.
struct RandomCase {
  static constexpr int64_t kUnusedExpert = 5;

  RandomCase(TestRandom& random, Activation activation, Weighting weighting, bool with_biases) {
    config = {.ep = {.num_experts = 6,
                     .num_ranks = 3,
                     .top_k = 3,
                     .alignment = 2,
                     .capacity = 9,  // floor(9 / 4) * 2 = 4 rows per expert
                     .policy = CapacityPolicy::kDrop},
              .hidden = 3,
              .intermediate = 2,
              .activation = activation,
              .weighting = weighting};
    const std::vector<int64_t> tokens = {5, 0, 7};
    x = random.Rows(tokens, 3);
    gy = random.Rows(tokens, 3);
    ids = random.Ids(tokens, 3, kUnusedExpert);
    weights = random.Rows(tokens, 3);
    // Tokens 0 to 4 of rank 0 choose expert 0, so that rank 2's choice of it is always dropped.
    for (int64_t t = 0; t < 5; ++t) {
      std::ranges::replace(ids[0].begin() + t * 3, ids[0].begin() + t * 3 + 3, 0, -1);
      ids[0][t * 3] = 0;
    }
    std::ranges::replace(ids[2].begin(), ids[2].begin() + 3, 0, -1);
    ids[2][1] = 0;
    ids[2][3] = -1;
    parameters.gate_up = random.Values(72);                        // [6, 3, 4]
    parameters.down = random.Values(36);                           // [6, 2, 3]
    if (with_biases) parameters.gate_up_bias = random.Values(24);  // [6, 4]
    if (with_biases) parameters.down_bias = random.Values(18);     // [6, 3]
  }

  LayerForwardResult Forward() const { return LayerForward(config, parameters, x, ids, weights); }
  double Loss() const { return Inner(Forward().output, gy); }

  LayerConfig config;
  ExpertParameters parameters;
  PerRank x;
  Routing ids;
  PerRank weights;
  PerRank gy;
};

class LayerGradientTest : public ::testing::TestWithParam<std::tuple<Activation, Weighting, bool>> {
};

TEST_P(LayerGradientTest, MatchesFiniteDifferences) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const auto [activation, weighting, with_biases] = GetParam();
  RandomCase test(random, activation, weighting, with_biases);
  const LayerForwardResult forward = test.Forward();
  ASSERT_GT(forward.layout.ranks[0].dropped_per_expert[0], 0);
  const LayerGradients gradients = LayerBackward(test.config, test.parameters, forward, test.gy);

  const auto loss = [&] { return test.Loss(); };
  for (size_t rank = 0; rank < test.x.size(); ++rank) {
    ExpectGradient("tokens", test.x[rank], gradients.tokens[rank], loss);
    ExpectGradient("topk_weights", test.weights[rank], gradients.topk_weights[rank], loss);
  }
  ExpectGradient("gate_up", test.parameters.gate_up, gradients.experts.gate_up, loss);
  ExpectGradient("down", test.parameters.down, gradients.experts.down, loss);
  ExpectGradient("gate_up_bias", test.parameters.gate_up_bias, gradients.experts.gate_up_bias,
                 loss);
  ExpectGradient("down_bias", test.parameters.down_bias, gradients.experts.down_bias, loss);
}

TEST_P(LayerGradientTest, ExactZerosForUnusedExpertsAndLostRoutes) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const auto [activation, weighting, with_biases] = GetParam();
  RandomCase test(random, activation, weighting, with_biases);
  for (size_t i = 0; i < test.ids[2].size(); ++i) {
    if (test.ids[2][i] < 0) test.weights[2][i] = kNan;
  }
  const LayerGradients gradients =
      LayerBackward(test.config, test.parameters, test.Forward(), test.gy);

  EXPECT_EQ(gradients.topk_weights[2][1], 0.0);  // dropped
  EXPECT_EQ(gradients.topk_weights[2][3], 0.0);  // -1
  for (const double value : gradients.topk_weights[2]) EXPECT_TRUE(std::isfinite(value));
  for (const double value : gradients.tokens[2]) EXPECT_TRUE(std::isfinite(value));
  const int64_t unused = RandomCase::kUnusedExpert;
  for (const double value : Row(gradients.experts.gate_up, unused, 12)) EXPECT_EQ(value, 0.0);
  for (const double value : Row(gradients.experts.down, unused, 6)) EXPECT_EQ(value, 0.0);
  if (!with_biases) return;
  for (const double value : Row(gradients.experts.gate_up_bias, unused, 4)) EXPECT_EQ(value, 0.0);
  for (const double value : Row(gradients.experts.down_bias, unused, 3)) EXPECT_EQ(value, 0.0);
}

std::string VariantName(const ::testing::TestParamInfo<LayerGradientTest::ParamType>& info) {
  const auto [activation, weighting, with_biases] = info.param;
  const std::string name = activation == Activation::kSilu   ? "Silu"
                           : activation == Activation::kGelu ? "Gelu"
                                                             : "Relu2";
  return name + (weighting == Weighting::kLate ? "Late" : "Early") + (with_biases ? "Biases" : "");
}

INSTANTIATE_TEST_SUITE_P(
    All, LayerGradientTest,
    ::testing::Combine(::testing::Values(Activation::kSilu, Activation::kGelu, Activation::kRelu2),
                       ::testing::Values(Weighting::kLate, Weighting::kEarly), ::testing::Bool()),
    VariantName);

TEST(LayerIdentityTest, BothWeightingsAgreeForwardAndBackward) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  RandomCase test(random, Activation::kSilu, Weighting::kLate, true);
  const LayerForwardResult late = test.Forward();
  const LayerGradients late_gradients = LayerBackward(test.config, test.parameters, late, test.gy);
  test.config.weighting = Weighting::kEarly;
  const LayerForwardResult early = test.Forward();
  const LayerGradients early_gradients =
      LayerBackward(test.config, test.parameters, early, test.gy);

  for (size_t rank = 0; rank < test.x.size(); ++rank) {
    ExpectAllNear(early.output[rank], late.output[rank]);
    ExpectAllNear(early_gradients.tokens[rank], late_gradients.tokens[rank]);
    ExpectAllNear(early_gradients.topk_weights[rank], late_gradients.topk_weights[rank]);
  }
  ExpectAllNear(early_gradients.experts.gate_up, late_gradients.experts.gate_up);
  ExpectAllNear(early_gradients.experts.down, late_gradients.experts.down);
  ExpectAllNear(early_gradients.experts.down_bias, late_gradients.experts.down_bias);
}

TEST(LayerIdentityTest, TheNumberOfRanksDoesNotChangeTheResult) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  RandomCase test(random, Activation::kGelu, Weighting::kLate, true);
  test.config.ep.capacity = 0;
  const LayerForwardResult three = test.Forward();
  const LayerGradients three_gradients =
      LayerBackward(test.config, test.parameters, three, test.gy);

  const auto concatenate = [](const auto& per_rank) {
    auto all = per_rank[0];
    for (size_t rank = 1; rank < per_rank.size(); ++rank) {
      all.insert(all.end(), per_rank[rank].begin(), per_rank[rank].end());
    }
    return all;
  };
  test.config.ep.num_ranks = 1;
  test.x = {concatenate(test.x)};
  test.ids = {concatenate(test.ids)};
  test.weights = {concatenate(test.weights)};
  test.gy = {concatenate(test.gy)};
  const LayerForwardResult one = test.Forward();
  const LayerGradients one_gradients = LayerBackward(test.config, test.parameters, one, test.gy);

  ExpectAllNear(one.output[0], concatenate(three.output));
  ExpectAllNear(one_gradients.tokens[0], concatenate(three_gradients.tokens));
  ExpectAllNear(one_gradients.topk_weights[0], concatenate(three_gradients.topk_weights));
  ExpectAllNear(one_gradients.experts.gate_up, three_gradients.experts.gate_up);
  ExpectAllNear(one_gradients.experts.down, three_gradients.experts.down);
}

}  // namespace
}  // namespace expertd::reference
