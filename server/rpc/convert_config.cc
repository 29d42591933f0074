// Field by field copies of configs; enums are checked before they are cast.
#include "server/rpc/convert_config.h"

#include <string>

#include "base/strings.h"

namespace expertd::rpc {
namespace {

// The enums that are cast must keep the same numbers on both sides.
template <typename Proto, typename Plain>
constexpr bool Same(Proto proto, Plain plain) {
  return static_cast<int>(proto) == static_cast<int>(plain);
}
static_assert(Same(v1::DTYPE_F32, DType::kF32) && Same(v1::DTYPE_F16, DType::kF16) &&
              Same(v1::DTYPE_BF16, DType::kBF16) && Same(v1::DTYPE_F8E4M3FN, DType::kF8E4M3FN) &&
              Same(v1::DTYPE_F8E5M2, DType::kF8E5M2) && Same(v1::DTYPE_I32, DType::kI32) &&
              Same(v1::DTYPE_I64, DType::kI64) && Same(v1::DType_MAX, DType::kI64));
static_assert(Same(v1::ROUTER_KIND_SOFTMAX, RouterKind::kSoftmax) &&
              Same(v1::ROUTER_KIND_SIGMOID, RouterKind::kSigmoid) &&
              Same(v1::RouterKind_MAX, RouterKind::kSigmoid));
static_assert(Same(v1::OPTIMIZER_KIND_SGD, engine::OptimizerKind::kSgd) &&
              Same(v1::OPTIMIZER_KIND_ADAMW, engine::OptimizerKind::kAdamW) &&
              Same(v1::OptimizerKind_MAX, engine::OptimizerKind::kAdamW));

// Where a config lies in its request; collects what is wrong below it.
class Checker {
 public:
  Checker(std::string_view path, Violations* violations) : path_(path), violations_(violations) {}

  // `value` as Plain; the first one (value 0) and a violation when the enum has no such value.
  template <typename Plain, typename Proto>
  Plain Enum(std::string_view field, Proto value, bool valid) const {
    if (valid) return static_cast<Plain>(value);
    violations_->Add(Reason::kConfigInvalid, StrCat(path_, ".", field),
                     StrCat("got ", static_cast<int>(value), ", which the enum does not have"));
    return static_cast<Plain>(0);
  }

  std::string Below(std::string_view field) const { return StrCat(path_, ".", field); }

 private:
  const std::string_view path_;
  Violations* const violations_;
};

CapacityPolicy FromProto(v1::CapacityPolicy policy) {
  return policy == v1::CAPACITY_POLICY_DROP ? CapacityPolicy::kDrop : CapacityPolicy::kRefuse;
}

Activation FromProto(v1::Activation activation) {
  switch (activation) {
    case v1::ACTIVATION_GELU:
      return Activation::kGelu;
    case v1::ACTIVATION_RELU2:
      return Activation::kRelu2;
    default:
      return Activation::kSilu;
  }
}

Weighting FromProto(v1::Weighting weighting) {
  return weighting == v1::WEIGHTING_EARLY ? Weighting::kEarly : Weighting::kLate;
}

v1::Activation ToProto(Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return v1::ACTIVATION_GELU;
    case Activation::kRelu2:
      return v1::ACTIVATION_RELU2;
    case Activation::kSilu:
      return v1::ACTIVATION_SILU;
  }
  return v1::ACTIVATION_SILU;
}

RouterConfig FromProto(const v1::RouterConfig& config, const std::string& path,
                       Violations* violations) {
  const Checker check(path, violations);
  RouterConfig out;
  out.kind = check.Enum<RouterKind>("kind", config.kind(), v1::RouterKind_IsValid(config.kind()));
  out.softmax_before_topk = config.softmax_before_topk();
  out.groups = config.groups();
  out.kept_groups = config.kept_groups();
  out.scaling_factor = config.scaling_factor();
  out.selection_bias = config.selection_bias();
  return out;
}

}  // namespace

DType FromProto(v1::DType dtype) {
  return v1::DType_IsValid(dtype) ? static_cast<DType>(dtype) : DType::kInvalid;
}

v1::DType ToProto(DType dtype) { return static_cast<v1::DType>(dtype); }

engine::GroupConfig FromProto(const v1::GroupConfig& config, std::string_view path,
                              Violations* violations) {
  const Checker check(path, violations);
  engine::GroupConfig out;
  out.dp_size = config.dp_size();
  out.ep_size = config.ep_size();
  out.backend = config.backend();
  out.max_tokens_per_rank = config.max_tokens_per_rank();
  out.max_recv_rows_per_rank = config.max_recv_rows_per_rank();
  out.max_hidden = config.max_hidden();
  out.max_top_k = config.max_top_k();
  out.max_experts = config.max_experts();
  out.max_token_dtype = check.Enum<DType>("max_token_dtype", config.max_token_dtype(),
                                          v1::DType_IsValid(config.max_token_dtype()));
  check.Enum<int>("capacity_policy", config.capacity_policy(),
                  v1::CapacityPolicy_IsValid(config.capacity_policy()));
  out.capacity_policy = FromProto(config.capacity_policy());
  out.comm_sm_count = config.comm_sm_count();
  out.base_timeout_ms = config.base_timeout_ms();
  out.kept_replies = config.kept_replies();
  out.ticket_memory_bytes = config.ticket_memory_bytes();
  out.sequence_window = config.sequence_window();
  return out;
}

engine::OptimizerConfig FromProto(const v1::OptimizerConfig& config, std::string_view path,
                                  Violations* violations) {
  const Checker check(path, violations);
  engine::OptimizerConfig out;
  out.kind = check.Enum<engine::OptimizerKind>("kind", config.kind(),
                                               v1::OptimizerKind_IsValid(config.kind()));
  out.momentum = config.momentum();
  out.beta1 = config.beta1();
  out.beta2 = config.beta2();
  out.epsilon = config.epsilon();
  out.weight_decay = config.weight_decay();
  out.max_gradient_norm = config.max_gradient_norm();
  return out;
}

engine::LayerConfig FromProto(const v1::LayerConfig& config, std::string_view path,
                              Violations* violations) {
  const Checker check(path, violations);
  engine::LayerConfig out;
  out.expert_count = config.expert_count();
  out.hidden = config.hidden();
  out.intermediate = config.intermediate();
  out.top_k = config.top_k();
  check.Enum<int>("activation", config.activation(), v1::Activation_IsValid(config.activation()));
  out.activation = FromProto(config.activation());
  out.gate_up_bias = config.gate_up_bias();
  out.down_bias = config.down_bias();
  out.alignment = config.alignment();
  out.token_dtype = check.Enum<DType>("token_dtype", config.token_dtype(),
                                      v1::DType_IsValid(config.token_dtype()));
  out.weight_dtype = check.Enum<DType>("weight_dtype", config.weight_dtype(),
                                       v1::DType_IsValid(config.weight_dtype()));
  out.recipe = config.recipe();
  check.Enum<int>("weighting", config.weighting(), v1::Weighting_IsValid(config.weighting()));
  out.weighting = FromProto(config.weighting());
  out.router = FromProto(config.router(), check.Below("router"), violations);
  out.router_on_server = config.router().on_server();
  out.aux_loss_coefficient = config.aux_loss_coefficient();
  out.optimizer = FromProto(config.optimizer(), check.Below("optimizer"), violations);
  return out;
}

void ToProto(const engine::GroupConfig& config, v1::GroupConfig* out) {
  out->set_dp_size(config.dp_size);
  out->set_ep_size(config.ep_size);
  out->set_backend(config.backend);
  out->set_max_tokens_per_rank(config.max_tokens_per_rank);
  out->set_max_recv_rows_per_rank(config.max_recv_rows_per_rank);
  out->set_max_hidden(config.max_hidden);
  out->set_max_top_k(config.max_top_k);
  out->set_max_experts(config.max_experts);
  out->set_max_token_dtype(ToProto(config.max_token_dtype));
  out->set_capacity_policy(config.capacity_policy == CapacityPolicy::kDrop
                               ? v1::CAPACITY_POLICY_DROP
                               : v1::CAPACITY_POLICY_REFUSE);
  out->set_comm_sm_count(config.comm_sm_count);
  out->set_base_timeout_ms(config.base_timeout_ms);
  out->set_kept_replies(config.kept_replies);
  out->set_ticket_memory_bytes(config.ticket_memory_bytes);
  out->set_sequence_window(config.sequence_window);
}

void ToProto(const engine::OptimizerConfig& config, v1::OptimizerConfig* out) {
  out->set_kind(static_cast<v1::OptimizerKind>(config.kind));
  out->set_momentum(config.momentum);
  out->set_beta1(config.beta1);
  out->set_beta2(config.beta2);
  out->set_epsilon(config.epsilon);
  out->set_weight_decay(config.weight_decay);
  out->set_max_gradient_norm(config.max_gradient_norm);
}

void ToProto(const engine::LayerConfig& config, v1::LayerConfig* out) {
  out->set_expert_count(config.expert_count);
  out->set_hidden(config.hidden);
  out->set_intermediate(config.intermediate);
  out->set_top_k(config.top_k);
  out->set_activation(ToProto(config.activation));
  out->set_gate_up_bias(config.gate_up_bias);
  out->set_down_bias(config.down_bias);
  out->set_alignment(config.alignment);
  out->set_token_dtype(ToProto(config.token_dtype));
  out->set_weight_dtype(ToProto(config.weight_dtype));
  out->set_recipe(config.recipe);
  out->set_weighting(config.weighting == Weighting::kEarly ? v1::WEIGHTING_EARLY
                                                           : v1::WEIGHTING_LATE);
  v1::RouterConfig* router = out->mutable_router();
  router->set_kind(static_cast<v1::RouterKind>(config.router.kind));
  router->set_softmax_before_topk(config.router.softmax_before_topk);
  router->set_groups(config.router.groups);
  router->set_kept_groups(config.router.kept_groups);
  router->set_scaling_factor(config.router.scaling_factor);
  router->set_selection_bias(config.router.selection_bias);
  router->set_on_server(config.router_on_server);
  out->set_aux_loss_coefficient(config.aux_loss_coefficient);
  ToProto(config.optimizer, out->mutable_optimizer());
}

}  // namespace expertd::rpc
