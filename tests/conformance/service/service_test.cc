// The shared groups of the conformance suite, its parameters and its helpers.
#include "tests/conformance/service/service_test.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/strings.h"

namespace expertd::conformance {
namespace {

using testing::Backend;
using testing::ServiceHarness;
using testing::ServiceShape;

// Owned by the environment below, so that daemons end before the program's statics do.
std::map<ServiceShape, std::unique_ptr<ServiceHarness>>& Services() {
  static auto* const services = new std::map<ServiceShape, std::unique_ptr<ServiceHarness>>();
  return *services;
}

class StopServices final : public ::testing::Environment {
 public:
  void TearDown() override { Services().clear(); }
};
const auto* const kStopServices = ::testing::AddGlobalTestEnvironment(new StopServices);

// Those of EXPERTD_TEST_SHAPES ("nccl_1,nccl_2"), otherwise those of the CPU.
std::vector<ServiceShape> AllShapes() {
  std::vector<ServiceShape> shapes;
  const char* chosen = std::getenv("EXPERTD_TEST_SHAPES");
  if (chosen != nullptr && *chosen != '\0') {
    for (absl::string_view text : absl::StrSplit(chosen, ',')) {
      const auto shape = testing::ParseShape(std::string(text));
      if (!shape.ok()) {
        std::fprintf(stderr, "EXPERTD_TEST_SHAPES: %s\n",
                     std::string(shape.status().message()).c_str());
        std::exit(2);
      }
      shapes.push_back(*shape);
    }
    return shapes;
  }
  for (const Backend backend : {Backend::kLoopback, Backend::kGloo}) {
    for (const int64_t world : {1, 2, 3, 4, 8}) shapes.push_back({backend, world});
  }
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Conformance, ServiceTest, ::testing::ValuesIn(AllShapes()),
                         [](const auto& info) { return testing::ToString(info.param); });

}  // namespace

ServiceHarness* SharedService(const ServiceShape& shape) {
  std::unique_ptr<ServiceHarness>& service = Services()[shape];
  if (service == nullptr) {
    absl::StatusOr<std::unique_ptr<ServiceHarness>> started = ServiceHarness::Start(shape);
    if (!started.ok()) {
      ADD_FAILURE() << "starting " << ToString(shape) << ": " << started.status();
      return nullptr;
    }
    service = *std::move(started);
  }
  return service.get();
}

void ServiceTest::SetUp() {
  service_ = SharedService(GetParam());
  ASSERT_NE(service_, nullptr);
  UseGroup(DefaultGroup());
}

void ServiceTest::TearDown() {
  if (service_ == nullptr) return;
  if (HasFailure()) {
    std::fputs(service_->Describe().c_str(), stderr);
    Services().erase(GetParam());
    return;
  }
  for (const std::string& layer_id : layers_) {
    v1::DeleteLayerRequest request;
    request.set_layer_id(layer_id);
    RunSame(request);
  }
}

void ServiceTest::UseGroup(const v1::GroupConfig& config) { ASSERT_OK(service_->Form(config)); }

std::string ServiceTest::MakeLayer(const v1::LayerConfig& config) {
  const std::string layer_id =
      StrCat(::testing::UnitTest::GetInstance()->current_test_info()->name(), "/", layers_.size());
  v1::CreateLayerRequest request;
  request.set_layer_id(layer_id);
  *request.mutable_config() = config;
  const auto created = driver().RunSame(request);
  if (created.ok()) {
    layers_.push_back(layer_id);
  } else {
    ADD_FAILURE() << created.status();
  }
  return layer_id;
}

std::string ServiceTest::MakeLayer(const v1::LayerConfig& config, uint64_t seed) {
  const std::string layer_id = MakeLayer(config);
  v1::InitializeWeightsRequest request;
  request.set_layer_id(layer_id);
  request.set_seed(seed);
  if (!HasFailure()) RunSame(request);
  return layer_id;
}

std::vector<std::vector<float>> ServiceTest::Shards(const std::string& layer_id,
                                                    const std::string& parameter,
                                                    v1::ParameterKind kind) {
  std::vector<std::vector<float>> shards;
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto shard = service_->Shard(rank, layer_id, parameter, kind);
    if (!shard.ok()) {
      ADD_FAILURE() << shard.status();
      shards.emplace_back();
      continue;
    }
    shards.push_back(Floats(Values(shard->tensor)));
  }
  return shards;
}

std::vector<float> ServiceTest::Parameter(const std::string& layer_id, const std::string& parameter,
                                          v1::ParameterKind kind) {
  const std::vector<std::vector<float>> shards = Shards(layer_id, parameter, kind);
  if (parameter == "router" || parameter == "router_bias") {
    for (const auto& shard : shards) EXPECT_EQ(shard, shards.front()) << parameter;
    return shards.front();
  }
  std::vector<float> all;
  for (const auto& shard : shards) all.insert(all.end(), shard.begin(), shard.end());
  return all;
}

int64_t ServiceTest::FitHidden(int64_t hidden, v1::DType dtype) const {
  if (!GetParam().on_gpu()) return hidden;
  constexpr int64_t kRowBytes = 16;  // GPUs take rows in pieces of that size
  const int64_t step = kRowBytes / client::ElementBytes(dtype);
  return (hidden + step - 1) / step * step;
}

v1::LayerConfig SmallLayer(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate) {
  v1::LayerConfig config;
  config.set_expert_count(experts);
  config.set_top_k(top_k);
  config.set_hidden(hidden);
  config.set_intermediate(intermediate);
  config.set_token_dtype(v1::DTYPE_F32);
  config.set_weight_dtype(v1::DTYPE_F32);
  return config;
}

std::vector<double> Values(const v1::Tensor& tensor) {
  const auto values = client::ReadFloats(tensor);
  if (!values.ok()) {
    ADD_FAILURE() << values.status();
    return {};
  }
  return std::vector<double>(values->begin(), values->end());
}

std::vector<int64_t> Ints(const v1::Tensor& tensor) {
  const auto values = client::ReadInts(tensor);
  if (values.ok()) return *values;
  ADD_FAILURE() << values.status();
  return {};
}

std::vector<float> Floats(const std::vector<double>& values) {
  std::vector<float> floats;
  for (double value : values) floats.push_back(static_cast<float>(value));
  return floats;
}

std::vector<double> RoundTo(v1::DType dtype, std::vector<double> values) {
  return Values(client::FloatTensor(dtype, {static_cast<int64_t>(values.size())}, Floats(values)));
}

v1::Tensor TokenTensor(v1::DType dtype, const std::vector<double>& values, int64_t columns) {
  return client::FloatTensor(dtype, {static_cast<int64_t>(values.size()) / columns, columns},
                             Floats(values));
}

v1::Tensor IdTensor(const std::vector<int64_t>& ids, int64_t top_k) {
  return client::Int64Tensor({static_cast<int64_t>(ids.size()) / top_k, top_k}, ids);
}

v1::Tensor WeightTensor(const std::vector<double>& values, int64_t columns) {
  return TokenTensor(v1::DTYPE_F32, values, columns);
}

}  // namespace expertd::conformance
