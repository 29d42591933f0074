// Device on one NVIDIA GPU: pooled memory, one main stream, copies through pinned staging.
//
// Everything the product does on the device is ordered on stream(): kernels return once they are
// queued there, and the copies and Zero below wait for all that came before. CopyToDevice has taken
// its bytes when it returns, and queued them. Blocks go back to the pool at once, for their next
// user is queued behind the last one.
#ifndef KERNELS_CUDA_CUDA_DEVICE_H_
#define KERNELS_CUDA_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/handle.h"
#include "kernels/cuda/stream.h"
#include "kernels/device.h"

namespace expertd {

class CudaDevice final : public Device {
 public:
  // Errors: BACKEND_UNSUPPORTED when there is no driver or no such GPU.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(int64_t ordinal);
  // REQUIRES: every buffer of this device is gone.
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const DeviceFacts& facts() const override { return facts_; }
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override;
  absl::Status CopyOnDevice(void* to, const void* from, int64_t bytes) override;
  absl::Status Zero(void* device, int64_t bytes) override;
  void ForgetMarks() override { marks_used_ = 0; }
  absl::StatusOr<int64_t> Mark() override;
  absl::StatusOr<double> MicrosBetween(int64_t from, int64_t to) override;
  // Ends early when a guard objects.
  absl::Status Drain() override;
  int64_t block_allocations() const override { return block_allocations_; }

  cudaStream_t stream() const { return stream_.get(); }
  // Makes this the calling thread's device: every entry point that talks to CUDA starts with it.
  absl::Status MakeCurrent() const;
  // Guards are asked during every wait, so that no copy waits for a collective that cannot end.
  // They must be removed before they die.
  void AddGuard(WaitGuard* guard) { guards_.all.push_back(guard); }
  void RemoveGuard(WaitGuard* guard) { std::erase(guards_.all, guard); }

 protected:
  absl::StatusOr<std::pair<void*, int64_t>> TakeBlock(int64_t bytes) override;
  void ReturnBlock(void* block, int64_t block_bytes) override;

 private:
  // A piece of pinned memory and the event after which it may be used again.
  struct Staging {
    PinnedHandle memory;
    EventHandle free;
  };

  // All guards as one.
  struct Guards final : public WaitGuard {
    absl::Status Check() override;
    absl::Status Finished() override;
    std::vector<WaitGuard*> all;
  };

  CudaDevice() = default;
  absl::Status Open(int64_t ordinal);
  void FreePool();

  // Destruction order: staging and stream first, then (in the destructor) the pool.
  DeviceFacts facts_;
  int64_t block_allocations_ = 0;
  std::map<int64_t, std::vector<void*>> pool_;  // free blocks by block size
  Guards guards_;
  StreamHandle stream_;
  EventHandle drained_;
  Staging staging_[2];
  std::vector<EventHandle> marks_;  // the first marks_used_ are in use
  size_t marks_used_ = 0;
};

}  // namespace expertd

#endif  // KERNELS_CUDA_CUDA_DEVICE_H_
