// One rank's NCCL communicator: formed without blocking, polled, aborted within a bound.
//
// Owned and called by the device thread. NCCL calls on get() go between ncclGroupStart and
// ncclGroupEnd; after every group the caller passes the result to Settle, which waits until NCCL has
// taken the work (connections are made on first use).
#ifndef KERNELS_CUDA_NCCL_COMMUNICATOR_H_
#define KERNELS_CUDA_NCCL_COMMUNICATOR_H_

#include <nccl.h>

#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/stream.h"
#include "kernels/ep_backend.h"

namespace expertd {

class NcclCommunicator {
 public:
  // Collective over config.world >= 2 ranks: rank 0 makes the id and all get it through
  // bootstrap.exchange, stage "nccl/id". Errors: STEP_TIMEOUT, PEER_LOST, CANCELLED, INTERNAL.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(const EpGroupConfig& config,
                                                                  const EpBootstrap& bootstrap,
                                                                  CudaDevice& device);
  // Aborts: needs no peer.
  ~NcclCommunicator() { Abort(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  ncclComm_t get() const { return comm_; }
  // OK while nothing has gone wrong, also while work is in progress.
  absl::Status Health() const;
  // Waits until NCCL has launched what the group queued. `result` is what ncclGroupEnd returned.
  absl::Status Settle(ncclResult_t result, std::string_view what, WaitGuard& guard) const;
  // Ends running kernels of this communicator and frees it. Takes at most kAbortSeconds; a
  // communicator that does not come back by then is left behind, with an ERROR line in the log.
  void Abort();

 private:
  NcclCommunicator() = default;

  ncclComm_t comm_ = nullptr;
};

}  // namespace expertd

#endif  // KERNELS_CUDA_NCCL_COMMUNICATOR_H_
