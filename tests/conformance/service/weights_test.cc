// Parameters: initial weights, updates, clipping, frozen layers.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/conformance/service/bounded.h"
#include "tests/conformance/service/layer_check.h"
#include "tests/reference/optimizer.h"

namespace expertd::conformance {
namespace {

using reference::TestRandom;

constexpr const char* kParameters[] = {"gate_up", "down", "gate_up_bias", "down_bias", "router"};

v1::LayerConfig LayerWithEverything(v1::OptimizerKind optimizer) {
  v1::LayerConfig config = SmallLayer(24, 2, 8, 4);
  config.set_weight_dtype(v1::DTYPE_BF16);
  config.set_gate_up_bias(true);
  config.set_down_bias(true);
  config.mutable_router()->set_kind(v1::ROUTER_KIND_SOFTMAX);
  config.mutable_router()->set_on_server(true);
  config.mutable_optimizer()->set_kind(optimizer);
  return config;
}

// The whole gradient of a parameter: of the router, the sum over ranks as the service forms it, in
// f32 and in rank order.
std::vector<double> Gradient(ServiceTest& test, const std::string& layer_id,
                             const std::string& parameter) {
  if (parameter != "router") {
    return Widen(test.Parameter(layer_id, parameter, v1::PARAMETER_KIND_GRADIENT));
  }
  std::vector<float> sum;
  for (const auto& part : test.Shards(layer_id, parameter, v1::PARAMETER_KIND_GRADIENT)) {
    sum.resize(part.size(), 0.0f);
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
  }
  return Widen(sum);
}

struct Update {
  std::vector<std::vector<double>> before, gradients, after;  // By parameter.
  double norm = 0;
};

// One backward and one update; `version` is that of the weights before it.
Update RunUpdate(ServiceTest& test, const std::string& layer_id, uint64_t version,
                 double learning_rate, TestRandom& random) {
  std::vector<v1::ForwardRequest> forwards(static_cast<size_t>(test.world()));
  std::vector<v1::BackwardRequest> backwards(forwards.size());
  for (size_t rank = 0; rank < forwards.size(); ++rank) {
    forwards[rank].set_layer_id(layer_id);
    forwards[rank].set_layer_router(true);
    forwards[rank].set_keep_for_backward(true);
    *forwards[rank].mutable_tokens() = TokenTensor(v1::DTYPE_F32, random.Values(6 * 8), 8);
    *backwards[rank].mutable_output_gradient() =
        TokenTensor(v1::DTYPE_F32, random.Values(6 * 8), 8);
  }
  const auto tickets = test.Run(std::move(forwards));
  for (size_t rank = 0; rank < tickets.size(); ++rank) {
    backwards[rank].set_ticket(tickets[rank].ticket());
  }
  if (tickets.empty() || test.Run(std::move(backwards)).empty()) return {};
  Update update;
  for (const char* name : kParameters) {
    update.before.push_back(Widen(test.Parameter(layer_id, name, v1::PARAMETER_KIND_MASTER)));
    update.gradients.push_back(Gradient(test, layer_id, name));
  }
  v1::ApplyGradientsRequest apply;
  apply.set_layer_id(layer_id);
  apply.set_learning_rate(learning_rate);
  apply.set_expected_version(version);
  for (const auto& response : test.RunSame(apply)) {
    EXPECT_TRUE(response.applied());
    EXPECT_EQ(response.weights_version(), version + 1);
    update.norm = response.gradient_norm();
  }
  for (const char* name : kParameters) {
    update.after.push_back(Widen(test.Parameter(layer_id, name, v1::PARAMETER_KIND_MASTER)));
    for (const double value : Gradient(test, layer_id, name)) EXPECT_EQ(value, 0.0) << name;
  }
  return update;
}

std::vector<const std::vector<double>*> Pointers(const std::vector<std::vector<double>>& vectors) {
  std::vector<const std::vector<double>*> pointers;
  for (const auto& vector : vectors) pointers.push_back(&vector);
  return pointers;
}

double LargestGradient(const Update& update) {
  double largest = 0;
  for (const auto& gradient : update.gradients) {
    for (const double value : gradient) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

// The service updates element by element in f32: a few roundings of the weight and of numbers that
// are at most `step`, the largest part of a change.
void ExpectUpdated(const Update& update, const std::vector<std::vector<double>>& want,
                   double step) {
  for (size_t p = 0; p < want.size(); ++p) {
    ASSERT_EQ(update.after[p].size(), want[p].size()) << kParameters[p];
    for (size_t i = 0; i < want[p].size(); ++i) {
      const double weight = std::max(std::abs(update.before[p][i]), std::abs(want[p][i]));
      ASSERT_NEAR(update.after[p][i], want[p][i], kUnitF32 * (4 * weight + 16 * step))
          << kParameters[p] << "[" << i << "], before " << update.before[p][i];
    }
  }
}

TEST_P(ServiceTest, InitializeWeightsGivesTheSameBitsAtEveryWorldSize) {
  testing::ServiceHarness* alone = SharedService({testing::Backend::kLoopback, 1});
  ASSERT_NE(alone, nullptr);
  v1::GroupConfig config = testing::SmallGroup({testing::Backend::kLoopback, 1});
  ASSERT_OK(alone->Form(config));
  // The weights depend on the layer's id, so it is the same in both groups.
  const std::string layer_id = "InitialWeights/" + ToString(GetParam());
  v1::CreateLayerRequest create;
  create.set_layer_id(layer_id);
  *create.mutable_config() = LayerWithEverything(v1::OPTIMIZER_KIND_NONE);
  v1::InitializeWeightsRequest initialize;
  initialize.set_layer_id(layer_id);
  initialize.set_seed(12345);
  for (client::StepDriver* one : {&alone->driver(), &driver()}) {
    ASSERT_OK(one->RunSame(create));
    ASSERT_OK(one->RunSame(initialize));
  }
  for (const char* name : kParameters) {
    for (const v1::ParameterKind kind : {v1::PARAMETER_KIND_MASTER, v1::PARAMETER_KIND_COMPUTE}) {
      const auto whole = alone->Shard(0, layer_id, name, kind);
      ASSERT_OK(whole);
      const std::vector<float> want = Floats(Values(whole->tensor));
      EXPECT_TRUE(Parameter(layer_id, name, kind) == want) << name;
      if (std::string(name).ends_with("bias")) continue;
      // Uniform in +-sqrt(3 / fan_in), with fan_in the rows of the matrix.
      const double fan_in = std::string(name) == "down" ? 4 : 8;
      for (const float value : want) {
        ASSERT_LE(std::abs(value), std::sqrt(3 / fan_in) * (1 + 0x1p-8));  // Rounded to bf16 too.
      }
      EXPECT_NE(*std::ranges::min_element(want), *std::ranges::max_element(want));
    }
  }
  v1::DeleteLayerRequest remove;
  remove.set_layer_id(layer_id);
  for (client::StepDriver* one : {&alone->driver(), &driver()}) {
    ASSERT_OK(one->RunSame(remove));
    if (alone == &service()) break;
  }
}

TEST_P(ServiceTest, SgdWithMomentumMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  v1::LayerConfig config = LayerWithEverything(v1::OPTIMIZER_KIND_SGD);
  config.mutable_optimizer()->set_momentum(0.75);
  const std::string layer_id = MakeLayer(config, 3);
  std::vector<std::vector<double>> velocity;
  double largest = 0;
  for (uint64_t version = 1; version <= 3; ++version) {
    const Update update = RunUpdate(*this, layer_id, version, 0.125, random);
    ASSERT_FALSE(HasFailure());
    std::vector<std::vector<double>> want = update.before;
    for (size_t p = 0; p < want.size(); ++p) {
      if (version == 1) velocity.emplace_back(want[p].size(), 0.0);
      reference::SgdStep({.learning_rate = 0.125, .momentum = 0.75}, update.gradients[p],
                         velocity[p], want[p]);
    }
    // The velocity is at most a geometric series of gradients.
    largest = std::max(largest, LargestGradient(update));
    ExpectUpdated(update, want, 0.125 * largest / (1 - 0.75));
    EXPECT_NEAR(update.norm, reference::GlobalNorm(Pointers(update.gradients)), 1e-6 * update.norm);
  }
}

TEST_P(ServiceTest, AdamWMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  v1::LayerConfig config = LayerWithEverything(v1::OPTIMIZER_KIND_ADAMW);
  config.mutable_optimizer()->set_weight_decay(0.0625);
  const std::string layer_id = MakeLayer(config, 4);
  std::vector<reference::AdamWState> states;
  for (uint64_t version = 1; version <= 3; ++version) {
    const Update update = RunUpdate(*this, layer_id, version, 0.01, random);
    ASSERT_FALSE(HasFailure());
    std::vector<std::vector<double>> want = update.before;
    for (size_t p = 0; p < want.size(); ++p) {
      if (version == 1) {
        states.push_back(reference::NewAdamWState(static_cast<int64_t>(want[p].size())));
      }
      reference::AdamWStep({.learning_rate = 0.01, .weight_decay = 0.0625}, update.gradients[p],
                           states[p], want[p]);
    }
    // The first moment is at most the root of the second times sqrt(3) after three steps.
    ExpectUpdated(update, want, 0.01 * 2);
  }
}

TEST_P(ServiceTest, ClippingUsesTheNormOverAllRanks) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  v1::LayerConfig config = LayerWithEverything(v1::OPTIMIZER_KIND_SGD);
  config.mutable_optimizer()->set_max_gradient_norm(0.125);
  const std::string layer_id = MakeLayer(config, 5);
  const Update update = RunUpdate(*this, layer_id, 1, 1, random);
  ASSERT_FALSE(HasFailure());
  ASSERT_GT(update.norm, 0.125) << "too small to be clipped";
  std::vector<std::vector<double>> want = update.before;
  for (size_t p = 0; p < want.size(); ++p) {
    for (size_t i = 0; i < want[p].size(); ++i) {
      want[p][i] -= update.gradients[p][i] * (0.125 / update.norm);
    }
  }
  ExpectUpdated(update, want, LargestGradient(update) * (0.125 / update.norm));
}

TEST_P(ServiceTest, ComputeWeightsAreTheMastersRoundedToNearest) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const std::string layer_id = MakeLayer(LayerWithEverything(v1::OPTIMIZER_KIND_SGD), 6);
  RunUpdate(*this, layer_id, 1, 0.25, random);
  ASSERT_FALSE(HasFailure());
  for (const char* name : {"gate_up", "down"}) {
    const std::vector<float> master = Parameter(layer_id, name, v1::PARAMETER_KIND_MASTER);
    const std::vector<float> compute = Parameter(layer_id, name, v1::PARAMETER_KIND_COMPUTE);
    ASSERT_EQ(master.size(), compute.size());
    for (size_t i = 0; i < master.size(); ++i) {
      EXPECT_EQ(compute[i], client::FromBf16(client::ToBf16(master[i]))) << name << "[" << i << "]";
    }
  }
}

TEST_P(ServiceTest, FrozenLayerGoesForwardOnly) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  v1::LayerConfig config = SmallLayer(24, 2, 8, 4);
  config.mutable_router()->set_kind(v1::ROUTER_KIND_SOFTMAX);
  config.mutable_router()->set_on_server(true);
  config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  const std::string layer_id = MakeLayer(config, 8);
  std::vector<v1::ForwardRequest> requests(static_cast<size_t>(world()));
  for (auto& request : requests) {
    request.set_layer_id(layer_id);
    request.set_layer_router(true);
    *request.mutable_tokens() = TokenTensor(v1::DTYPE_F32, random.Values(5 * 8), 8);
  }
  const auto before = Run(requests);
  v1::FreezeLayerRequest freeze;
  freeze.set_layer_id(layer_id);
  RunSame(freeze);
  const auto after = Run(requests);
  ASSERT_EQ(before.size(), after.size());
  for (size_t rank = 0; rank < after.size(); ++rank) {
    EXPECT_EQ(after[rank].output().data(), before[rank].output().data());
  }
  for (auto& request : requests) request.set_keep_for_backward(true);
  for (const absl::Status& status : driver().RunEach(requests).statuses) {
    EXPECT_TRUE(HasReason(status, Reason::kConfigInvalid)) << status;
  }
  v1::ApplyGradientsRequest apply;
  apply.set_layer_id(layer_id);
  apply.set_expected_version(1);
  for (const absl::Status& status :
       driver().RunEach(std::vector<v1::ApplyGradientsRequest>(requests.size(), apply)).statuses) {
    EXPECT_TRUE(HasReason(status, Reason::kConfigInvalid)) << status;
  }
  const auto gradient = service().Shard(0, layer_id, "down", v1::PARAMETER_KIND_GRADIENT);
  EXPECT_TRUE(HasReason(gradient.status(), Reason::kConfigInvalid)) << gradient.status();
}

}  // namespace
}  // namespace expertd::conformance
