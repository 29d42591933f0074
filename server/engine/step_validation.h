// Complete validation of a decoded operation against its layer, group, ticket or handle. Pure.
//
// Runs before the arrival exchange, so that a bad request is known to every rank before anything
// moves. Every violation of one request is reported at once, with field paths.
#ifndef SERVER_ENGINE_STEP_VALIDATION_H_
#define SERVER_ENGINE_STEP_VALIDATION_H_

#include "absl/status/status.h"
#include "kernels/ep_backend.h"
#include "server/engine/config.h"
#include "server/engine/operations.h"

namespace expertd::engine {

// Errors: SHAPE_MISMATCH, DTYPE_UNSUPPORTED, TOKENS_OVER_LIMIT, EXPERT_ID_RANGE, DUPLICATE_EXPERT,
// NON_FINITE_WEIGHT, CONFIG_INVALID, LAYER_NEEDS_RESTORE.
absl::Status ValidateForward(const ForwardOp& op, const LayerInfo& layer, const GroupConfig& group);
absl::Status ValidateBackward(const BackwardOp& op, const LayerInfo& layer, int64_t tokens);
absl::Status ValidatePrepare(const PrepareOp& op, const LayerInfo& layer, const GroupConfig& group);
absl::Status ValidateDispatch(const DispatchOp& op, const LayerConfig& layer,
                              const EpHandle& handle);
absl::Status ValidateCombine(const CombineOp& op, const LayerConfig& layer, const EpHandle& handle);
absl::Status ValidateDispatchBackward(const DispatchBackwardOp& op, const LayerConfig& layer,
                                      const EpHandle& handle);
absl::Status ValidateCombineBackward(const CombineBackwardOp& op, const LayerConfig& layer,
                                     const EpHandle& handle);
// Errors: CONFIG_INVALID, VERSION_BEHIND.
absl::Status ValidateApply(const ApplyGradientsOp& op, const LayerInfo& layer);

// Layer ids are 1..128 characters of letters, digits, '.', '_', '-', '/'.
absl::Status ValidateLayerId(const std::string& layer_id);

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_STEP_VALIDATION_H_
