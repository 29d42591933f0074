// Sm90Mlp's gradients of weights and biases.
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/sm90_maps.h"
#include "kernels/mlp/sm90_mlp.h"

namespace expertd {

absl::Status Sm90Mlp::Wgrad(const MlpWgradArgs& args) {
  if (!served_ || !sm90::CanServe(args.segments, {args.recv_x, args.h, args.grad_out, args.grad_h,
                                                  args.gradients.gate_up, args.gradients.down})) {
    return fallback_->Wgrad(args);
  }
  const int64_t total = args.segments.total;
  if (total == 0) return absl::OkStatus();
  RETURN_IF_ERROR(device_.MakeCurrent());
  RETURN_IF_ERROR(u_.Reserve(device_, total * config_.intermediate * 2));
  RETURN_IF_ERROR(CudaStatus(sm90::LaunchWeightedInner({.activation = config_.activation,
                                                        .token = config_.token_dtype,
                                                        .rows = total,
                                                        .inner = config_.intermediate,
                                                        .h = args.h,
                                                        .factors = args.recv_w,
                                                        .u = u_.data()},
                                                       device_.stream()),
                             "activation"));
  RETURN_IF_ERROR(GradWeights(args.segments, args.recv_x, config_.hidden, args.grad_h,
                              2 * config_.intermediate, args.gradients.gate_up));
  RETURN_IF_ERROR(GradWeights(args.segments, u_.data(), config_.intermediate, args.grad_out,
                              config_.hidden, args.gradients.down));
  return BiasGradients(args);
}

absl::Status Sm90Mlp::GradWeights(const ExpertSegments& segments, const void* left,
                                  int64_t left_columns, const void* right, int64_t right_columns,
                                  float* gradient) {
  const sm90::Maps maps(config_, segments.total);
  sm90::GemmParams params;
  ASSIGN_OR_RETURN(params.left, maps.Operand(left, left_columns));
  ASSIGN_OR_RETURN(params.right, maps.Operand(right, right_columns));
  ASSIGN_OR_RETURN(params.out, maps.Gradient(gradient, left_columns, right_columns));
  params.extra = params.out;
  params.grid.columns = static_cast<int>(sm90::TilesOf(right_columns));
  params.sums = static_cast<int>(left_columns);
  params.columns = static_cast<int>(right_columns);
  return Run(sm90::Product::kGradWeights, params, segments);
}

absl::Status Sm90Mlp::BiasGradients(const MlpWgradArgs& args) {
  if (!config_.gate_up_bias && !config_.down_bias) return absl::OkStatus();
  const int64_t wide = 2 * config_.intermediate;
  const auto rows_of = [&](const void* matrix, int64_t row, int64_t columns) {
    return static_cast<const void*>(static_cast<const std::byte*>(matrix) + row * columns * 2);
  };
  int64_t begin = 0;
  for (size_t j = 0; j < args.segments.counts->size(); ++j) {
    const auto expert = static_cast<int64_t>(j);
    ColumnSumsParams sums = {.rows = (*args.segments.counts)[j], .token = config_.token_dtype};
    if (config_.gate_up_bias) {
      sums.cols = wide;
      sums.matrix = rows_of(args.grad_h, begin, wide);
      sums.sums = args.gradients.gate_up_bias + expert * wide;
      RETURN_IF_ERROR(CudaStatus(LaunchColumnSums(sums, device_.stream()), "bias gradient"));
    }
    if (config_.down_bias) {
      sums.cols = config_.hidden;
      sums.matrix = rows_of(args.grad_out, begin, config_.hidden);
      sums.factors = args.recv_w == nullptr ? nullptr : args.recv_w + begin;
      sums.sums = args.gradients.down_bias + expert * config_.hidden;
      RETURN_IF_ERROR(CudaStatus(LaunchColumnSums(sums, device_.stream()), "bias gradient"));
    }
    begin += (*args.segments.padded)[j];
  }
  return absl::OkStatus();
}

}  // namespace expertd
