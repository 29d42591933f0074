// Whole layers with the caller's own routing, forward and backward, against the reference.
#include <vector>

#include "tests/conformance/service/layer_check.h"

namespace expertd::conformance {
namespace {

using reference::TestRandom;

// 24 experts divide among every world size of the suite.
constexpr int64_t kExperts = 24;

v1::LayerConfig UsualLayer() { return SmallLayer(kExperts, 3, 10, 6); }

struct Precision {
  v1::DType token;
  v1::DType weight;
};
constexpr Precision kPrecisions[] = {{v1::DTYPE_F32, v1::DTYPE_F32},
                                     {v1::DTYPE_BF16, v1::DTYPE_BF16},
                                     {v1::DTYPE_F16, v1::DTYPE_F16},
                                     {v1::DTYPE_F32, v1::DTYPE_BF16},
                                     {v1::DTYPE_BF16, v1::DTYPE_F32}};

TEST_P(ServiceTest, EachActivationMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const v1::Activation activation :
       {v1::ACTIVATION_SILU, v1::ACTIVATION_GELU, v1::ACTIVATION_RELU2}) {
    SCOPED_TRACE(v1::Activation_Name(activation));
    v1::LayerConfig config = UsualLayer();
    config.set_activation(activation);
    LayerCheck(*this, {.config = config}, random).Run();
  }
}

TEST_P(ServiceTest, BothWeightingsWithEachBiasMatchTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const v1::Weighting weighting : {v1::WEIGHTING_LATE, v1::WEIGHTING_EARLY}) {
    for (int biases = 0; biases < 4; ++biases) {
      SCOPED_TRACE(::testing::Message() << v1::Weighting_Name(weighting) << ", biases " << biases);
      v1::LayerConfig config = UsualLayer();
      config.set_weighting(weighting);
      config.set_gate_up_bias((biases & 1) != 0);
      config.set_down_bias((biases & 2) != 0);
      // Enough tokens for every expert to be used and to get a bias.
      const std::vector<int64_t> tokens(static_cast<size_t>(world()), 1 + 48 / world());
      LayerCheck(*this, {.config = config, .tokens = tokens, .train_first = biases != 0}, random)
          .Run();
    }
  }
}

TEST_P(ServiceTest, EachPrecisionMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const Precision& precision : kPrecisions) {
    for (const v1::Weighting weighting : {v1::WEIGHTING_LATE, v1::WEIGHTING_EARLY}) {
      SCOPED_TRACE(::testing::Message()
                   << "tokens " << v1::DType_Name(precision.token) << ", weights "
                   << v1::DType_Name(precision.weight) << ", " << v1::Weighting_Name(weighting));
      v1::LayerConfig config = UsualLayer();
      config.set_token_dtype(precision.token);
      config.set_weight_dtype(precision.weight);
      config.set_weighting(weighting);
      config.set_down_bias(true);
      LayerCheck(*this, {.config = config}, random).Run();
    }
  }
}

TEST_P(ServiceTest, EachAlignmentMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t alignment : {1, 2, 8, 64}) {
    SCOPED_TRACE(alignment);
    v1::LayerConfig config = UsualLayer();
    config.set_alignment(alignment);
    config.set_gate_up_bias(true);
    LayerCheck(*this, {.config = config, .train_first = true}, random).Run();
  }
}

TEST_P(ServiceTest, OddSizesMatchTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t hidden : {1, 5, 17}) {
    SCOPED_TRACE(hidden);
    v1::LayerConfig config = SmallLayer(kExperts, 1, hidden, hidden + 2);
    config.set_token_dtype(v1::DTYPE_BF16);
    config.set_weight_dtype(v1::DTYPE_BF16);
    LayerCheck(*this, {.config = config}, random).Run();
  }
}

TEST_P(ServiceTest, LayerWithTokensOnOneRankOnlyMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t busy : {int64_t{0}, world() - 1}) {
    std::vector<int64_t> tokens(static_cast<size_t>(world()), 0);
    tokens[static_cast<size_t>(busy)] = 9;
    LayerCheck(*this, {.config = UsualLayer(), .tokens = tokens}, random).Run();
  }
}

TEST_P(ServiceTest, LayerWithoutAnyTokenIsAStepWithZeroGradients) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const std::vector<int64_t> tokens(static_cast<size_t>(world()), 0);
  LayerCheck(*this, {.config = UsualLayer(), .tokens = tokens}, random).Run();
}

TEST_P(ServiceTest, ExpertsWithoutRowsGetExactlyZeroGradients) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  // All tokens of all ranks at the last expert: the bounds of all others are zero.
  reference::Routing ids(static_cast<size_t>(world()), std::vector<int64_t>(3 * 5, -1));
  for (auto& rank : ids) {
    for (size_t t = 0; t < 5; ++t) rank[3 * t + 1] = kExperts - 1;
  }
  const std::vector<int64_t> tokens(static_cast<size_t>(world()), 5);
  LayerCheck(*this, {.config = UsualLayer(), .tokens = tokens, .ids = ids}, random).Run();
}

}  // namespace
}  // namespace expertd::conformance
