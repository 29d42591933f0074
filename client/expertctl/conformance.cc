// What the conformance checks share.
#include "client/expertctl/conformance.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/strings.h"
#include "client/expertctl/train/random.h"

namespace expertd::expertctl {

ScenarioShape Conformance::shape() const {
  constexpr int64_t kTokens = 13;
  const int64_t limit = session->group.config().max_tokens_per_rank();
  return {.ranks = ranks(),
          .experts = layer.config().expert_count(),
          .top_k = layer.config().top_k(),
          .alignment = layer.config().alignment(),
          .max_tokens = std::min(kTokens, limit)};
}

void Conformance::Check(const std::string& name, const std::function<absl::Status()>& check) const {
  if (StopFlag()->load()) return;
  report(name, check());
}

absl::StatusOr<v1::LayerConfig> ConformanceLayer(const client::Group& group) {
  const v1::GroupConfig& limits = group.config();
  const int64_t ranks = group.world();
  const int64_t per_rank = std::min<int64_t>(4, limits.max_experts() / ranks);
  if (per_rank < 1 || limits.max_hidden() < 8) {
    return Error(Reason::kConfigInvalid)
        .Text("conformance: got max_experts ", limits.max_experts(), " and max_hidden ",
              limits.max_hidden(), ", need at least ", ranks, " and 8");
  }
  v1::LayerConfig config;
  config.set_expert_count(per_rank * ranks);
  config.set_hidden(std::min<int64_t>(64, limits.max_hidden() / 8 * 8));
  config.set_intermediate(32);
  config.set_top_k(std::min({int64_t{3}, limits.max_top_k(), config.expert_count()}));
  config.set_alignment(4);
  config.set_token_dtype(limits.max_token_dtype());
  const bool narrow = limits.max_token_dtype() == v1::DTYPE_BF16;
  config.set_weight_dtype(narrow ? v1::DTYPE_BF16 : v1::DTYPE_F32);
  return config;
}

float RowValue(int64_t rank, int64_t token, int64_t column, int64_t salt) {
  constexpr int64_t kValues = 65;  // -32 .. 32
  if (column < 2) {                // These two make rows unique: token and rank, written out.
    const int64_t digit = column == 0 ? token : rank;
    return static_cast<float>(digit % kValues - 32);
  }
  const uint64_t bits =
      train::RandomBits(static_cast<uint64_t>(salt + 1), static_cast<uint64_t>(rank * 1000 + token),
                        static_cast<uint64_t>(column));
  return static_cast<float>(static_cast<int64_t>(bits % kValues) - 32);
}

absl::Status ExpectBits(const std::string& what, const std::vector<float>& got,
                        const std::vector<float>& want) {
  if (got.size() != want.size()) {
    return Error(Reason::kInternal).Text(what, ": got ", got.size(), " values, need ", want.size());
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(want[i])) continue;
    return Error(Reason::kInternal)
        .Text(what, "[", i, "]: got ", got[i], ", need ", want[i], " bit for bit");
  }
  return absl::OkStatus();
}

absl::Status ExpectTrue(bool condition, const std::string& what) {
  if (condition) return absl::OkStatus();
  return Error(Reason::kInternal).Text(what);
}

}  // namespace expertd::expertctl
