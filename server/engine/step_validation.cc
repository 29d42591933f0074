// Shape, dtype and value checks of the step operations.
#include "server/engine/step_validation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

constexpr size_t kMaxLayerId = 128;
// A request with every value wrong still gives a short answer.
constexpr size_t kMaxValueViolations = 8;

std::string ShapeText(const std::vector<int64_t>& shape) {
  return StrCat("[", absl::StrJoin(shape, ","), "]");
}

// A tensor that must be there with this shape; -1 in `need` accepts any size.
void CheckTensor(const TensorInput& tensor, std::string_view name, const std::vector<int64_t>& need,
                 std::initializer_list<DType> dtypes, Violations& violations) {
  const std::string path(name);
  if (!tensor.present()) {
    violations.Add(Reason::kShapeMismatch, path, StrCat("got nothing, need ", ShapeText(need)));
    return;
  }
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) {
    std::string names;
    for (DType dtype : dtypes) StrAppend(&names, names.empty() ? "" : " or ", DTypeName(dtype));
    violations.Add(Reason::kDtypeUnsupported, StrCat(path, ".dtype"),
                   StrCat("got ", DTypeName(tensor.dtype), ", need ", names));
  }
  if (tensor.shape.size() != need.size()) {
    violations.Add(Reason::kShapeMismatch, StrCat(path, ".shape"),
                   StrCat("got ", ShapeText(tensor.shape), ", need ", need.size(), " dimensions"));
    return;
  }
  for (size_t i = 0; i < need.size(); ++i) {
    if (need[i] >= 0 && tensor.shape[i] != need[i]) {
      violations.Add(Reason::kShapeMismatch, StrCat(path, ".shape[", i, "]"),
                     StrCat("got ", tensor.shape[i], ", need ", need[i]));
    }
  }
}

void CheckTokenLimit(const TensorInput& tensor, std::string_view name, const GroupConfig& group,
                     Violations& violations) {
  if (tensor.shape.empty() || tensor.shape[0] <= group.max_tokens_per_rank) return;
  violations.Add(Reason::kTokensOverLimit, StrCat(name, ".shape[0]"),
                 StrCat("got ", tensor.shape[0], " tokens, need at most max_tokens_per_rank ",
                        group.max_tokens_per_rank));
}

int64_t IdAt(const TensorInput& ids, int64_t index) {
  if (ids.dtype == DType::kI32) {
    int32_t id;
    std::memcpy(&id, static_cast<const char*>(ids.data) + index * 4, sizeof(id));
    return id;
  }
  int64_t id;
  std::memcpy(&id, static_cast<const char*>(ids.data) + index * 8, sizeof(id));
  return id;
}

float FloatAt(const TensorInput& values, int64_t index) {
  float value;
  std::memcpy(&value, static_cast<const char*>(values.data) + index * 4, sizeof(value));
  return value;
}

// REQUIRES: ids is [T, K] of kI32 or kI64.
void CheckIds(const TensorInput& ids, int64_t experts, Violations& violations) {
  const int64_t tokens = ids.shape[0];
  const int64_t top_k = ids.shape[1];
  for (int64_t t = 0; t < tokens && violations.size() < kMaxValueViolations; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t id = IdAt(ids, t * top_k + k);
      const std::string path = StrCat("topk_ids[", t, ",", k, "]");
      if (id < -1 || id >= experts) {
        violations.Add(Reason::kExpertIdRange, path,
                       StrCat("got ", id, ", need -1 or 0..", experts - 1));
        continue;
      }
      for (int64_t earlier = 0; earlier < k && id >= 0; ++earlier) {
        if (IdAt(ids, t * top_k + earlier) != id) continue;
        violations.Add(Reason::kDuplicateExpert, path,
                       StrCat("got expert ", id, " again, need distinct experts in one token"));
        break;
      }
    }
  }
}

// Weights of routes that exist must be finite. `ids` may be absent: then all must be.
void CheckFinite(const TensorInput& values, std::string_view name, const TensorInput& ids,
                 Violations& violations) {
  const int64_t cols = values.shape[1];
  const int64_t count = values.shape[0] * cols;
  for (int64_t i = 0; i < count && violations.size() < kMaxValueViolations; ++i) {
    if (std::isfinite(FloatAt(values, i))) continue;
    if (ids.present() && IdAt(ids, i) < 0) continue;
    violations.Add(Reason::kNonFiniteWeight, StrCat(name, "[", i / cols, ",", i % cols, "]"),
                   StrCat("got ", FloatAt(values, i), ", need a finite value"));
  }
}

void CheckRouting(const ForwardOp& op, const LayerConfig& layer, int64_t tokens,
                  Violations& violations) {
  const bool has_router = layer.router.kind != RouterKind::kNone;
  switch (op.routing) {
    case RoutingSource::kTopk:
      CheckTensor(op.topk_ids, "topk.topk_ids", {tokens, layer.top_k}, {DType::kI32, DType::kI64},
                  violations);
      CheckTensor(op.topk_weights, "topk.topk_weights", {tokens, layer.top_k}, {DType::kF32},
                  violations);
      if (!violations.empty()) return;
      CheckIds(op.topk_ids, layer.expert_count, violations);
      CheckFinite(op.topk_weights, "topk_weights", op.topk_ids, violations);
      return;
    case RoutingSource::kLogits:
      if (!has_router) {
        violations.Add(Reason::kConfigInvalid, "router_logits",
                       "got logits, need topk: the layer has no router");
        return;
      }
      CheckTensor(op.router_logits, "router_logits", {tokens, layer.expert_count}, {DType::kF32},
                  violations);
      if (violations.empty()) CheckFinite(op.router_logits, "router_logits", {}, violations);
      return;
    case RoutingSource::kLayerRouter:
      if (!layer.router_on_server) {
        violations.Add(Reason::kConfigInvalid, "layer_router",
                       "got layer_router, need topk or router_logits: the layer has no router"
                       " weights");
      }
  }
}

absl::Status CheckUsable(const LayerInfo& layer) {
  if (layer.state == LayerState::kReady) return absl::OkStatus();
  return Error(Reason::kLayerNeedsRestore)
      .Text("layer ", layer.layer_id, " has no usable weights: ",
            layer.state == LayerState::kCreated ? "InitializeWeights or LoadWeights first"
                                                : layer.reason)
      .With("layer_id", layer.layer_id);
}

}  // namespace

absl::Status ValidateLayerId(const std::string& layer_id) {
  const bool good = !layer_id.empty() && layer_id.size() <= kMaxLayerId &&
                    std::all_of(layer_id.begin(), layer_id.end(), [](unsigned char c) {
                      return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-' || c == '/';
                    });
  if (good) return absl::OkStatus();
  return Error(Reason::kConfigInvalid)
      .At("layer_id",
          StrCat("got ", layer_id.size(), " characters, need 1..128 of letters, digits and ._-/"));
}

absl::Status ValidateForward(const ForwardOp& op, const LayerInfo& info, const GroupConfig& group) {
  RETURN_IF_ERROR(CheckUsable(info));
  const LayerConfig& layer = info.config;
  Violations violations;
  CheckTensor(op.tokens, "tokens", {-1, layer.hidden}, {layer.token_dtype}, violations);
  CheckTokenLimit(op.tokens, "tokens", group, violations);
  if (op.keep_for_backward && info.frozen) {
    violations.Add(Reason::kConfigInvalid, "keep_for_backward",
                   "got true, need false: the layer is frozen");
  }
  const int64_t tokens = op.tokens.shape.size() == 2 ? op.tokens.shape[0] : -1;
  CheckRouting(op, layer, tokens, violations);
  return violations.ToStatus("Forward");
}

absl::Status ValidateBackward(const BackwardOp& op, const LayerInfo& layer, int64_t tokens) {
  Violations violations;
  CheckTensor(op.output_gradient, "output_gradient", {tokens, layer.config.hidden},
              {layer.config.token_dtype}, violations);
  if (!std::isfinite(op.aux_loss_gradient)) {
    violations.Add(Reason::kNonFiniteWeight, "aux_loss_gradient",
                   StrCat("got ", op.aux_loss_gradient, ", need a finite value"));
  }
  return violations.ToStatus("Backward");
}

absl::Status ValidatePrepare(const PrepareOp& op, const LayerInfo& layer,
                             const GroupConfig& group) {
  Violations violations;
  CheckTensor(op.topk_ids, "topk_ids", {-1, layer.config.top_k}, {DType::kI32, DType::kI64},
              violations);
  CheckTokenLimit(op.topk_ids, "topk_ids", group, violations);
  if (violations.empty()) CheckIds(op.topk_ids, layer.config.expert_count, violations);
  return violations.ToStatus("Prepare");
}

absl::Status ValidateDispatch(const DispatchOp& op, const LayerConfig& layer,
                              const EpHandle& handle) {
  Violations violations;
  CheckTensor(op.tokens, "tokens", {handle.tokens(), layer.hidden}, {layer.token_dtype},
              violations);
  CheckTensor(op.topk_weights, "topk_weights", {handle.tokens(), handle.top_k()}, {DType::kF32},
              violations);
  return violations.ToStatus("Dispatch");
}

absl::Status ValidateCombine(const CombineOp& op, const LayerConfig& layer,
                             const EpHandle& handle) {
  Violations violations;
  const int64_t rows = handle.counts().total;
  CheckTensor(op.expert_output, "expert_output", {rows, layer.hidden}, {layer.token_dtype},
              violations);
  if (op.slot_weights.present()) {
    CheckTensor(op.slot_weights, "slot_weights", {rows}, {DType::kF32}, violations);
  }
  return violations.ToStatus("Combine");
}

absl::Status ValidateDispatchBackward(const DispatchBackwardOp& op, const LayerConfig& layer,
                                      const EpHandle& handle) {
  Violations violations;
  const int64_t rows = handle.counts().total;
  CheckTensor(op.recv_tokens_gradient, "recv_tokens_gradient", {rows, layer.hidden},
              {layer.token_dtype}, violations);
  if (op.recv_weights_gradient.present()) {
    CheckTensor(op.recv_weights_gradient, "recv_weights_gradient", {rows}, {DType::kF32},
                violations);
  }
  return violations.ToStatus("DispatchBackward");
}

absl::Status ValidateCombineBackward(const CombineBackwardOp& op, const LayerConfig& layer,
                                     const EpHandle& handle) {
  Violations violations;
  CheckTensor(op.output_gradient, "output_gradient", {handle.tokens(), layer.hidden},
              {layer.token_dtype}, violations);
  if (op.slot_weights.present()) {
    CheckTensor(op.slot_weights, "slot_weights", {handle.counts().total}, {DType::kF32},
                violations);
  }
  return violations.ToStatus("CombineBackward");
}

absl::Status ValidateApply(const ApplyGradientsOp& op, const LayerInfo& layer) {
  Violations violations;
  if (layer.frozen) {
    violations.Add(Reason::kConfigInvalid, "layer_id", "got a frozen layer, need a trainable one");
  }
  if (layer.config.optimizer.kind == OptimizerKind::kNone) {
    violations.Add(Reason::kConfigInvalid, "layer_id",
                   "got a layer without an optimizer, need ConfigureOptimizer first");
  }
  if (!std::isfinite(op.learning_rate) || op.learning_rate < 0) {
    violations.Add(Reason::kConfigInvalid, "learning_rate",
                   StrCat("got ", op.learning_rate, ", need a finite value of at least 0"));
  }
  if (!std::isfinite(op.gradient_scale) || op.gradient_scale < 0) {
    violations.Add(Reason::kConfigInvalid, "gradient_scale",
                   StrCat("got ", op.gradient_scale, ", need a finite value of at least 0"));
  }
  if (!violations.empty()) return violations.ToStatus("ApplyGradients");
  RETURN_IF_ERROR(CheckUsable(layer));
  const uint64_t version = layer.weights_version;
  if (version == op.expected_version || version == op.expected_version + 1) {
    return absl::OkStatus();
  }
  return Error(Reason::kVersionBehind)
      .Text("weights of layer ", layer.layer_id, " are at version ", version,
            ": got expected_version ", op.expected_version, ", need ", version,
            version < op.expected_version ? "; replay from there" : "")
      .With("weights_version", version)
      .With("expected_version", op.expected_version);
}

}  // namespace expertd::engine
