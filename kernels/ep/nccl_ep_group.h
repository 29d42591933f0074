// NcclEp::Group, for the files of NcclEp that queue NCCL calls.
#ifndef KERNELS_EP_NCCL_EP_GROUP_H_
#define KERNELS_EP_NCCL_EP_GROUP_H_

#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/nccl_ep.h"

namespace expertd {

template <typename Queue>
absl::Status NcclEp::Group(std::string_view what, const Queue& queue) {
  wire_ = WireState::kLaunching;
  ncclResult_t result = ncclGroupStart();
  const ncclResult_t queued = queue();
  const ncclResult_t ended = ncclGroupEnd();
  // The first failure explains the others.
  if (result == ncclSuccess && queued != ncclInProgress) result = queued;
  if (result == ncclSuccess) result = ended;
  absl::Status settled = comm_->Settle(result, what, *this);
  if (!settled.ok()) return Break(std::move(settled));
  RETURN_IF_ERROR(Record(wire_done_, device_.stream()));
  wire_ = WireState::kRunning;
  return absl::OkStatus();
}

}  // namespace expertd

#endif  // KERNELS_EP_NCCL_EP_GROUP_H_
