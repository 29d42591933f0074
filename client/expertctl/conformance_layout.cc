// The slot order, and scenarios that exercise it.
#include "client/expertctl/conformance_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "client/expertctl/train/random.h"

namespace expertd::expertctl {
namespace {

constexpr uint64_t kSeed = 20240;

// `first`: how many of the experts may be chosen. Every `hole`-th route is -1; 0: none.
std::vector<int32_t> Ids(const ScenarioShape& shape, int64_t rank, int64_t tokens, int64_t first,
                         int64_t hole) {
  std::vector<int32_t> ids;
  std::vector<int32_t> deck(shape.experts);
  for (int64_t t = 0; t < tokens; ++t) {
    std::iota(deck.begin(), deck.end(), 0);
    for (int64_t k = 0; k < shape.top_k; ++k) {
      const int64_t route = t * shape.top_k + k;
      const int64_t left = std::max<int64_t>(1, first - k);
      const uint64_t bits = train::RandomBits(kSeed, static_cast<uint64_t>(rank), route);
      std::swap(deck[k], deck[k + bits % static_cast<uint64_t>(left)]);
      ids.push_back(hole > 0 && (route + rank) % hole == 0 ? -1 : deck[k]);
    }
  }
  return ids;
}

}  // namespace

std::vector<RankLayout> LayOut(const Scenario& scenario) {
  std::vector<RankLayout> layouts(scenario.ranks());
  for (int64_t expert = 0; expert < scenario.experts; ++expert) {
    RankLayout& layout = layouts[expert / scenario.local_experts()];
    int64_t count = 0;
    for (int64_t rank = 0; rank < scenario.ranks(); ++rank) {
      for (size_t route = 0; route < scenario.ids[rank].size(); ++route) {
        if (scenario.ids[rank][route] != expert) continue;
        const auto flat = static_cast<int64_t>(route);
        layout.slots.push_back({rank, flat / scenario.top_k, flat % scenario.top_k});
        ++count;
      }
    }
    const int64_t padded =
        (count + scenario.alignment - 1) / scenario.alignment * scenario.alignment;
    layout.slots.resize(layout.slots.size() + static_cast<size_t>(padded - count));
    layout.tokens_per_expert.push_back(count);
    layout.padded_per_expert.push_back(padded);
  }
  return layouts;
}

int64_t ValidRoutes(const Scenario& scenario, int64_t rank, int64_t token) {
  const auto begin = scenario.ids[rank].begin() + token * scenario.top_k;
  return std::count_if(begin, begin + scenario.top_k, [](int32_t id) { return id >= 0; });
}

std::vector<NamedScenario> MakeScenarios(const ScenarioShape& shape) {
  struct Recipe {
    const char* name;
    int64_t first;  // Experts in use.
    int64_t hole;
    int64_t (*tokens)(int64_t rank, int64_t max_tokens);
  };
  const int64_t few = std::max(shape.top_k, shape.experts / 4);
  const Recipe recipes[] = {
      {"even", shape.experts, 0, [](int64_t, int64_t max) { return max; }},
      {"ragged", shape.experts, 0,
       [](int64_t rank, int64_t max) { return (5 * rank + 3) % (max + 1); }},
      {"zero tokens on rank 0", shape.experts, 0,
       [](int64_t rank, int64_t max) { return rank == 0 ? 0 : max; }},
      {"zero tokens everywhere", shape.experts, 0, [](int64_t, int64_t) { return int64_t{0}; }},
      {"few experts in use", few, 0, [](int64_t, int64_t max) { return max; }},
      {"missing routes", shape.experts, 3, [](int64_t, int64_t max) { return max; }},
      {"no routes at all", shape.experts, 1, [](int64_t, int64_t max) { return max; }},
  };
  std::vector<NamedScenario> scenarios;
  for (const Recipe& recipe : recipes) {
    Scenario scenario{shape.experts, shape.top_k, shape.alignment, {}};
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      const int64_t tokens = recipe.tokens(rank, shape.max_tokens);
      scenario.ids.push_back(Ids(shape, rank, tokens, recipe.first, recipe.hole));
    }
    scenarios.push_back({recipe.name, std::move(scenario)});
  }
  return scenarios;
}

}  // namespace expertd::expertctl
