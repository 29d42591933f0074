// Counting, prefix sums and capacity rules of ep_layout.h.
#include "kernels/ep/ep_layout.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/strings.h"

namespace expertd {
namespace {

// A request with every id wrong must not make a reply of megabytes.
constexpr size_t kMaxViolations = 16;

int64_t RoundUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

int64_t ExpertLimit(const EpLayoutConfig& config) {
  if (config.policy == CapacityPolicy::kRefuse) return std::numeric_limits<int64_t>::max();
  const int64_t local = config.experts / config.world;
  return config.capacity / (local * config.alignment) * config.alignment;
}

absl::Status ValidateIds(const RoutingView& routing, int64_t experts) {
  if (routing.ids_dtype != DType::kI32 && routing.ids_dtype != DType::kI64) {
    return Error(Reason::kDtypeUnsupported)
        .At("topk_ids.dtype",
            StrCat("got ", DTypeName(routing.ids_dtype), ", need DTYPE_I32 or DTYPE_I64"));
  }
  Violations violations;
  std::vector<int64_t> last_token(static_cast<size_t>(experts), -1);
  for (int64_t t = 0; t < routing.tokens; ++t) {
    for (int64_t k = 0; k < routing.top_k; ++k) {
      const int64_t id = RouteId(routing, t * routing.top_k + k);
      if (id == -1) continue;
      const bool in_range = id >= 0 && id < experts;
      if (in_range && last_token[static_cast<size_t>(id)] != t) {
        last_token[static_cast<size_t>(id)] = t;
        continue;
      }
      const std::string path = StrCat("topk_ids[", t, ",", k, "]");
      if (in_range) {
        violations.Add(Reason::kDuplicateExpert, path,
                       StrCat("expert ", id, " twice for one token, need distinct experts"));
      } else {
        violations.Add(Reason::kExpertIdRange, path,
                       StrCat("got ", id, ", need -1 to ", experts - 1));
      }
      if (violations.size() == kMaxViolations) return violations.ToStatus("routing");
    }
  }
  return violations.ToStatus("routing");
}

void CountRoutes(const RoutingView& routing, std::span<int64_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  for (int64_t i = 0; i < routing.tokens * routing.top_k; ++i) {
    const int64_t id = RouteId(routing, i);
    if (id >= 0) ++counts[static_cast<size_t>(id)];
  }
}

absl::StatusOr<EpLayout> EpLayout::Create(const EpLayoutConfig& config,
                                          std::span<const int64_t> counts) {
  EpLayout layout(config);
  const auto experts = static_cast<size_t>(config.experts);
  layout.kept_.resize(counts.size());
  layout.first_slot_.resize(counts.size());
  layout.routes_.resize(experts);
  layout.padded_.resize(experts);
  layout.base_.resize(experts);
  layout.dropped_.resize(experts);
  layout.totals_.resize(static_cast<size_t>(config.world));
  for (int64_t rank = 0; rank < config.world; ++rank) layout.PlaceRank(rank, counts);

  const auto fullest = std::max_element(layout.totals_.begin(), layout.totals_.end());
  if (config.policy == CapacityPolicy::kRefuse && *fullest > config.capacity) {
    const int64_t rank = fullest - layout.totals_.begin();
    return Error(Reason::kRecvCapacity)
        .Text("rank ", rank, " would receive ", *fullest, " rows with padding, need at most ",
              config.capacity, "; raise max_recv_rows_per_rank or choose the DROP policy")
        .With("rank", rank)
        .With("rows", *fullest)
        .With("limit", config.capacity);
  }
  return layout;
}

void EpLayout::PlaceRank(int64_t rank, std::span<const int64_t> counts) {
  const int64_t limit = ExpertLimit(config_);
  int64_t base = 0;
  for (int64_t e = rank * local_experts(); e < (rank + 1) * local_experts(); ++e) {
    int64_t routes = 0;
    int64_t kept = 0;
    for (int64_t source = 0; source < config_.world; ++source) {
      const int64_t count = counts[At(source, e)];
      const int64_t fit = std::min(count, limit - kept);
      first_slot_[At(source, e)] = base + kept;
      kept_[At(source, e)] = fit;
      kept += fit;
      routes += count;
    }
    const auto expert = static_cast<size_t>(e);
    routes_[expert] = kept;
    dropped_[expert] = routes - kept;
    padded_[expert] = RoundUp(kept, config_.alignment);
    base_[expert] = base;
    base += padded_[expert];
  }
  totals_[static_cast<size_t>(rank)] = base;
}

int64_t EpLayout::KeptBetween(int64_t source, int64_t target) const {
  int64_t sum = 0;
  for (int64_t e = target * local_experts(); e < (target + 1) * local_experts(); ++e) {
    sum += Kept(source, e);
  }
  return sum;
}

RecvCounts EpLayout::CountsOf(int64_t rank) const {
  const auto slice = [&](const std::vector<int64_t>& all) {
    const auto begin = all.begin() + rank * local_experts();
    return std::vector<int64_t>(begin, begin + local_experts());
  };
  RecvCounts counts;
  counts.tokens_per_expert = slice(routes_);
  counts.padded_per_expert = slice(padded_);
  counts.dropped_per_expert = slice(dropped_);
  counts.total = Total(rank);
  return counts;
}

void AssignSlots(const RoutingView& routing, const EpLayout& layout, int64_t source,
                 std::span<int64_t> slots) {
  std::vector<int64_t> seen(static_cast<size_t>(layout.experts()), 0);
  for (int64_t i = 0; i < routing.tokens * routing.top_k; ++i) {
    int64_t& slot = slots[static_cast<size_t>(i)];
    const int64_t id = RouteId(routing, i);
    if (id < 0) {
      slot = kNoRoute;
      continue;
    }
    const int64_t position = seen[static_cast<size_t>(id)]++;
    slot = position < layout.Kept(source, id) ? layout.FirstSlot(source, id) + position
                                              : kDroppedRoute;
  }
}

}  // namespace expertd
