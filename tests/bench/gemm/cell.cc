// Buffers, products and checks of one cell; see cell.h.
#include "tests/bench/gemm/cell.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/sm90_maps.h"

namespace expertd::bench {
namespace {

constexpr int64_t kAlignment = 128;

}  // namespace

std::vector<int64_t> EvenCounts(const Shape& shape) {
  return std::vector<int64_t>(static_cast<size_t>(shape.experts), shape.rows / shape.experts);
}

std::vector<int64_t> SkewedCounts(const Shape& shape, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<double> weights(static_cast<size_t>(shape.experts));
  double sum = 0;
  for (double& weight : weights) sum += (weight = std::exp(0.6 * normal(rng)));
  std::vector<int64_t> counts;
  int64_t left = shape.rows;
  for (const double weight : weights) {
    const double share = static_cast<double>(shape.rows) * weight / sum;
    counts.push_back(std::min(left, static_cast<int64_t>(share)));
    left -= counts.back();
  }
  counts.back() += left;
  return counts;
}

absl::StatusOr<std::unique_ptr<Cell>> Cell::Create(CudaDevice& device, const Shape& shape,
                                                   std::vector<int64_t> counts) {
  std::unique_ptr<Cell> cell(new Cell(device, shape, std::move(counts)));
  RETURN_IF_ERROR(cell->Allocate());
  return cell;
}

absl::Status Cell::Allocate() {
  for (const int64_t count : counts_) {
    begins_.push_back(total_);
    padded_.push_back((count + kAlignment - 1) / kAlignment * kAlignment);
    total_ += padded_.back();
  }
  RETURN_IF_ERROR(CudaStatus(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount,
                                                    static_cast<int>(device_.facts().ordinal)),
                             "reading the number of multiprocessors"));
  const auto root = [](int64_t n) { return 1.0f / std::sqrt(static_cast<float>(n)); };
  const int64_t weights = shape_.experts * shape_.sums * shape_.columns;
  ASSIGN_OR_RETURN(x_, RandomArray::Create(device_, total_ * shape_.sums, 1.0f, 1));
  ASSIGN_OR_RETURN(g_, RandomArray::Create(device_, total_ * shape_.columns, 1.0f, 2));
  ASSIGN_OR_RETURN(w_, RandomArray::Create(device_, weights, root(shape_.sums), 3));
  ASSIGN_OR_RETURN(out_, device_.Allocate(total_ * shape_.columns * 2));
  ASSIGN_OR_RETURN(grad_x_, device_.Allocate(total_ * shape_.sums * 2));
  ASSIGN_OR_RETURN(grad_w_, device_.Allocate(weights * 4));
  ASSIGN_OR_RETURN(dense_, CublasMatmul::Create(device_, 1));
  return absl::OkStatus();
}

absl::Status Cell::Fill(Direction direction, sm90::GemmParams& params) const {
  const MlpConfig config = {
      .local_experts = shape_.experts, .hidden = shape_.columns, .intermediate = shape_.sums};
  const sm90::Maps maps(config, total_);
  if (direction == Direction::kForward) {
    ASSIGN_OR_RETURN(params.left, maps.Operand(x_.data(), shape_.sums));
    ASSIGN_OR_RETURN(params.right, maps.Down(w_.data()));
    ASSIGN_OR_RETURN(params.out, maps.Rows(out_.data(), shape_.columns));
    params.sums = static_cast<int>(shape_.sums);
    params.columns = static_cast<int>(shape_.columns);
    params.rows = out_.data();
  } else if (direction == Direction::kDgrad) {
    ASSIGN_OR_RETURN(params.left, maps.Operand(g_.data(), shape_.columns));
    ASSIGN_OR_RETURN(params.right, maps.Down(w_.data()));
    ASSIGN_OR_RETURN(params.out, maps.Rows(grad_x_.data(), shape_.sums));
    params.sums = static_cast<int>(shape_.columns);
    params.columns = static_cast<int>(shape_.sums);
    params.rows = grad_x_.data();
  } else {
    ASSIGN_OR_RETURN(params.left, maps.Operand(x_.data(), shape_.sums));
    ASSIGN_OR_RETURN(params.right, maps.Operand(g_.data(), shape_.columns));
    ASSIGN_OR_RETURN(params.out, maps.Gradient(grad_w_.as<float>(), shape_.sums, shape_.columns));
    params.sums = static_cast<int>(shape_.sums);
    params.columns = static_cast<int>(shape_.columns);
  }
  params.extra = params.out;
  params.grid.columns = static_cast<int>(sm90::TilesOf(params.columns));
  return absl::OkStatus();
}

absl::Status Cell::Run(Direction direction) {
  static constexpr sm90::Product kProducts[] = {sm90::Product::kOuter, sm90::Product::kGradTokens,
                                                sm90::Product::kGradWeights};
  sm90::GemmParams params;
  RETURN_IF_ERROR(Fill(direction, params));
  const sm90::Product product = kProducts[static_cast<int>(direction)];
  const ExpertSegments segments = {&counts_, &padded_, total_};
  const sm90::Plan plan = sm90::PlanFor(product, segments);
  params.grid.tile_rows = sm90::RowsOf(plan.kind);
  if (direction == Direction::kWgrad) {
    params.grid.fixed_rows = sm90::CeilDiv(params.sums, params.grid.tile_rows);
  }
  params.grid.cluster = plan.cluster;
  for (const sm90::ExpertTable& table : sm90::MakeTables(segments)) {
    params.table = table;
    RETURN_IF_ERROR(CudaStatus(sm90::LaunchGemm({.product = product,
                                                 .kind = plan.kind,
                                                 .token = DType::kBF16,
                                                 .sms = sms_,
                                                 .stream = device_.stream()},
                                                params),
                               "grouped product"));
  }
  return absl::OkStatus();
}

absl::Status Cell::RunDense(Direction direction) {
  MatmulArgs args = {.operand_dtype = DType::kBF16, .out_dtype = DType::kBF16};
  if (direction == Direction::kForward) {
    args.m = shape_.rows, args.n = shape_.columns, args.k = shape_.sums;
    args.left = x_.data(), args.right = w_.data(), args.out = out_.data();
  } else if (direction == Direction::kDgrad) {
    args.m = shape_.rows, args.n = shape_.sums, args.k = shape_.columns;
    args.left = g_.data(), args.right = w_.data(), args.out = grad_x_.data();
    args.right_transposed = Transposed::kYes;
  } else {
    args.m = shape_.sums, args.n = shape_.columns, args.k = shape_.rows;
    args.left = x_.data(), args.right = g_.data(), args.out = grad_w_.data();
    args.left_transposed = Transposed::kYes;
    args.out_dtype = DType::kF32;
    args.accumulate = true;
  }
  return dense_->Run(args, 0, device_.stream());
}

absl::StatusOr<bool> Cell::CheckElement(Direction direction, int64_t expert, int64_t row,
                                        int64_t column) {
  const int64_t n = shape_.columns;
  const int64_t k = shape_.sums;
  const int64_t weights = expert * k * n;
  const int64_t at = begins_[static_cast<size_t>(expert)];
  double sum = 0;
  double magnitude = 0;
  const auto add = [&](double a, double b) {
    sum += a * b;
    magnitude += std::abs(a * b);
  };
  float got = 0;
  double unit = std::ldexp(1.0, -8);
  if (direction == Direction::kForward) {
    for (int64_t i = 0; i < k; ++i) add(x_.At((at + row) * k + i), w_.At(weights + i * n + column));
    ASSIGN_OR_RETURN(got, ReadBF16(device_, out_, (at + row) * n + column));
  } else if (direction == Direction::kDgrad) {
    for (int64_t i = 0; i < n; ++i) add(g_.At((at + row) * n + i), w_.At(weights + column * n + i));
    ASSIGN_OR_RETURN(got, ReadBF16(device_, grad_x_, (at + row) * k + column));
  } else {
    for (int64_t i = 0; i < counts_[static_cast<size_t>(expert)]; ++i) {
      add(x_.At((at + i) * k + row), g_.At((at + i) * n + column));
    }
    ASSIGN_OR_RETURN(got, ReadF32(device_, grad_w_, weights + row * n + column));
    unit = 0;
  }
  // Rounded once; f32 sums of products.
  const double bound = unit * std::abs(sum) + std::ldexp(magnitude, -18) + 1e-30;
  return std::abs(static_cast<double>(got) - sum) <= bound;
}

absl::StatusOr<bool> Cell::Check(Direction direction) {
  for (DeviceBuffer* buffer : {&out_, &grad_x_}) {
    RETURN_IF_ERROR(
        CudaStatus(cudaMemsetAsync(buffer->data(), 0xFF, static_cast<size_t>(buffer->size()),
                                   device_.stream()),
                   "poisoning"));
  }
  RETURN_IF_ERROR(device_.Zero(grad_w_.data(), grad_w_.size()));
  RETURN_IF_ERROR(Run(direction));
  RETURN_IF_ERROR(device_.Drain());
  std::mt19937_64 rng(7);
  const auto below = [&rng](int64_t limit) {
    return static_cast<int64_t>(rng() % static_cast<uint64_t>(limit));
  };
  for (int i = 0; i < 96; ++i) {
    const int64_t expert = below(shape_.experts);
    const int64_t count = counts_[static_cast<size_t>(expert)];
    if (count == 0) continue;
    const bool weights = direction == Direction::kWgrad;
    const int64_t height = weights ? shape_.sums : count;
    const int64_t width = direction == Direction::kDgrad ? shape_.sums : shape_.columns;
    const int64_t row =
        i % 3 == 0 ? height - 1 - below(std::min<int64_t>(height, 9)) : below(height);
    ASSIGN_OR_RETURN(const bool right, CheckElement(direction, expert, row, below(width)));
    if (!right) return false;
  }
  return true;
}

double Cell::Flops() const {
  return 2.0 * static_cast<double>(shape_.rows) * static_cast<double>(shape_.columns) *
         static_cast<double>(shape_.sums);
}

}  // namespace expertd::bench
