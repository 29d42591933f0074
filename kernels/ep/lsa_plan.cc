// Ranges, tag bits and block shares of lsa_plan.h.
#include "kernels/ep/lsa_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/strings.h"

namespace expertd {
namespace {

constexpr int kSequenceBits = 40;
constexpr int kOrdinalBits = 15;

// Up to here a row is shared by many warps: what counts is how soon it is there.
constexpr int64_t kLatencyTokens = 256;
constexpr int kLatencyWarps = 8;
// A warp takes long over a row from here on: the last rows to arrive would hold up the end.
constexpr int64_t kWideRowBytes = 7168;
constexpr int kWideRowWarps = 4;

int TeamWarps(const LsaWork& work) {
  if (work.tokens <= kLatencyTokens) return kLatencyWarps;
  return work.row_bytes >= kWideRowBytes ? kWideRowWarps : 1;
}

// Blocks that push rows as they are: enough to fill the links, and a share of more.
constexpr int64_t kLinkBlocks = 8;
constexpr int64_t kGatherPushPercent = 45;
constexpr int64_t kScatterPushPercent = 24;

// One block for each multiprocessor that the operation may have.
LsaShape ShapeOf(const LsaWork& work, int threads) {
  const int64_t most = std::max<int64_t>(work.multiprocessors, 1);
  return {.blocks = static_cast<int>(work.budget > 0 ? std::min(work.budget, most) : most),
          .threads = threads,
          .team_warps = TeamWarps(work)};
}

}  // namespace

absl::Status CheckLsaConfig(const EpGroupConfig& config) {
  Violations violations;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto check = [&](std::string_view name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    violations.Add(Reason::kConfigInvalid, std::string(name),
                   StrCat("got ", value, ", need ", low, " to ", high));
  };
  check("world", config.world, 1, kLsaMaxWorld);
  check("rank", config.rank, 0, config.world - 1);
  check("max_recv_rows_per_rank", config.max_recv_rows, 1, kMost);
  check("max_top_k", config.max_top_k, 1, kLsaMaxTopK);
  check("max_experts", config.max_experts, 1, kLsaMaxExperts);
  const int64_t top_k = std::max<int64_t>(config.max_top_k, 1);
  const int64_t world = std::max<int64_t>(config.world, 1);
  // Slots and twice the route numbers are 32-bit.
  check("max_tokens_per_rank", config.max_tokens_per_rank, 0, kMost / (2 * top_k * world));
  return violations.ToStatus("EP group of backend nccl_lsa; backend nccl has wider limits");
}

uint64_t LsaTag(uint64_t epoch, uint64_t sequence, uint64_t ordinal) {
  constexpr uint64_t kSequenceMask = (uint64_t{1} << kSequenceBits) - 1;
  return epoch << (kSequenceBits + kOrdinalBits + 1) |
         (sequence & kSequenceMask) << (kOrdinalBits + 1) | ordinal << 1;
}

LsaShape ScatterShape(const LsaWork& work) {
  LsaShape shape = ShapeOf(work, kScatterThreads);
  if (work.world == 1) return shape;
  // With few tokens each gets a team at once, with many the links are what all wait for.
  const int64_t wanted = shape.team_warps == kLatencyWarps
                             ? (work.tokens + shape.teams() - 1) / shape.teams()
                             : std::max(kLinkBlocks, shape.blocks * kScatterPushPercent / 100);
  shape.push_blocks =
      static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max(shape.blocks / 2, 1)));
  return shape;
}

LsaShape GatherShape(const LsaWork& work) {
  LsaShape shape = ShapeOf(work, kGatherThreads);
  // Each rank sums as much for the others as they sum for it, and adds what comes.
  if (work.world == 1) return shape;
  shape.push_blocks =
      static_cast<int>(std::max<int64_t>(shape.blocks * kGatherPushPercent / 100, 1));
  return shape;
}

}  // namespace expertd
