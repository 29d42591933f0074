// Names of the collective operations.
#include "server/engine/operations.h"

namespace expertd::engine {

std::string_view OpName(OpKind kind) {
  switch (kind) {
    case OpKind::kForward:
      return "Forward";
    case OpKind::kBackward:
      return "Backward";
    case OpKind::kPrepare:
      return "Prepare";
    case OpKind::kDispatch:
      return "Dispatch";
    case OpKind::kCombine:
      return "Combine";
    case OpKind::kDispatchBackward:
      return "DispatchBackward";
    case OpKind::kCombineBackward:
      return "CombineBackward";
    case OpKind::kCreateLayer:
      return "CreateLayer";
    case OpKind::kDeleteLayer:
      return "DeleteLayer";
    case OpKind::kInitializeWeights:
      return "InitializeWeights";
    case OpKind::kFreezeLayer:
      return "FreezeLayer";
    case OpKind::kConfigureOptimizer:
      return "ConfigureOptimizer";
    case OpKind::kApplyGradients:
      return "ApplyGradients";
    case OpKind::kClearGradients:
      return "ClearGradients";
  }
  return "Unknown";
}

}  // namespace expertd::engine
