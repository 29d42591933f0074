// Checked size arithmetic; formulas stand in memory_plan.h.
#include "base/memory_plan.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/window_layout.h"

namespace expertd {
namespace {

constexpr int64_t kMessageSlack = 64 << 10;
constexpr int64_t kF32 = 4;
constexpr int64_t kI64 = 8;

// A non-negative product or sum that remembers whether it overflowed.
class Size {
 public:
  Size(int64_t value) : value_(value) {}  // NOLINT: sizes read as plain numbers

  friend Size operator*(Size a, Size b) {
    Size result(0);
    result.overflow_ =
        a.overflow_ || b.overflow_ || __builtin_mul_overflow(a.value_, b.value_, &result.value_);
    return result;
  }
  friend Size operator+(Size a, Size b) {
    Size result(0);
    result.overflow_ =
        a.overflow_ || b.overflow_ || __builtin_add_overflow(a.value_, b.value_, &result.value_);
    return result;
  }

  absl::StatusOr<int64_t> Get(std::string_view what) const {
    if (overflow_) {
      return Error(Reason::kConfigInvalid).Text(what, " does not fit 64 bits").With("size", what);
    }
    return value_;
  }

 private:
  int64_t value_;
  bool overflow_ = false;
};

int64_t LocalExperts(int64_t experts, int64_t ranks) {
  return std::max<int64_t>(1, experts / std::max<int64_t>(1, ranks));
}

}  // namespace

absl::StatusOr<int64_t> RecvRows(const GroupSizes& group) {
  if (group.max_recv_rows > 0) return group.max_recv_rows;
  const int64_t local = LocalExperts(group.max_experts, group.ranks);
  const Size routes =
      Size(group.ranks) * group.max_tokens_per_rank * std::min(group.max_top_k, local);
  return (routes + Size(local) * (kMaxAlignment - 1)).Get("recv_rows");
}

absl::StatusOr<int64_t> MaxMessageBytes(const GroupSizes& group) {
  ASSIGN_OR_RETURN(const int64_t rows, RecvRows(group));
  const Size row = Size(group.max_hidden) * group.token_bytes;
  ASSIGN_OR_RETURN(const int64_t topk, (Size(group.max_top_k) * (kI64 + kF32)).Get("message"));
  ASSIGN_OR_RETURN(const int64_t logits, (Size(group.max_experts) * kF32).Get("message"));
  const Size forward = Size(group.max_tokens_per_rank) * (row + std::max(topk, logits));
  const Size primitive = Size(rows) * (row + kF32);
  ASSIGN_OR_RETURN(const int64_t forward_bytes, forward.Get("message"));
  ASSIGN_OR_RETURN(const int64_t primitive_bytes, primitive.Get("message"));
  const int64_t largest = std::max(forward_bytes, primitive_bytes);
  constexpr int64_t kCap = std::numeric_limits<int32_t>::max();
  return largest > kCap - kMessageSlack ? kCap : largest + kMessageSlack;
}

absl::StatusOr<std::map<std::string, int64_t>> PlanGroup(const GroupSizes& group) {
  std::map<std::string, int64_t> plan;
  ASSIGN_OR_RETURN(const int64_t rows, RecvRows(group));
  plan["recv_rows"] = rows;
  const Size row = Size(group.max_hidden) * group.token_bytes;
  ASSIGN_OR_RETURN(plan["recv_tokens"], (Size(rows) * row).Get("recv_tokens"));
  plan["expert_output"] = plan["recv_tokens"];
  ASSIGN_OR_RETURN(plan["recv_weights"], (Size(rows) * kF32).Get("recv_weights"));
  ASSIGN_OR_RETURN(plan["tokens_in"], (Size(group.max_tokens_per_rank) * row).Get("tokens_in"));
  plan["tokens_out"] = plan["tokens_in"];
  ASSIGN_OR_RETURN(plan["message"], MaxMessageBytes(group));
  if (group.device_window) {
    ASSIGN_OR_RETURN(const WindowLayout window, PlanWindow(group));
    plan["device_window"] = window.bytes;
  }
  return plan;
}

absl::StatusOr<std::map<std::string, int64_t>> PlanLayer(const GroupSizes& group,
                                                         const LayerSizes& layer) {
  std::map<std::string, int64_t> plan;
  const int64_t local = LocalExperts(layer.expert_count, group.ranks);
  const Size matrices = Size(local) * layer.hidden * layer.intermediate * 3;
  Size parameters = matrices;
  if (layer.gate_up_bias) parameters = parameters + Size(local) * layer.intermediate * 2;
  if (layer.down_bias) parameters = parameters + Size(local) * layer.hidden;
  if (layer.server_router) {
    parameters = parameters + Size(layer.hidden) * layer.expert_count + layer.expert_count;
  }
  ASSIGN_OR_RETURN(plan["master_weights"], (parameters * kF32).Get("master_weights"));
  plan["compute_weights"] = 0;
  if (layer.weight_bytes != kF32) {
    ASSIGN_OR_RETURN(plan["compute_weights"],
                     (matrices * layer.weight_bytes).Get("compute_weights"));
  }
  plan["gradients"] = layer.frozen ? 0 : plan["master_weights"];
  ASSIGN_OR_RETURN(
      plan["optimizer_state"],
      (Size(layer.frozen ? 0 : plan["master_weights"]) * layer.optimizer_states).Get("state"));
  ASSIGN_OR_RETURN(const int64_t rows, RecvRows(group));
  const Size kept_row = (Size(layer.hidden) + Size(layer.intermediate) * 2) * layer.token_bytes;
  // A router's backward needs the logits and the ids it chose, the server's also the tokens.
  Size kept_token = 0;
  if (layer.router || layer.server_router) {
    kept_token = Size(layer.expert_count) * kF32 + Size(layer.top_k) * kI64;
  }
  if (layer.server_router) kept_token = kept_token + Size(layer.hidden) * layer.token_bytes;
  ASSIGN_OR_RETURN(plan["ticket_worst_case"],
                   (Size(rows) * (kept_row + kF32) + Size(group.max_tokens_per_rank) * kept_token)
                       .Get("ticket_worst_case"));
  const Size total = Size(plan["master_weights"]) + plan["compute_weights"] + plan["gradients"] +
                     plan["optimizer_state"];
  ASSIGN_OR_RETURN(plan["total_weights"], total.Get("total_weights"));
  return plan;
}

}  // namespace expertd
