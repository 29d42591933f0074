// Pure: what a rank's Prepare tells the others in numbers, and what all conclude from it.
#ifndef KERNELS_EP_ROUTE_RECORD_H_
#define KERNELS_EP_ROUTE_RECORD_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/ep_backend.h"

namespace expertd {

// A record is this header, then counts of routes by expert [E], then what the backend adds.
enum RouteRecord : int {
  kRecordBadRoute,  // 2 * (t * K + k) of the first bad id, + 1 for a duplicate; kNoBadRoute: none
  kRecordReject,    // 0, or 1 + the Reason for which the rank refuses its own input
  kRecordExperts,
  kRecordTopK,
  kRecordAlignment,
  kRecordTokens,  // nccl_lsa only
  kRecordHeader = 8
};
inline constexpr int32_t kNoBadRoute = 0x7fffffff;

inline bool HasBadRoute(const int32_t* record) { return record[kRecordBadRoute] != kNoBadRoute; }

// What a rank sees in its own arguments before anything is read from the device.
// Errors: DTYPE_UNSUPPORTED, TOKENS_OVER_LIMIT, SHAPE_MISMATCH.
absl::Status CheckRouting(const PrepareArgs& args, const EpGroupConfig& config);

// records: of all ranks. Errors: SEQUENCE_CONFLICT when they prepare different things;
// PEER_REJECTED naming the first other rank with bad input. REQUIRES: `rank`'s own is good.
absl::Status JudgePeers(std::span<const int32_t* const> records, int64_t rank);

}  // namespace expertd

#endif  // KERNELS_EP_ROUTE_RECORD_H_
