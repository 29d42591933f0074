// Pure arithmetic of expert-parallel routing: validation, counts, layout of all ranks, slots.
//
// Every rank computes the layout of every rank from the same [world, experts] counts, so all of
// them refuse alike and a sender knows the slot of each of its routes without asking. Host memory
// only; no device, no transport. Thread-compatible, no state.
#ifndef KERNELS_EP_EP_LAYOUT_H_
#define KERNELS_EP_EP_LAYOUT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ep_backend.h"
#include "kernels/types.h"

namespace expertd {

// In the slot of a route: the caller wrote -1, or capacity left no room.
inline constexpr int64_t kNoRoute = -1;
inline constexpr int64_t kDroppedRoute = -2;

// Element `index` of a row-major ids array.
inline int64_t RouteId(const RoutingView& routing, int64_t index) {
  return routing.ids_dtype == DType::kI64 ? static_cast<const int64_t*>(routing.ids)[index]
                                          : static_cast<const int32_t*>(routing.ids)[index];
}

// Errors: DTYPE_UNSUPPORTED; EXPERT_ID_RANGE and DUPLICATE_EXPERT with up to 16 violations whose
// paths are "topk_ids[t,k]".
absl::Status ValidateIds(const RoutingView& routing, int64_t experts);

// counts[e] = routes to expert e, counts: [experts]. REQUIRES: valid ids.
void CountRoutes(const RoutingView& routing, std::span<int64_t> counts);

struct EpLayoutConfig {
  int64_t world = 1;
  int64_t experts = 1;    // a multiple of world
  int64_t alignment = 1;  // power of two
  int64_t capacity = 0;   // receive rows per rank, padding included
  CapacityPolicy policy = CapacityPolicy::kRefuse;
};

// Rows that each expert keeps at most: its first ones in slot order.
int64_t ExpertLimit(const EpLayoutConfig& config);

// Where everything lies on every rank.
class EpLayout {
 public:
  // counts: [world, experts], routes of each source rank to each expert. REQUIRES: a valid config.
  // Errors: RECV_CAPACITY naming the fullest rank, its rows and the limit (policy kRefuse).
  static absl::StatusOr<EpLayout> Create(const EpLayoutConfig& config,
                                         std::span<const int64_t> counts);

  int64_t world() const { return config_.world; }
  int64_t experts() const { return config_.experts; }
  int64_t local_experts() const { return config_.experts / config_.world; }
  int64_t OwnerOf(int64_t expert) const { return expert / local_experts(); }

  // Routes of `source` to `expert` that are kept: its first ones in token order.
  int64_t Kept(int64_t source, int64_t expert) const { return kept_[At(source, expert)]; }
  // Slot, on the owner, of the first route of `source` to `expert`; the others follow.
  int64_t FirstSlot(int64_t source, int64_t expert) const {
    return first_slot_[At(source, expert)];
  }
  // Kept routes from `source` to all experts of `target`.
  int64_t KeptBetween(int64_t source, int64_t target) const;
  // Receive rows of a rank, padding included.
  int64_t Total(int64_t rank) const { return totals_[static_cast<size_t>(rank)]; }
  // First slot of an expert's segment on its owner.
  int64_t Base(int64_t expert) const { return base_[static_cast<size_t>(expert)]; }
  // What Prepare reports for a rank.
  RecvCounts CountsOf(int64_t rank) const;

 private:
  explicit EpLayout(const EpLayoutConfig& config) : config_(config) {}
  size_t At(int64_t source, int64_t expert) const {
    return static_cast<size_t>(source * config_.experts + expert);
  }
  void PlaceRank(int64_t rank, std::span<const int64_t> counts);

  EpLayoutConfig config_;
  std::vector<int64_t> kept_;        // [world, experts]
  std::vector<int64_t> first_slot_;  // [world, experts]
  std::vector<int64_t> routes_;      // [experts] kept
  std::vector<int64_t> padded_;      // [experts]
  std::vector<int64_t> base_;        // [experts]
  std::vector<int64_t> dropped_;     // [experts]
  std::vector<int64_t> totals_;      // [world]
};

// The slot of each route (t, k) of rank `source` on the owner of its expert, or kNoRoute, or
// kDroppedRoute. slots: [tokens, top_k]. REQUIRES: valid ids, counted into the layout.
void AssignSlots(const RoutingView& routing, const EpLayout& layout, int64_t source,
                 std::span<int64_t> slots);

}  // namespace expertd

#endif  // KERNELS_EP_EP_LAYOUT_H_
