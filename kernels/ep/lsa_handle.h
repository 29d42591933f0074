// Routing state of one Prepare of nccl_lsa: counts on the host, tables in one block of memory.
#ifndef KERNELS_EP_LSA_HANDLE_H_
#define KERNELS_EP_LSA_HANDLE_H_

#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "kernels/ep/lsa_kernels.h"
#include "kernels/ep_backend.h"

namespace expertd {

class LsaHandle final : public EpHandle {
 public:
  const RecvCounts& counts() const override { return recv_counts; }
  int64_t tokens() const override { return routes.tokens; }
  int64_t top_k() const override { return routes.top_k; }
  int64_t alignment() const override { return row_alignment; }
  const std::vector<uint8_t>& dropped_routes() const override { return dropped; }

  RecvCounts recv_counts;
  int64_t row_alignment = 1;
  std::vector<uint8_t> dropped;
  DeviceBuffer memory;  // what `routes` points into
  LsaRoutes routes;
};

}  // namespace expertd

#endif  // KERNELS_EP_LSA_HANDLE_H_
