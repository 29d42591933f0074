// Float64 reference of the five expert-parallel operations: see ep.h.
#include "tests/reference/ep.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tests/reference/matrix.h"

namespace expertd::reference {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// S of SEMANTICS for every global expert, before any drop: rank ascending, then token ascending.
std::vector<std::vector<RouteSource>> RoutesByExpert(const EpConfig& config, const Routing& ids) {
  std::vector<std::vector<RouteSource>> routes(config.num_experts);
  for (int64_t rank = 0; rank < config.num_ranks; ++rank) {
    const int64_t route_count = static_cast<int64_t>(ids[rank].size());
    for (int64_t i = 0; i < route_count; ++i) {
      const int64_t expert = ids[rank][i];
      if (expert < 0) continue;
      routes[expert].push_back({.rank = rank, .token = i / config.top_k, .k = i % config.top_k});
    }
  }
  return routes;
}

// The most routes that one expert keeps.
int64_t KeptRowsLimit(const EpConfig& config) {
  if (config.policy != CapacityPolicy::kDrop || config.capacity == 0) {
    return std::numeric_limits<int64_t>::max();
  }
  const int64_t aligned_share = config.capacity / (config.LocalExperts() * config.alignment);
  return aligned_share * config.alignment;
}

// Appends the rows of one expert to `rank_layout`, and records where each of its routes went.
void AppendExpert(const EpConfig& config, const std::vector<RouteSource>& routes, int64_t rank,
                  Layout& layout) {
  RankLayout& rank_layout = layout.ranks[rank];
  const int64_t wanted = static_cast<int64_t>(routes.size());
  const int64_t kept = std::min(wanted, KeptRowsLimit(config));
  const int64_t padded = RoundUp(kept, config.alignment);
  const int64_t base = rank_layout.total;

  rank_layout.sources.resize(base + padded);
  for (int64_t i = 0; i < wanted; ++i) {
    const RouteSource& source = routes[i];
    RouteTarget& target = layout.targets[source.rank][source.token * config.top_k + source.k];
    if (i < kept) {
      target = {.state = RouteState::kPlaced, .rank = rank, .row = base + i};
      rank_layout.sources[base + i] = source;
    } else {
      target = {.state = RouteState::kDropped, .rank = rank, .row = -1};
    }
  }
  rank_layout.tokens_per_expert.push_back(kept);
  rank_layout.padded_per_expert.push_back(padded);
  rank_layout.base.push_back(base);
  rank_layout.dropped_per_expert.push_back(wanted - kept);
  rank_layout.total = base + padded;
}

}  // namespace

int64_t Layout::Tokens(int64_t rank) const {
  return static_cast<int64_t>(targets[rank].size()) / config.top_k;
}

const RouteTarget& Layout::Target(int64_t rank, int64_t token, int64_t k) const {
  return targets[rank][token * config.top_k + k];
}

Layout Prepare(const EpConfig& config, const Routing& ids) {
  Layout layout;
  layout.config = config;
  layout.ranks.resize(config.num_ranks);
  for (const std::vector<int64_t>& rank_ids : ids) {
    layout.targets.push_back(std::vector<RouteTarget>(rank_ids.size()));
  }

  const std::vector<std::vector<RouteSource>> routes = RoutesByExpert(config, ids);
  for (int64_t expert = 0; expert < config.num_experts; ++expert) {
    AppendExpert(config, routes[expert], expert / config.LocalExperts(), layout);
  }

  if (config.policy == CapacityPolicy::kRefuse && config.capacity > 0) {
    for (const RankLayout& rank : layout.ranks) {
      if (rank.total > config.capacity) layout.refused = true;
    }
  }
  return layout;
}

Received Dispatch(const Layout& layout, int64_t hidden, const PerRank& x, const PerRank& weights) {
  Received received;
  for (const RankLayout& rank : layout.ranks) {
    std::vector<double> rows(rank.total * hidden, 0.0);
    std::vector<double> row_weights(rank.total, 0.0);
    for (int64_t row = 0; row < rank.total; ++row) {
      const RouteSource& source = rank.sources[row];
      if (source.IsPad()) continue;
      std::ranges::copy(Row(x[source.rank], source.token, hidden),
                        MutableRow(rows, row, hidden).begin());
      row_weights[row] = weights[source.rank][source.token * layout.config.top_k + source.k];
    }
    received.x.push_back(std::move(rows));
    received.weights.push_back(std::move(row_weights));
  }
  return received;
}

PerRank Combine(const Layout& layout, int64_t hidden, const PerRank& z,
                const PerRank* slot_weights) {
  PerRank y;
  for (int64_t rank = 0; rank < layout.config.num_ranks; ++rank) {
    std::vector<double> sums(layout.Tokens(rank) * hidden, 0.0);
    for (int64_t token = 0; token < layout.Tokens(rank); ++token) {
      for (int64_t k = 0; k < layout.config.top_k; ++k) {
        const RouteTarget& target = layout.Target(rank, token, k);
        if (target.state != RouteState::kPlaced) continue;
        const double weight =
            slot_weights == nullptr ? 1.0 : (*slot_weights)[target.rank][target.row];
        AddScaled(weight, Row(z[target.rank], target.row, hidden), MutableRow(sums, token, hidden));
      }
    }
    y.push_back(std::move(sums));
  }
  return y;
}

DispatchGradients DispatchBackward(const Layout& layout, int64_t hidden, const PerRank& g,
                                   const PerRank& gw) {
  DispatchGradients gradients;
  // Dispatch copies a token to each of its rows, so its gradient is the unweighted sum of theirs.
  gradients.x = Combine(layout, hidden, g);
  for (const std::vector<RouteTarget>& targets : layout.targets) {
    std::vector<double> weights(targets.size(), 0.0);
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].state != RouteState::kPlaced) continue;
      weights[i] = gw[targets[i].rank][targets[i].row];
    }
    gradients.weights.push_back(std::move(weights));
  }
  return gradients;
}

PerRank CombineBackward(const Layout& layout, int64_t hidden, const PerRank& gy,
                        const PerRank* slot_weights) {
  PerRank g_z;
  for (int64_t rank = 0; rank < layout.config.num_ranks; ++rank) {
    const RankLayout& rank_layout = layout.ranks[rank];
    std::vector<double> rows(rank_layout.total * hidden, 0.0);
    for (int64_t row = 0; row < rank_layout.total; ++row) {
      const RouteSource& source = rank_layout.sources[row];
      if (source.IsPad()) continue;
      const double weight = slot_weights == nullptr ? 1.0 : (*slot_weights)[rank][row];
      AddScaled(weight, Row(gy[source.rank], source.token, hidden), MutableRow(rows, row, hidden));
    }
    g_z.push_back(std::move(rows));
  }
  return g_z;
}

}  // namespace expertd::reference
