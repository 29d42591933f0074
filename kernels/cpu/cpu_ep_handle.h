// Routing state of one Prepare on the CPU.
#ifndef KERNELS_CPU_CPU_EP_HANDLE_H_
#define KERNELS_CPU_CPU_EP_HANDLE_H_

#include <cstdint>
#include <vector>

#include "kernels/ep/route_lists.h"
#include "kernels/ep_backend.h"

namespace expertd {

class CpuEpHandle final : public EpHandle {
 public:
  const RecvCounts& counts() const override { return recv_counts; }
  int64_t tokens() const override { return token_count; }
  int64_t top_k() const override { return routes_per_token; }
  int64_t alignment() const override { return row_alignment; }
  const std::vector<uint8_t>& dropped_routes() const override { return dropped; }

  RecvCounts recv_counts;
  int64_t token_count = 0;
  int64_t routes_per_token = 0;
  int64_t row_alignment = 1;
  std::vector<uint8_t> dropped;
  std::vector<RouteList> to;  // [world] what this rank sends to each, itself included
  // [world] what each other rank sends here: rows, and their routes; own entry empty, see `to`.
  std::vector<std::vector<WireRoute>> from;
  std::vector<int64_t> from_rows;

  // Routes and rows that `source` brings to rank `self`, which is this one.
  const std::vector<WireRoute>& RoutesFrom(int64_t source, int64_t self) const {
    return source == self ? to[static_cast<size_t>(self)].routes
                          : from[static_cast<size_t>(source)];
  }
};

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_EP_HANDLE_H_
