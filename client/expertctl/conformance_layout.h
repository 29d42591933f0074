// Where every route of a step lands, worked out on the client from the documented slot order.
#ifndef CLIENT_EXPERTCTL_CONFORMANCE_LAYOUT_H_
#define CLIENT_EXPERTCTL_CONFORMANCE_LAYOUT_H_

#include <cstdint>
#include <vector>

namespace expertd::expertctl {

// Routing of a whole group.
struct Scenario {
  int64_t experts = 0;  // Divisible by the number of ranks.
  int64_t top_k = 0;
  int64_t alignment = 1;
  std::vector<std::vector<int32_t>> ids;  // Per rank [tokens, top_k]; -1: no route.

  int64_t ranks() const { return static_cast<int64_t>(ids.size()); }
  int64_t local_experts() const { return experts / ranks(); }
  int64_t tokens(int64_t rank) const { return static_cast<int64_t>(ids[rank].size()) / top_k; }
};

// What one row of a receive buffer holds.
struct SlotSource {
  int64_t rank = -1;  // -1: a pad row.
  int64_t token = 0;
  int64_t k = 0;
};

// The receive side of one rank.
struct RankLayout {
  std::vector<int64_t> tokens_per_expert;  // Per local expert, without padding.
  std::vector<int64_t> padded_per_expert;
  std::vector<SlotSource> slots;  // [total_rows]
};

// Slots of a local expert: source rank ascending, then token ascending; each segment is padded to a
// multiple of the alignment.
std::vector<RankLayout> LayOut(const Scenario& scenario);

// Valid routes of one token.
int64_t ValidRoutes(const Scenario& scenario, int64_t rank, int64_t token);

// Scenarios that between them have even and ragged token counts, ranks without tokens, no tokens at
// all, experts without rows, all tokens at one expert, and -1 ids.
// REQUIRES: experts divisible by ranks, top_k <= experts, max_tokens >= 1.
struct ScenarioShape {
  int64_t ranks = 1;
  int64_t experts = 1;
  int64_t top_k = 1;
  int64_t alignment = 1;
  int64_t max_tokens = 1;
};
struct NamedScenario {
  const char* name;
  Scenario scenario;
};
std::vector<NamedScenario> MakeScenarios(const ScenarioShape& shape);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_CONFORMANCE_LAYOUT_H_
