// One rank's NCCL communicator for sends and receives: formed, watched and aborted within bounds.
//
// Owned and called by the device thread. It is formed without blocking, against a deadline, and
// then split into one that blocks: a non-blocking communicator starts a thread for every group of
// calls, which cost 60 to 110 us of host time where a blocking one took 8 (NCCL 2.28.9, two H200).
// Blocking calls only queue kernels, because the connections to all peers are made while forming;
// so nothing but ncclSend and ncclRecv may be called on get(): collectives would connect on first
// use and wait for peers without a bound.
#ifndef KERNELS_CUDA_NCCL_COMMUNICATOR_H_
#define KERNELS_CUDA_NCCL_COMMUNICATOR_H_

#include <nccl.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
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
  // Ends running kernels of this communicator and frees it. Bounded: a communicator that does not
  // come back in time is left behind, with an ERROR line in the log.
  void Abort();

 private:
  NcclCommunicator() = default;
  absl::Status Form(const EpGroupConfig& config, const EpBootstrap& bootstrap);
  absl::Status Split(const EpGroupConfig& config, SteadyTime deadline);
  absl::Status Connect(const EpGroupConfig& config, SteadyTime deadline, CudaDevice& device);

  ncclComm_t parent_ = nullptr;  // not blocking; only to make comm_ from
  ncclComm_t comm_ = nullptr;
};

}  // namespace expertd

#endif  // KERNELS_CUDA_NCCL_COMMUNICATOR_H_
