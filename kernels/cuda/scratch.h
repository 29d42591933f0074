// Device memory that an operation uses and leaves: grows to the largest size asked for, then stays.
#ifndef KERNELS_CUDA_SCRATCH_H_
#define KERNELS_CUDA_SCRATCH_H_

#include <cstdint>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "kernels/device.h"

namespace expertd {

class Scratch {
 public:
  // At least `bytes`, 256-byte aligned. What it held before is lost when it grows.
  absl::Status Reserve(Device& device, int64_t bytes) {
    if (bytes <= buffer_.size() && buffer_.data() != nullptr) return absl::OkStatus();
    buffer_.Reset();
    ASSIGN_OR_RETURN(buffer_, device.Allocate(bytes));
    return absl::OkStatus();
  }
  void* data() const { return buffer_.data(); }
  template <typename T>
  T* as() const {
    return buffer_.as<T>();
  }

 private:
  DeviceBuffer buffer_;
};

}  // namespace expertd

#endif  // KERNELS_CUDA_SCRATCH_H_
