// What each layer method requires, and how results go into its response.
#include "server/rpc/convert_layer.h"

#include <cmath>
#include <string>

#include "base/strings.h"
#include "server/rpc/convert_config.h"
#include "server/rpc/convert_step.h"

namespace expertd::rpc {
namespace {

constexpr char kInvalid[] = "invalid request";

// The layer id, which every layer method has.
template <typename Request, typename Op>
void DecodeLayerId(const Request& request, Op* op, Violations* violations) {
  CheckId(request.layer_id(), "layer_id", violations);
  op->layer_id = request.layer_id();
}

template <typename Request>
absl::Status DecodeLayerOnly(const Request& request, engine::LayerOp* op) {
  Violations violations;
  DecodeLayerId(request, op, &violations);
  return violations.ToStatus(kInvalid);
}

}  // namespace

static_assert(static_cast<int>(v1::LAYER_STATE_CREATED) ==
                  static_cast<int>(engine::LayerState::kCreated) &&
              static_cast<int>(v1::LAYER_STATE_NEEDS_RESTORE) ==
                  static_cast<int>(engine::LayerState::kNeedsRestore));

absl::Status Decode(const v1::CreateLayerRequest& request, engine::CreateLayerOp* op) {
  Violations violations;
  DecodeLayerId(request, op, &violations);
  if (request.has_config()) {
    op->config = FromProto(request.config(), "config", &violations);
  } else {
    violations.Add(Reason::kConfigInvalid, "config", "got none, need one");
  }
  return violations.ToStatus(kInvalid);
}

absl::Status Decode(const v1::DeleteLayerRequest& request, engine::LayerOp* op) {
  return DecodeLayerOnly(request, op);
}

absl::Status Decode(const v1::FreezeLayerRequest& request, engine::LayerOp* op) {
  return DecodeLayerOnly(request, op);
}

absl::Status Decode(const v1::ClearGradientsRequest& request, engine::LayerOp* op) {
  return DecodeLayerOnly(request, op);
}

absl::Status Decode(const v1::InitializeWeightsRequest& request, engine::InitializeWeightsOp* op) {
  Violations violations;
  DecodeLayerId(request, op, &violations);
  op->seed = request.seed();
  return violations.ToStatus(kInvalid);
}

absl::Status Decode(const v1::ConfigureOptimizerRequest& request,
                    engine::ConfigureOptimizerOp* op) {
  Violations violations;
  DecodeLayerId(request, op, &violations);
  if (request.has_optimizer()) {
    op->optimizer = FromProto(request.optimizer(), "optimizer", &violations);
  } else {
    violations.Add(Reason::kConfigInvalid, "optimizer", "got none, need one");
  }
  return violations.ToStatus(kInvalid);
}

absl::Status Decode(const v1::ApplyGradientsRequest& request, engine::ApplyGradientsOp* op) {
  Violations violations;
  DecodeLayerId(request, op, &violations);
  op->learning_rate = request.learning_rate();
  op->expected_version = request.expected_version();
  op->gradient_scale = request.gradient_scale();
  if (!std::isfinite(op->learning_rate) || op->learning_rate < 0) {
    violations.Add(Reason::kConfigInvalid, "learning_rate",
                   StrCat("got ", op->learning_rate, ", need a finite number, at least 0"));
  }
  if (!std::isfinite(op->gradient_scale)) {
    violations.Add(Reason::kConfigInvalid, "gradient_scale",
                   StrCat("got ", op->gradient_scale, ", need a finite number"));
  }
  return violations.ToStatus(kInvalid);
}

void Encode(const engine::CreateLayerOp& op, v1::CreateLayerResponse* response) {
  ToProto(op.layer, response->mutable_layer());
}

void Encode(const engine::InitializeWeightsOp& op, v1::InitializeWeightsResponse* response) {
  response->set_weights_version(op.weights_version);
}

void Encode(const engine::ApplyGradientsOp& op, v1::ApplyGradientsResponse* response) {
  response->set_weights_version(op.weights_version);
  response->set_durable_version(op.durable_version);
  response->set_gradient_norm(op.gradient_norm);
  response->set_applied(op.applied);
}

// These answer with success alone.
void Encode(const engine::LayerOp&, v1::DeleteLayerResponse*) {}
void Encode(const engine::LayerOp&, v1::FreezeLayerResponse*) {}
void Encode(const engine::LayerOp&, v1::ClearGradientsResponse*) {}
void Encode(const engine::ConfigureOptimizerOp&, v1::ConfigureOptimizerResponse*) {}

void ToProto(const engine::LayerInfo& layer, v1::LayerInfo* out) {
  out->set_layer_id(layer.layer_id);
  ToProto(layer.config, out->mutable_config());
  out->set_state(static_cast<v1::LayerState>(layer.state));
  out->set_frozen(layer.frozen);
  out->set_weights_version(layer.weights_version);
  out->set_durable_version(layer.durable_version);
  out->set_first_expert(layer.first_expert);
  out->set_local_experts(layer.local_experts);
  out->set_fingerprint(layer.fingerprint);
  out->set_accumulated_backwards(layer.accumulated_backwards);
  out->set_gradients_valid(layer.gradients_valid);
  out->set_mlp(layer.mlp);
  out->mutable_memory_bytes()->insert(layer.memory_bytes.begin(), layer.memory_bytes.end());
  out->set_reason(layer.reason);
}

void ToProto(const engine::LayerInfo& layer, v1::GetExpertLoadResponse* out) {
  out->set_first_expert(layer.first_expert);
  out->mutable_routes()->Assign(layer.routes.begin(), layer.routes.end());
  out->mutable_routes_dropped()->Assign(layer.routes_dropped.begin(), layer.routes_dropped.end());
  out->set_forwards(layer.forwards);
}

absl::StatusOr<engine::ParameterKind> FromProto(v1::ParameterKind kind) {
  switch (kind) {
    case v1::PARAMETER_KIND_UNSPECIFIED:
    case v1::PARAMETER_KIND_MASTER:
      return engine::ParameterKind::kMaster;
    case v1::PARAMETER_KIND_COMPUTE:
      return engine::ParameterKind::kCompute;
    case v1::PARAMETER_KIND_GRADIENT:
      return engine::ParameterKind::kGradient;
    case v1::PARAMETER_KIND_FIRST_MOMENT:
      return engine::ParameterKind::kFirstMoment;
    case v1::PARAMETER_KIND_SECOND_MOMENT:
      return engine::ParameterKind::kSecondMoment;
    default:
      return Error(Reason::kConfigInvalid)
          .Text("invalid request")
          .At("kind", StrCat("got ", static_cast<int>(kind), ", which the enum does not have"));
  }
}

}  // namespace expertd::rpc
