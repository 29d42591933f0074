// Launchers of the routing kernels: count and validate ids, scan, assign slots and wire rows.
//
// Called by nccl_ep, in this order on one stream: LaunchCount, LaunchScan, (exchange of the
// records, layout on the host), LaunchAssign. Tokens are cut into tiles of kRouteTile; a block
// holds one bit per (expert, token) of its tile, so that every position is a count of bits: the
// order is source rank, then token, whatever the hardware does first. No allocation, no
// synchronisation.
#ifndef KERNELS_EP_ROUTE_KERNELS_H_
#define KERNELS_EP_ROUTE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/ep/route_record.h"

namespace expertd {

inline constexpr int64_t kRouteTile = 128;
// Bits of a tile must fit the shared memory of a block.
inline constexpr int64_t kMaxRouteColumns = 12288;

inline constexpr int64_t RouteTiles(int64_t tokens) {
  return (tokens + kRouteTile - 1) / kRouteTile;
}

struct RouteShape {
  const void* ids = nullptr;  // [T, K] i64 or i32
  bool wide_ids = true;       // i64
  int64_t tokens = 0;         // T
  int64_t top_k = 0;          // K
  int64_t experts = 0;        // E
  int64_t world = 1;          // R

  constexpr int64_t columns() const { return experts + world; }
};

// counts: [E + R, tiles] i32: routes to an expert, and tokens with a route to a rank, of each tile.
// bad: [tiles] i32, the tile's first bad route. Nothing is launched without tokens.
// REQUIRES: 2 * T * K fits 31 bits.
cudaError_t LaunchCount(const RouteShape& shape, int32_t* counts, int32_t* bad,
                        cudaStream_t stream);

// Makes counts exclusive sums over the tiles and writes the record: header (the first bad route of
// all tiles, and the rest from `header`), then the totals [E + R].
struct ScanParams {
  int64_t tiles = 0;
  int64_t columns = 0;
  int32_t* counts = nullptr;
  const int32_t* bad = nullptr;
  int32_t header[kRecordHeader] = {};
  int32_t* record = nullptr;
};
cudaError_t LaunchScan(const ScanParams& params, cudaStream_t stream);

// Device memory of one handle. A wire row is one token that goes to one other rank; rows of a rank
// lie in token order, ranks in order, this rank left out.
struct RouteTables {
  int32_t* route_owner = nullptr;  // [T, K] rank that has the route's slot, or -1
  int32_t* row_of = nullptr;       // [T, R] row in that rank's list, or -1
  int32_t* wire_tokens = nullptr;  // [wire rows out]
  int32_t* wire_slots = nullptr;   // [wire rows out, K] slot on the other rank, or -1
  int32_t* own_tokens = nullptr;   // [own rows] tokens with a route to this rank
  int32_t* recv_slots = nullptr;   // [rows from all ranks, K] slot here, or -1; sources in order
  int32_t* pad_slots = nullptr;    // [pad rows]
};

struct AssignParams {
  RouteShape shape;
  int64_t rank = 0;
  const int32_t* counts = nullptr;      // from LaunchScan
  const int32_t* first_slot = nullptr;  // [E] slot of this rank's first route to the expert
  const int32_t* kept = nullptr;        // [E] routes of this rank that the expert keeps
  const int32_t* wire_begin = nullptr;  // [R] first wire row to a rank; -1: nothing travels there
  const int32_t* pad_begin = nullptr;   // [L] first pad slot of a local expert
  const int32_t* pad_sums = nullptr;    // [L + 1] pad rows of the experts before
  int32_t* own_slots = nullptr;         // this rank's part of recv_slots
  RouteTables tables;                   // filled with -1 before
  uint8_t* dropped = nullptr;           // [T, K], or null when nothing is dropped
};
cudaError_t LaunchAssign(const AssignParams& params, cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_EP_ROUTE_KERNELS_H_
