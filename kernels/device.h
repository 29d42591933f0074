// Memory of one device and copies to and from it.
//
// Buffers come from a pool that keeps freed blocks, so that steady steps allocate nothing. Called
// from the device thread only, except facts().
#ifndef KERNELS_DEVICE_H_
#define KERNELS_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertd {

// Another GPU that this process sees, as reached from its own.
struct DevicePeer {
  int64_t ordinal = 0;
  std::string name;
  std::string uuid;
  std::string pci_bus_id;
  bool access = false;  // kernels here may read and write its memory
  bool nvlink = false;  // with access: over NVLink, otherwise over PCIe
};

// What this process's environment tells NCCL about the ways it may take.
struct NcclSettings {
  std::string host_id;  // NCCL_HOSTID; "": NCCL makes its own of host name and boot
  bool p2p_disabled = false;
  bool p2p_nvlink_only = false;
  bool shm_disabled = false;
};

// What GetServerInfo reports about a device. "" and 0 where the kind has no such thing.
struct DeviceFacts {
  std::string kind;  // "cpu" or "cuda"
  std::string name;  // model name
  std::string uuid;  // unique on a host
  std::string pci_bus_id;
  std::string compute_capability;  // "9.0"
  int64_t memory_bytes = 0;
  int64_t ordinal = 0;
  int64_t multiprocessors = 0;
  std::string driver_version;  // of the kernel module: "580.159.04"
  std::string cuda_driver;     // newest CUDA that the driver serves: "13.0"
  std::string cuda_runtime;    // CUDA that this program runs with: "13.0"
  std::string nccl_version;    // "2.28.9"
  NcclSettings nccl;
  std::vector<DevicePeer> peers;
};

class Device;

// A block of device memory; returns to its device's pool when destroyed. Move-only.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer() { Reset(); }

  void* data() const { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void Reset();

 private:
  friend class Device;
  DeviceBuffer(Device* device, void* data, int64_t size, int64_t block)
      : device_(device), data_(data), size_(size), block_(block) {}

  Device* device_ = nullptr;
  void* data_ = nullptr;
  int64_t size_ = 0;   // bytes asked for
  int64_t block_ = 0;  // bytes of the block behind it
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceFacts& facts() const = 0;

  // 256-byte aligned, uninitialised memory; also for size 0 the pointer is not null.
  // Errors: MEMORY_BUDGET when the device has none left.
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes);

  // Complete when they return. `bytes` may be 0.
  virtual absl::Status CopyToDevice(void* device, const void* host, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t bytes) = 0;
  virtual absl::Status CopyOnDevice(void* to, const void* from, int64_t bytes) = 0;
  virtual absl::Status Zero(void* device, int64_t bytes) = 0;
  // Returns when all that was asked of the device so far has been done, with the first failure.
  virtual absl::Status Drain() = 0;

  // Marks on the device's own timeline, which stages of a step are measured with. A mark is passed
  // when all work queued before it has run. Making one queues and never waits; marks are reused, so
  // that steady steps allocate nothing.
  virtual void ForgetMarks() = 0;
  // The number of a new mark: 0 is the first after ForgetMarks.
  virtual absl::StatusOr<int64_t> Mark() = 0;
  // From the passing of one mark to that of a later one. Waits for that only when nothing that was
  // queued behind it has been waited for already.
  virtual absl::StatusOr<double> MicrosBetween(int64_t from, int64_t to) = 0;

  // Blocks handed out by the underlying allocator so far: a steady step leaves it unchanged.
  virtual int64_t block_allocations() const = 0;

 protected:
  friend class DeviceBuffer;
  // Rounds up to a pooled size and takes a free block or a new one. Returns {block, block size}.
  virtual absl::StatusOr<std::pair<void*, int64_t>> TakeBlock(int64_t bytes) = 0;
  virtual void ReturnBlock(void* block, int64_t block_bytes) = 0;
};

inline absl::StatusOr<DeviceBuffer> Device::Allocate(int64_t bytes) {
  // Null means "absent" in the seams, so that a rank without rows must not get it.
  absl::StatusOr<std::pair<void*, int64_t>> block = TakeBlock(bytes == 0 ? 1 : bytes);
  if (!block.ok()) return std::move(block).status();
  return DeviceBuffer(this, block->first, bytes, block->second);
}

inline DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  device_ = std::exchange(other.device_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  block_ = std::exchange(other.block_, 0);
  return *this;
}

inline void DeviceBuffer::Reset() {
  if (device_ != nullptr) device_->ReturnBlock(data_, block_);
  device_ = nullptr;
  data_ = nullptr;
  size_ = 0;
  block_ = 0;
}

}  // namespace expertd

#endif  // KERNELS_DEVICE_H_
