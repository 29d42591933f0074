// Step requests to operations and operations to responses.
//
// Decode fills everything but the header and returns every problem of the request at once; the
// operation's inputs then point into the request. Encode copies the results.
#ifndef SERVER_RPC_CONVERT_STEP_H_
#define SERVER_RPC_CONVERT_STEP_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "expertd/v1/step_service.pb.h"
#include "expertd/v1/types.pb.h"
#include "server/engine/engine.h"
#include "server/engine/operations.h"
#include "server/rpc/convert_tensor.h"

namespace expertd::rpc {

// Reports an empty or too long id as CONFIG_INVALID at `path`.
void CheckId(const std::string& id, const std::string& path, Violations* violations);

// Errors: CONFIG_INVALID for a missing part; a null header is a missing one.
absl::StatusOr<engine::StepHeader> FromProto(const v1::StepHeader* header);

absl::Status Decode(const v1::ForwardRequest& request, engine::ForwardOp* op);
absl::Status Decode(const v1::BackwardRequest& request, engine::BackwardOp* op);
absl::Status Decode(const v1::PrepareRequest& request, engine::PrepareOp* op);
absl::Status Decode(const v1::DispatchRequest& request, engine::DispatchOp* op);
absl::Status Decode(const v1::CombineRequest& request, engine::CombineOp* op);
absl::Status Decode(const v1::DispatchBackwardRequest& request, engine::DispatchBackwardOp* op);
absl::Status Decode(const v1::CombineBackwardRequest& request, engine::CombineBackwardOp* op);

void Encode(const engine::ForwardOp& op, v1::ForwardResponse* response);
void Encode(const engine::BackwardOp& op, v1::BackwardResponse* response);
void Encode(const engine::PrepareOp& op, v1::PrepareResponse* response);
void Encode(const engine::DispatchOp& op, v1::DispatchResponse* response);
void Encode(const engine::CombineOp& op, v1::CombineResponse* response);
void Encode(const engine::DispatchBackwardOp& op, v1::DispatchBackwardResponse* response);
void Encode(const engine::CombineBackwardOp& op, v1::CombineBackwardResponse* response);

void ToProto(const engine::StepStats& stats, v1::StepStats* out);
void ToProto(const engine::StepOutcome& outcome, v1::GetStepOutcomeResponse* out);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONVERT_STEP_H_
