// Builds operations with inputs that own their memory, for engine tests.
#ifndef TESTS_SERVER_ENGINE_STEP_INPUTS_H_
#define TESTS_SERVER_ENGINE_STEP_INPUTS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/operations.h"

namespace expertd::engine {

// A layer small enough to compute by hand: 8 experts, hidden 8, intermediate 4, top 2, all f32.
inline LayerConfig SmallLayer() {
  LayerConfig config;
  config.expert_count = 8;
  config.hidden = 8;
  config.intermediate = 4;
  config.top_k = 2;
  config.token_dtype = DType::kF32;
  config.weight_dtype = DType::kF32;
  config.optimizer.kind = OptimizerKind::kSgd;
  return config;
}

// A group that fits SmallLayer.
inline GroupConfig SmallGroup(int64_t world) {
  GroupConfig config;
  config.ep_size = world;
  config.backend = "loopback";
  config.max_tokens_per_rank = 16;
  config.max_hidden = 8;
  config.max_top_k = 2;
  config.max_experts = 8;
  config.base_timeout_ms = 10000;
  return config;
}

template <typename T>
TensorInput View(DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  TensorInput input;
  input.dtype = dtype;
  input.shape = std::move(shape);
  input.data = values.data();
  input.bytes = static_cast<int64_t>(values.size() * sizeof(T));
  return input;
}

// What a small forward is made of. tokens: [T, 8]; ids, weights: [T, 2].
struct ForwardInputs {
  std::vector<float> tokens;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// Rows [first, first + count) of a fixed global batch: the same wherever they are computed.
inline ForwardInputs GlobalRows(int64_t first, int64_t count) {
  ForwardInputs inputs;
  for (int64_t t = first; t < first + count; ++t) {
    for (int64_t h = 0; h < 8; ++h) {
      inputs.tokens.push_back(static_cast<float>((t * 8 + h) % 11 - 5) / 4.0f);
    }
    inputs.ids.push_back(static_cast<int32_t>(t % 8));
    inputs.ids.push_back(static_cast<int32_t>((t + 3) % 8));
    inputs.weights.push_back(0.25f + 0.125f * static_cast<float>(t % 3));
    inputs.weights.push_back(0.5f);
  }
  return inputs;
}

inline std::shared_ptr<ForwardOp> MakeForward(ForwardInputs inputs, bool keep = false) {
  auto op = std::make_shared<ForwardOp>();
  auto owned = std::make_shared<ForwardInputs>(std::move(inputs));
  const auto tokens = static_cast<int64_t>(owned->ids.size() / 2);
  op->layer_id = "layer";
  op->tokens = View(DType::kF32, {tokens, 8}, owned->tokens);
  op->topk_ids = View(DType::kI32, {tokens, 2}, owned->ids);
  op->topk_weights = View(DType::kF32, {tokens, 2}, owned->weights);
  op->keep_for_backward = keep;
  op->request_bytes = op->tokens.bytes + op->topk_ids.bytes + op->topk_weights.bytes;
  op->keep_alive = std::move(owned);
  return op;
}

inline std::shared_ptr<BackwardOp> MakeBackward(uint64_t ticket, int64_t tokens) {
  auto op = std::make_shared<BackwardOp>();
  auto owned = std::make_shared<std::vector<float>>();
  for (int64_t i = 0; i < tokens * 8; ++i) owned->push_back(static_cast<float>(i % 5 - 2) / 2.0f);
  op->ticket = ticket;
  op->output_gradient = View(DType::kF32, {tokens, 8}, *owned);
  op->keep_alive = std::move(owned);
  return op;
}

inline std::shared_ptr<CreateLayerOp> MakeCreateLayer(LayerConfig config = SmallLayer()) {
  auto op = std::make_shared<CreateLayerOp>();
  op->layer_id = "layer";
  op->config = std::move(config);
  return op;
}

inline std::shared_ptr<InitializeWeightsOp> MakeInitialize(uint64_t seed = 7) {
  auto op = std::make_shared<InitializeWeightsOp>();
  op->layer_id = "layer";
  op->seed = seed;
  return op;
}

inline std::shared_ptr<ApplyGradientsOp> MakeApply(uint64_t expected_version,
                                                   double learning_rate = 0.125) {
  auto op = std::make_shared<ApplyGradientsOp>();
  op->layer_id = "layer";
  op->learning_rate = learning_rate;
  op->expected_version = expected_version;
  return op;
}

inline std::shared_ptr<LayerOp> MakeLayerOp(OpKind kind) {
  auto op = std::make_shared<LayerOp>(kind);
  op->layer_id = "layer";
  return op;
}

inline std::vector<float> Floats(const TensorOutput& tensor) {
  std::vector<float> values(tensor.data.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

}  // namespace expertd::engine

#endif  // TESTS_SERVER_ENGINE_STEP_INPUTS_H_
