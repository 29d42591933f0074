// Collective operations as plain structs: what a caller asked, and what came of it.
//
// server/rpc fills the inputs from a request and reads the results after completion; the engine
// runs them in sequence order. An operation is shared between the engine (which keeps finished ones
// for retries) and every RPC that waits for it; after completion it is immutable.
#ifndef SERVER_ENGINE_OPERATIONS_H_
#define SERVER_ENGINE_OPERATIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "kernels/types.h"
#include "server/engine/config.h"

namespace expertd::engine {

// Mirrors expertd.v1.StepHeader.
struct StepHeader {
  std::string group_id;
  uint64_t epoch = 0;
  uint64_t sequence = 0;
  uint64_t request_id = 0;
};

enum class OpKind : uint8_t {
  kForward = 1,
  kBackward,
  kPrepare,
  kDispatch,
  kCombine,
  kDispatchBackward,
  kCombineBackward,
  kCreateLayer,
  kDeleteLayer,
  kInitializeWeights,
  kFreezeLayer,
  kConfigureOptimizer,
  kApplyGradients,
  kClearGradients,
};

// "Forward", "CreateLayer": the name of the method.
std::string_view OpName(OpKind kind);

struct ResidentTensor;

// A place in a resident tensor, in place of bytes in a request or response.
struct BufferPlace {
  std::string path;       // field path for errors: "tokens.buffer"
  std::string buffer_id;  // empty: no place is named
  uint64_t offset_bytes = 0;
  // Set from admission to the end of the operation, which shares the tensor with the store.
  std::shared_ptr<ResidentTensor> tensor;
  void* memory = nullptr;  // device memory, once the place is known to fit

  bool present() const { return !buffer_id.empty(); }
};

// A tensor of a request: a view of host memory that the operation's `keep_alive` owns, or a place
// in a resident tensor. Its payload size has been checked against dtype and shape. Absent when
// dtype is kInvalid.
struct TensorInput {
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // host memory; null for a place, until its values were fetched
  int64_t bytes = 0;
  std::string path;  // field path for errors: "tokens"
  BufferPlace buffer;
  std::string fetched;  // values of a place, where the host cannot read device memory

  bool present() const { return dtype != DType::kInvalid; }
};

// A tensor of a result: in host memory, or in the place that the request named for it.
struct TensorOutput {
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;
  std::string data;
  BufferPlace buffer;

  bool present() const { return dtype != DType::kInvalid; }
};

// Mirrors expertd.v1.StepStats; microseconds.
struct StepStats {
  int64_t queue_us = 0;
  int64_t arrival_us = 0;
  int64_t stage_in_us = 0;
  int64_t prepare_us = 0;
  int64_t dispatch_us = 0;
  int64_t experts_us = 0;
  int64_t combine_us = 0;
  int64_t stage_out_us = 0;
  int64_t total_us = 0;
  std::vector<int64_t> tokens_per_expert;
  std::vector<int64_t> padded_per_expert;
  int64_t routes_dropped = 0;
};

struct Operation {
  explicit Operation(OpKind op_kind) : kind(op_kind) {}
  virtual ~Operation() = default;
  // Every tensor that a request of this kind may bring, and every one that may come of it.
  virtual std::vector<TensorInput*> Inputs() { return {}; }
  virtual std::vector<TensorOutput*> Outputs() { return {}; }

  const OpKind kind;
  StepHeader header;
  // Not OK: the request was refused when it was decoded. It still takes its sequence, so that the
  // other ranks learn of it.
  absl::Status rejected;
  // The caller's deadline; the group's base limit applies too.
  SteadyTime deadline = SteadyTime::max();
  SteadyTime submitted;
  int64_t request_bytes = 0;
  // Owns the memory that the inputs point into; released when the operation has ended.
  std::shared_ptr<const void> keep_alive;
  // Named values that all ranks must agree on; set by the engine from the inputs.
  std::vector<ConfigField> arguments;

  // Results.
  absl::Status status;
  StepStats stats;
};

enum class RoutingSource : uint8_t { kTopk, kLogits, kLayerRouter };

struct ForwardOp final : Operation {
  ForwardOp() : Operation(OpKind::kForward) {}
  std::vector<TensorInput*> Inputs() override {
    return {&tokens, &topk_ids, &topk_weights, &router_logits};
  }
  std::vector<TensorOutput*> Outputs() override { return {&output}; }
  std::string layer_id;
  TensorInput tokens;  // [T, H]
  RoutingSource routing = RoutingSource::kTopk;
  TensorInput topk_ids;       // [T, K] I32 or I64
  TensorInput topk_weights;   // [T, K] F32
  TensorInput router_logits;  // [T, E] F32
  bool keep_for_backward = false;

  TensorOutput output;             // [T, H]
  TensorOutput used_topk_ids;      // [T, K] I64, when the router ran here
  TensorOutput used_topk_weights;  // [T, K] F32
  uint64_t ticket = 0;
  double aux_loss = 0;
};

struct BackwardOp final : Operation {
  BackwardOp() : Operation(OpKind::kBackward) {}
  std::vector<TensorInput*> Inputs() override { return {&output_gradient}; }
  std::vector<TensorOutput*> Outputs() override {
    return {&tokens_gradient, &topk_weights_gradient, &router_logits_gradient};
  }
  uint64_t ticket = 0;
  TensorInput output_gradient;  // [T, H]
  double aux_loss_gradient = 0;

  TensorOutput tokens_gradient;         // [T, H]
  TensorOutput topk_weights_gradient;   // [T, K] F32
  TensorOutput router_logits_gradient;  // [T, E] F32
};

struct PrepareOp final : Operation {
  PrepareOp() : Operation(OpKind::kPrepare) {}
  std::vector<TensorInput*> Inputs() override { return {&topk_ids}; }
  std::string layer_id;
  TensorInput topk_ids;

  uint64_t handle = 0;
  std::vector<int64_t> tokens_per_expert;
  std::vector<int64_t> padded_per_expert;
  std::vector<int64_t> dropped_per_expert;
  int64_t total_rows = 0;
};

struct DispatchOp final : Operation {
  DispatchOp() : Operation(OpKind::kDispatch) {}
  std::vector<TensorInput*> Inputs() override { return {&tokens, &topk_weights}; }
  std::vector<TensorOutput*> Outputs() override { return {&recv_tokens, &recv_weights}; }
  uint64_t handle = 0;
  TensorInput tokens;        // [T, H]
  TensorInput topk_weights;  // [T, K] F32

  TensorOutput recv_tokens;   // [total_rows, H]
  TensorOutput recv_weights;  // [total_rows] F32
};

struct CombineOp final : Operation {
  CombineOp() : Operation(OpKind::kCombine) {}
  std::vector<TensorInput*> Inputs() override { return {&expert_output, &slot_weights}; }
  std::vector<TensorOutput*> Outputs() override { return {&output}; }
  uint64_t handle = 0;
  TensorInput expert_output;  // [total_rows, H]
  TensorInput slot_weights;   // [total_rows] F32, or absent on every rank

  TensorOutput output;  // [T, H]
};

struct DispatchBackwardOp final : Operation {
  DispatchBackwardOp() : Operation(OpKind::kDispatchBackward) {}
  std::vector<TensorInput*> Inputs() override {
    return {&recv_tokens_gradient, &recv_weights_gradient};
  }
  std::vector<TensorOutput*> Outputs() override {
    return {&tokens_gradient, &topk_weights_gradient};
  }
  uint64_t handle = 0;
  TensorInput recv_tokens_gradient;   // [total_rows, H]
  TensorInput recv_weights_gradient;  // [total_rows] F32, or absent on every rank

  TensorOutput tokens_gradient;        // [T, H]
  TensorOutput topk_weights_gradient;  // [T, K] F32
};

struct CombineBackwardOp final : Operation {
  CombineBackwardOp() : Operation(OpKind::kCombineBackward) {}
  std::vector<TensorInput*> Inputs() override { return {&output_gradient, &slot_weights}; }
  std::vector<TensorOutput*> Outputs() override { return {&expert_output_gradient}; }
  uint64_t handle = 0;
  TensorInput output_gradient;  // [T, H]
  TensorInput slot_weights;     // [total_rows] F32, or absent on every rank

  TensorOutput expert_output_gradient;  // [total_rows, H]
};

// Mirrors expertd.v1.LayerInfo.
enum class LayerState : uint8_t { kCreated = 1, kReady, kNeedsRestore };

struct LayerInfo {
  std::string layer_id;
  LayerConfig config;
  LayerState state = LayerState::kCreated;
  bool frozen = false;
  uint64_t weights_version = 0;
  // Digest of where the values come from: a seed, then every apply. Ranks whose weights have one
  // version and different lineages do not hold the same model.
  uint64_t weights_lineage = 0;
  uint64_t durable_version = 0;
  int64_t first_expert = 0;
  int64_t local_experts = 0;
  uint64_t fingerprint = 0;
  int64_t accumulated_backwards = 0;
  bool gradients_valid = true;
  std::string mlp;
  std::map<std::string, int64_t> memory_bytes;
  std::string reason;
  // Routes each local expert received and dropped since the layer was created.
  std::vector<int64_t> routes;
  std::vector<int64_t> routes_dropped;
  int64_t forwards = 0;
};

struct CreateLayerOp final : Operation {
  CreateLayerOp() : Operation(OpKind::kCreateLayer) {}
  std::string layer_id;
  LayerConfig config;

  LayerInfo layer;
};

struct InitializeWeightsOp final : Operation {
  InitializeWeightsOp() : Operation(OpKind::kInitializeWeights) {}
  std::string layer_id;
  uint64_t seed = 0;

  uint64_t weights_version = 0;
};

struct ConfigureOptimizerOp final : Operation {
  ConfigureOptimizerOp() : Operation(OpKind::kConfigureOptimizer) {}
  std::string layer_id;
  OptimizerConfig optimizer;
};

struct ApplyGradientsOp final : Operation {
  ApplyGradientsOp() : Operation(OpKind::kApplyGradients) {}
  std::string layer_id;
  double learning_rate = 0;
  uint64_t expected_version = 0;
  double gradient_scale = 0;

  uint64_t weights_version = 0;
  uint64_t durable_version = 0;
  double gradient_norm = 0;
  bool applied = false;
};

// Operations whose only input is the layer: DeleteLayer, FreezeLayer, ClearGradients.
struct LayerOp final : Operation {
  explicit LayerOp(OpKind op_kind) : Operation(op_kind) {}
  std::string layer_id;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_OPERATIONS_H_
