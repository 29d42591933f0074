// Pure: the routes of one rank, grouped by the rank they go to, as they travel.
//
// A token goes to a rank once, however many of its experts live there: its row number within that
// destination's list is its place on the wire, and each route says which slot the row is copied to.
#ifndef KERNELS_EP_ROUTE_LISTS_H_
#define KERNELS_EP_ROUTE_LISTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ep/ep_layout.h"
#include "kernels/types.h"

namespace expertd {

// Row `row` of a message goes to slot `slot` of the receiver. Sent as is: little-endian, 8 bytes.
struct WireRoute {
  int32_t row = 0;
  int32_t slot = 0;
  friend bool operator==(const WireRoute&, const WireRoute&) = default;
};

// What one rank sends to another.
struct RouteList {
  std::vector<int64_t> tokens;     // [rows] ascending; the token of each row
  std::vector<WireRoute> routes;   // by token, then k
  std::vector<int64_t> positions;  // [routes] t * top_k + k

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
};

// lists: [world], one per destination. slots: [tokens, top_k] from AssignSlots. Routes without a
// slot are left out. REQUIRES: slots fit 32 bits.
std::vector<RouteList> BuildRouteLists(const RoutingView& routing, const EpLayout& layout,
                                       std::span<const int64_t> slots);

// Rows that a received list refers to. Errors: INTERNAL when rows do not count up from 0 or a slot
// is outside [0, total): the sender is broken, and the list must not be used.
absl::StatusOr<int64_t> CheckedRows(std::span<const WireRoute> routes, int64_t total);

}  // namespace expertd

#endif  // KERNELS_EP_ROUTE_LISTS_H_
