// Device arrays of random bf16 numbers whose values the host knows, and timing by device events.
#ifndef TESTS_BENCH_GEMM_ARRAYS_H_
#define TESTS_BENCH_GEMM_ARRAYS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"

namespace expertd::bench {

// Values of a normal distribution: one block of an odd number of values, repeated.
class RandomArray {
 public:
  static absl::StatusOr<RandomArray> Create(CudaDevice& device, int64_t count, float scale,
                                            uint64_t seed);
  const void* data() const { return memory_.data(); }
  double At(int64_t index) const {
    return static_cast<double>(block_[static_cast<size_t>(index) % block_.size()]);
  }

 private:
  DeviceBuffer memory_;
  std::vector<float> block_;
};

absl::StatusOr<float> ReadBF16(CudaDevice& device, const DeviceBuffer& buffer, int64_t index);
absl::StatusOr<float> ReadF32(CudaDevice& device, const DeviceBuffer& buffer, int64_t index);

// Median microseconds of what each of two functions queues on the device's stream, run by turns so
// that both meet the same clocks.
struct Medians {
  double first = 0;
  double second = 0;
};
absl::StatusOr<Medians> MedianMicros(CudaDevice& device, int iterations,
                                     const std::function<absl::Status()>& first,
                                     const std::function<absl::Status()>& second);

}  // namespace expertd::bench

#endif  // TESTS_BENCH_GEMM_ARRAYS_H_
