// One rank's symmetric window: memory of this device that all ranks of a group can read and write.
//
// Owned by the device thread. Formed within a deadline; freed without any peer: what peers have
// mapped stays theirs until they unmap it. A group of one rank has plain memory and no
// communicator.
#ifndef KERNELS_EP_LSA_WINDOW_H_
#define KERNELS_EP_LSA_WINDOW_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/nccl_communicator.h"
#include "kernels/device.h"
#include "kernels/ep_backend.h"

namespace expertd {

class LsaWindow {
 public:
  // Collective. `bytes`, the same on all ranks, are zero when any rank returns. Errors:
  // BACKEND_UNSUPPORTED when the ranks cannot all reach each other's memory; MEMORY_BUDGET; those
  // of NcclCommunicator::Create.
  static absl::StatusOr<std::unique_ptr<LsaWindow>> Create(const EpGroupConfig& config,
                                                           const EpBootstrap& bootstrap,
                                                           CudaDevice& device, int64_t bytes);
  ~LsaWindow();
  LsaWindow(const LsaWindow&) = delete;
  LsaWindow& operator=(const LsaWindow&) = delete;

  // Each rank's window as this device addresses it, in rank order.
  const std::vector<std::byte*>& bases() const { return bases_; }

 private:
  LsaWindow() = default;
  absl::Status Open(const EpGroupConfig& config, const EpBootstrap& bootstrap, CudaDevice& device,
                    int64_t bytes);
  absl::Status Allocate(const EpGroupConfig& config, int64_t bytes);
  absl::Status Register(const EpGroupConfig& config, SteadyTime deadline, CudaDevice& device,
                        int64_t bytes);
  absl::Status FindPeers(const EpGroupConfig& config, CudaDevice& device);

  std::unique_ptr<NcclCommunicator> comm_;
  DeviceBuffer alone_;      // of a single rank
  void* memory_ = nullptr;  // from ncclMemAlloc
  ncclWindow_t window_ = nullptr;
  std::vector<std::byte*> bases_;
};

}  // namespace expertd

#endif  // KERNELS_EP_LSA_WINDOW_H_
