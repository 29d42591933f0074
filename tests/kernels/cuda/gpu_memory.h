// Vectors on a GPU and back, for tests.
#ifndef TESTS_KERNELS_CUDA_GPU_MEMORY_H_
#define TESTS_KERNELS_CUDA_GPU_MEMORY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "kernels/backends.h"
#include "kernels/device.h"

namespace expertd {

inline std::unique_ptr<Device> MakeGpu(std::string_view spec = "cuda:0") {
  auto device = CreateDevice(spec);
  EXPECT_TRUE(device.ok()) << device.status();
  return device.ok() ? *std::move(device) : nullptr;
}

template <typename T>
DeviceBuffer Upload(Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  auto buffer = device.Allocate(bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  const absl::Status copied = device.CopyToDevice(buffer->data(), values.data(), bytes);
  EXPECT_TRUE(copied.ok()) << copied;
  return *std::move(buffer);
}

template <typename T>
std::vector<T> Download(Device& device, const DeviceBuffer& buffer) {
  std::vector<T> values(static_cast<size_t>(buffer.size()) / sizeof(T));
  const absl::Status copied = device.CopyToHost(values.data(), buffer.data(), buffer.size());
  EXPECT_TRUE(copied.ok()) << copied;
  return values;
}

// Fills the device's pool with blocks whose f32, f16 and bf16 values are NaN, a few of each size up
// to 4 MiB: what an operation reads without having written it then shows in its results.
inline void PoisonPool(Device& device) {
  std::vector<DeviceBuffer> blocks;
  for (int64_t base = 256; base < 4 << 20; base *= 2) {
    for (int64_t size = base; size < 2 * base; size += std::max<int64_t>(base / 4, 256)) {
      const std::vector<uint8_t> nan(static_cast<size_t>(size), 0xFF);
      for (int copy = 0; copy < 4; ++copy) blocks.push_back(Upload(device, nan));
    }
  }
}

}  // namespace expertd

#endif  // TESTS_KERNELS_CUDA_GPU_MEMORY_H_
