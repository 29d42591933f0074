// Vectors on a GPU and back, for tests.
#ifndef TESTS_KERNELS_CUDA_GPU_MEMORY_H_
#define TESTS_KERNELS_CUDA_GPU_MEMORY_H_

#include <gtest/gtest.h>

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

}  // namespace expertd

#endif  // TESTS_KERNELS_CUDA_GPU_MEMORY_H_
