// Thin wrappers with statuses; see stream.h.
#include "kernels/cuda/stream.h"

#include <chrono>
#include <thread>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace expertd {
namespace {

// Steps take up to tens of milliseconds, and short ones matter most: spin first, then nap.
constexpr int kSpins = 2000;
constexpr std::chrono::microseconds kNap{50};

}  // namespace

absl::StatusOr<StreamHandle> CreateStream() {
  StreamHandle stream;
  RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(stream.receive(), cudaStreamNonBlocking),
                             "creating a stream"));
  return stream;
}

absl::StatusOr<EventHandle> CreateEvent(EventUse use) {
  EventHandle event;
  const unsigned flags = use == EventUse::kTime ? cudaEventDefault : cudaEventDisableTiming;
  RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(event.receive(), flags), "creating an event"));
  return event;
}

absl::StatusOr<PinnedHandle> AllocatePinned(int64_t bytes) {
  PinnedHandle memory;
  RETURN_IF_ERROR(CudaStatus(cudaMallocHost(memory.receive(), static_cast<size_t>(bytes)),
                             "allocating pinned host memory"));
  return memory;
}

absl::Status Record(const EventHandle& event, cudaStream_t stream) {
  return CudaStatus(cudaEventRecord(event.get(), stream), "recording an event");
}

absl::Status StreamWait(cudaStream_t stream, const EventHandle& event) {
  return CudaStatus(cudaStreamWaitEvent(stream, event.get(), 0), "waiting for an event");
}

absl::Status PollEvent(const EventHandle& event, WaitGuard* guard) {
  for (int64_t turn = 0;; ++turn) {
    const cudaError_t state = cudaEventQuery(event.get());
    if (state == cudaSuccess) return absl::OkStatus();
    if (state != cudaErrorNotReady) return CudaStatus(state, "waiting for the device");
    const bool nap = turn >= kSpins;
    if (guard != nullptr && (nap || turn % 64 == 63)) RETURN_IF_ERROR(guard->Check());
    if (nap) {
      std::this_thread::sleep_for(kNap);
    }
  }
}

}  // namespace expertd
