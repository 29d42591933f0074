// Parameters of a layer: allocation, initialisation, update.
#include "server/engine/layer.h"

#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

constexpr int64_t kF32 = sizeof(float);

absl::Status AllocateZeroed(Device& device, int64_t bytes, DeviceBuffer& buffer) {
  ASSIGN_OR_RETURN(buffer, device.Allocate(bytes));
  return device.Zero(buffer.data(), bytes);
}

int64_t StateBuffers(const OptimizerConfig& optimizer) {
  if (optimizer.kind == OptimizerKind::kAdamW) return 2;
  return optimizer.kind == OptimizerKind::kSgd && optimizer.momentum > 0 ? 1 : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Layer>> Layer::Create(std::string layer_id, LayerConfig config,
                                                     int64_t rank, int64_t world, Device& device,
                                                     std::unique_ptr<ExpertMlp> mlp) {
  std::unique_ptr<Layer> layer(new Layer(device, std::move(mlp)));
  LayerInfo& info = layer->info_;
  info.layer_id = std::move(layer_id);
  info.config = std::move(config);
  info.local_experts = info.config.expert_count / world;
  info.first_expert = rank * info.local_experts;
  info.fingerprint = LayerFingerprint(info.config);
  info.mlp = std::string(layer->mlp_->name());
  info.routes.assign(static_cast<size_t>(info.local_experts), 0);
  info.routes_dropped = info.routes;
  layer->DescribeParameters(rank, world);
  for (Parameter& parameter : layer->parameters_) {
    RETURN_IF_ERROR(AllocateZeroed(device, parameter.count * kF32, parameter.master));
    RETURN_IF_ERROR(AllocateZeroed(device, parameter.count * kF32, parameter.gradient));
    if (parameter.has_compute_copy && info.config.weight_dtype != DType::kF32) {
      const auto size = static_cast<int64_t>(DTypeSize(info.config.weight_dtype));
      RETURN_IF_ERROR(AllocateZeroed(device, parameter.count * size, parameter.compute));
    }
  }
  RETURN_IF_ERROR(layer->AllocateOptimizerState(info.config.optimizer));
  return layer;
}

void Layer::AddParameter(Parameter parameter) {
  parameter.count = 1;
  for (int64_t size : parameter.local_shape) parameter.count *= size;
  parameters_.push_back(std::move(parameter));
}

void Layer::DescribeParameters(int64_t rank, int64_t) {
  const LayerConfig& c = info_.config;
  const int64_t local = info_.local_experts;
  const int64_t first = rank * local;
  // A tensor split over experts: [local, ...rest], with one expert's elements in `each`.
  auto expert_tensor = [&](std::string name, uint32_t key, std::vector<int64_t> rest,
                           int64_t fan_in, bool matrix) {
    Parameter parameter;
    int64_t each = 1;
    for (int64_t size : rest) each *= size;
    parameter.name = std::move(name);
    parameter.key = key;
    parameter.local_shape = std::move(rest);
    parameter.local_shape.insert(parameter.local_shape.begin(), local);
    parameter.offsets.assign(parameter.local_shape.size(), 0);
    parameter.offsets[0] = first;
    parameter.first_index = first * each;
    parameter.fan_in = fan_in;
    parameter.has_compute_copy = matrix;
    AddParameter(std::move(parameter));
  };
  expert_tensor("gate_up", 1, {c.hidden, 2 * c.intermediate}, c.hidden, true);
  expert_tensor("down", 2, {c.intermediate, c.hidden}, c.intermediate, true);
  if (c.gate_up_bias) expert_tensor("gate_up_bias", 3, {2 * c.intermediate}, 0, false);
  if (c.down_bias) expert_tensor("down_bias", 4, {c.hidden}, 0, false);
  if (!c.router_on_server) return;
  Parameter router;
  router.name = "router";
  router.key = 5;
  router.local_shape = {c.hidden, c.expert_count};
  router.offsets = {0, 0};
  router.fan_in = c.hidden;
  router.replicated = true;
  AddParameter(std::move(router));
  if (!c.router.selection_bias) return;
  Parameter bias;
  bias.name = "router_bias";
  bias.key = 6;
  bias.local_shape = {c.expert_count};
  bias.offsets = {0};
  bias.replicated = true;
  bias.trained = false;  // it steers selection only; its gradient is 0
  AddParameter(std::move(bias));
}

Parameter* Layer::Find(std::string_view name) {
  for (Parameter& parameter : parameters_) {
    if (parameter.name == name) return &parameter;
  }
  return nullptr;
}

MlpWeights Layer::Weights() const {
  MlpWeights weights;
  for (const Parameter& parameter : parameters_) {
    const void* compute =
        parameter.compute.data() != nullptr ? parameter.compute.data() : parameter.master.data();
    if (parameter.name == "gate_up") weights.gate_up = compute;
    if (parameter.name == "down") weights.down = compute;
    if (parameter.name == "gate_up_bias") weights.gate_up_bias = parameter.master.as<float>();
    if (parameter.name == "down_bias") weights.down_bias = parameter.master.as<float>();
  }
  weights.version = content_version_;
  return weights;
}

MlpGradients Layer::Gradients() const {
  MlpGradients gradients;
  for (const Parameter& parameter : parameters_) {
    float* gradient = parameter.gradient.as<float>();
    if (parameter.name == "gate_up") gradients.gate_up = gradient;
    if (parameter.name == "down") gradients.down = gradient;
    if (parameter.name == "gate_up_bias") gradients.gate_up_bias = gradient;
    if (parameter.name == "down_bias") gradients.down_bias = gradient;
  }
  return gradients;
}

absl::Status Layer::RefreshComputeCopies(OptimKernels& optim) {
  ++content_version_;
  for (Parameter& parameter : parameters_) {
    if (parameter.compute.data() == nullptr) continue;
    RETURN_IF_ERROR(optim.Round(parameter.master.as<float>(), parameter.count,
                                info_.config.weight_dtype, parameter.compute.data()));
  }
  return absl::OkStatus();
}

absl::Status Layer::Initialize(uint64_t seed, OptimKernels& optim) {
  for (Parameter& parameter : parameters_) {
    if (parameter.fan_in == 0) {
      RETURN_IF_ERROR(device_.Zero(parameter.master.data(), parameter.master.size()));
      continue;
    }
    InitArgs args;
    args.seed = seed;
    args.layer_key = Fingerprint(info_.layer_id);
    args.parameter_key = parameter.key;
    args.first_index = parameter.first_index;
    args.count = parameter.count;
    // Uniform in +-sqrt(3 / fan_in) has the variance 1 / fan_in.
    args.bound = static_cast<float>(std::sqrt(3.0 / static_cast<double>(parameter.fan_in)));
    RETURN_IF_ERROR(optim.InitUniform(args, parameter.master.as<float>()));
  }
  RETURN_IF_ERROR(RefreshComputeCopies(optim));
  if (!info_.frozen) {
    RETURN_IF_ERROR(ClearGradients());
    RETURN_IF_ERROR(ZeroOptimizerState());
  }
  info_.weights_version = 1;
  info_.weights_lineage = Fingerprint(StrCat("seed ", seed));
  info_.state = LayerState::kReady;
  info_.reason.clear();
  return absl::OkStatus();
}

absl::Status Layer::ClearGradients() {
  for (Parameter& parameter : parameters_) {
    if (parameter.gradient.data() == nullptr) continue;
    RETURN_IF_ERROR(device_.Zero(parameter.gradient.data(), parameter.gradient.size()));
  }
  info_.accumulated_backwards = 0;
  info_.gradients_valid = true;
  return absl::OkStatus();
}

void Layer::Freeze() {
  info_.frozen = true;
  for (Parameter& parameter : parameters_) {
    parameter.gradient.Reset();
    parameter.first.Reset();
    parameter.second.Reset();
  }
  info_.accumulated_backwards = 0;
}

absl::Status Layer::AllocateOptimizerState(const OptimizerConfig& optimizer) {
  const int64_t buffers = StateBuffers(optimizer);
  std::vector<std::pair<DeviceBuffer, DeviceBuffer>> states(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].trained) continue;
    const int64_t bytes = parameters_[i].count * kF32;
    if (buffers > 0) RETURN_IF_ERROR(AllocateZeroed(device_, bytes, states[i].first));
    if (buffers > 1) RETURN_IF_ERROR(AllocateZeroed(device_, bytes, states[i].second));
  }
  // Nothing can fail from here on.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].first = std::move(states[i].first);
    parameters_[i].second = std::move(states[i].second);
  }
  optimizer_steps_ = 0;
  return absl::OkStatus();
}

absl::Status Layer::ZeroOptimizerState() {
  optimizer_steps_ = 0;
  for (Parameter& parameter : parameters_) {
    for (DeviceBuffer* state : {&parameter.first, &parameter.second}) {
      if (state->data() == nullptr) continue;
      RETURN_IF_ERROR(device_.Zero(state->data(), state->size()));
    }
  }
  return absl::OkStatus();
}

absl::Status Layer::Configure(const OptimizerConfig& optimizer) {
  const bool same_state = info_.config.optimizer.kind == optimizer.kind &&
                          StateBuffers(info_.config.optimizer) == StateBuffers(optimizer);
  if (!same_state) RETURN_IF_ERROR(AllocateOptimizerState(optimizer));
  info_.config.optimizer = optimizer;
  return absl::OkStatus();
}

absl::Status Layer::Update(Parameter& parameter, double learning_rate, double scale,
                           OptimKernels& optim) {
  const OptimizerConfig& config = info_.config.optimizer;
  const float* gradient = parameter.gradient.as<float>();
  float* master = parameter.master.as<float>();
  if (config.kind == OptimizerKind::kSgd) {
    SgdArgs args;
    args.learning_rate = learning_rate;
    args.momentum = config.momentum;
    args.weight_decay = config.weight_decay;
    args.gradient_scale = scale;
    return optim.Sgd(args, gradient, parameter.count, parameter.first.as<float>(), master);
  }
  AdamWArgs args;
  args.learning_rate = learning_rate;
  args.beta1 = config.beta1;
  args.beta2 = config.beta2;
  args.epsilon = config.epsilon;
  args.weight_decay = config.weight_decay;
  args.gradient_scale = scale;
  args.step = optimizer_steps_ + 1;
  return optim.AdamW(args, gradient, parameter.count, parameter.first.as<float>(),
                     parameter.second.as<float>(), master);
}

absl::Status Layer::Apply(double learning_rate, double scale, OptimKernels& optim) {
  for (Parameter& parameter : parameters_) {
    if (parameter.trained) RETURN_IF_ERROR(Update(parameter, learning_rate, scale, optim));
  }
  ++optimizer_steps_;
  RETURN_IF_ERROR(RefreshComputeCopies(optim));
  RETURN_IF_ERROR(ClearGradients());
  ++info_.weights_version;
  return absl::OkStatus();
}

}  // namespace expertd::engine
