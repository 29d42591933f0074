// Pure decisions of backend nccl_lsa: tags of operations and shapes of kernels.
#ifndef KERNELS_EP_LSA_PLAN_H_
#define KERNELS_EP_LSA_PLAN_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/ep_backend.h"

namespace expertd {

inline constexpr int64_t kLsaMaxWorld = 72;  // the largest NVLink domain there is
inline constexpr int64_t kLsaMaxTopK = 64;   // slots that a group of warps keeps at hand
inline constexpr int64_t kLsaMaxExperts = 4096;
// Threads of a block: copying wants many, summing needs the registers of more.
inline constexpr int kScatterThreads = 1024;
inline constexpr int kGatherThreads = 512;

// Errors: CONFIG_INVALID naming every value out of range.
absl::Status CheckLsaConfig(const EpGroupConfig& config);

// Names one operation in flags and cells. Later operations of an epoch have larger tags; bit 0 is
// free for "the rank has left this operation". REQUIRES: 1 <= ordinal < kLsaMaxOrdinal.
inline constexpr uint64_t kLsaMaxOrdinal = uint64_t{1} << 15;
uint64_t LsaTag(uint64_t epoch, uint64_t sequence, uint64_t ordinal);
inline constexpr uint64_t kLsaLeft = 1;

// How many warps a row gets, and how blocks share the work of an operation. Those that push rows
// to other ranks do nothing else: each row ends with a fence, which waits for all that its
// multiprocessor has in flight.
struct LsaShape {
  int blocks = 1;
  int threads = 32;
  int team_warps = 1;   // 1, 4 or 8
  int push_blocks = 0;  // the first ones; the others work on what stays or has arrived

  int teams() const { return threads / 32 / team_warps; }
  // A single block pushes first, then does the rest.
  int rest_begin() const { return blocks == 1 ? 0 : push_blocks; }
  friend bool operator==(const LsaShape&, const LsaShape&) = default;
};

struct LsaWork {
  int64_t tokens = 0;  // of the rank with the most
  int64_t row_bytes = 0;
  int64_t world = 1;
  int64_t multiprocessors = 1;
  int64_t budget = 0;  // comm_sm_count; 0: all
};

// Rows go out as they are and are spread by the receiver, or are summed first.
LsaShape ScatterShape(const LsaWork& work);
LsaShape GatherShape(const LsaWork& work);

}  // namespace expertd

#endif  // KERNELS_EP_LSA_PLAN_H_
