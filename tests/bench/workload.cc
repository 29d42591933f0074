// Workload table, random routing without repetition, and exact traffic counts.
#include "tests/bench/workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace expertd::bench {

const std::vector<Workload>& AllWorkloads() {
  static const std::vector<Workload> workloads = {
      {"deepseek_4k", 7168, 2048, 32, 8, 4096, 0.0},
      {"deepseek_8k", 7168, 2048, 32, 8, 8192, 0.0},
      {"deepseek_8k_skew", 7168, 2048, 32, 8, 8192, 1.0},
      {"mixtral_8k", 4096, 14336, 4, 2, 8192, 0.0},
      {"qwen3moe_8k", 2048, 768, 64, 8, 8192, 0.0},
      {"decode_128", 7168, 2048, 32, 8, 128, 0.0},
      {"cpu_small", 512, 256, 8, 4, 256, 0.0},
      {"cpu_skew", 512, 256, 8, 4, 256, 1.0},
      {"cpu_decode", 512, 256, 8, 4, 8, 0.0},
  };
  return workloads;
}

Routing MakeRouting(const Workload& workload, int64_t world, int64_t rank, uint64_t seed) {
  const auto experts = static_cast<size_t>(workload.experts_per_rank * world);
  const auto top_k = static_cast<size_t>(workload.top_k);
  // The popularity of an expert is the same for all ranks.
  std::mt19937_64 popularity_rng(seed);
  std::normal_distribution<double> normal;
  std::vector<double> prior(experts);
  for (double& value : prior) value = workload.skew * normal(popularity_rng);

  std::mt19937_64 rng(seed + 1 + static_cast<uint64_t>(rank));
  std::uniform_real_distribution<double> uniform(1e-12, 1.0);
  Routing routing;
  std::vector<double> score(experts);
  std::vector<size_t> order(experts);
  for (int64_t t = 0; t < workload.tokens_per_rank; ++t) {
    // Gumbel noise: the largest K are a sample without repetition.
    for (size_t e = 0; e < experts; ++e) score[e] = prior[e] - std::log(-std::log(uniform(rng)));
    std::iota(order.begin(), order.end(), size_t{0});
    const auto middle = order.begin() + static_cast<std::ptrdiff_t>(top_k);
    std::partial_sort(order.begin(), middle, order.end(),
                      [&](size_t a, size_t b) { return score[a] > score[b]; });
    double sum = 0;
    std::vector<double> weights(top_k);
    for (double& weight : weights) sum += (weight = uniform(rng));
    for (size_t k = 0; k < top_k; ++k) {
      routing.ids.push_back(static_cast<int64_t>(order[k]));
      routing.weights.push_back(static_cast<float>(weights[k] / sum));
    }
  }
  return routing;
}

std::vector<std::vector<int64_t>> SlotsOf(const Workload& workload, int64_t alignment,
                                          const std::vector<Routing>& by_rank) {
  const size_t experts = by_rank.size() * static_cast<size_t>(workload.experts_per_rank);
  std::vector<int64_t> count(experts);
  for (const Routing& routing : by_rank) {
    for (int64_t id : routing.ids) ++count[static_cast<size_t>(id)];
  }
  std::vector<int64_t> next(experts);
  for (size_t e = 0; e < experts; ++e) {
    if (e % static_cast<size_t>(workload.experts_per_rank) == 0) continue;  // first of its rank
    const int64_t padded = (count[e - 1] + alignment - 1) / alignment * alignment;
    next[e] = next[e - 1] + padded;
  }
  std::vector<std::vector<int64_t>> slots;
  for (const Routing& routing : by_rank) {
    std::vector<int64_t>& own = slots.emplace_back();
    for (int64_t id : routing.ids) own.push_back(next[static_cast<size_t>(id)]++);
  }
  return slots;
}

Traffic CountTraffic(const Workload& workload, const std::vector<Routing>& by_rank) {
  const auto world = static_cast<int64_t>(by_rank.size());
  std::vector<int64_t> received(by_rank.size());
  Traffic traffic;
  for (int64_t rank = 0; rank < world; ++rank) {
    int64_t sent = 0;
    const std::vector<int64_t>& ids = by_rank[static_cast<size_t>(rank)].ids;
    for (int64_t t = 0; t < workload.tokens_per_rank; ++t) {
      std::vector<bool> reached(by_rank.size());
      for (int64_t k = 0; k < workload.top_k; ++k) {
        const int64_t owner =
            ids[static_cast<size_t>(t * workload.top_k + k)] / workload.experts_per_rank;
        ++received[static_cast<size_t>(owner)];
        if (owner == rank || reached[static_cast<size_t>(owner)]) continue;
        reached[static_cast<size_t>(owner)] = true;
        ++sent;
      }
    }
    traffic.rows_sent = std::max(traffic.rows_sent, sent);
  }
  traffic.rows_received = *std::max_element(received.begin(), received.end());
  return traffic;
}

}  // namespace expertd::bench
