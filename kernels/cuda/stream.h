// Streams, events, pinned host memory: creation with errors, and waiting by polling.
#ifndef KERNELS_CUDA_STREAM_H_
#define KERNELS_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/handle.h"

namespace expertd {

// All on the current device. Streams do not wait for the default stream. Only events that time can
// be asked how far apart they are; the others are cheaper.
enum class EventUse { kOrder, kTime };
absl::StatusOr<StreamHandle> CreateStream();
absl::StatusOr<EventHandle> CreateEvent(EventUse use = EventUse::kOrder);
absl::StatusOr<PinnedHandle> AllocatePinned(int64_t bytes);

// Says whether a wait may go on: deadlines, cancellation, health of a communicator.
class WaitGuard {
 public:
  virtual ~WaitGuard() = default;
  // Called again and again, from the waiting thread, at least every millisecond.
  virtual absl::Status Check() = 0;
  // Called when a wait for everything queued has ended: has that work gone well?
  virtual absl::Status Finished() { return absl::OkStatus(); }
};

// Records `event` on `stream`.
absl::Status Record(const EventHandle& event, cudaStream_t stream);
// Makes `stream` wait for `event`; the host goes on.
absl::Status StreamWait(cudaStream_t stream, const EventHandle& event);
// Polls until `event` has happened or the guard objects. `guard` may be null: then without limit.
absl::Status PollEvent(const EventHandle& event, WaitGuard* guard);

}  // namespace expertd

#endif  // KERNELS_CUDA_STREAM_H_
