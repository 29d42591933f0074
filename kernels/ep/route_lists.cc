// One pass over the routes of a rank; see route_lists.h.
#include "kernels/ep/route_lists.h"

#include "base/error.h"

namespace expertd {

std::vector<RouteList> BuildRouteLists(const RoutingView& routing, const EpLayout& layout,
                                       std::span<const int64_t> slots) {
  std::vector<RouteList> lists(static_cast<size_t>(layout.world()));
  for (int64_t rank = 0; rank < layout.world(); ++rank) {
    lists[static_cast<size_t>(rank)].tokens.reserve(
        static_cast<size_t>(routing.tokens / layout.world() + 1));
  }
  for (int64_t t = 0; t < routing.tokens; ++t) {
    for (int64_t k = 0; k < routing.top_k; ++k) {
      const int64_t position = t * routing.top_k + k;
      const int64_t slot = slots[static_cast<size_t>(position)];
      if (slot < 0) continue;
      RouteList& list = lists[static_cast<size_t>(layout.OwnerOf(RouteId(routing, position)))];
      if (list.tokens.empty() || list.tokens.back() != t) list.tokens.push_back(t);
      list.routes.push_back({static_cast<int32_t>(list.rows() - 1), static_cast<int32_t>(slot)});
      list.positions.push_back(position);
    }
  }
  return lists;
}

absl::StatusOr<int64_t> CheckedRows(std::span<const WireRoute> routes, int64_t total) {
  int64_t rows = 0;
  for (const WireRoute& route : routes) {
    const bool next = route.row == rows;
    if (route.row < 0 || (!next && route.row != rows - 1) || route.slot < 0 ||
        route.slot >= total) {
      return Error(Reason::kInternal)
          .Text("received route list: row ", route.row, " to slot ", route.slot, " after ", rows,
                " rows of ", total, " slots");
    }
    if (next) ++rows;
  }
  return rows;
}

}  // namespace expertd
