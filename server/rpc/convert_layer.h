// Layer requests to operations, operations to responses, and facts about layers.
//
// Decode and Encode as in convert_step.h.
#ifndef SERVER_RPC_CONVERT_LAYER_H_
#define SERVER_RPC_CONVERT_LAYER_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "expertd/v1/layer_service.pb.h"
#include "server/engine/engine.h"
#include "server/engine/operations.h"

namespace expertd::rpc {

absl::Status Decode(const v1::CreateLayerRequest& request, engine::CreateLayerOp* op);
absl::Status Decode(const v1::DeleteLayerRequest& request, engine::LayerOp* op);
absl::Status Decode(const v1::InitializeWeightsRequest& request, engine::InitializeWeightsOp* op);
absl::Status Decode(const v1::FreezeLayerRequest& request, engine::LayerOp* op);
absl::Status Decode(const v1::ConfigureOptimizerRequest& request, engine::ConfigureOptimizerOp* op);
absl::Status Decode(const v1::ApplyGradientsRequest& request, engine::ApplyGradientsOp* op);
absl::Status Decode(const v1::ClearGradientsRequest& request, engine::LayerOp* op);

void Encode(const engine::CreateLayerOp& op, v1::CreateLayerResponse* response);
void Encode(const engine::LayerOp& op, v1::DeleteLayerResponse* response);
void Encode(const engine::InitializeWeightsOp& op, v1::InitializeWeightsResponse* response);
void Encode(const engine::LayerOp& op, v1::FreezeLayerResponse* response);
void Encode(const engine::ConfigureOptimizerOp& op, v1::ConfigureOptimizerResponse* response);
void Encode(const engine::ApplyGradientsOp& op, v1::ApplyGradientsResponse* response);
void Encode(const engine::LayerOp& op, v1::ClearGradientsResponse* response);

void ToProto(const engine::LayerInfo& layer, v1::LayerInfo* out);
void ToProto(const engine::LayerInfo& layer, v1::GetExpertLoadResponse* out);

// Errors: CONFIG_INVALID for a kind that does not exist.
absl::StatusOr<engine::ParameterKind> FromProto(v1::ParameterKind kind);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONVERT_LAYER_H_
