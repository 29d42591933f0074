// Defaults, comparison and fingerprints of configs; validation is in config_validation.cc.
#include "server/engine/config.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "base/ids.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

constexpr int64_t kDefaultTimeoutMs = 30000;
constexpr int64_t kDefaultKeptReplies = 2;
constexpr int64_t kDefaultTicketMemory = int64_t{1} << 30;
constexpr int64_t kDefaultSequenceWindow = 64;

std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(int64_t value) { return StrCat(value); }
// Exact: two doubles have the same text only when they are equal.
std::string Text(double value) { return absl::StrFormat("%.17g", value); }
std::string Text(DType value) { return std::string(DTypeName(value)); }
std::string Text(CapacityPolicy value) {
  return value == CapacityPolicy::kDrop ? "DROP" : "REFUSE";
}
std::string Text(Weighting value) { return value == Weighting::kEarly ? "EARLY" : "LATE"; }
std::string Text(Activation value) {
  switch (value) {
    case Activation::kSilu:
      return "SILU";
    case Activation::kGelu:
      return "GELU";
    case Activation::kRelu2:
      return "RELU2";
  }
  return "SILU";
}
std::string Text(RouterKind value) {
  switch (value) {
    case RouterKind::kNone:
      return "NONE";
    case RouterKind::kSoftmax:
      return "SOFTMAX";
    case RouterKind::kSigmoid:
      return "SIGMOID";
  }
  return "NONE";
}
std::string Text(OptimizerKind value) {
  switch (value) {
    case OptimizerKind::kNone:
      return "NONE";
    case OptimizerKind::kSgd:
      return "SGD";
    case OptimizerKind::kAdamW:
      return "ADAMW";
  }
  return "NONE";
}

template <typename T>
void Default(T& value, T fallback) {
  if (value == T{}) value = fallback;
}

}  // namespace

GroupConfig WithDefaults(GroupConfig config, std::string_view default_backend) {
  Default<int64_t>(config.dp_size, 1);
  if (config.backend.empty()) config.backend = std::string(default_backend);
  Default(config.base_timeout_ms, kDefaultTimeoutMs);
  Default(config.kept_replies, kDefaultKeptReplies);
  Default(config.ticket_memory_bytes, kDefaultTicketMemory);
  Default(config.sequence_window, kDefaultSequenceWindow);
  if (config.max_token_dtype == DType::kInvalid) config.max_token_dtype = DType::kF32;
  if (config.max_recv_rows_per_rank == 0) {
    // An overflow is reported by ValidateGroupConfig.
    absl::StatusOr<int64_t> rows = RecvRows(SizesOf(config));
    if (rows.ok()) config.max_recv_rows_per_rank = *rows;
  }
  return config;
}

OptimizerConfig WithDefaults(OptimizerConfig config) {
  if (config.kind == OptimizerKind::kAdamW) {
    Default(config.beta1, 0.9);
    Default(config.beta2, 0.999);
    Default(config.epsilon, 1e-8);
  }
  return config;
}

LayerConfig WithDefaults(LayerConfig config) {
  Default<int64_t>(config.alignment, 1);
  if (config.recipe.empty()) config.recipe = "bf16";
  config.router.expert_count = config.expert_count;
  config.router.top_k = config.top_k;
  Default<int64_t>(config.router.groups, 1);
  if (config.router.groups == 1) Default<int64_t>(config.router.kept_groups, 1);
  Default(config.router.scaling_factor, 1.0);
  config.optimizer = WithDefaults(config.optimizer);
  return config;
}

std::vector<ConfigField> FieldsOf(const GroupConfig& config) {
  return {
      {"dp_size", Text(config.dp_size)},
      {"ep_size", Text(config.ep_size)},
      {"backend", config.backend},
      {"max_tokens_per_rank", Text(config.max_tokens_per_rank)},
      {"max_recv_rows_per_rank", Text(config.max_recv_rows_per_rank)},
      {"max_hidden", Text(config.max_hidden)},
      {"max_top_k", Text(config.max_top_k)},
      {"max_experts", Text(config.max_experts)},
      {"max_token_dtype", Text(config.max_token_dtype)},
      {"capacity_policy", Text(config.capacity_policy)},
      {"comm_sm_count", Text(config.comm_sm_count)},
      {"base_timeout_ms", Text(config.base_timeout_ms)},
      {"kept_replies", Text(config.kept_replies)},
      {"ticket_memory_bytes", Text(config.ticket_memory_bytes)},
      {"sequence_window", Text(config.sequence_window)},
  };
}

std::vector<ConfigField> FieldsOf(const OptimizerConfig& config) {
  return {
      {"optimizer.kind", Text(config.kind)},
      {"optimizer.momentum", Text(config.momentum)},
      {"optimizer.beta1", Text(config.beta1)},
      {"optimizer.beta2", Text(config.beta2)},
      {"optimizer.epsilon", Text(config.epsilon)},
      {"optimizer.weight_decay", Text(config.weight_decay)},
      {"optimizer.max_gradient_norm", Text(config.max_gradient_norm)},
  };
}

std::vector<ConfigField> FieldsOf(const LayerConfig& config) {
  return {
      {"expert_count", Text(config.expert_count)},
      {"hidden", Text(config.hidden)},
      {"intermediate", Text(config.intermediate)},
      {"top_k", Text(config.top_k)},
      {"activation", Text(config.activation)},
      {"gate_up_bias", Text(config.gate_up_bias)},
      {"down_bias", Text(config.down_bias)},
      {"alignment", Text(config.alignment)},
      {"token_dtype", Text(config.token_dtype)},
      {"weight_dtype", Text(config.weight_dtype)},
      {"recipe", config.recipe},
      {"weighting", Text(config.weighting)},
      {"router.kind", Text(config.router.kind)},
      {"router.softmax_before_topk", Text(config.router.softmax_before_topk)},
      {"router.groups", Text(config.router.groups)},
      {"router.kept_groups", Text(config.router.kept_groups)},
      {"router.scaling_factor", Text(config.router.scaling_factor)},
      {"router.selection_bias", Text(config.router.selection_bias)},
      {"router.on_server", Text(config.router_on_server)},
      {"aux_loss_coefficient", Text(config.aux_loss_coefficient)},
  };
}

std::string EncodeFields(const std::vector<ConfigField>& fields) {
  std::string bytes;
  for (const ConfigField& field : fields) {
    StrAppend(&bytes, field.name.size(), ":", field.name, field.value.size(), ":", field.value);
  }
  return bytes;
}

absl::StatusOr<std::vector<ConfigField>> DecodeFields(std::string_view bytes) {
  std::vector<ConfigField> fields;
  const absl::Status bad =
      Error(Reason::kConfigInvalid).Text("a peer sent config fields that cannot be read");
  // Reads one "size:text".
  auto take = [&bytes](std::string& out) {
    size_t size = 0;
    size_t used = 0;
    while (used < bytes.size() && used < 9 && bytes[used] >= '0' && bytes[used] <= '9') {
      size = size * 10 + static_cast<size_t>(bytes[used++] - '0');
    }
    if (used == 0 || used >= bytes.size() || bytes[used] != ':') return false;
    bytes.remove_prefix(used + 1);
    if (size > bytes.size()) return false;
    out = std::string(bytes.substr(0, size));
    bytes.remove_prefix(size);
    return true;
  };
  while (!bytes.empty()) {
    ConfigField field;
    if (!take(field.name) || !take(field.value)) return bad;
    fields.push_back(std::move(field));
  }
  return fields;
}

absl::Status CompareFields(Reason reason, std::string_view what,
                           const std::vector<std::vector<ConfigField>>& by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const std::vector<ConfigField>& first = by_rank[0];
    const std::vector<ConfigField>& other = by_rank[rank];
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const ConfigField a = i < first.size() ? first[i] : ConfigField{other[i].name, "(absent)"};
      const ConfigField b = i < other.size() ? other[i] : ConfigField{first[i].name, "(absent)"};
      if (a == b) continue;
      return Error(reason)
          .Text(what, " differs between ranks in ", a.name, ": rank 0 has ", a.value, ", rank ",
                rank, " has ", b.name == a.name ? b.value : StrCat(b.name, "=", b.value))
          .With("field", a.name)
          .With("rank_a", 0)
          .With("value_a", a.value)
          .With("rank_b", rank)
          .With("value_b", b.value);
    }
  }
  return absl::OkStatus();
}

uint64_t LayerFingerprint(const LayerConfig& config) {
  return Fingerprint(EncodeFields(FieldsOf(config)));
}

GroupSizes SizesOf(const GroupConfig& config) {
  GroupSizes sizes;
  sizes.ranks = std::max<int64_t>(1, config.ep_size);
  sizes.max_tokens_per_rank = config.max_tokens_per_rank;
  sizes.max_recv_rows = config.max_recv_rows_per_rank;
  sizes.max_hidden = config.max_hidden;
  sizes.max_top_k = config.max_top_k;
  sizes.max_experts = config.max_experts;
  sizes.token_bytes = static_cast<int64_t>(DTypeSize(config.max_token_dtype));
  sizes.device_window = config.backend == "nccl_lsa";
  return sizes;
}

LayerSizes SizesOf(const LayerConfig& config, bool frozen) {
  LayerSizes sizes;
  sizes.expert_count = config.expert_count;
  sizes.hidden = config.hidden;
  sizes.intermediate = config.intermediate;
  sizes.top_k = config.top_k;
  sizes.alignment = config.alignment;
  sizes.token_bytes = static_cast<int64_t>(DTypeSize(config.token_dtype));
  sizes.weight_bytes = static_cast<int64_t>(DTypeSize(config.weight_dtype));
  sizes.gate_up_bias = config.gate_up_bias;
  sizes.down_bias = config.down_bias;
  sizes.server_router = config.router_on_server;
  sizes.router = config.router.kind != RouterKind::kNone;
  sizes.frozen = frozen;
  if (config.optimizer.kind == OptimizerKind::kAdamW) sizes.optimizer_states = 2;
  if (config.optimizer.kind == OptimizerKind::kSgd && config.optimizer.momentum > 0) {
    sizes.optimizer_states = 1;
  }
  return sizes;
}

}  // namespace expertd::engine
