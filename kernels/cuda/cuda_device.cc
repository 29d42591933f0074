// The GPU memory pool, staged copies, and the facts that the driver reports.
#include "kernels/cuda/cuda_device.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/device_facts.h"
#include "kernels/cuda/status.h"

namespace expertd {
namespace {

constexpr int64_t kAlignment = 256;
// Large enough for full PCIe speed, small enough that copying in and copying over overlap.
constexpr int64_t kStagingBytes = 4 << 20;

// What the kernels are compiled for; such code runs on no other.
constexpr std::string_view kCapability = "9.0";

// At least 256; quarter steps of the power of two below, as on the CPU.
int64_t BlockSize(int64_t bytes) {
  if (bytes <= kAlignment) return kAlignment;
  const auto below = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes - 1)));
  const int64_t step = std::max(below / 4, kAlignment);
  return (bytes + step - 1) / step * step;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(int64_t ordinal) {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess && found != cudaErrorNoDevice) {
    cudaGetLastError();
    return Error(Reason::kBackendUnsupported)
        .Text("device cuda:", ordinal, ": no usable NVIDIA driver: ", cudaGetErrorString(found))
        .With("device", StrCat("cuda:", ordinal));
  }
  if (ordinal < 0 || ordinal >= count) {
    return Error(Reason::kBackendUnsupported)
        .Text("device cuda:", ordinal, ": this process sees ", count, " GPUs")
        .With("device", StrCat("cuda:", ordinal));
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice);
  RETURN_IF_ERROR(device->Open(ordinal));
  return device;
}

absl::Status CudaDevice::Open(int64_t ordinal) {
  facts_.ordinal = ordinal;
  RETURN_IF_ERROR(MakeCurrent());
  ASSIGN_OR_RETURN(facts_, ReadDeviceFacts(static_cast<int>(ordinal)));
  if (facts_.compute_capability != kCapability) {
    return Error(Reason::kBackendUnsupported)
        .Text("device cuda:", ordinal, ": ", facts_.name, " has compute capability ",
              facts_.compute_capability, ", this build's kernels need ", kCapability)
        .With("device", StrCat("cuda:", ordinal));
  }
  ASSIGN_OR_RETURN(stream_, CreateStream());
  ASSIGN_OR_RETURN(drained_, CreateEvent());
  for (Staging& staging : staging_) {
    ASSIGN_OR_RETURN(staging.memory, AllocatePinned(kStagingBytes));
    ASSIGN_OR_RETURN(staging.free, CreateEvent());
  }
  return absl::OkStatus();
}

CudaDevice::~CudaDevice() {
  static_cast<void>(MakeCurrent());
  FreePool();
}

absl::Status CudaDevice::MakeCurrent() const {
  return CudaStatus(cudaSetDevice(static_cast<int>(facts_.ordinal)), "selecting the device");
}

absl::Status CudaDevice::Guards::Check() {
  for (WaitGuard* guard : all) RETURN_IF_ERROR(guard->Check());
  return absl::OkStatus();
}

absl::Status CudaDevice::Guards::Finished() {
  for (WaitGuard* guard : all) RETURN_IF_ERROR(guard->Finished());
  return absl::OkStatus();
}

absl::Status CudaDevice::Drain() {
  RETURN_IF_ERROR(Record(drained_, stream()));
  RETURN_IF_ERROR(PollEvent(drained_, &guards_));
  return guards_.Finished();
}

void CudaDevice::FreePool() {
  for (auto& [size, blocks] : pool_) {
    for (void* block : blocks) cudaFree(block);
    blocks.clear();
  }
}

absl::StatusOr<std::pair<void*, int64_t>> CudaDevice::TakeBlock(int64_t bytes) {
  const auto refuse = [&]() -> absl::Status {
    return Error(Reason::kMemoryBudget)
        .Text("device memory of ", facts_.name, ": ", bytes, " bytes asked, none left of ",
              facts_.memory_bytes)
        .With("bytes", bytes)
        .With("limit", facts_.memory_bytes);
  };
  if (bytes < 0 || bytes > facts_.memory_bytes) return refuse();
  const int64_t size = BlockSize(bytes);
  std::vector<void*>& free_blocks = pool_[size];
  if (!free_blocks.empty()) {
    void* block = free_blocks.back();
    free_blocks.pop_back();
    return std::pair<void*, int64_t>(block, size);
  }
  RETURN_IF_ERROR(MakeCurrent());
  void* block = nullptr;
  cudaError_t result = cudaMalloc(&block, static_cast<size_t>(size));
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    // Freeing waits for the device, and a block may still be in use there: wait with the guard.
    RETURN_IF_ERROR(Drain());
    FreePool();
    result = cudaMalloc(&block, static_cast<size_t>(size));
  }
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return refuse();
  }
  RETURN_IF_ERROR(CudaStatus(result, "allocating device memory"));
  ++block_allocations_;
  return std::pair<void*, int64_t>(block, size);
}

void CudaDevice::ReturnBlock(void* block, int64_t block_bytes) {
  pool_[block_bytes].push_back(block);
}

absl::Status CudaDevice::CopyToDevice(void* device, const void* host, int64_t bytes) {
  RETURN_IF_ERROR(MakeCurrent());
  for (int64_t done = 0, turn = 0; done < bytes; done += kStagingBytes, ++turn) {
    Staging& staging = staging_[turn % 2];
    const auto size = static_cast<size_t>(std::min(kStagingBytes, bytes - done));
    RETURN_IF_ERROR(PollEvent(staging.free, &guards_));
    std::memcpy(staging.memory.get(), static_cast<const std::byte*>(host) + done, size);
    RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(static_cast<std::byte*>(device) + done, staging.memory.get(),
                                   size, cudaMemcpyHostToDevice, stream()),
                   "copying to the device"));
    RETURN_IF_ERROR(Record(staging.free, stream()));
  }
  return absl::OkStatus();
}

// Two pieces in flight: one is copied out of staging while the next comes over.
absl::Status CudaDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  RETURN_IF_ERROR(MakeCurrent());
  const int64_t pieces = (bytes + kStagingBytes - 1) / kStagingBytes;
  const auto size_of = [&](int64_t piece) {
    return static_cast<size_t>(std::min(kStagingBytes, bytes - piece * kStagingBytes));
  };
  for (int64_t piece = 0; piece <= pieces; ++piece) {
    if (piece < pieces) {
      Staging& staging = staging_[piece % 2];
      RETURN_IF_ERROR(
          CudaStatus(cudaMemcpyAsync(staging.memory.get(),
                                     static_cast<const std::byte*>(device) + piece * kStagingBytes,
                                     size_of(piece), cudaMemcpyDeviceToHost, stream()),
                     "copying to the host"));
      RETURN_IF_ERROR(Record(staging.free, stream()));
    }
    if (piece == 0) continue;
    Staging& ready = staging_[(piece - 1) % 2];
    RETURN_IF_ERROR(PollEvent(ready.free, &guards_));
    std::memcpy(static_cast<std::byte*>(host) + (piece - 1) * kStagingBytes, ready.memory.get(),
                size_of(piece - 1));
  }
  return guards_.Finished();
}

absl::Status CudaDevice::CopyOnDevice(void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  RETURN_IF_ERROR(MakeCurrent());
  RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()),
      "copying on the device"));
  return Drain();
}

absl::Status CudaDevice::Zero(void* device, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  RETURN_IF_ERROR(MakeCurrent());
  RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), stream()),
                             "zeroing device memory"));
  return Drain();
}

absl::StatusOr<int64_t> CudaDevice::Mark() {
  RETURN_IF_ERROR(MakeCurrent());
  if (marks_used_ == marks_.size()) {
    ASSIGN_OR_RETURN(EventHandle event, CreateEvent(EventUse::kTime));
    marks_.push_back(std::move(event));
  }
  RETURN_IF_ERROR(Record(marks_[marks_used_], stream()));
  return static_cast<int64_t>(marks_used_++);
}

absl::StatusOr<double> CudaDevice::MicrosBetween(int64_t from, int64_t to) {
  const EventHandle& end = marks_[static_cast<size_t>(to)];
  RETURN_IF_ERROR(PollEvent(end, &guards_));
  float millis = 0;
  RETURN_IF_ERROR(
      CudaStatus(cudaEventElapsedTime(&millis, marks_[static_cast<size_t>(from)].get(), end.get()),
                 "reading a duration"));
  return static_cast<double>(millis) * 1000;
}

}  // namespace expertd
