// The rules that group, layer and optimizer configs must satisfy; every violation is reported.
#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/config.h"

namespace expertd::engine {
namespace {

constexpr int64_t kMaxTopK = 32;
constexpr int64_t kMaxWorld = 4096;
constexpr int64_t kMaxTimeoutMs = 3600 * 1000;
constexpr int64_t kMaxKeptReplies = 64;
constexpr int64_t kMaxWindow = 4096;
constexpr int64_t kGpuRowBytes = 16;

// Violations with short forms for the rules that recur.
class Rules {
 public:
  void Require(bool holds, std::string path, std::string description) {
    if (!holds) violations_.Add(Reason::kConfigInvalid, std::move(path), std::move(description));
  }
  void Range(int64_t value, int64_t low, int64_t high, std::string path) {
    Require(value >= low && value <= high, std::move(path),
            StrCat("got ", value, ", need ", low, "..", high));
  }
  void AtLeast(int64_t value, int64_t low, std::string path) {
    Require(value >= low, std::move(path), StrCat("got ", value, ", need at least ", low));
  }
  void FiniteFrom(double value, double low, std::string path) {
    Require(std::isfinite(value) && value >= low, std::move(path),
            StrCat("got ", value, ", need a finite value of at least ", low));
  }
  void Add(Reason reason, std::string path, std::string description) {
    violations_.Add(reason, std::move(path), std::move(description));
  }
  bool empty() const { return violations_.empty(); }
  absl::Status ToStatus(std::string_view what) const { return violations_.ToStatus(what); }

 private:
  Violations violations_;
};

bool IsTokenDType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

void CheckOptimizer(const OptimizerConfig& config, Rules& rules) {
  rules.FiniteFrom(config.weight_decay, 0, "optimizer.weight_decay");
  rules.FiniteFrom(config.max_gradient_norm, 0, "optimizer.max_gradient_norm");
  rules.Require(config.momentum >= 0 && config.momentum < 1, "optimizer.momentum",
                StrCat("got ", config.momentum, ", need 0 <= momentum < 1"));
  // The others are AdamW's; whoever sets them for another kind is told when they make no sense.
  rules.Require(config.beta1 >= 0 && config.beta1 < 1, "optimizer.beta1",
                StrCat("got ", config.beta1, ", need 0 <= beta1 < 1"));
  rules.Require(config.beta2 >= 0 && config.beta2 < 1, "optimizer.beta2",
                StrCat("got ", config.beta2, ", need 0 <= beta2 < 1"));
  const bool used = config.kind == OptimizerKind::kAdamW;
  rules.Require(
      std::isfinite(config.epsilon) && config.epsilon >= 0 && !(used && config.epsilon == 0),
      "optimizer.epsilon", StrCat("got ", config.epsilon, ", need more than 0"));
}

void CheckRouter(const LayerConfig& layer, Rules& rules) {
  const RouterConfig& router = layer.router;
  const bool none = router.kind == RouterKind::kNone;
  rules.Require(!(none && layer.router_on_server), "router.on_server",
                "got true with router.kind NONE, need SOFTMAX or SIGMOID");
  rules.Require(!(router.softmax_before_topk && router.kind != RouterKind::kSoftmax),
                "router.softmax_before_topk", "got true, need router.kind SOFTMAX for it");
  rules.Require(!(router.selection_bias && router.kind != RouterKind::kSigmoid),
                "router.selection_bias", "got true, need router.kind SIGMOID for it");
  rules.Require(!(router.selection_bias && !layer.router_on_server), "router.selection_bias",
                "got true without router.on_server, need the bias to live with the router");
  rules.FiniteFrom(router.scaling_factor, 0, "router.scaling_factor");
  rules.FiniteFrom(layer.aux_loss_coefficient, 0, "aux_loss_coefficient");
  rules.Require(!(layer.aux_loss_coefficient > 0 && none), "aux_loss_coefficient",
                StrCat("got ", layer.aux_loss_coefficient, ", need 0 without a router"));
  rules.AtLeast(router.groups, 1, "router.groups");
  if (router.groups < 1 || layer.expert_count < 1) return;
  rules.Require(
      layer.expert_count % router.groups == 0, "router.groups",
      StrCat("got ", router.groups, ", need a divisor of expert_count ", layer.expert_count));
  rules.Range(router.kept_groups, 1, router.groups, "router.kept_groups");
  if (router.kept_groups < 1 || router.kept_groups > router.groups || layer.top_k < 1) return;
  rules.Require(layer.top_k % router.kept_groups == 0, "router.kept_groups",
                StrCat("got ", router.kept_groups, ", need a divisor of top_k ", layer.top_k));
  const int64_t per_group = layer.expert_count / router.groups;
  rules.Require(layer.top_k <= router.kept_groups * per_group, "router.kept_groups",
                StrCat("got ", router.kept_groups, " groups of ", per_group,
                       " experts, need room for top_k ", layer.top_k));
}

void CheckLayerWithinGroup(const LayerConfig& layer, const GroupConfig& group, Rules& rules) {
  rules.Range(layer.expert_count, 1, group.max_experts, "expert_count");
  rules.Range(layer.hidden, 1, group.max_hidden, "hidden");
  rules.Range(layer.top_k, 1, std::min(group.max_top_k, std::max<int64_t>(1, layer.expert_count)),
              "top_k");
  rules.Require(layer.expert_count % group.ep_size == 0, "expert_count",
                StrCat("got ", layer.expert_count, ", need a multiple of ep_size ", group.ep_size));
  rules.Require(DTypeSize(layer.token_dtype) <= DTypeSize(group.max_token_dtype), "token_dtype",
                StrCat("got ", DTypeName(layer.token_dtype), ", need no wider than the group's ",
                       DTypeName(group.max_token_dtype)));
}

}  // namespace

absl::Status TooLarge(const absl::Status& overflow) {
  return Error(Reason::kConfigInvalid)
      .At("", StrCat("maxima that do not fit together: ", StdView(overflow.message())));
}

absl::Status ValidateGroupConfig(const GroupConfig& config, int64_t max_message_bytes) {
  Rules rules;
  rules.AtLeast(config.dp_size, 1, "dp_size");
  rules.Range(config.ep_size, 1, kMaxWorld, "ep_size");
  rules.AtLeast(config.max_tokens_per_rank, 1, "max_tokens_per_rank");
  rules.AtLeast(config.max_recv_rows_per_rank, 0, "max_recv_rows_per_rank");
  rules.AtLeast(config.max_hidden, 1, "max_hidden");
  rules.Range(config.max_top_k, 1, kMaxTopK, "max_top_k");
  rules.AtLeast(config.max_experts, 1, "max_experts");
  rules.Require(IsTokenDType(config.max_token_dtype), "max_token_dtype",
                StrCat("got ", DTypeName(config.max_token_dtype), ", need F32, F16 or BF16"));
  rules.AtLeast(config.comm_sm_count, 0, "comm_sm_count");
  rules.Range(config.base_timeout_ms, 10, kMaxTimeoutMs, "base_timeout_ms");
  rules.Range(config.kept_replies, 1, kMaxKeptReplies, "kept_replies");
  rules.AtLeast(config.ticket_memory_bytes, 1, "ticket_memory_bytes");
  rules.Range(config.sequence_window, 1, kMaxWindow, "sequence_window");
  if (config.ep_size > 0 && config.max_experts > 0) {
    rules.Require(
        config.max_experts % config.ep_size == 0, "max_experts",
        StrCat("got ", config.max_experts, ", need a multiple of ep_size ", config.ep_size));
  }
  if (!rules.empty()) return rules.ToStatus("group config");
  if (config.dp_size > 1) {
    return Error(Reason::kNotImplemented)
        .Text("dp_size: got ", config.dp_size, ", need 1: data parallelism is not available yet")
        .With("field", "dp_size");
  }
  const absl::StatusOr<int64_t> size = MaxMessageBytes(SizesOf(config));
  if (!size.ok()) return TooLarge(size.status());
  const int64_t message = *size;
  constexpr int64_t kGrpcCap = 2147483647;
  const int64_t needed = std::min(kGrpcCap, message > kGrpcCap / 2 ? kGrpcCap : 2 * message);
  rules.Require(needed <= max_message_bytes, "max_tokens_per_rank",
                StrCat("messages of up to ", needed, " bytes, need at most ", max_message_bytes,
                       " (flag --max_receive_message_bytes; smaller maxima or a"
                       " max_recv_rows_per_rank help too)"));
  return rules.ToStatus("group config");
}

absl::Status ValidateLayerConfig(const LayerConfig& layer, const GroupConfig& group,
                                 bool device_is_gpu) {
  Rules rules;
  CheckLayerWithinGroup(layer, group, rules);
  rules.AtLeast(layer.intermediate, 1, "intermediate");
  rules.Range(layer.alignment, 1, kMaxAlignment, "alignment");
  rules.Require(layer.alignment < 1 || (layer.alignment & (layer.alignment - 1)) == 0, "alignment",
                StrCat("got ", layer.alignment, ", need a power of two"));
  rules.Require(IsTokenDType(layer.token_dtype), "token_dtype",
                StrCat("got ", DTypeName(layer.token_dtype), ", need F32, F16 or BF16"));
  rules.Require(IsTokenDType(layer.weight_dtype), "weight_dtype",
                StrCat("got ", DTypeName(layer.weight_dtype), ", need F32, F16 or BF16"));
  for (const auto& [recipe, dtype] :
       {std::pair("f16", DType::kF16), std::pair("f32", DType::kF32)}) {
    rules.Require(layer.recipe != recipe || layer.weight_dtype == dtype, "recipe",
                  StrCat("got ", recipe, " with weight_dtype ", DTypeName(layer.weight_dtype),
                         ", need ", DTypeName(dtype), " for it"));
  }
  const bool hidden_fits = layer.hidden >= 1 && layer.hidden <= group.max_hidden;
  const int64_t row_bytes =
      hidden_fits ? layer.hidden * static_cast<int64_t>(DTypeSize(layer.token_dtype)) : 0;
  rules.Require(
      !device_is_gpu || row_bytes % kGpuRowBytes == 0, "hidden",
      StrCat("got rows of ", row_bytes, " bytes, need a multiple of ", kGpuRowBytes, " on GPUs"));
  CheckRouter(layer, rules);
  CheckOptimizer(layer.optimizer, rules);
  return rules.ToStatus("layer config");
}

absl::Status ValidateOptimizerConfig(const OptimizerConfig& config) {
  Rules rules;
  CheckOptimizer(config, rules);
  return rules.ToStatus("optimizer config");
}

}  // namespace expertd::engine
