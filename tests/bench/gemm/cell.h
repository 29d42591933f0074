// One cell of the grouped product benchmark: rows of several experts times their [K, N] matrices.
#ifndef TESTS_BENCH_GEMM_CELL_H_
#define TESTS_BENCH_GEMM_CELL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/matmul.h"
#include "kernels/mlp/sm90_gemm.h"
#include "tests/bench/gemm/arrays.h"

namespace expertd::bench {

struct Shape {
  int64_t experts = 0;
  int64_t rows = 0;  // of all experts
  int64_t columns = 0;
  int64_t sums = 0;
};

// Rows per expert: even, or drawn so that the largest has several times the smallest; multiples of
// nothing.
std::vector<int64_t> EvenCounts(const Shape& shape);
std::vector<int64_t> SkewedCounts(const Shape& shape, uint64_t seed);

enum class Direction : uint8_t { kForward = 0, kDgrad, kWgrad };
inline constexpr const char* kDirectionNames[] = {"forward", "dgrad", "wgrad"};

class Cell {
 public:
  static absl::StatusOr<std::unique_ptr<Cell>> Create(CudaDevice& device, const Shape& shape,
                                                      std::vector<int64_t> counts);

  // out = x W; grad_x = g W^T; dW += x^T g. Queued.
  absl::Status Run(Direction direction);
  // The same as one dense product of all rows with one expert's matrix, by cuBLASLt.
  absl::Status RunDense(Direction direction);
  // Sampled elements against f64, on fresh outputs.
  absl::StatusOr<bool> Check(Direction direction);
  double Flops() const;

 private:
  Cell(CudaDevice& device, const Shape& shape, std::vector<int64_t> counts)
      : device_(device), shape_(shape), counts_(std::move(counts)) {}
  absl::Status Allocate();
  absl::Status Fill(Direction direction, sm90::GemmParams& params) const;
  absl::StatusOr<bool> CheckElement(Direction direction, int64_t expert, int64_t row,
                                    int64_t column);

  CudaDevice& device_;
  const Shape shape_;
  const std::vector<int64_t> counts_;
  std::vector<int64_t> padded_;
  std::vector<int64_t> begins_;
  int64_t total_ = 0;
  int sms_ = 0;
  RandomArray x_, g_, w_;
  DeviceBuffer out_, grad_x_, grad_w_;
  std::unique_ptr<CublasMatmul> dense_;
};

}  // namespace expertd::bench

#endif  // TESTS_BENCH_GEMM_CELL_H_
