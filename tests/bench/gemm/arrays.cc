// Filling, reading and timing; see arrays.h.
#include "tests/bench/gemm/arrays.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <random>

#include "base/status_macros.h"
#include "kernels/cpu/float_convert.h"
#include "kernels/cuda/status.h"

namespace expertd::bench {
namespace {

constexpr int64_t kBlock = (1 << 20) + 7;

struct Timer {
  Timer() {
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
  }
  ~Timer() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
};

}  // namespace

absl::StatusOr<RandomArray> RandomArray::Create(CudaDevice& device, int64_t count, float scale,
                                                uint64_t seed) {
  RandomArray array;
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<std::byte> raw(kBlock * 2);
  array.block_.resize(kBlock);
  for (float& value : array.block_) value = normal(rng);
  RowFromF32(DType::kBF16, array.block_.data(), kBlock, raw.data());
  RowToF32(DType::kBF16, raw.data(), kBlock, array.block_.data());
  ASSIGN_OR_RETURN(array.memory_, device.Allocate(count * 2));
  int64_t done = std::min(count, kBlock);
  RETURN_IF_ERROR(device.CopyToDevice(array.memory_.data(), raw.data(), done * 2));
  while (done < count) {
    const int64_t whole = done / kBlock * kBlock;
    const int64_t next = std::min(whole, count - done);
    RETURN_IF_ERROR(device.CopyOnDevice(array.memory_.as<std::byte>() + done * 2,
                                        array.memory_.data(), next * 2));
    done += next;
  }
  return array;
}

absl::StatusOr<float> ReadBF16(CudaDevice& device, const DeviceBuffer& buffer, int64_t index) {
  std::byte raw[2];
  RETURN_IF_ERROR(device.CopyToHost(raw, buffer.as<std::byte>() + index * 2, 2));
  float value = 0;
  RowToF32(DType::kBF16, raw, 1, &value);
  return value;
}

absl::StatusOr<float> ReadF32(CudaDevice& device, const DeviceBuffer& buffer, int64_t index) {
  float value = 0;
  RETURN_IF_ERROR(device.CopyToHost(&value, buffer.as<std::byte>() + index * 4, 4));
  return value;
}

absl::StatusOr<Medians> MedianMicros(CudaDevice& device, int iterations,
                                     const std::function<absl::Status()>& first,
                                     const std::function<absl::Status()>& second) {
  const Timer timer;
  constexpr int kWarmUp = 5;
  std::vector<double> times[2];
  for (int i = -kWarmUp; i < iterations; ++i) {
    for (int which = 0; which < 2; ++which) {
      RETURN_IF_ERROR(CudaStatus(cudaEventRecord(timer.begin, device.stream()), "timing"));
      RETURN_IF_ERROR(which == 0 ? first() : second());
      RETURN_IF_ERROR(CudaStatus(cudaEventRecord(timer.end, device.stream()), "timing"));
      RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(timer.end), "timing"));
      float ms = 0;
      RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&ms, timer.begin, timer.end), "timing"));
      if (i >= 0) times[which].push_back(static_cast<double>(ms) * 1e3);
    }
  }
  for (std::vector<double>& one : times) std::sort(one.begin(), one.end());
  return Medians{times[0][times[0].size() / 2], times[1][times[1].size() / 2]};
}

}  // namespace expertd::bench
