// Parameters of one layer: shapes, initialisation, updates against their formulas, freezing.
#include "server/engine/layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "base/error.h"
#include "kernels/backends.h"
#include "tests/server/engine/step_inputs.h"

namespace expertd::engine {
namespace {

LayerConfig FullLayer() {
  LayerConfig config = SmallLayer();
  config.gate_up_bias = true;
  config.down_bias = true;
  config.router.kind = RouterKind::kSigmoid;
  config.router.selection_bias = true;
  config.router_on_server = true;
  return WithDefaults(config);
}

class LayerTest : public testing::Test {
 protected:
  LayerTest() : device_(*CreateDevice("cpu")), optim_(CreateOptimKernels(*device_)) {}

  std::unique_ptr<Layer> Make(const LayerConfig& config, int64_t rank = 0, int64_t world = 1) {
    MlpConfig mlp;
    mlp.local_experts = config.expert_count / world;
    mlp.hidden = config.hidden;
    mlp.intermediate = config.intermediate;
    mlp.token_dtype = config.token_dtype;
    mlp.weight_dtype = config.weight_dtype;
    auto layer = Layer::Create("layer", config, rank, world, *device_,
                               *CreateExpertMlp("plain", *device_, mlp));
    EXPECT_TRUE(layer.ok()) << layer.status();
    return *std::move(layer);
  }
  static std::vector<float> Values(const DeviceBuffer& buffer) {
    std::vector<float> values(static_cast<size_t>(buffer.size()) / sizeof(float));
    std::memcpy(values.data(), buffer.data(), values.size() * sizeof(float));
    return values;
  }
  // Gives every gradient element a value of its own.
  static void FillGradients(Layer& layer) {
    for (Parameter& parameter : layer.parameters()) {
      float* gradient = parameter.gradient.as<float>();
      for (int64_t i = 0; i < parameter.count; ++i) {
        gradient[i] = static_cast<float>(i % 7 - 3) / 8.0f;
      }
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<OptimKernels> optim_;
};

TEST_F(LayerTest, ParametersHaveTheShapesAndPlacesOfTheirRank) {
  auto layer = Make(FullLayer(), 1, 4);
  std::map<std::string, std::pair<std::vector<int64_t>, std::vector<int64_t>>> seen;
  for (const Parameter& p : layer->parameters()) seen[p.name] = {p.local_shape, p.offsets};
  using Place = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
  EXPECT_EQ(seen.size(), 6u);
  EXPECT_EQ(seen["gate_up"], Place({2, 8, 8}, {2, 0, 0}));
  EXPECT_EQ(seen["down"], Place({2, 4, 8}, {2, 0, 0}));
  EXPECT_EQ(seen["gate_up_bias"], Place({2, 8}, {2, 0}));
  EXPECT_EQ(seen["down_bias"], Place({2, 8}, {2, 0}));
  EXPECT_EQ(seen["router"], Place({8, 8}, {0, 0}));
  EXPECT_EQ(seen["router_bias"], Place({8}, {0}));
  EXPECT_EQ(layer->Find("no such"), nullptr);
  EXPECT_EQ(layer->info().first_expert, 2);
  EXPECT_EQ(layer->info().local_experts, 2);
  EXPECT_EQ(layer->info().state, LayerState::kCreated);
  EXPECT_EQ(layer->info().weights_version, 0u);
}

TEST_F(LayerTest, ANewLayerIsZeroEverywhere) {
  auto layer = Make(FullLayer());
  for (const Parameter& p : layer->parameters()) {
    EXPECT_THAT(Values(p.master), testing::Each(0.0f)) << p.name;
    EXPECT_THAT(Values(p.gradient), testing::Each(0.0f)) << p.name;
    EXPECT_EQ(p.compute.data(), nullptr);
  }
}

TEST_F(LayerTest, OptionalParametersAreAbsentWithoutTheirOption) {
  auto layer = Make(WithDefaults(SmallLayer()));
  EXPECT_EQ(layer->parameters().size(), 2u);
  EXPECT_EQ(layer->Weights().gate_up_bias, nullptr);
  EXPECT_EQ(layer->Gradients().down_bias, nullptr);
  EXPECT_EQ(layer->Weights().gate_up, layer->Find("gate_up")->master.data());
}

TEST_F(LayerTest, InitialWeightsDoNotDependOnTheWorldSize) {
  auto whole = Make(FullLayer());
  ASSERT_TRUE(whole->Initialize(11, *optim_).ok());
  for (const char* name : {"gate_up", "down", "router"}) {
    const std::vector<float> all = Values(whole->Find(name)->master);
    std::vector<float> joined;
    for (int64_t rank = 0; rank < 4; ++rank) {
      auto shard = Make(FullLayer(), rank, 4);
      ASSERT_TRUE(shard->Initialize(11, *optim_).ok());
      const std::vector<float> part = Values(shard->Find(name)->master);
      if (shard->Find(name)->replicated) {
        EXPECT_EQ(part, all) << name;  // the same bits
        joined = all;
      } else {
        joined.insert(joined.end(), part.begin(), part.end());
      }
    }
    EXPECT_EQ(joined, all) << name;
  }
}

TEST_F(LayerTest, InitialWeightsFollowSeedNameAndParameterAndAreBounded) {
  auto layer = Make(FullLayer());
  ASSERT_TRUE(layer->Initialize(1, *optim_).ok());
  const std::vector<float> first = Values(layer->Find("gate_up")->master);
  EXPECT_NE(first, Values(layer->Find("down")->master));
  ASSERT_TRUE(layer->Initialize(2, *optim_).ok());
  EXPECT_NE(Values(layer->Find("gate_up")->master), first);
  ASSERT_TRUE(layer->Initialize(1, *optim_).ok());
  EXPECT_EQ(Values(layer->Find("gate_up")->master), first);
  float largest = 0;
  for (float value : first) largest = std::max(largest, std::abs(value));
  // Uniform with variance 1/8: of 512 values the largest is near the bound, sqrt(3/8).
  EXPECT_GT(largest, 0.9f * std::sqrt(3.0f / 8.0f));
  EXPECT_LE(largest, std::sqrt(3.0f / 8.0f));
  EXPECT_THAT(Values(layer->Find("gate_up_bias")->master), testing::Each(0.0f));
  EXPECT_THAT(Values(layer->Find("router_bias")->master), testing::Each(0.0f));
  EXPECT_EQ(layer->info().state, LayerState::kReady);
  EXPECT_EQ(layer->info().weights_version, 1u);
}

TEST_F(LayerTest, ComputeCopiesAreTheRoundedMasters) {
  LayerConfig config = WithDefaults(SmallLayer());
  config.weight_dtype = DType::kBF16;
  auto layer = Make(config);
  const uint64_t before = layer->Weights().version;
  ASSERT_TRUE(layer->Initialize(3, *optim_).ok());
  EXPECT_NE(layer->Weights().version, before);
  const Parameter& p = *layer->Find("down");
  EXPECT_EQ(layer->Weights().down, p.compute.data());
  EXPECT_EQ(p.compute.size(), p.count * 2);
  const std::vector<float> master = Values(p.master);
  for (size_t i = 0; i < master.size(); ++i) {
    const uint32_t bits = uint32_t{p.compute.as<uint16_t>()[i]} << 16;
    float rounded;
    std::memcpy(&rounded, &bits, sizeof(rounded));
    EXPECT_NEAR(rounded, master[i], std::abs(master[i]) / 256.0f);
  }
}

TEST_F(LayerTest, SgdFollowsItsFormula) {
  LayerConfig config = FullLayer();
  config.optimizer.momentum = 0.5;
  config.optimizer.weight_decay = 0.25;
  auto layer = Make(config);
  ASSERT_TRUE(layer->Initialize(5, *optim_).ok());
  std::map<std::string, std::vector<float>> weights;
  std::map<std::string, std::vector<float>> moments;
  for (const Parameter& p : layer->parameters()) {
    weights[p.name] = Values(p.master);
    moments[p.name].resize(weights[p.name].size());
  }
  for (int step = 0; step < 3; ++step) {
    FillGradients(*layer);
    ASSERT_TRUE(layer->Apply(0.125, 0.5, *optim_).ok());
    for (const Parameter& p : layer->parameters()) {
      std::vector<float>& w = weights[p.name];
      std::vector<float>& m = moments[p.name];
      for (size_t i = 0; i < w.size() && p.trained; ++i) {
        const float g = static_cast<float>(static_cast<int64_t>(i) % 7 - 3) / 8.0f * 0.5f;
        m[i] = 0.5f * m[i] + g + 0.25f * w[i];
        w[i] -= 0.125f * m[i];
      }
      const std::vector<float> now = Values(p.master);
      for (size_t i = 0; i < w.size(); ++i) ASSERT_NEAR(now[i], w[i], 1e-6f) << p.name;
      EXPECT_THAT(Values(p.gradient), testing::Each(0.0f));
    }
    EXPECT_EQ(layer->info().weights_version, static_cast<uint64_t>(step + 2));
  }
}

TEST_F(LayerTest, AdamWFollowsItsFormulaWithBiasCorrection) {
  LayerConfig config = SmallLayer();
  config.optimizer.kind = OptimizerKind::kAdamW;
  config.optimizer.weight_decay = 0.1;
  auto layer = Make(WithDefaults(config));
  ASSERT_TRUE(layer->Initialize(5, *optim_).ok());
  const std::vector<float> start = Values(layer->Find("down")->master);
  std::vector<double> w(start.begin(), start.end());
  std::vector<double> first(w.size());
  std::vector<double> second(w.size());
  for (int step = 1; step <= 3; ++step) {
    FillGradients(*layer);
    ASSERT_TRUE(layer->Apply(0.01, 1.0, *optim_).ok());
    const std::vector<float> now = Values(layer->Find("down")->master);
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = static_cast<double>(static_cast<int64_t>(i) % 7 - 3) / 8.0;
      first[i] = 0.9 * first[i] + 0.1 * g;
      second[i] = 0.999 * second[i] + 0.001 * g * g;
      const double m = first[i] / (1 - std::pow(0.9, step));
      const double v = second[i] / (1 - std::pow(0.999, step));
      w[i] -= 0.01 * (m / (std::sqrt(v) + 1e-8) + 0.1 * w[i]);
      ASSERT_NEAR(now[i], w[i], 1e-5) << step << " " << i;
    }
  }
}

TEST_F(LayerTest, AnotherOptimizerStartsFreshAndNewNumbersKeepTheState) {
  LayerConfig config = SmallLayer();
  config.optimizer.momentum = 0.5;
  auto layer = Make(WithDefaults(config));
  ASSERT_TRUE(layer->Initialize(5, *optim_).ok());
  FillGradients(*layer);
  ASSERT_TRUE(layer->Apply(0.125, 1, *optim_).ok());
  const Parameter& p = *layer->Find("down");
  const std::vector<float> momentum = Values(p.first);
  EXPECT_THAT(momentum, testing::Contains(testing::Ne(0.0f)));
  OptimizerConfig next = config.optimizer;
  next.momentum = 0.75;
  ASSERT_TRUE(layer->Configure(next).ok());
  EXPECT_EQ(Values(p.first), momentum);
  next.kind = OptimizerKind::kAdamW;
  ASSERT_TRUE(layer->Configure(WithDefaults(next)).ok());
  EXPECT_THAT(Values(p.first), testing::Each(0.0f));
  EXPECT_THAT(Values(p.second), testing::Each(0.0f));
  EXPECT_EQ(layer->Find("down")->second.size(), p.count * 4);
}

TEST_F(LayerTest, ClearingZeroesGradientsAndMakesThemValid) {
  auto layer = Make(FullLayer());
  FillGradients(*layer);
  layer->info().gradients_valid = false;
  layer->info().accumulated_backwards = 3;
  ASSERT_TRUE(layer->ClearGradients().ok());
  for (const Parameter& p : layer->parameters()) {
    EXPECT_THAT(Values(p.gradient), testing::Each(0.0f));
  }
  EXPECT_TRUE(layer->info().gradients_valid);
  EXPECT_EQ(layer->info().accumulated_backwards, 0);
}

TEST_F(LayerTest, FreezingGivesBackGradientsAndStateAndKeepsWeights) {
  LayerConfig config = FullLayer();
  config.optimizer.momentum = 0.5;
  auto layer = Make(config);
  ASSERT_TRUE(layer->Initialize(5, *optim_).ok());
  const std::vector<float> weights = Values(layer->Find("down")->master);
  layer->Freeze();
  EXPECT_TRUE(layer->info().frozen);
  for (const Parameter& p : layer->parameters()) {
    EXPECT_EQ(p.gradient.data(), nullptr);
    EXPECT_EQ(p.first.data(), nullptr);
  }
  EXPECT_EQ(Values(layer->Find("down")->master), weights);
  EXPECT_EQ(layer->Gradients().gate_up, nullptr);
  ASSERT_TRUE(layer->ClearGradients().ok());
  ASSERT_TRUE(layer->Initialize(6, *optim_).ok());
  EXPECT_EQ(layer->Find("down")->gradient.data(), nullptr);
}

}  // namespace
}  // namespace expertd::engine
