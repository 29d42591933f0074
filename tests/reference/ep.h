// Float64 reference of the five expert-parallel operations, simulated for a whole group at once.
//
// One call plays every rank of the group, so a "collective" is an ordinary function. Rank d owns
// the experts [d*L, (d+1)*L) with L = num_experts / num_ranks. Everything follows from one Layout,
// which says for each route which slot row it went to, and for each slot row which route it came
// from:
//
//   Layout layout = Prepare(config, ids);
//   Received recv = Dispatch(layout, hidden, x, weights);
//   PerRank z = ...;                                      // run the experts on recv.x
//   PerRank y = Combine(layout, hidden, z, &recv.weights);
//
// A slot row is one row of a rank's expert-major receive layout. Pure functions, any thread.
#ifndef TESTS_REFERENCE_EP_H_
#define TESTS_REFERENCE_EP_H_

#include <cstdint>
#include <vector>

namespace expertd::reference {

// One row-major buffer per rank.
using PerRank = std::vector<std::vector<double>>;

// topk_ids per rank, each [T_r, K] row-major; T_r may be 0 and may differ between ranks.
using Routing = std::vector<std::vector<int64_t>>;

enum class CapacityPolicy { kRefuse, kDrop };

// REQUIRES: num_experts divisible by num_ranks; alignment a power of two; counts positive.
struct EpConfig {
  int64_t num_experts = 1;
  int64_t num_ranks = 1;
  int64_t top_k = 1;
  int64_t alignment = 1;  // rows of one expert are padded to a multiple of this
  int64_t capacity = 0;   // most slot rows per rank, pads included; 0: worst case, nothing is lost
  CapacityPolicy policy = CapacityPolicy::kRefuse;

  int64_t LocalExperts() const { return num_experts / num_ranks; }
};

// The route that fills a slot row: rank is -1 for a pad row.
struct RouteSource {
  int64_t rank = -1;
  int64_t token = -1;
  int64_t k = -1;

  bool IsPad() const { return rank < 0; }
  bool operator==(const RouteSource&) const = default;
};

enum class RouteState { kNone, kPlaced, kDropped };

// Where a route went. kNone: its id is -1. kDropped: it was over the expert's share of capacity.
struct RouteTarget {
  RouteState state = RouteState::kNone;
  int64_t rank = -1;
  int64_t row = -1;  // slot row on that rank; -1 unless kPlaced

  bool operator==(const RouteTarget&) const = default;
};

// The receive layout of one rank. Vectors "per local expert" are [L].
struct RankLayout {
  std::vector<int64_t> tokens_per_expert;  // c_j: rows kept, without drops and pads
  std::vector<int64_t> padded_per_expert;  // p_j: c_j rounded up to the alignment; 0 stays 0
  std::vector<int64_t> base;               // base_j: first slot row of local expert j
  std::vector<int64_t> dropped_per_expert;
  int64_t total = 0;                 // sum of p_j
  std::vector<RouteSource> sources;  // [total]
};

struct Layout {
  EpConfig config;
  bool refused = false;                           // kRefuse, and some rank's total is over capacity
  std::vector<RankLayout> ranks;                  // [R]
  std::vector<std::vector<RouteTarget>> targets;  // per source rank: [T_r, K]

  int64_t Tokens(int64_t rank) const;
  const RouteTarget& Target(int64_t rank, int64_t token, int64_t k) const;
};

// The receive side of every rank, exactly `total` rows each.
struct Received {
  PerRank x;        // per rank [total, hidden]; pad rows are zero
  PerRank weights;  // per rank [total]; pad rows have weight 0
};

struct DispatchGradients {
  PerRank x;        // per rank [T_r, hidden]
  PerRank weights;  // per rank [T_r, K]; 0 for -1 and for dropped routes
};

// Lays out all routes. Under kDrop each expert keeps its first floor(capacity / (L*A)) * A routes,
// in order of (source rank, token). A refused layout still carries the counts that it would have
// needed; no other operation may be called with it.
// REQUIRES: ids.size() == num_ranks; each id in [-1, num_experts); no expert twice in one token.
Layout Prepare(const EpConfig& config, const Routing& ids);

// Copies token rows and route weights to their slot rows.
// REQUIRES: !layout.refused; x per rank [T_r, hidden]; weights per rank [T_r, K].
Received Dispatch(const Layout& layout, int64_t hidden, const PerRank& x, const PerRank& weights);

// y[r][t] = sum over placed routes of z[row], times slot_weights[row] where given. Returns
// [T_r, hidden] per rank. Reads neither pad rows nor rows at or past total, which may hold
// anything. REQUIRES: !layout.refused; z per rank at least [total, hidden]; slot_weights at least
// [total].
PerRank Combine(const Layout& layout, int64_t hidden, const PerRank& z,
                const PerRank* slot_weights = nullptr);

// Adjoint of Dispatch. Reads neither pad rows nor rows at or past total.
// REQUIRES: !layout.refused; g per rank at least [total, hidden]; gw per rank at least [total].
DispatchGradients DispatchBackward(const Layout& layout, int64_t hidden, const PerRank& g,
                                   const PerRank& gw);

// Adjoint of Combine in z: g_z[row] = gy[r][t], times slot_weights[row] where the combine had them.
// Returns [total, hidden] per rank; pad rows are zero.
// REQUIRES: !layout.refused; gy per rank [T_r, hidden]; slot_weights at least [total].
PerRank CombineBackward(const Layout& layout, int64_t hidden, const PerRank& gy,
                        const PerRank* slot_weights = nullptr);

}  // namespace expertd::reference

#endif  // TESTS_REFERENCE_EP_H_
