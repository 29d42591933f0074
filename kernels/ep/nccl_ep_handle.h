// Routing state of one Prepare on a GPU: counts on the host, tables in one block of device memory.
#ifndef KERNELS_EP_NCCL_EP_HANDLE_H_
#define KERNELS_EP_NCCL_EP_HANDLE_H_

#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "kernels/ep/route_kernels.h"
#include "kernels/ep/row_kernels.h"
#include "kernels/ep_backend.h"

namespace expertd {

// Rows between this rank and each other one, and where they begin in wire buffers and tables.
struct WireRows {
  std::vector<int64_t> rows;   // [world]; the own ones do not travel
  std::vector<int64_t> begin;  // [world] in the wire buffer, which lacks the own ones
  int64_t total = 0;           // without the own ones
};

class NcclEpHandle final : public EpHandle {
 public:
  const RecvCounts& counts() const override { return recv_counts; }
  int64_t tokens() const override { return token_count; }
  int64_t top_k() const override { return routes_per_token; }
  int64_t alignment() const override { return row_alignment; }
  const std::vector<uint8_t>& dropped_routes() const override { return dropped; }

  SourceRows sources() const {
    return {.rows = in.total + own_rows,
            .own_begin = own_begin,
            .own_rows = own_rows,
            .top_k = routes_per_token,
            .slots = tables.recv_slots,
            .own_tokens = tables.own_tokens};
  }

  RecvCounts recv_counts;
  int64_t token_count = 0;
  int64_t routes_per_token = 0;
  int64_t row_alignment = 1;
  std::vector<uint8_t> dropped;
  WireRows out;           // rows that this rank sends
  WireRows in;            // rows that it receives
  int64_t own_rows = 0;   // tokens with a route to this rank itself
  int64_t own_begin = 0;  // their place in recv_slots
  int64_t pad_rows = 0;
  DeviceBuffer memory;  // what follows points into it
  RouteTables tables;
  int32_t* own_slots = nullptr;   // this rank's part of recv_slots
  int32_t* wire_begin = nullptr;  // [world] out.begin, -1 where nothing travels
};

}  // namespace expertd

#endif  // KERNELS_EP_NCCL_EP_HANDLE_H_
