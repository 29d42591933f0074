// expertd_gemm_bench: TFLOP/s of the grouped products beside a dense cuBLASLt product of the size.
//
// Every cell is checked on the buffers that are timed; a wrong one is not timed. TFLOP/s count data
// rows only, not padding. wgrad adds to f32.
#include <cstdio>
#include <iostream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/backends.h"
#include "tests/bench/gemm/cell.h"

ABSL_FLAG(int, iterations, 30, "timed repetitions");
ABSL_FLAG(int, cells, 99, "only the first so many shapes");

namespace expertd::bench {
namespace {

const Shape kShapes[] = {
    {32, 65536, 4096, 7168}, {64, 65536, 2048, 768},  {32, 65536, 7168, 2048},
    {8, 16384, 4096, 7168},  {8, 16384, 7168, 2048},  {32, 16384, 4096, 7168},
    {32, 32768, 4096, 7168}, {32, 32768, 7168, 2048}, {8, 16384, 28672, 4096},
    {8, 16384, 4096, 14336}, {64, 65536, 1536, 2048},
};

absl::Status Print(CudaDevice& device, Cell& cell, Direction direction, const std::string& title) {
  ASSIGN_OR_RETURN(const bool right, cell.Check(direction));
  if (!right) {
    std::printf("%-32s WRONG\n", title.c_str());
    return absl::OkStatus();
  }
  const int iterations = absl::GetFlag(FLAGS_iterations);
  ASSIGN_OR_RETURN(const Medians micros,
                   MedianMicros(
                       device, iterations, [&] { return cell.Run(direction); },
                       [&] { return cell.RunDense(direction); }));
  std::printf("%-32s %8.0f us  %4.0f TFLOP/s  dense %4.0f TFLOP/s  ratio %.3f\n", title.c_str(),
              micros.first, cell.Flops() / micros.first / 1e6, cell.Flops() / micros.second / 1e6,
              micros.second / micros.first);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status RunAll() {
  ASSIGN_OR_RETURN(std::unique_ptr<Device> made, CreateDevice("cuda:0"));
  auto& device = static_cast<CudaDevice&>(*made);
  int left = absl::GetFlag(FLAGS_cells);
  for (const Shape& shape : kShapes) {
    if (left-- <= 0) break;
    const std::string title =
        StrCat("E", shape.experts, " ", shape.rows, "x", shape.columns, "x", shape.sums, " ");
    ASSIGN_OR_RETURN(auto even, Cell::Create(device, shape, EvenCounts(shape)));
    for (const Direction direction : {Direction::kForward, Direction::kDgrad, Direction::kWgrad}) {
      RETURN_IF_ERROR(
          Print(device, *even, direction, title + kDirectionNames[static_cast<int>(direction)]));
    }
    even.reset();
    ASSIGN_OR_RETURN(auto skewed, Cell::Create(device, shape, SkewedCounts(shape, 5)));
    RETURN_IF_ERROR(Print(device, *skewed, Direction::kForward, title + "skewed"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace expertd::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("times the grouped matrix products of the sm90 experts");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = expertd::bench::RunAll();
  if (status.ok()) return 0;
  std::cerr << "expertd_gemm_bench: " << status.message() << "\n";
  return 1;
}
